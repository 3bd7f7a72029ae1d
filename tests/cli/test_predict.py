"""dpmac predict, as typed and as seen; and the same from Python."""

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import Result

from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.run import Run
from tests.digits_runs import report_of
from tests.helpers import load_data
from tests.typed import dpmac

SIZE = 8
SCHEMA = """
label: {column: grade, classes: [low, high]}
columns:
  age: {range: [0, 100]}
  town: {categories: [Ulm, Bonn], missing: input}
drop: [name]
"""


@pytest.fixture
def digits(finished: Run) -> Path:
    return finished.folder


def train(dataset: str | Path, *flags: str) -> Path:
    given = ("--steps", "2", "--sigma", "6", "--out", "run", "--device", "cpu", *flags)
    result = dpmac("train", "--dataset", dataset, *given)
    assert result.exit_code == 0, result.output
    return Path("run")


def predicted(run: Path, data: Path | str, *flags: str, note: str = "") -> list[dict[str, str]]:
    """Rows of the file that a command writes, and the note that it prints."""
    result = dpmac("predict", run, data, *flags)
    assert result.exit_code == 0, result.output
    assert note in result.stderr if note else not result.stderr
    with Path("predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = f"{len(rows)} record{'s' * (len(rows) != 1)}"
    assert result.stdout == f"predictions.csv: predictions for {written}\n"
    return rows


def refused(run: Path, data: Path | str, *flags: str | Path) -> str:
    result: Result = dpmac("predict", run, data, *flags)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert not Path("predictions.csv").exists()
    return " ".join(result.stderr.split())


def pictures(
    root: Path, side: int = SIZE, mode: str = "L", names: tuple[str, ...] = ("b", "a")
) -> None:
    """Images of random pixels, two in each of some folders."""
    source = np.random.default_rng(side)
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            pixels = source.integers(0, 256, (side, side, 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{number}.png")


def test_an_npz_of_images_on_a_registered_data_set(digits: Path) -> None:
    split = load_data("digits", digits, torch.device("cpu")).tested
    np.savez("new.npz", x=split.images[:, 0].numpy())
    rows = predicted(digits, "new.npz")
    assert list(rows[0]) == ["row", "predicted", *(f"p_{n}" for n in range(10))]
    assert [row["row"] for row in rows] == list(map(str, range(360)))
    right = [row["predicted"] == str(k) for row, k in zip(rows, split.labels.tolist(), strict=True)]
    report = report_of(digits)
    assert sum(right) / 360 == report["scores"]["accuracy"]["value"]
    for row in rows:
        shares = [float(row[f"p_{n}"]) for n in range(10)]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == str(np.argmax(shares))
    assert os.stat("predictions.csv").st_mode & 0o777 == 0o600


def test_images_unlike_those_of_the_training_are_refused_together() -> None:
    pictures(Path("photos"))
    run = train("photos", "--test-fraction", "0.3")
    pictures(Path("new"), side=9, names=("x",))
    pictures(Path("new"), mode="RGB", names=("y",))
    said = refused(run, "new")
    assert "new/x/0.png has 9x9 pixels, but the model needs 8x8; " in said
    assert ", and 19 more. Correct or remove them, or add --skip-bad" in said
    pictures(Path("colour"), mode="RGB", names=("y",))
    Path("colour/y/1.png").write_bytes(b"no image")
    said = refused(run, "colour")
    assert "colour/y/0.png has colours, but the model needs grey images" in said
    assert "colour/y/1.png cannot be read as an image (damaged, or of an unknown format)" in said
    Path("colour/notes.txt").write_text("")
    said = refused(run, "colour")
    assert "colour/notes.txt is not an image. Correct or remove them, or add --skip-bad" in said
    pictures(Path("new"), names=("z",))
    expected = [row for row in predicted(run, "new/z") if row["file"] != "0.png"]
    Path("new/z/0.png").write_bytes(b"no image")
    result = dpmac("predict", run, "new/z", "--skip-bad", "--force")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "1 record of new/z is left out: new/z/0.png " in said
    with Path("predictions.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == expected


@pytest.mark.promise("published")
def test_new_images_are_not_kept(cache: Path) -> None:
    """They are nobody's training records, and no run has them a second time."""
    pictures(Path("photos"))
    run = train("photos", "--test-fraction", "0.3")
    before = sorted(cache.iterdir())
    pictures(Path("new"), names=("z",))
    assert len(predicted(run, "new")) == 12
    Path("predictions.csv").unlink()
    Path("new/z/0.png").write_bytes(b"no image")
    refused(run, "new")
    assert sorted(cache.iterdir()) == before


def table(records: int) -> list[str]:
    towns = ("Ulm", "Bonn", "", "Kiel")
    return [f"{n % 90},{towns[n % 4]},n{n},{('low', 'high')[n % 2]}" for n in range(records)]


@pytest.fixture
def tabular() -> Path:
    Path("schema.yaml").write_text(SCHEMA)
    Path("old.csv").write_text("\n".join(["age,town,name,grade", *table(60)]) + "\n")
    run = train("old.csv", "--schema", "schema.yaml")
    Path("schema.yaml").unlink()  # the model has it
    Path("old.csv").unlink()
    return run


def test_a_table_without_its_label(tabular: Path) -> None:
    Path("new.csv").write_text("id,town,age,more\n7,Ulm,30,x\n007,,200,y\n9,Kiel,3.5,z\n")
    rows = predicted(tabular, "new.csv", note="1 cell of town is no declared category")
    assert list(rows[0]) == ["row", "id", "predicted", "p_low", "p_high"]
    assert [row["id"] for row in rows] == ["7", "007", "9"]
    x = np.array([[30.0, 1, 0, 0, 0], [100, 0, 0, 0, 1], [3.5, 0, 0, 1, 0]])
    facts = report_of(tabular)["data"]["records"]
    low, high = map(np.array, (facts["low"], facts["high"]))
    inputs = torch.from_numpy((2 * x - low - high) / (high - low)).float()
    logits = load_model(tabular).model(inputs)
    shares = logits.softmax(1)[:, 1].tolist()
    assert [float(row["p_high"]) for row in rows] == pytest.approx(shares, abs=1e-6)
    Path("predictions.csv").unlink()
    Path("other.csv").write_text("id\n7\n")
    assert "There is no column age, which the schema declares; There" in refused(
        tabular, "other.csv"
    )


def test_predictions_replace_no_records(tabular: Path) -> None:
    """Neither those to predict nor those of the training, by whatever name or link."""
    new = Path("new.csv")
    new.write_text("name,age,town\nA,20,Bonn\n")
    Path("folder").mkdir()
    Path("folder/inside.csv").write_text("age,town\n20,Bonn\n")
    Path("link.csv").symlink_to(new)
    os.link(new, "hard.csv")
    trained_on = Path("old.csv")
    trained_on.write_text("the records of the training")
    for out, source, expected in (
        (new, new, "--out new.csv is the table to predict. Use another file."),
        ("link.csv", new, "--out link.csv is the table to predict. Use another file."),
        (new, "hard.csv", "--out new.csv is the table to predict. Use another file."),
        (trained_on, new, "--out old.csv is the records that run was trained on. Use"),
        ("folder/inside.csv", "folder", "is a file of folder, the records to predict."),
    ):
        assert expected in refused(tabular, source, "--out", out, "--force")
    assert new.read_text().startswith("name,age,town")
    assert trained_on.read_text() == "the records of the training"


def test_a_category_that_is_not_declared_is_named_with_its_record(tabular: Path) -> None:
    Path("new.csv").write_text("town,age\nUlm,30\nUlm ,30\nulm,30\nKöln,9\n,9\n")
    result = dpmac("predict", tabular, "new.csv")
    assert result.exit_code == 0, result.output
    assert (
        "about your records, do not publish: new.csv: 2 cells of town are no declared category, "
        "and count as another value (records 3 and 4)." in " ".join(result.stderr.split())
    )


def test_rows_of_numbers_are_clipped_to_the_range_of_the_run() -> None:
    x = np.random.default_rng(0).random((80, 3))
    np.savez("old.npz", x=x, y=np.arange(80) % 2)
    run = train("old.npz", "--feature-range", "0,1")
    np.savez("new.npz", x=x[:4] * 9 - 4)
    np.savez("clipped.npz", x=(x[:4] * 9 - 4).clip(0, 1))
    assert predicted(run, "new.npz") == predicted(run, "clipped.npz", "--force")
    Path("predictions.csv").unlink()
    np.savez("wide.npz", x=np.ones((4, 5)))
    assert "x must be rows of 3 numbers, not float64 of shape (4, 5)" in refused(run, "wide.npz")
    np.savez("lost.npz", x=np.full((4, 3), np.nan))
    assert "x must be finite, not float64" in refused(run, "lost.npz")


def test_unusable_rows_of_a_table_are_named_and_left_out(tabular: Path) -> None:
    rows = ["town,age,nr", "Ulm,30,a", "Bonn,old,b", "Kiel,,c", "Ulm,7", 'Ulm,"5,e', "Bonn,50,f"]
    Path("new.csv").write_text("\n".join(rows) + "\n")
    result = dpmac("predict", tabular, "new.csv", "--skip-bad", "--id", "nr")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert (
        "note: 4 records of new.csv are left out: Record 4 (line 5) has 2 values for 3 columns; "
        "Record 5 (line 6) has a quotation mark that" in said
    )
    assert "Record 2 has no number in age: 'old'; Record 3 has no value in age." in said
    assert "predictions for 2 records" in result.stdout
    with Path("predictions.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [(row["row"], row["id"]) for row in kept] == [("0", "a"), ("5", "f")]
    Path("good.csv").write_text("\n".join([rows[0], rows[1], rows[-1]]) + "\n")
    good = predicted(tabular, "good.csv", "--force")
    assert [row["p_high"] for row in good] == [row["p_high"] for row in kept]
    Path("new.csv").write_text("town,age\nUlm,old\n")
    Path("predictions.csv").unlink()
    said = refused(tabular, "new.csv", "--skip-bad")
    assert "new.csv contains no records that can be used" in said
    assert "Record 1 has no number in age: 'old'" in said


# dpmac eval, as typed and as seen.


def evaluate(*args: str | Path) -> Result:
    """Type the command, in this process."""
    return dpmac("eval", *args)


def evaluation(*args: str | Path) -> dict[str, Any]:
    """What --json prints."""
    result = evaluate(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    body = json.loads(result.stdout)
    assert isinstance(body, dict)
    return body


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_json_agrees_with_the_report(digits: Path, name: str) -> None:
    body = evaluation(digits / name)
    assert {"accuracy", "loss", "samples", "per_class", "confusion"} <= body.keys()
    test = report_of(digits)["scores"]
    assert body["accuracy"] == test["accuracy"]["value"]
    assert body["loss"] == pytest.approx(test["loss"], rel=1e-6)
    assert body["samples"] == 360
    assert body["intervals"]["accuracy"] == [test["accuracy"]["low"], test["accuracy"]["high"]]
    shown = " to ".join(f"{end:.2%}" for end in body["intervals"]["accuracy"])
    assert shown in evaluate(digits / name).stdout


@pytest.mark.long
def test_a_file_without_test_set_is_scored_in_part_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file, out = tmp_path / "rows.npz", tmp_path / "own"
    np.savez(file, x=rng.random((90, 3)), y=np.arange(90) % 2)
    quick = ("--steps", "2", "--sigma", "5", "--feature-range", "0,1", "--quiet")
    assert dpmac("train", "--dataset", str(file), *quick, "--out", str(out)).exit_code == 0
    alone, other = dpmac("eval", str(out)), dpmac("eval", str(out), "--dataset", str(file))
    assert re.search(r"\d+ held-out samples", alone.stdout)
    assert "no test set" not in alone.stderr
    assert re.search(r"rows.npz has no test set: only the \d+ records that", other.stderr)
