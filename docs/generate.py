"""Write docs/configuration.md from the settings themselves: ``python docs/generate.py``."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.config.defaults import EPSILON
from dpmac_cli.config.given import EXCLUSIVE, INCOMPATIBLE
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import SETTINGS, Setting, flag_name
from dpmac_cli.data.registry import DATASETS, STEPS_PER_EPOCH, Dataset
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import LEAST_CNN, found
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.registry import BACKBONES, FEATURES, MODELS

FILE = Path(__file__).with_name("configuration.md")
#: What a value may be, in words.
KINDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
INTRODUCTION = """\
# Configuration

Every setting of `dpmac train`, by the groups of its help. Written by `python docs/generate.py`
from the settings themselves: change those, not this page.

A setting has one name everywhere: `--batch-size 128` as a flag, `batch-size: 128` in the YAML file
of `--config`, `batch_size=128` in [`resolve`](library.md#train). Flags win over the file. A switch
is given as a flag alone, or as `true`. Everything is checked before anything is done, and all that
is wrong is told at once. `dpmac compare` takes the same settings with several values each, but for
those that its help leaves out.
"""
CHOICES = {
    "Data sets": {name: facts.about for name, facts in DATASETS.items()},
    "Networks": {name: kind.about for name, kind in MODELS.items()},
    "Backbones": {
        name: f"{kind.about}: {kind.width:,} features, {kind.size} pixels a side, "
        f"{kind.top1:.1%} of ImageNet's validation images right (published), {kind.licence}"
        for name, kind in BACKBONES.items()
    },
    "Features": FEATURES,
    "Samplers": {name: sampling.summary for name, sampling in SAMPLERS.items()},
    "Optimizers": {name: row.summary for name, row in OPTIMIZERS.items()},
}
#: Settings whose defaults a data set brings, by the names of both.
OF_DATA = ("model", "sigma", "batch_size", "epochs", "clip_norm", "h1", "h2", "physical_batch")
#: Records of one's own data, where it has many.
MANY = 10**6
#: What a rule says of them, in words.
BY_RULE = {"sigma": f"for epsilon {EPSILON:g}", "batch_size": f"n/{STEPS_PER_EPOCH}"}


def configuration() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for panel in dict.fromkeys(setting.panel for setting in SETTINGS.values()):
        rows = [
            (f"`--{flag_name(name)}`", what(setting), default(setting), about(setting))
            for name, setting in SETTINGS.items()
            if setting.panel == panel
        ]
        parts += [f"## {panel}\n", table(("setting", "value", "default", ""), rows)]
    parts += ["## By data set\n", by_data_set(), samples_at_a_time()]
    parts += ["Learning rates:\n", learning_rates(), "## By optimizer\n", by_optimizer()]
    parts += ["## What does not go together\n", exclusions()]
    for title, known in CHOICES.items():
        named = [(f"`{name}`", said) for name, said in known.items()]
        parts += [f"## {title}\n", table(("name", ""), named)]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def what(setting: Setting) -> str:
    """Return what a setting may be."""
    if setting.kind is bool:
        return "switch"
    if setting.choices:
        more = f"; or {setting.besides[1]}" if setting.besides else ""
        return ", ".join(f"`{choice}`" for choice in setting.choices) + more
    if setting.pattern:
        return setting.pattern[1]
    kind = KINDS[setting.kind]
    return f"{kind}, {setting.bounds}" if setting.bounds else kind


def default(setting: Setting) -> str:
    """Return the default of a setting."""
    if setting.kind is bool:
        return "off"
    if setting.default is not None:
        return f"`{setting.default}`"
    return setting.otherwise or "none"


def about(setting: Setting) -> str:
    """Return the help of a setting."""
    return setting.help + ("" if setting.recorded else " Not kept in `config.yaml`.")


def by_data_set() -> str:
    """Defaults that a data set brings."""
    head = ("", *(f"`--{flag_name(name)}`" for name in (*OF_DATA, "augment")))
    return table(
        head,
        (
            (name, *(of_data(facts, key) for key in OF_DATA), facts.augment)
            for name, facts in _data_sets().items()
        ),
    )


def samples_at_a_time() -> str:
    """The physical batch of the networks that take more than the data set's."""
    more = [f"`{n}` {kind.physical_batch:,}" for n, kind in MODELS.items() if kind.physical_batch]
    return (
        f"A physical batch of that or, where it is more: {', '.join(more)}; in proportion fewer of "
        "images above 32 by 32 pixels. K augmented views of an image count as K.\n"
    )


def of_data(facts: Dataset, name: str) -> str:
    """A default that a data set brings."""
    value = shown(getattr(facts.defaults, name))
    return BY_RULE.get(name, value) if facts.train_size == MANY else value


def _data_sets() -> dict[str, Dataset]:
    """Those of the catalogue, and the kinds of a person's own."""
    small = LEAST_CNN - 1
    return {
        **{f"`{name}`": facts for name, facts in DATASETS.items()},
        f"your own images, {LEAST_CNN}x{LEAST_CNN} and more": _own((3, LEAST_CNN, LEAST_CNN)),
        "your own images, smaller": _own((3, small, small)),
        "your own rows of numbers": _own((9, 1, 1), levels=1),
    }


def _own(shape: tuple[int, int, int], *, levels: int = 255) -> Dataset:
    """Return facts of a dataset of your own with many records."""
    labels, ends = np.zeros(MANY, np.int64), None if levels > 1 else np.zeros((2, shape[0]))
    return found(Source(Path()), (labels, labels), shape, "ab", ends).facts


def learning_rates() -> str:
    """Of each optimizer on each data set."""
    return table(
        ("", *(f"`{name}`" for name in OPTIMIZERS)),
        (
            (name, *(shown(row.rate_on(name.strip("`"))) for row in OPTIMIZERS.values()))
            for name in _data_sets()
        ),
    )


def by_optimizer() -> str:
    """Which settings have an effect on which optimizer, and their defaults on MNIST."""
    names = sorted(set().union(*(row.settings for row in OPTIMIZERS.values())))
    rows = []
    for optimizer, row in OPTIMIZERS.items():
        hyper = resolve(dataset="mnist", optimizer=optimizer).plan.hyper
        cells = [shown(getattr(hyper, name)) if name in row.settings else "" for name in names]
        rows.append((f"`{optimizer}`", *cells))
    head = ("", *(f"`--{flag_name(name)}`" for name in names))
    return f"Defaults on MNIST; an empty cell has no effect.\n\n{table(head, rows)}"


def exclusions() -> str:
    """Settings of which one may be given."""
    return "".join(f"- {line}\n" for line in _exclusions())


def _exclusions() -> Iterator[str]:
    for group in EXCLUSIVE:
        yield f"{flags(group)} answer the same question. A flag replaces a file's answer."
    for pair, why in INCOMPATIBLE.items():
        yield f"{flags(pair)}: {why}."


def flags(names: Iterable[str]) -> str:
    """Some settings, as typed."""
    return ", ".join(f"`--{flag_name(name)}`" for name in names)


def shown(value: object) -> str:
    """A default in short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    FILE.write_text(configuration())
