"""Batch invariance: run a network so that a row's result depends on no other row, bit for bit.

Libraries may round a row by the number of rows computed with it, or by its place among them.
Removing a record changes both for the others. Differences of rounding are within the margin of the
clipped sum, except at a kink, such as that of ReLU, where they change on which side a record is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import Batch, map_rows, tensors_in

#: Least number of rows to compute at once, unless chunks are smaller. Matrix libraries round rows
#: of products of fewer rows differently (measured up to 11), and the last rows of numbers that are
#: no multiple of it.
LEAST_ROWS = 16
#: Number of different rows in a trial. Their copies are at all places; 7 has no factor in common
#: with the widths of vector registers.
PERIOD = 7


def fill_rows(batch: Batch, rows: int) -> Batch:
    """Return a batch, filled up to at least ``rows`` rows with copies of the first."""

    def filled(x: Tensor) -> Tensor:
        filling = x[:1].expand(max(0, rows - len(x)), *x.shape[1:])
        return torch.cat([x, filling]) if len(filling) else x

    return map_rows(filled, batch)


@contextmanager
def without_zeros(theta: Tensor) -> Iterator[None]:
    """Replace zero parameters, which would hide all rounding before them."""
    before, generator = theta.clone(), torch.Generator().manual_seed(0)
    try:
        drawn = 0.1 * torch.randn(theta.shape, generator=generator)
        theta.copy_(torch.where(theta == 0, drawn.to(theta), theta))
        yield
    finally:
        theta.copy_(before)


@contextmanager
def _without_libraries() -> Iterator[None]:
    """Run convolutions by torch's own code: one matrix product per image."""
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # flags() would change the precision, too
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


#: Ways to run a module, from the cheapest. Their names complete the sentence "It runs ...".
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "without oneDNN and cuDNN": _without_libraries,
    "on one thread": _one_thread,
}


def rounded_up(chunk: int) -> int:
    """Return a number of rows, rounded up to a multiple of :data:`LEAST_ROWS`."""
    return -(-chunk // LEAST_ROWS) * LEAST_ROWS


#: Numbers of rows to compute for some samples of a chunk of some capacity, from the cheapest. Their
#: names complete the sentence "Every chunk is filled to ...".
FILLS: dict[str, Callable[[int, int], int]] = {
    "a few rows at least": lambda samples, chunk: max(samples, min(chunk, LEAST_ROWS)),
    f"a multiple of {LEAST_ROWS} rows": lambda samples, _: rounded_up(samples),
    "its capacity": lambda _, chunk: chunk if chunk < LEAST_ROWS else rounded_up(chunk),
}
FEW, *_, FULL = FILLS


@dataclass(frozen=True)
class Manner:
    """A way to run a network.

    Attributes:
        ways: names of modules with the name of the way in which each runs, see :data:`WAYS`.
        fill: how many rows are computed at a time, see :data:`FILLS`.
        alone: modules that need each record to be a chunk by itself; empty if none does.
    """

    ways: Mapping[str, str] = field(default_factory=dict)
    fill: str = FEW
    alone: tuple[str, ...] = ()

    def rows(self, samples: int, chunk: int) -> int:
        """Return the number of rows to compute for some samples of a chunk of this capacity."""
        return FILLS[self.fill](samples, chunk) if chunk > 1 else samples

    @contextmanager
    def of(self, network: nn.Module) -> Iterator[None]:
        """Run modules in their ways while they compute their outputs."""
        with ExitStack() as hooks:
            for name, way in self.ways.items():
                module, entered = network.get_submodule(name), list[ExitStack]()
                for hook in (
                    module.register_forward_pre_hook(partial(_enter, way, entered)),
                    module.register_forward_hook(partial(_leave, entered), always_call=True),
                ):
                    hooks.callback(hook.remove)
            yield

    @property
    def note(self) -> str | None:
        """Return a message that names everything that is slower than by default."""
        parts = [f"{name or 'the network'} runs {way}" for name, way in self.ways.items()]
        parts += [f"every chunk is filled to {self.fill}"] * (self.fill != FEW)
        reason = "results for a record would be rounded by the other records of a batch"
        if self.alone:
            named = ", ".join(name or "the network itself" for name in self.alone)
            return (
                f"On this machine, {reason} in {named}. To avoid that, the network runs on one "
                "record after the other. This can take many times as long."
            )
        if not parts:
            return None
        return f"On this machine, {reason}. To avoid that, {', '.join(parts)}. This is slower."


def _enter(way: str, entered: list[ExitStack], *_: Any) -> None:
    entered.append(ExitStack())
    entered[-1].enter_context(WAYS[way]())


def _leave(entered: list[ExitStack], *_: Any) -> None:
    if entered:  # not if another hook failed before
        entered.pop().close()


class Whole(nn.Module):
    """A function as a module, whose parts are not seen."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)


#: Runs a network on rows, as in training, and returns results with one or more rows per row.
RunNetwork = Callable[[Batch], Any]


def find_manner(
    network: nn.Module, run: RunNetwork, base: Batch, chunk: int, *, fixed: bool = False
) -> Manner:
    """Return the cheapest way to run a network in which no row depends on the others.

    It is run on copies of a few random rows, in several numbers and at every place of each. Their
    results must be equal, bit for bit. This is a measurement on this machine, not a proof. If they
    are never equal, each record is run alone, which needs none.

    Args:
        network: the network. A module in which rows begin to differ runs in the ways of
            :data:`WAYS`, until its rows no longer do.
        run: runs ``network`` on rows.
        base: rows to copy, shape (:data:`PERIOD`, ...).
        chunk: capacity of a chunk.
        fixed: chunks are always filled.
    """
    found: list[str] = []
    # On GPUs, most products are rounded by the number of rows.
    for fill in (FULL,) if fixed or any(x.is_cuda for x in tensors_in(base)) else FILLS:
        manner = Manner(fill=fill)
        numbers = sorted({manner.rows(n, chunk) for n in some_numbers(chunk)}, reverse=True)
        tried: dict[str, list[str]] = {}
        while True:
            with manner.of(network):
                found = differing(network, run, base, numbers)
            if not found:
                return manner
            left = {name: _untried(tried.setdefault(name, [])) for name in found}
            if None in left.values():
                break
            for name, way in left.items():
                tried[name].append(str(way))
            manner = Manner({**manner.ways, **{n: str(way) for n, way in left.items()}}, fill)
    return Manner(alone=tuple(found))


def _untried(tried: Collection[str]) -> str | None:
    return next((way for way in WAYS if way not in tried), None)


def some_numbers(chunk: int) -> list[int]:
    """Return numbers of rows to try, the largest first.

    They have all remainders by 4, are even and odd, and grow as thresholds in libraries do.
    """
    least = min(chunk, LEAST_ROWS)
    sizes = {least, chunk, *(n for n in (17, 19, 22, 33, 50, 75) if n < chunk)}
    sizes |= {max(least, n) for n in (chunk // 3, chunk // 2, chunk - 1)}
    return sorted(sizes, reverse=True) if chunk >= LEAST_ROWS else [chunk]


@torch.no_grad()
def differing(network: nn.Module, run: RunNetwork, base: Batch, numbers: list[int]) -> list[str]:
    """Return the names of modules whose outputs for equal rows differ, but not their inputs.

    Of a module and a part of it, only the part is returned; "" is the network, or its loss.
    """
    first, trial = _Trial(network), _Trial(network)
    random: AbstractContextManager[Any] = nullcontext()
    with torch.random.fork_rng():
        if any([first.of(run, base, numbers[-1], 0, seed) for seed in (0, 1)][1:]):
            random = _Constant()  # type: ignore[no-untyped-call]  # random numbers differ by place
        with random:
            places = [(n, shift) for n in numbers for shift in _shifts(n)]
            names = {name for place in places for name in trial.of(run, base, *place)}
    return sorted(n for n in names if not any(m != n and _inside(m, n) for m in names))


def _shifts(number: int) -> range:
    """Return how far to move the rows of a trial, so that a few rows are at several places, too."""
    return range(PERIOD if number <= LEAST_ROWS else 1)


def _inside(part: str, whole: str) -> bool:
    return not whole or part.startswith(f"{whole}.")


class _Trial:
    """Compares the inputs and outputs of every module with those of the first run."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._first: dict[tuple[Any, ...], Tensor] = {}

    def of(self, run: RunNetwork, base: Batch, number: int, shift: int, seed: int = 0) -> set[str]:
        """Run on a number of rows, moved by ``shift``; return where results begin to differ."""
        found, calls = set[str](), dict[str, int]()

        def compare(name: str, _: nn.Module, args: Any, named: Any, out: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            given = self._same((name, calls[name], "in"), (args, named), number, shift)
            if not self._same((name, calls[name], "out"), out, number, shift) and given:
                found.add(name)

        torch.manual_seed(seed)
        rows = map_rows(partial(_in_turn, number, shift), base)
        with ExitStack() as hooks:
            for name, module in self._network.named_modules():
                hook = module.register_forward_hook(partial(compare, name), with_kwargs=True)
                hooks.callback(hook.remove)
            result = run(rows)
        if not self._same(("result",), result, number, shift) and not found:
            found.add("")
        return found

    def _same(self, place: tuple[Any, ...], values: Any, number: int, shift: int) -> bool:
        """Return whether tensors have the rows of the first run; skip tensors without rows."""
        same = True
        for n, tensor in enumerate(tensors_in(values)):
            if tensor.ndim == 0 or len(tensor) == 0 or len(tensor) % number:
                continue
            rows = tensor.detach().reshape(number, -1)
            for k, row in enumerate(rows[:PERIOD]):
                key = (*place, n, (k + shift) % PERIOD)
                first = self._first.setdefault(key, row.clone())
                if row.shape == first.shape:
                    same &= _equal(rows[k::PERIOD], first)
        return same


def _in_turn(number: int, shift: int, base: Tensor) -> Tensor:
    moved = base.roll(-shift, 0)
    return moved.repeat(-(-number // len(base)), *[1] * (base.ndim - 1))[:number]


def _equal(rows: Tensor, row: Tensor) -> bool:
    return bool(((rows == row) | (rows.isnan() & row.isnan())).all())


class _Constant(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Replaces random numbers by ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tensors_in(result):
                tensor.fill_(1)
        return result
