"""Display of training runs and evaluations."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting import statements
from dpmac_cli.cli.console import ATTENTION, expendable, print_errors
from dpmac_cli.cli.failures import INTERRUPTED
from dpmac_cli.errors import DivergedError, InputError, RunError, explain_os_error
from dpmac_cli.models.feature_cache import Computing
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.report import AUDIT_RUN
from dpmac_cli.runs.train import Finished, Reduced, RunEvent, Started, Update
from dpmac_cli.training import evaluation, loop
from dpmac_cli.training.diagnostics import DIAGNOSTICS_WARNING, Diagnosis

#: Columns from which on the bar has room for the speed.
WIDE = 100
NO_PRIVACY = "NO PRIVACY: trained with --no-dp, a baseline only"


def format_epsilon(epsilon: float | None) -> str:
    """Rounded up; dots while it is still being worked out."""
    return "..." if epsilon is None else statements.format_epsilon(epsilon)


class Display:
    """Shows a training run as it happens; by itself nothing."""

    def show(self, event: RunEvent) -> None:
        """Show what has happened."""

    def stopping(self) -> None:
        """Confirm a request to stop."""

    def close(self) -> None:
        """Stop showing anything, whether or not the run is finished."""


class Lines(Display):
    """One line per evaluation: for files, pipes and logs, and above the bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._computing: str | None = None
        self._scored: evaluation.Evaluation | None = None

    def show(self, event: RunEvent) -> None:
        """Print what has happened, if it is worth a line."""
        match event:
            case Computing():
                heading = _computing(event)
                if heading != self._computing:
                    self._computing = heading
                    self.console.print(Text(heading, style="dim"))
            case Started():
                self._print(_heading(event))
            case Update(event=loop.Evaluated() as evaluated):
                self._scored = evaluated.result
                self.console.print(_evaluated(evaluated, event.epsilon))
                if event.not_private is not None:
                    self.console.print(_diagnosed(event.not_private))
            case Reduced():
                self.console.print(
                    f"memory ran out in step {event.step}: continuing with {event.chunk} samples "
                    "at a time",
                    style=ATTENTION,
                )
            case Finished():
                found = () if self._scored is None else doubts(self._scored)
                self._print(Text(f"note: {doubt}", style="red") for doubt in found)
                self._print(_summary(event))

    def _print(self, lines: Iterable[Text]) -> None:
        for line in lines:
            self.console.print(line)

    def stopping(self) -> None:
        """Say what will happen now."""
        self.console.print("stopping after this step; once more to stop at once", style=ATTENTION)


class LiveBar(Lines):
    """Lines, with a live bar below them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns: list[ProgressColumn] = [
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[epsilon]}", style="bold"),
            TextColumn("{task.fields[accuracy]}", style="bold"),
        ]
        if console.width >= WIDE:
            columns.append(TextColumn("{task.fields[speed]}", style="dim"))
        columns.append(TimeRemainingColumn(compact=True))
        self._bar = Progress(*columns, console=console, transient=True, expand=True)
        counts = TextColumn("{task.completed:,.0f}/{task.total:,.0f} records")
        parts = (BarColumn(bar_width=None), counts, TimeRemainingColumn(compact=True))
        self._features = Progress(*parts, console=console, transient=True, expand=True)

    def show(self, event: RunEvent) -> None:
        """Move the bars, and print a line above them if it is worth one."""
        if isinstance(event, Started):
            self._features.stop()
        elif isinstance(event, Update):
            self._move(event)
        elif isinstance(event, Finished):
            self.close()
        super().show(event)
        if isinstance(event, Started):
            self._begin(event)
        elif isinstance(event, Computing):
            if not self._features.tasks:
                self._features.add_task("", total=event.records)
                self._features.start()
            self._features.update(self._features.tasks[0].id, completed=event.done)

    def _begin(self, event: Started) -> None:
        config = event.config
        self._batch, self._per_epoch = config.batch_size, config.steps_per_epoch
        self._private = not config.no_dp
        epoch = str(event.done // self._per_epoch + 1)
        fields: dict[str, Any] = {"epoch": epoch, "epsilon": "", "accuracy": "", "speed": ""}
        self._task = self._bar.add_task("", total=event.steps, completed=event.done, **fields)
        self._bar.start()

    def _move(self, event: Update) -> None:
        step = event.event.step
        self._bar.update(
            self._task,
            completed=step,
            epoch=str(math.ceil(step / self._per_epoch)),
            epsilon=self._budget(event),
            speed=self._speed(event),
        )
        if isinstance(event.event, loop.Evaluated):
            self._bar.update(self._task, accuracy=f"test {event.event.result.accuracy:.2%}")

    def close(self) -> None:
        """Remove the bars."""
        self._features.stop()
        self._bar.stop()

    def _budget(self, event: Update) -> str:
        if not self._private:
            return "no privacy"
        # At most: between the schedule's points the next one's price is shown.
        return f"ε ≤ {format_epsilon(event.epsilon)} of {format_epsilon(event.planned)}"

    def _speed(self, event: Update) -> str:
        """Steps per second times the expected batch: the drawn batch size is private."""
        seconds = event.event.seconds
        speed = event.event.step * self._batch / seconds if seconds > 0 else 0.0
        return f"{speed:,.0f} samples/s"


def choose_display(quiet: bool, json: bool) -> Display:
    """Nothing when quiet; on stderr when stdout is for JSON; a bar on a terminal only."""
    if quiet:
        return Display()
    console = expendable(sys.stderr if json else sys.stdout)
    return LiveBar(console) if console.is_terminal else Lines(console)


def _computing(event: Computing) -> str:
    if event.elsewhere:
        return "another process is computing the features; waiting for it"
    return f"computing features of {event.records:,} records, once: kept in {event.folder}"


def _heading(event: Started) -> Iterator[Text]:
    config = event.config
    yield Text.assemble(
        (config.optimizer, "bold"),
        f" on {config.dataset_name}: {config.facts.train_size:,} records, "
        f"{config.model_name} with {event.parameters:,} parameters, {config.device}",
    )
    if config.no_dp:
        yield Text(NO_PRIVACY, style="bold red")
    else:
        yield Text(
            f"sigma {config.sigma:g}, expected batch {config.batch_size}, {event.steps:,} steps "
            f"(epochs: {event.steps / config.steps_per_epoch:.4g}), delta {config.delta:g}"
        )
    if config.canaries is not None:
        yield Text(
            f"AUDIT: {config.canaries:,} canaries ({config.canary_kind}), about half of them "
            "trained on; the model will be unfit for release",
            style="bold red",
        )
    if event.cut_short:
        yield Text(
            f"--max-epsilon {config.max_epsilon:g} pays for {event.steps:,} of "
            f"{config.total_steps:,} steps",
            style=ATTENTION,
        )
    if event.done:
        how = "exactly as it would have" if event.branch is None else f"as a branch: {event.branch}"
        yield Text(f"going on after step {event.done}, {how}", style=ATTENTION)
    for note in event.notes:
        yield Text(f"note: {note}", style=ATTENTION)
    if config.diagnostics:
        yield Text(f"--diagnostics: {DIAGNOSTICS_WARNING}", style="bold red")
    yield Text(f"writing {event.folder}", style="dim")


def _evaluated(event: loop.Evaluated, epsilon: float | None) -> Text:
    price = (
        ("no privacy", "red")
        if epsilon is not None and math.isinf(epsilon)
        else (f"epsilon {format_epsilon(epsilon)}", "")
    )
    return Text.assemble(
        f"epoch {event.epoch:>3.4g}  step {event.step:>5}  ",
        price,
        "  test accuracy ",
        (f"{event.result.accuracy:.2%}", "bold"),
    )


def _diagnosed(seen: Diagnosis) -> Text:
    averages = "no finite sample" if seen.mean_loss is None else f"mean loss {seen.mean_loss:.4f}"
    if seen.mean_norm is not None and seen.clipped_share is not None:
        averages += (
            f", mean gradient norm {seen.mean_norm:.3g} times the clipping norm, "
            f"clipped {seen.clipped_share:.1%}"
        )
    return Text(
        f"  NOT PRIVATE: {averages}, not finite {seen.not_finite} of {seen.samples}", style="red"
    )


def _summary(event: Finished) -> Iterator[Text]:
    report = event.report
    test, price = report["test"], report["privacy"]
    spent = math.inf if price["epsilon"] is None else price["epsilon"]
    accuracy = (f"{test['accuracy']:.2%}", "bold")
    yield Text.assemble("test accuracy ", accuracy, f" on {test['samples']:,} samples")
    if price["private"]:
        yield Text.assemble(
            "privacy ",
            (f"epsilon {format_epsilon(spent)}", "bold"),
            f" at delta {price['delta']:g} ({price['adjacency']}, {price['sampler']} sampling)",
        )
    else:
        yield Text(NO_PRIVACY, style="bold red")
    if price["seed_policy"]["given"] and price["private"]:
        yield Text("with --seed: no privacy against anyone who knows the seed", style=ATTENTION)
    names = [folder.MODEL, folder.CARD, folder.REPORT, folder.METRICS, folder.CONFIG, folder.SUMS]
    if report["audit"]:
        yield Text(AUDIT_RUN, style="bold red")
        if event.state != "interrupted":
            names.append(folder.AUDIT)
            yield Text(f"what the attack found: dpmac eval {event.folder} --audit")
    if report["diagnostics"]:
        names.append(f"{folder.DIAGNOSTICS} (do not publish)")
    if (event.folder / folder.CURVES).exists():
        names.append(folder.CURVES)
    if (event.folder / folder.EVENTS).is_dir():
        names.append(f"{folder.EVENTS}/")
        yield Text(f"its curves: tensorboard --logdir {event.folder}")
    yield Text(f"{event.folder}: {', '.join(names)}")


def doubts(result: evaluation.Evaluation) -> Iterator[str]:
    """What must be said beside an accuracy."""
    lost = int(result.unanswered.sum())
    if lost:
        yield (
            f"for {lost:,} of {result.samples:,} test samples the network's output is not a number "
            "(NaN), which counts as wrong. Look at what its forward divides by, or takes the "
            "logarithm or the root of."
        )


def evaluation_table(result: evaluation.Evaluation, classes: list[str]) -> Table:
    """Confusion matrix with per-class accuracy: a row per true class."""
    table = Table(title="rows: true class, columns: predicted", title_justify="left")
    table.add_column("")
    for name in classes:
        table.add_column(name, justify="right")
    table.add_column("accuracy", justify="right", style="bold")
    for name, counts, accuracy in zip(
        classes, result.confusion.tolist(), result.per_class, strict=True
    ):
        share = "-" if math.isnan(accuracy) else f"{accuracy:.2%}"
        table.add_row(name, *map(str, counts), share)
    return table


def follow(events: Iterator[RunEvent], display: Display, stop: Callable[[], bool]) -> Finished:
    """Show a run to its end. If it fails on the way, say what is left of it.

    Args:
        events: of :func:`dpmac_cli.runs.train.train` or :func:`dpmac_cli.runs.train.resume`.
        display: for the person who watches.
        stop: whether they have asked the run to stop.

    Raises:
        typer.Exit: it was broken off, and the person knows how to go on.
        DpmacError: it could not go on; the message says why, and how to.
    """
    where, told = None, False
    try:
        for event in events:
            if isinstance(event, Started):
                where = event.folder
            if isinstance(event, Update) and stop() and not told:
                told = True
                display.stopping()
            display.show(event)
            if isinstance(event, Finished):
                return event
    except (KeyboardInterrupt, OSError, RunError) as failure:
        if where is None:
            raise
        display.close()
        if isinstance(failure, OSError):
            raise InputError(f"{explain_os_error(failure)} {_way_on(where)}") from failure
        if isinstance(failure, RunError):
            change = " --lr LESS" if isinstance(failure, DivergedError) else ""
            raise RunError(f"{failure} {_way_on(where, change)}") from failure
        print_errors([f"interrupted at once. {_way_on(where)}"], label="stopped")
        raise typer.Exit(INTERRUPTED) from None
    raise AssertionError("a run that neither finished nor failed")


def _way_on(where: Path, change: str = "") -> str:
    """Return how to resume a run that failed."""
    step = checkpoint.last_step(where)
    if step is None:
        return "The run's folder or its checkpoints are gone, so it cannot be resumed. Start again."
    resume = folder.resume_command(where, change)
    return f"To resume from the last checkpoint (step {step}): {resume}"
