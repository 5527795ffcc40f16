"""What the README tells people to type."""

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def two_node_lines() -> tuple[dict[str, str], str]:
    """The exports and the command that the README gives for two nodes."""
    lines = README.read_text().splitlines()
    exports = dict(
        line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export PET_")
    )
    assert set(exports) == {"PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"}
    (command,) = (line for line in lines if line.startswith("tune run --nnodes 2"))
    return exports, command
