"""Texts as inputs: numbers of tokens, which a public network turns into a vector, and their style.

Behind the numbers of tokens are those on how a text is written, such as its length. Both depend on
that text and on a public tokenizer alone. Numbers of tokens are exact in float32, so texts pass
through the same arrays as other numbers. No message contains a text.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import refuse
from dpmac_cli.config.records import Numbers, Texts
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.config.writing import WRITTEN, how_written
from dpmac_cli.data.cache import Rows
from dpmac_cli.errors import InputError

#: What to do about texts without an encoder.
NEEDS_ENCODER = "Add an encoder: {backbone=}minilm, or {backbone=}FOLDER"
NO_TEXT = "has no text"


def as_inputs(
    texts: Iterable[str], reader: TextReader, limit: int | None = None
) -> NDArray[np.float64]:
    """Return the inputs of each text: its tokens, and how it is written.

    Args:
        texts: one text for each record.
        reader: a public tokenizer.
        limit: number of tokens; by default the reader's limit.

    Returns:
        inputs, shape (texts, limit + WRITTEN).
    """
    texts = list(texts)
    limit = limit or reader.limit
    styles = list(map(how_written, texts))
    written = np.array(styles, np.float64).reshape(-1, WRITTEN)
    numbers = reader.tokens(texts, limit)
    tokens = np.array(numbers, np.float64).reshape(-1, limit)
    return np.column_stack([tokens, written])


def texts_at(
    reader: TextReader,
    places: Sequence[tuple[int, int]],
) -> Callable[..., Numbers]:
    """Return what makes records of numbers with texts.

    Args:
        reader: the tokenizer of the texts.
        places: first input and number of tokens of each text.
    """
    return partial(Texts, texts=tuple(places), tokenizer=reader.sha256, tokens=reader.size)


def is_blank(text: str) -> bool:
    """Return whether a text has only spaces and control characters, as "" has."""
    return not text.strip()


def is_text(x: NDArray[Any]) -> bool:
    """Return whether an array holds one text per record: strings, shape (records,)."""
    if x.ndim != 1:
        return False
    return x.dtype.kind == "U" or any(isinstance(text, str) for text in x)


def read_arrays(
    arrays: dict[str, Any], reader: TextReader | None, name: str, *, new: bool = False
) -> Callable[..., Numbers] | None:
    """Replace texts in the arrays x and x_test by their inputs, in place, and add their ranges.

    Args:
        arrays: arrays of a reader.
        reader: a public tokenizer; None for records that are no texts.
        name: name of the dataset in messages.
        new: whether a model is to predict them, to which no encoder can be added.

    Returns:
        what makes records of the numbers; None without a reader.

    Raises:
        InputError: there are texts and no reader, or a reader and something else.
    """
    for key in ("x", "x_test"):
        if key not in arrays:
            continue
        x = arrays[key]
        if reader is not None:
            arrays[key] = _inputs_of_array(x, reader, name)
        elif not isinstance(x, Rows) and is_text(x):
            remedy = "The model takes none: pass records like its own" if new else NEEDS_ENCODER
            raise InputError(f"{name} contains texts. {remedy}.")
    if reader is None:
        return None
    low, high = reader.ranges(reader.limit)
    arrays["low"] = np.array(low)
    arrays["high"] = np.array(high)
    return texts_at(reader, [(0, reader.limit)])


def _inputs_of_array(
    x: Any,
    reader: TextReader,
    name: str,
) -> NDArray[np.float64]:
    """Return the inputs of an array of texts, shape (records, limit + WRITTEN).

    Args:
        x: one text for each record, shape (records,).
        reader: a public tokenizer.
        name: name of the dataset in messages.

    Raises:
        InputError: it is not an array of texts, or some records have none.
    """
    if x.ndim != 1:
        raise InputError(
            f"{name} must contain texts for this {{backbone}}: x must be a list of str, one "
            "per record."
        )
    texts = x.tolist()
    faults = []
    for row, text in enumerate(texts):
        if not isinstance(text, str) or is_blank(text):
            faults.append(f"Record {row} of {name} {NO_TEXT}")
    refuse(faults, " Leave it out.")
    return as_inputs(texts, reader)
