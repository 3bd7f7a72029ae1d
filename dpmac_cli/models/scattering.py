"""Wavelet scattering: fixed, public features of images (Bruna and Mallat 2013, arXiv 1203.1514).

Two layers of Morlet wavelets and modulus, averaged over 2^J pixels. Nothing is learnt, so features
cost no privacy; a linear classifier on them beats small networks that are trained end to end
privately (Tramer and Boneh 2021, arXiv 2011.11660).
"""

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

#: Octaves J and angles L, as the paper above has them.
OCTAVES, ANGLES = 2, 8
#: How many copies on each side a filter is wrapped round from: beyond, it is 0 to rounding.
COPIES = 2
#: Images of one channel worked on at a time: few enough to stay in the cache.
PLANES = 24


def paths(octaves: int = OCTAVES, angles: int = ANGLES) -> int:
    """Features a channel and place: 81 of two octaves and eight angles."""
    return 1 + octaves * angles + angles**2 * octaves * (octaves - 1) // 2


class Scattering(nn.Module):
    """Features of images of one size. There is nothing in it to train or to save.

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
        super().__init__()
        scale = 2**octaves
        if height % scale or width % scale:
            raise ValueError(f"{height} x {width} is no multiple of {scale}")
        self.octaves, self.angles = octaves, angles
        shape = (height + 2 * scale, width + 2 * scale)  # reflected at the borders
        tilts = [(angles // 2 - 1 - k) * math.pi / angles for k in range(angles)]
        for j in range(octaves):
            banks = zip(
                *(_resolutions(_morlet(shape, j, tilt, angles), j) for tilt in tilts), strict=True
            )
            for r, bank in enumerate(banks):
                self._keep(f"bank_{j}_{r}", _by_parts(np.stack(bank), 2 ** (j - r)), dtype)
        for r in range(octaves):
            for axis, size in enumerate(shape):
                average = _averaging(size, octaves, r)
                self._keep(f"average_{r}_{axis}", average, dtype)

    def _keep(self, name: str, values: NDArray[np.float64], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.from_numpy(values).to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images.

        Args:
            x: shape (images, channels, height, width), in the dtype of the filters.

        Returns:
            Shape (images, channels * paths, height / 2^J, width / 2^J).
        """
        images, channels, height, width = x.shape
        scale = 2**self.octaves
        features = x.new_empty(
            images * channels, paths(self.octaves, self.angles), height // scale, width // scale
        )
        padded = pad(x, [scale] * 4, mode="reflect").flatten(0, 1)
        for begin in range(0, len(padded), PLANES):
            part = slice(begin, begin + PLANES)
            features[part] = self._of(padded[part])
        return features.view(images, -1, height // scale, width // scale)

    def _of(self, planes: Tensor) -> Tensor:
        """Features of padded planes, shape (planes, height, width)."""
        signal = torch.fft.fft2(planes)
        first, second = [self._averaged(planes, 0).unsqueeze(1)], []
        for j in range(self.octaves):
            found = self._modulus(signal, j, 0)  # (planes, angles, ...)
            first.append(self._averaged(found, j))
            if j + 1 < self.octaves:
                again = torch.fft.fft2(found)
                paths_on = [
                    self._averaged(self._modulus(again, k, j), k)
                    for k in range(j + 1, self.octaves)
                ]
                second.append(torch.cat(paths_on, 2).flatten(1, 2))
        return torch.cat([*first, *second], 1)

    def _modulus(self, spectrum: Tensor, octave: int, resolution: int) -> Tensor:
        """|signal * wavelet| for every angle of octave j, from a spectrum at resolution r.

        (..., height, width) becomes (..., angles, height / 2^(j - r), width / 2^(j - r)).
        """
        factor = 2 ** (octave - resolution)
        size = [side // factor for side in spectrum.shape[-2:]]
        bank = self.get_buffer(f"bank_{octave}_{resolution}")
        # Keeping every factor-th value folds the spectrum: its parts are added up.
        parts = spectrum.reshape(-1, factor, size[0], factor, size[1]).permute(1, 3, 0, 2, 4)
        given = torch.view_as_real(parts.contiguous()).flatten(-3)  # (factor, factor, signals, ...)
        filtered = given[0, 0, :, None] * bank[0, 0]
        for i, k in itertools.product(range(factor), repeat=2):
            if i or k:
                filtered.addcmul_(given[i, k, :, None], bank[i, k])
        numbers = torch.view_as_complex(filtered.view(*filtered.shape[:2], *size, 2))
        found = torch.fft.ifft2(numbers)
        modulus = torch.mul(found.real, found.real).addcmul_(found.imag, found.imag).sqrt_()
        return modulus.view(*spectrum.shape[:-2], self.angles, *size)

    def _averaged(self, signal: Tensor, resolution: int) -> Tensor:
        """The signal, smoothed to one value for 2^J pixels, without its padding."""
        down, across = (self.get_buffer(f"average_{resolution}_{axis}") for axis in (0, 1))
        smooth: Tensor = down @ signal @ across.T
        return smooth


def _by_parts(bank: NDArray[np.float64], factor: int) -> NDArray[np.float64]:
    """Spectra as they meet the parts of one that is folded, divided by how many there are.

    Each value is there twice, for a real and an imaginary part. Shape (angles, height, width)
    becomes (factor, factor, angles, 2 height width / factor^2).
    """
    angles, height, width = bank.shape
    parts = bank.reshape(angles, factor, height // factor, factor, width // factor)
    ordered = parts.transpose(1, 3, 0, 2, 4).reshape(factor, factor, angles, -1)
    return ordered.repeat(2, -1) / factor**2


def _averaging(size: int, octaves: int, resolution: int) -> NDArray[np.float64]:
    """The matrix that smooths a signal of which every 2^r-th value is kept, along one axis.

    The envelope is a product of one Gaussian a axis. Shape (size / 2^J - 2, size / 2^r).
    """
    deviation = 0.8 * 2 ** (octaves - 1)
    places = np.arange(-COPIES * size, (COPIES + 1) * size)
    envelope = np.exp(-(places**2) / (2 * deviation**2)) / (math.sqrt(2 * math.pi) * deviation)
    wrapped = np.fft.fft(envelope.reshape(-1, size).sum(0)).real
    spectrum = _resolutions(wrapped, resolution)[resolution]
    kept = 2 ** (octaves - resolution)
    smoothed = np.fft.ifft(np.fft.fft(np.eye(len(spectrum))) * spectrum).real.T
    matrix: NDArray[np.float64] = smoothed[::kept][1:-1]
    return matrix


def _resolutions(spectrum: NDArray[np.float64], most: int) -> list[NDArray[np.float64]]:
    """A filter's spectrum for signals of which every 2^r-th value is kept, r = 0 ... ``most``.

    What such a signal can hold are the frequencies up to half of its size.
    """
    found = []
    for factor in (2**r for r in range(most + 1)):
        kept = spectrum
        for axis, size in enumerate(spectrum.shape):
            half = size // factor // 2
            kept = kept.take([*range(half), *range(size - half, size)], axis)
        found.append(kept)
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
