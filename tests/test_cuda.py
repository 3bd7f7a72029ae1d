"""Training on a CUDA device: the same steps as on the CPU, and the same bound on every sample.

Skipped on machines without a GPU; ``tests/test_synchronisation.py`` is for those.
"""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ArrayData, Poisson, PrivateStep, resolve
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.models.encoders import read_encoder
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.runs.trainer import make_trainer as make_planned
from dpmac_cli.training.schedules import Recipe, StepPlan
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import after, digits_config, dpmac, train_events
from tests.helpers import Batches, SecureSpy, Spy, a_key, class_task, make_trainer
from tests.test_language_models import LENGTH, WORDS
from tests.test_language_models import model as language_model
from tests.test_private_step import Reader
from tests.test_private_step import loss as reader_loss
from tests.test_synchronisation import NETWORKS, SIDE
from tests.test_text_encoder import LAYOUT, features, inputs
from tests.test_texts import TEXTS
from tests.tiny_bert import write_encoder

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from language_model import Texts, text_loss

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


def trainer_on(
    device: torch.device,
    optimizer: str,
    model: nn.Module,
    spy: Spy,
    physical_batch: int = 64,
    **recipe: Any,
) -> Trainer:
    """A trainer with the same weights, records and noise on any device."""
    plan = StepPlan(
        steps=9, steps_per_epoch=5, physical_batch=physical_batch, recipe=Recipe(**recipe)
    )
    return make_trainer(
        optimizer,
        spy,
        plan=plan,
        data=images(device),
        model=copy.deepcopy(model).to(device),
        sampler=Batches(*np.arange(RECORDS).reshape(-1, BATCH)),
        noise=Noise(a_key(0), secure=isinstance(spy, SecureSpy)),
        clip_norm=0.5,
    )


def released(trainer: Trainer, spy: Spy) -> list[Tensor]:
    """Take some steps; return the noisy sums in whitened space, and what was learned."""
    for _ in range(STEPS):
        trainer.step()
    return [spy.whitened_sum(t).double().cpu() for t in range(STEPS)]


def assert_same_steps(
    optimizer: str, model: nn.Module, kind: type[Spy] = Spy, **options: Any
) -> None:
    """Both devices release the same sums, up to rounding that is far below the noise."""
    spies = [kind(1.0, BATCH) for _ in range(2)]
    trainers = [
        trainer_on(device, optimizer, model, spy, **options)
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


@pytest.mark.parametrize(
    "options",
    [
        {"kind": SecureSpy},
        {"ema": 0.9, "weight_decay": 0.01},
        {"views": 4, "augment": "crop+flip"},
        {"physical_batch": 5},
    ],
    ids=["secure", "ema", "views", "chunks"],
)
@pytest.mark.parametrize("optimizer", ["dp-adam", "dp-macadam"])
def test_options_give_the_steps_of_the_cpu(optimizer: str, options: dict[str, Any]) -> None:
    assert_same_steps(optimizer, network("cnn"), **options)


@pytest.mark.privacy
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


@pytest.mark.privacy
@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_that_of_the_cpu(secure: bool) -> None:
    noise = [
        Noise(a_key(1), secure=secure).at(1).standard_normal(torch.empty(300_001, device=device))
        for device in (CPU, CUDA)
    ]
    assert noise[1].is_cuda
    torch.testing.assert_close(noise[1].cpu(), noise[0], atol=4e-6, rtol=0)


def test_a_run_says_what_it_ran_on_and_can_be_scored() -> None:
    last = train_events(digits_config(device="cuda", steps=30, out="run"))[1]
    assert last.report["machine"]["device"] == torch.cuda.get_device_name()
    for device in ("cuda", "cpu"):
        scored = dpmac("eval", "run", "--device", device)
        assert scored.exit_code == 0, scored.output


@pytest.mark.privacy
def test_a_run_that_was_stopped_is_resumed_with_new_keys() -> None:
    stopped = train_events(digits_config(device="cuda", steps=9, out="run"), after(5))[1]
    *_, last = run.resume(stopped.folder, {})
    assert isinstance(last, Finished)
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [5, 4]


class Recurrent(Reader):
    """Classifies the last hidden state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.cells(self.words(input_ids))[0]
        return {"logits": self.head((hidden * attention_mask.unsqueeze(2)).sum(1))}


class Uncalled(Reader):
    """Uses a weight without a call."""

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mixed = self.words(input_ids) @ self.words.weight.T @ self.words.weight
        return {"logits": self.head((mixed * attention_mask.unsqueeze(2)).sum(1))}


def labelled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A text is labelled by whether its first word is even."""
    return reader_loss(model, {**batch, "labels": batch["input_ids"][:, 0] % 2})


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "reader": (Reader, labelled_loss),
    "lstm": (Recurrent, labelled_loss),
    "uncalled": (Uncalled, labelled_loss),
    "tied": (lambda: language_model(lora=False), text_loss),
    "lora": (lambda: language_model(lora=True), text_loss),
}


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN copies them; true, and harmless
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("optimizer", ["dp-adam", "dp-macadam"])
def test_steps_of_a_program_are_those_of_the_cpu(optimizer: str, name: str) -> None:
    build, loss = PROGRAMS[name]
    records, moved = Texts(RECORDS, WORDS, LENGTH, seed=1), []
    for device in (CPU, CUDA):
        torch.manual_seed(0)
        model = build().to(device)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        sampling = Poisson(n=RECORDS, batch_size=BATCH)
        step = PrivateStep(
            model, loss, sampling=sampling, optimizer=optimizer, sigma=1.0, steps=3, lr=0.01, seed=0
        )
        for batch in step.loader(records):
            assert all(values.device.type == device.type for values in batch.values())
            step(batch)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved.append((after - before).double().cpu())
    assert (moved[1] - moved[0]).norm() <= 1e-3 * moved[0].norm()


@pytest.mark.parametrize("loss", ["mse", "huber", "quantile:0.9"])
def test_a_number_is_predicted(loss: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 6)).astype(np.float32)
    data = ArrayData(
        x,
        x.sum(1),
        low=-1,
        high=1,
        target_low=-6,
        target_high=6,
        x_test=x[:50],
        y_test=x[:50].sum(1),
    )
    thetas = []
    for device in ("cpu", "cuda"):
        flags = {"dataset": data, "sigma": 1.0, "epochs": 2, "seed": 0, "loss": loss}
        plan = resolve({**flags, "device": device}).plan
        trainer = make_planned(plan)
        for _ in range(plan.privacy.steps):
            trainer.step()
        assert trainer.state.theta.device.type == device
        thetas.append(trainer.state.theta.double().cpu())
    assert (thetas[1] - thetas[0]).norm() <= 1e-3 * thetas[0].norm()


@pytest.mark.privacy
def test_the_vector_of_a_text_is_that_of_the_cpu_and_has_no_neighbours() -> None:
    """In a batch of one size, as features are computed."""
    encoder = read_encoder(str(write_encoder(Path("encoder")))).of(LAYOUT)
    network, x = features(encoder), inputs("encoder", TEXTS)
    on_cpu, on_cuda = network(x), network.to(CUDA)(x.to(CUDA))
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=2e-6, rtol=0)
    order = torch.randperm(len(TEXTS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x[order].to(CUDA)), on_cuda[order.to(CUDA)])
    for row in range(len(TEXTS)):
        others = torch.zeros_like(x)
        others[row] = x[row]
        assert torch.equal(network(others.to(CUDA))[row], on_cuda[row])
