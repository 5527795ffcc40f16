"""lm-eval's wikitext task, from a local file in the form of WikiText: its pages, its counts, its figures."""

import re
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from helpers.pipeline import score, tiny_llama
from helpers.tiny_tokenizers import encoder_of, tiny_tokenizer
from ppl_eval import protocols
from ppl_eval.data import input_files, lm_eval_task
from ppl_eval.data import lm_eval_tasks as lm_eval_data
from ppl_eval.metrics.denominators import covered_text
from ppl_eval.protocols.plan import make_plan

PAGES = (
    " = The First Page = \n \n It was made in 1 @,@ 999 , by hand ; nobody ( so they say ) knew why . \n",
    ' \n = = A Section = = \n \n The author \'s " own " words : self @-@ made at 2 @.@ 5 ° N . \n',
    " = = = Deeper = = = \n \n 漢字 and naïve café , all counted in bytes . \n",
)
# One page with sections, then two more, of which the last one is short.
WIKITEXT = "".join((" \n", *PAGES, " = Second Page = \n", PAGES[1] * 3, " = Third = \n Short . \n"))


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    file = tmp_path / "wiki.test.raw"
    file.write_text(WIKITEXT, encoding="utf-8")
    return file


def test_pages_begin_at_titles() -> None:
    pages = lm_eval_data.wikitext_pages(WIKITEXT)
    assert [page.split("\n")[0].strip() for page in pages] == [
        "= The First Page =",
        "= Second Page =",
        "= Third =",
    ]
    # White space before the first title is no page, and a line feed is lost at each cut.
    assert "\n".join([" ", *pages]) == WIKITEXT
    assert lm_eval_data.wikitext_pages("no title at all\n") == ["no title at all\n"]


def test_documents_are_detokenised_and_counted_as_lm_eval_does(wiki: Path) -> None:
    parts = list(lm_eval_task(paths=str(wiki)).parts([]))
    pages = lm_eval_data.wikitext_pages(WIKITEXT)
    assert [part.text for part in parts] == [wikitext_detokenizer({"page": page}) for page in pages]
    assert [part.original for part in parts] == pages
    assert parts[0].text != pages[0]
    assert all(part.is_last for part in parts)


@pytest.mark.parametrize("adds_bos", [False, True], ids=["no_bos", "bos"])
def test_figures_are_those_of_lm_evals_evaluator(wiki: Path, tmp_path: Path, adds_bos: bool) -> None:
    model, decoder = tiny_llama()
    tokenizer = tiny_tokenizer(WIKITEXT, adds_bos)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=48, batch_size=2, add_bos_token=False)
    local = {"task": "wikitext", "custom_dataset": lambda **_: lm_eval_data._local_pages([wiki])}
    manager = lm_eval_data._manager_of("wikitext")
    task = manager.load([{"group": "local", "task": [local]}])["tasks"]["wikitext"]
    theirs = simple_evaluate(model=harness, tasks=[task], task_manager=manager, bootstrap_iters=0)
    assert theirs is not None
    published = theirs["results"]["wikitext"]

    protocol, encoder = protocols.rolling(48), encoder_of(tokenizer, adds_bos)
    ours = score(protocol, lm_eval_task(paths=str(wiki)), encoder, decoder, tmp_path)
    covered = covered_text(make_plan(protocol, ours.data.offsets_D1, 1), ours.data)
    assert covered is not None
    found = ours.figures_of(covered)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(published[f"{name},none"], rel=1e-6), name
    # The counts are those of the pages as they were, not as they were scored.
    pages = lm_eval_data.wikitext_pages(WIKITEXT)
    assert found["num_bytes"] == sum(len(page.encode()) for page in pages)
    assert found["num_words"] == sum(len(re.split(r"\s+", page)) for page in pages)


def test_the_file_may_change_and_is_read_again(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lm_eval_task(paths=str(wiki))
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    before = source.stamp()
    assert before is not None
    assert lm_eval_task().stamp() is None
    wiki.write_text(WIKITEXT + " More . \n", encoding="utf-8")
    assert source.stamp() != before


def test_what_cannot_be_reproduced_is_refused(wiki: Path) -> None:
    with pytest.raises(ValueError, match=r"no file is named 'wiki\.nowhere'"):
        lm_eval_task(paths="wiki.nowhere")
    for task in ("piqa", "pile_10k", "c4"):
        with pytest.raises(
            ValueError, match=rf"'{task}' cannot be given dataset\.paths.*one field 'page'.*text_files"
        ):
            list(lm_eval_task(task, paths=str(wiki)).parts([]))

    class OtherKind:
        task_name, OUTPUT_TYPE = "piqa", "multiple_choice"

    with pytest.raises(ValueError, match="of the kind multiple_choice, which measures no perplexity"):
        lm_eval_data._check_kind(OtherKind())

    class OtherCounts:
        task_name = "tale"

        def doc_to_target(self, doc):
            return doc["page"]

        def process_results(self, doc, results):
            return {"word_perplexity": (0.0, 12345), "byte_perplexity": (0.0, 3)}

    with pytest.raises(ValueError, match=r"divides by .*12345.*the size of no text"):
        lm_eval_data._part(OtherCounts(), {"page": "abc"})


def test_without_a_network_the_way_out_is_named() -> None:
    with pytest.raises(ValueError, match=r"could not load its task 'wikitext'.*give dataset\.paths"):
        list(lm_eval_task().parts([]))
