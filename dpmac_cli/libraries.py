"""Libraries that are slow to import or optional, each imported when one of its names is first used.

Help, messages about mistakes and most commands need none of them. This is the only place that puts
an import off: a module that cannot do anything without a library imports it at its top.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = (
    "dp_accounting",
    "fft",
    "np",
    "optimize",
    "pld_pmf",
    "privacy_loss_distribution",
    "rdp_privacy_accountant",
    "signal",
    "stats",
)


class OnFirstUse:
    """Stand-in for a module, which is imported when an attribute of it is first read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


if TYPE_CHECKING:
    import dp_accounting
    import numpy as np
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.rdp import rdp_privacy_accountant
    from scipy import fft, optimize, signal, stats
else:
    dp_accounting = OnFirstUse("dp_accounting")
    fft = OnFirstUse("scipy.fft")
    np = OnFirstUse("numpy")
    optimize = OnFirstUse("scipy.optimize")
    pld_pmf = OnFirstUse("dp_accounting.pld.pld_pmf")
    privacy_loss_distribution = OnFirstUse("dp_accounting.pld.privacy_loss_distribution")
    rdp_privacy_accountant = OnFirstUse("dp_accounting.rdp.rdp_privacy_accountant")
    signal = OnFirstUse("scipy.signal")
    stats = OnFirstUse("scipy.stats")
