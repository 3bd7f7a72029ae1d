"""Commands as typer runs them: options from fields of models, and failures as messages.

A field of a pydantic model has a type, limits, a default and a help. An option of a command is made
from it, and remains text until the model validates it, so that flags, YAML files and keywords of
programs have the same rules and messages, and all faults are reported together.
"""

import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

import typer
from pydantic import Field, StrictBool, create_model
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from dpmac_cli import errors
from dpmac_cli.cli import console
from dpmac_cli.config.flags import (
    Fields,
    Flags,
    NotBoth,
    choices_of,
    default_of,
    flag_name,
    help_of,
    is_switch,
    kind_of,
    takes_several,
    unknown,
)
from dpmac_cli.config.settings import GROUPS, RENAMED, Debug

#: Placeholders of values in the help, by their type.
PLACEHOLDERS: Mapping[type, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
#: Groups of the help that are no groups of settings.
ARGUMENTS, OPTIONS = "Arguments", "Options"
_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


class Command(TyperCommand):
    """A command whose help has its options by group, and which suggests misspelt ones.

    typer calls its methods. Pass it as ``cls`` of ``typer.Typer.command``, as :func:`built` does.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, where a switch has no placeholder for a value.

        Args:
            ctx: context of the call, a ``click.Context``.
        """
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, after a look at the names of all options.

        Args:
            ctx: context of the call, a ``click.Context``, which gets the values.
            args: words after the name of the command. What follows ``--`` is no option.

        Returns:
            The words that are left.

        Raises:
            UsageError: there is an option that the command does not have. The message names all of
                them, each with those of similar names.
        """
        known = set[str]()
        for parameter in self.get_params(ctx):
            known.update(parameter.opts)
        before_arguments = args[: args.index("--")] if "--" in args else args
        names = [parameter.name for parameter in self.params]
        faults = dict[str, None]()
        for argument in before_arguments:
            flag = argument.partition("=")[0]
            if not flag.startswith("--") or flag in known:
                continue
            name = flag.removeprefix("--").replace("-", "_")
            error = errors.as_flags(unknown(name, names, RENAMED))
            faults[error.replace(f"'{name}'", flag)] = None
        if faults:
            ctx.fail("\nError: ".join(faults))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options by group; groups without any are left out.

        Args:
            ctx: context of the call, a ``click.Context``.
            formatter: where they are written, a ``click.HelpFormatter``.
        """
        groups = dict[str, list[Any]]()
        for group in (ARGUMENTS, OPTIONS, *GROUPS.values()):
            groups[group] = []
        for parameter in self.get_params(ctx):
            groups[group_of(parameter)].append(parameter.get_help_record(ctx))
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def group_of(parameter: Any) -> str:
    """Return the title of the group of the help that a parameter of a command is in.

    Args:
        parameter: an argument or an option of a typer command. An option that is in no group of
            settings is in "Options".
    """
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    return GROUPS.get(parameter.name, OPTIONS)


def option(name: str, field: FieldInfo, several: bool = False) -> inspect.Parameter:
    """Return a field as a parameter that becomes an option, for the signature of a command.

    Values remain text, because one model validates flags, YAML and keywords. An option that was not
    typed is None; a switch is a bool, False if it was not typed.

    Args:
        name: name of the field, with underscores ("batch_size" becomes ``--batch-size``).
        field: the field, with its type, help and default. A default that is not None is shown in
            the help and is not the option's own.
        several: whether it accepts several values, separated by commas, also if its type does not.
    """
    option_of: Any = partial(typer.Option, f"--{flag_name(name)}")
    text, choices, default = help_of(field), choices_of(field), default_of(field)
    if is_switch(field):
        return _parameter(name, annotation=Annotated[bool, option_of(help=text)], default=False)
    several = several or takes_several(field)
    if choices.names:
        text += f" One of {choices.known}."
    if default:
        text += f" [default: {default}]"
    metavar = "NAME" if choices.names else PLACEHOLDERS[kind_of(field)]

    def complete(typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",") if several else ("", "", typed)
        completed = list[str]()
        for choice in choices.names:
            if choice.startswith(last):
                completed.append(f"{before}{comma}{choice}")
        return completed

    info = option_of(
        help=text,
        show_default=False,
        metavar=f"{metavar},..." if several else metavar,
        autocompletion=complete if choices.names else None,
    )
    return _parameter(name, annotation=Annotated[str | None, info], default=None)


def stop(why: str, code: int) -> NoReturn:
    """End a command that was stopped, with one line on stderr.

    Args:
        why: reason to print, and how to go on.
        code: exit code, such as :data:`~dpmac_cli.errors.INTERRUPTED`.

    Raises:
        Exit: always.
    """
    console.print_errors([why], label="stopped")
    raise typer.Exit(code)


def reports_failures(command: Callable[..., None]) -> Callable[..., None]:
    """Convert exceptions of a command to a message on stderr and the documented exit code.

    With ``debug`` among its options, it also prints tracebacks. A closed pipe ends a command
    without a message, with code 0.

    Args:
        command: the command, which is called by keywords. One of them is ``debug``.

    Returns:
        A function with the same parameters, which raises typer.Exit instead.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:
        console.prepare_streams()
        try:
            with console.waiting(values.get("quiet", False)):
                command(**values)
            console.check_kept()
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            console.print_errors(["interrupted."])
            raise typer.Exit(errors.INTERRUPTED) from None
        except BrokenPipeError:  # the reader has closed the pipe, as in dpmac eval | head
            console.discard_output(sys.stdout)
        except Exception as failure:  # noqa: BLE001  (any bug is one message)
            if values["debug"]:
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
    """Handle Ctrl-C and SIGTERM within a context, in the main thread.

    The handlers from before are back after it.

    Yields:
        A function without arguments that returns whether one was received. It may be called any
        number of times. A second signal raises KeyboardInterrupt.
    """
    received = threading.Event()

    def handle(*_: object) -> None:
        if received.is_set():
            raise KeyboardInterrupt
        received.set()

    handlers = dict[signal.Signals, Any]()
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, handle)
    try:
        yield received.is_set
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def command(
    *settings: Fields,
    several: Collection[str] = (),
    not_both: NotBoth = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a function, which makes it a command that typer can read.

    Its positional parameters are arguments. Those by keyword are options: they have the type,
    limits, help and default of a field, and are validated as such. Every command has ``--debug``.
    The function gets its arguments and options by keyword, and its exceptions become messages
    (:func:`reports_failures`).

    Args:
        settings: fields whose options remain text, and are further keywords of the function, so it
            needs ``**values``. Of fields with the same name, the last one counts.
        several: names of those of them that accept several values.
        not_both: groups of names of options of which one may be given, and why, or "".
    """
    fields = dict[Any, FieldInfo]()
    for some in settings:
        fields |= some

    def signed(function: Callable[..., None]) -> Callable[..., None]:
        signature, keywords = list[inspect.Parameter](), dict[str, Any]()
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                signature.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = (parameter.annotation, parameter.default)
        model = create_model(function.__name__, __base__=Flags, **keywords)
        model.not_both = not_both
        options: dict[Any, FieldInfo] = {**fields, **model.model_fields}
        options.setdefault("debug", FieldInfo.from_annotated_attribute(Debug, False))
        for name, field in options.items():
            signature.append(option(name, field, several=name in several))

        @reports_failures
        @functools.wraps(function)
        def call(**typed: Any) -> None:
            if "debug" not in fields:
                del typed["debug"]
            validated = model.model_validate({name: typed.pop(name) for name in keywords})
            function(**typed, **dict(validated))

        # typer reads options from it, which functions have by no declared attribute.
        call.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in signature}
        return call

    return signed


def built(name: str, function: Callable[..., None]) -> TyperCommand:
    """Return the command of a function, which typer can run.

    Args:
        name: name of the command on the command line.
        function: a function that :func:`command` has signed.
    """
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(function)
    only: Any = typer.main.get_command(alone)  # its only command, so not a group
    built_command: TyperCommand = only
    return built_command


#: Arguments and options that commands share.
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Trained = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or a model.safetensors.")
]
ReplaceFile = Annotated[StrictBool, Field(description="Replace an existing file.")]


#: Name of the library that draws figures, which every file of one contains.
DRAWN_BY = b"Matplotlib"


def faults_of_file(
    path: Path,
    kinds: Sequence[str],
    force: bool,
    flag: str = "out",
    read: Mapping[Path, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield faults of the path of a file to write; nothing if it can be used. Nothing is created.

    Args:
        path: the file.
        kinds: endings that it may have, in lower case with the dot, such as ".png".
        force: whether an existing file is replaced. A folder never is, nor what the command reads.
        flag: name of the flag that the path is from, without dashes.
        read: files and folders of records that the command or its run reads, with what they are,
            such as "the table to predict". They need not exist.
    """
    yield from _faults_of_place(path, kinds, flag)
    if not path.exists():
        return
    for source, meaning in read.items():
        if source.is_file() and source.samefile(path):
            yield f"--{flag} {path} is {meaning}. Use another file."
            return
        if source.is_dir() and source.resolve() in path.resolve().parents:
            yield f"--{flag} {path} is a file of {source}, {meaning}. Use another file."
            return
    if not (force and path.is_file()):
        yield f"{path} already exists. Add --force to replace it, or use another --{flag}."


def faults_of_plot(path: Path, kinds: Sequence[str]) -> Iterator[str]:
    """Yield faults of the path of a figure to write with ``--plot``; nothing if it can be used.

    An earlier figure is replaced, but no other picture: it may be a record.

    Args:
        path: the file.
        kinds: endings that it may have, in lower case with the dot, such as ".png".
    """
    yield from _faults_of_place(path, kinds, "plot")
    if path.exists() and not (path.is_file() and DRAWN_BY in path.read_bytes()):
        yield f"--plot {path} already exists, and is no figure of dpmac. Use another file."


def _faults_of_place(path: Path, kinds: Sequence[str], flag: str) -> Iterator[str]:
    """Yield faults of the ending and the folder of a file to write."""
    if path.suffix.lower() not in kinds:
        yield f"--{flag} {path} must end in {' or '.join(kinds)}."
    if not path.parent.is_dir():
        yield f"The folder {path.parent} of --{flag} does not exist."
