"""From a failure to a message and an exit code. No traceback unless asked for."""

import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from dpmac_cli.cli import console
from dpmac_cli.errors import BudgetError, InputError, ModelError, RunError, explain_os_error

BUG, USAGE, BUDGET, MISFIT, INTERRUPTED = 1, 2, 3, 4, 130


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a command raises into a message on stderr and the documented exit code.

    The command that is returned takes ``debug`` beside its flags, to show tracebacks.
    """

    @functools.wraps(command)
    def run(debug: bool = False, **flags: Any) -> None:
        console.begin()
        try:
            command(**flags)
            console.check_kept()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            console.print_errors(["interrupted."])
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # whoever read our output has seen enough, as in dpmac eval | head
            console.discard_output(sys.stdout)
        except Exception as failure:  # noqa: BLE001
            if debug:
                traceback.print_exc()
            messages, code = _explanation(failure)
            console.print_errors(messages)
            raise typer.Exit(code) from None

    return run


def _explanation(failure: Exception) -> tuple[tuple[str, ...], int]:
    match failure:
        case InputError():
            return failure.errors, USAGE
        case BudgetError():
            return (str(failure),), BUDGET
        case ModelError() | RunError():
            return (str(failure),), MISFIT
        case OSError():
            return (explain_os_error(failure),), USAGE
    return (
        f"dpmac failed where it should not have ({type(failure).__name__}: {failure}). "
        "Please report it with the output of the same command and --debug.",
    ), BUG


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """A question to ask between steps: has Ctrl-C or SIGTERM come? A second one ends at once."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
