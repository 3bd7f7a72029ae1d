"""Sentences of report.json and of the model card.

Names in braces are replaced by :mod:`~dpmac_cli.release.guarantee` and
:mod:`~dpmac_cli.release.report`.
"""

from collections.abc import Mapping

from dpmac_cli.models.independence import Independence

# Seeds.
SEED_KEPT_NOWHERE = (
    "All seeds came from the operating system, one for each purpose, and were not saved. The keys "
    "derived from them are only in checkpoint/, which is private."
)
SEED_GIVEN = (
    "Trained with --seed, to be reproducible. There is no guarantee against anyone who knows or "
    "guesses the seed, because they can compute the same noise and subtract it. The guarantee "
    "holds only against those who do not know the seed."
)

# Random numbers.
DRAWN = (
    "Noise comes from the key stream of AES-256 and is added to the clipped sum in floating point. "
    "Batches are drawn by SFC64, which is not cryptographic."
)
DRAWN_SECURELY = (
    "With --secure: noise and batches come from the key stream of AES-256. Noise is a float64 "
    "normal plus a uniform number that hides its last bits. Clipped sum and noise were each "
    "rounded to multiples of 2^-40 of the sensitivity before they were added."
)
DRAWN_BOTH_WAYS = "The last part ran with --secure, an earlier part without."

# Regions of clipping, besides a ball.
ELLIPSOID = "an ellipsoid that was computed from earlier noisy sums"

# Data.
HELD_OUT = (
    "The test records were split off from the private ones. They are also private, and nothing "
    "that is measured on them is covered."
)
COVERED = (
    "Test scores were released with Gaussian noise, which protects the test records like training "
    "protects the others. Each unit of privacy is used for training or for testing, never both, so "
    "epsilon is the larger of the two costs (parallel composition)."
)
PUBLIC = "The numbers of training {} and test {} are public."
TAKEN = (
    "Its {} were not declared but taken from the records, and are treated as public. One record "
    "can change them, which epsilon does not cover."
)
DECLARED = "Its columns were declared in a schema, which the report contains in full."

# The network.
AUDIT_RUN = (
    "An audit run: it also trained on artificial records for an attack. The model is unfit for "
    "release."
)
SCATTERED = (
    "The network takes fixed features of an image ({about}), which depend on that image alone and "
    "contain nothing that was learnt."
)
OF_BACKBONE = (
    "The network takes features of an image from a public network ({about}), which depend on that "
    "image alone. Neither its weights nor the data that they were trained on are covered. If any "
    "of the records above were in that data, epsilon does not include it."
)
PRETRAINED = (
    "Training started from the weights in {file}, which are treated as public. Neither they nor "
    "the data that they were trained on are covered. If any of the records above were in that "
    "data, epsilon does not include it."
)
TRAINED = "The trained part is {part}. Everything else is unchanged from the published weights."
TRAINED_ALL = "All of its weights were trained further."
NO_SECRETS = "The run has no guarantee, so there is nothing to keep secret."

# A search that the run is the result of.
SEARCHED = (
    "This model is the best of a random number K of trials. K was drawn in secret before the "
    "start, from P(K = k) proportional to w^k / k for k from 1 to {most}, with mean {mean:g}. Each "
    "trial drew its settings at random and independently, and the best covered score won. The "
    "other trials, their scores and K were not shown and not kept. Epsilon covers all of this: it "
    "is not that of one trial."
)
TUNED = (
    "Covered: epsilon includes the search for these settings, of which this model is the result. "
    "Other runs on the same records cost more."
)
TUNED_ON = (
    "Settings were chosen on data that are declared public: {}. That costs nothing, if none of the "
    "records above are among them. If settings were also chosen by other runs on the same records, "
    "the total privacy cost is higher."
)

# Audits.
AUDITED = (
    "This run has {} canaries, half of which count as records in the sampling rate: dpmac eval RUN "
    "--audit compares what they reveal with the guarantee."
)
NOT_AUDITED = (
    "This run was not audited. dpmac train --canaries N audits another run with the same settings; "
    "how dpmac itself is tested and attacked is described in docs/privacy.md."
)

#: Answers after NIST SP 800-226 and "How to DP-fy ML" that are the same for every run.
STATEMENT: Mapping[str, str] = {
    "trust_model": (
        "Central: the records are collected on a machine that has them without protection. Its "
        "administrators, the libraries, and the person who starts the run are trusted."
    ),
    "adversary": (
        "Sees the model, its report and its settings, knows the program and may know every other "
        "record. Does not see the random numbers, the folder checkpoint/, or the machine during "
        "training."
    ),
    "mechanism": (
        "In each step the gradients of a random batch are clipped to {}, one unit of privacy at a "
        "time, and the Gaussian mechanism releases their sum."
    ),
    "post_processing": (
        "The optimizer's state and the weights are computed from the noisy sums only."
    ),
    "tuning": (
        "Unknown to this run: epsilon covers this run only. If its settings were chosen by other "
        "runs on the same records, the total privacy cost is higher."
    ),
    "bias": (
        "report.json has the scores of each class. Groups of people within a class were not "
        "compared; clipping and noise cost small groups the most accuracy."
    ),
    "release": "One release of a model and its report. Nobody can query the records.",
    "other_runs": "Other releases about the same records add to the privacy cost.",
    "security": "Report, card and model may be published, but not checkpoint/.",
    "side_channels": "Times, memory and power of the training machine are not protected.",
}
#: Questions that only the publisher can answer.
OPEN_QUESTIONS = (
    *("data curator", "intended use", "contact", "region", "access and collection"),
    "justification",
)

#: How samples are known to be independent of each other.
INDEPENDENCE: Mapping[Independence, str] = {
    "built in": "The network is built in, and its layers are independent across samples.",
    "traced": (
        "Every operation of the network was traced, in forward and backward passes, and is "
        "independent across samples, for batches of any size."
    ),
    "isolated": "The network was run on each sample separately, so it could not mix samples.",
}
