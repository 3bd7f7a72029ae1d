"""Time the vectors of texts, beside a plain loop of transformers over texts sorted by length.

    OMP_NUM_THREADS=1 python benchmarks/encode.py TEXTS.csv COLUMN --limit 128

The plain loop is what a program would write: batches of 32 texts of similar lengths, each padded to
the longest of its batch. Both encode the first texts of the file with the default encoder, in turn,
in this process. Seconds are of CPU time, the best of the rounds. The largest difference of vectors
is printed, too.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from common import parser_of
from pyarrow import csv
from torch import Tensor

from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.features.texts import TextFeatures, encoder_weights, pooled, token_mask

BATCH = 32


def plain(features: TextFeatures, ids: Tensor) -> Tensor:
    """Return the vectors of texts by a loop over batches of similar lengths."""
    lengths = token_mask(ids).sum(1)
    found = torch.empty(len(ids), features.encoder.config.width)
    with torch.no_grad():
        for places in torch.split(lengths.argsort(), BATCH):
            texts = ids[places, : int(lengths[places].max())]
            mask = token_mask(texts)
            tokens = (texts - 1).clamp(0)
            hidden = features.network(input_ids=tokens, attention_mask=mask.long())
            found[places] = pooled(hidden.last_hidden_state, mask, first=features.first)
    return found


def seconds(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the CPU time of a call, and its result."""
    begun = time.process_time()
    found = run()
    return time.process_time() - begun, found


def main() -> None:
    """Measure both ways."""
    parser = parser_of(__doc__)
    parser.add_argument("file")
    parser.add_argument("column")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    encoder = replace(read_encoder("minilm"), texts=((0, options.limit),))
    features = TextFeatures(encoder)
    for note in encoder_weights(encoder).adopted_by(features, None):
        print(note)
    texts = csv.read_csv(options.file)[options.column].to_pylist()[: options.texts]
    ids = torch.tensor(encoder.reader(options.limit).tokens(texts, options.limit))
    tokens = token_mask(ids).sum(1).float()
    print(f"{len(texts):,} texts of {tokens.mean():.1f} tokens on average")
    rounds = [
        (seconds(lambda: plain(features, ids)), seconds(lambda: features.alone(ids)))
        for _ in range(options.rounds)
    ]
    base, own = (min(spent for spent, _ in way) for way in zip(*rounds, strict=True))
    (_, expected), (_, found) = rounds[0]
    print(f"plain {base:.2f} s, dpmac {own:.2f} s: {own / base:.2f} times")
    print(f"largest difference of vectors: {(found - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
