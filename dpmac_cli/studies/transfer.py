"""Carry out a search on public records, and train once on private ones with its best settings.

The trials are ordinary runs on public records. They never load the private ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.config.dimensions import Setting
from dpmac_cli.config.plan import ChosenFolder, DataPlan, TrainPlan
from dpmac_cli.config.transfer import Transfer
from dpmac_cli.config.yaml_file import to_yaml
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.errors import DivergedError, RunError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent, train
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.storage import files
from dpmac_cli.studies.public_records import check_public
from dpmac_cli.tasks.known import METRICS


@dataclass(frozen=True)
class Tried:
    """A trial on public records has ended.

    Attributes:
        number, trials: its number, from 1, and that of all trials.
        score: its test score, larger for better settings; minus infinity if it diverged.
        best: settings of the best trial so far.
    """

    number: int
    trials: int
    score: float
    best: Setting


def folder_of_trials(out: Path) -> Path:
    """Return the folder of the runs on public records, beside that of the final run."""
    return out.with_name(f"{out.name}-public")


def carry_out_transfer(
    plan: Transfer, out: Path, stop: Callable[[], bool] = lambda: False
) -> Iterator[Tried | RunEvent]:
    """Search on public records, and train on private ones with the best settings.

    The same call resumes the search. The final run, in ``out``, is an ordinary one.

    Raises:
        InputError: a folder contains something else, or the public records are the private ones.
        KeyboardInterrupt: ``stop`` returned True while searching.
        RunError: every trial diverged, or memory ran out.
    """
    tried = None
    for tried in search_on_public(plan, out, stop):
        yield tried
    assert tried is not None  # noqa: S101  (there are at least two)
    yield from train(plan.final(tried.best).placed(ChosenFolder(out)), stop)


def search_on_public(
    plan: Transfer, out: Path, stop: Callable[[], bool] = lambda: False
) -> Iterator[Tried]:
    """Carry out the search of :func:`carry_out_transfer`; the last event has the best settings."""
    folder.check_chosen_folder(out, force=False)
    public, settings = _loaded_public(plan), plan.settings()
    best, most = settings[0], -math.inf
    for number, setting in enumerate(settings, 1):
        trial, where = plan.trial(setting), folder_of_trials(out) / str(number)
        score = _known(trial, where)
        if score is None:
            score = _trained(trial, where, public, stop)
        if score > most:
            best, most = setting, score
        yield Tried(number, len(settings), score, best)
    if most == -math.inf:
        raise RunError("Every trial of the search diverged. Search over lower learning rates.")


def _loaded_public(plan: Transfer) -> Data:
    """Return the public records. Raises InputError if they are the private ones."""
    device = choose_device(plan.trial(plan.settings()[0]).run.device)

    def loaded(data: DataPlan) -> Data:
        return load_data(data.source, data.folder, device, facts=data.facts)

    public, harm = loaded(plan.public), "a search on it costs privacy"
    check_public(f"--on {plan.public.dataset}", public, loaded(plan.data), harm)
    return public


def _known(trial: TrainPlan, where: Path) -> float | None:
    """Return the score of a trial that an earlier call has finished; None if there is none."""
    done = folder.reported_steps(where) >= trial.privacy.steps
    if done and (where / folder.CONFIG).read_text(encoding="utf-8") == to_yaml(trial.recorded):
        return last_score(where, trial.run.metric)
    return None


def _trained(trial: TrainPlan, where: Path, data: Data, stop: Callable[[], bool]) -> float:
    """Train a trial from scratch, and return its score. Raises KeyboardInterrupt if stopped."""
    try:
        for event in train(trial.placed(ChosenFolder(where, force=True)), stop, data):
            if isinstance(event, Finished) and event.state == "interrupted":
                raise KeyboardInterrupt
    except DivergedError:
        return -math.inf
    return last_score(where, trial.run.metric)


def last_score(run: Path, metric: str) -> float:
    """Return the last score of a run, which is larger for better runs."""
    value = files.read_lines(run / folder.METRICS)[-1].get(METRICS[metric].logged)
    return -math.inf if value is None else METRICS[metric].better(float(value))
