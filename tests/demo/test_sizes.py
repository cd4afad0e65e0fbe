import pytest

from wtransfer.demo.model import ByteTransformer
from wtransfer.demo.sizes import NAMED_SIZES, ModelShape


@pytest.mark.parametrize(
    ("size", "millions"), [*NAMED_SIZES.items(), ("25", 25.0), ("500", 500.0), ("5000", 5000.0)]
)
def test_a_size_gives_about_as_many_weights(size, millions):
    shape = ModelShape.parse(size)
    assert 0.7 <= shape.num_weights / (millions * 1e6) <= 1.3
    assert shape.width % 64 == 0


def test_the_estimate_is_that_of_the_real_model():
    shape = ModelShape.parse("tiny")
    num_parameters = ByteTransformer(shape, seed=0).num_parameters()
    assert shape.num_weights == pytest.approx(num_parameters, rel=0.02)


@pytest.mark.parametrize("size", ["", "huge", "0", "-1", "nan", "inf", "1e9"])
def test_what_is_no_size_is_refused_with_the_words_there_are(size):
    with pytest.raises(ValueError, match="tiny, small, medium, large"):
        ModelShape.parse(size)
