"""Does the audit find bugs, and leave honest runs alone? An attack on builds with known bugs.

Trains audit runs, some of them with a bug put in from outside, and appends a line of JSON each:
what was claimed, what the attack proves, and how many guesses were right. Settings already in the
file are left out.

    python benchmarks/audit.py mnist docs/data/audit.jsonl
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import append_line, parser_of, read_lines

from dpmac_cli.dp.clipping.clipped_sum import clip_weights
from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.release import run
from dpmac_cli.release.audit import read_audit
from dpmac_cli.release.publish import Finished
from dpmac_cli.runs.resolve import resolve

ATTACKED = ("dp-sgd", "dp-macadam")
#: What every run of a grid has in common.
MNIST = {"dataset": "mnist", "sigma": 1.0}
#: The rate and the steps of the runs with 5,000 canaries, so that the claim is the same.
MANY = {"canaries": 100_000, "guesses": 2000, "batch_size": 450, "steps": 1175}
Setting = dict[str, Any]


class Halved(SeededNormals):
    """Half of the noise that it is handed on as."""

    def __init__(self, noise: Any) -> None:
        self._noise = noise

    def standard_normal(self, like: torch.Tensor, at_once: int | None = None) -> torch.Tensor:
        """Half of a standard normal draw."""
        drawn: torch.Tensor = self._noise.standard_normal(like)
        return drawn.mul_(0.5)


@contextlib.contextmanager
def half_the_noise() -> Iterator[None]:
    """Every draw of noise counts half."""
    release = GaussianMechanism.release

    def released(mechanism: GaussianMechanism, clipped: Any, region: Any, noise: Any) -> Any:
        return release(mechanism, clipped, region, Halved(noise))

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


BUGS: Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "half the noise": half_the_noise,
    "no clipping": no_clipping,
}


def grid() -> Iterable[Setting]:
    """Honest runs of every optimizer, and two of them with each bug."""
    for bug in BUGS:
        for optimizer in OPTIMIZERS if bug == "none" else ATTACKED:
            yield {**MNIST, "optimizer": optimizer, "canaries": 5000, "seed": 0, "bug": bug}


GRIDS: Mapping[str, Callable[[], Iterable[Setting]]] = {
    "mnist": grid,
    "mnist-honest": lambda: [
        {**MNIST, **MANY, "optimizer": optimizer, "seed": seed, "bug": "none"}
        for seed in range(10)
        for optimizer in ("dp-sgd", "dp-adam")
    ],
}


def measure(setting: Setting) -> dict[str, Any]:
    """Train one setting, bug and all: what it claims, and what the attack proves."""
    flags = {name: value for name, value in setting.items() if name != "bug"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, BUGS[setting["bug"]]():
        out = Path(name) / "run"
        config = resolve({**flags, "device": "cpu", "out": out}).plan
        *_, last = run.train(config)
        found = read_audit(out)
    assert isinstance(last, Finished)
    return {
        **found.verdict(),
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
