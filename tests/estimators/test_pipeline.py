"""Steps of a pipeline that learn from records are refused by their names."""

from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import FeatureUnion
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    StandardScaler,
    TargetEncoder,
)

from dpmac_cli import InputError, private_pipeline
from tests.estimators.records import classifier, rows

LEARN = (
    *(StandardScaler(), MinMaxScaler(), PCA(2), OneHotEncoder(), OrdinalEncoder()),
    *(TfidfVectorizer(), CountVectorizer(), KBinsDiscretizer(), SimpleImputer()),
    *(SelectKBest(), QuantileTransformer(), SimpleImputer(strategy="constant", add_indicator=True)),
    # What they learn is not all declared.
    *(TargetEncoder(categories=[["a", "b"]]), TfidfVectorizer(vocabulary=["a"])),
    OneHotEncoder(categories=[["a", "b"]], min_frequency=5),
    OneHotEncoder(categories=[["a", "b"]], max_categories=1),
    OrdinalEncoder(categories=[["a", "b"]], min_frequency=5),
)
PUBLIC = (
    *(HashingVectorizer(), FunctionTransformer(np.log1p), Normalizer(), Binarizer()),
    *(PolynomialFeatures(), OneHotEncoder(categories=[["a", "b"]])),
    OrdinalEncoder(categories=[["a", "b"]]),
    *(CountVectorizer(vocabulary=["a"]), SimpleImputer(strategy="constant", fill_value=0)),
)


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("step", LEARN, ids=lambda step: type(step).__name__)
def test_a_step_that_learns_from_records_is_refused_by_name(step: Any) -> None:
    name = type(step).__name__.lower()
    said = rf"{name}: {type(step).__name__} learns from .*\. (Use|Leave it out|Declare)"
    with pytest.raises(InputError, match=said):
        private_pipeline(step, classifier())


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("step", PUBLIC, ids=lambda step: type(step).__name__)
def test_a_step_that_learns_nothing_passes(step: Any) -> None:
    assert len(private_pipeline(step, classifier())) == 2


@pytest.mark.promise("estimators")
def test_steps_inside_of_others_are_found() -> None:
    columns = ColumnTransformer(
        [("a", StandardScaler(), [0]), ("b", "passthrough", [1])], remainder=MinMaxScaler()
    )
    union = FeatureUnion([("c", PCA(1)), ("d", Normalizer())])
    with pytest.raises(InputError) as refused:
        private_pipeline(columns, union, LogisticRegression())
    names = [error.partition(":")[0] for error in refused.value.errors]
    assert names == [
        *("columntransformer.a", "columntransformer.remainder", "featureunion.c"),
        "logisticregression",
    ]


def test_a_private_pipeline_fits_and_predicts() -> None:
    x, y = rows()
    fitted = private_pipeline(PolynomialFeatures(2), classifier(bounds=(-16, 16))).fit(x, y)
    assert fitted.predict(x).shape == y.shape
    with pytest.raises(TypeError, match="dense data is required"):
        private_pipeline(HashingVectorizer(n_features=8), classifier()).fit(["a b", "c"], [0, 1])
