"""A comparison as CSV and Markdown: what stands where, and what must be said beside it."""

import csv
import io
import json
import math
from typing import Any

import pytest

from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import Cell, Comparison, standing_of
from dpmac_cli.studies.tables import as_csv, as_json, as_markdown
from dpmac_cli.tasks.known import METRICS


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


def test_markdown_has_a_column_a_noise_and_a_row_a_setting() -> None:
    lines = [line for line in as_markdown(WHOLE).splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {4}
    assert rows[0][1:] == ["sigma 0.5", "sigma 1", "a run takes"]
    assert rows[2] == ["epsilon", "6", "3", ""]
    assert rows[3] == ["dp-adam", "91.00 ± 1.41 ~", "81.00 ± 1.41", "0:00:02"]
    expected = ["dp-macadam kappa paper_x", "92.00 ± 1.41 ~", "**88.50 ± 0.71**", "0:00:02"]
    assert rows[4] == expected
    assert rows[5] == ["dp-sgd", "–", "–", "–"]


def test_columns_of_the_table_stand_below_one_another() -> None:
    lines = [line for line in as_markdown(WHOLE).splitlines() if line.startswith("|")]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines}) == 1


def test_csv_and_json_have_a_row_a_cell() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(WHOLE))))
    rows = json.loads(json.dumps(as_json(WHOLE), allow_nan=False))["rows"]
    assert len(lines) == len(rows) == 5
    assert [float(line["mean"]) for line in lines[:4]] == pytest.approx([0.91, 0.81, 0.92, 0.885])
    assert lines[4]["mean"] == ""
    assert rows[4]["mean"] is None
    assert rows[4]["failures"] == {"0": "its process died", "1": "no"}
    assert rows[3]["values"] == {"0": 0.88, "1": 0.89}
    assert {row["kappa"] for row in rows} == {"", "paper_x"}


@pytest.mark.privacy
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


def test_a_metric_that_is_not_defined_is_a_dash_and_null() -> None:
    """As the AUROC of a test set with a single class, or of a run of an earlier version."""
    nan = math.nan
    cells = (cell("dp-adam", 1.0, nan, nan), cell("dp-sgd", 1.0, nan, 0.5), CELLS[1])
    whole = comparison(*cells)
    rows = as_json(whole)["rows"]
    assert [row["mean"] for row in rows] == [None, None, pytest.approx(0.81)]
    assert [row["std"] is None for row in rows] == [True, True, False]
    assert rows[1]["values"] == {"0": None, "1": 0.5}
    assert json.dumps(rows, allow_nan=False)
    assert standing_of(cells, METRICS["accuracy"]) == ["", "", ""]
    assert "| dp-sgd " in as_markdown(whole)
    assert "nan" not in as_markdown(whole)
