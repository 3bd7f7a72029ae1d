"""Datasets of texts in folders named after their classes: CLASS/*.txt, at any depth."""

from pathlib import Path

from dpmac_cli.config.facts import left_out
from dpmac_cli.data.class_folders import ClassFolders
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.reader import Reading, register_reader
from dpmac_cli.data.texts import NO_TEXT, is_blank
from dpmac_cli.data.values import Faults

SUFFIX = ".txt"


@register_reader("texts", lambda declared: declared.path.is_dir() and declared.texts is not None)
def read_folder(declared: Declaration) -> Reading:
    """Return the texts of a folder, each file a record, in UTF-8.

    Args:
        declared: the dataset, with a tokenizer.

    Raises:
        InputError: with every fault found, by the names of files, and no text of them.
    """
    faults = Faults()
    folders = ClassFolders(declared, (SUFFIX,), (f"a file of text ({SUFFIX})", "texts"))
    texts = []
    for row, file in enumerate(folders.files):
        texts.append(_read(Path(file.path), row, faults))
    arrays = folders.arrays(lambda rows: [texts[row] for row in rows], faults)
    return Reading(arrays, left_out(folders.skipped), folders.classes)


def _read(file: Path, row: int, faults: Faults) -> str:
    """Return the text of a file; "" if it has none.

    Args:
        file: path of a file in UTF-8, with or without a byte order mark.
        row: number of the record.
        faults: why records cannot be used; a fault of this one is added.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        faults[row] = f"{file} is not text in UTF-8"
    except OSError as failure:
        faults[row] = f"{file} cannot be read ({failure.strerror or failure})"
    else:
        if not is_blank(text):
            return text
        faults[row] = f"{file} {NO_TEXT}"
    return ""
