"""A folder of images or an .npz becomes a data set, and what cannot become one is explained."""

import random
import shutil
import traceback
from collections import Counter
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import dpmac_cli
from dpmac_cli import ArrayData, InputError, from_dataframe, from_torch
from dpmac_cli.config.facts import DataFacts
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.image_folder import _white
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.units import NO_NAME, UNUSABLE, units_in
from dpmac_cli.runs.resolve import resolve
from tests.helpers import declared, inspect, load, records_of
from tests.test_every_reader import Listed, seen

CLASSES = ("cat", "dog", "eel")


def picture(path: Path, value: int, size: tuple[int, int] = (8, 6), mode: str = "L") -> None:
    """An image of one grey, ``size`` wide and high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


def folder(root: Path, records: int = 4, **options: Any) -> Path:
    """Images whose grey tells class and number."""
    for label, name in enumerate(CLASSES):
        for number in range(records):
            picture(root / name / f"{number}.png", 10 * label + number, **options)
    return root


def table(path: Path, **arrays: Any) -> Path:
    """Six records of three classes; arrays of None are left out."""
    full = {
        "x": np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5),
        "y": np.array([0, 1, 2, 0, 1, 2]),
        **arrays,
    }
    np.savez(path, **{name: array for name, array in full.items() if array is not None})
    return path


def refused(path: Path, **options: Any) -> str:
    """What is said of data that cannot be used."""
    with pytest.raises(InputError) as failure:
        load(declared(path, **options))
    return str(failure.value)


def described(found: DataFacts) -> tuple[int, int, tuple[int, ...], tuple[str, ...]]:
    facts = found
    return facts.train_size, facts.test_size, facts.records.shape, facts.task.names


@pytest.mark.promise("reading")
def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    folder(tmp_path / "train", 4)
    folder(tmp_path / "test", 2)
    source = declared(tmp_path)
    found = inspect(source)
    assert described(found) == (12, 6, (1, 6, 8), CLASSES)
    assert not found.held_out
    (x, y), (x_test, y_test) = load(source)
    assert x.shape == (12, 1, 6, 8)
    assert x.dtype == np.uint8
    assert y.dtype == np.int64
    assert y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert x[:, 0, 3, 3].tolist() == [10 * label + i for label in range(3) for i in range(4)]
    assert x_test[:, 0, 0, 0].tolist() == [0, 1, 10, 11, 20, 21]
    assert y_test.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.promise("reading")
def test_of_equal_rows_one_less_is_one_less_on_one_side(tmp_path: Path) -> None:
    x = np.repeat(np.arange(40) % 2, 20).reshape(40, 4, 5).astype(np.uint8)
    y = np.arange(40) // 2 % 3

    def counts(name: str, kept: list[int]) -> tuple[Counter[Any], Counter[Any]]:
        file = table(tmp_path / f"{name}.npz", x=x[kept], y=y[kept])
        (x0, y0), (x1, y1) = load(declared(file, test_fraction=0.3))
        train, test = (zip(x[:, 0, 0, 0], y, strict=True) for x, y in ((x0, y0), (x1, y1)))
        return Counter(train), Counter(test)

    train, test = counts("all", list(range(40)))
    assert len(train) > 2
    assert len(test) > 2
    for gone in range(40):
        fewer = counts(str(gone), [row for row in range(40) if row != gone])
        lost = train - fewer[0], test - fewer[1]
        assert lost[0] + lost[1] == Counter([(x[gone, 0, 0], y[gone])])
        assert not fewer[0] - train
        assert not fewer[1] - test


DEEP = np.array([[0, 128, 129, 257], [32896, 55746, 65278, 65535]], np.uint16)


SHALLOW = [[0, 0, 1, 1], [128, 217, 254, 255]]  # 65535 is 255, to the nearest


def deep(path: Path) -> None:
    """A grey image with 16 bits a pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pgm":
        path.write_bytes(b"P5 4 2 65535\n" + DEEP.astype(">u2").tobytes())
    else:
        Image.fromarray(DEEP).save(path)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("colour", [False, True])
def test_sixteen_bits_become_eight_by_the_range_of_the_format(
    tmp_path: Path, suffix: str, colour: bool
) -> None:
    folder(tmp_path, 5, size=(4, 2))
    deep(tmp_path / "cat" / f"deep.{suffix}")
    if colour:
        picture(tmp_path / "dog" / "9.png", 200, (4, 2), mode="RGB")
    for source in (declared(tmp_path), declared(tmp_path, skip_bad=True)):
        assert inspect(source).records.shape == (3 if colour else 1, 2, 4)
        (x, _), (x_test, _) = load(source)
        assert SHALLOW in [plane for image in (*x.tolist(), *x_test.tolist()) for plane in image]


def test_an_npz_of_images_in_any_order_of_axes(tmp_path: Path) -> None:
    last = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), np.uint8)
    first = last.transpose(0, 3, 1, 2)
    for x in (last, first):
        tests = {"x_test": x[:2], "y_test": np.array([2, 0])}
        source = declared(table(tmp_path / "t.npz", x=x, **tests))
        assert described(inspect(source)) == (6, 2, (3, 4, 5), ("0", "1", "2"))
        (images, labels), (test_images, test_labels) = load(source)
        assert np.array_equal(images, first)
        assert np.array_equal(test_images, first[:2])
        assert (labels.tolist(), test_labels.tolist()) == ([0, 1, 2, 0, 1, 2], [2, 0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_test": np.zeros((1, 4, 5), np.uint8)}, "must both be given"),
        ({"y": np.full(6, 0.5)}, "a label that is no whole number from 0"),
        ({"y": np.arange(5)}, "6 records, and y has 5 labels"),
        ({"classes": np.array(["a", "b"])}, "contains the label 2 (there are 2 classes"),
        ({"classes": np.array(["a", "\x1b[31mb", "c"])}, "'\\x1b[31mb' contains characters that"),
        ({"classes": np.array(["a", "a", "b"])}, "has 2 classes a. Class names must be unique"),
        ({"x": np.zeros((6, 4, 5), np.uint16)}, "(x / 257).astype('uint8') for 16 bits"),
        ({"x": np.zeros((6, 4, 5, 2), np.uint8)}, "1 or 3 channels"),
        ({"x": np.array([[np.nan], *[[0.0]] * 5])}, "NaN or infinity in 1 record"),
        ({"x": np.zeros((6, 2)), "low": np.ones(2), "high": np.array([2, 1 + 1e-9])}, "1 of 2 col"),
        ({"y": np.array([0, 2**63] * 3, np.uint64)}, f"the label {2**63}, but no 1"),
        ({"x": np.zeros((0, 4, 5), np.uint8), "y": np.zeros(0, np.int64)}, "there are no records"),
        (
            {"x_test": np.zeros((1, 4, 5), np.uint8), "y_test": np.array([7])},
            "y_test contains the label 7, which is not in y",
        ),
        (
            {"x_test": np.zeros((1, 4, 6), np.uint8), "y_test": np.array([1])},
            "x_test has records of shape (4, 6)",
        ),
        ({"x": np.array([object()] * 6)}, "cannot be read as an .npz of plain arrays"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_no_data_set(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    assert message in refused(table(tmp_path / "d.npz", **arrays))


@pytest.mark.promise("reading")
def test_labels_may_be_names_of_declared_classes(tmp_path: Path) -> None:
    names = np.array(["cow", "cat", "dog", "cat", "cow", "dog"])
    path = table(
        tmp_path / "d.npz", y=names, x_test=np.zeros((2, 4, 5), np.uint8), y_test=names[:2]
    )
    assert "y contains names. Declare them as class names: --classes cat,cow,dog" in refused(path)
    many = table(tmp_path / "many.npz", y=np.array(list("fedcba")))
    assert refused(many).endswith("--classes a,b,c,d,e,....")  # no command that leaves one out
    train, test = load(declared(path, classes=("cow", "dog", "cat")))
    assert train[1].tolist() == [0, 2, 1, 2, 0, 1]
    assert test[1].tolist() == [0, 2]
    assert "no name of --classes" in refused(path, classes=("cow", "dog"))


@pytest.mark.promise("reading")
def test_declared_channels_alone_hold_whatever_the_images_are(tmp_path: Path) -> None:
    source = declared(folder(tmp_path), channels=1, classes=CLASSES)
    before = inspect(source).records.shape
    picture(tmp_path / "cat" / "odd.png", 3, mode="RGB")
    assert inspect(source).records.shape == before == (1, 6, 8)


@pytest.mark.promise("reading")
@pytest.mark.parametrize("parts", [("train", "test"), (".",)])
def test_a_declared_class_needs_no_records(tmp_path: Path, parts: tuple[str, ...]) -> None:
    root = tmp_path / "photos"
    for part in parts:
        folder(root / part, 6)
        for file in (root / part / "cat").iterdir():
            file.unlink()
    source = declared(root, 0.5, channels=1, image_size=8, classes=CLASSES)
    for _ in range(2):
        facts = inspect(source)
        assert facts.task.names == CLASSES
        assert facts.train_size + facts.test_size == 12 * len(parts)
        assert {1, 2} == {int(label) for _, y in load(source) for label in y}
        for part in parts:
            shutil.rmtree(root / part / "cat", ignore_errors=True)
    one = declared(folder(tmp_path / "1", 1), test_fraction=0.5, split_seed=1, classes=CLASSES)
    assert inspect(one).train_size == 2  # all of the class cat are held out


COUNT, BAD_RECORDS_CLASSES = 60, ("a", "b")


def parts(source: Declaration) -> Any:
    return records_of(source)


@pytest.mark.promise("reading")
def test_units_that_floats_merged_are_refused(tmp_path: Path) -> None:
    """200 persons whose 64-bit ids were stored as doubles would be 156 units."""
    label = {"column": "y", "classes": [*BAD_RECORDS_CLASSES]}
    schema = schema_of({"label": label, "columns": {"age": {"range": [0, 100]}}}, "schema")

    def facts_of(units: pa.Array) -> Any:
        rows = range(len(units))
        ages, kinds = [n % 100 for n in rows], [BAD_RECORDS_CLASSES[n % 2] for n in rows]
        parquet.write_table(
            pa.table({"unit": units, "age": ages, "y": kinds}), tmp_path / "t.parquet"
        )
        return inspect(declared(tmp_path / "t.parquet", schema=schema, unit="unit"))

    ids = pa.array([2**60 + 200 * n for n in range(200)])
    merged = ids.cast(pa.float64(), safe=False)
    assert len(set(merged.to_pylist())) == 156
    with pytest.raises(InputError, match=r"no whole number that its type stores exactly.*as text"):
        facts_of(merged)
    facts = facts_of(ids)
    assert facts.train_size + facts.test_size == 200
    with pytest.raises(InputError, match="no whole number"):
        facts_of(pa.array([n + 0.5 for n in range(20)]))
    halves = np.arange(2000, 2100).astype(np.float16)
    assert len(set(halves.tolist())) == 75
    with pytest.raises(InputError, match="no whole number"):
        facts_of(pa.array(halves))


@pytest.mark.promise("reading")
def test_a_missing_value_does_not_change_the_categories_of_others() -> None:
    """Integers become floats, of which 0 may print as -0 and others with exponents."""
    schema = schema_of(
        {
            "label": {"column": "y", "classes": ["10000000000", "20000000000"]},
            "columns": {"k": {"categories": ["30000000000", "0"], "missing": "input"}},
        },
        "schema",
    )
    frame = pd.DataFrame({"k": [3 * 10**10, 0] * 20, "y": [10**10, 2 * 10**10] * 20})
    found = []
    missing = pd.DataFrame({"k": [np.nan], "y": [np.nan]})
    for more in (frame, pd.concat([frame, missing])):
        assert more["k"].dtype == (float if len(more) > len(frame) else int)
        in_memory = from_dataframe(more, schema)
        source = declared(in_memory.path, schema=schema, in_memory=in_memory, skip_bad=True)
        found.append(seen(source))
    assert found[0][1] == found[1][1]
    assert found[1][2] == 1


def numbers(count: int = COUNT) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 10, (count, 3))
    return x, np.arange(count) % 2, np.arange(count) // 2 + 10**10


def arrays(x: Any, y: Any, unit: Any = None, **more: Any) -> Declaration:
    in_memory = ArrayData(x, y, unit=unit, classes=BAD_RECORDS_CLASSES, low=0, high=9)
    return declared(in_memory.path, in_memory=in_memory, **more)


@pytest.mark.promise("reading")
@pytest.mark.parametrize("by_unit", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        ("f8", "i8", "i8"), ("f4", "i4", "f8"), (">f8", ">i8", ">i8"), ("i4", "u1", "U30"),
        ("u1", "f8", "U11"), ("f2", "f4", "S20"), ("i8", "i8", "O"),
    ],
)  # fmt: skip
def test_the_split_does_not_depend_on_the_types_of_arrays(
    kinds: tuple[str, str, str], by_unit: bool
) -> None:
    x, y, unit = numbers()
    units = (unit, unit.astype(kinds[2])) if by_unit else (None, None)
    plain = seen(arrays(x, y, units[0]))
    other = seen(arrays(x.astype(kinds[0]), y.astype(kinds[1]), units[1]))
    assert plain[1] == other[1]
    assert plain[0] == other[0]


@pytest.mark.promise("reading")
def test_names_of_units_do_not_depend_on_a_type_that_they_had_in_between() -> None:
    """As in a CSV that was written from a column of floats."""
    texts = [
        "17",
        "17.0",
        "17.",
        "-3.00",
        "+4.0",
        "017",
        "1e5",
        "1.50",
        "a.0",
        "Nat",
        "9007199254740993.0",
        "1.23457E+15",
        "1,2e+16",
        "p1\0",
    ]
    names = ["17", "17", "17", "-3", "4", "017", "1e5", "1.50", "a.0", "Nat", "", "", "", ""]
    found, faults = units_in(texts)
    assert found.tolist() == names
    assert list(faults) == [10, 11, 12, 13]
    assert set(faults.values()) == {UNUSABLE}
    values: list[Any] = [17, 17.0, np.float32(17), Decimal("17.00"), b"17", np.int8(17), " 17 "]
    assert set(units_in(values)[0].tolist()) == {"17"}
    unknown: list[Any] = [None, float("nan"), "NA", "", np.float32(2**24), 0.5, float("inf"), []]
    assert len(units_in(unknown)[1]) == len(unknown)
    assert set(units_in([None, pd.NA, pd.NaT, np.nan])[1].values()) == {NO_NAME}
    assert set(units_in([uuid4(), (1, 2), b"\xff"])[1].values()) == {UNUSABLE}


def floats() -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.rand(3, generator=draws), n % 2) for n in range(COUNT)]


def from_items(items: list[Any]) -> Declaration:
    in_memory = from_torch(Listed(items), classes=BAD_RECORDS_CLASSES, low=0, high=1)
    return declared(in_memory.path, in_memory=in_memory)


@pytest.mark.promise("published")
@pytest.mark.parametrize("all_bad", [False, True])
def test_no_message_quotes_what_a_dataset_says_of_a_sample(all_bad: bool) -> None:
    secret = ValueError("could not convert string to float: 'Frau Meier'")
    items = [secret] * COUNT if all_bad else [*floats(), secret]
    with pytest.raises(InputError) as caught:
        inspect(from_items(items))
    said = "".join(traceback.format_exception(caught.value))
    assert "Meier" not in said.replace(repr(secret), "")
    assert "(ValueError at test_every_reader.py, line " in str(caught.value)


@pytest.mark.promise("reading")
def test_a_first_record_of_integers_truncates_no_other() -> None:
    added = (torch.tensor([0, 1, 1]), 0)
    plain = seen(from_items(floats()))[1]
    worse = seen(from_items([added, *floats()]))[1]
    assert all(one <= other for one, other in zip(plain, worse, strict=True))
    undeclared = from_torch(Listed([added, *floats()]), low=0, high=1).arrays
    assert undeclared is not None
    assert undeclared["x"].dtype == np.float32
    assert np.allclose(undeclared["x"][1], floats()[0][0])


class Reusing(Listed):
    """Writes every record and every label to the same memory."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.memory = torch.zeros(3), torch.zeros(2, dtype=torch.long)

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        self.memory[0].copy_(x)
        self.memory[1].copy_(torch.tensor([label, 1 - label]))
        return self.memory


@pytest.mark.promise("reading")
def test_samples_in_the_same_memory_are_records_of_their_own() -> None:
    """Otherwise the last label would be that of all records."""
    arrays = from_torch(Reusing(floats()), low=0, high=1).arrays
    assert arrays is not None
    assert arrays["y"].tolist() == [[label, 1 - label] for _, label in floats()]
    assert np.allclose(arrays["x"], torch.stack([x for x, _ in floats()]))


class Turned(Listed):
    """Has a random transform."""

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x * torch.rand(3) * np.random.rand() * random.random(), label


@pytest.mark.promise("reading")
def test_random_transforms_of_samples_are_secret() -> None:
    """A record more shifts the draws of the others, which nobody may be able to repeat."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        arrays = from_torch(Turned(floats()), low=0, high=1).arrays
        assert arrays is not None
        found.append((arrays["x"], torch.rand(1), np.random.rand(), random.random()))
    (one, *after), (other, *again) = found
    assert not (one == other).any()
    assert after == again, "the program's own random numbers"


def repeating(whole: TensorDataset) -> dict[str, Any]:
    """Datasets that have records of another one several times."""
    numbers = list(range(40))
    return {
        "subset": Subset(whole, numbers * 3),
        "counted from the end": Subset(whole, [*numbers, -1, -40]),
        "concatenated": ConcatDataset([Subset(whole, range(30)), whole]),
        "added": whole + whole + whole,
        "nested": Subset(Subset(whole, [*range(40), 1, 2]), range(42)),
    }


class Read(Dataset[Any]):
    """Reads another dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pytest.mark.promise("reading")
@pytest.mark.parametrize(
    "kind", ["subset", "counted from the end", "concatenated", "added", "nested"]
)
def test_a_subset_that_repeats_records_is_refused_unless_its_units_are_named(kind: str) -> None:
    whole = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    repeated = repeating(whole)[kind]
    known: dict[str, Any] = {"low": 0, "high": 1, "classes": BAD_RECORDS_CLASSES}
    copies = len(repeated) - 40
    for unit in (None, [f"copy {row}" for row in range(len(repeated))]):
        with pytest.raises(InputError, match=f"40 different records, and {copies} copies.*unit="):
            from_torch(repeated, unit=unit, **known)
    resolved = resolve(dataset=from_torch(repeated, unit="record", **known), sigma=4)
    assert resolved.plan.facts.train_size + len(set(plan_units(resolved))) == 40
    assert not [note for note in resolve(dataset=from_torch(whole, **known), sigma=4).private_notes
                if "copies" in note]  # fmt: skip


def test_copies_in_other_datasets_are_other_records_and_counted_in_a_note() -> None:
    whole = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    known: dict[str, Any] = {"low": 0, "high": 1, "classes": BAD_RECORDS_CLASSES}
    read = from_torch(Read(Subset(whole, [*range(40), 1, 2])), **known)
    notes = " ".join(resolve(dataset=read, sigma=4).private_notes)
    assert "2 records of <arrays> are exact copies of others" in notes


@pytest.mark.promise("reading")
def test_records_that_are_trained_on_are_not_tested_on() -> None:
    whole = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    known: dict[str, Any] = {"low": 0, "high": 1, "classes": BAD_RECORDS_CLASSES}
    first, last = Subset(whole, range(30)), Subset(whole, range(25, 40))
    for unit in (None, "record"):
        with pytest.raises(InputError, match="5 records are both in the training set and in"):
            from_torch(first, last, unit=unit, **known)
    apart = from_torch(first, Subset(whole, range(30, 40)), unit="record", **known)
    assert resolve(dataset=apart, sigma=4).plan.facts.train_size == 30


def plan_units(resolved: Any) -> list[str]:
    return list(resolved.data.test.unit.tolist())


@pytest.mark.promise("published")
def test_copies_are_remarked_on_and_not_published() -> None:
    x, y, _ = numbers()
    x = np.random.default_rng(0).random((20, 3))
    drawn = [n % 20 for n in range(60)]
    source: dict[str, Any] = {"low": 0, "high": 1, "classes": BAD_RECORDS_CLASSES}
    given = resolve(dataset=ArrayData(x[drawn], y[drawn], **source), sigma=4)
    assert given.data is not None
    assert given.data.notes.copies == 40
    (note,) = [note for note in given.private_notes if "copies" in note]
    assert "40 records of <arrays> are exact copies" in note
    assert "name the unit of each record" in note
    named = ArrayData(x[drawn], y[drawn], unit=drawn, **source)
    assert not resolve(dataset=named, sigma=4).private_notes


CORNERS = np.array([[[10, 20], [30, 40], [50, 60]]], np.uint8)[0]


def turned(path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(CORNERS).save(path, exif=exif)


#: What EXIF says of each value: the picture as it is to be seen.
UPRIGHT = {
    1: CORNERS, 2: CORNERS[:, ::-1], 3: CORNERS[::-1, ::-1], 4: CORNERS[::-1],
    5: CORNERS.T, 6: CORNERS[::-1].T, 7: CORNERS[::-1, ::-1].T, 8: CORNERS[:, ::-1].T,
}  # fmt: skip


@pytest.mark.parametrize("form", ["png", "tiff"])
@pytest.mark.parametrize("orientations", [(1, 2, 3, 4), (5, 6, 7, 8)])
def test_images_are_upright_as_their_exif_says(
    tmp_path: Path, form: str, orientations: tuple[int, ...]
) -> None:
    for number in range(40):
        place = tmp_path / BAD_RECORDS_CLASSES[number % 2] / f"{number:02}.{form}"
        place.parent.mkdir(exist_ok=True)
        turned(place, orientations[number // 2 % 4])
    expected = {UPRIGHT[orientation].tobytes(): 10 for orientation in orientations}
    for source in (declared(tmp_path), declared(tmp_path, skip_bad=True)):
        assert inspect(source).records.shape == (1, *UPRIGHT[orientations[0]].shape)
        assert Counter(image.tobytes() for x, _ in load(source) for image in x) == expected


def deep_of_bad_records(path: Path, top: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(0, top, 48).reshape(6, 8).astype(np.uint16)
    Image.fromarray(ramp).save(path)


def test_scans_of_twelve_bits_are_scaled_on_request(tmp_path: Path) -> None:
    for number in range(10):
        deep_of_bad_records(tmp_path / BAD_RECORDS_CLASSES[number % 2] / f"{number}.png", 4095)
    settings: dict[str, Any] = {"dataset": str(tmp_path), "sigma": 4, "batch_size": 2}
    (x, _), _ = load(declared(tmp_path))
    assert x.max() == 16
    source = declared(tmp_path, levels=4095)
    assert resolve(settings, levels=4095).plan.facts == inspect(source)
    (x, _), _ = load(source)
    assert x.max() == 255
    assert x[0, 0, 3, 0] == round(255 * int(4095 * 24 / 47) / 4095)
    deep_of_bad_records(tmp_path / "a" / "brighter.png", 65535)  # clipped to the public range
    (x, _), (more, _) = load(source)
    assert max(x.max(), more.max()) == 255


@pytest.mark.promise("reading")
@pytest.mark.parametrize("place", ["", "_test"])
def test_a_unit_on_both_sides_keeps_its_test_records(place: str) -> None:
    x, y, unit = numbers()
    sides: dict[str, Any] = {"x": x[:40], "y": y[:40], "unit": unit[:40]}
    sides |= {"x_test": x[40:], "y_test": y[40:], "unit_test": unit[40:]}

    def source(**more: Any) -> Declaration:
        in_memory = ArrayData(**{**sides, **more}, classes=BAD_RECORDS_CLASSES, low=0, high=9)
        return declared(in_memory.path, in_memory=in_memory, skip_bad=True)

    before = seen(source())
    other = unit[40] if place == "" else unit[0]
    added = {"x": [[1, 2, 3]], "y": [0], "unit": [other]}
    more = {f"{n}{place}": np.concatenate([sides[f"{n}{place}"], v]) for n, v in added.items()}
    after = seen(source(**more))
    own_records = {record for side in (*before[1], *after[1]) for record in side}
    own_records = {record for record in own_records if record[2] == str(other)}
    for one, two in zip(before[1], after[1], strict=True):
        assert {*one} - own_records == {*two} - own_records
    owned = [{record[2] for record in side} for side in after[1]]
    assert not owned[0] & owned[1]
    assert str(other) in owned[1]


QUICK = {"sigma": 4, "epochs": 2, "batch_size": 32, "model": "mlp", "seed": 1}


def rows(count: int = 200) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count)
    return rng.random((count, 5)) + y[:, None], y


def test_arrays_are_what_their_file_is(tmp_path: Path) -> None:
    x, y = rows()
    np.savez(tmp_path / "table.npz", x=x, y=y, low=np.zeros(5), high=np.full(5, 2.0))
    in_memory = ArrayData(x, y, low=[0.0] * 5, high=[2.0] * 5)
    filed, held = (
        seen(declared(tmp_path / "table.npz")),
        seen(declared(in_memory=in_memory)),
    )
    assert filed[1] == held[1]
    assert filed[0] == held[0]


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.from_pandas])
def test_data_frames_are_read_as_their_schema_says(kind: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": np.linspace(20, 90, 60), "kind": ["benign", "malignant"] * 30})
    label = {"column": "kind", "classes": ["malignant", "benign"]}
    schema = {"label": label, "columns": {"age": {"range": [0, 100]}}}
    frame.to_csv(tmp_path / "table.csv", index=False)
    given = from_dataframe(kind(frame), schema)
    held = seen(declared(given.path, schema=given.schema, in_memory=given))
    filed = seen(declared(tmp_path / "table.csv", schema=schema_of(schema, "schema")))
    assert held[1] == filed[1]
    assert held[0] == filed[0]
    with pytest.raises(InputError, match=r"schema: columns\.age: needs either a range"):
        from_dataframe(kind(frame), {**schema, "columns": {"age": {}}})
    with pytest.raises(InputError, match="There is no column age"):
        resolve(QUICK, dataset=from_dataframe(frame.drop(columns="age"), schema))


def test_what_cannot_be_records_is_told_at_once() -> None:
    x, y = rows(20)
    with pytest.raises(InputError, match=r"Input should be a name.*\(x, y\).*, not a tuple"):
        resolve(dataset=(x, y))
    with pytest.raises(InputError, match=r"<table> needs a schema that declares its columns"):
        resolve(dataset=pd.DataFrame(x))
    with pytest.raises(InputError, match="rows of numbers need a public range"):
        resolve(dataset=ArrayData(x, y))
    with pytest.raises(InputError, match="must consist of letters and digits"):
        ArrayData(x, y, name="../up")
    with pytest.raises(InputError, match=r"is no \(record, label\) pair"):
        from_torch([1, 2, 3])
    with pytest.raises(InputError, match=r"Input should be one of digits.*not '<arrays>'"):
        resolve(dataset="<arrays>")


def test_labels_cannot_change_under_a_run() -> None:
    x, y = rows(60)
    data = ArrayData(x, y, low=0, high=2)
    resolved = resolve(QUICK, dataset=data)
    assert resolved.data is not None
    kept = resolved.data.train.y.copy()
    y[:] = 7
    assert np.array_equal(resolved.data.train.y, kept)
    assert np.array_equal(records_of(declared(in_memory=data))[0].y, kept)
    assert "ArrayData" in dpmac_cli.__all__


@pytest.mark.parametrize("bits", [12, 16])
def test_white_is_the_largest_value_of_the_bits_that_a_scan_has(bits: int) -> None:
    scan: Any = SimpleNamespace(tag_v2={258: (bits,)})
    assert _white(scan) == 2**bits - 1


def test_another_seed_holds_out_other_records() -> None:
    x, y = rows()
    data = ArrayData(x, y, low=-5, high=5)
    sources = [declared(Path("a"), in_memory=data, split_seed=seed) for seed in (0, 0, 1)]
    tested = [records_of(source)[1].x for source in sources]
    first, again, other = (set(np.asarray(part).ravel().tolist()) for part in tested)
    assert first == again != other
