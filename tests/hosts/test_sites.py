"""What is noted about an object of a script."""

import pytest
from torch import nn

from hasten.hosts.inside.sites import class_name


class Wrapper(nn.Module):
    def __init__(self, module, *more):
        super().__init__()
        self.module, self.more = module, nn.ModuleList(more)


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (nn.DataParallel(nn.Linear(2, 2)), "Linear"),
        (Wrapper(Wrapper(nn.Linear(2, 2))), "Linear"),
        (Wrapper(nn.Linear(2, 2), nn.Linear(2, 2)), "Wrapper"),
        ([], "list"),
    ],
)
def test_class_of_a_wrapper_is_that_of_the_model_in_it(thing, name):
    assert class_name(thing) == name
