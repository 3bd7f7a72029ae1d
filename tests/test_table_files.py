"""Tables in CSV and Parquet files, from their schema to a trained classifier."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import csv as arrow_csv
from pyarrow import parquet
from typer.testing import CliRunner

from dpmac_cli.cli.app import app
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_file import read_inputs
from dpmac_cli.data.table_schema import read_schema, schema_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.errors import InputError
from tests.helpers import load
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
  sex: {categories: [f, m], outside: refuse}
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
        for kind, begin in (("python", "import random"), ("yaml", 'decimal: ","'))
    )
    (where / "stays.yaml").write_text(schema)
    subprocess.run([sys.executable, "-c", program], cwd=where, check=True)


def source(where: Path, table: str = PATIENTS, schema: str = SCHEMA, **options: Any) -> Source:
    (where / "patients.csv").write_text(table)
    (where / "patients.yaml").write_text(schema)
    read = read_schema(where / "patients.yaml")
    return Source(where / "patients.csv", schema=read, **options)


def refused(where: Path, table: str = PATIENTS, schema: str = SCHEMA, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        inspect(source(where, table, schema, **options))
    return str(caught.value)


def inputs(of: Source) -> tuple[list[list[float]], list[int]]:
    """Training and test records as the network sees them, one after another."""
    facts = inspect(of).facts
    rows, labels = zip(*load(of), strict=True)
    x = np.concatenate(rows).reshape(-1, facts.shape[0])
    return ((x - facts.mean) / facts.std).tolist(), np.concatenate(labels).tolist()


def test_columns_become_the_inputs_that_the_schema_says(tmp_path: Path) -> None:
    x, y = inputs(source(tmp_path))
    #       age   none |  f    m  |  A    B  other
    assert x == [
        [-0.4, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        [0.4, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],  # clipped, and of another ward
        [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0],  # the middle of the range, and said to be missing
    ]
    assert y == [1, 0, 0, 1]
    found = inspect(source(tmp_path))
    assert (found.facts.train_size, found.facts.test_size) == (2, 2)
    assert found.facts.task.names == ("well", "ill")
    assert not found.held_out
    assert found.inferred == ()


@pytest.mark.parametrize("cells", [[[1], [2], []], [b"a", b"b", b"c"]])
def test_columns_of_lists_or_bytes_are_named(tmp_path: Path, cells: list[Any]) -> None:
    table = arrow_csv.read_csv(source(tmp_path).path).slice(0, 3)
    table = table.set_column(table.column_names.index("age"), "age", pa.array(cells))
    parquet.write_table(table, tmp_path / "p.parquet")
    of = replace(source(tmp_path), path=tmp_path / "p.parquet")
    named = r"The column age contains (list|binary).*not numbers or text"
    with pytest.raises(InputError, match=named):
        inspect(of)


@pytest.mark.parametrize("kind", ["parquet", "semicolons", "tabs", "bom", "dictionary"])
def test_other_files_of_the_same_records_are_read_the_same(tmp_path: Path, kind: str) -> None:
    of = source(tmp_path)
    expected = inputs(of)
    path = tmp_path / {"parquet": "p.parquet", "dictionary": "p.parquet", "tabs": "p.tsv"}.get(
        kind, "p.csv"
    )
    if path.suffix == ".parquet":
        table = arrow_csv.read_csv(of.path)
        assert table["age"].type == pa.int64()
        if kind == "dictionary":
            place = table.column_names.index("ward")
            table = table.set_column(place, "ward", table["ward"].dictionary_encode())
        parquet.write_table(table, path)
    else:
        comma = {"semicolons": ";", "tabs": "\t"}.get(kind, ",")
        content = PATIENTS.replace(",", comma).encode()
        path.write_bytes(b"\xef\xbb\xbf" * (kind == "bom") + content)
    assert inputs(Source(path, schema=of.schema)) == expected


@pytest.mark.parametrize(
    ("cell", "category"),
    [("NA", "A"), ("nan", "A"), ("", "A"), ("NA", "NA")],
    ids=["NA", "nan", "empty", "declared"],
)
def test_what_stands_for_no_value_is_missing_unless_it_is_declared(
    tmp_path: Path, cell: str, category: str
) -> None:
    schema = SCHEMA.replace("ward: {categories: [A, B]}", f"ward: {{categories: [{category}, B]}}")
    table = PATIENTS.replace("30,f,A", f"30,f,{cell}").replace(",A,", f",{category},")
    if cell == category:
        assert inputs(source(tmp_path, table, schema))[0][0][4] == 1.0
    else:
        assert "Record 1 has no value in ward" in refused(tmp_path, table, schema)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("30,f,A", "old,f,A", "Record 1 has no number in age"),
        ("30,f,A", "inf,f,A", "Record 1 has no number in age"),
        ("70,m", "70,x", "Record 2 has a value that the schema does not declare in sex"),
        ("70,m", "70,", "Record 2 has no value in sex"),
        ("70,m", "70,", "or its schema (missing: input accepts records without sex), or add"),
        ("A,ill", "A,dead", "Record 1 and 1 more have no class of the schema in outcome"),
        ("B,well", "B,", "Record 2 has no class of the schema in outcome"),
        ("70,m,B", "70,m,B,B", "Record 2 has 7 values for 6 columns"),
        ("name\n", "age\n", "several columns named 'age'"),
        ("name\n", "title\n", "There is no column name, which the schema declares"),
        ("name\n", "title\n", "The schema does not declare the column title"),
        ("A,ill", "\udcff,ill", "it is not text in UTF-8"),
        (PATIENTS, "", "its first line does not name the columns"),
        ("name\n", "\udcff\n", "it is not text in UTF-8"),
        (PATIENTS, PATIENTS.partition("\n")[0] + "\n", "x is empty"),
        (",C,", ",D,", ""),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    table = PATIENTS.replace(old, new)
    assert table != PATIENTS
    (tmp_path / "patients.yaml").write_text(SCHEMA)
    (tmp_path / "patients.csv").write_bytes(table.encode(errors="surrogateescape"))
    typed = ("train", "--dataset", tmp_path / "patients.csv")
    result = dpmac(*typed, "--schema", tmp_path / "patients.yaml", "--steps", "1", "--batch-size",
                   "1", "--sigma", "9", "--out", tmp_path / "run")  # fmt: skip
    if not message:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_categories_of_which_no_record_has_one_are_refused(tmp_path: Path) -> None:
    """Else a column of "True" that is declared as "true" would be of no use, silently."""
    schema = SCHEMA.replace("[A, B]", "[a, b]")
    assert "have no category of the schema in ward" in refused(tmp_path, schema=schema)
    # With --skip-bad one record must not decide whether the others are used.
    assert len(inputs(source(tmp_path, schema=schema, skip_bad=True))[0]) == 4


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
    assert all(f"--schema {tmp_path / 's.yaml'}" in error for error in caught.value.errors)


def test_a_schema_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml: cannot be read \(No such file"):
        read_schema(tmp_path / "nowhere.yaml")


@pytest.mark.privacy
def test_a_record_that_is_left_out_changes_nothing_of_the_others(tmp_path: Path) -> None:
    expected = inputs(source(tmp_path, skip_bad=True))
    bad = [
        "200,x,Z,ill,1,x",
        "5,\udcff,A,ill,1,x",
        "\udcff,f,A,ill,2,x",
        "5,f,A,\udcff,1,x",
        "5,f,A,dead,1,x",
        "5,f,A,ill",
        "old,f,A,ill,1,x",
        "5,,A,ill,2,x",
    ]
    for line in bad:
        of = source(tmp_path, skip_bad=True)
        of.path.write_bytes(f"{PATIENTS}{line}\n".encode(errors="surrogateescape"))
        assert inputs(of) == expected
        assert len(inspect(of).skipped) == 1


@pytest.mark.privacy
@pytest.mark.parametrize("name", [b"\xff", b"\xed\xb0\x80"])
def test_a_unit_whose_name_is_not_text_is_left_out(tmp_path: Path, name: bytes) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "t.yaml"
    schema.write_text(
        "label: {column: y, classes: [a, b]}\ncolumns: {x: {range: [0, 9]}}\ndrop: [u]\n"
    )
    rows = [f"u{n % 7},{n % 9},{'ab'[n % 2]}\n".encode() for n in range(40)]
    found = []
    for more in ([], [name + b",1,a\n"]):
        path.write_bytes(b"u,x,y\n" + b"".join([*rows, *more]))
        flags = {"dataset": str(path), "schema": str(schema), "unit": "u", "skip_bad": True}
        plan = resolve({**flags, "sigma": 2, "epochs": 1, "device": "cpu"}).plan
        found.append((plan.data.facts, len(plan.data.found.skipped)))
    assert found[0][0] == found[1][0]
    assert (found[0][1], found[1][1]) == (0, 1)


@pytest.mark.privacy
def test_a_record_more_changes_neither_the_inputs_nor_the_split_of_others(tmp_path: Path) -> None:
    """Whatever it holds: ranges, categories and classes are the schema's."""
    schema = SCHEMA.partition("test:")[0].replace("[name]", "[name, site]")
    rng = np.random.default_rng(0)
    rows = [f"{age},f,A,{'ill' if age % 2 else 'well'},1,x" for age in rng.integers(0, 101, 60)]
    table = "\n".join([PATIENTS.partition("\n")[0], *rows, ""])
    of = source(tmp_path, table, schema)
    before, facts = load(of), inspect(of).facts
    for added in ("1e9,m,never seen,ill,9,x", ",f,B,well,1,x", "-4,f,A,ill,1,x"):
        more = source(tmp_path, f"{table}{added}\n", schema)
        found = inspect(more).facts
        assert (found.shape, found.task, found.mean, found.std) == (
            *(facts.shape, facts.task, facts.mean, facts.std),
        )
        same = [
            {row.tobytes() for row in x} >= {row.tobytes() for row in was}
            for (x, _), (was, _) in zip(load(more), before, strict=True)
        ]
        assert all(same)
        assert found.train_size + found.test_size == facts.train_size + facts.test_size + 1


@pytest.mark.privacy
def test_no_input_is_beyond_its_range(tmp_path: Path) -> None:
    table = PATIENTS.replace("130", "1e300").replace("30,f", "-1e300,f")
    x, _ = inputs(source(tmp_path, table))
    assert np.abs(x).max() == 1.0


@pytest.mark.privacy
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


def test_a_filled_in_draft_is_a_schema_whatever_the_columns_are_called(tmp_path: Path) -> None:
    names = ["a: b", 'say "x"', "yes", "#", "é", "012", "{a}", "out"]
    table = pa.table({name: [1.0, 2.0] for name in names[:-1]} | {"out": ["p", "q"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    result = dpmac("schema", tmp_path / "t.parquet", "--label", "out")
    assert "categories: [" not in result.stdout
    filled = re.sub(r"classes: .*", "classes: [p, q]", result.stdout)
    filled = filled.replace("[FILL_IN, FILL_IN]", "[0, 3]").replace("FILL_IN", "it")
    (tmp_path / "s.yaml").write_text(filled)
    schema = read_schema(tmp_path / "s.yaml")
    assert [column.name for column in schema.columns] == names[:-1]
    assert [label.column for label in schema.labels] == ["out"]
    assert "\n  é:\n" in result.stdout
    assert result.stdout.endswith("\n")


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1", "ascii"])
def test_a_draft_is_read_as_it_was_written_in_any_locale(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "t.csv").write_text("Größe,out\n", encoding="utf-8")
    typed = ["schema", str(tmp_path / "t.csv"), "--label", "out"]
    written = CliRunner(charset=encoding).invoke(app, typed).stdout_bytes
    filled = written.replace(b"[FILL_IN, FILL_IN]", b"[1, 2]")
    (tmp_path / "s.yaml").write_bytes(filled)
    assert [column.name for column in read_schema(tmp_path / "s.yaml").columns] == ["Größe"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("t.csv", "--label", "outcom"), "t.csv has no such column. Did you mean outcome?"),
        (("t.csv", "--drop", "nam,site"), "--drop nam"),
        (
            ("t.csv", "--label", "outcome", "--date", "age", "--text", "age"),
            "The column age is named twice (--text and --date): name it once.",
        ),
        (("t.csv", "--label", "outcome", "--drop", "outcome"), "twice (--label and --drop)"),
        (("nowhere.csv",), "nowhere.csv cannot be read as a table"),
    ],
)
def test_a_draft_of_what_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(PATIENTS)
    result = dpmac("schema", *typed)
    assert result.exit_code == 2
    assert message in result.output


def test_a_table_without_a_schema_is_told_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(PATIENTS)
    result = dpmac("train", "--dataset", tmp_path / "t.csv")
    assert result.exit_code == 2
    assert f"dpmac schema {tmp_path / 't.csv'} --label COLUMN > schema.yaml" in result.output


@pytest.mark.parametrize("flag", [("--feature-range", "0,1"), ("--classes", "ill,well")])
def test_what_the_schema_says_is_not_said_again(tmp_path: Path, flag: tuple[str, str]) -> None:
    source(tmp_path)
    files = ("--dataset", tmp_path / "patients.csv", "--schema", tmp_path / "patients.yaml")
    result = dpmac("train", *files, *flag)
    assert result.exit_code == 2
    assert f"--schema and {flag[0]} contradict each other" in result.output


@pytest.mark.long
def test_penguins_are_told_apart_by_the_defaults_alone_and_the_report_has_the_schema(
    tmp_path: Path,
) -> None:
    """96.9 to 98.5% on three splits: docs/own-tables.md. One class alone has 44%."""
    out = tmp_path / "run"
    files = ("--dataset", penguins(tmp_path), "--schema", tmp_path / "schema.yaml")
    result = dpmac("train", *files, "--seed", "0", "--out", out)
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    assert report["test"]["accuracy"] > 0.9
    assert 2.9 < report["privacy"]["epsilon"] <= 3
    assert report["dataset"]["taken_from_records"] == []
    sexes = report["dataset"]["schema"]["columns"][-1]
    assert sexes["name"] == "sex"
    assert sexes["categories"] == ["female", "male"]
    assert "were declared in a schema" in report["dataset"]["public_note"]
    assert report["dataset"]["public_note"] in (out / "model-card.md").read_text()
    again = dpmac("eval", out, "--json")
    assert json.loads(again.stdout)["accuracy"] == report["test"]["accuracy"]


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
    typed = [shlex.split(line.partition(">")[0], comments=True) for line in lines if line]
    assert len(typed) > 6
    for _, command, *args in typed:
        short = ("--steps", "2", "--sigma", "9") if command == "train" else ()
        result = dpmac(command, *args, *short)
        assert result.exit_code == 0, (command, args, result.output)


def test_records_have_the_numbers_of_the_file_after_rows_of_other_lengths(tmp_path: Path) -> None:
    """Whether they are trained on or predicted, and also after empty lines and line breaks."""
    rows = ["1,a", "2", "3,b", "", '"4\n",a', "5,a,b,c", "old,b", "7,a", "", "8,c", "none,b"]
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["x,y", *rows, ""]))
    given = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"x": {"range": [0, 9]}}}
    schema = schema_of(given, "it")
    with pytest.raises(InputError) as trained:
        inspect(Source(file, schema=schema))
    with pytest.raises(InputError) as predicted:
        read_inputs(file, schema.columns)
    ragged = "Record 2 has 1 values for 2 columns; Record 5 has 4 values for 2 columns; Record "
    for said in map(str, (trained.value, predicted.value)):
        assert said.startswith(ragged)
        assert "Record 6 and 1 more have no number in x: 'old'" in said
    assert "Record 8 has no class of the schema in y: 'c'" in str(trained.value)
    file.write_text(file.read_text().replace('"4\n"', "4"))
    left_out = read_inputs(file, schema.columns, skip_bad=True)
    assert left_out.rows == [0, 2, 3, 6, 7]
    first, second = left_out.skipped.reasons
    assert first.startswith("Record 2 (line 3) has 1 values for 2 columns")
    assert second.startswith("Record 6 and 1 more have no number in x: 'old'")
