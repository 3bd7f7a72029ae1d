"""List runs and how they ended, from their public files alone. Loads no torch."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.data.schema import name_of
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.runs.report_file import read_report
from dpmac_cli.storage import files

#: States that no report has: a process holds the run; it diverged; it ended without a report; its
#: files cannot be read or were changed.
RUNNING, DIVERGED, CUT_OFF, DAMAGED = "running", "diverged", "cut-off", "damaged"
#: Exceptions raised while reading a damaged file; pydantic's are ValueErrors.
DAMAGE = (InputError, OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run. Unknown values are None.

    Attributes:
        state: as in its report, or one of the states above.
        changed: time of the last write to a public file, in seconds since 1970.
        epsilon: ``inf`` without privacy; of the last evaluated epoch if there is no report, as is
            the accuracy (0 to 1).
        seeded: whether the user chose a seed; only a report tells.
        settings: contents of config.yaml; empty if it cannot be read.
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


class _Config(BaseModel):
    dataset: str
    optimizer: str
    sampler: str
    no_dp: bool = Field(False, alias="no-dp")


class _Line(BaseModel):
    epsilon: float | None = None
    test_accuracy: float | None = None
    diverged: bool = False


def find_runs(roots: Iterable[Path]) -> list[Entry]:
    """Return every run in some folders and below them.

    Folders within a run, hidden folders and links to folders that are not runs are skipped, as are
    folders that do not exist or cannot be read.
    """
    found = {where.resolve(): where for root in roots for where in _runs_below(root)}
    return [_entry(where) for where in found.values()]


def _runs_below(root: Path) -> Iterator[Path]:
    if _is_run(root):
        yield root
        return
    below: list[Path] = []
    with contextlib.suppress(OSError):
        below = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())
    for path in below:
        if not path.name.startswith(".") and (not path.is_symlink() or _is_run(path)):
            yield from _runs_below(path)


def _is_run(where: Path) -> bool:
    """Return whether a folder is a run's, whole or damaged."""
    with contextlib.suppress(*DAMAGE):
        if (where / folder.CHECKPOINTS).is_dir() and (where / folder.LOCK).is_file():
            return True
        if folder.is_configured(where):
            return True
        # Any report, also one that cannot be read: what it cost is not to be overlooked.
        report = json.loads((where / folder.REPORT).read_bytes())
        return {"schema_version", "privacy"} <= set(report)
    return False


def _entry(where: Path) -> Entry:
    public = (folder.CONFIG, folder.METRICS, folder.REPORT)
    changed = max(_changed(where / name) for name in public) or _changed(where)
    try:
        return Entry(folder=where, changed=changed, **_read(where))
    except DAMAGE:
        state = RUNNING if folder.in_use(where) else DAMAGED
        return Entry(folder=where, changed=changed, state=state)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # there is none
        return 0.0


def _read(where: Path) -> dict[str, Any]:
    """Return what is known of a run, as fields of :class:`Entry`. Raises ``DAMAGE``."""
    if folder.in_use(where):
        return _unreported(where, RUNNING)
    intact = folder.vouched(where, folder.REPORT)
    # A resumed run that was killed has an old report, which is not among its checksums.
    if intact is None and ((where / folder.SUMS).exists() or not (where / folder.REPORT).exists()):
        return _unreported(where, CUT_OFF)
    if intact is False:
        raise ValueError(f"{folder.REPORT} does not match its checksum")
    report = read_report(where)
    found = report.model_dump(include={field.name for field in fields(Entry)})
    found["epsilon"] = math.inf if report.epsilon is None else report.epsilon
    found["audit"] = report.audit is not None
    with contextlib.suppress(*DAMAGE):
        found["settings"] = _settings(where)
    return found


def _settings(where: Path) -> dict[str, Any]:
    """Return the contents of config.yaml. Raises ``DAMAGE``."""
    if folder.vouched(where, folder.CONFIG) is False:
        raise ValueError(f"{folder.CONFIG} does not match its checksum")
    return dict(yaml.safe_load((where / folder.CONFIG).read_bytes()))


def _unreported(where: Path, state: str) -> dict[str, Any]:
    """Return what settings and metrics say of a run without a report. Raises ``DAMAGE``."""
    settings = _settings(where)
    config = _Config.model_validate(settings)
    shown = [_Line.model_validate(line) for line in files.read_lines(where / folder.METRICS)]
    last = next((line for line in reversed(shown) if line.test_accuracy is not None), _Line())
    diverged = state == CUT_OFF and bool(shown) and shown[-1].diverged
    return {
        "state": DIVERGED if diverged else state,
        "dataset": name_of(config.dataset),
        "optimizer": config.optimizer,
        "private": not config.no_dp,
        "epsilon": math.inf if config.no_dp else last.epsilon,
        "delta": None if config.no_dp else float(settings["delta"]),
        "adjacency": None if config.no_dp else SAMPLERS[config.sampler].adjacency,
        "accuracy": last.test_accuracy,
        "audit": "canaries" in settings,
        "settings": settings,
    }
