"""Settings of a training run: one typed model, of which flags, YAML and keywords are made.

A setting has the same name as a flag, as a YAML key and as a keyword. Its field is its one place:
the type has its limits, the docstring is its help in commands and documentation, and its group is
that of the field before it, unless :data:`FIRST` begins another. Limits on combinations are in
:data:`NOT_BOTH` and :data:`NEEDS`, and in :mod:`dpmac_cli.config.checks`. Imports no torch.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool
from pydantic_core import PydanticCustomError

from dpmac_cli.accounting.events import MOST_STEPS, SAMPLERS, SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.selection import LEAST_MEAN, MOST_MEAN
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.encoders import ENCODERS
from dpmac_cli.config.encoders import FOLDER as ENCODER_FOLDER
from dpmac_cli.config.facts import STANDARDS, TABLES, InMemoryData, in_memory
from dpmac_cli.config.flags import JOINED, NUMBER, Fields, Flags, NotBoth, OneOf, SomePath
from dpmac_cli.config.named import BEST, PAPER, RECIPES
from dpmac_cli.config.networks import BACKBONES, FEATURES, MODELS, PARTS
from dpmac_cli.config.tokens import MAX_TOKENS, MIN_TOKENS
from dpmac_cli.optim import OPTIMIZERS, defaults_of
from dpmac_cli.optim.dp_macadam import Kappa
from dpmac_cli.optim.dp_macadambc import Phi
from dpmac_cli.optim.optimizer import Decay, Scale, Stability, Variance
from dpmac_cli.tasks.language_model import NETWORK
from dpmac_cli.tasks.operating_point import BALANCED_POINT, MOST_LIKELY, is_point
from dpmac_cli.tasks.task import ASKED, CHOSEN, LOSSES

#: Default that depends on the dataset or on other settings: ``completed`` replaces it.
LATER: Any = None
#: Settings by their names in Opacus and TensorFlow Privacy that are spelt too differently for a
#: suggestion.
RENAMED: Mapping[str, str] = {
    "noise_multiplier": "sigma",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "max_grad_norm": "clip_norm",
    "l2_norm_clip": "clip_norm",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "max_physical_batch_size": "physical_batch",
}
#: Operating points of two classes.
THRESHOLD = OneOf(
    (BALANCED_POINT, MOST_LIKELY),
    (is_point, "sensitivity=0.9, or a probability such as 0.3"),
)
#: Settings that contradict each other, and why. Those without a reason are ways to say the same: a
#: flag replaces a file's setting.
NOT_BOTH: NotBoth = {
    ("sigma", "epsilon", "no_dp"): "",
    ("max_epsilon", "no_dp"): "",
    ("epochs", "steps"): "",
    ("features", "pretrained"): "public weights are for networks that take images",
    ("backbone", "features"): "a network takes only one of them",
    ("schema", "feature_range"): "a schema declares the range of every column",
    ("schema", "classes"): "a schema declares the classes",
    ("no_dp", "secure"): "without noise there is nothing to secure",
    ("no_dp", "canaries"): "without a privacy guarantee there is nothing to audit",
    ("no_dp", "cover_scores"): "without privacy, scores cannot be covered",
    ("seed", "secure"): "a seed reveals the random numbers that {secure} hides from everyone",
}
#: Settings that need another one: one of these.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "backbone_size": ("backbone",),
    "backbone_flips": ("backbone",),
    "train": ("pretrained", "backbone"),
    "lora_rank": ("train",),
    "tokens": ("backbone",),
    "task": ("backbone",),
    "augment": ("augmentations",),
    "shares": ("class_weights",),
}
#: Learning rate schedules after the warm-up.
SCHEDULES = ("constant", "cosine", "linear")
#: Ways to augment an image.
AUGMENTS = ("crop+flip", "crop", "flip")
#: Ways to calibrate a model.
HISTOGRAM, NO_CALIBRATION = "histogram", "none"
PRIVATE_SCALE, DECLARED_SCALE = "private", "declared"
#: Class weights that follow from the shares of the classes.
BALANCED = "balanced"
#: Default of ``delta`` in (epsilon, delta).
DELTA = 1e-5
#: Values that may replace a registered name: a test and a description.
OWN_DATA = (
    lambda text: "/" in text or text.endswith((".npz", *TABLES)) or Path(text).exists(),
    "a folder with one folder of images or texts per class, an .npz, or a table "
    "(.csv, .tsv, .parquet)",
)
#: Loss of a quantile: a test and a description.
QUANTILE = (
    re.compile(r"quantile:0?\.[0-9]*[1-9][0-9]*").fullmatch,
    "quantile:Q with Q between 0 and 1, such as quantile:0.9",
)
OWN_ENCODER = (lambda text: "/" in text or Path(text).is_dir(), ENCODER_FOLDER)
#: Networks to choose from. That of a language model is its default and only one.
NETWORKS = tuple(name for name in MODELS if name != NETWORK)
OWN_MODEL = (
    lambda text: ":" in text or text == NETWORK,
    "your own FILE.py:FACTORY or MODULE:FACTORY",
)
#: Texts of numbers, of names of classes, and of the time between checkpoints.
TWO_NUMBERS = re.compile(f"{NUMBER},{NUMBER}")
NUMBERS = re.compile(rf"\s*{NUMBER}(\s*,\s*{NUMBER})+\s*")
CLASS_NAMES = re.compile(r"\s*[^,\s][^,]*(,\s*[^,\s][^,]*)+")
INTERVAL = re.compile(r"[1-9][0-9]{0,14}|[0-9]{1,9}(\.[0-9]+)?s")
#: Groups of settings in the help.
TASK, DATA, PRIVACY, OPTIMIZER = "Task", "Your own data", "Privacy", "Optimizer"
RECIPE, AUDIT, RUN, OUTPUT = "Recipe", "Audit", "Run", "Output"
#: First setting of each group, in the order of the fields.
FIRST = {
    "dataset": TASK,
    "sampler": PRIVACY,
    "fix_norm": TASK,
    "test_fraction": DATA,
    "sigma": PRIVACY,
    "optimizer": OPTIMIZER,
    "lr_schedule": RECIPE,
    "canaries": AUDIT,
    "physical_batch": RUN,
    "metric": OUTPUT,
}


def _not_zero(sigma: float) -> float:
    """Return a noise multiplier above 0; raise the fault of pydantic for 0, which is no privacy."""
    if sigma == 0:
        raise PydanticCustomError(
            "no_dp", "Input should be above 0 (to train without privacy use {no_dp=True})"
        )
    return sigma


Positive = Annotated[float, Field(gt=0)]
NoiseMultiplier = Annotated[float, AfterValidator(_not_zero), Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
Count = Annotated[int, Field(ge=1, le=10**9)]
#: A count that memory or time per record grows with.
SmallCount = Annotated[int, Field(ge=1, le=1024)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Length = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Probability = Annotated[float, Field(gt=0, lt=1)]
MeanTrials = Annotated[float, Field(ge=LEAST_MEAN, le=MOST_MEAN)]


# Flags that commands share.
Device = Annotated[
    str,
    OneOf(("auto", "cpu", "cuda"), (re.compile("cuda:[0-9]{1,3}").fullmatch, "cuda:N")),
    Field(description="Device to run on."),
]
DataDir = Annotated[SomePath | None, Field(description="Folder of datasets (or DPMAC_DATA_DIR).")]
Quiet = Annotated[
    StrictBool,
    Field(description="Print only errors."),
]
Debug = Annotated[
    StrictBool,
    Field(description="Show tracebacks."),
]
PrintJson = Annotated[StrictBool, Field(description="Print JSON.")]


Config = Annotated[
    SomePath | None,
    Field(description="YAML file with settings by the same names. Flags take precedence."),
]
DryRun = Annotated[StrictBool, Field(description="Show the plan and its cost, without training.")]


def _named_or_in_memory(value: object) -> object:
    """Return a name or a path, or an object of a program as records in memory."""
    if isinstance(value, str | InMemoryData):
        return value
    records = in_memory(value)
    if records is not None:
        return records
    raise PydanticCustomError(
        "dataset",
        "Input should be a name, a path, or records in memory: a data frame, a dataset of Hugging "
        "Face, ArrayData(x, y) or from_torch(dataset)",
    )


class Priced(Flags, frozen=True):
    """Settings that the privacy cost of a run follows from, apart from its noise and length.

    ``dpmac account`` has these, too. Together with the facts of a dataset they determine the number
    of records, the sampling rate, and the histogram that is counted after the steps.
    """

    dataset: Annotated[
        str | InMemoryData, OneOf(DATASETS, OWN_DATA), BeforeValidator(_named_or_in_memory)
    ] = "mnist"
    """Dataset to train on."""
    recipe: Annotated[str, OneOf((PAPER, BEST, *RECIPES))] = LATER
    """Values of the settings that are not given: of the run in the paper, of the best run for the
    epsilon, or of a recipe by name (dpmac recipes). [default: paper with --sigma or --no-dp, best
    otherwise and for your own data]"""
    model: Annotated[str, OneOf(NETWORKS, OWN_MODEL)] = LATER
    """Network to train. [default: the dataset's]"""
    batch_size: Count = LATER
    """Expected batch size B. [default: the dataset's]"""
    sampler: Annotated[str, OneOf(SAMPLERS)] = "poisson"
    """Batch sampling method. The privacy cost depends on it."""
    delta: Probability = DELTA
    """Delta of (epsilon, delta). Your own data: 1e-05, or n^-1.1 if that is less."""
    calibration: Annotated[str, OneOf((HISTOGRAM, NO_CALIBRATION))] = LATER
    """Calibrate probabilities, and give numbers intervals, by one noisy histogram of the training
    records, at 2% of the budget. [default: histogram where --epsilon is the target, otherwise
    none]"""


class Settings(Priced, frozen=True):
    """Settings of a training run: as given, or completed; None if off.

    Values may be of their types or as text, as in a command or a file. Defaults that depend on the
    dataset are filled in by :func:`~dpmac_cli.config.planning.plan`, and stay apart from those
    that were given: :attr:`explicit`.

    Example:
        >>> settings = Settings(dataset="digits", epsilon="3")
        >>> settings.epsilon, settings.optimizer, settings.explicit
        (3.0, 'dp-macadam', {'dataset': 'digits', 'epsilon': 3.0})

    Raises:
        InputError: lists every invalid value and contradiction.
    """

    renamed = RENAMED
    not_both = NOT_BOTH
    scale: Annotated[str, OneOf((PRIVATE_SCALE, DECLARED_SCALE))] = LATER
    """Scale of a table's numbers with a declared range: private also finds range and ranks inside
    it by noisy counts, at a tenth of the budget, and 8% more for a number to predict. [default:
    private where --epsilon is the target and the records are many enough, otherwise declared]"""
    fix_norm: StrictBool = False
    """Replace batch norm with group norm in your network."""
    isolate: StrictBool = False
    """Run the network on each sample separately, so it cannot mix samples. Slower. [default: if it
    cannot be proven that the network does not mix samples]"""
    features: Annotated[str | None, OneOf(FEATURES)] = None
    """Train on fixed features of the records, which are not learnt, such as wavelet scattering of
    images."""
    backbone: Annotated[str | None, OneOf((*BACKBONES, *ENCODERS), OWN_ENCODER)] = None
    """Train on features of this public network of images or texts."""
    backbone_size: Annotated[int | None, Field(ge=32, le=1024)] = None
    """Size in pixels to resize images to for the backbone. [default: the backbone's]"""
    backbone_flips: StrictBool = False
    """Average the features of each image and its mirror image."""
    pretrained: str | Path | None = None
    """Start from the public weights in this safetensors file."""
    train: Annotated[str | None, OneOf(PARTS)] = None
    """Part of a network with public weights to train. [default: all; with a backbone the head,
    for a language model lora]"""
    lora_rank: SmallCount | None = None
    """With --train lora: rank of the low-rank updates, which are scaled by 16 / rank. [default:
    8]"""
    epochs: Count | None = None
    """Epochs of ceil(n/B) steps. [default: the dataset's]"""
    steps: Steps | None = None
    """Steps, instead of --epochs."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Fraction of your data to hold out for testing if there is no test set. With 0 all records are
    trained on, and nothing is scored."""
    split_seed: Annotated[
        int,
        Field(ge=0, le=4294967295),
    ] = 0
    """Public seed of that split, which is decided per record."""
    channels: Annotated[str | None, OneOf(("1", "3"))] = None
    """Convert your images to N channels. [default: as found]"""
    image_size: SmallCount | None = None
    """Resize your images to N by N. [default: as found]"""
    levels: Annotated[int | None, Field(ge=1, le=65535)] = None
    """Value of white in your grey images with 16 bits per pixel, such as 4095 for scans of 12 bits.
    [default: the largest that the format can hold]"""
    classes: Annotated[
        str | None,
        JOINED,
        OneOf(besides=(CLASS_NAMES.fullmatch, "two names or more, such as cat,dog")),
    ] = None
    """Names of your classes, in order of label, such as cat,dog. [default: as found]"""
    standardise: Annotated[str, OneOf(STANDARDS)] = "half"
    """Public constants to standardise images with; half maps them to [-1, 1]."""
    feature_range: Annotated[
        str | None, JOINED, OneOf(besides=(TWO_NUMBERS.fullmatch, "two numbers, such as 0,1"))
    ] = None
    """Public range to clip columns of numbers to, such as 0,1."""
    schema: str | Path | None = None  # type: ignore[assignment]
    """Schema file that declares the columns of your table; see dpmac schema."""
    task: Annotated[str | None, OneOf(ASKED)] = None
    """Task: language-model continues the texts themselves, without labels. [default: the task of
    the labels]"""
    tokens: Annotated[int | None, Field(ge=MIN_TOKENS, le=MAX_TOKENS)] = None
    """Largest number of tokens of a text; in a table, the schema has it. [default: 128]"""
    unit: str | None = None
    """What gives the unit of each record, such as a patient: a column of a table, a pattern of file
    paths, or folder for each folder below a class. Epsilon protects a unit with all of its records.
    [default: each record is a unit, unless an .npz has an array unit]"""
    records_per_unit: SmallCount = 8
    """Records to draw from each unit in a step that includes it."""
    skip_bad: StrictBool = False
    """Leave out unusable records instead of rejecting the dataset."""
    sigma: NoiseMultiplier | None = None
    """Noise multiplier. [default: that of --epsilon; with --recipe paper the dataset's]"""
    epsilon: Positive | None = None
    """Target epsilon of the run; use the least noise that meets it, instead of --sigma. [default:
    3; with --sigma, --no-dp or --recipe paper none]"""
    max_epsilon: Positive | None = None
    """Stop before epsilon exceeds this (exit code 3)."""
    no_dp: StrictBool = False
    """Train without privacy, as a baseline."""
    secure: StrictBool = False
    """Use a cipher for all random numbers and a fixed grid for noise, to prevent attacks on
    generators and floating point. Slower."""
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "dp-macadam"
    """Clipping and update method. Your own data: dp-adam."""
    lr: Scale = LATER
    """Learning rate. [default: depends on dataset and optimizer]"""
    clip_norm: Scale = LATER
    """Clipping norm C, for optimizers with a fixed one. [default: the dataset's]"""
    beta1: Annotated[
        Decay,
        Field(description=f"Decay rate of the first moment. [default: {defaults_of('beta1')}]"),
    ] = LATER
    beta2: Annotated[
        Decay,
        Field(description=f"Decay rate of the second moment. [default: {defaults_of('beta2')}]"),
    ] = LATER
    gamma: Stability = 1e-08
    """Adam's stability constant."""
    gamma_prime: Variance = LATER
    """Lower bound of the corrected second moment. [default: 1e-08; with --phi tracked the
    dataset's]"""
    h1: Variance = LATER
    """Lower bound of the estimated variance. [default: the dataset's]"""
    h2: Variance = LATER
    """Upper bound of the estimated variance. [default: the dataset's]"""
    kappa: Kappa = "tracked"
    """Variance estimate of DP-MacAdam."""
    phi: Phi = "tracked"
    """Noise estimate of DP-MacAdamBC."""
    lr_schedule: Annotated[str, OneOf(SCHEDULES)] = "constant"
    """Learning rate schedule after the warm-up."""
    warmup_steps: Length = 0
    """Number of steps in which the learning rate rises to --lr."""
    weight_decay: Annotated[
        float,
        Field(ge=0, le=1000.0),
    ] = 0.0
    """Decoupled weight decay: shrink weights by lr times this in every step."""
    ema: Probability | None = None
    """Score and publish a moving average of the weights with this decay. The best recipe: 0.9 to
    0.98."""
    augmentations: SmallCount | None = None
    """Augmentation multiplicity: augmented views per image and step. The mean of their gradients
    is clipped."""
    augment: Annotated[str | None, OneOf(AUGMENTS)] = None
    """Augmentation of the views. [default: the dataset's]"""
    loss: Annotated[str, OneOf(LOSSES, QUANTILE)] = "cross-entropy"
    """Loss per sample: cross-entropy or focal for classes, mse, huber or quantile:Q for numbers.
    [default: the first of them that fits the dataset]"""
    label_smoothing: Decay = 0.0
    """Label smoothing: fraction of a label that is spread evenly over all classes."""
    class_weights: Annotated[
        str | None,
        JOINED,
        OneOf((BALANCED,), (NUMBERS.fullmatch, "two numbers or more, such as 1,15")),
    ] = None
    """Public weights of the classes, such as 1,15, divided by the largest. They multiply a record's
    gradient after clipping. With balanced: the inverse of --shares."""
    shares: Annotated[
        str | None,
        JOINED,
        OneOf(besides=(NUMBERS.fullmatch, "two numbers or more, such as 0.94,0.06")),
    ] = None
    """Public shares of the classes among the records, such as 0.94,0.06: what is known of them, not
    counted in these records."""
    threshold: Annotated[str | None, THRESHOLD] = None
    """Decision between two classes: balanced, a sensitivity for the last class, a probability of
    it, or most-likely, the largest output of the network. It costs no epsilon. [default:
    most-likely]"""
    canaries: Annotated[
        int | None,
        Field(ge=2, le=1000000),
    ] = None
    """Audit this run with N crafted records, such as 200: random inputs and random labels, each
    among the training records by a secret coin. The model is then only for the audit."""
    physical_batch: Count | None = None
    """Physical batch size: samples to process at a time. [default: depends on network, dataset and
    device]"""
    device: Device = "auto"
    seed: Annotated[int | None, Field(ge=0, le=9223372036854775808)] = None
    """Seed for reproducible runs. There is no privacy against anyone who knows it. [default:
    secret]"""
    data_dir: DataDir = None
    metric: Annotated[str, OneOf(CHOSEN)] = "accuracy"
    """Test metric to show, and to rank a comparison by. [default: the first of them that fits the
    dataset]"""
    cover_scores: StrictBool = False
    """Also protect the test records: release one score with noise, at the end, within the run's
    epsilon."""
    checkpoint_every: Annotated[
        str | None,
        OneOf(besides=(INTERVAL.fullmatch, "steps (100) or seconds (60s)")),
    ] = None
    """Save a checkpoint every N steps (100) or seconds (60s). [default: every minute, and every
    fiftieth of the steps]"""
    out: SomePath | None = None
    """Folder of the run. [default: a new one in runs/]"""
    force: StrictBool = False
    """Replace an existing run in --out. Its files are removed before step 1."""
    json: StrictBool = False  # type: ignore[assignment]
    """Print the report as JSON."""
    quiet: Quiet = False
    debug: Debug = False

    def replace(self, **changes: Any) -> Self:
        """Return these settings with others of the same type, which are not validated.

        Args:
            changes: values by the names of their settings. They count as given from now on.
        """
        return self.model_copy(update=changes)

    def filled(self, defaults: dict[str, Any]) -> Self:
        """Return these settings with defaults for those that were not given.

        A default that is filled in counts as given from now on, so the first one stays.

        Args:
            defaults: values by the names of their settings, which are not validated.
        """
        missing = dict[str, Any]()
        for name, value in defaults.items():
            if name not in self.model_fields_set:
                missing[name] = value
        return self.model_copy(update=missing)


def _groups() -> dict[str, str]:
    """Return the group of each setting, in the order of the fields."""
    groups, current = dict[str, str](), TASK
    for name in Settings.model_fields:
        current = FIRST.get(name, current)
        groups[name] = current
    return groups


SETTINGS: Fields = Settings.model_fields
#: The group of each setting.
GROUPS: Mapping[str, str] = _groups()
#: Defaults of a run without a recipe.
RECIPE_DEFAULTS: Mapping[str, object] = {
    name: field.default for name, field in SETTINGS.items() if GROUPS[name] == RECIPE
}
