"""Cost of running the network on each sample alone: milliseconds per step, in one process.

    python benchmarks/isolation.py
    python benchmarks/isolation.py --quick      # tiny batches, one round: does it work?

Plain torch with Adam, DP-Adam, and DP-Adam isolated by vmap and by a loop take steps in turn. The
table has medians over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.registry import DATASETS, Signature
from dpmac_cli.dp.clipping.isolation import WRITTEN_OUT, Isolated
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.models.build import build_network
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.training.schedules import StepPlan
from dpmac_cli.training.state import Randomness
from dpmac_cli.training.trainer import Trainer

RECORDS = 10_000
Step = Callable[[], None]


class ViT(nn.Module):
    """A small vision transformer: class token, position embedding, torch's own blocks."""

    def __init__(
        self, signature: Signature, width: int = 64, depth: int = 4, patch: int = 4
    ) -> None:
        super().__init__()
        channels, height, width_of_image = signature.shape
        tokens = (height // patch) * (width_of_image // patch)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens + 1, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, signature.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return out


@dataclass(frozen=True)
class Task:
    """A network, the data set whose images it is timed on, and the expected batch size."""

    name: str
    dataset: str
    batch: int
    network: Callable[[Signature], nn.Module]

    def build(self) -> nn.Module:
        """The network, always with the same weights."""
        torch.manual_seed(0)
        return self.network(DATASETS[self.dataset].signature)

    def data(self, device: torch.device) -> Data:
        """Noise in the shape of the images."""
        facts, generator = DATASETS[self.dataset], torch.Generator().manual_seed(0)
        size = (RECORDS, *facts.shape)
        images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, facts.task.outputs, (RECORDS,), generator=generator)
        split = Split(images.to(device), labels.to(device))
        gain, offset = (torch.full((1, 1, 1), v, device=device) for v in (1 / 64, -2.0))
        return Data(split, split, gain, offset, facts.task)


TASKS = (
    Task("MLP", "mnist", 256, partial(build_network, "mlp")),
    Task("CNN", "cifar10", 64, partial(build_network, "cnn")),
    Task("ViT", "cifar10", 64, ViT),
)


def plain(task: Task, data: Data, batch: int) -> Step:
    """Torch's own Adam on the whole batch."""
    model = task.build().to(data.gain.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        rows = torch.randint(RECORDS, (batch,)).to(data.gain.device)
        optimizer.zero_grad()
        x = data.standardised(data.train.images[rows])
        cross_entropy(model(x), data.train.labels[rows]).backward()
        optimizer.step()

    return step


def ours(task: Task, data: Data, batch: int, *, isolated: bool, loop: bool = False) -> Step:
    """DP-Adam; isolated by vmap, or by a loop over the samples."""
    config = resolve({"dataset": task.dataset, "optimizer": "dp-adam"}).plan
    keys = make_keys(0)
    trainer = Trainer(
        model=task.build().to(data.gain.device),
        data=data,
        optimizer=config.optimizer,
        mechanism=GaussianMechanism(1.0, batch),
        plan=StepPlan(
            steps=10**6,
            steps_per_epoch=100,
            physical_batch=config.run.physical_batch,
            isolated=isolated,
        ),
        randomness=Randomness(
            sampler=KeyedSampler("poisson", size=RECORDS, batch=batch, key=keys.sampler),
            noise=Noise(keys.noise),
        ),
    )
    run = trainer._sums.clipped_sum._per_sample
    if isinstance(run, Isolated):
        assert run.vmapped, f"vmap cannot run the {task.name}"
        if loop:
            run.vmapped = False
            most = max(1, WRITTEN_OUT // trainer.state.theta.numel())
            trainer.state.chunk = min(config.run.physical_batch, most)
    return trainer.step


CONTENDERS: Mapping[str, Callable[[Task, Data, int], Step]] = {
    "plain torch": plain,
    "ours": partial(ours, isolated=False),
    "isolated (vmap)": partial(ours, isolated=True),
    "isolated (loop)": partial(ours, isolated=True, loop=True),
}


def measure(task: Task, batch: int, rounds: int, device: torch.device) -> list[float]:
    """Median milliseconds per step of each contender, which take steps in turn."""
    data = task.data(device)
    steps = [build(task, data, batch) for build in CONTENDERS.values()]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for step, taken in zip(steps, times, strict=True):
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first is for warming up
                taken.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batches of 4, one round")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender (15)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    print(f"| ms per step | {' | '.join(CONTENDERS)} |")
    print("|---" * (len(CONTENDERS) + 1) + "|")
    for task in TASKS:
        batch, rounds = (4, 1) if options.quick else (task.batch, options.rounds)
        found = measure(task, batch, rounds, torch.device(options.device))
        cells = (f"{ms:.1f} ({ms / found[0]:.1f}x)" for ms in found)
        print(f"| {task.name}, B = {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
