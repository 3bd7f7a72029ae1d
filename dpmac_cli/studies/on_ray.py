"""Training runs on a Ray cluster: each is a task, and says how far it is as it goes.

What travels are configurations, events and the request to stop. Records do not: each task loads
them where it runs, and writes its run's folder, from and to storage that all machines share.
"""

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.errors import InputError, explain_os_error
from dpmac_cli.studies.executors import PATIENCE, Ended, Moved, RunEvent, died, told

#: Nothing is reported to Ray's makers. Read when ray is loaded.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: For a cluster of our own: no web page, and the least memory for objects, which are small here.
OWN = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
#: Variables of the command's environment that say where things lie.
PLACES = ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR")
#: Seconds that a cluster may take to answer.
ANSWER = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be part of a Ray cluster: the one named, else that of RAY_ADDRESS, else one of our own.

    Raises:
        InputError: it does not answer.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # What Ray has to say would go to stdout, where the table goes.
    ray._private.worker._worker_logs_enabled = False
    try:
        _reach(where)
        own = OWN if where == "local" else {}
        ray.init(where, log_to_driver=False, logging_level="CRITICAL", **own)
    except (OSError, ValueError, RuntimeError) as failure:
        why = str(failure).splitlines()[0]
        raise InputError(
            f"No Ray cluster can be used at {where} ({why}). Start one with ray start --head, or "
            "leave --cluster and RAY_ADDRESS out."
        ) from failure
    finally:
        for number, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Ray itself waits for minutes for what is not there. Raises OSError, ValueError."""
    if where.startswith("ray://"):
        raise ValueError("a Ray client cannot do it: run dpmac on a machine of the cluster")
    host, _, port = where.rpartition(":")
    if host and port.isdecimal() and "/" not in where:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


@dataclass
class _Task:
    """A run on the cluster: its last step, whether it has reported anything, and its end."""

    number: int
    step: int = 0
    begun: bool = False
    over: bool = False


@dataclass
class Cluster:
    """Carries out runs on the cluster that this process is connected to.

    Attributes:
        configs: of the runs, each with its ``out``.
        jobs: runs at a time; None for one a core or GPU of the cluster.
        stop: asked between events; True lets every run finish its step, save and end.
    """

    configs: Sequence[TrainConfig]
    jobs: int | None
    stop: Callable[[], bool]
    _waiting: deque[int] = field(default_factory=deque)
    _attempts: dict[int, int] = field(default_factory=dict)
    _asked: bool = False

    def __post_init__(self) -> None:
        there = ray.cluster_resources()
        self._kinds = [resource(config.device, there) for config in self.configs]
        self.jobs = self.jobs or int(there[self._kinds[0]])

    def events(self, numbers: Sequence[int]) -> Iterator[RunEvent]:
        """Carry out some of the runs, and say what happens."""
        assert self.jobs is not None  # noqa: S101
        self._waiting.extend(numbers)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        request = ray.remote(threading.Event).options(num_cpus=0, scheduling_strategy=here).remote()
        tasks: dict[Any, _Task] = {}
        while tasks or self._waiting:
            if not self._asked and self.stop():
                self._ask(tasks, request)
            while self._waiting and len(tasks) < self.jobs:
                number = self._waiting.popleft()
                tasks[self._begin(number, request)] = _Task(number)
            heard, _ = ray.wait(list(tasks), timeout=PATIENCE)
            for words in heard:
                yield from self._hear(words, tasks)

    def _ask(self, tasks: Mapping[Any, _Task], request: Any) -> None:
        """Have every run finish its step, save and end; those that wait for room never begin."""
        self._asked = True
        self._waiting.clear()
        request.set.remote()
        for words, task in tasks.items():
            if not task.begun:
                ray.cancel(words)

    def _begin(self, number: int, request: Any) -> Any:
        """Hand in a run: what it will say."""
        self._attempts[number] = self._attempts.get(number, 0) + 1
        gpus = int(self._kinds[number] == "GPU")
        train = ray.remote(_train).options(
            num_returns="streaming", max_retries=0, num_cpus=1, num_gpus=gpus
        )
        places = {name: os.environ[name] for name in PLACES if name in os.environ}
        return train.remote(number, self.configs[number], os.getcwd(), places, request)

    def _hear(self, words: Any, tasks: dict[Any, _Task]) -> Iterator[RunEvent]:
        """What a task says next, or its end."""
        task = tasks[words]
        why = "it ended without a word"
        try:
            event: RunEvent = ray.get(next(words))
        except StopIteration:
            pass
        except RayTaskError as failure:
            why = (str(failure).strip().splitlines() or ["an error"])[-1]
        except RayError as failure:
            why = type(failure).__name__
        else:
            task.begun = True
            if isinstance(event, Moved):
                task.step = event.step
                yield event
            else:
                task.over = True
                attempt = self._attempts[task.number]
                config = self.configs[task.number]
                yield self._again(told(config, event, task.step, attempt, stopped=self._asked))
            return
        del tasks[words]
        if not task.over and not self._asked:
            yield self._again(died(task.number, self._attempts[task.number], why))

    def _again(self, ended: Ended) -> Ended:
        """Have a run begun again, if it is to be."""
        if ended.again:
            self._waiting.appendleft(ended.number)
        return ended


def resource(device: str, there: Mapping[str, float]) -> str:
    """What a run takes one of: "CPU" or "GPU".

    Args:
        device: of the runs: auto, cpu or cuda.
        there: what the cluster has.

    Raises:
        InputError: the cluster has none.
    """
    gpu = device == "cuda" or (device == "auto" and there.get("GPU", 0) >= 1)
    kind = "GPU" if gpu else "CPU"
    if there.get(kind, 0) < 1:
        raise InputError(f"The Ray cluster has no {kind}. Add a machine that has, or use --device.")
    return kind


def _train(
    number: int, config: TrainConfig, folder: str, places: Mapping[str, str], request: Any
) -> Iterator[RunEvent]:
    """A task's life: one run, as if it were started where the command was."""
    import torch  # noqa: PLC0415  (which the process of the request does without)

    from dpmac_cli.studies.local import carry_out  # noqa: PLC0415

    try:
        os.chdir(folder)
    except OSError as failure:
        yield Ended(number, f"on another machine: {explain_os_error(failure)}")
        return
    os.environ.update(places)
    torch.set_num_threads(1)
    yield from newest(carry_out(number, config, None, _question(request)))


def _question(request: Any) -> Callable[[], bool]:
    """A question to ask between steps: are the runs asked to stop? It travels now and then only."""
    asked, due = False, 0.0

    def stop() -> bool:
        nonlocal asked, due
        if not asked and time.monotonic() >= due:
            try:
                asked = bool(ray.get(request.is_set.remote()))
            except RayError:  # nobody is there any more who could ask
                asked = True
            due = time.monotonic() + PATIENCE
        return asked

    return stop


def newest(events: Iterable[RunEvent]) -> Iterator[RunEvent]:
    """Events, but no more than anyone looks at: of those that come in quick succession the last."""
    held: RunEvent | None = None
    due = 0.0
    for event in events:
        held = event if isinstance(event, Moved) else held
        if held is not None and (event is not held or time.monotonic() >= due):
            yield held
            held, due = None, time.monotonic() + PATIENCE
        if isinstance(event, Ended):
            yield event
