"""Weights of records: they multiply gradients after clipping, keep their ratios and the bound."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.utils.data import TensorDataset

from dpmac_cli import ArrayData, InputError, Poisson, PrivateStep, clipped_grad, make_private
from dpmac_cli.config.class_weights import class_weights, mean_weight
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import build_loss, build_weights
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, ball, ellipsoid
from dpmac_cli.dp.weights import RecordWeights, Weigh, WeightsApart, bounded
from dpmac_cli.errors import ModelError
from dpmac_cli.release.card import answered_card
from dpmac_cli.runs.resolve import resolve
from tests.conftest import every_optimizer
from tests.helpers import (
    CLASSES,
    CLIP_LIMIT,
    PLAN,
    Batches,
    make_trainer,
    per_sample_gradients,
    place,
    planned,
    tiny_data,
)

from .dp.reference import whiten

CPU = torch.device("cpu")
RECORDS, INPUTS = 12, 4
CLASS_WEIGHTS = (0.2, 1.0, 3.0)
WEIGHT = torch.tensor(CLASS_WEIGHTS)
#: Its types have no weight.
SQUARED: Any = F.mse_loss


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, len(CLASS_WEIGHTS)))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, INPUTS, generator=generator)
    return x * torch.linspace(0.05, 4, RECORDS)[:, None], torch.arange(RECORDS) % len(CLASS_WEIGHTS)


def region_of(kind: str, size: int) -> Ellipsoid:
    """A region that clips some of the records, a ball about 0 or an ellipsoid."""
    generator = torch.Generator().manual_seed(2)
    if kind == "ball":
        return ball(1.0)
    centre, scale = (torch.randn(size, generator=generator) for _ in range(2))
    return ellipsoid(0.05 * centre, torch.exp(0.3 * scale))


def gradients_of(losses: Callable[[nn.Module, int], Tensor]) -> Tensor:
    """The gradient of each record by autograd, float64, shape (records, d)."""
    alone, found = net().double(), []
    for row in range(RECORDS):
        g = torch.autograd.grad(losses(alone, row), list(alone.parameters()))
        found.append(torch.cat([part.flatten() for part in g]))
    return torch.stack(found)


def plain_loss(network: nn.Module, row: int) -> Tensor:
    x, y = rows()
    return F.cross_entropy(network(x[row : row + 1].double()), y[row : row + 1])


def margin_loss(network: nn.Module, row: int) -> Tensor:
    x, y = rows()
    outputs = network(x[row : row + 1].double())
    return F.multi_margin_loss(outputs, y[row : row + 1], margin=9.0)


def expected_sum(g: Tensor, weights: Tensor, region: Ellipsoid) -> Tensor:
    """sum of w c (g - m), float64."""
    norms = whiten(g, region).norm(dim=1)
    factors = weights.double() * (1 / norms).clamp(max=1)
    total: Tensor = (factors[:, None] * (g - region.centre.double())).sum(0)
    return total


class Sums:
    """The clipped sum of a network's records, as the engine computes it."""

    def __init__(self, loss: Any, weigh: Weigh | None = None, *, rowwise: bool = False) -> None:
        x, y = rows()
        self.network = net()
        self.per_sample = PerSample(
            self.network,
            Structure(x[:1]),
            Structure(y[:1], keep=True),
            loss=loss,
            rowwise=rowwise,
            weigh=weigh,
        )
        self.theta = flatten_parameters(self.per_sample.layers)
        self.clipped_sum = ClippedChunkSum(self.per_sample)

    def of(self, region: Ellipsoid, some: Sequence[int] = range(RECORDS)) -> Tensor:
        x, y = (part[list(some)] for part in rows())
        out = torch.empty_like(self.theta)
        self.clipped_sum.of(x, y, RegionMetric(region), out)
        return out


def by_feature(x: Tensor, _: Tensor) -> Tensor:
    return x[:, 0].abs() / 20


def loss_with_weights(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    return nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS), reduction=reduction)


def negative_log_likelihood(outputs: Tensor, labels: Tensor) -> Tensor:
    logs = F.log_softmax(outputs, 1)
    return 7 * F.nll_loss(logs, labels, weight=torch.tensor(CLASS_WEIGHTS))


OF_CLASS = torch.tensor(CLASS_WEIGHTS)[rows()[1]] / max(CLASS_WEIGHTS)
OF_FEATURE = by_feature(*rows()).clamp(max=1)
#: A loss and weights of records, whether they are built in, and the weights that they mean.
WAYS: dict[str, tuple[Any, Weigh | None, bool, Tensor]] = {
    "class weights": (
        build_loss("cross-entropy"),
        build_weights("cross-entropy", CLASS_WEIGHTS, CPU),
        True,
        OF_CLASS,
    ),
    "cross-entropy, mean": (loss_with_weights("mean"), None, False, OF_CLASS),
    "cross-entropy, sum": (loss_with_weights("sum"), None, False, OF_CLASS),
    "cross-entropy, none": (loss_with_weights("none"), None, False, OF_CLASS),
    "negative log-likelihood": (negative_log_likelihood, None, False, OF_CLASS),
    "margin": (
        lambda o, t: F.multi_margin_loss(o, t, weight=WEIGHT, margin=9.0),
        None,
        False,
        OF_CLASS,
    ),
    "weights=": (F.cross_entropy, RecordWeights(by_feature, 1.0, "x", "y"), False, OF_FEATURE),
}


@pytest.mark.promise("one")
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_multiply_gradients_after_clipping(way: str, kind: str, looped: bool) -> None:
    loss, weigh, rowwise, meant = WAYS[way]
    sums = Sums(loss, weigh, rowwise=rowwise)
    if looped:
        sums.per_sample.run_in_a_loop("a test.")
    region = region_of(kind, len(sums.theta))
    scale = 7 if loss is negative_log_likelihood else 1
    g = scale * gradients_of(margin_loss if way == "margin" else plain_loss)
    norms = whiten(g, region).norm(dim=1)
    assert bool((norms > 1).any())
    assert scale > 1 or way == "margin" or bool((norms < 1).any())
    torch.testing.assert_close(
        sums.of(region).double(), expected_sum(g, meant, region), rtol=2e-3, atol=2e-3
    )


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("way", WAYS)
def test_removing_a_record_moves_the_weighted_sum_by_at_most_one(way: str, kind: str) -> None:
    loss, weigh, rowwise, meant = WAYS[way]
    sums = Sums(loss, weigh, rowwise=rowwise)
    region = region_of(kind, len(sums.theta))
    whole, everyone = sums.of(region).double().clone(), set(range(RECORDS))
    for row in range(RECORDS):
        moved = whole - sums.of(region, sorted(everyone - {row})).double()
        size = float((moved / region.scale.double()).norm())
        assert size <= float(meant[row]) + 1e-6


ODD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.3, 1.0, 1e30, 1 + 1e-7)


@pytest.mark.promise("one")
def test_a_weight_is_from_0_to_1_whatever_a_record_makes_of_it() -> None:
    value, cut = bounded(torch.tensor(ODD, dtype=torch.float64))
    assert value.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.3, 1.0, 1.0, 1.0]
    assert cut.tolist() == [True, True, True, True, False, False, False, True, True]


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("looped", [False, True])
def test_records_that_choose_their_weights_move_the_sum_by_at_most_one(
    looped: bool, kind: str
) -> None:
    def chosen(_: Tensor, labels: Tensor) -> Tensor:
        return torch.tensor([1e9, -1e9, math.nan])[labels]

    sums = Sums(F.cross_entropy, RecordWeights(chosen, 1.0, "x", "y"))
    if looped:
        sums.per_sample.run_in_a_loop("a test.")
    region = region_of(kind, len(sums.theta))
    torch.testing.assert_close(
        sums.of(region).double(),
        expected_sum(gradients_of(plain_loss), (rows()[1] == 0).double(), region),
        rtol=2e-3,
        atol=2e-3,
    )
    assert int(sums.clipped_sum.cut) == RECORDS


def test_positive_weights_of_one_output_are_those_of_its_label() -> None:
    x = torch.randn(RECORDS, 3)
    y = (torch.arange(RECORDS) % 3 == 0).float()

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = network(batch[0]).squeeze(1)
        return F.binary_cross_entropy_with_logits(
            outputs, batch[1], pos_weight=torch.tensor(4.0), reduction="none"
        )

    clipped = clipped_grad(nn.Linear(3, 1), loss, ball(0.1), batch_size=RECORDS)
    sizes = [float(clipped((x[i : i + 1], y[i : i + 1])).norm()) for i in range(RECORDS)]
    wanted = torch.where(y == 1, 0.1, 0.025)  # every gradient is longer than the ball
    torch.testing.assert_close(torch.tensor(sizes), wanted, rtol=2e-3, atol=0)


def test_weights_of_labels_that_torch_ignores_and_of_rare_negatives() -> None:
    outputs = torch.randn(3, 3)
    labels = torch.tensor([0, -100, 2])
    with WeightsApart(3) as apart:
        found = F.cross_entropy(outputs, labels, weight=WEIGHT)
    torch.testing.assert_close(found, F.cross_entropy(outputs, labels, weight=WEIGHT))
    assert apart.weights is not None
    torch.testing.assert_close(apart.weights.float(), torch.tensor([0.2, 0, 3]) / 3)
    answers = torch.tensor([1.0, 0.0, 1.0])
    with WeightsApart(3) as apart:
        F.binary_cross_entropy_with_logits(outputs[:, 0], answers, pos_weight=torch.tensor(0.5))
    assert apart.weights is not None
    assert apart.weights.tolist() == [0.5, 1, 0.5]


@pytest.mark.promise("one")
def test_weights_multiply_a_sum_of_a_program() -> None:
    clipped = [
        clipped_grad(net(), pair_loss, ball(1.0), batch_size=RECORDS, weights=given)(rows())
        for given in (None, lambda batch: torch.full((1,), 0.5))
    ]
    torch.testing.assert_close(clipped[1], clipped[0] / 2)


def test_weights_that_vmap_computes_otherwise_are_computed_in_a_loop() -> None:
    def odd(x: Tensor, _: Tensor) -> Tensor:
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
        return torch.full((1,), 1.0 if mapped else 0.5)

    assert not Sums(F.cross_entropy, RecordWeights(odd, 1.0, "x", "y")).per_sample.vmapped


def test_rows_that_fill_a_chunk_have_no_weight_to_cut() -> None:
    sums = Sums(F.cross_entropy, RecordWeights(lambda x, y: 2.0 + y, 1.0, "x", "y"))
    out = torch.empty_like(sums.theta)
    sums.clipped_sum.of(*rows(), RegionMetric(ball(1.0)), out, torch.arange(RECORDS) < 5)
    assert int(sums.clipped_sum.cut) == 5


def test_a_run_trains_on_the_loss_of_its_settings() -> None:
    losses = []
    for plan in (PLAN, planned(label_smoothing=0.5), planned(loss="focal")):
        trainer = make_trainer("dp-sgd", plan=plan)
        per_sample = trainer.sums.per_sample
        found, *_ = per_sample(*per_sample.made_up(2))
        losses.append(found)
    assert not any(one.allclose(other) for one, other in combinations(losses, 2))


@pytest.mark.promise("unit")
def test_a_unit_adds_the_clipped_mean_of_its_weighted_gradients_times_its_mean_weight() -> None:
    x, y = (part.view(4, 3, *part.shape[1:]) for part in rows())
    for loss, weigh in (
        (build_loss("cross-entropy"), build_weights("cross-entropy", CLASS_WEIGHTS, CPU)),
        (loss_with_weights("mean"), None),
        (loss_with_weights("none"), None),
        (
            lambda o, t: F.cross_entropy(o, t, reduction="none"),
            RecordWeights(lambda _, t: torch.tensor(CLASS_WEIGHTS)[t], 3.0, "x", "y"),
        ),
    ):
        per_sample = PerSample(
            net(), Structure(x[:1]), Structure(y[:1], keep=True), 3, loss, weigh=weigh
        )
        theta = flatten_parameters(per_sample.layers)
        out = torch.empty_like(theta)
        ClippedChunkSum(per_sample).of(x, y, RegionMetric(ball(1.0)), out)
        g, w = gradients_of(plain_loss).view(4, 3, -1), OF_CLASS.double().view(4, 3)
        of_unit = (w[:, :, None] * g).sum(1) / w.sum(1, keepdim=True)
        expected = expected_sum(of_unit, w.mean(1), ball(1.0))
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@every_optimizer
def test_the_mean_of_every_optimizer_has_the_weights(name: str) -> None:
    """Released is m + sum w c (g - m) / B, in the region of its step."""
    weights = (0.25, 1.0, 2.0, 4.0)
    plan = planned(class_weights=",".join(map(str, weights)))
    rows, data = [0, 3, 7, 9, 12, 20], tiny_data()
    trainer = make_trainer(name, GaussianMechanism(0.0, 8), plan=plan, sampler=Batches(*[rows] * 3))
    trainer.step()
    region = replace(trainer.state.region)
    centre, scale = region.centre.double().clone(), region.scale.double().clone()
    place(trainer, region)
    theta = trainer.state.theta.double().numpy().copy()
    g = torch.from_numpy(per_sample_gradients(theta, data, rows))
    w = torch.tensor(weights)[data.train.labels[rows]] / max(weights)
    c = (CLIP_LIMIT / ((g - centre) / scale).norm(dim=1)).clamp(max=1)
    wanted = centre + ((w * c)[:, None] * (g - centre)).sum(0) / 8
    released: list[Tensor] = []
    update = type(trainer.plan.optimizer).update

    def noted(self: Any, theta: Tensor, eta: float, private: Any, moments: Any) -> None:
        released.append(private.value.clone())
        update(self, theta, eta, private, moments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.plan.optimizer), "update", noted)
        trainer.step()
    torch.testing.assert_close(torch.cat(released), wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("name", "factor"), [("dp-sgd", 4.0), ("adaclip", 4.0), ("dp-adam", 1.0)])
def test_rates_of_proportional_updates_are_divided_by_the_mean_weight(
    name: str, factor: float
) -> None:
    moved = []
    weighed = planned(class_weights="1,2,2,8", shares="0.5,0.25,0.125,0.125")
    for plan in (planned(class_weights=",".join("1" * CLASSES)), weighed):
        trainer = make_trainer(name, plan=plan, sampler=Batches([]))  # noise alone
        before = trainer.state.theta.clone()
        trainer.step()
        moved.append(trainer.state.theta - before)
    assert mean_weight(weighed.settings) == 0.28125
    torch.testing.assert_close(moved[1], moved[0] * (1 / 0.28125 if factor > 1 else 1))


def test_a_quantile_is_the_absolute_error_with_weights() -> None:
    """Its gradient is that of the pinball loss, divided by the larger of q and 1 - q."""
    outputs = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None].requires_grad_()
    targets = torch.zeros(9, 1, dtype=torch.float64)
    for level in (0.1, 0.5, 0.9):
        weigh = build_weights(f"quantile:{level}", (), CPU)
        assert weigh is not None
        losses = build_loss(f"quantile:{level}")(outputs, targets)
        (g,) = torch.autograd.grad(losses.sum(), outputs)
        errors = targets - outputs
        pinball = torch.maximum(level * errors, (level - 1) * errors)
        (wanted,) = torch.autograd.grad(pinball.sum(), outputs)
        found = g[:, 0] * bounded(weigh((), targets, outputs)).value
        # At an error of 0 the absolute error has gradient 0.
        torch.testing.assert_close(found, (wanted * (g != 0))[:, 0] / max(level, 1 - level))


# What cannot be taken apart, and what is refused.


def two(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, labels: loss(outputs, labels) + 2 * loss(outputs, labels)


REFUSED: dict[str, tuple[Any, str]] = {
    "smoothing": (
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),
        "cross_entropy with weight= and label smoothing.*weights=",
    ),
    "soft labels": (
        lambda o, t: F.cross_entropy(o, F.one_hot(t, 3).float(), weight=WEIGHT),
        "soft labels.*weights=",
    ),
    "two calls": (two(nn.CrossEntropyLoss(WEIGHT)), "a second time for one record.*weights="),
    "another term": (
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHT) + o.square().mean(),
        "adds other terms to a loss with class weights.*weights=",
    ),
    "several outputs": (
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, F.one_hot(t, 3).float(), pos_weight=WEIGHT
        ),
        "pos_weight= and 3 outputs per record.*weights=",
    ),
    "a target per position": (
        lambda o, t: F.cross_entropy(o.expand(5, 3), t.expand(5), weight=WEIGHT),
        "weight= and 5 targets per record.*weights=",
    ),
    "a weight of a probability": (
        lambda o, t: F.binary_cross_entropy(
            o[:, :1].sigmoid(), t[:, None].clamp(max=1).float(), weight=torch.tensor(3.0)
        ),
        "binary_cross_entropy with weight=.*weights=",
    ),
    "a weight of a number": (
        lambda o, t: SQUARED(o[:, :1], t[:, None].float(), weight=torch.full((1, 1), 3.0)),
        "mse_loss with weight=.*weights=",
    ),
    "a weight of the row": (
        lambda o, t: F.binary_cross_entropy_with_logits(
            o[:, :1], t[:, None].clamp(max=1).float(), weight=torch.tensor(3.0)
        ),
        "binary_cross_entropy_with_logits with weight=.*weights=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_clipping_would_undo_are_refused(case: str) -> None:
    loss, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        Sums(loss)


def pair_loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def private_step(weights: Any, **options: Any) -> PrivateStep:
    sampling = Poisson(n=RECORDS, batch_size=RECORDS)
    return PrivateStep(
        net(), pair_loss, sampling=sampling, sigma=1, steps=2, weights=weights, **options
    )


def test_weights_of_a_program_are_checked_before_the_first_step() -> None:
    with pytest.raises(InputError, match=r"weights must be a function weights\(batch\).*float"):
        private_step(2.0)
    with pytest.raises(InputError, match="largest_weight must be a number above 0, not 0"):
        private_step(lambda batch: batch[1], largest_weight=0)
    with pytest.raises(InputError, match="Row 2 of the example has the weight 2"):
        private_step(lambda batch: batch[1].float(), example=rows())
    step = private_step(lambda batch: batch[1].float(), largest_weight=2, example=rows())
    assert step.private_notes == ()
    for wrong, message in (
        (lambda batch: batch[0], r"returned \(1, 4\) for 1 record\."),
        (lambda batch: 1.0, "returned float for 1 record"),
        (lambda batch: batch["y"], "weights\\(batch\\) failed on one record: TypeError"),
    ):
        with pytest.raises(ModelError, match=message):
            private_step(wrong, example=rows())


@pytest.mark.promise("published")
def test_weights_that_were_cut_are_counted_for_the_owner_alone() -> None:
    step = private_step(lambda batch: batch[1].float() / 2 * 1.5)
    for batch in step.loader(TensorDataset(*rows())):
        step(batch)
    [note] = step.private_notes
    assert "8 records that a step used" in note  # the third class, in two steps of all records
    assert not any("largest_weight" in public for public in step.notes)


class Running(nn.Module):
    """Weighs a record by a running mean of all that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        mean: Any = self.mean
        mean.mul_(0.5).add_(x.mean())
        return torch.sigmoid(mean).expand(len(x))


class Counting:
    """Weighs a record by how many it has seen."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __call__(self, x: Tensor, _: Tensor) -> Tensor:
        self.seen += float(x.mean() > 0)
        return torch.full((len(x),), 1 / (1 + self.seen))


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kind", [Running, Counting])
def test_weights_that_keep_something_of_a_record_change_no_other(kind: Callable[[], Any]) -> None:
    """What they write goes to a copy, which the next record does not see."""
    sums = Sums(F.cross_entropy, RecordWeights(kind(), 1.0, "x", "y"))
    region = ball(1.0)
    each = [sums.of(region, [row]).double().clone() for row in range(RECORDS)]
    torch.testing.assert_close(sums.of(region).double(), torch.stack(each).sum(0))


@pytest.mark.promise("alone")
def test_weights_that_keep_something_elsewhere_are_refused() -> None:
    seen: list[int] = []

    def counting(x: Tensor, _: Tensor) -> Tensor:
        seen.append(1)
        return torch.full((len(x),), 1 / len(seen))

    with pytest.raises(ModelError, match="another weight for the same record again"):
        Sums(F.cross_entropy, RecordWeights(counting, 1.0, "x", "y"))


def test_a_function_of_the_record_and_class_weights_are_one_too_many() -> None:
    x, y = rows()
    data = ArrayData(x.numpy(), y.numpy(), x.numpy(), y.numpy(), low=-9, high=9, classes="abc")
    settings: dict[str, Any] = {"sigma": 1, "steps": 1, "batch_size": RECORDS}
    with pytest.raises(InputError, match="two ways to say the same"):
        make_private(net(), data, class_weights="1,1,2", weights=lambda x, y: y, **settings)
    with pytest.raises(ModelError, match=r"class weights, and weights= was given"):
        make_private(
            net(),
            data,
            loss=nn.CrossEntropyLoss(WEIGHT),
            weights=lambda x, y: y / 2,
            **settings,
        )


@pytest.mark.promise("said")
def test_report_and_card_name_the_weights(tmp_path: Path) -> None:
    x, y = rows()
    data = ArrayData(x.numpy(), y.numpy(), x.numpy(), y.numpy(), low=-9, high=9, classes="abc")
    settings: dict[str, Any] = {"sigma": 1, "steps": 1, "batch_size": RECORDS}
    said: dict[str, Any] = {
        "Its class weights, 0.3333, 0.6667, 1, multiply": {"class_weights": "1,2,3"},
        "The weights of cross_entropy, at most 1, multiply": {"loss": nn.CrossEntropyLoss(WEIGHT)},
        f"The weights of {__name__}:by_feature, at most 1, multiply": {"weights": by_feature},
    }
    for number, (sentence, given) in enumerate(said.items()):
        private = make_private(net(), data, **settings, **given)
        list(private)
        run = private.publish(tmp_path / str(number))
        texts = {"report": run.folder.joinpath("report.json").read_text(encoding="utf-8")}
        texts["card"] = answered_card(run.folder, {})
        for file, text in texts.items():
            assert sentence in " ".join(text.split()), file
            assert "facts taken from those" in text or "a fact taken from those" in text


# Settings.


def faults_of(**given: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolve({"dataset": "digits", "sigma": 1, **given})
    return str(caught.value)


def test_balanced_weights_are_the_inverse_of_declared_shares(uncalibrated: None) -> None:
    shares = ",".join(["0.05"] * 8 + ["0.1", "0.5"])
    plan = resolve(
        {"dataset": "digits", "sigma": 1, "class_weights": "balanced", "shares": shares}
    ).plan
    weights = class_weights(plan.settings)
    assert weights == pytest.approx([20] * 8 + [10, 2])
    assert mean_weight(plan.settings) == pytest.approx(10 / 20)
    assert ["needs the shares of the classes", "private"][0] in faults_of(class_weights="balanced")
    assert "--shares must be 10 numbers above 0 with the sum 1" in faults_of(
        class_weights="balanced", shares="0.5,0.5"
    )
    assert "--shares" in faults_of(shares=shares)
    assert "--class-weights must be 10 numbers above 0" in faults_of(class_weights="1,2")


@pytest.mark.parametrize("optimizer", ["adaclip", "dp-macadam", "dp-macadambc"])
def test_quantiles_need_an_optimizer_that_clips_about_0(optimizer: str) -> None:
    x = np.linspace(0, 1, 40)[:, None]
    data = ArrayData(x, x[:, 0], low=0, high=1, target_low=0, target_high=1)
    message = "which clips about a centre that moves.*--optimizer dp-adam, dp-sgd or dp-adambc"
    with pytest.raises(InputError, match=message):
        resolve({"dataset": data, "sigma": 1, "loss": "quantile:0.9", "optimizer": optimizer})


# Whole trainings.


def rare(records: int = 30_000) -> tuple[Any, Any]:
    """Inputs, and a class that 6 to 7% of the records have."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, 6)).clip(-3, 3)
    score = -3.6 + 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.6 * x[:, 2] * x[:, 3]
    return x, (rng.random(records) < 1 / (1 + np.exp(-score))).astype(int)


def balanced_accuracy(**given: Any) -> float:
    x, y = rare()
    data = ArrayData(x[:24_000], y[:24_000], x[24_000:], y[24_000:], low=-3, high=3, classes="ny")
    options: dict[str, Any] = {"epsilon": 3.0, "device": "cpu"} | given
    private = make_private(nn.Linear(6, 2), data, optimizer="dp-adam", lr=0.01, **options)
    list(private)
    return 100 * private.evaluate().metric("balanced-accuracy")


@pytest.mark.long
def test_a_rare_class_is_found_with_weights_as_without_privacy() -> None:
    """24,000 records, 6.5% of the class, epsilon 3; the balanced accuracy is 50 without weights."""
    given = {"class_weights": "1,15"}
    without_privacy = balanced_accuracy(no_dp=True, epsilon=None, **given)
    assert without_privacy > 72
    assert balanced_accuracy() < 60
    by_setting = balanced_accuracy(**given)
    by_loss = balanced_accuracy(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 15.0])))
    by_function = balanced_accuracy(weights=lambda x, y: 1.0 + 14 * y, largest_weight=15)
    for found in (by_setting, by_loss, by_function):
        assert abs(found - without_privacy) < 3


@pytest.mark.long
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_a_quantile_covers_its_share_of_the_test_records(level: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24_000, 6)).clip(-3, 3)
    y = 2 * x[:, 0] - x[:, 1] + 1.5 * rng.gumbel(size=len(x)) * (1 + 0.3 * np.abs(x[:, 2]))
    data = ArrayData(
        x[:18_000],
        y[:18_000],
        x[18_000:],
        y[18_000:],
        low=-3,
        high=3,
        target_low=-10,
        target_high=20,
    )
    for optimizer in ("dp-adam", "dp-sgd"):
        private = make_private(
            nn.Linear(6, 1),
            data,
            loss=f"quantile:{level}",
            epsilon=3,
            optimizer=optimizer,
            lr=0.05 if optimizer == "dp-sgd" else 0.01,
            device="cpu",
        )
        list(private)
        report = private.publish(tmp_path / optimizer).report
        assert abs(report["scores"]["at_or_below"]["value"] - level) < 0.03, json.dumps(
            report["scores"]
        )
