"""Options of commands as data, for typer's flags, help and completion."""

import inspect
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dpmac_cli.config.settings import SETTINGS, Setting, flag_name, settings_in

#: Help and options of each command.
COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
#: Groups of options, in the order of the help. A command's own groups come first.
PANELS = list(dict.fromkeys(setting.panel for setting in SETTINGS.values()))
_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def option(
    name: str, setting: Setting, *, kind: type = str, default: Any = None
) -> inspect.Parameter:
    """Return a parameter that becomes an option; typer parses its value as ``kind``.

    Values of settings remain text, because one parser validates both flags and YAML.
    """
    otherwise = setting.otherwise if setting.default is None else setting.default
    text = setting.help + (f" One of {setting.known}." if setting.choices else "")
    shown: Any = partial(typer.Option, f"--{flag_name(name)}", rich_help_panel=setting.panel)
    if setting.kind is bool:
        return _parameter(name, annotation=Annotated[bool, shown(help=setting.help)], default=False)
    metavar = "NAME" if setting.choices else setting.kind.__name__.upper()
    info = shown(
        help=text + ("" if otherwise == "" else f" [default: {otherwise}]"),
        show_default=False,
        metavar=setting.metavar or f"{metavar}{',...' * setting.several}",
        autocompletion=_completer(setting) if setting.choices else None,
    )
    return _parameter(name, annotation=Annotated[kind | None, info], default=default)


def _completer(setting: Setting) -> Callable[[str], list[str]]:
    """Return a completer for a choice, or for several comma-separated choices."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = "", "", incomplete
        if setting.several:
            before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in setting.choices if name.startswith(last)]

    return complete


def argument(name: str, text: str, *, required: bool = True) -> inspect.Parameter:
    """Return a parameter that becomes a positional path argument."""
    shown = typer.Argument(metavar=name.upper(), help=text)
    kind, default = (Path, ...) if required else (Path | None, None)
    return _parameter(name, annotation=Annotated[kind, shown], default=default)


def with_options(
    command: str,
    *arguments: inspect.Parameter,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Set the signature of a function to the parameters of a command, for typer.

    Args:
        command: a name in :data:`COMMANDS`. arguments: arguments before its options.
        details: more fields of its own options, by name. settings: more settings, as text.
    """
    entry, settings = COMMANDS[command], settings or {}
    own = settings_in(entry["options"], details or {})
    shared = {name: SETTINGS[name] for name in entry["settings"]}
    found = [(of, option(name, of, kind=of.kind, default=of.default)) for name, of in own.items()]
    found += [(of, option(name, of, default=of.default)) for name, of in shared.items()]
    found += [(of, option(name, of)) for name, of in settings.items()]
    found.sort(key=lambda pair: PANELS.index(pair[0].panel) if pair[0].panel in PANELS else -1)
    parameters = [*arguments, *(parameter for _, parameter in found)]

    def sign(function: Callable[..., None]) -> Callable[..., None]:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return sign
