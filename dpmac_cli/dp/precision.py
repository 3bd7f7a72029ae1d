"""Full float32 arithmetic inside a context, whatever the program around it has chosen.

Products in TF32 or bfloat16 void the bounds on rounding errors. Other settings, such as the number
of threads, decide whether a row is rounded by the others, which was tried with those of the start.
The settings are global to the process and belong to the user's program, so they are restored at the
end.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

#: Backends and operations with a precision. Each inherits from the first of its backend, and these
#: from the first of all.
PLACES = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
#: Kinds of devices that networks run on.
DEVICES = ("cpu", "cuda")
_OF_TORCH: Any = torch._C
#: Switches of torch that choose kernels: the ends of the names of getter and setter of each.
SWITCHES = {
    "mkldnn_enabled": "mkldnn_enabled",
    "mkldnn_deterministic": "mkldnn_deterministic",
    "nnpack_enabled": "nnpack_enabled",
    "cudnn_enabled": "cudnn_enabled",
    "cudnn_benchmark": "cudnn_benchmark",
    "cudnn_deterministic": "cudnn_deterministic",
    "flash_sdp_enabled": "sdp_use_flash",
    "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
    "math_sdp_enabled": "sdp_use_math",
    "cudnn_sdp_enabled": "sdp_use_cudnn",
}


def _deterministic() -> tuple[bool, bool]:
    """Return whether algorithms must be deterministic, and whether others only cause a warning."""
    on: bool = _OF_TORCH._get_deterministic_algorithms()
    return on, _OF_TORCH._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    """Set what :func:`_deterministic` returns."""
    on, warn_only = value
    torch.use_deterministic_algorithms(on, warn_only=warn_only)


#: Returns the value of a setting of torch.
Read: TypeAlias = Callable[[], Any]
#: Sets the value.
Write: TypeAlias = Callable[[Any], Any]


def _settings() -> dict[str, tuple[Read, Write]]:
    """Return the functions that read and write each setting, by its name in messages."""
    settings: dict[str, tuple[Read, Write]] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic algorithms": (_deterministic, _set_deterministic),
    }
    for getter, setter in SWITCHES.items():
        read = getattr(_OF_TORCH, f"_get_{getter}")
        write = getattr(_OF_TORCH, f"_set_{setter}")
        settings[getter] = (read, write)
    return settings


#: Settings besides precision that decide how results are rounded.
SETTINGS: Mapping[str, tuple[Read, Write]] = MappingProxyType(_settings())


@dataclass(frozen=True)
class Arithmetic:
    """Torch's settings that decide how results are rounded, as they were at some time.

    A network is tried with those of the start, and every step computes with them: the number of
    threads, for example, decides which rows share a kernel's rest.

    Attributes:
        values: value of each of :data:`SETTINGS`, in their order.

    Example:
        >>> with full_float32(Arithmetic.now()):
        ...     threads = torch.get_num_threads()
        >>> threads == torch.get_num_threads()
        True
    """

    values: tuple[Any, ...]

    @staticmethod
    def now() -> "Arithmetic":
        """Return the settings as they are in this process now."""
        return Arithmetic(tuple(read() for read, _ in SETTINGS.values()))

    @property
    def switches(self) -> str:
        """Return all settings but the number of threads, for comparison with another process.

        They are text: "default dtype: torch.float32, mkldnn_enabled: True, ...".
        """
        named = zip(SETTINGS, self.values, strict=True)
        return ", ".join(f"{name}: {value}" for name, value in named if name != "threads")


@contextlib.contextmanager
def full_float32(settings: Arithmetic | None = None) -> Iterator[None]:
    """Compute in full float32 in the block below ``with``, without autocast and inference mode.

    Products in TF32 or bfloat16 are turned off. All that is changed is restored at the end of the
    block, also after an exception. Blocks may be nested.

    Args:
        settings: other settings of torch inside the block, such as the number of threads; None to
            leave them as they are.

    Example:
        >>> with torch.autocast("cpu"), full_float32():
        ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> product.dtype
        torch.float32
    """
    inside = settings or Arithmetic.now()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ieee())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        for (read, write), value in zip(SETTINGS.values(), inside.values, strict=True):
            before = read()
            if before != value:
                write(value)
                stack.callback(write, before)
        yield


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """Set full precision where it is another one, and restore it.

    A place that inherits the precision is left as it is: once it is set, it no longer inherits.
    """
    changed: list[tuple[tuple[str, str], str]] = []
    try:
        for place in PLACES:
            precision = _OF_TORCH._get_fp32_precision_getter(*place)
            if precision != "ieee":
                changed.append((place, precision))
                _OF_TORCH._set_fp32_precision_setter(*place, "ieee")
        yield
    finally:
        for place, precision in changed:
            _OF_TORCH._set_fp32_precision_setter(*place, precision)
