"""Searches on public records, whose best settings are used for one run on private ones.

Nothing of the private records is used by the search, so it costs no privacy. Imports no torch.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpmac_cli.config.best import EPSILON
from dpmac_cli.config.data import resolve_data
from dpmac_cli.config.dimensions import Dimension, Setting, checked, combinations, dimensions_of
from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.plan import DataPlan, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_file import SearchFile
from dpmac_cli.config.search_flags import SearchFlags
from dpmac_cli.config.settings import DATA, SETTINGS
from dpmac_cli.config.sources import SettingValue
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError, raise_errors

#: Characters that ``--tuned-on`` cannot have.
_STRANGE = re.compile(r"[^\w .,:;=+/()-]")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A validated search on public records, and the run on private ones that it is for.

    Attributes:
        given, file: settings that all runs share, from flags and from a file.
        dimensions: settings to draw.
        public, data: the public and the private dataset.
        trials: number of trials on the public one.
        notes: what the recipe chose, and probable mistakes.
    """

    given: Mapping[str, Any]
    file: Mapping[str, SettingValue]
    dimensions: tuple[Dimension, ...]
    public: DataPlan
    data: DataPlan
    trials: int
    notes: tuple[str, ...] = ()

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings of all trials: the same in every call, because nothing is secret."""
        source = random.Random(0)  # noqa: S311  (of public data: no secret)
        return tuple(
            {dimension.name: dimension.draw(source) for dimension in self.dimensions}
            for _ in range(self.trials)
        )

    def trial(self, setting: Setting) -> TrainPlan:
        """Return the plan of a trial on the public records, with the epsilon of the final run."""
        at: dict[str, Any] = {**self.given, "dataset": self.public.dataset, **setting}
        return resolve(at, self.file, data=self.public).plan

    def final(self, setting: Setting) -> TrainPlan:
        """Return the plan of the run on the private records."""
        texts = "; ".join(dimension.text for dimension in self.dimensions)
        said = f"{self.public.found.name}, the best of {self.trials} settings from {texts}"
        tuned: dict[str, Any] = {"tuned_on": _STRANGE.sub("-", said)}
        return resolve({**self.given, **setting, **tuned}, self.file, data=self.data).plan


def plan_transfer(
    given: Mapping[str, Any], file: SearchFile, flags: SearchFlags, found: Sequence[str]
) -> Transfer:
    """Validate a search on public records, and every run that it may lead to.

    Args:
        given: settings that all runs share.
        file: settings to draw, and more of those that all runs share.
        flags: public records and number of trials.
        found: faults that were found before.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    dimensions = dimensions_of(given, file, [*found, *_without_effect(flags)])
    shared = dict(given)
    if "epsilon" not in file.settings:
        shared.setdefault("epsilon", EPSILON)
    settings = tuple(combinations(dimensions))
    plans, notes = list[DataPlan](), list[str]()
    errors = dict[str, None]()
    for at in ({**shared, "dataset": flags.on}, shared):
        try:
            data, _, notes[:] = checked(at, None, file.settings, settings)
            plans.append(data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
    raise_errors(errors)
    public, private = plans
    raise_errors(_misfits(public, private))
    return Transfer(
        given=shared,
        file=file.settings,
        dimensions=dimensions,
        public=public,
        data=private,
        trials=round(flags.trials),
        notes=tuple(notes),
    )


def judge_of(
    given: Mapping[str, Any],
    file: Mapping[str, SettingValue],
    score_on: str,
    data: DataPlan,
) -> DataPlan:
    """Return public data that trials on private ``data`` are scored on.

    They are read with the same settings. Raises InputError if models for one do not fit the other.
    """
    written = {name: entry.value for name, entry in file.items()}
    settings = {
        name: value
        for name, value in {**written, **given, "dataset": score_on}.items()
        if name in ("dataset", "data_dir")
        or (SETTINGS[name].flag.group == DATA and name not in ("unit", "records_per_unit"))
    }
    judge = resolve_data(settings, texts=data.reader)
    if _place(judge) == _place(data):
        raise InputError(
            f"--score-on {score_on} is the private data itself, whose exact scores reveal its test "
            "records. Leave out --score-on, or give public data."
        )
    ours, theirs = data.facts, judge.facts
    if ours.task != theirs.task or ours.shape != theirs.shape or ours.levels != theirs.levels:
        raise InputError(
            f"--score-on {score_on} has {theirs.task.summary} and records of shape {theirs.shape}, "
            f"but {data.dataset} has {ours.task.summary} and {ours.shape}. Give public data with "
            "the same classes and shape."
        )
    return judge


def _without_effect(flags: SearchFlags) -> Iterator[str]:
    names = ("most_trials", "stop_early", "score_on")
    for name, value in ((flag_name(name), getattr(flags, name)) for name in names):
        if value:
            yield (
                f"--{name} has no effect with --on: a search on public data has --trials trials, "
                "and keeps nothing secret. Leave it out."
            )


def _misfits(public: DataPlan, data: DataPlan) -> Iterator[str]:
    """Yield why settings cannot be transferred from one dataset to the other."""
    if _place(public) == _place(data):
        yield (
            f"--on {public.dataset} is the private data itself, and a search on it costs privacy. "
            "Leave out --on, or give public data."
        )
    if public.facts.task.kind != data.facts.task.kind:
        yield (
            f"--on {public.dataset} has {public.facts.task.summary}, but {data.dataset} has "
            f"{data.facts.task.summary}: settings for one do not suit the other. Use public data "
            "of the same kind."
        )


def _place(data: DataPlan) -> str | Path:
    return data.source.path.resolve() if isinstance(data.source, Source) else data.source
