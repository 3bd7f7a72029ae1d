"""Datasets of texts in folders named after their classes: CLASS/*.txt, at any depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import Source
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.data.class_folders import ClassFolders
from dpmac_cli.data.texts import as_inputs, is_blank
from dpmac_cli.data.values import Faults

SUFFIX = ".txt"


def read_folder(source: Source) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return arrays like those of an .npz, why files are left out, and class names.

    Raises InputError with every fault found, by the names of files.
    """
    assert source.texts is not None  # noqa: S101
    faults = Faults()
    folders = ClassFolders(source, (SUFFIX,), (f"a file of text ({SUFFIX})", "texts"))
    texts = [_read(Path(file.path), row, faults) for row, file in enumerate(folders.files)]
    reader = source.texts
    found = folders.arrays(lambda rows: as_inputs([texts[row] for row in rows], reader), faults)
    found["low"], found["high"] = map(np.array, source.texts.ends)
    return found, tuple(folders.skipped), folders.classes


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


def read_new_files(
    folder: Path, names: Sequence[str], reader: TextReader
) -> tuple[NDArray[np.float64], Faults]:
    """Return the tokens of texts in a folder, and why some of them cannot be used."""
    faults = Faults()
    texts = [_read(folder / name, row, faults) for row, name in enumerate(names)]
    return as_inputs(texts, reader), faults
