"""Measure what networks cost whose sizes are no multiples of 16, for every seed of their weights.

A cost is the CPU time of a clipped sum over that of a plain forward and backward pass on the same
records; each is the least of several turns, which all four take in one process. A factor is the
cost of a network over that of the same one with its inner sizes rounded up to multiples of 16.
``looped`` and ``placed`` count the seeds for which records run one after the other, or have random
places. Networks of tests/layer_cases.py are tried, and not timed:

    pip install timm transformers
    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/odd_sizes.py --json docs/data/odd_sizes.json

takes 20 minutes. Exit code 1 if a network costs more than 1.6 times as much, is refused because
of rounding, or runs in a loop where vmap could run it.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import in_turn, machine, parser_of, spent, steps_in
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli import clipped_grad
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.errors import ModelError
from dpmac_cli.models.build import without_batch_norm
from dpmac_cli.training.chunks import BatchSum
from tests.layer_cases import CASES

#: Largest factor.
MOST = 1.6
#: Seconds of a turn, and number of turns.
TURN, ROUNDS = 0.01, 5
#: Factor from which turns are taken again, up to this number of times: whatever else runs on the
#: machine makes some turns longer.
EXPECTED, AGAIN = 1.3, 4
#: Records of a batch.
BATCHES = (256, 1024)
#: Steps of networks with rounded sizes, by their names and the number of records.
EVEN: dict[tuple[str, int], Mapping[str, Callable[[], object]]] = {}
#: Numbers of seeds, for networks of one size and for others.
SEEDS, FEW = 40, 1
WORDS, LENGTH, SIDE, CLASSES = 100, 12, 16, 3
#: Returns a size as it is, or rounded up.
Size = Callable[[int], int]
Batch = Any
Loss = Callable[[Any, Any], Tensor]


def as_it_is(size: int) -> int:
    """Return a size."""
    return size


def rounded(size: int) -> int:
    """Return a size, rounded up to a multiple of 16."""
    return -(-size // 16) * 16


@dataclass(frozen=True)
class Kind:
    """A network, its records and its loss.

    Attributes:
        build: returns a network with sizes by a function.
        records: returns a number of records, with sizes by a function.
        loss: returns one loss per record.
        batches, seeds: numbers of records of a batch, and of seeds for the smallest of them.
        even: name of the network with rounded sizes, where several have the same.
    """

    build: Callable[[Size], nn.Module]
    records: Callable[[int, Size], Batch]
    loss: Loss
    batches: tuple[int, ...] = BATCHES[:1]
    seeds: int = FEW
    even: str = ""


def class_loss(model: Any, batch: Batch) -> Tensor:
    """Return the losses of a classifier."""
    outputs = model(batch["x"])
    return cross_entropy(getattr(outputs, "logits", outputs), batch["y"], reduction="none")


def hinge_loss(model: Any, batch: Batch) -> Tensor:
    """Return hinge losses of one output."""
    return torch.relu(1 - (2 * (batch["y"] > 0) - 1) * model(batch["x"])[:, 0])


def text_loss(model: Any, batch: Batch) -> Tensor:
    """Return the losses of a classifier of texts with a mask."""
    logits = model(input_ids=batch["x"], attention_mask=batch["mask"]).logits
    return cross_entropy(logits, batch["y"], reduction="none")


def labelled(x: Tensor, classes: int = CLASSES) -> Batch:
    """Return records with made-up classes."""
    return {"x": x, "y": torch.randint(classes, (len(x),))}


def numbers(inputs: int, classes: int, count: int, size: Size) -> Batch:
    """Return records of numbers."""
    return labelled(torch.randn(count, size(inputs)), classes)


def images(count: int, size: Size) -> Batch:
    """Return images."""
    return labelled(torch.randn(count, 3, SIDE, SIDE))


def texts(count: int, size: Size) -> Batch:
    """Return texts of unequal length."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return labelled(torch.randint(2, WORDS, (count, LENGTH))) | {"mask": mask}


def sequences(count: int, size: Size) -> Batch:
    """Return six positions of five numbers."""
    return labelled(torch.randn(count, 6, size(5)))


def perceptron(first: int, hidden: int, outputs: int, size: Size, *, norm: bool = False) -> Any:
    """Return two linear layers, with layer norm between them if asked for."""
    inner = size(hidden)
    between = [nn.LayerNorm(inner)] if norm else []
    last = nn.Linear(inner, outputs)
    return nn.Sequential(nn.Linear(size(first), inner), *between, nn.ReLU(), last)


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: Callable[..., nn.Module], hidden: int, size: Size) -> None:
        super().__init__()
        self.layer = kind(size(5), size(hidden), batch_first=True)
        self.head = nn.Linear(size(hidden), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


def ordinary() -> Iterator[tuple[str, Kind]]:
    """Yield small networks that people write."""
    sizes = {"30-50-3": (30, 50, 3), "30-50-2": (30, 50, 2), "784-250-10": (784, 250, 10)}
    for name, of in sizes.items():
        yield (
            name,
            Kind(
                partial(perceptron, *of), partial(numbers, of[0], of[2]), class_loss, BATCHES, SEEDS
            ),
        )
    yield (
        "10-32-1, hinge",
        Kind(partial(perceptron, 10, 32, 1), partial(numbers, 10, 2), hinge_loss, BATCHES, SEEDS),
    )
    yield (
        "13-7-2, LayerNorm",
        Kind(
            partial(perceptron, 13, 7, 2, norm=True),
            partial(numbers, 13, 2),
            class_loss,
            BATCHES,
            SEEDS,
        ),
    )
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        for hidden in range(3, 21):
            build = partial(Recurrent, kind, hidden)
            even = f"{kind.__name__} {rounded(hidden)}"
            yield f"{kind.__name__} {hidden}", Kind(build, sequences, class_loss, even=even)


def families() -> Iterator[tuple[str, Kind]]:
    """Yield small networks of transformers and timm."""
    import timm  # noqa: PLC0415  (the rest runs without)
    import transformers  # noqa: PLC0415  (the same)

    hf: Any = transformers
    usual = {
        "hidden_size": 20,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    of_gpt = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    of_texts: dict[str, dict[str, int]] = {
        **dict.fromkeys(("Bert", "Roberta", "Electra", "Albert", "MPNet", "XLMRoberta"), usual),
        **dict.fromkeys(("DebertaV2", "ConvBert", "Ernie", "RoFormer", "SqueezeBert"), usual),
        **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Gemma", "GPTNeoX"), usual),
        "DistilBert": {"dim": 20, "hidden_dim": 36, "n_layers": 2, "n_heads": 2},
        "GPT2": {"n_embd": 20, "n_layer": 2, "n_head": 2},
        "OPT": {**of_gpt, "ffn_dim": 36, "word_embed_proj_dim": 20},
        "Bloom": {"hidden_size": 20, "n_layer": 2, "n_head": 2},
    }
    own: dict[str, dict[str, int]] = {
        "Electra": {"embedding_size": 20},
        "ConvBert": {"embedding_size": 20},
        "RoFormer": {"embedding_size": 20},
        "Albert": {"embedding_size": 20},
        "SqueezeBert": {"embedding_size": 20},
        "Llama": {"num_key_value_heads": 2},
        "Mistral": {"num_key_value_heads": 2},
        "Qwen2": {"num_key_value_heads": 2},
        "Gemma": {"num_key_value_heads": 2, "head_dim": 10},
    }
    for name, sizes in of_texts.items():
        yield (
            f"transformers {name}",
            Kind(partial(_of_texts, hf, name, sizes | own.get(name, {})), texts, text_loss),
        )
    of_images: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("ViT", "DeiT", "Dinov2"), usual),
    }
    for name, of in of_images.items():
        yield f"transformers {name}", Kind(partial(_of_images, hf, name, of), images, class_loss)
    vit = {"img_size": SIDE, "patch_size": 4, "num_classes": CLASSES}
    built: dict[str, Callable[[Size], nn.Module]] = {
        "vit": lambda size: timm.models.VisionTransformer(
            embed_dim=size(20), depth=2, num_heads=2, mlp_ratio=2, **vit
        ),
        "mlp_mixer": lambda size: timm.models.MlpMixer(embed_dim=size(20), num_blocks=2, **vit),
        "resnet": lambda size: timm.models.ResNet(
            timm.models.resnet.BasicBlock,
            (1, 1, 1, 1),
            num_classes=CLASSES,
            channels=(size(12), size(20), size(24), size(36)),
        ),
        "cait": lambda size: timm.models.Cait(
            embed_dim=size(20), depth=2, num_heads=2, depth_token_only=1, **vit
        ),
    }
    for name, make in built.items():
        yield f"timm {name}", Kind(make, images, class_loss)


def _sized(sizes: Mapping[str, int], size: Size) -> dict[str, int]:
    """Return settings of a network, with sizes by a function."""
    kept = ("num_", "n_layer", "n_head", "n_layers", "n_heads")
    found = {key: value if key.startswith(kept) else size(value) for key, value in sizes.items()}
    if "head_dim" in found:
        found["head_dim"] = found["hidden_size"] // 2
    return found


def _of_texts(hf: Any, name: str, sizes: Mapping[str, int], size: Size) -> nn.Module:
    """Return a classifier of texts of transformers."""
    config = getattr(hf, f"{name}Config")(
        vocab_size=WORDS, num_labels=CLASSES, pad_token_id=0, **_sized(sizes, size)
    )
    network: nn.Module = getattr(hf, f"{name}ForSequenceClassification")(config)
    return network


def _of_images(hf: Any, name: str, sizes: Mapping[str, int], size: Size) -> nn.Module:
    """Return a classifier of images of transformers."""
    config = getattr(hf, f"{name}Config")(
        image_size=SIDE, patch_size=4, num_labels=CLASSES, **_sized(sizes, size)
    )
    network: nn.Module = getattr(hf, f"{name}ForImageClassification")(config)
    return network


def prepared(kind: Kind, size: Size, batch: Batch, seed: int) -> tuple[nn.Module, BatchSum]:
    """Return a network, and its clipped sums."""
    torch.manual_seed(seed)
    model = without_batch_norm(kind.build(size))
    count = len(batch["y"])
    clipped = clipped_grad(
        model, kind.loss, ball(1.0), batch_size=count, physical_batch=count, isolate=True
    )
    return model, clipped.prepare({name: part[:1] for name, part in batch.items()})


def steps_of(
    kind: Kind, size: Size, batch: Batch, seed: int
) -> tuple[BatchSum, dict[str, Callable[[], object]]]:
    """Return clipped sums, and a clipped sum and a plain forward and backward pass to time."""
    model, sums = prepared(kind, size, batch, seed)
    records, metric = np.arange(len(batch["y"])), RegionMetric(ball(1.0))

    def private() -> None:
        with torch.no_grad(), sums.given(records, batch):
            sums.of(records, 1, metric, sums.chunk)

    def plain() -> None:
        loss = kind.loss(model, batch).mean()
        torch.autograd.grad(loss, sums._parameters, allow_unused=True)

    return sums, {"private": private, "plain": plain}


def measure(name: str, kind: Kind, count: int) -> dict[str, Any]:
    """Measure seeds at batches of a number of records."""
    found, factors, costs = {"looped": 0, "placed": 0}, [], []
    torch.manual_seed(0)
    key, batch = (kind.even or name, count), kind.records(count, as_it_is)
    if key not in EVEN:
        EVEN[key] = steps_of(kind, rounded, kind.records(count, rounded), 0)[1]
    for seed in range(kind.seeds if count == kind.batches[0] else FEW):
        sums, own = steps_of(kind, as_it_is, batch, seed)
        found["looped"] += not sums.per_sample.vmapped
        found["placed"] += sums.placed
        steps = {"private": own["private"], "plain": own["plain"]}
        steps |= {f"even {name}": step for name, step in EVEN[key].items()}
        for step in steps.values():
            step()
        times = {name: steps_in(TURN, spent(step).wall) for name, step in steps.items()}
        least = dict.fromkeys(steps, math.inf)
        for _ in range(AGAIN):
            with full_float32():
                taken = in_turn(steps, times, ROUNDS)
            least = {n: min(least[n], *(each.cpu for each in of)) for n, of in taken.items()}
            cost, even = (least[f"{k}private"] / least[f"{k}plain"] for k in ("", "even "))
            if cost < EXPECTED * even:
                break
        costs.append(cost)
        factors.append(cost / even)
    return found | {
        "seeds": len(costs),
        "cost": round(median(costs), 2),
        "factor": round(median(factors), 3),
        "largest_factor": round(max(factors), 3),
    }


def zoo() -> Iterator[dict[str, Any]]:
    """Yield how the networks of tests/layer_cases.py are run."""
    for case in CASES:
        if case.refused:
            continue
        torch.manual_seed(0)
        clipped = clipped_grad(case.build(), case.loss, ball(1.0), batch_size=256)
        sums = clipped.prepare(case.batch()[:1])
        looped = int(not sums.per_sample.vmapped)
        yield {
            "network": f"{case.group}: {case.name}",
            **{"batch": 256, "looped": looped, "placed": int(sums.placed), "seeds": 1},
        }


def main() -> int:
    """Measure, print, and write JSON where asked; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="networks whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        if options.json is not None:
            text = json.dumps({"machine": machine(), "rows": rows}) + "\n"
            options.json.write_text(text.replace('{"network"', '\n{"network"'))

    for name, kind in (*ordinary(), *families()):
        for count in kind.batches if options.only in name else ():
            try:
                add({"network": name, "batch": count, **measure(name, kind, count)})
            except (ModelError, TypeError, ValueError, RuntimeError) as failure:
                add({"network": name, "batch": count, "failed": str(failure)})
    if options.only in "zoo":
        for row in zoo():
            add(row)
    return int(any(row.get("largest_factor", 0) > MOST for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
