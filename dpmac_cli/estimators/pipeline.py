"""Pipelines of scikit-learn in which nothing but the last step learns from the records."""

from collections.abc import Iterator, Mapping
from typing import Any

from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import get_tags

from dpmac_cli.errors import raise_errors
from dpmac_cli.estimators.estimators import PrivateEstimator

#: Steps that have to be fitted, and learn nothing but numbers of columns and random numbers.
SHAPES_ALONE = (
    *("PolynomialFeatures", "GaussianRandomProjection", "SparseRandomProjection"),
    "PolynomialCountSketch",
)
SCALED = "Leave it out: the estimator scales columns by their public bounds="
ALL = " with all categories, and no minimum or maximum"
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
    "CountVectorizer": "Use HashingVectorizer, or a public vocabulary=",
    "SimpleImputer": "Use strategy='constant' with a public fill_value",
    "KBinsDiscretizer": "Use a FunctionTransformer with public edges of the bins",
}
OTHERWISE = "Use a FunctionTransformer with public constants, or leave it out"


def private_pipeline(*steps: Any, memory: Any = None, verbose: bool = False) -> Pipeline:
    """Return ``make_pipeline`` of steps of which the last one alone learns from the records.

    Whatever another step learns, such as a mean, is not covered by epsilon.

    ::

        private_pipeline(PolynomialFeatures(2), PrivateClassifier(epsilon=3, bounds=(0, 256)))

    Args:
        steps: transformers, and a private estimator.
        memory, verbose: see :func:`sklearn.pipeline.make_pipeline`.

    Raises:
        InputError: names every step that learns from records, and what to use instead.
    """
    pipeline = make_pipeline(*steps, memory=memory, verbose=verbose)
    faults = list[str]()
    for name, step in _learning(pipeline, ""):
        kind = type(step).__name__
        faults.append(
            f"{name}: {kind} learns from the records, which epsilon does not cover. "
            f"{INSTEAD.get(kind, OTHERWISE)}."
        )
    raise_errors(faults)
    return pipeline


def _learning(step: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the steps in a step that learn from records and are not private, with their names."""
    for parts in ("steps", "transformers", "transformer_list"):
        if hasattr(step, parts):
            for part, inner, *_ in getattr(step, parts):
                yield from _learning(inner, f"{name}.{part}" if name else part)
            if hasattr(step, "remainder"):
                yield from _learning(step.remainder, f"{name}.remainder")
            return
    if step is None or isinstance(step, str | PrivateEstimator) or _is_public(step):
        return
    if get_tags(step).requires_fit:
        yield name, step


def _is_public(step: Any) -> bool:
    """Return whether all that a step would learn is declared.

    By the name of the step: others with the same parameters learn more, as ``TargetEncoder`` does
    with ``categories`` and ``TfidfVectorizer`` with a ``vocabulary``.
    """
    name = type(step).__name__
    if name in ("OneHotEncoder", "OrdinalEncoder"):
        rare = step.min_frequency is not None or step.max_categories is not None
        return not isinstance(step.categories, str) and not rare
    if name == "SimpleImputer":
        return step.strategy == "constant" and not step.add_indicator
    return name in SHAPES_ALONE or (name == "CountVectorizer" and step.vocabulary is not None)
