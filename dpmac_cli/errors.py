"""Exceptions that a user can act on, with their exit codes."""

import errno
from collections.abc import Iterable, Sequence
from typing import ClassVar

BUG, USAGE, BUDGET, MISFIT, INTERRUPTED = 1, 2, 3, 4, 130


class DpmacError(Exception):
    """Base class of errors with messages for the user, each a full sentence with a remedy."""

    exit_code: ClassVar[int] = BUG

    def __init__(self, errors: str | Sequence[str]) -> None:
        self.errors: tuple[str, ...] = (errors,) if isinstance(errors, str) else tuple(errors)
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
