"""File of an account: what is in it, its lock, and how it is read and written. Imports no torch.

A file is written before the event that it counts begins, with sync, and replaced at once, so a
process that is killed leaves one that counts at least what was done. A checksum shows damage.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from dpmac_cli import files
from dpmac_cli.accounting.events import TrainingEvent, covers
from dpmac_cli.errors import InputError

#: Seconds to wait while another process begins an event of the same account.
PATIENCE = 120.0


class AccountFile(BaseModel):
    """Content of the file of an account, beside its checksum.

    Attributes:
        version: version of the format.
        number: random number of the account, the same in all copies.
        unit: unit of privacy, in words, and what tells the units of records apart.
        delta: delta of the guarantee.
        target: epsilon that all events keep to; None without.
        order: Renyi order at which adaptive events compose; None for events fixed beforehand.
        events: events that have begun.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    version: int = 1
    number: str
    unit: tuple[str, str]
    delta: float
    target: float | None
    order: float | None
    events: tuple[TrainingEvent, ...]

    def write(self, path: Path) -> None:
        """Replace a file by this one, with sync; only its owner can read it.

        Args:
            path: the file, which need not exist. Its lock is the caller's to hold: see
                :func:`locked`.

        Raises:
            OSError: it cannot be written. The file before is unchanged.
        """
        text = files.with_checksum("account", self.model_dump(mode="json"))
        files.write_atomically(path, text.encode(), files.PRIVATE_MODE)


def read_account(path: Path) -> AccountFile:
    """Return the content of a file, after its checksum was compared.

    Args:
        path: the file. It is not locked for it, because files are replaced at once.

    Raises:
        InputError: it is missing, damaged, or another one.
    """
    try:
        values = files.checked(path.read_bytes(), "account")
        return AccountFile.model_validate_json(json.dumps(values))
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist, so what was spent on its records is unknown. Put the account "
            "back. For records of which nothing was released yet, use Account.create(...)."
        ) from None
    except OSError as failure:
        raise InputError(f"{path} cannot be read ({failure.strerror or failure}).") from failure
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as failure:
        raise InputError(
            f"{path} is damaged, or not an account of dpmac, so what was spent on its records is "
            "unknown. Put the latest copy back."
        ) from failure


def read_again(path: Path, number: str, counted: tuple[TrainingEvent, ...]) -> AccountFile:
    """Return the content of a file that was read before, which may count more by now.

    Args:
        path: the file, as for :func:`read_account`.
        number: number of the account that it must be of.
        counted: events that it must count, at least.

    Raises:
        InputError: it is missing, damaged, another one, or older than it was.
    """
    now = read_account(path)
    if now.number != number:
        raise InputError(
            f"{path} is the account of other records than those it was opened for. Put its own "
            "file back."
        )
    if not covers(now.events, counted):
        raise InputError(
            f"{path} counts less than it did before: an older copy was restored, which does not "
            "know what was released since. Put the latest one back."
        )
    return now


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of an account within a context, against other processes.

    Args:
        path: file of the account, which need not exist. The lock is ``path`` with ``.lock`` at the
            end.

    Raises:
        InputError: another process holds it for longer than :data:`PATIENCE` seconds.
    """
    lock = FileLock(f"{path}.lock", timeout=PATIENCE, mode=files.PRIVATE_MODE)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f"{path} is in use by another process. Try again.") from None
    try:
        yield
    finally:
        lock.release()
