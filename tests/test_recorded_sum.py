"""Steps on CUDA without one: sums that are recorded and replayed, and waiting for the device.

Sums are recorded by a recorder for the CPU with the semantics of a CUDA graph: no Python runs in a
replay, memory is fixed, and operations whose result is read, or whose shape depends on values, are
refused.

Where a step waits is seen on fake tensors, which have shapes and a device, and no values: every
operation is seen as it is dispatched. Operations on two devices, and those whose shape depends on
values, fail by themselves.
"""

import itertools
import multiprocessing
import re
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism, ball
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.randomness import noise
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import ChunkedSum
from dpmac_cli.training.recorded_sum import (
    DRAWN,
    LOOPED,
    NOT_RECORDED,
    OTHERWISE,
    RecordedChunkSum,
)
from tests.conftest import OPTIMIZER_NAMES, every_optimizer
from tests.helpers import (
    CLASSES,
    Batches,
    a_key,
    class_task,
    make_trainer,
    planned,
    tiny_data,
    tiny_model,
)
from tests.tiers import one_in

#: Operations that a capture does not permit.
REFUSED = re.compile(r"_local_scalar_dense|nonzero|masked_select|equal|unique|item")


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Keeps every operation with its memory, and computes them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.partition("::")[2], kwargs or {}
        masks = name in ("index", "index_put_") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        if masks or REFUSED.match(name):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **kwargs)
        given = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs, ()))
        elif not made or any(memory(x) not in given for x in made):  # views need no call
            self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            if out != ():
                for to, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
                    if isinstance(to, Tensor):
                        to.copy_(value)


def on_tape(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    with Tape() as tape:
        found = function()
    return found, tape.replay


class Mixed(nn.Module):
    """A network that runs under vmap, as its own code is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x.flatten(1))).square())
        return out


class Drawing(Mixed):
    """Draws numbers, with which vmap finds other results than a loop."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(1 + np.random.random())


class Rarely(Mixed):
    """Draws numbers that hardly ever change anything."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if np.random.random() < 1e-9 else 1)


class Reading(Mixed):
    """Reads a value that no record changes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.scale)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "known layers": lambda: tiny_model(torch.float32),
    "own code": Mixed,
}


def trainer_of(optimizer: str, network: str = "own code") -> Trainer:
    torch.manual_seed(0)
    with patch.object(ChunkedSum, "_needs_places", lambda _: True):  # so all chunks have one shape
        return make_trainer(
            optimizer, dtype=torch.float32, model=NETWORKS[network](), data=tiny_data(torch.float32)
        )


def recording(trainer: Trainer, record: Any = on_tape) -> RecordedChunkSum:
    """Let a trainer record its sums."""
    sums = trainer.sums
    found = RecordedChunkSum(sums.per_sample, 64, trainer.mechanism.expected_batch, record)
    sums.clipped_sum = found
    return found


@pytest.mark.promise("alone")
@pytest.mark.parametrize("network", NETWORKS)
@every_optimizer
def test_replays_are_the_steps_that_are_computed(
    name: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with other draws in each step, and without running the network's code."""
    computed, replayed = trainer_of(name, network), trainer_of(name, network)
    sums, calls, as_before = recording(replayed), [0], PerSample.__call__

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return as_before(*args)

    for step in range(4):
        computed.step()
        with monkeypatch.context() as patch:
            patch.setattr(PerSample, "__call__", counted)
            replayed.step()
        assert computed.state.theta.equal(replayed.state.theta)
        if step == 0:
            assert calls[0] > 0
            calls[0] = 0
    [found] = sums.recordings.values()
    assert not isinstance(found, str)
    assert calls == [0]


@pytest.mark.promise("alone")
def test_a_chunk_for_which_float32_does_not_do_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, replayed = trainer_of("dp-macadam"), trainer_of("dp-macadam")
    sums = recording(replayed)
    replayed.step()
    computed.step()
    [found] = sums.recordings.values()
    assert not isinstance(found, str)
    precise, again = ClippedChunkSum.sum_up_precisely, []

    def noted(*args: Any) -> None:
        again.append(True)
        precise(*args)

    monkeypatch.setattr(ClippedChunkSum, "sum_up_precisely", noted)
    monkeypatch.setattr(ClippedChunkSum, "_share", lambda _, of: torch.ones_like(of.value))
    monkeypatch.setitem(vars(found), "replay", lambda: found.doubtful.fill_(True))
    for trainer in (computed, replayed):
        trainer.step()
    assert again == [True, True]
    assert computed.state.theta.equal(replayed.state.theta)


def otherwise(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """A recorder whose replays compute nothing."""
    return function(), lambda: None


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("network", "record", "why"),
    [
        (Drawing, on_tape, LOOPED),
        (Rarely, on_tape, DRAWN),
        (lambda: nn.Sequential(Mixed(), nn.Dropout()), on_tape, DRAWN),
        (Mixed, otherwise, OTHERWISE),
        (Reading, on_tape, "recording failed (RuntimeError at test_recorded_sum.py, line"),
    ],
    ids=["NumPy's numbers", "a rare number", "dropout", "another result", "a value"],
)
def test_what_a_replay_would_compute_otherwise_is_not_recorded(
    network: Callable[[], nn.Module], record: Any, why: str
) -> None:
    """A warning says so once."""
    trainer = make_trainer(
        "dp-adam", dtype=torch.float32, model=network(), data=tiny_data(torch.float32)
    )
    sums = recording(trainer, record)
    with pytest.warns(UserWarning, match=re.escape(NOT_RECORDED.partition("{}")[0] + why)):
        trainer.step()
    trainer.step()
    [found] = sums.recordings.values()
    assert isinstance(found, str)


#: A tensor that a program may replace.
SCALE = [torch.ones(9)]


class Scaled(Mixed):
    """Reads a global tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * SCALE[0].view(x.shape[1:]))


@pytest.mark.promise("alone")
def test_memory_that_a_replay_reads_is_not_used_for_other_records() -> None:
    trainer = make_trainer(
        "dp-adam", dtype=torch.float32, model=Scaled(), data=tiny_data(torch.float32)
    )
    scale = weakref.ref(SCALE[0])
    sums = recording(trainer, lambda function: (function(), function))
    trainer.step()
    [found] = sums.recordings.values()
    assert not isinstance(found, str)
    SCALE[0] = torch.zeros(9)
    assert scale() is not None


@pytest.mark.parametrize("in_float64", [False, True])
def test_only_records_are_counted_whose_weights_were_cut(
    in_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_float64:
        monkeypatch.setattr("dpmac_cli.dp.clipping.clipped_sum.REACH", -1.0)
    x, y = Structure(torch.zeros(1, 9)), Structure(torch.zeros(1, dtype=torch.long), keep=True)
    per_sample = PerSample(Mixed(), x, y, weigh=RecordWeights(lambda *_: torch.tensor([2.0]), 1.0))
    theta = flatten_parameters(per_sample.layers)
    sums = RecordedChunkSum(per_sample, 64, 8, on_tape)
    batch, labels, out = (
        torch.randn(8, 9),
        torch.zeros(8, dtype=torch.long),
        torch.empty_like(theta),
    )
    for _ in range(2):
        sums.of(batch, labels, RegionMetric(ball(1.0)), out, torch.arange(len(batch)) < 5)
    assert not any(isinstance(found, str) for found in sums.recordings.values())
    assert int(sums.cut) == 2 * 5


def recording_all(per_sample: PerSample) -> None:
    per_sample._by_vmap.recorded = {layer.name for layer in per_sample.layers}


@pytest.fixture
def on_fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the network reads addresses, which tensors without data do not have."""
    monkeypatch.setattr("dpmac_cli.models.fingerprint.Fingerprint.check", lambda *_: None)
    # Before the first step, trials compare numbers.
    monkeypatch.setattr(PerSample, "_try", recording_all)
    monkeypatch.setattr(ChunkedSum, "_needs_places", lambda *_: False)
    monkeypatch.setattr(RecordedChunkSum, "_recorded", lambda *_: LOOPED)


CUDA = torch.device("cuda")
BATCH, EDGE = 16, 8
#: Operations whose result is read on the CPU, or whose shape depends on values.
WAITING = re.compile(r"_local_scalar_dense|nonzero|item|equal\.default|unique|masked_select")


def faked_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * EDGE**2, 32), nn.ReLU(), nn.Linear(32, 10))


def faked_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * EDGE**2 // 4, 10),
    )


#: Sequences of known layers: by vmap, autograd runs inside torch.func, where it has no fake device.
FAKED = {"mlp": faked_mlp, "cnn": faked_cnn}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and keeps those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.found = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for kind in self._kinds(str(func), tensors, args, kwargs):
            self.found[f"{kind} in {_place()}"] += 1
        return func(*args, **kwargs)

    def _kinds(self, name: str, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Iterator[str]:
        if name.startswith(("aten._to_copy", "aten.copy_")) and tensors:
            to = (kwargs.get("device") or tensors[0].device).type
            waits = to == "cpu" or not (kwargs.get("non_blocking") or True in args[2:3])
            if tensors[-1].device.type != to and waits:
                yield f"copy to {to}"
        elif WAITING.search(name) and any(x.device.type == "cuda" for x in tensors):
            yield name


def _place() -> str:
    """Return the innermost function of the package that is running."""
    frames = [f for f in traceback.extract_stack() if "dpmac_cli" in f.filename]
    return f"{frames[-1].filename.rpartition('dpmac_cli/')[2]}:{frames[-1].name}"


@contextmanager
def asked(watch: Watch) -> Iterator[None]:
    """Let ``bool`` of a CUDA tensor be False, and count it."""
    as_before = Tensor.__bool__

    def asking(self: Tensor) -> bool:
        if self.device.type == "cuda":
            watch.found[f"bool in {_place()}"] += 1
            return False
        return as_before(self)

    def gradients(total: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Zeros: autograd has no fake device."""
        return [torch.zeros_like(x) for x in outputs]

    with (
        patch.object(Tensor, "__bool__", asking),
        patch.object(torch.autograd, "grad", gradients),
    ):
        yield


def fake_data() -> Data:
    def split(count: int) -> Split:
        images = torch.zeros(count, 3, EDGE, EDGE, dtype=torch.uint8, device=CUDA)
        return Split(images, torch.zeros(count, dtype=torch.int64, device=CUDA))

    gain, offset = (torch.full((1, 1, 1), value, device=CUDA) for value in (1 / 64, -2.0))
    return Data(split(64), split(8), gain, offset, class_task(10))


class Seen(NamedTuple):
    """What a step did: the number of its operations, and where it waited for the device."""

    operations: int
    found: Counter[str]


def steps(*args: Any, **options: Any) -> Seen:
    """Take two steps in a fork: later ones could not train, had this process used fake devices."""
    forks = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, forks, torch.set_num_threads, (1,)) as pool:
        return pool.submit(_steps, *args, **options).result()


def _steps(optimizer: str, network: str, *, secure: bool = False, **recipe: Any) -> Seen:
    """Take two steps on fake tensors; return what the second did."""
    kind = SecureMechanism if secure else GaussianMechanism
    watch = Watch()
    # Where there is a GPU, fake tensors would use it, which a fork cannot.
    no_gpu = patch.object(torch.cuda, "is_available", return_value=False)
    kernel = patch.object(noise, "kernel", return_value=lambda out, *_, **__: out.normal_())
    with no_gpu, kernel, FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device(CUDA):
            model = FAKED[network]()
        trainer: Trainer = make_trainer(
            optimizer,
            kind(1.0, BATCH),
            plan=planned(steps=9, physical_batch=64, **recipe),
            data=fake_data(),
            model=model,
            sampler=Batches(np.arange(BATCH)),
            noise=Noise(a_key(0), secure=secure),
        )
        with asked(watch):
            trainer.step()
            watch.found.clear()
            watch.operations = 0
            with watch:
                trainer.step()
    return Seen(watch.operations, watch.found)


def waiting(test: Any) -> Any:
    """Mark a test of steps on fake tensors, whose address is 0, and which are not recorded."""
    ignored = pytest.mark.filterwarnings(
        "ignore:Accessing the data pointer of FakeTensor", "ignore:Steps are not recorded"
    )
    return ignored(pytest.mark.usefixtures("on_fake_devices")(test))


#: Whether float64 is needed. Who reads the answer later, or never, computes all of it in float64,
#: always.
#: It is asked for outside of :meth:`.ClippedChunkSum.sum_up`, which a CUDA graph may record.
ASKED = Counter({"bool in dp/clipping/clipped_sum.py:of": 1})


@waiting
@pytest.mark.parametrize(
    ("optimizer", "network"), one_in(4, itertools.product(OPTIMIZER_NAMES, FAKED))
)
def test_a_step_on_cuda_asks_for_one_answer(optimizer: str, network: str) -> None:
    watch = steps(optimizer, network)
    assert watch.operations > 100
    assert watch.found == ASKED


@waiting
@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [{"secure": True}, {"ema": 0.9}, {"augmentations": 4, "augment": "crop+flip"}],
    ids=["secure", "ema", "views"],
)
@pytest.mark.parametrize("optimizer", ["dp-adam", "dp-macadam"])
def test_options_wait_for_nothing_more(optimizer: str, more: dict[str, Any]) -> None:
    assert steps(optimizer, "cnn", **more).found == ASKED


@waiting
def test_a_step_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are copied, and a value that is asked for."""
    step = Trainer._begin

    def asking(self: Trainer) -> Any:
        theta = self.state.theta
        theta.cpu()
        torch.tensor(1.0, device=CUDA)
        if theta.sum() > 0:
            theta.zero_()
        return step(self)

    monkeypatch.setattr(Trainer, "_begin", asking)
    found = steps("dp-sgd", "mlp").found - ASKED
    kinds = {name.partition(" in ")[0] for name in found}
    assert kinds == {"copy to cpu", "copy to cuda", "bool"}
