"""Dataset registry: public facts, default settings, and how each dataset is loaded.

Imports nothing slow, to keep help, validation and privacy costs fast. To add a dataset, add one
entry to datasets.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from dpmac_cli.files import catalogue
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.task import Task

#: Steps per epoch, and epochs, for datasets without tuned defaults: see docs/recipes.md.
STEPS_PER_EPOCH, EPOCHS = 12, 20


@dataclass(frozen=True)
class Defaults:
    """Default settings of a dataset, or of other records."""

    model: str  # a name of MODELS
    batch_size: int  # B, the expected batch
    sigma: float = 0.8  # noise multiplier
    epochs: int = 5  # each of ceil(n/B) steps
    clip_norm: float = 1.0  # clipping norm C of the fixed ball
    h1: float = 5e-5  # bounds of the estimated variance
    h2: float = 1.0
    physical_batch: int = 1024  # samples processed at a time


#: A task; datasets.toml lists the names of classes.
KnownTask = Annotated[
    Task,
    Field(validation_alias="classes"),
    BeforeValidator(lambda names: Classification(tuple(names))),
]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a network: their shape, standardisation and number."""

    shape: tuple[int, int, int]  # (channels, height, width) of an input
    record: tuple[int, ...]  # shape of an input as a network gets it, such as (columns,)
    outputs: int  # logits per input
    mean: tuple[float, ...]  # per channel, as in :class:`Dataset`
    std: tuple[float, ...]
    start: float | None = None  # as in :class:`~dpmac_cli.tasks.task.Task`


#: Levels, and means and standard deviations by channel.
Constants: TypeAlias = tuple[int, tuple[float, ...], tuple[float, ...]]


def constants_of(
    levels: int, mean: tuple[float, ...], std: tuple[float, ...], *, standardised: bool
) -> Constants:
    """Return constants of standardisation; those that change nothing unless ``standardised``."""
    if standardised:
        return levels, mean, std
    return 1, (0.0,) * len(mean), (1.0,) * len(std)


@dataclass(frozen=True)
class Dataset:
    """Public facts of a dataset."""

    train_size: int  # units of privacy: records, unless a unit has several
    test_size: int
    shape: tuple[int, int, int]  # (channels, height, width) of an image
    task: KnownTask  # what is predicted
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]; images are standardised with them
    std: tuple[float, ...]
    defaults: Defaults
    about: str  # one line for help and reports
    levels: int = 255  # the largest pixel value, by which pixels are divided; 1 for numbers
    sha256: str | None = None  # fingerprint of the files; None to rely on torchvision's checks
    augment: str = "crop+flip"  # digits and letters must not be mirrored
    texts: tuple[tuple[int, int], ...] = ()  # first input and number of inputs of each text
    torchvision: str = ""  # class of torchvision.datasets that reads it; "" for other sources
    files: tuple[str, ...] = ()  # files that it reads, relative to the folder of datasets
    array: tuple[int, ...] = ()  # shape of a record of numbers in its array; () for images
    standardised: bool = True  # whether the network takes standardised records, or those given

    @property
    def constants(self) -> Constants:
        """Return levels, means and deviations by which records are standardised."""
        return constants_of(self.levels, self.mean, self.std, standardised=self.standardised)

    @property
    def signature(self) -> Signature:
        """Signature of a built-in network on these records, which gets them as images."""
        task = self.task
        return Signature(self.shape, self.shape, task.outputs, self.mean, self.std, task.start)

    @property
    def record(self) -> tuple[int, ...]:
        """Shape in which a user-supplied network gets a record: that of the array."""
        return self.array or self.shape

    @property
    def holds(self) -> Literal["images", "texts", "numbers"]:
        """Return what records are."""
        return "images" if self.is_images else "texts" if self.texts else "numbers"

    @property
    def is_images(self) -> bool:
        """Return whether records are 8-bit images, not numbers."""
        return self.levels > 1


DATASETS: Mapping[str, Dataset] = catalogue(Dataset, Path(__file__).with_name("datasets.toml"))
