"""Schedules, weight decay, averaged weights and views."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler
from typer.testing import CliRunner

from dpmac_cli.cli.app import app
from dpmac_cli.config.resolve import change, resolve
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.config.sources import by_flag
from dpmac_cli.data.augmentation import views_of
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.geometry import NO_CLIPPING
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.models.registry import MODELS
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from dpmac_cli.runs.loop import Evaluated, fit
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.studies.grid import address
from dpmac_cli.training.evaluation import evaluate
from dpmac_cli.training.schedules import AUGMENTS, Recipe
from tests.conftest import OPTIMIZER_NAMES, every_optimizer
from tests.digits_runs import digits_config, same_weights, train_digits
from tests.helpers import (
    HYPER,
    MECHANISM,
    PLAN,
    Batches,
    Spy,
    a_key,
    make_trainer,
    tiny_data,
    tiny_model,
    walk,
)
from tests.tiers import one_in

#: Everything at a time.
ALL: dict[str, Any] = {
    "lr_schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "ema": 0.9,
    "augmentations": 3,
}
BATCHES = [[0, 3, 7, 9, 12], [5], [], [1, 2, 30, 31], *([i, 2 * i] for i in range(1, 17))]


def trained_by(recipe: Recipe, name: str = "dp-adam", **options: Any) -> Trainer:
    return make_trainer(name, plan=replace(PLAN, recipe=recipe), **options)


# The learning rate.


def rates(recipe: Recipe, steps: int) -> list[float]:
    return [recipe.rate(step, steps) for step in range(1, steps + 1)]


def by_torch(make: Callable[[Any], LRScheduler], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_are_torchs_own() -> None:
    cosine = by_torch(lambda optimizer: CosineAnnealingLR(optimizer, 30), 30)
    assert rates(Recipe("cosine"), 30) == pytest.approx(cosine)
    linear = by_torch(lambda optimizer: LinearLR(optimizer, 1.0, 0.0, 30), 30)
    assert rates(Recipe("linear"), 30) == pytest.approx(linear)
    assert rates(Recipe(), 30) == [1.0] * 30


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_rate_rises_to_its_peak_and_then_follows_its_schedule(schedule: str) -> None:
    found = rates(Recipe(schedule, warmup=4), 24)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:] == rates(Recipe(schedule), 20)
    assert min(found) > 0


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_with_schedule_and_decay_is_torchs_own(rule: str) -> None:
    """AdamW, and SGD whose weight decay is apart from the gradient."""
    recipe = Recipe("linear", weight_decay=0.1)
    plan = replace(PLAN, recipe=recipe)
    ours = make_trainer(
        f"dp-{rule}",
        GaussianMechanism(0.0, MECHANISM.expected_batch),
        plan=plan,
        sampler=Batches(*BATCHES),
        clip_norm=NO_CLIPPING,
    )
    data, model = tiny_data(), tiny_model()
    betas = (HYPER.beta1, HYPER.beta2)
    optimizer = (
        torch.optim.AdamW(model.parameters(), HYPER.lr, betas, HYPER.gamma, weight_decay=0.1)
        if rule == "adam"
        else torch.optim.SGD(model.parameters(), HYPER.lr)
    )
    schedule = LinearLR(optimizer, 1.0, 0.0, PLAN.steps)
    for rows in BATCHES:
        optimizer.zero_grad()
        logits = model(data.standardised(data.train.images[rows]))
        loss = cross_entropy(logits, data.train.labels[rows], reduction="sum")
        (loss / MECHANISM.expected_batch).backward()  # type: ignore[no-untyped-call]
        if rule == "sgd":
            for p in model.parameters():
                p.data.mul_(1 - optimizer.param_groups[0]["lr"] * 0.1)
        optimizer.step()
        schedule.step()
    theirs = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(walk(ours, PLAN.steps)[-1], theirs, rtol=0, atol=1e-9)


@pytest.mark.privacy
@every_optimizer
def test_noise_is_not_scaled_by_the_schedule(name: str) -> None:
    """A smaller rate moves the weights less; the private mean and its noise stay as priced."""
    means = []
    for recipe in (Recipe(), Recipe("cosine", 5, 0.1, 0.9)):
        trainer = trained_by(recipe, name, lr=0.0)  # else gradients would differ
        walk(trainer, 3)
        means.append({**trainer.state.tensors()})
    for key in means[0]:
        torch.testing.assert_close(means[1][key], means[0][key], msg=key)


# Averaged weights.


@every_optimizer
def test_the_average_is_of_the_weights_and_moves_nothing(name: str) -> None:
    recipe = Recipe(ema=0.7)
    averaged, plain = trained_by(recipe, name), make_trainer(name)
    expected = plain.state.theta.clone()
    thetas = walk(averaged, 12)
    assert torch.equal(thetas, walk(plain, 12))
    for step, theta in enumerate(thetas, start=1):
        decay = min(0.7, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * theta
    assert averaged.state.average is not None
    torch.testing.assert_close(averaged.state.average, expected)


def test_what_is_scored_and_published_is_the_average() -> None:
    trainer = trained_by(Recipe(ema=0.9))
    *_, last = fit(trainer, lambda: False)
    assert isinstance(last, Evaluated)
    theta, average = trainer.state.theta.clone(), trainer.state.average
    assert average is not None
    with trainer.published() as model:
        weights = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(weights, average)
        assert evaluate(model, trainer.data, trainer.data.test).loss == last.result.loss
    assert torch.equal(trainer.state.theta, theta)
    assert evaluate(trainer.model, trainer.data, trainer.data.test).loss != last.result.loss


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


@pytest.mark.privacy
def test_a_view_depends_on_no_other_image() -> None:
    images = pictures()
    other = images.clone()
    other[2] = 255 - other[2]
    words = random_words(6, 4)
    views = [views_of(given, words, "crop+flip") for given in (images, other)]
    differ = (views[0] != views[1]).flatten(1).any(1)
    assert differ.view(6, 4).any(1).tolist() == [i == 2 for i in range(6)]


@pytest.mark.parametrize("side", [8, 32])
def test_shifts_are_uniform_and_flips_are_fair(side: int) -> None:
    """Of an image whose pixels are their own places; rows, columns and flips independent."""
    size, reach = 20_000, side // 8
    rows = torch.arange(side).view(1, 1, side, 1).expand(1, 1, side, side)
    image = torch.cat([rows, rows.transpose(2, 3)], 1)
    words = LayerDraws(a_key(5)).words(0, np.arange(size), 1)
    views = views_of(image.expand(size, -1, -1, -1), words, "crop+flip")
    middle = side // 2
    down, across = views[:, 0, middle, middle] - middle, views[:, 1, middle, middle - 1]
    flipped = across > views[:, 1, middle, middle]
    across = torch.where(flipped, views[:, 1, middle, middle - 1], views[:, 1, middle, middle])
    shifts = torch.stack([down, across - middle])
    assert (int(shifts.min()), int(shifts.max())) == (-reach, reach)
    cells = (shifts[0] + reach) * (2 * reach + 1) + shifts[1] + reach
    counts = torch.bincount(cells * 2 + flipped, minlength=2 * (2 * reach + 1) ** 2)
    assert chisquare(counts.numpy()).pvalue > 0.001


@pytest.mark.privacy
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


@pytest.mark.privacy
@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_a_record_is_seen_alike_in_every_batch_and_chunk(chunk: int) -> None:
    recipe, seen = Recipe(views=3, augment="flip"), []
    for rows in ([4], [0, 4, 9], [1, 2, 3, 4]):
        trainer = trained_by(recipe, sampler=Batches(rows))
        trainer.state.chunk = chunk
        inputs: list[Tensor] = []

        def note(
            x: Tensor, *rest: Any, to: Any = inputs, of: Any = trainer.sums.clipped_sum.of
        ) -> None:
            to.append(x[: rest[-1]])
            of(x, *rest)

        trainer.sums.clipped_sum.of = note  # type: ignore[assignment,method-assign]
        trainer.step()
        views = torch.cat(inputs).view(len(rows), 3, -1)
        seen.append(views[rows.index(4)])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.privacy
def test_views_survive_chunks_that_are_halved() -> None:
    recipe = Recipe(views=3, augment="flip")
    halved, whole = (trained_by(recipe, sampler=Batches(range(30))) for _ in range(2))
    clipped, failures = halved.sums.clipped_sum.of, iter([True, True])

    def scarce(*args: Any) -> None:
        if next(failures, False):
            raise MemoryError
        clipped(*args)

    halved.sums.clipped_sum.of = scarce  # type: ignore[assignment,method-assign]
    torch.testing.assert_close(walk(halved, 3), walk(whole, 3))
    assert halved.state.chunk == halved.sums.chunk // 4


def test_a_trainer_draws_other_views_and_dropout_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views, masks = list[bytes](), list[bytes]()
    plain = PerSample.__call__

    def noting(self: PerSample, x: Tensor, y: Tensor) -> Any:
        losses, found = plain(self, x, y)
        first = found[0]
        assert not isinstance(first, Tensor)
        views.append(x.numpy().tobytes())
        masks.append((first[0].inputs == 0).numpy().tobytes())
        return losses, found

    model = tiny_model(torch.float64, nn.Dropout())
    recipe = Recipe(views=2, augment="flip")
    trainer = trained_by(recipe, model=model, sampler=Batches(range(10)))
    monkeypatch.setattr(PerSample, "__call__", noting)
    walk(trainer, 4)
    assert len(views) == len(set(views)) == len(set(masks)) == 4


def test_layers_draw_anew_in_every_step_and_alike_in_a_step() -> None:
    """Else dropout would leave out the same units in all of them."""
    layers, masks = LayerDraws(a_key(5)), []
    for step in (0, 1, 2, 1):
        with layers.of(step):
            masks.append(nn.Dropout()(torch.ones(64)))
    assert len({mask.numpy().tobytes() for mask in masks}) == 3
    assert torch.equal(masks[1], masks[3])


@pytest.mark.privacy
@every_optimizer
def test_a_record_seen_in_several_views_adds_no_more_than_1(name: str) -> None:
    spy, alone = Spy(0.0, 8), Batches(*([i] for i in range(40)))
    recipe = Recipe(views=4, augment="flip")
    walk(trained_by(recipe, name, mechanism=spy, sampler=alone), 40)
    assert max(float(spy.whitened_sum(step).norm()) for step in range(40)) <= 1


@pytest.mark.privacy
@every_optimizer
def test_views_that_are_all_the_same_change_nothing(name: str) -> None:
    """Their mean counts, not their sum. Images this small are cropped to themselves."""
    recipe = Recipe(views=4, augment="crop")
    found = walk(trained_by(recipe, name), 12)
    torch.testing.assert_close(found, walk(make_trainer(name), 12), rtol=1e-9, atol=1e-9)


# Whole runs.


@pytest.mark.parametrize("name", one_in(5, OPTIMIZER_NAMES))
def test_a_run_by_recipe_resumes_and_scores_what_it_publishes(name: str) -> None:
    flags = {**ALL, "optimizer": name, "steps": 8, "seed": 4, "physical_batch": 40}
    whole = train_digits(**flags)
    asked = iter(range(100))
    stopped = list(run.train(digits_config(**flags), lambda: next(asked) >= 4))[-1]
    assert isinstance(stopped, Finished)
    assert stopped.state == "interrupted"
    ended = list(run.resume(stopped.folder, {}))[-1]
    assert isinstance(ended, Finished)
    assert ended.report["privacy"]["epsilon"] == whole.report["privacy"]["epsilon"]
    by_name: dict[str, object] = {str(name): value for name, value in RECIPE_DEFAULTS.items()}
    assert whole.report["recipe"] == {**by_name, **ALL, "augment": "crop"}
    plain = train_digits(optimizer=name, steps=8, seed=4)
    assert whole.report["privacy"] == plain.report["privacy"]
    scored = CliRunner().invoke(app, ["eval", str(ended.folder), "--json"])
    assert json.loads(scored.stdout)["accuracy"] == ended.report["test"]["accuracy"]


def test_the_published_weights_are_the_average() -> None:
    flags: dict[str, Any] = {"steps": 6, "seed": 4, "optimizer": "dp-adam"}
    last, averaged = (train_digits(ema=ema, **flags).folder for ema in (None, 0.99))
    assert not same_weights(last, averaged)
    saved = sorted((averaged / "checkpoint").glob("*.safetensors"))[-1]
    tensors = safetensors.torch.load_file(saved)
    published = safetensors.torch.load_file(averaged / "model.safetensors")
    flat = torch.cat([published[key].reshape(-1) for key in ("1.weight", "1.bias")])
    torch.testing.assert_close(flat, tensors["average"][: len(flat)])


def test_every_part_of_a_recipe_is_recorded_and_tells_runs_of_a_study_apart() -> None:
    plain = digits_config()
    assert plain.recorded["warmup_steps"] == 0
    assert address(plain, 0) == address(digits_config(warmup_steps=0), 0)
    assert address(plain, 0) != address(digits_config(warmup_steps=1), 0)
    kept = digits_config(**ALL).recorded
    assert (kept["augmentations"], kept["augment"], kept["ema"]) == (3, "crop", 0.9)


def test_a_gpu_processes_more_samples_at_a_time_unless_told_otherwise() -> None:
    """The settings of a run that left it open leave it open, too, on whatever device it goes on."""

    def sizes(**flags: Any) -> tuple[int, int]:
        plan = resolve({"dataset": "cifar10", "sigma": 1, **flags}).plan
        again = change(by_flag(plan.recorded), {}).plan
        assert again.recorded == plan.recorded
        assert (again.settings.physical_batch, again.gpu_batch) == (
            plan.settings.physical_batch,
            plan.gpu_batch,
        )
        assert ("physical_batch" in plan.recorded) == (
            plan.gpu_batch == plan.settings.physical_batch
        )
        return plan.settings.physical_batch, plan.gpu_batch

    assert sizes() == (32, 512)
    assert sizes(augmentations=16) == (2, 32)
    assert sizes(model="resnet18") == (128, 512)
    assert sizes(physical_batch=32) == (32, 32)
    assert sizes(dataset="mnist") == (1024, 1024)


def test_views_take_their_share_of_the_physical_batch() -> None:
    assert (
        digits_config(augmentations=16).settings.physical_batch
        == digits_config().settings.physical_batch // 16
    )
    assert digits_config(augmentations=1000, physical_batch=7).settings.physical_batch == 7


@pytest.mark.long
def test_a_network_of_many_weights_works_on_more_small_images_at_a_time() -> None:
    for model, samples in {"cnn": 32, "wrn-16-4": 32, "resnet18": 128, "mlp": 1024}.items():
        plan = resolve({"dataset": "cifar10", "model": model, "sigma": 1}).plan
        assert plan.settings.physical_batch == samples
    assert MODELS["resnet18"].samples_at_a_time(224 * 224) < 32
    behind = resolve({"dataset": "cifar10", "backbone": "efficientnet-lite0", "model": "cnn"})
    assert behind.plan.settings.physical_batch == 1024


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"augment": "flip"}, "add --augmentations"),
        ({"warmup_steps": 3}, "--warmup-steps (3) must be below the steps of the run, 3"),
        ({"lr_schedule": "step"}, "Known: constant, cosine, linear"),
        ({"ema": 1.0}, "--ema must be above 0 and below 1"),
        ({"weight_decay": -0.1}, "--weight-decay must be at least 0"),
        ({"augmentations": 0}, "--augmentations must be at least 1"),
    ],
)
def test_recipes_that_cannot_be_followed(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as failure:
        digits_config(**flags)
    assert message in str(failure.value)


def test_a_table_has_no_views(tmp_path: Path) -> None:
    from tests.test_own_runs import wine  # noqa: PLC0415

    with pytest.raises(InputError, match="is a table"):
        resolve({"dataset": wine(str(tmp_path / "wine.npz")), "augmentations": "2"})


def test_an_average_cannot_join_a_run_that_goes_on() -> None:
    where = train_digits(seed=1).folder
    with pytest.raises(InputError, match="--ema cannot change in a fork"):
        list(run.fork(where, {"ema": 0.9, "steps": 6}))
    with pytest.raises(InputError, match=r"--ema 0\.9 would change the run"):
        list(run.resume(where, {"ema": 0.9}))
