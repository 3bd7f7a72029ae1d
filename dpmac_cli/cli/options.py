"""Commands as click runs them: options from fields of models, and failures as messages."""

import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
from click.exceptions import Exit
from pydantic import Field, StrictBool
from pydantic.fields import FieldInfo

from dpmac_cli import errors
from dpmac_cli.cli import console
from dpmac_cli.config.flags import (
    Fields,
    Flags,
    Model,
    choices_of,
    default_of,
    flag_name,
    help_of,
    is_switch,
    kind_of,
    takes_several,
    unknown,
)
from dpmac_cli.config.settings import GROUPS, Debug, DisplayFlags, PrintJson

#: Placeholders of values in the help, by their type.
PLACEHOLDERS: Mapping[type, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class Argument(click.Argument):
    """A positional argument with a help."""

    def __init__(self, name: str, text: str, **given: Any) -> None:
        super().__init__([name], metavar=name.upper(), type=click.Path(path_type=Path), **given)
        self.text = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return its name and its help."""
        return self.make_metavar(ctx), self.text


class Command(click.Command):
    """A command whose help has its options by group, and which suggests misspelt ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error for an option that there is not."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as failure:
            typed = failure.option_name.lstrip("-").replace("-", "_")
            error = unknown(typed, [parameter.name or "" for parameter in self.params])
            ctx.fail(errors.as_flags(error).replace(f"'{typed}'", failure.option_name))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments and the options by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(group_of(parameter), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def group_of(parameter: click.Parameter) -> str:
    """Return the group of the help that a parameter is in."""
    if isinstance(parameter, Argument):
        return "Arguments"
    return GROUPS.get(parameter.name or "", "Options")


def option(name: str, field: FieldInfo, several: bool = False) -> click.Option:
    """Return a field as an option.

    Values remain text, because one model validates flags, YAML and keywords.
    """
    flag, text, choices = f"--{flag_name(name)}", help_of(field), choices_of(field)
    if is_switch(field):
        return click.Option([flag], is_flag=True, help=text)
    several = several or takes_several(field)
    named = f" One of {choices.known}." if choices.names else ""
    otherwise = f" [default: {words}]" if (words := default_of(field)) else ""
    metavar = "NAME" if choices.names else PLACEHOLDERS[kind_of(field)]

    def complete(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",") if several else ("", "", typed)
        return [f"{before}{comma}{choice}" for choice in choices.names if choice.startswith(last)]

    return click.Option(
        [flag],
        help=f"{text}{named}{otherwise}",
        metavar=f"{metavar},..." if several else metavar,
        shell_complete=complete if choices.names else None,
    )


def stop(why: str, code: int) -> NoReturn:
    """End a stopped command: print the reason and exit with a code."""
    console.print_errors([why], label="stopped")
    raise Exit(code)


def reports_failures(command: Callable[..., None]) -> Callable[..., None]:
    """Convert exceptions of a command to a message on stderr and the documented exit code.

    With ``debug`` among its options, it also prints tracebacks.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        console.prepare_streams()
        shown = take(DisplayFlags, dict(given))
        try:
            with console.waiting(shown.quiet):
                command(**given)
            console.check_kept()
        except (Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            console.print_errors(["interrupted."])
            raise Exit(errors.INTERRUPTED) from None
        except BrokenPipeError:  # the reader has closed the pipe, as in dpmac eval | head
            console.discard_output(sys.stdout)
        except Exception as failure:  # noqa: BLE001  (any bug is one message)
            if shown.debug:
                traceback.print_exc()
            known = failure if isinstance(failure, errors.DpmacError) else _explanation(failure)
            console.print_errors(known.errors)
            raise Exit(known.exit_code) from None

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


class JsonFlags(Flags, frozen=True):
    """Flags of a command that only prints, perhaps as JSON."""

    json: PrintJson = False
    debug: Debug = False


def command(
    *given: click.Parameter | type[Flags] | Fields,
) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator of a function, which makes it a command of its name.

    Args:
        given: arguments; options; models, whose validated flags become the first arguments of the
            function; and fields of other models, whose options remain text.
    """
    parameters, models = list[click.Parameter](), list[type[Flags]]()
    for part in given:
        if isinstance(part, click.Parameter):
            parameters.append(part)
            continue
        if isinstance(part, type):
            models.append(part)
        fields = part.model_fields if isinstance(part, type) else part
        parameters += (option(name, field) for name, field in fields.items())

    def made(function: Callable[..., None]) -> Command:
        def call(**typed: Any) -> None:
            flags = [take(model, typed) for model in models]
            function(*flags, **typed)

        return Command(
            function.__name__,
            params=parameters,
            callback=reports_failures(call),
            help=function.__doc__,
        )

    return made


def take(model: type[Model], given: dict[str, Any]) -> Model:
    """Remove the fields of a model from given options, and validate them.

    Raises InputError with every fault found.
    """
    return model.model_validate({n: given.pop(n) for n in model.model_fields if n in given})


ReplaceFile = Annotated[StrictBool, Field(description="Replace an existing file.")]


def faults_of_file(
    path: Path, kinds: Sequence[str], force: bool, flag: str = "out"
) -> Iterator[str]:
    """Yield faults of the path of a file to write."""
    if path.suffix.lower() not in kinds:
        yield f"--{flag} {path} must end in {' or '.join(kinds)}."
    if not path.parent.is_dir():
        yield f"The folder {path.parent} of --{flag} does not exist."
    if path.exists() and not (force and path.is_file()):
        yield f"{path} already exists. Add --force to replace it, or use another --{flag}."
