"""What happened to the records, as a privacy event, and what it costs.

An event says how records were sampled and what noise was added; an accountant of dp-accounting
prices it: ``pld``, privacy loss distributions with the Connect-the-Dots discretisation
(Doroshenko et al. 2022), or ``rdp``, Renyi differential privacy (Mironov 2017). Both are rigorous
upper bounds, and each is for the adjacency that belongs to the sampler. Nothing here imports torch,
and dp-accounting, which takes a second to import, is loaded when the first price is asked for.
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.samplers import ADD_OR_REMOVE, REPLACE, SAMPLERS, ZERO_OUT
from dpmac_cli.errors import InputError

#: Accountants by name, and what each is.
ACCOUNTANTS: Mapping[str, str] = {
    "pld": f"pld (Connect-the-Dots, dp-accounting {version('dp-accounting')})",
    "rdp": f"rdp (Renyi orders up to 1024, dp-accounting {version('dp-accounting')})",
}
#: Below, the price is astronomical and its computation overflows; above, noise is all there is.
SIGMA_MIN, SIGMA_MAX = 0.01, 1e4

# Widths of the grid on which privacy loss is rounded up: every width gives an upper bound. The
# loss itself grows like 1/sigma^2, and the grid with it, so that small sigma costs no more time.
FINE = 1e-4
COARSE = 1e-3  # a tenth of the time, for a percent or less
FINE_FROM_SIGMA = 0.4
POINTS = 400_000  # of a grid for one composition: with more, time and memory run away
BLOCK = 300


@functools.lru_cache(maxsize=64)
def total_epsilon(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str | None = None,
    widest: float = FINE,
) -> float:
    """The price of several trainings on the same records, one after another or as branches.

    Args:
        events: under one adjacency.
        delta: in (0, 1).
        accountant: a key of :data:`ACCOUNTANTS`; None for the sampler's default.
        widest: the widest grid on which losses may be rounded up.

    Raises:
        InputError: the accountant cannot price them.
    """
    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    if choose_accountant(merged, accountant) == "pld":
        return _read_epsilon(_compose(tuple(merged), _width(merged, widest)), delta)
    return float(_rdp(merged).get_epsilon(delta))


@functools.lru_cache(maxsize=64)
def total_delta(
    events: tuple[TrainingEvent, ...], epsilon: float, accountant: str | None = None
) -> float:
    """The least delta shown to hold at an epsilon; 1 without noise. As :func:`total_epsilon`."""
    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return 1.0
    if choose_accountant(merged, accountant) == "pld":
        delta = _compose(tuple(merged), _width(merged)).get_delta_for_epsilon(epsilon)
    else:
        delta = _rdp_delta(merged, epsilon)
    return min(1.0, float(delta))


def repeat_and_select(events: tuple[TrainingEvent, ...], delta: float, mean: float) -> float:
    """Epsilon of the best of a random number of like trainings, by RDP.

    The number of trainings is Poisson with the given mean, and only the best is ever seen
    (Papernot and Steinke 2022, arXiv 2110.03620).

    Raises:
        InputError: see :func:`choose_accountant`.
    """
    from dp_accounting import dp_event  # noqa: PLC0415

    merged = _merged(events)
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    choose_accountant(merged, "rdp")
    accountant = rdp_accountant(merged[0].sampling.adjacency)
    once = dp_event.ComposedDpEvent([event.dp_event() for event in merged])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(once, mean, math.inf))
    return float(accountant.get_epsilon(delta))


def choose_accountant(events: Sequence[TrainingEvent], wanted: str | None = None) -> str:
    """The accountant asked for, or the samplers' default.

    Raises:
        InputError: it cannot price these events, or no accountant can price them together.
    """
    names = sorted({event.sampler for event in events})
    if len({SAMPLERS[name].adjacency for name in names}) > 1:
        raise InputError(
            f"{' and '.join(names)} sampling are priced under different adjacencies, so a run that "
            "used both has no price."
        )
    for event in events:
        if not SIGMA_MIN <= event.noise_multiplier <= SIGMA_MAX:
            raise InputError(
                f"A noise multiplier of {event.noise_multiplier:g} cannot be priced: it must be "
                f"at least {SIGMA_MIN:g} and at most {SIGMA_MAX:g}, or 0 for no noise at all."
            )
    offered = [name for name in ACCOUNTANTS if all(name in SAMPLERS[s].accountants for s in names)]
    if wanted is not None and wanted not in offered:
        raise InputError(
            f"The {wanted} accountant cannot price {' and '.join(names)} sampling; "
            f"{' or '.join(offered)} can."
        )
    return wanted or offered[0]


def _merged(events: Iterable[TrainingEvent], unit: str = "compositions") -> list[TrainingEvent]:
    """Add up the compositions (or steps) of equal mechanisms; each sum becomes an event's steps."""
    counts: dict[TrainingEvent, int] = {}
    for event in events:
        kind = replace(event, steps=0, steps_per_epoch=1)
        counts[kind] = counts.get(kind, 0) + getattr(event, unit)
    return [replace(kind, steps=count) for kind, count in counts.items() if count]


@functools.lru_cache(maxsize=2)
def _compose(merged: tuple[TrainingEvent, ...], width: float) -> Any:
    plds = [
        _repeated(_sampled_gaussian(event.rate, event.noise_multiplier, width), event.steps)
        for event in merged
    ]
    return functools.reduce(lambda a, b: a.compose(b), plds)


def _repeated(pld: Any, times: int) -> Any:
    """Composed with itself; very often by way of blocks, for the library goes step by step."""
    if times < BLOCK**2:
        return pld.self_compose(times)
    blocks, rest = divmod(times, BLOCK)
    most = pld.self_compose(BLOCK).self_compose(blocks)
    return most.compose(pld.self_compose(rest)) if rest else most


def _width(merged: Sequence[TrainingEvent], widest: float = FINE) -> float:
    """One grid for all: wide enough for the largest losses, else fine enough for the smallest.

    Rounding a composition's loss, about q/sigma, by a tenth of it adds 0.1% to epsilon; a coarse
    grid may round by three tenths, which adds 1%.
    """
    least_noise = min(event.noise_multiplier for event in merged)
    if least_noise < FINE_FROM_SIGMA:
        return COARSE * (FINE_FROM_SIGMA / least_noise) ** 2
    share = 0.1 * math.sqrt(widest / FINE)
    small = min(share * event.rate / event.noise_multiplier for event in merged)
    large = max(map(_largest_loss, merged))
    return min(widest, max(large / POINTS, small))


def _largest_loss(event: TrainingEvent) -> float:
    """Of one composition, with its noise 10 standard deviations out; sigma is not small here."""
    sigma = event.noise_multiplier
    return math.log1p(event.rate * math.expm1(10 / sigma + 0.5 / sigma**2))


@functools.lru_cache(maxsize=4)
def _sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=width
    )


def _read_epsilon(pld: Any, delta: float) -> float:
    import numpy as np  # noqa: PLC0415

    with np.errstate(over="ignore"):  # in the thousands a ratio of masses may overflow to inf
        return float(pld.get_epsilon_for_delta(delta))


def _rdp_delta(merged: Sequence[TrainingEvent], epsilon: float) -> float:
    try:
        return float(_rdp(merged).get_delta(epsilon))
    except ValueError:  # divergences below 1e-16 end in a logarithm of 0: more steps cost more
        return _rdp_delta([replace(event, steps=1000 * event.steps) for event in merged], epsilon)


def _rdp(merged: Sequence[TrainingEvent]) -> Any:
    """An RDP accountant that has seen the events."""
    accountant = rdp_accountant(merged[0].sampling.adjacency)
    for event in merged:
        accountant.compose(event.dp_event())
    return accountant


def rdp_accountant(adjacency: str) -> Any:
    """Return a fresh RDP accountant under an adjacency."""
    from dp_accounting import NeighboringRelation  # noqa: PLC0415
    from dp_accounting.rdp import rdp_privacy_accountant  # noqa: PLC0415

    # It leaves out the orders at which a series does not converge, and says so each time.
    logging.getLogger("absl").setLevel(logging.ERROR)
    relation = {
        ADD_OR_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        REPLACE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    return rdp_privacy_accountant.RdpAccountant(neighboring_relation=relation)
