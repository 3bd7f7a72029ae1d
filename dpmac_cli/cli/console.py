"""Words on the terminal: results, errors and notes. Loads no torch."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from dpmac_cli.errors import InputError, explain_os_error

#: For what should not be overlooked. In many terminals yellow, green and cyan are too faint on
#: white, and blue is on black.
ATTENTION = "magenta"
#: rich's own style that is.
THEME = Theme({"progress.remaining": "dim"})


class _Console(Console):
    """A console that leaves a broken pipe to its caller: rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  (rich calls this while it handles the error)


class Expendable:
    """A text stream for what is shown by the way: lost, it costs nothing but itself.

    A pager that was closed or a log on a full disk must not end hours of training. The first
    failure points the stream's descriptor at nowhere, so that what is buffered can go there too.

    Attributes:
        stream: written to.
        lost: why it can no longer be; None while it can.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """As of any text stream; never fails."""
        try:
            return self.stream.write(text)
        except OSError as failure:
            self._lose(failure)
            return len(text)

    def flush(self) -> None:
        """As of any text stream; never fails."""
        try:
            self.stream.flush()
        except OSError as failure:
            self._lose(failure)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream."""
        return getattr(self.stream, name)

    def _lose(self, failure: OSError) -> None:
        if self.lost is None:
            self.lost = failure
            discard_output(self.stream)


def discard_output(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


#: What this command has shown on standard output by the way.
_displays: list[Expendable] = []


def begin() -> None:
    """Before a command: have the standard streams escape what they cannot encode, as file names."""
    _displays.clear()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    """The console for results. Plain text when not a terminal; NO_COLOR is honoured."""
    return _console(sys.stdout)


def expendable(stream: TextIO) -> Console:
    """A console for what may be lost; see :class:`Expendable`."""
    display = Expendable(stream)
    if stream is sys.stdout:
        _displays.append(display)
    return _console(display)


def check_kept() -> None:
    """Refuse that what was to be on standard output is not, unless its reader had seen enough.

    Raises:
        InputError: it could not be written.
    """
    for display in _displays:
        if display.lost and not isinstance(display.lost, BrokenPipeError):
            raise InputError(
                f"{explain_os_error(display.lost)} What was to be shown is lost; what was to be "
                "written is written."
            )


def _console(file: TextIO | Expendable) -> Console:
    # Expendable has all that rich calls of a file, and is none by its type.
    return _Console(file=file, theme=THEME, highlight=False, soft_wrap=not file.isatty())  # type: ignore[arg-type]


def kept_clear(json: bool) -> contextlib.AbstractContextManager[Any]:
    """Keeps what a network of a person's own prints off stdout, where that is for a program."""
    return contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()


def print_result(text: str) -> None:
    """A result for a program, at once: a full disk must not go unnoticed. Raises OSError."""
    print(text, end="", flush=True)  # noqa: T201


def print_errors(errors: Iterable[str], label: str = "error") -> None:
    """Each fault once, in full sentences, on stderr."""
    console = expendable(sys.stderr)
    for error in errors:
        console.print(Text.assemble((f"{label}: ", "bold red"), error))


def print_notes(notes: Iterable[str]) -> None:
    """What is legal but probably not meant, on stderr."""
    console = expendable(sys.stderr)
    for note in notes:
        console.print(Text.assemble(("note: ", ATTENTION), note))
