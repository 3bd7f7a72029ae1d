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

    A crop is a shift by up to :data:`REACH` of each side, with what is missing mirrored at the
    border, as of an image that was padded by reflection. A flip is horizontal. The views of an
    image are K consecutive rows.

    Args:
        images: shape (records, channels, height, width), of any dtype, which views keep.
        words: one uniform 64-bit word per view, shape (records, K). The lowest bits choose the row
            of a crop, those from :data:`BITS` on its column, and the one after these the flip.
        augment: value of the setting of this name: "crop", "flip" or "crop+flip".

    >>> images = torch.arange(4.0).view(1, 1, 2, 2)
    >>> views_of(images, np.array([[0, 1 << 62]], np.uint64), "flip").squeeze(1).tolist()
    [[[0.0, 1.0], [2.0, 3.0]], [[1.0, 0.0], [3.0, 2.0]]]
    """
    views = images.repeat_interleave(words.shape[1], 0)
    size, channels, height, width = views.shape
    bits = words.view(np.int64).reshape(size, 1)
    cropped = "crop" in augment
    rows = _places(bits, height, cropped)
    columns = _places(bits >> BITS, width, cropped)
    if "flip" in augment:
        flips = bits >> 2 * BITS & 1
        columns = np.where(flips, width - 1 - columns, columns)
    row = torch.from_numpy(rows).to(views.device, non_blocking=True)  # (views, height)
    column = torch.from_numpy(columns).to(views.device, non_blocking=True)  # (views, width)
    pixels = row.unsqueeze(2) * width + column.unsqueeze(1)  # (views, height, width)
    chosen = pixels.view(size, 1, -1).expand(-1, channels, -1)
    return views.flatten(2).gather(2, chosen).view_as(views)


def _places(bits: NDArray[np.int64], side: int, cropped: bool) -> NDArray[np.int64]:
    """Return the rows or columns of each view, mirrored at the borders; shape (views, side)."""
    reach = round(side * REACH) if cropped else 0
    last = side - 1
    uniform = bits & (1 << BITS) - 1  # in [0, 2^31)
    places = np.arange(side) + (uniform * (2 * reach + 1) >> BITS) - reach
    inside: NDArray[np.int64] = last - np.abs(last - np.abs(places))
    return inside
