"""Options of commands as data, from which typer makes flags, help and completion."""

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from dpmac_cli.config.settings import flag_name

Completer = Callable[[str], list[str]]
_parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


def one_of(names: Iterable[str], *, several: bool = False) -> Completer:
    """Return a completer for a name, or for ``several`` with commas between them."""
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def option(
    name: str,
    text: str,
    panel: str | None = None,
    metavar: str | None = None,
    names: Completer | None = None,
    *,
    kind: Any = str | None,
    default: Any = None,
) -> inspect.Parameter:
    """Return a parameter that becomes an option; ``names`` completes its value."""
    shown = typer.Option(
        f"--{flag_name(name)}",
        help=text,
        rich_help_panel=panel,
        metavar=metavar,
        show_default=False,
        autocompletion=names,
    )
    return _parameter(name, annotation=Annotated[kind, shown], default=default)


def argument(
    name: str, text: str, metavar: str, *, kind: Any = Path | None, default: Any = None
) -> inspect.Parameter:
    """Return a parameter that becomes a positional argument; see :func:`option`."""
    shown = typer.Argument(metavar=metavar, help=text)
    return _parameter(name, annotation=Annotated[kind, shown], default=default)


def with_options(
    *parameters: inspect.Parameter,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes ``**kwargs`` its parameters, as typer reads them."""

    def sign(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return sign


#: Returns a parameter that becomes an option whose value is a path.
path_option = functools.partial(option, kind=Path | None, metavar="PATH")
#: Returns a parameter that becomes an option without a value, off by default.
switch = functools.partial(option, kind=bool, default=False)
JSON = switch("json", "Print JSON.", "Output")
DEBUG = switch("debug", "Show tracebacks.", "Output")
