"""Attacks on rounding at kinks of all kinds, with one record more or less, on several processors.

As a program, ``python -m tests.test_kinks`` prints the largest move of a sum by kink and way.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli import clipped_grad
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.training.chunks import BatchSum, ChunkedSum

pytestmark = [
    pytest.mark.trial,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
#: Numbers of a record: as floats, every other record begins at a multiple of 64 bytes.
INPUTS = 30
#: Copies of a record in an attack, and records at the kink that are tried, if vmap runs them.
COPIES, RECORDS = 64, 12
#: Factor of losses, so that every gradient that is not 0 is clipped.
STEEP = 100.0


def if_positive(u: Tensor) -> Tensor:
    """A branch in Python, which vmap cannot run."""
    return torch.stack([row[2] if bool(row.max() > 0) else 0 * row[2] for row in u])


#: Losses of a product with three columns, by kink, and what is 0 at the kink.
KINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hinge": (lambda u: torch.relu(1 - u[..., 0]), lambda u: 1 - u[..., 0]),
    "ReLU": (lambda u: torch.relu(u[..., 0]), lambda u: u[..., 0]),
    "max-pool": (
        lambda u: nn.functional.max_pool1d(u[..., None, :2], 2)[..., 0, 0],
        lambda u: u[..., 0] - u[..., 1],
    ),
    "hard sigmoid": (lambda u: nn.functional.hardsigmoid(u[..., 0]), lambda u: u[..., 0] + 3),
    "sign": (lambda u: u[..., 0].sign() * u[..., 1], lambda u: u[..., 0]),
    "sorting": (
        lambda u: u[..., :2].sort().values @ u.new_tensor([1.0, -2.0]),
        lambda u: u[..., 0] - u[..., 1],
    ),
    "maximum": (
        lambda u: torch.where(u.amax(-1) > 0, u[..., 2], 0 * u[..., 2]),
        lambda u: u.amax(-1),
    ),
    "a branch": (if_positive, lambda u: u.amax(-1)),
}
#: Kinks of networks that vmap can run.
MAPPED = [kink for kink in KINKS if kink != "a branch"]


class Kinked(nn.Module):
    """A product, and a loss with a kink."""

    def __init__(self, kink: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.kink = nn.Linear(INPUTS, 3, bias=False), kink

    def forward(self, x: Tensor) -> Tensor:
        return STEEP * KINKS[self.kink][0](self.product(x))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found


def at_kink(network: Kinked) -> Tensor:
    """Records at which float32 decides the side of the kink, shape (:data:`RECORDS`, inputs)."""
    weight, distance = network.product.weight.detach().double(), KINKS[network.kink][1]
    generator = torch.Generator().manual_seed(1)
    drawn = 4 * torch.randn(4000, INPUTS, generator=generator).double()
    sides = distance(drawn @ weight.T) > 0
    low, high = drawn[~sides], drawn[sides]
    count = min(len(low), len(high), 400)
    low, high = low[:count], high[:count]
    for _ in range(60):
        middle = (low + high) / 2
        above = (distance(middle @ weight.T) > 0)[:, None]
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    records = low.float()
    far = distance(records.double() @ weight.T).abs()
    return records[far.argsort()[:RECORDS]]


def sums_of(kink: str, batch: int) -> BatchSum:
    clipped = clipped_grad(Kinked(kink), losses, ball(1.0), batch_size=batch)
    return clipped.prepare(torch.zeros(1, INPUTS))


def added(sums: BatchSum, rows: Tensor, at: NDArray[np.int64]) -> Tensor:
    """Sum of clipped gradients of rows at given places, shape (d,)."""
    records = np.arange(len(rows))
    with (
        pytest.MonkeyPatch.context() as changed,
        torch.no_grad(),
        sums.given(records, rows),
    ):
        changed.setattr(sums, "_arranged", lambda *_: at)
        return sums.of(records, 1, RegionMetric(ball(1.0)), sums.chunk)[0].double().clone()


def moves(sums: BatchSum, *, between: bool) -> list[float]:
    """Distances between the sums of all copies of a record, and all but the first.

    At random places, the others keep theirs, which have the same law without a record.

    Args:
        sums: sums of a network with a kink.
        between: whether a record without a gradient is between each two, so that the copies have
            other places without the first.
    """
    network, found = sums.model.network, []
    assert isinstance(network, Kinked)
    for record in at_kink(network)[: None if sums.per_sample.vmapped else 3]:
        rows = record.repeat(COPIES, 1)
        if between:
            rows = torch.stack([rows, 0 * rows], 1).flatten(0, 1)
        places = sums._arranged(len(rows), 1, sums.chunk)
        fewer = places - 1 if sums.placed else places[:-1]
        move = added(sums, rows, places) - added(sums, rows[1:], fewer.clip(-1))
        found.append(float(move.norm()))
    return found


@contextmanager
def placed(always: bool) -> Iterator[None]:
    """Give records random places, also where a trial shows that places make no difference."""
    with pytest.MonkeyPatch.context() as changed:
        if always:
            changed.setattr(ChunkedSum, "_needs_places", lambda _: True)
        yield


def largest_moves() -> dict[str, float]:
    """The largest move of a sum by kink and way to run a network."""
    found = {}
    for kink in KINKS:
        for always in (False, True) if kink in MAPPED else (False,):
            with placed(always):
                # Most of the time goes into this: a chunk for twice as many holds the copies, too.
                sums = sums_of(kink, 2 * COPIES)
                way = "random places" if sums.placed else "places alike"
                for between in (False, True):
                    found[f"{kink}, {way}, {between}"] = max(moves(sums, between=between))
    return found


def is_at_most_one(found: Mapping[str, float]) -> bool:
    """Whether no sum moves by more than 1, and every one moves by the gradient of a record."""
    assert len(found) == 4 * len(MAPPED) + 2
    return all(0.9 < move <= 1 for move in found.values())


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("kink", "always"), [("a branch", False), *itertools.product(MAPPED, (False, True))]
)
def test_copies_at_a_kink_move_by_the_gradient_of_one(kink: str, always: bool) -> None:
    """Where places make no difference, and at random places."""
    for between in (False, True):
        with placed(always):
            sums = sums_of(kink, COPIES * (1 + between))
            assert sums.placed == always
            assert sums.per_sample.vmapped == (kink != "a branch")
            assert 0.9 < max(moves(sums, between=between)) <= 1


@pytest.mark.long
@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    "processor",
    [
        {"MKL_CBWR": "COMPATIBLE"},
        {"ATEN_CPU_CAPABILITY": "default"},
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    ],
    ids=["MKL_CBWR", "ATEN", "AVX2", "SSE4.1"],
)
def test_copies_at_a_kink_on_other_processors(processor: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.test_kinks"],
        env={**os.environ, **processor},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert is_at_most_one(json.loads(done.stdout))


@pytest.fixture
def by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that add up terms from the last to the first at odd places."""

    def product(self: RowProducts, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        self.needed = True
        terms = a[..., None] * b
        forwards, backwards = terms[:, 0].clone(), terms[:, -1].clone()
        for term in range(1, len(b)):
            forwards += terms[:, term]
            backwards += terms[:, -1 - term]
        even = torch.arange(len(a))[:, None] % 2 == 0
        found = torch.where(even, forwards, backwards)
        return found if bias is None else found + bias

    monkeypatch.setattr(RowProducts, "_product", product)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kink", MAPPED)
def test_a_product_that_rounds_by_place_moves_no_copy_at_random_places(
    by_place: None, kink: str
) -> None:
    sums = sums_of(kink, 2 * COPIES)
    assert sums.placed
    for between in (False, True):
        assert max(moves(sums, between=between)) <= 1


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kink", MAPPED)
def test_a_product_that_rounds_by_place_moves_copies_without_random_places(
    by_place: None, monkeypatch: pytest.MonkeyPatch, kink: str
) -> None:
    monkeypatch.setattr(ChunkedSum, "_needs_places", lambda self: False)
    sums = sums_of(kink, 2 * COPIES)
    sums.per_sample.by_rows = True
    assert max(moves(sums, between=True)) > 1


def main() -> None:
    """Print the largest moves as JSON."""
    sys.stdout.write(json.dumps(largest_moves()))


if __name__ == "__main__":
    main()
