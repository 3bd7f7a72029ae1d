"""Notes about the records reach the person who holds them, and nothing that is published."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from torch import nn

from dpmac_cli import Poisson, PrivateStep, from_dataframe, make_private
from dpmac_cli.config.findings import private_notes
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.errors import as_keywords
from dpmac_cli.runs import folder
from dpmac_cli.runs.resolve import resolve
from tests.helpers import declared, notes_on
from tests.secret_search import published
from tests.typed import dpmac

RECORDS = 800
SCHEMA: dict[str, Any] = {
    "label": {"column": "ill", "classes": ["no", "yes"]},
    "columns": {
        "pressure": {"range": [60, 200]},
        "height": {"range": [1.2, 2.2]},
        "ward": {"categories": ["Nord", "Nrod"]},
    },
    "drop": ["stay"],
}
#: The last words of what is said of these records: no other text has them.
SAID = (
    "4 records of stays.csv are left out",
    "5 records of stays.csv are exact copies",
    "pressure (47 of 799; 60 to 200)",
    "height (399 of 799; 1.2 to 2.2)",
    "No record has the category Nrod of ward",
)
#: Numbers that only they have.
COUNTS = ("47 of 799", "399 of 799", "Nrod of ward", "exact cop", "left out:", "Record 797")


def stays() -> pd.DataFrame:
    """Records with faults of each kind: a code for no value, two units of measure, copies."""
    draw = np.random.default_rng(0)
    meters = draw.normal(1.7, 0.1, RECORDS).round(3).clip(1.3, 2.1)
    frame = pd.DataFrame(
        {
            "pressure": draw.normal(120, 9, RECORDS).round(2).clip(70, 190).astype(object),
            "height": np.where(np.arange(RECORDS) % 2 == 0, meters, 100 * meters),
            "ward": "Nord",
            "stay": 3,
            "ill": draw.choice(["no", "yes"], RECORDS),
        }
    )
    frame.loc[:46, "pressure"] = -99
    frame.loc[RECORDS - 4 :, "pressure"] = "unread"
    return pd.concat([frame, frame.iloc[100:103]])


@pytest.fixture
def here() -> Path:
    stays().to_csv("stays.csv", index=False)
    Path("stays.yaml").write_text(yaml.safe_dump(SCHEMA))
    return Path()


TYPED = ("--dataset", "stays.csv", "--schema", "stays.yaml", "--skip-bad", "--device", "cpu")
STEPS = ("--steps", "2", "--sigma", "6", "--batch-size", "80", "--optimizer", "dp-sgd")


@pytest.mark.promise("published")
def test_no_file_of_a_run_has_a_private_note(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The person reads it, on stderr, of a new run, and of a resumed one."""
    caplog.set_level(logging.DEBUG)
    commands = (
        ("train", *TYPED, *STEPS, "--out", "run"),
        ("train", "--resume", "run", "--steps", "3", "--out", "longer"),
        ("compare", *TYPED, *STEPS[:6], "--optimizers", "dp-sgd", "--seeds", "1", "--out", "table"),
    )
    for command in commands:
        done = dpmac(*command)
        assert done.exit_code == 0, done.output
        lines = [line for line in done.stderr.splitlines() if "your records, do not pub" in line]
        assert all(any(said in line for line in lines) for said in SAID), done.stderr
        assert not [count for count in COUNTS if count in done.stdout]
    for name in ("run", "table"):
        assert dpmac("report", name, "--html", here / name / "page.html").exit_code == 0
    files = [file for name in ("run", "longer", "table") for file in published(here / name)]
    assert {folder.REPORT, folder.CARD, folder.CONFIG, folder.METRICS} <= {f.name for f in files}
    for file in files:
        content = file.read_bytes()
        assert not [count for count in COUNTS if count.encode() in content], file
    for shown in (("card", "run"), ("runs",), ("eval", "run"), ("eval", "run", "--json")):
        done = dpmac(*shown)
        assert done.exit_code == 0
        assert not [count for count in COUNTS if count in done.stdout], shown
    assert not [count for count in COUNTS if count in caplog.text]


@pytest.mark.promise("published")
def test_a_program_reads_private_notes_apart_from_others(here: Path) -> None:
    given: dict[str, Any] = {"schema": "stays.yaml", "skip_bad": True, "sigma": 6, "steps": 2}
    resolved = resolve(dataset="stays.csv", device="cpu", **given)
    data = from_dataframe(stays().iloc[:-7], SCHEMA)
    network = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    private = make_private(network, data, sigma=6, steps=2, device="cpu")
    assert all(any(said in note for note in resolved.private_notes) for said in SAID)
    assert any("height (398 of 796; 1.2 to 2.2)" in note for note in private.private_notes)
    for holder in (resolved, private):
        assert not [note for note in holder.notes if "height" in note or "records" in note]
        assert "Nrod of ward" not in repr(holder)
        assert "records" not in " ".join(holder.notes)
    assert resolved.data is not None
    assert resolved.private_notes == tuple(
        map(as_keywords, private_notes(resolved.plan, resolved.data.notes))
    )
    assert "of 799" not in repr(resolved)
    assert "array(" not in repr(resolved)
    sampling = Poisson(n=60, batch_size=6)
    step = PrivateStep(
        network, lambda model, batch: model(batch), sampling=sampling, sigma=6, steps=2
    )
    assert step.private_notes == ()


def remarks(schema: dict[str, Any], **columns: Any) -> list[str]:
    data = from_dataframe(pa.table(columns), schema)
    found = notes_on(declared(data.path, schema=schema_of(schema, "it"), in_memory=data))
    return list(found.remarks)


@pytest.mark.parametrize(("outside", "noted"), [(0, False), (4, False), (5, True), (200, True)])
def test_values_outside_a_declared_range_are_counted(outside: int, noted: bool) -> None:
    """From a share above 1%, of a column of numbers, of dates, and of a number to predict."""
    x = np.linspace(0, 1, 400)
    far = np.where(np.arange(400) < outside, 99.0, x)
    days = pd.to_datetime("2020-01-01") + pd.to_timedelta(np.where(far > 1, 5000, 100 * x), "D")
    columns = {
        "n": {"range": [-1, 2]},
        "d": {"type": "date", "range": ["2020-01-01", "2022-01-01"]},
    }
    label = {"column": "y", "range": [-2, 3]}
    said = remarks({"label": label, "columns": columns}, n=far, d=days, y=far)
    inputs = f"n ({outside} of 400; -1 to 2) and d ({outside} of 400; 2020-01-01 to 2022-01-01),"
    assert any(f"outside the range of {inputs}" in remark for remark in said) == noted
    assert (
        any(f"outside the range of y ({outside} of 400; -2 to 3), and" in r for r in said) == noted
    )


def test_equal_records_are_a_matter_of_course_in_a_table_of_few_columns() -> None:
    draw = np.random.default_rng(0)
    words = {name: draw.choice(["u", "v", "w"], 300).tolist() for name in "abc"}
    few = {**words, "y": draw.choice(["no", "yes"], 300).tolist()}
    columns: dict[str, Any] = {name: {"categories": ["u", "v", "w"]} for name in "abc"}
    schema = {"label": {"column": "y", "classes": ["no", "yes"]}, "columns": columns}
    more = {**few, "n": draw.normal(size=300).round(6).repeat(2)[:300].tolist()}
    wide = {**schema, "columns": {**columns, "n": {"range": [-9, 9]}}}
    both = {name: [*of[:150], *of[:150]] for name, of in more.items()}
    for table, given, noted in ((few, schema, False), (both, wide, True)):
        found = resolve(dataset=from_dataframe(pa.table(table), given), sigma=6, steps=2)
        assert found.data is not None
        assert found.data.notes.copies > 100
        assert any("copies" in note for note in found.private_notes) == noted
