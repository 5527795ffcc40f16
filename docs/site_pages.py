"""A hook of mkdocs: pages at the top of the repository become pages of the site, without a copy in docs/."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "README.zh-CN.md")} | {
    "README.md": "index.md"
}
TREE = "https://github.com/distributed-ppl-eval/distributed_ppl_eval/tree/main"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    root = Path(config.config_file_path).parent
    for name, target in PAGES.items():
        text = (root / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to pages at the top into links of the site, and links to other files into GitHub links."""
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    markdown = markdown.replace("](README.md", "](index.md").replace("](LICENSE", f"]({TREE}/LICENSE")
    return markdown.replace("](examples/)", f"]({TREE}/docs/examples)")
