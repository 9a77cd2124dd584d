"""Text out of a checkpoint.

    python sample.py                                       the newest run, from an empty line
    python sample.py --out=out/baby --prompt="ROMEO:" --temperature=0.7
    python sample.py --out=best.pt --file=prompts.txt --num_samples=2 --stop="\\n\\n"

One row of text is shown as it grows. Several are written as one batch, and each is shown when those before
it have ended. A row is the same whatever else is in the batch. Text longer than the model's window goes
on from the newest half of the window.
"""
import codecs
import glob
import os
import sys
from dataclasses import dataclass
from functools import partial

import torch

import prepare
from model import KVCache, cache_shape, check_cache, generate
from prepare import Refusal

# -------------------------------------------------------------------------------
# A model, ready to write


def load_model(path, device='', dtype=''):
    """The model of a checkpoint, in eval mode, and the checkpoint, a dict. path: a file or a
    run's folder. The weights are read once, straight to the device. Raises Refusal."""
    device, dtype = prepare.pick_device(device, dtype)
    model, checkpoint = prepare.model_of(path)
    return model.to(device=device, dtype=dtype).eval(), checkpoint


def multiply_one_row(a, b):
    """a (1, n) times b (n, m), as a multiply and a sum. Other shapes are left to the library."""
    if a.shape[0] != 1:
        return NotImplemented
    return (a.mT * b).sum(0, keepdim=True)


def decode_step(model):
    """The model, compiled for steps of one token over a static KVCache: once, for every
    position.

    Where nothing can be compiled, the model itself, and one line on stderr says why.
    """
    if reason := prepare.no_compiler(model.embed.weight.device):
        print(f'not compiled: {reason}', file=sys.stderr)
        return model
    # how many tokens visit an expert is not known in advance, so a graph with experts is cut there
    options = dict(fullgraph=not model.cfg.n_expert, dynamic=False)
    if model.embed.weight.is_cuda:
        # the whole step becomes one graph of launches, which is replayed
        compiled = torch.compile(model, mode='reduce-overhead', **options)
    else:
        # A multiply and a sum reads the weights at the memory's full speed: 20 GB/s, where the library's
        # product of one row reads 11.
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table
        table = {**select_decomp_table(), torch.ops.aten.mm.default: multiply_one_row}
        compiled = torch.compile(model, backend=partial(compile_fx, decompositions=table), **options)

    def step(idx, cache):
        # these keep their addresses, or each replay of the graph would copy them first
        for tensor in (*cache.k, *cache.v, cache.lengths):
            torch._dynamo.mark_static_address(tensor)
        if model.rope is not None:
            model.rope.move_to(idx.device)
            torch._dynamo.mark_static_address(model.rope.cos)
            torch._dynamo.mark_static_address(model.rope.sin)
        return compiled(idx, cache=cache)
    return step


class PagedKVCache:
    """The interface of KVCache over a pool of n_blocks blocks of `block` tokens (0: enough for
    `batch` full rows). A row owns only the blocks that it has filled, and gives them back on
    truncate. That saves memory and costs time, since each update gathers the rows' blocks."""

    def __init__(self, cfg, batch, max_len, block=16, n_blocks=0, device=None, dtype=None):
        check_cache(cfg, max_len)
        self.max_len, self.block = max_len, block
        if n_blocks == 0:
            n_blocks = batch * blocks_for(max_len, block)
        key_shape, value_shape = cache_shape(cfg)

        def pool(heads, width):
            return torch.zeros(cfg.n_layer, n_blocks, heads, block, width, device=device, dtype=dtype)
        self.k = pool(*key_shape)    # (L, blocks, K, block, D)
        self.v = pool(*value_shape)  # (L, blocks, K, block, D)
        self.free = list(range(n_blocks))
        self.tables = [[] for _ in range(batch)]                 # each row's blocks, by position
        self.lengths = [0] * batch
        self.visible = 0

    def reserve(self, lengths, tables):
        """Grows the tables to hold rows of these lengths, and adopts both. A refusal changes
        nothing."""
        # how many blocks each row lacks
        missing = [blocks_for(n, self.block) - len(table) for n, table in zip(lengths, tables)]
        if max(lengths) > self.max_len:
            raise ValueError(f'{max(lengths)} tokens are more than the {self.max_len} that this cache '
                             'allows per row')
        if sum(missing) > len(self.free):
            raise ValueError(f'the cache needs {sum(missing)} more blocks of {self.block} tokens, but '
                             f'{len(self.free)} of {self.k.shape[1]} are free: give it more blocks, or '
                             'fewer or shorter rows')
        # nothing can fail any more
        for n, table in zip(missing, tables):
            for _ in range(n):
                table.append(self.free.pop())
        self.tables, self.lengths, self.visible = tables, lengths, max(lengths)

    def extend(self, T):
        start = self.lengths
        self.reserve([n + T for n in start], self.tables)
        # where the new tokens stand
        device = self.k.device
        new = torch.arange(T, device=device)                       # (T,)
        pos = torch.tensor(start, device=device)[:, None] + new    # (B, T)
        # tables of one length, filled up with block 0, which the mask hides
        longest = max(map(len, self.tables))
        filled = [table + [0] * (longest - len(table)) for table in self.tables]
        self.table = torch.tensor(filled, device=device)           # (B, blocks)
        self.slot_block = self.table.gather(1, pos // self.block)  # (B, T)
        self.slot_place = pos % self.block                         # (B, T)
        return pos

    def update(self, layer, k, v):
        return self.store_and_gather(self.k[layer], k), self.store_and_gather(self.v[layer], v)

    def store_and_gather(self, pool, new):
        """Stores new (B, K, T, D) in one layer's pool; returns all that is visible,
        (B, K, S, D)."""
        # a position is a block, and a place in it
        pool[self.slot_block, :, self.slot_place] = new.transpose(1, 2).to(pool.dtype)  # (B, T, K, D)
        seen = pool[self.table].transpose(1, 2)         # (B, K, blocks, block, D)
        seen = seen.flatten(2, 3)[:, :, :self.visible]  # (B, K, S, D)
        return seen.to(new.dtype)

    def truncate(self, length):
        # one length for all rows, or one per row
        keep = torch.as_tensor(length).expand(len(self.lengths)).tolist()
        self.lengths = [min(n, k) for n, k in zip(self.lengths, keep)]
        self.visible = max(self.lengths)
        # blocks that hold nothing any more go back
        for n, table in zip(self.lengths, self.tables):
            while len(table) > blocks_for(n, self.block):
                self.free.append(table.pop())

    def repeat(self, n):
        if n == 1:
            return
        # the first copy of a row keeps its blocks, the others get new ones with the same contents
        tables, lengths, source = [], [], []
        for table, length in zip(self.tables, self.lengths):
            source += table * n
            tables += [table, *([] for _ in range(n - 1))]
            lengths += [length] * n
        self.reserve(lengths, tables)
        # copy what the rows hold
        target = [block for table in self.tables for block in table]
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    @property
    def nbytes(self):
        a_block = self.k[:, 0].nbytes + self.v[:, 0].nbytes
        return a_block * sum(map(len, self.tables))


def blocks_for(n_tokens, block):
    return -(-n_tokens // block)


# -------------------------------------------------------------------------------
# Options and prompts


@dataclass
class Options:
    out: str = ''              # checkpoint, or folder of a run; '' takes the newest run
    prompt: str = '\n'         # text to go on from; token ids where the model's tokenizer can't be had
    file: str = ''             # file of prompts, one per line, in place of --prompt
    num_samples: int = 1       # samples of each prompt
    max_new_tokens: int = 500  # length of a sample, in tokens
    temperature: float = 0.8   # 0 takes the likeliest token each time, 1 samples what the model says
    top_k: int = 0             # only the k likeliest tokens; 0: all
    top_p: float = 1.0         # only the likeliest tokens that make up this probability
    stop: str = ''             # a sample ends before this text; \n is a line end
    seed: int = 1337           # sample j of a prompt is drawn with (seed, j)
    paged: bool = False        # paged cache: rows that end give their blocks back, and it is slower
    compile: bool = False      # compile the decoding step: worth it for long texts
    device: str = ''           # cuda, cuda:1, mps, cpu; '' takes the best there is
    dtype: str = ''            # bf16, fp16, fp32; '' takes the device's best

    def __post_init__(self):
        for name in ('num_samples', 'max_new_tokens'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}, but must be at least 1')
        if self.paged and self.compile:
            raise ValueError('the paged cache has no fixed shape to compile for: choose --paged or '
                             '--compile')


def newest_run():
    """The folder of the newest checkpoint under out/."""
    found = glob.glob(os.path.join(glob.escape(prepare.ROOT), 'out', '*', 'ckpt.pt'))
    if not found:
        raise Refusal('There is no checkpoint yet: run python train.py first, or name one with --out.')
    return os.path.dirname(max(found, key=os.path.getmtime))


def read_prompts(options):
    if not options.file:
        return [options.prompt]
    try:
        with open(options.file, encoding='utf-8') as file:
            return [line.rstrip('\n') for line in file if line.strip()]
    except OSError as error:
        raise Refusal(f'{options.file} can not be read: {error.strerror}.') from None
    except UnicodeDecodeError as error:
        raise Refusal(f'{options.file} is not UTF-8 at byte {error.start}.') from None


def encode_prompts(prompts, tokenizer, window):
    """Each prompt's ids, with the beginning-of-text id before them if the model has one."""
    bos = tokenizer.description.get('bos')
    encoded = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        if bos is not None:
            ids = [bos, *ids]
        if len(ids) > window:
            print(f'The prompt {prompt[:20]!r}... has {len(ids)} tokens, the window {window}: the model '
                  f'reads the last {window}.', file=sys.stderr)
        encoded.append(ids)
    if not encoded or not all(encoded):
        raise Refusal('The prompt is empty: give at least one character with --prompt or --file.', code=2)
    return encoded


# -------------------------------------------------------------------------------
# Rows of text


class Row:
    """The text of one row: ids in, whole characters out, up to the stop text."""

    def __init__(self, tokenizer, prompt, stop):
        self.tokenizer, self.stop, self.text = tokenizer, stop, prompt
        self.start = len(prompt)  # the stop text counts only behind the prompt
        self.shown = 0  # characters that new_text() has given out
        self.done = False
        # holds back half a character until the rest of it comes
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')

    def add(self, token):
        """Takes one id. The end-of-text id and the stop text end the row."""
        if token == self.tokenizer.eot:
            self.end()
            return
        self.text += self.decoder.decode(self.tokenizer.decode([token]))
        # the stop text itself is not shown
        where = self.text.find(self.stop, self.start) if self.stop else -1
        if where >= 0:
            self.text = self.text[:where]
            self.done = True

    def end(self):
        if not self.done:
            self.text += self.decoder.decode(b'', final=True)
        self.done = True

    def new_text(self):
        """What can be shown since the last call. An end that may become the stop text is held
        back."""
        end = len(self.text)
        if not self.done:
            # the longest such end
            for n in range(len(self.stop) - 1, 0, -1):
                if self.text.endswith(self.stop[:n], self.start):
                    end -= n
                    break
        text = self.text[self.shown:end]
        self.shown = max(self.shown, end)
        return text


class Screen:
    """Shows the rows one after the other, each as far as it is known."""

    def __init__(self, rows):
        self.rows, self.current = rows, 0

    def show(self):
        while self.current < len(self.rows):
            row = self.rows[self.current]
            if len(self.rows) > 1 and row.shown == 0:
                print('-' * 20)
            print(row.new_text(), end='', flush=True)
            # the next row waits until this one has ended
            if not row.done:
                return
            print()
            self.current += 1


def write_rows(rows, steps, alive):
    """Feeds the steps, (B,) ids each, to the rows and shows them. A row that is done is no
    longer alive."""
    screen = Screen(rows)
    for tokens in steps:
        for r, token in enumerate(tokens.tolist()):
            if alive[r]:
                rows[r].add(token)
                alive[r] = not rows[r].done
        screen.show()
    # the rows that no stop text has ended
    for row in rows:
        row.end()
    screen.show()


def make_cache(model, options, n_prompts, longest):
    """The cache that the options ask for, `longest` tokens per row."""
    where = dict(device=model.embed.weight.device, dtype=model.embed.weight.dtype)
    if options.paged:
        n_blocks = n_prompts * options.num_samples * blocks_for(longest, 16)
        return PagedKVCache(model.cfg, n_prompts, longest, n_blocks=n_blocks, **where)
    return KVCache(model.cfg, n_prompts, longest, static=options.compile, **where)


def main(argv):
    options = prepare.build(Options, prepare.command_line(argv, __doc__, Options))
    prompts = read_prompts(options)
    # the model
    out = options.out or newest_run()
    model, checkpoint = load_model(out, options.device, options.dtype)
    tokenizer = prepare.make_tokenizer(checkpoint['tokenizer'])
    print(f'{out} | step {checkpoint.get("step", 0):,} | {model.embed.weight.device}', file=sys.stderr)
    if 'why' in tokenizer.description:
        print(tokenizer.description['why'], file=sys.stderr)
    # the prompts
    ids = encode_prompts(prompts, tokenizer, model.cfg.block_size)
    if tokenizer.description['kind'] == 'ids':
        prompts = [tokenizer.decode(tokens).decode() for tokens in ids]  # numbers, a space after each
    stop = options.stop.replace('\\n', '\n')
    rows = [Row(tokenizer, prompt, stop) for prompt in prompts for _ in range(options.num_samples)]
    # the text
    longest = min(model.cfg.block_size, max(map(len, ids)) + options.max_new_tokens)
    alive = [True] * len(rows)
    try:
        steps = generate(
            model, [torch.tensor(tokens) for tokens in ids], options.max_new_tokens,
            options.temperature, options.top_k, options.top_p, options.seed, options.num_samples, alive,
            cache=make_cache(model, options, len(ids), longest),
            step=decode_step(model) if options.compile else None)
        write_rows(rows, steps, alive)
    except ValueError as error:
        raise Refusal(f'{error}.', code=2) from None
    except FloatingPointError as error:
        raise Refusal(f'{error}.') from None


if __name__ == '__main__':
    prepare.run(main)
