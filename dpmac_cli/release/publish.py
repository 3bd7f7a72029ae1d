"""Publish a run: its model, report, card and audit, and their checksums.

:func:`describe_run` makes the report of a session. Everything else that is published is a view of
that report: the header of the model is its first half, and the card its text. What is not in the
report is not published, apart from weights, metrics.jsonl and config.yaml.
"""

import math
import platform
from collections.abc import Mapping
from dataclasses import replace
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
from dpmac_cli.release.audit import Guesses
from dpmac_cli.release.card import model_card
from dpmac_cli.release.described_run import DescribedRun
from dpmac_cli.release.facts import FORMAT, LEFT_OUT, Data, Features, Recorded
from dpmac_cli.release.facts import Network as NetworkFacts
from dpmac_cli.release.model_file import load_model, save_model
from dpmac_cli.release.report import Report, Score, Scores
from dpmac_cli.release.run import Run
from dpmac_cli.release.sentences import operating_point, sentences_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device, device_name
from dpmac_cli.runs.ledger import state_of
from dpmac_cli.runs.session import Session
from dpmac_cli.tasks.metrics import EvaluationMetric
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import losses

PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")


def publish(session: Session, network: Network | None = None) -> Run:
    """Write the published files of a run, and their checksums last.

    The report comes last but for the checksums, and an earlier one was removed as training began: a
    kill leaves no report beside another model. The header of the model is the report's first half.

    Args:
        session: session of the run after its last step, whose folder is locked.
        network: a network of the program, of which the run's own is a copy; None otherwise.

    Raises:
        OSError: a file cannot be written.
    """
    where, model = session.where, session.task.model
    described = describe_run(session, _exact_scores(session))
    values = described.values()
    with session.trainer.published():
        save_model(where / folder.MODEL, model, described.header())
        _write_adapter(session)
    files.write_atomically(where / folder.CARD, model_card(described, model).encode())
    _write_audit(session)
    session.write_metrics()
    files.write_atomically(where / folder.REPORT, files.to_json(values).encode())
    folder.seal(where)
    settings = session.plan.settings
    user_supplied = isinstance(parse_model(str(settings.model)), UserModel) and network is None
    read = partial(
        load_model,
        where,
        choose_device(settings.device),
        factory=str(settings.model) if user_supplied else None,
        network=network,
    )
    return Run(values, where, read)


def _exact_scores(session: Session) -> dict[str, Any]:
    """Return exact test metrics as JSON values; {} if scores are covered, or nothing is tested.

    A run that was resumed at its end is scored here.
    """
    trainer, scored = session.trainer, session.scored
    exact = trainer.data.test is not None and session.plan.score is None
    if exact and scored is None:
        scored = trainer.evaluate()
    return {} if scored is None else scored.values()


def _write_adapter(session: Session) -> None:
    """Write the LoRA updates of a language model in the format of peft; nothing for other runs.

    Raises OSError.
    """
    plan, model, where = session.plan, session.task.model, session.where
    if plan.facts.task.network is None or not isinstance(model, WithHead):
        return
    # Its folder without those above it, which may tell of the user.
    public = Path(plan.recorded["backbone"]).resolve().name
    tensors, config = adapter_of(model, f"./{public}")
    if tensors:
        files.write_atomically(where / folder.ADAPTER, safetensors.torch.save(tensors))
        files.write_atomically(where / folder.ADAPTER_CONFIG, files.to_json(config).encode())


def describe_run(session: Session, exact: Mapping[str, Any]) -> Report:
    """Return the report of a run: its settings, data, network, guarantee, scores and machine.

    Args:
        session: session of the run, after its last step or where it was stopped.
        exact: exact test metrics as JSON values; empty for covered scores.
    """
    task = session.trainer.task
    released = {"ranges": session.trainer.ranges, **task.counted_facts}
    run = DescribedRun(session.plan, session.account, session.weighed, released)
    guarantee = guarantee_of(run)
    point = released.get("operating_point")
    calibration = released.get("calibration")
    if point is not None:
        epsilon = guarantee["epsilon"] or math.inf
        statement = operating_point(point, calibration, task.names, epsilon)
        guarantee["sentences"]["operating_point"] = statement
    return Report(
        version=FORMAT,
        settings=_settings(session),
        data=_data(session),
        network=_network(session),
        features=_features(session),
        **guarantee,
        scores=scores(session.plan.facts.task, session.history, exact),
        environment=_environment(session),
        state=state_of(session.trainer.state.step, session.account, session.plan.event),
    )


def guarantee_of(run: DescribedRun) -> dict[str, Any]:
    """Return what a run did to its records, what that costs, and what is said of it.

    Epsilon is of everything in the account of the run, or of the whole search.

    Args:
        run: the run, with its plan and its account.

    Returns:
        Values by the keys of a report: events, epsilon, delta, risk, search, seeded, secure and
        sentences. epsilon is None if it is not finite; delta and risk are None without privacy.
    """
    plan, account = run.plan, run.spent
    cost = price(account.events, plan.settings.delta, unit=plan.unit, search=plan.search)
    risk = assess_risk(cost.done, plan.facts.train_size, plan.unit) if plan.private else None
    cost = replace(cost, seeded=plan.private and account.seeded)
    sentences: dict[str, Any] = {"guarantee": cost.statement, **sentences_of(run)}
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


def _settings(session: Session) -> Any:
    """Return the settings of a run for its report: no path, and nothing without an effect.

    Left out are folders, and hyperparameters that the optimizer does not have.
    """
    plan = session.plan
    device = session.trainer.state.theta.device.type
    used = ("optimizer", *plan.optimizer.used(private=plan.private))
    values = dict[str, Any]()
    for name, value in plan.recorded.items():
        idle = GROUPS[name] == OPTIMIZER and name not in used
        if name not in LEFT_OUT and not idle:
            values[name] = value
    values |= {"dataset": plan.facts.name, "model": plan.model.name}
    # Not the chunk: it says when memory ran out, which depends on the size of a batch.
    values["physical_batch"] = physical_batch(plan.settings, plan.facts, device)
    if plan.pretrained is not None:
        values["pretrained"] = plan.pretrained.name
    if isinstance(plan.features, TextEncoder):
        values["backbone"] = plan.features.kind
    return Recorded(**values)


def _data(session: Session) -> Data:
    """Return the facts of the records: name, sizes, declarations, and ranges that were counted."""
    facts = session.plan.facts
    task_facts = dict[str, Any](session.trainer.data.task.facts)
    schema = facts.schema
    return Data(
        name=facts.name,
        user_supplied=facts.user_supplied,
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
    """Return the ranges of columns that were found by noisy counts; None if there are none.

    Args:
        counted: their ends in the network, by name, each float64 of shape (counted columns,).
        plan: plan of the run, with the schema of the columns.
    """
    if not counted or plan.facts.schema is None:
        return {} if counted else None
    columns = {column.name: column for column in plan.facts.schema.columns}
    none = torch.empty(0)
    lows = counted.get("low", none).tolist()
    highs = counted.get("high", none).tolist()
    ranges = dict[str, tuple[float, float]]()
    for name, low, high in zip(plan.counted_columns, lows, highs, strict=True):
        ranges[name] = columns[name].as_declared(low, high)
    return ranges


def _network(session: Session) -> NetworkFacts:
    """Return the facts of the network, and of its task what noisy counts told."""
    counted = {"calibration": None, "residuals": None, "operating_point": None}
    counted |= session.trainer.task.counted_facts
    return NetworkFacts(
        name=session.plan.model.name,
        built_by=session.task.built_by or None,
        parameters=session.task.parameters,
        trained=session.trainer.sums.size,
        steps=session.trainer.state.step,
        **counted,
    )


def _features(session: Session) -> Features | None:
    """Return name, checksum and form of public features and weights; None without any."""
    plan = session.plan
    name, encoder = plan.settings.features or plan.settings.backbone, None
    if isinstance(plan.features, TextEncoder):
        name, encoder = plan.features.kind, plan.features.config.model_dump()
    elif name is None and plan.pretrained is not None:
        name = plan.pretrained.name
    if name is None:
        return None
    return Features(name=name, sha256=session.task.pretrained, encoder=encoder)


#: Statuses of what a run computes from its records.
PROTECTED, NOT_COVERED, DECLARED = "protected", "not covered", "declared public"


def computed(run: DescribedRun) -> dict[str, str]:
    """Return the values that a run computes from its records, and whether each is protected.

    A card has them as a table.

    Args:
        run: the run.

    Returns:
        A status by the name of the value in words: "protected" by noise, "declared public" by
        whoever trained the model, "published" with a registered dataset, or "not covered".
    """
    facts = run.plan.facts
    statuses = {"weights, and all numbers of the report except those below": PROTECTED}
    statuses[f"number of training {run.counted}"] = DECLARED
    if facts.test_size:
        statuses[f"number of test {run.tested}"] = DECLARED
    for name in (facts.task.public, *facts.records.public):
        statuses[name] = DECLARED if facts.user_supplied else "published"
    for name in facts.inferred:
        statuses[name] = NOT_COVERED
    if run.plan.ranges:
        statuses["ranges and ranks that were not declared"] = PROTECTED
    if run.plan.ranges and run.plan.counts_target:
        statuses[facts.task.public] = PROTECTED
    if facts.test_size:
        statuses["scores of the test records"] = PROTECTED if run.plan.score else NOT_COVERED
    statuses["measured times"] = NOT_COVERED
    statuses["notes on the screen: records left out, untested classes, lack of memory"] = (
        NOT_COVERED
    )
    statuses["state in checkpoint/, except measured times"] = PROTECTED
    return statuses


def _environment(session: Session) -> dict[str, Any]:
    """Return versions, the machine, and the measured time.

    The time of a trial of a search is left out, because it tells which trial it was.
    """
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


def guesses_of(canaries: int) -> int:
    """Return the number r of canaries that the attack guesses, half of them in, half out.

    It is half of them, and at least :data:`FEW_GUESSES` where there are as many.

        >>> [guesses_of(canaries) for canaries in (10, 30, 200)]
        [10, 20, 100]
    """
    return max(canaries // 2, min(canaries, FEW_GUESSES))


def scores(task: Task, history: list[dict[str, Any]], exact: Mapping[str, Any]) -> Scores | None:
    """Return test scores: exact metrics, or scores that were released with noise.

    Args:
        task: what the model predicts, with its metrics.
        history: lines of metrics.jsonl.
        exact: exact test metrics as JSON values; empty for covered scores.

    Returns:
        The scores; None if no records were tested on.
    """
    last, headline = history[-1], task.headline
    if "test_samples" not in last:
        return None
    logged = {name.removeprefix("test_"): value for name, value in last.items()}
    values = {**logged, **exact, headline.key: last.get(headline.logged)}
    metrics = dict[str, Any]()
    details = dict[str, Any]()
    for metric in task.metrics:
        metrics[metric.key] = Score(**_score(values, metric))
    for name in task.reported:
        details[name] = values.get(name)
    return Scores(
        samples=last["test_samples"],
        loss=last["test_loss"],
        noise=values.get("noise"),
        interval=values.get("interval"),
        **metrics,
        **details,
    )


def _score(values: Mapping[str, Any], metric: EvaluationMetric) -> dict[str, Any]:
    """Return a metric with its interval, and what a constant prediction has, if they are known.

    Args:
        values: scores as JSON values.
        metric: the metric.
    """
    score = {"value": values.get(metric.key)}
    interval = values.get(f"{metric.key}_interval")
    if interval is not None:
        score["low"], score["high"] = interval
    if metric.constant in values:
        score["constant"] = values[metric.constant]
    return score


def _write_audit(session: Session) -> None:
    """Write the losses of crafted records and their coins; nothing for runs without an audit.

    The score of a record is minus its loss: one whose loss is small was more likely trained on.
    The number of guesses follows from the number of records, so no loss decides it.
    """
    trainer, crafted = session.trainer, session.trainer.data.crafted
    if crafted is None:
        return
    data = trainer.data.scaled_as(session.plan.facts.records)
    with trainer.published():
        scores = -losses(session.task.model, data, crafted.records)
    guesses = Guesses(
        guesses=guesses_of(len(crafted.coins)),
        scores=tuple(torch.nan_to_num(scores).tolist()),
        coins=tuple(crafted.coins.tolist()),
    )
    text = files.to_json(guesses.as_json())
    files.write_atomically(session.where / folder.AUDIT, text.encode())
