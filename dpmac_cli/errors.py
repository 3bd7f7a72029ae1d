"""Exceptions that a user can act on, with their exit codes."""

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

BUG, USAGE, BUDGET, MISFIT, INTERRUPTED = 1, 2, 3, 4, 130

#: Whether a command runs, whose messages name settings as flags. Those of a program name keywords.
_IN_COMMAND: ContextVar[bool] = ContextVar("_IN_COMMAND", default=False)
#: A command to type, up to the end of its sentence or of the brackets that it is in.
_COMMAND = r"\b(?:dpmac|pip|scancel|sbatch) [a-z-].*?(?=[.;:)](?:\s|$)|$)"
#: A flag, and the space before a value that is a number, in quotes, or a placeholder such as MORE.
_FLAG = r"(?<![\w-])--([a-z][a-z0-9-]*)( (?=[\d'\"]|[A-Z]+\b))?"
#: Text without a space that is too long to read, of which a message shows the beginning.
_ENDLESS = re.compile(r"(\S{100})\S{900,}")


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Name settings in messages as flags (``--batch-size``), for a command that was typed."""
    token = _IN_COMMAND.set(True)
    try:
        yield
    finally:
        _IN_COMMAND.reset(token)


def named(text: str) -> str:
    """Return a message that names settings as its reader gives them.

    Messages are written with flags. In a Python program, they become keywords: ``batch_size``
    instead of ``--batch-size``, except in commands to type.
    """
    if _IN_COMMAND.get():
        return text
    pieces = re.split(f"({_COMMAND})", text)
    pieces[::2] = [re.sub(_FLAG, _as_keyword, piece) for piece in pieces[::2]]
    return "".join(pieces)


def as_typed(in_command: str, in_program: str) -> str:
    """Return the text for the person who typed a command, or for the author of a program."""
    return in_command if _IN_COMMAND.get() else in_program


def counted(number: int, what: str) -> str:
    """Return a number of things in words: "1 record", "2,000 records", "2 classes"."""
    ending = "es" if what.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {what}{ending * (number != 1)}"


def _as_keyword(flag: re.Match[str]) -> str:
    return flag[1].replace("-", "_") + "=" * (flag[2] is not None)


class DpmacError(Exception):
    """Base class of errors with messages for the user, each a full sentence with a remedy.

    Args:
        errors: messages, in which settings are flags: see :func:`named`.
    """

    exit_code: ClassVar[int] = BUG

    def __init__(self, errors: str | Sequence[str]) -> None:
        given = (errors,) if isinstance(errors, str) else errors
        self.errors: tuple[str, ...] = tuple(named(_ENDLESS.sub(r"\1...", text)) for text in given)
        super().__init__("\n".join(self.errors))


class InputError(DpmacError):
    """An argument or an input file cannot be used."""

    exit_code = USAGE


def raise_errors(errors: Iterable[str]) -> None:
    """Raise InputError with every error that was found, if there are any."""
    if found := tuple(errors):
        raise InputError(found)


class BudgetError(DpmacError):
    """The privacy budget cannot be met, or is spent."""

    exit_code = BUDGET


class ModelError(DpmacError):
    """A model or a checkpoint does not fit what it is used for."""

    exit_code = MISFIT


class RunError(DpmacError):
    """A run cannot continue: memory ran out, or its device failed."""

    exit_code = MISFIT


class DivergedError(RunError):
    """The parameters of a run are no longer finite after ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"Training diverged: after step {step} the parameters are no longer finite. Use a "
            "smaller --lr."
        )


def first_fault(failure: Exception) -> str:
    """Return the place and the fault of a ValidationError, or the first line of another error."""
    if (errors := getattr(failure, "errors", None)) is None:
        return str(failure).partition("\n")[0].rstrip(".")
    first = errors()[0]
    fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return fault.replace("Value error, ", "")


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError for whatever a library in Rust raises, such as PanicException.

    That is a BaseException, which no handler of Exception sees.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as failure:
        raise ValueError(str(failure)) from failure


def as_sentence(text: str) -> str:
    """Return a text with a final full stop and escaped control characters."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if text.endswith((".", "!", "?")) else f"{text}."


#: Remedies for file system errors, by error number.
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), " Free some space."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), " Make it writable."),
}


def explain_os_error(failure: OSError) -> str:
    """Return the file, the reason and the remedy of an OSError, in sentences."""
    what = f"{failure.filename or 'standard output'}: {failure.strerror or failure}."
    return what + _CURES.get(failure.errno or 0, "")
