"""Checkpoints: the state of a run after some step, from which it is resumed or forked.

A checkpoint is one safetensors file with the tensors and, in its header, a JSON record of
everything else. All of it is computed after noise or public, and no secret key is in it: a run that
continues from it draws new noise and batches. Pickle is never used.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.sources import by_setting
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.models.registry import UserModel, parse_model
from dpmac_cli.models.weights import CHECKPOINT_HEADER, unpacked
from dpmac_cli.runs import folder, ledger
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.storage import files
from dpmac_cli.storage.digest import digest

FOLDER = folder.CHECKPOINTS
#: Number of checkpoints to keep: if the newest is damaged, the previous one is used.
KEPT = 2
VERSION = 7
#: Public facts that must be unchanged for a run to continue.
_SAME = {
    "records": "The number of training records is not the one",
    "tested": "The number of test records is not the one",
    "declared": "The names of the classes, or the range of the target, are not those",
    "pretrained": "The file of public weights is not the one",
}


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after some step.

    Attributes:
        tensors: tensors by name, see :meth:`dpmac_cli.training.state.TrainState.tensors`.
        record: JSON values: the step, configuration, history, ledger.
        damaged: newer damaged checkpoints, each with its name and the fault.
    """

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return int(self.record["state"]["step"])

    @property
    def spent(self) -> Spent:
        """Return the privacy budget spent by the run."""
        return Spent.of(self.record["spent"])


def save(run: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a checkpoint, then remove all except the last two. Raises OSError."""
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    sealed = {"version": VERSION, "sha256": digest(stored, record), "record": record}
    header = {CHECKPOINT_HEADER: json.dumps(sealed, allow_nan=False)}
    path = folder.checkpoints(run) / f"step-{step:09d}.safetensors"
    files.write_atomically(path, safetensors.torch.save(stored, header))
    for old in _files(run)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest(run: Path) -> Checkpoint:
    """Return the newest undamaged checkpoint of a run. Raises InputError if there is none."""
    damaged: list[str] = []
    for path in _files(run):
        try:
            return Checkpoint(*_load(path), tuple(damaged))
        except (safetensors.SafetensorError, *folder.BROKEN) as failure:
            damaged.append(f"{path.name} ({failure})")
    why = f"{run} contains no checkpoint"
    if damaged:
        why = f"All checkpoints in {run / FOLDER} are damaged ({'; '.join(damaged)})"
    raise InputError(
        f"{why}, so the run cannot be resumed. Start a new one, or replace it with "
        f"--force --out {run}."
    )


def last_step(run: Path) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    return next((int(path.stem.removeprefix("step-")) for path in _files(run)), None)


def discard(run: Path, but: Path | None = None) -> None:
    """Remove all checkpoints of a run except one."""
    for path in _files(run):
        if path != but:
            path.unlink(missing_ok=True)


def _files(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((run / FOLDER).glob(f"step-{'[0-9]' * 9}.safetensors"), reverse=True)


def _load(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    tensors, header = unpacked(path.read_bytes())
    sealed = json.loads(header[CHECKPOINT_HEADER])
    if sealed["version"] != VERSION:
        raise ValueError(f"written by another version of dpmac, format {sealed['version']}")
    if sealed["sha256"] != digest(tensors, sealed["record"]):
        raise ValueError("its checksum does not match")
    return tensors, sealed["record"]


@dataclass(frozen=True)
class Inherited:
    """State at the beginning of a session.

    Attributes:
        saved: the checkpoint; None for a new run.
        spent: budget spent by all previous sessions, and the part that begins.
        notes: messages for the user.
        before: budget of the run as it was; None for a new run and a fork.
    """

    saved: Checkpoint | None
    spent: Spent
    notes: tuple[str, ...] = ()
    before: Spent | None = None


def inherited(run: Path, saved: Checkpoint, notes: Iterable[str]) -> Inherited:
    """Return what a new part of a run inherits: a state, and the steps that may have begun."""
    kept, found, step = saved.spent, ledger.read_spent(run), saved.step
    notes = [*notes, *(f"{name} is damaged; resuming from step {step}." for name in saved.damaged)]
    if found is not None and found.follows(kept):
        shown = [line.get("step") for line in files.read_lines(run / folder.METRICS)]
        steps = [step for step in shown if isinstance(step, int)]
        begun = max(found.begun, step, folder.reported_steps(run), *steps)
        spent = replace(found, begun=min(begun, found.end))
    else:
        spent = replace(kept, begun=kept.end)
        notes.append(
            f"{FOLDER}/{ledger.FILE} is missing or damaged, so the number of steps taken is "
            f"unknown. All {kept.event.steps} planned steps are charged."
        )
    return Inherited(saved, spent.continued(step), tuple(notes), spent)


def check_changes(
    run: Path,
    recorded: Mapping[str, Any],
    given: Mapping[str, Any],
    flag: str,
    fixed: Iterable[str],
) -> None:
    """Reject changes of ``fixed`` settings; only paths of your own data and model may change.

    ``recorded`` has the settings of the run and ``given`` those typed together with ``flag``.
    """
    moved: set[str] = set()
    before = by_setting(recorded)
    source, dataset = before["dataset"], given.get("dataset")
    model = given.get("model")
    if source not in DATASETS:
        if dataset is None and not Path(source).exists():
            remedy = "Put it back, or set --dataset to its new path."
            if source.startswith("<"):
                remedy = 'It was in memory in a program: pass it as {"dataset": ...}.'
            raise InputError(f"The run's data {source} was not found. {remedy}")
        moved |= {"dataset"} if dataset not in DATASETS else set()
    if isinstance(parse_model(before["model"]), UserModel):
        if model is None or not isinstance(parse_model(str(model)), UserModel):
            raise InputError(
                f"{run} trains your own model, {before['model']}. dpmac does not run code that "
                f"a file refers to. If you trust it: {folder.command('train ' + flag, run)}"
            )
        moved.add("model")
    for name in fixed:
        value = given.get(name)
        if name not in moved and value is not None and str(value) != str(before.get(name)):
            raise InputError(
                f"--{flag_name(name)} cannot change in a {flag[2:]}. Start a new run to change it."
            )


def compared_facts(task: PreparedRun) -> dict[str, Any]:
    """Return the facts of a run's data and weights that are compared, as JSON values."""
    data = task.data
    declared = json.loads(json.dumps(data.task.facts))
    return {
        "records": data.train.size,
        "tested": data.test.size,
        "declared": declared,
        "pretrained": task.pretrained,
    }


def check_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Reject other numbers of records, other classes or other public weights."""
    raise_errors(
        f"{_SAME[of]} that the run started with. Restore it, or start a new run."
        for of in _SAME
        if now[of] != before[of]
    )
