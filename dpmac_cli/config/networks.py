"""Registry of networks and features, and references to user-supplied models. Imports no torch.

A network is built by :mod:`dpmac_cli.models.build`, and features are computed by
:mod:`dpmac_cli.features`. Here is what help, defaults, checks and reports need of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dpmac_cli.config.encoders import FeatureKind, TextEncoder
from dpmac_cli.config.records import Records, Table, inputs_of
from dpmac_cli.errors import InputError
from dpmac_cli.files import table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class BuiltIn:
    """A network of dpmac.

    Attributes:
        name: its name in :data:`MODELS`.
    """

    name: str


@dataclass(frozen=True)
class UserModel:
    """A factory in a file, ``net.py:make``, or in an importable module, ``package.net:make``.

    Attributes:
        place: path of the file, or name of the module.
        factory: name of the function or class in it.
    """

    place: str
    factory: str

    def __str__(self) -> str:
        return f"{self.place}:{self.factory}"

    @property
    def name(self) -> str:
        """Return the reference without the folders above the file."""
        return str(self).rpartition("/")[2]


def parse_model(text: str) -> BuiltIn | UserModel:
    """Parse the value of ``--model``: a colon marks a factory, anything else is a built-in network.

    Whether there is such a network or factory is not checked.

    Args:
        text: name of a built-in network, "FILE.py:FACTORY" or "MODULE:FACTORY".

    Example:
        >>> parse_model("mlp"), parse_model("nets/small.py:make").name
        (BuiltIn(name='mlp'), 'small.py:make')
    """
    place, colon, name = text.rpartition(":")
    return UserModel(place, name) if colon else BuiltIn(name)


@dataclass(frozen=True)
class NetworkKind:
    """A built-in network: a row of networks.toml.

    Attributes:
        about: one line for help and reports.
        builder: function in :mod:`dpmac_cli.models.architectures`.
        arguments: arguments of the builder, after the signature of the records.
        physical_batch: samples of at most :data:`SMALL` pixels to process at a time, if more than
            the dataset's default are faster: with many weights, larger passes cost little more than
            small ones.
    """

    about: str
    builder: str
    arguments: tuple[int, ...] = ()
    physical_batch: int = 0

    @property
    def of_images(self) -> bool:
        """Return whether it takes images, and no rows of numbers."""
        return self.builder not in ("perceptron", "passed_on")

    def samples_at_a_time(self, pixels: int) -> int:
        """Return how many samples of this size fit in the memory of a batch of small ones.

        Args:
            pixels: height times width of an image.
        """
        return self.physical_batch * SMALL // max(pixels, SMALL)


#: Number of pixels of a CIFAR-10 image.
SMALL = 32 * 32

MODELS: Mapping[str, NetworkKind] = table(NetworkKind, HERE / "networks.toml")
#: Name of the features of tables.
COLUMNS = "columns"
#: Scattering features per channel (an average, 8 angles in 2 octaves, and 64 pairs of angles), and
#: the factor by which height and width shrink.
SCATTERED, SHRINK = 1 + 2 * 8 + 8**2, 4


@dataclass(frozen=True)
class FixedFeatures(FeatureKind):
    """Fixed features of :data:`FEATURES`, computed once for each record before training.

    :data:`dpmac_cli.features.fixed.BUILDERS` has what computes them. Subclasses also define
    :attr:`statement`.

    Attributes:
        kind: their name.
        about: what they are, for help and reports.
        stored: dtype that they are stored in, as in torch.
    """

    stored: ClassVar[str] = "float32"

    kind: str
    about: str = field(default="", compare=False, repr=False, kw_only=True)

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values of everything that determines the features: their name."""
        return {"kind": self.kind}

    @property
    def statement(self) -> str:
        """Return what the features depend on: a full sentence of reports and cards."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scattered(FixedFeatures):
    """Wavelet scattering features of images (Bruna and Mallat 2013, arXiv 1203.1513).

    With two octaves and eight angles, as in Tramer and Boneh 2021, arXiv 2011.11660.

    Attributes:
        mirrored: whether they are of opponent colours, and the mean over an image and its mirror
            image.
    """

    stored: ClassVar[str] = "float16"

    mirrored: bool = False

    @property
    def statement(self) -> str:
        """Return what they depend on, a sentence of reports and cards."""
        return (
            f"The network takes fixed features of an image ({self.about}), which depend on that "
            "image alone and contain nothing that was learnt."
        )

    def shape_of(self, records: Records) -> tuple[int, ...]:
        """Return (channels, height, width) of the features of images."""
        channels, height, width = records.shape
        return channels * SCATTERED, height // SHRINK, width // SHRINK

    def fault(self, records: Records) -> str | None:
        """Return why images of this shape are not supported, as the end of a sentence."""
        _, height, width = records.shape
        if height % SHRINK == 0 == width % SHRINK:
            return None
        return (
            f"must have a height and width that are multiples of {SHRINK}, but their shape is "
            f"{records.shape}."
        )


@dataclass(frozen=True)
class TableColumns(FixedFeatures):
    """Inputs of each column of a table: a number and its hats, and so on.

    :func:`~dpmac_cli.config.records.inputs_of` has the number of inputs of each kind of column.
    """

    reads: ClassVar = "table"
    #: The middle of the range of a number, and equal logits: noise leaves few steps to unlearn.
    start: ClassVar[float | None] = 0.0

    def shape_of(self, records: Records) -> tuple[int, ...]:
        """Return the number of inputs of a row: numbers, and then one place for each hash."""
        assert isinstance(records, Table)  # noqa: S101  (it reads tables alone)
        return (sum(inputs_of(kind, width) for kind, width in records.columns),)

    @property
    def statement(self) -> str:
        """Return what they depend on, a sentence of reports and cards."""
        return (
            f"The network takes fixed functions of each column ({self.about}), which depend on "
            "their row alone."
        )

    def lookups(self, records: Records) -> int:
        """Return the number of inputs at the end that are places."""
        return records.count("hashed") if isinstance(records, Table) else 0


@dataclass(frozen=True)
class OwnFeatures(FixedFeatures):
    """Features of :func:`register_features`: a function of one record.

    Attributes:
        function: maps a record to ``width`` numbers.
        width: number of features.
    """

    function: Callable[[Any], Any]
    width: int

    reads: ClassVar = "images, numbers or a table"

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values that tell the function from an earlier one of its name."""
        code = _code_of(getattr(self.function, "__code__", None))
        return {"kind": self.kind, "code": code}

    @property
    def statement(self) -> str:
        """Return what they depend on, a sentence of reports and cards."""
        return (
            f"The network takes features of each record from a function of the program "
            f"({self.about}), which sees one record at a time. That it was made without the "
            "records above is declared by whoever trained the model; epsilon does not cover it."
        )

    def shape_of(self, _: Records) -> tuple[int, ...]:
        """Return the shape of the features of a record."""
        return (self.width,)


def _code_of(code: Any) -> str:
    """Return the instructions, names and constants of a function's code as text."""
    if not hasattr(code, "co_code"):
        return repr(code)
    constants = ", ".join(map(_code_of, code.co_consts))
    return f"{code.co_code.hex()} {code.co_names} ({constants})"


#: Fixed, public features by name, also those of :func:`register_features`.
FEATURES: dict[str, FixedFeatures] = {
    "scatter": Scattered(
        "scatter",
        about="wavelet scattering with two octaves and eight angles, and group norm",
    ),
    "scatter-mirror": Scattered(
        "scatter-mirror",
        mirrored=True,
        about="scattering of opponent colours, averaged over an image and its mirror image",
    ),
    COLUMNS: TableColumns(
        COLUMNS,
        about="numbers of a table with nine hats each, and with their ranks if no range is "
        "declared",
    ),
}

Function = TypeVar("Function", bound=Callable[[Any], Any])


def register_features(name: str, width: int, about: str = "") -> Callable[[Function], Function]:
    """Register a function that turns a record into features, for ``--features`` and ``features=``.

    It gets one record as a float32 tensor, standardised: an image of shape (channels, height,
    width), or numbers, shape (columns,). It returns ``width`` numbers, as a tensor or anything that
    torch can convert to one. Features are computed once per record, before training, and have no
    privacy cost: the function must be the same for all records, and made without private ones.
    What is published is the name. A program that evaluates or predicts registers the same function.

    Args:
        name: name in commands and reports. An earlier function of that name is replaced.
        width: number of features, at least 1.
        about: what the features are, for help and reports; the name by default.

    Raises:
        InputError: the name is that of features that dpmac has, or the width is no positive
            integer.
    """
    known = FEATURES.get(name)
    if known is not None and not isinstance(known, OwnFeatures):
        raise InputError(f"The features {name} are dpmac's own. Choose another name.")
    if not isinstance(width, int) or width < 1:
        raise InputError(f"width must be the number of features, an integer from 1, not {width!r}.")

    def register(function: Function) -> Function:
        FEATURES[name] = OwnFeatures(name, function, width, about=about or name)
        return function

    return register


#: URL of torchvision's published weights.
TORCHVISION_WEIGHTS = "https://download.pytorch.org/models/"


@dataclass(frozen=True, kw_only=True)
class BackboneKind:
    """A network with public weights: a row of backbones.toml.

    Attributes:
        about: one line for help and reports.
        file: file of the weights, in the folder of ``package`` or at TORCHVISION_WEIGHTS.
        sha256: SHA-256 of the file, or its first digits.
        licence: licence of the weights.
        package: Python module that holds the file; "" if torchvision publishes it.
        network: name of the network in torchvision, or in efficientnet_lite_pytorch.
        head: name in the weights' file of the layer to leave out.
        width: number of features per image.
        size: side in pixels of the images that it was trained on.
        mean: subtracted per channel from pixels in [0, 1].
        std: divisor per channel.
        any_size: whether it accepts images of other sizes.
        top1: published accuracy on ImageNet's validation set, from 0 to 1.
    """

    about: str
    file: str
    sha256: str
    licence: str
    package: str = ""
    network: str
    head: str
    width: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    any_size: bool = True
    top1: float


BACKBONES: Mapping[str, BackboneKind] = table(BackboneKind, HERE / "backbones.toml")
#: Smallest side in pixels of images that a backbone accepts.
LEAST_SIDE = 8


@dataclass(frozen=True)
class Backbone(FeatureKind):
    """Features of images by a public network, one vector for each image.

    Attributes:
        kind: a key of :data:`BACKBONES`.
        size: height and width in pixels that images are resized to.
        flips: whether they are the mean over an image and its mirror image.
    """

    kind: str
    size: int
    flips: bool = False

    def shape_of(self, _: Records) -> tuple[int, ...]:
        """Return the shape of the features of an image."""
        return (BACKBONES[self.kind].width,)

    def fault(self, records: Records) -> str | None:
        """Return why images of this shape are not supported, as the end of a sentence."""
        known = BACKBONES[self.kind]
        channels, height, width = records.shape
        if min(height, width) < LEAST_SIDE:
            return (
                f"have {height} x {width} pixels, but a backbone needs at least {LEAST_SIDE} "
                f"x {LEAST_SIDE}. Use {{model=}}mlp without a backbone."
            )
        if channels not in (1, 3):
            return f"have {channels} channels, but a backbone needs 1 or 3."
        if self.size != known.size and not known.any_size:
            return f"must be resized to {known.size}. Leave out {{backbone_size}}."
        return None


#: Features that a network may take instead of images, or instead of tokens of texts.
Features = FixedFeatures | Backbone | TextEncoder


@dataclass(frozen=True)
class Trained:
    """Trained part of a network with public weights.

    Attributes:
        part: a key of :data:`PARTS`.
        rank: rank of the updates of LoRA; other parts have none.
    """

    part: str = "all"
    rank: int = 8


PARTS: Mapping[str, str] = {
    "all": "every parameter",
    "head": "the last linear layer, or the network after a backbone",
    "norm": "the head, and scales and shifts of all normalisation layers",
    "lora": "the head, and low-rank updates of linear layers",
}
