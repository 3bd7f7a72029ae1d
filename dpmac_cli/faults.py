"""What torch raises when a machine fails, told apart from bugs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpmac_cli.errors import RunError

#: What the exceptions say that have no class of their own.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
NO_DEVICE = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS")


def out_of_memory(failure: BaseException) -> bool:
    """Whether memory ran out, on a GPU or for torch or Python on the CPU."""
    return isinstance(failure, (torch.OutOfMemoryError, MemoryError)) or _says(failure, NO_MEMORY)


def device_lost(failure: BaseException) -> bool:
    """Whether a GPU no longer does what it is told."""
    return isinstance(failure, torch.AcceleratorError) or _says(failure, NO_DEVICE)


def _says(failure: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(failure, RuntimeError) and any(word in str(failure) for word in words)


@contextmanager
def explained() -> Iterator[None]:
    """Turn what a failing machine leads to into a message.

    Raises:
        RunError: memory ran out, or the device failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        why = (str(failure) or type(failure).__name__).splitlines()[0]
        if out_of_memory(failure):
            raise RunError(
                f"Memory ran out ({why}). Free some, or choose a smaller --model or another "
                "--device."
            ) from failure
        if device_lost(failure):
            raise RunError(
                f"The device failed ({why}). See whether it still works, or choose another "
                "--device."
            ) from failure
        raise
