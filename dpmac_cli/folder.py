"""A run's folder: its files, whole or not there, and never overwritten by surprise."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpmac_cli.config import HEADER
from dpmac_cli.errors import InputError

CONFIG = "config.yaml"
REPORT = "report.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
CARD = "model-card.md"
DIAGNOSTICS = "diagnostics.NOT-PRIVATE.jsonl"
LOCK = ".lock"
FILES = (CONFIG, REPORT, METRICS, CARD, MODEL, DIAGNOSTICS)

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have an OSError say which file it is about: a full disk, for one, does not."""
    try:
        yield
    except OSError as failure:
        failure.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PUBLIC_MODE) -> None:
    """Write a file whole, or leave what was there. Raises OSError, naming the file."""
    with _naming(path):
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(partial, mode)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise


def to_json(value: Any) -> str:
    """JSON as people and programs read it: indented, and without NaN or Infinity."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def append_line(path: Path, record: Mapping[str, Any], mode: int = PUBLIC_MODE) -> None:
    """Append one line of JSON. Raises OSError, naming the file."""
    with _naming(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def reported_steps(run: Path) -> int:
    """The steps of the model that a run's report is about; 0 while there is no whole report."""
    try:
        return int(json.loads((run / REPORT).read_bytes())["hyperparameters"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def new_folder(root: Path, stem: str) -> Path:
    """Make the first free of root/stem-1, root/stem-2, ...

    Raises:
        InputError: the folder cannot be made.
    """
    number = 1
    while True:
        folder = root / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not root.is_dir():
                raise InputError(
                    f"{root} is a file; runs are kept in a folder of that name."
                ) from None
            number += 1
        except OSError as failure:
            raise InputError(_unwritable(folder, failure)) from failure
        else:
            return folder


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run's folder for oneself; the lock ends with the process, however that ends.

    Raises:
        InputError: another process holds it, or it cannot be written to.
    """
    try:
        handle = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
    except OSError as failure:
        raise InputError(_unwritable(run, failure)) from failure
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"The run folder {run} is in use by another dpmac process. Wait until it ends, or "
                "stop it."
            ) from None
        yield
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def set_aside(run: Path) -> None:
    """Keep what a branch published in a folder of its own, before another branch begins.

    Configuration and metrics are copied, so that a kill in between leaves the run resumable.
    """
    number = 1
    while (run / f"branch-{number}").exists():
        number += 1
    aside = run / f"branch-{number}"
    aside.mkdir()
    for name in (CONFIG, METRICS):
        if (run / name).exists():
            shutil.copy2(run / name, aside / name)
    for name in (REPORT, CARD, MODEL, DIAGNOSTICS):
        if (run / name).exists():
            os.replace(run / name, aside / name)


def check_chosen_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that a run must not be written to; changes nothing.

    Raises:
        InputError: it is a file, or holds a run and ``force`` is off, or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file. Name a folder.")
    if not folder.exists() or not any(entry.name != LOCK for entry in folder.iterdir()):
        return
    if not _holds_run(folder):
        raise InputError(
            f"--out {folder} holds files that are not a run's. Name a new or an empty folder."
        )
    if not force:
        raise InputError(
            f"--out {folder} already holds a run. Name another folder, or add --force to "
            "replace it."
        )


def _holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: other tools, too, call a file config.yaml."""
    if any((folder / name).exists() for name in (REPORT, MODEL)):
        return True
    try:
        return (folder / CONFIG).read_text(encoding="utf-8").startswith(HEADER)
    except (OSError, UnicodeDecodeError):
        return False


def check_run_folder(run: Path) -> None:
    """Refuse to go on in what is not a run's folder.

    Raises:
        InputError: it is not one.
    """
    if not (run / CONFIG).is_file():
        raise InputError(f"--resume {run} is not a run folder: it holds no {CONFIG}.")


def make_folder(run: Path) -> Path:
    """Make the folder that --out names, or take it as it is.

    Raises:
        InputError: it cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise InputError(_unwritable(run, failure)) from failure
    return run


def clear(run: Path) -> None:
    """Remove the files of a run, and no others. Raises OSError."""
    for name in FILES:
        (run / name).unlink(missing_ok=True)


def _unwritable(folder: Path, failure: OSError) -> str:
    return (
        f"The run folder {folder} cannot be written to ({failure.strerror or failure}). "
        "Name another with --out."
    )
