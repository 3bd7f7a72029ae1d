"""dpmac tune --on: a search on public records that uses the private ones for one run only."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli import tune
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.search_space import ask_search
from dpmac_cli.config.transfer import Transfer
from dpmac_cli.errors import DivergedError, InputError, RunError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import finish, train
from dpmac_cli.runs import folder
from dpmac_cli.studies import transfer
from dpmac_cli.studies.transfer import Tried, carry_out_transfer, folder_of_trials
from tests.typed import dpmac

OUT = Path("out")
GIVEN: dict[str, Any] = {
    **{"dataset": "private.npz", "model": "linear", "steps": "3", "epsilon": "3"},
    **{"device": "cpu"},
}
SPACE = ["lr=0.01..1:log", "clip-norm=0.1,1"]
#: Units of the private records.
UNITS = {"unit": np.arange(300) // 2, "unit_test": np.arange(300, 360)}


@pytest.fixture(autouse=True)
def records() -> None:
    """Private and public images of two classes, and public numbers."""
    for seed, name in enumerate(("private", "public")):
        random = np.random.default_rng(seed)
        x = random.integers(0, 256, (300, 6, 6), dtype=np.uint8)
        np.savez(f"{name}.npz", x=x, y=np.arange(300) % 2, x_test=x[:60], y_test=np.arange(60) % 2)


def planned(on: str = "public.npz", **given: Any) -> Transfer:
    _, plan = ask_search({**GIVEN, **given}, {"on": on, "trials": 3}, SPACE, None)
    assert isinstance(plan, Transfer)
    return plan


@pytest.mark.privacy
def test_private_records_are_used_for_one_run_with_the_whole_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, trained = planned(), list[TrainPlan]()

    def recorded(of: TrainPlan, *more: Any) -> Iterator[Any]:
        trained.append(of)
        return train(of, *more)

    monkeypatch.setattr(transfer, "train", recorded)
    events = [*carry_out_transfer(plan, OUT)]
    tried = [event for event in events if isinstance(event, Tried)]
    assert [(event.number, event.trials) for event in tried] == [(1, 3), (2, 3), (3, 3)]
    assert [of.data.dataset for of in trained] == ["public.npz"] * 3 + ["private.npz"]
    last = events[-1]
    assert isinstance(last, Finished)
    privacy = last.report["privacy"]
    assert privacy["search"] is None
    assert privacy["epsilon"] == total_epsilon((plan.final(tried[-1].best).privacy.event,), 1e-5)
    assert 2.99 < privacy["epsilon"] <= 3
    best = max(tried, key=lambda event: event.score)
    assert tried[-1].best == plan.settings()[best.number - 1]
    assert last.report["hyperparameters"]["lr"] == float(tried[-1].best["lr"])


def test_report_and_card_name_the_public_data() -> None:
    done = finish(tune(SPACE, on="public.npz", trials=2, out=OUT, **GIVEN))
    said = "declared public: public, the best of 2 settings from lr=0.01..1:log; clip-norm"
    assert said in done.report["statement"]["tuning"]
    assert said in (OUT / folder.CARD).read_text()
    assert folder.config(OUT)["tuned-on"].startswith("public, ")


@pytest.mark.privacy
@pytest.mark.parametrize("units", [{}, UNITS])
def test_the_private_records_are_not_taken_for_public_ones(units: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="private data itself"):
        planned(on="./private.npz")
    shutil.copy("private.npz", "copy.npz")  # which has no units
    with np.load("copy.npz") as arrays:
        np.savez("private.npz", **arrays, **units)
    with pytest.raises(InputError, match="same records"):
        next(carry_out_transfer(planned(on="copy.npz"), OUT))
    assert not OUT.exists()


def test_a_search_that_was_stopped_does_not_repeat_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trained = planned(), list[str]()

    def recorded(of: TrainPlan, stop: Callable[[], bool], *more: Any) -> Iterator[Any]:
        trained.append(of.data.dataset)
        return train(of, (lambda: True) if len(trained) == 2 else stop, *more)

    monkeypatch.setattr(transfer, "train", recorded)
    with pytest.raises(KeyboardInterrupt):
        [*carry_out_transfer(plan, OUT)]
    assert not OUT.exists()
    [*_, last] = carry_out_transfer(plan, OUT)
    assert isinstance(last, Finished)
    assert trained == ["public.npz"] * 4 + ["private.npz"]  # the second trial was begun again
    with pytest.raises(InputError, match="already contains a run"):
        [*carry_out_transfer(plan, OUT)]
    assert len(trained) == 5


def test_trials_that_diverge_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, calls = planned(), iter(range(9))

    def diverging(*args: Any) -> Iterator[Any]:
        if next(calls) in (0, 2):
            raise DivergedError(1)
        return train(*args)

    monkeypatch.setattr(transfer, "train", diverging)
    tried = [event for event in carry_out_transfer(plan, OUT) if isinstance(event, Tried)]
    assert tried[-1].best == plan.settings()[1]
    shutil.rmtree(folder_of_trials(OUT))
    shutil.rmtree(OUT)
    monkeypatch.setattr(transfer, "train", lambda *_: diverging_always())
    with pytest.raises(RunError, match="diverged"):
        [*carry_out_transfer(plan, OUT)]


def diverging_always() -> Iterator[Any]:
    raise DivergedError(1)


def test_what_does_not_fit_is_reported_together() -> None:
    own = {"on": "public.npz", "trials": 3, "most_trials": 9, "stop_early": True}
    with pytest.raises(InputError) as failure:
        ask_search({**GIVEN, "seed": 0}, own, ["lr=1,1"], None)
    said = "\n".join(failure.value.errors)
    for part in ("most-trials has no effect", "stop-early has no effect", "a value twice", "seed"):
        assert part.replace("-", "_") in said or part in said
    table = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    np.savez("numbers.npz", x=table, y=(np.arange(300) % 7).reshape(-1, 1) % 2 * np.ones((1, 3)))
    with pytest.raises(InputError):
        planned(on="numbers.npz")


@pytest.mark.long
def test_the_command_shows_the_plan_and_the_best_settings() -> None:
    words = [part for name, value in GIVEN.items() for part in (f"--{name}", value)]
    search = [part for text in SPACE for part in ("--search", text)]
    flags = ("tune", *words, *search, "--on", "public.npz", "--trials", "2", "--out", "out")
    plan = dpmac(*flags, "--dry-run")
    assert plan.exit_code == 0, plan.output
    assert "2 trials, which cost no privacy of private" in plan.stdout
    assert "writing" not in plan.stdout
    assert not OUT.exists()
    done = dpmac(*flags, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["privacy"]["search"] is None
    assert "best of 2 settings on public: lr " in done.stderr
    assert "writing out, and the trials beside it" in done.stderr
