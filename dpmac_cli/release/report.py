"""Report of a run as versioned JSON and as a model card, with public and post-noise values only."""

import platform
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from dpmac_cli import __version__
from dpmac_cli.accounting import statements
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.data.schema import Source, listed
from dpmac_cli.models.registry import BACKBONES, FEATURES, PARTS, Backbone, Scattered
from dpmac_cli.release.card import OPEN, templates
from dpmac_cli.release.report_file import SCHEMA_VERSION
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.runs.setup import Task
from dpmac_cli.storage.files import shown
from dpmac_cli.tasks.known import METRICS, task_in
from dpmac_cli.training.covered import CoveredScore
from dpmac_cli.training.loop import Evaluated

PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")

State = Literal["finished", "interrupted", "budget-spent"]

#: Sentences of a report, by name.
TEXTS: Any = SimpleNamespace(
    **tomllib.loads(Path(__file__).with_name("report.toml").read_text("utf-8"))
)


def privacy(plan: TrainPlan, spent: Spent) -> dict[str, Any]:
    """Return the guarantee of a run with all its parts, without the attempts that it replaces.

    ``epsilon_planned`` is that of all steps, without --max-epsilon. ``noise_multiplier`` and
    ``sampling_rate`` are null if parts differ.
    """
    events, private = spent.events, plan.private
    trained, tested = (tuple(e for e in events if e.records == on) for on in ("training", "test"))
    cost = price(events, plan.delta, unit=plan.unit)
    whole = plan.event_of(plan.steps - spent.base)
    planned = total_epsilon((*spent.earlier, whole), plan.delta)
    promise, risk = cost.statement, assess_risk(events, plan.facts.train_size, plan.unit)
    seeds = TEXTS.seed_given if spent.seeded else TEXTS.seed_kept_nowhere
    drawn = TEXTS.drawn
    if plan.secure:
        drawn = TEXTS.drawn_securely if spent.secure else TEXTS.drawn_both_ways
    if not private:
        seeds = drawn = TEXTS.no_secrets
    return {
        "private": private,
        "epsilon": shown(cost.epsilon),
        "epsilon_planned": shown(max(planned, cost.epsilon)),
        "delta": plan.delta if private else None,
        "noise_multiplier": cost.noise_multiplier,
        "unit": {
            "name": plan.unit,
            "told_by": plan.found.unit or None,
            "records_in_a_step": plan.recipe.records,
        },
        "sampler": cost.sampler,
        "sampling_rate": cost.sampling_rate,
        "steps": cost.steps,
        "covered_scores": {
            "released": sum(event.steps for event in tested),
            "noise_multiplier": statements.common(event.noise_multiplier for event in tested),
            "epsilon": shown(total_epsilon(tested, plan.delta)),
            "epsilon_of_training": shown(total_epsilon(trained, plan.delta)),
            "statement": TEXTS.covered,
        }
        if plan.scores
        else None,
        "events": [vars(event) for event in events],
        "abandoned": [vars(event) for event in spent.abandoned],
        "adjacency": cost.adjacency if private else None,
        "accountant": ACCOUNTANTS[cost.accountant] if private else None,
        "risk": risk.values() if private else None,
        "computed_from_records": _computed(plan) if private else None,
        "statement": " ".join((TEXTS.seed_given, promise)) if private and spent.seeded else promise,
        "seed_policy": {"given": spent.seeded, "statement": seeds},
        "randomness": {"secure": spent.secure, "statement": drawn},
    }


def _counted(plan: TrainPlan) -> tuple[str, str]:
    """Return what train_size and the number of tested records count."""
    counted = "units" if plan.found.unit else "records"
    return counted, counted if plan.scores else "records"


def _computed(plan: TrainPlan) -> list[dict[str, str]]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts, found, own = plan.facts, plan.found, isinstance(plan.data, Source)
    shape = ("channels", "image size") if facts.is_images else ("columns and their ranges",)
    trained, tested = _counted(plan)
    status = {
        "weights, and all numbers of the report except those below": "protected",
        f"number of training {trained}": "declared public",
        f"number of test {tested}": "declared public",
        **dict.fromkeys((facts.task.public, *shape), "declared public" if own else "published"),
        **dict.fromkeys(found.inferred, "not covered"),
        "scores of the test records": "protected" if plan.scores else "not covered",
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/, with its keys": "secret",
    }
    return [{"what": what, "status": value} for what, value in status.items()]


def _statement(plan: TrainPlan, computed: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the answers to NIST SP 800-226's questions, and the open questions."""
    data = plan.facts
    kind = "images" if data.is_images else "rows of numbers"
    shape = f"{' x '.join(map(str, data.shape))}, {data.task.described}"
    ball = f"a ball of radius {plan.hyper.clip_norm:g}"
    region = ball if "clip_norm" in plan.method.settings else TEXTS.ellipsoid
    public = [f"the dataset {plan.found.name}: {data.about}"] * isinstance(plan.data, str)
    if isinstance(plan.features, Backbone):
        backbone = BACKBONES[plan.features.kind]
        public.append(f"weights of {backbone.about}; licence {backbone.licence}")
    if plan.pretrained is not None:
        public.append(f"weights in {plan.pretrained.name}; source and licence to be filled in")
    return {
        **TEXTS.statement,
        "mechanism": TEXTS.statement["mechanism"].format(region),
        "data_domain": f"Labelled {kind} of shape {shape}.",
        "unprotected": [row["what"] for row in computed if row["status"] != "protected"],
        "public": public,
        "software": f"dpmac {__version__}, torch {version('torch')}.",
        "audit": TEXTS.audited.format(plan.canaries) if plan.canaries else TEXTS.not_audited,
    }


def public_facts(plan: TrainPlan, spent: Spent, task: Task, trained: int) -> dict[str, Any]:
    """Return the facts to publish with the weights, in the model file's header.

    ``trained`` is the number of trained parameters.
    """
    facts, inferred, kind = plan.facts, plan.found.inferred, task.independence
    cost, task_facts = privacy(plan, spent), facts.task.facts
    schema = plan.data.schema if isinstance(plan.data, Source) else None
    notes = [TEXTS.public.format(*_counted(plan))] + [TEXTS.declared] * (schema is not None)
    notes += [TEXTS.taken.format(listed(inferred))] * bool(inferred)
    audit = {"canaries": plan.canaries, "guesses": plan.guesses, "statement": TEXTS.audit_run}
    return {
        "schema_version": SCHEMA_VERSION,
        "optimizer": plan.optimizer,
        "dataset": {
            "name": plan.found.name,
            "train_size": facts.train_size,
            "test_size": facts.test_size,
            "sha256": facts.sha256,
            "own": isinstance(plan.data, Source),
            "multilabel": task_facts["multilabel"],
            "held_out": plan.found.held_out,
            "test_note": TEXTS.held_out if plan.found.held_out and not plan.scores else None,
            "taken_from_records": list(inferred),
            "schema": None if schema is None else schema.model_dump(mode="json"),
            "public_note": " ".join(notes),
        },
        "model": {
            "name": plan.model.name,
            "parameters": task.parameters,
            "fix_norm": plan.fix_norm,
            "built_by": task.built_by or None,
            "independence": {"kind": kind, "statement": TEXTS.independence[kind]},
            **_public_part(plan, task, trained),
        },
        "input": {
            "levels": facts.levels,
            **{name: list(getattr(facts, name)) for name in ("shape", "mean", "std")},
        },
        "classes": task_facts["classes"],
        "target": task_facts["target"],
        "privacy": cost,
        "statement": _statement(plan, cost["computed_from_records"]) if plan.private else None,
        "audit": audit if plan.canaries else None,
    }


def _public_part(plan: TrainPlan, task: Task, trained: int) -> dict[str, Any]:
    """Return the part of a network that was public before training; empty for most networks."""
    features, said, file = plan.features, [], None
    if isinstance(features, Scattered):
        said.append(TEXTS.scattered.format(about=FEATURES[features.kind]))
    elif isinstance(features, Backbone):
        said.append(TEXTS.of_backbone.format(about=BACKBONES[features.kind].about))
    if plan.pretrained is not None:
        file = plan.pretrained.name
        said.append(TEXTS.pretrained.format(file=file))
    if plan.starts_public and plan.trained.part != "all":
        said.append(TEXTS.trained.format(part=PARTS[plan.trained.part]))
    flags = ("features", "backbone", "backbone-size", "train", "lora-rank", "lora-alpha")
    part = {
        **{flag.replace("-", "_"): plan.recorded.get(flag) for flag in flags},
        "backbone_flips": plan.recorded.get("backbone-flips", False),
        "pretrained": file,
        "sha256": task.fingerprints.get("pretrained"),
        "trained_parameters": trained,
        "statement": " ".join(said),
    }
    return {"public_part": part} if said else {}


def build_report(
    plan: TrainPlan,
    facts: Mapping[str, Any],
    *,
    state: State,
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
    used = plan.method.settings if plan.private else plan.method.settings_without_clipping
    speed = steps / seconds if seconds > 0 else 0.0
    return {
        **facts,
        "state": state,
        "test": _scores(plan, history, metrics),
        "hyperparameters": {
            "steps": steps,
            "epochs": steps / plan.steps_per_epoch,
            "batch_size": plan.batch_size,
            **{name: getattr(plan.hyper, name) for name in sorted(used)},
        },
        "recipe": {n: plan.recorded.get(flag_name(n), d) for n, d in RECIPE_DEFAULTS.items()},
        "post_noise": dict(post_noise),
        "timings": {
            "training_seconds": round(seconds, 3),
            "total_seconds": round(total_seconds, 3),
            "steps_per_second": round(speed, 2),
            "samples_per_second": round(speed * plan.batch_size, 1),
        },
        "versions": {"python": platform.python_version(), "dpmac": __version__}
        | {package: version(package) for package in PACKAGES},
        "machine": {"system": platform.system(), "processor": platform.machine(), **machine},
    }


def _scores(
    plan: TrainPlan, history: Sequence[Mapping[str, Any]], exact: Mapping[str, Any]
) -> dict[str, Any]:
    """Return test scores: exact metrics, or scores that were released with noise."""
    last, task = history[-1], plan.facts.task
    headline = task.headline
    scored = [line for line in history if line.get(headline.logged) is not None]
    best = max(scored, key=lambda line: float(line[headline.logged]), default=last)
    return {
        headline.key: last[headline.logged],
        "loss": last["test_loss"],
        "samples": last["test_samples"],
        **{name: exact.get(name, last.get(f"test_{name}")) for name in task.reported},
        f"best_{headline.key}": best[headline.logged],
        "best_epoch": best["epoch"],
    }


def metrics_line(evaluated: Evaluated, epsilon: float, plan: TrainPlan) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    result, headline = evaluated.result, plan.facts.task.headline
    return {
        "step": evaluated.step,
        "epoch": evaluated.epoch,
        "epsilon": shown(epsilon),
        "delta": plan.delta if plan.private else None,
        headline.logged: shown(result.metric(headline.name)),
        METRICS[plan.metric].logged: shown(result.metric(plan.metric)),
        "test_loss": shown(result.loss),
        "test_samples": result.samples,
        "seconds": round(evaluated.seconds, 3),
        **(result.values() if isinstance(result, CoveredScore) else {}),
        **evaluated.public,
    }


def model_card(report: Mapping[str, Any], model: nn.Module) -> str:
    """Return the model card of a run as Markdown; layers of plain models become code."""
    template, task = templates().get_template("model_card.md.jinja"), task_in(report)
    return template.render(
        report,
        task=task,
        usage=task.usage,
        score=report["test"][task.headline.key],
        score_interval=report["test"][f"{task.headline.key}_interval"],
        network=model if _is_plain(model) else None,
        recipe_defaults=RECIPE_DEFAULTS,
        no_privacy=statements.NO_PRIVACY,
        to_be_filled_in=OPEN,
        samplers=SAMPLERS,
    )


def _is_plain(model: nn.Module) -> bool:
    """Return whether a network is a sequence of torch layers."""
    return type(model) is nn.Sequential and all(
        type(layer).__module__.startswith("torch.nn.") and not list(layer.children())
        for layer in model.children()
    )
