"""Numbers on how a text is written: what a tokenizer without capitals does not tell.

Messages that want something from their reader, and notes that somebody typed in a hurry, differ
from others in their capitals, digits and punctuation. The numbers of a text depend on it alone:
they are compared with constants of ordinary English prose, never with other records.
Imports nothing slow.
"""

import math
import unicodedata

#: First letters of the Unicode categories that are counted, by what they are called here.
COUNTED = {"Lu": "capitals", "N": "digits", "P": "punctuation", "S": "symbols"}
#: Root of the share of such characters in ordinary prose.
ORDINARY = {"Lu": 0.17, "N": 0.0, "P": 0.17, "S": 0.0}
#: Number of inputs of each text that say how it is written.
WRITTEN = len(COUNTED)


class _Kinds(dict[int, str]):
    """Table for ``str.translate``: one letter per kind of character."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        self[code] = " "
        for kind in COUNTED:
            if category.startswith(kind):
                self[code] = kind[0]
        return self[code]


_KINDS = _Kinds()


def how_written(text: str) -> list[float]:
    """Return :data:`WRITTEN` numbers within [-1, 1]: roots of shares of characters, less ordinary.

    Spaces around the text, such as the end of a file's last line, are left out.

    Example:
        >>> [round(number, 2) for number in how_written("FREE 4 U!")]
        [0.58, 0.33, 0.16, 0.0]

    Returns:
        One number for each kind of :data:`COUNTED`, in order.
    """
    kinds = text.strip().translate(_KINDS)
    count = max(len(kinds), 1)
    numbers = list[float]()
    for kind, ordinary in ORDINARY.items():
        share = kinds.count(kind[0]) / count
        numbers.append(math.sqrt(share) - ordinary)
    return numbers
