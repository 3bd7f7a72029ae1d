"""Cells of a table: what each kind of column reads, alone and beside others, in any file."""

import csv
import io
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from dpmac_cli.data.column_schema import Column
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table import read_table
from dpmac_cli.data.table_cells import values_in
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.errors import InputError

LABEL = {"column": "y", "classes": ["a", "b"]}
NUMBER, YES_NO = {"range": ["0", "9"]}, {"type": "boolean", "categories": ["nein", "ja"]}
DAY = {"type": "date", "range": ["1920-01-01", "2019-06-30"]}
GERMAN = {**DAY, "format": "%d.%m.%Y"}
#: What a cell is that stands for no value, and one that is nothing that is declared.
NONE, UNREAD = "no value", "not read"


def day(year: int, month: int, of_month: int, hours: float = 0) -> float:
    return (date(year, month, of_month) - date(1970, 1, 1)).days + hours / 24


#: A declaration, a cell, and what it is read as.
CELLS: list[tuple[Mapping[str, Any], str | None, float | str]] = [
    (NUMBER, "12.5", 12.5),
    (NUMBER, " -1e3 ", -1000),
    (NUMBER, "+.5", 0.5),
    (NUMBER, "12,5", UNREAD),
    (NUMBER, "1,200", UNREAD),
    (NUMBER, "inf", UNREAD),
    (NUMBER, "0x10", UNREAD),
    (NUMBER, "1_000", UNREAD),
    (NUMBER, "12 kg", UNREAD),
    (NUMBER, "1e999", np.inf),
    ({**NUMBER, "decimal": ","}, "12,5", 12.5),
    ({**NUMBER, "decimal": ","}, ",5", 0.5),
    ({**NUMBER, "decimal": ","}, "28.570", UNREAD),
    ({**NUMBER, "decimal": ","}, "12.5", UNREAD),
    ({**NUMBER, "thousands": "."}, "1.200,00", 1200),
    ({**NUMBER, "thousands": "."}, "28.570", 28_570),
    ({**NUMBER, "thousands": "."}, "28.57", UNREAD),
    ({**NUMBER, "thousands": "."}, "1.2345", UNREAD),
    ({**NUMBER, "thousands": "."}, "1.200.000", 1_200_000),
    ({**NUMBER, "thousands": "."}, "1200,5", 1200.5),
    ({**NUMBER, "thousands": ","}, "1,200.50", 1200.5),
    ({**NUMBER, "thousands": ","}, "12,5", UNREAD),
    ({**NUMBER, "thousands": ",", "decimal": "."}, "28.570", 28.57),
    ({**NUMBER, "thousands": " ", "decimal": ","}, "1\u202f200,5", 1200.5),
    ({**NUMBER, "thousands": "'"}, "1’200.50", 1200.5),
    *((NUMBER, word, NONE) for word in (None, "", " ", "NA", "nan", "NULL", "None", "#N/A")),
    ({**NUMBER, "missing_words": ["999", "k.A."]}, " k.A. ", NONE),
    ({**NUMBER, "missing_words": [999]}, "999.0", NONE),
    ({**NUMBER, "missing_words": ["999"]}, "998", 998),
    ({**NUMBER, "decimal": ",", "missing_words": ["-9,9"]}, "-9,90", NONE),
    (NUMBER, "k.A.", UNREAD),
    ({"categories": ["A", "B"]}, " B ", 1),
    ({"categories": ["A", "B"]}, "b", UNREAD),
    ({"categories": ["A", "NA"]}, "NA", 1),
    ({"categories": ["A"], "missing_words": ["?"]}, "?", NONE),
    (YES_NO, "Ja", 1),
    (YES_NO, "nein", 0),
    (YES_NO, "si", UNREAD),
    (YES_NO, "", NONE),
    ({"type": "boolean", "categories": ["NÃO", "SIM"]}, "não", 0),
    (DAY, "2004-02-29", day(2004, 2, 29)),
    (DAY, "2004-02-29T18:00:00+02:00", day(2004, 2, 29, 18)),
    (DAY, "2004-02-30", UNREAD),
    (DAY, "20040102", UNREAD),
    (DAY, "31.12.2004", UNREAD),
    (DAY, "soon", UNREAD),
    (GERMAN, "31.12.2004", day(2004, 12, 31)),
    (GERMAN, "31.02.2004", UNREAD),
    (GERMAN, "2004-01-02", UNREAD),
    ({**GERMAN, "missing_words": ["01.01.1900"]}, "1.1.1900", NONE),
]


def column(of: Mapping[str, Any]) -> Column:
    return schema_of({"label": LABEL, "columns": {"c": of}}, "it").columns[0]


def read(cells: pa.Array, of: Mapping[str, Any]) -> list[float | str]:
    values, missing = values_in(cells, column(of))
    return [
        NONE if none else UNREAD if np.isnan(value) else float(value)
        for value, none in zip(values, missing, strict=True)
    ]


@pytest.mark.privacy
@pytest.mark.parametrize(("of", "cell", "value"), CELLS)
def test_a_cell_is_read_as_declared_whatever_stands_beside_it(
    of: Mapping[str, Any], cell: str | None, value: float | str
) -> None:
    assert read(pa.array([cell], pa.string()), of) == [value]
    beside = [other for _, other, _ in CELLS]
    assert read(pa.array([*beside, cell, *beside], pa.string()), of)[len(beside)] == value


@pytest.mark.parametrize(
    ("of", "cells", "value"),
    [
        (NUMBER, pa.array([9, None]).slice(0, 1), 9),
        ({"categories": ["9", "10000000000"]}, pa.array([1e10]), 1),
        ({**NUMBER, "missing_words": ["999.0"]}, pa.array([999]), NONE),
        ({**NUMBER, "missing_words": [-9.9]}, pa.array([-9.9], pa.float32()), NONE),
        ({**NUMBER, "thousands": "."}, pa.array([1.234]), 1.234),
        (GERMAN, pa.array([date(2004, 12, 31)]), day(2004, 12, 31)),
        (GERMAN, pa.array([datetime(2004, 12, 31, 6)], pa.timestamp("ns")), day(2004, 12, 31, 6)),
        ({**GERMAN, "missing_words": ["01.01.1900"]}, pa.array([date(1900, 1, 1)]), NONE),
        ({**DAY, "missing_words": ["1900-01-01"]}, pa.array([datetime(1900, 1, 1)]), NONE),
        ({"type": "boolean", "categories": ["false", "true"]}, pa.array([True]), 1),
    ],
)
def test_cells_of_a_type_are_not_written_as_text_is(
    of: Mapping[str, Any], cells: pa.Array, value: float | str
) -> None:
    assert read(cells, of) == [value]


def arrays(table: str | bytes, columns: Mapping[str, Any], where: Path, **more: Any) -> Any:
    """Arrays of a table with a column y of classes, and why records are left out."""
    given = more.pop("schema", {"label": LABEL, "columns": columns})
    (where / "t.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    return read_table(Source(where / "t.csv", schema=schema_of(given, "it"), **more))


def test_values_become_inputs_and_ranges(tmp_path: Path) -> None:
    columns = {
        "n": {**NUMBER, "missing": "input"},
        "k": {"categories": ["A", "B"], "missing": "input"},
        "b": {**YES_NO, "missing": "input"},
        "d": {"type": "date", "range": ["2000-01-01", "2001-01-01"], "missing": "input"},
    }
    table = "n,k,b,d,y\n3,B,ja,2000-01-01,a\n,,,,b\n5,C,nein,2001-01-01,a\n"
    found, _ = arrays(table, columns, tmp_path)
    year = 366 / 365.25
    assert found["x"].tolist() == [
        # n     | A  B other | b    | d
        [3, 0, 0, 1, 0, 0, 1, 0, year, 0],
        [4.5, 1, 0, 0, 0, 1, 0.5, 1, year / 2, 1],
        [5, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    ]
    assert found["low"].tolist() == [0, *[-1] * 5, 0, -1, 0, -1]
    assert found["high"].tolist() == [9, *[1] * 7, year, 1]
    assert found["y"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("of", "cells", "said"),
    [
        (NUMBER, "1,12.5x,7", "Record 2 has no number in c: '12.5x' (declare decimal"),
        (NUMBER, "x,7,x", "Record 1 and 1 more have no number in c: 'x'"),
        (NUMBER, f"{'x' * 50},7", f"in c: '{'x' * 40}...' ("),
        (NUMBER, "1,\x1b[31m", "Record 2 has no number in c: '\\x1b[31m'"),
        (NUMBER, "1,,7", "Record 2 has no value in c. Correct"),
        (NUMBER, "1,,7", "(missing: input accepts records without a value)"),
        ({**NUMBER, "outside": "refuse"}, "1,99", "that the schema does not declare in c: '99'"),
        (YES_NO, "ja,si", "Record 2 has neither nein nor ja in c: 'si'"),
        (DAY, "31.12.2004", "no date as in 2024-12-31 in c: '31.12.2004' (declare a format"),
        (GERMAN, "2004-01-02", "no date in the format %d.%m.%Y in c: '2004-01-02'"),
        ({**DAY, "outside": "refuse"}, "1919-12-31,2019-06-30T23:59,2019-07-01",
         "Record 1 and 1 more have a value that the schema does not declare in c: '1919-12-31'"),
        ({"categories": ["A"], "outside": "refuse"}, "A,B", "does not declare in c: 'B'"),
        ({"text": 8}, "one,two", "The column c is declared as text. Add an encoder"),
    ],
)  # fmt: skip
def test_a_fault_names_the_record_the_column_and_the_cell(
    tmp_path: Path, of: dict[str, Any], cells: str, said: str
) -> None:
    table = "c;y\n" + "".join(f"{cell};a\n" for cell in cells.split(","))
    with pytest.raises(InputError) as caught:
        arrays(table, {"c": of}, tmp_path)
    assert said in str(caught.value)


TABLE = 'c,note,y\n1,"x, ""y""",a\n,,b\n3,Köln,b\n'


@pytest.mark.privacy
@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("delimiter", [*",;\t|", "~", "^"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "gb18030", "utf-16"])
def test_a_csv_is_read_in_any_encoding_with_any_delimiter_and_end_of_line(
    tmp_path: Path, encoding: str, end: str, delimiter: str, skip_bad: bool
) -> None:
    columns = {"c": {**NUMBER, "missing": "input"}, "note": {"categories": ["Köln", 'x, "y"']}}
    expected, _ = arrays(TABLE.replace(",,b", ",?,b"), columns, tmp_path)
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter, lineterminator=end)
    writer.writerows(csv.reader(TABLE.replace(",,b", ",?,b").splitlines()))
    given = {"label": LABEL, "columns": columns}
    given |= {} if delimiter in ",;\t|" else {"delimiter": delimiter}
    more = {"skip_bad": skip_bad, "schema": {**given, "encoding": encoding}}
    if encoding == "utf-16" and skip_bad:  # a byte more would shift all lines after it
        with pytest.raises(InputError, match=r"reads each line of .* by itself, which utf-16"):
            arrays(written.getvalue().encode(encoding), columns, tmp_path, **more)
        return
    found, left_out = arrays(written.getvalue().encode(encoding), columns, tmp_path, **more)
    assert left_out.records == ()
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'c,y\n1,a\n2,"a\n3,b\n', "Record 2 (line 3) has a quotation mark that neither encloses"),
        (b'c,y\n1,a\n"2,a\n3,b"\n4,a\n', "Record 2 (line 3) has 1 values for 2 columns"),
        (b'c,y\n1,a\n"2,a\n3",b\n', "Record 2 has a line break in c"),
        (b'c,y\n1,a\n2"5,a\n', "(line 3) has a quotation mark"),
        (b'c,y\n1,a\n"2"5,a\n', "(line 3) has a quotation mark"),
        (b"c,y\n1,a\n2\n3,a,b\n", "has 1 values for 2 columns; Record 3 (line 4) has 3 values"),
        (b"c,y\n1,a\n\xff,a\n", "Record 2 (line 3) is not text in UTF-8 (declare another"),
        (b"c,c\n1,a\n", "several columns named 'c'"),
        (b"\xff,y\n1,a\n", "line 1 is not text in UTF-8"),
        (b"", "its first line does not name the columns"),
    ],
)
def test_a_malformed_file_is_one_fault(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        arrays(content, {"c": NUMBER}, tmp_path)
    assert str(tmp_path / "t.csv") in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.privacy
@pytest.mark.parametrize("unit", ["-", "999", "999.0", "k.A.", "", "unknown"])
def test_a_missing_unit_is_no_unit_that_records_share(tmp_path: Path, unit: str) -> None:
    persons = [f"{n},{n},{'ab'[n % 2]}" for n in range(9)]
    table = "\n".join(["x,who,y", *persons, f"1,{unit},a", f"2,{unit},b", ""])
    number, words = {"range": [0, 99]}, ["-", "k.A.", "999"]
    for more in ({"drop": ["who"]}, {}, {"columns": {"x": number, "who": number}}):
        given = {"label": LABEL, "columns": {"x": number}, "missing_words": words, **more}
        with pytest.raises(InputError, match="Record 10 and 1 more have no value in who"):
            arrays(table, {}, tmp_path, schema=given, unit="who")
        _, left_out = arrays(table, {}, tmp_path, schema=given, unit="who", skip_bad=True)
        assert len(left_out.records) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{range: [2015-01-01, 2024-12-31]}", "its ends are dates: add type: date"),
        ("{type: date, range: [2015, 2024]}", "2015 is not a date as YYYY-MM-DD"),
        ("{type: date, range: [2015-02-30, 2024-01-01]}", "such as [2015-01-01"),
        ("{type: date, range: [2025-01-01, 2024-01-01]}", "first date of a range must be"),
        ("{type: date}", "needs either a range"),
        ("{type: date, range: [2015-01-01, 2024-01-01], format: '%m.%Y'}", "needs a day, a month"),
        ("{type: date, range: [2015-01-01, 2024-01-01], format: '%d.%m.%y'}", "of four digits"),
        ("{type: date, range: [2015-01-01, 2024-01-01], decimal: ','}", "of type number"),
        ("{range: [0, 1], format: '%d'}", "format is for columns of type date"),
        ("{range: [0, 1], thousands: ',', decimal: ','}", "need different signs"),
        ("{range: [0, 1], decimal: ';'}", "Input should be '.' or ','"),
        ("{type: boolean, categories: [ja]}", "needs two categories, false and true"),
        ("{type: boolean, categories: [ja, JA]}", "needs two categories, false and true"),
        ("{type: boolean, range: [0, 1]}", "type: boolean needs categories"),
        ("{categories: A}", "categories: needs a list, such as [A]"),
        ("{range: [0, 1], missing_words: k.A.}", "missing_words: needs a list, such as [k.A.]"),
        ("{range: [0, 1], missing_words: [a, a]}", "a is declared 2 times"),
        ("{categories: [A, '-'], missing_words: ['-']}", "among the categories and the missing_w"),
        ("{type: boolean, categories: [n, N/A], missing_words: ['n/a']}", "'n/a' is among the cat"),
        ("{range: [0, 1], symbol: kg}", "symbol is not read any more: remove such text from"),
        ("{type: date, range: [2015-01-01, 2024-01-01], parts: [age]}", "parts is not read any"),
        ("{type: integer, range: [1, 4]}", "list the numbers as categories: [1, 2, 3]"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_explained(given: str, said: str) -> None:
    columns = {"c": yaml.load(given, yaml.BaseLoader)}
    with pytest.raises(InputError) as caught:
        schema_of({"label": LABEL, "columns": columns}, "it")
    assert said in str(caught.value)
    assert "it: columns.c" in str(caught.value)


def test_schemas_of_earlier_models_can_be_read() -> None:
    """Their columns have no type, or all keys of their version."""
    of: dict[str, Any] = {
        "range": None,
        "categories": [],
        "text": None,
        "missing": "refuse",
        "outside": "accept",
    }
    of |= {"decimal": None, "thousands": None, "symbol": None, "parts": [], "reference": None}
    number, named = {**of, "name": "a", "range": [0, 1]}, {**of, "name": "b", "categories": ["x"]}
    label = {**LABEL, "range": None, "transform": "none", "kind": "number", "symbol": None}
    given = {"label": label, "columns": [number, named], "drop": [], "test": None}
    assert [column.type for column in schema_of(given, "it").columns] == ["number", "category"]
