"""Your own dataset: where it is, how to read it, and what was found there. Loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.data.registry import Dataset

if TYPE_CHECKING:
    from dpmac_cli.data.table_schema import TableSchema

#: Endings of files that hold tables.
TABLES = (".csv", ".tsv", ".parquet")

#: Public constants that images in [0, 1] may be standardised with: means and deviations.
STANDARDS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5,), (0.5,)),  # [0, 1] to [-1, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True, eq=False, repr=False)
class AtHand:
    """Records in memory, in place of a file: either arrays, or a data frame and its schema."""

    path: Path  # their name in angle brackets; no file has it
    arrays: Mapping[str, Any] | None = None  # like those of an .npz
    frame: Any = None
    schema: "TableSchema | None" = None


@dataclass(frozen=True)
class Source:
    """Your own dataset and how to read it. All of it is public.

    What is declared is never taken from the records, so that no record can change it. None is for
    what is not declared: channels, size and classes are those of the records then.
    """

    path: Path  # a folder, an .npz, or a table; of records at hand their name in brackets
    test_fraction: float = 0.2  # probability that a record is held out, without a test set
    split_seed: int = 0  # of that choice, which depends on each record alone
    channels: int | None = None  # that images are converted to
    image_size: int | None = None  # height and width that images are resized to
    classes: tuple[str, ...] | None = None  # names, in the order of the labels
    standardise: str = "half"  # a key of STANDARDS
    feature_range: tuple[float, float] | None = None  # that all columns are clipped to
    schema: "TableSchema | None" = None  # of a table
    at_hand: AtHand | None = None
    unit: str | None = None  # column, or pattern of paths, that tells which unit a record is of
    skip_bad: bool = False  # leave out records that cannot be used, instead of refusing the dataset


@dataclass(frozen=True)
class Found:
    """Facts of a dataset, read once, when a run is configured.

    ``inferred`` names what was taken from the records, of "channels", "image size" and "classes":
    one record can change that, so it is public only by decision. ``skipped``, ``untested`` and
    ``repeated`` are never published: one record can change them.
    """

    facts: Dataset
    name: str  # without the folders above it
    held_out: bool = False  # the test records were split off the private ones
    unit: str = ""  # of privacy, in words; "" where it is one record
    inferred: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # records left out
    untested: tuple[str, ...] = ()  # classes without a test record
    repeated: str = ""  # file whose name suggests several images of one person


def listed(parts: Sequence[str]) -> str:
    """Return names as a phrase: "channels, image size and classes"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
