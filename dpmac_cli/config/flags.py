"""Fields of pydantic models that are flags: what help and docs say of them, and their validation.

The docstring of a field is its help. It may end in its default in words, if that depends on other
fields: "[default: the dataset's]".
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
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
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from dpmac_cli import before_0_4
from dpmac_cli.errors import InputError, as_keywords, plain, raise_errors

#: A number in text, as a regular expression.
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?"
T = TypeVar("T")
Model = TypeVar("Model", bound="Flags")
#: Fields by name. The type of the names does not matter here.
Fields = Mapping[Any, FieldInfo]
#: Groups of settings of which one may be given, and why.
NotBoth = Mapping[tuple[str, ...], str]
#: Where values were written, by the names of their settings: "run.yaml, line 3".
Places = Mapping[str, str]


@dataclass(frozen=True)
class OneOf:
    """Validator of a text that must be one of some names, or of a described form.

    Values of other types are left to the field's own type.

    Example:
        >>> device = OneOf(("cpu", "cuda"), (re.compile("cuda:[0-9]").fullmatch, "cuda:N"))
        >>> device.known
        'cpu, cuda; or cuda:N'
        >>> device.check("cuda:1")
        'cuda:1'

    Attributes:
        names: the names.
        besides: test and description of other texts that are allowed.
    """

    names: Collection[str] = ()
    besides: tuple[Callable[[str], object], str] | None = None

    @property
    def known(self) -> str:
        """Return the allowed texts in words: "cpu, cuda; or cuda:N"."""
        names = ", ".join(self.names)
        if self.besides is None:
            return names
        _, described = self.besides
        return f"{names}; or {described}" if names else described

    def check(self, value: object) -> object:
        """Return an allowed text, or a value of another type.

        Raises:
            PydanticCustomError: the text is none of them. The message lists what is allowed.
        """
        if not isinstance(value, str) or value in self.names:
            return value
        if self.besides is not None:
            is_allowed, _ = self.besides
            if is_allowed(value):
                return value
        known = f"one of {self.known}" if self.names else self.known
        raise PydanticCustomError("one_of", "Input should be {known}", {"known": known})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Return the schema of the annotated type, followed by :meth:`check`."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))


def _not_empty(value: object) -> object:
    """Return a value that is no empty text, which as a path would be the current folder."""
    if value == "":
        raise PydanticCustomError("empty", "Input should be a path")
    return value


def split(value: object) -> object:
    """Return the parts of a text with commas; other values are unchanged.

    Example:
        >>> split("0.5, 1"), split(2)
        (['0.5', '1'], 2)
    """
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",")]


#: A path that is not empty.
SomePath = Annotated[Path, BeforeValidator(_not_empty)]
#: Mark of a setting whose value is one text with commas, such as "0,1", or a list of its parts.
JOINED = "joined"
#: One value or several, separated by commas.
Several = Annotated[tuple[T, ...], BeforeValidator(split)]


def flag_name(name: str) -> str:
    """Return the name of a setting as a flag, without its hyphens: "batch-size" of "batch_size"."""
    return name.replace("_", "-")


def setting_name(flag: object) -> str:
    """Return the name of a setting by its flag: "batch_size" of "batch-size".

    Args:
        flag: a flag without its first hyphens, or a key of a file, which may be no text.
    """
    return str(flag).replace("-", "_")


def parts(field: FieldInfo) -> list[Any]:
    """Return the types in the annotation of a field, and their metadata.

    Unions, tuples and ``Annotated`` are taken apart: ``Annotated[int, Field(ge=1)] | None`` is
    ``[int, Ge(ge=1), NoneType]``.
    """
    return [*_flattened(field.annotation), *field.metadata]


def _flattened(annotation: Any) -> Iterator[Any]:
    """Yield the types inside an annotation, and their metadata; see :func:`parts`."""
    if get_origin(annotation) in (Annotated, tuple, Union, UnionType):
        for part in get_args(annotation):
            yield from _flattened(part)
    elif isinstance(annotation, FieldInfo):
        yield from annotation.metadata
    else:
        yield annotation


def kind_of(field: FieldInfo) -> type:
    """Return the type of one value of a field: the first one that is not None."""
    for part in parts(field):
        if isinstance(part, type) and part is not NoneType:
            return part
    return str  # a Literal is text


def is_switch(field: FieldInfo) -> bool:
    """Return whether a flag is given without a value, as ``--force`` is."""
    return kind_of(field) is bool


def takes_several(field: FieldInfo) -> bool:
    """Return whether several comma-separated values may be given, as of ``Several[float]``."""
    return ... in parts(field)


def choices_of(field: FieldInfo) -> OneOf:
    """Return the names that a field accepts; none if any text is allowed.

    They are those of :class:`OneOf`, or the values of a ``Literal``.
    """
    for part in parts(field):
        if isinstance(part, OneOf):
            return part
        if get_origin(part) is Literal:
            return OneOf(get_args(part))
    return OneOf()


def help_of(field: FieldInfo) -> str:
    """Return the help of a field, without its default: the beginning of its docstring."""
    help_text, _ = _described(field)
    return help_text


def default_of(field: FieldInfo) -> str:
    """Return the default of a field in words; "" if there is none.

    Words at the end of its docstring, "[default: the dataset's]", come before the value.
    """
    _, default = _described(field)
    if default or not is_given(field.default) or field.default == ():
        return default
    return str(field.default)


def _described(field: FieldInfo) -> tuple[str, str]:
    """Return the help of a field and its default in words, from its docstring."""
    description = " ".join((field.description or "").split())
    help_text, _, default = description.partition(" [default: ")
    return help_text, default.removesuffix("]")


class _Hidden:
    """An attribute that does not exist: a flag may have the name of a method of pydantic."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError


class Flags(BaseModel, frozen=True):
    """Base of models whose fields are flags.

    None and False mean that a flag is not given. Numbers and paths are validated as their text, in
    the same way for command line, YAML and Python. The context of a validation has the places of
    values that are from a file.

    Attributes:
        not_both: groups of flags of which one may be given, and why.
        renamed: flags by the names that other libraries give them.

    Raises:
        InputError: lists every fault together: unknown names, invalid values, contradictions.
    """

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
        ignored_types=(_Hidden,),
        use_attribute_docstrings=True,
    )
    #: Groups of flags of which one may be given, and why; "" for ways to say the same.
    not_both: ClassVar[NotBoth] = {}
    #: Flags by the names that other libraries give them.
    renamed: ClassVar[Mapping[str, str]] = {}
    if TYPE_CHECKING:
        json = schema = cast("Any", None)
    else:
        json = schema = _Hidden()

    @model_validator(mode="wrap")
    @classmethod
    def _with_all_faults(
        cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Validate values, and list all faults together, in the order of the values."""
        if not isinstance(values, Mapping):
            return handler(values)
        texts = dict[str, Any]()
        for name, value in values.items():
            if is_given(value):
                texts[name] = as_text(value, cls.model_fields.get(name))
        places = info.context or {}
        contradictions = [in_file(error, places) for error in cls.contradictions(texts)]
        try:
            validated = handler(texts)
        except ValidationError as failure:
            faults = [_sentence(fault, cls, places) for fault in _in_order(failure, list(texts))]
            raise InputError([*dict.fromkeys(faults), *contradictions]) from None
        raise_errors(contradictions)
        return validated

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude each other.

        Args:
            values: given values by name, not validated.
        """
        for group, why in cls.not_both.items():
            names = [f"{{{name}}}" for name in group if name in values]
            if len(names) > 1:
                remedy = f"{why}. Give one" if why else "give one"
                yield f"{' and '.join(names)} contradict each other: {remedy}."

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Return the values that were set explicitly, by name."""
        values = dict[str, Any]()
        for name in type(self).model_fields:
            if name in self.model_fields_set:
                values[name] = getattr(self, name)
        return values


def lonely(values: Mapping[str, Any], needs: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield faults of settings that need another setting.

    Args:
        values: given values by name.
        needs: for the name of a setting, those of which it needs one; see :data:`.NEEDS`.
    """
    for name, others in needs.items():
        if name in values and values.keys().isdisjoint(others):
            remedy = " or ".join(f"{{{other}}}" for other in others)
            yield f"{{{name}}} has no effect alone: add {remedy}, or leave it out."


def is_given(value: object) -> bool:
    """Return whether a flag or a keyword has a value. 0 is one, which equals False.

    Example:
        >>> is_given(0), is_given(False), is_given(None)
        (True, False, False)
    """
    return value is not None and value is not False


def valid(
    model: type[Model], values: Mapping[Any, Any], errors: list[str], places: Places | None = None
) -> Model:
    """Return a model of values; if any is invalid, one without values, with ``errors`` extended.

    So a command reports the faults of several models together.

    Args:
        model: class of the model.
        values: values by name.
        errors: list to which the faults are added.
        places: where values of a file are, by the names of their settings.
    """
    try:
        return model.model_validate(values, context=places)
    except InputError as failure:
        errors.extend(failure.errors)
        return model()


def unknown(name: str, known: Iterable[str], renamed: Mapping[str, str]) -> str:
    """Return the error for a name that is not one of the ``known`` settings.

    Args:
        name: the unknown name.
        known: names of settings.
        renamed: settings by the names that other libraries give them.
    """
    names = {*known}
    ours = renamed.get(name)
    if ours in names:
        return f"There is no setting '{name}'. In dpmac it is called {{{ours}}}."
    if name in before_0_4.SETTINGS:
        return f"There is no setting '{name}'. {before_0_4.SEE}"
    return f"There is no setting '{name}'.{near(name, names, '{{{}}}'.format)}"


def near(text: str, names: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Return " Did you mean ...?" with close matches, or an empty string.

    The setting that replaces files is not suggested.

    Example:
        >>> near("sigm", ["sigma", "epsilon"])
        ' Did you mean sigma?'

    Args:
        text: what was typed.
        names: names that are known.
        write: returns a name as it is printed.
    """
    harmless = [name for name in names if name != "force"]
    beginning_so = [name for name in harmless if name.startswith(text.lower())]
    close = difflib.get_close_matches(text.lower(), harmless, n=2, cutoff=0.6)
    matches = beginning_so[:2] or close
    if not matches:
        return ""
    return f" Did you mean {' or '.join(map(write, matches))}?"


def in_file(error: str, places: Places) -> str:
    """Return a contradiction, after the place of the first of its settings that is from a file.

    Args:
        error: sentence that names settings in braces.
        places: places by the names of settings; without any of them, the sentence is unchanged.
    """
    for name, place in places.items():
        if f"{{{name}}}" in error:
            return f"{place}: {as_keywords(error)}"
    return error


def as_text(value: object, field: FieldInfo | None) -> object:
    """Return a number, a path or the parts of a text as text, and the values of switches as is.

    So a value has the same limits and the same message, wherever it comes from.

    Args:
        value: a value of a program or a file.
        field: field that it is for; None if there is none of its name.
    """
    if isinstance(value, bool):
        return value if field is None or is_switch(field) else str(value).lower()
    if isinstance(value, list | tuple) and field is not None and JOINED in field.metadata:
        texts = [*map(str, value)]
        return value if any("," in text for text in texts) else ",".join(texts)
    return str(value) if isinstance(value, Real | Path) else value


def _in_order(failure: ValidationError, names: list[str]) -> list[ErrorDetails]:
    """Return the errors of a validation in the order in which its values were given."""

    def place(error: ErrorDetails) -> int:
        return names.index(str(error["loc"][0]))

    return sorted(failure.errors(), key=place)


def _sentence(fault: ErrorDetails, model: type[Flags], places: Places) -> str:
    """Return an error of pydantic with the setting, the value and names that are close to it.

    Args:
        fault: an error of the validation.
        model: model that was validated.
        places: places of values of a file, by the names of their settings.
    """
    name, value = str(fault["loc"][0]), fault["input"]
    message, _, _ = fault["msg"].partition(", unable to parse")
    why = plain(message)
    known = model.model_fields
    if name not in known:
        error = unknown(name, known, model.renamed)
    elif not isinstance(value, str):
        error = f"{{{name}}}: {why}, not a {type(value).__name__}."
    else:
        shown = value if re.fullmatch(NUMBER, value) else f"'{value}'"
        error = f"{{{name}}}: {why}, not {shown}.{near(value, choices_of(known[name]).names)}"
        if value in before_0_4.VALUES:
            error += f" {before_0_4.SEE}"
    return f"{places[name]}: {as_keywords(error)}" if name in places else error
