"""Options of commands from the fields of models, for typer's flags, help and completion."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dpmac_cli.config.fields import Option, flag_name
from dpmac_cli.config.flags import Flags, Model
from dpmac_cli.config.settings import SETTINGS, Debug, PrintJson


class JsonFlags(Flags, frozen=True):
    """Flags of a command that only prints, perhaps as JSON."""

    json: PrintJson = False
    debug: Debug = False


#: Groups of options, in the order of the help. A command's own groups come first.
GROUPS = list(dict.fromkeys(option.flag.group for option in SETTINGS.values()))
#: Placeholders of values in the help, by their type.
PLACEHOLDERS: Mapping[type, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def parameter(name: str, option: Option) -> inspect.Parameter:
    """Return a parameter that becomes an option.

    Values remain text, because one model validates both flags and YAML.
    """
    shown: Any = partial(typer.Option, f"--{flag_name(name)}", rich_help_panel=option.flag.group)
    if option.switch:
        return _parameter(name, annotation=Annotated[bool, shown(help=option.help)], default=False)
    text = option.help + (f" One of {option.known}." if option.choices else "")
    metavar = "NAME" if option.choices else PLACEHOLDERS[option.kind]
    info = shown(
        help=text + (f" [default: {option.otherwise}]" if option.otherwise else ""),
        show_default=False,
        metavar=option.flag.metavar or f"{metavar}{',...' * option.several}",
        autocompletion=_completer(option) if option.choices else None,
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
    arguments = [part for part in parts if isinstance(part, inspect.Parameter)]
    found = [
        pair for part in parts if not isinstance(part, inspect.Parameter) for pair in part.items()
    ]
    found.sort(key=lambda pair: _place(pair[1].flag.group))
    parameters = [*arguments, *(parameter(name, option) for name, option in found)]

    def sign(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return sign


def _place(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else -1


def take(model: type[Model], given: dict[str, Any]) -> Model:
    """Remove the fields of a model from given options, and validate them.

    Raises InputError with every fault found.
    """
    return model.model_validate({n: given.pop(n) for n in model.model_fields if n in given})
