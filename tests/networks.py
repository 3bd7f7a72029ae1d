"""Small user-supplied networks over images of (3, 8, 8): some mix samples, others are innocent.

The first kind does it in ways seen in real code; none is built to deceive. Each is a class without
arguments, so that a test may also name it as ``networks.py:NAME``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.utils.checkpoint import checkpoint

SHAPE, CLASSES = (3, 8, 8), 3
PIXELS = 3 * 8 * 8


class _Linear(nn.Module):
    """A linear classifier behind :meth:`prepare`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(PIXELS, CLASSES)

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.prepare(x.flatten(1)))
        return logits


# Networks that mix samples.


class RescaledIfLarge(_Linear):
    """Takes pixels up to 255 for what was not yet divided, by the largest of the batch."""

    def prepare(self, x: Tensor) -> Tensor:
        return x / 255 if x.max() > 1 else x


class ShiftedIfNegative(_Linear):
    """Takes a batch for one of [-1, 1] if any pixel is negative."""

    def prepare(self, x: Tensor) -> Tensor:
        return (x + 1) / 2 if x.min() < 0 else x


class RescaledByBatch(_Linear):
    """Divides by the largest number of the batch."""

    def prepare(self, x: Tensor) -> Tensor:
        return x / x.abs().amax().clamp(min=1)


class Centred(_Linear):
    """Subtracts the batch's mean."""

    def prepare(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class WhitenedIfLarge(_Linear):
    """Standardises by the batch from 16 samples on, as small batches would be noisy."""

    def prepare(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 0.1) if len(x) >= 16 else x


class GhostNorm(_Linear):
    """Ghost batch norm in groups of eight; what does not fill a group is left as it is."""

    def prepare(self, x: Tensor) -> Tensor:
        if len(x) % 8:
            return x
        groups = x.view(-1, 8, PIXELS)
        return (groups - groups.mean(1, keepdim=True)).view_as(x)


class GhostNormOfEvery(_Linear):
    """Ghost batch norm that splits any batch of at least four into two."""

    def prepare(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            return x
        return torch.cat([half - half.mean(0) for half in x.chunk(2)])


class FunctionalBatchNorm(_Linear):
    """Batch norm without a layer."""

    def prepare(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class CentringDropout(nn.Dropout):
    """Dropout that removes the batch's mean first."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean(0) if self.training else input


class CentredInDropout(_Linear):
    """Centring inside a subclass of nn.Dropout, which evaluation mode would hide."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = CentringDropout()

    def prepare(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(x)
        return out


class _Experts(nn.Module):
    """Two experts and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(PIXELS, 2)
        self.experts = nn.ModuleList([nn.Linear(PIXELS, CLASSES) for _ in range(2)])


class ExpertsWithCapacity(_Experts):
    """A mixture of two experts, each of which takes three samples at most."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            kept = (mine & (mine.cumsum(0) <= 3)).unsqueeze(1)
            out = out + torch.where(kept, weights[:, number : number + 1] * expert(x), 0.0)
        return out


class TopOfBatch(_Linear):
    """Keeps the three largest activations of each column."""

    def prepare(self, x: Tensor) -> Tensor:
        least = x.topk(min(3, len(x)), 0).values[-1]
        return torch.where(x >= least, x, 0.0)


class Contrastive(_Linear):
    """Adds how alike a sample is to the others of its batch."""

    def prepare(self, x: Tensor) -> Tensor:
        unit = F.normalize(x, dim=1)
        return x + (unit @ unit.T).softmax(1) @ x


class Transposing(nn.Module):
    """Uses the weight of a layer without a call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(PIXELS, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)).tanh()
        logits: Tensor = self.head(self.first(hidden @ self.first.weight).tanh())
        return logits


class ReadingKernels(nn.Module):
    """Uses the kernels of a layer without a call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 2, 3), nn.Linear(72, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + F.conv2d(x.flip(3), self.first.weight)
        logits: Tensor = self.head(hidden.tanh().flatten(1))
        return logits


class AttentionOverBatch(nn.Module):
    """Attention that takes the samples for the words of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2)
        self.embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        seen, _ = self.attend(tokens, tokens, tokens)
        logits: Tensor = self.head(seen.mean(1))
        return logits


class RunningMean(_Linear):
    """Keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(PIXELS)

    def prepare(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean.to(x) + 0.1 * x.detach().mean(0)
        return x - self.mean.to(x)


class RunningMeanInState(_Linear):
    """Keeps a running mean that enters the model's state, and not its output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def prepare(self, x: Tensor) -> Tensor:
        self.seen[:] = [x.detach().mean(0)]
        return x

    def get_extra_state(self) -> list[Tensor]:
        return self.seen

    def set_extra_state(self, state: list[Tensor]) -> None:
        self.seen = state


class PreviousBatch(_Linear):
    """Adds what came last in the batch before, as memory networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[Tensor] = []

    def prepare(self, x: Tensor) -> Tensor:
        before = self.last[-1].to(x) if self.last else 0.0
        self.last.append(x[-1].detach())
        return x + before


class Mixup(_Linear):
    """Mixes each sample with the next in training."""

    def prepare(self, x: Tensor) -> Tensor:
        return 0.8 * x + 0.2 * x.roll(1, 0) if self.training else x


class Shuffled(_Linear):
    """Shuffles the batch for one of its branches."""

    def prepare(self, x: Tensor) -> Tensor:
        return x + 0.1 * x[torch.randperm(len(x))]


class WrongReshape(nn.Module):
    """Reshapes where it should have transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        channels_first = x.transpose(0, 1).reshape(len(x), 3, 64)
        logits: Tensor = self.head(channels_first.mean(1))
        return logits


class MeanOverLogits(_Linear):
    """Subtracts the batch's mean from the logits in training."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - logits.mean(0) if self.training else logits


class GradientNormalised(_Linear):
    """Normalises gradients over the batch by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, PIXELS)

    def prepare(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        if out.requires_grad:
            out.register_hook(lambda g: g / g.norm())  # type: ignore[no-untyped-call]
        return out


class CentredIfDropping(_Linear):
    """Asks its dropout layer whether it is training, and centres the batch if so."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def prepare(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return x - x.mean(0) if self.drop.training else x


class CentredInSinglePrecision(_Linear):
    """Centres large batches of 32 bits, as they come from a loader."""

    def prepare(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if x.dtype == torch.float32 else x


class DividedBySize(_Linear):
    """Divides by the size of the batch, as a loss would."""

    def prepare(self, x: Tensor) -> Tensor:
        return x / len(x)


MIXING: tuple[type[nn.Module], ...] = (
    *(RescaledIfLarge, ShiftedIfNegative, RescaledByBatch, Centred, WhitenedIfLarge, GhostNorm),
    *(GhostNormOfEvery, FunctionalBatchNorm, CentredInDropout, ExpertsWithCapacity, TopOfBatch),
    *(Contrastive, AttentionOverBatch, RunningMean, RunningMeanInState, PreviousBatch, Mixup),
    *(Shuffled, WrongReshape, MeanOverLogits, GradientNormalised, DividedBySize),
    *(CentredIfDropping, CentredInSinglePrecision),
)


# Networks that do not.


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return logits


class Convolutional(nn.Module):
    """Convolutions, group norm, pooling and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Conv2d(8, 8, 3), nn.SiLU()),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


class VisionTransformer(nn.Module):
    """A class token and positions held by the model itself, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, 8))
        self.places = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        logits: Tensor = self.head(self.encoder(self.drop(tokens))[:, 0])
        return logits


class OddlyScaled(nn.Module):
    """Reads a parameter of its own in a product, beside a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(CLASSES))
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(x.flatten(1))) @ torch.diag(self.scale.exp())
        return logits


class AttentionPool(nn.Module):
    """Multi-head attention, samples first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.attend(tokens, tokens, tokens)[0].mean(1))
        return logits


class WordsFirst(nn.Module):
    """Multi-head attention, words first, as torch has it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.attend = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)
        logits: Tensor = self.head(self.attend(tokens, tokens, tokens)[0].mean(0))
        return logits


class Depthwise(nn.Module):
    """Depthwise and pointwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.point = nn.Conv2d(6, 8, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.gelu(self.point(self.depth(x))).mean((2, 3)))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(PIXELS, 16).requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, PIXELS))
        self.up = nn.Parameter(0.1 * torch.randn(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


class LowRankAdapted(nn.Module):
    """A classifier with such a layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted, self.head = LowRank(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.adapted(x.flatten(1)).tanh())
        return logits


class WeightNormed(nn.Module):
    """torch's weight norm, a parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(PIXELS, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(x.flatten(1)).relu())
        return logits


class _Symmetric(nn.Module):
    """A weight that is made symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Parametrised(nn.Module):
    """A user-supplied parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, middle = nn.Linear(PIXELS, 8), nn.Linear(8, 8)
        nn.utils.parametrize.register_parametrization(middle, "weight", _Symmetric())
        self.middle, self.head = middle, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.first(x.flatten(1)).tanh()).tanh())
        return logits


class Checkpointed(Perceptron):
    """Activations that are computed again on the way back."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.layers, x.flatten(1), use_reentrant=False)
        return logits


class Nested(nn.Module):
    """Modules within modules, and skip connections."""

    class Block(nn.Module):
        """A residual block."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.GroupNorm(1, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.body(x)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"entry": nn.Conv2d(3, 4, 1)})
        self.blocks = nn.Sequential(self.Block(), nn.Sequential(self.Block(), self.Block()))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem["entry"](x)).mean((2, 3)))
        return logits


class SharedLayer(nn.Module):
    """One layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(PIXELS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for _ in range(3):
            x = self.again(x).tanh()
        logits: Tensor = self.head(x)
        return logits


class Branches(nn.Module):
    """Two branches by the network's own choice, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 4, 5, padding=2), nn.Conv2d(3, 4, 1)
        self.fixed = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.wide(x), self.narrow(x)], 1)
        logits: Tensor = self.head(self.fixed(both).relu().amax((2, 3)))
        return logits


class StandardisedEach(_Linear):
    """Standardises every sample by itself."""

    def prepare(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)


class LayerNormed(nn.Module):
    """Layer norm over patches, and learnt gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(12), nn.Linear(12, 24)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        logits: Tensor = self.head(F.glu(self.mix(self.norm(patches)), -1).mean(1))
        return logits


class Embedded(nn.Module):
    """Pixels as indices into a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.flatten(1) * 4 + 8).clamp(0, 15).long()
        logits: Tensor = self.head(self.table(words).mean(1))
        return logits


class SoftExperts(_Experts):
    """A mixture of experts without a capacity."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        weights = self.gate(x).softmax(1)
        return torch.stack([e(x) for e in self.experts], 2).mul(weights.unsqueeze(1)).sum(2)


class RescaledEach(_Linear):
    """Divides a sample by 255 if its own largest number asks for it."""

    def prepare(self, x: Tensor) -> Tensor:
        return torch.where(x.amax(1, keepdim=True) > 1, x / 255, x)


class Upsampled(nn.Module):
    """Down, up and joined again, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, 2), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x).relu()
        low = self.up(self.bottom(F.avg_pool2d(high, 2)).relu())
        logits: Tensor = self.head(torch.cat([high, low], 1).mean((2, 3)))
        return logits


class InstanceNormed(nn.Module):
    """Instance norm, which is of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Linear(4 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.conv(x)).relu().flatten(1))
        return logits


class Squeezed(nn.Module):
    """Squeeze and excitation: channels are weighted by the whole of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.slope = nn.Conv2d(3, 6, 3, padding=1), nn.PReLU(6)
        self.down, self.up = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.conv(x))
        weights = self.up(self.down(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid()
        logits: Tensor = self.head((x * weights).flatten(2).mean(2))
        return logits


INNOCENT: tuple[type[nn.Module], ...] = (
    *(Perceptron, Convolutional, VisionTransformer, AttentionPool, Depthwise),
    *(LowRankAdapted, WeightNormed, Parametrised, Checkpointed, Nested, SharedLayer, Branches),
    *(StandardisedEach, LayerNormed, Embedded, SoftExperts, RescaledEach, Upsampled),
    *(InstanceNormed, Squeezed),
)


# Random numbers.


class RandomByTorch(_Linear):
    """Multiplies each sample by random numbers, after as many others as its content asks for."""

    def prepare(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().sum() * 7) % 5):
            torch.rand_like(x)
        return x * torch.rand_like(x)
