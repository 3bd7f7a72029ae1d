"""Everything that can be typed wrongly: the right exit code, a message, and nothing written."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import pytest
import safetensors.torch
import torch
from torchvision.datasets import mnist
from typer.testing import CliRunner

from dpmac_cli.cli.app import app
from dpmac_cli.runs.folder import MODEL
from tests.digits_runs import contents, train_digits


class Bad(NamedTuple):
    """A command that must fail: what was typed after ``dpmac``, the exit code, what is said."""

    typed: str
    code: int
    said: Sequence[str]


TRAIN = "train --dataset digits --steps 3"
STUDY = "compare --dataset digits --steps 3 --optimizers dp-sgd --seeds 1"

BAD = [
    # Commands and options
    Bad("train --resume .", 2, ["--resume . is not a run folder"]),
    Bad("train --resume . --config my.yaml", 2, ["--resume uses", "leave out --config"]),
    Bad("train extra", 2, ["extra"]),
    Bad("train --sigma", 2, ["--sigma"]),
    Bad("eval", 2, ["RUN"]),
    Bad("eval model.safetensors --jsn", 2, ["--jsn", "--json"]),
    # Settings: the parser has its own tests
    Bad(f"{TRAIN} --kappa best", 2, ["--kappa", "paper, exact, tracked"]),
    Bad(f"{TRAIN} --lr fast", 2, ["--lr", "'fast' is not a number"]),
    Bad(f"{TRAIN} --batch-size 2000", 2, ["--batch-size", "1437"]),
    # Together
    Bad(f"{TRAIN} --epsilon 3 --no-dp", 2, ["--epsilon", "--no-dp", "contradict"]),
    Bad(f"{TRAIN} --lr -1 --delta 2 --phi x", 2, ["--lr", "--delta", "--phi"]),
    # Places
    Bad(f"{TRAIN} --device tpu", 2, ["--device", "tpu"]),
    Bad(f"{TRAIN} --device cuda:99", 2, ["--device", "cuda:99"]),
    Bad(f"{TRAIN} --out ''", 2, ["--out must not be empty"]),
    Bad(f"{TRAIN} --data-dir ''", 2, ["--data-dir must not be empty"]),
    Bad(f"{TRAIN} --out file.txt", 2, ["--out file.txt", "is a file"]),
    Bad(f"{TRAIN} --out file.txt/run", 2, ["file.txt/run", "--out"]),
    Bad(f"{TRAIN} --out foreign", 2, ["--out foreign", "do not belong to a run"]),
    Bad(f"{TRAIN} --out foreign --force", 2, ["--out foreign", "do not belong to a run"]),
    Bad(f"{TRAIN} --out run", 2, ["--out run", "--force"]),
    Bad(f"{TRAIN} --out {'a' * 300}", 2, ["a" * 300]),
    Bad("train --dataset mnist --data-dir empty", 2, ["empty/MNIST/raw", "--dataset digits"]),
    Bad("train --out run --force --data-dir empty", 2, ["empty/MNIST/raw"]),
    # Files
    Bad(f"{TRAIN} --config nowhere.yaml", 2, ["--config", "nowhere.yaml"]),
    Bad(f"{TRAIN} --config foreign", 2, ["--config", "foreign"]),
    Bad(f"{TRAIN} --config broken.yaml", 2, ["--config", "broken.yaml", "not valid", "line 2"]),
    Bad("eval nowhere", 2, ["nowhere does not exist"]),
    Bad("eval empty", 2, ["empty is not a run folder: it contains no model.safetensors"]),
    Bad("eval killed", 2, ["The run in killed has not", "dpmac train --resume killed"]),
    Bad("eval text.safetensors", 2, ["text.safetensors is not a valid safetensors"]),
    Bad("eval cut.safetensors", 2, ["cut.safetensors is not a valid safetensors"]),
    Bad("eval flipped.safetensors", 2, ["flipped.safetensors is damaged"]),
    Bad("eval plain.safetensors", 2, ["plain.safetensors", "not written by dpmac"]),
    Bad("eval model.safetensors --dataset digts", 2, ["--dataset", "digts", "digits"]),
    Bad("eval model.safetensors --device tpu", 2, ["--device", "tpu"]),
    Bad("eval nowhere --dataset mnits --device tpu", 2, ["--dataset", "--device"]),
    Bad("eval model.safetensors --data-dir ''", 2, ["--data-dir must not be empty"]),
    Bad("eval model.safetensors --device cuda:99", 2, ["--device", "cuda:99"]),
    Bad("eval model.safetensors --dataset mnist", 4, ["model.safetensors", "mnist"]),
    # Studies
    Bad(f"{STUDY} --out ''", 2, ["--out must not be empty"]),
    Bad(f"{STUDY} --dry-run --json", 2, ["--dry-run and --json"]),
    Bad(f"{STUDY} --jobs 0", 2, ["--jobs must be"]),
    Bad(f"{STUDY} --out foreign", 2, ["--out foreign", "do not belong to a study"]),
    Bad(f"{STUDY} --out run", 2, ["--out run", "do not belong to a study"]),
    Bad("compare --dataset mnist --data-dir empty --out new", 2, ["empty/MNIST/raw"]),
    # Privacy budgets
    Bad(f"{TRAIN} --sigma 0.8 --max-epsilon 0.001", 3, ["--max-epsilon", "allows no further step"]),
    Bad(
        f"{TRAIN} --sigma 0.8 --max-epsilon 0.001 --delta 1e-16",
        3,
        ["--max-epsilon", "allows no further"],
    ),
    Bad(f"{TRAIN} --epsilon 0.001 --delta 1e-16", 3, ["with rdp", "larger epsilon"]),
    Bad(
        "train --dataset digits --steps 5000 --epsilon 1e-6", 3, ["epsilon 1e-06", "larger epsilon"]
    ),
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(mnist, "download_and_extract_archive", fail)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run on digits."""
    run = train_digits(out=tmp_path_factory.mktemp("digits") / "run", steps=1)
    return run.folder / MODEL


@pytest.fixture(autouse=True)
def files(tmp_path: Path, trained: Path) -> Path:
    """The files that the commands above name, in the folder where they are typed."""
    (tmp_path / "file.txt").write_text("mine")
    for name in ("foreign", "empty", "run"):
        (tmp_path / name).mkdir()
    # As a failed download leaves it: torchvision makes the folders first.
    (tmp_path / "empty" / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    (tmp_path / "run" / "report.json").write_text("{}")
    (tmp_path / "broken.yaml").write_text("sigma: [\n")
    (tmp_path / "text.safetensors").write_text("hello")
    model = trained.read_bytes()
    (tmp_path / "model.safetensors").write_bytes(model)
    (tmp_path / "cut.safetensors").write_bytes(model[:-100])
    (tmp_path / "flipped.safetensors").write_bytes(model[:-1] + bytes([model[-1] ^ 1]))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").write_text("dataset: digits\n")
    safetensors.torch.save_file({"w": torch.zeros(3)}, tmp_path / "plain.safetensors")
    return tmp_path


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.typed[:80])
def test_bad_input_is_explained_and_nothing_is_written(bad: Bad, files: Path) -> None:
    before = contents(files)
    result = CliRunner().invoke(app, shlex.split(bad.typed), env={"COLUMNS": "400"})
    assert result.exit_code == bad.code, result.output
    for part in bad.said:
        assert part in result.stderr
    assert "Traceback" not in result.output
    assert contents(files) == before


def test_every_fault_is_named_at_once() -> None:
    typed = f"{TRAIN} --lr -1 --delta 2 --phi x --kappa y --sigma 1 --epsilon 1"
    result = CliRunner().invoke(app, typed.split())
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 5


def test_a_model_of_a_run_that_fits_is_scored() -> None:
    # The fixture's model is a good one: what fails above, fails for the reason given.
    result = CliRunner().invoke(app, ["eval", "model.safetensors", "--json"])
    assert result.exit_code == 0
