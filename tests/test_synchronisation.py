"""Where a training step on CUDA waits for the device, found without one.

Steps run on fake tensors: they have shapes and a device, and no values. Every operation is seen as
it is dispatched, so that a step that asks the device for a value is found. Operations on two
devices, and those whose shape depends on values, fail by themselves.
"""

import itertools
import multiprocessing
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
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

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.dp.clipping.batch_invariance import Manner
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.randomness import noise
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import ChunkedSum
from dpmac_cli.training.recorded_sum import RecordedChunkSum
from dpmac_cli.training.schedules import Recipe, StepPlan
from tests.conftest import OPTIMIZER_NAMES
from tests.helpers import Batches, a_key, class_task, make_trainer
from tests.tiers import one_in

# Tensors without data have an address of 0, which the check of the network compares.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def recording_all(per_sample: PerSample) -> None:
    per_sample._recorded = {layer.name for layer in per_sample.layers}


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the network reads addresses, which tensors without data do not have."""
    monkeypatch.setattr("dpmac_cli.models.fingerprint.Fingerprint.check", lambda *_: None)
    # Before the first step, trials compare numbers.
    monkeypatch.setattr(PerSample, "_try", recording_all)
    monkeypatch.setattr(ChunkedSum, "_manner", lambda *_: (Manner(), ()))
    monkeypatch.setattr(RecordedChunkSum, "_recorded", lambda *_: None)


CUDA = torch.device("cuda")
BATCH, SIDE = 16, 8
#: Operations whose result is read on the CPU, or whose shape depends on values.
WAITING = re.compile(r"_local_scalar_dense|nonzero|item|equal\.default|unique|masked_select")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * SIDE**2 // 4, 10),
    )


#: Sequences of known layers: by vmap, autograd runs inside torch.func, where it has no fake device.
NETWORKS = {"mlp": mlp, "cnn": cnn}


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
        images = torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8, device=CUDA)
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
            model = NETWORKS[network]()
        trainer: Trainer = make_trainer(
            optimizer,
            kind(1.0, BATCH),
            plan=StepPlan(steps=9, steps_per_epoch=5, physical_batch=64, recipe=Recipe(**recipe)),
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


#: Whether float64 is needed. Who reads the answer later, or never, computes all of it in float64,
#: always.
#: It is asked for outside of :meth:`.ClippedChunkSum.sum_up`, which a CUDA graph may record.
ASKED = Counter({"bool in dp/clipping/clipped_sum.py:of": 1})


@pytest.mark.parametrize(
    ("optimizer", "network"), one_in(4, itertools.product(OPTIMIZER_NAMES, NETWORKS))
)
def test_a_step_on_cuda_asks_for_one_answer(optimizer: str, network: str) -> None:
    watch = steps(optimizer, network)
    assert watch.operations > 100
    assert watch.found == ASKED


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [{"secure": True}, {"ema": 0.9}, {"views": 4, "augment": "crop-flip"}],
    ids=["secure", "ema", "views"],
)
@pytest.mark.parametrize("optimizer", ["dp-adam", "dp-macadam"])
def test_options_wait_for_nothing_more(optimizer: str, more: dict[str, Any]) -> None:
    assert steps(optimizer, "cnn", **more).found == ASKED


def test_a_step_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are copied, and a value that is asked for."""
    step = Trainer._begin

    def waiting(self: Trainer) -> Any:
        theta = self.state.theta
        theta.cpu()
        torch.tensor(1.0, device=CUDA)
        if theta.sum() > 0:
            theta.zero_()
        return step(self)

    monkeypatch.setattr(Trainer, "_begin", waiting)
    found = steps("dp-sgd", "mlp").found - ASKED
    kinds = {name.partition(" in ")[0] for name in found}
    assert kinds == {"copy to cpu", "copy to cuda", "bool"}
