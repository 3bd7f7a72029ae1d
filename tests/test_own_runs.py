"""A person's own data and network, from the command line to the last score."""

import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_wine
from torch import Tensor

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.resolve import resolve
from dpmac_cli.errors import InputError
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent, finish, train
from dpmac_cli.runs import folder
from dpmac_cli.runs.session import Started
from tests.digits_runs import after
from tests.typed import dpmac

SHORT = ("--steps", "4", "--batch-size", "64", "--sigma", "4", "--device", "cpu")

#: Networks as an outsider would write them.
NETWORKS = {
    "conv": """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + 0.5 * x.tanh()
        return self.head(self.down(x).relu().mean((2, 3)))
""",
    "transformer": """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.embed = nn.Linear(shape[0] * shape[2], width)
        self.place = nn.Parameter(torch.zeros(shape[1], width))
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        rows = self.embed(x.transpose(1, 2).flatten(2)) + self.place
        rows = self.norm1(rows + self.attend(rows, rows, rows, need_weights=False)[0])
        rows = self.norm2(rows + self.mix(rows))
        return self.head(rows.mean(1))
""",
    "recurrent": """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.inner = nn.Linear(inputs, 2 * hidden)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        value, gate = self.inner(x).chunk(2, -1)
        return self.scale * value * gate.sigmoid()

def make(shape, classes):
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), Gate(pixels, 24), nn.Dropout(0.1), Gate(24, 24),
                         nn.Linear(24, classes))
""",
    "encoder": """
from torch import nn

class Net(nn.Module):
    # All of it torch's own, as in its tutorials.
    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.embed = nn.Linear(shape[0] * shape[2], width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encode(self.embed(x.transpose(1, 2).flatten(2))).mean(1))
""",
    "shared": """
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

class Net(nn.Module):
    # One convolution at two scales, and one cell that reads row after row.
    def __init__(self, shape, classes, width=16):
        super().__init__()
        self.look = nn.Conv2d(shape[0], 4, 3, padding=1)
        self.cell = nn.Linear(4 * shape[2] + width, width)
        self.head = nn.Linear(2 * width, classes)
        self.width = width

    def read(self, x):
        rows = self.look(x).relu().transpose(1, 2).flatten(2)
        state = x.new_zeros(len(x), self.width)
        for row in rows.unbind(1):
            state = self.cell(torch.cat([row, state], 1)).tanh()
        return state

    def forward(self, x):
        coarse = avg_pool2d(x, 2).repeat_interleave(2, 3)
        return self.head(torch.cat([self.read(x), self.read(coarse)], 1))
""",
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set(sys.modules)
    yield
    for name in set(sys.modules) - names:
        if name.startswith(("dpmac_model_", "net_")):
            del sys.modules[name]


def done(*args: str) -> str:
    """Type a command that must succeed."""
    result = dpmac(*args)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: str, code: int = 2) -> str:
    """Type a command that must be refused, and read why."""
    result = dpmac(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def report_of(run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run) / "report.json").read_text())
    return found


def photos(root: str, *, split: bool = True, records: int = 300) -> str:
    """Digits as pictures in folders."""
    bunch = load_digits()
    for i, (image, digit) in enumerate(zip(bunch.images[:records], bunch.target, strict=False)):
        part = ("test" if i % 5 == 0 else "train") if split else "."
        where = Path(root) / part / f"digit-{digit}"
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(where / f"{i}.png")
    return root


def wine(file: str) -> str:
    bunch = load_wine()
    low, high = np.floor(bunch.data.min(0) - 0.1), np.ceil(bunch.data.max(0))
    np.savez(file, x=bunch.data, y=bunch.target, low=low, high=high, classes=bunch.target_names)
    return file


@pytest.mark.privacy
def test_a_folder_of_pictures(tmp_path: Path) -> None:
    data = photos(str(tmp_path / "photos"))
    done("train", "--dataset", data, "--model", "mlp-small", "--out", "run", *SHORT)
    report = report_of("run")
    assert report["dataset"] == {
        "name": "photos",
        "train_size": 240,
        "test_size": 60,
        "sha256": None,
        "own": True,
        "multilabel": False,
        "held_out": False,
        "test_note": None,
        "text_note": None,
        "taken_from_records": ["channels", "image size", "classes"],
        "schema": None,
        "public_note": (
            "The numbers of training records and test records are public. Its channels, image size "
            "and classes were not declared but taken from the records, and are treated as public. "
            "One record can change them, which epsilon does not cover."
        ),
    }
    assert report["dataset"]["public_note"] in Path("run/model-card.md").read_text()
    assert report["classes"] == [f"digit-{i}" for i in range(10)]
    assert report["privacy"]["sampling_rate"] == 64 / 240
    for path in ("run", "run/model.safetensors"):
        scored = json.loads(done("eval", path, "--json"))
        assert scored["accuracy"] == report["test"]["accuracy"]
        assert scored["dataset"] == "photos"
    for name in ("report.json", "model-card.md", "model.safetensors"):
        assert str(tmp_path).encode() not in Path("run", name).read_bytes()


@pytest.mark.long
def test_a_model_alone_and_its_data_named_anew(tmp_path: Path) -> None:
    done("train", "--dataset", photos("photos"), "--model", "mlp-small", "--out", "run", *SHORT)
    Path("run/model.safetensors").rename("alone.safetensors")
    assert "Set --dataset to its path" in refused("eval", "alone.safetensors")
    os.rename("photos", "pictures")
    scored = json.loads(done("eval", "alone.safetensors", "--dataset", "pictures", "--json"))
    assert scored["accuracy"] == report_of("run")["test"]["accuracy"]
    other = photos("other", split=False)
    assert "has no test set, and the split is only recorded" in refused(
        "eval", "alone.safetensors", "--dataset", other
    )
    os.rename("pictures/test/digit-3", "pictures/test/digit-x")
    os.rename("pictures/train/digit-3", "pictures/train/digit-x")
    said = refused("eval", "alone.safetensors", "--dataset", "pictures", code=4)
    assert "digit-x" in said


@pytest.mark.privacy
def test_what_is_held_out_stays_out_and_is_said_to_be_private() -> None:
    data = photos("photos", split=False)
    options = ("--test-fraction", "0.25", "--split-seed", "9", "--model", "mlp-small")
    done("train", "--dataset", data, *options, "--out", "run", *SHORT)
    report = report_of("run")
    sizes = report["dataset"]["train_size"], report["dataset"]["test_size"]
    assert sizes == (232, 68)  # about a quarter; which ones, the names and --split-seed say
    assert report["dataset"]["held_out"] is True
    assert "split off from the private ones" in report["dataset"]["test_note"]
    assert report["dataset"]["test_note"] in Path("run/model-card.md").read_text()
    scored = json.loads(done("eval", "run", "--json"))
    assert (scored["accuracy"], scored["samples"]) == (report["test"]["accuracy"], 68)
    Path(data, "digit-3", "13.png").unlink()  # one that was trained on
    assert json.loads(done("eval", "run", "--json")) == scored


def test_rows_of_numbers(tmp_path: Path) -> None:
    done("train", "--dataset", wine("wine.npz"), "--out", "run", "--seed", "3", *SHORT)
    report = report_of("run")
    assert report["model"]["name"] == "linear"
    assert report["classes"] == ["class_0", "class_1", "class_2"]
    assert len(report["input"]["mean"]) == 13
    scored = json.loads(done("eval", "run", "--json"))
    assert scored["accuracy"] == report["test"]["accuracy"]
    said = refused(
        "train", "--dataset", "wine.npz", "--model", "cnn", "--out", "no", *SHORT, code=4
    )
    assert "13, 1, 1" in said
    assert not Path("no").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_an_outsiders_network_trains_resumes_and_is_scored(name: str) -> None:
    Path(f"net_{name}.py").write_text(NETWORKS[name])
    factory = f"net_{name}.py:{'make' if name == 'recurrent' else 'Net'}"
    data = photos("photos")
    common = ("--dataset", data, "--model", factory, "--seed", "1", "--lr", "0.01", *SHORT)
    done("train", *common, "--out", "whole", "--optimizer", "dp-adam")
    done("train", *common, "--out", "half", "--optimizer", "dp-adam", "--checkpoint-every", "2")
    half = Path("half")
    for file in ("report.json", "model.safetensors", "SHA256SUMS", "model-card.md"):
        (half / file).unlink()
    (half / "checkpoint" / "step-000000004.safetensors").unlink()
    done("train", "--resume", "half", "--model", factory)
    one, other = (
        safetensors.torch.load_file(f"{run}/model.safetensors") for run in ("whole", "half")
    )
    assert one.keys() == other.keys()
    assert "not imported automatically" in refused("eval", "whole", code=4)
    scored = json.loads(done("eval", "whole", "--model", factory, "--json"))
    assert scored["accuracy"] == report_of("whole")["test"]["accuracy"]
    code = Path("whole/model-card.md").read_text().split("```python\n")[1].split("```")[0]
    check = f"{code}\nprint(classify(torch.zeros(2, 1, 8, 8)).shape)\n"
    ran = subprocess.run(
        [sys.executable, "-c", check],
        cwd="whole",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == "torch.Size([2])", ran.stderr


@pytest.mark.long
def test_own_data_in_a_comparison() -> None:
    wine("wine.npz")
    flags = ("--optimizers", "dp-sgd,dp-adam", "--seeds", "2", "--jobs", "1", "--out", "study")
    output = done("compare", "--dataset", "wine.npz", *flags, *SHORT)
    assert "dp-adam" in output
    again = done("compare", "--dataset", "wine.npz", *flags, *SHORT)
    assert "4 of them found finished" in again


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dataset", "nowhere"), "there is no dataset 'nowhere'"),
        (("--dataset", "no/where"), "no such file or folder"),
        (("--dataset", "photos", "--model", "lenet"), "there is no model 'lenet'"),
        (("--dataset", "photos", "--model", "gone.py:Net"), "no such file: gone.py"),
        (("--dataset", "photos", "--image-size", "0"), "--image-size must be"),
        (("--dataset", "wine.npz", "--feature-range", "2,1"), "low below high"),
        (("--dataset", "wine.npz", "--feature-range", "wide"), "two numbers, such as 0,1"),
        (("--dataset", "photos", "--batch-size", "9999"), "must not be above the size of photos"),
    ],
)
def test_bad_input_is_explained(args: tuple[str, ...], said: str) -> None:
    photos("photos", records=60)
    wine("wine.npz")
    assert said in refused("train", *args, "--steps", "1", "--sigma", "4", "--out", "run")
    assert not Path("run").exists()


def test_settings_for_own_data_do_nothing_to_a_published_set() -> None:
    output = done("train", "--dataset", "digits", "--image-size", "9", "--out", "run", *SHORT)
    assert "--image-size has no effect with digits" in output
    assert "image-size" not in Path("run/config.yaml").read_text()


def names_of(count: int) -> str:
    """The classes of photos, as they are declared."""
    return ",".join(f"digit-{digit}" for digit in range(count))


#: The whole schema of photos, declared.
DECLARED = {"channels": "1", "image_size": "8", "classes": names_of(10)}


def notes_on(data: str, **flags: str | bool) -> tuple[str, ...]:
    """What the author of a run should know, with small batches unless told otherwise."""
    noise = {} if "no_dp" in flags else {"sigma": "9"}
    return resolve({"dataset": data, "batch_size": "8", **noise, **flags}).notes


@pytest.mark.long
def test_batches_of_most_records_are_remarked_on() -> None:
    wine("wine.npz")
    size = resolve({"dataset": "wine.npz"}).plan.data.facts.train_size
    assert resolve({"dataset": "wine.npz"}).notes == ()
    (note,) = notes_on("wine.npz", batch_size=str(size))
    assert f"--batch-size {size} each record takes part in 100% of the steps" in note
    assert "use a smaller --batch-size" in note
    (note,) = notes_on("wine.npz", batch_size=str(-(-size * 3 // 5)))
    assert "takes part in 60% of" in note
    assert notes_on("wine.npz", batch_size=str(size // 2 - 1)) == ()
    whole = str(size)
    assert notes_on("wine.npz", batch_size=whole, no_dp=True) == ()
    assert notes_on("wine.npz", batch_size=whole, sampler="random-allocation") == ()


@pytest.mark.long
def test_defaults_by_rule() -> None:
    """A third of a small table's records a step, 20 epochs, epsilon 3: docs/recipes.md."""
    wine("wine.npz")
    resolved = resolve({"dataset": "wine.npz"})
    found = resolved.plan
    records = found.data.facts.train_size
    assert (found.privacy.batch_size, found.privacy.steps) == (math.ceil(records / 3), 60)
    assert (found.network.model.name, found.optimizer.name) == ("linear", "dp-adam")
    assert (found.optimizer.lr, found.recipe.ema) == (0.03, 0.9)
    assert (resolved.settings.epsilon, found.privacy.delta) == (3.0, 1e-5)
    assert total_epsilon((found.privacy.event,), found.privacy.delta) <= 3.0
    assert resolve({"dataset": "wine.npz", "max_epsilon": 1.0}).settings.epsilon == 1.0
    assert resolve({"dataset": "wine.npz", "sigma": 2.0}).plan.privacy.sigma == 2.0
    assert resolve({"dataset": "wine.npz", "steps": 7}).plan.privacy.steps == 7
    other = resolve({"dataset": "wine.npz", "optimizer": "dp-macadam"}).plan
    assert other.optimizer.lr == 0.01


@pytest.mark.long
def test_delta_shrinks_with_the_records() -> None:
    """Below 1e-5 and below n^-1.1, so that no guarantee allows publishing a record."""
    labels = np.zeros(50_000, np.int64)
    labels[::2] = 1
    x = np.arange(50_000.0).reshape(-1, 1)
    np.savez("many.npz", x=x, y=labels, low=[0.0], high=[5e4])
    found = resolve({"dataset": "many.npz", "test_fraction": 0.01}).plan
    assert found.privacy.delta == found.data.facts.train_size**-1.1 < 1e-5
    assert resolve({"dataset": "many.npz", "delta": 1e-6}).plan.privacy.delta == 1e-6


@pytest.mark.long
def test_classes_that_are_not_tested_are_named() -> None:
    photos("photos")
    for digit in (3, 7):
        shutil.rmtree(f"photos/test/digit-{digit}")
    (note,) = notes_on("photos", **DECLARED)
    assert note == (
        "photos has no test record of the classes digit-3, digit-7. Accuracy does not cover them."
    )
    output = done("train", "--dataset", "photos", "--out", "run", "--steps", "1", "--sigma", "9")
    assert "no test record" in output


def interrupted(data: str, *flags: str) -> Finished:
    """A run that was stopped after its third step of eight."""
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    settings = {"steps": "8", "batch_size": "64", "sigma": "4", "device": "cpu", "out": "run"}
    begun, third = list[RunEvent](), after(3)

    def stop() -> bool:
        """Count from the first step: what decodes images asks as well."""
        return bool(begun) and third()

    def events() -> Iterator[RunEvent]:
        for event in train(resolve({"dataset": data, **settings, **named}).plan, stop):
            begun.extend([event] if isinstance(event, Started) else [])
            yield event

    return finish(events())


@pytest.mark.privacy
@pytest.mark.parametrize(
    "flags",
    [("--resume", "run"), ("--fork", "run", "--steps", "9", "--out", "fork")],
    ids=["resume", "fork"],
)
@pytest.mark.parametrize("what", ["more", "fewer"])
def test_a_run_goes_on_with_as_many_records_as_it_began_with(
    what: str, flags: tuple[str, ...]
) -> None:
    data = Path(wine("wine.npz"))
    arrays = dict(np.load(data))
    before = interrupted("wine.npz").report["privacy"]
    x, y = arrays["x"], arrays["y"]
    found = {
        "more": {"x": np.concatenate([x, x]), "y": np.concatenate([y, y])},
        "fewer": {"x": x[:-1], "y": y[:-1]},
    }[what]
    np.savez(data, **{**arrays, **found})
    said = refused("train", *flags)
    assert "records is not the one that the run started with" in said
    assert report_of("run")["privacy"] == before
    assert not Path("fork").exists()

    np.savez(data, **arrays)
    done("train", *flags)
    after = report_of("fork" if "--fork" in flags else "run")
    assert after["privacy"]["epsilon"] > before["epsilon"]


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_data_that_has_moved_is_named_anew_and_the_run_goes_on(kind: str) -> None:
    data, moved = ("wine.npz", "there/vino.npz") if kind == "npz" else ("photos", "there/pictures")
    if kind == "npz":
        wine(data)
    else:
        photos(data, split=False)
    settings = {"model": "mlp-small", "steps": "8", "batch_size": "64", "sigma": "4"}
    common = {"dataset": data, "device": "cpu", "seed": "5", **settings}
    list(train(resolve(common, out="whole").plan))  # else decoding is interrupted
    finish(train(resolve(common, out="run").plan, after(3)))
    Path("there").mkdir()
    Path(data).rename(moved)
    said = refused("train", "--resume", "run")
    assert f"{data} was not found" in said
    assert "set --dataset to its new path" in said

    done("train", "--resume", "run", "--dataset", moved)
    assert report_of("run")["privacy"]["steps"] == 8
    assert f"dataset: {moved}" in Path("run/config.yaml").read_text()
    done("eval", "run")
    assert "is finished" in refused("train", "--resume", "run")


@pytest.mark.privacy
def test_only_as_many_records_may_be_named_anew() -> None:
    interrupted(wine("wine.npz"))
    before = Path("run/config.yaml").read_bytes()
    arrays = dict(np.load("wine.npz"))
    np.savez("other.npz", **{**arrays, "x": arrays["x"][1:], "y": arrays["y"][1:]})
    for flags in (("--resume", "run"), ("--fork", "run", "--steps", "9")):
        said = refused("train", *flags, "--dataset", "other.npz")
        assert "records is not the one that the run started with" in said
    assert "cannot change" in refused("train", "--resume", "run", "--dataset", "digits")
    assert Path("run/config.yaml").read_bytes() == before
    finish(train(resolve(dataset="digits", steps=2, sigma=4, out="digits").plan, after(1)))
    assert "cannot change" in refused("train", "--resume", "digits", "--dataset", "wine.npz")


@pytest.mark.privacy
def test_classes_are_named_as_they_were_in_a_run_that_goes_on() -> None:
    interrupted(wine("wine.npz"))
    arrays = dict(np.load("wine.npz"))
    renamed = np.array(["other", *arrays["classes"][1:]])
    np.savez("wine.npz", **{**arrays, "classes": renamed})
    said = refused("train", "--resume", "run")
    assert "The names of the classes" in said
    np.savez("wine.npz", **arrays)
    done("train", "--resume", "run")


@pytest.mark.privacy
def test_a_network_may_change_if_its_parameters_keep_their_shapes() -> None:
    made = NETWORKS["recurrent"]
    Path("net_own.py").write_text(made)
    interrupted(wine("wine.npz"), "model", "net_own.py:make")
    Path("net_own.py").write_text(made.replace("sigmoid", "tanh"))
    fork = ("train", "--fork", "run", "--model", "net_own.py:make", "--steps", "9")
    assert "with new noise" in done(*fork, "--out", "fork")
    assert len(report_of("fork")["privacy"]["events"]) == 2
    smaller = "nn.Sequential(nn.Flatten(), nn.Linear(13, 3))"
    Path("net_own.py").write_text(f"from torch import nn\n\ndef make():\n    return {smaller}\n")
    said = refused(*fork, "--out", "smaller", code=4)
    assert "The checkpoint belongs to another model or optimizer" in said
    assert not Path("smaller").exists()
    Path("net_two.py").write_text(made)
    done("train", "--resume", "run", "--model", "net_two.py:make")


#: A network with a part that it draws when it is built, and does not train.
DRAWING = """
import random
import secrets
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.full((13, 8), float({drawn})))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.cos(x.flatten(1) @ self.drawn))
"""


def buffer_of(run: str) -> Tensor:
    return safetensors.torch.load_file(Path(run) / "model.safetensors")["drawn"]


@pytest.mark.privacy
@pytest.mark.parametrize("drawn", ["torch.randn(())", "np.random.normal()", "random.random()"])
def test_what_a_network_draws_and_does_not_train_stays(drawn: str) -> None:
    """The rest of the state was trained with it."""
    Path("net_own.py").write_text(DRAWING.format(drawn=drawn))
    interrupted(wine("wine.npz"), "model", "net_own.py:Net")
    shutil.copytree("run", "again")
    model = ("--model", "net_own.py:Net")
    for run in ("run", "again"):
        np.random.seed()  # as in another process
        random.seed()
        done("train", "--resume", run, *model)
    first, again = (safetensors.torch.load_file(f"{r}/model.safetensors") for r in ("run", "again"))
    assert torch.equal(first["drawn"], again["drawn"])
    done("train", "--fork", "run", *model, "--steps", "9", "--out", "fork")
    assert torch.equal(buffer_of("fork"), first["drawn"])


@pytest.mark.privacy
def test_no_checkpoint_has_its_network_imported() -> None:
    Path("net_own.py").write_text(NETWORKS["recurrent"])
    interrupted(wine("wine.npz"), "model", "net_own.py:make")
    Path("net_own.py").write_text("import pathlib\npathlib.Path('executed').touch()")
    for given in ((), ("--steps", "9"), ("--model", "mlp")):
        said = refused("train", "--resume", "run", *given)
        assert "If you trust it: " in said
        assert said.endswith("dpmac train --resume run --model net_own.py:make")
    assert not Path("executed").exists()


@pytest.mark.privacy
@pytest.mark.parametrize("command", ["train", "compare"])
def test_no_settings_file_has_its_network_imported(command: str) -> None:
    Path("net_own.py").write_text("import pathlib\npathlib.Path('executed').touch()")
    Path("mine.yaml").write_text("dataset: digits\nsigma: 6\nsteps: 2\nmodel: net_own.py:make\n")
    more = ("--optimizers", "dp-adam", "--seeds", "1") if command == "compare" else ()
    for plan in ((), ("--dry-run",)) if more else ((),):
        said = refused(command, "--config", "mine.yaml", "--out", "out", *more, *plan)
        assert "mine.yaml: --model net_own.py:make is code, which" in said
        assert "add --model net_own.py:make to the command line" in said
    assert not Path("executed").exists()
    Path("net_own.py").write_text(NETWORKS["recurrent"])
    typed = ("--config", "mine.yaml", "--model", "net_own.py:make", "--out", "out")
    accepted = dpmac(command, *typed, *more, *["--dry-run"] * bool(more))
    assert accepted.exit_code == 0, accepted.output
    assert bool(more) or list(Path("out").rglob("config.yaml"))


@pytest.mark.privacy
def test_hints_name_the_network_of_a_run() -> None:
    Path("net own.py").write_text(NETWORKS["recurrent"])
    interrupted(wine("wine.npz"), "model", "net own.py:make")
    hint = "dpmac train --resume run --model 'net own.py:make'"
    assert folder.resume_command(Path("run")) == hint
    Path("run/report.json").unlink()
    Path("run/model.safetensors").unlink()
    assert refused("eval", "run").endswith(hint)
    assert refused("account", "run").endswith(hint)
    Path("run/config.yaml").write_text('model: "a:b\\e[31m"')
    assert folder.resume_command(Path("run")) == "dpmac train --resume run"


# Facts are read once.


@pytest.mark.privacy
@pytest.mark.parametrize("what", ["more", "fewer"])
def test_files_that_come_or_go_during_a_run_change_nothing_of_it(what: str) -> None:
    photos("photos", records=100)
    settings = {"steps": "40", "batch_size": "8", "sigma": "4", "device": "cpu", "out": "run"}
    events: list[RunEvent] = []
    for event in train(resolve({"dataset": "photos", "model": "mlp-small", **settings}).plan):
        if isinstance(event, Started) and what == "more":
            for number in range(120):
                shutil.copy("photos/train/digit-1/1.png", f"photos/train/digit-1/new-{number}.png")
        elif isinstance(event, Started):
            shutil.rmtree("photos/train/digit-3")
        events.append(event)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.report["dataset"]["train_size"] == 80
    assert len(last.report["classes"]) == 10
    price = last.report["privacy"]
    assert (price["sampling_rate"], price["steps"]) == (0.1, 40)
    ran = TrainingEvent(0.1, 4.0, 40, "poisson", 10)
    assert price["events"] == [vars(ran)]
    assert price["epsilon"] == total_epsilon((ran,), 1e-5)
    assert all(e.plan.data.facts.train_size == 80 for e in events if isinstance(e, Started))


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_records_that_are_read_again_are_those_that_were_priced(kind: str) -> None:
    """Those that are still at hand are used, whatever became of their files."""
    data = wine("wine.npz") if kind == "npz" else photos("photos")
    config = resolve(dataset=data, steps=2, batch_size=8, sigma=4, device="cpu", out="run").plan
    if kind == "npz":
        arrays = dict(np.load(data))
        np.savez(data, **{**arrays, "x": arrays["x"][:-1], "y": arrays["y"][:-1]})
    else:
        shutil.copy("photos/train/digit-1/1.png", "photos/train/digit-1/new.png")
    elsewhere = replace(config, data=pickle.loads(pickle.dumps(config.data)))
    with pytest.raises(InputError, match="changed while it was being read"):
        finish(train(elsewhere))
    assert not Path("run").exists()
    assert finish(train(config)).report["dataset"]["train_size"] == config.data.facts.train_size


def test_the_file_of_a_network_may_change_during_its_run() -> None:
    Path("net_own.py").write_text(NETWORKS["recurrent"])
    settings = {"steps": "2", "batch_size": "8", "sigma": "4", "device": "cpu", "out": "run"}
    events = train(resolve(settings, dataset=wine("wine.npz"), model="net_own.py:make").plan)
    next(iter(events))
    Path("net_own.py").unlink()
    assert finish(events).report["model"]["built_by"] == "net_own.py:make((13, 1, 1), 3)"


# A declared schema.


def published(run: str) -> dict[str, Any]:
    """What a run says of its records and network."""
    report = report_of(run)
    return {name: report[name] for name in ("dataset", "model", "input", "classes", "privacy")}


def typed(flags: dict[str, str]) -> list[str]:
    """Settings as they are typed."""
    return [part for name, v in flags.items() for part in (f"--{name.replace('_', '-')}", v)]


@pytest.mark.privacy
def test_a_record_that_is_left_out_changes_no_published_byte() -> None:
    """Unreadable, no image at all, or of no class: nothing tells that it was there."""
    photos("photos")
    flags = ("--dataset", "photos", "--skip-bad", "--seed", "3", "--model", "cnn", *SHORT)
    done("train", *flags, *typed(DECLARED), "--out", "without")
    Path("photos/train/digit-3/bad.png").write_bytes(b"no image")
    Path("photos/train/digit-3/bad.txt").write_text("no image")
    Path("photos/train/fox").mkdir()
    shutil.copy("photos/train/digit-1/1.png", "photos/train/fox/1.png")
    output = done("train", *flags, *typed(DECLARED), "--out", "with")
    assert "3 records of photos are left out" in " ".join(output.split())
    assert published("with") == published("without")
    for name in ("model.safetensors", "config.yaml", "model-card.md"):
        assert Path("with", name).read_bytes() == Path("without", name).read_bytes()


@pytest.mark.privacy
def test_what_is_not_declared_is_said_to_be_public_and_how_to_declare_it() -> None:
    photos("photos")
    (note,) = notes_on("photos")
    assert note == (
        "Channels, image size and classes of photos were taken from its records and are treated as "
        f"public. Declare them to avoid that: --channels 1 --image-size 8 --classes {names_of(10)}"
    )
    found = resolve(dataset="photos", sigma=9).plan.data.facts
    assert resolve({"dataset": "photos", "sigma": 9, **DECLARED}).plan.data.facts == found
    assert "taken from its records" not in str(notes_on("photos", no_dp=True))
    done("train", "--dataset", "photos", "--out", "run", *typed(DECLARED), *SHORT)
    assert report_of("run")["dataset"]["taken_from_records"] == []
    statement = report_of("run")["dataset"]["public_note"]
    assert statement == "The numbers of training records and test records are public."
    digits = finish(train(resolve(dataset="digits", steps=1, sigma=4, out="digits").plan)).report
    assert digits["dataset"]["taken_from_records"] == []


@pytest.mark.privacy
def test_a_run_with_a_declared_schema_resumes_and_is_scored_without_a_class() -> None:
    photos("photos", split=False)
    shutil.rmtree("photos/digit-3")
    interrupted("photos", "model", "mlp-small", *(p for item in DECLARED.items() for p in item))
    assert report_of("run")["classes"] == [f"digit-{i}" for i in range(10)]
    for name, value in (("channels", "3"), ("image-size", "9"), ("classes", names_of(9))):
        said = refused("train", "--resume", "run", f"--{name}", value)
        # Records of a class that is left out are found first.
        changes = f"--{name} {value} would change the run"
        assert ("belongs to no class" if name == "classes" else changes) in said
        said = refused("train", "--fork", "run", f"--{name}", value)
        assert f"--{name} cannot change in a fork" in said
    done("train", "--resume", "run")
    assert report_of("run")["privacy"]["steps"] == 8
    scored = json.loads(done("eval", "run", "--json"))
    assert scored["accuracy"] == report_of("run")["test"]["accuracy"]


@pytest.mark.long
def test_a_comparison_takes_classes_as_one_value() -> None:
    photos("photos")
    flags = ("--optimizers", "dp-sgd", "--seeds", "1", "--jobs", "1", "--out", "study")
    done("compare", "--dataset", "photos", *flags, *typed(DECLARED), *SHORT)
    (report,) = Path().glob("**/report.json")
    assert json.loads(report.read_text())["dataset"]["taken_from_records"] == []
