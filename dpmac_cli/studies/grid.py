"""Grid of a study: settings with several values become cells and runs. Imports no torch."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dpmac_cli.config.fields import Choice, Flag, Option, Several, flag_name, options
from dpmac_cli.config.flags import Flags, near
from dpmac_cli.config.named import PAPER
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import OPTIMIZER, SETTINGS
from dpmac_cli.config.sources import (
    by_flag,
    is_setting,
)
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.studies.values import faults_of_values, read_values

#: Group of the flags of a study in the help.
STUDY = "Study"
#: Settings that do not distinguish runs, by the names of their flags.
ASIDE = ("recipe", "secure", "device", "metric")
MOST_SEEDS, MOST_RUNS = 1000, 10_000
DEFAULT_SEEDS = "3"
#: Settings that a comparison does not have: those of one run.
NOT_STUDIED = (
    *("optimizer", "max_epsilon", "secure", "canaries", "cover_scores", "score_every"),
    *("seed", "out", "force", "json", "quiet", "debug"),
)
#: Settings of a study besides the optimizers.
STUDIED: Mapping[str, Option] = {
    name: option for name, option in SETTINGS.items() if name not in NOT_STUDIED
}
#: Settings with one value in a study, and why.
_SPLIT = "some records would be trained on in one run and tested on, without noise, in another"
_OTHER = "For another value, compare again with another --out"
ONE_VALUE: Mapping[str, str] = {
    "recipe": f"optimizers are compared within one recipe. {_OTHER}",
    "metric": "compare again to rank the same runs by another",
    "dataset": f"the epsilon of a study is for runs on the same records. {_OTHER}",
    "schema": f"another schema may split the records differently: {_SPLIT}. {_OTHER}",
    "unit": f"epsilons of different units protect different things and do not add up. {_OTHER}",
    "test_fraction": f"{_SPLIT}. {_OTHER}",
    "split_seed": f"{_SPLIT}. {_OTHER}",
}


class StudyFlags(Flags, frozen=True):
    """Flags of a study instead of those of a single run. Their values are validated here."""

    optimizers: Annotated[
        Several[str] | None,
        Choice(("paper", "all", *OPTIMIZERS)),
        Flag(STUDY, otherwise="paper"),
    ] = None
    """Optimizers to compare, paper for those of the paper, or all."""
    seeds: Annotated[
        str | None,
        Flag(STUDY, otherwise=DEFAULT_SEEDS, metavar="N,..."),
    ] = None
    """Number of seeds (5), or a list of seeds (3,7,8; a single seed: 3,)."""


#: Settings that a file or a program may give a study. ``optimizer`` is as in a run's file.
KNOWN: Mapping[str, Option] = {
    **STUDIED,
    "optimizer": SETTINGS["optimizer"],
    **options(StudyFlags),
}

#: Labels that distinguish a row: names of flags and their values.
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """One training run of a study.

    Attributes:
        plan: all its settings.
        folder: folder of the run.
        labels: settings that distinguish its row, by the names of their flags.
        column: its value of the study's column setting.
    """

    plan: TrainPlan
    folder: Path
    seed: int
    labels: Labels
    column: float

    def on(self, device: str) -> "Run":
        """Return the same run on another device."""
        return replace(self, plan=self.plan.on(device))


@dataclass(frozen=True)
class Grid:
    """A validated study.

    Attributes:
        runs: all runs, grouped by cell.
        axes: settings that distinguish rows, by the names of their flags.
        column: "sigma", or "epsilon" if the noise of each column meets a budget.
        seeds: seeds of every cell.
        notes: messages for the user.
    """

    runs: tuple[Run, ...]
    axes: tuple[str, ...]
    column: str
    seeds: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def plan(self) -> TrainPlan:
        """Return the settings of the first run; dataset and delta are the same for all runs."""
        return self.runs[0].plan


def row_name(labels: Labels) -> str:
    """Return the name of a row, such as "dp-macadam kappa paper"."""
    return " ".join(v if name == "optimizer" else f"{name} {v}" for name, v in labels if v)


def plan(flags: Mapping[str, Any], file: Path | str | None, root: Path | str = "runs") -> Grid:
    """Build a grid from flags and a YAML file with lists of values. Flags take precedence.

    Args:
        flags: field name -> comma-separated text, or None; with ``optimizers`` and ``seeds``.
        file: YAML file with flag names as keys, and values or lists of values.
        root: folder of all runs.

    Raises:
        InputError: lists every fault found.
    """
    errors: list[str] = []
    given = read_values(flags, None if file is None else Path(file), KNOWN, errors)
    one = given.pop("optimizer", ["paper"])  # as in the file of a single run
    errors += _faults_of_several(given)
    optimizers = _optimizers(given.pop("optimizers", one), errors)
    seeds = _seeds(given.pop("seeds", [DEFAULT_SEEDS]), errors)
    varied = {name: values for name, values in given.items() if is_setting(name)}
    if errors:
        raise InputError([*errors, *faults_of_values(varied)])
    return _build({**varied, "optimizer": optimizers}, seeds, Path(root))


def _faults_of_several(given: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the faults of settings with several values that a study needs one of."""
    for name, why in ONE_VALUE.items():
        if len(given.get(name, ())) > 1:
            both = ",".join(map(str, given[name]))
            yield f"--{flag_name(name)} {both}: a study has one value of it: {why}."


def _optimizers(names: Sequence[str], errors: list[str]) -> list[str]:
    """Return the names of the optimizers to compare, with sets of them replaced by their names."""
    paper = [name for name, kind in OPTIMIZERS.items() if kind.paper]
    known = {"paper": paper, "all": list(OPTIMIZERS)} | {name: [name] for name in OPTIMIZERS}
    errors.extend(
        f"--optimizers: there is no optimizer '{name}'.{near(name, OPTIMIZERS)} "
        f"Known: {', '.join(known)}."
        for name in names
        if name not in known
    )
    return list(dict.fromkeys(one for name in names for one in known.get(name, ())))


def _seeds(texts: Sequence[str], errors: list[str]) -> tuple[int, ...]:
    """Parse a number of seeds (5), or a list of seeds (3,7,8; a single seed with a comma: 3,)."""
    try:
        numbers = [int(text) for text in texts if text or len(texts) == 1]
    except ValueError:
        errors.append(f"--seeds: '{','.join(texts)}' is neither a number (5) nor a list (3,7,8).")
        return ()
    alone = len(texts) == 1
    seeds = range(min(numbers[0], MOST_SEEDS + 1)) if alone else tuple(dict.fromkeys(numbers))
    if not 1 <= len(seeds) <= MOST_SEEDS or min(seeds) < 0:
        errors.append(
            f"--seeds must be a number from 1 to {MOST_SEEDS:,}, or a list of seeds of at least 0."
        )
    return tuple(seeds)


def _build(given: Mapping[str, list[str]], seeds: tuple[int, ...], root: Path) -> Grid:
    count = math.prod(map(len, given.values())) * len(seeds)
    if count > MOST_RUNS:  # check before resolving runs, which takes time
        raise InputError(
            f"{count:,} combinations of values and seeds; a study has at most {MOST_RUNS:,}."
        )
    column = _column(given)
    axes: list[str] = ["optimizer"]
    axes += [name for name, of in given.items() if len(of) > 1 and name not in (*axes, column)]
    cells: dict[tuple[Labels, float], TrainPlan] = {}
    errors: dict[str, None] = {}
    notes: dict[str, None] = {}
    for labels, flags in _combinations(given, axes):
        try:
            resolved = resolve(flags)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        plan = resolved.plan
        value = resolved.settings.epsilon or math.inf if column == "epsilon" else plan.privacy.sigma
        cells.setdefault((labels, value), plan)
        notes |= dict.fromkeys(resolved.chosen)
        notes |= dict.fromkeys(note for note in resolved.notes if "no effect" not in note)
    raise_errors(errors)
    changed = last_change(next(iter(cells.values())))
    runs = tuple(
        _placed(plan, seed, root / address(plan, seed, changed), labels, value)
        for (labels, value), plan in cells.items()
        for seed in seeds
    )
    return Grid(runs, tuple(map(flag_name, axes)), column, seeds, tuple(notes))


def _combinations(
    given: Mapping[str, list[str]], axes: Sequence[str]
) -> Iterator[tuple[Labels, dict[str, Any]]]:
    """Yield the labels and the settings of each combination of values.

    A setting of another optimizer does not change a run: it is left out, and its label is empty.
    """
    for values in itertools.product(*given.values()):
        flags: dict[str, Any] = dict(zip(given, values, strict=True))
        labels = {name: str(flags[name]) for name in axes}
        used = {"optimizer", *OPTIMIZERS[flags["optimizer"]].used()}
        for name in axes:
            if SETTINGS[name].flag.group == OPTIMIZER and name not in used:
                flags.pop(name)
                labels[name] = ""
        yield tuple((flag_name(name), label) for name, label in labels.items()), flags


def _placed(plan: TrainPlan, seed: int, folder: Path, labels: Labels, column: float) -> Run:
    """Return the run of a cell with a seed."""
    seeded = replace(plan, settings=plan.settings.replace(seed=seed))
    return Run(seeded.placed(folder, force=True), folder, seed, labels, column)


def _column(given: Mapping[str, list[str]]) -> str:
    """Return the setting whose values are columns: the noise, or a budget that it is chosen for."""
    noise = not given.keys().isdisjoint(("sigma", "no_dp")) or given.get("recipe") == [PAPER]
    return "epsilon" if "epsilon" in given or not noise else "sigma"


def address(plan: TrainPlan, seed: int, changed: int = 0) -> str:
    """Return the name of a run's folder, which depends on settings and seed. Raises OSError.

    So it does on ``changed``: see :func:`last_change`. It depends on no record, because names of
    folders may be published.
    """
    settings = by_flag({name: value for name, value in plan.recorded.items() if name not in ASIDE})
    if plan.network.pretrained is not None:
        settings["pretrained"] = hashlib.sha256(plan.network.pretrained.read_bytes()).hexdigest()
    if changed:
        settings["changed"] = changed
    text = json.dumps({**settings, "seed": seed}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{plan.data.found.name}-{plan.optimizer.name}-{digest}"


def last_change(plan: TrainPlan) -> int:
    """Return when your own data or their schema changed last, in nanoseconds; 0 for other data.

    Runs on records, units or splits that were corrected since are none of a study's, because their
    epsilons may protect other units and do not add up.
    """
    data = plan.data
    if not isinstance(data.source, Source):
        return 0
    schema = plan.recorded.get("schema")
    roots = [data.source.path, *([] if schema is None else [Path(schema)])]
    files = (path for root in roots for path in (root, *root.rglob("*")))
    return max((path.stat().st_mtime_ns for path in files if path.exists()), default=0)
