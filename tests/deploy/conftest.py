"""Trained runs that the tests of this directory share; they copy what they change."""

import pytest

from helpers.deployed import depthwise_digits, few_epochs, train_run


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A run directory of the digits workload."""
    return train_run(few_epochs(), tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="session")
def depthwise_run(tmp_path_factory):
    """A run directory of the depthwise network on the digits."""
    return train_run(depthwise_digits(), tmp_path_factory.mktemp("runs") / "depthwise")
