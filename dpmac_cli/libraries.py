"""Libraries that are slow to import or optional, each imported when one of its names is first used.

Help, messages about mistakes and most commands need none of them. This is the only place that puts
an import off: a module that cannot do anything without a library imports it at its top.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = (
    "dp_accounting",
    "efficientnet_lite",
    "fft",
    "interpolate",
    "jinja2",
    "markdown_it",
    "matplotlib",
    "mpl_figure",
    "np",
    "optimize",
    "pld_pmf",
    "privacy_loss_distribution",
    "rdp_privacy_accountant",
    "signal",
    "sklearn_datasets",
    "sklearn_metrics",
    "special",
    "stats",
    "tokenizers",
    "torch",
    "torch_data",
    "transformers",
    "vision_datasets",
    "vision_models",
)


class OnFirstUse:
    """Stand-in for a module, which is imported when an attribute of it is first read.

    Args:
        module: full name of the module, such as "scipy.stats".

    Raises:
        ImportError: an attribute is read, and the module is not installed.

    >>> OnFirstUse("math").sqrt(4)
    2.0
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


if TYPE_CHECKING:
    import dp_accounting
    import efficientnet_lite_pytorch as efficientnet_lite
    import jinja2
    import markdown_it
    import matplotlib
    import numpy as np
    import tokenizers
    import torch
    import transformers
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.rdp import rdp_privacy_accountant
    from matplotlib import figure as mpl_figure
    from scipy import fft, interpolate, optimize, signal, special, stats
    from sklearn import datasets as sklearn_datasets
    from sklearn import metrics as sklearn_metrics
    from torch.utils import data as torch_data
    from torchvision import datasets as vision_datasets
    from torchvision import models as vision_models
else:
    dp_accounting = OnFirstUse("dp_accounting")
    efficientnet_lite = OnFirstUse("efficientnet_lite_pytorch")
    fft = OnFirstUse("scipy.fft")
    interpolate = OnFirstUse("scipy.interpolate")
    jinja2 = OnFirstUse("jinja2")
    markdown_it = OnFirstUse("markdown_it")
    matplotlib = OnFirstUse("matplotlib")
    mpl_figure = OnFirstUse("matplotlib.figure")
    np = OnFirstUse("numpy")
    optimize = OnFirstUse("scipy.optimize")
    pld_pmf = OnFirstUse("dp_accounting.pld.pld_pmf")
    privacy_loss_distribution = OnFirstUse("dp_accounting.pld.privacy_loss_distribution")
    rdp_privacy_accountant = OnFirstUse("dp_accounting.rdp.rdp_privacy_accountant")
    signal = OnFirstUse("scipy.signal")
    sklearn_datasets = OnFirstUse("sklearn.datasets")
    sklearn_metrics = OnFirstUse("sklearn.metrics")
    special = OnFirstUse("scipy.special")
    stats = OnFirstUse("scipy.stats")
    tokenizers = OnFirstUse("tokenizers")
    torch = OnFirstUse("torch")
    torch_data = OnFirstUse("torch.utils.data")
    transformers = OnFirstUse("transformers")
    vision_datasets = OnFirstUse("torchvision.datasets")
    vision_models = OnFirstUse("torchvision.models")
