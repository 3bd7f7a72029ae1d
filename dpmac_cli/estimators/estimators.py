"""Private classifiers and regressors as estimators of scikit-learn.

They are a door to :func:`dpmac_cli.train` and :meth:`dpmac_cli.Run.predict`: a fit is a run on all
of its records, without test records, and what it publishes is kept in memory. Out of scope: weights
of single records, sparse matrices, and fits that continue others.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.settings import DATA, GROUPS
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.errors import InputError, as_keywords, counted
from dpmac_cli.estimators.budget import Budget
from dpmac_cli.estimators.records import (
    NOT_FINITE,
    UNIT,
    are_images,
    are_texts,
    arrays_of,
    is_frame,
    schema_from,
    table_with,
    target_range,
    words_in,
)
from dpmac_cli.files import write_atomically
from dpmac_cli.release.prediction import Predictions
from dpmac_cli.release.run import load
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder, lock, new_folder
from dpmac_cli.runs.resolve import resolve

#: Largest seed that is drawn from a generator of numbers.
SEEDS = 2**31 - 1
NO_WEIGHTS = (
    "sample_weight is not supported: weights that are computed from the records reveal them, and "
    "epsilon does not cover that. Use class_weight= with public weights of the classes, or "
    "weights= of dpmac_cli.make_private with a public function of a record."
)
SEEDED_BUDGET = (
    "random_state= with budget=: fits with one seed share their noise, which cancels in their "
    "difference, and a budget adds up costs of independent noise. Leave random_state= out."
)
NO_SHARES = (
    'class_weight="balanced" needs the shares of the classes, which are private if they are '
    "counted in y. Declare what is known of them, a share for every label: "
    'shares={"rare": 0.06, "frequent": 0.94}; or give public weights, class_weight={"rare": 10}.'
)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of :class:`PrivateClassifier` and :class:`PrivateRegressor`.

    Parameters by the name of a setting of ``dpmac train``, except those of its data, are that
    setting, with its default where they are None.

    Attributes:
        epsilon: largest privacy cost of a fit. By default that of the recipe.
        delta: probability with which epsilon may be exceeded.
        sigma: noise multiplier, instead of ``epsilon``.
        model: network, such as "linear" or "mlp".
        backbone: encoder with public weights, such as "minilm" for texts.
        optimizer, epochs, batch_size, lr, clip_norm: of the training.
        calibration: "histogram" for calibrated probabilities, or "none".
        no_dp: whether to train without privacy, as a baseline.
        secure: as ``--secure``.
        device: "cpu", "cuda" or "auto".
        bounds: public range of numbers, (low, high), each one number or one per column. It is not
            read from the records. Images (uint8 of three or four dimensions) and texts have none.
        schema: schema of a data frame: a file, or the contents of one. Its label declares the
            classes, or the range of the numbers to predict, where these are not given.
        kinds: instead of a schema, the kind of each column of a frame by its name.
        budget: what all fits on the same records may cost together; None for each by itself.
        random_state: seed, for reproducible fits: there is no privacy against who knows it, and
            two fits with it share their noise. A budget refuses it.
    """

    epsilon: float | None = None
    delta: float | None = None
    sigma: float | None = None
    model: str | None = None
    backbone: str | None = None
    optimizer: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    clip_norm: float | None = None
    calibration: str | None = None
    no_dp: bool = False
    secure: bool = False
    device: str | None = None
    bounds: Sequence[Any] | None = None
    schema: Mapping[str, Any] | Path | str | None = None
    kinds: Mapping[str, str] | None = None
    budget: Budget | None = None
    random_state: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # noise
        tags.input_tags.string = tags.input_tags.three_d_array = True
        return tags

    def save(self, out: Path | str, *, force: bool = False) -> None:
        """Write the model, its report and its card to a folder, like ``dpmac train``.

        Args:
            out: a new or empty folder.
            force: whether to replace a run that is in the folder.

        Raises:
            NotFittedError: there was no fit.
            InputError: the folder cannot be used.
        """
        check_is_fitted(self)
        where = Path(out)
        folder.check_chosen_folder(where, force)
        new_folder.make_folder(where)
        with lock.locked(where):
            folder.clear(where)
            for name, content in self._files.items():
                write_atomically(where / name, content)

    def _train(self, data: InMemoryData, unit: Any, **settings: Any) -> Self:
        """Train on all records within the budget, and keep what is published.

        Args:
            data: the records.
            unit: unit of privacy of each record; None if each is one.
            settings: settings that are not parameters by the same name.
        """
        if self.budget is not None:
            self._check_budget(self.budget)
        chosen = dict[str, Any]()
        for name, value in self.get_params(deep=False).items():
            if name in GROUPS and GROUPS[name] != DATA:
                chosen[name] = value
        chosen |= settings
        if data.frame is not None and unit is not None:
            chosen["unit"] = UNIT
        if self.random_state is not None:
            chosen["seed"] = int(check_random_state(self.random_state).randint(SEEDS))
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            resolved = resolve(chosen, dataset=data, test_fraction=0, out=run)
            protected = resolved.plan.account_unit[0], ""  # arrays and frames name it otherwise
            if self.budget is not None:
                self.budget.begin(resolved.plan.planned, protected)
                plan = replace(resolved.plan, budget=self.budget.account)
                resolved = replace(resolved, plan=plan)
            finished = finish(train_plan(resolved))
            self._files = dict[str, bytes]()
            for name in (*folder.PUBLISHED, folder.SUMS):
                if (run / name).exists():
                    self._files[name] = (run / name).read_bytes()
        self.notes_ = tuple(map(as_keywords, resolved.notes))
        self.report_ = finished.report
        sentences = finished.report["sentences"]
        self.statement_ = sentences["guarantee"]
        if self.budget is not None:
            self.statement_ += " " + sentences["tuning"]
        epsilon = finished.report["epsilon"]
        self.epsilon_ = math.inf if epsilon is None else epsilon
        return self

    def _check_budget(self, budget: Any) -> None:
        """Raise InputError for what is not a budget, and for fits whose costs it cannot add up."""
        if not isinstance(budget, Budget):
            raise InputError(
                f"budget={budget!r} is not a Budget, which counts all fits on the same records. "
                "Create one, and pass it to all of them: budget=Budget(epsilon=3, delta=1e-5)."
            )
        if self.no_dp:
            raise InputError("budget= is for private fits: leave it out, or no_dp=True.")
        if self.random_state is not None:
            raise InputError(SEEDED_BUDGET)

    def _predictions(self, X: Any, **settings: Any) -> Predictions:
        """Return predictions of new records. Raises NotFittedError before a fit."""
        check_is_fitted(self)
        if self._are_numbers(X):
            X = self._checked_numbers(X, reset=False)
        with tempfile.TemporaryDirectory() as place:
            for name, content in self._files.items():
                (Path(place) / name).write_bytes(content)
            return load(place, device=self.device or "cpu").predict(X, **settings)

    def _schema_of(self, X: Any) -> TableSchema | None:
        """Return what is declared of the columns of a frame; None for other records."""
        return schema_from(self.schema, self.kinds) if self._is_framed(X) else None

    def _is_framed(self, X: Any) -> bool:
        """Return whether records are a data frame whose columns are declared."""
        return is_frame(X) and (self.schema is not None or self.kinds is not None)

    def _are_numbers(self, X: Any) -> bool:
        """Return whether records are rows of numbers."""
        return not (self._is_framed(X) or are_texts(X) or are_images(X))

    def _checked(self, X: Any, y: ArrayLike, **how: Any) -> tuple[Any, NDArray[Any]]:
        """Return records and targets, numbers as an array. Raises ValueError for other shapes."""
        if not self._are_numbers(X):
            return X, column_or_1d(y, warn=True)
        if words := words_in(X):
            raise InputError(
                f"Columns of words: {', '.join(words)}. Declare the kind of each column, with "
                'kinds={"age": "number", "job": "category"} or schema=, not bounds=.'
            )
        records, targets = self._checked_numbers(X, y, **how)
        return records, targets

    def _checked_numbers(self, X: Any, *y: ArrayLike, **how: Any) -> Any:
        """Return rows of numbers as an array, with ``y`` if it is given, as scikit-learn does.

        Raises ValueError for other shapes, and for missing values.
        """
        checked = validate_data(self, X, *y, ensure_all_finite=False, **how)
        records = checked[0] if y else checked
        if not np.isfinite(records).all():
            raise ValueError(NOT_FINITE)
        return checked

    def _data(
        self,
        X: Any,
        targets: NDArray[Any],
        unit: Any,
        schema: TableSchema | None,
        label: Mapping[str, Any],
        **declared: Any,
    ) -> InMemoryData:
        """Return the records of a fit with their targets as a dataset.

        Args:
            X: records.
            targets: numbers of classes, or numbers to predict, shape (records,).
            unit: unit of privacy of each record; None if each is one.
            schema: what is declared of the columns of a frame; None for other records.
            label: what the schema declares of the targets: ``classes``, or ``range``.
            declared: what arrays declare of them.
        """
        if schema is None:
            if unit is not None:
                declared["unit"] = unit
            return arrays_of(X, targets, self.bounds, **declared)
        names = label.get("classes")
        cells = targets if names is None else np.array(names, object)[targets]
        self.n_features_in_ = len(schema.columns)
        return table_with(X, cells, label, schema, unit)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """Classifier whose fit is differentially private.

        from dpmac_cli import Budget, PrivateClassifier

        model = PrivateClassifier(epsilon=3, bounds=(0, 16)).fit(X, y)
        model.predict(X_new), model.epsilon_, model.statement_

    Attributes:
        classes: labels of the classes, declared as public; by default those found in ``y``, which
            one record can change.
        class_weight: public weights by label, or "balanced" for the inverse of ``shares``.
        shares: public shares of the classes by label: what is known of them, not counted in y.
        threshold: decision between two classes: "balanced", "sensitivity=0.9" or a probability; by
            default the most probable class.
    """

    classes: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | str | None = None
    shares: Mapping[Any, float] | None = None
    threshold: str | float | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on a few hundred records
        return tags

    def fit(self, X: Any, y: ArrayLike, unit: ArrayLike | None = None, **others: Any) -> Self:
        """Train on all records.

        Args:
            X: rows of numbers, shape (records, columns); images, texts, or a data frame.
            y: labels, shape (records,).
            unit: unit of privacy of each record, such as a patient; by default each is one.
            others: refused; ``sample_weight`` with the reason.

        Raises:
            InputError: records or settings cannot be used; lists every fault.
            BudgetError: the budget does not allow the fit. Nothing was trained.
            ValueError: the records have a shape or values that scikit-learn refuses, too.
        """
        _refuse(others)
        schema = self._schema_of(X)
        X, labels = self._checked(X, y)
        check_classification_targets(labels)
        declared = self.classes
        if declared is None and schema is not None and schema.label is not None:
            declared = _in_type_of(labels, schema.label.classes)
        self.classes_ = np.unique(labels) if declared is None else _declared_classes(declared)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        names = [*map(str, self.classes_)]
        data = self._data(X, self._codes(labels), unit, schema, {"classes": names}, classes=names)
        if declared is None:
            inferred = ("classes",)
            data = InMemoryData(data.path, data.arrays, data.frame, data.schema, inferred)
        class_weights, shares = self._by_class()
        return self._train(data, unit, class_weights=class_weights, shares=shares)

    def _codes(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        """Return the place of each label in ``classes_``, shape (records,)."""
        places = {label: place for place, label in enumerate(self.classes_.tolist())}
        others = set(labels.tolist()) - places.keys()
        if others:
            verb = "is" if len(others) == 1 else "are"
            raise InputError(
                f"y has {counted(len(others), 'label')} that {verb} not in classes="
                f"{self.classes_.tolist()!r}. Declare every label that a record may have."
            )
        return np.array([places[label] for label in labels.tolist()], np.int64)

    def _by_class(self) -> tuple[list[float] | str | None, list[float] | None]:
        """Return the weights and the shares of the classes, in their order."""
        labels, shares = self.classes_.tolist(), self.shares
        weights: Any = self.class_weight
        if weights == "balanced" and (shares is None or set(labels) - shares.keys()):
            raise InputError(NO_SHARES)
        by_class = None if shares is None else [float(shares[label]) for label in labels]
        if weights is None or isinstance(weights, str):
            return weights, by_class
        return [float(weights.get(label, 1.0)) for label in labels], by_class

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities, shape (records, classes), in the order of ``classes_``.

        Those of a record sum to 1. They are calibrated if the fit was.

        Args:
            X: records of the kind that was fitted, shape (records, columns) for numbers, which are
                clipped to ``bounds``.

        Raises:
            NotFittedError: there was no fit.
            InputError: the records do not fit the model.
            ValueError: numbers are missing, or there is another number of columns.
        """
        probabilities = self._predictions(X).probabilities.astype(np.float64)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each record, or the one that ``threshold`` decides.

        The result has the shape (records,), and the type of the labels of the fit.

        Args:
            X: records; see :meth:`predict_proba`, also for the errors.
        """
        if self.threshold is None:
            places = self.predict_proba(X).argmax(axis=1).tolist()
        else:
            names = [*map(str, self.classes_)]
            places = [names.index(name) for name in self._predictions(X).predicted]
        labels: NDArray[Any] = self.classes_[places]
        return labels


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """Regressor whose fit is differentially private.

        model = PrivateRegressor(epsilon=3, bounds=(0, 16), target_bounds=(0, 100)).fit(X, y)

    Attributes:
        target_bounds: public range of the numbers to predict, (low, high), to which others are
            clipped. Only a data frame may do without: then it is found within epsilon.
        target_transform: "log1p" to predict log(1 + y), for numbers of very different sizes.
        loss: mse, huber or quantile:Q.
    """

    target_bounds: tuple[float, float] | None = None
    target_transform: str | None = None
    loss: str | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on a few hundred records
        return tags

    def fit(self, X: Any, y: ArrayLike, unit: ArrayLike | None = None, **others: Any) -> Self:
        """Train on all records, and return the estimator.

        Args:
            X: rows of numbers, shape (records, columns); images, texts, or a data frame.
            y: numbers to predict, shape (records,).
            unit: unit of privacy of each record, such as a patient; by default each is one.
            others: refused; see :meth:`PrivateClassifier.fit`, also for the errors.
        """
        _refuse(others)
        schema = self._schema_of(X)
        X, targets = self._checked(X, y, y_numeric=True)
        bounds, transform = self.target_bounds, self.target_transform
        if bounds is None and schema is None:
            raise InputError(
                "target_bounds=(low, high) is missing: the public range of the numbers to predict. "
                "Base it on what they mean, not on y, which is private."
            )
        if bounds is None and schema is not None and schema.label is not None:
            bounds, transform = schema.label.range, transform or schema.label.transform
        label: dict[str, Any] = {"type": "number"}
        declared: dict[str, Any] = {"target_transform": transform, "target_name": "y"}
        if bounds is not None:
            low, high = target_range(bounds)
            label |= {"range": [low, high], "transform": transform or "none"}
            declared |= {"target_low": low, "target_high": high}
        numbers = targets.astype(np.float64)
        return self._train(self._data(X, numbers, unit, schema, label, **declared), unit)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the number of each record, within ``target_bounds``, shape (records,).

        Args:
            X: records; see :meth:`PrivateClassifier.predict_proba`, also for the errors.
        """
        return self._predictions(X).answers[:, 0].astype(np.float64)


def _declared_classes(classes: Any) -> NDArray[Any]:
    """Return the labels of ``classes=``, shape (classes,).

    Raises InputError unless they are at least two different ones in a row.
    """
    labels = np.asarray(classes)
    if labels.ndim != 1 or len(set(labels.tolist())) < max(2, len(labels)):
        raise InputError(
            "classes= must list the labels that records may have, two or more different ones, such "
            f"as classes=[0, 1], not {classes!r}."
        )
    return labels


def _in_type_of(labels: NDArray[Any], names: Sequence[Any] | None) -> Sequence[Any] | None:
    """Return the classes of a schema as values of the type of labels; None for no classes."""
    if not names:
        return None
    words = [*map(str, names)]
    if labels.dtype.kind == "b":
        return [word == "True" for word in words]
    return words if labels.dtype.kind in "OUT" else [*map(labels.dtype.type, words)]


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that a fit does not have; weights with the reason."""
    if "sample_weight" in others:
        raise TypeError(NO_WEIGHTS)
    if others:
        raise TypeError(f"fit() got an unexpected keyword argument '{next(iter(others))}'")
