"""Keep the runs of a comparison in one file, and take them out again to go on.

A line of the file is a finished run: the name of its folder, and its small public files. Weights
and checkpoints are left behind.

    python benchmarks/study.py pack runs/table1 docs/data/table1.jsonl.xz
    python benchmarks/study.py unpack docs/data/table1.jsonl.xz runs/table1
    dpmac compare --config sample_configs/table1-mnist.yaml --out runs/table1
"""

import argparse
import json
from pathlib import Path

import lines

from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: Where a comparison keeps its runs.
RUNS = "runs"
LEFT_BEHIND = (folder.MODEL, folder.LOCK)


def pack(study: Path, file: Path) -> int:
    """Add a study's finished runs to a file; how many it then holds."""
    kept = {line["run"]: line for line in lines.read(file)}
    for run in sorted((study / RUNS).iterdir()):
        if _is_finished(run):
            found = (f for f in run.iterdir() if f.is_file() and f.name not in LEFT_BEHIND)
            texts = {f.name: f.read_text(encoding="utf-8") for f in sorted(found)}
            kept[run.name] = {"run": run.name, "files": texts}
    lines.write(file, (kept[name] for name in sorted(kept)))
    return len(kept)


def _is_finished(run: Path) -> bool:
    if not folder.reported_steps(run):
        return False
    return bool(json.loads((run / folder.REPORT).read_bytes())["state"] == "finished")


def unpack(file: Path, study: Path) -> int:
    """Lay out the runs of a file, where they are not there yet; how many it holds."""
    packed = lines.read(file)
    for line in packed:
        run = study / RUNS / line["run"]
        if not run.exists():
            run.mkdir(parents=True)
            for name, text in line["files"].items():
                files.write_atomically(run / name, text.encode())
    return len(packed)


def main() -> None:
    """Do one or the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    count = {"pack": pack, "unpack": unpack}[options.what](options.source, options.target)
    print(f"{count} runs in {options.target}")


if __name__ == "__main__":
    main()
