"""The acceptance of drafts, by depth, category and temperature."""

import pytest

from runtime.distill.evaluation import ALL, Drafted, acceptance_by_category, acceptance_of

ONE, OTHER = Drafted((10, 5, 2, 1), (6.0, 2.0, 1.5)), Drafted((10, 10, 0, 0), (8.0, 6.0, 0.0))


def test_each_step_counts_where_those_before_it_agree() -> None:
    found = acceptance_of([ONE])
    assert found.greedy == (0.5, 0.4, 0.5)
    assert found.sampled == (0.6, 0.4, 0.75)
    assert found.num_accepted == pytest.approx(0.5 + 0.2 + 0.1)
    assert acceptance_of([ONE, OTHER]).greedy == (0.75, round(2 / 15, 4), 0.5)


def test_categories_are_shown_if_there_are_several() -> None:
    found = acceptance_by_category([ONE, OTHER, ONE], ["code", "", "code"])
    assert [*found] == [ALL, "none", "code"]
    assert found["code"] == acceptance_of([ONE, ONE])
    assert found["none"] == acceptance_of([OTHER])
    assert found[ALL] == acceptance_of([ONE, OTHER, ONE])
    assert [*acceptance_by_category([ONE], [""])] == [ALL]
