"""Cells of a CSV as text, read by pyarrow, so that no line decides how another one is read.

Quotation marks are those of RFC 4180: around a whole cell, and doubled inside it. Then a record
ends with a line that ends outside of a cell: it has an even number of them. A stray mark, which
would join its line to the next ones, makes a record that does not follow the rule, and the file is
refused. With ``--skip-bad`` each line is a record, and those that do not follow the rule are left
out.
"""

import codecs
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as arrow_csv

from dpmac_cli.config.facts import refuse
from dpmac_cli.data.column_schema import UTF8
from dpmac_cli.errors import InputError

#: Characters that may separate columns without a declaration: the most frequent in the header does.
DELIMITERS = ",;\t|"
LINE_END, LINE_END_OF_TEXT = re.compile(rb"\r\n|\n|\r"), re.compile(r"\r\n|\n|\r")
#: Half of a pair of UTF-16 without the other half.
SURROGATE = re.compile("[\ud800-\udfff]")
#: Encoding that is read by its byte order mark, such as "Unicode text" of Excel.
UTF16 = "utf-16"
#: First bytes of a file that gzip wrote.
GZIP = b"\x1f\x8b"
#: Largest number of bytes that are parsed at a time; a record may be as long.
BLOCK = 1 << 30
STRAY = "has a quotation mark that neither encloses a cell nor is doubled"


@dataclass(frozen=True)
class CsvFile:
    """A CSV with a header.

    Attributes:
        path: the file.
        encoding: name of its encoding, as Python has it. A file that begins with the byte order
            mark of UTF-16 is read by that instead.
        declared: character that separates its columns; None for one of :data:`DELIMITERS`.
    """

    path: Path
    encoding: str = UTF8
    declared: str | None = None

    def header(self) -> list[str]:
        """Return the names of the columns, from the first line alone.

        Raises:
            OSError: the file cannot be read.
            ValueError: its first line is no text.
            csv.Error: its first line is no line of a CSV.
        """
        with self.path.open("rb") as file:
            if file.read(len(GZIP)) == GZIP:
                raise ValueError(f"it is compressed by gzip: unpack it, gunzip -c {self.path}")
        with self._begin() as file:
            lines = csv.reader(file, delimiter=self.delimiter())
            names = next(lines, [])
        if "\0" in "".join(names):
            raise ValueError(
                "line 1 has zero bytes, so it is no text, or UTF-16 without a byte order mark: "
                "save the table as UTF-8"
            )
        return names

    def codec(self) -> str:
        """Return the encoding that the file begins with a mark of, or else the declared one."""
        with self.path.open("rb") as file:
            mark = file.read(len(codecs.BOM_UTF16))
        if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return UTF16
        if codecs.lookup(self.encoding).name == UTF8:
            return "utf-8-sig"
        return self.encoding

    @property
    def named(self) -> str:
        """Return the name of the encoding for a message."""
        encoding = UTF16 if self.codec() == UTF16 else self.encoding
        return encoding.upper()

    def delimiter(self) -> str:
        """Return the character that separates columns: the declared one, or from the header."""
        if self.declared is not None:
            return self.declared
        with self._begin() as file:
            return max(DELIMITERS, key=file.readline().count)

    def cells(
        self,
        names: tuple[str, ...],
        skip_bad: bool,
    ) -> tuple[pa.Table, dict[int, str]]:
        """Return columns as text, and why some records cannot be read; their cells are null.

        Cells in quotation marks may contain line breaks, but with ``skip_bad`` each line is a
        record.

        Args:
            names: columns to read.
            skip_bad: whether records that cannot be read are left out.

        Returns:
            the columns, with a row for each record, and faults by the numbers of records.

        Raises:
            InputError: the first line is no text; without ``skip_bad`` for all records that cannot
                be read.
        """
        records, lines = self._records(skip_bad)
        text = pa.array(records, pa.string())
        follows = compute.match_substring_regex(text, self._rule()).fill_null(False)
        if not len(follows) or not follows[0].as_py():
            raise InputError(f"{self.path}: its first line {STRAY}, or is not text.")
        # Cells in quotation marks may contain delimiters.
        bare = compute.replace_substring_regex(text, '"[^"]*"', "")
        delimiters = compute.count_substring(bare, self.delimiter())
        counts = np.asarray(delimiters.fill_null(0)) + 1
        is_row = np.asarray(follows)
        fits = is_row & (counts == counts[0])
        table = self._parsed(text.filter(pa.array(fits)), names)
        broken = dict[int, str]()
        for row in np.flatnonzero(~fits).tolist():
            if not text[row].is_valid:
                fault = f"is not text in {self.named} ({self._remedy()})"
            elif not is_row[row]:
                fault = STRAY
            else:
                fault = f"has {counts[row]} values for {counts[0]} columns"
            broken[row - 1] = f"Record {row} (line {lines[row]}) {fault}"
        if not skip_bad:
            refuse(
                [*broken.values()],
                f" Correct {self.path}, or add {{skip_bad=True}} to read each line by itself and "
                "leave these records out.",
            )
        is_record = fits[1:]
        places = np.cumsum(is_record) - 1
        return table.take(pa.array(places, mask=~is_record)), broken

    def _records(self, skip_bad: bool) -> tuple[list[str | None], list[int]]:
        """Return the header and the records as texts, and the number of the first line of each.

        A record ends with a line that ends outside of a cell; with ``skip_bad``, with each line.
        Empty ones are left out.

        Args:
            skip_bad: whether each line is a record.

        Returns:
            texts, None for one that is not text, and numbers of lines, from 1.
        """
        lines = self._lines()
        begins: Sequence[int] = range(len(lines) + 1)
        if not skip_bad:
            is_odd = [line is not None and line.count('"') % 2 for line in lines]
            is_outside = np.cumsum(is_odd) % 2 == 0
            ends = 1 + np.flatnonzero(is_outside)
            begins = sorted({0, *ends.tolist(), len(lines)})
        records = list[str | None]()
        numbers = list[int]()
        for first, end in pairwise(begins):
            record = lines[first] if end == first + 1 else _joined(lines[first:end])
            if record != "":
                records.append(record)
                numbers.append(first + 1)
        return records, numbers

    def _parsed(
        self,
        rows: pa.Array,
        names: tuple[str, ...],
    ) -> pa.Table:
        """Return columns of a CSV as text.

        Args:
            rows: the header and records that follow the rule, as texts.
            names: columns to read.
        """
        lines = [*rows.to_pylist(), ""]
        content = "\n".join(lines).encode()
        return arrow_csv.read_csv(
            pa.BufferReader(content),
            arrow_csv.ReadOptions(block_size=min(len(content) + 1, BLOCK)),
            arrow_csv.ParseOptions(delimiter=self.delimiter(), newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), include_columns=list(names)
            ),
        )

    def _remedy(self) -> str:
        """Return what to do about lines that are not text."""
        if self.codec() == UTF16:
            return "save the file as UTF-8"
        return "save the file so, or before training declare encoding: cp1252 in the schema"

    def _begin(self) -> TextIO:
        return self.path.open(encoding=self.codec(), errors="replace", newline="")

    def _lines(self) -> list[str | None]:
        """Return the lines of the file; None for one that is not text."""
        content = self.path.read_bytes()
        if self.codec() != UTF16:
            content = content.removeprefix(codecs.BOM_UTF8)
            return [_text(line, self.encoding) for line in LINE_END.split(content)]
        # Every character has two or four bytes, so a line that is not text changes no other one.
        text = content.decode(UTF16, "surrogatepass")
        return [line if _is_text(line) else None for line in LINE_END_OF_TEXT.split(text)]

    def _rule(self) -> str:
        """Return a regular expression of RE2 for cells between delimiters."""
        apart = rf"\x{ord(self.delimiter()):02x}"
        cell = rf'(?:"(?:[^"]|"")*"|[^"{apart}]*)'
        return f"^{cell}(?:{apart}{cell})*$"


def _joined(lines: list[str | None]) -> str | None:
    """Return the lines of a record as one text; None if one of them is not text."""
    texts = [line for line in lines if line is not None]
    return "\n".join(texts) if len(texts) == len(lines) else None


def _text(line: bytes, encoding: str) -> str | None:
    """Return a line as text; None if it is not text in its encoding."""
    try:
        return line.decode(encoding)
    except UnicodeDecodeError:
        return None


def _is_text(line: str) -> bool:
    """Return whether a line has no half of a surrogate pair."""
    return SURROGATE.search(line) is None
