"""One budget for all fits: clones and copies spend it, and other processes cannot."""

import copy
import multiprocessing
import pickle
import shutil
import stat
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from dpmac_cli import Budget, BudgetError, InputError
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.estimators import estimators
from tests.estimators.records import classifier, regressor, rows

X, Y = rows()


def grid(budget: Budget, **given: Any) -> Any:
    """A search of four fits and a last one."""
    return GridSearchCV(classifier(budget=budget), {"lr": [0.01, 0.1]}, cv=2, **given)


@pytest.mark.promise("budget")
def test_clones_and_copies_of_an_estimator_share_its_budget() -> None:
    budget = Budget(3)
    estimator = classifier(budget=budget)
    for made in (clone, copy.copy, copy.deepcopy):
        assert made(estimator).budget is budget
        assert made(budget) is budget


@pytest.mark.promise("budget")
def test_a_fit_is_booked_with_all_of_its_events() -> None:
    budget = Budget(3)
    fitted = classifier(budget=budget).fit(X, Y)
    events = tuple(TrainingEvent(**event) for event in fitted.report_["events"])
    assert len(events) == 2  # steps, and the histogram of the calibration
    assert budget.spent == pytest.approx(total_epsilon(events, 1e-5))
    regressor(budget=budget).fit(X, X[:, 0])
    assert len(budget.events) == 4
    assert budget.spent > fitted.epsilon_


@pytest.mark.promise("budget")
def test_a_grid_books_every_fit() -> None:
    budget = Budget(5)
    search = grid(budget).fit(X, Y)
    assert len(budget.events) == 2 * 5
    assert search.best_estimator_.budget is budget


@pytest.mark.promise("said")
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_model_that_a_grid_chose_says_what_all_fits_cost(adaptive: bool, tmp_path: Path) -> None:
    budget = Budget(9, path=tmp_path / "budget.json", adaptive=adaptive)
    alone = classifier(budget=budget).fit(X, Y)
    assert "Unknown to this run" in alone.report_["sentences"]["tuning"]
    chosen = grid(budget).fit(X, Y).best_estimator_
    chosen.save(tmp_path / "chosen")
    card = (tmp_path / "chosen" / "model-card.md").read_text()
    cost = f"all of them together cost epsilon {format_epsilon(budget.spent)} at delta 1e-05"
    for text in (card, chosen.statement_, chosen.report_["sentences"]["tuning"]):
        assert cost in text
        assert ("the guarantee is the account's target, epsilon 9" in text) is adaptive
    assert budget.spent > chosen.epsilon_


@pytest.mark.promise("budget")
def test_cross_validation_ends_where_the_budget_does(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[Any]()
    train: Any = vars(estimators)["train_plan"]

    def counted(resolved: Any) -> Any:
        trained.append(resolved)
        return train(resolved)

    monkeypatch.setattr(estimators, "train_plan", counted)
    budget = Budget(1.5)
    with pytest.raises(BudgetError, match=r"above the budget of 1\.5.*Nothing was trained"):
        cross_val_score(classifier(budget=budget), X, Y, cv=5, error_score="raise")
    assert len(budget.events) == 2 * len(trained)
    assert 1 <= len(trained) < 5
    assert budget.spent <= 1.5
    spent = budget.spent
    for _ in range(2):
        with pytest.raises(BudgetError):
            classifier(budget=budget).fit(X, Y)
    assert budget.spent == spent


@pytest.mark.parametrize("epsilon", ["2", -1, 0, float("nan"), float("inf"), None])
def test_a_budget_is_a_positive_number(epsilon: Any) -> None:
    with pytest.raises(InputError, match="must be a positive number, as in Budget"):
        Budget(epsilon)
    with pytest.raises(InputError, match="between 0 and 1"):
        Budget(3, delta=epsilon)


@pytest.mark.promise("budget")
def test_a_fit_is_booked_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(3)

    def fails(resolved: Any) -> Any:
        assert len(budget.events) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(estimators, "train_plan", fails)
    with pytest.raises(KeyboardInterrupt):
        classifier(budget=budget).fit(X, Y)
    assert len(budget.events) == 2  # and nothing is given back


@pytest.mark.promise("budget")
def test_a_budget_books_all_events_of_a_fit_or_none() -> None:
    budget = Budget(1)
    cheap, dear = TrainingEvent(0.1, 10.0, 10), TrainingEvent(0.5, 0.7, 100)
    with pytest.raises(BudgetError):
        budget.begin((cheap, dear))
    assert budget.events == ()
    assert budget.spent == 0


@pytest.mark.promise("budget")
@pytest.mark.parametrize("seed", [0, 7, np.random.RandomState(0)], ids=["0", "7", "generator"])
def test_fits_that_would_share_their_noise_are_no_fits_of_a_budget(seed: Any) -> None:
    """Their difference has no noise, and a clone has the same seed or generator."""
    budget = Budget(3)
    seeded = classifier(budget=budget, random_state=seed)
    for estimator in (seeded, clone(seeded)):
        with pytest.raises(InputError, match=r"share their noise.*Leave random_state= out"):
            estimator.fit(X, Y)
    assert budget.events == ()


@pytest.mark.promise("budget")
def test_threads_book_every_fit() -> None:
    budget = Budget(5)
    with joblib.parallel_config(backend="threading"):
        grid(budget, n_jobs=2).fit(X, Y)
    assert len(budget.events) == 2 * 5


@pytest.mark.promise("budget")
def test_a_budget_arrives_closed_in_another_process() -> None:
    budget = Budget(3)
    estimator = pickle.loads(pickle.dumps(classifier(budget=budget)))
    with pytest.raises(BudgetError, match="another process"):
        estimator.fit(X, Y)
    assert pickle.loads(pickle.dumps(estimator)).budget is not budget
    assert budget.events == ()


@pytest.mark.long
@pytest.mark.promise("budget")
def test_processes_of_a_grid_train_nothing_that_is_not_booked() -> None:
    budget = Budget(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with joblib.parallel_config(backend="loky"), pytest.raises(BudgetError):
            grid(budget, n_jobs=2, error_score="raise").fit(X, Y)
    assert budget.events == ()


def _in_a_fork(budget: Budget, answers: Any) -> None:
    try:
        budget.begin((TrainingEvent(0.1, 10.0, 10),))
    except BudgetError:
        answers.put("refused")
    except Exception as failure:  # noqa: BLE001  (the test waits for an answer)
        answers.put(type(failure).__name__)
    else:
        answers.put("booked")


@pytest.mark.promise("budget")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_cannot_spend_the_budget() -> None:
    context: Any = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_in_a_fork, args=(Budget(3), answers))
    process.start()
    assert answers.get() == "refused"
    process.join()


@pytest.mark.promise("budget")
def test_a_budget_in_a_file_is_shared_by_all_that_open_it(tmp_path: Path) -> None:
    one = Budget(4, path=tmp_path / "budget")
    others = pickle.loads(pickle.dumps(one)), Budget(4, path=tmp_path / "budget")
    event = TrainingEvent(0.1, 3.0, 100)
    for budget in (one, *others):
        budget.begin((event,))
    assert one.spent == others[0].spent == others[1].spent > 0
    assert sum(each.steps for each in one.events) == 300
    assert stat.S_IMODE((tmp_path / "budget").stat().st_mode) == 0o600
    with pytest.raises(BudgetError):
        Budget(4, path=tmp_path / "budget").begin((TrainingEvent(0.5, 0.7, 100),))
    with pytest.raises(InputError, match="has another budget"):
        Budget(2, path=tmp_path / "budget")


@pytest.mark.promise("budget")
def test_an_older_copy_of_the_file_is_refused(tmp_path: Path) -> None:
    file, event = tmp_path / "budget", TrainingEvent(0.1, 3.0, 100)
    budget = Budget(4, path=file)
    budget.begin((event,))
    copied = file.read_bytes()
    budget.begin((event,))
    file.write_bytes(copied)
    with pytest.raises(InputError, match="counts less than it did before"):
        budget.begin((event,))


@pytest.mark.promise("budget")
def test_a_budget_whose_file_is_gone_spends_nothing(tmp_path: Path) -> None:
    """A pickled one does not begin another file, and a fitted estimator predicts without it."""
    file, event = tmp_path / "folder" / "budget", TrainingEvent(0.1, 3.0, 100)
    file.parent.mkdir()
    budget = Budget(4, path=file)
    fitted = pickle.dumps(classifier(budget=budget).fit(X, Y))
    budget.begin((event,))
    shutil.rmtree(file.parent)
    there = pickle.loads(fitted)
    assert len(there.predict(X)) == len(X)
    for lost in (there.budget, pickle.loads(pickle.dumps(there)).budget):
        with pytest.raises(InputError, match="does not exist, so what was spent"):
            lost.begin((event,))
        with pytest.raises(InputError, match="does not exist, so what was spent"):
            lost.spent  # noqa: B018  (no figure that may be too small)
    assert not file.parent.exists()
    file.parent.mkdir()
    Budget(4, path=file)
    with pytest.raises(InputError, match="the account of other records"):
        pickle.loads(fitted).budget.begin((event,))


@pytest.mark.promise("budget")
@pytest.mark.parametrize("name", [None, "budget"])
def test_a_budget_has_one_unit(tmp_path: Path, name: str | None) -> None:
    """A record of a person with others is not covered by what those of the others cost."""
    patients = np.arange(len(Y)) // 4
    for units in ((None, patients), (patients, None)):
        budget = Budget(5, path=name and tmp_path / f"{name}{units[0] is None}")
        other = pickle.loads(pickle.dumps(budget)) if name else budget
        classifier(budget=budget).fit(X, Y, unit=units[0])
        before = budget.events
        with pytest.raises(InputError, match="costs of different units cannot be added"):
            classifier(budget=other).fit(X, Y, unit=units[1])
        assert budget.events == before


@pytest.mark.long
@pytest.mark.promise("budget")
def test_processes_of_a_grid_book_every_fit_in_the_file(tmp_path: Path) -> None:
    budget = Budget(5, path=tmp_path / "budget")
    with joblib.parallel_config(backend="loky"):
        grid(budget, n_jobs=2).fit(X, Y)
    whole = Budget(5)
    grid(whole).fit(X, Y)
    assert budget.spent == pytest.approx(whole.spent)


@pytest.mark.promise("budget")
def test_adaptive_fits_add_up_at_an_order_that_is_fixed_beforehand() -> None:
    fixed, adaptive = Budget(3), Budget(3, adaptive=True)
    event = TrainingEvent(0.1, 3.0, 100)
    for budget in (fixed, adaptive):
        budget.begin((event,))
        budget.begin((replace(event, noise_multiplier=4.0),))
    assert fixed.spent < adaptive.spent < 3


def test_a_fitted_estimator_predicts_elsewhere() -> None:
    fitted = classifier(budget=Budget(3)).fit(X, Y)
    there = pickle.loads(pickle.dumps(fitted))
    assert (there.predict(X) == fitted.predict(X)).all()
    assert there.epsilon_ == fitted.epsilon_
