"""Private gradient descent: the steps of Algorithm 1 on one state. Prints nothing."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.geometry import NO_CLIPPING, Ball, joined, part_of
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.errors import DivergedError, ModelError
from dpmac_cli.models.fingerprint import DURING
from dpmac_cli.optim import Optimizer
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.randomness.sampling import Indices
from dpmac_cli.training.canaries import Canaries
from dpmac_cli.training.chunks import ChunkedSum
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.lineage import Training
from dpmac_cli.training.schedules import StepPlan
from dpmac_cli.training.state import Randomness, TrainState

#: Fraction of the clipping margin below 1 that the mechanism's rounding may use; the rest is for
#: the rounding of sums.
ROUNDING_SHARE = 0.01


class Descent:
    """Train the network of a clipped sum with one optimizer.

    Args:
        model: the network, which each step sets to training mode.
        sums: clipped sum over the records of a batch.
        hooks: canaries of an audit.
        ranks: the processes of the run, each of which sums its share of every batch.

    Attributes:
        notes: messages about how the network is run.

    Raises:
        ModelError: there are too many parameters for the mechanism.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        sums: ChunkedSum,
        optimizer: Optimizer,
        mechanism: GaussianMechanism,
        plan: StepPlan,
        randomness: Randomness,
        hooks: Sequence[Canaries] = (),
        ranks: Ranks | None = None,
    ) -> None:
        if not plan.private and mechanism.noise_multiplier > 0:
            raise ValueError("noise needs clipping, which is turned off without privacy")
        self.training: Training | None = None  # counts the steps that use records
        self._arithmetic = sums.arithmetic
        self.model, self.optimizer = model, optimizer
        self.geometry = optimizer.geometry() if plan.private else Ball(NO_CLIPPING)
        self.mechanism, self.plan, self.hooks = mechanism, plan, hooks
        self.randomness, self._ranks = randomness, ranks or Ranks()
        self._sums = sums
        theta, self.notes = sums.theta, sums.notes
        self._unchanged = sums.unchanged
        _check_rounding(mechanism, theta.numel())
        region, spread = self.geometry.start(theta)
        self.state = TrainState(
            theta=theta,
            moments=optimizer.start(theta),
            region=region,
            spread=spread,
            chunk=sums.chunk,
            average=theta.clone() if plan.recipe.ema else None,
        )
        self._scratch = torch.empty_like(region.centre)
        self._blocks = blocks(theta.numel(), theta.device)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of Algorithm 1. With an empty batch the step consists of noise only.

        Raises ModelError if the network is no longer the one that was validated.
        """
        self.model.train()  # as validated; the caller may have left it in evaluation mode
        self._unchanged.check()
        if self.training is not None:
            self.training.begin()
        with full_float32(self._arithmetic):
            batch = self._draw()
            clipped = self._clip_and_sum(batch)
            noise = self._begin()
            private = (self._release(clipped, block, noise) for block in self._blocks)
            self._end(list(map(self._update, private, self._blocks)))

    def _draw(self) -> Indices:
        """Draw this rank's share of the batch: line 3."""
        sampler = self.randomness.sampler
        drawn = None if sampler is None else sampler.draw(self.state.step + 1)
        batch = self._ranks.share(drawn)
        for hook in self.hooks:
            batch = hook.records(batch)
        return batch

    def _clip_and_sum(self, batch: Indices) -> Tensor:
        """Sum the clipped, centred gradients over all ranks, shape (d,): lines 4 to 8."""
        state, layers, step = self.state, self.randomness.layers, self.state.step + 1
        metric = RegionMetric(state.region, scratch=self._scratch)
        with nullcontext() if layers is None else layers.of(step):
            part, chunk = self._sums.of(batch, step, metric, state.chunk)
        self._unchanged.check(DURING)
        # Equal on all ranks, so differences in rounding between runs depend on public numbers.
        state.chunk = self._ranks.least(chunk)
        clipped = self._ranks.reduce(part)
        for hook in self.hooks:
            clipped = hook.add(step, clipped, self._sums.clipped_sum, metric)
        return clipped

    def _begin(self) -> SeededNormals | None:
        """Advance all scalar state to step t; return the noise of that step."""
        state, source = self.state, self.randomness.noise
        state.step += 1
        state.moments.step = state.step
        self.geometry.begin(state.step, state.spread)
        return None if source is None else source.at(state.step)

    def _release(self, clipped: Tensor, block: slice, noise: SeededNormals | None) -> PrivateMean:
        """Return the private mean of some coordinates, from the rank with noise: lines 9 to 11."""
        region = part_of(self.state.region, block)
        if noise is not None:
            private = self.mechanism.release(clipped[block], region, noise)
        else:
            private = self.mechanism.placeholder(region, clipped[block])
        self._ranks.broadcast(private.value)
        for hook in self.hooks:
            hook.hear(private, region, block)
        return private

    def _update(self, private: PrivateMean, block: slice) -> Ellipsoid:
        """Update some coordinates, lines 12 to 20; return their part of the next region."""
        state = self.state
        region, moments = part_of(state.region, block), part_of(state.moments, block)
        spread = None if state.spread is None else part_of(state.spread, block)
        theta, recipe = state.theta[block], self.plan.recipe
        eta = self.optimizer.lr * recipe.rate(state.step, self.plan.steps)
        if recipe.weight_decay:
            theta.mul_(1 - eta * recipe.weight_decay)
        self.optimizer.update(theta, eta, private, moments)  # lines 12 to 15
        return self.geometry.next(private, moments, region, spread)  # lines 16 to 20

    def _end(self, parts: list[Ellipsoid]) -> None:
        """Set the next region, whose parts are given, and average theta."""
        state = self.state
        if state.average is not None:
            state.average.lerp_(state.theta, 1 - self.plan.recipe.decay(state.step))
        state.region = joined(state.region, parts)
        for hook in self.hooks:
            hook.end()
        if state.step % self.plan.steps_per_epoch == 0:
            self._ranks.agree([state.theta, state.region.centre, state.region.inverse])

    def check_finite(self) -> None:
        """Raise DivergedError if a parameter is not finite. Synchronises with the device."""
        if not bool(torch.isfinite(self.state.theta).all()):
            raise DivergedError(self.state.step)

    def check_network(self) -> None:
        """Raise ModelError if the network is no longer the one that was validated.

        That includes buffers and frozen parameters, which are published without noise.
        """
        with self._unchanged.training():
            self._unchanged.check()
        self._unchanged.check_values()

    def public_values(self) -> dict[str, float]:
        """Return post-noise quantities for logs. Synchronises with the device.

        ``noise_norm`` is the expected norm of the noise in the next private mean,
        ||b|| sigma / B: a function of public values, unlike the norm of the actual noise.
        """
        state, mechanism = self.state, self.mechanism
        region, d = state.region, state.theta.numel()
        scale = region.scale.double().square().sum().item() * (d if region.is_ball else 1)
        ratio = mechanism.noise_multiplier / mechanism.expected_batch
        values = {"noise_norm": scale**0.5 * ratio if ratio else 0.0}
        if not region.is_ball and state.step > 0:
            values |= self.geometry.measures(region)
            values["centre_over_scale_norm"] = (region.centre / region.scale).double().norm().item()
        return values


def _check_rounding(mechanism: GaussianMechanism, size: int) -> None:
    """Raise ModelError if the mechanism's rounding could exceed the margin of the clipping."""
    added, margin = mechanism.rounding(size), 1 - clip_limit(mechanism.expected_batch)
    if added > ROUNDING_SHARE * margin:
        raise ModelError(
            f"The model has {size:,} parameters: rounding their sums to the grid of --secure could "
            f"add {added:.1g} to the sensitivity, but clipping leaves a margin of only "
            f"{margin:.1g} for all rounding. Use a smaller model, or leave out --secure."
        )
