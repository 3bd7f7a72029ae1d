"""Sentences about a run: rows of a topic, a condition, and what is said then.

Reports, cards and the terminal take them from this one table. Names in braces are attributes of
:class:`DescribedRun`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.facts import listed
from dpmac_cli.config.networks import (
    BACKBONES,
    FEATURES,
    PARTS,
    Backbone,
    OwnFeatures,
    Scattered,
    TableColumns,
)
from dpmac_cli.config.plan import Plan
from dpmac_cli.optim.optimizer import InBall

AUDIT_RUN = (
    "An audit run: it also trained on artificial records for an attack. The model is unfit for "
    "release."
)
NO_SECRETS = "The run has no guarantee, so there is nothing to keep secret."


@dataclass(frozen=True)
class DescribedRun:
    """A run that sentences are about: its plan, and what was done to its records.

    Attributes:
        weighed: where the weights of records come from, if they are a program's.
        released: topics of the histograms that were released: ranges, calibration, residuals.
    """

    plan: Plan
    spent: Account
    weighed: str = ""
    released: tuple[str, ...] = ()

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
    def sampled(self) -> bool:
        """Return whether the histogram of the training records is of a sample of them."""
        return self.plan.histogram is not None and self.plan.histogram.sampling_rate < 1

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
    def counted_columns(self) -> tuple[str, ...]:
        """Return the columns whose ranges follow from noisy counts."""
        return self.plan.counted_columns

    @property
    def features(self) -> str:
        """Kind of features that the network takes instead of its records; "" for none."""
        kinds = {
            Scattered: "scattered",
            OwnFeatures: "own",
            TableColumns: "columns",
            Backbone: "backbone",
            TextEncoder: "texts",
        }
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
        fixed = FEATURES.get(found.kind)
        return f"the folder {found.kind}" if fixed is None else fixed.about

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
    def cost_of_training(self) -> str:
        """Return epsilon of all events on training records."""
        return self._cost_on("training")

    @property
    def cost_of_scores(self) -> str:
        """Return epsilon of all scores of test records."""
        return self._cost_on("test")

    def _cost_on(self, split: str) -> str:
        events = tuple(event for event in self.spent.events if event.records == split)
        return format_epsilon(total_epsilon(events, self.plan.settings.delta))

    @property
    def cost_of_a_trial(self) -> str:
        """Return epsilon of one trial of a search; "" if there was none."""
        search = self.plan.search
        delta = self.plan.settings.delta
        return "" if search is None else format_epsilon(search.trial_epsilon(delta))

    @property
    def domain(self) -> str:
        """Return what a labelled record is."""
        return self.plan.facts.records.described


def said(topic: str, run: DescribedRun) -> list[str]:
    """Return the sentences on a topic that hold for a run."""
    found = ((holds, sentence) for about, holds, sentence in SENTENCES if about == topic)
    return [sentence.format(run=run) for holds, sentence in found if holds(run)]


#: A topic, a condition, and a sentence that is true where the condition holds.
SENTENCES: tuple[tuple[str, Callable[[DescribedRun], object], str], ...] = (
    ("audit_run", lambda run: run.plan.settings.canaries, AUDIT_RUN),
    # Seeds and random numbers.
    ("seeds", lambda run: not run.private, NO_SECRETS),
    ("seeds", lambda run: run.private and run.spent.seeded, statements.SEED_GIVEN),
    (
        "seeds",
        lambda run: run.private and not run.spent.seeded,
        "All keys came from the operating system, one for each purpose, and were not saved.",
    ),
    ("randomness", lambda run: not run.private, NO_SECRETS),
    (
        "randomness",
        lambda run: run.private and not run.plan.settings.secure,
        "Noise comes from the key stream of a cipher and is added to the clipped sum in floating "
        "point. Batches are drawn by SFC64, which is not cryptographic.",
    ),
    (
        "randomness",
        lambda run: run.private and run.plan.settings.secure and run.spent.secure,
        "With --secure: noise and batches come from the key stream of a cipher. Noise is a float64 "
        "normal plus a uniform number that hides its last bits. Clipped sum and noise were each "
        "rounded to multiples of 2^-40 of the sensitivity before they were added.",
    ),
    (
        "randomness",
        lambda run: run.private and run.plan.settings.secure and not run.spent.secure,
        "The last part ran with --secure, an earlier part without.",
    ),
    ("promise", lambda run: run.private and run.spent.seeded, statements.SEED_GIVEN),
    # Scores and data.
    (
        "covered_scores",
        lambda run: run.plan.score,
        "Test scores were released with Gaussian noise, which protects the test records like "
        "training protects the others. Each unit of privacy is used for training or for testing, "
        "never both, so epsilon is the larger of the two costs (parallel composition). Training "
        "costs epsilon {run.cost_of_training}, the scores {run.cost_of_scores}.",
    ),
    (
        "test_records",
        lambda run: run.plan.facts.held_out and not run.plan.score,
        "The test records were split off from the private ones. They are also private, and nothing "
        "that is measured on them is covered.",
    ),
    (
        "public_records",
        lambda run: run.plan.facts.test_size,
        "The numbers of training {run.counted} and test {run.tested} are public.",
    ),
    (
        "public_records",
        lambda run: not run.plan.facts.test_size,
        "The number of training {run.counted} is public. All of the records were trained on.",
    ),
    (
        "public_records",
        lambda run: run.plan.facts.schema,
        "Its columns were declared in a schema, which the report contains in full.",
    ),
    (
        "public_records",
        lambda run: run.inferred,
        "Its {run.inferred} were not declared but taken from the records, and are treated as "
        "public. One record can change them, which epsilon does not cover.",
    ),
    (
        "public_records",
        lambda run: run.class_weights,
        "Its class weights, {run.class_weights}, multiply the gradient of a record after clipping. "
        "They are treated as public: if they were computed from the labels of the records, they "
        "are facts taken from those, which epsilon does not cover.",
    ),
    (
        "public_records",
        lambda run: run.weighed,
        "The weights of {run.weighed}, at most 1, multiply the gradient of a record "
        "after clipping. What they use besides that record is treated as public: if it was "
        "computed from the records, it is a fact taken from those, which epsilon does not cover.",
    ),
    (
        "texts",
        lambda run: run.continues,
        "A language model can memorise: continue a text with words of a training record. Epsilon "
        "bounds how much more probable any continuation is because of the texts of "
        "one {run.unit}. It does not bound what many of them have in common, such as a name or a "
        "number that stands in the notes of several people, nor what the public weights knew "
        "before.",
    ),
    (
        "texts",
        lambda run: run.features == "texts" and not run.continues,
        "Predictions and cached features reveal texts: the features of a text are a function of "
        "that text alone, without noise, from which much of it can be reconstructed. Epsilon "
        "covers the model, not what it answers about a text, nor the folder of features (dpmac "
        "cache).",
    ),
    # The network.
    (
        "features",
        lambda run: run.features == "scattered",
        "The network takes fixed features of an image ({run.about}), which depend on that image "
        "alone and contain nothing that was learnt.",
    ),
    (
        "features",
        lambda run: run.features == "own",
        "The network takes features of each record from a function of the program ({run.about}), "
        "which sees one record at a time. That it was made without the records above is declared "
        "by whoever trained the model; epsilon does not cover it.",
    ),
    (
        "features",
        lambda run: run.features == "columns",
        "The network takes fixed functions of each column ({run.about}), which depend on their row "
        "alone.",
    ),
    (
        "features",
        lambda run: run.features == "backbone",
        "The network takes features of an image from a public network ({run.about}), which depend "
        "on that image alone. Neither its weights nor the data that they were trained on are "
        "covered. If any of the records above were in that data, epsilon does not include it.",
    ),
    (
        "features",
        lambda run: run.continues,
        "The network is a public language model ({run.about}). Texts are truncated to "
        "{run.plan.facts.records.limits} tokens of its public vocabulary.",
    ),
    (
        "features",
        lambda run: run.features == "texts" and not run.continues,
        "The network takes vectors of texts from a public encoder ({run.about}), and the shares of "
        "capitals, digits, punctuation and symbols of each text. They depend on each text alone. "
        "Texts are truncated to {run.plan.facts.records.limits} tokens of its public vocabulary.",
    ),
    (
        "features",
        lambda run: run.features == "texts" and run.known,
        "It was trained on {run.known.language} texts: {run.known.corpora}.",
    ),
    (
        "features",
        lambda run: run.features == "texts" and not run.known,
        "The language and the texts that it was trained on are to be filled in.",
    ),
    (
        "features",
        lambda run: run.features == "texts",
        "Neither its weights nor those texts are covered. If any of the records above, or "
        "quotations from them, were among those texts, epsilon does not include it.",
    ),
    (
        "features",
        lambda run: run.pretrained,
        "Training started from the weights in {run.pretrained}, which are treated as "
        "public. Neither they nor the data that they were trained on are covered. If any of the "
        "records above were in that data, epsilon does not include it.",
    ),
    (
        "features",
        lambda run: run.plan.starts_public and run.plan.trained.part == "all",
        "All of its weights were trained further.",
    ),
    (
        "features",
        lambda run: run.plan.starts_public and run.plan.trained.part != "all",
        "The trained part is {run.part}. Everything else is unchanged from the published weights.",
    ),
    (
        "public",
        lambda run: not run.plan.facts.user_supplied,
        "the dataset {run.plan.facts.name}: {run.plan.facts.about}",
    ),
    ("public", lambda run: run.known, "weights of {run.known.about}; licence {run.known.licence}"),
    (
        "public",
        lambda run: run.features == "texts" and not run.known,
        "weights of the {run.reader} {run.plan.features.kind}; source and licence to be filled in",
    ),
    (
        "public",
        lambda run: run.pretrained,
        "weights in {run.pretrained}; source and licence to be filled in",
    ),
    (
        "search",
        lambda run: run.plan.search,
        "This model is the best of a random number K of trials. K was drawn in secret before the "
        "start, from P(K = k) proportional to w^k / k for k from 1 to "
        "{run.plan.search.trials.most}, with mean {run.plan.search.trials.mean:g}. Each trial drew "
        "its settings at random and independently, and the best covered score won. The other "
        "trials, their scores and K were not shown and not kept. Epsilon covers all of this: it is "
        "not that of one trial. One trial alone costs epsilon {run.cost_of_a_trial}.",
    ),
    (
        "calibration",
        lambda run: "calibration" in run.released,
        "After the last step, one histogram of the training {run.counted} was released with "
        "Gaussian noise, in which each counts at most once. Probabilities follow from it, and no "
        "decision does.",
    ),
    (
        "calibration",
        lambda run: "calibration" in run.released and run.sampled,
        "It is of a random sample of them, and its counts are estimates of those of all.",
    ),
    (
        "ranges",
        lambda run: run.private and "ranges" in run.released,
        "Before the first step, ranges and ranks of columns of numbers were found by three rounds "
        "of histograms of the training {run.counted} with Gaussian noise, in which each counts at "
        "most once in a column. Epsilon covers them.",
    ),
    (
        "ranges",
        lambda run: not run.private and "ranges" in run.released,
        "Ranges and ranks that were not declared are exact facts of the training {run.counted}.",
    ),
    (
        "ranges",
        lambda run: run.private and "ranges" in run.released and run.plan.facts.task.open,
        "Before the first step, the range of {run.plan.facts.task.name} was found by three rounds "
        "of such histograms, and narrowed by its mean and spread, which were released with "
        "Gaussian noise. Epsilon covers them.",
    ),
    (
        "residuals",
        lambda run: "residuals" in run.released,
        "After the last step, one histogram of the residuals of the training {run.counted} was "
        "released with Gaussian noise, in which each counts at most once. Intervals of predictions "
        "follow from it. Their share of the targets is that of all records, not of each kind.",
    ),
    (
        "residuals",
        lambda run: "residuals" in run.released and run.sampled,
        "It is of a random sample of them, and its counts are estimates of those of all.",
    ),
    # Answers after NIST SP 800-226 and "How to DP-fy ML".
    (
        "mechanism",
        lambda run: isinstance(run.plan.optimizer, InBall),
        "In each step the gradients of a random batch are clipped to a ball of radius "
        "{run.plan.optimizer.clip_norm:g}, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "mechanism",
        lambda run: not isinstance(run.plan.optimizer, InBall),
        "In each step the gradients of a random batch are clipped to an ellipsoid that was "
        "computed from earlier noisy sums, one unit of privacy at a time, and the Gaussian "
        "mechanism releases their sum.",
    ),
    (
        "tuning",
        lambda run: run.plan.search,
        "Covered: epsilon includes the search for these settings, of which this model is the "
        "result. Other runs on the same records cost more.",
    ),
    (
        "tuning",
        lambda run: not run.plan.search,
        "Unknown to this run: epsilon covers this run only. If its settings were chosen by other "
        "runs on the same records, the total privacy cost is higher.",
    ),
    (
        "data_domain",
        lambda run: not run.continues,
        "Labelled {run.domain}, {run.plan.facts.task.described}.",
    ),
    (
        "data_domain",
        lambda run: run.continues,
        "Unlabelled {run.domain}. It predicts the next token.",
    ),
    (
        "audit",
        lambda run: run.plan.settings.canaries,
        "This run has {run.plan.settings.canaries} crafted records, all of which count in the "
        "sampling rate: dpmac eval RUN --audit compares what they reveal with the guarantee.",
    ),
    (
        "audit",
        lambda run: not run.plan.settings.canaries,
        "This run was not audited. dpmac train --canaries N audits another run with the same "
        "settings. How dpmac is tested and attacked is in docs/audits.md of its repository.",
    ),
    # What epsilon does not cover.
    (
        "not_covered",
        lambda run: not run.private,
        "Everything: this is a baseline. Do not publish it if the training records matter.",
    ),
    (
        "not_covered",
        lambda run: run.private,
        "Other runs on the same records: any further hyperparameter search, a comparison, the best "
        "of several. Each adds to the privacy cost of this one.",
    ),
    (
        "not_covered",
        lambda run: run.private and not run.units,
        "A person with several records as a whole: each record is protected by itself (`--unit` "
        "protects all of a person's).",
    ),
    (
        "not_covered",
        lambda run: run.private and run.units,
        "A person with two units as a whole, and what several units have in common, such as "
        "relatives.",
    ),
    (
        "not_covered",
        lambda run: run.private,
        "What holds for people in general: if smokers fall ill more often, the model may say so, "
        "and it applies to a smoker whether or not their record was used.",
    ),
    (
        "not_covered",
        lambda run: run.private and run.plan.facts.test_size and not run.plan.score,
        "The test records. The {run.plan.facts.task.headline.title} was measured on them without "
        "noise. If settings, steps or this model were chosen by it, it is better than on other "
        "records, and the choice reveals information about the test records.",
    ),
    (
        "not_covered",
        lambda run: run.private,
        "Times in `report.json` and `metrics.jsonl`: they are measured, without noise.",
    ),
    (
        "not_covered",
        lambda run: run.private,
        "Attackers who can observe the machine during training.",
    ),
)


#: Topics that are lists, and those that only a run with privacy has.
LISTS = ("public", "not_covered")
OF_PRIVACY = ("mechanism", "tuning", "data_domain", "audit", "public")


def sentences_of(run: DescribedRun) -> dict[str, Any]:
    """Return what is said of a run, by topic. Topics that do not apply are absent."""
    topics = dict.fromkeys(topic for topic, _, _ in SENTENCES)
    by_topic = {topic: said(topic, run) for topic in topics if topic != "promise"}
    if run.private:
        by_topic["public"] = by_topic["public"] or ["none"]
    else:
        by_topic = {topic: of for topic, of in by_topic.items() if topic not in OF_PRIVACY}
    return {
        topic: tuple(sentences) if topic in LISTS else " ".join(sentences)
        for topic, sentences in by_topic.items()
        if sentences
    }
