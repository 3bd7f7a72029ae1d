"""Cache of the outputs of a frozen part for every record, computed once.

They are the records in another shape, and as private: folder 0700, files 0600. A file is named by
all that decides its contents and carries a checksum; a damaged one is computed again. Those used
longest ago are removed. Where none can be kept, the run continues without.
"""

import hashlib
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.storage.cache import BEGUN, WHOLE, make_room
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.files import PART, PRIVATE_FOLDER, PRIVATE_MODE, written_atomically
from dpmac_cli.storage.paths import cache_size

VERSION = 4
#: Images whose features are computed at a time, always as many.
AT_A_TIME = 256
#: Records whose features are part of a file's name, since they depend on code as well.
PROBED = 16
#: Seconds between looks at whether another process is done.
PATIENCE = 0.2


@dataclass(frozen=True)
class Computing:
    """Progress: features of ``done`` records are computed, here or ``elsewhere``."""

    done: int
    records: int
    folder: Path
    elsewhere: bool = False


@dataclass(frozen=True)
class Featured:
    """A dataset of features, which need no standardisation, with their SHA-256 and notes."""

    data: Data
    sha256: str
    notes: tuple[str, ...] = ()


def featured(
    parts: FrozenFeatures,
    data: Data,
    settings: Mapping[str, Any],
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Computing, None, Featured]:
    """Return the features of every image, from the cache or computed and kept there.

    Of several processes one computes them; the others wait. What a killed one had computed is used.

    Args:
        parts: computes them, on the device of the data.
        settings: what defines them beside weights and records, as JSON values.
        stop: asked between batches; KeyboardInterrupt is raised when it returns True.
    """
    like = parts.features(data.standardised(data.train.images[:PROBED]))
    key = _key(parts, data, like, settings)
    work, notes = _Work(parts, data, like, folder, stop), list[str]()
    try:
        _prepare(folder)
        found, sha256 = yield from _kept(folder / f"{key}{WHOLE}", key, work)
    except (OSError, safetensors.SafetensorError) as failure:
        found = work.found or (yield from work.computed())
        sha256 = digest(found, {})
        why = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        notes.append(
            f"features cannot be kept in {folder} ({why}): each run computes them again. "
            "Make room there, or name another folder by DPMAC_CACHE_DIR."
        )
    one = torch.ones(1, 1, 1, device=data.gain.device)
    train, test = (
        Split(found[name].to(one.device), split.labels)
        for name, split in (("train", data.train), ("test", data.test))
    )
    return Featured(Data(train, test, one, torch.zeros_like(one)), sha256, tuple(notes))


def _prepare(folder: Path) -> None:
    """Make a folder that only its owner can read. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError("the folder is another user's")
    folder.chmod(PRIVATE_FOLDER)


def _kept(
    path: Path, key: str, work: "_Work"
) -> Generator[Computing, None, tuple[dict[str, Tensor], str]]:
    """Return features and their checksum from a file, which one process computes where it lacks.

    Raises OSError and SafetensorError where it cannot be written.
    """
    # Only an flock ends with its process: a file system without one keeps no features.
    lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
    kept = _load(path, key)
    while kept is None:
        try:
            with lock.acquire(timeout=PATIENCE):
                for part in path.parent.glob(f".{path.name}.*{PART}"):  # of a killed process
                    part.unlink(missing_ok=True)
                kept = _load(path, key)
                if kept is None:
                    with _Blocks(path.with_suffix(BEGUN)) as blocks:
                        tensors = yield from work.computed(blocks)
                    header = {"key": key, "sha256": digest(tensors, {})}
                    with written_atomically(path, PRIVATE_MODE) as partial:
                        safetensors.torch.save_file(tensors, partial, header)
                    path.with_suffix(BEGUN).unlink()
                    kept = _load(path, key) or (tensors, header["sha256"])  # pages are shared
        except Timeout:
            if work.stop():
                raise KeyboardInterrupt from None
            yield Computing(0, work.records, path.parent, elsewhere=True)
    os.utime(path)
    make_room(path.parent, cache_size(), path)
    return kept


def _key(parts: FrozenFeatures, data: Data, like: Tensor, settings: Mapping[str, Any]) -> str:
    """Return SHA-256 over all that decides what the features are, some of which are ``like``."""
    named = {
        **{f"weight {name}": tensor for name, tensor in parts.public_weights().items()},
        **{"train": data.train.images, "test": data.test.images},
        **{"gain": data.gain, "offset": data.offset, "probe": like},
    }
    record = {"version": VERSION, "torch": torch.__version__, **settings}
    return digest({name: tensor.detach().cpu() for name, tensor in named.items()}, record)


class _Blocks:
    """Blocks of features in a file, each before its checksum, in the order they were computed."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE), "r+b")

    def __enter__(self) -> "_Blocks":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, block: Tensor) -> bool:
        """Read the next block; return False, with the rest removed, if it is not whole."""
        place = self._file.tell()
        content = self._file.read(block.nbytes)
        if self._file.read(32) == hashlib.sha256(content).digest():
            block.copy_(torch.frombuffer(bytearray(content), dtype=block.dtype).view_as(block))
            return True
        self._file.seek(place)
        self._file.truncate()
        return False

    def append(self, block: Tensor) -> None:
        """Write the next block. Raises OSError."""
        content = block.numpy().tobytes()
        self._file.write(content + hashlib.sha256(content).digest())
        self._file.flush()


@dataclass
class _Work:
    """The features to compute, of the shape and dtype of ``like``; ``found`` once they are."""

    parts: FrozenFeatures
    data: Data
    like: Tensor
    folder: Path
    stop: Callable[[], bool]
    found: dict[str, Tensor] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Number of records of both splits."""
        return len(self.data.train) + len(self.data.test)

    def computed(
        self, blocks: _Blocks | None = None
    ) -> Generator[Computing, None, dict[str, Tensor]]:
        """Compute the features of both splits, but for those in ``blocks``, on the CPU."""
        done, found, like = 0, dict[str, Tensor](), self.like
        yield Computing(done, self.records, self.folder)
        for name, split in (("train", self.data.train), ("test", self.data.test)):
            found[name] = torch.empty(len(split), *like.shape[1:], dtype=like.dtype)
            for begin in range(0, len(split), AT_A_TIME):
                if self.stop():
                    raise KeyboardInterrupt
                rows = slice(begin, begin + AT_A_TIME)
                block = found[name][rows]
                if blocks is None or not blocks.read_into(block):
                    images = self.data.standardised(split.images[rows])
                    block.copy_(_features(self.parts, images))
                    if blocks is not None:
                        blocks.append(block)
                done += len(block)
                yield Computing(done, self.records, self.folder)
        self.found = found
        return found


def _features(parts: FrozenFeatures, images: Tensor) -> Tensor:
    """Return the features of at most :data:`AT_A_TIME` images.

    How an operation rounds depends on the size of its batch, which is therefore always the same:
    a record more must not change the features of those that happen to come last.
    """
    if parts.isolated:
        return torch.cat([parts.features(image) for image in torch.split(images, 1)])
    filling = images.new_zeros(AT_A_TIME - len(images), *images.shape[1:])
    return parts.features(torch.cat([images, filling]))[: len(images)]


def _load(path: Path, key: str) -> tuple[dict[str, Tensor], str] | None:
    """Return features and their checksum; None if they are not there or are damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            sealed = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, ValueError):
        return None
    found = digest(tensors, {})
    return (tensors, found) if sealed == {"key": key, "sha256": found} else None
