"""Dataset registry: public facts, default settings, and how each dataset is loaded.

Imports nothing slow, to keep help, validation and privacy costs fast. To add a dataset, add one
entry to datasets.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from dpmac_cli.config.records import AnyRecords, Records, Shape
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
    """Inputs and outputs of a network: their shape and number."""

    shape: Shape  # of an input
    outputs: int  # logits per input
    start: float | None = None  # as in :class:`~dpmac_cli.tasks.task.Task`
    records: Records | None = None  # what the inputs are; None for features
    lookups: int = 0  # inputs at the end that are numbers of places, not numbers


@dataclass(frozen=True)
class Dataset:
    """Public facts of a dataset."""

    train_size: int  # units of privacy: records, unless a unit has several
    test_size: int
    records: AnyRecords  # what the records are
    task: KnownTask  # what is predicted
    defaults: Defaults
    about: str  # one line for help and reports
    sha256: str | None = None  # fingerprint of the files; None to rely on torchvision's checks
    augment: str = "crop+flip"  # digits and letters must not be mirrored
    torchvision: str = ""  # class of torchvision.datasets that reads it; "" for other sources
    files: tuple[str, ...] = ()  # files that it reads, relative to the folder of datasets

    @property
    def signature(self) -> Signature:
        """Signature of a network on these records."""
        return Signature(self.records.shape, self.task.outputs, self.task.start, self.records)


DATASETS: Mapping[str, Dataset] = catalogue(Dataset, Path(__file__).with_name("datasets.toml"))
