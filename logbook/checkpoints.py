"""A run's folder: its settings and its checkpoints, from which --resume continues.

    args.json        the settings, for --resume, and the code that made the run (code.py)
    lock             held by the process that trains (folder.py)
    log.csv, evals.csv, rollouts.jsonl      see log.py
    step-N/, best/   checkpoints: ordinary save_pretrained folders, with train.json (modules and tools, for
                     solve.py) and, with --lora, adapters/
    step-N/trainer/  for --resume: the trained weights in float32 and the optimizer's moments

trainer/ is a torch.distributed.checkpoint in safetensors files. Every rank writes its part, and any number of
ranks can read it. best/ omits it: it is most of the size, and nothing resumes from best/.

A checkpoint is written under another name and renamed when it is complete (world/files.py): a kill or a full
disk never damages the one before it. Paths in args.json and train.json are portable (places.py).
"""
import json
import math
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError

from logbook import code
from logbook.folder import lock
from logbook.log import say
from models.batches import memory_errors
from scale import ranks
from scale.adapters import DAMAGED
from scale.masters import HostAdamW, local
from world import places
from world.files import check_own, read_object, reading, replace_file, replace_folder

FILE = 10**9  # bytes of a file in trainer/, about: while it is written, the host's memory holds it twice more


def open_folder(args, step=0):
    """Make the run's folder with its args.json; on --resume rewrite args.json, since --steps may be new.

    step: of the checkpoint to resume from. A kill leaves no folder, or one to resume. ValueError if the
    folder can't be made, because another process has just made it, for example."""
    folder = Path(args.out)
    beside = folder if args.resume else folder.with_name(f"{folder.name}.writing")
    if ranks.RANK == 0:
        before = getattr(args, "code", [])
        args.code = code.with_present(before, step)
        if args.resume and args.code != before:
            say(f"code    not that of the steps before: {args.out}/args.json has the commits")
        settings = places.all_portable(vars(args), folder) | {"out": folder.name, "resume": None}
        try:
            beside.mkdir(parents=True, exist_ok=True)  # a kill may have left one
            lock(beside, "train.py")
            replace_file(beside / "args.json", json.dumps(settings, indent=1, default=str))
            beside.rename(folder)  # not replace_folder(): a run that exists must stay
        except OSError as why:
            if args.resume:
                raise
            raise ValueError(f"{folder} can't be made ({why.strerror}): give another --out") from why
    ranks.wait()


def save(folder, policy, optimizer, step, best, args):
    """Write a checkpoint, on all ranks together. optimizer None: without trainer/."""
    trainer = folder.with_name("trainer.writing")

    def write(path):
        with memory_errors("the checkpoint"):  # adapters are merged on the GPU
            policy.save(path)
        settings = {name: getattr(args, name) for name in (*places.MODULES, "tools", "corpus")}
        settings = places.all_portable(settings, folder)
        settings |= {"step": step, "best": None if best == -math.inf else best}
        (path / "train.json").write_text(json.dumps(settings, indent=1))
        if optimizer:
            trainer.rename(path / "trainer")
        for file in filter(Path.is_file, path.rglob("*")):  # safetensors ignores the umask
            file.chmod((path / "train.json").stat().st_mode & 0o777)

    problem = None
    try:
        if optimizer:
            write_trainer(trainer, optimizer)
        if ranks.RANK == 0:
            replace_folder(folder, write)
    except (OSError, RuntimeError, SafetensorError) as why:  # all three are raised when a disk is full
        problem = str(why).partition("\n")[0]
    if ranks.any_rank(problem):
        if ranks.RANK == 0:
            shutil.rmtree(trainer, ignore_errors=True)  # the disk may be full
        raise SystemExit(f"train.py: could not save {folder} ({problem or 'another process failed'}); the "
                         "last checkpoint is untouched. Free some disk, then --resume.")


def write_trainer(folder, optimizer):
    """The part of all ranks: trained weights and moments."""
    if ranks.RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)  # a kill may have left one
    ranks.wait()
    tensors, files, size = tensors_of(optimizer), {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE
        size += tensor.nbytes
    with quiet():
        dcp.save(tensors, no_dist=ranks.WORLD == 1, storage_writer=dcp.HuggingFaceStorageWriter(
            folder, fqn_to_index_mapping=files, save_distributed=True))


@contextmanager
def quiet():
    """torch.distributed.checkpoint without its warning about a single process. If ranks fail, it raises the
    first one's error, instead of an error of its own that collects them all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except dcp.api.CheckpointException as why:
        raise next(iter(why.failures.values()))[0] from None


def tensors_of(optimizer):
    """{name: tensor} of all that training changes: each weight, in float32, and its moments."""
    tensors = {}
    for name, weight in trained_by(optimizer):
        state = dict(optimizer.state.get(weight, {}))
        tensors[name] = state.pop("master", weight.detach())
        tensors |= {f"{name}.{key}": tensor.view(-1) if tensor.ndim == 0 else tensor  # safetensors are cut
                    for key, tensor in state.items()}                                 # along a dimension
    return tensors


def trained_by(optimizer):
    """[(name, weight)]"""
    return [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"])]


def forget(run, number):
    """Remove all step-N/ but the newest `number`; None keeps all."""
    if number and ranks.RANK == 0:
        for folder in checkpoints(run)[:-number]:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(run):
    """The complete step-N folders of a run, the oldest first."""
    steps = [folder for folder in Path(run).glob("step-*")
             if (folder / "trainer").is_dir() and folder.name[5:].isdigit()]
    return sorted(steps, key=lambda folder: int(folder.name[5:]))


def last_checkpoint(run):
    """The checkpoint to resume from. None before a run's first one: the run then starts from step 0."""
    return (checkpoints(run) or [None])[-1]


def load_state(checkpoint):
    """{"step", "best", "moved"} of a checkpoint; ValueError if it is damaged; None without a checkpoint.

    best: the highest accuracy on --valid so far. moved: whether a step has changed the policy."""
    if not checkpoint:
        return None
    with reading(checkpoint / "train.json", DAMAGED.format(checkpoint)):
        best = read_object(checkpoint / "train.json")["best"]
        best = -math.inf if best is None else float(best)
    moved = any(name.endswith(".exp_avg") for name in shapes_in(checkpoint))
    return {"step": int(checkpoint.name[5:]), "best": best, "moved": moved}


def shapes_in(checkpoint):
    """{name: shape} of the tensors in trainer/."""
    with reading(checkpoint / "trainer", DAMAGED.format(checkpoint)):
        for file in (checkpoint / "trainer").iterdir():
            check_own(file)
        data = dcp.HuggingFaceStorageReader(checkpoint / "trainer").read_metadata().state_dict_metadata
        for name, tensor in data.items():  # the file of a rank may be gone
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise ValueError(f"parts of {name} are missing, or there twice")
        return {name: tuple(tensor.size) for name, tensor in data.items()}


def restore(checkpoint, optimizer):
    """Set the weights and moments of an optimizer to those of a checkpoint, at any number of ranks.

    ValueError if they belong to other weights, or are damaged."""
    shapes = shapes_in(checkpoint)
    with reading(checkpoint / "trainer", DAMAGED.format(checkpoint)):
        for name, weight in trained_by(optimizer):
            if shapes[name] != tuple(weight.shape):
                raise ValueError(f"{name} has another shape")
            if f"{name}.exp_avg" in shapes:
                begin(optimizer, weight)
        tensors = tensors_of(optimizer)
        if others := shapes.keys() - tensors.keys():
            raise ValueError(f"it holds {min(others)}, which is not trained here")
        with quiet():
            dcp.load(tensors, no_dist=ranks.WORLD == 1,
                     storage_reader=dcp.HuggingFaceStorageReader(checkpoint / "trainer"))
        for name, weight in trained_by(optimizer):
            with torch.no_grad():
                local(weight).copy_(local(tensors[name]))  # masters on the host, rounded; or itself


def begin(optimizer, weight):
    """The state of a weight as the optimizer itself makes it at its first step."""
    if isinstance(optimizer, HostAdamW):
        optimizer.begin(weight)
    else:
        device = weight.device if optimizer.defaults["fused"] else "cpu"
        optimizer.state[weight] = {
            "step": torch.tensor(0.0, device=device), "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight)}
