"""Your own dataset: a folder with one folder of images or texts per class, an .npz, or a table.

Never imports torch. All faults of the files are reported together.
"""

from dataclasses import replace

from dpmac_cli.data.array_file import ArrayFile, read_npz
from dpmac_cli.data.complaints import left_out
from dpmac_cli.data.image_folder import read_images
from dpmac_cli.data.schema import TABLES, DataFacts, Source
from dpmac_cli.data.splits import Records
from dpmac_cli.data.text_folder import read_folder
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.errors import InputError


def inspect(source: Source) -> DataFacts:
    """Return the facts of a dataset. Raises InputError with all faults."""
    reader = _read(source)
    return replace(reader.found, reader=reader)


def load(source: Source, found: DataFacts | None = None) -> list[Records]:
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
    return reader.load()


def _read(source: Source) -> ArrayFile:
    in_memory, path = source.in_memory, source.path
    if (in_memory is not None and in_memory.arrays is None) or (
        path.is_file() and path.suffix in TABLES
    ):
        from dpmac_cli.data.table import read_table  # noqa: PLC0415  (loads pyarrow)

        return ArrayFile(source, *read_table(source))
    if path.is_dir():
        read = read_images if source.texts is None else read_folder
        arrays, skipped, names = read(source)
        return ArrayFile(source, arrays, left_out(skipped), names)
    if in_memory is not None and in_memory.arrays is not None:
        arrays = dict(in_memory.arrays)
    elif path.suffix == ".npz" and path.is_file():
        arrays = read_npz(path)
    elif not path.is_file():
        raise InputError(f"--dataset {path}: no such file or folder.")
    else:
        raise InputError(
            f"--dataset {path} must be a folder with one folder of images per class, an .npz, "
            "or a table (.csv, .tsv, .parquet)."
        )
    read_arrays(arrays, source.texts, str(path))
    return ArrayFile(source, arrays)
