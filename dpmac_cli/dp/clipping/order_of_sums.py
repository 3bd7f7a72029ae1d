"""Numbers that show the order of a sum, and operations that round the ends of tensors otherwise.

Where terms are added up in another order, numbers of very different sizes nearly always
give another sum, whatever the weights of a network are. The idea is that of FPRev (arXiv
2411.00442), with random numbers.

Both are modes of torch: in the block below ``with``, they see every operation of a network. They
are used in trials alone, when a network is validated, and never on records.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.dp.clipping.eager_mode import EagerMode

#: Operations that add up nothing: they copy, choose or fill.
EXACT = frozenset(
    [
        "clone",
        "copy",
        "_to_copy",
        "detach",
        "alias",
        "lift_fresh",
        "cat",
        "stack",
        "repeat",
        "roll",
        "flip",
        "tril",
        "triu",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "constant_pad_nd",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
        "index",
        "index_select",
        "gather",
        "embedding",
        "where",
        "sort",
        "topk",
        "max",
        "min",
        "amax",
        "amin",
    ]
)
#: Elementwise operations on numbers whose result is the nearest number or one of theirs, however
#: they are computed.
NEAREST = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "abs",
        "sqrt",
        "relu",
        "threshold_backward",
        "clamp",
        "clamp_min",
        "clamp_max",
        "hardtanh",
        "maximum",
        "minimum",
        "where",
        "sign",
        "sgn",
        "leaky_relu",
        "leaky_relu_backward",
        "hardtanh_backward",
        "masked_fill",
        "copy",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isnan",
        "isfinite",
        "isinf",
        "floor",
        "ceil",
        "round",
        "trunc",
        "_to_copy",
        "clone",
        "nan_to_num",
        "fill",
        "bernoulli",
        "mse_loss",
    ]
)
#: Number of elements that the elementwise loops of torch take at a time. It computes the rest by
#: other code, which rounds sigmoid, SiLU, ELU, softplus and others otherwise.
BLOCK = 32
#: Elementwise operations that are not tagged as such, and round the rest otherwise.
UNTAGGED = frozenset({"glu", "binary_cross_entropy"})
#: Number of elements from which several threads may share an elementwise operation. Each computes
#: the rest of its own share by the other code, in the middle of the tensor.
SHARED = 1 << 14
#: Number of random elements with which an operation shows whether the other code rounds otherwise.
SHOWN = 2048
#: By dtype: integers as wide, bits of the mantissa and of the exponent, its bias, and multipliers
#: of a hash.
FORMATS = {
    torch.float32: (torch.int32, 23, 8, 127, -1640531535, -2048144789),
    torch.float64: (torch.int64, 52, 11, 1023, -7046029254386353131, -4417276706812531889),
}
#: Number of different exponents of numbers that show an order: from 2^-12 to 2^12.
EXPONENTS = 25


class OrderOfSums(EagerMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Mode that computes sums of other numbers, which show in which order they are added up.

    Each number is replaced as a function of its bits alone, so equal rows stay equal, and results
    that differ in a last bit become different numbers. Memory layouts stay as they are. Elementwise
    operations get numbers from -2 to 2.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _adds_up(func):
            return func(*args, **kwargs)
        try:
            crafted, named = tree_map(_showing_order, (args, kwargs))
            result = func(*crafted, **named)
        except RuntimeError:  # it takes no such numbers
            return func(*args, **kwargs)
        return tree_map(_ordinary, result)


class Elementwise(EagerMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Mode that notices elementwise operations which may round a tensor's last elements otherwise.

    Attributes:
        ends: whether there was one on a number of elements that is no multiple of :data:`BLOCK`.
        largest: largest number of elements of one in a forward pass that does so on this machine;
            0 without any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.largest = False, 0
        self._known = dict[Any, bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__.rstrip("_")
        nearest = name in NEAREST or (name == "pow" and args[1] in (1, 2))
        rounds = torch.Tag.pointwise in func.tags and not nearest
        if not rounds and name not in UNTAGGED:
            return result
        sizes = [t.numel() for t in tensors_in(result) if t.is_floating_point()]
        self.ends |= any(size % BLOCK for size in sizes)
        largest = max(sizes, default=0)
        backward = name.endswith("_backward")  # which has no kinks
        if not backward and largest > self.largest and self._rounds_rest(func, args, kwargs):
            self.largest = largest
        return result

    def _rounds_rest(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the rest is rounded otherwise, which an operation shows once."""
        if func not in self._known:
            untagged = torch.Tag.pointwise not in func.tags
            self._known[func] = untagged or _rounds_rest_otherwise(func, args, kwargs)
        return self._known[func]


def shares_of(elements: int) -> int:
    """Return a number that all numbers of threads divide which may share an elementwise operation.

    It is the least common multiple of 1 to torch's number of threads. Where the elements are a
    multiple of it times :data:`BLOCK`, no thread has a rest.

    Args:
        elements: number of elements of the operation. Below :data:`SHARED`, one thread computes
            them, and the result is 1.

    Example:
        >>> shares_of(100)
        1
    """
    if elements < SHARED:
        return 1
    numbers_of_threads = range(1, torch.get_num_threads() + 1)
    return math.lcm(*numbers_of_threads)


def _rounds_rest_otherwise(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an elementwise operation rounds numbers otherwise if they are few."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or value.numel() == 0:
            return value
        if not value.is_floating_point():
            return value.reshape(-1)[:1].expand(SHOWN)
        return torch.randn(SHOWN, generator=generator).to(value)

    leaves, form = tree_flatten((args, kwargs))
    arguments = [drawn(leaf) for leaf in leaves]

    def computed(some: slice) -> Tensor:
        parts = []
        for argument in arguments:
            is_row = isinstance(argument, Tensor) and argument.ndim
            parts.append(argument[some].clone() if is_row else argument)
        few, named = tree_unflatten(parts, form)
        result: Tensor = func(*few, **named)
        return result.nan_to_num()

    size = BLOCK // 2
    try:
        pieces = [computed(slice(begin, begin + size)) for begin in range(0, SHOWN, size)]
        return not torch.equal(computed(slice(SHOWN)), torch.cat(pieces))
    except RuntimeError:  # it takes no such numbers
        return True


def _adds_up(func: Any) -> bool:
    """Return whether an operation may add up numbers."""
    if func.is_view or func._schema.is_mutable:
        return False
    if torch.Tag.pointwise in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func.overloadpacket.__name__ not in EXACT


def _showing_order(value: Any) -> Any:
    """Return a tensor of numbers from 2^-12 to 2^12 of either sign, in memory of the same form."""
    if not isinstance(value, Tensor) or value.dtype not in FORMATS or value.numel() == 0:
        return value
    span = 1  # numbers from the first to the last in memory
    for size, stride in zip(value.shape, value.stride(), strict=True):
        span += (size - 1) * stride
    begin = value.storage_offset() % 16  # alignment to 64 bytes
    memory = value.new_zeros(begin + span)
    in_memory = value.as_strided((span,), (1,))
    memory[begin:] = _hashed(in_memory, EXPONENTS, below=EXPONENTS // 2)
    return memory.as_strided(value.shape, value.stride(), begin)


def _ordinary(value: Any) -> Any:
    """Return a tensor of numbers from 1/2 to 2 of either sign."""
    if not isinstance(value, Tensor) or value.dtype not in FORMATS:
        return value
    return _hashed(value, exponents=2, below=1)


def _hashed(numbers: Tensor, exponents: int, below: int) -> Tensor:
    """Return pseudorandom numbers, each a function of the bits of one of the numbers.

    Args:
        numbers: tensor of any shape.
        exponents: number of different exponents.
        below: number of negative ones among them.
    """
    integers, mantissa, width, bias, first, second = FORMATS[numbers.dtype]
    bits = numbers.view(integers) * first
    bits.bitwise_xor_(bits >> 15).mul_(second)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))  # the sign stays random
    exponent = (bits >> 7).bitwise_and_(0xFFFF).mul_(exponents).bitwise_right_shift_(16)
    exponent.add_(bias - below).bitwise_left_shift_(mantissa)
    mask = ((1 << width) - 1) << mantissa
    return bits.bitwise_and_(~mask).bitwise_or_(exponent).view(numbers.dtype)
