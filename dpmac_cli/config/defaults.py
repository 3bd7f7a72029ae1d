"""Default values of settings, which depend on dataset, optimizer and other settings.

The best recipe for a budget is one rule from public facts, tuned as docs/recipes.md describes. It
depends on the number of records, their shape, epsilon and the kind of network, never on the
contents of a record.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.config.datasets import DATASETS, Dataset, Defaults
from dpmac_cli.config.encoders import read_encoder
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.networks import (
    BACKBONES,
    COLUMNS,
    MODELS,
    SMALL,
    Scattered,
    TableColumns,
    Trained,
    fixed_features,
)
from dpmac_cli.config.records import COUNTED, Table
from dpmac_cli.config.settings import (
    DECLARED_SCALE,
    DELTA,
    HISTOGRAM,
    NO_CALIBRATION,
    PRIVATE_SCALE,
    Settings,
)
from dpmac_cli.optim import OPTIMIZERS
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
#: hidden layer: with classes, and with numbers to predict for each of its inputs or columns.
FEW, LARGE, LARGE_BY_INPUT = 30_000, 450, 1_000
#: n epsilon for each column of a table from which a hidden layer pays with classes, inputs up to
#: which it is narrow, records up to which a step takes all of them, and number of steps.
FEW_BY_COLUMN, MOST_COLUMNS, FULL_BATCH, TABLE_STEPS = 250, 1000, 50_000, 80
#: Learning rate of a linear layer on the columns of a table, times their number, for classes and
#: for numbers, and at most.
RATE_OF_COLUMNS, RATE_OF_NUMBERS, MOST_RATE = 0.3, 0.08, 0.08
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
#: Epochs of a language model, and its learning rates: that of all weights times its width, and that
#: of a part of them times the square root of it (docs/language-models.md).
LANGUAGE_EPOCHS, WHOLE_MODEL, PART_OF_MODEL = 5, 0.64, 0.16


def best(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the best recipe, to be filled in where none is given."""
    chosen = _network(given, facts) | _budget(given)
    filled = given.filled(chosen)
    regime = _regime(filled, facts)
    batch: dict[str, Any] = {"batch_size": math.ceil(facts.train_size / regime.share)}
    return chosen | batch | _clip_norm(filled, facts) | _of_regime(given, regime)


def _clip_norm(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the clip norm of the columns of a table, whose inputs have a norm of about its root.

    Errors of a number are much smaller than 1.
    """
    if given.features != COLUMNS or not isinstance(facts.records, Table):
        return {}
    whole = math.sqrt(facts.records.wide + 1)
    of_numbers = 1 / 6 if given.model == "linear" else 1 / 12
    share = 1.0 if isinstance(facts.task, Classification) else of_numbers
    return {"clip_norm": float(f"{share * whole:.3g}")}


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


def _network(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return features of small images and a network for tables, unless an input is given."""
    if not given.explicit.keys().isdisjoint(_OF_NETWORK):
        return {}
    records, classes = facts.records, isinstance(facts.task, Classification)
    inputs = records.size
    if isinstance(records, Table):
        needed = FEW_BY_COLUMN if classes else LARGE_BY_INPUT
        few = _scale(given, facts) < needed * records.wide
        small = TableColumns().shape_of(records)[0] <= MOST_COLUMNS
        return {"features": COLUMNS, "model": "linear" if few else "mlp-small" if small else "mlp"}
    if records.kind == "numbers" and inputs <= FEW_INPUTS:
        large = _scale(given, facts) >= (LARGE if classes else LARGE_BY_INPUT * inputs)
        return {"model": "mlp-small" if large else "linear"}
    kind = Scattered("scatter" if records.channels == 1 else "scatter-mirror")
    if records.kind == kind.reads and classes and kind.fault(records) is None:
        small = math.prod(kind.shape_of(records)) <= MOST_FEATURES
        return {"features": kind.kind} if small else {}
    return {}


def _budget(given: Settings) -> dict[str, Any]:
    """Return the default of epsilon, unless noise or another target is given."""
    if given.sigma is not None or given.epsilon is not None or given.no_dp:
        return {}
    most = EPSILON if given.max_epsilon is None else given.max_epsilon
    return {"epsilon": min(EPSILON, most)}


def _regime(given: Settings, facts: Dataset) -> Regime:
    """Return how to train a network: a head of fixed features, a perceptron or another one."""
    if given.backbone is not None:
        return _of_backbone(given, given.backbone, facts)
    if given.features is not None:
        kind_of_features = fixed_features(given.features)
        if isinstance(kind_of_features, TableColumns):
            return _of_table(given, facts)
        if kind_of_features.fault(facts.records) is None:
            features = math.prod(kind_of_features.shape_of(facts.records))
            return _of_features(features, _scale(given, facts))
    model = given.model or facts.defaults.model
    kind, inputs = MODELS.get(model), facts.records.size
    if kind is not None and kind.builder == "perceptron":
        if model == "mlp-small" and inputs <= FEW_INPUTS and isinstance(facts.task, Classification):
            return _of_narrow(_scale(given, facts))
        return _of_perceptron(inputs, _scale(given, facts))
    return replace(ANY, rate=min(ANY.rate, 0.1 / math.sqrt(inputs)))


def _of_backbone(given: Settings, backbone: str, facts: Dataset) -> Regime:
    """Return how to train a head on vectors of a public network, or a language model."""
    if facts.task.network is None:
        return IMAGES if backbone in BACKBONES else TEXTS
    width = read_encoder(backbone).config.width
    part = PART_OF_MODEL / math.sqrt(width)
    rate = WHOLE_MODEL / width if given.train == "all" else part
    return replace(TEXTS, epochs=LANGUAGE_EPOCHS, rate=rate)


def _of_table(given: Settings, facts: Dataset) -> Regime:
    """Return how to train on the columns of a table: full batches, as far as they are cheap."""
    share = math.ceil(facts.train_size / FULL_BATCH)
    rate = 0.02 if isinstance(facts.task, Classification) else 0.01
    if given.model == "linear" and isinstance(facts.records, Table):
        times = RATE_OF_COLUMNS if isinstance(facts.task, Classification) else RATE_OF_NUMBERS
        rate = float(f"{min(MOST_RATE, times / facts.records.wide):.2g}")
    return Regime(share, math.ceil(TABLE_STEPS / share), rate, 0.95)


def _of_features(features: int, scale: float) -> Regime:
    """Return how to train a linear layer on fixed features."""
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


def recipe_notes(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose."""
    if recipe_of(given) == BEST:
        said, rule = {*given.explicit, "epsilon"}, best(given, facts)
        chosen = [f"{{{n}=}}{v}" for n, v in rule.items() if n not in said and v]
        if chosen:
            yield f"recipe best: {' '.join(chosen)}."


#: Samples to process at a time if only a head is trained.
ROWS_AT_A_TIME = 1024
#: Samples of at most 32 by 32 pixels to process at a time on a GPU: launching the operations of a
#: chunk takes longer than the operations on fewer.
ON_GPU = 512
#: The paper does not state gamma'; this value reproduces Table I.
GAMMA_PRIME = 1e-8
#: Pixels to process at a time if a backbone is trained.
PIXELS_AT_A_TIME = 16 * 224**2
#: Inputs to process at a time if a text encoder is trained, of which nearly all are tokens: 32
#: texts of 128 tokens. LoRA on MiniLM then takes 2 GB.
INPUTS_AT_A_TIME = 4224


def completed(given: Settings, facts: Dataset) -> Settings:
    """Return settings with every default that depends on the dataset or on others.

    That of ``physical_batch`` depends on the device: :func:`physical_batch`.
    """
    recipe = recipe_of(given)
    rule = best(given, facts) if recipe == BEST else {}
    if isinstance(facts.records, Table) and (facts.records.is_open or facts.task.open):
        rule = {"features": COLUMNS, **rule}  # nothing else can read them
    given = given.filled({"recipe": recipe, **rule})
    given = given.filled({"calibration": _calibration(given, facts)})
    given = given.filled({"scale": _scale_of_numbers(given, facts)})
    if given.dataset not in DATASETS:
        given = given.filled({"delta": _delta(facts.train_size)})
    of_task: dict[str, Any] = {"loss": facts.task.losses[0], "metric": facts.task.headline.name}
    if given.augmentations is not None:
        of_task["augment"] = facts.augment
    if facts.task.network is not None:
        of_task |= {"model": facts.task.network, "train": "lora"}
        of_task |= {"lora_rank": Trained.rank} if given.train in (None, "lora") else {}
    return given.filled(_depending(given, facts.defaults) | of_task)


def _calibration(given: Settings, facts: Dataset) -> str:
    """Return the default way to calibrate: none where noise is given, or nobody uses the model."""
    targeted = given.recipe == BEST and given.epsilon is not None
    calibrated = targeted and facts.task.calibrates and not given.canaries
    return HISTOGRAM if calibrated else NO_CALIBRATION


#: Numbers n epsilon / sqrt(C) below which the ranges of C columns cannot be found, and from which
#: ranks gain more than they cost: benchmarks/tables.py.
NEEDED, ENOUGH = 200, 800


def _scale_of_numbers(given: Settings, facts: Dataset) -> str:
    """Return the default scale of numbers with a declared range."""
    targeted = given.recipe == BEST and given.epsilon is not None and given.features == COLUMNS
    if not (targeted and isinstance(facts.records, Table) and facts.records.count("number")):
        return DECLARED_SCALE
    numbers = facts.records.count("number", *COUNTED)
    return PRIVATE_SCALE if _scale(given, facts) >= ENOUGH * math.sqrt(numbers) else DECLARED_SCALE


def _delta(records: int) -> float:
    """Return the default of delta for records without tuned defaults."""
    return min(DELTA, math.pow(records, -1.1))


def _depending(given: Settings, defaults: Defaults) -> dict[str, Any]:
    """Return defaults that depend on those of a dataset, or on other settings."""
    chosen = OPTIMIZERS[given.optimizer]
    tracked = "phi" in chosen.used() and given.phi == "tracked"
    noise = given.no_dp or given.epsilon is not None
    found: dict[str, Any] = {
        "model": defaults.model,
        "batch_size": defaults.batch_size,
        "sigma": None if noise else defaults.sigma,
        "epochs": None if given.steps is not None else defaults.epochs,
        "clip_norm": defaults.clip_norm,
        "h1": defaults.h1,
        "h2": defaults.h2,
        # v-hat minus the noise is about as large as h1, so its lower bound must be, too.
        "gamma_prime": max(GAMMA_PRIME, 2 * defaults.h1) if tracked else GAMMA_PRIME,
        "lr": chosen.default_lr(str(given.dataset)),
        "beta1": chosen.default("beta1", 0.9),
        "beta2": chosen.default("beta2", 0.999),
    }
    if given.features is not None or given.backbone is not None:
        found["model"] = "linear"
    if (backbone := BACKBONES.get(given.backbone or "")) is not None:
        found["backbone_size"] = backbone.size
    if given.pretrained is not None or given.backbone is not None:
        found["train"] = "all" if given.backbone is None else "head"
    if given.train == "lora":
        found["lora_rank"] = Trained.rank
    return found


def _samples_at_a_time(found: Settings, facts: Dataset) -> int:
    """Return the physical batch size of a network; all views of a sample, or its texts, count."""
    most, kind = facts.defaults.physical_batch, MODELS.get(found.model)
    if found.train == "head":
        most = max(most, ROWS_AT_A_TIME)
    elif (backbone := BACKBONES.get(found.backbone or "")) is not None:
        size = found.backbone_size or backbone.size
        most = max(1, PIXELS_AT_A_TIME // size**2)
    elif found.backbone is not None:
        records = found.records_per_unit if found.unit else 1
        most = max(1, INPUTS_AT_A_TIME // (records * facts.records.size))
    elif kind is not None:
        most = max(most, kind.samples_at_a_time(facts.records.pixels))
    return max(1, most // (found.augmentations or 1))


def physical_batch(settings: Settings, facts: Dataset, device: str) -> int:
    """Return the number of samples to process at a time on a type of device, such as "cuda".

    A GPU processes more of them, as far as images have one size.
    """
    if settings.physical_batch is not None:
        return settings.physical_batch
    samples = _samples_at_a_time(settings, facts)
    if device != "cuda" or settings.train == "head" or settings.backbone is not None:
        return samples
    pixels = max(SMALL, facts.records.pixels)
    fitting = ON_GPU * SMALL // pixels // (settings.augmentations or 1)
    return max(samples, fitting)
