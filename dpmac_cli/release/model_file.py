"""Published models: weights by their names in the module, and public facts.

A model is one safetensors file. Its header contains the facts as JSON, with a checksum of weights
and facts.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from dpmac_cli import files
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.statements import short, unit_of
from dpmac_cli.config import networks as registry
from dpmac_cli.config.datasets import Signature
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.encoders import ENCODERS, EncoderConfig, TextEncoder, reader_of
from dpmac_cli.config.facts import some_of
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.errors import InputError, ModelError, first_fault
from dpmac_cli.features import backbones
from dpmac_cli.features.frozen import FrozenFeatures
from dpmac_cli.features.texts import encoder_weights
from dpmac_cli.models import weights
from dpmac_cli.models.build import Network, build_model, build_network, seen_by_network
from dpmac_cli.models.digest import digest
from dpmac_cli.release.facts import Facts
from dpmac_cli.release.report import parse_file
from dpmac_cli.runs import folder
from dpmac_cli.training.carried_accounts import attach

#: Key of the checksum in the facts. safetensors does not preserve the order of header keys.
CHECKSUM = "checksum"
FOREIGN = "was not written by dpmac train, or was modified"
#: Parameters that a network may have beyond those of its file and is built nevertheless: 64 MiB.
MOST_MISSING = 1 << 24
WANTED = folder.WANTED_MODEL
#: What to do where a public network is not found.
ELSEWHERE = "Add {public} with the folder of its encoder, or the file of its backbone's weights."


@dataclass(frozen=True)
class Released:
    """A published model, and what its file says of it.

    Attributes:
        model: the network in evaluation mode.
        facts: first half of the report of its run.
        path: the model file.
        reader: how it reads texts; None if it does not.
        device: device of the network.
    """

    model: nn.Module
    facts: Facts
    path: Path
    reader: TextReader | None
    device: torch.device


def save_model(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Write weights and public facts atomically, in a plain safetensors file.

    Args:
        path: the file.
        model: network whose parameters and persistent buffers are published.
        facts: first half of the report of its run, as JSON values.

    Raises:
        OSError: the file cannot be written.
    """
    published = weights.published(model)
    tensors = {name: weights.stored(tensor) for name, tensor in published.items()}
    sealed = {**facts, CHECKSUM: digest(tensors, facts)}
    header = {files.MODEL_HEADER: json.dumps(sealed, allow_nan=False)}
    files.write_atomically(path, safetensors.torch.save(tensors, header))


def load_model(
    path: Path | str,
    device: torch.device = torch.device("cpu"),  # noqa: B008  (never changes)
    *,
    factory: str | None = None,
    network: Network | None = None,
    public: Path | str | None = None,
) -> Released:
    """Load a published model, with the public network whose features it was trained on.

    Args:
        path: a run folder or a model file.
        device: device of the loaded model.
        factory: ``FILE.py:FACTORY`` of a user-supplied model. The name in the file is not imported.
        network: instead of ``factory``, a network that is defined in the program: its class or a
            function, called like a factory, or an instance, of which a copy gets the weights.
        public: folder of the text encoder, or file of the weights of the backbone, that it was
            trained on; None for a registered one, or for where the config.yaml beside it says.

    Raises:
        InputError: the file does not exist, is not a dpmac model, or is damaged; there is no such
            factory; or the public network is missing, or another one.
        ModelError: the network cannot be built, or does not fit the file.
    """
    file, tensors, facts, checksum = _read(Path(path))
    reference = _network(file, facts, factory, network)
    features = _features(file, facts, public)
    _check_size(file, tensors, reference, seen_by_network(facts.signature, features))
    trained = facts.settings.train
    part = "head" if trained == "head" else "all"  # LoRA updates were merged
    model = build_model(
        reference,
        facts.signature,
        seed=0,
        fix_norm=facts.settings.fix_norm or False,
        features=features,
        trained=None if trained is None else registry.Trained(part),
        isolated=True,  # scoring does not need independence across samples
    )
    if misfits := list(_misfits(_forms(tensors), _forms(weights.published(model)))):
        raise ModelError(f"{file} does not fit the network {reference}: {some_of(misfits)[0]}.")
    if isinstance(model, FrozenFeatures):
        _add_public_weights(file, facts, model, features, public)
    weights.adopt(model, tensors)
    attach(model, _account(facts, checksum))
    reader = _text_reader(file, tensors, features)
    return Released(model.to(device).eval(), facts, file, reader, device)


def _misfits(in_file: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[str]:
    """Yield why tensors of a file are not those of a network, one phrase each; nothing if they are.

    Args:
        in_file, expected: forms of the tensors by name, as :func:`_forms` returns them.
    """
    for key in sorted(in_file.keys() | expected.keys()):
        there = in_file.get(key)
        wanted = expected.get(key)
        if there != wanted:
            yield f"{key}: {there or 'missing'} in the file, expected {wanted or 'nothing'}"


def _add_public_weights(
    file: Path,
    facts: Facts,
    model: FrozenFeatures,
    features: registry.Features | None,
    public: Path | str | None,
) -> None:
    """Load the weights that features are computed with, which the file names by their checksum.

    Args:
        file: the model file, for messages.
        facts: its facts, with the name and the SHA-256 of the public weights.
        model: the network, whose part ``frozen`` gets the weights.
        features: what it computes; nothing is loaded for fixed features and a program's own.
        public: folder or file of the weights; None for where they are registered or were.

    Raises:
        InputError: they are missing, or other weights than those of the training.
    """
    known, network = facts.features, model.get_submodule("frozen")
    if isinstance(features, TextEncoder):
        public_weights, head = encoder_weights(features), None
    elif isinstance(features, registry.Backbone):
        public_weights = _backbone_weights(file, facts, features.kind, public)
        network = network.get_submodule("network")
        head = registry.BACKBONES[features.kind].head
    else:
        return
    if known is not None and public_weights.sha256 != known.sha256:
        raise InputError(
            f"{file} was trained on public weights with the SHA-256 {known.sha256}, but that of "
            f"{public_weights.path} is {public_weights.sha256}. {ELSEWHERE}"
        )
    for _ in public_weights.adopted_by(network, head):
        pass  # notes for training


def _backbone_weights(
    file: Path, facts: Facts, kind: str, public: Path | str | None
) -> weights.PublicWeights:
    """Read the weights of a backbone from where they are registered, or from the user's own file.

    Raises InputError if they are missing or damaged.
    """
    if public is None and facts.settings.pretrained is None:
        return backbones.public_weights(kind)
    return weights.read_weights(_place_of(file, facts, "pretrained", public))


def _place_of(file: Path, facts: Facts, setting: str, public: Path | str | None) -> Path:
    """Return where a public network of the user's own is. Raises InputError.

    ``setting`` is the one of config.yaml that says so, unless ``public`` does.
    """
    if public is not None:
        return Path(public)
    with suppress(*folder.BROKEN):
        place = Path(folder.settings(file.parent)[setting])
        if place.exists():
            return place
    sha256 = None if facts.features is None else facts.features.sha256
    name = facts.settings.pretrained or facts.settings.backbone
    raise InputError(
        f"{file} was trained on features of the public network {name} (SHA-256 {sha256}), which is "
        f"not part of the file. {ELSEWHERE}"
    )


def _check_size(
    file: Path, tensors: Mapping[str, Tensor], reference: object, seen: Signature
) -> None:
    """Raise InputError for a built-in network with many more parameters than the file has.

    They are counted without memory for them. A smaller network is built, to name what differs.
    """
    if not isinstance(reference, registry.BuiltIn):
        return
    with torch.device("meta"):
        network = build_network(reference.name, seen)
    needed = sum(parameter.numel() for parameter in network.parameters())
    in_file = sum(tensor.numel() for tensor in tensors.values())
    if needed > in_file + MOST_MISSING:
        raise InputError(
            f"{file} {FOREIGN} ({reference.name} has {needed:,} parameters on these records, the "
            f"file {in_file:,} numbers). {WANTED}"
        )


def _account(facts: Facts, checksum: str) -> Account:
    """Return the account that a model file tells of; training it further adds to it.

    Its number is the checksum of the file, so that two copies of a model are one account.
    """
    unit = unit_of(covered=facts.settings.cover_scores or False, several=bool(facts.data.unit))
    return Account(
        others=facts.events,
        delta=facts.delta or 0.0,
        unit=(short(unit), facts.data.unit or ""),
        seeded=facts.seeded,
        secure=facts.secure,
        searched=facts.search is not None,
        number=checksum,
    )


def _text_reader(
    file: Path,
    tensors: Mapping[str, Tensor],
    features: registry.Features | None,
) -> TextReader | None:
    """Return how a published model reads texts; None if it is not for texts.

    Raises InputError if it has no tokenizer.
    """
    if not isinstance(features, TextEncoder):
        return None
    _, limit = features.texts[0]
    if features.folder is not None:
        return features.reader(limit)
    try:
        content = tensors["frozen.vocabulary"].numpy().tobytes()
        return reader_of(content, features.config, limit)
    except (KeyError, ValueError) as failure:
        raise InputError(f"{file} {FOREIGN} (it has no tokenizer). {WANTED}") from failure


def _encoder_of(file: Path, facts: Facts, named: str, public: Path | str | None) -> TextEncoder:
    """Read the encoder that a model was trained on. Raises InputError."""
    if public is None and named in ENCODERS:
        return read_encoder(named)
    return read_encoder(str(_place_of(file, facts, "backbone", public)))


def _encoder(file: Path, form: Mapping[str, Any]) -> EncoderConfig:
    """Return the form of a network on texts. Raises ModelError if it is not supported."""
    try:
        return EncoderConfig.model_validate(form)
    except ValueError as failure:
        raise InputError(
            f"{file} needs a network on texts that this version does not support "
            f"({first_fault(failure)}). Use the version of dpmac that wrote it, or train it again."
        ) from failure


def _network(
    file: Path, facts: Facts, factory: str | None, network: Network | None
) -> registry.BuiltIn | registry.UserModel | Network:
    """Return the network to build: a built-in one, or what the caller passes.

    A file never says what code is imported.

    Args:
        file: the model file, for messages.
        facts: its facts, with the name of the network.
        factory: ``FILE.py:FACTORY`` of a user-supplied network; None without.
        network: network of the program, instead.

    Raises:
        ModelError: a user-supplied network is needed, or a built-in one that there is not.
    """
    named = registry.parse_model(facts.network.name)
    if isinstance(named, registry.BuiltIn):
        if named.name in registry.MODELS:
            return named
        raise ModelError(f"{file}: this version does not support the model '{facts.network.name}'.")
    if network is not None:
        return network
    if factory is None:
        raise ModelError(
            f"{file} has a user-supplied network, {facts.network.name}, which is not imported "
            "automatically. If you trust it, add --model FILE.py:FACTORY; in a program, pass "
            f"network= with an instance of {named.factory}, a function that builds one, or the "
            f"class itself, or factory='FILE.py:{named.factory}'."
        )
    return registry.parse_model(factory)


def _features(file: Path, facts: Facts, public: Path | str | None) -> registry.Features | None:
    """Return the features that the network takes; None if it takes records.

    An encoder that was trained further is in the file, and only its form is needed. Another one is
    read from where it is registered, from ``public``, or from where the run's config.yaml says.

    Raises:
        InputError: an encoder is missing, or another one than that of the training.
        ModelError: features of a program that are not registered in this one.
    """
    settings, known = facts.settings, facts.features
    if known is None or (settings.backbone or settings.features) is None:
        return None
    named = known.name
    if known.encoder is not None:
        config = _encoder(file, known.encoder)
        causal = facts.task.network is not None
        if settings.train != "head":  # the file has the whole network
            whole = TextEncoder(named, config, weight_bytes=file.stat().st_size)
            return whole.of(facts.data.records, causal=causal)
        encoder = _encoder_of(file, facts, named, public)
        if encoder.config != config:
            raise InputError(
                f"{file} was trained on another encoder or tokenizer than {encoder.folder}. "
                f"{ELSEWHERE}"
            )
        return replace(encoder, kind=named).of(facts.data.records)
    if named in registry.BACKBONES and settings.backbone_size is not None:
        return registry.Backbone(named, settings.backbone_size, settings.backbone_flips or False)
    if named in registry.FEATURES:
        return registry.FEATURES[named]
    raise ModelError(
        f"{file} needs features '{named}', which this version does not have. If they are your own, "
        "predict and evaluate in a program that registers them: register_features."
    )


def _read(path: Path) -> tuple[Path, dict[str, Tensor], Facts, str]:
    """Return a model file, its weights by name, its facts, and the checksum of both.

    Args:
        path: a run folder or a model file.

    Raises:
        InputError: there is no such file, it is no dpmac model, or it is damaged.
    """
    file, content = folder.read_run_file(path, folder.MODEL, WANTED)
    try:
        tensors, header = weights.unpacked(content)
    except ValueError as failure:
        raise InputError(
            f"{file} is not a valid safetensors file: it is damaged or of another type. {WANTED}"
        ) from failure
    if weights.CHECKPOINT_HEADER in header:
        raise InputError(
            f"{file} is a private checkpoint, from which the noise of its run can be computed. "
            f"Do not share it. Use {folder.MODEL}, one folder up."
        )
    text = header.get(files.MODEL_HEADER, "{}")
    facts = parse_file(Facts, text, file, FOREIGN, WANTED)
    sealed = json.loads(text)
    checksum = sealed.pop(CHECKSUM, None)
    if checksum != digest(tensors, sealed):
        raise InputError(
            f"{file} is damaged: its contents do not match its checksum. Copy it again from its "
            "source, or train again."
        )
    faults = weights.not_finite(tensors)
    if faults:
        raise InputError(f"{file} {FOREIGN} ({'; '.join(faults)}). {WANTED}")
    return file, tensors, facts, checksum


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the shape of each tensor as text, and its dtype if that is not float32, by name."""
    forms = dict[str, str]()
    for name, tensor in tensors.items():
        forms[name] = f"{tuple(tensor.shape)}"
        if tensor.dtype != torch.float32:
            forms[name] += f" of {tensor.dtype}".replace("torch.", "")
    return forms
