"""The model card: what a person needs to know who is handed a model, as Markdown.

It says nothing that the report does not: it is the report, rendered last.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from dpmac_cli.accounting.samplers import NEIGHBOURS
from dpmac_cli.accounting.statements import NO_PRIVACY, format_epsilon
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.runs import folder

#: Each holds for every model that is trained under privacy.
NOT_COVERED = (
    "Other runs on the same records: a search for better settings, a comparison, the best of "
    "several. Each is paid for beside this one; `dpmac account --runs` says how much.",
    "The test records. The accuracy was measured on them without noise. Where settings, steps or "
    "this model itself were chosen by it, it is too high, and the choice has told of the test "
    "records.",
    f"Times in `{folder.REPORT}` and `{folder.METRICS}`: they are measured, with no noise added.",
    "Whoever can watch the machine while it trains, or read the folder `checkpoint/`, which must "
    "never be published.",
)


def model_card(report: Mapping[str, Any], model: nn.Module) -> str:
    """Render a run's report for whoever is handed the model.

    Args:
        report: see :func:`dpmac_cli.runs.report.build_report`.
        model: of :func:`dpmac_cli.models.build.build_model`.
    """
    parts = (
        f"# {_title(report)}",
        *_lead(report),
        _table(_facts(report)),
        "## Load it",
        _code(report, model),
        _how_to_load(report),
        "## Privacy",
        *_privacy(report),
        "## Not covered",
        _not_covered(report),
        f"Written by dpmac {report['versions']['dpmac']}. `{folder.REPORT}` holds every setting; "
        f"`dpmac account {folder.REPORT}` prices the run again.",
    )
    return "\n\n".join(parts) + "\n"


def _title(report: Mapping[str, Any]) -> str:
    price = report["privacy"]
    what = f"{report['model']['name']} on {report['dataset']['name']}"
    if not price["private"]:
        return f"{what}, trained without privacy"
    if price["epsilon"] is None:
        return f"{what}, trained with noise for which no epsilon could be shown"
    cost = f"epsilon {format_epsilon(price['epsilon'])} at delta {format_epsilon(price['delta'])}"
    if price["seed_policy"]["given"]:
        return f"{what}, {cost} only against those who do not know its seed"
    return f"{what}, {cost}"


def _lead(report: Mapping[str, Any]) -> Iterator[str]:
    """What must not be missed, each a paragraph."""
    price = report["privacy"]
    if price["private"]:
        yield price["statement"]
    else:
        yield f"**{NO_PRIVACY} Anything about a training record may be read off this model.**"
    if "public_part" in report["model"]:
        yield report["model"]["public_part"]["statement"]
    if report["audit"]:
        yield f"**{report['audit']['statement']}**"
    if report["diagnostics"]:
        yield f"**`{folder.DIAGNOSTICS}` was written beside this model. {report['diagnostics']}**"


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, dataset, test = report["model"], report["dataset"], report["test"]
    used = report["hyperparameters"]
    low, high = test["accuracy_interval"]
    checksum = dataset["sha256"]
    recipe = [
        f"{name.replace('_', ' ')}: {value}"
        for name, value in report["recipe"].items()
        if value != RECIPE_DEFAULTS[name]
    ]
    public = model.get("public_part")
    trained = f", {public['trained_parameters']:,} of them trained" if public else ""
    return [
        ("network", f"{model['name']}, {model['parameters']:,} parameters{trained}"),
        ("samples kept apart", model["independence"]["statement"]),
        ("trained on", f"{dataset['name']}, {dataset['train_size']:,} records"),
        ("its checksum", f"SHA-256 `{checksum}`" if checksum else "none is kept of this data set"),
        (
            "training",
            f"{report['optimizer']}, steps: {used['steps']:,} (epochs: {used['epochs']:.4g}), "
            f"expected batch {used['batch_size']:,}, {report['state']}",
        ),
        (
            "test accuracy",
            f"{test['accuracy']:.2%} of {test['samples']:,} test records (95% interval for records "
            f"like these: {low:.2%} to {high:.2%})",
        ),
        *([("recipe", ", ".join(recipe))] if recipe else []),
        ("classes", ", ".join(map(_quoted, report["classes"]))),
    ]


def _quoted(name: str) -> str:
    """A name as code in a cell of a table."""
    cell = name.replace("|", "\\|")
    return f"`` {cell} ``" if "`" in name else f"`{cell}`"


def _code(report: Mapping[str, Any], model: nn.Module) -> str:
    """Lines that work as they stand, beside the model file; with plain layers, without dpmac."""
    given = report["input"]
    return f"""\
```python
{_network(report, model)}
model.eval()

mean = torch.tensor({given["mean"]}).view(-1, 1, 1)
std = torch.tensor({given["std"]}).view(-1, 1, 1)


@torch.no_grad()
def classify(pixels):
    return model((pixels / {given["levels"]} - mean) / std).argmax(1)
```"""


def _network(report: Mapping[str, Any], model: nn.Module) -> str:
    """Lines that make the network and load its weights."""
    facts = report["model"]
    if facts["built_by"] is not None:
        place, _, call = facts["built_by"].rpartition(":")
        name = call.partition("(")[0]
        fixed = "\nmodel, _ = without_batch_norm(model)" if facts["fix_norm"] else ""
        helper = "from dpmac_cli.models.user_models import without_batch_norm\n" if fixed else ""
        fixed += "\nmodel = model.float()" if facts["to_float32"] else ""
        public = facts.get("public_part", {})
        if public.get("features"):
            helper += "from dpmac_cli.models.features import with_features\n"
            shape, groups = tuple(report["input"]["shape"]), public["feature_groups"]
            fixed += f"\nmodel = with_features(model, {shape}, {groups})"
        return f"""\
import torch
{helper}from {place.removesuffix(".py")} import {name}
from safetensors.torch import load_file

model = {call}{fixed}
model.load_state_dict(load_file("{folder.MODEL}"))"""
    if type(model) is not nn.Sequential or any(  # of torch's own layers alone
        list(layer.children()) or not type(layer).__module__.startswith("torch.nn.")
        for layer in model.children()
    ):
        return f"""\
from pathlib import Path

import torch
from dpmac_cli.release import load_model

model = load_model(Path("{folder.MODEL}"), None, torch.device("cpu")).model"""
    layers = "\n".join(f"    nn.{layer}," for layer in model.children())
    return f"""\
import torch
from safetensors.torch import load_file
from torch import nn

model = nn.Sequential(
{layers}
)
model.load_state_dict(load_file("{folder.MODEL}"))"""


def _how_to_load(report: Mapping[str, Any]) -> str:
    levels, shape = report["input"]["levels"], ", ".join(map(str, report["input"]["shape"]))
    pixels = f"whole numbers from 0 to {levels}, shape (images, {shape}): channels, height, width"
    if levels == 1:
        pixels = f"rows of numbers, shape (rows, {shape}), each clipped to mean ± std of its column"
    return f"`pixels` are {pixels}. The answer counts the classes above from 0."


def _privacy(report: Mapping[str, Any]) -> Iterator[str]:
    price = report["privacy"]
    if not price["private"]:
        yield NO_PRIVACY
        return
    epsilon = math.inf if price["epsilon"] is None else price["epsilon"]
    yield _table(
        [
            ("epsilon", format_epsilon(epsilon)),
            ("delta", format_epsilon(price["delta"])),
            ("adjacency", f"{price['adjacency']}: {NEIGHBOURS[price['adjacency']].lower()}"),
            ("accountant", price["accountant"]),
            ("seeds", price["seed_policy"]["statement"]),
        ]
    )
    rows = [
        (
            "this model" if number == len(price["events"]) else f"branch {number}",
            f"{event['steps']:,}",
            event["sampler"],
            f"{event['sampling_rate']:.6g}",
            f"{event['noise_multiplier']:.10g}",
        )
        for number, event in enumerate(price["events"], start=1)
    ]
    yield _table(rows, ("", "steps", "sampler", "sampling rate", "noise multiplier"))


def _not_covered(report: Mapping[str, Any]) -> str:
    if not report["privacy"]["private"]:
        return "Everything: this is a baseline. Do not publish it if the training records matter."
    dataset = report["dataset"]
    held_out = (f"{dataset['test_note']}",) if dataset["held_out"] else ()
    size = f"The number of training records, {dataset['train_size']:,}, is public."
    rest = (*held_out, size, dataset["public_note"])
    return "\n".join(f"- {line}" for line in (*NOT_COVERED, *rest))


def _table(rows: Iterable[tuple[str, ...]], heading: tuple[str, ...] = ("", "")) -> str:
    lines = (heading, ("---",) * len(heading), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
