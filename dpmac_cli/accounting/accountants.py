"""Accountants: privacy cost of training events, from privacy loss distributions or RDP.

``pld`` composes privacy loss distributions with the Connect-the-Dots discretisation (Doroshenko et
al. 2022), ``rdp`` uses Renyi differential privacy (Mironov 2017). Both give rigorous upper bounds
under add-or-remove-one adjacency. So at deltas that are too small for the float64 arithmetic of
``pld``, the cost is the smaller of the two.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from numbers import Real
from typing import Any, TypeGuard

from dpmac_cli.accounting.allocation import allocated_gaussian
from dpmac_cli.accounting.events import (
    SIGMA_MAX,
    SIGMA_MIN,
    TrainingEvent,
    by_records,
    merged,
)
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.libraries import (
    dp_accounting,
    np,
    privacy_loss_distribution,
    rdp_privacy_accountant,
)

#: Accountants by name, with their method.
ACCOUNTANTS: Mapping[str, str] = {"pld": "Connect-the-Dots", "rdp": "Renyi orders up to 1024"}
DEFAULT_ACCOUNTANT = "pld"

# Widths of the grid to which privacy loss is rounded up; every width gives an upper bound. The
# loss and the grid grow like 1/sigma^2, so small sigma takes no more time.
FINE = 1e-4
COARSE = 1e-3  # a tenth of the time, with an error of at most 1%
#: Masses on a narrower grid are differences of deltas that are equal in float64.
NARROWEST = 1e-7
FINE_FROM_SIGMA = 0.4
POINTS = 400_000  # grid points of one composition: more take too much time and memory
BLOCK = 300
#: Bound on what rounding takes from delta, per composition, and from a Renyi divergence over its
#: order. Closed forms show at most 4e-17 and 3e-17 (docs/accounting.md). Of what is taken from
#: delta, half is for steps with more records than places (:mod:`.places`).
ROUNDING = 1e-15
#: Deltas below this many times the least one are also bounded by RDP, which can be tighter there.
NEAR = 100
#: Largest epsilon of the grid, and its number of points, which differ by 0.1%.
LARGEST_EPSILON, EPSILONS = 700.0, 20_000
#: A grid of epsilons from 0, and upper bounds on delta at each, which never rise.
Curve = tuple[Any, Any]
ENDLESS = 1e9  # above every loss on a grid
#: Costs to remember: a calibration asks for dozens, and a grid or a schedule repeats them.
REMEMBERED = 4096


@dataclass(frozen=True)
class Losses:
    """Pessimistic privacy loss distribution, with the rounding errors of its computation.

    Attributes:
        computed: the distribution of dp-accounting.
        rounding: bound on the error of every delta.
    """

    computed: Any  # of dp-accounting
    rounding: float  # bound on the error of every delta

    @property
    def least_delta(self) -> float:
        """Return the lower limit of delta, what is lost to rounding and truncation."""
        return float(self.deltas(ENDLESS))

    def epsilon(self, delta: float) -> float:
        """Return an upper bound of epsilon at a delta.

        Args:
            delta: delta in (0, 1). Below :attr:`least_delta`, epsilon is infinite.
        """
        if delta <= self.rounding:
            return math.inf
        return float(self.computed.get_epsilon_for_delta(delta - self.rounding))

    def deltas(self, epsilons: Any) -> Any:
        """Return upper bounds of delta at some epsilons.

        Args:
            epsilons: a float, or a float64 array of shape (epsilons,), which the result is then
                too.
        """
        if isinstance(epsilons, float):
            return self.computed.get_delta_for_epsilon(epsilons) + self.rounding
        remove = _divergences(self.computed._pmf_remove, epsilons)
        add = _divergences(self.computed._pmf_add, epsilons)
        return np.maximum(remove, add) + self.rounding


def _divergences(pmf: Any, epsilons: Any) -> Any:
    """Return hockey-stick divergences at several epsilons, as ``pmf.get_delta_for_epsilon`` does.

    Its sums of masses from the largest loss down, which it adds up one by one in Python, are
    cumulative sums here, in the same order.
    """
    dense = pmf.to_dense_pmf()
    losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
    counted = losses > epsilons.min()
    losses, masses = losses[counted], dense._probs[counted][::-1]
    upper = np.cumsum(np.append(dense._infinity_mass, masses))
    lower = np.cumsum(np.append(0.0, masses * np.exp(-losses[::-1])))
    above = len(losses) - np.searchsorted(losses, epsilons, side="right")
    return upper[above] - np.where(above > 0, np.exp(epsilons) * lower[above], 0.0)


def accountant_name(accountant: str) -> str:
    """Return the name of an accountant with its method and version, for a report.

    Args:
        accountant: a key of :data:`ACCOUNTANTS`.
    """
    return f"{accountant} ({ACCOUNTANTS[accountant]}, dp-accounting {version('dp-accounting')})"


def total_epsilon(
    events: tuple[TrainingEvent, ...],
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    widest: float = FINE,
) -> float:
    """Return epsilon of several trainings on the same records, in any order.

    For events on training and on test records, it is the larger of the two costs. Events must be
    fixed before any of their results is seen; for others see :func:`epsilon_at_order`. All must
    protect the same unit: an event does not know it, and costs of a record and of a person with all
    of theirs cannot be added.

    >>> event = TrainingEvent(sampling_rate=0.01, noise_multiplier=1.0, steps=1000)
    >>> round(total_epsilon((event,), delta=1e-5), 3)
    1.828

    Args:
        events: events in any order.
        delta: delta in (0, 1).
        accountant: a key of :data:`ACCOUNTANTS`.
        widest: widest grid to which losses may be rounded up.

    Raises:
        InputError: there is no such accountant, a noise multiplier is not supported, or see
            :func:`check_arguments`.
    """
    check_arguments(events, delta)
    return _priced(events, delta, accountant, widest)[0]


def used_accountant(
    events: tuple[TrainingEvent, ...], delta: float, accountant: str = DEFAULT_ACCOUNTANT
) -> str:
    """Return the accountant that :func:`total_epsilon` is from: RDP at very small deltas.

    Args:
        events, delta, accountant: as for :func:`total_epsilon`, which raises the same errors.

    Returns:
        A key of :data:`ACCOUNTANTS`: ``accountant`` itself, unless RDP has the smaller cost.
    """
    return _priced(events, delta, accountant, FINE)[1]


@functools.lru_cache(maxsize=REMEMBERED)
def _priced(
    events: tuple[TrainingEvent, ...], delta: float, accountant: str, widest: float
) -> tuple[float, str]:
    """Return the larger cost of the two splits, and its accountant; see :func:`total_epsilon`."""
    if accountant not in ACCOUNTANTS:
        raise InputError(f"There is no accountant '{accountant}'. Known: {', '.join(ACCOUNTANTS)}.")
    splits = by_records(merged(events))
    costs = [_cost(parts, delta, accountant, widest) for parts in splits]
    return max(costs, key=lambda cost: cost[0], default=(0.0, accountant))


def _cost(
    parts: tuple[TrainingEvent, ...], delta: float, accountant: str, widest: float
) -> tuple[float, str]:
    """Return epsilon of merged events on one split, and the accountant that it is from."""
    if noiseless(parts):
        return math.inf, accountant
    check_noise(parts)
    if accountant == "rdp":
        return _by_rdp(parts, delta), "rdp"
    with np.errstate(over="ignore"):  # for huge epsilon a ratio of masses may overflow to inf
        losses = loss_distribution(parts, widest)
        cost = losses.epsilon(delta), "pld"
        near = delta < NEAR * losses.least_delta
    return min(cost, (_by_rdp(parts, delta), "rdp")) if near else cost


def order_for(epsilon: float, delta: float) -> float:
    """Return the Renyi order at which a budget allows most Gaussian mechanisms, from 1.1 to 512.

    At order a, a mechanism of divergence a r costs a r + log(1 - 1/a) - log(delta a) / (a - 1)
    (Canonne, Kamath and Steinke 2020, Proposition 12), so r may be what is left of epsilon over a.

    Args:
        epsilon: epsilon of the budget.
        delta: delta of the budget, in (0, 1).
    """

    def divergence(order: float) -> float:
        conversion = math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        return (epsilon - conversion) / order

    return max((1 + tenth / 10 for tenth in range(1, 5111)), key=divergence)


def epsilon_at_order(events: tuple[TrainingEvent, ...], delta: float, order: float) -> float:
    """Return epsilon of events on the same records, also if each was chosen after earlier results.

    Renyi divergences of one order, fixed beforehand, add up for such events (Feldman and Zrnic
    2021), where privacy loss distributions do not in general.

    Args:
        events: events in any order; () costs 0.
        delta: delta in (0, 1).
        order: Renyi order above 1, such as that of :func:`order_for`.

    Raises:
        InputError: a noise multiplier is not supported.
    """
    parts = merged(events)
    if noiseless(parts):
        return math.inf
    check_noise(parts)
    return _by_rdp(parts, delta, [order]) if parts else 0.0


def _by_rdp(
    parts: Sequence[TrainingEvent], delta: float, orders: Sequence[float] | None = None
) -> float:
    """Return epsilon of merged, noisy events by RDP, at the best of some orders."""
    by_rdp = rdp_privacy_accountant.RdpAccountant(orders)
    # One more Gaussian mechanism covers rounding: its divergence is ROUNDING per composition,
    # times the order. Without it a divergence too small for float64 would cost nothing.
    compositions = sum(event.compositions for event in parts)
    rounding = dp_accounting.GaussianDpEvent(math.sqrt(0.5 / ROUNDING / compositions))
    mechanisms = [event.dp_event() for event in parts]
    composed = dp_accounting.ComposedDpEvent([*mechanisms, rounding])
    # Steps with more records than places have a share of delta.
    remaining = delta - sum(event.overflow * event.compositions for event in parts)
    if remaining <= 0:
        return math.inf
    # It leaves out the orders at which a series does not converge, with a warning each time.
    with _only_errors(logging.getLogger("absl")):
        by_rdp.compose(composed)
        return float(by_rdp.get_epsilon(remaining))


@contextlib.contextmanager
def _only_errors(logger: logging.Logger) -> Iterator[None]:
    """Log no warnings, and restore the level of the logger afterwards."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_arguments(events: object, delta: object, epsilon: object = 1.0) -> None:
    """Reject arguments of a privacy cost that are of another type, or no possible number.

    A comparison with NaN is never true, so a cost of NaN would exceed no budget.

    Args:
        events: what must be a tuple of events.
        delta: what must be a number from 0, where every epsilon is infinite, to 1, where it is 0.
        epsilon: what must be a number above 0.

    Raises:
        InputError: lists what is not.
    """
    errors = list[str]()
    if not isinstance(events, tuple) or not all(isinstance(e, TrainingEvent) for e in events):
        errors.append(f"events must be a tuple, such as (TrainingEvent(...),), not {events!r}.")
    if not _is_number(delta) or not 0 <= delta <= 1:
        errors.append(f"delta must be a number between 0 and 1, not {delta!r}.")
    if not _is_number(epsilon) or not epsilon > 0:
        errors.append(f"epsilon must be a number above 0, not {epsilon!r}.")
    raise_errors(errors)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real)  # also one of NumPy


def check_noise(events: Sequence[TrainingEvent]) -> None:
    """Reject a noise multiplier that no accountant supports.

    Args:
        events: events with noise, of which each is checked.

    Raises:
        InputError: one is below :data:`~.events.SIGMA_MIN` or above :data:`~.events.SIGMA_MAX`.
    """
    for event in events:
        if not SIGMA_MIN <= event.noise_multiplier <= SIGMA_MAX:
            raise InputError(
                f"A noise multiplier of {event.noise_multiplier:g} is not supported: it must be "
                f"at least {SIGMA_MIN:g} and at most {SIGMA_MAX:g}, or 0 for no noise."
            )


def times_noise(events: Iterable[TrainingEvent], factor: float) -> tuple[TrainingEvent, ...]:
    """Return events with their noise times a factor, within the range that is supported.

    Args:
        events: events with noise, which are not changed.
        factor: factor above 0.

    >>> [event.noise_multiplier for event in times_noise([TrainingEvent(0.1, 2.0, 1)], 1.5)]
    [3.0]
    """
    changed = []
    for event in events:
        sigma = min(max(event.noise_multiplier * factor, SIGMA_MIN), SIGMA_MAX)
        changed.append(replace(event, noise_multiplier=sigma))
    return tuple(changed)


def noiseless(events: Sequence[TrainingEvent]) -> bool:
    """Return whether any part was trained without noise, so that epsilon is infinite.

    Args:
        events: events on the same records; False for none.
    """
    return not all(event.noisy for event in events)


@functools.lru_cache(maxsize=2)
def loss_distribution(parts: tuple[TrainingEvent, ...], widest: float) -> Losses:
    """Return the pessimistic privacy loss distribution of at least one merged, noisy event.

    Args:
        parts: events of one split, see :func:`~.events.merged` and :func:`~.events.by_records`.
        widest: widest grid to which losses may be rounded up, such as :data:`FINE`.
    """
    width = _width(parts, widest)
    computed = functools.reduce(lambda a, b: a.compose(b), [_part(e, width) for e in parts])
    return Losses(computed, ROUNDING * sum(event.compositions for event in parts))


@functools.lru_cache(maxsize=8)
def _part(event: TrainingEvent, width: float) -> Any:
    """Return the privacy loss distribution of one event, on a grid of some width."""
    if event.sampling.once_an_epoch:
        steps = event.steps_per_epoch
        one = allocated_gaussian(steps, event.noise_multiplier, width)
    else:
        one = _sampled_gaussian(event.rate, event.noise_multiplier, width)
    return _repeated(one, event.compositions)


def _width(parts: Sequence[TrainingEvent], widest: float) -> float:
    """Return one grid width for all parts, as fine as needed unless the largest losses limit it.

    Rounding a composition's loss, about q/sigma, by a tenth of it adds 0.1% to epsilon; a coarse
    grid may round by three tenths, which adds 1%.
    """
    least_noise = min(event.noise_multiplier for event in parts)
    if least_noise < FINE_FROM_SIGMA:
        return COARSE * (FINE_FROM_SIGMA / least_noise) ** 2
    share = 0.1 * math.sqrt(widest / FINE)
    small = min(share * event.rate / event.noise_multiplier for event in parts)
    large = max(map(_largest_loss, parts))
    return min(widest, max(large / POINTS, small, NARROWEST))


def _largest_loss(event: TrainingEvent) -> float:
    """Return the loss of one composition at 10 standard deviations; sigma is not small here."""
    sigma = event.noise_multiplier
    return math.log1p(event.rate * math.expm1(10 / sigma + 0.5 / sigma**2))


@functools.lru_cache(maxsize=4)
def _sampled_gaussian(sampling_rate: float, noise_multiplier: float, width: float) -> Any:
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=width
    )


def _repeated(pld: Any, times: int) -> Any:
    """Compose with itself; many compositions use blocks, as the library works step by step."""
    if times < BLOCK**2:
        return pld.self_compose(times)
    blocks, rest = divmod(times, BLOCK)
    most = pld.self_compose(BLOCK).self_compose(blocks)
    return most.compose(pld.self_compose(rest)) if rest else most


@functools.lru_cache(maxsize=4)
def delta_curve(parts: tuple[TrainingEvent, ...]) -> Curve:
    """Return a grid of epsilons from 0, and upper bounds on delta at each, for merged events.

    Without noise, every delta is 1.

    Args:
        parts: events on the same records, see :func:`~.events.merged`.

    Returns:
        Two float64 arrays of equal shape; the deltas never rise.

    Raises:
        InputError: a noise multiplier is not supported.
    """
    epsilons = np.append(0.0, np.geomspace(1e-6, LARGEST_EPSILON, EPSILONS))
    if noiseless(parts):
        return epsilons, np.ones_like(epsilons)
    check_noise(parts)
    deltas = np.zeros_like(epsilons)
    with np.errstate(over="ignore"):
        for split in by_records(parts):
            losses = loss_distribution(split, FINE)
            deltas = np.maximum(deltas, losses.deltas(epsilons))
    falling = np.maximum.accumulate(deltas[::-1])[::-1]
    return epsilons, np.clip(falling, 0.0, 1.0)


def type_two_errors(curve: Curve, thinning: int = 1) -> Callable[[float], float]:
    """Return a lower bound on the type II error, a convex function of the type I error.

    For every epsilon and its delta, a test with errors alpha and beta satisfies
    ``alpha + e^epsilon beta >= 1 - delta`` and the same with alpha and beta exchanged (Wasserman
    and Zhou 2010; Dong, Roth and Su 2022). Each is a valid bound, so the maximum over a grid is a
    bound, too.

    Args:
        curve: epsilons and deltas, see :func:`delta_curve`.
        thinning: k, if only every k-th grid point is used, which is faster but less tight.
    """
    epsilons, deltas = (values[::thinning] for values in curve)
    factors, likely = np.exp(epsilons), 1 - deltas

    def beta(alpha: float) -> float:
        one = (likely - factors * alpha).max()
        exchanged = ((likely - alpha) / factors).max()
        return float(max(one, exchanged, 0.0))

    return beta
