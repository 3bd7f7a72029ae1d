"""Named architectures, and the door that models which mix samples do not pass."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dpmac_cli.catalog import Dataset
from dpmac_cli.errors import ModelError

# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)


def _mlp(hidden: int) -> Callable[[Dataset], nn.Module]:
    def build(dataset: Dataset) -> nn.Module:
        channels, height, width = dataset.shape
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, len(dataset.classes)),
        )

    return build


def _cnn(dataset: Dataset) -> nn.Module:
    channels, height, width = dataset.shape

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
        nn.Linear(128, len(dataset.classes)),
    )


BUILDERS: Mapping[str, Callable[[Dataset], nn.Module]] = {
    "mlp": _mlp(1000),
    "mlp-small": _mlp(64),
    "cnn": _cnn,
}


def build_model(name: str, dataset: Dataset, seed: int) -> nn.Module:
    """A freshly initialised model (PyTorch's defaults), checked at the door.

    Args:
        name: a key of :data:`BUILDERS`.
        dataset: gives the input shape and the number of classes.
        seed: of the initial weights; touches no global generator.

    Raises:
        ModelError: the model mixes samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BUILDERS[name](dataset)
    check_model(model, dataset.shape)
    return model


def check_model(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a model in which one sample can change what another sample computes.

    Clipping bounds what a sample does to its own gradient, so a layer that lets it into the
    gradients of others voids the guarantee. Known layers are refused by name; anything else that
    mixes is caught by changing one sample of a random batch and watching the others, and buffers
    that a forward pass changes (running statistics would be published un-noised) likewise.

    Args:
        model: maps (samples, *shape) to logits.
        shape: of one sample.

    Raises:
        ModelError: naming the layer and the remedy.
    """
    for name, module in model.named_modules():
        if isinstance(module, MIXING_LAYERS):
            raise ModelError(
                f"The layer {name} is a {type(module).__name__}, which mixes the samples of a "
                "batch and keeps statistics of them without noise. Use "
                "nn.GroupNorm(groups, channels) instead."
            )
    _check_behaviour(model, shape)


@torch.no_grad()
def _check_behaviour(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Each sample alone, and the batch in another order, must give what the batch gave."""
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    x[0].mul_(20)  # an outlier shows what a sum or a maximum over the batch would hide
    order = torch.tensor([3, 0, 4, 2, 1])
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # its noise differs between batches, and depends on no sample
    try:
        together = model(x)
        alone = torch.cat([model(row.unsqueeze(0)) for row in x])
        reordered = model(x[order])
    finally:
        for module, training in modes.items():
            module.training = training
    changed = [name for name, b in model.named_buffers() if not _same(b, buffers[name])]
    if changed:
        raise ModelError(
            f"A forward pass in training mode changes the buffer {changed[0]}: statistics of "
            "private data would be kept without noise. Switch that off "
            "(for normalisation layers, track_running_stats=False)."
        )
    if not (
        together.ndim == 2
        and together.shape == alone.shape
        and torch.allclose(together, alone, rtol=1e-3, atol=1e-5)
        and torch.allclose(together[order], reordered, rtol=1e-3, atol=1e-5)
    ):
        raise ModelError(
            "What the model computes for a sample depends on the other samples of its batch, or on "
            "its place among them (for example x - x.mean(0)): it mixes samples. Make every "
            "operation work on one sample alone, and give one row of logits for each."
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
