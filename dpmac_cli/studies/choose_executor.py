"""Choose the executor of a study: local processes, a Ray cluster, or SLURM. Imports no torch."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.studies.executor import Executor
from dpmac_cli.studies.grid import Run

if TYPE_CHECKING:
    from dpmac_cli.studies.local import SharedData

#: Executors, with the package that each needs, from the extra of the same name.
EXECUTORS = {"local": "", "ray": "ray", "slurm": "submitit"}
#: sbatch options that dpmac sets itself.
OURS = (
    *("array", "error", "export", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "requeue", "signal", "wrap"),
)


@dataclass(frozen=True)
class ExecutorChoice:
    """Executor and its options.

    Attributes:
        name: one of :data:`EXECUTORS`.
        jobs: runs at a time; None for the executor's default.
        cluster: address of the Ray cluster; None for RAY_ADDRESS, or a new local cluster.
        slurm: sbatch options of a job, KEY=VALUE separated by commas; None without SLURM.
    """

    name: str = "local"
    jobs: int | None = None
    cluster: str | None = None
    slurm: str | None = None

    def faults(self) -> Iterator[str]:
        """Yield each fault as a full sentence."""
        if self.jobs is not None and not 1 <= self.jobs <= 1024:
            yield f"--jobs must be from 1 to 1,024, not {self.jobs}."
        if self.name not in EXECUTORS:
            yield f"--executor must be one of {', '.join(EXECUTORS)}, not '{self.name}'."
        if self.cluster is not None and self.name != "ray":
            yield "--cluster is the address of a Ray cluster. Add --executor ray, or leave it out."
        if self.slurm is not None and self.name != "slurm":
            yield "--slurm is for SLURM jobs. Add --executor slurm, or leave it out."
        if self.name == "slurm":
            yield from self._slurm_faults()
        if package := EXECUTORS.get(self.name):
            yield from fault_of_package(package, self.name, f"--executor {self.name}")

    @property
    def sbatch(self) -> dict[str, str]:
        """Return the options of :attr:`slurm` by sbatch's names."""
        pairs = (part.removeprefix("--").partition("=") for part in self._parts())
        return {name.replace("_", "-"): value for name, _, value in pairs}

    def _parts(self) -> list[str]:
        return [part.strip() for part in (self.slurm or "").split(",") if part.strip()]

    def _slurm_faults(self) -> Iterator[str]:
        for part in self._parts():
            if not re.fullmatch(r"(--)?[a-z][a-z_-]*=[^\s=]\S*", part):
                yield f"--slurm '{part}' is not KEY=VALUE, such as partition=gpu,time=60."
        for name in self.sbatch:
            if name in OURS:
                yield f"--slurm {name} cannot be set, because dpmac sets it. Leave it out."
        if "time" not in self.sbatch:
            yield (
                "--slurm must include the time limit of a job, as in sbatch --time: --slurm "
                "time=60 (one hour)."
            )


@contextmanager
def opened(
    choice: ExecutorChoice, runs: Sequence[Run], data: "SharedData", jobs: Path
) -> Iterator[Executor[Any]]:
    """Create the executor of a valid choice. Does not write any files yet.

    ``data``, from :func:`~dpmac_cli.studies.local.share_data`, is for local processes only, and
    ``jobs`` is the folder for the output of SLURM jobs. Raises InputError if there is no cluster.
    """
    # Other machines choose among their own GPUs.
    placed = [run.on(run.plan.run.device.partition(":")[0]) for run in runs]
    if choice.name == "ray":
        from dpmac_cli.studies import ray_cluster  # noqa: PLC0415  (loads ray)

        with ray_cluster.connected(choice.cluster):
            yield ray_cluster.Tasks(placed, choice.jobs)
    elif choice.name == "slurm":
        from dpmac_cli.studies import slurm  # noqa: PLC0415  (loads submitit)

        slurm.check()
        yield slurm.Array(placed, choice.jobs, jobs, choice.sbatch)
    else:
        from dpmac_cli.studies import local  # noqa: PLC0415  (loads torch)

        yield local.Pool(runs, choice.jobs, data)
