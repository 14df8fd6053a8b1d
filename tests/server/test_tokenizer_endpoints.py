"""Tokens of texts, and texts of tokens, in vLLM's form."""

from typing import Any

from asgi import HELLO, Letters, looping, on_server
from scripted import ScriptedModel
from tool_letters import TOOLS, on_calling_server


class WithSpecialTokens(Letters):
    """Letters, whose texts begin with the character A."""

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        return super().encode("A" + text if add_special_tokens else text)


IDS = Letters().encode("def f")
MARKED = [Letters.ALPHABET.index("A"), *IDS]


@on_server(ScriptedModel(looping, context_length=40), tokenizer=WithSpecialTokens())
async def test_a_text_as_tokens(server):
    for more, expected in (({}, MARKED), ({"add_special_tokens": False}, IDS), ({"model": "gpt-4o"}, MARKED)):
        for path in ("/tokenize", "/v1/tokenize"):
            answer = await server.ask(path, {"prompt": "def f", **more, "with_pieces": True})
            assert answer.json == {"tokens": expected, "count": len(expected), "max_model_len": 40}
            assert answer.headers["x-outrider-ignored"] == "with_pieces"


@on_server()
async def test_a_chat_as_tokens_and_the_tokens_as_texts(server):
    chat = (await server.ask("/tokenize", {**HELLO, "add_generation_prompt": True})).json
    assert Letters().decode(chat["tokens"]) == "user:hello.assistant:"
    assert chat["max_model_len"] is None
    texts = (await server.ask("/tokenize", {"prompt": "def f", "return_token_strs": True})).json["token_strs"]
    assert texts == list("def f")
    for tokens, text in ((IDS, "def f"), ([], "")):
        answer = await server.ask("/detokenize", {"tokens": tokens})
        assert answer.json == {"prompt": text}
    assert server.simulation.target_worker.handed == []


@on_server(ScriptedModel(looping, context_length=40))
async def test_more_tokens_than_the_context_holds_have_a_text(server):
    answer = await server.ask("/detokenize", {"tokens": IDS * 10})
    assert answer.json["prompt"] == "def f" * 10


@on_calling_server("none")
async def test_the_tokens_of_a_chat_with_tools_are_its_prompt(server):
    body = {**HELLO, "tools": TOOLS, "max_tokens": 1}
    answer = await server.ask("/v1/chat/completions", body)
    assert (await server.ask("/tokenize", body)).json["count"] == answer.json["usage"]["prompt_tokens"]
