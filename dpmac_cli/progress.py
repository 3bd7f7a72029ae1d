"""Progress of computing decoded images and features. Loads nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Computing:
    """Progress of a computation, as a listener gets it.

    Attributes:
        done: number of records that are computed.
        records: number of all records.
        folder: where they are stored.
        what: name of what is computed, in the plural: "features", "images", "runs".
    """

    done: int
    records: int
    folder: Path
    what: str = "features"


#: Called with progress.
LISTENER: ContextVar[Callable[[Computing], object]] = ContextVar("LISTENER", default=lambda _: None)


def report(done: int, records: int, folder: Path, what: str = "features") -> None:
    """Tell the listener of the progress of a computation; nothing happens without one.

    Args:
        done, records, folder, what: attributes of :class:`Computing`.
    """
    LISTENER.get()(Computing(done, records, folder, what))


@contextmanager
def unheard() -> Iterator[None]:
    """Tell no listener of the progress of computations in the block; a context manager."""
    token = LISTENER.set(lambda _: None)
    try:
        yield
    finally:
        LISTENER.reset(token)


@contextmanager
def heard_by(listener: Callable[[Computing], object]) -> Iterator[None]:
    """Call a function with the progress of computations in the block; a context manager.

    Listeners around it are called, too, after this one.

    Args:
        listener: called with a :class:`Computing` each time. What it raises ends the computation.

    >>> with heard_by(lambda event: print(event.done, "of", event.records)):
    ...     report(1, 2, Path("cache"))
    1 of 2
    """
    before = LISTENER.get()

    def both(event: Computing) -> None:
        listener(event)
        before(event)

    token = LISTENER.set(both)
    try:
        yield
    finally:
        LISTENER.reset(token)
