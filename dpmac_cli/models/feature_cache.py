"""Cache of the outputs of a frozen part for every record, computed once.

They are the records in another shape, and as private: folder 0700, files 0600. A file is named by
all that decides its contents and carries a checksum; a damaged one is computed again. Where none
can be kept, the run continues without.
"""

import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.files import PART, PRIVATE_FOLDER, PRIVATE_MODE, written_atomically

VERSION = 3
#: Images whose features are computed at a time, always as many.
AT_A_TIME = 256
#: Records whose features are part of a file's name, since they depend on code as well.
PROBED = 64
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

    Of several processes one computes them; the others wait.

    Args:
        parts: computes them, on the device of the data.
        settings: what defines them beside weights and records, as JSON values.
        stop: asked between batches; KeyboardInterrupt is raised when it returns True.
    """
    key, tensors, notes = _key(parts, data, settings), None, list[str]()
    path = folder / f"{key}.safetensors"
    # Only an flock ends with its process: a file system without one keeps no features.
    lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE_MODE, fallback_to_soft=False)
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError("the folder is another user's")
        folder.chmod(PRIVATE_FOLDER)
        kept = _load(path, key)
        while kept is None:
            try:
                with lock.acquire(timeout=PATIENCE):
                    for part in folder.glob(f".{path.name}.*{PART}"):  # of a killed process
                        part.unlink(missing_ok=True)
                    kept = _load(path, key)
                    if kept is None:
                        tensors = yield from _computed(parts, data, folder, stop)
                        header = {"key": key, "sha256": digest(tensors, {})}
                        with written_atomically(path, PRIVATE_MODE) as partial:
                            safetensors.torch.save_file(tensors, partial, header)
                        kept = _load(path, key) or (tensors, header["sha256"])  # pages are shared
            except Timeout:
                if stop():
                    raise KeyboardInterrupt from None
                yield Computing(0, len(data.train) + len(data.test), folder, elsewhere=True)
    except (OSError, safetensors.SafetensorError) as failure:
        tensors = tensors or (yield from _computed(parts, data, folder, stop))
        kept = tensors, digest(tensors, {})
        why = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        notes.append(
            f"features cannot be kept in {folder} ({why}): each run computes them again. "
            "Make room there, or name another folder by DPMAC_CACHE_DIR."
        )
    found, sha256 = kept
    one = torch.ones(1, 1, 1, device=data.gain.device)
    train, test = (
        Split(found[name].to(one.device), split.labels)
        for name, split in (("train", data.train), ("test", data.test))
    )
    return Featured(Data(train, test, one, torch.zeros_like(one)), sha256, tuple(notes))


def _key(parts: FrozenFeatures, data: Data, settings: Mapping[str, Any]) -> str:
    """Return SHA-256 over all that decides what the features are."""
    named = {
        **{f"weight {name}": tensor for name, tensor in parts.public_weights().items()},
        **{"train": data.train.images, "test": data.test.images},
        **{"gain": data.gain, "offset": data.offset},
        "probe": parts.features(data.standardised(data.train.images[:PROBED])),
    }
    record = {"version": VERSION, "torch": torch.__version__, **settings}
    return digest({name: tensor.detach().cpu() for name, tensor in named.items()}, record)


def _computed(
    parts: FrozenFeatures, data: Data, folder: Path, stop: Callable[[], bool]
) -> Generator[Computing, None, dict[str, Tensor]]:
    """Compute the features of both splits, and keep them on the CPU."""
    found: dict[str, Tensor] = {}
    done, records = 0, len(data.train) + len(data.test)
    yield Computing(done, records, folder)
    for name, split in (("train", data.train), ("test", data.test)):
        for begin in range(0, len(split), AT_A_TIME):
            if stop():
                raise KeyboardInterrupt
            rows = slice(begin, begin + AT_A_TIME)
            batch = _features(parts, data.standardised(split.images[rows]))
            if begin == 0:
                found[name] = torch.empty(len(split), *batch.shape[1:], dtype=batch.dtype)
            found[name][rows] = batch
            done += len(batch)
            yield Computing(done, records, folder)
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
