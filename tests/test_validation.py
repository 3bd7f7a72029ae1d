"""User-supplied networks: what mixes samples is refused or isolated, what does not is trained."""

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.isolation import Isolated
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters, split_by_module
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.models.independence import independence
from dpmac_cli.models.validation import check_model
from dpmac_cli.training.clipped import ClippedSum
from tests.helpers import numbers
from tests.networks import (
    CLASSES,
    INNOCENT,
    MIXING,
    PIXELS,
    SHAPE,
    CentredInSinglePrecision,
    Perceptron,
    WordsFirst,
)
from tests.tiers import one_in

LARGE = 2.0**20
#: Fail on one sample alone, as isolation runs them.
NEVER_ALONE = {"FunctionalBatchNorm"}
#: Refused: they keep something of samples, or their layers do not see the samples first.
REFUSED = NEVER_ALONE | {
    *("AttentionOverBatch", "RunningMean", "RunningMeanInState", "PreviousBatch"),
}
#: Innocent, and yet refused without isolation: its layers do not see the samples first.
NOT_BY_ROWS = {"WordsFirst"}


def by_name(networks: Sequence[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("network", networks, ids=lambda network: network.__name__)


def made(network: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return network()


def clipped_sum(
    model: nn.Module, x: Tensor, y: Tensor, radius: float, *, isolated: bool
) -> tuple[Tensor, list[str]]:
    """The sum of clipped gradients over the radius, and the names of its parameters in order."""
    model = copy.deepcopy(model)
    layers = split_by_module(model) if isolated else find_layers(model)
    one_by_one = Isolated(model, layers, numbers(*SHAPE)) if isolated else None
    theta = flatten_parameters(layers)
    clipped = ClippedChunkSum(model, layers, len(x) + 1, per_sample=one_by_one)
    out = torch.empty_like(theta)
    clipped.of(x, y, RegionMetric(ball(radius, theta)), out)
    names = [f"{layer.name}.{key}".strip(".") for layer in layers for key in layer.parameters]
    return out / radius, names


def records(count: int = 7) -> tuple[Tensor, Tensor]:
    """Images of very different scale, and labels."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-1, 1, count).view(-1, 1, 1, 1)
    return torch.randn(count, *SHAPE, generator=generator) * scales, torch.arange(count) % CLASSES


def gradients_alone(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The sum of autograd's gradients, each of a copy of the network that sees one sample."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in range(len(x)):
        one = copy.deepcopy(model)
        loss = F.cross_entropy(one(x[row : row + 1]), y[row : row + 1])
        loss.backward()  # type: ignore[no-untyped-call]
        for name, p in one.named_parameters():
            total[name] += 0.0 if p.grad is None else p.grad
    return total


def how_it_runs(model: nn.Module) -> tuple[str, str]:
    """How a network runs that is not built in, and why, as in `train` and `make_private`."""
    check_model(model, SHAPE, CLASSES)
    return independence(model, SHAPE, CLASSES)


@pytest.mark.privacy
@by_name(MIXING)
def test_a_network_that_mixes_samples_is_never_trusted(network: type[nn.Module]) -> None:
    """It is refused, or trained on the gradients of each sample alone."""
    model = made(network)
    if network.__name__ in REFUSED:
        with pytest.raises(ModelError):
            how_it_runs(model)
        return
    check_model(model, SHAPE, CLASSES)
    assert independence(model, SHAPE, CLASSES)[0] == "isolated"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # what is dropped differs from sample to sample
    x, y = records()
    found, names = clipped_sum(model, x, y, LARGE, isolated=True)
    alone = gradients_alone(model, x, y)
    expected = torch.cat([alone[name].flatten() for name in names])
    torch.testing.assert_close(found * LARGE, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.privacy
def test_what_a_network_does_in_single_precision_is_not_trusted() -> None:
    """Trials are in double precision, which cannot see it; proofs are in the precision trained."""
    model = made(CentredInSinglePrecision)
    check_model(model, SHAPE, CLASSES)
    assert independence(model, SHAPE, CLASSES)[0] == "isolated"


@pytest.mark.privacy
@by_name(one_in(3, MIXING))
def test_isolation_bounds_what_a_record_moves_in_any_network(network: type[nn.Module]) -> None:
    if network.__name__ in NEVER_ALONE:
        with pytest.raises(ModelError):
            check_model(made(network), SHAPE, CLASSES, isolated=True)
        return
    check_model(made(network), SHAPE, CLASSES, isolated=True)
    assert sensitivity(made(network), isolated=True) <= 1


def sensitivity(model: nn.Module, *, isolated: bool) -> float:
    """The most that leaving out a record moves the whitened sum."""
    (x, y), moved = records(), 0.0
    for radius in (0.01, 1.0):
        whole, _ = clipped_sum(model, x, y, radius, isolated=isolated)
        for left_out in range(len(x)):
            kept = torch.arange(len(x)) != left_out
            part, _ = clipped_sum(model, x[kept], y[kept], radius, isolated=isolated)
            moved = max(moved, float((whole.double() - part.double()).norm()))
    return moved


@pytest.mark.privacy
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, of weight norm
@by_name(one_in(3, (*INNOCENT, WordsFirst)))
def test_an_innocent_network_is_trained_on_its_true_gradients(network: type[nn.Module]) -> None:
    model = made(network)
    forced = network.__name__ in NOT_BY_ROWS
    check_model(model, SHAPE, CLASSES, isolated=forced)
    isolated = forced or independence(model, SHAPE, CLASSES)[0] == "isolated"
    model.eval()  # dropout draws otherwise for another batch
    x, y = records()
    found, names = clipped_sum(model, x, y, LARGE, isolated=isolated)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(*trained: Tensor) -> Tensor:
        used = {**parameters, **dict(zip(names, trained, strict=True))}
        return F.cross_entropy(functional_call(model, used, (x,)), y, reduction="sum")

    trained = [parameters[name].requires_grad_() for name in names]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss(*trained), trained)])
    torch.testing.assert_close(found * LARGE, expected, rtol=1e-4, atol=1e-4)
    assert float(expected.norm()) > 0.1
    assert sensitivity(model, isolated=isolated) <= 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_most_innocent_networks_are_proven_to_be() -> None:
    found = {network.__name__: independence(made(network), SHAPE, CLASSES) for network in INNOCENT}
    isolated = {name for name, (kind, _) in found.items() if kind == "isolated"}
    assert isolated == {"VisionTransformer"}, found


def of_torchvision(name: str) -> nn.Module:
    """A network of torchvision's, small, with its dropout switched on."""
    stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    made: nn.Module = (
        VisionTransformer(8, 4, 2, 2, 8, 16, 0.1, 0.1, num_classes=CLASSES)
        if name == "vit_b_16"
        else ConvNeXt(stages, 0.5, num_classes=CLASSES)
    )
    return made


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["vit_b_16", "convnext_tiny"])
def test_networks_of_torchvision_are_trained_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    model = of_torchvision(name)
    check_model(model, SHAPE, CLASSES)
    assert independence(model, SHAPE, CLASSES) == ("traced", "")
    layers = find_layers(model, torch.zeros(2, *SHAPE))
    inside = {layer.name for layer in layers if any(True for _ in layer.module.children())}
    assert inside == {layer.name for layer in layers if layer.direct} != set()


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_other_precision_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=rf"layers\.0\.weight is {dtype}.*: network\.float\(\)"):
        check_model(made(Perceptron).to(dtype), SHAPE, CLASSES)
    half = made(Perceptron)
    half.get_submodule("layers.2").to(dtype)
    with pytest.raises(ModelError, match=r"layers\.2\.weight"):
        check_model(half, SHAPE, CLASSES)


class Casting(Perceptron):
    """Computes a part in fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class CastByHand(Perceptron):
    """Rounds its input to half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half().to(x.dtype))


@pytest.mark.privacy
@pytest.mark.parametrize("network", [Casting, CastByHand])
def test_low_precision_inside_is_refused_before_training(network: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"computes \w+ in torch\.(b?)float16, as under"):
        check_model(made(network), SHAPE, CLASSES)
    with pytest.raises(ModelError, match="as under"):
        check_model(made(network), SHAPE, CLASSES, isolated=True)


class Tied(nn.Module):
    """A layer that is called, and whose weight is used once more without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(PIXELS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.first(x.flatten(1)))
        logits: Tensor = self.head(F.linear(hidden, self.tied.weight.T))
        return logits


INCOMPLETE = "The calls of layer tied do not give its complete gradient: its parameters are also"


@pytest.mark.privacy
def test_a_gradient_that_calls_do_not_account_for_is_that_of_each_sample_alone() -> None:
    kind, why = how_it_runs(made(Tied))
    assert (kind, INCOMPLETE in why) == ("isolated", True), why
    (x, y), model = records(), made(Tied)
    found, names = clipped_sum(model, x, y, LARGE, isolated=True)
    alone = gradients_alone(model, x, y)
    expected = torch.cat([alone[name].flatten() for name in names])
    torch.testing.assert_close(found * LARGE, expected, rtol=1e-4, atol=1e-4)
    assert sensitivity(model, isolated=True) <= 1


class TiedBeforeZeros(Tied):
    """The same before a head that begins as zero, which hides the gradients behind it."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


@pytest.mark.privacy
def test_a_head_of_zeros_hides_nothing() -> None:
    kind, why = how_it_runs(made(TiedBeforeZeros))
    assert (kind, INCOMPLETE in why) == ("isolated", True), why


class OldWeightNorm(nn.Module):
    """The weight norm of before parametrisations, whose weight cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            self.head = nn.utils.weight_norm(nn.Linear(PIXELS, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


def test_what_cannot_be_copied_is_refused_with_its_remedy() -> None:
    with pytest.raises(ModelError, match=r"cannot be copied.*parametrizations\.weight_norm"):
        check_model(made(OldWeightNorm), SHAPE, CLASSES)


class Counting(Perceptron):
    """Counts its calls, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"][0] += 1
        return super().forward(x)


@pytest.mark.privacy
def test_an_attribute_that_a_forward_pass_changes_is_named() -> None:
    with pytest.raises(ModelError, match=r"A forward pass changes state\.calls\.0"):
        check_model(made(Counting), SHAPE, CLASSES)


class _Slotted:
    """Keeps its count where vars() does not look."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class CountingInSlots(Perceptron):
    """Counts its calls there."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = _Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        return super().forward(x)


@pytest.mark.privacy
def test_an_attribute_in_slots_that_a_forward_pass_changes_is_named() -> None:
    with pytest.raises(ModelError, match=r"A forward pass changes counter\.calls"):
        check_model(made(CountingInSlots), SHAPE, CLASSES)


class Warming(Perceptron):
    """Would centre batches after a hundred calls, which it counts by ``counter``."""

    def __init__(self, counter: object) -> None:
        super().__init__()
        self.counter = counter


@pytest.mark.privacy
@pytest.mark.parametrize(
    "counter", [itertools.count(), random.Random(0)], ids=["iterator", "generator"]
)
def test_an_attribute_that_cannot_be_looked_at_is_not_trusted(counter: object) -> None:
    model = Warming({"inside": [counter]})
    check_model(model, SHAPE, CLASSES)
    kind, why = independence(model, SHAPE, CLASSES)
    assert kind == "isolated"
    assert "Its counter.inside.0 may store information" in why


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name(kind: str) -> None:
    """It would never be called: no gradient of the batch is computed."""
    model = made(Perceptron)
    name, parameter = next(iter(model.named_parameters()))
    getattr(parameter, kind)(lambda g: None)
    for isolated in (False, True):
        with pytest.raises(ModelError, match=rf"The parameter {name} has a hook"):
            check_model(model, SHAPE, CLASSES, isolated=isolated)
    parameter.requires_grad_(False)
    check_model(model, SHAPE, CLASSES)  # which has no gradient to change


def test_a_forward_hook_is_traced() -> None:
    model = made(Perceptron)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: 3 * output)
    assert how_it_runs(model) == ("traced", "")


@pytest.mark.privacy
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "network"])
@pytest.mark.parametrize("least", [0, 100], ids=["always", "large batches"])
def test_a_forward_hook_that_mixes_samples_is_isolated(whole: bool, least: int) -> None:
    model = made(Perceptron)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))

    def mix(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output - output.mean(0) / 2 if len(output) > least else output

    def mix_inputs(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        [x] = inputs
        return (x - x.mean(0) / 2,) if len(x) > least else (x,)

    of = model if whole else layer
    for kind, hook in (("hook", mix), ("pre_hook", mix_inputs)):
        handle = getattr(of, f"register_forward_{kind}")(hook)
        assert how_it_runs(model)[0] == "isolated"
        handle.remove()


def all_reduced(y: Tensor) -> Tensor:
    total = y.detach().mean(0).contiguous()
    dist.all_reduce(total)
    return total


def functionally(y: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    total: Tensor = functional_collectives.all_reduce(y.detach().mean(0), "sum", group)
    return total + 0


def gathered(y: Tensor) -> Tensor:
    rows = [torch.zeros_like(y)]
    dist.all_gather(rows, y.detach().contiguous())
    return rows[0].sum()


def as_objects(y: Tensor) -> Tensor:
    rows: list[Any] = [None]
    dist.all_gather_object(rows, y.detach().tolist())
    return torch.tensor(rows).sum()


@pytest.mark.privacy
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("read", [all_reduced, functionally, gathered, as_objects])
def test_what_reads_other_processes_is_refused(read: Any, in_loss: bool) -> None:
    """With two processes, a record of one moved the sum of the other by 1.73 times the bound."""

    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if in_loss else y * (1 + read(y))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = model(batch)
        return ((y * (1 + read(y))) if in_loss else y).square().sum(1)

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        clipped = ClippedSum(Reading(4, 3), loss, ball(1.0), batch_size=8)
        with pytest.raises(ModelError, match=r"calls torch\.distributed"):
            clipped.prepare(torch.zeros(1, 4))
    finally:
        dist.destroy_process_group()
