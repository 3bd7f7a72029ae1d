"""Engine of a private step: a validated network, and the descent on its batches."""

from dataclasses import dataclass, field

import torch

from dpmac_cli.config.plan import BatchPlan
from dpmac_cli.dp.clipping.batches import NOTHING, Batch, Structure
from dpmac_cli.dp.losses import returned
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.models.trial import Objective
from dpmac_cli.models.validation import validate_objective
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import Indices
from dpmac_cli.runs.setup import mechanism_of, steps_of, training_of
from dpmac_cli.runs.step_arguments import RECORD_UNIT, device_of
from dpmac_cli.torch_errors import torch_failures_explained
from dpmac_cli.training.chunks import BatchSum, Running
from dpmac_cli.training.descent import Descent
from dpmac_cli.training.lineage import Training, attach
from dpmac_cli.training.state import Randomness


@dataclass
class Given:
    """Sampler of the records of a batch that was given."""

    records: Indices | None = None

    def draw(self, step: int) -> Indices:
        """Return the records of the batch."""
        assert self.records is not None  # noqa: S101
        return self.records


@dataclass(frozen=True, kw_only=True)
class StepEngine:
    """A network in private training on batches that it is given.

    Attributes:
        descent: takes the steps. sums: clipped sum of a batch. given: records of a batch.
        training: counts the steps that use records.
        structure: structure of a record, which was validated.
        notes: how the network is run.
    """

    descent: Descent
    sums: BatchSum
    given: Given
    training: Training
    structure: Structure
    notes: tuple[str, ...] = field(default=())

    def step(self, batch: Batch, records: Indices) -> int:
        """Take a step; return its number. For errors see :class:`.PrivateStep`."""
        self.given.records, self.sums.batch = records, batch
        descent = self.descent
        try:
            with torch_failures_explained(), torch.inference_mode(False):
                descent.step()
                if descent.state.step % descent.plan.steps_per_epoch == 0:
                    descent.check_finite()
                    descent.check_network()
        finally:
            self.given.records, self.sums.batch = None, NOTHING
        return descent.state.step


def build_engine(
    objective: Objective,
    plan: BatchPlan,
    structure: Structure,
    *,
    steps: int,
    keys: Keys,
) -> StepEngine:
    """Validate a network and its loss, and build what takes the steps.

    Args:
        objective: the network with its loss, which are trained in place.
        plan: plan of the training.
        structure: structure of a record, on the device of the network.
        steps: number of steps, at most the plan's.
        keys: secret keys.

    Raises:
        ModelError: they cannot be clipped.
    """
    validate_objective(objective, structure, isolated=plan.isolate)
    given, layers = Given(), LayerDraws(keys.layers)
    step_plan = steps_of(plan, steps, device_of(objective))
    how = Running(
        loss=returned,
        physical_batch=step_plan.physical_batch,
        batch=plan.privacy.batch_size,
    )
    with full_float32():
        sums = BatchSum(objective, structure, how, layers)
        descent = Descent(
            model=objective,
            sums=sums,
            optimizer=plan.optimizer,
            mechanism=mechanism_of(plan.privacy, secure=plan.run.secure),
            plan=step_plan,
            randomness=Randomness(
                sampler=given,
                noise=Noise(keys.noise, secure=plan.run.secure),
                layers=layers,
            ),
        )
    descent.training = training = training_of(plan.privacy, plan.run, RECORD_UNIT)
    attach(objective, training)  # a loss may have trained parameters, too
    return StepEngine(
        descent=descent,
        sums=sums,
        given=given,
        training=training,
        structure=structure,
        notes=sums.notes,
    )
