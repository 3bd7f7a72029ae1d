"""Random bits from a cipher: nobody without the key can tell them from chance."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

AES_BLOCK = 16
#: Bytes that the cipher asks for and may not use, behind what is filled.
SPARE = 2 * AES_BLOCK
#: Key, counter and the first block of the key stream: NIST SP 800-38A, F.5.5.
KNOWN = tuple(
    bytes.fromhex(text)
    for text in (
        "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        "0bdf7df1591716335e9a8b15c860c502",
    )
)


class Stateful(Protocol):
    """Random draws whose whole state can be saved, which is as secret as the draws."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class Derived:
    """Random draws whose whole state is that of their source.

    Args:
        source: of the randomness.
    """

    def __init__(self, source: Stateful) -> None:
        self._root = source

    def state(self) -> dict[str, Any]:
        """Return the state of the source as JSON values."""
        return self._root.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._root.restore(state)


def cipher_works() -> bool:
    """Whether the cipher gives a published block, where it can be used at all."""
    key, counter, block = KNOWN
    return Cipher(AES256(key), CTR(counter)).encryptor().update(bytes(AES_BLOCK)) == block


class KeyStream:
    """The key stream of AES-256 in counter mode. None of it is used twice.

    Args:
        seed: its 256 bits become the key: the key stream is unpredictable to whoever lacks it.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._key = seed.generate_state(4, np.uint64).astype("<u8").tobytes()
        self._zeros = memoryview(b"")
        self._go_to(0)

    def fill(self, out: NDArray[Any], count: int) -> None:
        """Overwrite the first numbers by the next bytes. What is left of a block is thrown away.

        Args:
            out: shape (numbers,), contiguous; :data:`SPARE` bytes longer than what is filled, and
                those are spoilt.
            count: of the numbers to fill.
        """
        blocks = -(-count * out.itemsize // AES_BLOCK)
        size = blocks * AES_BLOCK
        if len(self._zeros) < size:
            self._zeros = memoryview(bytes(size))
        self._stream.update_into(self._zeros[:size], out.view(np.uint8).data[: size + AES_BLOCK])
        self._block += blocks

    def _go_to(self, block: int) -> None:
        counter = block.to_bytes(AES_BLOCK, "big")
        self._stream = Cipher(AES256(self._key), CTR(counter)).encryptor()
        self._block = block

    def state(self) -> dict[str, Any]:
        """Key and position as JSON values, as secret as what is made of the bits."""
        return {"generator": "AES-256-CTR", "key": self._key.hex(), "block": self._block}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._key = bytes.fromhex(state["key"])
        self._go_to(state["block"])
