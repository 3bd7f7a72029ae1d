"""The registry, and that an optimizer is one file: DP-Lion, of which nothing else knows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.errors import InputError
from dpmac_cli.optim.optimizer import OPTIMIZERS, defaults_of
from dpmac_cli.studies.grid import plan

HERE = Path(__file__).parent
#: Chen et al. 2023, arXiv 2302.06675, Algorithm 2, on the private mean and without weight decay.
LION = '''
"""DP-Lion."""

from typing import TYPE_CHECKING, ClassVar

from dpmac_cli.optim.optimizer import Decay, InBall, Scale, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from dpmac_cli.dp.mechanism import PrivateMean
    from dpmac_cli.dp.moments import Moments


@register_optimizer("dp-lion", lr_on={"digits": 0.002})
class DPLion(InBall, frozen=True):
    r"""Fixed clipping norm, the sign of an interpolation.

    Chen et al. 2023 ([arXiv 2302.06675](https://arxiv.org/abs/2302.06675)). The geometry is a ball,
    and

    $$\\theta_t = \\theta_{t-1} - \\eta\\,
    \\mathrm{sign}(\\beta_1 m_{t-1} + (1-\\beta_1)\\tilde g_t),
    \\quad m_t = \\beta_2 m_{t-1} + (1-\\beta_2)\\tilde g_t.$$
    """

    keeps: ClassVar[str] = "m"

    lr: Scale = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.99

    def update(
        self, theta: "Tensor", eta: float, private: "PrivateMean", moments: "Moments"
    ) -> None:
        """Take a step of Lion."""
        c = moments.m.lerp(private.value, 1 - self.beta1)
        theta.sub_(c.sign_(), alpha=eta)
        moments.m.lerp_(private.value, 1 - self.beta2)
'''
LION_TEST = '''
"""DP-Lion against Chen et al. 2023, Algorithm 2."""

import numpy as np
import pytest
import torch

from tests.helpers import HYPER
from tests.optim.judge import assert_follows_paper, assert_is_torchs_own, cases, private_means


def paper(theta, gradients, noise, p):
    m = np.zeros_like(theta)
    for g_tilde in private_means(theta, gradients, noise, p.clip_norm):
        theta -= p.lr * np.sign(p.beta1 * m + (1 - p.beta1) * g_tilde)
        m = p.beta2 * m + (1 - p.beta2) * g_tilde
        yield theta


class Lion(torch.optim.Optimizer):
    """Torch has none."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.sub_(HYPER.lr * (HYPER.beta1 * m + (1 - HYPER.beta1) * p.grad).sign())
            m.mul_(HYPER.beta2).add_((1 - HYPER.beta2) * p.grad)


@pytest.mark.privacy
@cases()
def test_follows_the_paper(hyper, dtype):
    assert_follows_paper("dp-lion", paper, hyper, dtype)


def test_without_noise_and_clipping_is_the_authors():
    assert_is_torchs_own("dp-lion", Lion)
'''
#: Tests over the registry that an optimizer of the package must pass, too.
OVER_THE_REGISTRY = (
    "tests/dp/test_optimizers.py",
    "tests/test_report.py::test_hyperparameters_are_those_with_an_effect",
    "tests/cli/test_commands.py::test_names_are_offered",
)


def started(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the file of DP-Lion, which is registered before dpmac reads its settings."""
    path = os.pathsep.join([str(cwd), str(HERE.parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def lion(tmp_path: Path) -> Path:
    """A folder with the one file of DP-Lion, and its one test."""
    (tmp_path / "dp_lion.py").write_text(LION)
    (tmp_path / "test_dp_lion.py").write_text(LION_TEST)
    return tmp_path


def dpmac(folder: Path, *arguments: str) -> str:
    """The output of a command line to which DP-Lion is known."""
    code = "import dp_lion; from dpmac_cli.__main__ import main; main()"
    done = started("-c", code, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_seventh_optimizer_is_in_help_training_report_and_comparison(lion: Path) -> None:
    assert "dp-lion" in dpmac(lion, "train", "--help")
    run = ("--dataset", "digits", "--sigma", "1", "--epochs", "4", "--seed", "1", "--quiet")
    dpmac(lion, "train", *run, "--optimizer", "dp-lion", "--out", "run")
    report = json.loads((lion / "run" / "report.json").read_text())
    expected = {"lr": 0.002, "clip_norm": 1.0, "beta1": 0.9, "beta2": 0.99}
    assert report["optimizer"] == "dp-lion"
    assert expected.items() <= report["hyperparameters"].items()
    assert report["hyperparameters"].keys() == {*expected, "steps", "epochs", "batch_size"}
    assert report["test"]["accuracy"] > 0.7
    both = ("--optimizers", "dp-sgd,dp-lion", "--sigma", "2", "--seeds", "1", "--epochs", "1")
    shown = dpmac(lion, "compare", "--dataset", "digits", *both, "--out", "study", "--jobs", "1")
    assert "dp-lion" in shown


@pytest.mark.long
def test_a_seventh_optimizer_passes_the_tests_of_all(lion: Path) -> None:
    """Its own, and those over the registry, privacy tests among them; it is not the paper's."""
    tests = [str(HERE.parents[1] / name) for name in OVER_THE_REGISTRY]
    options = ("-m", "pytest", "-p", "dp_lion", "-n0")
    own = started(*options, "test_dp_lion.py", cwd=lion)
    assert "3 passed" in own.stdout, own.stdout + own.stderr
    chosen = "lion or one_seed or (completion and optimizer)"
    done = started(*options, "-v", "--long", "-k", chosen, *tests, cwd=lion)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    passed = [line for line in done.stdout.splitlines() if "dp-lion" in line and "PASSED" in line]
    for name in ("an_empty_batch_is_a_step_of_noise", "through_the_private_mean", "not_finite"):
        assert any(name in line for line in passed), name
    for name in ("one_seed", "names_are_offered"):  # they look at all of them at once
        assert name in done.stdout


def test_every_optimizer_has_one_file_and_one_test() -> None:
    for name, kind in OPTIMIZERS.items():
        file = name.replace("-", "_")
        assert kind.__module__ == f"dpmac_cli.optim.{file}"
        assert (HERE / f"test_{file}.py").exists(), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_in_the_settings_and_refuses_what_is_beyond_its_limits(
    name: str,
) -> None:
    kind = OPTIMIZERS[name]
    assert kind.model_fields.keys() <= SETTINGS.keys()
    valid = {field: 0.5 for field in kind.model_fields if field not in ("kappa", "phi")}
    assert kind(**valid).with_lr(0.25).lr == 0.25
    for field in valid:
        with pytest.raises(ValidationError):
            kind(**{**valid, field: -1.0})


def test_defaults_are_listed_the_most_common_first() -> None:
    assert defaults_of("beta1").startswith("0.9; adaclip 0.99")
    assert defaults_of("beta2").startswith("0.999; adaclip 0.9")


def test_a_comparison_is_of_the_papers_optimizers_unless_others_are_named() -> None:
    def compared(**flags: str) -> list[str]:
        study = plan({"dataset": "digits", "sigma": "1", "seeds": "1", "steps": "1", **flags}, None)
        return [run.plan.optimizer.name for run in study.runs]

    paper = [name for name, kind in OPTIMIZERS.items() if kind.paper]
    assert compared() == compared(optimizers="paper") == paper
    assert compared(optimizers="all") == list(OPTIMIZERS)
    assert compared(optimizers="dp-adam,paper")[0] == "dp-adam"
    with pytest.raises(InputError, match="Known: paper, all, dp-sgd, adaclip"):
        compared(optimizers="dp-lion")
