"""Weights of a network by name: published ones, and public ones from a file."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.features import LoraLinear

#: Keys of the headers that dpmac writes: of a published model, and of a private checkpoint.
MODEL_HEADER, CHECKPOINT_HEADER = "dpmac", "dpmac-checkpoint"
#: Exceptions raised by reading a header that is not as dpmac writes it.
BROKEN = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
#: Exceptions raised by reading what is no whole safetensors file.
NOT_SAFE = (safetensors.SafetensorError, ValueError, KeyError)
#: Entries that do not fit and are named; the rest are counted.
NAMED = 8


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``.

    Additions of LoRA are merged into the weights of their layers. The hooks and the extra state of
    ``state_dict`` may hold statistics of private records.
    """
    merged = {
        f"{path}.weight": module.merged()
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    return {**_held(model), **merged}


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors themselves that a model is published with, by their names."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    added = {id(part) for layer in layers for part in (layer.down, layer.up)}
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) not in added
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names, in place."""
    for name, own in _held(model).items():
        if name in tensors:
            own.copy_(tensors[name])


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class PublicWeights:
    """The contents of a file of public weights."""

    path: Path
    sha256: str  # of the file
    tensors: Mapping[str, Tensor]
    trained_on: str | None  # the dataset that dpmac trained them on, if the file says so

    def adopted_by(self, model: nn.Module, head: str | None) -> Iterator[str]:
        """Load the weights into a model in place, and yield notes for its author.

        The layer ``head`` may start fresh, where the file has none of its shape, or the model may
        not have it. Raises ModelError if anything else does not fit.
        """
        wanted, tensors, prefix = _held(model), self.tensors, f"{head}."
        faults = {
            name: fault
            for name in sorted(wanted.keys() | tensors.keys())
            if (fault := _fault(tensors.get(name), wanted.get(name)))
            and (name in tensors or not name.endswith("num_batches_tracked"))
        }
        fresh = {name for name in faults if head is not None and name.startswith(prefix)}
        rest = [f"{name}: {fault}" for name, fault in faults.items() if name not in fresh]
        if rest:
            more = f"; and {len(rest) - NAMED} more" if len(rest) > NAMED else ""
            remedy = " Only one of the two has batch norm: with --fix-norm the network has none."
            on_one_side = any(name.endswith("running_mean") for name in faults)
            raise ModelError(
                f"{self.path} does not fit the network: {'; '.join(rest[:NAMED])}{more}. Only the "
                "last layer may be missing, or of another shape; name the network that the "
                f"weights were trained in.{remedy * on_one_side}"
            )
        left_out = prefix if fresh else "."  # a head of which only a part fits starts fresh
        adopt(model, {n: t for n, t in tensors.items() if not n.startswith(left_out)})
        if fresh & wanted.keys():
            yield f"{self.path.name} has no layer '{head}' that fits: it starts fresh."


def _fault(found: Tensor | None, wanted: Tensor | None) -> str | None:
    """Return what is wrong with an entry of a file; None if it fits."""
    if wanted is None:
        return "nothing of that name in the network"
    if found is None:
        return "missing in the file"
    if found.shape != wanted.shape:
        return f"{tuple(found.shape)} in the file, {tuple(wanted.shape)} wanted"
    if found.is_floating_point() != wanted.is_floating_point():
        return f"{found.dtype} in the file, {wanted.dtype} wanted".replace("torch.", "")
    return None if found.isfinite().all() else "holds NaN or infinity"


def read_weights(
    path: Path, flag: str = "--pretrained", sha256: str = "", remedy: str = ""
) -> PublicWeights:
    """Read a safetensors file of public weights, or a pickle of tensors that is known.

    ``sha256`` are the first digits of the checksum of a known file, a pickle; "" for others.
    Messages name the ``flag`` that the file belongs to and give the ``remedy``, a sentence. Raises
    InputError if it cannot be read, is no safetensors file, or has another checksum.
    """
    try:
        content = path.read_bytes()
    except OSError as failure:
        why = failure.strerror or failure
        raise InputError(f"{flag}: {path} cannot be read ({why}). {remedy}".rstrip()) from failure
    found = hashlib.sha256(content).hexdigest()
    if not found.startswith(sha256):
        raise InputError(
            f"{flag}: {path} is not the file that is known: its SHA-256 is {found}, not {sha256}. "
            f"{remedy}"
        )
    if sha256:
        known = torch.load(io.BytesIO(content), "cpu", weights_only=True)  # noqa: TID251  (published, SHA-256)
        return PublicWeights(path, found, known, None)
    try:
        tensors, header = unpacked(content)
    except NOT_SAFE as failure:
        raise InputError(
            f"{flag}: {path} is not a whole safetensors file. Convert what torch.save wrote, where "
            "you trust it, in Python: safetensors.torch.save_file(torch.load("
            f'"{path}", weights_only=True), "{path.with_suffix(".safetensors")}")'
        ) from failure
    if CHECKPOINT_HEADER in header:
        raise InputError(
            f"{flag}: {path} is a private checkpoint, from which the noise of its run can be "
            "computed. Public weights are in the model.safetensors of a run."
        )
    try:
        trained_on = str(json.loads(header[MODEL_HEADER])["dataset"]["name"])
    except BROKEN:
        trained_on = None
    return PublicWeights(path, found, tensors, trained_on)


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header of a safetensors file. Raises :data:`NOT_SAFE`."""
    tensors = safetensors.torch.load(content)
    size = int.from_bytes(content[:8], "little")
    header: dict[str, str] = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
    return tensors, header
