"""Text out of a checkpoint.

    python sample.py                                                the newest run, from an empty line
    python sample.py --out=out/baby --prompt="ROMEO:" --temperature=0.7
    python sample.py --out=best.pt --file=prompts.txt --num_samples=2 --stop="\\n\\n"

One row is shown as it grows; several are written in one batch, each shown when those before it are done. A row is the
same whatever else is in the batch. Text longer than the model's window goes on from the newest half of the window.
"""
import codecs
import glob
import os
import sys
from dataclasses import dataclass

import torch

import prepare
from model import KVCache, PagedKVCache, generate
from prepare import Refusal


@dataclass
class Options:
    out: str = ''              # checkpoint, or folder of a run; '' takes the newest run
    prompt: str = '\n'         # text to go on from; token ids where the model's tokenizer can't be had
    file: str = ''             # file of prompts, one a line, in place of --prompt
    num_samples: int = 1       # samples of each prompt
    max_new_tokens: int = 500  # length of a sample, in tokens
    temperature: float = 0.8   # 0 takes the likeliest token each time, 1 samples what the model says
    top_k: int = 0             # only the k likeliest tokens; 0: all
    top_p: float = 1.0         # only the likeliest tokens that make up this probability
    stop: str = ''             # a sample ends before this text; \n is a line end
    seed: int = 1337           # sample j of a prompt is drawn with seed + j
    paged: bool = False        # paged cache: rows that stop give their blocks back, and it is slower
    compile: bool = False      # compile the decoding step: worth it for long texts
    device: str = ''           # cuda, cuda:1, mps, cpu; '' takes the best there is
    dtype: str = ''            # bf16, fp16, fp32; '' takes the device's best

    def __post_init__(self):
        for name in ('num_samples', 'max_new_tokens'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}, but must be at least 1')
        if self.paged and self.compile:
            raise ValueError('the paged cache has no fixed shape to compile for: choose --paged or --compile')


class Row:
    """The text of one row: ids in, whole characters out, up to the stop text."""

    def __init__(self, tok, prompt, stop):
        self.tok, self.stop, self.text = tok, stop, prompt
        self.start, self.shown = len(prompt), 0
        self.decoder = codecs.getincrementaldecoder('utf-8')('replace')  # keeps half a character until it is whole
        self.done = False

    def add(self, token):
        """Takes one id; True when the row has come to its end."""
        if token == self.tok.eot:
            return self.end()
        self.text += self.decoder.decode(self.tok.decode([token]))
        where = self.text.find(self.stop, self.start) if self.stop else -1
        if where >= 0:
            self.text = self.text[:where]
            self.done = True
        return self.done

    def end(self):
        if not self.done:
            self.text += self.decoder.decode(b'', final=True)
        self.done = True
        return True

    def new_text(self):
        """What can be shown since the last call: all, but for an end that may become the stop text."""
        end = len(self.text)
        if not self.done:
            held = [n for n in range(1, len(self.stop)) if self.text.endswith(self.stop[:n], self.start)]
            end -= max(held, default=0)
        text, self.shown = self.text[self.shown:end], max(self.shown, end)
        return text


def newest_run():
    """The folder of the newest checkpoint under out/."""
    found = glob.glob(os.path.join(prepare.ROOT, 'out', '*', 'ckpt.pt'))
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


def main(argv):
    options = prepare.build(Options, prepare.command_line(argv, __doc__, Options))
    prompts = read_prompts(options)
    out = options.out or newest_run()
    model, checkpoint = prepare.load_model(out, options.device, options.dtype)
    tok, window = prepare.tokenizer(checkpoint['tokenizer']), model.cfg.block_size
    print(f'{out} | step {checkpoint.get("step", 0):,} | {model.embed.weight.device}', file=sys.stderr)
    if checkpoint['tokenizer'].get('why'):
        print(checkpoint['tokenizer']['why'], file=sys.stderr)
    bos = [checkpoint['tokenizer']['bos']] if 'bos' in checkpoint['tokenizer'] else []
    ids = [bos + tok.encode(prompt) for prompt in prompts]
    if not ids or not all(ids):
        raise Refusal('The prompt is empty: give at least one character with --prompt or --file.', code=2)
    for prompt, tokens in zip(prompts, ids):
        if len(tokens) > window:
            print(f'The prompt {prompt[:20]!r}... has {len(tokens)} tokens, the window {window}: the model reads the '
                  f'last {window}.', file=sys.stderr)
    if checkpoint['tokenizer']['kind'] == 'ids':
        prompts = [tok.decode(tokens).decode() for tokens in ids]  # a space after each
    rows = [Row(tok, p, options.stop.replace('\\n', '\n')) for p in prompts for _ in range(options.num_samples)]
    longest = min(window, max(map(len, ids)) + options.max_new_tokens)
    where = dict(device=model.embed.weight.device, dtype=model.embed.weight.dtype)
    if options.paged:
        cache = PagedKVCache(model.cfg, len(ids), longest, n_blocks=len(rows) * -(-longest // 16), **where)
    else:
        cache = KVCache(model.cfg, len(ids), longest, static=options.compile, **where)
    step = prepare.decode_step(model) if options.compile else None
    steps = generate(model, [torch.tensor(tokens) for tokens in ids], options.max_new_tokens, options.temperature,
                     options.top_k, options.top_p, options.seed, options.num_samples,
                     lambda row, token: rows[row].add(token), cache, step)
    current = 0  # the row being shown

    def show(finished=False):
        nonlocal current
        while current < len(rows):
            if len(rows) > 1 and not rows[current].shown:
                print('-' * 20)
            if finished:
                rows[current].end()
            print(rows[current].new_text(), end='', flush=True)
            if not rows[current].done:
                return
            print()
            current += 1

    try:
        for _ in steps:
            show()
    except ValueError as error:
        raise Refusal(f'{error}.', code=2) from None
    except FloatingPointError as error:
        raise Refusal(f'{error}.') from None
    show(finished=True)


if __name__ == '__main__':
    prepare.run(main)
