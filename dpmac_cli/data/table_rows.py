"""Rows of a table that was opened: its cells, and which records cannot be used and why."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pyarrow as pa

from dpmac_cli.config.facts import NAMED, LeftOut, first_of, refuse, some_of
from dpmac_cli.data.column_schema import Column, Label
from dpmac_cli.data.table_cells import BoolArray, decoded_cells, text_cells
from dpmac_cli.errors import counted

#: Most characters of a cell to show in a message.
SHOWN = 40
#: Shown instead of a cell of a table with texts.
HIDDEN = " (not shown, because it may be part of a text)"
#: Advice on cells that are not written as declared, by the type of their column.
ADVICE = {
    "number": "declare decimal, thousands, missing_words or categories in the schema",
    "date": 'declare a format, such as "%d.%m.%Y", or missing_words in the schema',
    "boolean": "declare other categories or missing_words in the schema",
    "category": "declare it, or a range of numbers, or missing_words in the schema",
}
Cells = dict[str, pa.Array]


def names_of_texts(columns: Sequence[Column]) -> list[str]:
    """Return the names of the columns of texts, in order.

    Args:
        columns: columns of a schema.
    """
    return [column.name for column in columns if column.type == "text"]


class TableRows:
    """Cells of a table, and which records cannot be used.

    Args:
        cells: columns by their names, shape (records,) each.
        broken: why records cannot be read, by their number.
        texts: whether the table has texts, of which no message shows a part.
        drafted: whether the schema can still declare something else, unlike that of a model.

    Attributes:
        drafted: whether messages say what to declare instead.
        cells: columns, shape (records,) each.
        broken: why records cannot be read, by their number; their cells are null.
        bad: masks of other records that cannot be used, by the reason as a message says it.
        unread: cells that are no value of the type of their column and count as missing: the
            column, the fault ("no number") and a mask, shape (records,).
        remarks: private notes on these cells, and on categories that are not declared.
    """

    def __init__(
        self,
        cells: Cells,
        broken: dict[int, str],
        texts: bool,
        drafted: bool,
    ) -> None:
        self.cells, self.broken, self._texts = cells, broken, texts
        self.drafted = drafted
        self.bad: dict[str, BoolArray] = {}
        self.unread = list[tuple[Column, str, BoolArray]]()
        self.remarks = list[str]()
        self._lost = np.isin(range(len(self)), [*broken])

    def __len__(self) -> int:
        return max(map(len, self.cells.values()), default=0)

    def add(
        self,
        reason: str,
        records: BoolArray,
        column: Column | Label | None = None,
    ) -> None:
        """Add a reason why records cannot be used.

        Args:
            reason: the reason, as what a record has.
            records: which records, shape (records,).
            column: the column whose cells are the reason, so that the message shows some of them;
                None to show none.
        """
        if column is not None and records.any():
            reason += HIDDEN if self._texts else self._shown(records, column)
        self.bad[reason] = records | self.bad.get(reason, False)

    def remark(self, column: Column, fault: str, cells: BoolArray, read_as: str) -> None:
        """Add a remark on cells that count as something else; none if there are no such cells.

        Args:
            column: the column of the cells.
            fault: what they are, such as "no number".
            cells: which cells, shape (records,).
            read_as: what they count as, such as "missing".
        """
        numbers = [f"{row + 1:,}" for row in np.flatnonzero(cells).tolist()]
        if not numbers:
            return
        several = len(numbers) > 1
        verbs = ("are", "count") if several else ("is", "counts")
        self.remarks.append(
            f"{counted(len(numbers), 'cell')} of {column.name} {verbs[0]} {fault}, and {verbs[1]} "
            f"as {read_as} (record{'s' * several} {first_of(numbers)})"
        )

    def remark_unread(self) -> None:
        """Add remarks on the cells of :attr:`unread`, which count as missing."""
        for column, fault, cells in self.unread:
            self.remark(column, fault, cells, "missing")

    def reject_unread(self) -> None:
        """Make the cells of :attr:`unread` reasons why their records cannot be used."""
        for column, fault, cells in self.unread:
            self.add(f"{fault} in {column.name}", cells, column)

    def _shown(self, records: BoolArray, column: Column | Label) -> str:
        """Return some different cells of a column for a message, with advice on the schema.

        Args:
            records: which records, shape (records,).
            column: the column.
        """
        cells = self.cells[column.name].filter(pa.array(records))
        bad = text_cells(cells)
        different = dict.fromkeys(decoded_cells(bad))
        quoted = []
        for cell in islice(different, NAMED):
            short = f"{cell[:SHOWN]}..." if len(cell) > SHOWN else cell
            quoted.append(f"'{short}'")
        advice = f" ({ADVICE[column.type]})" if self.drafted else ""
        return f": {', '.join(quoted)}{advice}"

    def faults(self) -> list[str]:
        """Return why records cannot be used, with the first of them and how many others.

        There is one sentence per reason, without its full stop; [] if all can be used.
        """
        faults = some_of([*self.broken.values()])
        for reason, records in self.bad.items():
            readable = records & ~self._lost
            count = int(readable.sum())
            if count:
                verb = f" and {count - 1} more have" if count > 1 else " has"
                faults.append(f"Record {int(readable.argmax()) + 1}{verb} {reason}")
        return faults

    def used(
        self,
        skip_bad: bool,
        remedy: str,
    ) -> tuple[BoolArray, LeftOut]:
        """Return which records can be used, and a description of the others.

        Args:
            skip_bad: whether records that cannot be used are left out.
            remedy: what to do about them, behind the faults.

        Returns:
            a mask, shape (records,), and the records that are left out.

        Raises:
            InputError: there are some, and ``skip_bad`` does not leave them out.
        """
        if not skip_bad:
            refuse(self.faults(), remedy)
        bad = np.logical_or.reduce([self._lost, *self.bad.values()])
        names = []
        for row in np.flatnonzero(bad).tolist():
            names.append(self.broken.get(row, f"record {row + 1}"))
        return ~bad, LeftOut(tuple(names), tuple(self.faults()))
