"""Sessions of new and resumed runs, up to the last step of each.

A resumed run continues from the state of a checkpoint with new keys, in its folder or in another
one. Its events are those of all steps that may have begun, kept or not, and of those to come.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.networks import UserModel, parse_model
from dpmac_cli.config.plan import NOT_RECORDED, Plan, with_noise
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import by_setting
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.dp.torch_errors import torch_failures_explained
from dpmac_cli.errors import BudgetError, InputError, as_flags, raise_errors
from dpmac_cli.models.dataset import Data
from dpmac_cli.progress import Computing, heard_by
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs import checkpoint, folder, lock, new_folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import Ledger, read_ledger, state_of
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import Resolved, missing_files, resolve
from dpmac_cli.runs.session import Session, SessionEvent, config_file
from dpmac_cli.runs.trainer import make_trainer
from dpmac_cli.runs.workers import brief_workers
from dpmac_cli.training.distributed import Ranks, check_single_process

#: Note on a run that is not calibrated.
NO_ROOM = (
    "The run was stopped while it counted its training records, which used up the budget for that: "
    "the model is not calibrated."
)


@dataclass(frozen=True)
class Inherited:
    """State at the beginning of a session; by default that of a new run.

    Attributes:
        saved: checkpoint that it continues from; None for a new run.
        account: account of the run as it was; None for a new run.
        elsewhere: whether it continues in another folder, as a run with other settings.
    """

    saved: checkpoint.Checkpoint | None = None
    account: Account | None = None
    elsewhere: bool = False

    @property
    def earlier(self) -> tuple[Account, ...]:
        """Return the accounts of all that was done to the records before; () for a new run."""
        return () if self.account is None else self.account.past

    @property
    def base(self) -> int:
        """Return the step after which the session begins; 0 for a new run."""
        return 0 if self.saved is None else self.saved.step

    @property
    def interrupted(self) -> Account | None:
        """Return the account of the same run, which may count steps that were lost.

        None for a new run, and for one that continues in another folder.
        """
        return None if self.elsewhere else self.account

    @property
    def histogram(self) -> NoisyHistogram | None:
        """Return the histogram that the same run has, which it does not pay for again.

        None if it has none. A run that continues in another folder counts again, for its other
        weights.
        """
        if self.saved is None or self.elsewhere or self.saved.record.histogram is None:
            return None
        stored = self.saved.record.histogram
        return NoisyHistogram((np.array(stored.counts),), stored.noise)


def new_run(
    plan: Plan,
    stop: Callable[[], bool],
    data: Dataset | Data | None,
    ranks: Ranks | None,
) -> Generator[SessionEvent, None, None]:
    """Train a new run up to its last step. A generator: the run advances as its events are taken.

    An old run in the chosen folder is removed only when this one is ready for its first step.

    Args:
        plan: plan of the run.
        stop: called after every step; True ends the run early.
        data: records of the plan, or data on the device; None to read them.
        ranks: the processes of the run, of which this is the first; None for one.

    Yields:
        that it starts, updates, and the session, whose model is trained and not yet published. The
        folder is locked until the next event is asked for.

    Raises:
        InputError: data, device or folder cannot be used; nothing was written.
        BudgetError: the budget allows no step.
        ModelError: the model mixes samples.
        RunError: training diverged, memory ran out, or the device failed. What was saved can be
            resumed by :func:`continued_run`.
        KeyboardInterrupt: ``stop`` returned True while features were computed.
    """
    with torch_failures_explained():
        folder.check_chosen_folder(plan.settings.out, plan.settings.force)
        session = _session(plan, Inherited(), stop, data, ranks)
        yield from _first(session, stop)


def _first(session: Session, stop: Callable[[], bool]) -> Generator[SessionEvent, None, None]:
    """Run a session in a new folder, whose old run, if any, is removed."""
    plan, where = session.plan, session.where
    with lock.locked(where):
        # Another run may have ended in it meanwhile.
        folder.check_chosen_folder(plan.settings.out, plan.settings.force)
        # A kill here leaves the ledger of the old run or of this one, but never a checkpoint of
        # the old run with the ledger of this one.
        folder.remove_state(where)
        session.account.record()
        folder.clear(where, keep_ledger=True)
        session.begin_files()
        session.save()  # so the run can be resumed from the start
        yield from session.drive(stop)


def continued_run(
    run: Path | str,
    flags: Mapping[Any, Any],
    stop: Callable[[], bool],
    data: Dataset | Data | None,
    ranks: Ranks | None,
) -> Generator[SessionEvent, None, None]:
    """Resume a run up to its last step, in its folder or, with the setting ``out``, in another one.

    A generator: the run advances as its events are taken. It has new keys, and counts all steps
    that may have begun before.

    Args:
        run: folder of the run.
        flags: settings that change, by name, as text or of their types. {} for none. Which may
            change depends on whether ``out`` is among them.
        stop, data, ranks: see :func:`new_run`.

    Yields:
        what :func:`new_run` does.

    Raises:
        InputError: there is no such run, it is finished, a file is damaged, or a setting cannot
            change. For other errors see :func:`new_run`.
    """
    run, changes = Path(run), dict(Settings.model_validate(flags).explicit)
    folder.check_run_folder(run)
    with torch_failures_explained():
        with lock.locked(run):
            resolved, before = _continued(run, changes)
            data = data or resolved.data
            session = _session(resolved.plan, before, stop, data, ranks, resolved.notes)
            if not before.elsewhere:
                session.account.record()
                session.begin_files()
                yield from session.drive(stop)
        if before.elsewhere:
            yield from _first(session, stop)


def _session(
    plan: Plan,
    before: Inherited,
    stop: Callable[[], bool],
    data: Dataset | Data | None,
    ranks: Ranks | None,
    notes: tuple[str, ...] = (),
) -> Session:
    """Return the session of a run, ready for its first step, in a folder that is created.

    Args:
        plan: plan of the whole run.
        before: what a resumed run has done.
        stop: see :func:`dpmac_cli.release.train.train_plan`.
        data: records of the plan, or data on the device; None to read them.
        ranks: the processes of the run; None for one.
        notes: messages for the user.
    """
    device = choose_device(plan.settings.device, ranks)
    plan = plan.on(str(device))
    if ranks is None:
        check_single_process()
    elif plan.settings.canaries:
        raise InputError("{canaries} needs a run with one process. Leave it out.")
    elif plan.ranges:
        raise InputError(
            "Ranges and ranks of a table's columns are found by one process. Start it without "
            "torchrun, or declare all ranges in the schema and add {scale=}declared."
        )
    saved, ledger = before.saved, _ledger(plan, before)
    keys = make_keys(plan.settings.seed, base=ledger.base, part=len(ledger.before))
    if saved is not None:  # a network that draws frozen values when it is built keeps these
        keys = replace(keys, init=saved.record.start.to_bytes(4, "little"))
    with heard_by(partial(_interrupt, stop)):
        task = prepare(plan, device, keys, data)
    if saved is not None:
        _check_same(task.compared, saved.record.facts)
    trainer = make_trainer(plan, task, keys, ledger, ranks=ranks)
    if saved is not None:
        trainer.state.restore(saved.state, dict(saved.record.state))
        trainer.restore_ranges(saved.ranges)
        trainer.histogram = before.histogram
    ledger.run = where = new_folder.make_place(plan)
    if ranks is not None:
        brief_workers(trainer, where, task, keys)
    return Session(
        task=task,
        trainer=trainer,
        where=where,
        history=[] if saved is None else saved.record.lines,
        seconds=0.0 if saved is None else saved.record.seconds,
        notes=(*notes, *_on_budget(plan, before, ledger), *task.notes, *trainer.notes),
    )


def _interrupt(stop: Callable[[], bool], _: Computing) -> None:
    """Raise KeyboardInterrupt once ``stop`` returns True."""
    if stop():
        raise KeyboardInterrupt


def _ledger(plan: Plan, before: Inherited) -> Ledger:
    """Return the account of a session, with the steps that the budget allows.

    A run that was calibrated for an epsilon keeps to it when it is resumed: it ends as many steps
    earlier as were lost, at once if there are none left.
    """
    ledger = Ledger(
        event=plan.event.first(plan.event.steps - before.base),
        base=before.base,
        begun=before.base,
        score=plan.score,
        ranges=() if plan.ranged else plan.ranges,
        histogram=None if before.histogram is not None else plan.histogram,
        earlier=before.earlier,
        target=plan.settings.epsilon,
        **plan.of_account,
    )
    try:
        ledger.shorten()
    except BudgetError:
        if before.interrupted is None:
            raise
        ledger.event = ledger.steps(0)
    ledger.leave_out_histogram()
    return ledger


def _on_budget(plan: Plan, before: Inherited, account: Account) -> tuple[str, ...]:
    """Return notes on the budget that ends a run before its last step, and on lost steps."""
    unpaid = plan.histogram is not None and account.histogram is None
    left_out = (NO_ROOM,) if unpaid and before.histogram is None else ()
    return (*_limited(plan, account), *_lost(plan, before.interrupted, account), *left_out)


def _limited(plan: Plan, account: Account) -> tuple[str, ...]:
    """Return a note on the budget that ends a run before its last step; () if none does."""
    target, steps = account.kept_to, plan.event.steps
    if account.end >= steps:
        return ()
    budget = f"{{max_epsilon=}}{plan.max_epsilon:g}"
    if target < plan.max_epsilon:
        budget = f"the epsilon of {target:g} that the run was calibrated for"
    return (f"{budget} allows {account.end:,} of {steps:,} steps.",)


def _lost(plan: Plan, interrupted: Account | None, account: Account) -> tuple[str, ...]:
    """Return a note on the cost of an interruption; () if it cost nothing.

    Args:
        plan: plan of the whole run.
        interrupted: account of the run before it was interrupted.
        account: its account now.
    """
    event, delta = plan.event, plan.settings.delta
    if interrupted is None or not plan.private:
        return ()
    begun = event.first(interrupted.begun - interrupted.base).compositions
    rest = event.first(event.steps - account.base).compositions
    planned = event.first(event.steps - interrupted.base)
    count = begun + rest - planned.compositions
    if count == 0:
        return ()
    units = "epochs" if event.sampling.once_an_epoch else "steps"
    are = "is" if count == 1 else "are"
    counted_twice = f"{count} of {event.compositions:,} {units} {are} counted twice"
    if account.end < event.steps:
        return (
            f"{counted_twice}: training ends after step {account.end:,}, to stay within the "
            "budget.",
        )
    old = total_epsilon((*interrupted.before, planned, *plan.counts), delta)
    new = total_epsilon(account.planned, delta)
    return (f"{counted_twice}: epsilon {format_epsilon(old)} -> {format_epsilon(new)}.",)


#: Settings that no resume can change, not even one into another folder. Costs of different units of
#: privacy cannot be added, and a record that was tested on must not be trained on later, or the
#: other way round.
FIXED = (
    *("dataset", "recipe", "model", "isolate", "features", "backbone", "backbone_size"),
    *("backbone_flips", "pretrained", "train", "lora_rank", "channels"),
    *("image_size", "levels", "classes", "epsilon", "sampler", "no_dp", "optimizer", "ema"),
    *("canaries", "seed", "cover_scores", "unit", "test_fraction", "split_seed"),
)
#: Settings that a resume into the same folder can change, because they do not describe the run.
FREE = {*NOT_RECORDED, "device"} - {"out", "force"}


def _continued(run: Path, changes: Mapping[str, Any]) -> tuple[Resolved, Inherited]:
    """Return the plan of a run that continues, and what it inherits.

    Args:
        run: folder of the run.
        changes: settings of the resume; with ``out``, it continues in another folder.

    Raises:
        InputError: there is no checkpoint, the run is finished, a file is damaged, or a setting
            cannot change.
    """
    saved, account = checkpoint.read(run), read_ledger(run)
    recorded, step = by_setting(saved.record.config), saved.step
    elsewhere = changes.get("out") is not None
    if saved.record.searched:
        raise InputError(
            f"{run} is a trial of a search, whose cost is not that of one run, so it cannot be "
            "resumed. To end the search, repeat its command of dpmac tune."
        )
    damaged = (
        f"{run / folder.CHECKPOINTS / folder.LEDGER} is missing or damaged, so the number of steps "
        "taken is unknown, and the run cannot be resumed. Start a new one, or replace it with "
        f"{{force=True}} and {{out=}}{run}."
    )
    # A ledger that was put back from a backup does not know the later parts of its run.
    if account is None or account.begun < step or len(account.before) < saved.record.parts:
        raise InputError(damaged)
    _check_changes(run, recorded, changes)
    _check_config(run, config_file(recorded, account.event))
    resolved = _resolved(saved, account.event, changes, recorded)
    plan = resolved.plan
    if plan.private != account.event.noisy:
        raise InputError(damaged)
    if plan.settings.canaries:
        raise InputError(
            f"{run} is an audit run, which cannot be resumed: an audit tests one guarantee with "
            "one set of canaries. Start a new run."
        )
    inherited = Inherited(saved, account, elsewhere)
    if elsewhere:
        _check_elsewhere(run, plan, step)
        return resolved, inherited
    if state_of(step, account, plan.event) != "interrupted" and folder.is_published(run):
        raise InputError(
            f"{run} is finished: it took {step} of {plan.event.steps} steps. To train longer: "
            f"{folder.resume_elsewhere_command(run, ['--epochs N'])} "
            f"(N above {step // plan.event.steps_per_epoch})"
        )
    return replace(resolved, plan=plan.placed(run)), inherited


def _resolved(
    saved: checkpoint.Checkpoint,
    event: TrainingEvent,
    changes: Mapping[str, Any],
    recorded: Mapping[str, Any],
) -> Resolved:
    """Return the plan of a run that continues, with its ranges and the noise of its event.

    A resumed run keeps to the epsilon that it was calibrated for. In another folder it may have
    other steps, so it has that noise, or another that is given, and no target.
    """
    ranged = bool(saved.ranges)
    if changes.get("out") is None:
        return resolve(changes, recorded, noise=event, ranged=ranged)
    return resolve(changes, with_noise(recorded, event), ranged=ranged)


def _check_changes(run: Path, before: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Reject settings that this resume cannot change.

    ``before`` are the settings of the run. Your own data and model may be in other places.
    """
    source, dataset, model = before["dataset"], changes.get("dataset"), changes.get("model")
    moved = set[str]()
    if source not in DATASETS:
        if dataset is None and source.startswith("<"):
            remedy = "It was in memory: resume it in a program, resume(folder, dataset=...)."
            raise InputError(f"The run's data {source} was not found. {remedy}")
        raise_errors(missing_files(before, changes, ["dataset", "schema"]))
        if dataset not in DATASETS:
            moved.update(("dataset", "schema"))
    if isinstance(parse_model(before["model"]), UserModel):
        if model is None or not isinstance(parse_model(str(model)), UserModel):
            raise InputError(
                f"{run} trains your own model, {before['model']}. dpmac does not run code that "
                f"a file refers to. If you trust it: {folder.resume_command(run)}"
            )
        moved.add("model")
    refused = list[str]()
    for name, value in changes.items():
        is_fixed = name not in FREE if changes.get("out") is None else name in FIXED
        if is_fixed and name not in moved and str(value) != str(before.get(name)):
            refused.append(name)
    if not refused:
        return
    remedy = "Start a new run to change it."
    if not {*refused} & {*FIXED}:
        flags = [as_flags(_as_typed(name, changes[name])) for name in refused]
        remedy = f"To train with other settings: {folder.resume_elsewhere_command(run, flags)}"
    named = " and ".join(f"{{{name}}}" for name in refused)
    raise InputError(f"{named} cannot change in a resume. {remedy}")


def _as_typed(name: str, value: object) -> str:
    """Return a setting with its value as in a message."""
    return f"{{{name}}}" if value is True else f"{{{name}=}}{value}"


def _check_config(run: Path, written: str) -> None:
    """Reject a config.yaml that is no longer as it was ``written``."""
    with suppress(OSError, UnicodeDecodeError):
        if (run / folder.CONFIG).read_text(encoding="utf-8") != written:
            raise InputError(
                f"{run / folder.CONFIG} was edited or damaged. Delete it, to restore it from the "
                "checkpoint. Then, to change a setting, resume the run into another folder: "
                f"{folder.resume_elsewhere_command(run, ['--lr 0.01'])}"
            )


def _check_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Reject other numbers of records, schemas, classes or public weights.

    Args:
        now: :attr:`.PreparedRun.compared` as it is.
        before: the same, from the checkpoint.
    """
    if others := [name for name in now if now[name] != before.get(name)]:
        raise InputError(
            f"The {' and the '.join(others)} are not those that the run started with. Restore "
            "them, or start a new run."
        )


def _check_elsewhere(run: Path, plan: Plan, step: int) -> None:
    """Reject the run's own folder as another one, and no further steps.

    Args:
        run: folder of the run.
        plan: plan of the run in the other folder.
        step: last step that was taken.
    """
    out, event = plan.settings.out, plan.event
    if out is not None and out.resolve() == run.resolve():
        raise InputError(
            f"{{out=}}{out} is the run to resume. Leave {{out}} out to resume it there with its "
            "settings, or use a new folder."
        )
    folder.check_chosen_folder(plan.settings.out, plan.settings.force)
    if event.steps <= step:
        raise InputError(
            f"{run} has already taken {step} steps, but {event.steps} are requested. Set "
            f"{{epochs}} (above {step // event.steps_per_epoch}) or {{steps}} (above {step})."
        )
