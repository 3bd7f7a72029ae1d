"""Checksums and bytewise comparison of tensors, in which NaN equals NaN."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON record and names, dtypes, shapes and bytes of CPU tensors.

    Args:
        tensors: tensors by name, in any order.
        record: values of JSON.

    Returns:
        64 hexadecimal digits.
    """
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        checksum.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        checksum.update(_bytes(tensor).numpy().data)
    return checksum.hexdigest()


def identical(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors on one device are bitwise equal, so that NaN equals NaN.

    And 0.0 is not -0.0.

    Example:
        >>> identical(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
        True
    """
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8, shape (bytes,)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
