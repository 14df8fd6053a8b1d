"""Sweeps: tests over many cases that nobody selects alone."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., Any]


@contextmanager
def _one(case: dict[str, Any], fixtures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of one case, with fixtures in which nothing is left of the cases before; names it in its error."""
    fresh = dict(fixtures)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "monkeypatch" in fixtures:
            fresh["monkeypatch"] = monkeypatch
        if "tmp_path" in fixtures:
            fresh["tmp_path"] = fixtures["tmp_path"] / str(len(list(fixtures["tmp_path"].iterdir())))
            fresh["tmp_path"].mkdir()
        if "autojump_clock" in fixtures:
            fixtures["autojump_clock"]._virtual_base = 0.0  # no task of a case before is left to wait for a later time
        if "caplog" in fixtures:
            fixtures["caplog"].clear()
        for name in {"capsys", "capfd"} & fixtures.keys():
            fixtures[name].readouterr()
        try:
            yield fresh | case
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"{skipped}: this would skip all cases of the sweep after {case}") from skipped
        except BaseException as error:
            error.add_note("with " + ", ".join(f"{name}={value!r}" for name, value in case.items()))
            raise


def sweep(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each of some arguments, as `pytest.mark.parametrize` does, but as one test.

    Thousands of small tests take minutes to collect and to set up. The first case that fails ends the test, with a note
    that names it. Each case has its own `tmp_path`, `monkeypatch` and captured output, and begins at simulated time 0;
    other fixtures are shared. Cases with marks, given by `pytest.param`, become a test for each set of marks.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    groups: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
    for case in cases:
        is_param = isinstance(case, type(pytest.param()))
        values = case.values if is_param else case if len(arguments) > 1 else (case,)
        marks = case.marks if is_param else ()
        groups.setdefault(repr(marks), (marks, []))[1].append(dict(zip(arguments, values, strict=True)))
    assert groups, f"there are no cases of {names}"
    group = "cases_of_" + "_".join(arguments)

    def decorate(test: Test) -> Test:
        swept: Test
        if inspect.iscoroutinefunction(test):

            async def swept(**given: Any) -> None:
                for case in given.pop(group):
                    with _one(case, given) as all_arguments:
                        await test(**all_arguments)
        else:

            def swept(**given: Any) -> None:
                for case in given.pop(group):
                    with _one(case, given) as all_arguments:
                        test(**all_arguments)

        functools.update_wrapper(swept, test)
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in arguments]
        fixtures.append(inspect.Parameter(group, inspect.Parameter.KEYWORD_ONLY))
        swept.__signature__ = signature.replace(parameters=fixtures)
        params = [
            pytest.param(each, marks=marks, id="-".join(mark.name for mark in marks) or "all")
            for marks, each in groups.values()
        ]
        return pytest.mark.parametrize(group, params)(swept)

    return decorate
