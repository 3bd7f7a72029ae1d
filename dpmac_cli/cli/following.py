"""Showing a run as it happens, and what is left of one that fails on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from dpmac_cli import checkpoint, folder
from dpmac_cli.cli import console
from dpmac_cli.cli.display import Display
from dpmac_cli.cli.failures import INTERRUPTED
from dpmac_cli.errors import DivergedError, InputError, RunError, explain_os_error
from dpmac_cli.feature_cache import Computing
from dpmac_cli.run import Finished, Reduced, RunEvent, Started, Update


def follow(events: Iterator[RunEvent], display: Display, stop: Callable[[], bool]) -> Finished:
    """Show a run to its end.

    Args:
        events: of :func:`dpmac_cli.run.train` or :func:`dpmac_cli.run.resume`.
        display: for the person who watches.
        stop: whether they have asked the run to stop.

    Raises:
        typer.Exit: it was broken off, and the person knows how to go on.
        DpmacError: it could not go on; the message says why, and how to.
    """
    where, told = None, False
    try:
        for event in events:
            match event:
                case Computing():
                    display.computing(event)
                case Started():
                    where = event.folder
                    display.started(event)
                case Update():
                    if stop() and not told:
                        told = True
                        display.stopping()
                    display.update(event)
                case Reduced():
                    display.reduced(event)
                case Finished():
                    display.finished(event)
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
        console.print_errors([f"interrupted at once. {_way_on(where)}"], label="stopped")
        raise typer.Exit(INTERRUPTED) from None
    raise AssertionError("a run that neither finished nor failed")


def _way_on(where: Path, change: str = "") -> str:
    """What is kept of a run that failed, and the command that goes on with it."""
    step = checkpoint.last_step(where)
    if step is None:
        return "The run's folder or its checkpoints are gone, so it cannot be resumed. Start again."
    resume = folder.resume_command(where, change)
    return f"To resume from the last checkpoint (step {step}): {resume}"
