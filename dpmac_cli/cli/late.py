"""Modules that load torch, NumPy or pyarrow, each imported when a command first uses it.

Help and messages about mistakes need none of them, and must not wait for them.
"""

from typing import TYPE_CHECKING

from dpmac_cli.libraries import OnFirstUse

__all__ = (
    "attack",
    "audit",
    "cache",
    "csv_file",
    "display",
    "distributed",
    "environment",
    "folder",
    "kinds",
    "ray_cluster",
    "report",
    "resolve",
    "run",
    "scoring",
    "table_file",
    "training",
    "tune",
    "workers",
)

if TYPE_CHECKING:
    from dpmac_cli.cli import display
    from dpmac_cli.data import cache, csv_file, kinds, table_file
    from dpmac_cli.release import attack, audit, report, run, scoring
    from dpmac_cli.release import train as training
    from dpmac_cli.runs import environment, folder, resolve, workers
    from dpmac_cli.studies import ray_cluster, tune
    from dpmac_cli.training import distributed
else:
    attack = OnFirstUse("dpmac_cli.release.attack")
    audit = OnFirstUse("dpmac_cli.release.audit")
    cache = OnFirstUse("dpmac_cli.data.cache")
    csv_file = OnFirstUse("dpmac_cli.data.csv_file")
    kinds = OnFirstUse("dpmac_cli.data.kinds")
    display = OnFirstUse("dpmac_cli.cli.display")
    distributed = OnFirstUse("dpmac_cli.training.distributed")
    environment = OnFirstUse("dpmac_cli.runs.environment")
    folder = OnFirstUse("dpmac_cli.runs.folder")
    ray_cluster = OnFirstUse("dpmac_cli.studies.ray_cluster")
    report = OnFirstUse("dpmac_cli.release.report")
    resolve = OnFirstUse("dpmac_cli.runs.resolve")
    run = OnFirstUse("dpmac_cli.release.run")
    scoring = OnFirstUse("dpmac_cli.release.scoring")
    training = OnFirstUse("dpmac_cli.release.train")
    table_file = OnFirstUse("dpmac_cli.data.table_file")
    tune = OnFirstUse("dpmac_cli.studies.tune")
    workers = OnFirstUse("dpmac_cli.runs.workers")
