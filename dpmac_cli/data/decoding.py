"""Decode image files into a file of rows, by processes of their own. Loads no torch.

Threads of one process gain half as much: what Pillow does around decoding holds Python's lock.
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

#: Formats in which what Pillow opens as 32 bits a pixel has 16 of them.
DEEP = ("PNG", "PPM")
CHANGED = "changed while the run began"
#: Images for which no other process is begun.
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
        """Describe a file; nothing that writes to it can leave ``st_ctime`` as it is."""
        return cls(path, label, facts.st_size, facts.st_ctime_ns)


def decoded(rows: RowFile, images: Sequence[ImageFile]) -> Generator[Computing, None, list[str]]:
    """Decode the images that are missing from a file, which has a row for each.

    Returns:
        What is wrong with those that could not be decoded.

    Raises:
        InputError: files changed meanwhile.
    """
    yield _progress(rows)
    if len(rows.missing()) > FEW:
        yield from _by_processes(rows, images)
    faults, progress = list[str](), _progress(rows)
    for row in rows.missing().tolist():  # few, or those at fault, to say why
        yield progress  # whoever is told may stop here
        if fault := decode_into(rows, row, images[row]):
            faults.append(f"{images[row].path} {fault}")
    changed = [fault for fault in faults if fault.endswith(CHANGED)]
    refuse(changed, " Run the command again when nothing writes to it any more.")
    yield _progress(rows)
    return faults


def _progress(rows: RowFile) -> Computing:
    done = len(rows) - len(rows.missing())
    return Computing(done, len(rows), rows.path.parent, what="images", nbytes=rows.nbytes)


def _by_processes(rows: RowFile, images: Sequence[ImageFile]) -> Iterator[Computing]:
    """Decode images by one process per core, except those at fault."""
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
                start_new_session=True,  # Ctrl-C is for this process to answer
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
                f"A process that decodes images ended with code {worker.returncode}. If "
                "memory ran out, free some. Run the command again: what is decoded is kept."
            )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_into(rows: RowFile, row: int, image: ImageFile) -> str | None:
    """Decode an image into its row, or return what is wrong with it. Raises OSError."""
    found = looked_at(image.path, lambda opened: decode(opened, rows.shape))
    if isinstance(found, str):
        return found
    if ImageFile.found(image.path, image.label, os.stat(image.path)) != image:
        return CHANGED
    rows.write(row, found)
    return None


def decode(opened: "Image", shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an image as (channels, height, width), resized where it has another size."""
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


def looked_at(path: str, look: "Callable[[Image], Seen]") -> "Seen | str":
    """Open an image and return what is seen in it, or why that cannot be."""
    from PIL import Image  # noqa: PLC0415  (only pictures need it)

    try:
        with Image.open(path) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in DEEP):
                fault = "has 32 bits a pixel, which no public range goes with"
                return f"{fault} (save it with 8 or 16 bits)"
            return look(image)
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return f"cannot be read as an image ({failure})"


def main() -> None:
    """Decode the images that standard input names, except those at fault."""
    rows, parent = RowFile(Path(sys.argv[1]), writable=True), os.getppid()
    for row, image in json.load(sys.stdin):
        if os.getppid() != parent:  # which was killed
            return
        decode_into(rows, row, ImageFile(*image))


if __name__ == "__main__":
    main()
