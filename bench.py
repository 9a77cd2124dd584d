"""Honest numbers: what a Transformer costs, computed, and what this machine makes of it, measured, side by side.

    python bench.py                          this machine at a glance
    python bench.py plan llama3-8b --hardware=H100 --gpus=8 --dollars_per_hour=2
    python bench.py train                    tokens/s and MFU, beside transformers' Llama of the same shape
    python bench.py prefill                  reading a prompt: tokens/s and MFU against its length
    python bench.py decode                   writing: tokens/s, share of the bandwidth, time a token against position
    python bench.py attention                explicit scores against SDPA: O(T^2) against O(T)
    python bench.py memory                   what training keeps for the backward pass
    python bench.py ladder                   one small model from GPT-1's block to today's, part by part

Tables for people, then one line of JSON with the same figures; curves go to a PNG. All but plan measure one device. It
is waited for, first runs are dropped, and a figure is the median of several repeats with their spread (half the range
over the median); what is one run alone says so in its title. Compilation and evaluation are never inside.
MFU is FLOPs a second over the peak, with all T x T scores counted (PaLM, arXiv:2204.02311); MBU the bytes of the
weights read a second over the bandwidth. --compare=FILE sets an earlier JSON beside it: hack, measure, compare.
"""
import json
import math
import os
import platform
import statistics
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
import prepare
import train
from model import FAMILIES, Config, KVCache, Transformer, cache_bytes_per_token, flops_per_token, matmul_params
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
        self.out = self.out or os.path.join(prepare.ROOT, 'out', 'bench')


# ---------------------------------------------------------------------------------------------------------------------
# Measuring and showing


def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def middle(seconds):
    """The median, and half the range over it."""
    median = statistics.median(seconds)
    return median, (max(seconds) - min(seconds)) / 2 / median


def measure(functions, device, repeats=5, warmup=2):
    """Seconds of each function, [(median, spread)]: `repeats` rounds in which all take their turn, so that a noisy
    machine disturbs them alike."""
    times = [[] for _ in functions]
    for _ in range(warmup + repeats):
        for function, seconds in zip(functions, times):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    return [middle(seconds[warmup:]) for seconds in times]


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside the context, while they live: .most at once. What a
    kernel uses inside is not seen, on no device, so a fused one looks a little better than it is."""

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


def percent(share):
    if share is None:
        return 'n/a'
    return f'{share:.0%}' if share <= 1 else f'{share:.0%} (!)'  # nothing can pass its peak


def human(n, unit=''):
    """123456789 as 123.5 M, in powers of 1000 for bytes too."""
    for size, prefix in ((1e12, 'T'), (1e9, 'G' if unit else 'B'), (1e6, 'M'), (1e3, 'k')):
        if abs(n) >= size:
            return f'{n / size:,.1f} {prefix}{unit}'
    return f'{n:,.0f} {unit}'.rstrip()


def shown(name, value):
    """A figure as people read it; its name says its unit."""
    if isinstance(value, str):
        return value
    if 'flops' in name or 'bytes' in name:
        return human(value, 'B' if 'bytes' in name else 'FLOP')
    if name.startswith('decode_floor'):
        return f'{1e3 * value:.2f} ms'
    if name in ('mfu', 'mbu', 'spread'):
        return percent(value)
    if name in ('loss', 'ratio', 'share'):
        return f'{value:.3f}'
    return f'{value:,.0f}' if isinstance(value, int) or value >= 1000 else f'{value:.3g}'


def report(result, title, rows):
    """Shows rows, {label: {figure: value}}, as a table with a column a figure, and adds them to the result."""
    result.update(rows)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [['', *(name.replace('_per_', '/').replace('_', ' ') for name in names)]]
    for label, row in rows.items():
        cells.append([label, *(shown(name, row[name]) if name in row else '' for name in names)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f'\n{title}')
    for label, *rest in cells[not any(names):]:
        print('  ' + '  '.join([label.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip())


def ratios(result, pairs):
    """How the first of each pair of rows does against the second."""
    for ours, theirs in pairs:
        if ours in result and theirs in result:
            ratio = result[ours]['tokens_per_s'] / result[theirs]['tokens_per_s']
            result[f'{ours} / {theirs}'] = ratio
            print(f'{ours}: {ratio:.2f} x the tokens/s of {theirs}.')


class Machine:
    """This device, its published peaks and what it was measured to reach."""

    def __init__(self, options):
        self.device, self.dtype = prepare.pick_device(options.device, options.dtype)
        self.options, self.name = options, prepare.device_name(self.device)
        tf32 = self.device.type == 'cuda' and self.dtype == torch.float32  # as train.py has it; no peak in the table
        torch.set_float32_matmul_precision('high' if tf32 else 'highest')
        self.n = 1024 if self.device.type == 'cpu' else 8192
        self.product = partial(torch.mm, *torch.randn(2, self.n, self.n, device=self.device, dtype=self.dtype))
        big = torch.ones(2 ** 28, device=self.device)
        (seconds, _), = measure([big.sum], self.device, 5)
        self.read_gbs = big.nbytes / seconds / 1e9
        self.published = options.peak_tflops or (None if tf32 else prepare.peak_tflops(self.device, self.dtype))
        self.reached(measure([self.product], self.device, 9)[0])
        self.peak_gbs = options.peak_gbs or (prepare.peak(self.name) or {}).get('gbs') or self.read_gbs
        self.compiles = options.compile and not prepare.no_compiler(self.device)
        peak = f'{self.peak_tflops:.3g} TFLOP/s' if self.peak_tflops else 'unknown (give --peak_tflops)'
        print(f'{self.name}, {str(self.dtype)[6:]}, torch {torch.__version__}: a matrix product reaches '
              f'{self.matmul_tflops:.3g} TFLOP/s, a read of memory {self.read_gbs:.3g} GB/s.\n100 % MFU is {peak}, '
              f'100 % MBU {self.peak_gbs:.3g} GB/s: as given, or the vendor\'s, or else what was measured.')

    def reached(self, timing):
        """Takes note of how long the matrix product took: on a CPU that is the peak which MFU is held against."""
        self.matmul_tflops = 2 * self.n ** 3 / timing[0] / 1e12
        self.peak_tflops = self.published or (self.matmul_tflops if self.name == 'cpu' else None)

    def rate(self, tokens, flops, timing):
        """The figures of a work of so many tokens and FLOPs that takes (seconds, spread)."""
        seconds, spread = timing
        return dict(tokens_per_s=tokens / seconds, ms=1e3 * seconds, spread=spread, flops_per_s=flops / seconds,
                    mfu=flops / seconds / self.peak_tflops / 1e12 if self.peak_tflops else None)

    def method(self):
        threads = torch.get_num_threads() if self.device.type == 'cpu' else None
        return dict(device=self.name, dtype=str(self.dtype)[6:], torch=torch.__version__,
                    python=platform.python_version(), threads=threads, matmul_tflops=self.matmul_tflops,
                    read_gbs=self.read_gbs, peak_tflops=self.peak_tflops, peak_gbs=self.peak_gbs)


def read_result(path):
    """The JSON line that an earlier run has ended with."""
    try:
        return json.loads(prepare.read_text(path).strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Refusal(f'{path} does not end in a line of JSON; save one with: python bench.py > {path}', 2) from None


def compare(result, earlier):
    """Ratios of this result's numbers to an earlier one's."""
    def flat(figures):
        inner = {f'{k}.{i}': v for k, sub in figures.items() if isinstance(sub, dict) for i, v in sub.items()}
        return {k: v for k, v in {**figures, **inner}.items() if type(v) in (int, float)}
    for name in ('mode', 'model', 'shape', 'device', 'dtype'):
        if result.get(name) != earlier.get(name):
            print(f'The earlier run has {name} {earlier.get(name)}, so its figures say little about these.')
    then, now = flat(earlier), flat(result)
    report({}, 'against the earlier run', {name: dict(then=then[name], now=now[name], ratio=now[name] / then[name])
                                           for name in now if then.get(name)})


# ---------------------------------------------------------------------------------------------------------------------
# plan: what a model costs, from its config alone


def find_config(word):
    """The Config of a published model's or a run's name, a config.json of Hugging Face, or a checkpoint."""
    known = {**train.RUNS, **{name: prepare.published(name) for name in prepare.PUBLISHED}}
    if word in known:
        return prepare.build(Config, known[word])
    if word.endswith('.json'):
        return prepare.build(Config, prepare.from_hugging_face(prepare.read_json(word)))
    if os.path.exists(word):
        return prepare.build(Config, prepare.load_checkpoint(word)['config'])
    raise Refusal(f'Unknown model {word}{prepare.nearest(word, known)}', 2)


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
    """What one block keeps for the backward pass: what goes into and out of its norms, queries, keys and values (rotary
    positions keep the turned ones too), attention's output, the MLP's inside. For the GPT block and 16 bits it is
    s b h (32 + 2 a s / h), with dropout 34 + 5 a s / h (Korthikanti, arXiv:2205.05198, eq. 1); the second term is the
    scores', and gone under flash. Our dropout sits on the residual stream alone: 2 bytes of masks, no more scores."""
    H, K, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    width = cfg.d_expert * (cfg.n_active + cfg.n_shared) if cfg.n_expert else cfg.d_ff
    inside = (H + 2 * K) * D + (H + K) * D * (cfg.pos == 'rope') + H * cfg.v_dim + explicit * H * T
    values = 4 * cfg.n_embd + inside + (4 if cfg.mlp == 'swiglu' else 2) * width
    return rows * T * (values * bytes_per_value + 2 * cfg.n_embd * dropout)


def plan(options, words):
    """Everything that follows from the config alone."""
    name = words[0] if words else 'gpt2'
    cfg, B, n, card = find_config(name), options.batch, options.gpus, prepare.peak(options.hardware)
    if not card:
        raise Refusal(f'Unknown hardware {options.hardware}{prepare.nearest(options.hardware, prepare.PEAKS)}', 2)
    tflops = card['bf16'] or card['fp16'] or card['fp32']
    if not tflops:
        raise Refusal(f'The vendor of {options.hardware} gives no TFLOP/s, so there is nothing to plan with.')
    T, L, C = options.context or cfg.block_size, cfg.n_layer, cfg.n_embd
    parts, total, active = count_parameters(cfg)
    N, forward, kv = matmul_params(cfg), flops_per_token(cfg, T), cache_bytes_per_token(cfg)
    attention, d = forward - 2 * N, cfg.n_head * (cfg.head_dim + cfg.v_dim) / 2     # d of 4 L T d
    capacity, rate, bandwidth = card['gb'] * 1e9 * n, tflops * 1e12 * n, card['gbs'] * 1e9 * n
    # a step of B rows reads each expert that any row visits: all of them soon
    missed = (1 - cfg.n_active / cfg.n_expert) ** B if cfg.n_expert else 0
    read = 2 * (total - parts.get('experts', 0) * missed)
    step, room = max((read + B * T * kv) / bandwidth, B * forward / rate), max(0, capacity - 2 * total)
    tokens, price = options.tokens or 20 * active, options.dollars_per_hour
    hours = 3 * forward * tokens / (rate * options.mfu) / 3600
    saved, explicit = (L * activation_bytes(cfg, 1, T, explicit=e) for e in (False, True))
    result = dict(mode='plan', model=name, context=T, params=total, active_params=active, params_by_part=parts,
                  matmul_params=N)
    report({}, f'{name}: {total:,} parameters' + f', {active:,} of them for one token' * (active < total),
           {part: dict(parameters=p, share=p / total) for part, p in parts.items()})

    def section(title, *lines):  # (name in the result, value, words)
        result.update({key: value for key, value, _ in lines})
        report({}, title, {words: {'': shown(key, value)} for key, value, words in lines})

    section(f'FLOPs a token, T = {T:,}',
            ('matmul_flops_per_token', 2 * N, f'matrices, 2N: N = {N:,} has the head, not the embedding (looked up)'),
            ('attention_flops_per_token', attention, 'attention, 2 L T H (D_qk + D_v): the whole T x T, no window'),
            ('forward_flops_per_token', forward, 'forward'),
            ('causal_forward_flops_per_token', 2 * N + attention / 2, 'forward, with the causal half of attention'),
            ('training_flops_per_token', 3 * forward, 'training, 3 x forward'),
            ('attention_overtakes_at', N / (2 * L * d), 'attention overtakes the matrices at T'),
            ('attention_overtakes_blocks_at', (N - C * cfg.vocab_rows) / (2 * L * d),
             "attention overtakes the blocks' matrices at T"),
            ('six_d', 6 * d, 'which for a block of 12 d^2 weights is 6 d'))
    section('Memory',
            ('weight_bytes_bf16', 2 * total, 'weights, bf16'), ('weight_bytes_fp32', 4 * total, 'weights, fp32'),
            ('training_state_bytes', 16 * total, 'weights, gradients and Adam in training, 16 bytes a parameter'),
            ('training_state_bytes_per_gpu', 16 * total / n, f'of which a GPU holds under FSDP over {n}'),
            ('activation_bytes_flash', saved, f'activations of a row of {T:,} in 16 bits, flash attention'),
            ('activation_bytes_explicit', explicit, 'the same with explicit scores'),
            ('activation_bytes_recomputed', 2 * T * C * L + saved / L, 'the same with flash, blocks recomputed'),
            ('logit_bytes_fp32', 4 * T * cfg.vocab_size,
             f'whole logits of a row in fp32 (chunks here: {human(4 * Transformer.logits_at_once, "B")})'),
            ('kv_bytes_per_token', kv, f'cache, {"L (rank + rope)" if cfg.kv_rank else "2 L K D"} values of 2 bytes'),
            ('kv_bytes_per_sequence', kv * T, f'cache of {T:,} tokens, as held here'),
            ('kv_bytes_window_bound', kv * min(T, cfg.window or T), f'cache rolling over window {cfg.window or T:,}'))
    limits = f'{human(rate, "FLOP/s")}, {human(bandwidth, "B/s")}, {human(capacity, "B")}'
    short = f'; too few: the weights alone need {math.ceil(2 * total / card["gb"] / 1e9)}' * (not room)
    section(f'{n} x {options.hardware}, nothing lost between them: {limits}{short}',
            ('decode_floor_s', 2 * active / bandwidth, 'a decoded token, weight bytes over bandwidth'),
            ('decode_floor_with_cache_s', step, f'a step of {B} rows with {T:,} tokens in the cache'),
            ('tokens_per_s_at_most', B / step, 'tokens/s of that'),
            ('largest_batch', int(room // (kv * T)), f'largest batch at T = {T:,}'),
            ('largest_context', int(room // (kv * B)), f'tokens of cache a row, at batch {B}'),
            ('training_tokens', tokens, 'tokens to train on' + ', 20 an active parameter' * (not options.tokens)),
            ('training_hours', hours, f'hours at {options.mfu:.0%} MFU'),
            ('training_gpu_hours', hours * n, 'GPU hours'),
            *[('training_dollars', hours * n * price, f'dollars at {price:g} an hour')] * bool(price))
    odd = [f'{size} {getattr(cfg, size)}' for size in ('n_embd', 'd_ff', 'head_dim', 'vocab_rows')
           if getattr(cfg, size) % 64]
    if odd:
        print(f'\nNo multiples of 64, which tensor cores like: {", ".join(odd)}.')
    return {**result, 'odd_sizes': odd}


# ---------------------------------------------------------------------------------------------------------------------
# train and prefill


def training_shape(machine):
    """What train and the glance measure: the run that this device's preset would train; its name and rows too."""
    name, rows = ('baby', 12) if machine.device.type == 'cpu' else ('owt-124m', 30)
    return name, prepare.build(Config, {'vocab_size': 256, **train.RUNS[name]}), rows


def our_training(machine, rows, cfg, compiled, optimizer='adamw', whole=False):
    """A function that makes one training step on the same random batch; compiled block by block, or the whole model."""
    settings = train.Settings(optimizer=optimizer, compile=compiled and not whole,
                              muon_steps=3 if cfg.n_embd < 512 else 5)
    torch.manual_seed(0)
    model = Transformer(cfg).train()
    if whole:
        model.compile()
    called, cast = train.place(model, settings, machine.device, machine.dtype)
    optimizers = train.make_optimizers(model, settings)
    scaler = torch.amp.GradScaler(machine.device.type) if machine.dtype == torch.float16 else None
    x = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)
    return lambda: train.train_step(called, optimizers, [(x, x)], cast, scaler)


def llama(cfg, **more):
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_rows, hidden_size=cfg.n_embd, intermediate_size=cfg.d_ff, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.block_size,
        tie_word_embeddings=cfg.tie, **more))


def their_training(machine, cfg, rows):
    """The same for transformers' Llama, with the same optimizer, clipping and compiler."""
    model = llama(cfg, use_cache=False).to(machine.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    cast = nullcontext() if machine.dtype == torch.float32 else torch.autocast(machine.device.type, machine.dtype)
    if machine.compiles:
        model.compile()
    x = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)

    def step():
        with cast:
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


def training(machine, result, brief=False):
    """Tokens/s beside the plan's FLOPs: eager, compiled, with Muon, and transformers' Llama, all in turns."""
    name, cfg, rows = training_shape(machine)
    cfg, T = replace(cfg, qk_norm=False), cfg.block_size  # as Llama has it
    ours, theirs = (f'{whose}, {"compiled" if machine.compiles else "eager"}' for whose in ('ours', 'transformers'))
    variants = {ours: (cfg, machine.compiles), f'{ours}, Muon': (cfg, machine.compiles, 'muon')}
    if not brief and machine.compiles:  # as transformers is: train.py doesn't, it takes longer than it saves
        variants[f'{ours} as a whole'] = (cfg, True, 'adamw', True)
    if not brief:  # PaLM's wiring is 15 % faster where it fuses what we do not; experts are of the same active width
        variants |= {'ours, eager': (cfg, False), 'parallel, eager': (replace(cfg, wiring='parallel'), False),
                     '8 experts, 2 a token, eager': (replace(cfg, n_expert=8, d_expert=cfg.d_ff // 2), False)}
    runs = {label: our_training(machine, rows, *how) for label, how in variants.items()}
    if not brief and has_transformers():
        runs[theirs] = their_training(machine, cfg, rows)
    product, *times = measure([machine.product, *runs.values()], machine.device, 4 * machine.options.repeats, warmup=3)
    machine.reached(product)  # in turns with what is held against it
    tokens, flops = rows * T, 3 * flops_per_token(cfg, T)  # the router's and a norm's are too few to show
    result.update(machine.method(), training_shape=name, rows=rows, T=T, training_flops_per_token=flops)
    report(result, f'training, {name}, {rows} x {T} tokens of {human(flops, "FLOP")}, AdamW unless said; the matrix '
           f'product, in turns with them, {machine.matmul_tflops:.3g} TFLOP/s',
           {label: machine.rate(tokens, tokens * flops, timing) for label, timing in zip(runs, times)})
    ratios(result, [('parallel, eager', 'ours, eager'), ('8 experts, 2 a token, eager', 'ours, eager'),
                    (ours, theirs), (f'{ours} as a whole', theirs)])


@torch.no_grad()
def reading(machine, model, T):
    """The figures of one prompt of T tokens; the head reads the last one alone."""
    head = 2 * model.cfg.n_embd * model.cfg.vocab_rows
    ids = [torch.randint(model.cfg.vocab_size, (T,)).tolist()]
    cache = KVCache(model.cfg, 1, T, machine.device, machine.dtype)
    timing, = measure([lambda: (cache.truncate(0), model_file.prefill(model, ids, cache))], machine.device,
                      machine.options.repeats)
    return machine.rate(T, T * (flops_per_token(model.cfg, T) - head) + head, timing)


def prefills(machine, result, lengths=(64, 128, 256, 512, 1024)):
    """Reading a prompt: tokens/s and share of the peak against its length."""
    result['shape'], model = inference_model(machine)
    report(result, f'prefill, {result["shape"]}, one row',
           {f'prefill of {T}': reading(machine, model, T) for T in lengths})


# ---------------------------------------------------------------------------------------------------------------------
# decode


def inference_model(machine):
    """What prefill, decode and the glance measure: a Llama of 114 M parameters, of 7 B on a GPU that can hold it."""
    name, cfg = 'Llama of 114 M', Config(n_layer=12, n_embd=768, n_head=12, n_kv_head=4, d_ff=2048, vocab_size=50304,
                                         tie=True)
    if machine.device.type == 'cuda' and torch.cuda.get_device_properties(machine.device).total_memory > 44e9:
        name, cfg = 'llama2-7b', prepare.build(Config, prepare.published('llama2-7b'))
    torch.manual_seed(0)
    with machine.device:  # made where it stays: a CPU takes minutes to draw 7 B random numbers
        return name, Transformer(cfg).to(machine.dtype).eval()


@torch.no_grad()
def decoding(machine, model, n, rows=1, kind=KVCache, step=None):
    """Seconds of each of n tokens after a prompt of 64, the first, which is the prefill, included."""
    more = dict(static=True) if step else {}
    cache = kind(model.cfg, rows, 64 + n, device=machine.device, dtype=machine.dtype, **more)
    prompt, marks = torch.randint(model.cfg.vocab_size, (rows, 64)), [time.perf_counter()]
    for _ in model_file.generate(model, prompt, n, temperature=0, cache=cache, step=step):
        synchronize(machine.device)
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks, marks[1:])]


def their_decoding(machine, cfg, n):
    """The same of transformers' generate, for a Llama of the same shape."""
    from transformers import GenerationConfig
    model = llama(cfg, eos_token_id=None, bos_token_id=None).to(machine.device, machine.dtype).eval()
    settings = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.randint(cfg.vocab_size, (1, 64), device=machine.device)

    def run():
        marks = []
        clock = SimpleNamespace(put=lambda ids: marks.append(time.perf_counter()), end=lambda: None)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=clock)
        return [b - a for a, b in zip(marks, marks[1:])]  # the first mark is the prompt's
    return run


@torch.no_grad()
def decodes(machine, result, brief=False):
    """Batch 1 reads every weight once a token: that is the limit, and MBU the share of the bandwidth in use."""
    name, model = inference_model(machine)
    read, median = matmul_params(model.cfg) * model.embed.weight.element_size(), statistics.median
    ours, step = partial(decoding, machine, model), prepare.decode_step(model) if machine.compiles else None
    n = 30 if brief else 100
    result.update(shape=name, prompt=64, new_tokens=n, weight_bytes=read)
    runs = {'decode, eager': partial(ours, n)}
    if step and not brief:
        runs['decode, compiled'] = partial(ours, n, step=step)
    if name != 'llama2-7b' and not brief and has_transformers():
        runs['transformers, eager'] = their_decoding(machine, model.cfg, n)
    rounds = [{label: run() for label, run in runs.items()} for _ in range(1 + max(3, machine.options.repeats // 2))]
    rows = {}
    for label in runs:
        seconds, spread = middle([sum(times[label][1:]) / (n - 1) for times in rounds[1:]])
        rows[label] = dict(tokens_per_s=1 / seconds, ms=1e3 * seconds, spread=spread, read_bytes_per_s=read / seconds,
                           mbu=read / seconds / machine.peak_gbs / 1e9,
                           first_token_ms=1e3 * median(times[label][0] for times in rounds[1:]))
    report(result, f'decode, {name}, one row, prompt 64, {n} tokens, greedy; a token reads {human(read, "B")}', rows)
    ratios(result, [('decode, eager', 'transformers, eager'), ('decode, compiled', 'transformers, eager')])
    if brief:
        return

    rows = {}
    for B in (1, 8, 32):
        ours(3, B)
        first, *times = ours(30, B)
        rows[f'batch {B}'] = dict(tokens_per_s=B / median(times), step_ms=1e3 * median(times),
                                  prefill_tokens_per_s=B * 64 / first)
    report(result, 'batches, eager, one run each', rows)

    rows, curves = {}, {}
    kinds = {'cache, eager': {}, 'paged cache, eager': dict(kind=model_file.PagedKVCache)}
    if step:
        kinds['whole cache read, compiled'] = dict(step=step)
    for label, how in kinds.items():
        times = [ours(500, **how) for _ in range(1 + ('step' in how))][-1][1:]  # another length is compiled again
        curves[label] = range(65, 564), [1e3 * median(times[max(0, i - 8):i + 9]) for i in range(499)]
        early, late = median(times[:50]), median(times[-50:])
        rows[label] = dict(ms_at_65_to_114=1e3 * early, ms_at_514_to_563=1e3 * late, ratio=late / early)
    lengths = (64, 128, 256, 512)
    texts = [torch.randint(model.cfg.vocab_size, (1, T), device=machine.device) for T in lengths]
    uncached = measure([partial(model, ids) for ids in texts], machine.device, 3, 1)
    curves['no cache'] = lengths, [1e3 * seconds for seconds, _ in uncached]
    report(result, 'a token early and late, one run each', rows)
    prepare.draw(os.path.join(machine.options.out, 'decode.png'), curves, xlabel='position', ylabel='ms a token',
               yscale='log')


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

explicitly = partial(patch.object, model_file, 'attend', explicit_attention)  # `with explicitly():` the model uses it


def most_bytes(function):
    with Peak() as peak:
        function()
    return peak.most


def attentions(machine, result):
    """Explicit scores against SDPA over T, forward and backward: time, and memory, which is O(T^2) against O(T)."""
    lengths, rows = (128, 256, 512, 1024, 2048) + ((4096, 8192) if machine.device.type == 'cuda' else ()), {}
    for T in lengths:
        q, k, v = (torch.randn(1, 8, T, 64, device=machine.device, dtype=machine.dtype, requires_grad=True)
                   for _ in range(3))
        runs = [lambda attend=attend: torch.autograd.grad(attend(q, k, v, None, True).sum(), (q, k, v))
                for attend in (explicit_attention, model_file.attend)]
        (slow, _), (fast, _) = measure(runs, machine.device, machine.options.repeats)
        most = [most_bytes(run) for run in runs]
        rows[f'T {T}'] = dict(explicit_ms=1e3 * slow, sdpa_ms=1e3 * fast, time_ratio=slow / fast,
                              explicit_bytes=most[0], sdpa_bytes=most[1], memory_ratio=most[0] / most[1])
    report(result, 'attention, forward and backward, 8 heads of 64, causal; the tensors that live at once', rows)
    curves = {name: (lengths, [row[f'{name}_bytes'] / 1e6 for row in rows.values()]) for name in ('explicit', 'sdpa')}
    prepare.draw(os.path.join(machine.options.out, 'attention.png'), curves, xlabel='T', ylabel='MB at once',
               xscale='log', yscale='log')


def memories(machine, result):
    """What training holds: activations of a block against the formula, whole against chunked logits, recomputation."""
    B, T, device = 4, 256, machine.device
    cfg = prepare.build(Config, {**FAMILIES['gpt2'], 'n_head': 8, 'n_embd': 256, 'block_size': T, 'n_layer': 8})
    block = model_file.Block(cfg, 0, lambda x, pos: x).to(device)
    x = torch.randn(B, T, 256, device=device, requires_grad=True)
    rows = {}
    for label, attention, explicit in (('flash', nullcontext, False), ('explicit scores', explicitly, True)):
        with attention(), saved_for_backward(block.parameters()) as kept:
            block(x, torch.arange(T, device=device)[None], None, None)
        got, formula = sum(kept.values()), activation_bytes(cfg, B, T, explicit, bytes_per_value=4)
        rows[label] = dict(kept_bytes=got, formula_bytes=formula, ratio=got / formula)
    report(result, f'kept for the backward pass by a GPT block in fp32, {B} x {T} x 256, 8 heads', rows)

    rows, ids = {}, torch.randint(256, (B, T), device=device)
    for label, again in (('all blocks kept', False), ('blocks recomputed', True)):
        model = Transformer(cfg).to(device).train()
        train.place(model, train.Settings(compile=False, checkpoint_activations=again), device, torch.float32)
        with saved_for_backward(model.parameters()) as kept:
            model(ids, ids)
        most = most_bytes(lambda: model(ids, ids)[1].backward())
        rows[label] = dict(kept_bytes=sum(kept.values()), bytes_at_once=most)
    report(result, 'the same by 8 such blocks and the head, and what lives at once, the gradients too', rows)

    model, rows = Transformer(Config(n_layer=1, n_head=4, n_embd=256, vocab_size=50304)).to(device), {}
    hidden, targets = torch.randn(8, 1024, 256, device=device), torch.randint(50304, (8, 1024), device=device)
    for label, model.logits_at_once in (('whole logits', 2 ** 62), ('chunks', Transformer.logits_at_once)):
        most = most_bytes(lambda: model.loss(hidden.requires_grad_(), targets).backward())
        rows[label] = dict(bytes_at_once=most, share=most / rows['whole logits']['bytes_at_once'] if rows else 1.0)
        model.zero_grad()
    report(result, 'the loss of 8 x 1024 tokens in fp32, V 50304, forward and backward', rows)


# ---------------------------------------------------------------------------------------------------------------------
# ladder, and this machine at a glance


def ladder(machine, result):
    """The same small model, from GPT-1's block to today's, a part at a time: what each costs and what it learns."""
    steps, B, T = 300, 12, 64
    gpt, gqa = FAMILIES['gpt2'], {'n_kv_head': 2}
    latent = {k: v for k, v in FAMILIES['deepseek'].items() if k in ('head_dim', 'rope_dim', 'v_dim', 'kv_rank')}
    rungs = {'post-norm, GELU, learned positions': {**gpt, 'wiring': 'post', 'tie': False},
             'pre-norm': {**gpt, 'tie': False}, 'RMSNorm, no biases': {'pos': 'learned', 'mlp': 'gelu'},
             'RoPE': {'mlp': 'gelu'}, 'SwiGLU': {}, 'GQA, 2 of 4 heads': gqa, 'flash attention': gqa,
             '+ 8 experts, 2 a token': {**gqa, 'n_expert': 8, 'd_expert': 192}, 'or latent attention': latent}
    name = prepare.find_data()
    data, val, meta = prepare.load_data(name)
    settings, rows = train.Settings(optimizer='adamw', steps=steps, batch_tokens=B * T, compile=False), {}
    for label, changes in rungs.items():
        cfg = prepare.build(Config, {'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': T,
                                     'vocab_size': meta['vocab_size'], **changes})
        torch.manual_seed(1)
        model, times = Transformer(cfg), []
        called, cast = train.place(model, settings, machine.device, machine.dtype)
        optimizers = train.make_optimizers(model.train(), settings)
        before_flash = list(rungs).index(label) < list(rungs).index('flash attention')
        with sdpa_kernel(SDPBackend.MATH) if before_flash else nullcontext():
            for step in range(steps):
                for group in train.groups_of(optimizers):
                    group['lr'] = group['peak_lr'] * train.lr_factor(settings, step)
                batch = train.micro_batches_of(step, data, cfg, settings, machine.device)
                start = time.perf_counter()
                train.train_step(called, optimizers, batch, cast)
                synchronize(machine.device)
                times.append(time.perf_counter() - start)
            loss = train.evaluate(called, val, T, machine.device, cast, 2 ** 16)
        rows[label] = dict(params=sum(p.numel() for p in model.parameters()),
                           training_flops_per_token=3 * flops_per_token(cfg, T),
                           cache_bytes_per_token=cache_bytes_per_token(cfg),
                           tokens_per_s=B * T / statistics.median(times[10:]), loss=loss)
    result['data'] = name
    report(result, f'{steps} steps of {B} x {T} tokens of {name}, AdamW, one seed, one run each; the cache in 16 bits; '
           'attention on the math path until flash', rows)


def glance(machine, result):
    """The first figures of train, prefill and decode."""
    training(machine, result, brief=True)
    prefills(machine, result, lengths=[256])
    decodes(machine, result, brief=True)


MODES = {'glance': glance, 'train': training, 'prefill': prefills, 'decode': decodes, 'attention': attentions,
         'memory': memories, 'ladder': ladder}


def main(argv):
    values = prepare.command_line(argv, __doc__, Options, words=2)
    mode, *words = values.pop('words') or ['glance']
    options = prepare.build(Options, values)
    if mode not in ('plan', *MODES):
        raise Refusal(f'Unknown mode {mode}{prepare.nearest(mode, ["plan", *MODES])}', 2)
    planned = [*words, *(f'--{name}' for name in values if name in list(vars(options))[:7])]
    if mode != 'plan' and planned:
        raise Refusal(f'{planned[0]} is for plan alone: the other modes measure shapes of their own.', 2)
    earlier = read_result(options.compare) if options.compare else None
    if mode == 'plan':
        result = plan(options, words)
    else:
        machine = Machine(options)
        result = dict(mode=mode, **machine.method())
        MODES[mode](machine, result)
    if earlier:
        compare(result, earlier)
    print(json.dumps(result))


if __name__ == '__main__':
    prepare.run(main)
