"""The flags of the library's arguments, and error messages worded with flags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from protocol.argument_aliases import ALIASES, meant
from protocol.errors import OutriderError, SettingsError
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings

# What to use in place of flags of mlx-lm's commands and of earlier versions.
_REPLACEMENTS = {
    "--cooldown": "the contenders of `outrider bench` take turns, so a hot machine slows all of them",
    "--copy-corpus": "it was removed; drafts are copied from the stream's own text",
    "--extra-eos-token": "--stop ends a text at a string",
    "--idle-reading": "it is on; --no-idle-reading turns it off",
    "--ignore-chat-template": "--raw leaves the chat template out",
    "--image": "models read text alone",
    "--log-level": "requests are logged in one line each; --no-access-log turns that off",
    "--pipeline": "mlx.launch shards a target over machines",
    "--plot": "`outrider bench --json` prints the figures",
    "--prompt-cache-file": "`outrider generate` continues such a file, and `outrider chat` has /save and /load",
    "--prompt-cache-size": "the prefix cache is bounded in bytes, by --prefix-cache-bytes",
    "--prompt-concurrency": "prompts are read in turns of one pass each; --prefill-step-size bounds a pass",
    "--quantize-activations": "--model-config '{\"quantize_activations\": true}' does it",
    "--target-device": "this is the process's device: use --device",
    "--use-default-chat-template": "--chat-template gives one",
    "--verbose": "stdout has the text alone; --stats prints statistics on stderr",
    "-qa": "--model-config '{\"quantize_activations\": true}' does it",
}


def hint_for(given: str, known: Sequence[str], *, by_request: bool = False) -> str | None:
    """A hint about an unknown flag, given as typed, or None. `by_request`: requests set the settings, as fields."""
    if given in _REPLACEMENTS:
        return _REPLACEMENTS[given]
    names = {flag.removeprefix("--").replace("-", "_"): flag for flag in known}
    name = given.lstrip("-").replace("-", "_")
    setting = ALIASES.get(name, name)
    if (option := options_of(Settings).get(setting)) is not None and setting not in names:
        # A flag with a similar spelling means something else.
        return f'each request sets this, by its field "{setting}"' if by_request and option.in_requests else None
    near = meant(name, names)
    return None if near is None else f"did you mean {names[near]}?"


# Flags whose arguments have another name.
_NAMED_OTHERWISE = {
    "lookaheads": "--lookahead",
    "stalled_s": "--stalled-seconds",
    "grace_s": "--grace-seconds",
    "idle_reading": "--no-idle-reading",
    "wire_memory": "--no-wire-memory",
}


def flag(name: str) -> str:
    """The flag of an argument."""
    return _NAMED_OTHERWISE.get(name, f"--{name.replace('_', '-')}")


_OPTIONS = options_of(OpenOptions) | options_of(Settings)
_NAMES = [name for name, option in _OPTIONS.items() if option.form is not None]
# A name of one word may be a word of the sentence, unless it has a value; a quoted text is the user's.
_MENTIONS = re.compile(
    rf"""^([a-z]\w*)(?=\ must\b)|(?<![\w'"/.-])(?:({"|".join(_NAMES)})=("[^"]*"|[\w.-]*\w)"""
    rf"""|({"|".join(name for name in _NAMES if "_" in name)})\b)"""
)


def in_flags(error: OutriderError) -> str:
    """The message of an error with flags where it names options: `--kv-bits 2` for `kv_bits=2`."""
    if isinstance(error, SettingsError) and error.is_of_file:
        return str(error)

    def spelled(mention: re.Match[str]) -> str:
        name, value = mention[1] or mention[2] or mention[4], mention[3]
        return flag(name) if value in (None, "True") else flag(name) + " " + value.strip('"')

    return _MENTIONS.sub(spelled, str(error))
