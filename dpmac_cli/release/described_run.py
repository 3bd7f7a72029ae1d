"""A run as its sentences, its report and its card describe it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.networks import BACKBONES, Backbone
from dpmac_cli.config.plan import Plan


@dataclass(frozen=True)
class DescribedRun:
    """A run that sentences are about: its plan, and what was done to its records.

    Attributes:
        plan: plan of the run, with the facts of its records.
        spent: account of everything that was done to them.
        weighed: where the weights of records come from, if they are a program's.
        released: what the noisy histograms that were released told, by topic: ranges, and what the
            task has of them (calibration, residuals). A histogram that is planned may not be: of a
            run that was stopped, or whose budget was used up by lost steps.
    """

    plan: Plan
    spent: Account
    weighed: str = ""
    released: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> bool:
        """Return whether a unit of privacy may have several records; False for records alone."""
        return bool(self.plan.facts.unit)

    @property
    def counted(self) -> str:
        """Return what train_size counts: "records", or "units" if a unit may have several."""
        return "units" if self.units else "records"

    @property
    def tested(self) -> str:
        """Return what the number of tested records counts: "records", or "units"."""
        return self.counted if self.plan.score else "records"

    @property
    def encoder(self) -> TextEncoder | None:
        """Public network that reads texts; None for other records."""
        features = self.plan.features
        return features if isinstance(features, TextEncoder) else None

    @property
    def continues(self) -> bool:
        """Return whether the model continues texts."""
        return bool(self.plan.facts.task.network)

    @property
    def registered(self) -> Any:
        """Return what is registered about public weights; None for your own, and without any.

        It is the row of a backbone or an encoder: what it is called, its licence and its sources.
        """
        features = self.plan.features
        if isinstance(features, Backbone):
            return BACKBONES[features.kind]
        return None if self.encoder is None else self.encoder.registered

    @property
    def pretrained(self) -> str:
        """Name of the file of public weights, apart from those of a backbone; "" for none."""
        return "" if self.plan.pretrained is None else self.plan.pretrained.name

    @property
    def booked_with(self) -> Account | None:
        """Return the account that the run is booked in with other events; None if there is none."""
        budget, spent = self.plan.budget, self.spent.events
        if budget is None:
            return None
        alone = sum(event.steps for event in spent)
        together = sum(event.steps for event in budget.own)
        return budget if together > alone else None

    def cost_on(self, split: str) -> str:
        """Return epsilon of all events on a split of the records, rounded up, as a text.

        Args:
            split: "training" or "test", as the events of the account name their records. No unit
                is in both, so each split has a cost of its own, at the delta of the run.
        """
        events = tuple(event for event in self.spent.events if event.records == split)
        return format_epsilon(total_epsilon(events, self.plan.settings.delta))
