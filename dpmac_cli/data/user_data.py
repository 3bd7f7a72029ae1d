"""Your own dataset: a folder with one folder of images or texts per class, an .npz, or a table.

Never imports torch. All faults of the files are reported together.
"""

from collections.abc import Sequence

from dpmac_cli.config.facts import TABLES, DataFacts, Records, Source, left_out
from dpmac_cli.data.array_file import read_dataset, read_npz
from dpmac_cli.data.image_folder import read_images
from dpmac_cli.data.table import read_table
from dpmac_cli.data.text_folder import read_folder
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.errors import InputError


def load(source: Source, found: DataFacts | None = None) -> Sequence[Records]:
    """Return training and test records: those that were found when the run was configured.

    Records are uint8, shape (records, channels, height, width), in a file if they were decoded; or
    float32, shape (records, columns, 1, 1). Labels are int64, shape (records,).

    Args:
        source: the dataset.
        found: its facts. Their records are returned, whatever became of the files; without them,
            such as in another process, the dataset is read again.

    Raises:
        InputError: the dataset is read again and has other facts.
    """
    if found is not None and found.records:
        return found.records
    again = inspect(source)
    if found is not None and again.public != found.public:
        parts = (again, found)
        now, before = (f"{part.train_size:,} + {part.test_size:,}" for part in parts)
        raise InputError(
            f"{source.path} changed while it was being read ({before} training and test "
            f"records before, {now} now). Run the command again once nothing writes to it."
        )
    return again.records


def inspect(source: Source) -> DataFacts:
    """Return the facts of a dataset, with its records. Raises InputError with all faults."""
    in_memory, path = source.in_memory, source.path
    if (in_memory is not None and in_memory.arrays is None) or (
        path.is_file() and path.suffix in TABLES
    ):
        return read_dataset(source, *read_table(source))
    if path.is_dir():
        read = read_images if source.texts is None else read_folder
        arrays, skipped, names = read(source)
        return read_dataset(source, arrays, left_out(skipped), names)
    if in_memory is not None and in_memory.arrays is not None:
        arrays = dict(in_memory.arrays)
        if "y" not in arrays and source.task is None:
            raise InputError(
                f"{path} has no y, the labels or numbers to predict. Without them, train a "
                "language model on texts: task='language-model'."
            )
    elif path.suffix == ".npz" and path.is_file():
        arrays = read_npz(path, ("x", "y") if source.task is None else ("x",))
    elif not path.is_file():
        raise InputError(f"{{dataset=}}{path}: no such file or folder.")
    else:
        raise InputError(
            f"{{dataset=}}{path} must be a folder with one folder of images per class, an .npz, "
            "or a table (.csv, .tsv, .parquet)."
        )
    read_arrays(arrays, source.texts, str(path))
    return read_dataset(source, arrays)
