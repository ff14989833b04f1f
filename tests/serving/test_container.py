"""Files for a container: they name what exists, and overwrite nothing."""

import re
import shutil

import pytest

from hasten import ConfigurationError
from hasten.serving.container import write_container
from hasten.serving.server import TOKEN_VARIABLE

yaml = pytest.importorskip("yaml")


@pytest.mark.slow
def test_manifest_and_dockerfile_fit_together(exported, tmp_path):
    files = write_container(exported, tmp_path / "out")
    assert all((tmp_path / "out" / name).is_file() for name in ("Dockerfile", "kubernetes.yaml", "model/model.onnx"))
    assert len(files) == 4
    deployment, service = yaml.safe_load_all((tmp_path / "out" / "kubernetes.yaml").read_text())
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    port = container["ports"][0]["containerPort"]
    assert port == container["readinessProbe"]["httpGet"]["port"] == service["spec"]["ports"][0]["targetPort"]
    assert port == container["startupProbe"]["httpGet"]["port"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert container["env"][0]["name"] == TOKEN_VARIABLE and service["metadata"]["name"] == "model-digits"
    dockerfile = (tmp_path / "out" / "Dockerfile").read_text()
    assert f"EXPOSE {port}" in dockerfile and f"docker build -t {container['image']} ." in dockerfile


def image_of(directory):
    """The image that the manifest names."""
    deployment = next(yaml.safe_load_all((directory / "kubernetes.yaml").read_text()))
    return deployment["spec"]["template"]["spec"]["containers"][0]["image"]


def test_tag_of_the_image_changes_with_the_model_alone(exported, tmp_path):
    write_container(exported, tmp_path / "first")
    write_container(exported, tmp_path / "again")
    onnx = pytest.importorskip("onnx")
    changed = onnx.load(tmp_path / "again" / "model" / "model.onnx")
    changed.doc_string = "another one"
    onnx.save(changed, tmp_path / "again" / "model" / "model.onnx")
    write_container(tmp_path / "again" / "model", tmp_path / "second")
    images = [image_of(tmp_path / name) for name in ("first", "again", "second")]
    assert images[0] == images[1] != images[2]
    assert all(re.fullmatch("model-digits:[0-9a-f]{12}", image) for image in images)


def test_memory_limit_grows_with_the_model(exported, tmp_path):
    large = shutil.copytree(exported, tmp_path / "large")
    with (large / "model.onnx").open("ab") as file:
        file.truncate(200 << 20)
    write_container(large, tmp_path / "out")
    deployment = next(yaml.safe_load_all((tmp_path / "out" / "kubernetes.yaml").read_text()))
    limit = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert limit.endswith("Mi") and int(limit[:-2]) >= 1024 + 200


def test_path_of_the_model_file_is_accepted(exported, tmp_path):
    files = write_container(exported / "model.onnx", tmp_path / "out", report=lambda line: None)
    assert (tmp_path / "out" / "model" / "model.onnx").read_bytes() == (exported / "model.onnx").read_bytes()
    assert len(files) == 4


def test_existing_file_is_not_overwritten(exported, tmp_path):
    (tmp_path / "Dockerfile").write_text("mine")
    with pytest.raises(ConfigurationError, match="Dockerfile already exists"):
        write_container(exported, tmp_path)
    assert (tmp_path / "Dockerfile").read_text() == "mine"
