"""One training run, from a checked configuration to the files in its folder."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.schedule import epsilon_schedule
from dpmac_cli.config import resolve as configuration
from dpmac_cli.config.budget import affordable, settle_noise, training_event
from dpmac_cli.config.settings import TrainConfig, flag_name
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import DivergedError, InputError
from dpmac_cli.models.feature_cache import Computing
from dpmac_cli.models.user_models import is_factory
from dpmac_cli.runs import assist, audit, checkpoint, folder, ledger
from dpmac_cli.runs.environment import (
    choose_device,
    device_name,
    differences,
    environment,
    repeatable,
)
from dpmac_cli.runs.ledger import Ledger, Spent
from dpmac_cli.runs.model_card import model_card
from dpmac_cli.runs.publish import save_model
from dpmac_cli.runs.report import (
    Bill,
    Network,
    Outcome,
    State,
    build_report,
    metrics_line,
    public_facts,
)
from dpmac_cli.runs.setup import Task, make_task, make_trainer
from dpmac_cli.runs.tensorboard import EventLog
from dpmac_cli.storage import files
from dpmac_cli.torch_errors import explained
from dpmac_cli.training.diagnostics import Diagnosis, Diagnostics
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.loop import Evaluated, Progress, fit
from dpmac_cli.training.trainer import Trainer


@dataclass(frozen=True)
class Started:
    """A run is about to take its first step, or to go on.

    Attributes:
        config: with the noise settled.
        folder: where its files go.
        parameters: d.
        done: steps taken before.
        steps: that it will end at.
        cut_short: whether --max-epsilon allows fewer steps than were asked for.
        branch: why a resumed run does not go on exactly; None where it does, or is new.
        notes: what the person who resumes it should know.
    """

    config: TrainConfig
    folder: Path
    parameters: int
    done: int
    steps: int
    cut_short: bool
    branch: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """Something happened while training.

    Attributes:
        event: of the engine.
        epsilon: spent up to the event's step, exactly after the last one and as an upper bound
            before; None while the prices are still being worked out, which they are by the first
            Evaluated; ``inf`` without privacy.
        planned: what the whole run costs, likewise.
        not_private: averages since the last evaluation, if diagnostics are on.
    """

    event: Progress | Evaluated
    epsilon: float | None
    planned: float | None
    not_private: Diagnosis | None = None


@dataclass(frozen=True)
class Finished:
    """The run is over and its files are written.

    Attributes:
        report: as in report.json.
        folder: where.
        state: how it ended.
    """

    report: dict[str, Any]
    folder: Path
    state: State


@dataclass(frozen=True)
class Reduced:
    """Memory ran out in the step just taken: fewer samples are worked on at a time from now on.

    Attributes:
        step: t. chunk: how many.
    """

    step: int
    chunk: int


RunEvent = Computing | Started | Update | Reduced | Finished


@dataclass
class _Session:
    """A run that is being trained, at ``trainer.state.step``."""

    config: TrainConfig
    task: Task
    trainer: Trainer
    where: Path
    ledger: Ledger
    diagnostics: Diagnostics | None
    history: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    shown: int = 0  # how many of them the file has
    seconds: float = 0.0
    branch: str | None = None
    notes: tuple[str, ...] = ()
    ranks: Ranks | None = None
    events: EventLog | None = None

    @property
    def steps(self) -> int:
        """Step that the run will end at."""
        return self.ledger.spent.end

    @property
    def base(self) -> int:
        """Step at which the current branch began; 0 for a run without branches."""
        return self.ledger.spent.base

    def event(self, steps: int) -> TrainingEvent:
        """What the current branch does by the time the run has taken ``steps`` in all."""
        return training_event(self.config, steps - self.base)

    def bill(self) -> Bill:
        """What has been done with the records, by this session and by those before."""
        spent, charged = self.ledger.spent, self.ledger.charged(self.trainer.state.step)
        events = (*spent.earlier, self.event(charged))
        planned = self.event(self.config.total_steps)
        return Bill(events, planned, spent.seeded, spent.secure, spent.abandoned)


def train(
    config: TrainConfig,
    stop: Callable[[], bool] = lambda: False,
    data: Data | None = None,
    ranks: Ranks | None = None,
    abandoned: tuple[TrainingEvent, ...] = (),
) -> Iterator[RunEvent]:
    """Train, write the run folder, and say what happens as it happens.

    Args:
        config: from :func:`dpmac_cli.config.resolve.resolve`.
        stop: asked after every step; True ends the run early with everything written.
        data: already on the device; None to load it.
        ranks: the processes of the run, of which this one is the first; the others
            :func:`~dpmac_cli.runs.assist.assist`.
        abandoned: events of attempts that this run replaces in a study. Its report lists them; the
            study's epsilon covers them, and its own does not.

    With ``force``, the run that was there is removed once this one is ready for its first step.

    Raises:
        InputError: data, device or folder cannot be used; nothing was written.
        BudgetError: the budget allows no step, or no noise meets the target.
        ModelError: the model mixes samples.
        RunError: training diverged, memory ran out, or the device failed.
    """
    with explained():
        device = choose_device(config.device, ranks)
        if config.out is not None:
            folder.check_chosen_folder(config.out, config.force)
        config = replace(settle_noise(config), device=str(device))
        session = yield from _session(config, device, data, stop, ranks, abandoned=abandoned)
        where = session.where
        with folder.locked(where):
            if config.out is not None:  # another run may have ended in it meanwhile
                folder.check_chosen_folder(where, config.force)
            # A kill on the way leaves the ledger of the old run or of this one, and never a
            # checkpoint of the old run beside the ledger of this one.
            checkpoint.discard(where)
            session.ledger.write(0)
            folder.clear(where)
            if abandoned:
                ledger.keep_attempts(where, abandoned)
            _write_config(session)
            _save(session)  # so that a run can be resumed from its first moment on
            yield from _drive(session, stop)


def finish(events: Iterable[RunEvent]) -> Finished:
    """Go on to the end of a run, without a look at what happens on the way.

    Args:
        events: of :func:`train` or :func:`resume`, whose exceptions come through.
    """
    *_, last = events
    assert isinstance(last, Finished)  # noqa: S101
    return last


def _session(
    config: TrainConfig,
    device: torch.device,
    data: Data | None,
    stop: Callable[[], bool],
    ranks: Ranks | None,
    where: Path | None = None,
    base: int = 0,
    earlier: tuple[TrainingEvent, ...] = (),
    abandoned: tuple[TrainingEvent, ...] = (),
) -> Generator[Computing, None, _Session]:
    """A run or a branch before its first step, in a folder of its own unless one is given."""
    if ranks is not None:
        assist.check(config)
    steps = base + affordable(config, config.total_steps - base, earlier)
    diagnostics = Diagnostics(clipped=not config.no_dp) if config.diagnostics else None
    task = yield from make_task(config, device, len(earlier), data, stop)
    trainer = make_trainer(config, steps, device, diagnostics, len(earlier), task=task, ranks=ranks)
    if where is None and config.out is not None:
        where = folder.make_folder(config.out)
    elif where is None:
        stem = f"{config.dataset_name}-{config.optimizer}{'-no-dp' if config.no_dp else ''}"
        where = folder.new_folder(Path("runs"), stem)
    event, seeded = training_event(config, steps - base), config.seed is not None
    spent = Spent(earlier, event, base, base, seeded, config.secure, abandoned)
    kept = Ledger(where, spent)
    return _Session(config, task, trainer, where, kept, diagnostics, notes=task.notes, ranks=ranks)


def _write_config(session: _Session) -> None:
    """Write config.yaml and its checksum, the only one while the run goes on."""
    where = session.where
    folder.unseal(where)
    text = configuration.to_yaml(session.config)
    files.write_atomically(where / folder.CONFIG, text.encode())
    folder.seal(where, (folder.CONFIG,))


def resume(
    where: Path | str,
    flags: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
    data: Data | None = None,
    ranks: Ranks | None = None,
) -> Iterator[RunEvent]:
    """Resume a run from its newest whole checkpoint.

    With nothing changed, the run ends as if it had never stopped, bit for bit on the same CPU.
    With anything changed (more epochs, another rate, another machine), and always on a GPU, the
    run is a branch: its sampler and noise use new keys, so that no noise is added to two different
    gradients, and epsilon covers every branch. Settings are those of the checkpoint; flags change
    them.

    Args:
        where: a run folder.
        flags: settings to change, as in :func:`~dpmac_cli.config.resolve.resolve`; ``model``, too,
            for a user-supplied model, whose code is not imported because a file names it.
        stop, data, ranks: as in :func:`train`. With another number of ranks it is a branch.

    Raises:
        InputError: there is no such run, or the change cannot be made to it.
            Or no checkpoint is whole, or config.yaml was altered.
        RunError: as in :func:`train`.
    """
    where = Path(where)
    folder.check_run_folder(where)
    with folder.locked(where), explained():
        session = yield from _resumed(where, flags or {}, data, stop, ranks)
        yield from _drive(session, stop)


#: Settings that make another run, not another branch of the same.
FIXED = (
    *("dataset", "model", "optimizer", "sampler", "no_dp", "epsilon", "ema"),
    *("canaries", "canary_kind", "guesses"),
    *("features", "feature_groups", "pretrained", "train"),
    *("channels", "image_size", "classes"),
)
#: Settings that change nothing about what is computed. Where a dataset or a user-supplied model may
#: have another path, its contents are compared by their fingerprints.
ASIDE = ("device", "diagnostics", "tensorboard", "plot", "dataset", "model")


def _resumed(
    where: Path,
    flags: Mapping[str, Any],
    data: Data | None,
    stop: Callable[[], bool],
    ranks: Ranks | None,
) -> Generator[Computing, None, _Session]:
    saved = checkpoint.newest(where)
    record = saved.record
    typed = {name: value for name, value in flags.items() if value is not None}
    free = _named_again(where, record["config"], typed)
    for name in (name for name in FIXED if name not in free):
        given, flag = typed.pop(name, None), flag_name(name)
        if given and str(given) != str(record["config"].get(flag)):
            raise InputError(
                f"--{flag} cannot change in a resumed run. Start a new run to change it."
            )
    resolved = configuration.change(record["config"], typed)
    config = resolved.config
    device = choose_device(config.device, ranks)
    config = replace(config, device=str(device), out=where)
    changed = [
        f"{name} changed"
        for name, value in sorted(config.recorded().items())
        if name not in ASIDE and record["config"].get(name) != value
    ]
    if others := sorted(differences(record["environment"], environment(device, ranks))):
        changed.append(f"the machine or its software changed ({', '.join(others)})")
    if config.seed is not None:
        changed.append("seed changed")
    step = record["state"]["step"]
    before, lost = _before(where, record)
    if len(before.earlier) > len(record["spent"]["earlier"]):
        changed.append("the checkpoint of the last branch is lost")
    told = all(folder.vouched(where, name) for name in folder.PUBLISHED)
    told = told and folder.reported_steps(where) >= step  # else files are yet to be written
    if config.total_steps < step or (config.total_steps == step and told):
        reached = f"is finished: it took {step} of {config.total_steps} steps"
        if config.total_steps < step:
            reached = (
                f"has taken {step} steps already, more than the {config.total_steps} asked for"
            )
        raise InputError(
            f"{where} {reached}. To train on, give more with --epochs (above "
            f"{step // config.steps_per_epoch}) or --steps (above {step})."
        )
    if not repeatable(device) and config.total_steps > step:
        changed.append("steps on a GPU cannot be repeated bit for bit")
    if changed and config.canaries is not None:
        raise InputError(
            f"{where} is an audit run, which can only be resumed exactly ({'; '.join(changed)}): "
            "an audit is of one guarantee, and guesses one set of coins. Start a new run."
        )
    branch = "; ".join(changed) or None
    base, earlier = (step, before.events) if changed else (before.base, before.earlier)
    session = yield from _session(config, device, data, stop, ranks, where, base, earlier)
    _check_same(session.task, record.get("fingerprints", {}), exactly=branch is None)
    state = session.trainer.state
    state.restore(saved.tensors, record["state"])
    spent = replace(
        session.ledger.spent,
        begun=base if changed else before.begun,
        seeded=before.seeded or config.seed is not None,
        secure=before.secure and config.secure,
        abandoned=before.abandoned,
    )
    session = replace(
        session,
        ledger=Ledger(where, spent),
        history=list(record["history"]),
        shown=len(record["history"]),
        seconds=record["seconds"],
        branch=branch,
        notes=(
            *resolved.notes,
            *session.notes,
            *(f"{name} is damaged; resuming from step {step}." for name in saved.damaged),
            *lost,
        ),
    )
    # First of all what was spent: where the kill of a branch comes next, the run has no checkpoint
    # of that branch, and its next resume is another one.
    session.ledger.write(spent.begun)
    if branch is None:
        state.restore_generators(record["state"])
    else:
        kept = _save(session)
        checkpoint.discard(where, but=kept)
        folder.set_aside(where)
    _write_config(session)  # which removes the checksums of what changes next
    _write_metrics(session)
    return session


def _before(where: Path, record: Mapping[str, Any]) -> tuple[Spent, tuple[str, ...]]:
    """Return what was spent before a resume, by the largest of all witnesses, and notes on it."""
    saved, found = Spent.of(record["spent"]), ledger.read(where)
    same = found is not None and replace(found, begun=saved.begun) == saved
    if found is None or not (same or len(found.earlier) > len(saved.earlier)):
        lost = (
            f"{checkpoint.FOLDER}/{ledger.FILE} is missing, or is damaged, so it is unknown how "
            f"many steps were taken: all {saved.event.steps} planned ones are charged."
        )
        return replace(saved, begun=saved.end), (lost,)
    shown = [line.get("step") for line in files.read_lines(where / folder.METRICS)]
    steps = [step for step in shown if isinstance(step, int)]
    begun = max(found.begun, record["state"]["step"], folder.reported_steps(where), *steps)
    return replace(found, begun=min(begun, found.end)), ()


def _named_again(where: Path, recorded: Mapping[str, Any], typed: Mapping[str, Any]) -> set[str]:
    """Return which of dataset and model may have another path. Raises InputError if one must."""
    free = set()
    source, given = recorded["dataset"], typed.get("dataset")
    if source not in DATASETS:
        if given is None and not Path(source).exists():
            raise InputError(
                f"The run's data {source} is not where it was. Put it back, or name its new place "
                "with --dataset."
            )
        free |= {"dataset"} if given not in DATASETS else set()
    if is_factory(recorded["model"]):
        if not is_factory(str(typed.get("model"))):
            raise InputError(
                f"{where} trains a model of your own, {recorded['model']}. No file makes dpmac run "
                f"code, so name it again, if you trust it: {folder.resume_command(where)}"
            )
        free.add("model")
    return free


#: Fingerprints that may not change, and those of them that may in a branch.
_SAME = {
    "data": "The records are not those",
    "classes": "The names of the classes are not those",
    "pretrained": "The file of --pretrained is not the one",
    "constants": "The ranges low and high are not those",
    "network": "The factory or the file of --model is not the one",
    "features": "The features are not those",
}
EXACT = ("constants", "network", "features")
SPENT = "The privacy cost so far is for the original. Restore it, or start a new run."
NOT_EXACTLY = (
    "An exact resume repeats the noise, which must not be added to other gradients. Restore the "
    "original; or change a setting, such as --epochs, to resume as a branch with new noise; or "
    "start a new run."
)


def _check_same(task: Task, before: Mapping[str, str], *, exactly: bool) -> None:
    """Reject other records (their number sets the rate), and in an exact resume other networks."""
    others = [
        f"{_SAME[of]} that the run began with. {NOT_EXACTLY if of in EXACT else SPENT}"
        for of in _SAME
        if (exactly or of not in EXACT) and task.fingerprints.get(of) != before.get(of)
    ]
    if others:
        raise InputError(others)


def _write_metrics(session: _Session) -> None:
    text = "".join(map(files.to_line, session.history))
    files.write_atomically(session.where / folder.METRICS, text.encode())


def goes_on_exactly(where: Path, device: str) -> bool:
    """Whether resuming a run with nothing else changed would replay it, here, on a device.

    Raises:
        InputError: there is no such device.
    """
    try:
        record = checkpoint.newest(where).record
    except InputError:
        return False
    here, over = choose_device(device), record["state"]["step"] >= Spent.of(record["spent"]).end
    return record["environment"] == environment(here) and (repeatable(here) or over)


def _drive(session: _Session, stop: Callable[[], bool]) -> Iterator[RunEvent]:
    """Train a session to its end and write its files."""
    began = time.perf_counter()
    if session.config.tensorboard:
        session.events = EventLog(session.where)
        session.events.follow(session.history)
    counts = (session.trainer.state.theta.numel(), session.trainer.state.step, session.steps)
    cut_short = session.steps < session.config.total_steps
    said = (session.branch, session.notes)
    yield Started(session.config, session.where, *counts, cut_short, *said)
    if session.ranks is not None:
        assist.begin(session.ranks, session.config, session.task, session.trainer, session.where)
    try:
        yield from _updates(session, stop)
    except DivergedError as failure:
        # That it diverged was computed from the records, so a branch must count those steps.
        epoch = failure.step / session.config.steps_per_epoch
        session.history.append({"step": failure.step, "epoch": epoch, "diverged": True})
        session.ledger.settle(failure.step)
        _show(session)
        raise
    session.ledger.settle(session.trainer.state.step)
    if session.ranks is not None:
        session.ranks.dismiss()
    _save(session)
    yield _publish(session, time.perf_counter() - began)


def _updates(session: _Session, stop: Callable[[], bool]) -> Iterator[Update | Reduced]:
    """Train a session, and save and show how far it is."""
    config, trainer, where = session.config, session.trainer, session.where
    every_steps, every_seconds = config.checkpoint_interval
    saved, chunk = time.perf_counter(), trainer.state.chunk

    def due(step: int) -> bool:
        return every_steps is not None and step % every_steps == 0

    with ThreadPoolExecutor(1) as pool:
        # Prices are composed beside the training, which they must not hold up.
        prices = pool.submit(
            epsilon_schedule,
            session.event(session.steps),
            config.delta,
            config.steps_per_epoch,
            session.ledger.spent.earlier,
        )
        for event in fit(trainer, stop, due, session.seconds, session.ledger.before):
            session.seconds = event.seconds
            scored = isinstance(event, Evaluated)
            schedule = prices.result() if scored or prices.done() else None
            epsilon = None if schedule is None else schedule.at(event.step - session.base)
            if isinstance(event, Evaluated):
                if event.last:  # as in the report: a run may end between the schedule's points
                    epsilon = total_epsilon(session.bill().events, config.delta)
                assert epsilon is not None  # noqa: S101  (the schedule was waited for)
                session.history.append(metrics_line(event, epsilon, config))
            # A step that is yet to be scored would never be, if a run went on from after it.
            scores = event.step % config.steps_per_epoch == 0 or event.step == session.steps
            settled = scored or not scores
            # And one done again in chunks of another size would round the same sum differently,
            # under the same noise: nothing of it may be seen before this is saved.
            reduced = settled and trainer.state.chunk < chunk
            now = time.perf_counter()
            late = every_seconds is not None and now - saved >= every_seconds
            if reduced or (settled and (late or due(event.step))):
                kept = _save(session)
                saved = now
                if reduced:  # nor may one from before serve, where chunks were larger
                    checkpoint.discard(where, but=kept)
            _show(session)
            if reduced:
                chunk = trainer.state.chunk
                yield Reduced(event.step, chunk)
            planned = schedule.points[-1][1] if schedule else None
            diagnose = session.diagnostics if scored else None
            seen = diagnose.flush(where / folder.DIAGNOSTICS, event.step) if diagnose else None
            yield Update(event, epsilon, planned, seen)


def _publish(session: _Session, total_seconds: float) -> Finished:
    """Write the files that a run ends with, their checksums last."""
    config, trainer, where = session.config, session.trainer, session.where
    state: State = "finished" if session.steps == config.total_steps else "budget-spent"
    if trainer.state.step < session.steps:
        state = "interrupted"
    outcome = Outcome(
        state=state,
        history=session.history,
        post_noise=trainer.public_values(),
        seconds=session.seconds,
        total_seconds=total_seconds,
        device=device_name(trainer.state.theta.device),
        chunk=trainer.state.chunk,
    )
    task = session.task
    model = task.model
    network = Network(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=trainer.state.theta.numel(),
        independence=task.independence,
        built_by=task.built_by,
        pretrained=task.fingerprints.get("pretrained"),
    )
    facts = public_facts(config, session.bill(), network)
    with trainer.published():
        save_model(where / folder.MODEL, model, facts)
    report = build_report(config, facts, trainer.state.step, outcome)
    files.write_atomically(where / folder.CARD, model_card(report, model).encode())
    files.write_atomically(where / folder.REPORT, files.to_json(report).encode())
    if state != "interrupted":
        _write_audit(session, report)
    _write_metrics(session)
    if config.plot:
        from dpmac_cli.plots import draw_curves  # noqa: PLC0415  (loads matplotlib)

        title = f"{config.dataset_name}, {config.optimizer}"
        draw_curves(session.history, title, where / folder.CURVES)
    folder.seal(where)
    return Finished(report, where, state)


def _write_audit(session: _Session, report: Mapping[str, Any]) -> None:
    """Write audit.json, coins and all: only when the run is over, and cannot go on."""
    canaries = session.trainer.audited()
    if canaries is None:
        return
    price, settings = report["privacy"], report["audit"]
    claim = (price["epsilon"], price["delta"], settings["kind"], settings["guesses"])
    seen = (tuple(canaries.scores.tolist()), tuple(canaries.coins.tolist()))
    text = files.to_json(audit.Audit(*claim, *seen).as_json())
    files.write_atomically(session.where / folder.AUDIT, text.encode())


def _show(session: _Session) -> None:
    """Add to metrics.jsonl, and to the events, the lines that are not there yet."""
    for line in session.history[session.shown :]:
        files.append_line(session.where / folder.METRICS, line)
        session.shown += 1
    if session.events is not None:
        session.events.follow(session.history)


def _save(session: _Session) -> Path:
    """Write a checkpoint. Raises OSError, and DivergedError: from there no run can go on."""
    session.trainer.check_finite()
    state = session.trainer.state
    record = {
        "state": state.numbers(),
        "config": session.config.recorded(),
        "spent": asdict(session.ledger.spent),
        "history": session.history,
        "seconds": session.seconds,
        "fingerprints": dict(session.task.fingerprints),
        "environment": environment(state.theta.device, session.ranks),
    }
    return checkpoint.save(session.where, state.step, state.tensors(), record)
