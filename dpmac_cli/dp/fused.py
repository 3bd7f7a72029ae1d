"""Compiled lines 9 to 20 of Algorithm 1, and compiled norms for line 7.

The functions are those that are called without compiling. Numbers that change from step to step are
passed as tensors: a plain number would be compiled in.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from dpmac_cli.dp.algorithm import Algorithm
from dpmac_cli.dp.clipping.forms import (
    PIECE,
    InPieces,
    Instantiated,
    Norms,
    Parts,
    PerSampleGradients,
    total_squared_norms,
)
from dpmac_cli.dp.clipping.norms import LayerMetric, SquaredNorms, Terms
from dpmac_cli.dp.clipping.products import PositionProducts
from dpmac_cli.dp.geometry import Spread
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism
from dpmac_cli.dp.moments import Moments
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.noise import Bits, SeededNormals

P = ParamSpec("P")
R = TypeVar("R")


def _compile(function: Callable[P, R], *, dynamic: bool | None = None) -> Callable[P, R]:
    """Compile a function, which happens when it is first called.

    Raises:
        ModelError: on that call, if there is nothing to compile with.
    """
    compiled = torch.compile(function, dynamic=dynamic, fullgraph=True)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return compiled(*args, **kwargs)
        except Exception as failure:
            reason = str(failure).strip().partition("\n")[0]
            raise ModelError(
                f"--compile failed ({type(failure).__name__}: {reason}). It needs a working C++ "
                "compiler, or Triton on a GPU: leave --compile out."
            ) from failure

    return call


class Vectors(Protocol):
    """What an update changes in place, see :class:`dpmac_cli.training.state.TrainState`."""

    theta: Tensor
    moments: Moments
    region: Ellipsoid
    spread: Spread | None


#: From the clipped sum, eta, the vectors and the noise to the sum of line 20.
Update = Callable[[Tensor, float, Vectors, SeededNormals], Tensor]


def compile_update(mechanism: GaussianMechanism, algorithm: Algorithm) -> Update:
    """Compile lines 9 to 20: from the clipped sum to new theta, moments and ellipsoid, in place.

    The function returned takes the clipped sum, eta, the vectors and the noise, and returns the sum
    of line 20.
    """

    def update(
        clipped: Tensor,
        theta: Tensor,
        averages: tuple[Tensor, Tensor, Tensor | None],
        ellipsoid: tuple[Tensor, Tensor, Tensor],
        memory: tuple[Tensor, Tensor | None] | None,
        numbers: list[Tensor],
        bits: tuple[Tensor, Tensor],
        betas: tuple[float, float],
    ) -> Tensor:
        lr, m_correction, v_correction, kappa, share = numbers
        m, v, noise = averages
        moments = Moments(*betas, m, v, noise, 0, m_correction, v_correction)
        region = Ellipsoid(*ellipsoid)
        spread = None if memory is None else Spread(*memory, 0.0, kappa, share)
        private = mechanism.release(clipped, region, Bits(*bits))
        algorithm.rule(theta, lr, private, moments)
        return algorithm.geometry.estimate(private, moments, region, spread)

    compiled = _compile(update, dynamic=False)

    def call(clipped: Tensor, lr: float, state: Vectors, noise: SeededNormals) -> Tensor:
        theta, moments, region, spread = state.theta, state.moments, state.region, state.spread
        drawn = clipped if mechanism.noise_multiplier > 0 else clipped[:0]
        bits = noise.bits(torch.empty_like(drawn, dtype=theta.dtype))
        kappa, share = (1.0, 0.0) if spread is None else (spread.kappa, spread.share)
        assert kappa is not None, "the first step is not compiled"  # noqa: S101
        numbers = (lr, moments.m_correction, moments.v_correction, kappa, share)
        return compiled(
            clipped,
            theta,
            (moments.m, moments.v, moments.noise),
            (region.centre, region.inverse, region.factor),
            None if spread is None else (spread.s, spread.psi),
            [torch.as_tensor(n, dtype=torch.float64, device=theta.device) for n in numbers],
            (bits.words, bits.turns),
            (moments.beta1, moments.beta2),
        )

    return call


def terms(centre: Tensor, inverse: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Write m A to ``times``; return the sum of m^2 A, and the largest A, for the norms.

    The sum is made in float64 throughout, which costs nothing where this is compiled.
    """
    times.copy_(centre * inverse)
    return (centre * times).double().sum(), inverse.max()


def compile_terms() -> Terms:
    """Compile :func:`terms` into one loop."""
    return _compile(terms, dynamic=False)


def _in_groups(form: PerSampleGradients) -> bool:
    """Return whether a form works on a few samples at a time: compiling would unroll its loop."""
    if isinstance(form, Instantiated):
        return form.g.numel() > PIECE
    return isinstance(form, InPieces | PositionProducts | Parts)


def compile_norms() -> Norms:
    """Compile :func:`~dpmac_cli.dp.clipping.forms.total_squared_norms` into few passes.

    Whatever order a sum is made in, the bound on its rounding holds. Layers whose gradients are
    made in pieces are left as they are.
    """
    compiled = _compile(total_squared_norms)

    def norms(
        gradients: Sequence[PerSampleGradients], metrics: Sequence[LayerMetric]
    ) -> SquaredNorms:
        groups: dict[bool, tuple[list[PerSampleGradients], list[LayerMetric]]] = {}
        for form, metric in zip(gradients, metrics, strict=True):
            forms, parts = groups.setdefault(_in_groups(form), ([], []))
            forms.append(form)
            parts.append(metric)
        for form in groups.get(False, ([], []))[0]:
            for rows in vars(form).values():
                if isinstance(rows, Tensor):
                    torch._dynamo.maybe_mark_dynamic(rows, 0)  # how many samples, changes
        first, *rest = [
            (total_squared_norms if in_groups else compiled)(*group)
            for in_groups, group in groups.items()
        ]
        return sum(rest, start=first)

    return norms
