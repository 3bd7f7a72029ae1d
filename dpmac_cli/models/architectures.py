"""Built-in networks. None mixes samples: they use group norm or weight standardisation."""

import math
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from dpmac_cli.config.datasets import Signature
from dpmac_cli.config.records import PLACES
from dpmac_cli.dp.clipping.custom_layers import LinearWithPlaces, StandardisedConv2d
from dpmac_cli.errors import ModelError
from dpmac_cli.libraries import vision_models

GROUPS = 16


def passed_on(_: Signature) -> nn.Module:
    """Return a network without weights, whose outputs are its inputs."""
    return nn.Flatten()


def perceptron(signature: Signature, *hidden: int) -> nn.Module:
    """Return linear layers with ReLU between them, of ``hidden`` units each."""
    layers: list[nn.Module] = [nn.Flatten()]
    places = signature.lookups
    for inputs, outputs in pairwise((math.prod(signature.shape), *hidden, signature.outputs)):
        first = places and len(layers) == 1
        linear = (
            LinearWithPlaces(inputs, places, PLACES, outputs)
            if first
            else nn.Linear(inputs, outputs)
        )
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(signature: Signature) -> nn.Module:
    """Return the paper's CIFAR-10 network. Raises ModelError for images below 4 by 4 pixels."""
    channels, height, width = signature.shape
    if min(height, width) < 4:
        raise ModelError(
            f"The network cnn needs images of at least 4 by 4 pixels, but the shape of these is "
            f"{signature.shape}. Use {{model=}}mlp."
        )

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(channels, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 64),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, signature.outputs),
    )


class _Block(nn.Module):
    """Residual block: norm, ReLU and convolution, twice, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(GROUPS, inputs), inputs)
        self.conv1 = StandardisedConv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = StandardisedConv2d(outputs, outputs, 3, padding=1)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else StandardisedConv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(ready)
        out: Tensor = around + self.conv2(relu(self.norm2(self.conv1(ready))))
        return out


def wide_resnet(signature: Signature, depth: int, width: int) -> nn.Module:
    """Return WRN-depth-width (Zagoruyko and Komodakis 2016) as in De et al. 2022, arXiv 2204.13650.

    Each of three stages has (depth - 4) / 6 blocks, of 16, 32 and 64 times ``width`` channels.
    """
    layers: list[nn.Module] = [StandardisedConv2d(signature.shape[0], 16, 3, padding=1)]
    channels = 16
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            layers.append(_Block(channels, outputs, 2 if stage > 0 and block == 0 else 1))
            channels = outputs
    return nn.Sequential(
        *layers,
        nn.GroupNorm(GROUPS, channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, signature.outputs),
    )


def resnet18(signature: Signature) -> nn.Module:
    """Return torchvision's ResNet-18 with group norm instead of batch norm."""
    norm = partial(nn.GroupNorm, 32)
    network: nn.Module = vision_models.resnet18(num_classes=signature.outputs, norm_layer=norm)
    if signature.shape[0] != 3:
        network.conv1 = nn.Conv2d(signature.shape[0], 64, 7, stride=2, padding=3, bias=False)
    return network
