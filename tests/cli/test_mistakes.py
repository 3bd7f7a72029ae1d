"""What a newcomer plausibly does wrong, and all that the terminal then says, word for word.

The transcripts are in mistakes.md. ``python -m tests.cli.test_mistakes`` regenerates them and
prints what changed; add a command by adding its ``$ dpmac`` line in a block of its own.
"""

import contextlib
import difflib
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dpmac_cli.cli.app import app
from dpmac_cli.config.encoders import ENCODERS
from tests.digits_runs import contents
from tests.tiny_bert import write_encoder, write_network

TRANSCRIPTS = Path(__file__).with_name("mistakes.md")
HEADING = """# Mistakes

What a newcomer plausibly types, what dpmac then says, and its exit code. `test_mistakes.py` holds
the tool to it; lines on usage are left out.
"""
BLOCK = re.compile(r"```\n\$ dpmac ([^\n]*)\n(.*?)\[exit (\d+)\]\n```", re.DOTALL)
COMMAND = re.compile(r"^\$ dpmac (.*)$", re.MULTILINE)
#: A table with German numbers and dates.
STAYS = "day;cost\n" + "31.12.2020;28.570\n02.01.2021;1.200,50\n" * 20
COLUMNS = "columns:\n  day: {type: date, range: [2015-01-01, 2024-12-31]}\n"
#: Records of an export without values and cells, and its schema without words for them.
EXPORTED = "60;ja\nk.A.;-;A\n61;n/a;unbekannt\n"
EXPORT = """label: {column: ward, classes: [A, B]}
columns:
  age: {range: [0, 110], missing: input}
  smoker: {type: boolean, categories: [nein, ja], missing: input}
"""
#: A table of notes, and the packages that are installed where mistakes with them are made.
NOTES = "note,age,outcome\n" + "mild pain,40,home\nsevere pain,50,ward\n" * 20
OUTCOME = "label: {column: outcome, classes: [home, ward]}\ncolumns:\n  "
SITE = "site"
#: A search with a mistake in every line.
SEARCH = """dataset: digits
trials: few
lr: 0.5
seed: 0
search: {lr: 1}
epochs: 5:40
clip-norm: 10:1
batchsize: [64, 128]
sigma: 2
h1: 0:1
steps: 1,1
delta: [0.1, 0.2]
gamma: x
"""
NET = """from torch import nn


def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
"""


def transcripts() -> list[tuple[str, str, int]]:
    """Command, output and exit code of each."""
    found = BLOCK.findall(TRANSCRIPTS.read_text(encoding="utf-8"))
    return [(typed, said, int(code)) for typed, said, code in found]


def set_scene(folder: Path) -> None:
    """What lies about in the folder in which the mistakes are made, a finished run among it."""
    texts = {
        "notes.txt": "hello\n",
        "broken.yaml": "sigma: [0.5\nlr: 1\n",
        "settings.yaml": "dataset: digits\nlearning_rate: 0.1\nsigma: high\n",
        "both.yaml": "sigma: 1\nepsilon: 3\n",
        "there.html": "mine\n",
        "secure.yaml": "dataset: digits\nsecure: true\n",
        "seeded.yaml": "dataset: digits\nseed: 5\n",
        "open.yaml": "dataset: digits\nno-dp: true\n",
        "search.yaml": SEARCH,
        "net.py": NET,
        "stays.csv": STAYS,
        "number.yaml": "label: {column: cost, range: [0, 9000]}\n" + COLUMNS,
        "comma.yaml": "decimal: ','\nlabel: {column: cost, range: [0, 9000]}\n" + COLUMNS,
        "classes.yaml": "label: {column: cost, classes: [low, high]}\n" + COLUMNS,
        "dates.yaml": "label: {column: cost, range: [0, 9]}\ncolumns:\n  day: "
        "{range: [2015-01-01, 2024-12-31]}\n",
        "export.csv": "age;smoker;ward\n" + "40;ja;A\n50;nein;B\n" * 20 + EXPORTED,
        "words.yaml": EXPORT,
        "word.yaml": EXPORT.replace("label", "missing_words: k.A.\nlabel", 1),
        "clinic.csv": NOTES,
        "gaps.csv": NOTES + ",40,home\n" * 2,
        "note.yaml": OUTCOME + "note: {text: 16}\n  age: {range: [0, 120]}\n",
        "prose.yaml": "columns: {note: {text: 12}}\ndrop: [age, outcome]\n",
        "two.yaml": "columns: {note: {text: 9}, age: {range: [0, 99]}}\ndrop: [outcome]\n",
        "long.yaml": OUTCOME + "note: {text: 512}\n  age: {range: [0, 120]}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    _set_scene_of_texts(folder)
    (folder / "killed").mkdir()
    (folder / "killed" / "config.yaml").write_text("dataset: digits\n")
    (folder / "photos" / "cats").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "photos" / "cats" / "1.png")
    np.savez(folder / "table.npz", x=np.zeros((30, 4), np.float32), y=np.arange(30) % 3)
    np.savez(folder / "gap.npz", x=np.zeros((30, 4), np.float32), y=np.arange(30) % 2 * 999_999)
    np.savez(folder / "unlabelled.npz", x=np.zeros((30, 4), np.float32))
    with contextlib.chdir(folder):
        assert say("train --dataset digits --sigma 6 --steps 3 --seed 0 --out run --quiet") == (
            "",
            0,
        )


def _set_scene_of_texts(folder: Path) -> None:
    """Encoders that cannot be used beside one that can, and texts in another encoding."""
    (folder / "latin.csv").write_bytes((NOTES + "fi\u00e8vre,40,home\n").encode("latin-1"))
    for kind in ("home", "ward"):
        (folder / "letters" / kind).mkdir(parents=True)
        (folder / "letters" / kind / "1.txt").write_bytes("fi\u00e8vre".encode("latin-1"))
    write_encoder(folder / "encoder")
    write_network(folder / "gpt2", "gpt2", causal=True)
    write_encoder(folder / "t5", model_type="t5")
    (write_encoder(folder / "bare") / "tokenizer.json").rename(folder / "bare" / "vocab.txt")
    known = ENCODERS["minilm"]
    write_encoder(folder / SITE / known.folder)  # under the name of the package, but another one
    about = folder / SITE / f"{known.package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {known.package}\nVersion: 1.0\n")


def say(typed: str) -> tuple[str, int]:
    """What a command prints, without lines on usage, and its exit code."""
    with mock.patch.object(sys, "path", [SITE, *sys.path]):
        result = CliRunner().invoke(app, shlex.split(typed), env={"COLUMNS": "80", "NO_COLOR": "1"})
    kept = filter(None, map(str.strip, result.output.splitlines()))
    said = [line for line in kept if not line.startswith(("Usage: ", "Try 'dpmac"))]
    return "".join(f"{line}\n" for line in said), result.exit_code


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scene")
    set_scene(folder)
    return folder


@pytest.mark.promise("mistakes")
@pytest.mark.parametrize(("typed", "said", "code"), transcripts())
def test_a_mistake_is_answered_so_and_changes_nothing(
    scene: Path, typed: str, said: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own, beside net.py
    before = contents(scene)

    assert say(typed) == (said, code)

    assert code
    assert contents(scene) == before


def test_there_are_enough_of_them() -> None:
    assert len({typed for typed, _, _ in transcripts()}) >= 30
    assert len(transcripts()) == len(COMMAND.findall(TRANSCRIPTS.read_text(encoding="utf-8")))


def main() -> None:
    """Regenerate the transcripts of the same commands, and print what changed as a diff."""
    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        set_scene(Path(folder))
        with contextlib.chdir(folder):
            for typed in COMMAND.findall(before := TRANSCRIPTS.read_text(encoding="utf-8")):
                said, code = say(typed)
                blocks.append(f"\n```\n$ dpmac {typed}\n{said}[exit {code}]\n```\n")
    after = HEADING + "".join(blocks)
    TRANSCRIPTS.write_text(after, encoding="utf-8")
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(old, new, "before", "after", n=2))


if __name__ == "__main__":
    main()
