"""Runs in processes on this machine; one that dies does not affect the others."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as processes

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.studies.cluster import Cluster, LostError, Result, train_job
from dpmac_cli.studies.executor import usable_cores

#: Processes are forked from one that has loaded torch, and nothing else.
CONTEXT = processes.get_context("forkserver")

#: Data sets by what --dataset names.
SharedData = Mapping[str | Source, Data]


def default_jobs(device: str) -> int:
    """Return one process per GPU, or one per core, since a small step fills only one."""
    if choose_device(device).type == "cuda":
        return torch.cuda.device_count()
    return usable_cores()


def share_data(plans: Sequence[TrainPlan]) -> dict[str | Source, Data]:
    """Load every data set once, into memory that processes share."""
    shared = {}
    for plan in plans:
        if plan.data not in shared:
            data = load_data(plan.data, plan.data_dir, torch.device("cpu"), facts=plan.facts)
            for tensor in (*vars(data.train).values(), *vars(data.test).values()):
                tensor.share_memory_()
            shared[plan.data] = data
    return shared


@dataclass
class _Worker:
    """A process that trains one run, and its place among those of the pool."""

    process: Any
    pipe: Connection
    place: int


class Pool(Cluster):
    """Executor with up to ``jobs`` processes at a time on this machine, which share ``data``."""

    pause = 0.05

    def __init__(self, plans: Sequence[TrainPlan], jobs: int, data: SharedData) -> None:
        super().__init__(plans, min(jobs, len(plans)))
        self.data = data
        self._places = list(range(self.slots))
        # The same in every call of the same command, or runs could not be resumed exactly.
        self._threads = max(1, torch.get_num_threads() // self.slots)
        CONTEXT.set_forkserver_preload(["__main__", __name__])

    def _submit(self, plans: Sequence[TrainPlan]) -> Sequence[_Worker]:
        return [self._begin(plan) for plan in plans]

    def _begin(self, plan: TrainPlan) -> _Worker:
        place = self._places.pop(0)
        mine, theirs = CONTEXT.Pipe()
        # What a process is forked from keeps the folder and the variables that it began with.
        arguments = (theirs, plan, self.data[plan.data], place, self._threads)
        process = CONTEXT.Process(target=_at, args=(os.getcwd(), dict(os.environ), *arguments))
        process.start()
        theirs.close()
        return _Worker(process, mine, place)

    def _result(self, job: _Worker) -> Result | None:
        if not job.pipe.poll():
            return None
        self._places.append(job.place)
        try:
            result: Result = job.pipe.recv()
        except (EOFError, OSError):
            job.process.join()
            code = job.process.exitcode
            raise LostError(f"signal {-code}" if code < 0 else f"exit code {code}") from None
        job.process.join()
        return result

    def _cancel(self, job: _Worker) -> None:
        job.process.terminate()

    def close(self) -> None:
        """Stop the processes and wait for them."""
        super().close()
        for job in self._jobs.values():
            job.process.join()


def _at(folder: str, variables: Mapping[str, str], *arguments: Any) -> None:
    """Train one run where the command is: the main function of a process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    _work(*arguments)


def _work(pipe: Connection, plan: TrainPlan, data: Data, place: int, threads: int) -> None:
    """Train one run, and send its result."""
    device = choose_device(plan.device)
    if device.type == "cuda" and ":" not in plan.device:  # the processes share out the GPUs
        device = torch.device("cuda", place % torch.cuda.device_count())
    train, test = data.train.to(device), data.test.to(device)
    moved = Data(train, test, data.gain.to(device), data.offset.to(device))
    # A network may print, and the parent's stdout may be read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        pipe.send(train_job(replace(plan, device=str(device)), threads, moved))
