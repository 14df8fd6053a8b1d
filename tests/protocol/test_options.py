"""An option is declared once: its keyword, its checks, its flag, its help and its hints come from the declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import protocol.settings
import runtime.cli.arguments.settings
import runtime.cli.flags
from protocol.argument_aliases import ALIASES
from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.options import declared, option, options_of
from protocol.settings import Settings, settings_from
from protocol.validation import check_integer, validator
from runtime.cli import main as cli


@pytest.fixture
def _one_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more setting."""

    @declared
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
            metadata=option("BITS", "filters, at a temperature", flags="--entropy", aliases="entropy_bits"),
        )

    for module in (protocol.settings, runtime.cli.arguments.settings, runtime.cli.flags):
        monkeypatch.setattr(module, "Settings", More)
    yield
    del ALIASES["entropy_bits"]


@pytest.mark.usefixtures("_one_more")
def test_a_declared_setting_is_a_keyword_and_a_flag_with_help_and_hints(capfd: Any) -> None:
    assert settings_from({"top_h": 3}).top_h == 3  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"^top_h must be a whole number of at least 0, or None for all, got -1$"):
        settings_from({"top_h": -1})
    for near in ("top_hh", "entropy_bits"):
        with pytest.raises(SettingsError, match="did you mean 'top_h'"):
            settings_from({near: 3})
    for flag in ("--top-h", "--entropy"):
        assert cli.main(["generate", "hi", flag, "-1"]) == 2
        assert capfd.readouterr().err == (
            'outrider: error: --top-h must be a whole number of at least 0, or "none" for all, got -1\n'
        )
    for command, hint in (
        (["generate", "hi", "--entropy-bits", "3"], "did you mean --top-h?"),
        (["serve", "--top-h", "3"], 'each request sets this, by its field "top_h"'),
    ):
        with pytest.raises(SystemExit):
            cli.main(command)
        assert capfd.readouterr().err.rstrip().endswith(hint)
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help-all"])
    said = " ".join(capfd.readouterr().out.split())
    assert '--top-h BITS keep the likeliest tokens up to this entropy in bits, >= 0; "none" keeps all (' in said


@pytest.mark.parametrize("declaration", [Settings, OpenOptions])
def test_every_declared_option_is_described(declaration: type[attrs.AttrsInstance]) -> None:
    assert [name for name, each in options_of(declaration).items() if not each.about] == []
