"""Weights of a network by name: published weights, and public weights from a file."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from dpmac_cli.config.facts import some_of
from dpmac_cli.errors import InputError, ModelError, first_fault, panics_as_errors
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.models.trained_part import LoraLinear

#: Keys of the headers that dpmac writes: of a published model, and of a private checkpoint.
MODEL_HEADER, CHECKPOINT_HEADER = "dpmac", "dpmac-checkpoint"
#: Name of the file of a published model.
MODEL_FILE = "model.safetensors"


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``.

    Those of registered features are left out, because they are found again by their checksum. LoRA
    updates are merged into the weights of their layers. ``state_dict`` itself is not used: its
    hooks and extra state may contain statistics of private records.
    """
    merged = {
        f"{path}.weight": module.merged()
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    held = {name: t for name, t in _held(model).items() if _is_published(model, name)}
    return {**held, **merged}


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name, without copying them."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    added = {id(part) for layer in layers for part in (layer.down, layer.up)}
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) not in added
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _is_published(model: nn.Module, name: str) -> bool:
    return not isinstance(model, FrozenFeatures) or model.publishes(name)


@torch.no_grad()
def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names, in place."""
    for name, own in _held(model).items():
        if name in tensors:
            own.copy_(tensors[name])


def stored(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, as it is stored in a file."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def check_publishable(model: nn.Module) -> None:
    """Raise ModelError if a model has a tensor that cannot be stored in a model file."""
    for name, tensor in published(model).items():
        try:
            loaded = safetensors.torch.load(safetensors.torch.save({name: stored(tensor)}))
            adopt(model, loaded)
            storable = not not_finite(loaded)
        except Exception as failure:  # torch raises a different error for each kind of tensor
            raise _not_storable(name, tensor) from failure
        if not storable:
            raise _not_storable(name, tensor)


def _not_storable(name: str, tensor: Tensor) -> ModelError:
    kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device}".replace("torch.", "")
    return ModelError(
        f"{name} of the network ({kind}) cannot be saved in {MODEL_FILE} and loaded again. Use a "
        "dense tensor of finite real numbers that shares no memory; or, if it need not be saved, "
        "register_buffer(..., persistent=False)."
    )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a fault for each tensor that is not finite; no run publishes one."""
    return [
        f"{name} contains NaN or infinity" for name, t in tensors.items() if not t.isfinite().all()
    ]


@dataclass(frozen=True)
class PublicWeights:
    """Contents of a file of public weights."""

    path: Path
    sha256: str  # SHA-256 of the file
    tensors: Mapping[str, Tensor]
    trained_on: str | None = None  # dataset that dpmac trained them on, if the file records it
    published: bool = True  # whether all records they were trained on are published, as far as said

    def adopted_by(self, model: nn.Module, head: str | None) -> Iterator[str]:
        """Load the weights into a model in place, and yield notes for the user.

        The layer ``head`` keeps its initial weights if the file has none of its shape, and may be
        absent from the model. Raises ModelError if anything else does not fit.
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
            remedy = " Only one of them has batch norm; {fix_norm} removes it from the network."
            on_one_side = any(name.endswith("running_mean") for name in faults)
            raise ModelError(
                f"{self.path} does not fit the network: {some_of(rest)[0]}. Only the "
                "last layer may be missing or have another shape. Use the network that the "
                f"weights were trained in.{remedy * on_one_side}"
            )
        left_out = prefix if fresh else "."  # ignore the whole head if any part does not fit
        adopt(model, {n: t for n, t in tensors.items() if not n.startswith(left_out)})
        if fresh & wanted.keys():
            yield f"{self.path.name} has no matching layer '{head}'. It starts from scratch."


def _fault(found: Tensor | None, wanted: Tensor | None) -> str | None:
    """Return why an entry of a file does not fit; None if it does."""
    if wanted is None:
        return "not in the network"
    if found is None:
        return "missing from the file"
    if found.shape != wanted.shape:
        return f"{tuple(found.shape)} in the file, expected {tuple(wanted.shape)}"
    if found.is_floating_point() != wanted.is_floating_point():
        return f"{found.dtype} in the file, expected {wanted.dtype}".replace("torch.", "")
    return None if found.isfinite().all() else "contains NaN or infinity"


def read_weights(
    path: Path, flag: str = "{pretrained}", sha256: str = "", remedy: str = ""
) -> PublicWeights:
    """Read a safetensors file of public weights, or a known pickle of tensors.

    ``sha256`` is the start of the checksum of a known pickle; "" for other files. Messages name
    the ``flag`` that the file belongs to and end with the ``remedy``, a sentence. Raises InputError
    if the file cannot be read, is not a safetensors file, or has another checksum.
    """
    try:
        content = path.read_bytes()
    except OSError as failure:
        why = failure.strerror or failure
        raise InputError(f"{flag}: {path} cannot be read ({why}). {remedy}".rstrip()) from failure
    found = hashlib.sha256(content).hexdigest()
    if not found.startswith(sha256):
        raise InputError(
            f"{flag}: {path} is not the expected file: its SHA-256 is {found}, not {sha256}. "
            f"{remedy}"
        )
    if sha256:
        known = torch.load(io.BytesIO(content), "cpu", weights_only=True)  # noqa: TID251  (published, SHA-256)
        return PublicWeights(path, found, known)
    try:
        tensors, header = unpacked(content)
    except ValueError as failure:
        raise InputError(
            f"{flag}: {path} is not a valid safetensors file ({first_fault(failure)}). If it was "
            "written by torch.save and "
            "you trust it, convert it in Python: safetensors.torch.save_file(torch.load("
            f'"{path}", weights_only=True), "{path.with_suffix(".safetensors")}")'
        ) from failure
    if CHECKPOINT_HEADER in header:
        raise InputError(
            f"{flag}: {path} is a private checkpoint, from which the noise of its run can be "
            "computed. Use the model.safetensors of a run, which has public weights."
        )
    try:
        facts = json.loads(header[MODEL_HEADER])
        trained_on, own = str(facts["data"]["name"]), facts["data"]["own"]
        start = facts["settings"].get("pretrained")
    except (KeyError, TypeError, ValueError, RecursionError):  # dpmac did not write the header
        return PublicWeights(path, found, tensors)
    return PublicWeights(path, found, tensors, trained_on, published=not own and start is None)


class _Stored(BaseModel):
    """A tensor in the header of a safetensors file."""

    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...], Field(max_length=16)]


_HEADER = TypeAdapter(dict[str, _Stored | dict[str, str]])


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and header of a safetensors file. Raises ValueError if it is not one."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = _HEADER.validate_json(content[8 : 8 + size], strict=True)
    except ValidationError as failure:
        why = first_fault(failure)
        raise ValueError("its header is not JSON" if "JSON" in why else why) from failure
    texts = header.pop("__metadata__", {})
    if not isinstance(texts, dict) or any(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("a tensor has no dtype or shape")
    with panics_as_errors():
        return safetensors.torch.load(content), texts
