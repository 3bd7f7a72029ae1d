"""Messages about faults of user-supplied records: some are listed, the rest counted."""

from collections.abc import Sequence

from dpmac_cli.data.schema import LeftOut
from dpmac_cli.errors import raise_errors

#: Number of faults of one kind to list.
NAMED = 5


def escaped(text: str) -> str:
    """Return text with escapes for characters that a terminal may take for commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some_of(faults: Sequence[str]) -> list[str]:
    """Return a text that lists some faults of one kind and counts the rest; [] for none."""
    faults = [escaped(fault) for fault in faults]
    more = f", and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return [f"{'; '.join(faults[:NAMED])}{more}"] if faults else []


def complaints(faults: Sequence[str], remedy: str = "") -> list[str]:
    """Return a sentence like :func:`some_of`, with what to do; [] for none."""
    return [f"{text}.{remedy}" for text in some_of(faults)]


def left_out(descriptions: Sequence[str]) -> LeftOut:
    """Return records that are left out, given a description of each that says why."""
    return LeftOut(tuple(descriptions), tuple(some_of(descriptions)))


def refuse(faults: Sequence[str], remedy: str = "") -> None:
    """Raise for faults of one kind."""
    raise_errors(complaints(faults, remedy))
