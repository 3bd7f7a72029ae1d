"""Models of flags: validation, and errors with the value, its origin and a remedy."""

import difflib
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from dpmac_cli.config.fields import NUMBER, KnownFlags, Option, flag_name, options
from dpmac_cli.config.gone import instead
from dpmac_cli.errors import InputError, as_typed

Model = TypeVar("Model", bound="Flags")


class FlagError(InputError):
    """Values of flags are invalid: those of ``names``."""

    def __init__(self, errors: tuple[str, ...], names: frozenset[str]) -> None:
        super().__init__(errors)
        self.names = names


class _Hidden:
    """An attribute that does not exist: a flag may have the name of a method of pydantic."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError


class Flags(BaseModel, frozen=True):
    """Base of models whose fields are flags.

    None and False mean that a flag is not given. Other values are validated as their text, in the
    same way for command line, YAML and Python.

    Raises:
        FlagError: lists every fault found. ``context`` of ``model_validate`` may name the origins
            of values.
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
    def _explained(
        cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Validate values, and explain errors."""
        if not isinstance(values, Mapping):
            return handler(values)
        given = {n: _as_text(v) for n, v in values.items() if v is not None and v is not False}
        try:
            return handler(given)
        except ValidationError as failure:
            names = [*given]
            faults = sorted(failure.errors(), key=lambda fault: names.index(str(fault["loc"][0])))
            failed = frozenset(str(fault["loc"][0]) for fault in faults)
            raise FlagError(explain(faults, options(cls), info.context or {}), failed) from None

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Return the values that were set explicitly, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def valid_part(
    model: type[Model],
    given: Mapping[Any, Any],
    errors: list[str],
    origins: Mapping[Any, str] | None = None,
) -> tuple[Model, frozenset[str]]:
    """Return a model of the valid values and the names of the others.

    Their faults are added to ``errors``. ``origins`` are those of :func:`explain`.
    """
    try:
        return model.model_validate(given, context=origins), frozenset()
    except FlagError as failure:
        errors.extend(failure.errors)
        valid = {name: value for name, value in given.items() if name not in failure.names}
        return model.model_validate(valid), failure.names


def explain(
    faults: Iterable[ErrorDetails], known: KnownFlags, origins: Mapping[str, str]
) -> tuple[str, ...]:
    """Return pydantic's errors as sentences with the value, its origin and a remedy.

    Args:
        faults: ``ValidationError.errors()``.
        known: the flags of the model.
        origins: origin of each value, such as "sigma in FILE"; by default its flag.
    """
    said: dict[str, None] = {}
    for fault in faults:
        name = str(fault["loc"][0])
        if name not in known:
            said[unknown(name, known)] = None
        else:
            origin = origins.get(name, f"--{flag_name(name)}")
            said[_sentence(fault, known[name], origin)] = None
    return tuple(said)


def unknown(name: str, known: KnownFlags) -> str:
    """Return the error for a name that is not one of the ``known`` settings."""
    hint = near_setting(name, known)
    return f"There is no setting '{name}'.{as_typed(hint, hint.replace('-', '_'))}"


def near_setting(written: str, known: KnownFlags) -> str:
    """Return a hint for an unknown name of a setting."""
    return instead(written, known) or near(written, map(flag_name, known))


def near(text: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" with close matches, or an empty string."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _as_text(value: object) -> object:
    """Return a number or a path as text, and anything else unchanged."""
    as_it_is = isinstance(value, bool) or not isinstance(value, Real | Path)
    return value if as_it_is else str(value)


def _sentence(fault: ErrorDetails, option: Option, origin: str) -> str:
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
        said = f": '{text}' is not {_NOUNS[option.kind]}.{_decimal_point(text)}"
    return origin + said


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
