"""Searches for the best settings, of which only the best trial is released.

The rules that :mod:`dpmac_cli.accounting.selection` rests on are kept here: settings are drawn
independently for every trial, the number K of trials is drawn once and stays secret, a covered
score decides, and nothing else leaves the secret folder.

The largest number of trials is trained in any case, and the first K of them count. So what can be
observed from outside, such as time and load of the machine, does not depend on K.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.config.search_space import SearchSpace, ask_search
from dpmac_cli.config.transfer import Transfer
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError, InputError, RunError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent, train
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import declared_sums, record_sums
from dpmac_cli.runs.timing import AROUND, duration
from dpmac_cli.studies.search_state import (
    LOST,
    PUBLISHING,
    SECRET,
    WON,
    SearchState,
    SecretFolder,
    remove,
)
from dpmac_cli.studies.transfer import Tried, carry_out_transfer
from dpmac_cli.studies.trial_files import check_files, file_sums
from dpmac_cli.studies.trial_scores import PublicScore, Score, covered_score

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


#: Events of a search, the last of which is Finished.
SecretEvent: TypeAlias = Searching | Finished
#: Events of any search: one on public data tells of its trials, and of the final run.
SearchEvent: TypeAlias = SecretEvent | Tried | RunEvent


@dataclass(frozen=True, kw_only=True)
class TunePlan:
    """A validated search, before anything is trained.

    Attributes:
        space: what is drawn, and the privacy cost.
        out: folder of the search, and of the run that it publishes.
        stop_early: whether it ends with its last trial.
        expected, longest: estimated seconds that it takes on average if it stops early, and the
            seconds after which it ends.
    """

    space: SearchSpace
    out: Path
    stop_early: bool
    expected: float
    longest: float

    @property
    def most(self) -> int:
        """Largest number of trials."""
        most = self.space.search.trials.most
        assert most is not None  # noqa: S101  (searches have a limit)
        return most

    def trained(self, counted: int) -> int:
        """Return the number of trials to train, of which the first ``counted`` count."""
        return counted if self.stop_early else self.most

    def end(self, seconds: float) -> float:
        """Return when a search ends that has taken some time: a multiple of the longest time.

        It is the first one, unless the trials took longer than estimated, however many count.
        """
        return self.longest * max(1, math.ceil(seconds / self.longest))

    @property
    def checksum(self) -> str:
        """Checksum of everything that must not change while the search goes on."""
        space = self.space
        given = {n: str(v) for n, v in space.given.items() if n not in OF_MACHINE}
        shared = {n: v for n, v in space.plans[0].recorded.items() if n != "device"}
        search = asdict(space.search)
        judge = None if space.judge is None else space.judge.found.name
        text = [given, str(shared), [d.text for d in space.dimensions], search, self.stop_early]
        text.append(judge)
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()


def plan_tune(
    space: SearchSpace, out: Path, *, stop_early: bool = False, longest: float | None = None
) -> TunePlan:
    """Return the plan of a search, with the time that it takes by steps on generated records.

    Args:
        space: result of :func:`~dpmac_cli.config.search_space.plan_search`.
        out: folder of the search. stop_early: see :class:`TunePlan`.
        longest: seconds after which the search ends; None for an estimate, which takes time.
    """
    trials = space.search.trials
    seconds = [_seconds(plan) for plan in space.plans] if longest is None else [0.0]
    estimated = AROUND + (trials.most or 0) * SLOWER * max(seconds)
    return TunePlan(
        space=space,
        out=out,
        stop_early=stop_early,
        expected=AROUND + trials.mean * fmean(seconds),
        longest=float(math.ceil(longest or estimated)),
    )


def _seconds(plan: TrainPlan) -> float:
    """Return the estimated seconds of one trial."""
    found = duration(plan)
    epochs = plan.privacy.steps / plan.privacy.steps_per_epoch
    return found.before - AROUND + BESIDES + epochs * found.epoch


def tune(
    search: Sequence[str] | Mapping[str, object] = (),
    *,
    config: Path | str | None = None,
    trials: float | None = None,
    most_trials: int | None = None,
    stop_early: bool = False,
    on: str | None = None,
    score_on: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    **keywords: Any,
) -> Iterator[SearchEvent]:
    """Search for the best settings, within the target epsilon, and publish the best trial.

    Use ``finish(tune(...))`` to run to the end. The same call resumes a search that was stopped.

    Args:
        search: settings to draw: ``{"lr": {"low": 1e-4, "high": 0.1, "scale": "log"},
            "clip_norm": [0.1, 1, 10]}``, or texts such as ``["lr=1e-4..1e-1:log"]``. Without any,
            the learning rate, within a factor of 2 of its default.
        config: YAML file of settings, with those to draw below ``search``. Arguments take
            precedence.
        trials: mean of the secret random number of trials; by default 20, and 4 without ``search``.
        most_trials: largest number of trials; None for four times the mean.
        stop_early: end with the last trial that counts, at a time that tells how many there were.
        on: public data to search on instead, at no privacy cost; the private records are then used
            for one run, with the best settings and the whole epsilon.
        score_on: public data of the same shape and classes, whose test records decide which trial
            is best, instead of covered scores.
        stop: called often; True ends the search, to be resumed.
        keywords: settings that all trials share; ``epsilon`` is that of the whole search, and
            ``out`` its folder, in which the best trial becomes an ordinary run.

    Raises:
        InputError: lists every fault found; nothing was written.
        BudgetError: no noise meets the target epsilon.
        RunError: every trial diverged, or memory ran out.
    """
    of_search: dict[str, Any] = {"trials": trials, "most_trials": most_trials}
    of_search |= {"stop_early": stop_early, "on": on, "score_on": score_on}
    of_search["out"] = keywords.pop("out", None)
    flags, space = ask_search(
        dict(keywords), of_search, search, None if config is None else Path(config)
    )
    if isinstance(space, Transfer):
        return carry_out_transfer(space, flags.out, stop)
    plan = plan_tune(space, flags.out, stop_early=flags.stop_early)
    return carry_out_search(plan, stop)


def carry_out_search(
    plan: TunePlan, stop: Callable[[], bool] = lambda: False
) -> Generator[SecretEvent, None, None]:
    """Carry out a search, or resume it, and report nothing but time until it is published.

    Raises:
        InputError: the folder contains something else, or another search; or the records, or a file
            that trials read, changed.
        KeyboardInterrupt: ``stop`` returned True. The same call resumes the search.
        RunError: every trial diverged, or memory ran out.
    """
    secret = SecretFolder(plan.out)
    if secret.read() is None:
        secret.clear()
        folder.check_chosen_folder(plan.out, force=False)
    folder.make_folder(plan.out)
    with folder.locked(plan.out):
        first = plan.space.plans[0]
        device = choose_device(first.run.device)
        data = load_data(first.data.source, first.data.folder, device, facts=first.data.facts)
        found = {**declared_sums(first.data, data), **record_sums(data)}
        sums = {str(name): sha for name, sha in found.items()}
        score: Score = covered_score
        if plan.space.judge is not None:
            score = public = PublicScore(plan.space.judge, device, data)
            sums["public data"] = public.checksum
        clock = _Clock(plan, secret, _begun(plan, secret, sums), stop)
        trained = plan.trained(clock.state.counted)
        while clock.state.ended < trained or clock.state.verdict in (WON, LOST):
            yield from _trial(plan, secret, clock, data, score)
        yield from clock.wait()
        yield _published(plan, secret, clock)


def _begun(plan: TunePlan, secret: SecretFolder, records: Mapping[Any, str]) -> SearchState:
    """Return the state of a search; of a new one, with a number of trials that is drawn once."""
    state = secret.read()
    if state is None:
        number = plan.space.search.trials.draw()
        files = file_sums(plan.space.plans)
        state = SearchState(plan=plan.checksum, counted=number, records=dict(records), files=files)
        secret.write(state)
    if state.plan != plan.checksum:
        raise InputError(
            f"--out {plan.out} contains another search, which has not ended. Repeat its command to "
            "resume it, or use another --out."
        )
    if dict(state.records) != dict(records):
        raise InputError(
            "The records, or what is declared of them, are not those that the search started with. "
            "Restore the original, or start a new search with another --out."
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
        seconds = self.seconds
        return Searching(seconds, self._plan.end(seconds))

    def wait(self) -> Iterator[Searching]:
        """Wait until a time that does not depend on the number of trials that count.

        Raises KeyboardInterrupt.
        """
        end = self._plan.end(self.seconds)
        while not self._plan.stop_early and (left := end - self.seconds) > 0:
            yield self.tick()
            if self.stop():
                self.write()
                raise KeyboardInterrupt
            time.sleep(min(PATIENCE, left))


def _trial(
    plan: TunePlan, secret: SecretFolder, clock: _Clock, data: Data, score: Score
) -> Iterator[Searching]:
    """Run one trial completely, and keep it if it counts and is the best.

    A trial that does not count is trained and scored like the others. Raises KeyboardInterrupt, or
    InputError if a file that it reads has changed.
    """
    check_files(plan.space.plans, clock.state.files)
    if clock.state.verdict == "":
        if clock.state.setting is None:
            clock.write(setting=plan.space.draw())
        setting = clock.state.setting or {}
        trial = plan.space.plan_of(setting, stop_early=plan.stop_early)
        better = yield from _better(trial, secret, clock, data, score)
        won = better and clock.state.ended < clock.state.counted
        verdict = WON if won else LOST
        clock.write(ended=clock.state.ended + 1, setting=None, verdict=verdict)
    secret.settle(clock.state.verdict)
    clock.write(verdict="")


def _better(
    trial: TrainPlan, secret: SecretFolder, clock: _Clock, data: Data, score: Score
) -> Generator[Searching, None, bool]:
    """Train a trial from scratch, and return whether its score is the best so far.

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
    return not secret.best.exists() or score(secret.current, metric) > score(secret.best, metric)


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
