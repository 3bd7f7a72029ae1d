"""Clipped sums of any network with any loss, on batches that are dicts, tuples or tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpmac_cli import (
    Ellipsoid,
    GaussianMechanism,
    InputError,
    ModelError,
    Noise,
    ball,
    clipped_grad,
    ellipsoid,
)
from tests.helpers import without
from tests.test_private_step import LENGTH, WORDS, Notes, loss, reader, weights

RADIUS = 0.7


def notes(count: int = 9) -> dict[str, Tensor]:
    """Some records as one batch."""
    records = Notes()
    rows = [records[i] for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def region(theta: Tensor, *, is_ball: bool) -> Ellipsoid:
    """A region that clips most records, with a centre that is not the origin unless a ball."""
    if is_ball:
        return ball(RADIUS, theta)
    torch.manual_seed(5)
    return ellipsoid(0.02 * torch.randn_like(theta), 0.1 + torch.rand_like(theta))


def of_size(vector: Tensor, region: Ellipsoid) -> float:
    """The norm of a difference of sums, in that of the region."""
    return float((vector.double() / region.scale.double()).norm())


def great(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss with gradients of very different sizes."""
    scale = torch.logspace(-2, 2, WORDS)[batch["input_ids"][:, 0]]
    return loss(model, batch) * scale


@pytest.mark.privacy
@pytest.mark.parametrize("is_ball", [True, False])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("physical", [256, 4])
def test_a_record_moves_the_sum_by_at_most_one(
    is_ball: bool,
    isolate: bool,
    physical: int,
) -> None:
    model, batch = reader(), notes()
    where = region(weights(model), is_ball=is_ball)
    clipped = clipped_grad(
        model, great, where, batch_size=9, physical_batch=physical, isolate=isolate
    )
    total, moved = clipped(batch), []
    for row in range(9):
        moved.append(of_size(total - clipped(without(batch, row)), where))
    assert max(moved) <= clipped.sensitivity
    assert max(moved) > 0.99, "records are clipped"


def alone(model: nn.Module, of: Callable[..., Tensor], batch: Any) -> Tensor:
    """Gradients of every record by autograd alone, float64, shape (records, d)."""
    model = model.double()
    named = {name: p.detach() for name, p in model.named_parameters()}

    def single(parameters: dict[str, Tensor], row: Any) -> Tensor:
        def network(*args: Any, **given: Any) -> Any:
            return functional_call(model, parameters, args, given)

        return of(network, {name: t.unsqueeze(0) for name, t in row.items()}).sum()

    by_name = vmap(grad(single), in_dims=(None, 0))(named, batch)
    return torch.cat([g.flatten(1) for g in by_name.values()], 1)


@pytest.mark.parametrize("is_ball", [True, False])
@pytest.mark.parametrize("isolate", [True, False])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(is_ball: bool, isolate: bool) -> None:
    model, batch = reader(), notes()
    where = region(weights(model), is_ball=is_ball)
    total = clipped_grad(model, great, where, batch_size=9, isolate=isolate)(batch)
    centred = alone(reader(), great, batch) - where.centre
    factors = (1 / (centred / where.scale).norm(dim=1)).clamp(max=1)
    expected = (centred * factors.unsqueeze(1)).sum(0)
    assert torch.allclose(total.double(), expected, rtol=2e-3, atol=1e-5)


def centred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = loss(model, batch)
    return losses * (losses - losses.mean()).detach()


def of_the_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch).mean().expand(len(batch["labels"]))


def divided(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) / len(batch["labels"])


def contrasted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs)["logits"]
    similar = logits @ logits.T
    return F.cross_entropy(similar, torch.arange(len(similar)), reduction="none")


def of_the_next(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, {**batch, "labels": batch["labels"].roll(1)})


def of_the_longest(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) * batch["attention_mask"].sum(1).max()


def by_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) * torch.arange(1, 1 + len(batch["labels"]))


@pytest.mark.privacy
@pytest.mark.parametrize(
    "mixing", [centred, of_the_batch, divided, contrasted, of_the_next, of_the_longest, by_place]
)
def test_a_loss_that_mixes_records_is_refused_or_sees_one_at_a_time(
    mixing: Callable[..., Tensor],
) -> None:
    model, batch = reader(), notes()
    where = ball(RADIUS, weights(model))
    if mixing is not of_the_longest:  # made-up masks are of one length
        with pytest.raises(ModelError, match="The network or its loss computes something else"):
            clipped_grad(model, mixing, where, batch_size=9)(batch)
    clipped = clipped_grad(model, mixing, where, batch_size=9, isolate=True)
    total = clipped(batch)
    for row in range(9):
        moved = float((total - clipped(without(batch, row))).double().norm())
        assert moved <= RADIUS


def test_other_batches_are_structures_of_tensors_too() -> None:
    """A tuple and a tensor, with the same result as a dict."""
    batch, expected = notes(), torch.empty(0)
    for pack in (
        lambda b: b,
        lambda b: (b["input_ids"], [b["attention_mask"], b["labels"]]),
        lambda b: torch.cat([b["input_ids"], b["attention_mask"], b["labels"][:, None]], 1),
    ):
        given = pack(batch)

        def unpacked(model: nn.Module, batch: Any) -> Tensor:
            if isinstance(batch, tuple):
                ids, (mask, labels) = batch
            elif isinstance(batch, Tensor):
                ids, mask, labels = batch[:, :LENGTH], batch[:, LENGTH:-1], batch[:, -1]
            else:
                return loss(model, batch)
            return loss(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})

        model = reader()
        clipped = clipped_grad(model, unpacked, ball(RADIUS, weights(model)), batch_size=9)
        total = clipped(given)
        assert not clipped.notes
        expected = total if not len(expected) else expected
        assert total.equal(expected)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda model, batch: loss(model, batch).mean(), "The loss returns"),
        (lambda model, batch: loss(model, batch)[:, None], "The loss returns"),
        (lambda model, batch: loss(model, batch).argmax(0, keepdim=True), "The loss returns"),
        (lambda model, batch: model(**batch), "unexpected keyword argument 'labels'"),
    ],
)
def test_a_loss_that_is_not_one_number_per_record_is_refused(odd: Any, said: str) -> None:
    model = reader()
    with pytest.raises(ModelError, match=said):
        clipped_grad(model, odd, ball(RADIUS, weights(model)), batch_size=9)(notes())


@pytest.mark.privacy
def test_a_loss_that_remembers_a_record_is_refused() -> None:
    kept: list[Tensor] = []

    def remembers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = loss(model, batch)
        kept.append(losses.detach().sum())
        return losses * (1 + sum(kept))

    model = reader()
    clipped = clipped_grad(model, remembers, ball(RADIUS, weights(model)), batch_size=9)
    with pytest.raises(ModelError, match="different outputs for the same sample"):
        clipped(notes())


@pytest.mark.privacy
def test_a_network_that_was_changed_is_refused() -> None:
    model = reader()
    clipped = clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)
    clipped(notes())
    model.words = nn.Embedding(WORDS, 8)
    with pytest.raises(ModelError, match="no longer the one that was validated"):
        clipped(notes())


def test_a_step_of_ones_own_is_a_sum_a_mechanism_and_noise() -> None:
    model, batch = reader(), notes()
    clipped = clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)
    total = clipped(batch)
    noise, mechanism = Noise(bytes(32)), GaussianMechanism(2.0, 9)
    private = mechanism.release(total.clone(), clipped.region, noise.at(1))
    assert private.value.shape == clipped.theta.shape
    parts = clipped.by_parameter(private.value)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: g.shape for n, g in parts.items()
    }
    assert torch.cat([g.flatten() for g in parts.values()]).equal(private.value)


def reduced(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """A loss that subtracts a row of the batch from the others."""
    return F.softplus(model(batch["x"] - batch["mean"])).sum(1)


def rows_of(count: int) -> dict[str, Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mean": torch.zeros(count, 4)}


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda b: {**b, "mean": b["x"].mean(0, keepdim=True)}, "different numbers of rows"),
        (lambda b: {**b, "mean": float(b["x"].mean())}, "is a float, not a tensor"),
        (lambda b: {n: t[:, :2] for n, t in b.items()}, "other parts, shapes or types"),
        (lambda b: {n: t.double() for n, t in b.items()}, "other parts, shapes or types"),
        (lambda b: {**b, "more": b["x"]}, "other parts, shapes or types"),
    ],
)
@pytest.mark.parametrize("prepared", [True, False])
def test_a_batch_of_another_structure_than_validated_is_refused(
    odd: Callable[[Any], Any], said: str, prepared: bool
) -> None:
    """What is the same for all records may be computed from them."""
    clipped = clipped_grad(nn.Linear(4, 3), reduced, ball(1.0), batch_size=9)
    if prepared:
        clipped.prepare(rows_of(2))
    elif "other parts" in said:
        clipped(rows_of(3))
    with pytest.raises(InputError, match=said):
        clipped(odd(rows_of(9)))


@pytest.mark.privacy
def test_a_batch_far_larger_than_stated_is_refused() -> None:
    """The margin for rounding is for sums of about the stated number of records."""
    clipped = clipped_grad(nn.Linear(4, 3), reduced, ball(1.0), batch_size=9)
    clipped(rows_of(40))
    with pytest.raises(InputError, match="many times more records"):
        clipped(rows_of(80))


def test_numbers_and_regions_that_do_not_fit_are_refused() -> None:
    for size, physical in ((0, 16), (4, 0)):
        with pytest.raises(InputError, match="must be at least 1, not 0"):
            clipped_grad(
                nn.Linear(4, 3), reduced, ball(1.0), batch_size=size, physical_batch=physical
            )
    for radius in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="must be a positive number"):
            ball(radius)
    clipped = clipped_grad(
        nn.Linear(4, 3), reduced, ellipsoid(torch.zeros(3), torch.ones(3)), batch_size=9
    )
    with pytest.raises(InputError, match="15 trained parameters"):
        clipped(rows_of(9))
