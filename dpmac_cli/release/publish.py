"""Publish a run: its model, report, card and audit, and their checksums."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from dpmac_cli.release import audit
from dpmac_cli.release.card import model_card
from dpmac_cli.release.model_file import save_model
from dpmac_cli.release.report import build_report, public_facts
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import device_name
from dpmac_cli.runs.session import Session
from dpmac_cli.storage import files
from dpmac_cli.storage.report_keys import ReportKeys

State = Literal["finished", "interrupted", "budget-spent"]


@dataclass(frozen=True)
class Finished:
    """The run has ended and its files are written; ``report`` is the content of report.json."""

    report: dict[str, Any] = field(repr=False)
    folder: Path
    state: State


def publish(session: Session, total_seconds: float) -> Finished:
    """Write the published files of a run, and their checksums last.

    An earlier report goes first: a kill in between must not leave it beside a later model.
    """
    plan, trainer, where, task = session.plan, session.trainer, session.where, session.task
    state = _state_of(session)
    scored = session.scored
    if scored is None and plan.privacy.scores is None:  # the run was resumed at its end
        scored = trainer.evaluate()
    theta = trainer.state.theta
    facts = public_facts(plan, session.spent(), task, theta.numel())
    for name in (folder.REPORT, folder.CARD, folder.AUDIT):
        (where / name).unlink(missing_ok=True)
    with trainer.published():
        save_model(where / folder.MODEL, task.model, facts)
    report = build_report(
        plan,
        facts,
        state=state,
        steps=trainer.state.step,
        history=session.history,
        metrics={} if scored is None else scored.values(),
        post_noise=trainer.public_values(),
        seconds=session.seconds,
        total_seconds=total_seconds,
        # Not the chunk: it says when memory ran out, which depends on the size of a batch.
        machine={
            "device": device_name(theta.device),
            "physical_batch": trainer.plan.physical_batch,
        },
    )
    files.write_atomically(where / folder.CARD, model_card(report, task.model).encode())
    files.write_atomically(where / folder.REPORT, files.to_json(report).encode())
    if state != "interrupted":  # it includes coins: only for runs that cannot be resumed
        _write_audit(session, cast(ReportKeys, report))
    session.write_metrics()
    folder.seal(where)
    return Finished(report, where, state)


def _state_of(session: Session) -> State:
    """Return how a run ended."""
    if session.trainer.state.step < session.steps:
        return "interrupted"
    return "finished" if session.steps == session.plan.privacy.steps else "budget-spent"


def _write_audit(session: Session, report: ReportKeys) -> None:
    """Write the guesses of an audit run; nothing for other runs."""
    if not session.trainer.hooks:
        return
    [canaries] = session.trainer.hooks
    plan = session.plan.privacy
    claim = (report["privacy"]["epsilon"], plan.delta, plan.audit.guesses)
    seen = (tuple(canaries.scores.tolist()), tuple(canaries.coins.tolist()))
    events = tuple(e for e in session.spent().events if e.records == "training")
    text = files.to_json(audit.Audit(*claim, *seen, events).as_json())
    files.write_atomically(session.where / folder.AUDIT, text.encode())
