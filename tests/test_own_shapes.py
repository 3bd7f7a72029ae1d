"""A network of the user's program gets records in the shape of the user's array."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpmac_cli
from dpmac_cli import ArrayData, make_private
from dpmac_cli.release import model_file
from dpmac_cli.release.model_file import save_model
from dpmac_cli.runs import folder
from tests.typed import dpmac

DRAWS = np.random.default_rng(0)


def numbers(*shape: int) -> ArrayData:
    x = DRAWS.random((120, *shape))
    return ArrayData(x, np.arange(120) % 2, low=0, high=1, classes=["no", "yes"])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


#: Shapes of records in an array, a network, and the shape that it takes.
NETWORKS: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
    "rows": ((20,), lambda: nn.Sequential(nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 2)), (20,)),
    "signals": (
        (3, 30),
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
        ),
        (3, 30),
    ),
    "sequences": ((5, 6), Recurrent, (5, 6)),
    "flattened": ((20,), lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 2)), (20,)),
    # Networks of earlier versions, which had to take channels, height and width.
    "grey images": (
        (8, 8),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)),
        (1, 8, 8),
    ),
    "columns as channels": (
        (20,),
        lambda: nn.Sequential(nn.Conv2d(20, 2, 1), nn.Flatten()),
        (20, 1, 1),
    ),
    "images": (
        (3, 8, 8),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2)),
        (3, 8, 8),
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_gets_records_in_the_shape_of_the_array(kind: str) -> None:
    shape, build, taken = NETWORKS[kind]
    net, seen = build(), set()
    private = make_private(net, numbers(*shape), sigma=4, steps=2, batch_size=16)
    private.step()
    x = torch.as_tensor(DRAWS.random((7, *shape)), dtype=torch.float32)
    assert private.standardise(x).shape == (7, *taken)
    net.register_forward_hook(lambda _, inputs, __: seen.add(tuple(inputs[0].shape[1:])))
    with torch.no_grad():
        net(private.standardise(x))
    assert seen == {taken}


def test_numbers_are_scaled_column_by_column_in_any_shape() -> None:
    low, high = np.arange(20) - 3.0, np.arange(20) + 1.0
    x = low + (high - low) * DRAWS.random((120, 20))
    data = ArrayData(x, np.arange(120) % 2, low=low, high=high, classes=["no", "yes"])
    private = make_private(nn.Sequential(nn.Linear(20, 2)), data, sigma=4, steps=2, batch_size=16)
    scaled = private.standardise(torch.as_tensor(x, dtype=torch.float32)).numpy()
    assert np.allclose(scaled, 2 * (x - low) / (high - low) - 1, atol=1e-5)


@pytest.mark.long
def test_runs_are_scored_and_predicted_with() -> None:
    Path("net.py").write_text(
        "from torch import nn\n\ndef Net():\n"
        "    return nn.Sequential(nn.Linear(20, 4), nn.Linear(4, 2))\n"
    )
    x, y = DRAWS.random((120, 20)), np.arange(120) % 2
    np.savez("rows.npz", x=x, y=y, low=0, high=1, classes=["no", "yes"])
    np.savez("new.npz", x=x[:9])
    flags = ("--model", "net.py:Net", "--sigma", "4", "--steps", "2", "--batch-size", "16")
    result = dpmac("train", "--dataset", "rows.npz", *flags, "--out", "run")
    assert result.exit_code == 0, result.output
    report = json.loads(Path("run/report.json").read_text())
    assert report["input"]["record"] == [20]
    scored = dpmac("eval", "run", "--model", "net.py:Net", "--json")
    assert scored.exit_code == 0, scored.output
    assert json.loads(scored.stdout)["accuracy"] == report["test"]["accuracy"]
    result = dpmac("predict", "run", "new.npz", "--model", "net.py:Net", "--out", "new.csv")
    assert result.exit_code == 0, result.output
    with Path("new.csv").open(newline="") as file:
        found = [float(row["p_yes"]) for row in csv.DictReader(file)]
    model = dpmac_cli.load_model("run", factory="net.py:Net").model
    inputs = torch.as_tensor(2 * x[:9] - 1, dtype=torch.float32)
    with torch.no_grad():
        expected = model(inputs).softmax(1)[:, 1]
    assert np.allclose(found, expected, atol=1e-4)


def test_a_network_that_takes_neither_shape_is_refused_with_that_of_the_array() -> None:
    with pytest.raises(dpmac_cli.ModelError, match=r"failed on samples of shape \(20,\)"):
        make_private(nn.Sequential(nn.Linear(21, 2)), numbers(20), sigma=4, steps=2)


def test_no_other_record_shape_is_read_from_a_file() -> None:
    private = make_private(nn.Sequential(nn.Linear(20, 2)), numbers(20), sigma=4, steps=1)
    list(private)
    path = private.publish("run").folder / folder.MODEL
    _, _, kept, _ = model_file._read(path)
    kept["input"]["record"] = [21]
    save_model(path, nn.Sequential(nn.Linear(20, 2)), kept)
    with pytest.raises(dpmac_cli.InputError, match="record must have as many numbers as shape"):
        model_file.read_facts(path)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(20,), (5, 6)])
def test_the_code_of_the_card_takes_records_in_the_shape_of_the_array(
    shape: tuple[int, ...],
) -> None:
    net = nn.Sequential(nn.Linear(20, 2)) if shape == (20,) else Recurrent()
    private = make_private(net, numbers(*shape), sigma=4, steps=1)
    list(private)
    card = (private.publish("run").folder / folder.CARD).read_text()
    assert f"shape (rows, {', '.join(map(str, shape))})" in card
    assert "pixels" not in card
    assert f".view(-1{', 1' * (len(shape) - 1)})" in card
