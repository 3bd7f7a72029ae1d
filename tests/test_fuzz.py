"""Whatever is typed or damaged ends with a documented exit code, and no damaged model is scored."""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.runs import folder
from tests.digits_runs import train_digits
from tests.typed import dpmac

ODD = ("", "0", "-1", "1e999", "nan", "\u00e4", "--", "a,b", "1:2", "x" * 300, "0.5", "3", "all")
FLAGS = (
    "optimizers",
    "seeds",
    "accountant",
    "risk",
    "sigm",
    *(n.replace("_", "-") for n in SETTINGS),
)
#: What may happen to the bytes of a file; None if it is removed.
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda body: body[: len(body) // 2],
    "flipped": lambda body: body[:-9] + bytes(one ^ 4 for one in body[-9:-8]) + body[-8:],
    "emptied": lambda body: b"",
    "nested": lambda body: b"[" * 9999,
    "removed": lambda body: None,
}


@pytest.mark.long
@pytest.mark.parametrize("command", ["account", "compare --dry-run --recipe paper --out new"])
def test_no_line_ends_in_a_traceback(command: str) -> None:
    draw = random.Random(command)
    for _ in range(30):
        flags = [(f"--{draw.choice(FLAGS)}", draw.choice(ODD)) for _ in range(draw.randrange(4))]
        result = dpmac(*command.split(), *itertools.chain(*flags))
        assert result.exit_code in (0, 2, 3), (flags, result.output)
        assert "unexpectedly" not in result.output
        assert result.exit_code == 0 or result.stderr.strip()


@pytest.mark.long
@pytest.mark.promise("fuzz")
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_of_any_kind_breaks_a_promise(damage: str) -> None:
    run = train_digits(out="whole").folder
    for file in filter(Path.is_file, run.rglob("*")):
        shutil.copytree(run, "run", dirs_exist_ok=True)
        there = Path("run", file.relative_to(run))
        body = DAMAGES[damage](file.read_bytes())
        there.unlink() if body is None else there.write_bytes(body)
        for command in ("eval", "account", "card", "runs", "train --resume"):
            result = dpmac(*command.split(), "." if command == "runs" else "run")
            assert result.exit_code in (0, 2, 4), (command, file, result.output)
            assert "unexpectedly" not in result.output, (command, file)
            assert result.exit_code or command != "eval" or file.name != folder.MODEL
