"""Kinds of records: what the numbers of a record are, and how a network gets them.

A record keeps the shape of its array: an image (channels, height, width), a row of a table
(columns,), a text the numbers of its tokens. A network gets it scaled by public constants, in the
same shape. What is declared here is public, and is never measured on the records, apart from
ranges that noisy counts find. Imports nothing slow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpmac_cli.config.writing import WRITTEN

#: Largest number of values of a record, of its dimensions, and of levels of a pixel.
MOST_VALUES, MOST_SIDES, MOST_LEVELS = 1 << 25, 16, 1 << 32
#: Largest number with a fraction.
MOST_NUMBER = 1e300

Side = Annotated[int, Field(ge=1, le=MOST_VALUES)]
AnyNumber = Annotated[float, Field(ge=-MOST_NUMBER, le=MOST_NUMBER)]
Shape = Annotated[tuple[Side, ...], Field(min_length=1, max_length=MOST_SIDES)]
#: What a value is multiplied by and what is then added, of each channel or column.
Scaling = tuple[tuple[float, ...], tuple[float, ...]]


class Records(BaseModel, ABC):
    """Records of one kind, all of one shape. All of it is public.

    Attributes:
        several: what the records are, in words: "images".
        one: one of them: "one image".
        public: what is public of how they are read, in words.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    #: What the records are, one of them, and what is public of how they are read, in words.
    several: ClassVar[str]
    one: ClassVar[str]
    public: ClassVar[tuple[str, ...]]

    kind: str
    """What the records are: images, numbers or texts."""
    shape: Shape
    """Shape of a record."""
    standardised: bool = True
    """False if the network takes records as a program gave them: pixels from 0 to white, or numbers
    in their range."""

    @property
    def size(self) -> int:
        """Return the number of values of a record."""
        return math.prod(self.shape)

    @property
    def channels(self) -> int:
        """Return the number of channels or columns, which are scaled alike in all places."""
        return 1 if len(self.shape) == 2 else self.shape[0]

    @property
    def pixels(self) -> int:
        """Return the number of places of each channel; 1 for a row."""
        return self.size // self.channels

    @property
    def described(self) -> str:
        """Return what a record is: "images of shape 1 x 28 x 28"."""
        return f"{self.several} of shape {' x '.join(map(str, self.shape))}"

    @property
    def scaling(self) -> Scaling:
        """Return factors and summands of a channel each, by which a network's inputs are made.

        An input is value * factor + summand; without standardisation it is the value.
        """
        if not self.standardised:
            return (1.0,) * self.channels, (0.0,) * self.channels
        return self.constants

    @property
    @abstractmethod
    def constants(self) -> Scaling:
        """Return the factors and summands of standardisation."""

    def _check_constants(self, *constants: tuple[float, ...]) -> None:
        """Raise ValueError unless a record can be stored and each channel has constants."""
        if self.size > MOST_VALUES:
            raise ValueError("a record has too many values")
        if any(len(part) != self.channels for part in constants):
            raise ValueError("its constants are not one for each channel")


class Images(Records):
    """Images with 8 bits per channel: pixels are divided by white, then standardised.

    A network gets (pixel / white - mean) / std, as one multiply-add.

    Example:
        >>> Images(shape=(1, 28, 28), mean=(0.5,), std=(0.5,), white=255).scaling[1]
        (-1.0,)
    """

    several: ClassVar = "images"
    one: ClassVar = "one image"
    public: ClassVar = ("channels", "image size")

    kind: Literal["images"] = "images"
    """What the records are."""
    shape: tuple[Side, Side, Side]
    """Channels, height and width."""
    mean: tuple[AnyNumber, ...]
    """Subtracted from the pixels of each channel, which are from 0 to 1; public constants."""
    std: tuple[Annotated[float, Field(gt=0, le=MOST_NUMBER)], ...]
    """What they are then divided by, of each channel; public constants."""
    white: Annotated[int, Field(ge=1, le=MOST_LEVELS)] = 255
    """The largest value of a pixel."""

    @property
    def constants(self) -> Scaling:
        """Return the factors and summands of standardisation."""
        factors, summands = list[float](), list[float]()
        for mean, std in zip(self.mean, self.std, strict=True):
            factors.append(1 / (self.white * std))
            summands.append(-mean / std)
        return tuple(factors), tuple(summands)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError for constants that are not one for each channel."""
        self._check_constants(self.mean, self.std)
        return self


class Numbers(Records):
    """Rows or arrays of numbers, clipped to public ranges, which are scaled to [-1, 1].

    Ranges are declared, not measured on the records, because one record could change them.

    Example:
        >>> Numbers(shape=(2,), low=(0.0, 10.0), high=(10.0, 20.0)).scaling
        ((0.2, 0.2), (-1.0, -3.0))
    """

    several: ClassVar = "rows of numbers"
    one: ClassVar = "one row"
    public: ClassVar[tuple[str, ...]] = ("columns and their ranges",)

    kind: Literal["numbers"] = "numbers"
    """What the records are."""
    low: tuple[AnyNumber, ...]
    """Lowest value of each column or channel; lower ones are clipped to it. Public."""
    high: tuple[AnyNumber, ...]
    """Highest value of each column or channel. Public."""

    @property
    def constants(self) -> Scaling:
        """Return the factors and summands that map each range to [-1, 1]."""
        factors, summands = list[float](), list[float]()
        for low, high in zip(self.low, self.high, strict=True):
            half, middle = (high - low) / 2, (low + high) / 2
            factors.append(1 / half)
            summands.append(-middle / half)
        return tuple(factors), tuple(summands)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError for ranges that are not one for each channel, or are empty."""
        self._check_constants(self.low, self.high)
        for low, high in zip(self.low, self.high, strict=True):
            if (high - low) / 2 <= 0:  # by which inputs are divided
                raise ValueError("low is not below high")
        return self


class Texts(Numbers):
    """Records with texts, each a row of numbers of tokens, and perhaps other numbers.

    Behind the tokens of a text are :data:`~dpmac_cli.config.writing.WRITTEN` numbers on how it is
    written. A network gets those of a text as they are.
    """

    several: ClassVar = "records with texts"
    one: ClassVar = "one record"
    public: ClassVar = ("columns, their ranges, and largest numbers of tokens",)

    kind: Literal["texts"] = "texts"  # type: ignore[assignment]  # it tells kinds apart
    """What the records are."""
    texts: tuple[tuple[Annotated[int, Field(ge=0, le=MOST_VALUES)], Side], ...]
    """First input and number of inputs of each text, which are the numbers of its tokens."""
    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the tokenizer's file."""
    tokens: Annotated[int, Field(ge=2, le=(1 << 23) + 1)]
    """Number of tokens that the network knows, and padding. float32 stores these numbers exactly.
    """

    @property
    def described(self) -> str:
        """Return what a record is: "records with 2 texts of at most 32 and 64 tokens"."""
        number = len(self.texts)
        noun = "text" if number == 1 else "texts"
        return f"records with {number} {noun} of at most {self.limits} tokens"

    @property
    def limits(self) -> str:
        """Return the largest numbers of tokens of texts in words."""
        return " and ".join(str(count) for _, count in self.texts)

    @property
    def constants(self) -> Scaling:
        """Return the factors and summands of standardisation; those of texts change nothing."""
        factors, summands = map(list, super().constants)
        for first, count in self.texts:
            width = count + WRITTEN
            factors[first : first + width] = [1.0] * width
            summands[first : first + width] = [0.0] * width
        return tuple(factors), tuple(summands)

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Raise ValueError for texts that are not among the inputs."""
        last = self.shape[0] - WRITTEN
        if not self.texts or any(first + count > last for first, count in self.texts):
            raise ValueError("texts are not among the inputs")
        return self


#: Number of places of a category without declared values.
PLACES = 256
#: Kinds of the inputs that a column of a table becomes, in the order in which a reader returns
#: them: a number in its range, also with its rank among others, or without a range, 0 or 1, which
#: of some values a cell has, which of two, and the place of a value among :data:`PLACES`.
InputKind = Literal["number", "ranked", "open", "flag", "one-hot", "boolean", "hashed"]
#: Those whose range and ranks are found by counts, in the declared range if there is one.
COUNTED: tuple[InputKind, ...] = ("ranked", "open")
#: Number of hats of a number, which are 1 at one point of its range and 0 from the next one on.
HATS = 9


def inputs_of(kind: InputKind, width: int) -> int:
    """Return the number of inputs of a network for the inputs of a column.

    A number has hats, and where it is counted also its rank and the hats of that. Two categories
    are one input, apart from other values.

    Example:
        >>> inputs_of("number", 1), inputs_of("ranked", 1), inputs_of("one-hot", 5)
        (10, 20, 5)

    Args:
        kind: kind of the column.
        width: number of inputs that a reader returns for it.
    """
    number_with_hats = 1 + HATS
    if kind in COUNTED:
        return 2 * number_with_hats
    if kind == "number":
        return number_with_hats
    return 2 if kind == "one-hot" and width == TWO_AND_OTHERS else width


#: Inputs of a category of two values, and others.
TWO_AND_OTHERS = 3


class Table(Numbers):
    """Rows of a table.

    A number that may be missing is followed by a flag, 1 where it is missing; without a range it
    always is, and is 0 there. A category without a list of its values is the number of a place.
    """

    public: ClassVar = ("columns, and what is declared of them",)

    kind: Literal["table"] = "table"  # type: ignore[assignment]  # it tells kinds apart
    """What the records are."""
    columns: tuple[tuple[InputKind, Side], ...]
    """Kind and number of inputs of each part of a row, side by side."""

    @property
    def parts(self) -> Iterator[tuple[InputKind, slice]]:
        """Yield the kind and the inputs of each part of a row."""
        first = 0
        for kind, width in self.columns:
            yield kind, slice(first, first + width)
            first += width

    @property
    def is_open(self) -> bool:
        """Return whether nothing but the kind of some columns is declared."""
        return bool(self.count("open") or self.count("hashed"))

    @property
    def wide(self) -> int:
        """Return the number of columns."""
        return len(self.columns) - self.count("flag")

    def count(self, *kinds: InputKind) -> int:
        """Return the number of parts of some kinds, such as ``count("flag")``; 0 for none."""
        return sum(kind in kinds for kind, _ in self.columns)

    def ranked(self) -> "Table":
        """Return the same records, with ranks of numbers beside their declared ranges.

        A range stays; ranks inside it follow from noisy counts of the records.
        """
        columns = list[tuple[InputKind, int]]()
        for kind, width in self.columns:
            columns.append(("ranked" if kind == "number" else kind, width))
        return self.model_copy(update={"columns": tuple(columns)})

    @property
    def constants(self) -> Scaling:
        """Return the factors and summands of standardisation; others than numbers stay."""
        factors, summands = map(list, super().constants)
        for kind, part in self.parts:
            if kind not in ("number", "ranked", "boolean"):
                width = part.stop - part.start
                factors[part] = [1.0] * width
                summands[part] = [0.0] * width
        return tuple(factors), tuple(summands)

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        """Raise ValueError for columns that are not all of the inputs."""
        if sum(width for _, width in self.columns) != self.size:
            raise ValueError("columns are not all of its inputs")
        return self


#: Records of any kind, as a header has them.
AnyRecords = Annotated[Images | Numbers | Texts | Table, Field(discriminator="kind")]
