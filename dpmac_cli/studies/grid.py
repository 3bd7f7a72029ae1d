"""Grid of a study: settings with several values become cells and runs. Imports no torch."""

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

#: Settings whose values may have commas.
WITH_COMMAS = ("unit", *(name for name, field in SETTINGS.items() if JOINED in field.metadata))
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
        file: YAML file with flag names as keys, and values or lists of values.
        errors: faults are added to these.
    """
    faults = list[str]()
    given, places = layered(flags, file, several_runs=True)
    own = {name: given.pop(name) for name in model.model_fields if name in given}
    study = valid(model, own, faults, places)
    values = {name: listed_values(name, value) for name, value in given.items()}
    for name, of in values.items():
        for value in of:
            if not RANGE.fullmatch(str(value)):  # to draw from
                valid(Settings, {name: value}, faults, places)
    some = {name: of for name, of in values.items() if any(map(is_given, of))}
    faults += (in_file(error, places) for error in Settings.contradictions(some))
    errors += dict.fromkeys(faults)
    return study, {name: of for name, of in values.items() if name in SETTINGS}


def listed_values(name: str, value: Any) -> list[Any]:
    """Return the values in a comma-separated text, in a list, or of a single value.

    A list of the parts of a text with commas is one value: [1, 15] are weights of two classes.
    """
    value = as_text(value, SETTINGS.get(name))
    if isinstance(value, list | tuple):
        return [part for item in value for part in listed_values(name, item)]
    # What is no text, such as records in memory, has no parts.
    parts = value if name in WITH_COMMAS else split(value)
    return parts if isinstance(parts, list) else [parts]


def resolved(
    cases: Iterable[Mapping[str, Any]], *, same_data: bool = False
) -> tuple[list[Resolved], tuple[str, ...]]:
    """Resolve combinations of values; return their plans, and notes that concern all of them.

    With ``same_data``, the dataset is read once. Raises InputError with every fault of any.
    """
    found, errors, notes = list[Resolved](), dict[str, None](), dict[str, None]()
    data: Dataset | None = None
    for case in cases:
        try:
            one = resolve(case, data=data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        if not one.plan.facts.test_size:
            errors["{test_fraction=}0 leaves no test records to compare or choose by."] = None
        found.append(one)
        data = one.data if same_data else None
        said = (*one.chosen, *one.notes)
        notes |= dict.fromkeys(note for note in said if "no effect" not in note)
    raise_errors(errors)
    return found, tuple(notes)


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
    """Flags of a study instead of those of a single run."""

    optimizers: Several[Annotated[str, OneOf(("paper", "all", *OPTIMIZERS))]] = ("paper",)
    """Optimizers to compare, paper for those of the paper, or all. [default: paper]"""
    seeds: Several[Seed] = (3,)
    """Number of seeds (5), or a list of seeds (3,7,8). [default: 3]"""


#: Labels that distinguish a row: names of flags and their values.
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """One training run of a study.

    Attributes:
        plan: all its settings, with its folder and its seed.
        labels: settings that distinguish its row, by the names of their flags.
        column: its value of the study's column setting.
        given: settings that were typed, by name, from which the others follow.
    """

    plan: Plan
    labels: Labels
    column: float
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        assert self.plan.settings.out is not None  # noqa: S101  (a study sets it)
        return self.plan.settings.out

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        assert self.plan.settings.seed is not None  # noqa: S101  (a study sets it)
        return self.plan.settings.seed

    @property
    def name(self) -> str:
        """Return what tells it from other runs: its row, its noise and its seed."""
        sigma = self.plan.event.noise_multiplier
        return f"{row_name(self.labels)}  sigma {sigma:.4g}  seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """A validated study.

    Attributes:
        runs: all runs, grouped by cell.
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
        """Return the settings that distinguish rows, by the names of their flags."""
        return tuple(name for name, _ in self.runs[0].labels)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of every cell."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    @property
    def plan(self) -> Plan:
        """Return the settings of the first run; dataset and delta are the same for all runs."""
        return self.runs[0].plan

    def planned(self) -> Iterator[tuple[str, ...]]:
        """Yield titles, and a row for each cell: its privacy cost and its runs."""
        target = "sigma" if self.column == "sigma" else "target"
        yield "run", target, "epsilon", "steps", "seeds"
        seeds = str(len(self.seeds))
        for run in self.runs[:: len(self.seeds)]:  # the first of each cell
            each, cost = run.plan, "no privacy"
            if each.private:
                cost = format_epsilon(total_epsilon(each.planned, each.settings.delta))
            yield row_name(run.labels), f"{run.column:g}", cost, f"{each.event.steps:,}", seeds


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
    own, given = read_values(StudyFlags, flags, None if file is None else Path(file), errors)
    for name in NOT_STUDIED[1:]:
        if name in given:
            errors.append(f"{{{name}}} is of a single run, not of a study: leave it out.")
    errors += _faults_of_several(given)
    known = {"paper": PAPERS, "all": tuple(OPTIMIZERS)}
    named = given.pop("optimizer", None) if "optimizers" not in own.explicit else None
    given.pop("optimizer", None)
    raise_errors(errors)
    names = [one for name in named or own.optimizers for one in known.get(name, (name,))]
    few = len(own.seeds) == 1
    seeds = tuple(range(own.seeds[0])) if few else tuple(dict.fromkeys(own.seeds))
    return _build({**given, "optimizer": list(dict.fromkeys(names))}, seeds, Path(root))


def _faults_of_several(given: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the faults of settings with several values that a study needs one of."""
    for name in ONE_VALUE:
        if len(given.get(name, ())) > 1:
            both = ",".join(map(str, given[name]))
            yield (
                f"{{{name}=}}{both}: a study has one value of it, so that its runs have "
                "the same records and their epsilons add up. Compare again with another {out}."
            )


def _build(given: Mapping[str, list[str]], seeds: tuple[int, ...], root: Path) -> Grid:
    count = math.prod(map(len, given.values())) * len(seeds)
    if not 0 < count <= MOST:  # check before resolving runs, which takes time
        raise InputError(
            f"{count:,} combinations of values and seeds; a study has at least 1, and at most "
            f"{MOST:,}."
        )
    column = _column(given)
    axes: list[str] = ["optimizer"]
    axes += [name for name, of in given.items() if len(of) > 1 and name not in (*axes, column)]
    cases = [*_combinations(given, axes)]
    found, notes = resolved((flags for _, flags in cases), same_data=True)
    cells: dict[tuple[Labels, float], tuple[Plan, Mapping[str, Any]]] = {}
    for (labels, flags), one in zip(cases, found, strict=True):
        plan = one.plan
        target, sigma = plan.settings.epsilon or math.inf, plan.event.noise_multiplier
        place = labels, target if column == "epsilon" else sigma
        typed = {name: value for name, value in flags.items() if is_given(value)}
        cells.setdefault(place, (plan, typed | {"dataset": plan.facts.typed}))
    changed = last_change(found[0].plan)
    runs = tuple(
        Run(_placed(plan, seed, root / address(plan, seed, changed)), labels, value, flags)
        for (labels, value), (plan, flags) in cells.items()
        for seed in seeds
    )
    return Grid(runs, column, notes, found[0].private_notes)


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
            if GROUPS[name] == OPTIMIZER and name not in used:
                flags.pop(name)
                labels[name] = ""
        yield tuple((flag_name(name), label) for name, label in labels.items()), flags


def _placed(plan: Plan, seed: int, folder: Path) -> Plan:
    """Return the plan of the run of a cell with a seed, which may replace one in its folder."""
    return replace(plan, settings=plan.settings.replace(seed=seed, out=folder, force=True))


def _column(given: Mapping[str, list[str]]) -> str:
    """Return the setting whose values are columns: the noise, or a budget that it is chosen for."""
    noise = not given.keys().isdisjoint(("sigma", "no_dp")) or given.get("recipe") == [PAPER]
    return "epsilon" if "epsilon" in given or not noise else "sigma"


def address(plan: Plan, seed: int, changed: int = 0) -> str:
    """Return the name of a run's folder, which depends on settings and seed. Raises OSError.

    So it does on ``changed``: see :func:`last_change`. It depends on no record, because names of
    folders may be published.
    """
    settings = by_flag({name: value for name, value in plan.recorded.items() if name not in ASIDE})
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
    """
    if not plan.facts.user_supplied:
        return 0
    schema = plan.recorded.get("schema")
    roots = [Path(plan.facts.typed), *([] if schema is None else [Path(schema)])]
    files = (path for root in roots for path in (root, *root.rglob("*")))
    return max((path.stat().st_mtime_ns for path in files if path.exists()), default=0)
