"""Settings of a training run: one typed model, of which flags, YAML and keywords are made.

A setting has the same name as a flag, as a YAML key and as a keyword. Imports no torch.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import Field, StrictBool

from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import ALIASES, SAMPLERS
from dpmac_cli.accounting.selection import LEAST_MEAN, MOST_MEAN
from dpmac_cli.config.fields import NUMBER, Choice, Flag, Option, Pattern, SomePath, options
from dpmac_cli.config.flags import Flags
from dpmac_cli.config.named import BEST, PAPER, RECIPES
from dpmac_cli.data.column_schema import MAX_TOKENS, MIN_TOKENS, TOKENS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import STANDARDS, TABLES, UTF8, InMemoryData, is_encoding
from dpmac_cli.models.encoders import ENCODERS
from dpmac_cli.models.encoders import FOLDER as ENCODER_FOLDER
from dpmac_cli.models.registry import BACKBONES, FEATURES, MODELS, PARTS
from dpmac_cli.optim import OPTIMIZERS, defaults_of
from dpmac_cli.optim.dp_macadam import Kappa
from dpmac_cli.optim.dp_macadambc import Phi
from dpmac_cli.optim.optimizer import Decay, Scale, Stability, Variance
from dpmac_cli.tasks.known import LOSSES, METRICS
from dpmac_cli.training.schedules import AUGMENTS, SCHEDULES

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
    lambda text: bool(re.fullmatch(r"quantile:0?\.[0-9]*[1-9][0-9]*", text)),
    "quantile:Q with Q between 0 and 1, such as quantile:0.9",
)
OWN_ENCODER = (lambda text: "/" in text or Path(text).is_dir(), ENCODER_FOLDER)
OWN_MODEL = (lambda text: ":" in text, "your own FILE.py:FACTORY or MODULE:FACTORY")
#: Groups of settings in the help.
TASK, DATA, PRIVACY, OPTIMIZER = "Task", "Your own data", "Privacy", "Optimizer"
RECIPE, AUDIT, RUN, OUTPUT = "Recipe", "Audit", "Run", "Output"

Positive = Annotated[float, Field(gt=0)]
NoiseMultiplier = Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Length = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Probability = Annotated[float, Field(gt=0, lt=1)]
MeanTrials = Annotated[float, Field(ge=LEAST_MEAN, le=MOST_MEAN)]


# Flags that commands share.
Device = Annotated[
    str,
    Pattern(r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N"),
    Field(description="Device: auto, cpu, cuda or cuda:N."),
    Flag(RUN, metavar="DEVICE", local=True, labels=False),
]
DataDir = Annotated[
    SomePath | None,
    Field(description="Folder of datasets (or DPMAC_DATA_DIR)."),
    Flag(RUN, metavar="FOLDER", recorded=False),
]
Quiet = Annotated[
    StrictBool,
    Field(description="Print only errors."),
    Flag(OUTPUT, recorded=False, studied=False),
]
Debug = Annotated[
    StrictBool,
    Field(description="Show tracebacks."),
    Flag(OUTPUT, recorded=False, studied=False),
]
#: Other encodings: a test and a description.
OTHER_ENCODINGS = (is_encoding, "another encoding that Python knows")
Encoding = Annotated[
    str,
    Choice((UTF8, "cp1252"), OTHER_ENCODINGS),
    Field(description="Encoding of a CSV, such as cp1252 for files of older Windows programs."),
    Flag(DATA, omitted=True),
]
PrintJson = Annotated[StrictBool, Field(description="Print JSON."), Flag(OUTPUT)]


class DisplayFlags(Flags, frozen=True):
    """Flags that decide how much a command prints."""

    quiet: Quiet = False
    debug: Debug = False


class Settings(Flags, frozen=True):
    """Settings of a training run, as given; None if off, or if the default depends on others.

    Raises:
        InputError: lists every invalid value.
    """

    # Task
    dataset: Annotated[
        str | InMemoryData,
        Choice(tuple(DATASETS), OWN_DATA, instances=InMemoryData),
        Field(description="Dataset to train on."),
        Flag(TASK, fixed=True, local=True),
    ] = "mnist"
    recipe: Annotated[
        str | None,
        Choice((PAPER, BEST, *RECIPES)),
        Field(
            description=(
                "Values of the settings that are not given: of the run in the paper, of the best "
                "run for the epsilon, or of a recipe by name (dpmac recipes)."
            )
        ),
        Flag(
            TASK,
            otherwise="paper with --sigma or --no-dp, best otherwise and for your own data",
            fixed=True,
            labels=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        Choice(tuple(MODELS), OWN_MODEL),
        Field(description="Network to train."),
        Flag(
            TASK,
            otherwise="the dataset's",
            fixed=True,
            local=True,
        ),
    ] = None
    fix_norm: Annotated[
        StrictBool,
        Field(description="Replace batch norm with group norm in your network."),
        Flag(TASK),
    ] = False
    isolate: Annotated[
        StrictBool,
        Field(
            description=(
                "Run the network on each sample separately, so it cannot mix samples. Slower."
            )
        ),
        Flag(
            TASK,
            otherwise="if it cannot be proven that the network does not mix samples",
            omitted=True,
            fixed=True,
            of_step=True,
        ),
    ] = False
    features: Annotated[
        str | None,
        Choice(tuple(FEATURES), noun="kind of features"),
        Field(
            description=(
                "Train on fixed wavelet scattering features, which are not learnt, instead of the "
                "images."
            )
        ),
        Flag(
            TASK,
            not_with={"pretrained": "public weights are for networks that take images"},
            fixed=True,
        ),
    ] = None
    backbone: Annotated[
        str | None,
        Choice((*BACKBONES, *ENCODERS), OWN_ENCODER),
        Field(description="Train on features of this public network of images or texts."),
        Flag(TASK, not_with={"features": "a network takes only one of them"}, fixed=True),
    ] = None
    backbone_size: Annotated[
        int | None,
        Field(ge=32, le=1_024, description="Size in pixels to resize images to for the backbone."),
        Flag(TASK, otherwise="the backbone's", needs=("backbone",), fixed=True),
    ] = None
    backbone_flips: Annotated[
        StrictBool,
        Field(description="Average the features of each image and its mirror image."),
        Flag(TASK, needs=("backbone",), omitted=True, fixed=True),
    ] = False
    pretrained: Annotated[
        str | Path | None,
        Field(description="Start from the public weights in this safetensors file."),
        Flag(TASK, metavar="FILE", fixed=True),
    ] = None
    train: Annotated[
        str | None,
        Choice(tuple(PARTS), noun="part to train"),
        Field(description="Part of a network with public weights to train."),
        Flag(
            TASK,
            otherwise="all; with a backbone the head",
            needs=("pretrained", "backbone"),
            fixed=True,
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        Field(ge=1, le=1_024, description="With --train lora: rank of the low-rank updates."),
        Flag(TASK, otherwise="8", needs=("train",), fixed=True),
    ] = None
    lora_alpha: Annotated[
        Scale | None,
        Field(description="With --train lora: scale the low-rank updates by alpha / rank."),
        Flag(TASK, otherwise="16", needs=("train",), fixed=True),
    ] = None
    epochs: Annotated[
        Count | None,
        Field(description="Epochs of ceil(n/B) steps."),
        Flag(TASK, otherwise="the dataset's", of_step=True),
    ] = None
    steps: Annotated[
        Steps | None,
        Field(description="Steps, instead of --epochs."),
        Flag(TASK, of_step=True),
    ] = None
    batch_size: Annotated[
        Count | None,
        Field(description="Expected batch size B."),
        Flag(TASK, otherwise="the dataset's"),
    ] = None
    # Your own data
    test_fraction: Annotated[
        Probability,
        Field(description="Fraction of your data to hold out for testing if there is no test set."),
        Flag(DATA),
    ] = 0.2
    split_seed: Annotated[
        int,
        Field(
            ge=0,
            le=4_294_967_295,
            description="Public seed of that split, which is decided per record.",
        ),
        Flag(DATA),
    ] = 0
    channels: Annotated[
        str | None,
        Choice(("1", "3"), noun="number of channels"),
        Field(description="Convert your images to N channels."),
        Flag(DATA, otherwise="as found", fixed=True),
    ] = None
    image_size: Annotated[
        int | None,
        Field(ge=1, le=1_024, description="Resize your images to N by N."),
        Flag(DATA, otherwise="as found", fixed=True),
    ] = None
    levels: Annotated[
        int | None,
        Field(
            ge=1,
            le=65_535,
            description=(
                "Value of white in your grey images with 16 bits per pixel, such as 4095 for scans"
                " of 12 bits."
            ),
        ),
        Flag(DATA, otherwise="the largest that the format can hold", fixed=True),
    ] = None
    classes: Annotated[
        str | None,
        Pattern(r"\s*[^,\s][^,]*(,\s*[^,\s][^,]*)+", "two names or more, such as cat,dog"),
        Field(description="Names of your classes, in order of label."),
        Flag(DATA, metavar="NAME,...", otherwise="as found", fixed=True, comma=True),
    ] = None
    standardise: Annotated[
        str,
        Choice(tuple(STANDARDS), noun="set of constants"),
        Field(
            description="Public constants to standardise images with; half maps them to [-1, 1]."
        ),
        Flag(DATA),
    ] = "half"
    feature_range: Annotated[
        str | None,
        Pattern(rf"{NUMBER},{NUMBER}", "two numbers, such as 0,1"),
        Field(description="Public range to clip columns of numbers to."),
        Flag(DATA, metavar="LOW,HIGH", comma=True),
    ] = None
    schema: Annotated[
        str | Path | None,
        Field(description="Schema file that declares the columns of your table; see dpmac schema."),
        Flag(
            DATA,
            metavar="FILE",
            not_with={
                "feature_range": "a schema declares the range of every column",
                "classes": "a schema declares the classes",
            },
        ),
    ] = None
    encoding: Encoding = UTF8
    tokens: Annotated[
        int | None,
        Field(
            ge=MIN_TOKENS,
            le=MAX_TOKENS,
            description="Largest number of tokens of a text; in a table, the schema has it.",
        ),
        Flag(DATA, otherwise=str(TOKENS), needs=("backbone",)),
    ] = None
    unit: Annotated[
        str | None,
        Field(
            description=(
                "What gives the unit of each record, such as a patient: a column of a table, a"
                " pattern of file paths, or folder for each folder below a class. Epsilon protects"
                " a unit with all of its records."
            )
        ),
        Flag(
            DATA,
            metavar="COLUMN",
            comma=True,
            otherwise="each record is a unit, unless an .npz has an array unit",
        ),
    ] = None
    records_per_unit: Annotated[
        int,
        Field(
            ge=1, le=1_024, description="Records to draw from each unit in a step that includes it."
        ),
        Flag(DATA),
    ] = 8
    skip_bad: Annotated[
        StrictBool,
        Field(description="Leave out unusable records instead of rejecting the dataset."),
        Flag(DATA),
    ] = False
    # Privacy
    sigma: Annotated[
        NoiseMultiplier | None,
        Field(description="Noise multiplier."),
        Flag(
            PRIVACY,
            otherwise="that of --epsilon; with --recipe paper the dataset's",
            of_step=True,
        ),
    ] = None
    epsilon: Annotated[
        Positive | None,
        Field(
            description=(
                "Target epsilon of the run; use the least noise that meets it, instead of --sigma."
            )
        ),
        Flag(
            PRIVACY,
            otherwise="3; with --sigma, --no-dp or --recipe paper none",
            fixed=True,
            of_step=True,
        ),
    ] = None
    max_epsilon: Annotated[
        Positive | None,
        Field(description="Stop before epsilon exceeds this (exit code 3)."),
        Flag(PRIVACY, studied=False, of_step=True),
    ] = None
    sampler: Annotated[
        str,
        Choice(tuple(SAMPLERS), renamed=ALIASES),
        Field(description="Batch sampling method. The privacy cost depends on it."),
        Flag(PRIVACY, fixed=True),
    ] = "poisson"
    delta: Annotated[
        Probability,
        Field(
            description=(
                "Delta of (epsilon, delta). Your own data: 1e-05, or n^-1.1 if that is less."
            )
        ),
        Flag(PRIVACY, of_step=True),
    ] = DELTA
    no_dp: Annotated[
        StrictBool,
        Field(description="Train without privacy, as a baseline."),
        Flag(
            PRIVACY,
            not_with={
                "secure": "without noise there is nothing to secure",
                "canaries": "without a privacy guarantee there is nothing to audit",
                "cover_scores": "without privacy, scores cannot be covered",
            },
            fixed=True,
        ),
    ] = False
    secure: Annotated[
        StrictBool,
        Field(
            description=(
                "Use a cipher for all random numbers and a fixed grid for noise, to prevent "
                "attacks on generators and floating point. Slower."
            )
        ),
        Flag(PRIVACY, studied=False, labels=False, of_step=True),
    ] = False
    # Optimizer
    optimizer: Annotated[
        str,
        Choice(OPTIMIZERS),
        Field(description="Clipping and update method. Your own data: dp-adam."),
        Flag(OPTIMIZER, fixed=True, studied=False, of_step=True),
    ] = "dp-macadam"
    lr: Annotated[
        Scale | None,
        Field(description="Learning rate."),
        Flag(
            OPTIMIZER,
            otherwise="depends on dataset and optimizer",
            of_step=True,
        ),
    ] = None
    clip_norm: Annotated[
        Scale | None,
        Field(description="Clipping norm C, for optimizers with a fixed one."),
        Flag(
            OPTIMIZER,
            otherwise="the dataset's",
            of_step=True,
        ),
    ] = None
    beta1: Annotated[
        Decay | None,
        Field(description="Decay rate of the first moment."),
        Flag(OPTIMIZER, otherwise=defaults_of("beta1"), of_step=True),
    ] = None
    beta2: Annotated[
        Decay | None,
        Field(description="Decay rate of the second moment."),
        Flag(OPTIMIZER, otherwise=defaults_of("beta2"), of_step=True),
    ] = None
    gamma: Annotated[
        Stability,
        Field(description="Adam's stability constant."),
        Flag(OPTIMIZER, of_step=True),
    ] = 1e-08
    gamma_prime: Annotated[
        Variance | None,
        Field(description="Lower bound of the corrected second moment."),
        Flag(OPTIMIZER, otherwise="1e-08; with --phi tracked the dataset's", of_step=True),
    ] = None
    h1: Annotated[
        Variance | None,
        Field(description="Lower bound of the estimated variance."),
        Flag(OPTIMIZER, otherwise="the dataset's", of_step=True),
    ] = None
    h2: Annotated[
        Variance | None,
        Field(description="Upper bound of the estimated variance."),
        Flag(OPTIMIZER, otherwise="the dataset's", of_step=True),
    ] = None
    kappa: Annotated[
        Kappa,
        Choice(get_args(Kappa)),
        Field(description="Variance estimate of DP-MacAdam."),
        Flag(OPTIMIZER, of_step=True),
    ] = "tracked"
    phi: Annotated[
        Phi,
        Choice(get_args(Phi)),
        Field(description="Noise estimate of DP-MacAdamBC."),
        Flag(OPTIMIZER, of_step=True),
    ] = "tracked"
    # Recipe
    lr_schedule: Annotated[
        str,
        Choice(SCHEDULES),
        Field(description="Learning rate schedule after the warm-up."),
        Flag(RECIPE, omitted=True, of_step=True),
    ] = "constant"
    warmup_steps: Annotated[
        Length,
        Field(description="Number of steps in which the learning rate rises to --lr."),
        Flag(RECIPE, omitted=True, of_step=True),
    ] = 0
    weight_decay: Annotated[
        float,
        Field(
            ge=0,
            le=1000.0,
            description="Decoupled weight decay: shrink weights by lr times this in every step.",
        ),
        Flag(RECIPE, omitted=True, of_step=True),
    ] = 0.0
    ema: Annotated[
        Probability | None,
        Field(
            description=(
                "Score and publish a moving average of the weights with this decay. The best "
                "recipe: 0.9 to 0.98."
            )
        ),
        Flag(RECIPE, omitted=True, fixed=True),
    ] = None
    augmentations: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_024,
            description=(
                "Augmentation multiplicity: augmented views per image and step. The mean of their "
                "gradients is clipped."
            ),
        ),
        Flag(RECIPE, omitted=True),
    ] = None
    augment: Annotated[
        str | None,
        Choice(AUGMENTS, noun="augmentation"),
        Field(description="Augmentation of the views."),
        Flag(RECIPE, otherwise="the dataset's", needs=("augmentations",), omitted=True),
    ] = None
    loss: Annotated[
        str,
        Choice(tuple(name for name in LOSSES if ":" not in name), QUANTILE),
        Field(
            description=(
                "Loss per sample: cross-entropy or focal for classes, bce for several labels, mse,"
                " huber or quantile:Q for numbers, poisson for counts."
            )
        ),
        Flag(RECIPE, otherwise="the first of them that fits the dataset", omitted=True),
    ] = "cross-entropy"
    label_smoothing: Annotated[
        Decay,
        Field(
            description=(
                "Label smoothing: fraction of a label that is spread evenly over all classes."
            )
        ),
        Flag(RECIPE, omitted=True),
    ] = 0.0
    class_weights: Annotated[
        str | None,
        Pattern(rf"\s*{NUMBER}(\s*,\s*{NUMBER})+\s*", "two numbers or more, such as 1,5"),
        Field(
            description="Public weights of the classes, or of each label's positives, such as 1,5."
        ),
        Flag(RECIPE, metavar="NUMBER,...", omitted=True, comma=True),
    ] = None
    # Audit
    canaries: Annotated[
        int | None,
        Field(
            ge=2,
            le=1_000_000,
            description=(
                "Audit this run with N canary records; fewer than 1,000 prove little. The model is"
                " then only for the audit."
            ),
        ),
        Flag(AUDIT, fixed=True, studied=False),
    ] = None
    guesses: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000,
            description="Number of canaries that the attack guesses, half of them in, half out.",
        ),
        Flag(
            AUDIT,
            otherwise="a tenth of the canaries, at least 20",
            needs=("canaries",),
            fixed=True,
            studied=False,
        ),
    ] = None
    # Run
    physical_batch: Annotated[
        Count | None,
        Field(description="Physical batch size: samples to process at a time."),
        Flag(
            RUN,
            otherwise="depends on network, dataset and device",
            of_step=True,
        ),
    ] = None
    device: Device = "auto"
    seed: Annotated[
        int | None,
        Field(
            ge=0,
            le=9_223_372_036_854_775_808,
            description=(
                "Seed for reproducible runs. There is no privacy against anyone who knows it."
            ),
        ),
        Flag(
            RUN,
            otherwise="secret",
            not_with={
                "secure": "a seed reveals the random numbers that --secure hides from everyone"
            },
            recorded=False,
            fixed=True,
            studied=False,
            of_step=True,
        ),
    ] = None
    data_dir: DataDir = None
    # Output
    metric: Annotated[
        str,
        Choice(tuple(name for name, metric in METRICS.items() if metric.chosen)),
        Field(description="Test metric to show, and to rank a comparison by."),
        Flag(
            OUTPUT,
            otherwise="the first of them that fits the dataset",
            omitted=True,
            labels=False,
        ),
    ] = "accuracy"
    cover_scores: Annotated[
        StrictBool,
        Field(
            description=(
                "Also protect the test records: release scores with noise, within the run's "
                "epsilon."
            )
        ),
        Flag(OUTPUT, omitted=True, fixed=True, studied=False),
    ] = False
    score_every: Annotated[
        Count | None,
        Field(description="Epochs between covered scores. More scores need more noise."),
        Flag(OUTPUT, otherwise="one score at the end", needs=("cover_scores",), studied=False),
    ] = None
    tuned_on: Annotated[
        str | None,
        Pattern(r"[\w .,:;=+/()-]{1,2000}", "one line of words, numbers and .,:;=+/()-"),
        Field(
            description="Public data that the settings were chosen on, for report and card. It is "
            "not checked."
        ),
        Flag(OUTPUT, otherwise="unknown", studied=False, labels=False, comma=True),
    ] = None
    checkpoint_every: Annotated[
        str | None,
        Pattern(r"[1-9][0-9]{0,14}|[0-9]{1,9}(\.[0-9]+)?s", "steps (100) or seconds (60s)"),
        Field(description="Save a checkpoint every N steps (100) or seconds (60s)."),
        Flag(
            OUTPUT,
            metavar="N",
            recorded=False,
            otherwise="every minute, and every fiftieth of the steps",
        ),
    ] = None
    out: Annotated[
        SomePath | None,
        Field(description="Folder of the run."),
        Flag(
            OUTPUT,
            metavar="FOLDER",
            otherwise="a new one in runs/",
            recorded=False,
            studied=False,
        ),
    ] = None
    force: Annotated[
        StrictBool,
        Field(description="Replace an existing run in --out. Its files are removed before step 1."),
        Flag(OUTPUT, recorded=False, studied=False),
    ] = False
    json: Annotated[
        StrictBool,
        Field(description="Print the report as JSON."),
        Flag(OUTPUT, recorded=False, studied=False),
    ] = False
    quiet: Quiet = False
    debug: Debug = False

    def replace(self, **changes: Any) -> Self:
        """Return these settings with others of the same type, which are not validated."""
        return self.model_copy(update=changes)

    def filled(self, defaults: dict[str, Any]) -> Self:
        """Return these settings with defaults for those that were not given."""
        missing = {n: value for n, value in defaults.items() if n not in self.model_fields_set}
        return self.model_copy(update=missing)


class Complete(Settings, frozen=True):
    """Settings of a run with every default; None only for what is off."""

    dataset: str  # name or path; in angle brackets for records in memory
    model: str
    recipe: str  # PAPER or BEST
    batch_size: int
    lr: float
    clip_norm: float
    beta1: float
    beta2: float
    gamma_prime: float
    h1: float
    h2: float
    physical_batch: int
    gpu_batch: int  # physical batch on a GPU; it differs only if none was given


SETTINGS: Mapping[str, Option] = options(Settings)
#: Defaults of a run without a recipe.
RECIPE_DEFAULTS: Mapping[str, object] = {
    name: option.default for name, option in SETTINGS.items() if option.flag.group == RECIPE
}
