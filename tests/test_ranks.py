"""Several processes on one run: the same numbers as one, noise once, and no secret told."""

import faulthandler
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dpmac_cli.data.units import units_of
from dpmac_cli.errors import InputError
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import resume_folder, train_plan
from dpmac_cli.runs import workers
from dpmac_cli.runs.environment import environment
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.runs.trainer import make_trainer as make_run_trainer
from dpmac_cli.training.distributed import Ranks
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import digits_config, weights
from tests.helpers import (
    Batches,
    in_chunks_of,
    make_trainer,
    tiny_data,
    walk,
)
from tests.tiers import one_in, rest_long

#: Odd shares, an empty share, an empty batch, a share of several chunks.
BATCHES = [[0, 3, 7, 9, 12], [5], [], [1, 2, 30, 31], list(range(23)), *([i] for i in range(6))]
FORKS = multiprocessing.get_context("fork")
#: Seconds after which what takes one or two is given up, and says before where it hangs.
LIMIT = 300.0
#: torch looks up the name of whoever connects, only to log it, and waits where no server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def together(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What some work comes to at each rank: its value, or what it raised."""
    ports = FORKS.SimpleQueue()
    pipes = [FORKS.Pipe(duplex=False) for _ in range(size)]
    children = [
        FORKS.Process(target=_one, args=(rank, size, ports, work, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for child in children:
        child.start()
    # Only now: its thread looks up names, and a child forked meanwhile waits for that lock in vain.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for _ in children:
        ports.put(store.port)
    found: list[Any] = []
    for child, (receiver, sender) in zip(children, pipes, strict=True):
        sender.close()
        try:
            one = receiver.recv() if receiver.poll(LIMIT) else TimeoutError()
            found.append(torch.from_numpy(one) if isinstance(one, np.ndarray) else one)
        except EOFError:
            found.append(None)  # it was killed
        child.join(LIMIT)
        child.kill()
    return found


def _one(rank: int, size: int, ports: Any, work: Callable[[Ranks], Any], answer: Any) -> None:
    faulthandler.dump_traceback_later(LIMIT / 2)
    torch.set_num_threads(1)
    store = TCPStore("localhost", ports.get(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size)
    try:
        found = work(ranks)
    except Exception as failure:  # noqa: BLE001
        found = failure
    answer.send(found.numpy() if isinstance(found, Tensor) else found)
    ranks.leave()
    os._exit(0)


def stepping(steps: int, name: str, **options: Any) -> Callable[[Ranks], Tensor]:
    """Take steps at every rank; theta after each of them."""

    def work(ranks: Ranks) -> Tensor:
        return walk(make_trainer(name, ranks=ranks, **options), steps).clone()

    return work


# The same numbers.


@pytest.mark.promise("ranks")
@pytest.mark.parametrize(("name", "size"), one_in(5, itertools.product(OPTIMIZER_NAMES, [2, 3])))
def test_ranks_take_the_steps_that_one_process_takes(name: str, size: int) -> None:
    options: dict[str, Any] = {"plan": in_chunks_of(4), "kappa": "tracked", "phi": "tracked"}
    options["sampler"] = Batches(*BATCHES)
    alone = walk(make_trainer(name, **options), 10)
    options["sampler"] = Batches(*BATCHES)
    found = together(size, stepping(10, name, **options))
    for thetas in found:
        assert torch.equal(thetas, found[0])
        torch.testing.assert_close(thetas, alone, rtol=0, atol=1e-5)
    options["sampler"] = Batches(*BATCHES)
    assert torch.equal(together(size, stepping(10, name, **options))[0], found[0])


@pytest.mark.promise("ranks")
def test_shares_are_a_partition_of_one_draw() -> None:
    drawn = np.arange(100, 117)

    def work(ranks: Ranks) -> list[int]:
        return [int(row) for row in ranks.share(drawn if ranks.leads else None)]

    found = together(3, work)
    assert sorted(row for share in found for row in share) == drawn.tolist()
    assert [len(share) for share in found] == [5, 6, 6]


class Told(Ranks):
    """A rank among others that are not there, for what it is told alone."""

    def _from_first(self, said: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert said is not None
        return said.to(dtype)


@pytest.mark.promise("ranks")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_record_more_moves_no_other_to_another_rank(size: int) -> None:
    """Ranks may round differently, and would flip all records at a kink together."""
    ranks = [Told(rank, size) for rank in range(size)]
    rng = np.random.default_rng(size)
    for _ in range(40):
        drawn = np.flatnonzero(rng.random(60) < rng.random())
        whole = [set(each.share(drawn).tolist()) for each in ranks]
        for left_out in drawn.tolist():
            rest = [set(each.share(drawn[drawn != left_out]).tolist()) for each in ranks]
            assert rest == [share - {left_out} for share in whole]


# Secrets stay at rank 0.


@pytest.mark.promise("ranks")
def test_the_others_are_told_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    said = Ranks.brief

    def brief(ranks: Ranks, message: Any = None) -> Any:
        heard = said(ranks, message)
        told.append(heard)
        return heard

    monkeypatch.setattr(Ranks, "brief", brief)
    config = digits_config(seed=918_273_645_501, steps=2, out="run")

    def work(ranks: Ranks) -> Any:
        if ranks.leads:
            list(train_plan(config, ranks=ranks))
            return None
        trainers = []
        built = make_run_trainer

        def make(*args: Any, **options: Any) -> Trainer:
            trainers.append(built(*args, **options))
            return trainers[-1]

        monkeypatch.setattr(workers, "make_trainer", make)
        workers.run_worker(ranks, {})
        return told, (trainers[0].sampler, trainers[0].noise)

    _, (heard, draws) = together(2, work)
    assert draws == (None, None)
    assert set(heard[0]["numbers"]) == {"step", "kappa_star"}
    assert set(heard[0]["keys"]) == {"layers", "init"}
    assert "918273645501" not in json.dumps(heard)


# Whole runs.


def training(**flags: Any) -> Callable[[Ranks], Any]:
    """Train at rank 0, and assist at the others."""
    config = digits_config(**flags)

    def work(ranks: Ranks) -> Any:
        if not ranks.leads:
            return workers.run_worker(ranks, {})
        *_, last = train_plan(config, ranks=ranks)
        assert isinstance(last, Run)
        return last.report

    return work


@pytest.mark.promise("ranks")
@pytest.mark.parametrize(("before", "after"), rest_long([(1, 3), (2, 2), (3, 1)], short=2))
def test_a_run_goes_on_with_other_ranks(before: int, after: int) -> None:
    asked = iter(range(100))

    def begin(ranks: Ranks) -> Any:
        if not ranks.leads:
            return workers.run_worker(ranks, {})
        config = digits_config(steps=8, out="run", seed=4)
        list(train_plan(config, lambda: next(asked) >= 3, ranks=ranks if before > 1 else None))
        return None

    def go_on(ranks: Ranks) -> Any:
        if not ranks.leads:
            return workers.run_worker(ranks, {})
        *_, last = resume_folder(Path("run"), {}, ranks=ranks if after > 1 else None)
        assert isinstance(last, Run)
        return last.report

    assert not any(together(before, begin))
    report = together(after, go_on)[0]
    assert report["state"] == "finished"
    assert sum(event["steps"] for event in report["events"]) == 8
    assert weights(Path("run"))


# The same records.


@pytest.mark.promise("ranks")
@pytest.mark.parametrize("what", ["data", "classes", "network"])
def test_ranks_with_other_records_do_not_begin(tmp_path: Path, what: str) -> None:
    """Row 7 of one could be row 8 of the other: one record would count twice in a batch."""
    x, y = np.arange(60.0).reshape(30, 2), np.arange(30) % 2
    net = "from torch import nn\nNet = lambda: nn.Sequential(nn.Flatten(), nn.Linear(2, 2))\n"
    if what == "network":
        net = DRAWING.replace("np.random", "np.random.default_rng()").replace("64", "2")
        net = net.replace("Linear(10, 10)", "Linear(10, 2)")
    for name, other in (("one", False), ("other", True)):
        (tmp_path / name).mkdir()
        rows = x[::-1] if other and what == "data" else x
        classes = np.array(["a", "c" if other and what == "classes" else "b"])
        np.savez(tmp_path / name / "d.npz", x=rows, y=y, x_test=x, y_test=y, classes=classes)
        (tmp_path / name / "net.py").write_text(net)

    def work(ranks: Ranks) -> Any:
        os.chdir(tmp_path / ("one" if ranks.leads else "other"))
        if not ranks.leads:
            return workers.run_worker(ranks, {})
        flags: dict[str, Any] = {"feature_range": "0,60", "batch_size": 8, "model": "net.py:Net"}
        list(train_plan(digits_config(dataset="d.npz", out="run", **flags), ranks=ranks))
        return None

    for failure in together(2, work):
        assert isinstance(failure, InputError), failure
        named = "network" if what == "network" else "records"
        assert f"do not have the same {named}" in str(failure)


#: A network that draws what it does not train with every global generator.
DRAWING = """
import random
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.randn(64, 10) + float(np.random.normal()))
        self.scale, self.head = random.random(), nn.Linear(10, 10)

    def forward(self, x):
        return self.head(torch.cos(x.flatten(1) @ self.drawn) * self.scale)
"""


@pytest.mark.promise("ranks")
def test_what_a_network_draws_and_does_not_train_is_the_same_at_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Removing a record renumbers those behind it, and with their number their rank changes."""
    Path("net.py").write_text(DRAWING)

    def work(ranks: Ranks) -> Any:
        built = make_run_trainer
        trainers: list[Trainer] = []

        def make(*args: Any, **options: Any) -> Trainer:
            trainers.append(built(*args, **options))
            return trainers[-1]

        monkeypatch.setattr("dpmac_cli.runs.train.make_trainer", make)
        monkeypatch.setattr(workers, "make_trainer", make)
        training(steps=2, out="run", model="net.py:Net")(ranks)
        network: Any = trainers[0].model
        return network.drawn.numpy().tobytes(), network.scale

    one, other = together(2, work)
    assert one == other
    assert len(one[0]) == 4 * 64 * 10


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.promise("ranks")
@pytest.mark.parametrize(
    ("other", "resumed"), [("instructions", True), ("variable", False), ("threads", False)]
)
def test_ranks_that_compute_otherwise_do_not_begin(
    other: str, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(ranks: Ranks) -> Any:
        if not ranks.leads and other == "instructions":
            monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX-99")
        elif not ranks.leads and other == "variable":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
        elif not ranks.leads:  # threads of OpenMP would hang in a fork
            monkeypatch.setattr("torch.get_num_threads", lambda: 2)
        if not ranks.leads:
            return workers.run_worker(ranks, {})
        if resumed:
            return list(resume_folder(Path("run"), {}, ranks=ranks))
        return list(train_plan(digits_config(steps=4, out="run"), ranks=ranks))

    if resumed:
        asked = iter(range(100))
        list(train_plan(digits_config(steps=4, out="run"), lambda: next(asked) >= 2))
    before = files()
    named = "environment variables" if other == "variable" else other
    for failure in together(2, work):
        assert isinstance(failure, InputError), failure
        assert f"do not have the same {named}, so" in str(failure)
    assert files() == before


@pytest.mark.promise("ranks")
def test_what_ranks_compare_has_the_settings_of_torch_and_the_units_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = environment()
    monkeypatch.setattr("dpmac_cli.runs.environment.Arithmetic.switches", "others")
    assert [name for name, value in environment().items() if value != before[name]] == [
        "settings of torch"
    ]
    plan, data = digits_config(), tiny_data()
    pairs, thirds = (
        replace(data, train=replace(data.train, units=units_of(np.arange(40) // count)))
        for count in (2, 3)
    )
    assert len({workers._records(plan, each) for each in (data, pairs, thirds)}) == 3


@pytest.mark.promise("ranks")
def test_ranks_on_other_devices_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ranks: Ranks) -> Any:
        if not ranks.leads:
            monkeypatch.setattr(workers, "device_name", lambda _: "another GPU")
            return workers.run_worker(ranks, {})
        return list(train_plan(digits_config(steps=4, out="run"), ranks=ranks))

    for failure in together(2, work):
        assert isinstance(failure, InputError), failure
        assert "do not have the same device" in str(failure)


# Failure.


@pytest.mark.promise("ranks")
@pytest.mark.parametrize("what", ["theta", "inverse"])
def test_ranks_that_went_apart_take_the_first_ones_state(what: str) -> None:
    """Else a sample would be clipped to another region than the noise is scaled to."""

    def work(ranks: Ranks) -> Any:
        trainer = make_trainer("dp-macadam", ranks=ranks)
        walk(trainer, 2)
        if ranks.rank == 1:
            (trainer.state.theta if what == "theta" else trainer.state.region.inverse)[3] *= 2
        walk(trainer, 1)
        state = trainer.state
        return torch.cat([state.theta, state.region.scale])

    first, other = together(2, work)
    assert torch.equal(first, other)


@pytest.mark.promise("one")
def test_sums_of_ranks_are_added_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_meet", lambda *rest: None)
    # Beside 2^24, float32 has no room for 1.
    part = torch.tensor([2.0**24, 1.0])
    assert Ranks(0, 2).reduce(part).sum() == 2**24 + 1
    assert Ranks(0, 2).reduce(part).dtype == torch.float64
