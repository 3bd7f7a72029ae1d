"""Record the inputs and output gradients of layers in a batch, with hooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from dpmac_cli.dp.clipping.batches import Batch, by_row, samples_in
from dpmac_cli.dp.clipping.direct_parameters import (
    Copies,
    PullBack,
    Read,
    edge_of,
    start_graph,
)
from dpmac_cli.dp.clipping.layer_rules import Call, Use
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.projections import calling_projections
from dpmac_cli.dp.clipping.recurrent import RECURRENT
from dpmac_cli.dp.losses import Loss, plain
from dpmac_cli.errors import ModelError


@dataclass(frozen=True)
class _Record:
    """One use of a layer: its inputs, their version counters, and the edge of its output."""

    call: Call
    inputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    edge: GradientEdge
    pull_back: PullBack = Tensor.detach  # map of a gradient w.r.t. copies
    user: Layer | None = None  # the layer that was called, or stands for a product
    swapped: bool = False  # whether inputs and output gradients are exchanged

    def use(self, delta: Tensor) -> Use:
        """Return the use with its output gradients."""
        if not self.swapped:
            return Use(self.inputs, delta, self.call, self.user)
        [rows] = self.inputs
        return Use((delta,), rows, self.call, self.user)


def record_uses(
    model: nn.Module,
    layers: list[Layer],
    x: Batch,
    y: Batch,
    views: int = 1,
    loss: Loss = plain,
    running: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Tensor, list[list[Use]]]:
    """Run a model on a chunk; return losses, shape (samples,), and the uses of each layer.

    Args:
        model: maps a batch to outputs, one row per sample. It must not mix samples.
        layers: :func:`~dpmac_cli.dp.clipping.layers.find_layers` of the model.
        x: inputs: tensors of shape (samples, ...), or (samples, views, ...) if there are several.
        y: one label per input: tensors of shape (samples, ...) or (samples, views, ...).
        views: number of inputs per sample, such as augmented views; public. The loss of a sample is
            the mean over them.
        loss: one loss per sample, independent across samples. Calls of layers in it are not
            recorded.
        running: context in which the model's forward and backward passes run.

    Raises ModelError if a layer was not used, or not row by row, or its input was changed in place.
    """
    rows, labels = by_row(x, views), by_row(y, views)
    samples = samples_in(rows)
    hooked: list[list[_Record]] = [[] for _ in layers]
    hooks = list(_recorded_by_hooks(layers, hooked))
    idle = _parameters(layer for layer in layers if layer.idle)
    copies = copies_of(layers, samples)
    calls = [(layer.name, layer.module, layer.composite) for layer in layers]
    try:
        with torch.enable_grad(), _with_gradients(idle):
            with calling_projections(calls), running(), copies or nullcontext():
                outputs = model(rows)
            # Ignore layers that the loss calls, or torch.utils.checkpoint in the backward pass.
            recorded = [
                _of_copies(layer, copies) if copies and layer.gradients == "copies" else records[:]
                for layer, records in zip(layers, hooked, strict=True)
            ]
            by_view = loss(outputs, labels)
            losses = by_view.view(-1, views).mean(1)
            total = losses.sum()
            edges = [record.edge for records in recorded for record in records]
            found: Sequence[Tensor | None] = [None] * (len(edges) + len(idle))
            if (edges or idle) and total.requires_grad:
                with calling_projections(calls), running():
                    of: list[Any] = [*edges, *idle]
                    found = torch.autograd.grad(total, of, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return losses, _all_uses(layers, recorded, found, losses, samples)


def copies_of(layers: Sequence[Layer], samples: int) -> Copies | None:
    """Return what copies the parameters of layers that are not called, None if there are none."""
    direct = [layer for layer in layers if layer.gradients == "copies"]
    rows = {id(p): layer.rows for layer in direct for p in layer.parameters.values()}
    return Copies(_parameters(direct), samples, rows) if direct else None


def _all_uses(
    layers: list[Layer],
    recorded: Sequence[list[_Record]],
    found: Sequence[Tensor | None],
    losses: Tensor,
    samples: int,
) -> list[list[Use]]:
    """Return the uses of each layer, given the gradients of all records, then of idle layers."""
    records = sum(map(len, recorded))
    if any(gradient is not None for gradient in found[records:]):
        raise ModelError(_AWAKE.format(", ".join(layer.name for layer in layers if layer.idle)))
    deltas = iter(found)
    by_layer = [[(record, next(deltas)) for record in records] for records in recorded]
    return [
        _without_effect(layer, losses, samples) if layer.idle else _checked_uses(layer, of, samples)
        for layer, of in zip(layers, by_layer, strict=True)
    ]


_AWAKE = (
    "One of the parameters {} has an effect in this step, but had none during validation, so its "
    "gradient would be missing. Use it in every step, or freeze it with requires_grad_(False)."
)


def _parameters(layers: Iterable[Layer]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters.values()]


@contextmanager
def _with_gradients(idle: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let autograd see whether parameters without an effect during validation have one now."""
    before = [p.requires_grad for p in idle]
    try:
        for p in idle:
            p.requires_grad_(True)
        yield
    finally:
        for p, required in zip(idle, before, strict=True):
            p.requires_grad_(required)


def _without_effect(layer: Layer, losses: Tensor, rows: int) -> list[Use]:
    """Return one use with gradients of zero."""
    size = layer.stop - layer.start
    return [Use((), losses.detach().new_zeros(()).expand(rows, size))]


def _of_copies(layer: Layer, copies: Copies) -> list[_Record]:
    """Return the uses of a parameter with one copy per row."""
    [parameter] = map(id, layer.parameters.values())
    if parameter in copies.refused:
        raise ModelError(
            f"The parameter {layer.name} was used differently in this step than during validation, "
            "where it was only broadcast over samples, so its gradient would be incomplete. Use it "
            f"in the same way in every step, such as x + self.{layer.name}."
        )
    return [_of_read(layer, read) for read in copies.by_parameter[parameter]]


def _of_read(layer: Layer, read: Read) -> _Record:
    """Return the record of one use of a parameter, by copies or in a product."""
    if read.rows is None or read.layer is None:
        return _Record(Call(), (), (), read.edge, read.pull_back)
    user = Layer(layer.name, read.layer, {"weight": next(iter(layer.parameters.values()))})
    return _Record(
        Call(), (read.rows,), (read.version,), read.edge, user=user, swapped=read.swapped
    )


def _recorded_by_hooks(
    layers: Sequence[Layer], hooked: Sequence[list[_Record]]
) -> Iterator[RemovableHandle]:
    """Record calls of layers from now on; yield the handles of the hooks."""
    for layer, records in zip(layers, hooked, strict=True):
        for user in () if layer.direct else layer.users:
            hook = _recording(user, layer, records)
            # Before the hooks of the program, which may change the output.
            yield user.module.register_forward_hook(hook, prepend=True, with_kwargs=True)


def _recording(called: Layer, layer: Layer, records: list[_Record]) -> Callable[..., Any]:
    """Return a forward hook that records uses of a layer and starts the graph at its outputs."""
    name, user = called.name, called if layer.tied else None

    def record(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        several = type(output) is tuple
        outputs = list(output) if several else [output]
        others = [x for x in (*inputs, *named.values()) if not isinstance(x, Tensor)]
        tensors = tuple(x for x in inputs if isinstance(x, Tensor))
        odd = [key for key, value in named.items() if isinstance(value, Tensor)]
        if odd or not tensors or not all(isinstance(x, int | float | str | None) for x in others):
            raise ModelError(
                f"The layer {name} must be called with positional tensors with one row per sample, "
                f"and plain values; it got {', '.join(odd) or 'others'}. {_by_position(called)}"
            )
        kind, rows = type(called.module), len(tensors[0]) if tensors[0].ndim else 0
        started = [_start(name, kind, output, several, rows) for output in outputs]
        if several:  # one may be computed from another: views distinguish their later uses
            started = [o if o is None else o.view_as(o) for o in started]
        positional = tuple(Tensor if isinstance(x, Tensor) else x for x in inputs)
        read = tuple(x.detach() for x in tensors)
        versions = tuple(x._version for x in read)
        for number, start in enumerate(started):
            if start is not None and start.requires_grad:
                call = Call(positional, named, number if several else None)
                records.append(_Record(call, read, versions, edge_of(start), user=user))
        return tuple(started) if several else started[0]

    return record


def _by_position(called: Layer) -> str:
    """Return how to give a layer tensors only."""
    if type(called.module) in RECURRENT:
        return "Call it with a tensor, samples first, instead of a packed sequence or named states."
    return (
        "Store a mask as a buffer, self.register_buffer('mask', mask), in a wrapper module that "
        "calls this layer."
    )


#: How to call layers that return other tensors than one with a row per sample.
_REMEDY = {
    **dict.fromkeys(
        RECURRENT,
        "Call it with tensors, samples first (batch_first=True), instead of packed sequences.",
    ),
    nn.EmbeddingBag: "Call it with one row of tokens per sample, without offsets.",
}


def _start(name: str, kind: type[nn.Module], output: Any, several: bool, samples: int) -> Any:
    """Return a layer's output with a node in the graph. Errors contain no (private) sizes."""
    if output is None and several:
        return None
    if not isinstance(output, Tensor):
        raise ModelError(
            f"The layer {name} must return one tensor or a tuple of tensors, not a "
            f"{type(output).__name__}{' in a tuple' if several else ''}. "
            f"{_REMEDY.get(kind, 'Return a tensor, or tuple(tensors), from its forward.')}"
        )
    if not output.is_floating_point():
        return output
    if output.ndim == 0 or len(output) != samples:
        raise ModelError(
            f"The layer {name} returns a tensor that does not have as many rows as its input, one "
            f"per sample. {_REMEDY.get(kind, 'Keep samples in the first dimension.')}"
        )
    return start_graph(output, view=kind is nn.Linear and output.ndim > 2)


def _checked_uses(
    layer: Layer, found: Sequence[tuple[_Record, Tensor | None]], batch: int
) -> list[Use]:
    """Return a layer's uses that reach the loss, after checking that their rows match the batch."""
    if any(r.versions != tuple(x._version for x in r.inputs) for r, _ in found):
        raise ModelError(
            f"The input of layer {layer.name} was changed in place after the layer read it. "
            "Use the out-of-place operation (x = x + y instead of x += y)."
        )
    uses = [r.use(r.pull_back(delta)) for r, delta in found if delta is not None]
    if not uses:
        raise ModelError(
            f"The layer {layer.name} has trainable parameters, but no call of it affects the "
            "model's output. Using its weights without calling it is not supported, because that "
            "cannot be clipped. Call it, remove it, or freeze it with requires_grad_(False)."
        )
    rows = {len(x) if x.ndim else 0 for use in uses for x in (*use.inputs, use.delta)}
    if rows != {batch * layer.rows}:
        name = layer.name if layer.composite is None else layer.name.rpartition(".")[0]
        given = [x for use in uses for x in (*use.inputs, use.delta)]
        raise ModelError(
            f"The layer {name} does not have one row per sample: its first dimension must "
            f"be the samples. {_why_other_rows(name, given, batch)}"
        )
    return uses


def _why_other_rows(name: str, given: Sequence[Tensor], batch: int) -> str:
    """Return why the rows of tensors may not be samples, and what to do."""
    odd = next((x for x in given if x.ndim == 0 or len(x) != batch), None)
    if odd is None:
        return "It had several rows per sample during validation. Call it alike in every step."
    if odd.ndim > 1 and odd.shape[1] == batch:
        return (
            "It is the second one here. For attention and recurrent layers, batch_first=True; for "
            f"others, self.{name}(x.transpose(0, 1))."
        )
    if odd.ndim > 1 and len(odd) % batch == 0:
        return (
            "Others are flattened into it here. Keep them after it: "
            f"self.{name}(x), not self.{name}(x.flatten(0, 1))."
        )
    return (
        "Its input here is the same for all samples, such as torch.arange(length). Repeat it for "
        "each: positions.expand(x.shape[0], -1)."
    )
