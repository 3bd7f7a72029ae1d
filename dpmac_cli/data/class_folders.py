"""Folders named after classes, with or without train/ and test/ above them."""

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpmac_cli.data.canonical import unit_name
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError

TRAIN, TESTS = "train", ("test", "validation", "val")
#: Files that file managers write into folders, besides those that begin with a dot.
HIDDEN = ("thumbs.db", "ehthumbs.db", "desktop.ini")
#: The value of ``--unit`` that makes each folder below a class a unit.
FOLDER = "folder"
#: Other names of folders of a split.
LIKE_SPLITS = ("training", "testing", "valid", "valid_set", "test_set", "train_set")


def splits_of(source: Source) -> list[Path]:
    """Return the folders of training and test records, or only the dataset's folder."""
    root, declared = source.path, source.classes
    names = [name for name in (TRAIN, *TESTS) if name not in (declared or ())]
    parts = [root / name for name in names if (root / name).is_dir()]
    if len(parts) > 2:
        some = ", ".join(part.name for part in parts)
        raise InputError(f"{root} contains {some}. Keep one test set, and move the others away.")
    if len(parts) == 1 and declared is None:
        raise InputError(
            f"{root} contains a folder {parts[0].name} without its counterpart. Provide both "
            f"{TRAIN} and test, or one folder per class, of which --test-fraction is held out. If "
            f"{parts[0].name} is the name of a class, rename it."
        )
    # Otherwise these folders are of declared classes.
    return parts if len(parts) == 2 and parts[0].name == TRAIN else [root]


def is_hidden(name: str) -> bool:
    """Return whether a file of this name is not meant to be seen among records."""
    return name.startswith(".") or name.lower() in HIDDEN


def visible(folder: "str | Path | os.DirEntry[str]") -> "list[os.DirEntry[str]]":
    """Return the entries of a folder by name, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not is_hidden(e.name)), key=lambda e: e.name)


def tree(
    folder: Path, faults: list[str], seen: dict[tuple[int, int], Path]
) -> "Iterator[tuple[Path, list[os.DirEntry[str]]]]":
    """Yield a folder and all folders below it, each with its visible files, in order of name.

    Links are followed. Adds a fault for a folder that cannot be read, and for one that was visited
    under another name: its records would count twice, or belong to two units.

    Args:
        seen: folders that were visited, by device and inode; new ones are added.
    """
    try:
        facts, entries = os.stat(folder), visible(folder)
    except OSError as failure:
        faults.append(f"{folder} cannot be read ({failure.strerror})")
        return
    known = seen.setdefault((facts.st_dev, facts.st_ino), folder)
    if known != folder:
        faults.append(f"{folder} is the same folder as {known}")
        return
    kinds = [(entry, is_folder(entry)) for entry in entries]
    yield folder, [entry for entry, inner in kinds if not inner]
    for entry in [entry for entry, inner in kinds if inner]:
        yield from tree(Path(entry.path), faults, seen)


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a folder or a link to one."""
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()


def check_not_splits(part: Path, names: Sequence[str]) -> None:
    """Raise InputError if folders that are taken for classes hold the classes of a split."""
    splits = (TRAIN, *TESTS, *LIKE_SPLITS)
    like = [name for name in names if name.lower() in splits and not _has_files(part / name)]
    if like:
        raise InputError(
            f"{part}: {' and '.join(like)} would be classes, but contain only folders. If they are "
            f"splits, name them {TRAIN} and {TESTS[0]}; if they are classes, declare all classes "
            "with --classes."
        )


def _has_files(folder: Path) -> bool:
    return not all(map(is_folder, visible(folder)))


def units_of_files(names: Sequence[str], unit: str, depth: int) -> list[str]:
    """Return the unit of each file, as ``--unit`` defines it; "" if it has none.

    Args:
        names: paths below the dataset's folder, with ``/`` between folders.
        unit: :data:`FOLDER`, or a pattern.
        depth: number of folders of the class and of the split in each path.
    """
    found = [_folder(n, depth) for n in names] if unit == FOLDER else _by_pattern(names, unit)
    return [name if unit_name(name) else "" for name in found]


def _folder(name: str, depth: int) -> str:
    """Return the name of the folder below the class that a file is in, at any depth; or "".

    A folder of one name in several classes and splits is one unit, however its name is encoded.
    """
    folders = name.split("/")[depth:-1]
    return unicodedata.normalize("NFC", folders[0]) if folders else ""


def strange_unit(name: str, unit: str) -> str:
    """Return why a file has no unit."""
    if unit == FOLDER:
        return f"{name} is not in a folder of its own unit below its class (--unit {FOLDER})"
    return f"{name} does not match --unit {unit}"


def _by_pattern(names: Sequence[str], pattern: str) -> list[str]:
    """Return the text that the pattern, or its first group, matches in each name; "" if none."""
    try:
        compiled = re.compile(pattern)
    except re.error as failure:
        raise InputError(
            f"--unit {pattern} is not a valid regular expression ({failure}). To match the 17 "
            "in patient17.png, use --unit 'patient([0-9]+)'. For a folder per unit, use --unit "
            "folder."
        ) from failure
    found = [compiled.search(name) for name in names]
    return [(match and match[min(compiled.groups, 1)]) or "" for match in found]
