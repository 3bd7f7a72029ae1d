"""``--secure`` from the command line to the report: what it chooses, refuses, resumes and says."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.dp import mechanism
from dpmac_cli.dp.mechanism import GaussianMechanism, SecureMechanism
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.keystream import Keys, KeyStream, Stretch, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler, SeededDraws
from dpmac_cli.release import run
from dpmac_cli.release.model_file import load_model
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import finish
from dpmac_cli.release.sentences import SENTENCES
from dpmac_cli.runs import folder
from dpmac_cli.runs import trainer as assembly
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import (
    after,
    contents,
    digits_config,
    same_weights,
    train_digits,
    weights,
)
from tests.typed import dpmac

TRAIN = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "9", "--secure")


#: What may be said of randomness.
NO_SECRETS, PLAINLY, SECURELY, BOTH_WAYS = (row[2] for row in SENTENCES if row[0] == "randomness")


def randomness(finished: Finished) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = finished.report["privacy"]["randomness"]
    return entry


# What it chooses.


def in_blocks(size: int) -> int:
    """Return a number of bytes, rounded up to whole blocks of AES."""
    return -(-size // 16) * 16


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_secure_draws_all_of_a_run_from_keys_of_their_own(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[KeyStream, int]] = []
    at = KeyStream.at

    class Kept(Stretch):
        keys: KeyStream

        def fill(self, out: NDArray[np.uint8], size: int) -> None:
            filled.append((self.keys, size))
            super().fill(out, size)

    def kept(keys: KeyStream, step: int, part: int = 0) -> Stretch:
        stretch = Kept(at(keys, step, part)._cipher)
        stretch.keys = keys
        return stretch

    monkeypatch.setattr(KeyStream, "at", kept)
    config = resolve({"dataset": "digits", "sigma": 1, "secure": True, "sampler": sampler}).plan
    keys = make_keys(None)
    trainer = assembly.make_trainer(config, steps=1, device=torch.device("cpu"), keys=keys)
    noise = trainer.noise
    assert type(trainer.mechanism) is SecureMechanism
    assert isinstance(noise, Noise)
    assert keys.noise != keys.sampler
    trainer.step()
    assert noise._secure
    d = trainer.state.theta.numel()
    drawn = [size for stream, size in filled if stream is noise._keys]
    assert drawn == [in_blocks(8 * ((d + 1) // 2))] * 2 + [in_blocks(4 * d)]
    others = [(stream, size) for stream, size in filled if stream is not noise._keys]
    assert {size for _, size in others} == {in_blocks(8 * 1437)}
    assert {stream._cipher.key for stream, _ in others} == {keys.sampler}
    assert noise._keys._cipher.key == keys.noise


def test_without_secure_nothing_is_changed() -> None:
    config = resolve({"dataset": "digits"}).plan
    trainer = assembly.make_trainer(config, steps=1, device=torch.device("cpu"))
    assert type(trainer.mechanism) is GaussianMechanism
    noise, sampler = trainer.noise, trainer.sampler
    assert noise is not None
    assert not noise._secure
    assert isinstance(sampler, KeyedSampler)
    assert type(sampler._choices(1)) is SeededDraws


@pytest.mark.privacy
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_each_optimizer_trains_securely(optimizer: str) -> None:
    plain = train_digits(optimizer=optimizer, epochs=3)
    finished = train_digits(optimizer=optimizer, epochs=3, secure=True)
    assert finished.report["privacy"]["epsilon"] == plain.report["privacy"]["epsilon"]
    accuracy = [f.report["test"]["accuracy"] for f in (plain, finished)]
    assert abs(accuracy[0] - accuracy[1]) < 0.5
    assert all(torch.isfinite(tensor).all() for tensor in weights(finished.folder).values())


# Processes.


def drawn(where: Path) -> Mapping[str, Tensor]:
    """The first noise and the first batch of a run as numbers, by what its process printed."""
    config = resolve({}, where / folder.CONFIG).plan
    told = secrets(where)
    keys = Keys(noise=bytes.fromhex(told["noise"]), sampler=bytes.fromhex(told["sampler"]))
    trainer = assembly.make_trainer(config, steps=1, device=torch.device("cpu"), keys=keys)
    assert trainer.sampler is not None
    assert trainer.noise is not None
    chosen = torch.zeros(1437)
    chosen[torch.from_numpy(trainer.sampler.draw(1))] = 1.0
    return {"noise": trainer.noise.at(1).standard_normal(torch.zeros(1437)), "sampler": chosen}


#: An ordinary run and a secure one, without a seed, in folders that begin as told, and their keys.
TWO_RUNS = """
import json
import sys
from pathlib import Path
from dpmac_cli.cli.app import app
from dpmac_cli.runs import train

make = train.make_keys


def made(*args, **options):
    keys = make(*args, **options)
    shown = {name: getattr(keys, name).hex() for name in ("noise", "sampler")}
    Path(f"{where}.keys").write_text(json.dumps(shown))
    return keys


train.make_keys = made
flags = ["train", "--dataset", "digits", "--sigma", "6", "--steps", "3", "--quiet"]
for kind in ("plain", "secure"):
    more = ["--secure"] if kind == "secure" else []
    where = f"{sys.argv[1]}-{kind}"
    app([*flags, *more, "--out", where], standalone_mode=False)
"""


def secrets(where: Path) -> Mapping[str, str]:
    """The keys of batches and noise, as the process of a run wrote them."""
    found: Mapping[str, str] = json.loads(Path(f"{where}.keys").read_text())
    return found


@pytest.mark.privacy
@pytest.mark.long
def test_processes_started_in_the_same_instant_have_nothing_in_common() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RUNS, name], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for name in ("a", "b")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    runs = [Path(f"{name}-{kind}") for name in ("a", "b") for kind in ("plain", "secure")]
    for one, other in combinations(runs, 2):
        assert not same_weights(one, other)
        mine, theirs = drawn(one), drawn(other)
        for name in ("noise", "sampler"):
            assert secrets(one)[name] != secrets(other)[name]
            correlation = torch.corrcoef(torch.stack([mine[name], theirs[name]]))[0, 1]
            assert abs(correlation) < 5 / 1437**0.5
    assert len({key for run in runs for key in secrets(run).values()}) == 8


# Resuming.


def test_the_command_line_trains_stops_and_goes_on() -> None:
    first = dpmac(*TRAIN, "--checkpoint-every", "4", "--out", "run")
    assert (first.exit_code, first.stderr) == (0, "")
    where = Path("run")
    assert (where / folder.CONFIG).read_text().count("secure: true") == 1
    (where / folder.SUMS).unlink()  # as if killed before
    again = dpmac("train", "--resume", "run")
    assert again.exit_code == 0
    report = json.loads((where / folder.REPORT).read_text())
    assert report["privacy"]["randomness"] == {
        "secure": True,
        "statement": SECURELY,
    }
    assert report["privacy"]["seed_policy"]["given"] is False


@pytest.mark.privacy
def test_a_fork_that_changes_secure_tells_it() -> None:
    """Never one generator's state in the other, nor a promise for steps that were not so drawn."""
    first = finish(run.train(digits_config(steps=9, out="run"), after(5)))
    assert randomness(first) == {"secure": False, "statement": PLAINLY}
    second = finish(run.fork(Path("run"), {"secure": True, "out": "second"}))
    assert [event["steps"] for event in second.report["privacy"]["events"]] == [5, 4]
    assert randomness(second) == {"secure": False, "statement": BOTH_WAYS}
    third = finish(run.fork(Path("second"), {"steps": "12", "out": "third"}))
    assert randomness(third) == {"secure": False, "statement": BOTH_WAYS}


# What it says.


@pytest.mark.privacy
def test_the_report_and_the_model_say_how_it_was_drawn() -> None:
    said = {}
    kinds: Mapping[str, dict[str, Any]]
    kinds = {"plain": {}, "secure": {"secure": True}, "none": {"no_dp": True}}
    for name, flags in kinds.items():
        finished = train_digits(out=name, **flags)
        said[name] = randomness(finished)
        facts = load_model(finished.folder).facts
        assert facts["privacy"]["randomness"] == said[name]
    assert said == {
        "plain": {"secure": False, "statement": PLAINLY},
        "secure": {"secure": True, "statement": SECURELY},
        "none": {"secure": False, "statement": NO_SECRETS},
    }
    assert f"2^{int(np.log2(mechanism.GRID))} " in SECURELY


# What it refuses.


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (("--seed", "5"), "a seed reveals the random numbers"),
        (("--no-dp",), "without noise there is nothing to secure"),
    ],
    ids=["seed", "no-dp"],
)
def test_what_contradicts_secure_is_refused(flag: tuple[str, ...], why: str) -> None:
    """Typed both, or one of them in a file: neither is dropped unasked."""
    keys = {"--seed": "seed: 5", "--no-dp": "no-dp: true"}
    Path("secure.yaml").write_text("dataset: digits\nsecure: true\n")
    Path("other.yaml").write_text(f"dataset: digits\n{keys[flag[0]]}\n")
    before = contents(Path())
    base = ("train", "--steps", "3")
    for typed in (
        ("--dataset", "digits", "--secure", *flag),
        ("--config", "secure.yaml", *flag),
        ("--config", "other.yaml", "--secure"),
    ):
        result = dpmac(*base, *typed)
        assert result.exit_code == 2
        assert result.stdout == ""
        message = " ".join(result.stderr.split())
        assert f"contradict each other: {why}" in message
        assert message.endswith("Give one.")
        assert flag[0].strip("-") in message
        assert "secure" in message
        assert "Traceback" not in message
    assert contents(Path()) == before


@pytest.mark.privacy
def test_a_secure_run_does_not_go_on_with_a_seed() -> None:
    train_digits(out="run", secure=True)
    before = contents(Path())
    with pytest.raises(InputError, match="--seed and --secure contradict"):
        finish(run.resume(Path("run"), {"seed": "5"}))
    with pytest.raises(InputError, match="--seed cannot change in a fork"):
        finish(run.fork(Path("run"), {"seed": "5", "steps": "9", "out": "forked"}))
    assert contents(Path()) == before


def test_a_study_is_seeded_and_so_not_secure() -> None:
    result = dpmac("compare", "--dataset", "digits", "--secure", "--dry-run")
    assert result.exit_code == 2
    assert "--secure" in result.stderr
    Path("study.yaml").write_text("dataset: digits\nsigma: 1.0\nsecure: true\n")
    result = dpmac("compare", "--config", "study.yaml", "--dry-run")
    assert result.exit_code == 2
    assert "study.yaml: There is no setting 'secure'." in " ".join(result.stderr.split())


@pytest.mark.privacy
def test_a_model_too_large_for_the_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "GRID", 2.0**-20)
    before = contents(Path())
    result = dpmac(*TRAIN)
    assert result.exit_code == 4
    message = " ".join(result.stderr.split())
    assert "The model has 4,810 parameters" in message
    assert "leave out --secure" in message
    assert contents(Path()) == before


def test_secure_is_kept_in_the_configuration() -> None:
    config: TrainPlan = resolve({"dataset": "digits", "secure": True}).plan
    assert config.settings.secure is True
    assert config.recorded["secure"] is True
    assert resolve({"dataset": "digits"}).plan.recorded["secure"] is False
