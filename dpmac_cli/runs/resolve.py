"""From flags and files to the plan of a run: reads your own records for it, once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config import checks, findings
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import recipe_notes
from dpmac_cli.config.facts import published_facts
from dpmac_cli.config.flags import is_given
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.planning import plan
from dpmac_cli.config.settings import DATA, GROUPS, SETTINGS, Settings
from dpmac_cli.config.sources import Values, given_settings, over, read_yaml, values_of
from dpmac_cli.errors import InputError, as_keywords, raise_errors

if TYPE_CHECKING:
    from dpmac_cli.data.dataset import Dataset


@dataclass(frozen=True)
class Resolved:
    """A validated plan, and notes for the user, as :func:`resolve` returns them.

    Attributes:
        plan: the plan, whose settings are complete.
        notes: probable mistakes in settings, which no private record decides; settings are in
            braces, as in an error. () if there are none.
        chosen: what the recipe chose, with reasons.
        data: your own dataset, which was read for the plan. None for a registered dataset, which
            is read when training begins.
    """

    plan: Plan
    notes: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    data: "Dataset | None" = field(default=None, compare=False, repr=False)

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes about the records, for the person who holds them: do not publish or log.

        () for a registered dataset. Settings are named as keywords of Python.
        """
        if self.data is None:
            return ()
        return tuple(map(as_keywords, findings.private_notes(self.plan, self.data.notes)))


def resolve(
    settings: Settings | Values | None = None,
    file: Path | Values | None = None,
    *,
    earlier: tuple[TrainingEvent, ...] = (),
    data: "Dataset | None" = None,
    noise: TrainingEvent | None = None,
    ranged: bool = False,
    **keywords: Any,
) -> Resolved:
    """Resolve settings and a YAML file into a validated plan. Settings take precedence.

    Nothing is written, and no network is built. Your own records are read; those of a registered
    dataset are not.

    Args:
        settings: a model, or values by name, as text or of their types; None and False if not
            given.
        file: YAML file with flag names as keys, or the values of a run to change, by name; None for
            none.
        earlier: events on the same records, which a target epsilon must cover too.
        data: your own dataset, if it was read before; None to read it.
        noise: event of a run that has begun, whose noise it has; None for that of the settings.
        ranged: whether ranges of columns were found by an earlier part of the run.
        keywords: more settings by name: ``resolve(dataset="digits", sigma=2)``. They take
            precedence over ``settings``.

    Raises:
        InputError: lists every invalid value; if there is none, every fault of the dataset; if
            there is none, every fault of settings together.
        BudgetError: no noise meets the target epsilon.

    >>> resolve(dataset="digits", sigma=2, epochs=5).plan.event.noise_multiplier
    2.0
    """
    flags = {**values_of(settings), **keywords}
    chosen = given_settings(flags, file)
    if isinstance(chosen.dataset, str) and chosen.dataset in DATASETS:
        facts, faults = published_facts(chosen.dataset, chosen.unit), list[str]()
    else:
        data = data or _read(chosen)
        facts, faults = data.facts, [*findings.tested_twice(chosen, data.facts, data.notes)]
    planned = plan(chosen, facts, earlier=earlier, noise=noise, ranged=ranged, of_records=faults)
    typed = [name for name in SETTINGS if is_given(flags.get(name))]
    notes = checks.notes(planned, typed)
    return Resolved(planned, notes, tuple(recipe_notes(chosen, facts)), data)


def _read(settings: Settings) -> "Dataset":
    """Read a dataset once, because files may change during a run."""
    from dpmac_cli.data.read import read  # noqa: PLC0415  (loads pyarrow)

    return read(settings)


def missing_files(recorded: Values, chosen: Values, names: Iterable[str]) -> Iterator[str]:
    """Yield faults of files of a run's data that are no longer where they were.

    Args:
        recorded: settings of the run, by name.
        chosen: settings that say where its files are now, by name.
        names: settings to look at, such as "dataset" and "schema".
    """
    for name in names:
        place = recorded.get(name)
        if place is None or place in DATASETS or is_given(chosen.get(name)):
            continue
        if not Path(place).exists():
            what = "data" if name == "dataset" else name
            yield (
                f"The run's {what} {place} was not found. Put it back, or set {{{name}}} to its "
                "new path."
            )


def settings_of_data(values: Values, file: Path | None = None) -> Settings:
    """Return the settings of a dataset alone, to read it as a run did.

    Args:
        values: values by name, as text or of their types; None if not given. They take precedence.
        file: config.yaml of a run, of which only the settings of its dataset are read; None for
            none.

    Raises:
        InputError: lists every fault found; or the run's records were in memory of a program, and
            ``values`` name no others.
    """
    recorded, places = ({}, {}) if file is None else read_yaml(file)
    above = {name: value for name, value in values.items() if is_given(value)}
    below = dict[str, Any]()
    for name, value in recorded.items():
        of_data = name == "dataset" or GROUPS.get(name) == DATA
        if of_data and name not in above:
            below[name] = value
    places_below = {name: place for name, place in places.items() if name in below}
    if file is not None and str(below.get("dataset", "")).startswith("<"):
        raise InputError(
            f"{file.parent} was trained on records in memory of a program. Add {{dataset}} with "
            "the path of a file of them, or pass them: load(run).score(data)."
        )
    raise_errors(missing_files(below, above, ["dataset"]))
    return Settings.model_validate(over(above, below), context=places_below)
