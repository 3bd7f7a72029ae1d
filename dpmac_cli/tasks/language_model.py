"""Language models: the tokens of a text, each from those before it.

The network computes its own loss, so its one output for a record is the mean loss of the record's
tokens, in nats. See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpmac_cli.libraries import np
from dpmac_cli.tasks.metrics import FROM_0, Compared, EvaluationMetric
from dpmac_cli.tasks.task import Task, register_task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

#: Name of the task in commands and reports.
LANGUAGE_MODEL = "language-model"
#: Its network, a name of :data:`dpmac_cli.config.networks.MODELS` that no other task uses.
NETWORK = "causal"


def perplexity(of: Compared) -> float:
    """Return the perplexity of texts: e to the power of their mean loss in nats.

    Args:
        of: losses of the texts as guesses, as :meth:`LanguageModel.compared` returns them.
    """
    return math.exp(np.average(of.guess, weights=of.weights))


@register_task(LANGUAGE_MODEL)
@dataclass(frozen=True)
class LanguageModel(Task):
    """The next token, at every place of a text. Targets are 0, shape (records,)."""

    names: tuple[str, ...] = ("next token",)

    of_record: ClassVar[str] = "a text to continue"
    listed: ClassVar[str] = "predicts"
    result: ClassVar[str] = "The result is the perplexity of each text."
    losses: ClassVar[tuple[str, ...]] = ("next-token",)
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("perplexity", "perplexity", perplexity, lower=True, ends=FROM_0),
    )
    target: ClassVar[str] = "int64"
    public: ClassVar[str] = "vocabulary"
    weighted: ClassVar[bool] = False
    labelled: ClassVar[bool] = False
    network: ClassVar[str | None] = NETWORK

    @property
    def described(self) -> str:
        """Return the output in words: "the next token of a text"."""
        return "the next token of a text"

    @property
    def summary(self) -> str:
        """Return the output by name."""
        return "texts to continue"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the task in a model file."""
        return super().facts | {"classes": []}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the task with these facts."""
        return cls()

    @property
    def code(self) -> str:
        """Python expression for the perplexity of each text."""
        return "{}.exp()"

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return the perplexity of each text, float32, shape (texts, 1).

        Args:
            outputs: mean loss of each text's tokens in nats, shape (texts, 1).
        """
        return np.exp(outputs).astype(np.float32)

    def columns(self, outputs: Outputs) -> dict[str, Sequence[Any]]:
        """Return the perplexity of each text; NaN if an output is."""
        numbers = self.answers(outputs)[:, 0].tolist()
        return {"perplexity": [float(f"{number:.7g}") for number in numbers]}

    def compared(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64]
    ) -> Compared:
        """Return losses of test records in nats as guesses, of which the best is 0.

        Args:
            outputs: mean loss of each text's tokens, shape (records, 1).
            targets: not used; all 0.
            owners: index of each record's unit of privacy, shape (records,).
        """
        losses = outputs[:, 0].astype(np.float64)
        return Compared(losses * 0, losses, owners, np.zeros((len(losses), 0), np.float32))
