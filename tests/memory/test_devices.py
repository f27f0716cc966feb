"""The table of cards."""

import pytest

from sfpo_jax.memory import DEVICES, find_device


def test_the_cards_of_the_design_are_known() -> None:
    assert list(DEVICES) == ["a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200"]
    for name, device in DEVICES.items():
        assert device.name == name
        # What is printed on a card is what it has, less what the driver keeps.
        assert 40e9 < device.memory_bytes < 192e9
        config = device.target_config()
        assert f"device_memory_size: {device.memory_bytes}" in config
        assert config.count("{") == config.count("}")


@pytest.mark.parametrize(
    ("name", "hint"), [("a100", "did you mean 'a100-80gb'"), ("tpu", "known are a100-")]
)
def test_an_unknown_card_is_one_line_with_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="`device` is unknown") as caught:
        find_device(name)
    assert hint in str(caught.value)
    assert "b200" in str(caught.value) and "\n" not in str(caught.value)
