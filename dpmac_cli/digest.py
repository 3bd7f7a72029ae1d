"""A checksum over tensors and the JSON beside them: a file that was altered is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> str:
    """SHA-256 over a JSON record and the names, dtypes, shapes and bytes of tensors on the CPU."""
    found = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
