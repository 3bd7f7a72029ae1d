"""Pipelines of scikit-learn in which nothing but the last step learns from the records.

A step passes if it is known to compute each row from that row alone, by its type and parameters.
All others are refused, also those that need no fit: they get all rows at once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction import FeatureHasher
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import AdditiveChi2Sampler, PolynomialCountSketch
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
)
from sklearn.random_projection import SparseRandomProjection

from dpmac_cli.errors import raise_errors
from dpmac_cli.estimators.estimators import PrivateEstimator

#: Steps that learn nothing but the number of columns, and compute each row from itself alone.
ROW_BY_ROW = (
    *(AdditiveChi2Sampler, Binarizer, FeatureHasher, Normalizer),
    *(PolynomialCountSketch, PolynomialFeatures),
)
SCALED = "Leave it out: the estimator scales columns by their public bounds="
ALL = " with all categories, and no minimum or maximum"
PROJECTED = "Use SparseRandomProjection(n_components) with a number, not 'auto'"
OWN_WORDS = "without your own preprocessor=, tokenizer= or analyzer=, which may keep texts"
#: What to use instead of steps that learn from records.
INSTEAD: Mapping[str, str] = {
    "StandardScaler": SCALED,
    "MinMaxScaler": SCALED,
    "MaxAbsScaler": SCALED,
    "RobustScaler": SCALED,
    "OneHotEncoder": f"Declare its categories: OneHotEncoder(categories=[...]){ALL}",
    "OrdinalEncoder": f"Declare its categories: OrdinalEncoder(categories=[...]){ALL}",
    "TargetEncoder": "Use OneHotEncoder(categories=[...])",
    "TfidfVectorizer": "Use HashingVectorizer, or texts themselves and backbone='minilm'",
    "CountVectorizer": f"Use HashingVectorizer, or a public vocabulary=, {OWN_WORDS}",
    "HashingVectorizer": f"Use it {OWN_WORDS}",
    "SimpleImputer": (
        "Use strategy='constant' with a public fill_value and keep_empty_features=True, and no "
        "indicator"
    ),
    "FunctionTransformer": (
        "Use a NumPy ufunc of one number, such as np.log1p or np.frompyfunc(function, 1, 1), "
        "without kw_args; or compute columns of X beforehand, each row from itself alone"
    ),
    "KBinsDiscretizer": (
        "Use FunctionTransformer(np.frompyfunc(function, 1, 1)) with public edges of the bins"
    ),
    # A dense product rounds a row by how many others there are.
    "GaussianRandomProjection": PROJECTED,
    "SparseRandomProjection": PROJECTED,
}
OTHERWISE = "Leave it out, or compute X beforehand, each row from itself and public constants alone"
#: Said of columns that a function chooses.
CHOSEN = (
    "a function chooses the columns, from what all records have in them, which epsilon does not "
    "cover. List the columns by name or number."
)


class PrivatePipeline(Pipeline):  # type: ignore[misc]  # scikit-learn has no types
    """Pipeline whose steps are checked again at each fit, as a grid may have changed them."""

    def fit(self, X: Any, y: Any = None, **params: Any) -> Self:
        """Fit like :class:`sklearn.pipeline.Pipeline`.

        Args:
            X, y, params: see there.

        Raises:
            InputError: names every step that can learn from records, and what to use instead.
        """
        raise_errors(_faults(self, ""))
        super().fit(X, y, **params)
        return self


def private_pipeline(*steps: Any, memory: Any = None, verbose: bool = False) -> PrivatePipeline:
    """Return ``make_pipeline`` of steps of which the last one alone learns from the records.

    Whatever another step learns, such as a mean, is not covered by epsilon.

    ::

        private_pipeline(PolynomialFeatures(2), PrivateClassifier(epsilon=3, bounds=(0, 256)))

    Args:
        steps: transformers, and a private estimator.
        memory, verbose: see :func:`sklearn.pipeline.make_pipeline`.

    Raises:
        InputError: names every step that can learn from records, and what to use instead.
    """
    named = make_pipeline(*steps).steps
    pipeline = PrivatePipeline(named, memory=memory, verbose=verbose)
    raise_errors(_faults(pipeline, ""))
    return pipeline


def _faults(step: Any, name: str) -> Iterator[str]:
    """Yield why a step, or those in it, can learn from records, and what to use instead.

    Args:
        step: a step of any type.
        name: its name, after those of the steps that it is in.
    """
    parts = []
    if isinstance(step, Pipeline):
        parts = step.steps
    elif isinstance(step, FeatureUnion):
        parts = step.transformer_list
    elif isinstance(step, ColumnTransformer):
        parts = [*step.transformers, ("remainder", step.remainder)]
    elif not _is_public(step):
        kind = type(step).__name__
        yield (
            f"{name}: {kind} can learn from the records, which epsilon does not cover. "
            f"{INSTEAD.get(kind, OTHERWISE)}."
        )
    for part, inner, *columns in parts:
        place = f"{name}.{part}" if name else part
        if any(map(callable, columns)):
            yield f"{place}: {CHOSEN}"
        yield from _faults(inner, place)


def _is_public(step: Any) -> bool:
    """Return whether a step is private, or computes each row from itself and what is declared.

    By its type: others with the same parameters learn more, as ``TargetEncoder`` does with
    ``categories`` and ``TfidfVectorizer`` with a ``vocabulary``.
    """
    if step is None or isinstance(step, str | PrivateEstimator):  # "passthrough" and "drop"
        return True
    kind = type(step)
    return kind in ROW_BY_ROW or (kind in IF_DECLARED and IF_DECLARED[kind](step))


def _has_categories(encoder: Any) -> bool:
    """Return whether the categories of an encoder are declared, and none is counted."""
    counts = encoder.min_frequency is not None or encoder.max_categories is not None
    return not (isinstance(encoder.categories, str) or counts)


def _fills_in_a_constant(imputer: Any) -> bool:
    """Return whether an imputer keeps all columns, and fills in a value that is given.

    Otherwise columns that no record has are dropped, or the value is of the type of all records.
    """
    is_constant = imputer.strategy == "constant" and imputer.fill_value is not None
    return bool(is_constant and imputer.keep_empty_features and not imputer.add_indicator)


def _reads_alone(vectorizer: Any) -> bool:
    """Return whether texts are split into words by scikit-learn, and not by code of a program."""
    steps = (vectorizer.preprocessor, vectorizer.tokenizer, vectorizer.analyzer)
    return not any(map(callable, steps))


def _has_vocabulary(vectorizer: Any) -> bool:
    """Return whether the words that are counted are declared, and texts are read alone."""
    return vectorizer.vocabulary is not None and _reads_alone(vectorizer)


def _has_size(projection: Any) -> bool:
    """Return whether the number of columns is given: "auto" follows from the number of records."""
    return not isinstance(projection.n_components, str)


def _takes_single_numbers(transformer: Any) -> bool:
    """Return whether a function computes each number from itself alone; None returns it.

    A ufunc with a signature, and one with other arguments, gets more than a number.
    """
    function = transformer.func
    if function is None:
        return True
    is_elementwise = isinstance(function, np.ufunc) and function.signature is None
    is_of_one = is_elementwise and (function.nin, function.nout) == (1, 1)
    return is_of_one and not transformer.kw_args


#: Steps that do so if something is declared, by their types.
IF_DECLARED: Mapping[type, Callable[[Any], bool]] = {
    OneHotEncoder: _has_categories,
    OrdinalEncoder: _has_categories,
    SimpleImputer: _fills_in_a_constant,
    CountVectorizer: _has_vocabulary,
    HashingVectorizer: _reads_alone,
    SparseRandomProjection: _has_size,
    FunctionTransformer: _takes_single_numbers,
}
