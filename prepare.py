"""What all scripts share; text to tokens; checkpoints; published weights in and out.

    python prepare.py                tinyshakespeare, the default
    python prepare.py my.txt         a text of your own
    python prepare.py stdlib         the source of this Python's standard library: needs no network
    python prepare.py openwebtext    GPT-2's corpus in gpt2 tokens: a download of 13 GB, then --docs=N of its texts
    python prepare.py weights SRC --out=DIR    published weights to DIR/ckpt.pt. SRC: a folder with config.json and
        *.safetensors, or with Meta's consolidated.00.pth and params.json; a ckpt.pt of nanoGPT; or the name of
        a model on the Hugging Face hub (HF_TOKEN for gated ones)
    python prepare.py export SRC --to=DIR      a checkpoint, or a folder with one, to a folder for transformers,
        vLLM, llama.cpp
"""
import argparse
import base64
import difflib
import errno
import glob
import hashlib
import inspect
import json
import lzma
import math
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import time
import unicodedata
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import requests
import tiktoken
import torch

from model import FAMILIES, Config, Transformer

ROOT = os.path.dirname(os.path.abspath(__file__))

# -----------------------------------------------------------------------------------------------
# What all scripts share: failures in one sentence


class Refusal(Exception):
    """An expected failure: one sentence with its cure. `code` is the exit code, 2 for wrong
    usage."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


def cure(error):
    """What to do about an OSError; '' if that isn't known."""
    if error.errno == errno.ENOSPC:
        return 'free some space and run the same command again, train.py with --resume=true'
    not_writable = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
    if error.errno in not_writable:
        return 'choose another path, or change its permissions'
    return ''


def run(main):
    """Runs main(arguments). An expected failure ends in one sentence, a programming error in
    its traceback."""
    for stream in (sys.stdout, sys.stderr):
        # a console that can't show a character is no reason to stop
        stream.reconfigure(errors='replace')
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
        return
    except Refusal as error:
        sentence, code = error, error.code
    except KeyboardInterrupt:
        sentence, code = 'Stopped.', 130
    except BrokenPipeError:
        # Our reader has left (`| head`). A normal exit would write to it once more.
        os._exit(1)
    except OSError as error:
        if not cure(error):
            raise
        place = error.filename or 'while writing'
        sentence, code = f'{error.strerror} ({place}): {cure(error)}.', 1
    print(sentence, file=sys.stderr)
    sys.exit(code)


def nearest(word, known):
    """The end of a sentence about an unknown word."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f'; did you mean {close[0]}?' if close else '.'


# -----------------------------------------------------------------------------------------------
# What all scripts share: the command line


def read_bool(text):
    if text.lower() not in ('true', '1', 'false', '0'):
        raise ValueError
    return text.lower() in ('true', '1')


def read_int(text):
    """A whole number, which may be written 1e5 or 600_000."""
    if not set(text.lower()) & set('.einf'):
        return int(text)
    if not float(text).is_integer():
        raise ValueError
    return int(float(text))


def read_float(text):
    value = float(text)
    if math.isnan(value):
        raise ValueError
    return value


READERS = {bool: read_bool, int: read_int, float: read_float, str: str}


class Parser(argparse.ArgumentParser):
    """argparse with the fields of dataclasses as options; the comment beside each field is its
    help."""

    def __init__(self, about, classes, presets):
        # argparse takes % for a placeholder
        epilog = presets_help(classes, presets).replace('%', '%%')
        super().__init__(description=about.strip().replace('%', '%%'), epilog=epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
        self.flags = set()
        for cls in classes:
            source = inspect.getsource(cls)
            for field in fields(cls):
                self.add_field(field, source)

    def add_field(self, field, source):
        comment = re.search(rf'^    {field.name}: .*?  # *(.*)$', source, re.MULTILINE)
        text = comment[1].replace('%', '%%') if comment else ''
        default = repr(field.default).strip("'")
        self.add_argument(f'--{field.name}', type=self.reader(field), help=text, metavar=default)
        if field.type is bool:
            self.flags.add(f'--{field.name}')

    def reader(self, field):
        """Reads an option's value, or says what type it should have."""
        def read(text):
            try:
                return READERS[field.type](text)
            except (ValueError, OverflowError):
                message = f'takes a value of type {field.type.__name__}, not {text}'
                raise argparse.ArgumentTypeError(message) from None
        return read

    def error(self, message):
        raise Refusal(f'{message.removeprefix("argument ")}; see --help.', code=2)


def presets_help(classes, presets):
    """A line for each preset with the options that it changes."""
    defaults = {field.name: field.default for cls in classes for field in fields(cls)}
    lines = []
    for name, values in presets.items():
        changed = [f'--{key}={value}' for key, value in values.items() if value != defaults.get(key)]
        lines.append(f'  {name:18}' + ' '.join(changed))
    return '\n'.join(['presets:', *lines]) if lines else ''


def command_line(argv, about, *classes, presets=None, words=0):
    """The options that argv mentions, {name: value}; its options are the fields of the
    dataclasses.

    Bare words are presets, {name: {option: value}}, applied from left to right; options win
    over them wherever they stand. Up to `words` bare words that are no presets come back as
    'words'; the names of the presets, where there are any, as 'presets'. Raises Refusal.
    """
    parser = Parser(about, classes, presets or {})
    # a bool without a value is true
    argv = list(argv)
    for i, word in enumerate(argv):
        following = argv[i + 1].lower() if i + 1 < len(argv) else ''
        if word in parser.flags and following not in ('true', '1', 'false', '0'):
            argv[i] += '=true'
    options, rest = parser.parse_known_args(argv)
    # what argparse leaves over are bare words, and options that it does not know
    values, bare, used = {}, [], []
    for word in rest:
        if presets and word in presets:
            values.update(presets[word])
            used.append(word)
        elif not word.startswith('-') and len(bare) < words:
            bare.append(word)
        else:
            known = [*(presets or {}), *parser._option_string_actions]
            raise Refusal(f'Unknown option {word}{nearest(word.partition("=")[0], known)}', code=2)
    values.update(vars(options))
    if words:
        values['words'] = bare
    if presets:
        values['presets'] = used
    return values


def build(cls, values):
    """The dataclass, from those of the values that are its fields. Raises Refusal."""
    ours = {field.name: values[field.name] for field in fields(cls) if field.name in values}
    try:
        return cls(**ours)
    except ValueError as error:
        raise Refusal(f'{error}.', code=2) from None


# -----------------------------------------------------------------------------------------------
# What all scripts share: device and precision

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32,
          'bfloat16': torch.bfloat16, 'float16': torch.float16, 'float32': torch.float32}


def pick_device(device='', dtype=''):
    """The torch.device and torch.dtype to compute with: the fastest ones, where none are asked
    for."""
    gpus = [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    others = ['mps', 'cpu'] if torch.backends.mps.is_available() else ['cpu']
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}: choose one of {", ".join(DTYPES)}.', code=2)
    device = str(device) or ('cuda' if gpus else others[0])
    try:
        has_bf16 = True
        picked = torch.float32
        if torch.device(device).type == 'cuda':
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            picked = torch.bfloat16 if has_bf16 else torch.float16
        picked = DTYPES.get(dtype, picked)
        # the honest test is a product
        x = torch.ones(2, 2, device=device, dtype=picked)
        x.mm(x).sum().item()
        if picked == torch.bfloat16 and not has_bf16:
            raise RuntimeError('this GPU has no bf16')
    except (RuntimeError, AssertionError, TypeError):
        wish = f'{device} in {dtype}' if dtype else device
        raise Refusal(f'{wish} does not work here: choose --device from {", ".join(gpus + others)}, or '
                      'another --dtype.') from None
    return torch.device(device), picked


def no_compiler(device):
    """Why torch.compile can't work on this device, in a few words; '' if it can. It looks for
    what PyTorch looks for."""
    if device.type == 'mps':
        return 'untried on mps'
    if device.type == 'cuda':
        # triton builds its launcher with a C compiler
        compiler = os.environ.get('CC') or next(filter(shutil.which, ('clang', 'gcc', 'cl')), 'gcc')
        if not find_spec('triton'):
            return 'triton is not installed'
    else:
        usual = {'win32': 'cl', 'darwin': 'clang++'}.get(sys.platform, 'g++')
        compiler = os.environ.get('CXX', usual)
    if not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')):
        return 'this Python came without its C headers'
    if not shutil.which(compiler):
        return f'no compiler {compiler} found'
    return ''


# -----------------------------------------------------------------------------------------------
# What all scripts share: files


def read_text(path):
    """The text of a file, '' where there is none."""
    if not os.path.exists(path):
        return ''
    return Path(path).read_text(encoding='utf-8')


@contextmanager
def write_atomically(path):
    """A binary file to write. Whoever reads `path` finds the old file or the whole new one,
    never half of one. What a killed process leaves is overwritten by the next write."""
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


def show(text, last=False):
    """A line of progress that overwrites itself on a terminal; a log gets only the last one."""
    if sys.stdout.isatty():
        print('\r' + text.ljust(78), end='\n' if last else '', flush=True)
    elif last:
        print(text, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def ask(url, headers):
    """A request whose answer is read piece by piece; compressed answers have no size, so none
    are taken."""
    headers = {'Accept-Encoding': 'identity', **headers}
    return requests.get(url, headers=headers, stream=True, timeout=(10, 60))


def receive(answer, part, mode, whole):
    """Writes what an answer brings to the file `part`, which has `whole` bytes in the end (0:
    unknown)."""
    with open(part, mode) as file:
        for block in answer.iter_content(1 << 16):
            file.write(block)
            have = file.tell()
            show(f'{Path(part).name}: {have / 1e6:.1f} of {whole / 1e6:.1f} MB', last=have == whole)
    if whole and size_of(part) != whole:
        raise requests.ConnectionError('cut short')


def part_name(path, etag):
    """Where an unfinished download lies. The server's tag of the file is in the name, so that a
    file that has changed there is begun again."""
    tag = hashlib.sha256(etag.encode()).hexdigest()[:12]
    return f'{path}.{tag}.part'


def parts_of(path):
    return glob.glob(f'{glob.escape(path)}.*.part')


def bytes_so_far(path):
    return sum(map(size_of, parts_of(path)))


def fetch(url, path, headers):
    """One attempt at a download, going on where an earlier one was cut. Returns the name of the
    whole file, which is not `path` yet."""
    with ask(url, headers) as answer:
        answer.raise_for_status()
        whole = int(answer.headers.get('Content-Length', 0))
        etag = answer.headers.get('ETag', '')
        part = part_name(path, etag)
        have = size_of(part) if etag else 0
        if have == 0 or have > whole:
            receive(answer, part, 'wb', whole)
            return part
    if have < whole:
        with ask(url, {**headers, 'Range': f'bytes={have}-', 'If-Range': etag}) as answer:
            answer.raise_for_status()
            # 206 is the rest; 200 is the whole, from a server that knows no ranges
            receive(answer, part, 'ab' if answer.status_code == 206 else 'wb', whole)
    return part


def download(url, path, sha256='', headers=None):
    """Makes `path` the file at `url`, unless it is that already. An interrupted download goes
    on, in this run and in a later one. Raises Refusal; what lies at `path` afterwards is whole
    and, given its sha256, checked."""
    if os.path.exists(path) and (not sha256 or sha256_of(path) == sha256):
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    while True:
        before = bytes_so_far(path)
        try:
            part = fetch(url, path, headers or {})
            break
        except requests.RequestException as error:
            # a cut is worth another attempt; an attempt that brought nothing is the last
            if bytes_so_far(path) > before:
                time.sleep(2)
                continue
            status = 'no connection'
            if error.response is not None:
                status = f'HTTP status {error.response.status_code}'
            raise Refusal(f'Could not download {url} ({status}): run it again later, or place the file at '
                          f'{path} by hand.') from None
    if sha256 and sha256_of(part) != sha256:
        os.remove(part)
        raise Refusal(f'{url} is not the file expected (its SHA-256 differs), so it was removed: run it again '
                      f'later, or place the right one at {path} by hand.')
    os.replace(part, path)
    # what is left of older versions
    for old in parts_of(path):
        os.remove(old)


# -----------------------------------------------------------------------------------------------
# Text to tokens: tokenizers
#
# A tokenizer is made from its description, the plain dict that data sets and checkpoints store. It has
#     .description, .vocab_size, .eot (the id that ends a text, or None)
#     .encode(text) -> ids      names of special tokens are ordinary text
#     .decode(ids) -> bytes     which may end inside a character; an id out of range gives U+FFFD

UNKNOWN = '\ufffd'.encode()


class Bytes:
    """The bytes of the text's UTF-8: 256 ids, any text in any language."""

    def __init__(self, description):
        self.description, self.vocab_size, self.eot = description, 256, None

    def encode(self, text):
        return list(text.encode('utf-8', 'replace'))

    def decode(self, ids):
        return b''.join(bytes([i]) if 0 <= i < 256 else UNKNOWN for i in map(int, ids))


class Ids:
    """Numbers in, numbers out: for a model whose tokenizer can't be had here.
    description['why'] says why."""

    def __init__(self, description):
        self.description, self.vocab_size, self.eot = description, description['vocab_size'], None

    def encode(self, text):
        ids = [int(word) if word.isdecimal() else -1 for word in text.split()]
        if not all(0 <= i < self.vocab_size for i in ids):
            raise Refusal(f'Write token ids, 0 to {self.vocab_size - 1}, with spaces between: '
                          f'{self.description["why"]}')
        return ids

    def decode(self, ids):
        return b''.join(b'%d ' % i for i in ids)


class BytePairs:
    """An encoding of tiktoken: one of its own by name, or one whose ranks the description has."""

    def __init__(self, description):
        self.description = description
        if description['kind'] == 'tiktoken':
            self.encoding = named_encoding(description['name'])
            self.eot = self.encoding.eot_token
        else:
            self.encoding = encoding_from_ranks(description)
            self.eot = description['eot']
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text):
        if self.description.get('nfc'):
            # Qwen's texts are normalized first
            text = unicodedata.normalize('NFC', text)
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        pieces = []
        for i in ids:
            try:
                pieces.append(self.encoding.decode_single_token_bytes(int(i)))
            except (KeyError, OverflowError):
                pieces.append(UNKNOWN)
        return b''.join(pieces)


def encoding_from_ranks(description):
    """The ranks are tiktoken's own text: on each line a word in base64, and its id."""
    ranks = {}
    for line in description['ranks'].splitlines():
        if line:
            word, rank = line.split()
            ranks[base64.b64decode(word)] = int(rank)
    return tiktoken.Encoding('ranks', pat_str=description['pattern'], mergeable_ranks=ranks,
                             special_tokens=description['special'])


def named_encoding(name):
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise Refusal(f'Unknown tokenizer {name}{nearest(name, ["bytes", *known])}', code=2)
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError):  # OSError covers all that requests raises
        raise Refusal(f'tiktoken can not fetch its {name} files: connect to the network once or set '
                      "TIKTOKEN_CACHE_DIR to a copy of another machine's tiktoken cache, or use "
                      '--tokenizer=bytes.') from None


def make_tokenizer(description):
    """A tokenizer from its description."""
    kinds = {'bytes': Bytes, 'ids': Ids, 'tiktoken': BytePairs, 'bpe': BytePairs}
    return kinds[description['kind']](description)


@cache
def named_tokenizer(name):
    """The tokenizer that --tokenizer names: bytes, an encoding of tiktoken, or that of a
    checkpoint."""
    if name == 'bytes':
        return make_tokenizer({'kind': 'bytes'})
    if name not in tiktoken.list_encoding_names() and os.path.exists(name):
        return make_tokenizer(load_checkpoint(name)['tokenizer'])
    return make_tokenizer({'kind': 'tiktoken', 'name': name})


# -----------------------------------------------------------------------------------------------
# Text to tokens: data sets


def data_folder(name):
    """data/NAME beside this file, whatever the current folder. A name with a separator, or of a
    folder that exists, is a path."""
    ours = os.path.join(ROOT, 'data', name)
    is_path = re.search(r'[/\\]', name) or (os.path.isdir(name) and not os.path.isdir(ours))
    return name if is_path else ours


def load_data(name):
    """The training tokens, the validation tokens, both memory-mapped, and meta.json of a
    prepared data set. A text's name stands for the set made from it. Raises Refusal."""
    folder = data_folder(Path(name).stem if name.endswith('.txt') else name)
    meta_path = os.path.join(folder, 'meta.json')
    if not os.path.exists(meta_path):
        what = name
        if name not in DATA_SETS and not name.endswith('.txt'):
            what = f'{os.path.basename(name)}.txt'
        raise Refusal(f'There is no finished data set in {folder}; make it with: python prepare.py {what}')
    meta = json.loads(read_text(meta_path))
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    splits = []
    for split in ('train', 'val'):
        path = os.path.join(folder, f'{split}.bin')
        if size_of(path) != meta[f'{split}_tokens'] * dtype.itemsize:
            raise Refusal(f'{path} is missing or not as long as meta.json says; prepare the data set again.')
        splits.append(np.memmap(path, dtype, mode='r'))
    return *splits, meta


def find_data(wish=''):
    """The name of the data set asked for; tinyshakespeare and stdlib are made if they are
    missing. Without a wish tinyshakespeare or, where that can't be downloaded, stdlib."""
    name = wish or 'tinyshakespeare'
    makers = {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib}
    if name not in makers or os.path.exists(os.path.join(data_folder(name), 'meta.json')):
        return name
    try:
        makers[name]()
    except Refusal as error:
        if wish:
            raise
        print(f"{error} Until then this trains on the source of Python's standard library.")
        return find_data('stdlib')
    return name


def write_dataset(folder, tokenizer, source, chunks):
    """Writes a data set from `chunks` of (split, ids, bytes of text), in order. An older set
    stays until this one is whole. meta.json comes last, so a set without it is unfinished."""
    dtype = 'uint16' if tokenizer.vocab_size <= 65536 else 'uint32'
    train_path, val_path, meta_path = (os.path.join(folder, name) for name in ('train.bin', 'val.bin', 'meta.json'))
    counts = {'train_tokens': 0, 'val_tokens': 0, 'train_bytes': 0, 'val_bytes': 0}
    with write_atomically(train_path) as train, write_atomically(val_path) as val:
        files = {'train': train, 'val': val}
        for split, ids, n_bytes in chunks:
            files[split].write(np.asarray(ids, np.dtype(dtype).newbyteorder('<')).tobytes())
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_bytes'] += n_bytes
        if min(counts['train_tokens'], counts['val_tokens']) < 2:
            raise Refusal(f'{source} is empty or too short: training and validation text need 2 tokens each, '
                          f'but have {counts["train_tokens"]} and {counts["val_tokens"]}; take more text.')
        with suppress(FileNotFoundError):
            os.remove(meta_path)
    meta = {'tokenizer': tokenizer.description, 'vocab_size': tokenizer.vocab_size, 'dtype': dtype, **counts,
            'source': source, 'sha256': {'train': sha256_of(train_path), 'val': sha256_of(val_path)}}
    with write_atomically(meta_path) as file:
        file.write(json.dumps(meta, indent=1).encode())
    print(f'{folder}: {counts["train_tokens"]:,} tokens to train on, {counts["val_tokens"]:,} to validate on')
    return folder


def read_utf8(path):
    """The text of a file, without a byte order mark and with plain line ends. Raises Refusal."""
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise Refusal(f'{path} is not UTF-8: byte 0x{byte:02x} at offset {error.start}: convert first, for '
                      f'example: iconv -f latin1 -t utf-8 {path} > utf8.txt') from None
    except OSError as error:
        raise Refusal(f'Can not read the text {path} ({error.strerror}){nearest(path, DATA_SETS)}') from None
    return text.removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')


def prepare_text(path, tokenizer='bytes', out='', val_fraction=0.1):
    """A data set from a UTF-8 file, named after it; the end of the text is for validation."""
    text = read_utf8(path)
    if not 0 < val_fraction < 1:
        raise Refusal(f'val_fraction is {val_fraction}, but must be between 0 and 1.', code=2)
    encoder = named_tokenizer(tokenizer)
    cut = int(len(text) * (1 - val_fraction))

    def chunks():
        # in pieces, to save memory
        for split, part in (('train', text[:cut]), ('val', text[cut:])):
            for start in range(0, len(part), 1 << 24):
                piece = part[start:start + (1 << 24)]
                yield split, encoder.encode(piece), len(piece.encode())
    folder = data_folder(out or os.path.join(ROOT, 'data', Path(path).stem))
    return write_dataset(folder, encoder, path, chunks())


def prepare_shakespeare(tokenizer='bytes', out='', val_fraction=0.1):
    raw = os.path.join(ROOT, 'data', 'tinyshakespeare', 'input.txt')
    download('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt', raw,
             '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


def prepare_stdlib(tokenizer='bytes', out='', val_fraction=0.1):
    """The modules directly in this Python's standard library: text that is there without a
    network."""
    raw = os.path.join(ROOT, 'data', 'stdlib', 'input.txt')
    with write_atomically(raw) as file:
        for path in sorted(Path(sysconfig.get_path('stdlib')).glob('*.py')):
            if not path.name.startswith('_sysconfigdata'):
                file.write(path.read_bytes())
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


OPENWEBTEXT = 'https://zenodo.org/records/3834942/files/openwebtext.tar.xz'


def members(stream):
    """The files in a .tar.xz as streams, in order. Its end is read too: a cut archive must not
    pass for a whole one."""
    with lzma.open(stream) as plain, tarfile.open(fileobj=plain, mode='r|') as tar:
        for member in tar:
            if member.isfile():
                yield tar.extractfile(member)
        while plain.read(1 << 16):
            pass


def documents(stream):
    """OpenWebText's texts, in order: the archive is a .tar.xz of .tar.xz, and in these one file
    is one text."""
    for archive in members(stream):
        for file in members(archive):
            yield file.read().decode('utf-8', 'replace')


def tokenize_documents(tokenizer, texts):
    """Yields write_dataset's chunks, one per text. Every 2000th text is for validation."""
    end = tokenizer.encode('\n\n') if tokenizer.eot is None else [tokenizer.eot]
    n_texts, n_tokens, start = 0, 0, time.time()
    while batch := list(islice(texts, 2000)):
        for text, ids in zip(batch, encode_batch(tokenizer, batch)):
            split = 'train' if n_texts % 2000 else 'val'
            yield split, ids + end, len(text.encode())
            n_texts += 1
            n_tokens += len(ids) + len(end)
        rate = n_tokens / (time.time() - start)
        show(f'{n_texts:,} documents, {n_tokens:,} tokens, {rate:,.0f} tokens/s', last=n_texts % 100_000 == 0)


def encode_batch(tokenizer, texts):
    """The ids of each text; tiktoken uses all cores."""
    if isinstance(tokenizer, BytePairs) and not tokenizer.description.get('nfc'):
        return tokenizer.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    return [tokenizer.encode(text) for text in texts]


def prepare_openwebtext(tokenizer='gpt2', out='', docs=0, source=''):
    """OpenWebText from its archive, which is downloaded first, or from one at hand. docs: only
    so many texts."""
    ours = os.path.join(ROOT, 'data', 'openwebtext')
    path = source or os.path.join(ours, 'openwebtext.tar.xz')
    if not source:
        download(OPENWEBTEXT, path)
    elif not os.path.isfile(source):
        raise Refusal(f'There is no archive {source}: give --source the path of openwebtext.tar.xz.')
    encoder = named_tokenizer(tokenizer)
    what = f'{docs or "all"} documents of {source or OPENWEBTEXT}'
    try:
        with open(path, 'rb') as stream:
            texts = islice(documents(stream), docs or None)
            return write_dataset(data_folder(out or ours), encoder, what, tokenize_documents(encoder, texts))
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise Refusal(f'{path} is cut short or damaged ({error}): delete it and get it again.') from None


# -----------------------------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(path, checkpoint):
    try:
        with write_atomically(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        # this is what torch makes of a full disk
        raise error.__context__ if isinstance(error.__context__, OSError) else error


def intact(read, path, what='file of its kind: get it again'):
    """What read(path) returns. A file of another kind can make it fail anywhere."""
    try:
        return read(path)
    except (OSError, Refusal):
        raise
    except Exception:
        raise Refusal(f'{path} is truncated or no {what}.') from None


def read_torch(path, *keys, what):
    """The dict in a file of torch.save, refused without these keys. Its tensors stay on disk
    until used."""
    def read(path):
        found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        if not found.keys() >= {*keys}:
            raise ValueError
        return found
    return intact(read, path, what)


def load_checkpoint(path):
    """The dict in a checkpoint file, or in ckpt.pt of a folder. Raises Refusal."""
    if os.path.isdir(path):
        path = os.path.join(path, 'ckpt.pt')
    if not os.path.exists(path):
        raise Refusal(f'There is no checkpoint {path}; train one first, or give the path of another.')
    return read_torch(path, 'config', 'model', what='checkpoint of nanoblock; published weights need: '
                                                    'python prepare.py weights')


def check_shapes(tensors, expected):
    """Refuses tensors, {name: tensor}, whose names and shapes are not those of `expected`."""
    have = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    want = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    wrong = []
    for name in {**want, **have}:
        if have.get(name) != want.get(name):
            wrong.append(f'{name} is {have.get(name, "missing")}, not {want.get(name, "known")}')
    if wrong:
        raise Refusal(f'The weights do not fit their config: {"; ".join(wrong[:5])}.')


def load_weights(model, weights, assign=False):
    """Puts a checkpoint's tensors into a model: copied or, with `assign`, as they are."""
    check_shapes(weights, model.state_dict())
    model.load_state_dict(weights, assign=assign)


def model_of(path):
    """A checkpoint's model, whose weights are still on disk, and the checkpoint. Raises
    Refusal."""
    checkpoint = load_checkpoint(path)
    try:
        with torch.device('meta'):
            model = Transformer(Config(**checkpoint['config']))
    except (TypeError, ValueError) as error:
        raise Refusal(f'{path} has a config that this model.py does not know: {error}.') from None
    load_weights(model, checkpoint['model'], assign=True)
    return model, checkpoint


# -----------------------------------------------------------------------------------------------
# Published models

PUBLISHED_COLUMNS = ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'd_ff', 'vocab_size', 'block_size')
PUBLISHED = {
    # name              family      L   H  K  n_embd   d_ff  vocab  block_size; 0: derived
    'gpt2':             ('gpt2', (12, 12, 0, 768, 0, 50257, 1024), {}),
    'gpt2-medium':      ('gpt2', (24, 16, 0, 1024, 0, 50257, 1024), {}),
    'gpt2-large':       ('gpt2', (36, 20, 0, 1280, 0, 50257, 1024), {}),
    'gpt2-xl':          ('gpt2', (48, 25, 0, 1600, 0, 50257, 1024), {}),
    'gpt3-175b':        ('gpt2', (96, 96, 0, 12288, 0, 50257, 2048), {}),
    'llama-7b':         ('llama', (32, 32, 0, 4096, 11008, 32000, 2048), dict(norm_eps=1e-6)),
    'llama2-7b':        ('llama', (32, 32, 0, 4096, 11008, 32000, 4096), {}),
    'llama2-13b':       ('llama', (40, 40, 0, 5120, 13824, 32000, 4096), {}),
    'llama2-70b':       ('llama', (80, 64, 8, 8192, 28672, 32000, 4096), {}),
    'llama3-8b':        ('llama3', (32, 32, 8, 4096, 14336, 128256, 8192), {}),
    'llama3-70b':       ('llama3', (80, 64, 8, 8192, 28672, 128256, 8192), {}),
    'llama3.1-8b':      ('llama3.1', (32, 32, 8, 4096, 14336, 128256, 131072), {}),
    'mistral-7b':       ('mistral', (32, 32, 8, 4096, 14336, 32000, 32768), dict(window=4096)),
    'mixtral-8x7b':     ('mixtral', (32, 32, 8, 4096, 14336, 32000, 32768), {}),
    'qwen2-7b':         ('qwen2', (28, 28, 4, 3584, 18944, 152064, 131072), {}),
    'qwen3-8b':         ('qwen3', (36, 32, 8, 4096, 12288, 151936, 40960), dict(head_dim=128)),
    'deepseek-v2-lite': ('deepseek', (27, 16, 0, 2048, 10944, 102400, 163840), dict(
        head_dim=192, rope_dim=64, v_dim=128, kv_rank=512, n_expert=64, n_active=6, d_expert=1408,
        rope_scaling='yarn,40,4096,32,1,0.707,0.707')),
}


def published(name):
    """The Config fields of a published model: its family's switches and its own sizes."""
    family, columns, more = PUBLISHED[name]
    return {**FAMILIES[family], **dict(zip(PUBLISHED_COLUMNS, columns)), **more}


# -----------------------------------------------------------------------------------------------
# Published weights: their tensors
#
# One row per published tensor: ours, theirs, and which part of ours theirs is. A tensor of ours may
# stack several of theirs. Import reads the rows from right to left, export from left to right. {layer} and
# {expert} count; '.weight' and '.bias' follow where ours has them. `part_of` knows the words of the last
# column.

LLAMA = [
    # ours                              theirs                                              part
    ('embed',                           'model.embed_tokens',                               'all'),
    ('norm',                            'model.norm',                                       'all'),
    ('lm_head',                         'lm_head',                                          'all'),
    ('blocks.{layer}.attn_norm',        'model.layers.{layer}.input_layernorm',             'all'),
    ('blocks.{layer}.attn.w_qkv',       'model.layers.{layer}.self_attn.q_proj',            'queries'),
    ('blocks.{layer}.attn.w_qkv',       'model.layers.{layer}.self_attn.k_proj',            'keys'),
    ('blocks.{layer}.attn.w_qkv',       'model.layers.{layer}.self_attn.v_proj',            'values'),
    ('blocks.{layer}.attn.w_out',       'model.layers.{layer}.self_attn.o_proj',            'all'),
    ('blocks.{layer}.attn.q_norm',      'model.layers.{layer}.self_attn.q_norm',            'all'),
    ('blocks.{layer}.attn.k_norm',      'model.layers.{layer}.self_attn.k_norm',            'all'),
    ('blocks.{layer}.mlp_norm',         'model.layers.{layer}.post_attention_layernorm',    'all'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.mlp.gate_proj',               'first half'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.mlp.up_proj',                 'second half'),
    ('blocks.{layer}.mlp.w_down',       'model.layers.{layer}.mlp.down_proj',               'all'),
]
MIXTRAL = [
    *LLAMA[:-3],
    ('blocks.{layer}.mlp.router',       'model.layers.{layer}.block_sparse_moe.gate',       'all'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.block_sparse_moe.experts.{expert}.w1', 'first half'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3', 'second half'),
    ('blocks.{layer}.mlp.w_down',       'model.layers.{layer}.block_sparse_moe.experts.{expert}.w2', 'all'),
]
DEEPSEEK = [
    *(row for row in LLAMA if 'w_qkv' not in row[0] and '.attn.q_norm' not in row[0]),
    ('blocks.{layer}.attn.w_q',         'model.layers.{layer}.self_attn.q_proj',            'heads'),
    ('blocks.{layer}.attn.w_q_latent',  'model.layers.{layer}.self_attn.q_a_proj',          'all'),
    ('blocks.{layer}.attn.q_norm',      'model.layers.{layer}.self_attn.q_a_layernorm',     'all'),
    ('blocks.{layer}.attn.w_kv_latent', 'model.layers.{layer}.self_attn.kv_a_proj_with_mqa', 'one head'),
    ('blocks.{layer}.attn.kv_norm',     'model.layers.{layer}.self_attn.kv_a_layernorm',    'all'),
    ('blocks.{layer}.attn.w_kv',        'model.layers.{layer}.self_attn.kv_b_proj',         'keys and values'),
    ('blocks.{layer}.mlp.router',       'model.layers.{layer}.mlp.gate',                    'all'),
    ('blocks.{layer}.mlp.shared.w_up',  'model.layers.{layer}.mlp.shared_experts.gate_proj', 'first half'),
    ('blocks.{layer}.mlp.shared.w_up',  'model.layers.{layer}.mlp.shared_experts.up_proj',  'second half'),
    ('blocks.{layer}.mlp.shared.w_down', 'model.layers.{layer}.mlp.shared_experts.down_proj', 'all'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.mlp.experts.{expert}.gate_proj', 'first half'),
    ('blocks.{layer}.mlp.w_up',         'model.layers.{layer}.mlp.experts.{expert}.up_proj', 'second half'),
    ('blocks.{layer}.mlp.w_down',       'model.layers.{layer}.mlp.experts.{expert}.down_proj', 'all'),
]
META = [
    ('embed',                           'tok_embeddings',                                   'all'),
    ('norm',                            'norm',                                             'all'),
    ('lm_head',                         'output',                                           'all'),
    ('blocks.{layer}.attn_norm',        'layers.{layer}.attention_norm',                    'all'),
    ('blocks.{layer}.attn.w_qkv',       'layers.{layer}.attention.wq',                      'queries'),
    ('blocks.{layer}.attn.w_qkv',       'layers.{layer}.attention.wk',                      'keys'),
    ('blocks.{layer}.attn.w_qkv',       'layers.{layer}.attention.wv',                      'values'),
    ('blocks.{layer}.attn.w_out',       'layers.{layer}.attention.wo',                      'all'),
    ('blocks.{layer}.mlp_norm',         'layers.{layer}.ffn_norm',                          'all'),
    ('blocks.{layer}.mlp.w_up',         'layers.{layer}.feed_forward.w1',                   'first half'),
    ('blocks.{layer}.mlp.w_up',         'layers.{layer}.feed_forward.w3',                   'second half'),
    ('blocks.{layer}.mlp.w_down',       'layers.{layer}.feed_forward.w2',                   'all'),
]
NANOGPT = [
    ('embed',                           'transformer.wte',                                  'all'),
    ('embed_pos',                       'transformer.wpe',                                  'all'),
    ('norm',                            'transformer.ln_f',                                 'all'),
    ('lm_head',                         'lm_head',                                          'all'),
    ('blocks.{layer}.attn_norm',        'transformer.h.{layer}.ln_1',                       'all'),
    ('blocks.{layer}.attn.w_qkv',       'transformer.h.{layer}.attn.c_attn',                'all'),
    ('blocks.{layer}.attn.w_out',       'transformer.h.{layer}.attn.c_proj',                'all'),
    ('blocks.{layer}.mlp_norm',         'transformer.h.{layer}.ln_2',                       'all'),
    ('blocks.{layer}.mlp.w_up',         'transformer.h.{layer}.mlp.c_fc',                   'all'),
    ('blocks.{layer}.mlp.w_down',       'transformer.h.{layer}.mlp.c_proj',                 'all'),
]
# GPT-2's published matrices are transposed
GPT2 = [(ours, theirs, 'transposed' if '.c_' in theirs else part) for ours, theirs, part in NANOGPT]
GPT1_NAMES = {'transformer.wte': 'transformer.tokens_embed', 'transformer.wpe': 'transformer.positions_embed'}
GPT1 = [(ours, GPT1_NAMES.get(theirs, theirs), part) for ours, theirs, part in GPT2]

# masks and tables that old files hold beside the weights
BUFFERS = re.compile(r'(transformer\.)?(h\.\d+\.attn\.(masked_)?bias|position_ids)|rope\.(freqs|weight)|'
                     r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


def neighbours(rows, n):
    """rows (heads, D): in each head the last n dimensions, paired (i, i + n/2) as ours are, in
    the order that puts the two of a pair side by side."""
    plain, rotated = rows[:, :rows.shape[1] - n], rows[:, rows.shape[1] - n:]
    rotated = rotated.unflatten(1, (2, n // 2)).transpose(1, 2).flatten(1)
    return torch.cat((plain, rotated), dim=1)


def part_of(cfg, part, n_rows, pairs):
    """The rows of our tensor, n_rows in all, that make up theirs, in their order: a 1-D tensor
    of indices. pairs: theirs have the two of a rotary pair side by side; in ours they are half
    a head apart."""
    rows = torch.arange(n_rows)
    H, K, D, R = cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.rope_dim or cfg.head_dim
    if part == 'first half':
        return rows[:n_rows // 2]
    if part == 'second half':
        return rows[n_rows // 2:]
    if part in ('queries', 'keys', 'values'):
        # our rows are all queries, then all keys, then all values
        queries, keys, values = rows.split([H * D, K * D, K * D])
        rows = {'queries': queries, 'keys': keys, 'values': values}[part]
        if pairs and part != 'values':
            rows = neighbours(rows.view(-1, D), R).flatten()
    if part == 'heads':
        rows = neighbours(rows.view(H, D), R).flatten()
    if part == 'one head':
        rows = neighbours(rows.view(1, -1), R).flatten()
    if part == 'keys and values':
        # theirs has each head's key and value together
        keys, values = rows.split([H * (D - R), H * cfg.v_dim])
        rows = torch.cat((keys.view(H, -1), values.view(H, -1)), dim=1).flatten()
    return rows


class Piece:
    """One published tensor, as a part of one of ours."""

    def __init__(self, theirs, ours, expert, part):
        self.theirs, self.ours, self.expert, self.part = theirs, ours, expert, part

    def read(self, state, cfg, pairs):
        """Their tensor, made from ours in state, {name: tensor}."""
        tensor = self.whole(state)
        if self.part == 'transposed' and tensor.dim() == 2:
            return tensor.T
        if self.part in ('all', 'transposed'):
            return tensor
        return tensor[part_of(cfg, self.part, len(tensor), pairs)]

    def write(self, state, theirs, cfg, pairs):
        """Copies their tensor into ours in state."""
        tensor = self.whole(state)
        if self.part == 'transposed' and tensor.dim() == 2:
            tensor.copy_(theirs.T)
        elif self.part in ('all', 'transposed'):
            tensor.copy_(theirs)
        else:
            tensor[part_of(cfg, self.part, len(tensor), pairs)] = theirs.to(tensor.dtype)

    def whole(self, state):
        return state[self.ours] if self.expert is None else state[self.ours][self.expert]


def pieces_of(cfg, state, table):
    """Every published tensor of a model with our state dict, as Pieces."""
    if cfg.q_rank:
        # queries that come from a latent have a name of their own
        table = [(ours, theirs.replace('.q_proj', '.q_b_proj'), part) for ours, theirs, part in table]
    pieces = []
    for ours, theirs, part in table:
        layers = range(cfg.n_layer) if '{layer}' in ours else [None]
        for layer in layers:
            name = ours.format(layer=layer)
            if '{expert}' in theirs and name in state:
                for expert in range(cfg.n_expert):
                    their_name = theirs.format(layer=layer, expert=expert) + '.weight'
                    pieces.append(Piece(their_name, name, expert, part))
            elif '{expert}' not in theirs:
                for suffix in ('.weight', '.bias'):
                    if name + suffix in state:
                        pieces.append(Piece(theirs.format(layer=layer) + suffix, name + suffix, None, part))
    return pieces


# -----------------------------------------------------------------------------------------------
# Published weights: their config.json
#
# One row per field: ours, theirs, and what theirs must be where ours has no word for it. None means that
# the field may be missing. Export writes the first value listed.

NOT = (False, None)
ANY_MODEL = [
    (None,          'quantization_config',          (None,)),
    (None,          'attention_bias',               NOT),
    (None,          'mlp_bias',                     NOT),
    (None,          'use_sliding_window',           NOT),
    (None,          'is_causal',                    (True, None)),
    (None,          'partial_rotary_factor',        (None, 1.0)),
]
LLAMA_FIELDS = [
    ('vocab_size',  'vocab_size',                   ()),
    ('block_size',  'max_position_embeddings',      ()),
    ('n_layer',     'num_hidden_layers',            ()),
    ('n_embd',      'hidden_size',                  ()),
    ('n_head',      'num_attention_heads',          ()),
    ('n_kv_head',   'num_key_value_heads',          ()),
    ('head_dim',    'head_dim',                     ()),
    ('d_ff',        'intermediate_size',            ()),
    ('norm_eps',    'rms_norm_eps',                 ()),
    ('tie',         'tie_word_embeddings',          ()),
    (None,          'hidden_act',                   ('silu', None)),
]
MISTRAL_FIELDS = [
    *LLAMA_FIELDS,
    ('window',      'sliding_window',               ()),
]
MIXTRAL_FIELDS = [
    *MISTRAL_FIELDS,
    ('d_expert',    'intermediate_size',            ()),
    ('n_expert',    'num_local_experts',            ()),
    ('n_active',    'num_experts_per_tok',          ()),
]
DEEPSEEK_FIELDS = [
    *(row for row in LLAMA_FIELDS if row[0] != 'head_dim'),
    ('head_dim',    'qk_nope_head_dim',             ()),  # without the rotated part, which ours includes
    ('rope_dim',    'qk_rope_head_dim',             ()),
    ('v_dim',       'v_head_dim',                   ()),
    ('kv_rank',     'kv_lora_rank',                 ()),
    ('q_rank',      'q_lora_rank',                  ()),
    ('n_expert',    'n_routed_experts',             ()),
    ('n_active',    'num_experts_per_tok',          ()),
    ('n_shared',    'n_shared_experts',             ()),
    ('d_expert',    'moe_intermediate_size',        ()),
    ('n_dense',     'first_k_dense_replace',        ()),
    ('expert_scale', 'routed_scaling_factor',       ()),
    (None,          'topk_method',                  ('greedy', None)),
    (None,          'norm_topk_prob',               NOT),
    (None,          'scoring_func',                 ('softmax', None)),
    (None,          'n_group',                      (1, None)),
    (None,          'topk_group',                   (1, None)),
    (None,          'moe_layer_freq',               (1, None)),
    (None,          'rms_norm_eps',                 (1e-6,)),  # the norms of its latents know no other
]
COHERE_FIELDS = [
    *(row for row in LLAMA_FIELDS if row[0] != 'norm_eps'),
    ('norm_eps',    'layer_norm_eps',               ()),
    (None,          'logit_scale',                  (1.0,)),
    (None,          'use_qk_norm',                  NOT),
]
GPT1_FIELDS = [
    ('vocab_size',  'vocab_size',                   ()),
    ('block_size',  'n_positions',                  ()),
    ('n_layer',     'n_layer',                      ()),
    ('n_embd',      'n_embd',                       ()),
    ('n_head',      'n_head',                       ()),
    ('norm_eps',    'layer_norm_epsilon',           ()),
    ('tie',         'tie_word_embeddings',          ()),
    (None,          'afn',                          ('gelu', None)),
]
GPT2_FIELDS = [
    *GPT1_FIELDS[:-1],
    ('d_ff',        'n_inner',                      ()),
    (None,          'activation_function',          ('gelu_new', 'gelu_pytorch_tanh', None)),
    (None,          'scale_attn_weights',           (True, None)),
    (None,          'scale_attn_by_inverse_layer_idx', NOT),
    (None,          'reorder_and_upcast_attn',      NOT),
    (None,          'add_cross_attention',          NOT),
]
MAY_MISS = ('head_dim', 'num_key_value_heads', 'n_inner', 'tie_word_embeddings')


@dataclass
class Architecture:
    """A class of transformers, and what it is here. pairs: see part_of."""
    model_type: str
    family: str
    tensors: list
    fields: list
    pairs: bool = False


ARCHITECTURES = {
    'GPT2LMHeadModel': Architecture('gpt2', 'gpt2', GPT2, GPT2_FIELDS),
    'OpenAIGPTLMHeadModel': Architecture('openai-gpt', 'gpt1', GPT1, GPT1_FIELDS),
    'LlamaForCausalLM': Architecture('llama', 'llama', LLAMA, LLAMA_FIELDS),
    'MistralForCausalLM': Architecture('mistral', 'mistral', LLAMA, MISTRAL_FIELDS),
    'MixtralForCausalLM': Architecture('mixtral', 'mixtral', MIXTRAL, MIXTRAL_FIELDS),
    'Qwen2ForCausalLM': Architecture('qwen2', 'qwen2', LLAMA, LLAMA_FIELDS),
    'Qwen3ForCausalLM': Architecture('qwen3', 'qwen3', LLAMA, LLAMA_FIELDS),
    'DeepseekV2ForCausalLM': Architecture('deepseek_v2', 'deepseek', DEEPSEEK, DEEPSEEK_FIELDS, pairs=True),
    'CohereForCausalLM': Architecture('cohere', 'palm', LLAMA, COHERE_FIELDS, pairs=True),
}
# the numbers of each kind of rope_scaling, in the order of our field
ROPE_KINDS = {
    'default': (),
    'linear': ('factor',),
    'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
    'yarn': ('factor', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim'),
}


def unsupported(field, value, supported):
    known = ' or '.join(map(repr, supported))
    return Refusal(f'{field} is {value!r}, but nanoblock supports {known} here.')


def rope_from(config, base):
    """Our rope fields from a config.json: from rope_theta and rope_scaling, or from the newer
    rope_parameters. base: where no rope_theta is given, or None."""
    given = {**(config.get('rope_scaling') or {}), **(config.get('rope_parameters') or {})}
    kind = given.get('rope_type') or given.get('type', 'default')
    if kind not in ROPE_KINDS:
        raise unsupported('rope_type', kind, ROPE_KINDS)
    readable = {'rope_theta', 'rope_type', 'type', *ROPE_KINDS['llama3'], *ROPE_KINDS['yarn']}
    for field, value in given.items():
        if field not in readable and value is not None:
            raise unsupported(f'{field} of rope', value, [None])
    # with one of these alone transformers and DeepSeek's own code disagree
    m, m_all = given.get('mscale'), given.get('mscale_all_dim')
    if not (m and m_all) and (m not in (None, 1) or m_all):
        raise unsupported('mscale', m, [m_all or 1])
    length = config.get('original_max_position_embeddings') or config.get('max_position_embeddings')
    known = dict(rope_theta=config.get('rope_theta', base), original_max_position_embeddings=length,
                 beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=0)
    known.update({field: value for field, value in given.items() if value is not None})
    for field in ('rope_theta', *ROPE_KINDS[kind]):
        if known.get(field) is None:
            raise Refusal(f'config.json has no {field}.')
    scaling = ''
    if kind != 'default':
        scaling = ','.join([kind, *(str(known[field]) for field in ROPE_KINDS[kind])])
    return dict(rope_base=known['rope_theta'], rope_scaling=scaling)


def rope_to(cfg):
    """The fields of config.json that say what our rope fields say, in the old words and in the
    new ones."""
    kind, *numbers = (cfg.rope_scaling or 'default').split(',')
    scaling = {'rope_type': kind}
    for field, number in zip(ROPE_KINDS[kind], numbers):
        scaling[field] = json.loads(number)
    return dict(rope_theta=cfg.rope_base, rope_scaling=dict(scaling, type=kind) if numbers else None,
                rope_parameters=dict(scaling, rope_theta=cfg.rope_base))


def from_hugging_face(config):
    """Our Config fields, a dict, from a config.json. Raises Refusal for what would change the
    result and is not supported."""
    name = (config.get('architectures') or [None])[0]
    if name not in ARCHITECTURES:
        raise unsupported('architectures', name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    if set(config.get('layer_types') or ()) - {'full_attention'}:
        raise unsupported('layer_types', config['layer_types'], ['full_attention'])
    values = dict(FAMILIES[architecture.family])
    for ours, theirs, must_be in ANY_MODEL + architecture.fields:
        if ours is None:
            if config.get(theirs) not in must_be:
                raise unsupported(theirs, config.get(theirs), must_be)
            continue
        if theirs not in config and theirs not in MAY_MISS:
            raise Refusal(f'config.json has no {theirs}.')
        if ours == 'tie':
            values['tie'] = config.get(theirs, values.get('tie', False))
        else:
            # null and a missing field mean that the value is derived, or off
            values[ours] = config.get(theirs) or 0
    if 'n_expert' in [row[0] for row in architecture.fields] and not values['n_expert']:
        raise unsupported('the number of experts', values['n_expert'], ['1 or more'])
    if values.get('kv_rank'):
        values['head_dim'] += values['rope_dim']
    if values.get('pos') != 'learned':
        # the first Llamas' files have no rope_theta yet
        values.update(rope_from(config, 10000.0 if name == 'LlamaForCausalLM' else None))
    return values


def to_hugging_face(cfg, name):
    """The config.json that says what cfg says, as far as the architecture has words for it."""
    architecture = ARCHITECTURES[name]
    config = {'architectures': [name], 'model_type': architecture.model_type}
    for ours, theirs, must_be in architecture.fields:
        value = must_be[0] if ours is None else getattr(cfg, ours)
        if value == 0 and theirs in ('sliding_window', 'q_lora_rank'):
            value = None
        config[theirs] = value
    if cfg.kv_rank and 'qk_nope_head_dim' in config:
        config['qk_nope_head_dim'] -= cfg.rope_dim
    if cfg.pos == 'rope':
        config.update(rope_to(cfg))
    return config


def hugging_face_config(cfg):
    """The config.json of the architecture that this model is: read back, it gives the same
    model. Raises Refusal if there is none."""
    # these change nothing in a model that only computes
    unused = ['dropout', 'vocab_multiple', 'balance']
    if cfg.n_expert and not cfg.n_dense:
        unused.append('d_ff')
    differences = {}
    for name in ARCHITECTURES:
        with suppress(Refusal):
            config = to_hugging_face(cfg, name)
            back = asdict(build(Config, from_hugging_face(config)))
            differences[name] = [f'{field}={value}' for field, value in asdict(cfg).items()
                                 if field not in unused and value != back[field]]
            if not differences[name]:
                return config
    closest = min(differences, key=lambda name: len(differences[name]))
    raise Refusal(f'transformers has no counterpart of this model: {closest} comes closest, but without '
                  f'{", ".join(differences[closest])}.')


# -----------------------------------------------------------------------------------------------
# Published weights: the formats
#
# Each reader returns a Source.


@dataclass
class Source:
    """A published model that is still on disk. tensors: {name: tensor}; table and pairs: what
    they are here."""
    cfg: Config
    tensors: dict
    table: list
    pairs: bool
    tokenizer: dict  # its description


STORED = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16, 'F64': torch.float64}


def read_json(*path):
    """The dict in a JSON file, {} where there is none."""
    return intact(lambda path: json.loads(read_text(path) or '{}'), os.path.join(*path))


def read_safetensors(path):
    """{name: tensor} of a file, where they lie: 8 bytes of length, a JSON header of that
    length, raw data."""
    # 'c' is a private copy: torch warns of what is read-only
    raw = np.memmap(path, np.uint8, 'c')
    start = 8 + int(raw[:8].view('<u8')[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop('__metadata__', None)
    tensors = {}
    for name, about in header.items():
        if BUFFERS.fullmatch(name):
            continue
        kind, (first, last) = about['dtype'], about['data_offsets']
        if kind not in STORED:
            raise unsupported(f'dtype of {name}', kind, STORED)
        data = torch.from_numpy(raw[start + first:start + last])
        tensors[name] = data.view(STORED[kind]).view(about['shape'])
    return tensors


def write_safetensors(path, tensors, kind):
    """Writes {name: tensor}, each stored as `kind`, a key of STORED."""
    dtype = STORED[kind]
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * dtype.itemsize
        header[name] = {'dtype': kind, 'shape': list(tensor.shape), 'data_offsets': [start, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # data begins at a multiple of 8
    with write_atomically(path) as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for tensor in tensors.values():
            file.write(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy())


def shards(folder):
    """The names of a folder's safetensors files: of one, or of those that an index lists."""
    index = read_json(folder, 'model.safetensors.index.json')
    files = {os.path.basename(file) for file in index.get('weight_map', {}).values()}
    return sorted(files) or ['model.safetensors']


def read_hugging_face_folder(folder):
    """A folder of config.json and safetensors."""
    config, tensors = read_json(folder, 'config.json'), {}
    cfg = build(Config, from_hugging_face(config))
    architecture = ARCHITECTURES[config['architectures'][0]]
    for file in shards(folder):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            raise Refusal(f'{folder} has no {file}.')
        tensors.update(intact(read_safetensors, path))
    if architecture.tensors in (GPT2, GPT1):
        # the oldest files leave the first word out
        tensors = {re.sub(r'^(?!transformer\.|lm_head\.)', 'transformer.', name): tensor
                   for name, tensor in tensors.items()}
    tokenizer = hugging_face_tokenizer(folder, config)
    return Source(cfg, tensors, architecture.tensors, architecture.pairs, tokenizer)


def fetch_from_hub(name):
    """Downloads a model of the Hugging Face hub, or of its mirror HF_ENDPOINT; returns the
    folder."""
    page = f'{os.environ.get("HF_ENDPOINT") or "https://huggingface.co"}/{name}'
    folder = os.path.join(ROOT, 'data', 'hub', name)
    token = os.environ.get('HF_TOKEN')
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


META_PARAMS = {'dim', 'n_layers', 'n_heads', 'n_kv_heads', 'vocab_size', 'multiple_of', 'ffn_dim_multiplier',
               'norm_eps', 'rope_theta', 'use_scaled_rope', 'max_seq_len'}


def read_meta_folder(folder):
    """Meta's folder: consolidated.00.pth and params.json."""
    params = read_json(folder, 'params.json')
    for field in params.keys() - META_PARAMS:
        raise unsupported(field, params[field], [None])
    for field in {'dim', 'n_layers', 'n_heads', 'norm_eps'} - params.keys():
        raise Refusal(f'params.json has no {field}.')
    if params.get('use_scaled_rope'):
        raise Refusal('use_scaled_rope is True, but params.json has no factor: take the Hugging Face folder.')
    path = os.path.join(folder, 'consolidated.00.pth')
    if not os.path.exists(path) or os.path.exists(os.path.join(folder, 'consolidated.01.pth')):
        raise Refusal(f'{folder} holds no model in one file consolidated.00.pth; those in parts are not '
                      'supported.')
    tensors = read_torch(path, 'tok_embeddings.weight', 'layers.0.feed_forward.w1.weight',
                         what="Llama of Meta's")
    cfg = build(Config, dict(
        n_layer=params['n_layers'], n_embd=params['dim'], n_head=params['n_heads'],
        n_kv_head=params.get('n_kv_heads') or 0, norm_eps=params['norm_eps'],
        rope_base=params.get('rope_theta', 10000.0),
        # what params.json does not say, or says in a roundabout way
        d_ff=len(tensors['layers.0.feed_forward.w1.weight']), vocab_size=len(tensors['tok_embeddings.weight']),
        # no positions are learned, so a length that isn't stated is a choice
        block_size=params.get('max_seq_len', 4096)))
    tokenizer = meta_tokenizer(os.path.join(folder, 'tokenizer.model'), cfg.vocab_size)
    return Source(cfg, tensors, META, True, tokenizer)


def read_nanogpt(path):
    """nanoGPT's ckpt.pt. Its fields have our names, its GELU is the exact one."""
    checkpoint = read_torch(path, 'model', 'model_args', what='checkpoint of nanoGPT')
    values = {**FAMILIES['gpt2'], 'mlp': 'gelu', **checkpoint['model_args']}
    if values['vocab_size'] == 50304:
        # GPT-2's vocabulary, padded
        values.update(vocab_size=50257, vocab_multiple=64)
    tokenizer = {'kind': 'tiktoken', 'name': 'gpt2'}
    if values['vocab_size'] != 50257:
        why = 'nanoGPT keeps its characters beside the data, not in the checkpoint'
        tokenizer = {'kind': 'ids', 'vocab_size': values['vocab_size'], 'why': why}
    # a compiled model's names have a prefix
    tensors = {name.removeprefix('_orig_mod.'): tensor for name, tensor in checkpoint['model'].items()}
    return Source(build(Config, values), tensors, NANOGPT, False, tokenizer)


# -----------------------------------------------------------------------------------------------
# Published weights: tokenizers that tiktoken can express

GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r'\s*[\r\n]+|\s+(?!\S)|\s+')


def describe_ranks(words, pattern, special, eot, **more):
    """A description of kind 'bpe' from words, {bytes: id}."""
    lines = []
    for word, i in sorted(words.items(), key=lambda item: item[1]):
        lines.append(f'{base64.b64encode(word).decode()} {i}\n')
    return {'kind': 'bpe', 'ranks': ''.join(lines), 'pattern': pattern, 'special': special, 'eot': eot, **more}


def meta_tokenizer(path, vocab_size):
    """Llama 3's tokenizer.model is tiktoken's text, and its special tokens follow. Earlier ones
    are SentencePiece's."""
    words = {}
    try:
        with open(path, encoding='ascii') as file:
            for line in file:
                word, i = line.split()
                words[base64.b64decode(word)] = int(i)
    except (OSError, ValueError):
        why = "its tokenizer.model is missing, or SentencePiece's, which tiktoken can't express"
        return {'kind': 'ids', 'vocab_size': vocab_size, 'why': why, 'bos': 1}
    reserved = [f'reserved_special_token_{i}' for i in range(251)]
    names = ['begin_of_text', 'end_of_text', *reserved[:4], 'start_header_id', 'end_header_id', reserved[4],
             'eot_id', *reserved[5:]]
    special = {f'<|{name}|>': len(words) + i for i, name in enumerate(names)}
    return describe_ranks(words, LLAMA3_SPLIT, special, special['<|end_of_text|>'],
                          bos=special['<|begin_of_text|>'])


def letters_of_bytes():
    """{letter: byte} of byte-level BPE: printable bytes stand for themselves, the others follow
    255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(plain))
    letters = {chr(byte): byte for byte in plain}
    letters.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return letters


def split_pattern(pre_tokenizer):
    """The regular expression by which a tokenizer.json cuts text into words; None if tiktoken
    has no such."""
    match pre_tokenizer.get('pretokenizers', [pre_tokenizer]):
        case [{'type': 'ByteLevel', 'add_prefix_space': False, **level}] if level.get('use_regex', True):
            return GPT2_SPLIT
        case [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False},
              {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': False}]:
            return pattern
    return None


def first_token(post_processor):
    """The id that a tokenizer.json puts before each text, or None."""
    for step in post_processor.get('processors', [post_processor]):
        match step:
            case {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': word}}, *_]}:
                return step['special_tokens'][word]['ids'][0]
    return None


def byte_level_words(model, added):
    """{bytes: id} of a tokenizer.json's BPE; None if it isn't byte-level, or merges in an order
    other than that of its ids, which is tiktoken's."""
    letters = letters_of_bytes()
    try:
        words = {bytes(letters[c] for c in word): i for word, i in model['vocab'].items() if word not in added}
        merged = []
        for merge in model['merges']:
            word = ''.join(merge) if isinstance(merge, list) else merge.replace(' ', '')
            merged.append(model['vocab'][word])
    except (KeyError, TypeError, AttributeError):
        return None
    has_all_bytes = {bytes([byte]) for byte in range(256)} <= words.keys()
    return words if merged == sorted(merged) and has_all_bytes else None


def hugging_face_tokenizer(folder, config):
    """The description of a folder's tokenizer.json: ranks for tiktoken, or ids and why."""
    file = read_json(folder, 'tokenizer.json')
    bos = first_token(file.get('post_processor') or {})
    more = {} if bos is None else {'bos': bos}
    added = {token['content']: token['id'] for token in file.get('added_tokens', ())}
    pattern = split_pattern(file.get('pre_tokenizer') or {})
    words = byte_level_words(file.get('model', {}), added)
    normalizer = (file.get('normalizer') or {}).get('type')
    if not pattern or not words or normalizer not in (None, 'NFC'):
        why = 'its tokenizer.json is missing, or not the byte-level BPE that tiktoken can express'
        return {'kind': 'ids', 'vocab_size': config['vocab_size'], 'why': why, **more}
    eot = config.get('eos_token_id')
    if isinstance(eot, list):
        eot = eot[0]
    return describe_ranks(words, pattern, added, eot, nfc=normalizer == 'NFC', **more)


# -----------------------------------------------------------------------------------------------
# Published weights: in and out


def find_source(src):
    """The Source that a path or a name on the hub stands for. Raises Refusal."""
    if os.path.exists(os.path.join(src, 'config.json')):
        return read_hugging_face_folder(src)
    if os.path.exists(os.path.join(src, 'params.json')):
        return read_meta_folder(src)
    if os.path.isfile(src) and src.endswith('.pt'):
        return read_nanogpt(src)
    if re.fullmatch(r'[\w.-]+(/[\w.-]+)?', src) and not os.path.exists(src):
        return read_hugging_face_folder(fetch_from_hub(src))
    raise Refusal(f'{src} must be a folder with config.json or params.json, a .pt file, or the name of a model '
                  'on the Hugging Face hub.')


def dtype_to_store(tensors, wish):
    """The wish, or what all published tensors are, or else fp32."""
    if wish:
        return DTYPES[wish]
    found = {tensor.dtype for tensor in tensors.values()}
    if found in ({torch.bfloat16}, {torch.float16}):
        return found.pop()
    return torch.float32


def convert(source, dtype=''):
    """Our state dict from published tensors, which stay on disk until each is copied to its
    place."""
    cfg = source.cfg
    with torch.device('meta'):
        ours = Transformer(cfg).state_dict()
    tensors = {name: tensor for name, tensor in source.tensors.items() if not BUFFERS.fullmatch(name)}
    # a tied head may be stored a second time
    names = {ours_: theirs for ours_, theirs, _ in source.table}
    embed, head = names['embed'] + '.weight', names['lm_head'] + '.weight'
    if cfg.tie and {embed, head} <= tensors.keys() and torch.equal(tensors[embed], tensors[head]):
        del tensors[head]
    pieces = pieces_of(cfg, ours, source.table)
    check_shapes(tensors, {piece.theirs: piece.read(ours, cfg, source.pairs) for piece in pieces})
    dtype = dtype_to_store(tensors, dtype)
    state = {name: torch.empty_like(tensor, device='cpu', dtype=dtype) for name, tensor in ours.items()}
    for piece in pieces:
        piece.write(state, tensors[piece.theirs], cfg, source.pairs)
    return state


def import_weights(src, out, dtype=''):
    """Published weights to a checkpoint, out/ckpt.pt."""
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}{nearest(dtype, DTYPES)}', code=2)
    source = find_source(src)
    state = convert(source, dtype)
    path = os.path.join(out, 'ckpt.pt')
    save_checkpoint(path, {'config': asdict(source.cfg), 'model': state, 'tokenizer': source.tokenizer})
    n_parameters = sum(tensor.numel() for tensor in state.values())
    print(f'{path}: {n_parameters:,} parameters, {state["embed.weight"].dtype}')


def export_weights(src, to):
    """A checkpoint to a folder for transformers. Rows that only pad the vocabulary stay
    behind."""
    model, checkpoint = model_of(src)
    cfg, config = model.cfg, hugging_face_config(model.cfg)
    architecture = ARCHITECTURES[config['architectures'][0]]
    state = dict(checkpoint['model'])
    for name in ('embed.weight', 'lm_head.weight'):
        if name in state:
            state[name] = state[name][:cfg.vocab_size]
    pieces = pieces_of(cfg, state, architecture.tensors)
    tensors = {piece.theirs: piece.read(state, cfg, architecture.pairs) for piece in pieces}
    dtype = model.embed.weight.dtype
    kind = next(kind for kind in STORED if STORED[kind] == dtype)
    write_safetensors(os.path.join(to, 'model.safetensors'), tensors, kind)
    # the config
    tokenizer = checkpoint.get('tokenizer') or {}
    eot = tokenizer.get('eot', 50256 if tokenizer.get('name') == 'gpt2' else None)
    dtype_name = str(dtype).removeprefix('torch.')
    config.update(torch_dtype=dtype_name, dtype=dtype_name, pad_token_id=None,
                  bos_token_id=tokenizer.get('bos'), eos_token_id=eot)
    with write_atomically(os.path.join(to, 'config.json')) as file:
        file.write(json.dumps(config, indent=1).encode())
    print(f'{to}: {config["architectures"][0]} for transformers; a tokenizer is not written')


# -----------------------------------------------------------------------------------------------
# The command


@dataclass
class Options:
    tokenizer: str = ''        # data: bytes, an encoding of tiktoken, or a checkpoint's; default bytes or gpt2
    out: str = ''              # data: a name under data/ or a folder, default the data set's; weights: the folder
    val_fraction: float = 0.1  # of a text: its end, kept for validation
    docs: int = 0              # openwebtext: tokenize only so many texts; 0: all
    source: str = ''           # openwebtext: an archive at hand
    dtype: str = ''            # weights: store bf16, fp16 or fp32; default what all published tensors are, or fp32
    to: str = ''               # export: folder for config.json and model.safetensors


DATA_SETS = {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib, 'openwebtext': prepare_openwebtext}
COMMANDS = {'weights': import_weights, 'export': export_weights}


def main(argv):
    is_command = bool(argv) and argv[0] in COMMANDS
    values = command_line(argv, __doc__, Options, words=2 if is_command else 1)
    name, *src = values.pop('words') or ['tinyshakespeare']
    function = {**COMMANDS, **DATA_SETS}.get(name) or partial(prepare_text, name)
    try:
        inspect.signature(function).bind(*src, **values)
    except TypeError as error:  # an argument too few or too many
        raise Refusal(f'{name}: {error}; see --help.', code=2) from None
    return function(*src, **values)


if __name__ == '__main__':
    run(main)
