"""``ppl-eval tasks``: lm-eval's evaluator over the model that a config names, on any number of ranks."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.config import activity, environment
from ppl_eval.config.components import instantiate
from ppl_eval.config.files import whole_file
from ppl_eval.config.interpreter import quieten_libraries
from ppl_eval.config.settings import KEYS, Settings, read_config
from ppl_eval.config.yaml_files import find_config, load_config
from ppl_eval.distributed.failure import fail_together
from ppl_eval.distributed.process import connect
from ppl_eval.distributed.rendezvous import World, environment_facts, meet
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.run.from_folder import filled
from ppl_eval.run.groups import join_groups
from ppl_eval.run.weights import agree_on_weights
from ppl_eval.scoring import load
from ppl_eval.tokenization.tokenizer import TextEncoder, without_bos, wrap_tokenizer

# Keys of torchtune's eleuther_evaluation.yaml, and two of ours; the last steers generation: not done here.
_TASK_KEYS = ("tasks", "limit", "max_seq_length", "num_fewshot", "include_path", "enable_kv_cache")
# Required of an evaluation of perplexity, and not built here.
_UNUSED = {
    "dataset": {"_component_": "ppl_eval.data.python_docs"},
    "protocol": {"_component_": "ppl_eval.protocols.disjoint", "max_seq_len": 1},
}
FILE = "results.json"


@dataclass(frozen=True)
class Asked:
    """What lm-eval is asked for.

    Attributes:
        tasks: names of tasks, groups or tags.
        limit: documents of each task; None for all.
        max_seq_length: most tokens that the model sees; None for what it was built for.
        num_fewshot: examples before each question; None for the task's own number.
        include_path: a folder with tasks of one's own.
    """

    tasks: tuple[str, ...]
    limit: int | float | None = None
    max_seq_length: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None


def run_tasks(config: str, overrides: Sequence[str], asked: dict[str, Any]) -> int:
    """Evaluate tasks on all ranks; rank 0 writes ``<output_dir>/results.json`` and prints the table.

    Args:
        config: a path or shipped name; torchtune's evaluation configs are read as they are.
        overrides: ``key=value`` or ``~key``.
        asked: what the command line said, by the names of ``Asked``; None where it did not.

    Returns:
        The exit code.

    Raises:
        Stop: if a rank failed; the reason was printed.
    """
    activity.begin()
    quieten_libraries()
    process = connect(KEYS["timeout_seconds"].default)
    with ExitStack() as resources, fail_together(process, resources.close) as watch:
        world, (settings, wanted) = meet(
            process,
            lambda: _settle(config, overrides, asked),
            lambda settled: environment_facts(settled[0].written) | {"tasks": repr(settled[1])},
        )
        watch.observe(world)
        return _evaluate(settings, wanted, world, resources)


def _settle(config: str, overrides: Sequence[str], asked: dict[str, Any]) -> tuple[Settings, Asked]:
    given = load_config(find_config(config))
    own = [text for text in overrides if text.split("=")[0] in _TASK_KEYS]
    given = OmegaConf.merge(given, OmegaConf.from_dotlist(own))  # type: ignore[assignment]
    assert isinstance(given, DictConfig)
    chosen = {key: given.pop(key) for key in _TASK_KEYS if key in given}
    chosen.pop("enable_kv_cache", None)
    chosen |= {key: value for key, value in asked.items() if value is not None}
    names = chosen.pop("tasks", ())
    names = names.split(",") if isinstance(names, str) else names
    wanted = Asked(tuple(name.strip() for name in names if str(name).strip()), **chosen)
    if not wanted.tasks:
        raise ValueError("no tasks are named; use --tasks hellaswag,lambada_openai or the config's key tasks")
    for key, section in _UNUSED.items():
        given[key] = section
    return read_config(given, [text for text in overrides if text not in own]), wanted


def _evaluate(settings: Settings, wanted: Asked, world: World, resources: ExitStack) -> int:
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table
    from torchtune.training import set_seed

    from ppl_eval.tasks.model import Ranks, TaskModel

    settings = world.agree("checkpoint folder", lambda: filled(settings, world.once_per_node))
    device = world.agree("device", lambda: environment.choose_device(settings.device, settings.backend))
    dims = world.agree("mesh", lambda: ParallelDims.from_settings(settings, world.world_size))
    add, mesh = join_groups(settings, world, device, dims, resources)
    manager = world.agree("tasks", lambda: _load_tasks(wanted))
    dtype = world.agree("dtype", lambda: environment.choose_dtype(settings.dtype, device))
    placement = load.Placement(device, dtype, dims, mesh)
    encoder, model, notes = world.agree("model", lambda: _load_model(settings, placement))
    weights_hash = agree_on_weights(world, model.weights, device)
    set_seed(settings.seed)
    most = model.scorer.model.max_seq_len
    lm = TaskModel(
        model.scorer,
        encoder,
        max_length=min(most, wanted.max_seq_length or most),
        batch_size=settings.batch_size,
        device=device,
        ranks=Ranks(dims, world.rank, add),
    )
    activity.enter("tasks")
    # lm-eval would fork a pool for its standard errors: not beside the threads of a process group. The draws
    # are seeded, and the same.
    os.environ["DISABLE_MULTIPROC"] = "1"
    found: Any = simple_evaluate(
        model=lm,
        tasks=list(wanted.tasks),
        task_manager=manager,
        num_fewshot=wanted.num_fewshot,
        limit=wanted.limit,
        log_samples=False,
        # Standard errors: only one rank needs them.
        **({} if world.rank == 0 else {"bootstrap_iters": 0}),
    )
    world.agree("evaluated", lambda: None)
    if world.rank == 0:
        found["config"] |= {
            "model": str(settings.model["_component_"]),
            "model_dtype": settings.dtype,
            "batch_size": settings.batch_size,
            "max_seq_length": lm.max_length,
            "weights_hash": weights_hash,
            "world_size": world.world_size,
            "versions": environment.versions(),
            "notes": [*settings.notes, *notes, *model.notes],
        }
        path = _write(Path(settings.output_dir), found)
        print(make_table(found))
        if "groups" in found:
            print(make_table(found, "groups"))
        print(f"written to {path}", flush=True)
        for note in found["config"]["notes"]:
            print(f"note: {note}", file=sys.stderr)
    return 0


def _load_model(
    settings: Settings, placement: load.Placement
) -> tuple[TextEncoder, load.BuiltModel, list[str]]:
    checkpoint = load_state_dict(settings.checkpointer)
    decoder = load.build_on_meta(settings, placement.dtype)
    _, notes = load.match_family(decoder, checkpoint, settings)
    assert settings.tokenizer is not None
    tokenizer = without_bos(settings.tokenizer) or instantiate("tokenizer", settings.tokenizer)
    encoder = wrap_tokenizer(tokenizer, settings.tokenizer)
    if encoder.vocab_size > decoder.vocab_size:
        notes.append(
            f"the tokenizer names {encoder.vocab_size} ids, the model's vocabulary has {decoder.vocab_size}"
        )
    if settings.quantizer is not None and "calibration" in settings.quantizer:
        raise ValueError("a calibrated quantizer is not run here; `ppl-eval quantize` writes its checkpoint")
    model = load.load_model(decoder, checkpoint, settings, placement)
    return encoder, model, [*checkpoint.notes, *notes]


def _load_tasks(wanted: Asked) -> Any:
    """Load the tasks, so that one that is not there, or generates text, is refused before the model is read.

    Raises:
        ValueError: names the task.
    """
    from lm_eval.tasks import TaskManager

    from ppl_eval.tasks.model import NO_GENERATION

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = None
    if wanted.include_path is not None:
        if not Path(wanted.include_path).is_dir():
            raise ValueError(f"include_path {wanted.include_path} is no folder")
        # Without the thousands of lm-eval's own, where they are not needed: reading them takes half a minute.
        manager = TaskManager(include_path=wanted.include_path, include_defaults=False)
    if manager is None or any(name not in manager.all_tasks for name in wanted.tasks):
        manager = TaskManager(include_path=wanted.include_path)
    for name in wanted.tasks:
        if name not in manager.all_tasks:
            raise ValueError(f"lm-eval knows no task {name!r}; `lm_eval ls tasks` lists them")
    try:
        tasks = manager.load(list(wanted.tasks))["tasks"]
    except Exception as error:  # the hub's, the data set's and the template's errors have no common base
        raise ValueError(f"lm-eval could not load {', '.join(wanted.tasks)}: {error}") from error
    for name, task in tasks.items():
        if task.OUTPUT_TYPE not in ("loglikelihood", "loglikelihood_rolling", "multiple_choice"):
            raise ValueError(f"the task {name!r} is of the kind {task.OUTPUT_TYPE}; {NO_GENERATION}")
    return manager


def _write(folder: Path, found: dict[str, Any]) -> Path:
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / FILE) as file:
        json.dump(found, file, indent=2, default=handle_non_serializable, ensure_ascii=False)
        file.write("\n")
    return folder / FILE
