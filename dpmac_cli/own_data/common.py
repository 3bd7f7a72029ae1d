"""What folders of images and files of arrays have in common."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.catalog import PAPER_RATES, Dataset, Defaults
from dpmac_cli.errors import InputError
from dpmac_cli.source import STANDARDS, Source

#: Faults of one kind that are named; the rest are counted.
NAMED = 5
#: The least height and width that the convolutional network can halve twice.
LEAST_CNN = 8


Arrays = tuple[NDArray[Any], NDArray[np.int64]]


def refuse(faults: Sequence[str], remedy: str = "") -> None:
    """Raise for faults of one kind: some by name, the rest by number."""
    if faults:
        more = f", and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise InputError(f"{'; '.join(faults[:NAMED])}{more}.{remedy}")


def split(records: int, source: Source) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows held out, each in order."""
    held_out = round(records * source.test_fraction)
    if not 0 < held_out < records:
        raise InputError(
            f"--test-fraction {source.test_fraction:g} of {records} records leaves none to train "
            "on, or none to test on."
        )
    # RandomState's streams are frozen by numpy, so a split never changes.
    order = np.random.RandomState(source.split_seed).permutation(records)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def facts_of(
    source: Source,
    sizes: tuple[int, int],
    shape: tuple[int, int, int],
    classes: Sequence[str],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    levels: int,
) -> Dataset:
    """A data set like the catalogue's, with cautious settings where none are given."""
    if len(classes) < 2:
        raise InputError(
            f"{source.path} has one class, {classes[0]}: there is nothing to tell apart."
        )
    images = levels > 1
    large = min(shape[1:]) >= LEAST_CNN
    defaults = Defaults(
        model="cnn" if images and large else "mlp",
        sigma=1.0,
        batch_size=min(256, sizes[0]),
        epochs=10,
        lr=PAPER_RATES,
        clip_norm=1.0,
        h1=5e-5 if images and large else 1e-9,
        h2=1.0 if images and large else 1e-6,
        physical_batch=32 if images and large else 1024,
    )
    return Dataset(
        train_size=sizes[0],
        test_size=sizes[1],
        shape=shape,
        classes=tuple(classes),
        levels=levels,
        mean=mean,
        std=std,
        sha256=None,
        defaults=defaults,
        about="one's own data",
    )


def constants(source: Source, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation, per channel, that were chosen. Raises InputError."""
    mean, std = STANDARDS[source.standardise]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise InputError(
            f"--standardise {source.standardise} is for {len(mean)} channels, and the images of "
            f"{source.path} have {channels}. Use --standardise half."
        )
    return mean, std
