"""Lines of metrics.jsonl: the history of a run, one line per evaluation."""

from typing import Any

from dpmac_cli.config.plan import PrivacyPlan
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.training.loop import Evaluated
from dpmac_cli.training.private_scores import PrivateScore


def metrics_line(
    evaluated: Evaluated, epsilon: float, privacy: PrivacyPlan, metric: str
) -> dict[str, Any]:
    """Return a line of metrics.jsonl; ``metric`` is the chosen one."""
    result, headline = evaluated.result, evaluated.result.task.headline
    return {
        "step": evaluated.step,
        "epoch": evaluated.epoch,
        "epsilon": finite_or_none(epsilon),
        "delta": privacy.delta if privacy.private else None,
        headline.logged: finite_or_none(result.metric(headline.name)),
        METRICS[metric].logged: finite_or_none(result.metric(metric)),
        "test_loss": finite_or_none(result.loss),
        "test_samples": result.samples,
        "seconds": round(evaluated.seconds, 3),
        **(result.values() if isinstance(result, PrivateScore) else {}),
        **evaluated.public,
    }
