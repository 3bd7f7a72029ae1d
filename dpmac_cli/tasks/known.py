"""All tasks, their metrics and losses, and how a file describes a task. Loads nothing slow."""

from collections.abc import Mapping
from typing import Any

from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.language_model import LanguageModel
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import EvaluationMetric, Task, TaskFacts

TASKS: tuple[type[Task], ...] = (Classification, Regression, LanguageModel)
#: Metrics of all tasks by name.
METRICS: Mapping[str, EvaluationMetric] = {
    metric.name: metric for task in TASKS for metric in task.metrics
}
#: Losses of all tasks: see :func:`~dpmac_cli.dp.losses.build_loss`.
LOSSES = tuple(dict.fromkeys(loss for task in TASKS for loss in task.losses))


def is_loss_of_a_task(loss: str) -> bool:
    """Return whether a loss is one of a task, not a user-supplied function."""
    return any(task.fits(loss) for task in TASKS)


def headline_in(line: Mapping[str, Any]) -> EvaluationMetric:
    """Return the metric that a line of metrics.jsonl is about."""
    headlines = (task.metrics[0] for task in TASKS)
    return next((m for m in headlines if m.logged in line), TASKS[0].metrics[0])


def task_of(facts: TaskFacts) -> Task:
    """Return the task that :attr:`Task.facts` describe."""
    kind = (facts["target"] or {"kind": Classification.kind})["kind"]
    return next(task for task in TASKS if task.kind == kind).of_facts(facts)
