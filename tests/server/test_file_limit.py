"""The limit of open files, and how many connections it allows."""

import resource

import pytest
from sweeps import sweep

from protocol.errors import SettingsError
from runtime.server.connections.address import OTHER_FILES, make_room_for_connections

NO_LIMIT = resource.RLIM_INFINITY


class Limits:
    """A system's limits of open files, which refuses to raise them beyond `most`."""

    def __init__(self, soft: int, hard: int, most: int) -> None:
        self.now = (soft, hard)
        self.most = most

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, limits: tuple[int, int]) -> None:
        if which == resource.RLIMIT_NOFILE:
            if limits[1] != self.now[1] or limits[0] > self.most:
                raise ValueError("not allowed to raise maximum limit")
            self.now = limits


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int = 10**6) -> Limits:
    system = Limits(soft, hard, most)
    monkeypatch.setattr(resource, "getrlimit", system.get)
    monkeypatch.setattr(resource, "setrlimit", system.set)
    return system


@sweep(
    ("soft", "hard", "most", "requested", "number", "soft_after"),
    [
        *[(20_000, 20_000, 10**6, None, 1000, 20_000), (20_000, 20_000, 10**6, 5000, 5000, 20_000)],
        (NO_LIMIT, NO_LIMIT, 10**6, 5000, 5000, NO_LIMIT),
        (256, NO_LIMIT, 10**6, None, 1000, 1000 + OTHER_FILES),  # macOS
        (1024, 4096, 10**6, 3000, 3000, 3000 + OTHER_FILES),
        *((*limits, None, 1024 - OTHER_FILES, 1024) for limits in ((256, 1024, 10**6), (1024, NO_LIMIT, 1024))),
        (64, 64, 10**6, None, 1, 64),
    ],
)
def test_the_limit_is_raised_as_far_as_connections_need_it_and_may_be(
    monkeypatch, soft, hard, most, requested, number, soft_after
):
    system = limits(monkeypatch, soft, hard, most)
    assert make_room_for_connections(requested) == number
    assert system.now == (soft_after, hard)


@pytest.mark.parametrize(("soft", "hard", "most"), [(1024, 4096, 10**6), (4096, NO_LIMIT, 4096)])
def test_more_connections_than_there_may_be_files_are_an_error(monkeypatch, soft, hard, most):
    limits(monkeypatch, soft, hard, most)
    with pytest.raises(SettingsError, match=r"--max-connections must be at most 3968 here, got 3969: .* 4096 files"):
        make_room_for_connections(4096 - OTHER_FILES + 1)
