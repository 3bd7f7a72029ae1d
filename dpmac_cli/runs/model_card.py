"""The model card: the report of a run as Markdown, from ``model_card.md.jinja``."""

import math
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from dpmac_cli.accounting.statements import NEIGHBOURS, NO_PRIVACY, format_epsilon
from dpmac_cli.config.settings import RECIPE_DEFAULTS


def model_card(report: Mapping[str, Any], model: nn.Module) -> str:
    """Return the model card of a run, as Markdown; names of layers of the model become code."""
    environment = Environment(  # noqa: S701  (Markdown)
        loader=PackageLoader("dpmac_cli.runs", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fmt": format, "epsilon": format_epsilon, "as_code": _as_code}
    return environment.get_template("model_card.md.jinja").render(
        report,
        network=model,
        plain=_is_plain(model),
        recipe_defaults=RECIPE_DEFAULTS,
        neighbours=NEIGHBOURS,
        no_privacy=NO_PRIVACY,
        infinity=math.inf,
    )


def _as_code(name: str) -> str:
    """Return a name as code in a cell of a table."""
    cell = name.replace("|", "\\|")
    return f"`` {cell} ``" if "`" in name else f"`{cell}`"


def _is_plain(model: nn.Module) -> bool:
    """Return whether a network is a sequence of torch's own layers."""
    return type(model) is nn.Sequential and all(
        type(layer).__module__.startswith("torch.nn.") and not list(layer.children())
        for layer in model.children()
    )
