"""Writes the trained model of a run for use elsewhere: its weights, its signature, and ONNX, checked against it."""

from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import add_trained_model_options
from hasten.cli.output import CommandResult, page
from hasten.core.progress import ProgressCallback

HELP = "write the trained model as safetensors and ONNX, checked"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten export`` to its parser."""
    add_trained_model_options(parser, "directory of the files (default: the run directory)")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx, for batches of any size")


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Export the model and print the files and how well they agree with it."""
    from hasten.deploy.onnx_model import require

    for package in ("pydantic", *(("onnx", "onnxruntime", "onnxscript") if options.onnx else ())):
        require(package)
    from hasten.deploy.export import export_model

    result = export_model(options.run_dir, options.trained_task, onnx=options.onnx, out=options.out)
    return CommandResult(result, page("terminal_deploy", "export_answer"))
