"""Inputs of a network for the columns of a table, made from each row alone.

A number becomes itself, scaled to its range, and nine hats: functions of it that are 1 at one point
of the range and 0 from the next point on, so that a linear layer fits any curve. Where numbers are
counted, in the declared range if there is one, range and ranks come from noisy counts
(:mod:`dpmac_cli.features.counts`), and the rank becomes an input with its hats, too. Declared
categories are centred, two of them are one input, and those without a list stay the number of a
place, which the first layer looks up.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.config.records import COUNTED, HATS, TWO_AND_OTHERS, InputKind, Table
from dpmac_cli.features.counts import Distribution

#: Size of inputs for one of two values, so that their norm is about that of a number.
HALF = 0.71
#: Factor of hats.
HEIGHT = 0.5
#: Largest number of edges of a distribution. Others have copies of their last one.
EDGES = 512


class TableInputs(nn.Module):
    """A torch module that maps rows of a table to the inputs of a network. Nothing is trained.

    Buffers are the range and the ranks of each number that is counted, which :meth:`adopt` fills.
    They are published with the network. Until then, the range is from -1 to 1 with even ranks.

    Args:
        records: kinds, ranges and scaling of the columns, as rows of the table have them.
    """

    def __init__(self, records: Table) -> None:
        super().__init__()
        self._parts = list(records.parts)
        self._numbers = self._firsts("number")
        self._counted = self._firsts(*COUNTED)
        self._ends = [*zip(records.low, records.high, strict=True)]
        flags = self._firsts("flag")
        #: The input that says where each of them is missing; one past the last where none does.
        self._missing = list[int]()
        for n in self._counted:
            self._missing.append(n + 1 if n + 1 in flags else records.size)
        columns = len(self._counted)
        for name, constants in zip(("factor", "summand"), records.scaling, strict=True):
            of_counted = torch.tensor([constants[n] for n in self._counted])
            self.register_buffer(name, of_counted, persistent=False)
        for name, values in (
            ("low", torch.full((columns,), -1.0)),
            ("high", torch.ones(columns)),
            ("edges", torch.linspace(-1, 1, EDGES).repeat(columns, 1)),
            ("shares", torch.linspace(0, 1, EDGES).repeat(columns, 1)),
        ):
            if columns:
                self.register_buffer(name, values)

    @property
    def counted(self) -> int:
        """Return the number of columns whose ranges come from noisy counts; 0 if none does."""
        return len(self._counted)

    def values(self, x: Tensor) -> Tensor:
        """Return the numbers that are counted, in the units of the table, NaN if missing.

        Args:
            x: rows, shape (rows, inputs), as a network gets them.

        Returns:
            float64, shape (rows, :attr:`counted`).
        """
        return self._unscaled(x).double().masked_fill(self._is_missing(x), torch.nan)

    def adopt(self, distributions: Sequence[Distribution]) -> None:
        """Take the ranges and ranks of the columns that :meth:`values` returns, in place.

        A range is cut to the declared one, if there is one. If nothing of it is left, which noise
        may lead to, the declared one is used. A distribution with more than EDGES edges loses the
        last ones.

        Args:
            distributions: one for each column that is counted, in their order.
        """
        for column, of_column in enumerate(distributions):
            least, most = self._ends[self._counted[column]]
            self.get_buffer("edges")[column] = _padded(of_column.edges)
            self.get_buffer("shares")[column] = _padded(of_column.shares)
            low, high = max(of_column.low, least), min(of_column.high, most)
            if low >= high:  # noise may find nothing
                low, high = least, most
            self.get_buffer("low")[column] = low
            self.get_buffer("high")[column] = high

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs, shape (rows, inputs of the network): numbers first, then places.

        A place is the number of a category without a list, which the first layer of the network
        looks up. Each row depends on the same row of ``x`` alone.

        Args:
            x: rows, shape (rows, inputs of a record).
        """
        inputs = [*self._of_numbers(x), *self._of_counted(x)]
        for kind, part in self._parts:
            if kind == "flag":
                inputs.append(x[:, part])
            elif kind == "boolean":
                inputs.append(HALF * x[:, part])
            elif kind == "one-hot":
                inputs.append(_centred(x[:, part]))
        places = [x[:, part] for kind, part in self._parts if kind == "hashed"]
        return torch.cat([*inputs, *places], 1)

    def _firsts(self, *wanted: InputKind) -> list[int]:
        """Return the first input of each column of some kinds, in the order of the columns."""
        return [part.start for kind, part in self._parts if kind in wanted]

    def _unscaled(self, x: Tensor) -> Tensor:
        """Return numbers that are counted as a table has them, shape (rows, columns)."""
        return (x[:, self._counted] - self.get_buffer("summand")) / self.get_buffer("factor")

    def _is_missing(self, x: Tensor) -> Tensor:
        """Return where a number that is counted is missing, shape (rows, columns)."""
        never = x.new_zeros(len(x), 1)
        return torch.cat([x, never], 1)[:, self._missing] > 0

    def _of_numbers(self, x: Tensor) -> list[Tensor]:
        """Return numbers that are not counted, and their hats: two tensors of one row per row."""
        scaled = x[:, self._numbers]
        return [scaled, _hats((scaled + 1) / 2)]

    def _of_counted(self, x: Tensor) -> list[Tensor]:
        """Return numbers that are counted and their ranks, with hats; 0 if missing.

        Four tensors of one row per row; none if no number is counted.
        """
        if not self.counted:
            return []
        numbers = self._unscaled(x)
        low, high = self.get_buffer("low"), self.get_buffer("high")
        inside = ((numbers - low) / (high - low)).clamp(0, 1)
        ranks = self._ranks(numbers)
        known = (~self._is_missing(x)).to(x.dtype)
        every = known.repeat_interleave(HATS, 1)
        scaled = list[Tensor]()
        hats = list[Tensor]()
        for of in (inside, ranks):
            scaled.append((2 * of - 1) * known)
            hats.append(_hats(of) * every)
        return [*scaled, *hats]

    def _ranks(self, numbers: Tensor) -> Tensor:
        """Return the share of numbers of its column below each, shape (rows, columns)."""
        edges, shares = self.get_buffer("edges"), self.get_buffer("shares")
        columns = numbers.T.contiguous()
        above = torch.searchsorted(edges, columns, right=True).clamp(1, EDGES - 1)
        left, right = edges.gather(1, above - 1), edges.gather(1, above)
        least, most = shares.gather(1, above - 1), shares.gather(1, above)
        width = (right - left).clamp(min=torch.finfo(edges.dtype).tiny)
        part = ((columns - left) / width).clamp(0, 1)
        return (least + part * (most - least)).T


def _padded(values: Sequence[float]) -> Tensor:
    """Return at most EDGES numbers of a distribution, and copies of the last one up to there."""
    missing = max(0, EDGES - len(values))
    kept = np.array(values[:EDGES])
    return torch.from_numpy(np.pad(kept, (0, missing), "edge"))


def _hats(inside: Tensor) -> Tensor:
    """Return hats of numbers from 0 to 1, centred, shape (rows, columns * HATS).

    Hat k is 1 at k / (HATS - 1) and 0 from its neighbours on, before centring and scaling.
    """
    points = torch.arange(HATS, device=inside.device, dtype=inside.dtype)
    distance = (inside.unsqueeze(2) * (HATS - 1) - points).abs()
    hats = (1 - distance).clamp(min=0) - 1 / HATS
    return (HEIGHT * hats).flatten(1)


def _centred(one_hot: Tensor) -> Tensor:
    """Return values of a category, the last of which is any other one, centred; 0 if unknown.

    Two values and any other one become two inputs.
    """
    known, others = one_hot[:, :-1], one_hot[:, -1:]
    if one_hot.shape[1] == TWO_AND_OTHERS:
        first, second = known[:, :1], known[:, 1:]
        return torch.cat([HALF * (second - first), others], 1)
    return torch.cat([known - known.mean(1, keepdim=True), others], 1)
