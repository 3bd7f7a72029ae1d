"""Options of commands from the fields of models, for typer's flags, help and completion."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, StrictBool

from dpmac_cli.config.flags import Flags, Model, Option, flag_name
from dpmac_cli.config.settings import SETTINGS, Debug, PrintJson


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
    *parts: inspect.Parameter | Mapping[Any, Option],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Set the signature of a command to its arguments and the options of models, for typer.

    ``parts`` are arguments, and :func:`~dpmac_cli.config.flags.options` of models.
    """
    parameters = list[inspect.Parameter]()
    for part in parts:
        if isinstance(part, inspect.Parameter):
            parameters.append(part)
        else:
            parameters += (parameter(name, option) for name, option in part.items())

    def sign(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

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
    if path.suffix not in kinds:
        yield f"--{flag} {path} must end in {' or '.join(kinds)}."
    if not path.parent.is_dir():
        yield f"The folder {path.parent} of --{flag} does not exist."
    if path.exists() and not (force and path.is_file()):
        yield f"{path} already exists. Add --force to replace it, or use another --{flag}."
