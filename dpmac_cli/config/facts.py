"""Your own dataset: how to read it, its facts, and messages about its faults. Loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import core_schema

from dpmac_cli.config.datasets import EPOCHS, STEPS_PER_EPOCH, Dataset, Defaults
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.errors import InputError, counted, raise_errors
from dpmac_cli.tasks.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.data.table_schema import TableSchema

#: File name suffixes of tables.
TABLES = (".csv", ".tsv", ".parquet")

#: Number of faults of one kind to list.
NAMED = 5
#: Smallest height and width that the convolutional network can halve twice.
LEAST_CNN = 8
#: Height and width from which fewer images are processed at a time, to save memory.
LARGE = 128
#: Public constants that images in [0, 1] may be standardised with: means and deviations.
STANDARDS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5,), (0.5,)),  # [0, 1] to [-1, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True, eq=False, repr=False)
class InMemoryData:
    """Records in memory instead of in a file: either arrays, or a data frame and its schema."""

    path: Path  # the name in angle brackets; not a file
    arrays: Mapping[str, Any] | None = None  # like those of an .npz
    frame: Any = None
    schema: "TableSchema | None" = None

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        """Return the schema of a setting, which does not validate the records."""
        return core_schema.is_instance_schema(cls)


@dataclass(frozen=True)
class Source:
    """Your own dataset and how to read it. All of it is public.

    Declared values are never taken from the records, so no record can change them. Channels, image
    size and classes that are not declared are None and are read from the records.
    """

    path: Path  # a folder, an .npz, or a table; for records in memory their name in brackets
    test_fraction: float = 0.2  # probability of holding out a record if there is no test set
    split_seed: int = 0  # seed of that split, which depends on each record alone
    channels: int | None = None  # channels that images are converted to
    image_size: int | None = None  # height and width that images are resized to
    levels: int | None = None  # value of white in grey images with 16 bits per pixel
    classes: tuple[str, ...] | None = None  # names, in the order of the labels
    standardise: str = "half"  # a key of STANDARDS
    feature_range: tuple[float, float] | None = None  # range that all columns are clipped to
    schema: "TableSchema | None" = None  # schema of a table
    in_memory: InMemoryData | None = None
    unit: str | None = None  # column, or pattern of paths, that gives the unit of each record
    skip_bad: bool = False  # leave out unusable records instead of rejecting the dataset
    texts: TextReader | None = None  # how texts are read; None for images and numbers
    task: str | None = None  # the task of records without targets; None for that of their targets

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """Return the first input and the number of inputs of each text of a record."""
        if self.texts is None:
            return ()
        if self.schema is None:
            return ((0, self.texts.limit),)
        found, first = list[tuple[int, int]](), 0
        for column in self.schema.columns:
            if column.text is not None:
                found.append((first, column.text))
            first += column.inputs
        return tuple(found)


@dataclass(frozen=True)
class LeftOut:
    """Records that are left out: one description each, and why, with their numbers."""

    records: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.records + other.records, self.reasons + other.reasons)

    def note(self, dataset: str) -> str:
        """Return a sentence on how many records of a dataset are left out, and why."""
        verb, number = "is" if len(self.records) == 1 else "are", len(self.records)
        return f"{counted(number, 'record')} of {dataset} {verb} left out: {self.why}."

    @property
    def why(self) -> str:
        """Return the reasons as a text."""
        return "; ".join(self.reasons)


NONE_LEFT_OUT = LeftOut()


class Records(NamedTuple):
    """Records, their targets, and their units; None if each is a unit."""

    x: Any  # an array, or Rows of a file
    y: "NDArray[Any]"
    units: "NDArray[Any] | None" = None

    def at(self, rows: "NDArray[Any]") -> "Records":
        """Return some records, by their numbers or a mask."""
        return Records(self.x[rows], self.y[rows], None if self.units is None else self.units[rows])


@dataclass(frozen=True)
class Findings:
    """Findings that records are not what they seem, for the person who types the command."""

    copies: int = 0  # records that are exact copies of others; 0 if they have units
    tested: tuple[int, ...] = ()  # numbers of test records that are copies of training records
    remarks: tuple[str, ...] = ()  # sentences on values that use little of their range, and others
    expected: bool = False  # whether equal records are a matter of course, as with few columns


@dataclass(frozen=True, kw_only=True)
class DataFacts(Dataset):
    """Facts of a dataset, read once, when a run is configured.

    ``inferred`` lists which of "channels", "image size" and "classes" were read from the records.
    One record can change those, so they are public only by decision. ``skipped``, ``why``,
    ``untested`` and ``signs`` are never published, because one record can change them. ``records``
    are no fact: they are neither compared nor copied to other processes.
    """

    name: str  # without the folders above it
    # Your own dataset and how to read it; None for a registered one.
    source: Source | None = field(default=None, compare=False)
    held_out: bool = False  # the test records were split off from the private ones
    unit: str = ""  # description of the unit of privacy; "" if it is one record
    inferred: tuple[str, ...] = ()
    # For private notes. They are not shown with the facts.
    skipped: tuple[str, ...] = field(default=(), repr=False)  # records left out
    why: tuple[str, ...] = field(default=(), repr=False)  # reasons, with the number of records
    untested: tuple[str, ...] = field(default=(), repr=False)  # classes without a test record
    findings: Findings = field(default=Findings(), repr=False)
    # Of training and of testing; none if the facts came from another process.
    records: Sequence[Records] = field(default=(), compare=False, repr=False)

    @property
    def typed(self) -> str:
        """Return the value of ``--dataset``: a registered name, or a path."""
        return self.name if self.source is None else str(self.source.path)

    @property
    def chosen(self) -> str | Source:
        """Return what to load: a registered name, or your own dataset."""
        return self.source or self.name

    @property
    def schema(self) -> "TableSchema | None":
        """Return the declared schema of a table; None for other data."""
        return None if self.source is None else self.source.schema

    @property
    def reader(self) -> TextReader | None:
        """Return how texts are read; None if there are none."""
        return None if self.source is None else self.source.texts

    @property
    def public(self) -> Dataset:
        """Return the facts that the registry has of its datasets."""
        return Dataset(**{each.name: getattr(self, each.name) for each in fields(Dataset)})

    def __getstate__(self) -> dict[str, Any]:
        """Return the facts without the records."""
        source = None if self.source is None else replace(self.source, in_memory=None)
        return {**vars(self), "source": source, "records": ()}


def listed(parts: Sequence[str]) -> str:
    """Return names as a phrase: "channels, image size and classes"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def escaped(text: str) -> str:
    """Return text with escapes for characters that a terminal may take for commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some_of(faults: Sequence[str]) -> list[str]:
    """Return a text that lists some faults of one kind and counts the rest; [] for none."""
    faults = [escaped(fault) for fault in faults]
    more = f", and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return [f"{'; '.join(faults[:NAMED])}{more}"] if faults else []


def complaints(faults: Sequence[str], remedy: str = "") -> list[str]:
    """Return a sentence like :func:`some_of`, with what to do; [] for none."""
    return [f"{text}.{remedy}" for text in some_of(faults)]


def refuse(faults: Sequence[str], remedy: str = "") -> None:
    """Raise for faults of one kind."""
    raise_errors(complaints(faults, remedy))


def left_out(descriptions: Sequence[str]) -> LeftOut:
    """Return records that are left out, given a description of each that says why."""
    return LeftOut(tuple(descriptions), tuple(some_of(descriptions)))


def dataset_of(
    source: Source,
    sizes: tuple[int, int],
    shape: tuple[int, int, int],
    task: Task,
    ends: "NDArray[Any] | None" = None,
    array: tuple[int, ...] = (),
) -> Dataset:
    """Return facts like those of the registry, with conservative defaults. Raises InputError.

    Args:
        sizes: numbers of units to train on and to test on.
        ends: limits of the range of numbers, shape (2, columns); None for images.
        array: shape of a record of numbers in its array; () for images.
    """
    if ends is None:
        constants = _constants(source, shape[0])
    else:  # that scale numbers to [-1, 1], one per column
        low, high = ends
        constants = tuple(((low + high) / 2).tolist()), tuple(((high - low) / 2).tolist())
    return Dataset(
        *(*sizes, shape, task, *constants, _defaults(sizes[0], shape), "your own"),
        levels=255 if ends is None else 1,
        texts=source.layout,
        array=array,
    )


def _defaults(train: int, shape: tuple[int, int, int]) -> Defaults:
    """Return the default settings for ``train`` units with records of a shape."""
    batch = -(-train // STEPS_PER_EPOCH)
    if min(shape[1:]) < LEAST_CNN:
        return Defaults("mlp", batch, epochs=EPOCHS, h1=1e-9, h2=1e-6)
    physical = max(1, min(32, 32 * LARGE**2 // (shape[1] * shape[2])))
    return Defaults("cnn", batch, epochs=EPOCHS, physical_batch=physical)


def _constants(source: Source, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the chosen mean and standard deviation per channel. Raises InputError."""
    mean, std = STANDARDS[source.standardise]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise InputError(
            f"{{standardise=}}{source.standardise} is for {len(mean)} channels, but the images of "
            f"{source.path} have {channels}. Use {{standardise=}}half."
        )
    return mean, std
