"""Measure the CPU time that calibration takes, as a share of that of the whole run.

python benchmarks/calibration_time.py docs/data/calibration-time.jsonl --sets mnist,table
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import append_line, parser_of

from dpmac_cli import ArrayData
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.trainer import Trainer

#: Settings of each run; "wide" is the shortened run of sample_configs/cifar10-de2022.yaml, and
#: "wide-2" a still shorter one.
RUNS: dict[str, dict[str, Any]] = {
    "mnist": {"dataset": "mnist", "epsilon": 1, "model": "mlp"},
    "cnn": {"dataset": "mnist", "epsilon": 1, "model": "cnn", "epochs": 1},
    "table": {"epsilon": 1},
    "wide": {
        **{"recipe": "cifar10-de2022", "steps": 20, "batch_size": 1024},
        **{"augmentations": 2, "physical_batch": 16},
    },
    "wide-2": {
        **{"recipe": "cifar10-de2022", "steps": 2, "batch_size": 1024},
        **{"augmentations": 2, "physical_batch": 16},
    },
}


def measure(name: str, taken: list[float]) -> dict[str, Any]:
    """Train once, and return CPU times; ``taken`` are those of calibrations."""
    settings = RUNS[name]
    if name == "table":
        draws = np.random.default_rng(0)
        x = draws.random((30_000, 20)).astype(np.float32)
        y = (x[:, 0] + draws.normal(size=len(x)) > 0.5).astype(int)
        data = ArrayData(x, y, x[:5000], y[:5000], classes=("a", "b"), low=0, high=1)
        settings = {"dataset": data, **settings}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        plan = resolve(out=Path(folder) / "run", device="cpu", **settings)
        histogram = plan.plan.histogram
        assert histogram is not None
        finish(train_plan(plan))
        total = time.process_time() - begin
    share = round(taken[-1] / total, 4)
    times = {"seconds": round(taken[-1], 2), "whole run": round(total, 1), "share": share}
    return {"run": name, "sampling_rate": round(histogram.sampling_rate, 4), **times}


def main() -> None:
    """Measure runs, and add lines to the file."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", default="mnist,cnn,table")
    asked = parser.parse_args()
    taken = list[float]()
    calibrate = Trainer.calibrate

    def timed(trainer: Trainer) -> bool:
        begin = time.process_time()
        done = calibrate(trainer)
        if done:
            taken.append(time.process_time() - begin)
        return done

    Trainer.calibrate = timed  # type: ignore[assignment,method-assign]
    for name in asked.sets.split(","):
        append_line(asked.out, measure(name, taken))


if __name__ == "__main__":
    main()
