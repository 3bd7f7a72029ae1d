"""Geometries: compute the next step's clipping ellipsoid from post-noise values only.

By its signature, ``next`` is post-processing and has no privacy cost (Proposition 1). It works per
coordinate, except for one sum, so a step can process vectors in blocks that stay in cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean, ball, ellipsoid
from dpmac_cli.dp.moments import Moments
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.optim.optimizer import Optimizer

LEAST_KAPPA = 1e-6
#: Radius of a ball that clips nothing; a power of two, so scaling by it is exact.
NO_CLIPPING = 2.0**40


@dataclass
class Spread:
    """State of a geometry: the spread of g-tilde around its mean. Post-noise, so public."""

    s: Tensor  # AdaClip's s_t^2, MacAdam's s_t, or s_t - psi_t if kappa is "tracked"; (d,)
    kappa_star: float = 0.0  # E[s_t] divided by the variance of i.i.d. g-tilde
    kappa: float | None = None  # divisor of s_t at step t; None if it is 0
    share: float = 0.0  # (1 - c_t)^2, the weight of the noise of step t in u_t


#: State per coordinate.
Kept = TypeVar("Kept", Ellipsoid, Moments, Spread)


def part_of(kept: Kept, block: slice | Tensor) -> Kept:
    """Return some coordinates of every vector, views for a slice; scalars are unchanged."""
    tensors = {name: x for name, x in vars(kept).items() if isinstance(x, Tensor)}
    vectors: Any = {name: x[block] for name, x in tensors.items() if x.ndim > 0}
    return replace(kept, **vectors)


def at_places(kept: Kept, trained: Tensor) -> Kept:
    """Return vectors of the coordinates that are trained, moved to their places in theta.

    ``trained`` is their mask, bool, in the shape of theta. The others are 0, also 1/b^2: they are
    in no norm.
    """
    tensors = {name: x for name, x in vars(kept).items() if isinstance(x, Tensor)}
    vectors: Any = {
        name: x.new_zeros(trained.shape).masked_scatter_(trained, x)
        for name, x in tensors.items()
        if x.ndim > 0
    }
    return replace(kept, **vectors)


def joined(region: Ellipsoid, parts: Sequence[Ellipsoid]) -> Ellipsoid:
    """Return the next region, whose blocks :meth:`Geometry.next` wrote to the memory of ``region``.

    A ball has no blocks: it is the same for all of them.
    """
    if region.is_ball:
        return parts[0]
    return replace(region, factor=torch.stack([part.factor for part in parts]).sum())


class Geometry(Protocol):
    """Chooses the clipping ellipsoid."""

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread | None]:
        """Return the ellipsoid of step 1 and the state, for a theta like ``like``, shape (d,)."""
        ...

    def begin(self, step: int, spread: Spread | None) -> None:
        """Advance all scalar state to step t."""
        del step, spread

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Return a block of the region of the next step: lines 16 to 20.

        ``region``, the block of this step, is consumed: a new centre and ``inverse`` are written to
        its memory. ``factor`` is the block's part of a sum. By default, nothing changes, which only
        a ball may do.
        """
        del private, moments, spread
        return region


@dataclass(frozen=True)
class Ball(Geometry):
    """Fixed ball around the origin: DP-SGD, DP-Adam, DP-AdamBC."""

    clip_norm: float  # C > 0, the radius

    def start(self, like: Tensor) -> tuple[Ellipsoid, None]:
        """Return the ball, which never changes."""
        return ball(self.clip_norm, like), None


@dataclass(frozen=True)
class AdaClipEllipsoid(Geometry):
    """AdaClip's ellipsoid (Pichapati et al. 2019, arXiv 1908.07643)."""

    beta1: float  # decay rate of the mean, in [0, 1)
    beta2: float  # decay rate of the variance, in [0, 1)
    h1: float  # bounds of the variance of one step, 0 < h1 <= h2
    h2: float

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread]:
        """Return the centre m = 0 and the scale of s^2 = sqrt(h1 h2)."""
        s_squared = torch.full_like(like, (self.h1 * self.h2) ** 0.5)
        region = ellipsoid(torch.zeros_like(like), torch.ones_like(like))
        return _scaled(region, s_squared), Spread(s_squared)

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Update m and s^2, running averages of g~ and clamp((g~ - m)^2 - noise, h1, h2)."""
        assert spread is not None  # noqa: S101
        region.centre.lerp_(private.value, 1 - self.beta1)
        variance = private.without_noise(_squares(private.value, region.centre))
        spread.s.lerp_(variance.clamp_(self.h1, self.h2), 1 - self.beta2)
        return _scaled(region, spread.s)


@dataclass(frozen=True)
class MacAdamEllipsoid(Geometry):
    """DP-MacAdam's ellipsoid: lines 16 to 20 of Algorithm 1.

    ``kappa`` selects how the variance of the gradient is estimated from s_t:
        "paper": s / kappa - b^2 sigma^2 / B^2 with the paper's kappa;
        "exact": the same with kappa*, which is unbiased for i.i.d. gradients and constant b;
        "tracked": (s - psi) / kappa*, where psi is the exact share of the noise in s for any b.
    """

    beta1: float  # decay rate of s, that of the moments, in [0, 1)
    h1: float  # bounds of the estimated variance, 0 < h1 <= h2
    h2: float
    kappa: Literal["paper", "exact", "tracked"]

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread]:
        """Line 1: m-hat_0 = 0, s_0 = 0, b_0 = 1/d."""
        zeros = torch.zeros_like(like)
        return ellipsoid(zeros, torch.full_like(like, 1 / like.numel())), Spread(zeros.clone())

    def begin(self, step: int, spread: Spread | None) -> None:
        """Update everything that depends only on t, including line 18."""
        assert spread is not None  # noqa: S101
        beta = self.beta1
        spread.kappa_star = kappa_star(step, beta, previous=spread.kappa_star)
        kappa = paper_kappa(step, beta) if self.kappa == "paper" else spread.kappa_star
        spread.kappa = kappa if kappa > LEAST_KAPPA else None
        spread.share = (1 - newest_weight(step, beta)) ** 2

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Lines 16 to 20; the next centre is m-hat_t."""
        assert spread is not None  # noqa: S101
        b, beta = private.scale, self.beta1
        m_hat = moments.m_hat(beta, out=region.centre)
        spread.s.lerp_(_squares(private.value, m_hat), 1 - beta)  # lines 16, 17
        if self.kappa == "tracked":  # psi has the weights of s, so the difference is one average
            share = (1 - beta) * spread.share * private.noise_ratio**2
            spread.s.addcmul_(b, b, value=-share)
        # 0 / 0 = 0: at t = 1, m-hat_1 = g~_1, so s_1 and kappa_1 are 0. The same holds if beta1 is
        # so small that both are lost in rounding.
        kappa = spread.kappa
        if self.kappa == "tracked" and kappa is not None:  # kappa times the variance: a pass less
            return _scaled(region, spread.s.clamp(kappa * self.h1, kappa * self.h2), kappa)
        variance = torch.zeros_like(b) if kappa is None else spread.s / kappa
        if self.kappa != "tracked":
            private.without_noise(variance)
        return _scaled(region, variance.clamp_(self.h1, self.h2))  # lines 19, 20


#: Geometries by name: dataclasses whose fields are hyperparameters of the optimizers that use them.
GEOMETRIES: dict[str, type[Any]] = {
    "ball": Ball,
    "adaclip": AdaClipEllipsoid,
    "macadam": MacAdamEllipsoid,
}


def geometry_of(optimizer: Optimizer) -> Geometry:
    """Return what chooses the region that an optimizer's gradients are clipped to.

    Raises InputError if the optimizer lacks a hyperparameter of the region.
    """
    kind = GEOMETRIES.get(optimizer.clips)
    if kind is None:
        raise InputError(
            f"{{optimizer=}}{optimizer.name} clips to '{optimizer.clips}'. Set clips to one of "
            f"{', '.join(GEOMETRIES)}."
        )
    raise_errors(
        f"{{optimizer=}}{optimizer.name} clips to '{optimizer.clips}', which needs {of.name}. "
        f"Declare it as a field of the class: {of.name}: float."
        for of in fields(kind)
        if of.name not in type(optimizer).model_fields
    )
    geometry: Geometry = kind(**{of.name: getattr(optimizer, of.name) for of in fields(kind)})
    return geometry


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """Return (x - y)^2 in one pass."""
    return mse_loss(x, y, reduction="none")


def _scaled(region: Ellipsoid, variance: Tensor, times: float = 1.0) -> Ellipsoid:
    """Return a block with the scale of line 20: b^2 = variance^(1/2) * (sum of variance^(1/2)).

    ``variance`` may be given ``times`` a constant: the sum divided by it gives the same b.
    """
    inverse = torch.rsqrt(variance, out=region.inverse)
    # Faster than variance.dot(inverse), and rounded less.
    return replace(region, inverse=inverse, factor=(variance * inverse).sum() / times)


def paper_kappa(t: int, beta: float) -> float:
    """Return kappa_t of line 18, 2 (beta - beta^t) / (1 + beta); 0 at t = 1."""
    return 2 * (beta - beta**t) / (1 + beta)


def newest_weight(t: int, beta: float) -> float:
    """Return c_t = (1 - beta) / (1 - beta^t), the weight of g~_t in m-hat_t; 1 at t = 1."""
    return (1 - beta) / (1 - beta**t)


def kappa_star(t: int, beta: float, previous: float) -> float:
    """Return E[s_t] / V for i.i.d. g-tilde of variance V, from its value at t - 1 (0 at t = 0).

    Unlike the paper's kappa, it uses the weights of time k instead of time t within each earlier
    m-hat_k. Its limit is 2 beta^2 / (1 + beta).
    """
    if t == 1:
        return 0.0  # m-hat_1 = g~_1, so u_1 = 0; the formula below leaves a rounding error
    c = newest_weight(t, beta)
    squares = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
    return beta * previous + (1 - beta) * (1 - 2 * c + squares)
