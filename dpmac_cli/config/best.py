"""The best recipe for a budget: one rule from public facts, tuned as docs/recipes.md describes.

It depends on the number of records, their shape, epsilon and the kind of network, never on the
contents of a record.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dpmac_cli.config.keywords import Keywords, SettingName
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.registry import STEPS_PER_EPOCH, Dataset
from dpmac_cli.models.registry import MODELS, Scattered

#: Epsilon without --sigma or --epsilon.
EPSILON = 3.0
#: Largest number of scattering features per image: 50 kB in the cache.
MOST_FEATURES = 25_000
#: Settings of which each decides what a network takes instead of scattering features.
_OF_NETWORK: tuple[SettingName, ...] = (
    "model",
    "features",
    "backbone",
    "pretrained",
    "augmentations",
    "augment",
)
#: Number of inputs above which a head, or a perceptron, is trained as a wide one.
WIDE, FEW_INPUTS = 8192, 256
#: Learning rates on features of a backbone for images, and of an encoder of texts.
OF_IMAGES, OF_TEXTS = 0.003, 0.005
#: Learning rates by optimizer, as multiples of dp-adam's.
RATES: Mapping[str, float] = {"dp-adam": 1.0}


@dataclass(frozen=True)
class Training:
    """Training of a kind of network: ``share`` steps per epoch, and dp-adam's learning rate."""

    share: int
    epochs: int
    rate: float
    ema: float


def best(given: Settings, facts: Dataset) -> Keywords:
    """Return the settings of the best recipe, to be filled in where none is given."""
    chosen = _network(given, facts) | _budget(given)
    way = training(given.filled(chosen), facts)
    optimizer = given.optimizer if "optimizer" in given.given else "dp-adam"
    chosen |= {
        "optimizer": optimizer,
        "batch_size": math.ceil(facts.train_size / way.share),
        "epochs": None if given.steps is not None else way.epochs,
        "ema": way.ema,
    }
    if optimizer in RATES:
        chosen["lr"] = float(f"{RATES[optimizer] * way.rate:.2g}")
    return chosen


def reasons(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose, with reasons; the rate of a given optimizer separately."""
    rule = best(given, facts)
    way = training(given.filled(rule), facts)
    chosen = {name: value for name, value in rule.items() if name not in given.given and value}
    said = {
        "features": f"--features {{}} (images of at most {MOST_FEATURES:,} features)",
        "batch_size": f"batch {{:,}} (n / {way.share})",
        "epochs": "{} epochs",
        "optimizer": "{}",
        "lr": "learning rate {:g}",
        "ema": "EMA {:g}",
    }
    parts = {name: text.format(chosen[name]) for name, text in said.items() if name in chosen}
    rate = parts.pop("lr", None) if "optimizer" in given.given else None
    if parts:
        yield ", ".join(parts.values())
    if rate is not None:
        yield f"{rate} for {given.optimizer}"


def _network(given: Settings, facts: Dataset) -> Keywords:
    """Return features for small images, unless a network or another input is given."""
    images = facts.holds == "images" and not facts.multilabel
    if not images or any(name in given.given for name in _OF_NETWORK):
        return {}
    kind = Scattered("scatter" if facts.shape[0] == 1 else "scatter-mirror")
    inputs = math.prod(kind.shape_of(facts.shape))
    if kind.fault(facts.shape) is not None or inputs > MOST_FEATURES:
        return {}
    return {"features": kind.kind}


def _budget(given: Settings) -> Keywords:
    """Return the default of epsilon, unless noise or another target is given."""
    if given.sigma is not None or given.epsilon is not None or given.no_dp:
        return {}
    most = EPSILON if given.max_epsilon is None else given.max_epsilon
    return {"epsilon": min(EPSILON, most)}


def training(given: Settings, facts: Dataset) -> Training:
    """Return how to train a network: a head of fixed features, a perceptron or another one."""
    if given.backbone is not None:
        return Training(STEPS_PER_EPOCH, 20, OF_TEXTS if facts.texts else OF_IMAGES, 0.95)
    if given.features is not None:
        wide = math.prod(Scattered(given.features).shape_of(facts.shape)) > WIDE
        return Training(6, 20, 0.003, 0.95) if wide else Training(12, 80, 0.002, 0.98)
    inputs, kind = math.prod(facts.shape), MODELS.get(given.model or facts.defaults.model)
    if kind is not None and kind.hidden and inputs > FEW_INPUTS:
        return Training(8, 10, 0.4 / math.sqrt(inputs), 0.9)
    return Training(STEPS_PER_EPOCH, 20, _rate(inputs), 0.95)


def _rate(inputs: int) -> float:
    """Return Adam's learning rate, to one digit, for records of ``inputs`` numbers."""
    return float(f"{min(0.01, 0.1 / math.sqrt(inputs)):.0e}")
