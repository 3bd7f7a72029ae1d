"""Compare ways to choose settings, each at the same epsilon for search and model together.

    python benchmarks/tuning.py --out runs/tuning --datasets digits --epsilon 3 --repeats 5

- ``defaults``: one run of the best recipe.
- ``tuned``: ``dpmac tune``.
- ``composed``: as many trials as ``dpmac tune`` has on average, each charged in full.
- ``dishonest``: these trials, each with the whole epsilon, and the best by exact test scores. Its
  true epsilon is higher; it shows what a search that is not charged seems to gain.

Each result is a line of results.jsonl: the exact accuracy of the published model on the test
records. Repeats are paired: settings of the last two are drawn with the same public seed.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.selection import trials_of
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import ChosenFolder, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_space import SearchSpace, plan_search
from dpmac_cli.errors import DivergedError
from dpmac_cli.release.run import finish, train
from dpmac_cli.release.scoring import score
from dpmac_cli.studies.tune import carry_out_search, covered_score, plan_tune

#: Settings to draw, unless others are given.
SPACE = ("lr=1e-4..1:log", "clip-norm=0.1,1,10", "epochs=5,10,20,40")


def accuracy(run: Path) -> float:
    """Return the exact test accuracy of a published model."""
    return score(run, device="cpu").result.accuracy


def defaults(space: SearchSpace, epsilon: float, out: Path, seed: int) -> float:
    """Return the accuracy of one run of the best recipe."""
    del seed
    plan = resolve({"dataset": space.data.dataset, "epsilon": epsilon, "device": "cpu"}).plan
    finish(train(plan.placed(ChosenFolder(out))))
    return accuracy(out)


def tuned(space: SearchSpace, epsilon: float, out: Path, seed: int) -> float:
    """Return the accuracy of the result of a search."""
    del epsilon, seed
    # Its end is not timed here, so nothing needs to wait.
    finish(carry_out_search(plan_tune(space, out, stop_early=True, longest=1.0)))
    return accuracy(out)


def composed(space: SearchSpace, epsilon: float, out: Path, seed: int) -> float:
    """Return the accuracy of the trial with the best covered score, where all are charged."""
    runs = list(_trials(space, out, seed, lambda plan, count: _shared(plan, count, epsilon)))
    best = max(runs, key=lambda run: covered_score(run, space.plans[0].run.metric))
    return accuracy(best)


def dishonest(space: SearchSpace, epsilon: float, out: Path, seed: int) -> float:
    """Return the accuracy of the best trial by exact test scores, each with the whole epsilon."""
    return max(map(accuracy, _trials(space, out, seed, lambda plan, _: _shared(plan, 1, epsilon))))


def _shared(plan: TrainPlan, count: int, epsilon: float) -> TrainPlan:
    """Return a trial of which ``count`` cost epsilon together, training and scores alike."""
    privacy, delta = plan.privacy, plan.privacy.delta
    assert privacy.scores is not None
    repeated = replace(privacy.event, steps=count * privacy.steps)
    sigma = calibrate_noise(repeated, delta, epsilon)
    spent = total_epsilon((replace(repeated, noise_multiplier=sigma),), delta)
    score = replace(privacy.scores.event(privacy.steps, privacy.steps), steps=count)
    scores = replace(privacy.scores, noise_multiplier=calibrate_noise(score, delta, spent))
    event = replace(privacy.event, noise_multiplier=sigma)
    return replace(plan, search=None, privacy=replace(privacy, event=event, scores=scores))


def _trials(
    space: SearchSpace, out: Path, seed: int, noisy: Callable[[TrainPlan, int], TrainPlan]
) -> Iterator[Path]:
    """Train as many trials as a search has on average, and yield the folders of those that end."""
    source = random.Random(seed)  # noqa: S311  (its draws are repeated, and protect nothing)
    count = round(space.search.trials.mean)
    for number in range(count):
        setting = {each.name: each.draw(source) for each in space.dimensions}
        plan = noisy(space.plan_of(setting, stop_early=True), count)
        try:
            finish(train(plan.placed(ChosenFolder(out / str(number)))))
        except DivergedError:
            continue
        yield out / str(number)


WAYS = {"defaults": defaults, "tuned": tuned, "composed": composed, "dishonest": dishonest}


def main() -> None:
    """Run what is not in results.jsonl yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--datasets", default="digits", help="names or paths, with commas")
    parser.add_argument("--epsilon", default="3", help="one or several, with commas")
    parser.add_argument("--trials", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--search", action="append", help="as in dpmac tune")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = {tuple(row[:-1]): row[-1] for row in map(json.loads, lines)}
    for dataset in options.datasets.split(","):
        for epsilon in map(float, options.epsilon.split(",")):
            given: dict[SettingName, Any] = {"dataset": dataset, "epsilon": epsilon}
            given["device"] = "cpu"
            trials = trials_of(options.trials)
            space = plan_search(given, None, options.search or SPACE, trials)
            for repeat in range(options.repeats):
                for name, way in WAYS.items():
                    key = (dataset, epsilon, repeat, name)
                    if key not in found:
                        shutil.rmtree(where := options.out / "run", ignore_errors=True)
                        found[key] = way(space, epsilon, where, repeat)
                        with file.open("a") as opened:
                            opened.write(json.dumps([*key, found[key]]) + "\n")
    kinds = dict.fromkeys(key[:2] for key in found)
    print(f"| dataset | epsilon | {' | '.join(WAYS)} |\n|{'---|' * (2 + len(WAYS))}")
    for kind in kinds:
        means = (
            fmean(value for key, value in found.items() if key[:2] == kind and key[3] == name)
            for name in WAYS
        )
        print(f"| {kind[0]} | {kind[1]:g} | {' | '.join(f'{mean:.2%}' for mean in means)} |")


if __name__ == "__main__":
    main()
