"""DP-Adam on CIFAR-10 written a second time, sharing no code with dpmac: a check of the whole.

Per-sample gradients by vmap, noise and Poisson draws from torch's generator, torch's own Adam.

    python benchmarks/independent.py DATA_DIR [SEED]

prints test accuracy after each of the paper's 5 epochs at sigma 0.5; 20 minutes on one core.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torchvision.datasets import CIFAR10

SIGMA, BATCH, EPOCHS, CHUNK = 0.5, 512, 5, 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def load(folder: str, train: bool) -> tuple[Tensor, Tensor]:
    """Standardised images and labels."""
    data = CIFAR10(folder, train=train)
    x = torch.from_numpy(data.data).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (x - mean) / std, torch.tensor(data.targets)


def network() -> nn.Module:
    """The paper's 582,346 parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]

    convolutions = [*block(3, 32), nn.MaxPool2d(2), *block(32, 64), nn.MaxPool2d(2), *block(64, 64)]
    head = [nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*convolutions, *head)


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    (x, y), (x_test, y_test) = load(options.data_dir, True), load(options.data_dir, False)
    model = network()
    parameters = dict(model.named_parameters())
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, weights, (image.unsqueeze(0),))
        return cross_entropy(logits, label.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    per_epoch = -(-len(x) // BATCH)
    for step in range(1, EPOCHS * per_epoch + 1):
        rows = (torch.rand(len(x)) < BATCH / len(x)).nonzero().squeeze(1)
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        weights = {name: p.detach() for name, p in parameters.items()}
        for chunk in torch.split(rows, CHUNK):
            gradients = per_sample(weights, x[chunk], y[chunk])
            norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
            clip = (1 / norms).clamp(max=1)
            for name, g in gradients.items():
                total[name] += torch.einsum("i,i...->...", clip, g)
        for name, p in parameters.items():
            p.grad = (total[name] + SIGMA * torch.randn_like(p)) / BATCH
        adam.step()
        if step % per_epoch == 0:
            with torch.no_grad():
                predicted = torch.cat([model(part).argmax(1) for part in torch.split(x_test, 500)])
            accuracy = (predicted == y_test).float().mean().item()
            print(f"epoch {step // per_epoch}: {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
