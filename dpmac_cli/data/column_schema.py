"""Declarations of a table's columns: their types, how they are written, and their public values.

Imports neither numpy nor torch.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from dpmac_cli.data.writing import WRITTEN

#: Default and limits of the number of tokens of a text, which has a first and a last.
TOKENS, MIN_TOKENS, MAX_TOKENS = 128, 3, 8192


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names. Raises ValueError if one is there twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{name} is declared {count} times")
    return names


def as_cell(value: Any) -> Any:
    """Return a value that a program declares, such as 999, as the text of its cells."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, int | float) else value


def _list_of_cells(values: Any) -> Any:
    if isinstance(values, str):
        raise ValueError(f"needs a list, such as [{values}]")
    return tuple(map(as_cell, values)) if isinstance(values, list | tuple) else values


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], AfterValidator(distinct)]
#: Values that cells have.
CellValues = Annotated[Texts, BeforeValidator(_list_of_cells)]


class Declared(BaseModel):
    """Part of a schema: frozen, and without undeclared keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


#: Largest absolute value of a target's range, and smallest width relative to its ends.
FARTHEST, NARROWEST = 1e30, 1e-5
#: Key that declares the values of each type of column.
VALUES = {
    "number": "range",
    "integer": "range",
    "date": "range",
    "category": "categories",
    "boolean": "categories",
    "text": "text",
}
#: Types of columns that each key is for; keys that are not listed are for all.
USED_BY = {
    "decimal": ("number", "integer"),
    "thousands": ("number", "integer"),
    "symbol": ("number", "integer"),
    "format": ("date",),
    "parts": ("date",),
    "reference": ("date",),
}
#: Inputs of a network that a part of a date becomes.
PARTS = {"age": 1, "weekday": 7, "month": 12, "day_of_year": 2, "time_of_day": 2}
#: Most whole numbers of a column of type integer.
MOST_INTEGERS = 1_000
#: Directives of a format that dates are read with, and which of them must be there.
DIRECTIVES, NEEDED = "dmYyHMSfj", (("Y", "y"), ("d", "j"), ("m", "j"))
ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def _ends(ends: Any, info: ValidationInfo) -> Any:
    """Return the ends of a range as numbers or, for a column of dates, as dates."""
    if ends is None:
        return None
    dates = info.data.get("type") == "date"
    example = "[2015-01-01, 2024-12-31]" if dates else "[0, 100]"
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        kind = "dates, the first and the last" if dates else "numbers, the lowest and the highest"
        raise ValueError(f"needs two {kind}, such as {example}, not {ends}")
    texts = [str(end).strip() for end in ends]
    if not dates and any(ISO_DATE.fullmatch(text) for text in texts):
        raise ValueError("its ends are dates: add type: date to the column")
    read: Callable[[str], float | date] = _iso_date if dates else _finite
    try:
        return tuple(map(read, texts))
    except ValueError as failure:
        raise ValueError(f"{failure}: needs two, such as {example}") from None


def _iso_date(text: str) -> date:
    if not ISO_DATE.fullmatch(text):  # other forms of ISO 8601 look like numbers
        raise ValueError(f"{text} is not a date as YYYY-MM-DD")
    return date.fromisoformat(text)


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text} is not a valid number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


Range = Annotated[tuple[float, float], BeforeValidator(_ends)]
Ends = Annotated[tuple[float, float] | tuple[date, date], BeforeValidator(_ends)]


class Written(Declared):
    """Form in which numbers are written in a table.

    Attributes:
        decimal: sign before the decimals; a point by default.
        thousands: sign between groups of three digits; none by default.
        symbol: text before or after each number, such as kg or a currency, which is not read.
    """

    decimal: Literal[".", ","] | None = None
    thousands: Literal[".", ",", " ", "'"] | None = None
    symbol: Text | None = None

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
        type: "number", "category" and "text" follow from range, categories and text. "integer" is
            for whole numbers, each of which becomes an input like a category. "date" is for dates
            and times. "boolean" is for two categories, false and true, that become one input.
        range: lowest and highest number, or first and last date. Others are clipped to it.
        categories: declared values. Each becomes an input that is 0 or 1, and all other values
            share one more input, "other".
        text: largest number of tokens of a text. Longer texts are truncated.
        format: how dates are written, as for ``strptime``; by default as in ISO 8601.
        parts: parts of a date that become inputs; by default its age.
        reference: column of dates that the age refers to; by default the last day of the range.
        missing: "input" adds an input that is 1 where the value is missing.
        missing_words: words for a missing value, besides an empty cell, NA and the like. In a
            column of numbers, 999 stands for 999.0, too.
        outside: "refuse" rejects records outside the range, or with other categories.
    """

    name: Text
    type: Literal["number", "integer", "date", "category", "boolean", "text"] = "number"
    range: Ends | None = None
    categories: Annotated[CellValues, Field(max_length=10_000)] = ()
    text: Annotated[int, Field(ge=MIN_TOKENS, le=MAX_TOKENS)] | None = None
    format: Text | None = None
    parts: Annotated[
        tuple[Literal["age", "weekday", "month", "day_of_year", "time_of_day"], ...],
        AfterValidator(distinct),
    ] = ()
    reference: Text | None = None
    missing: Literal["refuse", "input"] = "refuse"
    missing_words: CellValues = ()
    outside: Literal["accept", "refuse"] = "accept"

    @model_validator(mode="before")
    @classmethod
    def _infer_type(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") is not None:
            return given
        plain = [kind for kind in ("number", "category", "text") if given.get(VALUES[kind])]
        return {**given, "type": plain[0] if plain else "number"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(bool(getattr(self, key)) for key in set(VALUES.values())) != 1:
            raise ValueError("needs either a range or categories or text")
        if not getattr(self, VALUES[self.type]):
            raise ValueError(f"type: {self.type} needs {VALUES[self.type]}")
        for key, types in USED_BY.items():
            if getattr(self, key) and self.type not in types:
                raise ValueError(f"{key} is for columns of type {' or '.join(types)}")
        if self.text is not None and self.outside == "refuse":
            raise ValueError("a text has no values to refuse: leave out outside")
        if self.range is not None and self.ends[0] >= self.ends[1]:
            which = ("date", "earlier") if self.type == "date" else ("number", "smaller")
            raise ValueError("the first {} of a range must be {} than the second".format(*which))
        for fault in _faults_of_type(self):
            raise ValueError(fault)
        return self

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values that are declared by name."""
        return self.categories

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the range; those of dates in days since 1970-01-01."""
        assert self.range is not None  # noqa: S101
        return days_of(self.range[0]), days_of(self.range[1])

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values that become one input each."""
        if self.type != "integer":
            return self.categories
        low, high = map(int, self.ends)
        return tuple(map(str, range(low, high + 1)))

    @property
    def chosen(self) -> tuple[str, ...]:
        """Return the parts of a date that become inputs."""
        return self.parts or ("age",)

    @property
    def inputs(self) -> int:
        """Return the number of inputs that the column becomes."""
        if self.type == "date":
            values = sum(PARTS[part] for part in self.chosen)
        elif self.type in ("number", "boolean"):
            values = 1
        elif self.text is not None:
            values = self.text + WRITTEN
        else:
            values = len(self.choices) + (self.outside == "accept")
        return values + (self.missing == "input")


def days_of(end: float | date) -> float:
    """Return a number, or the days between 1970-01-01 and a date."""
    return float(end.toordinal() - EPOCH) if isinstance(end, date) else end


EPOCH = date(1970, 1, 1).toordinal()


def _faults_of_words(words: Sequence[str], values: Sequence[str], what: str) -> Iterator[str]:
    """Yield faults of words for a missing value that are values of their column, too."""
    for word in words:
        if word in values:
            yield f"'{word}' is among the {what} and the missing_words: leave it out of one"


def _faults_of_type(column: Column) -> Iterator[str]:
    """Yield faults of what only some types of columns declare."""
    if column.type == "boolean":  # its words may be in upper or lower case
        folded = [name.casefold() for name in column.categories]
        same = [word for word in column.missing_words if word.casefold() in folded]
        yield from _faults_of_words(same, same, "categories")
    yield from _faults_of_words(column.missing_words, column.categories, "categories")
    if column.type == "boolean" and len({name.casefold() for name in column.categories}) != 2:
        yield "type: boolean needs two categories, false and true, such as categories: [no, yes]"
    if column.type == "integer" and any(end != int(end) for end in column.ends):
        yield "type: integer needs whole numbers as the ends of its range"
    elif column.type == "integer" and len(column.choices) > MOST_INTEGERS:
        yield (
            f"type: integer makes an input of each of {len(column.choices)} whole numbers, at most "
            f"{MOST_INTEGERS}. Leave out the type, so that the number itself is one input"
        )
    if column.reference is not None and "age" not in column.chosen:
        yield "reference is for the part age: add it to parts"
    if column.format is not None:
        yield from _faults_of_format(column.format, column.ends)


def _faults_of_format(written: str, ends: tuple[float, float]) -> Iterator[str]:
    found = re.findall("%(.?)", written.replace("%%", ""))
    if strange := [letter for letter in found if letter not in [*DIRECTIVES]]:
        known = " ".join(f"%{letter}" for letter in DIRECTIVES)
        yield f"format {written} has %{strange[0]}, but dates are read with {known} only"
    elif not all(any(letter in found for letter in some) for some in NEEDED):
        yield f"format {written} needs a day, a month and a year, such as %d.%m.%Y"
    elif "y" in found and ends[1] - ends[0] >= CENTURY:
        yield f"format {written} has years of two digits, which need a range of less than 100 years"


#: Days of the shortest century.
CENTURY = 36_524


class Label(Written):
    """The column to predict: classes, or numbers in a public range.

    Attributes:
        column: name in the table's header.
        classes: names of its classes.
        range: lowest and highest number. Other numbers are clipped to it.
        transform: "log1p" predicts log(1 + y), for numbers of very different sizes.
        kind: "count" predicts counts, with a range that begins at 0.
        missing_words: words for a missing value, as in :class:`Column`.
        outside: "refuse" rejects records outside the range.
    """

    column: Text
    classes: CellValues = ()
    range: Range | None = None
    transform: Literal["none", "log1p"] = "none"
    kind: Literal["number", "count"] = "number"
    missing_words: CellValues = ()
    outside: Literal["accept", "refuse"] = "accept"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.range is None) == (not self.classes):
            raise ValueError(
                "needs either the names of its classes, such as classes: [no, yes], or for numbers "
                "to predict their public range, such as range: [0, 100]"
            )
        if self.range is None:
            if len(self.classes) < 2:
                raise ValueError("classes: needs at least two names")
            # A schema in a report has all fields.
            if (self.transform, self.kind, self.outside) != ("none", "number", "accept"):
                raise ValueError("transform, kind and outside are for numbers, not for classes")
            if self.decimal or self.thousands or self.symbol:
                raise ValueError("decimal, thousands and symbol are for numbers, not for classes")
            for fault in _faults_of_words(self.missing_words, self.classes, "classes"):
                raise ValueError(fault)
            return self
        for fault in faults_of_range(*self.range, self.transform, self.kind):
            raise ValueError(fault)
        return self

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values that are declared by name."""
        return self.classes

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the range."""
        assert self.range is not None  # noqa: S101
        return self.range


def faults_of_range(low: float, high: float, transform: str, kind: str) -> Iterator[str]:
    """Yield faults of the declared range of numbers to predict."""
    if not -FARTHEST <= low < high <= FARTHEST or high - low < NARROWEST * max(-low, high):
        order = ". Swap them" if low > high else ""
        yield (
            f"the range of the target is {low:g} to {high:g}, but the first number must be smaller "
            f"than the second, both between -{FARTHEST:g} and {FARTHEST:g}{order}"
        )
    elif kind == "count" and (low != 0 or transform != "none"):
        yield "a count needs a range that begins at 0, such as range: [0, 30], and no transform"
    elif transform == "log1p" and low <= -1:
        yield f"transform: log1p needs a range above -1, because it takes the log of 1 + {low:g}"
    elif transform not in ("none", "log1p") or kind not in ("number", "count"):
        yield f"transform {transform} must be none or log1p, and kind {kind} number or count"
