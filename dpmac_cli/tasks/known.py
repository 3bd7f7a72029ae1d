"""All tasks, their metrics and losses, and how a file describes a task. Loads nothing slow."""

from collections.abc import Mapping
from typing import Any

from dpmac_cli.tasks.classification import Classification, SeveralLabels
from dpmac_cli.tasks.task import Metric, Task

TASKS: tuple[type[Task], ...] = (Classification, SeveralLabels)
#: Metrics of all tasks by name.
METRICS: Mapping[str, Metric] = {metric.name: metric for task in TASKS for metric in task.metrics}
#: Losses of all tasks by name: see :func:`~dpmac_cli.dp.losses.build_loss`.
LOSSES = tuple(dict.fromkeys(loss for task in TASKS for loss in task.losses))


def task_of(facts: Mapping[str, Any]) -> Task:
    """Return the task that :attr:`Task.facts` describe. Raises ValueError if there is none."""
    for kind in TASKS:
        if (task := kind.of_facts(facts)) is not None:
            return task
    raise ValueError("no task fits these facts")
