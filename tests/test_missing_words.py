"""Words that a schema declares for a missing value."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from dpmac_cli import ArrayData, from_dataframe, predict, score
from dpmac_cli.data.canonical import units_in
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_cells import BadRecords
from dpmac_cli.data.table_columns import column_inputs
from dpmac_cli.data.table_file import read_table
from dpmac_cli.data.table_schema import TableSchema, schema_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError, ModelError
from tests.helpers import load
from tests.test_wordpiece import TINY
from tests.typed import dpmac

SCHEMA = """
decimal: ","
missing_words: [k.A., "-"]
label: {column: grade, classes: [low, high]}
columns:
  age: {range: [0, 1000], missing: input, missing_words: [999]}
  town: {categories: [Ulm, "-"], missing: input}
  born: {type: date, range: [1920-01-01, 2020-12-31], format: "%d.%m.%Y", missing: input}
  smoker: {type: boolean, categories: [nein, ja], missing: input}
  stage: {type: integer, range: [1, 4], missing: input}
"""
HEADER = "age;town;born;smoker;stage;grade"


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
    Path(name).write_text("\n".join([HEADER, *rows(*no_value), ""]))


def test_an_export_with_words_of_its_own_is_trained_on_and_predicted() -> None:
    write("stays.csv", "k.A.", "-", "k.A.", "-")
    Path("plain.yaml").write_text(re.sub(r"(, )?missing_words: \[.*?\]", "", SCHEMA))
    given = ("--steps", "2", "--sigma", "6", "--seed", "0", "--device", "cpu")
    result = dpmac("train", "--dataset", "stays.csv", "--schema", "plain.yaml", *given)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    line = 'missing_words: ["k.A."] in the schema'
    for what in (
        f"Record 41 has no number in age: 'k.A.' (leave the cell empty, or declare {line},",
        "Record 42 has no date in the format %d.%m.%Y in born: '-' (leave the cell empty",
        f"Record 43 has neither nein nor ja in smoker: 'k.A.' (leave the cell empty, or declare "
        f"{line}, where there is no value)",
    ):
        assert what in said, said
    Path("own.yaml").write_text(SCHEMA)
    write("empty.csv", "", "", "", "NA")
    found = []
    for name, schema in (("stays", "own.yaml"), ("empty", "plain.yaml")):
        typed = ("--dataset", f"{name}.csv", "--schema", schema, "--out", name)
        result = dpmac("train", *typed, *given)
        assert result.exit_code == 0, result.output
        Path(schema).unlink()  # the model has it
        result = dpmac("predict", name, f"{name}.csv", "--out", f"{name}-predicted.csv")
        assert result.exit_code == 0, result.output
        assert dpmac("eval", name).exit_code == 0
        found.append(list(csv.DictReader(Path(f"{name}-predicted.csv").read_text().splitlines())))
    assert found[0] == found[1]
    assert len(found[0]) == 43
    Path("new.csv").write_text(f"{HEADER}\n999;Ulm;-;ja;k.A.;low\n;Ulm;;ja;NA;low\n")
    first, second = predict("stays", "new.csv").answers
    assert first.tolist() == second.tolist()
    Path("new.csv").write_text(f"{HEADER}\nunbekannt;Ulm;-;ja;k.A.;low\n")
    result = dpmac("predict", "stays", "new.csv")
    said = " ".join(result.stderr.split())
    assert "Record 1 has no number in age: 'unbekannt'" in said
    assert "Correct new.csv to fit the schema of the model" in said


def test_a_model_is_scored_by_the_schema_that_it_was_trained_with() -> None:
    """Also after the file was changed."""
    write("stays.csv", "k.A.", "-", "k.A.", "-")
    Path("own.yaml").write_text(SCHEMA)
    typed = ("--dataset", "stays.csv", "--schema", "own.yaml", "--out", "run", "--steps", "2")
    result = dpmac("train", *typed, "--sigma", "6", "--seed", "0", "--device", "cpu")
    assert result.exit_code == 0, result.output
    card = Path("run/model-card.md").read_text()
    assert (
        "- `age`, a number from 0 to 1000; then 1 if it is missing or `999`, `k.A.`, `-` (" in card
    )
    before = dpmac("eval", "run", "--json")
    changed = SCHEMA.replace("[Ulm, ", "[Bonn, ").replace("k.A., ", "").replace("1000", "1")
    Path("own.yaml").write_text(changed)
    after = dpmac("eval", "run", "--json")
    assert (after.exit_code, after.stdout) == (0, before.stdout), after.output
    frame = pd.read_csv("stays.csv", sep=";", dtype=str, keep_default_na=False)
    same = score("run", from_dataframe(frame, yaml.safe_load(SCHEMA)))
    assert same.result.samples == json.loads(after.stdout)["samples"]
    with pytest.raises(ModelError, match="a schema with other columns than the one that run/model"):
        score("run", from_dataframe(frame, yaml.safe_load(SCHEMA.replace("1000", "1"))))


def inputs(of: Mapping[str, Any], cells: pa.Array, **table: Any) -> list[list[float]]:
    """Inputs that a column becomes, of which the last one says that the value is missing."""
    label = {"column": "y", "classes": ["a", "b"]}
    given = {"label": label, "columns": {"c": {"missing": "input", **of}}, **table}
    schema, bad = schema_of(given, "it"), BadRecords()
    x, _, _ = column_inputs(schema.columns, {"c": cells}, bad, True, None)
    assert not any(at.any() for at in bad.values()), bad
    rows: list[list[float]] = x.tolist()
    return rows


DAY = {"type": "date", "range": ["1920-01-01", "2020-12-31"]}


@pytest.mark.parametrize(
    ("of", "words", "cells"),
    [
        ({"range": [0, 9]}, ["-"], pa.array([" - "])),
        ({"range": [0, 9]}, ["999"], pa.array(["999"])),
        ({"range": [0, 9]}, [999], pa.array(["999.0"])),
        ({"range": [0, 9], "decimal": ","}, ["999"], pa.array(["999,00"])),
        ({"range": [0, 9], "thousands": "."}, ["9.999"], pa.array(["9999"])),
        ({"range": [0, 9], "symbol": "kg"}, ["999"], pa.array(["999 kg"])),
        ({"range": [0, 999]}, ["999"], pa.array([999])),
        ({"range": [0, 999]}, ["999.0"], pa.array([999.0])),
        ({"range": [0, 9]}, [-9.9], pa.array([-9.9], pa.float32())),
        ({"range": [0, 9], "decimal": ","}, ["-9,9"], pa.array([-9.9])),
        ({"type": "integer", "range": [1, 9]}, ["9"], pa.array(["9"])),
        ({"type": "integer", "range": [1, 9]}, ["9"], pa.array([9.0])),
        ({"categories": ["A"]}, ["n/a"], pa.array(["n/a"])),
        ({"categories": ["1"]}, ["9"], pa.array([9.0])),
        ({"type": "boolean", "categories": ["no", "yes"]}, ["?"], pa.array(["?"])),
        (DAY, ["01.01.1900"], pa.array(["01.01.1900"])),
        (DAY, ["1900-01-01"], pa.array([date(1900, 1, 1)])),
        (DAY, ["1900-01-01"], pa.array([datetime(1900, 1, 1)])),
        (
            {**DAY, "format": "%d.%m.%Y"},
            ["01.01.1900"],
            pa.array([datetime(1900, 1, 1)], pa.timestamp("ns")),
        ),
        ({**DAY, "parts": ["month"]}, ["-"], pa.array(["-"])),
    ],
)
def test_a_declared_word_is_no_value_in_any_type(
    of: Mapping[str, Any], words: list[Any], cells: pa.Array
) -> None:
    """It is the same as no cell, whether the column or the table declares it."""
    empty = inputs(of, pa.nulls(1, cells.type))
    assert empty[0][-1] == 1
    assert inputs({**of, "missing_words": words}, cells) == empty
    assert inputs(of, cells, missing_words=words) == empty
    assert inputs({**of, "missing_words": ["other"]}, pa.nulls(1, cells.type)) == empty


def test_words_of_a_text_are_no_value() -> None:
    reader = TextReader(TINY, 8)
    given = {"label": {"column": "y", "classes": ["a", "b"]}, "missing_words": ["k.A."]}
    schema = schema_of({**given, "columns": {"c": {"text": 8, "missing": "input"}}}, "it")
    cells = {"c": pa.array([" k.A. ", "", "a cat", "k.A. a cat"])}
    x, _, _ = column_inputs(schema.columns, cells, BadRecords(), True, reader)
    assert x[0].tolist() == x[1].tolist()
    assert x[:, -1].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("label", "cells"),
    [
        ({"range": [0, 100]}, ["1", "-", "999"]),
        ({"range": [0, 100]}, ["1", "999.0", "999"]),
        ({"range": [0, 100], "outside": "refuse"}, ["1", "999", "-"]),
        ({"classes": ["1", "2"]}, ["1", "-", "999"]),
    ],
)
def test_a_record_without_a_label_is_refused_or_left_out(
    tmp_path: Path, label: dict[str, Any], cells: list[str]
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["x,y", *(f"{n},{cell}" for n, cell in enumerate(cells * 9))]))
    given = {"label": {"column": "y", **label}, "columns": {"x": {"range": [0, 99]}}}
    schema = schema_of({**given, "missing_words": ["-", "999"]}, "it")
    with pytest.raises(InputError, match=r"Record 2 and 17 more have no (value|class)"):
        inspect(Source(file, schema=schema))
    facts = inspect(Source(file, schema=schema, skip_bad=True))
    assert (facts.facts.train_size + facts.facts.test_size, len(facts.skipped)) == (9, 18)


def test_data_frames_have_the_words_too() -> None:
    schema = {
        "label": {"column": "y", "classes": ["a", "b"]},
        "columns": {
            "age": {"range": [0, 120], "missing": "input"},
            "town": {"categories": ["Ulm"], "missing": "input"},
        },
        "missing_words": [999, "k.A."],
    }
    ages: list[Sequence[Any]] = [[1, 999, 3, 999], [1.0, 999.0, 3.0, 999.0], ["1", 999, 3, "k.A."]]
    towns, y = ["Ulm", "k.A.", "Ulm", "Bonn"], ["a", "b", "a", "b"]
    for cells in ages:
        for made in (pd.DataFrame, lambda of: polars.DataFrame(of, strict=False)):
            if made is not pd.DataFrame and isinstance(cells[0], str):
                continue
            frame = made({"age": cells, "town": towns, "y": y})
            source = from_dataframe(frame, schema)
            arrays, _ = read_table(Source(source.path, schema=source.schema, in_memory=source))
            assert arrays["x"][:, 1].tolist() == [0, 1, 0, 1]
            assert arrays["x"][:, 4].tolist() == [0, 1, 0, 0]


@pytest.mark.privacy
@pytest.mark.parametrize("unit", ["-", "999", "999.0", "k.A."])
def test_a_missing_unit_is_no_unit_that_records_share(tmp_path: Path, unit: str) -> None:
    persons = [f"{n},{n},{'ab'[n % 2]}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["x,who,y", *persons, f"1,{unit},a", f"2,{unit},b"]))
    label, number = {"column": "y", "classes": ["a", "b"]}, {"range": [0, 99]}
    given: dict[str, Any] = {"label": label, "columns": {"x": number}}
    for more in ({"drop": ["who"]}, {}):
        schema = schema_of({**given, **more, "missing_words": ["-", "k.A.", "999"]}, "it")
        source = Source(tmp_path / "t.csv", schema=schema, unit="who")
        with pytest.raises(InputError, match="Record 21 and 1 more have no value in who"):
            inspect(source)
        skipped = Source(tmp_path / "t.csv", schema=schema, unit="who", skip_bad=True)
        assert len(inspect(skipped).skipped) == 2
    columns = {"x": number, "who": {**number, "missing_words": [unit]}}
    schema = schema_of({**given, "columns": columns}, "it")
    with pytest.raises(InputError, match="Record 21 and 1 more have no value in who"):
        inspect(Source(tmp_path / "t.csv", schema=schema, unit="who"))


@pytest.mark.privacy
@pytest.mark.parametrize("word", ["-", "?", "n/a", "k.A.", "Unknown", "unbekannt", "keine Angabe"])
def test_a_word_for_nobody_is_no_unit_without_a_declaration(tmp_path: Path, word: str) -> None:
    """Records of unknown persons do not become one person, in tables, arrays or folders."""
    names, faults = units_in(["p1", word, f" {word} ", "p2"])
    assert names.tolist() == ["p1", "", "", "p2"]
    assert list(faults) == [1, 2]
    x = np.zeros((40, 2))
    units = [word if n in (3, 7) else f"p{n}" for n in range(40)]
    data = ArrayData(x, np.arange(40) % 2, low=0, high=1, unit=units)
    with pytest.raises(InputError, match=r"2 of 40|row 3"):
        inspect(Source(data.path, in_memory=data))
    if "/" in word:
        return
    for kind in ("a", "b"):
        for person in (*map(str, range(9)), word):
            place = tmp_path / "scans" / kind / person
            place.mkdir(parents=True)
            Image.new("L", (8, 8), ord(kind)).save(place / "1.png")
    with pytest.raises(InputError, match="is not in a folder of its own unit"):
        inspect(Source(tmp_path / "scans", unit="folder"))


def test_units_that_look_like_codes_are_units() -> None:
    """Numbers and abbreviations of states, for example, which are names as well."""
    known = ["999", "-1", "NV", "ND", "A-1", "none of them", "Missing Person's Clinic"]
    assert units_in(known)[0].tolist() == known


@pytest.mark.privacy
@pytest.mark.parametrize("added", ["999", "-", "k.A.", "abc", "1e300"])
def test_no_record_decides_what_is_missing_in_others(tmp_path: Path, added: str) -> None:
    """Words are declared, never found: with one record more, all others stay as they are."""
    column = {"range": [0, 1000], "missing": "input", "missing_words": ["999", "-"]}
    given = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"x": column}}
    found = []
    cells = [str(n % 90) if n % 7 else "999" for n in range(30)]
    for more in ([], [added] * 60):
        lines = [f"{cell},{'ab'[n % 2]}" for n, cell in enumerate(cells + more)]
        (tmp_path / "t.csv").write_text("\n".join(["x,y", *lines]))
        source = Source(tmp_path / "t.csv", schema=schema_of(given, "it"), skip_bad=True)
        arrays, _ = read_table(source)
        found.append(arrays["x"][:30].tolist())
    assert found[0] == found[1]
    assert np.array(found[0])[:, 1].tolist() == [float(n % 7 == 0) for n in range(30)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("missing_words: k.A.", "missing_words: needs a list, such as [k.A.]"),
        ("missing_words: [a, a]", "missing_words: a is declared 2 times"),
        ('missing_words: [""]', "missing_words.0: String should have at least 1 character"),
        ("columns: {c: {categories: A}}", "columns.c.categories: needs a list, such as [A]"),
        (
            "columns: {c: {categories: [A, '-'], missing_words: ['-']}}",
            "columns.c: '-' is among the categories and the missing_words: leave it out of one",
        ),
        (
            "columns: {c: {type: boolean, categories: [n, N/A], missing_words: ['n/a']}}",
            "columns.c: 'n/a' is among the categories and the missing_words",
        ),
        (
            "label: {column: y, classes: [a, b], missing_words: [b]}",
            "label: 'b' is among the classes and the missing_words",
        ),
    ],
)
def test_words_that_cannot_be_meant_are_explained(given: str, said: str) -> None:
    whole = {
        "label": {"column": "y", "classes": ["a", "b"]},
        "columns": {"c": {"range": [0, 9]}},
        **yaml.safe_load(given),
    }
    with pytest.raises(InputError) as caught:
        schema_of(whole, "it")
    assert said in str(caught.value)


def test_a_schema_is_the_same_when_it_is_read_again() -> None:
    schema = schema_of(yaml.safe_load(SCHEMA), "it")
    assert schema.missing_words == ("k.A.", "-")
    words = {column.name: column.missing_words for column in schema.columns}
    assert words["age"] == ("999", "k.A.", "-")
    assert words["town"] == ("k.A.",)  # "-" is one of its categories
    assert TableSchema.model_validate(schema.model_dump(mode="json")) == schema


@pytest.mark.parametrize("kind", [Column, Label])
def test_both_say_what_the_words_are(kind: type[Column] | type[Label]) -> None:
    assert "missing_words" in (kind.__doc__ or "")


def test_a_number_of_nines_is_said_to_be_a_word_perhaps(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("c,y\n" + "\n".join(["1,a", "999,b"] * 20))
    column = {"range": [0, 120], "outside": "refuse"}
    given = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"c": column}}
    with pytest.raises(InputError) as caught:
        inspect(Source(tmp_path / "t.csv", schema=schema_of(given, "it")))
    assert "in c: '999' (leave the cell empty, or declare missing_words: [\"999\"] in" in str(
        caught.value
    )


def test_a_word_does_not_hide_how_the_others_are_written(tmp_path: Path) -> None:
    """Of each column the first word and the first other cell are shown, each with its line."""
    cells = [f"0{n % 9 + 1}.02.1950;{n},5;{'ab'[n % 2]}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["born;age;y", "k.A.;-;a", *cells]))
    columns = {"born": DAY, "age": {"range": [0, 120]}}
    given = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": columns}
    with pytest.raises(InputError) as caught:
        inspect(Source(tmp_path / "t.csv", schema=schema_of(given, "it")))
    for said in (
        "Record 2 and 19 more have no date as in 2024-12-31 in born: '01.02.1950' (declare how",
        "Record 1 has no date as in 2024-12-31 in born: 'k.A.' (leave the cell empty, or declare",
        "Record 2 and 19 more have no number in age: '0,5' (0.5 with decimal",
        "Record 1 has no number in age: '-' (leave the cell empty, or declare missing",
    ):
        assert said in str(caught.value)


def test_parquet_is_read_like_a_csv(tmp_path: Path) -> None:
    given = yaml.safe_load(SCHEMA)
    given["columns"].pop("town")
    cells = [row.split(";") for row in rows("999", "-", "k.A.", "-")]
    table = {name: [row[at] for row in cells] for at, name in enumerate(HEADER.split(";"))}
    table.pop("town")
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    text = "\n".join(";".join(row) for row in [list(table), *zip(*table.values(), strict=True)])
    (tmp_path / "t.csv").write_text(text)
    found = [
        load(Source(tmp_path / name, schema=schema_of(given, "it")))
        for name in ("t.csv", "t.parquet")
    ]
    for one, other in zip(*found, strict=True):
        assert one[0].tolist() == other[0].tolist()


def test_a_draft_says_how_words_are_declared(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,out\n")
    text = dpmac("schema", tmp_path / "t.csv", "--label", "out").stdout
    assert "\n# missing_words: [" in text
    filled = text.replace("# missing_words", "missing_words").replace(
        "[FILL_IN, FILL_IN]", "[0, 1]"
    )
    assert schema_of(yaml.safe_load(filled), "it").missing_words == ("k.A.", "-")
