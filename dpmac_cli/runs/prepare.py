"""Network and data of a run: load, build and validate them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpmac_cli.config import findings
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.facts import DataFacts
from dpmac_cli.config.networks import (
    BACKBONES,
    Backbone,
    BuiltIn,
    OwnFeatures,
    TableColumns,
    UserModel,
)
from dpmac_cli.config.plan import Plan
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.data.read import read
from dpmac_cli.errors import InputError, ModelError, raise_errors
from dpmac_cli.features import texts as text_features
from dpmac_cli.features.backbones import public_weights
from dpmac_cli.features.class_names import SIGNAL, begin_at_names
from dpmac_cli.features.frozen import FrozenFeatures, cut_before_head, head_of
from dpmac_cli.features.stored import featured
from dpmac_cli.features.tables import TableInputs
from dpmac_cli.features.texts import example_of
from dpmac_cli.files import cache_folder
from dpmac_cli.models import build
from dpmac_cli.models.dataset import Data, on_device
from dpmac_cli.models.trial_samples import Trial, dtype_of
from dpmac_cli.models.validation import check_model, check_precision
from dpmac_cli.models.weights import PublicWeights, check_publishable, read_weights
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.runs.uncounted import Uncounted, settings_of_features
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.training.carried_accounts import carried_by


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Network and data of a run, as :func:`prepare` returns them.

    Attributes:
        model: the whole network, which takes records as they are read and is published.
        trained: the part that is trained on ``data``, without frozen features; ``model`` itself if
            nothing is frozen.
        data: the records, or their features under the frozen part.
        uncounted: what counts records before the first step, and returns ``data``, which until then
            has the shapes of the records alone; None if nothing is counted.
        user_supplied: whether the network is not built in, so that it may draw random numbers.
        pretrained: SHA-256 of the file of public weights; None without.
        notes: messages for the user.
        private_notes: notes on the records, for the person who holds them.
        start: seed of the initial weights and of frozen values that are drawn, which is public.
        built_by: call that built a user-supplied network, as code; its file may change later. ""
            for other networks.
        schema: JSON values of the schema of a table, whichever file it is in; None for other data.
    """

    model: nn.Module
    trained: nn.Module
    data: Data
    uncounted: Uncounted | None = None
    user_supplied: bool = True
    pretrained: str | None = None
    start: int = 0
    notes: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    built_by: str = ""
    schema: Mapping[str, Any] | None = None

    @property
    def compared(self) -> dict[str, Any]:
        """Facts that must be unchanged for a run to continue, by their names, as JSON values.

        The names are words of messages: "numbers of records" (training and test), "contents of
        the schema", which also say which records are for testing, "classes or ranges" and "public
        weights" (SHA-256 or None).
        """
        return {
            "numbers of records": [*self.data.sizes],
            "contents of the schema": self.schema,
            "classes or ranges": json.loads(json.dumps(self.data.task.facts)),
            "public weights": self.pretrained,
        }

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole network, frozen ones included."""
        return sum(p.numel() for p in self.model.parameters())


def prepare(
    plan: Plan,
    device: torch.device,
    keys: Keys,
    data: Dataset | Data | None = None,
    *,
    model: nn.Module | None = None,
) -> PreparedRun:
    """Load the data and build the network of a run, and report progress.

    The network is validated before the first record is read.

    Args:
        plan: plan of the run.
        device: device of the network and the data.
        keys: keys, of which initial weights need one.
        data: records that were read for the plan, or data on the device; None to read them again.
        model: a network to train in place, instead of the plan's; None to build the plan's.

    Raises:
        InputError: the data cannot be used, they have changed since the plan was made, or the plan
            freezes a part of a network that it does not build.
        ModelError: the model is not a torch module, cannot be trained, or was trained by dpmac
            before.
    """
    passed_in, origin = model is not None, dict[str, Any]()
    if model is None:
        model, origin = _build(plan, keys)
    else:
        model = _check_passed_in(plan, model)
    user_supplied = passed_in or isinstance(plan.model, UserModel)
    model = model.to(device)
    parts = None if passed_in else cut_network(plan, model)
    if device.type == "cuda":  # autocast on CUDA is not detected on the CPU
        _check_precision(plan, model)
    private_notes: tuple[str, ...] = ()
    data = data or read_again(plan)
    if isinstance(data, Dataset):
        private_notes = findings.private_notes(plan, data.notes)
        data = on_device(data, device, plan.facts.records)
    data = data.computed_in(dtype_of(model))
    uncounted, schema = None, plan.facts.schema
    if parts is not None:
        parts.user_supplied = user_supplied
        data, uncounted = _with_features(plan, parts, data)
    return PreparedRun(
        model=model,
        trained=model if parts is None else parts.head,
        data=data,
        uncounted=uncounted,
        user_supplied=user_supplied,
        private_notes=private_notes,
        start=_start_of(keys),
        schema=None if schema is None else schema.model_dump(mode="json", by_alias=True),
        **origin,
    )


def _with_features(plan: Plan, parts: FrozenFeatures, data: Data) -> tuple[Data, Uncounted | None]:
    """Return the features of all records under the frozen part of a network.

    If they need ranges that are counted, return their shapes, and what will count.
    """
    inputs = parts.frozen
    if isinstance(inputs, TableInputs) and (inputs.counted or plan.counts_target):
        uncounted = Uncounted(parts, data, plan)
        return uncounted.shapes, uncounted
    # On a CPU, texts are encoded in batches that depend on their lengths.
    on_texts = isinstance(plan.features, TextEncoder) and not data.gain.is_cuda
    parts.separate = on_texts or isinstance(plan.features, OwnFeatures | TableColumns)
    return featured(parts, data, settings_of_features(plan), cache_folder()), None


def load(plan: Plan, device: torch.device, data: Dataset | None = None) -> Data:
    """Load the data of a run onto a device, without features: records as they are read.

    Args:
        plan: plan of the run.
        device: device.
        data: its records, if they were read; None to read them.

    Raises:
        InputError: the records cannot be read, or have changed since the plan was made.
    """
    return on_device(data or read_again(plan), device, plan.facts.records)


def read_again(plan: Plan) -> Dataset:
    """Read the records of a plan.

    Args:
        plan: plan of a run, which has the facts of its dataset as they were read for it.

    Raises:
        InputError: the records cannot be read, have other public facts, such as another number, or
            some of them are both trained and tested on.
    """
    data, facts = read(plan.settings), plan.facts
    as_read = facts.records.model_copy(update={"standardised": True})
    if data.facts.public != replace(facts, records=as_read).public:
        before = f"{facts.train_size:,} + {facts.test_size:,}"
        now = f"{data.facts.train_size:,} + {data.facts.test_size:,}"
        raise InputError(
            f"{facts.typed} changed while it was being read ({before} training and test records "
            f"before, {now} now). Run the command again once nothing writes to it."
        )
    raise_errors(findings.tested_twice(plan.settings, facts, data.notes))
    return data


def cut_network(plan: Plan, model: nn.Module) -> FrozenFeatures | None:
    """Return a network as its frozen part, which runs once per record, and its trained part.

    Args:
        plan: plan of the run.
        model: its network, which is not changed.

    Returns:
        Both parts; None if all of the network runs in every step.
    """
    if isinstance(model, FrozenFeatures):
        return model
    return cut_before_head(model, plan.facts.records.shape) if _head_only(plan) else None


def _head_only(plan: Plan) -> bool:
    """Return whether only the last linear layer of a network on images is trained."""
    return plan.trained.part == "head" and plan.features is None


def _check_precision(plan: Plan, model: nn.Module) -> None:
    """Reject autocast in the trained part of a network."""
    records, classes = plan.facts.records, plan.facts.task.outputs
    if plan.features is not None and isinstance(model, FrozenFeatures):
        shape = plan.features.shape_of(records)
        check_precision(model.head, Trial.of(model.head, shape, classes))
    elif not _head_only(plan):
        check_precision(model, Trial.of(model, records.shape, classes, example_of(records)))


def _start(plan: Plan, model: nn.Module) -> tuple[PublicWeights, tuple[str, ...]]:
    """Load the public weights into a network; return them with notes."""
    features, facts = plan.features, plan.facts
    weights = None if plan.pretrained is None else read_weights(plan.pretrained)
    if isinstance(features, TextEncoder):
        weights = text_features.encoder_weights(features)
        notes = tuple(weights.adopted_by(model.get_submodule("frozen"), None))
        if not isinstance(facts.task, Classification):
            return weights, notes
        texts = _texts_of(model)
        named = _head_to_name(plan, model)
        begin_at_names(texts, named, features, facts.task.names)
        return weights, notes if named is None else (*notes, AT_NAMES)
    if isinstance(features, Backbone):
        weights = weights or public_weights(features.kind)
        model, head = model.get_submodule("frozen.network"), BACKBONES[features.kind].head
        return weights, tuple(weights.adopted_by(model, head))
    assert weights is not None  # noqa: S101  (it starts from public weights)
    return weights, tuple(weights.adopted_by(model, head_of(model, facts.records.shape)))


def _texts_of(model: nn.Module) -> text_features.TextFeatures:
    """Return the part of a network that maps texts to features."""
    texts = model.get_submodule("frozen")
    assert isinstance(texts, text_features.TextFeatures)  # noqa: S101  (networks on texts have it)
    return texts


#: Note on where a head begins.
AT_NAMES = (
    "The head begins at the encoder's vectors of the names of the classes, because noise hides "
    "much of what their records tell. Give classes names that say what they are."
)


def _head_to_name(plan: Plan, model: nn.Module) -> nn.Linear | None:
    """Return the linear head of a network on texts if it is better to begin at names than at 0."""
    # Of equally frequent classes, the records of each add at most B / classes to every sum.
    signal = plan.event.signal(plan.settings.batch_size / plan.facts.task.outputs)
    if plan.model != BuiltIn("linear") or signal >= SIGNAL:
        return None
    for part in model.get_submodule("head").modules():
        if type(part) is nn.Linear:
            return part
    return None


def _build(plan: Plan, keys: Keys) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network of a plan, and load its public weights.

    Returns:
        the network, and the attributes of :class:`PreparedRun` on its origin, by their names.
    """
    named = plan.model
    signature = plan.facts.signature
    model = build.build_model(
        named,
        signature,
        _start_of(keys),
        fix_norm=plan.settings.fix_norm,
        features=plan.features,
        trained=plan.trained if plan.starts_public else None,
        isolated=plan.settings.isolate,
    )
    check_publishable(model)
    origin = dict[str, Any]()
    if isinstance(named, UserModel):
        seen = build.seen_by_network(signature, plan.features)
        origin["built_by"] = build.built_by(named, seen)
    if plan.starts_public:
        weights, origin["notes"] = _start(plan, model)
        origin["pretrained"] = weights.sha256
        if plan.private:
            _check_public(weights, plan.facts)
    if plan.private and carried_by(model):
        raise ModelError(
            f"{{model=}}{named}: the network was trained by dpmac before, and epsilon would "
            "not count that. To train a run further, use dpmac train --resume RUN --out NEW; in a "
            "program, make_private(network, ...) adds up the costs."
        )
    return model, origin


def _start_of(keys: Keys) -> int:
    """Return the seed of the initial weights."""
    return int.from_bytes(keys.init[:4], "little")


def _check_passed_in(plan: Plan, model: object) -> nn.Module:
    """Validate a network that was passed in like a built one. Raises InputError, ModelError."""
    outputs = plan.facts.task.outputs
    if plan.features is not None or plan.pretrained is not None:
        raise InputError(
            "features and pretrained are for a network that dpmac builds: leave them out, or "
            "do the same in your own network. A plan for an epsilon has features of small images "
            'unless it names a network: train(..., model="cnn").'
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{getattr(model, '__name__', repr(model))} is not a torch module. Pass a network "
            "instance, such as torch.nn.Linear(64, 10)."
        )
    if plan.settings.fix_norm:
        build.without_batch_norm(model)
    build.take_logits(model)
    check_model(model, plan.facts.records.shape, outputs, isolated=plan.settings.isolate)
    return model


def _check_public(weights: PublicWeights, facts: DataFacts) -> None:
    """Raise InputError for weights that may tell of the records of a private run."""
    name = weights.trained_on
    if name is not None and (name == facts.name or not weights.published):
        raise InputError(
            f"{{pretrained}}: {weights.path} was trained on {name} by dpmac, so its weights are "
            "not public to a run on any of the same records, and epsilon would not cover what "
            "they reveal. To train that run further, use dpmac train --resume RUN --out NEW, which "
            "counts both. If no record of this run was used for them, save the weights without "
            "their origin: "
            f"python -c \"from safetensors.torch import *; save_file(load_file('{weights.path}'), "
            "'public.safetensors')\""
        )
