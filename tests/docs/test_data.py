"""Every config snippet of docs/data.md reads the data that it says it reads."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from omegaconf import OmegaConf

from helpers.texts import ALPACA
from helpers.tiny_tokenizers import hf_encoder, llama3_tokenizer
from helpers.token_files import IDS, write_bin, write_megatron
from ppl_eval.config.components import instantiate
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import open_tokens, prepare_tokens
from ppl_eval.tokenization.tokenizer import TextEncoder, wrap_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SNIPPETS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with everything that the page speaks of."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpus").mkdir()
    (folder / "tables").mkdir()
    (folder / "sets" / "flores").mkdir(parents=True)
    (folder / "sets" / "flores" / "deu_Latn.devtest").write_text("the first\nthe second\n")
    (folder / "sets" / "flores" / "eng_Latn.devtest").write_text("the third\n")
    (folder / "corpus" / "a.txt").write_text("the first\n")
    (folder / "corpus" / "b.txt").write_text("the second\n")
    rows = [{"text": "one", "kind": "x"}, {"text": "two", "kind": "y"}]
    (folder / "tables" / "part-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    write_bin(folder / "val.bin", np.where(IDS == 1, 128001, IDS), "uint32")
    write_megatron(folder / "megatron_text_document.bin", IDS, [4, 7, 2], [0, 1, 2, 3])
    (folder / "chats").mkdir()
    (folder / "chats" / "a.jsonl").write_text(json.dumps({"prompt": "the", "completion": "first"}))
    (folder / "alpaca_val.json").write_text(json.dumps(ALPACA))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    where = tmp_path_factory.mktemp("llama3")
    return wrap_tokenizer(llama3_tokenizer(where), {"path": str(where / "tokenizer.model")})


def test_the_page_has_snippets() -> None:
    assert len(SNIPPETS) >= 9


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(
    snippet: str, folder: Path, encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if "config_name" in snippet:
        # No hub is reached here: the library's call is watched instead.
        called: dict[str, Any] = {}

        def load_dataset(name: str, config_name: str, **arguments: Any) -> Any:
            called.update(arguments, name=name, config_name=config_name)
            return datasets.load_from_disk("saved")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = OmegaConf.create(snippet.replace("uint16 #", "uint32 #"))
    source = instantiate("dataset", config.dataset)
    if "data.chat" in snippet:
        encoder = hf_encoder(tmp_path)
        template = "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}{% endfor %}"
        template += "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
        (tmp_path / "chat_template.jinja").write_text(template)
    join = None if "sft" in snippet or "data.chat" in snippet else "\n\n"
    data = open_tokens(prepare_tokens(source, EncodeRequest(encoder, join), tmp_path / "cache"))
    assert data.num_tokens > 4
    if "config_name" in snippet:
        assert (called["name"], called["config_name"], called["split"]) == (
            "wikitext",
            "wikitext-2-raw-v1",
            "test",
        )
        assert len(called["revision"]) == 40
    if "domain" in snippet:
        assert data.domains in (("x", "y"), ("prose", "rows"))


def test_links_inside_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\(#([\w-]+)\)", PAGE)) <= headings
