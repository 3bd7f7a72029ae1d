"""Names with characters that a terminal or a locale cannot encode."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

#: Environments with an encoding of one byte: of output only, and of file names, too.
ASCII_OUTPUT = {"PYTHONIOENCODING": "ascii"}
LATIN_OUTPUT = {"PYTHONIOENCODING": "latin-1"}
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CLASSES = ("Br\u00f6tchen", "K\u00e4se", "\u732b")
SHORT = ("--sigma", "4", "--steps", "2", "--model", "mlp", "--device", "cpu")


def photos() -> Path:
    draws, root = np.random.default_rng(0), Path("Fotos f\u00fcr alle \u732b")
    for part, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(CLASSES):
            place = root / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 100 + 50 * label, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"M\u00fcller{number}.png")
    return root


def typed(*command: object, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Type a command as in a shell with such a locale."""
    words = [sys.executable, "-m", "dpmac_cli", *map(str, command)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
    return subprocess.run(words, env=kept | environment, capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "environment", [ASCII_OUTPUT, LATIN_OUTPUT, ASCII_LOCALE], ids=["ascii", "latin-1", "locale"]
)
def test_every_command_prints_in_an_encoding_of_one_byte(environment: dict[str, str]) -> None:
    root, run = photos(), "l\u00e4uft"
    table = "gr\u00f6\u00dfe,Klasse\n" + "".join(f"{i % 7},{CLASSES[i % 2]}\n" for i in range(40))
    Path("Patient\u00e4ten.csv").write_text(table, encoding="utf-8")
    commands = (
        ("train", "--dataset", root, *SHORT, "--out", run),
        ("eval", run),
        ("eval", run, "--json"),
        ("predict", run, root / "test", "--out", "f\u00fcr.csv"),
        ("card", run),
        ("runs", "."),
        ("account", run),
        ("report", run),
        ("schema", "Patient\u00e4ten.csv"),
        ("cache",),
        ("train", "--dataset", "fehlt\u00fc"),
    )
    for command in commands:
        result = typed(*command, environment=environment)
        wanted = 2 if "fehlt\u00fc" in command else 0
        assert result.returncode == wanted, (command, result.stderr)
        assert b"Unicode" not in result.stderr
