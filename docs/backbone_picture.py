"""Draw docs/backbone.png: accuracy on CIFAR-10 by epsilon, from docs/data and docs/reproduction.md.

python docs/backbone_picture.py
"""

import json
from pathlib import Path

from dpmac_cli.plots import new_figure, write_figure

DOCS = Path(__file__).parent
#: Studies by dpmac compare, the --json of each; docs/recipes.md has the commands.
STUDIES = {
    "EfficientNet-Lite2, 224 pixels": "backbone-lite2.json",
    "EfficientNet-Lite0, 128 pixels": "backbone-lite0.json",
}
#: Mean accuracy in percent by epsilon, from docs/recipes.md and docs/reproduction.md.
OTHERS = {
    "wavelet scattering, no public data": {2.435: 68.07},
    "the paper's network and DP-MacAdam": {1.101: 52.27, 10.39: 58.96},
}


def main() -> None:
    """Draw it."""
    figure, (panel,) = new_figure(1)
    for label, file in STUDIES.items():
        rows = json.loads((DOCS / "data" / file).read_text())["rows"]
        points = sorted((row["epsilon"], 100 * row["mean"], 100 * row["std"]) for row in rows)
        epsilons, means, spreads = zip(*points, strict=True)
        look = {"marker": "o", "markersize": 3.5, "capsize": 3}
        panel.errorbar(epsilons, means, spreads, label=label, **look)
    for label, found in OTHERS.items():
        panel.plot([*found], [*found.values()], label=label, marker="s")
    panel.set(xscale="log", xlabel="epsilon at delta 1e-5", ylabel="test accuracy, %")
    panel.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.suptitle("CIFAR-10, mean and standard deviation of 3 seeds", fontsize="medium")
    write_figure(figure, DOCS / "backbone.png")


if __name__ == "__main__":
    main()
