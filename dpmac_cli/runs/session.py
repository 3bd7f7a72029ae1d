"""Session of a run: from its first step in this process to the final files."""

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dpmac_cli import files
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.sources import Values, by_flag, to_yaml
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.errors import DivergedError
from dpmac_cli.files import finite_or_none
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.tasks.task import METRICS
from dpmac_cli.training.evaluation import Evaluation
from dpmac_cli.training.private_scores import PrivateScore

#: Seconds between progress events.
PROGRESS_EVERY = 0.1


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run is about to take its first step, or the first since it was resumed: its first event.

    Attributes:
        plan: plan of the run.
        folder: its folder.
        parameters: number d of trained parameters, and of all parameters.
        done: steps taken before; 0 for a new run.
        steps: last step, limited by --max-epsilon.
        notes: messages for the user, in which settings are in braces.
        private_notes: notes on the records, for the person who holds them.
    """

    plan: Plan
    folder: Path
    parameters: tuple[int, int]
    done: int
    steps: int
    notes: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Progress of training, a few times per second, and what was found after each epoch.

    Attributes:
        step: number t of steps taken.
        seconds: training time so far, without evaluation.
        epsilon: epsilon spent up to the step; between evaluations that up to the next one, or None
            while it is being computed; ``inf`` without privacy.
        planned: epsilon of the whole run; None or ``inf`` in the same cases.
        chunk: number of samples that are processed at a time from now on, if memory ran out in the
            last step; None if it did not.
        evaluated: whether the model was evaluated, as after an epoch and the last step.
        result: the scores on the test records; None in between, and if there are no such records.
    """

    step: int
    seconds: float
    epsilon: float | None
    planned: float | None
    chunk: int | None = None
    evaluated: bool = False
    result: Evaluation | PrivateScore | None = None


@dataclass(kw_only=True)
class Session:
    """A run in training, at ``trainer.state.step`` after ``seconds`` of training.

    Attributes:
        task: its network and data.
        trainer: takes its steps, with the plan of the run and the account of what has begun.
        where: its folder.
        history: lines of metrics.jsonl so far.
        seconds: training time so far, without evaluation, also before it was resumed.
        notes: messages for the user.
        scored: exact scores of the model as it is; None before, and for covered scores.
        weighed: where the weights of records come from, if they are a program's.
    """

    task: PreparedRun
    trainer: Trainer
    where: Path
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    scored: Evaluation | None = None
    weighed: str = ""

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self.trainer.plan

    @property
    def account(self) -> Account:
        """Return the account of the run, which counts what has begun."""
        return self.trainer.account

    @property
    def steps(self) -> int:
        """Return the last step of the run, which the budget may have moved."""
        return self.account.end

    def begin_files(self) -> None:
        """Write config.yaml and the metrics. A report of an earlier model is removed.

        Raises:
            OSError: a file cannot be written or removed.
        """
        folder.unpublish(self.where)
        files.write_atomically(
            self.where / folder.CONFIG, config_file(self.plan.recorded, self.plan.event).encode()
        )
        self.write_metrics()

    def save(self) -> None:
        """Write a checkpoint, with everything that a resume needs and no secret key.

        Raises:
            OSError: it cannot be written. The one before is unchanged.
            DivergedError: a parameter is not finite, so it could not be resumed from.
        """
        self.trainer.check_finite()
        state = self.trainer.state
        record = {
            "state": state.numbers(),
            "config": by_flag(self.plan.recorded),
            "searched": self.plan.search is not None,
            "history": self.history,
            "seconds": self.seconds,
            "facts": self.task.compared,
            "start": self.task.start,
            "parts": len(self.account.before),
            "histogram": _as_record(self.trainer.histogram),
        }
        checkpoint.save(self.where, state.tensors(), self.trainer.ranges, record)

    def drive(self, stop: Callable[[], bool]) -> Iterator["SessionEvent"]:
        """Train to the end, and write the files that are not published. Call it once.

        Ranges that are found by counts are found before the first step.

        Args:
            stop: called after every step; True ends the run early, with its state saved.

        Yields:
            that it starts, updates, and at the end the session itself.

        Raises:
            DivergedError: a parameter is no longer finite; metrics.jsonl says so, and the last
                checkpoint is of an earlier step.
            OSError: a file cannot be written.
        """
        yield Started(
            plan=self.plan,
            folder=self.where,
            parameters=(self.trainer.sums.size, self.task.parameters),
            done=self.trainer.state.step,
            steps=self.steps,
            notes=self.notes,
            private_notes=self.task.private_notes,
        )
        if self.trainer.count():
            self.save()  # so they are not paid for again
        try:
            yield from self._updates(stop)
        except DivergedError as failure:
            # Divergence reveals information about the records, so a resume must count those steps.
            epoch = failure.step / self.plan.event.steps_per_epoch
            self.history.append({"step": failure.step, "epoch": epoch, "diverged": True})
            self.account.record()
            self.write_metrics()
            raise
        self.account.record()
        self.trainer.ranks.dismiss()
        self.save()
        yield self

    def _updates(self, stop: Callable[[], bool]) -> Iterator[Update]:
        """Train to the last step, or until ``stop`` returns True after one.

        The test set is scored after each epoch and at the end. Checkpoints are saved when they are
        due, and progress is reported.
        """
        plan, trainer, state = self.plan, self.trainer, self.trainer.state
        stopped, chunk = False, state.chunk
        every, per_epoch = plan.settings.checkpoint_every, plan.event.steps_per_epoch
        saved = shown = mark = time.perf_counter()
        cost = 0.0  # seconds of the last checkpoint

        with ThreadPoolExecutor(1) as pool:
            # Privacy costs are computed in the background, so they do not delay training.
            whole = pool.submit(self._epsilon, self.steps)
            ahead = pool.submit(self._epsilon, self._next(state.step))
            unscored = self._unscored
            while not stopped and (state.step < self.steps or unscored):
                if not unscored:
                    trainer.step()
                unscored = False
                step, reduced = state.step, state.chunk < chunk
                stopped = stop()
                last = stopped or step == self.steps
                if scored := last or step % per_epoch == 0:
                    trainer.check_finite()  # waits for the device
                now = time.perf_counter()
                due = checkpoint_due(every, step, plan.event.steps, now - saved, cost)
                if not (scored or due or reduced or now - shown > PROGRESS_EVERY):
                    continue
                self.seconds += now - mark
                result: Evaluation | PrivateScore | None = None
                epsilon = ahead.result() if ahead.done() else None
                if scored:
                    result, epsilon = self._score(ahead, last=last)
                    ahead = pool.submit(self._epsilon, self._next(step))
                # No other score may be released instead of one that was shown.
                if due or (last and plan.settings.cover_scores):
                    began = time.perf_counter()
                    self.save()
                    saved = time.perf_counter()
                    cost = saved - began
                if scored:
                    self.write_metrics()
                planned = None if epsilon is None else whole.result()
                yield Update(
                    step=step,
                    seconds=self.seconds,
                    epsilon=epsilon,
                    planned=planned,
                    chunk=state.chunk if reduced else None,
                    evaluated=scored,
                    result=result,
                )
                chunk = min(chunk, state.chunk)
                shown = mark = time.perf_counter()  # exclude the handling of events

    def _score(
        self, ahead: Future[float], *, last: bool
    ) -> tuple[Evaluation | PrivateScore | None, float]:
        """Score the model as it is; return the scores, and the epsilon that is shown with them.

        After the last step, training records are counted first, if they are. ``ahead`` computes the
        epsilon of this step.
        """
        trainer, plan = self.trainer, self.plan
        if trainer.calibrate():
            self.save()  # with the weights, so it is not paid for again
        result = trainer.score()
        trainer.check_network()
        epsilon = ahead.result()
        if last and plan.search is None:  # like the report
            epsilon = self.account.epsilon
        self.scored = result if isinstance(result, Evaluation) else self.scored
        self.history.append(metrics_line(plan, trainer.state.step, self.seconds, epsilon, result))
        return result, epsilon

    @property
    def _unscored(self) -> bool:
        """Return whether all steps were taken, and the run was stopped before it was scored."""
        step = self.trainer.state.step
        ended = step == self.steps and self.plan.score is None
        return ended and (not self.history or self.history[-1]["step"] != step)

    def _next(self, step: int) -> int:
        """Return the step of the next evaluation."""
        epoch = self.plan.event.steps_per_epoch
        return min(self.steps, (step // epoch + 1) * epoch)

    def _epsilon(self, step: int) -> float:
        """Return an upper bound of epsilon up to a step, exact for the last one of the run."""
        if (search := self.plan.search) is not None:
            # Whatever is shown of the best trial costs the whole search.
            return search.epsilon(self.account.delta)
        return self.account.bound(step)

    def write_metrics(self) -> None:
        """Write metrics.jsonl from ``history``, atomically. Raises OSError."""
        lines = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in self.history)
        files.write_atomically(self.where / folder.METRICS, lines.encode())


def _as_record(histogram: NoisyHistogram | None) -> dict[str, Any] | None:
    """Return a histogram as JSON values of a checkpoint; None without one."""
    if histogram is None:
        return None
    return {"counts": histogram.counts[0].tolist(), "noise": histogram.noise}


def metrics_line(
    plan: Plan,
    step: int,
    seconds: float,
    epsilon: float,
    result: Evaluation | PrivateScore | None,
) -> dict[str, Any]:
    """Return a line of metrics.jsonl, as JSON values.

    Args:
        plan: plan of the run.
        step: number of steps taken.
        seconds: training time so far, without evaluation.
        epsilon: epsilon that is shown; infinite without privacy, which becomes None.
        result: the scores; None if no records are tested on, and the line has no keys of scores.
    """
    return {
        "step": step,
        "epoch": step / plan.event.steps_per_epoch,
        "epsilon": finite_or_none(epsilon),
        "delta": plan.settings.delta if plan.private else None,
        **({} if result is None else _scores(result, plan.settings.metric)),
        "seconds": round(seconds, 3) if plan.timed else None,
    }


def _scores(result: Evaluation | PrivateScore, metric: str) -> dict[str, Any]:
    """Return the scores of a line of metrics.jsonl."""
    headline = result.task.headline
    return {
        headline.logged: finite_or_none(result.metric(headline.name)),
        METRICS[metric].logged: finite_or_none(result.metric(metric)),
        "test_loss": finite_or_none(result.loss),
        "test_samples": result.samples,
        **(result.values() if isinstance(result, PrivateScore) else {}),
    }


def config_file(recorded: Values, event: TrainingEvent) -> str:
    """Return the content of config.yaml: what was asked for and, as comments, what came of it.

    Args:
        recorded: settings of the run, by name with underscores.
        event: event of the run, or of a part of it, for the noise and the length of an epoch.
    """
    sigma, per_epoch = event.noise_multiplier, event.steps_per_epoch
    epochs = recorded.get("epochs")
    steps = epochs * per_epoch if isinstance(epochs, int) else recorded.get("steps")
    text = to_yaml(recorded)
    if sigma:
        text += f"# Noise multiplier sigma: {sigma!r}\n"
    return f"{text}# Steps: {steps}, of which {per_epoch} are an epoch\n"


#: Checkpoints by default: every minute, and every fiftieth of the steps if they take little time.
SECONDS, PARTS, SHARE = 60.0, 50, 0.05


def checkpoint_due(every: str | None, step: int, steps: int, seconds: float, cost: float) -> bool:
    """Return whether a checkpoint is due at a step.

    Args:
        every: value of ``--checkpoint-every``: a number of steps such as "100", or of seconds such
            as "60s"; None for the default (:data:`SECONDS`, :data:`PARTS`, :data:`SHARE`).
        step: number of steps taken, of ``steps`` of the run.
        steps: number of steps of the run.
        seconds: time since the last checkpoint.
        cost: seconds that the last checkpoint took.

    >>> checkpoint_due("100", 200, 1000, 1.0, 0.1), checkpoint_due("60s", 200, 1000, 1.0, 0.1)
    (True, False)
    """
    if every is None:
        part = step % math.ceil(steps / PARTS) == 0
        return seconds >= SECONDS or (part and cost <= SHARE * seconds)
    if every.endswith("s"):
        return seconds >= float(every[:-1])
    return step % int(every) == 0


#: Events of a session; the last one is the session itself, whose model is trained but not yet
#: published. The run's folder is locked until the next event.
SessionEvent: TypeAlias = Started | Update | Session
