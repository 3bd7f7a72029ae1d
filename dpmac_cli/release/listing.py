"""List runs and how they ended, from their public files alone. Loads no torch."""

import contextlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.report import PrintableText, read_report
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.tasks.known import headline_in

#: States that no report has: a process holds the run; it diverged; it ended without a report; its
#: files cannot be read or were changed.
RUNNING, DIVERGED, CUT_OFF, DAMAGED = "running", "diverged", "cut-off", "damaged"
#: Exceptions raised while reading a damaged file; pydantic's are ValueErrors.
DAMAGE = (*folder.BROKEN, InputError)
#: Settings with a column of their own, and those that do not change the result.
NOT_TOLD = frozenset({"dataset", "optimizer", "delta", "device", "physical-batch", "data-dir"})
#: Hyperparameters as config.yaml writes them, which lists those of all optimizers.
OF_OPTIMIZERS = frozenset(n.replace("_", "-") for kind in OPTIMIZERS.values() for n in kind.used())


class ListedRun(BaseModel, frozen=True):
    """A run in a list. Unknown values are None.

    Attributes:
        state: as in its report, or one of the states above.
        changed: time of the last write to a public file, in seconds since 1970.
        epsilon: ``inf`` without privacy; of the last evaluated epoch if there is no report, as is
            the score.
        metric, score: name of the task's headline metric, and its value.
        seeded: whether the user chose a seed; only a report tells.
        settings: contents of config.yaml; empty if it cannot be read.
    """

    folder: Path
    state: str
    changed: float
    dataset: PrintableText | None = None
    optimizer: PrintableText | None = None
    private: bool | None = None
    epsilon: float | None = None
    delta: float | None = None
    metric: str | None = None
    score: float | None = None
    seeded: bool | None = None
    audit: bool | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


def find_runs(roots: Iterable[Path]) -> list[ListedRun]:
    """Return every run in some folders and below them, the newest first.

    Folders within a run, hidden folders and links to folders that are not runs are skipped, as are
    folders that do not exist or cannot be read.
    """
    found = {where.resolve(): where for root in roots for where in _runs_below(root)}
    return sorted(map(_listed, found.values()), key=lambda run: -run.changed)


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
        # Any report, also one that cannot be read, so that what it cost is not overlooked.
        report = json.loads((where / folder.REPORT).read_bytes())
        return {"schema_version", "privacy"} <= set(report)
    return False


def _listed(where: Path) -> ListedRun:
    public = (folder.CONFIG, folder.METRICS, folder.REPORT)
    changed = max(_changed(where / name) for name in public) or _changed(where)
    try:
        return ListedRun(folder=where, changed=changed, **_read(where))
    except DAMAGE:
        state = RUNNING if folder.in_use(where) else DAMAGED
        return ListedRun(folder=where, changed=changed, state=state)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # there is none
        return 0.0


def _read(where: Path) -> dict[str, Any]:
    """Return what is known of a run, as fields of :class:`ListedRun`. Raises ``DAMAGE``."""
    if folder.in_use(where):
        return _unreported(where, RUNNING)
    intact = folder.vouched(where, folder.REPORT)
    # A resumed run that was killed has an old report, which is not among its checksums.
    if intact is None and ((where / folder.SUMS).exists() or not (where / folder.REPORT).exists()):
        return _unreported(where, CUT_OFF)
    if intact is False:
        raise ValueError(f"{folder.REPORT} does not match its checksum")
    report = read_report(where)
    privacy, (metric, score) = report.privacy, report.score
    settings: dict[str, Any] = {}
    with contextlib.suppress(*DAMAGE):
        settings = _settings(where)
    return {
        "state": report.state,
        "dataset": report.dataset.name,
        "optimizer": report.optimizer,
        "private": privacy.private,
        "epsilon": math.inf if privacy.epsilon is None else privacy.epsilon,
        "delta": privacy.delta,
        "metric": metric.name,
        "score": score,
        "seeded": privacy.seed_policy.given,
        "audit": report.audit is not None,
        "settings": settings,
    }


def _settings(where: Path) -> dict[str, Any]:
    """Return the contents of config.yaml. Raises ``DAMAGE``."""
    if folder.vouched(where, folder.CONFIG) is False:
        raise ValueError(f"{folder.CONFIG} does not match its checksum")
    return folder.config(where)


def _unreported(where: Path, state: str) -> dict[str, Any]:
    """Return what settings and metrics say of a run without a report. Raises ``DAMAGE``."""
    settings = _settings(where)
    lines = files.read_lines(where / folder.METRICS)
    scored = [line for line in lines if line.get(headline_in(line).logged) is not None]
    last = scored[-1] if scored else {}
    metric, private = headline_in(last), not settings.get("no-dp", False)
    diverged = state == CUT_OFF and bool(lines) and lines[-1].get("diverged", False)
    dataset = settings["dataset"]
    return {
        "state": DIVERGED if diverged else state,
        "dataset": dataset if dataset in DATASETS else Path(dataset).stem,
        "optimizer": settings["optimizer"],
        "private": private,
        "epsilon": last.get("epsilon") if private else math.inf,
        "delta": settings.get("delta") if private else None,
        "metric": metric.name if scored else None,
        "score": last.get(metric.logged),
        "audit": settings.get("canaries", 0) > 0,
        "settings": settings,
    }


def varied_settings(runs: Sequence[ListedRun]) -> list[dict[str, Any]]:
    """Return, for each run, the settings with an effect in which runs of its kind differ.

    Runs of the same dataset and optimizer are of one kind. A setting that a run lacks is left out.
    """
    effective = [_effective(run) for run in runs]
    kinds = [(run.dataset, run.optimizer) for run in runs]
    values = {kind: defaultdict[str, set[str]](set) for kind in kinds}
    for kind, found in values.items():
        known = [each for each, of in zip(effective, kinds, strict=True) if of == kind and each]
        for name in {name for settings in known for name in settings}:
            found[name] = {str(settings.get(name, "")) for settings in known}
    return [
        {name: value for name, value in settings.items() if len(values[kind][name]) > 1}
        for kind, settings in zip(kinds, effective, strict=True)
    ]


def _effective(run: ListedRun) -> dict[str, Any]:
    """Return the settings of a run that had an effect on its result."""
    optimizer = OPTIMIZERS.get(run.optimizer or "")
    used = set() if optimizer is None else {n.replace("_", "-") for n in optimizer.used()}
    left_out = NOT_TOLD | (OF_OPTIMIZERS - used)
    return {name: value for name, value in run.settings.items() if name not in left_out}
