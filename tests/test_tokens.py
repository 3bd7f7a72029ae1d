"""Tokens of texts."""

import pytest

from tests.tiny_bert import VOCABULARY, tiny_reader

TINY = tiny_reader(40)
#: What people type, and what breaks tokenizers.
TEXTS = (
    *("", " ", "\t \n", "\0", "chest pain since 3 days", "No FEVER!", "café Ünïcode", "a" * 300),
    *("[SEP] [CLS] [PAD]", "##ain ##", "日本語 text", "emoji 🍦🤒", "שלום עולם", "مرحبا"),
    *("x" * 100, "x" * 101, "e\u0301\u0323", "soft\u00adhyphen", "zero\u200bwidth", "İstanbul"),
    *("$5.00 <b>&amp;</b>", "don't", "Σίσυφος", "ﬁne", "\ufffd?", "한국어", "\x85"),
    *("pain " * 5000, "line\u2028end"),
)


def tokens(text: str, limit: int = 40) -> list[str]:
    """Return tokens as text, without padding."""
    (row,) = TINY.tokens([text], limit)
    assert len(row) == limit
    used = len(row) - row.count(0)
    assert 0 not in row[:used]
    return [VOCABULARY[number - 1] for number in row[:used]]


def test_words_become_their_longest_known_pieces() -> None:
    assert tokens("Severe chest pain!") == ["[CLS]", "severe", "chest", "pain", "!", "[SEP]"]
    assert tokens("painful") == ["[CLS]", "pain", "##f", "##u", "##l", "[SEP]"]
    assert tokens("") == ["[CLS]", "[SEP]"]
    assert tokens("日本") == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    assert tokens("fièvre") == [*("[CLS]", "f"), *map("##{}".format, "ievre"), "[SEP]"]


def test_a_text_is_truncated_to_the_limit() -> None:
    assert tokens("pain " * 100, 5) == ["[CLS]", "pain", "pain", "pain", "[SEP]"]
    assert tokens("painful", 4) == ["[CLS]", "pain", "##f", "[SEP]"]
    assert tokens("pain", 3) == ["[CLS]", "pain", "[SEP]"]


@pytest.mark.privacy
def test_names_of_special_tokens_in_a_text_are_text() -> None:
    for name in ("[SEP]", "[CLS]", "[PAD]", "[UNK]"):
        inner = tokens(f"pain {name} fever")[1:-1]
        assert name not in inner
        assert inner[1] == "["
        assert inner.count("]") == 1
