"""Modes that see every operation of torch, without its compiler."""

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Mode for operations in the block below ``with``: they go through ``__torch_dispatch__``.

    Of other modes, torch excludes that method from compilation, and loads its compiler to do so,
    which takes a second of CPU time. Within a mode, nothing is compiled in any case.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch excludes the method from compilation."""
        return False
