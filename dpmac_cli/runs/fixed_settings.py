"""Objects whose settings cannot be assigned once noise was calibrated for them."""

from typing import ClassVar

from dpmac_cli.errors import InputError
from dpmac_cli.randomness.unshared import Unshared


class FixedSettings(Unshared):
    """A private training whose public attributes, except ``lr``, cannot be assigned.

    An assignment would have no effect on the training, or change its epsilon and not the noise.
    """

    __slots__ = ()
    #: Call that creates a training with other settings, for the message.
    _CREATED_BY: ClassVar[str]

    def __setattr__(self, name: str, value: object) -> None:
        if not (name.startswith("_") or name == "lr"):
            raise InputError(
                f"{name} cannot be set: the noise was calibrated for the settings as they were, "
                "and only lr can change between steps. To train with other settings, pass them to "
                f"a new {self._CREATED_BY}, which also counts the steps taken so far."
            )
        object.__setattr__(self, name, value)
