"""dpmac env: versions, processor, libraries and folders of this machine, for a bug report."""

from typing import Any

from dpmac_cli.cli import console
from dpmac_cli.cli.options import JsonFlags, take, with_options
from dpmac_cli.config.fields import options
from dpmac_cli.storage.files import to_json


@with_options(options(JsonFlags))
def env(**given: Any) -> None:
    """Print what a bug report needs: versions, processor, libraries and folders.

    Example: dpmac env

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    flags = take(JsonFlags, given)
    from dpmac_cli.runs.environment import facts  # noqa: PLC0415  (loads torch)

    found = facts()
    if flags.json:
        console.print_result(to_json(found))
        return
    console.print_result("".join(f"{name}: {_text(value)}\n" for name, value in found.items()))


def _text(value: Any) -> str:
    """Return a value in one line, or in one line for each of its parts."""
    if isinstance(value, dict):
        parts = [f"\n  {name}: {'none' if v is None else v}" for name, v in value.items()]
        return "".join(parts) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)
