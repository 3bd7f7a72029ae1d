"""Language models: the tokens of a text, each from those before it.

The network computes its own loss, so its one output for a record is the mean loss of the record's
tokens, in nats. See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpmac_cli.libraries import np
from dpmac_cli.tasks.estimates import Perplexity
from dpmac_cli.tasks.task import EvaluationMetric, Results, Task, TaskFacts, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

#: Name of the task in commands and reports.
LANGUAGE_MODEL = "language-model"
#: Its network, a name of :data:`dpmac_cli.config.networks.MODELS` that no other task uses.
NETWORK = "causal"


@dataclass(frozen=True)
class LanguageModel(Task):
    """The next token, at every place of a text. Targets are 0, shape (records,)."""

    names: tuple[str, ...] = ("next token",)

    kind: ClassVar[str] = LANGUAGE_MODEL
    of_record: ClassVar[str] = "a text to continue"
    unknown: ClassVar[str] = "no continuation"
    losses: ClassVar[tuple[str, ...]] = ("next-token",)
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("perplexity", "perplexity", share=False, lower=True),
    )
    reported: ClassVar[tuple[str, ...]] = ("noise", "interval", "perplexity_interval")
    target: ClassVar[str] = "int64"
    public: ClassVar[str] = "vocabulary"
    weighted: ClassVar[bool] = False
    network: ClassVar[str | None] = NETWORK

    @property
    def described(self) -> str:
        """Return the output in words."""
        return "the next token of a text"

    @property
    def summary(self) -> str:
        """Return the output by name."""
        return "texts to continue"

    @property
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file."""
        return {"classes": [], "target": {"kind": self.kind}}

    @classmethod
    def of_facts(cls, facts: TaskFacts) -> Task:
        """Return the task with these facts."""
        return cls()

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        result = "The result is the perplexity of each text."
        return Usage("language model", ("predicts", self.names), "", "score", "{}.exp()", result)

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return the perplexity of each text."""
        return np.exp(outputs).astype(np.float32)

    def columns(self, answers: NDArray[np.float32]) -> dict[str, Sequence[Any]]:
        """Return the perplexity of each text; NaN if an output is."""
        return {"perplexity": [float(f"{number:.7g}") for number in answers[:, 0].tolist()]}

    def results(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64] | None = None
    ) -> Results:
        """Return the perplexity of test records."""
        losses = outputs[:, 0].astype(np.float64)
        return Perplexity(losses * 0, losses, self, unit_of=owners)
