"""Judge a private trainer step by step: against an oracle in float64, and without one record.

Noise is off and every record is in every batch, so a step is a function of the records alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli import ArrayData, make_private
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import DpmacError
from dpmac_cli.models.validation import check_model
from dpmac_cli.runs import prepare
from dpmac_cli.training.chunks import ChunkedSum
from tests.helpers import Batches, equal_keys

RECORDS, COLUMNS, CLASSES = 6, 6, 3
LR, CLIP_NORM = 1.0, 1.0
STEPS = 2
#: Largest relative error of a step that counts as right: float32 against float64.
CLOSE = 2e-3
#: What rounding of float32 weights may add to the bound lr C / B on what a record moves.
ROUNDING = 1e-4

Weights = dict[str, Tensor]
#: Of one output and its target, or of a batch; as a user writes it.
Loss = Callable[[Tensor, Tensor], Tensor]


class Run(Protocol):
    """A network in training. ``net`` is the one that the user built, and publishes."""

    net: Any

    def step(self, rows: Sequence[int]) -> None:
        """Take a step on some records, in a batch whose expected size is that of all of them."""
        ...

    def follow(self, weights: Weights) -> None:
        """Go on from the weights that another run has released."""
        ...

    def set_clip_norm(self, norm: float) -> None:
        """Change the clipping norm the way a user would try."""
        ...

    def add(self, name: str, layer: nn.Module) -> None:
        """Add a layer to the network, and tell the optimizer where there is one."""
        ...


def itself(net: nn.Module) -> nn.Module:
    """Return the network, without a wrapper."""
    return net


def unchanged(_: Run) -> None:
    """Do nothing between steps."""


@dataclass(frozen=True, eq=False)
class Situation:
    """A network, a loop, and what a user does between its two steps.

    Attributes:
        name: as in the table of the documentation.
        build: makes the network, which takes (records, COLUMNS, 1, 1), with fresh weights.
        change: what is done after the first step.
        loss: the loss, and what it means for one record alone, if that is not the same.
        weights: class weights of the loss, which dpmac multiplies after clipping; others clip the
            gradient of the weighted loss, ``alone``.
        around: context of each step, by its number from 1.
        meant: whether that context changes what the network computes for one record, too.
        wrap: what is handed to the trainer instead of the network itself.
        isolate: run each record alone, where a trainer can.
        refused: what dpmac's refusal says; "" if it must be right.
        long: takes more than a moment.
    """

    name: str
    build: Callable[[], nn.Module]
    change: Callable[[Run], None] = unchanged
    refused: str = ""
    loss: Loss | None = None
    alone: Loss = cross_entropy
    weights: Sequence[float] = ()
    around: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext()
    meant: bool = False
    wrap: Callable[[nn.Module], nn.Module] = itself
    isolate: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    long: bool = False

    def network(self) -> nn.Module:
        """Return the network with weights that are always the same."""
        torch.manual_seed(0)
        net = self.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in net.parameters():
                p.normal_(0, 0.7, generator=generator)
        return net


#: Starts the training of a situation's network.
Start = Callable[[Situation], Run]


def records() -> tuple[Tensor, Tensor]:
    """Return records in [-1, 1], shape (RECORDS, COLUMNS, 1, 1), and their labels.

    The first is small, and the last large: some gradients are clipped, and some are not.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(RECORDS, COLUMNS, 1, 1, generator=generator) * 2 - 1
    sizes = torch.linspace(0.05, 1, RECORDS).view(-1, 1, 1, 1)
    x = x / x.abs().amax((1, 2, 3), keepdim=True) * sizes
    return x, torch.arange(RECORDS) % CLASSES


class Oracle:
    """DP-SGD on one record after the other, each on a network of its own, in float64."""

    def __init__(self, situation: Situation) -> None:
        self.situation, self.net = situation, situation.network()
        self.clip_norm = CLIP_NORM

    def set_clip_norm(self, norm: float) -> None:
        self.clip_norm = norm

    def add(self, name: str, layer: nn.Module) -> None:
        self.net.add_module(name, layer)

    def step(self, rows: Sequence[int]) -> None:
        """An oracle answers :meth:`moves` alone."""
        raise NotImplementedError

    follow: Any = step

    def gradient(self, weights: Weights, row: int, *, changed: bool) -> Weights:
        """Return the gradient of a record at some weights, alone, unclipped."""
        one = Oracle(self.situation)
        if changed:
            self.situation.change(one)
        self.clip_norm = one.clip_norm
        net = one.net.train().double()
        named = dict(net.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                named[name].copy_(value)
        x, y = (part[row : row + 1] for part in records())
        meant = self.situation.around(1 + changed) if self.situation.meant else nullcontext()
        with meant:
            alone = cross_entropy if self.situation.weights else self.situation.alone
            loss: Any = alone(net(x.double()), y).sum()
            loss.backward()
        trained = {name: p for name, p in named.items() if p.requires_grad}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}

    def moves(self, weights: Weights, rows: Sequence[int], *, changed: bool) -> Weights:
        """Return what a step should add to the weights of the network.

        A record whose gradient is not finite adds nothing.
        """
        total = {
            name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()
        }
        for row in rows:
            g = self.gradient(weights, row, changed=changed)
            norm = norm_of(g)
            if not bool(norm.isfinite()):
                continue
            factor = float((self.clip_norm / norm.clamp(min=1e-30)).clamp(max=1.0))
            if weights_of_classes := self.situation.weights:
                label = int(records()[1][row])
                factor *= weights_of_classes[label] / max(weights_of_classes)
            for name, part in g.items():
                total[name] -= part * factor * LR / RECORDS
        return total


def norm_of(parts: Weights) -> Tensor:
    """Return the norm of all parts together, in float64, shape ()."""
    norm: Tensor = torch.cat([part.double().flatten() for part in parts.values()]).norm()
    return norm


def _less(a: Weights, b: Weights) -> Weights:
    return {name: a[name].double() - b[name].double() for name in a.keys() | b.keys()}


def weights_of(net: nn.Module) -> Weights:
    """Return a copy of the weights that a user would publish."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@dataclass(frozen=True)
class Verdict:
    """Outcome of a situation.

    Attributes:
        message: class and text of a refusal.
        error: relative error of the worst step.
        moved: most that leaving out a record moved a step, in units of the bound lr C / B.
    """

    outcome: Literal["right", "refused", "wrong", "open"]
    message: str = ""
    error: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Walk:
    """The steps of one run: weights before and after each, and why it ended early."""

    before: list[Weights] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)
    refusal: str | None = None


def judge(
    start: Start,
    situation: Situation,
    refusals: tuple[type[Exception], ...],
    *,
    messages: bool = True,
) -> Verdict:
    """Return how a trainer deals with a situation. Exceptions other than refusals are raised.

    Each record is left out of all steps in turn, and each run goes on from the weights that the
    run with all of them released: what its last step adds may then differ by lr C / B at most, and
    a refusal may not depend on any record, nor its text if ``messages``.
    """
    everyone = list(range(RECORDS))
    whole = _walk(start, situation, everyone, (), refusals)
    oracle = Oracle(situation)
    errors, moved, clip_norm = [0.0], [0.0], CLIP_NORM
    for number, (before, after) in enumerate(zip(whole.before, whole.after, strict=True)):
        expected = oracle.moves(before, everyone, changed=number > 0)
        error = norm_of(_less(_less(after, before), expected)) / norm_of(expected)
        errors.append(float(error.nan_to_num(torch.inf)))
        clip_norm = oracle.clip_norm
    for row in everyone:
        rest = [other for other in everyone if other != row]
        part = _walk(start, situation, rest, whole.after, refusals)
        told, otherwise = ((w.refusal if messages else w.refusal is None) for w in (whole, part))
        if told != otherwise or len(part.after) != len(whole.after):
            return Verdict("open", f"{whole.refusal} / {part.refusal}", max(errors), torch.inf)
        if whole.after:
            apart = norm_of(
                _less(
                    _less(whole.after[-1], whole.before[-1]), _less(part.after[-1], part.before[-1])
                )
            )
            moved.append(float(apart.nan_to_num(torch.inf)) * RECORDS / LR / clip_norm)
    found = (whole.refusal or "", max(errors), max(moved))
    if max(moved) > 1 + ROUNDING:
        return Verdict("open", *found)
    if max(errors) > CLOSE:
        return Verdict("wrong", *found)
    return Verdict("right" if whole.refusal is None else "refused", *found)


def _change(situation: Situation, run: Run) -> str:
    """Do what is done in the middle; return the message if that fails, as a user would see."""
    try:
        situation.change(run)
    except Exception as failure:  # noqa: BLE001  (of any kind: it is in the user's own line)
        return f"{type(failure).__name__}: {failure}"
    return ""


def _walk(
    start: Start,
    situation: Situation,
    rows: Sequence[int],
    released: Sequence[Weights],
    refusals: tuple[type[Exception], ...],
) -> Walk:
    """Take the steps of a situation; after each but the last, go on from weights released."""
    walk = Walk()
    try:
        run = start(situation)
        for step in range(1, STEPS + 1):
            if step == STEPS and (said := _change(situation, run)):
                return Walk(walk.before, walk.after, said)
            walk.before.append(weights_of(run.net))
            with situation.around(step):
                run.step(rows)
            walk.after.append(weights_of(run.net))
            if step < min(STEPS, len(released)):
                run.follow(released[step - 1])
    except refusals as failure:
        del walk.before[len(walk.after) :]
        return Walk(walk.before, walk.after, f"{type(failure).__name__}: {failure}")
    return walk


REFUSALS = (DpmacError,)
#: Situations that were validated, which takes most of the time of a run and sees no record.
_checked: set[Situation] = set()
#: How the network of a situation runs so that no row rounds another, which sees none either.
_tried: dict[Any, Any] = {}


class Ours:
    """A run of dpmac."""

    def __init__(self, situation: Situation) -> None:
        x, y = records()
        self.net: Any = situation.network()
        options: dict[str, Any] = {"isolate": True} if situation.isolate else {}
        # With records to test on, none is held out.
        data = ArrayData(x, y, x[:3], y[:3], low=-1, high=1, classes=["a", "b", "c"])

        def checked_once(*parts: Any, **options: Any) -> None:
            if situation not in _checked:
                check_model(*parts, **options)
                _checked.add(situation)

        tried = ChunkedSum._tried

        def tried_once(sums: ChunkedSum, *of: Any) -> Any:
            key = situation, sums.per_sample.by_rows
            if key not in _tried:
                _tried[key] = tried(sums, *of)
            return _tried[key]

        with (
            patch.object(prepare, "check_model", checked_once),
            patch.object(ChunkedSum, "_tried", tried_once),
            equal_keys(),
        ):
            self.private = make_private(
                situation.wrap(self.net),
                data,
                loss=situation.loss,
                optimizer="dp-sgd",
                lr=LR,
                clip_norm=CLIP_NORM,
                batch_size=RECORDS,
                steps=STEPS,
                sigma=1,
                delta=1e-5,
                device="cpu",
                **options,
                **situation.settings,
            )
        self.private._step.mechanism = GaussianMechanism(0.0, RECORDS)

    def step(self, rows: Sequence[int]) -> None:
        trainer = self.private._step
        trainer.sampler = Batches(rows)
        self.private.step()

    def follow(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(weights[name])

    def set_clip_norm(self, norm: float) -> None:
        self.private.clip_norm = norm  # type: ignore[attr-defined]  # refused by Python

    def add(self, name: str, layer: nn.Module) -> None:
        self.net.add_module(name, layer)
