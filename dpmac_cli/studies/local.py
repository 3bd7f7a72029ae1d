"""Run a study: jobs of an executor, why some failed, and a pool of local processes as executor.

The other executor is :mod:`~dpmac_cli.studies.ray_cluster`.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.multiprocessing as processes

from dpmac_cli.data.image_folder import usable_cores
from dpmac_cli.dp.torch_errors import what_failed
from dpmac_cli.errors import DpmacError, InputError, as_flags, explain_os_error
from dpmac_cli.models.dataset import Data
from dpmac_cli.release.run import RunEvent, resume, train
from dpmac_cli.runs import checkpoint
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.runs.prepare import load
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.results import finished_report
from dpmac_cli.training.memory import keep_freed_memory

#: Seconds between requests to stop.
PATIENCE = 0.2
#: Seconds within which files written by another machine must become visible.
GRACE = 15.0


class LostJobError(Exception):
    """A job ended without a result."""


class Executor(Protocol):
    """Trains runs in other processes or on other machines, at most ``slots`` at a time."""

    slots: int

    def train(self, run: Run, stop: threading.Event) -> str | None:
        """Train a run until it ends; return why it failed. Once ``stop`` is set, ask it to stop.

        Raises LostJobError.
        """


def carry_out(
    executor: Executor, runs: Sequence[Run], numbers: Sequence[int], stop: Callable[[], bool]
) -> Iterator[tuple[int, str | None]]:
    """Carry out some runs of a study; yield the index of each that has ended, and why it failed.

    There is no reason for a run that finished, or was asked to stop. Others go on if the process
    of one dies.

    Args:
        executor: trains the runs. Those that remain at the end are asked to stop.
        runs: all runs of the study.
        numbers: indices of the runs to carry out.
        stop: called between looks at the runs; if True, every run finishes its step and saves.
    """
    asked = threading.Event()
    with ThreadPoolExecutor(executor.slots) as threads:
        started = [] if stop() else numbers
        jobs = {threads.submit(executor.train, runs[n], asked): n for n in started}
        try:
            while jobs:
                ended, _ = wait(jobs, PATIENCE, FIRST_COMPLETED)
                if stop():
                    asked.set()
                    jobs = {job: number for job, number in jobs.items() if not job.cancel()}
                for job in ended:
                    number = jobs.pop(job)
                    yield number, _failure(job, runs[number], asked.is_set())
        finally:
            asked.set()
            for job in jobs:
                job.cancel()


def _failure(job: Future[str | None], run: Run, stopped: bool) -> str | None:
    """Return why a run failed; None if it finished, or was asked to stop."""
    try:
        why = job.result()
    except LostJobError as failure:  # perhaps after its run had finished
        died = f"its process died ({failure}). If memory ran out, use fewer --jobs."
        return None if stopped or finished_report(run) else died
    if stopped or why is not None or _appears(run):
        return why
    return (
        f"it ended on another machine that was asked to stop, or its folder {run.folder} is not "
        "visible here. Set {out} to a folder on shared storage."
    )


def _appears(run: Run) -> bool:
    """Wait until the report of a finished run is visible here; False after :data:`GRACE`."""
    deadline = time.monotonic() + GRACE
    while finished_report(run) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE)
        if run.folder.is_dir():
            os.listdir(run.folder)  # makes a network file system refresh
    return True


#: Signals that ask a job to stop.
REQUESTS = (signal.SIGINT, signal.SIGTERM)
#: Processes are forked from one that has only imported torch.
CONTEXT = processes.get_context("forkserver")

#: Datasets by the value of --dataset.
SharedData = Mapping[str, Data]


def train_job(run: Run, threads: int, data: Data | None = None) -> str | None:
    """Train a run, or resume it, until a signal arrives or the parent of its process has ended.

    Return why it failed, or None. ``data`` are on the run's device; None to load them.
    """
    parent = multiprocessing.parent_process()
    asked = threading.Event()
    for number in REQUESTS:
        signal.signal(number, lambda *_: asked.set())
    torch.set_num_threads(threads)
    keep_freed_memory()

    def stop() -> bool:
        return asked.is_set() or (parent is not None and not parent.is_alive())

    try:
        for _ in _events(run, data, stop):
            pass
    except KeyboardInterrupt:  # asked to stop before its first step
        pass
    except DpmacError as problem:
        return as_flags("\n".join(problem.errors))
    except OSError as problem:
        return explain_os_error(problem)
    except Exception as problem:  # noqa: BLE001  (the other runs continue in any case)
        return f"a bug in dpmac, {what_failed(problem)} For a traceback: dpmac train --debug."
    return None


def _events(run: Run, data: Data | None, stop: Callable[[], bool]) -> Iterator[RunEvent]:
    """Train a run, resuming it from its checkpoint if it has one."""
    plan, where = run.plan, run.folder
    try:
        checkpoint.read(where)
    except InputError:  # there is none
        begun = begun_events(where, plan.planned) if plan.private else ()
        return train(plan, stop, data, earlier=begun)
    flags = {name: getattr(plan.settings, name) for name in ("device", "model", "seed")}
    return resume(where, flags, stop, data)


def share_data(runs: Sequence[Run]) -> dict[str, Data]:
    """Load every dataset once. torch shares the memory of tensors sent to other processes."""
    cpu = torch.device("cpu")
    plans = {run.plan.facts.typed: run.plan for run in runs}
    return {name: load(plan, cpu) for name, plan in plans.items()}


class Pool:
    """Executor that trains runs in processes on this machine, which share ``data``.

    The default of ``jobs`` is one per GPU, or one per core, because a small step uses only one
    core.
    """

    def __init__(self, runs: Sequence[Run], jobs: int | None, data: SharedData) -> None:
        on_gpu = choose_device(runs[0].plan.settings.device).type == "cuda"
        jobs = jobs or (torch.cuda.device_count() if on_gpu else usable_cores())
        self.slots, self.data = min(jobs, len(runs)), data
        self._places = SimpleQueue[int]()
        for place in range(self.slots):
            self._places.put(place)
        CONTEXT.set_forkserver_preload(["__main__", __name__])

    def train(self, run: Run, stop: threading.Event) -> str | None:
        """Train a run in a process until it ends; once ``stop`` is set, ask it to."""
        place, (mine, theirs) = self._places.get(), CONTEXT.Pipe()
        named = run.plan.settings.device
        device = choose_device(named)
        if device.type == "cuda" and ":" not in named:  # distribute processes over GPUs
            device = torch.device("cuda", place % torch.cuda.device_count())
        threads = max(1, torch.get_num_threads() // self.slots)
        # The server that processes are forked from keeps its initial environment variables.
        data = self.data[run.plan.facts.typed]
        arguments = (dict(os.environ), theirs, run.on(str(device)), data, threads)
        process = CONTEXT.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        while not mine.poll(PATIENCE):
            if stop.is_set():
                process.terminate()
                mine.poll(None)
        try:
            result: str | None = mine.recv()
        except (EOFError, OSError):
            process.join()
            code = process.exitcode or 0
            raise LostJobError(f"signal {-code}" if code < 0 else f"exit code {code}") from None
        finally:
            self._places.put(place)
        process.join()
        return result


def _work(
    variables: Mapping[str, str], pipe: Connection, run: Run, data: Data, threads: int
) -> None:
    """Train one run and send its result: the main function of a process."""
    os.environ.clear()
    os.environ.update(variables)
    # A network may print to stdout, which a program may parse.
    with contextlib.redirect_stdout(sys.stderr):
        pipe.send(train_job(run, threads, data.to(torch.device(run.plan.settings.device))))
