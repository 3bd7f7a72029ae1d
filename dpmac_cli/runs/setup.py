"""From a checked configuration to a trainer: device, data, model, optimizer and secrets."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from dpmac_cli.config.budget import settle_noise
from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.data.dataset import Data, fingerprint
from dpmac_cli.data.loaders import load_data
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.rules import Rule
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.build import build_model, seen_by_network
from dpmac_cli.models.feature_cache import Computing, featured, stand_in
from dpmac_cli.models.features import FrozenFeatures, cut_before_head, head_of
from dpmac_cli.models.registry import UserModel, parse_model
from dpmac_cli.models.trials import check_precision
from dpmac_cli.models.user_models import built_by, source_sum
from dpmac_cli.models.validation import Independence, check_model, independence
from dpmac_cli.models.weights import PublicWeights, read_weights
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import noise_source, stream_seeds
from dpmac_cli.randomness.sampling import make_sampler
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.publish import check_publishable
from dpmac_cli.storage.digest import digest
from dpmac_cli.storage.paths import cache_folder, data_folder
from dpmac_cli.training.canaries import Canaries, GradientCanaries, ImageCanaries, Recipe
from dpmac_cli.training.diagnostics import Diagnostics
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.trainer import Hyperparameters, Plan, Trainer


@dataclass(frozen=True)
class Task:
    """What a run trains, and on what.

    Attributes:
        model: the whole network, which takes images; it is what is published.
        trained: the part of it that is trained, all of it but for what is frozen.
        data: what that takes.
        fingerprints: SHA-256 of what must be the same for a run to go on: records of a person's
            own with their classes and what they are standardised by, a network of a person's own,
            the file of public weights, and the features. Private, like the records.
        independence: how it is known that the network keeps samples apart.
        notes: what the person who runs it should know.
        built_by: how a user-supplied network was constructed, as code; its file may change later.
    """

    model: nn.Module
    trained: nn.Module
    data: Data
    independence: Independence
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    built_by: str | None = None


def make_task(
    config: TrainConfig,
    device: torch.device,
    branch: int = 0,
    data: Data | None = None,
    stop: Callable[[], bool] = lambda: False,
    timing: bool = False,
) -> Generator[Computing, None, Task]:
    """Data and network of a run or a branch; says how far it is where that takes its time.

    Args:
        config: of the run.
        device: where to.
        branch: its number.
        data: on the device; None to load it.
        stop: asked between batches of features.
        timing: whether steps are to be timed, and nothing else: the features of one record then
            stand for those of all.

    Raises:
        KeyboardInterrupt: ``stop`` said so.
    """
    given = data is not None
    data = data or load_data(config.data, data_folder(config.data_dir), device, facts=config.facts)
    word = int(stream_seeds(config.seed, branch)["init"].generate_state(1, np.uint32)[0])
    reference = parse_model(config.model)
    model = build_model(
        reference,
        config.facts,
        word,
        fix_norm=config.fix_norm,
        to_float32=config.to_float32,
        features=config.chosen_features,
        frozen=config.head_only,
        isolated=config.isolate,
        physical_batch=config.physical_batch if config.no_isolate else None,
    )
    check_publishable(model)
    fingerprints: dict[str, str] = {}
    if config.source is not None:
        facts = config.facts
        fingerprints["data"] = fingerprint(data.train, data.test)
        fingerprints["classes"] = digest({}, {"classes": facts.classes})
        fingerprints["constants"] = digest({}, {"mean": facts.mean, "std": facts.std})
    elif given and not timing and config.facts.sha256 is not None:
        found_sum = fingerprint(data.train, data.test)
        if found_sum != config.facts.sha256:  # records of the caller's own under a known name
            fingerprints["data"] = found_sum
    call = None
    if isinstance(reference, UserModel):
        fingerprints["network"] = source_sum(reference)
        call = built_by(reference, seen_by_network(config.facts, config.chosen_features))
    notes: tuple[str, ...] = ()
    if config.pretrained is not None:
        weights = read_weights(Path(config.pretrained))
        doubts = _doubts(config, weights)
        fresh = weights.adopted_by(model, head_of(model, config.facts.shape))
        notes = (*doubts, *fresh)
        fingerprints["pretrained"] = weights.sha256
    model = model.to(device)
    parts = model if isinstance(model, FrozenFeatures) else None
    if parts is None and config.head_only:
        parts = cut_before_head(model, config.facts.shape)
    kind, why = _independence(config, model, parts, own=isinstance(reference, UserModel))
    notes = (*notes, *why)
    if device.type == "cuda" and not config.head_only:  # autocast there is not seen on the CPU
        check_precision(model, config.facts.shape)
    if parts is None:
        return Task(model, model, data, kind, fingerprints, notes, call)
    if timing:
        return Task(model, parts.head, stand_in(parts, data), kind)
    names = ("features", "feature_groups", "train", "isolate", "no_isolate")
    settings = {name: getattr(config, name) for name in names}
    parts.isolated = config.head_only and kind == "isolated"
    found = yield from featured(parts, data, settings, cache_folder(), stop)
    fingerprints["features"] = found.sha256
    notes = (*notes, *found.notes)
    return Task(model, parts.head, found.data, kind, fingerprints, notes, call)


def _independence(
    config: TrainConfig, model: nn.Module, parts: FrozenFeatures | None, *, own: bool
) -> tuple[Independence, tuple[str, ...]]:
    """How it is known that a network keeps samples apart, and what its author should know."""
    if config.isolate:
        return "isolated", ()
    if not own:
        return "built in", ()
    if config.no_isolate:
        return "probed", ()
    shape, classes = config.facts.shape, len(config.facts.classes)
    if parts is not None and config.chosen_features is not None:
        model, shape = parts.head, config.chosen_features.shape_of(shape)
    frozen = parts.frozen if parts is not None and config.head_only else None
    kind, why = independence(model, shape, classes, frozen)
    if kind == "traced":
        return kind, ()
    return kind, (
        "The network is run on each sample alone, which is slower, because it could not be proven "
        f"that it keeps samples apart. {why} To trust a trial instead: --no-isolate.",
    )


def _doubts(config: TrainConfig, weights: PublicWeights) -> tuple[str, ...]:
    """What to say of weights that may not be public. Raises InputError if they are not."""
    name = weights.trained_on
    if name != config.dataset_name or config.no_dp:
        return ()
    if config.source is None:
        raise InputError(
            f"--pretrained: {weights.path} was trained on {name} by dpmac, so its weights are not "
            "public to a run on the same records, and epsilon would not count what they tell. Give "
            "weights from other data; to train a run further: dpmac train --resume."
        )
    return (
        f"{weights.path.name} was trained by dpmac on data that is called {name}, too. If these "
        "are the same records, its weights are not public, and epsilon does not count what they "
        "tell.",
    )


def outcome(events: Generator[Any, None, Task]) -> Task:
    """What comes of something that says how far it is, without listening."""
    while True:
        try:
            next(events)
        except StopIteration as end:
            return cast(Task, end.value)


def make_trainer(
    config: TrainConfig,
    steps: int | None = None,
    device: torch.device | None = None,
    diagnostics: Diagnostics | None = None,
    branch: int = 0,
    data: Data | None = None,
    task: Task | None = None,
    ranks: Ranks | None = None,
    model: nn.Module | None = None,
    rule: Rule | None = None,
) -> Trainer:
    """Data, model, optimizer and secrets of a run or a branch, ready for its first step.

    Args:
        config: of the run. Its noise is worked out, if that is not yet done.
        steps: T; None for all that the configuration asks for.
        device: None for the configuration's.
        task: of :func:`make_task`, with the same branch; None to make it of ``data``.
        ranks: the processes of the run; all but rank 0 get no secrets.
        model: a network that is at hand, in place of the one that the configuration names. It is
            trained as it is, in place.
        rule: see :class:`~dpmac_cli.training.trainer.Trainer`.

    Raises:
        InputError: data or device cannot be used, or the configuration freezes a part of a network
            that it does not build.
        BudgetError: no noise meets the configuration's epsilon.
        ModelError: the model is no torch module, or mixes samples.
    """
    if config.sigma is None and not config.no_dp:
        config = settle_noise(config)
    device = device or choose_device(config.device)
    seeds = stream_seeds(config.seed, branch)
    # Built-in networks draw no random numbers in their forward pass; others may.
    drawing = model is not None or ":" in config.model or config.augment
    if model is not None:
        task = _task_of(model, config, device, data)
    task = task or outcome(make_task(config, device, branch, data))
    model, data = task.trained, task.data
    if len(data.train) != config.facts.train_size:  # which the sampling rate, so epsilon, is for
        raise InputError(
            f"data has {len(data.train):,} training records, but epsilon was computed for the "
            f"{config.facts.train_size:,} of {config.dataset_name}. Save your records as an .npz "
            "and name that as the dataset."
        )
    draws = LayerDraws(seeds["layers"], 0 if ranks is None else ranks.rank)
    canaries = _canaries(config, model, data, seeds)
    if isinstance(canaries, ImageCanaries):
        data = canaries.data
    kind = SecureMechanism if config.secure else GaussianMechanism
    mechanism = kind(config.sigma or 0.0, config.batch_size)
    sampler = make_sampler(
        config.sampler,
        config.facts.train_size + (config.canaries or 0),
        config.batch_size,
        seeds["sampler"],
        config.secure,
        config.sampling_rate,
    )
    noise = noise_source(seeds["noise"], config.secure)
    if ranks is not None:
        mechanism, sampler, noise = ranks.divide(mechanism, sampler, noise)
    return Trainer(
        model,
        data,
        config.method,
        hyperparameters(config),
        mechanism,
        Plan(
            config.total_steps if steps is None else steps,
            config.steps_per_epoch,
            config.physical_batch,
            not config.no_dp,
            config.compile,
            config.recipe,
            task.independence == "isolated" and not config.head_only,
        ),
        sampler,
        noise,
        diagnostics.observe if diagnostics else None,
        canaries,
        draws if drawing else None,
        ranks,
        rule,
    )


def _task_of(
    model: nn.Module, config: TrainConfig, device: torch.device, data: Data | None
) -> Task:
    """A network that is at hand, checked at the door as one that is built."""
    if config.features is not None or config.pretrained is not None:
        raise InputError(
            "features and pretrained are for a network that the configuration names: leave them "
            "out, or do what they do in the network that is given."
        )
    given: object = model  # what comes from a notebook need not be what its type says
    if not isinstance(given, nn.Module):
        raise ModelError(
            f"{getattr(given, '__name__', repr(given))} is no torch module. Give a network that is "
            "made, such as torch.nn.Linear(64, 10)."
        )
    check_model(
        model,
        config.facts.shape,
        len(config.facts.classes),
        isolated=config.isolate,
        physical_batch=config.physical_batch if config.no_isolate else None,
    )
    data = data or load_data(config.data, data_folder(config.data_dir), device, facts=config.facts)
    kind, why = _independence(config, model, None, own=True)
    model = model.to(device)
    return Task(model, model, data, kind, notes=why)


def hyperparameters(config: TrainConfig) -> Hyperparameters:
    """The settings of the update rule and the clipping."""
    return Hyperparameters(
        **{each.name: getattr(config, each.name) for each in fields(Hyperparameters)}
    )


def _canaries(
    config: TrainConfig,
    model: nn.Module,
    data: Data,
    seeds: Mapping[str, np.random.SeedSequence],
) -> Canaries | None:
    """What an audit run adds to the records; None in any other."""
    facts = config.facts
    if config.canaries is None:
        return None
    recipe = Recipe(config.canaries, seeds["canaries"], seeds["coins"], data.gain.device)
    if config.canary_kind == "images":
        return ImageCanaries(data, facts.levels, len(facts.classes), recipe)
    parameters = sum(p.numel() for p in model.parameters())
    return GradientCanaries(parameters, config.sampling_rate, len(data.train), recipe)
