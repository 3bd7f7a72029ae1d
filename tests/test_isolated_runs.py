"""Runs of user-supplied networks: how it is known that samples are kept apart, and what is said."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import ModelError
from dpmac_cli.models.unchanged import Unchanged
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import finish, train
from dpmac_cli.runs.session import Started
from dpmac_cli.runs.setup import make_trainer
from dpmac_cli.training.trainer import Trainer
from tests.networks import CLASSES, Perceptron, WhitenedIfLarge
from tests.tiers import rest_long
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
@pytest.mark.parametrize(
    ("model", "flag", "kind"),
    rest_long(
        [
            ("mlp-small", None, "built in"),
            ("Perceptron", None, "traced"),
            ("Perceptron", "isolate", "isolated"),
            ("VisionTransformer", None, "isolated"),
            ("mlp-small", "isolate", "isolated"),
            ("WordsFirst", "isolate", "isolated"),
            ("WhitenedIfLarge", None, "isolated"),
            ("GhostNorm", None, "isolated"),
        ],
        short=4,
    ),
)
def test_report_and_card_say_how_samples_are_kept_apart(
    images: Path, model: str, flag: str | None, kind: str
) -> None:
    done = run_of(images, model, out=images.parent / "run", **({flag: True} if flag else {}))
    said = done.report["model"]["independence"]
    assert said["kind"] == kind
    assert said["statement"] in (done.folder / "model-card.md").read_text()
    scored = dpmac("eval", str(done.folder), *(() if model[0].islower() else
                   ("--model", f"{NETWORKS}:{model}")), "--json")  # fmt: skip
    assert scored.exit_code == 0, scored.output
    assert json.loads(scored.stdout)["accuracy"] == done.report["test"]["accuracy"]


def without_dropout(trainer: Trainer) -> Trainer:
    """A trainer whose network is in evaluation mode, as if it had been validated so."""
    trainer.model.eval()
    trainer._unchanged = Unchanged(trainer.model, trainer._sums.trained)
    return trainer


def assert_a_record_moves_the_sum_by_at_most_one(trainer: Trainer) -> None:
    """In a batch of 17, by the whitened norm."""
    rows = np.arange(17)
    whole = trainer._clip_and_sum(rows).clone()
    for left_out in (0, 7, 16):
        part = trainer._clip_and_sum(np.delete(rows, left_out))
        assert float((whole.double() - part.double()).norm()) <= 1


@pytest.mark.privacy
@pytest.mark.parametrize("model", ["WhitenedIfLarge", "GhostNorm", "VisionTransformer"])
def test_what_is_not_proven_is_trained_on_one_sample_at_a_time(images: Path, model: str) -> None:
    """One record less in a batch of 17 moves the whitened sum by 1 at most."""
    config = resolve(**settings(images, model, optimizer="dp-sgd")).plan
    trainer = make_trainer(config)
    assert_a_record_moves_the_sum_by_at_most_one(without_dropout(trainer))


@pytest.mark.privacy
def test_a_network_at_hand_is_isolated_unless_it_is_proven(images: Path) -> None:
    config = resolve(**settings(images, "mlp-small")).plan
    assert make_trainer(config, model=WhitenedIfLarge()).plan.isolated
    assert not make_trainer(config, model=Perceptron()).plan.isolated


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("VisionTransformer", "depend on the batch size"),
        ("OddlyScaled", "has both its own parameters and dropout layers"),
    ],
)
def test_a_person_is_told_why_their_network_is_isolated(images: Path, model: str, why: str) -> None:
    events = list(train(resolve(**settings(images, model)).plan))
    [started] = [event for event in events if isinstance(event, Started)]
    [note] = [note for note in started.notes if "run on each sample alone" in note]
    assert why in note


@pytest.mark.privacy
def test_a_network_that_broadcasts_its_own_parameters_need_not_be_isolated(images: Path) -> None:
    config = resolve(**settings(images, "ShapedTransformer", optimizer="dp-sgd")).plan
    trainer = make_trainer(config)
    assert not trainer.plan.isolated
    assert_a_record_moves_the_sum_by_at_most_one(without_dropout(trainer))


RANDOM = pytest.mark.parametrize("model", ["RandomByTorch", "RandomByNumPy", "RandomByPython"])


@pytest.mark.privacy
@RANDOM
@pytest.mark.parametrize("chunk", [4, 32])
def test_the_draws_of_a_record_depend_on_no_other(images: Path, model: str, chunk: int) -> None:
    """Neither on how many numbers others drew, nor on the place in the batch or in a chunk."""
    more: dict[str, Any] = {"isolate": True, "optimizer": "dp-sgd", "physical_batch": chunk}
    assert_a_record_moves_the_sum_by_at_most_one(
        make_trainer(resolve(**settings(images, model, **more)).plan)
    )


@pytest.mark.privacy
def test_the_draws_of_a_record_differ_from_step_to_step_and_run_to_run(images: Path) -> None:
    chosen = settings(images, "RandomByNumPy", isolate=True, optimizer="dp-sgd", seed=None)
    one, other = (make_trainer(resolve(**chosen).plan) for _ in range(2))
    other.state.theta.copy_(one.state.theta)
    rows = np.arange(9)
    sums = [one._clip_and_sum(rows).clone(), other._clip_and_sum(rows).clone()]
    one.state.step += 1
    sums.append(one._clip_and_sum(rows).clone())
    assert len({tuple(each.tolist()) for each in sums}) == 3


@pytest.mark.privacy
@pytest.mark.parametrize("model", ["RandomByChance", "RandomByAGlobal"])
def test_draws_that_no_seed_determines_are_refused(images: Path, model: str) -> None:
    with pytest.raises(ModelError, match="Draw random numbers with the global generators"):
        run_of(images, model, isolate=True)


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


def test_a_network_of_64_bits_is_isolated_once_it_is_converted(images: Path) -> None:
    double = images.with_name("double.py")
    double.write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.to(self[1].weight.dtype)).to(x.dtype)\n"
        "\ndef build():\n    return Net(nn.Flatten(), nn.Linear(192, 3)).double()\n"
    )
    typed = ("train", "--dataset", images, "--model", f"{double}:build", "--steps", "2",
             "--sigma", "2", "--device", "cpu", "--out", "double", "--isolate")  # fmt: skip
    refused = dpmac(*typed)
    assert refused.exit_code == 4
    assert "torch.float64, but a network that runs on each sample alone" in refused.stderr
    assert "network.float()" in refused.stderr
    assert not Path("double").exists()
    double.write_text(double.read_text().replace(".double()", ".double().float()"))
    assert dpmac(*typed).exit_code == 0


@pytest.mark.privacy
def test_products_with_weights_need_no_call(images: Path) -> None:
    trainer = make_trainer(resolve(**settings(images, "Transposing", optimizer="dp-sgd")).plan)
    assert not trainer.plan.isolated
    assert_a_record_moves_the_sum_by_at_most_one(trainer)


@pytest.mark.privacy
def test_weights_used_without_a_call_need_no_flag(images: Path) -> None:
    """A note names the layer, the cause and the price, and the report says why."""
    chosen = settings(images, "ReadingKernels", optimizer="dp-sgd")
    done = finish(train(resolve(**chosen).plan))
    said = done.report["model"]["independence"]
    cause = "The calls of layer first do not give its complete gradient"
    assert (said["kind"], cause in said["statement"]) == ("isolated", True)
    [started] = [event for event in train(resolve(**chosen).plan) if isinstance(event, Started)]
    [note] = [note for note in started.notes if "run on each sample alone" in note]
    assert cause in note
    [price] = [note for note in started.notes if "times as long as batches" in note]
    assert re.search(r"about [1-9]\S* times as long as batches in plain training", price)
    trainer = make_trainer(resolve(**chosen).plan)
    assert trainer.plan.isolated
    assert_a_record_moves_the_sum_by_at_most_one(trainer)


@pytest.mark.privacy
def test_attention_over_the_batch_is_refused_with_its_cause(images: Path) -> None:
    with pytest.raises(ModelError, match=r"mixes samples: .*layer attend"):
        run_of(images, "AttentionOverBatch")
