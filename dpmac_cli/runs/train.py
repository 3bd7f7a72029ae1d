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
from dpmac_cli.errors import BudgetError, InputError, as_flags
from dpmac_cli.models.dataset import Data
from dpmac_cli.progress import Computing, heard_by
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import Ledger, read_ledger, state_of
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import Resolved, resolve
from dpmac_cli.runs.session import Session, SessionEvent, config_file
from dpmac_cli.runs.trainer import RANGES, make_trainer, ranges_in
from dpmac_cli.runs.workers import brief_workers
from dpmac_cli.training.distributed import Ranks, check_single_process

#: Note on a run that is not calibrated.
NO_ROOM = (
    "The run was stopped while it counted its training records, which used up the budget for that: "
    "the model is not calibrated."
)


@dataclass(frozen=True)
class Inherited:
    """State at the beginning of a session.

    Attributes:
        saved: the checkpoint; None for a new run.
        earlier: accounts of all that was done to the records before.
        base: step after which it begins.
        target: epsilon that the run was calibrated for; None without, and in a new folder.
        notes: messages for the user.
        account: account of the run as it was; None for a run in a new folder.
        data: your own dataset, which was read for its plan; None to read it.
    """

    saved: checkpoint.Checkpoint | None = None
    earlier: tuple[Account, ...] = ()
    base: int = 0
    target: float | None = None
    notes: tuple[str, ...] = ()
    account: Account | None = None
    data: Dataset | None = None


def new_run(
    plan: Plan,
    stop: Callable[[], bool],
    data: Dataset | Data | None,
    ranks: Ranks | None,
) -> Generator[SessionEvent, None, None]:
    """Train a new run up to its last step; see :func:`dpmac_cli.release.train.train`."""
    with torch_failures_explained():
        folder.check_place(plan)
        before = Inherited(target=plan.settings.epsilon)
        session = _session(plan, before, stop, data, ranks)
        yield from _first(session, stop)


def _first(session: Session, stop: Callable[[], bool]) -> Generator[SessionEvent, None, None]:
    """Run a session in a new folder."""
    plan, where = session.plan, session.where
    with folder.locked(where):
        folder.check_place(plan)  # another run may have ended in it meanwhile
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
    """Resume a run up to its last step; see :func:`dpmac_cli.release.train.resume`."""
    run, given = Path(run), dict(Settings.model_validate(flags).explicit)
    elsewhere = given.get("out") is not None
    folder.check_run_folder(run)
    with torch_failures_explained():
        with folder.locked(run):
            plan, before = _continued(run, given, elsewhere=elsewhere)
            session = _session(plan, before, stop, data or before.data, ranks)
            if not elsewhere:
                session.account.record()
                session.begin_files()
                yield from session.drive(stop)
        if elsewhere:
            yield from _first(session, stop)


def _session(
    plan: Plan,
    before: Inherited,
    stop: Callable[[], bool],
    data: Dataset | Data | None,
    ranks: Ranks | None,
) -> Session:
    device = choose_device(plan.settings.device, ranks)
    plan = plan.on(str(device))
    if ranks is None:
        check_single_process()
    elif plan.settings.canaries:
        raise InputError("{canaries} needs a run with one process. Leave it out.")
    elif plan.ranges:
        raise InputError(
            "A table with columns that are declared by their type alone needs a run with one "
            "process. Declare their ranges."
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
        state = {name: t for name, t in saved.tensors.items() if not name.startswith(RANGES)}
        trainer.state.restore(state, dict(saved.record.state))
        trainer.restore_ranges(saved.tensors)
        trainer.histogram = _histogram_of(before)
    ledger.run = where = folder.make_place(plan)
    if ranks is not None:
        brief_workers(ranks, plan, where, task, trainer, keys)
    return Session(
        plan=plan,
        task=task,
        trainer=trainer,
        where=where,
        account=ledger,
        ranks=ranks,
        history=[] if saved is None else saved.record.lines,
        seconds=0.0 if saved is None else saved.record.seconds,
        notes=(*before.notes, *_budget(plan, before, ledger), *task.notes, *trainer.notes),
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
        ranges=() if _has_ranges(before) else plan.ranges,
        histogram=None if _histogram_of(before) is not None else plan.histogram,
        earlier=before.earlier,
        target=before.target,
        **plan.of_account,
    )
    try:
        ledger.shorten()
    except BudgetError:
        if before.account is None:
            raise
        ledger.event = ledger.steps(0)
    ledger.leave_out_histogram()
    return ledger


def _has_ranges(before: Inherited) -> bool:
    """Return whether a run has the ranges of columns, which it does not pay for again."""
    return before.saved is not None and bool(ranges_in(before.saved.tensors))


def _histogram_of(before: Inherited) -> NoisyHistogram | None:
    """Return the histogram that a run in its own folder has, which it does not pay for again."""
    if before.saved is None or before.account is None or before.saved.record.histogram is None:
        return None
    kept = before.saved.record.histogram
    return NoisyHistogram((np.array(kept.counts),), kept.noise)


def _budget(plan: Plan, before: Inherited, account: Account) -> tuple[str, ...]:
    """Return notes on the budget that ends a run before its last step, and on lost steps."""
    unpaid = plan.histogram is not None and account.histogram is None
    left_out = unpaid and _histogram_of(before) is None
    return (*_limited(plan, account), *_lost(plan, before, account), *[NO_ROOM] * left_out)


def _limited(plan: Plan, account: Account) -> tuple[str, ...]:
    """Return a note on the budget that ends a run before its last step; () if none does."""
    target, steps = account.kept_to, plan.event.steps
    if account.end >= steps:
        return ()
    budget = f"{{max_epsilon=}}{plan.max_epsilon:g}"
    if target < plan.max_epsilon:
        budget = f"the epsilon of {target:g} that the run was calibrated for"
    return (f"{budget} allows {account.end:,} of {steps:,} steps.",)


def _lost(plan: Plan, before: Inherited, account: Account) -> tuple[str, ...]:
    """Return a note on the cost of an interruption; () if it cost nothing."""
    event, delta, was = plan.event, plan.settings.delta, before.account
    if was is None or not plan.private:
        return ()
    parts = (was.begun - was.base, event.steps - account.base, event.steps - was.base)
    begun, rest, planned = (event.first(steps).compositions for steps in parts)
    if (count := begun + rest - planned) == 0:
        return ()
    of = event.compositions
    what = "epochs" if event.sampling.once_an_epoch else "steps"
    said = f"{count} of {of:,} {what} {'is' if count == 1 else 'are'} counted twice"
    if account.end < event.steps:
        return (f"{said}: training ends after step {account.end:,}, to stay within the budget.",)
    whole = (*was.before, event.first(event.steps - was.base), *plan.counts)
    old, new = total_epsilon(whole, delta), total_epsilon(account.planned, delta)
    return (f"{said}: epsilon {format_epsilon(old)} -> {format_epsilon(new)}.",)


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


def _continued(run: Path, given: Mapping[str, Any], *, elsewhere: bool) -> tuple[Plan, Inherited]:
    """Return the plan of a run that continues, and what it inherits. Raises InputError."""
    saved, account = checkpoint.read(run), read_ledger(run)
    recorded, step = saved.record.config, saved.step
    if saved.record.searched:
        raise InputError(
            f"{run} is a trial of a search, whose cost is not that of one run, so it cannot be "
            "resumed. To end the search, repeat its command of dpmac tune."
        )
    damaged = (
        f"{run / folder.CHECKPOINTS / folder.LEDGER} is missing or damaged, so the number of steps "
        "taken is unknown, and the run cannot be resumed. Start a new one, or replace it with "
        f"{{force}} and {{out=}}{run}."
    )
    # A ledger that was put back from a backup does not know the later parts of its run.
    if account is None or account.begun < step or len(account.before) < saved.record.parts:
        raise InputError(damaged)
    _check_changes(run, by_setting(recorded), given, elsewhere=elsewhere)
    _check_config(run, config_file(by_setting(recorded), account.event))
    resolved = _with_noise_of(account.event, given, by_setting(recorded), elsewhere=elsewhere)
    plan = resolved.plan
    if plan.private != account.event.noisy:
        raise InputError(damaged)
    if plan.settings.canaries:
        raise InputError(
            f"{run} is an audit run, which cannot be resumed: an audit tests one guarantee with "
            "one set of canaries. Start a new run."
        )
    if elsewhere:
        _check_elsewhere(run, plan, step)
        inherited = Inherited(saved, account.past, step, notes=resolved.notes, data=resolved.data)
        return plan, inherited
    if state_of(step, account, plan.event) != "interrupted" and folder.is_published(run):
        raise InputError(
            f"{run} is finished: it took {step} of {plan.event.steps} steps. To train longer: "
            f"{folder.resume_elsewhere_command(run, ['--epochs N'])} "
            f"(N above {step // plan.event.steps_per_epoch})"
        )
    target = plan.settings.epsilon
    inherited = Inherited(saved, account.past, step, target, resolved.notes, account, resolved.data)
    return plan.placed(run), inherited


def _with_noise_of(
    event: TrainingEvent,
    given: Mapping[str, Any],
    recorded: Mapping[str, Any],
    *,
    elsewhere: bool,
) -> Resolved:
    """Return the plan of a run that continues, with the noise of its event as it began.

    A resumed run keeps to the epsilon that it was calibrated for. In another folder it may have
    other steps, so it has that noise, or another that is given, and no target.
    """
    if not elsewhere:
        return resolve(given, recorded, noise=event)
    return resolve(given, with_noise(recorded, event))


def _check_changes(
    run: Path, before: Mapping[str, Any], given: Mapping[str, Any], *, elsewhere: bool
) -> None:
    """Reject settings that this resume cannot change.

    ``before`` are the settings of the run. Your own data and model may be in other places.
    """
    source, dataset, model = before["dataset"], given.get("dataset"), given.get("model")
    moved = set[str]()
    if source not in DATASETS:
        if dataset is None and not Path(source).exists():
            remedy = "Put it back, or set {dataset} to its new path."
            if source.startswith("<"):
                remedy = "It was in memory: resume it in a program, resume(folder, dataset=...)."
            raise InputError(f"The run's data {source} was not found. {remedy}")
        moved |= {"dataset"} if dataset not in DATASETS else set()
    if isinstance(parse_model(before["model"]), UserModel):
        if model is None or not isinstance(parse_model(str(model)), UserModel):
            raise InputError(
                f"{run} trains your own model, {before['model']}. dpmac does not run code that "
                f"a file refers to. If you trust it: {folder.resume_command(run)}"
            )
        moved.add("model")
    others = [n for n in given if n not in moved and str(given[n]) != str(before.get(n))]
    if refused := [n for n in others if (n in FIXED if elsewhere else n not in FREE)]:
        named = [f"{{{name}}}" for name in refused]
        remedy = "Start a new run to change it."
        if not {*refused} & {*FIXED}:
            changes = [
                as_flags(f"{{{name}}}" if given[name] is True else f"{{{name}=}}{given[name]}")
                for name in refused
            ]
            elsewhere_command = folder.resume_elsewhere_command(run, changes)
            remedy = f"To train with other settings: {elsewhere_command}"
        raise InputError(f"{' and '.join(named)} cannot change in a resume. {remedy}")


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
    """Reject other numbers of records, other classes or other public weights."""
    if others := [name for name in now if now[name] != before.get(name)]:
        raise InputError(
            f"The {' and the '.join(others)} are not those that the run started with. Restore "
            "them, or start a new run."
        )


def _check_elsewhere(run: Path, plan: Plan, step: int) -> None:
    """Reject the run's own folder as another one, and no further steps. Raises InputError."""
    out, event = plan.settings.out, plan.event
    if out is not None and out.resolve() == run.resolve():
        raise InputError(
            f"{{out=}}{out} is the run to resume. Leave {{out}} out to resume it there with its "
            "settings, or use a new folder."
        )
    folder.check_place(plan)
    if event.steps <= step:
        raise InputError(
            f"{run} has already taken {step} steps, but {event.steps} are requested. Set "
            f"{{epochs}} (above {step // event.steps_per_epoch}) or {{steps}} (above {step})."
        )
