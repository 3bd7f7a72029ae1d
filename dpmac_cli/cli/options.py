"""Commands as click runs them: options from the fields of models, and failures as messages."""

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
from click.shell_completion import CompletionItem
from pydantic import Field, StrictBool

from dpmac_cli import errors
from dpmac_cli.cli import Explained, console
from dpmac_cli.config.flags import Flags, Model, Option, flag_name, options
from dpmac_cli.config.settings import SETTINGS, Debug, DisplayFlags, PrintJson


class Command(Explained, click.Command):
    """A command whose help has its options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group."""
        groups: dict[str, list[Any]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option):
                group = getattr(option, "group", "Options")
                groups.setdefault(group, []).append(option.get_help_record(ctx))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def stop(why: str, code: int) -> NoReturn:
    """End a stopped command: print the reason and exit with a code."""
    console.print_errors([why], label="stopped")
    raise click.exceptions.Exit(code)


def reports_failures(command: Callable[..., None]) -> Callable[..., None]:
    """Convert exceptions of a command to a message on stderr and the documented exit code.

    With ``debug`` among its options, it also prints tracebacks.
    """

    @errors.named_as_flags()
    def run(**given: Any) -> None:
        console.prepare_streams()
        shown = take(DisplayFlags, dict(given))
        try:
            with console.waiting(shown.quiet):
                command(**given)
            console.check_kept()
        except (click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            console.print_errors(["interrupted."])
            raise click.exceptions.Exit(errors.INTERRUPTED) from None
        except BrokenPipeError:  # the reader has closed the pipe, as in dpmac eval | head
            console.discard_output(sys.stdout)
        except Exception as failure:  # noqa: BLE001  (any bug is one message)
            if shown.debug:
                traceback.print_exc()
            known = failure if isinstance(failure, errors.DpmacError) else _explanation(failure)
            console.print_errors(known.errors)
            raise click.exceptions.Exit(known.exit_code) from None

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


class Setting(click.Option):
    """An option made of a field of a model, in a group of the help.

    Values remain text, because one model validates both flags and YAML.
    """

    def __init__(self, name: str, option: Option) -> None:
        text = option.help + (f" One of {option.choice.known}." if option.choice else "")
        placeholder = "NAME" if option.choice else PLACEHOLDERS.get(option.kind)
        super().__init__(
            [f"--{flag_name(name)}"],
            is_flag=option.switch or None,  # False would take no value that begins with "-"
            help=text + (f" [default: {option.otherwise}]" if option.otherwise else ""),
            metavar=placeholder and f"{placeholder}{',...' * option.several}",
        )
        self.option = option
        self.group = SETTINGS[name].group if name in SETTINGS else option.group

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a choice, or the last of several comma-separated choices."""
        before, comma, last = "", "", incomplete
        if self.option.several:
            before, comma, last = incomplete.rpartition(",")
        found = (name for name in self.option.choices if name.startswith(last))
        return [CompletionItem(f"{before}{comma}{name}") for name in found]


def argument(
    name: str, text: str, *, required: bool = True, several: bool = False
) -> click.Argument:
    """Return a positional argument of one path, or of several."""
    path, count = click.Path(path_type=Path), -1 if several else 1
    return click.Argument([name], required, text, type=path, nargs=count)


def command(
    *parts: click.Argument | type[Flags] | Mapping[Any, Option],
) -> Callable[[Callable[..., None]], Command]:
    """Make a function the command of its name, with arguments and options.

    ``parts`` are arguments, models, whose validated flags become the first arguments of the
    function, and other :func:`~dpmac_cli.config.flags.options`, which remain text.
    """
    parameters = list[click.Parameter]()
    for part in parts:
        if isinstance(part, click.Argument):
            parameters.append(part)
        else:
            flags = options(part) if isinstance(part, type) else part
            parameters += (Setting(name, option) for name, option in flags.items())

    def make(function: Callable[..., None]) -> Command:
        @reports_failures
        def call(**given: Any) -> None:
            flags = [take(part, given) for part in parts if isinstance(part, type)]
            function(*flags, **given)

        return Command(function.__name__, callback=call, params=parameters, help=function.__doc__)

    return make


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
