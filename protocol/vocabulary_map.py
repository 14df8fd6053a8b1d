"""The map from a target's vocabulary to that of a draft model with another one.

If both have a token with the same bytes, its ids are mapped to each other, and the drafter can propose it. Any other
token of the target is spelled with several tokens of the draft model, so that the drafter can read every text in its
own tokens. A token that only the draft model has stands for the first token with which the target spells its text.

Source: token-level intersection, without those beginnings, in Timor et al. 2025, "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

# Gives the tokens that a tokenizer makes of each text by itself.
Tokenize = Callable[[Sequence[str]], Sequence[Sequence[int]]]


@attrs.frozen(eq=False)
class Vocabulary:
    """The tokens of one model."""

    size: int  # width of the model's logits. Tokens with ids from there on are left out.
    # The bytes that each token adds to a text, special tokens left out; of equal ones, texts are written with the
    # first.
    pieces: Mapping[int, bytes]
    special: Mapping[int, str]  # the names of special tokens, such as "</s>"
    ends: tuple[int, ...] = ()  # special tokens that end a text, the usual one first
    begin: int | None = None  # the special token that begins a text, if any
    adds_begin: bool = False  # whether texts are given to the model with it
    unknown: int | None = None  # the token for text that no other token spells; None for none

    def by_bytes(self) -> dict[bytes, int]:
        """The token that each piece of text is written with."""
        found: dict[bytes, int] = {}
        for token, piece in self.pieces.items():
            if piece and token < self.size:
                found.setdefault(piece, token)
        return found


@attrs.frozen(eq=False)
class VocabularyMap:
    """How a draft model reads its target's tokens, and which of them it can propose."""

    shared: Mapping[int, int]  # the draft model's token for each token of the target that it can propose; one to one
    readings: tuple[tuple[int, ...], ...]  # by id of the target, the draft model's tokens for it; at least one each
    begin: int | None  # the draft model's token that every text begins with; None for none
    num_tokens: int  # how many tokens the target has
    # For tokens of the draft model that the target lacks, the shared token of the target that their text begins with.
    beginnings: Mapping[int, int] = attrs.Factory(dict)

    def read(self, token: int, *, is_first: bool) -> tuple[int, ...]:
        """The draft model's tokens for a token of the target; `is_first` if the text begins with it."""
        reading = self.readings[token]
        return reading if not is_first or self.begin in (None, reading[0]) else (self.begin, *reading)

    @property
    def described(self) -> str:
        """How many of the target's tokens the draft model can propose, for messages."""
        return f"{len(self.shared):,} of the target's {self.num_tokens:,} tokens"


def map_vocabularies(
    target: Vocabulary, draft: Vocabulary, tokenize_target: Tokenize, tokenize_draft: Tokenize
) -> VocabularyMap:
    """Map a target's vocabulary to a draft model's.

    A special token is never taken for text that looks like it. It is read as the special token of the same role or
    name, and only one that ends the text is proposed. What a tokenizer gives is only used where it spells the text.
    """
    by_bytes = draft.by_bytes()
    shared = {token: by_bytes[piece] for piece, token in target.by_bytes().items() if piece in by_bytes}
    pieces = {token: piece for token, piece in target.pieces.items() if token < target.size}
    special = {token: name for token, name in target.special.items() if token < target.size}
    readings: dict[int, tuple[int, ...]] = {
        token: (by_bytes[piece],) for token, piece in pieces.items() if piece in by_bytes
    }
    by_name = {name: token for token, name in draft.special.items() if token < draft.size}
    readings |= {token: (own,) for token in special if (own := _same_role(token, target, draft, by_name)) is not None}
    for end in target.ends:
        if end in readings and readings[end][0] in draft.ends and readings[end][0] not in shared.values():
            shared[end] = readings[end][0]
    # A special token without a counterpart is read as the text of its name: models have seen the special tokens of
    # each other's chat templates as text, so this tells more than leaving it out.
    texts = pieces | {token: name.encode() for token, name in special.items()}
    unread = {token: text for token, text in texts.items() if token not in readings}
    readings |= _spelled(unread, draft, by_bytes, tokenize_draft)
    substitute = (_substitute(draft),)
    return VocabularyMap(
        shared,
        tuple(readings.get(token) or substitute for token in range(target.size)),
        draft.begin if draft.adds_begin else None,
        len(texts),
        _beginnings(target, draft, shared, tokenize_target),
    )


def _beginnings(target: Vocabulary, draft: Vocabulary, shared: Mapping[int, int], tokenize: Tokenize) -> dict[int, int]:
    known = set(shared.values())
    texts = {token: text for token, text in draft.pieces.items() if token < draft.size and token not in known and text}
    spelled = _spelled(texts, target, target.by_bytes(), tokenize)
    found: dict[int, int] = {}
    for token, spelling in spelled.items():
        # A text that the target cannot spell may begin with a substitute.
        piece = target.pieces.get(spelling[0])
        if spelling[0] in shared and piece is not None and texts[token].startswith(piece):
            found[token] = spelling[0]
    return found


def _same_role(token: int, target: Vocabulary, draft: Vocabulary, by_name: Mapping[str, int]) -> int | None:
    """The special token of the draft model, all `by_name`, for one of the target's; None if there is none."""
    named = by_name.get(target.special[token])
    # A token of the same name may end texts in one model only, and then has another role in the other.
    if named is not None and (named in draft.ends) == (token in target.ends):
        return named
    end = next((end for end in draft.ends if end < draft.size), None)
    if token in target.ends:
        return end
    if token != target.begin:
        return None
    # Models without a token that begins a text mostly have the one that ends it between texts.
    return end if draft.begin is None else draft.begin


def _substitute(vocabulary: Vocabulary) -> int:
    candidates = (vocabulary.unknown, *vocabulary.ends, 0)
    return next(token for token in candidates if token is not None and token < vocabulary.size)


def _spelled(
    texts: Mapping[int, bytes], vocabulary: Vocabulary, by_bytes: Mapping[bytes, int], tokenize: Tokenize
) -> dict[int, tuple[int, ...]]:
    """How texts are spelled with several tokens of a vocabulary, by the same keys."""
    candidates: list[tuple[int, str]] = []
    for token, text in texts.items():
        try:
            decoded = text.decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        # Some tokenizers put a blank before each text by themselves.
        candidates += [(token, each) for each in dict.fromkeys((decoded, decoded.removeprefix(" "))) if each]
    found: dict[int, tuple[int, ...]] = {}
    for (token, _), ids in zip(candidates, tokenize([text for _, text in candidates]), strict=True):
        spelling = b"".join(vocabulary.pieces.get(id, b"") for id in ids)
        if (
            token not in found
            and spelling == texts[token]
            and all(id < vocabulary.size and id in vocabulary.pieces for id in ids)
        ):
            found[token] = tuple(ids)
    longest = max(map(len, by_bytes), default=0)
    for token, text in texts.items():
        if token not in found:
            found[token] = _by_longest_pieces(text, by_bytes, longest, _substitute(vocabulary))
    return found


def _by_longest_pieces(text: bytes, by_bytes: Mapping[bytes, int], longest: int, substitute: int) -> tuple[int, ...]:
    """Spell a text with the longest tokens from left to right; `substitute` stands for each part that none spells."""
    ids: list[int] = []
    begin, is_spelled = 0, True
    while begin < len(text):
        ends = range(min(len(text), begin + longest), begin, -1)
        end = next((end for end in ends if text[begin:end] in by_bytes), None)
        if end is not None:
            ids.append(by_bytes[text[begin:end]])
        elif is_spelled:
            ids.append(substitute)
        is_spelled = end is not None
        begin = end or begin + 1
    return tuple(ids)
