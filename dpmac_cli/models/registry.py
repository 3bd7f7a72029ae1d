"""Networks and fixed features by name, and references to user-supplied models. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.storage.files import catalogue

HERE = Path(__file__).parent


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

MODELS: Mapping[str, NetworkKind] = catalogue(NetworkKind, HERE / "networks.toml")


#: Fixed, public features of images, computed by :mod:`dpmac_cli.models.features`.
FEATURES: Mapping[str, str] = {
    "scatter": "wavelet scattering of two octaves and eight angles, with group norm",
    "scatter-mirror": "scattering of opponent colours, averaged over an image and its mirror image",
}


#: Features per channel by scattering: an average, 8 angles of 2 octaves, and 64 pairs of angles;
#: and the factor by which height and width shrink.
SCATTERED, SHRINK = 1 + 2 * 8 + 8**2, 4


@dataclass(frozen=True)
class Scattered:
    """Fixed features by scattering: a key of :data:`FEATURES`."""

    kind: str

    def shape_of(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images of a shape."""
        channels, height, width = image
        return channels * SCATTERED, height // SHRINK, width // SHRINK

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of a shape have no such features, as the end of a sentence."""
        if image[1] % SHRINK == 0 == image[2] % SHRINK:
            return None
        return (
            f"must have a height and a width that are multiples of {SHRINK}; the shape of these is "
            f"{image}."
        )


#: Where torchvision publishes its weights.
TORCHVISION_WEIGHTS = "https://download.pytorch.org/models/"


@dataclass(frozen=True, kw_only=True)
class BackboneKind:
    """A network with public weights."""

    about: str  # one line for help and reports
    file: str  # of the weights, below the folder of ``package`` or at TORCHVISION_WEIGHTS
    sha256: str  # of the file, or its first digits
    licence: str  # of the weights
    package: str = ""  # Python module that holds the file; "" if torchvision publishes it
    network: str | tuple[float, float]  # of torchvision, or width and depth of an EfficientNet-Lite
    head: str  # name of the layer that is left out, in the weights' file
    width: int  # features of an image
    size: int  # pixels of a side of the images that it was trained on
    mean: tuple[float, float, float]  # by channel, of pixels in [0, 1], that was subtracted
    std: tuple[float, float, float]  # by channel, that was divided by
    any_size: bool = True  # whether it takes images of other sizes, too
    top1: float  # share of ImageNet's validation images that it gets right, as published


BACKBONES: Mapping[str, BackboneKind] = catalogue(BackboneKind, HERE / "backbones.toml")
#: Pixels of the smallest side of an image that a backbone is given.
LEAST_SIDE = 8


@dataclass(frozen=True)
class Backbone:
    """Features of a public backbone: a key of :data:`BACKBONES`, and the side to resize to.

    With ``flips`` they are the mean over an image and its mirror image.
    """

    kind: str
    size: int
    flips: bool = False

    def shape_of(self, _: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of images."""
        return BACKBONES[self.kind].width, 1, 1

    def fault(self, image: tuple[int, int, int]) -> str | None:
        """Return why images of a shape cannot be given to it, as the end of a sentence."""
        known = BACKBONES[self.kind]
        if min(image[1:]) < LEAST_SIDE:
            return (
                f"have {image[1]} x {image[2]} pixels, and a backbone needs {LEAST_SIDE} x "
                f"{LEAST_SIDE} or more. Use --model mlp without one."
            )
        if image[0] not in (1, 3):
            return f"have {image[0]} channels, and a backbone takes 1 or 3."
        if self.size != known.size and not known.any_size:
            return f"must be resized to {known.size}: leave out --backbone-size."
        return None


#: What a network may take in place of images.
Features = Scattered | Backbone


@dataclass(frozen=True)
class Trained:
    """The part of a network with public weights that is trained: a key of :data:`PARTS`.

    ``rank`` and ``alpha`` are LoRA's.
    """

    part: str = "all"
    rank: int = 8
    alpha: float = 16.0


PARTS: Mapping[str, str] = {
    "all": "every parameter",
    "head": "the last linear layer, or the network behind a backbone",
    "norm": "the head, and scales and shifts of all norms",
    "lora": "the head, and low-rank additions to the linear layers",
}
