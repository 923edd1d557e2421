"""Chapter 4's exercises."""

from scripts.book.exercises import exercise


@exercise(
    lambda: [(1, 4, 6), (3, 8, 20)],
    "a layer has 4 + 2 matrices with biases, and two LayerNorms, each with a scale and a shift",
    "a layer lacks 4D numbers: LayerNorms learn scale and shift, attention's matrices have biases",
    lambda N, D, F: encoder_parameters(N, D, F) - N * 4 * D,
    "only matrices are counted: biases and LayerNorms are missing",
    lambda N, D, F: encoder_parameters(N, D, F) - N * (9 * D + F),
)
def encoder_parameters(N: int, d_model: int, d_ff: int) -> int:
    """Attention, feed-forward and two LayerNorms, N times.

    With F = 4D the matrices have 4D² + 2·4D² = 12D² numbers per layer; all else has 13D.
    """
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    return N * (attention + feed_forward + 2 * 2 * d_model)
