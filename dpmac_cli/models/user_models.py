"""A person's own network: ``package.module:factory`` or ``file.py:factory``."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from torch import nn

from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.torch_errors import what_failed


def is_factory(name: str) -> bool:
    """Whether a model's name means a factory."""
    return ":" in name


def build(spec: str, dataset: Dataset) -> nn.Module:
    """Call a factory: with the shape of an image and the number of classes, or with nothing.

    Raises:
        InputError: there is no such factory.
        ModelError: it fails, or gives something else than a module.
    """
    factory = _find(spec)
    arguments = _arguments(factory, dataset)
    try:
        model = factory(*arguments)
    except (Exception, SystemExit) as failure:
        called = "(shape, classes)" if arguments else "()"
        raise ModelError(
            f"--model {spec}: the factory, called with {called}, failed: {what_failed(failure)}"
        ) from failure
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"--model {spec}: the factory gave no torch.nn.Module, but a value of type "
            f"{type(model).__name__}."
        )
    return model


def built_by(spec: str, dataset: Dataset) -> str:
    """Return how a built factory was called, as code: "net.py:Net((1, 28, 28), 10)"."""
    place, _, name = spec.rpartition(":")
    arguments = _arguments(getattr(sys.modules[_module_name(place)], name), dataset)
    return f"{spec.rpartition('/')[2]}({', '.join(map(repr, arguments))})"


def source_sum(spec: str) -> str:
    """SHA-256 of the file that a factory is in, once built, and of the factory's name.

    Of what that file imports nothing is known. Raises OSError.
    """
    place, _, name = spec.rpartition(":")
    file = place if place.endswith(".py") else inspect.getfile(sys.modules[place])
    return hashlib.sha256(Path(file).read_bytes() + f"\n{name}".encode()).hexdigest()


def _arguments(factory: Callable[..., Any], dataset: Dataset) -> tuple[Any, ...]:
    """The shape and the number of classes, or nothing where it does not take two arguments."""
    try:
        inspect.signature(factory).bind(None, None)
    except (TypeError, ValueError):
        return ()
    return dataset.shape, len(dataset.classes)


def _find(spec: str) -> Callable[..., Any]:
    place, _, name = spec.rpartition(":")
    module = _module(spec, place)
    factory = getattr(module, name, None)
    if not callable(factory):
        offered = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
            and callable(value)
            and not key.startswith("_")
        ]
        known = f" There are: {', '.join(offered)}." if offered else ""
        raise InputError(f"--model {spec}: {place} has no '{name}' that can be called.{known}")
    return factory  # type: ignore[no-any-return]


def _module_name(place: str) -> str:
    return f"dpmac_model_{Path(place).stem}" if place.endswith(".py") else place


def _module(spec: str, place: str) -> Any:
    """Import a module by name, or from a file."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise InputError(f"--model {spec}: there is no file {place}.")
        name = _module_name(place)
        loader = SourceFileLoader(name, place)
        described = importlib.util.spec_from_loader(name, loader)
        assert described is not None  # noqa: S101
        module = importlib.util.module_from_spec(described)
        sys.modules[name] = module  # where dataclasses and the like look their module up
        loader.exec_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as failure:
        raise InputError(
            f"--model {spec}: {place} cannot be imported: {what_failed(failure)}"
        ) from failure
    return module


def without_batch_norm(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A model with group norm in the place of every batch norm, and the names of those places.

    The new layers have as many channels and start at scale 1 and shift 0; the number of groups is
    the largest divisor of the channels up to 32 that leaves at least two channels a group.
    """
    swapped = []
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            most = max(1, min(32, child.num_features // 2))
            groups = next(g for g in range(most, 0, -1) if child.num_features % g == 0)
            norm = nn.GroupNorm(groups, child.num_features, affine=child.affine)
            if not name:
                return norm, ["the model itself"]
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, norm)
            swapped.append(name)
    return model, swapped
