"""Private training of an existing network in a Python program."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import BudgetError, InputError, make_private, total_epsilon
from dpmac_cli.errors import ModelError
from dpmac_cli.optim import OPTIMIZERS, register_optimizer
from dpmac_cli.optim.dp_sgd import DPSGD
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.training.chunks import ChunkedSum
from tests.digits_runs import digits_network as network
from tests.digits_runs import train_digits, weights
from tests.helpers import equal_keys
from tests.kinks import largest_move
from tests.tiers import rest_long

SETTINGS: dict[str, Any] = {"sigma": 6, "steps": 4, "batch_size": 128, "device": "cpu"}


@pytest.mark.promise("failed")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_costs_what_it_took_and_no_step_more(optimizer: str, tmp_path: Path) -> None:
    private = make_private(network(), "digits", optimizer=optimizer, **SETTINGS)
    assert (len(private), private.epsilon) == (4, 0.0)
    before = private.evaluate().loss
    for step in private:
        event = resolve(SETTINGS, dataset="digits").plan.event.first(step)
        assert private.epsilon == total_epsilon((event,), private.plan.settings.delta)
    assert step == 4
    assert private.evaluate().loss != before
    kept = [p.clone() for p in private.model.parameters()]
    with pytest.raises(BudgetError, match="All 4 steps have been taken"):
        private.step()
    assert all(map(torch.equal, kept, private.model.parameters()))
    report = private.publish(tmp_path / "out").report
    assert report["epsilon"] == private.epsilon
    assert report["settings"]["optimizer"] == optimizer
    assert report["network"]["name"].endswith(":Sequential")
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, private.model.state_dict()[name])


SAME = """
import torch

def make(shape, classes):
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)
"""


def test_the_loop_is_the_same_run_as_the_command(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SAME)
    train_digits(model=f"{tmp_path}/net.py:make", out=tmp_path / "run", seed=1, **SETTINGS)
    with equal_keys(1):
        private = make_private(network(), "digits", **SETTINGS)
    list(private)
    ours = private.model.state_dict()
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(tensor, ours[name])


COUNTING = """
import torch

class Counting(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.last = torch.nn.Linear(64, classes)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        if not self.training:
            self.seen.data.add_(x.flatten(1).sum(0))
        return self.last(x.flatten(1))
"""


@pytest.mark.promise("validated")
def test_what_a_network_keeps_while_it_is_scored_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(COUNTING)
    made: dict[str, Any] = {}
    exec(COUNTING, made)
    private = make_private(made["Counting"]((1, 8, 8), 10), "digits", **SETTINGS)
    with pytest.raises(ModelError, match="changed its seen during training"):
        private.publish(tmp_path / "out")
    with pytest.raises(ModelError, match="changed its seen during training"):
        train_digits(model=f"{tmp_path}/net.py:Counting", out=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run" / "report.json").exists()


def test_a_loop_that_stops_early_publishes_what_it_spent(tmp_path: Path) -> None:
    private = make_private(network(), "digits", **SETTINGS)
    list(islice(private, 2))
    report = private.publish(tmp_path / "out").report
    assert report["network"]["steps"] == 2
    [event] = report["events"]
    assert event["steps"] == 2
    with pytest.raises(InputError, match="already contains a run"):
        private.publish(tmp_path / "out")
    private.step()
    again = private.publish(tmp_path / "out", force=True).report
    assert again["epsilon"] > report["epsilon"]


@pytest.mark.promise("failed")
def test_a_step_that_fails_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = make_private(network(), "digits", **{**SETTINGS, "steps": 2})
    private.step()
    once = private.epsilon
    monkeypatch.setattr(private._step, "_draw", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        private.step()
    assert private.epsilon > once
    with pytest.raises(BudgetError, match="All 2 steps"):
        private.step()
    report = private.publish(tmp_path / "out").report
    assert report["epsilon"] == private.epsilon


@pytest.mark.promise("noise")
def test_no_program_knows_what_dropout_draws() -> None:
    """It is a function of the keys of the training alone."""
    found = []
    for seed in (1, 2):
        with equal_keys():
            private = make_private(nn.Sequential(network(), nn.Dropout()), "digits", **SETTINGS)
        torch.manual_seed(seed)
        private.step()
        found.append(torch.cat([p.detach().flatten() for p in private.model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.promise("mean")
def test_an_optimizer_sees_no_sum_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block of the sum has no noise yet: the memory of a private mean is its own."""
    monkeypatch.setattr("dpmac_cli.dp.clipping.layers.BLOCK", 100)
    seen = []

    @register_optimizer("watching")
    class Watching(DPSGD, frozen=True):
        """A step of DP-SGD, and the size of the memory that it can see."""

        def update(self, theta: Tensor, eta: float, private: Any, moments: Any) -> None:
            seen.append((private.value.numel(), private.value.untyped_storage().nbytes()))
            super().update(theta, eta, private, moments)

    private = make_private(network(), "digits", optimizer="watching", **SETTINGS)
    private.step()
    assert len(seen) > 5
    assert all(size == 4 * count for count, size in seen)


class MixesInEvaluation(nn.Module):
    """Keeps samples apart in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1))
        return out if self.training else out - out.mean(0)


@pytest.mark.promise("validated")
def test_a_step_runs_in_the_mode_that_was_validated() -> None:
    results = []
    for leave_it in (nn.Module.train, nn.Module.eval):
        torch.manual_seed(0)
        with equal_keys():
            private = make_private(MixesInEvaluation(), "digits", **SETTINGS)
        for _ in range(2):
            leave_it(private.model)
            private.step()
        results.append(private.model.layer.weight.clone())  # type: ignore[union-attr,operator]
    assert torch.equal(*results)


# Kinks.


@pytest.mark.promise("alone")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("kind", "physical", "sizes"),
    rest_long(
        [
            ("isolated", 25, (8, 7)),
            ("isolated", 25, (20, 19)),
            ("weight-norm", 25, (8, 7)),
            ("plain", 2, (4, 3)),
            ("weight-norm", 25, (20, 19)),
            ("plain", 25, (2, 1)),
            ("plain", 25, (17, 16)),
        ],
        short=3,
    ),
)
def test_a_record_more_moves_no_other_across_a_kink(
    kind: str, physical: int, sizes: tuple[int, int]
) -> None:
    """Products may be rounded by the number of rows, which can change a ReLU's gate."""
    assert 0.9 < largest_move(kind, physical, sizes) <= 1


@pytest.mark.long
@pytest.mark.promise("alone")
@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX2"])
def test_threads_that_share_a_batch_move_no_record_across_a_kink(instructions: str) -> None:
    """oneDNN rounds the image where the shares of two threads meet in another way."""
    attack = ["tests.kinks", "2", "convolution", "25", "18", "17"]
    command = [sys.executable, "-W", "ignore", "-m", *attack]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "OMP_WAIT_POLICY": "passive"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, "18", "17"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.9 < float(done.stdout.split()[-1]) <= 1


@pytest.mark.promise("one")
def test_threads_take_one_step_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the memory of a sum, which may have a record of both steps in it."""
    inside, most = list[int](), list[int]()
    summed = ChunkedSum.of

    def slowly(*args: Any) -> Any:
        inside.append(1)
        time.sleep(0.02)
        most.append(len(inside))
        found = summed(*args)
        inside.pop()
        return found

    monkeypatch.setattr(ChunkedSum, "of", slowly)
    private = make_private(network(), "digits", **SETTINGS)
    with ThreadPoolExecutor(2) as threads:
        numbers = [*threads.map(lambda _: private.step(), range(4))]
    assert (sorted(numbers), max(most)) == ([1, 2, 3, 4], 1)


def test_a_refused_folder_loses_nothing_that_was_trained(tmp_path: Path) -> None:
    train_digits(out=tmp_path / "run", steps=1)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    private = make_private(network(), "digits", **SETTINGS)
    list(private)
    with pytest.raises(InputError, match="call publish with another folder, such as publish") as no:
        private.publish(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    another = re.findall(r"publish\('(.*)'\)", str(no.value))[0]
    report = private.publish(another).report
    assert report["network"]["steps"] == private.taken == len(private)
    with pytest.raises(InputError, match=r"publish needs a folder, such as publish\("):
        private.publish()
