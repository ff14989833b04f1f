"""Finds the fastest int8 model of a run that loses no more than you allow, judged by the metric of its task."""

from argparse import ArgumentParser, Namespace

from hasten.cli.argument_types import add_trained_model_options, duration, fraction, one_of
from hasten.cli.output import CommandResult, page
from hasten.core.progress import ProgressCallback

HELP = "make the trained model int8, if its metric allows it"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options and arguments of ``hasten quantize`` to its parser."""
    add_trained_model_options(parser, "directory of the result (default: RUN/int8, with --target dsp RUN/int8-dsp)")
    parser.add_argument("--budget", type=duration, default=600.0, metavar="TIME", help="time for it (default: 10m)")
    parser.add_argument(
        "--target",
        type=one_of("cpu", "dsp"),
        default="cpu",
        metavar="cpu|dsp",
        help="cpu: a model for ONNX Runtime; dsp: C99 code in integers, for processors without floating-point units",
    )
    parser.add_argument(
        "--max-loss",
        type=fraction,
        default=0.01,
        metavar="FRACTION",
        help="largest loss of the metric, as a fraction of the float model's (default: 0.01)",
    )


def run(options: Namespace, on_progress: ProgressCallback) -> CommandResult:
    """Quantize the model and print the trials; exit code 1 if no int8 model passes."""
    from hasten.deploy.onnx_model import require

    for package in ("pydantic", "onnx", "onnxruntime", "onnxscript"):
        require(package)
    from hasten.deploy.quantize import quantize

    limits = {"budget": options.budget, "target": options.target, "max_loss": options.max_loss}
    result = quantize(options.run_dir, options.trained_task, **limits, out=options.out, on_progress=on_progress)
    code = 1 if result["verdict"] == "no improvement" else 0
    return CommandResult(result, page("terminal_deploy", "quantize_answer"), code)
