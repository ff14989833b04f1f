"""An observer: prints the mean of the losses that were logged since it was called last, and every evaluation."""

from pathlib import Path

import hasten


def print_progress(records: list[dict]) -> None:
    losses = [record["loss"] for record in records if "loss" in record]
    if losses:
        print(f"step {records[-1]['step']}: mean loss {sum(losses) / len(losses):.3f}")
    for record in records:
        if "metric" in record:
            print(f"step {record['step']}: metric {record['metric']:.3f}")


if __name__ == "__main__":
    hasten.train(f"{Path(__file__).parent}/spiral.py:task", observers=[print_progress])
