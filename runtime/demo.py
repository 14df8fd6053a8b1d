"""The bundled demo pair, which `examples/train_demo_pair.py` made, and prompts to try it with."""

from pathlib import Path

_PAIR = Path(__file__).parent / "demo_pair"

DEMO_TARGET = _PAIR / "target"
DEMO_DRAFT = _PAIR / "draft"

DEMO_PROMPTS = (
    'def quicksort(items):\n    """Sort a list in place."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "def read_config(path):\n    with open(path, encoding='utf-8') as file:\n",
)
