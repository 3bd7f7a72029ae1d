"""Runs as tasks on a Ray cluster.

Only settings, events and the request to stop are sent. Each task loads the records where it runs,
from storage that all machines share, and writes its run's folder there.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.errors import InputError, explain_os_error
from dpmac_cli.studies.executor import PATIENCE, Died, Ended, Moved, RunEvent

#: No usage statistics are sent. Read when ray is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: For a cluster that dpmac starts: no dashboard, and little memory for objects, which are small.
OWN = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
#: Environment variables of the command that tasks need.
PLACES = ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR")
#: Seconds to wait for a cluster's answer.
ANSWER = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster: the one named, that of RAY_ADDRESS, or a new one on this machine.

    Raises:
        InputError: it does not answer.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Ray's own messages would go to stdout, where the table goes.
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
        for number, handler in handlers.items():  # Ray replaces them
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Check that an address answers, as Ray would wait for minutes. Raises OSError, ValueError."""
    if where.startswith("ray://"):
        raise ValueError("a Ray client cannot do it: run dpmac on a machine of the cluster")
    host, _, port = where.rpartition(":")
    if host and port.isdecimal() and "/" not in where:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


@dataclass
class _Task:
    """A run on the cluster: whether it has reported anything, and how it ended."""

    number: int
    begun: bool = False
    ended: Ended | None = None


class Cluster:
    """Executor on the Ray cluster that this process is connected to.

    Args:
        configs: of all runs, each with its ``out``.
        jobs: runs at a time; None for one per core or GPU of the cluster.
    """

    def __init__(self, configs: Sequence[TrainPlan], jobs: int | None) -> None:
        there = ray.cluster_resources()
        self._configs = configs
        self._kinds = [resource(config.device, there) for config in configs]
        self.slots = jobs or int(there[self._kinds[0]])
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        request = ray.remote(threading.Event).options(num_cpus=0, scheduling_strategy=here)
        self._request = request.remote()
        self._tasks: dict[Any, _Task] = {}  # by their streams of events

    def start(self, numbers: Sequence[int]) -> None:
        """Submit runs as tasks that stream their events."""
        places = {name: os.environ[name] for name in PLACES if name in os.environ}
        for number in numbers:
            gpus = int(self._kinds[number] == "GPU")
            train = ray.remote(_train).options(
                num_returns="streaming", max_retries=0, num_cpus=1, num_gpus=gpus
            )
            arguments = (number, self._configs[number], os.getcwd(), places, self._request)
            self._tasks[train.remote(*arguments)] = _Task(number)

    def poll(self) -> Iterator[RunEvent | Died]:
        """Wait for tasks and yield an event of each that has one."""
        heard, _ = ray.wait(list(self._tasks), timeout=PATIENCE)
        for stream in heard:
            task = self._tasks[stream]
            why = "it ended without a word"
            try:
                event: RunEvent = ray.get(next(stream))
            except StopIteration:
                pass
            except RayTaskError as failure:
                why = str(failure).strip().rpartition("\n")[2]
            except RayError as failure:
                why = type(failure).__name__
            else:
                task.begun = True
                if isinstance(event, Moved):
                    yield event
                else:  # told when the task has ended, too, and given its place back
                    task.ended = event
                continue
            del self._tasks[stream]
            yield task.ended or Died(task.number, why)

    def ask_to_stop(self) -> None:
        """Ask every run to finish its step, save and end; cancel tasks that wait for room."""
        self._request.set.remote()
        for stream, task in self._tasks.items():
            if not task.begun:
                ray.cancel(stream)

    def close(self) -> None:
        """Do nothing: tasks end with the connection to the cluster."""


def resource(device: str, there: Mapping[str, float]) -> str:
    """Return the resource that a run takes one of: "CPU" or "GPU".

    Args:
        device: of the run: auto, cpu or cuda.
        there: resources of the cluster.

    Raises:
        InputError: the cluster has none.
    """
    gpu = device == "cuda" or (device == "auto" and there.get("GPU", 0) >= 1)
    kind = "GPU" if gpu else "CPU"
    if there.get(kind, 0) < 1:
        raise InputError(f"The Ray cluster has no {kind}. Add a machine that has, or use --device.")
    return kind


def _train(
    number: int, config: TrainPlan, folder: str, places: Mapping[str, str], request: Any
) -> Iterator[RunEvent]:
    """Train one run as if it were started where the command was: the main function of a task."""
    import torch  # noqa: PLC0415  (not needed in the process that holds the request to stop)

    from dpmac_cli.studies.worker import train_run  # noqa: PLC0415  (loads torch)

    try:
        os.chdir(folder)
    except OSError as failure:
        yield Ended(number, f"on another machine: {explain_os_error(failure)}")
        return
    os.environ.update(places)
    torch.set_num_threads(1)
    yield from train_run(number, config, None, _stop_of(request))


def _stop_of(request: Any) -> Callable[[], bool]:
    """Return a function that tells whether the runs were asked to stop; it asks now and then."""
    asked, due = False, 0.0

    def stop() -> bool:
        nonlocal asked, due
        if not asked and time.monotonic() >= due:
            try:
                asked = bool(ray.get(request.is_set.remote()))
            except RayError:  # the command that could ask is gone
                asked = True
            due = time.monotonic() + PATIENCE
        return asked

    return stop
