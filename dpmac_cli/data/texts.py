"""Texts as inputs: numbers of tokens, which a public network turns into a vector, and their style.

Behind the numbers of tokens are those on how a text is written. No message contains a text.
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
    """Return the inputs of each text, shape (texts, limit + WRITTEN): tokens and how it is written.

    Args:
        limit: number of tokens; by default the reader's limit.
    """
    kept, limit = list(texts), limit or reader.limit
    written = np.array([how_written(text) for text in kept], np.float64).reshape(-1, WRITTEN)
    tokens = np.array(reader.tokens(kept, limit), np.float64).reshape(-1, limit)
    return np.column_stack([tokens, written])


def texts_at(reader: TextReader, places: Sequence[tuple[int, int]]) -> Callable[..., Numbers]:
    """Return what makes records of numbers with texts, given where the tokens of each are."""
    return partial(Texts, texts=tuple(places), tokenizer=reader.sha256, tokens=reader.size)


def is_blank(text: str) -> bool:
    """Return whether a text has only spaces and control characters."""
    return not text.strip()


def is_text(x: NDArray[Any]) -> bool:
    """Return whether an array holds one text per record."""
    return x.ndim == 1 and (x.dtype.kind == "U" or any(isinstance(text, str) for text in x))


def read_arrays(
    arrays: dict[str, Any], reader: TextReader | None, name: str
) -> Callable[..., Numbers] | None:
    """Replace texts in the arrays x and x_test by their inputs, in place, and add their ranges.

    Returns what makes records of the numbers; None without a reader. Raises InputError if there are
    texts and no reader, or a reader and something else.
    """
    for key in [key for key in ("x", "x_test") if key in arrays]:
        x = arrays[key]
        if reader is None:
            if not isinstance(x, Rows) and is_text(x):
                raise InputError(f"{name} contains texts. {NEEDS_ENCODER}.")
            continue
        if x.ndim != 1:
            raise InputError(
                f"{name} must contain texts for this {{backbone}}: x must be a list of str, one "
                "per record."
            )
        texts = x.tolist()
        bad = [row for row, text in enumerate(texts) if not isinstance(text, str) or is_blank(text)]
        refuse([f"Record {row} of {name} {NO_TEXT}" for row in bad], " Leave it out.")
        arrays[key] = as_inputs(texts, reader)
    if reader is None:
        return None
    arrays["low"], arrays["high"] = map(np.array, reader.ranges(reader.limit))
    return texts_at(reader, [(0, reader.limit)])
