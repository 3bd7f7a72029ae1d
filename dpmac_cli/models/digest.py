"""Checksums and bytewise comparison of tensors, in which NaN equals NaN."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """Return a checksum of tensors and facts: SHA-256 of names, dtypes, shapes, bytes and JSON.

    Args:
        tensors: tensors by name, on the CPU. Their order does not matter.
        record: facts, as values of JSON.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> digest({"b": torch.ones(2)}, {"epochs": 3})[:8]
        '3809696b'
    """
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        checksum.update(_bytes(tensor).numpy().data)
    return checksum.hexdigest()


def identical(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes: NaN equals NaN.

    And 0.0 is not -0.0.

    Args:
        a: a tensor.
        b: a tensor on the same device.

    Example:
        >>> identical(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
        True
    """
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8, shape (bytes,)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
