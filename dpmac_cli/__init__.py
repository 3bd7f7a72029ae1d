"""dpmac: train models under differential privacy, and compute privacy costs.

Everything the command line does is available from Python with the names in ``__init__.pyi``, which
are stable; docs/library.md shows how to use them. Each name is imported on first use, so programs
that only compute privacy costs do not import torch.
"""

from typing import Any

import lazy_loader

__version__ = "0.4.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_TASK = "dpmac_cli.tasks.task"
_MECHANISM = "dpmac_cli.dp.mechanism"
_GEOMETRY = "dpmac_cli.dp.geometry"
#: Names of version 0.3 that are no longer here, and what to write instead. Version 0.5 drops them.
_BEFORE_0_4 = {
    "AdaClipEllipsoid": f"from {_GEOMETRY} import AdaClipEllipsoid",
    "Ball": f"from {_GEOMETRY} import Ball",
    "Claim": "from dpmac_cli.silo.claims import Claim",
    "ClippedSum": "clipped_grad(...), with the same arguments",
    "Classification": "from dpmac_cli.tasks.classification import Classification",
    "Compared": f"from {_TASK} import Compared",
    "Declaration": "from dpmac_cli.data.dataset import Declaration",
    "DivergedError": "from dpmac_cli.errors import DivergedError",
    "Ellipsoid": f"from {_MECHANISM} import Ellipsoid",
    "Evaluated": "train(..., on_event=), whose events have a result after each epoch",
    "EvaluationMetric": f"from {_TASK} import EvaluationMetric",
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
    "Task": f"from {_TASK} import Task",
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


def __getattr__(name: str) -> Any:
    """Import a public name, or say what has become of one of version 0.3."""
    if name in _BEFORE_0_4:
        # An AttributeError would be replaced by a message without this line.
        raise ImportError(
            f"dpmac_cli.{name} of version 0.3 is no longer public. Use: {_BEFORE_0_4[name]}"
        )
    return _import_name(name)
