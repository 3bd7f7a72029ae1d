"""The best recipe for a budget: one rule from public facts, tuned as docs/recipes.md describes.

It depends on the number of records, their shape, epsilon and the kind of network, never on the
contents of a record.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.config.flags import flag_name
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.registry import DATASETS, Dataset
from dpmac_cli.models.registry import MODELS, Scattered
from dpmac_cli.tasks.classification import Classification

#: Epsilon without --sigma or --epsilon.
EPSILON = 3.0
#: Largest number of scattering features per image: 50 kB in the cache.
MOST_FEATURES = 25_000
#: Settings of which each decides what a network takes instead of scattering features.
_OF_NETWORK: tuple[str, ...] = (
    "model",
    "features",
    "backbone",
    "pretrained",
    "augmentations",
    "augment",
)
#: Features above which a head is wide, and inputs of a record up to which it is a small one.
WIDE, FEW_INPUTS = 8192, 256
#: n epsilon below which noise allows only few steps, and from which a table is large enough for a
#: hidden layer: with classes, and with numbers to predict for each of its inputs.
FEW, LARGE, LARGE_BY_INPUT = 30_000, 450, 1_000
#: Learning rates of Adam's rules, as multiples of dp-adam's: those that were best on fixed features
#: (docs/recipes.md). Rates of the others depend on the scale of the gradients.
RATES: Mapping[str, float] = {
    "dp-adam": 1,
    "dp-adambc": 1 / 3,
    "dp-macadam": 1 / 3,
    "dp-macadambc": 1 / 3,
}


@dataclass(frozen=True)
class Regime:
    """Batch, epochs, averaging, and learning rate of dp-adam, of a kind of network."""

    share: int  # steps per epoch: the expected batch is n / share
    epochs: int
    rate: float
    ema: float


#: Training of a network of any kind; on records of many inputs, its rate is lower.
ANY = Regime(12, 20, 0.01, 0.95)
#: Heads on vectors of public encoders of images and of texts.
IMAGES, TEXTS = Regime(12, 20, 0.003, 0.95), Regime(12, 20, 0.005, 0.9)


def best(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the best recipe, to be filled in where none is given."""
    chosen = _network(given, facts) | _budget(given)
    regime = _regime(given.filled(chosen), facts)
    batch: dict[str, Any] = {"batch_size": math.ceil(facts.train_size / regime.share)}
    return chosen | batch | _of_regime(given, regime)


def best_for_batches(given: Settings) -> dict[str, Any]:
    """Return the settings of the best recipe for any network on batches of a given size."""
    return _budget(given) | _of_regime(given, ANY)


def _of_regime(given: Settings, regime: Regime) -> dict[str, Any]:
    """Return the optimizer and settings that depend on it, in a regime."""
    optimizer = given.optimizer if "optimizer" in given.explicit else "dp-adam"
    chosen: dict[str, Any] = {
        "optimizer": optimizer,
        "epochs": None if given.steps is not None else regime.epochs,
        "ema": regime.ema,
    }
    if optimizer in RATES:
        chosen["lr"] = float(f"{RATES[optimizer] * regime.rate:.2g}")
    return chosen


def reasons(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose, as flags; the rate of a given optimizer separately."""
    rule = best(given, facts)
    said = {*given.explicit, "epsilon"}
    chosen = {name: value for name, value in rule.items() if name not in said and value}
    rate = chosen.pop("lr", None) if "optimizer" in given.explicit else None
    if chosen:
        yield " ".join(f"--{flag_name(name)} {value}" for name, value in chosen.items())
    if rate is not None:
        yield f"--lr {rate} for {given.optimizer}"


def _network(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return features of small images and a network for tables, unless an input is given."""
    if not given.explicit.keys().isdisjoint(_OF_NETWORK):
        return {}
    if facts.holds == "numbers" and math.prod(facts.shape) <= FEW_INPUTS:
        return {"model": _model_of_table(given, facts)}
    if facts.holds == "images" and isinstance(facts.task, Classification):
        return _features_of_images(facts.shape)
    return {}


def _model_of_table(given: Settings, facts: Dataset) -> str:
    """Return a network for tables: one with a hidden layer if there are enough records."""
    classes = isinstance(facts.task, Classification)
    least = LARGE if classes else LARGE_BY_INPUT * math.prod(facts.shape)
    return "mlp-small" if _scale(given, facts) >= least else "linear"


def _features_of_images(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return scattering features of images (channels, height, width), if they are small."""
    kind = Scattered("scatter" if shape[0] == 1 else "scatter-mirror")
    if kind.fault(shape) is not None or math.prod(kind.shape_of(shape)) > MOST_FEATURES:
        return {}
    return {"features": kind.kind}


def _budget(given: Settings) -> dict[str, Any]:
    """Return the default of epsilon, unless noise or another target is given."""
    if given.sigma is not None or given.epsilon is not None or given.no_dp:
        return {}
    most = EPSILON if given.max_epsilon is None else given.max_epsilon
    return {"epsilon": min(EPSILON, most)}


def _regime(given: Settings, facts: Dataset) -> Regime:
    """Return how to train a network: a head of fixed features, a perceptron or another one."""
    if given.backbone is not None:
        return TEXTS if facts.texts else IMAGES
    if given.features is not None:
        kind_of_features = Scattered(given.features)
        if kind_of_features.fault(facts.shape) is None:
            features = math.prod(kind_of_features.shape_of(facts.shape))
            return _of_features(features, _scale(given, facts))
    model = given.model or facts.defaults.model
    kind, inputs = MODELS.get(model), math.prod(facts.shape)
    if kind is not None and kind.builder == "perceptron":
        if model == "mlp-small" and inputs <= FEW_INPUTS and isinstance(facts.task, Classification):
            return _of_narrow(_scale(given, facts))
        return _of_perceptron(inputs, _scale(given, facts))
    return replace(ANY, rate=min(ANY.rate, 0.1 / math.sqrt(inputs)))


def _of_features(features: int, scale: float) -> Regime:
    """Return how to train a linear layer on scattering features."""
    if scale < FEW:
        return Regime(6, 20, min(0.01, max(0.003, 0.18 / math.sqrt(features))), 0.9)
    return Regime(6, 20, 0.003, 0.95) if features > WIDE else Regime(12, 80, 0.002, 0.98)


def _of_narrow(scale: float) -> Regime:
    """Return how to train classes of a table on a narrow hidden layer."""
    return Regime(6, 20, 0.04, 0.9) if scale < FEW else Regime(12, 20, 0.06, 0.95)


def _of_perceptron(inputs: int, scale: float) -> Regime:
    """Return how to train a perceptron: few steps on many records each, unless noise is small."""
    if inputs > FEW_INPUTS:
        return Regime(8, 10, 0.42 / math.sqrt(inputs), 0.9)
    return Regime(3, 20, 0.03, 0.9) if scale < FEW else Regime(12, 20, 0.01, 0.95)


def _scale(given: Settings, facts: Dataset) -> float:
    """Return n epsilon: noise matters as much for half of the records as for half of epsilon."""
    return facts.train_size * (given.epsilon or EPSILON)


def recipe_of(given: Settings) -> str:
    """Return PAPER or BEST.

    Noise that is given means the run of the paper, where the paper describes one.
    """
    described = given.dataset in DATASETS and given.backbone is None
    noise = described and (given.sigma is not None or given.no_dp)
    return given.recipe or (PAPER if noise else BEST)


def of_recipe(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the recipe, for those that are not given."""
    recipe = recipe_of(given)
    return {"recipe": recipe, **(best(given, facts) if recipe == BEST else {})}


def recipe_notes(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose, and why."""
    if recipe_of(given) == BEST:
        yield from (f"recipe best: {part}." for part in reasons(given, facts))
