"""Searches for the best settings, of which only the best trial is released.

The rules that :mod:`dpmac_cli.accounting.selection` rests on are kept here: settings are drawn
independently for every trial, the number of trials is drawn once and stays secret, a covered score
decides, and nothing else leaves the secret folder.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack, cast

from dpmac_cli.accounting.selection import trials_of
from dpmac_cli.config.keywords import Keywords, SettingName
from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.config.search_space import SearchSpace, kind_of_trial, plan_search
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError, InputError, RunError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import train
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import record_sums
from dpmac_cli.runs.timing import AROUND, duration
from dpmac_cli.storage import files
from dpmac_cli.studies.search_state import (
    LOST,
    PUBLISHING,
    SECRET,
    WON,
    SearchState,
    SecretFolder,
    remove,
)
from dpmac_cli.tasks.known import METRICS

#: Default folder of a search.
OUT = Path("runs/tune")
#: Seconds between two records of the time that a search has taken.
HEARTBEAT = 10.0
#: Seconds between two looks at a request to stop, while waiting.
PATIENCE = 0.2
#: Seconds of a trial besides its steps and scores, and how much longer than estimated one may take.
BESIDES, SLOWER = 2.0, 1.5
#: Settings that may change between two calls for one search; records are compared by checksum.
OF_MACHINE = (
    "dataset",
    "device",
    "physical_batch",
    "data_dir",
    "checkpoint_every",
    "quiet",
    "debug",
    "json",
)


@dataclass(frozen=True)
class Searching:
    """A search goes on: ``seconds`` of at most ``longest`` have passed. It says nothing else."""

    seconds: float
    longest: float


#: Events of a search.
SearchEvent: TypeAlias = Searching | Finished


@dataclass(frozen=True, kw_only=True)
class TunePlan:
    """A validated search, before anything is trained.

    Attributes:
        space: what is drawn, and the privacy cost.
        out: folder of the search, and of the run that it publishes.
        stop_early: whether it ends with its last trial.
        expected, longest: estimated seconds that it takes on average, and the seconds after which
            it ends.
        seconds: estimated seconds of a trial, for each plan of the space; empty if they are not to
            be corrected.
    """

    space: SearchSpace
    out: Path
    stop_early: bool
    expected: float
    longest: float
    seconds: tuple[float, ...] = ()

    def corrected(self, first: TrainPlan, took: float) -> float:
        """Return when the search ends, if its first trial took longer than estimated.

        Every search has a first trial, so this says nothing of how many there are.
        """
        if not self.seconds:
            return self.longest
        kinds = list(map(kind_of_trial, self.space.plans))
        slower = took / self.seconds[kinds.index(kind_of_trial(first))]
        return max(self.longest, _end(self.space, slower * max(self.seconds)))

    @property
    def checksum(self) -> str:
        """Checksum of everything that must not change while the search goes on."""
        space = self.space
        given = {n: str(v) for n, v in space.given.items() if n not in OF_MACHINE}
        shared = {n: v for n, v in space.plans[0].recorded.items() if n != "device"}
        search = asdict(space.search)
        text = [given, str(shared), [d.text for d in space.dimensions], search, self.stop_early]
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()


def plan_tune(
    space: SearchSpace, out: Path, *, stop_early: bool = False, longest: float | None = None
) -> TunePlan:
    """Return the plan of a search, with the time that it takes by steps on generated records.

    Args:
        space: result of :func:`~dpmac_cli.config.search_space.plan_search`.
        out: folder of the search. stop_early: see :class:`TunePlan`.
        longest: seconds after which the search ends; None for an estimate.
    """
    seconds = tuple(_seconds(plan) for plan in space.plans)
    return TunePlan(
        space=space,
        out=out,
        stop_early=stop_early,
        expected=AROUND + space.search.trials.mean * sum(seconds) / len(seconds),
        longest=_end(space, max(seconds)) if longest is None else float(math.ceil(longest)),
        seconds=seconds if longest is None else (),
    )


def _end(space: SearchSpace, seconds: float) -> float:
    """Return the seconds after which a search ends, if its longest trial takes ``seconds``."""
    most = space.search.trials.most
    assert most is not None  # noqa: S101
    return float(math.ceil(AROUND + most * SLOWER * seconds))


def _seconds(plan: TrainPlan) -> float:
    """Return the estimated seconds of one trial."""
    found = duration(plan)
    epochs = plan.privacy.steps / plan.privacy.steps_per_epoch
    return found.before - AROUND + BESIDES + epochs * found.epoch


def tune(
    search: Sequence[str],
    *,
    trials: float = 20,
    most_trials: int | None = None,
    stop_early: bool = False,
    stop: Callable[[], bool] = lambda: False,
    **keywords: Unpack[Keywords],
) -> Iterator[SearchEvent]:
    """Search for the best settings, within the target epsilon, and publish the best trial.

    Use ``finish(tune(...))`` to run to the end. The same call resumes a search that was stopped.

    Args:
        search: settings to draw, such as ``["lr=1e-4..1e-1:log", "clip-norm=0.1,1,10"]``.
        trials: mean of the secret random number of trials.
        most_trials: largest number of trials; None for four times the mean.
        stop_early: end with the last trial, at a time that tells how many there were.
        stop: called often; True ends the search, to be resumed.
        keywords: settings that all trials share; ``epsilon`` is that of the whole search, and
            ``out`` its folder, in which the best trial becomes an ordinary run.

    Raises:
        InputError: lists every fault found; nothing was written.
        BudgetError: no noise meets the target epsilon.
        RunError: every trial diverged, or memory ran out.
    """
    typed = {n: v for n, v in keywords.items() if v is not None and v is not False}
    given = cast(dict[SettingName, Any], typed)  # others are refused with the search
    out = Path(given.pop("out", OUT))
    space = plan_search(given, None, search, trials_of(trials, most_trials))
    return carry_out_search(plan_tune(space, out, stop_early=stop_early), stop)


def carry_out_search(
    plan: TunePlan, stop: Callable[[], bool] = lambda: False
) -> Generator[SearchEvent, None, None]:
    """Carry out a search, or resume it, and report nothing but time until it is published.

    Raises:
        InputError: the folder contains something else, or another search; or the records changed.
        KeyboardInterrupt: ``stop`` returned True. The same call resumes the search.
        RunError: every trial diverged, or memory ran out.
    """
    secret = SecretFolder(plan.out)
    if secret.read() is None:
        remove(secret.path)  # a kill before the first trial, or at the very end
        folder.check_chosen_folder(plan.out, force=False)
    folder.make_folder(plan.out)
    with folder.locked(plan.out):
        first = plan.space.plans[0]
        device = choose_device(first.run.device)
        data = load_data(first.data.source, first.data.folder, device, facts=first.data.facts)
        sums = {str(name): sha for name, sha in record_sums(data).items()}
        clock = _Clock(plan, secret, _begun(plan, secret, sums), stop)
        while clock.state.remaining > 0 or clock.state.verdict in (WON, LOST):
            yield from _trial(plan, secret, clock, data)
        yield from clock.wait()
        yield _published(plan, secret, clock)


def _begun(plan: TunePlan, secret: SecretFolder, records: Mapping[Any, str]) -> SearchState:
    """Return the state of a search; of a new one, with a number of trials that is drawn once."""
    state = secret.read()
    if state is None:
        number = plan.space.search.trials.draw()
        state = SearchState(plan=plan.checksum, remaining=number, records=dict(records))
        secret.write(state)
    if state.plan != plan.checksum:
        raise InputError(
            f"--out {plan.out} contains another search, which has not ended. Repeat its command to "
            "resume it, or use another --out."
        )
    if dict(state.records) != dict(records):
        raise InputError(
            "The records are not those that the search started with. Restore the original, or "
            "start a new search with another --out."
        )
    return state


class _Clock:
    """State of a search, with the time that it has taken, also before it was resumed."""

    def __init__(
        self,
        plan: TunePlan,
        secret: SecretFolder,
        state: SearchState,
        stop: Callable[[], bool],
    ) -> None:
        self.state, self.stop = state, stop
        self._plan, self._secret = plan, secret
        self._before, self._since = state.seconds, time.monotonic()
        self._written = self._since

    @property
    def longest(self) -> float:
        """Seconds after which the search ends."""
        return self.state.longest or self._plan.longest

    @property
    def seconds(self) -> float:
        """Seconds that the search has taken."""
        return self._before + time.monotonic() - self._since

    def write(self, **changes: Any) -> None:
        """Write the state with some changes, and the time."""
        self.state = replace(self.state, seconds=self.seconds, **changes)
        self._secret.write(self.state)
        self._written = time.monotonic()

    def tick(self) -> Searching:
        """Return how long the search has taken, and record it from time to time."""
        if time.monotonic() - self._written > HEARTBEAT:
            self.write()
        return Searching(self.seconds, self.longest)

    def wait(self) -> Iterator[Searching]:
        """Wait until a time that does not depend on the number of trials.

        It is the longest time that was announced, corrected by that of the first trial; or a
        multiple of it, if later ones took longer than that one suggests. Raises KeyboardInterrupt.
        """
        end = self.longest * max(1, math.ceil(self.seconds / self.longest))
        while not self._plan.stop_early and (left := end - self.seconds) > 0:
            yield self.tick()
            if self.stop():
                self.write()
                raise KeyboardInterrupt
            time.sleep(min(PATIENCE, left))


def _trial(plan: TunePlan, secret: SecretFolder, clock: _Clock, data: Data) -> Iterator[Searching]:
    """Run one trial completely, and keep it if it is the best. Raises KeyboardInterrupt."""
    if clock.state.verdict == "":
        if clock.state.setting is None:
            clock.write(setting=plan.space.draw())
        setting, began = dict(clock.state.setting or {}), clock.seconds
        trial = plan.space.plan_of(setting, stop_early=plan.stop_early)  # type: ignore[arg-type]
        won = yield from _won(trial, secret, clock, data)
        took = clock.seconds - began
        clock.write(
            remaining=clock.state.remaining - 1,
            setting=None,
            verdict=WON if won else LOST,
            longest=clock.state.longest or plan.corrected(trial, took),
        )
    secret.settle(clock.state.verdict)
    clock.write(verdict="")


def _won(
    trial: TrainPlan, secret: SecretFolder, clock: _Clock, data: Data
) -> Generator[Searching, None, bool]:
    """Train a trial from scratch, and return whether its covered score is the best so far.

    A trial that was stopped is started again: nothing of it was seen.
    """
    place = ChosenFolder(secret.current)
    remove(secret.current)
    try:
        for event in train(trial.placed(place), clock.stop, data):
            yield clock.tick()
            if isinstance(event, Finished) and event.state != "finished":
                clock.write()
                raise KeyboardInterrupt
    except DivergedError:
        return False
    metric = trial.run.metric
    return not secret.best.exists() or covered_score(secret.current, metric) > covered_score(
        secret.best, metric
    )


def covered_score(run: Path, metric: str) -> float:
    """Return the last score of a run, which is larger for better runs.

    Raises ValueError if it is not covered: then the choice by it would reveal test records.
    """
    report = json.loads((run / folder.REPORT).read_bytes())
    if not (report["privacy"]["covered_scores"] or {}).get("released"):
        raise ValueError("a search needs covered scores")
    value = files.read_lines(run / folder.METRICS)[-1].get(METRICS[metric].logged)
    return -math.inf if value is None else METRICS[metric].better(float(value))


def _published(plan: TunePlan, secret: SecretFolder, clock: _Clock) -> Finished:
    """Publish the best trial as the run in the folder of the search."""
    if clock.state.verdict != PUBLISHING and not secret.best.exists():
        where = plan.out / SECRET
        secret.publish()
        raise RunError(
            f"Every trial of the search diverged, so it has no result; {where} was removed. Search "
            "over lower learning rates."
        )
    clock.write(verdict=PUBLISHING)
    secret.publish()
    report = json.loads((plan.out / folder.REPORT).read_bytes())
    return Finished(report, plan.out, "finished")
