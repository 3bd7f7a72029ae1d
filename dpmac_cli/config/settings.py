"""What can be set: each field of :class:`TrainConfig` is a flag of ``dpmac train`` and a key of its
YAML files, under the same name with hyphens. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.data.registry import DATASETS, Dataset
from dpmac_cli.data.schema import STANDARDS, Found, Source
from dpmac_cli.dp.optimizers import OPTIMIZERS, Optimizer
from dpmac_cli.models.registry import FEATURES, MODELS, Features
from dpmac_cli.training.schedules import AUGMENTS, SCHEDULES, Recipe

DEVICE = (r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N")
INTERVAL = (r"[1-9][0-9]{0,14}|[0-9]{1,9}(\.[0-9]+)?s", "steps (100) or seconds (60s)")
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
RANGE = (rf"{_NUMBER},{_NUMBER}", "two numbers, such as 0,1")
NAMES = (r"\s*[^,\s][^,]*(,\s*[^,\s][^,]*)+", "two names or more, such as cat,dog")
KAPPAS = ("paper", "exact", "tracked")
PHIS = ("paper", "tracked")
CANARY_KINDS = ("gradients", "images")
TRAINED = ("all", "head")
#: Samples worked on at a time where one linear layer is trained.
ROWS_AT_A_TIME = 1024
#: Fewer guesses, all of them right, could not show an epsilon above 1.8.
FEW_GUESSES = 20


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers; ``open_low`` and ``open_high`` leave the ends out."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {_in_digits(self.low)}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {_in_digits(self.high)}"


def _in_digits(number: float) -> str:
    """Counts in full, their thousands apart; measures in short."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


POSITIVE = Bounds(0, open_low=True)
NOISE = Bounds(SIGMA_MIN, SIGMA_MAX)
# float32 holds the squares and fourth roots of these, and what they are divided by.
SCALE = Bounds(1e-10, 1e10)
VARIANCE = Bounds(1e-30, 1e10)
COUNT = Bounds(1, 10**9)
STEPS = Bounds(1, 10**7)
DECAY = Bounds(0, 1, open_high=True)
PROBABILITY = Bounds(0, 1, open_low=True, open_high=True)


@dataclass(frozen=True)
class Setting:
    """What the command line and the YAML reader need to know of a field.

    Attributes:
        help: one line.
        panel: the group it is shown in.
        bounds: of a number.
        choices: of a name.
        pattern: of other text, and what it stands for in words.
        besides: what may be given besides the choices: a test, and what it is in words.
        recorded: whether config.yaml keeps it: it describes the run, not where it was typed.
    """

    help: str
    panel: str
    bounds: Bounds | None = None
    choices: tuple[str, ...] = ()
    pattern: tuple[str, str] | None = None
    besides: tuple[Callable[[str], bool], str] | None = None
    recorded: bool = True


def _setting(panel: str, default: Any, text: str, **rest: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(text, panel, **rest)})


TASK, PRIVACY, OPTIMIZER, RUN, OUTPUT = "Task", "Privacy", "Optimizer", "Run", "Output"
RECIPE = "Recipe"
DATA = "Your own data"
#: What may be given in place of a name of the catalogue.
OWN_DATA = (
    lambda text: "/" in text or text.endswith(".npz") or Path(text).exists(),
    "a folder with a folder of images a class, or an .npz",
)
OWN_MODEL = (lambda text: ":" in text, "your own FILE.py:FACTORY or MODULE:FACTORY")
AUDIT = "Audit"
PER_DATASET = "[default: the data set's]"

_task, _privacy, _optimizer = (partial(_setting, panel) for panel in (TASK, PRIVACY, OPTIMIZER))
_run, _output, _recipe = (partial(_setting, panel) for panel in (RUN, OUTPUT, RECIPE))
_data, _audit = (partial(_setting, panel) for panel in (DATA, AUDIT))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run.

    Defaults that depend on data set or optimizer are None here and filled in by :func:`resolve`,
    which also checks everything; ``sigma`` stays None while ``epsilon`` asks for calibration.

    Attributes:
        found: facts of the dataset. Not a setting: :func:`resolve` reads them once, so that
            sampling rate, epsilon and report are those of the records that the run began with.
    """

    found: Found = field(default=cast(Found, None), compare=False, repr=False)
    dataset: str = _task("mnist", "What to train on.", choices=tuple(DATASETS), besides=OWN_DATA)
    model: str = _task(None, f"Network. {PER_DATASET}", choices=tuple(MODELS), besides=OWN_MODEL)
    fix_norm: bool = _task(
        False, "In a network of your own, put group norm in the place of batch norm."
    )
    to_float32: bool = _task(False, "Convert the parameters of a network of your own to 32 bits.")
    isolate: bool = _task(
        False,
        "Run the network on each sample alone, so that it cannot mix samples; slower. [default: "
        "where nothing else proves that it does not]",
    )
    no_isolate: bool = _task(False, "Trust a trial of your own network on made-up batches instead.")
    features: str | None = _task(
        None,
        "Train on fixed, public features of the images instead: scatter is wavelet scattering. "
        "[default: none]",
        choices=tuple(FEATURES),
    )
    feature_groups: int | None = _task(
        None,
        "Groups of the norm behind the features; 0 for none. [default: 27]",
        bounds=Bounds(0, 10**6),
    )
    pretrained: str | None = _task(None, "Start from the public weights in this safetensors file.")
    train: str | None = _task(
        None,
        "With --pretrained: train all of the network, or its last linear layer alone. "
        "[default: all]",
        choices=TRAINED,
    )
    test_fraction: float = _data(
        0.2, "Fraction to hold out for testing without a test set.", bounds=PROBABILITY
    )
    split_seed: int = _data(
        0, "Public seed of that choice, made per record.", bounds=Bounds(0, 2**32 - 1)
    )
    channels: str | None = _data(
        None, "Convert your images to N channels. [default: as found]", choices=("1", "3")
    )
    image_size: int | None = _data(
        None, "Resize your images to N by N. [default: as found]", bounds=Bounds(1, 1024)
    )
    classes: str | None = _data(
        None, "Names of your classes, in order of label. [default: as found]", pattern=NAMES
    )
    standardise: str = _data(
        "half", "Public constants: half maps images to [-1, 1].", choices=tuple(STANDARDS)
    )
    feature_range: str | None = _data(
        None, "Public range, LOW,HIGH, to clip columns of numbers to.", pattern=RANGE
    )
    skip_bad: bool = _data(
        False, "Leave out records that cannot be used, instead of rejecting the dataset."
    )
    epochs: int | None = _task(None, f"Passes of ceil(n/B) steps. {PER_DATASET}", bounds=COUNT)
    steps: int | None = _task(None, "Steps, instead of epochs.", bounds=STEPS)
    batch_size: int = _task(None, f"Expected batch B. {PER_DATASET}", bounds=COUNT)

    sigma: float | None = _privacy(None, f"Noise multiplier. {PER_DATASET}", bounds=NOISE)
    epsilon: float | None = _privacy(
        None, "Instead of --sigma: the least noise whose run costs this.", bounds=POSITIVE
    )
    max_epsilon: float | None = _privacy(
        None, "Stop before epsilon passes this (exit code 3).", bounds=POSITIVE
    )
    sampler: str = _privacy(
        "poisson",
        "How batches are drawn; says which adjacency the guarantee is for.",
        choices=tuple(SAMPLERS),
    )
    delta: float = _privacy(1e-5, "Delta of (epsilon, delta).", bounds=PROBABILITY)
    no_dp: bool = _privacy(False, "Train without privacy, as a baseline.")
    secure: bool = _privacy(
        False,
        "Draw everything from a cipher, and noise on a fixed grid: against attacks on generators "
        "and on floating point. Slower.",
    )

    optimizer: str = _optimizer("dp-macadam", "How to clip and to step.", choices=tuple(OPTIMIZERS))
    lr: float = _optimizer(
        None, "Learning rate. [default: the data set's, by optimizer]", bounds=SCALE
    )
    clip_norm: float = _optimizer(
        None, f"Clipping norm C of the fixed ball. {PER_DATASET}", bounds=SCALE
    )
    beta1: float = _optimizer(None, "Decay of the mean. [default: 0.9; adaclip 0.99]", bounds=DECAY)
    beta2: float = _optimizer(
        None, "Decay of the second moment. [default: 0.999; adaclip 0.9]", bounds=DECAY
    )
    gamma: float = _optimizer(1e-8, "Adam's stability constant.", bounds=Bounds(0, 1))
    gamma_prime: float = _optimizer(1e-8, "Floor of the corrected second moment.", bounds=VARIANCE)
    h1: float = _optimizer(
        None, f"Lower bound of the estimated variance. {PER_DATASET}", bounds=VARIANCE
    )
    h2: float = _optimizer(
        None, f"Upper bound of the estimated variance. {PER_DATASET}", bounds=VARIANCE
    )
    kappa: str = _optimizer("paper", "DP-MacAdam's variance estimate.", choices=KAPPAS)
    phi: str = _optimizer("paper", "What DP-MacAdamBC takes for the noise's share.", choices=PHIS)

    lr_schedule: str = _recipe(
        "constant", "How the learning rate goes after the warm-up.", choices=SCHEDULES
    )
    warmup_steps: int = _recipe(
        0, "Steps in which the learning rate rises to --lr.", bounds=Bounds(0, STEPS.high)
    )
    weight_decay: float = _recipe(
        0.0, "Shrink weights by lr times this in every step.", bounds=Bounds(0, 1e3)
    )
    ema: float | None = _recipe(
        None,
        "Score and publish an average of the weights, which keeps this share of itself in a step.",
        bounds=PROBABILITY,
    )
    augmentations: int | None = _recipe(
        None,
        "Views of each image in each step; the mean of their gradients is clipped.",
        bounds=Bounds(1, 1024),
    )
    augment: str | None = _recipe(None, f"How views are drawn. {PER_DATASET}", choices=AUGMENTS)

    canaries: int | None = _audit(
        None,
        "Attack this run's own guarantee by so many made-up records; fewer than 1,000 prove "
        "little. The model is then for the audit only.",
        bounds=Bounds(2, 10**6),
    )
    canary_kind: str | None = _audit(
        None,
        "What they are: gradients, for the strongest attack, or images. [default: gradients]",
        choices=CANARY_KINDS,
    )
    guesses: int | None = _audit(
        None,
        "How many the attack guesses, half of them in, half out. [default: a tenth of the "
        f"canaries, and {FEW_GUESSES} at least]",
        bounds=Bounds(1, 10**6),
    )

    physical_batch: int = _run(None, f"Samples worked on at a time. {PER_DATASET}", bounds=COUNT)
    compile: bool = _run(
        False,
        "Fuse vector operations by torch.compile: faster steps after half a minute (needs a C++ "
        "compiler).",
    )
    device: str = _run("auto", "auto, cpu, cuda or cuda:N.", pattern=DEVICE)
    seed: int | None = _run(
        None,
        "Repeatable draws, with no privacy against anyone who knows it. [default: secret]",
        bounds=Bounds(0, 2**63),
        recorded=False,
    )
    data_dir: Path | None = _setting(
        RUN, None, "Where data sets lie (or DPMAC_DATA_DIR).", recorded=False
    )

    checkpoint_every: str = _output(
        "60s",
        "Save the state every N steps (100) or seconds (60s).",
        pattern=INTERVAL,
        recorded=False,
    )
    out: Path | None = _setting(
        OUTPUT, None, "Run folder. [default: a new one in runs/]", recorded=False
    )
    force: bool = _output(
        False, "Replace the run in --out: its files are removed before step 1.", recorded=False
    )
    diagnostics: bool = _output(
        False, "Also show and store losses and gradient norms, which are NOT private."
    )
    tensorboard: bool = _output(
        False, "Also write what metrics.jsonl holds for TensorBoard, into the run folder."
    )
    plot: bool = _output(
        False, "At the end, draw test accuracy and epsilon by epoch, into the run folder."
    )
    json: bool = _output(False, "Print the report as JSON.", recorded=False)
    quiet: bool = _output(False, "Print nothing but errors.", recorded=False)
    debug: bool = _output(False, "Show tracebacks.", recorded=False)

    @property
    def source(self) -> Source | None:
        """Your own dataset and how to read it; None for a dataset of the catalogue."""
        if self.dataset in DATASETS:
            return None
        ends, names = self.feature_range, self.classes
        low, high = map(float, ends.split(",")) if ends else (0.0, 0.0)
        return Source(
            Path(self.dataset),
            test_fraction=self.test_fraction,
            split_seed=self.split_seed,
            channels=None if self.channels is None else int(self.channels),
            image_size=self.image_size,
            classes=tuple(name.strip() for name in names.split(",")) if names else None,
            standardise=self.standardise,
            feature_range=(low, high) if ends else None,
            skip_bad=self.skip_bad,
        )

    @property
    def data(self) -> str | Source:
        """What :func:`dpmac_cli.data.loaders.load_data` takes."""
        return self.source or self.dataset

    @property
    def facts(self) -> Dataset:
        """Public facts of the dataset."""
        return self.found.facts

    @property
    def dataset_name(self) -> str:
        """Name of the dataset, without the folders above it."""
        return self.found.name

    @property
    def model_name(self) -> str:
        """What the network is called, without the folders above it."""
        return self.model.rpartition("/")[2] if ":" in self.model else self.model

    @property
    def recipe(self) -> Recipe:
        """What the run does besides its optimizer's steps."""
        return Recipe(
            self.lr_schedule,
            self.warmup_steps,
            self.weight_decay,
            self.ema,
            self.augmentations or 1,
            self.augment,
        )

    @property
    def chosen_features(self) -> Features | None:
        """What the network takes in place of images; None for the images."""
        if self.features is None:
            return None
        groups = FEATURES[self.features].groups
        return Features(
            self.features, groups if self.feature_groups is None else self.feature_groups
        )

    @property
    def head_only(self) -> bool:
        """Whether all of the network but its last layer is frozen."""
        return self.train == "head"

    @property
    def method(self) -> Optimizer:
        """The optimizer's row in the table."""
        return OPTIMIZERS[self.optimizer]

    @property
    def sampling_rate(self) -> float:
        """q = B/n; with K canaries B/(n + K/2), where how many of them are in is secret."""
        return self.batch_size / (self.facts.train_size + (self.canaries or 0) / 2)

    @property
    def steps_per_epoch(self) -> int:
        """ceil(n/B)."""
        return math.ceil(self.facts.train_size / self.batch_size)

    @property
    def total_steps(self) -> int:
        """T."""
        return self.steps or (self.epochs or 0) * self.steps_per_epoch

    @property
    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Steps or seconds between checkpoints; the other is None."""
        text = self.checkpoint_every
        return (None, float(text[:-1])) if text.endswith("s") else (int(text), None)

    def recorded(self) -> dict[str, Any]:
        """What config.yaml keeps, under the names of the flags."""
        kept = {
            name: getattr(self, name)
            for name, setting in SETTINGS.items()
            if setting.recorded
            and getattr(self, name) not in (None, OMITTED.get(name))
            and (self.source is not None or setting.panel != DATA)
        }
        if self.no_dp:
            kept.pop("sigma")
        if "sigma" in kept:
            kept.pop("epsilon", None)
        if ":" not in self.model:
            kept.pop("fix_norm")
        return {flag_name(name): value for name, value in kept.items()}


def flag_name(name: str) -> str:
    """The name of a field as people type it."""
    return name.replace("_", "-")


_FIELDS = [f for f in fields(TrainConfig) if f.metadata]
SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in _FIELDS}
KINDS: Mapping[str, type] = {
    f.name: next(kind for kind in (*get_args(f.type), f.type) if isinstance(kind, type))
    for f in _FIELDS
}
#: What a run that follows no recipe has.
RECIPE_DEFAULTS: dict[str, Any] = {
    f.name: f.default for f in _FIELDS if SETTINGS[f.name].panel == RECIPE
}
#: Values that config.yaml leaves out.
OMITTED: Mapping[str, Any] = RECIPE_DEFAULTS | dict.fromkeys(
    ("tensorboard", "plot", "isolate", "no_isolate", "to_float32"), False
)
