"""Measure memory and time of training on a folder of JPEGs of 224 pixels, by their number.

python benchmarks/own_images.py 1000,10000,30000,120000 docs/data/own_images.jsonl [FOLDER]

Images are smooth colours with some noise, drawn with a fixed seed. For each number: how fast one
core and all cores decode; how long a first and a second start of a linear network take to their
first step; and the peak of resident memory of the process that trains. At 10,000 images the same
of a ResNet-18, and the time of a step that reads its records from the file over that of one that
has them in memory: medians of alternating steps in one process. 120,000 images take 3 GB as JPEGs
and 18 GB decoded, below FOLDER or the folder of temporary files. A line has what was measured for a
number of images.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE, COMPARED = 224, 10_000
CLASSES = ("class0", "class1")


def make_image(path: Path, seed: int) -> None:
    """Write one JPEG."""
    draw = np.random.default_rng(seed)
    rough = Image.fromarray(draw.integers(0, 256, (14, 14, 3), dtype=np.uint8))
    smooth = np.asarray(rough.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (smooth + draw.integers(-12, 13, smooth.shape, np.int16)).clip(0, 255)
    Image.fromarray(noisy.astype(np.uint8)).save(path, quality=85)


def make_images(root: Path, count: int) -> None:
    """Write JPEGs of two classes, those that are not there yet."""
    paths = [root / CLASSES[number % 2] / f"{number:06}.jpg" for number in range(count)]
    for name in CLASSES:
        (root / name).mkdir(exist_ok=True)
    missing = [(path, number) for number, path in enumerate(paths) if not path.exists()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(make_image, *zip(*missing, strict=True), chunksize=256))


def settings(root: Path, model: str = "linear") -> dict[str, Any]:
    """Return settings of a run of three steps of 64 records, scored on one image in fifty."""
    declared = {"channels": 3, "image_size": SIZE, "classes": ",".join(CLASSES)}
    rest = {"model": model, "batch_size": 64, "steps": 3, "sigma": 1, "device": "cpu"}
    rest["test_fraction"] = 0.02
    return {"dataset": str(root), **declared, **rest}


def start(root: Path, out: Path, model: str) -> None:
    """Train, and print when decoding and the first step were done, and the peak of memory."""
    from dpmac_cli import Started, Update, resolve, train  # noqa: PLC0415  (timed)
    from dpmac_cli.storage.progress import Computing  # noqa: PLC0415  (timed)

    begun, decoding, first_step = float(os.environ["BEGUN"]), list[float](), 0.0
    for event in train(resolve(settings(root, model), out=out, force=True).plan):
        now = time.time() - begun
        if isinstance(event, Computing):
            decoding.append(now)
        elif isinstance(event, Started):
            started = now
        elif isinstance(event, Update) and first_step == 0:
            first_step = now
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    decoded = decoding[-1] - decoding[0] if decoding else 0.0
    found = {
        "decoding": decoded,
        "ready": started,
        "first_step": first_step,
        "end": now,
        "peak": int(peak) * 1024,
    }
    print(json.dumps(found))


def compare(root: Path, model: str) -> None:
    """Print the medians of step times from the file and from memory."""
    from dpmac_cli import resolve  # noqa: PLC0415  (of a child alone)
    from dpmac_cli.data import dataset  # noqa: PLC0415  (of a child alone)
    from dpmac_cli.runs.trainer import make_trainer  # noqa: PLC0415  (of a child alone)

    trainers = []
    times: tuple[list[float], list[float]] = ([], [])
    for most in (0, 1e12):
        dataset.IN_MEMORY = most
        trainers.append(make_trainer(resolve(settings(root, model)).plan))
        trainers[-1].step()
    for _ in range(7):
        for trainer, seconds in zip(trainers, times, strict=True):
            begun = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - begun)
    print(json.dumps([statistics.median(seconds) for seconds in times]))


def child(*arguments: object, cores: int | None = None) -> Any:
    """Run a part of this script in a process of its own; return what it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    if cores is not None:
        command = ["taskset", "-c", f"0-{cores - 1}", *command]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "BEGUN": str(time.time())},
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(root: Path, out: Path, count: int) -> dict[str, Any]:
    """Return what is measured for a number of images."""
    make_images(root, count)
    cache, found = Path(os.environ["DPMAC_CACHE_DIR"]), dict[str, Any](images=count)
    cores = os.cpu_count() or 1
    if count <= COMPARED:
        shutil.rmtree(cache, ignore_errors=True)
        found["decoding_one_core"] = child("start", root, out, "linear", cores=1)["decoding"]
    shutil.rmtree(cache, ignore_errors=True)
    found |= {"cores": cores, "first": child("start", root, out, "linear")}
    found["second"] = child("start", root, out, "linear")
    if count == COMPARED:
        found["resnet18"] = child("start", root, out, "resnet18")
        found["step"] = {model: child("compare", root, model) for model in ("resnet18", "linear")}
    return found


def main() -> None:
    """Measure what is not in the file yet."""
    counts, file = [int(count) for count in sys.argv[1].split(",")], Path(sys.argv[2])
    done = (
        [json.loads(line)["images"] for line in file.read_text().splitlines()]
        if (file.exists())
        else []
    )
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as folder:
        root = Path(folder) / "images"
        root.mkdir()
        os.environ["DPMAC_CACHE_DIR"] = str(Path(folder) / "cache")
        for count in sorted(set(counts) - set(done)):
            line = measured(root, Path(folder) / "run", count)
            with file.open("a") as out:
                print(json.dumps(line), file=out)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "compare":
        compare(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
