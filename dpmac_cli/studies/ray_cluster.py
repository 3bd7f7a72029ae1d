"""Runs as tasks on a Ray cluster, each of which is a command ``dpmac train``."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from dpmac_cli.errors import DpmacError, InputError, as_flags, explain_os_error
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.local import PATIENCE, Command, Job
from dpmac_cli.studies.results import finished_report

#: Options of a cluster that dpmac starts: no dashboard, and little memory, as objects are small.
NEW_CLUSTER = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
#: Environment variables to pass to tasks.
PLACES = ("DPMAC_DATA_DIR", "DPMAC_CACHE_DIR")
#: Signals that ask a task to stop.
REQUESTS = (signal.SIGINT, signal.SIGTERM)
#: Seconds to wait for a cluster's answer, and within which files written by another machine must
#: become visible.
ANSWER, GRACE = 5.0, 15.0
#: Times that Ray starts a task again whose worker or machine is lost.
RETRIES = 3


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster within a context. Ray's usage statistics are off.

    A cluster that was started for it ends with the context; another one goes on.

    Args:
        address: address of the cluster, such as "10.0.0.1:6379"; None for RAY_ADDRESS, or without
            it a new cluster on this machine.

    Raises:
        InputError: the cluster does not answer.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {number: signal.getsignal(number) for number in REQUESTS}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        _reach(where)
        options = NEW_CLUSTER if where == "local" else {}
        ray.init(where, log_to_driver=False, logging_level="CRITICAL", **options)
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
    """Executor that trains runs as tasks on the connected cluster, see :func:`connected`.

    Ray starts a task again if its worker or its machine is lost.

    Args:
        runs: the runs of the study, all for the same device.
        jobs: number of tasks at a time; None for one per core or GPU of the cluster.

    Attributes:
        slots: largest number of tasks at a time.

    Raises:
        InputError: the cluster has no core, or no GPU for runs on one.
    """

    def __init__(self, runs: Sequence[Run], jobs: int | None) -> None:
        resources = ray.cluster_resources()
        # Other machines choose among their own GPUs.
        self._device = runs[0].plan.settings.device.partition(":")[0]
        gpu = self._device == "cuda"
        if self._device == "auto":
            gpu = resources.get("GPU", 0) >= 1
        kind = "GPU" if gpu else "CPU"
        if resources.get(kind, 0) < 1:
            raise InputError(f"The Ray cluster has no {kind}. Add a machine, or use --device.")
        self.slots = jobs or int(resources[kind])
        self._task = ray.remote(_train).options(max_retries=RETRIES, num_cpus=1, num_gpus=int(gpu))

    def start(self, run: Run) -> Job:
        """Begin to train a run as a task, which waits until the cluster has room for it.

        Args:
            run: the run, whose folder every machine of the cluster must see.
        """
        places = {name: os.environ[name] for name in PLACES if name in os.environ}
        return _TaskJob(run, self._task.remote(run, self._device, os.getcwd(), places))


class _TaskJob:
    """Job of a task."""

    def __init__(self, run: Run, task: ray.ObjectRef) -> None:
        self._run, self._task = run, task

    def ended(self) -> bool:
        """Return whether the task has ended."""
        return bool(ray.wait([self._task], timeout=0)[0])

    def stop(self) -> None:
        """Cancel the task, which ends its step and saves, or does not begin."""
        ray.cancel(self._task)

    def failure(self) -> str | None:
        """Return why the run did not finish; None if it did."""
        try:
            reason: str | None = ray.get(self._task)
        except RayError as failure:
            lost = str(failure).strip().rpartition("\n")[2]
            return f"its process died ({lost}). If memory ran out, use fewer jobs."
        if reason is not None or _appears(self._run):
            return reason
        return (
            f"its folder {self._run.folder} is not visible here. Use a folder of the study on "
            "shared storage."
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


def _train(run: Run, device: str, where: str, places: Mapping[str, str]) -> str | None:
    """Train one run, as the main function of a task.

    Args:
        run: the run.
        device: the value of ``--device``.
        where: current folder of the command that compares.
        places: environment variables for the task.

    Returns:
        Why the run failed; None if it did not.
    """
    stop_asked = threading.Event()
    for number in REQUESTS:
        signal.signal(number, lambda *_: stop_asked.set())
    try:
        os.chdir(where)
    except OSError as failure:
        return f"on another machine: {explain_os_error(failure)}"
    os.environ.update(places)
    try:
        command = Command(run, device, threads=1)
    except DpmacError as failure:
        return as_flags("\n".join(failure.errors))
    while not command.ended():
        if stop_asked.wait(PATIENCE):
            command.stop()
            break
    return command.failure()
