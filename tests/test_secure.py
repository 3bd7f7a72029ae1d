"""``--secure`` from the command line to the report: what it chooses, refuses, resumes and says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpmac_cli import resume
from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.dp.mechanism import SecureMechanism
from dpmac_cli.randomness.keystream import KeyStream, Stretch, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.release.run import Run
from dpmac_cli.release.sentences import BOTH_WAYS, PLAINLY
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import (
    after,
    digits_config,
    run_trainer,
)


def randomness(finished: Run) -> Mapping[str, Any]:
    report = finished.report
    return {"secure": report["secure"], "statement": report["sentences"]["randomness"]}


# What it chooses.


@pytest.mark.promise("secure")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_secure_draws_all_of_a_run_from_keys_of_their_own(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[bytes, int]] = []
    at = KeyStream.at

    class Kept(Stretch):
        key: bytes

        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
            drawn.append((self.key, n_words * np.dtype(dtype).itemsize))
            return super().generate_state(n_words, dtype)

    def kept(keys: KeyStream, step: int, lane: int = 0) -> Stretch:
        stretch = Kept(at(keys, step, lane)._cipher)
        stretch.key = keys.key
        return stretch

    monkeypatch.setattr(KeyStream, "at", kept)
    config = resolve({"dataset": "digits", "sigma": 1, "secure": True, "sampler": sampler}).plan
    keys = make_keys(None)
    trainer = run_trainer(config, steps=1, keys=keys)
    noise = trainer.noise
    assert type(trainer.mechanism) is SecureMechanism
    assert isinstance(noise, Noise)
    assert keys.noise != keys.sampler
    trainer.step()
    assert noise._secure
    d = trainer.state.theta.numel()
    of_noise = [size for key, size in drawn if key == keys.noise]
    assert of_noise == [8 * ((d + 1) // 2)] * 2 + [4 * ((d + 1) // 2), 4 * (d // 2)]
    assert {item for item in drawn if item[0] != keys.noise} == {(keys.sampler, 8 * 1437)}


# Resuming.


@pytest.mark.promise("secure")
def test_a_resume_into_another_folder_that_changes_secure_tells_it() -> None:
    """Never one generator's state in the other, nor a promise for steps that were not so drawn."""
    first = finish(train_plan(digits_config(steps=9, out="run"), after(5)))
    assert randomness(first) == {"secure": False, "statement": PLAINLY}
    second = resume(Path("run"), {"secure": True, "out": "second"})
    assert [event["steps"] for event in second.report["events"]] == [5, 4]
    assert randomness(second) == {"secure": False, "statement": BOTH_WAYS}
    third = resume(Path("second"), {"steps": "12", "out": "third"})
    assert randomness(third) == {"secure": False, "statement": BOTH_WAYS}
