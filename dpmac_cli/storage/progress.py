"""Progress of computing decoded images and features. Loads nothing."""

from collections.abc import Callable, Generator
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

Made = TypeVar("Made")


@dataclass(frozen=True)
class Computing:
    """Progress: ``done`` of ``records`` are computed."""

    done: int
    records: int
    folder: Path
    what: str = "features"


#: Called with progress by functions that return no events; set by the terminal.
LISTENER: ContextVar[Callable[[Computing], object]] = ContextVar("LISTENER", default=lambda _: None)


def outcome(events: Generator[Computing, None, Made]) -> Made:
    """Return a generator's result, and report its progress to the listener."""
    while True:
        try:
            LISTENER.get()(next(events))
        except StopIteration as end:
            return cast(Made, end.value)


def until(
    stop: Callable[[], bool], events: Generator[Computing, None, Made]
) -> Generator[Computing, None, Made]:
    """Return a generator's result; raise KeyboardInterrupt once ``stop`` returns True."""
    with closing(events):
        try:
            while True:
                event = next(events)
                if stop():
                    raise KeyboardInterrupt
                yield event
        except StopIteration as end:
            return cast(Made, end.value)
