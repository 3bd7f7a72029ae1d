"""Training runs side by side, each in a process that may die without harm to the others."""

import contextlib
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from statistics import fmean
from typing import Any

import torch
import torch.multiprocessing as processes

from dpmac_cli.config.budget import training_event
from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import DpmacError, explain_os_error
from dpmac_cli.runs import train as run
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.ledger import attempts
from dpmac_cli.runs.setup import make_task, make_trainer, outcome
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.studies.executors import PATIENCE, Ended, Moved, RunEvent, died, usable_cores
from dpmac_cli.studies.grid import Grid
from dpmac_cli.torch_errors import device_lost, what_failed
from dpmac_cli.training.loop import Evaluated
from dpmac_cli.training.trainer import Trainer

SPAWN = processes.get_context("spawn")
#: Steps that --dry-run times, and seconds after which it times no more of a configuration.
TIMED_STEPS, TIMED_SECONDS = 3, 3.0
#: Records, with their views, that it begins with, and how many times more it takes next.
FIRST_BATCH, GROWTH = 16, 8
#: Settings that change nothing about how long a step takes.
UNTIMED = (
    *("sigma", "epsilon", "delta", "epochs", "steps", "lr", "clip_norm", "beta1", "beta2", "gamma"),
    *("gamma_prime", "h1", "h2", "warmup_steps", "seed", "out", "compile"),
)


def default_jobs(device: str) -> int:
    """Processes that serve best: one a GPU, or one a core, since a small step fills only one."""
    if choose_device(device).type == "cuda":
        return torch.cuda.device_count()
    return usable_cores()


def share_data(configs: Sequence[TrainConfig]) -> dict[str | Source, Data]:
    """Every data set once, in memory that processes share."""
    shared = {}
    for config in configs:
        if config.data not in shared:
            there, cpu = data_folder(config.data_dir), torch.device("cpu")
            data = load_data(config.data, there, cpu, facts=config.facts)
            for tensor in (*vars(data.train).values(), *vars(data.test).values()):
                tensor.share_memory_()
            shared[config.data] = data
    return shared


@dataclass(frozen=True)
class Timed:
    """A configuration is about to be timed.

    Attributes:
        number: of the first run that has it. done, count: timed before, and to be timed in all.
    """

    number: int
    done: int
    count: int


def step_times(grid: Grid) -> Generator[Timed, None, dict[int, float]]:
    """How long a step takes, in seconds, by the first run of each cell.

    Cells that differ by what takes no time are timed once, each in this process on one thread, as
    the workers work where they are one a core, and without --compile, which would take long.
    """
    data = share_data([planned.config for planned in grid.runs])
    cells: dict[Any, int] = {}
    for number, planned in enumerate(grid.runs):
        cells.setdefault((planned.labels, planned.column), number)
    left_out: dict[str, Any] = dict.fromkeys(UNTIMED)
    kinds = {number: replace(grid.runs[number].config, **left_out) for number in cells.values()}
    seconds: dict[TrainConfig, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, kind in kinds.items():
            if kind not in seconds:
                yield Timed(number, len(seconds), len(set(kinds.values())))
                config = replace(grid.runs[number].config, compile=False)
                seconds[kind] = _step_time(config, data)
    finally:
        torch.set_num_threads(threads)
    return {number: seconds[kind] for number, kind in kinds.items()}


def _step_time(config: TrainConfig, data: Mapping[str | Source, Data]) -> float:
    """Of a whole step or, where that would take too long, of as large a part as would not."""
    device = choose_device(config.device)
    there = _moved(data[config.data], device)
    views = config.augmentations or 1
    batch = min(config.batch_size, max(1, FIRST_BATCH // views))
    while True:
        part = replace(config, batch_size=batch, sampler="fixed-size")
        task = outcome(make_task(part, device, data=there, timing=True))
        taken = _time_of(make_trainer(part, TIMED_STEPS + 1, device, task=task))
        if batch == config.batch_size or taken * GROWTH > TIMED_SECONDS:
            return taken * config.batch_size / batch
        batch = min(config.batch_size, batch * GROWTH)


def _time_of(trainer: Trainer) -> float:
    """A step's, the first one left out where there is time for more."""
    taken: list[float] = []
    while len(taken) <= TIMED_STEPS and sum(taken) < TIMED_SECONDS:
        begin = time.perf_counter()
        trainer.step()
        if trainer.state.theta.is_cuda:
            torch.cuda.synchronize(trainer.state.theta.device)
        taken.append(time.perf_counter() - begin)
    return fmean(taken[1:] or taken)


@dataclass
class _Worker:
    """A process and the run that it has in hand."""

    process: Any
    pipe: Connection
    number: int | None = None


@dataclass
class Pool:
    """Carries out runs, some at a time.

    Attributes:
        configs: of the runs, each with its ``out``.
        jobs: processes at a time.
        data: by name, see :func:`share_data`.
        stop: asked between events; True lets every run finish its step, save and end.
    """

    configs: Sequence[TrainConfig]
    jobs: int
    data: Mapping[str | Source, Data]
    stop: Callable[[], bool]
    _waiting: deque[int] = field(default_factory=deque)
    _attempts: Counter[int] = field(default_factory=Counter)

    def events(self, numbers: Sequence[int]) -> Iterator[RunEvent]:
        """Carry out some of the runs, and say what happens."""
        asked = SPAWN.Event()
        self._waiting.extend(numbers)
        count = min(self.jobs, len(numbers))
        threads = max(1, torch.get_num_threads() // max(1, count))
        workers = [self._begin(asked, index, threads) for index in range(count)]
        try:
            while busy := {worker.pipe: worker for worker in workers if worker.number is not None}:
                if not asked.is_set() and self.stop():
                    asked.set()
                    self._waiting.clear()
                for worker in [busy[pipe] for pipe in wait(list(busy), PATIENCE)]:  # type: ignore[index]
                    yield from self._hear(worker, asked)
                    if worker.number is None and self._waiting:
                        if worker.process.is_alive():
                            self._give(worker)
                        else:
                            index = workers.index(worker)
                            workers[index] = self._begin(asked, index, threads)
        finally:
            asked.set()
            for worker in workers:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
                worker.process.join()

    def _begin(self, asked: Event, index: int, threads: int) -> _Worker:
        mine, theirs = SPAWN.Pipe()
        arguments = (theirs, asked, self.data, index, threads, os.getpid())
        process = SPAWN.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        worker = _Worker(process, mine)
        self._give(worker)
        return worker

    def _give(self, worker: _Worker) -> None:
        worker.number = self._waiting.popleft() if self._waiting else None
        if worker.number is not None:
            self._attempts[worker.number] += 1
            worker.pipe.send((worker.number, self.configs[worker.number]))

    def _hear(self, worker: _Worker, asked: Event) -> Iterator[RunEvent]:
        """Yield what a worker says, or its death unless it was asked to end."""
        assert worker.number is not None  # noqa: S101
        try:
            event: RunEvent = worker.pipe.recv()
            said = True
        except (EOFError, OSError):
            worker.process.join()
            code, said = worker.process.exitcode, not asked.is_set()
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            event = died(worker.number, self._attempts[worker.number], why)
            if event.again:
                self._waiting.appendleft(worker.number)
        if isinstance(event, Ended):
            worker.number = None
        if said:
            yield event


def _work(
    pipe: Connection,
    asked: Event,
    data: Mapping[str | Source, Data],
    index: int,
    threads: int,
    parent: int,
) -> None:
    """A process's life: a run after another, until there is none."""
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
        # What a network prints: the parent's stdout may be for a program.
        with contextlib.redirect_stdout(sys.stderr):
            for event in carry_out(number, config, on_device[place], stop):
                pipe.send(event)
                if isinstance(event, Ended) and event.broken:
                    return  # and another process takes the other runs


def _moved(data: Data, device: torch.device) -> Data:
    train, test = (
        Split(part.images.to(device), part.labels.to(device)) for part in (data.train, data.test)
    )
    return Data(train, test, data.gain.to(device), data.offset.to(device))


def carry_out(
    number: int, config: TrainConfig, data: Data | None, stop: Callable[[], bool]
) -> Iterator[RunEvent]:
    """Train a run, or go on with it, and say how it ended.

    Args:
        number: of the run.
        config: with its ``out``.
        data: on the run's device; None to load it.
        stop: asked after every step. Before the first one it ends the run without a word.
    """
    failure, broken = None, False
    try:
        for event in _events(config, data, stop):
            yield Moved(number, *event)
    except KeyboardInterrupt:  # asked to stop before its first step
        return
    except DpmacError as problem:
        failure = str(problem)
        broken = problem.__cause__ is not None and device_lost(problem.__cause__)
    except OSError as problem:
        failure = explain_os_error(problem)
    except Exception as problem:  # noqa: BLE001  (whatever it is, the others go on)
        failure = f"a bug in dpmac, {what_failed(problem)} dpmac train --debug shows all of it."
    yield Ended(number, failure, broken=broken)


def _events(
    config: TrainConfig, data: Data | None, stop: Callable[[], bool]
) -> Iterator[tuple[int, int, float | None]]:
    """Train a run, or go on with it where that gives the very same result."""
    assert config.out is not None  # noqa: S101
    steps, accuracy = config.total_steps, None
    if run.goes_on_exactly(config.out, config.device):
        flags = {"device": config.device, "model": config.model}
        events = run.resume(config.out, flags, stop, data)
    else:  # what was done before, in a run that cannot be repeated here, is charged to the study
        before = () if config.no_dp else attempts(config.out, training_event(config))
        events = run.train(config, stop, data, abandoned=before)
    for event in events:
        if isinstance(event, run.Started):
            yield event.done, steps, accuracy
        elif isinstance(event, run.Update):
            if isinstance(event.event, Evaluated):
                accuracy = event.event.result.accuracy
            yield event.event.step, steps, accuracy
