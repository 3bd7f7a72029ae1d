"""Settings of a training run and their allowed values, from settings.toml. Imports no torch.

A setting has the same name as a flag, as a YAML key and as a keyword.
"""

import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import ALIASES, SAMPLERS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import STANDARDS, TABLES
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.registry import BACKBONES, FEATURES, MODELS, PARTS
from dpmac_cli.training.schedules import AUGMENTS, LOSSES, SCHEDULES

#: Test metrics that can be shown, and their display names.
METRICS: Mapping[str, str] = {
    "accuracy": "accuracy",
    "balanced-accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "average-precision": "average precision",
    "f1": "F1",
}
#: Metrics that can be released with noise.
COVERED = ("accuracy", "balanced-accuracy")
#: Values that may replace a registered name: a test and a description.
OWN_DATA = (
    lambda text: "/" in text or text.endswith((".npz", *TABLES)) or Path(text).exists(),
    "a folder with one folder of images per class, an .npz, or a table (.csv, .tsv, .parquet)",
)
OWN_MODEL = (lambda text: ":" in text, "your own FILE.py:FACTORY or MODULE:FACTORY")
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
#: Details that settings.toml cannot contain: names defined elsewhere, and patterns.
DETAILS: Mapping[str, Mapping[str, Any]] = {
    "dataset": {"choices": tuple(DATASETS), "besides": OWN_DATA},
    "model": {"choices": tuple(MODELS), "besides": OWN_MODEL},
    "features": {"choices": tuple(FEATURES)},
    "backbone": {"choices": tuple(BACKBONES)},
    "train": {"choices": tuple(PARTS)},
    "standardise": {"choices": tuple(STANDARDS)},
    "sampler": {"choices": tuple(SAMPLERS), "renamed": ALIASES},
    "optimizer": {"choices": tuple(OPTIMIZERS)},
    "lr_schedule": {"choices": SCHEDULES},
    "augment": {"choices": AUGMENTS},
    "loss": {"choices": LOSSES},
    "metric": {"choices": tuple(METRICS)},
    "feature_range": {"pattern": (rf"{NUMBER},{NUMBER}", "two numbers, such as 0,1")},
    "class_weights": {
        "pattern": (rf"\s*{NUMBER}(\s*,\s*{NUMBER})+\s*", "two numbers or more, such as 1,5")
    },
}
#: Types of values by their names in the TOML files, and their limits, by :data:`LIMITS`.
TYPES: Mapping[str, tuple[type, dict[str, Any]]] = {
    "text": (str, {}),
    "switch": (bool, {}),
    "path": (Path, {}),
    "whole number": (int, {}),
    "number": (float, {}),
    "positive": (float, {"gt": 0}),
    "noise": (float, {"ge": SIGMA_MIN, "le": SIGMA_MAX}),
    "noise or none": (float, {"ge": 0, "le": SIGMA_MAX}),
    # Squares and fourth roots of these, and quotients by them, fit into float32.
    "scale": (float, {"ge": 1e-10, "le": 1e10}),
    "variance": (float, {"ge": 1e-30, "le": 1e10}),
    "count": (int, {"ge": 1, "le": 10**9}),
    "steps": (int, {"ge": 1, "le": MOST_STEPS}),
    "length": (int, {"ge": 0, "le": MOST_STEPS}),
    "decay": (float, {"ge": 0, "lt": 1}),
    "probability": (float, {"gt": 0, "lt": 1}),
}
#: Kinds of limits by name: in words, and as a test of a number and its limit.
LIMITS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    **{"ge": ("at least", operator.ge), "gt": ("above", operator.gt)},
    **{"le": ("at most", operator.le), "lt": ("below", operator.lt)},
}
#: Groups of settings in the help.
DATA, OPTIMIZER, RECIPE = "Your own data", "Optimizer", "Recipe"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: its allowed values and its help."""

    help: str
    panel: str  # group in the help
    value: str = "text"  # type, a key of TYPES
    limits: dict[str, Any] = field(default_factory=dict)  # limits of a number, besides the type's
    several: bool = False  # whether several comma-separated values may be given
    default: Any = None  # None if it depends on other settings
    otherwise: str = ""  # the default in words; empty if it turns nothing on
    choices: Sequence[str] = ()  # allowed names
    renamed: Mapping[str, str] = field(default_factory=dict)  # current names, by earlier names
    besides: tuple[Callable[[str], bool], str] | None = None  # other values: test and description
    pattern: Sequence[str] = ()  # pattern of other text and its description; empty for any text
    needs: str = ""  # other flags, one of which is required
    not_with: Mapping[str, str] = field(default_factory=dict)  # contradicting settings, and why
    recorded: bool = True  # whether it is in config.yaml: it describes the run, not the machine
    fixed: bool = False  # whether a fork cannot change it
    metavar: str = ""  # placeholder for the value in the help; default from the type or choices
    also: Sequence[str] = ()  # names in other libraries, for hints

    @property
    def kind(self) -> type:
        """Python type of a value."""
        return TYPES[self.value][0]

    @property
    def bounds(self) -> str:
        """Limits of a number in words: "above 0 and below 1"."""
        return " and ".join(
            f"{LIMITS[name][0]} {limit:{',' if isinstance(limit, int) else 'g'}}"
            for name, limit in (TYPES[self.value][1] | self.limits).items()
        )

    @property
    def known(self) -> str:
        """Return its choices in words."""
        more = f"; or {self.besides[1]}" if self.besides else ""
        return f"{', '.join(self.choices)}{more}"

    def allows(self, number: float) -> bool:
        """Return whether a number is within the limits."""
        limits = TYPES[self.value][1] | self.limits
        return all(LIMITS[name][1](number, limit) for name, limit in limits.items())


def settings_in(
    groups: Mapping[str, Mapping[str, Any]], details: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Setting]:
    """Return settings by name from one table per group; ``details`` adds fields to some."""
    return {
        name: Setting(panel=panel, **entry, **details.get(name, {}))
        for panel, entries in groups.items()
        for name, entry in entries.items()
    }


def read_table(file: str, details: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Setting]:
    """Return the settings of a file in this folder; see :func:`settings_in`."""
    text = Path(__file__).with_name(file).read_text("utf-8")
    return settings_in(tomllib.loads(text), details)


def flag_name(name: str) -> str:
    """Return the name of a setting as a flag."""
    return name.replace("_", "-")


def metric_key(name: str) -> str:
    """Return the key of a metric in metrics.jsonl."""
    return f"test_{name.replace('-', '_')}"


SETTINGS = read_table("settings.toml", DETAILS)
DEFAULTS: Mapping[str, Any] = {
    name: False if setting.kind is bool else setting.default for name, setting in SETTINGS.items()
}
#: Defaults of a run without a recipe.
RECIPE_DEFAULTS: Mapping[str, Any] = {
    name: DEFAULTS[name] for name, setting in SETTINGS.items() if setting.panel == RECIPE
}
