"""Arguments that argparse has parsed are seen, and can be replaced before the program reads them."""

import argparse
import sys

import pytest

from hasten.utils import parsed_arguments
from hasten.utils.parsed_arguments import (
    after_parsing,
    names_length,
    names_whole_length,
    offer_arguments,
    scales_with_length,
)


@pytest.fixture
def seen(monkeypatch):
    """What was parsed since ``after_parsing`` was called, by this fixture."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    for name, empty in (("_calls", []), ("_parsed", set()), ("_offered", {})):
        monkeypatch.setattr(parsed_arguments, name, empty)
    found: list[dict] = []
    after_parsing(lambda arguments: found.append(dict(vars(arguments))))
    found.clear()  # arguments of the program that runs the tests
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--lr", type=float, default=0.1)
    return made


def test_parsed_arguments_are_seen_once(seen):
    parser().parse_args(["--lr", "3"])
    parser().parse_known_args(["--other"])
    assert seen == [{"lr": 3.0}, {"lr": 0.1}]


def test_arguments_of_a_subcommand_are_seen_with_those_of_its_parser(seen):
    main = parser()
    main.add_subparsers(dest="verb").add_parser("fit").add_argument("--epochs", type=int)
    main.parse_args(["fit", "--epochs", "4"])
    assert seen == [{"lr": 0.1, "verb": "fit", "epochs": 4}]


def test_arguments_can_be_replaced(seen):
    after_parsing(lambda arguments: setattr(arguments, "lr", 7.0))
    assert parser().parse_args([]).lr == 7.0


def test_arguments_that_were_parsed_before_are_seen_where_they_are_held(seen):
    arguments = argparse.Namespace(epochs=3)

    def imports_torch():
        after_parsing(lambda held: setattr(held, "epochs", 1))

    imports_torch()
    assert arguments.epochs == 1


def test_object_that_is_made_lazily_is_left_alone(seen):
    class Lazy:
        @property
        def __class__(self):
            raise RuntimeError("made too early")

    lazy = Lazy()
    after_parsing(lambda held: None)
    assert type(lazy) is Lazy


def test_numbers_that_are_passed_to_a_framework_are_seen_and_replaced(seen, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "weight_decay=0.1"])
    after_parsing(lambda arguments: setattr(arguments, "max_epochs", 2) if hasattr(arguments, "max_epochs") else None)
    parser().parse_args([])  # declares lr
    seen.clear()
    assert offer_arguments({"lr": 0.5, "weight_decay": 0.1, "max_epochs": 9}) == {"max_epochs": 2}
    assert seen == [{"max_epochs": 9}]


def test_number_that_a_framework_is_passed_twice_with_other_values_is_seen_as_a_text(seen):
    assert [offer_arguments({"rate": value}) for value in (0.1, 0.1, 0.2)] == [
        {"rate": 0.1},
        {"rate": 0.1},
        {"rate": 0.2},
    ]
    assert seen[-1] == {"rate": "0.1 and 0.2"}


@pytest.mark.parametrize("name", ["epochs", "num_epochs", "n_epochs", "max_epochs", "num-train-epochs", "max_steps"])
def test_length_of_a_training_is_known_by_its_name(name):
    assert names_length(name) and names_whole_length(name)


@pytest.mark.parametrize(
    "name",
    [
        *("decay_epochs", "decay_epoch", "lr_drop_epochs", "cooldown_epochs", "freeze_epochs", "checkpoint_steps"),
        *("save_epochs", "log_steps", "print_steps", "eval_steps", "start_epoch", "warm_up_epochs"),
    ],
)
def test_length_of_a_part_or_of_an_interval_is_none_of_the_training(name):
    assert not names_length(name)


def test_name_with_another_word_may_be_that_of_a_part():
    assert names_length("finetune_epochs") and not names_whole_length("finetune_epochs")


def test_parts_of_a_schedule_get_shorter_with_the_training():
    assert all(map(scales_with_length, ("epochs", "max_iters", "lr_decay_iters", "decay_epochs")))
    assert not any(map(scales_with_length, ("warmup_steps", "log_every_steps", "batch_size")))
