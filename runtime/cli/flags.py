"""The flags of the library's arguments, and error messages worded with flags."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from protocol.argument_aliases import ALIASES, meant
from protocol.errors import OutriderError
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings
from protocol.wording import Wording, worded

# Flags of mlx-lm and of earlier versions, which Outrider replaces by something else.
_REPLACEMENTS = {
    "--extra-eos-token": "--stop ends a text at a string",
    "--image": "models read text alone",
    "--prompt-cache-file": "`outrider generate` continues such a file, and `outrider chat` has /save and /load",
    "--target-device": "this is the process's device: use --device",
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
_NAMED_OTHERWISE = {"lookaheads": "--lookahead", "stalled_s": "--stalled-seconds", "grace_s": "--grace-seconds"}


def flag(name: str) -> str:
    """The flag of an argument."""
    return _NAMED_OTHERWISE.get(name, f"--{name.replace('_', '-')}")


class _Flags(Wording):
    words = MappingProxyType({"none": '"none"', "save": "/save", "reset": "/reset"})

    def argument(self, name: str) -> str:
        option = (options_of(OpenOptions) | options_of(Settings)).get(name)
        has_flag = name.isidentifier() if option is None else option.form is not None
        return flag(name) if has_flag else name

    def assignment(self, name: str, value: object) -> str:
        if isinstance(value, bool):
            return self.argument(name if value else f"no_{name}")
        return f"{self.argument(name)} {'none' if value is None else value}"


def in_flags(error: OutriderError) -> str:
    """The message of an error in the words of the command line."""
    return worded(error, _Flags())
