"""Columns of a table as inputs and targets, as their schema declares them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from dpmac_cli.data.canonical import MISSING
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.table_schema import Column, Label
from dpmac_cli.data.texts import NEEDS_ENCODER, as_inputs, is_blank
from dpmac_cli.data.wordpiece import TextReader

#: Zeros at the end of the digits behind a point, which the type of a column adds.
TRAILING = r"(?:(\.\d*[1-9])0+|\.0+)(Z?)$"
NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
Cells = dict[str, pa.Array]
BoolArray = NDArray[np.bool_]
#: Values of inputs, (records, inputs), and the lowest and highest value of each.
Inputs = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is one of numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def text_cells(cells: pa.Array) -> pa.Array:
    """Return cells as text that does not depend on the type that the column needs for others."""
    text = cells.cast(pa.string())
    if pa.types.is_floating(cells.type):  # integers where a value is missing
        whole = compute.equal(compute.floor(cells), cells)
        exact = compute.and_(whole, compute.less(compute.abs(cells), 2.0**53))
        numbers = compute.if_else(exact, cells, None).cast(pa.int64())
        text = compute.if_else(exact.fill_null(False), numbers.cast(pa.string()), text)
    elif pa.types.is_decimal(cells.type) or pa.types.is_temporal(cells.type):
        text = compute.replace_substring_regex(text, TRAILING, r"\1\2")
    return compute.ascii_trim_whitespace(text)


def places_of(cells: pa.Array, values: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the index of each cell's text in ``values``; -1 if it is not there."""
    found = compute.index_in(text_cells(cells), pa.array(values))
    return np.asarray(found.fill_null(-1), np.int64)


def column_inputs(
    columns: Sequence[Column],
    cells: Cells,
    bad: dict[str, BoolArray],
    strict: bool,
    reader: TextReader | None,
) -> Inputs:
    """Return columns as inputs, and add masks of records with invalid values to ``bad``."""
    texts = [column.name for column in columns if column.text is not None]
    if texts and reader is None:
        refuse([f"The column {name} is declared as text" for name in texts], f" {NEEDS_ENCODER}.")
    refuse(
        [f"The column {name} contains numbers" for name in texts if _numeric(cells[name], strict)],
        " Declare their range in the schema instead of text: {range: [LOW, HIGH]}.",
    )
    parts = [
        _tokens(column, cells[column.name], bad, reader)
        if column.text is not None and reader is not None
        else _inputs_of(column, cells[column.name], bad, strict)
        for column in columns
    ]
    x, low, high = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
    return x, low, high


def _inputs_of(column: Column, cells: pa.Array, bad: dict[str, BoolArray], strict: bool) -> Inputs:
    missing = _missing(cells, column.categories)
    if column.range is not None:
        values, outside = _numbers(column, column.name, cells, missing, bad)
        inputs, low, high = list[NDArray[Any]]([values]), [column.range[0]], [column.range[1]]
    else:
        place = places_of(cells, column.categories)
        outside = (place < 0) & ~missing
        inputs = [place == number for number in range(len(column.categories))]
        if column.outside == "accept":
            inputs.append(outside)
            if strict and outside.all():
                bad[f"no category of the schema in {column.name}, nor has any other"] = outside
        low, high = [], []
    if column.outside == "refuse":
        bad[f"a value that the schema does not declare in {column.name}"] = outside
    if column.missing == "input":
        inputs.append(missing)
    else:
        bad[f"no value in {column.name}"] = missing
    flags = len(inputs) - len(low)  # 0 or 1, unchanged by standardisation
    ends = np.array([low + [-1.0] * flags, high + [1.0] * flags])
    return np.stack(inputs, 1).astype(np.float64), *ends


def targets_of(
    label: Label, cells: pa.Array, bad: dict[str, BoolArray]
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return targets and what is declared of them; add masks of invalid records to ``bad``."""
    if label.range is None:
        places = places_of(cells, label.classes)
        hint = " (a number to predict needs a range instead)" if (places < 0).all() else ""
        bad[f"no class of the schema in {label.column}{hint}"] = places < 0
        return places, {"classes": np.array(label.classes)}
    missing = _missing(cells)
    values, outside = _numbers(label, label.column, cells, missing, bad)
    bad[f"no value in {label.column}"] = missing
    if label.outside == "refuse":
        bad[f"a value outside the range of the schema in {label.column}"] = outside
    low, high = label.range
    words = {"kind": label.kind, "transform": label.transform, "name": label.column}
    declared: dict[str, float | str] = {"low": low, "high": high, **words}
    return values, {f"target_{name}": np.array(value) for name, value in declared.items()}


def _missing(cells: pa.Array, categories: Sequence[str] = ()) -> BoolArray:
    """Return a mask of cells without a value."""
    words = pa.array([word for word in MISSING if word not in categories])
    return np.asarray(compute.or_(cells.is_null(), compute.is_in(text_cells(cells), words)))


def _numeric(cells: pa.Array, strict: bool) -> bool:
    """Return whether a column has a type of numbers or, if it may be looked at, numbers only."""
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        return True
    fits = compute.match_substring_regex(text_cells(cells), NUMBER) if strict else pa.array([False])
    return bool(len(cells)) and bool(compute.all(fits).as_py())


def _tokens(
    column: Column, cells: pa.Array, bad: dict[str, BoolArray], reader: TextReader
) -> Inputs:
    """Return the tokens of texts, and the range of their numbers."""
    raw = cells.cast(pa.binary()).to_pylist()
    texts = ["" if text is None else text.decode(errors="replace") for text in raw]
    missing = np.array([is_blank(text) for text in texts], np.bool_)
    inputs = as_inputs(texts, reader, column.text)
    low, high = (np.full(column.text or 0, end) for end in reader.ends)
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
    bad: dict[str, BoolArray],
) -> tuple[NDArray[np.float64], BoolArray]:
    """Return numbers, with missing ones at the middle of the range, and a mask of outliers."""
    assert column.range is not None  # noqa: S101
    low, high = column.range
    if is_number(cells.type):
        numbers = cells.cast(pa.float64(), safe=False)
    else:
        text = text_cells(cells)
        fits = compute.match_substring_regex(text, NUMBER).fill_null(False)
        bad[f"no number in {name}"] = ~np.asarray(fits) & ~missing
        numbers = compute.if_else(fits, text, None).cast(pa.float64())
    values = np.asarray(numbers.fill_null(np.nan))
    outside = (values < low) | (values > high)
    return np.where(np.isnan(values), (low + high) / 2, values), outside
