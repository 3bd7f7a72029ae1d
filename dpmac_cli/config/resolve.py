"""YAML and flags become one frozen, validated value; every error is reported at once.

Nothing here imports torch.
"""

import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config.extras import fault_of_extra
from dpmac_cli.config.settings import (
    CANARY_KINDS,
    DATA,
    FEW_GUESSES,
    KINDS,
    OPTIMIZER,
    OWN_MODEL,
    ROWS_AT_A_TIME,
    SETTINGS,
    STEPS,
    TRAINED,
    TrainConfig,
    flag_name,
)
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import Found, listed
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
    ("compile", "secure"): "compiled steps add their noise in another way, off the grid",
    ("no_dp", "secure"): "without noise there is nothing to make secure",
    ("no_dp", "canaries"): "without a claim there is nothing to audit",
    ("compile", "canaries"): "compiled steps do not hand out what the attack looks at",
    ("features", "pretrained"): "public weights are for networks that take images",
}
#: Settings that mean something only beside another, and why.
NEEDS = {
    "augment": ("augmentations", "says how views are drawn"),
    "canary_kind": ("canaries", "is of an audit"),
    "guesses": ("canaries", "is of an audit"),
    "feature_groups": ("features", "is of features"),
    "train": ("pretrained FILE", "is of public weights"),
}
#: Classes that a note names; the rest are counted.
NAMED = 5


@dataclass(frozen=True)
class _Given:
    """A value as it was given, and where: "--sigma", or "sigma in FILE"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, and what its author should know about it."""

    config: TrainConfig
    notes: tuple[str, ...]


def resolve(
    flags: Mapping[str, Any] | None = None, file: Path | None = None, **settings: Any
) -> Resolved:
    """Turn flags and a YAML file into one checked configuration. Flags win.

    Args:
        flags: field name -> value, as typed or of its type; None and False where not given.
        file: YAML with flag names for keys.
        settings: more of what ``flags`` may hold: ``resolve(dataset="digits", sigma=2)``.

    Raises:
        InputError: with every fault found.
    """
    errors: list[str] = []
    given = {} if file is None else _read_file(file, errors)
    typed = {**(flags or {}), **settings}
    if "model" in given and not typed.get("model"):
        errors += faults_of_model([str(given["model"].value)], given["model"].origin)
    return _resolved(typed, given, errors)


def faults_of_model(models: Iterable[str], origin: str) -> Iterator[str]:
    """Reject models of a settings file that are code: only a command line may name that."""
    for model in filter(OWN_MODEL[0], models):
        yield (
            f"{origin} names code, {model}, and no file makes dpmac run code. If you trust it, "
            f"add --model {model} to the command line."
        )


def change(recorded: Mapping[str, Any], flags: Mapping[str, Any]) -> Resolved:
    """Turn what :meth:`TrainConfig.recorded` gave into a configuration again. Flags win.

    Args:
        recorded: flag name -> value.
        flags: as in :func:`resolve`.

    Raises:
        InputError: with every fault found.
    """
    given = {
        name.replace("-", "_"): _Given(value, f"{name} in the checkpoint")
        for name, value in recorded.items()
        if value is not False
    }
    return _resolved(flags, given, [])


def _resolved(flags: Mapping[str, Any], given: dict[str, _Given], errors: list[str]) -> Resolved:
    """A checked configuration; ``errors`` were found before."""
    typed = _typed(flags, errors)
    _settle_exclusives(given, typed, errors)
    given |= typed
    _refuse_incompatibles(given, errors)
    values = _parse_all(given, errors)
    if "dataset" in given and "dataset" not in values:  # the defaults would be another data set's
        raise InputError(errors)
    try:
        config = _with_defaults(values)
    except InputError as failure:
        raise InputError([*errors, *failure.errors]) from failure
    errors.extend(_faults_between(config))
    if errors:
        raise InputError(errors)
    return Resolved(config, tuple(_notes(config, typed)))


def data_settings(file: Path, dataset: str | None) -> TrainConfig:
    """A configuration that has of a run's config.yaml only how its data is read.

    Args:
        file: the run's.
        dataset: another place where that data is now; None for the one in the file.

    Raises:
        InputError: the file, or the data, cannot be used.
    """
    errors: list[str] = []
    given = {
        name: entry
        for name, entry in _read_file(file, errors).items()
        if name == "dataset" or SETTINGS[name].panel == DATA
    }
    return _resolved({"dataset": dataset}, given, errors).config


def parse(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Turn flags into values, each checked for itself, for a command that takes only a few.

    Args:
        flags: as in :func:`resolve`; what is not given is left out of the result.

    Raises:
        InputError: with every fault found.
    """
    errors: list[str] = []
    values = _parse_all(_typed(flags, errors), errors)
    if errors:
        raise InputError(errors)
    return values


def _typed(flags: Mapping[str, Any], errors: list[str]) -> dict[str, _Given]:
    """Return the flags that were given; unknown ones join ``errors``."""
    errors.extend(
        f"There is no setting '{name}'.{near(name, SETTINGS)}" for name in flags.keys() - SETTINGS
    )
    return {
        name: _Given(value, f"--{flag_name(name)}")
        for name, value in flags.items()
        if name in SETTINGS and value is not None and value is not False
    }


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
#: Names of these settings in torch, Opacus and TensorFlow Privacy, and other common names.
OTHER_NAMES = {other: ours for ours, others in _OTHERS.items() for other in others.split()}
#: What a value must be, in words.
KIND_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}
NULL, BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
#: What YAML can hold instead, in words.
NODE_WORDS: Mapping[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


def _read_file(file: Path, errors: list[str]) -> dict[str, _Given]:
    """The settings of a YAML file; what is wrong with it joins ``errors``."""
    given: dict[str, _Given] = {}
    for name, origin, node in _entries(file, SETTINGS, "a setting", errors):
        if not isinstance(node, yaml.ScalarNode):
            wanted, found = KIND_WORDS[KINDS[name]], NODE_WORDS[type(node)]
            errors.append(f"{origin} must be {wanted}, not {found}.")
        else:
            value = _as_typed(node, KINDS[name])
            if value is not None and value is not False:
                given[name] = _Given(value, origin)
    return given


def read_lists(file: Path, known: Collection[str], errors: list[str]) -> dict[str, list[str]]:
    """The settings of a YAML file in which each may have several values, as text.

    Args:
        file: YAML with flag names for keys, and values or lists of them.
        known: names that may be there, as fields.
        errors: what is wrong joins these.
    """
    found: dict[str, list[str]] = {}
    for name, origin, node in _entries(file, known, "a setting of a study", errors):
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not items or not all(isinstance(item, yaml.ScalarNode) for item in items):
            errors.append(f"{origin} must be a value or a list of values.")
        else:
            found[name] = [str(item.value) for item in items]
    return found


def _entries(
    file: Path, known: Collection[str], what: str, errors: list[str]
) -> Iterator[tuple[str, str, yaml.Node]]:
    """Name, origin and value of each setting of a YAML file; what is wrong joins ``errors``."""
    seen: set[str] = set()
    for key, node in _pairs(file, errors):
        written = key.value if isinstance(key, yaml.ScalarNode) else NODE_WORDS[type(key)]
        name = written.replace("-", "_")
        origin = f"{flag_name(name)} in {file}"
        if name not in known:
            hint = near_setting(written, known)
            errors.append(f"{written} in {file} is not {what}.{hint}")
        elif name in seen:
            line = key.start_mark.line + 1
            errors.append(f"{origin} is given twice, again in line {line}. Give it once.")
        else:
            yield name, origin, node
        seen.add(name)


def _pairs(file: Path, errors: list[str]) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of a YAML file, and where they stand; what is wrong joins ``errors``."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as failure:
        errors.append(f"--config: {file} cannot be read ({failure.strerror or failure}).")
        return []
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as failure:
        errors.append(
            f"--config: {file} is not YAML that can be read: {_fault_of_yaml(failure)}. "
            "Write lines like 'sigma: 0.8'."
        )
        return []
    if isinstance(root, yaml.MappingNode):
        return list(root.value)
    if root is not None and root.tag != NULL:
        found = NODE_WORDS[type(root)]
        errors.append(f"--config: {file} must hold lines like 'sigma: 0.8', not {found}.")
    return []


def _fault_of_yaml(failure: Exception) -> str:
    """Where a file stops being YAML, and why, in a few words."""
    if isinstance(failure, yaml.MarkedYAMLError) and failure.problem_mark:
        mark, problem = failure.problem_mark, failure.problem or "cannot be read"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem.removeprefix('but ')}"
    if isinstance(failure, RecursionError):
        return "lists or mappings are nested too deeply"
    return "it holds characters that are not text in UTF-8"


def _as_typed(node: yaml.ScalarNode, kind: type) -> str | bool | None:
    """What a file says, as a flag would: text, but for null and for the value of a switch.

    YAML's own idea of numbers (010 is 8, 1:30 is 90, 1e-5 is text) is left aside.
    """
    if node.tag == NULL:
        return None
    if kind is bool and node.tag == BOOL:
        return yaml.SafeLoader.bool_values.get(node.value.lower(), node.value)
    return str(node.value)


def _settle_exclusives(
    given: dict[str, _Given], typed: dict[str, _Given], errors: list[str]
) -> None:
    """Drop a file's answer where a flag answers the same question; report two answers in one."""
    for group in EXCLUSIVE:
        for source in (typed, given):
            origins = [source[name].origin for name in group if name in source]
            if len(origins) > 1:
                errors.append(f"{' and '.join(origins)} contradict each other: give one.")
        if any(name in typed for name in group):
            for name in group:
                given.pop(name, None)


def _refuse_incompatibles(given: Mapping[str, _Given], errors: list[str]) -> None:
    """Report settings that do not go together, wherever each was given."""
    for pair, why in INCOMPATIBLE.items():
        origins = [given[name].origin for name in pair if name in given]
        if len(origins) == len(pair):
            errors.append(f"{' and '.join(origins)} contradict each other: {why}. Give one.")


def _parse_all(given: Mapping[str, _Given], errors: list[str]) -> dict[str, Any]:
    """The values that are in order; what is wrong with the others joins ``errors``."""
    values = {}
    for name, entry in given.items():
        value, error = _parse(name, entry)
        if error:
            errors.append(error)
        else:
            values[name] = value
    return values


def _parse(name: str, entry: _Given) -> tuple[Any, str | None]:
    """One value in its type, or what is wrong with it."""
    kind, value = KINDS[name], entry.value
    if kind is bool:
        fault = None if isinstance(value, bool) else f"{entry.origin} must be {KIND_WORDS[bool]}."
        return value, fault
    if kind in (str, Path):
        return kind(str(value)), _fault_of_text(name, str(value), entry.origin)
    number = _number(value, kind)
    return number, _fault_of_number(name, number, entry)


def _fault_of_text(name: str, text: str, origin: str) -> str | None:
    setting = SETTINGS[name]
    if KINDS[name] is Path and not text:
        return f"{origin} must not be empty. Name a folder, or leave it out."
    if setting.besides and setting.besides[0](text):
        return None
    if setting.choices and text not in setting.choices:
        more = f"; or {setting.besides[1]}" if setting.besides else ""
        return (
            f"{origin}: there is no {flag_name(name)} '{text}'."
            f"{near(text, setting.choices)} Known: {', '.join(setting.choices)}{more}."
        )
    if setting.pattern and not re.fullmatch(setting.pattern[0], text):
        return f"{origin} must be {setting.pattern[1]}, not '{text}'."
    return None


def _fault_of_number(name: str, number: float | None, entry: _Given) -> str | None:
    bounds = SETTINGS[name].bounds
    if number is None:
        pointed = str(entry.value).replace(",", ".")  # some write a decimal comma
        meant = pointed != str(entry.value) and _number(pointed, float) is not None
        hint = f" Did you mean {pointed}?" if meant else ""
        return f"{entry.origin}: '{entry.value}' is not {KIND_WORDS[KINDS[name]]}.{hint}"
    if bounds and not bounds.holds(number):
        hint = " To train without privacy use --no-dp." if name == "sigma" and number == 0 else ""
        return f"{entry.origin} must be {bounds}, not {entry.value}.{hint}"
    return None


def _number(value: Any, kind: type) -> float | int | None:
    """A finite number of the kind, or None."""
    try:
        number: float | int = kind(str(value))
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def near_setting(written: str, known: Collection[str]) -> str:
    """The same for what was written in the place of a setting, one of ``known`` as fields."""
    ours = OTHER_NAMES.get(written.replace("_", "-"), "")
    if ours.replace("-", "_") in known:
        return f" Here it is called {ours}."
    return near(written, map(flag_name, known))


def near(text: str, names: Iterable[str]) -> str:
    """' Did you mean ...?' with the near matches, or nothing."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _with_defaults(values: dict[str, Any]) -> TrainConfig:
    """Fill in what depends on data set and optimizer."""
    plain = TrainConfig(**values)
    if plain.source is None:
        found = Found(DATASETS[plain.dataset], plain.dataset)
    else:
        from dpmac_cli.data.own import inspect  # noqa: PLC0415  (loads numpy)

        found = inspect(plain.source)  # once: files may change during a run
    plain = replace(plain, found=found)
    defaults, adaclip = plain.facts.defaults, plain.optimizer == "adaclip"
    noise = defaults.sigma if plain.epsilon is None else None
    rest: dict[str, Any] = {
        **vars(defaults),
        "lr": plain.method.rate_on(plain.dataset),
        "beta1": 0.99 if adaclip else 0.9,
        "beta2": 0.9 if adaclip else 0.999,
        "physical_batch": max(1, defaults.physical_batch // (plain.augmentations or 1)),
        "sigma": 0.0 if plain.no_dp else noise,
        "epochs": defaults.epochs if plain.steps is None else None,
    }
    if plain.augmentations is not None:
        rest["augment"] = plain.facts.augment
    if plain.chosen_features is not None:
        rest |= {"model": "linear", "feature_groups": plain.chosen_features.groups}
    if plain.pretrained is not None:
        rest["train"] = TRAINED[0]
    if plain.head_only or {**rest, **values}["model"] == "linear":
        rest["physical_batch"] = max(defaults.physical_batch, ROWS_AT_A_TIME)
    if plain.canaries is not None:
        rest["canary_kind"] = CANARY_KINDS[0]
        rest["guesses"] = max(plain.canaries // 10, min(plain.canaries, FEW_GUESSES))
    return replace(plain, **{**rest, **values})


def _faults_between(config: TrainConfig) -> Iterable[str]:
    """Faults that lie between settings."""
    for name, (other, why) in NEEDS.items():
        if getattr(config, name) is not None and getattr(config, other.split()[0]) is None:
            yield f"--{flag_name(name)} {why}: add --{other}, or leave it out."
    if config.source and config.source.feature_range:
        low, high = config.source.feature_range
        if low >= high:
            yield f"--feature-range {config.feature_range}: the first must be the smaller."
    if config.h1 > config.h2:
        yield f"--h1 ({config.h1:g}) must not be above --h2 ({config.h2:g})."
    if config.batch_size > config.facts.train_size:
        yield (
            f"--batch-size ({config.batch_size}) must not be above the size of {config.dataset}, "
            f"{config.facts.train_size}."
        )
    if config.canaries is not None:
        yield from _audit_faults(config, config.canaries)
    yield from _frozen_faults(config)
    if config.tensorboard:
        yield from fault_of_extra("tensorboard", "--tensorboard")
    if not STEPS.holds(config.total_steps):
        yield (
            f"--epochs {config.epochs} is {config.total_steps:,} steps in all at a --batch-size of "
            f"{config.batch_size:,}; a run takes at most {STEPS.high:,}. Choose fewer epochs or "
            "larger batches."
        )
    if config.augmentations is not None and config.facts.shape[1:] == (1, 1):
        yield f"--augmentations is for images, and {config.dataset} is a table. Leave it out."
    if config.warmup_steps >= config.total_steps:
        yield (
            f"--warmup-steps ({config.warmup_steps:,}) must be below the steps of the run, "
            f"{config.total_steps:,}."
        )


def _audit_faults(config: TrainConfig, canaries: int) -> Iterable[str]:
    """Faults between the settings of an audit and others."""
    if config.sampler != "poisson":
        yield (
            f"--canaries: only poisson sampling can be audited, not {config.sampler}. Leave out "
            "--sampler or --canaries."
        )
    if config.canary_kind == "images" and config.source is not None:
        yield "--canary-kind images is for the data sets of the catalogue: leave it out."
    if (config.guesses or 0) > canaries:
        yield f"--guesses ({config.guesses:,}) must not be above --canaries ({canaries:,})."


def _frozen_faults(config: TrainConfig) -> Iterable[str]:
    """Faults between what is frozen and other settings."""
    features = config.chosen_features
    if features is not None and config.facts.levels == 1:
        yield (
            f"--features {features.kind} is of images, and {config.dataset} holds rows of numbers. "
            "Leave it out."
        )
    elif features is not None and (fault := features.fault(config.facts.shape)) is not None:
        yield f"--features {features.kind}: images of {config.dataset} {fault}"
    if config.pretrained is not None and not Path(config.pretrained).is_file():
        yield f"--pretrained: there is no file {config.pretrained}."
    if config.augmentations is not None and (features is not None or config.head_only):
        yield (
            "--augmentations draws views anew in every step, and what is frozen is computed once: "
            "leave one of them out."
        )
    if config.canary_kind == "images" and (features is not None or config.head_only):
        yield (
            "--canary-kind images is of networks that are trained on images, not behind a frozen "
            "part: leave it out."
        )


def _notes(config: TrainConfig, typed: Mapping[str, _Given]) -> Iterable[str]:
    """What is legal, but probably not what was meant."""
    for name, what in _idle_on(config).items():
        if name in typed:
            yield f"{typed[name].origin} has no effect with {what}."
    if config.found.skipped:
        yield (
            f"{len(config.found.skipped)} records of {config.dataset} are left out: "
            f"{config.found.skipped[0]}."
        )
    if config.found.inferred and not config.no_dp:
        yield (
            f"{listed(config.found.inferred).capitalize()} of {config.dataset} were taken from its "
            "records and are treated as public. Declare them to avoid that: "
            f"{_declaration(config.found)}"
        )
    if config.found.untested:
        some, more = config.found.untested[:NAMED], len(config.found.untested) - NAMED
        yield (
            f"{config.dataset} has no test record of the classes {', '.join(some)}"
            f"{f' and {more} more' if more > 0 else ''}: accuracy says nothing of them."
        )
    if not config.no_dp:
        yield from delta_note(config.delta, config.facts.train_size)
        if config.sampling_rate == 1 and not SAMPLERS[config.sampler].once_an_epoch:
            yield (
                f"With batches of --batch-size {config.batch_size} every record takes part in "
                "every step: drawing them at random makes nothing cheaper. Unless a few such "
                "steps are what you want, choose a smaller --batch-size."
            )


def _declaration(found: Found) -> str:
    """The flags that declare what was found; a name with a comma cannot be given as one."""
    (channels, *size), names = found.facts.shape, ",".join(found.facts.classes)
    flags = {"channels": f"--channels {channels}", "image size": f"--image-size {max(size)}"}
    if names.count(",") < len(found.facts.classes):
        flags["classes"] = f"--classes {shlex.quote(names)}"
    return " ".join(flags[part] for part in found.inferred if part in flags)


def _idle_on(config: TrainConfig) -> dict[str, str]:
    """Settings that have no effect, with what, and why where that is not plain."""
    used, data = {*config.method.settings, "optimizer"}, config.dataset
    panel = {name: setting.panel for name, setting in SETTINGS.items()}
    idle = {n: config.optimizer for n in panel if panel[n] == OPTIMIZER and n not in used}
    if ":" not in config.model:
        idle |= dict.fromkeys(("fix_norm", "to_float32", "no_isolate"), config.model)
    if config.source is None:
        return idle | {name: data for name in panel if panel[name] == DATA}
    idle["data_dir"] = f"{data}, which is a path itself"
    if not config.found.held_out:
        own_test = f"{data}, which has a test set of its own"
        idle |= dict.fromkeys(("test_fraction", "split_seed"), own_test)
    if config.facts.levels == 1:
        of_images = ("channels", "image_size", "standardise")
        idle |= dict.fromkeys(of_images, f"{data}, which holds rows of numbers")
    else:
        idle["feature_range"] = f"{data}, which holds images"
    return idle


def delta_note(delta: float, records: int) -> Iterable[str]:
    """A word on a delta that promises next to nothing."""
    limit = 1 / records
    if delta >= limit:
        yield (
            f"delta {delta:g} is not below 1/n = {limit:.2g}: at that size the guarantee "
            "allows publishing a whole record now and then. Choose a smaller --delta."
        )


#: How a config.yaml of ours begins.
HEADER = "# Settings of a dpmac run."


def to_yaml(config: TrainConfig) -> str:
    """The file that, given to --config with the same --seed, repeats an unbranched run exactly."""
    body = yaml.safe_dump(config.recorded(), sort_keys=False)
    return f"{HEADER} dpmac train --config FILE trains with them anew; a seed is not kept.\n{body}"
