"""What a run must keep to itself, recorded as it trains, and a search of what it publishes."""

import itertools
import json
import math
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpmac_cli.dp.clipping import clipped_sum
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.randomness.keystream import STREAMS, Keys, KeyStream, make_keys
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.runs import folder
from dpmac_cli.runs.trainer import Trainer

#: Bytes of two neighbouring numbers: so many never agree by chance.
PAIRS = (8, 16)
NUMBER = re.compile(rb"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?!\w|\.[0-9])")
#: Things that one would recognise: no file holds them by accident.
PERSON, HOST, PROCESS = "a.person.of.note", "a-machine-of-note", 918_273_647
#: Makes the keys of runs without a seed.
UNSEEDED = 604_661_760_377


@dataclass
class Secrets:
    """What to look for, and what each is.

    Attributes:
        texts: to be found anywhere in a file.
        windows: raw bytes, as many as :data:`PAIRS` says, to be found anywhere in a file.
        numbers: to be found as a number that stands alone in text.
        public: numbers that may stand there, such as the expected batch size.
        training: whether what is computed is of records; a network is tried on others before.
    """

    texts: dict[bytes, str] = field(default_factory=dict)
    windows: dict[bytes, str] = field(default_factory=dict)
    numbers: dict[float, str] = field(default_factory=dict)
    public: set[float] = field(default_factory=set)
    training: bool = False

    def text(self, text: str, what: str) -> None:
        """Look for a text, as it is and as JSON would have it."""
        for form in (text.encode(), json.dumps(text)[1:-1].encode()):
            self.texts.setdefault(form, what)

    def word(self, word: int, what: str) -> None:
        """Look for a large whole number in every form."""
        size = max(4, -(-word.bit_length() // 8))
        for text in (str(word), f"{word:,}", f"{word:x}", f"{word:X}"):
            self.text(text, what)
        for raw in (word.to_bytes(size, "little"), word.to_bytes(size, "big")):
            self.texts.setdefault(raw, what)

    def vector(self, values: Tensor | np.ndarray[Any, Any], what: str) -> None:
        """Look for neighbouring values of a vector, as raw bytes of any float, in either order.

        Also for each value as a number. Neighbours that are alike, as zeros are, tell nothing.
        """
        array = np.asarray(values).ravel()
        kinds = "fd" if array.dtype.kind == "f" else "iq"
        distinct = (array[1:] != array[:-1]) & (array[1:] != 0) & (array[:-1] != 0)
        for kind in kinds:
            for order in "<>":
                raw = array.astype(f"{order}{kind}").view(np.uint8).reshape(len(array), -1)
                for pair in np.hstack([raw[:-1], raw[1:]])[distinct]:
                    self.windows[pair.tobytes()] = what
        if array.dtype.kind == "f":
            numbers = (float(value) for value in array)
            self.numbers.update((number, what) for number in numbers if not _round(number))

    def scalar(self, value: float, what: str) -> None:
        """Look for an aggregate, as it is and rounded: not to a round number, met by chance."""
        if math.isfinite(value) and value not in (0, 1, *self.public):
            self.numbers[value] = what
            rounded = float(f"{value:.6g}")
            if not _round(rounded):
                self.numbers[rounded] = what

    def found(self, where: Path) -> list[str]:
        """What of it the files of a run folder hold, that are not private."""
        return [
            f"{path.relative_to(where)}: {what}"
            for path in published(where)
            for what in sorted(self._in(path))
        ]

    def _in(self, path: Path) -> set[str]:
        content = path.read_bytes()
        texts = {what for text, what in self.texts.items() if text in content}
        there = {content[i : i + size] for size in PAIRS for i in range(len(content) - size + 1)}
        windows = {self.windows[window] for window in there & self.windows.keys()}
        written = {float(number) for number in NUMBER.findall(_text(path, content))}
        rounded = {float(f"{number:.6g}") for number in written}
        numbers = {self.numbers[n] for n in (written | rounded) & self.numbers.keys()}
        return texts | windows | numbers


def _round(value: float) -> bool:
    """Whether a number is one that files hold by chance."""
    return value == float(f"{value:.2g}")


def _text(path: Path, content: bytes) -> bytes:
    """What of a file is text: of weights, the header. Three digits turn up in binary by chance."""
    if path.suffix != ".safetensors":
        return content
    return content[: 8 + int.from_bytes(content[:8], "little")]


def published(where: Path) -> Iterator[Path]:
    """Every file of a run folder, checkpoints among them, in branches too."""
    return filter(Path.is_file, sorted(where.rglob("*")))


def record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int | None, instead: int = 0
) -> Secrets:
    """Have everything that training keeps to itself recorded, from now on.

    Args:
        monkeypatch: undoes it.
        tmp_path: the test's folder: no file may name it.
        seed: that a person chose, if any.
        instead: gives the keys of runs without a seed, so that no test ends by chance.
    """
    secrets = Secrets()
    if seed is not None:
        secrets.word(seed, "the seed")
    _record_surroundings(secrets, monkeypatch, tmp_path)
    _record_generators(secrets, monkeypatch, instead)
    _record_values(secrets, monkeypatch)
    return secrets


def _record_surroundings(secrets: Secrets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, PERSON)
    home = tmp_path / "home" / PERSON
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HOSTNAME", HOST)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    monkeypatch.setattr(os, "getpid", lambda: PROCESS)
    secrets.text(PERSON, "the user")
    secrets.text(HOST, "the host")
    if len(real := platform.uname().node) > 5:  # shorter ones turn up by chance
        secrets.text(real, "the host")
    secrets.word(PROCESS, "the process id")
    package = Path(folder.__file__).parent.parent
    for path in (tmp_path, home, package, Path(os.__file__).parent, Path(torch.__file__).parent):
        secrets.text(str(path), "an absolute path")


def _record_generators(secrets: Secrets, monkeypatch: pytest.MonkeyPatch, instead: int) -> None:
    unseeded, made = itertools.count(UNSEEDED + 1000 * instead), list[Keys]()

    def recorded(seed: int | None, base: int = 0, part: int = 0) -> Keys:
        keys = make_keys(next(unseeded) if seed is None else seed, base, part)
        made.append(keys)
        for name in STREAMS:
            key, what = getattr(keys, name), f"the {name} key"
            secrets.word(int.from_bytes(key, "little"), what)
            secrets.vector(np.frombuffer(key, "<u4").astype(np.int64), what)
            secrets.vector(np.frombuffer(key, "<i8"), what)
            secrets.text(key.hex(), what)
        return keys

    for module in ("runs.train", "training.private_program", "training.private_step"):
        monkeypatch.setattr(f"dpmac_cli.{module}.make_keys", recorded)
    clip_and_sum = Trainer._clip_and_sum

    def drawn(trainer: Trainer, batch: Any) -> Tensor:
        """Before a step's noise: who was drawn, and by which seed."""
        for key in (made[-1].sampler, made[-1].layers):
            stretch = KeyStream(key).at(trainer.state.step + 1)
            for word in stretch.generate_state(4, np.uint64).tolist():
                secrets.word(word, "the sampler's seed")
        secrets.public.add(float(trainer.mechanism.expected_batch))
        if float(len(batch)) not in secrets.public:
            secrets.numbers[float(len(batch))] = "the size of a batch"
        secrets.vector(batch, "the records of a batch")
        secrets.training = True
        try:
            return clip_and_sum(trainer, batch)
        finally:
            secrets.training = False

    monkeypatch.setattr(Trainer, "_clip_and_sum", drawn)


def _record_values(secrets: Secrets, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed from the records before noise is added."""
    weights = clipped_sum.clip_weights

    def watched(gradients: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            losses, weights, forms = gradients(*args, **kwargs)
            aggregates(losses.detach(), "losses")
            return losses, weights, forms

        return watch

    def aggregates(values: Tensor, what: str) -> None:
        if not secrets.training:
            return
        secrets.vector(values, f"per-sample {what}")
        for how in (torch.mean, torch.sum, torch.max, torch.min, torch.median, torch.std):
            secrets.scalar(float(how(values)), f"{how.__name__} of {what}")

    def clip_weights(squared: Any, *args: Any) -> Any:
        aggregates(squared.value, "squared norms")
        aggregates(squared.value.clamp(min=0).sqrt(), "norms")
        c, valid = weights(squared, *args)
        aggregates(c, "clipping factors")
        return c, valid

    release: Callable[..., Any] = GaussianMechanism.release

    def released(mechanism: GaussianMechanism, clipped: Tensor, region: Any, noise: Any) -> Any:
        secrets.vector(clipped, "an un-noised sum")
        secrets.vector(clipped / mechanism.expected_batch, "an un-noised mean")
        secrets.scalar(float(clipped.norm()), "the norm of an un-noised sum")
        return release(mechanism, clipped, region, _Overheard(noise, secrets))

    monkeypatch.setattr(PerSample, "__call__", watched(PerSample.__call__))
    monkeypatch.setattr(clipped_sum, "clip_weights", clip_weights)
    monkeypatch.setattr(GaussianMechanism, "release", released)


@dataclass
class _Overheard:
    """A source of noise, and someone who writes it down."""

    noise: SeededNormals
    secrets: Secrets

    def standard_normal(self, like: Tensor) -> Tensor:
        drawn = self.noise.standard_normal(like)
        self.secrets.vector(drawn, "the noise")
        self.secrets.scalar(float(drawn.norm()), "the norm of the noise")
        return drawn
