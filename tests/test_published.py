"""What a run publishes is searched for what it must keep to itself."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dpmac_cli import resume
from dpmac_cli.config.networks import UserModel, parse_model
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder
from tests import secret_search as search
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import PUBLIC_FILES, SEED, after, digits_config
from tests.secret_search import Secrets
from tests.tiers import one_in

#: Batches of a size that no public number is near to: a draw deviates by 19 on average.
BATCH = 700


def names(where: Path) -> set[str]:
    found = {path.relative_to(where) for path in search.published(where)}
    return {str(path) for path in found if path.parts[0] not in (folder.LOCK, folder.CHECKPOINTS)}


@pytest.mark.promise("published")
@pytest.mark.parametrize(
    ("optimizer", "seed"), one_in(5, itertools.product(OPTIMIZER_NAMES, [None, SEED]))
)
def test_no_secret_is_in_any_published_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str, seed: int | None
) -> None:
    """Stopped, and resumed here and in another folder: all files, also checkpoints."""
    look_through(monkeypatch, tmp_path, seed, optimizer=optimizer)


def look_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int | None, **flags: Any
) -> None:
    """Search a run, and if anything turns up, a second one.

    Of the thousands of pairs of a secret and a published number, one in some hundred runs agrees
    to six digits by chance, as a training loss with a test loss. What leaks is there again. The
    keys are fixed, so the outcome is the same each time.
    """
    leaks = published_secrets(monkeypatch, tmp_path / "first", seed, **flags)
    if leaks:
        other = None if seed is None else seed + 1
        leaks &= published_secrets(monkeypatch, tmp_path / "second", other, instead=1, **flags)
    assert leaks == set()


def published_secrets(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seed: int | None,
    instead: int = 0,
    **flags: Any,
) -> set[str]:
    """What is found of a run that is stopped, and resumed here and in another folder."""
    with monkeypatch.context() as patched:
        secrets = search.record(patched, tmp_path, seed, instead)
        config = digits_config(seed=seed, batch_size=BATCH, steps=4, out=tmp_path / "run", **flags)
        where = finish(train_plan(config, after(2))).folder
        assert names(where) == PUBLIC_FILES
        leaks = {*secrets.found(where)}
        whole = resume(where, {})
        assert [event["steps"] for event in whole.report["events"]] == [2, 2]
        leaks |= {*secrets.found(where)}
        longer = resume(where, {"steps": "6", "out": tmp_path / "longer"})
    assert [event["steps"] for event in longer.report["events"]] == [2, 2, 2]
    for each in (where, longer.folder):
        assert names(each) == PUBLIC_FILES
        leaks |= {*secrets.found(each)}
    return leaks


# Would it be found?


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Secrets]:
    """A run without a secret in its files, and the secrets."""
    tmp_path = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as monkeypatch:
        secrets = search.record(monkeypatch, tmp_path, SEED)
        config = digits_config(seed=SEED, batch_size=BATCH, steps=2, out=tmp_path / "run")
        where = finish(train_plan(config)).folder
    assert secrets.found(where) == []
    return where, secrets


def first(found: Mapping[Any, str], what: str) -> Any:
    return next(key for key, kind in found.items() if kind == what)


def as_json(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), key: value}, indent=2).encode()


def as_tensor(values: Any) -> Callable[[bytes], bytes]:
    def write(content: bytes) -> bytes:
        tensors = safetensors.torch.load(content)
        return safetensors.torch.save({**tensors, "extra": torch.tensor(values)})

    return write


def appended(more: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content + more


#: Into which file something leaks, what it is, and how.
Leak = tuple[str, str, Callable[[Secrets], Callable[[bytes], bytes]]]


def reported(key: str, what: str) -> Leak:
    """A number in the report."""
    return folder.REPORT, what, lambda s: as_json(key, first(s.numbers, what))


def behind(name: str, what: str) -> Leak:
    """Bytes at the end of a file."""
    return name, what, lambda s: appended(first({**s.texts, **s.windows}, what))


LEAKS: Mapping[str, Leak] = {
    "seed in hex": (folder.CONFIG, "the seed", lambda s: appended(f"# {SEED:x}\n".encode())),
    "seed as raw bytes": (folder.MODEL, "the seed", lambda s: as_tensor([SEED])),
    "key of the noise": behind(folder.METRICS, "the noise key"),
    "size of a batch in words": (
        folder.CARD,
        "the size of a batch",
        lambda s: appended(b"drew %d records" % first(s.numbers, "the size of a batch")),
    ),
    "a mean loss": reported("loss", "mean of losses"),
    "one norm": reported("norm", "per-sample norms"),
    "part of an un-noised sum": behind(folder.MODEL, "an un-noised sum"),
    "path": behind(folder.CONFIG, "an absolute path"),
}


@pytest.mark.promise("published")
@pytest.mark.parametrize(("name", "what", "leak"), LEAKS.values(), ids=LEAKS.keys())
def test_a_leak_would_be_found(
    searched: tuple[Path, Secrets],
    name: str,
    what: str,
    leak: Callable[[Secrets], Callable[[bytes], bytes]],
) -> None:
    where, secrets = searched
    file = where / name
    before = file.read_bytes()
    try:
        file.write_bytes(leak(secrets)(before))
        assert f"{name}: {what}" in secrets.found(where)
    finally:
        file.write_bytes(before)


@pytest.mark.promise("published")
def test_the_name_of_a_network_of_your_own_has_no_folder() -> None:
    model = parse_model("/home/somebody/nets/net.py:make")
    assert isinstance(model, UserModel)
    assert model.name == "net.py:make"
