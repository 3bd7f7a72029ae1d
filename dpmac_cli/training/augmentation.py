"""Random augmented views of images: crops with reflection padding, and horizontal flips.

A view depends only on its image and one random word, and on no other record.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The largest shift of a crop, as a fraction of the side: 4 of 32 pixels.
REACH = 1 / 8
#: Bits of a word that choose a row, the next ones a column; the bit after those is the flip.
BITS = 31


def views_of(images: Tensor, words: NDArray[np.uint64], augment: str) -> Tensor:
    """Return K views of each image in order, shape (records * K, channels, height, width).

    Args:
        images: shape (records, channels, height, width).
        words: one uniform 64-bit word per view, shape (records, K).
        augment: a name of :data:`dpmac_cli.training.schedules.AUGMENTS`.
    """
    views = images.repeat_interleave(words.shape[1], 0)
    size, channels, height, width = views.shape
    bits, cropped = words.view(np.int64).reshape(size, 1), "crop" in augment
    rows, columns = _places(bits, height, cropped), _places(bits >> BITS, width, cropped)
    if "flip" in augment:
        columns = np.where(bits >> 2 * BITS & 1, width - 1 - columns, columns)
    row, column = (torch.from_numpy(p).to(views.device, non_blocking=True) for p in (rows, columns))
    chosen = (row.unsqueeze(2) * width + column.unsqueeze(1)).view(size, 1, -1)
    return views.flatten(2).gather(2, chosen.expand(-1, channels, -1)).view_as(views)


def _places(bits: NDArray[np.int64], side: int, cropped: bool) -> NDArray[np.int64]:
    """Return the rows or columns of each view, mirrored at the borders; shape (views, side)."""
    reach, last = round(side * REACH) if cropped else 0, side - 1
    uniform = bits & (1 << BITS) - 1  # in [0, 2^31)
    places = np.arange(side) + (uniform * (2 * reach + 1) >> BITS) - reach
    inside: NDArray[np.int64] = last - np.abs(last - np.abs(places))
    return inside
