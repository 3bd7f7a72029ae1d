"""Search for the defaults of a head on vectors of texts: DP-Adam by set and epsilon.

    python benchmarks/text_rule.py FOLDER docs/data/text_rule.jsonl sms,banking77,film

FOLDER and the sets are those of texts.py. Heads are trained in plain torch on MiniLM's vectors of
four fifths of the training texts, with seeds 100 and 101, and scored on the last fifth. No test
text is read. Vectors are kept in the cache. A line has the set, epsilon, the settings and the mean
accuracy. What is in the file is not run again. At the end a table of all is printed.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lines
import torch
from head_rule import DELTA, Way, accuracy, trained
from texts import Study, parser_of

from dpmac_cli import resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.storage.progress import outcome

SEEDS, EPSILONS = (100, 101), (1.0, 8.0)
#: What texts began with, and what is tried in its place.
FIRST = Way(12, 20, 0.005, 0.95, random=True)
WAYS = (
    FIRST,
    *(Way(12, 20, 0.005, ema) for ema in (0.95, 0.9, 0.0)),
    *(Way(12, 20, rate, 0.9) for rate in (0.002, 0.003, 0.007, 0.01)),
    *(Way(12, epochs, rate, 0.9) for epochs, rate in ((10, 0.01), (40, 0.003), (40, 0.005))),
    *(Way(4, epochs, 0.01, 0.9) for epochs in (20, 40)),
)


def vectors(study: Study) -> tuple[Split, Split, int]:
    """Return vectors and labels of the training texts to train and to score on, and classes."""
    plan = resolve({**study.settings("minilm"), "epsilon": 1, "seed": 0, "device": "cpu"}).plan
    data = outcome(prepare(plan, torch.device("cpu"), make_keys(0))).data
    x, y = data.train.at(slice(None))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    parts = order[len(x) // 5 :], order[: len(x) // 5]
    one, two = (Split(x[rows], y[rows].long()) for rows in parts)
    return one, two, len(study.classes)


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table with a row per way of training."""
    columns = sorted({(line["set"], line["epsilon"]) for line in found})
    names = [f"{name}, {epsilon:g}" for name, epsilon in columns]
    yield f"| steps per epoch | epochs | rate | EMA | start | {' | '.join(names)} |"
    yield "|---" * (5 + len(names)) + "|"
    for way in WAYS:
        own = [line for line in found if line["way"] == asdict(way)]
        by_column = {(line["set"], line["epsilon"]): f"{line['accuracy']:.1f}" for line in own}
        cells = [by_column.get(column, "") for column in columns]
        start = "random" if way.random else "0"
        settings = f"{way.share} | {way.epochs} | {way.rate:g} | {way.ema:g} | {start}"
        yield f"| {settings} | {' | '.join(cells)} |"


def main() -> None:
    """Search what the file lacks, and print the table."""
    given = parser_of(__doc__).parse_args()
    torch.set_num_threads(given.threads)
    known = [(line["set"], line["epsilon"], line["way"]) for line in lines.read(given.file)]
    for described in given.sets.split(","):
        study = Study.of(given.folder, described)
        split, held_out, classes = vectors(study)
        for epsilon, way in itertools.product(EPSILONS, WAYS):
            if (study.name, epsilon, asdict(way)) in known:
                continue
            sigma = way.sigma(len(split), epsilon, DELTA)
            found = [
                accuracy(trained(split, way, sigma, seed, classes), held_out) for seed in SEEDS
            ]
            line = {"set": study.name, "epsilon": epsilon, "way": asdict(way)}
            lines.append(given.file, {**line, "accuracy": round(statistics.mean(found), 2)})
    print(*table(lines.read(given.file)), sep="\n")


if __name__ == "__main__":
    main()
