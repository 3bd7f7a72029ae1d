"""Batches: pytrees of tensors with one row per sample in the first dimension.

A batch is a tensor, or any nesting of dicts, lists, tuples and named tuples of tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from dpmac_cli.errors import InputError, raise_errors

#: A pytree of tensors, shape (samples, ...) each.
Batch: TypeAlias = Any
#: How numbers are made up: normally distributed, between 0 and 1, or as in a public example.
NORMAL, SHARES, PUBLIC = "normal", "between 0 and 1", "those of the example"
#: A batch without tensors, such as the labels of a network that returns its own losses.
NOTHING: Batch = ()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument, a result or a batch."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def samples_in(batch: Batch) -> int:
    """Return the number of rows of a batch; 0 if it has no tensor."""
    first = next(iter(tensors_in(batch)), None)
    return 0 if first is None or first.ndim == 0 else len(first)


def map_rows(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with a function applied to every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def by_row(batch: Batch, views: int) -> Batch:
    """Return a batch of shape (samples, views, ...) with one row per view."""
    return batch if views == 1 else map_rows(lambda t: t.flatten(0, 1), batch)


def parts_by_name(batch: Batch) -> dict[str, Any]:
    """Return what a batch consists of by its place, such as "batch['labels']"."""
    return {f"batch{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(batch)[0]}


@dataclass(frozen=True)
class Structure:
    """Structure of a batch, of which batches of made-up rows follow. Not private.

    Attributes:
        template: a batch of at least one row. Of tensors of numbers, only shape, dtype and device
            are used, unless ``numbers`` says otherwise.
        keep: whether integers are those of the template, in turn. Otherwise they alternate between
            1 and 0, which are valid as classes, tokens, and masks of either meaning: every one of
            the first tensor, two or more of the others, so that no mask hides all of a kind.
        numbers: how the numbers of each tensor of numbers are made up, :data:`NORMAL` by default.
        own: whether numbers keep their dtype where float64 is asked for.
    """

    template: Batch
    keep: bool = False
    numbers: tuple[str, ...] = ()
    own: bool = False

    @staticmethod
    def of(batch: Batch) -> "Structure":
        """Return the structure of a private batch, none of whose values are kept."""
        return Structure(map_rows(lambda t: t.new_zeros((1, *t.shape[1:])), batch))

    def made_up(self, samples: int, *, double: bool = False) -> Batch:
        """Return a fixed batch of random rows; with ``double``, numbers are in float64."""
        generator, turns, kinds = torch.Generator().manual_seed(0), count(1), iter(self.numbers)

        def rows(like: Tensor) -> Tensor:
            shape = (samples, *like.shape[1:])
            numbers = like.is_floating_point()
            kind = next(kinds, NORMAL) if numbers else PUBLIC
            dtype = torch.float64 if numbers and double and not self.own else like.dtype
            if numbers and kind != PUBLIC:
                drawn = torch.float64 if dtype == torch.float64 else torch.float32
                draw = torch.randn if kind == NORMAL else torch.rand
                return draw(shape, generator=generator, dtype=drawn).to(like.device, dtype)
            if numbers or self.keep:
                return like[torch.arange(samples, device=like.device) % len(like)].to(dtype)
            width = max(shape[-1], 1)
            places = torch.arange(samples * like[:1].numel()) % width
            times = min(next(turns), max(1, width // 2))
            alternating: Tensor = (1 - places // times % 2).view(shape).to(like)
            return alternating

        return map_rows(rows, self.template)

    def to(self, device: torch.device) -> "Structure":
        """Return the structure on another device."""
        return replace(self, template=map_rows(lambda t: t.to(device), self.template))

    def __str__(self) -> str:
        return shapes_of(self.template)


def shapes_of(batch: Batch) -> str:
    """Return the shapes of a sample, for messages: "(1, 28, 28)", or one for each tensor."""
    shapes = [tuple(t.shape[1:]) for t in tensors_in(batch)]
    return ", ".join(map(str, shapes))


def check_rows(batch: Batch, structure: Structure | None) -> None:
    """Reject a batch that is not tensors with the same number of rows, as in the structure.

    A tensor with one row for all records would give each of them what was computed from others, and
    a network was only validated on records of one structure. Raises InputError.
    """
    parts = parts_by_name(batch)
    errors = [
        f"{name} is a {type(part).__name__}, not a tensor. Use dicts, lists or tuples of tensors."
        for name, part in parts.items()
        if not isinstance(part, Tensor) or part.ndim == 0
    ]
    raise_errors(errors or ([] if parts else ["The batch contains no tensor."]))
    rows = {len(part) for part in parts.values()}
    if len(rows) > 1:
        raise InputError(
            "The tensors of the batch have different numbers of rows. Each must have one row per "
            f"record in its first dimension: {', '.join(parts)}."
        )
    if structure is not None and _form(batch) != _form(structure.template):
        raise InputError(
            "The batch has other parts, shapes or types than the one that was validated: "
            f"{_form(batch)}, not {_form(structure.template)}. Pad records to a fixed length."
        )


def _form(batch: Batch) -> dict[str, tuple[Any, ...]]:
    return {name: (*t.shape[1:], t.dtype, t.device) for name, t in parts_by_name(batch).items()}
