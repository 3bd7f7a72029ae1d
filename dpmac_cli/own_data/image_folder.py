"""Images in folders named after their classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.errors import InputError
from dpmac_cli.own_data.common import (
    Arrays,
    check_classes,
    constants,
    facts_of,
    refuse,
    split,
    untested,
)
from dpmac_cli.source import Found, Source

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Modes of Pillow's that have no colour, but for what I;16 and its kin say of their bytes.
GREY = ("1", "L", "LA", "I", "F")
#: Formats in which what Pillow opens as 32 bits a pixel has 16 of them.
DEEP = ("PNG", "PPM")
TRAIN, TEST = "train", "test"


class ImageFolder:
    """Images in folders named after their classes, with or without train/ and test/ above them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._skipped: list[str] = []
        root = source.path
        parts = [root / name for name in (TRAIN, TEST) if (root / name).is_dir()]
        if len(parts) == 1:
            raise InputError(
                f"{root} holds a folder {parts[0].name} alone. Both {TRAIN} and {TEST} are wanted, "
                "or the classes' folders right there, and --test-fraction of them is held out. If "
                f"{parts[0].name} is the name of a class, call it something else."
            )
        self._classes = _class_names(parts[0] if parts else root)
        check_classes(self._classes, source)
        if parts:
            strange = sorted(set(_class_names(parts[1])) - set(self._classes))
            refuse(
                [f"The class {name} is in {parts[1]}, but not in {parts[0]}" for name in strange]
            )
            self._train, self._test = (self._files(part) for part in parts)
        else:
            everyone = self._files(root)
            names = [os.fsencode(path.relative_to(root).as_posix()) for path, _ in everyone]
            train, test = split(names, _labels(everyone), self._classes, source)
            self._train, self._test = ([everyone[i] for i in rows] for rows in (train, test))
        self._channels, size = self._survey([path for path, _ in (*self._train, *self._test)])
        mean, std = constants(source, self._channels)
        shape = (self._channels, *size)
        sizes = (len(self._train), len(self._test))
        facts = facts_of(sizes, shape, self._classes, mean, std, 255)
        unseen = untested(self._classes, _labels(self._test))
        self.found = Found(facts, not parts, tuple(self._skipped), unseen)

    def _files(self, part: Path) -> list[tuple[Path, int]]:
        """Images and their labels, in order."""
        found: list[tuple[Path, int]] = []
        strange: list[str] = []
        for label, name in enumerate(self._classes):
            where = part / name
            if not where.is_dir():  # a test set need not have every class
                continue
            for path in sorted(p for p in where.iterdir() if not p.name.startswith(".")):
                reason = "" if path.suffix.lower() in SUFFIXES else "is not an image"
                if path.is_dir():
                    reason = "is a folder, but images of a class lie in one folder"
                if not reason and self._source.skip_bad:
                    reason = _fault_of_image(path) or ""
                if reason:
                    strange.append(f"{path} {reason}")
                else:
                    found.append((path, label))
        if self._source.skip_bad:
            self._skipped += strange
        else:
            refuse(strange, " Remove them, or add --skip-bad to go on without them.")
        missing = sorted(set(range(len(self._classes))) - {label for _, label in found})
        if missing and part.name != TEST:
            names = [
                f"The class {self._classes[label]} in {part} holds no image" for label in missing
            ]
            refuse(names, " Remove its folder, or fill it.")
        if not found:
            raise InputError(f"{part} holds no images.")
        return found

    def _survey(self, paths: Sequence[Path]) -> tuple[int, tuple[int, int]]:
        """Channels, and height and width, by the headers of all images."""
        from PIL import Image  # noqa: PLC0415

        colour, faults = False, []
        sizes: dict[tuple[int, int], Path] = {}
        for path in paths:
            try:
                with Image.open(path) as image:
                    colour = colour or image.mode.partition(";")[0] not in GREY
                    sizes.setdefault((image.height, image.width), path)
                    if fault := _fault_of_pixels(image):
                        faults.append(f"{path} {fault}")
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as failure:
                faults.append(f"{path} cannot be read as an image ({failure})")
        refuse(faults, " Remove them, or add --skip-bad to go on without them.")
        channels = 3 if colour else 1
        if self._source.image_size is not None:
            return channels, (self._source.image_size, self._source.image_size)
        if len(sizes) > 1:
            some = [f"{h}x{w} ({path})" for (h, w), path in list(sizes.items())[:2]]
            raise InputError(
                f"The images of {self._source.path} have {len(sizes)} sizes: {' and '.join(some)}. "
                "Add --image-size N to resize them all to N by N."
            )
        return channels, next(iter(sizes))

    def load(self) -> tuple[Arrays, Arrays]:
        """Training and test images, decoded."""
        faults: list[str] = []
        train, test = (self._read(files, faults) for files in (self._train, self._test))
        refuse(faults, " Remove them, or add --skip-bad to go on without them.")
        return train, test

    def _read(self, files: Sequence[tuple[Path, int]], faults: list[str]) -> Arrays:
        shape = self.found.facts.shape
        images = np.zeros((len(files), *shape), np.uint8)
        for row, (path, _) in enumerate(files):
            try:
                images[row] = _decode(path, shape, self._source.image_size is not None)
            except (OSError, ValueError, SyntaxError) as failure:
                faults.append(f"{path} cannot be read as an image ({failure})")
        return images, _labels(files)


def _labels(files: Sequence[tuple[Path, int]]) -> NDArray[np.int64]:
    return np.array([label for _, label in files], np.int64)


def _class_names(part: Path) -> list[str]:
    """Names of the folders in a folder."""
    names = sorted(p.name for p in part.iterdir() if p.is_dir() and not p.name.startswith("."))
    loose = sorted(p.name for p in part.iterdir() if p.suffix.lower() in SUFFIXES)
    if not names or loose:
        what = f"images beside them ({loose[0]})" if names else "none"
        raise InputError(
            f"{part} must hold a folder of images for each class and nothing else; there is {what}."
        )
    return names


def _decode(path: Path, shape: tuple[int, int, int], resize: bool) -> NDArray[np.uint8]:
    """An image as (channels, height, width)."""
    from PIL import Image  # noqa: PLC0415

    channels, height, width = shape
    with Image.open(path) as opened:
        image = _in_eight_bits(opened).convert("L" if channels == 1 else "RGB")
    if resize:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)


def _in_eight_bits(opened: "Image") -> "Image":
    """The same image; of 16 bits a pixel, 65535 becomes 255. Pillow cuts off at 255 instead."""
    from PIL import Image  # noqa: PLC0415

    if not opened.mode.startswith("I"):
        return opened
    return Image.fromarray(np.rint(np.asarray(opened) / 257).astype(np.uint8))


def _fault_of_pixels(image: "Image") -> str | None:
    """Why it cannot be known what black and white are."""
    if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
        return "has 32 bits a pixel, which no public range goes with (save it with 8 or 16 bits)"
    return None


def _fault_of_image(path: Path) -> str | None:
    """Why a file cannot be read to its end."""
    from PIL import Image  # noqa: PLC0415

    try:
        with Image.open(path) as image:
            image.load()
            return _fault_of_pixels(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as failure:
        return f"cannot be read as an image ({failure})"
