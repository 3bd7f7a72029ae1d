"""Progress of computing decoded images and features. Loads nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Computing:
    """Progress: ``done`` of ``records`` are computed."""

    done: int
    records: int
    folder: Path
    what: str = "features"


#: Called with progress.
LISTENER: ContextVar[Callable[[Computing], object]] = ContextVar("LISTENER", default=lambda _: None)


def report(done: int, records: int, folder: Path, what: str = "features") -> None:
    """Tell the listener of the progress of a computation."""
    LISTENER.get()(Computing(done, records, folder, what))


@contextmanager
def unheard() -> Iterator[None]:
    """Tell no listener of the progress of computations."""
    token = LISTENER.set(lambda _: None)
    try:
        yield
    finally:
        LISTENER.reset(token)


@contextmanager
def heard_by(listener: Callable[[Computing], object]) -> Iterator[None]:
    """Call a function with the progress of computations, before the listener so far."""
    before = LISTENER.get()

    def both(event: Computing) -> None:
        listener(event)
        before(event)

    token = LISTENER.set(both)
    try:
        yield
    finally:
        LISTENER.reset(token)
