"""Whatever one record is, it changes no other one, for every reader of your own data."""

import io
import random
import traceback
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpmac_cli import ArrayData, from_dataframe, from_torch, resolve
from dpmac_cli.data import user_data
from dpmac_cli.data.canonical import units_in
from dpmac_cli.data.schema import DataFacts, Source
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.errors import InputError
from dpmac_cli.storage.cache import Rows
from dpmac_cli.storage.progress import outcome
from tests.helpers import load

COUNT, CLASSES = 60, ("a", "b")
SCHEMA = schema_of(
    {
        "label": {"column": "y", "classes": [*CLASSES]},
        "columns": {
            "age": {"range": [0, 100], "missing": "input"},
            "kind": {"categories": ["0", "1", "2"], "missing": "input"},
        },
        "drop": ["note"],
    },
    "schema",
)


@dataclass(frozen=True)
class Row:
    """A record of a table."""

    unit: Any
    age: Any
    kind: Any
    y: Any
    note: Any = "x"


def values(x: Any) -> Any:
    return x.read() if isinstance(x, Rows) else x


def owners(side: Any) -> Any:
    return [""] * len(side.y) if side.units is None else side.units


def seen(source: Source) -> tuple[DataFacts, list[set[tuple[bytes, int, str]]]]:
    """Facts, and the records of each side, each as the network sees it, with label and unit."""
    sides = [
        {
            (np.asarray(x).tobytes(), int(y), str(u))
            for x, y, u in zip(values(side.x), side.y, owners(side), strict=True)
        }
        for side in parts(source)
    ]
    return inspect(source), sides


def parts(source: Source) -> Any:
    return outcome(user_data.load(source))


def columns(found: list[Row]) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in found] for name in Row.__annotations__}


# Tables


@pytest.mark.privacy
def test_units_that_floats_merged_are_refused(tmp_path: Path) -> None:
    """200 persons whose 64-bit ids were stored as doubles would be 156 units."""
    kept = [Row(2**60 + 200 * n, n % 100, n % 3, CLASSES[n % 2]) for n in range(200)]
    table = pa.table(columns(kept))
    merged = table.set_column(0, "unit", table["unit"].cast(pa.float64(), safe=False))
    assert len(set(merged["unit"].to_pylist())) == 156
    parquet.write_table(merged, tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"no whole number that its type stores exactly.*as text"):
        inspect(Source(tmp_path / "t.parquet", schema=SCHEMA, unit="unit"))
    parquet.write_table(table, tmp_path / "i.parquet")
    facts = inspect(Source(tmp_path / "i.parquet", schema=SCHEMA, unit="unit")).facts
    assert facts.train_size + facts.test_size == 200
    halves = [Row(n + 0.5, 1, 1, CLASSES[n % 2]) for n in range(20)]
    parquet.write_table(pa.table(columns(halves)), tmp_path / "h.parquet")
    with pytest.raises(InputError, match="no whole number"):
        inspect(Source(tmp_path / "h.parquet", schema=SCHEMA, unit="unit"))


@pytest.mark.privacy
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
        source = Source(in_memory.path, schema=schema, in_memory=in_memory, skip_bad=True)
        found.append(seen(source))
    assert found[0][1] == found[1][1]
    assert len(found[1][0].skipped) == 1


# Arrays


def numbers(count: int = COUNT) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 10, (count, 3))
    return x, np.arange(count) % 2, np.arange(count) // 2 + 10**10


def arrays(x: Any, y: Any, unit: Any = None, **more: Any) -> Source:
    in_memory = ArrayData(x, y, unit=unit, classes=CLASSES, low=0, high=9)
    return Source(in_memory.path, in_memory=in_memory, **more)


@pytest.mark.privacy
@pytest.mark.parametrize("by_unit", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        ("f8", "i8", "i8"), ("f4", "i4", "f8"), (">f8", ">i8", ">i8"), ("i4", "u1", "U30"),
        ("u1", "f8", "U11"), ("O", "O", "O"), ("f2", "f4", "S20"), ("U9", "i8", "i8"),
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
    assert plain[0].facts == other[0].facts


RECORDS: dict[str, dict[str, Any]] = {
    "images": {"x": np.arange(COUNT * 16, dtype=np.uint8).reshape(COUNT, 4, 4)},
    "integers": {"x": np.arange(COUNT * 3).reshape(COUNT, 3), "low": 0, "high": 180},
    "floats": {"x": np.linspace(0, 1, COUNT * 3).reshape(COUNT, 3), "low": 0, "high": 1},
}
TARGETS: dict[str, dict[str, Any]] = {
    "classes": {"y": np.arange(COUNT) % 2},
    "labels": {"y": np.arange(COUNT * 2).reshape(COUNT, 2) % 2},
    "a number": {"y": np.linspace(0, 9, COUNT), "target_low": 0, "target_high": 9},
    "two numbers": {
        "y": np.linspace(0, 9, COUNT * 2).reshape(COUNT, 2),
        **{"target_low": [0, 0], "target_high": [9, 9]},
    },
}


@pytest.mark.privacy
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("records", RECORDS)
def test_without_bad_records_nothing_is_left_out(records: str, targets: str) -> None:
    """Each record remains one: taken together as one, epsilon would protect something else."""
    data = ArrayData(**RECORDS[records], **TARGETS[targets])
    strict = Source(data.path, in_memory=data)
    lenient = replace(strict, skip_bad=True)
    assert inspect(lenient) == inspect(strict)
    for one, other in zip(parts(lenient), parts(strict), strict=True):
        assert np.array_equal(one.x, other.x)
        assert np.array_equal(one.y, other.y)
    assert sum(len(side.x) for side in parts(lenient)) == COUNT


@pytest.mark.privacy
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
        "9007199254740993.0",
    ]
    names = ["17", "17", "17", "-3", "4", "017", "1e5", "1.50", "a.0", ""]
    found, faults = units_in(texts)
    assert found.tolist() == names
    assert list(faults) == [9]
    values: list[Any] = [17, 17.0, np.float32(17), Decimal("17.00"), b"17", np.int8(17), " 17 "]
    assert set(units_in(values)[0].tolist()) == {"17"}
    unknown: list[Any] = [None, float("nan"), "NA", "", np.float32(2**24), 0.5, float("inf"), []]
    assert len(units_in(unknown)[1]) == len(unknown)


# Torch datasets


class Listed(Dataset[Any]):
    """Records of a list; exceptions among them are raised."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], BaseException):
            raise self.items[index]
        return self.items[index]


def floats() -> list[Any]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.rand(3, generator=draws), n % 2) for n in range(COUNT)]


def from_items(items: list[Any], images: bool = False, **more: Any) -> Source:
    known: dict[str, Any] = {"shape": (8, 8)} if images else {"shape": (3,), "low": 0, "high": 1}
    in_memory = from_torch(Listed(items), classes=CLASSES, label_shape=(), **known)
    return Source(in_memory.path, in_memory=in_memory, **more)


@pytest.mark.privacy
@pytest.mark.parametrize("all_bad", [False, True])
def test_no_message_quotes_what_a_dataset_says_of_a_sample(all_bad: bool) -> None:
    secret = ValueError("could not convert string to float: 'Frau Meier'")
    items = [secret] * COUNT if all_bad else [*floats(), secret]
    with pytest.raises(InputError) as caught:
        inspect(from_items(items))
    said = "".join(traceback.format_exception(caught.value))
    assert "Meier" not in said.replace(repr(secret), "")
    assert "(ValueError at test_bad_records.py, line " in str(caught.value)
    if not all_bad:
        why = " ".join(inspect(from_items(items, skip_bad=True)).why)
        assert "cannot be read (ValueError at test_bad_records.py, line " in why
        assert "Meier" not in why


@pytest.mark.privacy
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


@pytest.mark.privacy
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


@pytest.mark.privacy
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


# Copies


def repeating(whole: TensorDataset) -> dict[str, Any]:
    """Datasets that have records of another one several times."""
    numbers = list(range(40))
    return {
        "subset": Subset(whole, numbers * 3),
        "of a subset": Subset(Subset(whole, numbers * 2), range(80)),
        "counted from the end": Subset(whole, [*numbers, -1, -40]),
        "concatenated": ConcatDataset([Subset(whole, range(30)), whole]),
    }


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["subset", "of a subset", "counted from the end", "concatenated"])
def test_a_subset_that_repeats_records_is_refused_unless_its_units_are_named(kind: str) -> None:
    whole = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    repeated = repeating(whole)[kind]
    known: dict[str, Any] = {"low": 0, "high": 1, "classes": CLASSES}
    copies = len(repeated) - 40
    for unit in (None, [f"copy {row}" for row in range(len(repeated))]):
        with pytest.raises(InputError, match=f"40 different records, and {copies} copies.*unit="):
            from_torch(repeated, unit=unit, **known)
    plan = resolve(dataset=from_torch(repeated, unit="record", **known), sigma=4).plan
    assert plan.data.facts.train_size + len(set(plan_units(plan))) == 40
    assert not [note for note in resolve(dataset=from_torch(whole, **known), sigma=4).notes
                if "copies" in note]  # fmt: skip


@pytest.mark.privacy
def test_records_that_are_trained_on_are_not_tested_on() -> None:
    whole = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    known: dict[str, Any] = {"low": 0, "high": 1, "classes": CLASSES}
    first, last = Subset(whole, range(30)), Subset(whole, range(25, 40))
    for unit in (None, "record"):
        with pytest.raises(InputError, match="5 records are both in the training set and in"):
            from_torch(first, last, unit=unit, **known)
    apart = from_torch(first, Subset(whole, range(30, 40)), unit="record", **known)
    assert resolve(dataset=apart, sigma=4).plan.data.facts.train_size == 30


def plan_units(plan: Any) -> list[str]:
    return list(parts(plan.data.source)[1].units.tolist())


@pytest.mark.privacy
def test_copies_are_remarked_on_and_not_published() -> None:
    x, y, _ = numbers()
    x = np.random.default_rng(0).random((20, 3))
    drawn = [n % 20 for n in range(60)]
    source: dict[str, Any] = {"low": 0, "high": 1, "classes": CLASSES}
    given = resolve(dataset=ArrayData(x[drawn], y[drawn], **source), sigma=4)
    assert given.plan.data.found.signs.copies == 40
    (note,) = [note for note in given.notes if "copies" in note]
    assert "40 records of <arrays> are exact copies" in note
    assert "name the unit of each record" in note
    named = ArrayData(x[drawn], y[drawn], unit=drawn, **source)
    assert not [note for note in resolve(dataset=named, sigma=4).notes if "copies" in note]


# Folders


# What an image is


CORNERS = np.array([[[10, 20], [30, 40], [50, 60]]], np.uint8)[0]


def turned(orientation: int, form: str) -> bytes:
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(CORNERS).save(
        buffer, form, exif=exif, **({"lossless": True} if form == "WEBP" else {})
    )
    return buffer.getvalue()


#: What EXIF says of each value: the picture as it is to be seen.
UPRIGHT = {
    1: CORNERS, 2: CORNERS[:, ::-1], 3: CORNERS[::-1, ::-1], 4: CORNERS[::-1],
    5: CORNERS.T, 6: CORNERS[::-1].T, 7: CORNERS[::-1, ::-1].T, 8: CORNERS[:, ::-1].T,
}  # fmt: skip


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_upright_as_their_exif_says(tmp_path: Path, form: str, orientation: int) -> None:
    for number in range(40):
        place = tmp_path / CLASSES[number % 2] / f"{number}.{form.lower()}"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(turned(orientation, form))
    expected = UPRIGHT[orientation]
    for source in (Source(tmp_path), Source(tmp_path, skip_bad=True)):
        assert inspect(source).facts.shape == (1, *expected.shape)
        (x, _), _ = load(source)
        assert (x[:, 0] == expected).all()


def deep(path: Path, top: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(0, top, 48).reshape(6, 8).astype(np.uint16)
    Image.fromarray(ramp).save(path)


def test_scans_of_twelve_bits_are_scaled_on_request(tmp_path: Path) -> None:
    for number in range(10):
        deep(tmp_path / CLASSES[number % 2] / f"{number}.png", 4095)
    settings: dict[str, Any] = {"dataset": str(tmp_path), "sigma": 4, "batch_size": 2}
    (x, _), _ = load(Source(tmp_path))
    assert x.max() == 16
    source = Source(tmp_path, levels=4095)
    assert resolve(settings, levels=4095).plan.data.source == source
    (x, _), _ = load(source)
    assert x.max() == 255
    assert x[0, 0, 3, 0] == round(255 * int(4095 * 24 / 47) / 4095)
    deep(tmp_path / "a" / "brighter.png", 65535)  # clipped to the public range
    (x, _), (more, _) = load(source)
    assert max(x.max(), more.max()) == 255


# Units with test records


@pytest.mark.privacy
@pytest.mark.parametrize("place", ["", "_test"])
def test_a_unit_on_both_sides_keeps_its_test_records(place: str) -> None:
    x, y, unit = numbers()
    sides: dict[str, Any] = {"x": x[:40], "y": y[:40], "unit": unit[:40]}
    sides |= {"x_test": x[40:], "y_test": y[40:], "unit_test": unit[40:]}

    def source(**more: Any) -> Source:
        in_memory = ArrayData(**{**sides, **more}, classes=CLASSES, low=0, high=9)
        return Source(in_memory.path, in_memory=in_memory, skip_bad=True)

    before = seen(source())
    other = unit[40] if place == "" else unit[0]
    added = {"x": [[1, 2, 3]], "y": [0], "unit": [other]}
    more = {f"{n}{place}": np.concatenate([sides[f"{n}{place}"], v]) for n, v in added.items()}
    after = seen(source(**more))
    own_records = {record for side in (*before[1], *after[1]) for record in side}
    own_records = {record for record in own_records if record[2] == str(other)}
    for one, two in zip(before[1], after[1], strict=True):
        assert one - own_records == two - own_records
    owned = [{record[2] for record in side} for side in after[1]]
    assert not owned[0] & owned[1]
    assert str(other) in owned[1]
