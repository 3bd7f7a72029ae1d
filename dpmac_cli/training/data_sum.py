"""Clipped sum over the training records of a dataset, or the records of its units."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping.batches import PUBLIC, Structure
from dpmac_cli.dp.losses import Loss, build_loss, build_weights
from dpmac_cli.dp.weights import Weigh
from dpmac_cli.models.dataset import Data
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import Indices, RandomPlaces
from dpmac_cli.training.augmentation import views_of
from dpmac_cli.training.chunks import ChunkedSum


class DataSum(ChunkedSum):
    """Sum over the training records of a dataset, or the records of its units.

    Args:
        model: the network.
        data: records on the device of the network.
        plan: settings of the steps.
        batch: expected number B of records or units in a step.
        layers: random draws of layers, augmented views and the records of units; None if there are
            none of these.
        places: random places of records.
        loss: loss per sample; None for that of the settings.
        weigh: weights of records; None for those of the settings, if the loss is theirs too.

    Attributes:
        data: the records, which may be replaced before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        plan: Plan,
        batch: float,
        layers: LayerDraws | None,
        places: RandomPlaces,
        loss: Loss | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        self.data, self._plan = data, plan
        inputs, settings, device = plan.inputs, plan.settings, data.gain.device
        rowwise = loss is None and weigh is None
        if loss is None:
            loss = build_loss(settings.loss, settings.label_smoothing)
            weigh = weigh or build_weights(settings.loss, class_weights(settings), device)
        several = (inputs,) if inputs > 1 else ()
        images, labels = data.train.images.shape[1:], data.train.labels
        inputs_of = Structure(data.gain.new_zeros((1, *several, *images)))
        if data.example is not None:
            rows = data.example.to(data.gain).view(-1, *several and (1,), *images)
            inputs_of = Structure(rows.expand(-1, *several, *images), numbers=(PUBLIC,))
        super().__init__(
            model,
            inputs_of,
            Structure(labels.new_zeros((1, *several, *labels.shape[1:])), keep=True),
            layers,
            places,
            loss=loss,
            views=inputs,
            physical_batch=physical_batch(settings, plan.facts, device.type),
            batch=batch,
            private=plan.private,
            rowwise=rowwise,
            weigh=weigh,
        )

    def _read(self, drawn: Indices, part: slice | Indices, step: int) -> tuple[Tensor, Tensor]:
        """Return the records of units, and their augmented views, standardised, with labels."""
        plan, settings, rows = self._plan, self._plan.settings, self._rows(drawn[part], step)
        images, labels = self.data.train.at(rows)
        if settings.augment is not None:
            words = self._words(drawn[part], step, plan.inputs).reshape(len(rows), -1)
            images = views_of(images, words, settings.augment)
            labels = labels.repeat_interleave(settings.augmentations or 1, 0)
        inputs, samples = self.data.standardised(images), len(drawn[part])
        if plan.inputs > 1:
            inputs, labels = (t.view(samples, -1, *t.shape[1:]) for t in (inputs, labels))
        return inputs, labels

    def _rows(self, drawn: Indices, step: int) -> Indices:
        """Return the records of the drawn units, shape (units * K,)."""
        units = self.data.train.units
        if units is None:
            return drawn
        plan = self._plan
        *_, words = self._words(drawn, step, plan.inputs + 1).T  # the others are for augmentation
        return units.records(drawn, words, plan.records_in_a_step).reshape(-1)

    def _words(self, drawn: Indices, step: int, count: int) -> NDArray[np.uint64]:
        assert self._layers is not None, "views and records of units are drawn"  # noqa: S101
        return self._layers.words(step, drawn, count)
