"""Report of a run as JSON values, with public and post-noise values only."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dpmac_cli import __version__
from dpmac_cli.config.plan import DataPlan, NetworkPlan, PrivacyPlan, TrainPlan
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.data.schema import Source, listed
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import BACKBONES, FEATURES, PARTS, Backbone, Scattered
from dpmac_cli.release import sentences, texts
from dpmac_cli.release.guarantee import counted_in, nist_statement, privacy
from dpmac_cli.release.report_file import SCHEMA_VERSION
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.tasks.task import Task

PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")
#: Settings that a report repeats with the public part of a network.
OF_PUBLIC_PART: tuple[str, ...] = (
    *("features", "backbone", "backbone_size"),
    *("train", "lora_rank", "lora_alpha"),
)


def public_facts(plan: TrainPlan, spent: Spent, task: PreparedRun, trained: int) -> dict[str, Any]:
    """Return the facts to publish with the weights, in the model file's header.

    ``trained`` is the number of trained parameters.
    """
    facts, kind, cost = plan.data.facts, task.independence, privacy(plan, spent)
    canaries, guesses = plan.privacy.audit.canaries, plan.privacy.audit.guesses
    audit = {"canaries": canaries, "guesses": guesses, "statement": sentences.AUDIT_RUN}
    computed = cost["computed_from_records"]
    return {
        "schema_version": SCHEMA_VERSION,
        "optimizer": plan.optimizer.name,
        "dataset": _dataset(plan.data, plan.privacy),
        "model": {
            "name": plan.network.model.name,
            "parameters": task.parameters,
            "fix_norm": plan.network.fix_norm,
            "built_by": task.built_by or None,
            "independence": {"kind": kind, "statement": _independence(task)},
            **_public_part(plan.network, plan.recorded, task, trained),
        },
        "input": {
            "levels": facts.levels,
            "record": list(task.form or facts.shape),
            "texts": [list(place) for place in facts.texts],
            **{name: list(getattr(facts, name)) for name in ("shape", "mean", "std")},
        },
        "classes": facts.task.facts["classes"],
        "target": facts.task.facts["target"],
        "privacy": cost,
        "statement": nist_statement(plan, computed) if plan.privacy.private else None,
        "audit": audit if canaries else None,
    }


def _independence(task: PreparedRun) -> str:
    """Return how samples are known to be independent; and why alone, if nobody asked for it."""
    return " ".join(filter(None, (sentences.INDEPENDENCE[task.independence], task.why)))


def _dataset(plan: DataPlan, privacy: PrivacyPlan) -> dict[str, Any]:
    """Return the facts of the dataset, and what is said of how they were learned."""
    source, facts, found = plan.source, plan.facts, plan.found
    schema = source.schema if isinstance(source, Source) else None
    notes = [sentences.PUBLIC.format(*counted_in(plan, privacy))]
    notes += [sentences.DECLARED] * (schema is not None)
    notes += [sentences.TAKEN.format(listed(found.inferred))] * bool(found.inferred)
    return {
        "name": found.name,
        "train_size": facts.train_size,
        "test_size": facts.test_size,
        "sha256": facts.sha256,
        "own": plan.own,
        "multilabel": facts.task.facts["multilabel"],
        "held_out": found.held_out,
        "test_note": sentences.HELD_OUT if found.held_out and not privacy.scores else None,
        "taken_from_records": list(found.inferred),
        "schema": None if schema is None else schema.model_dump(mode="json"),
        "public_note": " ".join(notes),
        "text_note": texts.REVEALED if facts.texts else None,
    }


def _public_part(
    network: NetworkPlan, recorded: Mapping[str, Any], task: PreparedRun, trained: int
) -> dict[str, Any]:
    """Return the part of a network that was public before training; empty for most networks."""
    said = list(_said_of_public_part(network))
    if not said:
        return {}
    features, pretrained = network.features, network.pretrained
    part: dict[str, Any] = {name: recorded.get(name) for name in OF_PUBLIC_PART}
    part["encoder"] = None
    if isinstance(features, TextEncoder):
        part |= {"backbone": features.kind, "encoder": features.config.model_dump()}
    part |= {
        "backbone_flips": recorded.get("backbone_flips", False),
        "pretrained": None if pretrained is None else pretrained.name,
        "sha256": task.fingerprints.get("pretrained"),
        "trained_parameters": trained,
        "statement": " ".join(said),
    }
    return {"public_part": part}


def _said_of_public_part(network: NetworkPlan) -> Iterator[str]:
    """Yield what was public before training, and which part was trained."""
    features = network.features
    if isinstance(features, Scattered):
        yield sentences.SCATTERED.format(about=FEATURES[features.kind])
    elif isinstance(features, Backbone):
        yield sentences.OF_BACKBONE.format(about=BACKBONES[features.kind].about)
    elif isinstance(features, TextEncoder):
        yield texts.about(features)
    if network.pretrained is not None:
        yield sentences.PRETRAINED.format(file=network.pretrained.name)
    if network.starts_public:
        part = network.trained.part
        whole = part == "all"
        yield sentences.TRAINED_ALL if whole else sentences.TRAINED.format(part=PARTS[part])


def build_report(
    plan: TrainPlan,
    facts: Mapping[str, Any],
    *,
    state: str,
    steps: int,
    history: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
    post_noise: Mapping[str, float],
    seconds: float,
    total_seconds: float,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the complete report, as in docs/report.schema.json.

    Args:
        facts: result of :func:`public_facts`.
        steps: number of steps that the published model was trained for.
        history: lines of metrics.jsonl.
        metrics: test metrics, as JSON values.
        seconds: training time; ``total_seconds`` since the run was last started.
        machine: facts of the machine, besides those of the operating system.
    """
    privacy, method = plan.privacy, plan.optimizer.method
    used = method.settings if privacy.private else method.settings_without_clipping
    timings = _timings(steps, seconds, total_seconds, privacy.batch_size)
    return {
        **facts,
        "state": state,
        "test": _scores(plan.data.facts.task, history, metrics),
        "hyperparameters": {
            "steps": steps,
            "epochs": steps / privacy.steps_per_epoch,
            "batch_size": privacy.batch_size,
            **{name: getattr(plan.optimizer.hyper, name) for name in sorted(used)},
        },
        "recipe": {n: plan.recorded.get(n, d) for n, d in RECIPE_DEFAULTS.items()},
        "post_noise": dict(post_noise),
        "timings": timings if plan.timed else dict.fromkeys(timings),
        "versions": {"python": platform.python_version(), "dpmac": __version__}
        | {package: version(package) for package in PACKAGES},
        "machine": {"system": platform.system(), "processor": platform.machine(), **machine},
    }


def _timings(
    steps: int, seconds: float, total_seconds: float, batch_size: int
) -> dict[str, float | None]:
    """Return times in seconds, and the speed for the expected batch: that drawn is private."""
    speed = steps / seconds if seconds > 0 else 0.0
    return {
        "training_seconds": round(seconds, 3),
        "total_seconds": round(total_seconds, 3),
        "steps_per_second": round(speed, 2),
        "samples_per_second": round(speed * batch_size, 1),
    }


def _scores(
    task: Task, history: Sequence[Mapping[str, Any]], exact: Mapping[str, Any]
) -> dict[str, Any]:
    """Return test scores: exact metrics, or scores that were released with noise."""
    last, headline = history[-1], task.headline
    scored = [line for line in history if line.get(headline.logged) is not None]
    best = max(scored, key=lambda line: headline.better(line[headline.logged]), default=last)
    return {
        headline.key: last[headline.logged],
        "loss": last["test_loss"],
        "samples": last["test_samples"],
        **{name: exact.get(name, last.get(f"test_{name}")) for name in task.reported},
        f"best_{headline.key}": best[headline.logged],
        "best_epoch": best["epoch"],
    }
