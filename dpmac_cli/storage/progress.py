"""Progress of what is computed once: decoded images and features. Loads nothing."""

from collections.abc import Callable, Generator
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

Made = TypeVar("Made")


@dataclass(frozen=True)
class Computing:
    """Progress: ``done`` of the ``records`` are computed, here or ``elsewhere``."""

    done: int
    records: int
    folder: Path
    elsewhere: bool = False
    what: str = "features"
    nbytes: int = 0  # of all of them, on the disk


#: Is told of progress by what returns no events. The terminal listens.
LISTENER: ContextVar[Callable[[Computing], object]] = ContextVar("LISTENER", default=lambda _: None)


def outcome(events: Generator[Computing, None, Made]) -> Made:
    """Return what a generator makes; the listener is told of its progress."""
    while True:
        try:
            LISTENER.get()(next(events))
        except StopIteration as end:
            return cast(Made, end.value)


def until(
    stop: Callable[[], bool], events: Generator[Computing, None, Made]
) -> Generator[Computing, None, Made]:
    """Return what a generator makes; raise KeyboardInterrupt once ``stop`` returns True."""
    with closing(events):
        try:
            while True:
                event = next(events)
                if stop():
                    raise KeyboardInterrupt
                yield event
        except StopIteration as end:
            return cast(Made, end.value)
