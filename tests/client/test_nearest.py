"""What whoever mistyped a word is told."""

from pagedd.client.nearest import did_you_mean, nearest


def test_the_nearest_word_is_asked_for_and_none_that_is_far() -> None:
    words = ["block_size", "model", "max_num_seqs"]
    assert nearest("blok_size", words) == "block_size"
    assert nearest("colour", words) is None
    assert did_you_mean("max_num_seq", words, "see the list") == "did you mean max_num_seqs?"
    assert did_you_mean("colour", words, "see the list") == "see the list"
