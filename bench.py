"""Honest numbers: what a Transformer costs, computed, and how fast this machine runs it, measured.

    python bench.py                          this machine at a glance
    python bench.py plan llama3-8b --hardware=H100 --gpus=8 --dollars_per_hour=2
    python bench.py train                    tokens/s and MFU, beside transformers' Llama of the same shape
    python bench.py prefill                  reading a prompt: tokens/s and MFU against its length
    python bench.py decode                   writing: tokens/s, share of the bandwidth, time per token
    python bench.py attention                explicit scores against SDPA: O(T^2) against O(T)
    python bench.py memory                   what training keeps for the backward pass
    python bench.py ladder                   one small model from GPT-1's block to today's, part by part

Each mode prints tables, then one line of JSON with the same figures; curves go to PNG files. --compare=FILE,
the saved output of an earlier run of the same mode, prints that run's figures beside the new ones.

plan only computes. The other modes measure one device. A figure is the median of several runs; `spread` is
half the range of these runs over their median. A table whose runs are not repeated says so in its title.
Times leave out compilation and the first runs, and wait for the device to finish.

MFU is the FLOPs per second over the device's peak, with all T x T scores counted (PaLM, arXiv:2204.02311).
MBU is the bytes of weights read per second over the device's bandwidth.
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
    hardware: str = 'H100'         # plan: a card of train.py's table
    gpus: int = 1                  # plan: how many of these cards
    dollars_per_hour: float = 0.0  # plan: price of one card
    tokens: float = 0.0            # plan: tokens to train on; 0: 20 per parameter (Chinchilla, arXiv:2203.15556)
    mfu: float = 0.4               # plan: the share of the peak that training reaches
    peak_tflops: float = 0.0       # peak of this device, if train.py's table lacks it
    peak_gbs: float = 0.0          # bandwidth of this device in GB/s, if the table lacks it
    repeats: int = 5               # runs per median
    device: str = ''               # cuda, mps, cpu; '' takes the best there is
    dtype: str = ''                # bf16, fp16, fp32; '' takes the device's best
    compile: bool = True           # compile what is measured, where that can work
    out: str = ''                  # folder for pictures; '' takes out/bench
    compare: str = ''              # file with the output of an earlier run

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
# Tables: what a mode returns


@dataclass
class Table:
    """rows: {label: {figure: value}}, printed and put into the JSON."""
    title: str
    rows: dict
    notes: list = field(default_factory=list)   # sentences, printed below the table
    facts: dict = field(default_factory=dict)   # {name: value}, for the JSON only
    rows_in_json: bool = True                   # False: the rows are only printed

    def print(self):
        # one column per figure, in order of appearance
        figures = []
        for row in self.rows.values():
            figures += [figure for figure in row if figure not in figures]
        lines = []
        # no headings if there is but one column, without a name
        if any(figures):
            lines.append(['', *map(heading, figures)])
        for label, row in self.rows.items():
            line = [label]
            for figure in figures:
                line.append(readable(figure, row[figure]) if figure in row else '')
            lines.append(line)
        # labels to the left, values to the right
        widths = [max(map(len, column)) for column in zip(*lines)]
        print(f'\n{self.title}')
        for label, *cells in lines:
            text = '  ' + label.ljust(widths[0])
            for cell, width in zip(cells, widths[1:]):
                text += '  ' + cell.rjust(width)
            print(text.rstrip())
        for note in self.notes:
            print(note)

    def to_json(self):
        if self.rows_in_json:
            return {**self.facts, **self.rows}
        return self.facts


def heading(figure):
    """'tokens_per_s' -> 'tokens/s'"""
    return figure.replace('_per_', '/').replace('_', ' ')


def percent(share):
    """A share of a peak. None: the peak is not known."""
    if share is None:
        return 'n/a'
    # more than a peak is impossible: a figure is wrong
    mark = ' (!)' if share > 1 else ''
    return f'{share:.0%}{mark}'


def human(n, unit):
    """123456789 -> '123.5 MB'. Prefixes are powers of 1000, for bytes too."""
    for size, prefix in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(n) >= size:
            return f'{n / size:,.1f} {prefix}{unit}'
    return f'{n:,.0f} {unit}'


def readable(figure, value):
    """A value as people read it. The unit follows from the figure's name."""
    if isinstance(value, str):
        return value
    if 'flops' in figure:
        return human(value, 'FLOP')
    if 'bytes' in figure:
        return human(value, 'B')
    if figure.startswith('decode_floor'):
        return f'{1e3 * value:.2f} ms'
    if figure in ('mfu', 'mbu'):
        return percent(value)
    if figure == 'spread':
        return f'{value:.0%}'
    if figure in ('loss', 'ratio', 'share'):
        return f'{value:.3f}'
    if isinstance(value, int) or value >= 1000:
        return f'{value:,.0f}'
    return f'{value:.3g}'


def numbers_in(result):
    """{name: number} of what a JSON line says. A number in a row is named row.figure."""
    numbers = {}
    for name, value in result.items():
        if isinstance(value, dict):
            for figure, number in numbers_in(value).items():
                numbers[f'{name}.{figure}'] = number
        elif type(value) in (int, float):
            numbers[name] = value
    return numbers


def comparison(result, path):
    """A Table of the numbers that both this run and the earlier run in the file have."""
    try:
        earlier = json.loads(prepare.read_text(path).strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Refusal(f'{path} does not end in a line of JSON; save one with: python bench.py > {path}', 2) from None
    if earlier.get('mode') != result['mode']:
        raise Refusal(f'{path} is of mode {earlier.get("mode")}, and this is {result["mode"]}: compare runs of '
                      'one mode.', 2)
    before = numbers_in(earlier)
    rows = {}
    for name, now in numbers_in(result).items():
        if before.get(name):
            rows[name] = dict(before=before[name], now=now, ratio=now / before[name])
    return Table('compared with the earlier run', rows)


# -------------------------------------------------------------------------------
# Measuring time and memory


def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def median_and_spread(times):
    median = statistics.median(times)
    return median, (max(times) - min(times)) / 2 / median


def measure(functions, device, repeats=5, warmup=2):
    """Seconds of each function, a list of (median, spread). The functions take turns, so that
    whatever else this machine does slows all of them alike."""
    times = [[] for _ in functions]
    for _ in range(warmup + repeats):
        for function, seconds in zip(functions, times):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    return [median_and_spread(seconds[warmup:]) for seconds in times]


def storages_in(values):
    """The memory of each tensor in nested tuples, lists and dicts."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in this context and still exist; `most` is
    the largest sum so far. What a kernel allocates for itself is not seen: a fused kernel looks
    a little better than it is."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        # a result that shares the memory of an argument is not new
        given = {storage._cdata for storage in storages_in((args, kwargs))}
        for storage in storages_in(out):
            key = storage._cdata
            if key not in self.live and key not in given:
                self.live[key] = storage.nbytes()
                # when its last user is gone, it counts no more
                weakref.finalize(storage, self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


def most_bytes(function):
    """The most bytes of tensors that exist at once while the function runs."""
    with LiveBytes() as counter:
        function()
    return counter.most


@contextmanager
def saved_for_backward(weights):
    """Yields a dict that fills with what autograd saves in this context, {address: bytes}. Not
    counted: the weights, which exist anyway."""
    saved = {}
    known = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor):
        # tensors that share a storage count once
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor):
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved


class Machine:
    """This device: its peaks, and the speed that was measured of a matrix product and of a read
    of memory."""

    def __init__(self, options):
        self.options = options
        self.device, self.dtype = prepare.pick_device(options.device, options.dtype)
        self.name = train.device_name(self.device)
        self.compiles = options.compile and not prepare.no_compiler(self.device)
        # on a GPU train.py multiplies fp32 in TF32, for which the table of cards has no figure
        tf32 = self.device.type == 'cuda' and self.dtype == torch.float32
        torch.set_float32_matmul_precision('high' if tf32 else 'highest')
        self.published_tflops = options.peak_tflops or None
        if self.published_tflops is None and not tf32:
            self.published_tflops = train.peak_tflops(self.device, self.dtype)
        # a read of memory
        numbers = torch.ones(2 ** 28, device=self.device)
        (seconds, _), = measure([numbers.sum], self.device)
        self.read_gbs = numbers.nbytes / seconds / 1e9
        card = train.peak(self.name) or {}
        self.peak_gbs = options.peak_gbs or card.get('gbs') or self.read_gbs
        # a matrix product
        self.n = 1024 if self.device.type == 'cpu' else 8192
        a, b = torch.randn(2, self.n, self.n, device=self.device, dtype=self.dtype)
        self.product = partial(torch.mm, a, b)
        self.set_matmul_speed(*measure([self.product], self.device, 9))

    def set_matmul_speed(self, timing):
        """Stores the speed of a matrix product. On a CPU it is the peak that MFU is relative to."""
        seconds, _ = timing
        # n multiplications and n additions per element
        self.matmul_tflops = 2 * self.n ** 3 / seconds / 1e12
        self.peak_tflops = self.published_tflops
        if self.peak_tflops is None and self.name == 'cpu':
            self.peak_tflops = self.matmul_tflops

    def introduce(self):
        limit = 'unknown (give --peak_tflops)'
        if self.peak_tflops:
            limit = f'{self.peak_tflops:.3g} TFLOP/s'
        print(f'{self.name}, {str(self.dtype)[6:]}, torch {torch.__version__}: a matrix product reaches '
              f'{self.matmul_tflops:.3g} TFLOP/s, a read of memory {self.read_gbs:.3g} GB/s.')
        print(f'100 % MFU is {limit}, 100 % MBU {self.peak_gbs:.3g} GB/s: as given, or as published, '
              'or else as measured.')

    def speed(self, tokens, flops, timing):
        """The figures of something that processes so many tokens with so many FLOPs. timing:
        (seconds, spread)."""
        seconds, spread = timing
        flops_per_s = flops / seconds
        mfu = None
        if self.peak_tflops:
            mfu = flops_per_s / self.peak_tflops / 1e12
        return dict(tokens_per_s=tokens / seconds, ms=1e3 * seconds, spread=spread,
                    flops_per_s=flops_per_s, mfu=mfu)

    def to_json(self):
        threads = None
        if self.device.type == 'cpu':
            threads = torch.get_num_threads()
        return dict(device=self.name, dtype=str(self.dtype)[6:], torch=torch.__version__,
                    python=platform.python_version(), threads=threads, matmul_tflops=self.matmul_tflops,
                    read_gbs=self.read_gbs, peak_tflops=self.peak_tflops, peak_gbs=self.peak_gbs)


def ratio_note(table, ours, theirs):
    """Adds the ratio of two rows' tokens/s, if the table has both rows."""
    if ours in table.rows and theirs in table.rows:
        ratio = table.rows[ours]['tokens_per_s'] / table.rows[theirs]['tokens_per_s']
        table.facts[f'{ours} / {theirs}'] = ratio
        table.notes.append(f'{ours}: {ratio:.2f} x the tokens/s of {theirs}.')


# -------------------------------------------------------------------------------
# plan: what a model costs, from its config alone


def find_config(word):
    """The Config that a word names: a run of train.py, a published model, a Hugging Face
    config.json, or a checkpoint."""
    if word in train.RUNS:
        return prepare.build(Config, train.RUNS[word])
    if word in prepare.PUBLISHED:
        return prepare.build(Config, prepare.published(word))
    if word.endswith('.json'):
        return prepare.build(Config, prepare.from_hugging_face(prepare.read_json(word)))
    if os.path.exists(word):
        return prepare.build(Config, prepare.load_checkpoint(word)['config'])
    raise Refusal(f'Unknown model {word}{prepare.nearest(word, [*train.RUNS, *prepare.PUBLISHED])}', 2)


def part_of(name, parameter):
    """The part of the model that a parameter belongs to."""
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
    # experts are a stack of matrices
    return 'experts' if parameter.dim() == 3 else 'MLP'


def count_parameters(cfg):
    """{part: number of parameters}, in the order in which a token meets the parts."""
    # on the meta device nothing is allocated
    with torch.device('meta'):
        model = Transformer(cfg)
    order = ('embedding', 'positions', 'attention', 'MLP', 'experts', 'router', 'norms', 'head')
    numbers = dict.fromkeys(order, 0)
    for name, parameter in model.named_parameters():
        numbers[part_of(name, parameter)] += parameter.numel()
    return {part: n for part, n in numbers.items() if n}


def attention_values(cfg, T, explicit):
    """How many values per token attention keeps for its backward pass, its input aside."""
    H, K, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    # the output of w_qkv is one tensor, which is kept as long as a part of it is: q, k or v
    fused = (H + 2 * K) * D
    if cfg.kv_rank:
        # the latents, before and after their norms; the shared key is in one tensor with its latent
        values = 2 * cfg.q_rank + 2 * cfg.kv_rank + cfg.rope_dim
        # q, k and v, padded to one width; the output without its padding
        values += 3 * H * D + H * cfg.v_dim
        # flash attention keeps its padded output too
        if not explicit:
            values += H * D
    elif explicit:
        # plain products copy q, k and v, for each of the H heads; and the output
        values = 3 * H * D + H * D
        # a norm keeps its input
        if cfg.qk_norm:
            values += fused
    else:
        # v, and with it the fused tensor; and the output
        values = fused + H * D
        # q and k are new tensors, once they are normed or rotated
        if cfg.qk_norm or cfg.pos == 'rope':
            values += (H + K) * D
    if explicit:
        values += H * T
    return values


def activation_bytes(cfg, layer, rows, T, explicit=False, bytes_per_value=2):
    """What the block of one layer keeps for its backward pass, of so many rows of T tokens.

    Each norm is taken for one kernel, as on a GPU. All values have the same width, but for the
    router's, which are fp32. Under autocast the residual stream would be fp32 too: each norm
    would then keep 2 C bytes more per token.

    For the GPT block this is s b h (32 + 2 a s / h), where 2 a s / h stands for explicit scores;
    dropout makes it 34 (Korthikanti, arXiv:2205.05198, eq. 1; dropped scores, which we don't
    have, would make it 34 + 5 a s / h).
    """
    C = cfg.n_embd
    # the norms' inputs, and their outputs, which the matrices read
    norms = 1 if cfg.wiring == 'parallel' else 2
    values = 2 * norms * C + attention_values(cfg, T, explicit)
    # in an MLP: gate, up, silu(gate) and their product; or up and gelu(up)
    inside = 4 if cfg.mlp == 'swiglu' else 2
    in_fp32 = 0
    if cfg.n_expert and layer >= cfg.n_dense:
        # per visit also the expert's input, its output, and its weighted output
        values += cfg.n_active * (inside * cfg.d_expert + 3 * C)
        values += cfg.n_shared * inside * cfg.d_expert
        # the router's probabilities, and a copy of its input
        in_fp32 = cfg.n_expert
        if bytes_per_value < 4:
            in_fp32 += C
    else:
        values += inside * cfg.d_ff
    # dropout remembers in one byte per value whether it was dropped
    masks = norms * C if cfg.dropout else 0
    return rows * T * (values * bytes_per_value + in_fp32 * 4 + masks)


class Costs:
    """What the tables of a plan share: the config, the cards, and what follows from both. Below
    it is called c."""

    def __init__(self, options, name):
        self.options, self.name = options, name
        self.cfg = find_config(name)
        self.T = options.context or self.cfg.block_size
        # the cards
        card = train.peak(options.hardware)
        if not card:
            raise Refusal(f'Unknown hardware {options.hardware}{prepare.nearest(options.hardware, train.PEAKS)}', 2)
        tflops = card['bf16'] or card['fp16'] or card['fp32']
        self.bytes_per_card = card['gb'] * 1e9
        self.capacity = self.bytes_per_card * options.gpus
        self.flops_per_s = tflops * 1e12 * options.gpus
        self.bytes_per_s = card['gbs'] * 1e9 * options.gpus
        # parameters: all of them, and those that one token meets
        self.parts = count_parameters(self.cfg)
        self.total = sum(self.parts.values())
        # the share of the experts that a token does not visit
        self.idle_share = 0
        if self.cfg.n_expert:
            self.idle_share = 1 - self.cfg.n_active / self.cfg.n_expert
        self.active = round(self.total - self.parts.get('experts', 0) * self.idle_share)
        # per token
        self.forward_flops = flops_per_token(self.cfg, self.T)
        self.cache_bytes = cache_bytes_per_token(self.cfg)

    def weights_read(self, rows):
        """How many weights a decoding step of so many rows reads. Positions are looked up, and so
        is the embedding, unless it is also the head. Experts are read if a row visits them."""
        looked_up = self.parts.get('positions', 0)
        if not self.cfg.tie:
            looked_up += self.parts['embedding']
        idle = self.parts.get('experts', 0) * self.idle_share ** rows
        return self.total - looked_up - idle


def section(title, *lines):
    """A Table from lines (name in the JSON, value, words)."""
    rows, facts = {}, {}
    for name, value, words in lines:
        rows[words] = {'': readable(name, value)}
        facts[name] = value
    return Table(title, rows, facts=facts, rows_in_json=False)


def plan_parameters(c):
    rows = {}
    for part, n in c.parts.items():
        rows[part] = dict(parameters=n, share=n / c.total)
    title = f'{c.name}: {c.total:,} parameters'
    if c.active < c.total:
        title += f', of which a token meets {c.active:,}'
    facts = dict(model=c.name, context=c.T, params=c.total, active_params=c.active, params_by_part=c.parts,
                 matmul_params=matmul_params(c.cfg))
    return Table(title, rows, facts=facts, rows_in_json=False)


def plan_flops(c):
    cfg, N = c.cfg, matmul_params(c.cfg)
    attention = c.forward_flops - 2 * N
    # attention costs 4 L T d; in most models d is n_embd
    d = cfg.n_head * (cfg.head_dim + cfg.v_dim) / 2
    in_blocks = N - cfg.n_embd * cfg.vocab_rows
    return section(
        f'FLOPs per token, T = {c.T:,}',
        ('matmul_flops_per_token', 2 * N,
         f'matrices, 2 N: N = {N:,} weights, with the head, without the embedding'),
        ('attention_flops_per_token', attention,
         'attention, 2 L T H (D_qk + D_v): all T x T scores, no window'),
        ('forward_flops_per_token', c.forward_flops, 'forward pass'),
        ('causal_forward_flops_per_token', 2 * N + attention / 2,
         'forward pass, with only the causal half of the scores'),
        ('training_flops_per_token', 3 * c.forward_flops, 'training, 3 x forward pass'),
        ('attention_overtakes_at', N / (2 * cfg.n_layer * d),
         'T at which attention costs as much as all matrices'),
        ('attention_overtakes_blocks_at', in_blocks / (2 * cfg.n_layer * d),
         "T at which attention costs as much as the blocks' matrices"),
        ('six_d', 6 * d, 'the same by the rule of thumb 6 d, for blocks of 12 d^2 weights'))


def plan_memory(c):
    cfg, T = c.cfg, c.T
    # activations of all blocks, for one row
    blocks = range(cfg.n_layer)
    flash = [activation_bytes(cfg, layer, 1, T) for layer in blocks]
    explicit = [activation_bytes(cfg, layer, 1, T, explicit=True) for layer in blocks]
    # each block keeps its input in 16 bits; one at a time keeps all the rest
    recomputed = cfg.n_layer * 2 * T * cfg.n_embd + max(flash)
    chunk = human(4 * Transformer.logits_at_once, 'B')
    cached = 'L (rank + rope)' if cfg.kv_rank else '2 L K D'
    lines = [
        ('weight_bytes_bf16', 2 * c.total, 'weights in bf16'),
        ('weight_bytes_fp32', 4 * c.total, 'weights in fp32'),
        ('training_state_bytes', 16 * c.total,
         "training: weights, gradients and Adam's two moments, 16 bytes per parameter"),
        ('training_state_bytes_per_gpu', 16 * c.total / c.options.gpus,
         f'the same per GPU, with FSDP over {c.options.gpus}'),
        ('activation_bytes_flash', sum(flash),
         f'activations of one row of {T:,} tokens in 16 bits, flash attention'),
        ('activation_bytes_explicit', sum(explicit), 'the same with explicit scores'),
        ('activation_bytes_recomputed', recomputed,
         'the same with flash attention and recomputed blocks'),
        ('logit_bytes_fp32', 4 * T * cfg.vocab_size,
         f'logits of one row in fp32, if made at once (nanoblock makes {chunk} at a time)'),
        ('kv_bytes_per_token', c.cache_bytes, f'cache per token, {cached} values of 2 bytes'),
        ('kv_bytes_per_sequence', c.cache_bytes * T, f'cache of {T:,} tokens'),
    ]
    if cfg.window:
        seen = min(T, cfg.window)
        lines.append(('kv_bytes_window_bound', c.cache_bytes * seen,
                      f'the same, if it held only the {seen:,} tokens that the window shows'))
    return section('Memory', *lines)


def plan_cards(c):
    options, B, T = c.options, c.options.batch, c.T
    # a step waits for the weights and the caches, or for the arithmetic
    read_s = (2 * c.weights_read(B) + B * T * c.cache_bytes) / c.bytes_per_s
    step_s = max(read_s, B * c.forward_flops / c.flops_per_s)
    # what the weights leave for caches
    room = max(0, c.capacity - 2 * c.total)
    tokens = options.tokens or 20 * c.active
    per_parameter = '' if options.tokens else ', 20 per active parameter'
    # training costs three times a forward pass
    hours = 3 * c.forward_flops * tokens / (c.flops_per_s * options.mfu) / 3600
    limits = f'{human(c.flops_per_s, "FLOP/s")}, {human(c.bytes_per_s, "B/s")}, {human(c.capacity, "B")}'
    title = f'{options.gpus} x {options.hardware}, if nothing is lost between cards: {limits}'
    if not room:
        title += f'; too few: the weights alone need {math.ceil(2 * c.total / c.bytes_per_card)}'
    lines = [
        ('decode_floor_s', 2 * c.weights_read(1) / c.bytes_per_s,
         'decoding one token: bytes of weights read / bandwidth'),
        ('decode_floor_with_cache_s', step_s,
         f'one decoding step, batch {B}, {T:,} tokens of cache per row'),
        ('tokens_per_s_at_most', B / step_s, 'tokens/s of such steps'),
        ('largest_batch', int(room // (c.cache_bytes * T)),
         f'largest batch, with {T:,} tokens of cache per row'),
        ('largest_context', int(room // (c.cache_bytes * B)),
         f'most tokens of cache per row, with batch {B}'),
        ('training_tokens', tokens, f'tokens to train on{per_parameter}'),
        ('training_hours', hours, f'hours of training at {options.mfu:.0%} MFU'),
        ('training_gpu_hours', hours * options.gpus, 'GPU hours of training'),
    ]
    if options.dollars_per_hour:
        lines.append(('training_dollars', hours * options.gpus * options.dollars_per_hour,
                      f'dollars at {options.dollars_per_hour:g} per GPU hour'))
    return section(title, *lines)


def plan(options, words):
    """Everything that follows from the config alone."""
    c = Costs(options, words[0] if words else 'gpt2')
    tables = [plan_parameters(c), plan_flops(c), plan_memory(c), plan_cards(c)]
    # tensor cores work in tiles
    odd = []
    for size in ('n_embd', 'd_ff', 'head_dim', 'vocab_rows'):
        if getattr(c.cfg, size) % 64:
            odd.append(f'{size} {getattr(c.cfg, size)}')
    tables[-1].facts['odd_sizes'] = odd
    if odd:
        tables[-1].notes.append(f'\nSlow on tensor cores, as not multiples of 64: {", ".join(odd)}.')
    return tables


# -------------------------------------------------------------------------------
# train


def training_shape(machine):
    """What is trained, a run of train.py that suits this device: its name, its Config, and the
    rows of a batch."""
    name, rows = 'owt-124m', 30
    if machine.device.type == 'cpu':
        name, rows = 'baby', 12
    return name, prepare.build(Config, {'vocab_size': 256, **train.RUNS[name]}), rows


def our_training(machine, rows, cfg, optimizer='adamw', compiled='no'):
    """A function that makes one update, always from the same random batch. compiled: 'blocks',
    as in train.py; 'whole', the model at once; or 'no'."""
    muon_steps = 3 if cfg.n_embd < 512 else 5
    settings = train.Settings(optimizer=optimizer, compile=compiled == 'blocks', muon_steps=muon_steps)
    torch.manual_seed(0)
    model = Transformer(cfg)
    if compiled == 'whole':
        model.compile()
    run = train.Run(model, settings, machine.device, machine.dtype)
    ids = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)
    return partial(run.update, [(ids, ids)])


def their_model(cfg, **more):
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_rows, hidden_size=cfg.n_embd, intermediate_size=cfg.d_ff, num_hidden_layers=cfg.n_layer,
        num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.block_size,
        tie_word_embeddings=cfg.tie, **more))


def their_training(machine, cfg, rows):
    """The same as our_training for transformers' Llama: a function that makes one update."""
    model = their_model(cfg, use_cache=False).to(machine.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    cast = nullcontext()
    if machine.dtype != torch.float32:
        cast = torch.autocast(machine.device.type, machine.dtype)
    # its users compile the model as a whole
    if machine.compiles:
        model.compile()
    ids = torch.randint(cfg.vocab_size, (rows, cfg.block_size), device=machine.device)

    def their_update():
        with cast:
            logits = model(input_ids=ids).logits
        F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return their_update


def has_transformers():
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    if prepare.find_spec('transformers'):
        return True
    print('transformers is not installed, so nothing is compared with it: pip install -r requirements-dev.txt')
    return False


def training_table(machine, updates, name, cfg, rows):
    """updates: {label: a function that makes one update}."""
    # the peak of a CPU, a matrix product, takes turns with the updates, and so meets the same noise
    functions = [machine.product, *updates.values()]
    product, *timings = measure(functions, machine.device, 4 * machine.options.repeats, warmup=3)
    machine.set_matmul_speed(product)
    T = cfg.block_size
    tokens, flops = rows * T, 3 * flops_per_token(cfg, T)
    title = (f'training, {name}, {rows} x {T} tokens of {human(flops, "FLOP")} each, AdamW unless said otherwise; '
             f'a matrix product between them: {machine.matmul_tflops:.3g} TFLOP/s')
    table = Table(title, {})
    for label, timing in zip(updates, timings):
        table.rows[label] = machine.speed(tokens, tokens * flops, timing)
    table.facts.update(machine.to_json(), training_shape=name, rows=rows, T=T, training_flops_per_token=flops)
    return table


def training(machine):
    """Updates: compiled and eager, with AdamW and Muon, with other parts, and transformers'."""
    name, cfg, rows = training_shape(machine)
    cfg = cfg.copy(qk_norm=False)  # Llama has none
    ours_of = partial(our_training, machine, rows)
    how, compiled = ('compiled', 'blocks') if machine.compiles else ('eager', 'no')
    ours, theirs = f'ours, {how}', f'transformers, {how}'
    # as train.py trains
    updates = {ours: ours_of(cfg, compiled=compiled), f'{ours}, Muon': ours_of(cfg, 'muon', compiled)}
    if machine.compiles:
        # as transformers is; train.py isn't, since compiling a whole model takes longer than it saves
        updates[f'{ours} as a whole'] = ours_of(cfg, compiled='whole')
    # what other parts cost, all without a compiler
    parallel, experts = 'parallel, eager', '8 experts, 2 per token, eager'
    updates['ours, eager'] = ours_of(cfg)
    updates[parallel] = ours_of(cfg.copy(wiring='parallel'))
    # the two experts that a token visits are together as wide as the plain MLP
    updates[experts] = ours_of(cfg.copy(n_expert=8, d_expert=cfg.d_ff // 2))
    if has_transformers():
        updates[theirs] = their_training(machine, cfg, rows)
    table = training_table(machine, updates, name, cfg, rows)
    ratio_note(table, parallel, 'ours, eager')
    ratio_note(table, experts, 'ours, eager')
    ratio_note(table, ours, theirs)
    ratio_note(table, f'{ours} as a whole', theirs)
    return [table]


# -------------------------------------------------------------------------------
# prefill


def inference_model(machine):
    """A Llama that reads and writes, its name and the model: one of 114 M parameters, or one of
    7 B on a GPU that can hold it. Its weights are random."""
    name = 'Llama of 114 M'
    cfg = Config(n_layer=12, n_embd=768, n_head=12, n_kv_head=4, d_ff=2048, vocab_size=50304, tie=True)
    if machine.device.type == 'cuda' and torch.cuda.get_device_properties(machine.device).total_memory > 44e9:
        name, cfg = 'llama2-7b', prepare.build(Config, prepare.published('llama2-7b'))
    torch.manual_seed(0)
    # made on the device: a CPU needs minutes for 7 B random numbers
    with machine.device:
        return name, Transformer(cfg).to(machine.dtype).eval()


@torch.no_grad()
def prefill_speed(machine, model, T):
    """The figures of reading one prompt of T tokens."""
    # the head is applied to the last token only
    head_flops = 2 * model.cfg.n_embd * model.cfg.vocab_rows
    flops = T * (flops_per_token(model.cfg, T) - head_flops) + head_flops
    prompt = torch.randint(model.cfg.vocab_size, (T,)).tolist()
    cache = KVCache(model.cfg, 1, T, machine.device, machine.dtype)

    def read_prompt():
        cache.truncate(0)
        model_file.prefill(model, [prompt], cache)
    timing, = measure([read_prompt], machine.device, machine.options.repeats)
    return machine.speed(T, flops, timing)


def prefill_table(machine, name, model, lengths):
    rows = {}
    for T in lengths:
        rows[f'prefill of {T}'] = prefill_speed(machine, model, T)
    return Table(f'prefill, {name}, one row', rows, facts=dict(shape=name))


def prefills(machine):
    """Reading prompts of several lengths."""
    name, model = inference_model(machine)
    return [prefill_table(machine, name, model, (64, 128, 256, 512, 1024))]


# -------------------------------------------------------------------------------
# decode

PROMPT = 64  # tokens


def intervals(marks):
    return [after - before for before, after in zip(marks, marks[1:])]


@torch.no_grad()
def our_decoding(machine, model, n, rows=1, kind=KVCache, step=None):
    """Seconds of each of n tokens after a prompt; reading the prompt is part of the first one's.
    kind: the class of the cache. step: the model, compiled; it needs a static KVCache."""
    more = dict(static=True) if step else {}
    cache = kind(model.cfg, rows, PROMPT + n, device=machine.device, dtype=machine.dtype, **more)
    prompt = torch.randint(model.cfg.vocab_size, (rows, PROMPT))
    marks = [time.perf_counter()]
    for _ in model_file.generate(model, prompt, n, temperature=0, cache=cache, step=step):
        synchronize(machine.device)
        marks.append(time.perf_counter())
    return intervals(marks)


class Clock:
    """A streamer for transformers' generate. Notes when it gets the prompt, and each token."""

    def __init__(self):
        self.marks = []

    def put(self, ids):
        self.marks.append(time.perf_counter())

    def end(self):
        pass


def their_decoding(machine, cfg, n):
    """A function that does the same with transformers' generate and its Llama of this shape."""
    from transformers import GenerationConfig
    model = their_model(cfg, eos_token_id=None, bos_token_id=None).to(machine.device, machine.dtype).eval()
    settings = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompt = torch.randint(cfg.vocab_size, (1, PROMPT), device=machine.device)

    def decode_once():
        clock = Clock()
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, generation_config=settings, streamer=clock)
        return intervals(clock.marks)
    return decode_once


def decode_table(machine, name, model, decoders, n):
    """decoders: {label: a function that decodes n tokens of one row and returns the seconds of
    each}. Every token reads all weights once, so the limit is the bandwidth."""
    # the functions take turns, as in measure()
    seconds_of = {label: [] for label in decoders}
    for _ in range(1 + max(3, machine.options.repeats // 2)):
        for label, decoder in decoders.items():
            seconds_of[label].append(decoder())
    weight_bytes = matmul_params(model.cfg) * model.embed.weight.element_size()
    rows = {}
    for label, runs in seconds_of.items():
        # the first run is a warm-up, and the first token reads the prompt
        runs = runs[1:]
        seconds, spread = median_and_spread([statistics.mean(tokens[1:]) for tokens in runs])
        first = statistics.median(tokens[0] for tokens in runs)
        rows[label] = dict(
            tokens_per_s=1 / seconds, ms=1e3 * seconds, spread=spread, read_bytes_per_s=weight_bytes / seconds,
            mbu=weight_bytes / seconds / machine.peak_gbs / 1e9, first_token_ms=1e3 * first)
    title = (f'decode, {name}, one row, {n} tokens after a prompt of {PROMPT}, greedy; '
             f'a token reads {human(weight_bytes, "B")}')
    return Table(title, rows, facts=dict(shape=name, prompt=PROMPT, new_tokens=n, weight_bytes=weight_bytes))


def batches_table(decoder):
    """What larger batches bring. decoder: our_decoding of a machine and a model."""
    table = Table('decode in batches, eager, one run each', {})
    for B in (1, 8, 32):
        # a short run to warm up
        decoder(3, rows=B)
        first, *others = decoder(30, rows=B)
        seconds = statistics.median(others)
        table.rows[f'batch {B}'] = dict(
            tokens_per_s=B / seconds, step_ms=1e3 * seconds, prefill_tokens_per_s=B * PROMPT / first)
    return table


def smoothed(times, reach=8):
    """Each time's median with its neighbours, in ms."""
    smooth = []
    for i in range(len(times)):
        window = times[max(0, i - reach):i + reach + 1]
        smooth.append(1e3 * statistics.median(window))
    return smooth


def positions_table(machine, model, decoder, step):
    """The time of a token against its position, with each kind of cache; also as a picture.
    decoder: our_decoding of a machine and a model. step: the compiled model, or None."""
    kinds = {'cache, eager': {}, 'paged cache, eager': dict(kind=sample.PagedKVCache)}
    if step:
        kinds['whole cache read, compiled'] = dict(step=step)
    table = Table('an early token and a late one, one run each', {})
    curves = {}
    for label, how in kinds.items():
        # the model is compiled anew for this length of cache
        if 'step' in how:
            decoder(500, **how)
        _, *times = decoder(500, **how)
        curves[label] = range(PROMPT + 1, PROMPT + 1 + len(times)), smoothed(times)
        early, late = statistics.median(times[:50]), statistics.median(times[-50:])
        table.rows[label] = dict(ms_at_65_to_114=1e3 * early, ms_at_514_to_563=1e3 * late, ratio=late / early)
    # without a cache, a token costs a forward pass over all tokens before it
    lengths = (64, 128, 256, 512)
    forwards = []
    for T in lengths:
        ids = torch.randint(model.cfg.vocab_size, (1, T), device=machine.device)
        forwards.append(partial(model, ids))
    with torch.no_grad():
        timings = measure(forwards, machine.device, 3, 1)
    curves['no cache'] = lengths, [1e3 * seconds for seconds, _ in timings]
    train.draw(os.path.join(machine.options.out, 'decode.png'), curves, title='time of a token against its position',
               xlabel='position', ylabel='ms per token', yscale='log', yticks=(10, 20, 50, 100, 200, 500))
    return table


def decodes(machine):
    """Writing: ours and transformers', in batches, and the time against the position."""
    name, model = inference_model(machine)
    decoder, n = partial(our_decoding, machine, model), 100
    step = sample.decode_step(model) if machine.compiles else None
    decoders = {'decode, eager': partial(decoder, n)}
    if step:
        decoders['decode, compiled'] = partial(decoder, n, step=step)
    # a second model of 7 B would not fit
    if name != 'llama2-7b' and has_transformers():
        decoders['transformers, eager'] = their_decoding(machine, model.cfg, n)
    table = decode_table(machine, name, model, decoders, n)
    ratio_note(table, 'decode, eager', 'transformers, eager')
    ratio_note(table, 'decode, compiled', 'transformers, eager')
    return [table, batches_table(decoder), positions_table(machine, model, decoder, step)]


# -------------------------------------------------------------------------------
# attention


def explicit_attention(q, k, v, mask, causal, scale=None):
    """The same result as model.attend, with the scores (B, H, T, S) written out, as flash
    attention never does."""
    if q.shape[1] != k.shape[1]:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)           # (B, H, S, D)
        v = v.repeat_interleave(group, dim=1)           # (B, H, S, D)
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
    """A context in which models use explicit_attention."""
    return patch.object(model_file, 'attend', explicit_attention)


def attention_row(machine, T):
    """Time and memory of both kinds of attention, forward and backward, at one length."""
    q, k, v = torch.randn(3, 1, 8, T, 64, device=machine.device, dtype=machine.dtype)
    inputs = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()

    def run_explicit():
        y = explicit_attention(*inputs, None, True)
        torch.autograd.grad(y.sum(), inputs)

    def run_sdpa():
        y = model_file.attend(*inputs, None, True)
        torch.autograd.grad(y.sum(), inputs)
    (explicit_s, _), (sdpa_s, _) = measure([run_explicit, run_sdpa], machine.device, machine.options.repeats)
    explicit_bytes, sdpa_bytes = most_bytes(run_explicit), most_bytes(run_sdpa)
    return dict(
        explicit_ms=1e3 * explicit_s, sdpa_ms=1e3 * sdpa_s, time_ratio=explicit_s / sdpa_s,
        explicit_bytes=explicit_bytes, sdpa_bytes=sdpa_bytes, memory_ratio=explicit_bytes / sdpa_bytes)


def attentions(machine):
    """Explicit scores against SDPA, over T."""
    lengths = [128, 256, 512, 1024, 2048]
    if machine.device.type == 'cuda':
        lengths += [4096, 8192]
    rows = {}
    for T in lengths:
        rows[f'T {T}'] = attention_row(machine, T)
    curves = {}
    for kind in ('explicit', 'sdpa'):
        curves[kind] = lengths, [row[f'{kind}_bytes'] / 1e6 for row in rows.values()]
    train.draw(os.path.join(machine.options.out, 'attention.png'), curves, title='memory of attention, 8 heads of 64',
               xlabel='T', ylabel='MB at once', xscale='log', yscale='log', xticks=lengths, yticks=(1, 10, 100, 1000))
    title = 'attention, forward and backward, 8 heads of 64, causal; bytes of the tensors that exist at once'
    return [Table(title, rows)]


# -------------------------------------------------------------------------------
# memory


def block_memory_table(cfg, device, B=4):
    """What a block keeps for its backward pass, measured and by the formula."""
    T = cfg.block_size
    block = model_file.Block(cfg, 0, None).to(device)
    x = torch.randn(B, T, cfg.n_embd, device=device, requires_grad=True)
    pos = torch.arange(T, device=device)[None]
    rows = {}
    for label, explicit in (('flash', False), ('explicit scores', True)):
        attention = with_explicit_attention() if explicit else nullcontext()
        with attention, saved_for_backward(block.parameters()) as saved:
            block(x, pos, None, None)
        kept = sum(saved.values())
        formula = activation_bytes(cfg, 0, B, T, explicit, bytes_per_value=4)
        rows[label] = dict(kept_bytes=kept, formula_bytes=formula, ratio=kept / formula)
    return Table(f'kept for the backward pass by a GPT block in fp32, {B} x {T} x {cfg.n_embd}, 8 heads', rows)


def recomputation_table(cfg, device, B=4):
    """What the backward pass of a whole model needs, with and without recomputation."""
    ids = torch.randint(256, (B, cfg.block_size), device=device)
    rows = {}
    for label, recomputed in (('all blocks kept', False), ('blocks recomputed', True)):
        model = Transformer(cfg).to(device).train()
        settings = train.Settings(compile=False, checkpoint_activations=recomputed)
        train.place(model, settings, device, torch.float32)

        def forward_and_backward():
            model(ids, ids).backward()
        with saved_for_backward(model.parameters()) as saved:
            model(ids, ids)
        rows[label] = dict(kept_bytes=sum(saved.values()), bytes_at_once=most_bytes(forward_and_backward))
    title = f'the same by {cfg.n_layer} such blocks and the head; and the most that exists at once, gradients included'
    return Table(title, rows)


def loss_memory_table(device):
    """What the loss of a large vocabulary needs, with logits whole and in chunks."""
    model = Transformer(Config(n_layer=1, n_head=4, n_embd=256, vocab_size=50304)).to(device)
    # it stands for the last block's output
    x = torch.randn(8, 1024, 256, device=device).requires_grad_()
    targets = torch.randint(50304, (8, 1024), device=device)

    def forward_and_backward():
        model.loss(x, targets).backward()
    rows = {}
    for label, logits_at_once in (('whole logits', 2 ** 62), ('chunks', Transformer.logits_at_once)):
        model.logits_at_once = logits_at_once
        # counting bytes takes time, so the seconds are those of a second run
        most = most_bytes(forward_and_backward)
        start = time.perf_counter()
        forward_and_backward()
        synchronize(device)
        rows[label] = dict(bytes_at_once=most, seconds=time.perf_counter() - start)
        model.zero_grad()
    for row in rows.values():
        row['share'] = row['bytes_at_once'] / rows['whole logits']['bytes_at_once']
    return Table('the loss of 8 x 1024 tokens in fp32, V 50304, forward and backward, one run each', rows)


def memories(machine):
    """What training holds in memory."""
    # large enough to show, small enough for any machine
    sizes = dict(n_head=8, n_embd=256, block_size=256, n_layer=8)
    cfg = prepare.build(Config, {**FAMILIES['gpt2'], **sizes})
    return [block_memory_table(cfg, machine.device), recomputation_table(cfg, machine.device),
            loss_memory_table(machine.device)]


# -------------------------------------------------------------------------------
# ladder

GPT, GQA = FAMILIES['gpt2'], {'n_kv_head': 2}
LATENT = {name: FAMILIES['deepseek'][name] for name in ('head_dim', 'rope_dim', 'v_dim', 'kv_rank')}
# what differs from the plain Llama block
RUNGS = {
    'post-norm, GELU, learned positions': {**GPT, 'wiring': 'post', 'tie': False},
    'pre-norm': {**GPT, 'tie': False},
    'RMSNorm, no biases': {'pos': 'learned', 'mlp': 'gelu'},
    'RoPE': {'mlp': 'gelu'},
    'SwiGLU': {},
    'GQA, 2 of 4 heads': GQA,
    # up to here SDPA makes plain products
    'flash attention': GQA,
    '+ 8 experts, 2 per token': {**GQA, 'n_expert': 8, 'd_expert': 192},
    'or latent attention': LATENT,
}


def climb(machine, name, changes, steps, B, T):
    """Trains one model of the ladder on the data set `name`; returns its figures."""
    meta = prepare.load_data(name)[-1]
    sizes = dict(n_layer=4, n_head=4, n_embd=128, block_size=T, vocab_size=meta['vocab_size'])
    cfg = prepare.build(Config, {**sizes, **changes})
    settings = train.Settings(optimizer='adamw', steps=steps, batch_tokens=B * T, compile=False, eval_tokens=2 ** 16)
    data = train.Data(name, cfg, settings, machine.device)
    # all rungs see the same batches, and start from the same weights as far as shapes allow
    torch.manual_seed(1)
    run = train.Run(Transformer(cfg), settings, machine.device, machine.dtype)
    times = []
    while run.step < steps:
        # reading a batch is not timed
        batch = data.batch(run.step)
        start = time.perf_counter()
        run.update(batch)
        synchronize(machine.device)
        times.append(time.perf_counter() - start)
    # the first updates are a warm-up
    seconds = statistics.median(times[10:])
    return dict(params=sum(p.numel() for p in run.model.parameters()),
                training_flops_per_token=3 * flops_per_token(cfg, T), cache_bytes_per_token=cache_bytes_per_token(cfg),
                tokens_per_s=B * T / seconds, loss=run.evaluate(data.windows()))


def ladder(machine, steps=300, B=12, T=64):
    """The same small model, one part changed at a time: what each part costs, and what it brings."""
    name = prepare.find_data()
    rows, flash = {}, False
    for label, changes in RUNGS.items():
        flash = flash or label == 'flash attention'
        attention = nullcontext() if flash else sdpa_kernel(SDPBackend.MATH)
        with attention:
            rows[label] = climb(machine, name, changes, steps, B, T)
    title = (f'{steps} updates of {B} x {T} tokens of {name}, AdamW, one seed, one run each; the cache in 16 bits; '
             'attention in plain products up to the rung of flash attention')
    return [Table(title, rows, facts=dict(data=name))]


# -------------------------------------------------------------------------------
# This machine at a glance, and the command line


def glance(machine):
    """The first figures of train, prefill and decode."""
    # training, with both optimizers
    name, cfg, rows = training_shape(machine)
    how, compiled = ('compiled', 'blocks') if machine.compiles else ('eager', 'no')
    updates = {}
    for optimizer in ('adamw', 'muon'):
        updates[f'ours, {how}, {optimizer}'] = our_training(machine, rows, cfg, optimizer, compiled)
    tables = [training_table(machine, updates, name, cfg, rows)]
    # reading and writing, eager: compiling would take longer than all the rest
    name, model = inference_model(machine)
    tables.append(prefill_table(machine, name, model, [256]))
    decoders = {'decode, eager': partial(our_decoding, machine, model, 30)}
    tables.append(decode_table(machine, name, model, decoders, 30))
    return tables


MODES = {'glance': glance, 'train': training, 'prefill': prefills, 'decode': decodes, 'attention': attentions,
         'memory': memories, 'ladder': ladder}


def main(argv):
    values = prepare.command_line(argv, __doc__, Options, words=2)
    mode, *words = values.pop('words') or ['glance']
    options = prepare.build(Options, values)
    if mode not in ('plan', *MODES):
        raise Refusal(f'Unknown mode {mode}{prepare.nearest(mode, ["plan", *MODES])}', 2)
    result = dict(mode=mode)
    if mode == 'plan':
        tables = plan(options, words)
    else:
        not_used = words + [f'--{name}' for name in PLAN_ONLY if name in values]
        if not_used:
            raise Refusal(f'{not_used[0]} is for plan alone: the other modes measure shapes of their own.', 2)
        machine = Machine(options)
        machine.introduce()
        result.update(machine.to_json())
        tables = MODES[mode](machine)
    # tables for people, then a line for programs
    for table in tables:
        table.print()
        result.update(table.to_json())
    if options.compare:
        comparison(result, options.compare).print()
    print(json.dumps(result))


if __name__ == '__main__':
    prepare.run(main)
