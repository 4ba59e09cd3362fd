"""How those who are left of a team agree, apart from any process."""

import pytest

from ashl.runtime.agreement import Agreement


class Store:
    def another(self) -> "Store":
        return self


class Work:
    """A collective that ends just after a look at it was over, well or with an error."""

    def __init__(self, error: str | None) -> None:
        self.looks, self.error = 0, error

    def wait(self, timeout: object = None) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_what_ends_as_a_look_is_over_has_ended() -> None:
    agreement = Agreement(Store(), 0, (0, 1))
    agreement.wait((0, 1), Work(None))
    with pytest.raises(RuntimeError, match="closed by peer"):
        agreement.wait((0, 1), Work("closed by peer"))
