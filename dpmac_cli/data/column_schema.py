"""Declarations of a table's columns: their types, how they are written, and their public values.

Imports neither numpy nor torch.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.functional_validators import AfterValidator, BeforeValidator

from dpmac_cli.config.records import InputKind
from dpmac_cli.config.tokens import MAX_TOKENS, MIN_TOKENS
from dpmac_cli.config.writing import WRITTEN
from dpmac_cli.tasks.task import FARTHEST

#: Characters that are trimmed from cells and from declared values.
BLANKS = " \t\n\v\f\r"
#: Encoding of tables that are text.
UTF8 = "utf-8"


def is_encoding(name: str) -> bool:
    """Return whether a name is one of an encoding whose lines can be decoded one by one.

    In such an encoding, every byte of ASCII stands for its letter wherever it is.

    Example:
        >>> is_encoding("cp1252"), is_encoding("iso2022_jp"), is_encoding("utf-16")
        (True, False, False)
    """
    ascii_signs = bytes(range(128))
    try:
        same = ascii_signs.decode(name, errors="replace") == ascii_signs.decode()
    except (LookupError, ValueError):
        return False
    return same and not codecs.lookup(name).name.startswith("iso2022")


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names as they are.

    Raises:
        ValueError: one is there twice.

    Example:
        >>> distinct(("age", "job"))
        ('age', 'job')
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{name} is declared {count} times")
    return names


def as_cell(value: Any) -> Any:
    """Return a value that a program declares, such as 999, as the text of its cells.

    Text loses the blanks around it, as cells do.

    Args:
        value: a text, a number or a truth value. Anything else is returned as it is, for the
            message of pydantic.

    Example:
        >>> as_cell(999), as_cell(True), as_cell(" no ")
        ('999', 'true', 'no')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value.strip(BLANKS)
    return f"{value:.15g}" if isinstance(value, int | float) else value


def _list_of_cells(values: Any) -> Any:
    """Return declared values as the texts of cells. Raises ValueError for one text."""
    if isinstance(values, str):
        raise ValueError(f"needs a list, such as [{values}]")
    return tuple(map(as_cell, values)) if isinstance(values, list | tuple) else values


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], AfterValidator(distinct)]
#: Values that cells have.
CellValues = Annotated[Texts, BeforeValidator(_list_of_cells)]


class Declared(BaseModel):
    """Base class of the parts of a schema: frozen, and without undeclared keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


#: Smallest width of a target's range relative to its ends.
NARROWEST = 1e-5
#: Key that declares the values of each type of column.
VALUES = {
    "number": "range",
    "date": "range",
    "category": "categories",
    "boolean": "categories",
    "text": "text",
}
#: Why a column is refused of which nothing is declared.
NEEDS_KIND = (
    "needs either a range or categories or text; or its type alone (number, category, boolean, "
    "date), and then its range is found within epsilon"
)
#: Words for false and true, in lower case, in a column of which nothing else is declared.
FALSE = ("0", "no", "n", "false", "f", "off")
TRUE = ("1", "yes", "y", "true", "t", "on")
#: Type of columns that each key is for; keys that are not listed are for all.
USED_BY = {"decimal": "number", "thousands": "number", "format": "date", "transform": "number"}
ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def _iso_date(day: Any) -> Any:
    """Return a day as it is declared; None in other forms of ISO 8601, which look like numbers."""
    return day if ISO_DATE.fullmatch(str(day)) else None


Day = Annotated[date, BeforeValidator(_iso_date)]
TWO_DAYS = TypeAdapter(tuple[Day, Day])
TWO_NUMBERS = TypeAdapter(tuple[FiniteFloat, FiniteFloat])


def _ends(ends: Any, info: ValidationInfo) -> Any:
    """Return the ends of a range as numbers or, for a column of dates, as dates.

    Args:
        ends: what is declared; None for no range.
        info: the fields that were validated before, with the type of the column.

    Raises:
        ValueError: it is no pair of numbers, or of dates.
    """
    kind: TypeAdapter[Any] = TWO_NUMBERS
    example = "numbers, such as [0, 100] (dates need type: date)"
    if info.data.get("type") == "date":
        kind = TWO_DAYS
        example = "dates, such as [2015-01-01, 2024-12-31]"
    if not ends:
        return ends
    try:
        return kind.validate_python(ends)
    except ValidationError:
        raise ValueError(f"needs two {example}, not {ends}") from None


Range = Annotated[tuple[float, float], BeforeValidator(_ends)]
Ends = Annotated[tuple[float, float] | tuple[date, date], BeforeValidator(_ends)]


class Written(Declared):
    """Form in which numbers are written in a table.

    Attributes:
        decimal: sign before the decimals; a point by default.
        thousands: sign between groups of three digits; none by default.
    """

    decimal: Literal[".", ","] | None = None
    thousands: Literal[".", ",", " ", "'"] | None = None

    @property
    def point(self) -> str:
        """Return the sign before the decimals."""
        return self.decimal or ("," if self.thousands == "." else ".")

    @model_validator(mode="after")
    def _check_signs(self) -> Self:
        if self.thousands is not None and self.thousands == self.point:
            raise ValueError("decimal and thousands need different signs")
        return self


class Column(Written):
    """A column that is an input of the network.

    Attributes:
        name: name in the table's header.
        type: "number", "category" and "text" follow from range, categories and text. "date" is for
            dates and times, which become the years until the last day of the range. "boolean" is
            for two categories, false and true, that become one input.
        range: lowest and highest number, or first and last date. Others are clipped to it. Without
            one, for a column of an explicit type, it follows from noisy counts, and the epsilon of
            the run covers it.
        categories: declared values. Each becomes an input that is 0 or 1, and all other values
            share one more input, "other". Without them, for a column of an explicit type, any value
            is known by a public hash, and yes, true and 1 are true.
        text: largest number of tokens of a text. Longer texts are truncated.
        format: how dates are written, as for ``strptime``; by default as in ISO 8601.
        missing: "input" adds an input that is 1 where the value is missing. That is so for all
            columns without range and categories, in which a cell that is not of the type is
            missing, too.
        missing_words: words for a missing value, besides an empty cell, NA and the like. In a
            column of numbers, 999 stands for 999.0, too.
    """

    name: Text
    type: Literal["number", "date", "category", "boolean", "text"] = "number"
    range: Ends | None = None
    categories: Annotated[CellValues, Field(max_length=10_000)] = ()
    text: Annotated[int, Field(ge=MIN_TOKENS, le=MAX_TOKENS)] | None = None
    format: Text | None = None
    missing: Literal["refuse", "input"] = "refuse"
    missing_words: CellValues = ()

    @model_validator(mode="before")
    @classmethod
    def _infer_type(cls, contents: Any) -> Any:
        """Add the type that follows from range, categories or text; ``missing`` without them."""
        if not isinstance(contents, dict):
            return contents
        declared = []
        for kind in ("number", "category", "text"):
            if contents.get(VALUES[kind]):
                declared.append(kind)
        if contents.get("type") is None:
            others = dict(contents)
            others.pop("type", None)
            return {**others, "type": declared[0]} if declared else others
        if not declared and contents.get("missing") is None:
            return {**contents, "missing": "input"}
        return contents

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError for keys that contradict each other or the type."""
        declared = [key for key in dict.fromkeys(VALUES.values()) if getattr(self, key)]
        if not declared and "type" not in self.model_fields_set:
            raise ValueError(NEEDS_KIND)
        if len(declared) > 1:
            raise ValueError(f"has {' and '.join(declared)}: declare one of them")
        wanted = VALUES[self.type]
        if declared and declared != [wanted]:
            raise ValueError(f"{declared[0]} is not for type: {self.type}, which has {wanted}")
        if self.type == "text" and self.text is None:
            raise ValueError("type: text needs text, the largest number of tokens, such as 128")
        if self.open and self.missing == "refuse":
            raise ValueError(f"missing: refuse needs {wanted}: declare it, or leave missing out")
        _check_keys(self)
        if self.range is not None and self.ends[0] >= self.ends[1]:
            end, order = ("date", "earlier") if self.type == "date" else ("number", "smaller")
            raise ValueError(f"the first {end} of a range must be {order} than the second")
        different = set(map(str.lower, self.categories))
        if self.type == "boolean" and self.categories and len(different) != 2:
            raise ValueError(
                "type: boolean needs two categories, false and true, such as categories: [no, yes]"
            )
        if self.format is not None:
            _check_format(self.format)
        return self

    @property
    def open(self) -> bool:
        """Return whether nothing but the type is declared."""
        return self.type != "text" and not (self.range or self.categories)

    @property
    def counted(self) -> bool:
        """Return whether its range follows from noisy counts."""
        return self.open and self.type in ("number", "date")

    @property
    def ranged(self) -> bool:
        """Return whether it is a number or a date in a declared range."""
        return self.range is not None

    def as_declared(
        self,
        low: float,
        high: float,
    ) -> tuple[float, float]:
        """Return numbers from low to high as a schema declares them; dates in days.

        In a declared range, the number of a date is that of the years until its last day.

        Args:
            low: lowest input.
            high: highest input.

        Returns:
            ends of a range, with dates in days since 1970-01-01.
        """
        if self.type == "date" and self.ranged:
            last = self.ends[1]
            return last - high * YEAR, last - low * YEAR
        return low, high

    @property
    def hashed(self) -> bool:
        """Return whether its values are known by their hash."""
        return self.open and self.type == "category"

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values that are declared by name; () for a column without categories."""
        return self.categories

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the range; those of dates in days since 1970-01-01."""
        assert self.range is not None  # noqa: S101
        return days_of(self.range[0]), days_of(self.range[1])

    @property
    def inputs(self) -> int:
        """Return the number of inputs that the column becomes."""
        if self.text is not None:
            values = self.text + WRITTEN
        elif self.type == "category" and not self.open:
            values = len(self.categories) + 1
        else:
            values = 1
        return values + self.flagged

    @property
    def flagged(self) -> bool:
        """Return whether one of the inputs says where the value is missing."""
        return self.missing == "input" and not self.hashed

    @property
    def parts(self) -> tuple[tuple[InputKind, int], ...]:
        """Return the kinds of its inputs, but of texts, and how many there are of each."""
        kind: InputKind = "open" if self.counted else "number"
        if self.type == "category":
            kind = "hashed" if self.open else "one-hot"
        elif self.type == "boolean":
            kind = "boolean"
        if not self.flagged:
            return ((kind, self.inputs),)
        return (kind, self.inputs - 1), ("flag", 1)


def days_of(end: float | date) -> float:
    """Return a number as it is, or the days between 1970-01-01 and a date.

    Example:
        >>> days_of(date(1970, 1, 3)), days_of(2.5)
        (2.0, 2.5)
    """
    return float(end.toordinal() - EPOCH) if isinstance(end, date) else end


EPOCH = date(1970, 1, 1).toordinal()
#: Days of a year.
YEAR = 365.25


def _check_format(written: str) -> None:
    """Raise ValueError for a format that does not tell a day."""
    known = datetime(1919, 12, 31)
    try:
        same = datetime.strptime(known.strftime(written), written).date() == known.date()
    except ValueError:
        same = False
    if not same:
        raise ValueError(
            f"format {written} needs a day, a month and a year of four digits, such as %d.%m.%Y"
        )


class Label(Written):
    """The column to predict: classes, or numbers in a public range.

    Attributes:
        column: name in the table's header.
        classes: names of its classes.
        type: "category" or "number". It follows from classes and range.
        range: lowest and highest number. Other numbers are clipped to it. Without one, for type:
            number, it follows from noisy counts, and the epsilon of the run covers it.
        transform: "log1p" predicts log(1 + y), for numbers of very different sizes.
        missing_words: words for a missing value, as in :class:`Column`.
    """

    column: Text
    type: Literal["number", "category"] = "category"
    classes: CellValues = ()
    range: Range | None = None
    transform: Literal["none", "log1p"] = "none"
    missing_words: CellValues = ()

    @model_validator(mode="before")
    @classmethod
    def _infer_type(cls, contents: Any) -> Any:
        """Add the type that follows from range and classes."""
        if not isinstance(contents, dict) or contents.get("type") is not None:
            return contents
        return {**contents, "type": "number" if contents.get("range") else "category"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError for keys that contradict each other or the type."""
        is_number = self.type == "number" or self.range is not None
        if is_number == bool(self.classes):
            raise ValueError(
                "needs either the names of its classes, such as classes: [no, yes], or for numbers "
                "to predict their public range, such as range: [0, 100], or type: number to find "
                "it within epsilon"
            )
        _check_keys(self)
        if self.open and self.transform != "none":
            raise ValueError("transform needs the public range of the numbers, such as [0, 100]")
        if len(self.classes) == 1:
            raise ValueError("classes: needs at least two names")
        if self.range is not None:
            for fault in faults_of_range(*self.range, self.transform):
                raise ValueError(fault)
        return self

    @property
    def name(self) -> str:
        """Return the name of the column."""
        return self.column

    @property
    def open(self) -> bool:
        """Return whether it is numbers, whose range follows from noisy counts."""
        return self.type == "number" and self.range is None

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values that are declared by name."""
        return self.classes

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the range; those of all numbers if there is none."""
        return self.range or (-FARTHEST, FARTHEST)


def _check_keys(column: Column | Label) -> None:
    """Raise ValueError for a key that is for columns of another type."""
    for key, kind in USED_BY.items():
        is_declared = getattr(column, key, None) not in (None, "none")
        if is_declared and column.type != kind:
            raise ValueError(f"{key} is for columns of type {kind}")


def faults_of_range(
    low: float,
    high: float,
    transform: str,
) -> Iterator[str]:
    """Yield faults of the declared range of numbers to predict.

    Args:
        low: lowest number.
        high: highest number. Ranges that are narrow relative to their ends lose digits in float32.
        transform: "none", or "log1p" for numbers above -1.

    Example:
        >>> list(faults_of_range(0, 100, "log1p"))
        []
    """
    is_order_right = -FARTHEST <= low < high <= FARTHEST
    if not is_order_right or high - low < NARROWEST * max(-low, high):
        order = ". Swap them" if low > high else ""
        yield (
            f"the range of the target is {low:g} to {high:g}, but the first number must be smaller "
            f"than the second, both between -{FARTHEST:g} and {FARTHEST:g}{order}"
        )
    elif transform == "log1p" and low <= -1:
        yield f"transform: log1p needs a range above -1, because it takes the log of 1 + {low:g}"
    elif transform not in ("none", "log1p"):
        yield f"transform {transform} must be none or log1p"
