"""Images in folders named after their classes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import (
    Arrays,
    check_classes,
    complaints,
    constants,
    found,
    refuse,
    split,
)
from dpmac_cli.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Modes of Pillow's that have no colour, but for what I;16 and its kin say of their bytes.
GREY = ("1", "L", "LA", "I", "F")
#: Formats in which what Pillow opens as 32 bits a pixel has 16 of them.
DEEP = ("PNG", "PPM")
TRAIN, TESTS = "train", ("test", "validation", "val")
NO_CLASS = -1
#: Images that a thread decodes in a row: its turns cost less than threads that alternate.
IN_A_ROW = 16
REMEDY = " Remove them, or add --skip-bad to leave them out."


class ImageFolder:
    """Images in folders named after their classes, with or without train/ and test/ above them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._skipped: list[str] = []
        self._faults: list[str] = []  # messages, raised together
        self._stamps: dict[Path, tuple[int, int]] = {}
        root, declared = source.path, source.classes
        names = [name for name in (TRAIN, *TESTS) if name not in (declared or ())]
        parts = [root / name for name in names if (root / name).is_dir()]
        if len(parts) > 2:
            some = ", ".join(part.name for part in parts)
            raise InputError(f"{root} holds {some}: keep one set to test on, and move the others.")
        if len(parts) == 1 and declared is None:
            raise InputError(
                f"{root} holds a folder {parts[0].name} alone. Both {TRAIN} and test are wanted, "
                "or the classes' folders right there, and --test-fraction of them is held out. If "
                f"{parts[0].name} is the name of a class, call it something else."
            )
        if len(parts) < 2 or parts[0].name != TRAIN:  # then these are classes
            parts = []
        self._classes = declared or tuple(_class_names(parts[0] if parts else root))
        check_classes(self._classes, source)
        if parts and declared is None:
            where = f"is in {parts[1]}, but not in {parts[0]}"
            strange = sorted(set(_class_names(parts[1])) - set(self._classes))
            self._faults += complaints([f"The class {name} {where}" for name in strange])
        files = [self._files(part) for part in parts or [root]]
        channels, size = self._survey([path for path, _ in chain(*files)])
        if self._faults:
            raise InputError(self._faults)
        if parts:
            self._train, self._test = files
        else:
            [everyone] = files
            keys = [os.fsencode(path.relative_to(root).as_posix()) for path, _ in everyone]
            needed = self._classes if declared is None else None
            train, test = split(keys, _labels(everyone), needed, source)
            self._train, self._test = ([everyone[i] for i in rows] for rows in (train, test))
        schema = {"channels": source.channels, "image size": source.image_size, "classes": declared}
        self.found = found(
            source,
            (_labels(self._train), _labels(self._test)),
            (channels, *size),
            self._classes,
            constants(source, channels),
            held_out=not parts,
            inferred=tuple(name for name, value in schema.items() if value is None),
            skipped=tuple(self._skipped),
        )

    def _files(self, part: Path) -> list[tuple[Path, int]]:
        """Images and their labels, in order."""
        files = [(path, self._fault(path, label), label) for path, label in self._candidates(part)]
        found = [(path, label) for path, reason, label in files if reason is None]
        strange = [f"{path} {reason}" for path, reason, _ in files if reason is not None]
        if self._source.skip_bad:  # contents decide, not headers alone
            shape = (self._source.channels or 3, 1, 1)
            faults = _look_at([path for path, _ in found], lambda _, image: _decode(image, shape))
            strange += faults.values()
            found = [file for row, file in enumerate(found) if row not in faults]
            self._skipped += strange
        else:
            self._faults += complaints(strange, REMEDY)
        held = {label for _, label in found}
        empty = [name for label, name in enumerate(self._classes) if label not in held]
        if part.name not in TESTS and self._source.classes is None:
            self._faults += complaints(
                [f"The class {name} in {part} holds no image" for name in empty],
                " Remove its folder, fill it, or declare the classes with --classes.",
            )
        if not found:
            self._faults.append(f"{part} holds no images.")
        return found

    def _candidates(self, part: Path) -> Iterator[tuple[Path, int]]:
        """Files and their labels, in order; NO_CLASS for those of no declared class."""
        for label, name in enumerate(self._classes):
            if (part / name).is_dir():  # not every class has records
                yield from ((path, label) for path in _visible(part / name))
        if self._source.classes is not None:
            for path in _visible(part):
                if path.is_dir() and path.name not in self._classes:
                    yield from ((inner, NO_CLASS) for inner in _visible(path))
                elif path.suffix.lower() in SUFFIXES and not path.is_dir():
                    yield path, NO_CLASS

    def _fault(self, path: Path, label: int) -> str | None:
        """Why a file cannot be used, without a look inside; None if it can."""
        if label == NO_CLASS:
            return "belongs to no class of --classes"
        if path.is_dir():
            return "is a folder, but images of a class lie in one folder"
        if path.exists() and not path.is_file():
            return "is not a regular file"
        if path.suffix.lower() not in SUFFIXES:
            return "is not an image"
        return None

    def _survey(self, paths: Sequence[Path]) -> tuple[int, tuple[int, int]]:
        """Channels, and height and width, as declared or else by the headers of all images."""
        seen: dict[int, tuple[str, int, int]] = {}

        def look(row: int, image: "Image") -> None:
            seen[row] = (image.mode, image.height, image.width)
            self._stamps[paths[row]] = _stamp(paths[row])

        self._faults += complaints(list(_look_at(paths, look).values()), REMEDY)
        colour = any(mode.partition(";")[0] not in GREY for mode, *_ in seen.values())
        channels = self._source.channels or (3 if colour else 1)
        if self._source.image_size is not None:
            return channels, (self._source.image_size, self._source.image_size)
        sizes = {(h, w): paths[row] for row, (_, h, w) in sorted(seen.items())}
        if len(sizes) > 1:
            some = [f"{h}x{w} ({path})" for (h, w), path in sorted(sizes.items())[:2]]
            self._faults.append(
                f"The images of {self._source.path} have {len(sizes)} sizes: {' and '.join(some)}. "
                "Add --image-size N to resize them all to N by N."
            )
        return channels, next(iter(sizes), (0, 0))

    def load(self) -> tuple[Arrays, Arrays]:
        """Return training and test images, decoded."""
        shape, count = self.found.facts.shape, len(self._train)
        paths = [path for path, _ in (*self._train, *self._test)]
        images = np.zeros((len(paths), *shape), np.uint8)

        def store(row: int, image: "Image") -> None:
            images[row] = _decode(image, shape)

        refuse(list(_look_at(paths, store).values()), REMEDY)
        changed = [path for path in paths if _stamp(path) != self._stamps[path]]
        refuse(
            [f"{path} changed while the run began" for path in changed],
            " Run the command again when nothing writes to it any more.",
        )
        return (images[:count], _labels(self._train)), (images[count:], _labels(self._test))


def _labels(files: Sequence[tuple[Path, int]]) -> NDArray[np.int64]:
    return np.array([label for _, label in files], np.int64)


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _class_names(part: Path) -> list[str]:
    """Names of the folders in a folder."""
    names = [path.name for path in _visible(part) if path.is_dir()]
    loose = sorted(p.name for p in part.iterdir() if p.suffix.lower() in SUFFIXES)
    if not names or loose:
        what = f"images beside them ({loose[0]})" if names else "none"
        raise InputError(
            f"{part} must hold a folder of images for each class and nothing else; there is {what}."
        )
    return names


def _decode(opened: "Image", shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An image as (channels, height, width), resized where it has another size."""
    from PIL import Image  # noqa: PLC0415  (only pictures need it)

    channels, height, width = shape
    if opened.mode.startswith("I"):  # of 16 bits: 65535 becomes 255; Pillow cuts off at 255 instead
        opened = Image.fromarray(np.rint(np.asarray(opened) / 257).astype(np.uint8))
    mode = "L" if channels == 1 else "RGB"
    image = opened if opened.mode == mode else opened.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is written: its size in bytes, and its time in nanoseconds."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _look_at(paths: Sequence[Path], look: "Callable[[int, Image], object]") -> dict[int, str]:
    """Open images in as many threads as there are cores, as Pillow decodes beside Python.

    Args:
        paths: of the images.
        look: called with the place of an image in ``paths`` and the image.

    Returns:
        What is wrong with those that cannot be looked at, by their place, in order.
    """

    def some(begin: int) -> list[tuple[int, str]]:
        rows = range(begin, min(begin + IN_A_ROW, len(paths)))
        faults = [(row, _fault_of_image(paths[row], partial(look, row))) for row in rows]
        return [(row, f"{paths[row]} {fault}") for row, fault in faults if fault is not None]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(chain.from_iterable(pool.map(some, range(0, len(paths), IN_A_ROW))))


def _fault_of_image(path: Path, look: "Callable[[Image], object]") -> str | None:
    """Why a file cannot be opened and looked at; None if it can."""
    from PIL import Image  # noqa: PLC0415  (only pictures need it)

    try:
        with Image.open(path) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
                fault = "has 32 bits a pixel, which no public range goes with"
                return f"{fault} (save it with 8 or 16 bits)"
            look(image)
            return None
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return f"cannot be read as an image ({failure})"
