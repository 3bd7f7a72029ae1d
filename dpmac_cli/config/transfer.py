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
from dpmac_cli.config.dimensions import Dimension, Setting, checked, combinations, dimensions_of
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import DataPlan, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_file import SearchFile, SearchFlags
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

    given: Mapping[SettingName, Any]
    file: Mapping[SettingName, SettingValue]
    dimensions: tuple[Dimension, ...]
    public: DataPlan
    data: DataPlan
    trials: int
    notes: tuple[str, ...] = ()

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings of all trials: the same in every call, because nothing is secret."""
        source = random.Random(0)  # noqa: S311
        return tuple(
            {dimension.name: dimension.draw(source) for dimension in self.dimensions}
            for _ in range(self.trials)
        )

    def trial(self, setting: Setting) -> TrainPlan:
        """Return the plan of a trial on the public records, with the epsilon of the final run."""
        at: dict[SettingName, Any] = {**self.given, "dataset": self.public.dataset, **setting}
        return resolve(at, self.file, data=self.public).plan

    def final(self, setting: Setting) -> TrainPlan:
        """Return the plan of the run on the private records."""
        texts = "; ".join(dimension.text for dimension in self.dimensions)
        said = f"{self.public.found.name}, the best of {self.trials} settings from {texts}"
        tuned: dict[SettingName, Any] = {"tuned_on": _STRANGE.sub("-", said)}
        return resolve({**self.given, **setting, **tuned}, self.file, data=self.data).plan


def plan_transfer(
    given: Mapping[SettingName, Any], file: SearchFile, flags: SearchFlags, found: Sequence[str]
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
    found_data, notes, errors = dict[str, DataPlan](), (), dict[str, None]()
    for name, dataset in (("public", {"dataset": flags.on}), ("data", {})):
        at: dict[Any, Any] = {**shared, **dataset}
        try:
            found_data[name], _, notes = checked(at, None, file.settings, settings)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
    raise_errors(errors)
    raise_errors(_misfits(**found_data))
    return Transfer(
        given=shared,
        file=file.settings,
        dimensions=dimensions,
        trials=round(flags.trials),
        notes=notes,
        **found_data,
    )


def _without_effect(flags: SearchFlags) -> Iterator[str]:
    for name, value in (("most-trials", flags.most_trials), ("stop-early", flags.stop_early)):
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
