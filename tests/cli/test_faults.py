"""What a machine may do to a run: full disks, lost devices, jumping clocks, other processes."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import Result

from dpmac_cli import files
from dpmac_cli.data import published
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.release import publish
from dpmac_cli.runs import checkpoint, folder
from dpmac_cli.runs import trainer as assembly
from dpmac_cli.runs.trainer import Trainer
from tests.digits_runs import (
    contents,
    metrics_of,
    report_of,
    same_weights,
    train_digits,
)
from tests.typed import dpmac

LONG = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "9", "--seed", "7")
RUN = (*LONG, "--checkpoint-every", "2", "--out", "run")


def failed(result: Result, code: int, *said: str) -> str:
    """What a command said that had to fail."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for words in said:
        assert words in result.stderr
    return result.stderr


def at_step(step: int, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen when a step has begun, before its records are drawn."""
    draw = Trainer._draw

    def drawn(trainer: Trainer) -> Any:
        if trainer.state.step == step - 1:
            do()
        return draw(trainer)

    monkeypatch.setattr(Trainer, "_draw", drawn)


def counted(run: str) -> list[int]:
    """The steps that a run's report counts, of each session."""
    report = report_of(run)
    assert report["network"]["steps"] == 9
    return [event["steps"] for event in report["events"]]


@pytest.fixture
def whole() -> Path:
    """The run, undisturbed."""
    return train_digits(steps=9, seed=7, out="whole").folder


# Disks


@contextmanager
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """A way to let the system refuse what is written past so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_a_checkpoint_loses_the_steps_since_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with file_size_limit() as limit, monkeypatch.context() as patch:
        at_step(4, lambda: limit(3000), patch)
        result = dpmac(*RUN)
    failed(
        result,
        2,
        "state.safetensors: File too large. Free some space.",
        "To resume from the last checkpoint: dpmac train --resume run",
    )
    assert not list(Path("run").rglob(f"*{files.PART}"))
    assert dpmac("train", "--resume", "run").exit_code == 0
    assert counted("run") == [4, 7]


@pytest.mark.parametrize("last", ["save_model", "model_card"])
def test_a_full_disk_at_the_end_loses_nothing(
    last: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_size_limit() as limit, monkeypatch.context() as patch:
        do = getattr(publish, last)

        def full(*args: Any, **named: Any) -> Any:
            limit(1000)
            return do(*args, **named)

        patch.setattr(publish, last, full)
        result = dpmac(*RUN)
    failed(result, 2, "Free some space.", "last checkpoint: dpmac train --resume run")
    assert dpmac("train", "--resume", "run").exit_code == 0
    assert same_weights(Path("run"), whole)


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom the modes of files bind, which they do not do root."""
    user, digits = os.geteuid(), published._digits()
    with pytest.MonkeyPatch.context() as patch:
        # The file that they come from may lie where only its owner may read.
        patch.setattr(published, "_digits", lambda: digits)
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    assert dpmac(*RUN).exit_code == 0
    places = (tmp_path, tmp_path / "run", tmp_path / "run" / folder.CHECKPOINTS)
    before = contents(tmp_path)
    for place in places:
        place.chmod(0o555)
    try:
        with unprivileged():
            results = [
                dpmac(*LONG, "--out", "other"),
                dpmac(*LONG),
                dpmac(*RUN, "--force"),
                dpmac("train", "--resume", "run", "--steps", "20"),
            ]
    finally:
        for place in places:
            place.chmod(0o755)
    for result in results:
        failed(result, 2, "cannot be written to (Permission denied). Make it writable")
    assert contents(tmp_path) == before


# Devices


LOST = [
    torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ..."),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
]


@pytest.mark.parametrize("failure", LOST, ids=lambda failure: type(failure).__name__)
def test_a_lost_device_names_the_last_checkpoint(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise failure

    with monkeypatch.context() as patch:
        at_step(6, fail, patch)
        result = dpmac(*RUN)
    said = failed(result, 4, f"The device failed ({str(failure).splitlines()[0]}).")
    assert "To resume from the last checkpoint: dpmac train --resume run" in said
    assert dpmac("train", "--resume", "run").exit_code == 0
    assert counted("run") == [6, 5]


# Memory


def short_of_memory(most: int, from_step: int, patch: pytest.MonkeyPatch) -> None:
    """Have memory run out in chunks of more than so many samples, from a step on."""
    sum_of, steps = ClippedChunkSum.of, {"taken": 0}
    take = Trainer.step

    def of(self: ClippedChunkSum, x: Any, *args: Any) -> None:
        if len(x) > most and steps["taken"] >= from_step - 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sum_of(self, x, *args)

    def taken(trainer: Trainer) -> None:
        steps["taken"] = trainer.state.step
        take(trainer)

    patch.setattr(ClippedChunkSum, "of", of)
    patch.setattr(Trainer, "step", taken)


@pytest.mark.promise("faults")
def test_smaller_chunks_are_shown_and_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        short_of_memory(40, 6, patch)
        shown = dpmac(*LONG, "--out", "short")
    assert shown.exit_code == 0
    assert shown.output.count("memory ran out in step 6: continuing with ") == 1
    report = report_of("short")
    assert report["settings"]["physical_batch"] == 4096
    assert "physical-batch" not in Path("short/config.yaml").read_text()


def test_a_sample_that_does_not_fit_is_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        short_of_memory(0, 6, patch)
        result = dpmac(*RUN)
    failed(result, 4, "Memory ran out with a single sample at a time.", "checkpoint: dpmac train")


# A network that fails when it is on its way


@pytest.mark.promise("faults")
@pytest.mark.parametrize("where", ["training", "scoring"])
def test_a_network_that_fails_late_is_named_by_its_line_alone(where: str) -> None:
    """Which records it saw, how many and what of them it speaks of, is not for the screen."""
    Path("net.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n\nclass Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        late = Path('run/config.yaml').exists()\n"
        f"        if late and {'not ' * (where == 'scoring')}self.training:\n"
        "            raise ValueError(f'secret {x}')\n        return super().forward(x)\n"
        "\n\ndef build():\n    return Net(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    said = failed(
        dpmac(*RUN, "--model", "net.py:build"),
        4,
        "The network failed on samples of shape (1, 8, 8): ValueError at net.py, line 8.",
    )
    assert "secret" not in said
    shown = dpmac("train", "--resume", "run", "--model", "net.py:build", "--debug")
    assert shown.exit_code == 4
    assert "ValueError: secret" in shown.stderr


@pytest.mark.promise("faults")
@pytest.mark.parametrize("kept", ["buffer", "parameter", "NaN"])
@pytest.mark.parametrize("where", ["training", "scoring"])
def test_statistics_that_a_network_begins_to_keep_late_are_not_published(
    where: str, kept: str
) -> None:
    """Validation sees no change. In training, torch.func.grad refuses every in-place write."""
    made = {
        "buffer": "self.register_buffer('seen', torch.zeros(64, dtype=torch.float32))",
        "parameter": "self.kept = nn.Linear(64, 1, False).requires_grad_(False)",
    }
    made["NaN"] = made["buffer"]
    name = "kept.weight" if kept == "parameter" else "seen"
    write = "fill_(torch.nan)" if kept == "NaN" else "copy_(x.flatten(1).mean(0))"
    Path("net.py").write_text(
        "from pathlib import Path\nimport torch\nfrom torch import nn\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        f"        self.linear = nn.Linear(64, 10)\n        {made[kept]}\n\n"
        "    def forward(self, x):\n"
        "        late = Path('run/config.yaml').exists()\n"
        f"        if late and {'not ' * (where == 'scoring')}self.training:\n"
        f"            self.{name}.data.view(-1).{write}\n"
        "        return self.linear(x.flatten(1))\n"
    )
    long = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "40", "--out", "run")
    late = f"changed its {name} during training"
    said = "RuntimeError at net.py" if where == "training" else late
    failed(dpmac(*long, "--model", "net.py:Net"), 4, said)
    assert not Path("run/model.safetensors").exists()


# Divergence


@pytest.mark.promise("faults")
@pytest.mark.parametrize("every", ["2", "100"], ids=["at a checkpoint", "at a score"])
def test_a_run_that_diverges_says_how_to_go_on_and_its_steps_are_paid_for(
    every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        take = Trainer.step

        def taken(trainer: Trainer) -> None:
            take(trainer)
            if trainer.state.step == 6:
                trainer.state.theta.fill_(torch.inf)

        patch.setattr(Trainer, "step", taken)
        result = dpmac(*LONG, "--out", "run", "--checkpoint-every", every)
    step, kept = (6, 4) if every == "2" else (9, 0)
    said = failed(result, 4, f"Training diverged: after step {step} the parameters")
    assert "last checkpoint: dpmac train --resume run --out NEW --lr LESS" in said
    assert not Path("run/report.json").exists()
    [line] = metrics_of("run")
    assert line == {"step": step, "epoch": step / 12, "diverged": True}
    assert all(t.isfinite().all() for t in checkpoint.read(Path("run")).tensors.values())
    command = ("train", "--resume", "run", "--lr", "0.001", "--out", "longer")
    assert dpmac(*command).exit_code == 0
    events = report_of("longer")["events"]
    assert [event["steps"] for event in events] == [step, 9 - kept]


# Other processes


def test_a_run_that_ended_meanwhile_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began in the same folder while this one still read its data."""
    make = assembly.make_trainer

    def meanwhile(*args: Any, **kwargs: Any) -> Trainer:
        monkeypatch.setattr("dpmac_cli.runs.train.make_trainer", make)
        train_digits(steps=3, seed=1, out="run")
        return make(*args, **kwargs)

    monkeypatch.setattr("dpmac_cli.runs.train.make_trainer", meanwhile)
    failed(dpmac(*RUN), 2, "--out run already contains a run")
    assert report_of("run")["network"]["steps"] == 3


# Replacing a run


def test_a_refused_run_replaces_nothing() -> None:
    assert dpmac(*RUN).exit_code == 0
    before = contents(Path("run"))
    Path("networks.py").write_text(
        "import torch\n\ndef broken(shape, classes):\n    return torch.nn.Linear(3, classes)\n"
    )
    for flags, code in (
        (["--data-dir", "nowhere", "--dataset", "mnist"], 2),
        (["--max-epsilon", "0.001"], 3),
        (["--model", "networks.py:broken"], 4),
    ):
        assert dpmac(*RUN, "--force", *flags).exit_code == code
        assert contents(Path("run")) == before


def test_no_name_in_a_message_is_a_command_for_a_terminal(tmp_path: Path) -> None:
    """Also one that was read from the records."""
    file = tmp_path / "d.npz"
    np.savez(file, x=np.eye(6), y=["a\x1b[31mb", "c"] * 3, low=0, high=1)
    said = dpmac("train", "--dataset", file).stderr
    assert "\x1b" not in said
    assert r"--classes a\x1b[31mb,c" in said
