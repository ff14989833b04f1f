"""Serves an exported model over HTTP: batching, limits, metrics, reload of a newer model, and a page to try it."""

from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import duration, whole_number
from hasten.cli.output import CommandResult
from hasten.cli.progress import print_stderr
from hasten.core.errors import ConfigurationError
from hasten.core.progress import ProgressCallback

HELP = "serve an exported model over HTTP"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten serve`` to its parser."""
    parser.add_argument("model", metavar="MODEL", help="directory of `hasten export --onnx` or `quantize`, or a run")
    parser.add_argument("--host", default="127.0.0.1", help="address; one that other machines reach needs a token")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, metavar="N", help="0 picks a free one")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="bearer token that requests must carry, 16 characters or more; mode 600 (default: HASTEN_TOKEN)",
    )
    parser.add_argument("--compare", metavar="MODEL", help="second model: gets the same requests, for /metrics only")
    parser.add_argument("--tune-batching", action="store_true", help="measure the batch size and the wait at the start")
    parser.add_argument("--max-batch", type=whole_number(1, 4096), metavar="N", help="samples of a batch (default: 64)")
    parser.add_argument("--max-wait", type=duration, metavar="TIME", help="wait for more samples (default: 0.002s)")
    parser.add_argument("--max-queue", type=whole_number(1, 10**6), metavar="N", help="waiting samples (default: 1024)")
    parser.add_argument("--deadline", type=duration, metavar="TIME", help="longest wait of a request (default: 10s)")
    parser.add_argument("--threads", type=whole_number(0, 1024), default=0, metavar="N", help="of the model; 0: all")
    parser.add_argument(
        "--write", metavar="DIR", help="write a Dockerfile and a Kubernetes manifest, and serve nothing"
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Serve until a signal, or write the files for a container."""
    from hasten.deploy.onnx_model import require

    packages = ("onnxruntime", "pydantic", "fastapi", "uvicorn", "orjson", "prometheus_client", "swagger_ui_bundle")
    for package in packages:
        require(package, "serve")
    report = (lambda line: None) if options.quiet else print_stderr
    if options.write:
        from hasten.serving.container import write_container

        files = write_container(options.model, options.write, report)
        return CommandResult({"files": files}, lambda result: "\n".join(result["files"]))
    from hasten.serving.batcher import BatcherSettings
    from hasten.serving.server import serve

    names = ("max_batch", "max_wait", "max_queue", "deadline")
    limits = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.tune_batching and {"max_batch", "max_wait"} & set(limits):
        advice = "leave out these two or --tune-batching"
        raise ConfigurationError(f"--tune-batching chooses --max-batch and --max-wait itself; {advice}")
    result = serve(
        options.model,
        host=options.host,
        port=options.port,
        token_file=options.token_file,
        compare=options.compare,
        tune_batching=options.tune_batching,
        settings=BatcherSettings(**limits),
        threads=options.threads,
        report=report,
    )
    return CommandResult(result, lambda result: f"stopped; answers by status: {result['answers'] or 'none'}")
