"""Trainer of a run: the steps on its training records, and the scores of its test records."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import places_of
from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.dp.losses import Loss, check_loss
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.weights import Weigh
from dpmac_cli.errors import InputError
from dpmac_cli.features.tables import TableInputs
from dpmac_cli.models.dataset import Data
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler, RandomPlaces
from dpmac_cli.runs.prepare import PreparedRun
from dpmac_cli.runs.uncounted import Uncounted
from dpmac_cli.tasks.operating_point import needs_histogram
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.calibration import training_histogram
from dpmac_cli.training.carried_accounts import attach
from dpmac_cli.training.data_sum import DataSum
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.evaluation import Evaluation, evaluate
from dpmac_cli.training.private_scores import PrivateScore, release_score
from dpmac_cli.training.step import Step, mechanism_of


class Trainer(Step):
    """Steps on the records of a dataset, and the scores of its test records.

    :func:`make_trainer` makes it. The order of calls is :meth:`count`, :meth:`step` for each step,
    :meth:`calibrate` after the last one, and :meth:`score`; those that have nothing to do return at
    once.

    Attributes:
        sums: clipped sum over training records.
        covered: event and noise of the covered score, and random numbers of the network's layers in
            it; None for exact scores.
        uncounted: records that are counted before the first step, and the noise of the counts; None
            if nothing is counted, or it was.
        counted: event of the histogram of the training records, its noise, the key that says which
            records are drawn for it, and random numbers of the network's layers; None without.
        histogram: that histogram, once it was released; None before, and without.
    """

    sums: DataSum
    covered: tuple[TrainingEvent, Noise, LayerDraws] | None = None
    uncounted: tuple[Uncounted, Noise] | None = None
    _inputs: TableInputs | None = None
    counted: tuple[TrainingEvent, Noise, bytes, LayerDraws] | None = None
    histogram: NoisyHistogram | None = None

    @property
    def data(self) -> Data:
        """Return the dataset. Before :meth:`count`, it may have the shapes of its inputs alone."""
        return self.sums.data

    @property
    def task(self) -> Task:
        """Return the task, calibrated and at its operating point once the histogram is there."""
        task, histogram, threshold = self.data.task, self.histogram, self.plan.settings.threshold
        if histogram is not None:
            task = task.calibrated(histogram.counts[0], histogram.noise, self.data.train.size)
        if threshold is None:
            return task
        if histogram is None and needs_histogram(threshold):
            return task
        return task.at(threshold)

    def step(self) -> None:
        """Take a step, the first one after what is counted before it.

        For errors see :meth:`.Step.step`.
        """
        self.count()
        super().step()

    def will_release(self, keys: Keys) -> None:
        """Plan the covered score and the histogram of the run, if it has them.

        Args:
            keys: keys, of which each needs some of its own.
        """
        if self.plan.score is not None:
            noise, layers = Noise(keys.scores, secure=True), LayerDraws(keys.score_layers)
            self.covered = self.plan.score, noise, layers
        if self.account.histogram is not None:
            noise, layers = Noise(keys.counts, secure=True), LayerDraws(keys.count_layers)
            self.counted = self.account.histogram, noise, keys.counted, layers

    def will_count(self, records: Uncounted | None, keys: Keys) -> None:
        """Plan to count records before the first step. Nothing is counted yet.

        Args:
            records: the records; None if nothing is counted.
            keys: keys, of which the noise of the counts needs one of its own.
        """
        if records is not None:
            self.uncounted = records, Noise(keys.ranges, secure=True)
            self._inputs = records.inputs

    def count(self) -> bool:
        """Find ranges by noisy counts of the training records, if there are any to find.

        Their events begin in the account before records are read. Until then there are no records
        to train on.

        Returns:
            Whether they were found by this call: once, before the first step.

        Raises:
            BudgetError: the budget of the account does not allow the counts.
        """
        if self.uncounted is None:
            return False
        records, noise = self.uncounted
        self.sums.data = records.counted(noise.at(0), self.account.begin)
        self.uncounted = None
        return True

    @property
    def ranges(self) -> dict[str, Tensor]:
        """Return the ranges and ranks that were counted, by name; {} if there are none.

        Names are those of the network, and :data:`TARGET`. They are computed after noise, and part
        of every checkpoint.
        """
        if self.uncounted is not None or self._inputs is None:
            return {}
        tensors = dict(self._inputs.state_dict())
        task = self.data.task
        if self.plan.counts_target and isinstance(task, Regression):
            tensors[TARGET] = torch.tensor([task.low, task.high], dtype=torch.float64)
        return tensors

    def restore_ranges(self, ranges: Mapping[str, Tensor]) -> None:
        """Take ranges that were counted and paid for before, so that nothing is counted again.

        Args:
            ranges: ranges of a checkpoint, as in :attr:`ranges`. With {}, nothing happens.
        """
        if self.uncounted is None or not ranges:
            return
        records, _ = self.uncounted
        of_columns, task = dict(ranges), records.data.task
        target = of_columns.pop(TARGET, None)
        if target is not None and isinstance(task, Regression):
            low, high = target.tolist()
            task = replace(task, low=low, high=high)
        records.inputs.load_state_dict(of_columns)
        self.sums.data = records.prepared(task)
        self.uncounted = None

    @contextmanager
    def published(self) -> Iterator[nn.Module]:
        """Use averaged parameters within a context, as for scoring and publishing.

        Without averages, those of the last step are used.

        Yields:
            The whole network. After the context it has the last parameters again.
        """
        theta, average = self.state.theta, self.state.average
        if average is None:
            yield self.model
            return
        last = theta.clone()
        theta.copy_(average)
        try:
            yield self.model
        finally:
            theta.copy_(last)

    def evaluate(self, *, covered: LayerDraws | None = None) -> Evaluation:
        """Score the published model on every test record, without noise.

        Args:
            covered: random numbers of the network's layers, if the records are covered by epsilon:
                then none may change how another is rounded. The scores themselves are exact: only
                what is released of them is noisy.

        Raises:
            InputError: there are no test records.
        """
        with self.published() as model, full_float32(self.sums.arithmetic):
            data = replace(self.data, task=self.task)
            return evaluate(model, data, data.tested, covered=covered)

    def calibrate(self) -> bool:
        """Release the histogram of the training records after the last step, if one is planned.

        It is released once, under the weights that are published.

        Returns:
            Whether this call released it. False before the last step, and after it was released.

        Raises:
            BudgetError: the budget of the account does not allow it.
        """
        if self.counted is None or self.histogram is not None or self.state.step < self.steps:
            return False
        event, noise, key, layers = self.counted
        self.account.begin(event)  # before any training record is read
        with self.published() as model, full_float32(self.sums.arithmetic):
            normals = noise.at(self.state.step)
            self.histogram = training_histogram(model, self.data, event, normals, key, layers)
        return True

    def score(self) -> Evaluation | PrivateScore | None:
        """Return the scores to report: exact ones, or for covered test records a noisy one.

        A covered score is released after the last step alone; before, its share is NaN.

        Returns:
            The scores; None if there are no test records.

        Raises:
            ValueError: a covered score was released before.
        """
        if self.data.test is None:
            return None
        if self.covered is None:
            return self.evaluate()
        (event, noise, layers), step = self.covered, self.state.step
        if step < self.steps:
            return PrivateScore(self.data.task, math.nan, self.data.test.size)
        self.account.begin(event)  # before any test record is read
        result = self.evaluate(covered=layers)
        return release_score(result, event, noise.at(step))


#: Name of the range of the target among those of columns.
TARGET = "target"


def make_trainer(
    plan: Plan,
    task: PreparedRun,
    keys: Keys,
    account: Account,
    *,
    ranks: Ranks | None = None,
    loss: Loss | None = None,
    weigh: Weigh | None = None,
) -> Trainer:
    """Return the trainer of a run, ready for its first step.

    Args:
        plan: plan of the run.
        task: result of :func:`~dpmac_cli.runs.prepare.prepare`, whose network is trained in place.
        keys: secret keys. Ranks other than the first only use the key of the layers.
        account: counts the steps, of which it plans the last one, and is carried by the network.
        ranks: the processes of the run.
        loss: loss of one output, shape (1, classes), and its label, instead of the plan's. It runs
            on each sample separately.
        weigh: weights of records, instead of the plan's.

    Raises:
        InputError: the data cannot be used.
        ModelError: the network or the loss cannot be clipped.
    """
    device = task.data.gain.device
    _check_size(plan, task.data)
    if loss is not None and not plan.settings.isolate:
        outputs, labels = map(torch.from_numpy, plan.facts.task.examples())
        check_loss(loss, outputs.to(device), labels.to(device))
    settings, ranks = plan.settings, ranks or Ranks()
    count = places_of(plan.event, plan.places, ranks.size)
    places = RandomPlaces(keys.layers, count, ranks.rank)
    # Built-in networks use no random numbers in their forward pass; others may.
    drawn = task.user_supplied or settings.augment is not None or plan.facts.unit
    layers = LayerDraws(keys.layers, ranks.rank) if drawn else None
    with full_float32():
        sums = DataSum(
            task.trained, task.data, plan, settings.batch_size, layers, places, loss, weigh
        )
        sampler = _sampler(plan, keys, task.data.train.size) if ranks.leads else None
        noise = Noise(keys.noise, secure=settings.secure) if ranks.leads else None
        trainer = Trainer(
            sums,
            plan=plan,
            steps=account.end,
            mechanism=mechanism_of(plan),
            sampler=sampler,
            noise=noise,
            account=account,
            ranks=ranks,
        )
    attach(task.model, account)
    if ranks.leads:
        trainer.will_release(keys)
    trainer.will_count(task.uncounted, keys)
    return trainer


def _check_size(plan: Plan, data: Data) -> None:
    """Reject data whose number of records differs from that of sampling rate and epsilon.

    Each crafted record of an audit has a place, and those that are in are among the records.
    """
    facts, (train, test) = plan.facts, data.sizes
    places = added = 0
    if data.crafted is not None:
        places, added = len(data.crafted.coins), int(data.crafted.coins.sum())
    expected = (plan.settings.canaries or 0, facts.train_size + added)
    tested_otherwise = plan.settings.cover_scores and test != facts.test_size
    if (places, train) != expected or tested_otherwise:
        raise InputError(
            f"data has {train:,} training and {test:,} test records or units, but epsilon was "
            f"computed for the {facts.train_size:,} and {facts.test_size:,} of "
            f"{facts.name}. Use the dataset with its units, or save your records as an "
            ".npz and use that."
        )


def _sampler(plan: Plan, keys: Keys, size: int) -> KeyedSampler:
    """Return the sampler of a run.

    Args:
        plan: plan of the run, whose rate and steps the sampler has.
        keys: keys, of which it needs one of its own.
        size: number of records or units, with the places of an audit that are in.
    """
    return KeyedSampler(
        plan.event,
        size=size,
        key=keys.sampler,
        secure=plan.settings.secure,
        base=keys.base,
    )
