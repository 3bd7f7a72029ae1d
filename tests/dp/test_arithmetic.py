"""Arithmetic of a step: no setting of the program and no other row of a batch changes it."""

import contextlib
import json
import logging
import random
import runpy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dpmac_cli import clipped_grad
from dpmac_cli.dp.clipping.batch_invariance import (
    LEAST_ROWS,
    PERIOD,
    TRIALS,
    TRIED,
    chunks_alike,
    unaffected,
)
from dpmac_cli.dp.clipping.matmul import RowProducts, matmul
from dpmac_cli.dp.clipping.norms import roundoff
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.dp.precision import PLACES, SETTINGS, Arithmetic, full_float32
from dpmac_cli.features import stored
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.training.evaluation import Evaluation
from tests.helpers import CLASSES, PLAN, SIDE, make_trainer, tiny_data
from tests.tiers import rest_long

_OF_TORCH: Any = torch._C
BACKENDS: Any = torch.backends
read, write = _OF_TORCH._get_fp32_precision_getter, _OF_TORCH._set_fp32_precision_setter


def precisions() -> list[str]:
    return [read(*place) for place in PLACES]


def inner() -> list[Any]:
    """All that can be found out about the settings, also by changing them for a moment."""
    found: list[Any] = [precisions()]
    before = read("generic", "all")
    for precision in ("none", "ieee", "tf32"):
        write("generic", "all", precision)
        found.append(precisions())
    write("generic", "all", before)
    for old in (torch.get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32):
        try:
            found.append(old())
        except RuntimeError:  # it contradicts the newer settings
            found.append(None)
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = precisions()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for place, precision in zip(PLACES, before, strict=True):
        if read(*place) != precision:
            write(*place, precision)


def choices() -> list[Callable[[], None]]:
    """What a program may set."""
    return [
        *(partial(write, *place, v) for place in PLACES for v in ("none", "ieee", "tf32")),
        *(partial(torch.set_float32_matmul_precision, n) for n in ("highest", "high", "medium")),
        *(partial(_OF_TORCH._set_cudnn_allow_tf32, allowed) for allowed in (True, False)),
    ]


@pytest.mark.promise("precision")
def test_precision_is_full_inside_and_the_programs_outside() -> None:
    generator = random.Random(0)
    for _ in range(500):
        generator.choice(choices())()
        before = inner()
        with full_float32():
            assert set(precisions()) == {"ieee"}
        assert inner() == before
        with contextlib.suppress(ZeroDivisionError), full_float32():
            1 / 0  # noqa: B018
        assert inner() == before


@pytest.mark.promise("precision")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_of_a_program_is_off_inside(device: str) -> None:
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, True)
    try:
        with full_float32():
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, before)


def named() -> dict[str, Any]:
    """The settings besides precision by name."""
    return dict(zip(SETTINGS, Arithmetic.now().values, strict=True))


class Noticing(nn.Module):
    """Notes the settings in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        NOTES.info(
            "a forward pass",
            {
                "precision": set(precisions()),
                "autocast": torch.is_autocast_enabled("cpu"),
                "inference": torch.is_inference_mode_enabled(),
                "dtype": torch.get_default_dtype(),
            },
        )
        NOTES.info("other settings", named())
        logits: Tensor = self.layer(x.flatten(1))
        return logits


SEEN: list[Any] = []
OTHERS: list[Any] = []


class Keeping(logging.Handler):
    """Keep what a network logs. A global list that it changes would be refused."""

    def emit(self, record: logging.LogRecord) -> None:
        kept = SEEN if record.msg == "a forward pass" else OTHERS
        kept.append(record.args)


NOTES = logging.getLogger("tests.precision")
NOTES.propagate = False
NOTES.setLevel(logging.INFO)
NOTES.addHandler(Keeping())
OURS = {
    "precision": {"ieee"},
    "autocast": False,
    "inference": False,
    "dtype": torch.float32,
}


def made() -> Noticing:
    torch.manual_seed(0)
    return Noticing()


def trainer_of(net: nn.Module | None = None) -> Any:
    data, plan = tiny_data(torch.float32), PLAN
    net = net or made()
    return make_trainer("dp-macadam", model=net, data=data, plan=plan, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 3), (1, 1, 1), (256, 784, 300)])
def test_products_are_within_their_bound(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    a, b, bias = torch.randn(rows, 2, terms), torch.randn(columns, terms), torch.randn(columns)
    exact, most = (linear(*(f(t.double()) for t in (a, b, bias))) for f in (torch.clone, torch.abs))
    with full_float32():
        error = (matmul(a, b, bias) - exact).abs()
    assert (error <= roundoff(terms + 1, a.dtype) * most).all()


@pytest.mark.promise("precision")
def test_a_program_that_turns_tf32_on_does_not_turn_it_on_in_steps() -> None:
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    before = inner()
    trainer = trainer_of()
    assert inner() == before  # nothing stays switched off
    SEEN.clear()
    trainer.step()
    assert isinstance(trainer.evaluate(), Evaluation)
    assert inner() == before
    BACKENDS.mkldnn.fp32_precision = "bf16"
    later = inner()
    trainer.step()
    assert inner() == later != before
    assert all(seen == OURS for seen in SEEN)
    assert len(SEEN) >= 3


def other(value: Any) -> Any:
    """Another value of a setting."""
    if value in (torch.float32, torch.float64):
        return torch.float64
    if isinstance(value, tuple):
        return (not value[0], True)
    return not value if isinstance(value, bool) else value + 1


@contextlib.contextmanager
def other_settings() -> Iterator[None]:
    """A program that sets everything otherwise, as a backend with other kernels needs."""
    before = Arithmetic.now()
    for (_, write), value in zip(SETTINGS.values(), before.values, strict=True):
        write(other(value))
    try:
        yield
    finally:
        for (_, write), value in zip(SETTINGS.values(), before.values, strict=True):
            write(value)


def assert_ours(ours: dict[str, Any]) -> None:
    """All settings but the kind of attention, of which only one has a rule for vmap."""
    free = {name for name in ours if "sdp" in name}
    assert OTHERS
    for seen in OTHERS:
        assert {name for name in ours if seen[name] != ours[name]} <= free


@pytest.mark.promise("precision")
def test_steps_compute_with_the_settings_of_the_trial_of_rounding() -> None:
    """With others, such as more threads, rows may be rounded by the others of a batch."""
    trainer, ours = trainer_of(), named()
    OTHERS.clear()
    with other_settings():
        changed = Arithmetic.now()
        trainer.step()
        assert isinstance(trainer.evaluate(), Evaluation)
        assert Arithmetic.now() == changed
    assert_ours(ours)


def noticing_loss(model: nn.Module, batch: Tensor) -> Tensor:
    losses: Tensor = model(batch).square().sum(1)
    return losses


@pytest.mark.promise("precision")
def test_sums_alone_compute_with_the_settings_of_the_trial_of_rounding() -> None:
    clipped = clipped_grad(made(), noticing_loss, ball(1.0), batch_size=8)
    batch, ours = torch.randn(8, SIDE**2), named()
    clipped(batch)
    OTHERS.clear()
    with other_settings():
        clipped(batch)
    assert_ours(ours)


pytestmark = pytest.mark.trial

ONE_ULP = 2.0**-20


class Odd(nn.Module):
    """A layer with rows that are rounded otherwise under a condition."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1))
        off = {
            "nothing": 0 * places,
            "number": len(x) + 0 * places,
            "place": places,
            "tail": places >= len(x) // LEAST_ROWS * LEAST_ROWS,
        }
        return x + ONE_ULP * off[self.kind]


def alike(kind: str, *more: nn.Module) -> bool:
    # A layer without products, which libraries round in their own ways.
    network = nn.Sequential(nn.Tanh(), Odd(kind), nn.ReLU(), *more)
    return chunks_alike(network, torch.randn(TRIED, 3), 50)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("trial", range(TRIALS))
def test_rounding_that_few_rows_show_is_found(trial: int) -> None:
    """Most rows of short sums come out alike in any order."""
    base = torch.zeros(TRIED, 3)
    base[PERIOD * trial] = 1

    def run(x: Tensor) -> Tensor:
        return x + ONE_ULP * torch.arange(len(x)).view(-1, 1) * (x > 0)

    assert not chunks_alike(run, base, 50)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kind", ["nothing", "number", "tail", "place"])
def test_rows_that_depend_on_their_number_or_place_are_found(kind: str) -> None:
    assert alike(kind) == (kind == "nothing")


@pytest.mark.promise("alone")
@pytest.mark.parametrize(("kind", "size"), [("number", 48), ("tail", 48), ("place", 1)])
def test_a_batch_of_fixed_size_is_tried_at_that_size_alone(kind: str, size: int) -> None:
    """So rows may depend on their number, and are computed one by one where they depend on more."""
    rows, sizes = torch.randn(5, 3), set[int]()

    def run(x: Tensor) -> Tensor:
        sizes.add(len(x))
        result: Tensor = Odd(kind)(x)
        return result

    fixed = unaffected(run, rows[0], 40, may_mix=False)
    sizes.clear()
    assert fixed(rows).shape == rows.shape
    assert sizes == {size}


def test_random_numbers_are_not_taken_for_rounding() -> None:
    assert alike("nothing", nn.Dropout(0.5))
    assert not alike("place", nn.Dropout(0.5))


def crafted(*shape: int) -> Tensor:
    """Return numbers of very different sizes, whose sums show the order of their terms."""
    return torch.ldexp(torch.randn(shape), torch.randint(-12, 13, shape))


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a @ b + bias, as steps compute it."""
    with RowProducts():
        return a @ b if bias is None else torch.addmm(bias, a, b)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("counts", [(16, 19, 31, 64, 300), (2, 7, 8, 15)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("terms", [1, 2, 5, 13, 22, 30, 32, 50, 250, 256, 784])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 10, 50, 250])
def test_a_product_rounds_equal_rows_alike(
    terms: int, columns: int, transposed: bool, counts: tuple[int, ...]
) -> None:
    """At any place. No chunk has fewer than 16 rows, unless all have the same number."""
    torch.manual_seed(terms + columns)
    b, bias = crafted(terms, columns), crafted(columns)
    b = b.T.contiguous().T if transposed else b
    for row in crafted(3, terms):
        for more in (None, bias):
            rows = [product(row.repeat(count, 1), b, more) for count in counts]
            found = torch.cat(rows)
            assert found.equal(found[:1].expand_as(found))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "neither"])
@pytest.mark.parametrize("records", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_that_of_matrices(
    by_column: bool, layout: str, records: int, dtype: torch.dtype
) -> None:
    a, b, bias = torch.randn(records, 33), torch.randn(33, 40), torch.randn(20)
    a = a.T.contiguous().T if by_column else a
    b = {"rows": b[:, :20].clone(), "columns": b.T[:20].clone().T, "neither": b[:, ::2]}[layout]
    a, b, bias = (t.to(dtype) for t in (a, b, bias))
    for more in (None, bias):
        expected = a.double() @ b.double() + (0 if more is None else more.double())
        torch.testing.assert_close(product(a, b, more).double(), expected, rtol=1e-5, atol=1e-5)


class LastOutput(nn.Module):
    """A recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: Callable[..., nn.Module], size: int) -> None:
        super().__init__()
        self.layer, self.head = kind(5, size, batch_first=True), nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layer(x.view(len(x), -1, 5))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def of_sizes(*sizes: int, norm: bool = False) -> nn.Module:
    """Return linear layers of these sizes with ReLU, and layer norm before it."""
    first, hidden, last = sizes
    more = [nn.LayerNorm(hidden)] if norm else []
    return nn.Sequential(nn.Linear(first, hidden), *more, nn.ReLU(), nn.Linear(hidden, last))


#: Networks with sizes that are no multiples of 16, by name, with their number of inputs.
ORDINARY: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "30-50-3": (30, partial(of_sizes, 30, 50, 3)),
    "30-50-2": (30, partial(of_sizes, 30, 50, 2)),
    "784-250-10": (784, partial(of_sizes, 784, 250, 10)),
    "13-7-2 with layer norm": (13, partial(of_sizes, 13, 7, 2, norm=True)),
    "10-32-1": (10, partial(of_sizes, 10, 32, 1)),
    **{
        f"{kind.__name__} {size}": (30, partial(LastOutput, kind, size))
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for size in (3, 5, 8, 13, 20)
    },
}


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_no_ordinary_network_runs_record_by_record(name: str, seed: int) -> None:
    """Whatever its weights are: a record by itself takes many times as long."""
    inputs, build = ORDINARY[name]
    torch.manual_seed(seed)

    def squares(model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return outputs.square().sum(1)

    clipped = clipped_grad(build(), squares, ball(1.0), batch_size=256)
    sums = clipped.prepare(torch.zeros(1, inputs))
    assert sums.per_sample.vmapped, sums.notes
    assert not sums.placed, sums.notes


def hinge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return torch.relu(1 - y * model(x).squeeze(1))


def raw_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return a product that belongs to no layer with a rule."""
    return x @ weight


class Raw(nn.Module):
    """A network of products without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(10, 32) / 4)
        self.second = nn.Parameter(torch.randn(32, 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return raw_product(torch.relu(raw_product(x, self.first)), self.second)


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


#: Initial weights with which a trial of losses and gradients alone finds no rounding.
MISSED = (2, 8, 9, 11, 33, 38)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("build", [layered, Raw])
@pytest.mark.parametrize(
    "seed", rest_long([*MISSED, *sorted({*range(40)} - {*MISSED})], short=len(MISSED))
)
def test_rounding_that_a_kink_hides_is_found(seed: int, build: Callable[[], nn.Module]) -> None:
    """A hinge loss of 0 hides how the output was rounded, until a record is at its kink."""
    torch.manual_seed(seed)
    clipped = clipped_grad(build(), hinge, ball(1.0), batch_size=64, physical_batch=64)
    sums = clipped.prepare((torch.zeros(1, 10), torch.zeros(1)))
    for _ in range(4):
        record = torch.randn(1, 10), torch.randn(1)
        assert sums.per_sample.vmapped, sums.notes
        assert not sums.placed, sums.notes
        for samples in (20, 19):
            rows = max(samples, LEAST_ROWS)
            copies = tuple(t.expand(rows, *t.shape[1:]).contiguous() for t in record)
            results = sums.per_sample.observed(copies, ())
            assert len(results) > 4
            assert all(bool((rows == rows[0]).all()) for rows in results)


@pytest.mark.promise("alone")
def test_features_that_depend_on_places_are_computed_one_by_one() -> None:
    class Stub:
        gain = torch.ones(1)

        class train:  # noqa: N801
            images = torch.zeros(1, 3)

    seen: list[int] = []

    class Seen(Odd):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    parts = FrozenFeatures(Seen("place"), nn.Linear(3, 2), torch.float32)
    run = stored._run_of(parts, Stub())  # type: ignore[arg-type]
    seen.clear()
    assert run(torch.zeros(5, 3)).shape == (5, 3)
    assert seen == [1] * 5


@pytest.mark.promise("alone")
@pytest.mark.parametrize("only", rest_long(["Linear 64 to 1", "Conv2d 1 to 16, kernel 8"]))
def test_the_scan_finds_nothing_left(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scan.json"
    script = Path(__file__).parents[2] / "benchmarks" / "row_rounding.py"
    monkeypatch.syspath_prepend(script.parent)
    main = runpy.run_path(str(script))["main"]
    main(["--here", "--out", str(out), "--only", only, "--threads", "1", "2"])
    rows = json.loads(out.read_text())
    assert len(rows) >= 2
    assert all(row["left"] == [] and not row["others"] for row in rows)
