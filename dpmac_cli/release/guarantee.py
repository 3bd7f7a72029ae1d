"""Privacy guarantee of a run: what its report says that epsilon covers, and what it does not."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dpmac_cli import __version__
from dpmac_cli.accounting import statements
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.config.plan import (
    DataPlan,
    NetworkPlan,
    PrivacyPlan,
    SearchPlan,
    TrainPlan,
)
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import BACKBONES, Backbone
from dpmac_cli.release import sentences, texts
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.storage.files import finite_or_none


def privacy(plan: TrainPlan, spent: Spent) -> dict[str, Any]:
    """Return the guarantee of a run with all its parts, without the attempts that it replaces.

    ``epsilon_planned`` is that of all steps, without --max-epsilon. ``noise_multiplier`` and
    ``sampling_rate`` are null if parts differ.
    """
    events = spent.events
    part = plan.privacy
    private = part.private
    search = None if plan.search is None else plan.search.search
    cost = price(events, part.delta, unit=part.unit, search=search)
    whole = part.event_of(part.steps - spent.base)
    planned = total_epsilon((*spent.earlier, whole), part.delta)
    risk = assess_risk(cost.done, plan.data.facts.train_size, part.unit)
    promise = cost.statement
    if private and spent.seeded:
        promise = f"{sentences.SEED_GIVEN} {promise}"
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
        "statement": promise,
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
        "statement": sentences.COVERED,
    }


def _secrets(plan: TrainPlan, spent: Spent) -> dict[str, Any]:
    """Return where the random numbers of a run came from."""
    seeds = sentences.SEED_GIVEN if spent.seeded else sentences.SEED_KEPT_NOWHERE
    drawn = sentences.DRAWN
    if plan.run.secure:
        drawn = sentences.DRAWN_SECURELY if spent.secure else sentences.DRAWN_BOTH_WAYS
    if not plan.privacy.private:
        seeds = drawn = sentences.NO_SECRETS
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
        "statement": sentences.SEARCHED.format(mean=trials.mean, most=trials.most),
    }


def counted_in(data: DataPlan, privacy: PrivacyPlan) -> tuple[str, str]:
    """Return what train_size and the number of tested records count."""
    counted = "units" if data.found.unit else "records"
    return counted, counted if privacy.scores else "records"


def _computed(data: DataPlan, privacy: PrivacyPlan) -> list[dict[str, str]]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts = data.facts
    found = data.found
    own = data.own
    shape = {
        "images": ("channels", "image size"),
        "numbers": ("columns and their ranges",),
        "texts": (texts.LIMITS,),
    }[facts.holds]
    trained, tested = counted_in(data, privacy)
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


def nist_statement(plan: TrainPlan, computed: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the answers to NIST SP 800-226's questions, and the open questions.

    ``computed`` are the values computed from records, with their status: see :func:`privacy`.
    """
    data, canaries = plan.data.facts, plan.privacy.audit.canaries
    kind = "images" if data.is_images else "rows of numbers"
    shape = f"{' x '.join(map(str, data.shape))}, {data.task.described}"
    domain = texts.domain(data) if data.texts else f"Labelled {kind} of shape {shape}."
    ball = f"a ball of radius {plan.optimizer.hyper.clip_norm:g}"
    region = ball if "clip_norm" in plan.optimizer.method.settings else sentences.ELLIPSOID
    return {
        **sentences.STATEMENT,
        "open": list(sentences.OPEN_QUESTIONS),
        "mechanism": sentences.STATEMENT["mechanism"].format(region),
        "data_domain": domain,
        "unprotected": [row["what"] for row in computed if row["status"] != "protected"],
        "public": [*_public_data(plan.data), *_public_weights(plan.network)],
        "software": f"dpmac {__version__}, torch {version('torch')}.",
        **_tuning(plan),
        "audit": sentences.AUDITED.format(canaries) if canaries else sentences.NOT_AUDITED,
    }


def _tuning(plan: TrainPlan) -> dict[str, str]:
    """Return what is known of the choice of settings; nothing if nothing is."""
    if plan.search is not None:
        return {"tuning": sentences.TUNED}
    on = plan.recorded.get("tuned_on")
    return {} if on is None else {"tuning": sentences.TUNED_ON.format(on)}


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
