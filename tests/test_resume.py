"""Stopped runs are resumed exactly; forks draw with new keys and pay for all that came before."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dpmac_cli
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.errors import DivergedError, InputError
from dpmac_cli.randomness.keystream import STREAMS
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.release import run
from dpmac_cli.release.publish import Finished
from dpmac_cli.release.run import RunEvent, finish
from dpmac_cli.runs import checkpoint, environment, folder, ledger
from dpmac_cli.runs.session import Reduced, Started, Update
from dpmac_cli.runs.train import resumes_exactly
from dpmac_cli.storage import files
from dpmac_cli.training.loop import Evaluated
from dpmac_cli.training.trainer import Trainer
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import RATE, SIGMA, after, contents, digits_config
from tests.tiers import rest_long

STEPS = 21


def kill(events: Iterator[RunEvent], when: Callable[[RunEvent], bool]) -> None:
    """Leave a run as a kill would: at once, with nothing more written."""
    next(event for event in events if when(event))
    events.close()  # type: ignore[attr-defined]


def weights(where: Path) -> bytes:
    return (where / folder.MODEL).read_bytes()


def start(**flags: Any) -> Any:
    return digits_config(**{"steps": STEPS, "seed": 7, "checkpoint_every": "4", **flags})


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("optimizer", "sampler"),
    rest_long(
        [
            *((optimizer, "poisson") for optimizer in reversed(OPTIMIZER_NAMES)),
            *(("dp-macadam", sampler) for sampler in SAMPLERS if sampler != "poisson"),
        ]
    ),
)
def test_a_run_stopped_anywhere_ends_bit_identical(optimizer: str, sampler: str) -> None:
    settings = {
        "optimizer": optimizer,
        "sampler": sampler,
        "physical_batch": 50,
        "kappa": "tracked",
        "phi": "tracked",
    }
    whole = finish(run.train(start(**settings)))
    stopped = finish(run.train(start(**settings), after(1)))
    for done in (1, 2, 4, 5, 12, 13):  # a checkpoint every 4 steps, an epoch every 12
        if done > 1:
            more = after(done - stopped.report["privacy"]["steps"])
            stopped = finish(run.resume(stopped.folder, {}, more))
        assert stopped.state == "interrupted"
        assert stopped.report["privacy"]["steps"] == done
    last = finish(run.resume(stopped.folder, {}))
    assert last.state == "finished"
    assert weights(last.folder) == weights(whole.folder)
    assert last.report["privacy"] == whole.report["privacy"]
    assert last.report["test"]["accuracy"] == whole.report["test"]["accuracy"]


@pytest.mark.privacy
def test_a_killed_run_ends_bit_identical() -> None:
    whole = finish(run.train(start()))
    config = start(out="killed")
    kill(run.train(config), lambda e: isinstance(e, Update) and e.event.step >= 10)
    saved = checkpoint.newest(Path("killed"))
    assert saved.record["state"]["step"] in (8, 12)
    assert weights(finish(run.resume(Path("killed"), {})).folder) == weights(whole.folder)


class Draws:
    """Every draw that training makes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noise: list[Tensor] = []
        self.batches: list[tuple[int, ...]] = []
        at = Noise.at

        def recorded_at(noise: Noise, step: int) -> Any:
            normals = at(noise, step)
            standard_normal = normals.standard_normal

            def recorded(like: Tensor, at_once: int | None = None) -> Tensor:
                self.noise.append(standard_normal(like, at_once))
                return self.noise[-1].clone()

            normals.standard_normal = recorded  # type: ignore[method-assign]
            return normals

        def recording(draw: Callable[..., Any]) -> Callable[..., Any]:
            def drawn(sampler: Any, step: int) -> Any:
                batch = draw(sampler, step)
                self.batches.append(tuple(batch))
                return batch

            return drawn

        monkeypatch.setattr(Noise, "at", recorded_at)
        monkeypatch.setattr(KeyedSampler, "draw", recording(KeyedSampler.draw))


CHANGES: tuple[Mapping[str, str], ...] = (
    {"lr": "0.01"},
    {"steps": "30"},
    {"sigma": "7"},
    {"physical_batch": "64"},
)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("sampler", "change"),
    [
        *(("poisson", change) for change in CHANGES),
        *((sampler, CHANGES[0]) for sampler in SAMPLERS if sampler != "poisson"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_fork_reuses_no_draw(
    sampler: str, change: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(monkeypatch)
    finish(run.train(start(out="run", sampler=sampler)))
    kept = Path("run/checkpoint/step-000000020.safetensors")
    (Path("run/checkpoint/step-000000021.safetensors")).unlink()
    assert kept.exists()
    before = len(draws.noise)
    finished = finish(run.fork(Path("run"), {**change, "out": "forked"}))
    assert len(draws.noise) == len(draws.batches) > before == STEPS
    for drawn in draws.noise[before:]:
        assert not any(torch.equal(drawn, old) for old in draws.noise[:before])
    assert not set(draws.batches[before:]) & set(draws.batches[:before])
    # Step 21 was shown by the run, and taken again by its fork.
    events = finished.report["privacy"]["events"]
    after = finished.report["hyperparameters"]["steps"] - 20
    assert [event["steps"] for event in events] == [21, after]
    assert finished.report["privacy"]["steps"] == 21 + after


@pytest.mark.privacy
def test_epsilon_covers_every_ancestor_of_a_fork() -> None:
    first = finish(run.train(start(out="run")))
    before = contents(first.folder)
    second = finish(run.fork(first.folder, {"steps": "40", "sigma": "8", "out": "second"}))
    third = finish(run.fork(second.folder, {"steps": "50", "out": "third"}))
    events = (
        TrainingEvent(RATE, SIGMA, 21, "poisson", 12),
        TrainingEvent(RATE, 8.0, 19, "poisson", 12),
        TrainingEvent(RATE, 8.0, 10, "poisson", 12),
    )
    price = third.report["privacy"]
    assert [TrainingEvent(**event) for event in price["events"]] == list(events)
    assert price["epsilon"] == total_epsilon(events, 1e-5) > second.report["privacy"]["epsilon"]
    lines = files.read_lines(third.folder / folder.METRICS)
    assert lines[-1]["epsilon"] == price["epsilon"]
    assert "noise multiplier 6 and 29" in price["statement"]
    assert contents(first.folder) == before
    assert {first.folder, second.folder, third.folder} == set(map(Path, ("run", "second", "third")))


@pytest.mark.privacy
@pytest.mark.parametrize(
    "sampler", [name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch]
)
def test_forks_pay_for_the_epochs_that_each_began(sampler: str) -> None:
    """Left and begun in the middle of one, where an epoch has 12 steps."""
    first = finish(run.train(start(out="run", sampler=sampler), after(15)))
    two = TrainingEvent(RATE, SIGMA, 24, sampler, 12)
    assert first.report["privacy"]["epsilon"] == total_epsilon((two,), 1e-5)
    last = finish(run.fork(first.folder, {"lr": "0.01", "out": "forked"}))
    events = [
        TrainingEvent(RATE, SIGMA, 15, sampler, 12),
        TrainingEvent(RATE, SIGMA, 6, sampler, 12),
    ]
    price = last.report["privacy"]
    assert [TrainingEvent(**event) for event in price["events"]] == events
    # Two and one; a run that was never left would pay for two.
    assert price["epsilon"] == total_epsilon((replace(two, steps=36),), 1e-5)
    lines = files.read_lines(last.folder / folder.METRICS)
    assert lines[-1]["epsilon"] == price["epsilon"]


@pytest.mark.privacy
def test_steps_shown_after_the_checkpoint_are_paid_for_even_after_two_kills() -> None:
    config = start(out="run", epochs=4, steps=None, checkpoint_every="10")
    # The first epoch's line, of step 12, is shown; the checkpoint is of step 10.
    kill(run.train(config), lambda e: isinstance(e, Update) and isinstance(e.event, Evaluated))
    where = Path("run")
    assert [line["step"] for line in files.read_lines(where / folder.METRICS)] == [12]
    kill(run.resume(where, {}), lambda e: isinstance(e, Started))
    finished = finish(run.fork(where, {"lr": "0.002", "out": "forked"}))
    assert finished.report["privacy"]["events"][0]["steps"] >= 12


@pytest.mark.privacy
def test_that_a_run_diverged_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after step 12, past the last checkpoint, and is computed from the records."""

    def check_finite(trainer: Trainer) -> None:
        if trainer.state.step >= 12:
            raise DivergedError(trainer.state.step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "check_finite", check_finite)
        with pytest.raises(DivergedError, match="after step 12"):
            finish(run.train(start(out="run", checkpoint_every="10")))
    finished = finish(run.fork(Path("run"), {"lr": "0.0001", "out": "forked"}))
    assert [event["steps"] for event in finished.report["privacy"]["events"]] == [12, STEPS - 10]


@pytest.mark.privacy
def test_no_checkpoint_with_the_old_keys_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its charges lack the steps with new keys, which would be free if the run went back to it."""
    first = finish(run.train(start(out="run"), after(6)))
    monkeypatch.setattr("dpmac_cli.runs.train.environment", lambda *_: {"threads": 77})
    kill(run.resume(first.folder, {}), lambda event: isinstance(event, Started))
    (left,) = (first.folder / checkpoint.FOLDER).glob("step-*")
    assert len(checkpoint.newest(first.folder).record["spent"]["earlier"]) == 1
    left.write_bytes(b"")
    with pytest.raises(InputError, match="cannot be resumed"):
        finish(run.resume(first.folder, {}))


def kill_as_new_keys_begin(where: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume a run on another machine, and kill it at a function of ``checkpoint``."""

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("dpmac_cli.runs.train.environment", lambda *_: {"threads": 77})
        patch.setattr(checkpoint, name, killed)
        with pytest.raises(Killed):
            finish(run.resume(where, {}))


@pytest.mark.privacy
def test_an_exact_resume_removes_checkpoints_with_the_keys_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill left some; without the ledger, going back to them would forget the newer keys."""
    first = finish(run.train(start(out="run"), after(6)))
    kill_as_new_keys_begin(first.folder, "discard", monkeypatch)
    kept = first.folder / checkpoint.FOLDER
    assert len(list(kept.glob("step-*"))) == 2
    started = next(run.resume(first.folder, {}))
    assert isinstance(started, Started)
    assert started.fresh_noise == ""
    (left,) = kept.glob("step-*")
    assert len(checkpoint.newest(first.folder).record["spent"]["earlier"]) == 1
    left.write_bytes(b"")
    (kept / ledger.FILE).unlink()
    with pytest.raises(InputError, match="cannot be resumed"):
        finish(run.resume(first.folder, {}))


@pytest.mark.privacy
@pytest.mark.parametrize("lost", [False, True], ids=["ledger", "no ledger"])
def test_a_fork_from_an_older_checkpoint_is_charged_what_its_parent_began(lost: bool) -> None:
    """Its parent's newest checkpoint is damaged, and the ledger ahead of the one before."""
    first = finish(run.train(start(out="run"), after(15)))
    kept = first.folder / checkpoint.FOLDER
    (kept / "step-000000015.safetensors").write_bytes(b"")
    if lost:
        (kept / ledger.FILE).unlink()
    before = contents(first.folder)
    started, *_, last = run.fork(first.folder, {"lr": "0.02", "out": "forked"})
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    assert started.done == 12
    assert any("step-000000015.safetensors" in note for note in started.notes)
    assert any(ledger.FILE in note for note in started.notes) == lost
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [
        STEPS if lost else 15,
        STEPS - 12,
    ]
    assert contents(first.folder) == before


@pytest.mark.privacy
def test_forks_of_one_run_share_no_key() -> None:
    first = finish(run.train(start(out="run"), after(6)))
    keys = [checkpoint.newest(first.folder).record["state"]["keys"]]
    for out in ("one", "other"):
        forked = finish(run.fork(first.folder, {"lr": "0.02", "out": out}))
        keys.append(checkpoint.newest(forked.folder).record["state"]["keys"])
    for name in STREAMS:  # that of initial values, which no record changes, is the same
        assert len({each[name] for each in keys}) == (1 if name == "init" else 3), name


@pytest.mark.privacy
@pytest.mark.parametrize("out", ["run", "../{here}/run", "link"])
def test_a_fork_never_replaces_its_parent(out: str, tmp_path: Path) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    Path("link").symlink_to("run")
    before = contents(first.folder)
    with pytest.raises(InputError, match=r"is the run to fork\. Use a new folder"):
        finish(run.fork(first.folder, {"out": out.format(here=tmp_path.name), "force": True}))
    assert contents(first.folder) == before


@pytest.mark.privacy
def test_a_fork_killed_at_any_write_is_charged_for_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever of it can be resumed or forked in turn."""
    first = finish(run.train(start(out="run"), after(6)))
    before = contents(first.folder)
    resumed = 0
    for left in range(12):
        ticks, replace = iter(range(left)), os.replace

        def killing(*args: Any) -> None:
            if next(ticks, None) is None:  # noqa: B023
                raise Killed
            replace(*args)  # noqa: B023

        out = f"forked-{left}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killing)
            with pytest.raises(Killed):
                finish(run.fork(first.folder, {"lr": "0.02", "out": out}))
        assert contents(first.folder) == before
        try:
            last = finish(run.resume(out, {}))
        except InputError:
            assert not any(Path(out, checkpoint.FOLDER).glob("step-*"))
            continue
        resumed += 1
        events = last.report["privacy"]["events"]
        assert [event["steps"] for event in events] == [6, STEPS - 6]
    assert resumed > 4


@pytest.mark.privacy
@pytest.mark.parametrize("change", [{"isolate": True}, {"seed": 0}, {"ema": 0.9}])
def test_a_fork_that_begins_otherwise_is_refused(change: Mapping[str, Any]) -> None:
    first = finish(run.train(start(out="run"), after(3)))
    with pytest.raises(InputError, match=f"--{next(iter(change))} cannot change in a fork"):
        finish(run.fork(first.folder, {**change, "out": "forked"}))
    with pytest.raises(InputError, match=r"would change the run.*Start a new run"):
        finish(run.resume(first.folder, change))


def test_a_spent_run_that_is_resumed_on_a_gpu_takes_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = finish(run.train(start(out="run", max_epsilon=0.15)))
    assert first.state == "budget-spent"
    before = weights(first.folder)
    monkeypatch.setattr("dpmac_cli.runs.train.repeatable", lambda device: False)
    again = finish(run.resume(first.folder, {}))
    assert again.report["privacy"] == first.report["privacy"]
    assert weights(again.folder) == before


@pytest.mark.privacy
def test_a_budget_covers_what_a_fork_inherits() -> None:
    first = finish(run.train(start(out="run")))
    spent = first.report["privacy"]["epsilon"]
    budget = round(1.2 * spent, 4)
    flags = {"steps": "60", "max_epsilon": str(budget), "out": "forked"}
    last = finish(run.fork(first.folder, flags))
    assert last.state == "budget-spent"
    assert spent < last.report["privacy"]["epsilon"] <= budget


@pytest.mark.privacy
def test_halved_chunks_are_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken again in whole chunks, the step would round another sum under the same noise."""
    calls, of = iter(range(1, 10**9)), ClippedChunkSum.of

    def scarce(clipped_sum: ClippedChunkSum, x: Tensor, *args: Any) -> None:
        if next(calls) > 10 and len(x) > 50:
            raise MemoryError
        of(clipped_sum, x, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ClippedChunkSum, "of", scarce)
        events = run.train(start(out="run", physical_batch=100, checkpoint_every="20"))
        reduced = next(event for event in events if isinstance(event, Reduced))
        events.close()  # type: ignore[attr-defined]
    state = checkpoint.newest(Path("run")).record["state"]
    assert 1 < reduced.step < 20
    assert (state["step"], state["chunk"]) == (reduced.step, 50)
    # One from before, with larger chunks, must not serve either, should this one be damaged.
    assert [path.name for path in Path("run", checkpoint.FOLDER).glob("step-*")] == [
        f"step-{reduced.step:09d}.safetensors"
    ]
    finished = finish(run.resume(Path("run"), {}))
    # That memory ran out says something about the size of a batch, so the report does not tell.
    assert finished.report["machine"]["physical_batch"] == 100


@pytest.mark.privacy
def test_another_machine_draws_with_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = finish(run.train(start(out="run"), after(5)))
    monkeypatch.setattr("dpmac_cli.runs.train.environment", lambda *_: {"threads": 77})
    finished = finish(run.resume(stopped.folder, {}))
    assert len(finished.report["privacy"]["events"]) == 2


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("of", "name", "key"),
    [
        (torch, "__version__", "torch"),
        (np, "__version__", "numpy"),
        (environment, "device_name", "device"),
        (torch, "get_num_threads", "threads"),
        (torch.backends.cpu, "get_cpu_capability", "instructions"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_environment_records_what_the_bits_depend_on(
    monkeypatch: pytest.MonkeyPatch, of: Any, name: str, key: str
) -> None:
    before = environment.environment(torch.device("cpu"))
    other = "other" if name == "__version__" else lambda *_: "other"
    monkeypatch.setattr(of, name, other)
    after = environment.environment(torch.device("cpu"))
    assert {each for each in before if before[each] != after[each]} >= {key}


def _other(value: Any) -> Iterator[Any]:
    """A JSON value with each of its leaves changed, one at a time; or another one, if empty."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from ({**value, key: changed} for changed in _other(part))
    elif isinstance(value, list) and value:
        for place, part in enumerate(value):
            yield from ([*value[:place], new, *value[place + 1 :]] for new in _other(part))
    else:
        yield f"not {value}"


@pytest.mark.privacy
def test_any_other_environment_draws_with_new_keys() -> None:
    """Each key by itself, whatever keys are recorded: another machine may round otherwise."""
    stopped = finish(run.train(start(out="run"), after(3))).folder
    saved = checkpoint.newest(stopped)
    environment = saved.record["environment"]
    assert environment.keys() >= {"torch", "numpy", "device", "threads", "instructions"}
    changed = [*_other(environment), {**environment, "more": 1}]
    changed += [{k: v for k, v in environment.items() if k != key} for key in environment]
    for number, other in enumerate([environment, *changed]):
        where = Path(f"copy-{number}")
        shutil.copytree(stopped, where)
        checkpoint.discard(where)
        record = {**saved.record, "environment": other}
        checkpoint.save(where, 3, saved.tensors, record)
        started = next(e for e in run.resume(where, {}) if isinstance(e, Started))
        assert (started.fresh_noise == "") == (other == environment), other
        if number:
            assert "the machine" in started.fresh_noise


class Changed(str):
    """Stands for a function whose result is another one here, or for another text."""

    def __call__(self, *args: Any) -> Any:
        return "another"


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("name", "owner", "attribute"),
    [
        ("processor", environment, "_processor"),
        ("source of dpmac", environment, "_source"),
        ("dpmac", environment, "__version__"),
        ("inter-op threads", torch, "get_num_interop_threads"),
        ("build of torch", torch.__config__, "show"),
        ("parallel libraries", torch.__config__, "parallel_info"),
    ],
)
def test_what_computes_otherwise_draws_with_new_keys(
    name: str, owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(run.train(start(out="run"), after(5)))
    monkeypatch.setattr(owner, attribute, Changed())
    started = next(run.resume(Path("run"), {}))
    assert isinstance(started, Started)
    assert started.fresh_noise == f"the machine or its software changed ({name})"


PACKAGE = Path(dpmac_cli.__file__).parent


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        ("config/settings.py", "Network to train.", "The network.", True),
        ("config/settings.py", "the dataset's", "by dataset", True),
        ("config/settings.py", '"noise-multiplier", "noise"', '"noise_multiplier",', True),
        ("config/settings.py", "DELTA = 1e-5", "DELTA = 1e-6", False),
        ("config/settings.py", "Field(ge=1, le=10**9)", "Field(ge=2, le=10**9)", False),
        ("config/settings.py", "    ] = 1e-08", "    ] = 1e-07", False),
        ("cli/train.py", "Train a model", "Fit a model", True),
        ("release/sentences.py", "Noise comes from", "The noise is from", True),
        ("dp/rules.py", '"""Moments of the private mean', '"""Averages of the private mean', True),
        ("dp/geometry.py", "# lines 19, 20", "# the last lines", True),
        ("dp/geometry.py", "region.centre.lerp_", "region.centre.lerp", False),
        ("dp/rules.py", "1 - self.beta1", "1 + self.beta1", False),
        ("dp/mechanism.py", "noise_multiplier", "sigma", False),
        ("data/datasets.toml", "60_000", "60_001", False),
    ],
)
def test_code_that_computes_is_another_source_and_help_is_not(
    file: str, old: str, new: str, same: bool, tmp_path: Path
) -> None:
    text, copy = (PACKAGE / file).read_text(), tmp_path / "dpmac_cli" / file
    assert old in text
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    before = environment._source.__wrapped__(tmp_path / "dpmac_cli")
    copy.write_text(text.replace(old, new))
    assert (environment._source.__wrapped__(tmp_path / "dpmac_cli") == before) == same


@pytest.mark.privacy
def test_the_source_is_the_same_wherever_it_lies_and_another_with_a_file_more(
    tmp_path: Path,
) -> None:
    root = tmp_path / "dpmac_cli"
    shutil.copytree(PACKAGE, root, ignore=shutil.ignore_patterns("__pycache__"))
    assert environment._source.__wrapped__(root) == environment._source()
    (root / "dp" / "more.py").touch()
    assert environment._source.__wrapped__(root) != environment._source()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "variable",
    [
        *("ONEDNN_MAX_CPU_ISA", "DNNL_VERBOSE", "MKL_CBWR", "OMP_DYNAMIC", "KMP_AFFINITY"),
        *("GOMP_SPINCOUNT", "ATEN_CPU_CAPABILITY", "TORCH_COMPILE_DEBUG", "OPENBLAS_CORETYPE"),
        *("CUBLAS_WORKSPACE_CONFIG", "CUDNN_LOGINFO_DBG", "PYTORCH_CUDA_ALLOC_CONF"),
        *("NVIDIA_TF32_OVERRIDE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
    ],
)
def test_a_variable_that_changes_kernels_is_another_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment.environment(torch.device("cpu"))
    monkeypatch.setenv(variable, "another")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    after = environment.environment(torch.device("cpu"))
    assert environment.differences(before, after) == {variable}
    assert environment.differences(after, before) == {variable}


@pytest.mark.privacy
def test_every_resume_on_a_gpu_draws_with_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds in any order, so that the same step gives other bits."""
    assert not environment.repeatable(torch.device("cuda", 0))
    monkeypatch.setattr("dpmac_cli.runs.train.repeatable", lambda device: False)
    stopped = finish(run.train(start(out="run"), after(5)))
    assert not resumes_exactly(stopped.folder, "cpu")
    started, *_, last = run.resume(stopped.folder, {})
    assert isinstance(started, Started)
    assert started.fresh_noise == "steps on a GPU cannot be repeated bit for bit"
    assert isinstance(last, Finished)
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [5, STEPS - 5]
    assert resumes_exactly(stopped.folder, "cpu")  # for no step is left
    with pytest.raises(InputError, match="is finished"):
        finish(run.resume(stopped.folder, {}))


def test_a_finished_run_has_nothing_to_go_on_with() -> None:
    first = finish(run.train(start(out="run")))
    before = weights(first.folder)
    with pytest.raises(InputError, match=r"finished: it took 21 of 21 steps.*--fork run --out NEW"):
        finish(run.resume(first.folder, {}))
    assert weights(first.folder) == before


def test_fewer_steps_than_were_taken_are_refused() -> None:
    first = finish(run.train(start(out="run"), after(15)))
    words = r"has already taken 15 steps, but 2 are requested.*--steps .above 15"
    with pytest.raises(InputError, match=words):
        finish(run.fork(first.folder, {"steps": "2", "out": "forked"}))


@pytest.mark.parametrize(
    "change",
    [{"optimizer": "dp-sgd"}, {"sampler": "random-allocation"}, {"epsilon": "3"}, {"no_dp": True}],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_another_run_cannot_be_changed(change: Mapping[str, Any]) -> None:
    first = finish(run.train(start(out="run"), after(3)))
    with pytest.raises(InputError, match="cannot change in a fork"):
        finish(run.fork(first.folder, {**change, "out": "forked"}))
    assert not Path("forked").exists()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "change",
    [*CHANGES, {"epochs": "9"}, {"max_epsilon": "9"}, {"out": "other"}],
    ids=lambda change: next(iter(change)),
)
def test_a_resume_that_changes_anything_is_refused(change: Mapping[str, str]) -> None:
    """It would add the same noise to other gradients."""
    first = finish(run.train(start(out="run"), after(3)))
    before = contents(Path("run"))
    with pytest.raises(InputError, match=r"would change the run.*--fork run --out NEW"):
        finish(run.resume(first.folder, change))
    assert contents(Path("run")) == before


def test_repeating_what_the_run_is_changes_nothing() -> None:
    first = finish(run.train(start(out="run"), after(3)))
    same = {"dataset": "digits", "optimizer": "dp-macadam", "sampler": "poisson"}
    last = finish(run.resume(first.folder, same))
    assert len(last.report["privacy"]["events"]) == 1


@pytest.mark.privacy
def test_checkpoints_are_private_and_the_last_two_are_kept() -> None:
    first = finish(run.train(start(out="run")))
    where = first.folder / checkpoint.FOLDER
    assert {path.name for path in where.iterdir()} == {
        checkpoint.NOTE,
        ledger.FILE,
        "step-000000020.safetensors",
        "step-000000021.safetensors",
    }
    assert where.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in where.iterdir()} == {0o600}


@pytest.mark.parametrize("damage", rest_long(["flip", "cut", "empty", "text"]))
def test_the_newest_whole_checkpoint_serves(damage: str) -> None:
    whole = finish(run.train(start()))
    first = finish(run.train(start(out="run"), after(6)))
    newest = first.folder / checkpoint.FOLDER / "step-000000006.safetensors"
    content = bytearray(newest.read_bytes())
    content[-50] ^= 1
    newest.write_bytes(
        {"cut": bytes(content[:-9]), "flip": bytes(content), "empty": b"", "text": b"x" * 99}[
            damage
        ]
    )
    assert checkpoint.newest(first.folder).record["state"]["step"] == 4
    assert weights(finish(run.resume(first.folder, {})).folder) == weights(whole.folder)


def test_no_whole_checkpoint_is_named() -> None:
    first = finish(run.train(start(out="run"), after(6)))
    for path in (first.folder / checkpoint.FOLDER).glob("step-*"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"step-000000006.*step-000000004"):
        finish(run.resume(first.folder, {}))
    checkpoint.discard(first.folder)
    with pytest.raises(InputError, match=r"contains no checkpoint.*--force"):
        finish(run.resume(first.folder, {}))


def test_a_run_killed_before_its_first_step_ends_bit_identical() -> None:
    whole = finish(run.train(start(checkpoint_every="60s")))
    kill(run.train(start(out="run", checkpoint_every="60s")), lambda event: True)
    assert weights(finish(run.resume(Path("run"), {})).folder) == weights(whole.folder)


@pytest.mark.privacy
def test_a_folder_in_use_is_refused() -> None:
    """Two sessions at a time would draw alike, and neither would pay for the other."""
    events = run.train(start(out="run"))
    next(events)
    with pytest.raises(InputError, match="in use by another dpmac process"):
        finish(run.resume(Path("run"), {}))
    with pytest.raises(InputError, match="in use by another dpmac process"):
        finish(run.train(start(out="run", force=True)))


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run folder: it contains no config\.yaml"):
        finish(run.resume(tmp_path, {}))


def test_the_record_is_json() -> None:
    first = finish(run.train(start(out="run"), after(3)))
    saved = checkpoint.newest(first.folder)
    assert json.loads(json.dumps(saved.record)) == saved.record
    assert saved.tensors.keys() >= {"theta", "m", "v", "centre", "inverse", "factor", "s"}


class Killed(BaseException):
    """In the place of SIGKILL: nothing handles it, and nothing is written after it."""


@pytest.mark.parametrize("when", [12, 21], ids=["an epoch's end", "the last step"])
@pytest.mark.parametrize("where", rest_long(["before", "after"]))
def test_a_run_killed_about_a_checkpoint_keeps_every_line(
    when: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved once it is scored: saved before, it would go on without its score."""
    settings = {"checkpoint_every": "3"}
    whole = finish(run.train(start(**settings)))
    save = checkpoint.save

    def killed(run: Path, step: int, *rest: Any) -> Path:
        if step == when and where == "before":
            raise Killed
        path = save(run, step, *rest)
        if step == when:
            raise Killed
        return path

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            finish(run.train(start(out="killed", **settings)))
    last = finish(run.resume(Path("killed"), {}))
    assert weights(last.folder) == weights(whole.folder)
    assert last.report["test"] == whole.report["test"]
    lines = [
        [{**line, "seconds": 0} for line in files.read_lines(end.folder / folder.METRICS)]
        for end in (last, whole)
    ]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == [12, 21]


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["discard", "save"])
def test_a_run_with_new_keys_that_is_killed_as_it_begins_is_charged_for_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    kill_as_new_keys_begin(first.folder, name, monkeypatch)
    last = finish(run.resume(first.folder, {}))
    assert [event["steps"] for event in last.report["privacy"]["events"] if event["steps"]] == [
        6,
        15,
    ]
    assert all(folder.vouched(last.folder, published) for published in folder.PUBLISHED)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["discard", "save", "clear"])
def test_a_fork_killed_as_it_begins_leaves_its_parent_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finish(run.train(start(out="run"), after(6)))
    before = contents(first.folder)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder if name == "clear" else checkpoint, name, killed)
        with pytest.raises(Killed):
            finish(run.fork(first.folder, {"lr": "0.02", "out": "forked"}))
    assert contents(first.folder) == before


@pytest.mark.privacy
def test_a_fork_of_an_interrupted_run_inherits_its_settings() -> None:
    first = finish(run.train(start(out="run"), after(6)))
    last = finish(run.fork(first.folder, {"lr": "0.02", "out": "forked"}))
    assert [event["steps"] for event in last.report["privacy"]["events"]] == [6, 15]
    assert last.report["hyperparameters"]["lr"] == 0.02
    assert "lr: 0.02\n" in (last.folder / folder.CONFIG).read_text()
    lines = files.read_lines(last.folder / folder.METRICS)
    assert [line["step"] for line in lines] == [6, 12, 21]


@pytest.mark.privacy
def test_steps_ahead_of_a_run_that_is_stopped_again_are_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 12 was shown; the run is killed, resumed from step 8, and stopped at step 9."""
    monkeypatch.setattr(ledger, "SECONDS", 0.0)  # no step is reserved ahead
    config = start(out="run", checkpoint_every="8")
    kill(run.train(config), lambda e: isinstance(e, Update) and isinstance(e.event, Evaluated))
    stopped = finish(run.resume(Path("run"), {}, after(1)))
    lines = files.read_lines(stopped.folder / folder.METRICS)
    assert [line["step"] for line in lines] == [9]
    assert stopped.report["privacy"]["events"][0]["steps"] == 12
    assert lines[0]["epsilon"] == stopped.report["privacy"]["epsilon"]
    last = finish(run.fork(stopped.folder, {"lr": "0.02", "out": "forked"}))
    assert last.report["privacy"]["events"][0]["steps"] == 12
