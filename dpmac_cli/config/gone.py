"""Flags, settings and commands that are gone, and what to type instead."""

from collections.abc import Mapping

#: What to type instead of a flag or a setting, by its name as a flag.
SETTINGS: Mapping[str, str] = {
    "search": "Write the values at the settings: --lr 1e-4:0.1 --clip-norm 0.1,1,10.",
    "trials": "It belongs to a search: use dpmac tune, or dpmac account --tune.",
    "most-trials": "The largest number of trials is 4 times their mean. Leave it out.",
    "stop-early": "Every search ends with its last trial. Leave it out.",
    "on": "Compare settings on the public data with dpmac compare, and train with the best.",
    "minutes": "Use fewer --epochs: the display shows how long one takes.",
    "solve": "What is left out of --sigma, --epochs and --epsilon is solved for. Leave it out.",
    "slurm": "Submit dpmac train as an array of jobs: docs/clusters.md has the lines.",
    "score-on": "Covered scores decide. Leave it out.",
}


def instead(name: str) -> str:
    """Return what to type instead of a flag or setting that is gone, after a space; or ""."""
    sentence = SETTINGS.get(name.replace("_", "-"), "")
    return f" {sentence}" if sentence else ""
