"""Texts, from a column of notes to predictions for new ones."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpmac_cli import ArrayData, load
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.writing import WRITTEN, how_written
from dpmac_cli.data.texts import as_inputs
from dpmac_cli.errors import InputError
from dpmac_cli.features.class_names import NAME_SCALE
from dpmac_cli.features.texts import TextFeatures, encoder_weights
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release import scoring
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.runs.resolve import resolve
from tests.tiny_bert import (
    VOCABULARY,
    WIDTH,
    encoder_at,
    notes,
    text_inputs,
    tiny_reader,
    write_encoder,
)
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


def plan(dataset: str | InMemoryData = "notes.csv", **more: Any) -> Plan:
    if dataset == "notes.csv":
        more.setdefault("schema", "schema.yaml")
    return resolve({**SHORT, "dataset": dataset, **more}).plan


def trained(dataset: str | InMemoryData = "notes.csv", **more: Any) -> dict[str, Any]:
    """Train, and return the report."""
    return dict(finish(train_plan(plan(dataset, **more))).report)


def refused(dataset: str | InMemoryData = "notes.csv", **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        plan(dataset, **more)
    return str(caught.value)


def test_a_model_is_published_without_its_encoder_which_is_found_again() -> None:
    table()
    report = trained()
    assert Path("run", "model.safetensors").stat().st_size < 20_000
    table("new.csv", 10, seed=1)
    expected = load("run").predict("new.csv").probabilities
    Path("encoder").rename("elsewhere")
    with pytest.raises(InputError) as caught:
        load("run").predict("new.csv")
    assert "was trained on features of the public network encoder (SHA-256" in str(caught.value)
    assert "Add --public with the folder of its encoder" in str(caught.value)
    assert load("run", public="elsewhere").score().accuracy == report["scores"]["accuracy"]["value"]
    assert np.array_equal(
        load("run", public="elsewhere").predict("new.csv").probabilities, expected
    )


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_another_encoder_than_that_of_training_is_refused(name: str) -> None:
    table()
    trained()
    shutil.copytree("encoder", "other")
    file = Path("other", name)
    if name == "model.safetensors":
        tensors = load_file(file)
        save_file({key: tensor + 1e-6 for key, tensor in tensors.items()}, file)
    elif name == "tokenizer.json":
        file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    else:
        form = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(form | {"layer_norm_eps": 1e-3}), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        scoring.score(load("run", public="other").released)
    assert "was trained on" in str(caught.value)


@pytest.mark.promise("features")
def test_the_inputs_of_a_text_depend_on_that_text_alone() -> None:
    """For every kind of text, tokens and how it is written, in other company and another order."""
    reader = read_encoder("encoder").reader(16)
    together = as_inputs(TEXTS, reader)
    assert np.array_equal(as_inputs(TEXTS[::-1], reader)[::-1], together)
    for row, text in enumerate(TEXTS):
        assert np.array_equal(as_inputs([text], reader)[0], together[row])


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
        result = dpmac(*shlex.split(words, comments=True)[1:])
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


@pytest.mark.promise("published")
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
    train = ("train", *common, "--sigma", "4", "--steps", "2")
    said = dpmac(*train, "--dataset", "notes.csv", "--out", "run", "--debug").output
    said += dpmac("predict", "run", "new.csv", "--out", "answers.csv").output
    said += dpmac("eval", "run", "--json").output
    said += dpmac("report", "run", "--html", "report.html").output
    said += dpmac("card", "run").output
    moved = f"fever,{CANARIES[0]},home\n".encode()  # by a comma too many
    broken = (b"\xff\xfe,1,home\n", b" ,50,home\n", b"note,50,nowhere\n", moved, b'"unclosed')
    content = Path("notes.csv").read_bytes()
    for bad in (*broken, b"".join(broken)):
        Path("bad.csv").write_bytes(content + bad)
        said += dpmac(*train, "--dataset", "bad.csv", "--out", "bad", "--debug").output
        said += dpmac("predict", "run", "bad.csv", "--out", "no.csv").output
    said += dpmac(*train, "--dataset", "bad.csv", "--out", "left", "--skip-bad").output
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
            load("run").predict(new)
        said += str(caught.value)
    said += "".join(capfd.readouterr())
    reader = read_encoder("encoder").reader(16)
    forms = [form.encode() for phrase in CANARIES for form in variants(phrase)]
    for tokens_of_one in reader.tokens(CANARIES, 16):
        ids = np.array(tokens_of_one[1:8])
        forms += [ids.astype(kind).tobytes() for kind in ("<i4", "<i8", "<f4", "<f8")]
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


TINY = tiny_reader(40)


#: What people type, and what breaks tokenizers.
TEXTS = (
    *("", " ", "\t \n", "\0", "chest pain since 3 days", "No FEVER!", "café Ünïcode", "a" * 300),
    *("[SEP] [CLS] [PAD]", "##ain ##", "日本語 text", "emoji 🍦🤒", "שלום עולם", "مرحبا"),
    *("x" * 100, "x" * 101, "e\u0301\u0323", "soft\u00adhyphen", "zero\u200bwidth", "İstanbul"),
    *("$5.00 <b>&amp;</b>", "don't", "Σίσυφος", "ﬁne", "\ufffd?", "한국어", "\x85"),
    *("pain " * 5000, "line\u2028end"),
)


def tokens_of(text: str, limit: int = 40) -> list[str]:
    """Return tokens_of as text, without padding."""
    (row,) = TINY.tokens([text], limit)
    assert len(row) == limit
    used = len(row) - row.count(0)
    assert 0 not in row[:used]
    return [VOCABULARY[number - 1] for number in row[:used]]


def test_a_text_is_truncated_to_the_limit() -> None:
    assert tokens_of("pain " * 100, 5) == ["[CLS]", "pain", "pain", "pain", "[SEP]"]
    assert tokens_of("painful", 4) == ["[CLS]", "pain", "##f", "[SEP]"]
    assert tokens_of("pain", 3) == ["[CLS]", "pain", "[SEP]"]


@pytest.mark.promise("features")
def test_names_of_special_tokens_in_a_text_are_text() -> None:
    for name in ("[SEP]", "[CLS]", "[PAD]", "[UNK]"):
        inner = tokens_of(f"pain {name} fever")[1:-1]
        assert name not in inner
        assert inner[1] == "["
        assert inner.count("]") == 1


CLASS_NAMES_CLASSES = ("chest_pain", "mild-fever", "cough")


CLASS_NAMES_SHORT: dict[str, Any] = {
    **{"backbone": "./encoder", "sigma": 4.0, "batch_size": 10, "device": "cpu", "steps": 4},
    "tokens": 16,
}


def prepared(data: Any, seed: int = 0, **more: Any) -> PreparedRun:
    plan = resolve({**CLASS_NAMES_SHORT, "dataset": data, **more}).plan
    return prepare(plan, torch.device("cpu"), make_keys(seed))


def records(count: int = 60) -> ArrayData:
    texts = [text for text, _ in notes(count)]
    return ArrayData(texts, [row % 3 for row in range(count)], classes=CLASS_NAMES_CLASSES)


def vectors(texts: tuple[str, ...]) -> Tensor:
    """The encoder's vectors of texts, of norm 1."""
    encoder = encoder_at("encoder", (0, 16))
    features = TextFeatures(encoder)
    list(encoder_weights(encoder).adopted_by(features, None))
    found: Tensor = features(text_inputs("encoder", texts, 16))
    rows: Tensor = found[:, :WIDTH] / WIDTH**0.5
    return rows


def head_of(found: PreparedRun) -> nn.Linear:
    (layer,) = (
        part for part in found.model.get_submodule("head").modules() if type(part) is nn.Linear
    )
    return layer


@pytest.mark.parametrize("part", ["head", "lora"])
def test_a_head_begins_at_the_vectors_of_the_names(part: str) -> None:
    expected = vectors(("chest pain", "mild fever", "cough"))
    head = head_of(prepared(records(), train=part))
    own = NAME_SCALE * (expected - expected.mean(0))
    assert torch.allclose(head.weight[:, :WIDTH], own, atol=1e-6)
    assert not head.weight[:, WIDTH:].any()
    assert not head.bias.any()
    assert own.norm(dim=1).min() > 0.1


def test_what_all_names_have_in_common_is_removed_from_every_text() -> None:
    common = vectors(("chest pain", "mild fever", "cough")).mean(0)
    found = prepared(records())
    rows = found.data.train.at(slice(None))[0].flatten(1)[:, :WIDTH]
    texts = found.model.get_submodule("frozen")
    assert isinstance(texts, TextFeatures)
    assert torch.allclose(texts.joined.common, common / common.norm(), atol=1e-6)
    assert (rows @ texts.joined.common).abs().max() < 1e-4
    assert rows.norm(dim=1).min() > 0.5


@pytest.mark.promise("features")
def test_where_a_head_begins_depends_on_no_record_and_no_key() -> None:
    one, two = prepared(records()), prepared(records(40), seed=1)
    assert torch.equal(head_of(one).weight, head_of(two).weight)
    assert all(map(torch.equal, one.model.buffers(), two.model.buffers()))


# How texts are written, as inputs.

PROSE = "The patient came in on Monday, with a cough that had lasted for a week."


def test_ordinary_prose_is_near_zero() -> None:
    assert len(how_written(PROSE)) == WRITTEN
    assert max(map(abs, how_written(PROSE))) < 0.1


@pytest.mark.parametrize(
    ("place", "text"),
    [(0, "WIN A PRIZE"), (1, "call 0800 123"), (2, "now!!!"), (3, "£5 + $3")],
)
def test_each_number_is_of_one_property(place: int, text: str) -> None:
    assert how_written(text)[place] > how_written(PROSE)[place] + 0.3


@pytest.mark.promise("reading")
def test_numbers_are_within_bounds_and_of_one_text() -> None:
    """For every kind of text: empty, with other scripts, NUL, only spaces, 25,000 characters."""
    alone = [how_written(text) for text in TEXTS]
    assert [how_written(text) for text in reversed(TEXTS)] == alone[::-1]
    assert all(-1 <= value <= 1 for row in alone for value in row)


def test_padding_that_a_tokenizer_declares_is_no_text() -> None:
    plain, padding = tiny_reader(16), tiny_reader(16)
    padding.tokenizer.enable_padding(length=16)
    texts = ["pain", "pain in the chest"]
    assert padding.tokens(texts, 16) == plain.tokens(texts, 16)
    assert all(row[-1] == 0 for row in padding.tokens(texts, 16))
