"""Honest numbers: what a Transformer costs, computed, and what this machine makes of it, measured.

    python bench.py                          this machine at a glance
    python bench.py plan llama3-8b --hardware=H100 --gpus=8 --dollars_per_hour=2
    python bench.py train                    tokens/s and MFU, beside transformers' Llama of the same shape
    python bench.py prefill                  reading a prompt: tokens/s and MFU against its length
    python bench.py decode                   writing: tokens/s, share of the bandwidth, time per token
    python bench.py attention                explicit scores against SDPA: O(T^2) against O(T)
    python bench.py memory                   what training keeps for the backward pass
    python bench.py ladder                   one small model from GPT-1's block to today's, part by part

Each prints tables, then one line of JSON with the same figures; curves go to a PNG. All but plan measure one
device: it is waited for, the first runs are dropped, and a figure is the median of several repeats with
their spread, half the range over the median. What is one run alone says so in its title. Compilation
and evaluation are never inside. MFU is FLOPs per second over the peak, with all T x T scores counted
(PaLM, arXiv:2204.02311); MBU is the bytes of the weights read per second over the bandwidth. --compare=FILE sets
the JSON of an earlier run of the same mode beside this one.
"""
import json
import math
import os
import platform
import statistics
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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
import sample
import train
from model import FAMILIES, Config, KVCache, Transformer, cache_bytes_per_token, flops_per_token, matmul_params
from prepare import Refusal


@dataclass
class Options:
    context: int = 0               # plan: tokens per sequence; 0: the model's block_size
    batch: int = 1                 # plan: sequences served at once
    hardware: str = 'H100'         # plan: a device of the table of cards
    gpus: int = 1                  # plan: how many of them
    dollars_per_hour: float = 0.0  # plan: price of one of them
    tokens: float = 0.0            # plan: to train on; 0: 20 per parameter (Chinchilla, arXiv:2203.15556)
    mfu: float = 0.4               # plan: the share of the peak that training reaches
    peak_tflops: float = 0.0       # of this device, where the table of cards lacks it
    peak_gbs: float = 0.0          # bandwidth of this device in GB/s, likewise
    repeats: int = 5               # measurements per median
    device: str = ''               # cuda, mps, cpu; '' takes the best there is
    dtype: str = ''                # bf16, fp16, fp32; '' takes the device's best
    compile: bool = True           # compile what is measured, where that can work
    out: str = ''                  # folder for pictures; '' takes out/bench
    compare: str = ''              # file that ends in the JSON line of an earlier run

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 1 if name in ('batch', 'gpus', 'repeats') else 0
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise ValueError(f'{name} is {value}, but must be at least {least}')
        if not 0 < self.mfu <= 1:
            raise ValueError(f'mfu is {self.mfu}, but must be above 0 and at most 1')
        self.out = self.out or os.path.join(prepare.ROOT, 'out', 'bench')


PLAN_ONLY = ('context', 'batch', 'hardware', 'gpus', 'dollars_per_hour', 'tokens', 'mfu')

# -------------------------------------------------------------------------------
# Tables


@dataclass
class Table:
    """What a mode returns, several of them. rows: {label: {figure: value}}, for the screen and
    the JSON."""
    title: str
    rows: dict
    notes: list = field(default_factory=list)   # sentences below the table
    facts: dict = field(default_factory=dict)   # for the JSON alone
    rows_in_json: bool = True

    def print(self):
        # one column per figure; a table of one nameless column has no head
        names = []
        for row in self.rows.values():
            names += [name for name in row if name not in names]
        lines = []
        if any(names):
            lines.append(['', *(name.replace('_per_', '/').replace('_', ' ') for name in names)])
        for label, row in self.rows.items():
            line = [label]
            for name in names:
                line.append(shown(name, row[name]) if name in row else '')
            lines.append(line)
        # the labels to the left, the figures to the right
        print(f'\n{self.title}')
        widths = [max(map(len, column)) for column in zip(*lines)]
        for label, *cells in lines:
            cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
            print('  ' + '  '.join([label.ljust(widths[0]), *cells]).rstrip())
        for note in self.notes:
            print(note)

    def to_json(self):
        return {**self.facts, **(self.rows if self.rows_in_json else {})}


def percent(share):
    if share is None:
        return 'n/a'
    # nothing can pass its peak
    return f'{share:.0%}' if share <= 1 else f'{share:.0%} (!)'


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
    if isinstance(value, int) or value >= 1000:
        return f'{value:,.0f}'
    return f'{value:.3g}'


def numbers_in(figures):
    """{name: number} of a JSON line; the ones in rows are named row.figure."""
    numbers = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            for inner, number in numbers_in(value).items():
                numbers[f'{name}.{inner}'] = number
        elif type(value) in (int, float):
            numbers[name] = value
    return numbers


def comparison(result, path):
    """A Table of this run's numbers beside those of the JSON line at the end of a file."""
    try:
        earlier = json.loads(prepare.read_text(path).strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Refusal(f'{path} does not end in a line of JSON; save one with: python bench.py > {path}', 2) from None
    if earlier.get('mode') != result['mode']:
        raise Refusal(f'{path} is of mode {earlier.get("mode")}, and this is {result["mode"]}: compare runs of '
                      'one mode.', 2)
    # a row per number that both have
    then, rows = numbers_in(earlier), {}
    for name, now in numbers_in(result).items():
        if then.get(name):
            rows[name] = dict(then=then[name], now=now, ratio=now / then[name])
    return Table('against the earlier run', rows)


# -------------------------------------------------------------------------------
# Measuring


def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def middle(seconds):
    """The median, and half the range over it."""
    median = statistics.median(seconds)
    return median, (max(seconds) - min(seconds)) / 2 / median


def measure(functions, device, repeats=5, warmup=2):
    """Seconds of each function, [(median, spread)]. In each round all take their turn, so that a
    noisy machine disturbs them alike."""
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
    """Counts the bytes of the tensors that operations make inside the context, while they live:
    .most at once. What a kernel uses inside is not seen, so a fused one looks a little better
    than it is."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # a result that shares an argument's memory is not new
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            # counted until its last user is gone
            if storage._cdata not in self.live and storage._cdata not in given:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


def most_bytes(function):
    with Peak() as peak:
        function()
    return peak.most


@contextmanager
def saved_for_backward(weights):
    """What autograd saves inside the context, `weights` left out: a dict that fills, {storage:
    bytes}."""
    # a storage that several tensors share counts once
    saved, own = {}, {w.untyped_storage().data_ptr() for w in weights}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class Machine:
    """This device, its published peaks and what it was measured to reach."""

    def __init__(self, options):
        self.options = options
        self.device, self.dtype = prepare.pick_device(options.device, options.dtype)
        self.name = train.device_name(self.device)
        self.compiles = options.compile and not prepare.no_compiler(self.device)
        # train.py uses TF32 for fp32 on a GPU, and the table has no peak for it
        tf32 = self.device.type == 'cuda' and self.dtype == torch.float32
        torch.set_float32_matmul_precision('high' if tf32 else 'highest')
        from_table = None if tf32 else train.peak_tflops(self.device, self.dtype)
        self.published_tflops = options.peak_tflops or from_table
        # what a product of matrices and a read of memory reach
        self.n = 1024 if self.device.type == 'cpu' else 8192
        a, b = torch.randn(2, self.n, self.n, device=self.device, dtype=self.dtype)
        self.product = partial(torch.mm, a, b)
        big = torch.ones(2 ** 28, device=self.device)
        (seconds, _), = measure([big.sum], self.device)
        self.read_gbs = big.nbytes / seconds / 1e9
        self.set_matmul_speed(*measure([self.product], self.device, 9))
        card = train.peak(self.name) or {}
        self.peak_gbs = options.peak_gbs or card.get('gbs') or self.read_gbs

    def set_matmul_speed(self, timing):
        """Stores the measured speed of a matrix product. On a CPU it is the peak that MFU is
        relative to."""
        # n multiplications and n additions per element
        seconds, _ = timing
        self.matmul_tflops = 2 * self.n ** 3 / seconds / 1e12
        self.peak_tflops = self.published_tflops
        if self.peak_tflops is None and self.name == 'cpu':
            self.peak_tflops = self.matmul_tflops

    def introduce(self):
        limit = 'unknown (give --peak_tflops)'
        if self.peak_tflops:
            limit = f'{self.peak_tflops:.3g} TFLOP/s'
        print(f'{self.name}, {str(self.dtype)[6:]}, torch {torch.__version__}: a matrix product reaches '
              f'{self.matmul_tflops:.3g} TFLOP/s, a read of memory {self.read_gbs:.3g} GB/s.\n100 % MFU is {limit}, '
              f"100 % MBU {self.peak_gbs:.3g} GB/s: as given, or the vendor's, or else what was measured.")

    def rate(self, tokens, flops, timing):
        """The figures of a work of so many tokens and FLOPs that takes (seconds, spread)."""
        seconds, spread = timing
        flops_per_s = flops / seconds
        mfu = None
        if self.peak_tflops:
            mfu = flops_per_s / self.peak_tflops / 1e12
        return dict(tokens_per_s=tokens / seconds, ms=1e3 * seconds, spread=spread, flops_per_s=flops_per_s, mfu=mfu)

    def facts(self):
        threads = None
        if self.device.type == 'cpu':
            threads = torch.get_num_threads()
        return dict(device=self.name, dtype=str(self.dtype)[6:], torch=torch.__version__,
                    python=platform.python_version(), threads=threads, matmul_tflops=self.matmul_tflops,
                    read_gbs=self.read_gbs, peak_tflops=self.peak_tflops, peak_gbs=self.peak_gbs)


def ratio_note(table, ours, theirs):
    """Adds how one row's tokens/s does against another's, where both are there."""
    if ours in table.rows and theirs in table.rows:
        ratio = table.rows[ours]['tokens_per_s'] / table.rows[theirs]['tokens_per_s']
        table.facts[f'{ours} / {theirs}'] = ratio
        table.notes.append(f'{ours}: {ratio:.2f} x the tokens/s of {theirs}.')


# -------------------------------------------------------------------------------
# plan: what a model costs, from its config alone


def find_config(word):
    """The Config of a published model's or a run's name, a config.json of Hugging Face, or a
    checkpoint."""
    if word in train.RUNS:
        return prepare.build(Config, train.RUNS[word])
    if word in prepare.PUBLISHED:
        return prepare.build(Config, prepare.published(word))
    if word.endswith('.json'):
        return prepare.build(Config, prepare.from_hugging_face(prepare.read_json(word)))
    if os.path.exists(word):
        return prepare.build(Config, prepare.load_checkpoint(word)['config'])
    raise Refusal(f'Unknown model {word}{prepare.nearest(word, [*train.RUNS, *prepare.PUBLISHED])}', 2)


def part_name(name, p):
    """The part of a model that a parameter belongs to."""
    if name.startswith('embed_pos'):
        return 'positions'
    if name.startswith('embed'):
        return 'embedding'
    if name.startswith('lm_head'):
        return 'head'
    if 'norm' in name:
        return 'norms'
    if '.attn.' in name:
        return 'attention'
    if 'router' in name:
        return 'router'
    return 'experts' if p.dim() == 3 else 'MLP'


def count_parameters(cfg):
    """Parameters {part: number}, from the meta device."""
    with torch.device('meta'):
        model = Transformer(cfg)
    # in the order in which a token meets them
    order = ('embedding', 'positions', 'attention', 'MLP', 'experts', 'router', 'norms', 'head')
    parts = dict.fromkeys(order, 0)
    for name, p in model.named_parameters():
        parts[part_name(name, p)] += p.numel()
    return {part: n for part, n in parts.items() if n}


def activation_bytes(cfg, rows, T, explicit=False, dropout=False, bytes_per_value=2):
    """What one block keeps for its backward pass, where norms are one kernel, as on a GPU.

    For the GPT block in 16 bits it is s b h (32 + 2 a s / h), with dropout 34 + 2 a s / h
    (Korthikanti, arXiv:2205.05198, eq. 1; dropout on the scores, which is not ours, would bring
    that to 5 a s / h). The second term is that of explicit scores.
    """
    C, H, K, D = cfg.n_embd, cfg.n_head, cfg.n_kv_head, cfg.head_dim
    # the inputs and outputs of the norms; what goes into the matrices is among them
    values = 2 * C if cfg.wiring == 'parallel' else 4 * C
    if cfg.kv_rank:
        # latents before and after their norms, then queries, keys, values and outputs padded to one width
        values += 2 * cfg.q_rank + 2 * cfg.kv_rank + cfg.rope_dim
        values += 4 * H * D + H * cfg.v_dim
    else:
        # queries, keys, values, the output; rotated queries and keys are tensors of their own
        values += (H + 2 * K) * D + H * D
        if cfg.pos == 'rope':
            values += (H + K) * D
    if explicit:
        values += H * T
    # inside an MLP: gate, up, silu(gate), their product; or up and gelu(up)
    inside = 4 if cfg.mlp == 'swiglu' else 2
    if cfg.n_expert:
        # per visit, besides: the expert's input, its output, and its weighted output
        values += cfg.n_expert + cfg.n_active * (inside * cfg.d_expert + 3 * C)
        values += cfg.n_shared * inside * cfg.d_expert
    else:
        values += inside * cfg.d_ff
    # dropout's masks, of one byte per value, on what attention and MLP add to the stream
    masks = 2 * C if dropout else 0
    return rows * T * (values * bytes_per_value + masks)


class Costs:
    """What a model costs on some cards. Everything follows from the config and the options."""

    def __init__(self, options, name):
        self.options, self.name = options, name
        self.cfg = find_config(name)
        self.T = options.context or self.cfg.block_size
        # the cards
        card = train.peak(options.hardware)
        if not card:
            raise Refusal(f'Unknown hardware {options.hardware}{prepare.nearest(options.hardware, train.PEAKS)}', 2)
        tflops = card['bf16'] or card['fp16'] or card['fp32']
        self.gb_per_card = card['gb']
        self.capacity = card['gb'] * 1e9 * options.gpus
        self.flops_per_s = tflops * 1e12 * options.gpus
        self.bytes_per_s = card['gbs'] * 1e9 * options.gpus
        # parameters: all, those that one token meets, and those that one decoded token reads
        self.parts = count_parameters(self.cfg)
        self.total = sum(self.parts.values())
        self.idle_share = 1 - self.cfg.n_active / self.cfg.n_expert if self.cfg.n_expert else 0
        self.active = round(self.total - self.parts.get('experts', 0) * self.idle_share)
        self.forward = flops_per_token(self.cfg, self.T)
        self.kv = cache_bytes_per_token(self.cfg)

    def weights_read(self, rows):
        """Parameters that a decoding step of so many rows reads. Positions are looked up, and so
        is the embedding, unless the head shares it. Of the experts, those that any row visits:
        soon all."""
        looked_up = self.parts.get('positions', 0)
        if not self.cfg.tie:
            looked_up += self.parts['embedding']
        idle_experts = self.parts.get('experts', 0) * self.idle_share ** rows
        return self.total - looked_up - idle_experts


def section(title, *lines):
    """A Table of (name in the JSON, value, words)."""
    rows = {words: {'': shown(name, value)} for name, value, words in lines}
    facts = {name: value for name, value, _ in lines}
    return Table(title, rows, facts=facts, rows_in_json=False)


def plan_parameters(c):
    rows = {part: dict(parameters=n, share=n / c.total) for part, n in c.parts.items()}
    title = f'{c.name}: {c.total:,} parameters'
    if c.active < c.total:
        title += f', {c.active:,} of them for one token'
    facts = dict(model=c.name, context=c.T, params=c.total, active_params=c.active, params_by_part=c.parts,
                 matmul_params=matmul_params(c.cfg))
    return Table(title, rows, facts=facts, rows_in_json=False)


def plan_flops(c):
    cfg, N = c.cfg, matmul_params(c.cfg)
    attention = c.forward - 2 * N
    # the d of 4 L T d, which is n_embd in most models
    d = cfg.n_head * (cfg.head_dim + cfg.v_dim) / 2
    in_blocks = N - cfg.n_embd * cfg.vocab_rows
    return section(
        f'FLOPs per token, T = {c.T:,}',
        ('matmul_flops_per_token', 2 * N, f'matrices, 2N: N = {N:,} has the head, not the embedding (looked up)'),
        ('attention_flops_per_token', attention, 'attention, 2 L T H (D_qk + D_v): the whole T x T, no window'),
        ('forward_flops_per_token', c.forward, 'forward'),
        ('causal_forward_flops_per_token', 2 * N + attention / 2, 'forward, with the causal half of attention'),
        ('training_flops_per_token', 3 * c.forward, 'training, 3 x forward'),
        ('attention_overtakes_at', N / (2 * cfg.n_layer * d), 'attention overtakes the matrices at T'),
        ('attention_overtakes_blocks_at', in_blocks / (2 * cfg.n_layer * d),
         "attention overtakes the blocks' matrices at T"),
        ('six_d', 6 * d, 'which for a block of 12 d^2 weights is 6 d'))


def plan_memory(c):
    cfg, T, L = c.cfg, c.T, c.cfg.n_layer
    # activations of all blocks, for one row
    saved = L * activation_bytes(cfg, 1, T)
    explicit = L * activation_bytes(cfg, 1, T, explicit=True)
    # each block keeps its input, and one at a time keeps all the rest
    recomputed = L * 2 * T * cfg.n_embd + saved / L
    chunk = human(4 * Transformer.logits_at_once, 'B')
    cached = 'L (rank + rope)' if cfg.kv_rank else '2 L K D'
    window = cfg.window or T
    return section(
        'Memory',
        ('weight_bytes_bf16', 2 * c.total, 'weights, bf16'),
        ('weight_bytes_fp32', 4 * c.total, 'weights, fp32'),
        ('training_state_bytes', 16 * c.total, 'weights, gradients and Adam in training, 16 bytes per parameter'),
        ('training_state_bytes_per_gpu', 16 * c.total / c.options.gpus,
         f'of which a GPU holds under FSDP over {c.options.gpus}'),
        ('activation_bytes_flash', saved, f'activations of a row of {T:,} in 16 bits, flash attention'),
        ('activation_bytes_explicit', explicit, 'the same with explicit scores'),
        ('activation_bytes_recomputed', recomputed, 'the same with flash, blocks recomputed'),
        ('logit_bytes_fp32', 4 * T * cfg.vocab_size, f'whole logits of a row in fp32 (chunks here: {chunk})'),
        ('kv_bytes_per_token', c.kv, f'cache, {cached} values of 2 bytes'),
        ('kv_bytes_per_sequence', c.kv * T, f'cache of {T:,} tokens, as held here'),
        ('kv_bytes_window_bound', c.kv * min(T, window), f'cache rolling over window {window:,}'))


def plan_cards(c):
    options, B, T = c.options, c.options.batch, c.T
    # a step waits for the weights and the caches, or for the arithmetic
    read_s = (2 * c.weights_read(B) + B * T * c.kv) / c.bytes_per_s
    step = max(read_s, B * c.forward / c.flops_per_s)
    # what the weights leave for caches
    room = max(0, c.capacity - 2 * c.total)
    tokens = options.tokens or 20 * c.active
    # training costs three times a forward pass
    hours = 3 * c.forward * tokens / (c.flops_per_s * options.mfu) / 3600
    limits = f'{human(c.flops_per_s, "FLOP/s")}, {human(c.bytes_per_s, "B/s")}, {human(c.capacity, "B")}'
    title = f'{options.gpus} x {options.hardware}, nothing lost between them: {limits}'
    if not room:
        title += f'; too few: the weights alone need {math.ceil(2 * c.total / c.gb_per_card / 1e9)}'
    lines = [
        ('decode_floor_s', 2 * c.weights_read(1) / c.bytes_per_s, 'a decoded token: bytes of weights read / bandwidth'),
        ('decode_floor_with_cache_s', step, f'a step of {B} rows with {T:,} tokens in the cache'),
        ('tokens_per_s_at_most', B / step, 'tokens/s of that'),
        ('largest_batch', int(room // (c.kv * T)), f'largest batch at T = {T:,}'),
        ('largest_context', int(room // (c.kv * B)), f'tokens of cache per row, at batch {B}'),
        ('training_tokens', tokens, 'tokens to train on' + ', 20 per active parameter' * (not options.tokens)),
        ('training_hours', hours, f'hours at {options.mfu:.0%} MFU'),
        ('training_gpu_hours', hours * options.gpus, 'GPU hours'),
    ]
    if options.dollars_per_hour:
        dollars = hours * options.gpus * options.dollars_per_hour
        lines.append(('training_dollars', dollars, f'dollars at {options.dollars_per_hour:g} per hour'))
    return section(title, *lines)


def plan(options, words):
    """Everything that follows from the config alone."""
    c = Costs(options, words[0] if words else 'gpt2')
    tables = [plan_parameters(c), plan_flops(c), plan_memory(c), plan_cards(c)]
    # sizes that suit tensor cores badly
    odd = []
    for size in ('n_embd', 'd_ff', 'head_dim', 'vocab_rows'):
        if getattr(c.cfg, size) % 64:
            odd.append(f'{size} {getattr(c.cfg, size)}')
    tables[-1].facts['odd_sizes'] = odd
    if odd:
        tables[-1].notes.append(f'\nNo multiples of 64, which tensor cores like: {", ".join(odd)}.')
    return tables


# -------------------------------------------------------------------------------
# train


def training_shape(machine):
    """What train and the glance measure, the run that this device's preset would train: its
    name, its Config, its rows."""
    name, rows = 'owt-124m', 30
    if machine.device.type == 'cpu':
        name, rows = 'baby', 12
    return name, prepare.build(Config, {'vocab_size': 256, **train.RUNS[name]}), rows


def our_training(machine, rows, cfg, optimizer='adamw', compiled='no'):
    """A function that makes one update on the same random batch. compiled: no, blocks or whole."""
    muon_steps = 3 if cfg.n_embd < 512 else 5
    settings = train.Settings(optimizer=optimizer, compile=compiled == 'blocks', muon_steps=muon_steps)
    torch.manual_seed(0)
    model = Transformer(cfg)
    if compiled == 'whole':
        model.compile()
    run = train.Run(model, settings, machine.device, machine.dtype)
    x = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)
    return partial(run.update, [(x, x)])


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
    cast = nullcontext()
    if machine.dtype != torch.float32:
        cast = torch.autocast(machine.device.type, machine.dtype)
    # its usual way: the model as a whole
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


def training_table(machine, runs, name, cfg, rows):
    """runs: {label: a function that makes one update}, measured in turns with a matrix product."""
    # the peak of a CPU is measured under the same noise as the runs
    product, *times = measure([machine.product, *runs.values()], machine.device, 4 * machine.options.repeats, warmup=3)
    machine.set_matmul_speed(product)
    T = cfg.block_size
    tokens, flops = rows * T, 3 * flops_per_token(cfg, T)
    title = (f'training, {name}, {rows} x {T} tokens of {human(flops, "FLOP")}, AdamW unless said; the matrix '
             f'product, in turns with them, {machine.matmul_tflops:.3g} TFLOP/s')
    table = Table(title, {})
    for label, timing in zip(runs, times):
        table.rows[label] = machine.rate(tokens, tokens * flops, timing)
    table.facts.update(machine.facts(), training_shape=name, rows=rows, T=T, training_flops_per_token=flops)
    return table


def training(machine):
    """Tokens/s beside the plan's FLOPs: eager, compiled, with Muon, and transformers' Llama, all
    in turns."""
    name, cfg, rows = training_shape(machine)
    cfg = cfg.copy(qk_norm=False)  # as Llama has it
    ours_of = partial(our_training, machine, rows)
    how, compiled = ('compiled', 'blocks') if machine.compiles else ('eager', 'no')
    ours, theirs = f'ours, {how}', f'transformers, {how}'
    # as train.py trains
    runs = {ours: ours_of(cfg, compiled=compiled), f'{ours}, Muon': ours_of(cfg, 'muon', compiled)}
    if machine.compiles:
        # as transformers is; train.py isn't, since it takes longer than it saves
        runs[f'{ours} as a whole'] = ours_of(cfg, compiled='whole')
    # what the parts cost, without a compiler
    parallel, experts = 'parallel, eager', '8 experts, 2 per token, eager'
    runs['ours, eager'] = ours_of(cfg)
    runs[parallel] = ours_of(cfg.copy(wiring='parallel'))
    # the experts that a token visits are as wide as the plain MLP
    runs[experts] = ours_of(cfg.copy(n_expert=8, d_expert=cfg.d_ff // 2))
    if has_transformers():
        runs[theirs] = their_training(machine, cfg, rows)
    # measured, and compared
    table = training_table(machine, runs, name, cfg, rows)
    ratio_note(table, parallel, 'ours, eager')
    ratio_note(table, experts, 'ours, eager')
    ratio_note(table, ours, theirs)
    ratio_note(table, f'{ours} as a whole', theirs)
    return [table]


# -------------------------------------------------------------------------------
# prefill and decode


def inference_model(machine):
    """What prefill, decode and the glance measure: a Llama of 114 M parameters, or of 7 B on a
    GPU that can hold it."""
    # small enough for any machine
    name = 'Llama of 114 M'
    cfg = Config(n_layer=12, n_embd=768, n_head=12, n_kv_head=4, d_ff=2048, vocab_size=50304, tie=True)
    if machine.device.type == 'cuda' and torch.cuda.get_device_properties(machine.device).total_memory > 44e9:
        name, cfg = 'llama2-7b', prepare.build(Config, prepare.published('llama2-7b'))
    torch.manual_seed(0)
    # made where it stays: a CPU takes minutes to draw 7 B random numbers
    with machine.device:
        return name, Transformer(cfg).to(machine.dtype).eval()


@torch.no_grad()
def reading(machine, model, T):
    """The figures of one prompt of T tokens; the head reads the last one alone."""
    # FLOPs of the head per token
    head = 2 * model.cfg.n_embd * model.cfg.vocab_rows
    ids = [torch.randint(model.cfg.vocab_size, (T,)).tolist()]
    cache = KVCache(model.cfg, 1, T, machine.device, machine.dtype)

    def read():
        cache.truncate(0)
        model_file.prefill(model, ids, cache)
    timing, = measure([read], machine.device, machine.options.repeats)
    return machine.rate(T, T * (flops_per_token(model.cfg, T) - head) + head, timing)


def prefill_table(machine, name, model, lengths):
    rows = {}
    for T in lengths:
        rows[f'prefill of {T}'] = reading(machine, model, T)
    return Table(f'prefill, {name}, one row', rows, facts=dict(shape=name))


def prefills(machine):
    """Reading a prompt: tokens/s and share of the peak against its length."""
    name, model = inference_model(machine)
    return [prefill_table(machine, name, model, (64, 128, 256, 512, 1024))]


@torch.no_grad()
def decoding(machine, model, n, rows=1, kind=KVCache, step=None):
    """Seconds of each of n tokens after a prompt of 64. The first one's are the prefill's."""
    more = dict(static=True) if step else {}
    # a compiled step reads the whole cache, so that no shape changes
    cache = kind(model.cfg, rows, 64 + n, device=machine.device, dtype=machine.dtype, **more)
    prompt = torch.randint(model.cfg.vocab_size, (rows, 64))
    marks = [time.perf_counter()]
    for _ in model_file.generate(model, prompt, n, temperature=0, cache=cache, step=step):
        synchronize(machine.device)
        marks.append(time.perf_counter())
    return [b - a for a, b in zip(marks, marks[1:])]


def their_decoding(machine, cfg, n):
    """The same of transformers' generate, for a Llama of the same shape: a function."""
    from transformers import GenerationConfig
    model = llama(cfg, eos_token_id=None, bos_token_id=None).to(machine.device, machine.dtype).eval()
    settings = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.randint(cfg.vocab_size, (1, 64), device=machine.device)

    def run():
        # a streamer gets the prompt first, then each token
        marks = []
        clock = SimpleNamespace(put=lambda ids: marks.append(time.perf_counter()), end=lambda: None)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=clock)
        return [b - a for a, b in zip(marks, marks[1:])]
    return run


def decode_table(machine, name, model, runs, n):
    """runs: {label: a function that decodes n tokens and returns the seconds of each}. Batch 1
    reads every weight once per token: that is the limit, and MBU is the share of the bandwidth
    in use."""
    # all run in each round, so that a noisy machine disturbs them alike
    read = matmul_params(model.cfg) * model.embed.weight.element_size()
    seconds_of = {label: [] for label in runs}
    for _ in range(1 + max(3, machine.options.repeats // 2)):
        for label, run in runs.items():
            seconds_of[label].append(run())
    rows = {}
    for label in runs:
        # the first round warms up
        times = seconds_of[label][1:]
        seconds, spread = middle([sum(tokens[1:]) / (n - 1) for tokens in times])
        rows[label] = dict(
            tokens_per_s=1 / seconds, ms=1e3 * seconds, spread=spread, read_bytes_per_s=read / seconds,
            mbu=read / seconds / machine.peak_gbs / 1e9,
            first_token_ms=1e3 * statistics.median(tokens[0] for tokens in times))
    title = f'decode, {name}, one row, prompt 64, {n} tokens, greedy; a token reads {human(read, "B")}'
    return Table(title, rows, facts=dict(shape=name, prompt=64, new_tokens=n, weight_bytes=read))


def batches_table(ours):
    rows = {}
    for B in (1, 8, 32):
        # once to warm up
        ours(3, B)
        first, *times = ours(30, B)
        step = statistics.median(times)
        rows[f'batch {B}'] = dict(tokens_per_s=B / step, step_ms=1e3 * step, prefill_tokens_per_s=B * 64 / first)
    return Table('batches, eager, one run each', rows)


def positions_table(machine, model, ours, step):
    """The time of a token against its position, with each kind of cache; and the picture of it."""
    median = statistics.median
    kinds = {'cache, eager': {}, 'paged cache, eager': dict(kind=sample.PagedKVCache)}
    if step:
        kinds['whole cache read, compiled'] = dict(step=step)
    rows, curves = {}, {}
    for label, how in kinds.items():
        if 'step' in how:
            ours(500, **how)  # another length is compiled again
        # each point of the curve is a median of 17 tokens
        times = ours(500, **how)[1:]
        smooth = [1e3 * median(times[max(0, i - 8):i + 9]) for i in range(len(times))]
        curves[label] = range(65, 65 + len(times)), smooth
        early, late = median(times[:50]), median(times[-50:])
        rows[label] = dict(ms_at_65_to_114=1e3 * early, ms_at_514_to_563=1e3 * late, ratio=late / early)
    # without a cache, each token reads all before it again
    lengths = (64, 128, 256, 512)
    # random ids: what they are does not matter for the time
    texts = [torch.randint(model.cfg.vocab_size, (1, T), device=machine.device) for T in lengths]
    with torch.no_grad():
        times = measure([partial(model, text) for text in texts], machine.device, 3, 1)
    curves['no cache'] = lengths, [1e3 * seconds for seconds, _ in times]
    train.draw(os.path.join(machine.options.out, 'decode.png'), curves, xlabel='position', ylabel='ms per token',
               yscale='log')
    return Table('a token early and late, one run each', rows)


def decodes(machine):
    """Writing: ours and transformers', batches, and the time against the position."""
    name, model = inference_model(machine)
    ours, n = partial(decoding, machine, model), 100
    step = sample.decode_step(model) if machine.compiles else None
    # one row: the figures that people compare
    runs = {'decode, eager': partial(ours, n)}
    if step:
        runs['decode, compiled'] = partial(ours, n, step=step)
    if name != 'llama2-7b' and has_transformers():
        runs['transformers, eager'] = their_decoding(machine, model.cfg, n)
    table = decode_table(machine, name, model, runs, n)
    ratio_note(table, 'decode, eager', 'transformers, eager')
    ratio_note(table, 'decode, compiled', 'transformers, eager')
    return [table, batches_table(ours), positions_table(machine, model, ours, step)]


# -------------------------------------------------------------------------------
# attention and memory


def explicit_attention(q, k, v, mask, causal, scale=None):
    """model.attend with all that flash attention never builds: the (B, H, T, S) scores."""
    if q.shape[1] != k.shape[1]:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)           # (B, H, S, D)
        v = v.repeat_interleave(group, dim=1)           # (B, H, S, D)
    # each head's T x S scores
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)  # (B, H, T, S)
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    # a mask of bools says what may be seen, one of floats is added
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v                       # (B, H, T, D)


def with_explicit_attention():
    """In this context the model uses explicit_attention."""
    return patch.object(model_file, 'attend', explicit_attention)


def attentions(machine):
    """Explicit scores against SDPA over T, forward and backward: time, and memory, O(T^2)
    against O(T)."""
    lengths = [128, 256, 512, 1024, 2048]
    if machine.device.type == 'cuda':
        lengths += [4096, 8192]
    rows = {}
    for T in lengths:
        q, k, v = torch.randn(3, 1, 8, T, 64, device=machine.device, dtype=machine.dtype)
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()

        def forward_and_backward(attend, inputs=inputs):
            torch.autograd.grad(attend(*inputs, None, True).sum(), inputs)
        runs = [partial(forward_and_backward, explicit_attention), partial(forward_and_backward, model_file.attend)]
        # time, then memory
        (explicit_s, _), (sdpa_s, _) = measure(runs, machine.device, machine.options.repeats)
        explicit_bytes, sdpa_bytes = map(most_bytes, runs)
        rows[f'T {T}'] = dict(
            explicit_ms=1e3 * explicit_s, sdpa_ms=1e3 * sdpa_s, time_ratio=explicit_s / sdpa_s,
            explicit_bytes=explicit_bytes, sdpa_bytes=sdpa_bytes, memory_ratio=explicit_bytes / sdpa_bytes)
    curves = {'explicit': (lengths, []), 'sdpa': (lengths, [])}
    for row in rows.values():
        curves['explicit'][1].append(row['explicit_bytes'] / 1e6)
        curves['sdpa'][1].append(row['sdpa_bytes'] / 1e6)
    train.draw(os.path.join(machine.options.out, 'attention.png'), curves, xlabel='T', ylabel='MB at once',
               xscale='log', yscale='log')
    return [Table('attention, forward and backward, 8 heads of 64, causal; the tensors that live at once', rows)]


def block_memory_table(cfg, device, B=4):
    """What a GPT block keeps for the backward pass, against the formula."""
    T = cfg.block_size
    # a single block, so that nothing else is counted
    block = model_file.Block(cfg, 0, None).to(device)
    x = torch.randn(B, T, cfg.n_embd, device=device, requires_grad=True)
    pos = torch.arange(T, device=device)[None]
    rows = {}
    for label, explicit in (('flash', False), ('explicit scores', True)):
        attention = with_explicit_attention() if explicit else nullcontext()
        with attention, saved_for_backward(block.parameters()) as saved:
            block(x, pos, None, None)
        got, formula = sum(saved.values()), activation_bytes(cfg, B, T, explicit, bytes_per_value=4)
        rows[label] = dict(kept_bytes=got, formula_bytes=formula, ratio=got / formula)
    return Table(f'kept for the backward pass by a GPT block in fp32, {B} x {T} x {cfg.n_embd}, 8 heads', rows)


def recomputation_table(cfg, device, B=4):
    ids = torch.randint(256, (B, cfg.block_size), device=device)
    rows = {}
    for label, again in (('all blocks kept', False), ('blocks recomputed', True)):
        model = Transformer(cfg).to(device).train()
        train.place(model, train.Settings(compile=False, checkpoint_activations=again), device, torch.float32)
        with saved_for_backward(model.parameters()) as saved:
            model(ids, ids)
        most = most_bytes(lambda model=model: model(ids, ids).backward())
        rows[label] = dict(kept_bytes=sum(saved.values()), bytes_at_once=most)
    return Table('the same by 8 such blocks and the head, and what lives at once, the gradients too', rows)


def loss_memory_table(device):
    model = Transformer(Config(n_layer=1, n_head=4, n_embd=256, vocab_size=50304)).to(device)
    # what the last block would hand to the loss
    hidden = torch.randn(8, 1024, 256, device=device).requires_grad_()
    targets = torch.randint(50304, (8, 1024), device=device)
    rows = {}
    for label, logits_at_once in (('whole logits', 2 ** 62), ('chunks', Transformer.logits_at_once)):
        model.logits_at_once = logits_at_once
        # counting slows it down, so the time is that of another run
        most = most_bytes(lambda: model.loss(hidden, targets).backward())
        start = time.perf_counter()
        model.loss(hidden, targets).backward()
        synchronize(device)
        rows[label] = dict(bytes_at_once=most, seconds=time.perf_counter() - start)
        model.zero_grad()
    for row in rows.values():
        row['share'] = row['bytes_at_once'] / rows['whole logits']['bytes_at_once']
    return Table('the loss of 8 x 1024 tokens in fp32, V 50304, forward and backward, one run each', rows)


def memories(machine):
    """What training holds: a block's activations, blocks recomputed, whole logits against
    chunks."""
    # large enough to show, small enough for any machine
    sizes = dict(n_head=8, n_embd=256, block_size=256, n_layer=8)
    cfg = prepare.build(Config, {**FAMILIES['gpt2'], **sizes})
    return [block_memory_table(cfg, machine.device), recomputation_table(cfg, machine.device),
            loss_memory_table(machine.device)]


# -------------------------------------------------------------------------------
# ladder, and this machine at a glance

GPT, GQA = FAMILIES['gpt2'], {'n_kv_head': 2}
LATENT = {name: FAMILIES['deepseek'][name] for name in ('head_dim', 'rope_dim', 'v_dim', 'kv_rank')}
# what differs from the plain Llama block; attention runs on SDPA's math path up to 'flash attention'
RUNGS = {
    'post-norm, GELU, learned positions': {**GPT, 'wiring': 'post', 'tie': False},
    'pre-norm': {**GPT, 'tie': False},
    'RMSNorm, no biases': {'pos': 'learned', 'mlp': 'gelu'},
    'RoPE': {'mlp': 'gelu'},
    'SwiGLU': {},
    'GQA, 2 of 4 heads': GQA,
    'flash attention': GQA,
    '+ 8 experts, 2 per token': {**GQA, 'n_expert': 8, 'd_expert': 192},
    'or latent attention': LATENT,
}


def rung(machine, name, changes, steps, B, T):
    """Trains one small model; returns its figures."""
    meta = prepare.load_data(name)[-1]
    cfg = prepare.build(Config, {'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': T,
                                 'vocab_size': meta['vocab_size'], **changes})
    settings = train.Settings(optimizer='adamw', steps=steps, batch_tokens=B * T, compile=False, eval_tokens=2 ** 16)
    data = train.Data(name, cfg, settings, machine.device)
    # the same first weights and batches in all rungs, as far as the shapes allow
    torch.manual_seed(1)
    run = train.Run(Transformer(cfg), settings, machine.device, machine.dtype)
    times = []
    while run.step < steps:
        # reading the batch is not measured
        batch = data.batch(run.step)
        start = time.perf_counter()
        run.update(batch)
        synchronize(machine.device)
        times.append(time.perf_counter() - start)
    return dict(params=sum(p.numel() for p in run.model.parameters()),
                training_flops_per_token=3 * flops_per_token(cfg, T), cache_bytes_per_token=cache_bytes_per_token(cfg),
                tokens_per_s=B * T / statistics.median(times[10:]), loss=run.evaluate(data.windows()))


def ladder(machine, steps=300, B=12, T=64):
    """The same small model, from GPT-1's block to today's, a part at a time: what each costs and
    what it learns."""
    name = prepare.find_data()
    rows, flash = {}, False
    for label, changes in RUNGS.items():
        flash = flash or label == 'flash attention'
        with nullcontext() if flash else sdpa_kernel(SDPBackend.MATH):
            rows[label] = rung(machine, name, changes, steps, B, T)
    title = (f'{steps} updates of {B} x {T} tokens of {name}, AdamW, one seed, one run each; the cache in 16 bits; '
             'attention on the math path until flash')
    return [Table(title, rows, facts=dict(data=name))]


def glance(machine):
    """The first figures of train, prefill and decode."""
    # training, with both optimizers
    name, cfg, rows = training_shape(machine)
    how, compiled = ('compiled', 'blocks') if machine.compiles else ('eager', 'no')
    runs = {}
    for optimizer in ('adamw', 'muon'):
        label = f'ours, {how}, {optimizer}'
        runs[label] = our_training(machine, rows, cfg, optimizer, compiled)
    tables = [training_table(machine, runs, name, cfg, rows)]
    # reading and writing, without a compiler
    name, model = inference_model(machine)
    tables.append(prefill_table(machine, name, model, [256]))
    runs = {'decode, eager': partial(decoding, machine, model, 30)}
    tables.append(decode_table(machine, name, model, runs, 30))
    return tables


MODES = {'glance': glance, 'train': training, 'prefill': prefills, 'decode': decodes, 'attention': attentions,
         'memory': memories, 'ladder': ladder}


def main(argv):
    values = prepare.command_line(argv, __doc__, Options, words=2)
    mode, *words = values.pop('words') or ['glance']
    options = prepare.build(Options, values)
    if mode not in ('plan', *MODES):
        raise Refusal(f'Unknown mode {mode}{prepare.nearest(mode, ["plan", *MODES])}', 2)
    # plan computes; all others measure this machine
    result = dict(mode=mode)
    if mode == 'plan':
        tables = plan(options, words)
    else:
        for name in PLAN_ONLY:
            if name in values:
                words.append(f'--{name}')
        if words:
            raise Refusal(f'{words[0]} is for plan alone: the other modes measure shapes of their own.', 2)
        machine = Machine(options)
        machine.introduce()
        result.update(machine.facts())
        tables = MODES[mode](machine)
    # for people, then for programs
    for table in tables:
        table.print()
        result.update(table.to_json())
    if options.compare:
        comparison(result, options.compare).print()
    print(json.dumps(result))


if __name__ == '__main__':
    prepare.run(main)
