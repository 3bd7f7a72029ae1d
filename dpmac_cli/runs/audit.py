"""A lower bound on epsilon from guesses about canaries: what an attack proves of a claim.

Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846): one training run, in which each of m canaries
is included by a fair coin of its own. Whoever sees the outcome guesses r of the coins; if training
is (epsilon, delta)-differentially private, few guesses are right. Nothing here imports torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.config.settings import CANARY_KINDS
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder

#: That the true epsilon is no lower than the bound.
CONFIDENCE = 0.95
SCHEMA_VERSION = 1
#: The largest bound that is looked for, and how far from the largest that holds it may end.
MOST, PRECISION = 50.0, 1e-9
#: What reading a file leads to that is not as dpmac writes it.
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def lower_bound(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest epsilon that so many right guesses rule out, or 0.

    Args:
        canaries: m, all of them, guessed or not.
        guesses: r, chosen before the run, in [0, m].
        right: v, how many of them were right, in [0, r].
        delta: of the guarantee that is looked at.
        confidence: that the true epsilon is above.
    """
    risk = 1 - confidence
    if chance(0.0, canaries, guesses, right, delta) > risk:
        return 0.0
    low, high = 0.0, MOST
    while high - low > PRECISION:
        middle = (low + high) / 2
        if chance(middle, canaries, guesses, right, delta) <= risk:
            low = middle
        else:
            high = middle
    return low


def chance(epsilon: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    """At least the probability of so many right guesses, or more, under (epsilon, delta)-DP.

    P[V >= v] <= beta + 2 m delta alpha, with beta = P[Bin(r, p) >= v], p = 1 / (1 + e^-epsilon),
    and alpha the largest P[v > Bin(r, p) >= v - i] / i over i = 1, ..., v.
    """
    from scipy.stats import binom  # noqa: PLC0415  (a second to import)

    p = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, p))
    if right == 0:
        return beta
    i = np.arange(1, right + 1)
    between = np.cumsum(binom.pmf(right - i, guesses, p))  # v - 1, then v - 2 and v - 1, ...
    alpha = float((between / i).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


@dataclass(frozen=True)
class Audit:
    """What an attack on a run's guarantee had to go by, and how it was.

    Attributes:
        claimed: the run's epsilon, an upper bound; None if it has none that is finite.
        delta: of both.
        kind: of the canaries.
        guesses: r, chosen before the run.
        scores: of every canary; the higher, the likelier was it in.
        coins: which were in.
    """

    claimed: float | None
    delta: float
    kind: str
    guesses: int
    scores: tuple[float, ...]
    coins: tuple[bool, ...]

    @property
    def right(self) -> int:
        """How many guesses are: the highest half of r is guessed in, the lowest out."""
        order = np.argsort(self.scores, kind="stable")
        lowest, highest = self.guesses // 2, self.guesses - self.guesses // 2
        coins = np.asarray(self.coins)[order]
        return int(coins[len(coins) - highest :].sum() + (~coins[:lowest]).sum())

    @property
    def lower_bound(self) -> float:
        """What the guesses prove epsilon to be at least."""
        return lower_bound(len(self.coins), self.guesses, self.right, self.delta)

    @property
    def holds(self) -> bool:
        """Whether the claim survives."""
        return self.claimed is None or self.lower_bound <= self.claimed

    def as_json(self) -> dict[str, Any]:
        """As audit.json keeps it."""
        return {"schema_version": SCHEMA_VERSION, "canaries": len(self.coins), **vars(self)}

    def verdict(self) -> dict[str, Any]:
        """What comes of it, as JSON values."""
        return {
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "lower_bound": self.lower_bound,
            "confidence": CONFIDENCE,
            "canaries": len(self.coins),
            "kind": self.kind,
            "guesses": self.guesses,
            "right": self.right,
            "holds": self.holds,
        }


def read_audit(run: Path) -> Audit:
    """The audit of a finished run.

    Args:
        run: its folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    file = run / folder.AUDIT
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as failure:
        raise InputError(_no_audit(run)) from failure
    except OSError as failure:
        raise InputError(f"{file} cannot be read ({failure.strerror or failure}).") from failure
    try:
        found = _parsed(json.loads(text))
    except UNREADABLE as failure:
        raise InputError(f"{file} is not an audit as dpmac writes it ({failure}).") from failure
    if folder.vouched(run, folder.AUDIT) is False:
        raise InputError(
            f"{file} is damaged: it does not match its checksum in {folder.SUMS}. Audit again."
        )
    return found


def _no_audit(run: Path) -> str:
    if not (run / folder.CONFIG).is_file():
        return f"{run} is not a run folder: it holds no {folder.CONFIG}. Name that of an audit run."
    return (
        f"{run} holds no {folder.AUDIT}: it is no audit run, or has not ended. Start one with "
        f"dpmac train --canaries 1000, or go on: {folder.resume_command(run)}"
    )


def _parsed(values: Mapping[str, Any]) -> Audit:
    """Raises what is in UNREADABLE if anything is not as it is written."""
    if values["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"format {values['schema_version']}, and this one knows {SCHEMA_VERSION}")
    found = Audit(
        None if values["claimed"] is None else float(values["claimed"]),
        float(values["delta"]),
        str(values["kind"]),
        values["guesses"],
        tuple(map(float, values["scores"])),
        tuple(values["coins"]),
    )
    usable = (
        found.kind in CANARY_KINDS
        and 0 < found.delta < 1
        and (found.claimed is None or found.claimed >= 0)
        and len(found.scores) == len(found.coins) == values["canaries"]
        and all(coin is True or coin is False for coin in found.coins)
        and all(map(math.isfinite, found.scores))
        and type(found.guesses) is int
        and 0 < found.guesses <= len(found.coins)
    )
    if not usable:
        raise ValueError("its values do not go together")
    return found
