"""Networks that are defined in the cells of a notebook."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from dpmac_cli import (
    ArrayData,
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


DATA = ArrayData(X, Y, low=0, high=1, classes=["no", "<b>&yes"])


def trained() -> PrivateTraining:
    private = make_private(Net(), DATA, sigma=4, steps=3, batch_size=16)
    list(private)
    private.publish("run")
    return private


def test_a_network_of_a_cell_is_loaded_scored_and_predicted_with() -> None:
    private = trained()
    with pytest.raises(ModelError, match=r"add --model FILE\.py:FACTORY"):  # typed as a command
        load_model("run")
    scored = private.evaluate().accuracy
    for network in (Net, Net(), partial(Net), lambda shape, classes: Net()):
        model = load_model("run", network=network).model
        assert model is not network
        assert score("run", DATA, network=network).result.accuracy == scored
        assert len(predict("run", X[:5], network=network).predicted) == 5


@pytest.mark.promise("again")
def test_a_loaded_network_of_a_cell_carries_its_training() -> None:
    private = trained()
    again = make_private(
        load_model("run", network=Net).model, DATA, sigma=4, steps=2, batch_size=16
    )
    assert again.epsilon == pytest.approx(private.epsilon)
    list(again)
    assert again.epsilon > private.epsilon
