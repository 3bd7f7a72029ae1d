"""EfficientNet-Lite: convolutional networks with public weights of ImageNet (Tan and Le 2019).

Without squeeze-and-excitation and with ReLU6 (Liu 2020, tensorflow/tpu). Modules are named as in
the published files and run in the order of their definition.
"""

from functools import partial
from math import ceil

from torch import Tensor, nn
from torch.nn.functional import pad

STEM, WIDTH = 32, 1280
#: Stages of blocks: number of blocks at depth 1; kernel size and stride of the depthwise
#: convolution in the first block (the others have stride 1); expansion factor of the channels
#: within a block; number of output channels at width 1.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_norm = partial(nn.BatchNorm2d, eps=1e-3)


class SameConv(nn.Conv2d):
    """Convolution with output size inputs / stride, padded more at the bottom and right."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for images, (samples, channels, height, width)."""
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        both = [max(kernel - (size % stride or stride), 0) for size in (x.shape[3], x.shape[2])]
        sides = [side for total in both for side in (total // 2, total - total // 2)]
        return super().forward(pad(x, sides))


class Block(nn.Sequential):
    """Inverted residual block: expansion, depthwise convolution, projection, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SameConv(inputs, inner, 1, bias=False), _norm(inner)
            self.relu0 = nn.ReLU6()
        self._depthwise_conv = SameConv(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1, self.relu1 = _norm(inner), nn.ReLU6()
        self._project_conv, self._bn2 = SameConv(inner, outputs, 1, bias=False), _norm(outputs)
        self._adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for images, (samples, channels, height, width)."""
        found: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + found if self._adds else found


class EfficientNetLite(nn.Sequential):
    """Map standardised images to 1,280 features averaged over positions, (images, 1280).

    Args:
        width: multiplier of the channels, except in the stem and the features.
        depth: multiplier of the blocks of every stage except the first and the last.
    """

    def __init__(self, width: float, depth: float) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, STEM, 3, 2, bias=False), _norm(STEM)
        self.relu0, self._blocks, inputs = nn.ReLU6(), nn.Sequential(), STEM
        for stage, (repeats, kernel, stride, expansion, channels) in enumerate(STAGES):
            outputs = int(channels * width + 4) // 8 * 8  # the nearest multiple of 8
            fixed = stage in (0, len(STAGES) - 1)
            for number in range(repeats if fixed else ceil(repeats * depth)):
                step = stride if number == 0 else 1
                self._blocks.append(Block(inputs, outputs, kernel, step, expansion))
                inputs = outputs
        self._conv_head, self._bn1 = SameConv(inputs, WIDTH, 1, bias=False), _norm(WIDTH)
        self.relu1, self.pool = nn.ReLU6(), nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()
