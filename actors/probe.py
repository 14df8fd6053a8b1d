"""Whether a model works at all: one small forward pass, of a text of its own."""

from __future__ import annotations

import mlx.core as mx

from actors.model import Model
from protocol.errors import ModelError

TOKENS = (0, 0)


def probe(model: Model) -> None:
    """Have a model read two tokens, on its own thread, and look at what it says.

    Raises: ModelError: the logits are not (2, V). And whatever the model itself raises.
    """
    line = model.open_line(beside_another=False)
    try:
        logits = line.feed(TOKENS, len(TOKENS))
        expected = (len(TOKENS), model.vocab_size)
        if logits is None or logits.shape != expected:
            got = None if logits is None else logits.shape
            raise ModelError(f"for {len(TOKENS)} tokens the model gave logits of shape {got}, expected {expected}")
        mx.eval(logits)
    finally:
        line.close()
