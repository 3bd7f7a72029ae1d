"""Compare settings from a program: train the runs of a study, and collect their results."""

from pathlib import Path
from typing import Any

from dpmac_cli.arguments import checked
from dpmac_cli.errors import InputError
from dpmac_cli.runs import lock, new_folder
from dpmac_cli.studies import local
from dpmac_cli.studies.grid import Grid, Run, plan
from dpmac_cli.studies.results import Comparison, collect, finished_report
from dpmac_cli.studies.written import write_comparison

#: Folder of the runs of a study, in its own.
RUNS = "runs"


@checked(never_none=("dataset",))
def compare(
    out: Path | str = "runs/compare",
    *,
    config: Path | str | None = None,
    jobs: int | None = None,
    **settings: Any,
) -> Comparison:
    """Train a grid of runs, several at a time, and compare them, like ``dpmac compare``.

        study = compare("study", dataset="digits", optimizers=["dp-adam", "dp-macadam"], sigma=4)
        [(cell.name, cell.mean, cell.std) for cell in study.cells]

    Each run is a command in a process of its own, whose folder in ``out`` is found by its settings:
    finished runs are reused, interrupted runs are resumed. A run that fails does not end the
    others.

    Args:
        out: folder of the study, with a table (compare.json, .csv, .md) and the runs.
        config: YAML file of settings. Arguments take precedence.
        jobs: maximum number of runs at a time; by default one per core or GPU.
        settings: settings of a run, of which several values make a grid: ``sigma=[4, 8]``; with
            ``optimizers`` and ``seeds``, the number of seeds (3) or a list of them.

    Returns:
        The cells of the table, with the score of each seed, and why runs failed, if some did.

    Raises:
        InputError: lists every fault found; nothing was trained. Or another process works in
            ``out``.
        BudgetError: no noise meets a target epsilon.
    """
    where = Path(out)
    dataset = settings.get("dataset")
    if not (dataset is None or isinstance(dataset, str | Path)):
        raise InputError(
            "compare trains each run by a command, which cannot read records in memory. Save them "
            "(.npz, .csv or .parquet) and pass the path as dataset=."
        )
    study = plan(settings, config, where / RUNS)
    new_folder.make_folder(where / RUNS)
    failures = dict[Run, str]()
    with lock.locked(where):
        missing = unfinished(study)
        if missing:
            executor = local.Commands(study.runs, jobs)
            for look in local.carry_out(executor, missing, lambda: False):
                for run, why in look.ended:
                    if why:
                        failures[run] = why
    comparison = collect(study, failures)
    write_comparison(comparison, where)
    return comparison


def unfinished(study: Grid) -> list[Run]:
    """Return the runs of a study that have no report of a finished run; [] if all have.

    Args:
        study: the study, whose folders are read.
    """
    return [run for run in study.runs if finished_report(run) is None]
