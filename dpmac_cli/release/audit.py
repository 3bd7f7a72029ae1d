"""Lower bounds on epsilon from guesses about canaries.

Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846): one training run includes each of m canaries
independently with probability 1/2. An attacker who sees the outcome guesses r of the coins; if
training is (epsilon, delta)-differentially private, few guesses are right. If its whole trade-off
curve is as claimed, fewer are right (Mahloujifar, Melis and Chaudhuri 2024, arXiv 2410.22235).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dpmac_cli.accounting.accountants import (
    SIGMA_MAX,
    SIGMA_MIN,
    delta_curve,
    total_epsilon,
    type_two_errors,
)
from dpmac_cli.accounting.events import TrainingEvent, merged
from dpmac_cli.errors import InputError
from dpmac_cli.release.report import parse_file
from dpmac_cli.runs import folder

#: Confidence of the lower bound.
CONFIDENCE = 0.95
#: Largest bound to search for, and the precision of the search.
MOST, PRECISION = 50.0, 1e-9
#: Factors of the claimed noise; neighbours differ by 0.5%.
FACTORS: list[float] = np.geomspace(1 / 64, 64, 1669).tolist()
WANTED = "Use the folder of an audit run."
#: Only every k-th point of a trade-off curve is used.
THINNING = 8


def lower_bound(canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return the largest epsilon that right guesses rule out with 95% confidence, or 0.

    Args:
        canaries: total number m, guessed or not.
        guesses: number r, chosen before the run, in [0, m]. right: right guesses v, in [0, r].
        delta: delta of the guarantee.
    """
    from scipy.optimize import bisect  # noqa: PLC0415  (a second to import)

    def too_likely(epsilon: float) -> float:
        return chance(epsilon, canaries, guesses, right, delta) - (1 - CONFIDENCE)

    if too_likely(0.0) > 0:
        return 0.0
    return max(0.0, float(bisect(too_likely, 0.0, MOST, xtol=PRECISION)) - PRECISION)


def chance(epsilon: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return an upper bound on the probability of at least v right guesses under (epsilon, delta).

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


def curve_bound(
    events: Sequence[TrainingEvent], delta: float, canaries: int, guesses: int, right: int
) -> float:
    """Return epsilon of the least noisy version of this training that right guesses rule out.

    Versions have the same events with more or less noise. With 95% confidence, epsilon is above
    the bound, or the trade-off curve is not that of any version. It is 0 if none is ruled out.

    Args:
        events: claimed events. delta: delta of epsilon.
        canaries, guesses, right: see :func:`lower_bound`.
    """

    def with_noise(factor: float) -> tuple[TrainingEvent, ...]:
        sigmas = (min(max(e.noise_multiplier * factor, SIGMA_MIN), SIGMA_MAX) for e in events)
        return tuple(replace(e, noise_multiplier=s) for e, s in zip(events, sigmas, strict=True))

    def possible(factor: float) -> bool:
        beta = type_two_errors(delta_curve(merged(with_noise(factor))), THINNING)
        return as_likely(beta, canaries, guesses, right)

    least = bisect_left(FACTORS, True, key=lambda factor: not possible(factor))
    return total_epsilon(with_noise(FACTORS[least]), delta) if least < len(FACTORS) else 0.0


def as_likely(
    curve: Callable[[float], float], canaries: int, guesses: int, right: int, level: float = 0.05
) -> bool:
    """Return whether at least v right guesses can have a probability of ``level``.

    Let R_j be the expected number of right guesses, and W_j that of wrong ones, in outcomes with j
    or more right, both over m. Then W_(j-1) >= f(1 - R_j) for the trade-off curve f. From the
    least R_v and W_v down to 0, the least that follows must not exceed R_0 + W_0 = r/m.

    Args:
        curve: f. canaries, guesses, right: see :func:`lower_bound`.
    """
    rights, wrongs = level * right / canaries, level * (guesses - right) / canaries
    for j in range(right, 0, -1):
        more = max(0.0, curve(1 - rights) - wrongs)  # in outcomes with j - 1 right
        wrongs += more
        rights += more * (j - 1) / (guesses - j + 1)
        if rights + wrongs > guesses / canaries:
            return False
    return True


@dataclass(frozen=True)
class Audit:
    """Audit of a run: the contents of audit.json.

    Attributes:
        claimed: claimed upper bound on epsilon of the run; None if it is not finite.
        guesses: number r of guesses, chosen before the run.
        scores: score of every canary; higher if it was more likely included.
        coins: whether each canary was included.
        events: events of the claim.

    Raises:
        ValueError: a number is out of range, or scores and coins differ in number.
    """

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    claimed: float | None
    delta: float
    guesses: int
    scores: tuple[float, ...]
    coins: tuple[bool, ...]
    events: tuple[TrainingEvent, ...] = ()

    def __post_init__(self) -> None:
        if self.claimed is not None and self.claimed < 0:
            raise ValueError("claimed is negative")
        if not (0 < self.delta < 1 and 0 < self.guesses <= len(self.coins) == len(self.scores)):
            raise ValueError("delta, guesses, scores and coins do not match")

    @property
    def right(self) -> int:
        """Number of right guesses: the r/2 highest scores are guessed in, the r/2 lowest out."""
        order = np.argsort(self.scores, kind="stable")
        lowest, highest = self.guesses // 2, self.guesses - self.guesses // 2
        coins = np.asarray(self.coins)[order]
        return int(coins[len(coins) - highest :].sum() + (~coins[:lowest]).sum())

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on epsilon that the guesses prove for any training."""
        return lower_bound(len(self.coins), self.guesses, self.right, self.delta)

    @cached_property
    def curve_bound(self) -> float:
        """Lower bound on epsilon that the guesses prove for training with this trade-off curve."""
        if not self.events:
            return 0.0
        return curve_bound(self.events, self.delta, len(self.coins), self.guesses, self.right)

    @property
    def holds(self) -> bool:
        """Return whether the claim is at least the bound for its trade-off curve, if known."""
        # Use only one bound: the larger of both would reject more than 5% of correct claims.
        bound = self.curve_bound if self.events else self.lower_bound
        return self.claimed is None or bound <= self.claimed

    def as_json(self) -> dict[str, Any]:
        """Return the contents of audit.json."""
        return {"schema_version": 1, "canaries": len(self.coins), **asdict(self)}

    def verdict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "lower_bound": self.lower_bound,
            "curve_bound": self.curve_bound,
            "confidence": CONFIDENCE,
            "canaries": len(self.coins),
            "guesses": self.guesses,
            "right": self.right,
            "holds": self.holds,
        }


def read_audit(run: Path) -> Audit:
    """Read the audit of a finished run. Raises InputError if there is none, or it is damaged."""
    if (run / folder.CONFIG).is_file() and not (run / folder.AUDIT).exists():
        raise InputError(
            f"{run} has no {folder.AUDIT}: it is not an audit run, or has not ended. Start one "
            f"with dpmac train --canaries 1000, or resume it: {folder.resume_command(run)}"
        )
    file, text = folder.read_run_file(run, folder.AUDIT, WANTED)
    found = parse_file(Audit, text, file, "is not an audit written by dpmac", WANTED)
    if folder.vouched(file.parent, folder.AUDIT) is False:
        raise InputError(
            f"{file} is damaged: it does not match its checksum in {folder.SUMS}. Audit again."
        )
    return found
