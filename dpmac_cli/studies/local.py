"""Run a study: every run is a command ``dpmac train``, in a process of its own.

A run that has finished is not started again, and one that has a checkpoint is resumed. So a study
that was killed continues, whoever trained its runs. The state of a study is in the folders of its
runs and nowhere else: each is locked while it is trained, and sealed by checksums at the end.

The other executor is :mod:`~dpmac_cli.studies.ray_cluster`. Imports no torch, unless the machine
may have a GPU.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.flags import flag_name
from dpmac_cli.config.plan import Plan
from dpmac_cli.errors import INTERRUPTED, DpmacError, InputError, as_flags
from dpmac_cli.files import data_folder
from dpmac_cli.libraries import torch
from dpmac_cli.runs import folder, lock
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.results import finished_report

#: Seconds between looks at the runs.
PATIENCE = 0.05
#: Variable that limits the threads of a process.
THREADS = "OMP_NUM_THREADS"
#: Number of the file of standard error.
STANDARD_ERROR = 2
#: Files of the drivers of GPUs: NVIDIA's, AMD's, and those of Windows.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
#: Settings that a resume takes again, because the run's own files do not have them.
AGAIN = ("model", "data_dir", "checkpoint_every")
#: How a message on standard error begins, and how one goes on that a command was stopped.
ERROR, STOPPED = "error: ", "stopped: "


class Job(Protocol):
    """A run in training, in another process or on another machine.

    :meth:`ended` is asked again and again; :meth:`failure` once, after it has returned True.
    """

    def ended(self) -> bool:
        """Return whether it has ended."""

    def stop(self) -> None:
        """Ask it to end after its step, and to save; do not wait for that.

        It may be called after the end.
        """

    def failure(self) -> str | None:
        """Return why it did not finish, once it has ended; None if it did."""


class Executor(Protocol):
    """Trains runs in other processes or on other machines.

    Attributes:
        slots: largest number of runs at a time.
    """

    slots: int

    def start(self, run: Run) -> Job:
        """Begin to train a run, and return at once.

        Args:
            run: the run, whose folder no process uses.

        Raises:
            InputError: it cannot be started, with the reason.
        """


class Look(NamedTuple):
    """State of a study in progress.

    Attributes:
        running: runs in training, also those that another process trains.
        ended: each run that has ended since the last look, and why it failed; None for one that
            finished or was asked to stop.
    """

    running: tuple[Run, ...]
    ended: tuple[tuple[Run, str | None], ...]


def carry_out(executor: Executor, runs: Sequence[Run], stop: Callable[[], bool]) -> Iterator[Look]:
    """Carry out runs of a study, and yield a look at them a few times per second.

    Others go on if one fails. A run that another process trains is not started: it is waited for.
    After a request to stop, looks go on until all have ended.

    Args:
        executor: trains the runs. Those that remain at the end are asked to stop.
        runs: the runs that are not finished.
        stop: called between looks; if True, every run finishes its step and saves.
    """
    study = _Study(executor, deque(runs))
    try:
        while study.jobs or study.waiting:
            if stop() and not study.stopping:
                study.stop()
            ended = (*study.collect(), *study.start())
            yield Look(tuple(study.jobs), ended)
            time.sleep(PATIENCE)
    finally:
        study.stop()


class Awaited:
    """Job of a run that another process trains, such as one of a study that was killed."""

    def __init__(self, run: Run) -> None:
        self._run, self._stopped = run, False

    def ended(self) -> bool:
        """Return whether the other process has ended, or is no longer waited for."""
        return self._stopped or not lock.in_use(self._run.folder)

    def stop(self) -> None:
        """Wait no longer. The other process goes on."""
        self._stopped = True

    def failure(self) -> None:
        """Return None: nothing is known of the other process."""


class _Study:
    """Runs of a study that have not ended: those to start, and those in training.

    Runs that another process trains are among those in training.
    """

    def __init__(self, executor: Executor, waiting: deque[Run]) -> None:
        self.executor, self.waiting = executor, waiting
        self.jobs = dict[Run, Job]()
        self.stopping = False
        self._prepared = set[str]()

    def stop(self) -> None:
        """Start no more runs, and ask those in training to stop, once."""
        self.stopping = True
        self.waiting.clear()
        for job in self.jobs.values():
            job.stop()

    def collect(self) -> Iterator[tuple[Run, str | None]]:
        """Yield the runs that have ended, and why they failed."""
        for run, job in list(self.jobs.items()):
            if not job.ended():
                continue
            del self.jobs[run]
            self._prepared.add(prepares(run.plan))
            failure = job.failure()
            if self.stopping or finished_report(run):
                yield run, None
            elif isinstance(job, Awaited):
                self.waiting.appendleft(run)
            elif failure and lock.in_use(run.folder):  # another process was faster
                self.jobs[run] = Awaited(run)
            else:
                yield run, failure

    def start(self) -> Iterator[tuple[Run, str | None]]:
        """Start runs while there is room for them; yield those that cannot be started, and why."""
        while self.waiting and len(self.jobs) < self.executor.slots:
            run = self.waiting[0]
            if lock.in_use(run.folder):
                self.jobs[self.waiting.popleft()] = Awaited(run)
                continue
            if not self._is_prepared(run.plan):
                return
            self.waiting.popleft()
            try:
                self.jobs[run] = self.executor.start(run)
            except DpmacError as failure:
                yield run, as_flags("\n".join(failure.errors))

    def _is_prepared(self, plan: Plan) -> bool:
        """Return whether no run in training is about to prepare the same records first."""
        needed = prepares(plan)
        if not needed or needed in self._prepared:
            return True
        is_alone = True
        for run in self.jobs:
            if prepares(run.plan) != needed:
                continue
            if folder.is_configured(run.folder):
                self._prepared.add(needed)
                return True
            is_alone = False
        return is_alone


def prepares(plan: Plan) -> str:
    """Return the name of what the first run on some records prepares for the others.

    "" if that is nothing.

    It downloads a dataset, decodes images, or computes features, and keeps them. Runs with the same
    name must not do that at once.

    Args:
        plan: plan of a run.
    """
    facts = plan.facts
    if plan.features is not None:
        return repr(plan.features)
    if facts.user_supplied:
        return "images" if facts.records.kind == "images" else ""
    place = data_folder(plan.settings.data_dir)
    downloaded = all((place / file).exists() for file in DATASETS[facts.typed].files)
    return "" if downloaded else "files"


def arguments(run: Run, device: str) -> list[str]:
    """Return the arguments of ``dpmac`` that train a run, or resume it from its checkpoint.

    The first one is "train"; none is quoted for a shell.

    Args:
        run: a run of a study.
        device: the value of ``--device``.
    """
    settings = {**run.typed, "device": device}
    place = ["--out", str(run.folder)]
    if has_checkpoint(run):
        place = ["--resume", str(run.folder)]
        settings = {name: settings[name] for name in ("device", *AGAIN) if name in settings}
    flags = list[str]()
    for name, value in settings.items():
        flag = f"--{flag_name(name)}"
        flags.append(flag if value is True else f"{flag}={value}")
    return ["train", *place, *flags, f"--seed={run.seed}", "--quiet"]


def has_checkpoint(run: Run) -> bool:
    """Return whether there is a checkpoint to resume a run from. It may be damaged.

    Args:
        run: a run of a study.
    """
    return (run.folder / folder.CHECKPOINTS / folder.STATE).is_file()


def clear_the_way(run: Run) -> None:
    """Remove what a command has left that was killed before the first step of a run.

    A folder with a checkpoint, and one that is missing, stay as they are.

    Args:
        run: a run of a study.

    Raises:
        InputError: a step may have begun, but there is no checkpoint to resume the run from; or
            another process uses the folder.
    """
    where = run.folder
    if has_checkpoint(run) or not where.is_dir():
        return
    if all(map(folder.is_leftover, where.iterdir())):
        return
    begun = run.plan.private and begun_events(where, run.plan.planned)
    if begun or (where / folder.REPORT).exists():
        raise InputError(
            f"{where} has steps of this run, but no checkpoint to resume it from. Their cost is in "
            "that of the study. To train the run again, move the folder away, and add the cost "
            "yourself."
        )
    with lock.locked(where):
        folder.clear(where)


#: Program that imports a module from a folder before it runs dpmac.
WITH_MODULE = (
    "import importlib, sys; sys.path.append(sys.argv.pop(1)); "
    "importlib.import_module(sys.argv.pop(1)); from dpmac_cli.__main__ import main; main()"
)


def started_by(run: Run) -> list[str]:
    """Return the arguments of Python that run dpmac, which knows the optimizer of a run.

    An optimizer of a program is registered by the import of its module, unless that is the script
    itself.

    Args:
        run: a run of a study.

    Returns:
        What stands between the interpreter and :func:`arguments`: ``-m dpmac_cli``, or a program
        that imports the module first.
    """
    name = type(run.plan.optimizer).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if name.partition(".")[0] in ("dpmac_cli", "__main__") or file is None:
        return ["-m", "dpmac_cli"]
    above = Path(file).absolute().parents[name.count(".")]
    return ["-c", WITH_MODULE, str(above), name]


class Command:
    """Job of a command ``dpmac train`` in a process on this machine, which begins at once.

    Ctrl-C in a terminal reaches it only by :meth:`stop`, so that it gets one request to stop.

    Args:
        run: the run.
        device: the value of ``--device``.
        threads: number of threads of the process.

    Raises:
        InputError: see :func:`clear_the_way`; no process was started.
    """

    def __init__(self, run: Run, device: str, threads: int) -> None:
        clear_the_way(run)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the job)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", *started_by(run), *arguments(run, device)],
            stdin=subprocess.DEVNULL,
            # A network may print to stdout, which a program may parse.
            stdout=STANDARD_ERROR,
            stderr=self._errors,
            env={**os.environ, THREADS: str(threads)},
            start_new_session=True,
        )

    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Send SIGTERM, after which the run ends its step and saves.

        A second one ends it at once.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def failure(self) -> str | None:
        """Return why the run did not finish; None if it did.

        It waits for the process. Call it once.
        """
        code = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        self._errors.close()
        return None if code == 0 else reason(code, errors)


def reason(code: int, errors: str) -> str:
    """Return why a command failed: its messages, or the last line if it has none.

    Args:
        code: exit code; negative for the number of a signal.
        errors: text on its standard error.

    >>> reason(2, "a warning\\nerror: no such file\\n")
    'no such file'
    """
    if code < 0:
        return f"its process died (signal {-code}). If memory ran out, use fewer jobs."
    if code == INTERRUPTED:
        return "its process was asked to stop. Run the same command to resume it."
    message = list[str]()
    lines = errors.splitlines()
    for line in lines:
        if message or line.startswith(ERROR):
            message.append(line)
    message = message or lines[-1:]
    if not message:
        return f"its process ended with exit code {code}."
    return "\n".join(line.removeprefix(ERROR).removeprefix(STOPPED) for line in message)


class Commands:
    """Executor that trains runs by commands on this machine.

    Attributes:
        slots: number of runs at a time, by default one per GPU, or one per core, because a small
            step uses only one core.
    """

    def __init__(self, runs: Sequence[Run], jobs: int | None) -> None:
        """Count GPUs and cores.

        Args:
            runs: the runs of the study, all for the same device.
            jobs: number of runs at a time; None for the default.

        Raises:
            InputError: the device is a GPU, and there is none.
        """
        self._device = runs[0].plan.settings.device
        gpus = count_gpus(self._device)
        cores = _usable_threads()
        self.slots = min(jobs or gpus or cores, len(runs))
        self._threads = max(1, cores // self.slots)
        # A run on one GPU that was named takes no other.
        self._devices = [] if ":" in self._device else [f"cuda:{gpu}" for gpu in range(gpus)]
        self._started = dict[Job, str]()

    def start(self, run: Run) -> Job:
        """Begin to train a run in a process, on the GPU with the fewest runs if there are several.

        Args:
            run: the run.

        Raises:
            InputError: see :func:`clear_the_way`.
        """
        busy = list[str]()
        for job, device in self._started.items():
            if not job.ended():
                busy.append(device)
        device = min(self._devices, key=busy.count, default=self._device)
        job = Command(run, device, self._threads)
        self._started[job] = device
        return job


def count_gpus(device: str) -> int:
    """Return the number of GPUs for a value of ``--device``.

    It is 0 for the CPU, and for "auto" without any. Where there can be none, torch is not loaded,
    which takes seconds.

    Args:
        device: "cpu", "cuda", "cuda:1" or "auto".

    Raises:
        InputError: the device is a GPU, and there is none.
    """
    has_driver = any(Path(driver).exists() for driver in DRIVERS)
    if device == "cpu" or (device == "auto" and not has_driver):
        return 0
    count: int = torch.cuda.device_count()
    if count == 0 and device != "auto":
        raise InputError(
            f"{{device=}}{device}: this machine has no CUDA devices. Use {{device=}}cpu or auto."
        )
    return count


def _usable_threads() -> int:
    """Return the number of threads that all runs together may use."""
    limit = os.environ.get(THREADS, "")
    if limit.isdecimal():
        return max(1, int(limit))
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
