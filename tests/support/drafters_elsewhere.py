"""A drafter that is used as if it were at another rank: every message goes through its bytes, and no socket."""

from __future__ import annotations

from typing import Any

from actors.distributed.draft_rank_link import DraftRankLink
from actors.distributed.drafting.drafting_model import DraftingModel
from actors.distributed.drafting.remote_drafter import RemoteDrafter
from protocol.draft_rank_messages import DrafterOpened, DraftRequest, GivenFeatures
from protocol.rank_messages import decode, encode


class RankInThisProcess:
    """Stands for the connection to a rank, which answers at once and on the thread that asks.

    Attributes:
        asked: the names of the operations, in order.
        num_bytes: of the answers so far.
        is_lost: whether the rank takes no more messages.
    """

    def __init__(self, model: Any) -> None:
        self._drafting = DraftingModel(model)
        self.link = DraftRankLink(1, self, lambda _: None)  # type: ignore[arg-type]
        self.asked: list[str] = []
        self.num_bytes = 0
        self.is_lost = False

    def send(self, message: Any) -> None:
        """As `Connection.send`."""
        if self.is_lost:
            raise ConnectionResetError("the other end has gone")
        message = decode(encode(message))
        if isinstance(message, GivenFeatures):
            self._drafting.take(message)
        elif isinstance(message, DraftRequest):
            self.asked.append(message.name)
            answer = encode(self._drafting.answer(message))
            self.num_bytes += len(answer)
            self.link.put(decode(answer))


def at_another_rank(model: Any) -> tuple[RemoteDrafter, RankInThisProcess]:
    """A drafter as rank 0 sees it, and the rank that has it. To be called on the drafter's thread."""
    rank = RankInThisProcess(model)
    opened = DrafterOpened(model.vocab_size, model.context_length, getattr(model, "feature_layers", None))
    return RemoteDrafter(rank.link, opened), rank
