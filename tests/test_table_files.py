"""Tables in CSV and Parquet files, from their schema to a trained classifier."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from dpmac_cli import from_dataframe, score
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_schema import read_schema
from dpmac_cli.data.user_data import inspect
from dpmac_cli.errors import InputError, ModelError
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
        for kind, begin in (("python", "import random"), ("yaml", "encoding: cp1252"))
    )
    (where / "stays.yaml").write_text(schema)
    subprocess.run([sys.executable, "-c", program], cwd=where, check=True)


def source(where: Path, table: str = PATIENTS, schema: str = SCHEMA, **options: Any) -> Source:
    (where / "patients.csv").write_text(table)
    (where / "patients.yaml").write_text(schema)
    read = read_schema(where / "patients.yaml")
    return Source(where / "patients.csv", schema=read, **options)


def inputs(of: Source) -> tuple[list[list[float]], list[int]]:
    """Training and test records as the network sees them, one after another."""
    facts = inspect(of).facts
    rows, labels = zip(*load(of), strict=True)
    x = np.concatenate(rows).reshape(-1, facts.shape[0])
    return ((x - facts.mean) / facts.std).tolist(), np.concatenate(labels).tolist()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("30,f,A", "old,f,A", "Record 1 has no number in age"),
        ("70,m", "70,", "or its schema (missing: input accepts records without a value), or add"),
        ("70,m,B", "70,m,B,B", "Record 2 (line 3) has 7 values for 6 columns"),
        ("name\n", "title\n", "There is no column name, which the schema declares"),
        ("name\n", "title\n", "The schema does not declare the column title"),
        ("A,ill", "\udcff,ill", "is not text in UTF-8"),
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
    same = score("run", from_dataframe(frame, yaml.safe_load(EXPORT)))
    assert same.result.samples == json.loads(after.stdout)["samples"]
    with pytest.raises(ModelError, match="a schema with other columns than the one that run/model"):
        score("run", from_dataframe(frame, yaml.safe_load(EXPORT.replace("1000", "1"))))


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
    assert inspect(Source(frame.path, schema=frame.schema, in_memory=frame)).facts.shape[0] == 9
