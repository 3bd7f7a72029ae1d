"""Settings as keywords, for editors and type checkers. ``python docs/generate.py`` writes this."""

from pathlib import Path
from typing import Literal, TypedDict

from dpmac_cli.data.schema import InMemoryData
from dpmac_cli.dp.optimizers import Kappa

#: Names of the settings of a training run.
SettingName = Literal[
    "dataset",
    "recipe",
    "model",
    "fix_norm",
    "isolate",
    "features",
    "backbone",
    "backbone_size",
    "backbone_flips",
    "pretrained",
    "train",
    "lora_rank",
    "lora_alpha",
    "epochs",
    "steps",
    "batch_size",
    "test_fraction",
    "split_seed",
    "channels",
    "image_size",
    "levels",
    "classes",
    "standardise",
    "feature_range",
    "schema",
    "encoding",
    "tokens",
    "unit",
    "records_per_unit",
    "skip_bad",
    "sigma",
    "epsilon",
    "max_epsilon",
    "sampler",
    "delta",
    "no_dp",
    "secure",
    "optimizer",
    "lr",
    "clip_norm",
    "beta1",
    "beta2",
    "gamma",
    "gamma_prime",
    "h1",
    "h2",
    "kappa",
    "phi",
    "lr_schedule",
    "warmup_steps",
    "weight_decay",
    "ema",
    "augmentations",
    "augment",
    "loss",
    "label_smoothing",
    "class_weights",
    "canaries",
    "guesses",
    "physical_batch",
    "device",
    "seed",
    "data_dir",
    "metric",
    "cover_scores",
    "score_every",
    "tuned_on",
    "checkpoint_every",
    "out",
    "force",
    "json",
    "quiet",
    "debug",
]
#: Names of the flags of ``dpmac account``.
AccountName = Literal[
    "dataset",
    "recipe",
    "model",
    "dataset_size",
    "batch_size",
    "epochs",
    "steps",
    "sigma",
    "epsilon",
    "solve",
    "delta",
    "tune",
    "most_trials",
    "sampler",
    "accountant",
]


class StepKeywords(TypedDict, total=False):
    """Settings of a training run that a private step has, too; None if not given."""

    isolate: bool | None
    epochs: int | None
    steps: int | None
    sigma: float | None
    epsilon: float | None
    max_epsilon: float | None
    delta: float | None
    secure: bool | None
    optimizer: str | None
    lr: float | None
    clip_norm: float | None
    beta1: float | None
    beta2: float | None
    gamma: float | None
    gamma_prime: float | None
    h1: float | None
    h2: float | None
    kappa: Kappa | None
    phi: str | None
    lr_schedule: str | None
    warmup_steps: int | None
    weight_decay: float | None
    physical_batch: int | None
    seed: int | None


class TrainingKeywords(StepKeywords, total=False):
    """Settings of a training run, except for data, network and loss; None if not given."""

    recipe: str | None
    fix_norm: bool | None
    features: str | None
    backbone: str | None
    backbone_size: int | None
    backbone_flips: bool | None
    pretrained: str | Path | None
    train: str | None
    lora_rank: int | None
    lora_alpha: float | None
    batch_size: int | None
    test_fraction: float | None
    split_seed: int | None
    channels: int | str | None
    image_size: int | None
    levels: int | None
    classes: str | None
    standardise: str | None
    feature_range: str | None
    schema: str | Path | None
    encoding: str | None
    tokens: int | None
    unit: str | None
    records_per_unit: int | None
    skip_bad: bool | None
    sampler: str | None
    no_dp: bool | None
    ema: float | None
    augmentations: int | None
    augment: str | None
    label_smoothing: float | None
    class_weights: str | None
    canaries: int | None
    guesses: int | None
    device: str | None
    data_dir: str | Path | None
    metric: str | None
    cover_scores: bool | None
    score_every: int | None
    tuned_on: int | str | None
    checkpoint_every: int | str | None
    out: str | Path | None
    force: bool | None
    json: bool | None
    quiet: bool | None
    debug: bool | None


class Keywords(TrainingKeywords, total=False):
    """Settings of a training run; None if not given."""

    dataset: str | Path | InMemoryData | None
    model: str | None
    loss: str | None
