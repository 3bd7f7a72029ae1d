"""Train one run of a study, and a pool of local processes that train one run each."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from dpmac_cli.data.dataset import Data
from dpmac_cli.data.decoding import usable_cores
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import DpmacError, InputError, explain_os_error, named_as_flags
from dpmac_cli.release.run import RunEvent, resume, train
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.runs.memory import keep_freed_memory
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.studies.executor import Executor, Result
from dpmac_cli.studies.grid import Run
from dpmac_cli.torch_errors import what_failed

#: Signals that ask a job to stop.
REQUESTS = (signal.SIGINT, signal.SIGTERM)
#: Processes are forked from one that has only imported torch.
CONTEXT = processes.get_context("forkserver")

#: Datasets by the value of --dataset.
SharedData = Mapping[str | Source, Data]


def train_job(run: Run, threads: int, data: Data | None = None) -> Result:
    """Train one run like :func:`train_run`, until a signal arrives or its parent has ended."""
    parent = multiprocessing.parent_process()
    asked = threading.Event()
    for number in REQUESTS:
        signal.signal(number, lambda *_: asked.set())
    torch.set_num_threads(threads)
    keep_freed_memory()

    def stop() -> bool:
        return asked.is_set() or (parent is not None and not parent.is_alive())

    return train_run(run, data, stop)


@named_as_flags()  # the command that started this process shows its failures
def train_run(run: Run, data: Data | None, stop: Callable[[], bool]) -> tuple[str | None, int]:
    """Train a run, or resume it.

    Args:
        data: data on the run's device; None to load it.
        stop: called after every step; True saves and ends the run.
    """
    failure, step = None, 0
    try:
        for event in _events(run, data, stop):
            if isinstance(event, Started):
                step = event.done
            elif isinstance(event, Update):
                step = event.event.step
    except KeyboardInterrupt:  # asked to stop before its first step
        pass
    except DpmacError as problem:
        failure = str(problem)
    except OSError as problem:
        failure = explain_os_error(problem)
    except Exception as problem:  # noqa: BLE001  (the other runs continue in any case)
        failure = f"a bug in dpmac, {what_failed(problem)} For a traceback: dpmac train --debug."
    return failure, step


def _events(run: Run, data: Data | None, stop: Callable[[], bool]) -> Iterator[RunEvent]:
    """Train a run, resuming it from its checkpoint if it has one."""
    plan, where = run.plan, run.folder
    if plan.search is None and _has_checkpoint(where):
        flags = {"device": plan.run.device, "model": plan.recorded["model"], "seed": plan.run.seed}
        return resume(where, flags, stop, data)
    # The epsilon of a search covers no steps besides those of its trials, so a trial begins again.
    counted = plan.privacy.private and plan.search is None
    return train(
        plan, stop, data, earlier=begun_events(where, plan.privacy.event) if counted else ()
    )


def share_data(runs: Sequence[Run]) -> dict[str | Source, Data]:
    """Load every dataset once. torch shares the memory of tensors sent to other processes."""
    cpu = torch.device("cpu")
    plans = {run.plan.data.source: run.plan.data for run in runs}
    return {
        source: load_data(source, plan.folder, cpu, found=plan.found)
        for source, plan in plans.items()
    }


def _has_checkpoint(where: Path) -> bool:
    with contextlib.suppress(InputError):
        checkpoint.newest(where)
        return True
    return False


@dataclass
class _Worker:
    """Process that trains one run, and its index in the pool."""

    process: Any
    pipe: Connection
    place: int


class Pool(Executor[_Worker]):
    """Executor with ``jobs`` processes at a time on this machine, which share ``data``.

    The default is one per GPU, or one per core, because a small step uses only one core.
    """

    pause = 0.05

    def __init__(self, runs: Sequence[Run], jobs: int | None, data: SharedData) -> None:
        on_gpu = choose_device(runs[0].plan.run.device).type == "cuda"
        jobs = jobs or (torch.cuda.device_count() if on_gpu else usable_cores())
        super().__init__(runs, min(jobs, len(runs)))
        self.data = data
        self._places = list(range(self.slots))
        self._threads = max(1, torch.get_num_threads() // self.slots)
        CONTEXT.set_forkserver_preload(["__main__", __name__])

    def submit(self, run: Run) -> _Worker:
        """Start a process for a run."""
        place, (mine, theirs) = self._places.pop(0), CONTEXT.Pipe()
        named = run.plan.run.device
        device = choose_device(named)
        if device.type == "cuda" and ":" not in named:  # distribute processes over GPUs
            device = torch.device("cuda", place % torch.cuda.device_count())
        placed, data = run.on(str(device)), self.data[run.plan.data.source]
        # The server that processes are forked from keeps its initial environment variables.
        arguments = (dict(os.environ), theirs, placed, data, self._threads)
        process = CONTEXT.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return _Worker(process, mine, place)

    def result(self, job: _Worker) -> Result | None:
        """Return the result of a process, or why it ended without one; None while it runs."""
        if not job.pipe.poll():
            return None
        self._places.append(job.place)
        result: Result | None = None
        with contextlib.suppress(EOFError, OSError):
            result = job.pipe.recv()
        job.process.join()
        code = job.process.exitcode
        return result or (f"signal {-code}" if code < 0 else f"exit code {code}", None)

    def cancel(self, job: _Worker) -> None:
        """Ask a process to stop."""
        job.process.terminate()

    def wait(self, job: _Worker) -> None:
        """Wait for a process to end."""
        job.process.join()


def _work(
    variables: Mapping[str, str], pipe: Connection, run: Run, data: Data, threads: int
) -> None:
    """Train one run and send its result: the main function of a process."""
    os.environ.clear()
    os.environ.update(variables)
    # A network may print to stdout, which a program may parse.
    with contextlib.redirect_stdout(sys.stderr):
        pipe.send(train_job(run, threads, data.to(torch.device(run.plan.run.device))))
