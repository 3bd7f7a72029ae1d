"""Tables in CSV and Parquet files, from their schema to a trained classifier."""

import csv
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from PIL import Image

import dpmac_cli
from dpmac_cli import from_dataframe
from dpmac_cli.data.column_schema import Column, as_cell
from dpmac_cli.data.csv_file import CsvFile
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.table import read_table
from dpmac_cli.data.table_cells import values_in
from dpmac_cli.data.table_schema import read_schema, schema_of
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.release import scoring
from tests.helpers import declared, inspect, load, notes_on
from tests.pairwise import all_pairs
from tests.typed import dpmac

DOCS = Path(__file__).parents[1] / "docs"


PAGES = [DOCS / f"own-{kind}.md" for kind in ("images", "tables", "numbers")]


#: Their text.
GUIDE = "\n".join(page.read_text() for page in PAGES)


#: The schema of penguins.csv that they show.
(PENGUINS,) = re.findall(r"```yaml\n(label:\n  column: species\n.*?)```", GUIDE, re.DOTALL)


PATIENTS = """\
age,sex,ward,outcome,site,name
30,f,A,ill,1,x
70,m,B,well,1,x
130,f,C,well,2,x
,m,A,ill,2,x
"""


SCHEMA = """
label: {column: outcome, classes: [well, ill]}
columns:
  age: {range: [0, 100], missing: input}
  sex: {categories: [f, m]}
  ward: {categories: [A, B]}
drop: [name]
test: {column: site, values: ["2"]}
"""


def penguins(where: Path) -> Path:
    """The table of the package palmerpenguins, which is in the public domain."""
    spec = importlib.util.find_spec("palmerpenguins")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (where / "schema.yaml").write_text(PENGUINS)
    content = Path(spec.submodule_search_locations[0], "data", "penguins.csv").read_bytes()
    (where / "penguins.csv").write_bytes(content)
    return where / "penguins.csv"


def wages(where: Path) -> None:
    """Made-up records with the columns of linearmodels' wage panel, and the schema of the page."""
    (schema,) = re.findall(r"```yaml\n(label: \{column: lwage.*?)```", GUIDE, re.DOTALL)
    (where / "wages.yaml").write_text(schema)
    header = "nr,year,black,exper,hisp,hours,married,educ,union,lwage,expersq,occupation"
    persons = (
        f"{n // 8},{1980 + n % 8},0,{n % 8},1,2000,{n % 2},{9 + n % 9},0" for n in range(240)
    )
    rows = [f"{person},{1 + n % 5 / 4},{n % 8},5" for n, person in enumerate(persons)]
    (where / "wages.csv").write_text("\n".join([header, *rows, ""]))


def stays(where: Path) -> None:
    """The made-up stays of the page, and their schema."""
    ((program,), (schema,)) = (
        re.findall(rf"```{kind}\n({begin}.*?)```", GUIDE, re.DOTALL)
        for kind, begin in (("python", "import random"), ("yaml", "encoding: cp1252"))
    )
    (where / "stays.yaml").write_text(schema)
    subprocess.run([sys.executable, "-c", program], cwd=where, check=True)


def source(where: Path, table: str = PATIENTS, schema: str = SCHEMA, **options: Any) -> Declaration:
    (where / "patients.csv").write_text(table)
    (where / "patients.yaml").write_text(schema)
    read = read_schema(where / "patients.yaml")
    return declared(where / "patients.csv", schema=read, **options)


def inputs(of: Declaration) -> tuple[list[list[float]], list[int]]:
    """Training and test records as the network sees them, one after another."""
    facts = inspect(of)
    rows, labels = zip(*load(of), strict=True)
    gain, offset = facts.records.scaling
    return (np.concatenate(rows) * gain + offset).tolist(), np.concatenate(labels).tolist()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[0, 100]", "[100, 0]", "first number of a range must be smaller than the second"),
        ("[0, 100]", "[0]", "columns.age.range"),
        ("[0, 100]", "[0, .inf]", "columns.age.range"),
        ("[0, 100]", "[0, FILL_IN]", "fill in the columns' values in place of FILL_IN in line 4"),
        ("range: [0, 100]", "ranges: [0, 100]", "columns.age.ranges"),
        ("range: [0, 100], ", "", "needs either a range or categories"),
        ("[A, B]", "[A, A]", "A is declared 2 times"),
        ("[well, ill]", "[well]", "label: classes: needs at least two names"),
        ("drop: [name]", "drop: [age]", "age is declared 2 times"),
        ("drop: [name]", "drops: [name]", "drops"),
        ("missing: input", "missing: mean", "columns.age.missing"),
        ("  sex", "  age", "age is declared 2 times"),
        ("label:", "label", "mapping"),
        (SCHEMA, "", "it: "),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    (tmp_path / "s.yaml").write_text(SCHEMA.replace(old, new))
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_schema(tmp_path / "s.yaml")
    assert all(
        f"--schema {tmp_path / 's.yaml'}" in error for error in str(caught.value).splitlines()
    )


def test_a_fault_of_a_schema_names_its_line_and_the_key_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "label:\n"
        "  column: y\n"
        "  clases: [a, b]\n"
        "columns:\n"
        "  age: {rang: [0, 1]}\n"
        "  sex:\n"
        "    categories: [m, m]\n"
        "test: {colum: part, values: [1]}\n"
        "dorp: [id]\n"
    )
    with pytest.raises(InputError) as caught:
        read_schema(file)
    said = "\n".join(caught.value.errors)
    for line, fault in (
        (3, r"label\.clases: .*\. Did you mean classes\?"),
        (5, r"columns\.age\.rang: .*\. Did you mean range\?"),
        (7, r"columns\.sex\.categories: m is declared 2 times"),
        (8, r"test\.colum: .*\. Did you mean column\?"),
        (8, r"test\.column: Field required"),
        (9, r"dorp: .*\. Did you mean drop\?"),
    ):
        assert re.search(f"{re.escape(str(file))}, line {line}: {fault}", said), said
    file.write_text("drop: [a]\nlabel: {column: y, classes: [a, b]}\ndrop: [b]\n")
    with pytest.raises(InputError, match="line 3: drop is declared 2 times"):
        read_schema(file)


@pytest.mark.promise("reading")
def test_no_input_is_beyond_its_range(tmp_path: Path) -> None:
    table = PATIENTS.replace("130", "1e300").replace("30,f", "-1e300,f")
    x, _ = inputs(source(tmp_path, table))
    assert np.abs(x).max() == 1.0


@pytest.mark.promise("reading")
def test_a_draft_is_made_of_the_header_alone(tmp_path: Path) -> None:
    header, _, records = PATIENTS.partition("\n")
    drafts = []
    for body in (records.encode(), b"", b"\xff\x00,,,\n1,2", records.encode() * 2):
        (tmp_path / "t.csv").write_bytes(header.encode() + b"\n" + body)
        result = dpmac("schema", tmp_path / "t.csv", "--label", "outcome", "--drop", "name,site")
        assert result.exit_code == 0, result.output
        drafts.append(result.stdout)
    assert len(set(drafts)) == 1
    given = yaml.safe_load(drafts[0])
    assert given["label"] == {"column": "outcome", "classes": ["FILL_IN", "FILL_IN"]}
    assert list(given["columns"]) == ["age", "sex", "ward"]
    assert given["drop"] == ["name", "site"]
    assert "\n#   missing: input " in drafts[0]
    (tmp_path / "t.csv").write_text("Größe,Ort\n1,Köln\n", encoding="cp1252")
    refused = dpmac("schema", tmp_path / "t.csv")
    assert refused.exit_code == 2
    assert "dpmac schema --encoding cp1252" in " ".join(refused.output.split())


def test_a_draft_without_a_label_is_one_of_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("note,person\n")
    done = dpmac("schema", tmp_path / "notes.csv", "--text", "note", "--drop", "person")
    assert yaml.safe_load(done.stdout) == {"columns": {"note": {"text": 128}}, "drop": ["person"]}
    assert "# label: {column: NAME" in done.stdout


@pytest.mark.long
def test_every_command_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    penguins(tmp_path)
    rng = np.random.default_rng(0)
    for part in ("photos/train", "photos/val", "album"):
        for name in ("cat", "dog"):
            Path(part, name).mkdir(parents=True)
            for number in range(12):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(Path(part, name, f"{number}.png"))
    shutil.copytree("album", "scans/ill/p1")
    shutil.copytree("album", "scans/well/p2")
    for person in range(3, 12):
        shutil.copytree("album/cat", f"scans/ill/p{person}")
    Path("new-photos").symlink_to("photos/val")
    np.savez("images.npz", x=rng.integers(0, 256, (30, 8, 8), np.uint8), y=np.arange(30) % 2)
    wages(tmp_path)
    stays(tmp_path)
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)).splitlines()
    typed = [line.partition("#")[0].partition(">") for line in lines if line]
    assert len(typed) > 6
    for line, _, to in typed:
        # A network for 64 x 64 pixels takes ten seconds to validate.
        smaller = re.sub("--image-size [0-9]+", "--image-size 16", line)
        _, command, *args = shlex.split(smaller)
        noise = ("--epsilon", "3") if "kinds.yaml" in args else ("--sigma", "9")
        short = ("--steps", "2", *noise) if command == "train" else ()
        result = dpmac(command, *args, *short)
        assert result.exit_code == 0, (command, args, result.output)
        if to:
            Path(to.strip()).write_text(result.output)


#: An export with decimal commas and words for a missing value.
EXPORT = """
decimal: ","
missing_words: [k.A., "-"]
label: {column: grade, classes: [low, high]}
columns:
  age: {range: [0, 1000], missing: input, missing_words: [999]}
  town: {categories: [Ulm, "-"], missing: input}
  born: {type: date, range: [1920-01-01, 2020-12-31], format: "%d.%m.%Y", missing: input}
  smoker: {type: boolean, categories: [nein, ja], missing: input}
  stage: {categories: [1, 2, 3, 4], missing: input}
"""


EXPORT_HEADER = "age;town;born;smoker;stage;grade"


def rows(*no_value: str) -> list[str]:
    """Records, some with a word for a missing value in each column."""
    age, born, smoker, stage = no_value
    good = [f"{n % 90},5;Ulm;01.02.19{30 + n % 60};ja;{n % 4 + 1}" for n in range(40)]
    bad = [
        f"{age};-;01.02.1950;nein;1",
        f"40;Ulm;{born};ja;2",
        f"41;;01.02.1950;{smoker};{stage}",
    ]
    return [f"{cells};{('low', 'high')[n % 2]}" for n, cells in enumerate([*good, *bad])]


def write(name: str, *no_value: str) -> None:
    Path(name).write_text("\n".join([EXPORT_HEADER, *rows(*no_value), ""]))


def test_a_model_is_scored_by_the_schema_that_it_was_trained_with() -> None:
    """Also after the file was changed."""
    write("stays.csv", "k.A.", "-", "k.A.", "-")
    Path("own.yaml").write_text(EXPORT)
    typed = ("--dataset", "stays.csv", "--schema", "own.yaml", "--out", "run", "--steps", "2")
    result = dpmac("train", *typed, "--sigma", "6", "--seed", "0", "--device", "cpu")
    assert result.exit_code == 0, result.output
    card = Path("run/model-card.md").read_text()
    assert (
        "- `age`, a number from 0 to 1000; then 1 if it is missing or `999`, `k.A.`, `-` (" in card
    )
    before = dpmac("eval", "run", "--json")
    changed = EXPORT.replace("[Ulm, ", "[Bonn, ").replace("k.A., ", "").replace("1000", "1")
    Path("own.yaml").write_text(changed)
    after = dpmac("eval", "run", "--json")
    assert (after.exit_code, after.stdout) == (0, before.stdout), after.output
    frame = pd.read_csv("stays.csv", sep=";", dtype=str, keep_default_na=False)
    same, _ = scoring.score(
        dpmac_cli.load("run").released, from_dataframe(frame, yaml.safe_load(EXPORT))
    )
    assert same.samples == json.loads(after.stdout)["samples"]
    with pytest.raises(ModelError, match="a schema with other columns than the one that run/model"):
        scoring.score(
            dpmac_cli.load("run").released,
            from_dataframe(frame, yaml.safe_load(EXPORT.replace("1000", "1"))),
        )


def test_a_table_is_cleaned_and_passed_as_the_page_says() -> None:
    rows = [f"{n},00 €;{50 + n} kg;0{n}.02.1950;1{n}.03.2020;SÃ¼d" for n in range(1, 9)] * 9
    rows.append("1.200,50 €;110 lb;01.02.1950;14.03.2020;Nord")
    text = "\n".join(["cost;weight;born;admitted;ward", *rows, ""])
    Path("export.csv").write_text(text, encoding="cp1252")
    page = (DOCS / "clean-a-table.md").read_text()
    clean, passed = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known: dict[str, Any] = {}
    exec(clean, known)
    last = pd.read_parquet("clean.parquet").iloc[-1]
    assert (last["cost"], round(last["weight"]), last["weekday"]) == ("1200.50", 50, "Saturday")
    assert known["table"]["ward"].tolist()[0] == "Süd"
    exec(passed.partition("run = ")[0], known)
    frame = from_dataframe(known["table"], known["schema"])
    assert inspect(declared(frame.path, schema=frame.schema, in_memory=frame)).records.size == 9


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
    (NUMBER, "inf", UNREAD),
    (NUMBER, "1_000", UNREAD),
    (NUMBER, "12 kg", UNREAD),
    (NUMBER, "1e999", UNREAD),
    ({**NUMBER, "decimal": ","}, "12,5", 12.5),
    ({**NUMBER, "decimal": ","}, "28.570", UNREAD),
    ({**NUMBER, "decimal": ","}, "12.5", UNREAD),
    ({**NUMBER, "thousands": "."}, "1.200,00", 1200),
    ({**NUMBER, "thousands": "."}, "28.570", 28_570),
    ({**NUMBER, "thousands": "."}, "1.2345", UNREAD),
    ({**NUMBER, "thousands": ","}, "1,200.50", 1200.5),
    ({**NUMBER, "thousands": ","}, "12,5", UNREAD),
    ({**NUMBER, "thousands": ",", "decimal": "."}, "28.570", 28.57),
    ({**NUMBER, "thousands": " ", "decimal": ","}, "1\u202f200,5", 1200.5),
    ({**NUMBER, "thousands": "'"}, "1’200.50", 1200.5),
    *((NUMBER, word, NONE) for word in (None, "", " ", "NA", "nan", "NULL", "None", "#N/A")),
    ({**NUMBER, "missing_words": ["999", "k.A."]}, " k.A. ", NONE),
    ({**NUMBER, "missing_words": [999]}, "999.0", NONE),
    ({**NUMBER, "decimal": ",", "missing_words": ["-9,9"]}, "-9,90", NONE),
    (NUMBER, "998", 998),
    (NUMBER, "k.A.", UNREAD),
    ({"categories": ["A", "B"]}, " B ", 1),
    ({"categories": ["A", "B"]}, "b", UNREAD),
    ({"categories": ["A", "NA"]}, "NA", 1),
    (YES_NO, "Ja", 1),
    (YES_NO, "si", UNREAD),
    (YES_NO, "", NONE),
    ({"type": "boolean", "categories": ["NÃO", "SIM"]}, "não", 0),
    (DAY, "2004-02-29", day(2004, 2, 29)),
    (DAY, "2004-02-29T18:00:00+02:00", day(2004, 2, 29, 18)),
    (DAY, "2004-02-30", UNREAD),
    (DAY, "20040102", UNREAD),
    (DAY, "soon", UNREAD),
    (GERMAN, "31.12.2004", day(2004, 12, 31)),
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


@pytest.mark.promise("reading")
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
        ({**NUMBER, "missing_words": [-9.9]}, pa.array([-9.9], pa.float32()), NONE),
        ({**NUMBER, "thousands": "."}, pa.array([1.234]), 1.234),
        (GERMAN, pa.array([datetime(2004, 12, 31, 6)], pa.timestamp("ns")), day(2004, 12, 31, 6)),
        ({**GERMAN, "missing_words": ["01.01.1900"]}, pa.array([date(1900, 1, 1)]), NONE),
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
    reading = read_table(declared(where / "t.csv", schema=schema_of(given, "it"), **more))
    return reading.arrays, reading.left_out


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
        (YES_NO, "ja,si", "Record 2 has neither nein nor ja in c: 'si'"),
        (DAY, "31.12.2004", "no date as in 2024-12-31 in c: '31.12.2004' (declare a format"),
        (GERMAN, "2004-01-02", "no date in the format %d.%m.%Y in c: '2004-01-02'"),
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


@pytest.mark.promise("reading")
@pytest.mark.parametrize(
    ("delimiter", "encoding", "end", "skip_bad"),
    all_pairs(
        [*",;\t|~^"],
        ["utf-8", "utf-8-sig", "cp1252", "gb18030", "utf-16"],
        ["\n", "\r\n", "\r"],
        [False, True],
    ),
)
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
    if encoding == "utf-16":  # read by its byte order mark, as Excel writes "Unicode text"
        with pytest.raises(InputError, match="utf-16 is read by its byte order mark; leave"):
            schema_of({**given, "encoding": encoding}, "it")
    else:
        given["encoding"] = encoding
    more = {"skip_bad": skip_bad, "schema": given}
    found, left_out = arrays(written.getvalue().encode(encoding), columns, tmp_path, **more)
    assert left_out.records == ()
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


@pytest.mark.promise("reading")
@pytest.mark.parametrize("encoding", ["utf-32", "utf-7", "iso2022_jp", "cp037", "no such"])
def test_an_encoding_in_which_a_record_may_change_how_others_are_read_is_refused(
    encoding: str,
) -> None:
    """Its lines cannot be told apart by their bytes, or a sign changes the meaning of all later."""
    columns = {"c": NUMBER}
    with pytest.raises(InputError, match="is no encoding with separate lines"):
        schema_of({"label": LABEL, "columns": columns, "encoding": encoding}, "it")


@pytest.mark.promise("reading")
@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read_by_its_mark_line_by_line(tmp_path: Path, order: str) -> None:
    """As Excel writes "Unicode text", whatever encoding a schema declares."""
    given = {"label": LABEL, "columns": {"c": {"categories": ["Köln", "😀"]}}, "encoding": "cp1252"}
    lines = ["c\ty", "Köln\ta", "😀\tb", "\ud83d\ta", "Köln\tb"]  # one with half a character
    content = "\r\n".join(["\ufeff" + lines[0], *lines[1:], ""]).encode(order, "surrogatepass")
    found, left_out = arrays(content, {}, tmp_path, schema=given, skip_bad=True)
    assert found["x"].tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    broken = "Record 3 (line 4) is not text in UTF-16 (save the file as UTF-8)"
    assert left_out.records == (broken,)
    with pytest.raises(InputError, match=r"cannot be read as a table: .*truncated data"):
        arrays(content + b"x", {}, tmp_path, schema=given)
    with pytest.raises(InputError, match="without a byte order mark: save the table as UTF-8"):
        arrays(content[2:], {}, tmp_path, schema=given)
    (tmp_path / "t.csv").write_bytes(content)
    draft = dpmac("schema", tmp_path / "t.csv", "--label", "y")
    assert list(yaml.safe_load(draft.stdout)["columns"]) == ["c"]


@pytest.mark.promise("reading")
def test_blanks_around_a_declared_value_do_not_count(tmp_path: Path) -> None:
    """As they do not in cells."""
    given = {
        "label": {"column": "y", "classes": [" a", "b "]},
        "columns": {
            "c": {"categories": ["A ", "\tB"], "missing": "input", "missing_words": [" -"]}
        },
        "test": {"column": "t", "values": [" 1 "]},
    }
    table = "c,t,y\n A ,0,a \n B,0,b\n -,1,b\n"
    found, _ = arrays(table, {}, tmp_path, schema=given)
    assert found["x"].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert (found["y"].tolist(), found["x_test"].tolist()) == ([0, 1], [[0, 0, 0, 1]])
    with pytest.raises(InputError, match="A is declared 2 times"):
        schema_of({"label": LABEL, "columns": {"c": {"categories": ["A", "A "]}}}, "it")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'c,y\n1,a\n2,"a\n3,b\n', "Record 2 (line 3) has a quotation mark that neither encloses"),
        (b'c,y\n1,a\n"2,a\n3,b"\n4,a\n', "Record 2 (line 3) has 1 values for 2 columns"),
        (b'c,y\n1,a\n"2,a\n3",b\n', "Record 2 has a line break in c"),
        (b'c,y\n1,a\n2"5,a\n', "(line 3) has a quotation mark"),
        (b'c,y\n1,a\n"2"5,a\n', "(line 3) has a quotation mark"),
        (b"c,y\n1,a\n2\n3,a,b\n", "has 1 values for 2 columns; Record 3 (line 4) has 3 values"),
        (b"c,y\n1,a\n\xff,a\n", "Record 2 (line 3) is not text in UTF-8 (save the file so, or"),
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


@pytest.mark.promise("reading")
@pytest.mark.parametrize("unit", ["-", "999", "999.0", "k.A.", "", "unknown"])
def test_a_missing_unit_is_no_unit_that_records_share(tmp_path: Path, unit: str) -> None:
    persons = [f"{n},{n},{'ab'[n % 2]}" for n in range(9)]
    table = "\n".join(["x,who,y", *persons, f"1,{unit},a", f"2,{unit},b", ""])
    number, words = {"range": [0, 99]}, ["-", "k.A.", "999"]
    for more in ({"drop": ["who"]}, {}, {"columns": {"x": number, "who": number}}):
        given = {"label": LABEL, "columns": {"x": number}, "missing_words": words, **more}
        with pytest.raises(InputError, match="Record 10 and 1 more have no unit in who"):
            arrays(table, {}, tmp_path, schema=given, unit="who")
        _, left_out = arrays(table, {}, tmp_path, schema=given, unit="who", skip_bad=True)
        assert len(left_out.records) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "{range: [2015-01-01, 2024-12-31]}",
            "(dates need type: date)",
        ),
        ("{text: 16, range: [0, 1]}", "has range and text: declare one of them"),
        ("{text: 2}", "text: "),
        ("{type: date, range: [2015, 2024]}", "needs two dates, such as [2015-01-01"),
        ("{type: date, range: [2015-02-30, 2024-01-01]}", "such as [2015-01-01"),
        ("{type: date, range: [2025-01-01, 2024-01-01]}", "first date of a range must be"),
        ("{}", "needs either a range or categories or text; or its type alone"),
        ("{type: date, range: [2015-01-01, 2024-01-01], format: '%m.%Y'}", "needs a day, a month"),
        ("{type: date, range: [2015-01-01, 2024-01-01], format: '%d.%m.%y'}", "of four digits"),
        ("{type: date, range: [2015-01-01, 2024-01-01], decimal: ','}", "of type number"),
        ("{range: [0, 1], format: '%d'}", "format is for columns of type date"),
        ("{range: [0, 1], thousands: ',', decimal: ','}", "need different signs"),
        ("{range: [0, 1], decimal: ';'}", "Input should be '.' or ','"),
        ("{type: boolean, categories: [ja]}", "needs two categories, false and true"),
        ("{type: boolean, categories: [ja, JA]}", "needs two categories, false and true"),
        ("{type: boolean, range: [0, 1]}", "range is not for type: boolean, which has categories"),
        ("{categories: A}", "categories: needs a list, such as [A]"),
        ("{range: [0, 1], missing_words: k.A.}", "missing_words: needs a list, such as [k.A.]"),
        ("{range: [0, 1], missing_words: [a, a]}", "a is declared 2 times"),
        ("{range: [0, 1], symbol: kg}", "there is no such key"),
        ("{type: integer, range: [1, 4]}", "Input should be 'number'"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_explained(given: str, said: str) -> None:
    columns = {"c": yaml.load(given, yaml.BaseLoader)}
    with pytest.raises(InputError) as caught:
        schema_of({"label": LABEL, "columns": columns}, "it")
    assert said in str(caught.value)
    assert "it: columns.c" in str(caught.value)


@pytest.mark.promise("reading")
def test_only_the_header_decides_what_separates_columns(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("age,sex\n" + "1;;;;;;;;,f\n" * 3)
    assert CsvFile(file).delimiter() == ","


@pytest.mark.parametrize("value", [9_999_999, -1_234_567.5, 0.1, 10**14 + 1])
def test_a_declared_number_keeps_its_digits(value: float) -> None:
    assert as_cell(value) == str(value)


def test_a_category_without_a_record_is_said_of_its_own_column() -> None:
    frame = pd.DataFrame({"age": [1.0, 2, 3, 4] * 9, "sex": ["f", "m"] * 18, "y": ["a", "b"] * 18})
    schema = {
        "label": {"column": "y", "classes": ["a", "b"]},
        "columns": {
            "age": {"range": [0, 9], "missing": "input"},
            "sex": {"categories": ["f", "m", "x"]},
        },
    }
    found = notes_on(
        declared(Path("t"), in_memory=from_dataframe(frame, schema), schema=schema_of(schema, ""))
    )
    unused = [remark for remark in found.remarks if "categor" in remark]
    assert len(unused) == 1
    assert "x of sex" in unused[0]
    assert "m of sex" not in unused[0]
