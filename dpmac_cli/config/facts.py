"""Facts of a dataset, notes on its records, and messages about its faults. Loads nothing.

Facts are public: they appear in reports and determine the privacy cost. Notes are private, because
one record can change them: they are shown to the person who holds the records, and never written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

from dpmac_cli.config.datasets import DATASETS, EPOCHS, STEPS_PER_EPOCH, Dataset, Defaults
from dpmac_cli.config.records import AnyRecords, Records
from dpmac_cli.errors import InputError, counted, escaped, raise_errors
from dpmac_cli.tasks.task import Task

if TYPE_CHECKING:
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
    """Records in memory instead of in a file: either arrays, or a data frame and its schema.

    Two of them are equal only if they are the same object, because records are not compared.

    Attributes:
        path: name in angle brackets, such as "<table>"; not a file.
        arrays: arrays by name like those of an .npz; None for a data frame.
        frame: data frame, or dataset of Hugging Face; None for arrays.
        schema: declared schema of the columns of a data frame.
        inferred: parts of the schema that were read from the records.
    """

    path: Path
    arrays: Mapping[str, Any] | None = None
    frame: Any = None
    schema: "TableSchema | None" = None
    inferred: tuple[str, ...] = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        """Return the schema of a setting, which does not validate the records."""
        return core_schema.is_instance_schema(cls)

    def __str__(self) -> str:
        return str(self.path)


def in_memory(value: Any) -> InMemoryData | None:
    """Return a data frame, or a dataset of Hugging Face, as records in memory; None for others.

    They are recognised by the attributes of their classes, so no library is imported.

    Args:
        value: the value of ``dataset=`` in a program.
    """
    kind = type(value)  # an attribute of a frame may be one of its columns
    if hasattr(kind, "column_names") and (hasattr(kind, "features") or hasattr(kind, "values")):
        return InMemoryData(Path("<dataset>"), frame=value)
    if hasattr(kind, "column_names") or (hasattr(kind, "columns") and hasattr(kind, "dtypes")):
        return InMemoryData(Path("<table>"), frame=value)
    return None


@dataclass(frozen=True)
class LeftOut:
    """Records that are left out, and why. ``+`` joins two of them.

    Attributes:
        records: one description of each, such as "row 3: age is missing".
        reasons: phrases without a full stop on why, each of which names some of the records. Fewer
            than records, because records with the same reason share one.
    """

    records: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.records + other.records, self.reasons + other.reasons)

    def note(self, dataset: str) -> str:
        """Return a sentence on how many records of a dataset are left out, and why.

        Args:
            dataset: name of the dataset.

        >>> LeftOut(("row 3: age is missing",), ("row 3: age is missing",)).note("a.csv")
        '1 record of a.csv is left out: row 3: age is missing.'
        """
        number = len(self.records)
        verb = "is" if number == 1 else "are"
        return f"{counted(number, 'record')} of {dataset} {verb} left out: {self.why}."

    @property
    def why(self) -> str:
        """Return the reasons as one text, without a full stop; "" without any."""
        return "; ".join(self.reasons)


NONE_LEFT_OUT = LeftOut()


@dataclass(frozen=True)
class PrivateNotes:
    """Findings about records, for the person who holds them. One record can change them.

    Attributes:
        left_out: records that are left out, and why.
        untested: names of classes without a test record.
        copies: number of records that are exact copies of others; 0 if they have units.
        tested: numbers of test records that are copies of training records.
        remarks: sentences on values that use little of their range, and others.
        expected: whether equal records are a matter of course, as with few columns.
    """

    left_out: LeftOut = NONE_LEFT_OUT
    untested: tuple[str, ...] = ()
    copies: int = 0
    tested: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    expected: bool = False


@dataclass(frozen=True, kw_only=True)
class DataFacts(Dataset):
    """Public facts of a dataset, read once, when a run is configured.

    Attributes:
        name: name of the dataset, without the folders above it.
        typed: the value of ``--dataset``: a registered name, or a path.
        user_supplied: whether it is your own dataset, not a registered one.
        schema: declared schema of a table; None for other data.
        held_out: whether the test records were split off from the private ones.
        unit: description of the unit of privacy; "" if it is one record.
        inferred: which of "channels", "image size", "classes" and "kinds of columns" were read from
            the records. One record can change those, so they are public only by decision.
    """

    name: str
    typed: str
    user_supplied: bool = False
    schema: "TableSchema | None" = None
    held_out: bool = False
    unit: str = ""
    inferred: tuple[str, ...] = ()

    @property
    def public(self) -> Dataset:
        """Return the facts that the registry has of its datasets."""
        return Dataset(**{field.name: getattr(self, field.name) for field in fields(Dataset)})


def published_facts(name: str, unit: str | None = None) -> DataFacts:
    """Return the facts of a registered dataset, of which no record is read.

    Args:
        name: a name of :data:`.DATASETS`.
        unit: the setting ``unit``.

    Raises:
        InputError: a ``unit`` was given, which no registered dataset tells.
    """
    if unit is not None:
        raise InputError(
            f"{{unit=}}{unit}: {name} does not contain the units of records. Use "
            "a table, a folder, or an .npz with an array unit."
        )
    return DataFacts(**vars(DATASETS[name]), name=name, typed=name)


def listed(parts: Sequence[str]) -> str:
    """Return names as a phrase.

    Example:
        >>> listed(["channels", "image size", "classes"])
        'channels, image size and classes'
    """
    if len(parts) < 2:
        return "".join(parts)
    *first, last = parts
    return f"{', '.join(first)} and {last}"


def first_of(names: Iterable[str]) -> str:
    """Return the first of some names, and how many others there are.

    Example:
        >>> first_of("abcdefg")
        'a, b, c, d, e and 2 more'
    """
    different = list(dict.fromkeys(names))
    others = len(different) - NAMED
    if others > 0:
        different = [*different[:NAMED], f"{others} more"]
    return escaped(listed(different))


def some_of(faults: Sequence[str]) -> list[str]:
    """Return a text that lists some faults of one kind and counts the rest; [] for none.

    Args:
        faults: phrases without a full stop. Their control characters are escaped.

    Example:
        >>> some_of(["row 1", "row 2"])
        ['row 1; row 2']
    """
    if not faults:
        return []
    named = "; ".join(escaped(fault) for fault in faults[:NAMED])
    more = f", and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return [f"{named}{more}"]


def complaints(faults: Sequence[str], remedy: str = "") -> list[str]:
    """Return a sentence like :func:`some_of`, with what to do; [] for none.

    Args:
        faults: faults of one kind, each without a full stop.
        remedy: a sentence that begins with a space; "" for none.

    Example:
        >>> complaints(["row 1", "row 2"], " Remove them.")
        ['row 1; row 2. Remove them.']
    """
    return [f"{text}.{remedy}" for text in some_of(faults)]


def refuse(faults: Sequence[str], remedy: str = "") -> None:
    """Raise InputError for faults of one kind; do nothing for none.

    Args:
        faults, remedy: as in :func:`complaints`.
    """
    raise_errors(complaints(faults, remedy))


def check_name(*names: str) -> None:
    """Reject names with characters that a terminal may take for commands.

    Raises:
        InputError: lists the names, escaped.
    """
    faults = list[str]()
    for name in names:
        if not name.isprintable():
            faults.append(f"The name {name!a} contains characters that cannot be displayed")
    refuse(faults, " A terminal may interpret them as commands. Choose another name.")


def left_out(descriptions: Sequence[str]) -> LeftOut:
    """Return records that are left out, given a description of each that says why.

    Args:
        descriptions: one for each record, such as "row 3: age is missing".
    """
    return LeftOut(tuple(descriptions), tuple(some_of(descriptions)))


def dataset_of(sizes: tuple[int, int], records: AnyRecords, task: Task) -> Dataset:
    """Return facts like those of the registry, with conservative defaults.

    Args:
        sizes: numbers of units to train on and to test on.
        records: what the records are.
        task: what is predicted.
    """
    return Dataset(*sizes, records, task, _defaults(sizes[0], records), "your own")


def _defaults(train: int, records: Records) -> Defaults:
    """Return the default settings for ``train`` units with records of a kind.

    Rows, and images that the convolutional network cannot halve twice, get a perceptron.
    """
    batch = -(-train // STEPS_PER_EPOCH)
    if records.channels == records.size or min(records.shape[-2:]) < LEAST_CNN:
        return Defaults("mlp", batch, epochs=EPOCHS, h1=1e-9, h2=1e-6)
    physical = max(1, min(32, 32 * LARGE**2 // records.pixels))
    return Defaults("cnn", batch, epochs=EPOCHS, physical_batch=physical)
