"""An optimizer is one file: DP-Lion, of which nothing else knows; and so is a task."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model
from torch import Tensor

from dpmac_cli import InputError, Optimizer, register_optimizer
from dpmac_cli.dp.mechanism import PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import report_of

ROOT = Path(__file__).parents[1]
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


def started(*command: str) -> str:
    """Run Python with the file of DP-Lion, which is registered before dpmac reads its settings."""
    path = os.pathsep.join([os.getcwd(), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *command], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


def register_own(*, clips: str = "ball", **fields: float) -> None:
    """Register an optimizer of these fields, with a step of SGD."""

    class Own(Optimizer, frozen=True):
        """An optimizer of a program."""

        def update(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
            theta.sub_(private.value, alpha=eta)

    kind = create_model("Own", __base__=Own, **{n: (float, v) for n, v in fields.items()})  # type: ignore[call-overload]
    kind.clips = clips
    register_optimizer("own")(kind)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"lr": 1.0, "clip_norm": 1.0, "betta1": 0.9}, "has the field betta1, .* mean beta1"),
        ({"lr": 1.0}, "clips to 'ball', which needs clip_norm. Declare it"),
        ({"clip_norm": 1.0}, "declare a default of the field"),
        ({"lr": 1.0, "clips": "bal"}, "clips to 'bal'. Set clips to one of ball, adaclip"),
    ],
    ids=["unknown field", "no norm", "no rate", "no region"],
)
def test_an_optimizer_that_cannot_be_set_is_refused_with_the_remedy(
    declared: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", OPTIMIZERS["dp-sgd"])  # removed at the end
    register_own(**declared)
    with pytest.raises(InputError, match=f"own .*{said}"):
        list(train_plan(resolve(dataset="digits", optimizer="own", sigma=2, steps=1)))
    assert os.listdir() == []


@pytest.mark.long
def test_a_seventh_optimizer_is_in_help_training_report_and_comparison() -> None:
    Path("dp_lion.py").write_text(LION)
    shared = "--dataset digits --seed 1 --quiet --optimizer dp-lion"
    lines = (
        "train --help",
        f"train {shared} --sigma 1 --epochs 4 --out run",
        "compare --dataset digits --optimizers dp-sgd,dp-lion --sigma 2 --seeds 1 --epochs 1 "
        "--out study",
    )
    program = (
        "import shlex, dp_lion\nfrom typer.testing import CliRunner\n"
        "from dpmac_cli.cli.app import app\n"
        f"for line in {lines!r}:\n"
        "    done = CliRunner().invoke(app, shlex.split(line))\n"
        "    assert done.exit_code == 0, done.output\n"
        "    print(line, 'dp-lion' in done.stdout)"
    )
    said = started("-c", program).splitlines()
    assert [line.rpartition(" ")[2] for line in said] == ["True", "False", "True"]
    report = report_of("run")
    expected = {"lr": 0.002, "clip_norm": 1.0, "beta1": 0.9, "beta2": 0.99}
    assert report["settings"]["optimizer"] == "dp-lion"
    assert expected.items() <= report["settings"].items()
    assert report["scores"]["accuracy"]["value"] > 0.7


@pytest.mark.promise("mean")
@pytest.mark.long
def test_a_seventh_optimizer_passes_the_privacy_tests_of_all() -> None:
    Path("dp_lion.py").write_text(LION)
    options = ("-p", "dp_lion", "-n0", "-v", "--long", "-k", "dp-lion and not settings")
    said = started("-m", "pytest", *options, str(ROOT / "tests/test_optimizers.py"))
    passed = [line for line in said.splitlines() if "dp-lion" in line and "PASSED" in line]
    for name in ("an_empty_batch_is_a_step_of_noise", "not_finite", "restored_state"):
        assert any(name in line for line in passed), name


@pytest.mark.long
def test_a_task_of_your_own_is_trained_scored_and_predicted() -> None:
    """The example of docs/own-task.md, which nothing else knows."""
    page = (ROOT / "docs/own-task.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = (
        "\nprint(run.score(grades).metric('steps-off'))\n"
        "print(run.predict(np.array([[0.1, 0, 0, 0], [0.9, 1, 1, 1]])).predicted)\n"
        "from typer.testing import CliRunner\n"
        "from dpmac_cli.cli.app import app\n"
        "print('ordinal' in CliRunner().invoke(app, ['train', '--help']).stdout)"
    )
    trained, scored, predicted, known = started("-c", example + program).splitlines()[-4:]
    assert trained == f"{{'kind': 'ordinal'}} {scored}"
    assert float(scored) < 0.2
    assert predicted == "['mild', 'severe']"
    assert known == "True"
