"""Runs as jobs of a SLURM array, by submitit.

Jobs outlive a command that is killed; ``scancel --name dpmac`` ends them. Until they have ended,
the same command finds the folders of their runs in use.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.errors import InputError
from dpmac_cli.studies.executor import Executor, Result
from dpmac_cli.studies.local import train_job

#: sbatch options that say which GPUs a job gets.
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
#: Asks SLURM about jobs without a result at least twice a minute; submitit's own, every 10 minutes.
SlurmJob.watcher = SlurmInfoWatcher(delay_s=30)


def check() -> None:
    """Refuse a machine without SLURM. Raises InputError."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise InputError(
            "--executor slurm: there is no SLURM here (no sbatch and srun). Run dpmac on a login "
            "node of the cluster, or use another --executor."
        )


class Array(Executor):
    """Executor whose runs are an array of jobs, which SLURM queues itself.

    Args:
        jobs: at a time; None for as many as SLURM lets run.
        where: folder for what the jobs print and are told; made when the first starts.
        sbatch: options of a job, by sbatch's names.
        cluster: submitit's name of what runs the jobs.
    """

    def __init__(
        self,
        plans: Sequence[TrainPlan],
        jobs: int | None,
        where: Path,
        sbatch: Mapping[str, str],
        cluster: str = "slurm",
    ) -> None:
        super().__init__(plans, slots=len(plans))
        self._limit = {} if jobs is None else {"slurm_array_parallelism": jobs}
        self._where, self._options, self._cluster = where, dict(sbatch), cluster
        if plans[0].device == "cuda" and not sbatch.keys() & set(GPUS):
            self._options["gpus-per-node"] = "1"

    def submitter(self) -> Any:
        """Return submitit's executor with the options of the jobs. Raises OSError."""
        self._where.mkdir(mode=0o700, parents=True, exist_ok=True)
        executor = submitit.AutoExecutor(folder=self._where.absolute(), cluster=self._cluster)
        executor.update_parameters(
            name="dpmac", slurm_additional_parameters=self._options, **self._limit
        )
        return executor

    def _submit(self, plans: Sequence[TrainPlan]) -> Sequence[Any]:
        return list(self.submitter().map_array(_train, plans))

    def _result(self, job: Any) -> Result | None:
        try:
            result: Result | None = job.result() if job.done() else None
        except UncompletedJobError:
            return f"job {job.job_id}, see {self._where}", None
        return result

    def _cancel(self, job: Any) -> None:
        job.cancel(check=False)  # SLURM gives it half a minute to save


def _train(plan: TrainPlan) -> Result:
    """Train one run: the main function of a job."""
    return train_job(plan, int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
