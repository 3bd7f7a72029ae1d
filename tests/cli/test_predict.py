"""dpmac predict, as typed and as seen; and the same from Python."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import Table, parquet
from typer.testing import Result

from dpmac_cli import load_model, predict
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import InputError
from dpmac_cli.release import prediction
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression, SeveralNumbers
from dpmac_cli.tasks.task import Task
from tests.digits_runs import train_digits
from tests.typed import dpmac, hooked, loading

SIZE = 8
SCHEMA = """
label: {column: grade, classes: [low, high]}
columns:
  age: {range: [0, 100]}
  town: {categories: [Ulm, Bonn], missing: input}
drop: [name]
"""
COST = Regression(("cost",), 0.0, 100.0)
#: What a message says of a word among numbers.
OLD = " (declare decimal, thousands, missing_words or categories in the schema)"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("digits") / "run", epochs=1).folder


def train(dataset: str | Path, *flags: str) -> Path:
    given = ("--steps", "2", "--sigma", "6", "--out", "run", "--device", "cpu", *flags)
    result = dpmac("train", "--dataset", dataset, *given)
    assert result.exit_code == 0, result.output
    return Path("run")


def predicted(run: Path, data: Path | str, *flags: str) -> list[dict[str, str]]:
    """Rows of the file that a command writes."""
    result = dpmac("predict", run, data, *flags)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
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
    split = load_data("digits", digits, torch.device("cpu")).test
    np.savez("new.npz", x=split.images[:, 0].numpy())
    rows = predicted(digits, "new.npz")
    assert list(rows[0]) == ["row", "predicted", *(f"p_{n}" for n in range(10))]
    assert [row["row"] for row in rows] == list(map(str, range(360)))
    right = [row["predicted"] == str(k) for row, k in zip(rows, split.labels.tolist(), strict=True)]
    report = json.loads((digits / "report.json").read_text())
    assert sum(right) / 360 == report["test"]["accuracy"]
    for row in rows:
        shares = [float(row[f"p_{n}"]) for n in range(10)]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == str(np.argmax(shares))
    assert os.stat("predictions.csv").st_mode & 0o777 == 0o600


def test_from_python_with_an_array(digits: Path) -> None:
    x: NDArray[np.uint8] = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8) % 17
    found = predict(digits, x)
    assert found.classes == tuple("0123456789")
    assert found.probabilities.shape == (3, 10)
    assert found.probabilities.dtype == np.float32
    model = load_model(digits).model
    facts = json.loads((digits / "report.json").read_text())["input"]
    mean, std = facts["mean"][0], facts["std"][0]
    logits = model((torch.from_numpy(x)[:, None] / facts["levels"] - mean) / std)
    assert found.probabilities == pytest.approx(logits.softmax(1).detach().numpy(), abs=1e-5)
    assert found.predicted == [str(k) for k in logits.argmax(1).tolist()]
    assert list(found.records) == [0, 1, 2]


def test_a_folder_of_images_flat_and_nested() -> None:
    pictures(Path("photos"), names=("dog", "cat"))
    run = train("photos", "--test-fraction", "0.3")
    pictures(Path("new"), names=("deep/er", "."))
    Path("new/.hidden").write_text("")
    rows = predicted(run, "new")
    assert list(rows[0]) == ["file", "predicted", "p_cat", "p_dog"]
    assert len(rows) == 24
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    pixels = np.stack([np.asarray(Image.open(Path("new") / row["file"])) for row in rows])
    same = predict(run, pixels).probabilities
    assert [float(row["p_dog"]) for row in rows] == pytest.approx(same[:, 1].tolist())


def test_a_file_name_that_is_not_text_is_escaped(digits: Path) -> None:
    Path("new").mkdir()
    Image.new("L", (8, 8)).save(Path("new") / os.fsdecode(b"\xff,.png"))
    assert [row["file"] for row in predicted(digits, "new")] == [r"\xff,.png"]


def test_images_are_resized_and_converted_as_declared() -> None:
    pictures(Path("photos"), side=20, mode="RGB")
    run = train("photos", "--channels", "1", "--image-size", "8", "--test-fraction", "0.3")
    pictures(Path("new"), side=13, mode="RGB", names=("x",))
    assert len(predicted(run, "new")) == 12
    np.savez("new.npz", x=np.zeros((5, 30, 31), np.uint8))
    assert len(predicted(run, "new.npz", "--force")) == 5


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
    both = refused(run, "colour")
    assert "colour/notes.txt is not an image. Remove such files, or add --skip-bad" in both
    assert said.removeprefix("error: ") in both


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
    rows = predicted(tabular, "new.csv")
    assert list(rows[0]) == ["row", "id", "predicted", "p_low", "p_high"]
    assert [row["id"] for row in rows] == ["7", "007", "9"]
    x = np.array([[30.0, 1, 0, 0, 0], [100, 0, 0, 0, 1], [3.5, 0, 0, 1, 0]])
    facts = json.loads((tabular / "report.json").read_text())["input"]
    inputs = torch.from_numpy((x - facts["mean"]) / np.array(facts["std"])).float()
    logits = load_model(tabular).model(inputs.view(3, 5, 1, 1))
    shares = logits.softmax(1)[:, 1].tolist()
    assert [float(row["p_high"]) for row in rows] == pytest.approx(shares, abs=1e-6)
    parquet.write_table(Table.from_pydict({"id": ["7", "007", "9"]}), "other.parquet")
    assert "There is no column age, which the schema declares; There" in refused_again(
        tabular, "other.parquet"
    )


def refused_again(run: Path, data: str, *flags: str) -> str:
    Path("predictions.csv").unlink()
    return refused(run, data, *flags)


def test_cells_that_the_schema_does_not_allow_are_named_together(tabular: Path) -> None:
    Path("new.csv").write_text("town,age\nUlm,30\nBonn,old\nKiel,\n")
    said = refused(tabular, "new.csv")
    assert f"Record 2 has no number in age: 'old'{OLD}; Record 3 has no value in age. " in said
    assert "Correct new.csv to fit the schema of the model, or add --skip-bad to leave " in said


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
    np.savez("none.npz", x=np.ones((0, 3)))
    assert "none.npz contains no records" in refused(run, "none.npz")
    np.savez("other.npz", y=np.ones(3))
    assert "must contain the arrays x (images or rows of numbers). It contains y" in refused(
        run, "other.npz"
    )


def test_records_in_memory_are_not_shown_in_a_message(digits: Path) -> None:
    with pytest.raises(InputError, match=r"^the array contains no records\.$"):
        predict(digits, np.zeros((0, 8, 8), np.uint8))


@pytest.mark.parametrize(
    ("x", "got"),
    [(np.zeros((2, 9, 8), np.uint8), "uint8 of shape (2, 9, 8)"), (np.zeros((2, 8, 8)), "float64")],
    ids=["shape", "dtype"],
)
def test_arrays_unlike_the_images_are_refused(digits: Path, x: NDArray[np.uint8], got: str) -> None:
    np.savez("new.npz", x=x)
    said = refused(digits, "new.npz")
    assert f"images as uint8, with channels: 1, height: 8, width: 8, not {got}" in said


def test_data_of_another_kind_is_refused(digits: Path, tabular: Path) -> None:
    Path("new.csv").write_text("age,town\n1,Ulm\n")
    Path("empty").mkdir()
    np.savez("new.npz", x=np.zeros((2, 8, 8), np.uint8))
    assert "was trained on images: use a folder of images or an .npz." in refused(digits, "new.csv")
    assert "was trained on a table: use one (.csv, .tsv, .parquet)." in refused(tabular, "new.npz")
    assert "empty contains no records." in refused(digits, "empty")
    assert "nowhere does not exist." in refused(digits, "nowhere")


@pytest.mark.long
def test_no_library_of_metrics_is_loaded_without_need() -> None:
    for args in (("--help",), ("account", "--sigma", "1", "--steps", "1")):
        assert hooked(loading("sklearn", "torch", "pyarrow"), *args).returncode == 0
        assert Path("loaded").read_text() == ""


def test_what_is_there_is_not_replaced_unasked(digits: Path) -> None:
    np.savez("new.npz", x=np.zeros((2, 8, 8), np.uint8))
    Path("kept.csv").write_text("mine")
    assert "kept.csv already exists. Add --force" in refused(digits, "new.npz", "--out", "kept.csv")
    assert Path("kept.csv").read_text() == "mine"
    said = refused(digits, "new.npz", "--out", "no/such.txt")
    assert "must end in .csv" in said
    assert "The folder no of --out does not exist." in said
    assert dpmac("predict", digits, "new.npz", "--out", "kept.csv", "--force").exit_code == 0
    assert Path("kept.csv").read_text().startswith("row,predicted,")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Classification(("a", "b")), "it has no class"),
        (COST, "it has no number"),
        (SeveralNumbers.of([COST, COST]), "it has no number for some targets"),
    ],
)
def test_what_a_record_without_an_answer_lacks_is_said(
    task: Task, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = np.full((2, task.outputs), 0.5, np.float32)
    answers[1, 0] = np.nan
    found = prediction.Predictions(answers, task, (0, 1))
    monkeypatch.setattr(prediction, "predict", lambda *_, **__: found)
    for name in ("run", "new.npz"):
        Path(name).touch()
    result = dpmac("predict", "run", "new.npz")
    assert result.exit_code == 0, result.output
    assert f"note: for 1 record the output is NaN, so {said}\n" in result.stderr


@pytest.mark.long
def test_an_output_that_is_no_number_has_no_class() -> None:
    Path("net.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Root(nn.Module):\n    def forward(self, x):\n"
        "        return x if self.training else torch.where(x > 9e9, x, torch.nan)\n\n\n"
        "def Net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Root())\n"
    )
    run = train("digits", "--model", "net.py:Net")
    np.savez("new.npz", x=np.zeros((2, 8, 8), np.uint8))
    result = dpmac("predict", run, "new.npz", "--model", "net.py:Net")
    assert result.exit_code == 0, result.output
    assert "note: for 2 records the output is NaN, so they have no class" in result.stderr
    assert Path("predictions.csv").read_text().splitlines()[1] == "0," + "," * 10


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
    assert f"Record 2 has no number in age: 'old'{OLD}; Record 3 has no value in age." in said
    assert "predictions for 2 records" in result.stdout
    with Path("predictions.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [(row["row"], row["id"]) for row in kept] == [("0", "a"), ("5", "f")]
    Path("good.csv").write_text("\n".join([rows[0], rows[1], rows[-1]]) + "\n")
    good = predicted(tabular, "good.csv", "--force")
    assert [row["p_high"] for row in good] == [row["p_high"] for row in kept]
    found = predict(tabular, "new.csv", skip_bad=True, id_column="nr")
    assert (list(found.records), found.ids, len(found.skipped.records)) == ([0, 5], ["a", "f"], 4)
    Path("new.csv").write_text("town,age\nUlm,old\n")
    Path("predictions.csv").unlink()
    said = refused(tabular, "new.csv", "--skip-bad")
    assert "new.csv contains no records that can be used" in said
    assert "Record 1 has no number in age: 'old'" in said


def test_a_column_to_keep_must_be_there(tabular: Path, digits: Path) -> None:
    Path("new.csv").write_text("town,age\nUlm,30\n")
    said = refused(tabular, "new.csv", "--id", "nr")
    assert "There is no column nr for --id. new.csv has the columns town, age." in said
    np.savez("new.npz", x=np.zeros((2, 8, 8), np.uint8))
    said = refused(digits, "new.npz", "--id", "nr")
    assert "--id nr names a column, but " in said
    assert "model.safetensors was not trained on a table." in said
    said = refused(digits, "new.csv", "--id", "nr")
    assert "new.csv does not fit" in said
    assert "--id nr names a column" in said


def test_what_is_not_there_is_said_together(digits: Path) -> None:
    said = refused(Path("nowhere"), "nothing", "--out", "no/predictions.csv")
    for what in (
        "The folder no of --out does not exist.",
        "nowhere does not exist. Use a run folder of dpmac train, or a model.safetensors.",
        "nothing does not exist.",
    ):
        assert what in said
    said = refused(digits, "nothing", "--out", "predictions.txt")
    assert "--out predictions.txt must end in .csv." in said
    assert "nothing does not exist." in said


def test_unusable_images_and_stray_files_are_named_and_left_out() -> None:
    pictures(Path("photos"))
    run = train("photos", "--test-fraction", "0.3")
    pictures(Path("new"), names=("x",))
    expected = predicted(run, "new")
    Path("new/x/0.png").write_bytes(b"no image")
    Path("new/Notizen.txt").write_text("x")
    Path("new/Thumbs.db").write_bytes(b"x")
    said = refused_again(run, "new")
    assert "new/Notizen.txt is not an image. Remove such files, or add --skip-bad" in said
    result = dpmac("predict", run, "new", "--skip-bad")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "2 records of new are left out: new/Notizen.txt is not an image; new/x/0.png " in said
    assert "Thumbs.db" not in said
    with Path("predictions.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert kept == [row for row in expected if row["file"] != "x/0.png"]


def test_rows_that_are_not_finite_are_left_out() -> None:
    x = np.random.default_rng(0).random((80, 3))
    np.savez("old.npz", x=x, y=np.arange(80) % 2)
    run = train("old.npz", "--feature-range", "0,1")
    np.savez("good.npz", x=x[:3])
    expected = predicted(run, "good.npz")
    broken = np.insert(x[:3], 1, np.nan, 0)
    np.savez("new.npz", x=broken)
    result = dpmac("predict", run, "new.npz", "--skip-bad", "--force")
    assert "1 record of new.npz is left out: record 1 contains NaN or infinity." in result.stderr
    with Path("predictions.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [row["row"] for row in kept] == ["0", "2", "3"]
    assert [row["p_1"] for row in kept] == [row["p_1"] for row in expected]


def test_a_table_in_another_encoding_is_read_as_that_of_the_training() -> None:
    schema = SCHEMA.replace("Ulm", "Köln")
    Path("schema.yaml").write_text(f"encoding: cp1252\n{schema}")
    text = "\n".join(["age,town,name,grade", *table(60)]).replace("Ulm", "Köln") + "\n"
    Path("old.csv").write_text(text, encoding="cp1252")
    run = train("old.csv", "--schema", "schema.yaml")
    assert dpmac("eval", run).exit_code == 0
    Path("new.csv").write_text("age,town\n7,Köln\n", encoding="cp1252")
    Path("other.csv").write_bytes(b"age,town\n7,K\x81ln\n")
    rows = predicted(run, "new.csv")
    x = np.array([[7.0, 1, 0, 0, 0]])
    facts = json.loads((run / "report.json").read_text())["input"]
    inputs = torch.from_numpy((x - facts["mean"]) / np.array(facts["std"])).float()
    share = load_model(run).model(inputs.view(1, 5, 1, 1)).softmax(1)[0, 1].item()
    assert float(rows[0]["p_high"]) == pytest.approx(share, abs=1e-6)
    assert "not text in CP1252" in refused_again(run, "other.csv")
