"""Two results say whether they are answers to one question."""

import copy
from pathlib import Path
from typing import Any

from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import TextSource
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import open_tokens, prepare_tokens
from ppl_eval.protocols import disjoint
from ppl_eval.results.baseline import EXIT_INCOMPARABLE, comparable, compare


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


def test_windows_that_one_of_two_results_leaves_out_are_named() -> None:
    """Without windows.parquet the two cannot be compared; over the windows that both scored they are."""

    def result(*windows: int, **more: Any) -> dict[str, Any]:
        coverage = {"expected_tokens": 9, "sha256": f"{windows}", "excluded_windows": list(windows)}
        numbers = {"ce_loss": 2.0, "perplexity": 7.4, "nll_sum_hex": "0x1p3"}
        return {"schema": 1, **numbers, "coverage": coverage, **more}

    shared = {"ce_loss": 2.0, "baseline_ce_loss": 2.0, "same_bits": True, "num_windows": 4}
    named = "excluded because their NLL is not finite: windows 3-4, 7 here, window 3 in the baseline"
    code, message = compare(result(3, 4, 7, against_baseline=None), result(3), 0)
    assert code == EXIT_INCOMPARABLE
    assert f"\n  {named}\n" in message
    assert "per_window=true in both runs compares the windows that both share" in message
    code, message = compare(result(3, 4, 7, against_baseline=shared), result(3), 0)
    assert code == 0
    assert message.endswith(f"over the 4 windows that both share: the same bits\n{named}")
    code, message = compare(result(3), result(3), 0)
    assert (code, "excluded" in message) == (0, False)
    # One of an earlier version knows of no such windows.
    earlier = result()
    del earlier["coverage"]["excluded_windows"]
    assert "window 7 here, none in the baseline" in compare(result(7), earlier, 0)[1]
