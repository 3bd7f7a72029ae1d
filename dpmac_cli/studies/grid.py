"""Grid of a study: settings with several values become cells and runs. Imports no torch.

Values of the noise, or of the epsilon that it is chosen for, are the columns of the table, and
combinations of other values its rows. A cell has one run per seed. All runs have the same records,
so that one total epsilon covers them. Everything is validated before the first run is trained.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.flags import (
    JOINED,
    NUMBER,
    Fields,
    Flags,
    Model,
    OneOf,
    Several,
    as_text,
    flag_name,
    in_file,
    is_given,
    split,
    valid,
)
from dpmac_cli.config.named import PAPER
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import DATA, GROUPS, OPTIMIZER, SETTINGS, Settings
from dpmac_cli.config.sources import by_flag, layered
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.runs.resolve import Resolved, resolve

if TYPE_CHECKING:
    from dpmac_cli.data.dataset import Dataset

#: A range to draw numbers from.
RANGE = re.compile(rf"({NUMBER}):({NUMBER})")
#: Most combinations of values, each of which is validated before anything is trained.
MOST = 10_000
#: Values of each setting, by its name.
ValuesOf = dict[str, list[Any]]


def read_values(
    model: type[Model], flags: Mapping[str, Any], file: Path | None, errors: list[str]
) -> tuple[Model, ValuesOf]:
    """Return the settings of a study itself, and the values of each setting of its runs.

    Flags take precedence over a file, and it over a recipe.

    Args:
        model: settings of the study itself.
        flags: field name -> comma-separated text, a list of values, or None.
        file: YAML file with flag names as keys, and values or lists of values; None for none.
        errors: faults are added to these; nothing is raised.

    Returns:
        The settings of the study, and a list of values for each setting that was typed, by its
        name. Values are as they were typed. If there are faults, they must not be used.
    """
    faults = list[str]()
    merged, places = layered(flags, file, several_runs=True)
    of_study = dict[str, Any]()
    for name in model.model_fields:
        if name in merged:
            of_study[name] = merged.pop(name)
    study = valid(model, of_study, faults, places)
    values = ValuesOf()
    typed = ValuesOf()
    for name, value in merged.items():
        listed = listed_values(name, value)
        for single in listed:
            is_range = RANGE.fullmatch(str(single))  # to draw from
            if not is_range:
                valid(Settings, {name: single}, faults, places)
        if any(map(is_given, listed)):
            typed[name] = listed
        if name in SETTINGS:
            values[name] = listed
    for error in Settings.contradictions(typed):
        faults.append(in_file(error, places))
    errors += dict.fromkeys(faults)
    return study, values


def listed_values(name: str, value: Any) -> list[Any]:
    """Return the values in a comma-separated text, in a list, or of a single value.

    A list of the parts of a text with commas is one value: [1, 15] are weights of two classes.

    Args:
        name: name of the setting.
        value: its value or values, of any type.

    >>> listed_values("lr", "0.1,0.2"), listed_values("class_weights", [1, 15])
    (['0.1', '0.2'], ['1,15'])
    """
    setting = SETTINGS.get(name)
    value = as_text(value, setting)
    if isinstance(value, list | tuple):
        values = list[Any]()
        for item in value:
            values += listed_values(name, item)
        return values
    if name == "unit" or (setting is not None and JOINED in setting.metadata):
        return [value]  # which may have commas
    # What is no text, such as records in memory, has no parts.
    parts = split(value)
    return parts if isinstance(parts, list) else [parts]


def resolved(
    cases: Iterable[Mapping[str, Any]], *, same_data: bool = False
) -> tuple[list[Resolved], tuple[str, ...]]:
    """Resolve combinations of values.

    Args:
        cases: settings by name, one mapping for each combination.
        same_data: whether all combinations are of one dataset, which is then read once.

    Returns:
        The plan of each combination, and notes that concern all of them.

    Raises:
        InputError: lists every fault of any combination.
    """
    results = list[Resolved]()
    errors = dict[str, None]()
    notes = dict[str, None]()
    data: Dataset | None = None
    for case in cases:
        try:
            result = resolve(case, data=data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        if not result.plan.facts.test_size:
            errors["{test_fraction=}0 leaves no test records to compare or choose by."] = None
        results.append(result)
        data = result.data if same_data else None
        for note in (*result.chosen, *result.notes):
            if "no effect" not in note:
                notes[note] = None
    raise_errors(errors)
    return results, tuple(notes)


#: Settings that do not distinguish runs, by the names of their flags.
ASIDE = ("recipe", "secure", "device", "metric")
#: Settings that a comparison does not have: those of one run.
NOT_STUDIED = (
    *("optimizer", "max_epsilon", "secure", "canaries", "cover_scores"),
    *("seed", "out", "force", "json", "quiet", "debug"),
)
#: Settings of a study besides the optimizers.
STUDIED: Fields = {name: field for name, field in SETTINGS.items() if name not in NOT_STUDIED}
#: Settings with one value in a study: its runs have the same records, split in the same way, so
#: that their epsilons add up and no run tests on what another has trained on.
ONE_VALUE = (
    "recipe",
    "metric",
    "dataset",
    *(name for name in STUDIED if GROUPS[name] == DATA),
)
PAPERS = tuple(name for name, kind in OPTIMIZERS.items() if kind.paper)
Seed = Annotated[int, Field(ge=0, le=2**32)]


class StudyFlags(Flags, frozen=True):
    """Flags of a study in place of ``--optimizer`` and ``--seed`` of a single run."""

    optimizers: Several[Annotated[str, OneOf(("paper", "all", *OPTIMIZERS))]] = ("paper",)
    """Optimizers to compare, paper for those of the paper, or all. [default: paper]"""
    seeds: Several[Seed] = (3,)
    """Number of seeds (5), or a list of seeds (3,7,8). [default: 3]"""


#: Labels that distinguish a row: names of flags and their values.
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Run:
    """One training run of a study, which is equal to no other one.

    Attributes:
        plan: all its settings, with its folder and its seed.
        labels: settings that distinguish its row, by the names of their flags.
        column: its value of the study's column setting; infinity without privacy.
        typed: settings that were typed, by name, from which the others follow.
    """

    plan: Plan
    labels: Labels
    column: float
    typed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the folder of the run, which need not exist."""
        assert self.plan.settings.out is not None  # noqa: S101  (a study sets it)
        return self.plan.settings.out

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        assert self.plan.settings.seed is not None  # noqa: S101  (a study sets it)
        return self.plan.settings.seed

    @property
    def name(self) -> str:
        """Return its row, its noise and its seed, which distinguish it from other runs."""
        sigma = self.plan.event.noise_multiplier
        return f"{row_name(self.labels)}  sigma {sigma:.4g}  seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """A validated study, as :func:`plan` returns it.

    Attributes:
        runs: all runs, at least one, grouped by cell, with the seeds of a cell in their order.
        column: "sigma", or "epsilon" if the noise of each column meets a budget.
        notes: messages for the user.
        private_notes: notes on the records, for the person who holds them.
    """

    runs: tuple[Run, ...]
    column: str
    notes: tuple[str, ...]
    private_notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the settings that distinguish rows, by the names of their flags.

        They have no dashes before them; "optimizer" is the first.
        """
        return tuple(dict(self.runs[0].labels))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of every cell."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def by_cell(self) -> Iterator[tuple[Run, ...]]:
        """Yield the runs of each cell, which differ only by their seed."""
        for _, runs in itertools.groupby(self.runs, lambda run: (run.labels, run.column)):
            yield tuple(runs)

    @property
    def plan(self) -> Plan:
        """Return the settings of the first run; dataset and delta are the same for all runs."""
        return self.runs[0].plan

    def planned(self) -> Iterator[tuple[str, ...]]:
        """Yield the titles of a table, and a row for each cell: its privacy cost and its runs."""
        target = "sigma" if self.column == "sigma" else "target"
        yield "run", target, "epsilon", "steps", "seeds"
        for runs in self.by_cell():
            run, cost = runs[0], "no privacy"
            if run.plan.private:
                epsilon = total_epsilon(run.plan.planned, run.plan.settings.delta)
                cost = format_epsilon(epsilon)
            steps = f"{run.plan.event.steps:,}"
            seeds = str(len(runs))
            yield row_name(run.labels), f"{run.column:g}", cost, steps, seeds


def row_name(labels: Labels) -> str:
    """Return the name of a row, with the optimizer alone and other settings by their names.

    Args:
        labels: names of flags and values; those with the value "" are left out.

    >>> row_name((("optimizer", "dp-macadam"), ("kappa", "paper"), ("lr", "")))
    'dp-macadam kappa paper'
    """
    parts = list[str]()
    for name, value in labels:
        if value:
            parts.append(value if name == "optimizer" else f"{name} {value}")
    return " ".join(parts)


def plan(flags: Mapping[str, Any], file: Path | str | None, root: Path | str = "runs") -> Grid:
    """Build a grid from flags and a YAML file with lists of values. Flags take precedence.

    Nothing is written. Your own records are read once.

    Args:
        flags: field name -> comma-separated text, a list of values, or None; with ``optimizers``
            and ``seeds``.
        file: YAML file with flag names as keys, and values or lists of values; None for none.
        root: folder of all runs.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets a target epsilon.
    """
    errors: list[str] = []
    study, values = read_values(StudyFlags, flags, None if file is None else Path(file), errors)
    for name in NOT_STUDIED[1:]:
        if name in values:
            errors.append(f"{{{name}}} is of a single run, not of a study: leave it out.")
    errors += _faults_of_several(values)
    one_optimizer = values.pop("optimizer", None)
    raise_errors(errors)
    # A file of a single run names its optimizer by the flag of that.
    names = study.optimizers if "optimizers" in study.explicit else one_optimizer
    several = {"paper": PAPERS, "all": tuple(OPTIMIZERS)}
    optimizers = dict[str, None]()
    for name in names or study.optimizers:
        optimizers |= dict.fromkeys(several.get(name, (name,)))
    if len(study.seeds) == 1:
        seeds = tuple(range(study.seeds[0]))
    else:
        seeds = tuple(dict.fromkeys(study.seeds))
    return _build({**values, "optimizer": list(optimizers)}, seeds, Path(root))


def _faults_of_several(values: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the faults of settings with several values that a study needs one of."""
    for name in ONE_VALUE:
        if len(values.get(name, ())) > 1:
            listed = ",".join(map(str, values[name]))
            yield (
                f"{{{name}=}}{listed}: a study has one value of it, so that its runs have "
                "the same records and their epsilons add up. Compare again with another {out}."
            )


def _build(values: Mapping[str, list[str]], seeds: tuple[int, ...], root: Path) -> Grid:
    """Return the grid of all combinations of values, with every seed.

    Args:
        values: values of each setting, by its name.
        seeds: seeds of each cell.
        root: folder of all runs.

    Raises:
        InputError: there are none or too many combinations, or one is not possible.
    """
    count = math.prod(map(len, values.values())) * len(seeds)
    if not 0 < count <= MOST:  # check before resolving runs, which takes time
        raise InputError(
            f"{count:,} combinations of values and seeds; a study has at least 1, and at most "
            f"{MOST:,}."
        )
    column = _column(values)
    axes = ["optimizer"]
    for name, listed in values.items():
        if len(listed) > 1 and name not in ("optimizer", column):
            axes.append(name)
    labels_of, cases = zip(*_labelled(values, axes), strict=True)
    results, notes = resolved(cases, same_data=True)
    changed = last_change(results[0].plan)
    runs = dict[tuple[Labels, float], list[Run]]()
    for labels, flags, result in zip(labels_of, cases, results, strict=True):
        plan = result.plan
        value = plan.event.noise_multiplier
        if column == "epsilon":
            value = plan.settings.epsilon or math.inf
        if (labels, value) in runs:  # it differs by a setting without effect
            continue
        typed = {name: setting for name, setting in flags.items() if is_given(setting)}
        typed["dataset"] = plan.facts.typed
        runs[labels, value] = []
        for seed in seeds:
            placed = _placed(plan, seed, root / address(plan, seed, changed))
            runs[labels, value].append(Run(placed, labels, value, typed))
    in_order = tuple(itertools.chain.from_iterable(runs.values()))
    return Grid(in_order, column, notes, results[0].private_notes)


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of values, each with a value of every setting.

    Args:
        values: values of each setting, by its name.

    >>> list(combinations({"lr": [0.1, 0.2], "epochs": [5]}))
    [{'lr': 0.1, 'epochs': 5}, {'lr': 0.2, 'epochs': 5}]
    """
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _labelled(
    values: Mapping[str, list[str]], axes: Sequence[str]
) -> Iterator[tuple[Labels, dict[str, Any]]]:
    """Yield the labels and the settings of each combination of values.

    A setting of another optimizer does not change a run: it is left out, and its label is empty.

    Args:
        values: values of each setting, by its name.
        axes: settings whose values distinguish rows.
    """
    for flags in combinations(values):
        labels = list[tuple[str, str]]()
        used = {"optimizer", *OPTIMIZERS[flags["optimizer"]].used()}
        for name in axes:
            label = str(flags[name])
            if GROUPS[name] == OPTIMIZER and name not in used:
                flags.pop(name)
                label = ""
            labels.append((flag_name(name), label))
        yield tuple(labels), flags


def _placed(plan: Plan, seed: int, folder: Path) -> Plan:
    """Return the plan of the run of a cell with a seed, which may replace one in its folder."""
    return replace(plan, settings=plan.settings.replace(seed=seed, out=folder, force=True))


def _column(values: Mapping[str, list[str]]) -> str:
    """Return the setting whose values are columns: the noise, or a budget that it is chosen for."""
    if "epsilon" in values:
        return "epsilon"
    noise_is_given = "sigma" in values or "no_dp" in values or values.get("recipe") == [PAPER]
    return "sigma" if noise_is_given else "epsilon"


def address(plan: Plan, seed: int, changed: int = 0) -> str:
    """Return the name of a run's folder, such as "digits-dp-adam-" and twelve hexadecimal digits.

    It depends on settings, seed and ``changed`` alone, and on no record, because names of folders
    may be published.

    Args:
        plan: plan of the run.
        seed: seed of the run.
        changed: when the data changed last, see :func:`last_change`.

    Raises:
        OSError: the file of pretrained weights cannot be read.
    """
    distinguishing = dict(plan.recorded)
    for name in ASIDE:
        distinguishing.pop(name, None)
    settings = by_flag(distinguishing)
    if plan.pretrained is not None:
        settings["pretrained"] = hashlib.sha256(plan.pretrained.read_bytes()).hexdigest()
    if changed:
        settings["changed"] = changed
    text = json.dumps({**settings, "seed": seed}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{plan.facts.name}-{plan.optimizer.name}-{digest}"


def last_change(plan: Plan) -> int:
    """Return when your own data or their schema changed last, in nanoseconds; 0 for other data.

    Runs on records, units or splits that were corrected since are none of a study's, because their
    epsilons may protect other units and do not add up.

    Args:
        plan: plan of a run. Of a folder of data, the times of all files in it count.
    """
    if not plan.facts.user_supplied:
        return 0
    roots = [Path(plan.facts.typed)]
    schema = plan.recorded.get("schema")
    if schema is not None:
        roots.append(Path(schema))
    latest = 0
    for root in roots:
        for path in (root, *root.rglob("*")):
            if path.exists():
                latest = max(latest, path.stat().st_mtime_ns)
    return latest
