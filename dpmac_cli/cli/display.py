"""How a training run and an evaluation look."""

import math
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dpmac_cli import accounting, engine, folder
from dpmac_cli.cli.console import ATTENTION, expendable
from dpmac_cli.diagnostics import DIAGNOSTICS_WARNING, Diagnosis
from dpmac_cli.feature_cache import Computing
from dpmac_cli.report import AUDIT_RUN
from dpmac_cli.run import Finished, Reduced, Started, Update

#: Columns from which on the bar has room for the speed.
WIDE = 100
NO_PRIVACY = "NO PRIVACY: trained with --no-dp, a baseline only"


def format_epsilon(epsilon: float | None) -> str:
    """Rounded up; dots while it is still being worked out."""
    return "..." if epsilon is None else accounting.format_epsilon(epsilon)


class Display:
    """Shows a training run as it happens; by itself nothing."""

    def computing(self, event: Computing) -> None:
        """Before all else, where features are computed."""

    def started(self, event: Started) -> None:
        """Before the first step."""

    def update(self, event: Update) -> None:
        """While training."""

    def reduced(self, event: Reduced) -> None:
        """Memory ran out, and training goes on."""

    def stopping(self) -> None:
        """Someone has asked the run to stop."""

    def finished(self, event: Finished) -> None:
        """After the files are written."""

    def close(self) -> None:
        """Nothing more will come, whether or not the run is finished."""


class Lines(Display):
    """A line an epoch: for files, pipes and logs, and above the bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._computing: str | None = None
        self._scored: engine.Evaluation | None = None

    def computing(self, event: Computing) -> None:
        """What is computed, and where it is kept."""
        heading = _computing(event)
        if heading != self._computing:
            self._computing = heading
            self.console.print(Text(heading, style="dim"))

    def started(self, event: Started) -> None:
        """What is about to be trained."""
        for line in _heading(event):
            self.console.print(line)

    def update(self, event: Update) -> None:
        """A line an evaluation."""
        if isinstance(event.event, engine.Evaluated):
            self._scored = event.event.result
            self.console.print(_evaluated(event.event, event.epsilon))
            if event.not_private is not None:
                self.console.print(_diagnosed(event.not_private))

    def reduced(self, event: Reduced) -> None:
        """What is done about it."""
        self.console.print(
            f"memory ran out in step {event.step}: going on with {event.chunk} samples at a time",
            style=ATTENTION,
        )

    def stopping(self) -> None:
        """What will happen now."""
        self.console.print("stopping after this step; once more to stop at once", style=ATTENTION)

    def finished(self, event: Finished) -> None:
        """What came of it."""
        if self._scored is not None:
            for doubt in doubts(self._scored):
                self.console.print(Text(f"note: {doubt}", style="red"))
        for line in _summary(event):
            self.console.print(line)


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

    def computing(self, event: Computing) -> None:
        """A line, and a bar of its own."""
        super().computing(event)
        if not self._features.tasks:
            self._features.add_task("", total=event.records)
            self._features.start()
        self._features.update(self._features.tasks[0].id, completed=event.done)

    def started(self, event: Started) -> None:
        """The heading, and an empty bar."""
        self._features.stop()
        super().started(event)
        config = event.config
        self._batch, self._per_epoch = config.batch_size, config.steps_per_epoch
        self._private = not config.no_dp
        self._task = self._bar.add_task(
            "",
            total=event.steps,
            completed=event.done,
            epoch=str(event.done // self._per_epoch + 1),
            epsilon="",
            accuracy="",
            speed="",
        )
        self._bar.start()

    def update(self, event: Update) -> None:
        """Move the bar, and then put a line above it."""
        step = event.event.step
        self._bar.update(
            self._task,
            completed=step,
            epoch=str(math.ceil(step / self._per_epoch)),
            epsilon=self._budget(event),
            speed=self._speed(event),
        )
        if isinstance(event.event, engine.Evaluated):
            self._bar.update(self._task, accuracy=f"test {event.event.result.accuracy:.2%}")
        super().update(event)

    def finished(self, event: Finished) -> None:
        """The bar gives way to the summary."""
        self.close()
        super().finished(event)

    def close(self) -> None:
        """The bars go."""
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


def _heading(event: Started) -> list[Text]:
    config = event.config
    lines = [
        Text.assemble(
            (config.optimizer, "bold"),
            f" on {config.dataset_name}: {config.facts.train_size:,} records, "
            f"{config.model_name} with {event.parameters:,} parameters, {config.device}",
        )
    ]
    if config.no_dp:
        lines.append(Text(NO_PRIVACY, style="bold red"))
    else:
        lines.append(
            Text(
                f"sigma {config.sigma:g}, expected batch {config.batch_size}, {event.steps:,} "
                f"steps (epochs: {event.steps / config.steps_per_epoch:.4g}), delta "
                f"{config.delta:g}"
            )
        )
    if config.canaries is not None:
        lines.append(
            Text(
                f"AUDIT: {config.canaries:,} canaries ({config.canary_kind}), about half of them "
                "trained on; the model will be unfit for release",
                style="bold red",
            )
        )
    if event.cut_short:
        lines.append(
            Text(
                f"--max-epsilon {config.max_epsilon:g} pays for {event.steps:,} of "
                f"{config.total_steps:,} steps",
                style=ATTENTION,
            )
        )
    if event.done:
        how = "exactly as it would have" if event.branch is None else f"as a branch: {event.branch}"
        lines.append(Text(f"going on after step {event.done}, {how}", style=ATTENTION))
    lines += [Text(f"note: {note}", style=ATTENTION) for note in event.notes]
    if config.diagnostics:
        lines.append(Text(f"--diagnostics: {DIAGNOSTICS_WARNING}", style="bold red"))
    lines.append(Text(f"writing {event.folder}", style="dim"))
    return lines


def _evaluated(event: engine.Evaluated, epsilon: float | None) -> Text:
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


def _summary(event: Finished) -> list[Text]:
    report = event.report
    test, price = report["test"], report["privacy"]
    lines = [
        Text.assemble(
            "test accuracy ",
            (f"{test['accuracy']:.2%}", "bold"),
            f" on {test['samples']:,} samples",
        )
    ]
    if price["private"]:
        lines.append(
            Text.assemble(
                "privacy ",
                (f"epsilon {_price(price['epsilon'])}", "bold"),
                f" at delta {price['delta']:g} ({price['adjacency']}, {price['sampler']} sampling)",
            )
        )
    else:
        lines.append(Text(NO_PRIVACY, style="bold red"))
    if price["seed_policy"]["given"] and price["private"]:
        lines.append(
            Text("with --seed: no privacy against anyone who knows the seed", style=ATTENTION)
        )
    names = [folder.MODEL, folder.CARD, folder.REPORT, folder.METRICS, folder.CONFIG, folder.SUMS]
    if report["audit"]:
        lines.append(Text(AUDIT_RUN, style="bold red"))
        if event.state != "interrupted":
            names.append(folder.AUDIT)
            lines.append(Text(f"what the attack found: dpmac eval {event.folder} --audit"))
    if report["diagnostics"]:
        names.append(f"{folder.DIAGNOSTICS} (do not publish)")
    if (event.folder / folder.CURVES).exists():
        names.append(folder.CURVES)
    if (event.folder / folder.EVENTS).is_dir():
        names.append(f"{folder.EVENTS}/")
        lines.append(Text(f"its curves: tensorboard --logdir {event.folder}"))
    lines.append(Text(f"{event.folder}: {', '.join(names)}"))
    return lines


def _price(reported: float | None) -> str:
    """An epsilon of the report, where null stands for infinite."""
    return format_epsilon(math.inf if reported is None else reported)


def doubts(result: engine.Evaluation) -> Iterator[str]:
    """What must be said beside an accuracy."""
    lost = int(result.unanswered.sum())
    if lost:
        yield (
            f"for {lost:,} of {result.samples:,} test samples the network's output is not a number "
            "(NaN), which counts as wrong. Look at what its forward divides by, or takes the "
            "logarithm or the root of."
        )


def evaluation_table(result: engine.Evaluation, classes: list[str]) -> Table:
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
