"""Measure how networks are run, those here and in tests/layer_cases.py, and what clipped sums cost.

    PYTHONPATH=. python benchmarks/layers.py layers.json
    PYTHONPATH=. python benchmarks/layers.py layers.json --only "usual sizes"

``--only`` measures the rows of some groups, and leaves the others of an earlier file as they are.
Steps of plain training, of dpmac, and of Opacus by hooks and with ghost clipping run in turn in one
process, on the same records; a cost is the median of the ratios of their times. Opacus is called
wrong where its clipped sum is not that of dpmac, whose tests compare it with autograd.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import in_turn, parser_of, ratio, write_json
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpmac_cli import clipped_grad
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.training.chunks import BatchSum
from tests.layer_cases import CASES as SMALL_CASES
from tests.layer_cases import GROUPS as SMALL_GROUPS
from tests.layer_cases import Attention, Case, Conv1D, LoRA, TiedWords, cases_of, first_of

#: Rounds of steps, and the norm that gradients are clipped to, which all exceed.
ROUNDS, RADIUS = 6, 0.01
#: Relative difference of two clipped sums from which one of them is wrong. dpmac clips to a norm
#: that is smaller by its margin for rounding, 6e-4.
WRONG = 5e-3
#: Factor over plain training that no row of usual size should exceed.
TARGET = 4.0

USUAL, WORDS = "usual sizes", 2000
TEXTS, PICTURES, STEPS = (64, 256), (32, 16, 16), (50, 64)
#: Networks of usual size, whose costs are those of training: name, network, shape of a record.
USUAL_SIZES: tuple[tuple[Any, ...], ...] = (
    (
        "multilayer perceptron, 784 to 500 to 10",
        lambda: nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10)),
        (784,),
    ),
    (
        "two convolutions of 64 channels, GroupNorm",
        lambda: nn.Sequential(
            *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()),
        ),
        PICTURES,
    ),
    (
        "LayerNorm and two Linear layers, 256 to 1,024",
        lambda: nn.Sequential(
            *(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        ),
        TEXTS,
    ),
    (
        "two Conv1D of transformers, 256 to 1,024",
        lambda: nn.Sequential(Conv1D(1024, 256), nn.GELU(), Conv1D(256, 1024)),
        TEXTS,
    ),
    ("attention of four Linear layers, 256 wide", lambda: Attention(256), TEXTS),
    (
        "TransformerEncoderLayer, 256 wide",
        lambda: nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True),
        TEXTS,
    ),
    ("LSTM, 128 wide, 50 steps", lambda: first_of(nn.LSTM(64, 128, batch_first=True)), STEPS),
    ("GRU, 128 wide, 50 steps", lambda: first_of(nn.GRU(64, 128, batch_first=True)), STEPS),
    ("LoRA of rank 8, 256 wide", lambda: LoRA(256, 8), TEXTS),
    (
        "an Embedding and a head of one weight, 2,000 words",
        lambda: TiedWords(WORDS, 128),
        (32,),
        WORDS,
    ),
)
GROUPS = (USUAL, *SMALL_GROUPS)
CASES = (*cases_of(USUAL, USUAL_SIZES, records=64), *SMALL_CASES)

#: A step, which returns the clipped sum by the names of parameters; nothing in plain training.
Step = Callable[[], Mapping[str, Tensor]]


def measured(case: Case) -> dict[str, Any]:
    """Return the row of a case: how its network is run, why not by rules, and the costs."""
    known, network, batch = {"group": case.group, "name": case.name}, built(case), case.batch()
    trained = [p for p in network.parameters() if p.requires_grad and not is_lazy(p)]
    like = torch.zeros(max(1, sum(p.numel() for p in trained)))
    region = ball(RADIUS, like)
    try:
        clipped = clipped_grad(network, case.loss, region, batch_size=case.records)
        sums = clipped.prepare(batch)
    except ModelError as failure:
        return {**known, "path": "refused", "why": str(failure).replace("network.", "")}
    why = "" if sums.per_sample.vmapped else clipped.notes[0].replace("network.", "")
    steps: dict[str, Step] = {
        "plain": plain(case, batch),
        "dpmac": lambda: clipped.by_parameter(clipped(batch)),
    }
    found: dict[str, Any] = {}
    for name, build in PEERS.items():
        try:
            steps[name] = build(case, batch)
            if not agree(steps["dpmac"], steps[name]):
                found[name] = "wrong"
        except Exception:  # noqa: BLE001  (Opacus refuses networks by any exception)
            steps.pop(name, None)
            found[name] = "refused"
    ratios = times_of_dpmac(steps)
    return {
        **known,
        "path": path_of(sums),
        "why": why,
        "records": case.records,
        "cost": ratios.pop("plain"),
        **ratios,
        **found,
    }


def built(case: Case) -> nn.Module:
    """Return the network of a case, always with the same weights."""
    torch.manual_seed(0)
    return case.build()


def path_of(sums: BatchSum) -> str:
    """Return how a network is run."""
    per_sample = sums.per_sample
    if not per_sample.vmapped:
        return "loop"
    recorded = {layer.name for layer in per_sample.layers} == per_sample.recorded
    return "rule" if recorded else "instantiated"


def plain(case: Case, batch: Tensor) -> Step:
    """Return a step of plain training."""
    network = built(case)

    def step() -> Mapping[str, Tensor]:
        network.zero_grad()
        loss: Any = case.loss(network, batch).mean()
        loss.backward()
        return {}

    return step


def by_hooks(case: Case, batch: Tensor) -> Step:
    """Return a step of Opacus with per-sample gradients by hooks."""
    network = built(case)
    model = GradSampleModule(network)
    optimizer = DPOptimizer(sgd(network), **numbers(case))

    def step() -> Mapping[str, Tensor]:
        optimizer.zero_grad()
        loss: Any = case.loss(model, batch).mean()
        loss.backward()
        optimizer.clip_and_accumulate()
        return {name: p.summed_grad for name, p in trained_of(network).items()}

    return step


def by_ghost(case: Case, batch: Tensor) -> Step:
    """Return a step of Opacus with ghost clipping."""
    network = built(case)
    model = GradSampleModuleFastGradientClipping(
        network, max_grad_norm=RADIUS, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(sgd(network), **numbers(case))

    def step() -> Mapping[str, Tensor]:
        model.enable_hooks()
        optimizer.zero_grad()
        losses = case.loss(model, batch)
        DPTensorFastGradientClipping(model, optimizer, losses).backward()
        return {name: p.grad for name, p in trained_of(network).items() if p.grad is not None}

    return step


#: Steps of Opacus, by how it clips.
PEERS = {"hooks": by_hooks, "ghost": by_ghost}


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that Opacus wraps, and that takes no step."""
    return torch.optim.SGD(trained_of(network).values(), lr=0.0)


def numbers(case: Case) -> dict[str, Any]:
    """Return the settings of Opacus."""
    return {
        "noise_multiplier": 0.0,
        "max_grad_norm": RADIUS,
        "expected_batch_size": case.records,
    }


def trained_of(network: nn.Module) -> dict[str, Any]:
    """Return trained parameters by name. Opacus gives them attributes."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def agree(ours: Step, theirs: Step) -> bool:
    """Return whether two steps have the same clipped sum; True if the network draws numbers."""
    one, again, other = ours(), ours(), theirs()
    if any(not torch.allclose(one[name], again[name], rtol=1e-3) for name in one):
        return True
    off, whole = 0.0, 0.0
    for name, total in one.items():
        off += float((total - other.get(name, torch.zeros_like(total))).square().sum())
        whole += float(total.square().sum())
    return off <= WRONG**2 * whole


def times_of_dpmac(steps: Mapping[str, Step]) -> dict[str, float]:
    """Return the median ratios of the time of dpmac to those of the others, in turn."""
    taken = in_turn(steps, dict.fromkeys(steps, 1), ROUNDS)
    own = taken.pop("dpmac")[1:]
    return {name: round(ratio(own, each[1:]), 2) for name, each in taken.items()}


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the number of rows by path, and the rows of usual size beyond the target."""
    lines = [f"{count:4} {path}" for path, count in Counter(row["path"] for row in rows).items()]
    usual = [row for row in rows if row["group"] == USUAL and "cost" in row]
    costs = [(row["cost"], row["name"]) for row in usual]
    lines += [f"{cost:.2f} times plain: {name}" for cost, name in sorted(costs, reverse=True)]
    beyond = sum(cost > TARGET for cost, _ in costs)
    return "\n".join([*lines, f"{beyond} of usual size are beyond {TARGET:g} times plain"])


def main() -> None:
    """Measure the cases of all groups, or of some, and write the file as they are done."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="where rows are written")
    parser.add_argument("--only", choices=GROUPS, nargs="+", help="measure these groups alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    kept = {}
    if options.only and options.file.exists():
        before = json.loads(options.file.read_text(encoding="utf-8"))["rows"]
        kept = {(row["group"], row["name"]): row for row in before}
    cases = [case for case in CASES if case.group in (options.only or GROUPS)]
    for number, case in enumerate(cases, 1):
        kept[case.group, case.name] = row = measured(case)
        print(f"{number}/{len(cases)}", row, file=sys.stderr)
    rows = [kept[key] for case in CASES if (key := (case.group, case.name)) in kept]
    write_json(options.file, {"torch": torch.__version__, "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
