"""One private step, Algorithm 1 from top to bottom: sample, clip and sum, add noise, update.

Records may come from anywhere: a dataset, or the batches of a program.
"""

import torch
from torch import Tensor

from dpmac_cli.accounting.account import Account
from dpmac_cli.config.class_weights import mean_weight
from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.geometry import (
    NO_CLIPPING,
    Ball,
    Spread,
    at_places,
    geometry_of,
    joined,
    part_of,
)
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean, SecureMechanism
from dpmac_cli.dp.moments import Moments
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.torch_errors import torch_failures_explained
from dpmac_cli.errors import (
    DivergedError,
    ModelError,
)
from dpmac_cli.randomness.keystream import Unshared
from dpmac_cli.randomness.noise import Noise, SeededNormals
from dpmac_cli.randomness.sampling import Indices, Sampler
from dpmac_cli.training.chunks import ChunkedSum
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.schedules import decay, rate
from dpmac_cli.training.state import TrainState

#: Fraction of the clipping margin below 1 that the mechanism's rounding may use; the rest is for
#: the rounding of sums.
ROUNDING_SHARE = 0.01


class Step(Unshared):
    """Private steps of one network. :meth:`step` is Algorithm 1, in four calls.

    Line numbers in this module are those of Algorithm 1 of the paper. In its symbols, d is the
    number of parameters, B the expected batch size, g a gradient and m the centre of the region.
    Call :meth:`take` for each step, up to ``steps``; the account ends it earlier.

    Args:
        sums: clipped sum over the records of a step, and the network.
        plan: settings of the steps, and the optimizer: geometry of the clipping, and rule of the
            update.
        steps: last step.
        mechanism: adds the noise.
        sampler: draws the records, or units, of each step, or names those of a batch that a loader
            drew; None at ranks other than the first.
        noise: random numbers of the mechanism; None at ranks other than the first.
        account: counts the steps that use records, before they begin, at the first rank.
        ranks: the processes of the run, each of which sums its share of every batch; None for one.

    Attributes:
        ranks: the processes of the run, this one alone by default.
        state: parameters, moments and region, all computed after noise.
        notes: messages about how the network is run.

    Raises:
        ModelError: there are too many parameters for the mechanism.
        ValueError: the plan is without privacy, and the mechanism adds noise.
    """

    def __init__(
        self,
        sums: ChunkedSum,
        *,
        plan: Plan,
        steps: int,
        mechanism: GaussianMechanism,
        sampler: Sampler | None,
        noise: Noise | None,
        account: Account,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        if not plan.private and mechanism.noisy:
            raise ValueError("noise needs clipping, which is turned off without privacy")
        self.sums, self.model, self.notes = sums, sums.model, sums.notes
        self.sampler, self.mechanism, self.noise = sampler, mechanism, noise
        self.geometry = geometry_of(plan.optimizer) if plan.private else Ball(NO_CLIPPING)
        self.plan, self.steps, self.account = plan, steps, account
        self.ranks = ranks or Ranks()
        theta = sums.theta
        _check_rounding(mechanism, sums.size)
        region, spread = self._first_region()
        self.state = TrainState(
            theta=theta,
            moments=Moments.before(theta, plan.optimizer.keeps),
            region=region,
            spread=spread,
            chunk=sums.chunk,
            average=theta.clone() if plan.settings.ema else None,
        )
        self._scratch = torch.empty_like(region.centre)
        # Without rows of embeddings that are padding, so nothing below sees them.
        self._blocks = blocks(theta.numel(), theta.device, sums.skipped)

    def _first_region(self) -> tuple[Ellipsoid, Spread | None]:
        """Return the first region and its spread, line 1, for the coordinates that are trained.

        Rows of embeddings that are padding are outside of it: they have no gradient and no noise.
        """
        theta = self.sums.theta
        if not self.sums.skipped:
            return self.geometry.start(theta)
        trained = self.sums.trained_mask
        region, spread = self.geometry.start(theta[trained])
        return at_places(region, trained), spread and at_places(spread, trained)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of Algorithm 1. With an empty batch the step consists of noise only.

        If it fails after it has begun, the account counts it.

        Raises:
            BudgetError: the account allows no further step. Nothing was read.
            ModelError: the network is no longer the one that was validated.
            RunError: memory ran out with a single record, or a rank has stopped.
        """
        self.sums.check()
        if self.ranks.leads:  # the first rank counts for all, before any record is read
            self.account.begin(self.account.steps(1))
        with full_float32(self.sums.arithmetic):
            batch = self._draw()
            clipped = self._clip_and_sum(batch)
            noise = self._begin()
            if noise is not None:  # at the first rank
                private = (self._release(clipped, block, noise) for block in self._blocks)
                self._end(list(map(self._update, private, self._blocks)))
            self.share_state()

    def take(self) -> int:
        """Take a step and return its number; compare the network at the end of each epoch.

        Raises:
            BudgetError: the account allows no further step. Nothing was read.
            DivergedError: a weight is no longer finite.
            ModelError: the network is no longer the one that was validated.
            RunError: memory ran out with a single record, or the device failed.
        """
        with torch_failures_explained(), torch.inference_mode(False):
            self.step()
            if self.state.step % self.plan.event.steps_per_epoch == 0:
                self.check_finite()
                self.check_network()
        return self.state.step

    def _draw(self) -> Indices:
        """Draw this rank's share of the batch, by number: line 3."""
        drawn = None if self.sampler is None else self.sampler.draw(self.state.step + 1)
        return self.ranks.share(drawn)

    def _clip_and_sum(self, batch: Indices) -> Tensor:
        """Sum the clipped, centred gradients over all ranks, shape (d,): lines 4 to 8.

        Reads the records chunk by chunk. For each, the gradient g of its loss (a unit: the mean
        over its records) adds c (g - m), with c <= 1, or nothing if it is not finite.
        """
        state, step = self.state, self.state.step + 1
        metric = RegionMetric(state.region, scratch=self._scratch)
        part, chunk = self.sums.of(batch, step, metric, state.chunk)
        # Equal on all ranks, so differences in rounding between runs depend on public numbers.
        state.chunk = self.ranks.least(chunk)
        return self.ranks.reduce(part)

    def _begin(self) -> SeededNormals | None:
        """Advance all scalar state to step t; return the noise of that step."""
        state = self.state
        state.step += 1
        state.moments.step = state.step
        self.geometry.begin(state.step, state.spread)
        return None if self.noise is None else self.noise.at(state.step)

    def _release(self, clipped: Tensor, block: slice, noise: SeededNormals) -> PrivateMean:
        """Return the private mean of some coordinates: lines 9 to 11.

        Args:
            clipped: the sum over all ranks, shape (d,), whose block is consumed.
            block: coordinates.
            noise: random numbers of this step, each of which is used once.
        """
        region = part_of(self.state.region, block)
        private = self.mechanism.release(clipped[block], region, noise)
        return private

    def _update(self, private: PrivateMean, block: slice) -> Ellipsoid:
        """Update some coordinates, lines 12 to 20; return their part of the next region.

        Args:
            private: private mean of these coordinates. From here on everything is post-processing.
            block: coordinates.
        """
        state = self.state
        region, moments = part_of(state.region, block), part_of(state.moments, block)
        spread = None if state.spread is None else part_of(state.spread, block)
        theta, settings, optimizer = state.theta[block], self.plan.settings, self.plan.optimizer
        eta = optimizer.lr * rate(settings, state.step, self.steps)
        if settings.weight_decay:
            theta.mul_(1 - eta * settings.weight_decay)
        if optimizer.proportional:
            eta /= mean_weight(settings)
        optimizer.update(theta, eta, private, moments)  # lines 12 to 15
        return self.geometry.next(private, moments, region, spread)  # lines 16 to 20

    def _end(self, parts: list[Ellipsoid]) -> None:
        """Set the next region, whose parts are given, and average theta."""
        state = self.state
        ema = self.plan.settings.ema
        if state.average is not None and ema is not None:
            state.average.lerp_(state.theta, 1 - decay(ema, state.step))
        state.region = joined(state.region, parts)

    def share_state(self) -> None:
        """Give all ranks the first one's parameters and region, so that they clip to the same.

        Every rank calls it. With one process it does nothing. Raises RunError if a rank has
        stopped.
        """
        region = self.state.region
        for tensor in (self.state.theta, region.centre, region.inverse, region.factor):
            self.ranks.broadcast(tensor)

    def check_finite(self) -> None:
        """Reject a state with a parameter that is not finite. Synchronises with the device.

        Raises:
            DivergedError: one is not, with the number of steps taken.
        """
        if not bool(torch.isfinite(self.state.theta).all()):
            raise DivergedError(self.state.step)

    def check_network(self) -> None:
        """Reject a network that is no longer the one that was validated.

        That includes buffers and frozen parameters, which are published without noise.

        Raises:
            ModelError: names what has changed.
        """
        with self.sums.unchanged.as_validated():
            self.sums.unchanged.check()
        self.sums.unchanged.check_values()


def _check_rounding(mechanism: GaussianMechanism, size: int) -> None:
    """Raise ModelError if the mechanism's rounding could exceed the margin of the clipping."""
    added, margin = mechanism.rounding(size), 1 - clip_limit(mechanism.expected_batch)
    if added > ROUNDING_SHARE * margin:
        raise ModelError(
            f"The model has {size:,} parameters: rounding their sums to the grid of {{secure}} "
            f"could add {added:.1g} to the sensitivity, but clipping leaves a margin of only "
            f"{margin:.1g} for all rounding. Use a smaller model, or leave out {{secure}}."
        )


def mechanism_of(plan: Plan) -> GaussianMechanism:
    """Return the mechanism with the noise of a plan.

    It draws from floating-point numbers, or on a grid of integers with the setting ``secure``.

    Args:
        plan: plan of the run, whose event has the noise multiplier.

    Raises:
        ValueError: a private run has no noise.
    """
    if plan.private and not plan.event.noisy:
        raise ValueError("a private run needs noise")
    kind = SecureMechanism if plan.settings.secure else GaussianMechanism
    return kind.of(plan.event, plan.settings.batch_size)
