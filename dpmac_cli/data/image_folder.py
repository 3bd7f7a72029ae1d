"""Datasets of images in folders named after their classes, decoded into a file of rows.

Each image is decoded by itself: upright, in the channels and the size of all, with 8 bits per
channel. Sizes and modes are read from their headers first, if settings do not declare them, so that
a dataset of several sizes fails before anything is decoded.

Decoded images are private, and are kept in the cache for their owner alone (``cache.py``). Those of
new records, to predict, are not kept. Images with 32 bits per pixel have no public range, and those
with several frames are several records, so both are refused.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from dpmac_cli.config.facts import complaints, left_out
from dpmac_cli.data.cache import WHOLE, Computed, RowFile, Rows, complete, kept_file
from dpmac_cli.data.class_folders import UNLESS_SKIPPED, ClassFolders, FoundFile
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.reader import Reading, register_reader
from dpmac_cli.errors import RunError, raise_errors
from dpmac_cli.files import cache_folder
from dpmac_cli.libraries import torch, torch_data
from dpmac_cli.progress import report

Seen = TypeVar("Seen")
#: Decoded images, shape (images, channels, height, width), and why some could not be decoded.
Batch: TypeAlias = tuple[NDArray[np.uint8], dict[int, str]]
#: Mode, width and height of an image.
Header: TypeAlias = tuple[str, int, int]
#: Decodes an opened image, or returns why it cannot be used.
Look = Callable[[Image.Image], NDArray[np.uint8] | str]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Pillow's modes without colour. Modes such as I;16 are matched by the part before the semicolon.
GREY = ("1", "L", "LA", "I", "F")
#: Formats whose 16-bit images Pillow opens as 32 bits per pixel.
DEEP = ("PNG", "PPM")
#: Formats in which further pictures belong to the first one, such as its depth.
COMPANIONS = ("MPO",)
#: EXIF's tag of the orientation, and the turns of its values as numbers of Image.Transpose. Pillow
#: turns TIFF itself.
ORIENTATION = 0x0112
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
BITS_PER_SAMPLE, WHITE = 258, 65535
#: Largest number of images that are decoded without worker processes.
FEW = 128
#: Number of images that a process decodes between reports of progress.
AT_A_TIME = 16
#: Version of the decoding, which is part of the cached file's name.
VERSION = 5, PIL.__version__


@register_reader("images", lambda declared: declared.path.is_dir() and declared.texts is None)
def read_images(declared: Declaration) -> Reading:
    """Return the images of a folder, decoded into a file of rows unless they are there.

    Args:
        declared: the dataset. Channels and size that it does not declare are those of the images.

    Raises:
        InputError: with every fault found.
    """
    folders = ClassFolders(declared, SUFFIXES, ("an image", "images"))
    file = _decoded(declared, folders) if declared.labels else _decoded_for_now(declared, folders)
    arrays = folders.arrays(lambda rows: Rows(file, rows), file.faults)
    return Reading(arrays, left_out(folders.skipped), folders.classes, converted=True)


def _decoded(declared: Declaration, folders: ClassFolders) -> RowFile:
    """Return the file of decoded images, which are decoded unless it is there.

    Args:
        declared: the dataset.
        folders: its files. Faults of their headers are added.

    Raises:
        InputError: with every fault so far, before any image is decoded.
    """
    path = _decoded_file(declared, folders.files)
    file = complete(path)
    if file is not None:
        return file
    shape = _survey(declared, folders.files, folders.faults)
    raise_errors(folders.faults)
    return _file_of(path, folders.files, shape, look_of(declared, shape))


def _decoded_for_now(declared: Declaration, folders: ClassFolders) -> RowFile:
    """Return the file of decoded new images, which must be as the model needs them.

    It has no name any more once it is open, so nothing is kept.

    Args:
        declared: new records, with the shape that the model needs.
        folders: their files.
    """
    path = cache_folder() / f"{secrets.token_hex(32)}{WHOLE}"
    look = look_of(declared, declared.shape)
    file = _file_of(path, folders.files, declared.shape, look)
    path.unlink(missing_ok=True)
    return file


def look_of(declared: Declaration, shape: tuple[int, ...]) -> Look:
    """Return what decodes an opened image of a dataset, or returns why it cannot be used.

    Args:
        declared: the dataset. New images must fit the model.
        shape: (channels, height, width) of all images.
    """
    if declared.labels:
        return partial(decode, shape=shape, levels=declared.settings.levels)
    return partial(decode_new, declared=declared)


def decode_new(
    opened: Image.Image,
    declared: Declaration,
) -> NDArray[np.uint8] | str:
    """Return a new image, decoded, or why it does not fit the model.

    Images are converted only if those of the training were.

    Args:
        opened: the image.
        declared: new records, with the settings of the training and the shape of its images.

    Returns:
        the image, shape (channels, height, width); or the fault.
    """
    channels, height, width = declared.shape
    settings = declared.settings
    wide, high = size_of(opened)
    if settings.image_size is None and (wide, high) != (width, height):
        return f"has {high}x{wide} pixels, but the model needs {height}x{width}"
    if channels == 1 and not _is_grey(opened.mode) and settings.channels is None:
        return "has colours, but the model needs grey images"
    return decode(opened, declared.shape, settings.levels)


def _is_grey(mode: str) -> bool:
    """Return whether images of one of Pillow's modes have no colour."""
    return mode.partition(";")[0] in GREY


def _file_of(
    path: Path,
    images: Sequence[FoundFile],
    shape: tuple[int, ...],
    look: Look,
) -> RowFile:
    """Return a file of decoded images, which are decoded unless it is there.

    Args:
        path: path of the file.
        images: files of the images.
        shape: (channels, height, width) of all of them.
        look: decodes an opened image.
    """
    paths = [image.path for image in images]
    compute = partial(decoded, paths, shape, look)
    return kept_file(path, len(paths), shape, np.dtype(np.uint8), compute, what="images")


def _decoded_file(declared: Declaration, images: Sequence[FoundFile]) -> Path:
    """Return the file of decoded images, whose name tells everything that determines them.

    Args:
        declared: the dataset, with the settings of decoding.
        images: facts of the files, which tell other contents apart.
    """
    settings = declared.settings
    folder = str(declared.path.resolve())
    read = [declared.channels, settings.image_size, settings.levels]
    key = [*VERSION, folder, *read, images]
    contents = json.dumps(key).encode()
    name = hashlib.sha256(contents).hexdigest()
    return cache_folder() / f"{name}{WHOLE}"


def _survey(
    declared: Declaration, images: Sequence[FoundFile], faults: list[str]
) -> tuple[int, int, int]:
    """Return channels, height and width, as declared or from the headers of all images.

    Args:
        declared: the dataset. If it declares all of them, no file is opened.
        images: files of the images.
        faults: faults so far; new ones are added.
    """
    channels, size = declared.channels, declared.settings.image_size
    if channels is not None and size is not None:
        return channels, size, size

    def header(image: FoundFile) -> Header | str:
        return looked_at(image.path, header_of)

    headers = dict[str, Header]()
    unreadable = list[str]()
    with ThreadPoolExecutor(usable_cores()) as pool:
        for image, result in zip(images, pool.map(header, images), strict=True):
            if isinstance(result, str):
                unreadable.append(f"{image.path} {result}")
            else:
                headers[image.path] = result
    if not declared.settings.skip_bad:
        faults += complaints(unreadable, UNLESS_SKIPPED)
    return shape_of_all(declared, headers, faults)


def shape_of_all(
    declared: Declaration, headers: Mapping[str, Header], faults: list[str]
) -> tuple[int, int, int]:
    """Return channels, height and width, as declared or of all images.

    Args:
        declared: the dataset. Channels that it does not declare are 3 if any image has colours.
        headers: mode, width and height of each image by its name.
        faults: faults so far; one is added if images have several sizes.
    """
    channels, size = declared.channels, declared.settings.image_size
    colour = any(not _is_grey(mode) for mode, _, _ in headers.values())
    channels = channels or (3 if colour else 1)
    if size is not None:
        return channels, size, size
    sizes = dict[tuple[int, int], str]()  # the first image of each
    for path, (_, width, height) in headers.items():
        sizes.setdefault((height, width), path)
    if len(sizes) > 1:
        smallest = sorted(sizes.items())[:2]
        examples = [f"{height}x{width} ({path})" for (height, width), path in smallest]
        faults.append(
            f"The images of {declared.path} have {len(sizes)} sizes: {' and '.join(examples)}. "
            "Add {image_size=}N to resize all of them to N by N."
        )
    height, width = next(iter(sizes), (0, 0))
    return channels, height, width


def decoded(
    paths: Sequence[str],
    shape: tuple[int, ...],
    look: Look,
) -> Computed:
    """Yield decoded images in order, with why some could not be decoded, by their rows.

    Those are zeros. More than :data:`FEW` images are decoded by a process per core. Reports
    progress.

    Args:
        paths: files of the images.
        shape: (channels, height, width) of all of them.
        look: decodes an opened image, or returns why it cannot be used.

    Raises:
        RunError: a process that decodes images has ended.
    """

    def decode_some(rows: Sequence[int]) -> Batch:
        images = np.zeros((len(rows), *shape), np.uint8)
        faults = dict[int, str]()
        for place, row in enumerate(rows):
            image = looked_at(paths[row], look)
            if isinstance(image, str):
                faults[row] = f"{paths[row]} {image}"
            else:
                images[place] = image
        return images, faults

    several, done = len(paths) > FEW, 0
    loader: Iterable[Batch] = torch_data.DataLoader(
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
    """Return the number of cores that this process may use: at most those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def decode(
    opened: Image.Image,
    shape: tuple[int, ...],
    levels: int | None = None,
) -> NDArray[np.uint8] | str:
    """Return an image upright, resized if its size differs, or why it cannot be used.

    That is so if ``levels`` are declared for colours with 16 bits per channel.

    Args:
        opened: the image.
        shape: (channels, height, width) that it gets.
        levels: value of white in grey images with 16 bits per pixel; None for the largest one that
            the file's format can hold.

    Returns:
        the image, shape (channels, height, width); or the fault.
    """
    channels, height, width = shape
    turn = turn_of(opened)
    if opened.mode.startswith("I"):  # 16 bits: map white to 255; Pillow would clip at 255
        white = levels or _white(opened)
        levels_of_255 = np.rint(np.asarray(opened) / (white / 255))
        clipped = levels_of_255.clip(0, 255)
        opened = Image.fromarray(clipped.astype(np.uint8))
    elif levels is not None and _has_16_bits(opened):
        return "has 16 bits per channel ({levels} is for grey images; save colours with 8 bits)"
    mode = "L" if channels == 1 else "RGB"
    image = opened if opened.mode == mode else opened.convert(mode)
    if turn is not None:
        image = image.transpose(Image.Transpose(turn))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8)
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def _has_16_bits(opened: Image.Image) -> bool:
    """Return whether an image is stored with 16 bits per channel, as its file's tiles say."""
    return any("16" in str(tile[3]) for tile in getattr(opened, "tile", ()))


def _white(opened: Image.Image) -> int:
    """Return the largest value of a grey image: TIFF also stores 12 bits per pixel."""
    bits = getattr(opened, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))
    return min(WHITE, (1 << int(max(bits))) - 1)


def turn_of(opened: Image.Image) -> int | None:
    """Return how to turn an image upright, as its EXIF says; None if it is upright.

    Returns:
        a number of ``Image.Transpose``.
    """
    if opened.format == "TIFF":
        return None
    try:  # not opened.getexif(), which decodes a PNG to look for EXIF behind its pixels
        orientation = Image.Image.getexif(opened).get(ORIENTATION, 1)
        return TURNS.get(orientation)
    except Exception:  # noqa: BLE001  (malformed EXIF says nothing)
        return None


def header_of(opened: Image.Image) -> Header:
    """Return the mode of an image, as Pillow names it, and its upright width and height.

    Args:
        opened: an image that Pillow has opened and not decoded.
    """
    return opened.mode, *size_of(opened)


def size_of(opened: Image.Image) -> tuple[int, int]:
    """Return the width and height of an image once it is upright.

    Args:
        opened: an image that Pillow has opened and not decoded.
    """
    width, height = opened.size
    if turn_of(opened) in (2, 4, 5, 6):
        return height, width
    return width, height


def looked_at(
    source: str | Image.Image,
    look: Callable[[Image.Image], Seen],
) -> Seen | str:
    """Return the result of ``look`` at an image, or why it cannot be used.

    Args:
        source: path of a file, or an image that was opened.
        look: what to do with the opened image.
    """
    try:
        if isinstance(source, Image.Image):
            return seen_in(source, look)
        with open(source, "rb") as file, Image.open(file) as image:
            return seen_in(image, look)
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return unreadable(failure)


def seen_in(
    image: Image.Image,
    look: Callable[[Image.Image], Seen],
) -> Seen | str:
    """Return the result of ``look`` at an opened image, or why it is none of one public range.

    Args:
        image: the opened image.
        look: what to do with it.
    """
    has_32_bits = image.mode == "I" and image.format not in DEEP
    if image.mode == "F" or has_32_bits:
        fault = "has 32 bits per pixel, for which there is no public range"
        return f"{fault} (save it with 8 or 16 bits)"
    if getattr(image, "is_animated", False) and image.format not in COMPANIONS:
        return "has several frames or pages (save each as a file of its own)"
    return look(image)


def unreadable(failure: Exception) -> str:
    """Return why an image cannot be read, as a phrase without a full stop.

    Pillow's message is left out, because it may quote the image.

    Args:
        failure: what Pillow raised.
    """
    why = getattr(failure, "strerror", None) or "damaged, or of an unknown format"
    return f"cannot be read as an image ({why})"
