"""All Markdown pages: what they link to and what they name exists, and every page can be found."""

import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from ppl_eval.config.yaml_files import shipped_configs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = ROOT / "README.md"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """The page without its code blocks, in which # begins a comment."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of every link inside the repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            found.append(((page.parent / name).resolve() if name else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings; mkdocs.yml makes the site's the same."""
    titles = re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page):
    for target, anchor in links(page):
        assert target.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading #{anchor}"


def test_every_page_is_reached_from_the_readme():
    reached, new = set(), {README}
    while new:
        reached |= new
        new = {target for page in new for target, _ in links(page) if target.suffix == ".md"} - reached
    assert reached == set(PAGES)


def test_the_site_has_every_page():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without importing what it names."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    named = set(re.findall(r"[\w.-]+\.md", yaml.dump(config["nav"])))
    assert named == {page.name for page in PAGES} - {"README.md"} | {"index.md"}


@every_page
def test_paths_exist(page):
    text = page.read_text()
    for path in re.findall(r"(?<![\w/.:-])(?:tests|recipes|benchmarks|configs|docs|\.github)/[\w./-]*", text):
        assert (ROOT / path.rstrip(".")).exists(), path
    for path in re.findall(r"(?<![\w/.-])(?:ppl_eval/[\w/]+\.py|test_\w+\.py)", text):
        assert (ROOT / "recipes" / path).exists(), f"{path}: name it from the top of the repository"


@every_page
def test_names_exist(page):
    for name in set(re.findall(r"(?<!\w)ppl_eval(?:\.\w+)+", page.read_text())):
        pkgutil.resolve_name(name)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        assert f"def {name}(" in tests, name


@every_page
def test_configs_are_shipped(page):
    text = page.read_text()
    names = re.findall(r"(?:--config |ppl-eval cp )(\w+/[\w.]+)", text)
    for name in names + re.findall(r"`(\w+/[\w.]+_(?:ppl|eval)(?:_\w+)?)`", text):
        assert name in shipped_configs(), name


def commands(page: Path) -> list[str]:
    """The code blocks of the page, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(r" *# .*$", "", block, flags=re.MULTILINE) for block in blocks]


def test_the_chinese_readme_has_the_same_commands():
    assert commands(ROOT / "README.zh-CN.md") == commands(README)
    assert len(commands(README)) >= 5


def test_ci_runs_what_a_developer_types():
    script = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == script == ["make check", "make test"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [(repo["repo"], hook["entry"]) for repo in hooks for hook in repo["hooks"]] == [
        ("local", "make check")
    ]


@pytest.mark.parametrize("name", ["wrong_number", "failure"])
def test_issue_forms_ask_for_the_result(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    (result,) = (field for field in form["body"] if field["id"] == "result")
    assert "result.json" in result["attributes"]["label"]
    assert result["validations"]["required"]
