from __future__ import annotations

from pdserve.engine.profile import budget_for, profile_steps


def test_budget_lies_on_the_line_through_the_points() -> None:
    points = [(8, 0.1), (16, 0.2), (32, 0.4)]
    assert budget_for(points, 0.3) == 24
    assert budget_for(points, 0.8) == 64  # beyond the last
    assert budget_for(points, 0.05) == 4  # before the first
    assert budget_for([(8, 0.1)], 0.2) == 16
    assert budget_for([], 0.2) == 1
    assert budget_for([(8, 0.2), (16, 0.1)], 0.3) == 16  # noise


def test_measuring_stops_at_the_target_and_at_the_limit() -> None:
    asked: list[int] = []

    def measure(tokens: int) -> float:
        asked.append(tokens)
        return 0.02 + tokens * 0.005

    profile = profile_steps(measure, target_s=0.25, min_budget=1, max_budget=2048, limit_s=10)
    assert asked == [1, 8, 16, 32, 64]
    assert profile.token_budget == 46
    asked.clear()
    profile_steps(measure, target_s=100, min_budget=1, max_budget=2048, limit_s=0.2)
    assert asked == [1, 8, 16, 32]


def test_budget_is_never_below_a_full_batch_nor_above_the_limit() -> None:
    assert profile_steps(lambda n: n * 1.0, target_s=0.25, min_budget=64, max_budget=2048).token_budget == 64
    assert profile_steps(lambda n: n * 1e-6, target_s=0.25, min_budget=1, max_budget=100).token_budget == 100
