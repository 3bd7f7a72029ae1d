"""What ``from dpmac_cli import`` offers, and the examples of docs/library.md."""

import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import dpmac_cli
from dpmac_cli import (
    Evaluated,
    InputError,
    ModelError,
    Moments,
    Optimizer,
    PrivateMean,
    Settings,
    TrainingEvent,
    finish,
    load_model,
    make_private,
    plan,
    register_optimizer,
    resolve,
    resume,
    score,
    train,
)
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.dp.geometry import Ball, Geometry
from dpmac_cli.errors import named, named_as_flags
from dpmac_cli.runs.loop import fit
from dpmac_cli.runs.trainer import make_trainer
from tests.conftest import every_optimizer
from tests.digits_runs import SIGMA, digits_config, dpmac

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


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="trian"):
        dpmac_cli.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.long
def test_prices_and_settings_load_no_torch() -> None:
    script = (
        "import sys\n"
        "from dpmac_cli import total_epsilon, resolve, plan\n"
        "config = resolve(dataset='digits', sigma=6, steps=3).plan\n"
        "assert total_epsilon((config.privacy.event,), 1e-5) > 0\n"
        "slow = ('torch', 'torchvision', 'sklearn', 'matplotlib', 'typer')\n"
        "print(*(m for m in slow if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


# Settings as keywords


@pytest.fixture(autouse=True)
def _messages_of_a_command() -> None:
    """Not here: these messages are those of a program."""


def test_settings_are_given_by_name_in_their_own_types() -> None:
    config = resolve(dataset="digits", sigma=2, lr=0.5, optimizer="dp-sgd", out=Path("x")).plan
    assert config == resolve({"dataset": "digits", "sigma": "2", "lr": "0.5"}, None,
                             optimizer="dp-sgd", out="x").plan  # fmt: skip
    assert (config.privacy.sigma, config.privacy.steps, config.privacy.batch_size) == (
        2.0,
        20 * 12,
        128,
    )


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InputError) as failure:
        resolve(dataset="digits", sigm=2, lr=-1, beta1="x")
    assert "There is no setting 'sigm'. Did you mean sigma?" in failure.value.errors
    assert len(failure.value.errors) == 3


def test_settings_may_be_a_model() -> None:
    settings = Settings(dataset="digits", sigma=2, kappa="exact", out=Path("x"))
    named = resolve(dataset="digits", sigma=2, kappa="exact", out="x")
    assert resolve(settings).plan == named.plan
    assert resolve(settings, sigma=3).plan.privacy.sigma == 3
    assert settings.explicit == {
        "dataset": "digits",
        "sigma": 2,
        "kappa": "exact",
        "out": Path("x"),
    }
    assert "lr" not in settings.explicit
    assert (named.settings.lr, settings.loss) == (0.005, "cross-entropy")
    with pytest.raises(ValidationError, match="frozen"):
        settings.sigma = 3  # type: ignore[misc]


def test_a_model_tells_every_fault_at_once() -> None:
    with pytest.raises(InputError) as failure:
        Settings(sigma=-1, optimizer="adam", epochs=2.5)  # type: ignore[arg-type]
    assert [error.partition(" ")[0] for error in failure.value.errors] == [
        "sigma",
        "optimizer:",
        "epochs:",
    ]


def test_messages_name_settings_as_they_were_given() -> None:
    """Keywords in a program, which the command line in the same process does not change."""
    with pytest.raises(InputError) as failure:
        resolve(dataset="digits", optimizer="dp-macadam", batch_size=1438, h1=3, h2=2)
    assert failure.value.errors == (
        "h1 (3) must not be above h2 (2).",
        "batch_size (1438) must not be above the size of digits, 1437.",
    )
    wrong = ("--optimizer", "dp-macadam", "--batch-size", "1438", "--h1", "3", "--h2", "2")
    said = dpmac("train", "--dataset", "digits", *wrong).stderr
    assert "error: --h1 (3) must not be above --h2 (2).\n" in said
    assert "error: --batch-size (1438) must not be" in said
    (note,) = resolve(dataset="digits", steps=3, sigma=6, delta=0.01).notes
    assert note.endswith("Use a smaller delta.")
    with pytest.raises(InputError, match=r"^sigma must be at least "):
        Settings(sigma=-1)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("To train without privacy use --no-dp.", "To train without privacy use no_dp."),
        ("Add --unit 'id([0-9]+)' or --steps N.", "Add unit='id([0-9]+)' or steps=N."),
        ("--epochs 5 is 60 steps at --batch-size 8.", "epochs=5 is 60 steps at batch_size=8."),
        ("--loss mse: no such file: a--b.c", "loss mse: no such file: a--b.c"),
        *[(text, text) for text in ("Use dpmac train --fork.", "pip install --user x (or not).")],
        (
            "x (dpmac train --fork v0.2/a --steps N) --lr",
            "x (dpmac train --fork v0.2/a --steps N) lr",
        ),
        ("Type: dpmac eval a.b --model M. Then --lr.", "Type: dpmac eval a.b --model M. Then lr."),
    ],
)
def test_flags_become_keywords_except_in_commands(written: str, shown: str) -> None:
    assert named(written) == named(shown) == shown
    with named_as_flags():
        assert named(written) == written


@pytest.mark.long
def test_mypy_finds_a_misspelt_setting_in_a_users_program() -> None:
    program = """from pathlib import Path
from torch import nn
from dpmac_cli import Settings, fork, make_private, resolve, resume

resolve(Settings(dataset="digits", sigma=2), lr=0.5, out=Path("x"))
make_private(nn.Linear(64, 10), "digits", Settings(epochs=2), sigma=2.0)
fork("run", epochs=20, out="other")
resume("run", device="cpu")
Settings(sigam=2)
resolve().plan.privacy.sigam
resolve().plan.sigma
"""
    Path("program.py").write_text(program)
    command = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "program.py")
    # mypy does not look where an editable install points.
    env = {**os.environ, "MYPYPATH": str(Path(dpmac_cli.__file__).parents[1])}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    wrong = [line for line in found.splitlines() if re.match(r"program.py:\d+: error: ", line)]
    assert [int(line.split(":")[1]) for line in wrong] == [*range(9, 12)], found


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
        resolve().plan.privacy.sigam  # type: ignore[attr-defined]  # noqa: B018


def test_without_a_number_an_event_is_of_the_whole_run() -> None:
    config = digits_config(steps=7)
    assert config.privacy.event == TrainingEvent(128 / 1437, SIGMA, 7, "poisson", 12)
    assert config.privacy.event_of(3).steps == 3


@pytest.mark.privacy
def test_a_number_of_steps_that_is_none_has_no_price() -> None:
    with pytest.raises(InputError, match="steps must be at least 0, not -3"):
        digits_config().privacy.event_of(-3)
    with pytest.raises(InputError, match="steps must be at least 0, not -3"):
        TrainingEvent(0.1, 1.0, -3)


@pytest.mark.privacy
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


# A network and a loop of one's own


@every_optimizer
def test_a_network_at_hand_is_trained_in_place(name: str) -> None:
    network = net()
    before = [p.clone() for p in network.parameters()]
    trainer = make_trainer(digits_config(optimizer=name, steps=3, seed=1), model=network)
    *_, last = fit(trainer)
    assert isinstance(last, Evaluated)
    assert (last.step, trainer.state.step) == (3, 3)
    assert trainer.model is network
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert trainer.evaluate().accuracy == last.result.accuracy


@pytest.mark.privacy
def test_a_network_at_hand_that_mixes_samples_is_refused() -> None:
    mixing = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    with pytest.raises(ModelError, match="BatchNorm1d, which mixes the samples"):
        make_trainer(digits_config(), model=mixing)


@pytest.mark.parametrize("thing", [nn.Linear, net, "mlp"], ids=["a class", "a factory", "a name"])
def test_what_is_no_network_is_refused(thing: Any) -> None:
    with pytest.raises(ModelError, match=r"is not a torch module. Pass a network instance"):
        make_trainer(digits_config(), model=thing)


@pytest.mark.privacy
@pytest.mark.parametrize("kept", [1436, 700])
def test_data_of_another_size_than_is_priced_is_refused(kept: int) -> None:
    """Fewer records at the same expected batch are sampled at a higher rate."""
    whole = load_data("digits", Path(), torch.device("cpu"))
    fewer = replace(whole, train=Split(whole.train.images[:kept], whole.train.labels[:kept]))
    said = f"data has {kept:,} training and 360 test records or units, but epsilon was"
    with pytest.raises(InputError, match=said):
        make_trainer(digits_config(), data=fewer)
    with pytest.raises(InputError, match=said):
        make_trainer(digits_config(), data=fewer, model=net())
    with pytest.raises(InputError, match=said):
        finish(train(digits_config(out="run"), data=fewer))
    assert not Path("run").exists()


@pytest.mark.privacy
def test_noise_that_is_yet_to_be_worked_out_is_added() -> None:
    """A target for epsilon is no sigma of 0."""
    config = resolve(
        dataset="digits", model="linear", recipe="paper", epsilon=0.1, steps=3, device="cpu"
    ).plan
    trainer = make_trainer(config, model=net())
    assert trainer.mechanism.noise_multiplier == config.privacy.sigma > 4
    assert total_epsilon((config.privacy.event,), config.privacy.delta) <= 0.1


def test_a_frozen_part_is_for_networks_that_are_named() -> None:
    with pytest.raises(InputError, match="for a network that dpmac builds: leave them"):
        make_trainer(digits_config(features="scatter"), model=net())


def test_an_optimizer_of_ones_own_is_registered_and_moves_theta() -> None:
    told: list[tuple[float, float, int]] = []

    @register_optimizer("halved", lr_on={"digits": 0.25})
    class Halved(Optimizer, frozen=True):
        """Half a step."""

        lr: float = 1.0
        clip_norm: float

        def geometry(self) -> Geometry:
            return Ball(self.clip_norm)

        def update(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
            told.append((eta, private.noise_ratio, moments.step))
            theta.sub_(private.value, alpha=eta / 2)

    ours = make_trainer(digits_config(optimizer="halved", seed=1))
    double = make_trainer(digits_config(optimizer="dp-sgd", seed=1, lr=0.125))
    for _ in range(3):
        ours.step()
        double.step()
    assert torch.equal(ours.state.theta, double.state.theta)
    assert told == [(0.25, SIGMA / 128, step) for step in (1, 2, 3)]


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: score("nowhere"),
        lambda: load_model("nowhere"),
        lambda: finish(resume("nowhere")),
        lambda: plan({}, "nowhere.yaml", "study"),
        lambda: resolve(dataset="digits", batch_size=12.5),
    ],
    ids=["score", "load_model", "resume", "plan", "resolve"],
)
def test_paths_may_be_text_and_what_is_wrong_is_told(call: Callable[[], object]) -> None:
    with pytest.raises(InputError) as failure:
        call()
    assert "nowhere" in str(failure.value) or "not a whole number." in str(failure.value)
    assert "Did you mean" not in str(failure.value)


def test_text_leads_to_a_run_as_a_path_does() -> None:
    where = str(finish(train(digits_config(out="run"))).folder)
    assert score(where).result.accuracy == score(Path(where)).result.accuracy
    assert load_model(where).path == load_model(Path(where)).path
    assert plan({"dataset": "digits"}, None, "study").runs[0].folder.parent == Path("study")
