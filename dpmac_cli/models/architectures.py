"""Built-in networks. None mixes samples: they use group norm or weight standardisation.

Each is a function of the signature of its records: shape of a record without the batch, and number
of outputs. Inputs of the network have shape (samples, *shape), its outputs (samples, outputs).
"""

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
    """Return a network without weights that passes on its inputs, flattened: (samples, numbers)."""
    return nn.Flatten()


def perceptron(signature: Signature, *hidden: int) -> nn.Module:
    """Return a perceptron: linear layers with ReLU between them, on flattened records.

    Args:
        signature: shape of the records, and number of outputs. Its last ``lookups`` inputs are
            places of categories, which look up rows of a weight in the first layer.
        hidden: number of units of each hidden layer; none for a linear model.
    """
    widths = (math.prod(signature.shape), *hidden, signature.outputs)
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        if number > 0:
            layers.append(nn.ReLU())
        if number == 0 and signature.lookups:
            layers.append(LinearWithPlaces(inputs, signature.lookups, PLACES, outputs))
        else:
            layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def cnn(signature: Signature) -> nn.Module:
    """Return the paper's CIFAR-10 network: three convolutions with group norm, two linear layers.

    Args:
        signature: shape (channels, height, width) of the images, and number of outputs.

    Raises:
        ModelError: images are below 4 by 4 pixels, which cannot be halved twice.
    """
    channels, height, width = signature.shape
    if min(height, width) < 4:
        raise ModelError(
            f"The network cnn needs images of at least 4 by 4 pixels, but the shape of these is "
            f"{signature.shape}. Use {{model=}}mlp."
        )

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        """Return a convolution that keeps height and width, group norm and ReLU."""
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        ]

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
    """Residual block: norm, ReLU and convolution, twice, with a shortcut.

    Args:
        inputs, outputs: numbers of channels.
        stride: of the first convolution and the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(GROUPS, inputs), inputs)
        self.conv1 = StandardisedConv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = StandardisedConv2d(outputs, outputs, 3, padding=1)
        self.shortcut: nn.Module | None = None
        if inputs != outputs or stride != 1:
            self.shortcut = StandardisedConv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (samples, outputs, height / stride, width / stride)."""
        first = relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(first)
        second = relu(self.norm2(self.conv1(first)))
        out: Tensor = around + self.conv2(second)
        return out


def wide_resnet(signature: Signature, depth: int, width: int) -> nn.Module:
    """Return the residual network WRN-depth-width, as De et al. 2022 (arXiv 2204.13650) train it.

    It is that of Zagoruyko and Komodakis 2016 with group norm and weight standardisation.

    Each of three stages has (depth - 4) / 6 blocks, of 16, 32 and 64 times ``width`` channels. The
    second and the third stage halve height and width.

    Args:
        signature: shape (channels, height, width) of the images, and number of outputs.
        depth: number of convolutions, 4 more than a multiple of 6.
        width: factor of the channels.
    """
    channels = 16
    first = StandardisedConv2d(signature.shape[0], channels, 3, padding=1)
    layers: list[nn.Module] = [first]
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            halves = stage > 0 and block == 0
            layers.append(_Block(channels, outputs, stride=2 if halves else 1))
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
    """Return torchvision's ResNet-18 with group norm of 32 groups instead of batch norm.

    Args:
        signature: shape (channels, height, width) of the images, and number of outputs. The first
            convolution takes any number of channels.
    """
    norm = partial(nn.GroupNorm, 32)
    network: nn.Module = vision_models.resnet18(num_classes=signature.outputs, norm_layer=norm)
    channels, _, _ = signature.shape
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return network
