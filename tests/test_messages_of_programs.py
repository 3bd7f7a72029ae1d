"""Mistakes in a program's network or loss: the message names the cause, and what to write."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpmac_cli import clipped_grad
from dpmac_cli.dp.losses import check_loss
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from tests.test_right_programs import (
    RECORDS,
    Batch,
    BatchLoss,
    cross_entropy,
    inputs,
    labels,
    mlp,
)


def targets() -> Tensor:
    return torch.linspace(0, 1, RECORDS)


def half_double() -> nn.Module:
    net: Any = mlp()
    net[0].double()
    return net  # type: ignore[no-any-return]


def weight_norm() -> nn.Module:
    net: Any = mlp()
    nn.utils.weight_norm(net[0])
    return net  # type: ignore[no-any-return]


def keeping() -> nn.Module:
    net: Any = mlp()
    net[0].scaled = 2 * net[0].weight
    return net  # type: ignore[no-any-return]


def double_weights(model: nn.Module, batch: Batch) -> Tensor:
    weight = torch.ones(3, dtype=torch.float64)
    return F.cross_entropy(model(batch[0]), batch[1], weight, reduction="none")


def of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none")


def columns(model: nn.Module, batch: Batch) -> Tensor:
    errors: Tensor = model(batch[0]) - batch[1].unsqueeze(1)
    return errors.square()


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].detach().requires_grad_()
    losses = cross_entropy(model, (x, batch[1]))
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + g.square().sum(1)


def positive(model: nn.Module, batch: Batch) -> Tensor:
    if bool((batch[0] < 2).all()):
        raise ValueError("numbers must be above 2")
    return cross_entropy(model, batch)


def one() -> nn.Module:
    return mlp(1)


#: A network, a loss, a batch, and what the message says.
MISTAKES: Mapping[str, tuple[Callable[[], nn.Module], BatchLoss, Callable[[], Batch], str]] = {
    "records in float64": (
        mlp,
        cross_entropy,
        lambda: (inputs().double(), labels()),
        r"batch\[0\] is torch.float64, and the network torch.float32. "
        r"Write batch\[0\].to\(torch.float32\) in the loss.$",
    ),
    "network in float64": (
        lambda: mlp().double(),
        cross_entropy,
        lambda: (inputs(), labels()),
        r"are torch.float64, .* 0.weight, 0.bias, 2.weight, 2.bias. .*: network.float\(\)$",
    ),
    "a layer in float64": (
        half_double,
        cross_entropy,
        lambda: (inputs(), labels()),
        r"are torch.float64, and others .*: 0.weight, 0.bias. Add .*: network.float\(\)$",
    ),
    "class weights in float64": (
        mlp,
        double_weights,
        lambda: (inputs(), labels()),
        r"such as weights of classes .*: weights.float\(\)",
    ),
    "a column against none": (
        one,
        of_logits,
        lambda: (inputs(), targets()),
        r"outputs have shape \(records, 1\) and targets \(records,\): write model\(x\).squeeze",
    ),
    "every pair": (
        one,
        squares,
        lambda: (inputs(), targets()),
        r"Outputs of shape \(5, 1\) and targets of shape \(5,\) give a loss for every pair",
    ),
    "losses in a column": (
        one,
        columns,
        lambda: (inputs(), targets()),
        r"returns \(5, 1\) .*Outputs of shape \(5, 1\) .*: write model\(x\).squeeze\(1\)",
    ),
    "torch.autograd.grad": (
        mlp,
        penalised,
        lambda: (inputs(), labels()),
        "calls torch.autograd.grad or backward, .* Use torch.func.grad",
    ),
    "weight_norm": (
        weight_norm,
        cross_entropy,
        lambda: (inputs(), labels()),
        r"network.0 has torch.nn.utils.weight_norm.*parametrizations.weight_norm\(layer\)",
    ),
    "a computed attribute": (
        keeping,
        cross_entropy,
        lambda: (inputs(), labels()),
        "network.0.scaled was computed from parameters: compute it in forward",
    ),
    "numbers of a range": (
        mlp,
        positive,
        lambda: (inputs(), labels()),
        "numbers must be above 2. .*pass example=",
    ),
    "labels out of range": (
        mlp,
        cross_entropy,
        lambda: (inputs(), labels() + 1),
        "labels of k classes are 0 to k - 1.*in a program, it is the __cause__ of this error",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_names_the_cause_and_what_to_write(name: str) -> None:
    build, loss, batch, said = MISTAKES[name]
    clipped = clipped_grad(build(), loss, ball(1.0), batch_size=RECORDS)
    with pytest.raises(ModelError, match=said):
        clipped(batch())


def test_a_message_about_a_loss_of_outputs_names_the_cause() -> None:
    def penalised(output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return losses + torch.autograd.grad(losses.sum(), output)[0].square().sum(1)

    def mapped(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ torch.eye(3, dtype=torch.float64), target)

    for loss, said in ((mapped, r"weights.float\(\)"), (penalised, "torch.func.grad")):
        with pytest.raises(ModelError, match=said):
            check_loss(loss, torch.randn(RECORDS, 3), labels())


def test_a_penalty_by_torch_func_is_trained() -> None:
    """What the message says to write works."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        g = torch.func.grad(lambda x: cross_entropy(model, (x, batch[1])).sum())(batch[0])
        penalty: Tensor = g.square().sum(1)
        return cross_entropy(model, batch) + penalty

    clipped = clipped_grad(mlp(), loss, ball(1.0), batch_size=RECORDS)
    assert bool(clipped((inputs(), labels())).any())


def test_the_note_on_the_loop_says_what_is_not_covered() -> None:
    mean = [0.0]

    def running(model: nn.Module, batch: Batch) -> Tensor:
        losses = cross_entropy(model, batch)
        mean[0] += float(losses.detach().mean())
        return losses

    clipped = clipped_grad(mlp(), running, ball(1.0), batch_size=RECORDS)
    clipped((inputs(), labels()))
    (note,) = clipped.notes
    assert "one record after the other" in note
    assert (
        "does not cover a network, loss or weights that keep numbers of records in Python" in note
    )
