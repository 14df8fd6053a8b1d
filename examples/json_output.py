"""Generate JSON that follows a schema, and print how much of it was drafted. Needs llguidance (`outrider[grammar]`)."""

import json

import trio

import runtime

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "language": {"enum": ["Python", "C", "Rust"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 5000},
        "imports": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "language", "lines", "imports"],
    "additionalProperties": False,
}

PROMPT = 'def describe(path):\n    """Describe a module as JSON."""\n    return json.dumps('


async def main() -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        grammar = runtime.Grammar.from_json_schema(SCHEMA, rt.tokenizer, compact=True)
        answer = await rt.generate(PROMPT, logits_processors=[grammar], lookahead=3)
    # The demo pair cannot describe a module, but its output follows the schema.
    for name, value in json.loads(answer.text).items():
        print(f"{name:>8}: {value!r}")
    statistics = answer.statistics
    print(f"{statistics.generated_tokens} tokens, {statistics.accepted} of them drafted")


trio.run(main)
