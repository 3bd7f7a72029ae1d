"""Lines of metrics.jsonl: the history of a run, one line per evaluation."""

from typing import Any

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.runs.loop import Evaluated
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.training.private_scores import PrivateScore


def metrics_line(evaluated: Evaluated, epsilon: float, plan: TrainPlan) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    result, headline = evaluated.result, evaluated.result.task.headline
    privacy, metric = plan.privacy, plan.run.metric
    return {
        "step": evaluated.step,
        "epoch": evaluated.epoch,
        "epsilon": finite_or_none(epsilon),
        "delta": privacy.delta if privacy.private else None,
        headline.logged: finite_or_none(result.metric(headline.name)),
        METRICS[metric].logged: finite_or_none(result.metric(metric)),
        "test_loss": finite_or_none(result.loss),
        "test_samples": result.samples,
        "seconds": round(evaluated.seconds, 3) if plan.timed else None,
        **(result.values() if isinstance(result, PrivateScore) else {}),
        **evaluated.public,
    }
