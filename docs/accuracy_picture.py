"""Draw docs/accuracy.png: test accuracy by epsilon, from docs/data, recipes.md and reproduction.md.

python docs/accuracy_picture.py
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dpmac_cli.release.plots import new_figure, write_figure

DOCS = Path(__file__).parent
PICTURE = DOCS / "accuracy.png"
#: Studies by dpmac compare, the --json of each; docs/recipes.md has the commands.
STUDIES = {
    "EfficientNet-Lite2, 224 pixels": "backbone-lite2.json",
    "EfficientNet-Lite0, 128 pixels": "backbone-lite0.json",
}
#: Mean accuracy in percent by epsilon, from docs/recipes.md and docs/reproduction.md.
OTHERS = {
    "best recipe without public data": {2.435: 67.94},
    "the paper's network, DP-MacAdam": {1.101: 52.35, 10.39: 58.92},
}
#: Sets of docs/data/texts.jsonl, and features of them.
SETS = {"bbc": "BBC News", "sms": "SMS spam"}
FEATURES = {"minilm": "MiniLM", "hashed words": "hashed words"}
LOOK: dict[str, Any] = {"marker": "o", "markersize": 3.5, "capsize": 3}


def images(panel: Any) -> None:
    """Draw CIFAR-10."""
    for label, file in STUDIES.items():
        rows = json.loads((DOCS / "data" / file).read_text())["rows"]
        points = sorted((row["epsilon"], 100 * row["mean"], 100 * row["std"]) for row in rows)
        panel.errorbar(*zip(*points, strict=True), label=label, **LOOK)
    for label, found in OTHERS.items():
        panel.plot([*found], [*found.values()], label=label, marker="s")
    panel.set(title="CIFAR-10", ylabel="test accuracy, %")


def texts(panel: Any) -> None:
    """Draw sets of texts: those that were trained on whole, with the default settings."""
    lines = (DOCS / "data" / "texts.jsonl").read_text().splitlines()
    found = defaultdict(list)
    for row in map(json.loads, lines):
        if row["epsilon"] and row.get("texts", 0) == whole(row["set"], lines):
            found[row["set"], row["features"], row["epsilon"]].append(row["accuracy"])
    for name, title in SETS.items():
        for features, label in FEATURES.items():
            points = sorted(
                (key[2], mean(scores), stdev(scores) if len(scores) > 1 else 0)
                for key, scores in found.items()
                if key[:2] == (name, features)
            )
            panel.errorbar(*zip(*points, strict=True), label=f"{title}, {label}", **LOOK)
    panel.set(title="Texts")


def source() -> str:
    """Return the SHA-256 of what is drawn, which the picture has in its metadata."""
    names = ("texts.jsonl", *STUDIES.values())
    parts = [(DOCS / "data" / name).read_bytes() for name in names]
    return hashlib.sha256(b"".join([repr(OTHERS).encode(), *parts])).hexdigest()


def whole(name: str, lines: Sequence[str]) -> int:
    """Return the number of training texts of a set."""
    return max(row.get("texts", 0) for row in map(json.loads, lines) if row["set"] == name)


def main() -> None:
    """Draw it."""
    figure, panels = new_figure(2)
    for panel, draw in zip(panels, (images, texts), strict=True):
        draw(panel)
        panel.set(xscale="log", xlabel="epsilon at delta 1e-5")
        panel.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        panel.minorticks_off()
        panel.title.set_fontsize("medium")
        panel.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
            ncols=2,
            fontsize="small",
            frameon=False,
        )
    write_figure(figure, PICTURE)
    told = PngInfo()
    told.add_text("Source", source())
    with Image.open(PICTURE) as drawn:
        drawn.load()
        drawn.save(PICTURE, pnginfo=told)


if __name__ == "__main__":
    main()
