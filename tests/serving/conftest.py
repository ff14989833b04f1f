"""A served model: an exported run and a client of its server."""

import pytest

from helpers.deployed import few_epochs, train_run

pytest.importorskip("onnxruntime")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The directory of an exported model of the digits."""
    from hasten.deploy.export import export_model

    run = train_run(few_epochs(), tmp_path_factory.mktemp("served") / "run")
    export_model(run)
    return run


@pytest.fixture(scope="session")
def client(exported):
    """A client of a server with the default options, shared by the tests that change nothing."""
    from helpers.served import running

    with running(exported) as (client, _, _):
        yield client
