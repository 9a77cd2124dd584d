"""Train a Transformer on one CPU, one GPU or many.

    python train.py                                     Shakespeare, in minutes: small on a CPU, larger on a GPU
    python train.py baby mistral --steps=200            another family's block, a shorter run
    python train.py owt-124m                            OpenWebText; `python prepare.py openwebtext` comes first
    torchrun --nproc_per_node=8 train.py owt-124m       the same run on eight GPUs
    python train.py --resume=true                       go on where a run was stopped

Presets are applied from left to right, and options win over them. On a CPU a run that was stopped and
resumed is the same run to the last bit.
"""
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import prepare
from model import (
    FAMILIES,
    Config,
    MixtureOfExperts,
    Router,
    Transformer,
    flops_per_token,
    generate,
    residual_weights,
)
from prepare import Refusal

# -----------------------------------------------------------------------------------------------
# Settings and presets


@dataclass
class Settings:
    data: str = ''               # data set: a folder under data/ or a path; '' takes tinyshakespeare
    out: str = ''                # folder of checkpoints and log; '' takes out/PRESET
    init: str = ''               # checkpoint to start from: fine-tuning
    resume: bool = False         # go on from the checkpoint in `out`
    steps: int = 1000            # updates in the whole run
    batch_tokens: int = 16384    # tokens per update, over all devices and micro-batches
    micro_batch: int = 0         # rows that a device takes at once; 0: its whole share
    optimizer: str = 'muon'      # muon (the blocks' matrices; AdamW for the rest) or adamw (everything)
    lr: float = 3e-3             # AdamW's peak learning rate
    beta1: float = 0.9           # AdamW's
    beta2: float = 0.95          # AdamW's
    weight_decay: float = 0.1    # AdamW's, on matrices only
    muon_lr: float = 0.02        # Muon's peak learning rate
    muon_momentum: float = 0.95  # Muon's
    muon_decay: float = 0.05     # Muon's weight decay
    muon_steps: int = 5          # Newton-Schulz iterations
    warmup: int = 50             # updates over which the learning rate rises
    decay: str = 'linear'        # how it falls: linear or cosine
    cooldown: float = 1.0        # the last part of the run, over which it falls
    min_lr: float = 0.0          # where it ends, as a share of the peak
    grad_clip: float = 1.0       # largest norm of the gradient; 0: no limit
    zero_init: bool = False      # matrices that write to the residual stream, and an untied head, start at zero
    eval_every: int = 500        # updates between evaluations; 0: only at the end
    eval_tokens: int = 2 ** 20   # validation tokens that an evaluation reads at most
    log_every: int = 10          # updates between lines of progress
    save_every: int = 500        # updates between checkpoints; 0: only at the end
    sample_tokens: int = 400     # length of the sample after an evaluation; 0: none
    seed: int = 1337             # of weights, batches and dropout
    device: str = ''             # cuda, cuda:1, mps, cpu; '' takes the best there is
    dtype: str = ''              # bf16, fp16, fp32; '' takes the device's best
    compile: bool = True         # torch.compile the model; eager where that can't work
    parallel: str = 'ddp'        # under torchrun: ddp (a copy on each device) or fsdp (a part on each)
    checkpoint_activations: bool = False  # compute each block again in the backward pass: less memory

    def __post_init__(self):
        at_least_1 = ('steps', 'batch_tokens', 'log_every', 'muon_steps', 'eval_tokens')
        below_1 = ('beta1', 'beta2', 'muon_momentum')
        words = dict(optimizer=('muon', 'adamw'), decay=('linear', 'cosine'), parallel=('ddp', 'fsdp'))
        for name, value in vars(self).items():
            least = 1 if name in at_least_1 else 0
            most = 1 if name in below_1 else math.inf
            if isinstance(value, int | float) and not least <= value < most:
                raise ValueError(f'{name} is {value}, but must be at least {least} and below {most}')
            if name in words and value not in words[name]:
                raise ValueError(f'{name} is {value!r}, but must be one of {", ".join(words[name])}')

    def due(self, every, step):
        """Is it time, after `step` updates, for what `every` names (say 'save_every')? At the
        end always."""
        interval = getattr(self, every)
        return step == self.steps or (interval > 0 and step % interval == 0)


GPT2_124M = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, vocab_multiple=64,
                 data='openwebtext', batch_tokens=480 * 1024, micro_batch=30, eval_every=1000, save_every=1000)
RUNS = {
    # two CPU cores, about four minutes
    'baby': dict(n_layer=4, n_head=4, n_embd=128, d_ff=352, block_size=64, qk_norm=True, zero_init=True,
                 steps=2300, batch_tokens=12 * 64, lr=8e-3, beta1=0.8, muon_lr=0.014, muon_steps=3,
                 eval_every=1150, save_every=1150, log_every=100),
    # one GPU, minutes
    'shakespeare': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, qk_norm=True, zero_init=True,
                        dropout=0.2, steps=2000, batch_tokens=64 * 256, lr=3e-3, weight_decay=0.1,
                        eval_every=250, save_every=250),
    # GPT-2 by nanoGPT's recipe, to reproduce it; OpenAI's own was never published
    'gpt2-124m': dict(FAMILIES['gpt2'], **GPT2_124M, optimizer='adamw', steps=600_000, lr=6e-4, min_lr=0.1,
                      warmup=2000, decay='cosine'),
    # the same size and corpus by today's means
    'owt-124m': dict(GPT2_124M, qk_norm=True, zero_init=True, steps=20_000, lr=3e-3, warmup=250,
                     cooldown=0.5),
}


def family_presets():
    """{name: Config values} of families and published models. Each sets every switch of the
    block; a family leaves the sizes to the run."""
    sizes = ('vocab_size', 'vocab_multiple', 'block_size', 'n_layer', 'n_head', 'n_embd', 'dropout')
    plain = {field.name: field.default for field in fields(Config) if field.name not in sizes}
    presets = {}
    for name in prepare.PUBLISHED:
        presets[name] = {**plain, **prepare.published(name)}
    for name, family in FAMILIES.items():
        presets[name] = {**plain, **family}
    return presets


PRESETS = {**RUNS, **family_presets()}

# -----------------------------------------------------------------------------------------------
# The table of cards
#
# Dense figures, never the sparse ones. Sources: NVIDIA's data sheets; its white papers on GA102, Ada and
# RTX Blackwell for GeForce; AWS on the A10G; AMD's data sheet; Apple's announcements. fp32 is torch's
# default, without TF32. On GeForce the 16-bit figure is that with fp32 accumulation, half the headline.

PEAKS = {  # the first entry counts whose words are all in the driver's name
    # words          TFLOP/s bf16, fp16, fp32; GB/s, GB. None: no such units, or no figure
    'T4': (None, 65, 8.1, 320, 16),
    'V100': (None, 125, 15.7, 900, 16),
    'A10G': (70, 70, 35, 600, 24),
    'L4': (121, 121, 30.3, 300, 24),
    'L40S': (362, 362, 91.6, 864, 48),
    '3090': (71, 71, 35.6, 936, 24),
    '4090': (165.2, 165.2, 82.6, 1008, 24),
    '5090': (209.5, 209.5, 104.8, 1792, 32),
    'A100 SXM4 80GB': (312, 312, 19.5, 2039, 80),
    'A100 80GB': (312, 312, 19.5, 1935, 80),
    'A100': (312, 312, 19.5, 1555, 40),
    'H100 PCIe': (756, 756, 51.2, 2039, 80),
    'H100 NVL': (835, 835, 60, 3938, 94),
    'H100': (989, 989, 66.9, 3350, 80),
    'H200 NVL': (835, 835, 60, 4800, 141),
    'H200': (989, 989, 66.9, 4800, 141),
    'B200': (2250, 2250, 75, 8000, 180),
    'MI300X': (1307, 1307, 163.4, 5300, 192),
    'M1': (None, None, 2.6, 68, 16),
    'M2': (None, None, 3.6, 100, 24),
}
# a name with one of these words is a different card
ANOTHER_CARD = {'TI', 'SUPER', 'D', 'LAPTOP', 'PRO', 'MAX', 'ULTRA', 'Q', 'MIG', 'ADA', 'GRID'}


def peak(name):
    """The figures of a device, {'bf16', 'fp16', 'fp32', 'gbs', 'gb'}, by its driver's name or a
    short one. None if the table does not have it."""
    words = set(re.split(r'[\s-]+', name.strip().upper()))
    for entry, figures in PEAKS.items():
        wanted = set(entry.upper().split())
        if wanted <= words and not ANOTHER_CARD & words:
            return dict(zip(('bf16', 'fp16', 'fp32', 'gbs', 'gb'), figures))
    return None


def device_name(device):
    """The name of a torch.device as its driver prints it; 'cpu' for any CPU."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    if device.type == 'mps':
        command = ['sysctl', '-n', 'machdep.cpu.brand_string']
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()
    return 'cpu'


def peak_tflops(device, dtype):
    """Dense TFLOP/s of a torch.device in a torch.dtype; None where the table has none."""
    figures = peak(device_name(device)) or {}
    names = {torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.float32: 'fp32'}
    return figures.get(names[dtype])


# -----------------------------------------------------------------------------------------------
# Processes: torchrun starts one per device


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(x):
    """The sum of a tensor over all processes, in place."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def from_first(value):
    """The first process's value, in all processes."""
    box = [value]
    if world() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def say(text):
    if rank() == 0:
        print(text, flush=True)


def start_processes(settings, local):
    """Joins the processes that torchrun has started, if it has; `local` is this one's number on
    its node."""
    if int(os.environ.get('WORLD_SIZE', 1)) == 1:
        return
    if settings.device == 'cpu' or not torch.cuda.is_available():
        settings.device, backend = 'cpu', 'gloo'
    else:
        settings.device, backend = f'cuda:{local}', 'cpu:gloo,cuda:nccl'
    # while the first process saves a large model, the others wait for it
    dist.init_process_group(backend, timeout=timedelta(hours=2))


def stop_processes():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# -----------------------------------------------------------------------------------------------
# Data


def to_device(device, *tensors):
    """The tensors on the device. A GPU fetches them from pinned memory, and nothing here waits
    for it."""
    if device.type != 'cuda':
        return [tensor.to(device) for tensor in tensors]
    return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in tensors]


class Data:
    """A data set, as a run reads it. The rows of an update depend on (seed, step) alone;
    processes and micro-batches only slice them."""

    def __init__(self, name, cfg, settings, device):
        self.name, self.cfg, self.settings, self.device = name, cfg, settings, device
        self.train, self.val, self.meta = prepare.load_data(name)
        self.reader = ThreadPoolExecutor(1)
        self.ahead = None  # the next update's batch, and its step

    def batch(self, step):
        """This process's part of update `step`, [(inputs, targets)], int64 (rows, T) each, on
        the device. The next update's part is read meanwhile."""
        if self.ahead is None or self.ahead[0] != step:
            self.ahead = step, self.reader.submit(self.read, step)
        batch = self.ahead[1].result()
        self.ahead = step + 1, self.reader.submit(self.read, step + 1)
        return batch

    def read(self, step):
        T = self.cfg.block_size
        n_rows = self.settings.batch_tokens // T
        # the bound is exclusive: the last window starts at len - T - 1
        rng = np.random.default_rng([self.settings.seed, step])
        starts = rng.integers(0, len(self.train) - T, n_rows)
        # this process's rows
        first, last = rank() * n_rows // world(), (rank() + 1) * n_rows // world()
        rows = np.stack([self.train[start:start + T + 1] for start in starts[first:last]])
        rows = torch.from_numpy(rows.astype(np.int64))  # (rows, T + 1)
        if rows.max() >= self.cfg.vocab_size:
            raise Refusal(f'The data has id {rows.max()}, outside the vocabulary of '
                          f'{self.cfg.vocab_size}: prepare it again.')
        # the target of each token is the next one
        micro_batches = rows.split(self.settings.micro_batch or len(rows))
        return [to_device(self.device, part[:, :-1], part[:, 1:]) for part in micro_batches]

    def windows(self):
        """The validation tokens, at most eval_tokens of them, as `windows_of` gives them."""
        return windows_of(self.val, self.cfg.block_size, self.device, self.settings.eval_tokens)


def windows_of(tokens, T, device, most=2 ** 62):
    """Yields (inputs, targets), (rows, T) each, of consecutive windows: each of the first
    `most` targets once. Every process gets as many rows; where there is no target, it is -1."""
    n = min(len(tokens) - 1, most)
    n_rows = math.ceil(n / (T * world())) * world()
    inputs = np.zeros(n_rows * T, np.int64)
    targets = np.full(n_rows * T, -1)
    inputs[:n], targets[:n] = tokens[:n], tokens[1:n + 1]
    inputs = torch.from_numpy(inputs).view(n_rows, T)[rank()::world()]
    targets = torch.from_numpy(targets).view(n_rows, T)[rank()::world()]
    rows_at_once = max(1, 8192 // T)
    for batch in zip(inputs.split(rows_at_once), targets.split(rows_at_once)):
        yield to_device(device, *batch)


# -----------------------------------------------------------------------------------------------
# Optimizers


def orthogonalize(g, steps):
    """g (n, rows, cols) -> roughly the nearest orthogonal matrices. Newton-Schulz's polynomial
    pushes every singular value towards 1 (coefficients: Keller Jordan's Muon, 2024). In fp32
    everywhere: many CPUs crawl in bf16, and a GPU has TF32."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan 2024; arXiv:2502.16982), for the blocks' matrices.

    roles: for each parameter the rows of the matrices that are stacked in it. Each matrix is
    orthogonalised by itself, all of one shape in one batch. A sharded parameter is gathered
    first, and every process does the same work.
    """

    def __init__(self, roles, lr, momentum, weight_decay, steps):
        super().__init__(list(roles), dict(lr=lr, momentum=momentum, weight_decay=weight_decay, steps=steps))
        self.roles = roles

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            updates = [self.momentum_of(p, group['momentum']) for p in group['params']]
            self.orthogonalize_in_place(zip(group['params'], updates), group['steps'])
            for p, update in zip(group['params'], updates):
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(update, alpha=-group['lr'])

    def momentum_of(self, p, decay):
        """Takes in p's gradient; returns Nesterov's momentum, whole, like p in shape."""
        if p not in self.state:
            self.state[p]['momentum'] = torch.zeros_like(p)
        momentum = self.state[p]['momentum']
        momentum.lerp_(p.grad, 1 - decay)
        update = p.grad.lerp(momentum, decay)
        return update.full_tensor() if isinstance(update, DTensor) else update

    def orthogonalize_in_place(self, updates, steps):
        """updates: (parameter, tensor of its shape) pairs."""
        # views into the updates, by shape
        same_shape = {}
        for p, update in updates:
            for role in update.split(self.roles[p], dim=-2):
                # experts are a stack of matrices, (E, rows, cols)
                matrices = role.unbind() if role.dim() == 3 else [role]
                for matrix in matrices:
                    same_shape.setdefault(matrix.shape, []).append(matrix)
        for (rows, cols), matrices in same_shape.items():
            scale = max(1, rows / cols) ** 0.5
            orthogonal = orthogonalize(torch.stack(matrices), steps) * scale
            for matrix, new in zip(matrices, orthogonal):
                matrix.copy_(new)


def muon_roles(model):
    """The parameters that Muon updates: the matrices of the blocks, the routers aside.
    {parameter: rows of each matrix stacked in it}."""
    roles = {}
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Router):
            roles[module.weight] = getattr(module, 'roles', [module.out_features])
        if isinstance(module, MixtureOfExperts):
            roles[module.w_up] = module.roles
            roles[module.w_down] = [module.w_down.shape[-2]]
    return roles


def make_optimizers(model, settings):
    """AdamW and, if the settings ask for it, Muon. Weight decay is for matrices only."""
    roles = muon_roles(model) if settings.optimizer == 'muon' else {}
    rest = [p for p in model.parameters() if p not in roles]
    groups = [
        dict(params=[p for p in rest if p.dim() > 1], weight_decay=settings.weight_decay),
        dict(params=[p for p in rest if p.dim() <= 1], weight_decay=0.0),
    ]
    betas = settings.beta1, settings.beta2
    optimizers = [torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=True)]
    if roles:
        optimizers.append(Muon(roles, settings.muon_lr, settings.muon_momentum, settings.muon_decay,
                               settings.muon_steps))
    for group in groups_of(optimizers):
        group['peak_lr'] = group['lr']
    return optimizers


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def lr_factor(settings, step):
    """The learning rate of update `step`, counted from 0, as a share of its peak: up over
    `warmup` updates, level, then down to min_lr over the last part `cooldown` of the run."""
    up = min(1.0, (step + 1) / (settings.warmup + 1))
    left = max(0, settings.steps - step) / max(1.0, settings.cooldown * settings.steps)
    left = min(1.0, left)
    share = left
    if settings.decay == 'cosine':
        share = 0.5 - 0.5 * math.cos(math.pi * left)
    return up * (settings.min_lr + (1 - settings.min_lr) * share)


@torch.no_grad()
def zero_outputs(model):
    """Zeros what a block adds to the residual stream, and an untied head: every block starts as
    the identity, and every token as likely as any."""
    for weight in residual_weights(model):
        weight.zero_()
    if model.lm_head is not None:
        model.lm_head.weight.zero_()


# -----------------------------------------------------------------------------------------------
# A run: the model, how it is called, and its optimizers


def compile_blocks(model, settings, device):
    """Compiles the blocks and the loss, and makes blocks that are computed again in the
    backward pass."""
    reason = prepare.no_compiler(device)
    compiles = settings.compile and not reason
    if settings.compile and reason:
        say(f'not compiled: {reason}')
    for block in model.blocks:
        # The code of one block serves all. Compiling the whole of `baby` would take 10 s more, and save
        # 4 ms per update.
        if compiles:
            block.forward = torch.compile(block.forward)
        # around the compiled block, so that it is compiled code that is run again
        if settings.checkpoint_activations:
            block.forward = partial(recompute, block.forward, use_reentrant=False)
    if compiles:
        model.nll = torch.compile(model.nll)


def place(model, settings, device, dtype):
    """Brings the model to its device, compiled, and spreads it over the processes. Returns what
    to call in training, and the autocast context of the calls. No parameter changes its name."""
    model.to(device)
    if device.type == 'cuda':
        # TF32 for Muon's fp32 products
        torch.set_float32_matmul_precision('high')
    compile_blocks(model, settings, device)
    cast = nullcontext()
    if dtype != torch.float32:
        cast = torch.autocast(device.type, dtype)
    if world() == 1:
        return model, cast
    if settings.parallel == 'ddp':
        # dynamo would cut each compiled block in two, to send gradients earlier
        torch._dynamo.config.optimize_ddp = False
        devices = [device] if device.type == 'cuda' else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True), cast
    # each process keeps a part of every block, and gathers one block at a time
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (world(),))
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model, nullcontext()


def eager():
    """Nothing is compiled in this context: evaluations and samples have many shapes, each used
    rarely."""
    return torch.compiler.set_stance('force_eager')


# a state that is one file in every mode, with plain names
WHOLE_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Run:
    """A model in training, after `step` updates. It needs no data set and no folder."""

    def __init__(self, model, settings, device, dtype):
        self.model, self.settings, self.device = model, settings, device
        self.step = 0
        self.wrapped, self.cast = place(model, settings, device, dtype)
        self.optimizers = make_optimizers(model, settings)
        self.scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None

    def update(self, batch):
        """One update from this process's [(inputs, targets)], (rows, T) each, -1 for no target.

        Returns the loss, a mean over the targets of the global batch, and the norm of its
        gradient. If they aren't finite, raises Refusal before the weights are touched; with
        fp16's scaler an infinite gradient only skips the update.
        """
        factor = lr_factor(self.settings, self.step)
        for group in groups_of(self.optimizers):
            group['lr'] = group['peak_lr'] * factor
        self.wrapped.train()
        loss = self.add_gradients(batch)
        norm = self.clip()
        # the one wait for the device
        loss, norm = torch.stack((loss, norm.to(loss))).tolist()
        if not math.isfinite(loss) or not (self.scaler or math.isfinite(norm)):
            raise Refusal(f'The loss is {loss}, the norm of its gradient {norm}: resume the last checkpoint '
                          'or start anew with a lower --lr.')
        self.move(norm)
        self.step += 1
        return loss, norm

    def add_gradients(self, batch):
        """The backward passes of all micro-batches; returns the loss, a tensor."""
        # each micro-batch's mean loss counts as much as it has targets
        targets_in = torch.stack([(targets != -1).sum() for _, targets in batch])
        in_all = all_sum(targets_in.sum()).clamp(min=1)
        # dropout's seeds
        seeds = np.random.SeedSequence([self.settings.seed, self.step, rank()]).generate_state(len(batch))
        losses = []
        for i, (inputs, targets) in enumerate(batch):
            # DDP sums gradients over the processes in every backward pass unless told not to, and one sum,
            # after the last, is enough. FSDP should go on summing: it keeps only a part of each sum.
            if isinstance(self.wrapped, DistributedDataParallel):
                self.wrapped.require_backward_grad_sync = i + 1 == len(batch)
            torch.manual_seed(int(seeds[i]))
            with self.cast:
                loss = self.wrapped(inputs, targets) * targets_in[i] / in_all
            losses.append(loss.detach())
            # DDP and FSDP average over the processes; here they should sum
            loss = loss * world()
            if self.scaler:
                loss = self.scaler.scale(loss)
            loss.backward()
        return all_sum(torch.stack(losses).sum())

    def clip(self):
        """Limits the norm of the gradient; returns what it was before, a tensor."""
        if self.scaler:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        most = self.settings.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def move(self, norm):
        """Lets the optimizers change the weights."""
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            elif math.isfinite(norm):  # by itself the scaler would skip only one of two optimizers
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()

    @torch.no_grad()
    def evaluate(self, windows):
        """Nats per target over all processes' windows, (inputs, targets) each."""
        self.wrapped.eval()
        total = torch.zeros((), device=self.device)
        n = torch.zeros((), device=self.device)
        with eager():
            for inputs, targets in windows:
                n_targets = (targets != -1).sum()
                with self.cast:
                    total += self.wrapped(inputs, targets) * n_targets
                n += n_targets
        return (all_sum(total) / all_sum(n)).item()

    def save(self, path, data, resumable=True):
        """Writes a checkpoint. All processes call it: a sharded state is gathered in the first
        one."""
        optimizers = self.optimizers if resumable else []
        weights, optimizer_state = dcp.get_state_dict(self.model, optimizers, options=WHOLE_STATE)
        checkpoint = dict(
            config=asdict(self.model.cfg), model=weights, step=self.step,
            tokenizer=data.meta['tokenizer'], data=data.meta['sha256'],
            settings={**asdict(self.settings), 'data': data.name, 'device': ''})
        if resumable:
            scaler = self.scaler.state_dict() if self.scaler else None
            checkpoint.update(optimizer=optimizer_state, scaler=scaler)
        if rank() == 0:
            prepare.save_checkpoint(path, checkpoint)

    def restore(self, checkpoint):
        """Brings optimizers, scaler and step back. The weights are in the model already."""
        # Loading overwrites the learning rates and so on; put this run's back.
        ours = [dict(group, params=None) for group in groups_of(self.optimizers)]
        dcp.set_optimizer_state_dict(self.model, self.optimizers, checkpoint['optimizer'], options=WHOLE_STATE)
        for group, values in zip(groups_of(self.optimizers), ours):
            group.update(values, params=group['params'])
        if self.scaler and checkpoint['scaler']:
            self.scaler.load_state_dict(checkpoint['scaler'])
        self.step = checkpoint['step']


# -----------------------------------------------------------------------------------------------
# What a run prints and leaves in its folder


def read_log(path):
    """The lines of a log.jsonl, as dicts. A last line that a crash has cut is left out."""
    lines = prepare.read_text(path).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith('}\n')]


def draw(path, curves, **settings):
    """Draws curves, {label: (xs, ys)}, into a PNG, where matplotlib is installed. settings: of
    the axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = Figure(figsize=(7, 4)).subplots()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, marker='.' if len(xs) < 20 else None)
    axes.set(**settings)
    axes.legend()
    with prepare.write_atomically(path) as file:
        axes.figure.savefig(file, format='png', dpi=120)


class Log:
    """The lines of progress, log.jsonl and loss.png. Only the first process writes."""

    def __init__(self, run, device, dtype):
        self.folder, self.settings = run.settings.out, run.settings
        self.path = os.path.join(self.folder, 'log.jsonl')
        # a resumed run repeats what came after its checkpoint
        lines = read_log(self.path) if run.step else []
        lines = from_first([line for line in lines if line['step'] <= run.step])
        self.val_losses = {line['step']: line['val_loss'] for line in lines if 'val_loss' in line}
        if rank() == 0:
            with prepare.write_atomically(self.path) as file:
                for line in lines:
                    file.write(json.dumps(line).encode() + b'\n')
        # for MFU
        cfg = run.model.cfg
        self.flops_per_token = 3 * flops_per_token(cfg, cfg.block_size)
        tf32 = device.type == 'cuda' and dtype == torch.float32  # on, see place(); the table has no peak for it
        self.peak = None if tf32 else peak_tflops(device, dtype)
        # updates and their seconds since the last line
        self.n, self.seconds = 0, 0.0
        self.began = time.perf_counter()
        self.compiling = True

    def write(self, **line):
        if rank() == 0:
            with open(self.path, 'a') as file:
                file.write(json.dumps(line) + '\n')

    def start(self):
        """An update begins."""
        self.started = time.perf_counter()

    def update(self, step, loss, norm):
        """An update has ended; now and then a line says so."""
        # the first one's time is the compiler's
        if not self.compiling:
            self.seconds += time.perf_counter() - self.started
            self.n += 1
        self.compiling = False
        if not self.settings.due('log_every', step):
            return
        lr = self.settings.lr * lr_factor(self.settings, step - 1)
        seconds = self.seconds / max(1, self.n)
        rate = self.settings.batch_tokens / seconds if self.n else 0.0
        mfu = None
        if self.peak:
            mfu = rate * self.flops_per_token / (self.peak * 1e12 * world())
        left = timedelta(seconds=int((self.settings.steps - step) * seconds))
        shown_mfu = f'{mfu:.1%}' if mfu else 'n/a'
        say(f'{step:>7}/{self.settings.steps}  loss {loss:.4f}  lr {lr:.1e}  {1000 * seconds:.0f} ms  '
            f'{rate:,.0f} tokens/s  MFU {shown_mfu}  {left} left')
        # JSON has no infinity; fp16's scaler has skipped such an update
        norm = norm if math.isfinite(norm) else None
        self.write(step=step, loss=loss, lr=lr, ms=1000 * seconds, tokens_per_s=rate, mfu=mfu, grad_norm=norm)
        self.n, self.seconds = 0, 0.0

    def evaluation(self, step, loss):
        self.val_losses[step] = loss
        self.write(step=step, val_loss=loss)

    def draw(self):
        if rank() != 0:
            return
        lines, curves = read_log(self.path), {}
        for key in ('loss', 'val_loss'):
            points = [(line['step'], line[key]) for line in lines if key in line]
            if points:
                curves[key] = list(zip(*points))
        draw(os.path.join(self.folder, 'loss.png'), curves, xlabel='update', ylabel='nats per token')


@contextmanager
def locked(folder):
    """Keeps a second run out of the folder while this one writes there, where the system can
    lock one."""
    os.makedirs(folder, exist_ok=True)
    if os.name == 'nt':
        yield
        return
    import fcntl
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f'Another run writes to {folder}: wait for its end, or take another --out.') from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def move_old_run(folder):
    """Moves all that an older run has left in the folder to previous_1, previous_2, ..."""
    if not os.path.exists(os.path.join(folder, 'ckpt.pt')):
        return
    for n in count(1):
        aside = f'{folder}/previous_{n}'
        if not os.path.exists(aside):
            break
    os.mkdir(aside)
    for file in ('best.pt', 'log.jsonl', 'loss.png', 'ckpt.pt'):
        with suppress(FileNotFoundError):
            os.replace(os.path.join(folder, file), os.path.join(aside, file))
    say(f'a run was here before: it is now {aside}')


class Signals:
    """Ctrl-C and SIGTERM stop a run after its current update; the second time at once."""

    def __init__(self):
        self.numbers = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.numbers.append(number)
        signal.signal(number, signal.SIG_DFL)
        say('stopping after this update; the same signal again stops at once')

    def came(self):
        """Has a signal come, to any of the processes? All ask together, and get the same
        answer."""
        return bool(all_sum(torch.tensor(float(len(self.numbers)))))

    def exit_code(self):
        number = self.numbers[0] if self.numbers else signal.SIGTERM  # none here: another process got it
        return 128 + number


# -----------------------------------------------------------------------------------------------
# From the command line to a run


def default_run(device):
    """The name of the preset that suits a device."""
    device, _ = prepare.pick_device(device)
    return 'baby' if device.type == 'cpu' else 'shakespeare'


def configure(argv):
    """The command line -> Config values, Settings, and the checkpoint to start from, or None."""
    flags = {word[2:].partition('=')[0] for word in argv if word.startswith('--')}
    asked = prepare.command_line(argv, __doc__, Config, Settings, presets=PRESETS)
    names = asked.pop('presets')
    if not RUNS.keys() & names:
        names = [default_run(asked.get('device', '')), *names]
    if asked.get('init'):
        names = [*names, 'tuned']
    out = asked.get('out') or os.path.join(prepare.ROOT, 'out', '-'.join(names))
    flagged = {name: asked[name] for name in flags & asked.keys()}
    if asked.get('resume'):
        return configure_resumed(asked, flagged, out)
    # a preset's values, then what was asked for; a checkpoint's Config in place of both
    values = {**RUNS.get(names[0], {}), **asked, 'out': out}
    settings = prepare.build(Settings, values)
    if not settings.init:
        return values, settings, None
    checkpoint = prepare.load_checkpoint(settings.init)
    return {**checkpoint['config'], **flagged}, settings, checkpoint


def configure_resumed(asked, flagged, out):
    """The run in the folder `out` goes on, with other settings where they were given as flags.
    Model, data and optimizer must stay what they are."""
    checkpoint = prepare.load_checkpoint(out)
    if 'optimizer' not in checkpoint:
        raise Refusal(f'{out} has no optimizer to resume with; start from its weights with --init={out}.')
    old = checkpoint['settings']
    fixed = {**checkpoint['config'], 'data': old['data'], 'optimizer': old['optimizer']}
    wanted = {**fixed, **{name: value for name, value in asked.items() if value != ''}}
    # a 0 becomes what it stands for
    wanted.update(asdict(prepare.build(Config, wanted)))
    for name, have in fixed.items():
        if wanted[name] != have:
            raise Refusal(f'{name} is {wanted[name]}, but the run in {out} has {have}: resume with that, or '
                          'start anew with another --out.', 2)
    settings = prepare.build(Settings, {**old, **flagged, 'out': out})
    return checkpoint['config'], settings, checkpoint


def config_for(values, settings, checkpoint, name, meta):
    """The Config of a run on the data set `name`; refuses what does not go together."""
    if checkpoint and checkpoint['tokenizer'] != meta['tokenizer']:
        theirs, ours = (t.get('name', t['kind']) for t in (checkpoint['tokenizer'], meta['tokenizer']))
        raise Refusal(f'The checkpoint speaks {theirs}, the data set {name} {ours}: prepare it with '
                      '--tokenizer.')
    if settings.resume and checkpoint['data'] != meta['sha256']:
        raise Refusal(f'The data set {name} is not the one that this run began with: prepare it as it was.')
    vocab_size = values.get('vocab_size', meta['vocab_size'])
    if vocab_size < meta['vocab_size']:
        raise Refusal(f'vocab_size is {vocab_size}, but the data set {name} has {meta["vocab_size"]} ids.', 2)
    cfg = prepare.build(Config, {**values, 'vocab_size': vocab_size})
    if not cfg.causal:
        raise Refusal('causal=false: an encoder has no next-token loss; train a causal family.', 2)
    if meta['train_tokens'] <= cfg.block_size:
        raise Refusal(f'The data set {name} has {meta["train_tokens"]} tokens to train on, but a window of '
                      f'block_size {cfg.block_size} needs one more than that: take more text or a smaller '
                      '--block_size.')
    if settings.batch_tokens % (cfg.block_size * world()):
        raise Refusal(f'batch_tokens is {settings.batch_tokens}, but must be a multiple of block_size '
                      f'{cfg.block_size} x {world()} processes.', 2)
    return cfg


def make_model(cfg, settings, checkpoint):
    """The model with a checkpoint's weights, or with the weights that the seed draws."""
    torch.manual_seed(settings.seed)
    model = Transformer(cfg)
    if checkpoint:
        prepare.load_weights(model, checkpoint['model'])
    elif settings.zero_init:
        zero_outputs(model)
    return model


def main(argv):
    local = int(os.environ.get('LOCAL_RANK', -1))
    if 0 <= local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    values, settings, checkpoint = configure(argv)
    start_processes(settings, local)
    with locked(settings.out) if rank() == 0 else nullcontext():
        code = prepare_and_train(values, settings, checkpoint)
    stop_processes()
    if code:
        sys.exit(code)


def prepare_and_train(values, settings, checkpoint):
    """Makes all that a run needs, and trains. Returns the process's exit code."""
    device, dtype = prepare.pick_device(settings.device, settings.dtype)
    if dtype == torch.float16 and world() > 1 and settings.parallel == 'fsdp':
        raise Refusal('fsdp has no scaler for fp16: use --parallel=ddp or --dtype=fp32.', 2)
    # one process makes the data for all
    name = from_first(prepare.find_data(settings.data) if rank() == 0 else '')
    meta = prepare.load_data(name)[-1]
    cfg = config_for(values, settings, checkpoint, name, meta)
    data = Data(name, cfg, settings, device)
    run = Run(make_model(cfg, settings, checkpoint), settings, device, dtype)
    if settings.resume:
        run.restore(checkpoint)
    elif rank() == 0:
        move_old_run(settings.out)
    log = Log(run, device, dtype)
    if run.step >= settings.steps and run.step in log.val_losses:
        raise Refusal(f'{settings.out} is at update {run.step} already: go on with '
                      f'--steps={2 * run.step}, say.')
    n_parameters = sum(p.numel() for p in run.model.parameters())
    say(f'{n_parameters:,} parameters, {len(data.train):,} tokens of {name}, {settings.steps:,} updates of '
        f'{settings.batch_tokens:,} tokens; {device} x {world()}, {str(dtype)[6:]}; {settings.out}')
    signals = Signals()
    train(run, data, log, signals)
    return say_goodbye(run, data, log, signals)


# -----------------------------------------------------------------------------------------------
# The loop


def train(run, data, log, signals):
    """Trains until the last update, or until a signal comes."""
    settings, stop = run.settings, False
    # an evaluation that was cut off is made up for
    if run.step > 0 and settings.due('eval_every', run.step) and run.step not in log.val_losses:
        evaluate(run, data, log)
    while run.step < settings.steps and not stop:
        # one update; the next batch is read meanwhile
        log.start()
        loss, norm = run.update(data.batch(run.step))
        log.update(run.step, loss, norm)
        # all processes stop together
        stop = signals.came()
        cut = stop and run.step < settings.steps
        # a checkpoint comes first: an evaluation can fail
        evaluation_due = settings.due('eval_every', run.step)
        if stop or evaluation_due or settings.due('save_every', run.step):
            run.save(os.path.join(settings.out, 'ckpt.pt'), data)
        # once in a while: the loss on the validation text, and a sample
        if evaluation_due and not cut:
            evaluate(run, data, log)
    log.draw()


def evaluate(run, data, log):
    """The validation loss, best.pt if it is the best so far, and a sample."""
    loss = run.evaluate(data.windows())
    say(f'{run.step:>7}/{run.settings.steps}  validation loss {loss:.4f}')
    if loss < min(log.val_losses.values(), default=math.inf):
        run.save(os.path.join(run.settings.out, 'best.pt'), data, resumable=False)
    log.evaluation(run.step, loss)
    # a model in parts can't write: each step would gather all of it
    in_parts = world() > 1 and run.settings.parallel == 'fsdp'
    if run.settings.sample_tokens and not in_parts:
        with eager():
            say(sample_text(run.model, data.meta['tokenizer'], run.settings.sample_tokens))


def sample_text(model, description, n):
    """What the model writes after a line end, in n tokens."""
    tokenizer = prepare.make_tokenizer(description)
    # where ids are all there is, the prompt is the first one
    prompt = torch.tensor([tokenizer.encode('\n') or [0]])
    ids = [int(token) for token in generate(model.eval(), prompt, n, temperature=0.8)]
    return tokenizer.decode(ids).decode(errors='replace')


def say_goodbye(run, data, log, signals):
    """Says how it ended and how to go on; returns the exit code."""
    settings = run.settings
    if run.step < settings.steps:
        say(f'stopped after update {run.step}; to go on: python train.py --out={settings.out} --resume=true')
        return signals.exit_code()
    seconds = time.perf_counter() - log.began
    best = min(log.val_losses.values())
    prompt = {'tinyshakespeare': 'ROMEO:', 'stdlib': 'def '}.get(data.name, 'The ')
    say(f'{seconds:.0f} s, validation loss {best:.4f}. Read more of it with: '
        f'python sample.py --out={settings.out} --prompt="{prompt}"')
    return 0


if __name__ == '__main__':
    prepare.run(main)
