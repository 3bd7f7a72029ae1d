"""The guarantee of a run, and its sentences: rows of a topic, a condition, and what is said then.

Reports, cards and the terminal take them from this one table. Names in braces are attributes of
:class:`Case`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import accountant_name, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import price
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.accounting.selection import Search
from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.facts import listed
from dpmac_cli.config.networks import BACKBONES, FEATURES, PARTS, Backbone, Scattered
from dpmac_cli.config.plan import Plan
from dpmac_cli.files import finite_or_none
from dpmac_cli.optim.optimizer import InBall
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
from dpmac_cli.runs.headers import Event

AUDIT_RUN = (
    "An audit run: it also trained on artificial records for an attack. The model is unfit for "
    "release."
)
NO_SECRETS = "The run has no guarantee, so there is nothing to keep secret."


@dataclass(frozen=True)
class Case:
    """A run that sentences are about: its plan, and what was done to its records.

    ``weighed`` is where the weights of records come from, if they are a program's.
    """

    plan: Plan
    spent: Account
    weighed: str = ""

    @property
    def private(self) -> bool:
        """Return whether noise was added."""
        return self.plan.private

    @property
    def units(self) -> bool:
        """Return whether a unit of privacy may have several records."""
        return bool(self.plan.facts.unit)

    @property
    def counted(self) -> str:
        """Return what train_size counts."""
        return "units" if self.units else "records"

    @property
    def unit(self) -> str:
        """Return what train_size counts, of which there is one."""
        return self.counted.removesuffix("s")

    @property
    def tested(self) -> str:
        """Return what the number of tested records counts."""
        return self.counted if self.plan.score else "records"

    @property
    def class_weights(self) -> str:
        """Return the class weights, divided by the largest."""
        weights = class_weights(self.plan.settings)
        return ", ".join(f"{weight / max(weights):.4g}" for weight in weights)

    @property
    def inferred(self) -> str:
        """Parts of the schema that were taken from the records."""
        return listed(self.plan.facts.inferred)

    @property
    def features(self) -> str:
        """Kind of features that the network takes instead of its records; "" for none."""
        kinds = {Scattered: "scattered", Backbone: "backbone", TextEncoder: "texts"}
        return kinds.get(type(self.plan.features), "")

    @property
    def known(self) -> Any:
        """Return what is registered about public features; None for your own encoder."""
        found = self.plan.features
        if isinstance(found, TextEncoder):
            return found.registered
        return BACKBONES[found.kind] if isinstance(found, Backbone) else None

    @property
    def about(self) -> str:
        """Name of the public features."""
        found: Any = self.plan.features
        if self.known is not None:
            return str(self.known.about)
        return FEATURES.get(found.kind) or f"the folder {found.kind}"

    @property
    def pretrained(self) -> str:
        """Name of the file of public weights, apart from those of a backbone; "" for none."""
        return "" if self.plan.pretrained is None else self.plan.pretrained.name

    @property
    def part(self) -> str:
        """Trained part of the network."""
        found = PARTS[self.plan.trained.part]
        return found.removeprefix("the head, and ") if self.continues else found

    @property
    def continues(self) -> bool:
        """Return whether the model continues texts."""
        return bool(self.plan.facts.task.network)

    @property
    def reader(self) -> str:
        """Return what kind of network reads texts."""
        return "language model" if self.continues else "text encoder"

    @property
    def limits(self) -> str:
        """Largest numbers of tokens of texts."""
        return " and ".join(str(count) for _, count in self.plan.facts.texts)

    @property
    def domain(self) -> str:
        """Return what a labelled record is."""
        facts = self.plan.facts
        if not facts.texts:
            kind = "images" if facts.is_images else "rows of numbers"
            return f"{kind} of shape {' x '.join(map(str, facts.shape))}"
        several = "s" * (len(facts.texts) > 1)
        return f"records with {len(facts.texts)} text{several} of at most {self.limits} tokens"


def said(topic: str, case: Case) -> list[str]:
    """Return the sentences on a topic that hold for a run."""
    found = ((holds, sentence) for about, holds, sentence in SENTENCES if about == topic)
    return [sentence.format(c=case) for holds, sentence in found if holds(case)]


def text(topic: str, case: Case) -> str:
    """Return the sentences of :func:`said` as one text; "" without any."""
    return " ".join(said(topic, case))


#: A topic, a condition, and a sentence that is true where the condition holds.
SENTENCES: tuple[tuple[str, Callable[[Case], object], str], ...] = (
    # Seeds and random numbers.
    ("seeds", lambda c: not c.private, NO_SECRETS),
    ("seeds", lambda c: c.private and c.spent.seeded, statements.SEED_GIVEN),
    (
        "seeds",
        lambda c: c.private and not c.spent.seeded,
        "All keys came from the operating system, one for each purpose, and were not saved.",
    ),
    ("randomness", lambda c: not c.private, NO_SECRETS),
    (
        "randomness",
        lambda c: c.private and not c.plan.settings.secure,
        "Noise comes from the key stream of a cipher and is added to the clipped sum in floating "
        "point. Batches are drawn by SFC64, which is not cryptographic.",
    ),
    (
        "randomness",
        lambda c: c.private and c.plan.settings.secure and c.spent.secure,
        "With --secure: noise and batches come from the key stream of a cipher. Noise is a float64 "
        "normal plus a uniform number that hides its last bits. Clipped sum and noise were each "
        "rounded to multiples of 2^-40 of the sensitivity before they were added.",
    ),
    (
        "randomness",
        lambda c: c.private and c.plan.settings.secure and not c.spent.secure,
        "The last part ran with --secure, an earlier part without.",
    ),
    ("promise", lambda c: c.private and c.spent.seeded, statements.SEED_GIVEN),
    # Scores and data.
    (
        "covered scores",
        lambda c: c.plan.score,
        "Test scores were released with Gaussian noise, which protects the test records like "
        "training protects the others. Each unit of privacy is used for training or for testing, "
        "never both, so epsilon is the larger of the two costs (parallel composition).",
    ),
    (
        "test records",
        lambda c: c.plan.facts.held_out and not c.plan.score,
        "The test records were split off from the private ones. They are also private, and nothing "
        "that is measured on them is covered.",
    ),
    (
        "public records",
        lambda c: True,
        "The numbers of training {c.counted} and test {c.tested} are public.",
    ),
    (
        "public records",
        lambda c: c.plan.facts.schema,
        "Its columns were declared in a schema, which the report contains in full.",
    ),
    (
        "public records",
        lambda c: c.inferred,
        "Its {c.inferred} were not declared but taken from the records, and are treated as public. "
        "One record can change them, which epsilon does not cover.",
    ),
    (
        "public records",
        lambda c: c.class_weights,
        "Its class weights, {c.class_weights}, multiply the gradient of a record after clipping. "
        "They are treated as public: if they were computed from the labels of the records, they "
        "are facts taken from those, which epsilon does not cover.",
    ),
    (
        "public records",
        lambda c: c.weighed,
        "The weights of {c.weighed}, at most 1, multiply the gradient of a record "
        "after clipping. What they use besides that record is treated as public: if it was "
        "computed from the records, it is a fact taken from those, which epsilon does not cover.",
    ),
    (
        "texts",
        lambda c: c.continues,
        "A language model can memorise: continue a text with words of a training record. Epsilon "
        "bounds how much more probable any continuation is because of the texts of "
        "one {c.unit}. It does not bound what many of them have in common, such as a name or a "
        "number that stands in the notes of several people, nor what the public weights knew "
        "before.",
    ),
    (
        "texts",
        lambda c: c.plan.facts.texts and not c.continues,
        "Predictions and cached features reveal texts: the features of a text are a function of "
        "that text alone, without noise, from which much of it can be reconstructed. Epsilon "
        "covers the model, not what it answers about a text, nor the folder of features (dpmac "
        "cache).",
    ),
    # The network.
    (
        "public part",
        lambda c: c.features == "scattered",
        "The network takes fixed features of an image ({c.about}), which depend on that image "
        "alone and contain nothing that was learnt.",
    ),
    (
        "public part",
        lambda c: c.features == "backbone",
        "The network takes features of an image from a public network ({c.about}), which depend on "
        "that image alone. Neither its weights nor the data that they were trained on are covered. "
        "If any of the records above were in that data, epsilon does not include it.",
    ),
    (
        "public part",
        lambda c: c.continues,
        "The network is a public language model ({c.about}). Texts are truncated to {c.limits} "
        "tokens of its public vocabulary.",
    ),
    (
        "public part",
        lambda c: c.features == "texts" and not c.continues,
        "The network takes vectors of texts from a public encoder ({c.about}), and the shares of "
        "capitals, digits, punctuation and symbols of each text. They depend on each text alone. "
        "Texts are truncated to {c.limits} tokens of its public vocabulary.",
    ),
    (
        "public part",
        lambda c: c.features == "texts" and c.known,
        "It was trained on {c.known.language} texts: {c.known.corpora}.",
    ),
    (
        "public part",
        lambda c: c.features == "texts" and not c.known,
        "The language and the texts that it was trained on are to be filled in.",
    ),
    (
        "public part",
        lambda c: c.features == "texts",
        "Neither its weights nor those texts are covered. If any of the records above, or "
        "quotations from them, were among those texts, epsilon does not include it.",
    ),
    (
        "public part",
        lambda c: c.pretrained,
        "Training started from the weights in {c.pretrained}, which are treated as "
        "public. Neither they nor the data that they were trained on are covered. If any of the "
        "records above were in that data, epsilon does not include it.",
    ),
    (
        "public part",
        lambda c: c.plan.starts_public and c.plan.trained.part == "all",
        "All of its weights were trained further.",
    ),
    (
        "public part",
        lambda c: c.plan.starts_public and c.plan.trained.part != "all",
        "The trained part is {c.part}. Everything else is unchanged from the published weights.",
    ),
    (
        "public",
        lambda c: c.plan.facts.source is None,
        "the dataset {c.plan.facts.name}: {c.plan.facts.about}",
    ),
    ("public", lambda c: c.known, "weights of {c.known.about}; licence {c.known.licence}"),
    (
        "public",
        lambda c: c.features == "texts" and not c.known,
        "weights of the {c.reader} {c.plan.features.kind}; source and licence to be filled in",
    ),
    (
        "public",
        lambda c: c.pretrained,
        "weights in {c.pretrained}; source and licence to be filled in",
    ),
    (
        "search",
        lambda c: c.plan.search,
        "This model is the best of a random number K of trials. K was drawn in secret before the "
        "start, from P(K = k) proportional to w^k / k for k from 1 to "
        "{c.plan.search.trials.most}, with mean {c.plan.search.trials.mean:g}. Each trial drew "
        "its settings at random and independently, and the best covered score won. The other "
        "trials, their scores and K were not shown and not kept. Epsilon covers all of this: it is "
        "not that of one trial.",
    ),
    # Answers after NIST SP 800-226 and "How to DP-fy ML".
    (
        "mechanism",
        lambda c: isinstance(c.plan.optimizer, InBall),
        "In each step the gradients of a random batch are clipped to a ball of radius "
        "{c.plan.optimizer.clip_norm:g}, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "mechanism",
        lambda c: not isinstance(c.plan.optimizer, InBall),
        "In each step the gradients of a random batch are clipped to an ellipsoid that was "
        "computed from earlier noisy sums, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "tuning",
        lambda c: c.plan.search,
        "Covered: epsilon includes the search for these settings, of which this model is the "
        "result. Other runs on the same records cost more.",
    ),
    (
        "tuning",
        lambda c: not c.plan.search,
        "Unknown to this run: epsilon covers this run only. If its settings were chosen by other "
        "runs on the same records, the total privacy cost is higher.",
    ),
    (
        "data_domain",
        lambda c: not c.continues,
        "Labelled {c.domain}, {c.plan.facts.task.described}.",
    ),
    ("data_domain", lambda c: c.continues, "Unlabelled {c.domain}. It predicts the next token."),
    (
        "audit",
        lambda c: c.plan.settings.canaries,
        "This run has {c.plan.settings.canaries} canaries, half of which count as records in the "
        "sampling rate: dpmac eval RUN --audit compares what they reveal with the guarantee.",
    ),
    (
        "audit",
        lambda c: not c.plan.settings.canaries,
        "This run was not audited. dpmac train --canaries N audits another run with the same "
        "settings. How dpmac is tested and attacked is in docs/audits.md of its repository.",
    ),
    # What epsilon does not cover.
    (
        "not covered",
        lambda c: not c.private,
        "Everything: this is a baseline. Do not publish it if the training records matter.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "Other runs on the same records: any further hyperparameter search, a comparison, the best "
        "of several. Each adds to the privacy cost of this one.",
    ),
    (
        "not covered",
        lambda c: c.private and not c.units,
        "A person with several records as a whole: each record is protected by itself (`--unit` "
        "protects all of a person's).",
    ),
    (
        "not covered",
        lambda c: c.private and c.units,
        "A person with two units as a whole, and what several units have in common, such as "
        "relatives.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "What holds for people in general: if smokers fall ill more often, the model may say so, "
        "and it applies to a smoker whether or not their record was used.",
    ),
    (
        "not covered",
        lambda c: c.private and not c.plan.score,
        "The test records. The {c.plan.facts.task.headline.title} was measured on them without "
        "noise. If settings, steps or this model were chosen by it, it is better than on other "
        "records, and the choice reveals information about the test records.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "Times in `report.json` and `metrics.jsonl`: they are measured, without noise.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "Attackers who can observe the machine during training.",
    ),
)


def privacy(case: Case) -> Privacy:
    """Return the guarantee of a run with all its parts."""
    plan, spent, delta = case.plan, case.spent, case.plan.settings.delta
    cost = price(spent.events, delta, unit=plan.unit, search=plan.search)
    whole = spent.event
    if not math.isinf(plan.max_epsilon):
        whole = plan.event.first(plan.event.steps - spent.base)
    planned = total_epsilon((*spent.before, whole), delta)
    risk = assess_risk(cost.done, plan.facts.train_size, plan.unit)
    return Privacy(
        private=plan.private,
        epsilon=finite_or_none(cost.epsilon),
        epsilon_planned=finite_or_none(max(planned, cost.epsilon)),
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
        covered_scores=_covered_scores(case) if plan.score else None,
        search=None if plan.search is None else _search(case, plan.search),
        events=_events(spent.events),
        adjacency="add-or-remove-one" if plan.private else None,
        accountant=accountant_name(cost.accountant) if plan.private else None,
        risk=RiskBounds(**risk.values()) if plan.private else None,
        computed_from_records=_computed(case) if plan.private else None,
        not_covered=tuple(said("not covered", case)),
        statement=" ".join([*said("promise", case), cost.statement]),
        seed_policy=SeedPolicy(given=spent.seeded, statement=text("seeds", case)),
        randomness=Randomness(secure=spent.secure, statement=text("randomness", case)),
    )


def _events(events: Sequence[TrainingEvent]) -> tuple[Event, ...]:
    return tuple(Event(**vars(event)) for event in events)


def _covered_scores(case: Case) -> CoveredScores:
    """Return what the noise of test scores costs, and training without them."""
    events, delta = case.spent.events, case.plan.settings.delta
    trained, tested = (tuple(e for e in events if e.records == on) for on in ("training", "test"))
    return CoveredScores(
        released=sum(event.steps for event in tested),
        noise_multiplier=statements.common(event.noise_multiplier for event in tested),
        epsilon=finite_or_none(total_epsilon(tested, delta)),
        epsilon_of_training=finite_or_none(total_epsilon(trained, delta)),
        statement=text("covered scores", case),
    )


def _search(case: Case, search: Search) -> SearchResult:
    """Return what epsilon covers of a search, of which a run is the best trial."""
    return SearchResult(
        mean_trials=search.trials.mean,
        most_trials=search.trials.most,
        epsilon_of_a_trial=finite_or_none(search.trial_epsilon(case.plan.settings.delta)),
        space=search.space,
        candidates=tuple(_events(events) for events in search.candidates),
        statement=text("search", case),
    )


def _computed(case: Case) -> tuple[Computed, ...]:
    """Return the values that a run computes from its records, and whether each is protected."""
    facts, covered = case.plan.facts, case.plan.score
    shape = {
        "images": ("channels", "image size"),
        "numbers": ("columns and their ranges",),
        "texts": ("columns, their ranges, and largest numbers of tokens",),
    }[facts.holds]
    status = {
        "weights, and all numbers of the report except those below": "protected",
        f"number of training {case.counted}": "declared public",
        f"number of test {case.tested}": "declared public",
        **dict.fromkeys(
            (facts.task.public, *shape), "published" if facts.source is None else "declared public"
        ),
        **dict.fromkeys(facts.inferred, "not covered"),
        "scores of the test records": "protected" if covered else "not covered",
        "measured times": "not covered",
        "notes on the screen: records left out, untested classes, lack of memory": "not covered",
        "state in checkpoint/, except measured times": "protected",
    }
    return tuple(Computed(what=what, status=value) for what, value in status.items())


def nist_statement(case: Case) -> dict[str, str | list[str]]:
    """Return the answers to NIST SP 800-226's questions that depend on the run."""
    topics = ("mechanism", "tuning", "data_domain", "audit")
    return {**{topic: text(topic, case) for topic in topics}, "public": said("public", case)}
