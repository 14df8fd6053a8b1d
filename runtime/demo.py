"""Where the bundled demo pair lies; `examples/train_demo_pair.py` made it."""

from pathlib import Path

_PAIR = Path(__file__).parent / "demo_pair"

DEMO_TARGET = _PAIR / "target"
DEMO_DRAFT = _PAIR / "draft"
