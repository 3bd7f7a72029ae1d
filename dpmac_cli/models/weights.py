"""Weights of a network by name: published ones, and public ones from a safetensors file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.errors import InputError, ModelError

#: Keys of the headers that dpmac writes: of a published model, and of a private checkpoint.
MODEL_HEADER, CHECKPOINT_HEADER = "dpmac", "dpmac-checkpoint"
#: Exceptions raised by reading a header that is not as dpmac writes it.
BROKEN = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
#: Entries that do not fit and are named; the rest are counted.
NAMED = 8


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``.

    The hooks and the extra state of ``state_dict`` may hold statistics of private records.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names, in place."""
    for name, own in published(model).items():
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

        The layer ``head`` may start fresh, where the file has none of its shape. Raises ModelError
        if anything else does not fit.
        """
        wanted, prefix = published(model), f"{head}."
        faults = {
            name: fault
            for name in sorted(wanted.keys() | self.tensors.keys())
            if (fault := _fault(self.tensors.get(name), wanted.get(name)))
        }
        fresh = {name for name in faults if head is not None and name.startswith(prefix)}
        rest = [f"{name}: {fault}" for name, fault in faults.items() if name not in fresh]
        if rest:
            more = f"; and {len(rest) - NAMED} more" if len(rest) > NAMED else ""
            remedy = " Only one of the two has batch norm: with --fix-norm the network has none."
            on_one_side = any(name.endswith("running_mean") for name in faults)
            raise ModelError(
                f"--pretrained {self.path} does not fit the network: "
                f"{'; '.join(rest[:NAMED])}{more}. Only the last layer may be missing, or of "
                f"another shape.{remedy * on_one_side}"
            )
        left_out = prefix if fresh else "."  # a head of which only a part fits starts fresh
        adopt(model, {n: t for n, t in self.tensors.items() if not n.startswith(left_out)})
        if fresh:
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


def read_weights(path: Path) -> PublicWeights:
    """Read a safetensors file of public weights, never a pickle. Raises InputError."""
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
    except OSError as failure:
        raise InputError(
            f"--pretrained: {path} cannot be read ({failure.strerror or failure})."
        ) from failure
    except (safetensors.SafetensorError, ValueError, KeyError) as failure:
        raise InputError(
            f"--pretrained: {path} is not a whole safetensors file. Pickles (.pt, .pth, .bin) are "
            "never read, since they can run code. Where you trust one, convert it: safetensors."
            'torch.save_file(torch.load(FILE, weights_only=True), "weights.safetensors")'
        ) from failure
    size = int.from_bytes(content[:8], "little")
    header: dict[str, str] = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
    if CHECKPOINT_HEADER in header:
        raise InputError(
            f"--pretrained: {path} is a private checkpoint, from which the noise of its run can be "
            "computed. Public weights are in the model.safetensors of a run."
        )
    try:
        trained_on = str(json.loads(header[MODEL_HEADER])["dataset"]["name"])
    except BROKEN:
        trained_on = None
    return PublicWeights(path, hashlib.sha256(content).hexdigest(), tensors, trained_on)
