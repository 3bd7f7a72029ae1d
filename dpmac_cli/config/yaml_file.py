"""Settings in YAML files: flag names as keys, read without YAML's number parsing."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from dpmac_cli.config.fields import Option, flag_name
from dpmac_cli.config.flags import near_setting
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.config.sources import SettingValue, by_flag

#: First words of a config.yaml written by dpmac.
HEADER = "# Settings of a dpmac run."
NULL, BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
#: YAML node types in words.
NODE_WORDS: Mapping[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


def read_settings(file: Path, errors: list[str]) -> dict[str, SettingValue]:
    """Return the settings of a YAML file, and add its faults to ``errors``.

    A value is the text of a flag's value: YAML's number parsing (010 is 8, 1:30 is 90, 1e-5 is
    text) is not used. Null and false switches are ignored.
    """
    given: dict[str, SettingValue] = {}
    for name, origin, node in _entries(file, SETTINGS, "a setting", errors):
        if not isinstance(node, yaml.ScalarNode):
            errors.append(f"{origin} must be a single value, not {NODE_WORDS[type(node)]}.")
        elif (value := _value(node, SETTINGS[name])) is not None:
            given[name] = SettingValue(value, origin)
    return given


def _value(node: yaml.ScalarNode, option: Option) -> str | bool | None:
    """Return a value as text, or True for a switch; None if it is not given."""
    value: str | bool = str(node.value)
    if option.switch and node.tag == BOOL:
        value = yaml.SafeLoader.bool_values.get(node.value.lower(), value)
    return None if node.tag == NULL or value is False else value


def read_lists(file: Path, known: Mapping[str, Option], errors: list[str]) -> dict[str, list[str]]:
    """Return the settings of a YAML file, each with one or several values, as text.

    ``known`` are the allowed settings. Faults are added to ``errors``.
    """
    found: dict[str, list[str]] = {}
    for name, origin, node in _entries(file, known, "a setting of a study", errors):
        if isinstance(node, yaml.ScalarNode) and _value(node, known[name]) is None:
            continue
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not items or not all(isinstance(item, yaml.ScalarNode) for item in items):
            errors.append(f"{origin} must be a value or a list of values.")
        else:
            found[name] = [str(item.value) for item in items]
    return found


def to_yaml(recorded: Mapping[str, object]) -> str:
    """Return a file that repeats a run exactly, with --config and the same --seed."""
    body = yaml.safe_dump(by_flag(recorded), sort_keys=False)
    return f"{HEADER} Repeat it with dpmac train --config FILE; a seed is not saved.\n{body}"


def _entries(
    file: Path, known: Mapping[str, Option], what: str, errors: list[str]
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield name, origin and value of each setting, and add faults to ``errors``."""
    seen: set[str] = set()
    for key, node in _pairs(file, errors):
        written = key.value if isinstance(key, yaml.ScalarNode) else NODE_WORDS[type(key)]
        name = written.replace("-", "_")
        origin = f"{flag_name(name)} in {file}"
        if name not in known:
            errors.append(f"{written} in {file} is not {what}.{near_setting(written, known)}")
        elif name in seen:
            line = key.start_mark.line + 1
            errors.append(f"{origin} is given twice, again in line {line}. Give it once.")
        else:
            yield name, origin, node
        seen.add(name)


def _pairs(file: Path, errors: list[str]) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return keys and values of a YAML file as nodes, which contain their positions."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as failure:
        errors.append(f"--config: {file} cannot be read ({failure.strerror or failure}).")
        return []
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as failure:
        errors.append(
            f"--config: {file} is not valid YAML: {_fault_of_yaml(failure)}. "
            "Write lines like 'sigma: 0.8'."
        )
        return []
    if isinstance(root, yaml.MappingNode):
        return list(root.value)
    if root is not None and root.tag != NULL:
        found = NODE_WORDS[type(root)]
        errors.append(f"--config: {file} must contain lines like 'sigma: 0.8', not {found}.")
    return []


def _fault_of_yaml(failure: Exception) -> str:
    """Return the position and the reason of a YAML error."""
    if isinstance(failure, yaml.MarkedYAMLError) and failure.problem_mark:
        mark, problem = failure.problem_mark, failure.problem or "cannot be read"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem.removeprefix('but ')}"
    if isinstance(failure, RecursionError):
        return "lists or mappings are nested too deeply"
    return "it contains characters that are not UTF-8 text"
