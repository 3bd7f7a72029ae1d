"""Settings from flags and YAML: who wins, what is refused, and what is written back."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from pydantic.fields import FieldInfo

from dpmac_cli import ArrayData
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.cli.options import option
from dpmac_cli.config.flags import default_of, flag_name, help_of, is_switch, kind_of, parts
from dpmac_cli.config.named import RECIPES
from dpmac_cli.config.settings import SETTINGS, Count, Settings
from dpmac_cli.config.sources import by_flag, by_setting, given_settings, to_yaml
from dpmac_cli.errors import InputError, as_flags
from dpmac_cli.runs import resolve as resolving
from dpmac_cli.runs.resolve import Resolved
from dpmac_cli.runs.session import config_file
from tests.conftest import OPTIMIZER_NAMES
from tests.tiny_bert import write_encoder, write_network

#: A value for each setting that is not its default.
VALUES: Mapping[str, Any] = {
    "dataset": "digits",
    "model": "mlp-small",
    "calibration": "none",
    "scale": "declared",
    "threshold": "0.3",
    "fix_norm": True,
    "isolate": True,
    "features": "scatter",
    "backbone": "efficientnet-lite0",
    "backbone_size": 64,
    "backbone_flips": True,
    "pretrained": __file__,
    "train": "head",
    "lora_rank": 4,
    "test_fraction": 0.3,
    "split_seed": 4,
    "channels": "3",
    "image_size": 40,
    "levels": 4095,
    "tokens": 32,
    "classes": "cat,dog",
    "standardise": "imagenet",
    "feature_range": "-1,2.5",
    "schema": "schema.yaml",
    "unit": "[0-9]+",
    "records_per_unit": 3,
    "skip_bad": True,
    "epochs": 3,
    "steps": 7,
    "batch_size": 64,
    "sigma": 2.5,
    "metric": "auroc",
    "checkpoint_every": "7",
    "epsilon": 3.0,
    "max_epsilon": 4.0,
    "delta": 1e-6,
    "no_dp": True,
    "secure": True,
    "optimizer": "dp-adam",
    "lr": 0.02,
    "clip_norm": 0.5,
    "beta1": 0.8,
    "beta2": 0.99,
    "gamma": 1e-7,
    "gamma_prime": 1e-6,
    "h1": 1e-8,
    "h2": 1e-3,
    "kappa": "tracked",
    "sampler": "random-allocation",
    "phi": "tracked",
    "canaries": 100,
    "cover_scores": True,
    "lr_schedule": "cosine",
    "recipe": "best",
    "warmup_steps": 3,
    "weight_decay": 0.01,
    "ema": 0.99,
    "augmentations": 4,
    "augment": "flip",
    "loss": "focal",
    "label_smoothing": 0.1,
    "class_weights": "1,2,1,1,1,1,1,1,1,0.5",
    "shares": "0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.1,0.05,0.15",
    "physical_batch": 32,
    "device": "cpu",
    "seed": 5,
    "task": "language-model",
    "data_dir": Path("data"),
    "out": Path("out"),
    "force": True,
    "json": True,
    "quiet": True,
    "debug": True,
}
PICTURES, ROWS, TABLE, TEXTS = "pictures", "rows.npz", "table.csv", "texts"
#: Settings that some need beside them.
BESIDE: Mapping[str, Mapping[str, Any]] = {
    **{name: {"dataset": PICTURES} for name in ("test_fraction", "split_seed", "channels")},
    **{name: {"dataset": PICTURES} for name in ("image_size", "levels", "classes", "skip_bad")},
    "standardise": {"dataset": PICTURES, "channels": "3"},
    "feature_range": {"dataset": ROWS},
    "unit": {"dataset": PICTURES},
    "records_per_unit": {"dataset": PICTURES, "unit": "[0-9]+"},
    "schema": {"dataset": TABLE},
    "tokens": {"dataset": TEXTS, "backbone": "./encoder"},
    "task": {"dataset": TEXTS, "backbone": "./decoder", "tokens": 8},
    "force": {"out": "out"},
    "shares": {"class_weights": "balanced"},
    "augment": {"augmentations": 2},
    "threshold": {"dataset": PICTURES},
    "backbone_size": {"backbone": "efficientnet-lite1"},
    "backbone_flips": {"backbone": "efficientnet-lite1"},
    "train": {"pretrained": __file__},
    "clip_norm": {"optimizer": "dp-sgd"},
    **{name: {"optimizer": "dp-macadambc"} for name in ("gamma_prime", "phi")},
    "lora_rank": {"pretrained": __file__, "train": "lora"},
}


#: Settings that say how your own data are read, with the same values there.
def resolve(
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    earlier: tuple[TrainingEvent, ...] = (),
    **keywords: Any,
) -> Resolved:
    """Resolve settings, with the noise of the paper if a file names none: its plan is cheap."""
    given = {**(flags or {}), **keywords}
    body = "" if file is None or not file.is_file() else file.read_bytes().decode(errors="ignore")
    if not given.keys() & {"recipe", "epsilon", "sigma"} and not re.search(
        r"^(recipe|epsilon)\b", body, re.MULTILINE
    ):
        given = {"recipe": "paper", **given}
    return resolving.resolve(given, file, earlier=earlier)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


@pytest.fixture
def own_data() -> None:
    """Small datasets, and an encoder of texts, in the working folder."""
    for label, name in enumerate(("cat", "dog")):
        Path(PICTURES, name).mkdir(parents=True)
        for number in range(8):
            Image.new("L", (6, 5), 100 * label + number).save(Path(PICTURES, name, f"{number}.png"))
    np.savez(ROWS, x=np.linspace(-3, 3, 120).reshape(40, 3), y=np.arange(40) % 2)
    Path(TABLE).write_text("age,ill\n" + "30,no\n40,yes\n" * 20)
    write_encoder(Path("encoder"))
    write_network(Path("decoder"), "gpt2", causal=True)
    for label, name in enumerate(("cat", "dog")):
        Path(TEXTS, name).mkdir(parents=True)
        for number in range(8):
            Path(TEXTS, name, f"{number}.txt").write_text(f"{number} {label}")
    declared = "label: {column: ill, classes: [no, yes]}\ncolumns: {age: {range: [0, 99]}}\n"
    Path("schema.yaml").write_text(declared)


def from_file(file: Path, body: Mapping[str, Any] | str, **flags: Any) -> Resolved:
    text = body if isinstance(body, str) else yaml.safe_dump(dict(body))
    file.write_text(text, encoding="utf-8")
    return resolve(flags, file)


def errors_of(flags: Mapping[str, Any], file: Path | None = None) -> tuple[str, ...]:
    """What is wrong with the settings; empty when nothing is."""
    try:
        resolve(flags, file)
    except InputError as failure:
        return tuple(map(as_flags, failure.errors))
    return ()


def the_error(flags: Mapping[str, Any], file: Path | None = None) -> str:
    errors = errors_of(flags, file)
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize("again", ["batch-size: 64", "batch_size: 64", "batch-size: null"])
def test_a_key_given_twice_is_refused(tmp_path: Path, again: str) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(f"batch-size: 32\nlr: 1\n{again}\n")
    assert the_error({}, file) == f"{file}, line 3: {again[:10]} is given twice. Give it once."


def test_a_field_is_all_that_a_flag_needs() -> None:
    class More(Settings, frozen=True):
        patience: Count | None = None
        """Stop early. [default: never]"""

    field = More.model_fields["patience"]
    assert (help_of(field), default_of(field), kind_of(field)) == ("Stop early.", "never", int)
    (shown,) = option("patience", field).annotation.__metadata__
    assert (shown.help, shown.metavar) == ("Stop early. [default: never]", "N")
    with pytest.raises(InputError, match="In dpmac it is called --epochs"):
        More.model_validate({"num_epochs": 7})
    assert More.model_validate({"patience": "7"}).patience == 7
    least = r"--patience: Input should be greater than or equal to 1, not 0\."
    with pytest.raises(InputError, match=least) as found:
        More.model_validate({"patience": "0", "lr": "x"})
    assert len(found.value.errors) == 2


ONE_MORE_SETTING = '''
import sys

from dpmac_cli.config import settings


class Settings(settings.Settings, frozen=True):
    patience: settings.Count | None = None
    """Stop early. [default: never]"""


settings.Settings, settings.SETTINGS = Settings, Settings.model_fields
settings.GROUPS |= {"patience": settings.RECIPE}

from dpmac_cli.runs import session

metrics_line = session.metrics_line


def with_patience(plan, *of_step):  # the one place where it acts
    return {**metrics_line(plan, *of_step), "patience": plan.settings.patience}


session.metrics_line = with_patience
import dpmac_cli

short = dict(dataset="digits", model="linear", epsilon=3, epochs=2, batch_size=500)
dpmac_cli.train(**short, device="cpu", patience=7, out="run", stop=lambda: True)
'''

#: What is typed then, in one process.
TYPED = (
    ("train", "--help"),
    ("train", "--resume", "run"),
    ("train", "--config", "run/config.yaml", "--out", "again"),
    ("train", "--config", "run/config.yaml", "--patience", "9", "--out", "other"),
)
TYPE_ALL = """
import shutil
from dpmac_cli.__main__ import main

shutil.copyfile("run/config.yaml", "config.yaml")
for words in %r:
    sys.argv = ["dpmac", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


@pytest.mark.long
def test_a_field_is_all_that_a_setting_needs(tmp_path: Path) -> None:
    """Help, a keyword, config.yaml, a resume, a YAML key and a flag have it."""
    (tmp_path / "more.py").write_text(ONE_MORE_SETTING + TYPE_ALL % (TYPED,))
    line = [sys.executable, "more.py"]
    done = subprocess.run(line, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def seen(folder: str) -> list[int]:
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["patience"] for line in lines]

    assert "--patience" in done.stdout
    config = (tmp_path / "config.yaml").read_text()
    assert "patience: 7\n" in config
    assert "epsilon: 3.0\n" in config
    assert seen("run") == [7, 7, 7]
    assert seen("again") == [7, 7]
    assert seen("other") == [9, 9]


# Where values come from


def test_the_values_above_cover_every_setting() -> None:
    assert VALUES.keys() == SETTINGS.keys()


@pytest.mark.usefixtures("own_data", "uncalibrated")
def test_every_flag_is_a_key_of_the_file_and_says_the_same(file: Path) -> None:
    """With hyphens or underscores."""
    for number, name in enumerate(SETTINGS):
        field = SETTINGS[name]
        value = str(VALUES[name]) if kind_of(field) is Path else VALUES[name]
        typed = value if is_switch(field) else str(value)
        beside = BESIDE.get(name, {})
        resolved = from_file(file, {name.replace("_", "-_"[number % 2]): value, **beside})
        assert getattr(resolved.plan.settings, name) == VALUES[name], name
        if name in resolved.plan.optimizer.used():
            assert getattr(resolved.plan.optimizer, name) == VALUES[name], name
        typed_as_flag = resolve({name: typed, **beside})
        assert resolved.plan == typed_as_flag.plan, name
        assert Settings.model_validate({name: typed}).explicit == {name: VALUES[name]}


@pytest.mark.usefixtures("uncalibrated")
@pytest.mark.parametrize(
    ("body", "flags", "expected"),
    [
        ({"epsilon": 3.0}, {"sigma": "2"}, {"sigma": 2.0, "epsilon": None, "no_dp": False}),
        ({"no-dp": True}, {"sigma": "2"}, {"sigma": 2.0, "epsilon": None, "no_dp": False}),
        ({"sigma": 2.0}, {"no_dp": True}, {"sigma": None, "epsilon": None, "no_dp": True}),
        ({"max-epsilon": 2.0}, {"no_dp": True}, {"max_epsilon": None, "no_dp": True}),
        ({"steps": 7}, {"epochs": "9"}, {"epochs": 9, "steps": None}),
    ],
)
def test_a_flag_displaces_the_files_answer_to_the_same_question(
    file: Path, body: Mapping[str, Any], flags: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    config = from_file(file, body, **flags).plan
    assert {name: getattr(config.settings, name) for name in expected} == expected
    assert config.settings.epsilon is None
    assert config == resolve(flags).plan
    undone = body.keys() - flags.keys() - {"sigma"}
    assert not any(by_flag(config.recorded).get(flag_name(name)) for name in undone)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("delta", "1e-6", 1e-6),
        ("lr", "'0.01'", 0.01),
        ("epochs", "010", 10),
        ("out", "010", Path("010")),
        ("out", "2026-01-31", Path("2026-01-31")),
        ("data-dir", "no", Path("no")),
    ],
)
def test_the_file_means_what_the_flag_means(
    file: Path, name: str, written: str, value: object
) -> None:
    # YAML 1.1 would have text, text, 8, 8, a date and false.
    config = from_file(file, f"{name}: {written}\n").plan
    assert getattr(config.settings, name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("- sigma\n- 0.8\n", "is not a mapping. Write lines like 'sigma: 0.8'."),
        ("sigma", "is not a mapping. Write lines like 'sigma: 0.8'."),
        ("sigma: \x00", "is not valid YAML: unacceptable character"),
        ("sigma: 1\n---\nsigma: 2\n", "found another document"),
        ("[" * 999, "nested too deeply"),
        ("lr: " + "{a: " * 999, "nested too deeply"),
    ],
)
def test_a_file_of_another_kind_is_named(file: Path, body: str, said: str) -> None:
    file.write_text(body)
    error = the_error({}, file)
    assert error.startswith(f"--config {file} ")
    assert said in error


# What is refused


def out_of_bounds(name: str, value: object) -> bool:
    """Return whether the value itself is refused, whatever it means beside other settings."""
    return any(
        error.startswith(f"--{flag_name(name)}: Input should be")
        for error in errors_of({name: value})
    )


#: Values that would make a price wrong, written out, so that a bound moved by mistake is noticed.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "epochs": ("0", "-1", "1000000001"),
    "steps": ("0", "-1", "10000001"),
    "batch_size": ("0", "-5", "1000000001"),
    "sigma": ("0", "-0.5", "1e-300", "1e300"),
    "epsilon": ("0", "-3"),
    "max_epsilon": ("0", "-3"),
    "delta": ("0", "1", "1.5", "-1e-5"),
    "clip_norm": ("0", "-1", "1e300"),
    "canaries": ("0", "1", "1000001"),
    "test_fraction": ("1", "-0.5"),
    "records_per_unit": ("0", "1025"),
    "augmentations": ("0", "-1", "1025"),
}


def limits(field: FieldInfo) -> list[Any]:
    """Return the metadata of a field that limit a number."""
    names = ("ge", "gt", "le", "lt")
    return [part for part in parts(field) if any(hasattr(part, name) for name in names)]


def test_every_number_has_bounds() -> None:
    numbers = {name for name, field in SETTINGS.items() if kind_of(field) in (int, float)}
    bounded = {name for name, field in SETTINGS.items() if limits(field)}
    assert {*REFUSED} < numbers == bounded


def test_numbers_out_of_range_are_refused() -> None:
    accepted = [(n, v) for n, values in REFUSED.items() for v in values if not out_of_bounds(n, v)]
    assert accepted == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "many", "true"], ids=repr)
@pytest.mark.parametrize(("name", "what"), [("steps", "integer"), ("lr", "number")])
def test_what_is_no_number_is_refused(file: Path, name: str, what: str, value: str) -> None:
    file.write_text(f"beta1: 0.5\n{name}: {value}")
    error = the_error({}, file)
    assert error.startswith(f"{file}, line 2: {name}: Input should be a ")
    assert error.endswith(f"{what}, not '{value}'.")


# What comes of it


@pytest.mark.promise("said")
@pytest.mark.parametrize(
    ("flags", "rate", "per_epoch", "total"),
    [
        ({}, 256 / 60_000, 235, 1175),
        ({"batch_size": 60_000, "epochs": 2}, 1.0, 1, 2),
        ({"batch_size": 100, "physical_batch": 7}, 100 / 60_000, 600, 3000),
        ({"steps": 9}, 256 / 60_000, 235, 9),
        ({"dataset": "digits", "epochs": 2}, 128 / 1437, 12, 24),
    ],
)
def test_rate_and_steps(flags: Mapping[str, Any], rate: float, per_epoch: int, total: int) -> None:
    config = resolve(flags).plan
    assert config.event.sampling_rate == rate
    assert (config.event.steps_per_epoch, config.event.steps) == (per_epoch, total)


@pytest.mark.usefixtures("uncalibrated")
@pytest.mark.parametrize(
    "extra",
    [
        *({"optimizer": name} for name in OPTIMIZER_NAMES),
        *({"epsilon": 3.0}, {"no_dp": True}, {"steps": 9}, {"max_epsilon": 0.1 + 0.2}),
    ],
    ids=str,
)
def test_the_written_file_says_the_same_again(file: Path, extra: Mapping[str, Any]) -> None:
    flags = {"lr": 1 / 3, "h1": 1e-7 / 3, "delta": 1e-6 / 7, **extra}
    config = resolve(flags).plan
    assert from_file(file, config_file(config.recorded, config.event)).plan == config
    assert ("epsilon: 3.0\n" in file.read_text()) == ("epsilon" in extra)
    if config.private:
        assert f"# Noise multiplier sigma: {config.event.noise_multiplier!r}\n" in file.read_text()


@pytest.mark.promise("published")
def test_seed_and_places_are_never_written() -> None:
    flags = {"seed": 918273645, "data_dir": "secret-place", "out": "elsewhere", "force": True}
    text = to_yaml(resolve(flags).plan.recorded)
    written = set(yaml.safe_load(text))
    assert not written & {"seed", "data-dir", "out", "force", "json", "quiet", "debug"}
    for value in ("918273645", "secret-place", "elsewhere"):
        assert value not in text


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ({"optimizer": "dp-macadam", "clip_norm": "1"}, "--clip-norm"),
        ({"optimizer": "dp-adam", "kappa": "exact"}, "--kappa"),
        ({"optimizer": "dp-adam", "h1": "1e-9"}, "--h1"),
        ({"optimizer": "dp-sgd", "beta1": "0.5"}, "--beta1"),
        ({"optimizer": "dp-adambc", "phi": "tracked"}, "--phi"),
        ({"optimizer": "dp-adambc", "gamma": "1e-3"}, "--gamma"),
        ({"optimizer": "dp-adam", "gamma_prime": "1e-3"}, "--gamma-prime"),
    ],
)
def test_a_flag_without_effect_is_noted(flags: Mapping[str, str], idle: str) -> None:
    (note,) = resolve(flags).notes
    assert as_flags(note) == f"{idle} has no effect with {flags['optimizer']}."


@pytest.mark.promise("said")
@pytest.mark.parametrize(("dataset", "size"), [("mnist", 60_000), ("digits", 1437)])
def test_a_delta_that_lets_whole_records_out_is_noted(dataset: str, size: int) -> None:
    (note,) = resolve({"dataset": dataset, "delta": repr(1 / size)}).notes
    assert "not below 1/n" in note
    assert "smaller {delta}" in note


@pytest.mark.parametrize("kind", [list, tuple], ids=["list", "tuple"])
def test_a_text_with_commas_may_be_a_list_of_its_parts(file: Path, kind: type) -> None:
    parts: Mapping[str, tuple[object, ...]] = {
        "feature_range": (0, 1.5),
        "class_weights": (1, 15),
        "shares": (0.9, 0.1),
        "classes": ("cat", "dog"),
    }
    texts = {name: ",".join(map(str, of)) for name, of in parts.items()}
    assert Settings(**{name: kind(of) for name, of in parts.items()}).explicit == texts
    file.write_text("".join(f"{name}: [{text}]\n" for name, text in texts.items()))
    assert given_settings({}, file).explicit == texts
    with pytest.raises(InputError, match="two numbers, such as 0,1, not '0,1,2'"):
        Settings(feature_range=kind((0, 1, 2)))
    with pytest.raises(InputError, match="not a"):  # a comma within a name
        Settings(classes=kind(("cat,big", "dog")))
    with pytest.raises(InputError, match="not a"):
        Settings(optimizer=kind(("dp-sgd",)))


def test_a_recorded_setting_that_is_gone_is_named() -> None:
    with pytest.raises(InputError, match="There is no setting 'no_isolate'"):
        given_settings({}, by_setting({"dataset": "digits", "no-isolate": True}))


@pytest.mark.promise("said")
def test_the_default_of_delta_is_below_1_over_n_for_many_records() -> None:
    x = np.arange(60_000.0)[:, None]
    plan = resolving.resolve(dataset=ArrayData(x, x[:, 0] % 2, low=0, high=60_000)).plan
    assert plan.settings.delta == pytest.approx(plan.facts.train_size**-1.1)
    assert plan.settings.delta < 1e-5


@pytest.mark.promise("target")
def test_the_target_of_a_run_covers_what_was_done_before() -> None:
    before = (TrainingEvent(0.1, 2.0, 40),)
    given = {"dataset": "digits", "model": "linear", "batch_size": 100, "delta": 1e-5}
    plan = resolve(given, epsilon=8.0, steps=50, earlier=before).plan
    found = total_epsilon((*before, plan.event), 1e-5)
    assert 7.9 < found <= 8


def test_flags_take_precedence_over_a_named_recipe() -> None:
    given = given_settings({"recipe": "mnist-scatter", "epsilon": "1", "epochs": "7"})
    assert (given.epsilon, given.epochs, given.batch_size) == (1, 7, 5000)


def test_the_command_of_a_recipe_has_the_flags_that_it_needs() -> None:
    needing = {name: of for name, of in RECIPES.items() if of.with_flags}
    assert needing
    for name, of in needing.items():
        assert of.line(name) == f"dpmac {of.command} --recipe {name} {of.with_flags}"
