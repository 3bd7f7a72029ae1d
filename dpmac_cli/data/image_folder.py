"""Datasets of images in folders named after their classes, at any depth."""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.data.class_folders import UNLESS_SKIPPED, ClassFolders, FoundFile
from dpmac_cli.data.complaints import complaints
from dpmac_cli.data.decoding import decoded, looked_at, size_of, usable_cores
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import raise_errors
from dpmac_cli.storage.cache import WHOLE, Rows, complete, kept_file
from dpmac_cli.storage.paths import cache_folder
from dpmac_cli.storage.progress import outcome

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Pillow's modes without colour. Modes such as I;16 are matched by the part before the semicolon.
GREY = ("1", "L", "LA", "I", "F")
#: Version of the decoding, which is part of the cached file's name.
VERSION = 3


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
        file = outcome(
            kept_file(
                path,
                len(paths),
                shape,
                np.dtype(np.uint8),
                lambda rows: decoded(rows, paths, source.levels),
                what="images",
            )
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
            "Add --image-size N to resize all of them to N by N."
        )
    height, width = next(iter(sizes), (0, 0))
    return channels, height, width
