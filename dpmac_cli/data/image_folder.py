"""Datasets of images in folders named after their classes, at any depth."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Generator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
from dpmac_cli.data.complaints import complaints, left_out, refuse
from dpmac_cli.data.decoding import (
    DIM,
    ImageFile,
    decode,
    decoded,
    looked_at,
    size_of,
    usable_cores,
)
from dpmac_cli.data.schema import Signs, Source
from dpmac_cli.data.splits import Records, check_classes, copies_among, data_facts, split
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.storage.cache import WHOLE, RowFile, Rows, complete, kept_file
from dpmac_cli.storage.paths import cache_folder
from dpmac_cli.storage.progress import LISTENER, Computing, outcome
from dpmac_cli.tasks.classification import Classification

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Pillow's modes without colour. Modes such as I;16 are matched by the part before the semicolon.
GREY = ("1", "L", "LA", "I", "F")
NO_CLASS = -1
#: Number of headers between reports of progress.
SOME = 1000
#: Number of images whose pixels are looked at when a run is configured.
SAMPLE = 8
#: Version of the decoding, which is part of the cached file's name.
VERSION = 3
#: File names with two numbers, such as patient17_3.png: one of a person and one of an image.
SERIES = re.compile(r"([^/]*\d[^/]*)[-_. ]\d+\.\w+$")
REMEDY = " Remove them, or add --skip-bad to leave them out."


class ImageFolder:
    """Images in folders named after their classes, with or without train/ and test/ above them.

    Folders of a class may contain further folders, such as one per person.

    With --skip-bad all images are decoded immediately, because that decides which ones are used.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._faults: list[str] = []  # messages, raised together
        self._skipped: list[str] = []
        self._seen: dict[tuple[int, int], Path] = {}  # folders, by device and inode
        declared, parts = source.classes, splits_of(source)
        self._classes = declared or tuple(_class_names(parts[0]))
        check_classes(self._classes, source)
        if declared is None:
            self._faults += _strange_classes(parts)
        listed = [self._listed(part) for part in parts]
        self._images = [image for images in listed for image in images]
        if not source.skip_bad:
            self._faults += complaints(self._skipped, REMEDY)
        self._path = self._decoded_file()
        file = complete(self._path)
        self._shape: tuple[int, int, int] = self._survey() if file is None else file.shape
        names = [image.path.removeprefix(f"{source.path}{os.sep}") for image in self._images]
        labels = np.array([image.label for image in self._images], np.int64)
        depth = len(parts)  # folders of the split, if there are two, and of the class
        units = None if source.unit is None else self._units(names, source.unit, depth)
        rows = self._used(units, len(listed[0]))
        used = Records(rows, labels[rows], None if units is None else units[rows])
        trained = rows < len(listed[0])
        self._sides = [used.at(trained), used.at(~trained)] if len(parts) > 1 else [used]
        for part, side in zip(parts, self._sides, strict=True):
            self._check_not_empty(part, side.y)
        raise_errors(self._faults)
        if held_out := len(parts) == 1:
            tellers = names if units is None else units.tolist()
            keys = [os.fsencode(tellers[row]) for row in rows]
            needed = self._classes if declared is None else None
            self._sides = split(used, keys, needed, source)
        copies, tested = copies_among([self._contents(side.x) for side in self._sides])
        self.found = data_facts(
            source,
            self._sides,
            self._shape,
            Classification(tuple(self._classes)),
            held_out=held_out,
            inferred=_inferred(source),
            left_out=left_out(self._skipped),
            signs=Signs(
                "" if source.unit else _repeated(names, depth),
                0 if source.unit else copies,
                tested,
                self._dim(rows),
            ),
        )

    def _decoded_file(self) -> Path:
        """Return the file of decoded images, whose name tells everything that determines them."""
        source = self._source
        read = [source.channels, source.image_size, source.levels]
        key = [VERSION, str(source.path.resolve()), *read, self._images]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return cache_folder() / f"{name}{WHOLE}"

    def _listed(self, part: Path) -> list[ImageFile]:
        """Return the images of a part in order, and record why other files are skipped."""
        labels = {name: label for label, name in enumerate(self._classes)}
        candidates, images = list[tuple["os.DirEntry[str]", int]](), []
        for entry in visible(part):
            if not is_folder(entry):
                candidates += [(entry, NO_CLASS)] * _is_image(entry.name)
            elif entry.name in labels or self._source.classes is not None:
                label = labels.get(entry.name, NO_CLASS)
                for _, files in tree(Path(entry.path), self._skipped, self._seen):
                    candidates += [(file, label) for file in files]
        for entry, label in candidates:
            image = _image(entry, label)
            if isinstance(image, str):
                self._skipped.append(f"{entry.path} {image}")
            else:
                images.append(image)
        return sorted(images, key=lambda image: image.label)

    def _used(self, units: NDArray[np.str_] | None, trained: int) -> NDArray[np.int64]:
        """Return the rows of images that are used, and record why others are skipped.

        Units that have one of the first ``trained`` images and also a later one keep the later.
        """
        rows = np.arange(len(self._images))
        if not self._source.skip_bad or not len(rows):
            return rows
        raise_errors(self._faults)
        file = outcome(self._decoded())  # check contents, not only headers
        self._skipped += file.faults.values()
        used: NDArray[np.int64] = np.setdiff1d(rows, [*file.faults])
        if units is None:
            return used
        used = used[units[used] != ""]
        twice = (used < trained) & np.isin(units[used], units[used[used >= trained]])
        self._skipped += [
            f"{self._images[row].path} is of a unit that has test images" for row in used[twice]
        ]
        kept: NDArray[np.int64] = used[~twice]
        return kept

    def _contents(self, rows: NDArray[np.int64]) -> list[Hashable]:
        """Return what equal images have in common: pixels and class, or the file if not decoded."""
        file = complete(self._path)
        if file is None:
            return [self._images[row].inode for row in rows]
        sums = (hashlib.sha256(file.values[row].tobytes()).digest() for row in rows)
        return [(of, self._images[row].label) for of, row in zip(sums, rows, strict=True)]

    def _dim(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Return a remark if a few images use a small part of the range of 8 bits."""
        source, most = self._source, 0
        sample = rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]
        for row in sample:
            seen = looked_at(
                self._images[row].path, lambda image: decode(image, self._shape, source.levels)
            )
            most = max(most, 0 if isinstance(seen, str) else int(seen.max()))
            if most > DIM:
                return ()
        return (
            f"The brightest pixel of {len(sample)} images is {most} of 255. If they have 16 bits "
            "per pixel, of which 12 are used, add --levels 4095; or scale by a public constant",
        )

    def _units(self, names: list[str], unit: str, depth: int) -> NDArray[np.str_]:
        """Return the unit of each file; "" if it has none."""
        units = units_of_files(names, unit, depth)
        strange = [name for name, found in zip(names, units, strict=True) if not found]
        said = [strange_unit(name, unit) for name in strange]
        if self._source.skip_bad and len(strange) < len(names):
            self._skipped += said
            return np.array(units, np.str_)
        self._faults += complaints(
            said, " Move or rename these files, or use a pattern that matches all paths."
        )
        return np.array(units, np.str_)

    def _check_not_empty(self, part: Path, labels: NDArray[np.int64]) -> None:
        """Record a fault if a part has no images, or no images of a class that it needs."""
        held = set(labels.tolist())
        empty = [name for label, name in enumerate(self._classes) if label not in held]
        if part.name not in TESTS and self._source.classes is None:
            self._faults += complaints(
                [f"The class {name} in {part} has no images" for name in empty],
                " Add images, remove its folder, or declare the classes with --classes.",
            )
        if not held:
            self._faults.append(f"{part} contains no images.")

    def _survey(self) -> tuple[int, int, int]:
        """Return channels, height and width, as declared or from the headers of all images."""
        channels, size = self._source.channels, self._source.image_size
        if channels is not None and size is not None:
            return channels, size, size

        def header(image: ImageFile) -> tuple[str, int, int] | str:
            return looked_at(image.path, lambda opened: (opened.mode, *size_of(opened)), image)

        headers, faults, count = dict[str, tuple[str, int, int]](), [], len(self._images)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for done, seen in enumerate(pool.map(header, self._images), 1):
                path = self._images[done - 1].path
                if isinstance(seen, str):
                    faults.append(f"{path} {seen}")
                else:
                    headers[path] = seen
                if done % SOME == 0 or done == count > SOME:
                    LISTENER.get()(Computing(done, count, self._path.parent, what="headers"))
        if not self._source.skip_bad:
            self._faults += complaints(faults, REMEDY)
        colour = any(mode.partition(";")[0] not in GREY for mode, *_ in headers.values())
        channels = channels or (3 if colour else 1)
        if size is not None:
            return channels, size, size
        sizes = {(h, w): path for path, (_, w, h) in reversed(headers.items())}
        if len(sizes) > 1:
            some = [f"{h}x{w} ({path})" for (h, w), path in sorted(sizes.items())[:2]]
            self._faults.append(
                f"The images of {self._source.path} have {len(sizes)} sizes: {' and '.join(some)}. "
                "Add --image-size N to resize all of them to N by N."
            )
        height, width = next(iter(sizes), (0, 0))
        return channels, height, width

    def _decoded(self) -> Generator[Computing, None, RowFile]:
        """Return the file of decoded images."""
        return kept_file(
            self._path,
            len(self._images),
            self._shape,
            np.dtype(np.uint8),
            lambda file: decoded(file, self._images, self._source.levels),
            what="images",
        )

    def load(self) -> Generator[Computing, None, list[Records]]:
        """Return training and test images, decoded."""
        file = yield from self._decoded()
        if not self._source.skip_bad:
            refuse([*file.faults.values()], REMEDY)
        return [Records(Rows(file, rows), y, units) for rows, y, units in self._sides]


def _inferred(source: Source) -> tuple[str, ...]:
    """Return what is not declared, and so is read from the records."""
    sizes = {"channels": source.channels, "image size": source.image_size}
    schema = {**sizes, "classes": source.classes}
    return tuple(name for name, value in schema.items() if value is None)


def _repeated(names: list[str], depth: int) -> str:
    """Return a file name such as patient17_3.png, if most files share their first number.

    Or one such as ill/p17/3.png, if most files share a folder below that of the class. Return an
    empty string otherwise.
    """
    inner = [name for name in names if name.count("/") > depth]
    if len(names) < 2 * len(inner) > 2 * len(set(map(os.path.dirname, inner))):
        return inner[0]
    series = [match[1] for name in names if (match := SERIES.search(name))]
    several = len(series) > len(names) // 2 and 1 < len(set(series)) <= len(series) // 2
    return next(filter(SERIES.search, names)) if several else ""


def _image(entry: "os.DirEntry[str]", label: int) -> ImageFile | str:
    """Describe an image without opening it, or return why it cannot be one."""
    if label == NO_CLASS:
        return "belongs to no class of --classes"
    try:
        facts = entry.stat()
    except OSError as failure:  # such as a broken link, or one to itself
        return f"cannot be read as an image ({failure.strerror})"
    if not _is_image(entry.name):
        text = entry.name.lower().endswith(".txt")
        return "is not an image (texts need --backbone minilm)" if text else "is not an image"
    regular = stat.S_ISREG(facts.st_mode)
    return ImageFile.of(entry.path, label, facts) if regular else "is not a regular file"


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _strange_classes(parts: Sequence[Path]) -> Iterator[str]:
    """Yield the faults of parts with classes that the first one does not have."""
    known = set(_class_names(parts[0]))
    for part in parts[1:]:
        strange = sorted(set(_class_names(part)) - known)
        where = f"is in {part}, but not in {parts[0]}"
        yield from complaints([f"The class {name} {where}" for name in strange])


def _class_names(part: Path) -> list[str]:
    """Return the names of the folders in a folder."""
    entries = visible(part)
    names = [entry.name for entry in entries if is_folder(entry)]
    loose = [entry.name for entry in entries if _is_image(entry.name)]
    if not names or loose:
        what = f"It also contains images ({loose[0]})" if names else "It contains no folder"
        raise InputError(
            f"{part} must contain one folder of images per class and nothing else. {what}."
        )
    check_not_splits(part, names)
    return names
