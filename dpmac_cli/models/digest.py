"""Checksums and bytewise comparison of tensors."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON record and names, dtypes, shapes and bytes of CPU tensors."""
    found = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(_bytes(tensor).numpy().data)
    return found.hexdigest()


def identical(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors on one device are bitwise equal, so that NaN equals NaN."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
