"""Say which results of benchmarks/gpu.sh keep the bounds that dpmac sets itself on a GPU.

    python benchmarks/gpu_checks.py OUT    # prints a table, and writes OUT/checks.json

Ratios are to plain torch, eager, with Adam, in the same process. A line without a result has not
been measured. The exit code is 1 if a bound is broken or a line is missing.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common import parser_of, write_json
from contenders import GRAPH, PLAIN

#: Most of a dp-adam step in plain steps, by network and batch; dp-macadam may take MORE.
BOUNDS = {
    ("mlp", 256): 1.0,
    ("cnn", 512): 1.3,
    ("resnet18", 32): 1.2,
    ("resnet18", 128): 1.2,
    ("wrn-16-4", 64): 1.3,
    ("wrn-16-4", 256): 3.0,
    ("vit-tiny", 64): 1.5,
}
MORE = 0.5
#: Most of a step with --secure in steps without.
SECURE = 1.1
#: Line of a log that is a JSON object; others are messages.
OBJECT = re.compile(r"\{.*\}$")
Times = dict[str, float]


@dataclass(frozen=True)
class Check:
    """One line: what is compared, the most it may be, and what it is (None: not measured)."""

    name: str
    most: float | None
    found: float | None

    @property
    def met(self) -> bool:
        """Return whether it was measured and keeps its bound, if it has one."""
        return self.found is not None and (self.most is None or self.found <= self.most)


def times(out: Path) -> dict[tuple[str, int], Times]:
    """Return milliseconds per step by network and batch, and by contender."""
    found: dict[tuple[str, int], Times] = {}
    for file in (out / "step_time.json", out / "deep.json"):
        for row in json.loads(file.read_text())["rows"] if file.exists() else ():
            found.setdefault((row["model"], row["batch"]), {})[row["optimizer"]] = row["step_ms"]
    return found


def checks(found: dict[tuple[str, int], Times]) -> Iterator[Check]:
    """Yield the lines, in the order of the bounds."""
    for (model, batch), most in BOUNDS.items():
        took = found.get((model, batch), {})
        peer = min((ms for name, ms in took.items() if name.startswith("opacus")), default=None)
        for name, bound in (("dp-adam", most), ("dp-macadam", most + MORE)):
            row = f"{model} {batch} {name}"
            yield Check(f"{row} / plain", bound, over(took.get(name), took.get(PLAIN)))
            yield Check(f"{row} / Opacus's fastest", 1.0, over(took.get(name), peer))
            yield Check(f"{row} / plain in a graph", None, over(took.get(name), took.get(GRAPH)))
    for model, batch in (("mlp", 256), ("cnn", 512)):
        took = found.get((model, batch), {})
        for name in ("dp-adam", "dp-macadam"):
            ratio = over(took.get(f"{name} --secure"), took.get(name))
            yield Check(f"{model} {batch} {name} --secure / without", SECURE, ratio)


def language_models(out: Path) -> Iterator[Check]:
    """Yield the steps of a language model, all of it and with LoRA, in plain steps."""
    log = out / "lora.log"
    lines = log.read_text().splitlines() if log.exists() else ()
    found = {of["trained"]: of for of in map(json.loads, filter(OBJECT.match, lines))}
    for part in ("all", "LoRA"):
        times = found.get(part, {}).get("times plain")
        yield Check(f"language model, {part}, dp-adam / plain", None, times)


def over(one: float | None, other: float | None) -> float | None:
    """Return the ratio of two times, None if one is missing."""
    return None if one is None or other is None else round(one / other, 3)


def main() -> None:
    """Print and write the lines."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    lines = [*checks(times(out)), *language_models(out)]
    write_json(
        out / "checks.json", {"checks": [{**asdict(line), "met": line.met} for line in lines]}
    )
    print("| times | at most | found | |\n|---|---|---|---|")
    for line in lines:
        said = "not measured" if line.found is None else "" if line.met else "**broken**"
        print(f"| {line.name} | {line.most or ''} | {line.found or ''} | {said} |")
    sys.exit(not all(line.met for line in lines))


if __name__ == "__main__":
    main()
