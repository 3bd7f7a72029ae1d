"""Keys of report.json and of a model file's header, so that mypy finds misspelt ones.

A file is checked when it is read, by :mod:`dpmac_cli.release.report_file`. These are the keys that
are read of values that this program wrote itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class DatasetPart(TypedDict):
    """Dataset that a model was trained on."""

    name: str
    train_size: int
    multilabel: bool


class UnitPart(TypedDict):
    """Unit of privacy."""

    name: str
    told_by: str | None


class SeedPart(TypedDict):
    """Policy of the seed."""

    given: bool
    statement: str


class RiskPart(TypedDict):
    """Meaning of epsilon for one record."""

    statement: str


class PrivacyPart(TypedDict):
    """Privacy guarantee of a run; None where there is none, or if epsilon is infinite."""

    private: bool
    epsilon: float | None
    delta: float | None
    unit: UnitPart
    adjacency: str
    sampler: str
    covered_scores: Mapping[str, Any] | None
    risk: RiskPart
    seed_policy: SeedPart


class HyperparameterPart(TypedDict):
    """Length of a run; more by the optimizer."""

    steps: int


class TimingsPart(TypedDict):
    """Times of a run."""

    training_seconds: float


class ReportKeys(TypedDict):
    """A report."""

    state: str
    dataset: DatasetPart
    classes: Sequence[str]
    target: Mapping[str, Any] | None
    hyperparameters: HyperparameterPart
    privacy: PrivacyPart
    #: Scores of the task by the keys of its metrics, and the number of samples.
    test: Mapping[str, Any]
    timings: TimingsPart


class StudyKeys(TypedDict):
    """A compare.json."""

    schema_version: int
    dataset: str
    metric: str
    column: str
    axes: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
