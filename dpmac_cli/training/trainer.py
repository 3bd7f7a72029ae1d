"""The training loop: one state, one step, and events for whoever watches. Prints nothing."""

import copy
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.data.augmentation import views_of
from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.clipping.clipped_sum import ClippedSum, clip_limit
from dpmac_cli.dp.clipping.forms import total_squared_norms
from dpmac_cli.dp.clipping.isolation import Isolated
from dpmac_cli.dp.clipping.layers import blocks, find_layers, flatten_parameters, split_by_module
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.fused import compile_norms, compile_terms, compile_update
from dpmac_cli.dp.geometry import AdaClip, Ball, Geometry, Kappa, MacAdam, pinned_shares
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.dp.moments import Moments
from dpmac_cli.dp.optimizers import Optimizer
from dpmac_cli.dp.rules import Adam, AdamBC, Rule, WithDecay, sgd
from dpmac_cli.errors import DivergedError, ModelError, RunError
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import NoiseSource
from dpmac_cli.randomness.sampling import Batch, Sampler
from dpmac_cli.storage.digest import identical
from dpmac_cli.torch_errors import out_of_memory
from dpmac_cli.training.canaries import Canaries, GradientCanaries, ImageCanaries
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.evaluation import Evaluation, evaluate, losses_of
from dpmac_cli.training.schedules import Recipe
from dpmac_cli.training.state import TrainState

#: The radius of a ball that clips nothing: a power of two, so scaling by it is exact.
NO_CLIPPING = 2.0**40
#: What a mechanism's own rounding may take of the margin that clipping leaves below 1: the rest is
#: for the rounding of sums.
ROUNDING_SHARE = 0.01


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers of an optimizer, in the paper's symbols.

    Attributes:
        lr: eta. clip_norm: C. beta1, beta2, gamma: Adam's. gamma_prime: the floor of AdamBC.
        h1, h2: bounds of the estimated variance. kappa, phi: which estimates.
    """

    lr: float
    clip_norm: float
    beta1: float
    beta2: float
    gamma: float
    gamma_prime: float
    h1: float
    h2: float
    kappa: Kappa
    phi: str


@dataclass(frozen=True)
class Plan:
    """What a run will do, fixed before it begins.

    Attributes:
        steps: T.
        steps_per_epoch: ceil(n/B).
        physical_batch: samples worked on at a time; noise is added once a step all the same.
        private: False trains without clipping and noise, as a baseline.
        compiled: whether torch.compile fuses the operations on vectors.
        recipe: what it does besides its optimizer's steps.
        isolated: run the network on each sample alone, so that it cannot mix samples.
    """

    steps: int
    steps_per_epoch: int
    physical_batch: int
    private: bool = True
    compiled: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    isolated: bool = False


def build_geometry(optimizer: Optimizer, hyper: Hyperparameters, private: bool = True) -> Geometry:
    """The clipping geometry of an optimizer; without privacy, a ball that clips nothing."""
    if not private:
        return Ball(NO_CLIPPING)
    match optimizer.geometry:
        case "ball":
            return Ball(hyper.clip_norm)
        case "adaclip":
            return AdaClip(hyper.beta1, hyper.beta2, hyper.h1, hyper.h2)
        case "macadam":
            return MacAdam(hyper.beta1, hyper.h1, hyper.h2, hyper.kappa)


def build_rule(
    optimizer: Optimizer, hyper: Hyperparameters, mechanism: GaussianMechanism
) -> tuple[Rule, bool]:
    """The update rule of an optimizer, and whether it needs the noise's variance tracked."""
    match optimizer.rule:
        case "sgd":
            return sgd, False
        case "adam":
            return Adam(hyper.gamma), False
        case "adam_bc":
            sigma, batch = mechanism.noise_multiplier, mechanism.expected_batch
            if optimizer.geometry == "ball":
                return AdamBC(hyper.gamma_prime, (sigma * hyper.clip_norm / batch) ** 2), False
            if hyper.phi == "paper":
                return AdamBC(hyper.gamma_prime, (sigma / batch) ** 2), False
            return AdamBC(hyper.gamma_prime, None), True


class Trainer:
    """Trains a model by one optimizer of the table.

    Args:
        model: maps images to logits; its parameters are moved into one vector.
        data: on the same device.
        optimizer: the row of the table.
        hyper: its numbers.
        mechanism: sigma and the expected batch.
        plan: what the run will do.
        sampler, noise: the run's two secrets.
        observer: sees losses and norms that are NOT private; for diagnostics only.
        canaries: of an audit run. ``sampler`` draws from them too; images are in ``data`` already.
        layers: see :class:`TrainState`.
        ranks: the processes of the run, of which each is given its share of every batch; None for
            one on its own.
        rule: how the private mean moves theta, in place of the table's. It is given a block of
            theta, and of the moments, at a time, so it must treat each coordinate by itself.

    Raises:
        ModelError: layers cannot be clipped, or there are too many parameters for the mechanism.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        optimizer: Optimizer,
        hyper: Hyperparameters,
        mechanism: GaussianMechanism,
        plan: Plan,
        sampler: Sampler,
        noise: NoiseSource,
        observer: Callable[[int, Tensor, Tensor], None] | None = None,
        canaries: Canaries | None = None,
        layers: LayerDraws | None = None,
        ranks: Ranks | None = None,
        rule: Rule | None = None,
    ) -> None:
        if not plan.private and mechanism.noise_multiplier > 0:
            raise ValueError("a run without privacy clips nothing, so noise would have no scale")
        forbid_tf32()
        self.model, self.data, self.hyper = model, data, hyper
        self.mechanism, self.plan = mechanism, plan
        found = split_by_module(model) if plan.isolated else find_layers(model)
        views, chunk, isolated = plan.recipe.views, plan.physical_batch, None
        if plan.isolated:
            shape = tuple(data.standardised(data.train.images[:0]).shape[1:])
            isolated = Isolated(model, found, shape if views == 1 else (views, *shape), views)
            chunk = min(chunk, isolated.most)
        self._trained = {id(p) for layer in found for p in layer.parameters.values()}
        self._untrained = {n: t.clone() for n, t in _untrained(model, self._trained)}
        theta = flatten_parameters(found)
        if plan.isolated and theta.dtype != data.gain.dtype:
            raise ModelError(
                f"The parameters are {theta.dtype}, and a network that runs on each sample alone "
                f"has those of its input, {data.gain.dtype}. Add --to-float32."
            )
        _check_rounding(mechanism, theta.numel())
        norms = compile_norms() if plan.compiled else total_squared_norms
        capacity, batch = plan.physical_batch, mechanism.expected_batch
        self._clipped_sum = ClippedSum(model, found, capacity, norms, views, batch, isolated)
        self._geometry = build_geometry(optimizer, hyper, plan.private)
        tabled, track_noise = build_rule(optimizer, hyper, mechanism)
        rule, decay = rule or tabled, plan.recipe.weight_decay
        self._rule = WithDecay(rule, decay) if decay else rule
        region, spread = self._geometry.start(theta)
        kept = theta[:0] if optimizer.rule == "sgd" else theta
        moments = Moments(
            hyper.beta1,
            hyper.beta2,
            m=torch.zeros_like(kept),
            v=torch.zeros_like(kept),
            noise=torch.zeros_like(theta) if track_noise else None,
        )
        average = None if plan.recipe.ema is None else theta.clone()
        self.state = TrainState(
            theta, moments, region, spread, 0, chunk, sampler, noise, average, canaries, layers
        )
        self._sum = torch.empty_like(theta)
        self._metric = Metric(region, compiled=compile_terms() if plan.compiled else None)
        self._compiled = (
            compile_update(mechanism, self._rule, self._geometry) if plan.compiled else None
        )
        self._blocks = blocks(theta.numel(), theta.device)
        self._observer = observer
        self._ranks = ranks
        self._spiking = canaries if isinstance(canaries, GradientCanaries) else None

    def step(self) -> None:
        """One step of Algorithm 1. An empty batch is a step like any other: noise alone."""
        state, geometry = self.state, self._geometry
        with nullcontext() if state.layers is None else state.layers.of(state.step):
            clipped = self._clipped_draw(state.sampler.draw())  # lines 3 to 8
        state.step += 1
        state.moments.begin(state.step)
        geometry.begin(state.step, state.spread)
        sums = self._updates(clipped)
        if state.average is not None:
            state.average.lerp_(state.theta, 1 - self.plan.recipe.decay(state.step))
        if state.spread is not None:
            state.region.factor.copy_(torch.stack(sums).sum())
        if self._spiking is not None:
            self._spiking.judge()
        if self._ranks is not None and state.step % self.plan.steps_per_epoch == 0:
            self._ranks.agree([state.theta, state.region.centre, state.region.inverse])

    def _updates(self, clipped: Tensor) -> list[Tensor]:
        """Lines 9 to 20, block by block or compiled; the parts of the sum in line 20."""
        state = self.state
        if self._compiled is None or (state.spread is not None and state.spread.kappa is None):
            return [self._update(clipped[block], block) for block in self._blocks]
        return [
            self._compiled(
                clipped,
                state.theta,
                self._rate(),
                state.moments,
                state.region,
                state.spread,
                state.noise,
            )
        ]

    def _update(self, clipped: Tensor, block: slice) -> Tensor:
        """Lines 9 to 20 for some coordinates; their part of the sum in line 20."""
        state = self.state
        region, moments = state.region.part(block), state.moments.part(block)
        spread = None if state.spread is None else state.spread.part(block)
        private = self.mechanism.release(clipped, region, state.noise)  # lines 9 to 11
        if self._spiking is not None:
            self._spiking.hear(private, region, block, self.mechanism.expected_batch)
        self._rule(state.theta[block], self._rate(), private, moments)  # lines 12 to 15
        return self._geometry.estimate(private, moments, region, spread)  # lines 16 to 20

    def _rate(self) -> float:
        """eta of the step in hand."""
        return self.hyper.lr * self.plan.recipe.rate(self.state.step, self.plan.steps)

    def _clipped_draw(self, drawn: Batch) -> Tensor:
        """The sum of clipped, centred gradients of all that was drawn, canaries too; shape (d,)."""
        canaries = self.state.canaries
        if canaries is None:
            return self._clipped_batch(drawn)
        records, met = canaries.part(drawn)
        clipped = self._clipped_batch(records)
        return clipped if self._spiking is None else self._spiked(clipped, met, self._spiking)

    def _spiked(self, clipped: Tensor, met: Batch, canaries: GradientCanaries) -> Tensor:
        """Add the clipped, centred gradients of some canaries to a sum."""
        region = self.state.region
        spikes = canaries.spikes(region, self._clipped_sum.centre_norm(self._metric))
        c = self._clipped_sum.weights(spikes, self._metric)
        canaries.expect(spikes, c, region)
        if len(met) == 0:
            return clipped
        # In float64: the margin of the clipping is for the rounding of the other samples' sum.
        total, which = clipped.double(), torch.from_numpy(met).to(clipped.device)
        spikes.some(which).add_to(total, c[which], region)
        return total

    def _clipped_batch(self, drawn: Batch) -> Tensor:
        """The sum of clipped, centred gradients of a batch, shape (d,), over all ranks."""
        part = self._clipped_share(drawn)
        if self._ranks is None:
            return part
        # The same everywhere: what rounds otherwise when a run is done again is a public number.
        self.state.chunk = self._ranks.least(self.state.chunk)
        return self._ranks.add_up(part)

    def _clipped_share(self, drawn: Batch) -> Tensor:
        """The sum over the records that this rank has, shape (d,), chunk by chunk."""
        self._metric.refresh()
        observer = self._observer
        watch = None if observer is None else partial(observer, self.state.step + 1)
        part, total, begin = self._sum, None, 0
        while begin < len(drawn):
            end = begin + self.state.chunk
            if not self._sum_chunk(drawn[begin:end], watch):
                self._halve_chunks()
                continue
            if begin == 0 and end >= len(drawn):
                return part
            # Chunks are added up in float64: float32 would round by more than the margin.
            if total is None:
                total = torch.zeros_like(part, dtype=torch.float64)
            for block in self._blocks:  # whole, torch would make a float64 copy of the part
                total[block].add_(part[block])
            begin = end
        return part.zero_() if total is None else total

    def _sum_chunk(self, drawn: Batch, watch: Callable[[Tensor, Tensor], None] | None) -> bool:
        """Put a chunk's sum where sums go; False if memory ran out, and nothing has happened."""
        try:
            rows = torch.from_numpy(drawn).to(self.state.theta.device, non_blocking=True)
            x = self._seen(self.data.train.images[rows], drawn)
            self._clipped_sum.of(x, self.data.train.labels[rows], self._metric, self._sum, watch)
        except (RuntimeError, MemoryError) as failure:
            if not out_of_memory(failure):
                raise
            return False
        return True

    def _seen(self, images: Tensor, drawn: Batch) -> Tensor:
        """Return the model's inputs for some records: K views of each, or the image itself."""
        recipe, layers = self.plan.recipe, self.state.layers
        if recipe.augment is None:
            return self.data.standardised(images)
        assert layers is not None, "augmented views need layers"  # noqa: S101
        words = layers.words(self.state.step, drawn, recipe.views)
        views = self.data.standardised(views_of(images, words, recipe.augment))
        return views if recipe.views == 1 else views.view(len(images), -1, *views.shape[1:])

    def _halve_chunks(self) -> None:
        """Work on fewer samples at a time, by public numbers: how many were drawn is private.

        What samples are clipped to stays as it is, with more room than fewer terms need.

        Raises:
            RunError: there is only one at a time already.
        """
        if self.state.chunk == 1:
            raise RunError(
                "Memory ran out with a single sample at a time. Free some, or choose a smaller "
                "--model or another --device."
            )
        self.state.chunk //= 2

    @contextmanager
    def published(self) -> Iterator[nn.Module]:
        """The model as it is scored and published: with averaged parameters, if there are any."""
        theta, average = self.state.theta, self.state.average
        if average is None:
            yield self.model
            return
        kept = theta.clone()
        theta.copy_(average)
        try:
            yield self.model
        finally:
            theta.copy_(kept)

    def evaluate(self) -> Evaluation:
        """The published model on every test record."""
        with self.published() as model:
            # An isolated network may keep something of what it sees: not of test records.
            scored = copy.deepcopy(model) if self.plan.isolated else model
            return evaluate(scored, self.data, self.data.test)

    def audited(self) -> Canaries | None:
        """The canaries of an audit run that is over, scored."""
        canaries = self.state.canaries
        if isinstance(canaries, ImageCanaries):
            with self.published() as model:
                canaries.judge(losses_of(model, self.data, canaries.split))
        return canaries

    def check_finite(self) -> None:
        """Refuse parameters that are not finite. Synchronises with the device.

        Raises:
            DivergedError: they are not.
        """
        if not bool(torch.isfinite(self.state.theta).all()):
            raise DivergedError(self.state.step)

    def check_untrained(self) -> None:
        """Refuse a network that has changed what only its optimizer may change.

        What is not trained, buffers and frozen parameters, is published as it is.

        Raises:
            ModelError: it is no longer what it was before the first step.
        """
        for name, value in _untrained(self.model, self._trained):
            before = self._untrained.get(name)
            if before is None or not identical(value, before):
                raise ModelError(
                    f"The network has changed its {name} in training: statistics of private data "
                    "would be published without noise. Nothing of this run is; keep no statistics."
                )

    def public_values(self) -> dict[str, float]:
        """Post-noise quantities that cost no privacy, for logs. Synchronises with the device.

        ``noise_norm`` is the expected norm of the noise in the next private mean,
        ||b|| sigma / B: a function of public values, unlike the norm of the noise drawn.
        """
        state, mechanism = self.state, self.mechanism
        region, d = state.region, state.theta.numel()
        scale = region.scale.double().square().sum().item() * (d if region.is_ball else 1)
        ratio = mechanism.noise_multiplier / mechanism.expected_batch
        values = {"noise_norm": scale**0.5 * ratio if ratio else 0.0}
        if state.spread is not None and state.step > 0:
            low, high = pinned_shares(region, self.hyper.h1, self.hyper.h2)
            ratio = (region.centre / region.scale).double().norm().item()
            values |= {"share_h1": low, "share_h2": high, "centre_over_scale_norm": ratio}
        return values


def _check_rounding(mechanism: GaussianMechanism, size: int) -> None:
    """Refuse what would void the margin of the clipping. Raises ModelError."""
    added, margin = mechanism.rounding(size), 1 - clip_limit(mechanism.expected_batch)
    if added > ROUNDING_SHARE * margin:
        raise ModelError(
            f"The model has {size:,} parameters: rounding their sums to the grid of --secure could "
            f"add {added:.1g} to the sensitivity, and clipping leaves a margin of {margin:.1g} for "
            "all rounding. Choose a smaller model, or leave --secure out."
        )


def forbid_tf32() -> None:
    """Have every product in full float32: TF32 and bf16 void the rounding bounds."""
    torch.set_float32_matmul_precision("highest")
    backends: Any = torch.backends
    for setting in (
        backends,
        backends.cuda.matmul,
        backends.cudnn,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ):
        setting.fp32_precision = "ieee"
    backends.cudnn.allow_tf32 = False  # torch.export reads this older name, which must agree


def _untrained(model: nn.Module, trained: Container[int]) -> Iterator[tuple[str, Tensor]]:
    """What of a model no optimizer changes, by name."""
    yield from model.named_buffers()
    yield from ((name, p) for name, p in model.named_parameters() if id(p) not in trained)
