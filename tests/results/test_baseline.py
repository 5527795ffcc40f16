"""Two results say whether they are answers to one question."""

import copy
from pathlib import Path
from typing import Any

from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import TextSource
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import open_tokens, prepare_tokens
from ppl_eval.protocols import disjoint
from ppl_eval.results.baseline import comparable


def test_text_tokenizer_and_protocol_decide(tmp_path: Path) -> None:
    encoders = []
    for kind in ("byte_level", "split_digits_in_threes"):
        (tmp_path / kind).mkdir()
        encoders.append(hf_encoder(tmp_path / kind, kind))

    def result(
        text: str, encoder: int = 0, max_seq_len: int = 4, bos: str = "never", name: str = "a", **more: Any
    ) -> dict[str, Any]:
        source = TextSource(name, {}, lambda: iter([text]))
        data = open_tokens(
            prepare_tokens(source, EncodeRequest(encoders[encoder], "\n\n", bos), tmp_path / "cache")
        )
        protocol = disjoint(max_seq_len).parameters
        return {
            "schema": 1,
            "protocol": protocol,
            "dataset": {"fingerprint": data.fingerprint, "name": name},
            **more,
        }

    first = result("the cat")
    assert comparable(first, copy.deepcopy(first)) == []
    assert comparable(first, result("the cat", name="another form", dtype="bf16")) == []
    assert comparable(first, result("the dog")) == ["dataset.fingerprint.text_sha256"]
    assert comparable(first, result("the cat", encoder=1)) == ["dataset.fingerprint.tokenizer_sha256"]
    assert comparable(first, result("the cat", bos="always")) == ["dataset.fingerprint.bos_tokens"]
    assert comparable(first, result("the cat", max_seq_len=5)) == ["protocol.max_seq_len"]
