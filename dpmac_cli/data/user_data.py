"""Your own dataset: a folder with one folder of images or texts per class, an .npz, or a table.

Never imports torch. All faults of the files are reported together.
"""

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from dpmac_cli.data.array_file import ArrayFile, read_npz
from dpmac_cli.data.complaints import left_out
from dpmac_cli.data.image_folder import read_images
from dpmac_cli.data.schema import TABLES, DataFacts, Source
from dpmac_cli.data.splits import Records
from dpmac_cli.data.text_folder import read_folder
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.errors import InputError
from dpmac_cli.storage.progress import Computing


def inspect(source: Source) -> DataFacts:
    """Return the facts of a dataset from names and headers. Raises InputError with all faults."""
    reader = _read(source)
    return replace(reader.found, reader=reader)


def load(
    source: Source, found: DataFacts | None = None
) -> Generator[Computing, None, list[Records]]:
    """Return training and test records: those that were found when the run was configured.

    Records are uint8, shape (records, channels, height, width), in a file if they were decoded; or
    float32, shape (records, columns, 1, 1). Labels are int64, shape (records,).

    Args:
        source: the dataset.
        found: its facts. With their reader, its records are returned, whatever became of the files;
            without it, such as in another process, the dataset is read again.

    Raises:
        InputError: the dataset is read again and has other facts.
    """
    reader = found.reader if found is not None else None
    if not isinstance(reader, ArrayFile):
        reader = _read(source)
        if found is not None and reader.found.facts != found.facts:
            parts = (reader.found.facts, found.facts)
            now, before = (f"{part.train_size:,} + {part.test_size:,}" for part in parts)
            raise InputError(
                f"{source.path} changed while it was being read ({before} training and test "
                f"records before, {now} now). Run the command again once nothing writes to it."
            )
    return (yield from reader.load())


def _read(source: Source) -> ArrayFile:
    in_memory = source.in_memory
    if in_memory is not None and in_memory.arrays is not None:
        return _of_arrays(source, dict(in_memory.arrays), in_memory.unusable or {})
    if in_memory is not None or (source.path.is_file() and source.path.suffix in TABLES):
        from dpmac_cli.data.table import read_table  # noqa: PLC0415  (loads pyarrow)

        return ArrayFile(source, *read_table(source))
    if source.path.is_dir():
        repeated = ""
        if source.texts is None:
            arrays, skipped, names, repeated = read_images(source)
        else:
            arrays, skipped, names = read_folder(source)
        return ArrayFile(source, arrays, left_out(skipped), None, names, repeated)
    if not source.path.is_file():
        raise InputError(f"--dataset {source.path}: no such file or folder.")
    if source.path.suffix == ".npz":
        return _of_arrays(source, read_npz(source.path), {})
    raise InputError(
        f"--dataset {source.path} must be a folder with one folder of images per class, an .npz, "
        "or a table (.csv, .tsv, .parquet)."
    )


def _of_arrays(
    source: Source, arrays: dict[str, Any], unusable: Mapping[str, Mapping[int, str]]
) -> ArrayFile:
    """Return a dataset of arrays; those of texts are read."""
    faults = read_arrays(arrays, source.texts, str(source.path))
    both = {s: {**unusable.get(s, {}), **faults.get(s, {})} for s in (*unusable, *faults)}
    return ArrayFile(source, arrays, unusable=both)
