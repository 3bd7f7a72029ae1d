"""Runs as jobs of a SLURM array, by submitit, watched through their folders.

Jobs outlive a command that is killed; ``scancel --name dpmac`` ends them. Until they have ended,
the same command finds the folders of their runs in use.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
import torch
from submitit.core.utils import UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from dpmac_cli.studies.executor import Died, Ended, Moved, RunEvent
from dpmac_cli.studies.worker import train_run

#: Seconds between looks at the folders of the runs.
POLL = 1.0
#: sbatch options that say which GPUs a job gets.
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
#: Asks SLURM about jobs without a result at least twice a minute; submitit's own, every 10 minutes.
SlurmJob.watcher = SlurmInfoWatcher(delay_s=30)
#: Signals that ask a job to stop: scancel, the end of its time, and preemption.
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
    """A run, submitit's job for it, and its last step."""

    number: int
    job: Any
    step: int = 0


@dataclass
class Array:
    """Executor whose runs are jobs of SLURM, which queues them itself.

    Attributes:
        configs: of all runs, each with its ``out``.
        jobs: at a time; None for as many as SLURM lets run.
        where: folder for what the jobs print and are told; made when the first starts.
        sbatch: options of a job, by sbatch's names.
        cluster: submitit's name of what runs the jobs.
    """

    configs: Sequence[TrainPlan]
    jobs: int | None
    where: Path
    sbatch: Mapping[str, str]
    cluster: str = "slurm"
    _jobs: list[_Job] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """All runs: SLURM holds back what exceeds ``jobs``."""
        return len(self.configs)

    def submitter(self) -> Any:
        """Return submitit's executor with the options of the jobs. Raises OSError."""
        self.where.mkdir(mode=0o700, parents=True, exist_ok=True)
        executor = submitit.AutoExecutor(folder=self.where.absolute(), cluster=self.cluster)
        options = dict(self.sbatch)
        if self.configs[0].device == "cuda" and not options.keys() & set(GPUS):
            options["gpus-per-node"] = "1"
        limit = {} if self.jobs is None else {"slurm_array_parallelism": self.jobs}
        executor.update_parameters(name="dpmac", slurm_additional_parameters=options, **limit)
        return executor

    def start(self, numbers: Sequence[int]) -> None:
        """Submit runs as one array."""
        jobs = self.submitter().map_array(_train, [self.configs[number] for number in numbers])
        self._jobs += [_Job(number, job) for number, job in zip(numbers, jobs, strict=True)]

    def poll(self) -> Iterator[RunEvent | Died]:
        """Look at every job, then wait."""
        for job in list(self._jobs):
            over, step = job.job.done(), 0
            if over:
                self._jobs.remove(job)
                try:
                    failure, step = job.job.result()
                    end: Ended | Died = Ended(job.number, failure)
                except UncompletedJobError:
                    end = Died(job.number, f"job {job.job.job_id}, see {self.where}")
            yield from self._progress(job, step)
            if over:
                yield end
        time.sleep(POLL if self._jobs else 0)

    def _progress(self, job: _Job, step: int) -> Iterator[Moved]:
        """Yield how far a run is by its folder, or by ``step`` where that is further."""
        config = self.configs[job.number]
        lines = files.read_lines(config.folder / folder.METRICS)
        last = lines[-1] if lines else {"step": 0}
        step = max(step, int(last["step"]))
        if step != job.step:
            job.step = step
            yield Moved(job.number, step, config.steps, last.get("test_accuracy"))

    def ask_to_stop(self) -> None:
        """Ask jobs to finish their step, save and end; SLURM gives them half a minute for it."""
        for job in self._jobs:
            job.job.cancel(check=False)

    def close(self) -> None:
        """End the jobs that are left."""
        self.ask_to_stop()


def _train(config: TrainPlan) -> tuple[str | None, int]:
    """Train one run, the main function of a job; return why it failed, if so, and its last step."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        asked.set()

    for number in REQUESTS:
        signal.signal(number, handle)
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    failure, step = None, 0
    for event in train_run(0, config, None, asked.is_set):
        if isinstance(event, Ended):
            failure = event.failure
        else:
            step = event.step
    return failure, step
