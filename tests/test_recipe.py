"""Schedules, weight decay, averaged weights and views."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import AUGMENTS
from dpmac_cli.dp.geometry import NO_CLIPPING
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.augmentation import views_of
from dpmac_cli.training.evaluation import evaluate
from tests.conftest import every_optimizer
from tests.helpers import (
    HYPER,
    MECHANISM,
    PLAN,
    Batches,
    a_key,
    make_trainer,
    planned,
    tiny_data,
    tiny_model,
    walk,
)

BATCHES = [[0, 3, 7, 9, 12], [5], [], [1, 2, 30, 31], *([i, 2 * i] for i in range(1, 17))]


def trained_by(plan: Plan, name: str = "dp-adam", **options: Any) -> Trainer:
    return make_trainer(name, plan=plan, **options)


# The learning rate.


def test_with_schedule_and_decay_is_torchs_own() -> None:
    plan = planned(lr_schedule="cosine", weight_decay=0.1)
    ours = make_trainer(
        "dp-adam",
        GaussianMechanism(0.0, MECHANISM.expected_batch),
        plan=plan,
        sampler=Batches(*BATCHES),
        clip_norm=NO_CLIPPING,
    )
    data, model = tiny_data(), tiny_model()
    betas = (HYPER.beta1, HYPER.beta2)
    adamw = torch.optim.AdamW(model.parameters(), HYPER.lr, betas, HYPER.gamma, weight_decay=0.1)
    schedule = CosineAnnealingLR(adamw, PLAN.event.steps)
    for rows in BATCHES:
        adamw.zero_grad()
        logits = model(data.standardised(data.train.images[rows]))
        loss = cross_entropy(logits, data.train.labels[rows], reduction="sum")
        (loss / MECHANISM.expected_batch).backward()  # type: ignore[no-untyped-call]
        adamw.step()
        schedule.step()
    theirs = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(walk(ours, PLAN.event.steps)[-1], theirs, rtol=0, atol=1e-9)


@pytest.mark.promise("views")
@every_optimizer
def test_noise_is_not_scaled_by_the_schedule(name: str) -> None:
    """A smaller rate moves the weights less; the private mean and its noise stay as priced."""
    means = []
    slower = planned(lr_schedule="cosine", warmup_steps=5, weight_decay=0.1, ema=0.9)
    for plan in (PLAN, slower):
        trainer = trained_by(plan, name, lr=0.0)  # else gradients would differ
        walk(trainer, 3)
        means.append({**trainer.state.tensors()})
    for key in means[0]:
        torch.testing.assert_close(means[1][key], means[0][key], msg=key)


# Averaged weights.


@every_optimizer
def test_the_average_is_of_the_weights_and_moves_nothing(name: str) -> None:
    averaged, plain = trained_by(planned(ema=0.7), name), make_trainer(name)
    expected = plain.state.theta.clone()
    thetas = walk(averaged, 12)
    assert torch.equal(thetas, walk(plain, 12))
    for step, theta in enumerate(thetas, start=1):
        decay = min(0.7, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * theta
    assert averaged.state.average is not None
    torch.testing.assert_close(averaged.state.average, expected)


def test_what_is_scored_and_published_is_the_average() -> None:
    trainer = trained_by(planned(ema=0.9))
    walk(trainer, 12)
    scored = trainer.evaluate()
    theta, average = trainer.state.theta.clone(), trainer.state.average
    assert average is not None
    with trainer.published() as model:
        weights = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(weights, average)
        assert evaluate(model, trainer.data, trainer.data.tested).loss == scored.loss
    assert torch.equal(trainer.state.theta, theta)
    assert evaluate(trainer.model, trainer.data, trainer.data.tested).loss != scored.loss


# Views.


def pictures(count: int = 6, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def random_words(records: int, count: int) -> NDArray[np.uint64]:
    return np.random.default_rng(3).integers(0, 2**64, (records, count), np.uint64)


def crops(image: Tensor, reach: int) -> list[Tensor]:
    """Every crop of an image, by torch's own padding."""
    padded = nn.functional.pad(image.float(), [reach] * 4, mode="reflect").to(image.dtype)
    side, places = image.shape[-1], range(2 * reach + 1)
    return [padded[:, y : y + side, x : x + side] for y in places for x in places]


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("side", [8, 16])
def test_views_are_crops_and_flips_of_their_own_image(augment: str, side: int) -> None:
    """All of them turn up, and nothing else does."""
    images, count = pictures(2, side), 600
    views = views_of(images, random_words(2, count), augment)
    assert views.shape == (2 * count, 3, side, side)
    assert views.dtype == torch.uint8
    for image, mine in zip(images, views.view(2, count, *images.shape[1:]), strict=True):
        allowed = crops(image, side // 8) if "crop" in augment else [image]
        if "flip" in augment:
            allowed += [crop.flip(-1) for crop in allowed]
        seen = {view.numpy().tobytes() for view in mine}
        assert seen == {view.contiguous().numpy().tobytes() for view in allowed}


@pytest.mark.promise("views")
def test_a_view_depends_on_no_other_image() -> None:
    images = pictures()
    other = images.clone()
    other[2] = 255 - other[2]
    words = random_words(6, 4)
    views = [views_of(given, words, "crop+flip") for given in (images, other)]
    differ = (views[0] != views[1]).flatten(1).any(1)
    assert differ.view(6, 4).any(1).tolist() == [i == 2 for i in range(6)]


@pytest.mark.promise("views")
def test_the_views_of_a_record_depend_on_no_other_record() -> None:
    """They are a function of the seed, the step and its index: they need no secrecy."""
    layers, records = LayerDraws(a_key(5)), np.array([3, 8, 9, 2**33])
    words = layers.words(4, records, 6)
    for row, record in zip(words, records, strict=True):
        assert np.array_equal(layers.words(4, np.array([record]), 6)[0], row)
        assert np.array_equal(layers.words(4, np.array([0, 5, record, 11]), 6)[2], row)
    assert len(np.unique(words)) == words.size
    for other in (
        layers.words(5, records, 6),
        LayerDraws(a_key(6)).words(4, records, 6),
    ):
        assert not np.isin(other, words).any()


@pytest.mark.promise("views")
@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_a_record_is_seen_alike_in_every_batch_and_chunk(chunk: int) -> None:
    plan, seen = planned(augmentations=3, augment="flip"), []
    for rows in ([4], [0, 4, 9], [1, 2, 3, 4]):
        trainer = trained_by(plan, sampler=Batches(rows))
        trainer.state.chunk = chunk
        inputs: list[Tensor] = []

        def note(
            x: Tensor, *rest: Any, to: Any = inputs, of: Any = trainer.sums.clipped_sum.of
        ) -> None:
            to.append(x[rest[-1]])
            of(x, *rest)

        trainer.sums.clipped_sum.of = note  # type: ignore[assignment,method-assign]
        trainer.step()
        seen.append(torch.cat(inputs).view(len(rows), 3, -1))
    [alone] = seen[0]
    for views in seen[1:]:  # at a place of its own
        assert [torch.equal(of, alone) for of in views].count(True) == 1


def test_layers_draw_anew_in_every_step_and_alike_in_a_step() -> None:
    """Else dropout would leave out the same units in all of them."""
    layers, masks = LayerDraws(a_key(5)), []
    for step in (0, 1, 2, 1):
        with layers.of(step):
            masks.append(nn.Dropout()(torch.ones(64)))
    assert len({mask.numpy().tobytes() for mask in masks}) == 3
    assert torch.equal(masks[1], masks[3])


# Whole runs.


def test_a_table_has_no_views(tmp_path: Path) -> None:
    from tests.test_own_runs import wine  # noqa: PLC0415

    with pytest.raises(InputError, match="have the shape"):
        resolve({"dataset": wine(str(tmp_path / "wine.npz")), "augmentations": "2"})
