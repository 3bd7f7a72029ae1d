"""Keys of a run, and noise that is a function of a key and the step."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from scipy.stats import kstest, norm

from dpmac_cli.accounting.events import SAMPLERS
from dpmac_cli.config.resolve import resolve
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.randomness import noise
from dpmac_cli.randomness.keystream import (
    PART_BITS,
    STREAMS,
    Keys,
    KeyStream,
    generator,
    make_keys,
    rows_of,
)
from dpmac_cli.randomness.layers import MT_BEGIN, MT_WORDS, LayerDraws
from dpmac_cli.randomness.noise import PAIRS, Noise, box_muller
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.runs import trainer as assembly
from tests.helpers import a_key

either_source = pytest.mark.parametrize("is_secure", [False, True], ids=["seeded", "secure"])
LIKE = torch.zeros(9)


def first(key: bytes, count: int = 1000) -> torch.Tensor:
    return Noise(key).at(1).standard_normal(torch.zeros(count))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def by_name(keys: Keys) -> dict[str, bytes]:
    return {name: getattr(keys, name) for name in STREAMS}


# Keys.


@pytest.mark.privacy
def test_without_a_seed_every_stream_has_256_bits_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the operating system; none is derived from another's, or twice the same."""
    given: list[bytes] = []
    token_bytes = secrets.token_bytes

    def kept(size: int) -> bytes:
        given.append(token_bytes(size))
        return given[-1]

    monkeypatch.setattr(secrets, "token_bytes", kept)
    keys = [key for _ in range(3) for key in by_name(make_keys(None)).values()]
    assert keys == given
    assert len(set(keys)) == len(keys) == 3 * len(STREAMS)
    assert {len(key) for key in keys} == {32}


@pytest.mark.privacy
@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_a_seed_repeats_and_its_streams_differ(seed: int) -> None:
    assert make_keys(seed) == make_keys(seed)
    streams = by_name(make_keys(seed))
    for place, key in enumerate(streams.values()):
        words = np.random.SeedSequence(seed, spawn_key=(place, 0)).generate_state(4, np.uint64)
        assert key == words.tobytes()  # 256 bits
    drawn = [first(key) for key in streams.values()]
    for x, y in combinations(drawn, 2):
        assert abs(correlation(x, y)) < 0.15


@pytest.mark.privacy
@pytest.mark.parametrize("step", [1, 2**16, 2**32, 2**33, 2**62])
def test_every_bit_of_a_seed_matters(step: int) -> None:
    """torch's generator on the CPU keeps 32: two seeds 2^32 apart give it the same noise."""
    one, other = by_name(make_keys(7)), by_name(make_keys(7 + step))
    for name in STREAMS:
        assert abs(correlation(first(one[name]), first(other[name]))) < 0.15


@pytest.mark.privacy
def test_every_bit_of_a_key_matters() -> None:
    """In the generators of numpy and torch too, and the place that they are for."""
    key = a_key(1)
    others = [bytes(b ^ (1 << i % 8) if i // 8 == j else b for j, b in enumerate(key))
              for i in range(0, 256, 7)]  # fmt: skip
    steps = (0, 1, 2, 2**40)
    drawn = [generator(each).integers(0, 2**62, 4) for each in (key, *others)]
    drawn += [generator(key, step).integers(0, 2**62, 4) for step in steps[1:]]
    assert len({tuple(words.tolist()) for words in drawn}) == len(others) + len(steps)


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [5, None])
def test_a_run_gives_sampler_and_noise_a_stream_each(seed: int | None, sampler: str) -> None:
    config = resolve({"dataset": "digits", "sigma": 6, "seed": seed, "sampler": sampler}).plan
    keys = make_keys(seed)
    trainer = assembly.make_trainer(config, steps=1, device=torch.device("cpu"), keys=keys)
    assert len(set(by_name(keys).values())) == len(STREAMS)
    assert trainer.noise is not None
    assert trainer.sampler is not None
    assert torch.equal(trainer.noise.at(1).standard_normal(LIKE), first(keys.noise, 9))
    size, rate = config.data.facts.train_size, config.privacy.event.sampling_rate
    twin = KeyedSampler(
        sampler, size=size, batch=config.privacy.batch_size, key=keys.sampler, rate=rate
    )
    assert trainer.sampler.draw(1).tolist() == twin.draw(1).tolist()
    if seed is not None:
        assert keys == make_keys(seed)


@pytest.mark.privacy
def test_a_stream_without_a_key_cannot_draw() -> None:
    """As at the ranks that have no secret."""
    uses: list[Callable[[], Any]] = [
        lambda: Noise(b""),
        lambda: generator(b""),
        lambda: KeyedSampler("poisson", size=5, batch=2, key=b""),
        lambda: LayerDraws(b"").words(1, np.arange(2), 1),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="key"):
            use()


@pytest.mark.privacy
def test_keys_are_not_shown() -> None:
    keys = make_keys(3, base=7)
    assert not any(
        key.hex() in repr(keys) or repr(key) in repr(keys) for key in by_name(keys).values()
    )
    assert replace(keys, noise=b"") != keys


@pytest.mark.privacy
def test_the_key_stream_is_that_of_the_standard() -> None:
    """NIST SP 800-38A, F.5.5; and each block is the cipher of its place, step by step."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    cipher = Cipher(algorithms.AES256(key), modes.ECB())
    block = bytes.fromhex("0bdf7df1591716335e9a8b15c860c502")
    assert cipher.encryptor().update(counter) == block
    for step in (0, 1, 2**40):
        places = b"".join(((step << 64) + place).to_bytes(16, "big") for place in range(4))
        words = KeyStream(key).at(step).generate_state(8, np.uint64)
        assert words.tobytes() == cipher.encryptor().update(places)


# Draws.


@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_draws_are_like_what_they_are_for(
    dtype: torch.dtype, shape: tuple[int, ...], is_secure: bool
) -> None:
    like = torch.full(shape, 3.0, dtype=dtype)
    drawn = Noise(a_key(1), secure=is_secure).at(1).standard_normal(like)
    assert (drawn.shape, drawn.dtype, drawn.device) == (like.shape, dtype, like.device)
    assert (like == 3).all()


@pytest.mark.privacy
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_are_as_heavy_as_they_should_be(dtype: torch.dtype, is_secure: bool) -> None:
    """Counts beyond 3, 4 and 5; short tails are what an adversary looks for."""
    count = 10_000_000
    source = Noise(a_key(0), secure=is_secure).at(1)
    drawn = source.standard_normal(torch.empty(count, dtype=dtype)).abs()
    for reach in (3, 4, 5):
        expected = 2 * count * float(norm.sf(reach))
        assert abs(int((drawn > reach).sum()) - expected) < 4 * expected**0.5


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tails_do_not_end_at_5_77(dtype: torch.dtype) -> None:
    """torch.randn's do, on the CPU in float32. A draw that far takes a billion, so: the words."""
    turn = torch.int64 if dtype == torch.float64 else torch.int32

    def draw(word: int) -> list[float]:
        out = torch.empty(1, 2, dtype=dtype)
        box_muller(torch.tensor([[word]]), torch.zeros(1, 1, dtype=turn), out)
        drawn: list[float] = out[0].tolist()
        return drawn

    for word in (0, -1):
        assert draw(word) == pytest.approx([9.4192, 0.0], abs=1e-4)
    for word in (1, -2):  # and close together there
        assert draw(word) == pytest.approx([(-2 * np.log(3 * 2.0**-64)) ** 0.5, 0.0], rel=1e-6)
    for word in (-(2**63), 2**63 - 1):
        assert draw(word) == [0, 0]
    for word in (2**62, -(2**62)):
        assert draw(word)[0] == pytest.approx((2 * np.log(2)) ** 0.5, rel=1e-6)


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_radii_are_as_fine_as_large_ones(dtype: torch.dtype) -> None:
    """With a logarithm in float32, few radii below 1 could occur: who knew a sum would see them."""
    turn = torch.int64 if dtype == torch.float64 else torch.int32
    for bits in (24, 30, 40, 50):  # 1 - |u| is between half and all of 2^(1 - bits)
        below = (torch.arange(512) + 512) * 2 ** (63 - bits - 9)
        words, shares = (2**63 - 1 - below)[None], (below + 0.5).double() * 2.0**-63
        out = torch.empty(1, 2 * words.numel(), dtype=dtype)
        box_muller(words, torch.zeros_like(words, dtype=turn), out)
        radii = out[0, : words.numel()].double()
        exact = (-2 * np.log1p(-shares.numpy())) ** 0.5
        rtol = max(2.0 ** (bits - 52), 1e-6 if dtype == torch.float32 else 0)
        np.testing.assert_allclose(radii, exact, rtol=rtol)


def key_stream(key: bytes, step: int, part: int) -> CipherContext:
    """AES-256 in counter mode, from the first block of a part of a step."""
    counter = modes.CTR((step * 2**64 + part * 2**20).to_bytes(16, "big"))
    return Cipher(algorithms.AES256(key), counter).encryptor()


def normals(
    stream: CipherContext, count: int, turn: type[np.int32 | np.int64]
) -> NDArray[np.float64]:
    """What the next whole blocks of a key stream make: radii from words, angles from turns."""
    pairs = (count + 1) // 2

    def shares(kind: type[np.int32 | np.int64]) -> NDArray[np.float64]:
        """From -1/2 to 1/2, in the places of the middle of each word."""
        size = kind().itemsize
        drawn: NDArray[Any] = np.frombuffer(stream.update(bytes(-(-size * pairs // 16) * 16)), kind)
        return drawn[:pairs] * 2.0 ** (-8 * size)

    radius = np.sqrt(-2 * np.log(np.abs(2 * shares(np.int64) + 2.0**-64)))
    angle = 2 * np.pi * shares(turn)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def secure(stream: CipherContext, count: int) -> NDArray[np.float64]:
    """Normals, and uniform numbers 2^-16 wide from the words that follow."""
    drawn = normals(stream, count, np.int64)
    words = np.frombuffer(stream.update(bytes(-(-4 * count // 16) * 16)), np.int32)[:count]
    return drawn + words * 2.0**-48


@pytest.mark.privacy
def test_the_key_stream_is_aes_256_in_counter_mode() -> None:
    """Word for word: nothing of it is used twice, across draws of any size."""
    run = Noise(a_key(7))
    for step in (1, 2, 3, 2**40):
        source = run.at(step)
        for part, count in enumerate((1, 5, 2, 64, 3)):
            stream = key_stream(a_key(7), step, part)
            expected = normals(stream, count, np.int32)
            drawn = source.standard_normal(torch.empty(count))
            np.testing.assert_allclose(drawn, expected, atol=2e-6)


@pytest.mark.privacy
@pytest.mark.parametrize("step", [0, 1, 2, 2**32 - 1, 2**40])
def test_steps_have_no_key_stream_in_common(step: int) -> None:
    """A step has the counters from t 2^64 on: 2^68 bytes, more than any step can use."""
    keys, key = KeyStream(a_key(7)), a_key(7)

    def at(counter: int) -> bytes:
        mode = modes.CTR(counter.to_bytes(16, "big"))
        return Cipher(algorithms.AES256(key), mode).encryptor().update(bytes(48))

    stretch = keys.at(step)
    for place in (0, 3):  # of the second stretch, behind the blocks of the first
        assert stretch.generate_state(6, np.uint64).tobytes() == at(step * 2**64 + place)
    following = keys.at(step + 1)
    assert following.generate_state(6, np.uint64).tobytes() == at((step + 1) * 2**64)


@pytest.mark.privacy
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pairs", [50, 1 << 10])
def test_parts_of_a_draw_have_key_streams_of_their_own(
    is_secure: bool, dtype: torch.dtype, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none begins within another, at their full size."""
    monkeypatch.setattr(noise, "PAIRS", pairs)
    kind, count = np.int64 if is_secure or dtype == torch.float64 else np.int32, 2 * pairs
    like = torch.empty(2 * count + 5, dtype=dtype)
    drawn = Noise(a_key(7), secure=is_secure).at(3).standard_normal(like)
    for part, found in enumerate([drawn[:count], drawn[count : 2 * count], drawn[2 * count :]]):
        stream = key_stream(a_key(7), 3, part)
        expected = secure(stream, len(found)) if is_secure else normals(stream, len(found), kind)
        atol = 4e-6 if dtype == torch.float32 else 1e-13
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert PAIRS * (8 + 8 + 2 * 4) / 16 + 3 <= 2**PART_BITS


@pytest.mark.privacy
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 7, 200, 605, 1600, 1603])
def test_draws_on_a_device_are_those_of_the_cpu(
    is_secure: bool, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts at a time are computed there. Run here, with a device that is not the CPU."""
    monkeypatch.setattr(noise, "PAIRS", 100)
    like = torch.empty(count, 1, dtype=dtype)
    alone = [Noise(a_key(7), secure=is_secure).at(3) for _ in range(2)]
    monkeypatch.setattr(noise, "PARTS_ON_DEVICE", 3)
    for _ in range(2):
        together = alone[1].standard_normal(like, noise.PARTS_ON_DEVICE)
        assert (together.shape, together.dtype) == (like.shape, dtype)
        assert torch.equal(together, alone[0].standard_normal(like))


@pytest.mark.privacy
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_do_not_depend_on_the_number_of_threads(is_secure: bool, dtype: torch.dtype) -> None:
    """Bit for bit, whatever shares a thread gets: a seeded run can be repeated."""
    threads, like, drawn = torch.get_num_threads(), torch.empty(2 * PAIRS + 77, dtype=dtype), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            drawn.append(Noise(a_key(7), secure=is_secure).at(3).standard_normal(like))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.privacy
@either_source
def test_the_noise_of_a_step_is_handed_out_once(is_secure: bool) -> None:
    """The same noise added to two sums is gone from their difference."""
    noise = Noise(a_key(1), secure=is_secure)
    seen = [noise.at(step).standard_normal(torch.zeros(1000)) for step in (1, 2, 3, 10)]
    for x, y in combinations(seen, 2):
        assert abs(correlation(x, y)) < 0.15
    for step in (10, 9, 1):
        with pytest.raises(ValueError, match=f"step {step} is not after step 10"):
            noise.at(step)
    again = Noise(a_key(1), secure=is_secure)
    assert torch.equal(again.at(10).standard_normal(torch.zeros(1000)), seen[-1])


@pytest.mark.privacy
def test_draws_share_neither_memory_nor_key_stream() -> None:
    noise = Noise(a_key(1))
    one = noise.at(1).standard_normal(torch.zeros(5000))
    kept = one.clone()
    other = noise.at(2).standard_normal(torch.zeros(5000))
    assert torch.equal(one, kept)
    assert abs(correlation(one, other)) < 0.08


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_secure_draw_is_a_normal_and_a_uniform_number(dtype: torch.dtype) -> None:
    """In float64, each from a stretch of the key stream of its own."""
    source = Noise(a_key(7), secure=True).at(1)
    for part, count in enumerate((1, 5, 2, 64, 3)):
        expected = secure(key_stream(a_key(7), 1, part), count)
        drawn = source.standard_normal(torch.empty(count, dtype=dtype))
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        np.testing.assert_allclose(drawn, expected, rtol=0, atol=tolerance)


def off_the_lattice(draws: torch.Tensor) -> NDArray[np.float64]:
    """How far the u behind each pair is from the nearest that can occur, in shares of the gap."""
    released = torch.round(draws / GRID) * GRID  # as the mechanism does
    radius = released.view(2, -1).square().sum(0).numpy()
    return np.mod(np.exp(-radius / 2) * 2.0**63, 1)


@pytest.mark.privacy
def test_secure_draws_hide_the_words_that_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack of Holohan and Braghin, where it is easiest: radii far out have wide gaps.

    Both normals of a pair reveal its u. Who knows the rest of a sum would see which of two sums
    leaves noise that can occur. The remainder of u must be uniform.
    """
    count, kinds = 20_000, list[Any]()

    def far_out(streams: Any, count: int, kind: Any) -> Any:
        words = rows_of(streams, count, kind)
        kinds.append(kind)
        return words >> 40 if len(kinds) == 1 else words

    monkeypatch.setattr(noise, "rows_of", far_out)
    like = torch.empty(2 * count, dtype=torch.float64)
    hidden = Noise(a_key(3), secure=True).at(1).standard_normal(like)
    kinds.clear()
    plain = Noise(a_key(3)).at(1).standard_normal(like)
    assert (np.abs(off_the_lattice(plain) - 0.5) < 0.01).all(), "the attack works without it"
    assert kstest(off_the_lattice(hidden), "uniform").pvalue > 1e-3
    moved = (hidden - plain).numpy()
    assert kstest(moved, "uniform", (-noise.DITHER / 2, noise.DITHER)).pvalue > 1e-3


@pytest.mark.privacy
@either_source
def test_neighbouring_draws_have_nothing_in_common(is_secure: bool) -> None:
    """The two normals of a pair share a radius: neither they nor their squares correlate."""
    count = 1_000_000
    z = Noise(a_key(0), secure=is_secure).at(1).standard_normal(torch.empty(2 * count))
    for power in (1, 2, 3):
        x, y = (half.double() ** power for half in (z[:count], z[count:]))
        assert abs(correlation(x, y)) < 4 / count**0.5
    for lag in (1, 2, 100):
        assert abs(correlation(z[:-lag], z[lag:])) < 4 / count**0.5


@pytest.mark.privacy
@either_source
def test_no_draw_comes_twice(is_secure: bool) -> None:
    source = Noise(a_key(0), secure=is_secure).at(1)
    x, y = (source.standard_normal(torch.zeros(1000)) for _ in range(2))
    assert abs(correlation(x, y)) < 0.15


# Layers such as dropout.


def drawn_by_layers(key: bytes, step: int = 1, rank: int = 0) -> torch.Tensor:
    with LayerDraws(key, rank).of(step):
        return torch.rand(2000)


@pytest.mark.privacy
def test_layers_draw_from_more_than_the_32_bits_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of 2^32 seeds an attacker could try them all."""
    before = torch.get_rng_state()
    draws = [drawn_by_layers(a_key(5)), drawn_by_layers(a_key(5), 2), drawn_by_layers(a_key(6))]
    draws.append(drawn_by_layers(a_key(5), rank=1))
    assert torch.equal(draws[0], drawn_by_layers(a_key(5)))
    for one, other in combinations(draws, 2):
        assert not torch.isin(one, other).any() or (one == other).float().mean() < 0.01
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(torch, "manual_seed", lambda _: torch.default_generator.manual_seed(7))
    assert torch.equal(drawn_by_layers(a_key(5)), draws[0])
    assert kstest(draws[0].numpy(), "uniform").pvalue > 1e-3


def test_the_state_of_torchs_generator_is_laid_out_as_assumed() -> None:
    """Words of mt19937 as Matsumoto and Nishimura initialise them."""
    torch.manual_seed(12345)
    words = torch.get_rng_state()[MT_BEGIN:].view(torch.int64)[:MT_WORDS].tolist()
    expected = [12345]
    for i in range(1, MT_WORDS):
        expected.append((1812433253 * (expected[-1] ^ (expected[-1] >> 30)) + i) % 2**32)
    assert words == expected
