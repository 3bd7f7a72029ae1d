"""A planned training: its steps, what else it uses records for, and how far it is. No torch."""

from dataclasses import dataclass, replace

from dpmac_cli.accounting.events import TrainingEvent

#: Planned training of an account that has none.
NO_TRAINING = TrainingEvent(1e-9, 0.0, 0)


@dataclass(slots=True, kw_only=True)
class PlannedTraining:
    """Steps and other events that a training will use records for, and the steps that have begun.

    Attributes:
        event: all steps of the training, or of the part of it after ``base``.
        base: step of the training after which this part of it begins, for a resumed one.
        begun: last step of the training that may have begun.
        score: planned event of the covered test score at the end; None for exact scores.
        ranges: planned events of counts before the first step, which ranges follow from.
        histogram: planned event of the histogram of the training records at the end; None without.
    """

    event: TrainingEvent = NO_TRAINING
    base: int = 0
    begun: int = 0
    score: TrainingEvent | None = None
    ranges: tuple[TrainingEvent, ...] = ()
    histogram: TrainingEvent | None = None

    def steps(self, count: int) -> TrainingEvent:
        """Return the event of some steps of the training. Nothing begins.

        Args:
            count: number of steps, from 0.

        >>> PlannedTraining(event=TrainingEvent(0.01, 1.0, 500)).steps(1).steps
        1
        """
        return replace(self.event, steps=count)

    def is_of_training(self, event: TrainingEvent) -> bool:
        """Return whether an event is steps of the training, any number of them.

        Args:
            event: an event, which has the noise, sampler and rate of the training if it is. False
                if no training is planned.
        """
        return self.event != NO_TRAINING and self.steps(event.steps) == event

    @property
    def end(self) -> int:
        """Step of the training at which it ends as planned."""
        return self.base + self.event.steps

    @property
    def remaining(self) -> int:
        """Number of planned steps that have not begun."""
        return self.end - self.begun

    @property
    def done(self) -> TrainingEvent:
        """Return the event of the steps that have begun, which may be none."""
        return self.steps(self.begun - self.base)

    @property
    def histograms(self) -> tuple[TrainingEvent, ...]:
        """Return the planned histograms, begun or not."""
        if self.histogram is None:
            return self.ranges
        return (*self.ranges, self.histogram)

    @property
    def besides(self) -> tuple[TrainingEvent, ...]:
        """Return all planned events besides steps, also that of a covered score, begun or not."""
        if self.score is None:
            return self.histograms
        return (*self.histograms, self.score)
