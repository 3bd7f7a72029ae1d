"""Where noise comes from, and how one seed becomes streams that have nothing in common."""

import json
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from scipy.stats import norm

from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config.resolve import resolve
from dpmac_cli.randomness.noise import STREAMS, SecureNoise, SeededNoise, noise_source, stream_seeds
from dpmac_cli.randomness.sampling import make_sampler
from dpmac_cli.runs import setup as assembly

either_source = pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
LIKE = torch.zeros(9)


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
    drawn, key = state.sampler.state()["state"], bytes.fromhex(state.noise.state()["key"])
    # The fourth word of SFC64 is a counter, the same for every seed.
    assert not set(drawn[:3]) & set(np.frombuffer(key, np.uint64).tolist())
    if seed is not None:
        streams = stream_seeds(seed)
        assert drawn[:3] == np.random.SFC64(streams["sampler"]).state["state"]["state"][:3].tolist()
        assert key == streams["noise"].generate_state(4, np.uint64).tobytes()


# Draws.


@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_draws_are_like_what_they_are_for(
    dtype: torch.dtype, shape: tuple[int, ...], secure: bool
) -> None:
    like = torch.full(shape, 3.0, dtype=dtype)
    drawn = noise_source(stream_seeds(1)["noise"], secure).standard_normal(like)
    assert (drawn.shape, drawn.dtype, drawn.device) == (like.shape, dtype, like.device)
    assert (like == 3).all()


@pytest.mark.privacy
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_are_as_heavy_as_they_should_be(dtype: torch.dtype, secure: bool) -> None:
    """Counts beyond 3, 4 and 5; short tails are what an adversary looks for."""
    count = 10_000_000
    source = noise_source(np.random.SeedSequence(0), secure)
    drawn = source.standard_normal(torch.empty(count, dtype=dtype)).abs()
    for reach in (3, 4, 5):
        expected = 2 * count * float(norm.sf(reach))
        assert abs(int((drawn > reach).sum()) - expected) < 4 * expected**0.5


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tails_do_not_end_at_5_77(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.randn's do, on the CPU in float32. A draw that far takes a billion, so: the words."""

    def draw(word: int, turn: int) -> list[float]:
        def advance(self: SeededNoise, work: Any, pairs: int) -> None:
            work.words.fill_(word)
            work.turns.fill_(turn)

        monkeypatch.setattr(SeededNoise, "_advance", advance)
        source, like = SeededNoise(np.random.SeedSequence(0)), torch.empty(2, dtype=dtype)
        drawn: list[float] = source.standard_normal(like).tolist()
        assert source.bits(like).standard_normal(like).tolist() == drawn  # as compiled steps draw
        return drawn

    least, most = -(2**63), 2**63 - 1
    assert draw(least, 0) == pytest.approx([8.5717, 0.0], abs=1e-4)
    assert draw(least + 2**11, 0)[0] == pytest.approx(8.49, abs=0.01)  # and close together there
    assert draw(most, 0) == [0, 0]


def key_stream(seed: np.random.SeedSequence) -> CipherContext:
    """AES-256 in counter mode, from the start."""
    key = seed.generate_state(4, np.uint64).astype("<u8").tobytes()
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


def normals(
    stream: CipherContext, count: int, turn: type[np.int32 | np.int64]
) -> NDArray[np.float64]:
    """What the next whole blocks of a key stream make: radii from words, angles from turns."""
    pairs = (count + 1) // 2

    def shares(kind: type[np.int32 | np.int64]) -> NDArray[np.float64]:
        """From -1/2 to 1/2."""
        size = kind().itemsize
        drawn: NDArray[Any] = np.frombuffer(stream.update(bytes(-(-size * pairs // 16) * 16)), kind)
        return drawn[:pairs] * 2.0 ** (-8 * size)

    radius = np.sqrt(-2 * np.log(shares(np.int64) + (0.5 + 2.0**-53)))
    angle = 2 * np.pi * shares(turn)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@pytest.mark.privacy
def test_the_key_stream_is_aes_256_in_counter_mode() -> None:
    """Word for word: nothing of it is used twice, across draws of any size and a restored state."""
    seed = np.random.SeedSequence(7)
    stream, source = key_stream(seed), SeededNoise(seed)
    for count in (1, 5, 2, 64, 3):
        expected = normals(stream, count, np.int32)
        np.testing.assert_allclose(source.standard_normal(torch.empty(count)), expected, atol=2e-6)
        source.restore(source.state())


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_secure_draw_is_half_the_sum_of_four(dtype: torch.dtype) -> None:
    """Of four stretches of the key stream, in float64; both normals of a pair are in no sum."""
    seed = np.random.SeedSequence(7)
    stream, source = key_stream(seed), SecureNoise(seed)
    for count in (1, 5, 2, 64, 3):
        total = sum(normals(stream, count, np.int64) for _ in range(4))
        drawn = source.standard_normal(torch.empty(count, dtype=dtype))
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        np.testing.assert_allclose(drawn, total / 2, rtol=0, atol=tolerance)
        source.restore(source.state())


@pytest.mark.privacy
def test_secure_draws_cannot_be_compiled() -> None:
    """What is compiled would make one normal of the bits, not four."""
    with pytest.raises(ValueError, match="no bits to compile"):
        SecureNoise(np.random.SeedSequence(7)).bits(torch.empty(4))


@pytest.mark.privacy
@either_source
def test_neighbouring_draws_have_nothing_in_common(secure: bool) -> None:
    """The two normals of a pair share a radius: neither they nor their squares correlate."""
    count = 1_000_000
    z = noise_source(np.random.SeedSequence(0), secure).standard_normal(torch.empty(2 * count))
    for power in (1, 2, 3):
        x, y = (half.double() ** power for half in (z[:count], z[count:]))
        assert abs(correlation(x, y)) < 4 / count**0.5
    for lag in (1, 2, 100):
        assert abs(correlation(z[:-lag], z[lag:])) < 4 / count**0.5


@pytest.mark.privacy
@either_source
def test_no_draw_comes_twice(secure: bool) -> None:
    source = noise_source(np.random.SeedSequence(0), secure)
    x, y = (source.standard_normal(torch.zeros(1000)) for _ in range(2))
    assert abs(correlation(x, y)) < 0.15


# State.


@pytest.mark.parametrize("used", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        *(
            (partial(noise_source, secure=secure), lambda s: s.standard_normal(LIKE).tolist())
            for secure in (False, True)
        ),
        *(
            (partial(make_sampler, name, 50, 15, secure=secure), lambda s: s.draw().tolist())
            for name in SAMPLERS
            for secure in (False, True)
        ),
    ],
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
