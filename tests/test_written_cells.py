"""Numbers, dates, booleans and encodings of tables, read as their schema declares."""

import re
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from dpmac_cli import from_dataframe
from dpmac_cli.data.column_schema import Column, Written
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_cells import BadRecords
from dpmac_cli.data.table_columns import column_inputs
from dpmac_cli.data.table_numbers import read_numbers
from dpmac_cli.data.table_schema import read_schema, schema_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.errors import InputError
from tests.helpers import load
from tests.typed import dpmac

LABEL = {"column": "y", "classes": ["a", "b"]}
BIRTHS = {"type": "date", "range": ["2000-01-01", "2009-12-31"]}


def read(of: Mapping[str, Any], *cells: str | None, **others: Any) -> tuple[Any, dict[str, Any]]:
    """Inputs that a column becomes, shape (records, inputs), and reasons with records."""
    columns = schema_of({"label": LABEL, "columns": {"c": of, **others}}, "it").columns
    bad = BadRecords()
    named = {column.name: pa.array(cells, pa.string()) for column in columns}
    x, low, high = column_inputs(columns[:1], named, bad, True, None)
    assert x.shape[1] == len(low) == len(high) == columns[0].inputs
    return x, {why: at.nonzero()[0].tolist() for why, at in bad.items() if at.any()}


def table(where: Path, cells: list[str], of: str, more: str = "", **options: Any) -> Source:
    """A table with a column c and classes a and b in turn; a semicolon separates columns."""
    (where / "s.yaml").write_text(
        f"{more}\nlabel: {{column: y, classes: [a, b]}}\ncolumns: {{c: {of}}}"
    )
    rows = [f"{cell};{'ab'[n % 2]}" for n, cell in enumerate(cells)]
    (where / "t.csv").write_text("\n".join(["c;y", *rows, ""]))
    return Source(where / "t.csv", schema=read_schema(where / "s.yaml"), **options)


def refused(of: Source) -> str:
    with pytest.raises(InputError) as caught:
        inspect(of)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "cell", "number"),
    [
        ({}, "12.5", 12.5),
        ({}, "-1e3", -1000),
        ({"decimal": ","}, "12,5", 12.5),
        ({"decimal": ","}, ",5", 0.5),
        ({"decimal": ","}, "28.570", None),
        ({"decimal": ","}, "12.5", None),
        ({"thousands": "."}, "1.200,00", 1200),
        ({"thousands": "."}, "28.570", 28_570),
        ({"thousands": "."}, "28.57", None),
        ({"thousands": "."}, "1.2345", None),
        ({"thousands": "."}, "1.200.000", 1_200_000),
        ({"thousands": "."}, "1200,5", 1200.5),
        ({"thousands": ","}, "1,200.50", 1200.5),
        ({"thousands": ","}, "12,5", None),
        ({"thousands": ",", "decimal": "."}, "28.570", 28.57),
        ({"thousands": " ", "decimal": ","}, "1\u202f200,5", 1200.5),
        ({"thousands": "'"}, "1’200.50", 1200.5),
        ({"symbol": "kg"}, "12.5 kg", 12.5),
        ({"symbol": "kg"}, "12.5", 12.5),
        ({"symbol": "kg"}, "12.5 g", None),
        ({"symbol": "€", "decimal": ","}, "€ 12,5", 12.5),
        ({"symbol": "$"}, "$12.5", 12.5),
        ({}, "12,5", None),
        ({}, "1,200", None),
        ({}, "inf", None),
    ],
)
def test_a_number_is_read_as_declared_or_not_at_all(
    form: dict[str, str], cell: str, number: float | None
) -> None:
    numbers, fits = read_numbers(pa.array([cell]), Written.model_validate(form))
    assert (numbers[0].as_py(), fits.tolist()) == (number, [number is not None])


@pytest.mark.parametrize(
    ("form", "cell", "said"),
    [
        ({}, "12,5", """'12,5' (12.5 with decimal: "," in the schema)"""),
        ({}, "1.200,00", """'1.200,00' (1200 with thousands: "." in the schema)"""),
        (
            *({}, "1,200"),
            """'1,200' (1.2 with decimal: ","; 1200 with thousands: "," in the schema)""",
        ),
        ({"decimal": ","}, "28.570", """'28.570' (28570 with decimal: ",", thousands: ".\""""),
        ({}, "12 kg", """'12 kg' (12 with symbol: "kg" in the schema)"""),
        ({}, "€ 12,5", """'€ 12,5' (12.5 with decimal: ",", symbol: "€" in the schema)"""),
        ({}, "k.A.", "'k.A.' (leave the cell empty, or declare missing_words: "),
        ({}, "x" * 50, f"'{'x' * 40}...'"),
    ],
)
def test_a_cell_that_is_refused_is_shown_with_what_to_declare(
    form: dict[str, str], cell: str, said: str
) -> None:
    _, bad = read({"range": ["0", "9"], **form}, "1", cell, "2")
    ((why, records),) = bad.items()
    assert (why.startswith(f"no number in c: {said}"), records) == (True, [1]), why


def test_what_would_be_misread_beside_a_decimal_comma_is_said(tmp_path: Path) -> None:
    said = refused(table(tmp_path, ["28.570", "12,5", "3,25"], "{range: [0, 99]}"))
    assert "Record 2 and 1 more have no number in c: '12,5' (12.5 with decimal" in said
    assert "while '28.570' is read as 28.57" in said
    said = refused(table(tmp_path, ["28.570", "12,5"], "{range: [0, 99]}", 'decimal: ","'))
    assert "Record 1 has no number in c: '28.570' (28570 with" in said
    both = table(tmp_path, ["28.570", "12,5"] * 20, "{range: [0, 1e5]}", 'thousands: "."')
    x = np.concatenate([part[0] for part in load(both)])
    assert set(x.ravel().tolist()) == {28570.0, 12.5}


@pytest.mark.parametrize(
    ("cells", "semicolons", "said"),
    [
        (["28.570", "950", "1.200"], True, True),
        (["28.570", "950", "1.200"], False, True),
        (["28.570", "1.200"], True, True),
        (["28.570", "1.200"], False, False),
        (["28.570", "0.125"], True, False),
        (["28.570", "12.5"], True, False),
        (["28", "950"], True, False),
    ],
)
def test_points_that_may_separate_thousands_are_refused(
    tmp_path: Path, cells: list[str], semicolons: bool, said: bool
) -> None:
    of = table(tmp_path, cells * 20, "{range: [0, 1e5]}")
    if not semicolons:
        of.path.write_text(of.path.read_text().replace(";", ","))
    if said:
        message = refused(of)
        assert "c has numbers such as 28.570, which may mean 28570 or 28.57: declare" in message
        assert 'thousands: "." or decimal: "." in the schema' in message
    else:
        inspect(of)
    declared = table(tmp_path, cells * 20, "{range: [0, 1e5]}", 'decimal: "."')
    assert inspect(declared).facts.train_size


def test_a_column_may_be_written_otherwise_than_the_table() -> None:
    schema = schema_of(
        {
            "decimal": ",",
            "label": {"column": "y", "range": ["0", "9"]},
            "columns": {
                "a": {"range": ["0", "9"]},
                "b": {"range": ["0", "9"], "decimal": "."},
                "c": {"categories": ["x"]},
            },
        },
        "it",
    )
    assert [column.decimal for column in schema.columns] == [",", ".", None]
    assert [label.decimal for label in schema.labels] == [","]
    assert type(schema).model_validate(schema.model_dump(mode="json")) == schema


def test_numbers_of_a_data_frame_are_not_written_as_its_texts_are() -> None:
    schema = {"label": LABEL, "columns": {"c": {"range": [0, 9]}}, "thousands": "."}
    frame = pd.DataFrame({"c": [1.234, 2, "3,5", "4"] * 20, "y": ["a", "b"] * 40}, dtype=object)
    frame["c"] = pd.Series([1.234, 2, "3,5", "4"] * 20, dtype=object)
    x = np.concatenate([part[0] for part in load(Source(**in_memory(frame, schema)))])
    assert sorted({round(value, 4) for value in x.ravel().tolist()}) == [1.234, 2, 3.5, 4]


def in_memory(frame: Any, schema: Any) -> dict[str, Any]:
    data = from_dataframe(frame, schema)
    return {"path": data.path, "schema": data.schema, "in_memory": data}


def test_with_skip_bad_a_note_says_how_many_records_are_left_out_and_why(tmp_path: Path) -> None:
    of = table(tmp_path, ["12,5", "7"] * 30, "{range: [0, 99]}", skip_bad=True)
    found = inspect(of)
    assert len(found.skipped) == 30
    (why,) = found.why
    assert why.startswith("Record 1 and 29 more have no number in c: '12,5' (12.5 with decimal")
    flags = ("--dataset", of.path, "--schema", tmp_path / "s.yaml", "--skip-bad")
    result = dpmac("train", *flags, "--steps", "1", "--sigma", "9", "--out", tmp_path / "run")
    said = " ".join(result.output.split())
    assert f"note: 30 records of {of.path} are left out: Record 1 and 29 more" in said
    for file in (tmp_path / "run").rglob("*"):
        if file.suffix in (".json", ".md", ".yaml", ".jsonl"):
            assert "12,5" not in file.read_text()


def test_a_table_of_which_nothing_is_left_says_why(tmp_path: Path) -> None:
    said = refused(table(tmp_path, ["12,5"] * 3, "{range: [0, 99]}", skip_bad=True))
    assert "t.csv has no record left to train on; Record 1 and 2 more have no number in c" in said
    assert 'decimal: ","' in said


@pytest.mark.privacy
@pytest.mark.parametrize("added", ["12,5", "28.570", "1,200", "0.1234", "x", "", "9,75 kg"])
def test_no_cell_changes_how_another_is_read(tmp_path: Path, added: str) -> None:
    cells = [f"{n}.125" for n in range(1, 40)]
    before = table(tmp_path, cells, "{range: [0, 99]}", skip_bad=True)
    facts, was = inspect(before).facts, rows_of(before)
    after = table(tmp_path, [*cells, added], "{range: [0, 99]}", skip_bad=True)
    now = rows_of(after)
    assert len(now) - len(was) == 1 - len(inspect(after).skipped)
    assert not set(was) - set(now)
    assert inspect(after).facts.mean == facts.mean


def rows_of(of: Source) -> list[float]:
    return [value for part in load(of) for value in part[0].ravel().tolist()]


def test_parts_of_a_date_become_inputs() -> None:
    parts = ["age", "weekday", "month", "day_of_year", "time_of_day"]
    x, bad = read({**BIRTHS, "parts": parts}, "2001-07-01", "2004-02-29T18:00:00+02:00")
    assert bad == {}
    for row, when in zip(x, (datetime(2001, 7, 1), datetime(2004, 2, 29, 18)), strict=True):
        rest = datetime(2009, 12, 31) - when
        assert row[0] == pytest.approx(rest.total_seconds() / 86_400 / 365.25)
        assert row[1:8].tolist() == [float(day == when.weekday()) for day in range(7)]
        assert row[8:20].tolist() == [float(month == when.month) for month in range(1, 13)]
        turn = 2 * np.pi * (when.timetuple().tm_yday - 1) / 366
        assert row[20:22] == pytest.approx([np.sin(turn), np.cos(turn)])
        turn = 2 * np.pi * when.hour / 24
        assert row[22:] == pytest.approx([np.sin(turn), np.cos(turn)])


@pytest.mark.privacy
def test_no_part_of_a_date_is_beyond_its_range(tmp_path: Path) -> None:
    cells = ["0001-01-01", "9999-12-31", "2005-01-01", "2000-01-01", "2009-12-31T23:59"] * 8
    parts = "[age, weekday, month, day_of_year, time_of_day]"
    of = f"{{type: date, range: [2000-01-01, 2009-12-31], parts: {parts}}}"
    source = table(tmp_path, cells, of)
    facts = inspect(source).facts
    x = np.concatenate([part[0] for part in load(source)]).reshape(len(cells), -1)
    scaled = (x - facts.mean) / facts.std
    assert abs(scaled).max() == pytest.approx(1, abs=1e-6)
    years = (date(2009, 12, 31) - date(2000, 1, 1)).days / 365.25
    assert (facts.mean[0] * 2, facts.std[0] * 2) == pytest.approx((years, years))


def test_a_date_outside_the_range_is_refused_if_declared() -> None:
    cells = ("1999-12-31", "2000-01-01", "2009-12-31 23:59", "2010-01-01")
    _, bad = read({**BIRTHS, "outside": "refuse"}, *cells)
    assert bad == {"a value that the schema does not declare in c: '1999-12-31'": [0, 3]}


def test_age_refers_to_another_date() -> None:
    of = {**BIRTHS, "format": "%d.%m.%Y", "reference": "d"}
    other = {"type": "date", "range": ["2020-01-01", "2020-12-31"], "format": "%d.%m.%Y"}
    columns = schema_of({"label": LABEL, "columns": {"c": of, "d": other}}, "it").columns
    cells = {"c": pa.array(["01.07.2001"]), "d": pa.array(["01.07.2020"])}
    x, low, high = column_inputs(columns, cells, BadRecords(), True, None)
    assert x[0, 0] == pytest.approx(19, abs=0.01)
    assert (low[0], high[0]) == pytest.approx((10, 21), abs=0.02)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("01.02.57", 1957), ("31.12.20", 1920), ("01.01.19", 2019), ("29.02.00", 2000)],
)
def test_a_year_of_two_digits_is_in_the_declared_century(cell: str, expected: int) -> None:
    of = {"type": "date", "range": ["1920-01-01", "2019-06-30"], "format": "%d.%m.%y"}
    x, bad = read(of, cell)
    assert bad == {}
    when = datetime.strptime(cell, "%d.%m.%y").replace(year=expected)
    age = (datetime(2019, 6, 30) - when).days / 365.25
    assert x[0, 0] == pytest.approx(age)


@pytest.mark.parametrize(
    ("cell", "written", "said"),
    [
        (
            "31.12.2004",
            None,
            """as in 2024-12-31 in c: '31.12.2004' (declare how it is written: """,
        ),
        ("03/04/2004", None, '"%d/%m/%Y" or format: "%m/%d/%Y")'),
        ("2004-02-30", None, "as in 2024-12-31 in c: '2004-02-30'"),
        ("20040102", None, 'format: "%Y%m%d"'),
        ("2004-01-02", "%d.%m.%Y", "in the format %d.%m.%Y in c: '2004-01-02'"),
        ("soon", None, "in c: 'soon'"),
    ],
)
def test_what_is_no_date_is_refused(cell: str, written: str | None, said: str) -> None:
    of = {**BIRTHS, **({"format": written} if written else {})}
    _, bad = read(of, "2004-01-01" if written is None else "01.01.2004", cell)
    ((why, records),) = bad.items()
    assert (said in why, records) == (True, [1]), why


def test_a_missing_date_has_an_input_of_its_own() -> None:
    x, bad = read({**BIRTHS, "parts": ["age", "weekday"], "missing": "input"}, "", "2005-01-03")
    assert bad == {}
    years = (date(2009, 12, 31) - date(2000, 1, 1)).days / 365.25
    assert x[0] == pytest.approx([years / 2, *[0] * 7, 1])
    assert x[1, 1:].tolist() == [1, *[0] * 6, 0]
    _, bad = read(BIRTHS, "", "2005-01-03")
    assert bad == {"no value in c": [0]}


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("ns")])
def test_dates_of_a_type_are_read_without_their_format(tmp_path: Path, kind: pa.DataType) -> None:
    days = [date(2000, 1, 1 + n % 28) for n in range(40)]
    columns = {"c": pa.array(days).cast(kind), "y": pa.array(["a", "b"] * 20)}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    schema = schema_of({"label": LABEL, "columns": {"c": {**BIRTHS, "format": "%d.%m.%Y"}}}, "it")
    first = rows_of(Source(tmp_path / "t.parquet", schema=schema))
    texts = [day.strftime("%d.%m.%Y") for day in days]
    written = table(
        tmp_path, texts, '{type: date, range: [2000-01-01, 2009-12-31], format: "%d.%m.%Y"}'
    )
    assert sorted(first) == pytest.approx(sorted(rows_of(written)))


def test_booleans_are_read_in_the_words_declared() -> None:
    x, bad = read({"type": "boolean", "categories": ["nein", "ja"]}, "Ja", "nein", "JA", "si")
    assert x[:3, 0].tolist() == [1, 0, 1]
    assert bad == {"neither nein nor ja in c: 'si'": [3]}
    x, bad = read({"type": "boolean", "categories": ["non", "oui"], "missing": "input"}, "", "oui")
    assert (x.tolist(), bad) == ([[0.5, 1], [1, 0]], {})


def test_whole_numbers_become_one_input_each() -> None:
    x, bad = read({"type": "integer", "range": ["1", "3"]}, "1", "3.0", "9", "2.5")
    assert x[:3].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert bad == {"no whole number in c: '2.5'": [3]}
    of: dict[str, Any] = {
        "type": "integer",
        "range": ["1", "3"],
        "outside": "refuse",
        "missing": "input",
    }
    x, bad = read(of, "2", "", "4")
    assert x.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert bad == {"a value that the schema does not declare in c: '4'": [2]}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"range": ["2015-01-01", "2024-12-31"]}, "its ends are dates: add type: date"),
        ({"type": "date", "range": ["2015", "2024"]}, "2015 is not a date as YYYY-MM-DD"),
        ({"type": "date", "range": ["2015-02-30", "2024-01-01"]}, "such as [2015-01-01"),
        ({"type": "date", "range": ["2025-01-01", "2024-01-01"]}, "first date of a range must be"),
        ({"type": "date"}, "needs either a range"),
        ({**BIRTHS, "format": "%d %b %Y"}, "format %d %b %Y has %b, but dates are read with"),
        ({**BIRTHS, "format": "%m.%Y"}, "needs a day, a month and a year, such as %d.%m.%Y"),
        ({**BIRTHS, "parts": ["year"]}, "'age', 'weekday'"),
        ({**BIRTHS, "parts": ["age", "age"]}, "age is declared 2 times"),
        ({**BIRTHS, "reference": "x"}, "x of c must be a column of type date"),
        ({**BIRTHS, "reference": "c", "parts": ["month"]}, "reference is for the part age"),
        ({**BIRTHS, "decimal": ","}, "decimal is for columns of type number or integer"),
        (
            {"type": "date", "range": ["1900-01-01", "2024-01-01"], "format": "%d.%m.%y"},
            "years of two digits, which need a range of less than 100 years",
        ),
        ({"range": ["0", "1"], "format": "%d"}, "format is for columns of type date"),
        ({"range": ["0", "1"], "thousands": ",", "decimal": ","}, "need different signs"),
        ({"range": ["0", "1"], "decimal": ";"}, "Input should be '.' or ','"),
        ({"type": "boolean", "categories": ["ja"]}, "needs two categories, false and true"),
        ({"type": "boolean", "categories": ["ja", "JA"]}, "needs two categories, false and true"),
        ({"type": "boolean", "range": ["0", "1"]}, "type: boolean needs categories"),
        ({"type": "integer", "range": ["0", "5000"]}, "an input of each of 5001 whole numbers"),
        ({"type": "integer", "range": ["0.5", "5"]}, "needs whole numbers as the ends"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_explained(of: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        schema_of({"label": LABEL, "columns": {"c": of}}, "it")
    assert said in str(caught.value)
    assert "it: columns.c" in str(caught.value) or "it: it:" in str(caught.value)


def test_schemas_of_earlier_models_can_be_read() -> None:
    """Their columns have no type, and all other keys."""
    of: dict[str, Any] = {
        "range": None,
        "categories": [],
        "text": None,
        "missing": "refuse",
        "outside": "accept",
    }
    number, named = {**of, "name": "a", "range": [0, 1]}, {**of, "name": "b", "categories": ["x"]}
    label = {**LABEL, "range": None, "transform": "none", "kind": "number", "outside": "accept"}
    given = {"label": label, "columns": [number, named], "drop": [], "test": None}
    assert [column.type for column in schema_of(given, "it").columns] == ["number", "category"]


@pytest.mark.privacy
@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-8", "utf-16"])
def test_a_table_is_read_in_its_encoding(tmp_path: Path, encoding: str, skip_bad: bool) -> None:
    of = table(tmp_path, ["Köln", "Bonn"] * 20, "{categories: [Köln], outside: refuse}")
    text = of.path.read_text().replace("Bonn", "Köln")
    of.path.write_text(text, encoding=encoding)
    source = Source(of.path, schema=of.schema, encoding=encoding, skip_bad=skip_bad)
    if encoding == "utf-16" and skip_bad:  # a byte more would shift all lines after it
        assert "reads each line of" in refused(source)
        assert "save the table as UTF-8, or leave out --skip-bad" in refused(source)
        return
    facts = inspect(source).facts
    assert facts.train_size + facts.test_size == 40
    if encoding == "cp1252" and not skip_bad:
        assert "declare its own, such as --encoding cp1252" in refused(of)


def test_an_encoding_that_is_not_known_is_refused(tmp_path: Path) -> None:
    of = table(tmp_path, ["1"] * 3, "{range: [0, 9]}")
    result = dpmac("schema", of.path, "--encoding", "cp99")
    assert result.exit_code == 2
    assert "--encoding" in result.output
    assert "utf-8" in result.output


@pytest.mark.privacy
@pytest.mark.parametrize("encoding", ["cp1252", "shift_jis", "gb18030", "utf-7"])
def test_in_another_encoding_no_line_changes_the_next(tmp_path: Path, encoding: str) -> None:
    of = table(tmp_path, [str(n) for n in range(40)], "{range: [0, 99]}", skip_bad=True)
    source = Source(of.path, schema=of.schema, encoding=encoding, skip_bad=True)
    expected = rows_of(source)
    lines = of.path.read_bytes().split(b"\n")
    for broken in (b"\xff\xfe\x81;a", b"\x81", b'"1;a', b"+2;a\x8f", b"\x1b$B5;a"):
        of.path.write_bytes(b"\n".join([*lines[:9], broken, *lines[9:]]))
        assert len(inspect(source).skipped) == 1, broken
        assert sorted(rows_of(source)) == sorted(expected)


def quoted(where: Path, marks: tuple[int, ...]) -> Source:
    """300 records of three columns, with stray quotation marks in some."""
    text = [f"{n % 90},note {n},{'ab'[n % 2]}" for n in range(300)]
    for place, row in enumerate(marks):
        text[row] = text[row].replace("note ", 'note"' if place % 2 else '"note ')
        text[row] = text[row].replace(f'note"{row}', f'note {row}"')
    (where / "s.yaml").write_text(
        "label: {column: y, classes: [a, b]}\ncolumns: {c: {range: [0, 99]}}\ndrop: [note]\n"
    )
    (where / "t.csv").write_text("\n".join(["c,note,y", *text, ""]))
    return Source(where / "t.csv", schema=read_schema(where / "s.yaml"))


def test_records_that_stray_quotation_marks_hide_are_refused(tmp_path: Path) -> None:
    of = quoted(tmp_path, (50, 250))
    said = refused(of)
    assert "t.csv has 100 records, but 299 lines look like records" in said
    assert "Record 51 (line 52) cannot be read" in said
    kept = inspect(Source(of.path, schema=of.schema, skip_bad=True))
    assert (kept.facts.train_size + kept.facts.test_size, len(kept.skipped)) == (299, 1)
    assert kept.why == ("Record 51 (line 52) cannot be read (unexpected end of data)",)


def test_texts_of_several_lines_are_not_taken_for_records(tmp_path: Path) -> None:
    of = quoted(tmp_path, ())
    text = of.path.read_text().replace("note 7,", '"one, two\nthree, four, five\n\nsix",')
    of.path.write_text(text)
    facts = inspect(of).facts
    assert facts.train_size + facts.test_size == 300


def test_a_number_where_the_schema_has_classes_is_shown(tmp_path: Path) -> None:
    of = table(tmp_path, ["1"] * 4, "{range: [0, 9]}")
    of.path.write_text("c;y\n1;1.197\n2;2.5\n")
    said = refused(of)
    assert "Record 1 and 1 more have no class of the schema in y: '1.197' (a number to " in said
    assert "predict needs range: [LOW, HIGH] in the schema instead of classes)" in said
    of.path.write_text("c;y\n1;a\n2;\x1b[31m\n")
    assert "Record 2 has no class of the schema in y: '\\x1b[31m'" in refused(of)


@pytest.mark.privacy
def test_a_draft_of_dates_and_words_is_made_of_the_header_alone(tmp_path: Path) -> None:
    header = "name;admitted;smoker;score;out\n"
    drafts = []
    for body in (b"x;01.02.2020;ja;28.570;1\n", b"", b"\xff\x00;;\n"):
        (tmp_path / "t.csv").write_bytes(header.encode() + body)
        flags = ("--label", "out", "--drop", "name", "--date", "admitted", "--boolean", "smoker")
        result = dpmac("schema", tmp_path / "t.csv", *flags)
        assert result.exit_code == 0, result.output
        drafts.append(result.stdout)
    assert len(set(drafts)) == 1
    given = yaml.safe_load(drafts[0])
    assert given["decimal"] == ","  # columns are separated by semicolons
    fill = ["FILL_IN", "FILL_IN"]
    assert given["columns"] == {
        "admitted": {"type": "date", "range": fill},
        "smoker": {"type": "boolean", "categories": fill},
        "score": {"range": fill},
    }


def test_a_draft_has_the_types_of_a_parquet(tmp_path: Path) -> None:
    columns = {"when": [date(2020, 1, 1)], "well": [True], "n": [1], "town": ["x"], "cost": [1.5]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    text = dpmac("schema", tmp_path / "t.parquet", "--label", "cost").stdout
    given = yaml.safe_load(text)
    assert given["label"] == {"column": "cost", "range": ["FILL_IN", "FILL_IN"]}
    filled = text.replace("[FILL_IN, FILL_IN]", "[0, 3]").replace("[FILL_IN]", "[x]")
    filled = filled.replace(
        "type: date\n    range: [0, 3]", "type: date\n    range: [2020-01-01, 2021-01-01]"
    )
    (tmp_path / "s.yaml").write_text(filled)
    kinds = [column.type for column in read_schema(tmp_path / "s.yaml").columns]
    assert kinds == ["date", "boolean", "number", "category"]


def test_every_type_says_what_it_becomes() -> None:
    for name in ("type", "format", "parts", "reference", "decimal", "thousands", "symbol"):
        assert name in {**Column.model_fields, **Written.model_fields}
        assert re.search(rf"\b{name}\b", (Column.__doc__ or "") + (Written.__doc__ or ""))
