"""Honest numbers: what a Transformer costs, computed, and what this machine makes of it, measured, side by side.

    python bench.py                          this machine at a glance, in under a minute
    python bench.py plan llama3-8b --hardware=H100 --gpus=8 --dollars_per_hour=2
    python bench.py train                    tokens/s and MFU, beside transformers' Llama of the same shape
    python bench.py prefill | decode         inference: tokens/s, bandwidth, and time a token against position
    python bench.py attention | memory       O(T^2) against O(T); what training keeps for the backward pass
    python bench.py ladder                   one small model from 2017's block to today's, part by part

A table for people, then one line of JSON for scripts; curves go to a PNG. The first runs of anything are dropped, the
device is waited for, and a figure is the median of several repeats with their spread (half the range, in percent).
What is one run alone says so in its title. Compilation and evaluation are never inside. --compare=FILE sets an earlier
JSON beside it: hack, measure, compare.
"""
import json
import math
import os
import platform
import statistics
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
import prepare
import train
from model import (
    FAMILIES,
    Block,
    Config,
    KVCache,
    PagedKVCache,
    Transformer,
    cache_bytes_per_token,
    flops_per_token,
    generate,
    matmul_params,
    prefill,
)
from prepare import Refusal


@dataclass
class Options:
    context: int = 0               # plan: tokens of a sequence; 0: the model's block_size
    batch: int = 1                 # plan: sequences served at once
    hardware: str = 'H100'         # plan: a device of the table of peaks
    gpus: int = 1                  # plan: how many of them
    dollars_per_hour: float = 0.0  # plan: of one of them
    tokens: float = 0.0            # plan: to train on; 0: 20 a parameter (Chinchilla, arXiv:2203.15556)
    mfu: float = 0.4               # plan: the share of the peak that training reaches
    peak_tflops: float = 0.0       # of this device, where the table doesn't know it
    peak_gbs: float = 0.0          # bandwidth of this device in GB/s, likewise
    repeats: int = 5               # measurements that a median is taken of
    device: str = ''               # cuda, mps, cpu; '' takes the best there is
    dtype: str = ''                # bf16, fp16, fp32; '' takes the device's best
    compile: bool = True           # compile what is measured, where that can work
    out: str = ''                  # folder for pictures; '' takes out/bench
    compare: str = ''              # file with an earlier JSON line

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 1 if name in ('batch', 'gpus', 'repeats') else 0
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise ValueError(f'{name} is {value}, but must be at least {least}')
        if not 0 < self.mfu <= 1:
            raise ValueError(f'mfu is {self.mfu}, but must be above 0 and at most 1')


# ---------------------------------------------------------------------------------------------------------------------
# Measuring and showing


def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def measure(functions, device, repeats=5, warmup=2):
    """Seconds of each function, [(median, spread)]: `repeats` rounds in which all take their turn, so that a noisy
    machine disturbs them alike. The spread is half the range over the median."""
    times = [[] for _ in functions]
    for i in range(warmup + repeats):
        for function, seconds in zip(functions, times):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if i >= warmup:
                seconds.append(time.perf_counter() - start)
    return [(statistics.median(t), (max(t) - min(t)) / 2 / statistics.median(t)) for t in times]


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside the context, while they live: .most at once. What a
    kernel uses internally is not seen, which is the same for all that is compared here, on every device."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.live and storage._cdata not in given:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


@contextmanager
def saved_for_backward(weights):
    """Bytes that autograd saves inside the context, each storage once, `weights` left out: a dict that fills."""
    kept, own = {}, {w.untyped_storage().data_ptr() for w in weights}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


def table(title, header, rows):
    """Prints rows of values in columns; a figure over 100 % of a peak is marked, since it can't be."""
    print(f'\n{title}')
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print('  ' + '  '.join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip())


def percent(share):
    if share is None:
        return 'n/a'
    return f'{share:.0%}' if share <= 1 else f'{share:.0%} (!)'


def human(n, unit=''):
    """123456789 as 123.5 M; bytes in powers of 1000, as cards are sold."""
    for size, prefix in ((1e12, 'T'), (1e9, 'G' if unit else 'B'), (1e6, 'M'), (1e3, 'k')):
        if abs(n) >= size:
            return f'{n / size:,.1f} {prefix}{unit}'
    return f'{n:,.0f} {unit}'.rstrip()


class Machine:
    """This device, its published peaks and what it was measured to reach."""

    def __init__(self, options):
        self.device, self.dtype = prepare.pick_device(options.device, options.dtype)
        self.options, self.name = options, prepare.device_name(self.device)
        n = 1024 if self.device.type == 'cpu' else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=self.dtype) for _ in range(2))
        (seconds, _), = measure([lambda: a @ b], self.device, 9)
        self.matmul_tflops = 2 * n ** 3 / seconds / 1e12
        big = torch.ones(2 ** 28 if self.device.type == 'cpu' else 2 ** 30, device=self.device, dtype=torch.float32)
        (seconds, _), = measure([big.sum], self.device, 5)
        self.read_gbs = big.nbytes / seconds / 1e9
        published = prepare.peak_tflops(self.device, self.dtype)
        self.peak_tflops = options.peak_tflops or published or (self.matmul_tflops if self.name == 'cpu' else None)
        self.peak_gbs = options.peak_gbs or (prepare.peak(self.name) or {}).get('gbs') or self.read_gbs
        self.compiles = options.compile and not prepare.no_compiler(self.device)

    def mfu(self, flops_per_second):
        return flops_per_second / self.peak_tflops / 1e12 if self.peak_tflops else None

    def cast(self):
        return torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()

    def method(self):
        threads = torch.get_num_threads() if self.device.type == 'cpu' else None
        return dict(device=self.name, dtype=str(self.dtype)[6:], torch=torch.__version__,
                    python=platform.python_version(), threads=threads, matmul_tflops=self.matmul_tflops,
                    read_gbs=self.read_gbs, peak_tflops=self.peak_tflops, peak_gbs=self.peak_gbs)

    def show(self):
        given = self.options.peak_tflops
        peak = '--peak_tflops' if given else 'its own measured product' if self.name == 'cpu' else 'the table'
        print(f'{self.name}, {str(self.dtype)[6:]}, torch {torch.__version__}: a matrix product reaches '
              f'{self.matmul_tflops:.3g} TFLOP/s, a read of memory {self.read_gbs:.3g} GB/s; 100 % is '
              + (f'{self.peak_tflops:.3g} TFLOP/s, by {peak}.' if self.peak_tflops else 'n/a: give --peak_tflops.'))


def picture(options, name, curves, xlabel, ylabel, **scales):
    """Curves, {label: (xs, ys)}, to out/bench/NAME.png, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print('no picture: matplotlib is not installed')
    axes = Figure(figsize=(7, 4)).subplots()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, marker='.' if len(xs) < 20 else None)
    axes.set(xlabel=xlabel, ylabel=ylabel, **scales)
    axes.legend()
    path = os.path.join(options.out or os.path.join(prepare.ROOT, 'out', 'bench'), f'{name}.png')
    with prepare.write_atomically(path) as file:
        axes.figure.savefig(file, format='png', dpi=120)
    print(f'\n{path}')


def read_result(path):
    """The JSON line that an earlier run has ended with."""
    try:
        return json.loads(prepare.read_text(path).strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Refusal(f'{path} does not end in a line of JSON; save one with: python bench.py > {path}', 2) from None


def compare(result, earlier):
    """Ratios of this result's numbers to an earlier one's."""
    flat = [(k, v, earlier.get(k)) for k, v in result.items()]
    flat += [(f'{k}.{i}', v, (earlier.get(k) or {}).get(i)) for k, sub in result.items() if isinstance(sub, dict)
             for i, v in sub.items()]
    rows = [(name, f'{old:.4g}', f'{new:.4g}', f'{new / old:.3f}') for name, new, old in flat
            if all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (new, old)) and old]
    table('against the earlier run', ('', 'then', 'now', 'ratio'), rows)


# ---------------------------------------------------------------------------------------------------------------------
# plan: what a model costs, from its config alone


def find_config(word):
    """The Config of a published model's name, a config.json of Hugging Face, or a checkpoint."""
    if word in prepare.PUBLISHED:
        return prepare.build(Config, prepare.published(word))
    if word in train.RUNS:
        return prepare.build(Config, train.RUNS[word])
    if word.endswith('.json'):
        return prepare.build(Config, prepare.from_hugging_face(prepare.read_json(word)))
    if os.path.exists(word):
        return prepare.build(Config, prepare.load_checkpoint(word)['config'])
    raise Refusal(f'Unknown model {word}{prepare.nearest(word, [*prepare.PUBLISHED, *train.RUNS])}', 2)


def count_parameters(cfg):
    """Parameters by part, all and those that one token meets, from the meta device."""
    with torch.device('meta'):
        model = Transformer(cfg)
    parts = dict.fromkeys(('embedding', 'positions', 'attention', 'MLP', 'experts', 'router', 'norms', 'head'), 0)
    for name, p in model.named_parameters():
        part = ('positions' if name.startswith('embed_pos') else 'embedding' if name.startswith('embed') else
                'head' if name.startswith('lm_head') else 'norms' if 'norm' in name else
                'attention' if '.attn.' in name else 'router' if 'router' in name else
                'experts' if p.dim() == 3 else 'MLP')
        parts[part] += p.numel()
    total = sum(parts.values())
    idle = parts['experts'] * (1 - cfg.n_active / cfg.n_expert) if cfg.n_expert else 0
    return {part: n for part, n in parts.items() if n}, total, round(total - idle)


def activation_bytes(cfg, rows, T, explicit=False, dropout=False, bytes_per_value=2):
    """What one block of the GPT form keeps for the backward pass: s b h (32 + 2 a s / h) bytes in 16 bits, with dropout
    34 + 5 a s / h (Korthikanti, arXiv:2205.05198, eq. 1); the second term is the scores', and gone under flash. Our
    dropout sits on the residual stream alone: 2 bytes of masks, and the scores keep 2 a s / h."""
    per_value = (32 + 2 * dropout) + 2 * explicit * cfg.n_head * T / cfg.n_embd
    return rows * T * cfg.n_embd * per_value * bytes_per_value / 2


def plan(options, words):
    """Everything that follows from the config alone."""
    name = words[0] if words else 'gpt2'
    cfg, T, B = find_config(name), options.context, options.batch
    T = T or cfg.block_size
    card = prepare.peak(options.hardware)
    if not card:
        raise Refusal(f'Unknown hardware {options.hardware}{prepare.nearest(options.hardware, prepare.PEAKS)}', 2)
    tflops = card['bf16'] or card['fp16'] or card['fp32']
    if not tflops:
        raise Refusal(f'The vendor of {options.hardware} gives no TFLOP/s, so there is nothing to plan with.')
    parts, total, active = count_parameters(cfg)
    N, n, L = matmul_params(cfg), options.gpus, cfg.n_layer
    forward, attention = flops_per_token(cfg, T), flops_per_token(cfg, T) - 2 * N
    d_attention = cfg.n_head * (cfg.head_dim + cfg.v_dim) / 2      # d of 4 L T d
    overtakes = 2 * N / (4 * L * d_attention)
    in_blocks = (N - cfg.n_embd * cfg.vocab_rows) / (2 * L * d_attention)
    kv = cache_bytes_per_token(cfg)
    weights, state = 2 * total, 16 * total
    capacity, rate, bandwidth = card['gb'] * 1e9 * n, tflops * 1e12 * n, card['gbs'] * 1e9 * n
    floor, with_cache = 2 * active / bandwidth, (2 * active + B * T * kv) / bandwidth
    held = min(T, cfg.window) if cfg.window else T
    room = capacity - weights
    tokens = options.tokens or 20 * total
    hours = 3 * forward * tokens / (rate * options.mfu) / 3600
    saved, explicit = activation_bytes(cfg, 1, T) * L, activation_bytes(cfg, 1, T, explicit=True) * L
    result = dict(mode='plan', model=name, params=total, active_params=active, params_by_part=parts, matmul_params=N,
                  forward_flops_per_token=forward, attention_flops_per_token=attention,
                  causal_forward_flops_per_token=2 * N + attention / 2, training_flops_per_token=3 * forward,
                  attention_overtakes_at=overtakes, attention_overtakes_blocks_at=in_blocks,
                  six_d=6 * d_attention, kv_bytes_per_token=kv,
                  kv_bytes_per_sequence=kv * T, kv_bytes_window_bound=kv * held, weight_bytes_bf16=weights,
                  weight_bytes_fp32=4 * total, training_state_bytes=state, training_state_bytes_per_gpu=state / n,
                  logit_bytes_fp32=4 * T * cfg.vocab_size, activation_bytes_flash=saved,
                  activation_bytes_explicit=explicit, activation_bytes_recomputed=2 * T * cfg.n_embd * L + saved / L,
                  decode_floor_s=floor, decode_floor_with_cache_s=with_cache,
                  largest_batch=max(0, int(room // (kv * T))), largest_context=max(0, int(room // (kv * B))),
                  training_tokens=tokens, training_hours=hours, training_gpu_hours=hours * n,
                  training_dollars=hours * n * options.dollars_per_hour)
    table(f'{name}: {total:,} parameters' + (f', {active:,} of them for one token' if active < total else ''),
          ('part', 'parameters', 'share'), [(part, f'{p:,}', f'{p / total:.1%}') for part, p in parts.items()])
    table(f'FLOPs a token, T = {T:,}', ('', 'FLOPs', ''), [
        (f'matrices, 2N: N = {N:,} counts the head, not the embedding, which is looked up', human(2 * N, 'FLOP'), ''),
        ('attention, 2 L T H (D_qk + D_v), the whole T x T', human(attention, 'FLOP'), f'{attention / forward:.0%}'),
        ('forward', human(forward, 'FLOP'), ''),
        ('forward, with the causal half of attention', human(2 * N + attention / 2, 'FLOP'), ''),
        ('training, 3 x forward', human(3 * forward, 'FLOP'), ''),
        ('attention overtakes the matrices at T', f'{overtakes:,.0f}', ''),
        ("attention overtakes the blocks' matrices at T", f'{in_blocks:,.0f}', ''),
        ('which for a block of 12 d^2 weights is 6 d', f'{6 * d_attention:,.0f}', '')])
    table('Memory', ('', 'bytes', ''), [
        ('weights, bf16', human(weights, 'B'), ''), ('weights, fp32', human(4 * total, 'B'), ''),
        ('training with Adam in mixed precision, 16 bytes a parameter', human(state, 'B'), ''),
        (f'of which a GPU holds under FSDP over {n}', human(state / n, 'B'), ''),
        (f"activations of a row of {T:,} by the GPT block's formula, flash attention", human(saved, 'B'), ''),
        ('with explicit scores', human(explicit, 'B'), ''),
        ('flash, blocks recomputed, a 16-bit stream', human(result['activation_bytes_recomputed'], 'B'), ''),
        (f'whole logits of a row in fp32 (here they come in chunks of {human(4 * Transformer.logits_at_once, "B")})',
         human(4 * T * cfg.vocab_size, 'B'), ''),
        (f'cache of a token, {"L (rank + rope)" if cfg.kv_rank else "2 L K D"} values of 2 bytes',
         f'{kv / 1024:,.1f} KiB', ''),
        (f'cache of {B} x {T:,} tokens, as held here', human(B * kv * T, 'B'), ''),
        *[(f'a rolling cache for window {w:,} would hold', human(B * kv * held, 'B'), '') for w in (cfg.window,) if w]])
    limits = f'{human(rate, "FLOP/s")}, {human(bandwidth, "B/s")}, {human(capacity, "B")}'
    money = f', ${hours * n * options.dollars_per_hour:,.0f}' if options.dollars_per_hour else ''
    table(f'{n} x {options.hardware}: {limits}', ('', '', ''), [
        ('a decoded token, weight bytes over bandwidth', f'{1e3 * floor:.2f} ms', ''),
        (f'with the cache of {B} x {T:,} tokens', f'{1e3 * with_cache:.2f} ms', f'{B / with_cache:,.0f} tokens/s'),
        (f'largest batch at T = {T:,}', f'{result["largest_batch"]:,}', ''),
        (f'largest context at batch {B}', f'{result["largest_context"]:,}', ''),
        (f'training on {human(tokens)} tokens at {options.mfu:.0%} MFU', f'{hours:,.1f} h',
         f'{hours * n:,.0f} GPU hours{money}')])
    odd = [f'{field} {value}' for field, value in dict(n_embd=cfg.n_embd, d_ff=cfg.d_ff, head_dim=cfg.head_dim,
                                                       vocab_rows=cfg.vocab_rows).items() if value % 64]
    if odd:
        print(f'\nNo multiples of 64, which tensor cores like: {", ".join(odd)}.')
    return {**result, 'odd_sizes': odd}


# ---------------------------------------------------------------------------------------------------------------------
# train and prefill


def shape_for(machine):
    """The model that train, prefill and the glance measure: the run that this device's preset would train."""
    name = 'baby' if machine.device.type == 'cpu' else 'owt-124m'
    values = {'vocab_size': 256, **train.RUNS[name]}
    return name, prepare.build(Config, values), 12 if name == 'baby' else 30


def our_training(machine, cfg, rows, compiled, optimizer='adamw'):
    """A function that makes one training step on the same random batch."""
    settings = train.Settings(optimizer=optimizer, compile=compiled, muon_steps=3 if cfg.n_embd < 512 else 5)
    torch.manual_seed(0)
    model = Transformer(cfg).train()
    called, cast = train.place(model, settings, machine.device, machine.dtype)
    optimizers = train.make_optimizers(model, settings)
    x = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)
    return lambda: train.train_step(called, optimizers, [(x, x)], cast)


def their_training(machine, cfg, rows):
    """The same for transformers' Llama of the same shape, with the same optimizer, clipping and compiler."""
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_rows, hidden_size=cfg.n_embd, intermediate_size=cfg.d_ff, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.block_size,
        tie_word_embeddings=cfg.tie, use_cache=False)).to(machine.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if machine.compiles:
        model.compile()
    x = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)

    def step():
        with machine.cast():
            logits = model(input_ids=x).logits
        F.cross_entropy(logits.float().flatten(0, 1), x.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


def has_transformers():
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    if prepare.find_spec('transformers'):
        return True
    print('transformers is not installed, so there is nothing to compare with: pip install -r requirements-dev.txt')
    return False


def training_modes(options, words):
    """Tokens/s beside the plan's FLOPs: eager, compiled, with Muon, and transformers' Llama, all in turns."""
    machine = Machine(options)
    machine.show()
    name, cfg, rows = shape_for(machine)
    cfg = prepare.build(Config, {**asdict(cfg), 'qk_norm': False})  # as Llama has it
    runs = {'ours, eager': our_training(machine, cfg, rows, False)}
    if machine.compiles:
        runs['ours, compiled'] = our_training(machine, cfg, rows, True)
        runs['ours, compiled, Muon'] = our_training(machine, cfg, rows, True, 'muon')
    variants = {'parallel wiring': dict(wiring='parallel'),  # PaLM's: 15 % faster at scale (arXiv:2204.02311)
                '8 experts, 2 a token': dict(n_expert=8, d_expert=cfg.d_ff // 2)}  # of the same active width
    for label, changes in variants.items():
        other = prepare.build(Config, {**asdict(cfg), **changes})
        runs[f'{label}, eager'] = our_training(machine, other, rows, False)
    if has_transformers():
        runs['transformers, compiled' if machine.compiles else 'transformers'] = their_training(machine, cfg, rows)
    times = measure(list(runs.values()), machine.device, 4 * options.repeats, warmup=3)
    tokens, flops = rows * cfg.block_size, 3 * flops_per_token(cfg, cfg.block_size)
    result = dict(mode='train', shape=name, rows=rows, T=cfg.block_size, flops_per_token=flops, **machine.method())
    lines = []
    for label, (seconds, spread) in zip(runs, times):
        rate = tokens / seconds  # experts add a router's FLOPs, a parallel block has a norm less: too few to show
        result[label] = dict(tokens_per_s=rate, ms=1e3 * seconds, spread=spread, tflops=rate * flops / 1e12,
                             mfu=machine.mfu(rate * flops))
        lines.append((label, f'{rate:,.0f}', f'{1e3 * seconds:.1f}', f'{spread:.0%}', f'{rate * flops / 1e12:.3g}',
                      percent(machine.mfu(rate * flops))))
    table(f'training, {name} shape, {rows} x {cfg.block_size} tokens of {human(flops, "FLOP")}, AdamW unless said',
          ('', 'tokens/s', 'ms', 'spread', 'TFLOP/s', 'MFU'), lines)
    print()
    ours = 'ours, compiled' if machine.compiles else 'ours, eager'
    for label in variants:
        ratio = result[f'{label}, eager']['tokens_per_s'] / result['ours, eager']['tokens_per_s']
        result[f'{label}, ratio'] = ratio
        print(f'{label}: {ratio:.2f} x the tokens/s of the plain block, both eager.')
    for theirs in [label for label in runs if 'transformers' in label]:
        result['ratio_to_transformers'] = result[ours]['tokens_per_s'] / result[theirs]['tokens_per_s']
        print(f'{ours}: {result["ratio_to_transformers"]:.2f} x the tokens/s of {theirs}.')
    return result


def prefill_flops(cfg, T):
    """Of reading T tokens: the blocks at every position, the head at the last alone."""
    head = 2 * cfg.n_embd * cfg.vocab_rows
    return T * (flops_per_token(cfg, T) - head) + head


@torch.no_grad()
def prefills(options, words):
    """Reading a prompt: tokens/s and share of the peak against its length."""
    machine = Machine(options)
    machine.show()
    name, cfg = decode_shape(machine)
    model = Transformer(cfg).to(machine.device, machine.dtype).eval()
    result, lines = dict(mode='prefill', shape=name, **machine.method()), []
    for T in (64, 128, 256, 512, 1024):
        ids = [torch.randint(cfg.vocab_size, (T,)).tolist()]
        (seconds, spread), = measure([lambda ids=ids, T=T: prefill(model, ids, KVCache(
            cfg, 1, T, machine.device, machine.dtype))], machine.device, options.repeats)
        flops = prefill_flops(cfg, T)
        result[f'T {T}'] = dict(tokens_per_s=T / seconds, spread=spread, mfu=machine.mfu(flops / seconds))
        lines.append((T, f'{T / seconds:,.0f}', f'{1e3 * seconds:.1f}', f'{spread:.0%}', human(flops, 'FLOP'),
                      percent(machine.mfu(flops / seconds))))
    table(f'prefill, {name}, one row; the head reads the last position alone',
          ('tokens', 'tokens/s', 'ms', 'spread', 'plan', 'MFU'), lines)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# decode


def decode_shape(machine):
    """A Llama of 114 M parameters on a CPU, of 7 B on a GPU that can hold it."""
    if machine.device.type == 'cuda' and torch.cuda.mem_get_info(machine.device)[0] > 40e9:
        return 'llama2-7b', prepare.build(Config, prepare.published('llama2-7b'))
    return 'Llama of 114 M', Config(n_layer=12, n_embd=768, n_head=12, n_kv_head=4, d_ff=2048, vocab_size=50304,
                                    tie=True)


def token_times(machine, steps):
    """Seconds of each token that a generator yields, the first, which is the prefill, included."""
    times, start = [], time.perf_counter()
    for _ in steps:
        synchronize(machine.device)
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return times


@torch.no_grad()
def decodes(options, words):
    """Batch 1 reads every weight once a token: that is the limit, and MBU the share of the bandwidth in use."""
    machine = Machine(options)
    machine.show()
    name, cfg = decode_shape(machine)
    torch.manual_seed(0)
    model = Transformer(cfg).to(machine.device, machine.dtype).eval()
    read = matmul_params(cfg) * model.embed.weight.element_size()
    prompt = torch.randint(cfg.vocab_size, (1, 64))
    step = prepare.decode_step(model) if machine.compiles else None
    where = dict(device=machine.device, dtype=machine.dtype)

    def ours(n, rows=1, kind=KVCache, step=None):
        more = dict(static=True) if step else {}
        cache = kind(cfg, rows, 64 + n, **where, **more)
        return token_times(machine, generate(model, prompt.expand(rows, -1), n, temperature=0, cache=cache, step=step))

    result, lines = dict(mode='decode', shape=name, weight_bytes=read, prompt=64, **machine.method()), []
    runs = {'ours, eager': partial(ours, 100)}
    if step:
        start = time.perf_counter()
        ours(3, step=step)
        result['compile_s'] = time.perf_counter() - start
        runs['ours, compiled'] = partial(ours, 100, step=step)
    if name != 'llama2-7b' and has_transformers():
        runs['transformers, eager'] = their_decoding(machine, cfg, prompt, 100)
    rates = {label: [] for label in runs}
    for i in range(1 + max(3, options.repeats // 2)):  # in turns; the first round is warm-up
        for label, run in runs.items():
            times = run()
            if i:
                rates[label].append((99 / sum(times[1:]), times[0]))
    for label, pairs in rates.items():
        rate, first = (statistics.median(values) for values in zip(*pairs))
        spread = (max(pairs)[0] - min(pairs)[0]) / 2 / rate
        mbu = rate * read / machine.peak_gbs / 1e9
        result[label] = dict(tokens_per_s=rate, spread=spread, mbu=mbu, prefill_ms=1e3 * first)
        lines.append((label, f'{rate:.1f}', f'{1e3 / rate:.1f}', f'{spread:.0%}', f'{rate * read / 1e9:.1f}',
                      percent(mbu), f'{1e3 * first:.0f}'))
    table(f'decode, {name}, one row, prompt 64, 100 new tokens, greedy; a token reads {human(read, "B")}',
          ('', 'tokens/s', 'ms', 'spread', 'GB/s', 'MBU', 'prefill ms'), lines)
    print()
    for label in [label for label in rates if 'ours' in label and 'transformers, eager' in rates]:
        ratio = result[label]['tokens_per_s'] / result['transformers, eager']['tokens_per_s']
        result[f'{label}, ratio to transformers'] = ratio
        print(f'{label}: {ratio:.2f} x the tokens/s of transformers.')

    lines = []
    for rows in (1, 8, 32):
        times = ours(30, rows)
        rate, first = rows / statistics.median(times[3:]), times[0]
        result[f'batch {rows}'] = dict(tokens_per_s=rate, prefill_tokens_per_s=rows * 64 / first)
        lines.append((rows, f'{rate:,.1f}', f'{1e3 * rows / rate:.1f}', f'{rows * 64 / first:,.0f}'))
    table('batches, eager, one run each', ('rows', 'tokens/s', 'ms a step', 'prefill tokens/s'), lines)

    curves, lines = {}, []
    runs = {'cache, eager': partial(ours, 500), 'paged cache': partial(ours, 500, kind=PagedKVCache)}
    if step:
        runs['cache, compiled'] = partial(ours, 500, step=step)
        runs['cache, compiled']()  # another max_len is another shape, to be compiled again
    for label, run in runs.items():
        times = [1e3 * t for t in run()]
        smooth = [statistics.median(times[max(1, i - 8):i + 9]) for i in range(1, 500)]
        curves[label] = list(range(65, 564)), smooth
        early, late = statistics.median(times[1:50]), statistics.median(times[450:500])
        result[label] = dict(ms_1_50=early, ms_450_500=late, late_over_early=late / early)
        lines.append((label, f'{early:.1f}', f'{late:.1f}', f'{late / early:.2f}'))
    positions, seconds = (64, 128, 256, 512), []
    for T in positions:
        ids = torch.randint(cfg.vocab_size, (1, T), device=machine.device)
        seconds.append(measure([lambda ids=ids: model(ids)], machine.device, 3, 1)[0][0])
    curves['no cache'] = positions, [1e3 * s for s in seconds]
    first, last = 1e3 * seconds[0], 1e3 * seconds[-1]
    lines.append(('no cache, at 64 and 512', f'{first:.1f}', f'{last:.1f}', f'{last / first:.2f}'))
    table('ms a token, one run each', ('', 'tokens 1-50', 'tokens 450-500', 'ratio'), lines)
    picture(options, 'decode', curves, 'position', 'ms a token', yscale='log')
    return result


def their_decoding(machine, cfg, prompt, n):
    """transformers' generate for a Llama of the same shape; seconds of each token."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.d_ff, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.block_size,
        tie_word_embeddings=cfg.tie, eos_token_id=None, bos_token_id=None)).to(machine.device, machine.dtype).eval()
    settings = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)

    class Clock(BaseStreamer):
        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    def run():
        clock = Clock()
        clock.times = [time.perf_counter()]
        ids = prompt.to(machine.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=clock)
        return [b - a for a, b in zip(clock.times, clock.times[1:])][1:]  # the first put is the prompt itself
    return run


# ---------------------------------------------------------------------------------------------------------------------
# attention and memory


def explicit_attention(q, k, v, mask, causal, scale=None):
    """What flash attention never builds: the (B, H, T, S) scores. Same call as model.attend."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


@contextmanager
def explicitly():
    """The model with explicit attention, inside."""
    real, model_file.attend = model_file.attend, explicit_attention
    try:
        yield
    finally:
        model_file.attend = real


def attentions(options, words):
    """Explicit scores against SDPA over T, forward and backward: time, and memory, which is O(T^2) against O(T)."""
    machine = Machine(options)
    machine.show()
    result, lines, curves = dict(mode='attention', heads=8, head_dim=64, **machine.method()), [], {}
    lengths = (128, 256, 512, 1024, 2048) + ((4096, 8192) if machine.device.type == 'cuda' else ())
    for T in lengths:
        where = dict(device=machine.device, dtype=machine.dtype, requires_grad=True)
        q, k, v = (torch.randn(1, 8, T, 64, **where) for _ in range(3))
        both, peaks = [], []
        for attend in (explicit_attention, model_file.attend):
            def run(attend=attend):
                attend(q, k, v, None, True).sum().backward()
            both.append(run)
            with Peak() as peak:
                run()
            peaks.append(peak.most)
        (slow, _), (fast, _) = measure(both, machine.device, options.repeats)
        result[f'T {T}'] = dict(explicit_ms=1e3 * slow, sdpa_ms=1e3 * fast, explicit_bytes=peaks[0],
                                sdpa_bytes=peaks[1])
        lines.append((T, f'{1e3 * slow:.2f}', f'{1e3 * fast:.2f}', f'{slow / fast:.1f}', human(peaks[0], 'B'),
                      human(peaks[1], 'B'), f'{peaks[0] / peaks[1]:.1f}'))
    table('attention, forward and backward, 8 heads of 64, causal',
          ('T', 'explicit ms', 'SDPA ms', 'ratio', 'explicit at once', 'SDPA at once', 'ratio'), lines)
    for key, label in (('explicit_bytes', 'explicit'), ('sdpa_bytes', 'SDPA')):
        curves[label] = lengths, [result[f'T {T}'][key] / 1e6 for T in lengths]
    picture(options, 'attention', curves, 'T', 'MB at once', xscale='log', yscale='log')
    return result


def memories(options, words):
    """What training holds: activations of a block against the formula, whole against chunked logits, recomputation."""
    machine = Machine(options)
    machine.show()
    size = 4 if machine.dtype == torch.float32 else 2
    rows, T = 4, 256
    cfg = prepare.build(Config, {**FAMILIES['gpt2'], 'n_head': 8, 'n_embd': 256, 'block_size': T, 'n_layer': 4})
    block = Block(cfg, 0, lambda x, pos: x).to(machine.device, machine.dtype)
    x = torch.randn(rows, T, cfg.n_embd, device=machine.device, dtype=machine.dtype, requires_grad=True)
    pos = torch.arange(T, device=machine.device)[None]
    result, lines = dict(mode='memory', rows=rows, T=T, n_embd=cfg.n_embd, n_head=cfg.n_head, **machine.method()), []
    for label, attention, explicit in (('flash', nullcontext, False), ('explicit scores', explicitly, True)):
        with attention(), saved_for_backward(block.parameters()) as kept:
            block(x, pos, None, None)
        got, formula = sum(kept.values()), activation_bytes(cfg, rows, T, explicit, bytes_per_value=size)
        result[label] = dict(bytes=got, formula=formula, ratio=got / formula)
        lines.append((label, human(got, 'B'), human(formula, 'B'), f'{got / formula:.2f}'))
    table(f'saved for backward by a GPT block, {rows} x {T} x {cfg.n_embd}, {cfg.n_head} heads',
          ('', 'measured', 'formula', 'ratio'), lines)

    lines, found = [], {}
    small = Config(n_layer=1, n_head=4, n_embd=256, vocab_size=50304, block_size=1024)
    model = Transformer(small).to(machine.device)
    hidden = torch.randn(8, 1024, 256, device=machine.device, requires_grad=True)
    targets = torch.randint(50304, (8, 1024), device=machine.device)
    for label, at_once in (('whole logits', 2 ** 62), ('chunks', Transformer.logits_at_once)):
        model.logits_at_once = at_once
        with Peak() as peak:
            model.loss(hidden, targets).backward()
        found[label] = peak.most
        model.zero_grad()
        lines.append((label, human(peak.most, 'B'), f'{peak.most / found["whole logits"]:.0%}'))
    result.update(loss_whole_bytes=found['whole logits'], loss_chunked_bytes=found['chunks'],
                  loss_ratio=found['chunks'] / found['whole logits'])
    table('the loss of 8 x 1024 tokens, V 50304, forward and backward, at once', ('', 'bytes', ''), lines)

    lines = []
    for label, again in (('all blocks kept', False), ('blocks recomputed', True)):
        deep = Transformer(prepare.build(Config, {**asdict(cfg), 'n_layer': 8})).to(machine.device).train()
        called, _ = train.place(deep, train.Settings(compile=False, checkpoint_activations=again), machine.device,
                                torch.float32)
        ids = torch.randint(256, (rows, T), device=machine.device)
        with saved_for_backward(deep.parameters()) as kept:
            called(ids, ids)
        result[label] = sum(kept.values())
        lines.append((label, human(result[label], 'B')))
    table('saved for backward by 8 blocks and the head', ('', 'bytes'), lines)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# ladder, and this machine at a glance


def ladder(options, words):
    """The same small model, from the block of 2017 to today's, a part at a time: what each costs and what it learns."""
    machine = Machine(options)
    machine.show()
    steps, rows, T = 300, 12, 64
    gpt, latent = FAMILIES['gpt2'], {k: v for k, v in FAMILIES['deepseek'].items() if k in (
        'head_dim', 'rope_dim', 'v_dim', 'kv_rank')}
    rungs = [('2017: post-norm, GELU, learned positions', {**gpt, 'wiring': 'post', 'tie': False}, True),
             ('pre-norm', {**gpt, 'tie': False}, True),
             ('RMSNorm, no biases', {'pos': 'learned', 'mlp': 'gelu'}, True),
             ('RoPE', {'mlp': 'gelu'}, True), ('SwiGLU', {}, True), ('GQA, 2 of 4 heads', {'n_kv_head': 2}, True),
             ('flash attention', {'n_kv_head': 2}, False),
             ('+ 8 experts, 2 a token', {'n_kv_head': 2, 'n_expert': 8, 'd_expert': 192}, False),
             ('or latent attention', latent, False)]
    name, data, val, meta = train.find_data(train.Settings())
    result, lines = dict(mode='ladder', data=name, steps=steps, **machine.method()), []
    settings = train.Settings(optimizer='adamw', lr=3e-3, steps=steps, batch_tokens=rows * T, compile=False)
    for label, changes, math_path in rungs:
        cfg = prepare.build(Config, {'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': T,
                                     'vocab_size': meta['vocab_size'], **changes})
        torch.manual_seed(1)
        model = Transformer(cfg).to(machine.device)
        called, cast = train.place(model, settings, machine.device, machine.dtype)
        optimizers, times = train.make_optimizers(model, settings), []
        with sdpa_kernel(SDPBackend.MATH) if math_path else nullcontext():
            for step in range(steps):
                for group in train.groups_of(optimizers):
                    group['lr'] = group['peak_lr'] * train.lr_factor(settings, step)
                batch = train.micro_batches_of(step, data, cfg, settings, machine.device)
                start = time.perf_counter()
                train.train_step(called.train(), optimizers, batch, cast)
                times.append(time.perf_counter() - start)
            loss = train.evaluate(called, val, T, machine.device, cast, 2 ** 16)
        total, flops = sum(p.numel() for p in model.parameters()), 3 * flops_per_token(cfg, T)
        rate = rows * T / statistics.median(times[10:])
        held = cache_bytes_per_token(cfg)
        result[label] = dict(params=total, training_flops_per_token=flops, cache_bytes_per_token=held,
                             tokens_per_s=rate, val_loss=loss)
        lines.append((label, f'{total:,}', human(flops, 'FLOP'), held, f'{rate:,.0f}', f'{loss:.3f}'))
    table(f'{steps} steps of {rows} x {T} tokens of {name}, AdamW, one seed; attention on the math path until flash',
          ('', 'parameters', 'FLOPs a token', 'cache B a token', 'tokens/s', 'loss'), lines)
    return result


def glance(options, words):
    """This machine in under a minute: its own limits, then training, prefill and decode of a size that fits."""
    machine = Machine(options)
    machine.show()
    name, cfg, rows = shape_for(machine)
    run = our_training(machine, cfg, rows, machine.compiles)
    (seconds, spread), = measure([run], machine.device, 3 * options.repeats, 3)
    flops, tokens = 3 * flops_per_token(cfg, cfg.block_size), rows * cfg.block_size
    result = dict(mode='glance', shape=name, **machine.method())
    result['train'] = dict(tokens_per_s=tokens / seconds, spread=spread, mfu=machine.mfu(tokens / seconds * flops))
    lines = [(f'training, {name}' + ' compiled' * machine.compiles, f'{tokens / seconds:,.0f}', f'{spread:.0%}',
              percent(result['train']['mfu']) + ' MFU')]
    label, cfg = decode_shape(machine)
    model = Transformer(cfg).to(machine.device, machine.dtype).eval()
    read = matmul_params(cfg) * model.embed.weight.element_size()
    times = token_times(machine, generate(model, torch.randint(256, (1, 64)), 30, temperature=0))
    with torch.no_grad():
        ids = torch.randint(256, (1, 94), device=machine.device)
        (uncached, _), = measure([lambda: model(ids)], machine.device, 3, 1)
        rows = [torch.randint(256, (256,)).tolist()]
        cache = KVCache(cfg, 1, 256, machine.device, machine.dtype)
        (reading, spread), = measure([lambda: (cache.truncate(0), prefill(model, rows, cache))], machine.device, 3, 1)
    decode = statistics.median(times[3:])
    result['prefill'] = dict(tokens_per_s=256 / reading, mfu=machine.mfu(prefill_flops(cfg, 256) / reading))
    result['decode'] = dict(tokens_per_s=1 / decode, mbu=read / decode / machine.peak_gbs / 1e9)
    result['decode_without_cache'] = dict(tokens_per_s=1 / uncached)
    lines += [(f'prefill of 256 tokens, {label}', f'{256 / reading:,.0f}', f'{spread:.0%}', ''),
              (f'decode with the cache, {label}, eager', f'{1 / decode:,.1f}', '',
               percent(result['decode']['mbu']) + ' of the bandwidth'),
              ('decode without the cache, at token 94', f'{1 / uncached:,.1f}', '', '')]
    table('at a glance', ('', 'tokens/s', 'spread', ''), lines)
    return result


MODES = {'plan': plan, 'train': training_modes, 'prefill': prefills, 'decode': decodes, 'attention': attentions,
         'memory': memories, 'ladder': ladder}


def main(argv):
    values = prepare.command_line(argv, __doc__, Options, words=2)
    words = values.pop('words', None) or []
    options = prepare.build(Options, values)
    if words and words[0] not in MODES:
        raise Refusal(f'Unknown mode {words[0]}{prepare.nearest(words[0], MODES)}', 2)
    earlier = read_result(options.compare) if options.compare else None
    result = MODES[words[0]](options, words[1:]) if words else glance(options, words)
    if earlier:
        compare(result, earlier)
    print(json.dumps(result))


if __name__ == '__main__':
    prepare.run(main)
