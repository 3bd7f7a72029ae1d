"""Columns of a table as inputs and targets, as their schema declares them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from dpmac_cli.data.column_schema import Column, Label, Written
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.table_cells import (
    BadRecords,
    BoolArray,
    decoded_cells,
    has_text,
    missing_in,
    numbers_of,
    places_of,
    stands_for_none,
    text_cells,
)
from dpmac_cli.data.table_dates import CALENDAR, age_of, formats_of, outside_of, read_dates
from dpmac_cli.data.table_numbers import (
    if_no_value,
    number_pattern,
    read_numbers,
    shown,
    tells_no_text,
    what_it_may_mean,
)
from dpmac_cli.data.texts import NEEDS_ENCODER, as_inputs, is_blank
from dpmac_cli.data.wordpiece import TextReader

Cells = dict[str, pa.Array]
#: Said instead of a cell beside texts.
HIDDEN = (
    " (not shown, because it may be part of a text; leave the cell empty, or declare its word as "
    "missing_words, where there is no value)"
)
#: Values of inputs, (records, inputs), and the lowest and highest value of each.
Inputs = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def column_inputs(
    columns: Sequence[Column],
    cells: Cells,
    bad: BadRecords,
    strict: bool,
    reader: TextReader | None,
) -> Inputs:
    """Return columns as inputs, and add masks of records with invalid values to ``bad``."""
    texts = [column.name for column in columns if column.type == "text"]
    if texts and reader is None:
        refuse([f"The column {name} is declared as text" for name in texts], f" {NEEDS_ENCODER}.")
    refuse(
        [f"The column {name} contains numbers" for name in texts if _numeric(cells[name], strict)],
        " Declare their range in the schema instead of text: {range: [LOW, HIGH]}.",
    )
    dates = {
        column.name: _dates(column, cells[column.name], bad)
        for column in columns
        if column.type == "date"
    }
    named = {column.name: column for column in columns}
    parts = list[Inputs]()
    for column in columns:
        own = cells[column.name]
        if column.type == "text" and reader is not None:
            parts.append(_tokens(column, own, bad, reader))
            continue
        missing = missing_in(own, column)
        if column.type == "date":
            other = column.reference
            reference = None if other is None else (dates[other], named[other])
            values = _date_inputs(column, dates[column.name], reference)
        else:
            values = READERS[column.type](column, own, missing, bad)
        one_hot = column.type in ("category", "integer") and column.outside == "accept"
        if strict and one_hot:
            _refuse_strangers(column, own, values[0][:, -1], bad)
        parts.append(_with_missing(column, values, missing, bad))
    x, low, high = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
    return x, low, high


def targets_of(
    labels: Sequence[Label], cells: Cells, bad: BadRecords
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return targets and what is declared of them; add masks of invalid records to ``bad``.

    Targets have shape (records,), or (records, targets) if there are several.
    """
    if labels[0].range is None:
        return _classes_of(labels[0], cells[labels[0].column], bad)
    columns = [_target_of(label, cells[label.column], bad) for label in labels]
    words = [
        {"low": low, "high": high, "kind": label.kind, "transform": label.transform}
        | {"name": label.column}
        for label in labels
        for low, high in [label.ends]
    ]
    if len(labels) == 1:
        [values], [declared] = columns, words
        return values, {f"target_{name}": np.array(value) for name, value in declared.items()}
    together = {name: np.array([of[name] for of in words]) for name in words[0]}
    return np.stack(columns, 1), {f"target_{name}": value for name, value in together.items()}


def _classes_of(
    label: Label, cells: pa.Array, bad: BadRecords
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return numbers of classes, and their names."""
    missing = missing_in(cells, label)
    places = places_of(cells, label.classes)
    hint = " (a number to predict needs range: [LOW, HIGH] in the schema instead of classes)"
    first = _first(cells, (places < 0) & ~missing)
    numeric = bool(first and read_numbers(pa.array([first]), Written())[1][0])
    what = f"no class of the schema in {label.column}"
    _add(bad, what, places < 0, cells, hint if numeric else if_no_value(first or "", names=True))
    return places, {"classes": np.array(label.classes)}


def _target_of(label: Label, cells: pa.Array, bad: BadRecords) -> NDArray[np.float64]:
    """Return numbers to predict."""
    missing = missing_in(cells, label)
    values, outside = _numbers(label, label.column, cells, missing, bad)
    bad[f"no value in {label.column}"] = missing
    if label.outside == "refuse":
        what = f"a value outside the range of the schema in {label.column}"
        _add(bad, what, outside, cells, if_no_value(_first(cells, outside) or ""))
    return values


def _number_input(column: Column, cells: pa.Array, missing: BoolArray, bad: BadRecords) -> Inputs:
    """Return a number as one input."""
    values, outside = _numbers(column, column.name, cells, missing, bad)
    _refuse_outside(column, cells, outside, bad)
    low, high = column.ends
    return values[:, None], np.array([low]), np.array([high])


def _integer_inputs(column: Column, cells: pa.Array, missing: BoolArray, bad: BadRecords) -> Inputs:
    """Return one input for each whole number of the range."""
    values, outside = _numbers(column, column.name, cells, missing, bad)
    broken = ~missing & (values != np.floor(values)) & ~outside
    _add(bad, f"no whole number in {column.name}", broken, cells)
    places = np.where(outside | missing, -1, np.floor(values) - column.ends[0])
    return _one_hot(column, places, cells, missing, bad)


def _category_inputs(
    column: Column, cells: pa.Array, missing: BoolArray, bad: BadRecords
) -> Inputs:
    """Return one input for each category."""
    return _one_hot(column, places_of(cells, column.categories), cells, missing, bad)


def _one_hot(
    column: Column,
    places: NDArray[Any],
    cells: pa.Array,
    missing: BoolArray,
    bad: BadRecords,
) -> Inputs:
    """Return an input for each choice, and one for all other values unless they are refused."""
    outside = (places < 0) & ~missing
    _refuse_outside(column, cells, outside, bad)
    inputs = [places == number for number in range(len(column.choices))]
    return _flags([*inputs, outside] if column.outside == "accept" else inputs)


def _boolean_input(column: Column, cells: pa.Array, missing: BoolArray, bad: BadRecords) -> Inputs:
    """Return one input, 0 for the first of two categories and 1 for the second."""
    names = compute.ascii_lower(pa.array(column.categories))
    found = compute.index_in(compute.ascii_lower(text_cells(cells)), names)
    strange = np.asarray(found.is_null()) & ~missing
    what = f"neither {' nor '.join(column.categories)} in {column.name}"
    _add(bad, what, strange, cells, if_no_value(_first(cells, strange) or "", names=True))
    values = np.where(missing, 0.5, np.asarray(found.cast(pa.float64()).fill_null(0.5)))
    return values[:, None], np.zeros(1), np.ones(1)


#: Functions that read columns of each type; dates and texts need more than their own cells.
READERS: Mapping[str, Callable[[Column, pa.Array, BoolArray, BadRecords], Inputs]] = {
    "number": _number_input,
    "integer": _integer_inputs,
    "category": _category_inputs,
    "boolean": _boolean_input,
}


def _dates(column: Column, cells: pa.Array, bad: BadRecords) -> NDArray[np.float64]:
    """Return days since 1970-01-01, NaN where there is no date."""
    missing, typed = missing_in(cells, column), pa.types.is_temporal(cells.type)
    text = compute.if_else(pa.array(missing), None, text_cells(cells))
    days = read_dates(decoded_cells(text), column, typed)
    expected = "as in 2024-12-31" if column.format is None else f"in the format {column.format}"
    what = f"no date {expected} in {column.name}"
    _add_unread(bad, what, np.isnan(days) & ~missing, cells, _how_dates_are_written)
    _refuse_outside(column, cells, outside_of(days, column), bad)
    return days


def _how_dates_are_written(cell: str) -> str:
    """Return what to declare so that a cell is read as a date; "" if that is not known."""
    formats = [f'format: "{written}"' for written in formats_of(cell)]
    hint = f" (declare how it is written: {' or '.join(formats[:2])})" if formats else ""
    return hint or if_no_value(cell)


def _date_inputs(
    column: Column,
    days: NDArray[np.float64],
    reference: tuple[NDArray[np.float64], Column] | None,
) -> Inputs:
    """Return the parts of a date as inputs; those of a missing date are 0, or the middle age."""
    parts = list[Inputs]()
    known = np.isfinite(days)
    for part in column.chosen:
        if part == "age":
            years, low, high = age_of(days, column, reference)
            filled = np.where(np.isnan(years), (low + high) / 2, years)
            parts.append((filled[:, None], np.array([low]), np.array([high])))
        else:
            values = CALENDAR[part](np.where(known, days, 0.0))
            parts.append(_flags([value * known for value in values]))
    x, low_ends, high_ends = (np.concatenate(ends, -1) for ends in zip(*parts, strict=True))
    return x, low_ends, high_ends


def _flags(inputs: Sequence[NDArray[Any]]) -> Inputs:
    """Return inputs in [-1, 1] with this range, so that standardisation does not change them."""
    ends = np.ones(len(inputs))
    return np.stack(inputs, 1).astype(np.float64), -ends, ends


def _with_missing(column: Column, inputs: Inputs, missing: BoolArray, bad: BadRecords) -> Inputs:
    """Return inputs and whether the value is missing, if the schema allows that."""
    if column.missing == "refuse":
        bad[f"no value in {column.name}"] = missing
        return inputs
    x, low, high = (
        np.concatenate(pair, -1) for pair in zip(inputs, _flags([missing]), strict=True)
    )
    return x, low, high


def _refuse_outside(column: Column, cells: pa.Array, outside: BoolArray, bad: BadRecords) -> None:
    if column.outside == "refuse":
        what = f"a value that the schema does not declare in {column.name}"
        hint = if_no_value(_first(cells, outside) or "", names=bool(column.categories))
        _add(bad, what, outside, cells, hint)


def _refuse_strangers(
    column: Column, cells: pa.Array, other: NDArray[Any], bad: BadRecords
) -> None:
    """Refuse a column without a single declared value: its schema is wrong."""
    if other.all():
        what = f"no category of the schema in {column.name}, nor has any other"
        _add(bad, what, other.astype(bool), cells)


def _first(cells: pa.Array, records: BoolArray) -> str | None:
    """Return the text of the first of some cells."""
    if not records.any():
        return None
    return next(decoded_cells(text_cells(cells.slice(int(records.argmax()), 1))))


def _add(bad: BadRecords, what: str, records: BoolArray, cells: pa.Array, hint: str = "") -> None:
    """Add a reason why records cannot be used, with the cell of the first of them.

    Beside texts, only what is no part of a text is shown: a comma too many moves one into the next
    column.
    """
    cell = _first(cells, records)
    if cell is not None and (tells_no_text(cell) or not bad.beside_texts):
        what = f"{what}: {shown(cell)}{hint}"
    elif cell is not None:
        what += HIDDEN
    bad[what] = records | bad[what] if what in bad else records


def _add_unread(
    bad: BadRecords,
    what: str,
    records: BoolArray,
    cells: pa.Array,
    hint: Callable[[str], str],
) -> None:
    """Add cells that cannot be read, words apart from others: they may mean that nothing is known.

    The advice for the first cell would be wrong for the others.
    """
    digits = compute.match_substring_regex(text_cells(cells), r"\d").fill_null(False)
    for some in (records & np.asarray(digits), records & ~np.asarray(digits)):
        if some.any():
            _add(bad, what, some, cells, hint(_first(cells, some) or ""))


def _numeric(cells: pa.Array, strict: bool) -> bool:
    """Return whether a column has a type of numbers or, if it may be looked at, numbers only."""
    if not has_text(cells):
        return True
    pattern = number_pattern(Written())
    text = text_cells(cells)
    fits = compute.match_substring_regex(text, pattern) if strict else pa.array([False])
    return bool(len(cells)) and bool(compute.all(fits).as_py())


def _tokens(column: Column, cells: pa.Array, bad: BadRecords, reader: TextReader) -> Inputs:
    """Return the inputs of texts, and their range."""
    absent = [is_blank(text or "") for text in decoded_cells(cells)]
    missing = np.array(absent, np.bool_) | stands_for_none(cells, column)
    texts = ["" if m else text or "" for text, m in zip(decoded_cells(cells), missing, strict=True)]
    inputs = as_inputs(texts, reader, column.text)
    low, high = (np.full(inputs.shape[1], end) for end in reader.ends)
    if column.missing == "input":
        inputs = np.column_stack([inputs, missing])
        low, high = np.append(low, -1.0), np.append(high, 1.0)
    else:
        bad[f"no text in {column.name}"] = missing
    return inputs, low, high


def _numbers(
    column: Column | Label,
    name: str,
    cells: pa.Array,
    missing: BoolArray,
    bad: BadRecords,
) -> tuple[NDArray[np.float64], BoolArray]:
    """Return numbers, with missing ones at the middle of the range, and a mask of outliers."""
    low, high = column.ends
    numbers, fits = numbers_of(cells, column)
    broken = ~fits & ~missing
    if broken.any():
        others = compute.filter(text_cells(cells), pa.array(fits))

        def meant(cell: str) -> str:
            return what_it_may_mean(cell, column, others)

        _add_unread(bad, f"no number in {name}", broken, cells, meant)
    values = np.where(missing, np.nan, np.asarray(numbers.fill_null(np.nan)))
    outside = (values < low) | (values > high)
    return np.where(np.isnan(values), (low + high) / 2, values), outside
