"""Decode image files into a file of rows, in worker processes. Never imports torch.

Threads would gain half as much, because Pillow holds the GIL during some of the work.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.splits import refuse
from dpmac_cli.errors import RunError
from dpmac_cli.storage.progress import Computing
from dpmac_cli.storage.rows import RowFile

if TYPE_CHECKING:
    from PIL.Image import Image

Seen = TypeVar("Seen")

#: Formats whose 16-bit images Pillow opens as 32 bits per pixel.
DEEP = ("PNG", "PPM")
CHANGED = "changed while the run began"
#: Largest number of images that are decoded without worker processes.
FEW = 128
#: Seconds between reports of progress.
PATIENCE = 0.2


class ImageFile(NamedTuple):
    """An image file as it was found."""

    path: str
    label: int
    size: int  # bytes
    changed: int  # nanoseconds, of the last change to contents or name

    @classmethod
    def found(cls, path: str, label: int, facts: os.stat_result) -> "ImageFile":
        """Describe a file. Writing to it always changes ``st_ctime``."""
        return cls(path, label, facts.st_size, facts.st_ctime_ns)


def decoded(rows: RowFile, images: Sequence[ImageFile]) -> Generator[Computing, None, list[str]]:
    """Decode the images that are missing from a file with one row per image.

    Returns:
        One message for each image that could not be decoded.

    Raises:
        InputError: files changed during decoding.
    """
    yield _progress(rows)
    if len(rows.missing()) > FEW:
        yield from _by_processes(rows, images)
    faults, progress = list[str](), _progress(rows)
    for row in rows.missing().tolist():  # few images, or damaged ones, to report why
        yield progress  # a listener may stop here
        if fault := decode_into(rows, row, images[row]):
            faults.append(f"{images[row].path} {fault}")
    changed = [fault for fault in faults if fault.endswith(CHANGED)]
    refuse(changed, " Run the command again once nothing writes to these files.")
    yield _progress(rows)
    return faults


def _progress(rows: RowFile) -> Computing:
    done = len(rows) - len(rows.missing())
    return Computing(done, len(rows), rows.path.parent, what="images", nbytes=rows.nbytes)


def _by_processes(rows: RowFile, images: Sequence[ImageFile]) -> Iterator[Computing]:
    """Decode images with one process per core, and skip damaged ones."""
    job, count = [(row, images[row]) for row in rows.missing().tolist()], usable_cores()
    with ExitStack() as stack:
        workers = []
        for number in range(count):
            given = stack.enter_context(TemporaryFile("w+"))
            json.dump(job[number::count], given)
            given.seek(0)
            worker = subprocess.Popen(  # noqa: S603  (this very module)
                [sys.executable, "-m", __name__, str(rows.path)],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # only this process handles Ctrl-C
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        while any(worker.poll() is None for worker in workers):
            time.sleep(PATIENCE)
            yield _progress(rows)
    for worker in workers:
        if worker.returncode:
            raise RunError(
                f"A process that decodes images exited with code {worker.returncode}. If memory "
                "ran out, free some. Run the command again: images already decoded are kept."
            )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_into(rows: RowFile, row: int, image: ImageFile) -> str | None:
    """Decode an image into its row, or return why it cannot be decoded. Raises OSError."""
    found = looked_at(image.path, lambda opened: decode(opened, rows.shape))
    if isinstance(found, str):
        return found
    if ImageFile.found(image.path, image.label, os.stat(image.path)) != image:
        return CHANGED
    rows.write(row, found)
    return None


def decode(opened: "Image", shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an image as (channels, height, width), resized if its size differs."""
    from PIL import Image  # noqa: PLC0415  (only pictures need it)

    channels, height, width = shape
    if opened.mode.startswith("I"):  # 16 bits: map 65535 to 255; Pillow would clip at 255
        opened = Image.fromarray(np.rint(np.asarray(opened) / 257).astype(np.uint8))
    mode = "L" if channels == 1 else "RGB"
    image = opened if opened.mode == mode else opened.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)


def looked_at(path: str, look: "Callable[[Image], Seen]") -> "Seen | str":
    """Open an image and return the result of ``look``, or why it cannot be read."""
    from PIL import Image  # noqa: PLC0415  (only pictures need it)

    try:
        with Image.open(path) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
                fault = "has 32 bits per pixel, for which there is no public range"
                return f"{fault} (save it with 8 or 16 bits)"
            return look(image)
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return f"cannot be read as an image ({failure})"


def main() -> None:
    """Decode the images listed on standard input, and skip damaged ones."""
    rows, parent = RowFile(Path(sys.argv[1]), writable=True), os.getppid()
    for row, image in json.load(sys.stdin):
        if os.getppid() != parent:  # the parent was killed
            return
        decode_into(rows, row, ImageFile(*image))


if __name__ == "__main__":
    main()
