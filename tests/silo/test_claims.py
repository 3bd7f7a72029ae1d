"""What the claims of a federation mean together."""

from dataclasses import replace

import pytest

from dpmac_cli import InputError, federation
from dpmac_cli.silo.claims import Claim

FIRST = Claim(
    silo="a" * 32,
    unit="training record",
    n=1000,
    sampling_rate=0.1,
    sigma=1.5,
    steps=5,
    delta=1e-5,
    begun=5,
    epsilon=0.5,
)
OTHER = replace(FIRST, silo="b" * 32, epsilon=1.25, delta=2e-5)


@pytest.mark.promise("silo")
def test_the_statement_has_the_largest_epsilon_and_the_sum() -> None:
    both = federation([FIRST, OTHER, replace(FIRST, begun=10, epsilon=0.75)])
    assert both.epsilon == 1.25
    assert "silo 1: epsilon 0.75, delta 1e-05, for one training record" in both.statement
    assert "silo 2: epsilon 1.25, delta 2e-05, for one training record" in both.statement
    alone = "Somebody with one training record in one silo: epsilon at most 1.25. With k of them"
    assert alone in both.statement
    each = "Somebody with one training record in each silo: at most the sum, epsilon 2 and delta"
    assert f"{each} 3e-05." in both.statement


@pytest.mark.promise("silo")
def test_costs_of_different_units_are_not_added() -> None:
    said = federation([FIRST, replace(OTHER, unit="unit")]).statement
    assert "different units, whose costs cannot be added" in said
    assert "sum" not in said
    assert "one training record or unit in one silo" in said


@pytest.mark.promise("silo")
def test_the_card_has_a_row_per_silo_and_counts_lost_rounds() -> None:
    claims = [FIRST, OTHER, replace(FIRST, begun=15), replace(OTHER, begun=10)]
    card = federation(claims, server="a university", aggregation="mean").report
    assert "| 1 (aaaaaaaa) | training record | 1,000 | 0.1 | 1.5 | 15 (5) | 0.5 | 1e-05 |" in card
    assert "| 2 (bbbbbbbb) | training record | 1,000 | 0.1 | 1.5 | 10 (0) | 1.25 | 2e-05 |" in card
    assert "- Server: a university\n- Aggregation: mean\n" in card
    assert "the silos' own word" in card
    assert "- Server: not stated" in federation(claims).report
    repeated = [FIRST, FIRST, replace(FIRST, begun=15)]
    assert "15 (5)" in federation(repeated).report


@pytest.mark.promise("silo")
@pytest.mark.parametrize("begun", [4, 7, 0])
def test_claims_of_an_account_that_was_replaced_are_refused(begun: int) -> None:
    with pytest.raises(InputError, match="do not belong to one account"):
        federation([FIRST, OTHER, replace(FIRST, begun=begun)])
    with pytest.raises(InputError, match="at least one claim"):
        federation([])
