"""Several numbers per record, each in a public range of its own.

Imports nothing slow; see :mod:`dpmac_cli.tasks.task`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpmac_cli.tasks.regression import NUMBER_METRICS, NumberTask, Regression
from dpmac_cli.tasks.task import EvaluationMetric, Results, Usage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

#: Means over the targets. Errors are shares of the range of their target.
NMAE = EvaluationMetric("nmae", "NMAE", covered=True, share=False, lower=True)
NRMSE = EvaluationMetric("nrmse", "NRMSE", share=False, lower=True)
_KEPT = tuple(metric for metric in NUMBER_METRICS if metric.name in ("r2", "at-or-below"))


@dataclass(frozen=True)
class SeveralNumbers(NumberTask):
    """Several numbers per record. Targets are scaled to [-1, 1], shape (records, targets).

    Attributes:
        parts: the task of each target.
    """

    parts: tuple[Regression, ...]

    kind: ClassVar[str] = "several numbers"
    of_record: ClassVar[str] = "several numbers"
    unknown: ClassVar[str] = "no number for some targets"
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (NMAE, NRMSE, *_KEPT)
    reported: ClassVar[tuple[str, ...]] = (
        *("nrmse", "r2", "at_or_below", "by_target", "noise", "interval", "nmae_interval"),
    )
    public: ClassVar[str] = "ranges of the targets"

    @classmethod
    def of(cls, parts: Sequence[Regression]) -> Self:
        """Return the task of several targets."""
        return cls(tuple(part.names[0] for part in parts), tuple(parts))

    @property
    def described(self) -> str:
        """Return the outputs in words."""
        return f"{len(self.names)} numbers"

    @property
    def summary(self) -> str:
        """Return the outputs by name."""
        return ", ".join(part.summary for part in self.parts)

    @property
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""
        ranges = (
            f"{part.low:g} to {part.high:g}" + " (log1p)" * (part.transform == "log1p")
            for part in self.parts
        )
        row, told = ("targets", self.names), f", numbers from {', '.join(ranges)}"
        result = "The result has a column per target, in its units."
        return Usage("regression model", row, told, "predict", self._code, result)

    @property
    def _code(self) -> str:
        low = [part.ends[0] for part in self.parts]
        width = [part.ends[1] - part.ends[0] for part in self.parts]
        code = f"torch.tensor({low}) + ({{}}.clamp(-1, 1) + 1) / 2 * torch.tensor({width})"
        logs = [part.transform == "log1p" for part in self.parts]
        if not any(logs):
            return code
        each = f"zip(({code}).T, {logs}, strict=True)"
        return f"torch.stack([y.expm1() if log else y for y, log in {each}], 1)"

    @property
    def target_facts(self) -> Mapping[str, Any]:
        """Return the facts of all targets."""
        return {"kind": self.kind, "targets": [part.target_facts for part in self.parts]}

    @classmethod
    def of_target(cls, target: Mapping[str, Any]) -> Self:
        """Return the task with these facts."""
        return cls.of([Regression.of_target(part) for part in target["targets"]])

    def encoded(self, targets: "NDArray[Any]") -> "NDArray[Any]":
        """Return targets as a network learns them, float32, shape (records, targets)."""
        import numpy as np  # noqa: PLC0415  (help is fast)

        parts = zip(self.parts, targets.T, strict=True)
        return np.concatenate([part.encoded(column) for part, column in parts], 1)

    def examples(self) -> "tuple[Tensor, Tensor]":
        """Return made-up outputs and targets."""
        import torch  # noqa: PLC0415  (help is fast)

        count = len(self.parts)
        outputs = torch.randn(4, count, generator=torch.Generator().manual_seed(0))
        return outputs, torch.linspace(-1, 1, 4 * count).view(4, count)

    def answers(self, outputs: "Tensor") -> "Tensor":
        """Return predicted numbers, in the units of their targets."""
        import torch  # noqa: PLC0415  (help is fast)

        found = (part.answers(outputs[:, [place]]) for place, part in enumerate(self.parts))
        return torch.cat([*found], 1)

    def columns(self, answers: "NDArray[np.float32]") -> dict[str, Sequence[Any]]:
        """Return predicted numbers joined by ";", "" if one is NaN, and a column per target."""
        each = [
            part.columns(answers[:, [place]])["predicted"] for place, part in enumerate(self.parts)
        ]
        lost = (answers != answers).any(1)  # noqa: PLR0124  (NaN)
        rows = zip(*each, strict=True)
        joined = [
            "" if bad else ";".join(map(str, row)) for row, bad in zip(rows, lost, strict=True)
        ]
        named = zip(self.names, each, strict=True)
        return {"predicted": joined, **{f"predicted_{name}": found for name, found in named}}

    def results(
        self, outputs: "Tensor", targets: "Tensor", owners: "NDArray[np.int64] | None" = None
    ) -> Results:
        """Compare predicted numbers with targets. One that is NaN is as wrong as possible."""
        from dpmac_cli.tasks.estimates import SeveralEstimates  # noqa: PLC0415  (help is fast)

        found = (
            part.results(outputs[:, [place]], targets[:, [place]], owners)
            for place, part in enumerate(self.parts)
        )
        return SeveralEstimates(tuple(found), self, owners)
