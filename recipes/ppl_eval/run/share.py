"""The batches that a run scores: all of the plan, or one part of it."""

from dataclasses import dataclass

from ppl_eval.config.parts import read_part
from ppl_eval.protocols.batches import masked_targets
from ppl_eval.run.inputs import Inputs


@dataclass(frozen=True)
class Share:
    """A run of neighbouring batches of the plan.

    Attributes:
        batches: their numbers.
        places: [first, last) of the places of their windows (``Plan.ids``).
        expected_tokens: targets that must be scored in them.
    """

    batches: range
    places: tuple[int, int]
    expected_tokens: int


def share_of(part: str | None, inputs: Inputs) -> Share:
    """Return the share of a part (``3/16``), or all of the plan."""
    plan = inputs.plan
    if part is None:
        return Share(range(plan.num_batches), (0, plan.num_windows), inputs.expected_tokens)
    index, num_parts = read_part(part)
    batches = range(*(plan.num_batches * i // num_parts for i in (index - 1, index)))
    first, last = (min(batch * plan.batch_size, plan.num_windows) for batch in (batches.start, batches.stop))
    expected = plan.targets_at(first, last) - masked_targets(plan, inputs.data, (first, last))
    return Share(batches, (first, last), expected)
