"""Time a private step of networks that people have: torchvision, timm, transformers, LSTM and GRU.

Plain torch with Adam and ``dp-adam`` take turns in this one process, on the same batches, of 32 and
of 31 records in turn. A ratio is the median over the rounds of the time of a private step over that
of a plain one. Weights are
random, records made up, and texts have ordinary two-dimensional masks.

    pip install timm transformers
    OMP_NUM_THREADS=1 python benchmarks/zoo.py --json docs/data/zoo.json      # 6 minutes
    python benchmarks/zoo.py --rounds 3 --only gpt2,llama
    python docs/generate.py                          # writes the table of docs/performance.md

Exit code 1 if a network runs in a loop, which a note says.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import timm
import torch
import torchvision
import transformers
from common import in_turn, machine, parser_of, ratio, spent, steps_in, write_json
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli import Poisson, PrivateStep
from dpmac_cli.dp.clipping.batches import samples_in
from dpmac_cli.training.loading import Drawn

#: Its types differ between versions.
hf: Any = transformers
BATCH, CLASSES, WORDS, LENGTH = 32, 10, 1000, 64
#: Number of records that epsilon would be computed for.
RECORDS = 50_000
#: Sizes of transformers.
SMALL: dict[str, Any] = {
    **{"hidden_size": 128, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "intermediate_size": 512},
}
OF_WORDS: dict[str, Any] = {**SMALL, "vocab_size": WORDS}
#: Seconds that a turn should take at least, one step if a step takes longer.
TURN = 0.3

Batch = Mapping[str, Tensor]
#: Returns one loss per record.
Loss = Callable[[Any, Any], Tensor]


def images(side: int) -> Batch:
    """Return made-up images and classes."""
    pixels, labels = torch.randn(BATCH, 3, side, side), torch.randint(CLASSES, (BATCH,))
    return {"x": pixels, "labels": labels}


def image_loss(model: Any, batch: Batch) -> Tensor:
    """Return the losses of a classifier of images."""
    outputs = model(batch["x"])
    logits = getattr(outputs, "logits", outputs)
    return cross_entropy(logits, batch["labels"], reduction="none")


def texts(length: int = LENGTH) -> Batch:
    """Return made-up texts of unequal length, with a two-dimensional mask."""
    lengths = torch.randint(length // 2, length + 1, (BATCH, 1))
    return {
        "input_ids": torch.randint(1, WORDS, (BATCH, length)),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "labels": torch.randint(2, (BATCH,)),
    }


def text_loss(model: Any, batch: Batch) -> Tensor:
    """Return the losses of a classifier of texts."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits, batch["labels"], reduction="none")


def word_loss(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss of the next word of each text."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses.view_as(mask[:, 1:]) * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1).clamp(min=1)


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a classifier."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 128), nn.Linear(128, 2)
        self.layer = kind(128, 128, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of texts."""
        logits: Tensor = self.head(self.layer(self.words(ids))[0][:, -1])
        return logits


def sequence_loss(model: Any, batch: Batch) -> Tensor:
    """Return the losses of a classifier that takes no mask."""
    return cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")


def group_norm(channels: int) -> nn.Module:
    """Return the norm that replaces batch norm."""
    return nn.GroupNorm(32, channels)


@dataclass(frozen=True)
class Kind:
    """A network, its records and its loss."""

    build: Callable[[], nn.Module]
    records: Callable[[], Batch]
    loss: Loss = image_loss


def of_transformers(name: str, config: Any) -> Callable[[], nn.Module]:
    """Return what builds a network of transformers."""
    return lambda: getattr(transformers, name)(config)


ZOO: Mapping[str, Kind] = {
    "torchvision resnet18, group norm": Kind(
        lambda: torchvision.models.resnet18(norm_layer=group_norm, num_classes=CLASSES),
        partial(images, 32),
    ),
    "torchvision convnext_tiny": Kind(
        lambda: torchvision.models.convnext_tiny(num_classes=CLASSES), partial(images, 64)
    ),
    "torchvision vit, 6 blocks of width 192": Kind(
        lambda: torchvision.models.VisionTransformer(32, 4, 6, 3, 192, 768, num_classes=CLASSES),
        partial(images, 32),
    ),
    "torchvision swin_t": Kind(
        lambda: torchvision.models.swin_t(num_classes=CLASSES), partial(images, 64)
    ),
    "timm vit_tiny": Kind(
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=112, num_classes=CLASSES),
        partial(images, 112),
    ),
    "timm mixer_s32": Kind(
        lambda: timm.create_model("mixer_s32_224", img_size=64, num_classes=CLASSES),
        partial(images, 64),
    ),
    "transformers bert": Kind(
        of_transformers("BertForSequenceClassification", hf.BertConfig(**OF_WORDS)),
        texts,
        text_loss,
    ),
    "transformers distilbert": Kind(
        of_transformers(
            "DistilBertForSequenceClassification",
            hf.DistilBertConfig(dim=128, n_layers=3, n_heads=4, hidden_dim=512, vocab_size=WORDS),
        ),
        texts,
        text_loss,
    ),
    "transformers roberta": Kind(
        of_transformers("RobertaForSequenceClassification", hf.RobertaConfig(**OF_WORDS)),
        texts,
        text_loss,
    ),
    "transformers vit": Kind(
        of_transformers(
            "ViTForImageClassification",
            hf.ViTConfig(image_size=32, patch_size=4, num_labels=CLASSES, **SMALL),
        ),
        partial(images, 32),
    ),
    "transformers gpt2, next words": Kind(
        of_transformers(
            "GPT2LMHeadModel",
            hf.GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=WORDS),
        ),
        texts,
        word_loss,
    ),
    "transformers llama, next words": Kind(
        of_transformers("LlamaForCausalLM", hf.LlamaConfig(num_key_value_heads=2, **OF_WORDS)),
        texts,
        word_loss,
    ),
    "transformers qwen2, next words": Kind(
        of_transformers("Qwen2ForCausalLM", hf.Qwen2Config(num_key_value_heads=2, **OF_WORDS)),
        texts,
        word_loss,
    ),
    "LSTM": Kind(partial(Recurrent, nn.LSTM), texts, sequence_loss),
    "GRU": Kind(partial(Recurrent, nn.GRU), texts, sequence_loss),
}


def plain_step(model: nn.Module, loss: Loss) -> Callable[[Batch], object]:
    """Return a step of Adam without privacy."""
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        adam.zero_grad()
        loss(model.train(), batch).mean().backward()  # type: ignore[no-untyped-call]
        adam.step()

    return step


def by_turns(step: Callable[[Batch], object], batches: list[Batch]) -> Callable[[], object]:
    """Return a step that takes the next of these batches at each call."""
    turns = cycle(batches)
    return lambda: step(next(turns))


def measure(name: str, kind: Kind, rounds: int) -> dict[str, Any]:
    """Time plain and private steps of a network, in turn."""
    torch.manual_seed(0)
    model, batch = kind.build(), kind.records()
    plain = plain_step(copy.deepcopy(model), kind.loss)
    sampling = Poisson(n=RECORDS, batch_size=BATCH)
    settings: dict[str, Any] = {"sigma": 1.0, "lr": 1e-3, "optimizer": "dp-adam"}
    settings |= {"example": batch, "steps": 1000, "physical_batch": BATCH}
    private = PrivateStep(model, kind.loss, sampling=sampling, **settings)

    def privately(rows: Batch) -> None:
        records = np.arange(samples_in(rows))
        private._drawn = Drawn.of(private.taken + 1, records, rows)  # without reading any
        private(rows)

    batches = [batch, {key: tensor[1:] for key, tensor in batch.items()}]  # as drawn, sizes differ
    steps = {"plain": by_turns(plain, batches), "private": by_turns(privately, batches)}
    for step in steps.values():
        step()
    times = {kind: steps_in(TURN, spent(step).wall) for kind, step in steps.items()}
    base, own = in_turn(steps, times, rounds).values()
    ratios = [b.wall / a.wall for a, b in zip(base, own, strict=True)]
    low, _, high = quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    sums: Any = private._sums
    found = {
        "plain_ms": median(each.wall for each in base),
        "private_ms": median(each.wall for each in own),
        **{"ratio": median(ratios), "ratio_low": low, "ratio_high": high},
        "cpu_ratio": ratio(own, base, "cpu"),
    }
    return {
        "network": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": BATCH,
        **{key: round(value, 3) for key, value in found.items()},
        "notes": private.notes,
        "looped": not sums.per_sample.vmapped,
    }


def main() -> int:
    """Measure, print, and write JSON where asked; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of both (7)")
    parser.add_argument("--only", metavar="WORDS", default="", help="networks with these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    versions = {"timm": timm.__version__, "transformers": transformers.__version__}
    rows: list[dict[str, Any]] = []
    for name, kind in ZOO.items():
        if any(word in name for word in options.only.split(",")):
            rows.append(measure(name, kind, options.rounds))
            said = "{network}: {ratio:.2f} ({ratio_low:.2f}–{ratio_high:.2f}) times plain, {notes}"
            print(said.format(**rows[-1]), flush=True)
            write_json(options.json, {"machine": machine() | versions, "rows": rows})
    return int(any(row["looped"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
