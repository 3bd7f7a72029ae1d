"""Training runs as jobs of SLURM, by submitit: an array of them, watched through their folders.

Jobs outlive a command that is killed; scancel --name dpmac ends them. Until they have ended, the
same command finds the folders of their runs in use.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
import torch
from submitit.core.utils import UncompletedJobError

from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies.executors import Ended, Moved, RunEvent, died, told
from dpmac_cli.studies.local import carry_out

#: Seconds between looks at the folders of the runs.
POLL = 1.0
#: Seconds between questions to SLURM about a job that has left no result.
ASKED = 30.0
#: sbatch options that say which GPUs a job gets.
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
#: What asks a job to stop: scancel, the end of its time, and preemption.
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


def check() -> None:
    """Refuse a machine without SLURM. Raises InputError."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise InputError(
            "--executor slurm: there is no SLURM here (no sbatch and srun). Run dpmac on a login "
            "node of the cluster, or use another --executor."
        )


@dataclass
class _Job:
    """A run, submitit's job for it, its last step, and when SLURM was last asked about it."""

    number: int
    job: Any
    step: int = -1
    asked: float = field(default_factory=time.monotonic)

    def over(self) -> bool:
        """Whether it has left a result, or SLURM no longer knows it."""
        due = time.monotonic() - self.asked >= ASKED
        if due:
            self.asked = time.monotonic()
        return bool(self.job.done(force_check=due))


@dataclass
class Array:
    """Carries out runs as jobs, some at a time.

    Attributes:
        configs: of the runs, each with its ``out``.
        jobs: at a time; None for as many as SLURM lets run.
        stop: asked between looks; True lets every run finish its step, save and end.
        where: a folder, made by this, for what the jobs print and what they are told.
        sbatch: options of a job, by sbatch's names.
        cluster: submitit's name of who runs the jobs.
    """

    configs: Sequence[TrainConfig]
    jobs: int | None
    stop: Callable[[], bool]
    where: Path
    sbatch: Mapping[str, str]
    cluster: str = "slurm"
    _attempts: dict[int, int] = field(default_factory=dict)

    def events(self, numbers: Sequence[int]) -> Iterator[RunEvent]:
        """Carry out some of the runs, and say what happens."""
        executor = self._executor()
        jobs = self._submit(executor, numbers)
        asked = False
        try:
            while jobs:
                if not asked and self.stop():
                    asked = True
                    _cancel(jobs)
                again = []
                for job in list(jobs):
                    ended = self._end(job, stopped=asked) if job.over() else None
                    yield from self._progress(job)
                    if ended is not None:
                        jobs.remove(job)
                        again += [job.number] if ended.again else []
                        yield ended
                jobs += self._submit(executor, again)
                time.sleep(POLL if jobs else 0)
        finally:
            _cancel(jobs)

    def _executor(self) -> Any:
        self.where.mkdir(mode=0o700, parents=True, exist_ok=True)
        executor = submitit.AutoExecutor(folder=self.where.absolute(), cluster=self.cluster)
        options = dict(self.sbatch)
        if self.configs[0].device == "cuda" and not options.keys() & set(GPUS):
            options["gpus-per-node"] = "1"
        limit = {} if self.jobs is None else {"slurm_array_parallelism": self.jobs}
        executor.update_parameters(name="dpmac", slurm_additional_parameters=options, **limit)
        return executor

    def _submit(self, executor: Any, numbers: Sequence[int]) -> list[_Job]:
        """Hand in some runs, as an array."""
        if not numbers:
            return []
        for number in numbers:
            self._attempts[number] = self._attempts.get(number, 0) + 1
        jobs = executor.map_array(_train, [self.configs[number] for number in numbers])
        return [_Job(number, job) for number, job in zip(numbers, jobs, strict=True)]

    def _progress(self, job: _Job) -> Iterator[Moved]:
        """How far its folder says that a run is."""
        config = self.configs[job.number]
        assert config.out is not None  # noqa: S101
        lines = files.read_lines(config.out / folder.METRICS)
        step = int(lines[-1]["step"]) if lines else 0
        if lines and step != job.step:
            job.step = step
            accuracy = lines[-1].get("test_accuracy")
            yield Moved(job.number, step, config.total_steps, accuracy)

    def _end(self, job: _Job, *, stopped: bool) -> Ended:
        """How a job ended."""
        number, config = job.number, self.configs[job.number]
        attempt = self._attempts[number]
        assert config.out is not None  # noqa: S101
        try:
            failure, step = job.job.result()
        except UncompletedJobError:  # killed, maybe after its run was finished
            if stopped or folder.reported_steps(config.out) >= config.total_steps:
                return Ended(number)
            return died(number, attempt, f"job {job.job.job_id}, see {self.where}")
        return told(config, Ended(number, failure), step, attempt, stopped=stopped)


def _cancel(jobs: Sequence[_Job]) -> None:
    """Have jobs finish their step, save and end, for which SLURM gives them half a minute."""
    for job in jobs:
        job.job.cancel(check=False)


def _train(config: TrainConfig) -> tuple[str | None, int]:
    """A job's life: one run. Why it failed, if it did, and the step that it came to."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        asked.set()

    for number in REQUESTS:
        signal.signal(number, handle)
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    failure, step = None, 0
    for event in carry_out(0, config, None, asked.is_set):
        if isinstance(event, Ended):
            failure = event.failure
        else:
            step = event.step
    return failure, step
