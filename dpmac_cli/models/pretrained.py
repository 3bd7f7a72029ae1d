"""Public weights for a network, from a safetensors file. A pickle is never read."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor, nn

from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import weights
from dpmac_cli.models.weights import BROKEN, CHECKPOINT_HEADER, MODEL_HEADER

#: Entries that do not fit and are named; the rest are counted.
NAMED = 8


@dataclass(frozen=True)
class PublicWeights:
    """What a file holds.

    Attributes:
        path: of the file. sha256: of its contents.
        tensors: by name.
        trained_on: the data set of the catalogue or a person's own that dpmac trained them on; None
            where the file does not say.
    """

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]
    trained_on: str | None

    def adopted_by(self, model: nn.Module, head: str | None) -> Iterator[str]:
        """Load the weights into a model, and say what its author should know.

        Args:
            model: takes them over in place.
            head: the layer that may start fresh, where the file has none of its shape.

        Raises:
            ModelError: anything else does not fit, and which entries do not.
        """
        wanted, prefix = weights.published(model), f"{head}."
        faults = {
            name: fault
            for name in sorted(wanted.keys() | self.tensors.keys())
            if (fault := _fault(self.tensors.get(name), wanted.get(name)))
        }
        fresh = [name for name in faults if head is not None and name.startswith(prefix)]
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
        whole = {n: t for n, t in self.tensors.items() if not (fresh and n.startswith(prefix))}
        weights.adopt(model, whole)
        if fresh:
            yield f"{self.path.name} has no layer '{head}' that fits: it starts fresh."


def _fault(found: Tensor | None, wanted: Tensor | None) -> str | None:
    """What is wrong with an entry; None if it fits."""
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
    """Read a file of public weights.

    Raises:
        InputError: it cannot be read, or is of another kind.
    """
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise InputError(
            f"--pretrained: {path} cannot be read ({failure.strerror or failure})."
        ) from failure
    try:
        tensors = safetensors.torch.load(content)
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
