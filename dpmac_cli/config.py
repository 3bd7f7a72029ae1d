"""YAML and flags become one frozen, validated value; every error is reported at once.

Each field of :class:`TrainConfig` is a flag of ``dpmac train`` and a key of its YAML files, under
the same name with hyphens. Nothing here imports torch.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from dpmac_cli.accounting import SAMPLERS, SIGMA_MAX, SIGMA_MIN
from dpmac_cli.catalog import DATASETS, FEATURES, MODELS, Dataset, Features
from dpmac_cli.dp.optimizers import OPTIMIZERS, Optimizer
from dpmac_cli.errors import InputError
from dpmac_cli.extras import fault_of_extra
from dpmac_cli.recipe import AUGMENTS, SCHEDULES, Recipe
from dpmac_cli.source import STANDARDS, Found, Source

DEVICE = (r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N")
INTERVAL = (r"[1-9][0-9]{0,14}|[0-9]{1,9}(\.[0-9]+)?s", "steps (100) or seconds (60s)")
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
RANGE = (rf"{_NUMBER},{_NUMBER}", "two numbers, such as 0,1")
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


def _setting(default: Any, *args: Any, **kwargs: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(*args, **kwargs)})


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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run.

    Defaults that depend on data set or optimizer are None here and filled in by :func:`resolve`,
    which also checks everything; ``sigma`` stays None while ``epsilon`` asks for calibration.
    """

    dataset: str = _setting(
        "mnist", "What to train on.", TASK, choices=tuple(DATASETS), besides=OWN_DATA
    )
    model: str = _setting(
        None, f"Network. {PER_DATASET}", TASK, choices=tuple(MODELS), besides=OWN_MODEL
    )
    fix_norm: bool = _setting(
        False, "In a network of your own, put group norm in the place of batch norm.", TASK
    )
    features: str | None = _setting(
        None,
        "Train on fixed, public features of the images instead: scatter is wavelet scattering. "
        "[default: none]",
        TASK,
        choices=tuple(FEATURES),
    )
    feature_groups: int | None = _setting(
        None,
        "Groups of the norm behind the features; 0 for none. [default: 27]",
        TASK,
        bounds=Bounds(0, 10**6),
    )
    pretrained: str | None = _setting(
        None, "Start from the public weights in this safetensors file.", TASK
    )
    train: str | None = _setting(
        None,
        "With --pretrained: train all of the network, or its last linear layer alone. "
        "[default: all]",
        TASK,
        choices=TRAINED,
    )
    test_fraction: float = _setting(
        0.2,
        "Share of your own data to hold out where it has no test set.",
        DATA,
        bounds=PROBABILITY,
    )
    split_seed: int = _setting(0, "Decides which share; public.", DATA, bounds=Bounds(0, 2**32 - 1))
    image_size: int | None = _setting(
        None, "Height and width to resize your own images to.", DATA, bounds=Bounds(1, 1024)
    )
    standardise: str = _setting(
        "half",
        "Public constants for your own images: half maps them to [-1, 1].",
        DATA,
        choices=tuple(STANDARDS),
    )
    feature_range: str | None = _setting(
        None,
        "Public range, LOW,HIGH, that columns of your own numbers are clipped to.",
        DATA,
        pattern=RANGE,
    )
    skip_bad: bool = _setting(
        False, "Leave out files that are no images, instead of refusing them.", DATA
    )
    epochs: int | None = _setting(
        None, f"Passes of ceil(n/B) steps. {PER_DATASET}", TASK, bounds=COUNT
    )
    steps: int | None = _setting(None, "Steps, instead of epochs.", TASK, bounds=STEPS)
    batch_size: int = _setting(None, f"Expected batch B. {PER_DATASET}", TASK, bounds=COUNT)

    sigma: float | None = _setting(None, f"Noise multiplier. {PER_DATASET}", PRIVACY, bounds=NOISE)
    epsilon: float | None = _setting(
        None, "Instead of --sigma: the least noise whose run costs this.", PRIVACY, bounds=POSITIVE
    )
    max_epsilon: float | None = _setting(
        None, "Stop before epsilon passes this (exit code 3).", PRIVACY, bounds=POSITIVE
    )
    sampler: str = _setting(
        "poisson",
        "How batches are drawn; says which adjacency the guarantee is for.",
        PRIVACY,
        choices=tuple(SAMPLERS),
    )
    delta: float = _setting(1e-5, "Delta of (epsilon, delta).", PRIVACY, bounds=PROBABILITY)
    no_dp: bool = _setting(False, "Train without privacy, as a baseline.", PRIVACY)
    secure: bool = _setting(
        False,
        "Draw everything from a cipher, and noise on a fixed grid: against attacks on generators "
        "and on floating point. Slower.",
        PRIVACY,
    )

    optimizer: str = _setting(
        "dp-macadam", "How to clip and to step.", OPTIMIZER, choices=tuple(OPTIMIZERS)
    )
    lr: float = _setting(
        None, "Learning rate. [default: the data set's, by optimizer]", OPTIMIZER, bounds=SCALE
    )
    clip_norm: float = _setting(
        None, f"Clipping norm C of the fixed ball. {PER_DATASET}", OPTIMIZER, bounds=SCALE
    )
    beta1: float = _setting(
        None, "Decay of the mean. [default: 0.9; adaclip 0.99]", OPTIMIZER, bounds=DECAY
    )
    beta2: float = _setting(
        None, "Decay of the second moment. [default: 0.999; adaclip 0.9]", OPTIMIZER, bounds=DECAY
    )
    gamma: float = _setting(1e-8, "Adam's stability constant.", OPTIMIZER, bounds=Bounds(0, 1))
    gamma_prime: float = _setting(
        1e-8, "Floor of the corrected second moment.", OPTIMIZER, bounds=VARIANCE
    )
    h1: float = _setting(
        None, f"Lower bound of the estimated variance. {PER_DATASET}", OPTIMIZER, bounds=VARIANCE
    )
    h2: float = _setting(
        None, f"Upper bound of the estimated variance. {PER_DATASET}", OPTIMIZER, bounds=VARIANCE
    )
    kappa: str = _setting("paper", "DP-MacAdam's variance estimate.", OPTIMIZER, choices=KAPPAS)
    phi: str = _setting(
        "paper", "What DP-MacAdamBC takes for the noise's share.", OPTIMIZER, choices=PHIS
    )

    lr_schedule: str = _setting(
        "constant", "How the learning rate goes after the warm-up.", RECIPE, choices=SCHEDULES
    )
    warmup_steps: int = _setting(
        0, "Steps in which the learning rate rises to --lr.", RECIPE, bounds=Bounds(0, STEPS.high)
    )
    weight_decay: float = _setting(
        0.0, "Shrink weights by lr times this in every step.", RECIPE, bounds=Bounds(0, 1e3)
    )
    ema: float | None = _setting(
        None,
        "Score and publish an average of the weights, which keeps this share of itself in a step.",
        RECIPE,
        bounds=PROBABILITY,
    )
    augmentations: int | None = _setting(
        None,
        "Views of each image in each step; the mean of their gradients is clipped.",
        RECIPE,
        bounds=Bounds(1, 1024),
    )
    augment: str | None = _setting(
        None, f"How views are drawn. {PER_DATASET}", RECIPE, choices=AUGMENTS
    )

    canaries: int | None = _setting(
        None,
        "Attack this run's own guarantee by so many made-up records: 1,000 or more. The model is "
        "then for the audit only.",
        AUDIT,
        bounds=Bounds(2, 10**6),
    )
    canary_kind: str | None = _setting(
        None,
        "What they are: gradients, for the strongest attack, or images. [default: gradients]",
        AUDIT,
        choices=CANARY_KINDS,
    )
    guesses: int | None = _setting(
        None,
        "How many the attack guesses, half of them in, half out. [default: a tenth of the "
        f"canaries, and {FEW_GUESSES} at least]",
        AUDIT,
        bounds=Bounds(1, 10**6),
    )

    physical_batch: int = _setting(
        None, f"Samples worked on at a time. {PER_DATASET}", RUN, bounds=COUNT
    )
    compile: bool = _setting(
        False,
        "Fuse vector operations by torch.compile: faster steps after half a minute (needs a C++ "
        "compiler).",
        RUN,
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N.", RUN, pattern=DEVICE)
    seed: int | None = _setting(
        None,
        "Repeatable draws, with no privacy against anyone who knows it. [default: secret]",
        RUN,
        bounds=Bounds(0, 2**63),
        recorded=False,
    )
    data_dir: Path | None = _setting(
        None, "Where data sets lie (or DPMAC_DATA_DIR).", RUN, recorded=False
    )

    checkpoint_every: str = _setting(
        "60s",
        "Save the state every N steps (100) or seconds (60s).",
        OUTPUT,
        pattern=INTERVAL,
        recorded=False,
    )
    out: Path | None = _setting(
        None, "Run folder. [default: a new one in runs/]", OUTPUT, recorded=False
    )
    force: bool = _setting(False, "Replace the run in --out.", OUTPUT, recorded=False)
    diagnostics: bool = _setting(
        False, "Also show and store losses and gradient norms, which are NOT private.", OUTPUT
    )
    tensorboard: bool = _setting(
        False, "Also write what metrics.jsonl holds for TensorBoard, into the run folder.", OUTPUT
    )
    plot: bool = _setting(
        False, "At the end, draw test accuracy and epsilon by epoch, into the run folder.", OUTPUT
    )
    json: bool = _setting(False, "Print the report as JSON.", OUTPUT, recorded=False)
    quiet: bool = _setting(False, "Print nothing but errors.", OUTPUT, recorded=False)
    debug: bool = _setting(False, "Show tracebacks.", OUTPUT, recorded=False)

    @property
    def source(self) -> Source | None:
        """Where a person's own data is; None for a data set of the catalogue."""
        if self.dataset in DATASETS:
            return None
        ends = None
        if self.feature_range is not None:
            low, high = self.feature_range.split(",")
            ends = float(low), float(high)
        return Source(
            Path(self.dataset),
            self.test_fraction,
            self.split_seed,
            self.image_size,
            self.standardise,
            ends,
            self.skip_bad,
        )

    @property
    def data(self) -> str | Source:
        """What :func:`dpmac_cli.data.load_data` takes."""
        return self.source or self.dataset

    @property
    def found(self) -> Found:
        """The data set and its public facts.

        Raises:
            InputError: it is a person's own, and cannot be used.
        """
        if self.source is None:
            return Found(DATASETS[self.dataset], held_out=False, skipped=())
        from dpmac_cli.own_data import inspect  # noqa: PLC0415  (loads numpy)

        return inspect(self.source)

    @property
    def facts(self) -> Dataset:
        """Public facts of the data set. Raises InputError as :attr:`found` does."""
        return self.found.facts

    @property
    def dataset_name(self) -> str:
        """What the data set is called, without the folders above it."""
        return self.dataset if self.source is None else self.source.path.resolve().stem

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
            if setting.recorded and getattr(self, name) is not None
        }
        if self.no_dp:
            kept.pop("sigma")
        if "sigma" in kept:
            kept.pop("epsilon", None)
        if self.source is None:
            kept = {name: value for name, value in kept.items() if SETTINGS[name].panel != DATA}
        if ":" not in self.model:
            kept.pop("fix_norm")
        for name in ("tensorboard", "plot"):  # a run without is recorded as one of before they were
            if not kept[name]:
                kept.pop(name)
        for name, default in RECIPE_DEFAULTS.items():
            if kept.get(name) == default:
                kept.pop(name, None)
        return {flag_name(name): value for name, value in kept.items()}


def flag_name(name: str) -> str:
    """The name of a field as people type it."""
    return name.replace("_", "-")


SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in fields(TrainConfig)}
KINDS: Mapping[str, type] = {
    f.name: next(kind for kind in (*get_args(f.type), f.type) if isinstance(kind, type))
    for f in fields(TrainConfig)
}
#: What a run that follows no recipe has; not recorded.
RECIPE_DEFAULTS: Mapping[str, Any] = {
    f.name: f.default for f in fields(TrainConfig) if SETTINGS[f.name].panel == RECIPE
}

#: Settings that answer the same question: give one. A flag replaces a file's answer.
EXCLUSIVE = (("sigma", "epsilon", "no_dp"), ("max_epsilon", "no_dp"), ("epochs", "steps"))
#: Settings that do not go together, and why. Neither replaces the other: a run that a file makes
#: secure must not lose that unnoticed.
INCOMPATIBLE = {
    ("seed", "secure"): "whoever chose a seed knows the draws that --secure keeps from everyone",
    ("compile", "secure"): "compiled steps add their noise in another way, off the grid",
    ("no_dp", "secure"): "without noise there is nothing to make secure",
    ("no_dp", "canaries"): "without a claim there is nothing to audit",
    ("compile", "canaries"): "compiled steps do not hand out what the attack looks at",
    ("features", "pretrained"): "public weights are for networks that take images",
}


@dataclass(frozen=True)
class _Given:
    """A value as it was given, and where: "--sigma", or "sigma in FILE"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, and what its author should know about it."""

    config: TrainConfig
    notes: tuple[str, ...]


def resolve(
    flags: Mapping[str, Any] | None = None, file: Path | None = None, **settings: Any
) -> Resolved:
    """Turn flags and a YAML file into one checked configuration. Flags win.

    Args:
        flags: field name -> value, as typed or of its type; None and False where not given.
        file: YAML with flag names for keys.
        settings: more of what ``flags`` may hold: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: with every fault found.
    """
    errors: list[str] = []
    given = {} if file is None else _read_file(file, errors)
    return _resolved({**(flags or {}), **settings}, given, errors)


def change(recorded: Mapping[str, Any], flags: Mapping[str, Any]) -> Resolved:
    """Turn what :meth:`TrainConfig.recorded` gave into a configuration again. Flags win.

    Args:
        recorded: flag name -> value.
        flags: as in :func:`resolve`.

    Raises:
        InputError: with every fault found.
    """
    given = {
        name.replace("-", "_"): _Given(value, f"{name} in the checkpoint")
        for name, value in recorded.items()
        if value is not False
    }
    return _resolved(flags, given, [])


def _resolved(flags: Mapping[str, Any], given: dict[str, _Given], errors: list[str]) -> Resolved:
    """A checked configuration; ``errors`` were found before."""
    typed = _typed(_known(flags, errors))
    _settle_exclusives(given, typed, errors)
    given |= typed
    _refuse_incompatibles(given, errors)
    values = _parse_all(given, errors)
    if "dataset" in given and "dataset" not in values:  # the defaults would be another data set's
        raise InputError(errors)
    try:
        config = _with_defaults(values)
    except InputError as failure:
        raise InputError([*errors, *failure.errors]) from failure
    _check_together(config, errors)
    if errors:
        raise InputError(errors)
    return Resolved(config, tuple(_notes(config, typed)))


def data_settings(file: Path, dataset: str | None) -> TrainConfig:
    """A configuration that has of a run's config.yaml only how its data is read.

    Args:
        file: the run's.
        dataset: another place where that data is now; None for the one in the file.

    Raises:
        InputError: the file, or the data, cannot be used.
    """
    errors: list[str] = []
    given = {
        name: entry
        for name, entry in _read_file(file, errors).items()
        if name == "dataset" or SETTINGS[name].panel == DATA
    }
    return _resolved({"dataset": dataset}, given, errors).config


def parse(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Turn flags into values, each checked for itself, for a command that takes only a few.

    Args:
        flags: as in :func:`resolve`; what is not given is left out of the result.

    Raises:
        InputError: with every fault found.
    """
    errors: list[str] = []
    values = _parse_all(_typed(_known(flags, errors)), errors)
    if errors:
        raise InputError(errors)
    return values


def _known(flags: Mapping[str, Any], errors: list[str]) -> Mapping[str, Any]:
    """The flags that there are; what is wrong with the others joins ``errors``."""
    errors.extend(
        f"There is no setting '{name}'.{near(name, SETTINGS)}" for name in flags.keys() - SETTINGS
    )
    return {name: value for name, value in flags.items() if name in SETTINGS}


def _typed(flags: Mapping[str, Any]) -> dict[str, _Given]:
    return {
        name: _Given(value, f"--{flag_name(name)}")
        for name, value in flags.items()
        if value is not None and value is not False
    }


#: What torch, Opacus and TensorFlow Privacy, or just other people, call settings of ours.
OTHER_NAMES: Mapping[str, str] = {
    "noise-multiplier": "sigma",
    "noise": "sigma",
    "target-epsilon": "epsilon",
    "eps": "epsilon",
    "target-delta": "delta",
    "learning-rate": "lr",
    "max-grad-norm": "clip-norm",
    "l2-norm-clip": "clip-norm",
    "clipping-norm": "clip-norm",
    "expected-batch-size": "batch-size",
    "max-physical-batch-size": "physical-batch",
    "num-epochs": "epochs",
    "data": "dataset",
    "network": "model",
    "architecture": "model",
    "gpu": "device",
    "output": "out",
    "random-seed": "seed",
    "optimizer": "optimizers",  # of a comparison
    "optimizers": "optimizer",
    "seed": "seeds",
    "seeds": "seed",
    "secure-mode": "secure",
}
#: What a value must be, in words.
KIND_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}
NULL, BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
#: What YAML can hold instead, in words.
NODE_WORDS: Mapping[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


def _read_file(file: Path, errors: list[str]) -> dict[str, _Given]:
    """The settings of a YAML file; what is wrong with it joins ``errors``."""
    given: dict[str, _Given] = {}
    for name, origin, node in _entries(file, SETTINGS, "a setting", errors):
        if not isinstance(node, yaml.ScalarNode):
            wanted, found = KIND_WORDS[KINDS[name]], NODE_WORDS[type(node)]
            errors.append(f"{origin} must be {wanted}, not {found}.")
        else:
            value = _as_typed(node, KINDS[name])
            if value is not None and value is not False:
                given[name] = _Given(value, origin)
    return given


def read_lists(file: Path, known: Collection[str], errors: list[str]) -> dict[str, list[str]]:
    """The settings of a YAML file in which each may have several values, as text.

    Args:
        file: YAML with flag names for keys, and values or lists of them.
        known: names that may be there, as fields.
        errors: what is wrong joins these.
    """
    found: dict[str, list[str]] = {}
    for name, origin, node in _entries(file, known, "a setting of a study", errors):
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not items or not all(isinstance(item, yaml.ScalarNode) for item in items):
            errors.append(f"{origin} must be a value or a list of values.")
        else:
            found[name] = [str(item.value) for item in items]
    return found


def _entries(
    file: Path, known: Collection[str], what: str, errors: list[str]
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Name, origin and value of each setting of a YAML file; what is wrong joins ``errors``.

    Args:
        file: YAML with flag names for keys.
        known: names that may be there, as fields, each of them ``what``.
    """
    try:
        pairs = _pairs(file)
    except InputError as failure:
        errors.extend(failure.errors)
        return
    seen: set[str] = set()
    for key, node in pairs:
        written = key.value if isinstance(key, yaml.ScalarNode) else NODE_WORDS[type(key)]
        name = written.replace("-", "_")
        origin = f"{flag_name(name)} in {file}"
        if name not in known:
            hint = near_setting(written, known)
            errors.append(f"{written} in {file} is not {what}.{hint}")
        elif name in seen:
            line = key.start_mark.line + 1
            errors.append(f"{origin} is given twice, again in line {line}. Give it once.")
        else:
            yield name, origin, node
        seen.add(name)


def _pairs(file: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a YAML file, and where they stand. Raises InputError."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as failure:
        raise InputError(
            f"--config: {file} cannot be read ({failure.strerror or failure})."
        ) from failure
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as failure:
        raise InputError(
            f"--config: {file} is not YAML that can be read: {_fault_of_yaml(failure)}. "
            "Write lines like 'sigma: 0.8'."
        ) from failure
    if root is None or root.tag == NULL:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise InputError(
            f"--config: {file} must hold lines like 'sigma: 0.8', not {NODE_WORDS[type(root)]}."
        )
    return list(root.value)


def _fault_of_yaml(failure: Exception) -> str:
    """Where a file stops being YAML, and why, in a few words."""
    if isinstance(failure, yaml.MarkedYAMLError) and failure.problem_mark:
        mark, problem = failure.problem_mark, failure.problem or "cannot be read"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem.removeprefix('but ')}"
    if isinstance(failure, RecursionError):
        return "lists or mappings are nested too deeply"
    return "it holds characters that are not text in UTF-8"


def _as_typed(node: yaml.ScalarNode, kind: type) -> str | bool | None:
    """What a file says, as a flag would: text, but for null and for the value of a switch.

    YAML's own idea of numbers (010 is 8, 1:30 is 90, 1e-5 is text) is left aside.
    """
    if node.tag == NULL:
        return None
    if kind is bool and node.tag == BOOL:
        return yaml.SafeLoader.bool_values.get(node.value.lower(), node.value)
    return str(node.value)


def _settle_exclusives(
    given: dict[str, _Given], typed: dict[str, _Given], errors: list[str]
) -> None:
    """Drop a file's answer where a flag answers the same question; report two answers in one."""
    for group in EXCLUSIVE:
        for source in (typed, given):
            origins = [source[name].origin for name in group if name in source]
            if len(origins) > 1:
                errors.append(f"{' and '.join(origins)} contradict each other: give one.")
        if any(name in typed for name in group):
            for name in group:
                given.pop(name, None)


def _refuse_incompatibles(given: Mapping[str, _Given], errors: list[str]) -> None:
    """Report settings that do not go together, wherever each was given."""
    for pair, why in INCOMPATIBLE.items():
        origins = [given[name].origin for name in pair if name in given]
        if len(origins) == len(pair):
            errors.append(f"{' and '.join(origins)} contradict each other: {why}. Give one.")


def _parse_all(given: Mapping[str, _Given], errors: list[str]) -> dict[str, Any]:
    """The values that are in order; what is wrong with the others joins ``errors``."""
    values = {}
    for name, entry in given.items():
        value, error = _parse(name, entry)
        if error:
            errors.append(error)
        else:
            values[name] = value
    return values


def _parse(name: str, entry: _Given) -> tuple[Any, str | None]:
    """One value in its type, or what is wrong with it."""
    kind, value = KINDS[name], entry.value
    if kind is bool:
        fault = f"{entry.origin} must be {KIND_WORDS[bool]}."
        return value, None if isinstance(value, bool) else fault
    if kind in (str, Path):
        return kind(str(value)), _fault_of_text(name, str(value), entry.origin)
    number = _number(value, kind)
    return number, _fault_of_number(name, number, entry)


def _fault_of_text(name: str, text: str, origin: str) -> str | None:
    setting = SETTINGS[name]
    if KINDS[name] is Path and not text:
        return f"{origin} must not be empty. Name a folder, or leave it out."
    if setting.besides and setting.besides[0](text):
        return None
    if setting.choices and text not in setting.choices:
        more = f"; or {setting.besides[1]}" if setting.besides else ""
        return (
            f"{origin}: there is no {flag_name(name)} '{text}'."
            f"{near(text, setting.choices)} Known: {', '.join(setting.choices)}{more}."
        )
    if setting.pattern and not re.fullmatch(setting.pattern[0], text):
        return f"{origin} must be {setting.pattern[1]}, not '{text}'."
    return None


def _fault_of_number(name: str, number: float | None, entry: _Given) -> str | None:
    bounds = SETTINGS[name].bounds
    if number is None:
        return f"{entry.origin}: '{entry.value}' is not {KIND_WORDS[KINDS[name]]}.{_point(entry)}"
    if bounds and not bounds.holds(number):
        hint = " To train without privacy use --no-dp." if name == "sigma" and number == 0 else ""
        return f"{entry.origin} must be {bounds}, not {entry.value}.{hint}"
    return None


def _point(entry: _Given) -> str:
    """A hint for those who write a decimal comma."""
    pointed = str(entry.value).replace(",", ".")
    meant = pointed != entry.value and _number(pointed, float) is not None
    return f" Did you mean {pointed}?" if meant else ""


def _number(value: Any, kind: type) -> float | int | None:
    """A finite number of the kind, or None."""
    try:
        number: float | int = kind(str(value))
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def near_setting(written: str, known: Collection[str]) -> str:
    """The same for what was written in the place of a setting, one of ``known`` as fields."""
    ours = OTHER_NAMES.get(written.replace("_", "-"), "")
    if ours.replace("-", "_") in known:
        return f" Here it is called {ours}."
    return near(written, map(flag_name, known))


def near(text: str, names: Iterable[str]) -> str:
    """' Did you mean ...?' with the near matches, or nothing."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _with_defaults(values: dict[str, Any]) -> TrainConfig:
    """Fill in what depends on data set and optimizer."""
    plain = TrainConfig(**values)
    defaults, optimizer = plain.facts.defaults, plain.optimizer
    adaclip = optimizer == "adaclip"
    rest: dict[str, Any] = {
        "model": defaults.model,
        "batch_size": defaults.batch_size,
        "lr": defaults.lr[optimizer],
        "clip_norm": defaults.clip_norm,
        "beta1": 0.99 if adaclip else 0.9,
        "beta2": 0.9 if adaclip else 0.999,
        "h1": defaults.h1,
        "h2": defaults.h2,
        "physical_batch": max(1, defaults.physical_batch // (plain.augmentations or 1)),
    }
    if plain.augmentations is not None:
        rest["augment"] = plain.facts.augment
    if plain.chosen_features is not None:
        rest |= {"model": "linear", "feature_groups": plain.chosen_features.groups}
    if plain.pretrained is not None:
        rest["train"] = TRAINED[0]
    if plain.head_only or {**rest, **values}["model"] == "linear":
        rest["physical_batch"] = max(defaults.physical_batch, ROWS_AT_A_TIME)
    if plain.steps is None:
        rest["epochs"] = defaults.epochs
    if plain.no_dp:
        rest["sigma"] = 0.0
    elif plain.epsilon is None:
        rest["sigma"] = defaults.sigma
    if plain.canaries is not None:
        rest["canary_kind"] = CANARY_KINDS[0]
        rest["guesses"] = max(plain.canaries // 10, min(plain.canaries, FEW_GUESSES))
    return TrainConfig(**{**rest, **values})


def _check_together(config: TrainConfig, errors: list[str]) -> None:
    """Faults that lie between settings."""
    if config.source and config.source.feature_range:
        low, high = config.source.feature_range
        if low >= high:
            errors.append(f"--feature-range {config.feature_range}: the first must be the smaller.")
    if config.h1 > config.h2:
        errors.append(f"--h1 ({config.h1:g}) must not be above --h2 ({config.h2:g}).")
    if config.batch_size > config.facts.train_size:
        errors.append(
            f"--batch-size ({config.batch_size}) must not be above the size of {config.dataset}, "
            f"{config.facts.train_size}."
        )
    errors.extend(_audit_faults(config))
    errors.extend(_recipe_faults(config))
    errors.extend(_frozen_faults(config))
    if config.tensorboard:
        errors.extend(fault_of_extra("tensorboard", "--tensorboard"))
    if not STEPS.holds(config.total_steps):
        errors.append(
            f"--epochs {config.epochs} is {config.total_steps:,} steps in all at a --batch-size of "
            f"{config.batch_size:,}; a run takes at most {STEPS.high:,}. Choose fewer epochs or "
            "larger batches."
        )


def _recipe_faults(config: TrainConfig) -> Iterable[str]:
    """Faults between the settings of a recipe and others."""
    if config.augment is not None and config.augmentations is None:
        yield "--augment says how views are drawn: add --augmentations, or leave it out."
    if config.augmentations is not None and config.facts.shape[1:] == (1, 1):
        yield f"--augmentations is for images, and {config.dataset} is a table. Leave it out."
    if config.warmup_steps >= config.total_steps:
        yield (
            f"--warmup-steps ({config.warmup_steps:,}) must be below the steps of the run, "
            f"{config.total_steps:,}."
        )


def _audit_faults(config: TrainConfig) -> Iterable[str]:
    """Faults between the settings of an audit and others."""
    if config.canaries is None:
        for name in ("canary_kind", "guesses"):
            if getattr(config, name) is not None:
                yield f"--{flag_name(name)} is of an audit: add --canaries, or leave it out."
        return
    if config.sampler != "poisson":
        yield (
            f"--canaries: only poisson sampling can be audited, not {config.sampler}. Leave out "
            "--sampler or --canaries."
        )
    if config.canary_kind == "images" and config.source is not None:
        yield "--canary-kind images is for the data sets of the catalogue: leave it out."
    if (config.guesses or 0) > config.canaries:
        yield f"--guesses ({config.guesses:,}) must not be above --canaries ({config.canaries:,})."


def _frozen_faults(config: TrainConfig) -> Iterable[str]:
    """Faults between what is frozen and other settings."""
    features = config.chosen_features
    if features is None:
        if config.feature_groups is not None:
            yield "--feature-groups is of features: add --features, or leave it out."
    elif config.facts.levels == 1:
        yield (
            f"--features {features.kind} is of images, and {config.dataset} holds rows of numbers. "
            "Leave it out."
        )
    elif (fault := features.fault(config.facts.shape)) is not None:
        yield f"--features {features.kind}: images of {config.dataset} {fault}"
    if config.pretrained is None:
        if config.train is not None:
            yield "--train is of public weights: add --pretrained FILE, or leave it out."
    elif not Path(config.pretrained).is_file():
        yield f"--pretrained: there is no file {config.pretrained}."
    if config.augmentations is not None and (features is not None or config.head_only):
        yield (
            "--augmentations draws views anew in every step, and what is frozen is computed once: "
            "leave one of them out."
        )
    if config.canary_kind == "images" and (features is not None or config.head_only):
        yield (
            "--canary-kind images is of networks that are trained on images, not behind a frozen "
            "part: leave it out."
        )


def _notes(config: TrainConfig, typed: Mapping[str, _Given]) -> Iterable[str]:
    """What is legal, but probably not what was meant."""
    used = config.method.settings
    tunable = [name for name, setting in SETTINGS.items() if setting.panel == OPTIMIZER]
    for name in tunable:
        if name != "optimizer" and name in typed and name not in used:
            yield f"{typed[name].origin} has no effect with {config.optimizer}."
    for name in (name for name in typed if SETTINGS[name].panel == DATA and config.source is None):
        yield f"{typed[name].origin} has no effect with {config.dataset}."
    if "fix_norm" in typed and ":" not in config.model:
        yield f"{typed['fix_norm'].origin} has no effect with {config.model}."
    if config.found.skipped:
        yield (
            f"{len(config.found.skipped)} files of {config.dataset} are left out: "
            f"{config.found.skipped[0]}."
        )
    if not config.no_dp:
        yield from delta_note(config.delta, config.facts.train_size)


def delta_note(delta: float, records: int) -> Iterable[str]:
    """A word on a delta that promises next to nothing."""
    limit = 1 / records
    if delta >= limit:
        yield (
            f"delta {delta:g} is not below 1/n = {limit:.2g}: at that size the guarantee "
            "allows publishing a whole record now and then. Choose a smaller --delta."
        )


#: How a config.yaml of ours begins.
HEADER = "# Settings of a dpmac run."


def to_yaml(config: TrainConfig) -> str:
    """The file that, given to --config with the same --seed, repeats an unbranched run exactly."""
    body = yaml.safe_dump(config.recorded(), sort_keys=False)
    return f"{HEADER} dpmac train --config FILE trains with them anew; a seed is not kept.\n{body}"
