"""Time how fast a folder of JPEGs is decoded, by one core and by all.

python benchmarks/decoding.py 2000 224

Images are smooth colours with some noise, drawn with a fixed seed; the folder is temporary.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from PIL import Image

from dpmac_cli.data import image_folder
from dpmac_cli.data.schema import Source


def make_images(root: Path, count: int, size: int) -> None:
    """Write JPEGs of two classes."""
    draw = np.random.default_rng(0)
    for number in range(count):
        rough = Image.fromarray(draw.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        smooth = np.asarray(rough.resize((size, size), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = (smooth + draw.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
        path = root / f"class{number % 2}" / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(path, quality=85)


def main() -> None:
    """Print seconds of one core and of all, and their ratio: medians of five rounds."""
    count, size = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), count, size)
        reader = image_folder.ImageFolder(Source(Path(folder)))
        seconds: dict[int, list[float]] = {1: [], os.cpu_count() or 1: []}
        for _ in range(5):
            for cores, times in seconds.items():
                image_folder.os.cpu_count = lambda cores=cores: cores
                begun = perf_counter()
                reader.load()
                times.append(perf_counter() - begun)
    medians = {cores: statistics.median(times) for cores, times in seconds.items()}
    for cores, median in medians.items():
        print(f"cores {cores}: {median:.2f} s, {count / median:,.0f} images/s")
    print(f"ratio {medians[1] / min(medians.values()):.2f}")


if __name__ == "__main__":
    main()
