"""Build and validate a built-in or user-supplied network.

A factory of a user is code that runs in this process, so it is only called where a command or a
program names it, never a file. It is called with seeded generators, so that initial weights repeat
with a seed.
"""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dpmac_cli.config.datasets import Signature
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.networks import (
    MODELS,
    BuiltIn,
    Features,
    FixedFeatures,
    Trained,
    UserModel,
)
from dpmac_cli.config.records import Images
from dpmac_cli.dp.torch_errors import what_failed
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.features.backbones import PublicBackbone, at_a_time
from dpmac_cli.features.fixed import with_fixed_features
from dpmac_cli.features.frozen import FrozenFeatures, WithHead
from dpmac_cli.features.texts import PUBLISHED_OF_TEXTS, TextFeatures, example_of
from dpmac_cli.models import architectures
from dpmac_cli.models.checked_parts import MIXING_LAYERS
from dpmac_cli.models.language_model import CausalModel, on_texts
from dpmac_cli.models.trained_part import freeze
from dpmac_cli.models.validation import check_model
from dpmac_cli.randomness.layers import forked, seed_all

#: Number of dimensions of records without channels, of which built-in networks get one.
PLANE = 2
#: A network of the program that runs: its class, a function that builds it, or an instance.
Network = nn.Module | Callable[..., nn.Module]


def build_model(
    model: BuiltIn | UserModel | Network,
    signature: Signature,
    seed: int,
    *,
    fix_norm: bool = False,
    features: Features | None = None,
    trained: Trained | None = None,
    isolated: bool = False,
) -> nn.Module:
    """Return a freshly initialised, validated network that maps records to outputs.

    Args:
        model: result of :func:`~dpmac_cli.config.networks.parse_model`, or a network of the
            program; an instance is copied.
        signature: shape and kind of records, and the number of outputs.
        seed: seed of the initial weights; global generators are not changed.
        fix_norm: replace batch norm with group norm.
        features: fixed features that are the network's inputs.
        trained: part of a network with public weights to train; None for other networks.
        isolated: whether the network may compute something else for a batch than for each sample
            alone, which a user-supplied network otherwise must not.

    Raises:
        InputError: there is no such factory, or its file cannot be imported.
        ModelError: the factory fails, or the network mixes samples or does not fit the data.
    """
    with forked():
        seed_all(seed)
        seen = seen_by_network(signature, features)
        if isinstance(model, UserModel):
            network = _called(_find(model), f"{{model=}}{model}", seen)
        elif isinstance(model, BuiltIn):
            network = build_network(model.name, seen)
        elif isinstance(model, nn.Module):
            network = copy.deepcopy(model)
        else:
            network = _called(model, f"network {getattr(model, '__qualname__', model)}", seen)
        take_logits(network)
        if fix_norm:
            network = without_batch_norm(network)
        check = partial(check_model, classes=signature.outputs, isolated=isolated)
        from_registry = isinstance(model, BuiltIn)
        if features is not None:
            check(network, seen.shape, built_in=from_registry)
            network = _behind(network, features, signature, trained)
        if trained is not None and trained.part != "head":
            freeze(network, trained, signature.shape)
        if not isinstance(network, FrozenFeatures):
            head_only = trained is not None and trained.part == "head"
            built_in = from_registry or features is not None
            example = example_of(signature.records)
            check(network, signature.shape, frozen=head_only, built_in=built_in, example=example)
    return network


def _behind(
    head: nn.Module, features: Features, signature: Signature, trained: Trained | None
) -> nn.Module:
    """Return a network on records that is a head on features of them.

    Args:
        head: network on features.
        features: the features.
        signature: shape and kind of the records.
        trained: trained part; None or "head" if the features stay as they are.

    Raises:
        ModelError: there are no such features of these records.
    """
    records = signature.records
    if records is None or records.kind not in features.reads:
        raise ModelError(f"The features {features.kind} are of {features.reads}.")
    fault = features.fault(records)
    if fault is not None:
        raise ModelError(f"The {features.reads} {fault}")
    head_only = trained is None or trained.part == "head"
    if isinstance(features, TextEncoder):
        if features.config.causal:
            return on_texts(CausalModel(features), head)
        texts = TextFeatures(features, trained=not head_only)
        if not head_only:
            return on_texts(texts, head)
        return FrozenFeatures(texts, head, torch.float32, PUBLISHED_OF_TEXTS)
    if isinstance(features, FixedFeatures):
        return with_fixed_features(head, features, records)
    assert isinstance(records, Images)  # noqa: S101  (a backbone reads them alone)
    backbone = PublicBackbone(features, records)
    network = (
        FrozenFeatures(backbone, head, torch.float16, ()) if head_only else WithHead(backbone, head)
    )
    network.at_a_time = at_a_time(features.size)
    return network


def build_network(name: str, signature: Signature) -> nn.Module:
    """Return a built-in network, freshly initialised by torch's global generator, not validated.

    Args:
        name: a name of :data:`.MODELS`.
        signature: shape of the inputs, number of outputs, and initial output. Inputs with two
            dimensions get a dimension of channels. With an initial output, the last linear layer
            begins with weight 0 and that bias.

    Raises:
        KeyError: there is no such network.
        ModelError: the network does not take inputs of this shape.
    """
    kind = MODELS[name]
    plane = len(signature.shape) == PLANE
    seen = replace(signature, shape=(1, *signature.shape)) if plane else signature
    network: nn.Module = getattr(architectures, kind.builder)(seen, *kind.arguments)
    if plane:
        with_channel = nn.Unflatten(1, (1, signature.shape[0]))
        network = nn.Sequential(with_channel, network)
    if signature.start is not None:
        linear_layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
        if linear_layers:
            last = linear_layers[-1]
            nn.init.zeros_(last.weight)
            nn.init.constant_(last.bias, signature.start)
    return network


def seen_by_network(signature: Signature, features: Features | None) -> Signature:
    """Return the signature of a network as it sees records: behind features, with their shape.

    Args:
        signature: shape and kind of the records, and the number of outputs.
        features: the features; None for a network on records, whose signature is the same.
    """
    if features is None:
        return signature
    assert signature.records is not None  # noqa: S101  (features are of records)
    start = features.start if signature.start is None else signature.start
    shape = features.shape_of(signature.records)
    return Signature(shape, signature.outputs, start, lookups=features.lookups(signature.records))


def _called(factory: Callable[..., Any], name: str, signature: Signature) -> nn.Module:
    """Call a factory with (shape, classes), or without arguments if it does not take two.

    Args:
        factory: the factory.
        name: how messages call it: "{model=}net.py:make".
        signature: shape of a record and number of outputs.

    Raises:
        InputError: it cannot be called.
        ModelError: it fails, or returns no network.
    """
    if not callable(factory):
        raise InputError(
            f"{name} is a value of type {type(factory).__name__}. Pass a class, a function that "
            "returns a torch.nn.Module, or such a module."
        )
    arguments = _arguments(factory, signature)
    try:
        network = factory(*arguments)
    except (Exception, SystemExit) as failure:
        called = "(shape, classes)" if arguments else "()"
        raise ModelError(
            f"{name}: the factory, called with {called}, failed: {what_failed(failure)}"
        ) from failure
    if isinstance(network, nn.Module):
        return network
    raise ModelError(
        f"{name}: the factory must return a torch.nn.Module, not a value of type "
        f"{type(network).__name__}."
    )


def built_by(model: UserModel, signature: Signature) -> str:
    """Return the call of a user's factory as text, for reports: "net.py:Net((1, 28, 28), 10)".

    Args:
        model: a factory that :func:`build_model` has called in this process.
        signature: signature that it was called with.

    Raises:
        KeyError: the factory was not called in this process.
    """
    factory = getattr(sys.modules[_module_name(model.place)], model.factory)
    arguments = ", ".join(map(repr, _arguments(factory, signature)))
    return f"{Path(model.place).name}:{model.factory}({arguments})"


def _arguments(factory: Callable[..., Any], signature: Signature) -> tuple[Any, ...]:
    """Return (shape, classes), or () if a factory cannot be called with two arguments."""
    try:
        inspect.signature(factory).bind(None, None)
    except (TypeError, ValueError):
        return ()
    return signature.shape, signature.outputs


def _find(model: UserModel) -> Callable[..., Any]:
    """Return a factory of a user. Raises InputError, which lists those that there are."""
    module = _imported(model)
    factory: Callable[..., Any] | None = getattr(module, model.factory, None)
    if callable(factory):
        return factory
    offered = list[str]()
    for name, value in vars(module).items():
        defined_there = getattr(value, "__module__", None) == module.__name__
        if callable(value) and defined_there and not name.startswith("_"):
            offered.append(name)
    known = f" Available: {', '.join(offered)}." if offered else ""
    raise InputError(f"{{model=}}{model}: {model.place} has no callable '{model.factory}'.{known}")


def _module_name(place: str) -> str:
    """Return the name of a module of a user, which for a file is not that of another module."""
    return f"dpmac_model_{Path(place).stem}" if place.endswith(".py") else place


def _imported(model: UserModel) -> ModuleType:
    """Import the file or module of a user's network. Raises InputError if that fails."""
    place = model.place
    if place.endswith(".py") and not Path(place).is_file():
        raise InputError(f"{{model=}}{model}: no such file: {place}.")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        loader = SourceFileLoader(_module_name(place), place)
        module = ModuleType(loader.name)
        module.__file__ = place
        sys.modules[loader.name] = module  # dataclasses look up their module there
        loader.exec_module(module)
        return module
    except (Exception, SystemExit) as failure:
        raise InputError(
            f"{{model=}}{model}: {place} cannot be imported: {what_failed(failure)}"
        ) from failure


def take_logits(network: nn.Module) -> None:
    """Make a network of transformers return its logits instead of an object that has them.

    Args:
        network: any network. One with a ``config`` gets a hook; others are unchanged.
    """
    if hasattr(network, "config"):
        network.register_forward_hook(_logits)


def _logits(_: nn.Module, __: Any, output: Any) -> Any:
    """Return the logits of an output; a hook."""
    return getattr(output, "logits", output)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every batch norm in a network with a group norm, and return the network.

    The group norm has the weight and bias of the batch norm.

    The number of groups is the largest divisor of the channels up to 32 that leaves at least two
    channels per group.

    Example:
        >>> without_batch_norm(nn.Sequential(nn.BatchNorm2d(64)))
        Sequential(
          (0): GroupNorm(32, 64, eps=1e-05, affine=True, bias=True)
        )

    Args:
        model: network, which is changed in place unless it is a batch norm itself.
    """
    for name, child in list(model.named_modules()):
        if not isinstance(child, MIXING_LAYERS):
            continue
        channels = child.num_features
        groups = max(1, min(32, channels // 2))
        while channels % groups != 0:
            groups -= 1
        norm = nn.GroupNorm(groups, channels, affine=child.affine)
        norm.weight, norm.bias = child.weight, child.bias
        if not name:
            return norm
        model.set_submodule(name, norm)
    return model
