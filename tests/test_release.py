"""The model to publish: readable without dpmac, and refused where it does not fit."""

import errno
import json
import os
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

from dpmac_cli.catalog import DATASETS
from dpmac_cli.data import load_data
from dpmac_cli.digest import digest
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.release import load_model, save_model
from dpmac_cli.scoring import score
from tests.digits_runs import train_digits

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
        "privacy",
    }
    assert facts["dataset"]["sha256"] == DATASETS["digits"].sha256


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_a_run_and_its_model_file_load_alike(run: Path, name: str) -> None:
    released = load_model(run / name, None, CPU)
    assert released.path == run / "model.safetensors"
    assert not released.model.training
    assert score(run / name, None, None, "cpu").result.samples == 360


def test_weights_survive_unchanged(file: Path, run: Path) -> None:
    released = load_model(run, None, CPU)
    save_model(file, released.model, released.facts)
    assert file.read_bytes() == (run / "model.safetensors").read_bytes()


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
        "an image: (1, 8, 8) in the file, (1, 28, 28) wanted",
        "1.weight: (64, 64) in the file, (64, 784) wanted",
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
        r"3.bias: missing in the file, \(10,\) wanted",
    ),
    "extra": (
        edited(lambda t, f: t.update(more=torch.zeros(2))),
        r"more: \(2,\) in the file, nothing wanted",
    ),
    "reshaped": (
        edited(lambda t, f: t.update({"3.bias": torch.zeros(7)})),
        r"3.bias: \(7,\) in the file, \(10,\) wanted",
    ),
    "other images": (
        edited(
            lambda t, f: f["input"].update(shape=[3, 8, 8], mean=[0.3] * 3, std=[0.4] * 3),
        ),
        r"does not fit digits: an image: \(3, 8, 8\) in the file, \(1, 8, 8\) wanted",
    ),
    "other data": (
        edited(lambda t, f: f["dataset"].update(name="cats")),
        "trained on cats, which this version does not know",
    ),
    "other model": (
        edited(lambda t, f: f["model"].update(name="vit")),
        "model 'vit', which this version does not know",
    ),
}


@pytest.mark.parametrize(("write", "said"), MISFITS.values(), ids=MISFITS.keys())
def test_a_model_that_does_not_fit_is_refused(
    run: Path, file: Path, write: Callable[[Path, Path], None], said: str
) -> None:
    write(run, file)
    with pytest.raises(ModelError, match=said):
        load_model(file, None, CPU)


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


NOT_WHOLE = "is not a whole safetensors file: it is damaged, or of another kind"
NOT_OURS = "was not written by dpmac train: its header lacks"
NOT_QUITE = "was not written by dpmac train as it is: "
NO_IMAGES = f"{NOT_QUITE}no images have the shape, levels, mean and std"


def other_input(key: str, value: object) -> tuple[Callable[[Path, Path], None], str]:
    return edited(lambda t, f: f["input"].update({key: value})), NO_IMAGES


def other_bias(bias: torch.Tensor, said: str) -> tuple[Callable[[Path, Path], None], str]:
    return edited(lambda t, f: t.update({"3.bias": bias})), f"{NOT_QUITE}3.bias holds {said}"


DAMAGED: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (lambda run, file: None, "does not exist. Name a run folder"),
    "a folder": (lambda run, file: file.mkdir(), "is a folder, but a model is a file"),
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
        "was written by a newer dpmac (format 99; this one knows 1). Upgrade dpmac.",
    ),
    "version in words": (edited(lambda t, f: f.update(schema_version="one")), NOT_OURS),
    "no input": (edited(lambda t, f: f.__delitem__("input")), NO_IMAGES),
    "flat images": other_input("shape", [8, 8]),
    "negative height": other_input("shape", [1, -8, 8]),
    "levels of zero": other_input("levels", 0),
    "levels in words": other_input("levels", "16"),
    "no mean": other_input("mean", []),
    "two means": other_input("mean", [0.3, 0.3]),
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
    with pytest.raises(ModelError, match=rf"bias: \(10,\) of {name} in the file, \(10,\) wanted"):
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
    said = f"{file} is damaged: its contents do not match its checksum. Copy it anew"
    assert refusal(file).startswith(said)


def test_a_file_that_may_not_be_read_is_named(
    run: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes((run / "model.safetensors").read_bytes())

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(file) == f"{file} cannot be read (Permission denied)."


NAME_ONE = "Name a run folder of dpmac train, or a model.safetensors."


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "nowhere" / "model.safetensors"):
        assert refusal(path) == f"{path} does not exist. {NAME_ONE}"


def test_a_folder_of_another_kind_is_named(tmp_path: Path) -> None:
    said = f"{tmp_path} is not a run folder: it holds no model.safetensors. {NAME_ONE}"
    assert refusal(tmp_path) == said
    (tmp_path / "thesis.tex").write_text("mine")
    assert refusal(tmp_path) == said


def test_a_run_without_a_model_can_be_resumed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    said = (
        f"The run in {tmp_path} has not written its model.safetensors: it is still training, or "
        f"was stopped before it could. To go on: dpmac train --resume {tmp_path}"
    )
    assert refusal(tmp_path) == refusal(tmp_path / "model.safetensors") == said


def test_a_folder_in_the_place_of_a_model_is_named(file: Path) -> None:
    file.mkdir()
    said = f"{file} is a folder, but a model is a file. {NAME_ONE}"
    assert refusal(file) == refusal(file.parent) == said


@pytest.mark.privacy
def test_a_private_checkpoint_is_not_a_model(run: Path) -> None:
    checkpoint = next((run / "checkpoint").glob("step-*.safetensors"))
    assert refusal(checkpoint) == (
        f"{checkpoint} is a private checkpoint, from which the noise of its run can be computed. "
        "Do not share it. The model to score is model.safetensors, one folder up."
    )
