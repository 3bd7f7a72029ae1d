"""Words on the terminal: errors and notes. Loads no torch."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text


def stdout() -> Console:
    """The console for results. Plain text when not a terminal; NO_COLOR is honoured."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    """The console for errors and notes."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_errors(errors: Iterable[str]) -> None:
    """Each fault once, in full sentences, on stderr."""
    console = stderr()
    for error in errors:
        console.print(Text.assemble(("error: ", "bold red"), error))


def print_notes(notes: Iterable[str]) -> None:
    """What is legal but probably not meant, on stderr."""
    console = stderr()
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
