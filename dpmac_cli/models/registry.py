"""Networks and fixed features by name, and references to user-supplied models. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A network of :data:`MODELS`, by name."""

    name: str


@dataclass(frozen=True)
class UserModel:
    """A factory in a file, ``net.py:make``, or in an importable module, ``package.net:make``."""

    place: str
    factory: str

    def __str__(self) -> str:
        return f"{self.place}:{self.factory}"

    @property
    def name(self) -> str:
        """The reference without the folders above the file."""
        return str(self).rpartition("/")[2]


def parse_model(text: str) -> BuiltIn | UserModel:
    """Return the model that the text of ``--model`` refers to; a colon marks a factory."""
    place, colon, name = text.rpartition(":")
    return UserModel(place, name) if colon else BuiltIn(name)


@dataclass(frozen=True)
class NetworkKind:
    """A built-in network."""

    about: str  # one line for help and reports
    builder: str  # function of dpmac_cli.models.architectures
    arguments: tuple[int, ...] = ()  # of the builder, after the dataset
    #: Samples worked on at a time, of :data:`SMALL` pixels or fewer, where more than the data set's
    #: are faster: each pass over many weights costs as much as one over few samples.
    physical_batch: int = 0

    def samples_at_a_time(self, pixels: int) -> int:
        """Return how many samples of that many pixels need no more memory than small ones."""
        return self.physical_batch * SMALL // max(pixels, SMALL)


#: Pixels of an image of CIFAR-10.
SMALL = 32 * 32

MODELS: Mapping[str, NetworkKind] = {
    "linear": NetworkKind(
        "one linear layer, the default on --features", "perceptron", physical_batch=1024
    ),
    "mlp": NetworkKind(
        "one hidden layer of 1000 ReLU units, the paper's MNIST network",
        "perceptron",
        (1000,),
        physical_batch=1024,
    ),
    "mlp-small": NetworkKind(
        "one hidden layer of 64 ReLU units", "perceptron", (64,), physical_batch=1024
    ),
    "cnn": NetworkKind(
        "three convolutions with group norm and one hidden layer, the paper's CIFAR-10 network",
        "cnn",
    ),
    "wrn-16-4": NetworkKind(
        "wide residual network, 16 layers deep and 4 times as wide, weights standardised",
        "wide_resnet",
        (16, 4),
    ),
    "wrn-40-4": NetworkKind("the same, 40 layers deep", "wide_resnet", (40, 4)),
    "resnet18": NetworkKind(
        "residual network of 18 layers with group norm", "resnet18", physical_batch=128
    ),
}


@dataclass(frozen=True)
class FeatureKind:
    """Fixed, public features of images, computed by :mod:`dpmac_cli.models.features`."""

    channels: int  # per channel of an image
    shrink: int  # factor by which height and width are divided
    groups: int  # default for the group norm behind the features
    about: str  # one line for help and reports


FEATURES: Mapping[str, FeatureKind] = {
    "scatter": FeatureKind(81, 4, 27, "wavelet scattering of two octaves and eight angles"),
}


@dataclass(frozen=True)
class Pixels:
    """Images as they are, without features."""


@dataclass(frozen=True)
class Features:
    """The features of a run: a key of :data:`FEATURES`, and groups of the norm or 0 for none."""

    kind: str
    groups: int

    def shape_of(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images of a shape."""
        kind, (channels, height, width) = FEATURES[self.kind], image
        return channels * kind.channels, height // kind.shrink, width // kind.shrink

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of a shape have no such features, as the end of a sentence."""
        kind, (_, height, width) = FEATURES[self.kind], image
        if height % kind.shrink or width % kind.shrink:
            return (
                f"must have a height and a width that are multiples of {kind.shrink}; the shape of "
                f"these is {image}."
            )
        channels = self.shape_of(image)[0]
        if self.groups and channels % self.groups:
            return (
                f"give {channels} channels, which {self.groups} groups do not divide: choose a "
                "--feature-groups that does, or 0 for no norm."
            )
        return None
