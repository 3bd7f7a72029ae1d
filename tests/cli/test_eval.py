"""dpmac eval, as typed and as seen."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from typer.testing import CliRunner, Result

from dpmac_cli.cli.app import app
from dpmac_cli.data.loaders import load_data
from tests.digits_runs import train_digits
from tests.typed import dpmac, process


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("eval") / "run", epochs=1).folder


def evaluate(*args: str | Path) -> Result:
    """Type the command, in this process."""
    return dpmac("eval", *args)


def evaluation(*args: str | Path) -> dict[str, Any]:
    """What --json prints."""
    result = evaluate(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    body = json.loads(result.stdout)
    assert isinstance(body, dict)
    return body


def test_help_lists_every_flag() -> None:
    result = evaluate("--help")
    assert result.exit_code == 0
    assert {"RUN", "--dataset", "--data-dir", "--device", "--json", "--debug"} <= set(
        result.stdout.split()
    )


def test_a_name_that_the_terminal_cannot_show_is_escaped(run: Path) -> None:
    Path("modèle").symlink_to(run)
    result = CliRunner(charset="ascii").invoke(app, ["eval", "modèle"])
    assert result.exit_code == 0, result.output
    assert r"mod\xe8le" in result.stdout


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_json_agrees_with_the_report(run: Path, name: str) -> None:
    body = evaluation(run / name)
    assert {"accuracy", "loss", "samples", "per_class", "confusion"} <= body.keys()
    test = json.loads((run / "report.json").read_text())["test"]
    assert body["accuracy"] == test["accuracy"]
    assert body["loss"] == pytest.approx(test["loss"], rel=1e-6)
    assert body["samples"] == 360
    assert body["intervals"]["accuracy"] == test["accuracy_interval"]
    shown = " to ".join(f"{end:.2%}" for end in test["accuracy_interval"])
    assert shown in evaluate(run / name).stdout


@pytest.mark.long
def test_intervals_are_by_unit_where_records_belong_to_units() -> None:
    draws = np.random.default_rng(0)
    owners = np.repeat(np.arange(120), 5)
    features = draws.random((120, 3))[owners]  # a unit's records are alike: all right or all wrong
    labels = (features[:, 0] + 0.4 * draws.standard_normal(120)[owners] > 0.5).astype(np.int64)
    np.savez("visits.npz", x=features, y=labels, unit=owners, low=0, high=1)
    flags = ("--steps", "20", "--sigma", "0.5", "--batch-size", "20", "--seed", "0", "--quiet")
    assert dpmac("train", "--dataset", "visits.npz", *flags, "--out", "visits").exit_code == 0
    test = json.loads(Path("visits/report.json").read_text())["test"]
    body = evaluation("visits")
    assert body["intervals"]["accuracy"] == test["accuracy_interval"]
    persons = test["samples"] // 5
    wanted = binomtest(round(test["accuracy"] * persons), persons).proportion_ci()
    assert test["accuracy_interval"] == pytest.approx([wanted.low, wanted.high], abs=0.06)
    for name in ("accuracy", "balanced_accuracy", "f1"):
        low, high = body["intervals"][name]
        # Five independent records per person would make it shorter by the root of 5, to 0.45.
        assert high - low > 0.55 * (wanted.high - wanted.low), name


def test_every_sample_is_counted_once(run: Path) -> None:
    body = evaluation(run)
    confusion = torch.tensor(body["confusion"])
    labels = load_data("digits", run, torch.device("cpu")).test.labels
    assert confusion.sum() == body["samples"] == len(labels)
    assert torch.equal(confusion.sum(1), torch.bincount(labels, minlength=10))
    assert confusion.diagonal().sum() / 360 == pytest.approx(body["accuracy"])
    shares = confusion.diagonal() / confusion.sum(1)
    assert list(body["per_class"]) == list("0123456789")
    assert list(body["per_class"].values()) == pytest.approx(shares.tolist())


def test_a_table_for_people(run: Path) -> None:
    result = evaluate(run)
    body = evaluation(run)
    assert result.exit_code == 0
    assert "rows: true class, columns: predicted" in result.stdout
    assert f"accuracy {body['accuracy']:.2%}, loss {body['loss']:.4f}, 360 samples" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.count("│") == 14]
    assert [int(cell) for cell in rows[3].split("│")[2:12]] == body["confusion"][3]
    assert [cell.strip() for cell in rows[3].split("│")[12:14]] == [
        f"{body['sensitivity'][3]:.2%}",
        f"{body['specificity'][3]:.2%}",
    ]
    cells = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.count("│") == 4]
    table = {name.strip(): (value.strip(), ends.strip()) for name, value, ends in cells}
    low, high = body["intervals"]["auroc"]
    assert table["AUROC"] == (f"{body['auroc']:.2%}", f"{low:.2%} to {high:.2%}")
    assert table.keys() == {
        *("accuracy", "balanced accuracy", "AUROC", "average precision", "F1"),
        "calibration error",
    }


def test_metrics_are_those_of_the_report_and_have_intervals(run: Path) -> None:
    body = evaluation(run)
    test = json.loads((run / "report.json").read_text())["test"]
    for name in ("balanced_accuracy", "auroc", "average_precision", "f1", "calibration_error"):
        assert body[name] == pytest.approx(test[name])
        low, high = body["intervals"][name]
        assert 0 <= low < body[name] < high <= 1
    assert body["sensitivity"] == pytest.approx(list(body["per_class"].values()))
    assert evaluation(run)["intervals"] == body["intervals"]


def test_settings_of_the_evaluation_are_checked_together(run: Path, tmp_path: Path) -> None:
    audit = evaluate(run, "--audit", "--data-dir", tmp_path, "--dataset", "digits")
    assert (audit.exit_code, audit.stderr.count("leave out")) == (2, 2)


def test_the_card_is_named_where_there_is_one(run: Path, tmp_path: Path) -> None:
    card = run / "model-card.md"
    assert f"model card, with the privacy guarantee: {card}\n" in evaluate(run).stdout
    assert evaluation(run)["card"] == str(card)
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((run / "model.safetensors").read_bytes())
    assert "model-card" not in evaluate(alone).stdout
    assert evaluation(alone)["card"] is None


def test_a_model_that_does_not_fit_is_exit_code_4(run: Path) -> None:
    result = evaluate(run, "--dataset", "mnist")
    assert result.exit_code == 4
    assert "does not fit mnist: 1.weight: (64, 64) in the file, expected (64, 784)" in result.stderr
    assert result.stdout == ""


OWN = ("--model", "net.py:Net")


def train_own(text: str, out: str, *flags: str) -> Result:
    """Write a network of one's own, and train it for two steps."""
    Path("net.py").write_text(f"import torch\nfrom torch import nn\n\n\n{text}")
    result = dpmac("train", "--dataset", "digits", "--steps", "2", *OWN, "--out", out, *flags)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.long
def test_an_output_that_is_no_number_is_said(tmp_path: Path) -> None:
    """In training, at its end, and in scoring: the parameters are finite all the while."""
    train = train_own(
        "class Root(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if self.training else torch.sqrt(-1 - x * x)\n\n\n"
        "def Net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Root())\n",
        "nan",
    )
    said = "for 360 of 360 test samples the network's output is not a number (NaN)"
    assert train.stdout.count(said) == 1
    assert "test accuracy 0.00% on 360 samples" in train.stdout
    for flags in ((), ("--json",)):
        scored = dpmac("eval", "nan", *OWN, *flags)
        assert (scored.exit_code, scored.stderr.count(f"note: {said}")) == (0, 1)


@pytest.mark.long
def test_a_network_with_numbers_of_every_kind_is_scored(tmp_path: Path) -> None:
    train_own(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('places', torch.arange(63, -1, -1))\n"
        "        self.register_buffer('mask', torch.ones(64, dtype=torch.bool))\n"
        "        self.linear = nn.Linear(64, 10).double()\n\n"
        "    def forward(self, x):\n"
        "        x = torch.where(self.mask, x.flatten(1)[:, self.places], 0)\n"
        "        return self.linear(x.double()).to(x.dtype)\n",
        "kinds",
    )
    scored = dpmac("eval", "kinds", *OWN, "--json")
    assert scored.exit_code == 0, scored.output
    report = json.loads(Path("kinds/report.json").read_text())
    assert json.loads(scored.stdout)["accuracy"] == report["test"]["accuracy"]


@pytest.mark.long
def test_what_a_network_prints_does_not_mix_with_json(tmp_path: Path) -> None:
    train = train_own(
        "class Loud(nn.Sequential):\n    def forward(self, x):\n"
        "        print('hello')\n        return super().forward(x)\n\n\n"
        "def Net():\n    return Loud(nn.Flatten(), nn.Linear(64, 10))\n",
        "said",
        "--json",
    )
    scored = dpmac("eval", "said", *OWN, "--json")
    study = ("--dataset", "digits", "--steps", "2", "--sigma", "1", "--seeds", "1", *OWN)
    table = process("compare", *study, "--optimizers", "dp-sgd", "--out", "study", "--json")
    outputs = [(train.stdout, train.stderr), (scored.stdout, scored.stderr), table.communicate()]
    for out, err in outputs:
        assert json.loads(out)
        assert "hello" in err


def test_debug_shows_where_it_failed(run: Path) -> None:
    assert "Traceback" in evaluate(run, "--dataset", "mnist", "--debug").stderr


@pytest.mark.long
def test_a_file_without_test_set_is_scored_in_part_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file, out = tmp_path / "rows.npz", tmp_path / "own"
    np.savez(file, x=rng.random((90, 3)), y=np.arange(90) % 2)
    quick = ("--steps", "2", "--sigma", "5", "--feature-range", "0,1", "--quiet")
    assert dpmac("train", "--dataset", str(file), *quick, "--out", str(out)).exit_code == 0
    alone, other = dpmac("eval", str(out)), dpmac("eval", str(out), "--dataset", str(file))
    assert re.search(r"\d+ held-out samples", alone.stdout)
    assert "no test set" not in alone.stderr
    assert re.search(r"rows.npz has no test set: only the \d+ records that", other.stderr)
