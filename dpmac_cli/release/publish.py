"""Publish a run: its model, report, card and audit, and their checksums."""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import safetensors.torch

from dpmac_cli import __version__, files
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.models.features import WithHead
from dpmac_cli.models.text_encoder import adapter_of
from dpmac_cli.release import audit, report
from dpmac_cli.release.card import model_card
from dpmac_cli.release.model_file import save_model
from dpmac_cli.release.sentences import AUDIT_RUN, Case, nist_statement, privacy, text
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import device_name
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.session import Session
from dpmac_cli.tasks.task import Task

State = Literal["finished", "interrupted", "budget-spent"]
PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")


@dataclass(frozen=True)
class Finished:
    """The run has ended and its files are written; ``report`` is the content of report.json."""

    report: dict[str, Any] = field(repr=False)
    folder: Path
    state: State


def publish(session: Session) -> Finished:
    """Write the published files of a run, and their checksums last.

    The report comes last but for the checksums, and an earlier one was removed as training began: a
    kill leaves no report beside another model.
    """
    plan, trainer, where, task = session.plan, session.trainer, session.where, session.task
    scored = session.scored
    if scored is None and plan.score is None:  # the run was resumed at its end
        scored = trainer.evaluate()
    facts = public_facts(session)
    with trainer.published():
        save_model(where / folder.MODEL, task.model, facts.values())
        _write_adapter(task, plan, where)
    exact = {} if scored is None else scored.values()
    written = _report(session, facts, exact)
    files.write_atomically(where / folder.CARD, model_card(written, task.model).encode())
    _write_audit(session, written)
    session.write_metrics()
    files.write_atomically(where / folder.REPORT, files.to_json(written.values()).encode())
    folder.seal(where)
    return Finished(written.values(), where, _state_of(session))


def _write_adapter(task: PreparedRun, plan: Plan, where: Path) -> None:
    """Write the LoRA updates of a language model; nothing for other runs."""
    if plan.facts.task.network is None or not isinstance(task.model, WithHead):
        return
    # Its folder without those above it, which may tell of the user.
    tensors, config = adapter_of(task.model, f"./{Path(plan.recorded['backbone']).resolve().name}")
    if tensors:
        files.write_atomically(where / folder.ADAPTER, safetensors.torch.save(tensors))
        files.write_atomically(where / folder.ADAPTER_CONFIG, files.to_json(config).encode())


def public_facts(session: Session) -> report.Facts:
    """Return the facts of a run to publish with its weights."""
    plan, task, data = session.plan, session.task, session.plan.facts
    canaries, task_facts = plan.settings.canaries, dict[str, Any](data.task.facts)
    case = Case(plan, session.account, session.weighed)
    guarantee = privacy(case)
    audited = (
        report.Audit(canaries=canaries, guesses=guesses(canaries), statement=AUDIT_RUN)
        if canaries
        else None
    )
    return report.Facts(
        schema_version=report.SCHEMA_VERSION,
        optimizer=plan.optimizer.name,
        dataset=_dataset(case),
        model=_model(case, task, session.trainer.sums.size),
        input=report.Input(
            levels=data.levels,
            record=task.record,
            texts=data.texts,
            shape=data.shape,
            mean=data.mean,
            std=data.std,
            **({} if data.standardised else {"standardised": False}),
        ),
        classes=tuple(task_facts["classes"]),
        target=task_facts["target"],
        privacy=guarantee,
        statement=nist_statement(case) if plan.private else None,
        audit=audited,
    )


def _dataset(case: Case) -> report.Dataset:
    """Return the facts of the dataset, and what is said of how they were learned."""
    facts = case.plan.facts
    schema = facts.schema
    return report.Dataset(
        name=facts.name,
        train_size=facts.train_size,
        test_size=facts.test_size,
        sha256=facts.sha256,
        own=facts.source is not None,
        held_out=facts.held_out,
        test_note=text("test records", case) or None,
        taken_from_records=facts.inferred,
        schema=None if schema is None else schema.model_dump(mode="json", by_alias=True),
        public_note=text("public records", case),
        text_note=text("texts", case) or None,
    )


def _model(case: Case, task: PreparedRun, trained: int) -> report.Model:
    """Return the facts of the network, and of the part that was public before training."""
    plan, recorded = case.plan, case.plan.recorded
    found = report.Model(
        name=plan.model.name,
        parameters=task.parameters,
        fix_norm=plan.settings.fix_norm,
        built_by=task.built_by or None,
    )
    statement = text("public part", case)
    if not statement:
        return found
    encoder = plan.features if isinstance(plan.features, TextEncoder) else None
    part = report.PublicPart(
        features=recorded.get("features"),
        backbone=recorded.get("backbone") if encoder is None else encoder.kind,
        backbone_size=recorded.get("backbone_size"),
        backbone_flips=recorded.get("backbone_flips", False),
        encoder=None if encoder is None else encoder.config.model_dump(),
        lora_rank=recorded.get("lora_rank"),
        pretrained=None if plan.pretrained is None else plan.pretrained.name,
        sha256=task.pretrained,
        train=recorded.get("train"),
        trained_parameters=trained,
        statement=statement,
    )
    return found.model_copy(update={"public_part": part})


def _report(session: Session, facts: report.Facts, exact: Mapping[str, Any]) -> report.Report:
    """Return the complete report; ``exact`` are test metrics as JSON values."""
    plan, trainer = session.plan, session.trainer
    steps, used = trainer.state.step, plan.optimizer.used(private=plan.private)
    device = trainer.state.theta.device
    return report.Report(
        **dict(facts),
        state=_state_of(session),
        test=scores(plan.facts.task, session.history, exact),
        hyperparameters=report.Hyperparameters(
            steps=steps,
            epochs=steps / plan.event.steps_per_epoch,
            batch_size=plan.settings.batch_size,
            **{name: getattr(plan.optimizer, name) for name in used},
        ),
        recipe={name: plan.recorded.get(name, d) for name, d in RECIPE_DEFAULTS.items()},
        timings=report.Timings(training_seconds=round(session.seconds, 3) if plan.timed else None),
        versions={"python": platform.python_version(), "dpmac": __version__}
        | {package: version(package) for package in PACKAGES},
        # Not the chunk: it says when memory ran out, which depends on the size of a batch.
        machine=report.Machine(
            device=device_name(device),
            physical_batch=physical_batch(plan.settings, plan.facts, device.type),
            system=platform.system(),
            processor=platform.machine(),
        ),
    )


#: With fewer guesses, even if all are right, an audit cannot show an epsilon above 1.8.
FEW_GUESSES = 20


def guesses(canaries: int) -> int:
    """Return the number of canaries that the attack guesses, half of them in, half out."""
    return max(canaries // 10, min(canaries, FEW_GUESSES))


def scores(task: Task, history: list[dict[str, Any]], exact: Mapping[str, Any]) -> report.Scores:
    """Return test scores: exact metrics, or scores that were released with noise.

    ``history`` are the lines of metrics.jsonl.
    """
    last, headline = history[-1], task.headline
    found = {name: exact.get(name, last.get(f"test_{name}")) for name in task.reported}
    return report.Scores(
        samples=last["test_samples"],
        loss=last["test_loss"],
        **{**found, headline.key: last.get(headline.logged)},
    )


def _state_of(session: Session) -> State:
    """Return how a run ended."""
    if session.trainer.state.step < session.steps:
        return "interrupted"
    plan = session.plan
    if session.steps >= plan.event.steps or math.isinf(plan.max_epsilon):
        return "finished"
    return "budget-spent" if session.account.kept_to >= plan.max_epsilon else "finished"


def _write_audit(session: Session, written: report.Report) -> None:
    """Write the guesses of an audit run; nothing for other runs."""
    if not session.trainer.hooks:
        return
    [canaries] = session.trainer.hooks
    delta = session.plan.settings.delta
    claim = (written.privacy.epsilon, delta, guesses(len(canaries.coins)))
    seen = (tuple(canaries.scores.tolist()), tuple(canaries.coins.tolist()))
    events = tuple(e for e in session.account.events if e.records == "training")
    found = files.to_json(audit.Audit(*claim, *seen, events).as_json())
    files.write_atomically(session.where / folder.AUDIT, found.encode())
