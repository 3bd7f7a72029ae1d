"""Find layers whose rows are rounded by other rows or their place, and check how dpmac runs them.

Each layer is run on copies of a few random rows. ``plain`` lists the numbers of rows with which
equal rows differ, among themselves or from those of the largest number; ``runs`` is how dpmac runs
the layer, from a trial with a few numbers: by torch, by oneDNN, or with random places of records;
``left`` are the numbers with which rows still differ, without random places. ``others`` is whether
a row changes at its place when all other rows do: it never should. Sets of instructions are forced
in processes of their own:

    python benchmarks/row_rounding.py --out docs/data/row_rounding.json
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import INSTRUCTIONS, parser_of
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dpmac_cli.dp.clipping.batch_invariance import (
    PERIOD,
    TRIED,
    chunks_alike,
    rows_of,
    some_numbers,
)
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.order_of_sums import BLOCK, Elementwise

#: Largest number of rows.
MOST = 160
Build = Callable[[], nn.Module]


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(x)


def recurrent(layer: nn.Module) -> nn.Module:
    """Return a recurrent layer that returns its outputs only."""
    return Function(lambda x: layer(x)[0], layer)


def attention(x: Tensor) -> Tensor:
    """Return attention of two heads, without projections."""
    heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
    return scaled_dot_product_attention(heads, heads, heads)


def layers() -> Iterator[tuple[str, Build, tuple[int, ...]]]:
    """Yield names of layers, functions that build them, and shapes of one row."""
    for ins, outs in ((64, 1), (64, 10), (784, 256), (256, 10), (512, 512), (1568, 10)):
        yield f"Linear {ins} to {outs}", partial(nn.Linear, ins, outs), (ins,)
    for k in (1, 2, 3, 5, 7, 8, 9, 11):
        for c, o, side, stride in ((1, 8, 14, 1), (1, 16, 28, 2), (3, 16, 16, 1), (16, 16, 12, 1)):
            yield (
                f"Conv2d {c} to {o}, kernel {k}, stride {stride}, {side}x{side}",
                partial(nn.Conv2d, c, o, k, stride, k // 2),
                (c, side, side),
            )
    yield "Conv2d 64 to 64, kernel 3", lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8)
    yield "Conv2d depthwise 32", lambda: nn.Conv2d(32, 32, 3, 1, 1, groups=32), (32, 8, 8)
    yield "Conv2d depthwise 32, kernel 7", lambda: nn.Conv2d(32, 32, 7, 1, 3, 1, 32), (32, 8, 8)
    yield "Conv2d of 4 groups", lambda: nn.Conv2d(32, 32, 3, groups=4), (32, 8, 8)
    yield "Conv2d dilated", lambda: nn.Conv2d(8, 8, 3, dilation=2), (8, 12, 12)
    yield "Conv1d kernel 5", lambda: nn.Conv1d(8, 16, 5), (8, 64)
    yield "Conv1d kernel 16", lambda: nn.Conv1d(1, 8, 16, 2, 8), (1, 64)
    yield "Conv3d kernel 3", lambda: nn.Conv3d(1, 4, 3), (1, 6, 8, 8)
    yield "Conv3d kernel 5", lambda: nn.Conv3d(2, 4, 5, padding=2), (2, 6, 8, 8)
    yield "ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 8, 4, 2), (16, 7, 7)
    yield "ConvTranspose1d", lambda: nn.ConvTranspose1d(8, 4, 4), (8, 20)
    yield "GroupNorm", lambda: nn.GroupNorm(2, 8), (8, 14, 14)
    yield "InstanceNorm2d", lambda: nn.InstanceNorm2d(8), (8, 14, 14)
    yield "LayerNorm", lambda: nn.LayerNorm(192), (16, 192)
    yield "RMSNorm", lambda: nn.RMSNorm(192), (16, 192)
    yield "AvgPool2d", lambda: nn.AvgPool2d(2), (8, 14, 14)
    yield "AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(1), (16, 14, 14)
    yield "Upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 7, 7)
    yield "softmax", lambda: nn.Softmax(-1), (10,)
    yield "GELU", nn.GELU, (257,)
    yield "attention", lambda: Function(attention), (17, 32)
    yield "bmm", lambda: Function(lambda x: torch.bmm(x, x.mT)), (17, 32)
    yield "einsum", lambda: Function(lambda x: torch.einsum("nti,nsi->nts", x, x)), (9, 16)
    yield "LSTM", lambda: recurrent(nn.LSTM(16, 32, batch_first=True)), (6, 16)
    yield "GRU", lambda: recurrent(nn.GRU(16, 32, batch_first=True)), (6, 16)


def scan(name: str, build: Build, shape: tuple[int, ...], threads: int) -> dict[str, Any]:
    """Return the result for one layer."""
    torch.set_num_threads(threads)
    torch.manual_seed(zlib.crc32(name.encode()))
    network = nn.Sequential(build())
    base = torch.randn(TRIED, *shape)
    all_numbers = sorted({*range(16, 36), *range(37, MOST, 11), *some_numbers(MOST)}, reverse=True)

    def run(x: Tensor, by_rows: bool = False) -> Tensor:
        with torch.enable_grad(), RowProducts() if by_rows else nullcontext():
            result: Tensor = network(x)
            return result

    def rows(n: int) -> Tensor:
        return base[:PERIOD].repeat(-(-n // PERIOD), *[1] * len(shape))[:n]

    def odd(by_rows: bool, block: int) -> list[int]:
        numbers = sorted({rows_of(n, MOST, block) for n in all_numbers}, reverse=True)
        first = run(rows(numbers[0]), by_rows)[:PERIOD].detach()
        found = {n: run(rows(n), by_rows).detach() for n in numbers}
        return [
            n for n, out in found.items() if not torch.equal(out, first[torch.arange(n) % PERIOD])
        ]

    with Elementwise() as elementwise:
        run(base[:17])
    result = {
        "layer": name,
        "threads": threads,
        "plain": odd(False, 1),
        "others": sees_others(run, rows(MOST)),
    }
    block = BLOCK if elementwise.ends else 1
    for by_rows in (False, True):
        if chunks_alike(partial(run, by_rows=by_rows), base, MOST, block):
            how = "oneDNN" if by_rows else "torch"
            return result | {"runs": how, "left": odd(by_rows, block)}
    return result | {"runs": "random places", "left": []}


def sees_others(run: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Return whether a row's result changes at its place when all other rows are replaced."""
    expected = run(rows).detach()
    for other in (1e4, torch.nan, torch.inf):
        for place in range(0, len(rows), 9):
            replaced = other * torch.randn_like(rows)
            replaced[place] = rows[place]
            if not run(replaced)[place].detach().equal(expected[place]):
                return True
    return False


def main(given: list[str] | None = None) -> None:
    """Scan all layers, or those whose names contain some text."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="")
    parser.add_argument("--instructions", nargs="+", default=[*INSTRUCTIONS])
    parser.add_argument("--here", action="store_true")
    args = parser.parse_args(given)
    if args.here:
        chosen = [layer for layer in layers() if args.only in layer[0]]
        found: Any = [scan(*layer, threads) for threads in args.threads for layer in chosen]
    else:
        found = {"torch": torch.__version__, "rows": MOST}
        for name in args.instructions:
            own = ["--here", "--out", str(args.out), "--only", args.only]
            command = [sys.executable, __file__, *own, "--threads", *map(str, args.threads)]
            subprocess.run(command, check=True, env={**os.environ, **INSTRUCTIONS[name]})
            found[name] = json.loads(args.out.read_text())
    args.out.write_text(json.dumps(found).replace('{"layer"', '\n{"layer"') + "\n")


if __name__ == "__main__":
    main()
