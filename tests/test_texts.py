"""Texts, from a column of notes to predictions for new ones."""

import csv
import json
import re
import shlex
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import yaml
from numpy.typing import NDArray
from pyarrow import parquet
from torch import Tensor

from dpmac_cli import ArrayData, from_dataframe, load_model, predict, resolve, score
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.schema import InMemoryData
from dpmac_cli.data.texts import as_inputs
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.errors import InputError
from dpmac_cli.models import text_encoder
from dpmac_cli.models.encoders import ENCODERS, TextEncoder, read_encoder
from dpmac_cli.models.registry import Trained
from dpmac_cli.release import sentences
from dpmac_cli.release.run import finish, resume, train
from dpmac_cli.storage.cache import RowFile
from dpmac_cli.storage.paths import cache_folder
from tests.test_report import spent
from tests.test_tokens import TEXTS
from tests.tiny_bert import WIDTH, notes, text_inputs, write_encoder
from tests.typed import dpmac

SCHEMA = """
label: {column: outcome, classes: [home, ward]}
columns:
  note: {text: 16}
  age: {range: [0, 100]}
"""
SHORT: dict[str, Any] = {
    **{"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "epochs": 2},
    "out": Path("run"),
}
CLASSES = ("home", "ward")


@pytest.fixture(autouse=True)
def encoder() -> Path:
    return write_encoder(Path("encoder"))


def table(path: str = "notes.csv", count: int = 120, seed: int = 0) -> None:
    """Write a table of notes, and its schema."""
    Path("schema.yaml").write_text(SCHEMA)
    with Path(path).open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["note", "age", "outcome"])
        for row, (text, kind) in enumerate(notes(count, seed)):
            write.writerow([text, 20 + row % 60, CLASSES[kind]])


def plan(dataset: str | InMemoryData = "notes.csv", **more: Any) -> TrainPlan:
    if dataset == "notes.csv":
        more.setdefault("schema", "schema.yaml")
    return resolve({**SHORT, "dataset": dataset, **more}).plan


def trained(dataset: str | InMemoryData = "notes.csv", **more: Any) -> dict[str, Any]:
    """Train, and return the report."""
    return dict(finish(train(plan(dataset, **more))).report)


def refused(dataset: str | InMemoryData = "notes.csv", **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        plan(dataset, **more)
    return str(caught.value)


def inputs(of: TrainPlan) -> Tensor:
    """Training and test records as the network sees them."""
    source, folder = of.data.source, of.data.folder
    data = load_data(source, folder, torch.device("cpu"), found=of.data.found)
    images = torch.cat([data.train.images, data.test.images])
    return data.standardised(images)[:, :, 0, 0]


def tokens(texts: list[str], limit: int = 16) -> Tensor:
    """Texts as inputs."""
    return text_inputs("encoder", texts, limit)


def as_set(rows: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in rows}


def test_a_table_of_notes_is_trained_on_and_predicted() -> None:
    table()
    flags = ("--schema", "schema.yaml", "--backbone", "./encoder", "--sigma", "4", "--out", "run")
    result = dpmac("train", "--dataset", "notes.csv", *flags, "--device", "cpu")
    assert result.exit_code == 0, result.output
    report = json.loads(Path("run/report.json").read_text())
    assert report["input"]["texts"] == [[0, 16]]
    assert report["dataset"]["schema"]["columns"][0]["text"] == 16
    assert report["hyperparameters"]["lr"] == 0.005
    assert report["recipe"]["ema"] == 0.9
    head: Any = load_model("run").model.get_submodule("head.1")
    assert head.in_features == WIDTH + WRITTEN + 1
    table("new.csv", 10, seed=1)
    result = dpmac("predict", "run", "new.csv")
    assert result.exit_code == 0, result.output
    with Path("predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 10
    result = dpmac("eval", "run")
    assert result.exit_code == 0, result.output
    assert f"{report['test']['accuracy']:.2%}" in result.stdout


def test_a_model_needs_no_encoder_once_it_is_published() -> None:
    table()
    report = trained()
    Path("encoder").rename("elsewhere")
    assert score("run").result.accuracy == report["test"]["accuracy"]
    table("new.csv", 10, seed=1)
    assert len(predict("run", "new.csv").predicted) == 10


def test_texts_decide_what_is_learnt() -> None:
    table(count=400)
    report = trained(epochs=50, no_dp=True, sigma=None, lr=0.1, batch_size=100)
    assert report["test"]["accuracy"] > 0.9


def test_tokens_enter_exactly_and_other_columns_stay_in_place() -> None:
    rows = notes(60)
    frame = pd.DataFrame(
        {
            "age": [20 + row % 60 for row in range(60)],
            "note": [text for text, _ in rows],
            "sex": ["fm"[row % 2] for row in range(60)],
            "plan": [text[::-1] for text, _ in rows],
            "outcome": [CLASSES[kind] for _, kind in rows],
        }
    )
    columns = {
        "age": {"range": [0, 100]},
        "note": {"text": 16},
        "sex": {"categories": ["f", "m"], "outside": "refuse"},
        "plan": {"text": 12, "missing": "input"},
    }
    schema = {"label": {"column": "outcome", "classes": list(CLASSES)}, "columns": columns}
    of = plan(from_dataframe(frame, schema))
    assert of.data.facts.texts == ((1, 16), (23, 12))
    assert of.data.facts.shape == (40, 1, 1)
    sexes = torch.tensor([[row % 2 == 0, row % 2 == 1] for row in range(60)]).float()
    parts = tokens(list(frame["note"])), sexes, tokens(list(frame["plan"]), 12)
    expected = torch.cat([*parts, torch.zeros(60, 1)], 1)
    assert as_set(inputs(of)[:, 1:]) == as_set(expected)
    ages = torch.tensor(frame["age"].to_numpy()).float() / 50 - 1
    assert torch.allclose(inputs(of)[:, 0].sort().values, ages.sort().values, atol=1e-6)
    scaled = inputs(of)[:, 1:21] * read_encoder("encoder").reader(16).scale
    assert torch.equal(scaled, scaled.round())
    assert of.network.features is not None
    assert of.network.features.shape_of(of.data.facts.shape) == (2 * (WIDTH + WRITTEN) + 4, 1, 1)


def sources() -> dict[str, Any]:
    """The same texts in every form, by name, with their classes."""
    rows = notes(80)
    texts, kinds = [text for text, _ in rows], [kind for _, kind in rows]
    for row, (text, kind) in enumerate(rows):
        path = Path("folder", CLASSES[kind], f"{row:02}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8-sig" if row % 2 else "utf-8")
    np.savez("texts.npz", x=np.array(texts), y=kinds)
    frame = {"note": texts, "outcome": [CLASSES[kind] for kind in kinds]}
    columns = {"note": {"text": 16}}
    schema = {"label": {"column": "outcome", "classes": list(CLASSES)}, "columns": columns}
    parquet.write_table(pa.table(frame), "texts.parquet")
    return {
        "list": ArrayData(texts, kinds, classes=CLASSES),
        "array": ArrayData(np.array(texts), np.array(kinds), classes=CLASSES),
        "npz": "texts.npz",
        "folder": "folder",
        "pandas": from_dataframe(pd.DataFrame(frame), schema),
        "polars": from_dataframe(pl.DataFrame(frame), schema),
        "arrow": from_dataframe(pa.table(frame), schema),
    }


@pytest.mark.privacy
def test_the_inputs_of_a_text_depend_on_that_text_alone() -> None:
    """For every kind of text, tokens and how it is written, in other company and another order."""
    reader = read_encoder("encoder").reader(16)
    together = as_inputs(TEXTS, reader)
    assert np.array_equal(as_inputs(TEXTS[::-1], reader)[::-1], together)
    for row, text in enumerate(TEXTS):
        assert np.array_equal(as_inputs([text], reader)[0], together[row])


def test_every_source_gives_the_same_records() -> None:
    texts = [text for text, _ in notes(80)]
    for name, source in sources().items():
        more = {"classes": ",".join(CLASSES)} if isinstance(source, str) else {}
        more |= {} if name in ("pandas", "polars", "arrow") else {"tokens": "16"}
        of = plan(source, **more)
        assert of.data.facts.texts == ((0, 16),), name
        assert as_set(inputs(of)) == as_set(tokens(texts)), name
        assert of.data.facts.task.names == CLASSES, name
        assert not of.data.found.inferred, name


def test_a_folder_without_declared_classes_says_so() -> None:
    sources()
    found = plan("folder", tokens=16).data.found
    assert found.facts.task.names == CLASSES
    assert found.inferred == ("classes",)
    assert "may have 128 tokens, but the encoder supports 64" in refused("folder")


def test_beside_texts_only_numbers_are_shown() -> None:
    for cell, said in (
        ("12,5", "no number in age: '12,5' (declare decimal"),
        ("k.A.", "Record 121 has no number in age (not shown, because it may be part of a text)"),
        ("fever for two days", "no number in age (not shown, because it may be part of a text)"),
    ):
        table()
        with Path("notes.csv").open("a", newline="") as file:
            csv.writer(file).writerow(["pain", cell, "home"])
        assert said in refused()


def test_units_of_several_texts_stay_together() -> None:
    table()
    with Path("notes.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    with Path("notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [[*header, "patient"], *([*row, str(n // 3)] for n, row in enumerate(rows))]
        )
    Path("schema.yaml").write_text(SCHEMA + "drop: [patient]\n")
    report = trained(unit="patient", cover_scores=True)
    assert report["privacy"]["unit"]["told_by"] == "patient"
    assert report["dataset"]["train_size"] + report["dataset"]["test_size"] == 40
    for name, number in ("home", 0), ("ward", 1):
        for row in range(20):
            folder = Path("folder", name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"patient{row % 10}_{row}.txt").write_text(f"{name} {number} {row}")
    found = plan("folder", unit="patient([0-9]+)", tokens="16", batch_size=2).data.found
    assert found.facts.train_size + found.facts.test_size == 10


@pytest.mark.privacy
def test_texts_of_a_folder_are_one_unit() -> None:
    for row in range(40):
        folder = Path("folder", CLASSES[row % 2], f"p{row // 4}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row}.txt").write_text(f"a note with the number {row}")
    found = plan("folder", unit="folder", tokens="16", batch_size=2).data.found
    assert found.unit == "folder"
    assert found.facts.train_size + found.facts.test_size == 10


def test_a_test_folder_is_the_test_set() -> None:
    for part, count in ("train", 8), ("test", 4):
        for name in CLASSES:
            folder = Path("folder", part, name)
            folder.mkdir(parents=True)
            for row in range(count):
                (folder / f"{row}.txt").write_text(f"{part} {name} {row}")
    found = plan("folder", tokens="16").data.found
    assert (found.facts.train_size, found.facts.test_size, found.held_out) == (16, 8, False)


def test_new_texts_in_every_form_are_predicted_alike() -> None:
    texts = [text for text, _ in notes(12, seed=3)]
    report = trained(ArrayData([t for t, _ in notes(80)], [k for _, k in notes(80)]), tokens=16)
    assert report["dataset"]["schema"] is None
    Path("new/below").mkdir(parents=True)
    for row, text in enumerate(texts):
        Path("new/below" if row % 2 else "new", f"{row:02}.txt").write_text(text)
    np.savez("new.npz", x=np.array(texts))
    expected = predict("run", texts)
    alone = [predict("run", [text]).probabilities[0] for text in texts]
    assert np.array_equal(expected.probabilities, np.stack(alone))
    for data in ("new.npz", np.array(texts)):
        assert np.array_equal(predict("run", data).probabilities, expected.probabilities)
    found = predict("run", "new")
    order = [int(Path(str(name)).stem) for name in found.records]
    assert np.array_equal(found.probabilities, expected.probabilities[order])


def cached() -> list[Path]:
    return sorted(cache_folder().glob("*.rows"))


@pytest.mark.privacy
def test_features_are_cached_privately_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(Path("cache").absolute()))
    table()
    trained()
    (file,) = cached()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    result = dpmac("cache")
    assert "1 file" in result.stdout
    monkeypatch.setattr(text_encoder, "token_vectors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(out=Path("again"))  # the probe of the cache


@pytest.mark.privacy
def test_features_do_not_depend_on_other_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing a record changes no bit of the features of the others, nor their split."""
    rows = notes(70, seed=5)

    def features(kept: list[tuple[str, int]], name: str) -> NDArray[Any]:
        monkeypatch.setenv("DPMAC_CACHE_DIR", str(Path(name).absolute()))
        trained(ArrayData([t for t, _ in kept], [k for _, k in kept]), tokens=16, force=True)
        (file,) = cached()
        return np.array(RowFile(file).values)[:, :, 0, 0]

    rows = list(dict(rows).items())
    whole, less = features(rows, "whole"), features(rows[1:], "less")
    assert len(whole) == len(less) + 1
    assert as_set(torch.from_numpy(less)) < as_set(torch.from_numpy(whole))


def test_extraction_continues_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(Path("cache").absolute()))
    table()
    calls, real = [0], text_encoder.token_vectors

    def killed(*args: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 80:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(text_encoder, "token_vectors", killed)
    with pytest.raises(KeyboardInterrupt):
        trained()
    assert not cached()
    first = calls[0]
    report = trained()
    assert calls[0] - first < 120 + 16 + 20 + report["test"]["samples"]
    (file,) = cached()
    monkeypatch.setattr(text_encoder, "token_vectors", real)
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(Path("fresh").absolute()))
    trained(out=Path("fresh-run"))
    (fresh,) = cached()
    assert fresh.read_bytes()[4096:] == file.read_bytes()[4096:]


def test_a_run_on_texts_is_resumed() -> None:
    table()
    whole = finish(train(plan(seed=1)))
    asked = iter(range(10**6))
    events = list(train(plan(seed=1, out=Path("part")), lambda: next(asked) >= 3))
    assert events
    resumed = finish(resume(Path("part")))
    assert resumed.report["state"] == "finished"
    assert resumed.report["privacy"]["steps"] == whole.report["privacy"]["steps"]


def test_missing_texts_are_counted_or_become_an_input() -> None:
    table()
    with Path("notes.csv").open("a") as file:
        file.write(',40,home\n"   ",41,ward\n')
    assert "Record 121 and 1 more have no text in note" in refused()
    assert "--skip-bad" in refused()
    found = plan(skip_bad=True).data.found
    assert found.skipped == ("record 121", "record 122")
    Path("schema.yaml").write_text(SCHEMA.replace("text: 16", "text: 16, missing: input"))
    of = plan()
    assert of.data.facts.shape == (22, 1, 1)
    assert inputs(of)[:, 20].sum() == 2


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_another_encoding_is_named(kind: str) -> None:
    if kind == "table":
        table()
        with Path("notes.csv").open("ab") as file:
            file.write("fi\u00e8vre,30,home\n".encode("latin-1"))
        assert "(line 122) is not text in UTF-8 (declare another" in refused()
    else:
        sources()
        Path("folder/home/bad.txt").write_bytes("fi\u00e8vre".encode("latin-1"))
        Path("folder/home/empty.txt").write_text(" \n")
        Path("folder/home/notes.pdf").write_text("x")
        message = refused("folder", tokens=16)
        assert "folder/home/bad.txt is not text in UTF-8" in message
        assert "folder/home/empty.txt has no text" in message
        assert "folder/home/notes.pdf is not a file of text" in message
        assert len(plan("folder", tokens=16, skip_bad=True).data.found.skipped) == 3


def test_a_text_without_an_encoder_and_an_encoder_without_texts_are_named() -> None:
    table()
    assert "--backbone minilm" in refused(backbone=None)
    texts = [text for text, _ in notes(20)]
    assert "--backbone minilm" in refused(ArrayData(texts, [0, 1] * 10), backbone=None)
    sources()
    assert "--backbone minilm" in refused("folder", backbone=None)
    assert "--backbone minilm" in refused("texts.npz", backbone=None)
    numbers = ArrayData(np.ones((20, 3)), [0, 1] * 10, low=0, high=1)
    assert "must contain texts" in refused(numbers)
    assert "is for texts, but digits contains images" in refused("digits")
    categories = "note: {categories: [a], missing: input}"
    Path("schema.yaml").write_text(SCHEMA.replace("note: {text: 16}", categories))
    frame = pd.DataFrame({"note": list("ab" * 9), "age": [1] * 18, "outcome": list(CLASSES) * 9})
    assert "Declare a column of texts" in refused(from_dataframe(frame, "schema.yaml"))


def test_values_that_are_not_texts_are_named() -> None:
    texts: list[Any] = [text for text, _ in notes(20)]
    texts[3], texts[7] = None, 7.5
    message = refused(ArrayData(texts, [0, 1] * 10), tokens=16)
    assert "has no text" in message
    assert "is not text, but float" in message
    found = plan(ArrayData(texts, [0, 1] * 10), tokens=16, skip_bad=True).data.found
    assert len(found.skipped) == 2


def test_limits_that_the_encoder_does_not_support_are_named() -> None:
    table()
    Path("schema.yaml").write_text(SCHEMA.replace("16", "100"))
    assert "may have 100 tokens, but the encoder supports 64" in refused()
    Path("schema.yaml").write_text(SCHEMA.replace("16", "2"))
    assert "note" in refused()
    Path("schema.yaml").write_text(SCHEMA.replace("text: 16", "text: 16, range: [0, 1]"))
    assert "either a range or categories or text" in refused()


GUIDE = (Path(__file__).parents[1] / "docs" / "own-texts.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_commands_of_the_guide_lead_from_a_table_to_a_card() -> None:
    (typed,) = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    (schema,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    for name, count in ("notes.csv", 150), ("new.csv", 9):
        with Path(name).open("w", newline="") as file:
            write = csv.writer(file)
            write.writerow(["note", "age", "patient", "outcome"])
            for row, (text, kind) in enumerate(notes(count)):
                write.writerow([text, 20 + row % 60, row // 3, CLASSES[kind]])
    commands = [line for line in typed.splitlines() if line]
    assert [line.split()[1] for line in commands] == ["schema", "train", "card", "predict"]
    for line in commands:
        words, _, file_name = line.replace("minilm", "./encoder").partition(" > ")
        result = dpmac(*shlex.split(words)[1:])
        assert result.exit_code == 0, result.output
        if file_name:
            draft = yaml.safe_load(result.stdout)
            filled = yaml.safe_load(schema.replace("text: 128", "text: 32"))
            assert draft["columns"].keys() == filled["columns"].keys()
            assert draft["columns"]["note"] == {"text": 128}
            Path("schema.yaml").write_text(yaml.safe_dump(filled, sort_keys=False))
        if line.split()[1] == "card":
            assert "given by `patient`" in result.stdout
    with Path("predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 9


#: Phrases that occur in no other place.
CANARIES = ("Zebraquark Mondlicht", "xylophonist 8461 Brückenpfeiler", "=HYPERLINK(0)")


def card() -> str:
    return Path("run/model-card.md").read_text()


def test_the_card_names_the_encoder_and_what_it_does_not_cover() -> None:
    table()
    Path("schema.yaml").write_text(SCHEMA.replace("text: 16", "text: 16, missing: input"))
    report = trained()
    text, public = card(), report["model"]["public_part"]
    assert public["sha256"] in text
    assert public["encoder"]["vocabulary_sha256"] in text
    assert "at most 16 tokens" in text
    assert (
        "- `note`, a text, of which the first 16 tokens are read; then 1 if it is missing" in text
    )
    assert "Predictions and cached features reveal texts" in text
    assert "epsilon does not include it" in text
    assert "the language and the texts that it was trained on are to be filled in" in text.lower()
    assert report["statement"]["data_domain"].startswith(
        "Labelled records with 1 text of at most 16"
    )
    assert public["backbone"] == "encoder"
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shutil.copy("run/model.safetensors", "model.safetensors")
    table("new.csv", 10, seed=1)
    names: dict[str, Any] = {}
    exec(block, names)
    expected = predict("run", "new.csv")
    assert names["predictions"].predicted == expected.predicted


def test_what_is_said_of_a_registered_encoder() -> None:
    kind = ENCODERS["minilm"]
    config = read_encoder("encoder").config
    encoder = TextEncoder("minilm", config, ((0, 128),))
    plan = resolve({"dataset": "digits"}).plan
    network = replace(plan.network, features=encoder, trained=Trained("head"))
    facts = replace(plan.data.facts, texts=encoder.texts)
    found = replace(plan.data.found, facts=facts)
    plan = replace(plan, network=network, data=replace(plan.data, found=found))
    case = sentences.Case(plan, spent(steps=1))
    said = sentences.text("public part", case)
    assert kind.about in said
    assert kind.language in said
    assert "Reddit" in said
    assert "S2ORC" in said
    assert "128 tokens" in said
    assert kind.licence in sentences.text("public", case)


@pytest.mark.privacy
def test_no_text_is_in_anything_that_is_written_or_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as it is, nor as tokens; of runs that end well, of runs that are refused, and of
    predictions.
    """
    monkeypatch.setenv("DPMAC_CACHE_DIR", str(Path("cache").absolute()))
    table()
    with Path("notes.csv").open("a", newline="") as file:
        write = csv.writer(file)
        for phrase in CANARIES * 3:
            write.writerow([f"{phrase} fever", 50, "home"])
    shutil.copy("notes.csv", "new.csv")
    common = ("--schema", "schema.yaml", "--backbone", "./encoder", "--device", "cpu")
    train = ("train", *common, "--sigma", "4", "--epochs", "2")
    said = dpmac(*train, "--dataset", "notes.csv", "--out", "run", "--debug").output
    said += dpmac("predict", "run", "new.csv", "--out", "answers.csv").output
    said += dpmac("eval", "run", "--json").output
    said += dpmac("report", "run", "--html", "report.html").output
    said += dpmac("card", "run").output
    moved = f"fever,{CANARIES[0]},home\n".encode()  # by a comma too many
    broken = (b'"unclosed', b"\xff\xfe,1,home\n", b" ,50,home\n", b"note,50,nowhere\n", moved)
    for bad in broken:
        content = Path("notes.csv").read_bytes()
        Path("bad.csv").write_bytes(content + bad)
        said += dpmac(*train, "--dataset", "bad.csv", "--out", "bad", "--debug").output
        said += dpmac(*train, "--dataset", "bad.csv", "--out", "left", "--skip-bad").output
        said += dpmac("predict", "run", "bad.csv", "--out", "no.csv").output
    folder = Path("folder/home")
    folder.mkdir(parents=True)
    for number, phrase in enumerate(CANARIES):
        (folder / f"{number}.txt").write_bytes(phrase.encode() + b"\xff" * (number == 0))
    (Path("folder/ward")).mkdir()
    said += dpmac("train", "--dataset", "folder", "--backbone", "./encoder").output
    spoilt: Any = [*CANARIES, None]
    given = ArrayData(spoilt, [0, 1, 0, 1])
    said += refused(given, tokens=16) + refused(given, backbone=None)
    for new in (spoilt, *CANARIES, CANARIES[0] * 100):
        with pytest.raises(InputError) as caught:
            predict("run", new)
        said += str(caught.value)
    said += "".join(capfd.readouterr())
    reader = read_encoder("encoder").reader(16)
    forms = [form.encode() for phrase in CANARIES for form in variants(phrase)]
    for tokens_of_one in reader.tokens(CANARIES, 16):
        ids = np.array(tokens_of_one[1:8])
        forms += [ids.astype(kind).tobytes() for kind in ("<i4", "<i8", "<f4", "<f8")]
        forms.append((ids / reader.scale).astype("<f4").tobytes())
    given_files = {"notes.csv", "new.csv", "bad.csv", "folder"}
    written = [
        path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in given_files
    ]
    assert {"run", "cache", "answers.csv", "report.html", "left"} <= {p.parts[0] for p in written}
    for where, content in [("said", said.encode()), *((p, p.read_bytes()) for p in written)]:
        assert [form for form in forms if form in content] == [], where


def variants(phrase: str) -> set[str]:
    """A phrase and its words, as they may be written."""
    words = {phrase, *re.findall(r"\w{6,}", phrase)}
    lower = {word.lower() for word in words}
    return {form for word in words | lower for form in (word, json.dumps(word)[1:-1], word[::-1])}
