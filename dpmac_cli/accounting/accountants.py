"""Accountants: the privacy cost of training events, by privacy loss distributions or by RDP.

``pld`` composes privacy loss distributions with the Connect-the-Dots discretisation (Doroshenko et
al. 2022), ``rdp`` Renyi differential privacy (Mironov 2017). Both are rigorous upper bounds, under
the adjacency of the events' sampler. dp-accounting, which takes a second to import, is loaded with
the first cost.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from dpmac_cli.accounting.events import TrainingEvent, merged
from dpmac_cli.accounting.samplers import ADD_OR_REMOVE, REPLACE, SAMPLERS, ZERO_OUT
from dpmac_cli.errors import InputError

#: Accountants by name, and what each is.
ACCOUNTANTS: Mapping[str, str] = {
    "pld": f"pld (Connect-the-Dots, dp-accounting {version('dp-accounting')})",
    "rdp": f"rdp (Renyi orders up to 1024, dp-accounting {version('dp-accounting')})",
}
#: Bounds of noise multipliers: below, the computation overflows; above, noise drowns everything.
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
    """Return epsilon of several trainings on the same records, in sequence or as forks.

    Args:
        events: under one adjacency.
        delta: in (0, 1).
        accountant: a key of :data:`ACCOUNTANTS`; None for the sampler's default.
        widest: the widest grid on which losses may be rounded up.

    Raises:
        InputError: the accountant cannot price them.
    """
    parts = merged(events)
    if not parts or _noiseless(parts):
        return math.inf if parts else 0.0
    if choose_accountant(parts, accountant) == "pld":
        return _read_epsilon(_compose(parts, _width(parts, widest)), delta)
    return float(_rdp(parts).get_epsilon(delta))


@functools.lru_cache(maxsize=64)
def total_delta(
    events: tuple[TrainingEvent, ...], epsilon: float, accountant: str | None = None
) -> float:
    """Return the least delta shown to hold at an epsilon; see :func:`total_epsilon`."""
    parts = merged(events)
    if not parts or _noiseless(parts):
        return 1.0 if parts else 0.0
    if choose_accountant(parts, accountant) == "pld":
        delta = _compose(parts, _width(parts)).get_delta_for_epsilon(epsilon)
    else:
        delta = _rdp_delta(parts, epsilon)
    return min(1.0, float(delta))


def repeat_and_select(events: tuple[TrainingEvent, ...], delta: float, mean: float) -> float:
    """Return epsilon of the best of a random number of such trainings, by RDP.

    The number of trainings is Poisson with the given mean, and only the best is published
    (Papernot and Steinke 2022, arXiv 2110.03620).

    Raises:
        InputError: see :func:`choose_accountant`.
    """
    from dp_accounting import dp_event  # noqa: PLC0415  (a second to load)

    parts = merged(events)
    if not parts or _noiseless(parts):
        return math.inf if parts else 0.0
    choose_accountant(parts, "rdp")
    accountant = rdp_accountant(parts[0].sampling.adjacency)
    once = dp_event.ComposedDpEvent([event.dp_event() for event in parts])
    accountant.compose(dp_event.RepeatAndSelectDpEvent(once, mean, math.inf))
    return float(accountant.get_epsilon(delta))


def choose_accountant(events: Sequence[TrainingEvent], wanted: str | None = None) -> str:
    """Return the accountant asked for, or the samplers' default.

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


def _noiseless(events: Sequence[TrainingEvent]) -> bool:
    return any(event.noise_multiplier == 0 for event in events)


@functools.lru_cache(maxsize=2)
def _compose(parts: tuple[TrainingEvent, ...], width: float) -> Any:
    """Return the privacy loss distribution of merged events, on a grid of a width."""
    return functools.reduce(lambda a, b: a.compose(b), [_part(event, width) for event in parts])


@functools.lru_cache(maxsize=8)
def _part(event: TrainingEvent, width: float) -> Any:
    one = _sampled_gaussian(event.rate, event.noise_multiplier, width)
    return _repeated(one, event.steps)


def _read_epsilon(pld: Any, delta: float) -> float:
    import numpy as np  # noqa: PLC0415  (mistakes are answered without it)

    with np.errstate(over="ignore"):  # in the thousands a ratio of masses may overflow to inf
        return float(pld.get_epsilon_for_delta(delta))


def _width(parts: Sequence[TrainingEvent], widest: float = FINE) -> float:
    """Return one grid width for all: wide enough for the largest losses, else fine enough.

    Rounding a composition's loss, about q/sigma, by a tenth of it adds 0.1% to epsilon; a coarse
    grid may round by three tenths, which adds 1%.
    """
    least_noise = min(event.noise_multiplier for event in parts)
    if least_noise < FINE_FROM_SIGMA:
        return COARSE * (FINE_FROM_SIGMA / least_noise) ** 2
    share = 0.1 * math.sqrt(widest / FINE)
    small = min(share * event.rate / event.noise_multiplier for event in parts)
    large = max(map(_largest_loss, parts))
    return min(widest, max(large / POINTS, small))


def _largest_loss(event: TrainingEvent) -> float:
    """Return the loss of one composition at 10 standard deviations; sigma is not small here."""
    sigma = event.noise_multiplier
    return math.log1p(event.rate * math.expm1(10 / sigma + 0.5 / sigma**2))


@functools.lru_cache(maxsize=4)
def _sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # noqa: PLC0415  (a second to load)

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=width
    )


def _repeated(pld: Any, times: int) -> Any:
    """Compose with itself, very often in blocks: the library composes step by step."""
    if times < BLOCK**2:
        return pld.self_compose(times)
    blocks, rest = divmod(times, BLOCK)
    most = pld.self_compose(BLOCK).self_compose(blocks)
    return most.compose(pld.self_compose(rest)) if rest else most


def _rdp_delta(parts: Sequence[TrainingEvent], epsilon: float) -> float:
    try:
        return float(_rdp(parts).get_delta(epsilon))
    except ValueError:  # divergences below 1e-16 end in a logarithm of 0: more steps cost more
        return _rdp_delta([replace(event, steps=1000 * event.steps) for event in parts], epsilon)


def _rdp(parts: Sequence[TrainingEvent]) -> Any:
    accountant = rdp_accountant(parts[0].sampling.adjacency)
    for event in parts:
        accountant.compose(event.dp_event())
    return accountant


def rdp_accountant(adjacency: str) -> Any:
    """Return an RDP accountant of dp-accounting under an adjacency."""
    from dp_accounting import NeighboringRelation  # noqa: PLC0415  (a second to load)
    from dp_accounting.rdp import rdp_privacy_accountant  # noqa: PLC0415  (a second to load)

    # It leaves out the orders at which a series does not converge, and says so each time.
    logging.getLogger("absl").setLevel(logging.ERROR)
    relation = {
        ADD_OR_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        REPLACE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    return rdp_privacy_accountant.RdpAccountant(neighboring_relation=relation)
