"""Fields of pydantic models that are flags: their metadata, and what is read from it."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

#: A number in text, as a regular expression.
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
#: Limits of a number in words, by their names in ``Field``.
LIMITS: Mapping[str, str] = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """Metadata of a flag, beside its type, limits and default. Its docstring is the help.

    Attributes:
        group: group of the help.
        otherwise: the default in words, if it depends on other settings.
        metavar: placeholder of the value in the help; "" for one by type.
        needs: other settings, one of which is required.
        not_with: contradicting settings, and why.
    """

    group: str
    otherwise: str = ""
    metavar: str = ""
    needs: tuple[str, ...] = ()
    not_with: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Registered names, one of which a text must be.

    Attributes:
        names: the names.
        besides: test and description of other texts that are allowed.
        instances: class whose instances are allowed too.
        noun: what one of them is, if the name of the flag does not say so.
    """

    names: Collection[str]
    besides: tuple[Callable[[str], bool], str] | None = None
    instances: type | tuple[()] = ()
    noun: str = ""

    @property
    def known(self) -> str:
        """Return the allowed values in words."""
        more = f"; or {self.besides[1]}" if self.besides else ""
        return f"{', '.join(self.names)}{more}"

    def check(self, value: object) -> object:
        """Return an allowed value, or raise an error of pydantic."""
        if isinstance(value, self.instances):
            return value
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be a valid string")
        if value in self.names or (self.besides is not None and self.besides[0](value)):
            return value
        raise PydanticCustomError("choice", "Input should be a registered name")

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        """Return the schema of :meth:`check`, for pydantic."""
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True)
class Pattern:
    """Pattern of a text, and its description."""

    regex: str
    description: str

    def check(self, text: str) -> str:
        """Return a text that matches, or raise an error of pydantic."""
        if re.fullmatch(self.regex, text):
            return text
        raise PydanticCustomError("pattern", "Input should match a pattern")

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        """Return the schema of :meth:`check`, for pydantic."""
        text = core_schema.str_schema(strict=True)
        return core_schema.no_info_after_validator_function(self.check, text)


def _not_empty(value: object) -> object:
    if value == "":
        raise PydanticCustomError("empty", "Input should not be empty")
    return value


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


#: A path that is not empty.
SomePath = Annotated[Path, BeforeValidator(_not_empty)]
#: One value or several, separated by commas.
Several = Annotated[tuple[T, ...], BeforeValidator(_split)]


@dataclass(frozen=True)
class Option:
    """A field of a model as a flag: what its help, its documentation and its messages say."""

    name: str
    help: str
    default: Any  # None if it depends on other settings, or if the setting is off
    flag: Flag
    kind: type  # type of a value
    several: bool  # whether several comma-separated values may be given
    limits: Mapping[str, float]  # limits of a number, by the names of LIMITS
    choice: Choice | None
    pattern: Pattern | None

    @property
    def switch(self) -> bool:
        """Return whether it is given without a value."""
        return self.kind is bool

    @property
    def otherwise(self) -> str:
        """Return its default in words; "" if there is none, or if it is off."""
        return self.flag.otherwise or ("" if self.default in (None, False) else str(self.default))

    @property
    def choices(self) -> tuple[str, ...]:
        """Return its registered names."""
        return tuple(self.choice.names) if self.choice else ()

    @property
    def known(self) -> str:
        """Return its registered names, and other values, in words."""
        return self.choice.known if self.choice else ""

    @property
    def bounds(self) -> str:
        """Return the limits of a number in words: "above 0 and below 1"."""
        return " and ".join(
            f"{LIMITS[name]} {limit:{',' if isinstance(limit, int) else 'g'}}"
            for name, limit in self.limits.items()
        )


#: Flags by name. The type of the names does not matter here.
KnownFlags = Mapping[Any, Option]


@cache
def options(model: type[BaseModel]) -> KnownFlags:
    """Return the flags of a model by name, in the order of its fields."""
    return {name: _option(name, found) for name, found in model.model_fields.items()}


def flag_name(name: str) -> str:
    """Return the name of a setting as a flag."""
    return name.replace("_", "-")


def _option(name: str, found: FieldInfo) -> Option:
    kind, several, metadata = _type(found.annotation)
    metadata = [*metadata, *found.metadata]
    (flag,) = (part for part in metadata if isinstance(part, Flag))
    limits = {
        limit: getattr(part, limit) for part in metadata for limit in LIMITS if hasattr(part, limit)
    }
    return Option(
        name,
        " ".join((found.description or "").split()),
        found.default,
        flag,
        kind,
        several,
        limits,
        next((part for part in metadata if isinstance(part, Choice)), None),
        next((part for part in metadata if isinstance(part, Pattern)), None),
    )


def _type(annotation: Any) -> tuple[type, bool, list[Any]]:
    """Return the type of a value, whether there are several, and the metadata inside a type."""
    if get_origin(annotation) is Annotated:
        kind, several, inner = _type(annotation.__origin__)
        return kind, several, [*inner, *_metadata(annotation.__metadata__)]
    if get_origin(annotation) is tuple:
        kind, _, inner = _type(get_args(annotation)[0])
        return kind, True, inner
    if get_origin(annotation) in (Union, UnionType):
        return _type(next(part for part in get_args(annotation) if part is not NoneType))
    return (annotation if isinstance(annotation, type) else str), False, []  # names are text


def _metadata(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        yield from part.metadata if isinstance(part, FieldInfo) else (part,)
