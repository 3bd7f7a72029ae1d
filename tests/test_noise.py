"""Keys of a run, and noise that is a function of a key and the step."""

import importlib
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy.stats import kstest

from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.dp.mechanism import GRID
from dpmac_cli.randomness import layers, noise
from dpmac_cli.randomness.keystream import (
    DITHER,
    STREAMS,
    Keys,
    KeyStream,
    Stretch,
    generator,
    make_keys,
)
from dpmac_cli.randomness.layers import MT_BEGIN, MT_WORDS, LayerDraws, seed_all
from dpmac_cli.randomness.noise import LANES, PAIRS, Noise, box_muller
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import run_trainer
from tests.helpers import a_key

either_source = pytest.mark.parametrize("is_secure", [False, True], ids=["seeded", "secure"])
LIKE = torch.zeros(9)
#: The module of the kernel while it is interpreted.
KERNEL: Any = None


def first(key: bytes, count: int = 1000) -> torch.Tensor:
    return Noise(key).at(1).standard_normal(torch.zeros(count))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def by_name(keys: Keys) -> dict[str, bytes]:
    return {name: getattr(keys, name) for name in STREAMS}


# Keys.


@pytest.mark.promise("noise")
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


@pytest.mark.promise("noise")
@pytest.mark.parametrize("seed", [0, 5, 2**63])
def test_a_seed_repeats_and_its_streams_differ(seed: int) -> None:
    assert make_keys(seed) == make_keys(seed)
    streams = by_name(make_keys(seed))
    for place, key in enumerate(streams.values()):
        words = np.random.SeedSequence(seed, spawn_key=(place, 0)).generate_state(4, np.uint64)
        assert key == words.tobytes()  # 256 bits
    assert len({*streams.values()}) == len(STREAMS)


@pytest.mark.promise("noise")
def test_every_bit_of_a_key_matters() -> None:
    """In the generators of numpy and torch too, and the place that they are for."""
    key = a_key(1)
    others = [bytes(b ^ (1 << i % 8) if i // 8 == j else b for j, b in enumerate(key))
              for i in range(0, 256, 7)]  # fmt: skip
    steps = (0, 1, 2, 2**40)
    drawn = [generator(each).integers(0, 2**62, 4) for each in (key, *others)]
    drawn += [generator(key, step).integers(0, 2**62, 4) for step in steps[1:]]
    assert len({tuple(words.tolist()) for words in drawn}) == len(others) + len(steps)


@pytest.mark.promise("noise")
@pytest.mark.parametrize(("seed", "sampler"), [*zip((5, None), SAMPLERS, strict=True)])
def test_a_run_gives_sampler_and_noise_a_stream_each(seed: int | None, sampler: str) -> None:
    config = resolve({"dataset": "digits", "sigma": 6, "seed": seed, "sampler": sampler}).plan
    keys = make_keys(seed)
    trainer = run_trainer(config, steps=1, keys=keys)
    assert len(set(by_name(keys).values())) == len(STREAMS)
    assert trainer.noise is not None
    assert trainer.sampler is not None
    assert torch.equal(trainer.noise.at(1).standard_normal(LIKE), first(keys.noise, 9))
    assert config.event.sampler == sampler
    twin = KeyedSampler(config.event, size=config.facts.train_size, key=keys.sampler)
    assert trainer.sampler.draw(1).tolist() == twin.draw(1).tolist()
    if seed is not None:
        assert keys == make_keys(seed)


@pytest.mark.promise("noise")
def test_a_stream_without_a_key_cannot_draw() -> None:
    """As at the ranks that have no secret."""
    uses: list[Callable[[], Any]] = [
        lambda: Noise(b""),
        lambda: generator(b""),
        lambda: KeyedSampler(TrainingEvent(0.4, 1.0, 3), size=5, key=b""),
        lambda: LayerDraws(b"").words(1, np.arange(2), 1),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="key"):
            use()


@pytest.mark.promise("noise")
def test_keys_are_not_shown() -> None:
    keys = make_keys(3, base=7)
    assert not any(
        key.hex() in repr(keys) or repr(key) in repr(keys) for key in by_name(keys).values()
    )
    assert replace(keys, noise=b"") != keys


@pytest.mark.promise("noise")
def test_the_key_stream_is_that_of_the_standard() -> None:
    """RFC 8439, section 2.3.2, block 1."""
    nonce = bytes.fromhex("000000090000004a00000000")
    step, lane = (int.from_bytes(part, "little") for part in (nonce[:8], nonce[8:]))
    words = KeyStream(bytes(range(32))).at(step, lane).generate_state(32, np.uint32)[16:]
    assert " ".join(f"{word:08x}" for word in words) == (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )


@pytest.mark.promise("noise")
@pytest.mark.parametrize("step", [0, 1, 2**32 - 1, 2**40])
def test_a_lane_of_a_step_has_a_key_stream_of_its_own(step: int) -> None:
    """Word for word and once: the nonce is the step and the lane, the counter begins at 0."""
    keys = KeyStream(a_key(7))
    for lane in (0, 1, 4, 2**32 - 1):
        cipher, stretch = key_stream(a_key(7), step, lane), keys.at(step, lane)
        for _ in range(2):
            assert stretch.generate_state(20, np.uint64).tobytes() == cipher(192)[:160]


# Draws.


@pytest.mark.promise("noise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tails_do_not_end_at_5_77(dtype: torch.dtype) -> None:
    """torch.randn's do, on the CPU in float32. A draw that far takes a billion, so: the words."""
    turn = torch.int64 if dtype == torch.float64 else torch.int32

    def draw(word: int) -> list[float]:
        out = torch.empty(2, dtype=dtype)
        box_muller(torch.tensor([word]), torch.zeros(1, dtype=turn), out[:1], out[1:])
        drawn: list[float] = out.tolist()
        return drawn

    for word in (0, -1):
        assert draw(word) == pytest.approx([9.4192, 0.0], abs=1e-4)
    for word in (1, -2):  # and close together there
        assert draw(word) == pytest.approx([(-2 * np.log(3 * 2.0**-64)) ** 0.5, 0.0], rel=1e-6)
    for word in (-(2**63), 2**63 - 1):
        assert draw(word) == [0, 0]
    for word in (2**62, -(2**62)):
        assert draw(word)[0] == pytest.approx((2 * np.log(2)) ** 0.5, rel=1e-6)


@pytest.mark.promise("noise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_radii_are_as_fine_as_large_ones(dtype: torch.dtype) -> None:
    """With a logarithm in float32, few radii below 1 could occur: who knew a sum would see them."""
    turn = torch.int64 if dtype == torch.float64 else torch.int32
    for bits in (24, 30, 40, 50):  # 1 - |u| is between half and all of 2^(1 - bits)
        below = (torch.arange(512) + 512) * 2 ** (63 - bits - 9)
        words, shares = 2**63 - 1 - below, (below + 0.5).double() * 2.0**-63
        out = torch.empty(2, len(words), dtype=dtype)
        box_muller(words, torch.zeros_like(words, dtype=turn), *out)
        exact = (-2 * np.log1p(-shares.numpy())) ** 0.5
        rtol = max(2.0 ** (bits - 52), 1e-6 if dtype == torch.float32 else 0)
        np.testing.assert_allclose(out[0].double(), exact, rtol=rtol)


@pytest.mark.promise("noise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_avx512", [False, True])
def test_cosines_and_sines_are_those_of_the_angles(
    dtype: torch.dtype, has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every processor, and where one of them is 0 or a tangent is not finite."""
    monkeypatch.setattr(noise, "_has_avx512", lambda: has_avx512)
    places = torch.linspace(-np.pi, np.pi, 4097, dtype=torch.float64)
    angles = torch.cat([places, places[::512].float().double(), torch.tensor([-0.0, 1e-300])])
    angles = angles.to(dtype)
    cosines, exact = torch.empty_like(angles), angles.double().clone().numpy()
    sines = noise.circle_(angles, cosines)
    atol = 4e-7 if dtype == torch.float32 else 5e-16
    np.testing.assert_allclose(cosines, np.cos(exact), rtol=0, atol=atol)
    np.testing.assert_allclose(sines, np.sin(exact), rtol=0, atol=atol)


def key_stream(key: bytes, step: int, lane: int) -> Callable[[int], bytes]:
    """Return what gives the next bytes of a lane of a step, computed as RFC 8439 says."""
    nonce = bytes(4) + step.to_bytes(8, "little") + lane.to_bytes(4, "little")
    cipher = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor()
    return lambda size: cipher.update(bytes(size))


def expected(
    step: int, draw: int, count: int, *, wide: bool = False, secure: bool = False
) -> NDArray[np.float64]:
    """Return a draw of the key 7: radii, angles and dither from a lane each."""
    pairs = (count + 1) // 2

    def shares(lane: int, kind: type[np.int32 | np.int64]) -> NDArray[np.float64]:
        """From -1/2 to 1/2, in the places of the middle of each word."""
        size = kind().itemsize
        stream = key_stream(a_key(7), step, LANES * draw + lane)
        drawn: NDArray[Any] = np.frombuffer(stream(size * pairs), kind)
        return drawn * 2.0 ** (-8 * size)

    radius = np.sqrt(-2 * np.log(np.abs(2 * shares(0, np.int64) + 2.0**-64)))
    angle = 2 * np.pi * shares(1, np.int64 if wide or secure else np.int32)
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    if secure:
        drawn += np.concatenate([shares(lane, np.int32) for lane in (2, 3)]) * 2.0**-16
    return drawn[:count]


@pytest.mark.promise("noise")
@either_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pairs", [16, PAIRS])
def test_draws_are_those_of_their_key_streams(
    is_secure: bool, dtype: torch.dtype, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is used twice, in draws of any size, which may be computed piece by piece."""
    monkeypatch.setattr(noise, "PAIRS", pairs)
    run, wide = Noise(a_key(7), secure=is_secure), dtype == torch.float64
    atol = 1e-13 if wide else 4e-6
    for step in (1, 2, 3, 2**40):
        source = run.at(step)
        for draw, count in enumerate((1, 5, 2, 0, 64, 65, 3, 200)):
            drawn = source.standard_normal(torch.empty(count, dtype=dtype))
            found = expected(step, draw, count, wide=wide, secure=is_secure)
            np.testing.assert_allclose(drawn, found, rtol=0, atol=atol)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel of GPUs, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("dpmac_cli.randomness.kernel", None)
    found = importlib.import_module("dpmac_cli.randomness.kernel")
    monkeypatch.setattr(sys.modules[__name__], "KERNEL", found)
    yield found
    del sys.modules["dpmac_cli.randomness.kernel"]


@pytest.mark.promise("noise")
@pytest.mark.parametrize(
    ("dtype", "is_secure", "count"),
    [(torch.float32, False, 2079), (torch.float32, True, 33), (torch.float64, True, 7)],
)
def test_draws_on_a_gpu_are_those_of_the_cpu(
    dtype: torch.dtype, is_secure: bool, count: int, kernel: ModuleType
) -> None:
    """Secure ones in float64 to the last bits but one, so the words are the same in every lane."""
    run = Noise(a_key(7), secure=is_secure).at(2**40 + 1)
    run.standard_normal(torch.zeros(1))  # the first draw of the step
    found = torch.full((count,), torch.nan, dtype=dtype)
    kernel.fill_normals(found, a_key(7), 2**40 + 1, LANES, secure=is_secure)
    rounded = 1e-6 if dtype == torch.float32 else 1e-15
    torch.testing.assert_close(found, run.standard_normal(found), rtol=0, atol=rounded)


def store_words(narrow: Any, wide: Any, seed: Any) -> None:
    """Run in Triton's interpreter, which knows global names only."""
    places, groups = KERNEL.tl.arange(0, 256), KERNEL.tl.arange(0, 16).to(KERNEL.tl.uint32)
    KERNEL.tl.store(narrow + places, KERNEL._narrow(seed, 1, groups))
    KERNEL.tl.store(wide + places, KERNEL._wide(seed, 2, groups))


@pytest.mark.promise("noise")
def test_words_on_a_gpu_are_those_of_the_cpu(kernel: Any) -> None:
    step, lane = 2**40 + 5, 2**31 + 4
    seed = a_key(7) + step.to_bytes(8, "little") + lane.to_bytes(4, "little")
    words = torch.from_numpy(np.frombuffer(seed, np.int32).copy())
    narrow, wide = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int64)
    kernel.triton.jit(store_words)[(1,)](narrow, wide, words)
    assert narrow.numpy().tobytes() == key_stream(a_key(7), step, lane + 1)(1024)
    assert wide.numpy().tobytes() == key_stream(a_key(7), step, lane + 2)(2048)


#: Compiles the kernel, in a process in which Triton has interpreted nothing.
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpmac_cli.randomness import kernel

wide = {wide}
chosen = dict(WIDE=wide, SECURE=wide)
signature = dict(out="*fp64" if wide else "*fp32", seed="*i32", n="i32")
signature |= dict.fromkeys(chosen, "constexpr")
source = ASTSource(fn=kernel._fill, signature=signature, constexprs=chosen)
assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.long
@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_compiles_without_a_gpu(wide: bool) -> None:
    """For an H100; PTX, the assembler's input, for every later one."""
    pytest.importorskip("triton")
    program = COMPILED.format(wide=wide)
    compiled = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr


def test_without_triton_the_words_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dpmac_cli.randomness.kernel", None)
    with pytest.warns(UserWarning, match="Install triton and a C compiler"):
        assert noise.kernel.__wrapped__() is None


@pytest.mark.promise("noise")
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


@pytest.mark.promise("noise")
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


def off_the_lattice(draws: torch.Tensor) -> NDArray[np.float64]:
    """How far the u behind each pair is from the nearest that can occur, in shares of the gap."""
    released = torch.round(draws / GRID) * GRID  # as the mechanism does
    radius = released.view(2, -1).square().sum(0).numpy()
    return np.mod(np.exp(-radius / 2) * 2.0**63, 1)


@pytest.mark.promise("noise")
def test_secure_draws_hide_the_words_that_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack of Holohan and Braghin, where it is easiest: radii far out have wide gaps.

    Both normals of a pair reveal its u. Who knows the rest of a sum would see which of two sums
    leaves noise that can occur. The remainder of u must be uniform.
    """
    count, given, key = 20_000, list[Any](), a_key(3)
    words = Stretch.generate_state

    def far_out(stretch: Stretch, count: int, kind: Any) -> Any:
        given.append(stretch)
        return words(stretch, count, kind) >> (40 if len(given) == 1 else 0)

    monkeypatch.setattr(Stretch, "generate_state", far_out)
    like = torch.empty(2 * count, dtype=torch.float64)
    hidden = Noise(key, secure=True).at(1).standard_normal(like)
    given.clear()
    plain = Noise(key).at(1).standard_normal(like)
    assert (np.abs(off_the_lattice(plain) - 0.5) < 0.01).all(), "the attack works without it"
    assert kstest(off_the_lattice(hidden), "uniform").pvalue > 1e-3
    moved = (hidden - plain).numpy()
    assert kstest(moved, "uniform", (-DITHER / 2, DITHER)).pvalue > 1e-3


# Layers such as dropout.


def drawn_by_layers(key: bytes, step: int = 1, rank: int = 0) -> torch.Tensor:
    with LayerDraws(key, rank).of(step):
        return torch.rand(2000)


@pytest.mark.promise("noise")
def test_layers_draw_from_more_than_the_32_bits_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of 2^32 seeds an attacker could try them all."""
    before = torch.get_rng_state()
    draws = [drawn_by_layers(a_key(5)), drawn_by_layers(a_key(5), 2), drawn_by_layers(a_key(6))]
    draws.append(drawn_by_layers(a_key(5), rank=1))
    assert torch.equal(draws[0], drawn_by_layers(a_key(5)))
    for one, other in combinations(draws, 2):
        assert not torch.isin(one, other).any() or (one == other).float().mean() < 0.01
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(layers, "_seed_torch", lambda *_: torch.default_generator.manual_seed(7))
    assert torch.equal(drawn_by_layers(a_key(5)), draws[0])
    assert kstest(draws[0].numpy(), "uniform").pvalue > 1e-3


#: The global generators, and 20 draws of each.
GENERATORS: dict[str, Callable[[], list[float]]] = {
    "torch": lambda: torch.rand(20).tolist(),
    "numpy": lambda: np.random.rand(20).tolist(),
    "python": lambda: [random.random() for _ in range(20)],
}


@pytest.mark.promise("noise")
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_step_draws_by_its_key_and_leaves_the_generators_of_the_program(kind: str) -> None:
    """Else what a program draws and shows after a step would be a function of the secret key."""
    draw, found = GENERATORS[kind], list[list[float]]()
    for seed, key, step in ((3, 5, 1), (4, 5, 1), (4, 5, 2), (4, 6, 1)):
        seed_all(seed)
        expected = draw()
        seed_all(seed)
        with LayerDraws(a_key(key)).of(step):
            found.append(draw())
        assert draw() == expected
    first, again, *others = found
    assert first == again
    assert first not in others


@pytest.mark.promise("noise")
def test_views_and_the_layers_of_every_rank_have_key_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes, at, key = list[int](), KeyStream.at, a_key(5)

    def noted(keys: KeyStream, step: int, lane: int = 0) -> Any:
        lanes.append(lane)
        return at(keys, step, lane)

    monkeypatch.setattr(KeyStream, "at", noted)
    for rank in range(3):
        drawn_by_layers(key, rank=rank)
    LayerDraws(key).words(1, np.arange(2), 3)
    assert len(lanes) == len(set(lanes)) == 4


def test_the_state_of_torchs_generator_is_laid_out_as_assumed() -> None:
    """Words of mt19937 as Matsumoto and Nishimura initialise them."""
    torch.manual_seed(12345)
    words = torch.get_rng_state()[MT_BEGIN:].view(torch.int64)[:MT_WORDS].tolist()
    expected = [12345]
    for i in range(1, MT_WORDS):
        expected.append((1812433253 * (expected[-1] ^ (expected[-1] >> 30)) + i) % 2**32)
    assert words == expected
