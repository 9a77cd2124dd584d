"""Train a Transformer on one CPU, one GPU or many.

    python train.py                                     Shakespeare, in minutes: a small model on a CPU, larger on a GPU
    python train.py baby mistral --steps=200            another family's block, a shorter run
    python train.py owt-124m                            OpenWebText; `python prepare.py openwebtext` comes first
    torchrun --nproc_per_node=8 train.py owt-124m       the same run on eight GPUs
    python train.py --resume=true                       go on where a run was stopped: on a CPU the same to the last bit

Presets are merged left to right, options win over them. In this order: settings and presets, processes, batches,
optimizers, one training step and evaluation, many devices, what comes before the run, the run.
"""
import json
import math
import os
import signal
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import prepare
from model import FAMILIES, Config, Fused, MixtureOfExperts, Transformer, flops_per_token, generate
from prepare import Refusal

# ---------------------------------------------------------------------------------------------------------------------
# Settings and presets


@dataclass
class Settings:
    data: str = ''               # dataset: a folder under data/ or a path; '' takes tinyshakespeare
    out: str = ''                # folder of checkpoints and log; '' takes out/PRESET
    init: str = ''               # checkpoint to start from: fine-tuning
    resume: bool = False         # go on from the checkpoint in `out`
    steps: int = 1000            # updates in the whole run
    batch_tokens: int = 16384    # tokens of one update, over all devices and micro-batches
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
    checkpoint_activations: bool = False  # make each block's activations again in the backward pass: less memory

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 1 if name in ('steps', 'batch_tokens', 'log_every', 'muon_steps', 'eval_tokens') else 0
            most = 1 if name in ('beta1', 'beta2', 'muon_momentum') else math.inf
            if isinstance(value, (int, float)) and not least <= value < most:
                raise ValueError(f'{name} is {value}, but must be at least {least} and below {most}')
        for name, known in ('optimizer', 'muon adamw'), ('decay', 'linear cosine'), ('parallel', 'ddp fsdp'):
            if getattr(self, name) not in known.split():
                raise ValueError(f'{name} is {getattr(self, name)!r}, but must be one of {known}')


GPT2_124M = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, vocab_multiple=64,
                 data='openwebtext', batch_tokens=480 * 1024, micro_batch=30, eval_every=1000, save_every=1000)
RUNS = {
    # two CPU cores, about four minutes
    'baby': dict(n_layer=4, n_head=4, n_embd=128, d_ff=352, block_size=64, qk_norm=True, zero_init=True,
                 steps=2300, batch_tokens=12 * 64, lr=8e-3, beta1=0.8, muon_lr=0.014, muon_steps=3, eval_every=1150,
                 save_every=1150, log_every=100),
    # one GPU, minutes
    'shakespeare': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, qk_norm=True, zero_init=True, dropout=0.2,
                        steps=2000, batch_tokens=64 * 256, lr=3e-3, weight_decay=0.1, eval_every=250, save_every=250),
    # GPT-2 by nanoGPT's recipe, to reproduce it; OpenAI's own was never published
    'gpt2-124m': dict(FAMILIES['gpt2'], **GPT2_124M, optimizer='adamw', steps=600_000, lr=6e-4, min_lr=0.1, warmup=2000,
                      decay='cosine'),
    # the same size and corpus by today's means
    'owt-124m': dict(GPT2_124M, qk_norm=True, zero_init=True, steps=20_000, lr=3e-3, warmup=250, cooldown=0.5),
}
# a family sets every switch of the block, and leaves the sizes to the run
SIZES = ('vocab_size', 'vocab_multiple', 'block_size', 'n_layer', 'n_head', 'n_embd', 'dropout')
PLAIN = {field.name: field.default for field in fields(Config) if field.name not in SIZES}
PRESETS = {**RUNS, **{name: {**PLAIN, **prepare.published(name)} for name in prepare.PUBLISHED},
           **{name: {**PLAIN, **family} for name, family in FAMILIES.items()}}

# ---------------------------------------------------------------------------------------------------------------------
# Processes: torchrun starts one a device


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(x):
    if world() > 1:
        dist.all_reduce(x)
    return x


def from_first(value):
    """What the first process has for value, in all of them."""
    box = [value]
    if world() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def say(text):
    if rank() == 0:
        print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Batches: a function of (seed, step); ranks and micro-batches only slice them


def micro_batches_of(step, data, cfg, settings, device):
    """This rank's part of an update, [(inputs, targets)], int64 (rows, T) on the device, the targets one token on."""
    T, n_rows = cfg.block_size, settings.batch_tokens // cfg.block_size
    starts = np.random.default_rng([settings.seed, step]).integers(0, len(data) - T, n_rows)  # the end is exclusive
    mine = starts[rank() * n_rows // world():(rank() + 1) * n_rows // world()]
    rows = torch.from_numpy(np.stack([data[i:i + T + 1] for i in mine]).astype(np.int64))     # (rows, T + 1)
    if rows.max() >= cfg.vocab_size:
        raise Refusal(f'The data has id {rows.max()}, outside the vocabulary of {cfg.vocab_size}: prepare it again.')
    return [to_device(device, part[:, :-1], part[:, 1:]) for part in rows.split(settings.micro_batch or len(rows))]


def to_device(device, *tensors):
    """The tensors there; from pinned memory a GPU fetches them itself, and nothing here waits."""
    cuda = device.type == 'cuda'
    return [(t.contiguous().pin_memory() if cuda else t).to(device, non_blocking=cuda) for t in tensors]


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def orthogonalize(g, steps):
    """Roughly the nearest orthogonal matrices to g (n, rows, cols): Newton-Schulz's polynomial pushes every singular
    value towards 1 (coefficients: Keller Jordan's Muon, 2024). In fp32 everywhere: many CPUs crawl in bf16, and a GPU
    has TF32."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan 2024; arXiv:2502.16982), for the blocks' matrices. `roles` gives the rows of
    each matrix in a parameter that stacks several; each is orthogonalised by itself, all of a shape in one batch. A
    sharded parameter is gathered first, and every rank does the same work."""

    def __init__(self, params, roles, lr, momentum, weight_decay, steps):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, steps=steps))
        self.roles = roles

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            updates, same_shape = [], {}  # (parameter, its update); shape -> views into the updates
            for p in group['params']:
                if p not in self.state:
                    self.state[p]['momentum'] = torch.zeros_like(p)
                momentum = self.state[p]['momentum']
                momentum.lerp_(p.grad, 1 - group['momentum'])
                update = p.grad.lerp(momentum, group['momentum'])                  # Nesterov's
                update = update.full_tensor() if isinstance(update, DTensor) else update
                updates.append((p, update))
                for role in update.split(self.roles.get(p, update.shape[-2]), dim=-2):
                    for matrix in role.unbind() if role.dim() == 3 else [role]:    # experts: (E, rows, cols)
                        same_shape.setdefault(matrix.shape, []).append(matrix)
            for (rows, cols), matrices in same_shape.items():
                orthogonal = orthogonalize(torch.stack(matrices), group['steps']) * max(1, rows / cols) ** 0.5
                for matrix, new in zip(matrices, orthogonal):
                    matrix.copy_(new)
            for p, update in updates:
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - group['lr'] * group['weight_decay']).add_(update, alpha=-group['lr'])


def make_optimizers(model, settings):
    """AdamW, which decays matrices only; and, when asked for, Muon for the blocks' matrices, the router aside."""
    inner = [p for name, p in model.blocks.named_parameters() if p.dim() > 1 and 'router' not in name]
    inner = inner if settings.optimizer == 'muon' else []
    rest = [p for p in model.parameters() if not any(p is q for q in inner)]
    groups = [dict(params=[p for p in rest if p.dim() > 1], weight_decay=settings.weight_decay),
              dict(params=[p for p in rest if p.dim() <= 1], weight_decay=0.0)]
    optimizers = [torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)]
    if inner:
        roles = {module.weight: module.roles for module in model.modules() if isinstance(module, Fused)}
        roles |= {module.w_up: module.roles for module in model.modules() if isinstance(module, MixtureOfExperts)}
        optimizers.append(Muon(inner, roles, settings.muon_lr, settings.muon_momentum, settings.muon_decay,
                               settings.muon_steps))
    for group in groups_of(optimizers):
        group['peak_lr'] = group['lr']
    return optimizers


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def lr_factor(settings, step):
    """The learning rate of update `step`, counted from 0, as a share of its peak: up over `warmup` updates, level, down
    to min_lr over the last `cooldown` of the run."""
    up = min(1.0, (step + 1) / (settings.warmup + 1))
    left = min(1.0, max(0, settings.steps - step) / max(1.0, settings.cooldown * settings.steps))
    share = left if settings.decay == 'linear' else 0.5 - 0.5 * math.cos(math.pi * left)
    return up * (settings.min_lr + (1 - settings.min_lr) * share)


# ---------------------------------------------------------------------------------------------------------------------
# One training step, and evaluation


def train_step(model, optimizers, micro_batches, cast=nullcontext(), scaler=None, grad_clip=1.0, seeds=None):
    """One update from [(inputs, targets)], (rows, T) each. Returns the loss, a mean over all real targets of the global
    batch, and the norm of its gradient. Raises Refusal before the weights are touched if they aren't finite;
    under fp16's scaler an infinite gradient only skips the update. `seeds` are of each micro-batch's dropout."""
    counts = torch.stack([(targets != -1).sum() for _, targets in micro_batches])   # real targets
    total = all_sum(counts.sum()).clamp(min=1)
    losses = []
    for i, batch in enumerate(micro_batches):
        if world() > 1:  # gradients travel once, after the last micro-batch
            model.set_requires_gradient_sync(i + 1 == len(micro_batches))
        if seeds:
            torch.manual_seed(seeds[i])
        with cast:
            losses.append(model(*batch)[1] * counts[i] / total)                     # this micro-batch's share
        share = losses[-1] * world()                                                # the wrappers average over ranks
        (scaler.scale(share) if scaler else share).backward()
    loss = all_sum(torch.stack(losses).sum().detach())
    for optimizer in optimizers if scaler else ():
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    loss, norm = torch.stack((loss, norm.to(loss))).tolist()                        # the one wait for the device
    if not math.isfinite(loss) or not (scaler or math.isfinite(norm)):
        raise Refusal(f'The loss is {loss}, the norm of its gradient {norm}: resume the last checkpoint or start anew '
                      'with a lower --lr.')
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        elif math.isfinite(norm):  # scaler.step would skip only the optimizer whose own gradients overflowed
            scaler.step(optimizer)
        optimizer.zero_grad()
    if scaler:
        scaler.update()
    return loss, norm


@torch.no_grad()
def evaluate(model, data, T, device, cast=nullcontext(), most=2 ** 62):
    """Nats a token over consecutive windows of T tokens, each target once, the first `most` of them; the ranks share
    the rows. Leaves the model in evaluation mode."""
    model.eval()
    n = min(len(data) - 1, most)
    n_rows = -(-n // (T * world())) * world()                                       # as many for every rank
    x, y = np.zeros(n_rows * T, np.int64), np.full(n_rows * T, -1)                  # -1 is no target
    x[:n], y[:n] = data[:n], data[1:n + 1]
    total = torch.zeros((), device=device)
    x, y = (torch.from_numpy(tokens).view(n_rows, T)[rank()::world()] for tokens in (x, y))
    for batch in zip(x.split(max(1, 8192 // T)), y.split(max(1, 8192 // T))):
        inputs, targets = to_device(device, *batch)
        with cast:
            total += model(inputs, targets)[1] * (targets != -1).sum()
    return all_sum(total).item() / n


# ---------------------------------------------------------------------------------------------------------------------
# Many devices


def place(model, settings, device, dtype):
    """The model as it is called in training: on its device, compiled, and with several processes wrapped; and the
    autocast context of its calls. No wrapper changes a parameter's name."""
    model.to(device)
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')  # TF32 for Muon's fp32 products
    if settings.checkpoint_activations:
        for block in model.blocks:
            block.forward = lambda *args, forward=block.forward: recompute(forward, *args, use_reentrant=False)
    reason = prepare.no_compiler(device)
    if settings.compile and reason:
        say(f'not compiled: {reason}')
    elif settings.compile:
        for block in model.blocks:  # one is compiled for all; all of `baby` would take 10 s longer and save 4 ms a step
            block.compile()
        model.nll = torch.compile(model.nll)
    cast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()
    if world() == 1:
        return model, cast
    if settings.parallel == 'ddp':
        wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == 'cuda' else None,
                                          gradient_as_bucket_view=True)
        wrapped.set_requires_gradient_sync = partial(setattr, wrapped, 'require_backward_grad_sync')  # FSDP2's name
        return wrapped, cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (world(),))
    for part in [*model.blocks, model]:  # each rank keeps a part of every block and gathers one block at a time
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model, nullcontext()


# ---------------------------------------------------------------------------------------------------------------------
# Before the run


def configure(argv):
    """The command line to config values, settings, and the checkpoint to start from, if any."""
    flags = {word[2:].partition('=')[0] for word in argv if word.startswith('--')}
    asked = prepare.command_line(argv, __doc__, Config, Settings, presets=PRESETS)
    names = asked.pop('presets')
    if not RUNS.keys() & names:
        device, _ = prepare.pick_device(asked.get('device', ''))
        names = ['baby' if device.type == 'cpu' else 'shakespeare', *names]
    names += ['tuned'] * bool(asked.get('init'))
    out = asked.get('out') or os.path.join(prepare.ROOT, 'out', '-'.join(names))
    flagged = {name: asked[name] for name in flags & asked.keys()}
    if not asked.get('resume'):
        values = {**RUNS.get(names[0], {}), **asked, 'out': out}
        state = prepare.load_checkpoint(asked['init']) if asked.get('init') else None
        return {**state['config'], **flagged} if state else values, prepare.build(Settings, values), state
    state = prepare.load_checkpoint(out)
    if 'optimizer' not in state:
        raise Refusal(f'{out} has no optimizer to resume with; start from its weights with --init={out}.')
    fixed = {**state['config'], 'data': state['settings']['data'], 'optimizer': state['settings']['optimizer']}
    wanted = {**fixed, **{key: value for key, value in asked.items() if value != ''}}
    wanted.update(asdict(prepare.build(Config, wanted)))  # a 0 becomes what it stands for
    for name, have in fixed.items():
        if wanted[name] != have:
            raise Refusal(f'{name} is {wanted[name]}, but the run in {out} has {have}: resume with that, or start anew '
                          'with another --out.', 2)
    return state['config'], prepare.build(Settings, {**state['settings'], **flagged, 'out': out}), state


def fit(config, settings, state, name, data, meta):
    """The Config for this data set, or a refusal where model, data and batch don't go together."""
    if state and state['tokenizer'] != meta['tokenizer']:
        spoken, found = (t.get('name', t['kind']) for t in (state['tokenizer'], meta['tokenizer']))
        raise Refusal(f'The checkpoint speaks {spoken}, the data set {name} {found}: prepare it with --tokenizer.')
    if settings.resume and state['data'] != meta['sha256']:
        raise Refusal(f'The data set {name} is not the one that this run began with: prepare it as it was.')
    if config.get('vocab_size', meta['vocab_size']) < meta['vocab_size']:
        raise Refusal(f'vocab_size is {config["vocab_size"]}, but the data set {name} has {meta["vocab_size"]} ids.', 2)
    cfg = prepare.build(Config, {'vocab_size': meta['vocab_size'], **config})
    if not cfg.causal:
        raise Refusal('causal=false: an encoder has no next-token loss; train a causal family.', 2)
    if len(data) <= cfg.block_size:
        raise Refusal(f'The data set {name} has {len(data)} tokens to train on, but a window of block_size '
                      f'{cfg.block_size} needs one more than that: take more text or a smaller --block_size.')
    if settings.batch_tokens % (cfg.block_size * world()):
        raise Refusal(f'batch_tokens is {settings.batch_tokens}, but must be a multiple of block_size {cfg.block_size} '
                      f'x {world()} processes.', 2)
    return cfg


# ---------------------------------------------------------------------------------------------------------------------
# The run

FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # one file in every mode, plain names


def zero_outputs(model):
    """Zeros where a block writes to the residual stream, and in an untied head: every block starts as the identity."""
    for name, p in model.named_parameters():
        if 'w_out' in name or 'w_down' in name or name == 'lm_head.weight':
            torch.nn.init.zeros_(p)


def sample_text(model, tok, n):
    """What the model writes after a line end; plain ids start from the first one."""
    prompt = torch.tensor([tok.encode('\n') or [0]])
    return tok.decode([int(i) for i in generate(model.eval(), prompt, n, temperature=0.8)]).decode(errors='replace')


def read_log(path):
    """The lines of a log.jsonl; a last one that a crash has cut is left out."""
    return [json.loads(line) for line in prepare.read_text(path).splitlines(True) if line.endswith('}\n')]


@contextmanager
def alone(folder):
    """Keeps a second run out of the folder while this one writes there, where the system can lock a folder."""
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
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def main(argv):
    local = int(os.environ.get('LOCAL_RANK', -1))
    if 0 <= local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    config, settings, state = configure(argv)
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:  # started by torchrun
        cpu = settings.device == 'cpu' or not torch.cuda.is_available()
        settings.device = 'cpu' if cpu else f'cuda:{local}'
        dist.init_process_group('gloo' if cpu else 'cpu:gloo,cuda:nccl', timeout=timedelta(hours=2))
    with alone(settings.out) if rank() == 0 else nullcontext():
        code = train(config, settings, state)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if code:
        sys.exit(code)


def train(config, settings, state):
    """The whole run. Returns the process's exit code: 0, or 128 + the signal that stopped it."""
    device, dtype = prepare.pick_device(settings.device, settings.dtype)
    scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
    if scaler and world() > 1 and settings.parallel == 'fsdp':
        raise Refusal('fsdp has no scaler for fp16: use --parallel=ddp or --dtype=fp32.', 2)
    name = from_first(prepare.find_data(settings.data) if rank() == 0 else '')  # one process makes the data for all
    train_data, val_data, meta = prepare.load_data(name)
    cfg, tok = fit(config, settings, state, name, train_data, meta), prepare.tokenizer(meta['tokenizer'])

    torch.manual_seed(settings.seed)
    model = Transformer(cfg)
    if state:
        prepare.load_weights(model, state['model'])
    elif settings.zero_init:
        zero_outputs(model)
    called, cast = place(model, settings, device, dtype)
    optimizers = make_optimizers(model, settings)
    log_path, done, kept = os.path.join(settings.out, 'log.jsonl'), 0, []
    if settings.resume:
        hyper = [dict(group, params=None) for group in groups_of(optimizers)]
        dcp.set_optimizer_state_dict(model, optimizers, state['optimizer'], options=FULL)
        for group, mine in zip(groups_of(optimizers), hyper):  # loading brings the old run's settings; ours go back
            group.update(mine, params=group['params'])
        done = state['step']
        kept = from_first([line for line in read_log(log_path) if line['step'] <= done])  # the rest comes again
        if scaler and state['scaler']:
            scaler.load_state_dict(state['scaler'])
    val_losses = {line['step']: line['val_loss'] for line in kept if 'val_loss' in line}
    if done >= settings.steps and done in val_losses:
        raise Refusal(f'{settings.out} is at update {done} already: go on with --steps={2 * done}, say.')

    if rank() == 0:
        if not settings.resume and os.path.exists(os.path.join(settings.out, 'ckpt.pt')):
            aside = next(path for n in count(1) if not os.path.exists(path := f'{settings.out}/previous_{n}'))
            os.mkdir(aside)
            for file in 'best.pt', 'log.jsonl', 'loss.png', 'ckpt.pt':
                with suppress(FileNotFoundError):
                    os.replace(os.path.join(settings.out, file), os.path.join(aside, file))
            say(f'a run was here before: it is now {aside}')
        with prepare.write_atomically(log_path) as file:
            file.write(''.join(json.dumps(line) + '\n' for line in kept).encode())

    def log(**line):
        if rank() == 0:
            with open(log_path, 'a') as file:
                file.write(json.dumps(line) + '\n')

    def save(file, resumable=True):
        """All ranks call it: a sharded state is gathered in the first one's memory."""
        weights, optimizer = dcp.get_state_dict(model, optimizers if resumable else [], options=FULL)
        state = dict(config=asdict(cfg), model=weights, step=done, tokenizer=meta['tokenizer'],
                     data=meta['sha256'], settings={**asdict(settings), 'data': name, 'device': ''})
        if resumable:
            state.update(optimizer=optimizer, scaler=scaler.state_dict() if scaler else None)
        if rank() == 0:
            prepare.save_checkpoint(os.path.join(settings.out, file), state)

    def due(every):
        return done == settings.steps or every and done % every == 0

    def validate():
        with torch.compiler.set_stance('force_eager'):  # or every new shape would be compiled
            loss = evaluate(called, val_data, cfg.block_size, device, cast, settings.eval_tokens)
            say(f'{done:>7}/{settings.steps}  validation loss {loss:.4f}')
            if loss < min(val_losses.values(), default=math.inf):
                save('best.pt', resumable=False)
            val_losses[done] = loss
            log(step=done, val_loss=loss)
            if settings.sample_tokens and not (world() > 1 and settings.parallel == 'fsdp'):
                say(sample_text(model, tok, settings.sample_tokens))

    signals = []

    def on_signal(number, _):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        say('stopping after this update; the same signal again stops at once')

    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, on_signal)
    tf32 = device.type == 'cuda' and dtype == torch.float32  # place() has turned it on; the table has no peak for it
    peak = None if tf32 else prepare.peak_tflops(device, dtype)
    flops = 3 * flops_per_token(cfg, cfg.block_size)
    say(f'{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_data):,} tokens of {name}, '
        f'{settings.steps:,} updates of {settings.batch_tokens:,} tokens; {device} x {world()}, {str(dtype)[6:]}; '
        f'{settings.out}')
    began, seconds, timed = time.perf_counter(), 0.0, 0
    with ThreadPoolExecutor(1) as pool:
        fetch = partial(pool.submit, micro_batches_of, data=train_data, cfg=cfg, settings=settings, device=device)
        ahead, compiles, stop = fetch(done), True, False
        if done and due(settings.eval_every) and done not in val_losses:  # the run was cut before it could
            validate()
        while done < settings.steps and not stop:
            start = time.perf_counter()
            batch, ahead = ahead.result(), fetch(done + 1)
            for group in groups_of(optimizers):
                group['lr'] = group['peak_lr'] * lr_factor(settings, done)
            seeds = np.random.SeedSequence([settings.seed, done, rank()]).generate_state(len(batch)).tolist()
            called.train()
            loss, norm = train_step(called, optimizers, batch, cast, scaler, settings.grad_clip, seeds)
            if not compiles:  # the first update's time is the compiler's
                seconds, timed = seconds + time.perf_counter() - start, timed + 1
            done, compiles = done + 1, False
            if due(settings.log_every):
                ms = 1000 * seconds / max(1, timed)
                rate = settings.batch_tokens / ms * 1000 if timed else 0.0
                mfu = rate * flops / (peak * 1e12 * world()) if peak else None
                lr = settings.lr * lr_factor(settings, done - 1)
                left = timedelta(seconds=int((settings.steps - done) * ms / 1000))
                say(f'{done:>7}/{settings.steps}  loss {loss:.4f}  lr {lr:.1e}  {ms:.0f} ms  {rate:,.0f} tokens/s  '
                    f'MFU {f"{mfu:.1%}" if mfu else "n/a"}  {left} left')
                norm = norm if math.isfinite(norm) else None  # JSON has no infinity; the scaler has skipped the update
                log(step=done, loss=loss, lr=lr, ms=ms, tokens_per_s=rate, mfu=mfu, grad_norm=norm)
                seconds, timed = 0.0, 0
            stop = bool(all_sum(torch.tensor(float(bool(signals)))))  # all processes stop together
            if stop or due(settings.save_every) or due(settings.eval_every):
                save('ckpt.pt')
            if due(settings.eval_every) and not (stop and done < settings.steps):
                validate()
    if rank() == 0:
        lines = read_log(log_path)
        logged = {key: [(line['step'], line[key]) for line in lines if key in line] for key in ('loss', 'val_loss')}
        curves = {key: zip(*points) for key, points in logged.items() if points}
        prepare.draw(os.path.join(settings.out, 'loss.png'), curves, xlabel='update', ylabel='nats a token')
    if stop and done < settings.steps:
        say(f'stopped after update {done}; to go on: python train.py --out={settings.out} --resume=true')
        return 128 + (signals or [signal.SIGTERM])[0]  # none here: another process got it
    prompt = {'tinyshakespeare': 'ROMEO:', 'stdlib': 'def '}.get(name, 'The ')
    say(f'{time.perf_counter() - began:.0f} s, validation loss {min(val_losses.values()):.4f}. Read more of it with: '
        f'python sample.py --out={settings.out} --prompt="{prompt}"')
    return 0


if __name__ == '__main__':
    prepare.run(main)
