"""The one error of this package. Pure."""


class LayoutError(ValueError):
    """A layout, roster or manifest that cannot be. `field` says where, `rule` what must hold (with the numbers)."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule
