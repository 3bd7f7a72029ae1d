"""Long studies in several sittings: results are lines of a file, and what is there is left out."""

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lines

Setting = dict[str, Any]


def carry_on(
    settings: Iterable[Setting],
    measure: Callable[[Setting], dict[str, Any]],
    file: Path,
    part: str = "0/1",
) -> None:
    """Measure what a file lacks, and append a line of JSON each: the setting and its results.

    Args:
        settings: of the study.
        measure: from a setting to results.
        file: of the results.
        part: "I/N" takes every N-th setting from the I-th, for N processes side by side.
    """
    first, step = map(int, part.split("/"))
    for setting in itertools.islice(settings, first, None, step):
        if any(line["setting"] == setting for line in lines.read(file)):
            continue
        lines.append(file, {"setting": setting, "result": measure(setting)})
        print(setting, flush=True)


def main(
    about: str | None,
    grids: Mapping[str, Callable[[], Iterable[Setting]]],
    measure: Callable[[Setting], dict[str, Any]],
) -> None:
    """The command line of a study: run what is not there yet of one of its grids."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("grid", choices=grids)
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th setting from the I-th")
    options = parser.parse_args()
    carry_on(grids[options.grid](), measure, options.file, options.part)


def results(file: Path) -> list[dict[str, Any]]:
    """Return the contents of a file, each setting merged with its results."""
    return [{**line["setting"], **line["result"]} for line in lines.read(file)]


def product(**axes: Iterable[Any]) -> list[Setting]:
    """Every combination of some values."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
