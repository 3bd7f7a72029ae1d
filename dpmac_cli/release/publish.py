"""Publish a run: its model, report, card and audit, and their checksums."""

import math
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dpmac_cli import __version__, files
from dpmac_cli.accounting.accountants import accountant_name
from dpmac_cli.accounting.events import ADJACENCY
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.networks import UserModel, parse_model
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import GROUPS, OPTIMIZER
from dpmac_cli.features.frozen import WithHead
from dpmac_cli.models.build import Network
from dpmac_cli.models.language_model import adapter_of
from dpmac_cli.release import audit, report
from dpmac_cli.release.card import model_card
from dpmac_cli.release.model_file import load_model, save_model
from dpmac_cli.release.run import Run
from dpmac_cli.release.sentences import DescribedRun, said, sentences_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device, device_name
from dpmac_cli.runs.ledger import state_of
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.session import Session
from dpmac_cli.runs.trainer import RANGES
from dpmac_cli.tasks.calibration import Calibration
from dpmac_cli.tasks.operating_point import OperatingPoint
from dpmac_cli.tasks.residuals import Residuals
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import losses

PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")


def publish(session: Session, network: Network | None = None) -> Run:
    """Write the published files of a run, and their checksums last.

    The report comes last but for the checksums, and an earlier one was removed as training began: a
    kill leaves no report beside another model. ``network`` is a network of the program, of which
    the run's own is a copy.
    """
    plan, trainer, where, task = session.plan, session.trainer, session.where, session.task
    scored = session.scored
    tested = trainer.data.test is not None
    if tested and scored is None and plan.score is None:  # the run was resumed at its end
        scored = trainer.evaluate()
    exact = {} if scored is None else scored.values()
    written = describe_run(session, exact)
    facts = {name: getattr(written, name) for name in report.Facts.model_fields}
    with trainer.published():
        save_model(where / folder.MODEL, task.model, report.Facts(**facts).values())
        _write_adapter(task, plan, where)
    files.write_atomically(where / folder.CARD, model_card(written, task.model).encode())
    _write_audit(session, written)
    session.write_metrics()
    files.write_atomically(where / folder.REPORT, files.to_json(written.values()).encode())
    folder.seal(where)
    settings = plan.settings
    own = isinstance(parse_model(str(settings.model)), UserModel) and network is None
    read = partial(
        load_model,
        where,
        choose_device(settings.device),
        factory=str(settings.model) if own else None,
        network=network,
    )
    return Run(written.values(), where, read)


def _write_adapter(task: PreparedRun, plan: Plan, where: Path) -> None:
    """Write the LoRA updates of a language model; nothing for other runs."""
    if plan.facts.task.network is None or not isinstance(task.model, WithHead):
        return
    # Its folder without those above it, which may tell of the user.
    tensors, config = adapter_of(task.model, f"./{Path(plan.recorded['backbone']).resolve().name}")
    if tensors:
        files.write_atomically(where / folder.ADAPTER, safetensors.torch.save(tensors))
        files.write_atomically(where / folder.ADAPTER_CONFIG, files.to_json(config).encode())


def describe_run(session: Session, exact: Mapping[str, Any]) -> report.Report:
    """Return the report of a run; ``exact`` are test metrics as JSON values."""
    run = DescribedRun(session.plan, session.account, session.weighed, _released(session))
    guarantee = guarantee_of(run)
    point = session.trainer.task.point_facts(guarantee["epsilon"] or math.inf)
    if point is not None:
        guarantee["sentences"]["operating_point"] = point["statement"]
    return report.Report(
        version=report.FORMAT,
        settings=_settings(session),
        data=_data(session),
        network=_network(session, point),
        features=_features(session),
        **guarantee,
        scores=scores(session.plan.facts.task, session.history, exact),
        environment=_environment(session),
        state=state_of(session.trainer.state.step, session.account, session.plan.event),
    )


def guarantee_of(run: DescribedRun) -> dict[str, Any]:
    """Return what a run did to its records, what that costs, and what is said of it, by key."""
    plan, account = run.plan, run.spent
    cost = price(account.events, plan.settings.delta, unit=plan.unit, search=plan.search)
    risk = assess_risk(cost.done, plan.facts.train_size, plan.unit) if plan.private else None
    sentences = {
        "guarantee": " ".join([*said("promise", run), cost.statement]),
        **sentences_of(run),
    }
    if risk is not None:
        sentences |= {
            "risk": risk.statement,
            "unit": plan.unit,
            "adjacency": f"{ADJACENCY}: adding or removing any one {plan.unit}",
            "accountant": accountant_name(cost.accountant),
            "computed_from_records": computed(run),
        }
    return {
        "events": account.events,
        "epsilon": files.finite_or_none(cost.epsilon),
        "delta": plan.settings.delta if plan.private else None,
        "risk": risk,
        "search": plan.search,
        "seeded": account.seeded,
        "secure": account.secure,
        "sentences": sentences,
    }


def _released(session: Session) -> tuple[str, ...]:
    """Return the topics of the histograms of training records that were released."""
    task = session.trainer.task
    released = {
        "ranges": session.trainer.ranges,
        "calibration": getattr(task, "calibration", None),
        "residuals": getattr(task, "residuals", None),
    }
    return tuple(topic for topic, of in released.items() if of)


def _settings(session: Session) -> Any:
    """Return the settings of a run for its report: no path, and nothing without an effect."""
    plan = session.plan
    device = session.trainer.state.theta.device.type
    used = ("optimizer", *plan.optimizer.used(private=plan.private))
    values = {
        name: value
        for name, value in plan.recorded.items()
        if name not in report.LEFT_OUT and (GROUPS[name] != OPTIMIZER or name in used)
    }
    values |= {"dataset": plan.facts.name, "model": plan.model.name}
    # Not the chunk: it says when memory ran out, which depends on the size of a batch.
    values["physical_batch"] = physical_batch(plan.settings, plan.facts, device)
    if plan.pretrained is not None:
        values["pretrained"] = plan.pretrained.name
    if isinstance(plan.features, TextEncoder):
        values["backbone"] = plan.features.kind
    return report.Recorded(**values)


def _data(session: Session) -> report.Data:
    """Return the facts of the records."""
    facts, task_facts = session.plan.facts, dict[str, Any](session.trainer.data.task.facts)
    schema = facts.schema
    return report.Data(
        name=facts.name,
        own=facts.own,
        train_size=facts.train_size,
        test_size=facts.test_size,
        held_out=facts.held_out,
        unit=facts.unit or None,
        records=facts.records.model_copy(update=dict(facts.records)),  # with keys by default
        classes=tuple(task_facts["classes"]),
        target=task_facts["target"],
        schema=None if schema is None else schema.model_dump(mode="json", by_alias=True),
        taken_from_records=facts.inferred,
        ranges=_ranges(session.trainer.ranges, session.plan),
        sha256=facts.sha256,
    )


def _ranges(counted: Mapping[str, Tensor], plan: Plan) -> dict[str, tuple[float, float]] | None:
    """Return the ranges of columns that were found by noisy counts; None if there are none."""
    if not counted:
        return None
    none = torch.empty(0)
    low, high = (counted.get(f"{RANGES}{end}", none).tolist() for end in ("low", "high"))
    schema, ranges = plan.facts.schema, dict[str, tuple[float, float]]()
    columns = {} if schema is None else {column.name: column for column in schema.columns}
    for name, *ends in zip(plan.counted_columns, low, high, strict=True):
        ranges[name] = columns[name].told(*ends)
    return ranges


def _network(session: Session, point: Mapping[str, Any] | None) -> report.Network:
    """Return the facts of the network; ``point`` is its operating point, if it has one."""
    plan, task, calibrated = session.plan, session.task, session.trainer.task
    calibration = getattr(calibrated, "calibration", None)
    residuals = getattr(calibrated, "residuals", None)
    decides = point and OperatingPoint(point["asked"], point["log_odds"])
    return report.Network(
        name=plan.model.name,
        built_by=task.built_by or None,
        parameters=task.parameters,
        trained=session.trainer.sums.size,
        steps=session.trainer.state.step,
        calibration=calibration if isinstance(calibration, Calibration) else None,
        residuals=residuals if isinstance(residuals, Residuals) else None,
        operating_point=decides or None,
    )


def _features(session: Session) -> report.Features | None:
    """Return the facts of public features and weights; None without any."""
    plan, features = session.plan, session.plan.features
    encoder = features if isinstance(features, TextEncoder) else None
    named = plan.settings.features or plan.settings.backbone
    if encoder is not None:
        named = encoder.kind
    if named is None and plan.pretrained is not None:
        named = plan.pretrained.name
    if named is None:
        return None
    return report.Features(
        name=named,
        sha256=session.task.pretrained,
        encoder=None if encoder is None else encoder.config.model_dump(),
    )


#: What noisy counts before training find.
FOUND = ("ranges and ranks that were not declared",)


def computed(run: DescribedRun) -> dict[str, str]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts, covered = run.plan.facts, run.plan.score
    sizes = [f"number of training {run.counted}", f"number of test {run.tested}"]
    return {
        "weights, and all numbers of the report except those below": "protected",
        **dict.fromkeys(sizes[: 1 + bool(facts.test_size)], "declared public"),
        **dict.fromkeys(
            (facts.task.public, *facts.records.public),
            "declared public" if facts.own else "published",
        ),
        **dict.fromkeys(facts.inferred, "not covered"),
        **dict.fromkeys(FOUND * bool(run.plan.ranges), "protected"),
        **dict.fromkeys(
            ("scores of the test records",) * bool(facts.test_size),
            "protected" if covered else "not covered",
        ),
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/, except measured times": "protected",
    }


def _environment(session: Session) -> dict[str, Any]:
    """Return versions, the machine, and the measured time."""
    device = session.trainer.state.theta.device
    return {
        "dpmac": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "device": device_name(device),
        "system": platform.system(),
        "processor": platform.machine(),
        "seconds": round(session.seconds, 3) if session.plan.timed else None,
    }


#: With fewer guesses, even if all are right, an audit cannot show an epsilon above 1.8.
FEW_GUESSES = 20


def guesses(canaries: int) -> int:
    """Return the number of canaries that the attack guesses, half of them in, half out."""
    return max(canaries // 2, min(canaries, FEW_GUESSES))


def scores(
    task: Task, history: list[dict[str, Any]], exact: Mapping[str, Any]
) -> report.Scores | None:
    """Return test scores: exact metrics, or scores that were released with noise.

    ``history`` are the lines of metrics.jsonl. None if no records were tested on.
    """
    last, headline = history[-1], task.headline
    if "test_samples" not in last:
        return None
    logged = {name.removeprefix("test_"): value for name, value in last.items()}
    values = {**logged, **exact, headline.key: last.get(headline.logged)}
    metrics: dict[str, Any] = {
        metric.key: report.Score(**_score(values, metric.key, metric.constant))
        for metric in task.metrics
    }
    details: dict[str, Any] = {
        name: values.get(name) for name in task.reported if "constant_" not in name
    }
    return report.Scores(
        samples=last["test_samples"],
        loss=last["test_loss"],
        noise=values.get("noise"),
        interval=values.get("interval"),
        **metrics,
        **details,
    )


def _score(values: Mapping[str, Any], key: str, constant: str) -> dict[str, Any]:
    """Return a metric with its interval, and what a constant prediction has, if they are known."""
    score = {"value": values.get(key)}
    if (interval := values.get(f"{key}_interval")) is not None:
        score["low"], score["high"] = interval
    if constant in values:
        score["constant"] = values[constant]
    return score


def _write_audit(session: Session, written: report.Report) -> None:
    """Write the losses of crafted records and their coins; nothing for runs without an audit.

    A record whose loss is small was more likely trained on.
    """
    trainer, crafted = session.trainer, session.trainer.data.crafted
    if crafted is None:
        return
    data = trainer.data.scaled_as(session.plan.facts.records)
    with trainer.published():
        scores = -losses(session.task.model, data, crafted.records)
    found = audit.Audit(
        claimed=written.epsilon,
        delta=session.plan.settings.delta,
        guesses=guesses(len(crafted.coins)),
        scores=tuple(torch.nan_to_num(scores).tolist()),
        coins=tuple(crafted.coins.tolist()),
        events=tuple(e for e in session.account.events if e.trains),
    )
    text_of_audit = files.to_json(found.as_json())
    files.write_atomically(session.where / folder.AUDIT, text_of_audit.encode())
