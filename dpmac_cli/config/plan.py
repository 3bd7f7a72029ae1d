"""Plan of a training run: settings resolved to plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.events import Scores, TrainingEvent
from dpmac_cli.accounting.statements import COVERED_RECORD, COVERED_UNIT, RECORD, UNIT
from dpmac_cli.config.settings import Complete
from dpmac_cli.data.registry import Dataset
from dpmac_cli.data.schema import Found, Source
from dpmac_cli.dp.optimizers import OPTIMIZERS, Hyperparameters, Optimizer
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.registry import Backbone, BuiltIn, Features, Trained, UserModel
from dpmac_cli.training.schedules import Recipe


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Complete plan of a run. Nothing is looked up again on disk or in a registry.

    Attributes:
        dataset: name as typed. data: a registered name, or the source of your own dataset.
        found: facts of the records when the run was configured.
        fix_norm: whether batch norms of a user-supplied network are replaced.
        isolate: whether the network runs on each sample alone even if proven independent.
        features: features that the network takes instead of images; None for images.
        pretrained: file of public weights to start from; None for random weights or a backbone's.
        trained: trained part of the network.
        event: accounting event of the whole run.
        target_epsilon: epsilon that the noise was calibrated for; infinite if sigma was given.
        max_epsilon: epsilon to stop before; infinite for no limit.
        secure: whether all random numbers come from a cipher.
        optimizer: a key of :data:`~dpmac_cli.dp.optimizers.OPTIMIZERS`. hyper: hyperparameters.
        recipe: training settings besides the optimizer.
        batch_size: expected batch size B. physical_batch: samples to process at a time.
        gpu_batch: the same on a GPU; it differs only if no physical batch was given.
        canaries: canaries of an audit; 0 without one. guesses: number of guesses of the attack.
        checkpoint_steps, checkpoint_seconds: between checkpoints; 0 and infinite for no limit.
        seed: seed of all random numbers; None for secret keys from the operating system.
        out: the run folder; None for the first free of runs/DATASET-OPTIMIZER-1, -2, ...
        force: whether to replace an existing run.
        scores: noise of test scores, which covers the test records; None for exact scores.
        settings: every setting, with its default.
        recorded: contents of config.yaml, by the names of the flags.
    """

    dataset: str
    data: str | Source
    found: Found
    model: BuiltIn | UserModel
    fix_norm: bool
    isolate: bool
    features: Features | None
    pretrained: Path | None
    trained: Trained
    event: TrainingEvent
    delta: float
    private: bool
    target_epsilon: float = field(compare=False)
    max_epsilon: float
    secure: bool
    optimizer: str
    hyper: Hyperparameters
    recipe: Recipe
    batch_size: int
    physical_batch: int
    gpu_batch: int
    canaries: int
    guesses: int
    device: str
    seed: int | None
    data_dir: Path
    checkpoint_steps: int
    checkpoint_seconds: float
    out: Path | None
    force: bool
    metric: str
    scores: Scores | None
    json: bool
    quiet: bool
    settings: Complete = field(compare=False, repr=False)
    recorded: Mapping[str, Any] = field(hash=False, repr=False)

    @property
    def folder(self) -> Path:
        """The run folder, if the plan has one."""
        assert isinstance(self.out, Path)  # noqa: S101
        return self.out

    @property
    def facts(self) -> Dataset:
        """Public facts of the dataset."""
        return self.found.facts

    @property
    def starts_public(self) -> bool:
        """Return whether the network starts from public weights."""
        return self.pretrained is not None or isinstance(self.features, Backbone | TextEncoder)

    @property
    def head_only(self) -> bool:
        """Return whether only the last linear layer of a network on images is trained."""
        return self.trained.part == "head" and self.features is None

    @property
    def unit(self) -> str:
        """Unit of privacy, in words."""
        if self.scores is None:
            return UNIT if self.found.unit else RECORD
        return COVERED_UNIT if self.found.unit else COVERED_RECORD

    @property
    def method(self) -> Optimizer:
        """The optimizer's row in the table."""
        return OPTIMIZERS[self.optimizer]

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
