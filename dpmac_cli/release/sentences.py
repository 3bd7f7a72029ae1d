"""Sentences about a run: one function per topic, which yields what holds for that run.

Reports, cards and the terminal take them from here. A topic is a key of ``sentences`` in a report,
and the name of its function. A function yields whole sentences (``public`` yields sources instead),
and nothing if the topic does not apply to the run. It reads the plan and the account, and never a
record.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.facts import listed
from dpmac_cli.optim.optimizer import InBall
from dpmac_cli.release.described_run import DescribedRun
from dpmac_cli.release.network_sentences import features, public
from dpmac_cli.tasks.calibration import Calibration
from dpmac_cli.tasks.operating_point import (
    SENSITIVITY,
    OperatingPoint,
    interval_of_share,
    records_of_last,
    share_of_last,
)
from dpmac_cli.tasks.regression import Regression

# Seeds and random numbers.

AUDIT_RUN = (
    "An audit run: it also trained on artificial records for an attack. The model is unfit for "
    "release."
)
NO_SECRETS = "The run has no guarantee, so there is nothing to keep secret."
PLAINLY = (
    "Noise comes from the key stream of a cipher and is added to the clipped sum in floating "
    "point. Batches are drawn by SFC64, which is not cryptographic."
)
SECURELY = (
    "With --secure: noise and batches come from the key stream of a cipher. Noise is a float64 "
    "normal plus a uniform number that hides its last bits. Clipped sum and noise were each "
    "rounded to multiples of 2^-40 of the sensitivity before they were added."
)
BOTH_WAYS = "The last part ran with --secure, an earlier part without."


def audit_run(run: DescribedRun) -> Iterator[str]:
    """Warn of a model that was trained on crafted records; nothing for other runs."""
    if run.plan.settings.canaries:
        yield AUDIT_RUN


def seeds(run: DescribedRun) -> Iterator[str]:
    """Say where the keys came from: a seed that the user set, or the operating system.

    Without privacy there is nothing to keep secret, which is then said.
    """
    if not run.plan.private:
        yield NO_SECRETS
    elif run.spent.seeded:
        yield statements.SEED_GIVEN
    else:
        yield "All keys came from the operating system, one for each purpose, and were not saved."


def randomness(run: DescribedRun) -> Iterator[str]:
    """Say how noise and batches were drawn.

    A run of several parts is called secure if all of them were; if one was not, that is said.
    """
    if not run.plan.private:
        yield NO_SECRETS
    elif not run.plan.settings.secure:
        yield PLAINLY
    elif run.spent.secure:
        yield SECURELY
    else:
        yield BOTH_WAYS


# Scores and data.


def covered_scores(run: DescribedRun) -> Iterator[str]:
    """Say what noise in the scores protects, and its cost; nothing for exact scores."""
    if run.plan.score:
        yield (
            "Test scores were released with Gaussian noise, which protects the test records like "
            "training protects the others. Each unit of privacy is used for training or for "
            "testing, never both, so epsilon is the larger of the two costs (parallel "
            f"composition). Training costs epsilon {run.cost_on('training')}, the scores "
            f"{run.cost_on('test')}."
        )


def test_records(run: DescribedRun) -> Iterator[str]:
    """Say that test records which were split off are private too.

    Nothing for a test set of its own, and for scores that noise covers.
    """
    if run.plan.facts.held_out and not run.plan.score:
        yield (
            "The test records were split off from the private ones. They are also private, and "
            "nothing that is measured on them is covered."
        )


def public_records(run: DescribedRun) -> Iterator[str]:
    """Say which facts of the records are taken as public.

    They are the numbers of records, the schema, facts that were taken from the records, and weights
    of classes and of records.
    """
    facts, counted = run.plan.facts, run.counted
    if facts.test_size:
        yield f"The numbers of training {counted} and test {run.tested} are public."
    else:
        yield f"The number of training {counted} is public. All of the records were trained on."
    if facts.schema:
        yield "Its columns were declared in a schema, which the report contains in full."
    if facts.inferred:
        yield (
            f"Its {listed(facts.inferred)} were not declared but taken from the records, and are "
            "treated as public. One record can change them, which epsilon does not cover."
        )
    if weights := class_weights(run.plan.settings):
        relative = ", ".join(f"{weight / max(weights):.4g}" for weight in weights)
        yield (
            f"Its class weights, {relative}, multiply the gradient of a record after clipping. "
            "They are treated as public: if they were computed from the labels of the records, "
            "they are facts taken from those, which epsilon does not cover."
        )
    if run.weighed:
        yield (
            f"The weights of {run.weighed}, at most 1, multiply the gradient of a record "
            "after clipping. What they use besides that record is treated as public: if it was "
            "computed from the records, it is a fact taken from those, which epsilon does not "
            "cover."
        )


def texts(run: DescribedRun) -> Iterator[str]:
    """Say what a model of texts may tell of them, besides what epsilon covers.

    A language model can repeat them; cached features of a classifier reveal them. Nothing for other
    records.
    """
    if run.continues:
        yield (
            "A language model can memorise: continue a text with words of a training record. "
            "Epsilon bounds how much more probable any continuation is because of the texts of "
            f"one {run.counted.removesuffix('s')}. It does not bound what many of them have in "
            "common, such as a name or a number that stands in the notes of several people, nor "
            "what the public weights knew before."
        )
    elif run.encoder is not None:
        yield (
            "Predictions and cached features reveal texts: the features of a text are a function "
            "of that text alone, without noise, from which much of it can be reconstructed. "
            "Epsilon covers the model, not what it answers about a text, nor the folder of "
            "features (dpmac cache)."
        )


# Searches, and histograms of training records.


def search(run: DescribedRun) -> Iterator[str]:
    """Say how settings were searched for, and that epsilon covers it; nothing without a search."""
    of_run = run.plan.search
    if of_run is None:
        return
    one = format_epsilon(of_run.trial_epsilon(run.plan.settings.delta))
    yield (
        "This model is the best of a random number K of trials. K was drawn in secret before the "
        "start, from P(K = k) proportional to w^k / k for k from 1 to "
        f"{of_run.trials.most}, with mean {of_run.trials.mean:g}. Each trial drew its settings at "
        "random and independently, and the best covered score won. The other trials, their scores "
        "and K were not shown and not kept. Epsilon covers all of this: it is not that of one "
        f"trial. One trial alone costs epsilon {one}."
    )


def calibration(run: DescribedRun) -> Iterator[str]:
    """Say which histogram probabilities follow from; nothing if none was released."""
    if run.released.get("calibration"):
        yield (
            f"After the last step, one histogram of the training {run.counted} was released with "
            "Gaussian noise, in which each counts at most once. Probabilities follow from it, and "
            "no decision does."
        )
        yield from _sampled(run)


#: Records of the last class times epsilon below which a sensitivity is uncertain.
ENOUGH = 2500


def operating_point(
    point: OperatingPoint, calibration: Calibration | None, names: Sequence[str], epsilon: float
) -> str:
    """Return what decides between two classes, and how well by the noisy histogram.

    It depends on the epsilon beside which sentences stand, so it is none of :data:`TOPICS`.

    Args:
        point: the point in use.
        calibration: what it follows from; None for a probability without one.
        names: names of the two classes.
        epsilon: that of the run, which says how many records are enough for a sensitivity.
    """
    statement = (
        f"It says {names[1]} above a probability of {point.probability(calibration):.3f} "
        f"(--threshold {point.asked})."
    )
    if calibration is None:
        return statement
    sensitivity, specificity = point.rates(calibration)
    low, high = point.interval(calibration)
    share = share_of_last(calibration)
    ends = interval_of_share(calibration)
    if share <= 0.5:
        ends = (1 - ends[1], 1 - ends[0])
    statement += (
        f" By the noisy histogram of the training records, its sensitivity is {sensitivity:.1%} "
        f"({low:.1%} to {high:.1%}, because of the noise) and its specificity {specificity:.1%}; "
        f"about {max(share, 1 - share):.1%} of the records are {names[share > 0.5]} "
        f"({ends[0]:.1%} to {ends[1]:.1%}, because of the noise)."
    )
    few = records_of_last(calibration) * epsilon < ENOUGH
    if few and SENSITIVITY.fullmatch(point.asked):
        statement += (
            f" There are few records of {names[1]} for a sensitivity at this epsilon: from about "
            f"{ENOUGH / epsilon:,.0f} on, it is met within 5 points."
        )
    return statement


def residuals(run: DescribedRun) -> Iterator[str]:
    """Say which histogram intervals of numbers follow from; nothing if none was released."""
    if run.released.get("residuals"):
        yield (
            "After the last step, one histogram of the residuals of the training "
            f"{run.counted} was released with Gaussian noise, in which each counts at most once. "
            "Intervals of predictions follow from it. Their share of the targets is that of all "
            "records, not of each kind."
        )
        yield from _sampled(run)


def _sampled(run: DescribedRun) -> Iterator[str]:
    """Say that a histogram after training is of a sample of the records, where it is."""
    if run.plan.histogram is not None and run.plan.histogram.sampling_rate < 1:
        yield "It is of a random sample of them, and its counts are estimates of those of all."


def ranges(run: DescribedRun) -> Iterator[str]:
    """Say what ranges of columns and of the number to predict follow from.

    Noisy counts, or, without privacy, the exact records. Nothing if all ranges were declared.
    """
    task, counted = run.plan.facts.task, run.counted
    if not run.released.get("ranges"):
        return
    if not run.plan.private:
        yield f"Ranges and ranks that were not declared are exact facts of the training {counted}."
        return
    yield (
        "Before the first step, ranges and ranks of columns of numbers were found by three rounds "
        f"of histograms of the training {counted} with Gaussian noise, in which each counts "
        "at most once in a column. Epsilon covers them."
    )
    if run.plan.counts_target and isinstance(task, Regression):
        yield (
            f"Before the first step, the range of {task.name} was found by three rounds "
            "of such histograms, and narrowed by its mean and spread, which were released with "
            "Gaussian noise. Epsilon covers them."
        )


#: On a run that ended before its plan, filled with what the plan costs, and on one of several
#: parts: epsilon is for steps that were fixed beforehand.
ENDED = (
    "It ended before its last planned step. If that was decided after results of it were seen, the "
    "privacy cost is that of all planned steps: {}."
)
CONTINUED = (
    "It was trained in several parts. If the length or settings of one were chosen after results "
    "of earlier ones were seen, their costs compose adaptively and epsilon is higher than stated: "
    "Account.create(..., adaptive=True) counts trainings for which that is allowed."
)
#: On a run that is booked in a budget with others; filled with what all of them cost.
BOOKED = (
    "Not covered by the epsilon of this run: it is one of several on the same records that a "
    "budget counts. When it ended, all of them together cost {}. That is the privacy cost to "
    "publish if this model or its settings were chosen by the others. It holds if the records of "
    "each were chosen without regard to other records. Runs outside of the budget cost more."
)

# Answers after NIST SP 800-226 and "How to DP-fy ML".


def mechanism(run: DescribedRun) -> Iterator[str]:
    """Say what is released in each step: the region of clipping, and the Gaussian mechanism."""
    region = "an ellipsoid that was computed from earlier noisy sums"
    if isinstance(run.plan.optimizer, InBall):
        region = f"a ball of radius {run.plan.optimizer.clip_norm:g}"
    yield (
        f"In each step the gradients of a random batch are clipped to {region}, one unit of "
        "privacy at a time, and the Gaussian mechanism releases their sum."
    )


def tuning(run: DescribedRun) -> Iterator[str]:
    """Say whether epsilon covers the choice of settings: only of a search that dpmac ran.

    Of a run that is booked in a budget with others, say what all of them cost; of one that ended
    before its plan or was continued, what that costs if it was decided by results.
    """
    budget = run.booked_with
    if budget is not None:
        together = statements.cost_in_words(budget.epsilon, budget.delta)
        yield BOOKED.format(together)
        yield from budget.on_choices
    elif run.plan.search:
        yield (
            "Covered: epsilon includes the search for these settings, of which this model is the "
            "result. Other runs on the same records cost more."
        )
    else:
        yield (
            "Unknown to this run: epsilon covers this run only. If its settings were chosen by "
            "other runs on the same records, the total privacy cost is higher."
        )
    account = run.spent
    if account.remaining:
        planned = account.cost(account.all_planned)
        yield ENDED.format(statements.cost_in_words(planned, account.delta))
    if account.before:
        yield CONTINUED


def data_domain(run: DescribedRun) -> Iterator[str]:
    """Say of which kind a record is, and what is predicted for it."""
    facts = run.plan.facts
    if run.continues:
        yield f"Unlabelled {facts.records.described}. It predicts the next token."
    else:
        yield f"Labelled {facts.records.described}, {facts.task.described}."


def audit(run: DescribedRun) -> Iterator[str]:
    """Say how the guarantee can be tested: by the crafted records of this run, or of another."""
    if canaries := run.plan.settings.canaries:
        yield (
            f"This run has {canaries} crafted records, all of which count in the sampling rate: "
            "dpmac eval RUN --audit compares what they reveal with the guarantee."
        )
    else:
        yield (
            "This run was not audited. dpmac train --canaries N audits another run with the same "
            "settings. How dpmac is tested and attacked is in docs/audits.md of its repository."
        )


def not_covered(run: DescribedRun) -> Iterator[str]:
    """List what epsilon does not cover, item by item; everything, without privacy."""
    if not run.plan.private:
        yield "Everything: this is a baseline. Do not publish it if the training records matter."
        return
    yield (
        "Other runs on the same records: any further hyperparameter search, a comparison, the "
        "best of several. Each adds to the privacy cost of this one."
    )
    if run.units:
        yield (
            "A person with two units as a whole, and what several units have in common, such as "
            "relatives."
        )
    else:
        yield (
            "A person with several records as a whole: each record is protected by itself "
            "(`--unit` protects all of a person's)."
        )
    yield (
        "What holds for people in general: if smokers fall ill more often, the model may say so, "
        "and it applies to a smoker whether or not their record was used."
    )
    if run.plan.facts.test_size and not run.plan.score:
        yield (
            f"The test records. The {run.plan.facts.task.headline.title} was measured on them "
            "without noise. If settings, steps or this model were chosen by it, it is better than "
            "on other records, and the choice reveals information about the test records."
        )
    yield "Times in `report.json` and `metrics.jsonl`: they are measured, without noise."
    yield "Attackers who can observe the machine during training."


#: Topics of a report in their order.
IN_ORDER: Sequence[Callable[[DescribedRun], Iterator[str]]] = (
    *(audit_run, seeds, randomness, covered_scores, test_records, public_records, texts),
    *(features, public, search, calibration, ranges, residuals),
    *(mechanism, tuning, data_domain, audit, not_covered),
)
TOPICS: Mapping[str, Callable[[DescribedRun], Iterator[str]]] = {
    topic.__name__: topic for topic in IN_ORDER
}
#: Topics that are lists, and those that a run without privacy has, too: what they say holds there.
LISTS = ("public", "not_covered")
WITHOUT_PRIVACY = (
    *("audit_run", "seeds", "randomness", "covered_scores", "test_records", "public_records"),
    *("texts", "features", "search", "calibration", "ranges", "residuals", "not_covered"),
)


def sentences_of(run: DescribedRun) -> dict[str, str | tuple[str, ...]]:
    """Return what holds for a run, by topic.

    Args:
        run: the run after its last step.

    Returns:
        Texts by the names in TOPICS: one text for most, whose sentences are joined by spaces, and a
        tuple of several for those in LISTS. Topics that do not apply are absent.
    """
    by_topic: dict[str, str | tuple[str, ...]] = {}
    for name, topic in TOPICS.items():
        if not run.plan.private and name not in WITHOUT_PRIVACY:
            continue
        sentences = tuple(topic(run))
        if sentences:
            by_topic[name] = sentences if name in LISTS else " ".join(sentences)
    return by_topic
