"""Small least squares with weights that are not negative, after Lawson and Hanson (1974), chapter 23. Pure.

Without numpy, which the service does not have: a handful of terms and some dozens of rows.
"""

from collections.abc import Sequence

TERMS_MAX = 16
ROUNDS_MAX = 3 * TERMS_MAX
TOLERANCE = 1e-10
Matrix = list[list[float]]


def non_negative(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], *, ties: Sequence[float], toward: float
) -> list[float]:
    """The weights w >= 0 that make |rows w - wanted|^2 + sum of ties (w - toward)^2 least. Positive ties make them
    unique, however few rows there are."""
    count = len(ties)
    assert 0 < count <= TERMS_MAX and all(tie > 0 for tie in ties)
    normal = _normal(rows, ties)
    right = [
        sum(row[i] * value for row, value in zip(rows, wanted, strict=True)) + ties[i] * toward for i in range(count)
    ]
    weights, free = [0.0] * count, set[int]()
    for _ in range(ROUNDS_MAX):
        slope = [right[i] - sum(normal[i][j] * weights[j] for j in range(count)) for i in range(count)]
        best = max((i for i in range(count) if i not in free), key=lambda i: slope[i], default=None)
        if best is None or slope[best] <= TOLERANCE * max(1.0, abs(right[best])):
            break
        free.add(best)
        while True:
            found = _solved(normal, right, sorted(free))
            if all(found[i] > 0 for i in free):
                weights = found
                break
            # As far towards it as no weight becomes negative; the weights that are zero there stop to be free.
            step = min(weights[i] / (weights[i] - found[i]) for i in free if found[i] <= 0)
            weights = [old + step * (new - old) for old, new in zip(weights, found, strict=True)]
            free = {i for i in free if weights[i] > TOLERANCE}
            weights = [weight if i in free else 0.0 for i, weight in enumerate(weights)]
    return weights


def predictor_leverages(
    rows: Sequence[Sequence[float]], weights: Sequence[float], *, ties: Sequence[float]
) -> list[float]:
    """How much of each row's own value is in what the weights say of it: its residual over one minus that is what it
    would be had the row been left out, as long as the same weights are zero."""
    free = [i for i, weight in enumerate(weights) if weight > 0]
    normal = _normal(rows, ties)
    found = []
    for row in rows:
        solved = _solved(normal, list(row), free)
        found.append(sum(row[i] * solved[i] for i in free))
    return found


def _normal(rows: Sequence[Sequence[float]], ties: Sequence[float]) -> Matrix:
    count = len(ties)
    return [
        [sum(row[i] * row[j] for row in rows) + (ties[i] if i == j else 0.0) for j in range(count)]
        for i in range(count)
    ]


def _solved(normal: Matrix, right: Sequence[float], free: Sequence[int]) -> list[float]:
    """The solution in which only the `free` ones are not zero, by Cholesky's factors."""
    lower: Matrix = []
    for at, i in enumerate(free):
        lower.append([0.0] * len(free))
        for k in range(at + 1):
            rest = normal[i][free[k]] - sum(lower[at][m] * lower[k][m] for m in range(k))
            lower[at][k] = rest**0.5 if k == at else rest / lower[k][k]
    half: list[float] = []
    for at, i in enumerate(free):
        half.append((right[i] - sum(lower[at][m] * half[m] for m in range(at))) / lower[at][at])
    solution = [0.0] * len(right)
    for at in range(len(free) - 1, -1, -1):
        rest = half[at] - sum(lower[m][at] * solution[free[m]] for m in range(at + 1, len(free)))
        solution[free[at]] = rest / lower[at][at]
    return solution
