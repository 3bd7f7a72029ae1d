"""User-supplied networks: import their factories, call them, and replace batch norm."""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.registry import UserModel
from dpmac_cli.torch_errors import what_failed


def build(model: UserModel, dataset: Dataset) -> nn.Module:
    """Call a factory with (shape, classes), or with nothing if it does not take two arguments.

    Raises:
        InputError: there is no such factory.
        ModelError: it fails, or does not return a module.
    """
    factory = _find(model)
    arguments = _arguments(factory, dataset)
    try:
        network = factory(*arguments)
    except (Exception, SystemExit) as failure:
        called = "(shape, classes)" if arguments else "()"
        raise ModelError(
            f"--model {model}: the factory, called with {called}, failed: {what_failed(failure)}"
        ) from failure
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"--model {model}: the factory gave no torch.nn.Module, but a value of type "
            f"{type(network).__name__}."
        )
    return network


def built_by(model: UserModel, dataset: Dataset) -> str:
    """Return how a built factory was called, as code: "net.py:Net((1, 28, 28), 10)"."""
    factory = getattr(sys.modules[_module_name(model.place)], model.factory)
    arguments = ", ".join(map(repr, _arguments(factory, dataset)))
    return f"{Path(model.place).name}:{model.factory}({arguments})"


def source_sum(model: UserModel) -> str:
    """Return SHA-256 of a built factory's source file and name. Raises OSError.

    Files that the source imports are not covered.
    """
    place = model.place
    file = place if place.endswith(".py") else inspect.getfile(sys.modules[place])
    return hashlib.sha256(Path(file).read_bytes() + f"\n{model.factory}".encode()).hexdigest()


def _arguments(factory: Callable[..., Any], dataset: Dataset) -> tuple[Any, ...]:
    try:
        inspect.signature(factory).bind(None, None)
    except (TypeError, ValueError):
        return ()
    return dataset.shape, len(dataset.classes)


def _find(model: UserModel) -> Callable[..., Any]:
    module = _imported(model)
    factory: Callable[..., Any] | None = getattr(module, model.factory, None)
    if callable(factory):
        return factory
    offered = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and callable(value)
        and not name.startswith("_")
    ]
    known = f" There are: {', '.join(offered)}." if offered else ""
    raise InputError(
        f"--model {model}: {model.place} has no '{model.factory}' that can be called.{known}"
    )


def _module_name(place: str) -> str:
    return f"dpmac_model_{Path(place).stem}" if place.endswith(".py") else place


def _imported(model: UserModel) -> ModuleType:
    """Import the module that a factory is in, by name or from a file."""
    place = model.place
    if place.endswith(".py") and not Path(place).is_file():
        raise InputError(f"--model {model}: there is no file {place}.")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        loader = SourceFileLoader(_module_name(place), place)
        module = ModuleType(loader.name)
        module.__file__ = place
        sys.modules[loader.name] = module  # where dataclasses look their module up
        loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        raise InputError(
            f"--model {model}: {place} cannot be imported: {what_failed(failure)}"
        ) from failure
    return module


def without_batch_norm(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Replace every batch norm by a group norm; return the model and the names of the layers.

    The new layers start at scale 1 and shift 0. The number of groups is the largest divisor of the
    channels up to 32 that leaves at least two channels per group.
    """
    replaced = []
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            most = max(1, min(32, child.num_features // 2))
            groups = next(g for g in range(most, 0, -1) if child.num_features % g == 0)
            norm = nn.GroupNorm(groups, child.num_features, affine=child.affine)
            if not name:
                return norm, ["the model itself"]
            model.set_submodule(name, norm)
            replaced.append(name)
    return model, replaced
