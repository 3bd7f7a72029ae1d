"""Registry of networks and features, and references to user-supplied models. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.config.encoders import FeatureKind, TextEncoder
from dpmac_cli.files import table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class BuiltIn:
    """Name of a network in :data:`MODELS`."""

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
        """Return the reference without the folders above the file."""
        return str(self).rpartition("/")[2]


def parse_model(text: str) -> BuiltIn | UserModel:
    """Parse the value of ``--model``; a colon marks a factory."""
    place, colon, name = text.rpartition(":")
    return UserModel(place, name) if colon else BuiltIn(name)


@dataclass(frozen=True)
class NetworkKind:
    """A built-in network."""

    about: str  # one line for help and reports
    builder: str  # function in dpmac_cli.models.architectures
    arguments: tuple[int, ...] = ()  # arguments of the builder, after the dataset
    #: Samples of at most :data:`SMALL` pixels to process at a time, if more than the dataset's
    #: default are faster: with many weights, larger passes cost little more than small ones.
    physical_batch: int = 0

    def samples_at_a_time(self, pixels: int) -> int:
        """Return how many samples of this size fit in the memory of a batch of small ones."""
        return self.physical_batch * SMALL // max(pixels, SMALL)


#: Number of pixels of a CIFAR-10 image.
SMALL = 32 * 32

MODELS: Mapping[str, NetworkKind] = table(NetworkKind, HERE / "networks.toml")
#: Fixed, public features of images, computed by :mod:`dpmac_cli.models.features`.
FEATURES: Mapping[str, str] = {
    "scatter": "wavelet scattering with two octaves and eight angles, and group norm",
    "scatter-mirror": "scattering of opponent colours, averaged over an image and its mirror image",
}
#: Scattering features per channel (an average, 8 angles in 2 octaves, and 64 pairs of angles), and
#: the factor by which height and width shrink.
SCATTERED, SHRINK = 1 + 2 * 8 + 8**2, 4


@dataclass(frozen=True)
class Scattered(FeatureKind):
    """Fixed scattering features: a key of :data:`FEATURES`."""

    kind: str

    def shape_of(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images of a given shape."""
        channels, height, width = image
        return channels * SCATTERED, height // SHRINK, width // SHRINK

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of this shape are not supported, as the end of a sentence."""
        if image[1] % SHRINK == 0 == image[2] % SHRINK:
            return None
        return (
            f"must have a height and width that are multiples of {SHRINK}, but their shape is "
            f"{image}."
        )


#: URL of torchvision's published weights.
TORCHVISION_WEIGHTS = "https://download.pytorch.org/models/"


@dataclass(frozen=True, kw_only=True)
class BackboneKind:
    """A network with public weights."""

    about: str  # one line for help and reports
    file: str  # file of the weights, in the folder of ``package`` or at TORCHVISION_WEIGHTS
    sha256: str  # SHA-256 of the file, or its first digits
    licence: str  # licence of the weights
    package: str = ""  # Python module that holds the file; "" if torchvision publishes it
    network: str  # name of the network in torchvision, or in efficientnet_lite_pytorch
    head: str  # name in the weights' file of the layer to leave out
    width: int  # number of features per image
    size: int  # side in pixels of the images that it was trained on
    mean: tuple[float, float, float]  # subtracted per channel from pixels in [0, 1]
    std: tuple[float, float, float]  # divisor per channel
    any_size: bool = True  # whether it accepts images of other sizes
    top1: float  # published accuracy on ImageNet's validation set


BACKBONES: Mapping[str, BackboneKind] = table(BackboneKind, HERE / "backbones.toml")
#: Smallest side in pixels of images that a backbone accepts.
LEAST_SIDE = 8


@dataclass(frozen=True)
class Backbone(FeatureKind):
    """Features of a public backbone: a key of :data:`BACKBONES`, and the size to resize to.

    With ``flips`` they are the mean over an image and its mirror image.
    """

    kind: str
    size: int
    flips: bool = False

    def shape_of(self, _: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images."""
        return BACKBONES[self.kind].width, 1, 1

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of this shape are not supported, as the end of a sentence."""
        known = BACKBONES[self.kind]
        if min(image[1:]) < LEAST_SIDE:
            return (
                f"have {image[1]} x {image[2]} pixels, but a backbone needs at least {LEAST_SIDE} "
                f"x {LEAST_SIDE}. Use {{model=}}mlp without a backbone."
            )
        if image[0] not in (1, 3):
            return f"have {image[0]} channels, but a backbone needs 1 or 3."
        if self.size != known.size and not known.any_size:
            return f"must be resized to {known.size}. Leave out {{backbone_size}}."
        return None


#: Features that a network may take instead of images, or instead of tokens of texts.
Features = Scattered | Backbone | TextEncoder


@dataclass(frozen=True)
class Trained:
    """Trained part of a network with public weights: a key of :data:`PARTS`.

    ``rank`` and ``alpha`` apply to LoRA.
    """

    part: str = "all"
    rank: int = 8
    alpha: float = 16.0


PARTS: Mapping[str, str] = {
    "all": "every parameter",
    "head": "the last linear layer, or the network after a backbone",
    "norm": "the head, and scales and shifts of all normalisation layers",
    "lora": "the head, and low-rank updates of linear layers",
}
