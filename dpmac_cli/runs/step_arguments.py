"""Arguments of a private step: its settings, and the batches that it accepts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpmac_cli.accounting.sampling import BatchSampling, OwnLoader
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.dp.clipping.batches import Batch, check_rows, map_rows, samples_in
from dpmac_cli.errors import InputError, ModelError, raise_errors

#: Unit of privacy of a batch's rows.
RECORD_UNIT = ("training record", "")


def check_arguments(
    model: object, loss: object, sampling: object, keywords: Mapping[str, Any]
) -> None:
    """Raise InputError with every argument that cannot be used; ModelError without a network."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{getattr(model, '__name__', repr(model))} is not a torch module. Pass a network "
            "instance, such as torch.nn.Linear(64, 10)."
        )
    errors = []
    if not callable(loss):
        errors.append(
            f"loss must be a function loss(model, batch) that returns one loss per record, not a "
            f"{type(loss).__name__}."
        )
    if not isinstance(sampling, (BatchSampling, OwnLoader)):
        errors.append(
            "sampling must say how batches are drawn: Poisson(n=len(dataset), batch_size=256), "
            f"RandomAllocation(...), Cyclic(...) or OwnLoader(...), not {sampling!r}."
        )
    known = [name for name, option in SETTINGS.items() if option.flag.of_step]
    errors += [
        f"PrivateStep has no setting '{name}'. It has {', '.join(known)}."
        for name in keywords
        if name not in known
    ]
    raise_errors(errors)


def settings_of(
    model: nn.Module, sampling: BatchSampling | OwnLoader, keywords: dict[str, Any]
) -> dict[str, Any]:
    """Return all settings that a program gave."""
    named: dict[str, Any] = {
        "model": f"{type(model).__module__}:{type(model).__qualname__}",
        "batch_size": sampling.batch_size,
        "sampler": sampling.sampler,
    }
    return {**keywords, **named}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def checked_example(example: Batch, device: torch.device) -> Batch:
    """Return a public example batch on the device. Raises InputError."""
    check_rows(example, None)
    if samples_in(example) == 0:
        raise InputError("example must have at least one row.")
    return map_rows(lambda t: t.to(device), example)


def check_number(rows: int, n: int) -> None:
    """Raise InputError for a batch of a program's own loader with more rows than records."""
    if rows > n:
        raise InputError(
            f"The batch has more rows than there are records, n={n:,}, so a record is in it more "
            "than once, and moves the step by more than epsilon covers. Draw each record at most "
            "once."
        )


def check_size(size: int, sampling: BatchSampling) -> None:
    """Raise InputError for a dataset of another number of records than n."""
    if size != sampling.n:
        raise InputError(
            f"The dataset has {size:,} records, but epsilon was computed for n={sampling.n:,}. Use "
            f"sampling={type(sampling).__name__}(n=len(dataset), ...)."
        )
