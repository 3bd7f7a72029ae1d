"""Outputs of a network's frozen part for every record, computed once and stored in the cache.

Features are as private as the records that they were computed from.
"""

import copy
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.data.cache import WHOLE, Computed, RowFile, Rows, kept_file
from dpmac_cli.dp.clipping.batch_invariance import unaffected
from dpmac_cli.features.frozen import FrozenFeatures, OneByOne, by_threads
from dpmac_cli.models.dataset import Data, fingerprint
from dpmac_cli.models.digest import digest
from dpmac_cli.progress import report
from dpmac_cli.randomness.keystream import KEY_BYTES
from dpmac_cli.randomness.layers import LayerDraws

VERSION = 10
#: Fixed number of images whose features are computed at a time.
AT_A_TIME = 256
#: Records between reports of progress if the frozen part itself keeps records apart.
SEPARATELY = 512
#: Records whose features enter a file's name, because features also depend on the code.
PROBED = 16


def featured(
    parts: FrozenFeatures,
    data: Data,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    keep: bool = True,
) -> Data:
    """Return a dataset with the features of every record in place of the records.

    Features are read from the cache, or computed and stored there, which reports progress. They
    need no standardisation. They are computed by copies of the network, so that nothing that it
    keeps is published.

    Args:
        parts: network whose frozen part computes the features, on the device of the data.
        data: training and test records. Their targets stay as they are.
        settings: JSON values of everything else that features depend on besides weights and
            records. They are part of the name of the stored file.
        folder: the cache's folder. Its files are as private as the records.
        keep: whether the file stays there. Otherwise it has no name once it is open.

    Raises:
        ModelError: a program's function of features mixes records, or fails.
    """
    tried = copy.deepcopy(parts)
    probed = data.standardised(data.train.at(slice(PROBED))[0])
    # A frozen part may draw random numbers, in the order of the records: one record changes those
    # of the records after it, so nobody may know them.
    with LayerDraws(secrets.token_bytes(KEY_BYTES)).of(1):
        if isinstance(tried.frozen, OneByOne):
            tried.frozen.check(probed)
        like = tried.features(probed).cpu().numpy()
        # One that is not kept is of this run alone: another could remove it before it is open.
        name = _key(parts, data, like, settings) if keep else secrets.token_hex(32)
        file = kept_file(
            folder / f"{name}{WHOLE}",
            sum(map(len, data.splits)),
            like.shape[1:],
            like.dtype,
            lambda: _computed(parts, data, folder),
        )
    if not keep:
        file.path.unlink()
    return _featured(file, data)


def _featured(file: RowFile, data: Data) -> Data:
    places = np.split(np.arange(len(file)), [len(data.train)])
    splits = []
    for rows, split in zip(places, data.splits, strict=False):
        splits.append(split.read_from(Rows(file, rows), data.gain.device))
    return data.replaced_by(splits)


def _key(parts: FrozenFeatures, data: Data, like: Any, settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that determines the features, for the name of their file.

    ``like`` are the features of the first PROBED records: a change of the code changes them.
    """
    tensors = {"gain": data.gain.cpu(), "offset": data.offset.cpu()}
    tensors["probe"] = torch.from_numpy(like)
    for name, tensor in parts.public_weights().items():
        tensors[f"weight {name}"] = tensor.detach().cpu()
    records = fingerprint(*data.splits)
    record = {"version": VERSION, "torch": torch.__version__, "records": records, **settings}
    return digest(tensors, record)


def _computed(parts: FrozenFeatures, data: Data, folder: Path) -> Computed:
    """Yield the features of one split after the other, and report progress; none has a fault.

    A part is an array of rows, one per record, and an empty mapping: no record was left out.
    """
    done, total = 0, sum(map(len, data.splits))
    spread = not (parts.separate or data.gain.is_cuda)
    at_once = SEPARATELY if parts.separate else AT_A_TIME
    count = at_once * torch.get_num_threads() if spread else at_once
    each = by_threads if spread else map
    # Tried as it is run: on one thread.
    [run] = each(lambda data: _run_of(parts, data), [data])
    report(done, total, folder)
    for split in data.splits:
        for begin in range(0, len(split), count):
            images = data.standardised(split.at(slice(begin, begin + count))[0])
            features = torch.cat([*each(run, torch.split(images, at_once))])
            rows = features.view(len(images), *features.shape[1:])  # one row per record
            yield rows.cpu().numpy(), {}
            done += len(images)
            report(done, total, folder)


def _run_of(parts: FrozenFeatures, data: Data) -> Callable[[Tensor], Tensor]:
    """Return a function that maps records to features, none of which depends on other records.

    Nor on the place in a batch: the batch size is fixed, because rounding depends on it, and adding
    a record must not change the features of others.
    """
    if parts.separate:
        return parts.features
    like = data.gain.new_empty(data.train.images.shape[1:])
    return unaffected(parts.features, like, AT_A_TIME, may_mix=parts.user_supplied)
