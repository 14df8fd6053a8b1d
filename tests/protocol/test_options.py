"""An option is declared once: its keyword, its checks, its flag, its help and its hints come from the declaration."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import attrs
import pytest

import protocol.settings
import runtime.cli.arguments.settings
import runtime.cli.flags
from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.options import option, options_of
from protocol.settings import Settings, settings_from
from protocol.validation import check_integer, validator
from runtime.cli import main as cli


@pytest.fixture
def _one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more setting."""

    @attrs.frozen(kw_only=True)
    class More(Settings):
        """Settings.

        Attributes:
            top_h: keep the likeliest tokens up to this entropy in bits, >= 0; None keeps all. Beside
                `top_k`.
        """

        top_h: int | None = attrs.field(
            default=None,
            validator=validator(check_integer, 0, or_none="all"),
            metadata=option("BITS", "filters, above temperature 0", short="-e"),
        )

    for module in (protocol.settings, runtime.cli.arguments.settings, runtime.cli.flags):
        monkeypatch.setattr(module, "Settings", More)


@pytest.mark.usefixtures("_one_more")
def test_a_declared_setting_is_a_keyword_and_a_flag_with_help_and_hints(capfd: Any) -> None:
    assert settings_from({"top_h": 3}).top_h == 3
    with pytest.raises(SettingsError, match=r"^top_h must be a whole number of at least 0, or None for all, got -1$"):
        settings_from({"top_h": -1})
    with pytest.raises(SettingsError, match="did you mean 'top_h'"):
        settings_from({"top_hh": 3})
    for flag in ("--top-h", "-e"):
        assert cli.main(["generate", "hi", flag, "-1"]) == 2
        assert capfd.readouterr().err == (
            "outrider: error: --top-h must be a whole number of at least 0, or None for all, got -1\n"
        )
    for command, hint in (
        (["generate", "hi", "--top-hh", "3"], "did you mean --top-h?"),
        (["serve", "--top-h", "3"], 'each request sets this, by its field "top_h"'),
    ):
        with pytest.raises(SystemExit):
            cli.main(command)
        assert capfd.readouterr().err.rstrip().endswith(hint)
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help-all"])
    said = " ".join(capfd.readouterr().out.split())
    assert (
        '-e BITS, --top-h BITS keep the likeliest tokens up to this entropy in bits, >= 0; "none" keeps all (' in said
    )


_SERVED = """
import json
import attrs
import protocol.settings
from protocol.options import option
from protocol.validation import check_integer, validator

@attrs.frozen(kw_only=True)
class More(protocol.settings.Settings):
    '''Settings.

    Attributes:
        top_h: keep the likeliest tokens up to this entropy in bits, >= 0; None keeps all.
    '''

    top_h: int | None = attrs.field(
        default=None, validator=validator(check_integer, 0, 9), metadata=option("BITS", fields=("entropy_bits",))
    )

protocol.settings.Settings = More
from runtime.server.anthropic.requests import MessagesRequest
from runtime.server.answers.body import parse_request
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.responses.requests import ResponsesRequest, parse_response_request
from runtime.server.responses.store import ResponseStore

hello = [{"role": "user", "content": "hello"}]
asked = lambda **body: json.dumps({**body, "entropy_bits": 3}).encode()
read = [
    parse_request(ChatRequest, asked(messages=hello)).generation(),
    parse_request(CompletionRequest, asked(prompt="hello")).generation(),
    parse_request(MessagesRequest, asked(messages=hello)).generation(),
    parse_response_request(asked(input="hello"), ResponseStore(1, 1)).generation,
]
types = [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
print(json.dumps([[request.settings.get("top_h") for request in read],
                  [each.model_json_schema()["properties"]["top_h"] for each in types]]))
"""


@pytest.mark.slow
def test_a_declared_setting_is_a_field_of_requests_in_every_api() -> None:
    # In a process of its own: the types of requests are made as their modules are imported.
    done = subprocess.run([sys.executable, "-c", _SERVED], capture_output=True, text=True, check=True)
    taken, described = json.loads(done.stdout)
    assert taken == [3] * 4
    about = "keep the likeliest tokens up to this entropy in bits, >= 0; null keeps all; also `entropy_bits`"
    assert {each["description"] for each in described} == {about}
    assert all({"maximum": 9, "minimum": 0, "type": "integer"} in each["anyOf"] for each in described)


@pytest.mark.parametrize("declaration", [Settings, OpenOptions])
def test_every_declared_option_is_described(declaration: type[attrs.AttrsInstance]) -> None:
    assert [name for name, each in options_of(declaration).items() if not each.about] == []
