"""Steps of a pipeline that learn from records are refused by their names."""

from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.decomposition import PCA
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.image import PatchExtractor
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import AdditiveChi2Sampler, PolynomialCountSketch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
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
    scale,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection

from dpmac_cli import InputError, private_pipeline
from tests.estimators.records import classifier, rows


def imputer(**given: Any) -> SimpleImputer:
    """An imputer that fills in 0, unless something else is given."""
    constant = {"strategy": "constant", "fill_value": 0, "keep_empty_features": True}
    return SimpleImputer(**{**constant, **given})


class Centred(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Somebody's own step, which says that it needs no fit, and subtracts the mean of all rows."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn nothing."""
        del X, y
        return self

    def transform(self, X: Any) -> Any:
        """Return centred rows."""
        return X - X.mean(0)


LEARN = (
    *(StandardScaler(), MinMaxScaler(), PCA(2), OneHotEncoder(), OrdinalEncoder()),
    *(TfidfVectorizer(), CountVectorizer(), KBinsDiscretizer(), SimpleImputer()),
    *(SelectKBest(), QuantileTransformer(), imputer(add_indicator=True)),
    # Columns that no record has are dropped, or the type of all records decides the value.
    *(imputer(keep_empty_features=False), imputer(fill_value=None)),
    # Functions of all rows at once.
    *(FunctionTransformer(scale), FunctionTransformer(lambda x: x - x.mean(0))),
    *(FunctionTransformer(np.add.accumulate), FunctionTransformer(np.linalg.svd)),
    *(FunctionTransformer(np.linalg._umath_linalg.inv), FunctionTransformer(np.vecdot)),
    FunctionTransformer(np.log1p, kw_args={"where": np.ones(240, bool)}),
    *(Centred(), PatchExtractor(patch_size=(2, 2)), GaussianProcessRegressor()),
    # As many columns as follow from the number of records, or values rounded by it.
    *(SparseRandomProjection(), GaussianRandomProjection(2)),
    # Functions of a program, which may keep texts.
    *(HashingVectorizer(preprocessor=str.lower), HashingVectorizer(tokenizer=str.split)),
    *(
        HashingVectorizer(analyzer=str.split),
        CountVectorizer(vocabulary=["a"], tokenizer=str.split),
    ),
    # What they learn is not all declared.
    *(TargetEncoder(categories=[["a", "b"]]), TfidfVectorizer(vocabulary=["a"])),
    OneHotEncoder(categories=[["a", "b"]], min_frequency=5),
    OneHotEncoder(categories=[["a", "b"]], max_categories=1),
    OrdinalEncoder(categories=[["a", "b"]], min_frequency=5),
)
PUBLIC = (
    *(FunctionTransformer(), FunctionTransformer(np.log1p), Normalizer(), Binarizer()),
    FunctionTransformer(np.frompyfunc(lambda number: number > 1, 1, 1)),
    *(PolynomialFeatures(), PolynomialCountSketch(random_state=0), AdditiveChi2Sampler()),
    SparseRandomProjection(2, dense_output=True, random_state=0),
    *(imputer(), ColumnTransformer([("a", imputer(), [0, 2])], remainder="passthrough")),
    FeatureUnion([("a", Normalizer()), ("b", "passthrough")]),
)
WORDS = (
    *(HashingVectorizer(), CountVectorizer(vocabulary=["a"]), FeatureHasher(input_type="string")),
    *(OneHotEncoder(categories=[["a", "b"]]), OrdinalEncoder(categories=[["a", "b"]])),
)


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("step", LEARN, ids=lambda step: type(step).__name__)
def test_a_step_that_learns_from_records_is_refused_by_name(step: Any) -> None:
    name = type(step).__name__.lower()
    said = rf"{name}: {type(step).__name__} can learn from .*\. (Use|Leave it out|Declare)"
    with pytest.raises(InputError, match=said):
        private_pipeline(step, classifier())


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("step", [*PUBLIC, *WORDS], ids=lambda step: type(step).__name__)
def test_a_step_that_learns_nothing_passes(step: Any) -> None:
    assert len(private_pipeline(step, classifier())) == 2


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("step", PUBLIC, ids=lambda step: type(step).__name__)
def test_a_step_that_passes_computes_each_row_from_itself_alone(step: Any) -> None:
    """Bit for bit, also where the record that is removed is the only one with a column."""
    x = np.abs(rows()[0])
    for number in (0, 100, len(x) - 1):
        if isinstance(step, SimpleImputer | ColumnTransformer):
            x[:, 2] = np.nan
            x[number, 2] = 1
        others = np.delete(x, number, axis=0)
        with_it = np.delete(clone(step).fit_transform(x), number, axis=0)
        assert np.array_equal(with_it, clone(step).fit_transform(others))


@pytest.mark.promise("estimators")
def test_columns_are_not_chosen_by_what_records_have_in_them() -> None:
    """One text in a column would make it another kind for all."""
    numbers = make_column_selector(dtype_include="number")
    columns = ColumnTransformer([("n", "passthrough", numbers), ("s", Normalizer(), [0])])
    with pytest.raises(InputError, match=r"^columntransformer\.n: a function chooses the columns"):
        private_pipeline(columns, classifier())


@pytest.mark.promise("estimators")
def test_a_step_that_is_changed_later_is_refused_before_it_is_fitted() -> None:
    x, y = rows()
    changed = private_pipeline(imputer(), classifier()).set_params(simpleimputer__strategy="mean")
    grid = {"simpleimputer__strategy": ["constant", "mean"]}
    search = GridSearchCV(private_pipeline(imputer(), classifier()), grid, error_score="raise")
    for fit in (changed.fit, clone(changed).fit, search.fit):
        with pytest.raises(InputError, match="SimpleImputer can learn from the records"):
            fit(x, y)


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
