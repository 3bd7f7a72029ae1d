"""CIFAR-10 in Opacus, with the settings of its own example."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.transforms import Compose, Normalize, ToTensor


def run(net: nn.Module, folder: str, epochs: int) -> tuple[float, float]:
    """Return test accuracy and epsilon."""
    normalise = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    transform = Compose([ToTensor(), normalise])
    train, test = (CIFAR10(folder, train=part, transform=transform) for part in (True, False))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(train, batch_size=2000),
        noise_multiplier=1.5,
        max_grad_norm=10.0,
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 256))
    return right / len(test), engine.accountant.get_epsilon(1e-5, eps_error=2e-4)
