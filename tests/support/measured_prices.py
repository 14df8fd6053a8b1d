"""Prices that were measured on a machine without noise."""

from protocol.prices import Prices


def prices_of(
    *, base: float = 1.0, slope: float = 0.1, step: float = 0.1, delay: float = 0.0, core_hold_s: float = 0.0
) -> Prices:
    """Prices of passes that take `base`, and the share `slope` of it more for each further row; of draft steps that
    take `step`, and delay a pass beside them by the share `delay` of that; and of plain decoding.
    """
    prices, at = Prices(core_hold_s=core_hold_s), 0.0
    for i in range(70):
        width, overlap = 1 + i % 5, base * (i % 7) / 7
        prices.verify.observe(width, overlap, base * (1 + slope * (width - 1)) + delay * overlap)
        prices.observe_draft_step(1, at, at + step, beside_target=False)
        prices.plain_decode_s.observe(base)
        at += step
    return prices
