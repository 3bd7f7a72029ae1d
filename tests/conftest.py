"""Fixtures shared by all tests."""

import copy
import functools
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli import errors
from dpmac_cli.config import plan
from dpmac_cli.data import published
from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.errors import as_flags
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.run import Run
from dpmac_cli.runs import prepare
from dpmac_cli.studies import local, search
from dpmac_cli.tasks import intervals
from dpmac_cli.training.chunks import ChunkedSum
from tests.digits_runs import train_digits
from tests.promises import PROMISES
from tests.typed import Here

OPTIMIZER_NAMES = tuple(OPTIMIZERS)
every_optimizer = pytest.mark.parametrize("name", OPTIMIZER_NAMES)


LEFT_OUT = pytest.StashKey[int]()
#: Tests of privacy promises that have no short case.
LONG_ALONE = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--long`` and ``--weekly``. Without them, tests with these marks are deselected."""
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")
    parser.addoption(
        "--weekly", action="store_true", help="run the tests marked long or weekly, too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without collecting garbage, of which there is none, and never look there for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def name_of(item: pytest.Item) -> str:
    """Return the file and the name of a test, without the parameters of the case."""
    return item.nodeid.partition("[")[0]


def later_marks(item: pytest.Item) -> set[str]:
    """Return which of the marks a test has that leave it out of the short tests."""
    return {name for name in ("long", "weekly") if item.get_closest_marker(name)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long and weekly tests, except by ``--long``, ``--weekly``, or if named by id."""
    for (name,) in {mark.args for item in items for mark in item.iter_markers("promise")}:
        assert name in PROMISES, f"tests/promises.py has no promise {name}"
    private = [item for item in items if item.get_closest_marker("promise")]
    short = {name_of(item) for item in private if not later_marks(item)}
    config.stash[LONG_ALONE] = {name_of(item) for item in private} - short
    # It takes minutes: at the end, a worker would be left alone with it.
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    named = any("::" in name for name in config.invocation_params.args)
    if config.getoption("--weekly") or named:
        return
    run = {"long"} if config.getoption("--long") else set[str]()
    later = [item for item in items if later_marks(item) - run]
    left_out = set(later)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=later)
    config.stash[LEFT_OUT] = len(later)
    if hasattr(config, "workeroutput"):  # every worker of xdist collects all tests
        config.workeroutput["left_out"] = len(later)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep how many tests a worker of xdist deselected, for the summary."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests were left out, and how to run them."""
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        kind = "weekly" if config.getoption("--long") else "long"
        terminalreporter.write_line(f"{count} {kind} tests were not run. Run all: pytest --weekly")


@pytest.fixture(autouse=True)
def _messages_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are read as a command shows them; test_library.py reads those of a program."""
    monkeypatch.setattr(errors, "as_keywords", as_flags)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written under the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Several threads on tiny tensors cost more than they bring, above all on a busy machine."""
    torch.set_num_threads(1)


#: Modules in which the number of resamples of an interval matters: their metrics, and the pages.
RESAMPLED = ("tests.test_metrics", "tests.test_docs", "tests.test_docstrings")


@pytest.fixture(autouse=True)
def _few_resamples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resample for a fraction of a second: by default ``dpmac eval`` takes two for it."""
    if request.module.__name__ not in RESAMPLED:
        monkeypatch.setattr(intervals, "RESAMPLES", (20, 40))
        monkeypatch.setattr(intervals, "NUMBERS", intervals.NUMBERS // 10)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Optimizers that a test registers are of that test alone."""
    known = dict(OPTIMIZERS)
    yield
    OPTIMIZERS.clear()
    OPTIMIZERS.update(known)


REAL_FILES = ("MNIST/raw/train-images-idx3-ubyte", "cifar-10-batches-py/data_batch_1")


@pytest.fixture(scope="session")
def real_data_dir() -> Path:
    """Where MNIST and CIFAR-10 lie. On CI their absence is a failure; elsewhere a skip."""
    named = os.environ.get("DPMAC_DATA_DIR")
    folder = Path(named) if named else Path.home() / ".cache" / "dpmac"
    missing = [file for file in REAL_FILES if not (folder / file).exists()]
    if not missing:
        return folder
    reason = f"{' and '.join(missing)} not in {folder}: set DPMAC_DATA_DIR to where they lie"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what is computed once apart from what the person who runs the tests has kept."""
    os.environ["DPMAC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting() -> Iterator[None]:
    """Tests neither wait for the disk, nor read the file of digits again and again.

    What a process has written is not lost when it is killed, only when the machine is.
    """
    read = functools.cache(published._digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(published, "_digits", lambda: copy.deepcopy(read()))
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on digits, which tests read and do not change."""
    return train_digits(out=tmp_path_factory.mktemp("finished") / "run", epochs=2)


#: How a network runs so that no row rounds another, by network and rows.
TRIED: dict[Any, Any] = {}
#: Whose networks differ if they are written otherwise: packages, and tests with few of their own.
KNOWN = (
    *("torch.nn", "dpmac_cli", "transformers"),
    *("tests.test_private_step", "tests.test_recorded_sum"),
)


@pytest.fixture(autouse=True)
def _rows_tried_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second goes into finding how rows of a tiny network are alike: once is enough.

    Networks with code of their own, and tests marked ``trial``, go through it each time.
    """
    if request.node.get_closest_marker("trial"):
        return
    tried = ChunkedSum._tried

    def once(sums: ChunkedSum, run: Any, base: Any) -> Any:
        modules = list(sums.model.modules())
        if not all(type(m).__module__.startswith(KNOWN) for m in modules):
            return tried(sums, run, base)
        shapes = [(*x.shape, x.dtype, x.device) for x in tensors_in(base)]
        of = sums.per_sample.views, sums.per_sample.by_rows, sums.theta.dtype, sums.chunk
        hooks = sum(len(m._forward_hooks) for m in modules)
        key = repr((repr(sums.model), hooks, of, shapes, torch.get_num_threads()))
        if key not in TRIED:
            TRIED[key] = tried(sums, run, base)
        return TRIED[key]

    monkeypatch.setattr(ChunkedSum, "_tried", once)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what one test computes once, apart from that of the others."""
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rows"


@pytest.fixture
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose noise without computing its cost, which takes seconds, where it does not matter.

    A trial of a search has half the target.
    """
    monkeypatch.setattr(plan, "calibrate_noise", lambda *of, **_: 8 / of[2])
    monkeypatch.setattr(plan, "total_epsilon", lambda *_: 1.0)
    monkeypatch.setattr(search, "calibrate_search", lambda *of: of[2] / 2)


@pytest.fixture
def unvalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the validation of networks, which takes seconds, where it is not what is tested."""
    monkeypatch.setattr(prepare, "check_model", lambda *_, **__: None)


@pytest.fixture
def features_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every record the features of the first: those of all of them take minutes."""

    def featured(parts: FrozenFeatures, data: Data, *_: Any) -> Data:
        first = parts.features(data.standardised(data.train.images[:1]))

        def split(part: Split) -> Split:
            features = first.expand(len(part), *first.shape[1:])
            return Split(features, part.labels, units=part.units)

        return data.replaced_by(map(split, data.splits))

    monkeypatch.setattr(prepare, "featured", featured)


@pytest.fixture
def studies_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the runs of a study in this process; tests/cli/test_compare.py has real ones."""
    monkeypatch.setattr(local, "Command", Here)
