"""From the prompt and back: ``dpmac train --dataset mnist`` beside a plain torch script.

Both are run as commands, in turn, each from a fresh process; a ratio is that of two neighbours.

    python benchmarks/whole_run.py --data-dir DIR --json docs/data/whole_run.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

OPTIMIZERS = ("dp-sgd", "dp-macadam")


def seconds(*command: str) -> float:
    """Of a command, which must succeed."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - begin


def train(data_dir: Path, epochs: int | None, optimizer: str) -> float:
    """Seconds of a private run; of one step where no epochs are given."""
    length = ("--steps", "1") if epochs is None else ("--epochs", str(epochs))
    with tempfile.TemporaryDirectory() as where:
        out, data = ("--out", f"{where}/run"), ("--data-dir", str(data_dir))
        chosen = ("--dataset", "mnist", "--optimizer", optimizer, "--sigma", "0.5")
        return seconds("-m", "dpmac_cli", "train", *chosen, *length, *out, *data)


def plain(data_dir: Path, epochs: int) -> float:
    """Seconds of the plain script."""
    script = str(Path(__file__).parent / "plain_mnist.py")
    return seconds(script, "--data-dir", str(data_dir), "--epochs", str(epochs))


def main() -> None:
    """Time, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for epochs in (1, 5):
        for optimizer in OPTIMIZERS:
            pairs = [
                (plain(options.data_dir, epochs), train(options.data_dir, epochs, optimizer))
                for _ in range(options.rounds)
            ]
            rows.append(
                {
                    "epochs": epochs,
                    "optimizer": optimizer,
                    "plain_s": round(median(base for base, _ in pairs), 2),
                    "dpmac_s": round(median(mine for _, mine in pairs), 2),
                    "ratio": round(median(mine / base for base, mine in pairs), 2),
                }
            )
    first = median(train(options.data_dir, None, "dp-macadam") for _ in range(options.rounds))
    lines = ["| epochs | optimizer | plain, s | dpmac, s | times plain |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['epochs']} | {row['optimizer']} | {row['plain_s']} | {row['dpmac_s']} | "
        f"{row['ratio']} |"
        for row in rows
    ]
    lines.append(f"\nOne step, evaluation and report included: {first:.1f} s.")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        document = {"rows": rows, "one_step_s": round(first, 2)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
