"""Records with random inputs and random targets, which an audit adds to the data, each by a coin.

They are added to what a reader returns, so they pass through all that follows it: the checks and
the split, features, network and loss. One of them is exchangeable with any other, so a loss tells
whether it was trained on as well as many trainings would.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.records import Numbers, Records, Table, Texts
from dpmac_cli.data.dataset import Crafted, Split
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task

#: Part of the seed of crafted records, so that no other random numbers are theirs.
PART = 84
#: Standard deviation of values whose range is not declared. None is that of a record of the
#: dataset, which would then change others.
OPEN = 1000.0


def crafted_records(
    records: Records,
    task: Task,
    count: int,
    like: Split,
    seed: int | None,
) -> Crafted[Split]:
    """Return K = ``count`` records with random inputs and targets, and a fair coin for each.

    Args:
        records: what the records of the dataset are.
        task: what is predicted.
        count: K.
        like: records of the dataset, as its reader returns them. Their shapes alone are used.
        seed: seed of the run; None for random numbers of the operating system.

    Returns:
        records as a reader returns them, with coins of shape (K,).
    """
    rng = np.random.default_rng(None if seed is None else [seed, PART])
    coins = rng.random(count) < 0.5
    if isinstance(records, Numbers):
        x = _numbers(records, count, rng)
    else:
        x = rng.integers(0, 256, (count, *records.shape), np.uint8)
    x = x.reshape(count, *like.x.shape[1:])
    y = _targets(task, count, like.y.shape[1:], rng)
    return Crafted(Split(x, y), coins)


def _numbers(
    records: Numbers,
    count: int,
    rng: np.random.Generator,
) -> NDArray[Any]:
    """Return random rows or arrays of numbers in their public ranges, shape (K, ...).

    Numbers of tokens are whole, and inputs of a table are of the kind of their column.

    Args:
        records: shape, ranges and kinds of the inputs of a record.
        count: K.
        rng: where random numbers come from.
    """
    sides = (1,) * (len(records.shape) - 1)
    low = np.reshape(records.low, (-1, *sides))
    high = np.reshape(records.high, (-1, *sides))
    uniform = rng.random((count, *records.shape))
    x: NDArray[Any] = low + (high - low) * uniform
    if isinstance(records, Texts):
        for first, tokens in records.texts:
            text = slice(first, first + tokens)
            x[:, text] = np.rint(x[:, text])
    if isinstance(records, Table):
        for kind, part in records.parts:
            width = part.stop - part.start
            if kind == "open":
                x[:, part] = _open((count, width), rng)
            elif kind == "one-hot":
                category = rng.integers(0, width, count)
                x[:, part] = np.eye(width)[category]
            elif kind in ("flag", "boolean"):
                x[:, part] = rng.integers(0, 2, (count, width))
            elif kind == "hashed":
                x[:, part] = np.rint(x[:, part])
    return x


def _open(
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return random whole numbers where no range is declared, with deviation :data:`OPEN`."""
    return np.rint(OPEN * rng.standard_normal(shape))


def _targets(
    task: Task,
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[Any]:
    """Return random classes, or numbers in their range, as a reader returns them.

    Args:
        task: what is predicted.
        count: number of targets.
        shape: shape of a target.
        rng: where random numbers come from.

    Returns:
        targets, shape (count, *shape); zeros for a task without labels.
    """
    if isinstance(task, Regression):
        if task.open:
            return _open((count, *shape), rng)
        return rng.uniform(task.low, task.high, (count, 1))
    if task.labelled:
        return rng.integers(0, task.outputs, count)
    return np.zeros(count, np.int64)
