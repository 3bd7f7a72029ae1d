"""Rounds of a silo, kept on disk beside its account. Imports no torch."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dpmac_cli import files
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError

#: Files of a silo's folder.
ACCOUNT, ROUNDS, ANSWERED = "account.json", "silo.json", "answered.safetensors"
LOCK, PROBLEMS = ".lock", "problems.txt"


class Round(BaseModel):
    """A round that has begun.

    Attributes:
        run, number: name of the server's run, and number of the round in it.
        weights: SHA-256 of the weights that the server sent.
        sent: SHA-256 of the weights of the reply; None as long as there is none.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    number: int
    weights: str
    sent: str | None = None


class Rounds(BaseModel):
    """Settings and rounds of a silo, as they are in its folder. :func:`read_rounds` reads them.

    Attributes:
        settings: settings of the silo, as they must be in every process.
        sigma: noise multiplier, which was calibrated at the first start.
        lr: learning rate.
        begun: steps in the account when this was written, at least.
        rounds: rounds that have begun, in their order.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    settings: dict[str, Any]
    sigma: float
    lr: float
    begun: int = 0
    rounds: list[Round] = []

    @property
    def answered(self) -> int:
        """Return the number of rounds with a reply."""
        return sum(each.sent is not None for each in self.rounds)

    def begun_in(self, events: Iterable[TrainingEvent]) -> int:
        """Return the number of steps of the silo among the events of its account.

        They are those with its noise multiplier. An account that others share may have more.

        Args:
            events: events of the account.
        """
        return sum(event.steps for event in events if event.noise_multiplier == self.sigma)

    def lost(self, events: Iterable[TrainingEvent]) -> int:
        """Return the number of rounds without a reply, which cost as much as others.

        Args:
            events: events of the silo's account.
        """
        steps: int = self.settings["steps"]
        return self.begun_in(events) // steps - self.answered

    def left(self, events: Iterable[TrainingEvent]) -> int:
        """Return the number of rounds that epsilon still allows; 0 if all are taken.

        With an account that others share, there may be fewer by then.

        Args:
            events: events of the silo's account.
        """
        rounds: int = self.settings["rounds"]
        steps: int = self.settings["steps"]
        return max(0, rounds - self.begun_in(events) // steps)

    def enter(self, run: str, number: int, weights: str) -> Round:
        """Return the round of a request, which may have begun before.

        A new round is added to ``rounds``; it is not on disk until :meth:`write`.

        Args:
            run, number, weights: as in :class:`Round`.

        Raises:
            InputError: the round was begun with other weights, or is older than another.
        """
        for known in self.rounds:
            if (known.run, known.number) == (run, number):
                if known.weights != weights:
                    raise InputError(f"Round {number} was begun with other weights.")
                return known
        if any(known.run == run and known.number > number for known in self.rounds):
            raise InputError(f"Round {number} is older than the last one.")
        self.rounds.append(Round(run=run, number=number, weights=weights))
        return self.rounds[-1]

    def write(self, folder: Path) -> None:
        """Write to a silo's folder, with sync.

        Args:
            folder: the folder, which must exist.

        Raises:
            OSError: it cannot be written. The file before is unchanged.
        """
        text = files.with_checksum("silo", self.model_dump(mode="json"))
        files.write_atomically(folder / ROUNDS, text.encode(), files.PRIVATE_MODE)


def read_rounds(folder: Path) -> Rounds:
    """Return the rounds in a silo's folder, after their checksum was compared.

    Args:
        folder: folder of the silo.

    Raises:
        InputError: they are missing or damaged.
    """
    try:
        values = files.checked((folder / ROUNDS).read_bytes(), "silo")
        return Rounds.model_validate_json(json.dumps(values))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError) as failure:
        raise InputError(
            f"{folder / ROUNDS} is missing or damaged, so the rounds of this silo are unknown. Put "
            "the latest copy of the folder back."
        ) from failure


def check_counts(**counts: Any) -> None:
    """Raise InputError, which names the argument, for all but whole numbers from 1.

    Args:
        counts: numbers by the names of their arguments.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"{name} must be a whole number from 1, not {count!r}.")
