"""Models of flags: validation, and errors with the value and a remedy."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from dpmac_cli.config.fields import NUMBER, KnownFlags, Option, flag_name, options
from dpmac_cli.config.gone import instead
from dpmac_cli.errors import InputError, as_typed, raise_errors

Model = TypeVar("Model", bound="Flags")


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
        given = {n: _as_text(n, v, known) for n, v in values.items() if is_given(v)}
        contradictions = [*cls.contradictions(given)]
        try:
            found = handler(given)
        except ValidationError as failure:
            order = [*given]
            faults = sorted(failure.errors(), key=lambda fault: order.index(str(fault["loc"][0])))
            raise InputError([*explain(faults, known), *contradictions]) from None
        raise_errors(contradictions)
        return found

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude each other, from given values by name."""
        del given
        yield from ()

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Return the values that were set explicitly, by name."""
        return {n: getattr(self, n) for n in type(self).model_fields if n in self.model_fields_set}


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


def explain(faults: Iterable[ErrorDetails], known: KnownFlags) -> tuple[str, ...]:
    """Return the errors of pydantic as sentences with the value and a remedy.

    ``known`` are the flags of the model.
    """
    said: dict[str, None] = {}
    for fault in faults:
        name = str(fault["loc"][0])
        said[_sentence(fault, known[name]) if name in known else unknown(name, known)] = None
    return tuple(said)


def unknown(name: str, known: KnownFlags) -> str:
    """Return the error for a name that is not one of the ``known`` settings."""
    hint = instead(name, known) or near(name, map(flag_name, known))
    return f"There is no setting '{name}'.{as_typed(hint, hint.replace('-', '_'))}"


def near(text: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" with close matches, or an empty string."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _as_text(name: str, value: object, known: KnownFlags) -> object:
    """Return a number or a path as text, and text and the values of switches unchanged."""
    if isinstance(value, bool):
        return value if name not in known or known[name].switch else str(value).lower()
    return str(value) if isinstance(value, Real | Path) else value


def _sentence(fault: ErrorDetails, option: Option) -> str:
    """Return an error of a known flag as a sentence."""
    kind, value = fault["type"], fault["input"]
    if not isinstance(value, str | bool):
        choice = option.choice
        remedy = AS_DATASET if choice is None or choice.instances else f"Known: {choice.known}."
        return f"{option.name} cannot be a {type(value).__name__}. {remedy}"
    text = str(value)
    better = instead(f"{option.name} {text}")
    if option.switch:
        said = " must be true or false."
    elif kind == "empty":
        said = " must not be empty. Set it to a folder, or leave it out."
    elif option.choice is not None:
        meant = better or near(text, option.choices)
        noun = option.choice.noun or flag_name(option.name)
        said = f": there is no {noun} '{text}'.{meant} Known: {option.choice.known}."
    elif option.pattern is not None:
        said = f" must be {option.pattern.description}, not '{text}'.{better}"
    elif kind in _OUT_OF_LIMITS:
        said = f" must be {option.bounds}, not {text}.{better}"
    else:
        said = f": '{text}' is not {_NOUNS.get(option.kind, 'text')}.{_decimal_point(text)}"
    return f"--{flag_name(option.name)}{said}"


def _decimal_point(text: str) -> str:
    """Return a hint if a number was meant that has a decimal comma."""
    pointed = text.replace(",", ".")
    meant = pointed != text and re.fullmatch(NUMBER, pointed)
    return f" Did you mean {pointed}?" if meant else ""


#: Remedy for a value of another type than text or a number.
AS_DATASET = (
    "Use text or numbers, and for dataset a name, a path, or records in memory: ArrayData(x, y), "
    "from_torch(dataset) or from_dataframe(frame, schema)."
)
_NOUNS: Mapping[type, str] = {int: "a whole number", float: "a number"}
_OUT_OF_LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
