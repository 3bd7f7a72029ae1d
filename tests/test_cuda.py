"""Training on a CUDA device: the same steps as on the CPU, and the same bound on every sample.

Skipped on machines without a GPU.
"""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import resume_folder
from dpmac_cli.runs.trainer import Trainer
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import after, digits_config, train_events
from tests.helpers import Batches, Spy, a_key, class_task, make_trainer, planned

SIDE = 8
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(3 * SIDE**2, 32), nn.ReLU(), nn.Linear(32, 10)),
    ),
    "cnn": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * SIDE**2 // 4, 10),
    ),
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RECORDS, BATCH, STEPS = 64, 16, 3
#: Two devices round differently: by this share of the norm of the noise, at most.
ROUNDING = 1e-4
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def images(device: torch.device) -> Data:
    rng = np.random.default_rng(0)

    def split(count: int) -> Split:
        pixels = rng.integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)
        labels = torch.from_numpy(rng.integers(0, 10, count))
        return Split(torch.from_numpy(pixels).to(device), labels.to(device))

    gain, offset = (torch.full((1, 1, 1), value, device=device) for value in (1 / 64, -2.0))
    return Data(split(RECORDS), split(8), gain, offset, class_task(10))


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


def trainer_on(device: torch.device, optimizer: str, model: nn.Module, spy: Spy) -> Trainer:
    """A trainer with the same weights, records and noise on any device."""
    plan = planned(steps=9, physical_batch=64)
    return make_trainer(
        optimizer,
        spy,
        plan=plan,
        data=images(device),
        model=copy.deepcopy(model).to(device),
        sampler=Batches(*np.arange(RECORDS).reshape(-1, BATCH)),
        noise=Noise(a_key(0)),
        clip_norm=0.5,
    )


def released(trainer: Trainer, spy: Spy) -> list[Tensor]:
    """Take some steps; return the noisy sums in whitened space, and what was learned."""
    for _ in range(STEPS):
        trainer.step()
    return [spy.whitened_sum(t).double().cpu() for t in range(STEPS)]


def assert_same_steps(optimizer: str, model: nn.Module) -> None:
    """Both devices release the same sums, up to rounding that is far below the noise."""
    spies = [Spy(1.0, BATCH) for _ in range(2)]
    trainers = [
        trainer_on(device, optimizer, model, spy)
        for device, spy in zip((CPU, CUDA), spies, strict=True)
    ]
    sums = [released(trainer, spy) for trainer, spy in zip(trainers, spies, strict=True)]
    for on_cpu, on_cuda in zip(*sums, strict=True):
        assert (on_cuda - on_cpu).norm() <= ROUNDING * math.sqrt(len(on_cpu))
    thetas = [trainer.state.theta.double().cpu() for trainer in trainers]
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    assert (thetas[1] - thetas[0]).norm() <= 1e-3 * (thetas[0] - start).norm()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_steps_are_those_of_the_cpu(optimizer: str, name: str) -> None:
    assert_same_steps(optimizer, network(name))


@pytest.mark.promise("one")
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("optimizer", ["dp-adam", "dp-macadam"])
def test_no_record_moves_the_sum_by_more_than_one(optimizer: str, name: str, scale: float) -> None:
    """Sums without noise, in float64, with logits of any size."""
    model = network(name)
    with torch.no_grad():
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        last.weight.mul_(scale)
    spy = Spy(0.0, BATCH)
    trainer = trainer_on(CUDA, optimizer, model, spy)
    trainer.sampler = Batches(*([i] for i in range(8)))
    for step in range(8):
        trainer.step()
        assert float(spy.whitened_sum(step).double().norm()) <= 1


@pytest.mark.promise("noise")
@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_that_of_the_cpu(secure: bool) -> None:
    noise = [
        Noise(a_key(1), secure=secure).at(1).standard_normal(torch.empty(300_001, device=device))
        for device in (CPU, CUDA)
    ]
    assert noise[1].is_cuda
    torch.testing.assert_close(noise[1].cpu(), noise[0], atol=4e-6, rtol=0)


@pytest.mark.promise("resume")
def test_a_run_that_was_stopped_is_resumed_with_new_keys() -> None:
    stopped = train_events(digits_config(device="cuda", steps=9, out="run"), after(5))[1]
    *_, last = resume_folder(stopped.folder, {})
    assert isinstance(last, Run)
    assert [event["steps"] for event in last.report["events"]] == [5, 4]
