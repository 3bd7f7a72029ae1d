"""The ways a run can fail that a person can mend. The terminal decides how each is shown."""

import errno
from collections.abc import Sequence


class DpmacError(Exception):
    """A failure with a message written for the person who reads it."""


class InputError(DpmacError):
    """What was typed, or a file that was named, cannot be used.

    Args:
        errors: every fault found, each a full sentence that says what to do.
    """

    def __init__(self, errors: str | Sequence[str]) -> None:
        self.errors: tuple[str, ...] = (errors,) if isinstance(errors, str) else tuple(errors)
        super().__init__("\n".join(self.errors))


class BudgetError(DpmacError):
    """The privacy budget cannot be met, or is spent."""


class ModelError(DpmacError):
    """A model or a checkpoint does not fit what it is used for."""


class RunError(DpmacError):
    """A run cannot go on: memory ran out, or its device failed."""


class DivergedError(RunError):
    """A run cannot go on: its parameters are no longer finite.

    Args:
        step: after which that was noticed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"Training diverged: after step {step} the parameters are no longer finite. Try a "
            "smaller --lr."
        )


def as_sentence(text: str) -> str:
    """A text with a stop behind it, if it has none, and nothing that a terminal would obey."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if text.endswith((".", "!", "?")) else f"{text}."


#: What mends a file system that refuses a file, by the system's number for why.
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make it writable."),
}


def explain_os_error(failure: OSError) -> str:
    """What could not be read or written, why, and what to do about it, in full sentences."""
    what = f"{failure.filename or 'standard output'}: {failure.strerror or failure}."
    cure = _CURES.get(failure.errno or 0)
    return f"{what} {cure}" if cure else what
