"""Hook into a training step, for audits and diagnostics."""

from torch import Tensor

from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.randomness.sampling import Batch


class Hook:
    """Takes part in every step. Does nothing; subclasses override what they need."""

    def records(self, drawn: Batch) -> Batch:
        """Return the rows of the training set to sum, of those drawn."""
        return drawn

    def observe(self, losses: Tensor, norms: Tensor) -> None:
        """Receive a chunk's losses and whitened norms, shape (samples,) each. NOT private."""

    def add(self, step: int, clipped: Tensor, clipped_sum: ClippedSum, metric: Metric) -> Tensor:
        """Return the sum of clipped gradients, shape (d,), with what the hook adds to it."""
        del step, clipped_sum, metric
        return clipped

    def hear(self, private: PrivateMean, region: Ellipsoid, block: slice) -> None:
        """Receive the private mean of a block of coordinates, and the region it was clipped to."""

    def end(self) -> None:
        """Finish the step."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold, by name."""
        return {}
