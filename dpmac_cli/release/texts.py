"""Statements of reports and cards about models on texts."""

from dpmac_cli.data.registry import Dataset
from dpmac_cli.data.writing import WRITTEN
from dpmac_cli.models.encoders import TextEncoder

#: What is declared about inputs with texts.
LIMITS = "columns, their ranges, and largest numbers of tokens"
REVEALED = (
    "Predictions and cached features reveal texts: the features of a text are a function of that "
    "text alone, without noise, from which much of it can be reconstructed. Epsilon covers the "
    "model, not what it answers about a text, nor the folder of features (dpmac cache)."
)


def source(encoder: TextEncoder) -> str:
    """Return the public weights and their licence."""
    known = encoder.registered
    if known is None:
        return f"weights of the text encoder {encoder.kind}; source and licence to be filled in"
    return f"weights of {known.about}; licence {known.licence}"


def about(encoder: TextEncoder) -> str:
    """Return what a network takes instead of texts, and what epsilon does not cover about it."""
    known = encoder.registered
    name = f"the folder {encoder.kind}" if known is None else known.about
    trained = (
        "The language and the texts that it was trained on are to be filled in."
        if known is None
        else f"It was trained on {known.language} texts: {known.corpora}."
    )
    limits = " and ".join(str(count) for _, count in encoder.texts)
    return (
        f"The network takes vectors of texts from a public encoder ({name}), and the shares of "
        "capitals, digits, punctuation and symbols of each text. They depend on each text alone. "
        f"Texts are truncated to {limits} tokens of its public vocabulary. {trained} "
        "Neither its weights nor those texts are covered. If any of the records above, or "
        "quotations from them, were among those texts, epsilon does not include it."
    )


def domain(facts: Dataset) -> str:
    """Return the domain of labelled records with texts."""
    limits = ", ".join(str(count) for _, count in facts.texts)
    others = facts.shape[0] - sum(count + WRITTEN for _, count in facts.texts)
    return (
        f"Labelled records with {len(facts.texts)} text{'s' * (len(facts.texts) > 1)} of at most "
        f"{limits} tokens and {others} other inputs, {facts.task.described}."
    )
