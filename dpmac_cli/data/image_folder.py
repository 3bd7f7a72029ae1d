"""Datasets of images in folders named after their classes, decoded into a file of rows."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dpmac_cli.config.facts import Source, complaints
from dpmac_cli.data.cache import WHOLE, Computed, Rows, complete, kept_file
from dpmac_cli.data.class_folders import UNLESS_SKIPPED, ClassFolders, FoundFile
from dpmac_cli.errors import RunError, raise_errors
from dpmac_cli.files import cache_folder
from dpmac_cli.libraries import torch, torch_data
from dpmac_cli.progress import report

Seen = TypeVar("Seen")

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Pillow's modes without colour. Modes such as I;16 are matched by the part before the semicolon.
GREY = ("1", "L", "LA", "I", "F")
#: Formats whose 16-bit images Pillow opens as 32 bits per pixel.
DEEP = ("PNG", "PPM")
#: Formats in which further pictures belong to the first one, such as its depth.
COMPANIONS = ("MPO",)
#: EXIF's tag of the orientation, and the turns of its values as numbers of Image.Transpose. Pillow
#: turns TIFF itself.
ORIENTATION, TURNS = 0x0112, {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
BITS_PER_SAMPLE, WHITE = 258, 65535
#: Largest number of images that are decoded without worker processes.
FEW = 128
#: Number of images that a process decodes between reports of progress.
AT_A_TIME = 16
#: Version of the decoding, which is part of the cached file's name.
VERSION = 4


def read_images(source: Source) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return arrays like those of an .npz, why files are left out, and names of classes.

    Images are decoded into a file of rows, unless they are there. Raises InputError with every
    fault found.
    """
    folders = ClassFolders(source, SUFFIXES, ("an image", "images"))
    images = folders.files
    path, paths = _decoded_file(source, images), [image.path for image in images]
    if (file := complete(path)) is None:
        shape = _survey(source, images, folders.faults)
        raise_errors(folders.faults)
        file = kept_file(
            path,
            len(paths),
            shape,
            np.dtype(np.uint8),
            lambda: decoded(paths, shape, source.levels),
            what="images",
        )
    found = folders.arrays(lambda rows: Rows(file, rows), file.faults)
    return found, tuple(folders.skipped), folders.classes


def _decoded_file(source: Source, images: Sequence[FoundFile]) -> Path:
    """Return the file of decoded images, whose name tells everything that determines them."""
    read = [source.channels, source.image_size, source.levels]
    key = [VERSION, str(source.path.resolve()), *read, images]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_folder() / f"{name}{WHOLE}"


def _survey(source: Source, images: Sequence[FoundFile], said: list[str]) -> tuple[int, int, int]:
    """Return channels, height and width, as declared or from the headers of all images.

    Adds faults to ``said``.
    """
    channels, size = source.channels, source.image_size
    if channels is not None and size is not None:
        return channels, size, size

    def header(image: FoundFile) -> tuple[str, int, int] | str:
        return looked_at(image.path, lambda opened: (opened.mode, *size_of(opened)))

    headers, faults = dict[str, tuple[str, int, int]](), []
    with ThreadPoolExecutor(usable_cores()) as pool:
        for image, seen in zip(images, pool.map(header, images), strict=True):
            path = image.path
            if isinstance(seen, str):
                faults.append(f"{path} {seen}")
            else:
                headers[path] = seen
    if not source.skip_bad:
        said += complaints(faults, UNLESS_SKIPPED)
    colour = any(mode.partition(";")[0] not in GREY for mode, *_ in headers.values())
    channels = channels or (3 if colour else 1)
    if size is not None:
        return channels, size, size
    sizes = {(h, w): path for path, (_, w, h) in reversed(headers.items())}
    if len(sizes) > 1:
        some = [f"{h}x{w} ({path})" for (h, w), path in sorted(sizes.items())[:2]]
        said.append(
            f"The images of {source.path} have {len(sizes)} sizes: {' and '.join(some)}. "
            "Add {image_size=}N to resize all of them to N by N."
        )
    height, width = next(iter(sizes), (0, 0))
    return channels, height, width


def decoded(paths: Sequence[str], shape: tuple[int, ...], levels: int | None = None) -> Computed:
    """Yield decoded images in order, with why some could not be decoded, by their rows.

    Those are zeros. Reports progress.

    Args:
        shape: (channels, height, width) of all of them.
        levels: see :func:`decode`.
    """

    def decode_some(some: Sequence[int]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        images, faults = np.zeros((len(some), *shape), np.uint8), dict[int, str]()
        for place, row in enumerate(some):
            image = decoded_image(paths[row], shape, levels)
            if isinstance(image, str):
                faults[row] = f"{paths[row]} {image}"
            else:
                images[place] = image
        return images, faults

    several, done = len(paths) > FEW, 0
    loader: Iterable[tuple[NDArray[np.uint8], dict[int, str]]] = torch_data.DataLoader(
        range(len(paths)),  # type: ignore[arg-type]
        AT_A_TIME,
        collate_fn=decode_some,
        num_workers=usable_cores() if several else 0,
        multiprocessing_context="fork" if several else None,  # the function cannot be pickled
        generator=torch.Generator(),  # not the global one, from which seeds would be drawn
    )
    try:
        for images, faults in loader:
            yield images, faults
            done += len(images)
            report(done, len(paths), cache_folder(), "images")
    except RuntimeError as failure:
        raise RunError(
            f"A process that decodes images has ended ({failure}). If memory ran out, free some, "
            "and run the command again."
        ) from failure


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decoded_image(
    path: str, shape: tuple[int, ...], levels: int | None = None
) -> NDArray[np.uint8] | str:
    """Return a decoded image, or why it cannot be decoded."""
    return looked_at(path, lambda opened: decode(opened, shape, levels))


def decode(
    opened: Image.Image, shape: tuple[int, ...], levels: int | None = None
) -> NDArray[np.uint8]:
    """Return an image upright as (channels, height, width), resized if its size differs.

    Args:
        levels: value of white in grey images with 16 bits per pixel; None for the largest one that
            the file's format can hold.

    Raises:
        ValueError: ``levels`` cannot be applied to a colour image with 16 bits per channel.
    """
    (channels, height, width), turn = shape, turn_of(opened)
    if opened.mode.startswith("I"):  # 16 bits: map white to 255; Pillow would clip at 255
        pixels = np.rint(np.asarray(opened) / ((levels or _white(opened)) / 255))
        opened = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    elif levels is not None and any("16" in str(tile[3]) for tile in getattr(opened, "tile", ())):
        raise ValueError("{levels} is for grey images; save colours with 8 bits per channel")
    mode = "L" if channels == 1 else "RGB"
    image = opened if opened.mode == mode else opened.convert(mode)
    if turn is not None:
        image = image.transpose(Image.Transpose(turn))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    result: NDArray[np.uint8] = np.asarray(image, np.uint8).reshape(height, width, channels)
    return result.transpose(2, 0, 1)


def _white(opened: Image.Image) -> int:
    """Return the largest value of a grey image: TIFF also stores 12 bits per pixel."""
    bits = getattr(opened, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))
    return min(WHITE, (1 << int(max(bits))) - 1)


def turn_of(opened: Image.Image) -> int | None:
    """Return how to turn an image upright, as its EXIF says; None if it is upright."""
    if opened.format == "TIFF":
        return None
    try:  # not opened.getexif(), which decodes a PNG to look for EXIF behind its pixels
        return TURNS.get(Image.Image.getexif(opened).get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001  (malformed EXIF says nothing)
        return None


def size_of(opened: Image.Image) -> tuple[int, int]:
    """Return the width and height of an image once it is upright."""
    width, height = opened.size
    return (height, width) if turn_of(opened) in (2, 4, 5, 6) else (width, height)


def looked_at(path: str, look: Callable[[Image.Image], Seen]) -> Seen | str:
    """Open an image and return the result of ``look``, or why it cannot be read."""
    try:
        with open(path, "rb") as file, Image.open(file) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
                fault = "has 32 bits per pixel, for which there is no public range"
                return f"{fault} (save it with 8 or 16 bits)"
            if getattr(image, "is_animated", False) and image.format not in COMPANIONS:
                return "has several frames or pages (save each as a file of its own)"
            return look(image)
    except UnidentifiedImageError:  # its message names an object of Python
        return "cannot be read as an image (damaged, or of an unknown format)"
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return f"cannot be read as an image ({getattr(failure, 'strerror', None) or failure})"
