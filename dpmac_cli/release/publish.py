"""Publish a run: its model, report, card and audit, and their checksums."""

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from dpmac_cli import __version__, files
from dpmac_cli.accounting import statements
from dpmac_cli.accounting.accountants import accountant_name, total_epsilon
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.accounting.selection import Search
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.features.frozen import WithHead
from dpmac_cli.models.language_model import adapter_of
from dpmac_cli.release import audit, report
from dpmac_cli.release.card import model_card
from dpmac_cli.release.model_file import save_model
from dpmac_cli.release.report_privacy import (
    Computed,
    CoveredScores,
    Privacy,
    Randomness,
    RiskBounds,
    SearchResult,
    SeedPolicy,
    Unit,
)
from dpmac_cli.release.sentences import AUDIT_RUN, DescribedRun, nist_statement, said, text
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import device_name
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.session import Session
from dpmac_cli.runs.trainer import RANGES
from dpmac_cli.tasks.regression import Regression
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
    canaries = plan.settings.canaries
    task_facts = dict[str, Any](session.trainer.data.task.facts)
    run = DescribedRun(plan, session.account, session.weighed)
    guarantee = privacy(run)
    audited = (
        report.Audit(canaries=canaries, guesses=guesses(canaries), statement=AUDIT_RUN)
        if canaries
        else None
    )
    return report.Facts(
        schema_version=report.SCHEMA_VERSION,
        optimizer=plan.optimizer.name,
        dataset=_dataset(run),
        model=_model(run, task, session.trainer.sums.size),
        input=data.records.model_copy(update=dict(data.records)),  # with keys that are defaults
        classes=tuple(task_facts["classes"]),
        target=task_facts["target"],
        privacy=guarantee,
        statement=nist_statement(run) if plan.private else None,
        audit=audited,
        calibration=_calibration(session.trainer.task, run),
        ranges=_ranges(session.trainer.ranges, run),
        residuals=_residuals(session.trainer.task, run),
        operating_point=_operating_point(session.trainer.task, guarantee.epsilon),
    )


def _ranges(counted: Mapping[str, Tensor], run: DescribedRun) -> report.Ranges | None:
    """Return the ranges of columns that were found by noisy counts; None if there are none."""
    if not counted:
        return None
    none = torch.empty(0)
    low, high = (counted.get(f"{RANGES}{end}", none).tolist() for end in ("low", "high"))
    schema, found = run.plan.facts.schema, dict[str, tuple[float, float]]()
    columns = {} if schema is None else {column.name: column for column in schema.columns}
    for name, *ends in zip(run.counted_columns, low, high, strict=True):
        found[name] = columns[name].told(*ends)
    return report.Ranges(found=found, statement=text("ranges", run))


def _residuals(task: Task, run: DescribedRun) -> report.Residuals | None:
    """Return what intervals of predicted numbers follow from; None without any."""
    if not isinstance(task, Regression) or task.residuals is None:
        return None
    found = asdict(task.residuals)
    return report.Residuals(**found, statement=text("residuals", run))


def _operating_point(task: Task, epsilon: float | None) -> report.OperatingPoint | None:
    """Return what decides between two classes; None where nothing was counted or asked for."""
    if (found := task.point_facts(epsilon or math.inf)) is None:
        return None
    return report.OperatingPoint(**found)


def _calibration(task: Task, run: DescribedRun) -> report.Calibration | None:
    """Return how outputs become probabilities; None without a calibration."""
    found = task.calibration_facts
    if found is None or isinstance(task, Regression):
        return None
    return report.Calibration(**found, statement=text("calibration", run))


def privacy(run: DescribedRun) -> Privacy:
    """Return the guarantee of a run with all its parts."""
    plan, spent, delta = run.plan, run.spent, run.plan.settings.delta
    cost = price(spent.events, delta, unit=plan.unit, search=plan.search)
    whole = spent.event
    if not math.isinf(plan.max_epsilon):
        whole = plan.event.first(plan.event.steps - spent.base)
    planned = total_epsilon((*spent.before, whole, *plan.counts), delta)
    risk = assess_risk(cost.done, plan.facts.train_size, plan.unit)
    return Privacy(
        private=plan.private,
        epsilon=files.finite_or_none(cost.epsilon),
        epsilon_planned=files.finite_or_none(max(planned, cost.epsilon)),
        delta=delta if plan.private else None,
        noise_multiplier=cost.noise_multiplier,
        unit=Unit(
            name=plan.unit,
            told_by=plan.facts.unit or None,
            records_in_a_step=plan.records_in_a_step,
        ),
        sampler=cost.sampler,
        sampling_rate=cost.sampling_rate,
        steps=cost.steps,
        covered_scores=_covered_scores(run) if plan.score else None,
        search=None if plan.search is None else _search(run, plan.search),
        events=spent.events,
        adjacency="add-or-remove-one" if plan.private else None,
        accountant=accountant_name(cost.accountant) if plan.private else None,
        risk=RiskBounds(**risk.values()) if plan.private else None,
        computed_from_records=_computed(run) if plan.private else None,
        not_covered=tuple(said("not covered", run)),
        statement=" ".join([*said("promise", run), cost.statement]),
        seed_policy=SeedPolicy(given=spent.seeded, statement=text("seeds", run)),
        randomness=Randomness(secure=spent.secure, statement=text("randomness", run)),
    )


def _covered_scores(run: DescribedRun) -> CoveredScores:
    """Return what the noise of test scores costs, and training without them."""
    events, delta = run.spent.events, run.plan.settings.delta
    trained, tested = (tuple(e for e in events if e.records == on) for on in ("training", "test"))
    return CoveredScores(
        released=sum(event.steps for event in tested),
        noise_multiplier=statements.common(event.noise_multiplier for event in tested),
        epsilon=files.finite_or_none(total_epsilon(tested, delta)),
        epsilon_of_training=files.finite_or_none(total_epsilon(trained, delta)),
        statement=text("covered scores", run),
    )


def _search(run: DescribedRun, search: Search) -> SearchResult:
    """Return what epsilon covers of a search, of which a run is the best trial."""
    return SearchResult(
        mean_trials=search.trials.mean,
        most_trials=search.trials.most,
        epsilon_of_a_trial=files.finite_or_none(search.trial_epsilon(run.plan.settings.delta)),
        space=search.space,
        candidates=search.candidates,
        statement=text("search", run),
    )


#: What noisy counts before training find.
FOUND = ("ranges and ranks that were not declared",)


def _computed(run: DescribedRun) -> tuple[Computed, ...]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts, covered = run.plan.facts, run.plan.score
    status = {
        "weights, and all numbers of the report except those below": "protected",
        f"number of training {run.counted}": "declared public",
        f"number of test {run.tested}": "declared public",
        **dict.fromkeys(
            (facts.task.public, *facts.records.public),
            "declared public" if facts.own else "published",
        ),
        **dict.fromkeys(facts.inferred, "not covered"),
        **dict.fromkeys(FOUND * bool(run.plan.ranges), "protected"),
        "scores of the test records": "protected" if covered else "not covered",
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/, except measured times": "protected",
    }
    return tuple(Computed(what=what, status=value) for what, value in status.items())


def _dataset(run: DescribedRun) -> report.Dataset:
    """Return the facts of the dataset, and what is said of how they were learned."""
    facts = run.plan.facts
    schema = facts.schema
    return report.Dataset(
        name=facts.name,
        train_size=facts.train_size,
        test_size=facts.test_size,
        sha256=facts.sha256,
        own=facts.own,
        held_out=facts.held_out,
        test_note=text("test records", run) or None,
        taken_from_records=facts.inferred,
        schema=None if schema is None else schema.model_dump(mode="json", by_alias=True),
        public_note=text("public records", run),
        text_note=text("texts", run) or None,
    )


def _model(run: DescribedRun, task: PreparedRun, trained: int) -> report.Model:
    """Return the facts of the network, and of the part that was public before training."""
    plan, recorded = run.plan, run.plan.recorded
    found = report.Model(
        name=plan.model.name,
        parameters=task.parameters,
        fix_norm=plan.settings.fix_norm,
        built_by=task.built_by or None,
    )
    statement = text("public part", run)
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
    found = {name: exact.get(name, last.get(f"test_{name}")) for name in task.keys}
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
    found = audit.Audit(
        claimed=written.privacy.epsilon,
        delta=session.plan.settings.delta,
        guesses=guesses(len(canaries.coins)),
        scores=tuple(canaries.scores.tolist()),
        coins=tuple(canaries.coins.tolist()),
        events=tuple(e for e in session.account.events if e.trains),
    )
    text_of_audit = files.to_json(found.as_json())
    files.write_atomically(session.where / folder.AUDIT, text_of_audit.encode())
