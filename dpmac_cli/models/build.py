"""Model registry: build a named or user-supplied network."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import ModelError
from dpmac_cli.models import user_models as factories
from dpmac_cli.models.architectures import resnet18, wide_resnet
from dpmac_cli.models.features import with_features
from dpmac_cli.models.registry import Features
from dpmac_cli.models.validation import check_model


def _perceptron(hidden: Sequence[int], dataset: Dataset) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((math.prod(dataset.shape), *hidden, len(dataset.classes))):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn(dataset: Dataset) -> nn.Module:
    channels, height, width = dataset.shape
    if min(height, width) < 4:
        raise ModelError(
            f"The network cnn needs images of at least 4 by 4 pixels, and the shape of these is "
            f"{dataset.shape}. Try --model mlp."
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
        nn.Linear(128, len(dataset.classes)),
    )


BUILDERS: Mapping[str, Callable[[Dataset], nn.Module]] = {
    "linear": partial(_perceptron, ()),
    "mlp": partial(_perceptron, (1000,)),
    "mlp-small": partial(_perceptron, (64,)),
    "cnn": _cnn,
    "wrn-16-4": partial(wide_resnet, 16, 4),
    "wrn-40-4": partial(wide_resnet, 40, 4),
    "resnet18": resnet18,
}


def build_model(
    name: str,
    dataset: Dataset,
    seed: int,
    *,
    fix_norm: bool = False,
    to_float32: bool = False,
    features: Features | None = None,
    frozen: bool = False,
    isolated: bool = False,
    physical_batch: int | None = None,
) -> nn.Module:
    """Return a freshly initialised, validated model.

    Args:
        name: a key of :data:`BUILDERS`, or where a factory is: "file.py:factory".
        dataset: gives the input shape and the number of classes.
        seed: of the initial weights; touches no global generator.
        fix_norm: put group norm in the place of batch norm.
        to_float32: convert its parameters and buffers.
        features: that the named network takes in place of images; the model takes images.
        frozen, isolated, physical_batch: as in :func:`~dpmac_cli.models.validation.check_model`.

    Raises:
        InputError: there is no such factory.
        ModelError: the factory fails, or the model mixes samples, or does not fit the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = factories.is_factory(name)
        taken = seen_by_network(dataset, features)
        model = factories.build(name, taken) if own else BUILDERS[name](taken)
        if fix_norm:
            model, _ = factories.without_batch_norm(model)
        if to_float32:
            model = model.float()
        if features is not None:
            if (fault := features.fault(dataset.shape)) is not None:
                raise ModelError(f"Features of images: they {fault}")
            model = with_features(model, dataset.shape, features.groups)
    check_model(
        model,
        dataset.shape,
        len(dataset.classes),
        frozen=frozen,
        isolated=isolated,
        built_in=not own,
        physical_batch=physical_batch,
    )
    return model


def seen_by_network(dataset: Dataset, features: Features | None) -> Dataset:
    """A data set as the named network sees it: of images, or of their features."""
    if features is None:
        return dataset
    return replace(dataset, shape=features.shape_of(dataset.shape))
