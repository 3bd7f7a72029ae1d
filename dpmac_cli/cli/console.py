"""Terminal output: results, errors and notes. Imports no torch.

There are two kinds of output. A result, which a program may read, must be written whole: if it
cannot be, the command fails. Progress and notes are expendable: a pager that was closed does not
end hours of training. Colors and bars are only for terminals, and honor NO_COLOR.
"""

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rich import progress
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from dpmac_cli.errors import InputError, as_flags, escaped, explain_os_error
from dpmac_cli.progress import Computing, heard_by

#: Style for important messages. In many terminals yellow, green and cyan are too faint on white,
#: and blue is too faint on black.
ATTENTION = "magenta"
#: Width of a line that is not on a terminal: no table needs more.
UNLIMITED = 10_000


class _Console(Console):
    """A console that raises BrokenPipeError instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  (rich calls this while it handles the error)


class Expendable:
    """A text stream that ignores failures, because a closed pager must not end hours of training.

    After the first failure, all output is discarded. If the stream is standard output,
    :func:`check_kept` reports the failure at the end of the command.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text, or discard it.

        Returns:
            The number of characters of the text, also if it was discarded.
        """
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or discard its buffer. Raises no OSError."""
        self._attempt(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream."""
        return getattr(self.stream, name)

    def _attempt(self, write: Callable[..., object], *text: str) -> None:
        """Call a function of the stream; on an OSError, discard all output from now on."""
        try:
            write(*text)
        except OSError as failure:
            if self.stream is sys.stdout:
                # Its traceback holds the run, whose folder must be unlocked before the exit.
                _failures.append(failure.with_traceback(None))
            discard_output(self.stream)


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that what its buffer holds raises no error.

    Args:
        stream: a stream of a file, such as sys.stdout.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


#: Failures of this command's expendable output on standard output.
_failures: list[OSError] = []


def prepare_streams() -> None:
    """Prepare the standard streams for a command.

    Characters that a stream cannot encode are escaped from now on, and failures of an earlier
    command in this process are forgotten. Streams that a test has replaced by other objects stay as
    they are.
    """
    _failures.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    """Return a new console for results on standard output.

    It writes colors only to a terminal and if NO_COLOR is not set, does not wrap lines elsewhere,
    and raises BrokenPipeError if the reader has closed the pipe.
    """
    return _console(sys.stdout)


def widen(out: Console) -> None:
    """Let tables be as wide as they need where lines are read by a program or a pager.

    Args:
        out: the console, which is changed in place. A terminal keeps its width.
    """
    if not out.is_terminal:
        out.width = UNLIMITED


def plain_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    *,
    justify: JustifyMethod = "left",
    bold: str = "",
    no_wrap: bool = False,
    **options: Any,
) -> Table:
    """Return a table without lines, in which text is shown as it is.

    Markup in cells, such as "[bold]", is not interpreted. Print the table with a console.

    Args:
        columns: titles of the columns.
        rows: cells of each row, as many as there are columns, or fewer to leave the last ones
            empty.
        justify, no_wrap: see :meth:`rich.table.Table.add_column`; for all columns.
        bold: title of the column to emphasise; "" for none.
        options: see :class:`rich.table.Table`.

    >>> table = plain_table(["run", "epsilon"], [["a", "1.0"], ["b", "3.0"]])
    >>> Console(width=20).print(table)
    run  epsilon
    a    1.0
    b    3.0
    """
    table = Table(box=None, pad_edge=False, **options)
    for name in columns:
        style = "bold" if name == bold else ""
        table.add_column(name, justify=justify, style=style, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def for_display(quiet: bool, json: bool) -> Console:
    """Return a new console for progress, whose output is expendable (:class:`Expendable`).

    Args:
        quiet: whether it prints nothing.
        json: whether standard output is for JSON, so that progress goes to standard error.
    """
    return _console(Expendable(sys.stderr if json else sys.stdout), quiet)


def check_kept() -> None:
    """Raise an error if expendable output on standard output was lost; call it at a command's end.

    A reader that closed the pipe, such as ``head``, has seen enough: that is no error.

    Raises:
        InputError: output was lost for another reason, such as a full disk.
    """
    for failure in _failures:
        if not isinstance(failure, BrokenPipeError):
            raise InputError(
                f"{explain_os_error(failure)} The terminal output is lost; all files were written."
            )


def _console(file: TextIO | Expendable, quiet: bool = False) -> Console:
    """Return a console for a stream, which wraps lines and has colors on a terminal only."""
    wrap = not file.isatty()
    # Expendable has all methods of a file that rich calls, but not its type.
    return _Console(file=file, quiet=quiet, highlight=False, soft_wrap=wrap)  # type: ignore[arg-type]


def kept_clear(json: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context that keeps output of a user-supplied model off standard output.

    Args:
        json: whether standard output is for JSON. Then all that is printed in the context goes to
            standard error; otherwise the context does nothing.
    """
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


class Done(progress.MofNCompleteColumn):
    """Column of a progress bar with what is done, such as 120/480; empty without a total.

    It is for the bars of rich, as one of the columns of :func:`bar`.
    """

    def render(self, task: progress.Task) -> Text:
        """Return the text of a task: "done/total", or nothing if its total is None."""
        return Text("") if task.total is None else super().render(task)


class TimeLeft(progress.ProgressColumn):
    """Column of a progress bar with the estimated time left, such as "1:35 left".

    It is empty as long as there is no estimate, and "finishing" once everything that the bar counts
    is done and its task has not ended yet.
    """

    #: Seconds between updates, so that the time can be read.
    max_refresh = 0.5

    def render(self, task: progress.Task) -> Text:
        """Return the text of a task: "1:35 left", "finishing", or nothing without an estimate."""
        if task.finished:
            return Text("finishing", "dim")
        seconds = task.time_remaining
        return Text("" if seconds is None else f"{duration(seconds)} left", "dim")


def duration(seconds: float) -> str:
    """Return a time in minutes and seconds, and in hours if there are any.

    Args:
        seconds: the time, 0 or more, which is rounded up to a whole second.

    >>> duration(95), duration(7295), duration(0.2)
    ('1:35', '2:01:35', '0:01')
    """
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


class _Bar(progress.Progress):
    """A progress bar that, where it is not shown, prints nothing: rich before 14.3 ends a line."""

    def stop(self) -> None:
        if not self.disable:
            super().stop()


def bar(
    *columns: str | progress.ProgressColumn, console: Console, **options: Any
) -> progress.Progress:
    """Return a transient progress bar with the time left, which is only shown on a terminal.

    It is not started: call ``start``, and ``stop`` at the end, which removes it from the screen.

    Args:
        columns: columns before that of the time: objects, or formats such as "{task.description}".
        console: where it is shown, unless that is quiet or no terminal.
        options: see :class:`rich.progress.Progress`.
    """
    hidden = console.quiet or not console.is_terminal
    return _Bar(*columns, TimeLeft(), console=console, transient=True, disable=hidden, **options)


@contextlib.contextmanager
def waiting(quiet: bool, first: str = "") -> Iterator[None]:
    """Show the progress of computations on a terminal's stderr, within a context.

    Computations tell of themselves (:mod:`dpmac_cli.progress`); one that begins has a bar until its
    last record is done.

    Args:
        quiet: whether nothing is shown. Also, processes of a run other than the first show nothing.
        first: text to show before a computation starts; "" for none.
    """
    columns = ("{task.description}", progress.BarColumn(), Done())
    console = _console(sys.stderr, quiet or os.environ.get("RANK", "0") != "0")
    display = bar(*columns, console=console)
    task = display.add_task(first, total=None)
    if first:
        display.start()

    def show(event: Computing) -> None:
        display.update(task, description=event.what, total=event.records, completed=event.done)
        if event.done < event.records:
            display.start()
        else:
            display.stop()

    try:
        with heard_by(show):
            yield
    finally:
        display.stop()


def print_result(text: str) -> None:
    """Print a result for a program and flush it. No line end is added.

    Args:
        text: the whole result, such as a line of JSON.

    Raises:
        OSError: the text cannot be written as a whole.
    """
    print(text, end="", flush=True)  # noqa: T201


def print_errors(errors: Iterable[str], label: str = "error", style: str = "bold red") -> None:
    """Print messages on stderr, one per line, with settings as flags.

    Control characters are escaped, so a terminal takes nothing that a message quotes for commands.
    Nothing is raised if stderr is closed.

    Args:
        errors: messages, in which settings are in braces: "{batch_size} is too large" is printed as
            "--batch-size is too large". Empty: nothing is printed.
        label: text before each of them.
        style: style of the label, see rich.
    """
    console = _console(Expendable(sys.stderr))
    for error in errors:
        lines = [escaped(line) for line in as_flags(error).split("\n")]
        console.print(Text.assemble((f"{label}: ", style), "\n".join(lines)))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on probable mistakes on stderr, each after "note: ".

    Args:
        notes: messages as for :func:`print_errors`.
    """
    print_errors(notes, "note", ATTENTION)


def print_private_notes(notes: Iterable[str]) -> None:
    """Print notes about the records on stderr, for the person who holds the records.

    They reveal facts of the records that no epsilon covers, and are labelled so.

    Args:
        notes: messages as for :func:`print_errors`.
    """
    print_errors(notes, "about your records, do not publish", ATTENTION)
