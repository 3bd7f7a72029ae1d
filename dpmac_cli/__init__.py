"""dpmac: train image classifiers under differential privacy, and price that privacy.

What the command line does can be done from Python: the names below are kept stable, and
docs/library.md shows them at work. Each is loaded when it is first used, so that a program that
only asks for prices does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dpmac_cli.accounting import (
        EpsilonSchedule,
        TrainingEvent,
        epsilon_schedule,
        format_epsilon,
        repeat_and_select,
        statement,
        total_delta,
        total_epsilon,
    )
    from dpmac_cli.assembly import make_trainer
    from dpmac_cli.budget import settle_noise, training_event
    from dpmac_cli.calibration import calibrate_noise, largest_batch, least_delta, longest_run
    from dpmac_cli.catalog import DATASETS, MODELS
    from dpmac_cli.compare import Comparison, collect
    from dpmac_cli.config import Resolved, resolve
    from dpmac_cli.data import Data, Split, load_data
    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments
    from dpmac_cli.dp.optimizers import OPTIMIZERS, Optimizer
    from dpmac_cli.dp.rules import Rule
    from dpmac_cli.engine import Evaluated, Evaluation, Progress, Trainer, evaluate, fit
    from dpmac_cli.errors import (
        BudgetError,
        DivergedError,
        DpmacError,
        InputError,
        ModelError,
        RunError,
    )
    from dpmac_cli.feature_cache import Computing
    from dpmac_cli.grid import Grid, plan
    from dpmac_cli.plots import draw_comparison, draw_prices
    from dpmac_cli.pricing import Row, price
    from dpmac_cli.release import Released, load_model
    from dpmac_cli.run import Finished, Reduced, RunEvent, Started, Update, finish, resume, train
    from dpmac_cli.scoring import Scored, score
    from dpmac_cli.settings import TrainConfig

#: Where each name is.
_HOMES = {
    "accounting": (
        *("EpsilonSchedule", "TrainingEvent", "epsilon_schedule", "format_epsilon"),
        *("repeat_and_select", "statement", "total_delta", "total_epsilon"),
    ),
    "assembly": ("make_trainer",),
    "budget": ("settle_noise", "training_event"),
    "calibration": ("calibrate_noise", "largest_batch", "least_delta", "longest_run"),
    "catalog": ("DATASETS", "MODELS"),
    "compare": ("Comparison", "collect"),
    "config": ("Resolved", "resolve"),
    "data": ("Data", "Split", "load_data"),
    "dp.mechanism": ("PrivateMean",),
    "dp.moments": ("Moments",),
    "dp.optimizers": ("OPTIMIZERS", "Optimizer"),
    "dp.rules": ("Rule",),
    "engine": ("Evaluated", "Evaluation", "Progress", "Trainer", "evaluate", "fit"),
    "errors": (
        *("BudgetError", "DivergedError", "DpmacError", "InputError", "ModelError", "RunError"),
    ),
    "feature_cache": ("Computing",),
    "grid": ("Grid", "plan"),
    "plots": ("draw_comparison", "draw_prices"),
    "pricing": ("Row", "price"),
    "release": ("Released", "load_model"),
    "run": (
        *("Finished", "Reduced", "RunEvent", "Started", "Update", "finish", "resume", "train"),
    ),
    "scoring": ("Scored", "score"),
    "settings": ("TrainConfig",),
}

__all__ = [
    "DATASETS",
    "MODELS",
    "OPTIMIZERS",
    "BudgetError",
    "Comparison",
    "Computing",
    "Data",
    "DivergedError",
    "DpmacError",
    "EpsilonSchedule",
    "Evaluated",
    "Evaluation",
    "Finished",
    "Grid",
    "InputError",
    "ModelError",
    "Moments",
    "Optimizer",
    "PrivateMean",
    "Progress",
    "Reduced",
    "Released",
    "Resolved",
    "Row",
    "Rule",
    "RunError",
    "RunEvent",
    "Scored",
    "Split",
    "Started",
    "TrainConfig",
    "Trainer",
    "TrainingEvent",
    "Update",
    "__version__",
    "calibrate_noise",
    "collect",
    "draw_comparison",
    "draw_prices",
    "epsilon_schedule",
    "evaluate",
    "finish",
    "fit",
    "format_epsilon",
    "largest_batch",
    "least_delta",
    "load_data",
    "load_model",
    "longest_run",
    "make_trainer",
    "plan",
    "price",
    "repeat_and_select",
    "resolve",
    "resume",
    "score",
    "settle_noise",
    "statement",
    "total_delta",
    "total_epsilon",
    "train",
    "training_event",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"dpmac_cli.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is loaded and what can be."""
    return sorted({*globals(), *__all__})
