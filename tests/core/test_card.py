"""Cards: fields that hasten evaluates accept known words only; descriptive fields accept any text."""

import pytest

from hasten import Card, ConfigurationError, Exactness


def card(**fields) -> Card:
    return Card(summary="a card", exactness=Exactness.CHANGES_TRAINING, **fields)


def test_card_applies_to_accepts_any_words():
    assert card(applies_to={"skip connections", "cuda"}).applies_to == {"skip connections", "cuda"}


@pytest.mark.parametrize(
    ("field", "known"),
    [("accelerates", "forward"), ("requires", "gradient_norm"), ("invalidates", "uniform_precision")],
)
def test_card_unknown_trait_is_refused_with_the_known_ones(field, known):
    assert getattr(card(**{field: [known]}), field) == {known}
    with pytest.raises(ConfigurationError, match=rf"{field}=\['skip connections'\]; the known words are .*{known}"):
        card(**{field: {"skip connections"}})


@pytest.mark.parametrize("field", ["accelerates", "applies_to", "requires", "invalidates", "replaces"])
def test_card_string_instead_of_set_is_refused(field):
    with pytest.raises(ConfigurationError, match=rf"{field}='cuda'; it must be a set: \{{'cuda'\}}"):
        card(**{field: "cuda"})
