"""Default values of settings, which depend on dataset, optimizer and other settings.

The best recipe for a budget is one rule from public facts, tuned as docs/recipes.md describes. It
depends on the number of records, their shape, epsilon and the kind of network, never on the
contents of a record. So defaults cost no epsilon.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.config.datasets import DATASETS, Dataset, Defaults
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.networks import (
    BACKBONES,
    COLUMNS,
    FEATURES,
    MODELS,
    SMALL,
    TableColumns,
    Trained,
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
from dpmac_cli.tasks.regression import Regression

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
    """Training of a kind of network: batch, epochs, averaging, and learning rate of dp-adam.

    Attributes:
        share: steps per epoch: the expected batch is n / share.
        epochs: number of epochs.
        rate: learning rate of dp-adam; :data:`RATES` has those of other optimizers.
        ema: decay of the moving average of the weights.
    """

    share: int
    epochs: int
    rate: float
    ema: float


#: Training of a network of any kind; on records of many inputs, its rate is lower.
ANY = Regime(share=12, epochs=20, rate=0.01, ema=0.95)
#: Heads on vectors of public encoders of images and of texts.
IMAGES = Regime(share=12, epochs=20, rate=0.003, ema=0.95)
TEXTS = Regime(share=12, epochs=20, rate=0.005, ema=0.9)
#: Epochs of a language model, and its learning rates: that of all weights times its width, and that
#: of a part of them times the square root of it (docs/language-models.md).
LANGUAGE_EPOCHS, WHOLE_MODEL, PART_OF_MODEL = 5, 0.64, 0.16


def best(settings: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the best recipe, to be filled in where none is given.

    They follow from public facts and from the given settings: network and features first, because
    batch, epochs and learning rate depend on them.

    Args:
        settings: settings as they were given. Those that were not given are ignored.
        facts: public facts of the dataset.

    Returns:
        Values by the names of the settings.
    """
    network = _network(settings, facts) | _budget(settings)
    filled = settings.filled(network)
    regime = _regime(filled, facts)
    batch = {"batch_size": math.ceil(facts.train_size / regime.share)}
    return network | batch | _clip_norm(filled, facts) | _of_regime(settings, regime)


def _clip_norm(settings: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the clip norm of the columns of a table, whose inputs have a norm of about its root.

    Errors of a number are much smaller than 1.
    """
    if settings.features != COLUMNS or not isinstance(facts.records, Table):
        return {}
    norm_of_inputs = math.sqrt(facts.records.wide + 1)
    share = 1.0
    if not isinstance(facts.task, Classification):
        share = 1 / 6 if settings.model == "linear" else 1 / 12
    return {"clip_norm": float(f"{share * norm_of_inputs:.3g}")}


def _of_regime(settings: Settings, regime: Regime) -> dict[str, Any]:
    """Return the optimizer and settings that depend on it, in a regime."""
    optimizer = settings.optimizer if "optimizer" in settings.explicit else "dp-adam"
    values: dict[str, Any] = {
        "optimizer": optimizer,
        "epochs": None if settings.steps is not None else regime.epochs,
        "ema": regime.ema,
    }
    if optimizer in RATES:
        values["lr"] = float(f"{RATES[optimizer] * regime.rate:.2g}")
    return values


def _network(settings: Settings, facts: Dataset) -> dict[str, Any]:
    """Return features of small images and a network for tables, unless an input is given."""
    if not settings.explicit.keys().isdisjoint(_OF_NETWORK):
        return {}
    records = facts.records
    classes = isinstance(facts.task, Classification)
    if isinstance(records, Table):
        return {"features": COLUMNS, "model": _network_of_table(settings, facts, records)}
    if records.kind == "numbers" and records.size <= FEW_INPUTS:
        needed = LARGE if classes else LARGE_BY_INPUT * records.size
        return {"model": "mlp-small" if _scale(settings, facts) >= needed else "linear"}
    scattering = FEATURES["scatter" if records.channels == 1 else "scatter-mirror"]
    if records.kind != scattering.reads or not classes or scattering.fault(records) is not None:
        return {}
    if math.prod(scattering.shape_of(records)) > MOST_FEATURES:
        return {}
    return {"features": scattering.kind}


def _network_of_table(settings: Settings, facts: Dataset, records: Table) -> str:
    """Return the network on the columns of a table, wider where more records bear its noise."""
    classes = isinstance(facts.task, Classification)
    needed = FEW_BY_COLUMN if classes else LARGE_BY_INPUT
    if _scale(settings, facts) < needed * records.wide:
        return "linear"
    (inputs,) = TableColumns(COLUMNS).shape_of(records)
    return "mlp-small" if inputs <= MOST_COLUMNS else "mlp"


def _budget(settings: Settings) -> dict[str, Any]:
    """Return the default of epsilon, unless noise or another target is given."""
    if settings.sigma is not None or settings.epsilon is not None or settings.no_dp:
        return {}
    most = EPSILON if settings.max_epsilon is None else settings.max_epsilon
    return {"epsilon": min(EPSILON, most)}


def _regime(settings: Settings, facts: Dataset) -> Regime:
    """Return how to train a network: a head of fixed features, a perceptron or another one."""
    scale, inputs = _scale(settings, facts), facts.records.size
    if settings.backbone is not None:
        return _of_backbone(settings, settings.backbone, facts)
    if settings.features is not None:
        features = FEATURES[settings.features]
        if isinstance(features, TableColumns):
            return _of_table(settings, facts)
        if features.fault(facts.records) is None:
            return _of_features(math.prod(features.shape_of(facts.records)), scale)
    model = settings.model or facts.defaults.model
    network = MODELS.get(model)
    if network is None or network.builder != "perceptron":
        return replace(ANY, rate=min(ANY.rate, 0.1 / math.sqrt(inputs)))
    if model == "mlp-small" and inputs <= FEW_INPUTS and isinstance(facts.task, Classification):
        return _of_narrow(scale)
    return _of_perceptron(inputs, scale)


def _of_backbone(settings: Settings, backbone: str, facts: Dataset) -> Regime:
    """Return how to train a head on vectors of a public network, or a language model."""
    if facts.task.network is None:
        return IMAGES if backbone in BACKBONES else TEXTS
    width = read_encoder(backbone).config.width
    rate = WHOLE_MODEL / width if settings.train == "all" else PART_OF_MODEL / math.sqrt(width)
    return replace(TEXTS, epochs=LANGUAGE_EPOCHS, rate=rate)


def _of_table(settings: Settings, facts: Dataset) -> Regime:
    """Return how to train on the columns of a table: full batches, as far as they are cheap."""
    classes = isinstance(facts.task, Classification)
    share = math.ceil(facts.train_size / FULL_BATCH)
    rate = 0.02 if classes else 0.01
    if settings.model == "linear" and isinstance(facts.records, Table):
        rate_of_one = RATE_OF_COLUMNS if classes else RATE_OF_NUMBERS
        rate = float(f"{min(MOST_RATE, rate_of_one / facts.records.wide):.2g}")
    return Regime(share, epochs=math.ceil(TABLE_STEPS / share), rate=rate, ema=0.95)


def _of_features(features: int, scale: float) -> Regime:
    """Return how to train a linear layer on a number of fixed features."""
    if scale < FEW:
        rate = 0.18 / math.sqrt(features)
        rate = min(0.01, max(0.003, rate))
        return Regime(share=6, epochs=20, rate=rate, ema=0.9)
    if features > WIDE:
        return Regime(share=6, epochs=20, rate=0.003, ema=0.95)
    return Regime(share=12, epochs=80, rate=0.002, ema=0.98)


def _of_narrow(scale: float) -> Regime:
    """Return how to train classes of a table on a narrow hidden layer."""
    if scale < FEW:
        return Regime(share=6, epochs=20, rate=0.04, ema=0.9)
    return Regime(share=12, epochs=20, rate=0.06, ema=0.95)


def _of_perceptron(inputs: int, scale: float) -> Regime:
    """Return how to train a perceptron: few steps on many records each, unless noise is small."""
    if inputs > FEW_INPUTS:
        return Regime(share=8, epochs=10, rate=0.42 / math.sqrt(inputs), ema=0.9)
    if scale < FEW:
        return Regime(share=3, epochs=20, rate=0.03, ema=0.9)
    return ANY


def _scale(settings: Settings, facts: Dataset) -> float:
    """Return n epsilon: noise matters as much for half of the records as for half of epsilon."""
    return facts.train_size * (settings.epsilon or EPSILON)


def recipe_of(settings: Settings) -> str:
    """Return PAPER or BEST, or the name that was given.

    Noise that is given means the run of the paper, where the paper describes one.

    Args:
        settings: settings as they were given.
    """
    if settings.recipe:
        return settings.recipe
    described = settings.dataset in DATASETS and settings.backbone is None
    noise_given = settings.sigma is not None or settings.no_dp
    return PAPER if described and noise_given else BEST


def recipe_notes(settings: Settings, facts: Dataset) -> Iterator[str]:
    """Yield one note on the settings that ``recipe=best`` chose; none under another recipe.

    Settings that were given, epsilon, and those that the recipe leaves off are not named.

    Args:
        settings: settings as they were given.
        facts: public facts of the dataset.
    """
    if recipe_of(settings) != BEST:
        return
    known = {*settings.explicit, "epsilon"}
    chosen = list[str]()
    for name, value in best(settings, facts).items():
        if name not in known and value:
            chosen.append(f"{{{name}=}}{value}")
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


def completed(settings: Settings, facts: Dataset) -> Settings:
    """Return settings with every default that depends on the dataset or on others.

    That of ``physical_batch`` depends on the device: :func:`physical_batch`.

    Args:
        settings: settings as they were given. Given values stay.
        facts: public facts of the dataset. No record is read.
    """
    recipe = recipe_of(settings)
    rule = best(settings, facts) if recipe == BEST else {}
    if isinstance(facts.records, Table) and (facts.records.is_open or facts.task.open):
        rule = {"features": COLUMNS, **rule}  # nothing else can read them
    settings = settings.filled({"recipe": recipe, **rule})
    settings = settings.filled({"calibration": _calibration(settings, facts)})
    settings = settings.filled({"scale": _scale_of_numbers(settings, facts)})
    if settings.dataset not in DATASETS:
        settings = settings.filled({"delta": _delta(facts.train_size)})
    settings = settings.filled(_depending(settings, facts.defaults) | _of_task(settings, facts))
    if settings.train == "lora":
        settings = settings.filled({"lora_rank": Trained.rank})
    return settings


def _of_task(settings: Settings, facts: Dataset) -> dict[str, Any]:
    """Return defaults that depend on what is predicted: loss, metric, and network of tokens."""
    task = facts.task
    values: dict[str, Any] = {
        "loss": task.losses[0],
        "metric": task.headline.name,
    }
    if settings.augmentations is not None:
        values["augment"] = facts.augment
    if task.network is not None:
        values |= {"model": task.network, "train": "lora"}
    return values


def _counts_by_default(settings: Settings) -> bool:
    """Return whether noisy histograms are counted without being asked for.

    Their cost is a part of a target; where noise is given, they would add to what it costs.
    """
    return settings.recipe == BEST and settings.epsilon is not None


def _calibration(settings: Settings, facts: Dataset) -> str:
    """Return the default way to calibrate: none where noise is given, or nobody uses the model."""
    used = facts.task.calibrates and not settings.canaries
    return HISTOGRAM if used and _counts_by_default(settings) else NO_CALIBRATION


#: Numbers n epsilon / sqrt(C) below which the ranges of C columns cannot be found, and from which
#: ranks gain more than they cost: benchmarks/tables.py.
NEEDED, ENOUGH = 200, 800


def _scale_of_numbers(settings: Settings, facts: Dataset) -> str:
    """Return the default scale of numbers with a declared range, also of one to predict."""
    records, task = facts.records, facts.task
    if settings.features != COLUMNS or not _counts_by_default(settings):
        return DECLARED_SCALE
    if not isinstance(records, Table):
        return DECLARED_SCALE
    ranged_target = isinstance(task, Regression) and task.calibrates and not task.open
    if not records.count("number") and not ranged_target:
        return DECLARED_SCALE
    columns = max(1, records.count("number", *COUNTED))
    enough = _scale(settings, facts) >= ENOUGH * math.sqrt(columns)
    return PRIVATE_SCALE if enough else DECLARED_SCALE


def _delta(records: int) -> float:
    """Return the default of delta for records without tuned defaults."""
    return min(DELTA, math.pow(records, -1.1))


def _depending(settings: Settings, defaults: Defaults) -> dict[str, Any]:
    """Return defaults that depend on those of a dataset, or on other settings."""
    optimizer = OPTIMIZERS[settings.optimizer]
    tracked = "phi" in optimizer.used() and settings.phi == "tracked"
    other_noise = settings.no_dp or settings.epsilon is not None
    values: dict[str, Any] = {
        "model": defaults.model,
        "batch_size": defaults.batch_size,
        "sigma": None if other_noise else defaults.sigma,
        "epochs": None if settings.steps is not None else defaults.epochs,
        "clip_norm": defaults.clip_norm,
        "h1": defaults.h1,
        "h2": defaults.h2,
        # v-hat minus the noise is about as large as h1, so its lower bound must be, too.
        "gamma_prime": max(GAMMA_PRIME, 2 * defaults.h1) if tracked else GAMMA_PRIME,
        "lr": optimizer.default_lr(str(settings.dataset)),
        "beta1": optimizer.default("beta1", 0.9),
        "beta2": optimizer.default("beta2", 0.999),
    }
    if settings.features is not None or settings.backbone is not None:
        values["model"] = "linear"
    backbone = BACKBONES.get(settings.backbone or "")
    if backbone is not None:
        values["backbone_size"] = backbone.size
    if settings.backbone is not None:
        values["train"] = "head"
    elif settings.pretrained is not None:
        values["train"] = "all"
    return values


def _samples_at_a_time(settings: Settings, facts: Dataset) -> int:
    """Return the physical batch size of a network; all views of a sample, or its texts, count."""
    samples, network = facts.defaults.physical_batch, MODELS.get(settings.model)
    backbone = BACKBONES.get(settings.backbone or "")
    if settings.train == "head":
        samples = max(samples, ROWS_AT_A_TIME)
    elif backbone is not None:
        size = settings.backbone_size or backbone.size
        samples = max(1, PIXELS_AT_A_TIME // size**2)
    elif settings.backbone is not None:
        records = settings.records_per_unit if settings.unit else 1
        samples = max(1, INPUTS_AT_A_TIME // (records * facts.records.size))
    elif network is not None:
        samples = max(samples, network.samples_at_a_time(facts.records.pixels))
    return max(1, samples // (settings.augmentations or 1))


def physical_batch(settings: Settings, facts: Dataset, device: str) -> int:
    """Return the number of samples to process at a time.

    A GPU processes more of them, as far as images have one size.

    Args:
        settings: completed settings.
        facts: public facts of the dataset.
        device: type of the device, such as "cuda".
    """
    if settings.physical_batch is not None:
        return settings.physical_batch
    samples = _samples_at_a_time(settings, facts)
    if device != "cuda" or settings.train == "head" or settings.backbone is not None:
        return samples
    pixels = max(SMALL, facts.records.pixels)
    fitting = ON_GPU * SMALL // pixels // (settings.augmentations or 1)
    return max(samples, fitting)
