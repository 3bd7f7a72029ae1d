"""A silo's epsilon counts every step that began, and nothing but its reply leaves it."""

import dataclasses
import itertools
import json
import math
import random
import re
import secrets
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import (
    Account,
    ArrayData,
    BudgetError,
    InputError,
    Poisson,
    RandomAllocation,
    TrainingEvent,
    federation,
    total_epsilon,
)
from dpmac_cli.randomness.keystream import STREAMS, Keys
from dpmac_cli.silo import rounds
from dpmac_cli.silo.silo import LOCKED, REFUSED, USED_UP, Silo, SiloError
from dpmac_cli.training import loading, private_program, private_step
from dpmac_cli.training.step import Step
from tests.silo.hospital import (
    BATCH,
    DELTA,
    EPSILON,
    RECORDS,
    ROUNDS,
    STEPS,
    Patients,
    ask,
    ask_until_killed,
    cost,
    killed_at,
    run,
    sigma,
    silo,
    start,
)
from tests.test_resume import Draws
from tests.tiers import rest_long, weekly

KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A fork has no other threads."""
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a silo that has not begun."""
    return tmp_path / "silo"


def begun(folder: Path) -> int:
    return Account.open(folder / rounds.ACCOUNT).count


def taken(folder: Path) -> int:
    """Return the number of steps that used records."""
    log = folder.parent / "steps"
    return len(log.read_text()) if log.exists() else 0


# What is counted.


@pytest.mark.promise("silo")
def test_rounds_in_processes_of_their_own_cost_what_the_whole_event_costs(folder: Path) -> None:
    for number in range(1, ROUNDS + 1):
        assert run(ask, folder, number) == 0
        with silo(folder) as opened:
            assert opened.epsilon == cost(number * STEPS)
            assert opened.rounds_left == ROUNDS - number
    assert 2.99 < cost(ROUNDS * STEPS) <= EPSILON
    assert run(ask, folder, ROUNDS + 1) == 1
    assert begun(folder) == ROUNDS * STEPS


@pytest.mark.promise("silo")
@pytest.mark.parametrize("place", rest_long([8, *range(1, 8), *range(9, 20)], 2))
def test_a_round_that_is_killed_is_charged_and_begun_again(folder: Path, place: int) -> None:
    """Two places in each step, and two at each file that is written."""
    reply = ask(folder, 1)
    assert run(ask_until_killed, folder, 2, place, reply.weights) in (KILLED, 0)
    assert begun(folder) in (STEPS, 2 * STEPS)
    assert taken(folder) <= begun(folder) - STEPS
    if taken(folder):
        assert begun(folder) == 2 * STEPS, "charged before a record is read"
    before = begun(folder)
    again = ask(folder, 2, reply.weights)
    assert again.claim.begun in (before, before + STEPS)
    assert again.claim.epsilon == cost(again.claim.begun)
    assert ask(folder, 2, reply.weights).claim == again.claim


@pytest.mark.promise("silo")
def test_a_lost_round_shortens_the_training(folder: Path) -> None:
    ask(folder, 1)
    assert run(ask_until_killed, folder, 2, 6) == KILLED
    assert begun(folder) == 2 * STEPS
    for number in range(2, ROUNDS):
        assert ask(folder, number).claim.begun == (number + 1) * STEPS
    with silo(folder) as opened:
        assert (opened.rounds_left, opened.epsilon) == (0, cost(ROUNDS * STEPS))
        assert opened._rounds.lost(opened._open.own) == 1
    with pytest.raises(SiloError, match=USED_UP):
        ask(folder, ROUNDS)
    assert begun(folder) == ROUNDS * STEPS


@pytest.mark.promise("silo")
@pytest.mark.parametrize("seed", [*rest_long(range(6)), *weekly(range(6, 20))])
def test_whenever_it_is_killed_no_step_is_free(folder: Path, seed: int) -> None:
    """Rounds that are killed at random places, and asked for again until the budget is spent."""
    draws, number, replies = random.Random(seed), 1, 0
    while True:
        code = run(ask_until_killed, folder, number, draws.randrange(1, 40))
        if code == 0:
            number, replies = number + 1, replies + 1
        elif code != KILLED:
            break
        if (folder / rounds.ACCOUNT).exists():
            assert taken(folder) <= begun(folder)
    assert begun(folder) == ROUNDS * STEPS
    assert replies * STEPS <= taken(folder) <= ROUNDS * STEPS
    with silo(folder) as opened:
        assert opened.epsilon == cost(ROUNDS * STEPS) <= EPSILON


@pytest.mark.promise("silo")
def test_a_repeated_request_gets_the_same_reply_and_uses_no_record(folder: Path) -> None:
    first = ask(folder, 1)
    with killed_at(0, folder.parent / "steps"):
        second = ask(folder, 1)
    assert taken(folder) == 0
    assert second.claim == first.claim
    assert begun(folder) == STEPS
    assert all(second.weights[name].equal(tensor) for name, tensor in first.weights.items())
    ask(folder, 2)
    with pytest.raises(SiloError, match=REFUSED):
        ask(folder, 1)
    assert begun(folder) == 2 * STEPS


@pytest.mark.promise("silo")
def test_a_round_that_begins_again_has_new_noise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(monkeypatch)
    ask(folder, 1)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    for place in (folder, copy):
        ask(place, 2)
    assert len(draws.noise) == 3 * STEPS
    pairs = [(a, b) for i, a in enumerate(draws.noise) for b in draws.noise[:i]]
    assert not any(a.eq(b).any() for a, b in pairs)
    with pytest.raises(InputError, match="A silo has no seed"):
        silo(folder, seed=1)


@pytest.mark.promise("silo")
def test_moments_continue_from_round_to_round(folder: Path, tmp_path: Path) -> None:
    with silo(folder) as opened:
        weights = start()
        for number in (1, 2):
            weights = dict(opened.round("run", number, weights).weights)
        step = opened._resumed(weights)
        assert step.taken == 2 * STEPS
        assert step._step is not None
        assert step._step.state.moments.m.abs().sum() > 0


@pytest.mark.promise("silo")
def test_a_silo_that_stays_open_trains_as_one_that_is_opened_for_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (private_program, private_step):
        monkeypatch.setattr(module, "make_keys", same_noise)
    weights = start()
    with silo(tmp_path / "open") as opened:
        for number in (1, 2, 3):
            weights = dict(opened.round("run", number, weights).weights)
        assert opened.epsilon == cost(3 * STEPS)
    again = start()
    for number in (1, 2, 3):
        again = dict(ask(tmp_path / "each", number, again).weights)
    assert all(again[name].equal(tensor) for name, tensor in weights.items())


@pytest.mark.promise("silo")
def test_after_a_round_that_failed_a_silo_trains_from_its_last_reply(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(monkeypatch)
    clip, clipped = Step._clip_and_sum, itertools.count(1)

    def failing(self: Step, batch: Any) -> Tensor:
        if next(clipped) == STEPS + 2:
            raise ValueError("patient 7 is 203 years old")
        return clip(self, batch)

    monkeypatch.setattr(Step, "_clip_and_sum", failing)
    with silo(folder) as opened:
        opened.round("run", 1, start())
        with pytest.raises(SiloError, match=REFUSED):
            opened.round("run", 2, start())
        assert opened._resumed(start()).taken == STEPS
        assert opened.round("run", 2, start()).claim.begun == 3 * STEPS
        assert opened.epsilon == cost(3 * STEPS)
    pairs = itertools.combinations(draws.noise, 2)
    assert not any(a.eq(b).any() for a, b in pairs)


# Records that are used elsewhere, too.

OTHER = TrainingEvent(1.0, 8.0, 1)


def shared(folder: Path, account: Account, epsilon: float) -> Silo:
    return silo(folder, account=account, epsilon=epsilon)


@pytest.mark.promise("silo")
def test_two_folders_of_the_same_records_share_an_account(folder: Path) -> None:
    """Epsilon of each is of everything so far, and both end within it."""
    account = Account.create(folder.parent / "records.json", delta=DELTA, epsilon=EPSILON)
    other = folder.parent / "other"
    with shared(folder, account, EPSILON / 2) as first:
        for number in range(1, ROUNDS + 1):
            reply = first.round("run", number, start())
        assert reply.claim.begun == ROUNDS * STEPS
        assert first.rounds_left == 0
    assert EPSILON / 2 - 0.01 < account.epsilon <= EPSILON / 2
    with shared(other, account, EPSILON) as second:
        assert second.rounds_left == ROUNDS
        for number in range(1, ROUNDS + 1):
            reply = second.round("run", number, start())
            events = account.own
            assert len(events) == 2
            assert reply.claim.epsilon == account.epsilon == total_epsilon(events, DELTA)
            assert reply.claim.begun == number * STEPS
        with pytest.raises(SiloError, match=USED_UP):
            second.round("run", ROUNDS + 1, start())
        assert second._rounds.lost(account.own) == 0
    assert EPSILON - 0.01 < account.epsilon <= EPSILON
    assert account.count == 2 * ROUNDS * STEPS


@pytest.mark.promise("silo")
def test_what_others_spend_of_a_shared_account_shortens_a_silo(folder: Path) -> None:
    account = Account.create(folder.parent / "records.json", delta=DELTA, epsilon=2 * EPSILON)
    with shared(folder, account, EPSILON) as opened:
        opened.round("run", 1, start())
        account.begin(replace(OTHER, steps=10))
        replies = 0
        with suppress(SiloError):
            for number in range(2, ROUNDS + 1):
                opened.round("run", number, start())
                replies += 1
        assert 0 < replies < ROUNDS - 1
        with pytest.raises(SiloError, match=USED_UP):
            opened.round("run", ROUNDS, start())
        assert opened.epsilon == account.epsilon <= EPSILON


@pytest.mark.promise("silo")
def test_an_account_that_a_silo_cannot_share_is_refused(folder: Path) -> None:
    path = folder.parent / "records.json"
    account = Account.create(path, delta=DELTA, epsilon=EPSILON)
    with pytest.raises(InputError, match="must be on disk"):
        shared(folder, Account(delta=DELTA), EPSILON)
    with shared(folder, account, EPSILON) as opened:
        opened.round("run", 1, start())
    with pytest.raises(InputError, match="begun with other settings: account"):
        ask(folder, 2)
    other = Account.create(folder.parent / "other.json", delta=DELTA, epsilon=EPSILON)
    (folder / rounds.ACCOUNT).unlink()
    (folder / rounds.ACCOUNT).symlink_to(other.path or "")
    with pytest.raises(InputError, match="is another account than that of these records"):
        shared(folder, account, EPSILON).__enter__()
    assert (Account.open(path).count, other.count) == (STEPS, 0)


# What is refused.


def other_weights(folder: Path) -> None:
    ask(folder, 2, {name: tensor + 1 for name, tensor in start().items()})


def answered_round(folder: Path) -> None:
    ask(folder, 1)


def older_round(folder: Path) -> None:
    """One that was never begun."""
    ask(folder, 0)


def restored(folder: Path) -> None:
    """The whole folder, as it was after the first round."""
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "backup", folder)
    ask(folder, 3, seen=2 * STEPS)


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)
    ask(folder, 3, seen=2 * STEPS)


def infinite(folder: Path) -> None:
    ask(folder, 3, {name: tensor / 0 for name, tensor in start().items()})


def missing(folder: Path) -> None:
    ask(folder, 3, {"0.weight": start()["0.weight"]})


def reshaped(folder: Path) -> None:
    ask(folder, 3, {name: tensor[:1] for name, tensor in start().items()})


@pytest.mark.promise("silo")
@pytest.mark.parametrize(
    "request_",
    [other_weights, answered_round, older_round, restored, deleted, infinite, missing, reshaped],
)
def test_a_request_that_is_refused_costs_nothing(
    folder: Path, request_: Callable[[Path], None]
) -> None:
    ask(folder, 1)
    shutil.copytree(folder, folder.parent / "backup")
    ask(folder, 2)
    with pytest.raises(SiloError) as refused:
        request_(folder)
    assert str(refused.value) == REFUSED
    assert refused.value.__context__ is None
    known = {"restored": STEPS, "deleted": 0}
    assert begun(folder) == known.get(request_.__name__, 2 * STEPS)
    problems = folder / rounds.PROBLEMS
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 \w+Error: ", problems.read_text())
    assert stat.S_IMODE(problems.stat().st_mode) == 0o600


@pytest.mark.promise("silo")
def test_a_second_process_is_refused(folder: Path) -> None:
    def second() -> None:
        with pytest.raises(SiloError, match=LOCKED):
            ask(folder, 1)

    with silo(folder) as opened:
        assert run(second) == 0
        opened.round("run", 1, start())
    for closed in (silo(folder), opened):
        with pytest.raises(SiloError, match=re.escape("with silo: silo.round(...)")):
            closed.round("run", 2, start())
    assert run(ask, folder, 2) == 0


@pytest.mark.parametrize("fact", ["name", "epsilon", "rounds_left", "statement"])
def test_a_silo_that_is_not_open_says_how_to_open_it(folder: Path, fact: str) -> None:
    closed = silo(folder)
    with pytest.raises(SiloError, match="This silo is not open"):
        getattr(closed, fact)
    assert not folder.exists()


@pytest.mark.promise("silo")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("epsilon", {"epsilon": 8.0}),
        ("rounds", {"rounds": 50}),
        ("steps", {"steps": 6}),
        ("silos", {"silos": 3}),
        ("batch_size", {"sampling": Poisson(n=RECORDS, batch_size=BATCH // 2)}),
        ("delta", {"delta": 1e-6}),
        ("optimizer", {"optimizer": "dp-sgd"}),
        ("parameters", {"network": nn.Sequential(nn.Linear(4, 2, bias=False))}),
    ],
)
def test_other_settings_are_refused(folder: Path, name: str, changes: dict[str, Any]) -> None:
    ask(folder, 1)
    with pytest.raises(InputError, match=f"begun with other settings: .*{name}"):
        silo(folder, **changes).__enter__()
    assert ask(folder, 2).claim.begun == 2 * STEPS


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(name: str) -> Callable[[Path], None]:
    def altered(folder: Path) -> None:
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(f": {2 * STEPS}", f": {STEPS}"))
        assert (folder / name).read_text() != text

    return altered


def put_back(name: str) -> Callable[[Path], None]:
    def restored_one(folder: Path) -> None:
        shutil.copy(folder.parent / "backup" / name, folder / name)

    return restored_one


@pytest.mark.promise("silo")
@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (lose(rounds.ACCOUNT), "does not exist"),
        (lose(rounds.ROUNDS), "is missing or damaged"),
        (damage(rounds.ACCOUNT), "is damaged"),
        (damage(rounds.ROUNDS), "is missing or damaged"),
        (put_back(rounds.ACCOUNT), "An older copy"),
    ],
)
def test_a_folder_that_may_count_less_is_refused(
    folder: Path, happens: Callable[[Path], None], said: str
) -> None:
    ask(folder, 1)
    shutil.copytree(folder, folder.parent / "backup")
    ask(folder, 2)
    happens(folder)
    with pytest.raises(InputError, match=said):
        silo(folder).__enter__()
    for path in folder.iterdir():
        path.unlink()
    assert ask(folder, 1).claim.begun == STEPS, "the lock was released"


@pytest.mark.promise("silo")
def test_a_silo_that_was_killed_while_it_was_created_begins(folder: Path) -> None:
    for place in range(1, 5):
        shutil.rmtree(folder, ignore_errors=True)
        assert run(ask_until_killed, folder, 1, place) == KILLED
        assert ask(folder, 1).claim.begun == STEPS


@pytest.mark.long
def test_an_epoch_ends_with_a_round(folder: Path) -> None:
    sampling = RandomAllocation(n=RECORDS, batch_size=BATCH // 2)
    with pytest.raises(InputError, match="use steps=2 or a multiple"):
        silo(folder, sampling=sampling)
    with silo(folder, sampling=sampling, steps=2, rounds=2) as opened:
        for number in (1, 2):
            opened.round("run", number, start())
        assert 2.9 < opened.epsilon <= EPSILON


# What leaves.


@pytest.mark.promise("silo")
def test_a_reply_has_parameters_and_public_facts_alone(folder: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    net.register_buffer("mean", torch.ones(3))
    net[1].requires_grad_(False)
    weights = {name: p.detach() for name, p in net.named_parameters()}
    with silo(folder, network=net) as opened:
        reply = opened.round("run", 1, weights)
    assert reply.weights.keys() == {"0.weight", "0.bias"}
    assert [field.name for field in dataclasses.fields(reply)] == ["weights", "claim"]
    assert dataclasses.asdict(reply.claim) == {
        "silo": Account.open(folder / rounds.ACCOUNT).number,
        "unit": "training record",
        "n": RECORDS,
        "sampling_rate": BATCH / RECORDS,
        "sigma": sigma(),
        "steps": STEPS,
        "delta": DELTA,
        "begun": STEPS,
        "epsilon": cost(STEPS),
    }
    assert not any(tensor.requires_grad for tensor in reply.weights.values())


def same_noise(*_: Any, base: int = 0, **__: Any) -> Keys:
    """In the place of secret keys."""
    return Keys(base=base, **{name: bytes([n + 1] * 32) for n, name in enumerate(STREAMS)})


def raises(_: Tensor) -> Tensor:
    raise ValueError("patient 7 is 203 years old")


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "larger": lambda x: 1000 * x,
    "nan": lambda x: x * math.nan,
    "infinite": lambda x: x / 0,
    "shape": lambda x: torch.cat([x, x]),
    "type": lambda x: x.long(),
    "nothing": lambda x: None,
    "raises": raises,
}


@pytest.mark.promise("silo")
@pytest.mark.parametrize("change", CHANGES)
def test_no_claim_and_no_other_record_depends_on_a_record(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is replaced, or cannot be used after it was checked. The noise is the same."""
    for module in (private_program, private_step):
        monkeypatch.setattr(module, "make_keys", same_noise)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 32)
    seen, of = list[Any](), loading.Drawn.of

    def noted(step: int, records: Any, batch: Any) -> Any:
        seen.append((records, batch["record"][0].clone()))
        return of(step, records, batch)

    monkeypatch.setattr(loading.Drawn, "of", staticmethod(noted))
    claims, inputs = list[str](), list[Any]()
    for name in ("as it was", change):
        records = Patients()
        with silo(tmp_path / name, records) as opened:
            records.change = CHANGES.get(name)
            weights: Any = start()
            for number in (1, 2):
                reply = opened.round("run", number, weights)
                weights = reply.weights
                claims.append(json.dumps(dataclasses.asdict(reply.claim)))
                assert all(tensor.isfinite().all() for tensor in weights.values())
        inputs.append(list(seen))
        seen.clear()
    assert claims[:2] == claims[2:]
    for (drawn, x), (again, other) in zip(*inputs, strict=True):
        assert (drawn == again).all()
        unchanged = torch.from_numpy(drawn != 7)
        assert x[unchanged].equal(other[unchanged])
    assert len(inputs[0]) == 2 * STEPS
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("as it was", change)]
    assert files[0] == files[1], "nothing was noted"


@pytest.mark.promise("silo")
def test_a_record_that_cannot_be_used_later_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose loss is no number."""
    for module in (private_program, private_step):
        monkeypatch.setattr(module, "make_keys", same_noise)
    found = list[Tensor]()
    for name in ("raises", "shape", "nan"):
        records = Patients()
        with silo(tmp_path / name, records) as opened:
            records.change = CHANGES[name]
            found.append(opened.round("run", 1, start()).weights["0.weight"])
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
    with silo(tmp_path / "as it was") as opened:
        whole = opened.round("run", 1, start()).weights["0.weight"]
    assert not whole.equal(found[0])


@pytest.mark.promise("silo")
@pytest.mark.parametrize("at", [0, 13])
def test_a_reply_goes_out_whatever_a_record_does(folder: Path, at: int) -> None:
    """Also one of those that are read twice, which is another one each time, or fails."""
    records, reads = Patients(at=at), itertools.count()

    def changing(x: Tensor) -> Tensor:
        if next(reads) % 3 == 0:
            raise ValueError("patient 7 is 203 years old")
        return x + next(reads)

    with silo(folder, records) as opened:
        records.change = changing
        for number in (1, 2):
            weights = opened.round("run", number, start()).weights
            assert all(tensor.isfinite().all() for tensor in weights.values())
    assert next(reads) > 2 * STEPS


@pytest.mark.promise("silo")
def test_a_silo_that_is_opened_for_each_round_replies_whatever_a_record_does(folder: Path) -> None:
    """A client creates one for each message."""
    ask(folder, 1)
    patients = Patients(CHANGES["raises"])
    with silo(folder, patients) as opened:
        weights = opened.round("run", 2, start()).weights
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.promise("silo")
@pytest.mark.parametrize("change", ["shape", "type", "nothing", "raises"])
def test_records_are_checked_when_a_silo_is_created(folder: Path, change: str) -> None:
    with pytest.raises(InputError, match=r"Record 7: (A record cannot be read|batch\[0\] of a)"):
        silo(folder, Patients(CHANGES[change]))
    with pytest.raises(InputError, match="There are 100 records, but sampling has n=99"):
        silo(folder, sampling=Poisson(n=99, batch_size=9))
    assert not folder.exists()


@pytest.mark.promise("silo")
def test_records_with_units_of_their_own_are_refused(folder: Path) -> None:
    """Epsilon of a silo protects one item, so the units of an ArrayData would be ignored."""
    patients = Patients()
    x, y = patients.x.numpy(), patients.y.numpy()
    records = ArrayData(x, y, unit=[f"patient {row // 2}" for row in range(len(y))])
    with pytest.raises(InputError, match=r"ArrayData is for make_private.*return all records of a"):
        silo(folder, records)
    assert not folder.exists()


@pytest.mark.promise("silo")
def test_a_record_that_no_loss_can_be_computed_of_is_found_before_any_round(folder: Path) -> None:
    """In a round it would say, by a missing reply, that it was drawn."""
    records = Patients()
    records.y[7] = 2
    with pytest.raises(InputError, match=r"Record 7: The network failed.*An index is out of range"):
        silo(folder, records)

    def weigh(batch: Any) -> Tensor:
        if batch[0].equal(Patients().x[7:8]):
            raise ValueError("patient 7 is 203 years old")
        return torch.ones(len(batch[1]))

    with pytest.raises(InputError, match="Record 7: ") as failure:
        silo(folder, weights=weigh)
    assert "203" not in str(failure.value)
    assert not folder.exists()


@pytest.mark.promise("silo")
def test_a_failure_says_nothing_of_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = silo(folder)

    def failing(*_: Any) -> Tensor:
        raise ValueError("patient 7 is 203 years old")

    with opened:
        opened.round("run", 1, start())
        monkeypatch.setattr("dpmac_cli.training.step.Step._clip_and_sum", failing)
        with pytest.raises(SiloError) as failure:
            opened.round("run", 2, start())
    assert str(failure.value) == REFUSED
    assert failure.value.__context__ is failure.value.__cause__ is None
    assert "203" in (folder / rounds.PROBLEMS).read_text()
    assert begun(folder) == 2 * STEPS


@pytest.mark.parametrize(("silos", "lr", "factor"), [(1, None, 1.0), (9, None, 3.0), (9, 0.5, 1)])
def test_the_default_learning_rate_grows_with_the_number_of_silos(
    tmp_path: Path, silos: int, lr: float | None, factor: float
) -> None:
    given = {} if lr is None else {"lr": lr}
    with (
        silo(tmp_path / "one", silos=1, **given) as one,
        silo(tmp_path / "many", silos=silos, **given) as many,
    ):
        assert many._rounds.lr == pytest.approx(factor * one._rounds.lr)
        many.round("run", 1, start())
        assert many._resumed(start()).lr == many._rounds.lr


def test_steps_that_are_reserved_twice_begin_once(folder: Path) -> None:
    with silo(folder) as opened:
        step = opened._resumed(start())
        for _ in range(2):
            step.reserve(STEPS)
        next(step.loader(opened._records))
        assert begun(folder) == STEPS
        with pytest.raises(BudgetError):
            step.reserve(10_000)
        assert begun(folder) == STEPS


@pytest.mark.promise("again")
def test_a_network_that_was_trained_before_is_no_start(folder: Path) -> None:
    with silo(folder) as opened:
        step = opened._resumed(start())
        step.reserve(STEPS)
        next(step.loader(opened._records))
    with pytest.raises(InputError, match="Start from public weights"):
        silo(folder.parent / "other", network=step.model)


def test_whoever_runs_a_silo_reads_the_notes_on_its_network(folder: Path) -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.sum().item()  # which vmap cannot run
            return super().forward(x)

    with silo(folder, network=nn.Sequential(Counting(4, 2)), isolate=True) as opened:
        before = opened.notes
        opened.round("run", 1, start())
        assert before == ()
        assert any("one record after the other" in note for note in opened.notes)


def test_a_federation_of_its_claims(folder: Path) -> None:
    claims = [ask(folder, number).claim for number in (1, 2)]
    assert federation(claims).epsilon == cost(2 * STEPS)
