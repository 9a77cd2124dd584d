"""Everything that crosses the border: command lines, devices, files, tokenizers, data sets, checkpoints.

    python prepare.py                tinyshakespeare, the default
    python prepare.py my.txt         a text of your own
    python prepare.py stdlib         the source of this Python's standard library: needs no network
    python prepare.py openwebtext    GPT-2's corpus in gpt2 tokens, a download of 13 GB; --docs=N takes a slice
    python prepare.py weights SRC --out=DIR    published weights to DIR/ckpt.pt. SRC: a folder with config.json and
        *.safetensors, or with Meta's consolidated.00.pth and params.json; a .bin of llama2.c; a ckpt.pt of nanoGPT; or
        the name of a model on the Hugging Face hub (HF_TOKEN for gated ones)
    python prepare.py export SRC --to=DIR      a checkpoint, or a folder with one, to a folder for transformers, vLLM,
        llama.cpp
"""
import base64
import difflib
import errno
import hashlib
import inspect
import json
import lzma
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import unicodedata
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import requests
import tiktoken
import torch

from model import FAMILIES, Config, Transformer

ROOT = os.path.dirname(os.path.abspath(__file__))
OPENWEBTEXT = 'https://zenodo.org/records/3834942/files/openwebtext.tar.xz'

# ---- Failures and the command line ----------------------------------------------------------------------------------


class Refusal(Exception):
    """An expected failure: one sentence with its cure. `code` is the exit code, 2 for wrong usage."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


CURES = {errno.ENOSPC: 'free some space and run the same command again, train.py with --resume=true',
         **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
                         'choose another path, or change its permissions')}


def run(main):
    """Runs main(arguments). Expected failures end in one sentence; a programming error keeps its traceback."""
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors='replace')  # a console that can't show a character is no reason to stop
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
    Options are the fields of the dataclasses. Up to `words` bare words that are no presets come back as 'words', the
    names of the presets, where there are any, as 'presets'."""
    presets, kinds = presets or {}, {}
    for field in (field for cls in classes for field in fields(cls)):
        assert field.name not in kinds, f'{field.name} repeats an option'
        kinds[field.name] = field.type
    values, flags, used, rest = {'words': []} if words else {}, {}, [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word[2:].partition('=')
        if word in ('-h', '--help'):
            print(help_text(about, classes, presets))
            sys.exit(0)
        elif word in presets:
            values |= presets[word]
            used.append(word)
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
    return values | flags | ({'presets': used} if presets else {})


def help_text(about, classes, presets):
    """The module's docstring, what each preset changes, and each field with its default and the comment beside it."""
    defaults = {field.name: field.default for cls in classes for field in fields(cls)}
    comments = {name: comment for cls in classes for name, comment in re.findall(
        r'^    (\w+): .*?  # *(.*)$', inspect.getsource(cls), re.MULTILINE)}
    changes = {name: {key: value for key, value in values.items() if value != defaults.get(key)}
               for name, values in presets.items()}
    lines = [f'  {name:18}' + ' '.join(f'--{key}={value}' for key, value in changed.items())
             for name, changed in changes.items()]
    shown = {name: repr(value).strip("'") for name, value in defaults.items()}  # a line end as \\n
    options = [f'  {f"--{name}={value}":26}{comments.get(name, "")}' for name, value in shown.items()]
    return '\n'.join([about.strip(), '', *lines, '', *options])


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


# Dense figures, never the sparse ones: TFLOP/s in bf16, fp16 and fp32 (None: no such units, or no figure), GB/s, GB.
# Sources: NVIDIA's data sheets of the V100, T4, A10, L4, A100, RTX A6000, L40S, H100, H200, GH200 and HGX B200, its
# white papers on GA102, Ada and RTX Blackwell for GeForce, AWS on the A10G; AMD's data sheets of the MI250X and MI300X;
# Apple's announcements. fp32 is torch's default, without TF32. On GeForce the 16-bit figure is that with fp32
# accumulation, half the headline. torch sees an MI250X as two devices of half its figures.

PEAKS = {  # words that the driver's name has -> figures; the first entry that fits counts
    'V100 PCIE': (None, 112, 14.0, 900, 16), 'V100': (None, 125, 15.7, 900, 16), 'T4': (None, 65, 8.1, 320, 16),
    'A10G': (70, 70, 35, 600, 24), 'A10': (125, 125, 31.2, 600, 24), 'L4': (121, 121, 30.3, 300, 24),
    'A100 SXM4 80GB': (312, 312, 19.5, 2039, 80), 'A100 80GB': (312, 312, 19.5, 1935, 80),
    'A100': (312, 312, 19.5, 1555, 40), 'A6000': (154.8, 154.8, 38.7, 768, 48), 'L40S': (362, 362, 91.6, 864, 48),
    '3090': (71, 71, 35.6, 936, 24), '4090': (165.2, 165.2, 82.6, 1008, 24), '5090': (209.5, 209.5, 104.8, 1792, 32),
    'H100 PCIe': (756, 756, 51.2, 2039, 80), 'H100 NVL': (835, 835, 60, 3938, 94), 'H100': (989, 989, 66.9, 3350, 80),
    'H200 NVL': (835, 835, 60, 4800, 141), 'H200': (989, 989, 66.9, 4800, 141),
    'GH200 144G': (989, 989, 66.9, 4900, 144), 'GH200': (989, 989, 66.9, 4000, 96),
    'B200': (2250, 2250, 75, 8000, 180),
    'MI250X': (191.5, 191.5, 47.9, 1638, 64), 'MI300X': (1307, 1307, 163.4, 5300, 192),
    'M1 Pro': (None, None, 5.2, 200, 32), 'M1 Max': (None, None, 10.4, 400, 64), 'M1 Ultra': (None, None, 21, 800, 128),
    'M1': (None, None, 2.6, 68, 16), 'M2 Pro': (None, None, None, 200, 32), 'M2 Max': (None, None, None, 400, 96),
    'M2 Ultra': (None, None, None, 800, 192), 'M2': (None, None, 3.6, 100, 24), 'M3 Pro': (None, None, None, 150, 36),
    'M3': (None, None, None, 100, 24)}
ANOTHER_CARD = {'TI', 'SUPER', 'D', 'LAPTOP', 'MAX', 'Q', 'MIG', 'ADA', 'GRID'}  # with one of these words it is


def peak(name):
    """The figures of a device, by the name that its driver prints or a short one; None if it is not in the table."""
    words = set(re.split(r'[\s-]+', name.strip().upper()))
    for entry, figures in PEAKS.items():
        wanted = set(entry.upper().split())
        if wanted <= words and not ANOTHER_CARD & (words - wanted):
            return dict(zip(('bf16', 'fp16', 'fp32', 'gbs', 'gb'), figures))
    return None


def device_name(device):
    """As the driver prints it; of a CPU, 'cpu'."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    if device.type == 'mps':
        return subprocess.run(['sysctl', '-n', 'machdep.cpu.brand_string'], stdout=subprocess.PIPE,
                              text=True).stdout.strip()
    return 'cpu'


def peak_tflops(device, dtype):
    """Dense TFLOP/s of a device in a torch.dtype; None where the table has none."""
    figures = peak(device_name(device)) or {}
    return figures.get({torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.float32: 'fp32'}[dtype])


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


def draw(path, curves, **settings):
    """Curves, {label: (xs, ys)}, as a picture, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    axes = Figure(figsize=(7, 4)).subplots()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, marker='.' if len(xs) < 20 else None)
    axes.set(**settings)
    axes.legend()
    with write_atomically(path) as file:
        axes.figure.savefig(file, format='png', dpi=120)


def fetch_rest(url, part, headers):
    """One request for what the file `part` still lacks; yields (bytes so far, bytes in all or 0) as they come."""
    note = part + '.version'  # of which file on the server the bytes so far are
    have = os.path.getsize(part) if os.path.exists(note) and os.path.exists(part) else 0
    if have and read_text(note).endswith(f' {have}'):  # all of it
        return
    asked = {**(headers or {}), 'Accept-Encoding': 'identity', **({'Range': f'bytes={have}-'} if have else {})}
    with requests.get(url, headers=asked, stream=True, timeout=(10, 60)) as answer:
        span = answer.headers.get('Content-Range', '')
        size = (span or answer.headers.get('Content-Length', '')).rpartition('/')[2]
        whole = int(size) if size.isdecimal() else 0
        version = f'{answer.headers.get("ETag")} {whole}'
        if have and (answer.status_code == 416 or answer.status_code == 206 and version != read_text(note)):
            os.remove(note)  # the file has changed: all of it again
            yield from fetch_rest(url, part, headers)
            return
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
        if description.get('nfc'):  # Qwen's texts are normalized first
            def encode(text):
                return bpe.encode_ordinary(unicodedata.normalize('NFC', text))
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


@cache
def named_tokenizer(name):
    """The tokenizer of the command line's --tokenizer: bytes, an encoding of tiktoken, or that of a checkpoint."""
    if name not in ('bytes', *tiktoken.list_encoding_names()) and os.path.exists(name):
        return tokenizer(load_checkpoint(name)['tokenizer'])
    return tokenizer({'kind': 'bytes'} if name == 'bytes' else {'kind': 'tiktoken', 'name': name})


# ---- Data sets ------------------------------------------------------------------------------------------------------


def data_folder(name):
    """data/NAME beside this file, whatever the current folder; a name with a separator, or of a folder, is a path."""
    ours = os.path.join(ROOT, 'data', name)
    return name if re.search(r'[/\\]', name) or os.path.isdir(name) and not os.path.isdir(ours) else ours


def load_data(name):
    """The training tokens, the validation tokens, both memory-mapped, and meta.json of a prepared data set."""
    folder, splits = data_folder(Path(name).stem if name.endswith('.txt') else name), []
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


def find_data(wish=''):
    """The name of the data set asked for; Shakespeare and stdlib are made when missing. Without a wish Shakespeare or,
    where that can't be downloaded, the source of this Python's standard library."""
    name, makers = wish or 'tinyshakespeare', {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib}
    try:
        if name in makers and not os.path.exists(os.path.join(data_folder(name), 'meta.json')):
            makers[name]()
    except Refusal as error:
        if wish:
            raise
        print(f'{error} Until then this trains on the source of Python\'s standard library.')
        return find_data('stdlib')
    return name


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


def prepare_text(path, tokenizer='bytes', out='', val_fraction=0.1):
    """A data set from a UTF-8 file, named after it; the end of the text is for validation."""
    try:
        text = Path(path).read_bytes().decode().removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')
    except UnicodeDecodeError as error:
        raise Refusal(f'{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}: convert '
                      f'first, for example: iconv -f latin1 -t utf-8 {path} > utf8.txt') from None
    except OSError as error:
        raise Refusal(f'Can not read the text {path} ({error.strerror}){nearest(path, DATA_SETS)}') from None
    if not 0 < val_fraction < 1:
        raise Refusal(f'val_fraction is {val_fraction}, but must be between 0 and 1.', code=2)
    tok, cut, step = named_tokenizer(tokenizer), int(len(text) * (1 - val_fraction)), 1 << 24
    parts = (('train', text[:cut]), ('val', text[cut:]))
    pieces = ((split, part[i:i + step]) for split, part in parts for i in range(0, len(part), step))  # saves memory
    return write_dataset(data_folder(out or os.path.join(ROOT, 'data', Path(path).stem)), tok, path,
                         ((split, tok.encode(piece), len(piece.encode())) for split, piece in pieces))


def prepare_shakespeare(tokenizer='bytes', out='', val_fraction=0.1):
    raw = os.path.join(ROOT, 'data', 'tinyshakespeare', 'input.txt')
    download('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt', raw,
             '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


def prepare_stdlib(tokenizer='bytes', out='', val_fraction=0.1):
    """The modules directly in this Python's standard library: text that is there without a network."""
    raw = os.path.join(ROOT, 'data', 'stdlib', 'input.txt')
    with write_atomically(raw) as file:
        for path in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')):
            if not path.name.startswith('_sysconfigdata'):
                file.write(path.read_bytes())
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


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
    tok = named_tokenizer(name)
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
                     last=not waiting or batch and first % 100_000 == 0)
                yield from chunks


def prepare_openwebtext(tokenizer='gpt2', out='', docs=0, source=''):
    """OpenWebText from its archive, tokenized while it downloads, or from an archive at hand. docs: only so many."""
    ours = os.path.join(ROOT, 'data', 'openwebtext')
    folder, path = data_folder(out or ours), source or os.path.join(ours, 'openwebtext.tar.xz')
    growing = not source and not os.path.exists(path)
    if source and not os.path.isfile(source):
        raise Refusal(f'There is no archive {source}: give --source the path of openwebtext.tar.xz.')
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        with closing(GrowingFile(OPENWEBTEXT, path + '.part') if growing else open(path, 'rb')) as stream:
            chunks = tokenize_in_parallel(tokenizer, islice(documents(stream), docs if docs > 0 else None))
            what = f'{docs or "all"} documents of {source or OPENWEBTEXT}'
            write_dataset(folder, named_tokenizer(tokenizer), what, chunks)
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        if growing:
            os.remove(path + '.part')
        raise Refusal(f'{path} is cut short or damaged ({error}): delete it and get it again.') from None
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


def intact(read, path, what='file of its kind: get it again'):
    """What read(path) returns; a file of another kind can make it fail anywhere."""
    try:
        return read(path)
    except (OSError, Refusal):
        raise
    except Exception:
        raise Refusal(f'{path} is truncated or no {what}.') from None


def read_torch(path, *keys, what):
    """The dict in a file of torch.save, refused without these keys. Its tensors stay on disk until they are used."""
    def read(path):
        found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        if not found.keys() >= {*keys}:
            raise ValueError
        return found
    return intact(read, path, what)


def load_checkpoint(path):
    """The dict in a checkpoint file, or in ckpt.pt of a folder."""
    path = os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise Refusal(f'There is no checkpoint {path}; train one first, or give the path of another.')
    return read_torch(path, 'config', 'model', what='checkpoint of nanoblock; published weights need: '
                                                    'python prepare.py weights')


def check_shapes(tensors, expected):
    """Refuses tensors, {name: tensor}, whose names and shapes are not those of `expected`."""
    want, have = ({name: tuple(tensor.shape) for name, tensor in state.items()} for state in (expected, tensors))
    wrong = [f'{name} is {have.get(name, "missing")}, not {want.get(name, "known")}'
             for name in {**want, **have} if have.get(name) != want.get(name)]
    if wrong:
        raise Refusal(f'The weights do not fit their config: {"; ".join(wrong[:5])}.')


def load_weights(model, weights, assign=False):
    """Puts a checkpoint's tensors into a model, copied or, with `assign`, as they are."""
    check_shapes(weights, model.state_dict())
    model.load_state_dict(weights, assign=assign)


def model_of(path):
    """A checkpoint's model, whose weights are still on disk, and the checkpoint."""
    checkpoint = load_checkpoint(path)
    try:
        with torch.device('meta'):
            model = Transformer(Config(**checkpoint['config']))
    except (TypeError, ValueError) as error:
        raise Refusal(f'{path} has a config that this model.py does not know: {error}.') from None
    load_weights(model, checkpoint['model'], assign=True)
    return model, checkpoint


def load_model(path, device='', dtype=''):
    """A model in eval mode and the checkpoint it is from. The weights are read once, straight to their place."""
    device, dtype = pick_device(device, dtype)
    model, checkpoint = model_of(path)
    return model.to(device=device, dtype=dtype).eval(), checkpoint


def decode_step(model):
    """The model compiled for steps of one token over a static KVCache: compiled once, for every position. On a CPU a
    product with one row becomes a multiply-and-sum, which reads the weights at the memory's full speed (20 GB/s where
    the library's product reads 11); on a GPU the step is one graph of launches, replayed."""
    def one_row(a, b):
        return (a.mT * b).sum(0, keepdim=True) if a.shape[0] == 1 else NotImplemented

    if reason := no_compiler(model.embed.weight.device):
        print(f'not compiled: {reason}', file=sys.stderr)
        return model
    options = dict(fullgraph=not model.cfg.n_expert, dynamic=False)
    if model.embed.weight.is_cuda:
        compiled = torch.compile(model, mode='reduce-overhead', **options)
    else:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table
        table = {**select_decomp_table(), torch.ops.aten.mm.default: one_row}
        compiled = torch.compile(model, backend=partial(compile_fx, decompositions=table), **options)

    def step(idx, cache):
        for tensor in (*cache.k, *cache.v, cache.lengths):
            torch._dynamo.mark_static_address(tensor)  # or a replayed graph would copy the whole cache at every step
        return compiled(idx, cache=cache)
    return step


# ---- Published models -----------------------------------------------------------------------------------------------


def sizes(*columns, **more):
    return dict(zip(('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'd_ff', 'vocab_size', 'block_size'), columns), **more)


PUBLISHED = {  # family; layers, heads, key/value heads (0: as heads), width, MLP width (0: 4 times), vocabulary, length
    'gpt2': ('gpt2', sizes(12, 12, 0, 768, 0, 50257, 1024)),
    'gpt2-medium': ('gpt2', sizes(24, 16, 0, 1024, 0, 50257, 1024)),
    'gpt2-large': ('gpt2', sizes(36, 20, 0, 1280, 0, 50257, 1024)),
    'gpt2-xl': ('gpt2', sizes(48, 25, 0, 1600, 0, 50257, 1024)),
    'gpt3-175b': ('gpt2', sizes(96, 96, 0, 12288, 0, 50257, 2048)),
    'llama-7b': ('llama', sizes(32, 32, 0, 4096, 11008, 32000, 2048, norm_eps=1e-6)),
    'llama2-7b': ('llama', sizes(32, 32, 0, 4096, 11008, 32000, 4096)),
    'llama2-13b': ('llama', sizes(40, 40, 0, 5120, 13824, 32000, 4096)),
    'llama2-70b': ('llama', sizes(80, 64, 8, 8192, 28672, 32000, 4096)),
    'llama3-8b': ('llama3', sizes(32, 32, 8, 4096, 14336, 128256, 8192)),
    'llama3-70b': ('llama3', sizes(80, 64, 8, 8192, 28672, 128256, 8192)),
    'llama3.1-8b': ('llama3.1', sizes(32, 32, 8, 4096, 14336, 128256, 131072)),
    'mistral-7b': ('mistral', sizes(32, 32, 8, 4096, 14336, 32000, 32768, window=4096)),
    'mixtral-8x7b': ('mixtral', sizes(32, 32, 8, 4096, 14336, 32000, 32768)),
    'qwen2-7b': ('qwen2', sizes(28, 28, 4, 3584, 18944, 152064, 131072)),
    'qwen3-8b': ('qwen3', sizes(36, 32, 8, 4096, 12288, 151936, 40960, head_dim=128)),
    'deepseek-v2-lite': ('deepseek', sizes(
        27, 16, 0, 2048, 10944, 102400, 163840, head_dim=192, rope_dim=64, v_dim=128, kv_rank=512, n_expert=64,
        n_active=6, d_expert=1408, rope_scaling='yarn,40,4096,32,1,0.707,0.707'))}


def published(name):
    """The Config fields of a published model: its family's switches and its own sizes."""
    family, own = PUBLISHED[name]
    return {**FAMILIES[family], **own}


# ---- Published weights ----------------------------------------------------------------------------------------------
# Each tensor of ours stacks the rows of one or more published ones. These tables say which, for both directions, with
# {} for the number of a layer or an expert.

LLAMA = {'embed': 'model.embed_tokens', 'norm': 'model.norm', 'lm_head': 'lm_head', 'block': 'model.layers.{}.',
         'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
         'attn.w_qkv': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj', 'attn.w_out': 'self_attn.o_proj',
         'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
         'mlp.w_up': 'mlp.gate_proj mlp.up_proj', 'mlp.w_down': 'mlp.down_proj'}
MIXTRAL = {**LLAMA, 'mlp.router': 'block_sparse_moe.gate', 'expert.w_down': 'block_sparse_moe.experts.{}.w2',
           'expert.w_up': 'block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3'}
DEEPSEEK = {**LLAMA, 'attn.w_q_latent': 'self_attn.q_a_proj', 'attn.q_norm': 'self_attn.q_a_layernorm',
            'attn.w_q': 'self_attn.q_proj', 'attn.w_kv_latent': 'self_attn.kv_a_proj_with_mqa',
            'attn.kv_norm': 'self_attn.kv_a_layernorm', 'attn.w_kv': 'self_attn.kv_b_proj', 'mlp.router': 'mlp.gate',
            'mlp.shared.w_up': 'mlp.shared_experts.gate_proj mlp.shared_experts.up_proj',
            'mlp.shared.w_down': 'mlp.shared_experts.down_proj', 'expert.w_down': 'mlp.experts.{}.down_proj',
            'expert.w_up': 'mlp.experts.{}.gate_proj mlp.experts.{}.up_proj'}
META = {'embed': 'tok_embeddings', 'norm': 'norm', 'lm_head': 'output', 'block': 'layers.{}.',
        'attn_norm': 'attention_norm', 'attn.w_qkv': 'attention.wq attention.wk attention.wv',
        'attn.w_out': 'attention.wo', 'mlp_norm': 'ffn_norm', 'mlp.w_up': 'feed_forward.w1 feed_forward.w3',
        'mlp.w_down': 'feed_forward.w2'}
GPT2 = {'embed': 'transformer.wte', 'embed_pos': 'transformer.wpe', 'norm': 'transformer.ln_f', 'lm_head': 'lm_head',
        'block': 'transformer.h.{}.', 'attn_norm': 'ln_1', 'attn.w_qkv': 'attn.c_attn', 'attn.w_out': 'attn.c_proj',
        'mlp_norm': 'ln_2', 'mlp.w_up': 'mlp.c_fc', 'mlp.w_down': 'mlp.c_proj'}
GPT1 = {**GPT2, 'embed': 'transformer.tokens_embed', 'embed_pos': 'transformer.positions_embed'}
BUFFERS = re.compile(r'(transformer\.)?(h\.\d+\.attn\.(masked_)?bias|position_ids)|rope\.(freqs|weight)|'
                     r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')  # masks and tables in old files

# What config.json calls our fields, and what its other fields must be; None: absent will do. Export writes the first.
SIZES = dict(vocab_size='vocab_size', block_size='max_position_embeddings', n_layer='num_hidden_layers',
             n_embd='hidden_size', n_head='num_attention_heads', n_kv_head='num_key_value_heads', head_dim='head_dim',
             d_ff='intermediate_size', norm_eps='rms_norm_eps', tie='tie_word_embeddings')
GPT_SIZES = dict(vocab_size='vocab_size', block_size='n_positions', n_layer='n_layer', n_embd='n_embd',
                 n_head='n_head', norm_eps='layer_norm_epsilon', tie='tie_word_embeddings')
MAY_MISS = ('head_dim', 'num_key_value_heads', 'n_inner', 'tie_word_embeddings')
SILU, NO = {'hidden_act': ('silu', None)}, (False, None)
ALWAYS = dict(quantization_config=(None,), attention_bias=NO, mlp_bias=NO, use_sliding_window=NO,
              is_causal=(True, None), partial_rotary_factor=(None, 1.0))
Architecture = namedtuple('Architecture', 'type family names form fields needs')
ARCHITECTURES = {  # form: 'conv1d' has matrices transposed, 'pairs' has the two of a rotary pair side by side
    'GPT2LMHeadModel': Architecture('gpt2', 'gpt2', GPT2, 'conv1d', dict(GPT_SIZES, d_ff='n_inner'), dict(
        activation_function=('gelu_new', 'gelu_pytorch_tanh', None), scale_attn_weights=(True, None),
        scale_attn_by_inverse_layer_idx=NO, reorder_and_upcast_attn=NO, add_cross_attention=NO)),
    'OpenAIGPTLMHeadModel': Architecture('openai-gpt', 'gpt1', GPT1, 'conv1d', GPT_SIZES, {'afn': ('gelu', None)}),
    'LlamaForCausalLM': Architecture('llama', 'llama', LLAMA, '', SIZES, SILU),
    'MistralForCausalLM': Architecture('mistral', 'mistral', LLAMA, '', dict(SIZES, window='sliding_window'), SILU),
    'MixtralForCausalLM': Architecture('mixtral', 'mixtral', MIXTRAL, '', dict(
        SIZES, window='sliding_window', d_expert='intermediate_size', n_expert='num_local_experts',
        n_active='num_experts_per_tok'), SILU),
    'Qwen2ForCausalLM': Architecture('qwen2', 'qwen2', LLAMA, '', SIZES, SILU),
    'Qwen3ForCausalLM': Architecture('qwen3', 'qwen3', LLAMA, '', SIZES, SILU),
    'DeepseekV2ForCausalLM': Architecture('deepseek_v2', 'deepseek', DEEPSEEK, 'pairs', dict(
        SIZES, head_dim='qk_nope_head_dim', rope_dim='qk_rope_head_dim', v_dim='v_head_dim', kv_rank='kv_lora_rank',
        q_rank='q_lora_rank', n_expert='n_routed_experts', n_active='num_experts_per_tok', n_shared='n_shared_experts',
        d_expert='moe_intermediate_size', n_dense='first_k_dense_replace', expert_scale='routed_scaling_factor'), dict(
        SILU, topk_method=('greedy', None), norm_topk_prob=NO, scoring_func=('softmax', None), n_group=(1, None),
        topk_group=(1, None), moe_layer_freq=(1, None), rms_norm_eps=(1e-6,))),  # its latents' norms have no other
    'CohereForCausalLM': Architecture('cohere', 'palm', LLAMA, 'pairs', dict(SIZES, norm_eps='layer_norm_eps'), dict(
        SILU, logit_scale=(1.0,), use_qk_norm=NO))}
ROPE = {'default': (), 'linear': ('factor',),
        'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
        'yarn': ('factor', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim')}


def unsupported(field, value, supported):
    return Refusal(f'{field} is {value!r}, but nanoblock supports {" or ".join(map(repr, supported))} here.')


def rope_from(config, base=None):
    """Our rope fields from a config.json: from rope_theta and rope_scaling, or from the newer rope_parameters."""
    length = config.get('original_max_position_embeddings') or config.get('max_position_embeddings')
    given = {**(config.get('rope_scaling') or {}), **(config.get('rope_parameters') or {})}
    kind, m, m_all = (given.get(field) for field in ('rope_type', 'mscale', 'mscale_all_dim'))
    kind = kind or given.get('type', 'default')
    if kind not in ROPE:
        raise unsupported('rope_type', kind, ROPE)
    for field in given.keys() - {'rope_theta', 'rope_type', 'type', *ROPE['llama3'], *ROPE['yarn']}:
        if given[field] is not None:
            raise unsupported(f'{field} of rope', given[field], [None])
    if not (m and m_all or m in (None, 1) and not m_all):  # transformers and DeepSeek's own code disagree
        raise unsupported('mscale', m, [m_all or 1])
    known = dict(rope_theta=config.get('rope_theta', base), original_max_position_embeddings=length, beta_fast=32,
                 beta_slow=1, mscale=1, mscale_all_dim=0)
    known.update((field, value) for field, value in given.items() if value is not None)
    if missing := [field for field in ('rope_theta', *ROPE[kind]) if known.get(field) is None]:
        raise Refusal(f'config.json has no {missing[0]}.')
    scaling = ','.join([kind, *(str(known[field]) for field in ROPE[kind])])
    return dict(rope_base=known['rope_theta'], rope_scaling='' if kind == 'default' else scaling)


def from_hugging_face(config):
    """Our Config fields from a config.json. What would change the result and is not supported is refused."""
    name = (config.get('architectures') or [None])[0]
    if name not in ARCHITECTURES:
        raise unsupported('architectures', name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    for field, values in {**ALWAYS, **architecture.needs}.items():
        if config.get(field) not in values:
            raise unsupported(field, config.get(field), values)
    if set(config.get('layer_types') or ()) - {'full_attention'}:
        raise unsupported('layer_types', config['layer_types'], ['full_attention'])
    ours = dict(FAMILIES[architecture.family])
    for our, their in architecture.fields.items():
        if their not in config and their not in MAY_MISS:
            raise Refusal(f'config.json has no {their}.')
        value = config.get(their, ours.get('tie', False) if our == 'tie' else 0)
        ours[our] = 0 if value is None else value
        if our == 'n_expert' and not value:
            raise unsupported(their, value, ['1 or more'])
    if ours.get('kv_rank'):
        ours['head_dim'] += ours['rope_dim']
    if ours.get('pos') != 'learned':  # the first Llamas' files have no rope_theta yet
        ours.update(rope_from(config, 10000.0 if name == 'LlamaForCausalLM' else None))
    return ours


def to_hugging_face(cfg, name):
    """The config.json that says what cfg says, as far as the architecture has words for it."""
    kind, _, _, _, fields, needs = ARCHITECTURES[name]
    theirs = {'architectures': [name], 'model_type': kind, **{field: values[0] for field, values in needs.items()}}
    for our, their in fields.items():
        value = getattr(cfg, our)
        theirs[their] = None if value == 0 and their in ('sliding_window', 'q_lora_rank') else value
    if cfg.kv_rank and 'qk_nope_head_dim' in theirs:
        theirs['qk_nope_head_dim'] -= cfg.rope_dim
    if cfg.pos == 'rope':  # in the old words and in the new ones
        kind, *numbers = (cfg.rope_scaling or 'default').split(',')
        scaling = dict(zip(ROPE[kind], map(json.loads, numbers)), rope_type=kind)
        theirs.update(rope_theta=cfg.rope_base, rope_scaling=dict(scaling, type=kind) if numbers else None,
                      rope_parameters=dict(scaling, rope_theta=cfg.rope_base))
    return theirs


def counterpart(cfg):
    """The config.json of the architecture that this model is: read back, it gives the same model."""
    differ, unused = {}, ['dropout', 'vocab_multiple', 'balance']
    if cfg.n_expert and not cfg.n_dense:
        unused.append('d_ff')
    for name in ARCHITECTURES:
        with suppress(Refusal):
            config = to_hugging_face(cfg, name)
            back = asdict(build(Config, from_hugging_face(config)))
            differ[name] = [f'{field}={value}' for field, value in asdict(cfg).items()
                            if field not in unused and value != back[field]]
            if not differ[name]:
                return config
    closest = min(differ, key=lambda name: len(differ[name]))
    raise Refusal(f'transformers has no counterpart of this model: {closest} comes closest, but without '
                  f'{", ".join(differ[closest])}.')


def turn_rows(cfg, form, name, tensor, back=False):
    """Our matrix from a stack of form 'pairs', whose rotary pairs are rows 0 1, 2 3, ... of a head; ours are a row of
    the first half and one of the second. `back`: the other way. Any other tensor comes back as it is."""
    H, K, D, R = cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.rope_dim or cfg.head_dim
    role = name.split('.')[-2]
    heads = {'w_qkv': (H + 2 * K, D), 'w_q': (H, D), 'w_kv_latent': (1, cfg.kv_rank + R),
             'w_kv': (H, D - R + cfg.v_dim)}.get(role)
    if form != 'pairs' or heads is None:
        return tensor
    rows = torch.arange(math.prod(heads)).view(heads)
    if role == 'w_kv':  # theirs has each head's key and value together, ours all keys first
        order = torch.cat([part.flatten() for part in rows.split((D - R, cfg.v_dim), dim=1)])
    else:
        turned = rows[:H + K if role == 'w_qkv' else H, -R:]
        turned.copy_(turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1))
        order = rows.flatten()
    return tensor[order.argsort() if back else order]


def parts(cfg, names, form, name, tensor):
    """The published tensors in one of ours, (their name, a view of our rows that has their shape)."""
    layer, role, suffix = re.fullmatch(r'(?:blocks\.(\d+)\.)?(.+?)(\.weight|\.bias)?', name).groups()
    theirs = names[role if suffix else role.replace('mlp', 'expert')].split()
    if cfg.q_rank and role == 'attn.w_q':
        theirs = ['self_attn.q_b_proj']
    if not suffix:  # experts
        theirs = [word.format(e) for e in range(len(tensor)) for word in theirs]
        tensor = tensor.flatten(0, 1)
    shares = [1] * len(theirs)
    if role == 'attn.w_qkv' and len(theirs) == 3:
        shares = [cfg.n_head, cfg.n_kv_head, cfg.n_kv_head]
    turned = form == 'conv1d' and layer and tensor.dim() == 2
    for word, part in zip(theirs, tensor.split([len(tensor) * share // sum(shares) for share in shares])):
        yield (names['block'].format(layer) if layer else '') + word + (suffix or '.weight'), part.T if turned else part


def convert(cfg, names, form, tensors, dtype=''):
    """Our state dict from published tensors, which stay on disk until they are copied straight to their place."""
    with torch.device('meta'):
        state = dict(Transformer(cfg).state_dict())
    embed, head = names['embed'] + '.weight', names['lm_head'] + '.weight'
    if cfg.tie and {embed, head} <= tensors.keys() and torch.equal(tensors[embed], tensors[head]):
        del tensors[head]
    tensors = {name: tensor for name, tensor in tensors.items() if not BUFFERS.fullmatch(name)}
    check_shapes(tensors, dict(part for name in state for part in parts(cfg, names, form, name, state[name])))
    stored = {tensor.dtype for tensor in tensors.values()}
    dtype = DTYPES[dtype] if dtype else stored.pop() if stored in ({torch.bfloat16}, {torch.float16}) else torch.float32
    for name in state:
        ours = torch.empty_like(state[name], device='cpu', dtype=dtype)
        for theirs, part in parts(cfg, names, form, name, ours):
            part.copy_(tensors[theirs])
        state[name] = turn_rows(cfg, form, name, ours)
    return state


# Each format gives a Config, names and form, the tensors {name: tensor} on disk, and a tokenizer's description.

STORED = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16, 'F64': torch.float64}


def read_json(*path):
    return intact(lambda path: json.loads(read_text(path) or '{}'), os.path.join(*path))


def read_safetensors(path):
    """The tensors of a file, where they lie: 8 bytes of length, a JSON header of that length, raw data."""
    raw, tensors = np.memmap(path, np.uint8, 'c'), {}  # 'c', a private copy: torch warns of what is read-only
    start = 8 + int(raw[:8].view('<u8')[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop('__metadata__', None)
    for name, about in header.items():
        (first, last), kind = about['data_offsets'], about['dtype']
        if BUFFERS.fullmatch(name):  # some are of integers
            continue
        if kind not in STORED:
            raise unsupported(f'dtype of {name}', kind, STORED)
        tensors[name] = torch.from_numpy(raw[start + first:start + last]).view(STORED[kind]).view(about['shape'])
    return tensors


def shards(folder):
    index = read_json(folder, 'model.safetensors.index.json')
    return sorted({os.path.basename(file) for file in index.get('weight_map', {}).values()}) or ['model.safetensors']


def hugging_face(folder):
    """A folder of config.json and safetensors, in one file or in those that an index names."""
    config, tensors = read_json(folder, 'config.json'), {}
    cfg = build(Config, from_hugging_face(config))
    for file in shards(folder):
        if not os.path.exists(os.path.join(folder, file)):
            raise Refusal(f'{folder} has no {file}.')
        tensors.update(intact(read_safetensors, os.path.join(folder, file)))
    _, _, names, form, *_ = ARCHITECTURES[config['architectures'][0]]
    if form == 'conv1d':  # the oldest files leave the first word out
        tensors = {re.sub(r'^(?!transformer\.|lm_head\.)', 'transformer.', name): t for name, t in tensors.items()}
    return cfg, names, form, tensors, hugging_face_tokenizer(folder, config)


def hub(name):
    """Downloads a model of the Hugging Face hub, or of its mirror HF_ENDPOINT; returns the folder."""
    page = f'{os.environ.get("HF_ENDPOINT") or "https://huggingface.co"}/{name}'
    folder, token = os.path.join(ROOT, 'data', 'hub', name), os.environ.get('HF_TOKEN')
    headers = {'Authorization': f'Bearer {token}'} if token else {}

    def get(file, optional=False):
        try:
            download(f'{page}/resolve/main/{file}', os.path.join(folder, file), headers=headers)
        except Refusal as error:
            if not (optional and 'status 404' in str(error)):
                raise Refusal(f'{error} A gated model needs its terms accepted and HF_TOKEN.') from None

    get('config.json')
    get('model.safetensors.index.json', optional=True)
    for file in shards(folder):
        get(file)
    get('tokenizer.json', optional=True)
    return folder


def meta(folder):
    """Meta's folder: consolidated.00.pth and params.json."""
    params, path = read_json(folder, 'params.json'), os.path.join(folder, 'consolidated.00.pth')
    known = {'dim', 'n_layers', 'n_heads', 'n_kv_heads', 'vocab_size', 'multiple_of', 'ffn_dim_multiplier', 'norm_eps',
             'rope_theta', 'use_scaled_rope', 'max_seq_len'}
    for field in params.keys() - known:
        raise unsupported(field, params[field], [None])
    for field in {'dim', 'n_layers', 'n_heads', 'norm_eps'} - params.keys():
        raise Refusal(f'params.json has no {field}.')
    if params.get('use_scaled_rope'):
        raise Refusal('use_scaled_rope is True, but params.json has no factor: take the Hugging Face folder.')
    if not os.path.exists(path) or os.path.exists(os.path.join(folder, 'consolidated.01.pth')):
        raise Refusal(f'{folder} holds no model in one file consolidated.00.pth; those in parts are not supported.')
    tensors = read_torch(path, 'tok_embeddings.weight', 'layers.0.feed_forward.w1.weight', what="Llama of Meta's")
    cfg = build(Config, dict(  # positions are never learned, so a block_size that Meta doesn't state is a choice
        n_layer=params['n_layers'], n_embd=params['dim'], n_head=params['n_heads'], norm_eps=params['norm_eps'],
        n_kv_head=params.get('n_kv_heads') or 0, d_ff=len(tensors['layers.0.feed_forward.w1.weight']),
        vocab_size=len(tensors['tok_embeddings.weight']), block_size=params.get('max_seq_len', 4096),
        rope_base=params.get('rope_theta', 10000.0)))
    return cfg, META, 'pairs', tensors, meta_tokenizer(os.path.join(folder, 'tokenizer.model'), cfg.vocab_size)


def llama2c(path):
    """llama2.c's first .bin: seven int32, then fp32 tensors in an order of its own, each for all layers at once."""
    raw = torch.from_numpy(np.memmap(path, '<i4', 'c'))
    dim, hidden, L, H, K, V, T = raw[:7].tolist()
    cfg = Config(n_embd=dim, d_ff=hidden, n_layer=L, n_head=H, n_kv_head=K, vocab_size=abs(V), block_size=T, tie=V > 0)
    kv_dim = K * cfg.head_dim
    shapes = {name.format(layer) + '.weight': shape for name, *shape in (
        ('tok_embeddings', abs(V), dim), ('layers.{}.attention_norm', dim), ('layers.{}.attention.wq', dim, dim),
        ('layers.{}.attention.wk', kv_dim, dim), ('layers.{}.attention.wv', kv_dim, dim),
        ('layers.{}.attention.wo', dim, dim), ('layers.{}.ffn_norm', dim), ('layers.{}.feed_forward.w1', hidden, dim),
        ('layers.{}.feed_forward.w2', dim, hidden), ('layers.{}.feed_forward.w3', hidden, dim), ('norm', dim),
        ('rope', T, cfg.head_dim), ('output', abs(V), dim))[:12 if V > 0 else 13]
        for layer in range(L if '{}' in name else 1)}
    data = raw[7:].view(torch.float32).split([math.prod(shape) for shape in shapes.values()])
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), data)}
    why = "llama2.c's tokenizer is a file of its own, which tiktoken can't express"
    return cfg, META, 'pairs', tensors, {'kind': 'ids', 'vocab_size': cfg.vocab_size, 'why': why, 'bos': 1}


def nanogpt(path):
    """nanoGPT's ckpt.pt: its fields have our names, its GELU is the exact one."""
    checkpoint = read_torch(path, 'model', 'model_args', what='checkpoint of nanoGPT')
    tokenizer = {'kind': 'tiktoken', 'name': 'gpt2'}
    args = {**FAMILIES['gpt2'], 'mlp': 'gelu', **checkpoint['model_args']}
    if args['vocab_size'] == 50304:
        args.update(vocab_size=50257, vocab_multiple=64)
    if args['vocab_size'] != 50257:
        why = 'nanoGPT keeps its characters beside the data, not in the checkpoint'
        tokenizer = {'kind': 'ids', 'vocab_size': args['vocab_size'], 'why': why}
    state = {name.removeprefix('_orig_mod.'): tensor for name, tensor in checkpoint['model'].items()}
    return build(Config, args), GPT2, '', state, tokenizer


GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r'\s*[\r\n]+|\s+(?!\S)|\s+')


def bpe(words, pattern, special, eot, **more):
    ranks = ''.join(f'{base64.b64encode(word).decode()} {i}\n' for word, i in sorted(words.items(), key=lambda w: w[1]))
    return {'kind': 'bpe', 'ranks': ranks, 'pattern': pattern, 'special': special, 'eot': eot, **more}


def meta_tokenizer(path, vocab_size):
    """Llama 3's tokenizer.model is tiktoken's text and its special tokens follow; before, it was SentencePiece's."""
    try:
        with open(path, encoding='ascii') as file:
            words = {base64.b64decode(word): int(i) for word, i in map(str.split, file)}
    except (OSError, ValueError):
        why = "its tokenizer.model is missing, or SentencePiece's, which tiktoken can't express"
        return {'kind': 'ids', 'vocab_size': vocab_size, 'why': why, 'bos': 1}
    reserved = [f'reserved_special_token_{i}' for i in range(251)]
    special = ['begin_of_text', 'end_of_text', *reserved[:4], 'start_header_id', 'end_header_id', reserved[4], 'eot_id',
               *reserved[5:]]
    special = {f'<|{name}|>': len(words) + i for i, name in enumerate(special)}
    return bpe(words, LLAMA3_SPLIT, special, special['<|end_of_text|>'], bos=special['<|begin_of_text|>'])


def hugging_face_tokenizer(folder, config):
    """A tokenizer.json that is byte-level BPE as tiktoken does it, 'nfc' if its text must be normalized first; of
    others, ids and why."""
    file = read_json(folder, 'tokenizer.json')
    model, added = file.get('model', {}), {token['content']: token['id'] for token in file.get('added_tokens', ())}
    split, ending, more = file.get('pre_tokenizer') or {}, file.get('post_processor') or {}, {}
    for step in ending.get('processors', [ending]):
        match step:
            case {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': word}}, *_]}:
                more['bos'] = step['special_tokens'][word]['ids'][0]
    match split.get('pretokenizers', [split]):
        case [{'type': 'ByteLevel', 'add_prefix_space': False, **level}] if level.get('use_regex', True):
            pattern = GPT2_SPLIT
        case [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False},
              {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': False}]:
            pass
        case _:
            pattern = None
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves; others follow 255
    letters = {chr(i): i for i in plain} | {chr(256 + n): i for n, i in enumerate(sorted({*range(256)} - {*plain}))}
    try:
        words = {bytes(letters[c] for c in word): i for word, i in model['vocab'].items() if word not in added}
        merged = [model['vocab'][''.join(m) if isinstance(m, list) else m.replace(' ', '')] for m in model['merges']]
        fits = pattern and merged == sorted(merged) and {bytes([i]) for i in range(256)} <= words.keys()
    except (KeyError, TypeError, AttributeError):
        fits = False
    nfc = (file.get('normalizer') or {}).get('type')
    if not fits or nfc not in (None, 'NFC'):
        why = 'its tokenizer.json is missing, or not the byte-level BPE that tiktoken can express'
        return {'kind': 'ids', 'vocab_size': config['vocab_size'], 'why': why, **more}
    eot = config.get('eos_token_id')
    return bpe(words, pattern, added, eot[0] if isinstance(eot, list) else eot, nfc=bool(nfc), **more)


# ---- Weights in and out ---------------------------------------------------------------------------------------------


def weights(src, out, dtype=''):
    """Published weights to a checkpoint, out/ckpt.pt."""
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}{nearest(dtype, DTYPES)}', code=2)
    if os.path.exists(os.path.join(src, 'config.json')):
        source = hugging_face(src)
    elif os.path.exists(os.path.join(src, 'params.json')):
        source = meta(src)
    elif os.path.isfile(src) and src.endswith(('.bin', '.pt')):
        source = intact(llama2c, src) if src.endswith('.bin') else nanogpt(src)
    elif re.fullmatch(r'[\w.-]+(/[\w.-]+)?', src) and not os.path.exists(src):
        source = hugging_face(hub(src))
    else:
        raise Refusal(f'{src} must be a folder with config.json or params.json, a .bin or .pt file, or the name of a '
                      'model on the Hugging Face hub.')
    cfg, *published_as, tokenizer = source
    state, path = convert(cfg, *published_as, dtype), os.path.join(out, 'ckpt.pt')
    save_checkpoint(path, {'config': asdict(cfg), 'model': state, 'tokenizer': tokenizer})
    print(f'{path}: {sum(t.numel() for t in state.values()):,} parameters, {state["embed.weight"].dtype}')


def export(src, to):
    """A checkpoint to a folder for transformers. Rows that only pad the vocabulary stay behind."""
    model, checkpoint = model_of(src)
    cfg, config, dtype = model.cfg, counterpart(model.cfg), model.embed.weight.dtype
    _, _, names, form, *_ = ARCHITECTURES[config['architectures'][0]]
    pieces, header, end = {}, {'__metadata__': {'format': 'pt'}}, 0
    for name, ours in checkpoint['model'].items():
        ours = ours[:cfg.vocab_size] if name in ('embed.weight', 'lm_head.weight') else ours
        pieces |= parts(cfg, names, form, name, turn_rows(cfg, form, name, ours, back=True))
    kind = next(kind for kind in STORED if STORED[kind] == dtype)
    for name, part in pieces.items():
        start, end = end, end + part.numel() * dtype.itemsize
        header[name] = {'dtype': kind, 'shape': part.shape, 'data_offsets': [start, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # data begins at a multiple of 8
    with write_atomically(os.path.join(to, 'model.safetensors')) as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for part in pieces.values():
            file.write(part.to(dtype).contiguous().view(-1).view(torch.uint8).numpy())
    kind, tokenizer = str(dtype).removeprefix('torch.'), checkpoint.get('tokenizer') or {}
    config.update(torch_dtype=kind, dtype=kind, pad_token_id=None, bos_token_id=tokenizer.get('bos'),
                  eos_token_id=tokenizer.get('eot', 50256 if tokenizer.get('name') == 'gpt2' else None))
    with write_atomically(os.path.join(to, 'config.json')) as file:
        file.write(json.dumps(config, indent=1).encode())
    print(f'{to}: {config["architectures"][0]} for transformers; a tokenizer is not written')


# ---- The command ----------------------------------------------------------------------------------------------------


@dataclass
class Options:
    tokenizer: str = ''        # data: bytes, an encoding of tiktoken, or a checkpoint's; default bytes or gpt2
    out: str = ''              # data: a name under data/ or a folder, default the data set's; weights: the folder
    val_fraction: float = 0.1  # of a text: its end, kept for validation
    docs: int = 0              # openwebtext: stop after this many documents
    source: str = ''           # openwebtext: an archive at hand
    dtype: str = ''            # weights: store bf16, fp16 or fp32; default what all published tensors are, or else fp32
    to: str = ''               # export: folder for config.json and model.safetensors


DATA_SETS = {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib, 'openwebtext': prepare_openwebtext}
COMMANDS = {'weights': weights, 'export': export}


def main(argv):
    values = command_line(argv, __doc__, Options, words=2 if argv and argv[0] in COMMANDS else 1)
    name, *src = values.pop('words') or ['tinyshakespeare']
    function = COMMANDS.get(name) or DATA_SETS.get(name) or partial(prepare_text, name)
    try:
        inspect.signature(function).bind(*src, **values)
    except TypeError as error:  # an argument too few or too many
        raise Refusal(f'{name}: {error}; see --help.', code=2) from None
    return function(*src, **values)


if __name__ == '__main__':
    run(main)
