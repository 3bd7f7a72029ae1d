"""Files of records in folders named after their classes, with or without train/ and test/ above.

New records, without labels, are in folders of any names. Hidden files are passed over, links are
followed, and a folder that was visited under another name counts once: its records would count
twice, or belong to two units. A file beside the folders of classes that is no record is ignored;
one of another kind within them is a fault, or with ``skip_bad`` left out.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import complaints, some_of
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.targets import check_classes
from dpmac_cli.data.units import unit_name
from dpmac_cli.errors import InputError, raise_errors

TRAIN, TESTS = "train", ("test", "validation", "val")
#: Files that file managers write into folders, besides those that begin with a dot.
HIDDEN = ("thumbs.db", "ehthumbs.db", "desktop.ini")
#: The value of ``--unit`` that makes each folder below a class a unit.
FOLDER = "folder"
#: Label of a file of no class.
NO_CLASS = -1
#: What to do about files that are no records, and about records that cannot be used.
UNLESS_SKIPPED = " Correct or remove them, or add {skip_bad=True} to leave them out."
#: How to name the unit of each file.
UNIT_OF = (
    "To match the 17 in patient17.png, use {unit=}'patient([0-9]+)'. {unit=}folder is for paths "
    "such as CLASS/PATIENT/1.png."
)


class FoundFile(NamedTuple):
    """A file as it was found. Other contents or another file have other facts.

    Attributes:
        path: its path.
        label: number of its class; :data:`NO_CLASS` if it is in none.
        size: its size in bytes.
        changed: time of the last change to contents or name in nanoseconds; writing changes
            ``st_ctime``.
        inode: tells files of other folders that take the place of this one.
    """

    path: str
    label: int
    size: int
    changed: int
    inode: int


class ClassFolders:
    """Files of records in folders named after their classes, at any depth; new ones in any folder.

    Folders ``train`` and ``test`` above those of classes make the split. No file is opened.

    Args:
        declared: the dataset.
        suffixes: of the names of files of records, in lower case.
        words: a record, and several, in words.

    Attributes:
        classes: their names, in the order of the labels; () for new records, whose label is 0.
        files: files of records, those of training records first.
        names: their paths below the dataset's folder.
        skipped: why files are left out.
        faults: why the dataset cannot be used.

    Raises:
        InputError: there are no folders of classes, or no path has a unit.
    """

    def __init__(
        self,
        declared: Declaration,
        suffixes: tuple[str, ...],
        words: tuple[str, str],
    ) -> None:
        self._declared = declared
        self._suffixes = suffixes
        self._record, self._records = words
        self.faults, self.skipped = list[str](), list[str]()
        self._seen: dict[str, str] = {}  # names of folders, by where links lead
        self._parts = [declared.path]
        self.classes = declared.classes or ()
        if declared.labels:
            self._parts = splits_of(declared)
            self.classes = self.classes or tuple(self._class_names())
            check_classes(self.classes, declared)
        self.files = list[FoundFile]()
        sizes = []
        for part in self._parts:
            files = self._listed(part)
            self.files += files
            sizes.append(len(files))
        self._part_of = np.repeat(range(len(sizes)), sizes)
        self.names = [file.path.removeprefix(f"{declared.path}{os.sep}") for file in self.files]
        units = list[str]()
        if declared.settings.unit:
            units = units_of_files(self.names, declared.settings.unit, len(sizes))
        self._units = np.array(units, np.str_)
        self._no_unit = np.flatnonzero(self._units == "").tolist()
        self._skip_files_without_unit()

    def _skip_files_without_unit(self) -> None:
        """Leave out files without a unit. Raises InputError if that is every file."""
        unit = self._declared.settings.unit
        if self.names and len(self._no_unit) == len(self.names):
            raise InputError(
                f"{{unit=}}{unit} finds no unit in any path, such as {self.names[0]}. {UNIT_OF}"
            )
        for row in self._no_unit:
            self.skipped.append(f"{self.names[row]} has no unit ({{unit=}}{unit})")
        self._refuse(self.skipped)

    def _refuse(self, bad: Iterable[str]) -> None:
        """Add faults for files, unless they are left out with ``skip_bad``.

        Args:
            bad: why each file cannot be used.
        """
        if not self._declared.settings.skip_bad:
            self.faults += complaints([*bad], UNLESS_SKIPPED)

    def _class_names(self) -> list[str]:
        """Return the names of the folders of training records. Raises InputError for none."""
        part = self._parts[0]
        names = [name for name in visible(os.listdir(part)) if (part / name).is_dir()]
        if not names:
            raise InputError(
                f"{part} must contain one folder of {self._records} per class. It has no folder."
            )
        return names

    def _is_record(self, name: str) -> bool:
        return name.lower().endswith(self._suffixes)

    def _listed(self, part: Path) -> list[FoundFile]:
        """Return the files of a part in the order of their classes, and record skipped ones.

        Args:
            part: folder of training or of test records.
        """
        labels = {name: label for label, name in enumerate(self.classes)}
        files = []
        for path in tree(part, self.skipped, self._seen):
            name, folder, _ = path.removeprefix(f"{part}{os.sep}").partition(os.sep)
            if self.classes and not folder and not self._is_record(name):
                continue  # beside the folders of classes
            label = labels.get(name, NO_CLASS) if folder else NO_CLASS
            file = self._file(path, label if self.classes else 0)
            if isinstance(file, str):
                self.skipped.append(f"{path} {file}")
            else:
                files.append(file)
        return sorted(files, key=lambda file: file.label)

    def _file(self, path: str, label: int) -> FoundFile | str:
        """Describe a file without opening it, or return why it cannot be a record.

        Args:
            path: its path.
            label: number of its class, or :data:`NO_CLASS`.
        """
        if label == NO_CLASS:
            return f"belongs to no class ({', '.join(self.classes)})"
        try:
            file = file_at(path, label)
        except OSError as failure:  # such as a broken link, or one to itself
            return f"cannot be read as {self._record} ({failure.strerror})"
        if not self._is_record(path):
            is_text = bool(self.classes) and path.lower().endswith(".txt")
            advice = " (texts need {backbone=}minilm)" if is_text else ""
            return f"is not {self._record}{advice}"
        return file if os.path.isfile(path) else "is not a regular file"

    def arrays(
        self,
        x: Callable[[NDArray[np.int64]], Any],
        bad: Mapping[int, str],
    ) -> dict[str, Any]:
        """Return arrays like those of an .npz, with the path of each record as its ``key``.

        Args:
            x: returns the records of some files, by their numbers.
            bad: why files cannot be used, by their numbers.

        Raises:
            InputError: with every fault found.
        """
        arrays = dict[str, Any]()
        unused = [*bad, *self._no_unit]
        is_used = ~np.isin(range(len(self.files)), unused)
        self.skipped += bad.values()
        self._refuse(bad.values())
        of_files = np.array([file.label for file in self.files], np.int64)
        names = np.array(self.names, object)
        for place, part in enumerate(self._parts):
            side = "_test" if place else ""
            rows = np.flatnonzero(is_used & (self._part_of == place))
            labels = of_files[rows]
            arrays[f"x{side}"] = x(rows)
            arrays[f"y{side}"] = labels
            arrays[f"key{side}"] = names[rows]
            if self._declared.settings.unit:
                arrays[f"unit{side}"] = self._units[rows]
            self._check_part(part, labels)
        raise_errors(self.faults)
        return arrays

    def _check_part(
        self,
        part: Path,
        labels: NDArray[np.int64],
    ) -> None:
        """Add faults for classes without a record, and for a part without any.

        Args:
            part: folder of training or of test records.
            labels: labels of its records that are used.
        """
        if part.name not in TESTS and self._declared.classes is None:
            with_records = set(labels.tolist())
            faults = []
            for label, name in enumerate(self.classes):
                if label not in with_records:
                    faults.append(f"The class {name} in {part} has no {self._records}")
            self.faults += complaints(
                faults, " Add some, remove its folder, or declare the classes with {classes}."
            )
        if not len(labels):
            # Without skip_bad, reasons why files are left out are faults of their own.
            reasons = some_of(self.skipped) if self._declared.settings.skip_bad else []
            fault = "; ".join([f"{part} has no {self._records} to use", *reasons])
            self.faults.append(f"{fault}.")


def splits_of(declared: Declaration) -> list[Path]:
    """Return the folders of training and test records, or only the dataset's folder.

    Args:
        declared: the dataset. Names of its classes are no names of a split.

    Raises:
        InputError: there are several test sets, or one folder without its counterpart.
    """
    root, classes = declared.path, declared.classes
    parts = []
    for name in (TRAIN, *TESTS):
        if name not in (classes or ()) and (root / name).is_dir():
            parts.append(root / name)
    if len(parts) > 2:
        several = ", ".join(part.name for part in parts)
        raise InputError(f"{root} contains {several}. Keep one test set, and move the others away.")
    if len(parts) == 1 and classes is None:
        raise InputError(
            f"{root} contains a folder {parts[0].name} without its counterpart. Provide both "
            f"{TRAIN} and test, or one folder per class, of which {{test_fraction}} is held out. "
            f"If {parts[0].name} is the name of a class, rename it."
        )
    if len(parts) == 2 and parts[0].name == TRAIN:
        return parts
    return [root]  # these folders are of declared classes


def file_at(path: str, label: int = NO_CLASS) -> FoundFile:
    """Describe a file without opening it. Raises OSError.

    Args:
        path: its path; a link stands for the file that it leads to.
        label: number of its class.
    """
    facts = os.stat(path)
    return FoundFile(path, label, facts.st_size, facts.st_ctime_ns, facts.st_ino)


def is_hidden(name: str) -> bool:
    """Return whether a file of this name is not meant to be seen among records.

    Example:
        >>> is_hidden(".DS_Store"), is_hidden("1.png")
        (True, False)
    """
    return name.startswith(".") or name.lower() in HIDDEN


def visible(names: Iterable[str]) -> list[str]:
    """Return the names of files in alphabetical order, without hidden ones."""
    return sorted(filterfalse(is_hidden, names))


def tree(
    folder: Path,
    faults: list[str],
    seen: dict[str, str],
) -> Iterator[str]:
    """Yield the visible files in a folder and below it, in order. Links are followed.

    Adds a fault for a folder that cannot be read, and for one that was visited under another name:
    its records would count twice, or belong to two units.

    Args:
        folder: where to begin.
        faults: faults so far; new ones are added.
        seen: names of folders that were visited, by where links lead; new ones are added.
    """

    def note(failure: OSError) -> None:
        faults.append(f"{failure.filename} cannot be read ({failure.strerror})")

    for where, folders, files in os.walk(folder, onerror=note, followlinks=True):
        known = seen.setdefault(os.path.realpath(where), where)
        if known != where:
            faults.append(f"{where} is the same folder as {known}")
            folders.clear()
            continue
        folders[:] = visible(folders)
        for name in visible(files):
            yield os.path.join(where, name)


def units_of_files(
    names: Sequence[str],
    unit: str,
    depth: int,
) -> list[str]:
    """Return the unit of each file, as ``--unit`` defines it; "" if it has none.

    It is the text that a pattern, or its first group, matches. A folder of one name in several
    classes and splits is one unit, however its name is encoded.

    Args:
        names: paths below the dataset's folder, with ``/`` between folders.
        unit: a pattern, or :data:`FOLDER` for the folder below the class, at any depth.
        depth: number of folders of the class and of the split in each path.

    Raises:
        InputError: the pattern is no regular expression.

    Example:
        >>> units_of_files(["cat/7/1.png", "dog/7/2.png", "dog/3.png"], "folder", 1)
        ['7', '7', '']
    """
    try:
        pattern = re.compile(rf"^(?:[^/]+/){{{depth}}}([^/]+)/" if unit == FOLDER else unit)
    except re.error as failure:
        raise InputError(
            f"{{unit=}}{unit} is not a valid regular expression ({failure}). {UNIT_OF}"
        ) from failure
    group = min(pattern.groups, 1)
    units = []
    for path in names:
        match = pattern.search(path)
        name = (match[group] if match else None) or ""
        name = unicodedata.normalize("NFC", name)
        units.append(name if unit_name(name) else "")
    return units
