"""Text to tokens, checkpoints, and published weights in and out; and what all scripts share.

    python prepare.py                tinyshakespeare
    python prepare.py my.txt         a text of your own
    python prepare.py stdlib         the source of this Python's standard library; needs no network
    python prepare.py openwebtext    the corpus of GPT-2's reproductions, in gpt2 tokens. The whole archive,
                                     13 GB, is downloaded first; --docs=N then takes its first N documents.

    python prepare.py weights SRC --out=DIR
        Published weights to a checkpoint, DIR/ckpt.pt. SRC is one of
            a Hugging Face folder: config.json and *.safetensors
            the name of a model on the Hugging Face hub; HF_TOKEN is sent, if set, for gated models
            a folder of Meta's: consolidated.00.pth and params.json
            nanoGPT's ckpt.pt
    python prepare.py export SRC --to=DIR
        A checkpoint, or a folder with a ckpt.pt, to a folder that transformers, vLLM and llama.cpp read.
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
from collections import namedtuple
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

# -------------------------------------------------------------------------------
# What all scripts share: failures in one sentence


class Refusal(Exception):
    """An expected failure: one sentence, with its cure. The exit code is 2 for wrong usage, else 1."""

    def __init__(self, sentence, code=1):
        super().__init__(sentence)
        self.code = code


DISK_FULL = 'free some space and run the same command again, train.py with --resume=true'
BAD_PATH = 'choose another path, or change its permissions'
CURES = {errno.ENOSPC: DISK_FULL, errno.EACCES: BAD_PATH, errno.EPERM: BAD_PATH, errno.EROFS: BAD_PATH,
         errno.EISDIR: BAD_PATH, errno.ENOTDIR: BAD_PATH, errno.EEXIST: BAD_PATH}


def run(main):
    """Calls main with the command line. An expected failure ends in one sentence on stderr; an error
    in the program keeps its traceback."""
    # a console that can't show a character is no reason to stop
    for stream in sys.stdout, sys.stderr:
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
        # The reader of our output has left, as `| head` does. A normal exit would write once more.
        os._exit(1)
    except OSError as error:
        if error.errno not in CURES:
            raise
        where = error.filename or 'while writing'
        sentence, code = f'{error.strerror} ({where}): {CURES[error.errno]}.', 1
    print(sentence, file=sys.stderr)
    sys.exit(code)


def nearest(word, known):
    """How a sentence about an unknown word ends: with the known word most like it, if one is."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    if close:
        return f'; did you mean {close[0]}?'
    return '.'


# -------------------------------------------------------------------------------
# What all scripts share: the command line

BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def true_or_false(text):
    if text.lower() not in BOOLS:
        raise ValueError
    return BOOLS[text.lower()]


def whole_number(text):
    """An int, which may be written 1e5 or 600_000."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def real_number(text):
    """A float, but not nan, which no comparison would refuse."""
    if math.isnan(float(text)):
        raise ValueError
    return float(text)


# argparse takes the names of these functions into its error messages
READERS = {bool: true_or_false, int: whole_number, float: real_number, str: str}


class Parser(argparse.ArgumentParser):
    """argparse over the fields of dataclasses. The comment beside a field is its help text."""

    def __init__(self, about, classes, presets):
        super().__init__(description=about.strip(), epilog=presets_help(classes, presets),
                         formatter_class=argparse.RawDescriptionHelpFormatter,
                         usage=argparse.SUPPRESS, allow_abbrev=False)
        self.kinds = {}  # {option: type}
        for cls in classes:
            # a field is a line `name: type = default  # comment`
            found = re.findall(r'^    (\w+): .*?  # *(.*)$', inspect.getsource(cls), re.MULTILINE)
            comments = dict(found)
            for field in fields(cls):
                option = f'--{field.name}'
                comment = comments.get(field.name, '').replace('%', '%%')
                default = repr(field.default).strip("'")  # a line end stays \n
                # the help shows the default; the result has only the options that were given
                self.add_argument(option, type=READERS[field.type], help=comment, metavar=default,
                                  default=argparse.SUPPRESS)
                self.kinds[option] = field.type

    def error(self, message):
        raise Refusal(f'{message.removeprefix("argument ")}; see --help.', code=2)


def presets_help(classes, presets):
    """One line per preset: the options that it changes."""
    defaults = {field.name: field.default for cls in classes for field in fields(cls)}
    lines = []
    for preset, values in presets.items():
        changes = [f'--{name}={value}' for name, value in values.items() if value != defaults.get(name)]
        lines.append(f'  {preset:18}' + ' '.join(changes))
    return '\n'.join(['presets:', *lines] if lines else [])


def command_line(argv, about, *classes, presets=None, words=0):
    """The options in argv, {name: value}: presets from left to right, then flags, wherever they
    stand.

    Options are the fields of the dataclasses. presets: {word: {option: value}}; those used are
    listed under 'presets'. Up to `words` other bare words are listed under 'words'. Raises
    Refusal.
    """
    presets = presets or {}
    parser = Parser(about, classes, presets)
    flags, rest = parser.parse_known_args(join_values(argv, parser.kinds))
    # argparse leaves over bare words, and options that it does not know
    values, used, others = {}, [], []
    for word in rest:
        if word in presets:
            values.update(presets[word])
            used.append(word)
        elif not word.startswith('-') and len(others) < words:
            others.append(word)
        else:
            name = word.partition('=')[0]
            raise Refusal(f'Unknown option {word}{nearest(name, [*presets, *parser.kinds])}', code=2)
    # flags win over presets
    values.update(vars(flags))
    if presets:
        values['presets'] = used
    if words:
        values['words'] = others
    return values


def join_values(argv, kinds):
    """argv with each option as one word: `--name value` as --name=value, a bare --flag as
    --flag=true. kinds: {option: type}.

    Left alone, argparse takes -3e-4 for an option, and the word after a bare flag for its value.
    """
    joined, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        following = rest[0] if rest else '--'
        if kinds.get(word) is bool and following.lower() not in BOOLS:
            word += '=true'
        elif word in kinds and not following.startswith('--'):
            word += '=' + rest.pop(0)
        joined.append(word)
    return joined


def build(cls, values):
    """The dataclass, from those of the values that are its fields. Raises Refusal."""
    own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
    try:
        return cls(**own)
    except ValueError as error:
        raise Refusal(f'{error}.', code=2) from None


# -------------------------------------------------------------------------------
# What all scripts share: device and precision

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32,
          'bfloat16': torch.bfloat16, 'float16': torch.float16, 'float32': torch.float32}


def pick_device(device='', dtype=''):
    """The torch.device and torch.dtype to compute with. Without a wish, the fastest that is here; a
    wish that can't be met raises Refusal."""
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}: choose one of {", ".join(DTYPES)}.', code=2)
    # what is here, fastest first
    here = [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        here.append('mps')
    here.append('cpu')
    device = str(device) or here[0].removesuffix(':0')  # plain cuda is this process's current GPU
    try:
        has_bf16, best = True, torch.float32
        if torch.device(device).type == 'cuda':
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            best = torch.bfloat16 if has_bf16 else torch.float16
        picked = DTYPES.get(dtype, best)
        # the honest test: multiply two matrices
        x = torch.ones(2, 2, device=device, dtype=picked)
        x.mm(x).sum().item()
        if picked == torch.bfloat16 and not has_bf16:
            raise RuntimeError('bf16 would be emulated')
    except (RuntimeError, AssertionError, TypeError):
        wish = f'{device} in {dtype}' if dtype else device
        raise Refusal(f'{wish} does not work here: choose --device from {", ".join(here)}, or another '
                      '--dtype.') from None
    return torch.device(device), picked


def no_compiler(device):
    """Why torch.compile can't work on this device, in a few words; '' if it can. PyTorch looks for a
    compiler in the same places."""
    if device.type == 'mps':
        return 'untried on mps'
    if device.type == 'cuda' and not find_spec('triton'):
        return 'triton is not installed'
    if not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')):
        return 'this Python came without its C headers'
    if device.type == 'cuda':
        # triton compiles the code that launches its kernels, in C
        compilers = [os.environ['CC']] if os.environ.get('CC') else ['gcc', 'clang', 'cl']
    else:
        usual = {'win32': 'cl', 'darwin': 'clang++'}.get(sys.platform, 'g++')
        compilers = [os.environ.get('CXX', usual)]
    if not any(map(shutil.which, compilers)):
        return f'no compiler {compilers[0]} found'
    return ''


# -------------------------------------------------------------------------------
# What all scripts share: files


def read_text(path):
    """The text of a file; '' where there is none."""
    if not os.path.exists(path):
        return ''
    return Path(path).read_text(encoding='utf-8')


def show(text, last=False):
    """Prints a line of progress. On a terminal it overwrites the one before it; elsewhere only the
    last one is printed."""
    if sys.stdout.isatty():
        print('\r' + text.ljust(78), end='\n' if last else '', flush=True)
    elif last:
        print(text, flush=True)


@contextmanager
def write_atomically(path):
    """A binary file to write. Readers of `path` find the old file or the whole new one, never half of
    one. What a killed process leaves behind is overwritten by the next write."""
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


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -------------------------------------------------------------------------------
# What all scripts share: downloads

ATTEMPTS = 8  # of one download; the pauses between them grow from 1 to 64 seconds


class NotThere(Refusal):
    """The server has no such file."""


def download(url, path, sha256='', headers=None):
    """Makes `path` the file at `url`, unless it is there already. Raises Refusal.

    A cut download goes on where it stopped, in a later run too, and begins again if the file on
    the server has changed.
    """
    if os.path.exists(path) and sha256 in ('', sha256_of(path)):
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    for attempt in range(ATTEMPTS):
        try:
            answer, part = ask_for_rest(url, path, headers or {})
            store(answer, part, os.path.basename(path))
            break
        except requests.RequestException as error:
            # a server that has never sent anything is not waited for
            if attempt == ATTEMPTS - 1 or not unfinished(path):
                raise no_download(url, path, error) from None
        time.sleep(2 ** attempt)
    if sha256 not in ('', sha256_of(part)):
        os.remove(part)
        raise Refusal(f'{url} is not the file expected (its SHA-256 differs), so it was removed: '
                      f'run it again later, or place the right one at {path} by hand.')
    os.replace(part, path)


def unfinished(path):
    """The name of an unfinished download of `path`; '' if there is none."""
    found = glob.glob(f'{glob.escape(path)}.part-*')
    return found[0] if found else ''


def ask_for_rest(url, path, headers):
    """The server's answer to a request for the bytes that are still missing, and the name of the
    file that they are for.

    The name has the server's tag of what is downloaded. If the tag is another one now, the file on
    the server has changed: the old bytes go, and all of it is asked for.
    """
    old = unfinished(path)
    have = os.path.getsize(old) if old else 0
    asked = {**headers, 'Accept-Encoding': 'identity'}
    if have:
        asked['Range'] = f'bytes={have}-'
    answer = requests.get(url, headers=asked, stream=True, timeout=(10, 60))
    # 416: the server has nothing past these bytes. Either they are all, or they are too many.
    if answer.status_code == 416:
        if answer.headers.get('Content-Range') == f'bytes */{have}':
            return answer, old
        os.remove(old)
        return ask_for_rest(url, path, headers)
    answer.raise_for_status()
    tag = hashlib.sha256(answer.headers.get('ETag', '').encode()).hexdigest()[:12]
    part = f'{path}.part-{tag}'
    if old and old != part:
        os.remove(old)
        # 206: these are the last bytes of the new file
        if answer.status_code == 206:
            answer.close()
            return ask_for_rest(url, path, headers)
    return answer, part


def store(answer, part, name):
    """Writes what the server sends. Raises ConnectionError, one of requests', if it is cut."""
    if answer.status_code == 416:  # nothing is missing
        return
    # 206 is the rest; 200 is the whole file, from a server that was asked for all or knows no ranges
    with answer, open(part, 'ab' if answer.status_code == 206 else 'wb') as file:
        length = int(answer.headers.get('Content-Length', 0))
        whole = file.tell() + length
        for block in answer.iter_content(1 << 16):
            file.write(block)
            have = file.tell()
            show(f'{name}: {have / 1e6:.1f} of {whole / 1e6:.1f} MB', last=have == whole)
        if length and file.tell() < whole:
            raise requests.ConnectionError('cut short')


def no_download(url, path, error):
    """The Refusal that says why a download failed, and what to do."""
    cure = f'run it again later, or place the file at {path} by hand.'
    if error.response is None:
        return Refusal(f'Could not download {url} (no connection): {cure}')
    status = error.response.status_code
    kind = NotThere if status == 404 else Refusal
    return kind(f'Could not download {url} (HTTP status {status}): {cure}')


# -------------------------------------------------------------------------------
# Text to tokens: tokenizers


class Tokenizer:
    """Text to ids and back. Names of special tokens are ordinary text.

    description     the plain dict that data sets and checkpoints store
    vocab_size      ids are below it
    eot             the id that ends a text, or None
    encode(text)    a list of ids
    bytes_of(id)    its bytes; KeyError, ValueError or OverflowError if the id is out of range
    """
    eot = None

    def encode_batch(self, texts):
        """One array of ids per text."""
        return [np.array(self.encode(text), np.uint32) for text in texts]

    def decode(self, ids):
        """Bytes, which may begin or end inside a character. An id out of range gives U+FFFD."""
        text = b''
        for token in ids:
            try:
                text += self.bytes_of(int(token))
            except (KeyError, ValueError, OverflowError):
                text += '\ufffd'.encode()
        return text


class Bytes(Tokenizer):
    """The bytes of UTF-8: any text in any language."""
    vocab_size = 256

    def __init__(self, description):
        self.description = description

    def encode(self, text):
        return list(text.encode('utf-8', 'replace'))

    def encode_batch(self, texts):
        return [np.frombuffer(text.encode('utf-8', 'replace'), np.uint8) for text in texts]

    def bytes_of(self, token):
        return bytes([token])


class BareIds(Tokenizer):
    """For a model whose own tokenizer is not at hand: numbers in, numbers out."""

    def __init__(self, description):
        self.description = description
        self.vocab_size = description['vocab_size']

    def encode(self, text):
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise Refusal(f'Write token ids, 0 to {self.vocab_size - 1}, with spaces between: '
                              f'{self.description["why"]}')
        return [int(word) for word in words]

    def bytes_of(self, token):
        return b'%d ' % token


class BPE(Tokenizer):
    """Byte pair encoding by tiktoken: one of its own encodings, or the tokens of a published model."""

    def __init__(self, description, encoding, eot):
        self.description = description
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.eot = eot

    def normalized(self, text):
        if self.description.get('nfc'):
            return unicodedata.normalize('NFC', text)
        return text

    def encode(self, text):
        return self.encoding.encode_ordinary(self.normalized(text))

    def encode_batch(self, texts):
        texts = [self.normalized(text) for text in texts]
        # threads, which run at the same time while they are inside tiktoken
        batch = self.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        return [np.array(ids, np.uint32) for ids in batch]

    def bytes_of(self, token):
        return self.encoding.decode_single_token_bytes(token)


def make_tokenizer(description):
    """The Tokenizer of a description. Raises Refusal."""
    kind = description['kind']
    if kind == 'bytes':
        return Bytes(description)
    if kind == 'ids':
        return BareIds(description)
    if kind == 'tiktoken':
        encoding = tiktoken_encoding(description['name'])
        return BPE(description, encoding, encoding.eot_token)
    return BPE(description, stored_encoding(description), description['eot'])


def tiktoken_encoding(name):
    """One of tiktoken's own encodings; it downloads their files and keeps them."""
    if name not in tiktoken.list_encoding_names():
        known = ['bytes', *tiktoken.list_encoding_names()]
        raise Refusal(f'Unknown tokenizer {name}{nearest(name, known)}', code=2)
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError):  # what requests raises is an OSError too
        raise Refusal(f'tiktoken can not fetch its {name} files: connect to the network once, or set '
                      "TIKTOKEN_CACHE_DIR to a copy of another machine's tiktoken cache, or use "
                      '--tokenizer=bytes.') from None


def stored_encoding(description):
    """The encoding whose tokens stand in the description, a line each: base64 of the bytes, the id."""
    ranks = {}
    for line in description['ranks'].splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding('bpe', pat_str=description['pattern'], mergeable_ranks=ranks,
                             special_tokens=description['special'])


@cache
def named_tokenizer(name):
    """The Tokenizer of a --tokenizer option: bytes, one of tiktoken's encodings, or a checkpoint's."""
    if name == 'bytes':
        return make_tokenizer({'kind': 'bytes'})
    if name not in tiktoken.list_encoding_names() and os.path.exists(name):
        return make_tokenizer(load_checkpoint(name)['tokenizer'])
    return make_tokenizer({'kind': 'tiktoken', 'name': name})


# -------------------------------------------------------------------------------
# Text to tokens: data sets
#
# A data set is a folder with train.bin and val.bin, which are bare token ids, and meta.json, which says
# what they are.


def data_folder(name):
    """The folder of a data set. A name with a separator is a path, and so is that of a folder here;
    any other is data/NAME beside this file."""
    ours = os.path.join(ROOT, 'data', name)
    is_path = re.search(r'[/\\]', name) is not None
    is_here = os.path.isdir(name) and not os.path.isdir(ours)
    return name if is_path or is_here else ours


def load_data(name):
    """The training tokens and the validation tokens, both memory-mapped, and the dict in meta.json.
    Raises Refusal where the data set is missing or damaged."""
    folder = data_folder(Path(name).stem if name.endswith('.txt') else name)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        # the command that makes it
        word = name
        if name not in DATA_SETS and not name.endswith('.txt'):
            word = f'{os.path.basename(name)}.txt'
        raise Refusal(f'There is no finished data set in {folder}; make it with: python prepare.py {word}')
    meta = read_json(folder, 'meta.json')
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    splits = []
    for split in 'train', 'val':
        path = os.path.join(folder, f'{split}.bin')
        size = meta[f'{split}_tokens'] * dtype.itemsize
        if not os.path.exists(path) or os.path.getsize(path) != size:
            raise Refusal(f'{path} is missing or not as long as meta.json says; prepare the data set again.')
        splits.append(np.memmap(path, dtype, mode='r'))
    return *splits, meta


def find_data(wish=''):
    """The name of the data set to use; tinyshakespeare and stdlib are made when missing. Without a
    wish it is tinyshakespeare or, where that can't be downloaded, stdlib."""
    name = wish or 'tinyshakespeare'
    finished = os.path.exists(os.path.join(data_folder(name), 'meta.json'))
    if finished or name not in ('tinyshakespeare', 'stdlib'):
        return name
    try:
        DATA_SETS[name]()
    except Refusal as error:
        if wish:
            raise
        print(f"{error} Until then this trains on the source of Python's standard library.")
        return find_data('stdlib')
    return name


def write_dataset(folder, tokenizer, source, chunks):
    """A data set from `chunks`, (split, array of ids, bytes of text), in order. Returns its folder.

    An older set in the folder stays until this one is whole. meta.json is written last: a set without
    it is unfinished.
    """
    train_path = os.path.join(folder, 'train.bin')
    val_path = os.path.join(folder, 'val.bin')
    meta_path = os.path.join(folder, 'meta.json')
    dtype = 'uint16' if tokenizer.vocab_size <= 65536 else 'uint32'
    stored = np.dtype(dtype).newbyteorder('<')
    # the tokens
    counts = {'train_tokens': 0, 'val_tokens': 0, 'train_bytes': 0, 'val_bytes': 0}
    with write_atomically(train_path) as train, write_atomically(val_path) as val:
        files = {'train': train, 'val': val}
        for split, ids, text_bytes in chunks:
            files[split].write(ids.astype(stored).tobytes())
            counts[f'{split}_tokens'] += len(ids)
            counts[f'{split}_bytes'] += text_bytes
        if min(counts['train_tokens'], counts['val_tokens']) < 2:
            raise Refusal(f'{source} is empty or too short: training and validation text need 2 tokens '
                          f'each, but have {counts["train_tokens"]} and {counts["val_tokens"]}; '
                          'take more text.')
        # from here until the end the set is unfinished
        with suppress(FileNotFoundError):
            os.remove(meta_path)
    # what they are
    meta = {'tokenizer': tokenizer.description, 'vocab_size': tokenizer.vocab_size, 'dtype': dtype,
            **counts, 'source': source,
            'sha256': {'train': sha256_of(train_path), 'val': sha256_of(val_path)}}
    with write_atomically(meta_path) as file:
        file.write(json.dumps(meta, indent=1).encode())
    print(f'{folder}: {counts["train_tokens"]:,} tokens to train on, '
          f'{counts["val_tokens"]:,} to validate on')
    return folder


# -------------------------------------------------------------------------------
# Text to tokens: a text of your own, Shakespeare, the standard library


def read_utf8(path):
    """A text with plain line ends and no byte order mark. Raises Refusal."""
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise Refusal(f'{path} is not UTF-8: byte 0x{byte:02x} at offset {error.start}: convert first, '
                      f'for example: iconv -f latin1 -t utf-8 {path} > utf8.txt') from None
    except OSError as error:
        raise Refusal(f'Can not read the text {path} ({error.strerror}){nearest(path, DATA_SETS)}') from None
    return text.removeprefix('\ufeff').replace('\r\n', '\n').replace('\r', '\n')


def prepare_text(path, tokenizer='bytes', out='', val_fraction=0.1):
    """A data set from a UTF-8 file, named after it. The end of the text is kept for validation.
    Returns its folder."""
    text = read_utf8(path)
    if not 0 < val_fraction < 1:
        raise Refusal(f'val_fraction is {val_fraction}, but must be between 0 and 1.', code=2)
    cut = int(len(text) * (1 - val_fraction))
    folder = data_folder(out or os.path.join(ROOT, 'data', Path(path).stem))
    encoder = named_tokenizer(tokenizer)

    def pieces():
        for split, part in ('train', text[:cut]), ('val', text[cut:]):
            # 16 million characters at once, to save memory
            for start in range(0, len(part), 1 << 24):
                text_piece = part[start:start + (1 << 24)]
                yield split, encoder.encode_batch([text_piece])[0], len(text_piece.encode())
    return write_dataset(folder, encoder, path, pieces())


SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def prepare_shakespeare(tokenizer='bytes', out='', val_fraction=0.1):
    raw = os.path.join(ROOT, 'data', 'tinyshakespeare', 'input.txt')
    download(SHAKESPEARE, raw, SHAKESPEARE_SHA256)
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


def prepare_stdlib(tokenizer='bytes', out='', val_fraction=0.1):
    """The modules directly in this Python's standard library: text that needs no network."""
    raw = os.path.join(ROOT, 'data', 'stdlib', 'input.txt')
    modules = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'))
    with write_atomically(raw) as file:
        for path in modules:
            if not path.name.startswith('_sysconfigdata'):
                file.write(path.read_bytes())
    return prepare_text(raw, tokenizer, out or os.path.dirname(raw), val_fraction)


# -------------------------------------------------------------------------------
# Text to tokens: OpenWebText
#
# The archive is a .tar.xz of .tar.xz, and in these one file is one document.

OPENWEBTEXT = 'https://zenodo.org/records/3834942/files/openwebtext.tar.xz'


def members(stream):
    """Yields the files in a .tar.xz as streams, in order."""
    with lzma.open(stream) as plain, tarfile.open(fileobj=plain, mode='r|') as tar:
        for member in tar:
            if member.isfile():
                yield tar.extractfile(member)
        # tarfile stops before the end of the stream. Its checksum is there, and so is a cut.
        while plain.read(1 << 16):
            pass


def documents(stream):
    """Yields the texts in OpenWebText's archive, in order."""
    for archive in members(stream):
        for file in members(archive):
            yield file.read().decode('utf-8', 'replace')


def tokenize_documents(encoder, texts):
    """Yields chunks for write_dataset, one per document. Every 2000th document is for validation."""
    end = [encoder.eot] if encoder.eot is not None else encoder.encode('\n\n')
    count, tokens, start = 0, 0, time.time()
    # a thousand documents at a time: work for many threads, and little memory
    while batch := list(islice(texts, 1000)):
        for text, ids in zip(batch, encoder.encode_batch(batch)):
            split = 'val' if count % 2000 == 0 else 'train'
            yield split, np.append(ids, np.array(end, np.uint32)), len(text.encode())
            count += 1
            tokens += len(ids) + len(end)
        rate = tokens / (time.time() - start)
        show(f'{count:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s', last=count % 100_000 == 0)
    show(f'{count:,} documents, {tokens:,} tokens', last=True)


def prepare_openwebtext(tokenizer='gpt2', out='', docs=0, source=''):
    """A data set from the first `docs` documents of OpenWebText, or from all. source: the archive, if
    it is at hand; otherwise it is downloaded, and kept. Returns the folder."""
    encoder = named_tokenizer(tokenizer)
    home = os.path.join(ROOT, 'data', 'openwebtext')
    archive = source or os.path.join(home, 'openwebtext.tar.xz')
    if not source:
        download(OPENWEBTEXT, archive)
    elif not os.path.isfile(source):
        raise Refusal(f'There is no archive {source}: give --source the path of openwebtext.tar.xz.')
    named = f'{docs or "all"} documents of {source or OPENWEBTEXT}'
    try:
        with open(archive, 'rb') as stream:
            texts = islice(documents(stream), docs if docs > 0 else None)
            chunks = tokenize_documents(encoder, texts)
            return write_dataset(data_folder(out or home), encoder, named, chunks)
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise Refusal(f'{archive} is cut short or damaged ({error}): delete it and get it again.') from None


# -------------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(path, checkpoint):
    """Writes a dict of tensors and plain values. Raises OSError when the disk is full."""
    try:
        with write_atomically(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch turns the error of a full disk into one of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_or_refuse(read, path, what='file of its kind: get it again'):
    """What read(path) returns. A file that is damaged, or of another kind, can make it fail in any
    way: that is a Refusal too."""
    try:
        return read(path)
    except (OSError, Refusal):
        raise
    except Exception:
        raise Refusal(f'{path} is truncated or no {what}.') from None


def read_torch(path, *keys, what):
    """The dict in a file of torch.save; refused without these keys. Its tensors stay on disk until
    they are used."""
    def load(path):
        found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        if not found.keys() >= set(keys):
            raise ValueError('keys are missing')
        return found
    return read_or_refuse(load, path, what)


def read_json(*path):
    """What is in a JSON file; an empty dict where there is none."""
    def load(path):
        return json.loads(read_text(path) or '{}')
    return read_or_refuse(load, os.path.join(*path))


def load_checkpoint(path):
    """The dict in a checkpoint, or in the ckpt.pt of a folder. Raises Refusal."""
    if os.path.isdir(path):
        path = os.path.join(path, 'ckpt.pt')
    if not os.path.exists(path):
        raise Refusal(f'There is no checkpoint {path}; train one first, or give the path of another.')
    return read_torch(path, 'config', 'model', what='checkpoint of nanoblock; published weights need: '
                                                    'python prepare.py weights')


def check_shapes(tensors, expected):
    """Refuses {name: tensor} if its names and shapes are not those of `expected`."""
    have = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    want = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    wrong = []
    for name in {**want, **have}:
        if have.get(name) != want.get(name):
            wrong.append(f'{name} is {have.get(name, "missing")}, not {want.get(name, "known")}')
    if wrong:
        raise Refusal(f'The weights do not fit their config: {"; ".join(wrong[:5])}.')


def load_weights(model, weights, assign=False):
    """Copies a checkpoint's tensors into a model; with `assign` they become its parameters."""
    check_shapes(weights, model.state_dict())
    model.load_state_dict(weights, assign=assign)


def model_of(path):
    """The model of a checkpoint, with its weights still on disk, and the checkpoint. Raises Refusal."""
    checkpoint = load_checkpoint(path)
    try:
        with torch.device('meta'):  # shapes without memory
            model = Transformer(Config(**checkpoint['config']))
    except (TypeError, ValueError) as error:
        raise Refusal(f'{path} has a config that this model.py does not know: {error}.') from None
    load_weights(model, checkpoint['model'], assign=True)
    return model, checkpoint


# -------------------------------------------------------------------------------
# Published models and their sizes


def model_sizes(n_layer, n_head, n_kv_head, n_embd, d_ff, vocab_size, block_size, **more):
    return dict(n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, d_ff=d_ff,
                vocab_size=vocab_size, block_size=block_size, **more)


# The family, then layers, heads, key/value heads (0: as many as heads), width, MLP width (0: 4 times
# the width), vocabulary, and length.
PUBLISHED = {
    'gpt2': ('gpt2', model_sizes(12, 12, 0, 768, 0, 50257, 1024)),
    'gpt2-medium': ('gpt2', model_sizes(24, 16, 0, 1024, 0, 50257, 1024)),
    'gpt2-large': ('gpt2', model_sizes(36, 20, 0, 1280, 0, 50257, 1024)),
    'gpt2-xl': ('gpt2', model_sizes(48, 25, 0, 1600, 0, 50257, 1024)),
    'gpt3-175b': ('gpt2', model_sizes(96, 96, 0, 12288, 0, 50257, 2048)),
    'llama-7b': ('llama', model_sizes(32, 32, 0, 4096, 11008, 32000, 2048, norm_eps=1e-6)),
    'llama2-7b': ('llama', model_sizes(32, 32, 0, 4096, 11008, 32000, 4096)),
    'llama2-13b': ('llama', model_sizes(40, 40, 0, 5120, 13824, 32000, 4096)),
    'llama2-70b': ('llama', model_sizes(80, 64, 8, 8192, 28672, 32000, 4096)),
    'llama3-8b': ('llama3', model_sizes(32, 32, 8, 4096, 14336, 128256, 8192)),
    'llama3-70b': ('llama3', model_sizes(80, 64, 8, 8192, 28672, 128256, 8192)),
    'llama3.1-8b': ('llama3.1', model_sizes(32, 32, 8, 4096, 14336, 128256, 131072)),
    'mistral-7b': ('mistral', model_sizes(32, 32, 8, 4096, 14336, 32000, 32768, window=4096)),
    'mixtral-8x7b': ('mixtral', model_sizes(32, 32, 8, 4096, 14336, 32000, 32768)),
    'qwen2-7b': ('qwen2', model_sizes(28, 28, 4, 3584, 18944, 152064, 131072)),
    'qwen3-8b': ('qwen3', model_sizes(36, 32, 8, 4096, 12288, 151936, 40960, head_dim=128)),
    'deepseek-v2-lite': ('deepseek', model_sizes(
        27, 16, 0, 2048, 10944, 102400, 163840, head_dim=192, rope_dim=64, v_dim=128, kv_rank=512,
        n_expert=64, n_active=6, d_expert=1408, rope_scaling='yarn,40,4096,32,1,0.707,0.707')),
}


def published(name):
    """The Config fields of a published model: its family's switches and its own sizes."""
    family, own = PUBLISHED[name]
    return {**FAMILIES[family], **own}


# -------------------------------------------------------------------------------
# Published weights: the tables of tensors
#
# One row per published tensor: our name, theirs, and how theirs is stored. Import reads a row from
# right to left, export from left to right. A new family is rows.
#
# Names are without .weight and .bias. The first * is the layer; the second, and [*], the expert. Where
# several rows name the same tensor of ours, they fill its rows from the top, in this order.
#
#   rows            as ours
#   transposed      matrices are (in, out), ours (out, in)
#   pairs           the two rows of a rotary pair are neighbours; in ours they are half a head apart
#   shared pairs    the same, for the one rotary key that all heads share
#   heads           for each head its key rows, then its value rows; ours has all keys, then all values

LLAMA_ENDS = [
    # ours                      theirs                                              how
    ('embed',                   'model.embed_tokens',                               'rows'),
    ('blocks.*.attn_norm',      'model.layers.*.input_layernorm',                   'rows'),
    ('blocks.*.mlp_norm',       'model.layers.*.post_attention_layernorm',          'rows'),
    ('norm',                    'model.norm',                                       'rows'),
    ('lm_head',                 'lm_head',                                          'rows'),
]
LLAMA_ATTENTION = [
    # ours                      theirs                                              how
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.q_proj',                  'rows'),
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.k_proj',                  'rows'),
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.v_proj',                  'rows'),
    ('blocks.*.attn.w_out',     'model.layers.*.self_attn.o_proj',                  'rows'),
    ('blocks.*.attn.q_norm',    'model.layers.*.self_attn.q_norm',                  'rows'),
    ('blocks.*.attn.k_norm',    'model.layers.*.self_attn.k_norm',                  'rows'),
]
LLAMA_MLP = [
    # ours                      theirs                                              how
    ('blocks.*.mlp.w_up',       'model.layers.*.mlp.gate_proj',                     'rows'),
    ('blocks.*.mlp.w_up',       'model.layers.*.mlp.up_proj',                       'rows'),
    ('blocks.*.mlp.w_down',     'model.layers.*.mlp.down_proj',                     'rows'),
]
MIXTRAL_MLP = [
    # ours                      theirs                                              how
    ('blocks.*.mlp.router',     'model.layers.*.block_sparse_moe.gate',             'rows'),
    ('blocks.*.mlp.w_up[*]',    'model.layers.*.block_sparse_moe.experts.*.w1',     'rows'),
    ('blocks.*.mlp.w_up[*]',    'model.layers.*.block_sparse_moe.experts.*.w3',     'rows'),
    ('blocks.*.mlp.w_down[*]',  'model.layers.*.block_sparse_moe.experts.*.w2',     'rows'),
]
COHERE_ATTENTION = [
    # ours                      theirs                                              how
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.q_proj',                  'pairs'),
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.k_proj',                  'pairs'),
    ('blocks.*.attn.w_qkv',     'model.layers.*.self_attn.v_proj',                  'rows'),
    ('blocks.*.attn.w_out',     'model.layers.*.self_attn.o_proj',                  'rows'),
]
DEEPSEEK_ATTENTION = [
    # ours                          theirs                                          how
    ('blocks.*.attn.w_q_latent',    'model.layers.*.self_attn.q_a_proj',            'rows'),
    ('blocks.*.attn.q_norm',        'model.layers.*.self_attn.q_a_layernorm',       'rows'),
    ('blocks.*.attn.w_kv_latent',   'model.layers.*.self_attn.kv_a_proj_with_mqa',  'shared pairs'),
    ('blocks.*.attn.kv_norm',       'model.layers.*.self_attn.kv_a_layernorm',      'rows'),
    ('blocks.*.attn.w_kv',          'model.layers.*.self_attn.kv_b_proj',           'heads'),
    ('blocks.*.attn.w_out',         'model.layers.*.self_attn.o_proj',              'rows'),
]
# Queries come straight from x, or from a latent of their own.
DEEPSEEK_PLAIN_QUERIES = [
    # ours                          theirs                                          how
    ('blocks.*.attn.w_q',           'model.layers.*.self_attn.q_proj',              'pairs'),
]
DEEPSEEK_LATENT_QUERIES = [
    # ours                          theirs                                          how
    ('blocks.*.attn.w_q',           'model.layers.*.self_attn.q_b_proj',            'pairs'),
]
DEEPSEEK_EXPERTS = [
    # ours                          theirs                                          how
    ('blocks.*.mlp.router',         'model.layers.*.mlp.gate',                      'rows'),
    ('blocks.*.mlp.shared.w_up',    'model.layers.*.mlp.shared_experts.gate_proj',  'rows'),
    ('blocks.*.mlp.shared.w_up',    'model.layers.*.mlp.shared_experts.up_proj',    'rows'),
    ('blocks.*.mlp.shared.w_down',  'model.layers.*.mlp.shared_experts.down_proj',  'rows'),
    ('blocks.*.mlp.w_up[*]',        'model.layers.*.mlp.experts.*.gate_proj',       'rows'),
    ('blocks.*.mlp.w_up[*]',        'model.layers.*.mlp.experts.*.up_proj',         'rows'),
    ('blocks.*.mlp.w_down[*]',      'model.layers.*.mlp.experts.*.down_proj',       'rows'),
]
GPT_BLOCKS = [
    # ours                      theirs                                              how
    ('blocks.*.attn_norm',      'transformer.h.*.ln_1',                             'rows'),
    ('blocks.*.attn.w_qkv',     'transformer.h.*.attn.c_attn',                      'transposed'),
    ('blocks.*.attn.w_out',     'transformer.h.*.attn.c_proj',                      'transposed'),
    ('blocks.*.mlp_norm',       'transformer.h.*.ln_2',                             'rows'),
    ('blocks.*.mlp.w_up',       'transformer.h.*.mlp.c_fc',                         'transposed'),
    ('blocks.*.mlp.w_down',     'transformer.h.*.mlp.c_proj',                       'transposed'),
    ('lm_head',                 'lm_head',                                          'rows'),
]
GPT1_ENDS = [
    # ours                      theirs                                              how
    ('embed',                   'transformer.tokens_embed',                         'rows'),
    ('embed_pos',               'transformer.positions_embed',                      'rows'),
]
GPT2_ENDS = [
    # ours                      theirs                                              how
    ('embed',                   'transformer.wte',                                  'rows'),
    ('embed_pos',               'transformer.wpe',                                  'rows'),
    ('norm',                    'transformer.ln_f',                                 'rows'),
]
META = [
    # ours                      theirs                                              how
    ('embed',                   'tok_embeddings',                                   'rows'),
    ('blocks.*.attn_norm',      'layers.*.attention_norm',                          'rows'),
    ('blocks.*.attn.w_qkv',     'layers.*.attention.wq',                            'pairs'),
    ('blocks.*.attn.w_qkv',     'layers.*.attention.wk',                            'pairs'),
    ('blocks.*.attn.w_qkv',     'layers.*.attention.wv',                            'rows'),
    ('blocks.*.attn.w_out',     'layers.*.attention.wo',                            'rows'),
    ('blocks.*.mlp_norm',       'layers.*.ffn_norm',                                'rows'),
    ('blocks.*.mlp.w_up',       'layers.*.feed_forward.w1',                         'rows'),
    ('blocks.*.mlp.w_up',       'layers.*.feed_forward.w3',                         'rows'),
    ('blocks.*.mlp.w_down',     'layers.*.feed_forward.w2',                         'rows'),
    ('norm',                    'norm',                                             'rows'),
    ('lm_head',                 'output',                                           'rows'),
]

# The tables, put together.
LLAMA = LLAMA_ENDS + LLAMA_ATTENTION + LLAMA_MLP
MIXTRAL = LLAMA_ENDS + LLAMA_ATTENTION + MIXTRAL_MLP
COHERE = LLAMA_ENDS + COHERE_ATTENTION + LLAMA_MLP
DEEPSEEK = LLAMA_ENDS + DEEPSEEK_ATTENTION + LLAMA_MLP + DEEPSEEK_EXPERTS
GPT1 = GPT1_ENDS + GPT_BLOCKS
GPT2 = GPT2_ENDS + GPT_BLOCKS
# nanoGPT has GPT-2's names, and matrices as ours.
NANOGPT = [(ours, theirs, 'rows') for ours, theirs, _ in GPT2]

# Old files hold masks and tables of angles beside the weights.
NOT_WEIGHTS = re.compile(r'(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(transformer\.)?position_ids|'
                         r'rope\.freqs|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')

# -------------------------------------------------------------------------------
# Published weights: the tables of config.json
#
# One row per field: ours, theirs, and the values of theirs that are taken.
#
#   ANY             every value; null is our 0: off, or derived
#   OPTIONAL        the same, and the field may be missing
#   (a, b, None)    these values only. None: null, or no such field. Export writes the first, where
#                   ours has no field for it.

ANY, OPTIONAL = 'any', 'optional'
NO = (False, None)

SIZES = [
    # ours              theirs                      taken
    ('vocab_size',      'vocab_size',               ANY),
    ('block_size',      'max_position_embeddings',  ANY),
    ('n_layer',         'num_hidden_layers',        ANY),
    ('n_embd',          'hidden_size',              ANY),
    ('n_head',          'num_attention_heads',      ANY),
    ('n_kv_head',       'num_key_value_heads',      OPTIONAL),
    ('d_ff',            'intermediate_size',        ANY),
    ('tie',             'tie_word_embeddings',      OPTIONAL),
    ('',                'hidden_act',               ('silu', None)),
]
LLAMA_FIELDS = SIZES + [
    # ours              theirs                      taken
    ('head_dim',        'head_dim',                 OPTIONAL),
    ('norm_eps',        'rms_norm_eps',             ANY),
]
MISTRAL_FIELDS = LLAMA_FIELDS + [
    # ours              theirs                      taken
    ('window',          'sliding_window',           ANY),
]
MIXTRAL_FIELDS = MISTRAL_FIELDS + [
    # ours              theirs                      taken
    ('d_expert',        'intermediate_size',        ANY),
    ('n_expert',        'num_local_experts',        ANY),
    ('n_active',        'num_experts_per_tok',      ANY),
]
COHERE_FIELDS = SIZES + [
    # ours              theirs                      taken
    ('head_dim',        'head_dim',                 OPTIONAL),
    ('norm_eps',        'layer_norm_eps',           ANY),
    ('',                'logit_scale',              (1.0,)),
    ('',                'use_qk_norm',              NO),
]
DEEPSEEK_FIELDS = SIZES + [
    # ours              theirs                      taken
    ('head_dim',        'qk_nope_head_dim',         ANY),       # ours counts the rotated part too
    ('rope_dim',        'qk_rope_head_dim',         ANY),
    ('v_dim',           'v_head_dim',               ANY),
    ('kv_rank',         'kv_lora_rank',             ANY),
    ('q_rank',          'q_lora_rank',              ANY),
    ('norm_eps',        'rms_norm_eps',             (1e-6,)),   # the norms of the latents have no other
    ('n_expert',        'n_routed_experts',         ANY),
    ('n_active',        'num_experts_per_tok',      ANY),
    ('n_shared',        'n_shared_experts',         ANY),
    ('d_expert',        'moe_intermediate_size',    ANY),
    ('n_dense',         'first_k_dense_replace',    ANY),
    ('expert_scale',    'routed_scaling_factor',    ANY),
    ('',                'topk_method',              ('greedy', None)),
    ('',                'norm_topk_prob',           NO),
    ('',                'scoring_func',             ('softmax', None)),
    ('',                'n_group',                  (1, None)),
    ('',                'topk_group',               (1, None)),
    ('',                'moe_layer_freq',           (1, None)),
]
GPT1_FIELDS = [
    # ours              theirs                      taken
    ('vocab_size',      'vocab_size',               ANY),
    ('block_size',      'n_positions',              ANY),
    ('n_layer',         'n_layer',                  ANY),
    ('n_embd',          'n_embd',                   ANY),
    ('n_head',          'n_head',                   ANY),
    ('norm_eps',        'layer_norm_epsilon',       ANY),
    ('tie',             'tie_word_embeddings',      OPTIONAL),
    ('',                'afn',                      ('gelu', None)),
]
GPT2_FIELDS = GPT1_FIELDS[:-1] + [
    # ours              theirs                      taken
    ('d_ff',            'n_inner',                  OPTIONAL),
    ('',                'activation_function',      ('gelu_new', 'gelu_pytorch_tanh', None)),
    ('',                'scale_attn_weights',       (True, None)),
    ('',                'scale_attn_by_inverse_layer_idx',  NO),
    ('',                'reorder_and_upcast_attn',  NO),
    ('',                'add_cross_attention',      NO),
]
# Checked in every file, and never written.
ALWAYS = [
    # ours              theirs
    ('',                'quantization_config',      (None,)),
    ('',                'attention_bias',           NO),
    ('',                'mlp_bias',                 NO),
    ('',                'use_sliding_window',       NO),
    ('',                'is_causal',                (True, None)),
    ('',                'partial_rotary_factor',    (1.0, None)),
]

Architecture = namedtuple('Architecture', 'model_type family tensors fields')
ARCHITECTURES = {
    'GPT2LMHeadModel': Architecture('gpt2', 'gpt2', GPT2, GPT2_FIELDS),
    'OpenAIGPTLMHeadModel': Architecture('openai-gpt', 'gpt1', GPT1, GPT1_FIELDS),
    'LlamaForCausalLM': Architecture('llama', 'llama', LLAMA, LLAMA_FIELDS),
    'MistralForCausalLM': Architecture('mistral', 'mistral', LLAMA, MISTRAL_FIELDS),
    'MixtralForCausalLM': Architecture('mixtral', 'mixtral', MIXTRAL, MIXTRAL_FIELDS),
    'Qwen2ForCausalLM': Architecture('qwen2', 'qwen2', LLAMA, LLAMA_FIELDS),
    'Qwen3ForCausalLM': Architecture('qwen3', 'qwen3', LLAMA, LLAMA_FIELDS),
    'DeepseekV2ForCausalLM': Architecture('deepseek_v2', 'deepseek', DEEPSEEK, DEEPSEEK_FIELDS),
    'CohereForCausalLM': Architecture('cohere', 'palm', COHERE, COHERE_FIELDS),
}

# The kinds of rope scaling, and config.json's fields for the numbers of each, in the order in which our
# rope_scaling has them.
ROPE = {
    'default': (),
    'linear': ('factor',),
    'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
    'yarn': ('factor', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'mscale',
             'mscale_all_dim'),
}
ROPE_DEFAULTS = dict(beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=0)

# -------------------------------------------------------------------------------
# Published weights: a config.json to our fields and back


def unsupported(field, value, supported):
    choices = ' or '.join(repr(choice) for choice in supported)
    return Refusal(f'{field} is {value!r}, but nanoblock supports {choices} here.')


def from_hugging_face(config):
    """Our Config fields, a dict, from the dict of a config.json. What is not supported and would change
    the result raises Refusal."""
    # which architecture it is
    name = (config.get('architectures') or [None])[0]
    if name not in ARCHITECTURES:
        raise unsupported('architectures', name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    if set(config.get('layer_types') or ()) - {'full_attention'}:
        raise unsupported('layer_types', config['layer_types'], ['full_attention'])

    # the family's switches, then the file's fields
    values = dict(FAMILIES[architecture.family])
    for ours, theirs, taken in ALWAYS + architecture.fields:
        value = config.get(theirs)
        if isinstance(taken, tuple) and value not in taken:
            raise unsupported(theirs, value, taken)
        if taken == ANY and theirs not in config:
            raise Refusal(f'config.json has no {theirs}.')
        if ours == 'n_expert' and not value:
            raise unsupported(theirs, value, ['1 or more'])
        if ours == 'tie' and value is None:
            continue  # as the family has it
        if ours:
            values[ours] = 0 if value is None else value
    # our head_dim includes the rotated part
    if values.get('kv_rank'):
        values['head_dim'] += values['rope_dim']
    # the files of the first Llamas have no rope_theta
    if values.get('pos') != 'learned':
        base = 10000.0 if name == 'LlamaForCausalLM' else None
        values.update(read_rope(config, base))
    return values


def read_rope(config, default_base):
    """Our rope_base and rope_scaling from a config.json: from its rope_theta and rope_scaling, or from
    rope_parameters, the newer field for both."""
    # refuse what is given and not known here
    given = {**(config.get('rope_scaling') or {}), **(config.get('rope_parameters') or {})}
    given = {field: value for field, value in given.items() if value is not None}
    kind = given.get('rope_type') or given.get('type', 'default')
    if kind not in ROPE:
        raise unsupported('rope_type', kind, ROPE)
    for field in given.keys() - {'rope_theta', 'rope_type', 'type', *ROPE['llama3'], *ROPE['yarn']}:
        raise unsupported(f'{field} of rope', given[field], [None])
    # with only one of the two, transformers and DeepSeek's own code compute different results
    m, m_all = given.get('mscale'), given.get('mscale_all_dim')
    if m_all and not m or m not in (None, 1) and not m_all:
        raise unsupported('mscale', m, [m_all or 1])

    # the numbers, from wherever they stand
    length = config.get('original_max_position_embeddings') or config.get('max_position_embeddings')
    known = {'rope_theta': config.get('rope_theta', default_base),
             'original_max_position_embeddings': length, **ROPE_DEFAULTS, **given}
    for field in 'rope_theta', *ROPE[kind]:
        if known.get(field) is None:
            raise Refusal(f'config.json has no {field}.')
    scaling = ''
    if kind != 'default':
        scaling = ','.join([kind, *[str(known[field]) for field in ROPE[kind]]])
    return dict(rope_base=known['rope_theta'], rope_scaling=scaling)


def to_hugging_face(cfg, name):
    """The config.json, a dict, that says what cfg says, as far as an architecture has words for it."""
    architecture = ARCHITECTURES[name]
    config = {'architectures': [name], 'model_type': architecture.model_type}
    for ours, theirs, taken in architecture.fields:
        if not ours:
            config[theirs] = taken[0]
        elif theirs in ('sliding_window', 'q_lora_rank'):
            config[theirs] = getattr(cfg, ours) or None
        else:
            config[theirs] = getattr(cfg, ours)
    if 'qk_nope_head_dim' in config:
        config['qk_nope_head_dim'] -= cfg.rope_dim
    if cfg.pos == 'rope':
        # in the old fields, and in the new one
        kind, *numbers = (cfg.rope_scaling or 'default').split(',')
        scaling = dict(zip(ROPE[kind], [json.loads(text) for text in numbers]), rope_type=kind)
        config['rope_theta'] = cfg.rope_base
        config['rope_scaling'] = dict(scaling, type=kind) if numbers else None
        config['rope_parameters'] = dict(scaling, rope_theta=cfg.rope_base)
    return config


def hugging_face_config(cfg):
    """The config.json, a dict, of the architecture that computes what cfg says. Each is tried: the right
    one gives cfg when it is read back. Raises Refusal if there is none."""
    # these change neither the result nor the tensors in the file
    unused = ['dropout', 'vocab_multiple', 'balance']
    if cfg.n_expert and not cfg.n_dense:
        unused.append('d_ff')
    differences = {}
    for name in ARCHITECTURES:
        with suppress(Refusal):
            config = to_hugging_face(cfg, name)
            back = build(Config, from_hugging_face(config))
            differences[name] = [f'{field}={value}' for field, value in asdict(cfg).items()
                                 if field not in unused and value != getattr(back, field)]
            if not differences[name]:
                return config
    closest = min(differences, key=lambda name: len(differences[name]))
    raise Refusal(f'transformers has no counterpart of this model: {closest} comes closest, but without '
                  f'{", ".join(differences[closest])}.')


# -------------------------------------------------------------------------------
# Published weights: their tensors to ours and back


def tensor_table(cfg, name):
    """The table of an architecture's tensors, as far as it depends on the config."""
    tensors = ARCHITECTURES[name].tensors
    if tensors is DEEPSEEK:
        return tensors + (DEEPSEEK_LATENT_QUERIES if cfg.q_rank else DEEPSEEK_PLAIN_QUERIES)
    return tensors


def published_tensors(model, table):
    """Yields, for each published tensor of a model: our name, the part of our tensor that it fills, its
    own name, and how it is stored."""
    for name, tensor in model.state_dict().items():
        # blocks.3.mlp.w_up.weight  ->  blocks.*.mlp.w_up, layer 3, .weight
        ending = '.bias' if name.endswith('.bias') else '.weight'
        layer = re.search(r'\d+', name)
        pattern = name.removesuffix(ending)
        if layer:
            pattern = pattern.replace(layer[0], '*')
        # an expert is one matrix of a stack
        experts = [None]
        if tensor.dim() == 3:
            pattern += '[*]'
            experts = range(len(tensor))
        sources = [(theirs, how) for ours, theirs, how in table if ours == pattern]
        if not sources:
            raise Refusal(f'{pattern} has no published name: add a row to the table of its architecture.')
        # how many rows of ours each of them fills: all, or those of its role
        heights = [tensor.shape[-2] if tensor.dim() > 1 else len(tensor)]
        if len(sources) > 1:
            heights = model.get_submodule(name.rpartition('.')[0]).roles
        for expert in experts:
            start = 0
            for (theirs, how), height in zip(sources, heights):
                part = slice(start, start + height)
                start += height
                if layer:
                    theirs = theirs.replace('*', layer[0], 1)
                if expert is not None:
                    theirs = theirs.replace('*', str(expert))
                    part = expert, part
                yield name, part, theirs + ending, how


def row_order(cfg, how, n_rows):
    """The order of a published tensor's rows in ours: our row i is its row order[i]. how: see the
    tables."""
    rows = torch.arange(n_rows)
    rotated_width = cfg.rope_dim or cfg.head_dim
    if how == 'heads':
        heads = rows.view(cfg.n_head, -1)
        keys, values = heads.split([cfg.head_dim - rotated_width, cfg.v_dim], dim=1)
        return torch.cat([keys.flatten(), values.flatten()])
    width = cfg.head_dim if how == 'pairs' else n_rows
    heads = rows.view(-1, width)
    plain, rotated = heads.split([width - rotated_width, rotated_width], dim=1)
    # the first of each pair, then the second of each
    rotated = torch.cat([rotated[:, 0::2], rotated[:, 1::2]], dim=1)
    return torch.cat([plain, rotated], dim=1).flatten()


def from_published(cfg, how, tensor):
    """A published tensor, as it stands in ours. how: see the tables."""
    if how == 'transposed' and tensor.dim() == 2:
        return tensor.T
    if how in ('pairs', 'shared pairs', 'heads'):
        return tensor[row_order(cfg, how, len(tensor))]
    return tensor


def to_published(cfg, how, part):
    """The other way: a part of our tensor, as it is published."""
    if how == 'transposed' and part.dim() == 2:
        return part.T
    if how in ('pairs', 'shared pairs', 'heads'):
        return part[row_order(cfg, how, len(part)).argsort()]
    return part


def dtype_to_store(tensors, wish):
    """The torch.dtype wished for. Without a wish bf16 or fp16, if all tensors are stored so, or fp32."""
    if wish:
        return DTYPES[wish]
    found = {tensor.dtype for tensor in tensors.values()}
    for half in torch.bfloat16, torch.float16:
        if found == {half}:
            return half
    return torch.float32


def convert(cfg, table, tensors, dtype=''):
    """Our state dict from published tensors, which stay on disk until each is copied to its place."""
    with torch.device('meta'):  # shapes without memory
        model = Transformer(cfg)
    state = model.state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if not NOT_WEIGHTS.fullmatch(name)}
    # a tied head may be stored twice
    their_name = {ours: f'{theirs}.weight' for ours, theirs, _ in table}
    embed = tensors.get(their_name['embed'])
    tied = tensors.get(their_name['lm_head'])
    if cfg.tie and embed is not None and tied is not None and torch.equal(embed, tied):
        del tensors[their_name['lm_head']]
    # every tensor is there, and has the shape that the config says
    expected = {}
    for ours, part, theirs, how in published_tensors(model, table):
        expected[theirs] = to_published(cfg, how, state[ours][part])
    check_shapes(tensors, expected)
    # copied, one by one
    kind = dtype_to_store(tensors, dtype)
    for name in state:
        state[name] = torch.empty_like(state[name], device='cpu', dtype=kind)
    for ours, part, theirs, how in published_tensors(model, table):
        state[ours][part] = from_published(cfg, how, tensors[theirs])
    return state


# -------------------------------------------------------------------------------
# Published weights: formats
#
# Each reader returns a Config, a table of tensors, the published tensors, {name: tensor}, which are
# still on disk, and a tokenizer's description.

STORED = {'F32': torch.float32, 'BF16': torch.bfloat16, 'F16': torch.float16, 'F64': torch.float64}


def read_safetensors(path):
    """{name: tensor} of a file; the tensors stay on disk. The file is 8 bytes that hold a length, a JSON
    header of that length, and the data."""
    raw = np.memmap(path, np.uint8, 'c')  # a private copy, since torch warns of memory that is read-only
    start = 8 + int(raw[:8].view('<u8')[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop('__metadata__', None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry['data_offsets']
        kind = entry['dtype']
        if NOT_WEIGHTS.fullmatch(name):  # some of them hold integers
            continue
        if kind not in STORED:
            raise unsupported(f'dtype of {name}', kind, STORED)
        data = torch.from_numpy(raw[start + first:start + last])
        tensors[name] = data.view(STORED[kind]).view(entry['shape'])
    return tensors


def write_safetensors(path, tensors, dtype):
    """Writes tensors, {name: function that makes the tensor}. Each is made twice, once for its shape and
    once to be written, so that only one is in memory at a time."""
    names = {stored: name for name, stored in STORED.items()}
    # the header says where each tensor is
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    for name, make in tensors.items():
        shape = make().shape
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {'dtype': names[dtype], 'shape': shape, 'data_offsets': [start, end]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # the data begins at a multiple of 8
    with write_atomically(path) as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for make in tensors.values():
            file.write(make().to(dtype).contiguous().view(-1).view(torch.uint8).numpy())


def weight_files(folder):
    """The names of a folder's safetensors: one, or those that an index names."""
    index = read_json(folder, 'model.safetensors.index.json')
    if not index.get('weight_map'):
        return ['model.safetensors']
    return sorted({os.path.basename(file) for file in index['weight_map'].values()})


def read_hugging_face_folder(folder):
    """A folder of config.json and safetensors."""
    config = read_json(folder, 'config.json')
    cfg = build(Config, from_hugging_face(config))
    tensors = {}
    for file in weight_files(folder):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            raise Refusal(f'{folder} has no {file}.')
        tensors.update(read_or_refuse(read_safetensors, path))
    name = config['architectures'][0]
    # the oldest files of GPT leave the first word out
    if ARCHITECTURES[name].family in ('gpt1', 'gpt2'):
        tensors = {re.sub(r'^(?!transformer\.|lm_head\.)', 'transformer.', their_name): tensor
                   for their_name, tensor in tensors.items()}
    return cfg, tensor_table(cfg, name), tensors, hugging_face_tokenizer(folder, config)


def download_from_hub(name):
    """Downloads a model of the Hugging Face hub, or of its mirror HF_ENDPOINT. Returns the folder."""
    site = os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'
    folder = os.path.join(ROOT, 'data', 'hub', name)
    token = os.environ.get('HF_TOKEN')
    headers = {'Authorization': f'Bearer {token}'} if token else {}

    def get(file):
        download(f'{site}/{name}/resolve/main/{file}', os.path.join(folder, file), headers=headers)
    try:
        get('config.json')
        # an index, if the weights are in several files, and a tokenizer, if there is one
        for file in 'model.safetensors.index.json', 'tokenizer.json':
            with suppress(NotThere):
                get(file)
        for file in weight_files(folder):
            get(file)
    except Refusal as error:
        raise Refusal(f'{error} A gated model needs its terms accepted and HF_TOKEN.') from None
    return folder


META_PARAMS = {'dim', 'n_layers', 'n_heads', 'n_kv_heads', 'vocab_size', 'multiple_of', 'norm_eps',
               'ffn_dim_multiplier', 'rope_theta', 'use_scaled_rope', 'max_seq_len'}


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
    # the sizes that params.json does not say are those of the tensors
    tensors = read_torch(path, 'tok_embeddings.weight', 'layers.0.feed_forward.w1.weight',
                         what="Llama of Meta's")
    cfg = build(Config, dict(
        n_layer=params['n_layers'], n_embd=params['dim'], n_head=params['n_heads'],
        n_kv_head=params.get('n_kv_heads') or 0,
        d_ff=len(tensors['layers.0.feed_forward.w1.weight']),
        vocab_size=len(tensors['tok_embeddings.weight']),
        # rotary positions have no end: where Meta states no length, this one is a choice
        block_size=params.get('max_seq_len', 4096),
        norm_eps=params['norm_eps'], rope_base=params.get('rope_theta', 10000.0)))
    tokenizer = meta_tokenizer(os.path.join(folder, 'tokenizer.model'), cfg.vocab_size)
    return cfg, META, tensors, tokenizer


def read_nanogpt(path):
    """nanoGPT's ckpt.pt. Its fields have our names; its GELU is the exact one."""
    checkpoint = read_torch(path, 'model', 'model_args', what='checkpoint of nanoGPT')
    args = {**FAMILIES['gpt2'], 'mlp': 'gelu', **checkpoint['model_args']}
    # GPT-2's vocabulary, padded to a multiple of 64
    if args['vocab_size'] == 50304:
        args.update(vocab_size=50257, vocab_multiple=64)
    if args['vocab_size'] == 50257:
        tokenizer = {'kind': 'tiktoken', 'name': 'gpt2'}
    else:
        why = 'nanoGPT keeps its characters beside the data, not in the checkpoint'
        tokenizer = bare_ids(args['vocab_size'], why)
    # a compiled model's names have a prefix
    tensors = {name.removeprefix('_orig_mod.'): tensor for name, tensor in checkpoint['model'].items()}
    return build(Config, args), NANOGPT, tensors, tokenizer


# -------------------------------------------------------------------------------
# Published weights: their tokenizers

GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r'\s*[\r\n]+|\s+(?!\S)|\s+')


def bare_ids(vocab_size, why, **more):
    """The description of a tokenizer that tiktoken can't express."""
    return {'kind': 'ids', 'vocab_size': vocab_size, 'why': why, **more}


def stored_bpe(ranks, pattern, special, eot, **more):
    """The description of a BPE: ranks {bytes: id}, the pattern that splits a text into words, special
    tokens {name: id}."""
    lines = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        lines.append(f'{base64.b64encode(token).decode()} {rank}\n')
    return {'kind': 'bpe', 'ranks': ''.join(lines), 'pattern': pattern, 'special': special, 'eot': eot,
            **more}


def meta_tokenizer(path, vocab_size):
    """The description of a tokenizer.model. Llama 3's is a text of tiktoken's, and its special tokens
    have the ids that follow. Before, it was SentencePiece's."""
    ranks = {}
    try:
        for line in Path(path).read_text(encoding='ascii').splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    except (OSError, ValueError):
        why = "its tokenizer.model is missing, or SentencePiece's, which tiktoken can't express"
        return bare_ids(vocab_size, why, bos=1)
    # the special tokens, in Meta's order
    reserved = [f'reserved_special_token_{i}' for i in range(251)]
    names = ['begin_of_text', 'end_of_text', *reserved[:4], 'start_header_id', 'end_header_id',
             reserved[4], 'eot_id', *reserved[5:]]
    special = {f'<|{name}|>': len(ranks) + i for i, name in enumerate(names)}
    return stored_bpe(ranks, LLAMA3_SPLIT, special, eot=special['<|end_of_text|>'],
                      bos=special['<|begin_of_text|>'])


def hugging_face_tokenizer(folder, config):
    """The description of a folder's tokenizer.json, if it is a byte-level BPE as tiktoken's; of others,
    bare ids and why."""
    file = read_json(folder, 'tokenizer.json')
    special = {token['content']: token['id'] for token in file.get('added_tokens', ())}
    more = {}
    if (bos := first_token(file)) is not None:
        more['bos'] = bos
    ranks = byte_level_ranks(file.get('model') or {}, special)
    pattern = split_pattern(file)
    normalizer = (file.get('normalizer') or {}).get('type')
    if ranks is None or pattern is None or normalizer not in (None, 'NFC'):
        why = 'its tokenizer.json is missing, or not the byte-level BPE that tiktoken can express'
        return bare_ids(config['vocab_size'], why, **more)
    eot = config.get('eos_token_id')
    if isinstance(eot, list):
        eot = eot[0]
    return stored_bpe(ranks, pattern, special, eot, nfc=normalizer == 'NFC', **more)


def first_token(file):
    """The id that a tokenizer.json puts before every text, or None."""
    ending = file.get('post_processor') or {}
    for step in ending.get('processors', [ending]):
        if step.get('type') == 'TemplateProcessing' and step['single']:
            first = step['single'][0]
            if 'SpecialToken' in first:
                return step['special_tokens'][first['SpecialToken']['id']]['ids'][0]
    return None


def split_pattern(file):
    """The regular expression with which a tokenizer.json splits a text into words, or None."""
    split = file.get('pre_tokenizer') or {}
    *splits, last = split.get('pretokenizers') or [split]
    if last.get('type') != 'ByteLevel' or last.get('add_prefix_space') is not False:
        return None
    # ByteLevel splits as GPT-2 does, unless a step before it has a pattern of its own
    splits_itself = last.get('use_regex', True)
    if not splits and splits_itself:
        return GPT2_SPLIT
    if len(splits) == 1 and not splits_itself:
        step = dict(splits[0])
        pattern = step.pop('pattern', {})
        if step == {'type': 'Split', 'behavior': 'Isolated', 'invert': False}:
            return pattern.get('Regex')
    return None


def byte_level_ranks(model, special):
    """{bytes: id} of a tokenizer.json's vocabulary, or None where tiktoken would merge otherwise."""
    # Tokens are written in 256 letters, one per byte. Printable bytes are their own letters; the
    # others have the letters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of.update({chr(256 + i): byte for i, byte in enumerate(others)})
    ranks, merged = {}, []
    try:
        for word, rank in model['vocab'].items():
            if word not in special:
                ranks[bytes([byte_of[letter] for letter in word])] = rank
        for merge in model['merges']:
            word = ''.join(merge) if isinstance(merge, list) else merge.replace(' ', '')
            merged.append(model['vocab'][word])
    except (KeyError, TypeError, AttributeError):
        return None
    # tiktoken merges the pair that makes the lowest id first, and begins with single bytes
    if merged != sorted(merged) or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    return ranks


# -------------------------------------------------------------------------------
# Published weights: in and out


def import_weights(src, out, dtype=''):
    """Published weights to a checkpoint, out/ckpt.pt."""
    if dtype and dtype not in DTYPES:
        raise Refusal(f'Unknown dtype {dtype}{nearest(dtype, DTYPES)}', code=2)
    # find the reader
    is_name = re.fullmatch(r'[\w.-]+(/[\w.-]+)?', src)
    if os.path.exists(os.path.join(src, 'config.json')):
        source = read_hugging_face_folder(src)
    elif os.path.exists(os.path.join(src, 'params.json')):
        source = read_meta_folder(src)
    elif os.path.isfile(src) and src.endswith('.pt'):
        source = read_nanogpt(src)
    elif is_name and not os.path.exists(src):
        source = read_hugging_face_folder(download_from_hub(src))
    else:
        raise Refusal(f'{src} must be a folder with config.json or params.json, a .pt file, or the name '
                      'of a model on the Hugging Face hub.')
    # convert and save
    cfg, table, tensors, tokenizer = source
    state = convert(cfg, table, tensors, dtype)
    path = os.path.join(out, 'ckpt.pt')
    save_checkpoint(path, {'config': asdict(cfg), 'model': state, 'tokenizer': tokenizer})
    count = sum(tensor.numel() for tensor in state.values())
    print(f'{path}: {count:,} parameters, {state["embed.weight"].dtype}')


def export_weights(src, to):
    """A checkpoint to a folder that transformers reads. Rows that only pad the vocabulary are left out."""
    model, checkpoint = model_of(src)
    cfg, dtype = model.cfg, model.embed.weight.dtype
    config = hugging_face_config(cfg)
    name = config['architectures'][0]
    tensors = {}
    for ours, part, theirs, how in published_tensors(model, tensor_table(cfg, name)):
        tensor = checkpoint['model'][ours][part]
        if ours in ('embed.weight', 'lm_head.weight'):
            tensor = tensor[:cfg.vocab_size]
        tensors[theirs] = partial(to_published, cfg, how, tensor)
    write_safetensors(os.path.join(to, 'model.safetensors'), tensors, dtype)
    # transformers looks here for the ids that begin and end a text
    tokenizer = checkpoint.get('tokenizer') or {}
    eot = 50256 if tokenizer.get('name') == 'gpt2' else None
    dtype_name = str(dtype).removeprefix('torch.')
    config.update(torch_dtype=dtype_name, dtype=dtype_name, pad_token_id=None,
                  bos_token_id=tokenizer.get('bos'), eos_token_id=tokenizer.get('eot', eot))
    with write_atomically(os.path.join(to, 'config.json')) as file:
        file.write(json.dumps(config, indent=1).encode())
    print(f'{to}: {name} for transformers; a tokenizer is not written')


# -------------------------------------------------------------------------------
# The command


@dataclass
class Options:
    tokenizer: str = ''        # data: bytes, an encoding of tiktoken, or a checkpoint's; '' takes bytes or gpt2
    out: str = ''              # data: a name under data/ or a folder; weights: the folder
    val_fraction: float = 0.1  # of a text: its end, kept for validation
    docs: int = 0              # openwebtext: only so many documents, after the whole download; 0: all
    source: str = ''           # openwebtext: an archive at hand, instead of the download
    dtype: str = ''            # weights: bf16, fp16 or fp32; '' takes the published one, or fp32 if they are mixed
    to: str = ''               # export: the folder for config.json and model.safetensors


DATA_SETS = {'tinyshakespeare': prepare_shakespeare, 'stdlib': prepare_stdlib,
             'openwebtext': prepare_openwebtext}
COMMANDS = {'weights': import_weights, 'export': export_weights}


def main(argv):
    has_source = bool(argv) and argv[0] in COMMANDS
    values = command_line(argv, __doc__, Options, words=2 if has_source else 1)
    name, *source = values.pop('words') or ['tinyshakespeare']
    function = COMMANDS.get(name) or DATA_SETS.get(name) or partial(prepare_text, name)
    try:
        inspect.signature(function).bind(*source, **values)
    except TypeError as error:  # an argument is missing, or has no meaning here
        raise Refusal(f'{name}: {error}; see --help.', code=2) from None
    return function(*source, **values)


if __name__ == '__main__':
    run(main)
