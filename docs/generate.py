"""Write the reference pages from the program and its schemas: ``python docs/generate.py``."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.cli.app import COMMANDS as CALLED
from dpmac_cli.cli.app import load_command
from dpmac_cli.config.best import EPSILON
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.fields import Option, flag_name
from dpmac_cli.config.resolve import NOT_RECORDED, resolve
from dpmac_cli.config.settings import EXCLUSIVE, SETTINGS, Settings
from dpmac_cli.data.registry import DATASETS, Dataset
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import Records, data_facts
from dpmac_cli.models.registry import BACKBONES, FEATURES, MODELS
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.report import Report
from dpmac_cli.tasks.classification import Classification

#: What a value may be, in words.
KINDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
DOCS = Path(__file__).parent
API = """\
# Python API

The names that programs can rely on, from their docstrings. [From Python](library.md) shows how to
use them. `help(dpmac_cli.train)` prints the same text. `python docs/generate.py` writes this page
from the tables of [that guide](library.md#reference).
"""
INTRODUCTION = """\
# Settings

Every setting of `dpmac train`, by the groups of its help. `python docs/generate.py` writes this
page from the settings themselves: change those, not this page.

A setting has one name everywhere: `--batch-size 128` as a flag, `batch-size: 128` in the YAML file
of `--config`, `batch_size=128` in [`resolve`](library.md#train). Flags win over the file. A switch
is given as a flag alone, or as `true`. All settings are validated before anything is done, and all
errors are reported at once. `dpmac compare` takes the same settings with several values each,
except for those that [its section](commands.md#dpmac-compare) lists.
"""
PAPERS = """\
With `--sigma` or `--recipe paper`, as in the paper. With `--epsilon`, see
[the best recipe](#the-best-recipe).
"""
COMMANDS = """\
# Commands

`python docs/generate.py` writes this page from the program: change the program, not this page.

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

Every key of `report.json` and `compare.json`. `python docs/generate.py` writes this page from
the JSON Schemas [report.schema.json](report.schema.json) and
[compare.schema.json](compare.schema.json).
"""
COMPARISON = """\
# Other tools

What tools for training with differential privacy have, as of November 2026. The README has ten of
these rows. `python docs/generate.py` writes this page from `docs/data/comparison.yaml`: correct a
cell there, with its source. A question mark means: not checked.

- [Features](#features)
- [Requests to Opacus](#requests-to-opacus)
- [Sources](#sources)

## Features

{features}
Choose JAX Privacy or opake for correlated noise, Opacus for sharded and large models, and NeMo
Safe-Synthesizer for synthetic records instead of a model.

## Requests to Opacus

Threads in which users of Opacus asked for something that dpmac has:

{requests}
## Sources

{cells}"""
SILENT = """\
# Silent failures

A library can train on after a change that it does not see: nothing is learned, a setting has no
effect, or a record moves a step by more than the noise covers. This page has {count} situations of
this kind, and the outcome of dpmac and of Opacus {opacus} in each of them. This command runs them,
and `python docs/generate.py` writes the page from its result:

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

`tests/test_silent.py` requires that dpmac is right or refuses in all of them, and that the judge
finds trainers that are wrong or unprotected on purpose. Opacus is used as its guides describe, with
per-sample gradients by hooks and with ghost clipping. Any exception of Opacus or torch counts as a
refusal. A dash is a setting that Opacus does not have. The situations were chosen to find faults of
dpmac, and many are variants of each other: the counts do not say how often a user meets a fault.

"""
#: Trainers of that page, by their keys in its data.
SIDES = {
    "before": "dpmac 0.2",
    "dpmac": "dpmac",
    "hooks": "Opacus, hooks",
    "ghost": "Opacus, ghost",
}
OUTCOMES = ("right", "refused", "wrong", "open")
#: Outcomes that the table shows with their measure.
MEASURED = {"wrong": "error", "open": "moved"}
KEY = ("key", "type", "description")
CHOICES = {
    "Data sets": {name: facts.about for name, facts in DATASETS.items()},
    "Networks": {name: kind.about for name, kind in MODELS.items()},
    "Backbones": {
        name: f"{kind.about}: {kind.width:,} features, {kind.size} pixels a side, "
        f"{kind.top1:.1%} of ImageNet's validation images right (published), {kind.licence}"
        for name, kind in BACKBONES.items()
    },
    "Features": FEATURES,
    "Samplers": {name: sampling.summary for name, sampling in SAMPLERS.items()},
    "Optimizers": {name: kind.summary for name, kind in OPTIMIZERS.items()},
}
#: Settings whose defaults a data set brings, by the names of both.
OF_DATA = ("model", "sigma", "batch_size", "epochs", "clip_norm", "h1", "h2", "physical_batch")


def configuration() -> str:
    """Return the page of the settings."""
    parts = [INTRODUCTION]
    for panel in dict.fromkeys(setting.flag.group for setting in SETTINGS.values()):
        rows = [
            (f"`--{flag_name(name)}`", what(setting), default(setting), about(setting))
            for name, setting in SETTINGS.items()
            if setting.flag.group == panel
        ]
        parts += [f"## {panel}\n", table(("setting", "value", "default", "description"), rows)]
    parts += ["## By data set\n", PAPERS, by_data_set(), samples_at_a_time()]
    parts += ["Learning rates:\n", learning_rates(), "## By optimizer\n", by_optimizer()]
    parts += ["## The best recipe\n", by_best()]
    parts += ["## What does not go together\n", exclusions()]
    for title, known in CHOICES.items():
        named = [(f"`{name}`", said) for name, said in known.items()]
        parts += [f"## {title}\n", table(("name", "description"), named)]
    return "\n".join(parts)


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
        for panel in dict.fromkeys(param.rich_help_panel for param in options):
            rows = [option(param) for param in options if param.rich_help_panel == panel]
            parts.append(table((panel, "value", "default", "description"), rows))
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
    compare = json.loads((DOCS / "compare.schema.json").read_text(encoding="utf-8"))
    described = json.loads(report_schema())
    for name, schema in (("report", inlined(described, described["$defs"])), ("compare", compare)):
        parts += [f"## {name}.json\n", schema["description"] + "\n"]
        rows = list(dict.fromkeys(keys(schema)))
        parts.append(table(KEY, [row for row in rows if not re.search(r"[.\[]", row[0])]))
        for top, group in groupby(rows, lambda row: re.split(r"[`.\[]", row[0])[1]):
            below = [row for row in group if row[0] != f"`{top}`"]
            parts += [f"### {top}\n", table(KEY, below)] if below else []
    return "\n".join(parts)


def report_schema() -> str:
    """Return the JSON Schema of report.json."""
    schema = Report.model_json_schema(mode="serialization")
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
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def what(setting: Option) -> str:
    """Return what a setting may be."""
    if setting.switch:
        return "switch"
    if setting.choice:
        more = f"; or {setting.choice.besides[1]}" if setting.choice.besides else ""
        return ", ".join(f"`{choice}`" for choice in setting.choices) + more
    if setting.pattern:
        return setting.pattern.description
    kind = KINDS[setting.kind]
    return f"{kind}, {setting.bounds}" if setting.bounds else kind


def default(setting: Option) -> str:
    """Return the default of a setting."""
    if setting.switch:
        return "off"
    if setting.flag.otherwise or setting.default is None:
        return setting.flag.otherwise or "none"
    return f"`{setting.default}`"


def about(setting: Option) -> str:
    """Return the help of a setting."""
    return setting.help + (" Not kept in `config.yaml`." if setting.name in NOT_RECORDED else "")


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
        f"A physical batch of that or, where it is more: {', '.join(more)}; in proportion fewer of "
        "images above 32 by 32 pixels. On a GPU at least 512 images of up to 32 by 32 pixels, "
        "where the network is trained on them. K augmented views of an image count as K.\n"
    )


def _data_sets() -> dict[str, Dataset]:
    """Catalogue of datasets, and kinds of your own data."""
    return {
        **{f"`{name}`": facts for name, facts in DATASETS.items()},
        "your own images, 500 of 32 x 32": _own(500, (3, 32, 32)),
        "your own images, 50,000 of 28 x 28": _own(50_000, (1, 28, 28)),
        "your own images, 50,000 of 64 x 64": _own(50_000, (3, 64, 64)),
        **{
            f"your own rows of numbers, {records:,}": _own(records, (9, 1, 1), levels=1)
            for records in (100, 500, 3_000, 50_000)
        },
    }


def _own(records: int, shape: tuple[int, int, int], *, levels: int = 255) -> Dataset:
    """Return facts of your own dataset."""
    labels, ends = np.zeros(records, np.int64), None if levels > 1 else np.zeros((2, shape[0]))
    task = Classification(("a", "b"))
    return data_facts(Source(Path()), [Records(labels, labels)] * 2, shape, task, ends).facts


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
        f"With `dp-adam` at epsilon {EPSILON:g}; other epsilons, numbers of records and networks "
        "have other values, which a note before the first step names "
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
    for group in EXCLUSIVE:
        yield f"{flags(group)} answer the same question. A flag replaces a file's answer."
    for name, setting in SETTINGS.items():
        for other, why in setting.flag.not_with.items():
            yield f"{flags((name, other))}: {why}."


def flags(names: Iterable[str]) -> str:
    """Some settings, as typed."""
    return ", ".join(f"`--{flag_name(name)}`" for name in names)


def shown(value: object) -> str:
    """A default in short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def compared() -> dict[str, Any]:
    """Return what is known of other tools."""
    found: dict[str, Any] = yaml.safe_load((DOCS / "data" / "comparison.yaml").read_text("utf-8"))
    return found


def features(known: Mapping[str, Any], *, readme: bool = False) -> str:
    """Return the table of features by tool; ``readme``: only what the README has."""
    tools = {n: t["name"] for n, t in known["tools"].items() if t["readme"] or not readme}
    rows = [row for row in known["rows"] if row.get("readme") or not readme]
    cells = [
        (row["feature"], *(row["cells"].get(name, ("?",))[0] for name in tools)) for row in rows
    ]
    return table(("", *tools.values()), cells)


def comparison() -> str:
    """Return the page of features by tool, with the source of each cell."""
    known = compared()
    tools, sources = known["tools"], known["sources"]
    cells = [
        (
            row["feature"],
            *(tools[name][key] for key in ("name", "version", "date")),
            value,
            sources[source],
        )
        for row in known["rows"]
        for name, (value, source) in row["cells"].items()
    ]
    threads = "https://github.com/meta-pytorch/opacus/issues"
    asked = [
        (f"[#{r['thread']}]({threads}/{r['thread']}) ({r['state']})", r["asks"], r["here"])
        for r in known["requests"]
    ]
    return COMPARISON.format(
        features=features(known),
        requests=table(("Opacus", "asks for", "here"), asked),
        cells=table(("feature", "tool", "version", "date", "value", "source"), cells),
    )


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


def api() -> str:
    """Return the page of the Python API, by the tables of the guide; mkdocstrings fills it."""
    _, _, text = (DOCS / "library.md").read_text(encoding="utf-8").partition("## Reference")
    parts = [API]
    for part in re.split(r"^\| (?=\w[\w ]* \| \|$)", text, flags=re.MULTILINE)[1:]:
        title, _, rows = part.partition(" |")
        parts.append(f"## {title.capitalize()}\n")
        parts += [f"::: dpmac_cli.{name}\n" for name in re.findall(r"^\| `(\w+)`", rows, re.M)]
    return "\n".join(parts)


def performance() -> str:
    """Return the page of times with a table for each class of processors that was measured."""
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    found = [DOCS / "data" / f"step_time_{kind}.json" for kind in ("avx512", "avx2")]
    tables = "".join(times(json.loads(file.read_text())) for file in found if file.exists())
    file = DOCS / "data" / "zoo.json"
    networks = zoo(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else ""
    return between("zoo", networks, between("step_time", tables, text))


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
    """Return the table of one class of processors."""
    machine = found["machine"]
    forced = ", ".join(f"`{name}={value}`" for name, value in machine["forced"].items())
    said = f"{machine['device']}, {machine['instructions']}" + (f" by {forced}" if forced else "")
    rows = [
        (
            row["model"],
            str(row["batch"]),
            row["optimizer"],
            f"{row['step_ms']:.1f}",
            f"{row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
            f"{row['cpu_ratio']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['page_faults']:,.0f}",
        )
        for row in found["rows"]
    ]
    heads = ("network", "batch", "optimizer", "step, ms", "times plain", "by CPU time")
    made = table((*heads, "peak, MiB", "page faults a step"), rows)
    return f"{said}; {machine['threads']} threads, torch {machine['torch']}:\n\n{made}\n"


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


#: Pages by name, and what makes them.
PAGES = {
    "configuration.md": configuration,
    "commands.md": commands,
    "report.schema.json": report_schema,
    "report.md": report,
    "api.md": api,
    "silent-failures.md": silent,
    "comparison.md": comparison,
    "performance.md": performance,
    "optimizers.md": optimizers,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
