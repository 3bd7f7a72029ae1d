"""Runs in processes on this machine; one that dies does not affect the others."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.multiprocessing as processes

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.studies.executor import PATIENCE, Died, Ended, RunEvent, usable_cores
from dpmac_cli.studies.worker import train_run

SPAWN = processes.get_context("spawn")

#: Data sets by what --dataset names.
SharedData = Mapping[str | Source, Data]


def default_jobs(device: str) -> int:
    """Return one process per GPU, or one per core, since a small step fills only one."""
    if choose_device(device).type == "cuda":
        return torch.cuda.device_count()
    return usable_cores()


def share_data(configs: Sequence[TrainPlan]) -> dict[str | Source, Data]:
    """Load every data set once, into memory that processes share."""
    shared = {}
    for config in configs:
        if config.data not in shared:
            data = load_data(config.data, config.data_dir, torch.device("cpu"), facts=config.facts)
            for tensor in (*vars(data.train).values(), *vars(data.test).values()):
                tensor.share_memory_()
            shared[config.data] = data
    return shared


@dataclass
class _Worker:
    """A process, and the run that it is training."""

    process: Any
    pipe: Connection
    number: int


@dataclass
class Pool:
    """Executor with up to ``jobs`` worker processes on this machine, which share ``data``."""

    configs: Sequence[TrainPlan]
    jobs: int
    data: SharedData
    _asked: Event = field(default_factory=SPAWN.Event)
    _busy: dict[int, _Worker] = field(default_factory=dict)  # by index, which chooses the GPU
    _idle: dict[int, _Worker] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Number of processes at a time."""
        return min(self.jobs, len(self.configs))

    def start(self, numbers: Sequence[int]) -> None:
        """Give runs to idle processes, or to new ones."""
        for number in numbers:
            index = min(set(range(self.slots)) - self._busy.keys())
            worker = self._idle.pop(index, None)
            if worker is None or not worker.process.is_alive():
                worker = self._new_worker(index)
            worker.number = number
            self._busy[index] = worker
            with contextlib.suppress(OSError):  # it died meanwhile, and poll() will see it
                worker.pipe.send((number, self.configs[number]))

    def _new_worker(self, index: int) -> _Worker:
        mine, theirs = SPAWN.Pipe()
        # The same in every call of the same command, or runs could not be resumed exactly.
        threads = max(1, torch.get_num_threads() // self.slots)
        arguments = (theirs, self._asked, self.data, index, threads, os.getpid())
        process = SPAWN.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        return _Worker(process, mine, -1)

    def poll(self) -> Iterator[RunEvent | Died]:
        """Wait for workers and yield an event of each that has one."""
        waiting = {worker.pipe: index for index, worker in self._busy.items()}
        for pipe in wait(list(waiting), PATIENCE):
            yield self._hear(waiting[pipe])  # type: ignore[index]

    def _hear(self, index: int) -> RunEvent | Died:
        """Return the next event of a worker, or its death."""
        worker = self._busy[index]
        try:
            event: RunEvent = worker.pipe.recv()
        except (EOFError, OSError):
            del self._busy[index]
            worker.process.join()
            code = worker.process.exitcode
            return Died(worker.number, f"signal {-code}" if code < 0 else f"exit code {code}")
        if isinstance(event, Ended):
            del self._busy[index]
            if event.broken:
                worker.process.join()
            else:
                self._idle[index] = worker
        return event

    def ask_to_stop(self) -> None:
        """Ask every run to finish its step, save and end."""
        self._asked.set()

    def close(self) -> None:
        """Stop the workers and wait for them."""
        self._asked.set()
        for worker in (*self._busy.values(), *self._idle.values()):
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
            worker.process.join()


def _work(
    pipe: Connection, asked: Event, data: SharedData, index: int, threads: int, parent: int
) -> None:
    """Train one run after another, until there is none: the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def stop() -> bool:
        return asked.is_set() or os.getppid() != parent

    on_device: dict[tuple[str | Source, str], Data] = {}
    while not stop() and (task := pipe.recv()) is not None:
        number, config = task
        device = choose_device(config.device)
        if device.type == "cuda" and ":" not in config.device:  # the workers share out the GPUs
            device = torch.device("cuda", index % torch.cuda.device_count())
        config = replace(config, device=str(device))
        place = (config.data, config.device)
        if place not in on_device:
            on_device[place] = _moved(data[config.data], device)
        # A network may print, and the parent's stdout may be read by a program.
        with contextlib.redirect_stdout(sys.stderr):
            for event in train_run(number, config, on_device[place], stop):
                pipe.send(event)
                if isinstance(event, Ended) and event.broken:
                    return  # another process takes the other runs


def _moved(data: Data, device: torch.device) -> Data:
    train, test = (
        Split(part.images.to(device), part.labels.to(device)) for part in (data.train, data.test)
    )
    return Data(train, test, data.gain.to(device), data.offset.to(device))
