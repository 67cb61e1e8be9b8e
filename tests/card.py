"""A GPU for the tests, on a machine without one: tensors that say they are on cuda:0, and are kept apart.

    with card.gpu():
        train.main()                             # --device None: cuda, bfloat16, gradient checkpointing
        torch.ones(2, device="cuda") + torch.ones(2)        # RuntimeError, as on a GPU

A Card is a wrapper around a tensor of the CPU, which computes its numbers. Each operation on it goes through
__torch_dispatch__, the backward pass too, and there the rules of a GPU are checked:

    refused     a CPU tensor in an operation of the GPU; .numpy(); a generator of the other device; a product
                of integer matrices
    allowed     copies; CPU tensors of no dimension where the operation is pointwise; indices on the CPU

The GPU has random numbers of its own; torch.manual_seed() seeds them, torch.get_rng_state() leaves them out.
torch can register a device under a name of one's own instead, but never as "cuda": then none of our branches
on "cuda" would be taken, nor those of torch and transformers. Nor can a process take it back.

Laxer than a GPU: saved tensors are read as CPU tensors, map_location or not; no kernel, stream or lack of
memory is a GPU's; other threads see no GPU; a C function that reads the device of a Card sees the CPU.
Stricter: operations on lists (_foreach_...) take no CPU tensor at all, not even where a GPU's would.
"""
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock, patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

CUDA, CPU, aten = torch.device("cuda", 0), torch.device("cpu"), torch.ops.aten
MEMORY = 80 * 10**9
SCALARS = {aten.masked_fill, aten.masked_fill_, aten.fill_}  # like pointwise ones, but not tagged as such
FREELY = {aten.copy_, aten._foreach_copy_}  # operations from device to device
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot}  # a GPU has none of integers
INDICES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Card(torch.Tensor):
    """A tensor on the GPU. inner: the tensor on the CPU that holds its numbers."""
    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = CUDA, True, False

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = list(tensors_of((args, kwargs or {})))
        if not all(isinstance(tensor, Card) for tensor in tensors):
            refuse_mixing(func, args, kwargs or {})
        if func.overloadpacket in PRODUCTS and not tensors[0].is_floating_point():
            raise RuntimeError(f'"{func.overloadpacket}_cuda" not implemented for integers')
        given = {id(inner(tensor)): tensor for tensor in tensors}
        args, kwargs = with_tensors(args, inner), with_tensors(kwargs or {}, inner)
        if torch.Tag.nondeterministic_seeded in func.tags:
            check_generator(kwargs, CUDA)
            with STATE.used():
                results = func(*args, **kwargs)
        else:
            results = func(*args, **kwargs)
        # An operation in place returns its argument; all else that an operation of the GPU makes is there.
        back = lambda tensor: given[id(tensor)] if id(tensor) in given else Card(tensor)
        return with_tensors(results, back)

    def __tensor_flatten__(self):  # Module.to() asks for it, to move a weight in place: tied ones stay tied
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return Card(parts["inner"])

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def cpu(self, *_, **__):
        return moved(self, CPU)

    def tolist(self):
        return self.inner.tolist()

    def data_ptr(self):  # safetensors asks whether weights share memory
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __reduce_ex__(self, protocol):
        return self.detach().inner.__reduce_ex__(protocol)

    def __repr__(self):
        return f"Card({self.inner})"


def inner(tensor):
    return tensor.inner if isinstance(tensor, Card) else tensor


def tensors_of(value):
    """The tensors in the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def with_tensors(value, change):
    """The arguments or results of an operation, each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {name: with_tensors(part, change) for name, part in value.items()}
    return value


def refuse_mixing(func, args, kwargs):
    """RuntimeError where a GPU would refuse the tensors of an operation."""
    name, named = func.overloadpacket, dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = named.get(argument.name)
        for tensor in tensors_of(value):
            plain = not isinstance(tensor, Card)
            scalar = plain and tensor.dim() == 0 and tensor is value and not written and (
                torch.Tag.pointwise in func.tags or name in INDICES | SCALARS)
            index = name in INDICES and argument.name == "indices" and isinstance(args[0], Card)
            if plain and not scalar and not index and name not in FREELY:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
                    f"and cpu! (argument {argument.name} of {func})")


def check_generator(kwargs, device):
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != device.type:
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found "
                           f"'{generator.device.type}'")


class Move(torch.autograd.Function):
    """A copy on the other device; its gradient goes the way back."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.inner.clone() if isinstance(tensor, Card) else Card(tensor.clone())

    @staticmethod
    def backward(ctx, gradient):
        return Move.apply(gradient)


def moved(tensor, device):
    return tensor if tensor.device.type == torch.device(device).type else Move.apply(tensor)


class OnCard(TorchFunctionMode):
    """Lets Python's calls see the GPU: what is made on cuda, or moved there, is a Card."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to:
            return to(*args, **kwargs)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Card):
            return moved(torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs), CUDA)
        if func is torch.as_tensor and isinstance(args[0], Card):
            return to(*args, **kwargs)
        if kwargs.get("device") is kwargs.get("generator") is None:
            return func(*args, **kwargs)
        on_card = any(isinstance(tensor, Card) for tensor in tensors_of(args))
        if kwargs.get("device") is None and on_card:
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or CPU)
        check_generator(kwargs, device)
        if device.type != "cuda" and not on_card:
            return func(*args, **kwargs)
        with STATE.used() if device.type == "cuda" else nullcontext():
            made = func(*args, **kwargs | {"device": None})
        return moved(made.detach(), device).requires_grad_(made.requires_grad)


def to(tensor, *args, copy=False, **kwargs):
    """Tensor.to()"""
    if args and isinstance(args[0], torch.Tensor):
        args = args[0].device, args[0].dtype
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    result = moved(tensor, device or tensor.device)
    result = result if dtype in (None, result.dtype) else result.type(dtype)
    return result.clone() if copy and result is tensor else result


class Generator(torch.Generator):
    """torch.Generator, on the CPU or on the GPU."""
    device = CPU

    def __new__(cls, device=CPU):
        generator = super().__new__(cls)
        generator.device = torch.device(device)
        return generator


class State:
    """The state of the GPU's own random numbers."""

    def seed(self, seed):
        self.set([torch.Generator().manual_seed(seed).get_state()])

    def set(self, states):
        self.state, = states

    def get(self):
        return [self.state.clone()]

    @contextmanager
    def used(self):
        """Random numbers come from the GPU's generator."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()


STATE = State()


@contextmanager
def gpu():
    """In here, the machine has a GPU of 80 GB."""
    nothing, groups = lambda *_, **__: None, torch._C._group_tensors_by_device_and_dtype
    here = lambda lists: next(t.device for tensors in lists for t in tensors if t is not None)
    STATE.seed(0)
    with OnCard(), patch.multiple(
            torch.cuda, is_available=lambda: True, device_count=lambda: 1,
            is_initialized=lambda: True, is_bf16_supported=lambda **_: True, synchronize=nothing,
            mem_get_info=lambda *_: (MEMORY, MEMORY), get_device_name=lambda *_: "a pretended GPU",
            empty_cache=nothing, manual_seed_all=STATE.seed,
            get_rng_state_all=STATE.get, set_rng_state_all=STATE.set, _is_in_bad_fork=lambda: False,
            current_stream=lambda *_: Mock(), stream=nullcontext,
    ), patch.object(
            torch.accelerator, "current_accelerator", lambda **_: None  # a CUDA build would ask the driver
    ), patch.object(torch, "Generator", Generator), patch.object(
            torch._C, "_group_tensors_by_device_and_dtype", lambda *args, **settings: {
                (here(lists[0]), dtype): (lists, *rest)
                for (_, dtype), (lists, *rest) in groups(*args, **settings).items()}
    ), patch.object(_foreach_utils, "_foreach_supported_types",
                    [*_foreach_utils._foreach_supported_types, Card]):
        yield
