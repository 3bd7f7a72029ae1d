"""Datasets of texts in folders named after their classes: CLASS/*.txt, at any depth."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.canonical import Faults, units_in
from dpmac_cli.data.class_folders import (
    TESTS,
    check_not_splits,
    is_folder,
    splits_of,
    strange_unit,
    tree,
    units_of_files,
    visible,
)
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.schema import Source
from dpmac_cli.data.texts import as_inputs, is_blank
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError

SUFFIX = ".txt"
REMEDY = " Correct or remove them, or add --skip-bad to leave them out."


def read_folder(source: Source) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return arrays like those of an .npz, descriptions of files left out, and class names.

    Raises InputError with every fault found, by the names of files.
    """
    assert source.texts is not None  # noqa: S101
    parts, found, faults = splits_of(source), dict[str, Any](), list[str]()
    seen = dict[tuple[int, int], Path]()
    classes = source.classes or tuple(_class_names(parts[0]))
    for part in parts:
        side = "_test" if part.name in TESTS and len(parts) > 1 else ""
        texts, names, labels = list[str](), list[str](), list[int]()
        for name, label in _files(part, classes, faults, seen):
            text = _read(name, faults)
            if text is not None:
                texts.append(text)
                names.append(str(name.relative_to(source.path)))
                labels.append(label)
        if source.classes is None and not side:
            held = {classes[label] for label in labels}
            faults += [f"{part / name} has no texts" for name in classes if name not in held]
        found[f"x{side}"] = as_inputs(texts, source.texts)
        found[f"y{side}"] = np.array(labels, np.int64)
        if source.unit is not None:
            found[f"unit{side}"], kept = _units(names, source.unit, len(parts), faults)
            found |= {f"{key}{side}": found[f"{key}{side}"][kept] for key in ("x", "y", "unit")}
    if not source.skip_bad:
        refuse(faults, REMEDY)
    found["low"], found["high"] = map(np.array, source.texts.ends)
    return found, tuple(faults), classes


def _class_names(part: Path) -> list[str]:
    names = [entry.name for entry in visible(part) if is_folder(entry)]
    if not names or any(entry.name.lower().endswith(SUFFIX) for entry in visible(part)):
        raise InputError(
            f"{part} must contain one folder of texts (*{SUFFIX}) per class and nothing else. For "
            "a table with one text per row, use a .csv and --schema."
        )
    check_not_splits(part, names)
    return names


def _files(
    part: Path, classes: Sequence[str], faults: list[str], seen: dict[tuple[int, int], Path]
) -> Iterator[tuple[Path, int]]:
    """Yield the files of each class in order, and add a fault for each that is not a text."""
    labels = {name: label for label, name in enumerate(classes)}
    for folder in visible(part):
        path = Path(folder.path)
        if folder.name not in labels:
            faults.append(f"{path} is no folder of a class")
        elif not is_folder(folder):
            faults.append(f"{path} is not a folder")
        else:
            for inner, entries in tree(path, faults, seen):
                for entry in entries:
                    if entry.name.lower().endswith(SUFFIX) and os.path.isfile(entry):
                        yield inner / entry.name, labels[folder.name]
                    else:
                        faults.append(f"{inner / entry.name} is not a file of text ({SUFFIX})")


def _read(file: Path, faults: list[str]) -> str | None:
    """Return the text of a file; None, with a fault, if it has none."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        faults.append(f"{file} is not text in UTF-8")
    except OSError as failure:
        faults.append(f"{file} cannot be read ({failure.strerror or failure})")
    else:
        if not is_blank(text):
            return text
        faults.append(f"{file} has no text")
    return None


def _units(
    names: Sequence[str], unit: str, depth: int, faults: list[str]
) -> tuple[NDArray[np.str_], NDArray[np.bool_]]:
    """Return the unit of each file, and which files have one."""
    units, _ = units_in(units_of_files(names, unit, depth))
    kept = units != ""
    strange = [name for name, known in zip(names, kept, strict=True) if not known]
    faults += [strange_unit(name, unit) for name in strange]
    return units, kept


def read_new_files(
    folder: Path, names: Sequence[str], reader: TextReader
) -> tuple[NDArray[np.float64], Faults]:
    """Return the tokens of texts in a folder, and why some of them cannot be used."""
    texts, faults = list[str](), Faults()
    for row, name in enumerate(names):
        found = list[str]()
        texts.append(_read(folder / name, found) or "")
        if found:
            faults[row] = found[0]
    return as_inputs(texts, reader), faults
