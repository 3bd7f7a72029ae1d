"""Every command of the README and of the guides runs, in order, in one folder; only shorter."""

import re
import runpy
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from PIL import Image
from torch import nn
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor
from typer.testing import CliRunner

from dpmac_cli import Poisson, PrivateStep, make_private
from dpmac_cli.cli.app import app
from dpmac_cli.config.defaults import EPSILON
from dpmac_cli.models.dataset import Data, Split, on_device
from dpmac_cli.release import scoring
from dpmac_cli.release.train import train_plan
from dpmac_cli.runs import prepare
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import after
from tests.test_table_files import penguins, wages
from tests.tiny_bert import notes, write_encoder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
#: Pages whose commands run in one folder, in this order: later ones use the runs of earlier ones.
PAGES = {
    "own": (README, DOCS / "own-data.md", DOCS / "own-network.md", DOCS / "resume.md"),
    "prices": (DOCS / "tour.md", DOCS / "choosing-epsilon.md"),
    "settings": (DOCS / "fine-tuning.md", DOCS / "tuning.md", DOCS / "weights.md"),
    "ranks and files": (DOCS / "clusters.md", DOCS / "publishing.md"),
}
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
#: The network of the guide.
NET = re.compile(r"```python\n(# net.py\n.*?)```", re.DOTALL)
#: The loop of the README.
LOOP = re.compile(r"```python\n(from dpmac_cli import from_torch.*?)```", re.DOTALL)
#: The first program of the README.
FIRST = re.compile(r"```python\n(from dpmac_cli import train\n.*?)```", re.DOTALL)
#: A run that the guides resume. Here it is one that was interrupted.
RUN = "runs/mnist-dp-macadam-1"
#: What is typed instead, so that no command takes minutes.
SHORTER = {
    "--epochs 10": "--steps 4",
    "--seeds 3": "--seeds 1",
    "--seeds 5": "--seeds 1",
    "--recipe cifar10-de2022": "--recipe cifar10-de2022 --batch-size 16 --physical-batch 8",
    "--warmup-steps 20": "--warmup-steps 1",
    "--backbone minilm": "--backbone ./encoder",
    # An attack contradicts a sound claim by chance, in one of twenty runs; not in this one.
    "--canaries 200": "--canaries 200 --seed 1",
}


def read(page: Path) -> str:
    """Return the text of a page."""
    return page.read_text(encoding="utf-8")


def commands(*pages: Path) -> list[str]:
    """Return the commands of pages as typed, without comments; CI installs the package itself."""
    lines = "\n".join("\n".join(BLOCK.findall(read(page))) for page in pages).splitlines()
    typed = [
        shlex.join(shlex.split(line.partition(" > ")[0], comments=True)) for line in lines if line
    ]
    return [line for line in typed if line.startswith(("dpmac ", "torchrun "))]


def shortened(command: str) -> str:
    """The command with two steps, where it trains."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    trains = " train " in command or " compare " in command
    return f"{command} --steps 2" if trains and "--resume" not in command else command


def set_scene(folder: Path) -> None:
    """What a reader has who types all of that."""
    (folder / "sample_configs").symlink_to(ROOT / "sample_configs")
    (shown,) = NET.findall(read(DOCS / "own-network.md"))
    (folder / "net.py").write_text(shown)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            place = folder / "photos" / split / name
            place.mkdir(parents=True)
            for number in range(20):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
    np.savez(folder / "table.npz", x=rng.random((300, 4)), y=np.arange(300) % 3)
    drafted = ["--label", "species", "--drop", "year", "--kinds"]
    made = CliRunner().invoke(app, ["schema", str(penguins(folder)), *drafted])
    (folder / "kinds.yaml").write_text(made.stdout)
    wages(folder)
    write_encoder(folder / "encoder")
    (folder / "notes.yaml").write_text(
        "label: {column: kind, classes: ['0', '1']}\ncolumns: {note: {text: 16}}\n"
    )
    rows = "".join(f"{text},{kind}\n" for text, kind in notes(60))
    (folder / "notes.csv").write_text(f"note,kind\n{rows}")
    weights = runpy.run_path(str(folder / "net.py"))["Net"]((3, 8, 8), 2).state_dict()
    safetensors.torch.save_file(weights, folder / "weights.safetensors")


@pytest.mark.long
def test_the_loop_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = LOOP.findall(read(README))
    sets = [FakeData(size, (3, 8, 8), 2, ToTensor()) for size in (200, 20)]
    given = {"net": nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), "train_set": sets[0]}
    exec(shown, {**given, "test_set": sets[1]})
    assert (tmp_path / "mine/model.safetensors").exists()


def test_the_first_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = FIRST.findall(read(README))
    exec(shown, {})
    epsilon, accuracy = map(float, capsys.readouterr().out.split())
    assert 2.9 < epsilon <= 3
    assert accuracy > 0.8


@pytest.fixture
def _few_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score on 400 records at most: on all of them the network of CIFAR-10 takes seconds."""

    def few(*args: Any) -> Data:
        data = on_device(*args)
        return replace(data, test=Split(data.tested.images[:400], data.tested.labels[:400]))

    monkeypatch.setattr(prepare, "on_device", few)
    monkeypatch.setattr(scoring, "on_device", few)


def test_the_readme_is_short_and_begins_with_the_commands_to_install_and_test() -> None:
    assert 450 <= len(read(README).split()) <= 620
    install, test, *_ = BLOCK.findall(read(README))
    assert install.endswith("&& pip install . && dpmac train --dataset digits\n")
    assert test.endswith('&& pip install -e ".[dev]" && pytest\n')


@pytest.mark.long
@pytest.mark.real_data
@pytest.mark.usefixtures("features_of_one", "studies_here", "_few_to_score")
@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_every_command_of_readme_and_guides_runs(
    pages: tuple[Path, ...], tmp_path: Path, real_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPMAC_DATA_DIR", str(real_data_dir))
    set_scene(tmp_path)
    interrupted = {"dataset": "mnist", "sigma": "0.8", "steps": "2", "out": RUN}
    list(train_plan(resolve(interrupted).plan, after(1)))
    assert len(commands(*pages)) > 5
    for command in map(shortened, commands(*pages)):
        program, *typed = shlex.split(command)
        if typed[:3] == ["train", "--resume", "own-net"]:  # it is finished by now
            again = {"model": typed[-1], "out": "own-net", "force": True}
            list(train_plan(resolve(again, Path("own-net/config.yaml")).plan, after(1)))
        if program == "dpmac":
            result = CliRunner().invoke(app, typed)
            assert result.exit_code == 0, f"{command}\n{result.output}"
        else:
            subprocess.run([program, *typed], check=True)


def test_the_default_epsilon_is_said_where_a_newcomer_starts() -> None:
    said = f"{EPSILON:g} by default"
    for text in (
        read(README),
        read(DOCS / "tour.md"),
        read(DOCS / "own-loop.md"),
        PrivateStep.__doc__,
        make_private.__doc__,
    ):
        assert said in " ".join(str(text).split())
    sampling = Poisson(n=1000, batch_size=100)
    step = PrivateStep(nn.Linear(2, 2), lambda model, x: model(x).mean(1), sampling=sampling)
    assert step.plan.settings.epsilon == EPSILON
