"""Checkpoints: the complete state of a run, to resume it exactly, and the state of a new session.

A checkpoint is one safetensors file with the tensors and, in its header, a JSON record of
everything else, including the secret keys. Anyone who has the keys can subtract the noise, so only
the owner can read the folder and its files. Pickle is never used.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
from dpmac_cli.storage import files
from dpmac_cli.storage.digest import digest

FOLDER = folder.CHECKPOINTS
NOTE = "PRIVATE.txt"
NOTE_TEXT = """\
These files are private. They contain the keys of the noise and of the batches: anyone who has them
can subtract the noise from everything that the run publishes, now or later. Do not share, publish
or back them up where others can read. The model to publish is model.safetensors, one folder up.
"""
#: Number of checkpoints to keep: if the newest is damaged, the previous one is used.
KEPT = 2
VERSION = 5
#: Fingerprints that must not change.
#: What must be unchanged to resume a run.
Fingerprint = Literal[
    "data",
    "units",
    "test units",
    "classes",
    "constants",
    "network",
    "fixed values",
    "pretrained",
    "features",
]
_SAME: Mapping[Fingerprint, str] = {
    "data": "The records are not those",
    "units": "The units that the records belong to are not those",
    "test units": "The units that the test records belong to are not those",
    "classes": "The names of the classes, or the range of the target, are not those",
    "pretrained": "The file of public weights is not the one",
    "constants": "The ranges low and high are not those",
    "network": "The factory or the file of --model is not the one",
    "fixed values": "The buffers, frozen parameters, other values or code of --model are not those",
    "features": "The features are not those",
}
#: Fingerprints that may change if noise is drawn with new keys.
EXACT: tuple[Fingerprint, ...] = ("constants", "network", "fixed values", "features")
SPENT = "The privacy cost so far is for the original. Restore it, or start a new run."
NOT_EXACTLY = (
    "An exact resume repeats the noise, which must not be added to other gradients. Restore the "
    "original, fork the run to draw new noise, or start a new run."
)


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after some step.

    Attributes:
        tensors: tensors by name, see :meth:`dpmac_cli.training.state.TrainState.tensors`.
        record: JSON values: the step, keys, configuration, history, ledger.
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
    where = folder.private_folder(run)
    if not (where / NOTE).exists():
        files.write_atomically(where / NOTE, NOTE_TEXT.encode(), files.PRIVATE_MODE)
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    sealed = {"version": VERSION, "sha256": digest(stored, record), "record": record}
    header = {CHECKPOINT_HEADER: json.dumps(sealed, allow_nan=False)}
    path = where / f"step-{step:09d}.safetensors"
    files.write_atomically(path, safetensors.torch.save(stored, header), files.PRIVATE_MODE)
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


def fingerprints(run: Path) -> dict[Fingerprint, str]:
    """Return the fingerprints of a run's newest checkpoint, unverified; empty if there is none."""
    for path in _files(run):
        with contextlib.suppress(safetensors.SafetensorError, *folder.BROKEN):
            with safetensors.safe_open(path, "numpy") as opened:  # reads only the header
                sealed = json.loads(opened.metadata()[CHECKPOINT_HEADER])
            return dict(sealed["record"]["fingerprints"])
    return {}


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
        spent: budget spent by all previous sessions; its event is the one that continues.
        notes: messages for the user.
        fresh_noise: reason for new keys; "" for those of the checkpoint.
    """

    saved: Checkpoint | None
    spent: Spent
    notes: tuple[str, ...] = ()
    fresh_noise: str = ""

    def with_new_keys(self, why: str) -> "Inherited":
        """Return a copy with new keys, for which steps that may have begun are a separate event."""
        assert self.saved is not None  # noqa: S101
        step = self.saved.step
        spent = replace(self.spent, earlier=self.spent.events, base=step, begun=step)
        return replace(self, spent=spent, fresh_noise=why)


def inherited(run: Path, saved: Checkpoint, notes: Iterable[str]) -> Inherited:
    """Return the state inherited from a run, charged for the largest number of steps on record."""
    kept, found, step = saved.spent, ledger.read_spent(run), saved.step
    notes = [*notes, *(f"{name} is damaged; resuming from step {step}." for name in saved.damaged)]
    same = found is not None and replace(found, begun=kept.begun) == kept
    if found is not None and (same or len(found.earlier) > len(kept.earlier)):
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
    return Inherited(saved=saved, spent=spent, notes=tuple(notes))


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


def check_same(
    now: Mapping[Fingerprint, str], before: Mapping[Fingerprint, str], *, exactly: bool
) -> None:
    """Reject changed records (their number sets the rate), and networks in an exact resume."""
    raise_errors(
        f"{_SAME[of]} that the run started with. {NOT_EXACTLY if of in EXACT else SPENT}"
        for of in _SAME
        if (exactly or of not in EXACT) and now.get(of) != before.get(of)
    )
