"""Settings as they were given, with where they came from: checks of each, and of contradictions."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpmac_cli.config.settings import OWN_MODEL, SETTINGS, Settings, flag_name
from dpmac_cli.errors import InputError

#: Settings that answer the same question: give one. A flag replaces a file's answer.
EXCLUSIVE = (
    *(("sigma", "epsilon", "no_dp"), ("max_epsilon", "no_dp"), ("epochs", "steps")),
    ("isolate", "no_isolate"),
)
#: Settings that do not go together, and why. Neither replaces the other: a run that a file makes
#: secure must not lose that unnoticed.
INCOMPATIBLE = {
    ("seed", "secure"): "whoever chose a seed knows the draws that --secure keeps from everyone",
    ("no_dp", "secure"): "without noise there is nothing to make secure",
    ("no_dp", "canaries"): "without a claim there is nothing to audit",
    ("schema", "feature_range"): "a schema has the range of every column",
    ("schema", "classes"): "a schema has the classes",
    ("features", "pretrained"): "public weights are for networks that take images",
    ("backbone", "features"): "a network takes one or the other",
}
#: Names of these settings in torch, Opacus and TensorFlow Privacy, and other common names.
_OTHERS = {
    "sigma": "noise-multiplier noise",
    "epsilon": "target-epsilon eps",
    "delta": "target-delta",
    "lr": "learning-rate",
    "clip-norm": "max-grad-norm l2-norm-clip clipping-norm",
    "batch-size": "expected-batch-size",
    "physical-batch": "max-physical-batch-size",
    "epochs": "num-epochs",
    "dataset": "data",
    "model": "network architecture",
    "device": "gpu",
    "out": "output",
    "optimizers": "optimizer",  # of a comparison
    "optimizer": "optimizers",
    "seeds": "seed",
    "seed": "seeds random-seed",
    "secure": "secure-mode",
}
OTHER_NAMES = {other: ours for ours, others in _OTHERS.items() for other in others.split()}


@dataclass(frozen=True)
class Given:
    """A value as it was given, and where: "--sigma", or "sigma in FILE"."""

    value: Any
    origin: str


def typed(flags: Mapping[str, Any], errors: list[str]) -> dict[str, Given]:
    """Return the flags that were given; unknown names join ``errors``."""
    errors.extend(
        f"There is no setting '{name}'.{near(name, SETTINGS)}" for name in flags.keys() - SETTINGS
    )
    return {
        name: Given(value, f"--{flag_name(name)}")
        for name, value in flags.items()
        if name in SETTINGS and value is not None and value is not False
    }


def combined(
    file: Mapping[str, Given], flags: Mapping[str, Given], errors: list[str]
) -> dict[str, Given]:
    """Return settings of both, flags winning; contradictions join ``errors``."""
    below = dict(file)
    for group in EXCLUSIVE:
        for source in (flags, below):
            origins = [source[name].origin for name in group if name in source]
            if len(origins) > 1:
                errors.append(f"{' and '.join(origins)} contradict each other: give one.")
        if any(name in flags for name in group):
            below = {name: entry for name, entry in below.items() if name not in group}
    given = below | dict(flags)
    for pair, why in INCOMPATIBLE.items():
        origins = [given[name].origin for name in pair if name in given]
        if len(origins) == len(pair):
            errors.append(f"{' and '.join(origins)} contradict each other: {why}. Give one.")
    return given


def validated(given: Mapping[str, Given], errors: list[str]) -> Settings:
    """Return the settings that are valid; what is wrong with the others joins ``errors``."""
    values: dict[str, Any] = {
        name: entry.value if isinstance(entry.value, bool) else str(entry.value)
        for name, entry in given.items()
    }
    try:
        return Settings(**values)
    except ValidationError as failure:
        faulty = {str(error["loc"][0]) for error in failure.errors()}
    errors.extend(_message(name, given[name]) for name in given if name in faulty)
    return Settings(**{name: value for name, value in values.items() if name not in faulty})


def parse(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Turn flags into values, each checked for itself, for a command that takes only a few.

    Args:
        flags: as in :func:`~dpmac_cli.config.resolve.resolve`; what is not given is left out.

    Raises:
        InputError: with every fault found.
    """
    errors: list[str] = []
    settings = validated(typed(flags, errors), errors)
    if errors:
        raise InputError(errors)
    return {name: value for name, value in vars(settings).items() if value is not None}


def _message(name: str, entry: Given) -> str:
    """Return what is wrong with a value, as a sentence that says what to give instead."""
    setting, text, origin = SETTINGS[name], str(entry.value), entry.origin
    if setting.kind is bool:
        return f"{origin} must be true or false."
    if setting.kind is Path:
        return f"{origin} must not be empty. Name a folder, or leave it out."
    if setting.choices:
        return (
            f"{origin}: there is no {flag_name(name)} '{text}'.{near(text, setting.choices)} "
            f"Known: {setting.known}."
        )
    if setting.pattern:
        return f"{origin} must be {setting.pattern[1]}, not '{text}'."
    return _number_message(name, text, origin)


def _number_message(name: str, text: str, origin: str) -> str:
    setting = SETTINGS[name]
    if _is_number(text, setting.kind):
        hint = (
            " To train without privacy use --no-dp." if name == "sigma" and not float(text) else ""
        )
        return f"{origin} must be {setting.bounds}, not {text}.{hint}"
    pointed = text.replace(",", ".")  # some write a decimal comma
    hint = f" Did you mean {pointed}?" if pointed != text and _is_number(pointed, float) else ""
    kind = "a whole number" if setting.kind is int else "a number"
    return f"{origin}: '{text}' is not {kind}.{hint}"


def _is_number(text: str, kind: type) -> bool:
    """Return whether text is a finite number of a kind."""
    try:
        return bool(abs(kind(text)) < float("inf"))
    except (ValueError, OverflowError):
        return False


def faults_of_model(models: Iterable[str], origin: str) -> Iterator[str]:
    """Reject models of a settings file that are code: only a command line may name that."""
    for model in filter(OWN_MODEL[0], models):
        yield (
            f"{origin} names code, {model}, and no file makes dpmac run code. If you trust it, "
            f"add --model {model} to the command line."
        )


def near_setting(written: str, known: Collection[str]) -> str:
    """Return a hint for what was written in place of a setting, one of ``known`` as fields."""
    ours = OTHER_NAMES.get(written.replace("_", "-"), "")
    if ours.replace("-", "_") in known:
        return f" Here it is called {ours}."
    return near(written, map(flag_name, known))


def near(text: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the near matches, or nothing."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
