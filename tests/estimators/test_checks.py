"""The checks of scikit-learn for estimators, all of them."""

from typing import Any

import pytest
from sklearn.base import clone
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator

from dpmac_cli import PrivateClassifier, PrivateRegressor

#: Bounds that hold the records of the checks, and fits that take little time.
CHEAP: dict[str, Any] = {"bounds": (-20, 20), "epsilon": 100, "epochs": 2, "device": "cpu"}
ESTIMATORS = (
    PrivateClassifier(**CHEAP),
    PrivateRegressor(**CHEAP, target_bounds=(-500, 500)),
)
CHECKS = [
    (estimator, check)
    for estimator in ESTIMATORS
    for _, check in estimator_checks_generator(clone(estimator), legacy=True)
]


def name_of(value: Any) -> str:
    """Return the name of an estimator or of a check."""
    return getattr(getattr(value, "func", value), "__name__", type(value).__name__)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("uncalibrated")
@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name_of)
def test_every_check_of_scikit_learn_passes(estimator: Any, check: Any) -> None:
    check(clone(estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name_of)
def test_only_noise_and_few_records_are_excused(estimator: Any) -> None:
    tags = get_tags(estimator)
    assert tags.non_deterministic
    assert not tags.no_validation
    assert tags.requires_fit
    assert not tags._skip_test
    of_kind = tags.classifier_tags or tags.regressor_tags
    assert of_kind is not None
    assert of_kind.poor_score
    assert tags.classifier_tags is None or tags.classifier_tags.multi_class


def test_defaults_are_those_of_scikit_learn_s_conventions() -> None:
    for kind in (PrivateClassifier, PrivateRegressor):
        estimator = kind()
        assert kind(**estimator.get_params()).get_params() == estimator.get_params()
        assert clone(estimator).get_params() == estimator.get_params()
