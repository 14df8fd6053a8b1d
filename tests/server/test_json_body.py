"""Long responses are made in another thread."""

from __future__ import annotations

from typing import Any

import asgi
import pytest
from asgi import COMPLETIONS, RESPONSES, Aside, Letters, Served, simulated_server
from sweeps import sweep


class Counting(Aside):
    """Counts the functions that are run in a thread."""

    num = 0

    async def __call__(self, do: Any, /, **options: Any) -> Any:
        Counting.num += 1
        return await super().__call__(do, **options)


LONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 100}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f", "max_tokens": 90}, {"n": 6}),
    (COMPLETIONS, {"prompt": "def f" * 60, "max_tokens": 0, "echo": True}, {"logprobs": 5}),
    (COMPLETIONS, {"prompt": "def f" * 60, "max_tokens": 1, "echo": True}, {"logprobs": 5}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 100}, {"top_logprobs": 5}),
]


@sweep(("path", "body", "more"), LONG)
@sweep("stream", [False, True])
def test_a_response_with_log_probabilities_or_of_many_tokens_is_made_in_a_thread(
    path: str, body: Any, more: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "Aside", Counting)

    async def test(server: Served) -> None:
        num_calls = []
        for asked in (body, {**body, **more}):
            Counting.num = 0
            answer = await server.ask(path, {**asked, "stream": stream})
            assert answer.status == 200, answer.body
            num_calls.append(Counting.num)
        # The events of several texts are short each.
        assert (num_calls[1] > num_calls[0]) is not (stream and "n" in more)

    simulated_server(test, tokenizer=Letters())
