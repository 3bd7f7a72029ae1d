"""The outputs of a frozen part for every record, computed once and kept on the disk.

They are the records in another shape, and as private: folder 0700, files 0600. A file is named by
all that decides its contents and carries a checksum. One that is damaged is computed anew, and
where none can be kept, the run goes on without. Never pickle.
"""

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dpmac_cli.data.dataset import EVALUATION_BATCH, Data, Split
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.files import PART, PRIVATE_MODE, written_atomically

PRIVATE_FOLDER = 0o700
VERSION = 1
HEADER = "dpmac-features"
#: Records whose features are part of a file's name: of what computes them, only that says all.
PROBED = 64
#: Seconds between looks at whether another process is done.
PATIENCE = 0.2


@dataclass(frozen=True)
class Computing:
    """Features are being computed, here or by another process.

    Attributes:
        done, records: how many. folder: where they will be kept. elsewhere: by another process.
    """

    done: int
    records: int
    folder: Path
    elsewhere: bool = False


@dataclass(frozen=True)
class Featured:
    """A data set of features.

    Attributes:
        data: its records; features need no more standardisation.
        sha256: of the features. notes: what the person who runs this should know.
    """

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
    """The features of every record, from the disk or computed and kept there.

    Two processes at a time compute them once: the second waits.

    Args:
        parts: computes them, on the device of the data.
        data: images.
        settings: what defines them beside weights and records, as JSON values.
        folder: where they are kept.
        stop: asked between batches.

    Raises:
        KeyboardInterrupt: ``stop`` said so.
    """
    key = _key(parts, data, settings)
    path = folder / f"{key}.safetensors"
    found: _Summed | None = None
    notes: tuple[str, ...] = ()
    try:
        _make_private(folder)
        found = _load(path, key)
        if found is None:
            waiting = Computing(0, _records(data), folder, elsewhere=True)
            with (yield from _lock(path, waiting, stop)):
                for part in folder.glob(f".{path.name}.*{PART}"):  # left behind by a killed process
                    part.unlink(missing_ok=True)
                found = _load(path, key)
                if found is None:
                    found = _summed((yield from _computed(parts, data, folder, stop)))
                    _keep(path, found, key)
                    found = _load(path, key) or found  # processes share a file's pages
    except (OSError, safetensors.SafetensorError) as failure:
        if found is None:
            found = _summed((yield from _computed(parts, data, folder, stop)))
        notes = (
            f"features cannot be kept in {folder} ({_why(failure)}): each run computes them anew. "
            "Make room there, or name another folder by DPMAC_CACHE_DIR.",
        )
    return Featured(_as_data(found.tensors, data), found.sha256, notes)


def stand_in(parts: FrozenFeatures, data: Data) -> Data:
    """The features of the first record in the place of everyone's: a step takes as long."""
    first = parts.features(data.standardised(data.train.images[:1]))
    shown = {
        name: first.expand(len(split), *first.shape[1:])
        for name, split in (("train", data.train), ("test", data.test))
    }
    return _as_data(shown, data)


@dataclass(frozen=True)
class _Summed:
    """Features of both splits, and their checksum."""

    tensors: dict[str, Tensor]
    sha256: str


def _summed(tensors: dict[str, Tensor]) -> _Summed:
    return _Summed(tensors, digest(tensors, {}))


def _key(parts: FrozenFeatures, data: Data, settings: Mapping[str, Any]) -> str:
    """SHA-256 over all that decides what the features are."""
    named = {
        **{f"weight {name}": tensor for name, tensor in parts.public_weights().items()},
        **{"train": data.train.images, "test": data.test.images},
        **{"gain": data.gain, "offset": data.offset},
        "probe": parts.features(data.standardised(data.train.images[:PROBED])),
    }
    record = {"version": VERSION, "torch": torch.__version__, **settings}
    return digest({name: tensor.detach().cpu() for name, tensor in named.items()}, record)


def _records(data: Data) -> int:
    return len(data.train) + len(data.test)


def _computed(
    parts: FrozenFeatures, data: Data, folder: Path, stop: Callable[[], bool]
) -> Generator[Computing, None, dict[str, Tensor]]:
    """Features of both splits on the CPU, in the batches of an evaluation."""
    found: dict[str, Tensor] = {}
    done = 0
    yield Computing(done, _records(data), folder)
    for name, split in (("train", data.train), ("test", data.test)):
        size = 1 if parts.isolated else EVALUATION_BATCH
        for begin in range(0, len(split), size):
            if begin % EVALUATION_BATCH == 0:  # as often whether or not samples run alone
                _check(stop)
            rows = slice(begin, begin + size)
            batch = parts.features(data.standardised(split.images[rows]))
            if begin == 0:
                found[name] = torch.empty(len(split), *batch.shape[1:], dtype=batch.dtype)
            found[name][rows] = batch
            done += len(batch)
            yield Computing(done, _records(data), folder)
    return found


def _as_data(found: Mapping[str, Tensor], images: Data) -> Data:
    device = images.gain.device
    return Data(
        Split(found["train"].to(device), images.train.labels),
        Split(found["test"].to(device), images.test.labels),
        torch.ones(1, 1, 1, device=device),
        torch.zeros(1, 1, 1, device=device),
    )


def _make_private(folder: Path) -> None:
    """Make a folder, or take it as it is, for its owner alone. Raises OSError."""
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError("the folder is another user's")
    if about.st_mode & 0o777 & ~PRIVATE_FOLDER:
        folder.chmod(PRIVATE_FOLDER)


def _lock(
    path: Path, waiting: Computing, stop: Callable[[], bool]
) -> Generator[Computing, None, AbstractContextManager[object]]:
    """Lock a file of features, until its process ends at the latest. Raises OSError."""
    # Only an flock ends with its process: a file system without one keeps no features.
    lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
    while True:
        try:
            return lock.acquire(timeout=PATIENCE)
        except Timeout:
            _check(stop)
            yield waiting


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        raise KeyboardInterrupt


def _keep(path: Path, found: _Summed, key: str) -> None:
    """Write features whole, or not at all. Raises OSError and SafetensorError."""
    header = {HEADER: json.dumps({"key": key, "sha256": found.sha256})}
    with written_atomically(path, PRIVATE_MODE) as partial:
        safetensors.torch.save_file(found.tensors, partial, header)


def _load(path: Path, key: str) -> _Summed | None:
    """Features as they were written; None if they are not there, or are damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            sealed = json.loads((opened.metadata() or {})[HEADER])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        found = _summed(tensors)
        whole = sealed == {"key": key, "sha256": found.sha256}
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def _why(failure: Exception) -> str:
    return (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
