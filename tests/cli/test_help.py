"""The help of every command, as one hand would have written it."""

import re

import pytest

from tests.typed import dpmac

COMMANDS = ("train", "account", "compare", "eval", "runs", "doctor")
#: An option that takes a value, in typer's table: its name and what the value is.
OPTION = re.compile(r"│ +(--[a-z0-9-]+) {2,}(\S+) {2,}")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=str)
def test_what_a_value_is_stands_in_capitals_and_a_switch_has_none(command: tuple[str, ...]) -> None:
    said = dpmac(*command, "--help", columns=200).stdout
    assert not re.search(r"<\w+(\[\w+\])?>|[{}]|\[\[", said)
    for name, value in OPTION.findall(said):
        assert re.fullmatch(r"[A-Z.,|:=]+", value.replace("FILE.py", "FILE")), (name, value)
    assert re.search(r"│ +--help {2,}Show this message", said)


@pytest.mark.parametrize(
    ("command", "usage"),
    [("eval", "[OPTIONS] RUN"), ("account", "[OPTIONS] [RUN]"), ("runs", "[OPTIONS] [FOLDER]...")],
)
def test_arguments_are_named_alike(command: str, usage: str) -> None:
    said = dpmac(command, "--help", columns=200).stdout
    assert f"{command} {usage} " in said
    assert re.search(r"│ .*(RUN|FOLDER(\.\.\.)?) +PATH ", said)
