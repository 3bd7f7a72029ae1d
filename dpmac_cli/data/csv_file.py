"""Cells of a CSV as text, read by pyarrow, so that no line decides how another one is read.

Quotation marks are those of RFC 4180: around a whole cell, and doubled inside it. Then every line
that ends outside of a cell has an even number of them. A stray mark, which would join its line to
the next ones, makes the number of the whole file odd or is beside a letter. Such a file is refused.
With ``--skip-bad`` each line is a record, and lines that do not follow the rule are left out.
"""

import codecs
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as arrow_csv

from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.schema import UTF8
from dpmac_cli.errors import InputError

#: Characters that may separate columns without a declaration: the most frequent in the header does.
DELIMITERS = ",;\t|"
LINE_END = re.compile(rb"\r\n|\n|\r")
#: Largest number of bytes that are parsed at a time; a record may be as long.
BLOCK = 1 << 30
STRAY = "has a quotation mark that neither encloses a cell nor is doubled"


@dataclass(frozen=True)
class CsvFile:
    """A CSV with a header.

    Attributes:
        path: the file.
        encoding: name of its encoding, as Python has it.
        declared: character that separates its columns; None for one of :data:`DELIMITERS`.
    """

    path: Path
    encoding: str = UTF8
    declared: str | None = None

    def header(self) -> list[str]:
        """Return the names of the columns. Raises OSError and csv.Error."""
        with self._begin() as file:
            return next(csv.reader(file, delimiter=self.delimiter()), [])

    def delimiter(self) -> str:
        """Return the character that separates columns."""
        if self.declared is not None:
            return self.declared
        with self._begin() as file:
            return max(DELIMITERS, key=file.readline().count)

    def cells(self, names: tuple[str, ...]) -> pa.Table:
        """Return columns as text. Cells in quotation marks may contain line breaks.

        Raises InputError with all lines of other lengths than the header, or with the first line
        that is not text or has a stray quotation mark.
        """
        content = self.path.read_bytes()
        try:
            text = content.decode(self.encoding)
        except UnicodeDecodeError as failure:
            line = content.count(b"\n", 0, failure.start) + 1
            raise InputError(
                f"{self.path}: line {line} is not text in {self.encoding.upper()}. Save the table "
                "with that encoding, or declare its own, such as --encoding cp1252."
            ) from failure
        content = text.removeprefix("\ufeff").encode()
        if b'"' in content and not self._follows_rule(content):
            line = next(self._stray(content))
            raise InputError(
                f"{self.path}: line {line} {STRAY}. Correct it, or add --skip-bad to read each "
                "line by itself and leave out those with stray marks."
            )
        table, ragged = self._parsed(content, names)
        faults = [f"Record {row + 1} has {why}" for row, why in ragged.items()]
        refuse(faults, f" Correct {self.path}, or add --skip-bad to leave these records out.")
        return table

    def lines(self, names: tuple[str, ...]) -> tuple[pa.Table, dict[int, str]]:
        """Return columns as text, each line by itself, and why some records cannot be read.

        The cells of a record that cannot be read are null. Raises InputError for an encoding in
        which lines cannot be told apart by themselves.
        """
        if not has_lines(self.encoding):
            raise InputError(
                f"--skip-bad reads each line of {self.path} by itself, which {self.encoding} does "
                "not allow: save the table as UTF-8, or leave out --skip-bad."
            )
        content = self.path.read_bytes()
        if codecs.lookup(self.encoding).name == UTF8:
            content = content.removeprefix(codecs.BOM_UTF8)
        every = LINE_END.sub(b"\n", content).split(b"\n")
        numbers = [number for number, line in enumerate(every, 1) if line]
        lines = self._texts([every[number - 1] for number in numbers])
        del content, every
        fits = compute.match_substring_regex(lines, self._rule("")).fill_null(False)
        if not len(fits) or not fits[0].as_py():
            raise InputError(f"{self.path}: its first line {STRAY}, or is not text.")
        good = lines.filter(fits)
        table, ragged = self._parsed("\n".join(good.to_pylist()).encode(), names)
        kept = np.flatnonzero(np.asarray(fits)[1:])
        unread = compute.is_null(lines)
        broken = {
            int(row): f"is not text in {self.encoding}" if unread[row + 1].as_py() else STRAY
            for row in np.flatnonzero(~np.asarray(fits)[1:])
        }
        broken |= {int(kept[row]): f"has {why}" for row, why in ragged.items()}
        places = np.full(len(lines) - 1, -1)
        places[np.delete(kept, list(ragged))] = np.arange(table.num_rows)
        found = table.take(pa.array(places, mask=places < 0))
        said = {row: f"Record {row + 1} (line {numbers[row + 1]}) " for row in sorted(broken)}
        return found, {row: name + broken[row] for row, name in said.items()}

    def _begin(self) -> Any:
        codec = "utf-8-sig" if codecs.lookup(self.encoding).name == UTF8 else self.encoding
        return self.path.open(encoding=codec, errors="replace", newline="")

    def _texts(self, lines: list[bytes]) -> pa.Array:
        """Return lines as text, null where one is not text in the encoding of the file."""
        try:
            return pa.array(b"\n".join(lines).decode(self.encoding).split("\n"), pa.string())
        except UnicodeDecodeError:
            return pa.array([_text(line, self.encoding) for line in lines], pa.string())

    def _rule(self, ends: str) -> str:
        """Return a regular expression of RE2 for cells between delimiters and ``ends``."""
        apart = rf"[\x{ord(self.delimiter()):02x}{ends}]"
        cell = rf'(?:"(?:[^"]|"")*"|[^"{apart[1:-1]}]*)'
        return f"^{cell}(?:{apart}{cell})*$"

    def _follows_rule(self, content: bytes) -> bool:
        whole = pa.array([content], pa.large_binary())
        return bool(compute.match_substring_regex(whole, self._rule(r"\r\n"))[0].as_py())

    def _stray(self, content: bytes) -> Iterator[int]:
        """Yield the numbers of lines with stray quotation marks, or that open a cell for good."""
        rule, begun, record = re.compile(self._rule(r"\r\n").encode()), 1, b""
        for number, line in enumerate(LINE_END.split(content), 1):
            record, begun = (record + b"\n" + line, begun) if record else (line, number)
            if record.count(b'"') % 2 == 0:
                if not rule.fullmatch(record):
                    yield begun
                record = b""
        yield begun

    def _parsed(self, content: bytes, names: tuple[str, ...]) -> tuple[pa.Table, dict[int, str]]:
        """Return columns as text, and the lengths of records that are not among them."""
        ragged = dict[int, str]()

        def note(row: Any) -> str:
            found = f"{row.actual_columns} values for {row.expected_columns} columns"
            ragged[row.number - 2] = found  # the header is row 1
            return "skip"

        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            # Threads lose the numbers of rows.
            arrow_csv.ReadOptions(use_threads=False, block_size=min(len(content) + 1, BLOCK)),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter(), newlines_in_values=True, invalid_row_handler=note
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=list(names)
            ),
        )
        return table, ragged


def _text(line: bytes, encoding: str) -> str | None:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError:
        return None


def has_lines(encoding: str) -> bool:
    """Return whether each line of a text in this encoding can be decoded by itself."""
    ascii_signs, shifts = bytes(range(128)), codecs.lookup(encoding).name.startswith("iso2022")
    return not shifts and ascii_signs.decode(encoding, errors="replace") == ascii_signs.decode()
