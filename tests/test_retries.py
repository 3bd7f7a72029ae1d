"""A step that fails is charged, and its noise is never added to another sum."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from dpmac_cli.randomness.noise import SeededNormals
from tests.digits_runs import digits_network as network
from tests.helpers import MECHANISM, Spy, make_trainer
from tests.test_trained_again import SETTINGS
from tests.tiers import pairs_short

PHASES = ["_draw", "_clip_and_sum", "_begin", "_release", "_update", "_end"]
FAILURES: dict[str, Callable[[], BaseException]] = {
    "an error": ValueError,
    "Ctrl-C": KeyboardInterrupt,
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
}


def failing(method: Any, when: int, failure: Callable[[], BaseException], after: bool) -> Any:
    """Return a method that fails in one call, before or after it has done its work."""
    calls = 0

    def called(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when and not after:
            raise failure()
        result = method(*args)
        if calls == when:
            raise failure()
        return result

    return called


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("phase", "how", "after", "optimizer"),
    pairs_short(PHASES, [*FAILURES], [False, True], ["dp-sgd", "dp-macadam"]),
)
def test_a_retry_adds_no_noise_twice_and_is_charged(
    phase: str, how: str, after: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    normal = SeededNormals.standard_normal

    def kept(self: SeededNormals, like: torch.Tensor) -> torch.Tensor:
        drawn = normal(self, like)
        used.append(drawn.clone())
        return drawn

    monkeypatch.setattr(SeededNormals, "standard_normal", kept)
    spy = Spy(MECHANISM.noise_multiplier, MECHANISM.expected_batch)
    trainer: Any = make_trainer(optimizer, spy)
    charged: list[int] = []
    trainer.training = type("Counter", (), {"begin": lambda _: charged.append(1)})()
    trainer.step()
    monkeypatch.setattr(
        trainer, phase, failing(getattr(trainer, phase), 1, FAILURES[how], after), raising=True
    )
    with pytest.raises(BaseException):  # noqa: B017, PT011
        trainer.step()
    for _ in range(3):
        trainer.step()
    assert len(charged) == 5  # each attempt
    assert len(spy.released) <= 5
    for n, one in enumerate(used):
        for other in used[:n]:
            assert not torch.equal(one, other)
    assert len(used) == len(spy.released)  # each noise is added to one sum
    trainer.check_network()


@pytest.mark.privacy
@pytest.mark.parametrize("how", FAILURES)
def test_a_loop_goes_on_after_a_failure_within_its_budget(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpmac_cli import BudgetError, make_private  # noqa: PLC0415
    from dpmac_cli.runs import prepare  # noqa: PLC0415

    monkeypatch.setattr(prepare, "check_model", lambda *_, **__: None)
    private = make_private(network(), "digits", **SETTINGS)
    trainer: Any = private._step
    private.step()
    before = private.epsilon
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_release", failing(trainer._release, 1, FAILURES[how], False))
        with pytest.raises(BaseException):  # noqa: B017, PT011
            private.step()
    assert private.epsilon > before
    assert isinstance(private.model, nn.Module)
    list(islice(private, 2))
    with pytest.raises(BudgetError):
        private.step()
    assert private._begun == len(private) == 4
