"""Session of a run: from its first step in this process to the final files."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import COARSE, total_epsilon
from dpmac_cli.accounting.pricing import EpsilonSchedule, epsilon_schedule
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.yaml_file import to_yaml
from dpmac_cli.errors import DivergedError
from dpmac_cli.release import audit
from dpmac_cli.release.publish import save_model
from dpmac_cli.release.report import State, build_report, metrics_line, model_card, public_facts
from dpmac_cli.runs import assist, checkpoint, folder
from dpmac_cli.runs.environment import device_name, environment
from dpmac_cli.runs.ledger import Ledger, Spent
from dpmac_cli.runs.setup import Task
from dpmac_cli.storage import files
from dpmac_cli.storage.progress import Computing
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.loop import Evaluated, Progress, fit
from dpmac_cli.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run is about to take its first step, or the first since it was resumed or forked.

    Attributes:
        parameters: number d of trained parameters, and of all parameters.
        done: steps taken before. steps: last step, limited by --max-epsilon.
        fresh_noise: reason for drawing noise and batches with new keys; "" if they are not.
        notes: messages for the user.
    """

    plan: TrainPlan
    folder: Path
    parameters: tuple[int, int]
    done: int
    steps: int
    fresh_noise: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Update:
    """Progress of training.

    Attributes:
        event: event of the training loop.
        epsilon: epsilon spent up to the event's step, between evaluations an upper bound; None
            while it is being computed, at most until the first Evaluated; ``inf`` without privacy.
        planned: epsilon of the whole run; None or ``inf`` in the same cases.
    """

    event: Progress | Evaluated
    epsilon: float | None
    planned: float | None


@dataclass(frozen=True)
class Finished:
    """The run has ended and its files are written; ``report`` is the content of report.json."""

    report: dict[str, Any]
    folder: Path
    state: State


@dataclass(frozen=True)
class Reduced:
    """Memory ran out in the last step: from now on, ``chunk`` samples are processed at a time."""

    step: int
    chunk: int


RunEvent = Computing | Started | Update | Reduced | Finished


@dataclass(kw_only=True)
class Session:
    """A run in training, at ``trainer.state.step`` after ``seconds`` of training."""

    plan: TrainPlan
    task: Task
    trainer: Trainer
    where: Path
    ledger: Ledger
    ranks: Ranks | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    fresh_noise: str = ""
    notes: tuple[str, ...] = ()
    scored: Evaluation | None = None

    @property
    def steps(self) -> int:
        """Return the last step of the run."""
        return self.ledger.spent.end

    def spent(self) -> Spent:
        """Return the spent budget so far."""
        return replace(self.ledger.spent, begun=self.ledger.charged(self.trainer.state.step))

    def begin_files(self) -> None:
        """Write config.yaml and its checksum, the only one during training, and the metrics."""
        (self.where / folder.SUMS).unlink(missing_ok=True)
        files.write_atomically(self.where / folder.CONFIG, to_yaml(self.plan.recorded).encode())
        folder.seal(self.where, (folder.CONFIG,))
        self._write_metrics()

    def save(self) -> Path:
        """Write a checkpoint. Raises OSError, or DivergedError if it could not be resumed from."""
        self.trainer.check_finite()
        state = self.trainer.state
        record = {
            "state": state.numbers(),
            "config": dict(self.plan.recorded),
            "spent": asdict(self.ledger.spent),
            "history": self.history,
            "seconds": self.seconds,
            "fingerprints": dict(self.task.fingerprints),
            "environment": environment(state.theta.device, self.ranks),
        }
        return checkpoint.save(self.where, state.step, state.tensors(), record)

    def drive(self, stop: Callable[[], bool]) -> Iterator[RunEvent]:
        """Train to the end and write the files."""
        began = time.perf_counter()
        yield Started(
            plan=self.plan,
            folder=self.where,
            parameters=(self.trainer.state.theta.numel(), self.task.parameters),
            done=self.trainer.state.step,
            steps=self.steps,
            fresh_noise=self.fresh_noise,
            notes=self.notes,
        )
        if self.ranks is not None:
            assist.begin(self.ranks, self.plan, self.task, self.trainer, self.where)
        try:
            yield from self._updates(stop)
        except DivergedError as failure:
            # Divergence reveals information about the records, so a fork must count those steps.
            epoch = failure.step / self.plan.steps_per_epoch
            self.history.append({"step": failure.step, "epoch": epoch, "diverged": True})
            self.ledger.write(self.ledger.charged(failure.step))
            self._write_metrics()
            raise
        self.ledger.write(self.ledger.charged(self.trainer.state.step))
        if self.ranks is not None:
            self.ranks.dismiss()
        self.save()
        yield self.publish(time.perf_counter() - began)

    def _updates(self, stop: Callable[[], bool]) -> Iterator[Update | Reduced]:
        """Train, save checkpoints when they are due, and report progress."""
        plan, trainer, interval = self.plan, self.trainer, self.plan.checkpoint_steps
        saved, chunk, spent = time.perf_counter(), trainer.state.chunk, self.ledger.spent

        def due(step: int) -> bool:
            return interval > 0 and step % interval == 0

        with ThreadPoolExecutor(1) as pool:
            # Privacy costs are computed in the background, so they do not delay training.
            costs = pool.submit(
                epsilon_schedule, spent.event, plan.delta, plan.steps_per_epoch, spent.earlier
            )
            for event in fit(trainer, stop, due, self.seconds, self.ledger.before):
                self.seconds = event.seconds
                scored = isinstance(event, Evaluated)
                schedule = costs.result() if scored or costs.done() else None
                epsilon = None if schedule is None else self._epsilon(schedule, event)
                if isinstance(event, Evaluated):
                    assert epsilon is not None  # noqa: S101  (the schedule is complete)
                    if isinstance(event.result, Evaluation):
                        self.scored = event.result
                    self.history.append(metrics_line(event, epsilon, plan))
                # Save no step before its score: a run that resumed after it would never score it.
                scores = event.step % plan.steps_per_epoch == 0 or event.step == self.steps
                settled = scored or not scores
                # Repeating a step with another chunk size would round the sum differently under
                # the same noise: nothing of it may be shown before this is saved.
                reduced = settled and trainer.state.chunk < chunk
                late = time.perf_counter() - saved >= plan.checkpoint_seconds
                # No other score may be released instead of one that was shown, either.
                released = scored and plan.scores is not None
                if reduced or released or (settled and (late or due(event.step))):
                    kept = self.save()
                    saved = time.perf_counter()
                    if reduced:  # nor may an earlier checkpoint with larger chunks be used
                        checkpoint.discard(self.where, but=kept)
                if scored:
                    self._write_metrics()
                if reduced:
                    chunk = trainer.state.chunk
                    yield Reduced(event.step, chunk)
                planned = schedule.points[-1][1] if schedule else None
                yield Update(event=event, epsilon=epsilon, planned=planned)

    def _epsilon(self, schedule: EpsilonSchedule, event: Progress | Evaluated) -> float:
        """Return epsilon up to an event: of its own step if it is an evaluation, else a bound."""
        plan, spent = self.plan, self.ledger.spent
        if isinstance(event, Evaluated) and event.last:  # like the report
            return total_epsilon(self.spent().events, plan.delta)
        epsilon = schedule.at(done := event.step - spent.base)
        if isinstance(event, Evaluated) and done not in dict(schedule.points):
            part = replace(spent.event, steps=done)
            epsilon = min(epsilon, total_epsilon((*spent.earlier, part), plan.delta, widest=COARSE))
        if plan.scores is not None:
            tested = plan.scores.event(event.step, self.steps, spent.base)
            epsilon = max(epsilon, total_epsilon((*spent.earlier, tested), plan.delta))
        return epsilon

    def publish(self, total_seconds: float) -> Finished:
        """Write the final files of a run, and their checksums last.

        An earlier report goes first: a kill in between must not leave it beside a later model.
        """
        plan, trainer, where, task = self.plan, self.trainer, self.where, self.task
        state: State = "finished" if self.steps == plan.steps else "budget-spent"
        if trainer.state.step < self.steps:
            state = "interrupted"
        scored = self.scored
        if scored is None and plan.scores is None:  # the run was resumed at its end
            scored = trainer.evaluate()
        theta = trainer.state.theta
        facts = public_facts(plan, self.spent(), task, theta.numel())
        for name in (folder.REPORT, folder.CARD, folder.AUDIT):
            (where / name).unlink(missing_ok=True)
        with trainer.published():
            save_model(where / folder.MODEL, task.model, facts)
        report = build_report(
            plan,
            facts,
            state=state,
            steps=trainer.state.step,
            history=self.history,
            metrics={} if scored is None else scored.values(),
            post_noise=trainer.public_values(),
            seconds=self.seconds,
            total_seconds=total_seconds,
            # Not the chunk: it says when memory ran out, which depends on the size of a batch.
            machine={
                "device": device_name(theta.device),
                "physical_batch": trainer.plan.physical_batch,
            },
        )
        files.write_atomically(where / folder.CARD, model_card(report, task.model).encode())
        files.write_atomically(where / folder.REPORT, files.to_json(report).encode())
        if state != "interrupted":  # it includes coins: only for runs that cannot be resumed
            self._write_audit(report)
        self._write_metrics()
        folder.seal(where)
        return Finished(report, where, state)

    def _write_audit(self, report: Mapping[str, Any]) -> None:
        if not self.trainer.hooks:
            return
        [canaries] = self.trainer.hooks
        cost, settings = report["privacy"], report["audit"]
        claim = (cost["epsilon"], cost["delta"], settings["guesses"])
        seen = (tuple(canaries.scores.tolist()), tuple(canaries.coins.tolist()))
        events = tuple(e for e in self.spent().events if e.records == "training")
        text = files.to_json(audit.Audit(*claim, *seen, events).as_json())
        files.write_atomically(self.where / folder.AUDIT, text.encode())

    def _write_metrics(self) -> None:
        lines = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in self.history)
        files.write_atomically(self.where / folder.METRICS, lines.encode())
