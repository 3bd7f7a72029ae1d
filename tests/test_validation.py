"""Networks: what mixes or stores samples is refused or isolated, what does not is trained."""

import random
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from dpmac_cli import ArrayData, load, make_private
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.networks import BuiltIn, parse_model
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import DpmacError, InputError, ModelError
from dpmac_cli.models.build import build_model, without_batch_norm
from dpmac_cli.models.fingerprint import Fingerprint
from dpmac_cli.models.validation import check_model
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.training.clipped_grad import clipped_grad
from tests.digits_runs import run_trainer
from tests.dp.reference import Subject, clip, region_clipping_half
from tests.helpers import CLASSES as TINY_CLASSES
from tests.helpers import SIDE, Through, in_chunks_of, make_trainer, numbers, tiny_data

IMAGE, CLASSES, RECORDS = (4, 6, 6), 3, 9
Function = Callable[[Any], Any]

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def classifier(*middle: nn.Module | Function) -> nn.Module:
    """A small network over IMAGE with layers or functions under test in its middle."""
    layers = (m if isinstance(m, nn.Module) else Through(m) for m in middle)
    return nn.Sequential(nn.Conv2d(4, 4, 1), *layers, nn.Flatten(), nn.Linear(144, CLASSES))


def check(model: nn.Module, **options: Any) -> None:
    check_model(model, IMAGE, CLASSES, **options)


def assert_trained_alone(model: nn.Module) -> None:
    """Its clipped sum is that of copies that see one sample each, of very different scale."""
    scales = torch.logspace(-1, 1, RECORDS).double().view(-1, 1, 1, 1)
    x, y = torch.randn(RECORDS, *IMAGE).double() * scales, torch.arange(RECORDS) % CLASSES
    subject = Subject(model.double(), x)
    g = subject.exact_gradients(x, y)
    region = region_clipping_half("ball", g, subject.theta)
    expected = clip(g, region, subject.limit).sum(0)
    torch.testing.assert_close(subject.add(x, y, region), expected, rtol=1e-6, atol=1e-9)


# Networks that mix samples, in ways seen in real code.


def hooked(change: Function) -> Function:
    def forward(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(change)  # type: ignore[no-untyped-call]  # torch gives it no types
        return x

    return forward


class Recentred(torch.autograd.Function):
    """What goes forwards treats samples apart; what comes back does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [g] = gradients
        return g - g.mean(0)


class InTraining(nn.Module):
    """Mixes while some module is in training mode."""

    def __init__(self, asked: nn.Module | None = None) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2 if (self.asked or self).training else x


class CentringDropout(nn.Dropout):
    """Dropout that removes half of the batch's mean first, which evaluation mode would hide."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean(0) / 2 if self.training else input


def capacity(x: Tensor) -> Tensor:
    """Let through three samples, as an expert with a capacity does."""
    return torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) < 3, x, x / 2)


def similar(x: Tensor) -> Tensor:
    """Add how alike a sample is to the others."""
    flat = x.flatten(1)
    unit = F.normalize(flat, dim=1)
    return x + ((unit @ unit.T).softmax(1) @ flat).view_as(x)


MIXING: Mapping[str, nn.Module | Function] = {
    "mean": lambda x: x - x.mean(0) / 2,
    "norm": lambda x: x / x.norm(),
    "softmax": lambda x: x.softmax(0) + x,
    "running sum": lambda x: x.cumsum(0),
    "roll": lambda x: 0.8 * x + 0.2 * x.roll(1, 0),
    "wrong reshape": lambda x: x.transpose(0, 1).reshape(x.shape),
    "last sample": lambda x: x - x[-1:] / 2,
    "position": lambda x: x * (1 + torch.arange(len(x)).view(-1, 1, 1, 1)),
    "batch size": lambda x: x / len(x),
    "permutation": lambda x: x + 0.1 * x[torch.randperm(len(x))],
    "similarity": similar,
    "capacity of experts": capacity,
    "ghost batch norm": lambda x: torch.cat([half - half.mean(0) / 2 for half in x.chunk(2)]),
    "training mode": InTraining(),
    "mode of dropout": InTraining(nn.Dropout(0.1)),
    "subclass of dropout": CentringDropout(),
}
#: Mix no batch of five, or only on the way back, so validation finds nothing that differs.
NOT_SEEN: Mapping[str, Function] = {
    "from 6 samples on": lambda x: x - x.mean(0) if len(x) >= 6 else x,
    "groups of eight": lambda x: x if len(x) % 8 else x - x.mean(0),
    "largest of the batch": lambda x: x / 255 if x.max() > 8 else x,
    "norm of gradients": hooked(lambda g: g / g.norm()),
    "order of gradients": hooked(lambda g: g.flip(0)),
    "backwards": Recentred.apply,
}


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", MIXING)
def test_a_network_that_mixes_samples_is_refused_unless_it_is_meant(name: str) -> None:
    """Then it sees one at a time."""
    model = classifier(MIXING[name])
    with pytest.raises(ModelError, match=r"for a batch than for one.*add --isolate"):
        check(model)
    check(model, isolated=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_trained_alone(model)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", NOT_SEEN)
def test_what_validation_cannot_see_sees_one_sample_at_a_time(name: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), Through(NOT_SEEN[name]), nn.Linear(8, 3))
    check(model)
    assert_trained_alone(model)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm2d])
def test_batch_norm_is_refused_by_name_with_its_remedy(norm: Callable[..., nn.Module]) -> None:
    layer = norm() if norm is nn.LazyBatchNorm2d else norm(4, track_running_stats=False)
    model = classifier(nn.Sequential(nn.ReLU(), layer)).eval()
    with pytest.raises(ModelError, match=rf"1\.1 is a {type(layer).__name__}.*GroupNorm"):
        check(model)


# Networks that store samples, or draw by themselves.


class Counting(nn.Module):
    """Counts its calls, in something that it holds."""

    def __init__(self, held: Any, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.held, self.change = held, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x


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


@pytest.mark.promise("validated")
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
    with pytest.raises(ModelError, match=rf"A forward pass changes the network: 1\.{said}"):
        check(classifier(Counting(held, change)), isolated=isolated)


@pytest.mark.promise("alone")
def test_running_statistics_are_refused() -> None:
    keeps = nn.InstanceNorm2d(4, track_running_stats=True)
    with pytest.raises(ModelError, match=r"1\.running_mean was.*track_running_stats=False"):
        check(classifier(keeps))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))
    with pytest.raises(ModelError, match=r"changes the network: 1\.parametrizations"):
        check(classifier(spectral))


def drawing() -> Function:
    generator = torch.Generator().manual_seed(0)
    return lambda x: x + torch.randn(x.shape, generator=generator)


def remembering() -> Function:
    kept: list[Tensor] = []

    def remember(x: Tensor) -> Tensor:
        kept.append(x.mean((2, 3), keepdim=True)[:1])
        return x + len(kept)

    return remember


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    "function",
    [lambda x: x * random.random(), drawing(), remembering()],
    ids=["python", "a generator of its own", "memory"],
)
def test_other_outputs_for_the_same_sample_are_refused(function: Function) -> None:
    with pytest.raises(ModelError, match="Use only torch for random"):
        check(classifier(function), isolated=True)


@pytest.mark.promise("alone")
def test_numbers_that_are_drawn_in_place_differ_between_samples() -> None:
    """So stochastic depth is written in torchvision."""
    dropped = classifier(lambda x: x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5))
    per_sample = PerSample(dropped, numbers(*IMAGE))
    assert per_sample.vmapped, per_sample.notes
    losses, *_ = per_sample(torch.randn(1, *IMAGE).expand(40, -1, -1, -1), torch.zeros(40).long())
    assert 5 < int((losses == losses[0]).sum()) < 35
    assert len(torch.unique(losses)) == 2


# Networks that cannot be trained as they are.


@pytest.mark.promise("alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_other_precision_are_refused_by_name(dtype: torch.dtype) -> None:
    half = classifier()
    half.get_submodule("2").to(dtype)
    with pytest.raises(ModelError, match=rf"2\.weight is {dtype}.*: network\.float\(\)"):
        check(half)


def casting(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.flatten(1) @ x.flatten(1).mT.detach()[:, :1]).float() * 0 + x.flatten(1)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("function", [casting, lambda x: x.half().to(x.dtype)])
def test_low_precision_inside_is_refused_before_training(function: Function) -> None:
    for isolated in (False, True):
        with pytest.raises(ModelError, match=r"computes \w+ in torch\.(b?)float16, as under"):
            check(classifier(function), isolated=isolated)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused_by_name(kind: str) -> None:
    """It would never be called: no gradient of the batch is computed."""
    model = classifier()
    name, parameter = next(iter(model.named_parameters()))
    getattr(parameter, kind)(lambda g: None)
    for isolated in (False, True):
        with pytest.raises(ModelError, match=rf"The parameter {name} has a hook"):
            check(model, isolated=isolated)
    parameter.requires_grad_(False)
    check(model)  # which has no gradient to change


def raising(x: Tensor) -> Tensor:
    raise ValueError(f"cannot take {x.ndim} dimensions\nof that kind")


def of_several(x: Tensor) -> Tensor:
    if len(x) == 1:
        raise ValueError("more than one sample")
    return x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            raising,
            r"failed on samples of shape \(4, 6, 6\) in float64: ValueError at "
            r"test_validation\.py, line \d+: cannot take 2 dimensions\. It must accept",
        ),
        (lambda x: sys.exit(0), "in float64: SystemExit at test_validation"),
        (lambda x: x.matmul(torch.zeros(3, 3)), "use the dtype and device of its inputs"),
        (of_several, "samples, including one"),
        (Tensor.long, "torch.int64 numbers"),
        (lambda x: x / 0 * 0, "NaN or infinity"),
        (lambda x: (x, x), "returns a tuple"),
        (lambda x: {"logits": x}, "returns a dict"),
        (lambda x: x[:, :2], r"returns \(5, 2\).*one column per class"),
        (lambda x: x.reshape(-1), "returns"),
    ],
)
def test_what_training_would_fail_on_is_found_by_validation(function: Function, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        check(nn.Sequential(classifier(), Through(function)))


def test_a_network_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing would be trained"):
        PerSample(
            nn.Sequential(classifier(), Through(Tensor.detach)), Structure(torch.zeros(1, *IMAGE))
        )


def test_weights_that_begin_as_nan_are_named() -> None:
    model = classifier()
    nn.init.constant_(model.get_parameter("2.bias"), torch.nan)
    with pytest.raises(ModelError, match=r"2\.bias contains NaN"):
        check(model)


def all_reduced(y: Tensor) -> Tensor:
    total = y.detach().mean(0).contiguous()
    dist.all_reduce(total)
    return total


def functionally(y: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    total: Tensor = functional_collectives.all_reduce(y.detach().mean(0), "sum", group)
    return total + 0


def as_objects(y: Tensor) -> Tensor:
    rows: list[Any] = [None]
    dist.all_gather_object(rows, y.detach().tolist())
    return torch.tensor(rows).sum()


@pytest.mark.promise("alone")
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("read", [all_reduced, functionally, as_objects])
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


# Networks that are trained as they are.


INNOCENT: Mapping[str, Callable[[], nn.Module]] = {
    "convolutional": lambda: classifier(
        *(nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.InstanceNorm2d(4)),
    ),
    "hooks that treat samples apart": lambda: classifier(
        hooked(lambda g: g / g.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    ),
    "each by its own": lambda: classifier(lambda x: x - x.mean((1, 2, 3), keepdim=True)),
    "frozen part": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 1).requires_grad_(False), nn.Flatten(), nn.Linear(144, CLASSES)
    ),
    "ViT of torchvision": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 3, 3),
        VisionTransformer(8, 4, 2, 2, 8, 16, 0.1, 0.1, num_classes=CLASSES),
    ),
    "ConvNeXt of torchvision": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 3, 3),
        ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.5, num_classes=CLASSES),
    ),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_an_innocent_network_is_trained_as_it_is_and_left_as_it_was(name: str) -> None:
    model = INNOCENT[name]().eval()
    before: dict[str, Any] = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    check(model)
    assert not model.training
    if "torchvision" not in name:  # which draws by itself
        assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    per_sample = PerSample(model, numbers(*IMAGE))
    assert per_sample.vmapped, per_sample.notes


@pytest.mark.parametrize(
    ("model", "dataset", "count"), [("mlp", "mnist", 795_010), ("cnn", "cifar10", 582_346)]
)
def test_parameter_counts_of_the_paper(model: str, dataset: str, count: int) -> None:
    built = build_model(BuiltIn(model), DATASETS[dataset].signature, seed=0)
    assert sum(p.numel() for p in built.parameters() if p.requires_grad) == count


# Networks of files and of programs.

NETWORKS = """
import torch
from torch import nn

class Mixing(nn.Linear):
    def __init__(self):
        super().__init__(192, 3)
    def forward(self, x):
        return super().forward(x.flatten(1) - x.flatten(1).mean(0) / 2)

class Drawing(nn.Linear):
    def __init__(self):
        super().__init__(192, 3)
    def forward(self, x):
        for _ in range(int(x.abs().sum() * 7) % 5):
            torch.rand_like(x)
        return super().forward((x * torch.rand_like(x)).flatten(1))
"""


def settings(model: str, **more: Any) -> dict[str, Any]:
    Path("net.py").write_text(NETWORKS)
    x = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    np.savez("images.npz", x=x, y=np.arange(60) % 3)
    short = {"steps": 4, "batch_size": 20, "sigma": 2, "seed": 1, "device": "cpu"}
    return {"dataset": "images.npz", "model": f"net.py:{model}", **short, **more}


@pytest.mark.promise("alone")
def test_a_run_of_a_network_that_mixes_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(ModelError, match=r"for a batch than for one.*add --isolate"):
        list(train_plan(resolve(**settings("Mixing")).plan))
    run_trainer(resolve(**settings("Mixing", isolate=True)).plan)


@pytest.mark.promise("alone")
def test_the_draws_of_a_network_differ_from_step_to_step_and_run_to_run() -> None:
    chosen = settings("Drawing", optimizer="dp-sgd", seed=None)
    one, other = (run_trainer(resolve(**chosen).plan) for _ in range(2))
    other.state.theta.copy_(one.state.theta)
    rows = np.arange(9)
    sums = [one._clip_and_sum(rows).clone(), other._clip_and_sum(rows).clone()]
    one.state.step += 1
    sums.append(one._clip_and_sum(rows).clone())
    assert len({tuple(each.tolist()) for each in sums}) == 3


#: Shapes of records in an array, and a network that takes them as they are.
SHAPES: Mapping[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "columns": ((20,), lambda: nn.Linear(20, 2)),
    "grey images": ((8, 8), lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))),
    "signals": ((3, 7), lambda: nn.Sequential(nn.Conv1d(3, 2, 7), nn.Flatten())),
    "images": ((4, 8, 8), lambda: nn.Sequential(nn.Conv2d(4, 2, 8), nn.Flatten())),
}


def numbers_of(shape: tuple[int, ...]) -> ArrayData:
    """Return records of a shape in [0, 1], of two classes."""
    x = np.random.default_rng(0).random((120, *shape))
    return ArrayData(x, np.arange(120) % 2, low=0, high=1, classes=["no", "yes"])


@pytest.mark.parametrize("kind", SHAPES)
def test_a_network_gets_records_in_the_shape_of_the_array(kind: str, tmp_path: Path) -> None:
    shape, build = SHAPES[kind]
    net, seen = build(), set()
    data, x = numbers_of(shape), torch.rand(7, *shape)
    private = make_private(net, data, sigma=4, steps=2, batch_size=16)
    private.step()
    watched = net.register_forward_hook(lambda _, given, __: seen.add(tuple(given[0].shape[1:])))
    private.evaluate()
    with torch.no_grad():
        net(private.standardise(x))
    watched.remove()
    private.publish(tmp_path / "run")
    assert len(load(tmp_path / "run", network=build).predict(x.double().numpy()).probabilities) == 7
    assert load_model(tmp_path / "run", network=build).facts.data.records.shape == shape
    assert seen == {shape}


@pytest.mark.parametrize(
    ("shape", "build"),
    [
        ((20,), lambda: nn.Conv2d(20, 2, 1)),
        ((8, 8), lambda: nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten())),
        ((8, 8), lambda: nn.Linear(64, 2)),
        ((8, 8), lambda: nn.Linear(8, 2)),
    ],
)
def test_a_network_that_takes_another_shape_is_told_what_to_write(
    shape: tuple[int, ...], build: Callable[[], nn.Module]
) -> None:
    with pytest.raises(ModelError, match=re.escape(f"samples of shape {shape}")) as told:
        make_private(build(), numbers_of(shape), sigma=4, steps=2, batch_size=16)
    assert "x.flatten(1)" in str(told.value)


def test_a_network_of_images_without_channels_gets_no_augmented_ones() -> None:
    with pytest.raises(InputError, match=re.escape("x[:, None]")):
        resolve(dataset=numbers_of((8, 8)), augmentations=2, sigma=4, steps=2)


DIGITS = DATASETS["digits"]
OWN = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Settings:
    width: int = 12

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], Settings().width, 3), nn.BatchNorm2d(12), nn.ReLU()
        )
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def broken(shape, classes):
    raise KeyError("no weights")

def wrong():
    return 3

def leaves():
    raise SystemExit(0)

def colours():
    raise RuntimeError("no \\x1b[31mway")

table = {}
_hidden = plain
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_net.py"
    file.write_text(OWN)
    return file


def failure(spec: str) -> tuple[type[Exception], str]:
    with pytest.raises(DpmacError) as raised:
        build_model(parse_model(spec), DIGITS.signature, seed=0)
    return raised.type, str(raised.value)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("missing", InputError, "has no callable 'missing'. Available: Settings, Net"),
        ("table", InputError, "has no callable 'table'"),
        (
            "broken",
            ModelError,
            "called with (shape, classes), failed: KeyError at own_net.py, line 25: 'no weights'.",
        ),
        ("colours", ModelError, "RuntimeError at own_net.py, line 34: no \\x1b[31mway."),
        ("leaves", ModelError, "called with (), failed: SystemExit at own_net.py, line 31: 0."),
        ("wrong", ModelError, "must return a torch.nn.Module, not a value of type int"),
    ],
)
def test_factories_that_make_no_model(
    own: Path, name: str, kind: type[Exception], message: str
) -> None:
    found, said = failure(f"{own}:{name}")
    assert found is kind
    assert message in said


def test_batch_norm_becomes_group_norm_wherever_it_is() -> None:
    inner = nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6, affine=False))
    model = without_batch_norm(nn.Sequential(inner, nn.BatchNorm1d(64), nn.SyncBatchNorm(7)))
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert [(n.num_groups, n.num_channels, n.affine) for n in norms] == [
        (3, 6, False),
        (32, 64, True),
        (1, 7, True),
    ]
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert isinstance(without_batch_norm(nn.BatchNorm1d(4)), nn.GroupNorm)


Change = Callable[[Any], object]
IN, WIDTH = SIDE**2, 5


class Adjustable(nn.Module):
    """Holds a frozen layer, a buffer, and attributes that a forward pass may read."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(IN, WIDTH).requires_grad_(False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TINY_CLASSES)
        self.middle = nn.Sequential(nn.Conv2d(1, 2, 2, padding=1), nn.Flatten(), nn.Linear(32, IN))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.mixing, self.sizes = False, [1, 2]
        self.queue = deque([0], maxlen=4)
        self.closing, self.memory = torch.tanh, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.closing(self.first(self.base(self.middle(x)) * self.scale))
        logits: Tensor = self.last(x)
        return logits


@torch.enable_grad()
def differentiated(net: nn.Module) -> None:
    """Compute gradients, as the loop that was there before."""
    net(torch.ones(1, 1, SIDE, SIDE)).sum().backward()


#: Changes to an :class:`Adjustable`, and what the refusal says. ``first.weight`` is trained.
CHANGES: dict[str, tuple[Change, str]] = {
    "frozen": (lambda n: n.first.requires_grad_(False), r"first\.weight was frozen"),
    "layers in another order": (
        lambda n: n.middle._modules.update({"0": n.middle._modules.pop("0")}),
        r"middle\._modules changed",
    ),
    "a forward of its own": (
        lambda n: setattr(n.first, "forward", lambda x: x - x.mean(0)),
        r"first\.forward was added",
    ),
    "a flag": (lambda n: setattr(n, "mixing", True), "mixing changed"),
    "a list": (lambda n: n.sizes.append(3), "sizes changed"),
    "a queue": (lambda n: n.queue.append(1), "queue changed"),
    "a function": (lambda n: setattr(n, "closing", torch.relu), "closing changed"),
    "an object's attribute": (lambda n: setattr(n.memory, "calls", 1), "memory changed"),
    "a buffer replaced": (lambda n: setattr(n, "scale", torch.ones(WIDTH)), "scale was replaced"),
    "a frozen parameter": (lambda n: n.base.weight.mul_(2), r"base\.weight was written to"),
    "hook": (
        lambda n: n.first.register_forward_pre_hook(lambda *_: None),
        "hooks of first changed",
    ),
    "a gradient": (differentiated, r"first\.weight has a gradient.*net\.zero_grad"),
}


def trainer_of(net: nn.Module) -> Any:
    """In chunks of one record, which are not tried for rounding."""
    data, plan = tiny_data(torch.float32), in_chunks_of(1)
    return make_trainer("dp-sgd", model=net, dtype=torch.float32, data=data, plan=plan)


@pytest.mark.promise("validated")
@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    net = Adjustable()
    trainer = trainer_of(net)
    trainer.step()
    change, said = CHANGES[name]
    change(net)
    before, begun = trainer.state.theta.clone(), trainer.account.begun
    with pytest.raises(ModelError, match=said):
        trainer.step()
    assert trainer.account.begun == begun  # nothing was spent
    assert torch.equal(trainer.state.theta, before)
    with pytest.raises(ModelError, match=said):
        trainer.check_network()  # as before the network is published


class ChangesItself(Adjustable):
    """Changes itself in forward passes from a call on, counted from 0."""

    def __init__(self, change: Change, when: int) -> None:
        super().__init__()
        self.change, self.when, self.calls = change, when, iter(range(10**6))

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == self.when:
            self.change(self)
        return super().forward(x)


#: Ways in which a network would carry a record to the next.
ITSELF = ("a flag", "a list", "a queue", "an object's attribute", "a buffer replaced")


def never(net: nn.Module) -> None:
    """Change nothing."""


@pytest.mark.promise("validated")
@pytest.mark.parametrize("name", ITSELF)
def test_a_network_that_changes_itself_is_refused_before_the_noise(name: str) -> None:
    torch.manual_seed(0)
    change, said = CHANGES[name]
    net = ChangesItself(never, 0)
    trainer = trainer_of(net)
    trainer.step()
    trainer.step()
    before, net.change, net.when = trainer.state.theta.clone(), change, next(net.calls) + 1
    trainer.sums.unchanged = Fingerprint(net, trainer.sums.trained)
    with pytest.raises(ModelError, match=rf"{said}.*this step is not used"):
        trainer.step()
    assert torch.equal(trainer.state.theta, before)
    assert trainer.state.step == 2


@pytest.mark.promise("validated")
def test_a_buffer_that_was_written_to_is_refused_each_time() -> None:
    norm = nn.BatchNorm1d(2)
    kept = Fingerprint(norm, set())
    norm.get_buffer("running_mean").add_(1)
    for _ in range(2):
        with pytest.raises(ModelError, match="running_mean was written to"):
            kept.check()


@pytest.mark.promise("alone")
def test_statistics_in_a_buffer_are_not_published() -> None:
    net = Adjustable()
    trainer = trainer_of(net)
    trainer.step()
    net.scale.data.mul_(2)  # .data hides it from autograd, and from the check around each step
    trainer.step()
    with pytest.raises(ModelError, match="changed its scale during training"):
        trainer.check_network()
