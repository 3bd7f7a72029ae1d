"""The ways a run can fail that a person can mend. The terminal decides how each is shown."""

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
