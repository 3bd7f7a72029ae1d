"""Networks that are defined in the cells of a notebook."""

from contextvars import Context
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpmac_cli import (
    ArrayData,
    Finished,
    InputError,
    ModelError,
    load_model,
    make_private,
    predict,
    score,
)
from dpmac_cli.release.private import PrivateTraining

X, Y = np.random.default_rng(0).random((150, 6)), np.arange(150) % 2


class Net(nn.Module):
    """As in a cell: no file has it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


def data(**more: object) -> ArrayData:
    return ArrayData(X, Y, low=0, high=1, classes=["no", "<b>&yes"], **more)  # type: ignore[arg-type]


def trained(**more: object) -> tuple[PrivateTraining, Finished]:
    private = make_private(Net(), data(**more), sigma=4, steps=3, batch_size=16)
    list(private)
    return private, private.publish("run", force=True)


def test_a_network_of_a_cell_is_loaded_scored_and_predicted_with() -> None:
    private, run = trained()
    assert repr(run) == "Finished(folder=PosixPath('run'), state='finished')"
    with pytest.raises(ModelError, match=r"add --model FILE\.py:FACTORY"):  # typed as a command
        load_model("run")
    with pytest.raises(ModelError, match="Pass network= with an instance of Net, a function"):
        Context().run(load_model, "run")
    scored = private.evaluate().accuracy
    for network in (Net, Net(), partial(Net), lambda shape, classes: Net()):
        model = load_model("run", network=network).model
        assert model is not network
        assert score("run", data(), network=network).result.accuracy == scored
        assert len(predict("run", X[:5], network=network).predicted) == 5
    assert run.folder == Path("run")


@pytest.mark.privacy
def test_a_loaded_network_of_a_cell_carries_its_training() -> None:
    private, _ = trained()
    again = make_private(
        load_model("run", network=Net).model, data(), sigma=4, steps=2, batch_size=16
    )
    assert again.epsilon == pytest.approx(private.epsilon)
    list(again)
    assert again.epsilon > private.epsilon


def test_what_is_no_network_is_refused() -> None:
    trained()
    with pytest.raises(InputError, match="network 3 is a value of type int"):
        load_model("run", network=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"must return a torch\.nn\.Module"):
        load_model("run", network=dict)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="does not fit"):
        load_model("run", network=lambda: nn.Linear(6, 2))
