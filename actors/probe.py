"""A probe: feeds a model two tokens, and checks that it returns their logits. On the model's own thread."""

from __future__ import annotations

import mlx.core as mx

from actors.model import Model
from protocol.errors import ModelError

# Two tokens, so that a model which returns only the last row of logits is found out. Every vocabulary has an id 0.
PROBED = (0, 0)


def probe(model: Model) -> None:
    """Feed two tokens to a new sequence. Raises: ModelError: the model fails (see the cause), or gives no logits."""
    try:
        sequence = model.open_sequence(alongside_model=False)
        try:
            logits = sequence.feed(PROBED, len(PROBED))
            check_logits("the model", logits, (len(PROBED), model.vocab_size))
            mx.eval(logits)
            sequence.check(len(PROBED))
        finally:
            sequence.close()
    except ModelError:
        raise
    # A model is foreign code, which may raise anything. Whatever it raises, the model cannot be used.
    except Exception as error:
        raise ModelError(f"the model cannot process {len(PROBED)} tokens: {type(error).__name__}: {error}") from error


def check_logits(named: str, logits: object, shape: tuple[int | None, ...]) -> int:
    """Check what a model, `named` for messages, gave for `PROBED`; a None in `shape` is any size. Returns: their width.

    Raises: ModelError: this is not an array of floats, or has another shape.
    """
    expected = f"({', '.join('V' if size is None else str(size) for size in shape)})"
    if not isinstance(logits, mx.array):
        got = f"a {type(logits).__name__}"
    elif not _fits(logits.shape, shape):
        got = f"an array of shape {logits.shape}"
    elif not mx.issubdtype(logits.dtype, mx.floating):
        got = f"an array of {logits.dtype}"
    else:
        return logits.shape[-1]
    raise ModelError(
        f"{named} gave {got} for {len(PROBED)} tokens; a language model gives logits, an array of floats of shape "
        f"{expected}: for each token, how likely each of the V tokens of its vocabulary comes next"
    )


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    if len(shape) != len(expected) or 0 in shape:
        return False
    return all(wanted is None or size == wanted for size, wanted in zip(shape, expected, strict=True))
