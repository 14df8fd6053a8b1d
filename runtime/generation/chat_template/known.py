"""What is known of a tokenizer's chat template: the tags of reasoning, its switches, and where it begins an answer.

Each is found out once, and again if the tokenizer gets another template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import attrs

from runtime.generation.answers.message_format import special_tokens_of
from runtime.generation.chat_template.probes import tried
from runtime.generation.chat_template.repairs import TemplateInput, TemplateMessage

P = ParamSpec("P")
T = TypeVar("T")


def once_per_template(find: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A function of a tokenizer that keeps what it has found out about the tokenizer's present template."""
    known: WeakKeyDictionary[Any, tuple[Any, dict[Any, T]]] = WeakKeyDictionary()

    @wraps(find)
    def found(tokenizer: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        template = getattr(tokenizer, "chat_template", None)
        if tokenizer not in known or known[tokenizer][0] != template:
            known[tokenizer] = template, {}
        answers, question = known[tokenizer][1], (*args, *kwargs.items())
        if question not in answers:
            answers[question] = find(tokenizer, *args, **kwargs)
        return answers[question]

    return found


def source_of(tokenizer: Any) -> str:
    """The source of a tokenizer's template, or of all its templates; "" for a renderer in Python."""
    template = getattr(tokenizer, "chat_template", None)
    sources = template.values() if isinstance(template, Mapping) else [template]
    return "\n".join(source for source in sources if isinstance(source, str))


# --- tags of reasoning, and other markers of structure --------------------------------------------

# The opening and the closing tag of reasoning, and the ids of each.
Tags = tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]

# Names of tags: "<think>", "[THINK]", "<seed:think>", "<reasoning>", "<|START_THINKING|>", Apertus' "<|inner_prefix|>".
_NAME = re.compile(r"think|thought|reason|inner_prefix", re.IGNORECASE)
# Tags that are ordinary text, which only a template names.
_IN_TEMPLATE = re.compile(r"</?((?:\w+:)?(?:think|thinking|thought|reasoning)(?::\w+)?)>")
_CLOSING_WORDS = (("START", "END"), ("start", "end"), ("begin", "end"), ("prefix", "suffix"))
# Markers around the answer after the reasoning, of which mlx-lm does not know: Cohere's.
_AROUND_ANSWERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


@once_per_template
def tags_of(tokenizer: Any) -> Tags | None:
    """The opening and the closing tag of a model's reasoning, and the ids of each; None if it has none.

    A tag that is ordinary text has no ids of its own, since its neighbours decide on its tokens.
    """
    if tokenizer.has_thinking:
        texts = cast(tuple[str, str], (tokenizer.think_start, tokenizer.think_end))
        return texts, (tuple(tokenizer.think_start_tokens or ()), tuple(tokenizer.think_end_tokens or ()))
    tokens = special_tokens_of(tokenizer)
    for opening in filter(_NAME.search, tokens):
        if closing := _closing(opening, tokens):
            return (opening, closing), ((tokens[opening],), (tokens[closing],))
    in_template = _IN_TEMPLATE.search(source_of(tokenizer))
    return ((f"<{in_template[1]}>", f"</{in_template[1]}>"), ((), ())) if in_template else None


def _closing(opening: str, tokens: Container[str]) -> str | None:
    """The closing tag among some tokens, if one of them is the tag that opens; None without one."""
    slashed = re.sub(r"(?=\w)", "/", opening, count=1)
    others = (opening.replace(begin, end) for begin, end in _CLOSING_WORDS)
    return next((text for text in (slashed, *others) if text != opening and text in tokens), None)


def structural_markers(tokenizer: Any) -> tuple[str, ...]:
    """Markers of the structure of answers besides those of reasoning and calls; they are part of no text."""
    tokens = special_tokens_of(tokenizer)
    of_cohere = (marker for marker in _AROUND_ANSWERS if marker in tokens)
    return (*(getattr(tokenizer, "structural_markers", None) or ()), *of_cohere)


def last_index(tokens: Sequence[int], wanted: tuple[int, ...]) -> int:
    """Where the last occurrence of some tokens begins; -1 if there is none, or if none are wanted."""
    starts = (i for i in range(len(tokens) - len(wanted), -1, -1) if wanted and tokens[i] == wanted[0])
    return next((i for i in starts if tuple(tokens[i : i + len(wanted)]) == wanted), -1)


# --- the template as a function -------------------------------------------------------------------

# Texts by which the places of messages in what it writes are found.
USER_MARK, ANSWER_MARK = "userone", "answerone"
QUESTION: TemplateMessage = {"role": "user", "content": USER_MARK}


def plain(tokenizer: Any, switches: Mapping[str, Any], chat: TemplateInput) -> str:
    """The text that a template makes of a chat. Raises: whatever it raises, as it is third-party code."""
    variables = {"add_generation_prompt": True, **switches, "tokenize": False}
    if not getattr(tokenizer, "has_thinking", True) and tags_of(tokenizer) is not None:
        # mlx-lm switches reasoning on if it knows the tags, and off if it does not.
        variables.setdefault("enable_thinking", True)
    if chat.tools:
        variables["tools"] = [dict(tool) for tool in chat.tools]
    # Copies: some templates modify the messages.
    return cast(str, tokenizer.apply_chat_template([dict(message) for message in chat.messages], **variables))


def tried_with(tokenizer: Any, *messages: TemplateMessage, **switches: Any) -> str | None:
    """The text of messages with variables of the template; None if it raises an error."""
    return tried(partial(plain, tokenizer, switches), TemplateInput(messages))


# --- switches of reasoning, and its effort --------------------------------------------------------


@attrs.frozen
class ThinkingSwitch:
    """The variable with which a template switches reasoning: its name, and its values for on and off."""

    name: str
    on: Any
    off: Any


# Names of switches and their values for on and off. The last ones are also levels of effort in other templates.
_SWITCHES = (
    ThinkingSwitch("enable_thinking", True, False),
    ThinkingSwitch("thinking", True, False),
    ThinkingSwitch("thinking_mode", "enabled", "disabled"),
    ThinkingSwitch("thinking_mode", "thinking", "chat"),
    ThinkingSwitch("thinking_budget", -1, 0),
)
_EFFORT_SWITCHES = tuple(ThinkingSwitch("reasoning_effort", "high", off) for off in ("none", "no_think"))
# Other names are looked for in the template.
_SWITCH_NAME = re.compile(
    r"(?<![\w.'\"])((?:enable_|use_|is_|with_|disable_|no_|skip_)?(?:think|thinking|reason|reasoning)(?:_enabled|_on)?)(?!\w)"
)
_NEGATIONS = ("disable_", "no_", "skip_")


@once_per_template
def thinking_switch(tokenizer: Any) -> ThinkingSwitch | None:
    """The template's own switch for reasoning, found by rendering with it on and off; None if it has none."""
    names = dict.fromkeys(_SWITCH_NAME.findall(source_of(tokenizer)))
    named = (ThinkingSwitch(name, not (off := name.startswith(_NEGATIONS)), off) for name in names)
    for switch in (*_SWITCHES, *named, *_EFFORT_SWITCHES):
        on, off = (tried_with(tokenizer, QUESTION, **{switch.name: value}) for value in (switch.on, switch.off))
        if on is None or off is None:
            continue
        if switch not in _SWITCHES:
            # A value that the template only writes down switches nothing.
            on, off = (text.rpartition(USER_MARK)[2] for text in (on, off))
        if on != off:
            return switch
    return None


def lacks_switch(tokenizer: Any) -> bool:
    """Whether the template has no switch for reasoning. That a renderer in Python has none cannot be told."""
    return getattr(tokenizer, "chat_template", None) is not None and thinking_switch(tokenizer) is None


def asks_for_reasoning(tokenizer: Any, switches: Mapping[str, Any]) -> bool | None:
    """Whether variables of a template ask for reasoning, or for none; None if they leave it to the template."""
    if (wish := switches.get("enable_thinking")) is not None:
        return bool(wish)
    switch = thinking_switch(tokenizer)
    if switch is not None and switch.name in switches:
        return bool(switches[switch.name] != switch.off)
    return effort != "none" if (effort := switches.get("reasoning_effort")) else None


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def with_known_effort(tokenizer: Any, switches: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, with the nearest effort that the template takes, or without one if it takes none."""
    changed = dict(switches)
    if isinstance(effort := changed.pop("reasoning_effort", None), str):
        efforts = [effort]
        if effort.lower() in _EFFORTS:
            level = _EFFORTS.index(effort.lower())
            downwards = _EFFORTS[:0:-1]  # without "none"; of two that are as near, the higher comes first
            efforts += sorted(downwards, key=lambda other: abs(_EFFORTS.index(other) - level))
        taken = (each for each in efforts if tried_with(tokenizer, QUESTION, reasoning_effort=each) is not None)
        if (nearest := next(taken, None)) is not None:
            changed["reasoning_effort"] = nearest
    return changed


# --- where an answer begins -----------------------------------------------------------------------


@attrs.frozen
class AnswerStart:
    """How a template begins an answer."""

    header: str  # the text before the answer, up to its reasoning
    prompts: tuple[str, ...]  # with what the template opens or closes for it, for each position of its switch


@once_per_template
def answer_start(tokenizer: Any) -> AnswerStart | None:
    """How the template begins an answer; None without a template, or if it cannot be found out."""
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    ended = tried_with(tokenizer, QUESTION, add_generation_prompt=False)
    switch, prompts = thinking_switch(tokenizer), []
    for variables in [{}] if switch is None else [{}, {switch.name: switch.on}, {switch.name: switch.off}]:
        text = tried_with(tokenizer, QUESTION, **variables)
        if text is not None and ended is not None:
            prompts.append(text.removeprefix(ended) if text.startswith(ended) else text.rpartition(USER_MARK)[2])
    if not any(prompts):
        # The template has no generation prompt: an answer begins where the question ends.
        text = tried_with(tokenizer, QUESTION, {"role": "assistant", "content": ANSWER_MARK}) or ""
        prompts = [text.partition(USER_MARK)[2].rpartition(ANSWER_MARK)[0]]
    tags = tags_of(tokenizer)
    found = tuple(dict.fromkeys(prompt for prompt in prompts if prompt.strip()))
    if not found:
        return None
    return AnswerStart(found[0] if tags is None else found[0].partition(tags[0][0])[0], found)


@once_per_template
def space_before_closing(tokenizer: Any) -> str:
    """The white space that the template writes between reasoning and its closing tag; "" if it writes no reasoning."""
    if (tags := tags_of(tokenizer)) is None:
        return ""
    answer = {"role": "assistant", "content": ANSWER_MARK, "reasoning_content": "reasonone"}
    text = tried_with(tokenizer, QUESTION, answer, add_generation_prompt=False) or ""
    space, tag, _ = text.partition("reasonone")[2].partition(tags[0][1])
    return space if tag and not space.strip() else ""


# Most tokens of a text before an answer. Longer ones are not recognised.
_MAX_START_TOKENS = 64


def begins_answer(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends where its template begins a new answer."""
    if (start := answer_start(tokenizer)) is None:
        return False
    end = tokenizer.decode(list(prompt[-_MAX_START_TOKENS:])).rstrip()
    return any(end.endswith(text.rstrip()) for text in start.prompts)


def opens_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether the answer to a prompt begins within the reasoning.

    The opening tag counts only where an answer begins: in what the template adds for it, or at the beginning of the
    message that it continues. In any other place it is a word.
    """
    if (tags := tags_of(tokenizer)) is None:
        return False
    (opening, closing), (opening_ids, closing_ids) = tags
    # What stands before the last closing tag does not matter, nor a long text without an opening one.
    rest = list(prompt[last_index(prompt, closing_ids) + 1 :])
    if opening_ids and opening_ids[0] not in rest:
        return False
    begin = rest.index(opening_ids[0]) if opening_ids else 0
    text = tokenizer.decode(rest[max(0, begin - _MAX_START_TOKENS) :])
    ends = [end for id in tokenizer.eos_token_ids if (end := tokenizer.decode([id]))]
    last_end, at = text.rfind(closing), len(text)
    while (at := text.rfind(opening, 0, at)) > last_end:
        after = text[at + len(opening) :]
        if any(end in after for end in ends):
            return False
        if (start := answer_start(tokenizer)) is None or not after.strip():
            return True
        before, header = text[:at].rstrip(), start.header.strip()
        if header and before.endswith(header):
            return header not in after
    return False
