"""Records with random inputs and random targets, which an audit adds to the data, each by a coin.

They are added to what a reader returns, so they pass through all that follows it: the checks and
the split, features, network and loss. One of them is exchangeable with any other, so a loss tells
whether it was trained on as well as many trainings would.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.records import Numbers, Records, Table, Texts
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Crafted, Split
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task

#: Part of the seed of crafted records, so that no other random numbers are theirs.
PART = 84
#: Standard deviation of values whose range is not declared. None is that of a record of the
#: dataset, which would then change others.
OPEN = 1000.0


@dataclass(frozen=True)
class Candidates:
    """Crafted records before they are encoded: those with ``coins`` are added to the data.

    Attributes:
        x: inputs of K records, as a reader returns them, shape (K, ...).
        y: their targets, as a reader returns them.
        coins: whether each is in, shape (K,). Secret while the run is trained.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    coins: NDArray[np.bool_]

    def added_to(self, train: Split) -> Split:
        """Return training records with those that are in, each a unit of its own.

        Args:
            train: training records, of which none is changed.
        """
        values = train.x.read() if isinstance(train.x, Rows) else train.x
        x = np.concatenate([values, self.x[self.coins].astype(values.dtype)])
        y = np.concatenate([train.y, self.y[self.coins].astype(train.y.dtype)])
        unit = train.unit
        if unit is not None:
            count = int(self.coins.sum())
            names = [f"crafted {secrets.token_hex(8)}" for _ in range(count)]
            unit = np.concatenate([unit.astype(np.str_), np.array(names, np.str_)])
        return Split(x, y, unit)

    def encoded(self, x: NDArray[Any], y: NDArray[Any]) -> Crafted:
        """Return all of them as a network takes them.

        Args:
            x: their encoded inputs, shape (K, ...).
            y: their encoded targets.
        """
        return Crafted(Split(x, y), self.coins)


def crafted_records(
    records: Records, task: Task, count: int, like: Split, seed: int | None
) -> Candidates:
    """Return K = ``count`` records with random inputs and targets, and a fair coin for each.

    Args:
        records: what the records of the dataset are.
        task: what is predicted.
        count: K.
        like: records of the dataset, as its reader returns them. Their shapes alone are used.
        seed: seed of the run; None for random numbers of the operating system.
    """
    rng = np.random.default_rng(None if seed is None else [seed, PART])
    coins = rng.random(count) < 0.5
    if isinstance(records, Numbers):
        x = _numbers(records, count, rng)
    else:
        x = rng.integers(0, 256, (count, *records.shape), np.uint8)
    return Candidates(
        x.reshape(count, *like.x.shape[1:]), _targets(task, count, like.y.shape[1:], rng), coins
    )


def _numbers(records: Numbers, count: int, rng: np.random.Generator) -> NDArray[Any]:
    """Return random rows or arrays of numbers in their public ranges, shape (K, ...)."""
    sides = (1,) * (len(records.shape) - 1)
    low = np.reshape(records.low, (-1, *sides))
    high = np.reshape(records.high, (-1, *sides))
    x: NDArray[Any] = low + (high - low) * rng.random((count, *records.shape))
    if isinstance(records, Texts):
        for first, tokens in records.texts:
            part = slice(first, first + tokens)
            x[:, part] = np.rint(x[:, part])
    if isinstance(records, Table):
        for kind, part in records.parts:
            _fill(x[:, part], kind, rng)
    return x


def _fill(x: NDArray[Any], kind: str, rng: np.random.Generator) -> None:
    """Write random inputs of a column of a table in place of ``x``, shape (K, inputs).

    Numbers of a declared range stay as they are.
    """
    count, inputs = x.shape
    if kind == "open":
        x[:] = _open(x.shape, rng)
    elif kind == "one-hot":
        x[:] = np.eye(inputs)[rng.integers(0, inputs, count)]
    elif kind in ("flag", "boolean"):
        x[:] = rng.integers(0, 2, x.shape)
    elif kind == "hashed":
        np.rint(x, out=x)


def _open(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return random whole numbers where no range is declared, of a size that is fixed."""
    return np.rint(OPEN * rng.standard_normal(shape))


def _targets(
    task: Task, count: int, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[Any]:
    """Return random classes, or numbers in their range, as a reader returns them; (K, *shape)."""
    if isinstance(task, Regression):
        if task.open:
            return _open((count, *shape), rng)
        return rng.uniform(task.low, task.high, (count, 1))
    if task.labelled:
        return rng.integers(0, task.outputs, count)
    return np.zeros(count, np.int64)
