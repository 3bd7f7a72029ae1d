"""Private classifiers and regressors as estimators of scikit-learn.

They are a door to :func:`dpmac_cli.train` and :meth:`dpmac_cli.Run.predict`: a fit is a run on all
of its records, without test records, and what it publishes is kept in memory. Out of scope: weights
of single records, sparse matrices, and fits that continue others.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.data.column_schema import Label
from dpmac_cli.errors import InputError, as_keywords
from dpmac_cli.estimators.budget import Budget
from dpmac_cli.estimators.records import (
    UNIT,
    are_images,
    are_texts,
    arrays_of,
    is_frame,
    schema_from,
    table_with,
    words_in,
)
from dpmac_cli.files import write_atomically
from dpmac_cli.release.prediction import Predictions
from dpmac_cli.release.run import load
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder
from dpmac_cli.runs.resolve import resolve

#: Largest seed that is drawn from a generator of numbers.
SEEDS = 2**31 - 1
NO_WEIGHTS = (
    "sample_weight is not supported: weights that are computed from the records reveal them, and "
    "epsilon does not cover that. Use class_weight= with public weights of the classes, or "
    "weights= of dpmac_cli.make_private with a public function of a record."
)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of :class:`PrivateClassifier` and :class:`PrivateRegressor`.

    Attributes:
        epsilon, delta, sigma, model, backbone, optimizer, epochs, batch_size, lr, clip_norm,
            calibration, no_dp, secure, device: settings of ``dpmac train``, with its defaults where
            they are None.
        bounds: public range of numbers, (low, high), each one number or one per column. It is not
            read from the records. Images (uint8 of three or four dimensions) and texts have none.
        schema: schema of a data frame: a file, or the contents of one. Its label declares the
            classes, or the range of the numbers to predict, where these are not given.
        kinds: instead of a schema, the kind of each column of a frame by its name.
        budget: what all fits on the same records may cost together; None for each by itself.
        random_state: seed, for reproducible fits: there is no privacy against who knows it.
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

    #: Parameters that are settings of a run by the same name.
    SETTINGS: ClassVar[tuple[str, ...]] = (
        *("epsilon", "delta", "sigma", "model", "backbone", "optimizer", "epochs", "batch_size"),
        *("lr", "clip_norm", "calibration", "no_dp", "secure", "device"),
    )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # noise
        tags.input_tags.string = tags.input_tags.three_d_array = True
        return tags

    def save(self, out: Path | str) -> None:
        """Write the model, its report and its card to a new or empty folder, like ``dpmac train``.

        Raises InputError if the folder cannot be used.
        """
        check_is_fitted(self)
        where = Path(out)
        folder.check_chosen_folder(where, force=False)
        folder.make_folder(where)
        for name, content in self._files.items():
            write_atomically(where / name, content)

    def _train(self, data: InMemoryData, unit: Any, **settings: Any) -> Self:
        """Train on all records within the budget, and keep what is published."""
        given = {name: getattr(self, name) for name in self.SETTINGS} | settings
        if data.frame is not None and unit is not None:
            given["unit"] = UNIT
        if self.random_state is not None:
            given["seed"] = int(check_random_state(self.random_state).randint(SEEDS))
        if self.budget is not None and self.no_dp:
            raise InputError("budget= is for private fits: leave it out, or no_dp=True.")
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            resolved = resolve(given, dataset=data, test_fraction=0, out=run)
            protected = resolved.plan.account_unit[0], ""  # arrays and frames name it otherwise
            if self.budget is not None:
                self.budget.begin(resolved.plan.planned, protected)
            finished = finish(train_plan(resolved))
            self._files = {
                name: (run / name).read_bytes()
                for name in (*folder.PUBLISHED, folder.SUMS)
                if (run / name).exists()
            }
        self.notes_ = tuple(map(as_keywords, resolved.notes))
        self.report_ = finished.report
        self.statement_ = finished.report["sentences"]["guarantee"]
        epsilon = finished.report["epsilon"]
        self.epsilon_ = math.inf if epsilon is None else epsilon
        return self

    def _predictions(self, X: Any, **settings: Any) -> Predictions:
        """Return predictions of new records. Raises NotFittedError before a fit."""
        check_is_fitted(self)
        if not (self._is_framed(X) or are_texts(X) or are_images(X)):
            X = validate_data(self, X, reset=False)
        with tempfile.TemporaryDirectory() as place:
            for name, content in self._files.items():
                (Path(place) / name).write_bytes(content)
            return load(place, device=self.device or "cpu").predict(X, **settings)

    def _is_framed(self, X: Any) -> bool:
        """Return whether records are a data frame whose columns are declared."""
        return is_frame(X) and (self.schema is not None or self.kinds is not None)

    def _declared_label(self, X: Any) -> Label | None:
        """Return what the schema of a frame says of its label; None without a schema."""
        if self.schema is None or not self._is_framed(X):
            return None
        return schema_from(self.schema, self.kinds).label

    def _checked_with(self, X: Any, y: ArrayLike, **how: Any) -> tuple[Any, NDArray[Any]]:
        """Return records and targets, numbers as an array. Raises ValueError for other shapes."""
        if self._is_framed(X) or are_texts(X) or are_images(X):
            return X, column_or_1d(y, warn=True)
        if words := words_in(X):
            raise InputError(
                f"Columns of words: {', '.join(words)}. Declare the kind of each column, with "
                'kinds={"age": "number", "job": "category"} or schema=, not bounds=.'
            )
        records, targets = validate_data(self, X, y, **how)
        return records, targets

    def _data(
        self,
        X: Any,
        targets: NDArray[Any],
        unit: Any,
        label: Mapping[str, Any],
        **declared: Any,
    ) -> InMemoryData:
        """Return the records of a fit with their targets as a dataset.

        Args:
            X: records.
            targets: numbers of classes, or numbers to predict.
            unit: unit of privacy of each record; None if each is one.
            label: what the schema of a frame declares of the targets; ``names`` of the classes.
            declared: what arrays declare of them.
        """
        if self._is_framed(X):
            schema = schema_from(self.schema, self.kinds)
            names = label.get("classes")
            cells = targets if names is None else np.array(names, object)[targets]
            self.n_features_in_ = len(schema.columns)
            return table_with(X, cells, label, schema, unit)
        more = declared if unit is None else {**declared, "unit": unit}
        return arrays_of(X, targets, self.bounds, **more)


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
            X: rows of numbers, images, texts, or a data frame.
            y: labels, shape (records,).
            unit: unit of privacy of each record, such as a patient; by default each is one.

        Raises:
            InputError: records or settings cannot be used; lists every fault.
            BudgetError: the budget does not allow the fit. Nothing was trained.
        """
        _refuse(others)
        X, labels = self._checked_with(X, y)
        check_classification_targets(labels)
        declared = self._declared_classes(X, labels)
        self.classes_ = np.unique(labels) if declared is None else np.asarray(declared)
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        names = [str(label) for label in self.classes_]
        places = {label: place for place, label in enumerate(self.classes_.tolist())}
        strange = {label for label in labels.tolist() if label not in places}
        if strange:
            raise InputError(f"y has {len(strange)} labels that are not in classes=.")
        codes = np.array([places[label] for label in labels.tolist()], np.int64)
        data = self._data(X, codes, unit, {"classes": names}, classes=names)
        if declared is None:
            found = ("classes",)
            data = InMemoryData(data.path, data.arrays, data.frame, data.schema, found)
        return self._train(
            data,
            unit,
            class_weights=self._by_class(self.class_weight),
            shares=self._by_class(self.shares),
            threshold=self.threshold,
        )

    def _declared_classes(self, X: Any, labels: NDArray[Any]) -> Sequence[Any] | None:
        """Return the public labels of the classes, in the type of ``labels``; None if not given."""
        label = self._declared_label(X)
        if self.classes is not None or label is None or not label.classes:
            return self.classes
        names = [str(name) for name in label.classes]
        if labels.dtype.kind == "b":
            return [name == "True" for name in names]
        return names if labels.dtype.kind in "OUT" else [*map(labels.dtype.type, names)]

    def _by_class(self, values: Mapping[Any, float] | str | None) -> list[float] | str | None:
        """Return numbers in the order of the classes; 1 for those without one."""
        if values is None or isinstance(values, str):
            return values
        return [float(values.get(label, 1.0)) for label in self.classes_.tolist()]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities, shape (records, classes), in the order of ``classes_``."""
        found = self._predictions(X).probabilities.astype(np.float64)
        found /= found.sum(axis=1, keepdims=True)
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each record, or the one that ``threshold`` decides."""
        if self.threshold is None:
            places = self.predict_proba(X).argmax(axis=1).tolist()
        else:
            names = [str(label) for label in self.classes_]
            places = [names.index(name) for name in self._predictions(X).predicted]
        labels: NDArray[Any] = self.classes_[places]
        return labels


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """Regressor whose fit is differentially private.

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
        """Train on all records; ``y`` are numbers to predict. See :class:`PrivateClassifier`."""
        _refuse(others)
        X, targets = self._checked_with(X, y, y_numeric=True)
        targets = targets.astype(np.float64)
        if self.target_bounds is None and not self._is_framed(X):
            raise InputError(
                "target_bounds=(low, high) is missing: the public range of the numbers to predict. "
                "Base it on what they mean, not on y, which is private."
            )
        bounds, transform = self.target_bounds, self.target_transform
        known = self._declared_label(X)
        if bounds is None and known is not None and known.range is not None:
            bounds, transform = known.range, transform or known.transform
        label: dict[str, Any] = {"type": "number"}
        declared: dict[str, Any] = {"target_transform": transform, "target_name": "y"}
        if bounds is not None:
            low, high = map(float, bounds)
            label |= {"range": [low, high], "transform": transform or "none"}
            declared |= {"target_low": low, "target_high": high}
        return self._train(self._data(X, targets, unit, label, **declared), unit, loss=self.loss)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the number of each record, within ``target_bounds``."""
        return self._predictions(X).answers[:, 0].astype(np.float64)


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that a fit does not have; weights with the reason."""
    if "sample_weight" in others:
        raise TypeError(NO_WEIGHTS)
    if others:
        raise TypeError(f"fit() got an unexpected keyword argument '{next(iter(others))}'")
