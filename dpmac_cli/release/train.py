"""Train and resume runs: from settings, a plan or a run folder to the published files of a run."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from dpmac_cli.arguments import checked
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import Values, values_of
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.dp.torch_errors import torch_failures_explained
from dpmac_cli.errors import InputError, as_keywords
from dpmac_cli.models.dataset import Data
from dpmac_cli.release.publish import publish
from dpmac_cli.release.run import Run
from dpmac_cli.runs.resolve import Resolved, resolve
from dpmac_cli.runs.session import Session, SessionEvent, Started, Update
from dpmac_cli.runs.train import continued_run, new_run
from dpmac_cli.training.distributed import Ranks

RunEvent: TypeAlias = Started | Update | Run
#: Whether a run is asked to end early.
Stop: TypeAlias = Callable[[], bool]


def never() -> bool:
    """Return False: a run is not asked to end early."""
    return False


@checked(never_none=("data", "dataset"))
def train(
    settings: Settings | Values | None = None,
    *,
    data: Any = None,
    on_event: Callable[[Update], None] | None = None,
    stop: Stop = never,
    **keywords: Any,
) -> Run:
    """Train a model under differential privacy, like the command ``dpmac train``.

        run = train(dataset="digits", epsilon=3)
        run.epsilon, run.score().accuracy

    Settings are those of docs/configuration.md. The run folder ``out`` is written with the model,
    its report and its card.

    Args:
        settings: settings as a model or by name; ``keywords`` take precedence.
        data: records in memory instead of ``dataset``: a data frame, a dataset of Hugging Face,
            :class:`~dpmac_cli.ArrayData` or the result of :func:`~dpmac_cli.from_torch`.
        on_event: called with an :class:`~dpmac_cli.runs.session.Update` a few times per second,
            with ``step`` and ``epsilon``, and after each epoch, then with a ``result``.
        stop: called after every step; True ends the run early with everything written.
        keywords: settings by name, such as ``epsilon=3, optimizer="dp-macadam"``.

    Raises:
        InputError: settings, data, device or folder cannot be used; lists every fault found, and
            nothing was written.
        BudgetError: no noise meets the target epsilon, or the budget allows no step.
        ModelError: the model mixes samples.
        RunError: training diverged, memory ran out, or the device failed.
    """
    resolved = resolve(_settings(settings, data, keywords))
    run = finish(train_plan(resolved, stop), on_event)
    notes = tuple(map(as_keywords, resolved.notes)) + run.notes
    return replace(run, notes=notes, private_notes=resolved.private_notes + run.private_notes)


@checked()
def resume(
    where: Run | Path | str,
    settings: Settings | Values | None = None,
    *,
    data: Any = None,
    on_event: Callable[[Update], None] | None = None,
    stop: Stop = never,
    **keywords: Any,
) -> Run:
    """Resume a run from its checkpoint, in its folder or in another one.

    Noise and batches are drawn with new keys, so no noise is added to two different gradients.
    Epsilon covers all steps before and since, also those that were lost.

    Args:
        where: a run, or its folder.
        settings: settings as a model or by name; ``keywords`` take precedence. Without ``out``,
            they are those that do not change the result, such as ``device``, and ``model`` if it
            is user-supplied: code is not imported because a file refers to it. With ``out``, the
            run is resumed into that folder, others may change, such as ``epochs``, and the run
            itself is unchanged.
        data: records in memory, if the run was trained on such: the same ones.
        on_event, stop, keywords: see :func:`train`.

    Raises:
        InputError: there is no such run, it is finished, a setting cannot change, the checkpoint
            is damaged, or config.yaml was modified; and those of :func:`train`.
    """
    folder = where.folder if isinstance(where, Run) else where
    return finish(resume_folder(folder, _settings(settings, data, keywords), stop), on_event)


def _settings(
    settings: Settings | Values | None, data: Any, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings by name, with records in memory as the dataset. Raises InputError."""
    values = {**values_of(settings), **keywords}
    if data is None:
        return values
    if values.get("dataset") is not None:
        raise InputError("data= and dataset= are two ways to pass records. Use one of them.")
    return values | {"dataset": data}


def train_plan(
    plan: Plan | Resolved,
    stop: Stop = never,
    data: Dataset | Data | None = None,
    ranks: Ranks | None = None,
) -> Iterator[RunEvent]:
    """Train, write the run folder, and yield what happens; the last event is the run.

    With ``force``, an existing run is removed once this one is ready for its first step.

    Args:
        plan: what :func:`dpmac_cli.runs.resolve.resolve` returns, with the records that it has
            read; or its ``plan`` alone, whose records are read again.
        stop: called after every step; True ends the run early with everything written.
        data: records of the plan, or data on the device; None to read them.
        ranks: the processes of the run; the others call
            :func:`~dpmac_cli.runs.workers.run_worker`.

    Raises:
        Those of :func:`train`, but for settings, which are resolved.
    """
    if isinstance(plan, Resolved):
        data = data or plan.data
        plan = plan.plan
    return _published(new_run(plan, stop, data, ranks))


def resume_folder(
    where: Path | str,
    flags: Settings | Values | None = None,
    stop: Stop = never,
    ranks: Ranks | None = None,
) -> Iterator[RunEvent]:
    """Resume the run in a folder, and yield what happens: see :func:`resume`, :func:`train_plan`.

    Raises those of :func:`resume`.
    """
    return _published(continued_run(where, values_of(flags), stop, None, ranks))


def _published(events: Generator[SessionEvent, None, None]) -> Iterator[RunEvent]:
    """Publish a run once it is trained, while its folder is still locked."""
    with closing(events):
        for event in events:
            if not isinstance(event, Session):
                yield event
                continue
            with torch_failures_explained():
                run = publish(event)
            yield run


def finish(events: Iterable[RunEvent], on_event: Callable[[Update], None] | None = None) -> Run:
    """Carry out :func:`train_plan` or :func:`resume_folder` to the end; return the finished run.

    All events are taken, because the last one releases the lock of the run's folder.

    Args:
        events: the events of a run, of which the last is the :class:`Run`.
        on_event: called with each update: after a step, and with scores after an epoch.

    Returns:
        The run, with the notes that its first event had.

    Raises:
        Exception: whatever the run raises, or ``on_event`` does. What was spent by then is in the
            ledger of the run.
    """
    notes = tuple[str, ...]()
    private_notes = tuple[str, ...]()
    run = None
    for event in events:  # all of them: the last one releases the lock of the folder
        if isinstance(event, Started):
            notes, private_notes = event.notes, event.private_notes
        elif isinstance(event, Run):
            run = event
        elif on_event is not None:
            on_event(event)
    assert run is not None  # noqa: S101  (the last event, unless an exception is raised)
    return replace(run, notes=notes, private_notes=private_notes)
