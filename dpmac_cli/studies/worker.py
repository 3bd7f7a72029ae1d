"""Training one run of a study, wherever that is, and reporting its progress."""

from collections.abc import Callable, Iterator

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.errors import DpmacError, explain_os_error
from dpmac_cli.runs import train as run
from dpmac_cli.runs.ledger import attempts
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.studies.executor import Ended, Moved, RunEvent
from dpmac_cli.torch_errors import what_failed
from dpmac_cli.training.loop import Evaluated


def train_run(
    number: int, plan: TrainPlan, data: Data | None, stop: Callable[[], bool]
) -> Iterator[RunEvent]:
    """Train a run, or resume it, and yield its progress and one :class:`Ended`.

    Args:
        number: index of the run in the grid.
        plan: with its ``out``.
        data: on the run's device; None to load it.
        stop: called after every step; True saves the run and ends it.
    """
    failure = None
    try:
        for event in _events(plan, data, stop):
            yield Moved(number, *event)
    except KeyboardInterrupt:  # asked to stop before its first step
        pass
    except DpmacError as problem:
        failure = str(problem)
    except OSError as problem:
        failure = explain_os_error(problem)
    except Exception as problem:  # noqa: BLE001  (the other runs continue, whatever it is)
        failure = f"a bug in dpmac, {what_failed(problem)} dpmac train --debug shows all of it."
    yield Ended(number, failure)


def _events(
    plan: TrainPlan, data: Data | None, stop: Callable[[], bool]
) -> Iterator[tuple[int, int, float | None]]:
    """Train a run, resuming it where that is exact; yield step, total steps and accuracy."""
    steps, accuracy = plan.steps, None
    if run.resumes_exactly(plan.folder, plan.device):
        flags = {"device": plan.device, "model": plan.recorded["model"]}
        events = run.resume(plan.folder, flags, stop, data)
    else:  # a run that cannot be resumed here: the study is charged for what was done before
        before = attempts(plan.folder, plan.event) if plan.private else ()
        events = run.train(plan, stop, data, abandoned=before)
    for event in events:
        if isinstance(event, Started):
            yield event.done, steps, accuracy
        elif isinstance(event, Update):
            if isinstance(event.event, Evaluated):
                accuracy = event.event.result.accuracy
            yield event.event.step, steps, accuracy
