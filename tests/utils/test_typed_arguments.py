"""Numbers that have a name on a command line are found and replaced, however the program reads them."""

import pytest

from hasten.utils.typed_arguments import name_of_argument, typed_numbers, with_typed


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("train.py --lr=1e-3 config.py", {"lr": 0.001}),
        ("train.py --batch-size 32 --amp", {"batch_size": 32}),
        (
            "train.py lr=1e-3 trainer.max_epochs=5 +model.depth=4",
            {"lr": 0.001, "trainer.max_epochs": 5, "model.depth": 4},
        ),
        ("-m pkg.train -b 8 --data ./cifar --out=runs/1", {"b": 8}),
        ("train.py --lr=1 --lr=2.", {"lr": 2.0}),
        ("train.py --name=v2 --decay=none --shift -1.5", {"shift": -1.5}),
        ("train.py 3 7", {}),
    ],
)
def test_numbers_with_a_name_are_found(command, found):
    numbers = typed_numbers(command.split())
    assert numbers == found
    assert [type(value) for value in numbers.values()] == [type(value) for value in found.values()]


def test_they_are_replaced_where_they_are():
    command = "train.py --lr=1e-3 config.py --batch-size 32 trainer.max_epochs=5 --lr 2"
    values = {"lr": 0.024, "batch_size": 64, "trainer.max_epochs": 2, "layers": 3}
    assert with_typed(command.split(), values) == (
        ["train.py", "--lr=0.024", "config.py", "--batch-size", "64", "trainer.max_epochs=2", "--lr", "0.024"]
    )


def test_name_of_an_argument_is_that_of_the_attribute():
    assert [name_of_argument(text) for text in ("--batch-size", "lr", "+trainer.max_epochs")] == [
        "batch_size",
        "lr",
        "trainer.max_epochs",
    ]
