"""CSV files: their header, separator and encoding, and their cells as text."""

import codecs
import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as arrow_csv

from dpmac_cli.data.schema import UTF8
from dpmac_cli.errors import InputError


@dataclass(frozen=True)
class CsvFile:
    """A CSV with a header, separated by commas, semicolons or tabs.

    Attributes:
        path: the file.
        encoding: name of its encoding, as Python has it.
    """

    path: Path
    encoding: str = UTF8

    @property
    def _codec(self) -> str:
        """Return the codec that skips a byte order mark."""
        return "utf-8-sig" if codecs.lookup(self.encoding).name == UTF8 else self.encoding

    def delimiter(self) -> str:
        """Return the most frequent of comma, semicolon and tab in the header."""
        with self.path.open(encoding=self._codec, errors="replace") as file:
            return max(",;\t", key=file.readline().count)

    def header(self) -> list[str]:
        """Return the names of the columns. Raises OSError and csv.Error."""
        with self.path.open(encoding=self._codec, errors="replace", newline="") as file:
            return next(csv.reader(file, delimiter=self.delimiter()), [])

    def cells(self, names: tuple[str, ...]) -> tuple[pa.Table, dict[int, str]]:
        """Return columns as text, and why some records are not among them, by number from 1.

        Cells in quotation marks may contain line breaks. Empty lines are no records.
        """
        ragged: dict[int, str] = {}

        def note(row: Any) -> str:
            found = f"{row.actual_columns} values for {row.expected_columns} columns"
            number = row.number - 1  # the header is row 1
            ragged[number] = f"Record {number} has {found}"
            return "skip"

        table = arrow_csv.read_csv(
            self.path,
            # Threads lose the row numbers.
            arrow_csv.ReadOptions(use_threads=False, encoding=self.encoding),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter(), newlines_in_values=True, invalid_row_handler=note
            ),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        return table, ragged

    def joins_lines(self, records: int) -> bool:
        """Return whether cells may contain line breaks, given the number of records."""
        content = self.path.read_bytes()
        return max(content.count(b"\n"), content.count(b"\r")) > records + 1

    def lines(self) -> tuple[pa.Table, dict[int, str]]:
        """Return columns as text, each line by itself, and why some records cannot be read.

        No quotation mark can join a line to the next one. The cells of a record that cannot be read
        are null. Raises InputError for an encoding in which lines cannot be told apart by
        themselves.
        """
        if not has_lines(self.encoding):
            raise InputError(
                f"--skip-bad reads each line of {self.path} by itself, which {self.encoding} does "
                "not allow: save the table as UTF-8, or leave out --skip-bad."
            )
        delimiter = self.delimiter()
        broken: dict[int, str] = {}
        cells: list[list[str | None]] = []
        content = self.path.read_bytes()
        content = content.removeprefix(codecs.BOM_UTF8) if self._codec == "utf-8-sig" else content
        lines = re.split(rb"\r\n|\n|\r", content)
        header = next(csv.reader([lines[0].decode(self.encoding)], delimiter=delimiter))
        for number, line in enumerate(lines[1:], 2):
            if not line:
                continue
            text, found, fault = line.decode(self.encoding, errors="replace"), list[Any](), ""
            try:
                found = next(csv.reader([text], delimiter=delimiter, strict=True), [])
            except csv.Error as failure:
                fault = f"cannot be read ({failure})"
            if not fault and len(found) != len(header):
                fault = f"has {len(found)} values for {len(header)} columns"
            if fault:
                broken[len(cells)] = f"Record {len(cells) + 1} (line {number}) {fault}"
            cells.append([None] * len(header) if fault else found)
        columns = zip(*cells, strict=True) if cells else [()] * len(header)
        return pa.table([pa.array(column, pa.string()) for column in columns], header), broken


def has_lines(encoding: str) -> bool:
    """Return whether each line of a text in this encoding can be decoded by itself."""
    return all(sign.encode(encoding) == sign.encode("ascii") for sign in "\n\r,;\t")
