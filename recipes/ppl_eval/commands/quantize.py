"""Write a quantised checkpoint, on any device, in the form that torchtune's quantise recipe writes."""

import shutil
from pathlib import Path

import torch

from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.config.environment import choose_device, choose_dtype
from ppl_eval.config.files import whole_file, write_json
from ppl_eval.config.settings import Settings
from ppl_eval.distributed.process import connect
from ppl_eval.distributed.rendezvous import meet
from ppl_eval.quantization.quantize import QuantizationReport, quantize
from ppl_eval.results import table
from ppl_eval.run.calibration_text import calibration_batches
from ppl_eval.run.from_folder import filled
from ppl_eval.run.inputs import read_inputs
from ppl_eval.scoring import load as models

# Tokenizer, config.json and the like: copied, so that the new folder is a checkpoint folder like the old one.
COPIED_SUFFIXES = (".json", ".model", ".txt", ".jinja")
COPIED_BYTES = 100_000_000


def quantize_checkpoint(settings: Settings) -> tuple[Path, QuantizationReport, list[str]]:
    """Quantise the config's checkpoint and write it to ``output_dir``.

    The file is named as torchtune names it, `model-4w.pt` for model.safetensors and int4; beside it lies a
    JSON report of what was done to which layer.

    Args:
        settings: a checked config with a `quantizer`.

    Returns:
        The new file, what was done, and notes.

    Raises:
        ValueError: no quantiser, or anything that a run of the config would refuse.
    """
    settings = filled(settings)
    if settings.quantizer is None:
        raise ValueError("the config has no `quantizer`: nothing to do")
    folder = table.check_output_dir(Path(settings.output_dir))
    device = choose_device(settings.device, settings.backend)
    dtype = choose_dtype(settings.dtype, device)
    checkpoint = load_state_dict(settings.checkpointer)
    decoder = models.build_on_meta(settings, dtype)
    _, notes = models.match_family(decoder, checkpoint, settings)
    batches = None
    if "calibration" in settings.quantizer:
        world, _ = meet(connect(settings.timeout_seconds), lambda: None, lambda _: {})
        batches, remarks = calibration_batches(settings, read_inputs(settings, world), world)
        notes += remarks
    notes += settings.notes
    packing = models.packing_of(decoder, checkpoint.state_dict, settings.quantizer, device, dtype)
    notes += checkpoint.notes
    notes += load_into(decoder, checkpoint.state_dict, dtype=dtype, device=device, pack=packing)
    decoder.module.eval().requires_grad_(False)
    # Calibration must see what it would see in a run.
    models.prepare_for_device(decoder, device, settings.compile)
    if packing is not None:
        done = packing.report()
    else:
        done = quantize(decoder, settings.quantizer, device, batches=batches)
    stem = next(iter(checkpoint.identity)).split(".")[0]
    path = folder / f"{stem}-{done.mode}.pt"
    with whole_file(path, "wb") as file:
        torch.save(decoder.module.state_dict(), file)
    source = Path(str(settings.checkpointer.checkpoint_dir)).expanduser()
    _copy_companions(source, folder)
    write_json(
        path.with_suffix(".json"),
        {
            "quantizer": settings.as_dict()["quantizer"],
            "scheme": done.scheme,
            "device": device.type,
            "dtype": settings.dtype,
            "weight_bytes": done.weight_bytes,
            "quantized": [list(entry) for entry in done.quantized],
            "skipped": [list(entry) for entry in done.skipped],
            "source": checkpoint.identity,
        },
    )
    return path, done, notes + done.notes


def _copy_companions(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    for file in sorted(source.iterdir()):
        small = file.is_file() and file.stat().st_size <= COPIED_BYTES
        if small and file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            with open(file, "rb") as original, whole_file(target / file.name, "wb") as copy:
                shutil.copyfileobj(original, copy)
