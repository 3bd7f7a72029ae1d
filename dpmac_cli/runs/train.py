"""Sessions of new, resumed and forked runs, up to the last step of each."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.config.resolve import change
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.config.sources import by_setting, parse_settings
from dpmac_cli.data.dataset import Data
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.randomness.keystream import Keys, make_keys
from dpmac_cli.runs import checkpoint, folder, ledger
from dpmac_cli.runs.checkpoint import Inherited, check_changes, check_same, inherited
from dpmac_cli.runs.environment import (
    check_ranks,
    choose_device,
    differences,
    environment,
    repeatable,
)
from dpmac_cli.runs.ledger import Ledger, Spent
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.runs.session import Session, SessionEvent
from dpmac_cli.runs.setup import make_trainer
from dpmac_cli.storage.progress import Computing, until
from dpmac_cli.torch_errors import torch_failures_explained
from dpmac_cli.training.distributed import Ranks


def new_run(
    plan: TrainPlan,
    stop: Callable[[], bool],
    data: Data | None,
    ranks: Ranks | None,
    abandoned: tuple[TrainingEvent, ...],
) -> Generator[SessionEvent, None, None]:
    """Train a new run up to its last step; see :func:`dpmac_cli.release.run.train`."""
    with torch_failures_explained():
        folder.check_place(plan.run.folder)
        spent = Spent((), plan.privacy.event, 0, 0, False, True, abandoned)
        session = yield from _session(plan, Inherited(None, spent), stop, data, ranks)
        yield from _first(session, stop)


def _first(session: Session, stop: Callable[[], bool]) -> Generator[SessionEvent, None, None]:
    """Run a session in a new folder."""
    plan, where = session.plan, session.where
    with folder.locked(where):
        folder.check_place(plan.run.folder)  # another run may have ended in it meanwhile
        # A kill here leaves the ledger of the old run or of this one, but never a checkpoint of
        # the old run with the ledger of this one.
        checkpoint.discard(where)
        session.ledger.write(session.ledger.spent.begun)
        folder.clear(where, keep_ledger=True)
        if session.ledger.spent.abandoned:
            ledger.keep_attempts(where, session.ledger.spent.abandoned)
        session.begin_files()
        session.save()  # so the run can be resumed from the start
        yield from session.drive(stop)


def resumed_run(
    where: Path | str,
    flags: Mapping[Any, Any],
    stop: Callable[[], bool],
    data: Data | None,
    ranks: Ranks | None,
) -> Generator[SessionEvent, None, None]:
    """Resume a run up to its last step; see :func:`dpmac_cli.release.run.resume`."""
    where = Path(where)
    folder.check_run_folder(where)
    with folder.locked(where), torch_failures_explained():
        plan, before = _resumed(where, parse_settings(flags), ranks)
        session = yield from _session(plan, before, stop, data, ranks)
        # Write the ledger first: after a kill here, the run has no checkpoint with the new keys,
        # and its next resume charges for them.
        session.ledger.write(session.ledger.spent.begun)
        if session.trainer.state.step == before.spent.base:  # remove older keys
            checkpoint.discard(where, but=session.save())
        session.begin_files()  # removes the checksums of files that will change
        yield from session.drive(stop)


def forked_run(
    parent: Path | str,
    flags: Mapping[Any, Any],
    stop: Callable[[], bool],
    data: Data | None,
    ranks: Ranks | None,
) -> Generator[SessionEvent, None, None]:
    """Fork a run up to its last step; see :func:`dpmac_cli.release.run.fork`."""
    parent = Path(parent)
    folder.check_run_folder(parent, "--fork")
    with torch_failures_explained():
        with folder.locked(parent):
            plan, before = _forked(parent, parse_settings(flags))
            session = yield from _session(plan, before, stop, data, ranks)
        yield from _first(session, stop)


def _session(
    plan: TrainPlan,
    before: Inherited,
    stop: Callable[[], bool],
    data: Data | None,
    ranks: Ranks | None,
) -> Generator[Computing, None, Session]:
    device = choose_device(plan.run.device, ranks)
    plan = plan.on(str(device))
    if ranks is not None:
        _check_parallel(plan, device, ranks)
    privacy, spent, saved = plan.privacy, before.spent, before.saved
    rest = privacy.event_of(privacy.steps - spent.base)
    budget = (privacy.delta, privacy.max_epsilon, spent.earlier, privacy.scores, spent.base)
    steps = spent.base + affordable_steps(rest, *budget)
    exact = saved is not None and not before.fresh_noise
    keys = make_keys(plan.run.seed, base=spent.base)
    if saved is not None:
        kept = Keys.of_json(saved.record["state"]["keys"])
        # A network that draws frozen values when it is built was trained with these.
        keys = kept if exact else replace(keys, init=kept.init)
    task = yield from until(stop, prepare(plan, device, keys, data))
    if privacy.scores is not None:
        _check_scored(task)
    if saved is not None:
        check_same(task.fingerprints, saved.record["fingerprints"], exactly=exact)
    trainer = make_trainer(plan, steps=steps, device=device, keys=keys, task=task, ranks=ranks)
    if saved is not None:
        trainer.state.restore(saved.tensors, saved.record["state"], exactly=exact)
    where = folder.make_place(plan.run.folder)
    return Session(
        plan=plan,
        task=task,
        trainer=trainer,
        where=where,
        ledger=Ledger(where, _spent(plan, spent, steps)),
        ranks=ranks,
        history=[] if saved is None else list(saved.record["history"]),
        seconds=0.0 if saved is None else saved.record["seconds"],
        notes=(*before.notes, *task.notes, *trainer.notes),
        fresh_noise=before.fresh_noise,
    )


def _check_parallel(plan: TrainPlan, device: torch.device, ranks: Ranks) -> None:
    """Reject a run that several processes cannot share. Raises InputError."""
    if plan.privacy.audit.canaries:
        raise InputError("--canaries needs a run with one process. Leave it out.")
    check_ranks(device, ranks)


def _check_scored(task: PreparedRun) -> None:
    """Reject a network that may mix test records, each of which is protected."""
    if task.independence == "isolated":
        raise ModelError(
            "--cover-scores scores test records in batches, and it could not be proven that the "
            "network treats the records of a batch independently. Leave it out."
        )


def _spent(plan: TrainPlan, before: Spent, steps: int) -> Spent:
    """Return what a session that ends at step ``steps`` may spend, and what was spent before."""
    return replace(
        before,
        event=plan.privacy.event_of(steps - before.base),
        seeded=before.seeded or plan.run.seed is not None,
        secure=before.secure and plan.run.secure,
        scores=plan.privacy.scores,
    )


#: Settings that a fork cannot change.
FIXED = tuple(name for name, option in SETTINGS.items() if option.flag.fixed)


def _newest(where: Path) -> checkpoint.Checkpoint:
    """Return the newest checkpoint. Raises InputError if it is of a trial, or there is none."""
    saved = checkpoint.newest(where)
    if saved.record.get("searched"):  # a copy of a trial; older checkpoints do not say
        raise InputError(
            f"{where} is a trial of a search, whose cost is not that of one run, so it can neither "
            "be resumed nor forked. To end the search, repeat its command of dpmac tune."
        )
    return saved


def _resumed(
    where: Path, given: Mapping[str, Any], ranks: Ranks | None
) -> tuple[TrainPlan, Inherited]:
    saved = _newest(where)
    recorded, step = saved.record["config"], saved.step
    check_changes(where, recorded, given, "--resume", ("dataset", "model"))
    resolved = change(recorded, given)
    plan, privacy = resolved.plan, resolved.plan.privacy
    _check_unchanged(where, plan, recorded, given)
    device = choose_device(plan.run.device, ranks)
    told = all(folder.vouched(where, name) for name in folder.PUBLISHED)
    if step >= privacy.steps and told and folder.reported_steps(where) >= step:
        raise InputError(
            f"{where} is finished: it took {step} of {privacy.steps} steps. To train longer: "
            f"{folder.fork_command(where, ['--epochs N'])} "
            f"(N above {step // privacy.steps_per_epoch})"
        )
    before = inherited(where, saved, resolved.notes)
    changed = sorted(differences(saved.record["environment"], environment(device, ranks)))
    reasons = [f"the machine or its software changed ({', '.join(changed)})"] if changed else []
    if not repeatable(device) and before.spent.end > step:
        reasons.append("steps on a GPU cannot be repeated bit for bit")
    if len(before.spent.earlier) > len(saved.spent.earlier):
        reasons.append("the checkpoint of the last session is lost")
    if reasons and privacy.audit.canaries:
        raise InputError(
            f"{where} is an audit run, which can only be resumed exactly ({'; '.join(reasons)}): "
            "an audit tests one guarantee with one set of coins. Start a new run."
        )
    if reasons:
        before = before.with_new_keys("; ".join(reasons))
    return plan.placed(ChosenFolder(where)), before


def _check_unchanged(
    where: Path, plan: TrainPlan, recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise InputError for settings that differ from those of the run."""
    placed: tuple[str, ...] = ("out", "force")
    here: tuple[str, ...] = ("seed", *placed)
    changes: dict[str, str] = {name: f"--{name}" for name in here if name in given}
    before = by_setting(recorded)
    for name, value in plan.recorded.items():
        # A dataset or model at another path is compared by its fingerprint.
        if before.get(name) != value and not SETTINGS[name].flag.local:
            flag = flag_name(name)
            changes[name] = f"--{flag}" if value is True else f"--{flag} {value}"
    if not changes:
        return
    way = "Start a new run to change it."
    if not plan.privacy.audit.canaries and not any(name in FIXED for name in changes):
        others = [text for name, text in changes.items() if name not in placed]
        command = folder.fork_command(where, others)
        way = f"To continue from it with other settings: {command}"
    raise InputError(
        f"{' and '.join(changes.values())} would change the run, but --resume needs the same "
        f"settings. {way}"
    )


def _forked(parent: Path, given: Mapping[str, Any]) -> tuple[TrainPlan, Inherited]:
    saved = _newest(parent)
    recorded, step = saved.record["config"], saved.step
    check_changes(parent, recorded, given, "--fork", FIXED)
    resolved = change(recorded, given)
    plan = resolved.plan
    out = plan.run.folder
    if isinstance(out, ChosenFolder) and out.path.resolve() == parent.resolve():
        raise InputError(f"--out {out.path} is the run to fork. Use a new folder.")
    folder.check_place(out)
    if plan.privacy.audit.canaries:
        raise InputError(
            f"{parent} is an audit run, which cannot be forked: an audit tests one guarantee. "
            "Start a new run."
        )
    if plan.privacy.steps <= step:
        raise InputError(
            f"{parent} has already taken {step} steps, but {plan.privacy.steps} are requested. Set "
            f"--epochs (above {step // plan.privacy.steps_per_epoch}) or --steps (above {step})."
        )
    before = inherited(parent, saved, resolved.notes).with_new_keys(f"a fork of {parent}")
    return plan, before


def resumes_exactly(where: Path, device: str) -> bool:
    """Return whether a run can be resumed exactly on this device. Raises InputError."""
    try:
        saved = checkpoint.newest(where)
    except InputError:
        return False
    here, over = choose_device(device), saved.step >= saved.spent.end
    return saved.record["environment"] == environment(here) and (repeatable(here) or over)
