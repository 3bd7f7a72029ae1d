"""What ``from dpmac_cli import`` offers, and the examples of docs/library.md."""

import inspect
import logging
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.utils.data import TensorDataset

import dpmac_cli
from dpmac_cli import (
    ArrayData,
    InputError,
    Poisson,
    PrivateStep,
    Settings,
    TrainingEvent,
    clipped_grad,
    make_private,
)
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.config.flags import is_switch
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.dp.clipping.batches import Batch
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError, as_flags, as_keywords
from dpmac_cli.models.dataset import Split
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import digits_config, run_trainer, train_digits
from tests.helpers import load_data

SOURCE = Path(dpmac_cli.__file__)
DOCS = SOURCE.parent.parent / "docs"
PAGE = DOCS / "library.md"
#: What is printed whatever is drawn.
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


# The names


@pytest.mark.parametrize("name", dpmac_cli.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(dpmac_cli, name)
    assert name in dir(dpmac_cli)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


# Settings as keywords


@pytest.fixture(autouse=True)
def _messages_of_a_command() -> None:
    """Not here: these messages are those of a program."""


@pytest.mark.parametrize(
    ("written", "typed", "called"),
    [
        ("Use {no_dp}.", "Use --no-dp.", "Use no_dp."),
        ("Or add {force=True}.", "Or add --force.", "Or add force=True."),
        ("{epochs=}5 is {steps}.", "--epochs 5 is --steps.", "epochs=5 is steps."),
        ("Type: dpmac eval --json {A} {}.", *["Type: dpmac eval --json {A} {}."] * 2),
    ],
)
def test_messages_name_settings_as_they_are_given(written: str, typed: str, called: str) -> None:
    error = InputError(written)
    assert error.errors == (written,)
    assert as_flags(written) == typed
    assert str(error) == as_keywords(written) == called


def test_messages_that_say_to_set_a_switch_name_its_value() -> None:
    switches = "|".join(name for name, field in SETTINGS.items() if is_switch(field))
    told = re.compile(rf"(?:[Aa]dd|with)[\s\"]+\{{+(?:{switches})\}}+")
    for file in SOURCE.parent.rglob("*.py"):
        assert not told.findall(file.read_text()), file


def test_a_folder_that_is_taken_is_refused_before_the_training(tmp_path: Path) -> None:
    train_digits(out=tmp_path / "run", steps=1)
    with pytest.raises(InputError, match=r"already contains a run.* or add force=True to replace"):
        make_private(net(), "digits", out=tmp_path / "run", sigma=6, steps=2)
    private = make_private(net(), "digits", out=tmp_path / "run", force=True, sigma=6, steps=2)
    private.step()
    assert private.publish().folder == tmp_path / "run"


def test_batch_norm_is_replaced_where_a_message_offers_it() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    batch = (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    records = TensorDataset(*batch)
    sampling = Poisson(n=6, batch_size=3)
    with pytest.raises(ModelError, match=r"or add fix_norm=True to replace it\.$"):
        PrivateStep(normed(), loss, sampling=sampling, sigma=2, steps=1).loader(records)
    step = PrivateStep(normed(), loss, sampling=sampling, sigma=2, steps=1, fix_norm=True)
    for drawn in step.loader(records):
        step(drawn)
    assert step.taken == 1
    assert type(step.model.get_submodule("1")) is nn.GroupNorm
    with pytest.raises(ModelError, match=r"or add fix_norm=True to replace it\.$"):
        clipped_grad(normed(), loss, ball(1.0), batch_size=6)(batch)
    assert clipped_grad(normed(), loss, ball(1.0), batch_size=6, fix_norm=True)(batch).any()


def test_a_misspelt_setting_is_refused() -> None:
    """By mypy, too, as a keyword of ``Settings``: unused ``type: ignore`` are errors."""
    for call in (
        lambda: Settings(sigam=2),  # type: ignore[call-arg]
        lambda: resolve(sigam=2),
        lambda: make_private(net(), "digits", sigam=2),
    ):
        with pytest.raises(InputError, match=r"There is no setting 'sigam'\. Did you mean sigma"):
            call()
    with pytest.raises(AttributeError):
        resolve().plan.event.sigam  # type: ignore[attr-defined]  # noqa: B018


def test_what_resolve_returns_can_be_trained(tmp_path: Path) -> None:
    resolved = resolve(dataset="digits", sigma=2, steps=1, out=tmp_path / "run")
    assert finish(train_plan(resolved)).state == "finished"


@pytest.mark.promise("facts")
def test_a_number_of_steps_that_is_none_has_no_price() -> None:
    with pytest.raises(InputError, match="steps must be at least 0, not -3"):
        digits_config().event.first(-3)
    with pytest.raises(InputError, match="steps must be at least 0, not -3"):
        TrainingEvent(0.1, 1.0, -3)


@pytest.mark.promise("facts")
@pytest.mark.parametrize(
    "odd",
    [
        {"sampling_rate": -0.5},
        {"sampling_rate": 1.5},
        {"sampling_rate": math.nan},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"steps": 2.5},
        {"steps": math.nan},
        {"steps_per_epoch": 0},
        {"steps_per_epoch": -10},
        {"sampler": "shuffled"},
        {"records": "others"},  # would not be added to those on training records
    ],
    ids=str,
)
def test_an_event_that_cannot_have_happened_has_no_price(odd: dict[str, Any]) -> None:
    event: dict[str, Any] = {"sampling_rate": 0.1, "noise_multiplier": 1.0, "steps": 20, **odd}
    [name] = odd
    with pytest.raises(InputError, match=f"^{name} must be"):
        TrainingEvent(**event)


@pytest.mark.promise("facts")
def test_plans_that_are_sent_to_other_processes_contain_no_records() -> None:
    x = np.zeros((2000, 30), np.float32)
    records = ArrayData(x=x, y=np.arange(2000) % 2, classes=["a", "b"], low=0, high=1)
    found = resolve(dataset=records, sigma=1)
    assert found.data is not None
    pickled = pickle.dumps(found.plan)
    assert len(pickled) < len(pickle.dumps(found.data))
    copy = pickle.loads(pickled)
    assert found.plan.settings.dataset is records
    assert copy.settings.dataset == "<arrays>"
    assert copy.facts == found.plan.facts


def test_costs_by_rdp_leave_the_loggers_of_the_program_alone() -> None:
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        total_epsilon((TrainingEvent(0.01, 1.1, 17, "poisson", 100),), 1e-5, "rdp")
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


# A custom network and training loop


@pytest.mark.parametrize("thing", [nn.Linear, net, "mlp"], ids=["a class", "a factory", "a name"])
def test_what_is_no_network_is_refused(thing: Any) -> None:
    with pytest.raises(ModelError, match=r"is not a torch module. Pass a network instance"):
        run_trainer(digits_config(), model=thing)


@pytest.mark.promise("facts")
@pytest.mark.parametrize("kept", [1436, 700])
def test_data_of_another_size_than_is_priced_is_refused(kept: int) -> None:
    """Fewer records at the same expected batch are sampled at a higher rate."""
    whole = load_data("digits", Path(), torch.device("cpu"))
    fewer = replace(whole, train=Split(whole.train.images[:kept], whole.train.labels[:kept]))
    said = f"data has {kept:,} training and 360 test records or units, but epsilon was"
    with pytest.raises(InputError, match=said):
        run_trainer(digits_config(), data=fewer)
    with pytest.raises(InputError, match=said):
        run_trainer(digits_config(), data=fewer, model=net())
    with pytest.raises(InputError, match=said):
        finish(train_plan(digits_config(out="run"), data=fewer))
    assert not Path("run").exists()


@pytest.mark.promise("facts")
def test_noise_that_is_yet_to_be_worked_out_is_added() -> None:
    """A target for epsilon is no sigma of 0."""
    config = resolve(
        dataset="digits", model="linear", recipe="paper", epsilon=0.1, steps=3, device="cpu"
    ).plan
    trainer = run_trainer(config, model=net())
    assert trainer.mechanism.noise_multiplier == config.event.noise_multiplier > 4
    assert total_epsilon((config.event,), config.settings.delta) <= 0.1


# The page


@pytest.mark.long
def test_the_examples_of_steps_on_your_own_batches_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "notebook"}
    for block in BLOCK.findall((DOCS / "own-loop.md").read_text()):
        exec(compile(block, "own-loop.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Poisson-sampled" in printed
    assert "Muon" in printed


@pytest.mark.long
def test_the_example_of_weights_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With weights, a class that 8% of the records have is found; no weight is cut."""
    [block] = BLOCK.findall((DOCS / "weights.md").read_text())
    exec(compile(block, "weights.md", "exec"), {"__name__": "notebook"})
    balanced, cut = capsys.readouterr().out.split()
    assert float(balanced) > 0.8
    assert cut == "()"


@pytest.mark.long
@pytest.mark.usefixtures("studies_here")
def test_the_examples_of_the_page_run_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, without a database
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) > 6
    names: dict[str, object] = {"__name__": "notebook"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"library.md, example {number}", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    trained = [line.split() for line in printed if line.startswith("dp-")][:2]
    assert [name for name, _, _ in trained] == ["dp-adam", "dp-macadam"]
    assert {epsilon for _, epsilon, _ in trained} == {"1.184"}
    assert all(0.6 < float(accuracy) < 1 for _, _, accuracy in trained)
    shown = [line for text in SHOWN.findall(PAGE.read_text()) for line in text.splitlines()]
    assert len(shown) == 5
    assert set(shown) <= set(printed)
    assert Path("training.png").stat().st_size > 10_000
    [logged] = Path("mlruns").glob("*/*/metrics/accuracy")
    assert len(logged.read_text().splitlines()) == 15


def test_a_misspelt_keyword_of_arrays_is_refused() -> None:
    """Classes that are not declared are taken from the records, so a typo would publish more."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'clases'"):
        ArrayData([[0.5]], [0], low=0, high=1, clases=["a", "b"])  # type: ignore[call-arg]


@pytest.mark.parametrize("settings", ["digits", torch.optim.Adam])
def test_settings_of_another_kind_are_refused(settings: Any) -> None:
    with pytest.raises(InputError, match="Give them as keywords"):
        resolve(settings)


@pytest.mark.long
def test_the_examples_of_training_across_hospitals_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two silos of ten rounds, each with epsilon 3; then two trainings that share an account."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    for block in BLOCK.findall((DOCS / "federation.md").read_text()):
        exec(compile(block, "federation.md", "exec"), names)
    printed = capsys.readouterr().out
    assert float(printed.split()[1]) > 0.6
    assert printed.count("| 30 (0) | 3 | 1e-05 |") == 2
    assert "at most the sum, epsilon 6 and delta 2e-05" in printed
    assert "(4, 1e-05)-differential privacy" in printed
