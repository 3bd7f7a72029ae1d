"""Attack on the recipe of a run: shadow runs with and without noise, and what they tell of records.

Each run trains on records that are in by a fair coin, with the network, the steps, the rate and the
noise of the attacked run. Half of the runs are shadows, whose coins an attacker knows, the others
targets. The figures depend on private records without noise: they are for whoever holds the records
alone, in one file that only its owner can read. No weights of these runs are written anywhere.

Out of scope: language models, and attacks that see more than outputs.
"""

import copy
import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import nn

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.risk import trade_off
from dpmac_cli.accounting.selection import Done
from dpmac_cli.config.plan import Plan, with_noise
from dpmac_cli.config.settings import DATA, GROUPS, NO_CALIBRATION
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Dataset, Split
from dpmac_cli.data.units import units_of
from dpmac_cli.errors import InputError
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.files import PART, PRIVATE_FOLDER, PRIVATE_MODE, to_json, write_atomically
from dpmac_cli.models.dataset import Data, on_device
from dpmac_cli.models.dataset import Split as Records
from dpmac_cli.progress import report, unheard
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release.audit import Guesses, contradicts
from dpmac_cli.release.facts import FORMAT
from dpmac_cli.release.membership import RATES, auc, confidences, figures, halves, scored
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.report import Report, read_report
from dpmac_cli.release.scoring import data_of
from dpmac_cli.runs import folder, lock
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.training.evaluation import on_cpu, outputs_of

#: Number of guesses of the test that can fail, fixed before any run: half are in, half out.
GUESSES = 100
#: The attack whose guesses are tested.
TESTED = "rmia"
#: Settings of a run without noise that are those of the attacked run, besides those of its data.
KEPT = (
    *("dataset", "model", "features", "backbone", "backbone_size", "backbone_flips", "pretrained"),
    *("train", "lora_rank", "loss", "fix_norm", "isolate", "class_weights", "shares"),
)
#: Settings of the attacked run that its shadow runs do not have.
DROPPED = ("out", "force", "threshold", "max_epsilon", "cover_scores", "metric", "seed")
#: File of the figures, and those of runs that are done while an attack is not.
FIGURES, LEFT = "attack.json", f"*.run{PART}"
#: Whether a run of an attack has noise, and its number.
Name = tuple[bool, int]


@dataclass(frozen=True)
class Attacked:
    """Result of an attack as it may be shown: no figure of it depends on records without noise.

    Attributes:
        path: the file attack.json with all figures, which is for whoever holds the records.
        bounds: largest true positive rates that the guarantee of the run allows, by false positive
            rate, both from 0 to 1. That of the steps alone, which the attack repeats, is lower.
        holds: False if the guesses contradict the guarantee, at 95% confidence.
    """

    path: Path
    bounds: Mapping[float, float]
    holds: bool


@dataclass(frozen=True)
class ShadowRun:
    """A run of the recipe, or several of them with a row for each.

    Attributes:
        coins: which units were in, shape (units,), or (runs, units).
        phi: its confidence in the target of every record, shape (records,), or (runs, records).
            See :func:`~dpmac_cli.release.membership.confidences`.
    """

    coins: NDArray[np.bool_]
    phi: NDArray[np.float64]


class Recipe:
    """Recipe of a run, and the records that its shadow runs draw from: trained and tested on.

    Records are numbered from 0, those of the training first, then those of the test. Units are
    records, unless the run has a unit of privacy.

    Args:
        run: folder of the run to attack.
        dataset: name, path or records in memory; None for where the run read them.
        data_dir: folder of datasets; None for where the run read them.
        model: FILE.py:FACTORY of a user-supplied network; None for a built-in one, or for the
            factory in the settings of the run.
        device: see ``--device``.

    Attributes:
        run: folder of the attacked run.
        report: its report.
        data: its records, as they were split.
        noisy: plan of a run on all of them with the noise, the rate and the steps of the run.
        plain: plan of a run without noise, by the defaults of such runs.

    Raises:
        InputError: the run cannot be attacked, or its records cannot be read.
    """

    def __init__(
        self,
        run: Path,
        dataset: Any = None,
        data_dir: Path | str | None = None,
        model: str | None = None,
        device: str = "cpu",
    ) -> None:
        self.run, self.report = run, read_report(run)
        _check(self.report, run)
        self.device = choose_device(device)
        self.released = load_model(run, self.device, factory=model)
        self.data = data_of(self.released, dataset, data_dir)
        settings = folder.settings(run)
        for name in DROPPED:
            settings.pop(name, None)
        settings |= {"dataset": dataset or settings["dataset"], "data_dir": data_dir}
        settings |= {"model": model or settings["model"], "calibration": NO_CALIBRATION}
        event = self.report.training[0]
        plan = resolve(with_noise(settings, event), data=self.data).plan
        self.noisy = replace(plan, event=plan.event.first(self.report.network.steps))
        same = dict[str, Any]()
        for name, value in settings.items():
            if name in KEPT or GROUPS[name] == DATA:
                same[name] = value
        self.plain = resolve(same, no_dp=True, data=self.data).plan
        self._pool = _pooled(self.data)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """Return the number of the unit of each record, from 0, shape (records,)."""
        unit = self._pool.unit
        return np.arange(len(self._pool.y)) if unit is None else units_of(unit).owners

    @property
    def members(self) -> NDArray[np.bool_]:
        """Return which units the attacked run was trained on, shape (units,)."""
        trained = np.zeros(self.owners.max() + 1, np.bool_)
        trained[self.owners[: len(self.data.train.y)]] = True
        return trained

    @cached_property
    def _prepared(self) -> dict[bool, PreparedRun]:
        """Return the untrained networks with all records, with noise and without."""
        everything = replace(self.data, train=self._pool, test=None, crafted=None)
        noisy = prepare(self.noisy, self.device, make_keys(None), everything)
        plain = prepare(self.plain, self.device, make_keys(None), everything)
        return {True: noisy, False: plain}

    def shadow_run(self, noisy: bool) -> ShadowRun:
        """Train on units that are in by a fair coin each; return its confidence in all records.

        The coins are new in each call, from the operating system.

        Args:
            noisy: True for a run with the noise, the rate and the steps of the attacked one; False
                for one without noise, by the defaults of such runs.
        """
        plan = self.noisy if noisy else self.plain
        prepared = self._prepared[noisy]
        coins = np.random.default_rng().random(len(self.members)) < 0.5
        with tempfile.TemporaryDirectory() as cache:
            task = self._task(prepared, np.flatnonzero(coins[self.owners]), Path(cache))
            trainer = _trainer(plan, task, coins)
            for _ in range(plan.event.steps):
                trainer.take()
            with trainer.published() as trained:
                return ShadowRun(coins, _confidences(trained, trainer.data, trainer.data.tested))

    def scored(self, phi: NDArray[np.float64], shadows: ShadowRun) -> dict[str, Any]:
        """Return the scores of units by each attack, shape (runs, units), by the attack's name.

        Args:
            phi: confidences of target runs in the records, shape (runs, records).
            shadows: shadow runs, with a row for each.
        """
        task = self.noisy.facts.task
        return scored(task, phi, shadows.phi, shadows.coins, self.owners)

    def attacked_run(self) -> NDArray[np.float64]:
        """Return the confidence of the attacked run itself in all records, shape (records,).

        Its published network is used, as anyone who downloads the model could.
        """
        data = on_device(replace(self.data, train=self._pool, test=None), self.device)
        header = self.released.facts
        data = data.scaled_as(header.data.records).predicting(header.task)
        return _confidences(self.released.model, data, data.train)

    def _task(self, prepared: PreparedRun, rows: NDArray[np.int64], cache: Path) -> PreparedRun:
        """Return a copy of an untrained network with records: some to train on, all to test on.

        Features that follow from ranges of these records are kept in ``cache``.
        """
        model, trained = copy.deepcopy((prepared.model, prepared.trained))
        if prepared.uncounted is None:
            data = self._part(prepared.data, rows)
            return replace(prepared, model=model, trained=trained, data=data)
        assert isinstance(model, FrozenFeatures)  # noqa: S101  (a table has them)
        data = self._part(prepared.uncounted.data, rows)
        uncounted = replace(prepared.uncounted, network=model, data=data, cache=cache)
        return replace(
            prepared, model=model, trained=trained, data=uncounted.shapes, uncounted=uncounted
        )

    def _part(self, data: Data, rows: NDArray[np.int64]) -> Data:
        """Return data with some of its training records, by their units, and all to test on."""
        part = data.train.taken(rows)
        if self._pool.unit is not None:
            part = replace(part, units=units_of(self.owners[rows]))
        return replace(data, train=part, test=data.train)


def _confidences(model: nn.Module, data: Data, records: Records) -> NDArray[np.float64]:
    """Return the confidence of a network in the targets of a split, shape (records,).

    Args:
        model: the network.
        data: what the records are part of; it has the task.
        records: the split.
    """
    batches = [on_cpu(logits) for _, logits in outputs_of(model, data, records)]
    outputs = torch.cat(batches).double().numpy()
    learned = data.task.limited(records.labels.cpu().numpy())
    return confidences(data.task, outputs, learned)


def _trainer(plan: Plan, task: PreparedRun, coins: NDArray[np.bool_]) -> Trainer:
    """Return the trainer of a shadow run on the units that are in.

    The rate and the noise are those of the plan, and sums are divided by what is expected.
    """
    batch = max(1, round(plan.event.sampling_rate * len(coins) / 2))
    facts = replace(plan.facts, train_size=int(coins.sum()))
    plan = replace(plan, facts=facts, settings=plan.settings.replace(batch_size=batch))
    account = Account(event=plan.event, ranges=plan.ranges, delta=plan.settings.delta)
    return make_trainer(plan, task, make_keys(None), account)


def attack(read: Callable[[], Recipe], runs: int = 32, jobs: int = 1) -> Attacked:
    """Attack the recipe of a run, and write the figures to attack.json.

    It is in a folder beside the run's, which only its owner can read: whoever publishes the run's
    folder does not publish it. Each shadow run is written there as it ends, so an attack that was
    stopped continues with the runs that it has when it is called again.

        attack(partial(Recipe, Path("runs/scans")), runs=64)

    Args:
        read: returns the recipe of the run; all that another process needs to train its runs.
        runs: number of shadow and target runs together, with noise, and again without. The first
            half are shadow runs.
        jobs: number of processes that train them.

    Raises:
        InputError: the run cannot be attacked, or its records cannot be read.
    """
    recipe = read()
    where = folder_of(recipe.run)
    seal = hashlib.sha256((recipe.run / folder.REPORT).read_bytes()).hexdigest()
    where.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    with lock.locked(where):
        done = dict[Name, ShadowRun]()
        missing = list[Name]()
        for name in itertools.product((True, False), range(runs)):
            earlier = _read(_file(where, seal, name))
            if earlier is None:
                missing.append(name)
            else:
                done[name] = earlier
        for name, run in _trained(recipe, read, missing, jobs):
            done[name] = run
            content = safetensors.numpy.save({"coins": run.coins, "phi": run.phi})
            write_atomically(_file(where, seal, name), content, PRIVATE_MODE)
            report(len(done), 2 * runs, where, "runs")
        noisy = list[ShadowRun]()
        plain = list[ShadowRun]()
        for number in range(runs):
            noisy.append(done[True, number])
            plain.append(done[False, number])
        result, contents = _judged(recipe, noisy, plain)
        contents = {"version": FORMAT, "report_sha256": seal, **contents}
        write_atomically(result.path, to_json(contents).encode(), PRIVATE_MODE)
        for part in where.glob(LEFT):
            part.unlink()
    return result


def folder_of(run: Path) -> Path:
    """Return the folder of the attack on a run, beside the run's: ``runs/a-attack`` of ``runs/a``.

    It is apart because its figures are for whoever holds the records, and a run is published.

    Args:
        run: folder of the run, which need not exist.
    """
    return run.absolute().with_name(f"{run.absolute().name}-attack")


def _file(where: Path, seal: str, name: Name) -> Path:
    """Return the file of a run of an attack that is not done.

    Args:
        where: folder of the attack.
        seal: SHA-256 of the report of the attacked run, so that no run of another model is used.
        name: the run.
    """
    noisy, number = name
    model = seal[:32]
    return where / f"{model}-{int(noisy)}-{number}{LEFT[1:]}"


def _read(file: Path) -> ShadowRun | None:
    """Return a run of an attack that was stopped; None if it is missing or damaged."""
    try:
        return ShadowRun(**safetensors.numpy.load(file.read_bytes()))
    except (OSError, ValueError, TypeError, safetensors.SafetensorError):
        return None


def _trained(
    recipe: Recipe, read: Callable[[], Recipe], missing: Sequence[Name], jobs: int
) -> Iterator[tuple[Name, ShadowRun]]:
    """Yield the runs that are missing, each with its name, as soon as it is done.

    Args:
        recipe: the recipe, for runs in this process.
        read: returns the recipe in other processes.
        missing: names of the runs: with noise or not, and a number.
        jobs: number of processes; 1 for this one alone.
    """
    if jobs <= 1:
        for name in missing:
            with unheard():
                done = recipe.shadow_run(name[0])
            yield name, done
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (read,)) as pool:
        waiting = dict[Future[ShadowRun], Name]()
        for name in missing:
            waiting[pool.submit(_in_process, name[0])] = name
        for ended in as_completed(waiting):
            yield waiting[ended], ended.result()


#: The recipe of a process that trains shadow runs for another one.
_RECIPE = list[Recipe]()


def _begin(read: Callable[[], Recipe]) -> None:
    torch.set_num_threads(1)
    _RECIPE[:] = [read()]


def _in_process(noisy: bool) -> ShadowRun:
    return _RECIPE[0].shadow_run(noisy)


def _judged(
    recipe: Recipe, noisy: Sequence[ShadowRun], plain: Sequence[ShadowRun]
) -> tuple[Attacked, dict[str, Any]]:
    """Return the result, and the contents of attack.json.

    Args:
        recipe: the attacked recipe.
        noisy, plain: runs of it with noise and without, of which the first half are shadows.
    """
    events = recipe.report.training
    bounds_of_steps = list[Any]()
    for rate, most in _most_found(events).items():
        bounds_of_steps.append({"false_positive_rate": rate, "true_positive_rate": most})
    shadows, targets = map(_stacked, halves(noisy))
    scores = recipe.scored(targets.phi, shadows)
    plain_shadows, plain_targets = map(_stacked, halves(plain))
    plain_scores = recipe.scored(plain_targets.phi, plain_shadows)
    guessed = Guesses(
        guesses=min(GUESSES, targets.coins.size),
        scores=tuple(scores[TESTED].ravel().tolist()),
        coins=tuple(targets.coins.ravel().tolist()),
    )
    holds = not contradicts(events, targets.coins.size, guessed.guesses, guessed.right)
    contents = {
        "runs": len(noisy),
        "shadow_runs": len(shadows.phi),
        "units": len(recipe.members),
        "bounds": bounds_of_steps,
        "private": {name: figures(of, targets.coins) for name, of in scores.items()},
        "no_dp": {name: figures(of, plain_targets.coins) for name, of in plain_scores.items()},
        "guesses": guessed.guesses,
        "right": guessed.right,
        "holds": holds,
        "of_the_run_itself": _on_itself(recipe, shadows),
    }
    bounds = _most_found(recipe.report.done)
    return Attacked(folder_of(recipe.run) / FIGURES, bounds, holds), contents


def _most_found(done: Done) -> dict[float, float]:
    """Return the largest true positive rates that events allow, by false positive rate."""
    most = (1 - trade_off(done, RATES)).tolist()
    return dict(zip(RATES, most, strict=True))


def _on_itself(recipe: Recipe, shadows: ShadowRun) -> dict[str, float | None]:
    """Return the AUC of each attack on the attacked run; None if nothing was out."""
    members = recipe.members
    scores = recipe.scored(recipe.attacked_run()[None], shadows)
    if members.all():
        return dict.fromkeys(scores)
    return {name: auc(of[0], members) for name, of in scores.items()}


def _stacked(runs: Sequence[ShadowRun]) -> ShadowRun:
    """Return several runs as one with a row for each: coins (runs, units), phi (runs, records)."""
    coins = list[NDArray[np.bool_]]()
    phi = list[NDArray[np.float64]]()
    for run in runs:
        coins.append(run.coins)
        phi.append(run.phi)
    return ShadowRun(np.stack(coins), np.stack(phi))


def _pooled(data: Dataset) -> Split:
    """Return training and test records as one split, in this order.

    It has units only if both have them.
    """
    train, test = data.train, data.test
    if test is None:
        return train
    values = list[NDArray[Any]]()
    for split in (train, test):
        values.append(split.x.read() if isinstance(split.x, Rows) else split.x)
    unit = None
    if train.unit is not None and test.unit is not None:
        unit = np.concatenate([train.unit, test.unit])
    return Split(np.concatenate(values), np.concatenate([train.y, test.y]), unit)


def _check(known: Report, run: Path) -> None:
    """Raise InputError if a run has no guarantee of its own that an attack can be compared with.

    Such are runs without privacy, audit runs, results of a search and language models.
    """
    why = ""
    if not known.private:
        why = "has no guarantee"
    elif known.settings.canaries:
        why = "is an audit run: dpmac eval --audit"
    elif known.search is not None:
        why = "is the result of a search, whose guarantee is not that of one run"
    elif known.task.network is not None:
        why = "is a language model"
    if why:
        raise InputError(f"{run} {why}. {{attack}} is for a run with {{epsilon}} or {{sigma}}.")
