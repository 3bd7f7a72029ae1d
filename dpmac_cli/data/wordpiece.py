"""WordPiece tokens of texts, as in BERT (Devlin et al. 2019, arXiv 1810.04805).

A text's tokens depend on that text and the public vocabulary alone. Names of special tokens, such
as [SEP], that occur in a text are split at their brackets like any other word.
Imports nothing slow.
"""

import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Tokens that a vocabulary must have: padding, which has the number 0, begin and end of a text, and
#: unknown words.
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
#: Number of characters from which a word is unknown.
LONGEST_WORD = 100
#: Categories of characters that are removed: control, format, private use, halves of surrogates.
REMOVED = ("Cc", "Cf", "Co", "Cs")
#: First and last code points of ideographs, each of which is a word.
IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class _Cleaned(dict[int, str]):
    """Table for ``str.translate``: removes control characters and isolates ideographs.

    With ``lower``, it removes accents that are characters of their own, too. They would be removed
    after NFD, which takes time quadratic in their number to sort them.
    """

    def __init__(self, lower: bool) -> None:
        self._removed = (*REMOVED, "Mn") if lower else REMOVED

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        if letter in "\t\n\r":
            found = " "
        elif letter == "\ufffd" or unicodedata.category(letter) in self._removed:
            found = ""
        elif any(first <= code <= last for first, last in IDEOGRAPHS):
            found = f" {letter} "
        else:
            found = " " if letter.isspace() else letter
        self[code] = found
        return found


class _Split(dict[int, str]):
    """Table for ``str.translate``: isolates punctuation; ``lower`` also removes accents."""

    def __init__(self, lower: bool) -> None:
        self._lower = lower

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        kind = unicodedata.category(letter)
        if self._lower:
            letter = "" if kind == "Mn" else letter.lower()
        punctuation = kind.startswith("P") or letter in string.punctuation
        found = f" {letter} " if letter and punctuation else letter
        self[code] = found
        return found


def scale_of(size: int) -> int:
    """Return the power of two that numbers of ``size`` tokens are divided by to be inputs.

    As inputs they are within [0, 1) and exact in float32.
    """
    return 1 << (size - 1).bit_length()


_CLEANED = {lower: _Cleaned(lower) for lower in (False, True)}
_SPLIT = {lower: _Split(lower) for lower in (False, True)}


@dataclass(frozen=True)
class WordPiece:
    """Tokenizer with a public vocabulary.

    Attributes:
        sha256: checksum of the vocabulary's file.
        lower: whether texts are converted to lower case without accents.
        size: number of tokens that the network knows; all numbers of tokens are below it.
        ids: numbers of tokens.
    """

    sha256: str
    lower: bool
    size: int
    ids: Mapping[str, int] = field(compare=False, repr=False)

    @property
    def scale(self) -> int:
        """Return :func:`scale_of` the vocabulary."""
        return scale_of(self.size)

    def tokens(self, texts: Iterable[str], limit: int) -> list[list[int]]:
        """Return ``limit`` numbers of tokens for each text.

        A text is truncated to ``limit`` tokens, including the first, [CLS], and the last, [SEP].
        Shorter ones are padded.
        """
        begin, end = (self.ids[name] for name in SPECIAL[1:3])
        known: dict[str, list[int]] = {}
        rows = []
        for text in texts:
            row = [begin]
            for word in self.words(text):
                if word not in known:
                    known[word] = self._pieces(word)
                row += known[word]
                if len(row) >= limit:
                    break
            row = [*row[: limit - 1], end]
            rows.append(row + [0] * (limit - len(row)))
        return rows

    def words(self, text: str) -> Sequence[str]:
        """Return words and punctuation marks."""
        text = text.translate(_CLEANED[self.lower])
        if self.lower and not text.isascii():
            text = unicodedata.normalize("NFD", text)
        return text.translate(_SPLIT[self.lower]).split()

    def _pieces(self, word: str) -> list[int]:
        """Return the longest known pieces of a word from left to right, or [UNK]."""
        unknown, found, first = [self.ids[SPECIAL[3]]], list[int](), 0
        if len(word) > LONGEST_WORD:
            return unknown
        while first < len(word):
            mark, last = "##" * (first > 0), len(word)
            while last > first and mark + word[first:last] not in self.ids:
                last -= 1
            if last == first:
                return unknown
            found.append(self.ids[mark + word[first:last]])
            first = last
        return found


@dataclass(frozen=True)
class TextReader:
    """A public tokenizer, and the public limit of tokens of texts that are not in a table."""

    tokenizer: WordPiece
    limit: int

    @property
    def ends(self) -> tuple[float, float]:
        """Return the range of numbers of tokens, which standardisation scales to [-1, 1]."""
        return -float(self.tokenizer.scale), float(self.tokenizer.scale)
