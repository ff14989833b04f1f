"""Texts of errors."""

from hasten.core.errors import suggest


def test_suggestion_names_the_like_words_else_all_if_few_else_the_first():
    few, many = ["epochs", "lr"], [f"method_{n}" for n in range(50)]
    assert suggest("epoch", few) == " (did you mean epochs?)"
    assert suggest("zzz", few) == " (there is: epochs, lr)"
    assert suggest("zzz1", many) == " (there are 50, none like it: method_0, method_1, method_10, ...)"
