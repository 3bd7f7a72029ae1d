"""Settings of a training run as given: one field per flag and YAML key. Loads no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, InstanceOf, StrictBool, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from dpmac_cli.accounting.accountants import SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import STANDARDS, TABLES, AtHand
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.registry import BACKBONES, FEATURES, MODELS, PARTS
from dpmac_cli.training.schedules import AUGMENTS, LOSSES, SCHEDULES

DEVICE = (r"auto|cpu|cuda(:[0-9]{1,3})?", "auto, cpu, cuda or cuda:N")
INTERVAL = (r"[1-9][0-9]{0,14}|[0-9]{1,9}(\.[0-9]+)?s", "steps (100) or seconds (60s)")
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
RANGE = (rf"{NUMBER},{NUMBER}", "two numbers, such as 0,1")
NUMBERS = (rf"\s*{NUMBER}(\s*,\s*{NUMBER})+\s*", "two numbers or more, such as 1,5")
NAMES = (r"\s*[^,\s][^,]*(,\s*[^,\s][^,]*)+", "two names or more, such as cat,dog")
#: Metrics of test records that a run can be shown by, and their names for readers.
METRICS: Mapping[str, str] = {
    "accuracy": "accuracy",
    "balanced-accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "average-precision": "average precision",
    "f1": "F1",
}
#: Fewer guesses, all of them right, could not show an epsilon above 1.8.
FEW_GUESSES = 20

Positive = Annotated[float, Field(gt=0)]
Noise = Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)]
# float32 holds the squares and fourth roots of these, and what they are divided by.
Scale = Annotated[float, Field(ge=1e-10, le=1e10)]
Variance = Annotated[float, Field(ge=1e-30, le=1e10)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]


def bounds_in_words(annotation: Any) -> str:
    """Return the bounds of a type such as :data:`Probability`: "above 0 and below 1"."""
    words = {"Ge": "at least", "Gt": "above", "Le": "at most", "Lt": "below"}
    said = []
    for constraint in annotation.__metadata__[0].metadata:
        name = type(constraint).__name__
        number = getattr(constraint, name.lower())
        said.append(f"{words[name]} {number:{',' if isinstance(number, int) else 'g'}}")
    return " and ".join(said)


@dataclass(frozen=True)
class Setting:
    """What the command line and the YAML reader need to know of a field.

    Attributes:
        help: one line.
        panel: the group it is shown in.
        default: its value if it is not given; None where that depends on other settings.
        otherwise: that default in words; empty where nothing is done if it is not given.
        choices: of a name.
        besides: what may be given besides the choices: a test, and what it is in words.
        pattern: of other text, and what it stands for in words.
        recorded: whether config.yaml keeps it: it describes the run, not where it was typed.
        kind: type of its values.
        bounds: of a number, in words.
    """

    help: str
    panel: str
    default: Any = None
    otherwise: str = ""
    choices: tuple[str, ...] = ()
    besides: tuple[Callable[[str], bool], str] | None = None
    pattern: tuple[str, str] | None = None
    recorded: bool = True
    kind: type = str
    bounds: str = ""

    @property
    def known(self) -> str:
        """Its choices in words."""
        more = f"; or {self.besides[1]}" if self.besides else ""
        return f"{', '.join(self.choices)}{more}"

    def accepts(self, text: str) -> bool:
        """Return whether text is a path, one of the choices, or fits the pattern."""
        if self.kind is Path:
            return text != ""
        if self.besides and self.besides[0](text):
            return True
        if self.choices:
            return text in self.choices
        return self.pattern is None or re.fullmatch(self.pattern[0], text) is not None


def setting(panel: str, text: str, default: Any = None, **rest: Any) -> Any:
    """Return a field of a class of settings."""
    return field(default=None, metadata={"setting": Setting(text, panel, default, **rest)})


TASK, PRIVACY, OPTIMIZER, RECIPE = "Task", "Privacy", "Optimizer", "Recipe"
DATA, AUDIT, RUN, OUTPUT = "Your own data", "Audit", "Run", "Output"
#: What may be given in place of a registered name.
OWN_DATA = (
    lambda text: "/" in text or text.endswith((".npz", *TABLES)) or Path(text).exists(),
    "a folder with a folder of images a class, an .npz, or a table (.csv, .tsv, .parquet)",
)
OWN_MODEL = (lambda text: ":" in text, "your own FILE.py:FACTORY or MODULE:FACTORY")
PER_DATASET = "the data set's"

_task, _privacy, _optimizer = (partial(setting, panel) for panel in (TASK, PRIVACY, OPTIMIZER))
_run, _output, _recipe = (partial(setting, panel) for panel in (RUN, OUTPUT, RECIPE))
_data, _audit = (partial(setting, panel) for panel in (DATA, AUDIT))


checked_dataclass = partial(
    pydantic_dataclass, frozen=True, kw_only=True, config=ConfigDict(allow_inf_nan=False)
)


def metric_key(name: str) -> str:
    """Return the key of a metric in metrics.jsonl."""
    return f"test_{name.replace('-', '_')}"


@checked_dataclass()
class Checked:
    """Settings as given, each checked by itself; None where a setting was not given."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls: Any, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and not settings_of(cls)[str(info.field_name)].accepts(value):
            raise ValueError("neither a choice nor of the pattern")
        return value


@checked_dataclass()
class Settings(Checked):
    """Settings of a training run."""

    dataset: str | InstanceOf[AtHand] | None = _task(
        "What to train on.", "mnist", choices=tuple(DATASETS), besides=OWN_DATA
    )
    model: str | None = _task(
        "Network.", otherwise=PER_DATASET, choices=tuple(MODELS), besides=OWN_MODEL
    )
    fix_norm: StrictBool | None = _task(
        "In a network of your own, put group norm in the place of batch norm."
    )
    to_float32: StrictBool | None = _task(
        "Convert the parameters of a network of your own to 32 bits."
    )
    isolate: StrictBool | None = _task(
        "Run the network on each sample alone, so that it cannot mix samples; slower.",
        otherwise="where nothing else proves that it does not",
    )
    features: str | None = _task(
        "Train on fixed features of the images instead, by wavelet scattering; nothing is learnt.",
        choices=tuple(FEATURES),
    )
    backbone: str | None = _task(
        "Train on the features of this public network instead of the images.",
        choices=tuple(BACKBONES),
    )
    backbone_size: Annotated[int, Field(ge=32, le=1024)] | None = _task(
        "Pixels of a side that images are resized to for it.", otherwise="the backbone's"
    )
    backbone_flips: StrictBool | None = _task(
        "Take the mean of the features of each image and of its mirror image."
    )
    pretrained: str | None = _task("Start from the public weights in this safetensors file.")
    train: str | None = _task(
        "Part of a network with public weights that is trained.",
        otherwise="all, but behind a backbone the head",
        choices=tuple(PARTS),
    )
    lora_rank: Annotated[int, Field(ge=1, le=1024)] | None = _task(
        "With --train lora: rank of the additions.", otherwise="8"
    )
    lora_alpha: Scale | None = _task(
        "With --train lora: the additions are scaled by alpha / rank.", otherwise="16"
    )
    epochs: Count | None = _task("Passes of ceil(n/B) steps.", otherwise=PER_DATASET)
    steps: Steps | None = _task("Steps, instead of epochs.")
    batch_size: Count | None = _task("Expected batch B.", otherwise=PER_DATASET)

    test_fraction: Probability | None = _data(
        "Fraction to hold out for testing without a test set.", 0.2
    )
    split_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = _data(
        "Public seed of that choice, made per record.", 0
    )
    channels: str | None = _data(
        "Convert your images to N channels.", otherwise="as found", choices=("1", "3")
    )
    image_size: Annotated[int, Field(ge=1, le=1024)] | None = _data(
        "Resize your images to N by N.", otherwise="as found"
    )
    classes: str | None = _data(
        "Names of your classes, in order of label.", otherwise="as found", pattern=NAMES
    )
    standardise: str | None = _data(
        "Public constants: half maps images to [-1, 1].", "half", choices=tuple(STANDARDS)
    )
    feature_range: str | None = _data(
        "Public range, LOW,HIGH, to clip columns of numbers to.", pattern=RANGE
    )
    schema: str | None = _data("File that says what your table may hold: see dpmac schema.")
    skip_bad: StrictBool | None = _data(
        "Leave out records that cannot be used, instead of rejecting the dataset."
    )

    sigma: Noise | None = _privacy("Noise multiplier.", otherwise=PER_DATASET)
    epsilon: Positive | None = _privacy("Instead of --sigma: the least noise whose run costs this.")
    max_epsilon: Positive | None = _privacy("Stop before epsilon passes this (exit code 3).")
    sampler: str | None = _privacy(
        "How batches are drawn, which the privacy cost depends on.",
        "poisson",
        choices=tuple(SAMPLERS),
    )
    delta: Probability | None = _privacy("Delta of (epsilon, delta).", 1e-05)
    no_dp: StrictBool | None = _privacy("Train without privacy, as a baseline.")
    secure: StrictBool | None = _privacy(
        "Draw everything from a cipher, and noise on a fixed grid: against attacks on generators "
        "and on floating point. Slower."
    )

    optimizer: str | None = _optimizer(
        "How to clip and to step.", "dp-macadam", choices=tuple(OPTIMIZERS)
    )
    lr: Scale | None = _optimizer("Learning rate.", otherwise="the data set's, by optimizer")
    clip_norm: Scale | None = _optimizer(
        "Clipping norm C of the fixed ball.", otherwise=PER_DATASET
    )
    beta1: Decay | None = _optimizer("Decay of the mean.", otherwise="0.9; adaclip 0.99")
    beta2: Decay | None = _optimizer("Decay of the second moment.", otherwise="0.999; adaclip 0.9")
    gamma: Annotated[float, Field(ge=0, le=1)] | None = _optimizer(
        "Adam's stability constant.", 1e-08
    )
    gamma_prime: Variance | None = _optimizer(
        "Floor of the corrected second moment.",
        otherwise="1e-08; with --phi tracked the data set's",
    )
    h1: Variance | None = _optimizer(
        "Lower bound of the estimated variance.", otherwise=PER_DATASET
    )
    h2: Variance | None = _optimizer(
        "Upper bound of the estimated variance.", otherwise=PER_DATASET
    )
    kappa: str | None = _optimizer(
        "DP-MacAdam's variance estimate.", "tracked", choices=("paper", "exact", "tracked")
    )
    phi: str | None = _optimizer(
        "What DP-MacAdamBC takes for the noise's share.", "tracked", choices=("paper", "tracked")
    )

    lr_schedule: str | None = _recipe(
        "How the learning rate goes after the warm-up.", "constant", choices=SCHEDULES
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = _recipe(
        "Steps in which the learning rate rises to --lr.", 0
    )
    weight_decay: Annotated[float, Field(ge=0, le=1000.0)] | None = _recipe(
        "Shrink weights by lr times this in every step.", 0.0
    )
    ema: Probability | None = _recipe(
        "Score and publish an average of the weights, which keeps this share of itself in a step."
    )
    augmentations: Annotated[int, Field(ge=1, le=1024)] | None = _recipe(
        "Views of each image in each step; the mean of their gradients is clipped."
    )
    augment: str | None = _recipe("How views are drawn.", otherwise=PER_DATASET, choices=AUGMENTS)

    loss: str | None = _recipe(
        "Loss of a sample; bce is for several labels per record, and only that.",
        "cross-entropy",
        choices=LOSSES,
    )
    label_smoothing: Decay | None = _recipe("Share of a label that all classes get alike.", 0.0)
    class_weights: str | None = _recipe(
        "Public factors of the losses of each class, or of each label's positives: 1,5.",
        pattern=NUMBERS,
    )

    canaries: Annotated[int, Field(ge=2, le=10**6)] | None = _audit(
        "Audit this run with N canary records; fewer than 1,000 prove little. The model is then "
        "for the audit only."
    )
    guesses: Annotated[int, Field(ge=1, le=10**6)] | None = _audit(
        "How many the attack guesses, half of them in, half out.",
        otherwise=f"a tenth of the canaries, and {FEW_GUESSES} at least",
    )

    physical_batch: Count | None = _run(
        "Samples worked on at a time.", otherwise="the network's, or the data set's"
    )
    device: str | None = _run("auto, cpu, cuda or cuda:N.", "auto", pattern=DEVICE)
    seed: Annotated[int, Field(ge=0, le=2**63)] | None = _run(
        "Repeatable draws, with no privacy against anyone who knows it.",
        otherwise="secret",
        recorded=False,
    )
    data_dir: Path | None = _run("Where data sets lie (or DPMAC_DATA_DIR).", recorded=False)

    metric: str | None = _output(
        "Metric of the test records to show, and to rank a comparison by.",
        "accuracy",
        choices=tuple(METRICS),
    )
    checkpoint_every: str | None = _output(
        "Save the state every N steps (100) or seconds (60s).",
        "60s",
        pattern=INTERVAL,
        recorded=False,
    )
    out: Path | None = _output("Run folder.", otherwise="a new one in runs/", recorded=False)
    force: StrictBool | None = _output(
        "Replace the run in --out: its files are removed before step 1.", recorded=False
    )
    json: StrictBool | None = _output("Print the report as JSON.", recorded=False)
    quiet: StrictBool | None = _output("Print nothing but errors.", recorded=False)
    debug: StrictBool | None = _output("Show tracebacks.", recorded=False)


def flag_name(name: str) -> str:
    """Return the name of a field as people type it."""
    return name.replace("_", "-")


def _completed(of: DataclassField[Any]) -> Setting:
    """Return the setting of a field, with what its annotation says."""
    setting: Setting = of.metadata["setting"]
    annotation = kind = of.type
    while not isinstance(kind, type):  # of values, if several are allowed
        annotation, kind = kind, get_args(kind)[0]
    default = False if kind is bool else setting.default
    bounds = bounds_in_words(annotation) if kind in (int, float) else ""
    return replace(setting, kind=kind, default=default, bounds=setting.bounds or bounds)


@lru_cache
def settings_of(kind: Any) -> Mapping[str, Setting]:
    """Return what is known of the fields of a class, by name."""
    return {f.name: _completed(f) for f in fields(kind)}


SETTINGS: Mapping[str, Setting] = settings_of(Settings)
DEFAULTS: Mapping[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}
#: What a run that follows no recipe has.
RECIPE_DEFAULTS: Mapping[str, Any] = {
    name: DEFAULTS[name] for name, setting in SETTINGS.items() if setting.panel == RECIPE
}
