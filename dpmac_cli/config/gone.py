"""Names that dpmac does not have, or no longer, and what to type instead."""

from collections.abc import Container, Mapping

#: Settings by their names in torch, Opacus and TensorFlow Privacy, and by other common names.
RENAMED: Mapping[str, str] = {
    "gpu": "device",
    "data": "dataset",
    "network": "model",
    "architecture": "model",
    "num-epochs": "epochs",
    "expected-batch-size": "batch-size",
    "max-physical-batch-size": "physical-batch",
    "noise-multiplier": "sigma",
    "noise": "sigma",
    "target-epsilon": "epsilon",
    "eps": "epsilon",
    "target-delta": "delta",
    "secure-mode": "secure",
    "learning-rate": "lr",
    "max-grad-norm": "clip-norm",
    "l2-norm-clip": "clip-norm",
    "clipping-norm": "clip-norm",
    "random-seed": "seed",
    "output": "out",
    "optimizer": "optimizers",
    "optimizers": "optimizer",
    "seed": "seeds",
    "seeds": "seed",
}
#: What to type instead of a flag, a setting or a value, such as "sigma 0".
INSTEAD: Mapping[str, str] = {
    "search": "Write the values at the settings: --lr 1e-4:0.1 --clip-norm 0.1,1,10.",
    "trials": "It belongs to a search: use dpmac tune.",
    "tune": "dpmac tune --dry-run shows what a search costs.",
    "most-trials": "The largest number of trials is 4 times their mean. Leave it out.",
    "stop-early": "Every search ends with its last trial. Leave it out.",
    "on": "Compare settings on the public data with dpmac compare, and train with the best.",
    "score-on": "Covered scores decide. Leave it out.",
    "minutes": "Use fewer --epochs: the display shows how long one takes.",
    "solve": "What is left out of --sigma, --epochs and --epsilon is solved for. Leave it out.",
    "guesses": "It is a tenth of the canaries, at least 20. Leave it out.",
    "lora-alpha": "Updates are scaled by 16 / rank. Leave it out.",
    "tuned-on": "Say it in the card: dpmac card RUN --justification TEXT.",
    "encoding": "Declare it in the schema of the table: encoding: cp1252.",
    "format": "For a web page, type: dpmac report RUN --html FILE.",
    "tensorboard": "metrics.jsonl has the scores, which a SummaryWriter of torch can write.",
    "slurm": "Submit dpmac train as an array of jobs: docs/clusters.md has the lines.",
    "executor slurm": "Submit dpmac train as an array of jobs: docs/clusters.md has the lines.",
    "sigma 0": "To train without privacy use --no-dp.",
    "device mps": "It has no float64, which clipping needs if float32 would round gradients too "
    "much.",
}


def instead(name: str, known: Container[str] = ()) -> str:
    """Return what to type instead of a name or value, after a space; "" if that is not known.

    ``known`` are the names of settings that there are.
    """
    flag = name.replace("_", "-")
    ours = RENAMED.get(flag, "")
    if ours.replace("-", "_") in known:
        return f" In dpmac it is called {ours}."
    return f" {INSTEAD[flag]}" if flag in INSTEAD else ""
