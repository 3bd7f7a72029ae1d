"""Tokens of texts, which depend on one text and a public tokenizer alone. Imports nothing slow."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dpmac_cli.config.writing import WRITTEN

#: Default and limits of the number of tokens of a text, which has a first and a last.
TOKENS, MIN_TOKENS, MAX_TOKENS = 128, 3, 8192


@dataclass(frozen=True)
class TextReader:
    """A public tokenizer, and the public limit of tokens of texts that are not in a table.

    Attributes:
        sha256: checksum of the tokenizer's file.
        size: number of tokens that the network knows, and padding. float32 stores these numbers
            exactly.
        limit: number of tokens.
        tokenizer: ``tokenizers.Tokenizer``.
    """

    sha256: str
    size: int
    limit: int
    tokenizer: Any = field(compare=False, repr=False)

    def ranges(self, limit: int) -> tuple[list[float], list[float]]:
        """Return the lowest and highest values of the inputs of a text of ``limit`` tokens.

        They are numbers of tokens, and then the :data:`.WRITTEN` numbers on how it is written.
        """
        lowest = [0.0] * limit + [-1.0] * WRITTEN
        highest = [float(self.size)] * limit + [1.0] * WRITTEN
        return lowest, highest

    def tokens(self, texts: Iterable[str], limit: int) -> list[list[int]]:
        """Return ``limit`` numbers for each text: those of its tokens plus 1, then 0 for padding.

        A text is truncated to ``limit`` tokens, including special ones that begin or end it. Names
        of special tokens in a text, such as [SEP], are text. Texts are read one by one, so none
        changes the numbers of another.

        Args:
            texts: any texts, also with halves of surrogates, which are left out.
            limit: number of tokens of each row, at least :data:`MIN_TOKENS`.
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
