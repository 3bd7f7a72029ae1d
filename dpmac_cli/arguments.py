"""Types of the arguments of public functions, checked where a program calls them."""

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin

from dpmac_cli.errors import raise_errors

#: Annotations that any value fits.
UNSAID = (Any, inspect.Parameter.empty)
P = ParamSpec("P")
Result = TypeVar("Result")

#: How messages name a type of arguments. Others are named by themselves.
MEANINGS: Mapping[Any, str] = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Callable: "a function",
    Mapping: "a dict",
    Iterable: "a list",
    types.NoneType: "None",
}
#: Types whose values are not only of that class: NumPy has numbers of its own.
ABSTRACT: Mapping[Any, type] = {int: numbers.Integral, float: numbers.Real}


def checked(
    never_none: Collection[str] = (),
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator of a public function, which checks the types of its arguments first.

    An argument of another type than its annotation raises InputError, as does None for one without
    a default. Content is not looked at: the function validates that itself.

    Args:
        never_none: names of arguments with a default for which a None that is typed is an error,
            because it is probably a variable that was never set.

    >>> @checked()
    ... def twice(number: int) -> int:
    ...     return 2 * number
    >>> twice("a")
    Traceback (most recent call last):
    dpmac_cli.errors.InputError: twice: number must be a whole number, not str.
    """

    def decorated(function: Callable[P, Result]) -> Callable[P, Result]:
        signature = inspect.signature(function)
        public_name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> Result:
            try:
                typed = signature.bind(*args, **keywords).arguments
            except TypeError:  # Python's message for it names the function
                return function(*args, **keywords)
            faults = _faults(signature, typed, never_none)
            raise_errors(f"{public_name}: {fault}" for fault in faults)
            return function(*args, **keywords)

        return call

    return decorated


def _faults(
    signature: inspect.Signature, typed: Mapping[str, Any], never_none: Collection[str]
) -> Iterator[str]:
    """Yield the faults of the arguments of a call, one sentence each.

    Args:
        signature: signature of the function.
        typed: the arguments that were typed, by name.
        never_none: names of those that must not be None.
    """
    for name, value in typed.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            for keyword in never_none:
                if value.get(keyword, ...) is None:
                    yield _is_none(keyword)
        elif value is None and name in never_none:
            yield _is_none(name)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            is_required = parameter.default is parameter.empty
            kind = parameter.annotation
            if value is None and is_required and not _fits(None, kind, of_any=False):
                yield f"{name} must not be None."
            elif not _fits(value, kind):
                wanted = " or ".join(dict.fromkeys(_meanings(kind)))
                yield f"{name} must be {wanted}, not {type(value).__name__}."


def _is_none(name: str) -> str:
    return f"{name} is None: was a variable never set? Pass its records, or leave {name}= out."


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Return the classes that an annotation allows, without their parameters."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _parts(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        parts = list[Any]()
        for part in get_args(annotation):
            parts.extend(_parts(part))
        return tuple(parts)
    return (types.NoneType if annotation is None else origin or annotation,)


def _fits(value: Any, annotation: Any, of_any: bool = True) -> bool:
    """Return whether a value is of a type; ``of_any`` is the answer if any is allowed."""
    for part in _parts(annotation):
        kind = ABSTRACT.get(part, part)
        if part in UNSAID or not isinstance(kind, type):
            return of_any
        if isinstance(value, bool) and part in ABSTRACT:
            continue
        if isinstance(value, kind):
            return True
    return False


def _meanings(annotation: Any) -> Iterator[str]:
    """Yield the names of the types of an annotation for a message; of a path, text is not said."""
    parts = _parts(annotation)
    for part in parts:
        if part is str and Path in parts:
            continue
        yield MEANINGS.get(part, getattr(part, "__name__", str(part)))
