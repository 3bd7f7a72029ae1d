"""Files of data and schemas, crafted to fail or never to end, lead to one message each, at once."""

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dpmac_cli import bounded_yaml
from dpmac_cli.data import memory
from dpmac_cli.data.table_schema import read_schema, schema_of
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from tests.helpers import declared, inspect
from tests.typed import dpmac

HUGE = 10**12


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array's file with any header."""
    text = header if isinstance(header, bytes) else header.encode()
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + data


def array(shape: object, descr: str = "'<f8'", **more: Any) -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", **more)


def plain(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


GOOD, LABELS = plain(np.random.default_rng(0).random((40, 2))), plain(np.arange(40) % 2)
DECLARES = "declares an array of shape"

#: Contents of x.npy, and what is said of it.
ARRAYS: dict[str, tuple[bytes, str]] = {
    "rows": (array((HUGE, 3)), DECLARES),
    "columns": (array((3, HUGE)), DECLARES),
    "rows of no columns": (array((HUGE, 0)), DECLARES),
    "columns of no rows": (array((0, HUGE)), DECLARES),
    "more than 64 bits": (array((10**50,)), DECLARES),
    "texts of no letters": (array((HUGE,), "'<U0'"), DECLARES),
    "long texts": (array((2,), "'<U500000000'"), DECLARES),
    "negative": (array((-3, 4)), DECLARES),
    "bytes of no type": (array((HUGE,), "'|V0'"), DECLARES),
    "a type of arrays": (array((3,), f"('<f8', ({10**7},))"), DECLARES),
    "version 2": (array((HUGE,), version=(2, 0)), DECLARES),
    "object": (array((2,), "'|O'"), "the array x holds objects of Python"),
    "fields": (array((2,), "[('a', '<f8')]", data=bytes(16)), "must be images or numbers"),
    "dates": (array((40, 2), "'<M8[D]'", data=bytes(640)), "must be images or numbers"),
    "complex": (array((40, 2), "'<c16'", data=bytes(1280)), "must be images or numbers"),
    "brackets": (npy("(" * 9000), "cannot be read as an .npz"),
    "braces": (npy("{" * 200), "cannot be read as an .npz"),
    "no dictionary": (npy("[1, 2]"), "cannot be read as an .npz"),
    "header longer than the file": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "expected 4294967295"),
    "a shape that is text": (array("'ab'"), "shape is not valid"),
    "many axes": (array((1,) * 200, data=bytes(8)), "cannot be read as an .npz"),
    "cut off": (GOOD[:-9], "cannot be read as an .npz"),
    "empty": (b"", "cannot be read as an .npz"),
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(("content", "said"), ARRAYS.values(), ids=ARRAYS.keys())
def test_the_header_of_an_array(
    tmp_path: Path, content: bytes, said: str, compression: int
) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w", compression) as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", LABELS)
    with pytest.raises(InputError) as caught:
        inspect(declared(tmp_path / "t.npz", feature_range=(0, 1)))
    assert said in str(caught.value)


def flipped(place: int, value: bytes) -> Callable[[bytearray], None]:
    """Overwrite bytes of the first entry of a zip file's directory."""

    def flip(content: bytearray) -> None:
        entry = content.find(b"PK\x01\x02") + place
        content[entry : entry + len(value)] = value

    return flip


@pytest.mark.parametrize(
    "change",
    [
        flipped(8, b"\x01"),  # encrypted
        flipped(10, b"\x63"),  # compressed by an unknown method
        flipped(20, b"\xf0\xff\xff\xff" * 2),  # sizes
        flipped(42, b"\xf0\xff\xff\xff"),  # place in the file
        lambda content: content.__delitem__(slice(2, None)),
    ],
)
def test_the_directory_of_an_archive(tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("x.npy", array((HUGE, 3)))
        archive.writestr("y.npy", LABELS)
    content = bytearray((tmp_path / "t.npz").read_bytes())
    change(content)
    (tmp_path / "t.npz").write_bytes(content)
    done = dpmac("train", "--dataset", tmp_path / "t.npz", "--feature-range", "0,1")
    assert done.exit_code == 2
    assert "t.npz cannot be read as an .npz of plain arrays (" in done.output


def test_data_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory", lambda: 300)
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("x.npy", GOOD)
        archive.writestr("y.npy", LABELS)
    with pytest.raises(InputError, match=r"npy needs .* GB of memory, of 3e-07 GB"):
        inspect(declared(tmp_path / "t.npz", feature_range=(0, 1)))
    parquet.write_table(pa.table({"x": range(40), "y": ["a", "b"] * 20}), tmp_path / "t.parquet")
    table = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"x": {"range": [0, 1]}}}
    source = declared(tmp_path / "t.parquet", schema=schema_of(table, "it"))
    with pytest.raises(InputError, match=r"40 records needs .* GB of memory"):
        inspect(source)
    monkeypatch.setattr(memory, "memory", lambda: 400)
    wide = {**table, "columns": {"x": {"categories": [*map(str, range(9))]}}}
    with pytest.raises(InputError, match=r"40 records: 10 inputs each needs .* fewer columns or"):
        inspect(declared(tmp_path / "t.parquet", schema=schema_of(wide, "it")))


def test_a_parquet_file_with_any_byte_changed(tmp_path: Path) -> None:
    """Its header has lengths, types and places, all of which are read by a library in C++."""
    file = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": np.arange(40) / 40, "y": ["a", "b"] * 20}), file)
    table = {"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"x": {"range": [0, 1]}}}
    source, good = declared(file, schema=schema_of(table, "it")), file.read_bytes()
    draw, said = np.random.default_rng(0), set[str]()
    for _ in range(300):
        content = bytearray(good)
        content[draw.integers(len(good))] = (0, 127, 128, 255, draw.integers(256))[draw.integers(5)]
        file.write_bytes(content)
        try:
            inspect(source)
        except InputError as failure:
            said.add(str(failure))
    assert len(said) > 10


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGED = "a0: &a0 {k: v}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)
)
#: Contents of a file in YAML, and what is said of it.
YAMLS: dict[str, tuple[str, str]] = {
    "aliases of aliases": (LAUGHS, "its aliases stand for too many values"),
    "merged mappings": (MERGED, "its aliases stand for too many values"),
    "an alias of itself": ("a: &a [*a]\n", "an alias contains itself"),
    "brackets": ("a: " + "[" * 1200, "its values are nested too deeply"),
    "dashes": ("- " * 5000, "its values are nested too deeply"),
    "braces": ("a: " + "{a: " * 1200, "its values are nested too deeply"),
    "a long text": ("a: " + "x" * (bounded_yaml.MOST_BYTES + 1), "it has more than 4,194,304 by"),
}


@pytest.mark.parametrize(("content", "said"), YAMLS.values(), ids=YAMLS.keys())
def test_yaml_wherever_it_is_read(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=said):
        read_schema(file)
    for command in ("train", "compare", "tune"):
        done = dpmac(command, "--config", file)
        assert (done.exit_code, said in done.output) == (2, True), done.output
    (tmp_path / folder.CONFIG).write_text(content)
    with pytest.raises(folder.BROKEN, match=said):
        folder.settings(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("range: [0, " + "9" * 5000 + "]", r"needs two numbers.*'9{80,100}\.\.\."),
        ("range: [0, 1e400]", "needs two numbers"),
        ("text: " + "9" * 5000, "exceeded maximum size"),
        ("text: 1000000000", "less than or equal to 8192"),
        ("categories: [" + ",".join(map(str, range(10_001))) + "]", "at most 10000 items"),
        ("range: [1, 2], type: date", "needs two dates"),
        ("range: [0000-01-01, 2020-01-01], type: date", "needs two dates"),
        ("range: [2000-01-01, 2020-01-01], type: date, format: '%%Q'", "needs a day, a month"),
        ("range: [[0], {a: 1}]", "needs two numbers"),
        ("type: [a]", "Input should be 'number'"),
    ],
)
def test_numbers_of_a_schema(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "t.csv").write_text("c,y\n1,a\n")
    (tmp_path / "s.yaml").write_text(
        f"label: {{column: y, classes: [a, b]}}\ncolumns:\n  c: {{{line}}}\n"
    )
    with pytest.raises(InputError, match=said) as caught:
        read_schema(tmp_path / "s.yaml")
    assert max(map(len, caught.value.errors)) < 1500
