"""Record-and-replay audit of training (Cebere et al. 2026, arXiv 2602.17454), by dp-recorder.

Trains on digits and records every call of the Gaussian mechanism. Then trains again on the
neighbouring data set that lacks one record, with the same keys, where each call of the mechanism
returns what was recorded. The audit fails if

* a sum that goes into the mechanism has moved by more than its sensitivity of 1, in whitened space;
* the mechanism is called in another order or with other parameters: sigma, the expected batch size,
  the region that was clipped to;
* anything else differs that an observer sees: parameters and moments after each step, every event
  on the screen, the files of the run (times left out).

Epsilon composed from the recorded calls, without amplification by sampling, is compared with
dpmac's own for the same number of unsampled steps.

The last settings have a bug put in, which has to be found. dp-recorder is not on PyPI: clone
https://github.com/ObliviousAI/dp-recorder and put its src folder on PYTHONPATH.

    python benchmarks/record_replay.py all docs/data/record_replay.jsonl
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution
from dp_recorder.auditing.audit_primitives import Auditor, audit_spec, ensure_equality
from sittings import Setting, main, product

from dpmac_cli import finish, resolve, train
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.data.dataset import Data
from dpmac_cli.data.loaders import load_data
from dpmac_cli.dp.clipping import clipped_sum
from dpmac_cli.dp.clipping.clipped_sum import clip_weights
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release import run
from dpmac_cli.runs.session import Update
from dpmac_cli.runs.trainer import Trainer

SIGMA, BATCH, STEPS, DELTA = 1.0, 500, 12, 1e-5
#: Of every run.
COMMON = {"dataset": "digits", "sigma": SIGMA, "batch_size": BATCH, "steps": STEPS}
#: The record that the neighbour lacks: an ordinary one, and one made as large as images can be.
RECORDS = {"ordinary": 100, "white": 200}
Run = Callable[..., Any]


def digest(*values: Any) -> str:
    """Identify tensors and other values by their bits."""
    parts = [
        v.numpy().tobytes() if isinstance(v, torch.Tensor) else repr(v).encode() for v in values
    ]
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def distance(recorded: Any, replayed: Any) -> float:
    """Euclidean distance of two whitened sums."""
    return float(np.linalg.norm(recorded - replayed))


def gaussian(sensitivity: float, sigma: float, batch: float, region: str) -> Any:
    """Privacy loss of one call without sampling."""
    del batch, region
    return privacy_loss_distribution.from_gaussian_mechanism(sigma / sensitivity)


def watched(release: Run) -> Run:
    """The mechanism as dp-recorder instruments it."""

    def call(
        self: GaussianMechanism, clipped: torch.Tensor, region: Ellipsoid, noise: Any
    ) -> PrivateMean:
        def mechanism(
            whitened: Any, sensitivity: float, sigma: float, batch: float, region: str
        ) -> PrivateMean:
            del whitened, sensitivity, sigma, batch, region
            mean: PrivateMean = release(self, clipped, where, noise)
            return mean

        where = region
        spec = audit_spec("gaussian", "whitened", "sensitivity", distance, gaussian)
        mean: PrivateMean = spec(mechanism)(
            (clipped.double() / region.scale).numpy(),
            1.0,
            self.noise_multiplier,
            self.expected_batch,
            digest(region.centre, region.inverse, region.factor),
        )
        return mean

    return call


def seen(step: Run) -> Run:
    """A step after which what an observer may see has to be equal."""

    def call(self: Trainer) -> None:
        step(self)
        state = self.state
        ensure_equality(step=state.step)
        for name, tensor in state.tensors().items():
            ensure_equality(**{name: digest(tensor)})

    return call


def published(folder: Path) -> dict[str, str]:
    """Digests of the files of a run, without times and dates."""
    timed = ("seconds", "timings", "created", "started", "finished")

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: timeless(part)
                for key, part in value.items()
                if not any(word in key for word in timed)
            }
        return [timeless(part) for part in value] if isinstance(value, list) else value

    report = timeless(json.loads((folder / "report.json").read_text()))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "model": digest((folder / "model.safetensors").read_bytes()),
        "report": json.dumps(report, sort_keys=True),
        "metrics": digest([timeless(json.loads(line)) for line in lines]),
    }


def observed(plan: TrainPlan, data: Data, folder: Path) -> None:
    """Train, and show the auditor the screen and the files."""
    events = list(train(plan, data=data))
    for event in events:
        if isinstance(event, Update) and hasattr(event.event, "result"):
            ensure_equality(screen=repr((event.event.step, event.event.result, event.epsilon)))
    finish(events)
    for name, value in published(folder).items():
        ensure_equality(**{name: value})


@contextmanager
def without(record: int) -> Iterator[None]:
    """The neighbouring data set: the same draws for all other records."""
    draw = KeyedSampler.draw

    def rest(self: KeyedSampler, step: int) -> Any:
        batch = draw(self, step)
        return batch[batch != record]

    with patch.object(KeyedSampler, "draw", rest):
        yield


@contextmanager
def bug(name: str) -> Iterator[None]:
    """Put one of the bugs in that others shipped."""
    clip_and_sum = Trainer._clip_and_sum

    def by_drawn(self: Trainer, batch: Any) -> torch.Tensor:
        return clip_and_sum(self, batch) * (BATCH / max(len(batch), 1))

    def doubled(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        c, valid = clip_weights(*given)
        return c * 2, valid

    bugs: dict[str, AbstractContextManager[Any]] = {
        "": nullcontext(),
        "mean over the records drawn": patch.object(Trainer, "_clip_and_sum", by_drawn),
        "weights twice as large": patch.object(clipped_sum, "clip_weights", doubled),
    }
    with bugs[name]:
        yield


def audit(setting: Setting) -> dict[str, Any]:
    """Record and replay; return what was found and what was compared."""
    given = {k: v for k, v in setting.items() if k not in ("record", "bug")}
    number = RECORDS[setting["record"]]
    keys = make_keys(None)  # of both runs
    with (
        tempfile.TemporaryDirectory() as place,
        bug(setting["bug"]),
        patch.object(run, "make_keys", lambda *_, **__: keys),
    ):
        folder = Path(place) / "run"
        plan = resolve({**COMMON, **given, "out": str(folder), "force": True}).plan
        data = load_data("digits", plan.data.folder, torch.device("cpu"))
        if setting["record"] == "white":
            data.train.images[number] = 255
        auditor, found = Auditor(), ""
        with (
            patch.object(GaussianMechanism, "release", watched(GaussianMechanism.release)),
            patch.object(Trainer, "step", seen(Trainer.step)),
            auditor,
        ):
            observed(plan, data, folder)
            calls = [entry for entry in auditor.log if entry.kind == "gaussian"]
            auditor.set_replay()
            try:
                with without(number):
                    observed(plan, data, folder)
                auditor.validate_records()
            except (AssertionError, RuntimeError) as error:
                found = str(error).splitlines()[0]
    moved = [
        distance(entry.inputs_d["whitened"], entry.inputs_dp["whitened"])
        for entry in calls
        if entry.inputs_dp is not None
    ]
    composed = auditor.compute_overall_pld().get_epsilon_for_delta(DELTA)
    ours = total_epsilon((TrainingEvent(1.0, SIGMA, STEPS),), DELTA)
    return {
        "found": found,
        "calls": len(calls),
        "calls_that_moved": sum(move > 0 for move in moved),
        "largest_move": max(moved, default=math.nan),
        "equalities": sum(entry.kind == "EQ" for entry in auditor.log),
        "epsilon_of_calls": composed,
        "epsilon_of_dpmac": ours,
    }


def settings() -> list[Setting]:
    """All optimizers, both samplers, both mechanisms; then two builds with a bug."""
    honest = product(
        optimizer=OPTIMIZERS,
        sampler=("poisson", "random-allocation"),
        secure=(False, True),
        record=RECORDS,
        bug=("",),
    )
    broken = product(
        optimizer=("dp-adam", "dp-macadam"),
        sampler=("poisson",),
        secure=(False,),
        record=("white",),
        bug=("mean over the records drawn", "weights twice as large"),
    )
    return honest + broken


if __name__ == "__main__":
    main(__doc__, {"all": settings}, audit)
