"""Fields of pydantic models that are flags: metadata, validation, and errors with a remedy.

The docstring of a field is its help. It may end in its default in words, if that depends on other
fields: "[default: the dataset's]".
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from dpmac_cli.config.gone import instead
from dpmac_cli.errors import InputError, as_typed, raise_errors

#: A number in text, as a regular expression.
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
#: Limits of a number in words, by their names in ``Field``.
LIMITS: Mapping[str, str] = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
T = TypeVar("T")
Model = TypeVar("Model", bound="Flags")


@dataclass(frozen=True)
class Choice:
    """Registered names, one of which a text must be.

    Attributes:
        names: the names.
        besides: test and description of other texts that are allowed.
        instances: class whose instances are allowed too.
    """

    names: Collection[str]
    besides: tuple[Callable[[str], bool], str] | None = None
    instances: type | tuple[()] = ()

    @property
    def known(self) -> str:
        """Return the allowed values in words."""
        more = f"; or {self.besides[1]}" if self.besides else ""
        return f"{', '.join(self.names)}{more}"

    def check(self, value: object) -> object:
        """Return an allowed value, or raise an error of pydantic."""
        if isinstance(value, self.instances):
            return value
        if isinstance(value, str) and (
            value in self.names or (self.besides is not None and self.besides[0](value))
        ):
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

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        """Return the schema of a text that matches, for pydantic."""
        return core_schema.str_schema(strict=True, pattern=rf"^(?:{self.regex})$")


def _not_empty(value: object) -> object:
    if value == "":
        raise PydanticCustomError("empty", "Input should not be empty")
    return value


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


#: A path that is not empty.
SomePath = Annotated[Path, BeforeValidator(_not_empty)]
#: One value or several, separated by commas.
Several = Annotated[tuple[T, ...], BeforeValidator(_split)]


@dataclass(frozen=True)
class Option:
    """A field of a model as a flag: what its help, its documentation and its messages say."""

    name: str
    group: str  # group of the help
    help: str
    otherwise: str  # default in words; "" if there is none, or if it is off
    default: Any  # None if it depends on other settings, or if the setting is off
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
    def choices(self) -> tuple[str, ...]:
        """Return its registered names."""
        return tuple(self.choice.names) if self.choice else ()

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
def options(model: "type[Flags]") -> KnownFlags:
    """Return the flags of a model by name, in the order of its fields."""
    group, known = "Options", dict[str, Option]()
    for name, found in model.model_fields.items():
        group = model.sections.get(name, group)
        known[name] = _option(name, group, found)
    return known


def flag_name(name: str) -> str:
    """Return the name of a setting as a flag."""
    return name.replace("_", "-")


def _option(name: str, group: str, found: FieldInfo) -> Option:
    parts = [*_parts(found.annotation), *found.metadata]

    def first(kind: type[T]) -> T | None:
        return next((part for part in parts if isinstance(part, kind)), None)

    types = [part for part in parts if isinstance(part, type) and part is not NoneType]
    text, _, otherwise = " ".join((found.description or "").split()).partition(" [default: ")
    if not otherwise and is_given(found.default):
        otherwise = str(found.default)
    return Option(
        name,
        group,
        help=text,
        otherwise=otherwise.removesuffix("]"),
        default=found.default,
        kind=types[0] if types else str,  # registered names are text
        several=... in parts,
        limits={n: getattr(part, n) for part in parts for n in LIMITS if hasattr(part, n)},
        choice=first(Choice),
        pattern=first(Pattern),
    )


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, and their metadata."""
    if get_origin(annotation) in (Annotated, tuple, Union, UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    elif isinstance(annotation, FieldInfo):
        yield from annotation.metadata
    else:
        yield annotation


class _Hidden:
    """An attribute that does not exist: a flag may have the name of a method of pydantic."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError


class Flags(BaseModel, frozen=True):
    """Base of models whose fields are flags.

    None and False mean that a flag is not given. Other values are validated as their text, in the
    same way for command line, YAML and Python.

    Raises:
        InputError: lists every fault found.
    """

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
        ignored_types=(_Hidden,),
        use_attribute_docstrings=True,
    )
    #: Groups of the help, each by its first field.
    sections: ClassVar[Mapping[str, str]] = {}
    #: Groups of which one may be given.
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    #: Flags that contradict each other, and why.
    not_both: ClassVar[Mapping[tuple[str, str], str]] = {}
    #: Flags that need another one: one of these.
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    if TYPE_CHECKING:
        json = schema = cast("Any", None)
    else:
        json = schema = _Hidden()

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate values, and explain errors."""
        if not isinstance(values, Mapping):
            return handler(values)
        known = options(cls)
        given = {n: _as_text(v, known.get(n)) for n, v in values.items() if is_given(v)}
        contradictions = [*cls.contradictions(given)]
        try:
            found = handler(given)
        except ValidationError as failure:
            order = [*given]
            faults = sorted(failure.errors(), key=lambda fault: order.index(str(fault["loc"][0])))
            said = (_sentence(fault, known) for fault in faults)
            raise InputError([*dict.fromkeys(said), *contradictions]) from None
        raise_errors(contradictions)
        return found

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude or need each other, from given values by name."""
        for group in cls.exclusive:
            flags = [f"--{flag_name(name)}" for name in group if name in given]
            if len(flags) > 1:
                yield f"{' and '.join(flags)} contradict each other: give one."
        for both, why in cls.not_both.items():
            if given.keys() >= {*both}:
                flags = [f"--{flag_name(name)}" for name in both]
                yield f"{' and '.join(flags)} contradict each other: {why}. Give one."
        yield from lonely(given, cls.needs)

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Return the values that were set explicitly, by name."""
        return {n: getattr(self, n) for n in type(self).model_fields if n in self.model_fields_set}


def lonely(given: Mapping[str, Any], needs: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield faults of settings that need another setting."""
    for name, others in needs.items():
        if name in given and given.keys().isdisjoint(others):
            remedy = " or ".join(f"--{flag_name(other)}" for other in others)
            yield f"--{flag_name(name)} has no effect alone: add {remedy}, or leave it out."


def is_given(value: object) -> bool:
    """Return whether a flag or a keyword has a value. 0 is one, which equals False."""
    return value is not None and value is not False


def valid(
    model: type[Model], values: Mapping[Any, Any], errors: list[str], origin: str = ""
) -> Model:
    """Return a model of values; if any is invalid, one without values, with ``errors`` extended.

    ``origin`` precedes each fault, such as "FILE: ".
    """
    try:
        return model.model_validate(values)
    except InputError as failure:
        errors.extend(origin + error for error in failure.errors)
        return model()


def unknown(name: str, known: KnownFlags) -> str:
    """Return the error for a name that is not one of the ``known`` settings."""
    hint = instead(name, known) or near(name, map(flag_name, known))
    return f"There is no setting '{name}'.{as_typed(hint, hint.replace('-', '_'))}"


def near(text: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" with close matches, or an empty string."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _as_text(value: object, option: Option | None) -> object:
    """Return a number or a path as text, and text and the values of switches unchanged."""
    if isinstance(value, bool):
        return value if option is None or option.switch else str(value).lower()
    return str(value) if isinstance(value, Real | Path) else value


def _sentence(fault: ErrorDetails, known: KnownFlags) -> str:
    """Return an error of pydantic as a sentence with the value and a remedy."""
    name, kind, value = str(fault["loc"][0]), fault["type"], fault["input"]
    if name not in known:
        return unknown(name, known)
    option = known[name]
    if not isinstance(value, str | bool):
        named = option.choice if option.choice and not option.choice.instances else None
        known_values = AS_DATASET if named is None else f"Known: {named.known}."
        return f"{name} cannot be a {type(value).__name__}. {known_values}"
    better = instead(f"{name} {value}")
    if option.switch:
        said = " must be true or false."
    elif kind == "empty":
        said = " must not be empty. Set it to a folder, or leave it out."
    elif option.choice is not None:
        meant = better or near(str(value), option.choices)
        noun = flag_name(name).removesuffix("s" * option.several)
        said = f": there is no {noun} '{value}'.{meant} Known: {option.choice.known}."
    elif option.pattern is not None:
        said = f" must be {option.pattern.description}, not '{value}'.{better}"
    elif kind.startswith(("greater_than", "less_than")):
        said = f" must be {option.bounds}, not {value}.{better}"
    else:
        nouns: Mapping[type, str] = {int: "a whole number", float: "a number"}
        said = f": '{value}' is not {nouns.get(option.kind, 'text')}."
    return f"--{flag_name(name)}{said}"


#: Remedy for a value of another type than text or a number.
AS_DATASET = (
    "Use text or numbers, and for dataset a name, a path, or records in memory: ArrayData(x, y), "
    "from_torch(dataset) or from_dataframe(frame, schema)."
)
