"""Commands that need only a model and data compute no privacy cost and no default of a training."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from dpmac_cli.accounting import accountants, calibration, pricing
from dpmac_cli.config import defaults
from tests.digits_runs import train_digits
from tests.typed import dpmac

#: Functions that none of these commands may call.
UNUSED: tuple[Callable[..., Any], ...] = (
    accountants.total_epsilon,
    accountants.used_accountant,
    calibration.affordable_steps,
    calibration.calibrate_noise,
    defaults.completed,
    pricing.epsilon_schedule,
    pricing.price,
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("alone") / "run").folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on an .npz beside it, whose noise was calibrated and whose test records are split."""
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    x, y = rng.random((400, 5), np.float32), np.arange(400) % 2
    np.savez(root / "rows.npz", x=x, y=y)
    result = dpmac(
        *("train", "--dataset", root / "rows.npz", "--feature-range", "0,1", "--epsilon", "2"),
        *("--epochs", "1", "--device", "cpu", "--out", root / "run"),
    )
    assert result.exit_code == 0, result.output
    return root / "run"


@pytest.fixture
def _nothing_is_priced(digits: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions of :data:`UNUSED` wherever they were imported, after training."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a privacy cost or a default was computed")

    for module in [module for name, module in sys.modules.items() if name.startswith("dpmac_cli")]:
        for name, value in list(vars(module).items()):
            if any(value is function for function in UNUSED):
                monkeypatch.setattr(module, name, refuse)


@pytest.mark.usefixtures("_nothing_is_priced")
def test_training_notices_that_costs_cannot_be_computed() -> None:
    """The functions are indeed replaced."""
    result = dpmac("train", "--dataset", "digits", "--epsilon", "2", "--steps", "1", "--debug")
    assert result.exit_code == 1
    assert "a privacy cost or a default was computed" in result.output


@pytest.mark.usefixtures("_nothing_is_priced")
def test_a_model_of_a_registered_dataset_is_scored_and_predicted_with(digits: Path) -> None:
    np.savez("new.npz", x=np.zeros((2, 8, 8), np.uint8))
    _done("eval", digits)
    _done("eval", digits / "model.safetensors", "--dataset", "digits", "--json")
    _done("predict", digits, "new.npz")
    _done("card", digits)
    _done("card", digits)
    _done("cache")


@pytest.mark.usefixtures("_nothing_is_priced")
def test_a_model_of_ones_own_data_is_scored_and_predicted_with(own: Path) -> None:
    """The split of the records is that of the run, which config.yaml records."""
    np.savez("new.npz", x=np.zeros((2, 5), np.float32))
    assert "held-out" in _done("eval", own)
    assert "held-out" in _done("eval", own, "--dataset", own.parent / "rows.npz")
    _done("predict", own, "new.npz")
    _done("card", own)


def _done(*words: str | Path) -> str:
    result = dpmac(*words)
    assert result.exit_code == 0, result.output
    return result.output
