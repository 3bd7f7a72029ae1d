"""Showing a run as it happens, and what is left of one that fails on the way."""

from collections.abc import Callable, Iterator

import typer

from dpmac_cli.cli import console
from dpmac_cli.cli.display import Display
from dpmac_cli.cli.failures import INTERRUPTED, USAGE, explain_os_error
from dpmac_cli.run import Finished, RunEvent, Started, Update


def follow(events: Iterator[RunEvent], display: Display, stop: Callable[[], bool]) -> Finished:
    """Show a run to its end.

    Args:
        events: of :func:`dpmac_cli.run.train` or :func:`dpmac_cli.run.resume`.
        display: for the person who watches.
        stop: whether they have asked the run to stop.

    Raises:
        typer.Exit: it could not go on, and the person knows why and how to.
    """
    where, told = None, False
    try:
        for event in events:
            match event:
                case Started():
                    where = event.folder
                    display.started(event)
                case Update():
                    if stop() and not told:
                        told = True
                        display.stopping()
                    display.update(event)
                case Finished():
                    display.finished(event)
                    return event
    except (KeyboardInterrupt, OSError) as failure:
        if where is None:
            raise
        display.close()
        hint = f"To go on from the last checkpoint: dpmac train --resume {where}"
        if isinstance(failure, OSError):
            console.print_errors([f"{explain_os_error(failure)}. {hint}"])
            raise typer.Exit(USAGE) from None
        console.print_errors([f"interrupted at once. {hint}"], label="stopped")
        raise typer.Exit(INTERRUPTED) from None
    raise AssertionError("a run that neither finished nor failed")
