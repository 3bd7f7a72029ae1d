"""A few of the cases that ``benchmarks/fuzz.py`` tries by the thousand, and their judge."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from dpmac_cli.runs import folder
from tests.fuzzing import (
    CODES,
    DAMAGES,
    LOSSES,
    RUN,
    STOPPED,
    Case,
    Damage,
    Outcome,
    attempt_in,
    faults,
    generate,
    make_world,
    quickened,
)

CASES, SEED = 30, 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("fuzz") / "world"
    make_world(where)
    return where


@pytest.mark.long
def test_nothing_that_is_typed_or_damaged_breaks_a_promise(world: Path, tmp_path: Path) -> None:
    counts: Counter[tuple[str, int | None]] = Counter()

    def attempt(case: Case) -> None:
        where = tmp_path / "case"
        shutil.rmtree(where, ignore_errors=True)
        outcome, wrong = attempt_in(where, world, case)
        assert not wrong, (case, outcome)
        counts[case.command, outcome.code] += 1

    with quickened():
        generate(attempt, world, CASES, SEED)
    assert sum(counts.values()) == CASES
    met = {command for command, _ in counts}
    assert len(met) > len(CODES) / 2  # which ones, any change of the generators changes
    assert {code for _, code in counts} >= {0, 2}


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("kind", [*DAMAGES, *LOSSES])
def test_no_damage_of_any_kind_breaks_a_promise(kind: str, world: Path, tmp_path: Path) -> None:
    commands = {
        folder.MODEL: ("eval", RUN),
        folder.REPORT: ("account", RUN),
        folder.METRICS: ("train", "--resume", STOPPED),
    }
    for name, args in commands.items():
        damage = Damage(f"{args[-1]}/{name}", kind, 0.5, f"{RUN}/{folder.CONFIG}")
        with quickened():
            outcome, wrong = attempt_in(tmp_path / name, world, Case(args, {}, (damage,)))
        assert not wrong, (damage, outcome)
        assert outcome.code == 2 or name != folder.MODEL


EVAL = Case(("eval", RUN))
TREE = {"mine": b"mine", RUN: None, f"{RUN}/report.json": b"{}"}


@pytest.mark.parametrize(
    ("case", "outcome", "after", "said"),
    [
        (EVAL, Outcome(None, "", "", 999), TREE, "did not end"),
        (EVAL, Outcome(1, "", "--flag", 0), TREE, "exit code 1"),
        (EVAL, Outcome(3, "", "--flag", 0), TREE, "exit code 3"),
        (EVAL, Outcome(2, "", "Traceback: --flag", 0), TREE, "a traceback"),
        (EVAL, Outcome(4, "", " ", 0), TREE, "no message"),
        (EVAL, Outcome(2, "", "That will not do.", 0), TREE, "names neither"),
        (EVAL, Outcome(0, "", "", 0), {**TREE, "new": b""}, "wrote outside"),
        (EVAL, Outcome(0, "", "", 0), {**TREE, "mine": b"yours"}, "lost ['mine']"),
        (EVAL, Outcome(2, "", RUN, 0), {**TREE, RUN + "/new": b""}, "and yet changed"),
        (Case(("eval", RUN, "--json")), Outcome(0, "NaN", "", 0), TREE, "not JSON"),
        (
            Case(("eval", RUN), {}, (Damage(f"{RUN}/model.safetensors", "flipped"),)),
            Outcome(0, "", "", 0),
            {**TREE, f"{RUN}/model.safetensors": b"damaged"},
            "which is damaged",
        ),
    ],
)
def test_what_breaks_a_promise_is_told(
    case: Case, outcome: Outcome, after: dict[str, bytes | None], said: str
) -> None:
    before = {**TREE, **{damage.path: b"damaged" for damage in case.damages}}
    assert any(said in fault for fault in faults(case, outcome, before, after))


def test_what_keeps_all_promises_is_left_alone() -> None:
    assert not faults(EVAL, Outcome(2, "", f"error: {RUN} is not a run folder.", 0), TREE, TREE)
    odd = Case(("eval", "\udcff"))  # a byte that is no text
    assert not faults(odd, Outcome(2, "", r"error: \udcff does not exist.", 0), TREE, TREE)
