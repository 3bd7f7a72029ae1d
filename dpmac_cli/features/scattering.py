"""Wavelet scattering: fixed, public features of images (Bruna and Mallat 2013, arXiv 1203.1514).

Two layers of Morlet wavelets and modulus, averaged over 4 pixels: J = 2 octaves, L = 8 angles.
Nothing is learnt, so features have no privacy cost. A linear classifier on them beats small
networks that are trained end to end with privacy (Tramer and Boneh 2021, arXiv 2011.11660).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dpmac_cli.config.networks import SHRINK

ANGLES = 8
#: Periods of a filter's spectrum on each side that alias when sampled; others are 0 to rounding.
COPIES = 2
#: One-channel images to process at a time: few enough to stay in the cache.
PLANES = 16


class Scattering(nn.Module):
    """Scattering features of images of one size. Nothing is trained or saved with a model.

    Args:
        height, width: size of the images in pixels, each a multiple of 4.
        dtype: dtype of the filters, and so of images and features.

    Raises:
        ValueError: a size is not a multiple of 4.
    """

    def __init__(self, height: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if height % SHRINK or width % SHRINK:
            raise ValueError(f"{height} x {width} is not a multiple of {SHRINK}")
        shape = (height + 2 * SHRINK, width + 2 * SHRINK)  # reflected at the borders
        tilts = [(ANGLES // 2 - 1 - k) * math.pi / ANGLES for k in range(ANGLES)]
        for octave in (0, 1):
            bank = torch.stack([_morlet(shape, octave, tilt) for tilt in tilts]) / 4**octave
            # Repeat each value, for the real and the imaginary part.
            filters = {f"bank_{octave}": bank.repeat_interleave(2, -1)}
            for axis, size in enumerate(shape):
                filters[f"average_{octave}_{axis}"] = _averaging(size, 2**octave)
            for name, values in filters.items():
                self.register_buffer(name, values.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (images, channels * 81, height / 4, width / 4).

        The 81 maps of a channel are its average, 16 of the first layer (8 angles, 2 octaves) and 64
        of the second (8 angles for each of 8).

        Args:
            x: images, shape (images, channels, height, width), in the dtype of the filters.

        >>> Scattering(8, 8)(torch.zeros(5, 3, 8, 8)).shape
        torch.Size([5, 243, 2, 2])
        """
        padded = pad(x, [SHRINK] * 4, mode="reflect").flatten(0, 1)
        features = torch.cat([self._of(planes) for planes in torch.split(padded, PLANES)])
        return features.view(len(x), -1, *features.shape[2:])

    def _of(self, planes: Tensor) -> Tensor:
        """Return features of padded planes, shape (planes, 81, height / 4, width / 4).

        Args:
            planes: one channel of an image each, shape (planes, height + 8, width + 8).
        """
        spectrum = torch.fft.fft2(planes)
        fine, coarse = self._modulus(spectrum, 0), self._modulus(spectrum, 1)
        second = self._modulus(torch.fft.fft2(fine), 1)
        parts = [
            (planes.unsqueeze(1), 0),
            (fine, 0),
            (coarse, 1),
            (second.flatten(1, 2), 1),
        ]
        smooth = []  # one value per 4 pixels, without padding
        for signal, octave in parts:
            down = self.get_buffer(f"average_{octave}_0")
            across = self.get_buffer(f"average_{octave}_1")
            smooth.append(down @ signal @ across.T)
        return torch.cat(smooth, 1)

    def _modulus(self, spectrum: Tensor, octave: int) -> Tensor:
        """Return |signal * wavelet| for every angle, keeping every 2^octave-th value.

        A spectrum of shape (..., height, width) becomes (..., 8, height / 2^octave, ...).
        """
        bank = self.get_buffer(f"bank_{octave}")
        filtered = torch.view_as_real(spectrum).flatten(-2).unsqueeze(-3) * bank
        for dim in (-2, -1) * octave:  # keeping every second value folds the spectrum
            filtered = torch.add(*filtered.chunk(2, dim))
        real_and_imaginary = torch.unflatten(filtered, -1, (-1, 2))
        signal = torch.fft.ifft2(torch.view_as_complex(real_and_imaginary))
        return torch.mul(signal.real, signal.real).addcmul_(signal.imag, signal.imag).sqrt_()


def _averaging(size: int, factor: int) -> Tensor:
    """Return the matrix that smooths a signal subsampled by ``factor`` along one axis.

    The signal contains frequencies up to half of its size.

    Args:
        size: length of the padded signal before subsampling.
        factor: 1, or 2 if every second value was kept.

    Returns:
        float64, shape (size / 4 - 2, size / factor): one row per 4 pixels, without the padding.
    """
    deviation = 0.8 * SHRINK / 2
    exponent = -((deviation * _frequencies(size)) ** 2) / 2
    spectrum = torch.exp(exponent).reshape(-1, size).sum(0)
    half = size // factor // 2
    lowest = torch.cat([spectrum[:half], spectrum[size - half :]])
    identity = torch.eye(len(lowest)).double()
    smoothed = torch.fft.ifft(torch.fft.fft(identity) * lowest)
    return torch.real(smoothed).T[:: SHRINK // factor][1:-1]


def _morlet(shape: tuple[int, int], octave: int, tilt: float) -> Tensor:
    """Return the spectrum of a Morlet wavelet: a wave in a Gaussian envelope, with mean zero.

    Args:
        shape: height and width of the padded image.
        octave: 0 or 1. The deviation is 0.8 * 2^octave pixels along the wave and twice that across.
        tilt: angle of the wave's direction to the vertical axis in radians.

    Returns:
        float64, of the given shape. It is real, because the wavelet is symmetric.
    """
    down, right = torch.meshgrid(*map(_frequencies, shape), indexing="ij")
    along = down * math.cos(tilt) + right * math.sin(tilt)
    across = -down * math.sin(tilt) + right * math.cos(tilt)
    deviation, copies = 0.8 * 2**octave, 2 * COPIES + 1

    def gaussian(centre: float) -> Tensor:
        distance = (along - centre) ** 2 + (across * ANGLES / 4) ** 2
        exponent = -(deviation**2) * distance / 2
        return torch.exp(exponent).reshape(copies, shape[0], copies, shape[1]).sum((0, 2))

    wave, envelope = gaussian(0.75 * math.pi / 2**octave), gaussian(0.0)
    return wave - wave[0, 0] / envelope[0, 0] * envelope


def _frequencies(size: int) -> Tensor:
    """Return the frequencies of an axis in radians per pixel, and their aliases.

    Shape ((2 * COPIES + 1) * size,), ascending.
    """
    return torch.arange(-COPIES * size, (COPIES + 1) * size).double() * 2 * math.pi / size
