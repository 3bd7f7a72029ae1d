"""Where a person's own data is, and what is found there. Loads nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.catalog import Dataset

#: Public constants that images in [0, 1] may be standardised with: means and deviations.
STANDARDS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5,), (0.5,)),  # [0, 1] to [-1, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Source:
    """Where data lies, and how it is to be read. All of it is public.

    Attributes:
        path: a folder, or an .npz.
        test_fraction: chance of each record to be held out, where there is no test set.
        split_seed: of that choice, which looks at each record by itself.
        image_size: height and width to resize images to; None to leave them as they are.
        standardise: a key of :data:`STANDARDS`.
        feature_range: what every column of a table is clipped to; None where the file says.
        skip_bad: leave out files that are no images, instead of refusing them.
    """

    path: Path
    test_fraction: float = 0.2
    split_seed: int = 0
    image_size: int | None = None
    standardise: str = "half"
    feature_range: tuple[float, float] | None = None
    skip_bad: bool = False


@dataclass(frozen=True)
class Found:
    """What there is.

    Attributes:
        facts: as of a data set of the catalogue.
        held_out: whether the test records were split off the private ones.
        skipped: files left out.
        untested: classes without a test record.
    """

    facts: Dataset
    held_out: bool
    skipped: tuple[str, ...]
    untested: tuple[str, ...] = ()
