"""An account on disk counts what has begun in every process, before it begins."""

import copy
import math
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dpmac_cli import Account, BudgetError, InputError, files, total_epsilon
from dpmac_cli.accounting import account_file
from dpmac_cli.accounting.accountants import epsilon_at_order, order_for
from dpmac_cli.accounting.events import TrainingEvent

DELTA = 1e-5
STEPS = TrainingEvent(0.1, 2.0, 10)
OTHER = TrainingEvent(1.0, 4.0, 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of an account that is not there yet."""
    return tmp_path / "account.json"


@pytest.mark.promise("ledger")
def test_an_account_on_disk_goes_on_in_another_object(file: Path) -> None:
    first = Account.create(file, delta=DELTA, epsilon=8)
    assert first.epsilon == 0
    first.begin(STEPS)
    second = Account.open(file)
    second.begin(STEPS)
    second.begin(OTHER)
    assert first.events == second.events == (replace(STEPS, steps=20), OTHER)
    assert first.epsilon == total_epsilon((replace(STEPS, steps=20), OTHER), DELTA)
    assert (second.target, second.delta, second.number) == (8, DELTA, first.number)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.promise("allocation")
def test_epochs_that_two_trainings_began_are_counted_whole(file: Path) -> None:
    account = Account.create(file, delta=DELTA)
    event = TrainingEvent(0.2, 2.0, 3, "random-allocation", steps_per_epoch=5)
    account.begin(event)
    account.begin(event)
    assert account.epsilon == total_epsilon((replace(event, steps=10),), DELTA)


@pytest.mark.promise("scores")
def test_costs_of_two_splits_add_up(file: Path) -> None:
    """A test record of one training may be a training record of another."""
    account = Account.create(file, delta=DELTA)
    account.begin(OTHER)
    account.begin(replace(OTHER, records="test"))
    assert account.epsilon == total_epsilon((OTHER, OTHER), DELTA)


@pytest.mark.promise("target")
def test_an_event_above_the_target_is_not_on_disk(file: Path) -> None:
    target = total_epsilon((OTHER,), DELTA) + 0.01
    account = Account.create(file, delta=DELTA, epsilon=target)
    account.begin(OTHER)
    before = file.read_bytes()
    for _ in range(2):
        with pytest.raises(BudgetError, match="With this event epsilon would be"):
            Account.open(file).begin(OTHER)
    assert file.read_bytes() == before
    assert account.epsilon <= target


@pytest.mark.promise("ledger")
def test_nothing_begins_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account.create(file, delta=DELTA)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            account.begin(OTHER)
    assert account.epsilon == Account.open(file).epsilon == 0


# What is refused.


def lost(file: Path, _: bytes) -> None:
    file.unlink()


def damaged(file: Path, _: bytes) -> None:
    file.write_text(file.read_text().replace('"steps": 20', '"steps": 10'))


def cut(file: Path, _: bytes) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def older(file: Path, before: bytes) -> None:
    file.write_bytes(before)


def foreign(file: Path, _: bytes) -> None:
    other = Account.create(file.parent / "other.json", delta=DELTA)
    other.begin(replace(STEPS, steps=100))
    shutil.copy(file.parent / "other.json", file)


@pytest.mark.promise("ledger")
@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (lost, "does not exist"),
        (damaged, "is damaged"),
        (cut, "is damaged"),
        (older, "an older copy was restored"),
        (foreign, "the account of other records"),
    ],
)
def test_an_account_that_may_count_less_is_refused(
    file: Path, happens: Callable[[Path, bytes], None], said: str
) -> None:
    account = Account.create(file, delta=DELTA)
    account.begin(STEPS)
    before = file.read_bytes()
    account.begin(STEPS)
    sent = pickle.dumps(account)
    happens(file, before)
    after = file.read_bytes() if file.exists() else None
    with pytest.raises(InputError, match=said):
        account.begin(STEPS)
    with pytest.raises(InputError, match=said):
        _ = account.epsilon
    with pytest.raises(InputError, match=said):
        pickle.loads(sent)
    assert after == (file.read_bytes() if file.exists() else None)


@pytest.mark.promise("ledger")
def test_an_account_is_created_once(file: Path) -> None:
    with pytest.raises(InputError, match="does not exist, so what was spent"):
        Account.open(file)
    Account.create(file, delta=DELTA).begin(OTHER)
    with pytest.raises(InputError, match="must not be replaced"):
        Account.create(file, delta=DELTA)
    assert Account.open(file).events == (OTHER,)
    refused: Any = ((0.0, 1.0), (1.0, 1.0), (DELTA, 0.0), ("a", 1.0), (DELTA, math.nan))
    for delta, epsilon in refused:
        with pytest.raises(InputError, match=r"(delta|epsilon) must be"):
            Account.create(file.parent / "new.json", delta=delta, epsilon=epsilon)


@pytest.mark.promise("ledger")
def test_an_account_in_use_is_waited_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account.create(file, delta=DELTA)
    monkeypatch.setattr(account_file, "PATIENCE", 0.1)
    with FileLock(f"{file}.lock"), pytest.raises(InputError, match="in use by another process"):
        account.begin(OTHER)
    account.begin(OTHER)
    assert account.events == (OTHER,)


@pytest.mark.promise("ledger")
def test_a_link_is_the_account_that_it_names(file: Path) -> None:
    """Writing replaces files: of a link, it would make another account."""
    account, link = Account.create(file, delta=DELTA), file.with_name("link.json")
    link.symlink_to(file)
    Account.open(link).begin(OTHER)
    assert link.is_symlink()
    assert account.events == Account.open(file).events == Account.open(link).events == (OTHER,)
    dangling = file.with_name("dangling.json")
    dangling.symlink_to(file.with_name("new.json"))
    assert Account.create(dangling, delta=DELTA).path == file.with_name("new.json").resolve()


# Copies.


@pytest.mark.promise("ledger")
def test_a_copy_is_the_same_account(file: Path) -> None:
    for account in (Account(delta=DELTA), Account.create(file, delta=DELTA)):
        assert copy.copy(account) is copy.deepcopy(account) is account


@pytest.mark.promise("ledger")
def test_an_account_in_memory_arrives_closed_in_another_process() -> None:
    account = Account(delta=DELTA, target=8.0)
    account.begin(OTHER)
    arrived = pickle.loads(pickle.dumps(account))
    assert (arrived.number, arrived.epsilon) == (account.number, account.epsilon)
    with pytest.raises(InputError, match="was copied into another process"):
        arrived.begin(OTHER)
    again = pickle.loads(pickle.dumps(arrived))
    with pytest.raises(InputError, match="was copied into another process"):
        again.begin(OTHER)
    assert account.events == (OTHER,)


@pytest.mark.promise("ledger")
def test_a_fork_begins_nothing_in_an_account_in_memory(file: Path) -> None:
    """Both processes would spend the same budget. One on disk is shared."""
    in_memory = Account(delta=DELTA, target=8.0)
    on_disk = Account.create(file, delta=DELTA, epsilon=8)

    def fork() -> None:
        with pytest.raises(InputError, match="was copied into another process"):
            in_memory.begin(OTHER)
        assert in_memory.count == 0
        on_disk.begin(OTHER)

    process = multiprocessing.get_context("fork").Process(target=fork)
    process.start()
    process.join()
    assert process.exitcode == 0
    in_memory.begin(OTHER)
    assert in_memory.events == on_disk.events == (OTHER,)


def spend(account: Account) -> None:
    """Begin five events, or as many as there is budget for."""
    with suppress(BudgetError):
        for _ in range(5):
            account.begin(OTHER)


@pytest.mark.promise("ledger")
def test_processes_and_threads_share_an_account_on_disk(file: Path) -> None:
    account = Account.create(file, delta=DELTA)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spend, args=(account,)) for _ in range(2)]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(spend, [account, Account.open(file)]))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert account.events == (replace(OTHER, steps=20),)


@pytest.mark.promise("target")
def test_threads_share_an_account_in_memory() -> None:
    account = Account(delta=DELTA, target=total_epsilon((replace(OTHER, steps=7),), DELTA))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(spend, [account] * 4))
    assert account.count == 7


# Events that are chosen after results were seen.


@pytest.mark.promise("target")
def test_events_chosen_later_compose_at_one_order_that_is_fixed_before(file: Path) -> None:
    account = Account.create(file, delta=DELTA, epsilon=3, adaptive=True)
    order = order_for(3, DELTA)
    assert account.order == order
    account.begin(OTHER)
    cheap = replace(STEPS, noise_multiplier=8.0)
    account.begin(cheap)
    events = (OTHER, cheap)
    at_order = epsilon_at_order(events, DELTA, order)
    assert Account.open(file).epsilon == at_order
    assert at_order > total_epsilon(events, DELTA, "rdp") > total_epsilon(events, DELTA)
    while True:
        try:
            account.begin(OTHER)
        except BudgetError:
            break
    assert 2.5 < account.epsilon <= 3
    with pytest.raises(InputError, match="needs an epsilon"):
        Account.create(file.parent / "new.json", delta=DELTA, adaptive=True)
    assert epsilon_at_order((), DELTA, order) == 0
