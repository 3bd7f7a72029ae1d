"""Train a small causal language model privately: all of it, and with LoRA.

    python benchmarks/language_model.py > docs/data/language_model.json       # an hour on two cores
    python benchmarks/language_model.py --device cuda
    python benchmarks/language_model.py --layers 1 --width 32 --words 50 --records 2000 --steps 20

Texts are generated: after each word, one of four follows, and as in a language few words are
frequent, so that a network that has learnt them has a low perplexity. The network is GPT-2's,
small: its head is its embedding. For LoRA, it is first trained without privacy on other, public
texts, with other words in part. docs/language-models.md shows the figures.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.utils.data import Dataset

from dpmac_cli import Poisson, PrivateStep

Text = dict[str, Tensor]


class Texts(Dataset[Text]):
    """Texts of unequal length, padded, with a mask. After each word, one of four follows."""

    def __init__(
        self, records: int, words: int, length: int, seed: int, changed: float = 0
    ) -> None:
        self.ids = torch.empty(records, length, dtype=torch.long)
        rules = torch.Generator().manual_seed(0)
        follows, others = (
            (words * torch.rand(words, 4, generator=rules) ** 3).long() for _ in range(2)
        )
        follows = torch.where(torch.rand(words, 1, generator=rules) < changed, others, follows)
        draws = torch.Generator().manual_seed(seed)
        self.ids[:, 0] = torch.randint(words, (records,), generator=draws)
        for place in range(1, length):
            which = torch.randint(4, (records,), generator=draws)
            self.ids[:, place] = follows[self.ids[:, place - 1], which]
        lengths = torch.randint(length // 2, length + 1, (records,), generator=draws)
        self.mask = (torch.arange(length) < lengths.unsqueeze(1)).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Text:
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index]}


class Block(nn.Module):
    """Causal attention, and two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states, shape (records, length, width)."""
        heads = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return hidden


class Gpt(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self, words: int, length: int, layers: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits of the next word, shape (records, length, words)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.words(input_ids) + self.places)))
        return logits


class Lora(nn.Module):
    """A frozen Linear layer, and a trained low-rank update of it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both."""
        outputs: Tensor = self.frozen(x) + self.up(self.down(x))
        return outputs


def with_lora(model: nn.Module, rank: int = 8) -> nn.Module:
    """Freeze a network, and add low-rank updates to the Linear layers of its blocks."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "head":
            model.set_submodule(name, Lora(layer, rank))
    return model


def token_losses(model: Any, batch: Text) -> tuple[Tensor, Tensor]:
    """Return the loss of every next word, and its mask, shape (records, length - 1) each."""
    ids, mask = batch["input_ids"], batch["attention_mask"][:, 1:]
    logits, targets = model(ids)[:, :-1], ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(mask) * mask, mask


def text_loss(model: Any, batch: Text) -> Tensor:
    """Return the mean loss per word of each text, shape (records,)."""
    losses, mask = token_losses(model, batch)
    return losses.sum(1) / mask.sum(1).clamp(min=1)


def rows_of(texts: Texts, rows: Tensor | slice, model: nn.Module) -> Text:
    """Return some texts on the device of a network."""
    device = next(model.parameters()).device
    return {"input_ids": texts.ids[rows].to(device), "attention_mask": texts.mask[rows].to(device)}


@torch.no_grad()
def perplexity(model: nn.Module, texts: Texts) -> float:
    """Return the perplexity of public texts."""
    losses, mask = token_losses(model.eval(), rows_of(texts, slice(None), model))
    return math.exp(float(losses.sum() / mask.sum()))


def pretrain(model: nn.Module, texts: Texts, steps: int) -> None:
    """Train without privacy on public texts."""
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.randint(len(texts), (64,), generator=torch.Generator().manual_seed(step))
        adam.zero_grad()
        text_loss(model, rows_of(texts, rows, model)).mean().backward()  # type: ignore[no-untyped-call]
        adam.step()


def plain_step(model: nn.Module, batch_size: int) -> Callable[[Text], object]:
    """Return a step of Adam without privacy, on the whole batch at once."""
    adam = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    device = next(model.parameters()).device

    def one(batch: Text) -> None:
        adam.zero_grad()
        losses = text_loss(model, {name: values.to(device) for name, values in batch.items()})
        (losses.sum() / batch_size).backward()  # type: ignore[no-untyped-call]
        adam.step()

    return one


def timed(one: Callable[[Text], object], batch: Text) -> float:
    """Return the seconds that a step takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    one(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def run(options: argparse.Namespace, *, lora: bool) -> dict[str, Any]:
    """Train privately; return perplexities and what they cost."""
    torch.manual_seed(0)
    words, length = options.words, options.length
    model: nn.Module = Gpt(words, length, options.layers, options.width).to(options.device)
    if lora:
        pretrain(
            model, Texts(20_000, words, length, seed=1, changed=options.changed), options.public
        )
        model = with_lora(model).to(options.device)
    records, held = Texts(options.records, words, length, 2), Texts(500, words, length, 3)
    before = perplexity(model, held)
    step = PrivateStep(
        model,
        text_loss,
        sampling=Poisson(n=len(records), batch_size=options.batch),
        optimizer="dp-adam",
        lr=options.lora_lr if lora else options.lr,
        epsilon=8,
        steps=options.steps,
        physical_batch=options.physical_batch,
    )
    plain = plain_step(copy.deepcopy(model), options.batch)
    taken: list[tuple[float, float]] = []
    for batch in step.loader(records):
        taken.append((timed(plain, batch), timed(step, batch)))
    return {
        "trained": "LoRA" if lora else "all",
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "perplexity before": round(before, 1),
        "perplexity after": round(perplexity(model, held), 1),
        "epsilon": step.epsilon,
        "sigma": step.sigma,
        "seconds a step": round(median(own for _, own in taken), 4),
        "times plain": round(median(own / base for base, own in taken), 2),
        "notes": step.notes,
    }


def main() -> None:
    """Print one JSON object per way of training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {
        **{"words": 2000, "length": 16, "layers": 4, "width": 128, "records": 20_000},
        **{"batch": 256, "steps": 40, "public": 150},
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lora-lr", type=float, default=3e-3)
    parser.add_argument("--changed", type=float, default=0.3)
    parser.add_argument("--physical-batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for lora in (False, True):
        print(json.dumps(run(options, lora=lora)), flush=True)


if __name__ == "__main__":
    main()
