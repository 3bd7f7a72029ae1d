"""Model and feature registry: names and public facts. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FeatureKind:
    """Fixed, public features that images may be turned into.

    Attributes:
        channels: for each channel of an image. shrink: what height and width are divided by.
        groups: of the group norm behind them, where none are given.
        about: one line for help and reports.
    """

    channels: int
    shrink: int
    groups: int
    about: str


#: What computes them: :mod:`dpmac_cli.models.features`.
FEATURES: Mapping[str, FeatureKind] = {
    "scatter": FeatureKind(81, 4, 27, "wavelet scattering of two octaves and eight angles"),
}


@dataclass(frozen=True)
class Features:
    """The features of a run.

    Attributes:
        kind: a key of :data:`FEATURES`.
        groups: of the group norm behind them; 0 for none.
    """

    kind: str
    groups: int

    def shape_of(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """(channels, height, width) of the features of an image of such a shape."""
        kind, (channels, height, width) = FEATURES[self.kind], image
        return channels * kind.channels, height // kind.shrink, width // kind.shrink

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Why there are none of images of a shape, as the end of a sentence; None if there are."""
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
class Pixels:
    """Images as they are: no features."""


@dataclass(frozen=True)
class BuiltIn:
    """A network of :data:`MODELS`.

    Attributes:
        name: its key there.
    """

    name: str


@dataclass(frozen=True)
class UserModel:
    """A user-supplied network.

    Attributes:
        place: of the code: a file that ends in .py, or a module.
        factory: name of what builds it there.
    """

    place: str
    factory: str

    @property
    def spec(self) -> str:
        """Where it is, as typed."""
        return f"{self.place}:{self.factory}"

    @property
    def name(self) -> str:
        """Where it is, without the folders above it."""
        return self.spec.rpartition("/")[2]


def parse_model(text: str) -> BuiltIn | UserModel:
    """Return the network that ``--model`` names."""
    place, colon, factory = text.rpartition(":")
    return UserModel(place, factory) if colon else BuiltIn(text)


#: Model names and what they are. Builders: :data:`dpmac_cli.models.build.BUILDERS`.
MODELS: Mapping[str, str] = {
    "linear": "one linear layer, the default on --features",
    "mlp": "one hidden layer of 1000 ReLU units, the paper's MNIST network",
    "mlp-small": "one hidden layer of 64 ReLU units",
    "cnn": "three convolutions with group norm and one hidden layer, the paper's CIFAR-10 network",
    "wrn-16-4": "wide residual network, 16 layers deep and 4 times as wide, weights standardised",
    "wrn-40-4": "the same, 40 layers deep",
    "resnet18": "residual network of 18 layers with group norm",
}
