"""Privacy part of a report: the guarantee, its events, and what it means. Does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dpmac_cli.accounting.events import MOST_COUNT, Count, Sampler, Steps, TrainingEvent
from dpmac_cli.accounting.risk import Attack, Share
from dpmac_cli.accounting.selection import LEAST_MEAN, MOST_MEAN, Search, Trials
from dpmac_cli.runs.headers import (
    MOST_PARTS,
    Number,
    Part,
)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters, which a terminal may interpret as commands")
    return text


def _of_training(events: tuple[TrainingEvent, ...]) -> tuple[TrainingEvent, ...]:
    """Return events, one of which is of training. Raises ValueError for others."""
    if not any(event.trains for event in events):
        raise ValueError("has no event of training")
    return events


Events = Annotated[
    tuple[TrainingEvent, ...],
    Field(min_length=1, max_length=MOST_PARTS),
    AfterValidator(_of_training),
]
PrintableText = Annotated[str, AfterValidator(_printable)]


class Said(Part):
    """A statement in words."""

    statement: str
    """What that means, in sentences."""


class SearchResult(Said):
    """A search that the run is the best trial of."""

    mean_trials: Annotated[float, Field(ge=LEAST_MEAN, le=MOST_MEAN)]
    """Mean of the secret number K of trials."""
    most_trials: Count
    """Largest number of trials."""
    epsilon_of_a_trial: Number | None
    """Epsilon of one trial alone, with its covered score. Null if infinite."""
    space: tuple[str, ...]
    """Settings that were drawn at random for each trial, as typed."""
    candidates: Annotated[tuple[Events, ...], Field(min_length=1)]
    """What a trial may do to the records, by its settings: steps, and a covered score. Epsilon can
    be recomputed from these, the number of trials and delta."""

    @property
    def search(self) -> Search:
        """Return the number of trials and the candidates."""
        return Search(Trials(self.mean_trials, self.most_trials), self.candidates)


class Unit(Part):
    """Unit of privacy: what the guarantee protects as a whole."""

    name: PrintableText
    """The unit in words."""
    told_by: PrintableText | None
    """Column, pattern of paths or array that says which unit a record belongs to. Null if each
    record is a unit."""
    records_in_a_step: Count
    """K, number of records that a step takes of each sampled unit."""


class CoveredScores(Said):
    """Test scores released with noise (--cover-scores), which protect the test records."""

    released: Steps
    """Number of scores."""
    noise_multiplier: Number | None
    """Standard deviation of the noise in the count of correct units, which has sensitivity 1. Null
    if parts differ, and without scores."""
    epsilon: Number | None
    """Privacy cost of the scores for a unit that is tested on."""
    epsilon_of_training: Number | None
    """Privacy cost for a unit that is trained on. The run's epsilon is the larger of the two."""


class EpsilonAtDelta(Part):
    """Epsilon at one delta."""

    delta: Share
    """Delta."""
    epsilon: Number | None
    """Upper bound on epsilon. Null if there is none."""


class RiskBounds(Said):
    """Upper bounds on what an attacker who sees everything that the run releases can learn."""

    priors: tuple[Share, ...]
    """Prior probabilities that the record was trained on."""
    attacks: tuple[Attack, ...]
    """Bounds on membership attacks."""
    gaussian_mu: Number | None
    """The smallest mu such that the trade-off curve is above that of mu-Gaussian DP, less
    gaussian_mu_down_to_delta. Null if there is none."""
    gaussian_mu_down_to_delta: Share
    """The smallest delta that mu covers."""
    epsilons: tuple[EpsilonAtDelta, ...]
    """Epsilon at delta 1e-5, 1e-6 and 1/n^1.1."""


class SeedPolicy(Said):
    """Secrecy of the randomness."""

    given: bool
    """Whether any part used a seed that a person chose. The seed itself is not in the report."""


class Randomness(Said):
    """Generation of noise and batches."""

    secure: bool
    """Whether every part ran with --secure."""


class Computed(Part):
    """A value that the run computes from its records."""

    what: str
    """The value in words."""
    status: str
    """protected by epsilon; declared public, or published with the data set; not covered by
    epsilon; or secret, never to be published."""


class Privacy(Said):
    """The privacy guarantee, over all parts of the run."""

    private: bool
    """False for a run with --no-dp, which has no guarantee."""
    epsilon: Number | None
    """Upper bound on epsilon at delta. Null if there is none: without noise, or at a delta that
    cannot be reached."""
    epsilon_planned: Number | None
    """Epsilon of the whole run as planned. A run that was stopped has not spent all of it. Null as
    for epsilon."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None
    """Delta of (epsilon, delta). Null without privacy."""
    noise_multiplier: Number | None
    """sigma, the ratio of the standard deviation of the noise to the clipping norm; 0 without
    privacy. Null if parts differ."""
    unit: Unit
    """Unit of privacy: what the guarantee protects as a whole."""
    sampler: Sampler
    """How batches were sampled."""
    sampling_rate: Share | None
    """q = B/n; for an audit run B/(n + K/2). Null if parts differ."""
    steps: Annotated[int, Field(ge=0, le=MOST_COUNT)]
    """Number of steps of all parts, including steps that only an earlier part took."""
    covered_scores: CoveredScores | None
    """Test scores released with noise (--cover-scores), which protect the test records. Null where
    scores are exact."""
    search: SearchResult | None
    """Search that the run is the best trial of (dpmac tune). Epsilon covers all of it. Null if
    settings were not searched for."""
    events: Events
    """What each part did to the records, in order; steps of the published model are the last steps.
    Epsilon can be recomputed from these and delta (dpmac account RUN)."""
    adjacency: Literal["add-or-remove-one"] | None
    """Which datasets are neighbours. Values of epsilon under different adjacencies are not
    comparable. Null without privacy."""
    accountant: str | None
    """Accountant that computed epsilon, and its version. Null without privacy."""
    risk: RiskBounds | None
    """Upper bounds on what an attacker who sees everything that the run releases can learn about
    one record (docs/accounting.md). Null without privacy."""
    computed_from_records: tuple[Computed, ...] | None
    """Everything that the run computes from its records. Null without privacy."""
    not_covered: tuple[str, ...]
    """What epsilon does not cover, in sentences."""
    seed_policy: SeedPolicy
    """Whether the randomness can be secret."""
    randomness: Randomness
    """How noise and batches were generated."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        noisy = all(event.noise_multiplier for event in self.events)
        if not noisy == self.private == (self.delta is not None):
            raise ValueError("private and delta contradict the noise of the events")
        if not self.private and self.epsilon is not None:
            raise ValueError("an epsilon without noise")
        if self.search is not None and self.events not in self.search.candidates:
            raise ValueError("the events are not those of a trial of the search")
        return self

    @property
    def trials(self) -> Search | None:
        """Return the search that the run is the best trial of, if it is."""
        return None if self.search is None else self.search.search
