"""The bundled demo pair (`examples/train_demo_pair.py`), a drafter trained for its target, and prompts for them."""

from pathlib import Path

_PAIR = Path(__file__).parent.parent / "demo_pair"

DEMO_TARGET = _PAIR / "target"
DEMO_DRAFT = _PAIR / "draft"
DEMO_TRAINED_DRAFT = _PAIR / "trained_draft"

DEMO_PROMPTS = (
    'def quicksort(items):\n    """Sort a list in place."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "def read_config(path):\n    with open(path, encoding='utf-8') as file:\n",
)

# Prompts for benchmarks of many streams, one a stream.
STREAM_PROMPTS = (
    *DEMO_PROMPTS,
    "def binary_search(values, wanted):\n    low, high = 0, len(values)\n",
    "class Queue:\n    def __init__(self, size):\n        self.size = size\n",
    "import json\n\n\ndef load(path):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n",
    "import os\n\n\ndef walk(root):\n    for name in os.listdir(root):\n",
    "def parse(line):\n    key, value = line.split('=', 1)\n",
    "class Node:\n    def __init__(self, value, children=None):\n",
    "def gcd(a, b):\n    while b:\n",
    "import threading\n\n\nclass Worker(threading.Thread):\n    def run(self):\n",
    "def flatten(items):\n    result = []\n    for item in items:\n",
    "def main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument(",
)
