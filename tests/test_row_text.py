"""The split of a table depends on each record alone, not on how it is stored, read or declared."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from dpmac_cli import from_dataframe
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.row_text import keys_of, plain_texts
from dpmac_cli.data.table_schema import schema_of
from tests.helpers import declared, records_of

pytestmark = pytest.mark.promise("reading")

RECORDS = 120


def table() -> pd.DataFrame:
    """Made-up records, whose column of ranks tells each of them; it is an input as it stands."""
    draw = np.random.default_rng(0)
    day = pd.Timestamp("2020-01-01") + pd.to_timedelta(draw.integers(0, 900, RECORDS), "D")
    return pd.DataFrame(
        {
            "rank": np.arange(RECORDS),
            "age": draw.integers(0, 90, RECORDS),
            "weight": draw.normal(80, 15, RECORDS).round(1),
            "ward": draw.choice(["Nord", "Süd"], RECORDS),
            "smokes": draw.random(RECORDS) < 0.5,
            "admitted": day,
            "stay": draw.integers(0, 30, RECORDS).astype(float),
            "note": draw.choice(["", "x", "y, z"], RECORDS),
            "ill": draw.choice(["no", "yes"], RECORDS),
        }
    )


SCHEMA: dict[str, Any] = {
    "label": {"column": "ill", "classes": ["no", "yes"]},
    "columns": {
        "rank": {"range": [0, RECORDS]},
        "age": {"range": [0, 110]},
        "weight": {"range": [30, 200]},
        "ward": {"categories": ["Nord", "Süd"]},
        "admitted": {"type": "date", "range": ["2020-01-01", "2024-12-31"]},
    },
    "drop": ["stay", "smokes", "note"],
}


#: Columns besides that of ranks.
OTHERS = [*SCHEMA["columns"].items()][1:]


#: Other types of columns, with the same values.
TYPES = {"age": float, "stay": int, "ward": "category"}


def changed(**columns: Any) -> dict[str, Any]:
    """The schema with other declarations of some columns; None to drop one."""
    given = {**SCHEMA["columns"], **columns}
    dropped = [name for name, of in given.items() if of is None]
    kept = {name: of for name, of in given.items() if of is not None}
    stay = [name for name in SCHEMA["drop"] if name not in kept]
    return {**SCHEMA, "columns": kept, "drop": [*stay, *dropped]}


def written(file: Path, schema: Mapping[str, Any], frame: pd.DataFrame, **how: Any) -> Declaration:
    """A file of the records, as CSV or Parquet."""
    if file.suffix == ".parquet":
        frame.to_parquet(file, index=False)
    else:
        frame.to_csv(file, index=False, **how)
    return declared(file, schema=schema_of(schema, "it"))


def held_out(source: Declaration) -> set[int]:
    """The ranks of the records that are held out."""
    (train, test) = records_of(source)
    sides = [np.rint(side.x[:, 0].ravel()).astype(int).tolist() for side in (train, test)]
    assert sorted(sides[0] + sides[1]) == [*range(RECORDS)]
    return set(sides[1])


def in_memory(frame: Any) -> Declaration:
    data = from_dataframe(frame, SCHEMA)
    return declared(data.path, schema=data.schema, in_memory=data)


@pytest.mark.parametrize(
    "schema",
    [
        changed(age={"range": [0, 60]}),
        changed(weight={"range": [30, 200], "missing": "input"}),
        changed(weight={"range": [30, 200], "missing_words": [-99]}),
        changed(age={"categories": ["1", "2"]}),
        changed(ward={"categories": ["Nord"]}),
        changed(weight=None),
        changed(stay={"range": [0, 9]}, note={"categories": ["x"], "missing": "input"}),
        {**SCHEMA, "columns": {"rank": SCHEMA["columns"]["rank"], **dict(OTHERS[::-1])}},
        {**SCHEMA, "label": {"column": "ill", "classes": ["yes", "no"]}},
        changed(ill={"categories": ["no", "yes"]})
        | {"label": {"column": "stay", "range": [0, 20]}, "drop": ["smokes", "note"]},
    ],
)  # fmt: skip
def test_the_split_does_not_depend_on_the_schema(tmp_path: Path, schema: dict[str, Any]) -> None:
    file = tmp_path / "t.csv"
    first = held_out(written(file, SCHEMA, table()))
    assert 10 < len(first) < 50
    assert held_out(written(file, schema, table())) == first


def test_the_split_does_not_depend_on_how_a_table_is_stored(tmp_path: Path) -> None:
    frame, file = table(), tmp_path / "t.csv"
    first = held_out(written(file, SCHEMA, frame))
    same = {
        "delimiter": written(file, SCHEMA, frame, sep=";"),
        "quotes": written(tmp_path / "q.csv", SCHEMA, frame, quoting=csv.QUOTE_ALL),
        "Parquet": written(tmp_path / "t.parquet", SCHEMA, frame),
        "types": written(tmp_path / "u.parquet", SCHEMA, frame.astype(TYPES)),
        "text": written(tmp_path / "s.parquet", SCHEMA, frame.astype(str)),
        "pandas": in_memory(frame),
        "objects": in_memory(frame.astype(object)),
        "pyarrow": in_memory(pa.table(frame)),
        "polars": in_memory(pl.from_pandas(frame)),
    }  # fmt: skip
    tabs = io.BytesIO()
    frame.to_csv(tabs, index=False, sep="\t")
    (tmp_path / "excel.csv").write_bytes(tabs.getvalue().decode().encode("utf-16"))
    same["UTF-16"] = declared(tmp_path / "excel.csv", schema=schema_of(SCHEMA, "it"))
    assert {how for how, source in same.items() if held_out(source) != first} == set()


def test_a_record_does_not_decide_on_which_side_others_are(tmp_path: Path) -> None:
    """Nor does their order. Records with one more copy of another record in the same table."""
    frame, file = table(), tmp_path / "t.parquet"
    first = held_out(written(file, SCHEMA, frame))
    assert held_out(written(file, SCHEMA, frame.iloc[::-1])) == first
    for gone in (0, 50, RECORDS - 1):
        source = written(file, SCHEMA, frame.drop(gone))
        ranks = np.rint(records_of(source)[1].x[:, 0].ravel()).astype(int)
        assert set(ranks.tolist()) == first - {gone}


@pytest.mark.parametrize("copies", [2, 4, 40])
def test_copies_of_a_record_are_on_one_side(tmp_path: Path, copies: int) -> None:
    """So many that a table of few columns would have them are on both."""
    repeated = pd.concat([table()] * copies).sort_values("rank")
    train, test = records_of(written(tmp_path / "t.csv", SCHEMA, repeated))
    both = set(train.x[:, 0].ravel().tolist()) & set(test.x[:, 0].ravel().tolist())
    assert bool(both) == (copies == 40)


def test_columns_of_types_that_are_no_inputs_may_be_dropped(tmp_path: Path) -> None:
    frame = table()
    cells = pa.table(frame)
    lists = pa.array([[rank % 3] for rank in frame["rank"]])
    cells = cells.append_column("list", lists).append_column("raw", pa.array([b"\xff"] * RECORDS))
    parquet.write_table(cells, tmp_path / "t.parquet")
    schema = {**SCHEMA, "drop": [*SCHEMA["drop"], "list", "raw"]}
    found = held_out(declared(tmp_path / "t.parquet", schema=schema_of(schema, "it")))
    assert 10 < len(found) < 50


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["1", "+1", "01", "1.0", "1.", " 1 ", "1e0", "10e-1", 1, 1.0], "1"),
        (["-0", "0.0", "0", 0, 0.0, -0.0], "0"),
        ([".1", "0.10", "1e-1", 0.1, np.float32(0.1)], "0.1"),
        (["", " ", "NA", "nan", "None", None, float("nan")], ""),
        (["True", "true", "TRUE", True], "true"),
        (["2024-12-31", "2024-12-31 00:00:00", "2024-12-31T00:00"], "2024-12-31"),
        (["2024-12-31 18:30", "2024-12-31T18:30:00"], "2024-12-31T18:30:00"),
        (["9007199254740993", 9007199254740993], "9007199254740993"),
        (["1,5"], "1,5"),
        (["2024-02-30"], "2024-02-30"),
        (["Ja"], "Ja"),
    ],
)
def test_forms_of_a_cell_that_are_equal_have_one_text(cells: list[Any], text: str) -> None:
    found = [plain_texts(pa.array([cell]))[0].as_py() for cell in cells]
    assert found == [text] * len(cells)
    # Beside others, too.
    words = [cell for cell in cells if isinstance(cell, str)]
    assert plain_texts(pa.array([*words, "x", "7", None])).to_pylist() == [
        *[text] * len(words),
        "x",
        "7",
        "",
    ]


def test_a_cell_that_is_not_text_changes_no_other() -> None:
    cells = pa.array([b"a", b"\xff", b"1.0"], pa.binary()).cast(pa.string(), safe=False)
    found = plain_texts(cells)
    assert [found[0].as_py(), found[2].as_py()] == ["a", "1"]


@pytest.mark.parametrize("forms", [("1", "1.0", "+1", "01"), ("", "NA"), ("true", "TRUE")])
def test_a_record_moves_no_other_form_of_its_copies(forms: tuple[str, ...]) -> None:
    """Where there are many copies, in any of the forms that mean the same."""
    cells = [forms[number] for number in np.random.default_rng(0).integers(0, len(forms), 60)]
    before = sorted(zip(keys_of([pa.array(cells)]).tolist(), cells, strict=True))
    for form in forms:
        more = [form, *cells]
        after = sorted(zip(keys_of([pa.array(more)]).tolist(), more, strict=True))
        assert len([pair for pair in before if pair not in after]) == 0
