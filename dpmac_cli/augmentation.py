"""Random views of images: crops of what lies around them, mirrored, and flips.

A view depends on its image and on draws alone, never on other records.
"""

import torch
from torch import Tensor

#: How far a crop moves, as a share of the side: 4 of 32 pixels.
REACH = 1 / 8


def views_of(images: Tensor, count: int, augment: str) -> Tensor:
    """Views of images, those of one image side by side. Draws by torch's own generator.

    Args:
        images: shape (records, channels, height, width).
        count: K, of each.
        augment: a name of :data:`dpmac_cli.recipe.AUGMENTS`.

    Returns:
        Shape (records * K, channels, height, width).
    """
    views = images.repeat_interleave(count, 0)
    size, channels, height, width = views.shape
    cropped, flipped = "crop" in augment, "flip" in augment
    rows = _mirrored(_places(size, height, cropped), height)
    columns = _places(size, width, cropped)
    if flipped:
        turned = torch.rand(size, 1) < 0.5
        columns = torch.where(turned, width - 1 - columns, columns)
    columns = _mirrored(columns, width)
    pixels = rows.unsqueeze(2) * width + columns.unsqueeze(1)  # (views, height, width)
    chosen = pixels.view(size, 1, -1).expand(-1, channels, -1).to(views.device)
    return views.flatten(2).gather(2, chosen).view_as(views)


def _places(size: int, side: int, cropped: bool) -> Tensor:
    """Where each view takes its rows or columns from, outside the image too; (size, side)."""
    reach = round(side * REACH) if cropped else 0
    return torch.arange(side) + torch.randint(-reach, reach + 1, (size, 1))


def _mirrored(places: Tensor, side: int) -> Tensor:
    """Places beyond a border, as far within it."""
    last = side - 1
    return last - (last - places.abs()).abs()
