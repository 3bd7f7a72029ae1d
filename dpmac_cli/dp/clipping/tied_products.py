"""Gradients of a weight that embeddings and Linear layers share, as sums of outer products.

The gradient of a sample is sum_t l_t r_t^T. For a position of a Linear layer, l_t is the gradient
w.r.t. its output, as long as the vocabulary, and r_t its input. For a token of an embedding, l_t is
1 at the token, and r_t the gradient w.r.t. its vector. Norms are computed from Gram matrices in
float64, without writing out a gradient, which has a row for every word.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.ghost_clipping import (
    ADDED,
    DOUBLE,
    PASSES,
    join_positions,
    norms_by_gram,
)
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.norms import LayerMetric, Mask, SquaredNorms, kept


@dataclass(frozen=True)
class TiedProducts:
    """Form of the gradients w.r.t. a weight (words, width) that embeddings and Linear layers share.

    A form is described by :class:`.PerSampleGradients`; norms are those in a ball only.

    Attributes:
        tokens: tokens of embeddings, shape (samples, tokens).
        vectors: gradients w.r.t. their vectors, shape (samples, tokens, width).
        outputs: gradients w.r.t. outputs of Linear layers, shape (samples, positions, words).
        inputs: inputs of these layers, shape (samples, positions, width).
    """

    tokens: Tensor
    vectors: Tensor
    outputs: Tensor
    inputs: Tensor

    def pays(self) -> bool:
        """Return whether norms by Gram matrices cost less than gradients that are written out."""
        _, positions, width = self.inputs.shape
        words = self.outputs.shape[2]
        terms = positions + self.tokens.shape[1]
        gram = DOUBLE * (positions**2 * words + terms**2 * width)
        written_out = (positions + PASSES[True]) * words * width
        return gram < written_out

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Return squared norms of sum_t l_t r_t^T as sum_tt' <l_t, l_t'> <r_t, r_t'>, in float64.

        Args:
            metric: metric of a ball.
        """
        # The products <l_t, l_t'>, of two tokens, of a position and a token, of two positions.
        tokens = self.tokens
        outputs = self.outputs.double()
        alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).double()
        positions = outputs.shape[1]
        places = tokens.unsqueeze(1).expand(-1, positions, -1)
        both = outputs.gather(2, places)
        upper = torch.cat([alike, both.mT], 2)
        lower = torch.cat([both, outputs @ outputs.mT], 2)
        left = torch.cat([upper, lower], 1)
        right = torch.cat([self.vectors, self.inputs], 1).double()
        _, uses, width = right.shape
        words = self.outputs.shape[2]
        terms = uses + words + width
        return norms_by_gram(left, right @ right.mT, terms, metric)

    def weighted_sum(self, c: Tensor, valid: Mask, out: Tensor) -> None:
        """Write the sum of c_i g_i: matrix products of :data:`ADDED` samples, and vectors by token.

        Args:
            c: factors c_i, shape (samples,).
            valid: mask of finite samples; None if all are finite.
            out: memory for the result, the layer's slice, shape (d_layer,). Overwritten.
        """
        weights = c.to(self.inputs.dtype).view(-1, 1, 1)
        outputs = kept(self.outputs, valid) * weights
        vectors = kept(self.vectors, valid) * weights
        inputs = kept(self.inputs, valid)
        dtype = outputs.dtype if len(outputs) <= ADDED else torch.float64

        def products() -> Iterator[Tensor]:
            for begin in range(0, len(outputs), ADDED):
                some = slice(begin, begin + ADDED)
                product = _product(outputs[some], inputs[some], self.tokens[some], vectors[some])
                yield product.to(dtype)

        out.copy_(reduce(Tensor.add_, products()).flatten())

    def double(self) -> "TiedProducts":
        """Return the same form, whose gradients and inputs are in float64."""
        return TiedProducts(
            tokens=self.tokens,
            vectors=self.vectors.double(),
            outputs=self.outputs.double(),
            inputs=self.inputs.double(),
        )


def _product(outputs: Tensor, inputs: Tensor, tokens: Tensor, vectors: Tensor) -> Tensor:
    """Return the sum of l_t r_t^T over samples and positions, shape (words, width)."""
    of_positions = outputs.flatten(0, 1).T @ inputs.flatten(0, 1)
    return of_positions.index_add_(0, tokens.flatten(), vectors.flatten(0, 1))


def tied_products(uses: Sequence[Use]) -> TiedProducts | None:
    """Return the gradients w.r.t. a weight that embeddings and Linear layers share, as products.

    Args:
        uses: all uses of the weight in a forward pass of a chunk.

    Returns:
        None if the weight is not shared by both kinds, or writing gradients out is cheaper.
    """
    embeddings = [use for use in uses if isinstance(use.module, nn.Embedding)]
    linear = [use for use in uses if isinstance(use.module, nn.Linear)]
    if not embeddings or not linear:
        return None
    products = TiedProducts(
        tokens=join_positions([use.inputs for use in embeddings]),
        vectors=join_positions([_by_token(use) for use in embeddings]),
        outputs=join_positions([use.grad_output for use in linear]),
        inputs=join_positions([use.inputs for use in linear]),
    )
    return products if products.pays() else None


def _by_token(use: Use) -> Tensor:
    """Return gradients w.r.t. the vectors of an embedding; those of the padding are not added."""
    table: Any = use.module
    if table.padding_idx is None:
        return use.grad_output
    without_padding: Tensor = use.grad_output * use.inputs.ne(table.padding_idx).unsqueeze(-1)
    return without_padding
