"""Objects with secret keys, of which there must not be two."""

import os
from typing import Any, NoReturn

from dpmac_cli.errors import InputError

#: Message for a copy of a training.
NOT_COPIED = (
    "A private training, and its noise, cannot be copied or pickled: both copies would add the "
    "same noise to two sums, whose difference has none. Create another one, which draws noise of "
    "its own. To save a PrivateStep, use its state_dict()."
)
#: Message for a training in a copy of its process.
FORKED = (
    "This private training was created in another process, of which this one is a copy: both would "
    "add the same noise to two sums, whose difference has none. Create it in the process that "
    "takes its steps."
)


class Unshared:
    """Object with secret keys, which only the process that created it can use.

    It cannot be copied or pickled, because a copy has the same keys.
    """

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise InputError in another process, such as a fork."""
        if os.getpid() != self._process:
            raise InputError(FORKED)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise InputError: copies and pickles are made by this method."""
        raise InputError(NOT_COPIED)
