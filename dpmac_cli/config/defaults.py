"""Values of settings that were not given, by data set, optimizer and the settings beside them."""

from typing import Any

from dpmac_cli.config.settings import CANARY_KINDS, FEW_GUESSES, SETTINGS, TRAINED, Settings
from dpmac_cli.data.registry import Dataset
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.models.registry import FEATURES

#: Samples worked on at a time where one linear layer is trained.
ROWS_AT_A_TIME = 1024


def completed(settings: Settings, facts: Dataset) -> dict[str, Any]:
    """Return a value for every setting; None where there is none.

    Args:
        settings: as given.
        facts: of the dataset.
    """
    given = {name: value for name, value in vars(settings).items() if value is not None}
    fixed = {name: setting.default for name, setting in SETTINGS.items()}
    return {**fixed, **_depending({**fixed, **given}, facts), **given}


def _depending(values: dict[str, Any], facts: Dataset) -> dict[str, Any]:
    """Return defaults that depend on the data set or on other settings."""
    defaults, adaclip = facts.defaults, values["optimizer"] == "adaclip"
    found: dict[str, Any] = {
        **vars(defaults),
        "lr": OPTIMIZERS[values["optimizer"]].rate_on(values["dataset"]),
        "beta1": 0.99 if adaclip else 0.9,
        "beta2": 0.9 if adaclip else 0.999,
        "physical_batch": max(1, defaults.physical_batch // (values["augmentations"] or 1)),
    }
    if values["no_dp"] or values["epsilon"] is not None:
        found["sigma"] = None
    if values["steps"] is not None:
        found["epochs"] = None
    if values["augmentations"] is not None:
        found["augment"] = facts.augment
    if values["features"] is not None:
        found |= {"model": "linear", "feature_groups": FEATURES[values["features"]].groups}
    if values["pretrained"] is not None:
        found["train"] = TRAINED[0]
    if values["train"] == "head" or (values["model"] or found["model"]) == "linear":
        found["physical_batch"] = max(defaults.physical_batch, ROWS_AT_A_TIME)
    if (canaries := values["canaries"]) is not None:
        found["canary_kind"] = CANARY_KINDS[0]
        found["guesses"] = max(canaries // 10, min(canaries, FEW_GUESSES))
    return found
