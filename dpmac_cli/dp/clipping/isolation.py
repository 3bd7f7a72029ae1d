"""Per-sample gradients of a network that runs on each sample separately, by vmap or in a loop.

No operation of the network sees two samples, so none can mix them. Every run uses a fresh copy of
the module tree, so nothing is carried over in parameters, buffers, other attributes or closures.
State in globals or class attributes is not copied and cannot be isolated.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpmac_cli.dp.clipping.batches import Batch, Structure, by_row, map_rows, samples_in
from dpmac_cli.dp.clipping.deep_copy import duplicate
from dpmac_cli.dp.clipping.layer_rules import LAYER_RULES, Use, instantiate
from dpmac_cli.dp.clipping.layers import Layer, split_by_module
from dpmac_cli.dp.losses import Loss, plain
from dpmac_cli.dp.vmap_rules import (
    OWN_RULE,
    OwnOperators,
    OwnRuleError,
    without_own_rules,
)
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.layers import forked, seed_all
from dpmac_cli.torch_errors import code_of_network, out_of_memory

#: Number of instantiated gradient entries per chunk: 16 MiB of float32. On a CPU, 2^20 and 2^24
#: take up to 1.4 times as long.
WRITTEN_OUT = 1 << 22
#: Structure of labels that are classes.
CLASS = Structure(torch.zeros(1, dtype=torch.long), keep=True)
#: What torch says of a function that vmap cannot run.
NEEDS_A_RULE = ("generate_vmap_rule", "setup_context")
NO_RULE = (
    "The network has a torch.autograd.Function without a rule for vmap, so it runs on one record "
    "after the other, which can be hundreds of times slower. If its forward and backward consist "
    "of torch operations, define setup_context in it and set generate_vmap_rule = True."
)
#: Samples of a batch on which the price of isolation is measured; a loop is run on some of them.
MEASURED, LOOPED = 32, 2
PRICE = (
    "Each record alone takes about {:.2g} times as long as batches in plain training, measured on "
    "{} made-up records{}."
)


class Isolated:
    """Per-sample losses and gradients of a network that sees one sample at a time.

    Weights that are used outside their layer, or shared between layers, get their full gradient.
    vmap is tried once, on random data; if it cannot run the network, a loop is used.

    Args:
        model: maps (1, ...), or the views of one sample (views, ...), to logits (rows, classes).
            Its parameters must not be flattened yet.
        layers: :func:`~dpmac_cli.dp.clipping.layers.split_by_module` of the model.
        inputs: structure of a sample: (...), or (views, ...) if there are several views.
        views: number of inputs per sample, public. The network may mix them with each other.
        loss: one loss per row, independent across rows.
        labels: structure of the labels of a sample.

    Raises ModelError if the network fails on a random sample.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        inputs: Structure,
        views: int = 1,
        loss: Loss = plain,
        labels: Structure = CLASS,
    ) -> None:
        self._loss_of = loss
        self._model, self._layers, self._views = model, layers, views
        self._inputs, self._labels = inputs, labels
        self._names = {  # names of each layer's parameters in the model
            layer.name: [f"{layer.name}.{key}".strip(".") for key in layer.parameters]
            for layer in layers
        }
        # Layers whose uses are recorded, so that their forms can be chosen. Gradients of the others
        # are instantiated by autograd.
        self.recorded: set[str] = set()
        self._calls: list[tuple[str, torch.Size, torch.Size]] = []  # name, input's, output's shape
        # Seeds of the next chunk's samples, if they are looped: without them, seeds go by position.
        self.seeds: list[int] = []
        self.notes: tuple[str, ...] = ()  # how to make the network run faster
        with forked(), torch.no_grad():
            seed_all(0)
            x, y = inputs.made_up(2, double=True), labels.made_up(2, double=True)
            with code_of_network(x):
                probe = duplicate(model).double()
                for p in probe.parameters():  # zeros would hide uses of other weights
                    p.add_(torch.randn_like(p), alpha=0.1)
                with OwnOperators() as operators:
                    self._check_repeatable(probe, x, y)
            if operators.found:
                self.notes = (OWN_RULE.format(operators.found),)
            # False: chunks run in a loop
            self.vmapped = not operators.found and self._try_vmap(probe, x, y)
        if not self.vmapped:
            self.run_in_a_loop()

    @property
    def most(self) -> int:
        """Return the largest number of samples in a chunk, which is public."""
        size = sum(la.stop - la.start for la in self._layers if la.name not in self.recorded)
        return max(1, WRITTEN_OUT // max(1, size))

    def run_in_a_loop(self) -> int:
        """Run samples one after the other from now on; return :attr:`most`."""
        self.vmapped, self.recorded = False, set()
        return self.most

    def price(self) -> str | None:
        """Measure how much longer gradients take than in plain training; return it in a sentence.

        Return None if the network cannot run on a batch.
        """
        rows = min(self.most, MEASURED)
        few = rows if self.vmapped else min(rows, LOOPED)
        x, y = self._inputs.made_up(rows), self._labels.made_up(rows)
        some_x, some_y = (map_rows(lambda t: t[:few], batch) for batch in (x, y))
        plain_model = duplicate(self._model).requires_grad_(True)
        try:
            with forked(), code_of_network(x):
                batch = _seconds(lambda: self._plainly(plain_model, x, y))
                alone = _seconds(lambda: self(some_x, some_y)) * rows / few
        except Exception as failure:
            if out_of_memory(failure):
                raise
            return None
        how = "" if self.vmapped else ", one after the other"
        return PRICE.format(max(1.0, alone / batch), rows, how)

    def _plainly(self, model: nn.Module, x: Batch, y: Batch) -> None:
        """Compute the gradient of a batch, as plain training does."""
        rows, labels = by_row(x, self._views), by_row(y, self._views)
        with torch.enable_grad():
            loss = self._loss_of(model(rows), labels).sum()
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        if loss.is_cuda:
            torch.cuda.synchronize()

    def __call__(self, x: Batch, y: Batch) -> tuple[Tensor, list[list[Use] | Tensor]]:
        """Return the losses of a chunk, and the uses of each recorded layer or its gradients."""
        seeds, self.seeds = self.seeds, []
        if not self.vmapped:
            losses, g = self._looped(self._model, x, y, seeds)
            return losses, [g[:, layer.start : layer.stop] for layer in self._layers]
        loose = [name for name in self._names if name not in self.recorded]
        losses, uses, written = self._vmapped(self._model, x, y, loose)
        return losses, [uses[name] if name in uses else written[name] for name in self._names]

    def _like(self, model: nn.Module) -> Tensor:
        """Return a trained parameter, whose dtype and device are those of the gradients."""
        first, *_ = chain(*self._names.values())
        return model.get_parameter(first)

    def _loss(self, network: Callable[[Batch], Any], x: Batch, y: Batch) -> Tensor:
        """Return the loss of one sample, the mean over its views."""
        alone = partial(torch.unsqueeze, dim=0)
        rows, labels = (t if self._views > 1 else map_rows(alone, t) for t in (x, y))
        return self._loss_of(network(rows), labels).mean()

    def _check_repeatable(self, probe: nn.Module, x: Batch, y: Batch) -> None:
        """Reject random draws that seeds do not determine, such as those of another generator.

        They could depend on the samples before, and a resumed step could not repeat them.
        """
        seeds = [1, 2]
        one, other = (self._looped(probe, x, y, seeds) for _ in range(2))
        if not all(map(partial(torch.allclose, equal_nan=True), one, other)):
            raise ModelError(
                "The network computes different gradients for the same sample, although all "
                "random number generators were seeded alike. Draw random numbers with the global "
                "generators of torch, NumPy or Python (torch.rand, np.random.rand, "
                "random.random), and keep no state in globals or closures."
            )

    def _looped(
        self, model: nn.Module, x: Batch, y: Batch, seeds: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return losses and gradients, (samples, d), with a new copy and seed for each sample."""
        losses = []
        samples = samples_in(x)
        rows = self._like(model).new_empty(samples, self._layers[-1].stop)
        seeds = seeds or torch.randint(2**62, (samples,)).tolist()
        with forked(), torch.enable_grad():
            for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
                x_i, y_i = (map_rows(partial(_row, i), batch) for batch in (x, y))
                seed_all(seed)
                alone = duplicate(model).requires_grad_(False)
                named = dict(alone.named_parameters())
                trained = [named[n].requires_grad_() for n in chain(*self._names.values())]
                loss = self._loss(alone, x_i, y_i)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                g = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
                torch.cat([part.to_dense().flatten() for part in g], out=row)
        return torch.stack(losses), rows

    def _vmapped(
        self, model: nn.Module, x: Batch, y: Batch, loose: Collection[str]
    ) -> tuple[Tensor, dict[str, list[Use]], dict[str, Tensor]]:
        """Return losses, the recorded layers' uses, and the others' gradients, (samples, d_layer).

        The gradient w.r.t. a layer's output is the one w.r.t. a tap, a zero that is added to it.
        """
        alone = duplicate(model).requires_grad_(False)
        like = self._like(model)
        taps = [like.new_zeros(out) for name, _, out in self._calls if name in self.recorded]
        calls: list[tuple[str, torch.Size, torch.Size]] = []
        inputs: list[Tensor] = []
        left: list[Tensor] = []

        def record(name: str, _: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return out
            calls.append((name, given[0].shape, out.shape))
            inputs.append(given[0])
            return out + left.pop(0) if left else out

        def loss_of(
            taps: Sequence[Tensor], trained: dict[str, Tensor], x: Batch, y: Batch
        ) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
            calls.clear()
            inputs.clear()
            left[:] = taps
            loss = self._loss(lambda rows: functional_call(alone, trained, (rows,)), x, y)
            if len(calls) != len(taps or calls):
                raise ModelError("Some samples skip a layer. Use torch.where(condition, a, b).")
            return loss, (loss, inputs)

        for name in self.recorded:
            alone.get_submodule(name).register_forward_hook(partial(record, name))
        named = dict(alone.named_parameters())
        trained = {n: named[n] for layer in loose for n in self._names[layer]}
        one: Any = grad(loss_of, argnums=(0, 1), has_aux=True)
        mapped = vmap(one, in_dims=(None, None, 0, 0), randomness="different")
        # The other backends have no batching rule.
        with sdpa_kernel(SDPBackend.MATH), without_own_rules():
            (deltas, g), (losses, read) = mapped(taps, trained, x, y)
        self._calls = calls  # the same in every run
        uses: dict[str, list[Use]] = {name: [] for name in self.recorded}
        for (name, *_), a, delta in zip(calls, read, deltas):  # noqa: B905  (no taps at first)
            rows, by_rows = (t.flatten(0, 1).contiguous() for t in (a, delta))
            uses[name].append(Use((rows,), by_rows))
        written = {n: torch.cat([g[k].flatten(1) for k in self._names[n]], 1) for n in loose}
        return losses, uses, written

    def _try_vmap(self, probe: nn.Module, x: Batch, y: Batch) -> bool:
        """Find the layers to record, and return whether vmap agrees with the loop.

        A layer is recorded if it has a rule and no hooks, its rows are a sample's views, and none
        of its weights is used elsewhere, so autograd gives the same gradient.
        """
        layers = [
            layer
            for layer in split_by_module(probe)
            if type(layer.module) in LAYER_RULES
            and not (layer.module._forward_hooks or layer.module._forward_pre_hooks)
        ]
        self.recorded = {layer.name for layer in layers}
        try:
            self._vmapped(probe, x, y, self._names)  # without taps, whose shapes it finds
            odd = {n for n, a, out in self._calls if {*a[:1], *out[:1]} != {self._views}}
            self.recorded = {name for name, *_ in self._calls} - odd
            _, uses, written = self._vmapped(probe, x, y, self._names)
            for layer in layers:
                if used := uses.get(layer.name):
                    by_rule = torch.cat([*instantiate(layer, used, self._views)], 1)
                    if not _alike(by_rule, written[layer.name]):
                        self.recorded.remove(layer.name)
            still = duplicate(probe).eval()  # dropout differs from run to run
            losses, _, written = self._vmapped(still, x, y, self._names)
            expected, g = self._looped(still, x, y)
            return _alike(torch.cat([*written.values()], 1), g) and _alike(losses, expected)
        except Exception as failure:
            if out_of_memory(failure):
                raise
            if isinstance(failure, OwnRuleError):
                self.notes = (str(failure),)
            elif any(word in str(failure) for word in NEEDS_A_RULE):
                self.notes = (NO_RULE,)
            return False


def _seconds(call: Callable[[], object]) -> float:
    """Return the shorter time of two calls, the first of which may also prepare others."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def _row(index: int, rows: Tensor) -> Tensor:
    return rows[index].clone()


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return whether numbers are finite and differ only by rounding."""
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))
