"""Attack on the recipe of a run: shadow runs with and without noise, and what they tell of records.

Each run trains on records that are in by a fair coin, with the network, the steps, the rate and the
noise of the attacked run. Half of the runs are shadows, whose coins an attacker knows, the others
targets. The figures depend on private records without noise: they are for whoever holds the records
alone, in one file that only its owner can read. No weights of these runs are written anywhere.

Out of scope: language models, and attacks that see more than outputs.
"""

import copy
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
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
from dpmac_cli.accounting.accountants import delta_curve, type_two_errors
from dpmac_cli.accounting.events import merged
from dpmac_cli.accounting.risk import trade_off
from dpmac_cli.config.plan import with_noise
from dpmac_cli.config.settings import DATA, GROUPS, NO_CALIBRATION
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Dataset, Split
from dpmac_cli.data.units import units_of
from dpmac_cli.errors import InputError
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.files import PART, PRIVATE_FOLDER, PRIVATE_MODE, to_json, write_atomically
from dpmac_cli.models.dataset import Data, on_device
from dpmac_cli.progress import report, unheard
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.release.audit import THINNING, Audit, as_likely
from dpmac_cli.release.membership import RATES, auc, confidences, figures, halves, scored
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.prediction import data_of
from dpmac_cli.release.report import FORMAT, Report, read_report
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import PreparedRun, prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import make_trainer
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
#: Variable of the folder of the cache, which ranges that a shadow run finds must not fill.
CACHE = "DPMAC_CACHE_DIR"


@dataclass(frozen=True)
class Attacked:
    """Result of an attack as it may be shown: no figure of it depends on records without noise.

    Attributes:
        path: the file with the figures.
        bounds: largest true positive rates that the guarantee allows, by false positive rate.
        holds: False if the guesses contradict the guarantee.
    """

    path: Path
    bounds: Mapping[float, float]
    holds: bool


@dataclass(frozen=True)
class ShadowRun:
    """A run of the recipe: which units were in, and its confidence in every record."""

    coins: NDArray[np.bool_]
    phi: NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    """Request for an attack, which is all that another process needs to train its runs.

    Attributes:
        run: folder of the attacked run.
        dataset, data_dir: where its records are; None for where it read them.
        model: FILE.py:FACTORY of a user-supplied network.
        device: see ``--device``.
    """

    run: Path
    dataset: Any = None
    data_dir: Path | str | None = None
    model: str | None = None
    device: str = "cpu"


class Recipe:
    """Recipe of a run, and the records that its shadow runs draw from: trained and tested on.

    Raises:
        InputError: the run cannot be attacked, or its records cannot be read.
    """

    def __init__(self, asked: Asked) -> None:
        self.run, self.report = asked.run, read_report(asked.run)
        _check(self.report, asked.run)
        self.device = choose_device(asked.device)
        self.released = load_model(asked.run, self.device, factory=asked.model)
        self.data = data_of(self.released, asked.dataset, asked.data_dir)
        given = {name: of for name, of in folder.settings(asked.run).items() if name not in DROPPED}
        given |= {"dataset": asked.dataset or given["dataset"], "data_dir": asked.data_dir}
        given |= {"model": asked.model or given["model"], "calibration": NO_CALIBRATION}
        [event, *_] = [e for e in self.report.events if e.trains]
        plan = resolve(with_noise(given, event), data=self.data).plan
        steps = self.report.network.steps
        self.noisy = replace(plan, event=plan.event.first(steps))
        kept = {n: of for n, of in given.items() if n in KEPT or GROUPS[n] == DATA}
        self.plain = resolve(kept, no_dp=True, data=self.data).plan
        self._pool = _pooled(self.data)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """Return the unit of each record, from 0."""
        unit = self._pool.unit
        return np.arange(len(self._pool.y)) if unit is None else units_of(unit).owners

    @property
    def members(self) -> NDArray[np.bool_]:
        """Return the units that the attacked run was trained on."""
        found = np.zeros(self.owners.max() + 1, np.bool_)
        found[self.owners[: len(self.data.train.y)]] = True
        return found

    @cached_property
    def _prepared(self) -> dict[bool, PreparedRun]:
        """Return the untrained networks with all records, with noise and without."""
        whole = replace(self.data, train=self._pool, test=None, crafted=None)
        return {
            noisy: prepare(plan, self.device, make_keys(None), whole)
            for noisy, plan in ((True, self.noisy), (False, self.plain))
        }

    def shadow_run(self, noisy: bool) -> ShadowRun:
        """Train on units that are in by a fair coin each; return its confidence in all records."""
        whole, plan = self._prepared[noisy], self.noisy if noisy else self.plain
        units = int(self.owners.max()) + 1
        coins = np.random.default_rng().random(units) < 0.5
        model, trained = copy.deepcopy((whole.model, whole.trained))
        some = np.flatnonzero(coins[self.owners])
        task = replace(
            whole, model=model, trained=trained, data=self._part(whole.data, some), uncounted=None
        )
        if (uncounted := whole.uncounted) is not None:
            assert isinstance(model, FrozenFeatures)  # noqa: S101  (a table has them)
            part = replace(uncounted, network=model, data=self._part(uncounted.data, some))
            task = replace(task, data=part.shapes, uncounted=part)
        # The rate and the noise are those of the run, and sums are divided by what is expected.
        batch = max(1, round(plan.event.sampling_rate * units / 2))
        facts = replace(plan.facts, train_size=int(coins.sum()))
        plan = replace(plan, facts=facts, settings=plan.settings.replace(batch_size=batch))
        account = Account(event=plan.event, ranges=plan.ranges, delta=plan.settings.delta)
        trainer = make_trainer(plan, task, make_keys(None), account)
        with _own_cache(uncounted is not None):
            for _ in range(plan.event.steps):
                trainer.take()
        with trainer.published() as part_of_model:
            if uncounted is None:
                return ShadowRun(coins, self._confidences(part_of_model, whole.data))
            known = uncounted.data.predicting(trainer.data.task)
            return ShadowRun(coins, self._confidences(model, known))

    def attacked_run(self) -> NDArray[np.float64]:
        """Return the confidence of the attacked run itself in all records."""
        data = on_device(replace(self.data, train=self._pool, test=None), self.device)
        header = self.released.facts
        data = data.scaled_as(header.data.records).predicting(header.task)
        return self._confidences(self.released.model, data)

    def _part(self, data: Data, rows: NDArray[np.int64]) -> Data:
        """Return some of the records, with their units, as training records."""
        part = data.train.taken(rows)
        if self._pool.unit is not None:
            part = replace(part, units=units_of(self.owners[rows]))
        return replace(data, train=part, test=None)

    def _confidences(self, model: nn.Module, data: Data) -> NDArray[np.float64]:
        """Return the confidence of a network in the targets of all records, shape (records,)."""
        found = [on_cpu(logits) for _, logits in outputs_of(model, data, data.train)]
        outputs = torch.cat(found).double().numpy()
        return confidences(data.task, outputs, data.train.labels.cpu().numpy())


def attack(asked: Asked, runs: int = 32, jobs: int = 1) -> Attacked:
    """Attack the recipe of a run, and write the figures to attack.json.

    It is in a folder beside the run's, which only its owner can read: whoever publishes the run's
    folder does not publish it. An attack that was stopped continues with the runs that it has.

    Args:
        asked: the run, and where its records are.
        runs: number of shadow and target runs together, with noise, and again without.
        jobs: number of processes.

    Raises:
        InputError: the run cannot be attacked, or its records cannot be read.
    """
    recipe, where = Recipe(asked), folder_of(asked.run)
    seal = hashlib.sha256((asked.run / folder.REPORT).read_bytes()).hexdigest()
    where.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    with folder.locked(where):
        wanted = [(noisy, number) for noisy in (True, False) for number in range(runs)]
        kept = dict(_kept(where, seal))
        found = {name: kept[name] for name in wanted if name in kept}
        missing = [name for name in wanted if name not in found]
        for name, of in _trained(recipe, asked, missing, jobs):
            found[name] = of
            _keep(where, seal, name, of)
            report(len(found), len(wanted), where, "runs")
        noisy, plain = ([found[which, n] for n in range(runs)] for which in (True, False))
        result, contents = _judged(recipe, noisy, plain)
        contents = {"version": FORMAT, "report_sha256": seal, **contents}
        write_atomically(result.path, to_json(contents).encode(), PRIVATE_MODE)
        for part in where.glob(LEFT):
            part.unlink()
    return result


def folder_of(run: Path) -> Path:
    """Return the folder of the attack on a run, beside the run's."""
    return run.absolute().with_name(f"{run.absolute().name}-attack")


def _trained(
    recipe: Recipe, asked: Asked, missing: Sequence[tuple[bool, int]], jobs: int
) -> Iterator[tuple[tuple[bool, int], ShadowRun]]:
    """Yield the runs that are missing, in this process or in several."""
    if jobs <= 1:
        for name in missing:
            with unheard():
                done = recipe.shadow_run(name[0])
            yield name, done
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (asked,)) as pool:
        waiting = {pool.submit(_in_process, noisy): (noisy, n) for noisy, n in missing}
        for ended in as_completed(waiting):
            yield waiting[ended], ended.result()


#: The recipe of a process that trains shadow runs for another one.
_RECIPE = list[Recipe]()


def _begin(asked: Asked) -> None:
    torch.set_num_threads(1)
    _RECIPE[:] = [Recipe(asked)]


def _in_process(noisy: bool) -> ShadowRun:
    return _RECIPE[0].shadow_run(noisy)


def _judged(
    recipe: Recipe, noisy: Sequence[ShadowRun], plain: Sequence[ShadowRun]
) -> tuple[Attacked, dict[str, Any]]:
    """Return the result, and the contents of attack.json."""
    run, known = recipe.run, recipe.report
    events = tuple(event for event in known.events if event.trains)
    bounds = dict(zip(RATES, (1 - trade_off(events, RATES)).tolist(), strict=True))
    shadows, targets = map(_stacked, halves(noisy))
    task, owners = recipe.noisy.facts.task, recipe.owners
    of_noisy = scored(task, targets.phi, shadows.phi, shadows.coins, owners)
    guessed = Audit(
        claimed=known.epsilon,
        delta=recipe.noisy.settings.delta,
        guesses=min(GUESSES, targets.coins.size),
        scores=tuple(of_noisy[TESTED].ravel().tolist()),
        coins=tuple(targets.coins.ravel().tolist()),
        events=events,
    )
    curve = type_two_errors(delta_curve(merged(events)), THINNING)
    holds = as_likely(curve, len(guessed.coins), guessed.guesses, guessed.right)
    plain_shadows, plain_targets = map(_stacked, halves(plain))
    of_plain = scored(task, plain_targets.phi, plain_shadows.phi, plain_shadows.coins, owners)
    itself = scored(task, recipe.attacked_run()[None], shadows.phi, shadows.coins, owners)
    members = recipe.members
    contents = {
        "runs": len(noisy),
        "shadow_runs": len(shadows.phi),
        "units": len(members),
        "bounds": [
            {"false_positive_rate": rate, "true_positive_rate": most}
            for rate, most in bounds.items()
        ],
        "private": {name: figures(of, targets.coins) for name, of in of_noisy.items()},
        "no_dp": {name: figures(of, plain_targets.coins) for name, of in of_plain.items()},
        "guesses": guessed.guesses,
        "right": guessed.right,
        "holds": holds,
        "of_the_run_itself": {
            name: None if members.all() else auc(of[0], members) for name, of in itself.items()
        },
    }
    return Attacked(folder_of(run) / FIGURES, bounds, holds), contents


def _stacked(runs: Sequence[ShadowRun]) -> ShadowRun:
    """Return several runs as one with a row for each."""
    return ShadowRun(np.stack([of.coins for of in runs]), np.stack([of.phi for of in runs]))


#: File of the figures, and those of runs that are done while an attack is not.
FIGURES, LEFT = "attack.json", f"*.run{PART}"


def _keep(where: Path, seal: str, name: tuple[bool, int], run: ShadowRun) -> None:
    """Write a run that is done to a file that only its owner can read."""
    noisy, number = name
    content = safetensors.numpy.save(
        {"coins": run.coins, "phi": run.phi},
        {"report": seal, "noisy": str(int(noisy)), "number": str(number)},
    )
    file = where / f"{int(noisy)}-{number}.run{PART}"
    write_atomically(file, content, PRIVATE_MODE)


def _kept(where: Path, seal: str) -> Iterator[tuple[tuple[bool, int], ShadowRun]]:
    """Yield the runs of an attack on this run that was stopped; damaged files are left out."""
    for file in where.glob(LEFT):
        with suppress(OSError, ValueError, KeyError, safetensors.SafetensorError):
            with safetensors.safe_open(file, "numpy") as opened:
                header = opened.metadata() or {}
                values = {key: opened.get_tensor(key) for key in ("coins", "phi")}
            if header["report"] == seal:
                yield (header["noisy"] == "1", int(header["number"])), ShadowRun(**values)


@contextmanager
def _own_cache(needed: bool) -> Iterator[None]:
    """Keep features that depend on ranges of one run in a folder that is deleted after it."""
    if not needed:
        yield
        return
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as place:
        os.environ[CACHE] = place
        try:
            yield
        finally:
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before


def _pooled(data: Dataset) -> Split:
    """Return training and test records, in this order."""
    train, test = data.train, data.test
    if test is None:
        return train
    values = [of.x.read() if isinstance(of.x, Rows) else of.x for of in (train, test)]
    unit = None
    if train.unit is not None and test.unit is not None:
        unit = np.concatenate([train.unit, test.unit])
    return Split(np.concatenate(values), np.concatenate([train.y, test.y]), unit)


def _check(known: Report, run: Path) -> None:
    """Raise InputError if a run has no guarantee of its own that an attack can be compared with."""
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
