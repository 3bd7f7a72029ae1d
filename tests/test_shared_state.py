"""State that a process shares: nothing outlives its owner, and no library is left changed."""

import ast
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpmac_cli
from dpmac_cli import ArrayData, InputError, TrainingEvent, resolve, total_epsilon
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.array_file import ArrayFile
from dpmac_cli.data.loaders import load_data
from tests.conftest import every_optimizer
from tests.helpers import make_trainer

PACKAGE = Path(dpmac_cli.__file__).parent
#: Functions whose results the whole process keeps, and what they are.
CACHED = {
    "accounting.accountants._part": "at most 8 loss distributions, of public numbers",
    "accounting.accountants._priced": "numbers",
    "accounting.accountants._sampled_gaussian": "at most 4 loss distributions, of public numbers",
    "accounting.accountants.loss_distribution": "at most 2 loss distributions, of public numbers",
    "accounting.allocation.likelihood_ratios": "at most 2 distributions, of public numbers",
    "accounting.calibration.calibrate_noise": "numbers",
    "accounting.accountants.delta_curve": "at most 4 curves, of public numbers",
    "accounting.risk.assess_risk": "numbers and sentences",
    "accounting.selection._log_weight": "numbers",
    "accounting.selection._surcharge": "numbers",
    "randomness.layers.devices": "the accelerators of the machine",
    "release.card.templates": "the templates of cards",
    "config.fields.options": "tables of flags, a fixed number",
}


def cached_functions() -> Iterator[str]:
    """Functions at the top level of a module that keep their results."""
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                "cache" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield f"{module}.{node.name}"


def test_only_small_constants_are_kept_by_the_process() -> None:
    assert set(cached_functions()) == CACHED.keys()


def readers() -> list[ArrayFile]:
    gc.collect()
    return [part for part in gc.get_objects() if type(part) is ArrayFile]


def a_plan() -> TrainPlan:
    records = ArrayData(
        x=np.zeros((20, 3), np.float32), y=np.arange(20) % 2, classes=["a", "b"], low=0, high=1
    )
    return resolve(dataset=records, sigma=1).plan


@pytest.mark.long
def test_records_are_freed_with_their_plan() -> None:
    before = len(readers())
    plan = a_plan()
    assert len(readers()) == before + 1
    data = load_data(plan.data.source, plan.data.folder, torch.device("cpu"), found=plan.data.found)
    assert len(readers()) == before + 1  # read once
    del plan
    assert len(readers()) == before
    assert data.train.size > 0


@pytest.mark.privacy
def test_facts_that_are_sent_to_other_processes_contain_no_records() -> None:
    found = a_plan().data.found
    copy = pickle.loads(pickle.dumps(found))
    assert found.reader is not None
    assert copy.reader is None
    assert copy == found


@pytest.mark.long
def test_importing_the_package_changes_no_library() -> None:
    code = """
        import importlib, logging, os, pkgutil, signal, sys, types, warnings
        import dp_accounting.pld.privacy_loss_distribution, dp_accounting.rdp, filelock, jinja2
        import lazy_loader, matplotlib.figure, numpy, PIL.Image, pyarrow.csv, pydantic, ray, rich
        import safetensors.torch, scipy.stats, sklearn.metrics, torch, torch.func
        import torch.export, torch.multiprocessing, torchvision, typer, yaml

        def shared():
            kept = {("environment", name): text for name, text in os.environ.items()}
            kept["warnings"] = tuple(map(str, warnings.filters))
            kept |= {("signal", n): signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
            kept |= {("level", name): logging.getLogger(name).level for name in known_loggers}
            kept["torch"] = (
                torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
                torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32,
                torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(),
            )
            kept["numpy"] = tuple(sorted(numpy.geterr().items()))
            return kept

        def attributes():
            for module in known_modules:
                for name, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == module.__name__:
                        for inner, part in vars(value).items():
                            yield (module.__name__, name, inner), part
                    if not isinstance(value, (types.ModuleType, int, dict, list, set, tuple)):
                        yield (module.__name__, name), value

        LIBRARIES = (
            "torch", "numpy", "scipy", "sklearn", "matplotlib", "PIL", "pyarrow", "pydantic", "ray",
            "rich", "typer", "click", "yaml", "jinja2", "dp_accounting", "torchvision",
            "safetensors", "filelock",
        )
        known_modules = [
            module for name, module in list(sys.modules.items())
            if name.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType)
        ]
        known_loggers = ["", "absl", *logging.root.manager.loggerDict]
        # typer and pydantic keep caches on classes, and torch.nn.Module's own are filled lazily.
        before, as_it_was = shared(), dict(attributes())
        import dpmac_cli
        for found in pkgutil.walk_packages(dpmac_cli.__path__, "dpmac_cli."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        changes = [name for name, value in shared().items() if before.get(name) != value]
        changes += [n for n, value in attributes() if n in as_it_was and as_it_was[n] is not value]
        print(changes)
        sys.exit(bool(changes))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


def test_costs_by_rdp_leave_the_loggers_of_the_program_alone() -> None:
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        total_epsilon((TrainingEvent(0.01, 1.1, 17, "poisson", 100),), 1e-5, "rdp")
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


def test_ray_is_as_it_was_once_the_study_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_cluster = pytest.importorskip("dpmac_cli.studies.ray_cluster")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    worker = ray_cluster.ray._private.worker
    seen = []

    def init(*_: Any, **__: Any) -> None:
        seen.append((os.environ["RAY_USAGE_STATS_ENABLED"], worker._worker_logs_enabled))
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InputError, match="nobody is there"), ray_cluster.connected("local"):
        pass
    assert seen == [("0", False)]
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    assert worker._worker_logs_enabled
    assert signal.getsignal(signal.SIGTERM) is handler


def frozen_parts(value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the frozen dataclasses within an object, with the name of their field."""
    if id(value) in seen or isinstance(value, (Tensor, type)):
        return
    seen.add(id(value))
    parameters: Any = getattr(value, "__dataclass_params__", None)
    if is_dataclass(value) and parameters.frozen:
        for field in fields(value):
            if isinstance(part := getattr(value, field.name), Tensor):
                yield f"{type(value).__name__}.{field.name}", part
    inside = list(value.values()) if isinstance(value, dict) else []
    inside += list(value) if isinstance(value, (list, tuple)) else []
    if type(value).__module__.startswith("dpmac_cli"):
        inside += list(getattr(value, "__dict__", {}).values())
    for part in inside:
        yield from frozen_parts(part, seen)


@every_optimizer
def test_what_is_called_frozen_is_not_changed_by_a_step(name: str) -> None:
    trainer = make_trainer(name)
    trainer.step()
    before = [(of, part, part._version) for of, part in frozen_parts(trainer, set())]
    assert before
    trainer.step()
    changed = [of for of, part, version in before if part._version != version]
    # A geometry returns the next region in the memory of the last.
    assert [of for of in changed if not of.startswith("Ellipsoid.")] == []
