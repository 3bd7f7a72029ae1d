"""Report of a run as versioned JSON and as a model card, with public and post-noise values only."""

import platform
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from dpmac_cli import __version__
from dpmac_cli.accounting import statements
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import (
    DataPlan,
    NetworkPlan,
    PrivacyPlan,
    SearchPlan,
    TrainPlan,
)
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.data.schema import Source, listed
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import BACKBONES, FEATURES, PARTS, Backbone, Scattered
from dpmac_cli.release import texts
from dpmac_cli.release.card import OPEN, templates
from dpmac_cli.release.report_file import SCHEMA_VERSION
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks import task as tasks
from dpmac_cli.tasks.known import task_in

PACKAGES = ("torch", "torchvision", "numpy", "dp-accounting", "safetensors")
#: Settings that a report repeats with the public part of a network.
OF_PUBLIC_PART: tuple[SettingName, ...] = (
    *("features", "backbone", "backbone_size"),
    *("train", "lora_rank", "lora_alpha"),
)

#: Sentences of a report, by name.
TEXTS: Any = SimpleNamespace(
    **tomllib.loads(Path(__file__).with_name("report.toml").read_text("utf-8"))
)


def privacy(plan: TrainPlan, spent: Spent) -> dict[str, Any]:
    """Return the guarantee of a run with all its parts, without the attempts that it replaces.

    ``epsilon_planned`` is that of all steps, without --max-epsilon. ``noise_multiplier`` and
    ``sampling_rate`` are null if parts differ.
    """
    events, part, private = spent.events, plan.privacy, plan.privacy.private
    search = None if plan.search is None else plan.search.search
    cost = price(events, part.delta, unit=part.unit, search=search)
    whole = part.event_of(part.steps - spent.base)
    planned = total_epsilon((*spent.earlier, whole), part.delta)
    promise, risk = cost.statement, assess_risk(cost.done, plan.data.facts.train_size, part.unit)
    return {
        "private": private,
        "epsilon": finite_or_none(cost.epsilon),
        "epsilon_planned": finite_or_none(max(planned, cost.epsilon)),
        "delta": part.delta if private else None,
        "noise_multiplier": cost.noise_multiplier,
        "unit": {
            "name": part.unit,
            "told_by": plan.data.found.unit or None,
            "records_in_a_step": plan.recipe.records,
        },
        "sampler": cost.sampler,
        "sampling_rate": cost.sampling_rate,
        "steps": cost.steps,
        "covered_scores": _covered_scores(events, part.delta) if part.scores else None,
        "search": None if plan.search is None else _search(plan.search, part.delta),
        "events": [vars(event) for event in events],
        "abandoned": [vars(event) for event in spent.abandoned],
        "adjacency": cost.adjacency if private else None,
        "accountant": ACCOUNTANTS[cost.accountant] if private else None,
        "risk": risk.values() if private else None,
        "computed_from_records": _computed(plan.data, part) if private else None,
        "statement": " ".join((TEXTS.seed_given, promise)) if private and spent.seeded else promise,
        **_secrets(plan, spent),
    }


def _covered_scores(events: Sequence[TrainingEvent], delta: float) -> dict[str, Any]:
    """Return what the noise of test scores costs, and training without them."""
    trained, tested = (tuple(e for e in events if e.records == on) for on in ("training", "test"))
    return {
        "released": sum(event.steps for event in tested),
        "noise_multiplier": statements.common(event.noise_multiplier for event in tested),
        "epsilon": finite_or_none(total_epsilon(tested, delta)),
        "epsilon_of_training": finite_or_none(total_epsilon(trained, delta)),
        "statement": TEXTS.covered,
    }


def _secrets(plan: TrainPlan, spent: Spent) -> dict[str, Any]:
    """Return where the random numbers of a run came from."""
    seeds = TEXTS.seed_given if spent.seeded else TEXTS.seed_kept_nowhere
    drawn = TEXTS.drawn
    if plan.run.secure:
        drawn = TEXTS.drawn_securely if spent.secure else TEXTS.drawn_both_ways
    if not plan.privacy.private:
        seeds = drawn = TEXTS.no_secrets
    return {
        "seed_policy": {"given": spent.seeded, "statement": seeds},
        "randomness": {"secure": spent.secure, "statement": drawn},
    }


def _search(plan: SearchPlan, delta: float) -> dict[str, Any]:
    """Return what epsilon covers of a search, of which a run is the best trial."""
    search, trials = plan.search, plan.search.trials
    return {
        "mean_trials": trials.mean,
        "most_trials": trials.most,
        "log_weight": trials.log_weight,
        "epsilon_of_a_trial": finite_or_none(search.trial_epsilon(delta)),
        "space": list(plan.space),
        "candidates": [[vars(event) for event in events] for events in search.candidates],
        "scored_on": plan.judge,
        "stop_early": plan.stop_early,
        "statement": TEXTS.searched.format(
            mean=trials.mean,
            most=trials.most,
            score=TEXTS.by_public if plan.judge else TEXTS.by_covered,
        ),
        "time": (TEXTS.stopped_early if plan.stop_early else TEXTS.same_time).format(
            most=trials.most
        ),
    }


def _counted(data: DataPlan, privacy: PrivacyPlan) -> tuple[str, str]:
    """Return what train_size and the number of tested records count."""
    counted = "units" if data.found.unit else "records"
    return counted, counted if privacy.scores else "records"


def _computed(data: DataPlan, privacy: PrivacyPlan) -> list[dict[str, str]]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts, found, own = data.facts, data.found, data.own
    shape = {
        "images": ("channels", "image size"),
        "numbers": ("columns and their ranges",),
        "texts": (texts.LIMITS,),
    }[facts.holds]
    trained, tested = _counted(data, privacy)
    status = {
        "weights, and all numbers of the report except those below": "protected",
        f"number of training {trained}": "declared public",
        f"number of test {tested}": "declared public",
        **dict.fromkeys((facts.task.public, *shape), "declared public" if own else "published"),
        **dict.fromkeys(found.inferred, "not covered"),
        "scores of the test records": "protected" if privacy.scores else "not covered",
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/, with its keys": "secret",
    }
    return [{"what": what, "status": value} for what, value in status.items()]


def _statement(plan: TrainPlan, computed: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the answers to NIST SP 800-226's questions, and the open questions."""
    data, canaries = plan.data.facts, plan.privacy.audit.canaries
    kind = "images" if data.is_images else "rows of numbers"
    shape = f"{' x '.join(map(str, data.shape))}, {data.task.described}"
    domain = texts.domain(data) if data.texts else f"Labelled {kind} of shape {shape}."
    ball = f"a ball of radius {plan.optimizer.hyper.clip_norm:g}"
    region = ball if "clip_norm" in plan.optimizer.method.settings else TEXTS.ellipsoid
    return {
        **TEXTS.statement,
        "mechanism": TEXTS.statement["mechanism"].format(region),
        "data_domain": domain,
        "unprotected": [row["what"] for row in computed if row["status"] != "protected"],
        "public": [*_public_data(plan.data), *_public_weights(plan.network)],
        "software": f"dpmac {__version__}, torch {version('torch')}.",
        **_tuning(plan),
        "audit": TEXTS.audited.format(canaries) if canaries else TEXTS.not_audited,
    }


def _tuning(plan: TrainPlan) -> dict[str, str]:
    """Return what is known of the choice of settings; nothing if nothing is."""
    if plan.search is not None:
        return {"tuning": TEXTS.tuned}
    on = plan.recorded.get("tuned_on")
    return {} if on is None else {"tuning": TEXTS.tuned_on.format(on)}


def _public_data(data: DataPlan) -> list[str]:
    return [] if data.own else [f"the dataset {data.found.name}: {data.facts.about}"]


def _public_weights(network: NetworkPlan) -> Iterator[str]:
    if isinstance(network.features, Backbone):
        backbone = BACKBONES[network.features.kind]
        yield f"weights of {backbone.about}; licence {backbone.licence}"
    if isinstance(network.features, TextEncoder):
        yield texts.source(network.features)
    if network.pretrained is not None:
        yield f"weights in {network.pretrained.name}; source and licence to be filled in"


def public_facts(plan: TrainPlan, spent: Spent, task: PreparedRun, trained: int) -> dict[str, Any]:
    """Return the facts to publish with the weights, in the model file's header.

    ``trained`` is the number of trained parameters.
    """
    facts, kind, cost = plan.data.facts, task.independence, privacy(plan, spent)
    canaries, guesses = plan.privacy.audit.canaries, plan.privacy.audit.guesses
    audit = {"canaries": canaries, "guesses": guesses, "statement": TEXTS.audit_run}
    statement = _statement(plan, cost["computed_from_records"]) if plan.privacy.private else None
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
        "statement": statement,
        "audit": audit if canaries else None,
    }


def _independence(task: PreparedRun) -> str:
    """Return how samples are known to be independent; and why alone, if nobody asked for it."""
    return " ".join(filter(None, (TEXTS.independence[task.independence], task.why)))


def _dataset(plan: DataPlan, privacy: PrivacyPlan) -> dict[str, Any]:
    """Return the facts of the dataset, and what is said of how they were learned."""
    source, facts, found = plan.source, plan.facts, plan.found
    schema = source.schema if isinstance(source, Source) else None
    notes = [TEXTS.public.format(*_counted(plan, privacy))]
    notes += [TEXTS.declared] * (schema is not None)
    notes += [TEXTS.taken.format(listed(found.inferred))] * bool(found.inferred)
    return {
        "name": found.name,
        "train_size": facts.train_size,
        "test_size": facts.test_size,
        "sha256": facts.sha256,
        "own": plan.own,
        "multilabel": facts.task.facts["multilabel"],
        "held_out": found.held_out,
        "test_note": TEXTS.held_out if found.held_out and not privacy.scores else None,
        "taken_from_records": list(found.inferred),
        "schema": None if schema is None else schema.model_dump(mode="json"),
        "public_note": " ".join(notes),
        "text_note": texts.REVEALED if facts.texts else None,
    }


def _public_part(
    network: NetworkPlan, recorded: Mapping[SettingName, Any], task: PreparedRun, trained: int
) -> dict[str, Any]:
    """Return the part of a network that was public before training; empty for most networks."""
    features, said, file = network.features, [], None
    part: dict[str, Any] = {"encoder": None}
    if isinstance(features, Scattered):
        said.append(TEXTS.scattered.format(about=FEATURES[features.kind]))
    elif isinstance(features, Backbone):
        said.append(TEXTS.of_backbone.format(about=BACKBONES[features.kind].about))
    elif isinstance(features, TextEncoder):
        said.append(texts.about(features))
        part = {"backbone": features.kind, "encoder": features.config.model_dump()}
    if network.pretrained is not None:
        file = network.pretrained.name
        said.append(TEXTS.pretrained.format(file=file))
    if network.starts_public:
        part_trained = network.trained.part
        whole = part_trained == "all"
        said.append(TEXTS.trained_all if whole else TEXTS.trained.format(part=PARTS[part_trained]))
    part = {
        **{name: recorded.get(name) for name in OF_PUBLIC_PART},
        **part,
        "backbone_flips": recorded.get("backbone_flips", False),
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
    speed = steps / seconds if seconds > 0 else 0.0
    timings: dict[str, float | None] = {
        "training_seconds": round(seconds, 3),
        "total_seconds": round(total_seconds, 3),
        "steps_per_second": round(speed, 2),
        "samples_per_second": round(speed * privacy.batch_size, 1),
    }
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


def _scores(
    task: tasks.Task, history: Sequence[Mapping[str, Any]], exact: Mapping[str, Any]
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
