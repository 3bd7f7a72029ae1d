"""dpmac doctor, as typed and as seen."""

import builtins
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli import __version__
from dpmac_cli.cli import doctor
from dpmac_cli.data.loaders import files_of, missing_files
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.runs.report import PACKAGES
from tests.digits_runs import contents
from tests.typed import dpmac


def told(*args: str | Path) -> dict[str, Any]:
    """What --json prints."""
    result = dpmac("doctor", *args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    body = json.loads(result.stdout)
    assert isinstance(body, dict)
    return body


def words(*args: str | Path) -> dict[str, str]:
    """What a person sees, by what each line is about; lines about the same are joined."""
    result = dpmac("doctor", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, str] = {}
    about = ""
    for line in result.stdout.splitlines():
        name, text = line[:10].strip(), line[10:].strip()
        about = name or about
        found[about] = f"{found.get(about, '')} {text}".strip()
    return found


def test_versions_of_all_that_a_run_depends_on() -> None:
    versions = told()["versions"]
    assert set(PACKAGES) | {"python", "cryptography", "rich", "typer", "matplotlib"} <= set(
        versions
    )
    assert versions.pop("dpmac") == __version__
    versions.pop("python")
    assert versions == {name: version(name) for name in versions}
    assert f"torch {version('torch')}" in words()["versions"]


def test_the_machine_as_torch_sees_it() -> None:
    devices = told()["devices"]
    assert devices["threads"] == torch.get_num_threads()
    assert devices["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert devices["cores"] >= 1
    assert len(devices["cuda"]) == torch.cuda.device_count()
    assert "fault" not in devices


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, total_memory = "Big Card", 80 * 1024**3

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Card)
    assert told()["devices"]["cuda"] == [{"name": "Big Card", "memory": 80 * 1024**3}] * 2
    assert "name Big Card, memory 80.0 GiB; name Big Card" in words()["devices"]


def test_data_sets_are_found_by_their_files(tmp_path: Path) -> None:
    for name, kept in (("mnist", None), ("svhn", -1)):
        for file in files_of(name, tmp_path / "data")[:kept]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    before = contents(tmp_path)
    body = told("--data-dir", "data")
    kinds = {"digits": "built-in", "mnist": "here", "svhn": "partly"}
    assert body["datasets"] == {name: kinds.get(name, "absent") for name in DATASETS}
    assert body["data"]["folder"] == "data"
    shown = words("--data-dir", "data")["datasets"]
    assert "mnist here" in shown
    assert "svhn partly" in shown
    assert "fashion-mnist absent" in shown
    assert contents(tmp_path) == before, "looking changes nothing"


def test_the_environment_says_where_data_and_features_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPMAC_DATA_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(tmp_path / "there"))
    body = told()
    assert body["data"]["folder"] == str(tmp_path / "here")
    assert body["features"]["folder"] == str(tmp_path / "there" / "features")


@pytest.mark.real_data
def test_data_that_can_be_loaded_is_found(real_data_dir: Path) -> None:
    for name in ("mnist", "cifar10"):
        assert missing_files(name, real_data_dir)[0] == 0


def test_the_home_folder_is_not_spelt_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home" / "a.person.of.note"
    home.mkdir(parents=True)
    for name in ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    result = dpmac("doctor", "--json")
    assert json.loads(result.stdout)["data"]["folder"] == "~/.cache/dpmac"
    for output in (result.stdout, dpmac("doctor").stdout):
        assert "a.person.of.note" not in output
        assert "~/.cache/dpmac/features" in output


# What is missing


def without_module(module: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def refused(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == module:
                raise ImportError(f"{module}: a library is damaged\nand more")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refused)

    return patch


def without_package(package: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def found(name: str) -> str:
            if name == package:
                raise PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(doctor, "version", found)

    return patch


def broken_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "device_count", fail)


MISSING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "torch": (without_module("torch"), "devices", "fault torch: a library is damaged"),
    "driver": (broken_cuda, "devices", "fault the driver is too old"),
    "cuda": (
        lambda patch: patch.setattr(torch.cuda, "device_count", lambda: 0),
        "devices",
        "cuda none",
    ),
    "package": (without_package("scipy"), "versions", "scipy missing"),
    "ray": (without_package("ray"), "extras", "ray missing"),
    "slurm": (without_package("submitit"), "extras", "submitit missing"),
    "disk": (
        lambda patch: patch.setattr(os, "access", lambda path, mode: False),
        "runs",
        "writable False",
    ),
    "a file for a folder": (
        lambda patch: Path("runs").symlink_to("/dev/null"),
        "runs",
        "writable False",
    ),
}


@pytest.mark.parametrize(("patch", "about", "text"), MISSING.values(), ids=MISSING.keys())
def test_what_is_missing_is_said_and_no_failure(
    patch: Callable[[pytest.MonkeyPatch], None],
    about: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch)
    assert text in words()[about]
    assert told()


def test_what_is_there_is_said() -> None:
    found = words()["runs"]
    assert "writable True, free" in found
    assert found.endswith("GiB")
