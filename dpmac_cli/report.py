"""What a run says of itself, as versioned JSON. Holds public and post-noise values only."""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from dpmac_cli import accounting
from dpmac_cli.accounting import TrainingEvent
from dpmac_cli.config import TrainConfig
from dpmac_cli.engine import Evaluated

SCHEMA_VERSION = 1
PACKAGES = ("dpmac", "torch", "torchvision", "numpy", "dp-accounting", "safetensors")

State = Literal["finished", "interrupted", "budget-spent"]

SEED_KEPT_NOWHERE = (
    "Every seed came from the operating system, one for each purpose, and was kept nowhere."
)
SEED_GIVEN = (
    "The run was made repeatable with --seed: whoever knows or guesses the seed can draw the same "
    "noise and subtract it, so the guarantee holds only against those who do not."
)


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Attributes:
        state: how it ended.
        steps: taken.
        evaluations: in order, at least one.
        seconds: of training; ``total_seconds`` of everything.
        parameters: d.
        device: it ran on.
    """

    state: State
    steps: int
    evaluations: tuple[Evaluated, ...]
    seconds: float
    total_seconds: float
    parameters: int
    device: str


def privacy(config: TrainConfig, steps: int, planned: int) -> dict[str, Any]:
    """The guarantee of the first ``steps`` of a run planned for ``planned``."""
    sigma = config.sigma or 0.0
    event = TrainingEvent(config.sampling_rate, sigma, steps)
    epsilon = event.epsilon(config.delta)
    whole = TrainingEvent(config.sampling_rate, sigma, planned).epsilon(config.delta)
    return {
        "private": not config.no_dp,
        "epsilon": _finite(epsilon),
        "epsilon_planned": _finite(whole),
        "delta": config.delta,
        "noise_multiplier": sigma,
        "sampler": accounting.SAMPLER,
        "sampling_rate": config.sampling_rate,
        "steps": steps,
        "adjacency": accounting.ADJACENCY,
        "accountant": accounting.ACCOUNTANT,
        "statement": accounting.statement(
            math.inf if config.no_dp else epsilon, config.delta, event
        ),
        "seed_policy": _seed_policy(config),
    }


def public_facts(config: TrainConfig, steps: int, planned: int, parameters: int) -> dict[str, Any]:
    """What is published with the weights, in the model file's header."""
    facts = config.facts
    return {
        "schema_version": SCHEMA_VERSION,
        "optimizer": config.optimizer,
        "dataset": {
            "name": config.dataset,
            "train_size": facts.train_size,
            "test_size": facts.test_size,
            "sha256": facts.sha256,
        },
        "model": {"name": config.model, "parameters": parameters},
        "input": {
            "shape": list(facts.shape),
            "levels": facts.levels,
            "mean": list(facts.mean),
            "std": list(facts.std),
        },
        "classes": list(facts.classes),
        "privacy": privacy(config, steps, planned),
    }


def build_report(config: TrainConfig, outcome: Outcome, planned: int) -> dict[str, Any]:
    """The whole report. Scripts rely on its keys."""
    last = outcome.evaluations[-1]
    best = max(outcome.evaluations, key=lambda e: e.result.accuracy)
    used = sorted(config.method.settings)
    speed = outcome.steps / outcome.seconds if outcome.seconds > 0 else 0.0
    return {
        **public_facts(config, outcome.steps, planned, outcome.parameters),
        "state": outcome.state,
        "test": {
            "accuracy": last.result.accuracy,
            "loss": _finite(last.result.loss),
            "samples": last.result.samples,
            "best_accuracy": best.result.accuracy,
            "best_epoch": best.epoch,
        },
        "hyperparameters": {
            "epochs": outcome.steps / config.steps_per_epoch,
            "batch_size": config.batch_size,
            **{name: getattr(config, name) for name in used},
        },
        "post_noise": last.public,
        "timings": {
            "training_seconds": round(outcome.seconds, 3),
            "total_seconds": round(outcome.total_seconds, 3),
            "steps_per_second": round(speed, 2),
            "samples_per_second": round(speed * config.batch_size, 1),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "device": outcome.device,
            "system": platform.system(),
            "processor": platform.machine(),
        },
    }


def metrics_line(evaluated: Evaluated, epsilon: float, config: TrainConfig) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": evaluated.step,
        "epoch": evaluated.epoch,
        "epsilon": _finite(epsilon),
        "delta": config.delta,
        "test_accuracy": evaluated.result.accuracy,
        "test_loss": _finite(evaluated.result.loss),
        "seconds": round(evaluated.seconds, 3),
        **evaluated.public,
    }


def _seed_policy(config: TrainConfig) -> Mapping[str, Any]:
    given = config.seed is not None
    return {"given": given, "statement": SEED_GIVEN if given else SEED_KEPT_NOWHERE}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _versions() -> dict[str, str]:
    return {package: version(package) for package in PACKAGES}
