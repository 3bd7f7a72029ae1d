"""Train the network of ``dpmac train --dataset mnist`` for as many epochs, without privacy.

Plain torch as fast as a short script gets: all images in one tensor, no data loader.

    python benchmarks/plain_mnist.py --data-dir DIR --epochs 5
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST

BATCH = 256


def load(data_dir: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Standardised images and labels."""
    loaded = MNIST(data_dir, train=train)
    return (loaded.data.unsqueeze(1) / 255 - 0.1307) / 0.3081, loaded.targets


def main() -> None:
    """Train and score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    images, labels = load(options.data_dir, train=True)
    test_images, test_labels = load(options.data_dir, train=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1, options.epochs + 1):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        sys.stdout.write(f"epoch {epoch}  test accuracy {accuracy:.2%}\n")


if __name__ == "__main__":
    main()
