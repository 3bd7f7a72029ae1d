"""Which runs there are and how they went, read from public files alone. Loads no torch."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.data.schema import name_of
from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: States that no report tells: a process holds the run; it diverged; it ended without a word;
#: its files cannot be read, or are not as they were written.
RUNNING, DIVERGED, CUT_OFF, DAMAGED = "running", "diverged", "cut-off", "damaged"
#: What reading a file leads to that is not as dpmac writes it.
BROKEN = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
BROKEN_YAML = (OSError, yaml.YAMLError, *BROKEN)
#: Settings that are columns of their own, or change nothing about what is computed.
NOT_TOLD = (
    *("dataset", "optimizer", "delta", "no-dp"),
    *("device", "physical-batch", "compile", "diagnostics", "tensorboard", "plot"),
)


@dataclass(frozen=True)
class Entry:
    """A run. What is not known is None.

    Attributes:
        folder: of the run.
        state: as in its report, or one of those above.
        changed: when it last wrote a public file, in seconds since 1970.
        dataset, optimizer: names.
        private: whether it has a guarantee.
        epsilon: of the whole run, ``inf`` without a guarantee; as far as it was shown, where there
            is no report.
        delta, adjacency: of that epsilon.
        accuracy: on the test set, 0 to 1.
        seeded: whether a person chose a seed; known by reports alone.
        audit: whether canaries were trained on.
        settings: all that config.yaml keeps; empty where there is none that can be read.
    """

    folder: Path
    state: str
    changed: float
    dataset: str | None = None
    optimizer: str | None = None
    private: bool | None = None
    epsilon: float | None = None
    delta: float | None = None
    adjacency: str | None = None
    accuracy: float | None = None
    seeded: bool | None = None
    audit: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """What was found.

    Attributes:
        entries: the runs.
        foreign: folders with a file that is called as one of a run's, and is not.
    """

    entries: tuple[Entry, ...]
    foreign: int


def find_runs(roots: Iterable[Path]) -> Listing:
    """Every run in some folders, and in the folders below them.

    Folders within a run, hidden ones and links to folders that are no runs are not looked into.
    A folder that is not there, or cannot be read, holds nothing.
    """
    entries: dict[Path, Entry] = {}
    foreign: set[Path] = set()
    for root in roots:
        for where, is_run in _folders(root):
            if is_run:
                entries[where.resolve()] = _entry(where)
            elif any((where / name).is_file() for name in (folder.REPORT, folder.MODEL)):
                foreign.add(where.resolve())
    return Listing(tuple(entries.values()), len(foreign))


def _folders(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders from a root on down, and whether each is a run's; those in a run are left out."""
    is_run = _is_run(root)
    yield root, is_run
    if is_run:
        return
    try:
        below = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return
    for path in below:
        if path.is_symlink() and not _is_run(path):
            continue
        if not path.name.startswith("."):
            yield from _folders(path)


def _is_run(where: Path) -> bool:
    """Whether a folder is a run's, whole or damaged."""
    return (
        folder.is_configured(where)
        or _reported(where) is not None
        or ((where / folder.CHECKPOINTS).is_dir() and (where / folder.LOCK).is_file())
    )


def _entry(where: Path) -> Entry:
    changed = max(map(_changed, (where / folder.CONFIG, where / folder.METRICS)))
    try:
        return _read(where, max(changed, _changed(where / folder.REPORT)))
    except BROKEN_YAML:
        state = RUNNING if folder.in_use(where) else DAMAGED
        return Entry(where, state, changed or _changed(where))


def _changed(path: Path) -> float:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(where: Path, changed: float) -> Entry:
    """Raises what is in BROKEN_YAML where a file is damaged."""
    if folder.in_use(where):
        return _unreported(where, RUNNING, changed)
    told = folder.vouched(where, folder.REPORT)
    # While a run goes on, and if it is then killed, its report is of the time before: without a
    # checksum among those that are there.
    if told is None and ((where / folder.SUMS).exists() or not (where / folder.REPORT).exists()):
        return _unreported(where, CUT_OFF, changed)
    found = _reported(where)
    if told is False or found is None:
        raise ValueError(f"{folder.REPORT} is not as it was written")
    settings: Mapping[str, Any] = {}
    if folder.vouched(where, folder.CONFIG) is not False:
        with contextlib.suppress(*BROKEN_YAML):
            settings = _settings(where)
    return Entry(where, changed=changed, settings=settings, **found)


def _settings(where: Path) -> Mapping[str, Any]:
    """Return what config.yaml keeps. Raises what is in BROKEN_YAML."""
    return dict(yaml.safe_load((where / folder.CONFIG).read_bytes()))


def _reported(where: Path) -> Mapping[str, Any] | None:
    """What a report says of the fields of an entry; None if there is none of ours."""
    try:
        report = json.loads((where / folder.REPORT).read_bytes())
        price = report["privacy"]
        private = bool(price["private"])
        return {
            "state": str(report["state"]),
            "dataset": str(report["dataset"]["name"]),
            "optimizer": str(report["optimizer"]),
            "private": private,
            "epsilon": math.inf if price["epsilon"] is None else float(price["epsilon"]),
            "delta": float(price["delta"]) if private else None,
            "adjacency": str(price["adjacency"]) if private else None,
            "accuracy": float(report["test"]["accuracy"]),
            "seeded": bool(price["seed_policy"]["given"]),
            "audit": report.get("audit") is not None,
        }
    except (OSError, *BROKEN):
        return None


def _unreported(where: Path, state: str, changed: float) -> Entry:
    """A run without a report of all it did, by its settings and the epochs that it has shown.

    Raises what is in BROKEN_YAML where its settings are damaged.
    """
    if folder.vouched(where, folder.CONFIG) is False:
        raise ValueError(f"{folder.CONFIG} is not as it was written")
    settings = _settings(where)
    private = not settings.get("no-dp", False)
    shown = files.read_lines(where / folder.METRICS)
    scored = [line for line in shown if "test_accuracy" in line]
    last = scored[-1] if scored else {}
    if state == CUT_OFF and shown and shown[-1].get("diverged"):
        state = DIVERGED
    return Entry(
        where,
        state,
        changed,
        name_of(str(settings["dataset"])),
        str(settings["optimizer"]),
        private,
        last.get("epsilon") if private else math.inf,
        float(settings["delta"]) if private else None,
        SAMPLERS[settings["sampler"]].adjacency if private else None,
        last.get("test_accuracy"),
        audit="canaries" in settings,
        settings=settings,
    )


def told_apart(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Of each run the settings in which those of its data set and optimizer differ."""
    kinds: dict[tuple[str | None, str | None], list[Mapping[str, Any]]] = {}
    for entry in entries:
        kind = kinds.setdefault((entry.dataset, entry.optimizer), [])
        kind += [entry.settings] if entry.settings else []
    varied = {kind: _varied(settings) for kind, settings in kinds.items()}
    return [
        {name: e.settings[name] for name in varied[e.dataset, e.optimizer] if name in e.settings}
        for e in entries
    ]


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of those that differ, the order of the first that has each."""
    names = dict.fromkeys(name for each in settings for name in each if name not in NOT_TOLD)
    # A switch that has nothing to do with a run is not recorded: it is off.
    return [name for name in names if len({str(s.get(name, False)) for s in settings}) > 1]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts run-2 before run-10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


#: What runs may be sorted by, each so that what one looks for first comes first.
ORDERS: Mapping[str, Callable[[Entry], Any]] = {
    "age": lambda entry: -entry.changed,
    "name": lambda entry: _natural(entry.folder),
    "optimizer": lambda entry: entry.optimizer,
    "epsilon": lambda entry: entry.epsilon,
    "accuracy": lambda entry: None if entry.accuracy is None else -entry.accuracy,
}


def ordered(entries: Iterable[Entry], by: str, *, reverse: bool = False) -> list[Entry]:
    """Sorted by a key of :data:`ORDERS`, ties by name; where it is not known always last."""
    key = ORDERS[by]
    named = sorted(entries, key=lambda entry: _natural(entry.folder))
    known = [entry for entry in named if key(entry) is not None]
    unknown = [entry for entry in named if key(entry) is None]
    return [*sorted(known, key=key, reverse=reverse), *unknown]
