"""Contract of sampling."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a row takes its likeliest token."""
UNITS = 2.0**44
"""Weights are summed as whole numbers of 1 / UNITS."""
MAX_VOCAB = 1 << 19
"""So many weights of 1 no longer fit an int64."""


class SampleTokens(Protocol):
    """Temperature, top-k, top-p (Holtzman et al. 2019), min-p (Nguyen et al. 2024), typical-p (Meister et al. 2022),
    and the draw, in this order.
    """

    def __call__(
        self,
        logits: Tensor,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        typical_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """Give one token a row, int64 [N].

        logits is float32 [N, V], V below MAX_VOCAB, without NaN or positive infinity, at least one finite in each row;
        negative infinity is never drawn. temperature, top_p, min_p and typical_p are float32 [N], top_k int64 [N] (0 or
        from V on is off), uniform float64 [N] in [0, 1). Nothing is changed. A row's token does not depend on the other
        rows.

        Greedy where temperature < GREEDY_TEMPERATURE: the highest logit, among equals the lowest id. Elsewhere
        exponents are (logit - highest) / temperature, in float32, so that no temperature overflows, and weights
        exp(exponent), the exact value rounded to float32. They are summed as int64, each weight times UNITS, rounded:
        sums are exact and have no order, so that every kernel set draws the same. A weight that rounds to 0 there is 0.

        Tokens are ranked by logit, highest first, equals by ascending id. top_k keeps that many ranks; top_p the fewest
        ranks whose weights sum to at least top_p times the sum of those that top_k kept (off at 1); min_p drops weights
        below it, the highest weight being 1.

        Of what these left, typical_p keeps tokens whose surprise, -log(probability), is near the expected one (off at
        1). A token's distance is |exponent - mean| in float64, mean being the weighted mean of the exponents: the sum
        of weight times exponent, each rounded to 1 / UNITS too, over the sum of weights. In order of distance it takes
        the fewest tokens whose weights sum to at least typical_p times the sum of all, and keeps these and all others
        as near as the last of them: at least one token, which need not be the likeliest.

        The token is the first, in ascending id, where the running sum of the kept weights exceeds uniform times their
        sum, rounded down: the inverse of the distribution function. A share of a sum is multiplied in float64.
        """
