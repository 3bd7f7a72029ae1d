"""Small records for the tests of estimators, and fits that take a fraction of a second."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli import PrivateClassifier, PrivateRegressor

RECORDS = 240
#: Settings of a fit of a moment. Large noise is cheap to price.
SHORT: dict[str, Any] = {"epochs": 1, "device": "cpu"}


def rows(seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.str_]]:
    """Rows of four numbers from -4 to 4, and classes that follow from them."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-4, 4, (RECORDS, 4))
    return x, np.where(x[:, 0] + x[:, 1] > 0, "high", "low")


def classifier(**given: Any) -> PrivateClassifier:
    """A classifier of such rows."""
    return PrivateClassifier(**{"epsilon": 1, "bounds": (-4, 4), **SHORT, **given})


def regressor(**given: Any) -> PrivateRegressor:
    """A regressor of such rows."""
    bounds = {"bounds": (-4, 4), "target_bounds": (-8, 8)}
    return PrivateRegressor(**{"epsilon": 1, **bounds, **SHORT, **given})
