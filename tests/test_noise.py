"""Where noise comes from, and how one seed becomes streams that have nothing in common."""

import json
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from dpmac_cli import assembly
from dpmac_cli.accounting import SAMPLERS
from dpmac_cli.config import resolve
from dpmac_cli.noise import STREAMS, SeededNoise, noise_source, stream_seeds
from dpmac_cli.sampling import make_sampler


def words(seed: np.random.SeedSequence) -> tuple[int, ...]:
    """What a generator is filled with."""
    return tuple(seed.generate_state(6, np.uint64).tolist())


def first(seed: np.random.SeedSequence, count: int = 1000) -> torch.Tensor:
    return SeededNoise(seed).standard_normal(torch.zeros(count))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


# Seeds.


@pytest.mark.privacy
def test_without_a_seed_every_stream_has_256_bits_of_its_own() -> None:
    """From the operating system; none is derived from another's, or twice the same."""
    seeds = [seed for _ in range(3) for seed in stream_seeds(None).values()]
    assert len({words(seed) for seed in seeds}) == len(seeds) == 3 * len(STREAMS)
    entropies = {seed.entropy for seed in seeds if isinstance(seed.entropy, int)}
    assert len(entropies) == len(seeds)
    assert min(entropies).bit_length() > 200
    for seed in seeds:
        assert seed.pool_size == 8
        assert seed.spawn_key == ()


@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_a_seed_repeats_and_its_streams_and_branches_differ(seed: int) -> None:
    one, again = stream_seeds(seed), stream_seeds(seed)
    assert tuple(one) == STREAMS
    assert {name: words(s) for name, s in one.items()} == {
        name: words(s) for name, s in again.items()
    }
    branches = stream_seeds(seed, branch=1), stream_seeds(seed, branch=2)
    drawn = [first(s) for streams in (one, *branches) for s in streams.values()]
    for x, y in combinations(drawn, 2):
        assert abs(correlation(x, y)) < 0.15


@pytest.mark.privacy
@pytest.mark.parametrize("step", [1, 2**16, 2**32, 2**33, 2**62])
def test_every_bit_of_a_seed_matters(step: int) -> None:
    """torch's generator on the CPU keeps 32: two seeds 2^32 apart give it the same noise."""
    for name in STREAMS:
        x, y = (first(stream_seeds(seed)[name]) for seed in (7, 7 + step))
        assert abs(correlation(x, y)) < 0.15


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [5, None])
def test_a_run_gives_sampler_and_noise_a_stream_each(seed: int | None, sampler: str) -> None:
    config = resolve({"dataset": "digits", "seed": seed, "sampler": sampler}).config
    state = assembly.make_trainer(config, 1, torch.device("cpu")).state
    # The fourth word of SFC64 is a counter, the same for every seed.
    secrets = [x.state()["state"][:3] for x in (state.sampler, state.noise)]
    assert not set(secrets[0]) & set(secrets[1])
    if seed is not None:
        for source, name in zip(secrets, ("sampler", "noise"), strict=True):
            named = np.random.SFC64(stream_seeds(seed)[name]).state["state"]["state"]
            assert source == named[:3].tolist()


# Draws.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_draws_are_like_what_they_are_for(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    like = torch.full(shape, 3.0, dtype=dtype)
    drawn = noise_source(stream_seeds(1)["noise"]).standard_normal(like)
    assert (drawn.shape, drawn.dtype, drawn.device) == (like.shape, dtype, like.device)
    assert (like == 3).all()


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_are_as_heavy_as_they_should_be(dtype: torch.dtype) -> None:
    """Counts beyond 3, 4 and 5; short tails are what an adversary looks for."""
    count = 10_000_000
    source = SeededNoise(np.random.SeedSequence(0))
    drawn = source.standard_normal(torch.empty(count, dtype=dtype)).abs()
    for reach in (3, 4, 5):
        expected = 2 * count * float(norm.sf(reach))
        assert abs(int((drawn > reach).sum()) - expected) < 4 * expected**0.5


@pytest.mark.privacy
def test_the_generator_is_the_one_whose_tails_do_not_end_at_5_77() -> None:
    """torch.randn's do, on the CPU in float32. A draw that far takes a billion, so: by its name."""
    assert SeededNoise(np.random.SeedSequence(0)).state()["bit_generator"] == "SFC64"


@pytest.mark.privacy
def test_no_draw_comes_twice() -> None:
    source = SeededNoise(np.random.SeedSequence(0))
    x, y = (source.standard_normal(torch.zeros(1000)) for _ in range(2))
    assert abs(correlation(x, y)) < 0.15


# State.


@pytest.mark.parametrize("used", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (SeededNoise, lambda source: source.standard_normal(torch.zeros(9)).tolist()),
        *(
            (partial(make_sampler, name, 50, 15), lambda source: source.draw().tolist())
            for name in SAMPLERS
        ),
    ],
    ids=["noise", *SAMPLERS],
)
def test_state_is_the_whole_state(
    make: Callable[[np.random.SeedSequence], Any], use: Callable[[Any], list[float]], used: int
) -> None:
    """As JSON. After an odd number of 32-bit draws half a word is left over: it belongs to it."""
    source, other = (make(np.random.SeedSequence(seed)) for seed in (3, 4))
    for _ in range(used):
        use(source)
    kept = json.dumps(source.state())
    expected = [use(source) for _ in range(3)]
    assert [use(other) for _ in range(3)] != expected
    other.restore(json.loads(kept))
    assert [use(other) for _ in range(3)] == expected
    assert other.state() == source.state() != json.loads(kept)
