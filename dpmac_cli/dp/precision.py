"""Full float32 arithmetic inside a context, whatever the program around it has chosen.

Products in TF32 or bfloat16 void the bounds on rounding errors. Other settings, such as the number
of threads, decide whether a row is rounded by the others, which was tried with those of the start.
The settings are global to the process and belong to the user's program, so they are restored at the
end.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Backends and operations with a precision. Each inherits from the first of its backend, and these
#: from the first of all.
PLACES = (
    ("generic", "all"),
    *(
        (backend, kind)
        for backend in ("cuda", "mkldnn")
        for kind in ("all", "matmul", "conv", "rnn")
    ),
)
#: Kinds of devices that networks run on.
DEVICES = ("cpu", "cuda")
_OF_TORCH: Any = torch._C
#: Switches of torch that choose kernels, by the ends of the names of their getters and setters.
SWITCHES = {
    **{name: name for name in ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")},
    **{name: name for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")},
    **{f"{name}_sdp_enabled": f"sdp_use_{name}" for name in ("flash", "mem_efficient", "math")},
    "cudnn_sdp_enabled": "sdp_use_cudnn",
}


def _deterministic() -> tuple[bool, bool]:
    on: bool = _OF_TORCH._get_deterministic_algorithms()
    return on, _OF_TORCH._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


#: Settings besides precision that decide how results are rounded, and what reads and sets them.
SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    **{
        name: (getattr(_OF_TORCH, f"_get_{name}"), getattr(_OF_TORCH, f"_set_{end}"))
        for name, end in SWITCHES.items()
    },
}


@dataclass(frozen=True)
class Arithmetic:
    """Values of :data:`SETTINGS`."""

    values: tuple[Any, ...]

    @staticmethod
    def now() -> "Arithmetic":
        """Return the settings as they are."""
        return Arithmetic(tuple(read() for read, _ in SETTINGS.values()))

    @property
    def switches(self) -> str:
        """All but the number of threads, for comparison with another process."""
        named = zip(SETTINGS, self.values, strict=True)
        return ", ".join(f"{name}: {value}" for name, value in named if name != "threads")


@contextlib.contextmanager
def full_float32(settings: Arithmetic | None = None) -> Iterator[None]:
    """Compute in full float32, outside of autocast and inference mode, and restore the settings.

    ``settings`` are those inside; None for the current ones.
    """
    around, wanted = contextlib.ExitStack(), settings or Arithmetic.now()
    with around:
        around.enter_context(_ieee())
        if torch.is_inference_mode_enabled():
            around.enter_context(torch.inference_mode(False))
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                around.enter_context(torch.autocast(device, enabled=False))
        for (read, write), value in zip(SETTINGS.values(), wanted.values, strict=True):
            if (found := read()) != value:
                write(value)
                around.callback(write, found)
        yield


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """Set full precision where it is another one, and restore it.

    A place that inherits the precision is left as it is: once it is set, it no longer inherits.
    """
    changed: list[tuple[tuple[str, str], str]] = []
    try:
        for place in PLACES:
            found = _OF_TORCH._get_fp32_precision_getter(*place)
            if found != "ieee":
                changed.append((place, found))
                _OF_TORCH._set_fp32_precision_setter(*place, "ieee")
        yield
    finally:
        for place, found in changed:
            _OF_TORCH._set_fp32_precision_setter(*place, found)
