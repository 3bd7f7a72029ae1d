"""Shadow memory: which samples each number of a forward and backward pass depends on."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dpmac_cli.dp.clipping.direct import tensors_in

#: Samples that are told apart, a plane each.
SAMPLES = 4


def names(text: str) -> set[str]:
    """Return the words of a text."""
    return set(text.split())


# How the outputs of an operation depend on its inputs. In-place forms belong to the same list, and
# what torch itself tags as pointwise need not be listed.
POINTWISE = names("""
    _to_copy copy fill zero masked_fill clamp_min clamp_max hardswish hardsigmoid mish_backward
    hardtanh_backward leaky_relu_backward elu_backward softplus_backward hardswish_backward
    hardsigmoid_backward _prelu_kernel _prelu_kernel_backward log_sigmoid_forward
    log_sigmoid_backward native_dropout native_dropout_backward bernoulli uniform
    normal_functional
""")
#: On all inputs along ``dim`` or the last dimensions of ``normalized_shape``; else on all of them.
ALONG = names("""
    sum mean amax amin max min var var_mean std std_mean prod argmax argmin any all logsumexp
    linalg_vector_norm norm aminmax cumsum cumprod sort topk median _safe_softmax glu glu_backward
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    native_layer_norm native_layer_norm_backward
""")
#: Row by row on the inputs of these names; the other inputs must come from no sample.
BY_ROW = names("""
    convolution convolution_backward native_group_norm native_group_norm_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward im2col col2im upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward reflection_pad2d reflection_pad2d_backward
    nll_loss_forward nll_loss_backward pixel_shuffle pixel_unshuffle
""")
ROWS = names("input self grad_output grad_out mean rstd indices target")
#: On a row of the first factor and a column of the second, which are the last two inputs.
PRODUCTS = names("mm bmm addmm baddbmm")
#: On the numbers that are moved there, by places that must come from no sample.
MOVING = names("""
    cat stack index_select gather constant_pad_nd repeat flip roll index select_backward
    slice_backward select_scatter slice_scatter tril triu diagonal_backward
""")
PLACES = {"index", "indices"}
FACTORIES = names("""
    zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full
    new_empty_strided empty_strided rand randn rand_like randn_like
""")


class UnprovenError(Exception):
    """Independence across samples could not be proven; the message says why."""


class Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Follows which samples each number was computed from, while it is entered.

    Each storage has a shadow with a plane per sample and a place per element, so that views and
    assignments to parts of a tensor need no rule.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # a storage that was freed could be taken for another

    def mark(self, x: Tensor) -> None:
        """Have row i of x stand for sample i; there are :data:`SAMPLES` rows."""
        own = torch.eye(SAMPLES, dtype=torch.bool).view(SAMPLES, *[1] * (x.ndim - 1), SAMPLES)
        self._of(x).copy_(own.expand(*x.shape, SAMPLES))

    def check_rows(self, what: str, tensor: Tensor) -> None:
        """Raise UnprovenError, naming ``what`` it is, if row i depends on others than sample i."""
        rows = _by_row(self._of(tensor))
        if rows.shape != (SAMPLES, SAMPLES) or bool((rows & ~torch.eye(SAMPLES).bool()).any()):
            raise UnprovenError(f"In {what} a row depends on more than its own sample.")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note from which samples its outputs were computed."""
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        told = {
            name
            for name, value in named.items()
            if any(bool(self._of(tensor).any()) for tensor in tensors_in(value))
        }
        result = func(*args, **(kwargs or {}))
        if told:
            self._note(func, named, told, result)
        return result

    def _of(self, tensor: Tensor) -> Tensor:
        """Return a view of the planes of a tensor, bool, shape (*shape, SAMPLES)."""
        size, place = tensor.untyped_storage().nbytes() // tensor.itemsize, _place(tensor)
        shadow = self._shadows.get(place)
        if shadow is None or place == 0:
            shadow = torch.zeros(SAMPLES, size, dtype=torch.bool)
            self._shadows[place] = shadow
            self._kept.append(tensor)
        if shadow.shape[1] != size:
            raise UnprovenError("It looks at the bytes of numbers.")
        return shadow.as_strided(
            (*tensor.shape, SAMPLES), (*tensor.stride(), size), tensor.storage_offset()
        )

    def _note(self, func: Any, named: Mapping[str, Any], told: set[str], result: Any) -> None:
        """Set the planes of outputs, given the names of the inputs that hold samples."""
        name, outputs = name_of(func), tensors_in(result)
        if not outputs:
            raise UnprovenError(f"{name} reads a number that was computed from samples.")
        read = {_place(tensor) for tensor in tensors_in(list(named.values()))}
        view = not func._schema.is_mutable and {_place(out) for out in outputs} <= read
        if view or torch.Tag.inplace_view in func.tags or name in FACTORIES:
            return
        given = [self._of(t) for key in sorted(told) for t in tensors_in(named[key])]
        if torch.Tag.pointwise in func.tags or name in POINTWISE:
            found = [_union(given)] * len(outputs)
        elif name in ALONG:
            found = _along(given, dims_of(func, named), outputs)
        elif told <= ROWS and (name in BY_ROW or named.get("training") is False):
            found = _row_by_row(given, outputs)
        elif name in PRODUCTS:
            *added, left, right = (self._of(t) for t in tensors_in(list(named.values())))
            reached = [left.any(-2, keepdim=True), right.any(-3, keepdim=True), *added]
            found = [_union(reached)]
        elif name in MOVING and not told & PLACES:
            found = self._moved(func, named)
        elif name == "embedding" and told == {"indices"}:
            found = [given[0].unsqueeze(-2)]
        else:
            raise UnprovenError(f"It is not known how {name} treats samples.")
        for out, planes in zip(outputs, found, strict=True):
            self._of(out).copy_(planes.expand(*out.shape, SAMPLES))

    def _moved(self, func: Any, named: Mapping[str, Any]) -> list[Tensor]:
        """Return the planes of the outputs of an operation that moves numbers."""
        found = []
        for sample in range(SAMPLES):

            def shadow(value: Any, sample: int = sample) -> Any:
                return self._of(value)[..., sample].double() if isinstance(value, Tensor) else value

            given = {n: v if n in PLACES else tree_map(shadow, v) for n, v in named.items()}
            given.pop("value", None)  # what is put around them
            found.append(tensors_in(func(**given)))
        return [torch.stack(planes, -1) > 0 for planes in zip(*found, strict=True)]


def name_of(func: Any) -> str:
    """Return the name of an operation, the same for its in-place form."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet)).removesuffix("_")


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def dims_of(func: Any, named: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that an operation works along; none for all of them."""
    if "normalized_shape" in named:
        return list(range(-len(named["normalized_shape"]), 0))
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    dim = named.get("dim", named.get("dims", defaults.get("dim")))
    return [dim] if isinstance(dim, int) else list(dim or ())


def _union(given: Sequence[Tensor]) -> Tensor:
    return reduce(torch.logical_or, given, torch.tensor(False))  # a copy also of a single one


def _along(given: Sequence[Tensor], dims: list[int], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return planes of outputs that depend on all inputs along some dimensions."""
    whole = max(given, key=Tensor.numel)[..., 0]
    places = [dim % whole.ndim for dim in dims or range(whole.ndim)]
    kept = [planes.any(places, keepdim=True) if places else planes for planes in given]
    joined = _union(kept)
    return [joined if out.ndim == whole.ndim else joined.squeeze(places) for out in outputs]


def _by_row(planes: Tensor) -> Tensor:
    """Return from which samples each row was computed, shape (rows, SAMPLES)."""
    return planes.flatten(1, -2).any(1) if planes.ndim > 2 else planes


def _row_by_row(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return planes of outputs whose rows depend on the same rows of inputs."""
    if min(planes.ndim for planes in given) < 2 or len({len(planes) for planes in given}) > 1:
        raise UnprovenError("Its rows are not those of the samples.")
    rows = torch.stack([_by_row(planes) for planes in given]).any(0)
    return [
        rows.view(len(rows), *[1] * (out.ndim - 1), SAMPLES)
        if out.ndim and len(out) == len(rows)
        else torch.zeros(*out.shape, SAMPLES, dtype=torch.bool)
        for out in outputs
    ]
