"""Privacy guarantee of a run: what its report says that epsilon covers, and what it does not."""

import math
from collections.abc import Sequence

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.accountants import ACCOUNTANTS, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.config.plan import SearchPlan
from dpmac_cli.release.report import (
    Computed,
    CoveredScores,
    Event,
    Privacy,
    Randomness,
    RiskBounds,
    SearchResult,
    SeedPolicy,
    Unit,
)
from dpmac_cli.release.sentences import Case, said, text
from dpmac_cli.storage.files import finite_or_none


def privacy(case: Case) -> Privacy:
    """Return the guarantee of a run with all its parts."""
    plan, spent = case.plan, case.spent
    part, events = plan.privacy, spent.events
    search = None if plan.search is None else plan.search.search
    cost = price(events, part.delta, unit=part.unit, search=search)
    whole = spent.event
    if not math.isinf(part.max_epsilon):
        whole = part.event_of(part.steps - spent.base)
    planned = total_epsilon((*spent.earlier, whole), part.delta)
    risk = assess_risk(cost.done, plan.data.facts.train_size, part.unit)
    return Privacy(
        private=part.private,
        epsilon=finite_or_none(cost.epsilon),
        epsilon_planned=finite_or_none(max(planned, cost.epsilon)),
        delta=part.delta if part.private else None,
        noise_multiplier=cost.noise_multiplier,
        unit=Unit(
            name=part.unit,
            told_by=plan.data.found.unit or None,
            records_in_a_step=plan.recipe.records,
        ),
        sampler=cost.sampler,
        sampling_rate=cost.sampling_rate,
        steps=cost.steps,
        covered_scores=_covered_scores(case) if part.scores else None,
        search=None if plan.search is None else _search(case, plan.search),
        events=_events(events),
        adjacency="add-or-remove-one" if part.private else None,
        accountant=ACCOUNTANTS[cost.accountant] if part.private else None,
        risk=RiskBounds(**risk.values()) if part.private else None,
        computed_from_records=_computed(case) if part.private else None,
        not_covered=tuple(said("not covered", case)),
        statement=" ".join([*said("promise", case), cost.statement]),
        seed_policy=SeedPolicy(given=spent.seeded, statement=text("seeds", case)),
        randomness=Randomness(secure=spent.secure, statement=text("randomness", case)),
    )


def _events(events: Sequence[TrainingEvent]) -> tuple[Event, ...]:
    return tuple(Event(**vars(event)) for event in events)


def _covered_scores(case: Case) -> CoveredScores:
    """Return what the noise of test scores costs, and training without them."""
    events, delta = case.spent.events, case.plan.privacy.delta
    trained, tested = (tuple(e for e in events if e.records == on) for on in ("training", "test"))
    return CoveredScores(
        released=sum(event.steps for event in tested),
        noise_multiplier=statements.common(event.noise_multiplier for event in tested),
        epsilon=finite_or_none(total_epsilon(tested, delta)),
        epsilon_of_training=finite_or_none(total_epsilon(trained, delta)),
        statement=text("covered scores", case),
    )


def _search(case: Case, plan: SearchPlan) -> SearchResult:
    """Return what epsilon covers of a search, of which a run is the best trial."""
    search, trials = plan.search, plan.search.trials
    return SearchResult(
        mean_trials=trials.mean,
        most_trials=trials.most,
        epsilon_of_a_trial=finite_or_none(search.trial_epsilon(case.plan.privacy.delta)),
        space=plan.space,
        candidates=tuple(_events(events) for events in search.candidates),
        statement=text("search", case),
    )


def _computed(case: Case) -> tuple[Computed, ...]:
    """Return the values that a run computes from its records, and whether each is protected."""
    data, covered = case.plan.data, case.plan.privacy.scores
    shape = {
        "images": ("channels", "image size"),
        "numbers": ("columns and their ranges",),
        "texts": ("columns, their ranges, and largest numbers of tokens",),
    }[data.facts.holds]
    status = {
        "weights, and all numbers of the report except those below": "protected",
        f"number of training {case.counted}": "declared public",
        f"number of test {case.tested}": "declared public",
        **dict.fromkeys(
            (data.facts.task.public, *shape), "declared public" if data.own else "published"
        ),
        **dict.fromkeys(data.found.inferred, "not covered"),
        "scores of the test records": "protected" if covered else "not covered",
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/": "secret",
    }
    return tuple(Computed(what=what, status=value) for what, value in status.items())


def nist_statement(case: Case) -> dict[str, str | list[str]]:
    """Return the answers to NIST SP 800-226's questions that depend on the run."""
    topics = ("mechanism", "tuning", "data_domain", "audit")
    return {**{topic: text(topic, case) for topic in topics}, "public": said("public", case)}
