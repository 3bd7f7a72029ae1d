"""Runs as tasks on a Ray cluster."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dpmac_cli.errors import InputError, explain_os_error
from dpmac_cli.studies.executor import Executor, Result
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.local import train_job

#: Options of a cluster that dpmac starts: no dashboard, and little memory, as objects are small.
OWN = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
#: Environment variables to pass to tasks.
PLACES = ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR")
#: Environment variable that turns off Ray's usage statistics.
STATISTICS = ("RAY_USAGE_STATS_ENABLED", "0")
#: Seconds to wait for a cluster's answer.
ANSWER = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster: the given one, RAY_ADDRESS, or a new one on this machine.

    Raises InputError if it does not answer.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with _quiet():
        try:
            _reach(where)
            own = OWN if where == "local" else {}
            ray.init(where, log_to_driver=False, logging_level="CRITICAL", **own)
        except (OSError, ValueError, RuntimeError) as failure:
            why = str(failure).splitlines()[0]
            raise InputError(
                f"No Ray cluster can be used at {where} ({why}). Start one with ray start --head, "
                "or leave out --cluster and RAY_ADDRESS."
            ) from failure
        finally:
            for number, handler in handlers.items():  # Ray replaces the handlers
                signal.signal(number, handler)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off Ray's usage statistics and its messages on stdout, and restore both afterwards."""
    worker, (name, off) = ray._private.worker, STATISTICS
    messages, statistics = worker._worker_logs_enabled, os.environ.get(name)
    worker._worker_logs_enabled = False
    os.environ[name] = off
    try:
        yield
    finally:
        worker._worker_logs_enabled = messages
        del os.environ[name]
        if statistics is not None:
            os.environ[name] = statistics


def _reach(where: str) -> None:
    """Check that an address answers; Ray would wait for minutes. Raises OSError or ValueError."""
    if where.startswith("ray://"):
        raise ValueError("Ray clients are not supported: run dpmac on a machine of the cluster")
    host, _, port = where.rpartition(":")
    if host and port.isdecimal() and "/" not in where:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


class Tasks(Executor[Any]):
    """Executor that trains runs as tasks on the connected cluster.

    ``jobs`` tasks run at a time; None for one per core or GPU of the cluster.
    """

    def __init__(self, runs: Sequence[Run], jobs: int | None) -> None:
        self._there = ray.cluster_resources()
        # Other machines choose among their own GPUs.
        runs = [run.on(run.plan.run.device.partition(":")[0]) for run in runs]
        kinds = [resource(run.plan.run.device, self._there) for run in runs]
        super().__init__(runs, jobs or int(self._there[kinds[0]]))

    def submit(self, run: Run) -> Any:
        """Start a task for a run."""
        places = {name: os.environ[name] for name in PLACES if name in os.environ}
        gpus = int(resource(run.plan.run.device, self._there) == "GPU")
        train = ray.remote(_train).options(max_retries=0, num_cpus=1, num_gpus=gpus)
        return train.remote(run, os.getcwd(), places)

    def result(self, job: Any) -> Result | None:
        """Return the result of a task, or why it ended without one; None while it runs."""
        try:
            result: Result | None = ray.get(job) if ray.wait([job], timeout=0)[0] else None
        except RayTaskError as failure:
            return str(failure).strip().rpartition("\n")[2], None
        except RayError as failure:
            return type(failure).__name__, None
        return result

    def cancel(self, job: Any) -> None:
        """Ask a task to stop, or remove it from the queue."""
        ray.cancel(job)


def resource(device: str, there: Mapping[str, float]) -> str:
    """Return the resource that a run on a device occupies: "CPU" or "GPU".

    ``there`` are the cluster's resources. Raises InputError if it has no such resource.
    """
    gpu = device == "cuda" or (device == "auto" and there.get("GPU", 0) >= 1)
    kind = "GPU" if gpu else "CPU"
    if there.get(kind, 0) < 1:
        raise InputError(f"The Ray cluster has no {kind}. Add a machine with one, or use --device.")
    return kind


def _train(run: Run, folder: str, places: Mapping[str, str]) -> Result:
    """Train one run in the command's folder: the main function of a task."""
    try:
        os.chdir(folder)
    except OSError as failure:
        return f"on another machine: {explain_os_error(failure)}", 0
    os.environ.update(places)
    return train_job(run, 1)
