"""A comparison as CSV and Markdown: what stands where, and what must be said beside it."""

import json
import math
from typing import Any

import pytest

from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import Cell, Comparison, as_json, as_markdown


def cell(name: str, sigma: float, *accuracies: float, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "labels": (("optimizer", name), ("kappa", "paper_x" if name == "dp-macadam" else "")),
        "column": sigma,
        "sigma": sigma,
        "epsilon": 3 / sigma if sigma else math.inf,
        "values": dict(enumerate(accuracies)),
        "seconds": 1.5 if accuracies else math.nan,
        "failures": {},
    }
    return Cell(**{**values, **changes})


CELLS = (
    cell("dp-adam", 0.5, 0.90, 0.92, standing="tied"),
    cell("dp-adam", 1.0, 0.80, 0.82),
    cell("dp-macadam", 0.5, 0.91, 0.93, standing="tied"),
    cell("dp-macadam", 1.0, 0.88, 0.89, standing="best"),
    cell("dp-sgd", 0.5, failures={0: "its process died", 1: "no"}),
)


GRID = plan({"dataset": "mnist", "kappa": "paper,exact", "sigma": "0.5,1", "seeds": "2"}, None)


def comparison(*cells: Cell, epsilon: float = 12.345) -> Comparison:
    return Comparison(GRID, cells, epsilon)


WHOLE = comparison(*CELLS)


@pytest.mark.promise("reading")
def test_every_form_says_what_the_epsilons_are_worth() -> None:
    for text in (as_markdown(WHOLE), json.dumps(as_json(WHOLE))):
        assert "epsilon 12.35" in text  # rounded up
        assert "The 10 runs, 2 of them not finished and counted in full, use the same" in text
        assert (
            "Publish at most one of them" in text
        )  # what one seed draws for one, it draws for all
        assert "know the seeds" in text
        assert "paired two-sided t-test" in text
    finished = as_markdown(comparison(*CELLS[:2]))
    assert "not finished" not in finished
    assert "runs use the same records" in finished
    assert "Other runs on the same records add" in finished
    one = comparison(cell("dp-sgd", 1.0, 0.9), epsilon=3.0)
    assert "know the seeds" in as_markdown(one)
    assert "in total" not in as_markdown(one)
    twice = as_markdown(comparison(cell("dp-sgd", 1.0, 0.9), epsilon=4.0))
    assert "in total" in twice  # an attempt before that one is charged
    alike = as_markdown(comparison(cell("dp-sgd", 1.0, 0.9, 0.9)))
    assert "in total" in alike
    assert "Publish at most one" not in alike
    baseline = comparison(cell("dp-sgd", 0.0, 0.9, 0.9, epsilon=math.inf), epsilon=0.0)
    assert "seeds named" not in as_markdown(baseline)
    assert "no privacy" in as_markdown(baseline)
