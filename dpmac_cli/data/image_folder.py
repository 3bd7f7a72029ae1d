"""Datasets of images in folders named after their classes, at any depth."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.data.class_folders import UNLESS_SKIPPED, ClassFolders, FoundFile
from dpmac_cli.data.complaints import complaints
from dpmac_cli.data.decoding import Pictures, looked_at, size_of, usable_cores
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import raise_errors
from dpmac_cli.storage.cache import WHOLE, complete
from dpmac_cli.storage.paths import cache_folder
from dpmac_cli.storage.progress import LISTENER, Computing, outcome

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
#: Pillow's modes without colour. Modes such as I;16 are matched by the part before the semicolon.
GREY = ("1", "L", "LA", "I", "F")
#: Number of headers between reports of progress.
SOME = 1000
#: Version of the decoding, which is part of the cached file's name.
VERSION = 3
#: File names with two numbers, such as patient17_3.png: one of a person and one of an image.
SERIES = re.compile(r"([^/]*\d[^/]*)[-_. ]\d+\.\w+$")


def read_images(
    source: Source,
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], str]:
    """Return arrays like those of an .npz, why files are left out, and names of classes.

    The last value is a file name that suggests several images of one person; "" if there is none.
    With --skip-bad all images are decoded immediately, because that decides which ones are used.
    Raises InputError with every fault found.
    """
    folders = ClassFolders(source, SUFFIXES, ("an image", "images"))
    images, bad = folders.files, dict[int, str]()
    path = _decoded_file(source, images)
    file = complete(path)
    shape = file.shape if file is not None else _survey(source, images, path.parent, folders.faults)
    pictures = Pictures(images, np.arange(len(images)), shape, path, source)
    if source.skip_bad and images:
        raise_errors(folders.faults)
        bad = outcome(pictures.decoded()).faults  # check contents, not only headers
    found = folders.arrays(lambda rows: pictures[rows], bad)
    repeated = "" if source.unit else _repeated(folders.names, folders.depth)
    return found, tuple(folders.skipped), folders.classes, repeated


def _decoded_file(source: Source, images: Sequence[FoundFile]) -> Path:
    """Return the file of decoded images, whose name tells everything that determines them."""
    read = [source.channels, source.image_size, source.levels]
    key = [VERSION, str(source.path.resolve()), *read, images]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_folder() / f"{name}{WHOLE}"


def _survey(
    source: Source, images: Sequence[FoundFile], folder: Path, said: list[str]
) -> tuple[int, int, int]:
    """Return channels, height and width, as declared or from the headers of all images.

    Adds faults to ``said``.
    """
    channels, size = source.channels, source.image_size
    if channels is not None and size is not None:
        return channels, size, size

    def header(image: FoundFile) -> tuple[str, int, int] | str:
        return looked_at(image.path, lambda opened: (opened.mode, *size_of(opened)))

    headers, faults, count = dict[str, tuple[str, int, int]](), [], len(images)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for done, seen in enumerate(pool.map(header, images), 1):
            path = images[done - 1].path
            if isinstance(seen, str):
                faults.append(f"{path} {seen}")
            else:
                headers[path] = seen
            if done % SOME == 0 or done == count > SOME:
                LISTENER.get()(Computing(done, count, folder, what="headers"))
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
