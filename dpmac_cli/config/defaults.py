"""Default values of settings, which depend on dataset, optimizer and other settings."""

import math
from typing import Any

from dpmac_cli.config.best import best_for_batches, of_recipe
from dpmac_cli.config.named import BEST
from dpmac_cli.config.settings import DELTA, Settings
from dpmac_cli.data.registry import DATASETS, Dataset, Defaults
from dpmac_cli.models.registry import BACKBONES, MODELS, SMALL, Trained
from dpmac_cli.optim import OPTIMIZERS

#: Samples to process at a time if only a head is trained.
ROWS_AT_A_TIME = 1024
#: Samples of at most 32 by 32 pixels to process at a time on a GPU: launching the operations of a
#: chunk takes longer than the operations on fewer.
ON_GPU = 512
#: The paper does not state gamma'; this value reproduces Table I.
GAMMA_PRIME = 1e-8
#: Pixels to process at a time if a backbone is trained.
PIXELS_AT_A_TIME = 16 * 224**2
#: Tokens to process at a time if a text encoder is trained. LoRA on MiniLM then takes 2 GB.
TOKENS_AT_A_TIME = 4096
#: Name of the batches of a program in place of a dataset, and records of them to process at a time.
BATCHES, RECORDS_AT_A_TIME = "<batches>", 256


def completed(given: Settings, facts: Dataset) -> Settings:
    """Return settings with every default that depends on the dataset or on others."""
    given = given.filled(of_recipe(given, facts))
    if given.dataset not in DATASETS:
        given = given.filled({"delta": _delta(facts.train_size)})
    of_task: dict[str, Any] = {"loss": facts.task.losses[0], "metric": facts.task.headline.name}
    if given.augmentations is not None:
        of_task["augment"] = facts.augment
    found = given.filled(_depending(given, facts.defaults) | of_task)
    return found.filled({"physical_batch": _samples_at_a_time(found, facts)})


def completed_for_batches(given: Settings, records: int) -> Settings:
    """Return settings of steps on a program's batches with every default.

    ``given`` has the name of the network and the size of a batch.
    """
    given = given.replace(dataset=BATCHES).filled({"recipe": BEST, **best_for_batches(given)})
    given = given.filled({"delta": _delta(records)})
    defaults = Defaults(given.model, given.batch_size, physical_batch=RECORDS_AT_A_TIME)
    found = given.filled(_depending(given, defaults))
    return found.filled({"physical_batch": defaults.physical_batch})


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
    if given.features is not None:
        found["model"] = "linear"
    if given.backbone is not None:
        found["model"] = "linear"
    if (backbone := BACKBONES.get(given.backbone or "")) is not None:
        found["backbone_size"] = backbone.size
    if given.pretrained is not None or given.backbone is not None:
        found["train"] = "all" if given.backbone is None else "head"
    if given.train == "lora":
        found["lora_rank"] = Trained.rank
    return found


def _samples_at_a_time(found: Settings, facts: Dataset) -> int:
    """Return the physical batch size of a network; all views of a sample count."""
    most, kind = facts.defaults.physical_batch, MODELS.get(found.model)
    if found.train == "head":
        most = max(most, ROWS_AT_A_TIME)
    elif (backbone := BACKBONES.get(found.backbone or "")) is not None:
        size = found.backbone_size or backbone.size
        most = max(1, PIXELS_AT_A_TIME // size**2)
    elif found.backbone is not None and facts.texts:
        most = max(1, TOKENS_AT_A_TIME // sum(count for _, count in facts.texts))
    elif kind is not None:
        most = max(most, kind.samples_at_a_time(facts.shape[1] * facts.shape[2]))
    return max(1, most // (found.augmentations or 1))


def samples_on_gpu(settings: Settings, facts: Dataset) -> int:
    """Return how many samples a GPU should process at a time, as far as images have one size."""
    if settings.train == "head" or settings.backbone is not None:
        return settings.physical_batch
    pixels = max(SMALL, facts.shape[1] * facts.shape[2])
    fitting = ON_GPU * SMALL // pixels // (settings.augmentations or 1)
    return max(settings.physical_batch, fitting)
