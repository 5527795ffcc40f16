"""Parts of a run that are jobs of their own: ``part: 3/16`` is the third of sixteen."""

import re


def read_part(part: str) -> tuple[int, int]:
    """Return which part it is, counted from 1, and of how many.

    Raises:
        ValueError: if it is not written like ``3/16``.
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"part is {part!r}; it must be like 3/16, from 1/16 to 16/16, or null for all")
    return int(found[1]), int(found[2])


def folder_name(part: str) -> str:
    """Return the folder of a part, inside the output_dir that all parts may share."""
    index, num_parts = read_part(part)
    return f"part-{index}-of-{num_parts}"
