"""Lower bounds on epsilon from guesses about canaries.

Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846): one training run includes each of m canaries
independently with probability 1/2. An attacker who sees the outcome guesses r of the coins. If the
trade-off curve of training is as claimed, few guesses are right (Mahloujifar, Melis and Chaudhuri
2024, arXiv 2410.22235).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from dpmac_cli.accounting.accountants import (
    delta_curve,
    times_noise,
    total_epsilon,
    type_two_errors,
)
from dpmac_cli.accounting.events import Count, TrainingEvent, merged
from dpmac_cli.config.records import AnyNumber
from dpmac_cli.errors import InputError
from dpmac_cli.release.facts import FORMAT
from dpmac_cli.release.report import Report, parse_file, read_report
from dpmac_cli.runs import folder
from dpmac_cli.runs.headers import Part

#: Confidence of the lower bound.
CONFIDENCE = 0.95
#: Factors of the claimed noise; neighbours differ by 0.5%.
FACTORS: list[float] = np.geomspace(1 / 64, 64, 1669).tolist()
WANTED = "Use the folder of an audit run."
#: Only every k-th point of a trade-off curve is used.
THINNING = 8


def curve_bound(
    events: Sequence[TrainingEvent], delta: float, canaries: int, guesses: int, right: int
) -> float:
    """Return epsilon of the least noisy version of this training that right guesses rule out, or 0.

    Versions have the same events with more or less noise. With 95% confidence, epsilon is above
    the bound, or the trade-off curve is not that of any version.

    Args:
        events: claimed events. delta: delta of epsilon.
        canaries: total number m, guessed or not.
        guesses: number r, chosen before the run, in [0, m]. right: right guesses v, in [0, r].
    """

    def possible(factor: float) -> bool:
        return not contradicts(times_noise(events, factor), canaries, guesses, right)

    least = bisect_left(FACTORS, True, key=lambda factor: not possible(factor))
    if least == len(FACTORS):
        return 0.0
    return total_epsilon(times_noise(events, FACTORS[least]), delta)


def contradicts(events: Sequence[TrainingEvent], canaries: int, guesses: int, right: int) -> bool:
    """Return whether right guesses rule the trade-off curve of events out, at 95% confidence.

    Args:
        events: claimed events. canaries, guesses, right: see :func:`curve_bound`.
    """
    beta = type_two_errors(delta_curve(merged(events)), THINNING)
    return not as_likely(beta, canaries, guesses, right)


def as_likely(
    curve: Callable[[float], float], canaries: int, guesses: int, right: int, level: float = 0.05
) -> bool:
    """Return whether at least v right guesses can have a probability of ``level``.

    Let R_j be the expected number of right guesses, and W_j that of wrong ones, in outcomes with j
    or more right, both over m. Then W_(j-1) >= f(1 - R_j) for the trade-off curve f. From the
    least R_v and W_v down to 0, the least that follows must not exceed R_0 + W_0 = r/m.

    Args:
        curve: f. canaries, guesses, right: see :func:`curve_bound`.
    """
    rights = level * right / canaries
    wrongs = level * (guesses - right) / canaries
    for j in range(right, 0, -1):
        more = max(0.0, curve(1 - rights) - wrongs)  # in outcomes with j - 1 right
        wrongs += more
        rights += more * (j - 1) / (guesses - j + 1)
        if rights + wrongs > guesses / canaries:
            return False
    return True


class Guesses(Part):
    """Outcome of an attack on canaries: the contents of audit.json, beside its version.

    Attributes:
        guesses: number r of guesses, chosen before the run.
        scores: score of every canary; higher if it was more likely included.
        coins: whether each canary was included.

    Raises:
        ValueError: a number is out of range, or scores and coins differ in number.
    """

    guesses: Count
    scores: tuple[AnyNumber, ...]
    coins: tuple[bool, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.guesses <= len(self.coins) == len(self.scores):
            raise ValueError("guesses, scores and coins do not match")
        return self

    @property
    def right(self) -> int:
        """Number of right guesses: the r/2 highest scores are guessed in, the r/2 lowest out."""
        order = np.argsort(self.scores, kind="stable")
        coins = np.asarray(self.coins)[order]
        lowest = self.guesses // 2
        highest = self.guesses - self.guesses // 2
        guessed_in = coins[len(coins) - highest :]
        guessed_out = coins[:lowest]
        return int(guessed_in.sum() + (~guessed_out).sum())

    def as_json(self) -> dict[str, Any]:
        """Return the contents of audit.json as JSON values: these attributes and the version."""
        return {"version": FORMAT, **self.model_dump()}


def verdict(
    guesses: Guesses, events: Sequence[TrainingEvent], delta: float, claimed: float | None
) -> dict[str, Any]:
    """Return what guesses prove beside a claim, as JSON values.

    Args:
        guesses: what the attack guessed.
        events: claimed events of training. delta: delta of epsilon.
        claimed: claimed upper bound on epsilon; None if it is not finite, which always holds.
    """
    canaries = len(guesses.coins)
    proven = curve_bound(events, delta, canaries, guesses.guesses, guesses.right)
    return {
        "claimed_epsilon": claimed,
        "delta": delta,
        "curve_bound": proven,
        "confidence": CONFIDENCE,
        "canaries": canaries,
        "guesses": guesses.guesses,
        "right": guesses.right,
        "holds": claimed is None or proven <= claimed,
    }


def read_audit(run: Path) -> tuple[Guesses, Report]:
    """Read the guesses of a finished run, and the report beside them, which makes the claim.

    Args:
        run: folder of the run, or its audit.json.

    Raises:
        InputError: one of the files is missing or damaged, or the run has no guarantee.
    """
    if (run / folder.CONFIG).is_file() and not (run / folder.AUDIT).exists():
        raise InputError(
            f"{run} has no {folder.AUDIT}: it is not an audit run, or has not ended. Start one "
            f"with dpmac train --canaries 200, or resume it: {folder.resume_command(run)}"
        )
    file, text = folder.read_run_file(run, folder.AUDIT, WANTED)
    complaint = "is not an audit written by dpmac"
    guesses = parse_file(Guesses, text, file, complaint, WANTED)
    report = read_report(file.parent)
    if report.delta is None:
        raise InputError(f"{file} {complaint} (delta: its run has no guarantee). {WANTED}")
    return guesses, report
