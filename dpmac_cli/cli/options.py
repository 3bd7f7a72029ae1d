"""Commands as typer runs them: options from the fields of models, and failures as messages."""

import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import Field, StrictBool
from typer.core import TyperCommand

from dpmac_cli import errors
from dpmac_cli.cli import console, plain_switches
from dpmac_cli.config.flags import Flags, Model, Option, flag_name, options
from dpmac_cli.config.gone import instead
from dpmac_cli.config.settings import SETTINGS, Debug, DisplayFlags, PrintJson


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
        except Exception as failure:  # noqa: BLE001  (any bug is one message)
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


class JsonFlags(Flags, frozen=True):
    """Flags of a command that only prints, perhaps as JSON."""

    json: PrintJson = False
    debug: Debug = False


#: Placeholders of values in the help, by their type.
PLACEHOLDERS: Mapping[type, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def parameter(name: str, option: Option) -> inspect.Parameter:
    """Return a parameter that becomes an option.

    Values remain text, because one model validates both flags and YAML.
    """
    group = SETTINGS[name].group if name in SETTINGS else option.group
    shown: Any = partial(typer.Option, f"--{flag_name(name)}", rich_help_panel=group)
    if option.switch:
        return _parameter(name, annotation=Annotated[bool, shown(help=option.help)], default=False)
    text = option.help + (f" One of {option.choice.known}." if option.choice else "")
    metavar = "NAME" if option.choice else PLACEHOLDERS[option.kind]
    info = shown(
        help=text + (f" [default: {option.otherwise}]" if option.otherwise else ""),
        show_default=False,
        metavar=f"{metavar}{',...' * option.several}",
        autocompletion=_completer(option) if option.choice else None,
    )
    return _parameter(name, annotation=Annotated[str | None, info], default=None)


def _completer(option: Option) -> Callable[[str], list[str]]:
    """Return a completer for a choice, or for several comma-separated choices."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = "", "", incomplete
        if option.several:
            before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in option.choices if name.startswith(last)]

    return complete


def argument(
    name: str, text: str, *, required: bool = True, several: bool = False
) -> inspect.Parameter:
    """Return a parameter that becomes a positional argument of one path, or of several."""
    shown = typer.Argument(metavar=name.upper(), help=text)
    one: Any = list[Path] if several else Path
    kind, default = (one, ...) if required else (one | None, None)
    return _parameter(name, annotation=Annotated[kind, shown], default=default)


def with_options(
    *parts: inspect.Parameter | type[Flags] | Mapping[Any, Option],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Set the signature of a command to its arguments and options, for typer.

    ``parts`` are arguments, models, whose validated flags become the first arguments of the
    function, and other :func:`~dpmac_cli.config.flags.options`, which remain text.
    """
    parameters = list[inspect.Parameter]()
    for part in parts:
        if isinstance(part, inspect.Parameter):
            parameters.append(part)
        else:
            flags = options(part) if isinstance(part, type) else part
            parameters += (parameter(name, option) for name, option in flags.items())

    def sign(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(**given: Any) -> None:
            flags = [take(part, given) for part in parts if isinstance(part, type)]
            function(*flags, **given)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return sign


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
