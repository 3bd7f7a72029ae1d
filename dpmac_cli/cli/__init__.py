"""Command line interface. Only this package imports typer and rich."""

from typing import Any


def plain_switches(parameters: list[Any]) -> list[Any]:
    """Return parameters, with no placeholder for the value of a switch, which has none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
