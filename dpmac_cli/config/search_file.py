"""Searches in files and in programs: settings to draw beside settings that all trials share.

A settings file of a search has the settings of a run, those of a search itself
(:mod:`~dpmac_cli.config.search_flags`), and ``search`` with a range or a list for each setting to
draw. Imports no torch.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

from dpmac_cli.config.fields import NUMBER, Option, flag_name
from dpmac_cli.config.flags import near, valid_part
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.search_flags import DRAWN, SEARCH_FLAGS, SearchFlags
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.config.sources import SettingValue, combined, is_setting
from dpmac_cli.config.yaml_file import read_values

#: Keys of a range of numbers, and the values of its scale.
ENDS, SCALES = ("low", "high"), ("linear", "log")
#: What a range is in a file.
AS_RANGE = "{low: 1e-4, high: 1e-1, scale: log}"


@dataclass(frozen=True)
class SearchFile:
    """Content of a settings file of a search, read once.

    Attributes:
        settings: settings that all trials share.
        drawn: settings to draw, as texts of ``--search``.
        search: settings of the search itself: fields of :class:`SearchFlags`.
    """

    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    drawn: tuple[SettingValue, ...] = ()
    search: Mapping[str, SettingValue] = field(default_factory=dict)

    def flags(self, given: Mapping[str, Any], errors: list[str]) -> SearchFlags:
        """Return the settings of the search, and add their faults to ``errors``.

        ``given`` takes precedence.
        """
        values = {name: entry.value for name, entry in self.search.items()}
        origins = {name: entry.origin for name, entry in self.search.items() if name not in given}
        return valid_part(SearchFlags, {**values, **given}, errors, origins)[0]

    def below(self, above: "SearchFile") -> "SearchFile":
        """Return both files, of which ``above`` takes precedence."""
        names = {_name(entry.value) for entry in above.drawn}
        drawn = self.fixed({*names, *above.settings}).drawn
        settings = {name: entry for name, entry in self.settings.items() if name not in names}
        settings = combined(settings, above.settings, [])  # contradictions are reported later
        return SearchFile(settings, (*drawn, *above.drawn), {**self.search, **above.search})

    def fixed(self, names: Container[str]) -> "SearchFile":
        """Return the file without drawing settings of these names."""
        drawn = (entry for entry in self.drawn if _name(entry.value) not in names)
        return replace(self, drawn=tuple(drawn))


def is_search(recipe: object) -> bool:
    """Return whether a recipe is the file of a search."""
    return isinstance(recipe, str) and recipe in RECIPES and RECIPES[recipe].command == "tune"


def read_search(file: Path | None, recipe: str | None, errors: list[str]) -> SearchFile:
    """Return a settings file above the file of a search by name, and add faults to ``errors``."""
    read = SearchFile() if file is None else _read(file, errors)
    named = read.settings.get("recipe")
    if recipe is None and named is not None and is_search(named.value):
        recipe = str(named.value)
        settings = dict(read.settings)
        del settings["recipe"]
        read = replace(read, settings=settings)
    return read if recipe is None else _read(file_of(recipe), errors).below(read)


def _read(file: Path, errors: list[str]) -> SearchFile:
    known: dict[Any, Option] = {**SETTINGS, **SEARCH_FLAGS, DRAWN.name: DRAWN}
    found = read_values(file, known, errors, structured=DRAWN.name)
    drawn = found.pop(DRAWN.name, None)
    search = {name: found.pop(name) for name in SEARCH_FLAGS if name in found}
    settings = {name: entry for name, entry in found.items() if is_setting(name)}
    if drawn is None:
        return SearchFile(settings, (), search)
    if not isinstance(drawn.value, Mapping):
        errors.append(f"{drawn.origin} must have a line for each setting, like 'lr: {AS_RANGE}'.")
        return SearchFile(settings, (), search)
    texts = drawn_texts(drawn.value, f"{drawn.origin}:", errors)
    return SearchFile(settings, texts, search)


def drawn_texts(
    drawn: Mapping[str, object] | Sequence[str], origin: str, errors: list[str]
) -> tuple[SettingValue, ...]:
    """Return settings to draw as texts of ``--search``, and add faults to ``errors``.

    Args:
        drawn: by name, {"low": ..., "high": ..., "scale": "log"} for a range, a list of values, or
            either as text ("1e-4..1e-1:log", "0.1,1,10"); or texts such as "lr=0.1,1".
        origin: where they are given, in messages.
    """
    if not isinstance(drawn, Mapping):
        return tuple(SettingValue(text, origin) for text in drawn)
    named = {flag_name(name): value for name, value in drawn.items()}
    found = {name: _as_text(f"{origin} {name}", value, errors) for name, value in named.items()}
    return tuple(
        SettingValue(f"{name}={text}", origin) for name, text in found.items() if text is not None
    )


def _as_text(origin: str, value: object, errors: list[str]) -> str | None:
    """Return a range or a list as text; None if it is neither."""
    before = len(errors)
    if isinstance(value, Mapping):
        errors += (f"{origin}: {fault}" for fault in _faults_of_range(value))
        text = "..".join(str(value.get(end)) for end in ENDS)
        text += ":log" * (value.get("scale") == "log")
    elif isinstance(value, str) or _is_number(value):
        text = str(value)
    elif isinstance(value, Sequence) and all(isinstance(v, str) or _is_number(v) for v in value):
        text = ",".join(map(str, value))
        if not value or any("," in str(item) for item in value):
            errors.append(f"{origin}: a list needs at least one value, and none with a comma.")
    else:
        errors.append(f"{origin} must be a range like {AS_RANGE}, or a list of values.")
    return None if len(errors) > before else text


def _faults_of_range(value: Mapping[Any, object]) -> Iterator[str]:
    """Yield faults of the keys and values of a range."""
    known = (*ENDS, "scale")
    for key in value:
        if key not in known:
            yield f"a range has {', '.join(known)}, not {key}.{near(str(key), known)}"
    for end in ENDS:
        if end not in value:
            yield f"a range needs {end}, like {AS_RANGE}."
        elif not re.fullmatch(NUMBER, str(value[end])):
            yield f"{end} must be a number, not '{value[end]}'. Use a list for other values."
    if (scale := value.get("scale", "linear")) not in SCALES:
        yield f"scale must be {' or '.join(SCALES)}, not '{scale}'.{near(str(scale), SCALES)}"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _name(text: str) -> str:
    return text.partition("=")[0].strip().removeprefix("--").replace("-", "_")
