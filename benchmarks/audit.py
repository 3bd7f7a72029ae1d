"""Does the audit find bugs, and leave honest runs alone? An attack on builds with known bugs.

Trains audit runs, some of them with a bug put in from outside, and appends a line of JSON each:
what was claimed, what the attack proves, and how many guesses were right. Settings already in the
file are left out. ``crafted`` adds crafted records, like ``dpmac train --canaries``; the others add
gradient canaries, an attack on clipping and noise alone.

    python benchmarks/audit.py crafted docs/data/audit.jsonl
    python benchmarks/audit.py gradients docs/data/audit.jsonl
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import append_line, parser_of, read_lines
from gradient_canaries import attacked
from sklearn.datasets import load_digits

from dpmac_cli import ArrayData
from dpmac_cli.data import arrays, held_out
from dpmac_cli.dp.clipping.clipped_sum import clip_weights
from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release.audit import read_audit, verdict
from dpmac_cli.release.report import read_report
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve

ATTACKED = ("dp-sgd", "dp-macadam")
#: Runs that both kinds of canaries are added to.
DIGITS = {"dataset": "digits", "epsilon": 3}
Setting = dict[str, Any]


class Weak(SeededNormals):
    """A share of the noise that it is handed on as."""

    def __init__(self, noise: Any, share: float) -> None:
        self._noise, self._share = noise, share

    def standard_normal(self, like: torch.Tensor, at_once: int | None = None) -> torch.Tensor:
        """Return a share of a standard normal draw."""
        drawn: torch.Tensor = self._noise.standard_normal(like)
        return drawn.mul_(self._share)


@contextlib.contextmanager
def weak_noise(share: float) -> Iterator[None]:
    """Every draw of noise counts a share."""
    release = GaussianMechanism.release

    def released(mechanism: GaussianMechanism, clipped: Any, region: Any, noise: Any) -> Any:
        return release(mechanism, clipped, region, Weak(noise, share))

    with patch.object(GaussianMechanism, "release", released):
        yield


@contextlib.contextmanager
def no_clipping() -> Iterator[None]:
    """Every weight is 1."""

    def ones(squared: SquaredNorms, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        c, valid = clip_weights(squared, *args)
        return torch.ones_like(c) * valid, valid

    with patch("dpmac_cli.dp.clipping.clipped_sum.clip_weights", ones):
        yield


@contextlib.contextmanager
def clipping_at(factor: float) -> Iterator[None]:
    """Gradients are clipped to a ball that is larger by a factor."""

    def larger(squared: SquaredNorms, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        c, valid = clip_weights(squared, *args)
        return (factor * c).clamp(max=1), valid

    with patch("dpmac_cli.dp.clipping.clipped_sum.clip_weights", larger):
        yield


@contextlib.contextmanager
def used_ten_times() -> Iterator[None]:
    """Each record that is drawn is in its batch ten times."""
    draw = KeyedSampler.draw

    def drawn(sampler: KeyedSampler, step: int) -> Any:
        return np.repeat(draw(sampler, step), 10)

    with patch.object(KeyedSampler, "draw", drawn):
        yield


@contextlib.contextmanager
def repeating_reader() -> Iterator[None]:
    """Each training record is read ten times."""
    train_and_test = held_out.train_and_test

    def repeated(*args: Any) -> Any:
        (train, *tests), (keys, *others) = train_and_test(*args)
        ten = np.repeat(np.arange(len(train.y)), 10)
        return [train.at(ten), *tests], [[keys[row] for row in ten], *others]

    with patch.object(arrays, "train_and_test", repeated):
        yield


BUGS: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "half the noise": partial(weak_noise, 1 / 2),
    "a third of the noise": partial(weak_noise, 1 / 3),
    "a tenth of the noise": partial(weak_noise, 1 / 10),
    "no clipping": no_clipping,
    "clipping at 10 C": partial(clipping_at, 10.0),
    "each record used ten times": used_ten_times,
    "a reader that repeats records": repeating_reader,
}
#: Bugs that are put into runs with gradient canaries, and with crafted records.
OF_ENGINE = ("none", "half the noise", "a third of the noise", "no clipping")
OF_RECORDS = (
    *("none", "a tenth of the noise", "clipping at 10 C", "each record used ten times"),
    "a reader that repeats records",
)


def gradients() -> Iterable[Setting]:
    """Three honest runs of every optimizer with gradient canaries, and of two with each bug."""
    for bug in OF_ENGINE:
        for optimizer in OPTIMIZERS if bug == "none" else ATTACKED:
            for seed in range(3):
                network = {"model": "mlp", "optimizer": optimizer}
                yield {**DIGITS, **network, "gradients": 1000, "seed": seed, "bug": bug}


def crafted() -> Iterable[Setting]:
    """Twenty honest runs on digits as rows of numbers, and six with each bug."""
    for bug in OF_RECORDS:
        for seed in range(20 if bug == "none" else 6):
            yield {**DIGITS, "canaries": 200, "seed": seed, "bug": bug}


GRIDS: Mapping[str, Callable[[], Iterable[Setting]]] = {
    "crafted": crafted,
    "gradients": gradients,
}


def measure(setting: Setting) -> dict[str, Any]:
    """Train one setting, bug and all: what it claims, and what the attack proves."""
    flags = {name: value for name, value in setting.items() if name not in ("bug", "gradients")}
    x, y = load_digits(return_X_y=True)
    flags["dataset"] = ArrayData(x, y, low=0, high=16, classes=[*"0123456789"])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, BUGS[setting["bug"]]():
        out = Path(name) / "run"
        resolved = resolve({**flags, "device": "cpu", "out": out})
        if gradients := setting.get("gradients"):
            last, guesses = attacked(resolved.plan, gradients, gradients // 10)
        else:
            last = finish(train_plan(resolved))
            guesses, _ = read_audit(out)
        claim = read_report(out)
    return {
        **verdict(guesses, claim.training, resolved.plan.settings.delta, claim.epsilon),
        "accuracy": last.report["scores"]["accuracy"]["value"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Measure what the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    known = [line["setting"] for line in read_lines(options.file)]
    for setting in GRIDS[options.grid]():
        if setting not in known:
            append_line(options.file, {"setting": setting, "result": measure(setting)})


if __name__ == "__main__":
    main()
