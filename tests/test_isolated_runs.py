"""Runs of user-supplied networks, which see one record at a time, and what is said of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import ModelError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import finish, train
from dpmac_cli.runs.session import Started
from dpmac_cli.runs.trainer import Trainer, make_trainer
from tests.networks import CLASSES
from tests.typed import dpmac

NETWORKS = Path(__file__).with_name("networks.py")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Sixty images of (3, 8, 8) in three classes."""
    rng = np.random.default_rng(0)
    file = tmp_path / "images.npz"
    y = np.arange(60) % CLASSES
    x = rng.integers(0, 128, (60, 8, 8, 3), dtype=np.uint8) + y.reshape(-1, 1, 1, 1) * 60
    np.savez(file, x=x.astype(np.uint8), y=y)
    return file


def settings(images: Path, model: str, **more: Any) -> dict[str, Any]:
    named = f"{NETWORKS}:{model}" if model[0].isupper() else model
    short = {"steps": 4, "batch_size": 20, "sigma": 2, "seed": 1, "device": "cpu"}
    return {"dataset": str(images), "model": named, **short, **more}


def run_of(images: Path, model: str, **more: Any) -> Finished:
    return finish(train(resolve(**settings(images, model, **more)).plan))


@pytest.mark.privacy
@pytest.mark.parametrize(("model", "flag"), [("VisionTransformer", None), ("Centred", "isolate")])
def test_report_and_card_say_that_samples_are_kept_apart(
    images: Path, model: str, flag: str | None
) -> None:
    done = run_of(images, model, out=images.parent / "run", **({flag: True} if flag else {}))
    said = "The network saw one record at a time in training, so it could not mix records."
    assert said in (done.folder / "model-card.md").read_text()
    scored = dpmac("eval", str(done.folder), "--model", f"{NETWORKS}:{model}", "--json")
    assert scored.exit_code == 0, scored.output
    assert json.loads(scored.stdout)["accuracy"] == done.report["test"]["accuracy"]


def assert_a_record_moves_the_sum_by_at_most_one(trainer: Trainer) -> None:
    """In a batch of 17, by the whitened norm."""
    rows = np.arange(17)
    whole = trainer._clip_and_sum(rows).clone()
    for left_out in (0, 7, 16):
        part = trainer._clip_and_sum(np.delete(rows, left_out))
        assert float((whole.double() - part.double()).norm()) <= 1


@pytest.mark.privacy
@pytest.mark.parametrize("model", ["Centred", "RescaledByBatch"])
def test_a_network_that_mixes_is_refused_unless_it_is_meant(images: Path, model: str) -> None:
    with pytest.raises(ModelError, match=r"for a batch than for one.*add --isolate"):
        run_of(images, model)
    meant = resolve(**settings(images, model, optimizer="dp-sgd", isolate=True)).plan
    assert_a_record_moves_the_sum_by_at_most_one(make_trainer(meant))


@pytest.mark.privacy
@pytest.mark.parametrize("model", ["WhitenedIfLarge", "GhostNorm"])
def test_what_mixes_large_batches_alone_sees_none(images: Path, model: str) -> None:
    chosen = resolve(**settings(images, model, optimizer="dp-sgd")).plan
    assert_a_record_moves_the_sum_by_at_most_one(make_trainer(chosen))


def test_a_person_is_told_why_their_network_runs_in_a_loop(images: Path) -> None:
    events = list(train(resolve(**settings(images, "RescaledIfLarge")).plan))
    [started] = [event for event in events if isinstance(event, Started)]
    [note] = [note for note in started.notes if "torch.func.vmap cannot run" in note]
    assert "decides by the values of a record" in note
    assert "times as long as plain training" in note


@pytest.mark.privacy
def test_the_draws_of_a_network_differ_from_step_to_step_and_run_to_run(images: Path) -> None:
    chosen = settings(images, "RandomByTorch", optimizer="dp-sgd", seed=None)
    one, other = (make_trainer(resolve(**chosen).plan) for _ in range(2))
    other.state.theta.copy_(one.state.theta)
    rows = np.arange(9)
    sums = [one._clip_and_sum(rows).clone(), other._clip_and_sum(rows).clone()]
    one.state.step += 1
    sums.append(one._clip_and_sum(rows).clone())
    assert len({tuple(each.tolist()) for each in sums}) == 3


@pytest.mark.privacy
def test_low_precision_is_refused_before_anything_is_written(images: Path) -> None:
    half = images.with_name("half.py")
    half.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).to(torch.bfloat16)\n"
    )
    typed = ("train", "--dataset", str(images), "--model", f"{half}:build", "--steps", "2",
             "--sigma", "2", "--device", "cpu", "--out", "half")  # fmt: skip
    refused = dpmac(*typed)
    assert refused.exit_code == 4
    assert "1.weight is torch.bfloat16" in " ".join(refused.stderr.split())
    assert not Path("half").exists()
    half.write_text(half.read_text().replace(".to(torch.bfloat16)", ".to(torch.bfloat16).float()"))
    assert dpmac(*typed).exit_code == 0
    assert dpmac("eval", "half", "--model", f"{half}:build").exit_code == 0


def test_a_network_of_64_bits_is_trained_and_evaluated(images: Path) -> None:
    double = images.with_name("double.py")
    double.write_text(
        "from torch import nn\n\ndef build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()\n"
    )
    typed = ("train", "--dataset", images, "--model", f"{double}:build", "--steps", "2",
             "--sigma", "2", "--device", "cpu", "--out", "double")  # fmt: skip
    assert dpmac(*typed).exit_code == 0
    assert dpmac("eval", "double", "--model", f"{double}:build").exit_code == 0
