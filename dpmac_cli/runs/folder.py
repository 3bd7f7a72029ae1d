"""Folder of a run: the names of its files, and what may be replaced or removed in it.

Files are written atomically and never overwritten unintentionally. Functions whose argument is
``run`` take the path of such a folder.
"""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.bounded_yaml import ValueLoader, read_text
from dpmac_cli.config.networks import UserModel, parse_model
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.config.sources import HEADER
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.files import PART, write_atomically

#: Folder of runs without --out.
RUNS = Path("runs")
CONFIG = "config.yaml"
REPORT = "report.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
WANTED_MODEL = f"Use a run folder of dpmac train, or a {MODEL}."
CARD = "model-card.md"
AUDIT = "audit.json"
CHECKPOINTS = "checkpoint"
LOCK = ".lock"
#: Files in the folder of checkpoints: the last state, and the steps that may have begun.
STATE, LEDGER = "state.safetensors", "spent.json"
#: Public files of a run, those for readers first.
PUBLISHED = (MODEL, CARD, REPORT, METRICS, CONFIG)
#: LoRA updates of a language model, in the format of peft.
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SEALED = (*PUBLISHED, AUDIT, ADAPTER, ADAPTER_CONFIG)
#: Checksums of the public files, in the format of sha256sum.
SUMS = "SHA256SUMS"
#: Every file that dpmac writes to a run's folder. By the last one, a folder is known as a run's.
WRITTEN = (SUMS, *(name for name in SEALED if name != CONFIG), CONFIG)
#: Every file that dpmac writes to the folder of checkpoints.
SAVED = (STATE, LEDGER)
#: Pattern of what a write of one of these files leaves, by its name, when it is killed.
PARTIAL = ".{}.*" + PART

#: Exceptions raised by reading a missing or damaged JSON or YAML file.
BROKEN = (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError)


def checkpoints(run: Path) -> Path:
    """Create the folder of a run's checkpoints, if it is missing, and return its path.

    Args:
        run: folder of the run, which must exist.

    Raises:
        OSError: it cannot be created.
    """
    where = run / CHECKPOINTS
    where.mkdir(exist_ok=True)
    return where


def seal(where: Path, names: Iterable[str] = SEALED) -> None:
    """Write SHA256SUMS for those of some files that exist.

    It is written last, and removed before any of them changes: a kill in between leaves files
    without checksums, which are not those of a published run. A second call replaces it.

    Args:
        where: folder of the files.
        names: their names. Those that do not exist are left out.

    Raises:
        OSError: a file cannot be read, or the checksums not written.
    """
    lines = list[str]()
    for name in names:
        if (where / name).exists():
            with (where / name).open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{checksum}  {name}\n")
    write_atomically(where / SUMS, "".join(lines).encode())


def is_published(run: Path) -> bool:
    """Return whether a run is published, as of its last step so far.

    It has a report and checksums. Whether the checksums fit is not checked.

    Args:
        run: folder of the run; False if it does not exist.
    """
    return (run / SUMS).exists() and (run / REPORT).exists()


def unpublish(run: Path) -> None:
    """Remove the files about a run's model, before that changes.

    A report of an earlier model must never lie beside a later one. The model itself stays. Files
    that are missing are no error.

    Args:
        run: folder of the run.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in (SUMS, REPORT, CARD, AUDIT, ADAPTER, ADAPTER_CONFIG):
        (run / name).unlink(missing_ok=True)


def read_run_file(path: Path, name: str, wanted: str) -> tuple[Path, bytes]:
    """Return the path and content of a run's file.

    Args:
        path: the run's folder, or the file itself, whatever its name.
        name: name of the file, such as :data:`REPORT`.
        wanted: what to use instead, a sentence at the end of the message.

    Returns:
        The path of the file that was read, and its bytes.

    Raises:
        InputError: the file is missing or cannot be read; with the reason. For a run that has not
            written it yet, the message has the command that resumes the run.
    """
    file = path / name if path.is_dir() and path.name != name else path
    try:
        return file, file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as failure:
        message = f"{path} does not exist. {wanted}"
        if file.name == name and (file.parent / CONFIG).is_file():
            message = (
                f"The run in {file.parent} has not written its {name}: it is still training, or "
                f"was stopped before. To resume it: {resume_command(file.parent)}"
            )
        elif path.exists():
            message = f"{path} is not a run folder: it contains no {name}. {wanted}"
        raise InputError(message) from failure
    except IsADirectoryError as failure:
        raise InputError(f"{file} is a folder, not a file. {wanted}") from failure
    except OSError as failure:
        raise InputError(f"{file} cannot be read ({failure.strerror or failure}).") from failure


def _named(place: Path, names: Iterable[str]) -> list[Path]:
    """Return what has one of some names in a folder, in their order; [] behind a link or without.

    ``names`` may be patterns.
    """
    if (place.name == CHECKPOINTS and place.is_symlink()) or not place.is_dir():
        return []
    there, matches = sorted(place.iterdir()), list[Path]()
    for name in names:
        matches.extend(path for path in there if fnmatchcase(path.name, name))
    return matches


def _ours(run: Path) -> list[Path]:
    """Return what has the name of a file that dpmac writes, the folder of checkpoints first."""
    return [*_named(run / CHECKPOINTS, SAVED), *_named(run, WRITTEN)]


def partial_files(run: Path) -> list[Path]:
    """Return the files that :func:`write_atomically` left in a run's folder when it was killed.

    Args:
        run: the folder.
    """
    saved, public = map(PARTIAL.format, SAVED), map(PARTIAL.format, WRITTEN)
    return [*_named(run / CHECKPOINTS, saved), *_named(run, public)]


def remove_state(run: Path) -> None:
    """Remove the checkpoint of an older run, but not its ledger; a missing one is no error.

    If the folder of checkpoints is a link, the link is removed, and nothing behind it.

    Args:
        run: the folder.

    Raises:
        OSError: it cannot be removed.
    """
    private = run / CHECKPOINTS
    if private.is_symlink():
        private.unlink()
    (private / STATE).unlink(missing_ok=True)


def clear(run: Path, *, keep_ledger: bool = False) -> None:
    """Remove the files that dpmac wrote to a run's folder, by their names.

    Other files stay, in the folder of checkpoints too. No link is followed.

    The checkpoints go first, then the checksums, and the ledger last: a kill in between leaves
    nothing to resume, and no new file is written before all old ones are gone.

    Args:
        run: the folder.
        keep_ledger: whether the ledger stays, which a new run has already written.

    Raises:
        OSError: a file cannot be removed.
    """
    remove_state(run)
    private = run / CHECKPOINTS
    for path in _ours(run):
        if path != private / LEDGER:
            path.unlink()
    if not keep_ledger:
        (private / LEDGER).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in it
            private.rmdir()


def remove(run: Path) -> None:
    """Remove a run's folder, if there is one; of a link, the link alone.

    Args:
        run: the folder, which no process may hold.

    Raises:
        OSError: a file cannot be removed.
        InputError: files are in it that dpmac did not write. These stay, and those that dpmac wrote
            are removed.
    """
    if run.is_symlink():
        run.unlink()
    if not run.is_dir():
        return
    for part in partial_files(run):
        part.unlink()
    clear(run)
    (run / LOCK).unlink(missing_ok=True)
    if others := sorted(str(path.relative_to(run)) for path in run.rglob("*")):
        raise InputError(
            f"{run} contains files that dpmac did not write ({', '.join(others)}), so it is not "
            "removed. Move them."
        )
    run.rmdir()


def check_chosen_folder(folder: Path | None, force: bool) -> None:
    """Reject a folder for a new run: a file, a run without ``force``, or other files.

    Args:
        folder: the folder, which need not exist. What a run left that was killed before it began
            does not matter. None is accepted: :func:`make_place` makes a new one.
        force: whether a run in it is replaced. Other files are never replaced.

    Raises:
        InputError: the folder cannot be used, with what to use instead. Nothing is changed.
    """
    if folder is not None and str(folder).startswith("-"):
        raise InputError(f"{{out=}}{folder} begins like a flag of a command. Use another name.")
    if folder is not None and folder.is_symlink() and not folder.exists():
        raise InputError(
            f"{{out=}}{folder} is a link to a folder that does not exist. Make that folder, or use "
            "another one."
        )
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"{{out=}}{folder} is a file. Use a folder.")
    if folder is None or not folder.exists() or all(map(is_leftover, folder.iterdir())):
        return
    if not holds_run(folder):
        raise InputError(
            f"{{out=}}{folder} contains files that do not belong to a run. Use a new or empty "
            "folder."
        )
    if not force:
        raise InputError(
            f"{{out=}}{folder} already contains a run. Use another folder, or add {{force=True}} "
            "to replace it."
        )
    raise_errors(_in_the_way(folder))


def _in_the_way(folder: Path) -> Iterator[str]:
    """Yield why a run cannot be replaced: what is not dpmac's has the name of one of its files."""
    remedy = "dpmac did not write it, so {force} does not remove it. Move it, or use another {out}."
    private = folder / CHECKPOINTS
    if private.is_file() and not private.is_symlink():
        yield f"{private} is a file, but dpmac needs a folder of that name. {remedy}"
    for place in _ours(folder):
        if place.is_dir() and not place.is_symlink():
            yield f"{place} is a folder, but dpmac writes a file of that name. {remedy}"


def is_leftover(path: Path) -> bool:
    """Return whether a file may be left over from a run that was killed before it began.

    That is a lock, a partial file, or a folder of checkpoints with nothing else in it.

    Args:
        path: a file or folder in a run's folder.
    """
    if path.name == CHECKPOINTS and path.is_dir() and not path.is_symlink():
        return all(map(is_leftover, path.iterdir()))
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(PART))


def holds_run(folder: Path) -> bool:
    """Return whether a folder contains the settings, the ledger or the report of a run.

    The run may be unfinished or damaged, and of any version of dpmac.

    Args:
        folder: the folder; False if it does not exist.
    """
    private = folder / CHECKPOINTS
    if is_configured(folder) or ((private / LEDGER).is_file() and not private.is_symlink()):
        return True
    with contextlib.suppress(*BROKEN):
        return is_report(json.loads((folder / REPORT).read_bytes()))
    return False


def is_report(values: object) -> bool:
    """Return whether JSON values are a report of any format, by its keys.

    Args:
        values: content of a file of JSON.

    Raises:
        TypeError: it is neither an object, a list nor a text.
    """
    keys: set[object] = set(values)  # type: ignore[call-overload]
    return {"version", "events"} <= keys or {"schema_version", "privacy"} <= keys


def is_configured(folder: Path) -> bool:
    """Return whether a folder contains a config.yaml that dpmac wrote, by its first line.

    Args:
        folder: the folder; False if it does not exist.
    """
    try:
        return (folder / CONFIG).read_text(encoding="utf-8").startswith(HEADER)
    except (OSError, UnicodeDecodeError):
        return False


def config(run: Path) -> dict[str, Any]:
    """Return the contents of a run's config.yaml: values by flag, such as "batch-size".

    Nothing is validated. Names of a later version are among them.

    Args:
        run: folder of the run.

    Raises:
        BROKEN: one of :data:`BROKEN`: the file is missing or damaged.
    """
    return dict(ValueLoader(read_text(run / CONFIG)).get_single_data())


def settings(run: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml that this version has.

    Values are as in the file, by name with underscores, such as "batch_size". Nothing is validated.

    Args:
        run: folder of the run.

    Raises:
        BROKEN: one of :data:`BROKEN`: the file is missing or damaged.
    """
    named = dict[str, Any]()
    for flag, value in config(run).items():
        name = str(flag).replace("-", "_")
        if name in SETTINGS:
            named[name] = value
    return named


def check_run_folder(run: Path) -> None:
    """Reject a folder without a run: one with neither a config.yaml nor checkpoints.

    Args:
        run: the folder. Whether the run can be resumed is not checked.

    Raises:
        InputError: it contains no run, or does not exist.
    """
    if not (run / CONFIG).is_file() and not (run / CHECKPOINTS).is_dir():
        raise InputError(f"{{resume=}}{run} is not a run folder: it contains no {CONFIG}.")


def command(words: str, run: Path) -> str:
    """Return a command on a run, quoted for a shell, with its user-supplied model, if it has one.

    Args:
        words: the command and its flags, such as "train --resume".
        run: folder of the run. If its settings cannot be read, no model is named.

    >>> command("train --resume", Path("my runs/one"))
    "dpmac train --resume 'my runs/one'"
    """
    flag = ""
    with contextlib.suppress(*BROKEN, AttributeError):
        model = settings(run)["model"]
        if isinstance(parse_model(model), UserModel) and model.isprintable():
            flag = f" --model {shlex.quote(model)}"
    return f"dpmac {words} {shlex.quote(str(run))}{flag}"


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, for a message.

    >>> resume_command(Path("runs/one"))
    'dpmac train --resume runs/one'
    """
    return command("train --resume", run)


def resume_elsewhere_command(run: Path, changes: Iterable[str]) -> str:
    """Return the command that resumes a run into another folder with other settings, for a message.

    Args:
        run: folder of the run.
        changes: the settings, as flags with their values.

    >>> resume_elsewhere_command(Path("runs/one"), ["--epochs 20"])
    'dpmac train --resume runs/one --out NEW --epochs 20'
    """
    return f"{resume_command(run)} --out NEW {' '.join(changes)}"
