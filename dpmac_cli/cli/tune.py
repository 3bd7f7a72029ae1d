"""dpmac tune: search for the best settings, and publish the best trial only."""

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field, StrictBool
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.text import Text

from dpmac_cli.accounting.selection import LONGEST, trials_of
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import stop, stop_request
from dpmac_cli.cli.options import repeated, take, with_options
from dpmac_cli.config.account_flags import MeanTrials
from dpmac_cli.config.fields import Flag, Option, SomePath, options
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.search_space import DECIDED, plan_search
from dpmac_cli.config.settings import OUTPUT, SETTINGS, Count, DisplayFlags
from dpmac_cli.errors import INTERRUPTED, InputError
from dpmac_cli.storage.files import to_json
from dpmac_cli.storage.report_keys import ReportKeys

if TYPE_CHECKING:
    from dpmac_cli.release.publish import Finished
    from dpmac_cli.studies.tune import SearchEvent, TunePlan

SEARCH = "Search"
#: Setting that decides what is printed, and is not one of the trials.
JSON: SettingName = "json"
#: Settings of a training run that a search does not decide itself.
SHARED: Mapping[SettingName, Option] = {
    name: option
    for name, option in SETTINGS.items()
    if name not in DECIDED and name not in ("cover_scores", "out")
}


class TuneFlags(Flags, frozen=True):
    """Flags of the command besides the settings that all trials share."""

    trials: Annotated[
        MeanTrials,
        Field(description="Mean number of trials. The number itself is random and secret."),
        Flag(SEARCH),
    ] = 20
    most_trials: Annotated[
        Count | None,
        Field(description="Largest number of trials. More cost less privacy, but take longer."),
        Flag(SEARCH, otherwise=f"{LONGEST} times the mean"),
    ] = None
    stop_early: Annotated[
        StrictBool,
        Field(
            description="End with the last trial, for a time that nobody observes: it tells how "
            "many there were."
        ),
        Flag(SEARCH),
    ] = False
    dry_run: Annotated[
        StrictBool,
        Field(description="Show the plan and its privacy cost, without training."),
        Flag(SEARCH),
    ] = False
    config: Annotated[
        SomePath | None,
        Field(description="YAML file with settings by the same names. Flags take precedence."),
        Flag(SEARCH),
    ] = None
    out: Annotated[
        SomePath, Field(description="Folder of the search, and of the published run."), Flag(OUTPUT)
    ] = Path("runs/tune")


@with_options(
    repeated(
        "search",
        "Setting to draw, as a range (lr=1e-4..1e-1:log) or a list (clip-norm=0.1,1,10). Several.",
        "NAME=VALUES",
        SEARCH,
    ),
    options(TuneFlags),
    SHARED,
)
def tune(search: list[str] | None, **given: Any) -> None:
    """Search for the best settings, within one epsilon for search and model together.

    A secret random number of trials is trained, each with settings drawn at random. Only the one
    with the best covered score is published, as an ordinary run in --out. The others, their
    scores and their number are neither shown nor kept. The command ends at a time that does not
    depend on their number, unless --stop-early is given. Repeat it to resume a search that was
    stopped.

    Example: dpmac tune --dataset digits --epsilon 3 --search lr=1e-4..1e-1:log --trials 10

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 no
    trial has a result, memory ran out or the device failed, 130 interrupted (run the same
    command to resume).
    """
    flags, shown = take(TuneFlags, given), take(DisplayFlags, dict(given))
    json = bool(given.pop(JSON, False))
    errors: list[str] = []
    try:
        trials = trials_of(flags.trials, flags.most_trials)
    except InputError as failure:
        errors, trials = list(failure.errors), trials_of(flags.trials)
    shared: dict[Any, Any] = {
        name: value for name, value in given.items() if value not in (None, False)
    }
    with console.waiting(shown.quiet, "settings and noise"):
        space = plan_search(shared, flags.config, search or [], trials, errors)
    with console.waiting(shown.quiet, "time of a trial"):
        from dpmac_cli.studies import tune as tuning  # noqa: PLC0415  (loads torch)

        plan = tuning.plan_tune(space, flags.out, stop_early=flags.stop_early)
    if not shown.quiet:
        console.print_notes(space.notes)
    screen = console.for_display(shown.quiet, json)
    screen.print(*_plan_lines(plan), sep="\n")
    if flags.dry_run:
        return
    with stop_request() as asked, contextlib.closing(_silenced(plan, asked)) as events:
        finished = _follow(events, screen, plan)
    if json:
        console.print_result(to_json(finished.report))
    screen.print(*_summary(finished), sep="\n")


def _silenced(plan: "TunePlan", asked: Callable[[], bool]) -> Generator["SearchEvent", None, None]:
    """Carry out a search; what networks print is discarded, because it may tell trials apart."""
    from dpmac_cli.studies.tune import carry_out_search  # noqa: PLC0415  (loads torch)

    events = carry_out_search(plan, asked)
    with contextlib.closing(events):
        while True:
            with (
                open(os.devnull, "w", encoding="utf-8") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                event = next(events, None)
            if event is None:
                return
            yield event


def _follow(events: Iterator["SearchEvent"], screen: Console, plan: "TunePlan") -> "Finished":
    """Show the time until the search is published. Raises typer.Exit if it is stopped."""
    from dpmac_cli.release.publish import Finished  # noqa: PLC0415  (loads torch)

    bar = console.bar("searching", _Passed(), BarColumn(), console=screen)
    task = bar.add_task("", total=None, before=0.0, longest=plan.longest)
    begun = False
    try:
        with bar:
            for event in events:
                if isinstance(event, Finished):
                    return event
                if not begun:
                    bar.reset(task, total=None, before=event.seconds, longest=event.longest)
                begun = True
                bar.update(task, longest=event.longest)
    except KeyboardInterrupt:
        stop("interrupted; run the same command to resume.", INTERRUPTED)
    raise AssertionError("a search that neither finished nor failed")


class _Passed(ProgressColumn):
    """Time that has passed, by the clock of the display.

    Events of a search are rarer where a trial begins, so a time that stood still until the next one
    would show how many trials there were.
    """

    def render(self, task: Task) -> Text:
        """Return the time and the longest time of the search."""
        passed = task.fields["before"] + (task.elapsed or 0.0)
        return Text(f"{_time(passed)} of {_time(task.fields['longest'])}")


def _plan_lines(plan: "TunePlan") -> Iterator[Text]:
    space = plan.space
    trials, privacy = space.search.trials, space.plans[0].privacy
    yield Text.assemble(("search", "bold"), f" on {space.data.found.name} over:")
    for dimension in space.dimensions:
        yield Text(f"  {dimension.text}")
    yield Text(
        f"trials: K is drawn in secret, P(K = k) proportional to w^k / k for k from 1 to "
        f"{trials.most:,}, log w = {trials.log_weight:.4g}; its mean is {trials.mean:g}"
    )
    for each in dict.fromkeys(candidate.privacy for candidate in space.plans):
        yield Text(f"  {each.steps:,} steps with noise multiplier {each.sigma:g}")
    one = format_epsilon(space.search.trial_epsilon(privacy.delta))
    yield Text(f"one trial: epsilon {one}, with its covered score")
    yield Text.assemble(
        "search and model together: ",
        (f"epsilon {format_epsilon(space.epsilon)}", "bold"),
        f" at delta {privacy.delta:g}",
    )
    ends = "it ends with its last trial" if plan.stop_early else "it ends then, whatever K is"
    yield Text(
        f"time: about {_time(plan.expected)} on average, at most {_time(plan.longest)}; {ends}"
    )
    yield Text(f"writing {plan.out}", style="dim")


def _summary(finished: "Finished") -> Iterator[Text]:
    report = finished.report
    privacy, chosen = report["privacy"], report["hyperparameters"]
    claim = cast(ReportKeys, report)["privacy"]
    epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
    yield Text.assemble(
        "privacy ",
        (f"epsilon {format_epsilon(epsilon)}", "bold"),
        f" at delta {claim['delta']:g}, of search and model together",
    )
    yield Text("settings: " + ", ".join(f"{name} {value:g}" for name, value in chosen.items()))
    yield Text(privacy["search"]["time"])
    yield Text(f"{finished.folder}: see model-card.md and report.json")


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
