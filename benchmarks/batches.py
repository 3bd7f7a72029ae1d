"""The six optimizers of the paper, each with the batch and rate that are best for it.

    python benchmarks/batches.py docs/data/batches.jsonl --epsilon 0.785 --device cuda

The networks and epochs are the paper's, the epsilons those of its noise. Batch and rate are chosen
on a seed that is not in the table: both are doubled and halved as long as the best is at an end.
The runs are on other seeds, the same for all optimizers. A line of the file is a run, and is not
run again.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from common import append_line, parser_of, read_lines

from dpmac_cli.accounting.account import Account
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import make_trainer

TUNED, SEEDS, EPOCHS = 100, (0, 1, 2, 3, 4), 5
#: Epsilons of each dataset, and the batch with which the search begins.
EPSILONS = {"mnist": (0.785, 2.3158, 7.4793), "cifar10": (2.435,)}
BATCHES = {"mnist": 3750, "cifar10": 1250}
#: The learning rate with which the search begins, by optimizer: of MNIST and of CIFAR-10.
RATES = {
    "dp-sgd": (2.0, 2.0),
    "adaclip": (1.0, 1.0),
    "dp-adam": (0.02, 0.004),
    "dp-adambc": (0.005, 0.001),
    "dp-macadam": (0.02, 0.004),
    "dp-macadambc": (0.005, 0.001),
}


class Cell(NamedTuple):
    """One optimizer at one epsilon of a dataset."""

    dataset: str
    epsilon: float
    optimizer: str


class Runs:
    """Runs of a file, by their settings; new ones are added to it."""

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device = file, device
        self._done = {_key(line): line["accuracy"] for line in read_lines(file)}

    def accuracy(self, cell: Cell, batch: int, rate: float, seed: int) -> float:
        """Return the test accuracy of a run in percent."""
        flags: dict[str, Any] = {**cell._asdict(), "batch_size": batch, "lr": rate, "seed": seed}
        if _key(flags) not in self._done:
            plan = resolve({**flags, "recipe": "paper", "epochs": EPOCHS, "device": self._device})
            keys = make_keys(seed)
            task = prepare(plan.plan, choose_device(self._device), keys)
            account = Account(event=plan.plan.event)
            trainer = make_trainer(plan.plan, task, keys, account)
            for _ in range(plan.plan.event.steps):
                trainer.step()
            found = round(100 * trainer.evaluate().accuracy, 2)
            append_line(self._file, {**flags, "accuracy": found, "device": self._device})
            self._done[_key(flags)] = found
        accuracy: float = self._done[_key(flags)]
        return accuracy

    def tuned(self, cell: Cell) -> tuple[int, float]:
        """Return the batch and rate that are best on the seed of the tuning."""
        rates: dict[int, float] = {}

        def of_batch(batch: float) -> float:
            def of_rate(rate: float) -> float:
                return self.accuracy(cell, int(batch), rate, TUNED)

            rates[int(batch)] = best(of_rate, RATES[cell.optimizer][cell.dataset == "cifar10"])
            return of_rate(rates[int(batch)])

        batch = int(best(of_batch, BATCHES[cell.dataset]))
        return batch, rates[batch]


def best(score: Callable[[float], float], start: float) -> float:
    """Return the best of ``start`` times powers of two, of which neither end is the best."""
    powers = {power: score(start * 2.0**power) for power in (-1, 0, 1)}
    while (chosen := max(powers, key=lambda power: powers[power])) in (min(powers), max(powers)):
        power = chosen + (1 if chosen == max(powers) else -1)
        powers[power] = score(start * 2.0**power)
    return start * 2.0**chosen


def main() -> None:
    """Tune each cell, run it on the other seeds, and print a row for each."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dataset", choices=EPSILONS, default="mnist")
    parser.add_argument("--epsilon", type=float, help="this one alone")
    options = parser.parse_args()
    runs = Runs(options.file, options.device)
    epsilons = [options.epsilon] if options.epsilon else EPSILONS[options.dataset]
    print("| epsilon | optimizer | batch | rate | accuracy |\n" + "|---" * 5 + "|")
    for epsilon, optimizer in product(epsilons, RATES):
        cell = Cell(options.dataset, epsilon, optimizer)
        batch, rate = runs.tuned(cell)
        found = [runs.accuracy(cell, batch, rate, seed) for seed in SEEDS]
        accuracy = f"{mean(found):.2f} ± {stdev(found):.2f}"
        print(f"| {epsilon:g} | {optimizer} | {batch} | {rate:g} | {accuracy} |", flush=True)


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in (*Cell._fields, "batch_size", "lr", "seed"))


if __name__ == "__main__":
    main()
