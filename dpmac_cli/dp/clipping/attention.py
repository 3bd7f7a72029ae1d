"""Self-attention that calls its projections as Linear layers, so that their uses are recorded.

The rest is torch's own code and runs once, so dropout draws the same numbers as without recording.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

ATTENTIONS = frozenset({nn.MultiheadAttention})
#: Keyword arguments that a call may have, besides values that do not change attention.
FREE = {"need_weights", "average_attn_weights"}


def attention_weights(module: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of attention's two projections."""
    outer = module.out_proj
    return {
        "in_proj": (module.in_proj_weight, module.in_proj_bias),
        "out_proj": (outer.weight, outer.bias),
    }


def is_known_attention(module: Any) -> bool:
    """Return whether a module is torch's batch-first attention with plain parameters."""
    return (
        module.batch_first
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and {name for name, _ in module.named_parameters()}
        <= {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    )


def is_plain_attention(_: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a call is self-attention without a mask."""
    plain = all(v is None or v is False for name, v in named.items() if name not in FREE)
    return plain and len(inputs) == 3 and len({*map(id, inputs)}) == 1 and inputs[0].ndim == 3


def attend(
    module: Any, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the result of ``nn.MultiheadAttention.forward`` for plain self-attention."""
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
