"""Runs as jobs of a SLURM array, submitted with submitit.

Jobs continue if the command is killed; ``scancel --name dpmac`` ends them. Until they have ended,
the folders of their runs are in use for the same command.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from dpmac_cli.errors import InputError
from dpmac_cli.studies.executor import Executor, Result
from dpmac_cli.studies.grid import Run
from dpmac_cli.studies.local import train_job

#: sbatch options that select the GPUs of a job.
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
#: Seconds between two checks of jobs without a result; submitit's default is 10 minutes.
BETWEEN_CHECKS = 30


def check() -> None:
    """Raise InputError on a machine without SLURM."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise InputError(
            "--executor slurm: SLURM is not available (no sbatch and srun). Run dpmac on a login "
            "node of the cluster, or use another --executor."
        )


class Array(Executor[Any]):
    """Executor that trains runs as a SLURM job array, which SLURM queues.

    Args:
        jobs: maximum number of jobs at a time; None for SLURM's limit.
        where: folder for the jobs' inputs and output; created when the first one starts.
        sbatch: options of a job, by sbatch's names.
        cluster: submitit's name of the system that runs the jobs.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        jobs: int | None,
        where: Path,
        sbatch: Mapping[str, str],
        cluster: str = "slurm",
    ) -> None:
        super().__init__(runs, slots=len(runs))
        self._limit = {} if jobs is None else {"slurm_array_parallelism": jobs}
        self._where, self._options, self._cluster = where, dict(sbatch), cluster
        self._watcher = SlurmInfoWatcher(delay_s=BETWEEN_CHECKS)
        if runs[0].plan.run.device == "cuda" and not sbatch.keys() & set(GPUS):
            self._options["gpus-per-node"] = "1"

    def submitter(self) -> Any:
        """Return submitit's executor with the options of the jobs. Raises OSError."""
        self._where.mkdir(mode=0o700, parents=True, exist_ok=True)
        executor = submitit.AutoExecutor(folder=self._where.absolute(), cluster=self._cluster)
        executor.update_parameters(
            name="dpmac", slurm_additional_parameters=self._options, **self._limit
        )
        return executor

    def submit(self, runs: Sequence[Run]) -> Sequence[Any]:
        """Start a job for each of these runs."""
        jobs = list(self.submitter().map_array(_train, runs))
        for job in jobs:
            if isinstance(job, SlurmJob):  # instead of the watcher that all programs' jobs share
                job.watcher = self._watcher
                job.watcher.register_job(job.job_id)
        return jobs

    def result(self, job: Any) -> Result | None:
        """Return the result of a job, or why it ended without one; None while it runs."""
        try:
            result: Result | None = job.result() if job.done() else None
        except UncompletedJobError:
            return f"job {job.job_id}, see {self._where}", None
        return result

    def cancel(self, job: Any) -> None:
        """Ask a job to stop, or remove it from the queue."""
        job.cancel(check=False)  # SLURM gives it half a minute to save


def _train(run: Run) -> Result:
    """Train one run: the main function of a job."""
    return train_job(run, int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
