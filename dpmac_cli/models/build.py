"""Build and validate a built-in or user-supplied network."""

from dataclasses import replace

import torch
from torch import nn

from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import ModelError
from dpmac_cli.models import architectures, user_models
from dpmac_cli.models.features import with_features
from dpmac_cli.models.registry import MODELS, BuiltIn, Features, UserModel
from dpmac_cli.models.validation import check_model


def build_model(
    model: BuiltIn | UserModel,
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
    """Return a freshly initialised, validated network that maps images to logits.

    Args:
        model: of :func:`~dpmac_cli.models.registry.parse_model`.
        dataset: gives the input shape and the number of classes.
        seed: of the initial weights; no global generator is touched.
        fix_norm: replace batch norms by group norms.
        to_float32: convert parameters and buffers.
        features: fixed features that the network is put behind.
        frozen, isolated, physical_batch: as in :func:`~dpmac_cli.models.validation.check_model`.

    Raises:
        InputError: there is no such factory.
        ModelError: the factory fails, or the network mixes samples or does not fit the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        seen = seen_by_network(dataset, features)
        if isinstance(model, UserModel):
            network = user_models.build(model, seen)
        else:
            network = build_network(model.name, seen)
        if fix_norm:
            network, _ = user_models.without_batch_norm(network)
        if to_float32:
            network = network.float()
        if features is not None:
            if (fault := features.fault(dataset.shape)) is not None:
                raise ModelError(f"Features of images: they {fault}")
            network = with_features(network, dataset.shape, features.groups)
    check_model(
        network,
        dataset.shape,
        len(dataset.classes),
        frozen=frozen,
        isolated=isolated,
        built_in=isinstance(model, BuiltIn),
        physical_batch=physical_batch,
    )
    return network


def build_network(name: str, dataset: Dataset) -> nn.Module:
    """Return a built-in network, not validated; its weights are of torch's global generator."""
    kind = MODELS[name]
    network: nn.Module = getattr(architectures, kind.builder)(dataset, *kind.arguments)
    return network


def seen_by_network(dataset: Dataset, features: Features | None) -> Dataset:
    """Return a dataset with the shape that the network is given: of images or of features."""
    if features is None:
        return dataset
    return replace(dataset, shape=features.shape_of(dataset.shape))
