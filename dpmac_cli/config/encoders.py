"""Networks on texts with public weights, in Hugging Face's format. Imports no torch.

Such a network is a folder with config.json, tokenizer.json and weights: either of an installed
package, whose checksums are known, or the user's own. Nothing is downloaded, and no code of a
package or a folder is run.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dpmac_cli.config.records import Records, Texts
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.config.writing import WRITTEN
from dpmac_cli.errors import panics_as_errors
from dpmac_cli.files import table
from dpmac_cli.libraries import tokenizers, transformers

HERE = Path(__file__).parent
CONFIG, TOKENIZER, POOLING = "config.json", "tokenizer.json", "1_Pooling/config.json"
WEIGHTS, SHARDS = "model.safetensors", "model-*-of-*.safetensors"
#: A text that no tokenizer has in its vocabulary.
UNHEARD_OF = "\u16a0\u0e01 \U00013000"
#: What a folder of a network on texts is, in words.
FOLDER = f"a folder in Hugging Face's format ({CONFIG}, {TOKENIZER}, {WEIGHTS})"


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """A text encoder whose weights are in an installed package: a row of encoders.toml.

    Attributes:
        about: name for help and reports.
        package: distribution that has the files.
        folder: folder of the files in it.
        sha256: SHA-256 of the weights.
        vocabulary: SHA-256 of the tokenizer.
        licence: licence of the weights.
        language: language of the texts that it was trained on.
        corpora: texts that it was trained on.
    """

    about: str
    package: str
    folder: str
    sha256: str
    vocabulary: str
    licence: str
    language: str
    corpora: str


ENCODERS: Mapping[str, EncoderKind] = table(EncoderKind, HERE / "encoders.toml")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of the parts of a family of networks in transformers.

    Attributes:
        blocks: list of the blocks.
        lora: layers of a block that LoRA updates: queries, values and the perceptron.
        transposed: ends of the names of weights of linear layers that are stored (in, out).
        causal: name of the network in one that predicts the next token; "" if there is none.
    """

    blocks: str
    lora: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    causal: str = ""


_BERT = Family(
    blocks="encoder.layer",
    lora=("attention.self.query", "attention.self.value", "intermediate.dense", "output.dense"),
)
_LLAMA = Family(
    blocks="layers",
    lora=(
        *("self_attn.q_proj", "self_attn.v_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    causal="model",
)
#: Families by ``model_type`` of config.json.
FAMILIES: Mapping[str, Family] = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": Family(
        blocks="transformer.layer",
        lora=("attention.q_lin", "attention.v_lin", "ffn.lin1", "ffn.lin2"),
    ),
    "modernbert": Family(blocks="layers", lora=("attn.Wqkv", "mlp.Wi", "mlp.Wo")),
    "gpt2": Family(
        blocks="h",
        lora=("attn.c_attn", "mlp.c_fc", "mlp.c_proj"),
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        causal="transformer",
    ),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
}
#: Values of config.json that do not change vectors, or that dpmac decides, by how they begin.
NOT_OF_FORM = (
    *("_", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "output_", "return_", "torchscript", "id2label", "label2id"),
)

#: Largest whole number of a config.json, its largest number of layers, and of other numbers, such
#: as the base of rotary positions.
MOST_SIZE, MOST_LAYERS, MOST_VALUE = 1 << 23, 1000, 1e12
#: Largest numbers of values and of levels of its lists and objects.
MOST_ENTRIES, MOST_LEVELS = 10_000, 8

Pooling = Literal["mean", "cls", "next"]
Size = Annotated[int, Field(ge=1, le=1 << 20)]


def check_sizes(value: Any, name: str = "", level: int = 0) -> None:
    """Raise ValueError for a number or a list of a config.json that no network has.

    A crafted file could otherwise make transformers reserve any amount of memory.

    Args:
        value: value of JSON, with everything inside it.
        name: key of the value; that of the list, for the items of a list.
        level: number of dicts and lists that the value is in.
    """
    if isinstance(value, dict | list):
        if len(value) > MOST_ENTRIES or level > MOST_LEVELS:
            raise ValueError(f"{name or 'its content'} is too large")
        if isinstance(value, dict):
            for key, item in value.items():
                check_sizes(item, key, level + 1)
        else:
            for item in value:
                check_sizes(item, name, level + 1)
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    low, high = -float(MOST_SIZE), float(MOST_SIZE)
    if "layer" in name:
        low, high = 0.0, MOST_LAYERS
    elif isinstance(value, float) or "theta" in name:
        low, high = -MOST_VALUE, MOST_VALUE
    if not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:,.10g} to {high:,.10g}")


class EncoderConfig(BaseModel):
    """Everything but weights and tokenizer that determines the vectors of texts.

    Attributes:
        form: values of config.json, which describe a network of transformers.
        width: number of values of a vector.
        tokens: number of tokens that the network knows.
        longest: largest number of tokens of a text.
        pooling: how vectors of tokens become one: their mean, or the first. "next": there is no
            vector, but the mean loss of the next tokens.
        vocabulary_bytes, vocabulary_sha256: size and checksum of the tokenizer's file.
    """

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    form: dict[str, Any]
    width: Size
    tokens: Annotated[int, Field(ge=1, le=1 << 23)]  # float32 stores these numbers exactly
    longest: Annotated[int, Field(ge=1, le=MOST_SIZE)]
    pooling: Pooling
    vocabulary_bytes: Annotated[int, Field(ge=1, le=1 << 27)]
    vocabulary_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @field_validator("form")
    @classmethod
    def check_form(cls, form: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a config.json.

        Raises:
            ValueError: the family is not supported, a number is too large, or the places of tokens
                depend on the longest text of a batch, so that a text would change others' vectors.
        """
        if form.get("model_type") not in [*FAMILIES]:
            raise ValueError(
                f"its model_type is {form.get('model_type')!r:.80}, which is not supported. "
                f"Supported: {', '.join(FAMILIES)}"
            )
        check_sizes(form)
        content = json.dumps(form)
        for kind in ("dynamic", "longrope"):
            if f'"{kind}"' in content:
                raise ValueError("places of tokens that depend on the lengths of other texts")
        return form

    @property
    def family(self) -> Family:
        """Return the names of the network's parts."""
        return FAMILIES[self.form["model_type"]]

    @property
    def causal(self) -> bool:
        """Return whether the network predicts the next token."""
        return self.pooling == "next"


class FeatureKind:
    """Fixed, public features of records, by default of images.

    Features depend on one record and public numbers alone, so they have no privacy cost. Subclasses
    define ``kind``, their name, and :meth:`shape_of`.
    """

    #: Kind of records that it has features of.
    reads: ClassVar = "images"
    #: Whether it brings public weights of its own.
    has_weights: ClassVar = False
    #: What to do about records of another kind, by that kind, if not to leave the features out.
    declared_as: ClassVar[Mapping[str, str]] = {}
    #: Output of an untrained head for all records; None for random outputs.
    start: ClassVar[float | None] = None

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values of everything but weights that determines the features, by name."""
        return vars(self)

    def shape_of(self, records: Records) -> tuple[int, ...]:
        """Return the shape of the features of a record, without the dimension of records."""
        raise NotImplementedError

    def lookups(self, _: Records) -> int:
        """Return the number of features at the end that are numbers of places; 0 for most kinds."""
        return 0

    def fault(self, _: Records) -> str | None:
        """Return why records of the kind are not supported; None if they are.

        The text is the end of a sentence that begins with the records, without a full stop.
        """
        return None


@dataclass(frozen=True)
class TextEncoder(FeatureKind):
    """Features of texts: the vectors of a public network, and then all other inputs unchanged.

    Attributes:
        kind: a key of :data:`ENCODERS`, or the name of a folder.
        config: form of the network.
        texts: first input and number of inputs of each text, which are its tokens; () before the
            records are known.
        folder: folder of the weights; None for a published model, which has them.
        tokenizer: contents of its file.
        weight_bytes: size of the file of the weights, whose network cannot have more parameters.
    """

    kind: str
    config: EncoderConfig
    texts: tuple[tuple[int, int], ...] = ()
    folder: Path | None = field(default=None, compare=False)
    tokenizer: bytes = field(default=b"", compare=False, repr=False)
    weight_bytes: int = field(default=0, compare=False, repr=False)

    reads: ClassVar = "texts"
    has_weights: ClassVar = True
    declared_as: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("numbers", "table"),
        "Declare a column of texts in the schema (NAME: {text: 128}), or leave it out.",
    )
    #: Random weights would only add to the noise.
    start: ClassVar[float | None] = 0.0

    @property
    def registered(self) -> EncoderKind | None:
        """Return the row of a registered encoder; None for a folder."""
        return ENCODERS.get(self.kind)

    @property
    def values(self) -> dict[str, Any]:
        """Return JSON values of everything but weights that determines the features."""
        form = self.config.model_dump()
        return {"kind": self.kind, "form": form, "texts": self.texts}

    @property
    def size(self) -> int:
        """Return the number of tokens that the network knows, and padding."""
        return self.config.tokens + 1

    def of(self, records: Records, *, causal: bool = False) -> "TextEncoder":
        """Return the features of records, whose texts are known now; as it is without texts.

        Args:
            records: what the records are.
            causal: the network predicts the next token.
        """
        texts = records.texts if isinstance(records, Texts) else ()
        changes = {"pooling": "next"} if causal else {}
        return replace(self, config=self.config.model_copy(update=changes), texts=texts)

    def reader(self, limit: int) -> TextReader:
        """Return how texts are read; see :class:`~dpmac_cli.config.tokens.TextReader`."""
        return reader_of(self.tokenizer, self.config, limit)

    def shape_of(self, records: Records) -> tuple[int, ...]:
        """Return the shape of the features of a record: vectors, and then all other inputs.

        That of a causal network is (1,), the loss of the record's text.
        """
        if self.config.causal:
            return (1,)
        tokens = sum(count for _, count in self.texts)
        others = records.size - tokens
        return (len(self.texts) * self.config.width + others,)

    def fault(self, records: Records) -> str | None:
        """Return why records are not supported, as the end of a sentence."""
        if isinstance(records, Texts) and records.tokenizer != self.config.vocabulary_sha256:
            return (
                "were read with another tokenizer. All runs of a search read them once: search "
                "over encoders with the same tokenizer, or search for each of them."
            )
        if self.config.causal and not self.config.family.causal:
            kinds = [name for name, family in FAMILIES.items() if family.causal]
            return (
                f"are not continued by {self.config.form['model_type']}. For "
                f"{{task=}}language-model use {FOLDER} of {', '.join(kinds)}."
            )
        inputs_of_first_text = sum(count + WRITTEN for _, count in self.texts[:1])
        if self.config.causal and records.size != inputs_of_first_text:
            return "have other inputs. For {task=}language-model declare one column, of text."
        most, longest = self.config.longest, max(count for _, count in self.texts)
        if longest <= most:
            return None
        return (
            f"may have {longest} tokens, but the encoder supports {most}. Declare text: {most} in "
            f"the schema, or add {{tokens=}}{most} if there is none."
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights in a folder: one, or all shards in order; [] if none."""
    single = folder / WEIGHTS
    return [single] if single.is_file() else sorted(folder.glob(SHARDS))


def reason(failure: Exception) -> str:
    """Return the first line of an error of values, without a full stop, at most 200 characters.

    Args:
        failure: an exception, of pydantic or of another library.
    """
    errors = getattr(failure, "errors", None)
    text = errors()[0]["msg"] if callable(errors) else str(failure)
    first_line, _, _ = text.removeprefix("Value error, ").partition("\n")
    return f"{first_line.rstrip('.'):.200}"


def transformers_config(form: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers that describes a network.

    Args:
        form: checked values of a config.json, see :meth:`EncoderConfig.check_form`.
    """
    return transformers.AutoConfig.for_model(**form, use_cache=False)


def reader_of(content: bytes, config: EncoderConfig, limit: int) -> TextReader:
    """Return how texts are read with the contents of a tokenizer.json.

    Args:
        content: contents of the file.
        config: configuration of the network, with the checksum of its tokenizer.
        limit: largest number of tokens of a text that is not in a table.

    Raises:
        ValueError: the file is not of the library tokenizers, is not the one of ``config``, fails
            on unknown words, or has more tokens than the network knows.
    """
    if hashlib.sha256(content).hexdigest() != config.vocabulary_sha256:
        raise ValueError(f"its SHA-256 is not {config.vocabulary_sha256}")
    try:
        with panics_as_errors():
            tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except ValueError as failure:
        raise ValueError(f"it is not of the library tokenizers ({reason(failure)})") from failure
    try:
        with panics_as_errors():
            tokenizer.encode(UNHEARD_OF)
    except ValueError as failure:
        raise ValueError("it has no token for words that it does not know") from failure
    most = max(tokenizer.get_vocab().values(), default=-1) + 1
    if most > config.tokens:
        raise ValueError(f"it has {most} tokens, but the network {config.tokens}")
    return TextReader(config.vocabulary_sha256, config.tokens + 1, limit, tokenizer)
