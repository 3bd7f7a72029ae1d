"""Fits on numbers, images, texts and frames, and what is refused."""

import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from dpmac_cli import Budget, InputError, PrivateClassifier, PrivateRegressor, load
from dpmac_cli.release.report import read_report
from dpmac_cli.runs import folder
from tests.estimators.records import RECORDS, SHORT, classifier, regressor, rows

X, Y = rows()
KINDS = {"age": "number", "job": "category"}


def frame() -> pd.DataFrame:
    """A data frame whose columns are declared by kinds."""
    jobs = np.where(X[:, 1] > 0, "nurse", "clerk")
    return pd.DataFrame({"age": X[:, 0], "job": jobs})


def test_a_classifier_predicts_the_labels_that_it_was_given() -> None:
    fitted = classifier(epsilon=50, epochs=10).fit(X, Y)
    assert [*fitted.classes_] == ["high", "low"]
    shares = fitted.predict_proba(X)
    assert shares.shape == (RECORDS, 2)
    assert shares.sum(axis=1) == pytest.approx(np.ones(RECORDS))
    assert (fitted.predict(X) == fitted.classes_[shares.argmax(axis=1)]).all()
    assert fitted.score(X, Y) > 0.8


def test_a_fit_says_what_it_guarantees() -> None:
    fitted = classifier(delta=1e-6).fit(X, Y)
    assert fitted.epsilon_ <= 1
    assert fitted.epsilon_ == fitted.report_["epsilon"] > 0.9
    assert "(1, 1e-06)-differential privacy" in fitted.statement_
    assert fitted.report_["scores"] is None
    assert fitted.report_["data"]["train_size"] == RECORDS
    baseline = classifier(epsilon=None, no_dp=True).fit(X, Y)
    assert math.isinf(baseline.epsilon_)


@pytest.mark.promise("estimators")
def test_classes_that_are_found_in_the_labels_are_said_to_be() -> None:
    found, declared = (classifier(**more).fit(X, Y) for more in ({}, {"classes": ["low", "high"]}))
    assert found.report_["data"]["taken_from_records"] == ["classes"]
    [note] = [note for note in found.notes_ if note.startswith("Classes were taken")]
    assert note.endswith("Declare them to avoid that: classes=['high', 'low']")
    assert declared.report_["data"]["taken_from_records"] == []
    assert [*declared.classes_] == ["low", "high"]
    with pytest.raises(InputError, match=r"y has 1 label that is not in classes=\["):
        classifier(classes=["low", "middle"]).fit(X, Y)


@pytest.mark.promise("estimators")
@pytest.mark.parametrize("estimator", [PrivateClassifier(), PrivateRegressor(target_bounds=(0, 1))])
def test_bounds_are_not_read_from_the_records(estimator: Any) -> None:
    with pytest.raises(InputError, match=r"bounds=\(low, high\) is missing"):
        estimator.fit(X, X[:, 0] > 0 if isinstance(estimator, PrivateClassifier) else X[:, 0])


def test_bounds_are_one_for_all_columns_or_one_for_each() -> None:
    low, high = [-4, -4, -4, -4], [4, 4, 4, 4]
    fitted = classifier(bounds=(low, high)).fit(X, Y)
    assert fitted.report_["data"]["records"]["low"] == low
    beyond = np.where(X > 3, 1000, X)
    clipped = np.where(X > 3, 4, X)
    assert (fitted.predict_proba(beyond) == fitted.predict_proba(clipped)).all()


def test_a_regressor_predicts_within_its_bounds() -> None:
    y = X[:, 0] + X[:, 1]
    fitted = regressor(epsilon=50, epochs=10).fit(X, y)
    found = fitted.predict(X)
    assert found.shape == (RECORDS,)
    assert np.abs(found).max() <= 8
    assert fitted.score(X, y) > 0.5
    with pytest.raises(InputError, match=r"target_bounds=.* is missing"):
        regressor(target_bounds=None).fit(X, y)


def test_images_are_told_by_their_type_and_need_no_bounds() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(RECORDS) % 2
    images = (
        rng.integers(0, 100, (RECORDS, 8, 8), np.uint8)
        + np.uint8(100) * labels.astype(np.uint8)[:, None, None]
    )
    fitted = PrivateClassifier(epsilon=8, **{**SHORT, "epochs": 10}).fit(images, labels)
    assert fitted.report_["data"]["records"]["kind"] == "images"
    assert fitted.score(images, labels) > 0.9


def test_a_frame_is_declared_by_kinds_or_a_schema() -> None:
    declared = {"columns": {"age": {"range": [-4, 4]}, "job": {"categories": ["nurse", "clerk"]}}}
    by_kinds = PrivateClassifier(epsilon=8, kinds=KINDS, **SHORT).fit(frame(), Y)
    by_schema = PrivateClassifier(epsilon=8, schema=declared, **SHORT).fit(frame(), Y)
    for fitted in (by_kinds, by_schema):
        assert fitted.predict(frame()[:5]).shape == (5,)
        assert fitted.report_["data"]["records"]["kind"] == "table"
    with pytest.raises(InputError, match="needs its columns declared"):
        PrivateClassifier(schema=declared, kinds=KINDS).fit(frame(), Y)


def test_the_label_of_a_schema_declares_classes_and_ranges() -> None:
    columns = {"age": {"range": [-4, 4]}, "job": {"categories": ["nurse", "clerk"]}}
    classes = {"columns": columns, "label": {"column": "risk", "classes": ["low", "high", "none"]}}
    fitted = PrivateClassifier(epsilon=8, schema=classes, **SHORT).fit(frame(), Y)
    assert fitted.classes_.tolist() == ["low", "high", "none"]
    assert fitted.report_["data"]["taken_from_records"] == []
    classes = {"columns": columns, "label": {"column": "risk", "classes": ["0", "1"]}}
    coded = (Y == "high").astype(int)
    numbered = PrivateClassifier(epsilon=8, schema=classes, **SHORT).fit(frame(), coded)
    assert numbered.classes_.tolist() == [0, 1]
    ranged = {"columns": columns, "label": {"column": "risk", "range": [-8, 8]}}
    found = PrivateRegressor(epsilon=50, schema=ranged, **SHORT).fit(frame(), X[:, 0])
    assert found.report_["data"]["target"]["low"] == -8
    assert "risk" not in (found.report_["data"]["ranges"] or {})


def test_a_message_about_words_or_bounds_quotes_no_cell() -> None:
    with pytest.raises(InputError, match="Columns of words: job"):
        PrivateClassifier(bounds=(0, 1)).fit(frame(), Y)
    for bounds in (16, "ab", (1, 2, 3)):
        with pytest.raises(InputError, match=r"must be two.*one for each of the 4 columns"):
            classifier(bounds=bounds).fit(X, Y)
    for ends in ([[0, 0], [1, 1]], [[0, 0], [1, 1, 1, 1]], [0, [[1], [1]]]):
        with pytest.raises(InputError, match="numbers for 4 columns"):
            classifier(bounds=ends).fit(X, Y)


def test_missing_values_are_refused_with_what_to_use_instead() -> None:
    """The message of scikit-learn suggests imputers, of which most learn from the records."""
    fitted = classifier().fit(X, Y)
    for missing in (math.nan, math.inf):
        gaps = X.copy()
        gaps[0, 0] = missing
        for use in (
            lambda gaps=gaps: classifier().fit(gaps, Y),
            lambda gaps=gaps: fitted.predict(gaps),
        ):
            with pytest.raises(ValueError, match=r"NaN or infinity.*strategy='constant'"):
                use()


@pytest.mark.promise("estimators")
def test_a_fitted_estimator_has_the_published_files_and_no_record() -> None:
    x = np.random.default_rng(3).uniform(-4, 4, (RECORDS, 4))
    pickled = pickle.dumps(classifier().fit(x, Y))
    assert x.tobytes() not in pickled
    for column in (x, x.astype(np.float32)):
        assert column[0].tobytes() not in pickled
    assert Y.tobytes() not in pickled


class Counter:
    """Something that counts fits, and is no budget."""

    def begin(self, *_: Any) -> None:
        """Count nothing."""


@pytest.mark.promise("estimators")
def test_messages_are_python() -> None:
    with pytest.raises(InputError, match="is not a Budget, which counts all fits"):
        classifier(budget=Counter()).fit(X, Y)
    with pytest.raises(InputError, match=r"budget=Budget\(epsilon=3, delta=1e-5\)"):
        classifier(budget=3).fit(X, Y)
    for shares in (None, {"high": 1.0}):
        with pytest.raises(InputError, match=r'shares={"rare": 0\.06, "frequent": 0\.94}'):
            classifier(class_weight="balanced", shares=shares).fit(X, Y)


def test_the_range_of_a_frame_s_target_is_found_within_epsilon() -> None:
    fitted = PrivateRegressor(epsilon=50, kinds=KINDS, **SHORT).fit(frame(), X[:, 0])
    assert fitted.predict(frame()).shape == (RECORDS,)
    assert fitted.report_["data"]["ranges"]
    assert fitted.epsilon_ <= 50


@pytest.mark.promise("estimators")
def test_a_unit_protects_all_of_its_records() -> None:
    unit = np.arange(RECORDS) // 4
    fitted = classifier().fit(X, Y, unit=unit)
    assert fitted.report_["data"]["train_size"] == RECORDS // 4
    framed = PrivateClassifier(epsilon=8, kinds=KINDS, **SHORT).fit(frame(), Y, unit=unit)
    assert framed.report_["data"]["unit"] == "unit of privacy"
    assert framed.report_["data"]["train_size"] == RECORDS // 4


def ids() -> pd.Series:
    """A unit for each record, two of which are unknown."""
    numbers = pd.Series(np.arange(RECORDS)).astype("Int64")
    numbers[:2] = pd.NA
    return numbers


#: Units of which some merge persons, and why they are refused.
MERGED: dict[str, tuple[Any, str]] = {
    "Int64": (ids(), "no unit"),
    "string": (ids().astype("string"), "no unit"),
    "objects": (ids().astype(object), "no unit"),
    "text": ([f"{name}" for name in ids()], "no unit"),
    "None": ([None, *range(1, RECORDS)], "no unit"),
    "NaN": ([np.nan, *range(1, RECORDS)], "no unit"),
    "NaT": (pd.Series([pd.NaT, *range(1, RECORDS)]), "no unit"),
    "NaT as text": (["NaT", *map(str, range(1, RECORDS))], "no unit"),
    "masked": (np.ma.masked_less(np.arange(RECORDS), 2), "masked values"),
    "float64": (1e16 + np.arange(RECORDS), "no whole number that its type stores exactly"),
    "float32": (pd.Series(2.0**24 + np.arange(RECORDS), dtype="float32"), "no whole number"),
    "Float32": (pd.Series(2.0**24 + np.arange(RECORDS), dtype="Float32"), "no whole number"),
    "rows": (np.arange(RECORDS)[:, None], "unit must give the unit of each of the 240 records"),
    "short": (np.arange(3), "unit must give the unit of each of the 240 records"),
}


@pytest.mark.promise("unit")
@pytest.mark.parametrize("how", MERGED)
@pytest.mark.parametrize("framed", [True, False], ids=["frame", "rows"])
def test_records_of_unknown_or_merged_persons_are_refused(how: str, framed: bool) -> None:
    """Persons who share a unit are clipped as one, so removing one moves the sum by up to 2."""
    unit, why = MERGED[how]
    estimator = PrivateClassifier(epsilon=8, kinds=KINDS, **SHORT) if framed else classifier()
    with pytest.raises(InputError, match=why):
        estimator.fit(frame() if framed else X, Y, unit=unit)


@pytest.mark.promise("unit")
def test_a_unit_is_one_whatever_type_its_name_has() -> None:
    persons = np.arange(RECORDS) // 4
    for unit in (
        persons.astype(np.float32),
        pd.Series(persons, dtype="Int64"),
        [*map(str, persons)],
    ):
        fitted = PrivateClassifier(epsilon=8, kinds=KINDS, **SHORT).fit(frame(), Y, unit=unit)
        assert fitted.report_["data"]["train_size"] == RECORDS // 4


@pytest.mark.promise("estimators")
def test_a_schema_with_test_records_is_refused() -> None:
    """A fit would score them exactly, or train on what somebody keeps for testing."""
    columns = {"age": {"range": [-4, 4]}, "job": {"categories": ["nurse", "clerk"]}}
    tested = {"columns": columns, "test": {"column": "part", "values": ["test"]}}
    parts = frame().assign(part=np.where(X[:, 2] > 2, "test", "train"))
    with pytest.raises(InputError, match=r"trains on all of its records\. Leave test: out"):
        PrivateClassifier(epsilon=8, schema=tested, **SHORT).fit(parts, Y)
    dropped = {"columns": columns, "drop": ["part"]}
    fitted = PrivateClassifier(epsilon=8, schema=dropped, **SHORT).fit(parts, Y)
    assert fitted.report_["data"]["train_size"] == RECORDS
    assert fitted.report_["scores"] is None


def test_units_are_routed_through_pipelines_and_cross_validation() -> None:
    unit = np.arange(RECORDS) // 4
    with sklearn.config_context(enable_metadata_routing=True):
        asked = classifier().set_fit_request(unit=True)
        pipeline = make_pipeline(FunctionTransformer(), asked).fit(X, Y, unit=unit)
        found = cross_validate(pipeline, X, Y, params={"unit": unit}, cv=2, return_estimator=True)
    assert pipeline[-1].report_["data"]["unit"] == "unit"
    assert all(each[-1].report_["data"]["unit"] == "unit" for each in found["estimator"])


def test_class_weights_and_shares_are_by_label() -> None:
    weighed = classifier(class_weight={"high": 3}).fit(X, Y)
    assert "3, 1" in weighed.report_["sentences"]["public_records"].replace("1, 0.3333", "3, 1")
    balanced = classifier(class_weight="balanced", shares={"high": 0.2, "low": 0.8}).fit(X, Y)
    assert "class weights, 1, 0.25" in balanced.report_["sentences"]["public_records"]
    with pytest.raises(InputError, match="shares"):
        classifier(class_weight="balanced").fit(X, Y)


def test_a_threshold_decides() -> None:
    fitted = classifier(epsilon=50, threshold=0.99, calibration="none").fit(X, Y)
    assert (fitted.predict(X) == "high").mean() > 0.5


@pytest.mark.promise("estimators")
def test_what_cannot_be_private_is_refused_with_a_reason() -> None:
    with pytest.raises(TypeError, match="sample_weight is not supported: weights that are comp"):
        classifier().fit(X, Y, sample_weight=np.ones(RECORDS))
    with pytest.raises(TypeError, match="unexpected keyword argument 'monitor'"):
        classifier().fit(X, Y, monitor=1)
    with pytest.raises(InputError, match="is for private fits"):
        classifier(epsilon=None, no_dp=True, budget=Budget(1)).fit(X, Y)
    with pytest.raises(NotFittedError):
        classifier().predict(X)


@pytest.mark.promise("estimators")
def test_a_seed_repeats_a_fit_and_is_said() -> None:
    one, other = (classifier(random_state=7).fit(X, Y) for _ in range(2))
    assert (one.predict_proba(X) == other.predict_proba(X)).all()
    assert "for one run alone: two runs with it share their noise" in one.statement_
    assert "seed" not in classifier().fit(X, Y).statement_


def test_a_saved_fit_is_a_run_like_any_other(tmp_path: Path) -> None:
    fitted = classifier().fit(X, Y)
    fitted.save(tmp_path / "run")
    assert read_report(tmp_path / "run").epsilon == fitted.epsilon_
    there = load(tmp_path / "run").predict(X).probabilities
    assert there == pytest.approx(fitted.predict_proba(X).astype(np.float32))
    card = (tmp_path / "run" / folder.CARD).read_text()
    assert "test accuracy" not in card
    with pytest.raises(InputError, match="already contains a run"):
        fitted.save(tmp_path / "run")
    other = classifier().fit(X, Y)
    other.save(tmp_path / "run", force=True)
    assert load(tmp_path / "run").predict(X).probabilities == pytest.approx(
        other.predict_proba(X).astype(np.float32)
    )


@pytest.mark.parametrize("name", ["Budget", "total_epsilon"])
def test_names_that_need_no_scikit_learn_do_not_import_it(name: str) -> None:
    slow = "{'sklearn', 'torch'} & {*sys.modules}"
    code = f"import sys, dpmac_cli; dpmac_cli.{name}; sys.exit(bool({slow}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((16, 0), r"^bounds=\(16, 0\): low is not below high\. Write"),
        (([0] * 4, [1, 0, 1, 1]), r"^bounds=.*: low is not below high in X\[:, 1\]\. Write"),
        ((0, np.nan), r"^bounds=.*: low is not below high\."),
    ],
)
def test_bounds_in_the_wrong_order_are_named(bounds: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        classifier(bounds=bounds).fit(X, Y)


@pytest.mark.parametrize("bounds", [(100, 0), 3, (0, 1, 2), ("a", "b")])
def test_a_target_range_that_is_none_is_named(bounds: Any) -> None:
    with pytest.raises(InputError, match=r"^target_bounds"):
        regressor(target_bounds=bounds).fit(X, np.arange(len(X)))


@pytest.mark.parametrize("classes", [3, ["low"], ["low", "low"], [["low", "high"]]])
def test_classes_that_are_no_labels_are_named(classes: Any) -> None:
    with pytest.raises(InputError, match=r"^classes= must list the labels"):
        classifier(classes=classes).fit(X, Y)
