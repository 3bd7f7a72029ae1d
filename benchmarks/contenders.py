"""One training step of plain torch, of Opacus and of ours, on the same network and images.

Every step begins with the indices of its batch and ends with updated weights; fetching and
standardising the images is part of it for all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.dp.algorithm import build_algorithm
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.build import build_network
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.schedules import Plan
from dpmac_cli.training.state import Randomness
from dpmac_cli.training.trainer import Trainer, forbid_tf32

SIGMA, LR = 1.0, 1e-3
#: A set whose images an architecture is timed on.
IMAGES = {"mlp": "mnist", "cnn": "cifar10"}
PLAIN = "plain-adam"
#: Parameters of a network that only three are timed on.
LARGE = 10**7

Step = Callable[[], None]


def arithmetic_of(name: str) -> None:
    """Set the precision of products that a contender runs with: ours has TF32 off everywhere."""
    forbid_tf32()
    if name.partition(" ")[0] not in OPTIMIZERS:
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # torch's default


@dataclass(frozen=True)
class Size:
    """What is timed.

    Attributes:
        model: mlp or cnn.
        batch: the expected batch.
        width: hidden units of the mlp; None for the paper's network.
    """

    model: str
    batch: int
    width: int | None = None

    def build(self) -> nn.Module:
        """The network, always with the same weights."""
        facts = DATASETS[IMAGES[self.model]]
        torch.manual_seed(0)
        if self.width is None:
            return build_network(self.model, facts)
        pixels = int(np.prod(facts.shape))
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, self.width),
            nn.ReLU(),
            nn.Linear(self.width, len(facts.classes)),
        )

    @property
    def parameters(self) -> int:
        """d."""
        return sum(p.numel() for p in self.build().parameters())


def random_images(model: str, device: torch.device) -> Data:
    """Noise in the shape and number of the real images: time does not depend on what they show."""
    facts, generator = DATASETS[IMAGES[model]], torch.Generator().manual_seed(0)

    def split(size: int) -> Split:
        shape = (size, *facts.shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, len(facts.classes), (size,), generator=generator)
        return Split(images.to(device), labels.to(device))

    gain, offset = (torch.full((1, 1, 1), value, device=device) for value in (1 / 64, -2.0))
    return Data(split(facts.train_size), split(1), gain, offset)


class Batches:
    """Batches of a fixed size in shuffled order, as a loop without privacy takes them."""

    def __init__(self, data: Data, batch: int) -> None:
        self._data, self._batch, self._begin = data, batch, 0
        self._order = torch.randperm(len(data.train))

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The next images and labels."""
        if self._begin + self._batch > len(self._order):
            self._begin, self._order = 0, torch.randperm(len(self._order))
        rows = self._order[self._begin : self._begin + self._batch].to(self._data.gain.device)
        self._begin += self._batch
        train = self._data.train
        return self._data.standardised(train.images[rows]), train.labels[rows]


def plain(size: Size, data: Data, *, fused: bool) -> Step:
    """Torch's own Adam on the whole batch, at its default settings or fused."""
    model, batches = size.build().to(data.gain.device), Batches(data, size.batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, **({"fused": True} if fused else {}))

    def step() -> None:
        x, y = batches()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def opacus(size: Size, data: Data, *, mode: str) -> Step:
    """DP-Adam by Opacus: per-sample gradients by hooks or functorch, or ghost clipping."""
    network, batches = size.build().to(data.gain.device), Batches(data, size.batch)
    adam = torch.optim.Adam(network.parameters(), lr=LR)
    numbers: dict[str, Any] = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": 1.0,
        "expected_batch_size": size.batch,
    }
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        model = GradSampleModuleFastGradientClipping(
            network, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(adam, **numbers)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)
    else:
        model = GradSampleModule(network, force_functorch=mode == "functorch")
        optimizer = DPOptimizer(adam, **numbers)

    def step() -> None:
        x, y = batches()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def ours(
    size: Size,
    data: Data,
    *,
    name: str,
    compiled: bool = False,
    secure: bool = False,
    ranks: Ranks | None = None,
) -> Step:
    """One of the six, by the trainer that ``dpmac train`` uses."""
    config = resolve({"dataset": IMAGES[size.model], "optimizer": name}).plan
    keys = make_keys(0)
    mechanism = (SecureMechanism if secure else GaussianMechanism)(SIGMA, size.batch)
    sampler, noise = None, None
    if ranks is None or ranks.leads:
        sampler = KeyedSampler(
            "poisson", size=len(data.train), batch=size.batch, key=keys.sampler, secure=secure
        )
        noise = Noise(keys.noise, secure=secure)
    trainer = Trainer(
        model=size.build().to(data.gain.device),
        data=data,
        algorithm=build_algorithm(config.method, config.hyper),
        mechanism=mechanism,
        plan=Plan(
            steps=10**6,
            steps_per_epoch=100,
            physical_batch=config.physical_batch,
            compiled=compiled,
        ),
        randomness=Randomness(keys=keys, sampler=sampler, noise=noise),
        ranks=ranks,
    )
    return trainer.step


Build = Callable[[Data], Step]


def contenders(size: Size, *, peers: bool, largest_gib: float) -> Mapping[str, Build]:
    """Everybody who is timed at a size, by name.

    Args:
        size: the network and its batch.
        peers: whether to time Opacus too.
        largest_gib: per-sample gradients that take more than this are left out.
    """
    if size.parameters > LARGE:
        some = {name: partial(ours, size, name=name) for name in ("dp-adam", "dp-macadam")}
        return {PLAIN: partial(plain, size, fused=False), **some}
    made: dict[str, Build] = {
        PLAIN: partial(plain, size, fused=False),
        "plain-adam-fused": partial(plain, size, fused=True),
    }
    for name in OPTIMIZERS:
        made[name] = partial(ours, size, name=name)
    for name in ("dp-adam", "dp-macadam"):
        made[f"{name} --compile"] = partial(ours, size, name=name, compiled=True)
        made[f"{name} --secure"] = partial(ours, size, name=name, secure=True)
    if peers:
        modes = ["ghost"]
        if size.parameters * size.batch * 4 * 2 <= largest_gib * 2**30:
            modes += ["hooks", "functorch"]
        for mode in modes:
            made[f"opacus-{mode}"] = partial(opacus, size, mode=mode)
    return made
