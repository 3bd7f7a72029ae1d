"""Events are counted in one place, before they begin; what does not begin does not run."""

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dpmac_cli import BudgetError, files, make_private, resume
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent, score_event
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import Ledger, done, read_ledger
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import ChunkedSum
from dpmac_cli.training.private_program import check_counted
from dpmac_cli.training.step import Step
from tests.digits_runs import after, digits_config
from tests.digits_runs import digits_network as network
from tests.doors import DOORS, STEPS, Trained

TRAINING = TrainingEvent(0.1, 2.0, 20)
#: Some other mechanism on all records, such as a histogram.
OTHER = TrainingEvent(1.0, 4.0, 1)


def opened(**given: Any) -> Account:
    return Account(**{"event": TRAINING, "delta": 1e-5, **given})


# What counts.


@pytest.mark.promise("price")
def test_an_event_that_is_begun_twice_counts_twice() -> None:
    account = opened()
    for _ in range(2):
        account.begin(OTHER)
        account.begin(account.steps(3))
    assert account.events == (replace(TRAINING, steps=6), OTHER, OTHER)
    composed = replace(TRAINING, steps=6), replace(OTHER, steps=2)
    assert account.epsilon == total_epsilon(composed, 1e-5)
    assert (account.count, account.remaining) == (8, 14)


@pytest.mark.promise("allocation")
def test_steps_of_one_training_share_epochs_and_those_of_two_do_not() -> None:
    event = TrainingEvent(0.2, 2.0, 20, "random-allocation", steps_per_epoch=5)
    account = opened(event=event)
    for _ in range(6):
        account.begin(account.steps(1))
    assert account.done.compositions == 2
    following = opened(event=event, earlier=account.past)
    following.begin(following.steps(1))
    assert [each.compositions for each in following.events] == [2, 1]
    following.begin(OTHER)
    assert following.epsilon == total_epsilon((*following.before, *following.own), 1e-5)


@pytest.mark.promise("again")
def test_a_copy_is_the_same_account_and_a_pickled_one_has_the_same_number(tmp_path: Path) -> None:
    run = tmp_path / "name of a patient"
    run.mkdir()
    ledger = Ledger(event=TRAINING, delta=1e-5, run=run)
    ledger.begin(ledger.steps(2))
    assert copy.deepcopy(ledger) is ledger
    stored = pickle.dumps(ledger)
    assert b"patient" not in stored
    loaded = pickle.loads(stored)
    assert (type(loaded), loaded.number, loaded.own) == (Account, ledger.number, ledger.own)
    following = opened(earlier=ledger.past)
    check_counted(following, [loaded, ledger])
    ledger.begin(ledger.steps(1))
    with pytest.raises(ModelError, match="was trained by another"):
        check_counted(following, [loaded, ledger])


def test_an_account_without_a_training_counts_other_events() -> None:
    account = Account(delta=1e-5)
    assert (account.epsilon, account.remaining) == (0, 0)
    account.begin(OTHER)
    assert account.events == (OTHER,)
    assert account.epsilon == total_epsilon((OTHER,), 1e-5)
    with pytest.raises(BudgetError, match="0 are left"):
        opened(event=replace(TRAINING, steps=0)).begin(replace(TRAINING, steps=1))


# What does not begin.


@pytest.mark.promise("target")
@pytest.mark.parametrize("budget", ["max_epsilon", "target"])
def test_an_event_above_the_budget_does_not_begin(budget: str) -> None:
    first, second = (total_epsilon((OTHER,) * count, 1e-5) for count in (1, 2))
    account = opened(event=replace(TRAINING, noise_multiplier=100.0), **{budget: second - 0.01})
    account.begin(OTHER)
    assert account.epsilon == first
    with pytest.raises(BudgetError, match="With this event epsilon would be"):
        account.begin(OTHER)
    assert account.events == (OTHER,)
    with pytest.raises(BudgetError, match="exceed the 20 that the budget allows"):
        account.begin(account.steps(21))
    assert account.events == (OTHER,)


@pytest.mark.promise("target")
@pytest.mark.parametrize("budget", ["max_epsilon", "target"])
def test_another_event_takes_its_cost_off_the_planned_steps(budget: str) -> None:
    limit = total_epsilon((TRAINING,), 1e-5)
    account = opened(**{budget: limit})
    account.shorten()
    assert account.remaining == 20
    account.begin(account.steps(2))
    account.begin(OTHER)
    assert 0 < account.remaining < 18
    account.begin(account.steps(account.remaining))
    assert 0.9 * limit < account.epsilon <= limit
    with pytest.raises(BudgetError):
        account.begin(account.steps(1))


@pytest.mark.promise("scores")
def test_the_planned_score_begins_once_within_the_budget() -> None:
    score = score_event(2.0)
    limit = total_epsilon((score,), 1e-5)
    account = opened(score=score, max_epsilon=limit)
    account.shorten()
    account.begin(account.steps(account.remaining))
    account.begin(score)
    assert account.epsilon <= limit
    with pytest.raises(BudgetError):
        account.begin(score)


@pytest.mark.promise("scores")
def test_no_other_event_uses_the_budget_of_the_planned_score() -> None:
    score, other = score_event(2.0), replace(OTHER, records="test")
    limit = total_epsilon((score,), 1e-5) + 0.01
    account = opened(event=replace(TRAINING, noise_multiplier=100.0), score=score, target=limit)
    with pytest.raises(BudgetError):
        account.begin(other)
    account.begin(score)
    assert account.epsilon <= limit


# At every door.


def order(monkeypatch: pytest.MonkeyPatch, raises: float = math.inf) -> list[str]:
    """What happens: "begin", and "read" for each use of records. An event may be refused."""
    seen = list[str]()
    begin, draw, of = Account.begin, Step._draw, ChunkedSum.of
    evaluate = Trainer.evaluate

    def begun(self: Account, event: TrainingEvent) -> None:
        if seen.count("begin") >= raises:
            seen.append("refused")
            raise BudgetError("refused")
        begin(self, event)
        seen.append("begin")

    def drawn(self: Step) -> Any:
        seen.append("draw")
        return draw(self)

    def read(self: ChunkedSum, *args: Any) -> tuple[Tensor, int]:
        seen.append("read")
        return of(self, *args)

    def scored(self: Trainer, *, covered: LayerDraws | None = None) -> Any:
        if covered is not None:
            seen.append("read")
        return evaluate(self, covered=covered)

    monkeypatch.setattr(Account, "begin", begun)
    monkeypatch.setattr(Step, "_draw", drawn)
    monkeypatch.setattr(ChunkedSum, "of", read)
    monkeypatch.setattr(Trainer, "evaluate", scored)
    return seen


@pytest.mark.promise("price")
@pytest.mark.parametrize("door", DOORS)
def test_every_step_begins_before_its_records_are_drawn(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = order(monkeypatch)
    DOORS[door]("still", {"sigma": 6.0, "steps": STEPS, "delta": 1e-5}, Trained())
    assert seen.count("begin") >= STEPS
    assert seen == ["begin", "draw", "read"] * seen.count("begin")


@pytest.mark.promise("target")
@pytest.mark.parametrize("door", ["train", "make_private", "PrivateStep"])
def test_nothing_runs_that_did_not_begin(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = order(monkeypatch, raises=2)
    settings = {"sigma": 6.0, "steps": 4, "delta": 1e-5}
    if door == "train":
        with pytest.raises(BudgetError, match="refused"):
            DOORS[door]("still", settings, Trained())
    else:
        DOORS[door]("still", settings, Trained())
    assert seen == [*["begin", "draw", "read"] * 2, "refused"]


@pytest.mark.promise("scores")
def test_a_covered_score_begins_before_a_test_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "cover_scores": True,
        "sigma": 6,
        "steps": 2,
        "recipe": "paper",
        "out": "run",
    }
    seen = order(monkeypatch)
    report = finish(train_plan(digits_config(**settings))).report
    assert seen == [*["begin", "draw", "read"] * 2, "begin", "read"]
    assert sum(event["records"] == "test" for event in report["events"]) == 1
    seen = order(monkeypatch, raises=2)
    with pytest.raises(BudgetError, match="refused"):
        finish(train_plan(digits_config(**{**settings, "out": "again"})))
    assert seen == [*["begin", "draw", "read"] * 2, "refused"]


def test_a_network_carries_the_account_of_its_program() -> None:
    net = network()
    private = make_private(net, "digits", sigma=6, steps=2, batch_size=128, device="cpu")
    private.step()
    assert private.event.steps == 1
    following = make_private(net, "digits", sigma=6, steps=2, batch_size=128, device="cpu")
    assert following.epsilon == private.epsilon


# On disk.


@pytest.mark.promise("ledger")
def test_another_event_is_on_disk_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(event=TRAINING, delta=1e-5, run=tmp_path, score=score_event(2.0))
    ledger.begin(OTHER)
    found = read_ledger(tmp_path)
    assert found is not None
    assert [event for event in found.events if event.steps] == [OTHER]
    ledger.begin(ledger.steps(20))
    ledger.begin(score_event(2.0))
    found = read_ledger(tmp_path)
    assert found is not None
    assert sorted(map(repr, found.events)) == sorted(map(repr, ledger.events))

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "write_atomically", full)
    before = ledger.events
    with pytest.raises(OSError, match="No space left"):
        ledger.begin(OTHER)
    assert ledger.events == before


@pytest.mark.promise("ledger")
def test_a_resumed_run_counts_another_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = digits_config(out="run", steps=4, sigma=6, model="linear")
    finish(train_plan(config, after(2)))
    kept = read_ledger(Path("run"))
    assert kept is not None
    ledger = Ledger(event=kept.event, begun=kept.begun, delta=1e-5, run=Path("run"))
    ledger.begin(OTHER)
    ledger.record()
    report = resume("run").report
    events = [TrainingEvent(**event) for event in report["events"]]
    assert OTHER in events
    assert report["epsilon"] == total_epsilon(tuple(events), report["delta"])
    assert (Path("run") / folder.CHECKPOINTS).exists()


def test_a_done_event_leaves_nothing() -> None:
    account = done(OTHER)
    assert (account.own, account.remaining, account.private) == ((OTHER,), 0, True)
    assert not done(replace(OTHER, noise_multiplier=0.0)).private
    assert resolve(dataset="digits", sigma=6).plan.private
