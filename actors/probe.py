"""Whether a model is of use: two tokens are fed, and what comes is looked at.

Everything here runs on the model's own thread.
"""

from __future__ import annotations

import mlx.core as mx

from actors.model import Model
from protocol.errors import ModelError

# Two, since of one token the last row is also the only one. Every vocabulary has an id 0.
PROBED = (0, 0)


def probe(model: Model) -> None:
    """Feed two tokens to a line of their own; it is closed again, and nothing of the model has changed.

    Args:
        model: of mlx-lm or any other kind.

    Raises: ModelError: it cannot process them (the original error is the cause), or gives something else than their
        logits. Logits that are not numbers are logits.
    """
    try:
        sequence = model.open_sequence(beside_another=False)
        try:
            logits = sequence.feed(PROBED, len(PROBED))
            check_logits("the model", logits, (len(PROBED), model.vocab_size))
            mx.eval(logits)
            sequence.check(len(PROBED))
        finally:
            sequence.close()
    except ModelError:
        raise
    # Somebody else's code: whatever it raises, the model cannot be used.
    except Exception as error:
        raise ModelError(f"the model cannot process {len(PROBED)} tokens: {type(error).__name__}: {error}") from error


def check_logits(named: str, logits: object, shape: tuple[int | None, ...]) -> int:
    """Compare what a model gave with what is expected of it.

    Args:
        named: the model, for the message.
        logits: what it gave.
        shape: that is expected; None as the width for any that is not 0.

    Returns: the width of the logits, >= 1.
    Raises: ModelError: it is no array, or has another shape, or holds no floating-point numbers.
    """
    wanted = f"({', '.join('V' if size is None else str(size) for size in shape)})"
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
        f"{wanted}: for each token, how likely each of the V tokens of its vocabulary comes next"
    )


def _fits(got: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    if len(got) != len(wanted) or 0 in got:
        return False
    return all(size is None or size == given for given, size in zip(got, wanted, strict=True))
