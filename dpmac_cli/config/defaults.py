"""Default values of settings, which depend on dataset, optimizer and other settings."""

import math
from typing import Any

from dpmac_cli.config.settings import DEFAULTS
from dpmac_cli.data.registry import DATASETS, EPOCHS, STEPS_PER_EPOCH, Dataset
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.registry import BACKBONES, MODELS, SMALL, Trained

#: Samples to process at a time if only a head is trained.
ROWS_AT_A_TIME = 1024
#: Samples of at most 32 by 32 pixels to process at a time on a GPU: launching the operations of a
#: chunk takes longer than the operations on fewer.
ON_GPU = 512
#: Default without --sigma or --epsilon, for your own data and with a backbone.
EPSILON = 3.0
#: The paper does not state gamma'; this value reproduces Table I.
GAMMA_PRIME = 1e-8
#: With fewer guesses, even if all are right, an audit cannot show an epsilon above 1.8.
FEW_GUESSES = 20
#: Pixels to process at a time if a backbone is trained.
PIXELS_AT_A_TIME = 16 * 224**2


def completed(given: dict[str, Any], facts: Dataset) -> dict[str, Any]:
    """Return the values of all settings, given some of them; None if there is no value."""
    own = given.get("dataset", DEFAULTS["dataset"]) not in DATASETS
    rule = _by_rule(given, facts) if own or given.get("backbone") is not None else {}
    if own:
        rule["delta"] = min(DEFAULTS["delta"], facts.train_size**-1.1)
    values = {**DEFAULTS, **_depending({**DEFAULTS, **rule, **given}, facts), **rule, **given}
    values["gpu_batch"] = given.get("physical_batch", values["gpu_batch"])
    return values


def _by_rule(given: dict[str, Any], facts: Dataset) -> dict[str, Any]:
    """Return defaults by dataset size, tuned on public data: see docs/recipes.md."""
    found: dict[str, Any] = {
        "optimizer": "dp-adam",
        "batch_size": -(-facts.train_size // STEPS_PER_EPOCH),
        "epochs": None if "steps" in given else EPOCHS,
        "ema": 0.95,
    }
    if given.get("optimizer", "dp-adam") == "dp-adam":
        fixed = {"backbone", "features"} & given.keys()
        found["lr"] = 0.003 if fixed else _rate(math.prod(facts.shape))
    if not {"sigma", "epsilon", "no_dp"} & given.keys():
        found["epsilon"] = min(EPSILON, given.get("max_epsilon", EPSILON))
    return found


def _rate(inputs: int) -> float:
    """Return Adam's learning rate, to one digit, for records of ``inputs`` numbers."""
    return float(f"{min(0.01, 0.1 / math.sqrt(inputs)):.0e}")


def _depending(values: dict[str, Any], facts: Dataset) -> dict[str, Any]:
    """Return defaults that depend on the dataset or on other settings."""
    defaults, adaclip = facts.defaults, values["optimizer"] == "adaclip"
    chosen = OPTIMIZERS[values["optimizer"]]
    tracked = "phi" in chosen.settings and values["phi"] == "tracked"
    found: dict[str, Any] = {
        **vars(defaults),
        # v-hat minus the noise is about as large as h1, so its lower bound must be, too.
        "gamma_prime": max(GAMMA_PRIME, 2 * defaults.h1) if tracked else GAMMA_PRIME,
        "lr": chosen.lr_on.get(values["dataset"], chosen.lr),
        "beta1": 0.99 if adaclip else 0.9,
        "beta2": 0.9 if adaclip else 0.999,
    }
    if values["no_dp"] or values["epsilon"] is not None:
        found["sigma"] = None
    if values["steps"] is not None:
        found["epochs"] = None
    if values["augmentations"] is not None:
        found["augment"] = facts.augment
    if facts.multilabel:
        found["loss"] = "bce"
    if values["features"] is not None:
        found["model"] = "linear"
    if values["backbone"] is not None:
        found |= {"model": "linear", "backbone_size": BACKBONES[values["backbone"]].size}
    if values["pretrained"] is not None or values["backbone"] is not None:
        found["train"] = "all" if values["backbone"] is None else "head"
    if values["train"] == "lora":
        found |= {"lora_rank": Trained.rank, "lora_alpha": Trained.alpha}
    model = values["model"] or found["model"]
    found["physical_batch"] = _samples_at_a_time(values, model, facts)
    found["gpu_batch"] = max(found["physical_batch"], _samples_on_gpu(values, facts))
    if (canaries := values["canaries"]) is not None:
        found["guesses"] = max(canaries // 10, min(canaries, FEW_GUESSES))
    return found


def _samples_at_a_time(values: dict[str, Any], model: str, facts: Dataset) -> int:
    """Return the physical batch size of a network; all views of a sample count."""
    most, kind = facts.defaults.physical_batch, MODELS.get(model)
    if values["train"] == "head" or (values["backbone"] is not None and values["train"] is None):
        most = max(most, ROWS_AT_A_TIME)
    elif values["backbone"] is not None:
        size = values["backbone_size"] or BACKBONES[values["backbone"]].size
        most = max(1, PIXELS_AT_A_TIME // size**2)
    elif kind is not None:
        most = max(most, kind.samples_at_a_time(facts.shape[1] * facts.shape[2]))
    return max(1, most // (values["augmentations"] or 1))


def _samples_on_gpu(values: dict[str, Any], facts: Dataset) -> int:
    """Return how many samples a GPU should process at a time, as far as images have one size."""
    if values["train"] == "head" or values["backbone"] is not None:
        return 0
    pixels = max(SMALL, facts.shape[1] * facts.shape[2])
    return ON_GPU * SMALL // pixels // (values["augmentations"] or 1)
