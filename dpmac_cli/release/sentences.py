"""Sentences of the guarantee: rows of a topic, a condition, and what is said where it holds.

Reports, cards and the terminal take them from this one table. Names in braces are attributes of
:class:`Case`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.schema import Source, listed
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import BACKBONES, FEATURES, PARTS, Backbone, Scattered
from dpmac_cli.optim.optimizer import InBall
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.tasks.task import EvaluationMetric

AUDIT_RUN = (
    "An audit run: it also trained on artificial records for an attack. The model is unfit for "
    "release."
)
NO_SECRETS = "The run has no guarantee, so there is nothing to keep secret."
SEED_GIVEN = (
    "Trained with --seed, to be reproducible. There is no guarantee against anyone who knows or "
    "guesses the seed, because they can compute the same noise and subtract it. The guarantee "
    "holds only against those who do not know the seed."
)


@dataclass(frozen=True)
class Case:
    """A run that sentences are about: its plan, and what was done to its records."""

    plan: TrainPlan
    spent: Spent

    def __getattr__(self, part: str) -> Any:
        """Return a part of the plan by its name."""
        return getattr(self.plan, part)

    @property
    def private(self) -> bool:
        """Return whether noise was added."""
        return self.plan.privacy.private

    @property
    def units(self) -> bool:
        """Return whether a unit of privacy may have several records."""
        return bool(self.plan.data.found.unit)

    @property
    def another(self) -> str:
        """Return the article of a search besides that of the run."""
        return "a" if self.plan.search is None else "another"

    @property
    def counted(self) -> str:
        """Return what train_size counts."""
        return "units" if self.units else "records"

    @property
    def tested(self) -> str:
        """Return what the number of tested records counts."""
        return self.counted if self.plan.privacy.scores else "records"

    @property
    def table(self) -> bool:
        """Return whether the records have a declared schema."""
        source = self.plan.data.source
        return isinstance(source, Source) and source.schema is not None

    @property
    def inferred(self) -> str:
        """Parts of the schema that were taken from the records."""
        return listed(self.plan.data.found.inferred)

    @property
    def headline(self) -> EvaluationMetric:
        """Score of the task."""
        return self.plan.data.facts.task.headline

    @property
    def flattering(self) -> str:
        """Return how a score is that settings were chosen by."""
        return "low" if self.headline.lower else "high"

    @property
    def features(self) -> str:
        """Kind of features that the network takes instead of its records; "" for none."""
        kinds = {Scattered: "scattered", Backbone: "backbone", TextEncoder: "texts"}
        return kinds.get(type(self.plan.network.features), "")

    @property
    def known(self) -> Any:
        """Return what is registered about public features; None for your own encoder."""
        found = self.plan.network.features
        if isinstance(found, TextEncoder):
            return found.registered
        return BACKBONES[found.kind] if isinstance(found, Backbone) else None

    @property
    def about(self) -> str:
        """Name of the public features."""
        found: Any = self.plan.network.features
        if self.known is not None:
            return str(self.known.about)
        return FEATURES.get(found.kind) or f"the folder {found.kind}"

    @property
    def part(self) -> str:
        """Trained part of the network."""
        return PARTS[self.plan.network.trained.part]

    @property
    def limits(self) -> str:
        """Largest numbers of tokens of texts."""
        return " and ".join(str(count) for _, count in self.plan.data.facts.texts)

    @property
    def domain(self) -> str:
        """Return what a labelled record is."""
        facts = self.plan.data.facts
        if not facts.texts:
            kind = "images" if facts.is_images else "rows of numbers"
            return f"{kind} of shape {' x '.join(map(str, facts.shape))}"
        others = facts.shape[0] - sum(count + WRITTEN for _, count in facts.texts)
        several = "s" * (len(facts.texts) > 1)
        return (
            f"records with {len(facts.texts)} text{several} of at most "
            f"{self.limits.replace(' and ', ', ')} tokens and {others} other inputs"
        )

    @property
    def ball(self) -> bool:
        """Return whether gradients are clipped to a fixed ball."""
        return isinstance(self.plan.optimizer, InBall)


def said(topic: str, case: Case) -> list[str]:
    """Return the sentences on a topic that hold for a run."""
    found = ((holds, sentence) for about, holds, sentence in SENTENCES if about == topic)
    return [sentence.format(c=case) for holds, sentence in found if holds(case)]


def text(topic: str, case: Case) -> str:
    """Return the sentences of :func:`said` as one text; "" without any."""
    return " ".join(said(topic, case))


def always(_: Case) -> bool:
    """Return True."""
    return True


#: A topic, a condition, and a sentence that is true where the condition holds.
SENTENCES: tuple[tuple[str, Callable[[Case], object], str], ...] = (
    # Seeds and random numbers.
    ("seeds", lambda c: not c.private, NO_SECRETS),
    ("seeds", lambda c: c.private and c.spent.seeded, SEED_GIVEN),
    (
        "seeds",
        lambda c: c.private and not c.spent.seeded,
        "All keys came from the operating system, one for each purpose, and were not saved.",
    ),
    ("randomness", lambda c: not c.private, NO_SECRETS),
    (
        "randomness",
        lambda c: c.private and not c.settings.secure,
        "Noise comes from the key stream of a cipher and is added to the clipped sum in floating "
        "point. Batches are drawn by SFC64, which is not cryptographic.",
    ),
    (
        "randomness",
        lambda c: c.private and c.settings.secure and c.spent.secure,
        "With --secure: noise and batches come from the key stream of a cipher. Noise is a float64 "
        "normal plus a uniform number that hides its last bits. Clipped sum and noise were each "
        "rounded to multiples of 2^-40 of the sensitivity before they were added.",
    ),
    (
        "randomness",
        lambda c: c.private and c.settings.secure and not c.spent.secure,
        "The last part ran with --secure, an earlier part without.",
    ),
    ("promise", lambda c: c.private and c.spent.seeded, SEED_GIVEN),
    # Scores and data.
    (
        "covered scores",
        lambda c: c.privacy.scores,
        "Test scores were released with Gaussian noise, which protects the test records like "
        "training protects the others. Each unit of privacy is used for training or for testing, "
        "never both, so epsilon is the larger of the two costs (parallel composition).",
    ),
    (
        "test records",
        lambda c: c.data.found.held_out and not c.privacy.scores,
        "The test records were split off from the private ones. They are also private, and nothing "
        "that is measured on them is covered.",
    ),
    (
        "public records",
        always,
        "The numbers of training {c.counted} and test {c.tested} are public.",
    ),
    (
        "public records",
        lambda c: c.table,
        "Its columns were declared in a schema, which the report contains in full.",
    ),
    (
        "public records",
        lambda c: c.data.found.inferred,
        "Its {c.inferred} were not declared but taken from the records, and are treated as public. "
        "One record can change them, which epsilon does not cover.",
    ),
    (
        "texts",
        lambda c: c.data.facts.texts,
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
        lambda c: c.features == "texts",
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
        lambda c: c.network.pretrained,
        "Training started from the weights in {c.network.pretrained.name}, which are treated as "
        "public. Neither they nor the data that they were trained on are covered. If any of the "
        "records above were in that data, epsilon does not include it.",
    ),
    (
        "public part",
        lambda c: c.network.starts_public and c.network.trained.part == "all",
        "All of its weights were trained further.",
    ),
    (
        "public part",
        lambda c: c.network.starts_public and c.network.trained.part != "all",
        "The trained part is {c.part}. Everything else is unchanged from the published weights.",
    ),
    (
        "public",
        lambda c: not c.data.own,
        "the dataset {c.data.found.name}: {c.data.facts.about}",
    ),
    ("public", lambda c: c.known, "weights of {c.known.about}; licence {c.known.licence}"),
    (
        "public",
        lambda c: c.features == "texts" and not c.known,
        "weights of the text encoder {c.network.features.kind}; source and licence to be filled in",
    ),
    (
        "public",
        lambda c: c.network.pretrained,
        "weights in {c.network.pretrained.name}; source and licence to be filled in",
    ),
    (
        "search",
        lambda c: c.search,
        "This model is the best of a random number K of trials. K was drawn in secret before the "
        "start, from P(K = k) proportional to w^k / k for k from 1 to "
        "{c.search.search.trials.most}, with mean {c.search.search.trials.mean:g}. Each trial drew "
        "its settings at random and independently, and the best covered score won. The other "
        "trials, their scores and K were not shown and not kept. Epsilon covers all of this: it is "
        "not that of one trial.",
    ),
    # Answers after NIST SP 800-226 and "How to DP-fy ML".
    (
        "mechanism",
        lambda c: c.ball,
        "In each step the gradients of a random batch are clipped to a ball of radius "
        "{c.optimizer.clip_norm:g}, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "mechanism",
        lambda c: not c.ball,
        "In each step the gradients of a random batch are clipped to an ellipsoid that was "
        "computed from earlier noisy sums, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "tuning",
        lambda c: c.search,
        "Covered: epsilon includes the search for these settings, of which this model is the "
        "result. Other runs on the same records cost more.",
    ),
    (
        "tuning",
        lambda c: not c.search,
        "Unknown to this run: epsilon covers this run only. If its settings were chosen by other "
        "runs on the same records, the total privacy cost is higher.",
    ),
    ("data_domain", always, "Labelled {c.domain}, {c.data.facts.task.described}."),
    (
        "audit",
        lambda c: c.privacy.canaries,
        "This run has {c.privacy.canaries} canaries, half of which count as records in the "
        "sampling rate: dpmac eval RUN --audit compares what they reveal with the guarantee.",
    ),
    (
        "audit",
        lambda c: not c.privacy.canaries,
        "This run was not audited. dpmac train --canaries N audits another run with the same "
        "settings; how dpmac itself is tested and attacked is described in docs/privacy.md.",
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
        "Other runs on the same records: {c.another} hyperparameter search, a comparison, the best "
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
        lambda c: c.private and not c.privacy.scores,
        "The test records. The {c.headline.title} was measured on them without noise. If settings, "
        "steps or this model were chosen by {c.headline.title}, it is too {c.flattering}, "
        "and the choice reveals information about the test records.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "Times in `report.json` and `metrics.jsonl`: they are measured, without noise.",
    ),
    (
        "not covered",
        lambda c: c.private,
        "Attackers who can observe the machine during training, or read the folder `checkpoint/`, "
        "which must never be published.",
    ),
)
