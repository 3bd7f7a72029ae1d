"""Folders of runs are created, where they can be written to."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from dpmac_cli.config.plan import Plan
from dpmac_cli.errors import InputError
from dpmac_cli.runs.folder import RUNS


def make_place(plan: Plan) -> Path:
    """Create the folder of a run, and return its path.

    That is the chosen one, which may exist, or the first free one in :data:`.RUNS`.

    Args:
        plan: plan of the run, whose folder was checked by :func:`.check_chosen_folder`.

    Raises:
        InputError: it cannot be created.
    """
    out = plan.settings.out
    return new_folder(RUNS, plan.stem) if out is None else make_folder(out)


def new_folder(root: Path, stem: str) -> Path:
    """Create the first free folder of root/stem-1, root/stem-2, ..., and return its path.

    Two processes that do this at once get different folders.

    Args:
        root: folder of all runs, which is created if it is missing.
        stem: beginning of the name.

    Raises:
        InputError: ``root`` is a file, or cannot be written to.
    """
    if os.path.lexists(root) and not root.is_dir():
        raise InputError(f"{root} is a file, but dpmac needs a folder of that name for runs.")
    with writable(root):
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                (root / f"{stem}-{number}").mkdir()
                break
    return root / f"{stem}-{number}"


def make_folder(run: Path) -> Path:
    """Create a folder and those above it if they are missing, and return its path.

    Args:
        run: the folder.

    Raises:
        InputError: it cannot be created, or is a file.
    """
    with writable(run):
        run.mkdir(parents=True, exist_ok=True)
    return run


@contextlib.contextmanager
def writable(run: Path) -> Iterator[None]:
    """Convert an OSError within a context to an InputError about a run's folder.

    Args:
        run: the folder.
    """
    try:
        yield
    except OSError as failure:
        raise InputError(
            f"The run folder {run} cannot be written to ({failure.strerror or failure}). "
            "Make it writable, or use another {out}."
        ) from failure
