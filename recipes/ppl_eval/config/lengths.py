"""Several context lengths in one run: ``protocol.max_seq_len`` as a list."""

import copy
from dataclasses import replace
from pathlib import Path

from omegaconf import ListConfig

from ppl_eval.config.settings import Settings


def settings_by_length(settings: Settings) -> list[Settings]:
    """Return the settings of each context length, in the order of the list; of one length, those given.

    Each length has its own folder, ``<output_dir>/<length>``, and there everything that a run of this length
    alone has.

    Raises:
        ValueError: for an empty list, one with anything but different whole numbers, or a key that means
            something for one length only.
    """
    lengths = settings.protocol.get("max_seq_len")
    if not isinstance(lengths, ListConfig):
        return [settings]
    whole = all(isinstance(length, int) and not isinstance(length, bool) for length in lengths)
    if not len(lengths) or not whole or len(set(lengths)) < len(lengths):
        raise ValueError(
            f"protocol.max_seq_len is {list(lengths)}; it must be a whole number, or a list of different ones"
        )
    calibrated = settings.quantizer is not None and "calibration" in settings.quantizer
    for key, given in {
        "baseline": settings.baseline is not None,
        "metric_logger": settings.metric_logger is not None,
        "quantizer.calibration": calibrated,
    }.items():
        if given:
            raise ValueError(
                f"{key} is for one context length, but protocol.max_seq_len is {list(lengths)}; run them one"
                " by one"
            )
    return [_of_length(settings, length) for length in lengths]


def _of_length(settings: Settings, length: int) -> Settings:
    config = copy.deepcopy(settings.config)
    config.protocol.max_seq_len = length
    config.output_dir = str(Path(settings.output_dir) / str(length))
    return replace(settings, config=config, protocol=config.protocol, output_dir=config.output_dir)
