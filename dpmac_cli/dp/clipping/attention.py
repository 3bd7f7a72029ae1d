"""Self-attention that calls its projections as Linear layers, so that their uses are recorded.

The rest is torch's own code and runs once, so dropout draws the same numbers as without recording.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

from dpmac_cli.errors import ModelError

#: Keyword arguments that a call may have, besides values that do not change attention.
FREE = {"need_weights", "average_attn_weights"}


def projections(module: Any) -> dict[str, nn.Linear]:
    """Return Linear layers with the parameters of attention's two projections."""
    found = {}
    inner, outer = (module.in_proj_weight, module.in_proj_bias), module.out_proj
    with torch._C.DisableTorchFunction():  # making layers is no operation of the network
        for name, (weight, bias) in (("in_proj", inner), ("out_proj", (outer.weight, outer.bias))):
            found[name] = nn.Linear(weight.shape[1], len(weight), device="meta")
            found[name].weight, found[name].bias = weight, bias
    return found


@contextmanager
def self_attentions(model: nn.Module) -> Iterator[set[int]]:
    """Collect the ids of attention layers whose calls are all plain self-attention."""
    plain, others = set[int](), set[int]()

    def look(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        (plain if _is_plain(inputs, named) else others).add(id(module))

    known = filter(_is_known, model.modules())
    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in known]
    try:
        yield plain
    finally:
        plain -= others
        for hook in hooks:
            hook.remove()


@contextmanager
def calling_projections(calls: Iterable[tuple[str, nn.Module, nn.Module | None]]) -> Iterator[None]:
    """Make attention layers call their projections, given as (name, module, attention layer)."""
    called: dict[nn.Module, dict[str, nn.Module]] = {}
    try:
        for name, linear, attention in calls:
            if attention is not None:
                of, _, which = name.rpartition(".")
                by_name = called.setdefault(attention, dict(projections(attention)))
                by_name[which] = linear
                attention.forward = partial(_self_attention, of, attention, by_name)
        yield
    finally:
        for attention in called:
            del attention.forward


def _is_known(module: Any) -> bool:
    """Return whether a module is torch's batch-first attention with plain parameters."""
    return (
        type(module) is nn.MultiheadAttention
        and "forward" not in vars(module)
        and module.batch_first
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and {name for name, _ in module.named_parameters()}
        <= {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    )


def _is_plain(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a call is self-attention without a mask."""
    plain = all(v is None or v is False for name, v in named.items() if name not in FREE)
    return plain and len(inputs) == 3 and len({*map(id, inputs)}) == 1 and inputs[0].ndim == 3


def _self_attention(
    name: str, module: Any, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the result of ``nn.MultiheadAttention.forward`` for plain self-attention."""
    if not _is_plain(inputs, named):
        raise ModelError(
            f"The layer {name} was called differently in this step than during validation, so its "
            f"gradients would be incomplete. Call it as self.{name}(x, x, x), without a mask."
        )
    x, p = inputs[0], module.dropout if module.training else 0.0
    heads = calls["in_proj"](x).unflatten(2, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    queries, keys, values = heads.unbind(0)
    weights = None
    if named.get("need_weights", True):
        weights = dropout(softmax(queries @ keys.mT / module.head_dim**0.5, -1), p)
        context = weights @ values
        if named.get("average_attn_weights", True):
            weights = weights.mean(1)
    else:
        context = scaled_dot_product_attention(queries, keys, values, dropout_p=p)
    out: Tensor = calls["out_proj"](context.transpose(1, 2).flatten(2))
    return out, weights
