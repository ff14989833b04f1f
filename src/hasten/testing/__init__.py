"""The contract suite that every method must pass. It needs no test framework.

All checks at once::

    from hasten.testing import check_method

    def test_my_method():
        check_method("./mine.py:Faster")

or one test per check, with pytest::

    from hasten.testing import CHECKS, Subject

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_method(check):
        check(Subject("./mine.py:Faster"))
"""

from hasten.testing.checks import CHECKS, Subject, check_method

__all__ = ["CHECKS", "Subject", "check_method"]
