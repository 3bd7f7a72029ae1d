"""Model card of a run as Markdown, from its report and its network."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dpmac_cli.accounting import statements
from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.config.settings import RECIPE_DEFAULTS
from dpmac_cli.release.card import OPEN, templates
from dpmac_cli.tasks.known import task_in


def model_card(report: Mapping[str, Any], model: nn.Module) -> str:
    """Return the model card of a run as Markdown; layers of plain models become code."""
    template, task = templates().get_template("model_card.md.jinja"), task_in(report)
    return template.render(
        report,
        task=task,
        usage=task.usage,
        score=report["test"][task.headline.key],
        score_interval=report["test"][f"{task.headline.key}_interval"],
        network=model if _is_plain(model) else None,
        recipe_defaults=RECIPE_DEFAULTS,
        no_privacy=statements.NO_PRIVACY,
        to_be_filled_in=OPEN,
        samplers=SAMPLERS,
    )


def _is_plain(model: nn.Module) -> bool:
    """Return whether a network is a sequence of torch layers."""
    return type(model) is nn.Sequential and all(
        type(layer).__module__.startswith("torch.nn.") and not list(layer.children())
        for layer in model.children()
    )
