"""Short runs on digits, for the tests that need one."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.config.plan import Plan
from dpmac_cli.models.dataset import Data
from dpmac_cli.progress import heard_by
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer, make_trainer
from tests.helpers import load_data
from tests.typed import dpmac

#: Noise that is cheap to price: the grid of privacy losses grows like 1/sigma^2.
SIGMA = 6.0
RATE = 128 / 1437
#: A seed that cannot turn up in a file by chance.
SEED = 918_273_645_501
PUBLIC_FILES = {
    *("SHA256SUMS", "config.yaml", "metrics.jsonl", "model-card.md"),
    *("model.safetensors", "report.json"),
}


@functools.cache
def digits() -> Data:
    """The records of digits, read once."""
    return load_data("digits", Path(), torch.device("cpu"))


def digits_network() -> nn.Sequential:
    """A small network for digits, always with the same parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


def digits_config(file: Path | None = None, **flags: Any) -> Plan:
    """The configuration of a run of three steps with :data:`SIGMA`, unless told otherwise."""
    short: dict[str, Any] = {}
    if file is None:
        short["dataset"] = "digits"
        if not {"steps", "epochs"} & flags.keys():
            short["steps"] = 3
        if not {"sigma", "epsilon", "no_dp"} & flags.keys():
            short["sigma"] = SIGMA
    return resolve({**short, "device": "cpu", **flags}, file).plan


def after(steps: int) -> Callable[[], bool]:
    """A stop request that comes during the given step."""
    asked = iter(range(1, 10**9))
    return lambda: next(asked) >= steps


def train_events(config: Plan, stop: Callable[[], bool] = lambda: False) -> tuple[list[Any], Run]:
    """Run to the end: everything that happened, with progress, and the last of it."""
    events: list[Any] = []
    with heard_by(events.append):
        for event in train_plan(config, stop):
            events.append(event)
    return events, finish(events)


def run_trainer(
    plan: Plan, *, keys: Keys | None = None, steps: int | None = None, **given: Any
) -> Trainer:
    """The trainer of a run; ``given`` are data and model, if they are not the plan's."""
    keys = keys or make_keys(plan.settings.seed)
    task = prepare(plan, choose_device(plan.settings.device), keys, **given)
    event = plan.event if steps is None else plan.event.first(steps)
    return make_trainer(plan, task, keys, Account(event=event))


def train_digits(file: Path | None = None, **flags: Any) -> Run:
    """Run to the end."""
    return train_events(digits_config(file, **flags))[1]


def weights(folder: Path) -> dict[str, Tensor]:
    """The published weights, by plain safetensors."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs ended in the same weights, bit by bit."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def contents(root: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with what files hold: to see that nothing changed."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def refused(*args: str, code: int = 2) -> str:
    """What ``dpmac train`` says of settings that it refuses, on one line."""
    noise = () if {"--sigma", "--epsilon", "--no-dp"} & set(args) else ("--sigma", f"{SIGMA:g}")
    result = dpmac("train", "--dataset", "digits", "--steps", "1", "--out", "no", *noise, *args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert not Path("no").exists()
    return " ".join(result.output.split())


def report_of(run: str | Path) -> dict[str, Any]:
    """The report in a run's folder."""
    report: dict[str, Any] = json.loads(Path(run, "report.json").read_text())
    return report


def metrics_of(run: str | Path) -> list[dict[str, Any]]:
    """The rows of the metrics in a run's folder."""
    return read_lines(Path(run, "metrics.jsonl"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
