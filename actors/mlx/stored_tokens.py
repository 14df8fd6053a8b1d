"""Keys and values of texts that nobody works on, in parts: texts with the same beginning have its parts in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from actors.mlx.cache_kinds import LayerState, State, kinds_of


@attrs.frozen(eq=False)
class _Part:
    """Successive tokens of a text in some layers. Its arrays may have room for more, and are never assigned to."""

    layers: Sequence[State]

    def cut(self, begin: int, end: int) -> _Part:
        """Some of the tokens, in arrays of their own."""
        return _Part(tree_map(lambda array: mx.contiguous(array[..., begin:end, :]), self.layers))

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return LayerState("", tuple(self.layers)).num_bytes


class StoredTokens:
    """Keys and values of one text, taken out of the caches (at `places`) that have a slot for each token."""

    def __init__(self, caches: Sequence[Any], num_tokens: int) -> None:
        """Take them out of the caches of a text of so many tokens."""
        found = {
            place: layer
            for place, (kind, layer) in enumerate(kinds_of(caches))
            if kind.has_slots and not layer.empty() and layer.offset == num_tokens
        }
        self.places, self._layers = tuple(found), tuple(found.values())
        self._parts = [(_Part([(layer.keys, layer.values) for layer in self._layers]), num_tokens)]
        self.take_out()

    def take_out(self) -> None:
        """Take them out again, after `put_back`."""
        for layer in self._layers:
            layer.keys = layer.values = None

    def put_back(self) -> None:
        """Put them into the caches, in arrays of the text alone, which are computed once they are needed."""

        def joined(*arrays: mx.array) -> mx.array:
            used = [array[..., :length, :] for array, (_, length) in zip(arrays, self._parts, strict=True)]
            return mx.concatenate(used, axis=-2)

        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = tree_map(joined, *(part.layers[index] for part, _ in self._parts))

    def share(self, other: StoredTokens, num_common: int) -> None:
        """Have the first tokens, which are those of another text, too, in common with it: `places` must be the same."""
        beginning, own = other._cut_at(num_common), self._cut_at(num_common)
        self._parts = [*beginning, *self._parts[len(own) :]]
        for index in range(len(self._layers)):  # one by one, so that little is in memory twice
            mx.eval([part.layers[index] for part, _ in (*self._parts, *other._parts)])

    def _cut_at(self, length: int) -> list[tuple[_Part, int]]:
        """The parts with the first tokens. The last part, which no other text has, is cut in two where these end."""
        found = []
        for index, (part, num_tokens) in enumerate(self._parts):
            if 0 < length < num_tokens and index == len(self._parts) - 1:
                rest = part.cut(length, num_tokens), num_tokens - length
                part, num_tokens = part.cut(0, length), length
                self._parts[index:] = [(part, num_tokens), rest]
            if length > 0:
                found.append((part, min(num_tokens, length)))
            length -= num_tokens
        return found

    @property
    def memory(self) -> Mapping[int, int]:
        """The bytes of each part, by its id."""
        return {id(part): part.num_bytes for part, _ in self._parts}
