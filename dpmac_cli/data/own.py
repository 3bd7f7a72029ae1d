"""Your own dataset: a folder with one folder of images per class, an .npz of arrays, or a table.

Neither function loads torch. All faults of the files are reported together.
"""

import functools
from pathlib import Path

from dpmac_cli.data.array_file import ArrayFile, read_npz
from dpmac_cli.data.image_folder import ImageFolder
from dpmac_cli.data.registry import Dataset
from dpmac_cli.data.schema import TABLES, Found, Source
from dpmac_cli.data.splits import Arrays
from dpmac_cli.errors import InputError


def inspect(source: Source) -> Found:
    """Return what names and headers say. Raises InputError with every fault found."""
    return _reader_of(source).found


def load(source: Source, facts: Dataset | None = None) -> tuple[Arrays, Arrays]:
    """Return training and test records, each as

    * uint8, shape (records, channels, height, width), or float32, shape (records, columns, 1, 1),
    * and labels, int64, shape (records,).

    Raises:
        InputError: naming the files that cannot be read; or the dataset no longer has the
            ``facts``, from which epsilon was computed.
    """
    reader = _reader_of(source)
    if facts is not None and reader.found.facts != facts:
        now, before = (f"{f.train_size:,} + {f.test_size:,}" for f in (reader.found.facts, facts))
        raise InputError(
            f"{source.path} changed while it was being read ({before} training and test records "
            f"before, {now} now). Run the command again when nothing writes to it any more."
        )
    return reader.load()


def _reader_of(source: Source) -> ImageFolder | ArrayFile:
    """Looking at many files takes seconds: what was found is kept while folders stay the same."""
    path = source.path.resolve()
    places = [path, *path.glob("*/"), *path.glob("*/*/")] if path.exists() else []
    return _reader(source, path, max((place.stat().st_mtime_ns for place in places), default=0))


@functools.lru_cache(maxsize=8)
def _reader(source: Source, _path: Path, _changed: int) -> ImageFolder | ArrayFile:
    if source.path.is_dir():
        return ImageFolder(source)
    if not source.path.is_file():
        raise InputError(f"--dataset {source.path}: there is no such file or folder.")
    if source.path.suffix == ".npz":
        return ArrayFile(source, read_npz(source.path))
    if source.path.suffix in TABLES:
        from dpmac_cli.data.table_file import read_table  # noqa: PLC0415  (loads an extra)

        return ArrayFile(source, *read_table(source))
    raise InputError(
        f"--dataset {source.path} is neither a folder with a folder of images a class, nor an "
        ".npz, nor a table (.csv, .tsv, .parquet)."
    )
