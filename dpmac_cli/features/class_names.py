"""Where training on texts begins: at the names of the classes, which are public.

An encoder maps the name of a class, such as "card_arrival", to a vector near those of texts of that
class. With many classes, few records or a small epsilon, noise hides that from training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.config.encoders import TextEncoder, reader_of
from dpmac_cli.errors import InputError
from dpmac_cli.features.texts import TextFeatures

#: Largest number of tokens of a name; what is longer is not read.
NAME_TOKENS = 32
#: Factor of the first weights of a class: its vector without what all classes have in common, and
#: the signal of a class from which on a head begins at 0 instead. Chosen on training texts:
#: docs/recipes.md#how-the-defaults-of-texts-were-found.
NAME_SCALE, SIGNAL = 0.7, 50


def class_vectors(texts: TextFeatures, encoder: TextEncoder, names: Sequence[str]) -> Tensor:
    """Return the encoder's vectors of the names of classes, of norm 1, shape (classes, width).

    Underscores and hyphens of a name are read as spaces.

    Args:
        texts: features with the encoder's weights.
        encoder: what ``texts`` was built from; its tokenizer reads the names.
        names: names of the classes. Of each, the first NAME_TOKENS tokens are read.
    """
    content = texts.get_buffer("vocabulary").numpy().tobytes()
    limit = min(NAME_TOKENS, encoder.config.longest)
    words = [name.replace("_", " ").replace("-", " ") for name in names]
    reader = reader_of(content, encoder.config, limit)
    return texts.alone(torch.tensor(reader.tokens(words, limit)))


@torch.no_grad()
def begin_at_names(
    texts: TextFeatures, head: nn.Linear | None, encoder: TextEncoder, names: Sequence[str]
) -> None:
    """Begin training at the names of the classes: change ``texts`` and ``head`` in place.

    The mean of the names' vectors becomes the direction that ``texts`` removes from each vector;
    see :class:`~dpmac_cli.features.texts.Joined`. The weights of the head become the names'
    vectors without that mean. No record is read, so this has no privacy cost.

    Args:
        texts: features with the encoder's weights.
        head: linear layer that maps features to a logit per class; None to change ``texts`` alone.
        encoder: what ``texts`` was built from.
        names: names of the classes, in the order of the logits.

    Raises:
        InputError: a vector is not finite, which a damaged encoder leads to.
    """
    vectors = class_vectors(texts, encoder, names)
    if not vectors.isfinite().all():
        raise InputError(
            f"{{backbone=}}{encoder.kind}: its vectors of the names of classes are not finite. Use "
            "another encoder."
        )
    mean = vectors.mean(0)
    texts.joined.common.copy_(normalize(mean, dim=0))
    if head is not None:
        texts_of_record = len(encoder.texts)
        of_classes = NAME_SCALE / texts_of_record * (vectors - mean)
        width = of_classes.shape[1] * texts_of_record
        head.weight[:, :width] = of_classes.repeat(1, texts_of_record)
