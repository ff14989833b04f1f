"""Cards: fields that hasten evaluates accept known words only; descriptive fields accept any text."""

import pytest

from hasten import Card, ConfigurationError, Exactness


def card(**fields) -> Card:
    return Card(summary="a card", exactness=Exactness.CHANGES_TRAINING, **fields)


def test_what_a_method_applies_to_may_be_said_in_any_words():
    assert card(applies_to={"skip connections", "cuda"}).applies_to == {"skip connections", "cuda"}


@pytest.mark.parametrize(
    ("field", "known"),
    [("accelerates", "forward"), ("requires", "gradient_norm"), ("invalidates", "uniform_precision")],
)
def test_unknown_words_that_are_computed_with_are_refused_and_the_known_ones_named(field, known):
    assert getattr(card(**{field: [known]}), field) == {known}
    with pytest.raises(ConfigurationError, match=rf"{field}=\['skip connections'\], but the known words are .*{known}"):
        card(**{field: {"skip connections"}})


@pytest.mark.parametrize("field", ["accelerates", "applies_to", "requires", "invalidates", "replaces"])
def test_a_word_alone_is_no_set_of_words(field):
    with pytest.raises(ConfigurationError, match=rf"{field}='cuda'; it must be a set: \{{'cuda'\}}"):
        card(**{field: "cuda"})
