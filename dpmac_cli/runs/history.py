"""Lines of metrics.jsonl: the history of a run, one line per evaluation."""

from typing import Any

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.settings import metric_key
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.training.covered import CoveredScore
from dpmac_cli.training.loop import Evaluated


def metrics_line(evaluated: Evaluated, epsilon: float, plan: TrainPlan) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    result = evaluated.result
    return {
        "step": evaluated.step,
        "epoch": evaluated.epoch,
        "epsilon": finite_or_none(epsilon),
        "delta": plan.privacy.delta if plan.privacy.private else None,
        "test_accuracy": finite_or_none(result.accuracy),
        metric_key(plan.run.metric): finite_or_none(result.metric(plan.run.metric)),
        "test_loss": finite_or_none(result.loss),
        "test_samples": result.samples,
        "seconds": round(evaluated.seconds, 3),
        **(result.values() if isinstance(result, CoveredScore) else {}),
        **evaluated.public,
    }
