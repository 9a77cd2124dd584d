"""Everything that crosses the border: command lines, devices, files, tokenizers, data sets, checkpoints.

    python prepare.py                tinyshakespeare, the default
    python prepare.py my.txt         a text of your own
    python prepare.py stdlib         the source of this Python's standard library: needs no network
    python prepare.py openwebtext    GPT-2's corpus in gpt2 tokens, a download of 13 GB; --docs=N takes a slice
"""
import base64
import difflib
import errno
import functools
import hashlib
import inspect
import json
import lzma
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import requests
import tiktoken
import torch

from model import Config, Transformer

ROOT = os.path.dirname(os.path.abspath(__file__))
OPENWEBTEXT = 'https://zenodo.org/records/3834942/files/openwebtext.tar.xz'

# ---- Failures and the command line ----------------------------------------------------------------------------------


class Refusal(Exception):
    """An expected failure: one sentence with its cure. `code` is the exit code, 2 for wrong usage."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


CURES = {errno.ENOSPC: 'free some space and run the same command again',
         **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
                         'choose another path, or change its permissions')}


def run(main):
    """Runs main(arguments). Expected failures end in one sentence; a programming error keeps its traceback."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
        return
    except Refusal as error:
        sentence, code = error, error.code
    except KeyboardInterrupt:
        sentence, code = 'Stopped.', 130
    except BrokenPipeError:
        os._exit(1)  # whoever read our output has left (`| head`); a normal exit would write to it once more
    except OSError as error:
        if error.errno not in CURES:
            raise
        sentence, code = f'{error.strerror} ({error.filename or "while writing"}): {CURES[error.errno]}.', 1
    print(sentence, file=sys.stderr)
    sys.exit(code)


def nearest(word, known):
    """The end of a sentence about an unknown word."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f'; did you mean {close[0]}?' if close else '.'


BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def parse(kind, text):
    """The value of an option, or an error. Whole numbers may be written 1e5 or 600_000."""
    if kind is bool:
        return BOOLS[text.lower()]
    if kind is int and set(text.lower()) & set('.einf'):
        if not float(text).is_integer():
            raise ValueError
        return int(float(text))
    value = kind(text)
    if kind is float and math.isnan(value):
        raise ValueError
    return value


def command_line(argv, about, *classes, presets=None, words=0):
    """The options that argv mentions, {name: value}: presets from left to right, then flags, wherever they stand.
    Options are the fields of the dataclasses. Up to `words` bare words that are no presets come back as 'words'."""
    presets, kinds = presets or {}, {}
    for cls in classes:
        assert not kinds.keys() & get_type_hints(cls).keys(), f'{cls.__name__} repeats an option'
        kinds |= get_type_hints(cls)
    values, flags, rest = {'words': []} if words else {}, {}, list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word[2:].partition('=')
        if word in ('-h', '--help'):
            print(help_text(about, classes, presets))
            sys.exit(0)
        elif word in presets:
            values |= presets[word]
        elif not word.startswith('-') and len(values.get('words', ())) < words:
            values['words'].append(word)
        elif not word.startswith('--') or name not in kinds:
            raise Refusal(f'Unknown option {word}{nearest(word, [*presets, *("--" + kind for kind in kinds)])}', code=2)
        else:
            if not equals and kinds[name] is bool and (not rest or rest[0].lower() not in BOOLS):
                text = 'true'
            elif not equals and (not rest or rest[0].startswith('--')):
                raise Refusal(f'--{name} needs a value: --{name}=...', code=2)
            elif not equals:
                text = rest.pop(0)
            try:
                flags[name] = parse(kinds[name], text)
            except (KeyError, ValueError, OverflowError):
                raise Refusal(f'--{name} takes a value of type {kinds[name].__name__}, not {text}.', code=2) from None
    return values | flags


def help_text(about, classes, presets):
    lines = [about.strip(), ''] + [f'  {name:18}' + ' '.join(f'--{key}={value}' for key, value in values.items())
                                   for name, values in presets.items()] + ['']
    for cls in classes:  # the comment beside a field is its help
        comments = dict(re.findall(r'^    (\w+): .*?  # *(.*)$', inspect.getsource(cls), re.MULTILINE))
        lines += [f'  {f"--{f.name}={f.default}":26}{comments.get(f.name, "")}' for f in fields(cls)]
    return '\n'.join(lines)


def build(cls, values):
    """The dataclass, from those of the values that are its fields."""
    try:
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
    except ValueError as error:
        raise Refusal(f'{error}.', code=2) from None


# ---- Device and precision -------------------------------------------------------------------------------------------

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32,
          'bfloat16': torch.bfloat16, 'float16': torch.float16, 'float32': torch.float32}


def pick_device(device='', dtype=''):
    """The torch.device and torch.dtype to compute with: the fastest here where nothing is asked for."""
    gpus = [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    mps = torch.backends.mps.is_available()
    device = str(device) or ('cuda' if gpus else 'mps' if mps else 'cpu')
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}: choose one of {", ".join(DTYPES)}.', code=2)
    try:
        cuda = torch.device(device).type == 'cuda'
        bf16 = not cuda or torch.cuda.is_bf16_supported(including_emulation=False)
        picked = DTYPES[dtype or ('fp32' if not cuda else 'bf16' if bf16 else 'fp16')]
        x = torch.ones(2, 2, device=device, dtype=picked)
        x.mm(x).sum().item()  # the honest test
        if picked == torch.bfloat16 and not bf16:
            raise RuntimeError('this GPU has no bf16')
    except (RuntimeError, AssertionError, TypeError):
        raise Refusal(f'{device} {f"in {dtype} " if dtype else ""}does not work here: choose --device from '
                      f'{", ".join(gpus + ["mps"] * mps + ["cpu"])}, or another --dtype.') from None
    return torch.device(device), picked


def no_compiler(device):
    """Why torch.compile can't work on this device, in a few words; '' if it can. It looks where PyTorch looks."""
    compiler = os.environ.get('CXX', {'win32': 'cl', 'darwin': 'clang++'}.get(sys.platform, 'g++'))
    if device.type == 'cuda':  # triton builds its launcher with a C compiler
        compiler = os.environ.get('CC') or next(filter(shutil.which, ('clang', 'gcc', 'cl')), 'gcc')
    if device.type == 'mps':
        return 'untried on mps'
    if device.type == 'cuda' and not find_spec('triton'):
        return 'triton is not installed'
    if not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')):
        return 'this Python came without its C headers'
    if not shutil.which(compiler):
        return f'no compiler {compiler} found'
    return ''


# ---- Files ----------------------------------------------------------------------------------------------------------


def read_text(path):
    """The text of a file, '' where there is none."""
    return Path(path).read_text(encoding='utf-8') if os.path.exists(path) else ''


def show(text, last=False):
    """A line that overwrites itself on a terminal; a log gets only the last one."""
    terminal = sys.stdout.isatty()
    if last or terminal:
        print('\r' * terminal + text.ljust(78 * terminal), end='\n' if last else '', flush=True)


@contextmanager
def write_atomically(path):
    """A binary file to write. Whoever reads `path` finds the old file or the whole new one, never half of one.
    What a killed process leaves is overwritten by the next write."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        with open(f'{path}.tmp', 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(f'{path}.tmp', path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(f'{path}.tmp')
        raise


def fetch_rest(url, part, headers):
    """One request for what the file `part` still lacks; yields (bytes so far, bytes in all or 0) as they come."""
    note = part + '.version'  # of which file on the server the bytes so far are
    have = os.path.getsize(part) if os.path.exists(note) and os.path.exists(part) else 0
    headers = {**(headers or {}), 'Accept-Encoding': 'identity', **({'Range': f'bytes={have}-'} if have else {})}
    with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as answer:
        span = answer.headers.get('Content-Range', '')
        size = (span or answer.headers.get('Content-Length', '')).rpartition('/')[2]
        whole = int(size) if size.isdecimal() else 0
        version = f'{answer.headers.get("ETag")} {whole}'
        if answer.status_code == 416 and have == whole:
            return
        if answer.status_code == 416 or answer.status_code == 206 and version != read_text(note):
            os.truncate(part, 0)
            raise requests.ConnectionError('the file has changed')
        answer.raise_for_status()
        with open(part, 'ab' if answer.status_code == 206 else 'wb') as file:  # 200: the whole, ranges or not
            Path(note).write_text(version, encoding='utf-8')
            for block in answer.iter_content(1 << 16):
                file.write(block)
                file.flush()
                yield file.tell(), whole
            if whole and file.tell() != whole:
                raise requests.ConnectionError('cut short')


def fetch(url, part, headers=None):
    """Grows the file `part` until it holds all of `url`, going on where a cut, or an earlier run, left off."""
    failures, patience, most = 0, 1, 0  # a machine without network learns it at once; a cut is worth waiting for
    while True:
        try:
            for have, whole in fetch_rest(url, part, headers):
                if have > most:
                    failures, patience, most = 0, 8, have
                yield have, whole
            return
        except requests.RequestException as error:
            failures += 1
            if failures >= patience:
                status = f'HTTP status {error.response.status_code}' if error.response is not None else 'no connection'
                raise Refusal(f'Could not download {url} ({status}): run it again later, or place the file at '
                              f'{part.removesuffix(".part")} by hand.') from None
        time.sleep(2 ** failures)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(url, path, sha256='', size=0, headers=None):
    """Makes `path` the file at `url`, unless it is already. What lies there afterwards is whole and checked."""
    def right(file):
        return (not size or os.path.getsize(file) == size) and (not sha256 or sha256_of(file) == sha256)

    if os.path.exists(path) and right(path):
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    for have, whole in fetch(url, path + '.part', headers):
        show(f'{os.path.basename(path)}: {have / 1e6:.1f} of {whole / 1e6:.1f} MB', last=have == whole)
    if not right(path + '.part'):
        os.remove(path + '.part')
        raise Refusal(f'{url} is not the file expected (size or SHA-256 differs), so it was removed: run it again '
                      f'later, or place the right one at {path} by hand.')
    finish_download(path)


def finish_download(path):
    os.replace(path + '.part', path)
    os.remove(path + '.part.version')


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


def tokenizer(description):
    """A tokenizer from its description, the plain dict that data sets and checkpoints store. It has .description,
    .vocab_size, .eot (the id that ends a text, or None), .encode(text) -> ids, .decode(ids) -> bytes, which may end
    inside a character. Names of special tokens are ordinary text; an id out of range decodes to U+FFFD."""
    kind, eot = description['kind'], None
    if kind == 'bytes':
        vocab_size, encode, piece = 256, lambda text: list(text.encode('utf-8', 'replace')), lambda i: bytes([i])
    elif kind == 'ids':  # of a model whose tokenizer tiktoken can't express: numbers in, numbers out
        vocab_size, piece = description['vocab_size'], lambda i: b'%d ' % i

        def encode(text):
            ids = [int(word) if word.isdecimal() else -1 for word in text.split()]
            if not all(0 <= i < vocab_size for i in ids):
                raise Refusal(f'Write token ids, 0 to {vocab_size - 1}, with spaces between: {description["why"]}')
            return ids
    else:
        bpe = tiktoken_encoding(description)
        vocab_size, encode, piece = bpe.n_vocab, bpe.encode_ordinary, bpe.decode_single_token_bytes
        eot = bpe.eot_token if kind == 'tiktoken' else description['eot']

    def decode(ids):
        text = b''
        for i in ids:
            try:
                text += piece(int(i))
            except (KeyError, ValueError, OverflowError):
                text += '\ufffd'.encode()
        return text

    return SimpleNamespace(description=description, vocab_size=vocab_size, eot=eot, encode=encode, decode=decode)


def tiktoken_encoding(description):
    if description['kind'] == 'bpe':
        ranks = dict(line.split() for line in description['ranks'].splitlines() if line)
        return tiktoken.Encoding('bpe', pat_str=description['pattern'], special_tokens=description['special'],
                                 mergeable_ranks={base64.b64decode(word): int(rank) for word, rank in ranks.items()})
    name = description['name']
    if name not in tiktoken.list_encoding_names():
        raise Refusal(f'Unknown tokenizer {name}{nearest(name, ["bytes", *tiktoken.list_encoding_names()])}', code=2)
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError):  # OSError covers all that requests raises
        raise Refusal(f'tiktoken can not fetch its {name} files: connect to the network once or set TIKTOKEN_CACHE_DIR '
                      "to a copy of another machine's tiktoken cache, or use --tokenizer=bytes.") from None


def named_tokenizer(name):
    return tokenizer({'kind': 'bytes'} if name == 'bytes' else {'kind': 'tiktoken', 'name': name})


# ---- Data sets ------------------------------------------------------------------------------------------------------


def data_folder(name):
    """data/NAME beside this file, whatever the current folder; a name with a separator, or of a folder, is a path."""
    ours = os.path.join(ROOT, 'data', name)
    return name if re.search(r'[/\\]', name) or os.path.isdir(name) and not os.path.isdir(ours) else ours


def load_data(name):
    """The training tokens, the validation tokens, both memory-mapped, and meta.json of a prepared data set."""
    folder, splits = data_folder(name), []
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        what = name if name in DATA_SETS or name.endswith('.txt') else f'{os.path.basename(name)}.txt'
        raise Refusal(f'There is no finished data set in {folder}; make it with: python prepare.py {what}')
    meta = json.loads(read_text(os.path.join(folder, 'meta.json')))
    for split in ('train', 'val'):
        path, dtype = os.path.join(folder, f'{split}.bin'), np.dtype(meta['dtype']).newbyteorder('<')
        if not os.path.exists(path) or os.path.getsize(path) != meta[f'{split}_tokens'] * dtype.itemsize:
            raise Refusal(f'{path} is missing or not as long as meta.json says; prepare the data set again.')
        splits.append(np.memmap(path, dtype, mode='r'))
    return *splits, meta


def write_dataset(folder, tok, source, chunks):
    """A data set from `chunks` of (split, ids, bytes of text), in order. An older one stays until this one is whole;
    meta.json comes last, so a set without it is unfinished."""
    train_path, val_path, meta_path = (os.path.join(folder, name) for name in ('train.bin', 'val.bin', 'meta.json'))
    dtype = 'uint16' if tok.vocab_size <= 65536 else 'uint32'
    counts = {'train_tokens': 0, 'val_tokens': 0, 'train_bytes': 0, 'val_bytes': 0}
    with write_atomically(train_path) as train, write_atomically(val_path) as val:
        for split, ids, text_bytes in chunks:
            (train if split == 'train' else val).write(np.asarray(ids, np.dtype(dtype).newbyteorder('<')).tobytes())
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_bytes'] += text_bytes
        if min(counts['train_tokens'], counts['val_tokens']) < 2:
            raise Refusal(f'{source} is empty or too short: training and validation text need 2 tokens each, but have '
                          f'{counts["train_tokens"]} and {counts["val_tokens"]}; take more text.')
        with suppress(FileNotFoundError):
            os.remove(meta_path)
    meta = {'tokenizer': tok.description, 'vocab_size': tok.vocab_size, 'dtype': dtype, **counts, 'source': source,
            'sha256': {'train': sha256_of(train_path), 'val': sha256_of(val_path)}}
    with write_atomically(meta_path) as file:
        file.write(json.dumps(meta, indent=1).encode())
    print(f'{folder}: {counts["train_tokens"]:,} tokens to train on, {counts["val_tokens"]:,} to validate on')
    return folder


def prepare_text(path, tokenizer_name='bytes', out='', val_fraction=0.1):
    """A data set from a UTF-8 file, named after it; the end of the text is for validation."""
    try:
        text = Path(path).read_bytes().decode().removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')
    except UnicodeDecodeError as error:
        raise Refusal(f'{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}: convert '
                      f'first, for example: iconv -f latin1 -t utf-8 {path} > utf8.txt') from None
    except OSError as error:
        raise Refusal(f'Can not read the text {path} ({error.strerror}){nearest(path, DATA_SETS)}') from None
    tok, cut, step = named_tokenizer(tokenizer_name), int(len(text) * (1 - val_fraction)), 1 << 24
    parts = (('train', text[:cut]), ('val', text[cut:]))
    pieces = ((split, part[i:i + step]) for split, part in parts for i in range(0, len(part), step))  # saves memory
    return write_dataset(data_folder(out or os.path.join(ROOT, 'data', Path(path).stem)), tok, path,
                         ((split, tok.encode(piece), len(piece.encode())) for split, piece in pieces))


def prepare_shakespeare(tokenizer_name='bytes', out='', val_fraction=0.1):
    raw = os.path.join(ROOT, 'data', 'tinyshakespeare', 'input.txt')
    download('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt', raw,
             '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
    return prepare_text(raw, tokenizer_name, out or os.path.dirname(raw), val_fraction)


def prepare_stdlib(tokenizer_name='bytes', out='', val_fraction=0.1):
    """The modules directly in this Python's standard library: text that is there without a network."""
    raw = os.path.join(ROOT, 'data', 'stdlib', 'input.txt')
    with write_atomically(raw) as file:
        for path in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')):
            if not path.name.startswith('_sysconfigdata'):
                file.write(path.read_bytes())
    return prepare_text(raw, tokenizer_name, out or os.path.dirname(raw), val_fraction)


class GrowingFile:
    """A download as a stream: what `part` holds already, then what comes."""

    def __init__(self, url, part):
        self.coming, self.file = fetch(url, part), open(part, 'ab+')  # noqa: SIM115
        self.file.seek(0)
        self.close = self.file.close

    def read(self, size):
        block = self.file.read(size)
        while not block and next(self.coming, None):
            block = self.file.read(size)
        return block


def members(stream):
    """The files in a .tar.xz as streams, in order. Its end is read too: a cut archive must not pass for a whole one."""
    with lzma.open(stream) as plain, tarfile.open(fileobj=plain, mode='r|') as tar:
        yield from (tar.extractfile(member) for member in tar if member.isfile())
        while plain.read(1 << 16):
            pass


def documents(stream):
    """OpenWebText's texts, in order: the archive is a .tar.xz of .tar.xz, and in these one file is one document."""
    return (file.read().decode('utf-8', 'replace') for archive in members(stream) for file in members(archive))


def tokenize_documents(name, first, texts):
    """Runs in a worker: chunks for write_dataset. Every 2000th document of the corpus is for validation."""
    tok = named_tokenizer(name)  # a batch is large and tiktoken keeps its encodings, so this costs nothing
    end = tok.encode('\n\n') if tok.eot is None else [tok.eot]
    return [('train' if i % 2000 else 'val', np.array(tok.encode(text) + end, np.uint32), len(text.encode()))
            for i, text in enumerate(texts, first)]


def tokenize_in_parallel(name, texts):
    """tokenize_documents on all cores, in order; few batches are on their way at once, so memory is constant."""
    cores, first, waiting, tokens, start = min(os.cpu_count() or 1, 60), 0, [], 0, time.time()
    with ProcessPoolExecutor(cores, get_context('spawn')) as pool:
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the workers: Ctrl-C is for this process
        for _ in range(cores):
            pool.submit(abs, 0)
        signal.signal(signal.SIGINT, usual)
        while (batch := list(islice(texts, 200))) or waiting:
            if batch:
                waiting.append(pool.submit(tokenize_documents, name, first, batch))
                first += len(batch)
            if len(waiting) > 2 * cores or not batch:
                chunks = waiting.pop(0).result()
                tokens += sum(len(ids) for _, ids, _ in chunks)
                show(f'{first:,} documents, {tokens:,} tokens, {tokens / (time.time() - start):,.0f} tokens/s',
                     last=first % 100_000 == 0)
                yield from chunks


def prepare_openwebtext(tokenizer_name='gpt2', out='', docs=0, source=''):
    """OpenWebText from its archive, tokenized while it downloads, or from an archive at hand. docs: only so many."""
    ours = os.path.join(ROOT, 'data', 'openwebtext')
    folder, path = data_folder(out or ours), source or os.path.join(ours, 'openwebtext.tar.xz')
    growing = not source and not os.path.exists(path)
    if source and not os.path.isfile(source):
        raise Refusal(f'There is no archive {source}: give --source the path of openwebtext.tar.xz.')
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    stream = GrowingFile(OPENWEBTEXT, path + '.part') if growing else open(path, 'rb')  # noqa: SIM115
    try:
        chunks = tokenize_in_parallel(tokenizer_name, islice(documents(stream), docs if docs > 0 else None))
        write_dataset(folder, named_tokenizer(tokenizer_name), f'{docs or "all"} documents of {source or OPENWEBTEXT}',
                      chunks)
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        stream.close()
        if growing:
            os.remove(path + '.part')
        raise Refusal(f'{path} is cut short or damaged ({error}): delete it and get it again.') from None
    stream.close()
    if growing and docs <= 0:
        finish_download(path)
    return folder


# ---- Checkpoints ----------------------------------------------------------------------------------------------------


def save_checkpoint(path, checkpoint):
    try:
        with write_atomically(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:  # what torch makes of a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error


def load_checkpoint(path):
    """The dict in a checkpoint file, or in ckpt.pt of a folder; its tensors stay on disk until they are used."""
    path = os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise Refusal(f'There is no checkpoint {path}; train one first, or give the path of another.')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        if not isinstance(checkpoint, dict) or not {'config', 'model'} <= checkpoint.keys():
            raise ValueError
    except PermissionError:
        raise
    except Exception:  # noqa: BLE001  a file of another kind can fail anywhere
        raise Refusal(f'{path} is truncated or no checkpoint of nanoblock; published weights need: '
                      'python prepare.py weights') from None
    return checkpoint


def load_weights(model, weights, assign=False):
    """Puts a checkpoint's tensors into a model, copied or, with `assign`, as they are; names and shapes must fit."""
    expected, weights = model.state_dict(), dict(weights)
    if model.cfg.tie:
        weights['lm_head.weight'] = weights.get('embed.weight')
    wrong = [f'{name} is missing' for name in expected if weights.get(name) is None]
    wrong += [f'{name} is not known' for name in weights.keys() - expected.keys()]
    wrong += [f'{name} is {tuple(weights[name].shape)}, not {tuple(expected[name].shape)}' for name in expected
              if weights.get(name) is not None and weights[name].shape != expected[name].shape]
    if wrong:
        raise Refusal(f'The weights do not fit their config: {"; ".join(sorted(wrong)[:5])}.')
    model.load_state_dict(weights, assign=assign)
    if model.cfg.tie:
        model.lm_head.weight = model.embed.weight  # assigning made them two


def load_model(path, device='', dtype=''):
    """A model in eval mode and the checkpoint it is from. The weights are read once, straight to their place."""
    device, dtype = pick_device(device, dtype)
    checkpoint = load_checkpoint(path)
    try:
        with torch.device('meta'):
            model = Transformer(Config(**checkpoint['config']))
    except (TypeError, ValueError) as error:
        raise Refusal(f'{path} has a config that this model.py does not know: {error}.') from None
    load_weights(model, checkpoint['model'], assign=True)
    return model.to(device=device, dtype=dtype).eval(), checkpoint


# ---- The command ----------------------------------------------------------------------------------------------------


@dataclass
class Options:
    tokenizer: str = ''        # bytes or an encoding of tiktoken, such as gpt2; default bytes, for openwebtext gpt2
    out: str = ''              # a name under data/ or a folder; default the name of the data set
    val_fraction: float = 0.1  # of a text: its end, kept for validation
    docs: int = 0              # openwebtext: stop after this many documents
    source: str = ''           # openwebtext: an archive at hand


DATA_SETS = {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib, 'openwebtext': prepare_openwebtext}
PUBLISHED = {}
COMMANDS = {}  # first word -> function of the words after it


def main(argv):
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    values = command_line(argv, __doc__, Options, words=1)
    name = (values.pop('words') or ['tinyshakespeare'])[0]
    wishes = {'tokenizer_name' if key == 'tokenizer' else key: value for key, value in values.items()}
    prepare = DATA_SETS.get(name) or functools.partial(prepare_text, name)
    if not_for_it := wishes.keys() - inspect.signature(prepare).parameters.keys():
        raise Refusal(f'--{min(not_for_it)} is not for {name}.', code=2)
    return prepare(**wishes)


def peak_tflops(device, dtype):
    return None


if __name__ == '__main__':
    run(main)
