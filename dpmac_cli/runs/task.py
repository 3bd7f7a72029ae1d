"""What a run trains and on what: network, data, and how samples are known to be kept apart."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from dpmac_cli.config.plan import PublicFile, TrainPlan
from dpmac_cli.data.dataset import Data, fingerprint
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import build_model, built_by, seen_by_network, source_sum
from dpmac_cli.models.feature_cache import Computing, featured
from dpmac_cli.models.features import FrozenFeatures, cut_before_head, head_of
from dpmac_cli.models.registry import Features, UserModel
from dpmac_cli.models.trials import check_precision
from dpmac_cli.models.validation import Independence, check_model, independence
from dpmac_cli.models.weights import PublicWeights, read_weights
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.runs.publish import check_publishable
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.paths import cache_folder


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run trains, and on what.

    Attributes:
        model: the whole network, which takes images; it is what is published.
        trained: the part of it that is trained, all of it but for what is frozen.
        data: what that takes.
        independence: how it is known that the network keeps samples apart.
        fingerprints: SHA-256 of what must be the same for a run to be resumed: your own records
            with their classes and constants, your own network, the file of public weights, and
            the features. Private, like the records.
        notes: what the person who runs it should know.
        built_by: how a user-supplied network was constructed, as code; its file may change later.
    """

    model: nn.Module
    trained: nn.Module
    data: Data
    independence: Independence
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    built_by: str = ""


def make_task(
    plan: TrainPlan,
    device: torch.device,
    keys: Keys,
    data: Data | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Computing, None, Task]:
    """Load the data and build the network of a run; report progress where that takes time.

    Args:
        plan: of the run.
        device: where to.
        keys: that of the initial weights is used.
        data: on the device; None to load it.
        stop: asked between batches of features.

    Raises:
        KeyboardInterrupt: ``stop`` said so.
    """
    model = _build(plan, keys)
    fingerprints = _fingerprints(plan, data)
    data = data or load_data(plan.data, plan.data_dir, device, facts=plan.facts)
    if isinstance(plan.data, Source):
        fingerprints["data"] = fingerprint(data.train, data.test)
    notes: tuple[str, ...] = ()
    if isinstance(plan.start, PublicFile):
        weights = read_weights(plan.start.path)
        doubts = _doubts(plan, weights)
        notes = (*doubts, *weights.adopted_by(model, head_of(model, plan.facts.shape)))
        fingerprints["pretrained"] = weights.sha256
    model = model.to(device)
    parts = model if isinstance(model, FrozenFeatures) else None
    if parts is None and plan.start.head_only:
        parts = cut_before_head(model, plan.facts.shape)
    kind, why = independence_of(plan, model, parts, own=isinstance(plan.model, UserModel))
    if device.type == "cuda" and not plan.start.head_only:  # autocast there is not seen on the CPU
        check_precision(model, plan.facts.shape)
    trained = model
    if parts is not None:
        parts.isolated = plan.start.head_only and kind == "isolated"
        found = yield from featured(parts, data, _of_features(plan), cache_folder(), stop)
        fingerprints["features"] = found.sha256
        trained, data, notes = parts.head, found.data, (*notes, *found.notes)
    return Task(
        model=model,
        trained=trained,
        data=data,
        independence=kind,
        fingerprints=fingerprints,
        notes=(*notes, *why),
        built_by=_built_by(plan),
    )


def outcome(events: Generator[Any, None, Task]) -> Task:
    """Return what :func:`make_task` makes, without listening to its progress."""
    while True:
        try:
            next(events)
        except StopIteration as end:
            return cast(Task, end.value)


def task_of(model: nn.Module, plan: TrainPlan, device: torch.device, data: Data | None) -> Task:
    """Return the task of a network that is at hand, validated like one that is built.

    Raises:
        InputError: the plan freezes a part of a network that it does not build.
        ModelError: it is no torch module, or mixes samples.
    """
    if isinstance(plan.features, Features) or isinstance(plan.start, PublicFile):
        raise InputError(
            "features and pretrained are for a network that the settings name: leave them out, or "
            "do what they do in the network that is given."
        )
    given: object = model  # what comes from a notebook need not be what its type says
    if not isinstance(given, nn.Module):
        raise ModelError(
            f"{getattr(given, '__name__', repr(given))} is no torch module. Give a network that is "
            "made, such as torch.nn.Linear(64, 10)."
        )
    check_model(
        model,
        plan.facts.shape,
        len(plan.facts.classes),
        isolated=plan.isolation == "always",
        physical_batch=plan.physical_batch if plan.isolation == "never" else None,
    )
    data = data or load_data(plan.data, plan.data_dir, device, facts=plan.facts)
    kind, why = independence_of(plan, model, None, own=True)
    model = model.to(device)
    return Task(model=model, trained=model, data=data, independence=kind, notes=why)


def _build(plan: TrainPlan, keys: Keys) -> nn.Module:
    """Build the network with its initial weights."""
    word = int.from_bytes(keys.init[:4], "little")
    model = build_model(
        plan.model,
        plan.facts,
        word,
        fix_norm=plan.fix_norm,
        to_float32=plan.to_float32,
        features=_features(plan),
        frozen=plan.start.head_only,
        isolated=plan.isolation == "always",
        physical_batch=plan.physical_batch if plan.isolation == "never" else None,
    )
    check_publishable(model)
    return model


def _fingerprints(plan: TrainPlan, data: Data | None) -> dict[str, str]:
    """Return checksums of what is the user's own, but for the records themselves."""
    facts, sums = plan.facts, {}
    if isinstance(plan.data, Source):
        sums["classes"] = digest({}, {"classes": facts.classes})
        sums["constants"] = digest({}, {"mean": facts.mean, "std": facts.std})
    elif data is not None and facts.sha256 is not None:
        found = fingerprint(data.train, data.test)
        if found != facts.sha256:  # records of the caller's own under a registered name
            sums["data"] = found
    if isinstance(plan.model, UserModel):
        sums["network"] = source_sum(plan.model)
    return sums


def _built_by(plan: TrainPlan) -> str:
    if not isinstance(plan.model, UserModel):
        return ""
    return built_by(plan.model, seen_by_network(plan.facts, _features(plan)))


def _features(plan: TrainPlan) -> Features | None:
    return plan.features if isinstance(plan.features, Features) else None


def _of_features(plan: TrainPlan) -> dict[str, Any]:
    """Return settings that decide what features are computed, as JSON values."""
    kind = vars(plan.features) if isinstance(plan.features, Features) else {}
    return {**kind, "head_only": plan.start.head_only, "isolation": plan.isolation}


def independence_of(
    plan: TrainPlan, model: nn.Module, parts: FrozenFeatures | None, *, own: bool
) -> tuple[Independence, tuple[str, ...]]:
    """Return how it is known that a network keeps samples apart, and notes on it."""
    if plan.isolation == "always":
        return "isolated", ()
    if not own:
        return "built in", ()
    if plan.isolation == "never":
        return "probed", ()
    shape, classes = plan.facts.shape, len(plan.facts.classes)
    if parts is not None and isinstance(plan.features, Features):
        model, shape = parts.head, plan.features.shape_of(shape)
    frozen = parts.frozen if parts is not None and plan.start.head_only else None
    kind, why = independence(model, shape, classes, frozen)
    if kind == "traced":
        return kind, ()
    return kind, (
        "The network is run on each sample alone, which is slower, because it could not be proven "
        f"that it keeps samples apart. {why} To trust a trial instead: --no-isolate.",
    )


def _doubts(plan: TrainPlan, weights: PublicWeights) -> tuple[str, ...]:
    """Return notes on weights that may not be public. Raises InputError if they are not."""
    name = weights.trained_on
    if name != plan.dataset_name or not plan.private:
        return ()
    if not isinstance(plan.data, Source):
        raise InputError(
            f"--pretrained: {weights.path} was trained on {name} by dpmac, so its weights are not "
            "public to a run on the same records, and epsilon would not count what they tell. Give "
            "weights from other data; to train a run further: dpmac train --fork."
        )
    return (
        f"{weights.path.name} was trained by dpmac on data that is called {name}, too. If these "
        "are the same records, its weights are not public, and epsilon does not count what they "
        "tell.",
    )
