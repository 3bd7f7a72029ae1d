"""Tokens of texts, which depend on one text and a public tokenizer alone. Imports nothing slow."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

#: Default and limits of the number of tokens of a text, which has a first and a last.
TOKENS, MIN_TOKENS, MAX_TOKENS = 128, 3, 8192


def scale_of(size: int) -> int:
    """Return the power of two that numbers of ``size`` tokens are divided by to be inputs.

    As inputs they are within [0, 1) and exact in float32.
    """
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class TextReader:
    """A public tokenizer, and the public limit of tokens of texts that are not in a table.

    Attributes:
        sha256: checksum of the tokenizer's file.
        size: number of tokens that the network knows, and padding.
        limit: number of tokens.
        tokenizer: ``tokenizers.Tokenizer``.
    """

    sha256: str
    size: int
    limit: int
    tokenizer: Any = field(compare=False, repr=False)

    @property
    def scale(self) -> int:
        """Return :func:`scale_of` the tokens."""
        return scale_of(self.size)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the range of numbers of tokens, which standardisation scales to [-1, 1]."""
        return -float(self.scale), float(self.scale)

    def tokens(self, texts: Iterable[str], limit: int) -> list[list[int]]:
        """Return ``limit`` numbers for each text: those of its tokens plus 1, then 0 for padding.

        A text is truncated to ``limit`` tokens, including special ones that begin or end it. Names
        of special tokens in a text, such as [SEP], are text.
        """
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(limit)
        self.tokenizer.encode_special_tokens = True
        rows = []
        for text in texts:
            valid = text.encode(errors="ignore").decode()  # without halves of surrogates
            row = [number + 1 for number in self.tokenizer.encode(valid).ids]
            rows.append(row + [0] * (limit - len(row)))
        return rows
