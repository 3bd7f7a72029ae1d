"""Changing one record changes how no other is read, for every reader of your own data."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from dpmac_cli.data.schema import Source
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.user_data import inspect, load
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError
from dpmac_cli.storage.cache import Rows
from dpmac_cli.storage.progress import outcome
from tests.test_wordpiece import TINY

COUNT, CLASSES = 24, ("a", "b")
SCHEMA = schema_of(
    {
        "label": {"column": "y", "classes": [*CLASSES]},
        "columns": {
            "x": {"range": [0, 99], "missing": "input"},
            "k": {"categories": ["0", "1"], "missing": "input"},
        },
    },
    "schema",
)
#: What each record holds: a line, cells, an item, the content of a file, and so on.
Contents = Sequence[Any]


def label(row: int) -> str:
    return CLASSES[row % 2]


def csv_file(where: Path, contents: Contents) -> Source:
    (where / "t.csv").write_bytes(b"\n".join([b"x,k,y", *contents, b""]))
    return Source(where / "t.csv", schema=SCHEMA)


def parquet_file(where: Path, contents: Contents) -> Source:
    columns = dict(zip(("x", "k", "y"), zip(*contents, strict=True), strict=True))
    text = {name: pa.array(cells, pa.string()) for name, cells in columns.items()}
    parquet.write_table(pa.table(text), where / "t.parquet")
    return Source(where / "t.parquet", schema=SCHEMA)


def frame(_: Path, contents: Contents) -> Source:
    columns = zip(("x", "k", "y"), zip(*contents, strict=True), strict=True)
    table = pd.DataFrame({name: pd.Series(cells) for name, cells in columns})
    data = from_dataframe(table, SCHEMA)
    return Source(data.path, schema=SCHEMA, in_memory=data)


def arrays(_: Path, contents: Contents) -> Source:
    x = np.empty((len(contents), 2), object)
    for place, record in enumerate(contents):
        x[place] = record
    data = ArrayData(x, [n % 2 for n in range(len(x))], classes=CLASSES, low=0, high=99)
    return Source(data.path, in_memory=data)


class Listed(Dataset[Any]):
    """Samples of a list; exceptions among them are raised."""

    def __init__(self, items: Contents) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.items[row], BaseException):
            raise self.items[row]
        return self.items[row], row % 2


def torch_dataset(_: Path, contents: Contents) -> Source:
    known: dict[str, Any] = {"shape": (2,), "label_shape": (), "low": 0, "high": 99}
    data = from_torch(Listed(contents), classes=CLASSES, **known)
    return Source(data.path, in_memory=data)


def folder(where: Path, contents: Contents, suffix: str, **declared: Any) -> Source:
    for row, content in enumerate(contents):
        file = where / "d" / label(row) / f"{row}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return Source(where / "d", classes=CLASSES, **declared)


def images(where: Path, contents: Contents) -> Source:
    return folder(where, contents, ".png", channels=1, image_size=8)


def text_folder(where: Path, contents: Contents) -> Source:
    return folder(where, contents, ".txt", texts=TextReader(TINY, 8))


def texts(_: Path, contents: Contents) -> Source:
    data = ArrayData(list(contents), [n % 2 for n in range(len(contents))], classes=CLASSES)
    return Source(data.path, in_memory=data, texts=TextReader(TINY, 8))


def picture(mode: str, pixels: Any, form: str = "PNG", **more: Any) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(content, form, **more)
    return content.getvalue()


GREY = [np.full((8, 8), n, np.uint8) for n in range(COUNT)]
SMALL = Image.fromarray(GREY[3])
SENTENCES = [f"a {'cat ' * (n % 7)}dog {'a ' * (n // 7)}" for n in range(COUNT)]
#: Each reader, its records, and records of every kind to put in the place of one of them.
READERS: dict[str, tuple[Callable[[Path, Contents], Source], Contents, Contents]] = {
    "csv": (csv_file, [f"{n}.5,{n % 2},{label(n)}".encode() for n in range(COUNT)],
            [b"98,0,a", b"9e9,7,a", b'"12,5",0,a',
             b'"x,0,a', b'1,0,"a', b'1"2,0,a', b'"1"2,0,a', b'"1","0","a"',
             b'",",",","', b"1,2", b"1,2,3,4", b"\xff,0,a", b"\x00,0,a", b"NA,,b", b"old,0,a",
             b"1,0,c", b"1,0\r,a", b"5," + b"0" * 2_000_000 + b",a"]),
    "parquet": (parquet_file, [(f"{n}.5", str(n % 2), label(n)) for n in range(COUNT)],
                [("98", "0", "a"), (None, None, None), ("12,5", "\n", "c"), ("1e999", '"', "b")]),
    "frame": (frame, [(f"{n}.5", n % 2, label(n)) for n in range(COUNT)],
              [(98, 0, "a"), (None, None, None), ("12,5", "0", "c"), (1.5, 1.5, "a"), (2**70, 1, 3),
               (b"5", b"1", b"a"), ([1], {}, object()), (pd.NaT, pd.NA, float("nan"))]),
    "arrays": (arrays, [[n, n % 2] for n in range(COUNT)],
               [[98, 0], [np.nan, 1], [None, 1], ["a", 1], [1j, 2], [10**400, 1], [0.5, -0.0]]),
    "torch": (torch_dataset, [torch.tensor([n, n % 2]) / 2 for n in range(COUNT)],
              [torch.tensor([98, 0]), [1, 2], torch.zeros(3), ValueError("x"), None, "x",
               torch.full((2,), float("nan"))]),
    "images": (images, [picture("L", pixels) for pixels in GREY],
               [picture("RGB", GREY[9] + 77), picture("L", np.zeros((3, 5), np.uint8)), b"", b"x",
                picture("L", GREY[9] + 77, "GIF"), picture("P", GREY[9] + 77),
                picture("L", GREY[1], "GIF", save_all=True, append_images=[SMALL])]),
    "texts": (texts, SENTENCES, ["cat cat", "", " \n", None, 7.5, "\ud800", "CAT!" * 9_999, b"x"]),
    "text folder": (text_folder, [text.encode() for text in SENTENCES],
                    [b"cat cat", b"", b"\xff", b"\x00", b"CAT!" * 9_999, b"\xef\xbb\xbfcat"]),
}  # fmt: skip


def seen(source: Source) -> tuple[Any, list[list[tuple[bytes, int]]]]:
    """What is public of a dataset, and the records of each side as the network sees them."""
    found, sides = inspect(source), []
    for side in outcome(load(source)):
        x = side.x.read() if isinstance(side.x, Rows) else side.x
        sides.append(
            [(np.asarray(row).tobytes(), int(y)) for row, y in zip(x, side.y, strict=True)]
        )
    facts = found.facts
    return (facts.shape, facts.mean, facts.std, facts.task), sides


@pytest.mark.privacy
@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_changing_one_record_changes_how_no_other_is_read(
    tmp_path: Path, name: str, skip_bad: bool
) -> None:
    """Nor on which side of the split it is. Without --skip-bad, all may be refused instead."""
    make, contents, others = READERS[name]
    public, before = seen(replace(make(tmp_path, contents), skip_bad=skip_bad))
    assert sum(map(len, before)) == COUNT
    for place, other in ((place, other) for place in (0, 11, COUNT - 1) for other in others):
        changed = [*contents[:place], other, *contents[place + 1 :]]
        try:
            facts, after = seen(replace(make(tmp_path, changed), skip_bad=skip_bad))
        except InputError:
            assert not skip_bad, other
            continue
        assert facts == public
        gone = [len(set(was) - set(now)) for was, now in zip(before, after, strict=True)]
        new = [len(set(now) - set(was)) for was, now in zip(before, after, strict=True)]
        assert sum(gone) <= 1
        assert sum(new) <= 1
        assert COUNT - 1 <= sum(map(len, after)) <= COUNT
