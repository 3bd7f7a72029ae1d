"""One training run, from a checked configuration to the files in its folder."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from dpmac_cli import config as configuration
from dpmac_cli import folder
from dpmac_cli.accounting import (
    EpsilonSchedule,
    TrainingEvent,
    affordable_steps,
    calibrate_noise,
    epsilon_schedule,
)
from dpmac_cli.config import TrainConfig
from dpmac_cli.data import load_data
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.engine import Evaluated, Hyperparameters, Plan, Progress, Trainer, fit
from dpmac_cli.errors import BudgetError, InputError
from dpmac_cli.models import build_model
from dpmac_cli.noise import noise_source, stream_seeds
from dpmac_cli.release import save_model
from dpmac_cli.report import Outcome, State, build_report, metrics_line, public_facts
from dpmac_cli.sampling import PoissonSampler

DIAGNOSTICS_WARNING = (
    "NOT PRIVATE: these values were computed from the training records without noise. "
    "Publishing them, or choosing by them, voids the guarantee in report.json."
)


@dataclass(frozen=True)
class Started:
    """A run is about to take its first step.

    Attributes:
        config: with the noise settled.
        folder: where its files go.
        parameters: d.
        steps: that it will take.
        cut_short: whether --max-epsilon allows fewer steps than were asked for.
    """

    config: TrainConfig
    folder: Path
    parameters: int
    steps: int
    cut_short: bool


@dataclass(frozen=True)
class Update:
    """Something happened while training.

    Attributes:
        event: of the engine.
        epsilon: an upper bound on what was spent up to the event's step; None while the prices
            are still being worked out, ``inf`` without privacy.
        planned: what the whole run costs, likewise.
        not_private: averages since the last evaluation, if diagnostics are on.
    """

    event: Progress | Evaluated
    epsilon: float | None
    planned: float | None
    not_private: "Diagnosis | None" = None


@dataclass(frozen=True)
class Finished:
    """The run is over and its files are written.

    Attributes:
        report: as in report.json.
        folder: where.
        state: how it ended.
    """

    report: dict[str, Any]
    folder: Path
    state: State


RunEvent = Started | Update | Finished


def train(config: TrainConfig, stop: Callable[[], bool] = lambda: False) -> Iterator[RunEvent]:
    """Train, write the run folder, and say what happens as it happens.

    Args:
        config: from :func:`dpmac_cli.config.resolve`.
        stop: asked after every step; True ends the run early with everything written.

    Raises:
        InputError: data, device or folder cannot be used; nothing was written.
        BudgetError: the budget allows no step, or no noise meets the target.
        ModelError: the model mixes samples, or training diverged.
    """
    began = time.perf_counter()
    device = choose_device(config.device)
    if config.out is not None:
        folder.check_chosen_folder(config.out, config.force)
    config = replace(settle_noise(config), device=str(device))
    planned = config.total_steps
    steps = _affordable(config)
    with ThreadPoolExecutor(1) as pool:
        # Prices are composed beside the training, which they must not hold up.
        prices = pool.submit(_prices, config, steps)
        diagnostics = Diagnostics() if config.diagnostics else None
        trainer = make_trainer(config, steps, device, diagnostics)
        parameters = trainer.state.theta.numel()
        where = _take_folder(config)
        folder.write_atomically(where / folder.CONFIG, configuration.to_yaml(config).encode())
        yield Started(config, where, parameters, steps, steps < planned)

        evaluations: list[Evaluated] = []
        for event in fit(trainer, stop):
            scored = isinstance(event, Evaluated)
            schedule = prices.result() if scored else _if_ready(prices)
            update = Update(
                event,
                None if schedule is None else schedule.at(event.step),
                None if schedule is None else schedule.points[-1][1],
                diagnostics.flush(where, event.step) if scored and diagnostics else None,
            )
            if isinstance(event, Evaluated):
                evaluations.append(event)
                line = metrics_line(event, prices.result().at(event.step), config)
                folder.append_line(where / folder.METRICS, line)
            yield update

    state: State = "finished"
    if trainer.state.step < steps:
        state = "interrupted"
    elif steps < planned:
        state = "budget-spent"
    outcome = Outcome(
        state,
        trainer.state.step,
        tuple(evaluations),
        evaluations[-1].seconds,
        time.perf_counter() - began,
        parameters,
        _device_name(device),
    )
    report = build_report(config, outcome, planned)
    facts = public_facts(config, outcome.steps, planned, parameters)
    save_model(where / folder.MODEL, trainer.model, facts)
    folder.write_atomically(where / folder.REPORT, folder.to_json(report).encode())
    yield Finished(report, where, state)


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one.

    Raises:
        InputError: it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here. "
            "Use --device cpu or auto."
        )
    return device


def settle_noise(config: TrainConfig) -> TrainConfig:
    """Replace a target epsilon by the least noise whose whole run costs no more."""
    if config.epsilon is None:
        return config
    sigma = calibrate_noise(config.sampling_rate, config.total_steps, config.delta, config.epsilon)
    return replace(config, sigma=sigma)


def _affordable(config: TrainConfig) -> int:
    """How many of the planned steps --max-epsilon pays for."""
    if config.max_epsilon is None:
        return config.total_steps
    event = TrainingEvent(config.sampling_rate, config.sigma or 0.0, config.total_steps)
    steps = affordable_steps(event, config.delta, config.max_epsilon)
    if steps == 0:
        first = replace(event, steps=1).epsilon(config.delta)
        raise BudgetError(
            f"--max-epsilon {config.max_epsilon:g} allows no step: the first one alone costs "
            f"{first:.4g} with sigma {config.sigma:g}. Raise --sigma or --max-epsilon."
        )
    return steps


def make_trainer(
    config: TrainConfig,
    steps: int,
    device: torch.device,
    diagnostics: "Diagnostics | None" = None,
) -> Trainer:
    """Data, model, optimizer and secrets of a run, ready for its first step."""
    seeds = stream_seeds(config.seed)
    data = load_data(config.dataset, data_folder(config.data_dir), device)
    model = build_model(config.model, config.facts, _word(seeds["init"])).to(device)
    return Trainer(
        model,
        data,
        config.method,
        Hyperparameters(
            lr=config.lr,
            clip_norm=config.clip_norm,
            beta1=config.beta1,
            beta2=config.beta2,
            gamma=config.gamma,
            gamma_prime=config.gamma_prime,
            h1=config.h1,
            h2=config.h2,
            kappa=cast(Literal["paper", "exact", "tracked"], config.kappa),
            phi=config.phi,
        ),
        GaussianMechanism(config.sigma or 0.0, config.batch_size),
        Plan(steps, config.steps_per_epoch, config.physical_batch, private=not config.no_dp),
        PoissonSampler(config.facts.train_size, config.sampling_rate, seeds["sampler"]),
        noise_source(seeds["noise"]),
        diagnostics.observe if diagnostics else None,
    )


def data_folder(chosen: Path | None) -> Path:
    """Where data sets lie: the flag, the environment, or a cache in the home folder."""
    if chosen is not None:
        return chosen
    named = os.environ.get("DPMAC_DATA_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dpmac"


def _take_folder(config: TrainConfig) -> Path:
    if config.out is not None:
        return folder.take_chosen_folder(config.out, config.force)
    suffix = "-no-dp" if config.no_dp else ""
    return folder.new_folder(Path("runs"), f"{config.dataset}-{config.optimizer}{suffix}")


def _prices(config: TrainConfig, steps: int) -> EpsilonSchedule:
    event = TrainingEvent(config.sampling_rate, config.sigma or 0.0, steps)
    return epsilon_schedule(event, config.delta, config.steps_per_epoch)


def _if_ready(prices: Future[EpsilonSchedule]) -> EpsilonSchedule | None:
    return prices.result() if prices.done() else None


def _word(seed: np.random.SeedSequence) -> int:
    return int(seed.generate_state(1, np.uint32)[0])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class Diagnosis:
    """Averages over the samples of some steps. NOT private."""

    samples: int
    not_finite: int
    mean_loss: float | None
    mean_norm: float | None
    clipped_share: float | None


@dataclass
class Diagnostics:
    """Collects what --diagnostics shows. Everything in it is NOT private."""

    _losses: list[Tensor] = field(default_factory=list)
    _norms: list[Tensor] = field(default_factory=list)

    def observe(self, step: int, losses: Tensor, norms: Tensor) -> None:
        """Keep a chunk's per-sample losses and whitened norms, shape (samples,) each."""
        del step
        self._losses.append(losses)
        self._norms.append(norms)

    def flush(self, where: Path, step: int) -> Diagnosis:
        """Average what was seen since the last time, and append it to a file of its own."""
        diagnosis = self._averages()
        self._losses.clear()
        self._norms.clear()
        file = where / folder.DIAGNOSTICS
        if not file.exists():
            folder.append_line(file, {"warning": DIAGNOSTICS_WARNING}, folder.PRIVATE_MODE)
        folder.append_line(file, {"step": step, **vars(diagnosis)}, folder.PRIVATE_MODE)
        return diagnosis

    def _averages(self) -> Diagnosis:
        losses = torch.cat(self._losses) if self._losses else torch.zeros(0)
        norms = torch.cat(self._norms) if self._norms else torch.zeros(0)
        finite = torch.isfinite(norms)
        seen = int(finite.sum())
        return Diagnosis(
            samples=len(norms),
            not_finite=len(norms) - seen,
            mean_loss=float(losses[finite].mean()) if seen else None,
            mean_norm=float(norms[finite].mean()) if seen else None,
            clipped_share=float((norms[finite] > 1).double().mean()) if seen else None,
        )
