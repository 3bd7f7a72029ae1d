"""Weights of a network by name: published weights, and public weights from a file.

Weights are files of safetensors, which hold tensors and text and can run no code. The header of
such a file is checked before any tensor is read.
"""

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
from dpmac_cli.files import MODEL_HEADER
from dpmac_cli.models.trained_part import LoraLinear

#: Keys of the headers that dpmac writes: of a published model, and of a private checkpoint.
CHECKPOINT_HEADER = "dpmac-checkpoint"
#: Name of the file of a published model.
MODEL_FILE = "model.safetensors"


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a trained network that are published, by their names in ``state_dict``.

    They are parameters and persistent buffers. Those of registered features are left out, because
    they are found again by their checksum. LoRA updates are merged into the weights of their
    layers. ``state_dict`` itself is not used: its hooks and extra state may contain statistics of
    private records.

    Args:
        model: trained network. Its tensors are not copied, apart from merged weights.
    """
    tensors = dict[str, Tensor]()
    for name, tensor in _held(model).items():
        if _is_published(model, name):
            tensors[name] = tensor
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            tensors[f"{path}.weight"] = module.merged()
    return tensors


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by name, without copying them, apart from LoRA updates."""
    updates = set[int]()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            updates |= {id(module.down), id(module.up)}
    tensors = dict[str, Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in updates:
            continue
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def _is_published(model: nn.Module, name: str) -> bool:
    """Return whether a tensor is in the published file: not if it belongs to public features."""
    return not isinstance(model, FrozenFeatures) or model.publishes(name)


@torch.no_grad()
def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of a network that have their names, in place.

    Args:
        model: network whose other tensors stay.
        tensors: tensors by name, in the shapes of the network's. Names that it does not have are
            ignored.

    Raises:
        RuntimeError: a tensor has another shape, to which it cannot be expanded.
    """
    for name, tensor in _held(model).items():
        if name in tensors:
            tensor.copy_(tensors[name])


def stored(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor as it is stored in a file: contiguous, on the CPU, without a graph.

    Args:
        tensor: a tensor on any device.
    """
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def check_publishable(model: nn.Module) -> None:
    """Reject a model with a tensor that cannot be stored in a model file, before it is trained.

    Each tensor is written to a file in memory, and read again.

    Args:
        model: the network, whose tensors have the same values afterwards.

    Raises:
        ModelError: names the tensor, and what it would have to be.
    """
    for name, tensor in published(model).items():
        try:
            content = safetensors.torch.save({name: stored(tensor)})
            loaded = safetensors.torch.load(content)
            adopt(model, loaded)
            storable = not not_finite(loaded)
        except Exception as failure:  # torch raises a different error for each kind of tensor
            raise _not_storable(name, tensor) from failure
        if not storable:
            raise _not_storable(name, tensor)


def _not_storable(name: str, tensor: Tensor) -> ModelError:
    """Return the error for a tensor that cannot be stored."""
    kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device}".replace("torch.", "")
    return ModelError(
        f"{name} of the network ({kind}) cannot be saved in {MODEL_FILE} and loaded again. Use a "
        "dense tensor of finite real numbers that shares no memory; or, if it need not be saved, "
        "register_buffer(..., persistent=False)."
    )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a fault for each tensor with NaN or infinity; no run publishes one.

    Args:
        tensors: tensors by name.

    Returns:
        Parts of sentences, such as "head.bias contains NaN or infinity"; [] if all are finite.

    Example:
        >>> not_finite({"bias": torch.tensor([torch.nan]), "weight": torch.ones(1)})
        ['bias contains NaN or infinity']
    """
    faults = []
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            faults.append(f"{name} contains NaN or infinity")
    return faults


@dataclass(frozen=True)
class PublicWeights:
    """Contents of a file of public weights.

    Attributes:
        path: path of the file.
        sha256: SHA-256 of the file.
        tensors: tensors by name, on the CPU.
        trained_on: dataset that dpmac trained them on, if the file records it.
        published: whether all records they were trained on are published, as far as the file tells.
    """

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]
    trained_on: str | None = None
    published: bool = True

    def adopted_by(self, model: nn.Module, head: str | None) -> Iterator[str]:
        """Load the weights into a model in place, and yield notes for the user, if there are any.

        It is a generator: nothing is loaded before its notes are read.

        Args:
            model: network to load into.
            head: name of its last layer. It keeps its initial weights if the file has none of its
                shape, and may be absent from the model. None if there is none.

        Raises:
            ModelError: anything but the head does not fit. Names the first such tensor.
        """
        wanted, tensors, prefix = _held(model), self.tensors, f"{head}."
        faults = dict[str, str]()
        for name in sorted(wanted.keys() | tensors.keys()):
            fault = _fault(tensors.get(name), wanted.get(name))
            if fault and (name in tensors or not name.endswith("num_batches_tracked")):
                faults[name] = fault
        fresh = set[str]()
        rest = list[str]()
        for name, fault in faults.items():
            if head is not None and name.startswith(prefix):
                fresh.add(name)
            else:
                rest.append(f"{name}: {fault}")
        if rest:
            remedy = ""
            if any(name.endswith("running_mean") for name in faults):
                remedy = (
                    " Only one of them has batch norm; {fix_norm=True} removes it from the network."
                )
            raise ModelError(
                f"{self.path} does not fit the network: {some_of(rest)[0]}. Only the "
                "last layer may be missing or have another shape. Use the network that the "
                f"weights were trained in.{remedy}"
            )
        ignored = prefix if fresh else "."  # all of the head, if any part does not fit
        fitting = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if not name.startswith(ignored):
                fitting[name] = tensor
        adopt(model, fitting)
        if fresh & wanted.keys():
            yield f"{self.path.name} has no matching layer '{head}'. It starts from scratch."


def _fault(in_file: Tensor | None, in_network: Tensor | None) -> str | None:
    """Return why an entry of a file does not fit; None if it does."""
    if in_network is None:
        return "not in the network"
    if in_file is None:
        return "missing from the file"
    if in_file.shape != in_network.shape:
        return f"{tuple(in_file.shape)} in the file, expected {tuple(in_network.shape)}"
    if in_file.is_floating_point() != in_network.is_floating_point():
        return f"{in_file.dtype} in the file, expected {in_network.dtype}".replace("torch.", "")
    return None if in_file.isfinite().all() else "contains NaN or infinity"


def read_weights(
    path: Path, flag: str = "{pretrained}", sha256: str = "", remedy: str = ""
) -> PublicWeights:
    """Return the public weights in a safetensors file, or in a pickle whose checksum is known.

    Args:
        path: path of the file.
        flag: setting that names it, for messages.
        sha256: start of the checksum of a known pickle; "" for other files. No other pickle is
            loaded, because it could run code.
        remedy: a sentence that ends messages.

    Returns:
        Tensors, with the dataset that they were trained on if dpmac wrote the file.

    Raises:
        InputError: the file cannot be read, is not a safetensors file, has another checksum, or is
            a private checkpoint.
    """
    try:
        content = path.read_bytes()
    except OSError as failure:
        why = failure.strerror or failure
        raise InputError(f"{flag}: {path} cannot be read ({why}). {remedy}".rstrip()) from failure
    checksum = hashlib.sha256(content).hexdigest()
    if not checksum.startswith(sha256):
        raise InputError(
            f"{flag}: {path} is not the expected file: its SHA-256 is {checksum}, not {sha256}. "
            f"{remedy}"
        )
    if sha256:
        known = torch.load(io.BytesIO(content), "cpu", weights_only=True)  # noqa: TID251  (published, SHA-256)
        return PublicWeights(path, checksum, known)
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
        trained_on, user_supplied = str(facts["data"]["name"]), facts["data"]["user_supplied"]
        start = facts["settings"].get("pretrained")
    except (KeyError, TypeError, ValueError, RecursionError):  # dpmac did not write the header
        return PublicWeights(path, checksum, tensors)
    published_records = not user_supplied and start is None
    return PublicWeights(path, checksum, tensors, trained_on, published=published_records)


class _Stored(BaseModel):
    """A tensor in the header of a safetensors file."""

    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 40)], ...], Field(max_length=16)]


_HEADER = TypeAdapter(dict[str, _Stored | dict[str, str]])


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and header of a safetensors file.

    The header is 8 bytes with its length, little-endian, and then JSON: a dtype, a shape and places
    for each tensor, and texts under ``__metadata__``.

    Args:
        content: contents of the file.

    Returns:
        Tensors on the CPU by name, and the texts of the header.

    Raises:
        ValueError: it is no such file, or a tensor has a dtype or a shape that no network has.
    """
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
