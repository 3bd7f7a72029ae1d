"""Exceptions that a user can act on, with their exit codes."""

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

BUG, USAGE, BUDGET, MISFIT, INTERRUPTED = 1, 2, 3, 4, 130

#: A setting in a message: ``{batch_size}``, before a value ``{batch_size=}128``, or a switch that
#: is to be set, ``{force=True}``.
_SETTING = re.compile(r"\{([a-z]\w*)(=True|=?)\}")
#: A setting before several values in one text: ``{shares=}0.94,0.06``. Names with spaces have
#: quotation marks around all of them.
_SEVERAL = re.compile(r"\{([a-z]\w*)=\}(?:'([^']*,[^']*)'|([^\s',]+(?:,[^\s',]+)*,[^\s',]*\w))")
#: Text without a space that is too long to read, of which a message shows the beginning.
_ENDLESS = re.compile(r"(\S{100})\S{900,}")


def as_flags(message: str) -> str:
    """Return a message for a person who types commands.

    >>> as_flags("Use {batch_size=}128, or add {skip_bad=True}.")
    'Use --batch-size 128, or add --skip-bad.'
    """

    def flag(setting: re.Match[str]) -> str:
        name, ending = setting.groups()
        before_value = " " if ending == "=" else ""
        return f"--{name.replace('_', '-')}{before_value}"

    return _SETTING.sub(flag, message)


def as_keywords(message: str) -> str:
    """Return a message for the author of a program; several values are a list.

    >>> as_keywords("Use {batch_size=}128, or add {skip_bad=True}.")
    'Use batch_size=128, or add skip_bad=True.'
    >>> as_keywords("Declare {classes=}cat,dog or {shares=}0.9,0.1.")
    "Declare classes=['cat', 'dog'] or shares=[0.9, 0.1]."
    """

    def keyword(setting: re.Match[str]) -> str:
        name, quoted, plain = setting.groups()
        values = list[str]()
        for value in (quoted or plain).split(","):
            is_number = value.replace(".", "", 1).isdecimal()
            values.append(value if is_number else repr(value))
        return f"{name}=[{', '.join(values)}]"

    return _SETTING.sub(r"\1\2", _SEVERAL.sub(keyword, message))


def counted(number: int, what: str) -> str:
    """Return a number of things in words, with commas between thousands.

    Args:
        number: how many there are.
        what: one of them; "s" or "es" is added for several.

    >>> counted(1, "record"), counted(2000, "record"), counted(2, "class")
    ('1 record', '2,000 records', '2 classes')
    """
    ending = "es" if what.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {what}{ending * (number != 1)}"


class DpmacError(Exception):
    """Base class of errors with messages for the user, each a full sentence with a remedy.

    ``str(error)`` has settings as keywords, one message per line; a command prints ``errors`` with
    flags instead, and ends with ``exit_code``.

    Args:
        errors: one message, or several, in which settings are in braces: see :func:`as_flags`.

    Attributes:
        errors: the messages, a tuple.
        exit_code: exit code of a command that the error ends.
    """

    exit_code: ClassVar[int] = BUG

    def __init__(self, errors: str | Sequence[str]) -> None:
        messages = (errors,) if isinstance(errors, str) else errors
        self.errors: tuple[str, ...] = tuple(_ENDLESS.sub(r"\1...", text) for text in messages)
        super().__init__("\n".join(map(as_keywords, self.errors)))


class InputError(DpmacError):
    """An argument or an input file cannot be used. Exit code 2."""

    exit_code = USAGE


def raise_errors(errors: Iterable[str]) -> None:
    """Raise InputError with every error that was found; do nothing if there are none.

    Args:
        errors: messages, each a full sentence with a remedy; see :class:`DpmacError`.
    """
    messages = tuple(errors)
    if messages:
        raise InputError(messages)


class BudgetError(DpmacError):
    """The privacy budget cannot be met, or is spent. Exit code 3."""

    exit_code = BUDGET


class ModelError(DpmacError):
    """A model or a checkpoint does not fit what it is used for. Exit code 4."""

    exit_code = MISFIT


class RunError(DpmacError):
    """A run cannot continue: memory ran out, or its device failed. Exit code 4."""

    exit_code = MISFIT


class DivergedError(RunError):
    """The parameters of a run are no longer finite. Exit code 4.

    Args:
        step: last step, after which a parameter was NaN or infinite.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"Training diverged: after step {step} the parameters are no longer finite. Use a "
            "smaller {lr}."
        )


#: What YAML calls the types that messages of pydantic name.
_IN_YAML = (
    ("a valid boolean", "true or false"),
    (re.compile(r"a valid dictionary( or instance of \w+)?"), "a mapping, such as name: value"),
)


def plain(message: str) -> str:
    """Return a message of pydantic in which types have the names of YAML.

    >>> plain("Input should be a valid dictionary or instance of Label")
    'Input should be a mapping, such as name: value'
    """
    for python, yaml in _IN_YAML:
        message = re.sub(python, yaml, message)
    return message


#: Longest fault in a message: one may quote a value of a crafted file.
LONGEST = 1000


def first_fault(failure: Exception) -> str:
    r"""Return the first fault of an error in one line, without a full stop.

    Args:
        failure: a ValidationError of pydantic, of which the place and the fault are returned, such
            as "settings.lr: ..."; of another error the first line.

    >>> first_fault(ValueError("no header.\nfile: a.csv"))
    'no header'
    """
    if (errors := getattr(failure, "errors", None)) is None:
        return str(failure).partition("\n")[0].rstrip(".")
    first = errors()[0]
    fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    fault = plain(fault.replace("Value error, ", ""))
    return fault if len(fault) <= LONGEST else f"{fault[:LONGEST]}..."


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError for whatever a library in Rust raises; a context manager.

    A PanicException is a BaseException, which no handler of Exception sees. Interrupts, exits and a
    lack of memory are raised as they are.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as failure:
        raise ValueError(str(failure)) from failure


def escaped(text: str) -> str:
    r"""Return text with escapes for characters that a terminal may take for commands.

    >>> escaped("a\tb")
    'a\\tb'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def as_sentence(text: str) -> str:
    """Return a text with escaped control characters and, unless it ends a sentence, a full stop.

    >>> as_sentence("file not found"), as_sentence("Really?")
    ('file not found.', 'Really?')
    """
    text = escaped(text)
    return text if text.endswith((".", "!", "?")) else f"{text}."


#: Remedies for file system errors, by error number.
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), " Free some space."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), " Make it writable."),
}


def explain_os_error(failure: OSError) -> str:
    """Return the file, the reason and the remedy of an OSError, in sentences.

    Without a file, the error is about the standard output. There is a remedy for full and for
    read-only disks and folders.

    >>> explain_os_error(OSError(errno.ENOSPC, "No space left on device", "model.safetensors"))
    'model.safetensors: No space left on device. Free some space.'
    """
    what = f"{failure.filename or 'standard output'}: {failure.strerror or failure}."
    return what + _CURES.get(failure.errno or 0, "")
