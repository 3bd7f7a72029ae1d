"""Plan of a training run: settings resolved to plain values, in parts by who needs them."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.selection import Search
from dpmac_cli.accounting.statements import COVERED_RECORD, COVERED_UNIT, RECORD, UNIT
from dpmac_cli.config.settings import DATA, SETTINGS, Settings
from dpmac_cli.data.registry import Dataset
from dpmac_cli.data.schema import DataFacts, Source
from dpmac_cli.data.tokens import TextReader
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import (
    Backbone,
    BuiltIn,
    Features,
    Trained,
    UserModel,
    parse_model,
)
from dpmac_cli.optim import Optimizer
from dpmac_cli.training.schedules import Recipe

if TYPE_CHECKING:
    from dpmac_cli.data.table_schema import TableSchema


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Dataset of a run: where its records are, how to read them, and facts of them.

    Attributes:
        dataset: name as typed.
        source: a registered name, or your own dataset and how to read it.
        found: facts of the records, read once.
        folder: folder of registered datasets.
    """

    dataset: str
    source: str | Source
    found: DataFacts
    folder: Path

    @property
    def facts(self) -> Dataset:
        """Public facts of the dataset."""
        return self.found.facts

    @property
    def own(self) -> bool:
        """Return whether it is your own dataset instead of a registered one."""
        return isinstance(self.source, Source)

    @property
    def schema(self) -> "TableSchema | None":
        """Return the declared schema of its table; None for other data."""
        return self.source.schema if isinstance(self.source, Source) else None

    @property
    def reader(self) -> TextReader | None:
        """Return how its texts are read; None if there are none."""
        return self.source.texts if isinstance(self.source, Source) else None


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """Network of a run, and what it starts from.

    Attributes:
        fix_norm: whether batch norms of a user-supplied network are replaced.
        isolate: whether the network runs on each sample alone even if proven independent.
        features: features that the network takes instead of images; None for images.
        pretrained: file of public weights to start from; None for random weights or a backbone's.
        trained: trained part of the network.
    """

    model: BuiltIn | UserModel
    fix_norm: bool
    isolate: bool
    features: Features | None
    pretrained: Path | None
    trained: Trained

    @property
    def starts_public(self) -> bool:
        """Return whether the network starts from public weights."""
        return self.pretrained is not None or isinstance(self.features, Backbone | TextEncoder)

    @property
    def head_only(self) -> bool:
        """Return whether only the last linear layer of a network on images is trained."""
        return self.trained.part == "head" and self.features is None


#: With fewer guesses, even if all are right, an audit cannot show an epsilon above 1.8.
FEW_GUESSES = 20


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Privacy of a run: what its epsilon is computed from.

    Attributes:
        private: whether gradients are clipped and noise is added.
        event: accounting event of the whole run; its noise is 0 without privacy.
        batch_size: expected batch size B.
        max_epsilon: epsilon to stop before; infinite for no limit.
        unit: unit of privacy, in words.
        score: event of the test score, which covers the test records; None for exact scores.
        canaries: number of canaries of an audit; 0 without one.
        target: epsilon that the noise was calibrated for; None if the noise was given.
    """

    private: bool
    event: TrainingEvent
    batch_size: int
    delta: float
    max_epsilon: float
    unit: str
    score: TrainingEvent | None
    canaries: int
    target: float | None = None

    @property
    def guesses(self) -> int:
        """Return the number of canaries that the attack guesses, half of them in, half out."""
        return max(self.canaries // 10, min(self.canaries, FEW_GUESSES))

    @property
    def sigma(self) -> float:
        """Noise multiplier; 0 without privacy."""
        return self.event.noise_multiplier

    @property
    def steps(self) -> int:
        """T."""
        return self.event.steps

    @property
    def steps_per_epoch(self) -> int:
        """ceil(n/B)."""
        return self.event.steps_per_epoch

    def event_of(self, steps: int) -> TrainingEvent:
        """Return the accounting event of the first ``steps`` steps."""
        return replace(self.event, steps=steps)


@dataclass(frozen=True)
class CheckpointInterval:
    """Steps and seconds between checkpoints; 0 and infinite for no limit.

    Attributes:
        share: largest fraction of the time that may be spent on checkpoints that are due by their
            steps.
    """

    steps: int
    seconds: float
    share: float = math.inf

    def at(self, step: int) -> bool:
        """Return whether a checkpoint is due by its step."""
        return self.steps > 0 and step % self.steps == 0

    def due(self, step: int, seconds: float, cost: float) -> bool:
        """Return whether a checkpoint, which takes ``cost`` seconds, is due at a step.

        ``seconds`` have passed since the last one.
        """
        return seconds >= self.seconds or (self.at(step) and cost <= self.share * seconds)


@dataclass(frozen=True)
class SearchPlan:
    """Search that a run is one trial of.

    Attributes:
        search: number of trials and candidates, from which its privacy cost follows.
        space: settings that were drawn, as typed.
    """

    search: Search
    space: tuple[str, ...]


#: Settings that do not describe a run, which config.yaml does not have.
NOT_RECORDED = (
    *("seed", "data_dir", "checkpoint_every", "out"),
    *("force", "json", "quiet", "debug"),
)


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Complete plan of a run. Nothing is looked up again on disk or in a registry.

    Attributes:
        settings: completed settings, with the noise that was calibrated.
        recipe: training settings besides the optimizer.
        gpu_batch: number of samples to process at a time on a GPU; it differs from the physical
            batch only if that was not given.
        device: as typed, or the one that it is trained on.
        search: search that the run is one trial of; None if it is a run by itself.
    """

    settings: Settings
    data: DataPlan
    network: NetworkPlan
    privacy: PrivacyPlan
    optimizer: Optimizer
    recipe: Recipe
    gpu_batch: int
    device: str
    checkpoints: CheckpointInterval
    search: SearchPlan | None = None

    def physical_batch_on(self, device: str) -> int:
        """Return the number of samples to process at a time on a type of device, such as "cuda"."""
        return self.gpu_batch if device == "cuda" else self.settings.physical_batch

    @property
    def recorded(self) -> dict[str, Any]:
        """Settings that describe the run, which config.yaml and checkpoints keep.

        Those of a dataset are among them if it is your own.
        """
        kept: dict[str, Any] = {
            name: value
            for name, option in SETTINGS.items()
            if (value := getattr(self.settings, name)) is not None
            and name not in NOT_RECORDED
            and (self.data.own or option.group != DATA)
        }
        if not isinstance(parse_model(self.settings.model), UserModel):
            kept.pop("fix_norm")
        if self.gpu_batch != self.settings.physical_batch:  # not given: the device decides
            kept.pop("physical_batch")
        if not self.data.facts.standardised:
            kept.pop("standardise")
        return kept

    @property
    def stem(self) -> str:
        """Beginning of the name of a new folder in runs/, before its number."""
        no_dp = "" if self.privacy.private else "-no-dp"
        return f"{self.data.found.name}-{self.optimizer.name}{no_dp}"

    @property
    def timed(self) -> bool:
        """Return whether measured times are published.

        Those of a trial are not: the first trial of a process is slower than the others.
        """
        return self.search is None

    def on(self, device: str) -> "TrainPlan":
        """Return the plan of the same run on another device."""
        return replace(self, device=device)

    def placed(self, folder: Path, *, force: bool = False) -> "TrainPlan":
        """Return the plan of the same run in another folder, where ``force`` replaces a run."""
        return replace(self, settings=self.settings.replace(out=folder, force=force))


def unit_of_privacy(found: DataFacts, *, covered: bool) -> str:
    """Return the unit of privacy in words; ``covered`` if test records are protected too."""
    if covered:
        return COVERED_UNIT if found.unit else COVERED_RECORD
    return UNIT if found.unit else RECORD
