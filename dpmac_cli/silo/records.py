"""Loss and weights of a silo's records, which may not be usable any more when they are drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, map_rows
from dpmac_cli.dp.copies import copied, without_memory
from dpmac_cli.models.trial_samples import BatchLoss, device_of


def used_by(
    network: nn.Module, loss: BatchLoss, weigh: Callable[[Any], Tensor] | None
) -> Callable[[Batch], None]:
    """Return a function that computes loss and weight of a record, with copies for this one.

    Args:
        network: the network. Its parameters are not copied.
        loss: loss of the program.
        weigh: weights of the program, a function of a batch; None without.
    """
    device = device_of(network)

    def use(row: Batch) -> None:
        moved = map_rows(lambda t: t.to(device), row)
        model = copied(network, network.parameters())
        without_memory(loss, "The loss")(model, moved)
        if weigh is not None:
            without_memory(weigh, "weights")(moved)

    return use


class LossOfRecord(nn.Module):
    """Loss of a :class:`.Checked` record: NaN for one that could not be used.

    It has the loss of the program as an attribute, so that it is validated, compared and copied for
    each record with it.

    Args:
        loss: loss of the program, of a batch of its records.
    """

    def __init__(self, loss: BatchLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the losses of a batch, shape (rows,).

        Args:
            model: the network.
            batch: ``record`` and ``used`` of each row, see :class:`.Checked`.
        """
        losses: Tensor = self.loss(model, batch["record"]) * batch["used"]
        return losses


@dataclass(frozen=True)
class WeightsOfRecord:
    """Weights of :class:`.Checked` records.

    Attributes:
        weigh: weights of the program, a function of a batch of its records.
    """

    weigh: Callable[[Any], Tensor]

    def __call__(self, batch: Any) -> Tensor:
        """Return the weights of a batch, shape (rows,).

        Args:
            batch: ``record`` and ``used`` of each row, see :class:`.Checked`.
        """
        return self.weigh(batch["record"])
