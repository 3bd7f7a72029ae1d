"""State of a :class:`.PrivateStep`: what it must have, and the account that goes on from it."""

from collections.abc import Mapping
from dataclasses import replace

from dpmac_cli.accounting.account import NO_TRAINING, Account
from dpmac_cli.accounting.events import covers
from dpmac_cli.errors import InputError

#: Entries of the state of a :class:`.PrivateStep`, with tensors on the CPU. No key is in it.
#: ``trainings`` are those of the network, the last of which is the one that was saved.
SAVED = frozenset({"tensors", "numbers", "trainings", "structure", "public", "lr"})


def check_state(saved: object) -> None:
    """Raise InputError for what is not a state of :class:`.PrivateStep`."""
    names = saved.keys() if isinstance(saved, Mapping) else set()
    missing = sorted(SAVED - names)
    if missing:
        raise InputError(
            f"This is not a state of PrivateStep: it has no {', '.join(missing)}. Pass what "
            "step.state_dict() returned, or what torch.load read of it. The state_dict of a "
            "network goes to network.load_state_dict(...), which does not know what its training "
            "cost."
        )


def check_counts(shared: Account, last: Account, taken: int | None) -> None:
    """Raise InputError unless an account counts a saved training."""
    if taken is not None:
        raise InputError("The account counts the steps that were taken. Leave taken out.")
    if last.number != shared.number or not covers(shared.own, last.own):
        raise InputError(
            "The account does not count what the training of this state did: it is the account of "
            "other records, or an older copy was restored. Use the one that the training began "
            "with, in its latest copy."
        )


def with_lost(last: Account, earlier: list[Account], taken: int | None) -> Account:
    """Return the last part of a training that took a number of steps in all. Raises InputError."""
    if last.event == NO_TRAINING:
        raise InputError(
            "The state is of a training with an account of its records, which counts the steps "
            "since. Pass it: PrivateStep(..., account=Account.open(path))."
        )
    before = sum(part.done.steps for part in earlier if part.series == last.series)
    least, most = before + last.done.steps, before + last.event.steps
    if taken is None or not least <= taken <= most:
        raise InputError(
            f"taken is {taken}, but the state holds {least} of {most} steps. Set it to the number "
            "of steps that were taken in all, also after the state was saved."
        )
    return replace(last, begun=last.base + taken - before)
