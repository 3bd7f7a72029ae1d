"""Make the reference pages from the program and its schemas.

``python docs/generate.py`` writes those that are in the tree. The site builds the others.
"""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.cli.app import COMMANDS as CALLED
from dpmac_cli.cli.app import load_command
from dpmac_cli.cli.options import group_of
from dpmac_cli.config.datasets import DATASETS, Dataset
from dpmac_cli.config.defaults import EPSILON, completed
from dpmac_cli.config.facts import dataset_of
from dpmac_cli.config.flags import (
    OneOf,
    choices_of,
    default_of,
    flag_name,
    help_of,
    is_switch,
    kind_of,
    parts,
)
from dpmac_cli.config.networks import BACKBONES, FEATURES, MODELS
from dpmac_cli.config.plan import NOT_RECORDED
from dpmac_cli.config.records import Images, Numbers
from dpmac_cli.config.settings import GROUPS, NOT_BOTH, SETTINGS, Settings
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.report import Report
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies.written import Study
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.language_model import NETWORK

#: Limits of a number in words, by their names in ``Field``.
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
#: What a value may be, in words.
KINDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
DOCS = Path(__file__).parent
API = """\
# Python API

The names that programs can rely on, from their docstrings. [From Python](library.md) shows how to
use them. `help(dpmac_cli.train)` prints the same text.
"""
#: Headings of that page, by the package or module that the names come from.
API_GROUPS = {
    "data": "Records in memory",
    "release": "Runs and models",
    "runs": "Events of a run",
    "training": "Private steps on your own batches, and records of torch datasets",
    "config": "Settings",
    "accounting": "Privacy costs",
    "silo": "Federations",
    "estimators": "Estimators of scikit-learn",
    "studies": "Studies",
    "optim": "Your own optimizer",
    "tasks": "Your own task",
    "dp": "Regions, mechanisms and moments",
    "randomness": "Sampling and randomness",
    "errors": "Failures",
}
INTRODUCTION = """\
# Settings

Every setting of `dpmac train`, by the groups of its help (`python docs/generate.py` writes this
page). A setting has one name everywhere: `--batch-size 128` as a flag, `batch-size: 128` in the
YAML file of `--config`, `batch_size=128` in [`resolve`](library.md#train). Flags win over the file.
A switch is given as a flag alone, or as `true`. The parts of a text with commas may be a list in a
file or a program: `feature-range: [0, 1]`, `class_weights=(1, 15)`. All settings are validated
before anything is done, and all errors are reported at once. `dpmac compare` takes the same
settings with several values each, except for those that [its section](commands.md#dpmac-compare)
lists.
"""
PAPERS = """\
With `--sigma` or `--recipe paper`, as in the paper. With `--epsilon`, see
[the best recipe](#the-best-recipe).
"""
COMMANDS = """\
# Commands

`dpmac COMMAND --help` prints the same text.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | a bug in dpmac |
| 2 | usage or input, or output that could not be written: the message says what, why and what \
to do |
| 3 | the privacy budget is infeasible or spent |
| 4 | a model does not fit the data or mixes samples, training diverged, memory ran out, the \
device failed, a run of a comparison failed, or an audit contradicts a claim |
| 130 | interrupted by Ctrl-C or SIGTERM; the run so far is written and can be resumed |
"""
REPORT = """\
# Report

`dpmac train` writes `report.json`: the settings, what was done to the records and what that costs,
the network, the scores, and what all of it means in words. The model card, the web page,
`dpmac eval`, `dpmac runs` and `dpmac compare` show what it says. The header of `model.safetensors`
is its first half, up to `sentences`.

## From a shell

```sh
jq .epsilon run/report.json                           # upper bound, at .delta
jq .scores.accuracy.value run/report.json             # of the published model
jq '.scores.accuracy | [.low, .high]' run/report.json # 95% interval, for records like these
jq .scores.accuracy.constant run/report.json          # accuracy of the largest class
jq -r .sentences.guarantee run/report.json            # what epsilon means
jq -r .sentences.risk run/report.json                 # what an attacker can learn
jq -r '.sentences.not_covered[]' run/report.json      # what epsilon does not cover
jq .settings.optimizer run/report.json                # any setting, by its name
jq '[.events[] | select(.records == "training") | .steps] | add' run/report.json
jq -r '[.data.name, .settings.optimizer, .epsilon, .state] | @tsv' run/report.json
```

## Example

A run on digits, shortened:

```json
{
  "version": 2,
  "settings": {"dataset": "digits", "model": "mlp-small", "batch_size": 128, "sigma": 6.0,
               "optimizer": "dp-macadam", "lr": 0.005, "epochs": 2, "delta": 1e-05},
  "data": {"name": "digits", "user_supplied": false, "train_size": 1437, "test_size": 360,
           "unit": null,
           "records": {"kind": "images", "shape": [1, 8, 8]}, "classes": ["0", "1"]},
  "network": {"name": "mlp-small", "parameters": 4810, "trained": 4810, "steps": 24,
              "calibration": null},
  "features": null,
  "events": [{"sampling_rate": 0.0891, "noise_multiplier": 6.0, "steps": 24, "sampler": "poisson",
              "steps_per_epoch": 12, "records": "training", "histogram": false}],
  "epsilon": 0.2535,
  "delta": 1e-05,
  "risk": {"attacks": [{"false_positive_rate": 0.01, "true_positive_rate": 0.0131}], "mu": 0.0941},
  "search": null,
  "seeded": false,
  "secure": false,
  "sentences": {"guarantee": "Adding or removing any one training record ...",
                "risk": "An attacker who accepts 1 false alarm in 100 ...",
                "not_covered": ["Other runs on the same records: ..."]},
  "scores": {"samples": 360, "loss": 0.61, "noise": null,
             "accuracy": {"value": 0.8, "low": 0.755, "high": 0.84, "constant": 0.1222},
             "confusion": [[27, 0], [0, 29]]},
  "environment": {"dpmac": "0.4.0", "torch": "2.14.1", "device": "cpu", "seconds": 1.2},
  "state": "finished"
}
```

- Events cost epsilon at delta: `dpmac account run` recomputes it.
- Scores are exact, and so tell of the test records, unless `noise` is not null (`--cover-scores`).
- `settings` has no seed, no path of the machine, and nothing that has no effect.
- A file of an older version of dpmac is not read: train again, or read it with that version.

## Every key

From the JSON Schemas [report.schema.json](report.schema.json) and
[compare.schema.json](compare.schema.json).
"""
SILENT = """\
# Situations in which training can be silently wrong

[Other tools](comparison.md#silent-failures) has the summary. These are all {count} situations, with
the outcome of dpmac and of Opacus {opacus} in each:

    PYTHONPATH=. python benchmarks/silent.py dpmac hooks ghost docs/data/silent.json

Each situation is a small network or loop of `tests/silent/situations.py` that takes two steps.
Noise is off, and all six records are in every batch. Each step is compared with a float64 oracle,
which computes and clips the gradient of each record on a network that sees no other record. Each
record is also left out in turn.

- *right*: the relative error of each step is below 2e-3, and leaving out any record moves a step
  by at most lr C / B
- *refused*: an exception. That of dpmac names the cause and a remedy, and depends on no record
- **wrong**: no exception, and a step differs from the oracle's; followed by the relative error
- **open**: one record moves a step by more than lr C / B, so the epsilon of the accountant is too
  low; followed by the move, in units of that bound

Opacus is used as its guides describe, with per-sample gradients by hooks and with ghost clipping.
Any exception of Opacus or torch counts as a refusal. A dash is a setting that Opacus does not have.

"""
#: Trainers of that page, by their keys in its data.
SIDES = {
    "dpmac": "dpmac",
    "hooks": "Opacus, hooks",
    "ghost": "Opacus, ghost",
}
MUTANTS = """\
# Injected bugs

Bugs that were put into the program, one at a time, each with the test that found it.
{killed} of {mutants} were found when each was last run. The bugs themselves are in
[benchmarks/mutants.toml](../benchmarks/mutants.toml).

    python benchmarks/mutants.py --out docs/data/mutants.json    # half an hour

"""
OUTCOMES = ("right", "refused", "wrong", "open")
#: Outcomes that the table shows with their measure.
MEASURED = {"wrong": "error", "open": "moved"}
#: Contenders of plain torch, of which the faster one is shown.
PLAIN = ("plain-adam", "plain-adam, memory kept")
#: What the table of texts has: runs by the defaults.
EPOCHS, TOKENS, EPSILONS = 20, 128, (1.0, 3.0, 8.0, None)
KEY = ("key", "type", "description")
CHOICES = {
    "Networks": {name: kind.about for name, kind in MODELS.items() if name != NETWORK},
    "Backbones": {
        name: f"{kind.width:,} features, {kind.size} pixels, {kind.top1:.1%}, {kind.licence}"
        for name, kind in BACKBONES.items()
    },
    "Features": {name: features.about for name, features in FEATURES.items()},
    "Samplers": {name: sampling.summary for name, sampling in SAMPLERS.items()},
}
#: What is said above a table of choices.
ABOUT = {
    "Backbones": "Public networks of images, trained on ImageNet, with their published accuracy "
    "there.\n",
}
#: Limits that no one reaches: numbers of seven digits, and powers of ten.
ENDLESS = re.compile(r"000,000|\de[-+]")
#: Settings whose defaults a data set brings, by the names of both.
OF_DATA = ("model", "sigma", "batch_size", "epochs", "clip_norm", "h1", "h2", "physical_batch")


def configuration() -> str:
    """Return the page of the settings."""
    page = [INTRODUCTION]
    for group in dict.fromkeys(GROUPS.values()):
        rows = [
            (f"`--{flag_name(name)}`", what(field), default(field), about(name, field))
            for name, field in SETTINGS.items()
            if GROUPS[name] == group
        ]
        page += [f"## {group}\n", table(("setting", "value", "default", "description"), rows)]
    page += ["## By data set\n", PAPERS, by_data_set(), samples_at_a_time()]
    page += ["Learning rates:\n", learning_rates(), "## By optimizer\n", by_optimizer()]
    page += ["## The best recipe\n", by_best()]
    page += ["## What does not go together\n", exclusions()]
    for title, known in CHOICES.items():
        named = [(f"`{name}`", said) for name, said in known.items()]
        page += [f"## {title}\n", ABOUT.get(title, ""), table(("name", "description"), named)]
    return "\n".join(page)


def commands() -> str:
    """Return the page of the commands."""
    known = {name: load_command(name) for name in CALLED}
    parts = [COMMANDS]
    for name, command in known.items():
        parts += [f"## dpmac {name}\n", usage(name, command), explanation(command.help)]
        settings = {param.name for param in command.params} & set(SETTINGS)
        shared = len(settings) > len(SETTINGS) // 2
        own = [param for param in command.params if not (shared and param.name in SETTINGS)]
        options = [param for param in own if param.param_type_name == "option"]
        for group in dict.fromkeys(map(group_of, options)):
            rows = [option(param) for param in options if group_of(param) == group]
            parts.append(table((group, "value", "default", "description"), rows))
        if shared:
            left = [f"`--{flag_name(setting)}`" for setting in SETTINGS if setting not in settings]
            but = f", except {', '.join(left)}" if left else ""
            parts.append(f"All [settings](configuration.md) are options too{but}.\n")
    return "\n".join(parts)


def usage(name: str, command: Any) -> str:
    """Return how a command is typed."""
    places = [param for param in command.params if param.param_type_name == "argument"]
    shown = [param.metavar if param.required else f"[{param.metavar}]" for param in places]
    return "```text\n" + " ".join(["dpmac", name, *shown, "[OPTIONS]"]) + "\n```\n"


def explanation(text: str) -> str:
    """Return the help of a command with its examples as code."""
    lines = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    lines = [line.removeprefix("Example: ") for line in lines if line != "Examples:"]
    parts = []
    for is_code, group in groupby(lines, lambda line: line.startswith("dpmac ")):
        if is_code:
            parts.append("```text\n" + "\n".join(group) + "\n```\n")
        else:
            parts += [escaped(line) + "\n" for line in group]
    return "\n".join(parts)


def option(param: Any) -> tuple[str, str, str, str]:
    """Return the row of an option: its flag, value, default and help."""
    text, _, otherwise = (param.help or "").partition(" [default: ")
    value = f"`{param.metavar}`" if param.metavar else "switch"
    default = escaped(otherwise.rstrip("]")) or ("none" if param.metavar else "off")
    return f"`{param.opts[0]}`", value, default, escaped(text)


def escaped(text: str) -> str:
    """Return text with what Markdown would take for markup as code, and flags unbroken."""
    return re.sub(r"(?<![\w`])(--[a-z][\w-]*)", r"`\1`", text).replace("|", "\\|")


def report() -> str:
    """Return the page of the keys of report.json and compare.json."""
    parts = [REPORT]
    for name, text in (("report", report_schema()), ("compare", compare_schema())):
        described = json.loads(text)
        schema = inlined(described, described["$defs"])
        parts += [f"### {name}.json\n", schema["description"] + "\n"]
        rows = list(dict.fromkeys(keys(schema)))
        parts.append(table(KEY, [row for row in rows if not re.search(r"[.\[]", row[0])]))
        for top, group in groupby(rows, lambda row: re.split(r"[`.\[]", row[0])[1]):
            below = [row for row in group if row[0] != f"`{top}`"]
            parts += [f"#### {top}\n", table(KEY, below)] if below else []
    return "\n".join(parts)


def report_schema() -> str:
    """Return the JSON Schema of report.json."""
    return schema_of(Report)


def compare_schema() -> str:
    """Return the JSON Schema of compare.json."""
    return schema_of(Study)


def schema_of(model: type[BaseModel]) -> str:
    """Return the JSON Schema of what a model writes."""
    schema = model.model_json_schema(mode="serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(untitled({**head, **schema}), indent=2) + "\n"


def untitled(schema: Any) -> Any:
    """Return a schema without generated titles, with each description in one line."""
    if isinstance(schema, list):
        return [untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: untitled(part) for name, part in schema.items()}
    if isinstance(schema.get("title"), str):
        del kept["title"]
    if isinstance(schema.get("description"), str):
        kept["description"] = " ".join(schema["description"].split())
    return kept


def inlined(schema: Any, parts: Mapping[str, Any]) -> Any:
    """Return a schema with its parts in place of references to them."""
    if isinstance(schema, list):
        return [inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    return {
        name: inlined(part, parts) for name, part in {**named, **schema}.items() if name != "$ref"
    }


def keys(schema: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, type and description of all properties of a schema, with those below them."""
    for name, inner in schema.get("properties", {}).items():
        key = f"{above}{name}"
        yield f"`{key}`", kind(inner), inner.get("description", "").replace("|", "\\|")
        for each in (inner, *inner.get("anyOf", ())):
            yield from keys(each, f"{key}.")
            yield from keys(each.get("items", {}), f"{key}[].")


def kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a value, or all values that it can have."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(each) for each in schema["anyOf"]))
    types = schema.get("type", "any")
    words = [types] if isinstance(types, str) else types
    if "items" in schema:
        words = [f"array of {kind(schema['items'])}" if w == "array" else w for w in words]
    return " or ".join(words)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def what(field: FieldInfo) -> str:
    """Return what a setting may be."""
    if is_switch(field):
        return "switch"
    choices = choices_of(field)
    if choices.known:
        return OneOf([f"`{name}`" for name in choices.names], choices.besides).known
    kind = KINDS[kind_of(field)]
    told = bounds(field)
    return f"{kind}, {told}" if told and not ENDLESS.search(told) else kind


def bounds(field: FieldInfo) -> str:
    """Return the limits of a number in words: "above 0 and below 1"."""
    limits = {n: getattr(part, n) for part in parts(field) for n in LIMITS if hasattr(part, n)}
    return " and ".join(
        f"{LIMITS[name]} {limit:{',' if isinstance(limit, int) else 'g'}}"
        for name, limit in limits.items()
    )


def default(field: FieldInfo) -> str:
    """Return the default of a setting."""
    if is_switch(field):
        return "off"
    words = default_of(field)
    return f"`{words}`" if words == str(field.default) else words or "none"


def about(name: str, field: FieldInfo) -> str:
    """Return the help of a setting."""
    return help_of(field) + (" Not kept in `config.yaml`." if name in NOT_RECORDED else "")


def by_data_set() -> str:
    """Defaults that a data set brings."""
    head = ("", *(f"`--{flag_name(name)}`" for name in (*OF_DATA, "augment")))
    return table(
        head,
        (
            (f"`{name}`", *(shown(getattr(facts.defaults, key)) for key in OF_DATA), facts.augment)
            for name, facts in DATASETS.items()
        ),
    )


def samples_at_a_time() -> str:
    """The physical batch of the networks that take more than the data set's."""
    more = [f"`{n}` {kind.physical_batch:,}" for n, kind in MODELS.items() if kind.physical_batch]
    return (
        f"`--physical-batch` is larger for some networks: {', '.join(more)}; fewer in proportion "
        "for images above 32 by 32 pixels. On a GPU it is at most 512 images of up to 32 by 32 "
        "pixels, and no more than a step needs. K augmented views of an image count as K.\n"
    )


def _data_sets() -> dict[str, Dataset]:
    """Catalogue of datasets, and kinds of your own data."""
    return {
        **{f"`{name}`": facts for name, facts in DATASETS.items()},
        "your own images, 500 of 32 x 32": _own(500, _images(3, 32, 32)),
        "your own images, 50,000 of 28 x 28": _own(50_000, _images(1, 28, 28)),
        "your own images, 50,000 of 64 x 64": _own(50_000, _images(3, 64, 64)),
        **{
            f"your own rows of numbers, {count:,}": _own(
                count, Numbers(shape=(9,), low=(0.0,) * 9, high=(1.0,) * 9)
            )
            for count in (100, 500, 3_000, 50_000)
        },
    }


def _images(*shape: int) -> Images:
    """Return images of a shape, (channels, height, width)."""
    channels, height, width = shape
    halves = (0.5,) * channels
    return Images(shape=(channels, height, width), mean=halves, std=halves)


def _own(count: int, records: Images | Numbers) -> Dataset:
    """Return facts of your own dataset."""
    return dataset_of((count, count), records, Classification(("a", "b")))


def learning_rates() -> str:
    """Of each optimizer on each data set."""
    kinds = OPTIMIZERS.values()
    rows = ((f"`{name}`", *(shown(kind.default_lr(name)) for kind in kinds)) for name in DATASETS)
    return table(("", *(f"`{name}`" for name in OPTIMIZERS)), rows)


def by_best() -> str:
    """Values of the recipe best."""
    names: tuple[str, ...] = ("features", "model", "epochs", "lr", "ema")
    rows = []
    for name, facts in _data_sets().items():
        dataset = name.strip("`") if name.strip("`") in DATASETS else "./own"
        found = completed(Settings.model_validate({"dataset": dataset}), facts)
        share = round(facts.train_size / found.batch_size)
        cells = ["" if (value := getattr(found, n)) is None else shown(value) for n in names]
        rows.append((name, *cells[:2], f"n/{share}", *cells[2:]))
    head = ("", *(f"`--{flag_name(name)}`" for name in (*names[:2], "batch_size", *names[2:])))
    return (
        f"With `dp-adam` at epsilon {EPSILON:g}. A note before the first step of a run names its "
        "values, which depend on epsilon, the number of records and the network "
        "([the rule](recipes.md#the-best-run-for-a-budget)). Delta is 1e-5; for your own data "
        f"n^-1.1 if that is less.\n\n{table(head, rows)}"
    )


def by_optimizer() -> str:
    """Which settings have an effect on which optimizer, and their defaults on MNIST."""
    names = sorted(set().union(*(kind.used() for kind in OPTIMIZERS.values())))
    rows = []
    for optimizer in OPTIMIZERS:
        plan = resolve(dataset="mnist", optimizer=optimizer, recipe="paper").plan
        values = plan.optimizer.model_dump()
        cells = [shown(values[name]) if name in values else "" for name in names]
        rows.append((f"`{optimizer}`", *cells))
    head = ("", *(f"`--{flag_name(name)}`" for name in names))
    return f"Of the recipe `paper` on MNIST; an empty cell has no effect.\n\n{table(head, rows)}"


def exclusions() -> str:
    """Settings of which one may be given."""
    return "".join(f"- {line}\n" for line in _exclusions())


def _exclusions() -> Iterator[str]:
    for names, why in NOT_BOTH.items():
        same = "answer the same question. A flag replaces a file's answer"
        yield f"{flags(names)}: {why}." if why else f"{flags(names)} {same}."


def flags(names: Iterable[str]) -> str:
    """Some settings, as typed."""
    return ", ".join(f"`--{flag_name(name)}`" for name in names)


def shown(value: object) -> str:
    """A default in short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def silent() -> str:
    """Return the page of situations in which a library can be silently wrong."""
    found = json.loads((DOCS / "data" / "silent.json").read_text(encoding="utf-8"))
    names = list(found["dpmac"])
    rows = [(name, *(outcome(found[side][name]) for side in SIDES)) for name in names]
    counts = []
    for side, title in SIDES.items():
        of_side = [line["outcome"] for line in found[side].values()]
        counts.append((title, *(str(of_side.count(kind)) for kind in OUTCOMES)))
    text = SILENT.format(count=len(names), opacus=found["versions"]["opacus"])
    summary, every = table(("", *OUTCOMES), counts), table(("situation", *SIDES.values()), rows)
    return f"{text}{summary}\n{every}"


def outcome(line: Mapping[str, Any]) -> str:
    """Return the cell of a situation."""
    kind: str = line["outcome"]
    if kind not in MEASURED:
        return kind
    measure = line[MEASURED[kind]]
    return f"**{kind}**, {'not finite' if measure is None else f'{measure:.4g}'}"


def mutants() -> str:
    """Return the page of injected bugs, and of the tests that find them."""
    found = json.loads((DOCS / "data" / "mutants.json").read_text(encoding="utf-8"))
    rows = [(row["name"], row["cost"], found_by(row)) for row in found["rows"]]
    return MUTANTS.format(**found) + table(("bug", "what it would cost", "found by"), rows)


def found_by(row: Mapping[str, Any]) -> str:
    """Return the test that found a bug, in words."""
    file, _, test = row["by"].partition("[")[0].partition("::")
    words = test.removeprefix("test_").replace("_", " ")
    return f"`{file.removeprefix('tests/')}`: {words}" if test else f"**{row['result']}**"


def api() -> str:
    """Return the page of the Python API, by the stub of the package; mkdocstrings fills it."""
    stub = (DOCS.parent / "dpmac_cli" / "__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"^from \.(\w+)[\w.]* import (\w+) as", stub, re.MULTILINE)
    parts = [API]
    for group, title in API_GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [f"::: dpmac_cli.{name}\n" for package, name in names if package == group]
    return "\n".join(parts)


def performance() -> str:
    """Return the page of times with its measured tables."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    tables = {"step_time": ("avx512", times), "gpu": ("gpu", times), "zoo": ("zoo", zoo)}
    for name, (kind, made) in tables.items():
        file = DOCS / "data" / ("zoo.json" if kind == "zoo" else f"step_time_{kind}.json")
        part = made(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else ""
        page = between(name, part, page)
    return page


def between(name: str, part: str, page: str) -> str:
    """Return a page with a part between its comments of a name."""
    begin, end = (f"<!-- {name} {word} -->\n" for word in ("begins", "ends"))
    return f"{page.partition(begin)[0]}{begin}{part}{end}{page.partition(end)[2]}"


def zoo(found: Mapping[str, Any]) -> str:
    """Return the table of networks of other libraries."""
    machine = found["machine"]
    rows = [
        (
            row["network"],
            f"{row['parameters']:,}",
            f"{row['plain_ms']:.0f}",
            f"{row['private_ms']:.0f}",
            f"{row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
            f"{row['cpu_ratio']:.2f}",
        )
        for row in found["rows"]
    ]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "timm"))
    heads = ("network", "parameters", "plain, ms", "private, ms", "times plain", "by CPU time")
    said = f"{machine['device']}, threads: {machine['threads']}, {versions}"
    return f"{said}:\n\n{table(heads, rows)}\n"


def times(found: Mapping[str, Any]) -> str:
    """Return the table of steps on one machine: a row for each network and batch."""
    machine, cells = found["machine"], defaultdict[tuple[str, int], dict[str, Any]](dict)
    for row in found["rows"]:
        cells[row["model"], row["batch"]][row["optimizer"]] = row
    rows = []
    for (model, batch), by in cells.items():
        plain = min((by[name] for name in by if name in PLAIN), key=itemgetter("step_ms"))
        opacus = [row for name, row in by.items() if name.startswith("opacus-")]
        private = [by["dp-adam"], by["dp-macadam"]]
        peer = min(opacus, key=itemgetter("step_ms"), default=None)
        shown = [*private, *([peer] if peer else [])]
        steps = [f"{row['step_ms']:.1f} ({row['ratio']:.2f})" for row in shown]
        peaks = [f"{row['peak_mib']:.0f}" for row in (plain, by["dp-adam"], *shown[2:])]
        filled = [*steps, ""][:3], [*peaks, ""][:3]
        rows.append((model, str(batch), f"{plain['step_ms']:.1f}", *filled[0], *filled[1]))
    heads = ("network", "batch", "plain, ms", "`dp-adam`", "`dp-macadam`", "faster Opacus")
    peaks = ("MiB: plain", "`dp-adam`", "Opacus")
    said = f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}"
    return f"{said}:\n\n{table((*heads, *peaks), rows)}\n"


def recipes() -> str:
    """Return the page of accuracies with its measured tables."""
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    return between("texts", of_texts(), between("backbones", of_backbones(), page))


def of_backbones() -> str:
    """Return the table of accuracies on public backbones."""
    parts = {"Lite2, 224 pixels": "lite2", "Lite0, 128 pixels": "lite0"}
    rows, epsilons = [], []
    for title, name in parts.items():
        found = json.loads((DOCS / "data" / f"backbone-{name}.json").read_text(encoding="utf-8"))
        cells = sorted((row["epsilon"], row["mean"], row["std"]) for row in found["rows"])
        epsilons = [f"epsilon {epsilon:.4g}" for epsilon, _, _ in cells]
        rows.append((title, *(f"{100 * middle:.2f} ± {100 * std:.2f}" for _, middle, std in cells)))
    return table(("EfficientNet", *epsilons), rows)


def of_texts() -> str:
    """Return the table of accuracies on sets of texts, by the defaults."""
    found = found_texts()
    rows = [
        (
            name,
            texts,
            *(spread(found[name, "minilm", e]) for e in EPSILONS),
            spread(found[name, "hashed words", 1.0]),
            largest,
        )
        for name, (texts, largest) in about_texts().items()
    ]
    shown = (f"MiniLM, epsilon {e:g}" if e else "no privacy" for e in EPSILONS)
    return table(("set", "texts", *shown, "hashed words, epsilon 1", "largest class"), rows)


def found_texts() -> Mapping[tuple[str, str, float | None], Sequence[float]]:
    """Return accuracies by set, features and epsilon."""
    found = defaultdict[tuple[str, str, float | None], list[float]](list)
    for row in rows_of_texts():
        found[row["set"], row["features"], row["epsilon"]].append(row["accuracy"])
    return found


def about_texts() -> Mapping[str, tuple[str, str]]:
    """Return the number of texts and the share of the largest class by set."""
    return {r["set"]: (f"{r['texts']:,}", f"{r['majority']:.1f}") for r in rows_of_texts()}


def rows_of_texts() -> list[dict[str, Any]]:
    """Return the measured runs with the default settings."""
    lines = (DOCS / "data" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [r for r in rows if (r["epochs"], r["tokens"] >= TOKENS) == (EPOCHS, True)]


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation of some percentages."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}"


def optimizers() -> str:
    """Return the page of optimizers, with a section of each from its docstring."""
    sections = []
    for name, kind in OPTIMIZERS.items():
        settings = ", ".join(
            f"`--{flag_name(n)}`" + (f" ({field.default:g})" if n.startswith("beta") else "")
            for n, field in kind.model_fields.items()
        )
        sections.append(f"## `{name}`\n\n{inspect.getdoc(kind)}\n\nSettings: {settings}.\n\n")
    page = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    return between("optimizers", "\n" + "".join(sections), page)


#: Pages and schemas in the tree, and what writes them.
WRITTEN = {
    "configuration.md": configuration,
    "compare.schema.json": compare_schema,
    "report.schema.json": report_schema,
    "performance.md": performance,
    "recipes.md": recipes,
    "optimizers.md": optimizers,
}
#: Pages that only the site has: site_hooks.py adds them when it is built.
BUILT = {
    "commands.md": commands,
    "report.md": report,
    "api.md": api,
    "silent-failures.md": silent,
    "mutants.md": mutants,
}

if __name__ == "__main__":
    for name, page in WRITTEN.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
