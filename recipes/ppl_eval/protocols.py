"""The protocols: documents to windows, each a small factory that states its formula.

Notation: a document has tokens x0..x(n-1), L = ``max_seq_len``, and l_i = -ln p(x_i | the context inside its
window). A new protocol is one more factory here, or anywhere importable: the config names it by its dotted
path.
"""

import numpy as np

from ppl_eval.windows import BoolArray, IntArray, Protocol, check_bos, check_max_seq_len


def disjoint(
    max_seq_len: int, join: str = "\n\n", keep_tail: bool = False, bos: str = "tokenizer"
) -> Protocol:
    r"""Windows side by side, as in the tables of the GPTQ and AWQ papers.

    Documents are joined by ``join`` and tokenised in one call; the stream is cut into floor(n/L) windows of L
    tokens and positions 1..L-1 of each are scored. PPL = exp(sum l / (windows * (L-1))).

    BOS: the tokenizer's own, once, at the head of the stream. Denominator: scored tokens.
    Reference: the ``llama_eval`` loop of IST-DASLab/gptq, ``llama.py``.

    Args:
        max_seq_len: L, tokens of a window.
        join: text between documents.
        keep_tail: score the n mod L tokens that are left too, in a shorter last window. The published tables
            drop them.
        bos: ``tokenizer`` (the reference), ``always`` or ``never``.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len)
    check_bos(bos, ("tokenizer", "always", "never"))

    def num_windows(length: IntArray) -> IntArray:
        # A tail of one token has nothing to score.
        return length // max_seq_len + (keep_tail & (length % max_seq_len >= 2))

    def locate(length: IntArray, index: IntArray) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
        start = index * max_seq_len
        stop = np.minimum(start + max_seq_len, length)
        return start, start + 1, stop, np.zeros(len(start), dtype=np.bool_)

    def num_targets(length: IntArray) -> IntArray:
        whole = (length // max_seq_len) * (max_seq_len - 1)
        return whole + (np.maximum(length % max_seq_len - 1, 0) if keep_tail else 0)

    return Protocol(
        name="disjoint",
        max_seq_len=max_seq_len,
        parameters={"max_seq_len": max_seq_len, "join": join, "keep_tail": keep_tail, "bos": bos},
        join=join,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=num_targets,
    )
