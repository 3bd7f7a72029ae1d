"""Arguments of public functions: each mistake is an InputError, before anything is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpmac_cli import (
    InputError,
    Poisson,
    PrivateStep,
    Run,
    Silo,
    clipped_grad,
    compare,
    federation,
    load,
    resume,
    train,
    tune,
)

NOBODY: Any = None
RECORDS = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
SAMPLING = Poisson(n=8, batch_size=4)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def step() -> PrivateStep:
    return PrivateStep(nn.Linear(2, 2), loss, sampling=SAMPLING, sigma=4.0, epochs=1)


def silo_in_a_file() -> None:
    Path("ok.csv").write_text("a\n")
    how: Any = {"sampling": SAMPLING, "epsilon": 3.0, "rounds": 1, "steps": 1}
    with Silo("ok.csv", nn.Linear(2, 2), loss, RECORDS, **how):
        pass


def number(value: Any) -> Any:
    """A value of a type that a checker of types cannot see."""
    return value


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a silo": (silo_in_a_file, "ok.csv is a file. Use a folder of this silo alone."),
    "taken": (
        lambda: step().load_state_dict({}, taken=number("a")),
        "PrivateStep.load_state_dict: taken must be a whole number or None, not str.",
    ),
    "stop": (
        lambda: train(dataset="digits", sigma=4, steps=1, out="run", stop=number(3)),
        "train: stop must be a function, not int.",
    ),
    "on_event": (
        lambda: train(dataset="digits", sigma=4, steps=1, out="run", on_event=number(3)),
        "train: on_event must be a function or None, not int.",
    ),
    "workers": (
        lambda: step().loader(RECORDS, workers=-1),
        "loader: workers must be at least 0, not -1.",
    ),
    "load": (lambda: load(NOBODY), "load: path must not be None."),
    "load 3": (lambda: load(number(3)), "load: path must be a path, not int."),
    "resume": (lambda: resume(NOBODY), "resume: where must not be None."),
    "dataset": (lambda: train(dataset=None, out="run"), "train: dataset is None: was a variable "),
    "data": (lambda: train(data=None, out="run"), "train: data is None: was a variable never set?"),
    "compare": (lambda: compare("out", dataset=None), "compare: dataset is None: was a variable "),
    "tune": (lambda: tune(dataset=None, out="run"), "tune: dataset is None: was a variable never"),
    "clipped_grad": (
        lambda: clipped_grad(nn.Linear(2, 2), loss, NOBODY, batch_size=4),
        "clipped_grad: region must not be None.",
    ),
    "federation": (lambda: federation(NOBODY), "federation: claims must not be None."),
    "a claim": (lambda: federation([number(3)]), "federation: 3 is no claim. Use reply.claim"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_of_a_program_is_one_message(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(InputError) as raised:
        call()
    assert str(raised.value).removeprefix(f"{Path.cwd()}/").startswith(message)
    assert not Path("run").exists()


def test_records_that_a_run_cannot_take(finished: Run) -> None:
    images = np.zeros((3, 1, 8, 8), np.uint8)
    with pytest.raises(InputError, match=r"Run.predict: data must not be None\."):
        finished.predict(None)
    with pytest.raises(InputError, match=r"^(--)?dataset: .*, not a ndarray\.$"):
        finished.score(images)  # the settings of the run say nothing wrong
    with pytest.raises(InputError, match=r"contains texts\. The model takes none"):
        finished.predict(["a"])


def test_a_tensor_that_requires_a_gradient_is_predicted_as_its_numbers(tmp_path: Path) -> None:
    x = torch.arange(40.0).reshape(20, 2) / 40
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=np.arange(20) % 2)
    run = train(
        dataset=str(tmp_path / "data.npz"),
        feature_range=(0, 1),
        sigma=4,
        steps=1,
        out=tmp_path / "run",
    )
    assert run.predict(x.requires_grad_()).predicted == run.predict(x.detach()).predicted
