"""Records of a table before their first step: ranges that are not declared follow from counts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.plan import Plan
from dpmac_cli.features.counts import (
    ROUNDS,
    Distribution,
    Floats,
    distributions,
    exact_distributions,
)
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.features.stored import featured
from dpmac_cli.features.tables import TableInputs
from dpmac_cli.features.targets import target_moments, target_range
from dpmac_cli.files import cache_folder
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task

#: Numbers to predict that are further from their mean than this many deviations are clipped, and
#: the least deviation, as a part of the numbers.
FAR, FLAT = 4.0, 1e-4


@dataclass(frozen=True)
class Uncounted:
    """Rows of a table, some ranges of which will follow from noisy counts of them.

    Attributes:
        network: the whole network, whose inputs need the ranges.
        data: the rows.
        plan: plan of the run, which has the events.
        cache: folder of the inputs while they are computed.
    """

    network: FrozenFeatures
    data: Data
    plan: Plan
    cache: Path = field(default_factory=cache_folder)

    @property
    def inputs(self) -> TableInputs:
        """Return the frozen part of the network, which makes inputs of rows by the ranges."""
        inputs = self.network.frozen
        assert isinstance(inputs, TableInputs)  # noqa: S101  (nothing else counts)
        return inputs

    @property
    def shapes(self) -> Data:
        """Return data with the shapes of the inputs, which no record is in: zeros for each row."""
        records, features = self.plan.facts.records, self.plan.features
        assert features is not None  # noqa: S101  (a table has them)
        zeros = torch.zeros(features.shape_of(records), device=self.data.gain.device)
        splits = list[Split]()
        for split in self.data.splits:
            splits.append(replace(split, images=zeros.expand(len(split), *zeros.shape)))
        return self.data.replaced_by(splits)

    def counted(self, noise: SeededNormals, begin: Callable[[TrainingEvent], None]) -> Data:
        """Find ranges by noisy counts of the training records, and return the inputs of all rows.

        Without privacy the ranges are exact. Test records are never counted.

        Args:
            noise: fresh random numbers, used only here.
            begin: called with each event before records are read for it. What it raises ends the
                count.
        """
        split, task, events = self.data.train, self.data.task, iter(self.plan.ranges)

        def distributions_of(values: Floats) -> tuple[Distribution, ...]:
            if not self.plan.private:
                return exact_distributions(values)
            rounds = list(islice(events, ROUNDS))
            return distributions(values, rounds, noise, begin, split.owners, split.size)

        if self.inputs.counted:
            numbers = self.inputs.values(self.data.standardised(split.images))
            self.inputs.adopt(distributions_of(numbers.cpu().numpy()))
        if self.plan.counts_target and isinstance(task, Regression):
            targets = task.unscaled(split.labels.cpu().numpy())
            [distribution] = distributions_of(targets)
            low, high = target_range(distribution)
            task = self._narrowed(task.within(low, high), targets[:, 0], events, noise, begin)
        return self.prepared(task)

    def prepared(self, task: Task) -> Data:
        """Return the inputs of all rows under the ranges that the network has now.

        They are not kept: no other run has these ranges, and files in the cache would tell how many
        trials a search had, which is secret.

        Args:
            task: the task, whose targets the data gets.
        """
        self.network.separate = True
        known = self.data.predicting(task)
        settings = settings_of_features(self.plan)
        return featured(self.network, known, settings, self.cache, keep=False)

    def _narrowed(
        self,
        task: Regression,
        targets: Floats,
        events: Iterable[TrainingEvent],
        noise: SeededNormals,
        begin: Callable[[TrainingEvent], None],
    ) -> Task:
        """Return a task in the part of its range that is not far from the mean of its targets.

        Args:
            task: numbers to predict, in the range that counts found.
            targets: the numbers on the scale of the ends of that range, shape (records,).
            events: the event of their mean and deviation; empty without privacy.
            noise, begin: see :meth:`counted`.
        """
        split = self.data.train
        low, high = task.ends
        if self.plan.private:
            [event] = events
            mean, spread = target_moments(
                targets, low, high, event, noise, begin, split.owners, split.size
            )
        else:
            mean, spread = float(targets.mean()), float(targets.std())
        far = FAR * max(spread, FLAT * max(abs(low), abs(high)))
        return task.within(mean - far, mean + far)


def settings_of_features(plan: Plan) -> dict[str, object]:
    """Return the settings that cached features depend on, by name.

    With others, features are computed again.

    Args:
        plan: plan of the run.
    """
    settings = {"isolate": plan.settings.isolate, **vars(plan.trained)}
    return settings if plan.features is None else settings | plan.features.values
