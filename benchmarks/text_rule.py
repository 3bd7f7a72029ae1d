"""Search for the defaults of a head on vectors of texts: DP-Adam by set and epsilon.

    python benchmarks/text_rule.py FOLDER docs/data/text_rule.jsonl sms,banking77,film,bbc:256

FOLDER and the sets are those of texts.py. Heads are trained in plain torch on MiniLM's vectors of
four fifths of the training texts, and scored on the last fifth. No test text is read. Vectors are
kept in the cache. A line has the set, epsilon, the settings, the form of the features and of the
first weights (null: vectors alone, and weights of 0), and the mean accuracy: of seeds 100 and 101,
and of ten seeds with a form. What is in the file is not run again. At the end two tables of all are
printed, and a third of heads that begin at 0 and at names by signal_of_class.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lines
import numpy as np
import torch
from head_rule import DELTA, Way, accuracy, trained
from texts import Study, parser_of
from torch import Tensor

from dpmac_cli import ArrayData, resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.models.class_names import NAME_SCALE, class_vectors, signal_of_class
from dpmac_cli.models.encoders import TextEncoder
from dpmac_cli.models.text_encoder import WRITTEN_SCALE, TextFeatures
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.storage.progress import outcome

EPSILONS = (1.0, 8.0)
#: Sets that settings are chosen on; others are for where heads begin only.
TUNED = ("sms", "banking77", "film")
#: What texts began with, and what is tried in its place.
FIRST = Way(12, 20, 0.005, 0.95, random=True)
WAYS = (
    FIRST,
    *(Way(12, 20, 0.005, ema) for ema in (0.95, 0.9, 0.0)),
    *(Way(12, 20, rate, 0.9) for rate in (0.002, 0.003, 0.007, 0.01)),
    *(Way(12, epochs, rate, 0.9) for epochs, rate in ((10, 0.01), (40, 0.003), (40, 0.005))),
    *(Way(4, epochs, 0.01, 0.9) for epochs in (20, 40)),
)


@dataclass(frozen=True)
class Form:
    """Features beside vectors, and first weights.

    Attributes:
        written: factor of the numbers on how a text is written; 0 without them.
        common: whether vectors lose what the names of the classes have in common.
        names: size of the first weights over the vectors of the names. exchanged: whether each
            class has the name of another.
    """

    written: float = 0
    common: bool = False
    names: float = 0
    exchanged: bool = False


#: What texts begin with at little noise, and at much.
AT_ZERO, AT_NAMES = (
    Form(WRITTEN_SCALE, common=True),
    Form(WRITTEN_SCALE, common=True, names=NAME_SCALE),
)
#: Epsilons at which both are compared.
COMPARED = {"banking77": (1.5, 2.0, 3.0), "bbc": (0.2, 0.5, 0.7, 1.0, 3.0), "film": (0.02, 0.05)}
#: Way of training with each form, and with the last at other rates.
WITH_FORMS = tuple(
    (Way(12, 20, rate, 0.9), form)
    for rate, form in (
        *((0.005, Form(written)) for written in (0, 4, 8, 16, 32)),
        (0.005, AT_ZERO),
        *((0.005, Form(WRITTEN_SCALE, common=True, names=names)) for names in (0.5, 0.7, 1)),
        (0.005, Form(WRITTEN_SCALE, common=True, names=NAME_SCALE, exchanged=True)),
        *((rate, AT_NAMES) for rate in (0.003, 0.007)),
    )
)
DEFAULT = Way(12, 20, 0.005, 0.9)
PLAIN, FORMED = range(100, 102), range(100, 110)


@dataclass(frozen=True)
class Vectors:
    """Features of a set's training texts: to train and to score on, and of its names.

    Attributes:
        one, two: vectors, how texts are written, and labels.
        names: vectors of the names of the classes, of norm 1, shape (classes, width).
    """

    one: Split
    two: Split
    names: Tensor

    @classmethod
    def of(cls, study: Study) -> "Vectors":
        """Compute or read them. As numbers to predict, classes have no names to begin at."""
        texts, labels = zip(*study.rows["train"], strict=True)
        y = np.array([study.classes.index(label) for label in labels], np.float64)
        data = ArrayData(np.array(texts, object), y, target_low=0, target_high=len(study.classes))
        settings = {"dataset": data, "backbone": "minilm", "tokens": study.tokens, "device": "cpu"}
        plan = resolve({**settings, "test_fraction": 0.2, "epsilon": 1, "seed": 0}).plan
        found = outcome(prepare(plan, torch.device("cpu"), make_keys(0)))
        features, encoder = found.model.get_submodule("frozen"), plan.network.features
        assert isinstance(features, TextFeatures)
        assert isinstance(encoder, TextEncoder)
        sides = found.data.train, found.data.test
        targets = torch.cat([side.labels.flatten() for side in sides])
        numbers = torch.from_numpy(np.unique(targets.numpy(), return_inverse=True)[1])
        labels = torch.split(numbers, [len(side) for side in sides])
        one, two = (
            Split(side.at(slice(None))[0].flatten(1), own)
            for side, own in zip(sides, labels, strict=True)
        )
        return cls(one, two, class_vectors(features, encoder, study.classes))

    def signal(self, way: Way, epsilon: float) -> float:
        """Return the signal of a class at an epsilon; see ``signal_of_class``."""
        n, steps = len(self.one), way.share * way.epochs
        return signal_of_class(n / way.share, steps, way.sigma(n, epsilon, DELTA), len(self.names))

    def formed(self, form: Form) -> tuple[Split, Split, Tensor]:
        """Return features in a form, and first weights, shape (classes, features + 1)."""
        width = self.names.shape[1]
        mean = self.names.mean(0)
        common = mean / mean.norm() if form.common else torch.zeros(width)
        parts = []
        for split in (self.one, self.two):
            vectors, written = torch.split(split.images, [width, WRITTEN], 1)
            own = vectors - torch.outer(vectors @ common, common)
            scaled = [written * (form.written / WRITTEN_SCALE)] if form.written else []
            parts.append(Split(torch.cat([own, *scaled], 1), split.labels))
        start = torch.zeros(len(self.names), parts[0].images.shape[1] + 1)
        names = self.names.roll(1, 0) if form.exchanged else self.names
        start[:, :width] = form.names * (names - mean)
        return parts[0], parts[1], start


def scored(vectors: Vectors, epsilon: float, way: Way, form: Form, seeds: Sequence[int]) -> float:
    """Return the mean accuracy over seeds, in percent."""
    one, two, start = vectors.formed(form)
    sigma, classes = way.sigma(len(one), epsilon, DELTA), len(start)
    begin = None if way.random else start
    found = [accuracy(trained(one, way, sigma, seed, classes, begin), two) for seed in seeds]
    return round(statistics.mean(found), 2)


def table(found: Sequence[Mapping[str, Any]], *, formed: bool) -> Iterator[str]:
    """Yield the lines of a table with a row per way of training, or per form."""
    found = [
        line
        for line in found
        if (line["form"] is not None) == formed and line["epsilon"] in EPSILONS
    ]
    columns = sorted({(line["set"], line["epsilon"]) for line in found})
    names = [f"{name}, {epsilon:g}" for name, epsilon in columns]
    titles = "how written | in common | names | rate" if formed else "steps per epoch | epochs"
    titles += "" if formed else " | rate | EMA | start"
    yield f"| {titles} | {' | '.join(names)} |"
    yield "|---" * (titles.count("|") + 1 + len(names)) + "|"
    rows = WITH_FORMS if formed else tuple((way, None) for way in WAYS)
    for way, form in rows:
        kind = None if form is None else asdict(form)
        own = [line for line in found if (line["way"], line["form"]) == (asdict(way), kind)]
        by_column = {(line["set"], line["epsilon"]): f"{line['accuracy']:.1f}" for line in own}
        cells = " | ".join(by_column.get(column, "") for column in columns)
        if form is None:
            start = "random" if way.random else "0"
            settings = f"{way.share} | {way.epochs} | {way.rate:g} | {way.ema:g} | {start}"
        else:
            size = f"{form.names:g}" + ", exchanged" * form.exchanged
            common = "removed" if form.common else "kept"
            settings = f"{form.written:g} | {common} | {size} | {way.rate:g}"
        yield f"| {settings} | {cells} |"


def compared(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of where heads begin, in the order of the signal of a class."""
    yield "| signal of a class | set | epsilon | at 0 | at names |"
    yield "|---|---|---|---|---|"
    own = [line for line in found if line["way"] == asdict(DEFAULT) and line["form"]]
    for line in sorted(own, key=lambda line: float(line["signal"])):
        if line["form"] == asdict(AT_ZERO):
            kind = {key: line[key] for key in ("set", "epsilon")} | {"form": asdict(AT_NAMES)}
            other = next(row for row in own if kind.items() <= row.items())
            scores = f"{line['accuracy']:.1f} | {other['accuracy']:.1f}"
            yield f"| {line['signal']:.0f} | {line['set']} | {line['epsilon']:g} | {scores} |"


def tried(name: str) -> Iterator[tuple[float, Way, Form | None]]:
    """Yield epsilons, ways and forms that are tried on a set."""
    if name in TUNED:
        ways: list[tuple[Way, Form | None]] = [*((way, None) for way in WAYS), *WITH_FORMS]
        yield from ((epsilon, *kind) for epsilon in EPSILONS for kind in ways)
    for epsilon in COMPARED.get(name, ()):
        yield from ((epsilon, DEFAULT, form) for form in (AT_ZERO, AT_NAMES))


def main() -> None:
    """Search what the file lacks, and print the tables."""
    given = parser_of(__doc__).parse_args()
    torch.set_num_threads(given.threads)
    known = [
        (line["set"], line["epsilon"], line["way"], line["form"]) for line in lines.read(given.file)
    ]
    for described in given.sets.split(","):
        study = Study.of(given.folder, described)
        vectors = Vectors.of(study)
        for epsilon, way, form in tried(study.name):
            kind = None if form is None else asdict(form)
            if (study.name, epsilon, asdict(way), kind) in known:
                continue
            seeds = PLAIN if form is None else FORMED
            percent = scored(vectors, epsilon, way, form or Form(), seeds)
            line = {"set": study.name, "epsilon": epsilon, "way": asdict(way), "form": kind}
            signal = {"signal": round(vectors.signal(way, epsilon), 1)} if form else {}
            lines.append(given.file, {**line, **signal, "accuracy": percent})
    found = lines.read(given.file)
    parts = table(found, formed=False), table(found, formed=True), compared(found)
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
