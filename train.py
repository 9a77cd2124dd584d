"""Train a Transformer on one CPU, one GPU or many.

    python train.py                                     Shakespeare, in minutes: small on a CPU, larger on a GPU
    python train.py baby mistral --steps=200            another family's block, a shorter run
    python train.py owt-124m                            OpenWebText; `python prepare.py openwebtext` comes first
    torchrun --nproc_per_node=8 train.py owt-124m       the same run on eight GPUs
    python train.py --resume=true                       go on where a run was stopped

Presets are applied from left to right, and options win over them. On a CPU a run that was stopped and
resumed is the same run to the last bit.
"""
# In this order: settings and presets, processes, data, optimizers, a run and its updates, the table of cards,
# the log and the folder of a run, the command line, and the loop. Start with the loop to see the whole first.
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
    Fused,
    MixtureOfExperts,
    Router,
    Transformer,
    flops_per_token,
    generate,
    residual_weights,
)
from prepare import Refusal

# -------------------------------------------------------------------------------
# Settings and presets


@dataclass
class Settings:
    data: str = ''               # data set: a folder under data/ or a path; '' takes tinyshakespeare
    out: str = ''                # folder of checkpoints and log; '' takes out/PRESET
    init: str = ''               # checkpoint to start from: fine-tuning
    resume: bool = False         # go on from the checkpoint in `out`
    steps: int = 1000            # updates in the whole run; 0: only evaluate, and write nothing
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
        at_least_1 = ('batch_tokens', 'log_every', 'muon_steps', 'eval_tokens')
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
        """Is it time, after `step` updates, for what `every` names (such as 'save_every')? After
        the last update it always is."""
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
    # the same size and corpus with newer methods
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

# -------------------------------------------------------------------------------
# Several processes: torchrun starts one per device, and all of them run this file


def rank():
    """The number of this process. Only the first one, number 0, prints and writes files."""
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(x):
    """Sums a tensor over all processes, in place, and returns it."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def from_first(value):
    """Returns the first process's value in all processes."""
    box = [value]
    if world() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def say(text):
    if rank() == 0:
        print(text, flush=True)


def local_rank():
    """The number of this process on its own machine; -1 if torchrun did not start it."""
    return int(os.environ.get('LOCAL_RANK', -1))


def join_processes(settings):
    """Connects the processes that torchrun has started, and gives each its own device."""
    if int(os.environ.get('WORLD_SIZE', 1)) == 1:
        return
    if settings.device == 'cpu' or not torch.cuda.is_available():
        settings.device, backend = 'cpu', 'gloo'
    else:
        settings.device, backend = f'cuda:{local_rank()}', 'cpu:gloo,cuda:nccl'
    # the others wait while the first process saves a large model, which can take long
    dist.init_process_group(backend, timeout=timedelta(hours=2))


def leave_processes():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# -------------------------------------------------------------------------------
# Data


def to_device(device, *tensors):
    """The tensors on the device. A GPU copies them from pinned memory while this process goes
    on."""
    if device.type != 'cuda':
        return [tensor.to(device) for tensor in tensors]
    return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in tensors]


class Data:
    """The data set of a run. The rows of an update depend on (seed, step) alone; processes and
    micro-batches only slice them. In the shapes, T is block_size."""

    def __init__(self, name, cfg, settings, device):
        self.name, self.cfg, self.settings, self.device = name, cfg, settings, device
        self.train, self.val, self.meta = prepare.load_data(name)
        # one thread reads the next batch while this one is used
        self.reader = ThreadPoolExecutor(1)
        self.next_step, self.next_batch = None, None

    def batch(self, step):
        """This process's part of update `step` as micro-batches, [(inputs, targets)], int64
        (rows, T) each, on the device."""
        if self.next_step != step:
            self.read_ahead(step)
        batch = self.next_batch.result()
        self.read_ahead(step + 1)
        return batch

    def read_ahead(self, step):
        self.next_step = step
        self.next_batch = self.reader.submit(self.read, step)

    def read(self, step):
        T = self.cfg.block_size
        n_rows = self.settings.batch_tokens // T
        # a row is T + 1 tokens; integers() excludes its upper bound, so the last row may end at the last token
        rng = np.random.default_rng([self.settings.seed, step])
        starts = rng.integers(0, len(self.train) - T, n_rows)
        # this process's share of the rows
        first = rank() * n_rows // world()
        last = (rank() + 1) * n_rows // world()
        rows = np.stack([self.train[start:start + T + 1] for start in starts[first:last]])
        rows = torch.from_numpy(rows.astype(np.int64))  # (rows, T + 1)
        if rows.max() >= self.cfg.vocab_size:
            raise Refusal(f'The data has id {rows.max()}, outside the vocabulary of '
                          f'{self.cfg.vocab_size}: prepare it again.')
        # the target of each token is the next token
        micro_batches = rows.split(self.settings.micro_batch or len(rows))
        return [to_device(self.device, part[:, :-1], part[:, 1:]) for part in micro_batches]

    def windows(self):
        """The validation tokens, at most eval_tokens of them, as `windows_of` yields them."""
        return windows_of(self.val, self.cfg.block_size, self.device, self.settings.eval_tokens)

    def bits_per_byte(self, loss):
        """A loss in nats per token as bits per byte of text, which compares models with
        different tokenizers."""
        return loss / math.log(2) * self.meta['val_tokens'] / self.meta['val_bytes']


def windows_of(tokens, T, device, most=2 ** 62):
    """Yields this process's rows of consecutive windows, (inputs, targets), (rows, T) each. Each
    of the first `most` targets occurs once, in one process; -1 is no target."""
    n = min(len(tokens) - 1, most)
    # every process gets the same number of rows, so the last ones may be padding
    n_rows = math.ceil(n / (T * world())) * world()
    inputs = np.zeros(n_rows * T, np.int64)
    targets = np.full(n_rows * T, -1)
    inputs[:n] = tokens[:n]
    targets[:n] = tokens[1:n + 1]
    # the processes take turns, row by row
    inputs = torch.from_numpy(inputs).view(n_rows, T)[rank()::world()]
    targets = torch.from_numpy(targets).view(n_rows, T)[rank()::world()]
    rows_at_once = max(1, 8192 // T)
    for batch in zip(inputs.split(rows_at_once), targets.split(rows_at_once)):
        yield to_device(device, *batch)


# -------------------------------------------------------------------------------
# Optimizers


def orthogonalize(g, steps):
    """g (n, rows, cols) -> roughly the nearest orthogonal matrices, (n, rows, cols).

    Newton-Schulz's polynomial pushes every singular value towards 1 (coefficients: Keller
    Jordan's Muon, 2024). It stays in fp32: many CPUs are slow in bf16, and a GPU uses TF32.
    """
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)  # -4.7750 a + 2.0315 a a
        x = torch.baddbmm(x, b, x, beta=3.4445)                 # 3.4445 x + b x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan 2024; arXiv:2502.16982) for the blocks' matrices.

    roles: {parameter: the rows of each matrix stacked in it}. Every matrix is orthogonalised by
    itself; those of one shape make one batch. A sharded parameter is gathered first, and every
    process does the same work.
    """

    def __init__(self, roles, lr, momentum, weight_decay, steps):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, steps=steps)
        super().__init__(list(roles), defaults)
        self.roles = roles

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            updates = {p: self.momentum_of(p, group['momentum']) for p in group['params']}
            self.orthogonalize_in_place(updates, group['steps'])
            for p, update in updates.items():
                if isinstance(p, DTensor):
                    # back to the part that this process keeps
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(update, alpha=-group['lr'])

    def momentum_of(self, p, decay):
        """Adds p's gradient to its momentum. Returns Nesterov's momentum, gathered if p is
        sharded."""
        if p not in self.state:
            self.state[p]['momentum'] = torch.zeros_like(p)
        momentum = self.state[p]['momentum']
        momentum.lerp_(p.grad, 1 - decay)
        update = p.grad.lerp(momentum, decay)
        return update.full_tensor() if isinstance(update, DTensor) else update

    def orthogonalize_in_place(self, updates, steps):
        """updates: {parameter: a tensor of its shape}."""
        # sort the single matrices, which are views into the updates, by shape
        same_shape = {}
        for p, update in updates.items():
            for role in update.split(self.roles[p], dim=-2):
                # experts are a stack of matrices, (E, rows, cols)
                matrices = role.unbind() if role.dim() == 3 else [role]
                for matrix in matrices:
                    same_shape.setdefault(matrix.shape, []).append(matrix)
        # a tall matrix moves further than a wide one (Jordan)
        for (rows, cols), matrices in same_shape.items():
            scale = max(1, rows / cols) ** 0.5
            orthogonal = orthogonalize(torch.stack(matrices), steps) * scale
            for matrix, new in zip(matrices, orthogonal):
                matrix.copy_(new)


def muon_roles(model):
    """The parameters that Muon updates: the matrices of the blocks' linear layers and experts,
    but not of their routers. {parameter: the rows of each matrix stacked in it}"""
    roles = {}
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Router):
            roles[module.weight] = [module.out_features]
        if isinstance(module, Fused):
            roles[module.weight] = module.roles
        if isinstance(module, MixtureOfExperts):
            roles[module.w_up] = module.roles
            roles[module.w_down] = [module.w_down.shape[-2]]
    return roles


def make_optimizers(model, settings):
    """[AdamW], or [AdamW, Muon] if the settings ask for Muon. AdamW decays matrices, but neither
    biases nor the weights of norms."""
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
    # 'lr' will change in every update; the peak is kept beside it
    for group in groups_of(optimizers):
        group['peak_lr'] = group['lr']
    return optimizers


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def lr_factor(settings, step):
    """The learning rate of update `step`, counted from 0, as a share of its peak. It rises over
    `warmup` updates, stays level, and falls to min_lr over the last part `cooldown` of the run."""
    up = min(1.0, (step + 1) / (settings.warmup + 1))
    # from 1 at the start of the cooldown to 0 at the end of the run
    down = max(0, settings.steps - step) / max(1.0, settings.cooldown * settings.steps)
    down = min(1.0, down)
    if settings.decay == 'cosine':
        down = 0.5 - 0.5 * math.cos(math.pi * down)
    return up * (settings.min_lr + (1 - settings.min_lr) * down)


@torch.no_grad()
def zero_outputs(model):
    """Zeros the weights that write to the residual stream, and an untied head. At first every
    block then returns its input, and all next tokens are equally likely."""
    for weight in residual_weights(model):
        weight.zero_()
    if model.lm_head is not None:
        model.lm_head.weight.zero_()


# -------------------------------------------------------------------------------
# A run: a model, its precision, its optimizers, and one update of it


def sharded(settings):
    """Does each process keep only a part of the model?"""
    return world() > 1 and settings.parallel == 'fsdp'


def compile_blocks(model, settings, device):
    """Compiles the blocks and the loss, and lets the backward pass compute each block's
    activations again, as the settings ask."""
    reason = prepare.no_compiler(device)
    if settings.compile and reason:
        say(f'not compiled: {reason}')
    compiles = settings.compile and not reason
    for block in model.blocks:
        # All blocks run the same code, which is compiled once. To compile the whole model would take 10 s more
        # for `baby`, and save 4 ms per update.
        if compiles:
            block.forward = torch.compile(block.forward)
        # around the compiled block, so that the second computation is compiled too
        if settings.checkpoint_activations:
            block.forward = partial(recompute, block.forward, use_reentrant=False)
    if compiles:
        model.nll = torch.compile(model.nll)


def place(model, settings, device, dtype):
    """Moves the model to its device, compiles it, and wraps it if there are several processes.

    Returns the module to call, and the context to call it in. Weights are fp32, and in that
    context matrix products are in dtype. Parameters keep their names.
    """
    model.to(device)
    if device.type == 'cuda':
        # TF32 for products in fp32, such as Muon's
        torch.set_float32_matmul_precision('high')
    compile_blocks(model, settings, device)
    if sharded(settings):
        # each process keeps a part of every block, and gathers one block at a time, in dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (world(),))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model, nullcontext()
    cast = nullcontext()
    if dtype != torch.float32:
        cast = torch.autocast(device.type, dtype)
    if world() == 1:
        return model, cast
    # dynamo would cut each compiled block in two, to send some gradients earlier
    torch._dynamo.config.optimize_ddp = False
    devices = [device] if device.type == 'cuda' else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True), cast


def eager():
    """A context in which nothing is compiled, for evaluations and samples: they have many
    shapes, and need each of them rarely."""
    return torch.compiler.set_stance('force_eager')


def add_gradients(run, batch):
    """The forward and backward passes of an update of a Run, below. batch: this process's
    micro-batches. Returns the mean loss over the targets of all processes, a tensor."""
    # the mean loss of a micro-batch is weighted by its number of targets
    n_targets = torch.stack([(targets != -1).sum() for _, targets in batch])
    n_all = all_sum(n_targets.sum()).clamp(min=1)
    # dropout differs between updates, processes and micro-batches
    seeds = np.random.SeedSequence([run.settings.seed, run.step, rank()]).generate_state(len(batch))
    losses = []
    for i, (inputs, targets) in enumerate(batch):
        # DDP sums gradients over the processes in every backward pass unless told not to. One sum, in the last
        # backward pass, is enough. FSDP should sum in all of them: after a sum each process keeps only its part
        # of the gradients, but until then it has to keep them whole.
        if isinstance(run.wrapped, DistributedDataParallel):
            run.wrapped.require_backward_grad_sync = i + 1 == len(batch)
        torch.manual_seed(int(seeds[i]))
        with run.cast:
            loss = run.wrapped(inputs, targets) * n_targets[i] / n_all
        losses.append(loss.detach())
        # DDP and FSDP divide their sums by the number of processes, but the loss is divided by n_all already
        run.scaler.scale(loss * world()).backward()
    return all_sum(torch.stack(losses).sum())


def clip_gradients(run):
    """Limits the norm of the gradient to grad_clip. Returns the norm before that, a tensor."""
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    most = run.settings.grad_clip or math.inf
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), most)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step_optimizers(run, norm):
    """Lets the optimizers change the weights, and clears the gradient, which has this norm. In
    fp16 the norm may be infinite: then the weights stay, and the scaler lowers its scale."""
    for optimizer in run.optimizers:
        # by itself the scaler would skip only an optimizer whose own gradients are infinite
        if math.isfinite(norm):
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    run.scaler.update()


# The state as one process has it, so that a checkpoint does not depend on the number of processes.
WHOLE_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Run:
    """A model in training, after `step` updates. It needs neither a data set nor a folder."""

    def __init__(self, model, settings, device, dtype):
        self.model, self.settings, self.device, self.dtype = model, settings, device, dtype
        self.step = 0
        self.wrapped, self.cast = place(model, settings, device, dtype)
        self.optimizers = make_optimizers(model, settings)
        # in fp16 small gradients would become 0, so the loss is scaled up; otherwise this does nothing
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def update(self, batch):
        """One update from this process's [(inputs, targets)], (rows, T) each, -1 for no target.

        Returns two floats: the mean loss over the targets of all processes, and the norm of its
        gradient. If one of them is not finite, raises Refusal and leaves the weights as they
        were. In fp16 an infinite norm only skips the update.
        """
        for group in groups_of(self.optimizers):
            group['lr'] = group['peak_lr'] * lr_factor(self.settings, self.step)
        self.wrapped.train()
        loss = add_gradients(self, batch)
        norm = clip_gradients(self)
        # here, and only here, an update waits for the device
        loss, norm = torch.stack((loss, norm.to(loss))).tolist()
        may_skip = self.scaler.is_enabled()
        if not math.isfinite(loss) or not (math.isfinite(norm) or may_skip):
            raise Refusal(f'The loss is {loss}, the norm of its gradient {norm}: resume the last checkpoint '
                          'or start anew with a lower --lr.')
        step_optimizers(self, norm)
        self.step += 1
        return loss, norm

    @torch.no_grad()
    def evaluate(self, windows):
        """The loss in nats per target over all processes' windows, (inputs, targets) each."""
        self.wrapped.eval()
        total = torch.zeros((), device=self.device)
        n_all = torch.zeros((), dtype=torch.int64, device=self.device)
        with eager(), self.cast:
            for inputs, targets in windows:
                n_targets = (targets != -1).sum()
                total += self.wrapped(inputs, targets) * n_targets
                n_all += n_targets
        return all_sum(total).item() / all_sum(n_all).item()

    def save(self, path, data, resumable=True):
        """Writes a checkpoint. All processes call this, as each may hold a part of the state.
        Without optimizers it is smaller, but can't be resumed."""
        optimizers = self.optimizers if resumable else []
        weights, optimizer_state = dcp.get_state_dict(self.model, optimizers, options=WHOLE_STATE)
        checkpoint = dict(
            config=asdict(self.model.cfg), model=weights, step=self.step,
            tokenizer=data.meta['tokenizer'], data=data.meta['sha256'],
            settings={**asdict(self.settings), 'data': data.name, 'device': ''})
        if resumable:
            checkpoint['optimizer'] = optimizer_state
            checkpoint['scaler'] = self.scaler.state_dict() or None
        if rank() == 0:
            prepare.save_checkpoint(path, checkpoint)

    def restore(self, checkpoint):
        """Takes the optimizers' state and the step from a checkpoint. Its weights are in the
        model already."""
        # Loading overwrites the hyperparameters; put this run's back.
        ours = [{**group, 'params': None} for group in groups_of(self.optimizers)]
        dcp.set_optimizer_state_dict(self.model, self.optimizers, checkpoint['optimizer'], options=WHOLE_STATE)
        for group, values in zip(groups_of(self.optimizers), ours):
            group.update(values, params=group['params'])
        if checkpoint['scaler']:
            self.scaler.load_state_dict(checkpoint['scaler'])
        self.step = checkpoint['step']


# -------------------------------------------------------------------------------
# The table of cards
#
# Dense figures, not those for sparse matrices. Sources: NVIDIA's data sheets; its white papers on GA102, Ada
# and RTX Blackwell for GeForce; AWS on the A10G; AMD's data sheet; Apple's announcements. fp32 is without
# TF32. On GeForce the 16-bit figure is with fp32 accumulation, half of the advertised one.

PEAKS = {
    # words          TFLOP/s in bf16, fp16, fp32; GB/s; GB. None: no such units, or no published figure
    'T4': (None, 65, 8.1, 320, 16),
    'V100 PCIe': (None, 112, 14.0, 900, 16),
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
# A name with one of these words is a different card, which is not in the table.
ANOTHER_CARD = {'TI', 'SUPER', 'D', 'LAPTOP', 'PRO', 'MAX', 'ULTRA', 'Q', 'MIG', 'ADA', 'GRID'}


def peak(name):
    """The figures of a card, {'bf16', 'fp16', 'fp32', 'gbs', 'gb'}. name: as its driver prints
    it, or short like 'H100'. None if the table does not have it."""
    words = set(re.split(r'[\s-]+', name.strip().upper()))
    if ANOTHER_CARD & words:
        return None
    # the first entry whose words are all in the name
    for entry, figures in PEAKS.items():
        wanted = set(entry.upper().split())
        if wanted <= words:
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
    """Dense TFLOP/s of a torch.device in a torch.dtype; None where the table has no figure."""
    figures = peak(device_name(device)) or {}
    names = {torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.float32: 'fp32'}
    return figures.get(names[dtype])


# -------------------------------------------------------------------------------
# What a run prints, and what it keeps in its folder


def read_log(path):
    """The lines of a log.jsonl, as dicts. A last line that was cut off by a crash is left out."""
    lines = prepare.read_text(path).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith('}\n')]


def draw(path, curves, **settings):
    """Draws curves, {label: (xs, ys)}, to a PNG file. settings: matplotlib's, of the axes.
    Without matplotlib there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = Figure(figsize=(7, 4)).subplots()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, marker='.' if len(xs) < 20 else None)
    axes.set(**settings)
    # plain numbers, also on a log scale, and none between the main ticks, where they would collide
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter('')
    axes.legend()
    with prepare.write_atomically(path) as file:
        axes.figure.savefig(file, format='png', dpi=120)


class Log:
    """The lines of progress, log.jsonl and loss.png, all written by the first process."""

    def __init__(self, run):
        self.settings = run.settings
        self.path = os.path.join(self.settings.out, 'log.jsonl')
        # a resumed run keeps the lines up to its checkpoint; it will repeat the later ones
        lines = read_log(self.path) if run.step else []
        lines = from_first([line for line in lines if line['step'] <= run.step])
        self.val_losses = {line['step']: line['val_loss'] for line in lines if 'val_loss' in line}
        if rank() == 0:
            with prepare.write_atomically(self.path) as file:
                for line in lines:
                    file.write(json.dumps(line).encode() + b'\n')
        # for MFU, the share of the cards' peak that is used; a backward pass costs twice a forward pass
        cfg = run.model.cfg
        self.flops_per_token = 3 * flops_per_token(cfg, cfg.block_size)
        self.peak_flops = 1e12 * world() * (peak_tflops(run.device, run.dtype) or 0)
        if run.device.type == 'cuda' and run.dtype == torch.float32:
            # a GPU uses TF32 here, for which the table has no figure
            self.peak_flops = 0
        # updates since the last line of progress, and their seconds
        self.n_updates, self.seconds = 0, 0.0
        self.is_first = True

    def write(self, **line):
        if rank() == 0:
            with open(self.path, 'a') as file:
                file.write(json.dumps(line) + '\n')

    def update(self, step, loss, norm, seconds):
        """Notes an update, and prints and writes a line every log_every updates."""
        # in the first update most of the time is the compiler's
        if not self.is_first:
            self.n_updates += 1
            self.seconds += seconds
        self.is_first = False
        if not self.settings.due('log_every', step):
            return
        lr = self.settings.lr * lr_factor(self.settings, step - 1)
        seconds = self.seconds / max(1, self.n_updates)
        rate = self.settings.batch_tokens / seconds if seconds else 0.0
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        shown_mfu = f'{mfu:.1%}' if mfu else 'n/a'
        left = timedelta(seconds=int((self.settings.steps - step) * seconds))
        say(f'{step:>7}/{self.settings.steps}  loss {loss:.4f}  lr {lr:.1e}  {1000 * seconds:.0f} ms  '
            f'{rate:,.0f} tokens/s  MFU {shown_mfu}  {left} left')
        # fp16's norm may be infinite, which JSON can't say
        norm = norm if math.isfinite(norm) else None
        self.write(step=step, loss=loss, lr=lr, ms=1000 * seconds, tokens_per_s=rate, mfu=mfu, grad_norm=norm)
        self.n_updates, self.seconds = 0, 0.0

    def evaluation(self, step, loss, bits):
        self.val_losses[step] = loss
        self.write(step=step, val_loss=loss, bits_per_byte=bits)

    def best(self):
        """The lowest validation loss so far."""
        return min(self.val_losses.values(), default=math.inf)

    def draw_losses(self):
        if rank() != 0:
            return
        curves = {}
        for key in ('loss', 'val_loss'):
            points = [(line['step'], line[key]) for line in read_log(self.path) if key in line]
            if points:
                curves[key] = list(zip(*points))
        path = os.path.join(self.settings.out, 'loss.png')
        draw(path, curves, xlabel='update', ylabel='nats per token')


@contextmanager
def locked(folder):
    """A context in which no second run can write to the folder, if the system can lock folders.
    The first process holds the lock. Raises Refusal if another run has it."""
    if rank() != 0 or os.name == 'nt':
        yield
        return
    import fcntl
    os.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f'Another run writes to {folder}: wait for its end, or take another --out.') from None
    except OSError:
        # this file system has no locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def move_old_run(folder):
    """Moves what an older run has left in the folder to its subfolder previous_1, or the next
    number that is free."""
    if rank() != 0 or not os.path.exists(os.path.join(folder, 'ckpt.pt')):
        return
    for n in count(1):
        aside = f'{folder}/previous_{n}'
        if not os.path.exists(aside):
            break
    os.mkdir(aside)
    # ckpt.pt comes last: if this is cut off, the next run moves the rest
    for file in ('best.pt', 'log.jsonl', 'loss.png', 'ckpt.pt'):
        with suppress(FileNotFoundError):
            os.replace(os.path.join(folder, file), os.path.join(aside, file))
    say(f'a run was here before: it is now {aside}')


class Signals:
    """Ctrl-C and SIGTERM stop a run after its current update; a second one stops it at once."""

    def __init__(self):
        self.received = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.received.append(number)
        signal.signal(number, signal.SIG_DFL)
        say('stopping after this update; the same signal again stops at once')

    def stopped(self):
        """Has any process received a signal? All processes call this together, once per update,
        and all get the same answer."""
        n = torch.tensor(float(len(self.received)))
        return bool(all_sum(n))

    def exit_code(self):
        # if only another process received one, this process takes it for SIGTERM
        number = self.received[0] if self.received else signal.SIGTERM
        return 128 + number


# -------------------------------------------------------------------------------
# From the command line to a run


def default_run(device):
    """The name of the preset that suits a device."""
    device, _ = prepare.pick_device(device)
    return 'baby' if device.type == 'cpu' else 'shakespeare'


def configure(argv):
    """The command line -> Config values, Settings, and the checkpoint to start from, or None."""
    asked = prepare.command_line(argv, __doc__, Config, Settings, presets=PRESETS)
    # `asked` has the presets' values too, `flagged` only those of options
    flags = {word[2:].partition('=')[0] for word in argv if word.startswith('--')}
    flagged = {name: asked[name] for name in flags & asked.keys()}
    # the preset of a run comes first; without --out the folder is named after all presets
    names = asked.pop('presets')
    if not RUNS.keys() & names:
        names = [default_run(asked.get('device', '')), *names]
    if asked.get('init'):
        names = [*names, 'tuned']
    out = asked.get('out') or os.path.join(prepare.ROOT, 'out', '-'.join(names))
    if asked.get('resume'):
        return configure_resumed(asked, flagged, out)
    values = {**RUNS.get(names[0], {}), **asked, 'out': out}
    settings = prepare.build(Settings, values)
    if not settings.init:
        return values, settings, None
    # the checkpoint says what the model is, not the presets
    checkpoint = prepare.load_checkpoint(settings.init)
    return {**checkpoint['config'], **flagged}, settings, checkpoint


def configure_resumed(asked, flagged, out):
    """The same, to go on with the run in the folder `out`. Options may change its settings, but
    not its model, data set and optimizer."""
    checkpoint = prepare.load_checkpoint(out)
    if 'optimizer' not in checkpoint:
        raise Refusal(f'{out} has no optimizer to resume with; start from its weights with --init={out}.')
    old = checkpoint['settings']
    fixed = {**checkpoint['config'], 'data': old['data'], 'optimizer': old['optimizer']}
    wanted = {**fixed, **{name: value for name, value in asked.items() if value != ''}}
    # Config puts a value in place of each 0 that means "derived"
    wanted.update(asdict(prepare.build(Config, wanted)))
    for name, value in fixed.items():
        if wanted[name] != value:
            raise Refusal(f'{name} is {wanted[name]}, but the run in {out} has {value}: resume with that, or '
                          'start anew with another --out.', 2)
    settings = prepare.build(Settings, {**old, **flagged, 'out': out})
    return checkpoint['config'], settings, checkpoint


def config_for(values, settings, checkpoint, name, meta):
    """The Config of a run on the data set `name`, from Config values. Raises Refusal if the
    model, the data set, the batch and the checkpoint do not fit together."""
    if checkpoint and checkpoint['tokenizer'] != meta['tokenizer']:
        theirs, ours = (t.get('name', t['kind']) for t in (checkpoint['tokenizer'], meta['tokenizer']))
        raise Refusal(f'The checkpoint has the tokenizer {theirs}, the data set {name} has {ours}: prepare '
                      'it with --tokenizer.')
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
    """A model with the checkpoint's weights; without a checkpoint, with those that the seed
    gives."""
    torch.manual_seed(settings.seed)
    model = Transformer(cfg)
    if checkpoint:
        prepare.load_weights(model, checkpoint['model'])
    # before the head is zero, and with it all logits
    if not settings.resume:
        refuse_peeking(model)
    if settings.zero_init and not checkpoint:
        zero_outputs(model)
    return model


@torch.no_grad()
def refuse_peeking(model):
    """Raises Refusal if earlier logits change with a later token. It takes milliseconds, and the
    loss of a model that sees its targets looks wonderful."""
    T = min(16, model.cfg.block_size)
    changed_at = sorted({1, T // 2, T - 1}) if T > 1 else []
    # one row as it is, and one for each change
    rows = torch.arange(T).repeat(1 + len(changed_at), 1) % model.cfg.vocab_size  # (rows, T)
    for row, t in enumerate(changed_at, 1):
        rows[row, t] = (rows[row, t] + 1) % model.cfg.vocab_size
    logits = model.eval()(rows, all_logits=True)                  # (rows, T, V)
    spread = logits.max() - logits.min()
    for row, t in enumerate(changed_at, 1):
        moved = (logits[row, :t] - logits[0, :t]).abs().amax(-1)  # (t,)
        if moved.max() > 1e-5 * spread:
            position = int(moved.argmax())
            raise Refusal(f'This model peeks: its logits at position {position} change with the token at position '
                          f'{t}, so its loss would mean nothing; look at its mask.')


def prepare_run(values, settings, checkpoint):
    """Returns the Run and its Data. Nothing is written yet, but for a data set that is missing."""
    device, dtype = prepare.pick_device(settings.device, settings.dtype)
    if dtype == torch.float16 and sharded(settings):
        raise Refusal('fsdp has no scaler for fp16: use --parallel=ddp or --dtype=fp32.', 2)
    # the first process makes the data set if it is missing; the others wait
    name = from_first(prepare.find_data(settings.data) if rank() == 0 else '')
    meta = prepare.load_data(name)[-1]
    cfg = config_for(values, settings, checkpoint, name, meta)
    data = Data(name, cfg, settings, device)
    run = Run(make_model(cfg, settings, checkpoint), settings, device, dtype)
    if settings.resume:
        run.restore(checkpoint)
    n_parameters = sum(p.numel() for p in run.model.parameters())
    say(f'{n_parameters:,} parameters, {len(data.train):,} tokens of {name}, {settings.steps:,} updates of '
        f'{settings.batch_tokens:,} tokens; {device} x {world()}, {str(dtype)[6:]}; {settings.out}')
    return run, data


def open_log(run):
    """The Log of a run, in its folder, where an older run makes room for a new one."""
    settings = run.settings
    if not settings.resume:
        move_old_run(settings.out)
    log = Log(run)
    if run.step >= settings.steps and run.step in log.val_losses:
        raise Refusal(f'{settings.out} is at update {run.step} already: go on with '
                      f'--steps={2 * run.step}, say.')
    return log


# -------------------------------------------------------------------------------
# The loop


def training_loop(run, data, log, signals):
    """Trains until the last update, or until a signal comes."""
    settings = run.settings
    # a run may have ended after its checkpoint, but before the evaluation that was due
    evaluation_due = run.step > 0 and settings.due('eval_every', run.step)
    if evaluation_due and run.step not in log.val_losses:
        validate(run, data, log)
    stopped = False
    while run.step < settings.steps and not stopped:
        # one update; the next batch is read meanwhile
        began = time.perf_counter()
        loss, norm = run.update(data.batch(run.step))
        log.update(run.step, loss, norm, time.perf_counter() - began)
        # a signal to any process stops them all
        stopped = signals.stopped()
        # a checkpoint comes first: an evaluation can fail
        evaluation_due = settings.due('eval_every', run.step)
        if stopped or evaluation_due or settings.due('save_every', run.step):
            run.save(os.path.join(settings.out, 'ckpt.pt'), data)
        # now and then the validation loss and a sample; a run that was stopped leaves them to the resumed run
        if evaluation_due and (not stopped or run.step == settings.steps):
            validate(run, data, log)
    log.draw_losses()


def evaluate_only(run, data):
    """Prints and returns the validation loss, in nats per token and in bits per byte."""
    loss = run.evaluate(data.windows())
    bits = data.bits_per_byte(loss)
    say(f'{run.step:>7}/{run.settings.steps}  validation loss {loss:.4f}, {bits:.4f} bits per byte')
    return loss, bits


def validate(run, data, log):
    """Prints the validation loss and a sample, and writes best.pt if the loss is the lowest so
    far."""
    loss, bits = evaluate_only(run, data)
    if loss < log.best():
        run.save(os.path.join(run.settings.out, 'best.pt'), data, resumable=False)
    log.evaluation(run.step, loss, bits)
    # a sharded model writes no sample: it would be gathered for each token
    if run.settings.sample_tokens and not sharded(run.settings):
        with eager():
            say(sample_text(run.model, data.meta['tokenizer'], run.settings.sample_tokens))


def sample_text(model, description, n):
    """n tokens that the model writes after a line end. description: the tokenizer's."""
    tokenizer = prepare.make_tokenizer(description)
    # a tokenizer of bare ids has no line end; the prompt is then id 0
    prompt = torch.tensor([tokenizer.encode('\n') or [0]])
    ids = [int(token) for token in generate(model.eval(), prompt, n, temperature=0.8)]
    return tokenizer.decode(ids).decode(errors='replace')


def say_how_to_go_on(run, data, log, seconds):
    settings = run.settings
    if run.step < settings.steps:
        say(f'stopped after update {run.step}; to go on: python train.py --out={settings.out} --resume=true')
        return
    prompt = {'tinyshakespeare': 'ROMEO:', 'stdlib': 'def '}.get(data.name, 'The ')
    say(f'{seconds:.0f} s, validation loss {log.best():.4f}. Read more of it with: '
        f'python sample.py --out={settings.out} --prompt="{prompt}"')


def main(argv):
    # under torchrun each process works on the GPU that has its number
    if 0 <= local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    values, settings, checkpoint = configure(argv)
    join_processes(settings)
    # without updates nothing is written: a run in the folder stays as it is
    if settings.steps == 0:
        evaluate_only(*prepare_run(values, settings, checkpoint))
        leave_processes()
        return
    with locked(settings.out):
        run, data = prepare_run(values, settings, checkpoint)
        log = open_log(run)
        signals = Signals()
        began = time.perf_counter()
        training_loop(run, data, log, signals)
        say_how_to_go_on(run, data, log, time.perf_counter() - began)
    leave_processes()
    if run.step < settings.steps:
        sys.exit(signals.exit_code())


if __name__ == '__main__':
    prepare.run(main)
