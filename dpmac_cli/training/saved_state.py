"""State of a :class:`.PrivateStep`: what it must have, and the account that goes on from it."""

from collections.abc import Mapping
from dataclasses import replace

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import covers
from dpmac_cli.accounting.planned_training import NO_TRAINING
from dpmac_cli.errors import InputError
from dpmac_cli.training.carried_accounts import steps_of

#: Entries of the state of a :class:`.PrivateStep`, with tensors on the CPU. No key is in it.
#: ``trainings`` are those of the network, the last of which is the one that was saved.
SAVED = frozenset({"tensors", "numbers", "trainings", "structure", "public", "lr"})


def check_state(saved: object) -> None:
    """Reject what is not a state of :class:`.PrivateStep`. Values are not checked.

    Args:
        saved: what a program passed.

    Raises:
        InputError: it is no mapping with the keys :data:`SAVED`, with those that are missing.
    """
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
    """Reject an account of records that does not count a saved training.

    Args:
        shared: the account of the records.
        last: account of the training in the state.
        taken: what the program said of steps, which must be None: the account counts them.

    Raises:
        InputError: it is another account, or counts less than the state.
    """
    if taken is not None:
        raise InputError("The account counts the steps that were taken. Leave taken out.")
    if last.number != shared.number or not covers(shared.own, last.own):
        raise InputError(
            "The account does not count what the training of this state did: it is the account of "
            "other records, or an older copy was restored. Use the one that the training began "
            "with, in its latest copy."
        )


def with_lost(last: Account, earlier: list[Account], taken: int | None) -> Account:
    """Return the last part of a training that took a number of steps in all.

    Args:
        last: account of the part that was saved, which may have begun further steps since.
        earlier: accounts before it, of which those of the same series are parts of the training.
        taken: number of steps that the whole training took, from its first one on.

    Raises:
        InputError: ``taken`` is missing or not possible, or the training had an account of its
            records.
    """
    if last.event == NO_TRAINING:
        raise InputError(
            "The state is of a training with an account of its records, which counts the steps "
            "since. Pass it: PrivateStep(..., account=Account.open(path))."
        )
    before = steps_of(earlier, last.series)
    least, most = before + last.done.steps, before + last.event.steps
    if taken is None or not least <= taken <= most:
        raise InputError(
            f"taken is {taken}, but the state holds {least} of {most} steps. Set it to the number "
            "of steps that were taken in all, also after the state was saved."
        )
    return replace(last, begun=last.base + taken - before)
