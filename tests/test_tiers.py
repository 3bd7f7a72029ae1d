"""The short tests show every privacy promise."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import LONG_ALONE

ROOT = Path(__file__).parent.parent
#: Tests of privacy promises that are long, and a short one of the same promise.
ALSO_SHOWN: Mapping[str, str] = {
    "tests/cli/test_several.py::test_a_lost_rank_is_named_and_the_run_goes_on_without_it": (
        "tests/test_ranks.py::test_a_run_goes_on_with_other_ranks"
    ),
    "tests/dp/test_ghost_clipping.py::test_the_margin_covers_terms_that_cancel": (
        "tests/dp/test_ghost_clipping.py::test_no_sample_whose_terms_cancel_weighs_more_than_one"
    ),
    "tests/dp/test_rounding.py::test_the_margin_covers_the_rounding_of_what_is_written_out": (
        "tests/dp/test_rounding.py::test_the_margin_covers_the_rounding_of_the_sum"
    ),
    "tests/dp/test_rounding.py::test_the_margin_covers_the_rounding_of_all_chunks": (
        "tests/dp/test_rounding.py::test_the_margin_covers_the_rounding_of_the_sum"
    ),
    "tests/test_accounting.py::test_the_smallest_rates_are_priced_as_larger_ones": (
        "tests/test_accounting.py::test_no_rate_is_priced_below_the_least"
    ),
    "tests/test_accounting.py"
    "::test_a_branch_with_much_noise_does_not_make_one_with_little_a_matter_of_minutes": (
        "tests/test_accounting.py::test_two_halves_cost_the_whole"
    ),
    "tests/test_accounting.py::test_mnist_schedule_costs_little_time_and_falls_on_epochs": (
        "tests/test_accounting.py::test_schedule_is_an_increasing_upper_bound_with_an_exact_end"
    ),
    "tests/test_audit.py::test_a_claim_with_its_events_holds_up_to_the_bound_of_its_curve": (
        "tests/test_audit.py::test_a_claim_holds_up_to_the_bound"
    ),
    "tests/test_canaries.py::test_the_attack_tells_broken_builds_from_sound_ones": (
        "tests/test_canaries.py::test_scores_are_the_likelihood_ratios_of_what_is_released"
    ),
    "tests/test_private_scores.py::test_no_score_is_released_twice_whatever_is_killed": (
        "tests/test_private_scores.py::test_an_interrupted_run_releases_no_score"
    ),
    "tests/test_fuzz.py::test_no_damage_of_any_kind_breaks_a_promise": (
        "tests/test_flips.py::test_a_flipped_byte_makes_no_resumed_run_cheaper"
    ),
    "tests/test_secure.py::test_processes_started_in_the_same_instant_have_nothing_in_common": (
        "tests/test_run.py::test_without_a_seed_no_run_repeats_another"
    ),
    "tests/test_tune.py::test_the_command_shows_a_plan_and_no_trial": (
        "tests/test_tune.py::test_nothing_else_is_visible_while_it_goes_on"
    ),
}


def test_a_privacy_promise_that_takes_long_to_show_is_also_shown_by_a_short_test(
    pytestconfig: pytest.Config,
) -> None:
    """Of the tests that are run with this one."""
    assert pytestconfig.stash[LONG_ALONE] <= ALSO_SHOWN.keys()


def test_a_short_test_looks_for_every_bug_that_is_put_in(pytestconfig: pytest.Config) -> None:
    """Of those that break a privacy promise, in benchmarks/mutants.toml."""
    rows = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text(encoding="utf-8"))
    long = pytestconfig.stash[LONG_ALONE]
    assert [
        row["name"]
        for row in rows["mutant"]
        if row.get("marker") is None and {test.partition("[")[0] for test in row["tests"]} <= long
    ] == []


@pytest.mark.parametrize("test", sorted({*ALSO_SHOWN, *ALSO_SHOWN.values()}))
def test_they_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
