"""The one error of this package. Pure."""


class PlanError(ValueError):
    """A plan that cannot be made or is wrong. The text names rank, parameter and box, or the limit, with numbers."""
