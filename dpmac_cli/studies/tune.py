"""Searches for the best settings, of which only the best trial is released.

The rules that :mod:`dpmac_cli.accounting.selection` rests on are kept here: settings are drawn
independently for every trial, the number K of trials is drawn once and stays secret, a covered
score decides, and nothing else is kept.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpmac_cli import files
from dpmac_cli.accounting.statements import cost_in_words
from dpmac_cli.arguments import checked
from dpmac_cli.config.plan import Plan
from dpmac_cli.errors import DivergedError, InputError, RunError
from dpmac_cli.models.dataset import Data
from dpmac_cli.progress import unheard
from dpmac_cli.release import run
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import Stop, finish, never, train_plan
from dpmac_cli.runs import folder, lock, new_folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import load
from dpmac_cli.studies.search import SearchSpace, plan_search, secret_place
from dpmac_cli.tasks.task import METRICS

#: Folder of the current trial, in the secret one.
TRIAL = "trial"


@checked(never_none=("dataset",))
def tune(
    *,
    config: Path | str | None = None,
    stop: Stop = never,
    **settings: Any,
) -> Run:
    """Search for the best settings, within the target epsilon, and publish the best trial.

    A search that is stopped leaves nothing, and costs nothing.

    Args:
        config: YAML file of settings. Arguments take precedence.
        stop: called after every step; True ends the search.
        settings: settings of a run, of which those with several values (``clip_norm=[0.1, 1]``)
            or a range (``lr="1e-4:0.1"``) are drawn for each trial; without any, the learning rate,
            within a factor of 2 of its default. ``epsilon`` is that of the whole search, ``out``
            its folder, in which the best trial becomes an ordinary run, and ``trials`` the mean of
            the secret random number of trials, by default 20, and 4 if only the rate is drawn.

    Returns:
        The best trial as an ordinary run, whose report has the cost of the whole search.

    Raises:
        InputError: lists every fault found; nothing was written.
        BudgetError: no noise meets the target epsilon.
        RunError: every trial diverged, or memory ran out.
        KeyboardInterrupt: ``stop`` returned True.
    """
    return carry_out_search(plan_search(settings, None if config is None else Path(config)), stop)


def carry_out_search(space: SearchSpace, stop: Stop = never) -> Run:
    """Carry out a search, and return its best trial.

    Nothing tells the number of trials. What a trial prints, logs or tells of its progress is
    discarded. Until the last trial has ended, there is only a secret folder elsewhere, with the
    lock. Then that is removed, and the published files are written. So all times are of the end.

    Args:
        space: the search.
        stop: called after every step; True ends the search.

    Returns:
        The best trial as an ordinary run.

    Raises:
        InputError, RunError, KeyboardInterrupt: as in :func:`tune`.
    """
    first, out = space.plans[0], space.out
    with _secret_folder(secret_place(out)) as secret:
        _check_free(out)
        device = choose_device(first.settings.device)
        data = load(first, device, space.data)
        with _silence():
            best = _best(space, secret / TRIAL, stop, data)
    _check_free(out)  # another run may have begun in it meanwhile
    new_folder.make_folder(out)
    for name, content in best.items():
        files.write_atomically(out / name, content)
    folder.seal(out)
    settings = first.settings
    return Run(_report(best), out, lambda: run.load(out, device=settings.device).released)


def _check_free(out: Path) -> None:
    """Reject a folder with files, and remove what a run that was killed has left.

    Its time would tell that of an earlier start. Raises InputError, also if it cannot be written.
    """
    content = list(out.absolute().iterdir()) if out.is_dir() else []
    if not out.is_dir() or not all(map(folder.is_leftover, content)):
        folder.check_chosen_folder(out, force=True)
        if content:
            raise InputError(f"{{out=}}{out} already contains a run. Use another folder.")
    for path in content:
        _remove_leftover(path)
    missing = [place for place in (out, *out.absolute().parents) if not place.exists()]
    new_folder.make_folder(out)
    for place in missing:  # their times would tell when the search began
        with contextlib.suppress(OSError):  # another process may use it
            place.rmdir()


def _best(
    space: SearchSpace, place: Path, stop: Callable[[], bool], data: Data
) -> dict[str, bytes]:
    """Train a secret random number of trials, and return the best.

    Each trial is removed when it has ended.

    Args:
        space: the search.
        place: folder of the current trial.
        stop: called after every step; True ends the search.
        data: the records, which are read once.

    Returns:
        The published files of the best trial, by name.

    Raises:
        RunError: every trial diverged.
        KeyboardInterrupt: ``stop`` returned True.
    """
    most = -math.inf
    best = dict[str, bytes]()
    for _ in range(space.search.trials.draw()):
        plan = space.trial()
        published = _trained(plan.placed(place), place, stop, data)
        if not published:
            continue
        score = covered_score(_report(published), plan.settings.metric)
        if not best or score > most:
            most, best = score, published
    if not best:
        cost = cost_in_words(space.epsilon, space.plans[0].settings.delta)
        raise RunError(
            "Every trial of the search diverged, so it has no model. That was learnt from the "
            f"records, too: the search cost {cost}. Search over lower learning "
            "rates."
        )
    return best


def _trained(plan: Plan, place: Path, stop: Callable[[], bool], data: Data) -> dict[str, bytes]:
    """Train one trial; return its published files by name, none if it diverged.

    Raises KeyboardInterrupt if ``stop`` returns True.
    """

    def stop_at_once() -> bool:
        # A part of a trial is never published: its epsilon is not that of a trial.
        if stop():
            raise KeyboardInterrupt
        return False

    try:
        finish(train_plan(plan, stop_at_once, data))
        published = dict[str, bytes]()
        for name in folder.SEALED:
            if (place / name).exists():
                published[name] = (place / name).read_bytes()
        return published
    except DivergedError:
        return {}
    finally:
        folder.remove(place)


def covered_score(report: Mapping[str, Any], metric: str) -> float:
    """Return the released score of a run, larger for better runs; -inf if it is not defined.

    Args:
        report: the run's report.json.
        metric: name of the metric.

    Raises:
        ValueError: the score is not covered, so the choice by it would reveal test records.
    """
    if not any(event["records"] == "test" for event in report["events"]):
        raise ValueError("a search needs a covered score")
    value = report["scores"][METRICS[metric].key]["value"]
    return -math.inf if value is None else METRICS[metric].better(float(value))


def _report(published: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the report among published files, which are by their names."""
    report: dict[str, Any] = json.loads(published[folder.REPORT])
    return report


def _remove_leftover(path: Path) -> None:
    """Remove a file, a link, or a folder with what is in it. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for inner in path.iterdir():
        _remove_leftover(inner)
    path.rmdir()


@contextlib.contextmanager
def _secret_folder(place: Path) -> Iterator[Path]:
    """Make and yield a folder that only its owner can read, lock it, and remove it at the end.

    What a killed search has left in it is removed at the start. Raises InputError if another
    process has locked it, or it cannot be made or removed.
    """
    new_folder.make_folder(place)
    place.chmod(files.PRIVATE_FOLDER)
    with lock.locked(place):
        folder.remove(place / TRIAL)
        try:
            yield place
        finally:
            folder.remove(place / TRIAL)
            folder.remove(place)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what is printed or logged, and progress."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            unheard(),
        ):
            yield
    finally:
        logging.disable(before)
