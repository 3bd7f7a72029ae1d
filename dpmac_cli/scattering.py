"""Wavelet scattering: fixed, public features of images (Bruna and Mallat 2013, arXiv 1203.1514).

Two layers of Morlet wavelets and modulus, averaged over 2^J pixels. Nothing is learnt, so features
cost no privacy; a linear classifier on them beats small networks that are trained end to end
privately (Tramer and Boneh 2021, arXiv 2011.11660).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

#: Octaves J and angles L, as the paper above has them.
OCTAVES, ANGLES = 2, 8
#: How many copies on each side a filter is wrapped round from: beyond, it is 0 to rounding.
COPIES = 2


def paths(octaves: int = OCTAVES, angles: int = ANGLES) -> int:
    """Features a channel and place: 81 of two octaves and eight angles."""
    return 1 + octaves * angles + angles**2 * octaves * (octaves - 1) // 2


@dataclass(frozen=True)
class _Wavelet:
    """A band-pass filter.

    Attributes:
        octave: j.
        spectrum: real Fourier transform at the resolutions 0 ... j, each (height, width) / 2^r.
    """

    octave: int
    spectrum: Sequence[Tensor]


class Scattering:
    """Features of images of one size.

    Args:
        height, width: of the images; multiples of 2^J.
        dtype: float32, or float64.
        octaves, angles: J and L.
    """

    def __init__(
        self,
        height: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        octaves: int = OCTAVES,
        angles: int = ANGLES,
    ) -> None:
        scale = 2**octaves
        if height % scale or width % scale:
            raise ValueError(f"{height} x {width} is no multiple of {scale}")
        self.octaves = octaves
        shape = (height + 2 * scale, width + 2 * scale)  # reflected at the borders
        tilts = [(angles // 2 - 1 - k) * math.pi / angles for k in range(angles)]
        self._wavelets = [
            _Wavelet(j, _resolutions(_morlet(shape, j, tilt, angles), j, dtype))
            for j in range(octaves)
            for tilt in tilts
        ]
        envelope = np.fft.fft2(_in_space(shape, octaves - 1, 0.0, 0.0, 1.0)).real
        self._average = _resolutions(envelope, octaves - 1, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Features of images.

        Args:
            x: shape (images, channels, height, width), in the dtype of the filters.

        Returns:
            Shape (images, channels * paths, height / 2^J, width / 2^J).
        """
        images, _, height, width = x.shape
        scale = 2**self.octaves
        padded = pad(x, [scale] * 4, mode="reflect")
        signal = torch.fft.fft2(padded.reshape(-1, *padded.shape[-2:]))
        found = [self._averaged(signal, 0)]
        second = []
        for one in self._wavelets:
            first = self._modulus(signal, one, 0)
            found.append(self._averaged(first, one.octave))
            for other in self._wavelets:
                if other.octave > one.octave:
                    twice = self._modulus(first, other, one.octave)
                    second.append(self._averaged(twice, other.octave))
        stacked = torch.stack([*found, *second], 1)
        features: Tensor = stacked.view(images, -1, height // scale, width // scale)
        return features

    def _modulus(self, spectrum: Tensor, wavelet: _Wavelet, resolution: int) -> Tensor:
        """The spectrum of |signal * wavelet|, at the wavelet's resolution."""
        factor = 2 ** (wavelet.octave - resolution)
        filtered = _folded(spectrum * wavelet.spectrum[resolution], factor)
        modulus: Tensor = torch.fft.fft2(torch.fft.ifft2(filtered).abs())
        return modulus

    def _averaged(self, spectrum: Tensor, resolution: int) -> Tensor:
        """The signal, smoothed to one value for 2^J pixels, without its padding."""
        smooth = _folded(spectrum * self._average[resolution], 2 ** (self.octaves - resolution))
        values: Tensor = torch.fft.ifft2(smooth).real
        return values[:, 1:-1, 1:-1]


def _folded(spectrum: Tensor, factor: int) -> Tensor:
    """The spectrum of a signal of which every ``factor``-th value is kept."""
    if factor == 1:
        return spectrum
    *rest, height, width = spectrum.shape
    parts = spectrum.view(*rest, factor, height // factor, factor, width // factor)
    return parts.mean((-4, -2))


def _resolutions(spectrum: NDArray[np.float64], most: int, dtype: torch.dtype) -> list[Tensor]:
    """A filter's spectrum for signals of which every 2^r-th value is kept, r = 0 ... ``most``.

    What such a signal can hold are the frequencies up to half of its size.
    """
    found = []
    for factor in (2**r for r in range(most + 1)):
        kept = spectrum
        for axis, size in enumerate(spectrum.shape):
            half = size // factor // 2
            kept = kept.take([*range(half), *range(size - half, size)], axis)
        found.append(torch.from_numpy(kept).to(dtype))
    return found


def _morlet(shape: tuple[int, int], octave: int, tilt: float, angles: int) -> NDArray[np.float64]:
    """A Gabor filter less as much of its envelope as takes its mean away; its real spectrum."""
    slant, frequency = 4.0 / angles, 0.75 * math.pi / 2**octave
    wave = _in_space(shape, octave, tilt, frequency, slant)
    envelope = _in_space(shape, octave, tilt, 0.0, slant)
    spectrum: NDArray[np.float64] = np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real
    return spectrum


def _in_space(
    shape: tuple[int, int], octave: int, tilt: float, frequency: float, slant: float
) -> NDArray[np.complex128]:
    """A Gaussian of 0.8 * 2^octave pixels, 1/slant of that across, times a wave, wrapped round."""
    deviation = 0.8 * 2**octave
    height, width = shape
    rows, columns = (
        np.arange(-COPIES * height, (COPIES + 1) * height),
        np.arange(-COPIES * width, (COPIES + 1) * width),
    )
    y, x = np.meshgrid(columns, rows)  # x runs down the rows, as the tilt is counted
    along = x * math.cos(tilt) + y * math.sin(tilt)
    across = -x * math.sin(tilt) + y * math.cos(tilt)
    exponent = -(along**2 + (slant * across) ** 2) / (2 * deviation**2)
    wave = np.exp(exponent + 1j * frequency * along)
    copies = 2 * COPIES + 1
    wrapped: NDArray[np.complex128] = wave.reshape(copies, height, copies, width).sum((0, 2))
    wrapped *= slant / (2 * math.pi * deviation**2)
    return wrapped
