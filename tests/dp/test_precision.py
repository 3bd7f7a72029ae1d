"""Arithmetic of a step does not depend on the settings of the program around it."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ball, clipped_grad
from dpmac_cli.dp.precision import PLACES, SETTINGS, Arithmetic, full_float32
from dpmac_cli.training.evaluation import Evaluation
from tests.helpers import CLASSES, PLAN, SIDE, make_trainer, tiny_data

_OF_TORCH: Any = torch._C
BACKENDS: Any = torch.backends
read, write = _OF_TORCH._get_fp32_precision_getter, _OF_TORCH._set_fp32_precision_setter


def precisions() -> list[str]:
    return [read(*place) for place in PLACES]


def inner() -> list[Any]:
    """All that can be found out about the settings, also by changing them for a moment."""
    found: list[Any] = [precisions()]
    before = read("generic", "all")
    for precision in ("none", "ieee", "tf32"):
        write("generic", "all", precision)
        found.append(precisions())
    write("generic", "all", before)
    for old in (torch.get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32):
        try:
            found.append(old())
        except RuntimeError:  # it contradicts the newer settings
            found.append(None)
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = precisions()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for place, precision in zip(PLACES, before, strict=True):
        if read(*place) != precision:
            write(*place, precision)


def choices() -> list[Callable[[], None]]:
    """What a program may set."""
    return [
        *(partial(write, *place, v) for place in PLACES for v in ("none", "ieee", "tf32")),
        *(partial(torch.set_float32_matmul_precision, n) for n in ("highest", "high", "medium")),
        *(partial(_OF_TORCH._set_cudnn_allow_tf32, allowed) for allowed in (True, False)),
    ]


@pytest.mark.promise("precision")
def test_precision_is_full_inside_and_the_programs_outside() -> None:
    generator = random.Random(0)
    for _ in range(500):
        generator.choice(choices())()
        before = inner()
        with full_float32():
            assert set(precisions()) == {"ieee"}
        assert inner() == before
        with contextlib.suppress(ZeroDivisionError), full_float32():
            1 / 0  # noqa: B018
        assert inner() == before


def named() -> dict[str, Any]:
    """The settings besides precision by name."""
    return dict(zip(SETTINGS, Arithmetic.now().values, strict=True))


class Noticing(nn.Module):
    """Notes the settings in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        NOTES.info(
            "a forward pass",
            {
                "precision": set(precisions()),
                "autocast": torch.is_autocast_enabled("cpu"),
                "inference": torch.is_inference_mode_enabled(),
                "dtype": torch.get_default_dtype(),
            },
        )
        NOTES.info("other settings", named())
        logits: Tensor = self.layer(x.flatten(1))
        return logits


SEEN: list[Any] = []
OTHERS: list[Any] = []


class Keeping(logging.Handler):
    """Keep what a network logs. A global list that it changes would be refused."""

    def emit(self, record: logging.LogRecord) -> None:
        kept = SEEN if record.msg == "a forward pass" else OTHERS
        kept.append(record.args)


NOTES = logging.getLogger("tests.precision")
NOTES.propagate = False
NOTES.setLevel(logging.INFO)
NOTES.addHandler(Keeping())
OURS = {
    "precision": {"ieee"},
    "autocast": False,
    "inference": False,
    "dtype": torch.float32,
}


def made() -> Noticing:
    torch.manual_seed(0)
    return Noticing()


def trainer_of(net: nn.Module | None = None) -> Any:
    data, plan = tiny_data(torch.float32), PLAN
    net = net or made()
    return make_trainer("dp-macadam", model=net, data=data, plan=plan, dtype=torch.float32)


@pytest.mark.promise("precision")
def test_a_program_that_turns_tf32_on_does_not_turn_it_on_in_steps() -> None:
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    before = inner()
    trainer = trainer_of()
    assert inner() == before  # nothing stays switched off
    SEEN.clear()
    trainer.step()
    assert isinstance(trainer.evaluate(), Evaluation)
    assert inner() == before
    BACKENDS.mkldnn.fp32_precision = "bf16"
    later = inner()
    trainer.step()
    assert inner() == later != before
    assert all(seen == OURS for seen in SEEN)
    assert len(SEEN) >= 3


def other(value: Any) -> Any:
    """Another value of a setting."""
    if value in (torch.float32, torch.float64):
        return torch.float64
    if isinstance(value, tuple):
        return (not value[0], True)
    return not value if isinstance(value, bool) else value + 1


@contextlib.contextmanager
def other_settings() -> Iterator[None]:
    """A program that sets everything otherwise, as a backend with other kernels needs."""
    before = Arithmetic.now()
    for (_, write), value in zip(SETTINGS.values(), before.values, strict=True):
        write(other(value))
    try:
        yield
    finally:
        for (_, write), value in zip(SETTINGS.values(), before.values, strict=True):
            write(value)


def assert_ours(ours: dict[str, Any]) -> None:
    """All settings but the kind of attention, of which only one has a rule for vmap."""
    free = {name for name in ours if "sdp" in name}
    assert OTHERS
    for seen in OTHERS:
        assert {name for name in ours if seen[name] != ours[name]} <= free


@pytest.mark.promise("precision")
def test_steps_compute_with_the_settings_of_the_trial_of_rounding() -> None:
    """With others, such as more threads, rows may be rounded by the others of a batch."""
    trainer, ours = trainer_of(), named()
    OTHERS.clear()
    with other_settings():
        changed = Arithmetic.now()
        trainer.step()
        assert isinstance(trainer.evaluate(), Evaluation)
        assert Arithmetic.now() == changed
    assert_ours(ours)


def noticing_loss(model: nn.Module, batch: Tensor) -> Tensor:
    losses: Tensor = model(batch).square().sum(1)
    return losses


@pytest.mark.promise("precision")
def test_sums_alone_compute_with_the_settings_of_the_trial_of_rounding() -> None:
    clipped = clipped_grad(made(), noticing_loss, ball(1.0), batch_size=8)
    batch, ours = torch.randn(8, SIDE**2), named()
    clipped(batch)
    OTHERS.clear()
    with other_settings():
        clipped(batch)
    assert_ours(ours)
