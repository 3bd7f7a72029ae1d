"""Datasets of Hugging Face and data frames are passed as they are, and train in three lines."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image as Pillow

from dpmac_cli import load, make_private, train
from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.dataset import Dataset as Records
from dpmac_cli.data.read import read
from dpmac_cli.errors import InputError
from dpmac_cli.runs.resolve import resolve
from tests.tiny_bert import write_encoder

COUNT = 60
QUICK: dict[str, Any] = {"sigma": 4, "steps": 2, "batch_size": 8, "device": "cpu", "out": "run"}


# A stand-in for the library's classes, with their names and what they do.


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class ClassLabel:
    dtype = "int64"

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Image:
    dtype = "PIL.Image.Image"


class List:
    def __init__(self, feature: Value) -> None:
        self.feature = feature


class Dataset:
    """Rows of columns; values are tensors or lists of arrow unless the format is None."""

    def __init__(self, columns: Mapping[str, Any], features: Mapping[str, Any]) -> None:
        self._columns, self._features = dict(columns), dict(features)
        self._format: str | None = "torch"

    @property
    def features(self) -> dict[str, Any]:
        return self._features

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    def with_format(self, kind: str | None) -> Self:
        other = type(self)(self._columns, self._features)
        other._format = kind
        return other

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if self._format == "arrow":
            return pa.table(self._columns)[key]
        assert self._format is None, "values in a format of tensors were read"
        if isinstance(key, str):
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


class DatasetDict(dict[str, Dataset]):
    @property
    def column_names(self) -> dict[str, list[str]]:
        return {name: part.column_names for name, part in self.items()}

    def with_format(self, kind: str | None) -> "DatasetDict":
        return DatasetDict({name: part.with_format(kind) for name, part in self.items()})


CLASSES = ["well", "ill"]
TEXT = {"text": Value("string"), "label": ClassLabel(CLASSES), "idx": Value("int32")}


def texts(count: int = COUNT) -> Dataset:
    words = [f"a {'cat' if row % 2 else 'dog'} {'a ' * (row % 9)}" for row in range(count)]
    labels = [row % 2 for row in range(count)]
    return Dataset({"text": words, "label": labels, "idx": [*range(count)]}, TEXT)


def pictures(size: int = 8, *, mode: str = "L", count: int = COUNT) -> Dataset:
    images = [Pillow.new(mode, (size, size), row) for row in range(count)]
    of = {"image": Image(), "label": ClassLabel(CLASSES)}
    return Dataset({"image": images, "label": [row % 2 for row in range(count)]}, of)


def vectors() -> Dataset:
    x = np.random.default_rng(0).random((COUNT, 5)).tolist()
    of = {"embedding": List(Value("float32")), "label": ClassLabel(CLASSES)}
    return Dataset({"embedding": x, "label": [row % 2 for row in range(COUNT)]}, of)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records(dataset: Any, **settings: Any) -> Records:
    return read(Settings(dataset=dataset, **settings))


def test_a_dataset_of_texts_with_labels_trains_and_predicts(tmp_path: Path) -> None:
    """Classes are the names of its labels, and a column of numbers is none of its records."""
    encoder = str(write_encoder(tmp_path / "encoder"))
    run = train(dataset=texts(), backbone=encoder, tokens=16, **QUICK)
    assert run.report["data"]["classes"] == CLASSES
    assert run.report["data"]["name"] == "dataset"
    found = load("run").predict(texts(7))
    assert found.probabilities.shape == (7, 2)


def test_splits_are_those_of_the_dataset(tmp_path: Path) -> None:
    parts = DatasetDict(train=pictures(), validation=pictures(count=9), test=pictures(count=20))
    data = records(parts)
    assert (data.facts.train_size, data.facts.test_size, data.facts.held_out) == (60, 20, False)
    assert data.train.x[7, 0].tolist() == [[7] * 8] * 8
    with pytest.raises(InputError, match="has the splits a, but none is train"):
        records(DatasetDict(a=pictures()))


def test_images_are_converted_like_those_of_a_folder() -> None:
    data = records(pictures())
    assert data.facts.records.shape == (1, 8, 8)
    assert data.facts.inferred == ("channels", "image size")
    assert data.train.x.dtype == np.uint8
    colour = records(pictures(mode="RGB"), image_size=4, channels="3")
    assert (colour.facts.records.shape, colour.facts.inferred) == ((3, 4, 4), ())
    mixed = Dataset(
        {
            "image": [Pillow.new("L", (8 + row % 2, 8)) for row in range(COUNT)],
            "label": [row % 2 for row in range(COUNT)],
        },
        pictures().features,
    )
    with pytest.raises(
        InputError, match=r"2 sizes: 8x8 \(0 of x\) and 8x9 \(1 of x\). Add --image-size N"
    ):
        records(mixed)
    assert records(mixed, image_size=8).facts.records.shape == (1, 8, 8)


def test_vectors_need_a_public_range() -> None:
    data = records(vectors(), feature_range="0,1")
    assert data.train.x.shape[1:] == (5,)
    with pytest.raises(InputError, match="rows of numbers need a public range"):
        records(vectors())


def test_what_no_dataset_can_be_read_as_is_said() -> None:
    two = {**TEXT, "other": Value("string")}
    full = {**texts()._columns, "other": ["a"] * COUNT}
    with pytest.raises(InputError, match="the columns text, other of texts, images or vectors"):
        records(Dataset(full, two))
    unlabelled = Dataset({"text": ["a"] * COUNT}, {"text": Value("string")})
    with pytest.raises(InputError, match="has no column of classes"):
        records(unlabelled)
    with pytest.raises(InputError, match="Add an encoder"):
        records(texts())
    missing = pictures()
    missing._columns["image"][3] = None
    with pytest.raises(InputError, match=r"Record 3 of x is missing. Leave them out with"):
        records(missing)


@pytest.mark.promise("published")
def test_what_a_decoder_says_of_a_record_is_not_repeated() -> None:
    class Damaged(Pillow.Image):
        """An image that is decoded when it is used."""

        def load(self) -> Any:
            raise ValueError("the pixels 1 2 3")

    class Column(list[Any]):
        """Values that are decoded one by one."""

        def __iter__(self) -> Iterator[Any]:
            yield from self[:3]
            raise OSError("the pixels 1 2 3")

    image = Damaged()
    image._mode, image._size = "L", (8, 8)
    for found, said in (
        ([image, *pictures()._columns["image"][1:]], "Record 0 of x cannot be read as an image"),
        ([{"bytes": b"pixels"}] * COUNT, "Record 0 of x is not decoded: use dataset.cast_column"),
        (Column(pictures()._columns["image"]), r"Record 3 of the column image cannot .*OSError\)"),
    ):
        dataset = Dataset({**pictures()._columns, "image": found}, pictures().features)
        with pytest.raises(InputError, match=said) as caught:
            records(dataset, channels="1", image_size=8)
        assert "pixels" not in str(caught.value)


def test_all_splits_need_the_columns() -> None:
    with pytest.raises(InputError, match="There is no column image"):
        records(DatasetDict(train=pictures(), test=vectors()))
    with pytest.raises(InputError, match="There is no column who"):
        records(pictures(), unit="who")


@pytest.mark.promise("unit")
@pytest.mark.parametrize("unit", [1.5, 1e16, float("inf"), [1], None, float("nan")])
def test_units_are_exact(unit: Any) -> None:
    """Or those of two persons may be one."""
    persons = [unit, *(float(row // 3) for row in range(1, COUNT))]
    of = {**pictures().features, "person": Value("float64")}
    with pytest.raises(InputError, match=r"record 0 of x has (no unit|a unit that is no whole)"):
        records(Dataset({**pictures()._columns, "person": persons}, of), unit="person")


@pytest.mark.promise("unit")
@pytest.mark.parametrize(("kind", "limit"), [("float32", 2**24), ("float16", 2**11)])
def test_units_have_the_precision_of_their_column(kind: str, limit: int) -> None:
    """A value is decoded as a float of Python, which seems exact."""
    of = {**pictures().features, "person": Value(kind)}
    for first, is_exact in ((0, True), (limit - 10, False)):
        persons = np.arange(first, first + COUNT).astype(kind).tolist()
        data = Dataset({**pictures()._columns, "person": persons}, of)
        if is_exact:
            facts = records(data, unit="person").facts
            assert facts.train_size + facts.test_size == COUNT
            continue
        with pytest.raises(InputError, match="no whole number that its type stores exactly"):
            records(data, unit="person")


@pytest.mark.promise("unit")
def test_units_are_those_of_a_column() -> None:
    of = {**pictures().features, "person": Value("string")}
    persons = [f"p{row // 3}" for row in range(COUNT)]
    data = records(Dataset({**pictures()._columns, "person": persons}, of), unit="person")
    assert data.facts.train_size + data.facts.test_size == COUNT // 3
    train, test = data.splits
    assert not {*np.array(train.unit)} & {*np.array(test.unit)}


SCHEMA = """
label: {column: sick, classes: [no, yes]}
columns:
  age: {range: [0, 100]}
  ward: {categories: [north, south]}
"""


def columns() -> dict[str, Any]:
    return {
        "age": [row % 90 for row in range(COUNT)],
        "ward": [("north", "south")[row % 3 == 0] for row in range(COUNT)],
        "sick": [("no", "yes")[row % 2] for row in range(COUNT)],
    }


FRAMES: dict[str, Any] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
    "Hugging Face": lambda of: Dataset(of, {name: Value("string") for name in of}),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_table_in_memory_trains_and_predicts_with_its_schema(kind: str) -> None:
    """All hold the same records on the same side."""
    Path("schema.yaml").write_text(SCHEMA)
    pd.DataFrame(columns()).to_csv("table.csv", index=False)
    frame = FRAMES[kind](columns())
    run = train(dataset=frame, schema="schema.yaml", **QUICK)
    assert run.report["data"]["train_size"] + run.report["data"]["test_size"] == COUNT
    filed = records("table.csv", schema="schema.yaml")
    held = records(frame, schema="schema.yaml")
    for one, other in zip(held.splits, filed.splits, strict=True):
        assert np.array_equal(one.x, other.x)
    assert np.array_equal(
        load("run").predict(frame).answers, load("run").predict("table.csv").answers
    )


def test_a_frame_needs_a_schema_and_may_have_any_column() -> None:
    with pytest.raises(InputError, match="<table> needs a schema that declares its columns"):
        resolve(dataset=pd.DataFrame(columns()), **QUICK)
    odd = pd.DataFrame({**columns(), "features": 1, "column_names": 2, "with_format": 3})
    Path("schema.yaml").write_text(f"{SCHEMA}drop: [features, column_names, with_format]\n")
    assert resolve(dataset=odd, schema="schema.yaml", **QUICK).plan.facts.name == "table"


@pytest.mark.promise("published")
def test_what_a_frame_says_of_a_cell_is_not_repeated() -> None:
    class Frame:
        columns, dtypes = ("age",), ("strange",)

        def __getitem__(self, name: str) -> Any:
            raise ValueError("cannot convert the cell 1 2 3")

    Path("schema.yaml").write_text(SCHEMA)
    with pytest.raises(InputError, match=r"cannot be read as a table: .*ValueError") as caught:
        records(InMemoryData(Path("<table>"), frame=Frame()), schema="schema.yaml")
    assert "1 2 3" not in str(caught.value)
    twice = pd.DataFrame([[1, 2]], columns=["age", "age"])
    with pytest.raises(InputError, match="DataFrame has several columns named 'age'"):
        records(twice, schema="schema.yaml")


def test_a_network_of_a_program_takes_a_dataset() -> None:
    import torch  # noqa: PLC0415

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    settings = {name: QUICK[name] for name in ("sigma", "steps", "batch_size", "device")}
    assert make_private(net, pictures(), **settings).step() == 1


@pytest.mark.promise("alone")
def test_a_network_trains_on_the_loss_that_it_returns() -> None:
    """Each record alone has the gradient of its own loss, and counts once."""
    import torch  # noqa: PLC0415
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    from dpmac_cli import Poisson, PrivateStep, clipped_grad  # noqa: PLC0415
    from dpmac_cli.dp.mechanism import ball  # noqa: PLC0415

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=30, intermediate_size=32, num_labels=3, **size)
    network = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 30, (9, 8))
    ids[:4, 5:] = 0
    mask, labels = (ids > 0).long(), torch.arange(9) % 3
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def loss(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    def losses(model: Any, batch: Any) -> Any:
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    where = ball(1.0, torch.zeros(sum(p.numel() for p in network.parameters())))
    total = clipped_grad(deepcopy(network), loss, where, batch_size=9)(batch)
    expected = clipped_grad(deepcopy(network), losses, where, batch_size=9)(batch)
    assert total.allclose(expected, atol=1e-5)
    assert 0 < float(total.norm()) <= 9

    class Texts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            return {name: values[index] for name, values in batch.items()}

    assert network.config.problem_type is None
    sampling = Poisson(n=9, batch_size=4)
    step = PrivateStep(network.train(), loss, sampling=sampling, sigma=2, steps=4)
    for drawn in step.loader(Texts()):
        step(drawn)
    assert (step.taken, step.notes) == (4, ())


def test_a_model_of_a_table_takes_no_array() -> None:
    Path("schema.yaml").write_text(SCHEMA)
    train(dataset=pd.DataFrame(columns()), schema="schema.yaml", **QUICK)
    with pytest.raises(InputError, match="which was trained on a table"):
        load("run").predict(np.zeros((3, 4)))
    with pytest.raises(InputError, match="which was trained on a table"):
        load("run").predict(["a text"])
