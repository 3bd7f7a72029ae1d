"""Names of version 0.3 that are gone, for messages. Version 0.5 drops this file.

What to type instead of each setting, value, key and method is in docs/upgrading.md, which has them
in tables; the messages point to it.
"""

#: What every message about such a name ends in.
SEE = "It is of version 0.3: docs/upgrading.md says what to write instead."
_MECHANISM = "dpmac_cli.dp.mechanism"
_GEOMETRY = "dpmac_cli.dp.geometry"
#: Names of the package, and what to write instead.
NAMES = {
    "AdaClipEllipsoid": f"from {_GEOMETRY} import AdaClipEllipsoid",
    "Ball": f"from {_GEOMETRY} import Ball",
    "Claim": "from dpmac_cli.silo.claims import Claim",
    "ClippedSum": "clipped_grad(...), with the same arguments",
    "Classification": "from dpmac_cli.tasks.classification import Classification",
    "Compared": "from dpmac_cli.tasks.metrics import Compared",
    "Declaration": "from dpmac_cli.data.dataset import Declaration",
    "DivergedError": "from dpmac_cli.errors import DivergedError",
    "Ellipsoid": f"from {_MECHANISM} import Ellipsoid",
    "Evaluated": "train(..., on_event=), whose events have a result after each epoch",
    "EvaluationMetric": "from dpmac_cli.tasks.metrics import EvaluationMetric",
    "Finished": "from dpmac_cli import Run",
    "GaussianMechanism": f"from {_MECHANISM} import GaussianMechanism",
    "Geometry": f"from {_GEOMETRY} import Geometry",
    "MacAdamEllipsoid": f"from {_GEOMETRY} import MacAdamEllipsoid",
    "ModelError": "from dpmac_cli.errors import ModelError",
    "Moments": "from dpmac_cli.dp.moments import Moments",
    "Noise": "from dpmac_cli.randomness.noise import Noise",
    "OwnLoader": "PrivateStep(...).loader(dataset, collate_fn, workers=...)",
    "PrivateMean": f"from {_MECHANISM} import PrivateMean",
    "Reading": "from dpmac_cli.data.reader import Reading",
    "RunError": "from dpmac_cli.errors import RunError",
    "SecureMechanism": f"from {_MECHANISM} import SecureMechanism",
    "Started": "train(...), whose run has notes",
    "Task": "from dpmac_cli.tasks.task import Task",
    "Update": "train(..., on_event=)",
    "ball": f"from {_MECHANISM} import ball",
    "collect": "compare(...), which returns the cells",
    "ellipsoid": f"from {_MECHANISM} import ellipsoid",
    "finish": "train(...), which returns the finished run",
    "fork": "resume(run, out=..., epochs=...)",
    "format_epsilon": "from dpmac_cli.accounting.statements import format_epsilon",
    "load_model": "load(path).model",
    "plan": "compare(...)",
    "predict": "load(path).predict(records)",
    "resolve": "train(**settings)",
    "score": "load(path).score()",
    "statement": "from dpmac_cli.accounting.statements import statement",
    "trade_off": "from dpmac_cli.accounting.risk import trade_off",
}
#: Settings of commands and programs.
SETTINGS = frozenset(
    (
        *("encoding", "fork", "guesses", "lora_alpha", "minutes", "most_trials", "on", "rule"),
        *("score_every", "score_on", "search", "solve", "stop_early", "target_names"),
        *("tensorboard", "tune", "tuned_on", "symbol", "parts", "reference", "outside"),
    )
)
#: Values of settings.
VALUES = frozenset(
    ("bce", "count", "cyclic", "deviance", "html", "last", "nmae", "nrmse", "poisson", "slurm")
)
#: Keys of report.json.
KEYS = frozenset(
    (
        *("audit", "classes", "dataset", "hyperparameters", "input", "machine", "model"),
        *("optimizer", "post_noise", "privacy", "recipe", "schema_version", "statement", "target"),
        *("test", "timings", "versions"),
    )
)
#: Methods of private steps.
METHODS = frozenset(("load_parameters",))


class ReportValues(dict[str, object]):
    """A report as a dict; a key of version 0.3 raises KeyError with the page that has the new one.

    >>> ReportValues(epsilon=3.0)["privacy"]
    Traceback (most recent call last):
    KeyError: "'privacy'. It is of version 0.3: docs/upgrading.md says what to write instead."
    """

    def __missing__(self, key: str) -> object:
        raise KeyError(f"{key!r}. {SEE}" if key in KEYS else key)
