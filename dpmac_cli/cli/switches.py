"""Switches, options without a value, in the help."""

from typing import Any


def plain_switches(parameters: list[Any]) -> list[Any]:
    """Return parameters, with no placeholder for the value of a switch, which has none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
