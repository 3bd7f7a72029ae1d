"""Changing one record changes how no other is read, for every reader of your own data."""

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, datetime
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
from torch.utils.data import Dataset

from dpmac_cli import ArrayData, from_dataframe, from_torch
from dpmac_cli.config.facts import in_memory
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.read import read_own
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.errors import InputError
from tests.helpers import declared, with_settings
from tests.test_hugging_face import ClassLabel
from tests.test_hugging_face import Dataset as HuggingFaceDataset
from tests.test_hugging_face import Image as HuggingFaceImage
from tests.tiny_bert import tiny_reader

COUNT, CLASSES = 24, ("a", "b")
#: Names of classes of which each is the number of another one.
NUMBERED = ("1", "0")
SCHEMA = schema_of(
    {
        "label": {"column": "y", "classes": [*CLASSES]},
        "columns": {
            "x": {"range": [0, 99], "missing": "input"},
            "k": {"categories": ["0", "1"], "missing": "input"},
        },
        "drop": ["note"],
    },
    "schema",
)
#: Columns of a table, and the unit of each record.
COLUMNS = ("x", "k", "y", "unit", "note")
#: What each record holds: a line, cells, an item, the name and content of a file, and so on.
Contents = Sequence[Any]


def label(row: int) -> str:
    return CLASSES[row % 2]


def csv_file(where: Path, contents: Contents) -> Declaration:
    (where / "t.csv").write_bytes(b"\n".join([",".join(COLUMNS).encode(), *contents, b""]))
    return declared(where / "t.csv", schema=SCHEMA, unit="unit")


def table_of_numbers(where: Path, contents: Contents) -> Declaration:
    """Numbers to predict."""
    (where / "t.csv").write_text("\n".join([",".join(COLUMNS), *contents, ""]))
    label = {"column": "y", "range": [0, 9]}
    columns = {"x": {"range": [0, 99]}, "k": {"range": [0, 1]}}
    schema = schema_of({"label": label, "columns": columns, "drop": ["unit", "note"]}, "schema")
    return declared(where / "t.csv", schema=schema)


def parquet_file(where: Path, contents: Contents) -> Declaration:
    text = [pa.array(cells, pa.string()) for cells in zip(*contents, strict=True)]
    parquet.write_table(pa.table(text, [*COLUMNS]), where / "t.parquet")
    return declared(where / "t.parquet", schema=SCHEMA, unit="unit")


def frame(_: Path, contents: Contents) -> Declaration:
    cells = [cell for record in contents for cell in record]
    kind = object if "\ud800" in [cell for cell in cells if isinstance(cell, str)] else None
    columns = zip(COLUMNS, zip(*contents, strict=True), strict=True)
    data = from_dataframe(pd.DataFrame({n: pd.Series(c, dtype=kind) for n, c in columns}), SCHEMA)
    return declared(data.path, schema=SCHEMA, in_memory=data, unit="unit")


def categories(_: Path, contents: Contents) -> Declaration:
    """A data frame with columns of categories, which may be of several types."""
    columns = zip(COLUMNS, zip(*contents, strict=True), strict=True)
    data = from_dataframe(pd.DataFrame({n: pd.Categorical(c) for n, c in columns}), SCHEMA)
    return declared(data.path, schema=SCHEMA, in_memory=data, unit="unit")


def arrays(_: Path, contents: Contents) -> Declaration:
    x, labels, units = zip(*contents, strict=True)
    data = ArrayData([*x], [*labels], classes=CLASSES, low=0, high=99, unit=[*units])
    return declared(data.path, in_memory=data)


def numbered(_: Path, contents: Contents) -> Declaration:
    """Labels that may be names, and places of others."""
    x, y = zip(*contents, strict=True)
    data = ArrayData([*x], [*y], classes=NUMBERED, low=0, high=99)
    return declared(data.path, in_memory=data)


def torch_numbered(_: Path, contents: Contents) -> Declaration:
    data = from_torch(Listed(contents), classes=NUMBERED, low=0, high=99)
    return declared(data.path, in_memory=data)


def image_arrays(_: Path, contents: Contents) -> Declaration:
    """Images in uint8, which have no range."""
    data = ArrayData([*contents], [n % 2 for n in range(len(contents))], classes=CLASSES)
    return declared(data.path, in_memory=data, feature_range="0,1")


def numbers(_: Path, contents: Contents) -> Declaration:
    """Numbers to predict."""
    x, y = zip(*contents, strict=True)
    data = ArrayData([*x], [*y], low=0, high=99, target_low=0, target_high=9)
    return declared(data.path, in_memory=data)


class Listed(Dataset[Any]):
    """Samples of a list; exceptions among them are raised."""

    def __init__(self, items: Contents) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.items[row], BaseException):
            raise self.items[row]
        return self.items[row]


def torch_dataset(_: Path, contents: Contents) -> Declaration:
    data = from_torch(Listed(contents), classes=CLASSES, low=0, high=99)
    return declared(data.path, in_memory=data)


def torch_images(_: Path, contents: Contents) -> Declaration:
    data = from_torch(Listed(contents), classes=CLASSES)
    return declared(data.path, in_memory=data)


def hugging_face(_: Path, contents: Contents) -> Declaration:
    columns = {"image": [*contents], "label": [n % 2 for n in range(len(contents))]}
    features = {"image": HuggingFaceImage(), "label": ClassLabel([*CLASSES])}
    data = in_memory(HuggingFaceDataset(columns, features))
    return declared(in_memory=data, channels=1, image_size=8)


def folder(where: Path, contents: Contents, **more: Any) -> Declaration:
    for row, (name, content) in enumerate(contents):
        file = where / "d" / label(row) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            content(file)
    return declared(where / "d", classes=CLASSES, **more)


def images(where: Path, contents: Contents) -> Declaration:
    return folder(where, contents, channels=1, image_size=8, unit="p([0-9]+)_")


def text_folder(where: Path, contents: Contents) -> Declaration:
    return folder(where, contents, texts=tiny_reader(8))


def texts(_: Path, contents: Contents) -> Declaration:
    data = ArrayData(list(contents), [n % 2 for n in range(len(contents))], classes=CLASSES)
    return declared(data.path, in_memory=data, texts=tiny_reader(8))


def picture(mode: str, pixels: Any, form: str = "PNG", **more: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(content, form, **more)
    return content.getvalue()


def link(target: str) -> Callable[[Path], object]:
    return lambda file: file.symlink_to(target)


GREY = [np.full((8, 8), n, np.uint8) for n in range(COUNT)]
MOVING: dict[str, Any] = {"save_all": True, "append_images": [Image.fromarray(GREY[3] + 200)]}
SENTENCES = [f"a {'cat ' * (n % 7)}dog {'a ' * (n // 7)}" for n in range(COUNT)]
#: Lines of a CSV of any length and kind, of which some are no records.
LINES = [b"98,0,a,1,", b"9e9,7,a,1,", b'"12,5",0,a,1,', b'"x,0,a,1,', b'1,0,"a,1,', b'1"2,0,a,1,',
         b'"1"2,0,a,1,', b'"1","0","a","1",""', b'"1""",0,a,1,', b'",",",",","', b'""","0,a,1,',
         b"1,2", b"1,2,3,4,5,6", b"", b"\xff,0,a,1,", b"\x00,0,a,1,", b"NA,,b,1,", b"old,0,a,1,",
         b"1,0,c,1,", b"1,0\r,a,1,", b'1,0,"', b'"', b"9" * 3_000_000 + b",0,a,1,",
         b'"1\n2",0,a,1,', b"'1,0,a,1,", b"\\,0,a,1,", b'\\",0,a,1,', b'1,"0,a,1,', b'1,0",a,1,',
         b'1,"0"0,a,1,', b'1,0,a,1,n"n"', b'1,0,a,1,"n\nn"', b'1,""0,a,1,', b'1,",",a,1,',
         b"1,0,a,,", b"1,0,a,NA,", b"1,0,a,1.5,"]  # fmt: skip
#: A record more of a data frame, each of which would give a column another type; and bad ones.
ROWS = [(98, 0, "a", 1), (1, 1, "a", "p17"), (b"5", b"1", b"a", b"p18"), (1, "1", "a", 1),
        (1, None, "a", 1), (None, 1, "a", 1), (1, 1.5, "a", 1),
        (1, datetime(2020, 1, 1), "a", date(2020, 1, 1)),
        (Decimal("17.50"), Decimal("1.0"), "a", Decimal("17.50"))]  # fmt: skip
BAD_ROWS = [(1, 1, "a", None), (1, 1, "a", float("nan")), (1, 1, "a", 1.5), (1, 1, "a", 1e300),
            ([2], [3], [4], [1]), (b"\xff",) * 4, (1, 1, "a", "\ud800"), ("\ud800",) * 4,
            ("old", 1, "a", 1), (1, 1, 3, 1), (True,) * 4, (2**70,) * 4, ({},) * 4,
            (object(), object(), object(), object()), (pd.NaT,) * 4, (pd.NA,) * 4]  # fmt: skip
#: A record, a label and a unit, of which each gives the whole another type.
BAD_ITEMS = [([np.nan, 1], 0, 1), ([None, 1], 0, 1), ([1, [2, 3]], 0, 1), (["a", 1], 0, 1),
             ([1j, 2], 0, 1), ([10**400, 1], 0, 1), ([object(), 1], 0, 1), ([1, 2], None, 1),
             ([1, 2], float("nan"), 1), ([1, 2], 0.5, 1), ([1, 2], "c", 1), ([1, 2], 2**70, 1),
             ([1, 2], -1, 1), ([1, 2], 0, None), ([1, 2], 0, float("nan")), ([1, 2], 0, 1.5),
             ([1, 2], 0, "\ud800"), ([1, 2], 0, [1])]  # fmt: skip
#: Samples of a dataset, and those that cannot be used.
SAMPLES = [(torch.tensor([98, 0]), 0), ([1, 2], 0)]
BAD_SAMPLES = [(torch.zeros(3), 0), OSError("damaged"), RuntimeError("of another library"), 7,
               (1, 2, 3), (None, 0), ("x", 0), (torch.zeros(2), None), (torch.zeros(2), [0, 1]),
               (torch.zeros(2), 0.5), (torch.zeros(2), 7), (torch.full((2,), float("nan")), 0),
               (torch.zeros(2, requires_grad=True), 0)]  # fmt: skip
HALF = picture("L", np.arange(64, dtype=np.uint8).reshape(8, 8))
LAB, DEEP = io.BytesIO(), io.BytesIO()  # a colour space that is not converted, and 32 bits
Image.new("LAB", (8, 6)).save(LAB, "TIFF")
Image.fromarray(GREY[1].astype(np.int32)).save(DEEP, "TIFF")
FILES = [("p1_0.png", picture("RGB", GREY[9] + 77)), ("p1_0.png", picture("L", GREY[9][:3] + 77)),
         ("p1_0.png", picture("L", GREY[9] + 77, "GIF")),
         *((f"p1_0.{mode}.png", picture(mode, GREY[9][:5] + 77)) for mode in ("RGBA", "P", "1")),
         ("p1_0.tif", picture("CMYK", GREY[9] + 77, "TIFF"))]  # fmt: skip
BAD_FILES = [("p1_0.png", b""), ("p1_0.png", b"x"), ("nobody.png", picture("L", GREY[3])),
             ("p1_0.png", HALF[: len(HALF) // 2]), ("p1_0.tif", LAB.getvalue()),
             ("p1_0.tif", DEEP.getvalue()), ("p1_0.gif", picture("L", GREY[1], "GIF", **MOVING)),
             ("p1_0.tif", picture("L", GREY[1], "TIFF", **MOVING)),
             ("p1_0.png", picture("L", GREY[1], "PNG", **MOVING)),
             ("p1_0.webp", picture("RGB", GREY[1], "WEBP", **MOVING)),
             *((f"../{place}p1_0.png", picture("L", GREY[3])) for place in ("", "fox/", "train/")),
             (os.fsdecode(b"p1_\xff.txt"), b"x"), ("p1_[red]\x1b[31m\n.txt", b"x"),
             ("p1_0.png", link("p1_0.png")), ("p1_0.png", link("nowhere.png")),
             ("p1_0.png", link(".")), ("p1_0.png", os.mkfifo)]  # fmt: skip
NOTES = [b"cat cat", b"\x00", b"CAT!" * 9_999, b"\xef\xbb\xbfcat"]
BAD_NOTES = [b"", b" \n", b"\xff", link("bad.txt"), link("nowhere.txt"), link("."), os.mkfifo]
#: Each reader, its records, records of every kind to put in the place of one of them, and those
#: that cannot be used.
READERS: dict[str, tuple[Callable[[Path, Contents], Declaration], Contents, Contents, Contents]] = {
    "csv": (csv_file, [f"{n}.5,{n % 2},{label(n)},u{n // 3},".encode() if n % 2 else
                       f'"{n}.5",{n % 2},{label(n)},u{n // 3},"x"'.encode() for n in range(COUNT)],
            LINES, [b"old,0,a,1,", b"1,0,c,1,", b"1,0,a,,", b"1,0,a,NA,", b'1,"0,a,1,', b"1,2"]),
    "parquet": (parquet_file,
                [(f"{n}.5", str(n % 2), label(n), f"{n // 3}", "") for n in range(COUNT)],
                [("98", "0", "a", "1", "")],
                [(None,) * 5, ("12,5", "\n", "c", "1", ""), ("1e999", '"', "c", "1.50", "")]),
    "table of numbers": (table_of_numbers, [f"{n},{n % 2},{n / 3},," for n in range(COUNT)],
                         ["98,1,5,,", "1,1e9,-5,,", "1,1,1e9,,", "1,-1,1,,"],
                         ["1,1,,,", "1,,1,,", "1,1,few,,", "1,1,NaN,,", "1,1,inf,,"]),
    "frame": (frame, [(f"{n}.5", n % 2, label(n), 10**10 + n // 3, "") for n in range(COUNT)],
              [(*row, "") for row in ROWS], [(*row, "") for row in BAD_ROWS]),
    "categories": (categories, [(n, n % 2, label(n), f"u{n // 3}", "") for n in range(COUNT)],
                   [(98, "1", "a", "u1", ""), (Decimal("17.50"), 0, "a", "u1", "")],
                   [("old", 1, "a", "u1", ""), (1, 1, 3, "u1", ""), (1, 1, "a", None, "")]),
    "arrays": (arrays, [([n, n % 2], n % 2, n // 3) for n in range(COUNT)],
               [([98, 0], 0, 1), ([0.5, -0.0], 0, 1)], BAD_ITEMS),
    "numbers": (numbers, [([n, n], n / 3) for n in range(COUNT)],
                [([98, 0], 1), ([1, 1], 1e300), ([1, 1], -1e300)],
                [([1, 1], None), ([1, 1], "x"), ([1, 1], [1, 1]), ([1, 1], float("nan"))]),
    "numbered": (numbered, [([n, n % 2], n % 2) for n in range(COUNT)],
                 [([98, 0], "1"), ([98, 0], 1.0)], [([1, 1], "2"), ([1, 1], None), ([1, 1], [1])]),
    "torch numbered": (torch_numbered, [(torch.tensor([n, n % 2]), n % 2) for n in range(COUNT)],
                       [(torch.tensor([98, 0]), "1")], [(torch.tensor([98, 0]), "2")]),
    "image arrays": (image_arrays, GREY, [np.full((8, 8), 99, np.uint8)],
                     [GREY[3] / 99, GREY[3].astype(int), (GREY[3] / 99).tolist()]),
    "Pillow": (image_arrays, [Image.fromarray(of) for of in GREY], [Image.new("L", (8, 8), 99)],
               [Image.new("F", (8, 8), 0.5), Image.new("I", (8, 8), 9)]),
    "torch": (torch_dataset, [(torch.tensor([n, n % 2]) / 2, n % 2) for n in range(COUNT)],
              SAMPLES, BAD_SAMPLES),
    "torch images": (torch_images, [(Image.fromarray(of), torch.tensor(n % 2))
                                    for n, of in enumerate(GREY)], [], SAMPLES + BAD_SAMPLES),
    "Hugging Face": (hugging_face, [Image.fromarray(of) for of in GREY],
                     [Image.new("RGB", (8, 8), 77), Image.new("L", (5, 9), 77)],
                     [None, Image.new("LAB", (8, 8)), Image.new("F", (8, 8))]),
    "images": (images, [(f"p{n // 2}_{n}.png", picture("L", of)) for n, of in enumerate(GREY)],
               FILES, BAD_FILES),
    "texts": (texts, SENTENCES, ["cat cat", "\ud800", "CAT!" * 9_999],
              ["", " \n", None, 7.5, b"x"]),
    "text folder": (text_folder, [(f"{n}.txt", text.encode()) for n, text in enumerate(SENTENCES)],
                    [("bad.txt", note) for note in NOTES],
                    [("bad.txt", note) for note in BAD_NOTES] + [("notes.pdf", b"x")]),
}  # fmt: skip


IN_MEMORY = ("arrays", "numbered", "numbers", "image arrays", "Pillow", "texts",
             "Hugging Face", "torch", "torch numbered", "torch images")  # fmt: skip


def seen(source: Declaration) -> tuple[Any, list[Counter[tuple[bytes, bytes, str]]], int]:
    """What is public of a dataset, the records of each side, and how many are left out."""
    data, sides = read_own(source), []
    left_out = data.notes.left_out
    assert all(map(str.isprintable, (*left_out.records, *left_out.reasons)))
    for side in data.splits:
        x = side.x.read() if isinstance(side.x, Rows) else side.x
        units = [""] * len(x) if side.unit is None else side.unit
        records = zip(x, side.y, units, strict=True)
        sides.append(Counter((np.asarray(x).tobytes(), y.tobytes(), str(u)) for x, y, u in records))
    facts = data.facts
    return (facts.records, facts.task), sides, len(left_out.records)


@pytest.mark.promise("reading")
@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_changing_one_record_changes_how_no_other_is_read(
    tmp_path: Path, name: str, skip_bad: bool
) -> None:
    """Nor on which side of the split it is. All may be refused instead, but not with --skip-bad.

    Records in memory are refused if one of them cannot be used.
    """
    make, contents, others, bad = READERS[name]
    (tmp_path / "all").mkdir()
    public, before, _ = seen(with_settings(make(tmp_path / "all", contents), skip_bad=skip_bad))
    assert sum(side.total() for side in before) == COUNT
    for place in (0, 11) if skip_bad else (11,):
        for kind, other in enumerate([*bad, *others]):
            where = tmp_path / f"{place}-{kind}"
            where.mkdir()
            changed = [*contents[:place], other, *contents[place + 1 :]]
            try:
                facts, after, skipped = seen(with_settings(make(where, changed), skip_bad=skip_bad))
            except InputError:
                assert not skip_bad or (name in IN_MEMORY and kind < len(bad)), other
                continue
            is_bad = kind < len(bad)
            assert not (is_bad and name in IN_MEMORY), other
            assert facts == public, other
            gone = [(was - now).total() for was, now in zip(before, after, strict=True)]
            new = [(now - was).total() for was, now in zip(before, after, strict=True)]
            lost = COUNT - sum(side.total() for side in after)
            assert sum(gone) <= 1, other
            assert sum(new) <= (not is_bad), other
            assert lost in (is_bad, 1), other
            assert is_bad <= bool(skipped) <= skip_bad, other
