"""Per-sample losses: their gradients, and that a sample's is its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, softmax

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import Loss, build_loss, check_loss
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from tests.helpers import numbers

SAMPLES, CLASSES = 7, 3
CPU = torch.device("cpu")
WEIGHTS = (0.5, 2.0, 3.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def records(*, several: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64)
    y = torch.randint(2, (SAMPLES, CLASSES), dtype=torch.uint8)
    return x, y if several else torch.arange(SAMPLES) % CLASSES


def focal(output: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    p = softmax(output, 1).gather(1, y[:, None])[:, 0]
    return -weights[y] * (1 - p) ** 2 * p.log()


def smoothed(output: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    logs = log_softmax(output, 1)
    true, others = nll_loss(logs, y, weights, reduction="none"), -(logs * weights).sum(1)
    return 0.9 * true + 0.1 * others / CLASSES


CASES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "cross-entropy": (
        ("cross-entropy", 0.0, ()),
        lambda o, y, w: cross_entropy(o, y, reduction="none"),
    ),
    "weighted": (
        ("cross-entropy", 0.0, WEIGHTS),
        lambda o, y, w: w[y] * cross_entropy(o, y, reduction="none"),
    ),
    "smoothed": (("cross-entropy", 0.1, WEIGHTS), smoothed),
    "focal": (("focal", 0.0, WEIGHTS), focal),
}


def gradients(loss: Loss, *, several: bool) -> Tensor:
    """The sum of all gradients, by a ball that clips none."""
    model, (x, y) = network(), records(several=several)
    labels = Structure(torch.zeros_like(y[:1]), keep=True)
    per_sample = PerSample(model, numbers(5), labels, loss=loss)
    theta = flatten_parameters(per_sample.layers)
    out = torch.empty_like(theta)
    ClippedChunkSum(per_sample, SAMPLES).of(x, y, RegionMetric(ball(1e4, theta)), out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(name: str) -> None:
    given, reference = CASES[name]
    several = name == "bce"
    kind, smoothing, factors = given
    loss = build_loss(kind, smoothing, factors, CPU)
    weights = torch.tensor(factors or [1.0] * CLASSES, dtype=torch.float64)
    model, (x, y) = network(), records(several=several)
    torch.autograd.backward(reference(model(x), y, weights).sum())
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = gradients(loss, several=several)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["mse", "huber", "quantile:0.9"])
def test_numbers_in_another_shape_are_not_compared_with_every_sample(name: str) -> None:
    outputs, targets = torch.zeros(5, 1), torch.linspace(-1, 1, 5)
    with pytest.raises(ModelError, match="one output for each number"):
        build_loss(name)(outputs, targets)
    assert build_loss(name)(outputs, targets[:, None]).shape == (5,)


def _centred(output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output - output.mean(0, keepdim=True) * 0.5, y, reduction="none")


def _contrastive(output: Tensor, y: Tensor) -> Tensor:
    """InfoNCE: each sample against all others."""
    return cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none")


def _ranking(output: Tensor, y: Tensor) -> Tensor:
    return (output[:, None, 0] - output[None, :, 0]).relu().mean(1)


def _hardest(output: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(output, y, reduction="none")
    return losses * (losses >= losses.median())


@pytest.mark.privacy
@pytest.mark.parametrize("loss", [_centred, _contrastive, _ranking, _hardest])
def test_a_loss_that_needs_a_batch_is_refused_and_sees_one_sample(loss: Loss) -> None:
    x, y = records(several=False)
    outputs = network()(x).detach()
    with pytest.raises(ModelError, match="something else for a batch than for one sample"):
        check_loss(loss, outputs, y)
    model = network()
    rows = [slice(i, i + 1) for i in range(len(x))]
    total = torch.stack([loss(model(x[row]), y[row]).sum() for row in rows]).sum()
    found = gradients(loss, several=False)
    if not total.requires_grad:
        assert not found.any()
        return
    parameters = list(model.parameters())
    expected = torch.autograd.grad(total, parameters, materialize_grads=True)
    torch.testing.assert_close(
        found, torch.cat([g.flatten() for g in expected]), rtol=1e-7, atol=1e-9
    )


def test_a_loss_that_vmap_cannot_run_is_run_in_a_loop() -> None:
    def branching(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y) * (2.0 if output.sum().item() > 0 else 1.0)

    x, y = records(several=False)
    model = network()
    total = torch.stack([branching(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])
    expected = torch.autograd.grad(total.sum(), list(model.parameters()))
    found = gradients(branching, several=False)
    torch.testing.assert_close(
        found, torch.cat([g.flatten() for g in expected]), rtol=1e-7, atol=1e-9
    )


def test_losses_that_are_none_are_refused() -> None:
    output, y = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    kept: list[float] = []

    def counting(output: Tensor, y: Tensor) -> Tensor:
        kept.append(1.0)
        return cross_entropy(output, y) * len(kept)

    for bad in (
        counting,
        lambda o, y: cross_entropy(o, y) + torch.rand(()),
        lambda o, y: cross_entropy(o, y) / 0,
        lambda o, y: y,
    ):
        with pytest.raises(ModelError, match="one finite real number per sample"):
            check_loss(bad, output, y)
    with pytest.raises(ModelError, match=r"The loss failed on one sample.*\(1, 3\).*reduction"):
        check_loss(lambda o, y: o, output, y)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(torch.tensor(WEIGHTS)),
        nn.NLLLoss(torch.tensor(WEIGHTS)),
        lambda output, target: cross_entropy(output, target, torch.tensor(WEIGHTS)),
        lambda output, target: 2 * nll_loss(log_softmax(output, 1), target, torch.tensor(WEIGHTS)),
    ],
)
def test_class_weights_that_would_cancel_are_refused(loss: Loss) -> None:
    """The mean over one sample is divided by its own weight."""
    outputs, labels = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    with pytest.raises(ModelError, match=r"Class weights.*reduction='sum'.*class_weights="):
        check_loss(loss, outputs, labels)


def test_the_remedies_for_means_work() -> None:
    outputs, labels = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    check_loss(nn.CrossEntropyLoss(torch.tensor(WEIGHTS), reduction="sum"), outputs, labels)
    with pytest.raises(ModelError, match=r"With ignore_index use reduction='sum'"):
        check_loss(nn.CrossEntropyLoss(ignore_index=1), outputs, labels)
    check_loss(nn.CrossEntropyLoss(ignore_index=1, reduction="sum"), outputs, labels)
    check_loss(nn.CrossEntropyLoss(label_smoothing=0.1), outputs, labels)
