"""Display of training runs and evaluations.

What is shown of a run in training is private or public, like what is published of it: steps,
epsilon and test scores. There is no loss of training records, no batch size and no norm.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.events import ADJACENCY
from dpmac_cli.cli.console import ATTENTION, bar, print_private_notes
from dpmac_cli.cli.options import stop
from dpmac_cli.config.plan import Plan
from dpmac_cli.errors import (
    INTERRUPTED,
    DivergedError,
    InputError,
    RunError,
    as_flags,
    explain_os_error,
)
from dpmac_cli.progress import Computing, heard_by
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import RunEvent
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.tasks.metrics import EvaluationMetric, percent_or_dash
from dpmac_cli.tasks.operating_point import MOST_LIKELY
from dpmac_cli.tasks.task import METRICS
from dpmac_cli.training import evaluation
from dpmac_cli.training.private_scores import PrivateScore

#: Seconds of training after which a run that takes longer than :data:`LONG` is remarked on.
PACED, LONG = 10.0, 1800.0
#: Epsilon above which a note is printed.
WEAK = 10
ABOVE = f"Above {WEAK} the guarantee is weak: increase the noise (--sigma), or set --epsilon 3."
#: Name of the smallest built-in network.
SMALLEST = "linear"
#: Width of the border and the padding of a column, and the least width of names of rows.
BORDER, MIN_NAME = 3, 8
NO_PRIVACY = Text("NO PRIVACY: trained with --no-dp, a baseline only", "bold red")


def epsilon_or_dots(epsilon: float | None) -> str:
    """Return epsilon, rounded up to four digits; dots for None, while it is still being computed.

    >>> epsilon_or_dots(1.23401), epsilon_or_dots(None)
    ('1.235', '...')
    """
    return "..." if epsilon is None else statements.format_epsilon(epsilon)


class RunDisplay:
    """One line per evaluation and, on a terminal, a live bar of steps.

    It is for one run: :meth:`show` takes its events in their order, and :meth:`close` removes the
    bar. Close it also if the run fails.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._computing = ""
        self._doubts = list[str]()
        self._warned = self._paced = False
        self._begun: tuple[int, float] | None = None
        self._bar = bar(
            "{task.description}",
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", style="bold"),
            console=console,
            expand=True,
        )

    def show(self, event: RunEvent) -> None:
        """Print a line for important events, and update the bar below.

        Args:
            event: the next event of the run. The first says that it has started
                (:class:`~dpmac_cli.runs.session.Started`), the last is its result
                (:class:`~dpmac_cli.release.run.Run`), for which the bar is removed.
        """
        match event:
            case Started():
                self._plan = event.plan
                self.print(*_heading(event))
                if not self.console.quiet:
                    print_private_notes(event.private_notes)
                self._task = self._bar.add_task(
                    "epoch", total=event.steps, completed=event.done, figures=""
                )
                self._bar.start()
            case Update():
                if event.chunk is not None:
                    note = f"memory ran out in step {event.step}: continuing with"
                    self.print(Text(f"{note} {event.chunk} samples at a time", ATTENTION))
                self._move(event)
            case Run():
                self.close()
                self.print(*(Text(f"note: {doubt}", "red") for doubt in self._doubts))
                self.print(*summary(event, self._plan.settings.metric))

    def print(self, *lines: Text) -> None:
        """Print lines above the bar; nothing on a console that is quiet."""
        for line in lines:
            self.console.print(line)

    def compute(self, event: Computing) -> None:
        """Print that records are computed on, once for each computation.

        Args:
            event: the computation, of which any number of events with progress may come.
        """
        line = f"computing {event.what} of {event.records:,} records, once: kept in {event.folder}"
        if line != self._computing:
            self.print(Text(line, "dim"))
        self._computing = line

    def _move(self, event: Update) -> None:
        """Update the bar; print a line per evaluation, and a note on a weak epsilon."""
        if WEAK < (event.planned or 0.0) < math.inf and not self._warned:
            self._warned = True
            note = f"note: epsilon will be {epsilon_or_dots(event.planned)}. {ABOVE}"
            self.print(Text(note, ATTENTION))
        step = event.step
        self._pace(step, event.seconds, self._plan.event.steps)
        figures = "no privacy"
        if self._plan.private:
            # An upper bound: between points of the schedule, show the next point's epsilon.
            figures = f"ε ≤ {epsilon_or_dots(event.epsilon)} of {epsilon_or_dots(event.planned)}"
        epoch = math.ceil(step / self._plan.event.steps_per_epoch)
        self._bar.update(self._task, completed=step, description=f"epoch {epoch}", figures=figures)
        if event.evaluated:
            result = event.result
            if isinstance(result, evaluation.Evaluation):
                self._doubts = [*doubts(result), *self._remark(result)]
            self.print(_evaluated(event, self._plan))

    def _remark(self, result: evaluation.Evaluation) -> Iterator[str]:
        """Yield a note on a model that learned little, and what can be done in this run."""
        remark = result.remark(self._plan.settings.loss)
        if remark is not None:
            note, learned_nothing = remark
            yield f"{note} {remedy(self._plan)}" if learned_nothing else note

    def _pace(self, step: int, seconds: float, steps: int) -> None:
        """Print how long a slow run will take, once, and what would be faster.

        Args:
            step: the last step.
            seconds: seconds of training up to it.
            steps: number of steps of the run.
        """
        if self._begun is None:  # the first step prepares the others
            self._begun = step, seconds
        first, began = self._begun
        if self._paced or seconds < began + PACED or step == first:
            return
        self._paced = True
        seconds_left = (seconds - began) / (step - first) * (steps - step)
        if seconds_left <= LONG:
            return
        ways = ["fewer --epochs"]
        if self._plan.model.name != SMALLEST:
            ways.append("a smaller --model")
        if self._plan.facts.records.kind == "images" and not self._plan.features:
            ways.append("a head on a public network: --backbone")
        hours = f"{seconds_left / 3600:.1f} hours"
        note = f"note: at this pace, training takes {hours} more. Faster: {', or '.join(ways)}"
        self.print(Text(note, ATTENTION))

    def stopping(self) -> None:
        """Confirm a request to stop: the run ends after its current step."""
        self.print(Text("stopping after this step; repeat to stop immediately", ATTENTION))

    def close(self) -> None:
        """Remove the bar, whether or not the run is finished. A second call does nothing."""
        self._bar.stop()


def _heading(event: Started) -> Iterator[Text]:
    """Yield the lines above the bar of a run: what is trained, with which noise, and where."""
    plan, facts, settings = event.plan, event.plan.facts, event.plan.settings
    trained, total = event.parameters
    size = f"{trained:,} trained of {total:,}" if trained < total else f"{trained:,}"
    yield Text.assemble(
        (plan.optimizer.name, "bold"),
        f" on {facts.name}: {facts.train_size:,} {'units' if facts.unit else 'records'}, "
        f"{plan.model.name} with {size} parameters, {settings.device}",
    )
    if not plan.private:
        yield NO_PRIVACY
    else:
        yield Text(
            f"sigma {plan.event.noise_multiplier:g}, expected batch {settings.batch_size}, "
            f"{event.steps:,} steps (epochs: {event.steps / plan.event.steps_per_epoch:.4g}), "
            f"delta {settings.delta:g}"
        )
        if plan.ranged:
            yield Text("ranges kept from the steps before, which paid for them")
        elif plan.ranges:
            noises = ", ".join(f"{counts.noise_multiplier:g}" for counts in plan.ranges)
            yield Text(f"ranges found before the first step by histograms, noise {noises}")
        if plan.histogram is not None:
            noise = plan.histogram.noise_multiplier
            yield Text(f"calibrated after the last step by one histogram, noise {noise:g}")
        unit = f"{plan.unit}, given by {facts.unit}" if facts.unit else facts.records.one
        yield Text(f"unit of privacy: {unit}")
    if settings.canaries:
        audit = f"AUDIT: {settings.canaries:,} canaries, about half of them trained on; the model "
        yield Text(f"{audit}will be unfit for release", "bold red")
    if event.done:
        yield Text(f"continuing after step {event.done}, with new noise", ATTENTION)
    for note in event.notes:
        yield Text(f"note: {as_flags(note)}", ATTENTION)
    yield Text(f"writing {event.folder}", style="dim")


def _evaluated(event: Update, plan: Plan) -> Text:
    """Return the line of an evaluation."""
    epsilon, result = event.epsilon, event.result
    private = epsilon is None or not math.isinf(epsilon)
    line = Text.assemble(
        f"epoch {event.step / plan.event.steps_per_epoch:>3.4g}  step {event.step:>5}  ",
        f"epsilon {epsilon_or_dots(epsilon)}" if private else ("no privacy", "red"),
    )
    unreleased = isinstance(result, PrivateScore) and math.isnan(result.share)
    if result is not None and not unreleased:
        chosen = METRICS[plan.settings.metric]
        line.append(f"  test {chosen.title} ")
        line.append(chosen.text(result.metric(chosen.name)), "bold")
    return line


def score_lines(report: Mapping[str, Any], metric: str) -> Iterator[Text]:
    """Yield the test score of a finished run, and its interval if noise was added to it.

    Without test records, or if no score was released, the only line says so.

    Args:
        report: the run's report.json as JSON values.
        metric: name of the metric to show first, a key of :data:`~dpmac_cli.tasks.task.METRICS`.
            Others follow that a constant prediction has a value of, so that it can be told what was
            learned.
    """
    scores, chosen = report["scores"], METRICS[metric]
    if scores is None:
        yield Text("no test records: nothing was scored")
        return
    covered, value = report["settings"]["cover_scores"], scores[chosen.key]["value"]
    if covered and value is None:
        yield Text("no test score was released: the run ended before its last step", ATTENTION)
        return
    counted = "units" if covered and report["data"]["unit"] else "samples"
    figure = (chosen.text(value), "bold")
    size = f" on {scores['samples']:,} {counted}"
    yield Text.assemble(f"test {chosen.title} ", figure, size, _beside(scores, chosen))
    for other in METRICS.values():
        beside = _beside(scores, other)
        if other != chosen and beside:
            yield Text(f"test {other.title} {other.text(scores[other.key]['value'])}{beside}")
    coverage = scores.get("interval_coverage")
    if coverage is not None:
        yield Text(f"test targets in their intervals of 90%: {percent_or_dash(coverage)}")
    classes, sensitivity = report["data"]["classes"], scores.get("sensitivity")
    if len(classes) == 2 and sensitivity:
        first, second = map(percent_or_dash, sensitivity)
        yield Text(f"test sensitivity {first} of {classes[0]}, {second} of {classes[1]}")
    if covered:
        low, high = map(chosen.text, scores["interval"])
        yield Text(
            f"test records are covered: without the noise, {chosen.title} {low} to {high} (95%)"
        )


def _beside(scores: Mapping[str, Any], metric: EvaluationMetric) -> str:
    """Return what a metric is for a constant prediction, in words; "" if it is not in a report.

    Args:
        scores: scores of a report, by key.
        metric: the metric.
    """
    constant = scores.get(metric.key, {}).get("constant")
    return "" if constant is None else f" (a constant prediction: {metric.text(constant)})"


def summary(event: Run, metric: str) -> Iterator[Text]:
    """Yield the result of a run: its score, its privacy cost, its files, and what to do next.

    Args:
        event: the end of the run, also of one that was interrupted or spent its budget: then
            nothing is said about what to do next.
        metric: name of the metric to show first, a key of
            :data:`~dpmac_cli.tasks.task.METRICS`.
    """
    report, where = event.report, event.folder
    settings, sentences = report["settings"], report["sentences"]
    yield from score_lines(report, metric)
    point = report["network"]["operating_point"]
    if point and (settings["cover_scores"] or point["asked"] != MOST_LIKELY):
        yield Text(sentences["operating_point"])
    if report["delta"] is not None:
        yield Text.assemble(
            "privacy ",
            (f"epsilon {statements.format_epsilon(report['epsilon'])}", "bold"),
            f" at delta {report['delta']:g} ({ADJACENCY}, {settings['sampler']} sampling)",
        )
        yield Text(sentences["risk"])
        if report["seeded"]:
            yield Text("with --seed: no privacy against anyone who knows the seed", ATTENTION)
    else:
        yield NO_PRIVACY
    if "audit_run" in sentences:
        yield Text(sentences["audit_run"], style="bold red")
    names = (*folder.PUBLISHED, folder.SUMS, folder.AUDIT, folder.ADAPTER)
    written = [name for name in names if (where / name).exists()]
    yield Text(f"{where}: {', '.join(written)}")
    if event.state == "finished":
        # Exact scores of records that covered scores protect would undo that.
        unscored = settings["cover_scores"] or report["scores"] is None
        unaudited = "card" if unscored else "eval"
        score = folder.command("eval --audit" if "canaries" in settings else unaudited, where)
        yield Text(f"next: {score}, dpmac report {where}", style="dim")


def doubts(result: evaluation.Evaluation) -> Iterator[str]:
    """Yield warnings about an accuracy, as sentences for the screen; nothing if there are none.

    Args:
        result: outputs and scores on all test records, of which some outputs may be NaN.
    """
    if result.unanswered:
        samples = f"{result.unanswered:,} of {result.samples:,} test samples"
        yield (
            f"for {samples} the network's output is not a number (NaN), which counts as wrong. "
            "Check divisions, logarithms and roots in its forward method."
        )


def remedy(plan: Plan) -> str:
    """Return what may help a model that learned nothing, in one sentence or two.

    Args:
        plan: plan of its run. Remedies that it has already, such as the smallest network, are not
            named.
    """
    if not plan.private:
        other = "--model" if plan.model.name != SMALLEST else f"--model than {SMALLEST}"
        return f"Train longer, or with another --lr or {other}."
    noise = "a smaller --sigma" if plan.settings.epsilon is None else "a larger --epsilon"
    ways = [noise, "more records"]
    if plan.facts.task.target.startswith("float"):
        ways.append("a narrower range of the target")
    if plan.model.name != SMALLEST and plan.facts.task.network is None:
        ways.append(f"a smaller network (--model {SMALLEST})")
    return (
        "If longer training and another --lr do not help, there is too much noise: use "
        f"{', '.join(ways[:-1])} or {ways[-1]}."
    )


def table_by_class(names: Sequence[str], details: Mapping[str, Any]) -> Table:
    """Return a confusion matrix with sensitivity and specificity, one row per true class.

    Args:
        names: names of the K classes.
        details: details of a classifier, see :meth:`~dpmac_cli.tasks.task.Task.details`:
            "confusion", K rows of K counts, "sensitivity" and "specificity", K shares each, of
            which None is shown as a dash.
    """
    table = Table(title="rows: true class, columns: predicted")
    table.add_column("")
    for name in names:
        table.add_column(name)
    for name in ("sens.", "spec."):
        table.add_column(name, style="bold")
    rates = (details["sensitivity"], details["specificity"])
    for name, counts, *both in zip(names, details["confusion"], *rates, strict=True):
        table.add_row(name, *map(str, counts), *map(percent_or_dash, both))
    return table


def in_blocks(table: Table, width: int) -> Iterator[Table]:
    """Yield a table in as many tables as it needs, so that no number is cut.

    Columns that do not fit beside the others are in a table of their own below. The first column,
    with the names of the rows, is in each. Numbers are at the right. The columns of ``table`` are
    changed: use the tables that are returned instead of it.

    Args:
        table: a table of text, with a column of names and at least one of numbers.
        width: characters in a line. A column that is wider than the line has a block alone.
    """
    names, *columns = table.columns
    longest = max((cell_len(str(name)) for name in names.cells), default=0)
    names.overflow = "fold"
    names.max_width = min(longest, max(MIN_NAME, width // 3))  # a longer name takes several lines
    block, used = list[Column](), names.max_width + BORDER
    for column in columns:
        column.justify, column.no_wrap, column.overflow = "right", True, "fold"
        texts = (str(text) for text in (column.header, *column.cells))
        needed = max(map(cell_len, texts)) + BORDER
        if block and used + needed > width - 1:
            yield _with_columns(table, [names, *block])
            block, used = [], names.max_width + BORDER
        block.append(column)
        used += needed
    yield _with_columns(table, [names, *block])


def _with_columns(table: Table, columns: list[Column]) -> Table:
    """Return a table of some columns of another one."""
    part = Table(title=table.title, title_justify="left")
    part.columns, part.rows = columns, table.rows
    return part


def follow(
    events: Iterator[RunEvent],
    display: RunDisplay,
    stop_asked: Callable[[], bool],
) -> Run:
    """Show the events of a run until it ends, and return its result.

    Args:
        events: the events of the run. The run advances as they are taken.
        display: where they are shown. Its bar is removed if the run fails; closing it otherwise is
            up to the caller.
        stop_asked: returns whether the user has asked it to stop. The run itself heeds the request;
            here it is confirmed on the screen.

    Returns:
        The result, also of a run that stopped before its last step.

    Raises:
        Exit: it was interrupted immediately; the command to resume it was printed.
        InputError: a file could not be read or written, after the run had started.
        DpmacError: it failed. The message has the reason, and the command to resume it if the run
            had started.
        KeyboardInterrupt, OSError: it was interrupted, or a file failed, before it had started.
    """
    where, stopping = None, False
    try:
        with heard_by(display.compute):
            for event in events:
                if isinstance(event, Started):
                    where = event.folder
                if isinstance(event, Update) and stop_asked() and not stopping:
                    stopping = True
                    display.stopping()
                display.show(event)
                if isinstance(event, Run):
                    return event
    except (KeyboardInterrupt, OSError, RunError) as failure:
        if where is None:
            raise
        display.close()
        if isinstance(failure, OSError):
            raise InputError(f"{explain_os_error(failure)} {_way_on(where)}") from failure
        if isinstance(failure, RunError):
            changes = ["--lr LESS"] if isinstance(failure, DivergedError) else []
            remedy_of_run = _way_on(where, changes)
            raise RunError([f"{error} {remedy_of_run}" for error in failure.errors]) from failure
        stop(f"interrupted immediately. {_way_on(where)}", INTERRUPTED)
    raise AssertionError("a run that neither finished nor failed")


def _way_on(where: Path, changes: Sequence[str] = ()) -> str:
    """Return a sentence with the command to resume a failed run.

    Args:
        where: folder of the run.
        changes: flags of settings that must differ; without any, the run is resumed where it is.
    """
    if not checkpoint.path_in(where).exists():
        return "The run's checkpoint no longer exists, so it cannot be resumed. Start a new run."
    command = folder.resume_command(where)
    if changes:
        command = folder.resume_elsewhere_command(where, changes)
    return f"To resume from the last checkpoint: {command}"
