"""Classify torch failures: out of memory, device lost, error in user code, or a bug in dpmac.

Messages of failures in user code may quote private records, and numbers of samples are private, so
neither is repeated: the error says the type, the place in the code, and the shape of one sample.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

import dpmac_cli
from dpmac_cli.dp.clipping.batches import shapes_in
from dpmac_cli.errors import DpmacError, ModelError, RunError, as_sentence

#: Messages of failures without a dedicated exception class.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
NO_DEVICE = ("CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS")
#: Words of torch's messages about tensors of different types, and what to do.
DTYPES = ("dtype", "scalar type")
HELD_DTYPE = (
    "A tensor that the network or its loss holds has another dtype, such as weights of classes "
    "made of NumPy numbers. Convert it once: weights.float()."
)
#: What to do about gradients within a loss.
DIFFERENTIATED = (
    "It calls torch.autograd.grad or backward, which the gradient of one record cannot be computed "
    "through. Use torch.func.grad, or leave out terms of gradients."
)
#: Messages for an index beyond the end of a tensor, and what to do.
INDEX = ("out of bounds", "out of range")
OUT_OF_RANGE = (
    "An index is out of range: labels of k classes are 0 to k - 1, and numbers of tokens are below "
    "num_embeddings. Check the range of yours, or with ignore_index the number that it has. "
)


def out_of_memory(failure: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on a GPU or on the CPU.

    Only torch's and Python's own exceptions count, not others with such a message.

    Args:
        failure: any exception.

    Example:
        >>> out_of_memory(MemoryError()), out_of_memory(ValueError("CUDA error: out of memory"))
        (True, False)
    """
    return isinstance(failure, (torch.OutOfMemoryError, MemoryError)) or _says(failure, NO_MEMORY)


def device_lost(failure: BaseException) -> bool:
    """Return whether an exception means that a GPU failed, after which all later operations do.

    Args:
        failure: any exception.

    Example:
        >>> device_lost(RuntimeError("CUDA error: unspecified launch failure"))
        True
    """
    return isinstance(failure, torch.AcceleratorError) or _says(failure, NO_DEVICE)


def _says(failure: BaseException, words: tuple[str, ...]) -> bool:
    """Return whether torch's message has one of some words."""
    if not isinstance(failure, (RuntimeError, IndexError)):
        return False
    message = str(failure)
    return any(word in message for word in words)


@contextmanager
def code_of_network(batch: Any, subject: str = "The network") -> Iterator[None]:
    """Convert a failure of user code on records to a ModelError, for the block below ``with``.

    Any exception of the block counts as one of user code, and SystemExit does, too. Two kinds pass
    unchanged: dpmac's own errors, and failures of memory and of the device.

    The new error contains neither the original message, which may quote private records, nor the
    number of samples, which is private.

    Args:
        batch: records that the code gets, in any nesting of tensors, shape (samples, ...) each. The
            message has the shape of one sample of each tensor.
        subject: subject of the message's first sentence: "The network", or another function of
            records.

    Raises:
        ModelError: the code failed. It tells the type of the failure, the last line of user code
            that ran, and shapes; its ``__cause__`` is the failure.

    Example:
        >>> with code_of_network(torch.zeros(8, 3)):
        ...     raise ValueError("a record")
        Traceback (most recent call last):
            ...
        dpmac_cli.errors.ModelError: The network failed on samples of shape (3,): ValueError...
    """
    try:
        yield
    except DpmacError:
        raise
    except (Exception, SystemExit) as failure:
        if out_of_memory(failure) or device_lost(failure):
            raise
        remedy = OUT_OF_RANGE if _says(failure, INDEX) else ""
        raise ModelError(
            f"{subject} failed on samples of shape {shapes_in(batch)}: "
            f"{type_and_place(failure)}. {remedy}"
            "Its message may contain private records, so it is not repeated. On the command line, "
            "dpmac train --debug shows it; in a program, it is the __cause__ of this error."
        ) from failure


@contextmanager
def code_of_task() -> Iterator[None]:
    """Convert a failure of a registered task on records to a ModelError, for a ``with`` block.

    Its code and that of its metrics is a program's. As in :func:`code_of_network`, the error does
    not repeat the original message, which may quote records.

    Raises:
        ModelError: the code failed. dpmac's own errors, and failures of memory and of the device
            pass unchanged.
    """
    try:
        yield
    except DpmacError:
        raise
    except Exception as failure:
        if out_of_memory(failure) or device_lost(failure):
            raise
        raise ModelError(
            f"The task or one of its metrics failed: {type_and_place(failure)}. Its message may "
            "contain private records, so it is not repeated: it is the __cause__ of this error."
        ) from failure


def what_failed(failure: BaseException) -> str:
    """Return the type, place and first line of an exception as a sentence, with its full stop.

    For code that has seen no record: the message may quote one, see :func:`type_and_place`.

    Args:
        failure: an exception that was raised; its traceback has the place.

    Example:
        >>> what_failed(ValueError("a size is missing"))
        'ValueError: a size is missing.'
    """
    lines = str(failure).splitlines()
    sentence = type_and_place(failure)
    if lines and lines[0]:
        sentence = f"{sentence}: {lines[0]}"
    return as_sentence(sentence)


def type_and_place(failure: BaseException) -> str:
    """Return the type and place of an exception, such as "ValueError at net.py, line 3".

    For code that has seen records, which the exception's own message may quote.

    Args:
        failure: an exception that was raised. The place is the last line of its traceback outside
            of torch and dpmac; without one, the type stands alone.

    Example:
        >>> type_and_place(ValueError("a private record"))
        'ValueError'
    """
    return f"{type(failure).__name__}{_place(failure)}"


def mixes_dtypes(failure: BaseException) -> bool:
    """Return whether an operation of torch failed because its tensors have different dtypes.

    Args:
        failure: any exception; its message decides.
    """
    return _says(failure, DTYPES)


def differentiates(failure: BaseException) -> bool:
    """Return whether user code called torch.autograd.grad or backward, which failed.

    dpmac calls them itself, so the caller decides: the last frame outside torch before autograd's.

    Args:
        failure: an exception that was raised, with its traceback.
    """
    package = Path(dpmac_cli.__path__[0])
    torch_package = Path(torch.__path__[0])
    autograd = Path(torch.autograd.__file__)
    called_by_user = False
    for frame in extract_tb(failure.__traceback__):
        file = Path(frame.filename)
        if file == autograd:
            return called_by_user
        if torch_package not in file.parents:
            called_by_user = package not in file.parents
    return False


def _place(failure: BaseException) -> str:
    """Return the last line of user code that ran, such as " at net.py, line 3"; "" for none."""
    libraries = {Path(package.__path__[0]) for package in (torch, importlib, dpmac_cli)}
    for frame in reversed(extract_tb(failure.__traceback__)):
        file = Path(frame.filename)
        generated = frame.filename.startswith("<")
        if not generated and libraries.isdisjoint(file.parents):
            return f" at {file.name}, line {frame.lineno}"
    return ""


@contextmanager
def torch_failures_explained() -> Iterator[None]:
    """Convert failures of memory or of the device to a RunError, for the block below ``with``.

    Raises:
        RunError: memory ran out, or the device failed; with a remedy. Other exceptions pass
            unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        words = str(failure) or type(failure).__name__
        reason = words.splitlines()[0]
        if out_of_memory(failure):
            message = (
                f"Memory ran out ({reason}). Free some memory, or use a smaller {{model}} or "
                "another {device}."
            )
        elif device_lost(failure):
            message = (
                f"The device failed ({reason}). Check whether it still works, or use another "
                "{device}."
            )
        else:
            raise
        raise RunError(message) from failure
