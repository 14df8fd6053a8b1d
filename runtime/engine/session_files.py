"""Conversations and streams of one runtime, saved to files and resumed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.mlx.model import MLXModel
from actors.target.target_actor import TargetActor
from protocol.errors import SessionFileError
from protocol.messages import Open
from protocol.reprs import shown_path
from protocol.settings import check_vocabulary_size, settings_from
from runtime.engine.drafter_slot import DrafterSlot
from runtime.engine.request_validation import RequestValidation
from runtime.engine.sessions import Sessions
from runtime.generation.conversation import Account, Conversation, Message
from runtime.generation.token_reader import Arrivals, Progress
from runtime.generation.token_stream import SessionFile, TokenStream
from runtime.generation.tool_calls.functions import Functions
from runtime.persistence import saved_session
from runtime.persistence.saving import SessionSaver


class SessionFiles:
    """Makes conversations, saves them and streams, and resumes what was saved."""

    def __init__(
        self,
        target: TargetActor,
        drafter: DrafterSlot,
        tokenizer: TokenizerWrapper | None,
        validation: RequestValidation,
        sessions: Sessions,
        open_stream: Callable[..., TokenStream],
    ) -> None:
        """Of one runtime.

        Args:
            target, drafter, tokenizer, validation, sessions: the runtime's.
            open_stream: `Runtime.stream`.
        """
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._validation = validation
        self._sessions = sessions
        self._open_stream = open_stream

    def conversation(
        self,
        system: str | None,
        thinking: bool | None,
        settings: Mapping[str, Any],
        tools: Functions,
        past: Sequence[Message] = (),
    ) -> Conversation:
        """See `Runtime.conversation`.

        Args:
            system, thinking: as there.
            settings: as keyword arguments.
            tools: the functions that the model may call.
            past: the messages so far, without the system message.
        """
        keywords = {**self._validation.keywords({}), "reuse_prefix": True, **settings}
        conversation = Conversation(
            self._open_stream,
            self._save,
            self._tokenizer,
            system=system,
            thinking=thinking,
            settings=keywords,
            past=past,
            tools=tools,
        )
        check_vocabulary_size(settings_from(keywords), self._target.model.vocab_size)
        return conversation

    async def load(
        self,
        path: SessionFile,
        any_draft: bool,
        overrides: Mapping[str, Any],
        tools: Functions,
    ) -> Conversation:
        """See `Runtime.load`."""
        with self._sessions.while_open():
            saved_session.check_path(path)
            models = self._models()
            session = await models.read(path, any_draft=any_draft)
            # A session without processors continues without: this runtime's defaults are not its own.
            keywords = {"logits_processors": (), **saved_session.settings_of(session, path, overrides)}
            begins = [message["content"] for message in session.messages[:1] if message["role"] == "system"]
            past = session.messages[len(begins) :]
            system = begins[0] if begins else None
            conversation = self.conversation(system, session.thinking, keywords, tools, past)
            await models.fill(path, session, self._validation.is_drafted(settings_from(keywords)))
        return conversation

    async def load_stream(self, path: SessionFile, any_draft: bool, overrides: Mapping[str, Any]) -> TokenStream:
        """See `Runtime.load_stream`."""
        with self._sessions.while_open():
            saved_session.check_path(path)
            models = self._models()
            session = await models.read(path, any_draft=any_draft, is_stream=True)
            saved = session.stream
            assert saved is not None
            keywords = saved_session.settings_of(session, path, overrides)
            checked = self._validation.checked({**keywords, "reuse_prefix": True})
            seed = saved.seed if (given := overrides.get("seed")) is None else given
            opened = self._validation.resumed(session, saved, checked, seed)
            if not saved.is_over:
                await models.fill(path, session, opened.drafted)
            # Nobody would take the stream.
            await trio.lowlevel.checkpoint_if_cancelled()
            return self._sessions.begin(opened, saved=saved)

    async def save_stream(
        self, opened: Open, arrivals: Arrivals, path: SessionFile, progress: Callable[[], Progress]
    ) -> int:
        """See `runtime.engine.sessions.SaveStream`."""
        if (file := opened.settings.prompt_cache_file) is not None:
            raise SessionFileError(
                f"a stream that continues the prompt cache file {shown_path(file)} cannot be saved, since that file "
                "does not say which tokens it has; give the prompt as text"
            )
        with self._sessions.while_open():
            return await self._models().save_stream(path, opened, lambda: progress().with_commits(arrivals.peek()))

    async def _save(self, path: SessionFile, account: Account) -> int:
        with self._sessions.while_open():
            return await self._models().save(path, account)

    def _models(self) -> SessionSaver:
        # A draft model that has failed for good cannot be asked for anything. A drafter that is more than an MLX model
        # reads the text again.
        draft = self._drafter.actor
        if not (isinstance(draft, DraftActor) and draft.is_alive and isinstance(draft.model, MLXModel)):
            draft = None
        return SessionSaver(self._target, draft, self._tokenizer)
