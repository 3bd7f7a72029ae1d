"""The loop around the steps: when it scores, when it ends, and what it says."""

import math
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, recall_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli.dp.clipping import layers
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import DivergedError
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.evaluation import RECORDS, Evaluation, evaluate
from dpmac_cli.training.schedules import StepPlan
from tests.conftest import every_optimizer
from tests.helpers import (
    DIMENSION,
    Batches,
    KeptNoise,
    Spy,
    make_trainer,
    tiny_data,
    tiny_model,
    walk,
)

T = StepPlan(steps=12, steps_per_epoch=5, physical_batch=1000)


def never() -> bool:
    return False


def facts(result: Evaluation) -> tuple[float, list[list[int]]]:
    """What can be compared."""
    return result.loss, result.confusion.tolist()


def score(trainer: Trainer) -> tuple[float, list[list[int]]]:
    """The test set scored now."""
    return facts(evaluate(trainer.model, trainer.data, trainer.data.test))


# Evaluation.


@pytest.mark.parametrize("tail", [-1, 0, 1, 5, RECORDS])
def test_every_sample_is_scored(tail: int) -> None:
    """The last partial batch too."""
    count = RECORDS + tail
    data, model = tiny_data(records=count), tiny_model()
    result = evaluate(model, data, data.train)
    logits = model(data.standardised(data.train.images))
    truth, guess = data.train.labels.numpy(), logits.argmax(1).numpy()
    assert result.samples == count
    assert (result.confusion.numpy() == confusion_matrix(truth, guess)).all()
    assert result.confusion.dtype == torch.int64
    assert result.accuracy == pytest.approx(accuracy_score(truth, guess))
    assert result.per_class == pytest.approx(recall_score(truth, guess, average=None).tolist())
    assert result.loss == pytest.approx(cross_entropy(logits, data.train.labels).item())


def test_an_output_that_is_no_number_is_wrong_and_counted_apart() -> None:
    data, network = tiny_data(records=40), tiny_model()
    whole = evaluate(network, data, data.train)
    assert whole.unanswered == 0
    labels, classes = data.train.labels, len(whole.confusion)

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = network(x)
            logits[::4, 1] = torch.nan
            return logits

    result = evaluate(Broken(), data, data.train)
    lost = torch.arange(len(labels)) % 4 == 0
    assert result.unanswered == int(lost.sum())
    assert result.samples == len(labels)
    right = network(data.standardised(data.train.images)).argmax(1) == labels
    assert result.accuracy == int((right & ~lost).sum()) / len(labels)
    kept = torch.bincount(labels[~lost], minlength=classes)
    assert torch.equal(result.confusion.sum(1), kept)
    shares = [float((right & ~lost)[labels == k].double().mean()) for k in range(classes)]
    assert result.per_class == pytest.approx(shares)


class WhenTraining(nn.Module):
    """Spoils its input in training mode, as dropout does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 if self.training else x


@pytest.mark.parametrize("training", [True, False])
def test_models_are_scored_in_evaluation_mode_and_put_back(training: bool) -> None:
    data, plain = tiny_data(), tiny_model()
    model = tiny_model(torch.float64, WhenTraining()).train(training)
    assert facts(evaluate(model, data, data.test)) == facts(evaluate(plain, data, data.test))
    assert [module.training for module in model.modules()] == [training] * 6


# The loop.


@every_optimizer
def test_divergence_is_an_error(name: str) -> None:
    trainer = make_trainer(name, plan=T, lr=math.inf)
    steps = (trainer.take() for _ in range(T.steps))
    with pytest.raises(DivergedError, match=r"diverged: after step 5 .*--lr"):
        list(steps)


# Blocks.


def in_blocks_of(size: int, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Trainer:
    """A trainer that goes through its vectors in blocks of about this size."""
    with monkeypatch.context() as patch:
        patch.setattr(layers, "BLOCK", size)
        trainer = make_trainer(*args, **kwargs)
    assert len(trainer._blocks) == max(1, round(DIMENSION / size))
    return trainer


@every_optimizer
@pytest.mark.parametrize("choice", ["paper", "tracked"])
def test_blocks_do_not_show(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = GaussianMechanism(0.0, 8)
    whole, parts = (
        in_blocks_of(size, monkeypatch, name, quiet, kappa=choice, phi=choice) for size in (1000, 7)
    )
    torch.testing.assert_close(walk(parts, 12), walk(whole, 12), rtol=0, atol=1e-12)
    assert parts.state.tensors().keys() == whole.state.tensors().keys()
    for key, tensor in parts.state.tensors().items():
        torch.testing.assert_close(tensor, whole.state.tensors()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.promise("noise")
@every_optimizer
def test_every_coordinate_gets_noise_of_its_own_from_its_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, spy = KeptNoise(), Spy(1.0, 8)
    trainer = in_blocks_of(7, monkeypatch, name, spy, sampler=Batches([]), noise=noise)
    count = len(trainer._blocks)
    walk(trainer, 3)
    assert [len(z) for z in noise.drawn] == 3 * [b.stop - b.start for b in trainer._blocks]
    for step in range(3):
        drawn = torch.cat(noise.drawn[step * count : (step + 1) * count])
        seen = torch.cat([spy.whitened_sum(step * count + i) for i in range(count)])
        torch.testing.assert_close(seen, drawn)
        assert len(drawn) == DIMENSION
    assert len(torch.unique(torch.cat(noise.drawn))) == 3 * DIMENSION
