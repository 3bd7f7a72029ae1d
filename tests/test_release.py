"""The model to publish: readable without dpmac, and refused where it does not fit."""

import copy
import errno
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.weights import check_publishable, published
from dpmac_cli.release.model_file import load_model, save_model
from dpmac_cli.release.scoring import score
from dpmac_cli.storage.digest import digest
from tests.digits_runs import train_digits
from tests.typed import dpmac

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("release") / "run").folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def header(file: Path) -> Any:
    with safetensors.safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["dpmac"])


def test_weights_load_into_plain_torch(run: Path) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"), strict=True)
    facts = header(run / "model.safetensors")
    data = load_data("digits", run, CPU)
    # A reader has nothing but the header to prepare the images with.
    pixels = data.test.images.double() / facts["input"]["levels"]
    mean, std = (torch.tensor(facts["input"][key]).view(-1, 1, 1) for key in ("mean", "std"))
    right = plain(((pixels - mean) / std).float()).argmax(1) == data.test.labels
    report = json.loads((run / "report.json").read_text())
    assert right.double().mean().item() == pytest.approx(report["test"]["accuracy"])


def test_header_holds_the_public_facts(run: Path) -> None:
    facts = header(run / "model.safetensors")
    assert len(facts.pop("checksum")) == 64
    report = json.loads((run / "report.json").read_text())
    assert facts == {key: report[key] for key in facts}
    assert set(facts) == {
        "schema_version",
        "audit",
        "optimizer",
        "dataset",
        "model",
        "input",
        "classes",
        "target",
        "privacy",
        "statement",
    }
    assert facts["dataset"]["sha256"] == DATASETS["digits"].sha256


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_a_run_and_its_model_file_load_alike(run: Path, name: str) -> None:
    released = load_model(run / name, None, CPU)
    assert released.path == run / "model.safetensors"
    assert not released.model.training
    assert score(run / name, None, None, "cpu").result.samples == 360


def test_a_dataset_that_does_not_exist_is_named(run: Path) -> None:
    with pytest.raises(InputError, match=r"There is no dataset 'mnits' \(digits, "):
        load_model(run, "mnits", CPU)


def test_weights_survive_unchanged(file: Path, run: Path) -> None:
    released = load_model(run, None, CPU)
    save_model(file, released.model, released.facts)
    assert file.read_bytes() == (run / "model.safetensors").read_bytes()


#: A network whose state_dict is not its parameters and buffers alone.
KEEPER = """
import torch
from torch import nn


class Keeper(nn.Module):
    seen = torch.tensor([13.0, 17.0])

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((64,), 2.0))
        self.register_buffer("derived", torch.ones(1), persistent=False)
        {inside}

    def forward(self, x):
        return x / self.scale

    def extra_repr(self):
        return f"statistics={{self.seen.tolist()}}"

    {method}


def build():
    return nn.Sequential(nn.Flatten(), Keeper(), nn.Linear(64, 10))
"""
WORDS = struct.pack("<2f", 13.0, 17.0)
#: Ways for statistics to get into a state_dict: a line of the constructor, and a method.
WAYS = {
    "tensor": ("", "def get_extra_state(self): return self.seen"),
    "dict": ("", "def get_extra_state(self): return {'statistics': self.seen.tolist()}"),
    "hook": (
        "self._register_state_dict_hook(lambda m, found, *_: found.update(statistics=m.seen))",
        "",
    ),
    "override": (
        "",
        "def _save_to_state_dict(self, found, *_): found['statistics'] = self.seen",
    ),
}


@pytest.mark.privacy
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_buffers_alone_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Even if validation misses what else a network keeps."""
    monkeypatch.setattr("dpmac_cli.models.build.check_model", lambda *_, **__: None)
    net = tmp_path / "net.py"
    inside, method = WAYS[way]
    net.write_text(KEEPER.format(inside=inside, method=method))
    finished = train_digits(model=f"{net}:build", out=tmp_path / "run")
    tensors = safetensors.torch.load_file(finished.folder / "model.safetensors")
    assert tensors.keys() == {"1.scale", "2.weight", "2.bias"}
    for name in ("model.safetensors", "model-card.md", "report.json", "config.yaml"):
        content = (finished.folder / name).read_bytes()
        assert b"statistics" not in content
        assert WORDS not in content
    scored = dpmac("eval", str(finished.folder), "--model", f"{net}:build", "--json")
    assert scored.exit_code == 0, scored.stderr
    assert json.loads(scored.stdout)["accuracy"] == finished.report["test"]["accuracy"]


def test_what_is_published_has_the_names_of_a_state_dict() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.BatchNorm1d(3))})
    model.register_buffer("own", torch.ones(2))
    model.register_buffer("none", None)
    model.register_buffer("fleeting", torch.ones(2), persistent=False)
    nn.utils.parametrizations.orthogonal(shared)
    named = published(model)
    assert list(named) == list(model.state_dict())
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.detach().zero_()
    other.load_state_dict({name: tensor.clone() for name, tensor in named.items()})
    assert digest(published(other), {}) == digest(named, {})


def test_tensors_that_are_not_contiguous_are_published(file: Path, run: Path) -> None:
    model, facts = nn.Linear(3, 5), load_model(run, None, CPU).facts
    model.weight = nn.Parameter(torch.randn(3, 5).t())
    save_model(file, model, facts)
    assert torch.equal(safetensors.torch.load_file(file)["weight"], model.weight)


UNPUBLISHABLE: Mapping[str, torch.Tensor] = {
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "complex": torch.zeros(3, dtype=torch.complex128),
    "float8": torch.zeros(3).to(torch.float8_e4m3fn),
    "expanded": torch.zeros(1).expand(3),
}


@pytest.mark.parametrize("kind", UNPUBLISHABLE)
def test_a_tensor_that_cannot_be_published_is_named(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("table", UNPUBLISHABLE[kind])
    with pytest.raises(ModelError, match=r"0\.table of the network \(.*persistent=False"):
        check_publishable(model)
    model[0].register_buffer("table", UNPUBLISHABLE[kind], persistent=False)
    before = digest(published(model), {})
    check_publishable(model)
    assert digest(published(model), {}) == before


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        ("torch.ones(1).expand(2)", "cannot be saved in model.safetensors and loaded again"),
        ("torch.zeros(2, dtype=torch.complex128)", "(strided, complex128, cpu) cannot be saved"),
        ("torch.zeros(2).to(torch.float8_e4m3fn)", "float8_e4m3fn, cpu) cannot be saved"),
        ("torch.eye(2).to_sparse()", "sparse, quantized or meta tensor. Use a dense tensor"),
        ("torch.empty(2, device='meta')", "sparse, quantized or meta tensor. Use a dense tensor"),
    ],
    ids=["expanded", "complex", "float8", "sparse", "meta"],
)
def test_what_cannot_be_published_is_refused_before_the_first_step(
    tmp_path: Path, buffer: str, said: str
) -> None:
    net = tmp_path / "net.py"
    net.write_text(KEEPER.format(inside=f"self.register_buffer('e', {buffer})", method=""))
    with pytest.raises(ModelError) as failure:
        train_digits(model=f"{net}:build", out=tmp_path / "run")
    assert str(failure.value).startswith("1.e ")
    assert said in str(failure.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "value"), [("levels", 1), ("mean", [20.0]), ("std", [0.02])])
def test_images_are_prepared_as_the_header_says(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    edited(lambda t, f: f["input"].update({key: value}))(run, file)
    given = header(file)["input"]
    test = load_data("digits", run, CPU).test
    pixels = test.images.double() / given["levels"]
    x = ((pixels - given["mean"][0]) / given["std"][0]).float()
    with torch.no_grad():
        logits = load_model(file, None, CPU).model(x)
    loss = cross_entropy(logits, test.labels).item()
    assert score(file, None, None, "cpu").result.loss == pytest.approx(loss, rel=1e-5)
    before = score(run, None, None, "cpu").result.loss
    assert loss != pytest.approx(before, rel=1e-2)
    # Nor does what the catalog says by then have a part in it.
    other = replace(DATASETS["digits"], mean=(0.7,), std=(0.1,))
    monkeypatch.setitem(DATASETS, "digits", other)
    assert score(run, None, None, "cpu").result.loss == before


def test_a_model_for_other_images_says_what_does_not_fit(run: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(run, "mnist", CPU)
    message = str(caught.value)
    for part in (
        str(run / "model.safetensors"),
        "mlp-small, trained on digits",
        "does not fit mnist",
        "an image: (1, 8, 8) in the file, expected (1, 28, 28)",
        "1.weight: (64, 64) in the file, expected (64, 784)",
    ):
        assert part in message


def edited(
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
) -> Callable[[Path, Path], None]:
    """Write the model again with other tensors or facts, and with a checksum that is theirs."""

    def write(run: Path, file: Path) -> None:
        tensors = safetensors.torch.load_file(run / "model.safetensors")
        facts = header(run / "model.safetensors")
        del facts["checksum"]
        change(tensors, facts)
        facts["checksum"] = digest(tensors, facts)
        safetensors.torch.save_file(tensors, file, {"dpmac": json.dumps(facts)})

    return write


MISFITS: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (
        edited(lambda t, f: t.__delitem__("3.bias")),
        r"3.bias: missing in the file, expected \(10,\)",
    ),
    "extra": (
        edited(lambda t, f: t.update(more=torch.zeros(2))),
        r"more: \(2,\) in the file, expected nothing",
    ),
    "reshaped": (
        edited(lambda t, f: t.update({"3.bias": torch.zeros(7)})),
        r"3.bias: \(7,\) in the file, expected \(10,\)",
    ),
    "other images": (
        edited(
            lambda t, f: f["input"].update(
                shape=[3, 8, 8], record=[3, 8, 8], mean=[0.3] * 3, std=[0.4] * 3
            ),
        ),
        r"does not fit digits: 1.weight: \(64, 64\) in the file, expected \(64, 192\)",
    ),
    "other model": (
        edited(lambda t, f: f["model"].update(name="vit")),
        "this version does not support the model 'vit'",
    ),
}


@pytest.mark.parametrize(("write", "said"), MISFITS.values(), ids=MISFITS.keys())
def test_a_model_that_does_not_fit_is_refused(
    run: Path, file: Path, write: Callable[[Path, Path], None], said: str
) -> None:
    write(run, file)
    with pytest.raises(ModelError, match=said):
        load_model(file, None, CPU)


def test_a_model_of_a_dataset_that_is_not_known_is_loaded(run: Path, file: Path) -> None:
    edited(lambda t, f: f["dataset"].update(name="cats"))(run, file)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(load_model(file).model(x), load_model(run).model(x))


def header_text(text: str) -> Callable[[Path, Path], None]:
    def write(run: Path, file: Path) -> None:
        tensors = safetensors.torch.load_file(run / "model.safetensors")
        safetensors.torch.save_file(tensors, file, {"dpmac": text})

    return write


def cut(size: int) -> Callable[[Path, Path], None]:
    return lambda run, file: written((run / "model.safetensors").read_bytes()[:size])(run, file)


def written(content: bytes) -> Callable[[Path, Path], None]:
    return lambda run, file: (file.write_bytes(content), None)[1]


def unsealed(run: Path, file: Path) -> None:
    facts = header(run / "model.safetensors")
    del facts["checksum"]
    header_text(json.dumps(facts))(run, file)


NOT_WHOLE = "is not a valid safetensors file: it is damaged or of another type"
NOT_OURS = "was not written by dpmac train, or was modified ("
CHANNELS = "input: mean and std must have one number per channel"


def other_input(key: str, value: object) -> tuple[Callable[[Path, Path], None], str]:
    return edited(lambda t, f: f["input"].update({key: value})), f"{NOT_OURS}input.{key}"


def other_bias(bias: torch.Tensor, said: str) -> tuple[Callable[[Path, Path], None], str]:
    return edited(lambda t, f: t.update({"3.bias": bias})), f"{NOT_OURS}3.bias contains {said}"


DAMAGED: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (lambda run, file: None, "does not exist. Use a run folder"),
    "a folder": (lambda run, file: file.mkdir(), "is a folder, not a file"),
    "empty": (written(b""), NOT_WHOLE),
    "text": (written(b"hello" * 99), NOT_WHOLE),
    "huge header": (written(b"\xff" * 99), NOT_WHOLE),
    "cut in the header": (cut(100), NOT_WHOLE),
    "cut in the weights": (cut(-1), NOT_WHOLE),
    "no header": (
        lambda run, file: safetensors.torch.save_file({"a": torch.zeros(2)}, file),
        NOT_OURS,
    ),
    "broken header": (header_text('{"dataset": '), NOT_OURS),
    "header without facts": (header_text('{"dataset": {}}'), NOT_OURS),
    "header of another kind": (header_text("[1, 2]"), NOT_OURS),
    "null header": (header_text("null"), NOT_OURS),
    "nested header": (header_text("[" * 99_999), NOT_OURS),
    "names that are lists": (
        edited(lambda t, f: f.update(dataset={"name": ["digits"]}, model={"name": ["mlp"]})),
        NOT_OURS,
    ),
    "no checksum": (unsealed, NOT_OURS),
    "newer": (
        edited(lambda t, f: f.update(schema_version=99)),
        "was written by a newer dpmac (format 99; this version supports 1). Upgrade dpmac.",
    ),
    "version in words": (edited(lambda t, f: f.update(schema_version="one")), NOT_OURS),
    "no input": (edited(lambda t, f: f.__delitem__("input")), f"{NOT_OURS}input: "),
    "flat images": other_input("shape", [8, 8]),
    "negative height": other_input("shape", [1, -8, 8]),
    "levels of zero": other_input("levels", 0),
    "levels in words": other_input("levels", "16"),
    "no mean": (edited(lambda t, f: f["input"].update(mean=[])), CHANNELS),
    "two means": (edited(lambda t, f: f["input"].update(mean=[0.3, 0.3])), CHANNELS),
    "infinite mean": other_input("mean", [float("inf")]),
    "huge mean": other_input("mean", [10**400]),
    "std of zero": other_input("std", [0.0]),
    "negative std": other_input("std", [-1.0]),
    "std that is not a number": other_input("std", [float("nan")]),
    "std alone": other_input("std", 0.376),
    "NaN": other_bias(torch.full((10,), torch.nan), "NaN or infinity"),
    "one infinity": other_bias(torch.tensor([torch.inf, *range(9)]), "NaN or infinity"),
    "control characters": (
        edited(lambda t, f: f.update(classes=["\x1b[31m", *f["classes"][1:]])),
        NOT_OURS,
    ),
}


def refusal(path: Path) -> str:
    """Why a file or folder is no model to score."""
    with pytest.raises(InputError) as caught:
        load_model(path, None, CPU)
    return str(caught.value)


@pytest.mark.parametrize(("write", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_named(
    run: Path, file: Path, write: Callable[[Path, Path], None], said: str
) -> None:
    write(run, file)
    message = refusal(file)
    assert str(file) in message
    assert said in message


@pytest.mark.parametrize("kind", [torch.int64, torch.bfloat16, torch.float64, torch.bool])
def test_weights_of_another_kind_do_not_fit(run: Path, file: Path, kind: torch.dtype) -> None:
    write, _ = other_bias(torch.zeros(10, dtype=kind), "")
    write(run, file)
    name = str(kind).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"bias: \(10,\) of {name} in the file, expected \(10,\)"):
        load_model(file, None, CPU)


def test_a_flipped_bit_is_noticed_wherever_it_is(run: Path, file: Path) -> None:
    content, whole = (run / "model.safetensors").read_bytes(), load_model(run, None, CPU)
    # Cubes are dense where the header is: half of them hit the first eighth.
    for place in {int(len(content) * (k / 200) ** 3) for k in range(200)}:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            loaded = load_model(file, None, CPU)
        except InputError:
            assert str(file) in refusal(file)
            continue
        # The last digit of a number, which reads as the same number.
        assert content[place : place + 1].isdigit()
        assert loaded.facts == whole.facts
        assert digest(loaded.model.state_dict(), {}) == digest(whole.model.state_dict(), {})


def test_flipped_weights_are_damaged(run: Path, file: Path) -> None:
    content = (run / "model.safetensors").read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = f"{file} is damaged: its contents do not match its checksum. Copy it again"
    assert refusal(file).startswith(said)


def test_a_file_that_may_not_be_read_is_named(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes((run / "model.safetensors").read_bytes())

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(file) == f"{file} cannot be read (Permission denied)."


NAME_ONE = "Use a run folder of dpmac train, or a model.safetensors."


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "nowhere" / "model.safetensors"):
        assert refusal(path) == f"{path} does not exist. {NAME_ONE}"


def test_a_folder_of_another_kind_is_named(tmp_path: Path) -> None:
    said = f"{tmp_path} is not a run folder: it contains no model.safetensors. {NAME_ONE}"
    assert refusal(tmp_path) == said
    (tmp_path / "thesis.tex").write_text("mine")
    assert refusal(tmp_path) == said


def test_a_run_without_a_model_can_be_resumed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    said = (
        f"The run in {tmp_path} has not written its model.safetensors: it is still training, or "
        f"was stopped before. To resume it: dpmac train --resume {tmp_path}"
    )
    assert refusal(tmp_path) == refusal(tmp_path / "model.safetensors") == said


def test_a_folder_in_the_place_of_a_model_is_named(file: Path) -> None:
    file.mkdir()
    said = f"{file} is a folder, not a file. {NAME_ONE}"
    assert refusal(file) == refusal(file.parent) == said


@pytest.mark.privacy
def test_a_private_checkpoint_is_not_a_model(run: Path) -> None:
    checkpoint = next((run / "checkpoint").glob("step-*.safetensors"))
    assert refusal(checkpoint) == (
        f"{checkpoint} is a private checkpoint, from which the noise of its run can be computed. "
        "Do not share it. Use model.safetensors, one folder up."
    )
