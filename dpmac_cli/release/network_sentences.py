"""Sentences about the network of a run: its features, its weights, and what is public of them.

They are topics of :mod:`.sentences`.
"""

from collections.abc import Iterator

from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.networks import PARTS, Backbone, FixedFeatures
from dpmac_cli.config.records import Texts
from dpmac_cli.release.described_run import DescribedRun


def features(run: DescribedRun) -> Iterator[str]:
    """Say what the network takes instead of its records, and what it starts from.

    Then which part of it was trained. Nothing for a network that starts from random weights and
    takes the records themselves.
    """
    network, trained = run.plan.features, run.plan.trained.part
    if isinstance(network, TextEncoder):
        yield from _features_of_texts(run, network)
    elif isinstance(network, FixedFeatures):
        yield network.statement
    elif network is not None:
        yield _features_of_backbone(run, network)
    if run.pretrained:
        yield (
            f"Training started from the weights in {run.pretrained}, which are treated as "
            "public. Neither they nor the data that they were trained on are covered. If any of "
            "the records above were in that data, epsilon does not include it."
        )
    if not run.plan.starts_public:
        return
    if trained == "all":
        yield "All of its weights were trained further."
        return
    part = PARTS[trained]
    if run.continues:
        part = part.removeprefix("the head, and ")
    yield f"The trained part is {part}. Everything else is unchanged from the published weights."


def _features_of_backbone(run: DescribedRun, backbone: Backbone) -> str:
    """Return what features of images by a public network depend on."""
    about = _about(run, backbone.kind)
    return (
        f"The network takes features of an image from a public network ({about}), which depend on "
        "that image alone. Neither its weights nor the data that they were trained on are "
        "covered. If any of the records above were in that data, epsilon does not include it."
    )


def _features_of_texts(run: DescribedRun, encoder: TextEncoder) -> Iterator[str]:
    """Yield what vectors of texts depend on, and what the public network was trained on."""
    about, records = _about(run, encoder.kind), run.plan.facts.records
    assert isinstance(records, Texts)  # noqa: S101  (others have no encoder)
    truncated = f"Texts are truncated to {records.limits} tokens of its public vocabulary."
    if run.continues:
        yield f"The network is a public language model ({about}). {truncated}"
    else:
        yield (
            f"The network takes vectors of texts from a public encoder ({about}), and the shares "
            "of capitals, digits, punctuation and symbols of each text. They depend on each text "
            f"alone. {truncated}"
        )
    if run.registered:
        yield f"It was trained on {run.registered.language} texts: {run.registered.corpora}."
    else:
        yield "The language and the texts that it was trained on are to be filled in."
    yield (
        "Neither its weights nor those texts are covered. If any of the records above, or "
        "quotations from them, were among those texts, epsilon does not include it."
    )


def _about(run: DescribedRun, kind: str) -> str:
    """Return a public network in words; of one that is not registered, its folder."""
    return f"the folder {kind}" if run.registered is None else str(run.registered.about)


def public(run: DescribedRun) -> Iterator[str]:
    """List public data and weights with their sources; "none" without any."""
    facts = run.plan.facts
    sources = list[str]()
    if not facts.user_supplied:
        sources.append(f"the dataset {facts.name}: {facts.about}")
    if run.registered:
        sources.append(f"weights of {run.registered.about}; licence {run.registered.licence}")
    elif run.encoder is not None:
        reader = "language model" if run.continues else "text encoder"
        sources.append(
            f"weights of the {reader} {run.encoder.kind}; source and licence to be filled in"
        )
    if run.pretrained:
        sources.append(f"weights in {run.pretrained}; source and licence to be filled in")
    yield from sources or ["none"]
