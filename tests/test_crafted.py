"""Crafted files: every field of every header with odd values, each rejected at once or harmless.

A header is what a file says besides its numbers: of a model, a checkpoint, a ledger, a report,
metrics, an audit, an encoder and its tokenizer. Checksums are those of the crafted content.
"""

import copy
import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save
from torch import Tensor

from dpmac_cli import ArrayData, train
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.errors import DpmacError, InputError
from dpmac_cli.features.texts import TextFeatures, encoder_weights
from dpmac_cli.files import MODEL_HEADER
from dpmac_cli.models.digest import digest
from dpmac_cli.models.weights import CHECKPOINT_HEADER, unpacked
from dpmac_cli.release.model_file import CHECKSUM
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import checkpoint, folder, ledger
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import collect
from dpmac_cli.studies.written import COMPARE_JSON, write_comparison
from tests.digits_runs import after, digits_config, train_digits
from tests.tiny_bert import encoder_at, notes, write_encoder
from tests.typed import dpmac

REMOVED = object()
#: What may be in the place of any value.
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2, 10**6, 2**31, 2**63, 10**30, 10**400, -0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "\x1b[31m", "9" * 5000, [], [1], [[]]),
    *([0] * 10_000, {}, {"a": 1}, [{"a": []}], REMOVED),
)
#: Seconds for one file.
LIMIT = 10


class TooLong(BaseException):
    """A crafted file took more than :data:`LIMIT` seconds."""


@contextmanager
def at_once() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a header; of a list, those of the first two."""
    yield at
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(min(2, len(value)))
        for key in keys:
            yield from places(value[key], (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return a header with another value in a place."""
    if not at:
        return new
    changed = copy.deepcopy(value)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    if new is REMOVED:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return changed


def crafted(header: Any, name: str, count: int) -> Iterator[tuple[str, Any]]:
    """Yield crafted headers with what they are: ``count`` of them, or all if there are fewer."""
    cases = [(at, new) for at in places(header) for new in ODD if at or new is not REMOVED]
    chosen = random.Random(name).sample(cases, min(count, len(cases)))
    for at, new in chosen:
        yield f"{name} {at} = {new!r:.40}", put(header, at, new)


def said(what: str, *command: str | Path, codes: tuple[int, ...] = (0, 2)) -> str:
    """Type a command: it ends with one clear message, or is not harmed."""
    with at_once():
        result = dpmac(*command)
    shown = f"{what}: {result.exit_code} {result.output[-300:]}"
    assert result.exit_code in codes, shown
    assert "unexpectedly" not in result.output, shown
    assert "Traceback" not in result.output, shown
    assert len(result.stderr) < 10_000, shown  # a name of 5,000 characters is shown
    return result.stderr


# Headers, each with the commands that read it.

SHORT, LONG = 100, 4000


def of_report(count: int) -> None:
    run = train_digits(out="run", steps=2, model="linear").folder
    report = json.loads((run / folder.REPORT).read_text())
    for what, header in crafted(report, "report", count // 2):
        (run / folder.REPORT).write_text(json.dumps(header))
        said(what, "account", run)
        said(what, "runs")


def of_metrics(count: int) -> None:
    run = train_digits(out="run", steps=2, model="linear").folder
    lines = [json.loads(line) for line in (run / folder.METRICS).read_text().splitlines()]
    for what, header in crafted(lines, "metrics", count // 10):  # drawing takes time
        if isinstance(header, list):
            text = "".join(json.dumps(line) + "\n" for line in header)
            (run / folder.METRICS).write_text(text)
            said(what, "report", run, "--html", "page.html", "--force")


def of_comparison(count: int) -> None:
    names = {"optimizers": "dp-sgd,dp-adam", "sigma": "6", "seeds": "1,2", "steps": "1"}
    grid = plan({"dataset": "digits", **names}, None, Path("runs"))
    write_comparison(collect(grid, {}), Path())
    study = json.loads(Path(COMPARE_JSON).read_text())
    for row in study["rows"]:
        row |= {"mean": 0.5, "std": 0.1}
    for what, header in crafted(study, "comparison", count // 10):  # drawing takes time
        Path(COMPARE_JSON).write_text(json.dumps(header))
        said(what, "report", ".", "--html", "page.html", "--force")


def of_audit(count: int) -> None:
    run = train_digits(out="run", steps=2, canaries=10).folder
    audit = json.loads((run / folder.AUDIT).read_text())
    for what, header in crafted(audit, "audit", count // 4):
        (run / folder.AUDIT).write_text(json.dumps(header))
        said(what, "eval", "--audit", run, codes=(0, 2, 4))


def of_ledger(count: int) -> None:
    run = stopped()
    path = run / folder.CHECKPOINTS / folder.LEDGER
    spent = json.loads(path.read_text())["spent"]
    spent |= {"earlier": [spent["event"]], "target": 3.0}
    spent["score"] = spent["event"] | {"sampling_rate": 1.0, "steps": 1, "records": "test"}
    for what, header in crafted(spent, "spent", count):
        text = json.dumps(header).encode()
        sealed = {"sha256": hashlib.sha256(text).hexdigest(), "spent": header}
        path.write_text(json.dumps(sealed))
        with at_once():
            found = ledger.read_ledger(run)
            if found is not None:
                assert found.base <= found.begun <= found.end
        said(what, "runs")


def of_checkpoint(count: int) -> None:
    run = stopped()
    tensors, header = unpacked(checkpoint.path_in(run).read_bytes())
    sealed = json.loads(header[CHECKPOINT_HEADER])
    for what, record in crafted(sealed["record"], "record", count // 2):
        checksum = digest(tensors, record)
        _resume(what, run, tensors, {**sealed, "sha256": checksum, "record": record})
    for what, odd in crafted(sealed, "checkpoint", count // 2):
        _resume(what, run, tensors, odd)


def _resume(what: str, run: Path, tensors: dict[str, Tensor], header: Any) -> None:
    """Resume a copy of a run with another header of its checkpoint."""
    shutil.rmtree("copy", ignore_errors=True)
    shutil.copytree(run, "copy")
    content = save(tensors, {CHECKPOINT_HEADER: json.dumps(header)})
    checkpoint.path_in(Path("copy")).write_bytes(content)
    said(what, "train", "--resume", "copy", codes=(0, 2, 4))


def stopped() -> Path:
    """Return a run that can be resumed."""
    return finish(train_plan(digits_config(out="run", steps=4, model="linear"), after(2))).folder


def of_model(count: int) -> None:
    run = train_digits(out="run", steps=2, model="linear").folder
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8), np.uint8))
    for what in _models(run / folder.MODEL, count // 2):
        said(what, "predict", run, "x.npz", "--force", codes=(0, 2, 4))


def of_text_model(count: int) -> None:
    run = on_texts()
    for what in _models(run / folder.MODEL, count // 2):
        said(what, "predict", run, "x.npz", "--force", codes=(0, 2, 4))


def on_texts(**more: Any) -> Path:
    """Return a run on texts, with texts to predict in x.npz."""
    write_encoder(Path("encoder"))
    texts, classes = zip(*notes(40), strict=True)
    data = ArrayData(np.array(texts), np.array(classes), classes=("mild", "severe"))
    flags = {
        "backbone": "./encoder",
        "tokens": 12,
        "sigma": 6.0,
        "steps": 2,
        "batch_size": 8,
        "device": "cpu",
        **more,
    }
    train({**flags, "dataset": data, "out": "run"})
    np.savez("x.npz", x=np.array(["no pain", "severe cough"]))
    return Path("run")


def _models(path: Path, count: int) -> Iterator[str]:
    """Write model files with crafted facts, one after the other."""
    tensors, facts = facts_in(path)
    for what, odd in crafted(facts, path.parent.name, count):
        if isinstance(odd, dict):
            write_model(path, tensors, odd)
            yield what


def facts_in(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a model file."""
    tensors, header = unpacked(path.read_bytes())
    facts = json.loads(header[MODEL_HEADER])
    facts.pop(CHECKSUM)
    return tensors, facts


def write_model(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    sealed = {**facts, CHECKSUM: digest(tensors, facts)}
    path.write_bytes(save(tensors, {MODEL_HEADER: json.dumps(sealed)}))


def of_safetensors(count: int) -> None:
    """The header that tells of each tensor, of a model and of public weights."""
    run = train_digits(out="run", steps=2, model="linear").folder
    header, rest = header_of(run / folder.MODEL)
    for what, odd in crafted(header, "safetensors", count // 2):
        write_header(run / folder.MODEL, odd, rest)
        said(what, "eval", run, codes=(0, 2, 4))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and what follows it."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(path: Path, header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def of_encoder(count: int) -> None:
    path = write_encoder(Path("encoder")) / "config.json"
    for what, header in crafted(json.loads(path.read_text()), "encoder", count):
        path.write_text(json.dumps(header))
        _encoder(what)


def of_tokenizer(count: int) -> None:
    path = write_encoder(Path("encoder")) / "tokenizer.json"
    header = json.loads(path.read_text())
    vocabulary = header["model"]["vocab"]
    header["model"]["vocab"] = {}  # of which each entry would be a case
    for what, odd in crafted(header, "tokenizer", count):
        if isinstance(odd, dict) and isinstance(odd.get("model"), dict):
            odd["model"]["vocab"] = odd["model"].get("vocab") or vocabulary
        path.write_text(json.dumps(odd))
        _encoder(what)


def _encoder(what: str) -> None:
    """Build the network of the folder ``encoder`` with its weights."""
    try:
        with at_once():
            encoder = encoder_at("encoder", (0, 12))
            network = TextFeatures(encoder)
            list(encoder_weights(encoder).adopted_by(network, None))
            encoder.reader(12).tokens(["no pain"], 12)
    except DpmacError as refused:
        if "\n" in str(refused):
            raise AssertionError(f"{what}: several lines") from refused
    except BaseException as failure:
        raise AssertionError(what) from failure


HEADERS: tuple[Callable[[int], None], ...] = (
    *(
        of_report,
        of_metrics,
        of_comparison,
        of_audit,
        of_ledger,
        of_checkpoint,
        of_model,
        of_text_model,
    ),
    *(of_safetensors, of_encoder, of_tokenizer),
)


@pytest.mark.promise("fuzz")
@pytest.mark.parametrize("header", HEADERS)
def test_no_crafted_header_fails_unexpectedly_or_does_not_end(
    header: Callable[[int], None],
) -> None:
    header(SHORT)


@pytest.mark.weekly
@pytest.mark.promise("fuzz")
@pytest.mark.parametrize("header", HEADERS)
def test_no_crafted_value_of_any_field_fails_unexpectedly(header: Callable[[int], None]) -> None:
    header(LONG)


# Each kind by itself, and what is said of it.


@pytest.mark.promise("fuzz")
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F8_E4M3", "shape": [40, 64]},
        {"dtype": "F8_E8M0"},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [0, 1 << 50]},
        {"data_offsets": [0, 1 << 62]},
    ],
)
def test_tensors_that_dpmac_does_not_write_are_refused(change: dict[str, Any]) -> None:
    run = train_digits(out="run", steps=2, model="linear").folder
    header, rest = header_of(run / folder.MODEL)
    name = next(name for name, entry in header.items() if entry.get("shape") == [10, 64])
    header[name] |= change
    write_header(run / folder.MODEL, header, rest)
    pretrained = ("--pretrained", run / folder.MODEL)
    training = ("train", "--dataset", "digits", "--model", "linear", "--sigma", "6")
    for command in (("eval", run), (*training, *pretrained)):
        text = said(str(change), *command, codes=(2,))
        assert "is not a valid safetensors file" in text


@pytest.mark.promise("fuzz")
@pytest.mark.parametrize("layers", [10**6, 10**30, 1e6, -1])
def test_a_million_layers_are_refused_at_once(layers: float) -> None:
    run = on_texts()
    tensors, facts = facts_in(run / folder.MODEL)
    facts["features"]["encoder"]["form"]["num_hidden_layers"] = layers
    write_model(run / folder.MODEL, tensors, facts)
    config = json.loads(Path("encoder/config.json").read_text())
    Path("encoder/config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    flags = ("--dataset", "notes.npz", "--backbone", "./encoder", "--tokens", "12", "--sigma", "6")
    np.savez("notes.npz", x=np.array(["a", "b"] * 20), y=np.array([0, 1] * 20))
    for command in (("predict", run, "x.npz"), ("train", *flags, "--classes", "no,yes")):
        assert "num_hidden_layers" in said(f"{layers}", *command, codes=(2,))


@pytest.mark.promise("fuzz")
def test_a_network_is_not_built_that_its_weights_cannot_fill() -> None:
    """Each number may be one of a large network; together they need terabytes."""
    run = on_texts(train="norm")
    tensors, facts = facts_in(run / folder.MODEL)
    large = {"vocab_size": 1 << 23, "hidden_size": 1 << 15, "intermediate_size": 1 << 17}
    facts["features"]["encoder"]["form"] |= large
    facts["features"]["encoder"]["width"] = 1 << 15
    write_model(run / folder.MODEL, tensors, facts)
    assert "parameters" in said("a large encoder", "predict", run, "x.npz", codes=(2,))
    digits = train_digits(out="digits", steps=2, model="mlp-small").folder
    tensors, facts = facts_in(digits / folder.MODEL)
    facts["data"]["records"] |= {"shape": [1, 5000, 5000]}
    write_model(digits / folder.MODEL, tensors, facts)
    assert "parameters" in said("a large image", "predict", digits, "x.npz", codes=(2,))


@pytest.mark.promise("fuzz")
def test_a_tokenizer_in_which_rust_panics_is_refused() -> None:
    """PanicException is a BaseException."""
    path = write_encoder(Path("encoder")) / "tokenizer.json"
    header = json.loads(path.read_text())
    header["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(header))
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be used"):
        read_encoder("encoder")


@pytest.mark.promise("fuzz")
@pytest.mark.parametrize("line", ["null", "[]", '{"step": "x"}', '{"step": 1e400}', "{", "\x00"])
def test_an_odd_line_of_metrics_is_named(line: str) -> None:
    run = train_digits(out="run", steps=2, model="linear").folder
    with (run / folder.METRICS).open("a") as file:
        file.write(f"{line}\n")
    text = said(line, "report", run, "--html", "page.html", codes=(2,))
    assert "metrics.jsonl, line 2: not written by dpmac" in text


@pytest.mark.promise("fuzz")
@pytest.mark.parametrize(
    "change",
    [{"begun": 10**9}, {"base": 3, "begun": 2}, {"event": None}, {"score": 0}, {"seeded": 1}],
)
def test_an_odd_ledger_is_damaged(change: dict[str, Any]) -> None:
    run = stopped()
    path = run / folder.CHECKPOINTS / folder.LEDGER
    spent = json.loads(path.read_text())["spent"] | change
    checksum = hashlib.sha256(json.dumps(spent).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": checksum, "spent": spent}))
    assert "spent.json is missing or damaged" in said("spent", "train", "--resume", run, codes=(2,))
