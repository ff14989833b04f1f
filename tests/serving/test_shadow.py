"""Agreement of two models: by the largest score, or by the score itself where there is one."""

import numpy
import pytest

from hasten.serving.shadow import agreements

A = numpy.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("scores", "others", "expected"),
    [
        (A, A + 5, 3),
        (A, A[:, ::-1], 0),
        (A, numpy.array([[1.0, 2.0], [0.0, 3.0], [0.0, 1.0]]), 2),
        (A[:, :1], A[:, :1] * 1.005, 3),
        (A[:, :1] + 1, (A[:, :1] + 1) * 1.1, 0),
        (A[:, 0] + 1, numpy.array([2.0, 4.0, 2.0]), 2),
        (A, A[:, :1], 0),
    ],
)
def test_agreements_count_samples(scores, others, expected):
    assert agreements(scores, others) == expected
