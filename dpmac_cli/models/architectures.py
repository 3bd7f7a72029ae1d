"""Residual networks fit for clipping sample by sample: group norm, and standardised weights."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu

from dpmac_cli.data.registry import Dataset
from dpmac_cli.dp.clipping.modules import StandardisedConv2d

GROUPS = 16


class _Block(nn.Module):
    """Norm, ReLU, convolution, twice, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(GROUPS, inputs), inputs)
        self.conv1 = StandardisedConv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = StandardisedConv2d(outputs, outputs, 3, padding=1)
        self.shortcut = (
            None
            if inputs == outputs and stride == 1
            else StandardisedConv2d(inputs, outputs, 1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        ready = relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(ready)
        out: Tensor = around + self.conv2(relu(self.norm2(self.conv1(ready))))
        return out


def wide_resnet(depth: int, width: int, dataset: Dataset) -> nn.Module:
    """WRN-depth-width (Zagoruyko and Komodakis 2016) as De et al. 2022 (arXiv 2204.13650) have it.

    Args:
        depth: 6 n + 4, with n blocks in each of three stages.
        width: factor on 16, 32 and 64 channels.
        dataset: gives channels and the number of classes.
    """
    blocks = (depth - 4) // 6
    layers: list[nn.Module] = [StandardisedConv2d(dataset.shape[0], 16, 3, padding=1)]
    channels = 16
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            layers.append(_Block(channels, outputs, 2 if stage > 0 and block == 0 else 1))
            channels = outputs
    return nn.Sequential(
        *layers,
        nn.GroupNorm(GROUPS, channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, len(dataset.classes)),
    )


def resnet18(dataset: Dataset) -> nn.Module:
    """torchvision's ResNet-18 with group norm in place of batch norm; 3 channels."""
    from torchvision import models  # noqa: PLC0415  (seconds to import)

    norm = partial(nn.GroupNorm, 32)
    network: nn.Module = models.resnet18(num_classes=len(dataset.classes), norm_layer=norm)
    if dataset.shape[0] != 3:
        network.conv1 = nn.Conv2d(dataset.shape[0], 64, 7, stride=2, padding=3, bias=False)
    return network
