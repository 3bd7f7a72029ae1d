"""Gradient canaries: an attack on clipping and noise themselves, as a check of the engine.

A canary is no record, but a gradient along one coordinate that is added to the sum of a step, in or
out by a secret coin. It skips what crafted records pass through (reader, features, network and
loss), and disturbs no other: 1,000 of them find a third of the noise in one run.
:mod:`dpmac_cli.release.audit` converts guesses to a lower bound on epsilon. Scores use only
released values.

:func:`attacked` trains a plan with canaries: its steps are those of :class:`AttackedTrainer`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.geometry import part_of
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.keystream import Keys, generator, make_keys
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.randomness.sampling import Indices, KeyedSampler
from dpmac_cli.release.audit import Guesses
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.trainer import Trainer

#: Norm of every other canary's gradient; the clipping bound is 1.
FAR = 100.0
#: The median of |z| for a standard normal z.
MEDIAN = 0.6744897501960817
#: Lower bound on the estimated noise, which keeps scores finite.
LEAST_NOISE = 1e-6


class Canaries:
    """K = ``count`` records from n = ``first`` on, with gradients along one coordinate each.

    Each canary has its own coordinate, with a random public sign in each step. Contributions of
    other records at the coordinate, which change little between steps, therefore average out of
    the score, unlike that of the canary. Heights are relative to the ellipsoid, b_j (1 + ||m/b||),
    which puts a gradient near the clipping bound for any centre. Every other canary is :data:`FAR`
    times as large, to detect missing clipping.

    Attributes:
        coins: whether each canary is in the dataset, bool, shape (K,). Secret while training.
        scores: higher if a canary is more likely to be in; float64, shape (K,).

    ``trained`` is the mask of theta's coordinates that are trained; ``rate`` and ``batch`` are q
    and B. ``inputs`` is the number of inputs per canary and step, as for a unit of privacy;
    ``keys`` are the keys of coins and signs. Raises ModelError if there are fewer coordinates than
    canaries.
    """

    def __init__(
        self,
        *,
        trained: Tensor,
        rate: float,
        batch: float,
        first: int,
        count: int,
        inputs: int,
        keys: Keys,
    ) -> None:
        (coordinates,), device = trained.nonzero(as_tuple=True), trained.device
        parameters = len(coordinates)
        if count > parameters:
            raise ModelError(
                f"{count:,} canaries: each needs its own parameter, but the model has "
                f"only {parameters:,}. Use fewer canaries or a larger model."
            )
        self._first, self._key = first, keys.canaries
        coins = generator(keys.coins).integers(0, 2, count)
        self.coins = torch.from_numpy(coins.astype(np.bool_)).to(device)
        self.scores = torch.zeros(count, dtype=torch.float64, device=device)
        chosen = np.sort(generator(self._key).choice(parameters, count, replace=False))
        self._rate, self._batch, self._inputs = rate, batch, inputs
        self._coordinates = coordinates[torch.from_numpy(chosen).to(device)]
        self._reach = torch.ones_like(self.scores)
        self._reach[::2] = FAR
        self._added, self._seen = torch.zeros_like(self.scores), torch.zeros_like(self.scores)
        self._met = np.empty(0, np.int64)

    def records(self, drawn: Indices) -> Indices:
        """Return the drawn records without canaries, which :meth:`add` handles."""
        # Leaving out absent canaries does not change the probabilities of other records.
        canaries = drawn[drawn >= self._first] - self._first
        self._met = canaries[self.coins.cpu().numpy()[canaries]]
        return drawn[drawn < self._first]

    def heights(self, step: int, region: Ellipsoid, centre_norm: Tensor) -> Tensor:
        """Return R of the gradients R e_j in a step, float64, shape (K,), given ||m/b||."""
        heads = generator(self._key, step).integers(0, 2, len(self.scores))
        signs = torch.from_numpy(2.0 * heads - 1).to(self.scores.device)
        return signs * _place(region, self._coordinates)[1] * (self._reach + centre_norm)

    def squared_norms(self, heights: Tensor, region: Ellipsoid, centre_norm: Tensor) -> Tensor:
        """Return ((R - m_j)^2 - m_j^2) / b_j^2 + ||m/b||^2, given ||m/b||; shape (K,)."""
        m, b = _place(region, self._coordinates)
        return ((heights - m).square() - m.square()) / b.square() + centre_norm.square()

    def add(
        self, step: int, clipped: Tensor, clipped_sum: ClippedChunkSum, metric: RegionMetric
    ) -> Tensor:
        """Add the clipped, centred gradients of the canaries that were drawn."""
        region, centre_norm = metric.region, metric.centre_norm(clipped_sum.layers)
        heights = self.heights(step, region, centre_norm)
        c = clipped_sum.weights(self.squared_norms(heights, region, centre_norm))
        c = c * (self._inputs / clipped_sum.views)  # each canary is clipped once, like its inputs
        m, b = _place(region, self._coordinates)
        self._added = c * (heights - m) / b
        if len(self._met) == 0:
            return clipped
        # In float64: the clipping margin covers only the rounding of the other samples' sum.
        total, which = clipped.double(), torch.from_numpy(self._met).to(clipped.device)
        total.index_add_(0, self._coordinates[which], (c * heights)[which])
        if not region.is_ball:
            total.addcmul_(region.centre.double(), -c[which].sum())
        return total

    def hear(self, private: PrivateMean, region: Ellipsoid, block: slice) -> None:
        """Record the whitened noisy sum at the canaries' coordinates in a block."""
        ends = torch.tensor([block.start, block.stop], device=self._coordinates.device)
        low, high = torch.searchsorted(self._coordinates, ends).tolist()
        there = self._coordinates[low:high] - block.start
        m, b = _place(region, there)
        value = private.value[there].double()
        self._seen[low:high] = (value - m) / b * self._batch

    def end(self) -> None:
        """Add the step's log-likelihood ratio of "in" against "out" to the scores.

        The noise is estimated from the output, because an attack on too little noise must not
        trust the claim. The median over many coordinates is robust to what the canaries add.
        """
        x, a, q = self._seen, self._added, self._rate
        scale = x.abs().median().div(MEDIAN).clamp(min=LEAST_NOISE)
        evidence = (x * a - a.square() / 2) / scale.square()
        out = torch.full_like(evidence, math.log1p(-q))
        self.scores += torch.logaddexp(out, evidence + math.log(q))


def _place(region: Ellipsoid, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Return m_j and b_j, float64, shape of ``coordinates``, or () for a ball."""
    j = ... if region.is_ball else coordinates
    factor = region.factor.double()
    return region.centre[j].double(), (factor / region.inverse[j].double()).sqrt()


class AttackedTrainer(Trainer):
    """Trainer that adds canaries to the sum of each step, and hears what is released.

    They are drawn at the rate of the records, behind them.
    """

    canaries: Canaries
    #: Number of canaries of the next trainer, and the last one that was made.
    made, last = 1000, list["AttackedTrainer"]()

    def __init__(self, sums: Any, *, plan: Plan, **given: Any) -> None:
        super().__init__(sums, plan=plan, **given)
        keys, event = make_keys(plan.settings.seed), plan.event
        records = plan.facts.train_size
        self.sampler = KeyedSampler(event, size=records + self.made, key=keys.sampler)
        self.canaries = Canaries(
            trained=sums.trained_mask,
            rate=event.sampling_rate,
            batch=plan.settings.batch_size,
            first=records,
            count=self.made,
            inputs=plan.inputs,
            keys=keys,
        )
        self.last[:] = [self]

    def _draw(self) -> Indices:
        return self.canaries.records(super()._draw())

    def _clip_and_sum(self, batch: Indices) -> Tensor:
        clipped, state = super()._clip_and_sum(batch), self.state
        metric = RegionMetric(state.region, scratch=self._scratch)
        return self.canaries.add(state.step + 1, clipped, self.sums.clipped_sum, metric)

    def _release(self, clipped: Tensor, block: slice, noise: SeededNormals) -> PrivateMean:
        private = super()._release(clipped, block, noise)
        self.canaries.hear(private, part_of(self.state.region, block), block)
        return private

    def _end(self, parts: list[Ellipsoid]) -> None:
        super()._end(parts)
        self.canaries.end()


@contextlib.contextmanager
def _with_canaries(count: int) -> Iterator[None]:
    with patch("dpmac_cli.runs.trainer.Trainer", AttackedTrainer):
        AttackedTrainer.made = count
        yield


def attacked(plan: Plan, count: int, guesses: int) -> tuple[Run, Guesses]:
    """Train a plan with ``count`` canaries; return how it ended, and what the attack guesses.

    Epsilon of the plan counts the rate at which canaries are drawn.
    """
    with _with_canaries(count):
        finished = finish(train_plan(plan))
    canaries = AttackedTrainer.last[0].canaries
    guessed = Guesses(
        guesses=guesses,
        scores=tuple(canaries.scores.tolist()),
        coins=tuple(canaries.coins.tolist()),
    )
    return finished, guessed
