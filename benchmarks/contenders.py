"""One training step of plain torch, of Opacus and of ours, on the same network and images.

Every step begins with the indices of its batch and ends with updated weights; fetching and
standardising the images is part of it for all of them.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Step
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torchvision.models.resnet import BasicBlock

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import places_of
from dpmac_cli.config.datasets import DATASETS, Dataset
from dpmac_cli.config.networks import MODELS
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.models.build import build_network
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler, RandomPlaces
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.data_sum import DataSum
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory

SIGMA, LR = 1.0, 1e-3
#: A set whose images an architecture is timed on.
IMAGES = {
    "mlp": "mnist",
    "cnn": "cifar10",
    "wrn-16-4": "cifar10",
    "resnet18": "cifar10",
    "vit-tiny": "cifar10",
    "lstm": "cifar10",
    "gru": "cifar10",
}
#: Networks that only the two main optimizers and some of Opacus are timed on.
DEEP = tuple(IMAGES)[2:]
PLAIN = "plain-adam"
#: Plain torch in a process that keeps freed memory, as ``dpmac train`` does.
KEEPING = "plain-adam, memory kept"
#: Plain torch on a GPU whose convolutions are in full float32, as ours are.
NO_TF32 = "plain-adam, no TF32"
#: Plain torch on a GPU, the whole step replayed as a CUDA graph.
GRAPH = "plain-adam, graph"
#: Parameters of a network that only three are timed on.
LARGE = 10**7


def settings_of(name: str) -> None:
    """Set what a contender runs with.

    Ours compute without TF32 and keep freed memory, as ``dpmac train`` does; the others have
    torch's defaults, and glibc's (what it comes to in a program that frees large blocks).
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if name.partition(" ")[0] in OPTIMIZERS or name == KEEPING:
        keep_freed_memory()
    else:
        with contextlib.suppress(OSError, AttributeError):  # glibc's defaults for large blocks
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
            libc.mallopt(M_TRIM_THRESHOLD, 1 << 26)
    if name.partition(" ")[0] not in OPTIMIZERS and name != NO_TF32:
        cudnn: Any = torch.backends.cudnn  # its stub has no conv
        cudnn.conv.fp32_precision = "tf32"  # torch's default


class VisionTransformer(nn.Module):
    """A small vision transformer in the style of timm, with norms before each part."""

    def __init__(self, dataset: Dataset, width: int = 192, depth: int = 6, patch: int = 4) -> None:
        super().__init__()
        channels, *image = dataset.records.shape
        tokens = 1 + (image[0] // patch) * (image[1] // patch)
        self.patch_embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        block = nn.TransformerEncoderLayer(
            width, 3, 4 * width, 0.0, gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, dataset.task.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images, shape (samples, classes)."""
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(len(x), -1, -1)
        tokens = torch.cat([first, tokens], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


class Recurrent(nn.Module):
    """A classifier of sequences: 50 steps of 60 numbers, 128 wide."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], classes: int) -> None:
        super().__init__()
        self.recur, self.head = kind(60, 128, batch_first=True), nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits from the last output; an image is read as a sequence."""
        outputs, _ = self.recur(x.flatten(1)[:, : 50 * 60].view(-1, 50, 60))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


@dataclass(frozen=True)
class Size:
    """Network and batch to time.

    Attributes:
        model: a key of :data:`IMAGES`.
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
        if self.model == "vit-tiny":
            return VisionTransformer(facts)
        if self.model in ("lstm", "gru"):
            return Recurrent(nn.LSTM if self.model == "lstm" else nn.GRU, facts.task.outputs)
        if self.width is None:
            return build_network(self.model, facts.signature)
        pixels = int(np.prod(facts.records.shape))
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, self.width),
            nn.ReLU(),
            nn.Linear(self.width, facts.task.outputs),
        )

    @property
    def parameters(self) -> int:
        """d."""
        return sum(p.numel() for p in self.build().parameters())


def random_images(model: str, device: torch.device) -> Data:
    """Return noise in the shape and number of a network's images: time does not depend on them."""
    facts = DATASETS[IMAGES[model]]
    generator = torch.Generator().manual_seed(0)

    def split(size: int) -> Split:
        shape = (size, *facts.records.shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, facts.task.outputs, (size,), generator=generator)
        return Split(images.to(device), labels.to(device))

    gain, offset = (torch.full((1, 1, 1), value, device=device) for value in (1 / 64, -2.0))
    return Data(split(facts.train_size), split(1), gain, offset, facts.task)


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
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=fused or None)

    def step() -> None:
        x, y = batches()
        optimizer.zero_grad()
        loss: Any = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def plain_graph(size: Size, data: Data) -> Step:
    """Torch's own Adam on the whole batch, recorded once as a CUDA graph and replayed."""
    model, batches = size.build().to(data.gain.device), Batches(data, size.batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, capturable=True)
    x, y = (part.clone() for part in batches())

    def eager() -> None:
        optimizer.zero_grad()
        loss: Any = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch's documentation of graphs asks for
        for _ in range(3):
            eager()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()

    def step() -> None:
        for place, part in zip((x, y), batches(), strict=True):
            place.copy_(part)
        graph.replay()

    return step


def opacus(size: Size, data: Data, *, mode: str) -> Step:
    """DP-Adam by Opacus: per-sample gradients by hooks or functorch, or ghost clipping.

    Its hooks need operations out of place: in-place ReLU is switched off, and so are the in-place
    sums of ResNet-18.
    """
    network, batches = size.build().to(data.gain.device), Batches(data, size.batch)
    _out_of_place(network)
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


def _out_of_place(network: nn.Module) -> None:
    """Replace in-place operations of built-in networks, which backward hooks do not allow."""
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        elif isinstance(module, BasicBlock):
            module.forward = partial(_basic_block, module)


def _basic_block(block: Any, x: Tensor) -> Tensor:
    """Return the output of a block of ResNet-18, added up out of place."""
    out = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    around = x if block.downsample is None else block.downsample(x)
    result: Tensor = block.relu(out + around)
    return result


def ours(
    size: Size,
    data: Data,
    *,
    name: str,
    secure: bool = False,
    ranks: Ranks | None = None,
) -> Step:
    """One of the six of the paper, by the trainer that ``dpmac train`` uses."""
    network = {"model": size.model} if size.model in MODELS else {}
    config = resolve({"dataset": IMAGES[size.model], "optimizer": name, **network}).plan
    keys = make_keys(0)
    mechanism = (SecureMechanism if secure else GaussianMechanism)(SIGMA, size.batch)
    sampler, noise = None, None
    if ranks is None or ranks.leads:
        step = TrainingEvent(size.batch / len(data.train), SIGMA, 1)
        sampler = KeyedSampler(step, size=len(data.train), key=keys.sampler, secure=secure)
        noise = Noise(keys.noise, secure=secure)
    model = size.build().to(data.gain.device)
    event, processes = config.event.first(10**6), ranks or Ranks()
    count = places_of(event, len(data.train), processes.size)
    places = RandomPlaces(keys.layers, count, processes.rank)
    with full_float32():
        trainer = Trainer(
            DataSum(model, data, config, mechanism.expected_batch, None, places),
            plan=config,
            steps=10**6,
            mechanism=mechanism,
            sampler=sampler,
            noise=noise,
            account=Account(event=config.event.first(10**6)),
            ranks=ranks,
        )
    return trainer.step


Build = Callable[[Data], Step]


def contenders(
    size: Size, *, peers: bool, largest_gib: float, on_gpu: bool = False
) -> Mapping[str, Build]:
    """Everybody who is timed at a size, by name.

    Args:
        size: the network and its batch.
        peers: whether to time Opacus too.
        largest_gib: per-sample gradients that take more than this are left out.
        on_gpu: whether they run on a GPU.
    """
    made: dict[str, Build] = dict.fromkeys(
        (PLAIN, NO_TF32 if on_gpu else KEEPING), partial(plain, size, fused=False)
    )
    if on_gpu:
        made[GRAPH] = partial(plain_graph, size)
    modes = ["ghost", "hooks", "functorch"]
    names: tuple[str, ...]
    if size.model in DEEP:
        names, peer_modes = ("dp-adam", "dp-macadam"), modes[:2]
    elif size.parameters > LARGE:
        names, peer_modes = ("dp-adam", "dp-macadam"), []
    else:
        names, peer_modes = tuple(OPTIMIZERS), modes
        made["plain-adam-fused"] = partial(plain, size, fused=True)
    made |= {name: partial(ours, size, name=name) for name in names}
    if names == tuple(OPTIMIZERS):
        for name in ("dp-adam", "dp-macadam"):
            made[f"{name} --secure"] = partial(ours, size, name=name, secure=True)
    if peers:
        gib = size.parameters * size.batch * 4 * 2 / 2**30
        for mode in peer_modes:
            if mode == "ghost" or gib <= largest_gib:
                made[f"opacus-{mode}"] = partial(opacus, size, mode=mode)
            else:
                sys.stderr.write(f"left out: opacus-{mode} ({gib:.0f} GiB of gradients)\n")
    return made
