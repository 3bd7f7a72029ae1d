"""A run being trained: from its first step here to the files it ends with."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.pricing import epsilon_schedule
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.yaml_file import to_yaml
from dpmac_cli.errors import DivergedError
from dpmac_cli.runs import assist, audit, checkpoint, folder
from dpmac_cli.runs.environment import device_name, environment
from dpmac_cli.runs.ledger import Ledger, Spent
from dpmac_cli.runs.publish import save_model
from dpmac_cli.runs.report import State, build_report, metrics_line, model_card, public_facts
from dpmac_cli.runs.setup import Task
from dpmac_cli.storage import files
from dpmac_cli.storage.progress import Computing
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.loop import Evaluated, Progress, fit
from dpmac_cli.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run is about to take its first step, or its first one since it was resumed or forked.

    Attributes:
        parameters: numbers of trained parameters, d, and of all.
        done: steps taken before. steps: that it will end at, as --max-epsilon allows.
        fresh_noise: why noise and batches are drawn with new keys; "" where they are not.
        notes: for the person who runs it.
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
        event: of the training loop.
        epsilon: spent up to the event's step, exact after the last one and an upper bound before;
            None while it is being computed, at most until the first Evaluated; ``inf`` without
            privacy.
        planned: epsilon of the whole run, likewise.
    """

    event: Progress | Evaluated
    epsilon: float | None
    planned: float | None


@dataclass(frozen=True)
class Finished:
    """The run is over and its files are written; ``report`` is as in report.json."""

    report: dict[str, Any]
    folder: Path
    state: State


@dataclass(frozen=True)
class Reduced:
    """Memory ran out in the step just taken: from now on, ``chunk`` samples run at a time."""

    step: int
    chunk: int


RunEvent = Computing | Started | Update | Reduced | Finished


@dataclass(kw_only=True)
class Session:
    """A run that is being trained, after ``seconds`` of training at ``trainer.state.step``."""

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
        """Step that the run will end at."""
        return self.ledger.spent.end

    def spent(self) -> Spent:
        """Return what has been done with the records, and as planned without --max-epsilon."""
        spent, charged = self.ledger.spent, self.ledger.charged(self.trainer.state.step)
        planned = self.plan.event_of(self.plan.steps - spent.base)
        return replace(spent, event=planned, begun=charged)

    def begin_files(self) -> None:
        """Write config.yaml and its checksum, the only one while training, and the metrics."""
        (self.where / folder.SUMS).unlink(missing_ok=True)
        files.write_atomically(self.where / folder.CONFIG, to_yaml(self.plan.recorded).encode())
        folder.seal(self.where, (folder.CONFIG,))
        self._write_metrics()

    def save(self) -> Path:
        """Write a checkpoint. Raises OSError, and DivergedError: from there no run can go on."""
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
            # That it diverged was computed from the records, so a fork must count those steps.
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
            # Costs are composed beside the training, which they must not hold up.
            costs = pool.submit(
                epsilon_schedule, spent.event, plan.delta, plan.steps_per_epoch, spent.earlier
            )
            for event in fit(trainer, stop, due, self.seconds, self.ledger.before):
                self.seconds = event.seconds
                scored = isinstance(event, Evaluated)
                schedule = costs.result() if scored or costs.done() else None
                epsilon = None if schedule is None else schedule.at(event.step - spent.base)
                if epsilon is not None and plan.scores is not None:
                    tested = plan.scores.event(event.step, self.steps, spent.base)
                    epsilon = max(epsilon, total_epsilon((*spent.earlier, tested), plan.delta))
                if isinstance(event, Evaluated):
                    if event.last:  # as in the report: a run may end between the schedule's points
                        epsilon = total_epsilon(self.spent().events, plan.delta)
                    assert epsilon is not None  # noqa: S101  (the schedule was waited for)
                    if isinstance(event.result, Evaluation):
                        self.scored = event.result
                    self.history.append(metrics_line(event, epsilon, plan))
                # A step that is yet to be scored would never be, if a run went on from after it.
                scores = event.step % plan.steps_per_epoch == 0 or event.step == self.steps
                settled = scored or not scores
                # And one done again in chunks of another size would round the same sum otherwise,
                # under the same noise: nothing of it may be seen before this is saved.
                reduced = settled and trainer.state.chunk < chunk
                late = time.perf_counter() - saved >= plan.checkpoint_seconds
                # Nor may another score be released in place of one that was seen.
                released = scored and plan.scores is not None
                if reduced or released or (settled and (late or due(event.step))):
                    kept = self.save()
                    saved = time.perf_counter()
                    if reduced:  # nor may one from before serve, where chunks were larger
                        checkpoint.discard(self.where, but=kept)
                if scored:
                    self._write_metrics()
                if reduced:
                    chunk = trainer.state.chunk
                    yield Reduced(event.step, chunk)
                planned = schedule.points[-1][1] if schedule else None
                yield Update(event=event, epsilon=epsilon, planned=planned)

    def publish(self, total_seconds: float) -> Finished:
        """Write the files that a run ends with, their checksums last."""
        plan, trainer, where, task = self.plan, self.trainer, self.where, self.task
        state: State = "finished" if self.steps == plan.steps else "budget-spent"
        if trainer.state.step < self.steps:
            state = "interrupted"
        scored = self.scored
        if scored is None and plan.scores is None:  # a run may be resumed at its end
            scored = trainer.evaluate()
        theta, chunk = trainer.state.theta, trainer.state.chunk
        facts = public_facts(plan, self.spent(), task, theta.numel())
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
            machine={"device": device_name(theta.device), "physical_batch": chunk},
        )
        files.write_atomically(where / folder.CARD, model_card(report, task.model).encode())
        files.write_atomically(where / folder.REPORT, files.to_json(report).encode())
        if state != "interrupted":  # coins and all: only of a run that cannot be resumed
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
