"""Datasets of texts in folders named after their classes: CLASS/*.txt, at any depth."""

from pathlib import Path

from dpmac_cli.config.facts import left_out
from dpmac_cli.data.class_folders import ClassFolders
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.reader import Reading, register_reader
from dpmac_cli.data.texts import is_blank
from dpmac_cli.data.values import Faults

SUFFIX = ".txt"


@register_reader("texts", lambda declared: declared.path.is_dir() and declared.texts is not None)
def read_folder(declared: Declaration) -> Reading:
    """Return the texts of a folder. Raises InputError with every fault, by the names of files."""
    faults = Faults()
    folders = ClassFolders(declared, (SUFFIX,), (f"a file of text ({SUFFIX})", "texts"))
    texts = [_read(Path(file.path), row, faults) for row, file in enumerate(folders.files)]
    arrays = folders.arrays(lambda rows: [texts[row] for row in rows], faults)
    return Reading(arrays, left_out(folders.skipped), folders.classes)


def _read(file: Path, row: int, faults: Faults) -> str:
    """Return the text of a file; "", with a fault of its row, if it has none."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        faults[row] = f"{file} is not text in UTF-8"
    except OSError as failure:
        faults[row] = f"{file} cannot be read ({failure.strerror or failure})"
    else:
        if not is_blank(text):
            return text
        faults[row] = f"{file} has no text"
    return ""
