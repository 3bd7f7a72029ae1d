"""Train and resume runs: from a plan or a run folder to the published files of a run."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import Values, values_of
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.dp.torch_errors import torch_failures_explained
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import Data
from dpmac_cli.release.publish import Finished, publish
from dpmac_cli.runs.resolve import Resolved
from dpmac_cli.runs.session import Session, SessionEvent, Started, Update
from dpmac_cli.runs.train import continued_run, new_run
from dpmac_cli.training.distributed import Ranks

RunEvent: TypeAlias = Started | Update | Finished


def train(
    plan: Plan | Resolved,
    stop: Callable[[], bool] = lambda: False,
    data: Dataset | Data | None = None,
    ranks: Ranks | None = None,
) -> Iterator[RunEvent]:
    """Train, write the run folder, and report progress.

    With ``force``, an existing run is removed once this one is ready for its first step.

    Args:
        plan: what :func:`dpmac_cli.runs.resolve.resolve` returns, with the records that it has
            read; or its ``plan`` alone, whose records are read again.
        stop: called after every step; True ends the run early with everything written.
        data: records of the plan, or data on the device; None to read them.
        ranks: the processes of the run; the others call
            :func:`~dpmac_cli.runs.workers.run_worker`.

    Raises:
        InputError: data, device or folder cannot be used; nothing was written.
        BudgetError: the budget allows no step.
        ModelError: the model mixes samples.
        RunError: training diverged, memory ran out, or the device failed.
    """
    if isinstance(plan, Resolved):
        data = data or plan.data
        plan = plan.plan
    if not isinstance(plan, Plan):
        raise InputError(
            f"A run cannot be trained from a {type(plan).__name__}. Resolve its settings first: "
            "train(resolve(**settings))."
        )
    return _published(new_run(plan, stop, data, ranks))


def resume(
    where: Path | str,
    flags: Settings | Values | None = None,
    stop: Callable[[], bool] = lambda: False,
    data: Dataset | Data | None = None,
    ranks: Ranks | None = None,
    **keywords: Any,
) -> Iterator[RunEvent]:
    """Resume a run from its checkpoint, in its folder or in another one.

    Noise and batches are drawn with new keys, so no noise is added to two different gradients.
    Epsilon covers all steps before and since, also those that were lost.

    ``flags`` and ``keywords`` are settings. Without ``out``, they are those that do not change the
    result, such as ``device``, and ``model`` if it is user-supplied: code is not imported because a
    file refers to it. With ``out``, the run is resumed into that folder, others may change, such as
    ``epochs``, and the run itself is unchanged. For other arguments and errors see :func:`train`.

    Raises:
        InputError: there is no such run, it is finished, a setting cannot change, the checkpoint
            is damaged, or config.yaml was modified.
    """
    return _published(continued_run(where, {**values_of(flags), **keywords}, stop, data, ranks))


def _published(events: Generator[SessionEvent, None, None]) -> Iterator[RunEvent]:
    """Publish a run once it is trained, while its folder is still locked."""
    with closing(events):
        for event in events:
            if not isinstance(event, Session):
                yield event
                continue
            with torch_failures_explained():
                finished = publish(event)
            yield finished


def finish(events: Iterable[object]) -> Finished:
    """Run to the end: ``finish(train(plan))``, ``finish(tune(...))``. Exceptions are propagated."""
    # Earlier events hold the outputs of every evaluation.
    last = deque(events, maxlen=1).pop()
    assert isinstance(last, Finished)  # noqa: S101
    return last
