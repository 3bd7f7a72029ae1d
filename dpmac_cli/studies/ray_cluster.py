"""Runs as tasks on a Ray cluster."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from dpmac_cli.errors import InputError, explain_os_error
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.local import PATIENCE, LostJobError, train_job

#: Options of a cluster that dpmac starts: no dashboard, and little memory, as objects are small.
OWN = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
#: Environment variables to pass to tasks.
PLACES = ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR")
#: Seconds to wait for a cluster's answer.
ANSWER = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster: the given one, RAY_ADDRESS, or a new one on this machine.

    Ray's usage statistics are off. Raises InputError if the cluster does not answer.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        _reach(where)
        own = OWN if where == "local" else {}
        ray.init(where, log_to_driver=False, logging_level="CRITICAL", **own)
    except (OSError, ValueError, RuntimeError) as failure:
        raise InputError(
            f"No Ray cluster can be used at {where} ({str(failure).splitlines()[0]}). Start one "
            "with ray start --head, or leave out --cluster and RAY_ADDRESS."
        ) from failure
    finally:
        for number, handler in handlers.items():  # Ray replaces the handlers
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Check that an address answers; Ray would wait for minutes. Raises OSError or ValueError."""
    if where.startswith("ray://"):
        raise ValueError("Ray clients are not supported: run dpmac on a machine of the cluster")
    host, _, port = where.rpartition(":")
    if host and port.isdecimal() and "/" not in where:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


class Tasks:
    """Executor that trains runs as tasks on the connected cluster.

    ``jobs`` tasks run at a time; None for one per core or GPU of the cluster.
    """

    def __init__(self, runs: Sequence[Run], jobs: int | None) -> None:
        there = ray.cluster_resources()
        # Other machines choose among their own GPUs.
        self._device = runs[0].plan.settings.device.partition(":")[0]
        self._gpu = self._device == "cuda" or (self._device == "auto" and there.get("GPU", 0) >= 1)
        kind = "GPU" if self._gpu else "CPU"
        if there.get(kind, 0) < 1:
            raise InputError(f"The Ray cluster has no {kind}. Add a machine, or use --device.")
        self.slots = jobs or int(there[kind])

    def train(self, run: Run, stop: threading.Event) -> str | None:
        """Train a run as a task until it ends; once ``stop`` is set, ask it to."""
        places = {name: os.environ[name] for name in PLACES if name in os.environ}
        task = ray.remote(_train).options(max_retries=0, num_cpus=1, num_gpus=int(self._gpu))
        job = task.remote(run.on(self._device), os.getcwd(), places)
        try:
            while not ray.wait([job], timeout=PATIENCE)[0]:
                if stop.is_set():
                    ray.cancel(job)
                    ray.wait([job])
            result: str | None = ray.get(job)
        except RayError as failure:
            raise LostJobError(str(failure).strip().rpartition("\n")[2]) from None
        return result


def _train(run: Run, folder: str, places: Mapping[str, str]) -> str | None:
    """Train one run in the command's folder: the main function of a task."""
    try:
        os.chdir(folder)
    except OSError as failure:
        return f"on another machine: {explain_os_error(failure)}"
    os.environ.update(places)
    return train_job(run, 1)
