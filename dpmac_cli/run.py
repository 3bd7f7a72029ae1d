"""One training run, from a checked configuration to the files in its folder."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmac_cli import checkpoint, folder
from dpmac_cli import config as configuration
from dpmac_cli.accounting import (
    EpsilonSchedule,
    TrainingEvent,
    epsilon_schedule,
    total_epsilon,
)
from dpmac_cli.assembly import choose_device, device_name, environment, make_trainer
from dpmac_cli.budget import affordable, settle_noise, training_event
from dpmac_cli.card import model_card
from dpmac_cli.config import TrainConfig
from dpmac_cli.data import Data
from dpmac_cli.diagnostics import Diagnosis, Diagnostics
from dpmac_cli.engine import Evaluated, Progress, Trainer, fit
from dpmac_cli.errors import InputError
from dpmac_cli.release import save_model
from dpmac_cli.report import Bill, Outcome, State, build_report, metrics_line, public_facts


@dataclass(frozen=True)
class Started:
    """A run is about to take its first step, or to go on.

    Attributes:
        config: with the noise settled.
        folder: where its files go.
        parameters: d.
        done: steps taken before.
        steps: that it will end at.
        cut_short: whether --max-epsilon allows fewer steps than were asked for.
        branch: why a resumed run does not go on exactly; None where it does, or is new.
    """

    config: TrainConfig
    folder: Path
    parameters: int
    done: int
    steps: int
    cut_short: bool
    branch: str | None = None


@dataclass(frozen=True)
class Update:
    """Something happened while training.

    Attributes:
        event: of the engine.
        epsilon: spent up to the event's step, exactly after the last one and as an upper bound
            before; None while the prices are still being worked out, ``inf`` without privacy.
        planned: what the whole run costs, likewise.
        not_private: averages since the last evaluation, if diagnostics are on.
    """

    event: Progress | Evaluated
    epsilon: float | None
    planned: float | None
    not_private: Diagnosis | None = None


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


@dataclass
class Session:
    """A run in hand.

    Attributes:
        config: with noise and device settled.
        trainer: at ``trainer.state.step``.
        where: its folder.
        steps: that it will end at.
        base: the step at which its current branch began; 0 for a run without branches.
        earlier: what other branches did with the records.
        seeded: whether any branch drew from a seed that a person chose.
        secure: whether every branch ran with --secure.
        history: the lines of metrics.jsonl so far.
        seconds: of training so far.
        branch: why it is a branch, if it has just become one.
    """

    config: TrainConfig
    trainer: Trainer
    where: Path
    steps: int
    diagnostics: Diagnostics | None
    base: int = 0
    earlier: tuple[TrainingEvent, ...] = ()
    seeded: bool = False
    secure: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    branch: str | None = None

    def event(self, steps: int) -> TrainingEvent:
        """What the current branch does by the time the run has taken ``steps`` in all."""
        return training_event(self.config, steps - self.base)

    def bill(self) -> Bill:
        """What has been done with the records."""
        events = (*self.earlier, self.event(self.trainer.state.step))
        return Bill(events, self.event(self.config.total_steps), self.seeded, self.secure)

    def epsilon(self) -> float:
        """What has been spent."""
        return total_epsilon(self.bill().events, self.config.delta)


def train(
    config: TrainConfig, stop: Callable[[], bool] = lambda: False, data: Data | None = None
) -> Iterator[RunEvent]:
    """Train, write the run folder, and say what happens as it happens.

    Args:
        config: from :func:`dpmac_cli.config.resolve`.
        stop: asked after every step; True ends the run early with everything written.
        data: already on the device; None to load it.

    Raises:
        InputError: data, device or folder cannot be used; nothing was written.
        BudgetError: the budget allows no step, or no noise meets the target.
        ModelError: the model mixes samples, or training diverged.
    """
    device = choose_device(config.device)
    if config.out is not None:
        folder.check_chosen_folder(config.out, config.force)
    config = replace(settle_noise(config), device=str(device))
    steps = affordable(config)
    diagnostics = Diagnostics(clipped=not config.no_dp) if config.diagnostics else None
    trainer = make_trainer(config, steps, device, diagnostics, data=data)
    where = _take_folder(config)
    with folder.locked(where):
        if config.force:
            folder.clear(where)
            checkpoint.discard(where)
        folder.write_atomically(where / folder.CONFIG, configuration.to_yaml(config).encode())
        session = Session(
            config,
            trainer,
            where,
            steps,
            diagnostics,
            seeded=config.seed is not None,
            secure=config.secure,
        )
        yield from _drive(session, stop)


def resume(
    where: Path,
    flags: Mapping[str, Any],
    stop: Callable[[], bool] = lambda: False,
    data: Data | None = None,
) -> Iterator[RunEvent]:
    """Go on from a run's newest whole checkpoint.

    With nothing changed, the run ends as if it had never stopped, bit for bit on the same machine.
    With anything changed (more epochs, another rate, another machine), sampler and noise are keyed
    anew, so that no draw ever meets two different gradients: the run is then a branch, and its
    price covers every branch.

    Args:
        where: a run folder.
        flags: settings to change, as typed; None and False where not given.
        stop, data: as in :func:`train`.

    Raises:
        InputError: there is no such run, or the change cannot be made to it.
            Or no checkpoint is whole.
    """
    folder.check_run_folder(where)
    with folder.locked(where):
        yield from _drive(_resumed(where, flags, data), stop)


#: Settings that make another run, not another branch of the same.
FIXED = ("dataset", "model", "optimizer", "sampler", "no_dp", "epsilon")
#: Settings that change nothing about what is computed.
ASIDE = ("device", "diagnostics")


def _resumed(where: Path, flags: Mapping[str, Any], data: Data | None) -> Session:
    saved = checkpoint.newest(where)
    record = saved.record
    typed = {name: value for name, value in flags.items() if value is not None}
    for name in map(configuration.flag_name, FIXED):
        given = typed.pop(name.replace("-", "_"), None)
        if given and str(given) != str(record["config"].get(name)):
            raise InputError(
                f"--{name} cannot change in a run that goes on. Start a new run with it."
            )
    config = configuration.resolve(typed, where / folder.CONFIG).config
    device = choose_device(config.device)
    config = replace(config, device=str(device), out=where)
    changed = sorted(
        name
        for name, value in config.recorded().items()
        if name not in ASIDE and record["config"].get(name) != value
    )
    if record["environment"] != environment(device):
        changed.append("the machine or its software")
    if config.seed is not None:
        changed.append("seed")
    step = record["state"]["step"]
    earlier = tuple(TrainingEvent(**event) for event in record["earlier"])
    branch = None
    base = record["base"]
    if changed:
        branch = f"{', '.join(changed)} changed"
        earlier = (*earlier, _taken(where, saved))
        base = step
    told = folder.reported_steps(where) >= step  # else its last files are yet to be written
    if config.total_steps < step or (config.total_steps == step and told and not changed):
        raise InputError(
            f"{where} is finished: it took {step} of {config.total_steps} steps. "
            f"To train on, give more with --epochs (above {step // config.steps_per_epoch}) or "
            f"--steps (above {step})."
        )
    steps = base + affordable(config, config.total_steps - base, earlier)
    diagnostics = Diagnostics(clipped=not config.no_dp) if config.diagnostics else None
    trainer = make_trainer(config, steps, device, diagnostics, len(earlier), data)
    trainer.state.restore(saved.tensors, record["state"])
    session = Session(
        config,
        trainer,
        where,
        steps,
        diagnostics,
        base,
        earlier,
        seeded=record["seeded"] or config.seed is not None,
        secure=record["secure"] and config.secure,
        history=[line for line in record["history"] if line["step"] <= step],
        seconds=record["seconds"],
        branch=branch,
    )
    if branch is None:
        trainer.state.restore_generators(record["state"])
        # Lines past the checkpoint stay: they were shown, and a branch must count their steps.
        lines = folder.read_lines(where / folder.METRICS)
    else:
        # First of all the bill of the other branches, in a checkpoint that replaces theirs.
        kept = _save(session)
        checkpoint.discard(where, but=kept)
        folder.set_aside(where)
        folder.write_atomically(where / folder.CONFIG, configuration.to_yaml(config).encode())
        lines = session.history
    text = "".join(json.dumps(line) + "\n" for line in lines)
    folder.write_atomically(where / folder.METRICS, text.encode())
    return session


def goes_on_exactly(where: Path) -> bool:
    """Whether resuming a run with nothing changed would replay it, here and now."""
    try:
        record = checkpoint.newest(where).record
    except InputError:
        return False
    device = choose_device(str(record["config"]["device"]))
    return bool(record["environment"] == environment(device))


def _taken(where: Path, saved: checkpoint.Checkpoint) -> TrainingEvent:
    """What the branch that is being left did with the records, as far as anyone may have seen."""
    record = saved.record
    shown = [line["step"] for line in folder.read_lines(where / folder.METRICS)]
    steps = max([record["state"]["step"], *shown]) - record["base"]
    return replace(TrainingEvent(**record["event"]), steps=steps)


def _drive(session: Session, stop: Callable[[], bool]) -> Iterator[RunEvent]:
    """Train a session to its end and write its files."""
    began = saved = time.perf_counter()
    config, trainer, where = session.config, session.trainer, session.where
    parameters = trainer.state.theta.numel()
    every_steps, every_seconds = config.checkpoint_interval
    planned = config.total_steps
    if trainer.state.step == 0:  # so that a run can be resumed from its first moment on
        _save(session)
    yield Started(
        config,
        where,
        parameters,
        trainer.state.step,
        session.steps,
        session.steps < planned,
        session.branch,
    )

    last_shown = max([0, *(line["step"] for line in folder.read_lines(where / folder.METRICS))])

    def due(step: int) -> bool:
        return every_steps is not None and step % every_steps == 0

    with ThreadPoolExecutor(1) as pool:
        # Prices are composed beside the training, which they must not hold up.
        prices = pool.submit(_prices, session)
        for event in fit(trainer, stop, due, session.seconds):
            session.seconds = event.seconds
            scored = isinstance(event, Evaluated)
            schedule = prices.result() if scored else _if_ready(prices)
            epsilon = None if schedule is None else schedule.at(event.step - session.base)
            if isinstance(event, Evaluated):
                if event.last:  # as in the report: a run may end between the schedule's points
                    epsilon = session.epsilon()
                assert epsilon is not None  # noqa: S101  (the schedule was waited for)
                line = metrics_line(event, epsilon, config)
                session.history.append(line)
                if event.step > last_shown:
                    folder.append_line(where / folder.METRICS, line)
            now = time.perf_counter()
            if due(event.step) or (every_seconds is not None and now - saved >= every_seconds):
                _save(session)
                saved = now
            yield Update(
                event,
                epsilon,
                None if schedule is None else schedule.points[-1][1],
                session.diagnostics.flush(where, event.step)
                if scored and session.diagnostics
                else None,
            )
    _save(session)

    state: State = "finished"
    if trainer.state.step < session.steps:
        state = "interrupted"
    elif session.steps < planned:
        state = "budget-spent"
    outcome = Outcome(
        state,
        session.history,
        trainer.public_values(),
        session.seconds,
        time.perf_counter() - began,
        device_name(trainer.state.theta.device),
    )
    bill = session.bill()
    facts = public_facts(config, bill, parameters)
    save_model(where / folder.MODEL, trainer.model, facts)
    report = build_report(config, facts, trainer.state.step, outcome)
    folder.write_atomically(where / folder.CARD, model_card(report, trainer.model).encode())
    folder.write_atomically(where / folder.REPORT, folder.to_json(report).encode())
    yield Finished(report, where, state)


def _save(session: Session) -> Path:
    state = session.trainer.state
    record = {
        "state": state.numbers(),
        "config": session.config.recorded(),
        "event": vars(session.event(state.step)),
        "base": session.base,
        "earlier": [vars(event) for event in session.earlier],
        "seeded": session.seeded,
        "secure": session.secure,
        "history": session.history,
        "seconds": session.seconds,
        "environment": environment(state.theta.device),
    }
    return checkpoint.save(session.where, state.step, state.tensors(), record)


def _take_folder(config: TrainConfig) -> Path:
    if config.out is not None:
        return folder.make_folder(config.out)
    suffix = "-no-dp" if config.no_dp else ""
    return folder.new_folder(Path("runs"), f"{config.dataset}-{config.optimizer}{suffix}")


def _prices(session: Session) -> EpsilonSchedule:
    config = session.config
    event = session.event(session.steps)
    return epsilon_schedule(event, config.delta, config.steps_per_epoch, session.earlier)


def _if_ready(prices: Future[EpsilonSchedule]) -> EpsilonSchedule | None:
    return prices.result() if prices.done() else None
