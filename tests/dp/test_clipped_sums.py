"""Clipped sums against autograd in float64 on one record at a time."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    dropout,
    log_softmax,
    nll_loss,
    scaled_dot_product_attention,
    softmax,
)
from torch.nn.modules.module import register_module_forward_hook

from dpmac_cli.dp.clipping import matmul
from dpmac_cli.dp.clipping.batch_invariance import fill_rows
from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import (
    clip_limit,
    clip_weights,
)
from dpmac_cli.dp.clipping.custom_layers import ConstantNorm, Lookups, StandardisedConv2d
from dpmac_cli.dp.clipping.ghost_clipping import UseSizes
from dpmac_cli.dp.clipping.layer_calls import chain_of
from dpmac_cli.dp.clipping.layer_gradients import Instantiated, PerSampleGradients
from dpmac_cli.dp.clipping.layer_rules import RULES, Use, in_groups, instantiate
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.looked_up import LookedUp
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.clipping.projections import MASKS
from dpmac_cli.dp.clipping.recurrent import by_projections
from dpmac_cli.dp.clipping.tied_products import TiedProducts
from dpmac_cli.dp.clipping.unfold import inputs_by_position
from dpmac_cli.dp.clipping.vmap_support import constant_draws, each_alone
from dpmac_cli.dp.losses import build_loss, check_loss
from dpmac_cli.dp.mechanism import GaussianMechanism, ball, ellipsoid
from dpmac_cli.errors import ModelError
from dpmac_cli.training.clipped_grad import clipped_grad
from tests.helpers import Batches, in_chunks_of, make_trainer, numbers
from tests.layer_cases import CASES, SIGNAL, Case, Do, energy, frozen
from tests.pairwise import all_pairs
from tests.tiers import pairs_short

from .reference import Subject, clip, region_clipping_half

RECORDS, CLASSES = 6, 3
KINDS = ("ball", "ellipsoid")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
SMALL = {f"{case.group}: {case.name}": case for case in CASES}
#: A network of each layer with a rule. It runs on a whole chunk at once, and so without the trial
#: that would find a wrong rule.
ALONE = (
    *("Linear: Linear, at 12 positions", "embeddings: Embedding, padding_idx"),
    *("convolutions: Conv1d", "convolutions: Conv2d", "convolutions: Conv3d"),
    *("convolutions: StandardisedConv2d, 2 groups", "norms: ConstantNorm", "norms: GroupNorm"),
    *("norms: LayerNorm", "norms: RMSNorm"),
)
#: Networks that vmap cannot run.
LOOPED = {
    "LSTM, packed sequence",
    "checkpointed block",
    "custom autograd.Function",
    "if x.max() > 1",
}
#: How gradients are found and stored.
WAYS = ("chosen", "pairs of positions", "pieces", "at once", "by oneDNN", "loop")
SETTINGS = all_pairs(WAYS, KINDS, [1, 3], [*TOLERANCE])

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def built(case: Case) -> nn.Module:
    """The network of a case, without dropout in layers that draw by themselves."""
    network: nn.Module = case.build()
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return network


def every_case() -> Iterator[Any]:
    """Each network in two settings; one of them is short for the first and every other network."""
    isolated = "networks: x - x.mean(0)"  # which sees one record at a time here
    trained = [name for name, case in SMALL.items() if not case.refused or name == isolated]
    for number, name in enumerate(trained):
        # Terms of many positions cancel: in float32 they are those of another forward pass.
        many = len(SMALL[name].shape) > 2 or SMALL[name].shape == SIGNAL or "layers" in name
        for shift in (0, 5):
            *setting, dtype = SETTINGS[(number + shift) % len(SETTINGS)]
            marks = [pytest.mark.long] if shift or (number > 8 and number % 2) else []
            yield pytest.param(name, *setting, torch.float64 if many else dtype, marks=marks)
    for name in ALONE:
        yield pytest.param(name, "at once", "ellipsoid", 1, torch.float64)


@pytest.mark.promise("one")
@pytest.mark.parametrize(("name", "way", "kind", "views", "dtype"), [*every_case()])
def test_sums_are_those_of_each_record_alone(
    name: str, way: str, kind: str, views: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SMALL[name]
    if way in {"pairs of positions", "pieces"}:
        monkeypatch.setattr("dpmac_cli.dp.clipping.layer_gradients.PIECE", 500)
        monkeypatch.setattr("dpmac_cli.dp.clipping.layer_gradients.HELD", 0)
        monkeypatch.setattr("dpmac_cli.dp.clipping.tied_products.ADDED", 2)
        cheap = ("instantiating", lambda *_: 0) if way == "pieces" else ("pairs", 0)
        monkeypatch.setattr(UseSizes, *cheap)
    x = case.batch()[: RECORDS * views]
    x = x.to(dtype) if x.is_floating_point() else x
    x = x.view(RECORDS, views, *case.shape) if views > 1 else x
    model = built(case).to(dtype)
    subject = Subject(
        model, x[0] if views > 1 else x, views=views, loss=energy, rowwise=way == "at once"
    )
    if way == "by oneDNN":
        subject.per_sample.by_rows = True
    elif way == "loop":
        subject.per_sample.run_in_a_loop("as asked.")
    else:
        assert subject.per_sample.vmapped == (case.name not in LOOPED), subject.per_sample.notes
    assert_matches_oracle(subject, x, torch.zeros(x.shape[: min(views, 2)]).long(), kind)


@pytest.mark.promise("one")
def test_every_rule_is_tried_on_a_whole_chunk() -> None:
    networks = [built(SMALL[name]) for name in ALONE]
    assert None not in map(chain_of, networks)
    in_linear_with_places = {Lookups}  # see the rows that a sample reads in several views
    assert {*map(type, networks)} | in_linear_with_places == {*RULES}


def assert_matches_oracle(subject: Subject, x: Tensor, y: Tensor, kind: str) -> None:
    g = subject.exact_gradients(x, y)
    region = region_clipping_half(kind, g, subject.theta)
    with constant_draws():
        total = subject.add(x, y, region)
    error = (total.double() - clip(g, region, subject.limit).sum(0)) / region.scale
    assert error.norm() <= TOLERANCE[subject.theta.dtype] * len(x)


@pytest.mark.promise("one")
@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if case.refused])
def test_layers_that_cannot_be_clipped_are_refused(name: str) -> None:
    case = SMALL[name]
    clipped = clipped_grad(built(case), case.loss, ball(0.05), batch_size=RECORDS)
    with pytest.raises(ModelError, match=case.refused):
        clipped(case.batch()[:RECORDS])


@pytest.mark.parametrize(
    ("name", "recorded"),
    {
        "Linear: Linear": {""},
        "attention: MultiheadAttention": {"part.in_proj", "part.out_proj"},
        "recurrent: GRU": {"part.ih_l0", "part.hh_l0"},
        "parameters: F.linear(x, layer.weight)": {"part"},
        "parameters: layer(x) @ layer.weight": set(),
        "parameters: 2 * layer.bias": set(),
        "parameters: x + self.p": {"head"},
        "parameters: one weight in two Linear layers": {"0", "0.weight", "2"},
        "networks: Linear on positions as rows": {"part"},
        "networks: custom autograd.Function": set(),
    }.items(),
)
def test_layers_whose_gradients_follow_from_their_calls(name: str, recorded: set[str]) -> None:
    case = SMALL[name]
    assert PerSample(case.build(), numbers(*case.shape), loss=energy).recorded == recorded


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [*TOLERANCE])
def test_rows_that_a_sample_reads_in_several_views_are_one_gradient(
    kind: str, views: int, rowwise: bool, dtype: torch.dtype
) -> None:
    case = SMALL["embeddings: LinearWithPlaces"]
    x = case.batch()[: RECORDS * views].to(dtype)
    x = x.view(RECORDS, views, *case.shape) if views > 1 else x
    first: Any = built(case)
    network = nn.Sequential(nn.Flatten(), first.part, nn.ReLU(), nn.Linear(8, 5)).to(dtype)
    example = x[0] if views > 1 else x
    subject = Subject(network, example, views=views, loss=energy, rowwise=rowwise)
    forms = {type(form) for _, form in subject.gradients(x, labels_of(x, views), ball=True)}
    assert LookedUp in forms
    assert_matches_oracle(subject, x, labels_of(x, views), kind)


def labels_of(x: Tensor, views: int) -> Tensor:
    return torch.zeros(x.shape[: min(views, 2)]).long()


@pytest.mark.promise("one")
@pytest.mark.parametrize("words", [30, 90])
def test_a_tied_weight_of_many_words_is_never_instantiated(words: int) -> None:
    case = SMALL[f"parameters: the same of {words} words, with padding"]
    x, y = case.batch()[:RECORDS], torch.zeros(RECORDS).long()
    x[:, -1:] = x[:, :1]  # a token that is repeated
    subject = Subject(case.build().double(), x, loss=energy)
    assert TiedProducts in map(type, subject.forms(x, y))
    assert_matches_oracle(subject, x, y, "ball")


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x - x.mean(0)
    return module


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        Do(lambda s, x: s.part(x), part=nn.Linear(4, 4)),
        nn.Sequential(hooked(nn.Linear(4, 4))),
        hooked(nn.Sequential(nn.Linear(4, 4))),
        with_forward(nn.Sequential(nn.Linear(4, 4))),
    ],
    ids=["softmax", "flatten", "in place", "batch norm", "own", "hook", "outer hook", "forward"],
)
def test_other_networks_are_no_sequence_of_known_layers(model: nn.Module) -> None:
    assert chain_of(model) is None
    known = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert chain_of(known) == list(known)


@pytest.mark.promise("alone")
def test_a_hook_of_all_modules_sees_one_sample_at_a_time() -> None:
    """It may mix samples for values that no made-up sample has."""
    seen = list[int]()

    def hook(module: nn.Module, given: Any, out: Tensor) -> None:
        seen.append(len(out))

    handle = register_module_forward_hook(hook)
    try:
        model = nn.Sequential(nn.Linear(4, CLASSES), nn.ReLU())
        per_sample = PerSample(model, numbers(4), rowwise=True)
        seen.clear()
        per_sample(torch.ones(RECORDS, 4), torch.zeros(RECORDS).long())
    finally:
        handle.remove()
    assert {*seen} == {1}


class Limited(torch.autograd.Function):
    """Scales down large inputs, with a rule for vmap that scales all samples by the largest."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / x.abs().max().clamp(min=100)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] / x.abs().max().clamp(min=100)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Limited.apply(x), in_dims[0]


@pytest.mark.promise("alone")
def test_a_networks_own_rule_for_vmap_is_not_called() -> None:
    """It sees all samples, and made-up ones need not show that it mixes them."""
    network = Do(lambda net, x: net.head(Limited.apply(x)), head=nn.Linear(4, CLASSES))
    per_sample = PerSample(network, numbers(4))
    assert "has a torch.autograd.Function with a vmap of its own" in per_sample.notes[0]
    x, y = torch.ones(RECORDS, 4), torch.zeros(RECORDS).long()
    before, *_ = per_sample(x, y)
    x[0] = 1e6
    assert torch.equal(before[1:], per_sample(x, y)[0][1:])


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        find_layers(frozen(nn.Linear(4, 2, bias=False), "weight"))


# The margin, and samples that are not finite.


@pytest.mark.promise("one")
@pytest.mark.parametrize("batch", [256, 8192])
def test_the_margin_is_for_all_chunks_of_a_step(batch: int) -> None:
    """How many are worked on at a time leaves it as it is."""
    given: dict[str, Any] = {"clip_norm": 1e-3, "sampler": Batches([0]), "dtype": torch.float32}
    for physical in (2, 64):
        trainer = make_trainer(
            "dp-sgd", GaussianMechanism(0.0, batch), plan=in_chunks_of(physical), **given
        )
        norm = trainer._clip_and_sum(np.array([0])).double().norm().item() / 1e-3
        assert norm == pytest.approx(1 / (1 + 6e-4 * max(1, batch / 1024)), abs=1e-6)


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, CLASSES)),
    "positions": lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, CLASSES), Mean()),
    "convolution": lambda: nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)),
    ),
    "instantiated": lambda: nn.Sequential(
        *(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), nn.LayerNorm(4)),
        *(nn.Flatten(), nn.Linear(32, CLASSES)),
    ),
}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("name", "kind", "poison", "way"),
    pairs_short(
        [*NETS],
        KINDS,
        [torch.nan, torch.inf, -torch.inf, 1e10, 1e19, 1e30, 3e38],
        ["batch", "views", "loop"],
    ),
)
def test_a_sample_that_is_not_finite_adds_nothing(
    name: str, kind: str, poison: float, way: str
) -> None:
    """Whether a number near overflow counts as finite is up to rounding; what it may do is not."""
    views = 3 if way == "views" else 1
    shape = (RECORDS, views) if views > 1 else (RECORDS,)
    x, y = torch.randn(*shape, 2, 4, 4), torch.randint(CLASSES, shape)
    subject = Subject(NETS[name](), x[0] if views > 1 else x, views=views)
    if way == "loop":
        subject.per_sample.run_in_a_loop("as asked.")
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    without = subject.add(x[1:], y[1:], region)
    x.view(RECORDS, views, -1)[0, -1] *= poison
    total = subject.add(x, y, region)
    moved = ((total.double() - without.double()) / region.scale).norm()
    assert moved <= (1 if abs(poison) < torch.inf else 1e-5)  # NaN is not


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_only_fill_a_chunk_add_nothing(kind: str) -> None:
    x, y = torch.randn(RECORDS, 2, 4, 4), torch.randint(CLASSES, (RECORDS,))
    subject = Subject(NETS["mlp"](), x)
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    filled, metric = torch.empty_like(subject.theta), RegionMetric(region)
    subject.clipped_sum.of(
        fill_rows(x, 16), fill_rows(y, 16), metric, filled, torch.arange(16) < RECORDS
    )
    error = ((filled - subject.add(x, y, region)) / region.scale).norm()
    assert error <= TOLERANCE[torch.float32] * RECORDS


def forms_with(a: Tensor, grad_output: Tensor) -> list[PerSampleGradients]:
    linear = nn.Linear(a.shape[1], grad_output.shape[1])
    [layer] = find_layers(linear)
    g = torch.cat([(grad_output.unsqueeze(2) * a.unsqueeze(1)).flatten(1), grad_output], 1)
    outer = OuterProducts(grad_output.unsqueeze(1), a.unsqueeze(1), True)
    groups = list(in_groups([Use.of(linear, a, grad_output)], 2))
    pieces = Instantiated(lambda: (instantiate(layer, some) for some in groups))
    return [outer, Instantiated(lambda: [[g]]), pieces]


@pytest.mark.promise("one")
@pytest.mark.parametrize("form", range(3), ids=["outer", "instantiated", "in pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_activations_times_zero_gradients(form: int, kind: str) -> None:
    a, grad_output = torch.randn(3, 4), torch.randn(3, 2)
    a[1], grad_output[1] = float("inf"), 0.0
    gradients = forms_with(a, grad_output)[form]
    theta = torch.zeros(10)
    region = ball(1.0, theta) if kind == "ball" else ellipsoid(theta + 0.1, theta + 1)
    layer = find_layers(nn.Linear(4, 2))[0]
    c, valid = clip_weights(gradients.squared_norms(RegionMetric(region).of(layer)), clip_limit(1))
    assert valid.tolist() == [True, False, True]

    gradients.weighted_sum(c.float(), valid, theta)
    expected = torch.zeros_like(theta)
    forms_with(a[valid], grad_output[valid])[form].weighted_sum(
        c[valid].float(), valid[valid], expected
    )
    torch.testing.assert_close(theta, expected)


@pytest.mark.promise("one")
@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 20])
def test_sums_over_records_are_those_of_either_library(
    is_faster: bool, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time where oneDNN is faster, the last of which are fewer."""
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: is_faster)
    monkeypatch.setattr(matmul, "COPIED", 3 * 5)
    a, b = torch.randn(9, rows, dtype=dtype), torch.randn(9, 5, dtype=dtype)
    out = torch.full((rows, 5), torch.nan, dtype=dtype)
    matmul.multiply(a, b, out)
    exact = (a.double().T @ b.double()).to(dtype)
    torch.testing.assert_close(out, exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("family", "capability", "found"),
    [(26, "AVX512", True), (26, "AVX2", False), (25, "AVX512", False), (None, "AVX512", False)],
)
def test_onednn_is_faster_where_avx_512_has_its_full_width(
    family: int | None,
    capability: str,
    found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = tmp_path / "cpuinfo"
    if family is not None:
        listed.write_text(f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: 17\n")
    monkeypatch.setattr(matmul, "Path", lambda _: listed)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert matmul.onednn_is_faster.__wrapped__() == (found and matmul._ONEDNN)


# Steps that differ from the trial.


@pytest.mark.promise("published")
@pytest.mark.parametrize("part", ["choose_form", "total_squared_norms", "clip_weights"])
def test_no_failure_of_a_clipped_sum_tells_of_its_records(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception may quote what it sees."""

    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("the patient weighs 71 kg")

    x, y = torch.randn(RECORDS, 4), torch.zeros(RECORDS).long()
    subject = Subject(nn.Linear(4, CLASSES), x)
    monkeypatch.setattr(f"dpmac_cli.dp.clipping.clipped_sum.{part}", failing)
    with pytest.raises(ModelError, match="may contain private records") as caught:
        subject.add(x, y, ball(1.0, subject.theta))
    assert "71" not in str(caught.value)


CHANGED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "no call": (lambda s, x: x, "called its layers differently"),
    "two calls": (lambda s, x: s.part(s.part(x)), "called its layers differently"),
    "a decision": (lambda s, x: s.part(x * float(x.sum())), "The network failed"),
    "without a batch": (lambda s, x: s.part(x.flatten()), "called its layers differently"),
}


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", CHANGED)
def test_a_network_that_runs_in_another_way_than_in_its_trial_is_refused(name: str) -> None:
    """Which way samples are run must not depend on them, and no hook is left behind."""
    model = Do(lambda s, x: s.part(x), part=nn.Linear(CLASSES, CLASSES))
    x, y = torch.randn(RECORDS, CLASSES), torch.zeros(RECORDS).long()
    subject = Subject(model, x)
    model.function, message = CHANGED[name]
    with pytest.raises(ModelError, match=message):
        subject.add(x, y, ball(1.0, subject.theta))
    assert not any(module._forward_hooks for module in model.modules())


def test_zeros_at_the_start_hide_no_use_of_a_weight() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.table((x.abs() * 10).long() % CLASSES).mean(1).tanh()
        out: Tensor = net.head(hidden) + net.gate(hidden @ net.table.weight.T)
        return out

    gate = nn.Linear(CLASSES, CLASSES)
    nn.init.zeros_(gate.weight)
    parts = {"table": nn.Embedding(CLASSES, 4), "head": nn.Linear(4, CLASSES), "gate": gate}
    x, y = torch.randn(RECORDS, 5).double(), torch.arange(RECORDS) % CLASSES
    subject = Subject(Do(run, **parts).double(), x)
    subject.theta.normal_()
    for named, p in subject._alone.named_parameters():
        p.data.copy_(subject.per_sample._model.get_parameter(named))
    assert_matches_oracle(subject, x, y, "ball")


def nearly_constant() -> nn.Module:
    """A convolution whose weights are too alike to divide by their norm."""
    conv = StandardisedConv2d(2, 3, 1)
    conv.weight.data.mul_(1e-4)
    conv.gain.data.normal_()
    return conv


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.LayerNorm(4, eps=0.5), (3, 4)),
        (lambda: nn.RMSNorm(4, eps=0.5), (3, 4)),
        (lambda: nn.GroupNorm(2, 4, eps=0.5), (4, 3)),
        (lambda: ConstantNorm(nn.BatchNorm2d(4, eps=0.5), "0"), (4, 3, 3)),
        (nearly_constant, (2, 3, 3)),
    ],
)
def test_rules_have_the_constants_of_their_layers(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    layer, x = build().double(), torch.randn(1, *shape).double()
    out = layer(x)
    delta = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [*layer.parameters()], delta)
    [found] = find_layers(layer)
    columns = instantiate(found, [Use.of(layer, x[None], delta[None])])
    for column, expected in zip(columns, wanted, strict=True):
        torch.testing.assert_close(column[0], expected.flatten())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_patches_have_the_padding_of_their_layer(mode: Any) -> None:
    conv, x = nn.Conv2d(2, 3, 3, padding=2, padding_mode=mode), torch.randn(2, 2, 4, 4)
    assert conv.bias is not None
    found = inputs_by_position(conv, x) @ conv.weight.flatten(1).T + conv.bias
    out = conv(x)
    torch.testing.assert_close(found.mT.reshape(out.shape), out)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_inputs_of_a_recurrent_layer_are_not_dropped(kind: type[nn.Module]) -> None:
    layer, x = kind(3, 4, dropout=0.5, batch_first=True), torch.randn(2, 5, 3)
    expected, _ = layer(x)
    with by_projections([layer]):
        found, _ = layer(x)
    torch.testing.assert_close(found, expected)


def test_a_constant_norm_is_its_batch_norm_in_evaluation_mode() -> None:
    norm, x = nn.BatchNorm2d(4, eps=0.5).eval(), torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(ConstantNorm(norm, "0")(x), norm(x))


def test_made_up_rows_have_the_integers_of_every_row_of_an_example() -> None:
    example = torch.tensor([[1], [4], [7]])
    assert Structure(example, keep=True).made_up(4).tolist() == [[1], [4], [7], [1]]


def test_made_up_masks_leave_tokens_of_both_kinds() -> None:
    """Among equal tokens alone, attention has no gradient to compare."""
    for length in (2, 3, 4, 9):
        zeros = torch.zeros(1, length, dtype=torch.long)
        made = Structure({"ids": zeros, "mask": zeros}).made_up(3)
        assert {0, 1} == set(made["mask"].unique().tolist())
        seen = made["ids"][made["mask"].bool()].unique()
        assert len(seen) == (2 if length > 3 else 1)


def masked(net: Any, x: Tensor) -> Tensor:
    """Leave out a mask that hides nothing unless it is traced, as networks of transformers do."""
    hidden, mask = net.first(x), x[:, :4] > 0
    if sys.modules[MASKS].is_tracing(mask) or not bool(mask.all()):
        hidden = torch.where(mask, hidden, 0)
    out: Tensor = net.last(hidden.tanh())
    return out


@pytest.mark.promise("alone")
def test_masks_of_transformers_are_kept_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities: Any = ModuleType(MASKS)
    utilities.is_tracing = before = lambda _: False
    monkeypatch.setitem(sys.modules, MASKS, utilities)
    model = Do(masked, first=nn.Linear(5, 4), last=nn.Linear(4, CLASSES)).double()
    x, y = torch.randn(RECORDS, 5).double(), torch.arange(RECORDS) % CLASSES
    x[0] = 1.0  # hides nothing
    subject = Subject(model, x)
    assert subject.per_sample.vmapped
    assert_matches_oracle(subject, x, y, "ball")
    alone = each_alone(model)
    torch.testing.assert_close(alone(x), torch.cat([model(row) for row in torch.split(x, 1)]))
    assert utilities.is_tracing is before


# Random draws in a forward pass.


class Fused(nn.Module):
    """Attention as timm has it: by a function that is told how much to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(4, 12), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 2)
        return scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p)


def drop_path(net: Any, x: Tensor) -> Tensor:
    """Leave out some samples of a residual branch, as timm's."""
    kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)
    out: Tensor = x + dropout(net.part(x), 0.2) * kept
    return out


def attending(**named: Any) -> nn.Module:
    attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)
    return Do(lambda s, x: s.part(x, x.flip(1), x.tanh(), **named)[0], part=attention)


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: attending(need_weights=False),
    "mask": lambda: attending(attn_mask=torch.eye(3) < 1),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.4, batch_first=True),
    "fused": Fused,
    "drop-path": lambda: Do(drop_path, part=nn.Linear(4, 4)),
}


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", DROPPING)
def test_gradients_are_those_of_the_losses_that_were_drawn(name: str) -> None:
    """Each record has its own draws; norms, sums and gradients belong to the same ones."""
    head = (nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))
    model = nn.Sequential(DROPPING[name](), *head).double()
    x, y = torch.randn(RECORDS, 3, 4).double(), torch.arange(RECORDS) % CLASSES
    per_sample = PerSample(model, Structure(x[:1]))
    assert per_sample.vmapped, per_sample.notes
    theta = flatten_parameters(per_sample.layers)
    epsilon, direction = 1e-6, torch.randn_like(theta)
    torch.manual_seed(1)
    losses, _, found = per_sample(x, y)
    columns: list[Tensor] = []
    for layer, of in zip(per_sample.layers, found, strict=True):
        columns += [of] if isinstance(of, Tensor) else instantiate(layer, of)
    slopes = []
    for sign in (1, -1):
        theta.add_(direction, alpha=sign * epsilon)
        torch.manual_seed(1)
        slopes.append(per_sample(x, y)[0])
        theta.sub_(direction, alpha=sign * epsilon)
    by_difference = (slopes[0] - slopes[1]) / (2 * epsilon)
    torch.testing.assert_close(
        torch.cat(columns, 1) @ direction, by_difference, rtol=1e-5, atol=1e-7
    )
    assert not any("forward" in vars(module) for module in model.modules())
    torch.manual_seed(2)
    assert not torch.allclose(losses, per_sample(x, y)[0])
    copies = per_sample(x[:1].expand(RECORDS, -1, -1), y[:1].expand(RECORDS))[0]
    assert len({*copies.tolist()}) > 1


def counting(net: Any, x: Tensor) -> Tensor:
    """Multiply by the number of calls so far."""
    net.calls += 1
    out: Tensor = net.head(x) * net.calls
    return out


@pytest.mark.promise("alone")
def test_in_a_loop_no_record_finds_what_another_left() -> None:
    network: Any = Do(counting, head=nn.Linear(4, CLASSES))
    network.calls = 0
    per_sample = PerSample(network, numbers(4))
    assert not per_sample.vmapped
    losses, *_ = per_sample(torch.ones(RECORDS, 4), torch.zeros(RECORDS).long())
    assert len({*losses.tolist()}) == 1


# Losses.


def equal(output: Tensor, y: Tensor) -> Tensor:
    return -log_softmax(output, 1).gather(1, y[:, None])[:, 0]


def focal(output: Tensor, y: Tensor) -> Tensor:
    p = softmax(output, 1).gather(1, y[:, None])[:, 0]
    return -((1 - p) ** 2) * p.log()


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    logs = log_softmax(output, 1)
    return 0.9 * nll_loss(logs, y, reduction="none") - 0.1 * logs.mean(1)


@pytest.mark.parametrize(
    ("name", "smoothing", "expected"),
    [
        ("cross-entropy", 0.0, equal),
        ("cross-entropy", 0.1, smoothed),
        ("focal", 0.0, focal),
    ],
)
def test_losses_are_those_of_their_papers(name: str, smoothing: float, expected: Any) -> None:
    output, y = torch.randn(7, CLASSES).double(), torch.arange(7) % CLASSES
    torch.testing.assert_close(build_loss(name, smoothing)(output, y), expected(output, y))


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", ["mse", "huber", "quantile:0.9"])
def test_numbers_in_another_shape_are_not_compared_with_every_sample(name: str) -> None:
    outputs, targets = torch.zeros(5, 1), torch.linspace(-1, 1, 5)
    with pytest.raises(ModelError, match=r"Both need shape \(samples, 1\)"):
        build_loss(name)(outputs, targets)
    assert build_loss(name)(outputs, targets[:, None]).shape == (5,)


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
