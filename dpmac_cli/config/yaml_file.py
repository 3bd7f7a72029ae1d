"""Settings in YAML files: flag names as keys, read without YAML's number parsing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.config.fields import flag_name

#: First words of a config.yaml written by dpmac.
HEADER = "# Settings of a dpmac run."
NULL, BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
#: YAML node types in words.
NODE_WORDS: Mapping[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


def read_yaml(file: Path, errors: list[str]) -> dict[str, Any]:
    """Return the values in a YAML file by the names of settings, and add its faults to ``errors``.

    A value is the text of a flag's value, true, false or None, or a list of such: YAML's number
    parsing (010 is 8, 1:30 is 90, 1e-5 is text) is not used. A mapping becomes an empty one, which
    no setting accepts.
    """
    found: dict[str, Any] = {}
    for key, node in _pairs(file, errors):
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        if not name:
            errors.append(f"{file}: {NODE_WORDS[type(key)]} is not a setting.")
        elif name in found:
            line = key.start_mark.line + 1
            errors.append(
                f"{file}: --{flag_name(name)} is given twice, again in line {line}. Give it once."
            )
        elif (value := _value(node)) == []:
            errors.append(f"{file}: the list of --{flag_name(name)} is empty.")
        else:
            found[name] = value
    return found


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [*map(_value, node.value)]
    if not isinstance(node, yaml.ScalarNode):
        return {}
    if node.tag == BOOL and node.value.lower() in ("true", "false"):
        return node.value.lower() == "true"
    return None if node.tag == NULL else str(node.value)


def to_yaml(recorded: Mapping[str, object]) -> str:
    """Return a file that repeats a run exactly, with --config and the same --seed."""
    named = {flag_name(name): value for name, value in recorded.items()}
    body = yaml.safe_dump(named, sort_keys=False)
    return f"{HEADER} Repeat it with dpmac train --config FILE; a seed is not saved.\n{body}"


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
