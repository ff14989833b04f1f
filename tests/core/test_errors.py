"""Texts of errors."""

from hasten.core.errors import suggest


def test_suggestion_names_the_like_words_else_all_if_few_else_the_nearest():
    few, many = ["epochs", "lr"], [f"method_{n}" for n in range(50)]
    assert suggest("epoch", few) == " (did you mean epochs?)"
    assert suggest("zzz", few) == " (there is: epochs, lr)"
    text = suggest("zzz1", many)
    assert text.startswith(" (none of the 50 is like it; nearest: method_") and text.count(",") == 2
