"""Time and memory of a classifier of texts, from the command to the model, and started again.

    python benchmarks/text_time.py docs/data/text_time.jsonl 20000 --words 140

Texts are generated, and one of their words names the class. ``dpmac train --backbone minilm`` runs
as a command, first with an empty cache, then with the vectors that it computed. CPU seconds and the
peak of the memory are those that the system counts for the command; seconds until the first step
are by the clock. A line with both is added to the file.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import append_line, parser_of

from dpmac_cli.config.encoder_folder import read_encoder

CLASSES = ("home", "ward")
#: Columns of a generated table.
SCHEMA = "label: {{column: label, classes: [home, ward]}}\ncolumns: {{note: {{text: {tokens}}}}}\n"


def write_table(file: Path, count: int, words: int) -> None:
    """Write ``count`` generated texts of ``words`` words, each of which is one token."""
    known = read_encoder("minilm").reader(1).tokenizer.get_vocab()
    vocabulary = np.array([word for word in sorted(known, key=known.get) if word.isalpha()])
    draw = np.random.default_rng(0)
    with file.open("w") as table:
        table.write("note,label\n")
        for row in range(count):
            name = CLASSES[row % 2]
            text = draw.permutation([*draw.choice(vocabulary, words - 1), name])
            table.write(f"{' '.join(text)},{name}\n")


def cost_of(folder: Path, out: str) -> dict[str, float]:
    """Train once by the command line; return seconds, and the peak of memory in MB."""
    given = {"dataset": "notes.csv", "schema": "schema.yaml", "backbone": "minilm", "out": out}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "dpmac_cli", "train", *flags, "--epsilon", "1"]
    begun = time.monotonic()
    private = os.environ | {"DPMAC_CACHE_DIR": str(folder / "cache")}
    with subprocess.Popen([*command, "--device", "cpu"], cwd=folder, env=private) as run:
        first = _first_step(folder / out, run, begun)
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {run.returncode}.")
    wall, cpu = time.monotonic() - begun, used.ru_utime + used.ru_stime
    found = {"wall": wall, "cpu": cpu, "first_step": first, "memory": used.ru_maxrss / 1024}
    return {name: round(value, 1) for name, value in found.items()}


def _first_step(out: Path, run: "subprocess.Popen[bytes]", begun: float) -> float:
    """Return the seconds until the folder of a run is written, which is when steps begin."""
    while not os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if out.exists():
            return time.monotonic() - begun
        time.sleep(0.05)
    return time.monotonic() - begun


def main() -> None:
    """Measure, and print and keep the results as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("texts", type=int)
    parser.add_argument("--words", type=int, default=140)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "notes.csv", given.texts, given.words)
        (folder / "schema.yaml").write_text(SCHEMA.format(tokens=given.tokens))
        costs = {key: cost_of(folder, key) for key in ("first", "again")}
    given_as = {"texts": given.texts, "words": given.words, "tokens": given.tokens}
    append_line(given.file, given_as | costs)


if __name__ == "__main__":
    main()
