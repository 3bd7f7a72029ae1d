"""Who carries out the runs of a study: processes here, a Ray cluster, or SLURM. Loads no torch."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dpmac_cli.config.extras import EXTRAS, fault_of_extra
from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.data.schema import Source
from dpmac_cli.runs import folder

if TYPE_CHECKING:
    from dpmac_cli.data.dataset import Data

#: How often a run is begun again whose process died.
ATTEMPTS = 3
#: Seconds between looks at whether anyone wants to stop.
PATIENCE = 0.2
#: Seconds until what another machine has written must be seen here.
GRACE = 15.0


@dataclass(frozen=True)
class Moved:
    """A run has come so far.

    Attributes:
        number: of the run, in the order given.
        step, steps: taken, and in all.
        accuracy: of the last evaluation; None before the first.
    """

    number: int
    step: int
    steps: int
    accuracy: float | None


@dataclass(frozen=True)
class Ended:
    """A run is over.

    Attributes:
        number: of the run. failure: why it failed; None if it is finished, or was asked to stop.
        again: whether its process died and it will be begun again.
        broken: whether its process can do no other run, its device being lost.
    """

    number: int
    failure: str | None = None
    again: bool = False
    broken: bool = False


RunEvent = Moved | Ended


class Executor(Protocol):
    """Carries out runs, some at a time."""

    def events(self, numbers: Sequence[int]) -> Iterator[RunEvent]:
        """Carry out some of the runs, and say what happens.

        Each ends with one :class:`Ended` that is not to be begun again, unless it was asked to
        stop before its first step.
        """


#: All but the first are extras too, of the same names.
EXECUTORS = ("local", "ray", "slurm")
#: sbatch options that the jobs depend on.
OURS = (
    *("array", "error", "export", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "requeue", "signal", "wrap"),
)


@dataclass(frozen=True)
class Choice:
    """Who is to carry out the runs.

    Attributes:
        name: one of :data:`EXECUTORS`.
        jobs: at a time; None for as many as serve best.
        cluster: address of the Ray cluster; None for that of RAY_ADDRESS, or one started here.
        slurm: sbatch options of a job, KEY=VALUE with commas between; None without SLURM.
    """

    name: str = "local"
    jobs: int | None = None
    cluster: str | None = None
    slurm: str | None = None

    def faults(self) -> Iterator[str]:
        """What is wrong with it, each a full sentence."""
        if self.jobs is not None and not 1 <= self.jobs <= 1024:
            yield f"--jobs must be from 1 to 1,024, not {self.jobs}."
        if self.name not in EXECUTORS:
            yield f"--executor must be one of {', '.join(EXECUTORS)}, not '{self.name}'."
        if self.cluster is not None and self.name != "ray":
            yield "--cluster is the address of a Ray cluster. Add --executor ray, or leave it out."
        if self.slurm is not None and self.name != "slurm":
            yield "--slurm is for jobs of SLURM. Add --executor slurm, or leave it out."
        if self.name == "slurm":
            yield from self._slurm_faults()
        if self.name in EXTRAS:
            yield from fault_of_extra(self.name, f"--executor {self.name}")

    @property
    def sbatch(self) -> dict[str, str]:
        """The options of :attr:`slurm`, by sbatch's own names."""
        return dict(self._options())

    def _options(self) -> Iterator[tuple[str, str]]:
        """Names and values of :attr:`slurm`; no name, and the text, for what is not an option."""
        for part in filter(None, map(str.strip, (self.slurm or "").split(","))):
            match = re.fullmatch(r"(?:--)?([a-z][a-z_-]*)=([^\s=]\S*)", part)
            yield (match[1].replace("_", "-"), match[2]) if match else ("", part)

    def _slurm_faults(self) -> Iterator[str]:
        for name, value in self._options():
            if not name:
                yield f"--slurm '{value}' is not KEY=VALUE, such as partition=gpu,time=60."
            elif name in OURS:
                yield f"--slurm {name} cannot be chosen: dpmac depends on it. Leave it out."
        if "time" not in self.sbatch:
            yield (
                "--slurm must say how long a job may take, as sbatch --time does: --slurm time=60 "
                "(an hour)."
            )


@contextmanager
def opened(
    choice: Choice,
    configs: Sequence[TrainConfig],
    data: "Mapping[str | Source, Data]",
    stop: Callable[[], bool],
    jobs: Path,
) -> Iterator[Executor]:
    """The executor that was chosen, until it is no longer needed. Writes nothing yet.

    Args:
        choice: without faults.
        configs: of the runs, each with its ``out``.
        data: by name, see :func:`dpmac_cli.studies.local.share_data`; for processes here only.
        stop: asked between events; True lets every run finish its step, save and end.
        jobs: a folder for what SLURM's jobs print.

    Raises:
        InputError: there is no such cluster.
    """
    if choice.name == "ray":
        from dpmac_cli.studies import on_ray  # noqa: PLC0415  (loads ray)

        with on_ray.connected(choice.cluster):
            yield on_ray.Cluster([anywhere(config) for config in configs], choice.jobs, stop)
    elif choice.name == "slurm":
        from dpmac_cli.studies import on_slurm  # noqa: PLC0415  (loads submitit)

        on_slurm.check()
        placed = [anywhere(config) for config in configs]
        yield on_slurm.Array(placed, choice.jobs, stop, jobs, choice.sbatch)
    else:
        from dpmac_cli.studies import local as workers  # noqa: PLC0415  (loads torch)

        count = choice.jobs or workers.default_jobs(configs[0].device)
        yield workers.Pool(configs, count, data, stop)


def anywhere(config: TrainConfig) -> TrainConfig:
    """A run as another machine carries it out: which GPU it gets is decided there."""
    return replace(config, device=config.device.partition(":")[0])


def usable_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def died(number: int, attempt: int, why: str) -> Ended:
    """The process of a run ended before the run did, at its so many-th attempt."""
    if attempt < ATTEMPTS:
        return Ended(number, f"its process died ({why})", again=True)
    return Ended(
        number,
        f"its process died {ATTEMPTS} times ({why}). If memory ran out, try fewer --jobs.",
    )


def told(config: TrainConfig, ended: Ended, step: int, attempt: int, *, stopped: bool) -> Ended:
    """What to say of a run that another machine says has ended.

    Args:
        config: of the run.
        ended: what that machine said.
        step: that the run had come to.
        attempt: how many times it was begun.
        stopped: whether it was asked to stop.
    """
    if ended.failure is not None or stopped:
        return ended
    if step < config.total_steps:
        return died(ended.number, attempt, "it was asked to end by its cluster")
    if not _seen(config):
        return Ended(
            ended.number,
            f"it ended on another machine, and its folder {config.out} is not seen here. Name an "
            "--out on storage that all machines share.",
        )
    return ended


def _seen(config: TrainConfig) -> bool:
    """Whether the report of a finished run is here, soon."""
    assert config.out is not None  # noqa: S101
    deadline = time.monotonic() + GRACE
    while folder.reported_steps(config.out) < config.total_steps:
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE)
        if config.out.is_dir():
            os.listdir(config.out)  # which has a network's file system look again
    return True
