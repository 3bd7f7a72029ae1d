"""Trainer of a dataset: its steps, and the scores of its test records. Prints nothing."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.optim import Optimizer
from dpmac_cli.training.canaries import Canaries
from dpmac_cli.training.chunks import DataSum
from dpmac_cli.training.descent import Descent
from dpmac_cli.training.distributed import Ranks
from dpmac_cli.training.evaluation import Evaluation, evaluate, invariant_batching
from dpmac_cli.training.private_scores import PrivateScore, release_score
from dpmac_cli.training.schedules import StepPlan
from dpmac_cli.training.state import Randomness


class Trainer(Descent):
    """Train a model on a dataset with one optimizer.

    Args:
        model: maps images to logits; its parameters are moved into one vector.
        data: data on the same device. hooks: canaries of an audit.
        ranks: the processes of the run, each of which sums its share of every batch.

    Raises:
        ModelError: layers cannot be clipped, or there are too many parameters for the mechanism.
    """

    @full_float32()
    def __init__(
        self,
        *,
        model: nn.Module,
        data: Data,
        optimizer: Optimizer,
        mechanism: GaussianMechanism,
        plan: StepPlan,
        randomness: Randomness,
        hooks: Sequence[Canaries] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.data = data
        super().__init__(
            model=model,
            sums=DataSum(model, data, plan, mechanism.expected_batch, randomness.layers),
            optimizer=optimizer,
            mechanism=mechanism,
            plan=plan,
            randomness=randomness,
            hooks=hooks,
            ranks=ranks,
        )

    @contextmanager
    def published(self) -> Iterator[nn.Module]:
        """Use averaged parameters, if there are any, as for scoring and publishing."""
        theta, average = self.state.theta, self.state.average
        if average is None:
            yield self.model
            return
        kept = theta.clone()
        theta.copy_(average)
        try:
            yield self.model
        finally:
            theta.copy_(kept)

    def evaluate(self, *, covered: bool = False) -> Evaluation:
        """Score the published model on every test record.

        If they are ``covered``, none changes how another is rounded.
        """
        with self.published() as model, full_float32(self._arithmetic):
            batching = invariant_batching(model, self.data) if covered else None
            return evaluate(model, self.data, self.data.test, batching)

    def score(self) -> Evaluation | PrivateScore:
        """Return the scores to report: exact ones, or noisy ones for covered test records.

        Raises ValueError if the scores of this step were released before.
        """
        scores, step = self.plan.scores, self.state.step
        if scores is None:
            return self.evaluate()
        if not scores.due(step, self.plan.steps):
            return PrivateScore(self.data.task, math.nan, self.data.test.size)
        assert self.randomness.scores is not None  # noqa: S101  (only the first rank scores)
        result = self.evaluate(covered=True)
        return release_score(result, self.data.test.units, scores, self.randomness.scores.at(step))
