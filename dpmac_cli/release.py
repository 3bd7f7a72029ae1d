"""The model to publish: weights under the module's own names, and public facts beside them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli import folder
from dpmac_cli.catalog import DATASETS, MODELS
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models import build_model

#: The key of the public facts in the file's header.
HEADER = "dpmac"


@dataclass(frozen=True)
class Released:
    """A published model, loaded.

    Attributes:
        model: in evaluation mode.
        facts: what was published with it.
        path: of the file.
    """

    model: nn.Module
    facts: Mapping[str, Any]
    path: Path


def save_model(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Write weights and public facts, atomically. Loadable with plain safetensors."""
    tensors = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    header = {HEADER: json.dumps(facts, allow_nan=False)}
    folder.write_atomically(path, safetensors.torch.save(tensors, header))


def load_model(path: Path, dataset: str | None, device: torch.device) -> Released:
    """Load a published model from its file or its run folder, for a data set.

    Args:
        path: a run folder or a model file.
        dataset: to score on; None for the one it was trained on.
        device: where it goes.

    Raises:
        InputError: there is no such file, or it is not a dpmac model.
        ModelError: the model does not fit the data set.
    """
    file = path / folder.MODEL if path.is_dir() else path
    tensors, facts = _read(file)
    name = dataset or facts["dataset"]["name"]
    if name not in DATASETS:
        raise ModelError(f"{file} was trained on {name}, which this version does not know.")
    if facts["model"]["name"] not in MODELS:
        raise ModelError(
            f"{file} holds a model '{facts['model']['name']}', which this version does not know."
        )
    model = build_model(facts["model"]["name"], DATASETS[name], seed=0)
    _check_fit(file, tensors, model, name, facts)
    model.load_state_dict(tensors)
    return Released(model.to(device).eval(), facts, file)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not file.exists():
        where = f"{file.parent} holds no {file.name}" if file.parent.is_dir() else f"no {file}"
        raise InputError(
            f"There is no model: {where}. Name a run folder of dpmac train, or a model.safetensors."
        )
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as failure:
        raise InputError(
            f"{file} is not a whole safetensors file ({failure}): it is damaged or of another kind."
        ) from failure
    try:
        facts = json.loads(metadata[HEADER])
        names = facts["dataset"]["name"], facts["model"]["name"]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"names {names}")
    except (KeyError, TypeError, ValueError) as failure:
        raise InputError(
            f"{file} holds weights, but was not written by dpmac train: its header lacks the facts "
            "that say which network and data set they are for."
        ) from failure
    return tensors, facts


def _check_fit(
    file: Path,
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    dataset: str,
    facts: Mapping[str, Any],
) -> None:
    wanted = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    found = {key: tuple(t.shape) for key, t in tensors.items()}
    if wanted == found:
        return
    faults = [
        f"{key}: {found.get(key, 'missing')} in the file, {wanted.get(key, 'nothing')} wanted"
        for key in sorted(wanted | found)
        if wanted.get(key) != found.get(key)
    ]
    raise ModelError(
        f"{file} ({facts['model']['name']}, trained on {facts['dataset']['name']}) does not fit "
        f"{dataset}: {'; '.join(faults)}."
    )
