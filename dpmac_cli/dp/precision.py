"""Full float32 arithmetic inside a context, whatever the program around it has chosen.

Products in TF32 or bfloat16 void the bounds on rounding errors. The settings are global to the
process and belong to the user's program, so they are restored at the end.
"""

import contextlib
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def full_float32(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Compute in full float32, outside of autocast and inference mode, and restore the settings.

    ``dtype`` is the default dtype inside; None for the current one.
    """
    around, default = contextlib.ExitStack(), torch.get_default_dtype()
    with around:
        around.enter_context(_precision("ieee", PLACES))
        if torch.is_inference_mode_enabled():
            around.enter_context(torch.inference_mode(False))
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                around.enter_context(torch.autocast(device, enabled=False))
        if dtype is not None and dtype != default:
            torch.set_default_dtype(dtype)
            around.callback(torch.set_default_dtype, default)
        yield


@contextlib.contextmanager
def inherited_precision() -> Iterator[None]:
    """Leave out settings of whole backends, because torch.export cannot read them."""
    with _precision("none", [place for place in PLACES if place[1] == "all"]):
        yield


@contextlib.contextmanager
def _precision(wanted: str, places: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Set a precision where it is another one, and restore it.

    A place that inherits the precision is left as it is: once it is set, it no longer inherits.
    """
    changed: list[tuple[tuple[str, str], str]] = []
    try:
        for place in places:
            found = _OF_TORCH._get_fp32_precision_getter(*place)
            if found != wanted:
                changed.append((place, found))
                _OF_TORCH._set_fp32_precision_setter(*place, wanted)
        yield
    finally:
        for place, found in changed:
            _OF_TORCH._set_fp32_precision_setter(*place, found)
