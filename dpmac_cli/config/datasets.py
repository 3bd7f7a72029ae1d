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
    """Default settings of a dataset, or of other records: those of the paper's runs.

    Attributes:
        model: a name of :data:`.MODELS`.
        batch_size: B, the expected batch.
        sigma: noise multiplier.
        epochs: number of epochs, each of ceil(n/B) steps.
        clip_norm: clipping norm C of the fixed ball.
        h1, h2: bounds of the estimated variance.
        physical_batch: samples processed at a time.
    """

    model: str
    batch_size: int
    sigma: float = 0.8
    epochs: int = 5
    clip_norm: float = 1.0
    h1: float = 5e-5
    h2: float = 1.0
    physical_batch: int = 1024


#: A task; datasets.toml lists the names of classes.
KnownTask = Annotated[
    Task,
    Field(validation_alias="classes"),
    BeforeValidator(lambda names: Classification(tuple(names))),
]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a network: their shape and number.

    Attributes:
        shape: shape of an input.
        outputs: number of logits per input.
        start: initial output for all records, as in :class:`~dpmac_cli.tasks.task.Task`; None for
            random ones.
        records: what the inputs are; None for features.
        lookups: number of inputs at the end that are numbers of places, not numbers.
    """

    shape: Shape
    outputs: int
    start: float | None = None
    records: Records | None = None
    lookups: int = 0


@dataclass(frozen=True)
class Dataset:
    """Public facts of a dataset.

    Attributes:
        train_size: units of privacy to train on: records, unless a unit has several.
        test_size: units to test on.
        records: what the records are.
        task: what is predicted.
        defaults: default settings.
        about: one line for help and reports.
        sha256: fingerprint of the records; None to rely on torchvision's checks.
        augment: how images may be augmented. Digits and letters must not be mirrored.
        torchvision: class of torchvision.datasets that reads it; "" for other sources.
        files: files that it reads, relative to the folder of datasets.
    """

    train_size: int
    test_size: int
    records: AnyRecords
    task: KnownTask
    defaults: Defaults
    about: str
    sha256: str | None = None
    augment: str = "crop+flip"
    torchvision: str = ""
    files: tuple[str, ...] = ()

    @property
    def signature(self) -> Signature:
        """Signature of a network on these records."""
        return Signature(self.records.shape, self.task.outputs, self.task.start, self.records)


DATASETS: Mapping[str, Dataset] = catalogue(Dataset, Path(__file__).with_name("datasets.toml"))
