"""The scripts that take --device, on a pretended card: its tensors lie in the CPU's memory, but say that they are on
cuda:0, may not meet others, and may not be float64, which Apple's GPUs lack. (Kernels and memory need a real one.)"""

import pytest
import torch
from test_finetune import small as small_stages  # noqa: F401
from test_scaling import small as small_family  # noqa: F401
from test_train import SHORT, data, no_plots  # noqa: F401
from torch.utils._pytree import tree_leaves

import runtime
import sample
import train
from lessons import climb, evaluate, finetune, scaling

CROSSING = ("to", "copy_", "cpu", "__set__", "_has_compatible_shallow_copy_type")  # calls with tensors of two devices
RUNS = ("--dropout=0.1 --gradient_accumulation_steps=2", "--position=alibi --n_kv_head=1 --norm=rmsnorm")
RUNS += ("--dataset=list --document_mask --position=learned --flash=false --optimizer=adamw",)
JOBS = {"train": [], "finetune": [(finetune, "--num_examples=30", f"--method={name}") for name in ("all", "prefix")]}
JOBS |= {"scaling": [(scaling, "--dataset=long", "--minutes=1")], "climb": [(climb, "--dataset=long", "--max_iters=3")]}
FEW = ("--max_new_tokens=20", "--num_samples=2")
for run in [(train, *SHORT, "--max_iters=2", "--eval_tokens=50", "--dtype=bfloat16", *run.split()) for run in RUNS]:
    JOBS["train"] += [run, (*run, "--init_from=resume", "--max_iters=3"), (sample, *FEW, "--top_p=0.9")]
JOBS["train"] += [(sample, *FEW, *options) for options in (["--int8", "--top_k=3"], ["--dtype=bfloat16"])]
JOBS["train"] += [(evaluate, "--num_samples=3")]
PRETENDED = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.set_device": lambda _: None,
    "torch.cuda.get_device_name": lambda _: "NVIDIA H100",
    "torch.cuda.get_device_capability": lambda _: (9, 0),
    "torch.autocast": lambda _, *more, autocast=torch.autocast, **keys: autocast("cpu", *more, **keys),
    "torch.Tensor.pin_memory": torch.Tensor.clone,
    "torch.__future__._swap_module_params_on_conversion": True,  # Module.to() gives OnCard
    "runtime.Worker.pick": runtime.Worker.__dict__["pick"],  # the real one
    "lessons.scaling.minimize": lambda log_loss, y, starts: y.new_tensor(starts[0]),  # slow, and not on the card
}


class OnCard(torch.Tensor):
    device, is_cuda, is_cpu, numpy = torch.device("cuda:0"), True, False, None  # numpy() needs a tensor of the CPU
    __reduce_ex__ = lambda self, protocol: self.cpu().__reduce_ex__(protocol)  # a plain tensor in a checkpoint
    __deepcopy__ = lambda self, memo: self.detach().clone().requires_grad_(self.requires_grad)


class Generator(torch.Generator):
    __new__ = lambda cls, device="cpu": super().__new__(cls)
    __init__ = lambda self, device="cpu": setattr(self, "where", torch.device(device))
    device = property(lambda self: self.where)


class Card(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Check where the tensors of a call are, make it on the CPU, and say where its result is."""
        name, kwargs = func.__name__, kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):  # the latter reads the arguments of Module.to()
            return func(*args, **kwargs)
        is_device = lambda x: isinstance(x, torch.device) or (isinstance(x, str) and x.startswith(("cpu", "cuda")))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        cards = [isinstance(x, OnCard) for x in tensors if isinstance(x, OnCard) or x.dim()]
        to = [str(x) for x in (*args, *kwargs.values()) if is_device(x)] + ["cpu"] * (name == "cpu")
        to += [str(x.device) for x in args[1:] if name == "to" and isinstance(x, torch.Tensor)]
        crossing = name in CROSSING or (name in ("__getitem__", "__setitem__") and cards[0])  # an index can be anywhere
        assert len({*cards}) < 2 or crossing, f"{name}: tensors on two devices"
        if generator := kwargs.get("generator"):
            assert generator.device.type == ("cuda" if any(cards) or "cuda" in str(to) else "cpu"), f"{name}: generator"
        to_cpu = lambda x: "cpu" if is_device(x) else x
        out = func(*map(to_cpu, args), **{key: to_cpu(x) for key, x in kwargs.items()})
        with torch._C.DisableTorchFunctionSubclass():
            if to and isinstance(out, torch.Tensor):
                out = out.clone().as_subclass(OnCard if to[0].startswith("cuda") else torch.Tensor)
            elif func == torch.Tensor.grad.__get__ and any(cards) and out is not None:
                out = out.as_subclass(OnCard)
            doubles = [x for x in tree_leaves(out) if isinstance(x, OnCard) and x.dtype == torch.float64]
        assert not doubles, f"{name}: float64 on the card"
        return out


SLOW = {name: [] if name == "train" else [pytest.mark.slow] for name in JOBS}


@pytest.mark.parametrize("jobs", [pytest.param(jobs, id=name, marks=SLOW[name]) for name, jobs in JOBS.items()])
def test_all_tensors_are_on_the_card(call, monkeypatch, request, jobs):
    request.getfixturevalue("small_family" if jobs[0][0] in (scaling, climb) else "small_stages")
    monkeypatch.setattr("torch.Generator", Generator)
    cudnn = []  # is cuDNN's attention allowed?
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", cudnn.append)
    monkeypatch.setattr(finetune, "LONGEST", 8)  # short answers
    for name, pretended in PRETENDED.items():
        monkeypatch.setattr(name, pretended)
    for job in jobs:
        with Card():
            status, _, err = call(*job, "--device=cuda")
        assert status == 0, err
    if sample in [script for script, *_ in jobs]:
        assert False in cudnn
