"""A command as typer runs it, made from its function."""

import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from dpmac_cli import errors
from dpmac_cli.cli import console, plain_switches
from dpmac_cli.cli.options import take
from dpmac_cli.config.gone import instead
from dpmac_cli.config.settings import DisplayFlags


class Command(TyperCommand):
    """A command that suggests what to type instead of options of other libraries or versions."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return plain_switches(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error for an option that has another name here."""
        ours = {name for parameter in self.params for name in parameter.opts}
        known = {name.removeprefix("--").replace("-", "_") for name in ours}
        for typed in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if typed not in ours and (said := instead(typed[2:], known)):
                ctx.fail(f"No such option: {typed}.{said.replace('called ', 'called --')}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by group, without boxes, which would take most of the time of help."""
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            named = getattr(parameter, "rich_help_panel", None) or "Options"
            of = "Arguments" if parameter.param_type_name == "argument" else named
            groups.setdefault(of, []).append(parameter.get_help_record(ctx))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def command_of(name: str, function: Callable[..., None]) -> TyperCommand:
    """Return the command ``name``, which calls a function and reports its failures."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(reports_failures(function))
    built: Any = typer.main.get_command(alone)  # of its only command, so of its class
    found: TyperCommand = built
    return found


def stop(why: str, code: int) -> NoReturn:
    """End a stopped command: print the reason and exit with a code."""
    console.print_errors([why], label="stopped")
    raise typer.Exit(code)


def reports_failures(command: Callable[..., None]) -> Callable[..., None]:
    """Convert exceptions of a command to a message on stderr and the documented exit code.

    With ``debug`` among its options, it also prints tracebacks.
    """

    @functools.wraps(command)
    @errors.named_as_flags()
    def run(**given: Any) -> None:
        console.prepare_streams()
        shown = take(DisplayFlags, dict(given))
        try:
            with console.waiting(shown.quiet):
                command(**given)
            console.check_kept()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            console.print_errors(["interrupted."])
            raise typer.Exit(errors.INTERRUPTED) from None
        except BrokenPipeError:  # the reader has closed the pipe, as in dpmac eval | head
            console.discard_output(sys.stdout)
        except Exception as failure:  # noqa: BLE001
            if shown.debug:
                traceback.print_exc()
            known = failure if isinstance(failure, errors.DpmacError) else _explanation(failure)
            console.print_errors(known.errors)
            raise typer.Exit(known.exit_code) from None

    return run


def _explanation(failure: Exception) -> errors.DpmacError:
    """Return an error with a message for a failure that has none for the user."""
    if isinstance(failure, OSError):
        return errors.InputError(errors.explain_os_error(failure))
    if isinstance(failure, UnicodeEncodeError):
        return errors.InputError(
            f"{failure.object!a} cannot be written in {failure.encoding}. Rename the file or "
            "folder of this name, or set the environment variable PYTHONUTF8=1."
        )
    return errors.DpmacError(
        f"dpmac failed unexpectedly ({type(failure).__name__}: {failure}). "
        "Please report it with the output of the same command and --debug, and that of dpmac env."
    )


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C and SIGTERM: yield a function that returns whether one was received.

    A second one interrupts immediately.
    """
    asked = threading.Event()

    def handle(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
