"""The model to publish: weights under the module's own names, and public facts beside them.

One safetensors file. Its header holds the facts as JSON, with a checksum of weights and facts.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.data.registry import DATASETS, Dataset
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import build_model, build_network, seen_by_network
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.models.registry import FEATURES, MODELS, BuiltIn, Features, UserModel, parse_model
from dpmac_cli.models.weights import (
    BROKEN,
    CHECKPOINT_HEADER,
    MODEL_HEADER,
    _stored,
    adopt,
    published,
)
from dpmac_cli.runs import folder
from dpmac_cli.runs.report import SCHEMA_VERSION
from dpmac_cli.storage import files
from dpmac_cli.storage.digest import digest

#: The key of the checksum among them. safetensors keeps several keys of a header in no order.
CHECKSUM = "checksum"
WANTED = f"Name a run folder of dpmac train, or a {folder.MODEL}."


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


def check_publishable(model: nn.Module) -> None:
    """Refuse a model with a tensor that a model file cannot hold. Raises ModelError, naming it."""
    for name, tensor in published(model).items():
        try:
            loaded = safetensors.torch.load(safetensors.torch.save({name: _stored(tensor)}))
            _check_weights(Path(folder.MODEL), loaded)
            adopt(model, loaded)
        except Exception as failure:  # torch has an error of its own for each kind of tensor
            kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device}".replace("torch.", "")
            raise ModelError(
                f"{name} of the network ({kind}) cannot be saved in {folder.MODEL} and loaded "
                "again. Use a dense tensor of finite real numbers with memory of its own; or, if "
                "it need not be saved, register_buffer(..., persistent=False)."
            ) from failure


def save_model(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Write weights and public facts, atomically. Loadable with plain safetensors."""
    tensors = {name: _stored(tensor) for name, tensor in published(model).items()}
    sealed = {**facts, CHECKSUM: digest(tensors, facts)}
    header = {MODEL_HEADER: json.dumps(sealed, allow_nan=False)}
    files.write_atomically(path, safetensors.torch.save(tensors, header))


def load_model(
    path: Path | str,
    dataset: str | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  (never changes)
    *,
    own: Dataset | None = None,
    factory: str | None = None,
) -> Released:
    """Load a published model from its file or its run folder, for a data set.

    Args:
        path: a run folder or a model file.
        dataset: to score on; None for the one it was trained on.
        device: where it goes.
        own: facts of ``dataset`` where that is a person's own data.
        factory: where a network of a person's own is. What a file names is never imported.

    Raises:
        InputError: there is no such file, it is not a dpmac model, or it is damaged; or no factory.
        ModelError: the model does not fit the data set.
    """
    file = _find(Path(path))
    tensors, facts = _read(file)
    name = dataset or str(facts["dataset"]["name"])
    itself = dataset is None and facts["dataset"]["own"]
    described = own or (_described(facts) if itself else DATASETS.get(name))
    if described is None:
        raise ModelError(f"{file} was trained on {name}, which this version does not know.")
    named = facts["model"]["name"]
    reference = parse_model(named)
    if isinstance(reference, UserModel) and factory is None:
        raise ModelError(
            f"{file} holds a network of one's own, {named}, and what a file names is never "
            "imported. Say where it is: --model FILE.py:FACTORY"
        )
    if isinstance(reference, BuiltIn) and named not in MODELS:
        raise ModelError(f"{file} holds a model '{named}', which this version does not know.")
    if isinstance(reference, UserModel) and factory is not None:
        reference = parse_model(factory)
    features, frozen = _public_part(file, facts)
    if isinstance(reference, BuiltIn):
        with torch.device("meta"):  # shapes alone: a file may ask for more than memory holds
            shapes = build_network(reference.name, seen_by_network(described, features))
            if features is not None:
                shapes = FrozenFeatures(nn.Identity(), shapes, torch.float16)
            _check_fit(file, tensors, shapes, name, described, facts)
    fix_norm, to_float32 = facts["model"]["fix_norm"], facts["model"].get("to_float32", False)
    model = build_model(
        reference,
        described,
        seed=0,
        fix_norm=fix_norm,
        to_float32=to_float32,
        features=features,
        frozen=frozen,
        isolated=True,  # scoring needs no samples kept apart
    )
    _check_fit(file, tensors, model, name, described, facts)
    adopt(model, tensors)
    return Released(model.to(device).eval(), facts, file)


def _public_part(file: Path, facts: Mapping[str, Any]) -> tuple[Features | None, bool]:
    """The features that a model takes, and whether all but its last layer was frozen."""
    public = facts["model"].get("public_part")
    if public is None:
        return None, False
    try:
        frozen, kind = public["train"] == "head", public["features"]
        if kind is None:
            return None, frozen
        if kind in FEATURES and public["feature_groups"] >= 0:
            return Features(kind, int(public["feature_groups"])), frozen
    except BROKEN as failure:
        raise _altered(file, "its header lacks what is frozen in the network") from failure
    raise ModelError(f"{file} takes features '{kind}', which this version does not know.")


def read_facts(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """The file that a path means, and what was published with it. Raises InputError."""
    file = _find(path)
    return file, _read(file)[1]


def _described(facts: Mapping[str, Any]) -> Dataset:
    """The data set that a model was trained on, as far as a network depends on it."""
    given, dataset = facts["input"], facts["dataset"]
    channels, height, width = given["shape"]
    return replace(
        DATASETS["mnist"],
        train_size=dataset["train_size"],
        test_size=dataset["test_size"],
        shape=(channels, height, width),
        classes=tuple(facts["classes"]),
        levels=given["levels"],
        mean=tuple(given["mean"]),
        std=tuple(given["std"]),
        sha256=None,
    )


def _find(path: Path) -> Path:
    """The model file that a path means. Raises InputError, saying what is there instead."""
    file = path / folder.MODEL if path.is_dir() and path.name != folder.MODEL else path
    if file.is_dir():
        raise InputError(f"{file} is a folder, but a model is a file. {WANTED}")
    if file.exists():
        return file
    if file.name == folder.MODEL and (file.parent / folder.CONFIG).is_file():
        raise InputError(
            f"The run in {file.parent} has not written its {folder.MODEL}: it is still training, "
            f"or was stopped before it could. To go on: {folder.resume_command(file.parent)}"
        )
    if not path.exists():
        raise InputError(f"{path} does not exist. {WANTED}")
    raise InputError(f"{path} is not a run folder: it holds no {folder.MODEL}. {WANTED}")


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and facts of a model file, as they were written. Raises InputError."""
    tensors, header = _open(file)
    if CHECKPOINT_HEADER in header:
        raise InputError(
            f"{file} is a private checkpoint, from which the noise of its run can be computed. "
            f"Do not share it. The model to score is {folder.MODEL}, one folder up."
        )
    facts = _facts(file, header)
    if facts.pop(CHECKSUM) != digest(tensors, facts):
        raise InputError(
            f"{file} is damaged: its contents do not match its checksum. Copy it anew from where "
            "it came from, or train again."
        )
    facts["dataset"].setdefault("own", False)  # files of the first versions say nothing of it
    facts["model"].setdefault("fix_norm", False)
    _check_input(file, facts)
    _check_weights(file, tensors)
    return tensors, facts


def _open(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a safetensors file. Raises InputError."""
    try:
        with file.open("rb"):  # safetensors says of every file it may not open that it is missing
            pass
    except OSError as failure:
        raise InputError(f"{file} cannot be read ({failure.strerror or failure}).") from failure
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            return tensors, opened.metadata() or {}
    except (OSError, safetensors.SafetensorError) as failure:
        raise InputError(
            f"{file} is not a whole safetensors file: it is damaged, or of another kind. {WANTED}"
        ) from failure


def _facts(file: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """The facts of a header, checksum included. Raises InputError."""
    try:
        facts: dict[str, Any] = json.loads(header[MODEL_HEADER])
        if facts["schema_version"] > SCHEMA_VERSION:
            raise InputError(
                f"{file} was written by a newer dpmac (format {facts['schema_version']}; this one "
                f"knows {SCHEMA_VERSION}). Upgrade dpmac."
            )
        texts = (facts["dataset"]["name"], facts["model"]["name"], facts[CHECKSUM])
        if not all(isinstance(text, str) for text in (*texts, *facts["classes"])):
            raise TypeError(f"texts {texts}")
        if not all(text.isprintable() for text in (*texts, *facts["classes"])):
            raise ValueError("control characters, which a terminal would obey")
    except BROKEN as failure:
        raise InputError(
            f"{file} holds weights, but was not written by dpmac train: its header lacks the "
            f"network, the data set or the checksum. {WANTED}"
        ) from failure
    return facts


def _check_input(file: Path, facts: Mapping[str, Any]) -> None:
    """Refuse facts by which no image can be prepared. Raises InputError."""
    try:
        given = facts["input"]
        mean, std, (channels, height, width) = given["mean"], given["std"], given["shape"]
        positive = (channels, height, width, given["levels"], *std)
        usable = (
            len(mean) == len(std) == channels
            and all(map(math.isfinite, (*positive, *mean)))
            and min(positive) > 0
        )
    except BROKEN:
        usable = False
    if not usable:
        raise _altered(file, "no images have the shape, levels, mean and std that its header gives")


def _check_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that no run publishes. Raises InputError."""
    faults = [
        f"{name} holds NaN or infinity" for name, t in tensors.items() if not t.isfinite().all()
    ]
    if faults:
        raise _altered(file, "; ".join(faults))


def _altered(file: Path, why: str) -> InputError:
    return InputError(f"{file} was not written by dpmac train as it is: {why}. {WANTED}")


def _form(weights: Tensor) -> str:
    """Shape, and kind of number if that is not the usual one."""
    kind = "" if weights.dtype == torch.float32 else f" of {weights.dtype}".replace("torch.", "")
    return f"{tuple(weights.shape)}{kind}"


def _check_fit(
    file: Path,
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    dataset: str,
    described: Dataset,
    facts: Mapping[str, Any],
) -> None:
    images, layers = "an image", published(model)
    wanted = {images: str(tuple(described.shape)), **{k: _form(t) for k, t in layers.items()}}
    given = str(tuple(facts["input"]["shape"]))
    found = {images: given, **{k: _form(t) for k, t in tensors.items()}}
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
