"""Geometries: compute the next step's clipping ellipsoid from post-noise values only.

The sum of a step is clipped to an ellipsoid {g : ||(g - m) / b||_2 <= 1}, lines 6 and 7 of
Algorithm 1. A geometry says which: lines 1 and 16 to 20 for DP-MacAdam. The privacy cost is that of
any ellipsoid which was fixed before the step, because the noise has the same scale b.

By its signature, ``next`` is post-processing and has no privacy cost (Proposition 1). It works per
coordinate, except for one sum, so a step can process vectors in blocks that stay in cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean, ball, ellipsoid
from dpmac_cli.dp.moments import Moments
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.optim.optimizer import Optimizer

#: Largest kappa_t that is treated as 0: beta1 is then so small that s_t is lost in rounding.
LEAST_KAPPA = 1e-6
#: Radius of a ball that clips nothing; a power of two, so scaling by it is exact.
NO_CLIPPING = 2.0**40


@dataclass
class Spread:
    """State of a geometry: the spread of g-tilde around its mean. Post-noise, so public.

    The scalars are used by DP-MacAdam alone, and set by :meth:`Geometry.begin`. psi_t is the share
    of the noise in s_t: see :class:`MacAdamEllipsoid`.

    Attributes:
        s: AdaClip's s_t^2, MacAdam's s_t, or s_t - psi_t if kappa is "tracked"; shape (d,).
        kappa_star: E[s_t] divided by the variance of i.i.d. g-tilde, see :func:`kappa_star`.
        kappa: divisor of s_t at step t; None if it is 0.
        share: (1 - c_t)^2, the weight of the noise of step t in u_t, with c_t of
            :func:`newest_weight`.
    """

    s: Tensor
    kappa_star: float = 0.0
    kappa: float | None = None
    share: float = 0.0


#: A record with state per coordinate.
State = TypeVar("State", Ellipsoid, Moments, Spread)


def part_of(state: State, block: slice | Tensor) -> State:
    """Return a block of coordinates of a region, of moments or of a spread, of the same type.

    Args:
        state: region, moments or spread, with vectors of shape (d,). Its scalars, and tensors of
            shape () such as those of a ball, are in the result as they are.
        block: the coordinates: a slice, for which vectors of the result are views of those of
            ``state``; or indices, or a mask of shape (d,), for which they are copies.

    Example:
        >>> moments = Moments(m=torch.tensor([1.0, 2.0, 3.0]), v=torch.zeros(3), step=5)
        >>> part_of(moments, slice(1, 3)).m
        tensor([2., 3.])
    """
    return _with_vectors(state, lambda vector: vector[block])


def at_places(state: State, trained: Tensor) -> State:
    """Write vectors of the trained coordinates into ones of all, with 0 at the others.

    Coordinates that are not trained, such as the padding of an embedding, are in no norm, because
    1/b^2 is 0 there, too.

    Args:
        state: region, moments or spread, with vectors of the trained coordinates only.
        trained: mask of the trained coordinates, bool, shape (d,).

    Returns:
        A state of the same type, with new vectors of shape (d,) and the same scalars.

    Example:
        >>> moments = Moments(m=torch.tensor([1.0, 2.0]), v=torch.zeros(2))
        >>> at_places(moments, torch.tensor([True, False, True])).m
        tensor([1., 0., 2.])
    """

    def placed(vector: Tensor) -> Tensor:
        zeros = vector.new_zeros(trained.shape)
        return zeros.masked_scatter_(trained, vector)

    return _with_vectors(state, placed)


def _with_vectors(state: State, function: Callable[[Tensor], Tensor]) -> State:
    """Return a record with a function applied to each of its vectors."""
    vectors: dict[str, Any] = {}
    for name, value in vars(state).items():
        if isinstance(value, Tensor) and value.ndim > 0:
            vectors[name] = function(value)
    return replace(state, **vectors)


def joined(region: Ellipsoid, parts: Sequence[Ellipsoid]) -> Ellipsoid:
    """Return the next step's region from its blocks; only the blocks' factors are added up.

    A ball has no blocks: it is the same for all of them.

    Args:
        region: the region of this step, shape (d,). :meth:`Geometry.next` has overwritten its
            vectors with those of the next region, which the result shares.
        parts: results of :meth:`Geometry.next` for all blocks, in any order; at least one.
    """
    if region.is_ball:
        return parts[0]
    factors = [part.factor for part in parts]
    return replace(region, factor=torch.stack(factors).sum())


class Geometry(Protocol):
    """Interface that chooses the clipping ellipsoid of each step from private means before it.

    An implementation is a frozen dataclass whose fields are hyperparameters; its state is a
    :class:`Spread`. Its name in :data:`GEOMETRIES` is what an optimizer declares as ``clips``.

    Calls: :meth:`start` once; then for each step t, :meth:`begin` once, :meth:`next` once for each
    block of coordinates, and :func:`joined`.
    """

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread | None]:
        """Return the clipping ellipsoid of step 1, and the initial state: line 1 of Algorithm 1.

        Args:
            like: parameters, shape (d,); only shape, dtype and device are used.

        Returns:
            The ellipsoid; and the state, None for a geometry that never changes.
        """
        ...

    def begin(self, step: int, spread: Spread | None) -> None:
        """Advance the scalars of the state to a step, before any block of it: line 18.

        By default, nothing happens.

        Args:
            step: t, from 1. Each step is begun once, in order.
            spread: state after step t - 1, updated in place; None if :meth:`start` returned none.
        """
        del step, spread

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Return a block of the region of step t + 1: lines 16 to 20 of Algorithm 1.

        A block is a slice of the coordinates, or all of them. Call it once per block and step. By
        default, nothing changes, which only a ball may do.

        Args:
            private: private mean g-tilde_t of the block, shape (block,).
            moments: moments of step t, after the update of theta, of the block.
            region: region of step t, of the block. Consumed: the new centre and ``inverse`` are
                written to its memory.
            spread: state of the block, whose vectors are updated in place; None if :meth:`start`
                returned none.

        Returns:
            The block of the next region. Its ``factor`` is only the block's part of a sum over all
            blocks, see :func:`joined`.
        """
        del private, moments, spread
        return region


@dataclass(frozen=True)
class Ball(Geometry):
    """Fixed ball around the origin: DP-SGD, DP-Adam, DP-AdamBC.

    In equation (2) of the paper, g-bar = g / max(1, ||g|| / C).

    Attributes:
        clip_norm: clipping norm C > 0, the radius.

    Example:
        >>> region, state = Ball(clip_norm=0.5).start(torch.zeros(3))
        >>> region.scale, state
        (tensor(0.5000), None)
    """

    clip_norm: float

    def start(self, like: Tensor) -> tuple[Ellipsoid, None]:
        """Return the ball of radius C, which never changes, and None: it has no state.

        Args:
            like: parameters, shape (d,); only dtype and device are used.

        Raises:
            InputError: C is not above 0, or its square does not fit into the dtype.
        """
        return ball(self.clip_norm, like), None


@dataclass(frozen=True)
class AdaClipEllipsoid(Geometry):
    """AdaClip's ellipsoid (Pichapati et al. 2019, arXiv 1908.07643): centre m_t, scale b_t.

        m_t = beta1 m_(t-1) + (1 - beta1) g~_t
        u_t = clamp((g~_t - m_t)^2 - b_(t-1)^2 sigma^2 / B^2, h1, h2)
        s_t^2 = beta2 s_(t-1)^2 + (1 - beta2) u_t
        b_t = s_t^(1/2) (sum_j s_(t,j))^(1/2)

    Attributes:
        beta1: decay rate of the mean, in [0, 1).
        beta2: decay rate of the variance, in [0, 1).
        h1: lower bound of the variance of one step, > 0.
        h2: upper bound of the variance of one step, at least h1.
    """

    beta1: float
    beta2: float
    h1: float
    h2: float

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread]:
        """Return the ellipsoid of step 1 and the state: m = 0, and s^2 = sqrt(h1 h2) everywhere.

        Args:
            like: parameters, shape (d,); only shape, dtype and device are used.
        """
        s_squared = torch.full_like(like, (self.h1 * self.h2) ** 0.5)
        region = ellipsoid(torch.zeros_like(like), torch.ones_like(like))
        return _scaled(region, s_squared), Spread(s_squared)

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Return a block of the next ellipsoid, by the equations of the class.

        Args:
            private: private mean g-tilde_t of the block.
            moments: not used.
            region: ellipsoid of this step, of the block. Consumed: m and 1/b^2 are overwritten.
            spread: state of the block, whose s^2 is updated in place.

        Returns:
            The block, whose ``factor`` is its part of a sum: see :func:`joined`.
        """
        assert spread is not None  # noqa: S101
        region.centre.lerp_(private.value, 1 - self.beta1)
        squares = _squares(private.value, region.centre)
        variance = private.without_noise(squares).clamp_(self.h1, self.h2)
        spread.s.lerp_(variance, 1 - self.beta2)
        return _scaled(region, spread.s)


@dataclass(frozen=True)
class MacAdamEllipsoid(Geometry):
    """DP-MacAdam's ellipsoid, centre m-hat_t and scale b_t: lines 16 to 20 of Algorithm 1.

        u_t = (g~_t - m-hat_t)^2                                                   line 16
        s_t = beta1 s_(t-1) + (1 - beta1) u_t                                      line 17
        kappa_t = 2 (beta1 - beta1^t) / (1 + beta1)                                line 18
        s-hat_t = min(max(s_t / kappa_t - b_(t-1)^2 sigma^2 / B^2, h1), h2)        line 19
        b_t = s-hat_t^(1/4) (sum_j s-hat_(t,j)^(1/2))^(1/2)                        line 20

    Attributes:
        beta1: decay rate of s, that of the moments, in [0, 1).
        h1: lower bound of the estimated variance, > 0.
        h2: upper bound of the estimated variance, at least h1.
        kappa: estimate of the variance of the gradient in line 19, from s_t:
            "paper", s / kappa - b^2 sigma^2 / B^2 with the paper's kappa;
            "exact", the same with kappa*, which is unbiased for i.i.d. gradients and constant b;
            "tracked", (s - psi) / kappa*, where psi is the exact share of the noise in s for any b.

    Example:
        >>> geometry = MacAdamEllipsoid(beta1=0.9, h1=1e-6, h2=1e-2, kappa="paper")
        >>> region, spread = geometry.start(torch.zeros(4))
        >>> region.scale  # b_0 = 1/d
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    beta1: float
    h1: float
    h2: float
    kappa: Literal["paper", "exact", "tracked"]

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread]:
        """Return the ellipsoid of step 1 and the state: m-hat_0 = 0, b_0 = 1/d, s_0 = 0 (line 1).

        Args:
            like: parameters, shape (d,); only shape, dtype and device are used.
        """
        m_hat = torch.zeros_like(like)
        b = torch.full_like(like, 1 / like.numel())
        return ellipsoid(m_hat, b), Spread(torch.zeros_like(like))

    def begin(self, step: int, spread: Spread | None) -> None:
        """Update the scalars of the state, which depend on t alone: kappa_t of line 18, and c_t.

        Args:
            step: t, from 1; each step once, in order.
            spread: state after step t - 1, updated in place.
        """
        assert spread is not None  # noqa: S101
        beta = self.beta1
        spread.kappa_star = kappa_star(step, beta, previous=spread.kappa_star)
        kappa = paper_kappa(step, beta) if self.kappa == "paper" else spread.kappa_star
        spread.kappa = kappa if kappa > LEAST_KAPPA else None
        spread.share = (1 - newest_weight(step, beta)) ** 2

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Return a block of the next ellipsoid, whose centre is m-hat_t: lines 16 to 20.

        Args:
            private: private mean g-tilde_t of the block.
            moments: moments of step t, of the block.
            region: ellipsoid of this step, of the block. Consumed: m-hat and 1/b^2 are overwritten.
            spread: state of the block after :meth:`begin`; its s is updated in place.

        Returns:
            The block, whose ``factor`` is its part of a sum: see :func:`joined`.
        """
        assert spread is not None  # noqa: S101
        b = private.scale
        beta = self.beta1
        m_hat = moments.m_hat(beta, out=region.centre)
        u = _squares(private.value, m_hat)  # line 16
        spread.s.lerp_(u, 1 - beta)  # line 17
        if self.kappa == "tracked":  # psi has the weights of s, so the difference is one average
            share = (1 - beta) * spread.share * private.noise_ratio**2
            spread.s.addcmul_(b, b, value=-share)
        # 0 / 0 = 0: at t = 1, m-hat_1 = g~_1, so s_1 and kappa_1 are 0. The same holds if beta1 is
        # so small that both are lost in rounding.
        kappa = spread.kappa
        if self.kappa == "tracked" and kappa is not None:  # kappa times the variance: a pass less
            multiple = spread.s.clamp(kappa * self.h1, kappa * self.h2)
            return _scaled(region, multiple, kappa)
        variance = torch.zeros_like(b) if kappa is None else spread.s / kappa
        if self.kappa != "tracked":
            private.without_noise(variance)
        s_hat = variance.clamp_(self.h1, self.h2)  # line 19
        return _scaled(region, s_hat)  # line 20


#: Geometries by name: dataclasses whose fields are hyperparameters of the optimizers that use them.
GEOMETRIES: dict[str, type[Any]] = {
    "ball": Ball,
    "adaclip": AdaClipEllipsoid,
    "macadam": MacAdamEllipsoid,
}


def geometry_of(optimizer: Optimizer) -> Geometry:
    """Return the geometry that an optimizer clips to, with the optimizer's hyperparameters.

    Args:
        optimizer: an optimizer whose ``clips`` is a key of :data:`GEOMETRIES`, and which has a
            hyperparameter for each field of that geometry.

    Raises:
        InputError: there is no such geometry, or the optimizer lacks a hyperparameter of it.

    Example:
        >>> from dpmac_cli.optim import OPTIMIZERS
        >>> geometry_of(OPTIMIZERS["dp-sgd"](clip_norm=2.0))
        Ball(clip_norm=2.0)
    """
    kind = GEOMETRIES.get(optimizer.clips)
    if kind is None:
        raise InputError(
            f"{{optimizer=}}{optimizer.name} clips to '{optimizer.clips}'. Set clips to one of "
            f"{', '.join(GEOMETRIES)}."
        )
    errors: list[str] = []
    hyperparameters: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in type(optimizer).model_fields:
            hyperparameters[field.name] = getattr(optimizer, field.name)
        else:
            errors.append(
                f"{{optimizer=}}{optimizer.name} clips to '{optimizer.clips}', which needs "
                f"{field.name}. Declare it as a field of the class: {field.name}: float."
            )
    raise_errors(errors)
    geometry: Geometry = kind(**hyperparameters)
    return geometry


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """Return (x - y)^2 per coordinate, in one pass over memory."""
    return mse_loss(x, y, reduction="none")


def _scaled(region: Ellipsoid, variance: Tensor, times: float = 1.0) -> Ellipsoid:
    """Return a block with the scale of line 20: b^2 = variance^(1/2) * (sum of variance^(1/2)).

    Args:
        region: a block; its ``inverse`` is overwritten by variance^(-1/2).
        variance: s-hat_t, or s_t^2 of AdaClip, shape (block,), times a constant.
        times: the constant. The sum divided by it gives the same b.
    """
    inverse = torch.rsqrt(variance, out=region.inverse)
    # Faster than variance.dot(inverse), and rounded less.
    roots = variance * inverse
    return replace(region, inverse=inverse, factor=roots.sum() / times)


def paper_kappa(t: int, beta: float) -> float:
    """Return kappa_t, the paper's divisor of s_t: line 18, 2 (beta - beta^t) / (1 + beta).

    It is 0 at t = 1, where s_1 is 0, too.

    Args:
        t: step, from 1.
        beta: decay rate beta1 of s.

    Example:
        >>> paper_kappa(1, 0.9), round(paper_kappa(100, 0.9), 4)
        (0.0, 0.9473)
    """
    return 2 * (beta - beta**t) / (1 + beta)


def newest_weight(t: int, beta: float) -> float:
    """Return c_t = (1 - beta) / (1 - beta^t), the weight of g-tilde_t in m-hat_t (line 14).

    It is 1 at t = 1, and falls to 1 - beta.

    Args:
        t: step, from 1.
        beta: decay rate beta1 of m, in [0, 1).

    Example:
        >>> newest_weight(1, 0.9), round(newest_weight(100, 0.9), 4)
        (1.0, 0.1)
    """
    return (1 - beta) / (1 - beta**t)


def kappa_star(t: int, beta: float, previous: float) -> float:
    """Return kappa*_t = E[s_t] / V for i.i.d. g-tilde of variance V: the unbiased divisor of s_t.

    kappa*_t = beta kappa*_(t-1) + (1 - beta) E[u_t] / V, where E[u_t] / V = 1 - 2 c_t + sum_i c_i^2
    with the weights c_i of g~_i in m-hat_t. Unlike the paper's kappa (its appendix), it uses the
    weights of time k instead of time t within each earlier m-hat_k. Its limit is
    2 beta^2 / (1 + beta).

    Args:
        t: step, from 1.
        beta: decay rate beta1 of m and s.
        previous: kappa*_(t-1); 0 at t = 1.

    Example:
        >>> kappa = 0.0
        >>> for t in range(1, 101):
        ...     kappa = kappa_star(t, 0.9, previous=kappa)
        >>> round(kappa, 4)
        0.8526
    """
    if t == 1:
        return 0.0  # m-hat_1 = g~_1, so u_1 = 0; the formula below leaves a rounding error
    c = newest_weight(t, beta)
    squares = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
    return beta * previous + (1 - beta) * (1 - 2 * c + squares)
