"""What the commands refuse before they load a model, and what they say then."""

import shlex

from command_line import ran
from sweeps import sweep

TRACE = "--trace-acceptance trace.jsonl"
NO_MODEL = 'is not a model; did you mean "ngram" (prompt lookup)?'
ODD_DEVICE = 'error: --device must be "cpu" or "gpu", got \'tpu\''
ODD_REWIND = "error: --rewind must be one of 'auto', 'trim', 'checkpoint', 'none', got 'never'"

REFUSED: dict[str, list[tuple[str, str]]] = {
    "generate hi --target /no/such/model": [
        ("--stop ''", "stop must have 1 to"),
        ("--logprobs 2", "error: --logprobs needs --json, since a text cannot show them; give both"),
        ("--raw --system w4", "--system needs the chat template, which --raw leaves out"),
        ("--prompt hi", "not allowed with argument PROMPT"),
        ("--target ngram", "target must be a model here"),
        *((f"--target demo --draft {name}", f"draft '{name}' {NO_MODEL}") for name in ("ngrm", "NGRAM", "n-gram")),
        ("--model-config {", "--model-config must be a JSON object, got '{'"),
        ("--tokenizer-config [1]", "--tokenizer-config must be a JSON object, such as"),
        ("--chat-template-args 3", "--chat-template-args must be a JSON object, such as"),
        ("--chat-template /no/such", "--chat-template '/no/such' is neither a template nor a file"),
        ("--quantize 7", "quantize takes 2, 3, 4, 5, 6 or 8 bits, got 7"),
        ("--draft-quantize 4", "--draft-quantize is of a draft model, and none is named"),
    ],
    "generate --target /no/such/model": [("''", "error: the prompt is empty; give a text to continue or a question")],
    "serve --target /no/such/model": [
        ("--host 0.0.0.0", "lets other machines in"),
        ("--host ::", "give one by --api-key or OUTRIDER_API_KEY"),
        ("--host 'no such host'", "is not an address"),
        ("--port 65536", "--port must be a whole number between 0 and 65535, got 65536"),
        ("--api-key ''", "printable ASCII"),
        ("--api-key 'with blank'", "printable ASCII"),
        ("--allow-origin https://example.org/", "'https://example.org/' is not an origin as browsers send it"),
        ("--allow-origin https://example.org/app", "with nothing behind"),
        ("--allow-origin https://Example.org", "in lower case"),
        ("--allow-origin https://example.org:443", "if it is not the default one"),
        ("--allow-origin example.org", "such as https://example.org"),
        ("--allow-origin https://a.example --allow-origin ''", "--allow-origin '' is not"),
        ("--trusted-proxy proxy.example", "--trusted-proxy 'proxy.example' is not an IP address or a network"),
        ("--trusted-proxy 10.0.0.1/8", "has host bits set"),
        ("--max-streams 0", '--max-streams must be a whole number of at least 1, or "auto", got 0'),
        ("--max-waiting -1", "--max-waiting must be a whole number of at least 0, got -1"),
        ("--stalled-seconds 0", "--stalled-seconds must be a finite number above 0, got 0"),
        ("--max-body-bytes 0", "--max-body-bytes must be a whole number of at least 1, got 0"),
    ],
    "bench --target /no/such/model": [("", "needs a draft model; give --draft")],
    "bench --target /no/such/model --draft ngram": [
        ("--draft none", "--draft none is for plain decoding, and does not go with another drafter"),
        ("--max-tokens 15", "--max-tokens must be a whole number of at least 16, got 15"),
        ("--max-tokens 20.5", "--max-tokens must be a whole number"),
        ("--num-draft-tokens auto", "--num-draft-tokens must be whole numbers between 1 and 64"),
        ("--num-draft-tokens 0", "got 0 among them"),
        ("--lookahead 65", '--lookahead must be whole numbers between 0 and 64 or "auto", got 65'),
        ("--lookahead 2,always", "got 'always' among them"),
        ("--kv-bits 7", "--kv-bits must be 2, 3, 4, 5, 6, 8 or None, got 7"),
        ("--repeats 0", "repeats must be a whole number of at least 1, got 0"),
        ("--repeats many", "repeats must be a whole number of at least 1, got 'many'"),
        ("--temperature -1", "temperature must be a finite number"),
        ("--dtype int4", "dtype must be one of"),
        ("--report /no/such/place/report", "is in no directory that exists; make /no/such/place first"),
        ("--cooldown 9", "unrecognized arguments: --cooldown 9; the contenders of `outrider bench` take turns"),
        ("--plot x.svg", "unrecognized arguments: --plot x.svg; `outrider bench --json` prints the figures"),
        ("--streams 0", "streams must be whole numbers between 1 and 256, got 0 among them"),
        ("--streams 2,many", "got 'many' among them"),
        ("--streams 2 --draft x/y", "--streams measures one drafter, got 2"),
        ("--streams 2 --num-draft-tokens 2", "mlx-lm's BatchGenerator cannot speculate"),
        ("--streams 2 --lookahead 2,always", "got 'always' among them"),
        ("--streams 2 --lookahead 65", "--lookahead must be whole numbers between 0 and 64"),
        ("--streams 2 --kv-bits 8", "--kv-bits is not for many streams: mlx-lm's BatchGenerator cannot quantise"),
        ("--trace-acceptance /none/trace.jsonl", "is in no directory that exists"),
        (f"{TRACE} --streams 1", "--streams does not go with --trace-acceptance"),
        (f"{TRACE} --overhead", "--overhead does not go with --trace-acceptance"),
        (f"{TRACE} --lookahead 2", "--lookahead does not go with --trace-acceptance"),
    ],
    "batch prompts.jsonl --out answers.jsonl": [("--max-concurrent 0", "--max-concurrent must be a whole number")],
    "bench": [
        ("--overhead -p x", "--prompt does not go with --overhead"),
        ("--overhead -t 1", "--temperature does not go with --overhead"),
        ("--overhead --lookahead 2", "--lookahead does not go with --overhead"),
        ("--overhead --streams 257", "streams must be whole numbers between 1 and 256"),
        ("--overhead --max-tokens 15", "--max-tokens must be a whole number of at least 16"),
        ("--draft-shape layer", "--draft-shape is of the drafter that --shape makes; add --shape"),
        ("--acceptance 0.5", "--acceptance is of the drafter that --shape makes; add --shape"),
    ],
    "bench --shape tiny": [
        ("--target demo", "--target does not go with --shape"),
        ("--shape 9b", "--shape must be one of 8b, 30b-a3b, hybrid, sliding, tiny, got '9b'"),
        ("--draft-shape head", "--draft-shape must be one of 0.5b, layer, got 'head'"),
        ("--acceptance 1.5", "--acceptance must be a number between 0 and 1, got 1.5"),
        ("--draft ngram", "--draft does not go with --shape"),
        ("--prompt def", "--prompt does not go with --shape"),
        ("--revision main", "--shape takes --quantize and --draft-quantize only"),
        ("--dtype int4", "--dtype must be one of float32, bfloat16, float16, got 'int4'"),
    ],
}
# What shows only at a model that is there.
LATER: dict[str, list[tuple[str, str]]] = {
    "generate hi --target demo": [],
    "chat --target demo": [("--max-tokens 0", "--max-tokens must be"), ("--thinking", "thinking=True has no effect")],
    "serve --target demo": [],
    "doctor --target demo": [("--draft ngram", "draft must be a model here")],
    "bench --target demo --draft ngram": [("--prompt ''", "the prompt is empty")],
}
BAD_OPTIONS = [("--rewind never", ODD_REWIND), ("--device tpu", ODD_DEVICE)]
REFUSED |= {command: [*cases, *BAD_OPTIONS] for command, cases in LATER.items()}


@sweep(
    ("command", "flags", "complaint"),
    [(command, flags, complaint) for command, cases in REFUSED.items() for flags, complaint in cases],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(command, flags, complaint, monkeypatch, capfd):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    out, err = ran(capfd, *shlex.split(f"{command} {flags}"), status=2)
    assert out == ""
    assert complaint in " ".join(err.split())
    assert "/no/such/model" not in err
    assert err.startswith("usage: ") or err.count("\n") == 1
