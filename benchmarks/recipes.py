"""Run recipes that come with the package, and compare accuracies with those that they state.

    python benchmarks/recipes.py docs/data/recipes.jsonl mnist-scatter digits --seeds 0,1,2

Each run is a line of the file, and is not run again. ``dpmac recipes`` lists the names.
"""

import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from common import append_line, parser_of, read_lines

from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve


def main() -> None:
    """Run what the file lacks, and print means and deviations."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    known = {(line["recipe"], line["seed"]) for line in read_lines(options.file)}
    for recipe, seed in product(options.recipes, map(int, options.seeds.split(","))):
        if (recipe, seed) not in known:
            with tempfile.TemporaryDirectory() as folder:
                plan = resolve(recipe=recipe, seed=seed, out=f"{folder}/run").plan
                report = finish(train_plan(plan)).report
            found = {"epsilon": report["epsilon"]} | {
                "accuracy": round(100 * report["scores"]["accuracy"]["value"], 2)
            }
            append_line(options.file, {"recipe": recipe, "seed": seed, **found})
    for recipe in options.recipes:
        rows = [line for line in read_lines(options.file) if line["recipe"] == recipe]
        scores = [row["accuracy"] for row in rows]
        spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
        print(f"{recipe}: {mean(scores):.2f}{spread} at epsilon {rows[0]['epsilon']:.4g}")


if __name__ == "__main__":
    main()
