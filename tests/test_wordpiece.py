"""Tokens of texts, against the tokenizers of Hugging Face if they are installed."""

import hashlib
import random
import time
import unicodedata

import pytest

from dpmac_cli.data.wordpiece import WordPiece, scale_of
from dpmac_cli.errors import InputError
from dpmac_cli.models.encoders import BertConfig, read_encoder, tokenizer_of
from tests.tiny_bert import CONFIG, VOCABULARY

CONTENT = "\n".join(VOCABULARY).encode()
SUMS = {"vocabulary_bytes": 1, "vocabulary_sha256": hashlib.sha256(CONTENT).hexdigest()}
TINY = tokenizer_of(CONTENT, BertConfig.model_validate(CONFIG | SUMS))
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
    used = [VOCABULARY[number] for number in row]
    return used[: len(used) - used.count("[PAD]")]


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


@pytest.mark.privacy
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_depend_on_one_text_alone(text: str) -> None:
    alone = TINY.tokens([text], 24)
    assert TINY.tokens([*TEXTS, text, *TEXTS], 24)[len(TEXTS)] == alone[0]
    assert alone[0][0] == VOCABULARY.index("[CLS]")
    assert 0 not in alone[0][: alone[0].index(VOCABULARY.index("[SEP]"))]  # padding ends a text


@pytest.mark.privacy
def test_accents_without_end_take_no_longer_than_other_text() -> None:
    """Sorting them takes hours, so one text would stop a run."""
    accents = "\u0315\u0300" * 100_000
    begun = time.process_time()
    assert tokens(f"p{accents}ain") == ["[CLS]", "pain", "[SEP]"]
    assert time.process_time() - begun < 5


def test_numbers_of_tokens_are_exact_as_inputs() -> None:
    for size in (2, 3, 30522, 119547, 1 << 23):
        scale = scale_of(size)
        assert size <= scale < 2 * size
        assert scale & (scale - 1) == 0


def published() -> WordPiece:
    pytest.importorskip("tokenizers")
    try:
        return read_encoder("minilm").tokenizer
    except InputError as missing:
        pytest.skip(str(missing))


def test_tokens_are_those_of_hugging_face() -> None:
    """On characters of whose category all versions of Unicode agree."""
    ours = published()
    from tokenizers import Tokenizer  # noqa: PLC0415

    theirs = Tokenizer.from_file(str(read_encoder("minilm").folder / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(64)
    old = unicodedata.ucd_3_2_0
    letters = [
        c
        for c in map(chr, (*range(0xD800), *range(0xE000, 0x20000)))
        if old.category(c) == unicodedata.category(c) not in ("Cn", "Mn", "Mc")
    ]
    draw = random.Random(0)
    texts = [*TEXTS, *("".join(draw.choices(letters, k=30)) for _ in range(2000))]
    texts += ["".join(draw.choices(letters[:400], k=60)) for _ in range(2000)]
    texts = [text for text in texts if "[" not in text]  # they take [SEP] for a token
    rows = ours.tokens(texts, 64)
    for text, row, encoding in zip(texts, rows, theirs.encode_batch(texts), strict=True):
        assert row == encoding.ids + [0] * (64 - len(encoding.ids)), repr(text)
