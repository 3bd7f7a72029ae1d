"""dpmac tune: search for the best settings, and publish the best trial only."""

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field, StrictBool
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.text import Text

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.failures import stop, stop_request
from dpmac_cli.cli.options import repeated, take, with_options
from dpmac_cli.config.dimensions import DECIDED
from dpmac_cli.config.fields import Flag, Option, SomePath, flag_name, options
from dpmac_cli.config.search_flags import DRAWN, SEARCH, SEARCH_FLAGS, SearchFlags
from dpmac_cli.config.search_space import SearchSpace, ask_search
from dpmac_cli.config.settings import SETTINGS, DisplayFlags
from dpmac_cli.config.transfer import Transfer
from dpmac_cli.errors import INTERRUPTED, InputError
from dpmac_cli.runs.folder import resume_command
from dpmac_cli.storage.files import to_json
from dpmac_cli.storage.report_keys import ReportKeys

if TYPE_CHECKING:
    from dpmac_cli.release.publish import Finished
    from dpmac_cli.studies.tune import SecretEvent, TunePlan

#: Setting that decides what is printed, and is not one of the trials.
JSON: str = "json"
#: Settings of a training run that a search does not decide itself.
SHARED: Mapping[str, Option] = {
    name: option
    for name, option in SETTINGS.items()
    if name not in DECIDED and name not in ("cover_scores", "out")
}


class TuneFlags(SearchFlags, frozen=True):
    """Flags of the command besides the settings that all trials share."""

    dry_run: Annotated[
        StrictBool,
        Field(description="Show the plan and its privacy cost, without training."),
        Flag(SEARCH),
    ] = False
    config: Annotated[
        SomePath | None,
        Field(
            description="YAML file with settings by the same names, and search: with a line for "
            "each setting to draw. Flags take precedence."
        ),
        Flag(SEARCH, metavar="FILE"),
    ] = None


@with_options(
    repeated(DRAWN),
    options(TuneFlags),
    SHARED,
)
def tune(search: list[str] | None, **given: Any) -> None:
    """Search for the best settings, within one epsilon for search and model together.

    A secret random number of trials counts, each with settings drawn at random. Only the one with
    the best covered score is published, as an ordinary run in --out. The others, their scores and
    their number are neither shown nor kept. More trials are trained and discarded, up to the
    largest number, so that time and load do not depend on the secret number, unless --stop-early
    is given. Repeat the command to resume a search that was stopped.

    With --on, the search is on public data instead, where it costs nothing, and one run with the
    best settings is trained on the private records.

    Example: dpmac tune --dataset digits --epsilon 3 --search lr=1e-4..1e-1:log --trials 10

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, 3 privacy budget infeasible, 4 no
    trial has a result, memory ran out or the device failed, 130 interrupted (run the same
    command to resume).
    """
    shown, json = take(DisplayFlags, dict(given)), bool(given.pop(JSON, False))
    of_search = {name: given.pop(name) for name in SEARCH_FLAGS}
    command = take(TuneFlags, given)
    if command.dry_run and json:
        raise InputError(
            "--dry-run and --json contradict each other: a plan has no report. Give one."
        )
    with console.waiting(shown.quiet, "settings and noise"):
        flags, space = ask_search(given, of_search, search or [], command.config)
    if isinstance(space, Transfer):
        _transfer(space, flags.out, shown.quiet, json=json, dry_run=command.dry_run)
    else:
        _search(space, flags, shown.quiet, json=json, dry_run=command.dry_run)


def _search(
    space: SearchSpace, flags: SearchFlags, quiet: bool, *, json: bool, dry_run: bool
) -> None:
    """Search in secret on the private records. Raises typer.Exit if stopped."""
    with console.waiting(quiet, "time of a trial"):
        from dpmac_cli.studies.tune import plan_tune  # noqa: PLC0415  (loads torch)

        plan = plan_tune(space, flags.out, stop_early=flags.stop_early)
    screen = console.stdout() if dry_run else console.for_display(quiet, json)
    _print_plan(screen, _plan_lines(plan), () if quiet else space.notes)
    if dry_run:
        return
    screen.print(Text(f"writing {plan.out}", style="dim"))
    with stop_request() as asked, contextlib.closing(_silenced(plan, asked)) as events:
        finished = _follow(events, screen, plan)
    if json:
        console.print_result(to_json(finished.report))
    screen.print(*_summary(finished, plan.space.plans[0].run.metric), sep="\n")


def _transfer(plan: Transfer, out: Path, quiet: bool, *, json: bool, dry_run: bool) -> None:
    """Search on public records, and train once on private ones. Raises typer.Exit if stopped."""
    screen = console.stdout() if dry_run else console.for_display(quiet, json)
    _print_plan(screen, _transfer_lines(plan), () if quiet else plan.notes)
    if dry_run:
        return
    screen.print(Text(f"writing {out}, and the trials beside it", style="dim"))
    with console.waiting(quiet, "loading torch"):
        from dpmac_cli.cli.display import RunDisplay, follow  # noqa: PLC0415  (loads torch)
        from dpmac_cli.config.plan import ChosenFolder  # noqa: PLC0415  (help need not wait for it)
        from dpmac_cli.release.run import train  # noqa: PLC0415  (loads torch)

    display = RunDisplay(screen)
    with stop_request() as asked, contextlib.closing(display), console.kept_clear(json):
        final = plan.final(_best_on_public(plan, out, screen, asked))
        events = train(final.placed(ChosenFolder(out)), asked)
        finished = follow(events, display, asked, [display.show])
    if json:
        console.print_result(to_json(finished.report))
    if finished.state == "interrupted":
        where = finished.folder
        stop(f"interrupted; to resume: {resume_command(where)}", INTERRUPTED)


def _print_plan(screen: Console, lines: Iterable[Text], notes: Iterable[str]) -> None:
    console.print_notes(notes)
    screen.print(*lines, sep="\n")


def _best_on_public(
    plan: Transfer, out: Path, screen: Console, asked: Callable[[], bool]
) -> Mapping[str, str]:
    """Show the trials on public records, and return the best settings."""
    from dpmac_cli.studies.transfer import search_on_public  # noqa: PLC0415  (loads torch)

    tried = None
    bar = console.bar(f"searching on {plan.public.found.name}", BarColumn(), console=screen)
    task = bar.add_task("", total=plan.trials)
    try:
        with bar:
            for tried in search_on_public(plan, out, asked):
                bar.update(task, completed=tried.number)
    except KeyboardInterrupt:
        stop("interrupted; run the same command to resume.", INTERRUPTED)
    assert tried is not None  # noqa: S101  (there are at least two trials)
    chosen = ", ".join(f"{flag_name(name)} {value}" for name, value in tried.best.items())
    screen.print(Text(f"best of {tried.trials} settings on {plan.public.found.name}: {chosen}"))
    return tried.best


def _transfer_lines(plan: Transfer) -> Iterator[Text]:
    privacy = plan.final(plan.settings()[0]).privacy
    spent = total_epsilon((privacy.event,), privacy.delta)
    yield Text.assemble(("search", "bold"), f" on public data, {plan.public.found.name}, over:")
    for dimension in plan.dimensions:
        yield Text(f"  {dimension.text}")
    yield Text(f"{plan.trials} trials, which cost no privacy of {plan.data.found.name}")
    yield Text.assemble(
        f"one run on {plan.data.found.name}: ",
        (f"epsilon {format_epsilon(spent)}", "bold"),
        f" at delta {privacy.delta:g}",
    )


def _silenced(plan: "TunePlan", asked: Callable[[], bool]) -> Generator["SecretEvent", None, None]:
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


def _follow(events: Iterator["SecretEvent"], screen: Console, plan: "TunePlan") -> "Finished":
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
    if space.judge is not None:
        yield Text(f"the best score on {space.judge.found.name} wins, which is declared public")
    yield Text.assemble(
        "search and model together: ",
        (f"epsilon {format_epsilon(space.epsilon)}", "bold"),
        f" at delta {privacy.delta:g}",
    )
    ends = f"all {trials.most:,} trials are trained, and K of them count"
    if plan.stop_early:
        ends = f"about {_time(plan.expected)} on average; it ends with the last trial that counts"
    yield Text(f"time: {'at most ' * plan.stop_early}{_time(plan.longest)}; {ends}")


def _summary(finished: "Finished", metric: str) -> Iterator[Text]:
    from dpmac_cli.cli.display import score_lines  # noqa: PLC0415  (loads torch)

    report = finished.report
    privacy, chosen = report["privacy"], report["hyperparameters"]
    claim = cast(ReportKeys, report)["privacy"]
    epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
    yield from score_lines(report, metric)
    yield Text.assemble(
        "privacy ",
        (f"epsilon {format_epsilon(epsilon)}", "bold"),
        f" at delta {claim['delta']:g}, of search and model together",
    )
    yield Text("settings: " + ", ".join(f"{name} {value:g}" for name, value in chosen.items()))
    yield Text(privacy["search"]["time"])
    yield Text(f"{finished.folder}: see model-card.md and report.json")
    yield Text(f"next: dpmac report {finished.folder}", style="dim")


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
