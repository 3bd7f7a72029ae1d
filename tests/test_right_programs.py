"""Programs that are right in unusual ways, and are trained as they mean."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpmac_cli import PrivateStep, clipped_grad
from dpmac_cli.dp.clipping.batches import Structure, tensors_in
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.models.trial_samples import Objective, fitted
from dpmac_cli.randomness.sampling import Poisson
from dpmac_cli.training.chunks import ChunkedSum

RECORDS, COLUMNS, CLASSES, RADIUS = 12, 5, 3, 1e-3

Batch = tuple[Tensor, ...]
BatchLoss = Callable[[Any, Any], Tensor]


def mlp(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 16), nn.Tanh(), nn.Linear(16, outputs))


def inputs() -> Tensor:
    return torch.randn(RECORDS, COLUMNS, generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    return torch.arange(RECORDS) % CLASSES


def soft() -> Tensor:
    return torch.randn(RECORDS, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(1)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def cast(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0].flatten(1).float()), batch[1], reduction="none")


def of_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch[0]).sigmoid()
    return F.binary_cross_entropy(found, batch[1], reduction="none").sum(1)


def divergence(model: nn.Module, batch: Batch) -> Tensor:
    return F.kl_div(model(batch[0]).log_softmax(1), batch[1], reduction="none").sum(1)


def normalised(model: nn.Module, batch: Batch) -> Tensor:
    """The divergence of distributions, which no made-up numbers are."""
    if not bool(torch.func.vmap(torch.sum)(batch[1]).sub(1).abs().lt(1e-3).all()):
        raise ValueError
    return divergence(model, batch)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none").sum(1)


def taught(seed: int, *, cast: bool) -> BatchLoss:
    torch.manual_seed(seed)
    wide = nn.Linear(COLUMNS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    teacher = nn.Sequential(*wide, nn.Linear(256, CLASSES)).requires_grad_(False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        target = teacher(batch[0].float() if cast else batch[0]).softmax(1)
        return F.kl_div(model(batch[0]).log_softmax(1), target, reduction="none").sum(1)

    return loss


class Raw(nn.Module):
    """A product that belongs to no layer with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.to(self.layer.weight.dtype))
        return logits


#: A network, a loss, and a batch.
PROGRAMS: Mapping[str, tuple[Callable[[], nn.Module], BatchLoss, Callable[[], Batch]]] = {
    "probabilities": (mlp, of_probabilities, lambda: (inputs(), soft())),
    "hard probabilities": (mlp, of_probabilities, lambda: (inputs(), soft().round())),
    "divergence": (mlp, divergence, lambda: (inputs(), soft())),
    **{
        f"teacher {seed}{', cast' * cast}": (
            mlp,
            taught(seed, cast=cast),
            lambda: (inputs(), labels()),
        )
        for seed in range(3)
        for cast in (False, True)
    },
    "tuple": (Raw, cross_entropy, lambda: (inputs(), labels())),
    "float16 cast by the loss": (mlp, cast, lambda: (inputs().half(), labels())),
    "float64 cast by the loss": (mlp, cast, lambda: (inputs().double(), labels())),
    "float16 cast by the network": (Casting, cross_entropy, lambda: (inputs().half(), labels())),
    "float64 cast by the network": (Casting, cross_entropy, lambda: (inputs().double(), labels())),
    "float64 targets": (mlp, squares, lambda: (inputs(), soft().double())),
}


def expected_sum(
    net: nn.Module, loss: BatchLoss, batch: Batch, weights: Sequence[float] = (1.0,) * RECORDS
) -> Tensor:
    """Sum the clipped gradients of records alone, by autograd, times their weights."""
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    for row in range(RECORDS):
        one = loss(net, tuple(part[row : row + 1] for part in batch)).sum()
        g = torch.cat([g.flatten() for g in torch.autograd.grad(one, [*net.parameters()])]).double()
        total += weights[row] * g * min(1.0, RADIUS / float(g.norm()))
    return total


def flat(net: nn.Module, clipped: Any, total: Tensor) -> Tensor:
    parts = clipped.by_parameter(total)
    return torch.cat([parts[name].flatten() for name, _ in net.named_parameters()]).double()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_is_trained_as_it_means(name: str) -> None:
    build, loss, batch = PROGRAMS[name]
    torch.manual_seed(0)
    net = build()
    expected = expected_sum(net, loss, batch())
    clipped = clipped_grad(net, loss, ball(RADIUS), batch_size=RECORDS)
    found = flat(net, clipped, clipped(batch()))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3 * float(expected.abs().max()))
    assert not any("cannot run the network: TypeError" in note for note in clipped.notes)


def test_an_example_gives_numbers_that_cannot_be_made_up() -> None:
    batch = inputs(), soft()
    sampling = Poisson(n=RECORDS, batch_size=2)
    keywords: dict[str, Any] = {"sigma": 1, "steps": 1, "delta": 1e-5}
    step = PrivateStep(mlp(), normalised, sampling=sampling, example=batch, **keywords)
    assert step.taken == 0


def test_weights_that_hold_a_tensor_get_records_in_its_dtype() -> None:
    net, importance = mlp(), torch.ones(COLUMNS)

    def weights(batch: Batch) -> Tensor:
        return (batch[0] @ importance).sigmoid()

    clipped = clipped_grad(net, cross_entropy, ball(RADIUS), batch_size=RECORDS, weights=weights)
    batch = inputs(), labels()
    expected = expected_sum(net, cross_entropy, batch, weights(batch).tolist())
    found = flat(net, clipped, clipped(batch))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3 * float(expected.abs().max()))


def test_made_up_numbers_are_normal_where_these_work() -> None:
    """The more they differ, the more a trial sees."""
    kept = Structure((torch.zeros(1, COLUMNS), torch.zeros(1, CLASSES)), keep=True)
    chosen = fitted(Objective(mlp(), squares), kept)
    assert {*chosen.numbers} == {"normal"}
    assert not chosen.keep_dtype
    assert all(len(torch.unique(t)) > 4 for t in tensors_in(chosen.made_up(5)))


@pytest.mark.promise("alone")
def test_an_example_of_few_rows_does_not_replace_everything_that_is_made_up() -> None:
    """A trial with equal rows would not see how they are rounded."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return cross_entropy(model, (x, labels()[: len(x)])) + (0 if bool((x > 5).all()) else 1 / 0)

    few, many = (
        fitted(Objective(mlp(), loss), Structure(6 + torch.rand(rows, COLUMNS), keep=True))
        for rows in (2, 9)
    )
    assert few.numbers == ()
    assert {*many.numbers} == {"those of the example"}


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(COLUMNS, 6, batch_first=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.cells(x)[0][:, -1])
        return logits


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, in isolation
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_recurrent_layer_may_list_its_weights_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where one of them was replaced for a moment."""
    monkeypatch.setattr(ChunkedSum, "_tried", lambda *_: False)
    torch.manual_seed(0)
    net, batch = Recurrent(kind), (torch.randn(RECORDS, 4, COLUMNS), labels())
    expected = expected_sum(net, cross_entropy, batch)
    clipped = clipped_grad(net, cross_entropy, ball(RADIUS), batch_size=RECORDS)
    for _ in range(2):
        torch.testing.assert_close(
            flat(net, clipped, clipped(batch)), expected, rtol=2e-3, atol=1e-6
        )
        with torch.no_grad():
            net(batch[0])
    assert "have random places" in clipped.notes[0]
