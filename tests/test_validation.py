"""User-supplied networks: what mixes samples is refused or isolated, what does not is trained."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.models.validation import check_model
from dpmac_cli.step import clipped_grad
from tests.helpers import numbers
from tests.networks import (
    CLASSES,
    INNOCENT,
    MIXING,
    PIXELS,
    SHAPE,
    OddlyScaled,
    Perceptron,
    ReadingKernels,
    Transposing,
    WordsFirst,
)
from tests.tiers import one_in

LARGE = 2.0**20
#: Fail on one sample alone, as records are run.
NEVER_ALONE = {"FunctionalBatchNorm"}
#: Keep something of samples.
STORING = {"RunningMean", "RunningMeanInState", "PreviousBatch"}
REFUSED = NEVER_ALONE | STORING
#: Mix no batch of five, or only on the way back, so validation finds nothing that differs.
NOT_SEEN = {
    *("RescaledIfLarge", "ShiftedIfNegative", "WhitenedIfLarge", "GhostNorm"),
    *("GradientNormalised", "CentredInSinglePrecision"),
}
#: Decide by values, or are checkpointed, which vmap cannot run.
LOOPED = {"RescaledIfLarge", "ShiftedIfNegative", "Checkpointed"}
#: Returns the sum over the records of a batch.
Sum = Callable[[Tensor, Tensor], Tensor]


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


def by_name(networks: Sequence[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("network", networks, ids=lambda network: network.__name__)


def made(network: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return network()


def clipped_sum(model: nn.Module, radius: float) -> tuple[Sum, list[str]]:
    """The sum of clipped gradients over the radius, and the names of its parameters in order."""
    model = copy.deepcopy(model)
    per_sample = PerSample(model, numbers(*SHAPE))
    assert per_sample.vmapped == (type(model).__name__ not in LOOPED), per_sample.notes
    named = {id(p): name for name, p in model.named_parameters()}
    names = [named[id(p)] for layer in per_sample.layers for p in layer.parameters.values()]
    theta = flatten_parameters(per_sample.layers)
    clipped, metric = ClippedChunkSum(per_sample, 8), RegionMetric(ball(radius, theta))

    def added_up(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(theta)
        clipped.of(x, y, metric, out)
        return out / radius

    return added_up, names


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


def assert_bounded(model: nn.Module) -> None:
    """That leaving out a record moves the whitened sum by at most 1."""
    x, y = records()
    for radius in (0.01, 1.0):
        added_up, _ = clipped_sum(model, radius)
        whole = added_up(x, y).double()
        for left_out in range(len(x)):
            kept = torch.arange(len(x)) != left_out
            assert float((whole - added_up(x[kept], y[kept]).double()).norm()) <= 1


def assert_trained_alone(model: nn.Module) -> None:
    """That the sum is that of the gradients of copies that see one sample each."""
    x, y = records()
    added_up, names = clipped_sum(model, LARGE)
    alone = gradients_alone(model, x, y)
    expected = torch.cat([alone[name].flatten() for name in names])
    torch.testing.assert_close(added_up(x, y) * LARGE, expected, rtol=1e-4, atol=1e-4)


def without_dropout(model: nn.Module) -> nn.Module:
    """The network without what differs from sample to sample, in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.privacy
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@by_name(MIXING)
def test_a_network_that_mixes_samples_is_refused_or_sees_one_at_a_time(
    network: type[nn.Module],
) -> None:
    name, model = network.__name__, made(network)
    if name in STORING | NEVER_ALONE:
        said = "A forward pass changes the network: " if name in STORING else "including one"
        for isolated in (False, True):
            with pytest.raises(ModelError, match=said):
                check_model(model, SHAPE, CLASSES, isolated=isolated)
        return
    if name not in NOT_SEEN:
        with pytest.raises(ModelError, match=r"for a batch than for one.*add --isolate"):
            check_model(model, SHAPE, CLASSES)
    check_model(model, SHAPE, CLASSES, isolated=name not in NOT_SEEN)
    assert_trained_alone(without_dropout(model))


@pytest.mark.privacy
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@by_name(one_in(3, [network for network in MIXING if network.__name__ not in REFUSED]))
def test_a_record_moves_the_sum_of_any_network_by_at_most_one(network: type[nn.Module]) -> None:
    assert_bounded(made(network))


@pytest.mark.privacy
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, of weight norm
@by_name(one_in(3, (*INNOCENT, WordsFirst, OddlyScaled, Transposing, ReadingKernels, Tied)))
def test_an_innocent_network_is_trained_on_its_true_gradients(network: type[nn.Module]) -> None:
    model = made(network)
    check_model(model, SHAPE, CLASSES)
    model = without_dropout(model)
    assert_trained_alone(model)
    assert_bounded(model)


def of_torchvision(name: str) -> nn.Module:
    """A network of torchvision's, small, with its dropout switched on."""
    stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    made: nn.Module = (
        VisionTransformer(8, 4, 2, 2, 8, 16, 0.1, 0.1, num_classes=CLASSES)
        if name == "vit_b_16"
        else ConvNeXt(stages, 0.5, num_classes=CLASSES)
    )
    return made


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, of average pooling
@pytest.mark.parametrize("name", ["vit_b_16", "convnext_tiny"])
def test_networks_of_torchvision_are_trained_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    model = of_torchvision(name)
    check_model(model, SHAPE, CLASSES)
    per_sample = PerSample(model, numbers(*SHAPE))
    assert per_sample.vmapped, per_sample.notes


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
    """Counts its calls, in something that it holds."""

    def __init__(self, held: Any, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.held, self.change = held, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


class Memory:
    """What a network may keep beside its parameters."""

    calls = 0


def in_memory(net: Any) -> None:
    net.held.calls += 1


def in_list(net: Any) -> None:
    net.held.append(0)


def in_attribute(net: Any) -> None:
    net.held += 1


def in_buffer(net: Any) -> None:
    net.get_buffer("held").add_(1)


@pytest.mark.privacy
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("held", "change", "said"),
    [
        (0, in_attribute, "held changed"),
        ([], in_list, "held changed"),
        (deque(maxlen=4), in_list, "held changed"),
        (Memory(), in_memory, "held changed"),
        (nn.Buffer(torch.zeros(1)), in_buffer, "held was written to"),
    ],
    ids=["attribute", "list", "queue", "object", "buffer"],
)
def test_what_a_forward_pass_changes_is_named(
    held: Any, change: Callable[[Any], None], said: str, isolated: bool
) -> None:
    with pytest.raises(ModelError, match=f"A forward pass changes the network: {said}"):
        check_model(Counting(held, change), SHAPE, CLASSES, isolated=isolated)


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


@pytest.mark.privacy
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "network"])
def test_a_forward_hook_that_mixes_samples_is_refused(whole: bool) -> None:
    model = made(Perceptron)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))

    def mix(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output - output.mean(0) / 2

    def mix_inputs(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        [x] = inputs
        return (x - x.mean(0) / 2,)

    of = model if whole else layer
    of.register_forward_hook(lambda module, inputs, output: 3 * output)
    check_model(model, SHAPE, CLASSES)
    for kind, hook in (("hook", mix), ("pre_hook", mix_inputs)):
        handle = getattr(of, f"register_forward_{kind}")(hook)
        with pytest.raises(ModelError, match="for a batch than for one sample at a time"):
            check_model(model, SHAPE, CLASSES)
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
        clipped = clipped_grad(Reading(4, 3), loss, ball(1.0), batch_size=8)
        with pytest.raises(ModelError, match=r"calls torch\.distributed"):
            clipped.prepare(torch.zeros(1, 4))
    finally:
        dist.destroy_process_group()
