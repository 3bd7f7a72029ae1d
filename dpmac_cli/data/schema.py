"""Your own dataset: where it is, how to read it, and what was found there. Loads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.data.registry import DATASETS, Dataset

#: Public constants that images in [0, 1] may be standardised with: means and deviations.
STANDARDS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5,), (0.5,)),  # [0, 1] to [-1, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Source:
    """Your own dataset and how to read it. All of it is public.

    What is declared is never taken from the records, so that no record can change it.

    Attributes:
        path: a folder, or an .npz.
        test_fraction: probability that a record is held out, where there is no test set.
        split_seed: seed of that choice, which depends on each record alone.
        channels: of the images, which are converted to it; None to take it from the records.
        image_size: height and width to resize images to; None to leave them as they are.
        classes: names, in the order of the labels; None to take them from the records.
        standardise: a key of :data:`STANDARDS`.
        feature_range: what every column of a table is clipped to; None where the file says.
        skip_bad: leave out records that cannot be used, instead of refusing the dataset.
    """

    path: Path
    test_fraction: float = 0.2
    split_seed: int = 0
    channels: int | None = None
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    standardise: str = "half"
    feature_range: tuple[float, float] | None = None
    skip_bad: bool = False


@dataclass(frozen=True)
class Found:
    """Facts of a dataset, read once, when a run is configured.

    Attributes:
        facts: as of a dataset of the catalogue.
        name: of the dataset, without the folders above it.
        held_out: whether the test records were split off the private ones.
        inferred: parts of the schema that were taken from the records: "channels", "image size" and
            "classes". One record can change them, so they are public only by decision.
        skipped: records left out. Never published: one record can change it.
        untested: classes without a test record. Never published either.
    """

    facts: Dataset
    name: str
    held_out: bool = False
    inferred: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()


def listed(parts: Sequence[str]) -> str:
    """Return names as a phrase: "channels, image size and classes"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def name_of(dataset: str | Path) -> str:
    """Return the name of a dataset without the folders above it."""
    return str(dataset) if dataset in DATASETS else Path(dataset).resolve().stem
