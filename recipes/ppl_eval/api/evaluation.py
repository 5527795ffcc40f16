"""``evaluate``: the recipe as a function, in a process of its own or in a program with a process group."""

import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from ppl_eval.api import live as api_live
from ppl_eval.api.caller import left_as_it_was
from ppl_eval.api.result import Result, read_result
from ppl_eval.config import activity
from ppl_eval.config.settings import KEYS, Settings, read_config
from ppl_eval.config.yaml_files import find_config, load_config
from ppl_eval.distributed.embedded import InputError, join, raising
from ppl_eval.distributed.process import Process
from ppl_eval.distributed.rendezvous import World, environment_facts, meet
from ppl_eval.models import live
from ppl_eval.scoring.live import unwrap

# Where a config says nothing: a notebook wants the windows, and no log.
_DEFAULTS = {"per_window": True, "log_level": "WARNING"}
_RESULT = "result/content"

Config = str | Path | Mapping[str, Any]
Overrides = Mapping[str, Any] | Sequence[str]


def evaluate(
    config: Config,
    *,
    overrides: Overrides = (),
    model: nn.Module | None = None,
    tokenizer: Any = None,
) -> Result:
    """Evaluate perplexity: what the recipe does, in this process, with the same bits.

    In a program that has a process group every rank calls it, as a collective: the group is used and left as
    it is, and every rank gets the result. Without one the process is alone.

    The process is left as it was: groups, random states, signal handlers, current device. Nothing ends it;
    where a rank fails, all raise, once they come to a step on which ranks agree. (Where ranks share a
    forward, FSDP's for one, the others wait in it as long as the program's own group allows.)

    Example:
        >>> evaluate("smollm2/136M_ppl")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ppl_eval.distributed.embedded.InputError: no config is called 'smollm2/136M_ppl': no such file, ...

    Args:
        config: path of a config, the name of a shipped one, or its keys and values. Without ``output_dir``
            files are written to a temporary folder, which is removed.
        overrides: keys, dotted for nested ones, and their values: ``{"batch_size": 4,
            "protocol.max_seq_len": 512}``; or texts as on the command line: ``["batch_size=4",
            "~quantizer"]``. ``per_window`` is on and ``log_level`` is WARNING where neither says otherwise.
        model: a torchtune decoder in memory, which takes the place of the config's ``model`` and
            ``checkpointer``: whole on every rank (DistributedDataParallel or none), or divided over all of
            them by FSDP2. It is scored as it is and given back as it was: modes, hooks, replaced functions.
        tokenizer: torchtune's ``HuggingFaceBaseTokenizer`` or a fast tokenizer of transformers, which takes
            the place of the config's ``tokenizer``.

    Returns:
        The result, the same on every rank; the windows are on rank 0.

    Raises:
        InputError: for what the person has to mend, with the message of the recipe. It is a ValueError.
        EvaluationError: for every other failure, of any rank.
    """
    with left_as_it_was():
        activity.begin()
        try:
            process = join(KEYS["timeout_seconds"].default)
        except ValueError as error:
            raise InputError(str(error)) from error
        # What is cleaned up must not be taken for the cause by others: it comes after the announcement.
        with ExitStack() as resources, raising(process):
            world, settings = meet(
                process,
                lambda: _settle(_Asked(config, overrides, model, tokenizer), process, resources),
                lambda settings: environment_facts(settings.written),
            )
            world = replace(world, timeout=timedelta(seconds=settings.timeout_seconds))
            return _run(settings, world, resources)


def _run(settings: Settings, world: World, resources: ExitStack) -> Result:
    from distributed_ppl_eval import DistributedPPLEvalRecipe

    recipe = DistributedPPLEvalRecipe([settings], world)
    resources.callback(recipe.cleanup)
    recipe.setup()
    recipe.evaluate()
    recipe.save_checkpoint()
    return _share(settings, world)


def _share(settings: Settings, world: World) -> Result:
    """Read the result where rank 0 wrote it, and give the other ranks what result.json holds."""
    if world.rank == 0:
        result = read_result(Path(settings.output_dir))
        world.store.set(_RESULT, json.dumps(result.content))
    # Rank 0 is the first to leave, and may remove the folder of its host.
    world.agree("shared", lambda: None)
    return result if world.rank == 0 else Result(json.loads(world.store.get(_RESULT)))


@dataclass(frozen=True)
class _Asked:
    """The arguments of ``evaluate``."""

    config: Config
    overrides: Overrides
    model: nn.Module | None
    tokenizer: Any


def _settle(asked: _Asked, process: Process, resources: ExitStack) -> Settings:
    given, overrides = _read(asked.config), asked.overrides
    if asked.model is not None:
        decoder = unwrap(asked.model)
        api_live.put_model(given, decoder)
        resources.enter_context(live.lent(decoder))
    if asked.tokenizer is not None:
        api_live.put_tokenizer(given, asked.tokenizer)
    before = {str(key): value for key, value in given.items()}
    temporary = "output_dir" not in given and "output_dir" not in _names(overrides)
    if temporary:
        # One name for all ranks, in a folder of each host.
        name = process.store.compare_set("output_dir", "", secrets.token_hex(16)).decode()
        given.output_dir = f"${{oc.env:TMPDIR,{tempfile.gettempdir()}}}/ppl_eval-{name}"
    for key, value in _DEFAULTS.items():
        if key not in given:
            given[key] = value
    settings = read_config(given, _arguments(overrides))
    if asked.model is not None:
        api_live.check_untouched(settings, before)
    if temporary and process.local_rank == 0:
        resources.callback(shutil.rmtree, settings.output_dir, ignore_errors=True)
    if isinstance(settings.protocol.get("max_seq_len"), ListConfig) or settings.part is not None:
        raise ValueError(
            "evaluate() gives one result: call it once for each protocol.max_seq_len, and leave part out;"
            " `tune run distributed_ppl_eval` takes both"
        )
    return settings


def _read(config: Config) -> DictConfig:
    if isinstance(config, str | Path):
        return load_config(find_config(str(config)))
    made = OmegaConf.create(_plain(dict(config)))
    assert isinstance(made, DictConfig)
    return made


def _names(overrides: Overrides) -> list[str]:
    return list(overrides) if isinstance(overrides, Mapping) else [text.split("=")[0] for text in overrides]


def _arguments(overrides: Overrides) -> list[str]:
    """Return overrides as the command line has them; values keep their types."""
    if isinstance(overrides, str):
        raise ValueError(f"overrides are {overrides!r}; they must be a mapping, or a list of key=value texts")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [key if key.startswith("~") else f"{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    # JSON is YAML, and "1" stays a text. What is no number and needs no quotes is what a person would type.
    plain = _plain(value)
    return plain if isinstance(plain, str) and plain.strip() == "???" else json.dumps(plain)


def _plain(value: Any) -> Any:
    """Return a value with paths as texts and OmegaConf's containers as Python's."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
