"""Documents in parts, and their hash."""

from helpers.sources import listed
from ppl_eval.data.documents import digest_of


def test_the_fingerprint_sees_content_and_boundaries() -> None:
    def facts(*texts: str) -> dict[str, str]:
        return digest_of(listed(list(texts)).parts([]))

    corpora = (["ab", "", "c"], ["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c "])
    assert len({facts(*texts)["text_sha256"] for texts in corpora}) == len(corpora)
