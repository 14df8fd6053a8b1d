"""A budget of reasoning, and reasoning that is ended in the middle: the closing tag is forced, and the answer follows.

Each text is compared with a reference that decodes the script token by token: whatever is drafted, and whoever shares
the passes, the tag stands at the same position.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import chat_models
import mlx.core as mx
import pytest
from asgi import Letters
from distributions import DRAFT, PROMPT, SIGNIFICANCE, TARGET, p_value, random_price
from scripted import (
    Script,
    ScriptedModel,
    agreeing,
    always,
    ids,
    markov,
    never,
    plain_text,
    run,
    simulated,
    spike,
    within,
)
from sweeps import sweep

import runtime
from runtime.generation.answers.message_format import HARMONY
from runtime.generation.reasoning import ReasoningCounter, ReasoningTracker, reader_of

LETTERS = Letters(thinks=True, template=None, ends=False)
OPENING, CLOSING = LETTERS.encode("<t>"), LETTERS.encode("</t>")
# A prompt that opens the reasoning, and one after which the model does so.
BEGUN, PLAIN = [5, 9, *OPENING], [5, 9]


def writing(opens: bool, num_thoughts: int | None, near: float = 1.0) -> Script:
    """A model that opens its reasoning if it must, thinks so many tokens, closes it, and answers; or thinks on. At the
    share `near` of all positions, a drafter says so, too.
    """
    said = OPENING if opens else []
    begin = len(PLAIN if opens else BEGUN)
    drafted = agreeing(near)

    def script(history: Sequence[int]) -> Sequence[float]:
        at, end = len(history) - begin, len(said) + (10**6 if num_thoughts is None else num_thoughts)
        if at < len(said):
            return spike(said[at])
        if end <= at < end + len(CLOSING) and list(history[begin + end :]) == CLOSING[: at - end]:
            return spike(CLOSING[at - end])
        return drafted(history)

    return script


def limited(script: Script, prompt: Sequence[int], budget: int, length: int) -> list[int]:
    """The greedy text of a script whose reasoning has at most `budget` tokens, decoded token by token."""
    text, is_thinking, is_over, num_thoughts = list(prompt), list(prompt[-3:]) == OPENING, False, 0
    forced: list[int] = []
    while len(text) < len(prompt) + length:
        if is_thinking and not forced and num_thoughts >= budget:
            written = max(n for n in range(len(CLOSING)) if text[len(text) - n :] == CLOSING[:n])
            forced = CLOSING[written:]
        text += [forced.pop(0)] if forced else plain_text(script, text, 1)
        if is_thinking and text[-4:] == CLOSING:
            is_thinking, is_over = False, True
        elif is_thinking:
            num_thoughts += 1
        elif text[-3:] == OPENING and not is_over:
            is_thinking = True
    return text[len(prompt) :]


async def texts(simulation: Any, prompt: Sequence[int], asked: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The texts of streams, twelve of which run at once."""
    prompts = [(prompt, settings) for settings in asked]
    found = await simulation.runtime.generate_many(prompts, max_concurrent=12)
    return [ids(completion.tokens) for completion in found]


@sweep(("undo", "schedule"), [(always, 0), (never, 1), (within(6), 2)])
@sweep(("opens", "num_thoughts"), [(False, None), (True, None), (False, 3), (True, 8)])
async def test_the_tag_stands_where_the_budget_ends_whatever_is_drafted(
    opens, num_thoughts, undo, schedule, autojump_clock
):
    script, prompt = writing(opens, num_thoughts), PLAIN if opens else BEGUN
    budgets = itertools.product((0, 1, 6, 14), (0, 3, "auto"))
    asked = [{"thinking_budget": budget, "lookahead": lookahead, "max_tokens": 22} for budget, lookahead in budgets]
    models = ScriptedModel(script, undo=undo), ScriptedModel(writing(opens, num_thoughts, 0.8))
    price = random_price(schedule)
    async with simulated(*models, tokenizer=LETTERS, price=price, schedule=schedule) as simulation:
        whole = [limited(script, prompt, each["thinking_budget"], 22) for each in asked]
        assert await texts(simulation, prompt, asked) == whole
        for each, text in zip(asked[:3], whole, strict=False):
            assert await texts(simulation, prompt, [each]) == [text]


async def test_a_drafter_that_knows_of_the_tag_drafts_it(autojump_clock):
    script = writing(False, None)
    async with simulated(ScriptedModel(script), ScriptedModel(script), tokenizer=LETTERS) as simulation:
        completion = await simulation.runtime.generate(BEGUN, lookahead=4, thinking_budget=7, max_tokens=30)
    tag = completion.tokens[7:11]
    assert [token.text for token in tag] == ["<", "/", "t", ">"]
    # The first one is the target's.
    assert [token.from_draft for token in tag[1:]] == [True, True, True]
    assert [token.is_thinking for token in completion.tokens[9:12]] == [True, True, False]
    assert completion.thinking == "".join(token.text for token in completion.tokens[:7])


def unchanged(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


SETTINGS: dict[str, dict[str, Any]] = {
    "a penalty, which needs the text": {"presence_penalty": 0.01},
    "a bias": {"logit_bias": {1: -1.0}},
    "a processor": {"logits_processors": [runtime.stateless(unchanged)]},
    "a processor that is called once": {"logits_processors": [unchanged]},
    "a sampler": {"sampler": runtime.stateless(lambda logprobs: mx.argmax(logprobs, axis=-1))},
    "filters": {"temperature": 0.1, "seed": 3, "top_p": 0.9, "min_p": 0.1, "xtc_probability": 0.1, "top_k": 9},
}


@sweep("settings", SETTINGS)
@sweep("lookahead", [0, 4])
async def test_the_tag_is_forced_whatever_the_settings_are(lookahead, settings, autojump_clock):
    script = writing(False, None)
    async with simulated(ScriptedModel(script), ScriptedModel(script), tokenizer=LETTERS) as simulation:
        asked = {"lookahead": lookahead, "thinking_budget": 5, "max_tokens": 16, "logprobs": 2, **SETTINGS[settings]}
        tokens = (await simulation.runtime.generate(BEGUN, **asked)).tokens
    assert ids(tokens)[5:9] == CLOSING
    assert [token.logprob for token in tokens[5:9]] == [0.0] * 4
    if settings != "filters":
        assert ids(tokens) == limited(script, BEGUN, 5, 16)


# --- the law ----------------------------------------------------------------------------------------


class FourTokens:
    """A tokenizer of the four tokens of the sampling tests; 1 opens the reasoning, and 3 closes it."""

    has_thinking, has_chat_template, has_tool_calling = True, False, False
    bos_token, eos_token_ids = None, frozenset[int]()
    think_start, think_end, think_start_tokens, think_end_tokens = "b", "d", (1,), (3,)

    def encode(self, text: str, **_: Any) -> list[int]:
        return ["abcd".index(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("abcd"[token] for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {letter: id for id, letter in enumerate("abcd")}


def law(prompt: Sequence[int], budget: int, length: int) -> dict[tuple[int, ...], float]:
    """The probability of each text after a prompt that opens the reasoning with its last token, or does not."""
    # Where nothing was said since the beginning or the tag that closes it, reasoning may begin.
    begun = "reasons" if prompt[-1] == 1 else "may reason"
    ends = {((), begun, budget): 1.0}
    for _ in range(length):
        longer: Counter[Any] = Counter()
        for (text, state, left), p in ends.items():
            is_due = state == "reasons" and left == 0
            for token, q in enumerate((0.0, 0.0, 0.0, 1.0) if is_due else TARGET[[*prompt, *text][-1]]):
                if state == "reasons":
                    after = "may reason" if token == 3 else "reasons"
                else:
                    after = "reasons" if state == "may reason" and token == 1 else "answers"
                longer[(*text, token), after, left - (state == after == "reasons")] += p * q
        ends = longer
    probs = Counter[tuple[int, ...]]()
    for (text, _, _), p in ends.items():
        probs[text] += p
    return {text: p for text, p in probs.items() if p > 0}


@sweep(
    ("prompt", "budget", "lookahead"),
    [(PROMPT, 2, 3), *(pytest.param([2], *each, marks=pytest.mark.slow) for each in [(1, 3), (0, 0)])],
)
def test_samples_follow_the_target_before_the_budget_and_after_the_tag(prompt, budget, lookahead):
    async def main() -> list[list[int]]:
        models = [ScriptedModel(markov(table), vocab_size=4) for table in (TARGET, DRAFT)]
        async with simulated(*models, tokenizer=FourTokens(), price=random_price(lookahead)) as simulation:
            asked = {"temperature": 1.0, "acceptance": "rejection", "lookahead": lookahead, "max_tokens": 4}
            seeded = [{**asked, "thinking_budget": budget, "seed": n} for n in range(300)]
            return await texts(simulation, prompt, seeded)

    sampled = Counter(map(tuple, run(main)))
    assert p_value(sampled, law(prompt, budget, 4)) > SIGNIFICANCE


def closed_again(table: Sequence[Sequence[float]], prompt: Sequence[int], budget: int, length: int) -> list[int]:
    """The greedy text of a model that may open its reasoning again behind each tag; decoded token by token."""
    text, state, left = list(prompt), "reasons" if prompt[-1] == 1 else "may reason", budget
    for _ in range(length):
        token = 3 if state == "reasons" and left == 0 else max(range(4), key=table[text[-1]].__getitem__)
        text.append(token)
        if state == "reasons" and token == 3:
            state = "may reason"
        elif state == "reasons":
            left -= 1
        else:
            state = "reasons" if state == "may reason" and token == 1 else "answers"
    return text[len(prompt) :]


@sweep(
    ("drafter", "lookahead"), [(None, 0), ("ngram", 4), ("same", 4), ("same", "auto"), ("other", 4), ("other", "auto")]
)
@sweep("prompt", [[1], [2]])
def test_reasoning_that_a_model_opens_again_behind_the_tag_is_closed_again(prompt, lookahead, drafter):
    asked = [{"thinking_budget": n, "lookahead": lookahead, "max_tokens": 14} for n in (0, 1, 4)]
    for seed in range(5):
        dice = random.Random(seed)
        # Likelier than the others are the two tags: after each other, or after themselves.
        table, other = ([[dice.random() + (token in (1, 3)) for token in range(4)] for _ in range(4)] for _ in range(2))
        drafts: dict[Any, Any] = {None: None, "ngram": "ngram"}
        drafts |= {name: ScriptedModel(markov(x), vocab_size=4) for name, x in (("same", table), ("other", other))}

        async def main(table: Any = table, draft: Any = drafts[drafter], seed: int = seed) -> list[list[int]]:
            target = ScriptedModel(markov(table), vocab_size=4)
            async with simulated(target, draft, tokenizer=FourTokens(), price=random_price(seed)) as simulation:
                alone = await texts(simulation, prompt, asked[:1])
                assert alone == [closed_again(table, prompt, 0, 14)], seed
                return await texts(simulation, prompt, asked)

        assert run(main) == [closed_again(table, prompt, n, 14) for n in (0, 1, 4)], seed


# --- reasoning that is ended in the middle -----------------------------------------------------------


@sweep(("num_read", "opens"), [(0, False), (0, True), (1, True), (5, False), (9, True)])
@sweep(("lookahead", "schedule"), [(0, 0), (3, 1), ("auto", 2)])
async def test_reasoning_that_is_ended_is_closed_at_the_next_token_that_is_chosen(
    opens, lookahead, num_read, schedule, autojump_clock
):
    script, prompt = writing(opens, None), PLAIN if opens else BEGUN
    models = ScriptedModel(script), ScriptedModel(writing(opens, None, 0.8))
    async with simulated(*models, tokenizer=LETTERS, price=random_price(schedule)) as simulation:
        stream = simulation.runtime.stream(prompt, lookahead=lookahead, max_tokens=60)
        text = [(await stream.__anext__()).id for _ in range(num_read)]
        stream.end_thinking()
        stream.end_thinking()
        text += [token.id async for token in stream]
    num_thoughts = len(stream.thinking)
    assert 0 <= num_thoughts < 50
    assert text == limited(script, prompt, num_thoughts, 60)
    # A script closes nothing by itself, so the tag was forced.
    assert text != plain_text(script, prompt, 60)


@sweep("tokenizer", [None, Letters(template=None, ends=False)])
async def test_a_model_without_reasoning_is_not_changed(tokenizer, autojump_clock):
    async with simulated(ScriptedModel(agreeing(1.0)), tokenizer=tokenizer) as simulation:
        stream = simulation.runtime.stream(PLAIN, max_tokens=20, thinking_budget=0)
        stream.end_thinking()
        assert [token.id async for token in stream] == plain_text(agreeing(1.0), PLAIN, 20)
        stream.end_thinking()  # harmless


async def test_reasoning_that_is_over_is_not_closed_again(autojump_clock):
    script = writing(False, 4)
    async with simulated(ScriptedModel(script), tokenizer=LETTERS) as simulation:
        stream = simulation.runtime.stream(BEGUN, max_tokens=30)
        text = [(await stream.__anext__()).id for _ in range(12)]
        stream.end_thinking()
        assert text + [token.id async for token in stream] == plain_text(script, BEGUN, 30)


# --- formats ----------------------------------------------------------------------------------------


def limit_of(tokenizer: Any, num_tokens: int, prompt: Sequence[int]) -> ReasoningCounter:
    answer = ReasoningTracker(tokenizer, prompt)
    return ReasoningCounter(tokenizer, answer.tags, reader_of(answer), len(prompt), num_tokens)


def test_an_answer_of_messages_that_reasons_again_gets_the_header_of_its_content():
    tokenizer = chat_models.demo_with(*HARMONY.marks)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    prompt = encode("<|start|>assistant")
    limit, text = limit_of(tokenizer, 2, prompt), list(prompt)
    for added, num_left in (("", 3), ("<|channel|>analysis<|message|>", 2), ("a", 1), ("b", 0)):
        text += encode(added)
        limit.follow(text)
        assert limit.num_left == num_left
    assert tokenizer.decode(limit.closing(text)) == "<|end|><|start|>assistant"
    text += encode("<|end|><|start|>assistant<|channel|>analysis<|message|>")
    limit.follow(text)
    assert limit.num_left == 0
    assert tokenizer.decode(limit.closing(text)) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    text += encode("<|end|><|start|>assistant<|channel|>final<|message|>Yes")
    limit.follow(text)
    assert limit.num_left is None


def test_the_tag_is_written_as_the_template_writes_it_and_not_twice():
    template = chat_models.TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}",
    )
    tokenizer = chat_models.tokenizer.__wrapped__(template, thinks=True)
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    limit = limit_of(tokenizer, 0, prompt)
    assert tokenizer.decode(limit.closing(prompt)) == "\n</think>"
    assert tokenizer.decode(limit.closing([*prompt, *tokenizer.encode("\n")])) == "</think>"
    plain = chat_models.tokenizer(chat_models.BEGUN_TEMPLATE, thinks=True)
    assert plain.decode(limit_of(plain, 0, prompt).closing(prompt)) == "</think>"


async def test_a_budget_is_refused_if_the_grammar_has_no_place_for_the_tag():
    messages = [{"role": "user", "content": "Which?"}]
    async with runtime.open(*chat_models.pair(thinks=True, template=chat_models.BEGUN_TEMPLATE)) as rt:
        (close,) = rt.tokenizer.encode("</think>", add_special_tokens=False)
        schema = runtime.Grammar.from_json_schema({"enum": ["</think>", "one"]}, rt.tokenizer)
        word = runtime.Grammar.from_choices(["</think>", "Well.</think>", "one"], rt.tokenizer)  # no token of a tag
        for grammar in (schema, word):
            for budget in (0, 3):
                with pytest.raises(runtime.SettingsError, match="has no place for that") as refusal:
                    rt.stream(messages, thinking_budget=budget, logits_processors=[grammar])
            assert repr(grammar) in str(refusal.value)
            with pytest.raises(runtime.SettingsError, match="has no place for that"):
                await rt.generate_many([messages], thinking_budget=3, logits_processors=[grammar])
        assert rt.statistics().prompt_tokens == 0

        # `end_thinking`, too, would write it in the middle of the text.
        stream = rt.stream(messages, logits_processors=[schema])
        stream.end_thinking()
        assert "".join([token.text async for token in stream]) in ('"</think>"', '"one"')

        for start in (f"<[{close}]>", f"/(.|\\n)*/ <[{close}]>", f"/(.|\\n)+/ <[{close}]>"):
            grammar = runtime.Grammar.from_lark(f'start: {start} "one"', rt.tokenizer)
            answer = await rt.generate(messages, thinking_budget=3, logits_processors=[grammar], max_tokens=40)
            assert answer.content == "one"

    # Where a model would open the reasoning itself, the grammar keeps it from that.
    async with runtime.open(*chat_models.pair(thinks=True)) as rt:
        grammar = runtime.Grammar.from_choices(["one", "two"], rt.tokenizer)
        answer = await rt.generate(messages, thinking_budget=0, logits_processors=[grammar])
        assert answer.text in ("one", "two")


@sweep("budget", [0, 2, 3, 50])
def test_drafted_tokens_are_judged_up_to_the_place_where_the_reasoning_that_they_open_is_to_be_closed(budget):
    dice = random.Random(budget)

    def followed(text: Sequence[int]) -> ReasoningCounter:
        limit = limit_of(LETTERS, budget, PLAIN)
        limit.follow([*PLAIN, *text])
        return limit

    num_cut = 0
    for _ in range(300):
        text = LETTERS.encode("".join(dice.choices(["<t>", "</t>", "<", "t", " ", "a"], (4, 4, 1, 1, 2, 1), k=6)))
        committed, drafted = text[: (cut := dice.randint(0, len(text)))], text[cut:]
        limit = followed(committed)
        if limit.num_left is None or limit.num_left == 0 or limit.num_left > budget + 1:
            continue
        ends = [n for n in range(len(drafted) + 1) if followed([*committed, *drafted[:n]]).num_left == 0]
        num_judged = min(len(drafted), limit.num_to_judge(drafted, len(drafted)))
        most = ends[0] - 1 if ends else len(drafted)
        assert num_judged <= most, (committed, drafted)
        is_reasoning = limit.num_left <= budget
        if not is_reasoning and (budget == 0 or not ends):
            # After some content, the tag is a word, and yet nothing is judged beyond it.
            tag = LETTERS.decode([*committed[-2:], *drafted]).find("<t>")
            assert num_judged == most or 0 <= tag < most, (committed, drafted)
        num_cut += num_judged < len(drafted)
        if not is_reasoning:
            # Of tokens drawn at random, none is left out for what it is.
            others = {min(8, limit.num_to_judge([*each, *[0] * 5], 0)) for each in (OPENING, [1, 2, 3])}
            assert budget > 0 or others == {0}
    assert num_cut > 5 or budget == 50


NAMES = {"first_name": {"enum": ["Anna", "Bob"]}, "second_name": {"enum": ["Xenon", "Yak"]}}
PARAMETERS = {"type": "object", "properties": NAMES, "required": [*NAMES]}
WHO = {"type": "function", "function": {"name": "look_up_someone", "parameters": PARAMETERS}}
ANSWER = '{"name": "look_up_someone", "arguments": {"first_name": "Bob", "second_name": "Xenon"}}'


@sweep(
    ("begin", "budget", "acceptance"),
    [*(("<think>Hm, who", *each) for each in [(0, "greedy"), (2, "match"), (20, "rejection")]), ("", 2, "greedy")],
)
async def test_what_the_grammar_of_a_call_forces_is_drafted_behind_reasoning_of_any_budget(begin, budget, acceptance):
    tokenizer = chat_models.calling_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    thoughts = encode(begin)[: 1 + budget] if begin else []
    closed = [*thoughts, *(encode("</think>") if begin else [])]
    expected = [*closed, *encode(f"<tool_call>\n{ANSWER}\n</tool_call><|endoftext|>")]

    @runtime.stateless
    def says(tokens: mx.array, logits: mx.array) -> mx.array:
        """Favours the answer; a tag that is forced is no matter of it."""
        ids = tokens.tolist()
        num_said = ids[::-1].index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        wanted = expected[min(num_said, len(expected) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, 0.0, -mx.inf)[None]

    sampling: dict[str, Any] = {} if acceptance == "greedy" else {"temperature": 1.0, "acceptance": acceptance}
    asked = {"tools": [WHO], "tool_choice": "required", "logits_processors": [says], "max_tokens": 80, **sampling}
    target, draft = chat_models.calling_pair()
    for drafter, lookaheads in ((None, (0, 4, "auto")), (draft, (4,))):
        async with runtime.open(target, draft=drafter) as rt:
            for lookahead in lookaheads:
                messages = [{"role": "user", "content": "Who?"}]
                answer = await rt.generate(messages, thinking_budget=budget, lookahead=lookahead, **asked)
                assert ids(answer.tokens) == expected
                assert answer.tool_calls[0].values == {"first_name": "Bob", "second_name": "Xenon"}
                by_whom = Counter(token.drafted_by for token in answer.tokens)
                assert by_whom["grammar"] > 20 or lookahead == 0, by_whom
                assert by_whom["model"] > 0 or drafter is None, by_whom


async def test_a_call_that_is_begun_in_the_reasoning_is_not_cut():
    tokenizer = chat_models.calling_tokenizer()
    says = chat_models.says(tokenizer, '<think>Hm <tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>')
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    async with runtime.open(*chat_models.calling_pair()) as rt:
        for lookahead, budget in itertools.product((0, 4), (16, 22)):  # behind the name
            asked = {"tools": tools, "logits_processors": [says], "max_tokens": 80, "lookahead": lookahead}
            messages = [{"role": "user", "content": "Go"}]
            answer = await rt.generate(messages, thinking_budget=budget, **asked)
            assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", '{"at": "it"}')]
            assert answer.finish_reason == "stop"
