"""Folders named after classes, with or without train/ and test/ above them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError

TRAIN, TESTS = "train", ("test", "validation", "val")
#: Files that file managers write into folders, besides those that begin with a dot.
HIDDEN = ("thumbs.db", "ehthumbs.db", "desktop.ini")


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


def units_by_pattern(names: Sequence[str], pattern: str) -> list[str]:
    """Return the text that the pattern, or its first group, matches in each name; "" if none."""
    try:
        compiled = re.compile(pattern)
    except re.error as failure:
        raise InputError(
            f"--unit {pattern} is not a valid regular expression ({failure}). To match the 17 "
            "in patient17.png, use --unit 'patient([0-9]+)'."
        ) from failure
    found = [compiled.search(name) for name in names]
    return [(match and match[min(compiled.groups, 1)]) or "" for match in found]
